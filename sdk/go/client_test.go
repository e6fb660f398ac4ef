package oncegate

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func quickClient() *Client {
	return &Client{Backoff: time.Millisecond, AttemptTimeout: 300 * time.Millisecond}
}

// script answers the nth request with the nth step.
func script(t *testing.T, steps ...http.HandlerFunc) (url string, keys func() []string) {
	var n int64
	var mu sync.Mutex
	var seen []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		mu.Lock()
		seen = append(seen, r.Header.Get("Idempotency-Key")+" "+string(body))
		mu.Unlock()
		at := atomic.AddInt64(&n, 1) - 1
		if int(at) >= len(steps) {
			at = int64(len(steps) - 1)
		}
		steps[at](w, r)
	}))
	t.Cleanup(server.Close)
	return server.URL, func() []string {
		mu.Lock()
		defer mu.Unlock()
		return append([]string(nil), seen...)
	}
}

func status(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(code) }
}

func drop(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }

func hang(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

func newPost(url string) *http.Request {
	request, _ := http.NewRequest("POST", url, strings.NewReader("body"))
	return request
}

func TestClientSendsTheSameRequestAgain(t *testing.T) {
	url, keys := script(t, drop, status(503), hang, status(201))
	outcome, err := quickClient().Do(newPost(url))
	if err != nil || outcome.Verdict != Done || outcome.Attempts != 4 {
		t.Fatalf("%+v %v", outcome, err)
	}
	for _, seen := range keys() {
		if seen != outcome.Key+" body" {
			t.Errorf("%q, want %q", seen, outcome.Key+" body")
		}
	}
}

func TestClientEnds(t *testing.T) {
	closed, _ := net.Listen("tcp", "127.0.0.1:0")
	refused := "http://" + closed.Addr().String()
	closed.Close()
	afterTwoMinutes := func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "120")
		w.WriteHeader(503)
	}
	for _, c := range []struct {
		name     string
		steps    []http.HandlerFunc
		url      string
		change   func(*Client)
		verdict  Verdict
		kind     SendErrorKind
		inEffect bool
		attempts int
	}{
		{name: "done", steps: []http.HandlerFunc{status(200)}, verdict: Done, attempts: 1},
		{name: "refused", steps: []http.HandlerFunc{status(422)}, verdict: Refused, attempts: 1},
		{name: "turned away", steps: []http.HandlerFunc{status(401)}, verdict: TurnedAway, attempts: 1},
		{name: "a refusal in doubt", steps: []http.HandlerFunc{drop, status(401)}, kind: TurnedAwayInDoubt, inEffect: true, attempts: 2},
		{name: "a contested refusal", steps: []http.HandlerFunc{drop, status(422)}, kind: TurnedAwayInDoubt, inEffect: true, attempts: 6},
		{name: "no connection", url: refused, kind: AttemptsUsedUp, attempts: 6},
		{name: "lost replies", steps: []http.HandlerFunc{drop}, kind: AttemptsUsedUp, inEffect: true, attempts: 6},
		{name: "come back later", steps: []http.HandlerFunc{afterTwoMinutes}, kind: ComeBackLater, inEffect: true, attempts: 1},
		{name: "without keys", steps: []http.HandlerFunc{status(503)}, change: func(c *Client) { c.WithoutKeys = true }, kind: OutcomeIsUnknown, inEffect: true, attempts: 1},
		{name: "server errors are final", steps: []http.HandlerFunc{status(500)}, change: func(c *Client) { c.ServerErrors = "final" }, verdict: Failed, attempts: 1},
		{name: "no budget", steps: []http.HandlerFunc{drop}, change: func(c *Client) { c.Budget = &RetryBudget{spent: budgetTokens - 7} }, kind: BudgetUsedUp, inEffect: true, attempts: 2},
		{name: "deadline", steps: []http.HandlerFunc{drop}, change: func(c *Client) { c.Deadline, c.Backoff = time.Millisecond, time.Hour; c.MaxBackoff = time.Hour }, kind: DeadlineReached, inEffect: true, attempts: 1},
		{name: "too large", steps: []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "0123456789") }},
			change: func(c *Client) { c.MaxResponseBytes = 5; c.MaxAttempts = 2 }, kind: AttemptsUsedUp, inEffect: true, attempts: 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			url := c.url
			if url == "" {
				url, _ = script(t, c.steps...)
			}
			client := quickClient()
			if c.change != nil {
				c.change(client)
			}
			outcome, err := client.Do(newPost(url))
			if c.verdict != "" {
				if err != nil || outcome.Verdict != c.verdict || outcome.Attempts != c.attempts {
					t.Fatalf("%+v %v", outcome, err)
				}
				return
			}
			var own *SendError
			if !errors.As(err, &own) || own.Kind != c.kind || own.MayHaveTakenEffect != c.inEffect || own.Attempts != c.attempts {
				t.Fatalf("%+v %+v", outcome, own)
			}
		})
	}
}

func TestClientIsInterrupted(t *testing.T) {
	url, _ := script(t, hang)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(50*time.Millisecond, cancel)
	_, err := quickClient().Do(newPost(url).WithContext(ctx))
	var own *SendError
	if !errors.As(err, &own) || own.Kind != Interrupted || !own.MayHaveTakenEffect || !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
}

func TestTransport(t *testing.T) {
	url, keys := script(t, drop, status(201))
	client := &http.Client{Transport: &Transport{Client: quickClient(), NewKeys: true}}
	response, err := client.Post(url, "text/plain", strings.NewReader("x"))
	if err != nil || response.StatusCode != 201 || len(keys()) != 2 || keys()[0] != keys()[1] {
		t.Fatal(response, err, keys())
	}
	// Without a key, a request is sent once.
	url, keys = script(t, drop)
	if _, err := (&http.Client{Transport: &Transport{Client: quickClient()}}).Post(url, "text/plain", strings.NewReader("x")); err == nil || len(keys()) != 1 {
		t.Fatal(err, keys())
	}
}

func TestRetryAfter(t *testing.T) {
	now := time.Date(2026, 11, 24, 18, 0, 0, 0, time.UTC)
	for value, want := range map[string]time.Duration{"": 0, "7": 7 * time.Second, "x": 0, "-1": 0,
		"Tue, 24 Nov 2026 18:00:09 GMT": 9 * time.Second, "Tue, 24 Nov 2026 17:00:00 GMT": 0} {
		if got := retryAfterOf(http.Header{"Retry-After": {value}}, now); got != want {
			t.Errorf("%q: %s, want %s", value, got, want)
		}
	}
	header := http.Header{"Retry-After": {"Tue, 24 Nov 2026 18:00:09 GMT"}, "Date": {"Tue, 24 Nov 2026 18:00:05 GMT"}}
	if got := retryAfterOf(header, now); got != 4*time.Second {
		t.Error(got)
	}
}

// closer notes if a body was closed.
type closer struct {
	io.Reader
	closed bool
}

func (c *closer) Close() error {
	c.closed = true
	return nil
}

func TestClientSendsNothingWithoutAValidKey(t *testing.T) {
	const empty = "the key is empty; give 1 to 255 characters, such as a UUID"
	const character = "the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put the key in quotes"
	url, keys := script(t, status(201))
	for _, c := range []struct {
		values []string
		text   string
	}{
		{[]string{""}, empty}, {[]string{" \t "}, empty}, {[]string{`""`}, empty}, {[]string{`"  "`}, empty},
		{[]string{"a\r\nb"}, character}, {[]string{"a b"}, character}, {[]string{"a, b"}, character}, {[]string{"\u00e9"}, character}, {[]string{`"a`}, character}, {[]string{`"a";p`}, character},
		{[]string{strings.Repeat("x", 256)}, "the key has 256 characters; at most 255 are allowed"},
		{[]string{"null"}, `the key is the text "null", as of a missing value; give the key of the intent`}, {[]string{`"None"`}, `the key is the text "None", as of a missing value; give the key of the intent`}, {[]string{"<nil>"}, `the key is the text "<nil>", as of a missing value; give the key of the intent`}, {[]string{"NaN"}, `the key is the text "NaN", as of a missing value; give the key of the intent`},
		{[]string{"a", "b"}, "the request has more than one key; give one key"},
	} {
		for _, name := range []string{"Idempotency-Key", "idempotency-key"} {
			body := &closer{Reader: strings.NewReader("x")}
			request, _ := http.NewRequest("POST", url, body)
			request.Header[name] = c.values
			_, err := (&Transport{Client: quickClient(), NewKeys: true}).RoundTrip(request)
			var own *SendError
			if !errors.As(err, &own) || own.Kind != Unsendable || own.MayHaveTakenEffect || own.Attempts != 0 || own.Err.Error() != c.text {
				t.Errorf("%q: %v", c.values, err)
			}
			if !body.closed {
				t.Errorf("%q: the body stays open", c.values)
			}
		}
	}
	if len(keys()) != 0 {
		t.Errorf("sent: %q", keys())
	}
	for _, key := range []string{"k", strings.Repeat("x", 255), `"a, b"`, `"a\"b"`, `"` + strings.Repeat("x", 255) + `"`} {
		for _, name := range []string{"Idempotency-Key", "idempotency-key"} {
			url, keys := script(t, status(503), status(201))
			request := newPost(url)
			request.Header[name] = []string{key}
			outcome, err := quickClient().Do(request)
			if err != nil || outcome.Key != key || len(keys()) != 2 || keys()[0] != key+" body" || keys()[1] != key+" body" {
				t.Errorf("%q: %v %v %q", key, outcome, err, keys())
			}
		}
	}
}

func TestClientDoesNotRetryWhatCannotBeSent(t *testing.T) {
	url, keys := script(t, status(201))
	for name, change := range map[string]func(*http.Request){
		"no address":       func(r *http.Request) { r.URL.Host = "" },
		"scheme":           func(r *http.Request) { r.URL.Scheme = "htp" },
		"method":           func(r *http.Request) { r.Method = "PO ST" },
		"name of a field":  func(r *http.Request) { r.Header["a b"] = []string{"x"} },
		"value of a field": func(r *http.Request) { r.Header.Set("X-Own", "a\r\nb") },
		"a cut body":       func(r *http.Request) { r.ContentLength = 10 },
	} {
		body := &closer{Reader: strings.NewReader("body")}
		request, _ := http.NewRequest("POST", url, body)
		change(request)
		_, err := quickClient().Do(request)
		var own *SendError
		if !errors.As(err, &own) || own.Kind != Unsendable || own.MayHaveTakenEffect || own.Attempts != 0 || !body.closed {
			t.Errorf("%s: %v, closed: %v", name, err, body.closed)
		}
	}
	if len(keys()) != 0 {
		t.Errorf("sent: %q", keys())
	}
}

func TestClientRefusesWrongSettings(t *testing.T) {
	url, keys := script(t, status(201))
	for _, client := range []*Client{
		{Backoff: -5}, {MaxBackoff: -1}, {AttemptTimeout: -1}, {Deadline: 25 * time.Hour}, {MaxRetryAfter: -1}, {MaxAttempts: -1}, {MaxAttempts: 1001},
		{MaxResponseBytes: -1}, {ServerErrors: "agian"}, {KeyHeader: "a b"},
	} {
		if client.Check() == nil {
			t.Errorf("accepted: %+v", client)
		}
		var own *SendError
		if _, err := client.Do(newPost(url)); !errors.As(err, &own) || own.Kind != Unsendable || own.Err.Error() != client.Check().Error() {
			t.Errorf("%+v: %v", client, err)
		}
	}
	if err := (&Client{}).Check(); err != nil || len(keys()) != 0 {
		t.Error(err, keys())
	}
}

type followingTransport struct{ client *http.Client }

func (f followingTransport) RoundTrip(r *http.Request) (*http.Response, error) { return f.client.Do(r) }

func TestClientNoticesATransportThatFollowsRedirects(t *testing.T) {
	url, _ := script(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			w.Header().Set("Location", "/login")
			w.WriteHeader(302)
		}
	})
	client := quickClient()
	client.Transport = followingTransport{&http.Client{}}
	outcome, err := client.Do(newPost(url))
	var own *SendError
	if !errors.As(err, &own) || own.Kind != OutcomeIsUnknown || !own.MayHaveTakenEffect || own.Attempts != 1 {
		t.Fatal(outcome, err)
	}
}

// Code that has an http.Client tells time-outs from other failures by net.Error.
func TestTimeoutsOfTheTransport(t *testing.T) {
	release := make(chan struct{})
	slow := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		select {
		case <-release:
		case <-r.Context().Done():
		}
	}))
	defer slow.Close()
	defer close(release)
	isTimeout := func(client *http.Client, ctx context.Context, url string) bool {
		request, _ := http.NewRequestWithContext(ctx, "POST", url, strings.NewReader("x"))
		_, err := client.Do(request)
		var own net.Error
		if err == nil || !errors.As(err, &own) {
			t.Fatal(err)
		}
		return own.Timeout()
	}
	transport := &Transport{NewKeys: true, Client: &Client{Backoff: time.Millisecond, MaxBackoff: time.Millisecond, MaxAttempts: 2}}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if !isTimeout(&http.Client{Transport: transport}, ctx, slow.URL) {
		t.Error("the deadline of the request is no time-out")
	}
	if !isTimeout(&http.Client{Transport: transport, Timeout: 20 * time.Millisecond}, context.Background(), slow.URL) {
		t.Error("the time-out of the http.Client is none")
	}
	ended, end := context.WithCancel(context.Background())
	end()
	if isTimeout(&http.Client{Transport: transport}, ended, slow.URL) {
		t.Error("a cancelled request is a time-out")
	}
	if isTimeout(&http.Client{Transport: transport}, context.Background(), "http://127.0.0.1:1") {
		t.Error("a refused connection is a time-out")
	}
}
