package oncegate

import (
	"context"
	"errors"
	"io"
	"log"
	mathrand "math/rand"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// outOfReachStore is a store that can be out of reach.
type outOfReachStore struct {
	*MemoryStore
	isAway int32
}

func (s *outOfReachStore) failure() error {
	if atomic.LoadInt32(&s.isAway) == 1 {
		return &StoreError{StoreUnavailable, "test", &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}}
	}
	return nil
}

func (s *outOfReachStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if err := s.failure(); err != nil {
		return ClaimReply{}, err
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

func (s *outOfReachStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	if err := s.failure(); err != nil {
		return nil, err
	}
	return s.MemoryStore.Lookup(ctx, id)
}

func (s *outOfReachStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	if err := s.failure(); err != nil {
		return 0, err
	}
	return s.MemoryStore.Complete(ctx, id, token, completion)
}

var oneTenant = []string{"single-tenant"}

func eventually(t *testing.T, what string, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("not in 30 s: " + what)
	}
}

// FailOpen never executes again what this process executes, or has executed and could not store.
func TestFailOpenAndTheAttemptsOfThisProcess(t *testing.T) {
	store := &outOfReachStore{MemoryStore: NewMemoryStore()}
	begun, proceed, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
	executions := int32(0)
	send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		if atomic.AddInt32(&executions, 1) == 1 {
			close(begun)
			<-proceed
		}
		io.WriteString(w, "paid")
	})
	go func() { send("a", ""); close(ended) }()
	eventually(t, "the handler runs", begun)
	atomic.StoreInt32(&store.isAway, 1)
	if got := send("a", ""); got.Code != 409 {
		t.Error("while it runs:", got.Code, got.Body)
	}
	close(proceed)
	eventually(t, "the response", ended)
	if got := send("a", ""); got.Code != 409 || executions != 1 {
		t.Error("before its end is stored:", got.Code, got.Body, executions)
	}
	if got := send("b", ""); got.Code != 200 || executions != 2 {
		t.Error("another key:", got.Code, got.Body, executions)
	}
	atomic.StoreInt32(&store.isAway, 0)
	if err := engine.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		got := send("a", "")
		if got.Code == 200 && got.Header().Get("Idempotent-Replayed") == "true" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(got.Code, got.Body)
		}
	}
}

// wrappingWriter has only Unwrap, as those of outer handlers.
type wrappingWriter struct{ http.ResponseWriter }

func (w wrappingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// flushOfController and hijackOfController do what http.ResponseController does since Go 1.20.
func flushOfController(w http.ResponseWriter) {
	for {
		switch own := w.(type) {
		case interface{ FlushError() error }:
			own.FlushError()
			return
		case http.Flusher:
			own.Flush()
			return
		case interface{ Unwrap() http.ResponseWriter }:
			w = own.Unwrap()
		default:
			return
		}
	}
}

func hijackOfController(w http.ResponseWriter) (io.Closer, error) {
	for {
		switch own := w.(type) {
		case http.Hijacker:
			conn, _, err := own.Hijack()
			return conn, err
		case interface{ Unwrap() http.ResponseWriter }:
			w = own.Unwrap()
		default:
			return nil, errNotSupported
		}
	}
}

func TestControllersBehindAnOuterWriter(t *testing.T) {
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/hijack" {
			conn, err := hijackOfController(w)
			if err != nil {
				t.Error(err)
				return
			}
			conn.Close()
			return
		}
		w.Header().Set("Content-Type", "text/x-own")
		w.WriteHeader(402)
		io.WriteString(w, "declined")
		flushOfController(w)
	})
	inner := h.Config.Handler
	outer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { inner.ServeHTTP(wrappingWriter{w}, r) }))
	outer.Config.ErrorLog = log.New(io.Discard, "", 0)
	defer outer.Close()
	send := func(path string) (int, string, http.Header) {
		request, _ := http.NewRequest("POST", outer.URL+path, nil)
		request.Header.Set("Idempotency-Key", path)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			return 0, "", nil
		}
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		return response.StatusCode, string(body), response.Header
	}
	for i := 0; i < 2; i++ {
		if status, body, header := send("/flush"); status != 402 || body != "declined" || header.Get("Content-Type") != "text/x-own" {
			t.Error("flush", i, status, body, header)
		}
	}
	// net/http itself sends it again when the connection is closed.
	send("/hijack")
	if status, body, _ := send("/hijack"); status != 422 || atomic.LoadInt64(&h.executions) != 2 {
		t.Error("hijack", status, body, h.executions)
	}
}

func TestContextEndsWithItsHandler(t *testing.T) {
	contexts := make(chan context.Context, 1)
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		if r.Context().Err() != nil {
			t.Error("it has ended before")
		}
		contexts <- r.Context()
		if r.URL.Path == "/panics" {
			panic("on purpose")
		}
	})
	for _, path := range []string{"/returns", "/panics"} {
		request, _ := http.NewRequest("POST", h.URL+path, nil)
		request.Header.Set("Idempotency-Key", path)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		eventually(t, "the end of the context, "+path, (<-contexts).Done())
	}
}

// net/http does not wait for a handler whose client has hung up by HTTP/2, nor for one behind a TimeoutHandler.
func TestDrainWaitsForHandlers(t *testing.T) {
	for _, isHTTP2 := range []bool{false, true} {
		begun, proceed := make(chan struct{}), make(chan struct{})
		ended := int32(0)
		h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
			close(begun)
			<-proceed
			atomic.StoreInt32(&ended, 1)
		})
		handler := h.Config.Handler
		if !isHTTP2 {
			handler = http.TimeoutHandler(handler, 20*time.Millisecond, "slow")
		}
		outer := httptest.NewUnstartedServer(handler)
		outer.EnableHTTP2 = isHTTP2
		outer.StartTLS()
		ctx, cancel := context.WithCancel(context.Background())
		request, _ := http.NewRequestWithContext(ctx, "POST", outer.URL, nil)
		request.Header.Set("Idempotency-Key", "a")
		answered := make(chan struct{})
		go func() {
			if response, err := outer.Client().Do(request); err == nil {
				response.Body.Close()
			}
			close(answered)
		}()
		eventually(t, "the handler runs", begun)
		if isHTTP2 {
			cancel()
		}
		eventually(t, "the client has gone", answered)
		drained := make(chan struct{})
		go func() {
			defer close(drained)
			if err := h.engine.Drain(context.Background()); err != nil {
				t.Error(err)
			}
			if atomic.LoadInt32(&ended) == 0 {
				t.Errorf("HTTP/2 %v: Drain returned while the handler ran", isHTTP2)
			}
		}()
		select {
		case <-drained:
		case <-time.After(50 * time.Millisecond):
		}
		close(proceed)
		eventually(t, "Drain", drained)
		cancel()
		outer.Close()
	}
}

// completeInTest is CompleteIn in a transaction that is rolled back, or was committed before.
func completeInTest(ctx context.Context) {
	p := AttemptFrom(ctx).permit
	p.mu.Lock()
	p.inTransaction = true
	p.mu.Unlock()
}

func TestHandlerThatIsInDoubtAfterARollback(t *testing.T) {
	executions := 0
	send, _ := server(t, NewMemoryStore(), Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		executions++
		completeInTest(r.Context())
		w.Header().Set("Idempotency-Store", "unknown")
		w.WriteHeader(502)
	})
	if got := send("a", ""); got.Code != 502 {
		t.Error(got.Code, got.Body)
	}
	if got := send("a", ""); !strings.Contains(got.Body.String(), "outcome-unknown") || executions != 1 {
		t.Error(got.Code, got.Body, executions)
	}
}

func TestFunctionWhoseTransactionWasRolledBack(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 2; i++ {
		got, err := Do(context.Background(), engine, "charge", "a", 5, func(_ context.Context, attempt *Attempt) (string, error) {
			if i == 0 {
				attempt.permit.inTransaction = true
			}
			return "receipt", nil
		})
		if i == 0 && (got != "" || !errors.Is(err, ErrRolledBack)) || i == 1 && (got != "receipt" || err != nil) {
			t.Error(i, got, err)
		}
	}
}

func TestFunctionThatWasOvertakenByATombstone(t *testing.T) {
	store := NewMemoryStore()
	engine, err := NewEngine(store, EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Do(context.Background(), engine, "charge", "a", 5, func(ctx context.Context, attempt *Attempt) (string, error) {
		store.Complete(ctx, attempt.Record(), attempt.Token(), Completion{Tombstone, nil, time.Hour})
		return "receipt", nil
	})
	if !errors.Is(err, ErrUnreplayable) {
		t.Error(err)
	}
}

func TestStreamOfARolledBackTransaction(t *testing.T) {
	executions := 0
	send, _ := server(t, NewMemoryStore(), Settings{Scope: oneTenant, MaxResponseBody: 10}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		if executions++; executions == 1 {
			completeInTest(r.Context())
		}
		for i := 0; i < 10; i++ {
			if _, err := io.WriteString(w, "paid "); err != nil {
				t.Error(err)
			}
			w.(http.Flusher).Flush()
		}
	})
	if got := send("a", ""); got.Code != 500 || !strings.Contains(got.Body.String(), "handler-failed") || strings.Contains(got.Body.String(), "paid") {
		t.Error(got.Code, got.Body)
	}
	if got := send("a", ""); got.Code != 200 || got.Body.String() != strings.Repeat("paid ", 10) || executions != 2 {
		t.Error(got.Code, got.Body, executions)
	}
}

// gin's Stream waits for CloseNotify only.
func TestCloseNotifyOfAStream(t *testing.T) {
	defer func(before time.Duration) { streamGrace = before }(streamGrace)
	streamGrace = 20 * time.Millisecond
	ended := make(chan struct{})
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		//lint:ignore SA1019 gin uses it.
		<-w.(http.CloseNotifier).CloseNotify()
		close(ended)
	})
	request, _ := http.NewRequest("POST", h.URL, nil)
	request.Header.Set("Idempotency-Key", "a")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		h.CloseClientConnections()
		t.Fatal("the handler did not end")
	}
}

func TestAnAttemptIsNotFencedByItsOwnCommit(t *testing.T) {
	store := NewMemoryStore()
	send, _ := server(t, store, Settings{Scope: oneTenant, Lease: 150 * time.Millisecond}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		attempt := AttemptFrom(r.Context())
		completeInTest(r.Context())
		store.Complete(r.Context(), attempt.Record(), attempt.Token(), Completion{CompletionState(stateAwaited), nil, time.Hour})
		select {
		case <-attempt.Fenced():
			t.Error("it is")
		case <-time.After(300 * time.Millisecond):
		}
		io.WriteString(w, "paid")
	})
	for i := 0; i < 2; i++ {
		if got := send("a", ""); got.Code != 200 || got.Body.String() != "paid" {
			t.Error(i, got.Code, got.Body)
		}
	}
}

// A body that a handler in front has read would count as empty, and another amount as the same request.
func TestBodyThatAHandlerInFrontHasRead(t *testing.T) {
	warnings := &logged{}
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: warnings})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Scope: oneTenant})
	if err != nil {
		t.Fatal(err)
	}
	protected := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid "+r.FormValue("amount")) }))
	outer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/form":
			r.FormValue("_method")
		case "/read":
			io.ReadAll(r.Body)
		}
		protected.ServeHTTP(w, r)
	}))
	defer outer.Close()
	for _, c := range []struct {
		path, body string
		isChunked  bool
		status     int
	}{{"/form", "amount=1", false, 400}, {"/form", "amount=1", true, 400}, {"/read", "amount=1", false, 400}, {"/", "amount=1", false, 200}, {"/form", "", false, 200}} {
		request, _ := http.NewRequest("POST", outer.URL+c.path, strings.NewReader(c.body))
		if c.isChunked {
			request.ContentLength, request.Body = -1, io.NopCloser(struct{ io.Reader }{strings.NewReader(c.body)})
		}
		request.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		request.Header.Set("Idempotency-Key", c.path)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != c.status || c.status == 400 && !strings.Contains(string(body), "request-incomplete") {
			t.Errorf("%+v: %d %s", c, response.StatusCode, body)
		}
	}
	if strings.Count(warnings.String(), "has read their body") != 1 {
		t.Error(warnings)
	}
}

// Before Go 1.20 every process has the same numbers of math/rand, so clients that fail together would retry together.
func TestPausesDifferBetweenProcesses(t *testing.T) {
	unseeded, isSame := mathrand.New(mathrand.NewSource(1)), true
	sending := &sending{Client: &Client{Backoff: time.Second}, attempts: 1}
	for i := 0; i < 5; i++ {
		if sending.pause() != time.Duration(unseeded.Int63n(int64(time.Second)+1)) {
			isSame = false
		}
	}
	if isSame || jitter(0) != 0 || jitter(-1) != 0 {
		t.Error("the pauses are those of an unseeded source")
	}
}

// A key whose earlier attempt was abandoned stays claimed, so the client is not told that it is free.
func TestHandlerThatFailsAfterAnAbandonedAttempt(t *testing.T) {
	store := NewMemoryStore()
	now := time.Now()
	store.now = func() time.Time { return now }
	var id RecordID
	send, _ := server(t, store, Settings{Scope: oneTenant, ServerErrors: "release", OnAbandoned: Reexecute, Wait: -1,
		Panicked: func(*http.Request, interface{}, []byte) {}}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		id = AttemptFrom(r.Context()).Record()
		panic("on purpose")
	})
	if got := send("a", ""); !strings.Contains(got.Body.String(), "handler-failed") {
		t.Error(got.Code, got.Body)
	}
	claim := Claim{Fingerprint: store.records[id].fingerprint, Attempt: AttemptID{9}, Lease: time.Second, Retention: time.Hour, OnAbandoned: Reexecute}
	if reply, err := store.Claim(context.Background(), id, claim); err != nil || reply.Outcome != Execute {
		t.Fatal(reply, err)
	}
	now = now.Add(time.Minute)
	if got := send("a", ""); !strings.Contains(got.Body.String(), "request-in-progress") {
		t.Error(got.Code, got.Body)
	}
}

// The search for a lost claim leaves the record of this process alone, also if the lease of its attempt has ended meanwhile.
func TestLostClaimWhileThisProcessExecutes(t *testing.T) {
	store, ctx, now := NewMemoryStore(), context.Background(), time.Now()
	store.now = func() time.Time { return now }
	engine, err := NewEngine(store, EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	id, lost := RecordID{1}, Claim{Attempt: AttemptID{1}, Lease: time.Minute, Retention: time.Hour, OnAbandoned: Park}
	own := lost
	own.Attempt = AttemptID{2}
	reply, err := store.Claim(ctx, id, own)
	if err != nil {
		t.Fatal(err)
	}
	permit := engine.newPermit(id, reply, policy{lease: own.Lease, retention: own.Retention}, readClocks())
	now = now.Add(2 * time.Minute)
	noted := engine.noteLost(id, lost)
	noted.mu.Unlock()
	if isSettled, err := engine.settleLost(id, noted); isSettled || err != nil {
		t.Error(isSettled, err)
	}
	if state := store.records[id].state; state != stateInProgress {
		t.Error(state)
	}
	if end := permit.complete(Tombstone, nil); end != settleDone {
		t.Error(end)
	}
}

// A record with two ends that are sent again is unsettled until both are stored.
func TestTwoUnsettledEndsOfARecord(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	id := RecordID{1}
	first, _ := engine.noteUnsettled(id, 5)
	second, fits := engine.noteUnsettled(id, maxDeferredBytes)
	if first(); !engine.isOwned(id) || fits || engine.deferredBytes != 0 {
		t.Error(engine.unsettled, fits, engine.deferredBytes)
	}
	if second(); engine.isOwned(id) || len(engine.unsettled) != 0 || engine.deferredBytes != 0 {
		t.Error(engine.unsettled, engine.deferredBytes)
	}
}
