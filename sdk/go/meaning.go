package oncegate

// signalRule is a signal, and the part of a response in which it is found.
type signalRule struct {
	Signal string
	At     struct {
		Header, Value, Member, Name, Problem string
		UnlessStatus                         int `json:"unless_status"`
	}
}

// problemStatuses are the statuses that a refusal after which nothing was executed has.
type problemStatuses struct {
	Problem    string
	HTTP, GRPC []int
}
