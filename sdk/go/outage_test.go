package oncegate

import (
	"bytes"
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// logged is a logger that a test reads.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Printf(format string, values ...interface{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(&l.text, format+"\n", values...)
}

func (l *logged) Write(line []byte) (int, error) {
	l.Printf("%s", line)
	return len(line), nil
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// cutStore grants a claim whose reply is lost, and then cannot be reached.
type cutStore struct {
	*MemoryStore
	isCut int32
	// next is set if the next claim arrives, and its reply does not.
	next int32
}

func (s *cutStore) failure() error {
	if atomic.LoadInt32(&s.isCut) == 1 {
		return &StoreError{StoreUnavailable, "claim", &net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}}
	}
	return nil
}

func (s *cutStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if err := s.failure(); err != nil {
		return ClaimReply{}, err
	}
	reply, err := s.MemoryStore.Claim(ctx, id, claim)
	if atomic.CompareAndSwapInt32(&s.next, 1, 0) {
		atomic.StoreInt32(&s.isCut, 1)
		return ClaimReply{}, s.failure()
	}
	return reply, err
}

func (s *cutStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	if err := s.failure(); err != nil {
		return nil, err
	}
	return s.MemoryStore.Lookup(ctx, id)
}

func (s *cutStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	if err := s.failure(); err != nil {
		return 0, err
	}
	return s.MemoryStore.Release(ctx, id, token, retention)
}

func server(t *testing.T, store Store, settings Settings, logger Logger, handler http.HandlerFunc) (send func(key, body string, fields ...string) *httptest.ResponseRecorder, engine *Engine) {
	engine, err := NewEngine(store, EngineOptions{Logger: logger, Service: "test"})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, settings)
	if err != nil {
		t.Fatal(err)
	}
	protected := protect(handler)
	return func(key, body string, fields ...string) *httptest.ResponseRecorder {
		request := httptest.NewRequest("POST", "/pay", strings.NewReader(body))
		request.Header.Set("Idempotency-Key", key)
		for i := 0; i < len(fields); i += 2 {
			request.Header.Set(fields[i], fields[i+1])
		}
		response := httptest.NewRecorder()
		protected.ServeHTTP(response, request)
		return response
	}, engine
}

// A claim that was granted while its reply was lost must not end as an unknown outcome: nothing was executed.
func TestClaimThatIsLostForLongerThanItsLease(t *testing.T) {
	for round := 0; round < 3; round++ {
		store := &cutStore{MemoryStore: NewMemoryStore(), next: 1}
		send, engine := server(t, store, Settings{Scope: []string{"single-tenant"}, Lease: 100 * time.Millisecond, Wait: -1}, log.New(io.Discard, "", 0),
			func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "executed") })
		if got := send("a", ""); got.Code != 503 {
			t.Fatal(got.Code, got.Body)
		}
		// The lease ends, and no renewal can arrive. The pauses of the background are long by then.
		time.Sleep(700 * time.Millisecond)
		atomic.StoreInt32(&store.isCut, 0)
		deadline := time.Now().Add(20 * time.Second)
		got := send("a", "")
		for ; got.Code != 200; got = send("a", "") {
			if got.Code != 503 && got.Code != 409 || time.Now().After(deadline) {
				t.Fatal(got.Code, got.Body)
			}
		}
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		if err := engine.Drain(ctx); err != nil {
			t.Error(err)
		}
		cancel()
	}
}

// A panic in what the application gave to a function does not end the program, and ends the attempt.
func TestFunctionWhoseCallbacksPanic(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	failing := func(context.Context, *Attempt) (int, error) { return 0, panicking{} }
	for name, call := range map[string]func() error{
		"errors": func() error {
			_, err := Function[int, int]{Engine: engine, Name: "errors", Errors: func(error) ErrorFate { panic("judge") }}.Do(context.Background(), "k", 1, failing)
			return err
		},
		"error": func() error {
			_, err := Function[int, int]{Engine: engine, Name: "error", Errors: func(error) ErrorFate { return FateStore }}.Do(context.Background(), "k", 1, failing)
			return err
		},
		"marshal": func() error {
			_, err := Function[int, panicking]{Engine: engine, Name: "marshal"}.Do(context.Background(), "k", 1,
				func(context.Context, *Attempt) (panicking, error) { return panicking{}, nil })
			return err
		},
	} {
		var own *PanicError
		if err := call(); !errors.As(err, &own) {
			t.Error(name, err)
		}
		if err := call(); !errors.Is(err, ErrOutcomeUnknown) {
			t.Error(name, err)
		}
	}
}

type panicking struct{}

func (panicking) Error() string                { panic("Error") }
func (panicking) MarshalJSON() ([]byte, error) { panic("MarshalJSON") }

type hiddenInput struct{ cents int }

func TestTypesThatJSONDoesNotShow(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	refused := func(err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "JSON does not show") {
			t.Error(err)
		}
	}
	_, err = Do(context.Background(), engine, "a", "k", hiddenInput{1}, func(context.Context, *Attempt) (int, error) { return 1, nil })
	refused(err)
	_, err = Do(context.Background(), engine, "b", "k", []map[string]*hiddenInput{}, func(context.Context, *Attempt) (int, error) { return 1, nil })
	refused(err)
	_, err = Do(context.Background(), engine, "c", "k", 1, func(context.Context, *Attempt) (struct{ In hiddenInput }, error) {
		return struct{ In hiddenInput }{}, nil
	})
	refused(err)
	type node struct {
		At       time.Time
		Children []*node
		hidden   int
	}
	for _, n := range []error{
		func() error {
			_, err := Do(context.Background(), engine, "d", "k", struct{}{}, func(context.Context, *Attempt) (node, error) { return node{hidden: 1}, nil })
			return err
		}(),
		func() error {
			_, err := Do(context.Background(), engine, "e", "k", node{}, func(context.Context, *Attempt) (interface{}, error) { return 1, nil })
			return err
		}(),
	} {
		if n != nil {
			t.Error(n)
		}
	}
}

// A store that is reached and full executes nothing, also with FailOpen, and answers for keys that it has.
func TestFailOpenOnAFullStore(t *testing.T) {
	store := NewMemoryStore()
	store.MaxRecords = 1
	executions := 0
	send, _ := server(t, store, Settings{Scope: []string{"single-tenant"}, FailOpen: true}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		executions++
		io.WriteString(w, "executed")
	})
	if got := send("a", ""); got.Code != 200 {
		t.Error(got.Code)
	}
	if got := send("b", ""); got.Code != 503 || !strings.Contains(got.Body.String(), "takes no new keys") {
		t.Error(got.Code, got.Body)
	}
	if got := send("a", ""); got.Code != 200 || got.Header().Get("Idempotent-Replayed") != "true" || executions != 1 {
		t.Error(got.Code, executions)
	}
}

// stateError is an error of a driver with a SQLSTATE.
type stateError string

func (e stateError) Error() string    { return "of the server: " + string(e) }
func (e stateError) SQLState() string { return string(e) }

// Every answer of PostgreSQL or of a pooler is one of a store that was reached, also of one that starts. A driver that cannot connect may say 08001.
func TestAnswersOfPostgres(t *testing.T) {
	own, cancel := context.WithCancel(context.Background())
	cancel()
	for state, want := range map[stateError]bool{"57P01": true, "57P03": true, "53300": true, "XX000": true, "55P03": true, "57014": true, "08006": true, "08P01": true, "08001": false} {
		if got := isRefusedByStore(statementError(context.Background(), "claim", state)); got != want {
			t.Error(state, got)
		}
	}
	if err := statementError(own, "claim", stateError("57014")); isRefusedByStore(err) || !isOutOfReach(err) {
		t.Error("the end of our own time is no answer")
	}
	// What the wait for a connection reports comes before the command is given up.
	ctx, end := context.WithTimeout(context.Background(), 2*time.Second)
	defer end()
	sooner, end := endingSooner(ctx)
	defer end()
	last, _ := ctx.Deadline()
	if deadline, isBounded := sooner.Deadline(); !isBounded || last.Sub(deadline) < 200*time.Millisecond || last.Sub(deadline) > 300*time.Millisecond {
		t.Error(last.Sub(deadline))
	}
}

// brokenConn is a connection of a driver that panics.
type brokenConn struct {
	driver.Conn
	closing chan struct{}
}

func (c brokenConn) Close() error {
	defer close(c.closing)
	panic("broken")
}

// A driver that panics while its silent connection is closed does not end the program.
func TestDriverThatPanicsOnClose(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
	defer cancel()
	conn := brokenConn{closing: make(chan struct{})}
	text := &logged{}
	log.SetOutput(text)
	defer log.SetOutput(os.Stderr)
	closeIfSilent(ctx, nil, conn)
	eventually(t, "the end of the connection", conn.closing)
	for deadline := time.Now().Add(10 * time.Second); !strings.Contains(text.String(), "panic closing a connection: broken"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal(text.String())
		}
	}
}

func TestFailOpenIsLogged(t *testing.T) {
	store := &cutStore{MemoryStore: NewMemoryStore(), isCut: 1}
	text := &logged{}
	send, _ := server(t, store, Settings{Scope: []string{"single-tenant"}, FailOpen: true}, text, func(w http.ResponseWriter, r *http.Request) {})
	if got := send("a", ""); got.Header().Get("Idempotency-Status") != "failed-open" || !strings.Contains(text.String(), "executed without protection") ||
		!strings.Contains(text.String(), "connection refused") {
		t.Error(got.Header(), text)
	}
}

func TestMemoryStoreKeepsNoContentBeyondItsRetention(t *testing.T) {
	store, clock := NewMemoryStore(), time.Now()
	store.now = func() time.Time { return clock }
	claim := Claim{Lease: time.Second, Retention: time.Second, OnAbandoned: Park}
	fill := func(n byte) error {
		reply, err := store.Claim(context.Background(), RecordID{n}, claim)
		if err != nil {
			return err
		}
		_, err = store.Complete(context.Background(), RecordID{n}, reply.Token, Completion{Completed, make([]byte, 1000), time.Second})
		return err
	}
	store.MaxBytes = 3000
	for n := byte(0); n < 3; n++ {
		if err := fill(n); err != nil {
			t.Fatal(err)
		}
	}
	if err := fill(3); !errors.Is(err, errFull) || kindOf(err) != StoreUnsent {
		t.Error(err)
	}
	clock = clock.Add(3 * time.Second)
	if err := fill(4); err != nil || store.bytes != 1000 || len(store.records) != 4 {
		t.Error(err, store.bytes, len(store.records))
	}
	clock = clock.Add(time.Hour)
	if err := fill(5); err != nil || store.bytes != 1000 || len(store.records) != 1 {
		t.Error(err, store.bytes, len(store.records))
	}
}

func TestUploadsAreRemoved(t *testing.T) {
	directory := t.TempDir()
	t.Setenv("TMPDIR", directory)
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	part, _ := form.CreateFormFile("file", "x")
	part.Write(make([]byte, 100_000))
	form.Close()
	files := func() int {
		found, _ := filepath.Glob(filepath.Join(directory, "*"))
		return len(found)
	}
	during := 0
	send, _ := server(t, NewMemoryStore(), Settings{Scope: []string{"single-tenant"}}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		during = files()
	})
	if got := send("a", body.String(), "Content-Type", form.FormDataContentType()); got.Code != 200 || during != 1 || files() != 0 {
		t.Error(got.Code, during, files())
	}
}

// A sidecar in front that has claimed the same record is named: each would wait for the other.
func TestSidecarInFrontOnTheSameStore(t *testing.T) {
	store := NewMemoryStore()
	send, _ := server(t, store, Settings{Scope: oneTenant, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) { t.Error("executed") })
	begun, proceed := make(chan RecordID, 1), make(chan struct{})
	sidecar, _ := server(t, store, Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		begun <- AttemptFrom(r.Context()).Record()
		<-proceed
	})
	go sidecar("a", "")
	id := <-begun
	defer close(proceed)
	got := send("a", "", "Oncegate-Record", id.String(), "Oncegate-Token", "1")
	if got.Code != 503 || !strings.Contains(got.Body.String(), "each waits for the other") || got.Header().Get("Idempotency-Store") != "release" {
		t.Error(got.Code, got.Header(), got.Body)
	}
	if got := send("a", ""); got.Code != 409 {
		t.Error(got.Code, got.Body)
	}
}

// A sidecar in front must not keep the refusals of this middleware.
func TestSidecarInFrontIsNamed(t *testing.T) {
	text := &logged{}
	store := NewMemoryStore()
	send, _ := server(t, store, Settings{Scope: []string{"single-tenant"}}, text, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Query().Get("x") == "" && r.Header.Get("X-Panic") != "" {
			panic(http.ErrAbortHandler)
		}
	})
	record := strings.Repeat("00", 32)
	if got := send("a", "1"); got.Header().Get("Idempotency-Store") != "" || text.String() != "" {
		t.Error(got.Header(), text)
	}
	if got := send("a", "2"); got.Code != 422 || got.Header().Get("Idempotency-Store") != "" {
		t.Error(got.Header())
	}
	for i := 0; i < 2; i++ {
		if got := send("a", "2", "Oncegate-Record", record); got.Code != 422 || got.Header().Get("Idempotency-Store") != "release" {
			t.Error(got.Header())
		}
	}
	if got := send("", "2", "Oncegate-Record", record); got.Code != 400 || got.Header().Get("Idempotency-Store") != "release" {
		t.Error(got.Code, got.Header())
	}
	if n := strings.Count(text.String(), "from a sidecar"); n != 1 {
		t.Error(text)
	}
}

func TestScopesThatChangeAreLogged(t *testing.T) {
	for scope, words := range map[string]string{"": "Scope is not set", "required-cookie:session": "the cookie session", "required-header:authorization": "Authorization",
		"required-header:x-tenant": "", "single-tenant": ""} {
		text := &logged{}
		settings := Settings{}
		if scope != "" {
			settings.Scope = []string{scope}
		}
		server(t, NewMemoryStore(), settings, text, nil)
		if words == "" && text.String() != "" || !strings.Contains(text.String(), words) || words != "" && !strings.Contains(text.String(), "executes again") {
			t.Errorf("%s: %q", scope, text)
		}
	}
}

func TestErrorsSayWhatToDo(t *testing.T) {
	if _, err := NewEngine(NewPostgresStore(nil), EngineOptions{Service: "a"}); err == nil || !strings.Contains(err.Error(), "sql.Open") {
		t.Error(err)
	}
	if _, err := ParseSettings([]byte(`{"reqire-key": true}`)); err == nil || !strings.Contains(err.Error(), `did you mean "require-key"?`) {
		t.Error(err)
	}
	engine, _ := NewEngine(NewMemoryStore(), EngineOptions{})
	_, err := Function[int, int]{Engine: engine, Name: "a", Caller: "42"}.Do(context.Background(), "k", 1, func(context.Context, *Attempt) (int, error) { return 1, nil })
	if !errors.Is(err, ErrInvalidKey) || !strings.Contains(err.Error(), "CallerKind is empty") {
		t.Error(err)
	}
}

// purgedStore counts the records that are left to purge.
type purgedStore struct {
	*MemoryStore
	left, calls, fails int32
}

func (s *purgedStore) Purge(_ context.Context, max int) (int, error) {
	if atomic.AddInt32(&s.calls, 1) <= atomic.LoadInt32(&s.fails) {
		return 0, &StoreError{StoreMisused, "purge", errors.New("no right")}
	}
	n := atomic.LoadInt32(&s.left)
	if n > int32(max) {
		n = int32(max)
	}
	atomic.AddInt32(&s.left, -n)
	return int(n), nil
}

func TestPurgeGoesOnUntilNothingIsLeft(t *testing.T) {
	store, text := &purgedStore{MemoryStore: NewMemoryStore(), left: 2*purgeStep + 1, fails: 2}, &logged{}
	engine, err := NewEngine(store, EngineOptions{Logger: text})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { engine.purge(store, 20*time.Millisecond); close(ended) }()
	for deadline := time.Now().Add(20 * time.Second); atomic.LoadInt32(&store.left) > 0; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("not purged", store.left)
		}
	}
	if n := strings.Count(text.String(), "were not removed"); n != 1 {
		t.Error(text)
	}
	if err := engine.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Error("the purge does not end with Drain")
	}
}

// After a transaction, a store that is away for longer than the lease gets its end when it is back, and nothing executes again meanwhile.
func TestTransactionAndAStoreThatIsAwayForLong(t *testing.T) {
	for _, isCommitted := range []bool{true, false} {
		store, log := &outOfReachStore{MemoryStore: NewMemoryStore()}, &logged{}
		executions := 0
		send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: -1, Lease: minLease}, log, func(w http.ResponseWriter, r *http.Request) {
			if executions++; executions == 2 {
				io.WriteString(w, "again")
				return
			}
			// As CompleteIn, and the end of the transaction.
			own := AttemptFrom(r.Context()).permit
			own.inTransaction = true
			atomic.StoreInt32(&store.isAway, 1)
			if !isCommitted {
				w.WriteHeader(500)
				return
			}
			if _, err := store.MemoryStore.Complete(r.Context(), own.id, own.reply.Token, Completion{CompletionState(stateAwaited), nil, time.Hour}); err != nil {
				t.Error(err)
			}
			io.WriteString(w, "receipt")
		})
		if got := send("a", ""); isCommitted != (got.Code == 200 && got.Body.String() == "receipt") || got.Header().Get("Idempotency-Status") != "not-stored" {
			t.Error(isCommitted, got.Code, got.Header(), got.Body)
		}
		for begun := time.Now(); time.Since(begun) < 12*minLease; time.Sleep(minLease) {
			if got := send("a", ""); got.Code != 409 || executions != 1 {
				t.Error("during the outage:", isCommitted, got.Code, executions, got.Body)
			}
		}
		atomic.StoreInt32(&store.isAway, 0)
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		if err := engine.Drain(ctx); err != nil {
			t.Error(err)
		}
		want := map[bool]string{true: "receipt", false: "again"}[isCommitted]
		if got := send("a", ""); got.Code != 200 || got.Body.String() != want {
			t.Error("after the outage:", isCommitted, got.Code, executions, got.Body)
		}
		if strings.Contains(log.String(), "has not ended") {
			t.Error(log)
		}
	}
}

// tiringStore does not take releases while isAway is set, and shows its records.
type tiringStore struct {
	*MemoryStore
	isAway int32
}

func (s *tiringStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	if atomic.LoadInt32(&s.isAway) == 1 {
		return 0, &StoreError{StoreUnavailable, "release", errors.New("the connection was cut")}
	}
	return s.MemoryStore.Release(ctx, id, token, retention)
}

// A store that does not take the end of a transaction that was rolled back is asked again for longer than a lease: the transaction is not open.
func TestRollbackThatAStoreDoesNotTakeForLong(t *testing.T) {
	store, log := &tiringStore{MemoryStore: NewMemoryStore()}, &logged{}
	executions := 0
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1, Lease: minLease}, log, func(w http.ResponseWriter, r *http.Request) {
		if executions++; executions == 1 {
			AttemptFrom(r.Context()).permit.inTransaction = true
			atomic.StoreInt32(&store.isAway, 1)
		}
		io.WriteString(w, "paid")
	})
	if got := send("a", ""); got.Code != 409 {
		t.Error(got.Code, got.Body)
	}
	for begun := time.Now(); time.Since(begun) < 12*minLease; time.Sleep(minLease) {
		if got := send("a", ""); got.Code != 409 || executions != 1 {
			t.Error("during the outage:", got.Code, executions, got.Body)
		}
	}
	atomic.StoreInt32(&store.isAway, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := engine.Drain(ctx); err != nil {
		t.Error(err)
	}
	if got := send("a", ""); got.Code != 200 || executions != 2 {
		t.Error("after the outage:", got.Code, executions, got.Body)
	}
	if strings.Contains(log.String(), "has not ended") {
		t.Error(log)
	}
}

// resendingStore is a store whose client has sent the first claim twice: the last reply says that it was not sent, and the first message arrives
// after the release.
type resendingStore struct {
	*MemoryStore
	claims, lookups int32
	first           Claim
	id              RecordID
}

func (s *resendingStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if atomic.AddInt32(&s.claims, 1) == 1 {
		s.id, s.first = id, claim
		time.Sleep(2 * hiddenResend)
		return ClaimReply{}, &StoreError{StoreUnsent, "claim", errors.New("connection refused")}
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

func (s *resendingStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	atomic.AddInt32(&s.lookups, 1)
	return s.MemoryStore.Lookup(ctx, id)
}

// A claim whose last reply says that it was not sent may have been sent before by the client of the store.
func TestHiddenResendThatEndsUnsent(t *testing.T) {
	store := &resendingStore{MemoryStore: NewMemoryStore()}
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1, Lease: time.Second}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(429)
	})
	engine.resends = true
	if got := send("a", ""); got.Code != 429 {
		t.Fatal(got.Code, got.Body)
	}
	if reply, err := store.MemoryStore.Claim(context.Background(), store.id, store.first); err != nil || reply.Outcome != Execute {
		t.Fatal(reply, err)
	}
	for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		info, err := store.MemoryStore.Lookup(context.Background(), store.id)
		if err == nil && info.State == string(stateReleased) {
			break
		}
		if err != nil || time.Since(begun) > 10*time.Second {
			t.Fatal(info, err)
		}
	}
	if got := send("a", ""); got.Code != 429 {
		t.Error(got.Code, got.Body)
	}
}

// fullSlowly refuses new claims when it is full, after the time in which a client may have sent them twice.
type fullSlowly struct {
	*MemoryStore
	isFull, claims int32
	// grants is set if the first of two messages is granted.
	grants int32
}

func (s *fullSlowly) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	atomic.AddInt32(&s.claims, 1)
	if atomic.LoadInt32(&s.isFull) == 1 {
		if atomic.CompareAndSwapInt32(&s.grants, 1, 0) {
			s.MemoryStore.Claim(ctx, id, claim)
		}
		time.Sleep(hiddenResend + 5*time.Millisecond)
		return ClaimReply{}, redisError("claim", errors.New("OOM command not allowed when used memory > 'maxmemory'."))
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

// A full store has answered: its answer is no claim whose reply was lost, also if its client sends commands again. It still replays what it has.
func TestFullStoreAndAClientThatSendsAgain(t *testing.T) {
	store := &fullSlowly{MemoryStore: NewMemoryStore()}
	executions := int32(0)
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		atomic.AddInt32(&executions, 1)
		io.WriteString(w, "paid")
	})
	engine.resends = true
	send("known", "")
	atomic.StoreInt32(&store.isFull, 1)
	for i := 0; i < 4; i++ {
		if got := send("known", ""); got.Code != 200 || got.Header().Get("Idempotent-Replayed") != "true" {
			t.Error("known:", got.Code, got.Body)
		}
		if got := send("new", ""); got.Code != 503 || !strings.Contains(got.Body.String(), "takes no new keys") {
			t.Error("new:", got.Code, got.Body)
		}
	}
	engine.mu.Lock()
	if engine.pending != 0 || engine.watchers != 0 || len(engine.lost) != 0 {
		t.Error("claims count as lost:", engine.pending, engine.watchers, len(engine.lost))
	}
	engine.mu.Unlock()
	if n := atomic.LoadInt32(&store.claims); n != 9 {
		t.Error(n, "claims were sent")
	}
	// One that was granted, and then refused when it was sent again, is freed.
	atomic.StoreInt32(&store.grants, 1)
	if got := send("twice", ""); got.Code != 409 {
		t.Error("twice:", got.Code, got.Body)
	}
	// The look for it has freed the key, which the full server does not take.
	if got := send("twice", ""); got.Code != 503 {
		t.Error("twice, again:", got.Code, got.Body)
	}
	atomic.StoreInt32(&store.isFull, 0)
	for _, key := range []string{"new", "twice", "known"} {
		if got := send(key, ""); got.Code != 200 {
			t.Error("afterwards:", key, got.Code, got.Body)
		}
	}
	if executions != 3 {
		t.Error(executions)
	}
}

// The claims that are watched after their release are bounded, do not ask a store that is away, and end with the process.
func TestWatchedClaimsAreBounded(t *testing.T) {
	store := &resendingStore{MemoryStore: NewMemoryStore()}
	_, engine := server(t, store, Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) {})
	waitFor := func(what string, isSo func(watchers, lost int) bool) {
		t.Helper()
		for begun := time.Now(); ; time.Sleep(10 * time.Millisecond) {
			engine.mu.Lock()
			watchers, lost := engine.watchers, len(engine.lost)
			engine.mu.Unlock()
			if isSo(watchers, lost) {
				return
			}
			if time.Since(begun) > 20*time.Second {
				t.Fatal(what, watchers, lost)
			}
		}
	}
	for i := 0; i < breakerStrikes; i++ {
		engine.breakers[0].report(&StoreError{StoreUnavailable, "lookup", errors.New("away")})
	}
	engine.breakers[0].openTill = time.Now().Add(time.Minute)
	for i := 0; i < maxWatchers+500; i++ {
		p := &permit{engine: engine, id: RecordID{byte(i), byte(i >> 8)}, lost: &Claim{Lease: time.Second}}
		p.watchLost()
	}
	waitFor("watchers", func(watchers, lost int) bool { return watchers == maxWatchers && lost == maxWatchers })
	// Several looks of each.
	time.Sleep(time.Second)
	if lookups := atomic.LoadInt32(&store.lookups); lookups != 0 {
		t.Error(lookups, "looks at a store that is away")
	}
	engine.breakers[0].mu.Lock()
	engine.breakers[0].openTill = time.Now()
	engine.breakers[0].mu.Unlock()
	for begun := time.Now(); atomic.LoadInt32(&store.lookups) < maxWatchers; time.Sleep(10 * time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			t.Fatal(atomic.LoadInt32(&store.lookups), "looks")
		}
	}
	if err := engine.Drain(context.Background()); err != nil {
		t.Error(err)
	}
	waitFor("after the end", func(watchers, lost int) bool { return watchers == 0 && lost == 0 })
}

// slowCompletions makes the time in which a response is stored long enough for what a handler has left running.
type slowCompletions struct{ *MemoryStore }

func (s slowCompletions) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	time.Sleep(20 * time.Millisecond)
	return s.MemoryStore.Complete(ctx, id, token, completion)
}

// What a handler has left running does not change its response. The race detector sees it otherwise.
func TestGoroutinesThatOutliveTheirHandler(t *testing.T) {
	ended := make(chan error, 1)
	send, _ := server(t, slowCompletions{NewMemoryStore()}, Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "paid")
		begun := make(chan struct{})
		go func() {
			close(begun)
			var err error
			for begun := time.Now(); err == nil && time.Since(begun) < 30*time.Second; time.Sleep(time.Millisecond) {
				if _, err = io.WriteString(w, "late"); err == nil {
					w.(http.Flusher).Flush()
				}
			}
			ended <- err
		}()
		<-begun
	})
	first, again := send("a", ""), send("a", "")
	if first.Body.String() != again.Body.String() || again.Header().Get("Idempotent-Replayed") != "true" {
		t.Error(first.Body, again.Body)
	}
	if err := <-ended; err == nil {
		t.Error("it could write after its handler had returned")
	}
}

// deafStore loses the reply to one claim.
type deafStore struct {
	*MemoryStore
	loses int32
}

func (s *deafStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	reply, err := s.MemoryStore.Claim(ctx, id, claim)
	if atomic.CompareAndSwapInt32(&s.loses, 1, 0) {
		return ClaimReply{}, &StoreError{StoreUnavailable, "claim", errors.New("the reply was lost")}
	}
	return reply, err
}

// A claim of another request whose reply was lost does not keep Drain from its end.
func TestLostReplyToAnotherRequest(t *testing.T) {
	store := &deafStore{MemoryStore: NewMemoryStore()}
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid") })
	send("a", "one")
	atomic.StoreInt32(&store.loses, 1)
	if got := send("a", "other"); got.Code != 422 {
		t.Error(got.Code, got.Body)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := engine.Drain(ctx); err != nil {
		t.Error(err)
	}
}

// slowClaims holds claims back.
type slowClaims struct {
	*MemoryStore
	begun, proceed chan struct{}
}

func (s *slowClaims) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	s.begun <- struct{}{}
	<-s.proceed
	return s.MemoryStore.Claim(ctx, id, claim)
}

// Drain waits for claims that are under way: what they begin runs to its end.
func TestDrainDuringAClaim(t *testing.T) {
	for _, isFunction := range []bool{false, true} {
		store := &slowClaims{NewMemoryStore(), make(chan struct{}, 10), make(chan struct{})}
		var ended int32
		send, engine := server(t, store, Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) { atomic.StoreInt32(&ended, 1) })
		if isFunction {
			go Do(context.Background(), engine, "pay", "a", 5, func(context.Context, *Attempt) (int, error) {
				atomic.StoreInt32(&ended, 1)
				return 5, nil
			})
		} else {
			go send("a", "")
		}
		<-store.begun
		drained := make(chan struct{})
		go func() {
			engine.Drain(context.Background())
			if atomic.LoadInt32(&ended) == 0 {
				t.Error("drained before the end: function", isFunction)
			}
			close(drained)
		}()
		select {
		case <-drained:
		case <-time.After(50 * time.Millisecond):
		}
		close(store.proceed)
		eventually(t, "Drain", drained)
	}
}

// Drain waits for a duplicate that waits: it executes if the first attempt frees the key.
func TestDrainWhileADuplicateWaits(t *testing.T) {
	begun, proceed := make(chan struct{}, 2), make(chan struct{})
	executions := int32(0)
	send, engine := server(t, NewMemoryStore(), Settings{Scope: oneTenant, Wait: time.Minute, ServerErrors: "release"}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		n := atomic.AddInt32(&executions, 1)
		begun <- struct{}{}
		if n == 1 {
			<-proceed
			w.WriteHeader(503)
			return
		}
		time.Sleep(20 * time.Millisecond)
		atomic.AddInt32(&executions, 1)
	})
	go send("a", "")
	<-begun
	go send("a", "")
	for waits := false; !waits; time.Sleep(time.Millisecond) {
		engine.mu.Lock()
		for _, own := range engine.running {
			waits = own.ended != nil
		}
		engine.mu.Unlock()
	}
	close(proceed)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := engine.Drain(ctx); err != nil || atomic.LoadInt32(&executions) != 3 {
		t.Error(atomic.LoadInt32(&executions), err)
	}
}

// Reading a large body takes many times its size, so only a few are read at the same time. Small ones do not wait.
func TestLargeBodiesWaitForEachOther(t *testing.T) {
	send, _ := server(t, NewMemoryStore(), Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid") })
	for i := 0; i < cap(largeBodies); i++ {
		largeBodies <- struct{}{}
	}
	done := make(chan struct{})
	go func() {
		if got := send("large", `"`+strings.Repeat("a", largeBody)+`"`, "Content-Type", "application/json"); got.Code != 200 {
			t.Error(got.Code, got.Body)
		}
		close(done)
	}()
	if got := send("small", `"a"`, "Content-Type", "application/json"); got.Code != 200 {
		t.Error(got.Code, got.Body)
	}
	select {
	case <-done:
		t.Error("the large body did not wait")
	case <-time.After(50 * time.Millisecond):
	}
	for i := 0; i < cap(largeBodies); i++ {
		<-largeBodies
	}
	eventually(t, "the large body", done)
}
