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
