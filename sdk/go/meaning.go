package oncegate

import (
	"encoding/json"
	"net/http"
	"strings"
)

// signalRule is a signal, and the part of a response in which it is found. The first rule that applies counts.
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

// meaning is what a response means to a client that sends a request again under one key, in the words of the shared vectors.
type meaning string

const (
	meansDone         meaning = "done"
	meansFixRequest   meaning = "refused fix-request"
	meansNewKey       meaning = "refused new-key"
	meansStop         meaning = "refused stop"
	meansTurnedAway   meaning = "turned-away"
	meansFailed       meaning = "failed"
	meansUnreplayable meaning = "unreplayable"
	// An earlier attempt may have taken effect, and this response tells nothing about it.
	meansInDoubt meaning = "turned-away in-doubt"
	// The operation refused this attempt, and an earlier one may be the reason. Sending again may get its response.
	meansContested  meaning = "contested"
	meansAgain      meaning = "again nothing" // it was not processed
	meansAgainMaybe meaning = "again maybe"   // it may have taken effect
	meansInProgress meaning = "again in-progress"
	meansUnknown    meaning = "unknown"
)

// protection is that of a request that is sent more than once.
type protection string

const (
	keyedRequest      protection = "keyed"
	safeRequest       protection = "safe"
	repeatableRequest protection = "repeatable"
	onceRequest       protection = "once"
)

// judging is the knowledge about a request when its response arrives.
type judging struct {
	protection protection
	// serverErrors is again, final or unknown.
	serverErrors string
	// inDoubt: an earlier attempt may have taken effect.
	inDoubt bool
}

// reading is a meaning as if the response were the first one.
type reading struct {
	meaning meaning
	// kind is "" if the meaning does not depend on earlier attempts, "refused" if the operation refused, "before" if something before it did.
	kind string
}

// judge returns the meaning of a response. No other function judges a status.
func judge(asked judging, status int, header http.Header, body []byte) meaning {
	read := readMeaning(asked, status, header, body)
	// A safe request has no effect, so it is never in doubt.
	switch inDoubt := asked.inDoubt && asked.protection != safeRequest; {
	case read.kind == "" || !inDoubt:
		return read.meaning
	case read.kind == "refused" && asked.protection == keyedRequest:
		return meansContested
	}
	return meansInDoubt
}

func readMeaning(asked judging, status int, header http.Header, body []byte) reading {
	plain := func(m meaning) reading { return reading{m, ""} }
	before := func(m meaning) reading { return reading{m, "before"} }
	refused := func(m meaning) reading { return reading{m, "refused"} }
	problem, ownRetry, isMarked := ownRefusal(header)
	isOwn, isCall := refusalForm(problem, isMarked, status, header, body)
	code := status
	if isCall {
		code = 502
	}
	keyed := asked.protection == keyedRequest
	switch {
	case code < 300 || code == 303:
		return plain(meansDone)
	case code == 301 || code == 302 || code == 304:
		if asked.protection == safeRequest {
			return plain(meansDone)
		}
		// Old services redirect after the operation. Gateways redirect instead of it.
		return plain(meansUnknown)
	case code < 400:
		return before(meansTurnedAway)
	}
	hint := readHint(problem, ownRetry, isMarked, status, header, body)
	switch {
	case hint.signal == "Replayed" && keyed && code >= 500:
		return plain(meansFailed)
	case hint.signal == "Replayed" && keyed, hint.signal == "Accepted" && keyed && code < 500:
		return plain(meansFixRequest)
	}
	again := meansAgainMaybe
	switch {
	case hint.signal == "InProgress":
		again = meansInProgress
	case hint.signal == "NotExecuted" && (isOwn || keyed && hint.hasUsualStatus), code == 425, code == 429:
		again = meansAgain
	}
	switch retry := hint.retry; {
	case retry == "same-key":
		return plain(again)
	case retry != "" && hint.signal == "ScopeUnavailable" && (code < 500 || isOwn):
		return before(meansTurnedAway)
	case retry == "stop":
		switch {
		case hint.signal == "ReplayUnavailable":
			return plain(meansUnreplayable)
		case hint.signal == "OutcomeUnknown" || code >= 500:
			return plain(meansUnknown)
		}
		return before(meansStop)
	case retry != "" && isAboutTheWay(code):
		return before(meansTurnedAway)
	case retry != "" && (code < 500 || isOwn):
		return before(meaning("refused " + retry))
	}
	switch {
	case keyed && (hint.signal == "InProgress" || hint.signal == "Again"):
		return plain(again)
	case keyed && hint.signal == "ReplayUnavailable":
		return plain(meansUnreplayable)
	case keyed && hint.signal == "KeyReused" && code < 500:
		return before(meansNewKey)
	case keyed && hint.signal == "ScopeUnavailable" && code < 500:
		return before(meansTurnedAway)
	case hint.signal == "OutcomeUnknown":
		return plain(meansUnknown)
	}
	switch header.Get("Stripe-Should-Retry") {
	case "true":
		return plain(again)
	case "false":
		switch {
		case isAboutTheWay(code):
			return before(meansTurnedAway)
		case code < 500:
			return refused(meansStop)
		case asked.serverErrors != "final":
			return plain(meansUnknown)
		}
		return plain(meansFailed)
	}
	switch {
	case code == 408:
		return plain(meansAgainMaybe)
	case (code == 409 || code == 423) && keyed && !hint.isNamed:
		// If the client reported a refusal, the caller would send the request under a new key.
		return plain(meansInProgress)
	case code == 425 || code == 429:
		return plain(meansAgain)
	case isAboutTheWay(code):
		return before(meansTurnedAway)
	case code == 414 || code == 415:
		return before(meansFixRequest)
	case code < 500:
		return refused(meansFixRequest)
	case code >= 502 && code <= 504:
		return plain(again)
	case asked.serverErrors == "final":
		return plain(meansFailed)
	case asked.protection == onceRequest || asked.serverErrors == "unknown":
		return plain(meansUnknown)
	}
	return plain(again)
}

// isAboutTheWay: statuses about the path to the operation: credentials, routes, gateways, versions, limits.
func isAboutTheWay(code int) bool {
	switch code {
	case 401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511:
		return true
	}
	return false
}

func knownAdvice(word string) string {
	switch word {
	case "same-key", "new-key", "fix-request", "stop":
		return word
	}
	return ""
}

// ownRefusal reads the field in which Oncegate names the condition of a refusal: refused; problem=NAME; retry=WORD.
func ownRefusal(header http.Header) (problem, retry string, ok bool) {
	values := header.Values("Idempotency-Status")
	// A gateway may have joined two fields.
	if len(values) != 1 || strings.Contains(values[0], ",") {
		return "", "", false
	}
	parts := strings.Split(values[0], ";")
	if strings.TrimSpace(parts[0]) != "refused" {
		return "", "", false
	}
	valueOf := func(name string) string {
		for _, part := range parts[1:] {
			if own := strings.TrimSpace(part); strings.HasPrefix(own, name+"=") {
				return own[len(name)+1:]
			}
		}
		return ""
	}
	problem = valueOf("problem")
	return problem, knownAdvice(valueOf("retry")), problem != ""
}

func statusesOf(problem string) problemStatuses {
	for _, row := range theContract().ProblemStatuses {
		if row.Problem == problem {
			return row
		}
	}
	return problemStatuses{}
}

func hasInt(list []int, value int) bool {
	for _, own := range list {
		if own == value {
			return true
		}
	}
	return false
}

// refusalForm compares a response with the refusal that its header names: a service may pass the header on from another API. isCall is true
// for a failed call of gRPC or MCP, whose status is that of a success.
func refusalForm(problem string, isMarked bool, status int, header http.Header, body []byte) (isOwn, isCall bool) {
	if !isMarked {
		return false, false
	}
	if status < 200 || status > 299 {
		return hasInt(statusesOf(problem).HTTP, status), false
	}
	contentType := asciiLower(header.Get("Content-Type"))
	if strings.HasPrefix(contentType, "application/grpc") {
		code, ok := grpcCode(header)
		if !ok || code == 0 {
			return false, false
		}
		return hasInt(statusesOf(problem).GRPC, code), true
	}
	message, ok := problemBody(header, body)
	if !ok {
		return false, false
	}
	result, isResult := message["result"].(map[string]interface{})
	failure, isError := message["error"].(map[string]interface{})
	isFailed := isError || isResult && result["isError"] == true
	if _, isRPC := message["jsonrpc"]; !isRPC || !isFailed {
		return false, false
	}
	named := ""
	if meta, ok := result["_meta"].(map[string]interface{}); ok {
		named, _ = meta["oncegate/problem"].(string)
		if own, ok := meta["oncegate/problem"].(map[string]interface{}); ok {
			named, _ = own["type"].(string)
		}
	}
	if data, ok := failure["data"].(map[string]interface{}); ok && named == "" {
		named, _ = data["type"].(string)
	}
	return named != "" && endOfURI(named) == problem, true
}

func grpcCode(header http.Header) (code int, ok bool) {
	text := header.Get("Grpc-Status")
	for i := 0; i < len(text); i++ {
		if !isDigit(text[i]) || i > 3 {
			return 0, false
		}
		code = code*10 + int(text[i]-'0')
	}
	return code, text != ""
}

// responseHint are the hints in a response, beyond its status.
type responseHint struct {
	signal, retry           string
	isNamed, hasUsualStatus bool
}

var (
	nameMembers = []string{"type", "code", "name", "error.code", "error.type"}
	codeMembers = []string{"code", "error.code", "errorCode", "__type", "details[].issue", "errors[].code", "error.data.type"}
	// The problems whose codes count, too: no other service uses these words for something else.
	codedProblems = setOf("outcome-unknown", "record-corrupt", "host-differs", "replay-unavailable")
)

func readHint(problem, ownRetry string, isMarked bool, status int, header http.Header, text []byte) responseHint {
	rules := theContract().Signals
	if isMarked {
		hint := responseHint{retry: ownRetry, isNamed: true}
		for _, rule := range rules {
			if rule.At.Problem == problem {
				hint.signal = rule.Signal
				break
			}
		}
		return hint
	}
	body, _ := problemBody(header, text)
	var hint responseHint
	if word, ok := body["retry"].(string); ok {
		hint.retry = knownAdvice(word)
	}
	for _, rule := range rules {
		if rule.applies(status, header, body) {
			hint.signal = rule.Signal
			hint.hasUsualStatus = rule.At.Problem != "" && hasInt(statusesOf(rule.At.Problem).HTTP, status)
			break
		}
	}
	for _, path := range nameMembers {
		hint.isNamed = hint.isNamed || anyMember(body, path, func(name string) bool { return name != "" && name != "about:blank" })
	}
	return hint
}

// problemBody is the JSON object in a body that is short enough for a problem.
func problemBody(header http.Header, text []byte) (map[string]interface{}, bool) {
	essence, _, _ := strings.Cut(header.Get("Content-Type"), ";")
	essence = asciiLower(strings.TrimSpace(essence))
	isJSON := essence == "application/json" || strings.HasSuffix(essence, "+json") || strings.HasPrefix(essence, "application/x-amz-json-")
	if !isJSON || len(text) > 64<<10 {
		return nil, false
	}
	decoder := json.NewDecoder(strings.NewReader(string(text)))
	decoder.UseNumber()
	var body map[string]interface{}
	if decoder.Decode(&body) != nil || decoder.More() {
		return nil, false
	}
	return body, body != nil
}

func (r *signalRule) applies(status int, header http.Header, body map[string]interface{}) bool {
	at := r.At
	switch {
	case at.Header != "" && at.Value != "":
		values := header.Values(at.Header)
		return len(values) > 0 && strings.EqualFold(values[0], at.Value)
	case at.Header != "":
		return status != at.UnlessStatus && len(header.Values(at.Header)) > 0
	case at.Member != "":
		return anyMember(body, at.Member, func(value string) bool { return value == at.Value })
	case at.Name != "":
		return anyOf(body, nameMembers, func(value string) bool { return value == at.Name || endOfURI(value) == at.Name })
	}
	isOurs := anyMember(body, "type", func(uri string) bool { return uri == "urn:oncegate:problem:"+at.Problem })
	isNamed := anyOf(body, append([]string{"error.data.type"}, nameMembers...), func(value string) bool { return endOfURI(value) == at.Problem }) &&
		(r.Signal != "NotExecuted" || body["retry"] == "same-key")
	plain := func(text string) string { return asciiLower(strings.NewReplacer("-", "", "_", "").Replace(text)) }
	hasCode := codedProblems[at.Problem] && anyOf(body, codeMembers, func(code string) bool { return plain(endOfURI(code)) == plain(at.Problem) })
	return isOurs || isNamed || hasCode
}

// endOfURI is the last part of the URI of a problem, which is its name.
func endOfURI(uri string) string { return uri[strings.LastIndexAny(uri, ":/#")+1:] }

func anyOf(body map[string]interface{}, paths []string, passes func(string) bool) bool {
	for _, path := range paths {
		if anyMember(body, path, passes) {
			return true
		}
	}
	return false
}

// anyMember reports if a text or number at this path passes. [] after a name means each element of a list.
func anyMember(value interface{}, path string, passes func(string) bool) bool {
	if path == "" {
		switch value := value.(type) {
		case string:
			return passes(value)
		case json.Number:
			return passes(value.String())
		}
		return false
	}
	object, ok := value.(map[string]interface{})
	if !ok {
		return false
	}
	first, rest, _ := strings.Cut(path, ".")
	if name, isList := cutSuffix(first, "[]"); isList {
		elements, _ := object[name].([]interface{})
		for _, element := range elements {
			if anyMember(element, rest, passes) {
				return true
			}
		}
		return false
	}
	member, ok := object[first]
	return ok && anyMember(member, rest, passes)
}
