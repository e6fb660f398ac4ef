package oncegate

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// losingStore applies the ends of attempts, and loses its replies to them.
type losingStore struct {
	*MemoryStore
	loses int32
	// drops loses the commands, too.
	drops int32
}

func (s *losingStore) lost(settlement Settlement, err error) (Settlement, error) {
	if atomic.LoadInt32(&s.loses) == 1 {
		return 0, &StoreError{StoreUnavailable, "complete", errors.New("the reply was lost")}
	}
	return settlement, err
}

func (s *losingStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	if atomic.LoadInt32(&s.drops) == 1 {
		return s.lost(0, nil)
	}
	return s.lost(s.MemoryStore.Complete(ctx, id, token, completion))
}

func (s *losingStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	return s.lost(s.MemoryStore.Release(ctx, id, token, retention))
}

func TestRepliesToEndsThatAreLost(t *testing.T) {
	store := &losingStore{MemoryStore: NewMemoryStore(), loses: 1}
	engine, err := NewEngine(store, EngineOptions{Logger: log.New(io.Discard, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Wait: -1})
	if err != nil {
		t.Fatal(err)
	}
	executions, status := 0, 201
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		executions++
		w.Header().Set("Idempotency-Store", r.URL.Query().Get("store"))
		w.WriteHeader(status)
		fmt.Fprintf(w, "execution %d", executions)
	}))
	send := func(key, query string) *httptest.ResponseRecorder {
		request := httptest.NewRequest("POST", "/pay"+query, nil)
		request.Header.Set("Idempotency-Key", key)
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, request)
		return response
	}
	expect := func(key, query string, status int, body, marker string) {
		t.Helper()
		got := send(key, query)
		if got.Code != status || body != "" && got.Body.String() != body || got.Header().Get("Idempotent-Replayed") != marker {
			t.Errorf("%s: %d %s %v", key, got.Code, got.Body, got.Header())
		}
	}
	// The caller has its response, and retries get it, although the process does not know that it is stored.
	if got := send("a", ""); got.Code != 201 || got.Body.String() != "execution 1" || got.Header().Get("Idempotency-Status") != "not-stored" {
		t.Errorf("%d %s %v", got.Code, got.Body, got.Header())
	}
	expect("a", "", 201, "execution 1", "true")
	// So do other ends.
	expect("b", "?store=tombstone", 201, "execution 2", "")
	expect("b", "?store=tombstone", 422, "", "")
	expect("c", "?store=unknown", 201, "execution 3", "")
	expect("c", "?store=unknown", 500, "", "")
	// A key that was given back is free.
	expect("d", "?store=release", 201, "execution 4", "")
	expect("d", "?store=release", 201, "execution 5", "")
	// A result that has not arrived at the store is still in progress.
	atomic.StoreInt32(&store.drops, 1)
	expect("e", "", 201, "execution 6", "")
	expect("e", "", 409, "", "")
	// Another request is one, whatever the state.
	expect("a", "?other", 422, "", "")
	atomic.StoreInt32(&store.drops, 0)
	atomic.StoreInt32(&store.loses, 0)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := engine.Drain(ctx); err != nil {
		t.Error(err)
	}
	expect("a", "", 201, "execution 1", "true")
	expect("e", "", 201, "execution 6", "true")
	if executions != 6 {
		t.Error(executions, "executions")
	}
}

// mutedStore grants claims, and loses the replies.
type mutedStore struct {
	*MemoryStore
	loses int32
}

func (s *mutedStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	reply, err := s.MemoryStore.Claim(ctx, id, claim)
	if atomic.LoadInt32(&s.loses) == 1 {
		return ClaimReply{}, &StoreError{StoreUnavailable, "claim", errors.New("the reply was lost")}
	}
	return reply, err
}

// A key whose claim was granted, and whose reply was lost for longer than the lease, is not abandoned: nothing was executed.
func TestLostClaimThatOutlivesItsLease(t *testing.T) {
	store := &mutedStore{MemoryStore: NewMemoryStore()}
	engine, err := NewEngine(store, EngineOptions{Logger: log.New(io.Discard, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Wait: -1, Lease: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	executions := 0
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { executions++ }))
	send := func(key string) int {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", key)
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, request)
		return response.Code
	}
	for _, key := range []string{"a", "b", "c"} {
		executions = 0
		atomic.StoreInt32(&store.loses, 1)
		if got := send(key); got != 503 || executions != 0 {
			t.Fatal(got, executions)
		}
		// The process asks again in growing pauses. Within one of them the store comes back, and the client retries.
		time.Sleep(time.Second)
		atomic.StoreInt32(&store.loses, 0)
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			got := send(key)
			if got == 200 {
				break
			}
			if got != 409 && got != 503 || time.Now().After(deadline) {
				t.Fatalf("%s: %d", key, got)
			}
		}
		if executions != 1 {
			t.Errorf("%s: %d executions", key, executions)
		}
	}
}

type stubbornError struct{}

func (stubbornError) Error() string { panic("no text") }

type stubbornResult struct{ Cents int }

func (stubbornResult) MarshalJSON() ([]byte, error) { panic("no JSON") }

func TestPanicsAroundAFunctionLeaveItsOutcomeUnknown(t *testing.T) {
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	declined := errors.New("declined")
	for name, call := range map[string]func() error{
		"Errors": func() error {
			own := Function[int, int]{Engine: engine, Name: "errors", Errors: func(error) ErrorFate { panic("no fate") }}
			_, err := own.Do(ctx, "a", 1, func(context.Context, *Attempt) (int, error) { return 0, declined })
			return err
		},
		"Error": func() error {
			own := Function[int, int]{Engine: engine, Name: "error", Errors: func(error) ErrorFate { return FateStore }}
			_, err := own.Do(ctx, "a", 1, func(context.Context, *Attempt) (int, error) { return 0, stubbornError{} })
			return err
		},
		"MarshalJSON": func() error {
			own := Function[int, stubbornResult]{Engine: engine, Name: "result"}
			_, err := own.Do(ctx, "a", 1, func(context.Context, *Attempt) (stubbornResult, error) { return stubbornResult{}, nil })
			return err
		},
	} {
		if err := call(); !errors.As(err, new(*PanicError)) {
			t.Errorf("%s: %v", name, err)
		}
		if err := call(); !errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s, again: %v", name, err)
		}
	}
	ended, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	if err := engine.Drain(ended); err != nil {
		t.Error(err)
	}
}

func TestFilesOfUploadsAreRemoved(t *testing.T) {
	directory := t.TempDir()
	t.Setenv("TMPDIR", directory)
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	files := 0
	server := httptest.NewServer(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := r.ParseMultipartForm(1); err != nil {
			t.Error(err)
		}
		found, _ := os.ReadDir(directory)
		if files += len(found); r.URL.Path == "/panics" {
			panic(http.ErrAbortHandler)
		}
	})))
	defer server.Close()
	for _, path := range []string{"/keyed", "/panics", "/passed"} {
		var body bytes.Buffer
		form := multipart.NewWriter(&body)
		part, _ := form.CreateFormFile("file", "a.txt")
		part.Write(bytes.Repeat([]byte("a"), 1<<20))
		form.Close()
		request, _ := http.NewRequest("POST", server.URL+path, &body)
		request.Header.Set("Content-Type", form.FormDataContentType())
		if path != "/passed" {
			request.Header.Set("Idempotency-Key", path[1:])
		}
		if response, err := http.DefaultClient.Do(request); err == nil {
			response.Body.Close()
		}
	}
	server.Close()
	if left, _ := os.ReadDir(directory); len(left) != 0 || files != 3 {
		t.Errorf("%d files were written, and %d are left", files, len(left))
	}
}

func TestMiddlewareTwiceOnOneWay(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	strict, err := Middleware(engine, Settings{Scope: []string{"required-header:x-tenant"}})
	if err != nil {
		t.Fatal(err)
	}
	executions := 0
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		executions++
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Idempotency-Store", r.URL.Query().Get("store"))
		fmt.Fprintf(w, "execution %d of %s", executions, body)
	})
	send := func(handler http.Handler, key, query string) *httptest.ResponseRecorder {
		request := httptest.NewRequest("POST", "/pay"+query, strings.NewReader("5"))
		request.Header.Set("Idempotency-Key", key)
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, request)
		return response
	}
	twice := protect(protect(handler))
	for i := 0; i < 2; i++ {
		if got := send(twice, "a", ""); got.Code != 200 || got.Body.String() != "execution 1 of 5" || (got.Header().Get("Idempotent-Replayed") == "true") != (i == 1) {
			t.Errorf("%d %s %v", got.Code, got.Body, got.Header())
		}
	}
	// What the handler says of its response is for the outer one.
	if got := send(twice, "b", "?store=release"); got.Body.String() != "execution 2 of 5" || got.Header().Get("Idempotency-Store") != "" {
		t.Errorf("%d %s %v", got.Code, got.Body, got.Header())
	}
	if got := send(twice, "b", "?store=release"); got.Body.String() != "execution 3 of 5" {
		t.Errorf("%d %s %v", got.Code, got.Body, got.Header())
	}
	// A refusal of the inner one is no response to the key.
	mixed := protect(strict(handler))
	for i := 0; i < 2; i++ {
		if got := send(mixed, "c", ""); got.Code != 400 || got.Header().Get("Idempotent-Replayed") != "" || got.Header().Get("Idempotency-Store") != "" {
			t.Errorf("%d %s %v", got.Code, got.Body, got.Header())
		}
	}
}

// A sidecar in front keeps no refusal of the library as the response to the key.
func TestRefusalsBehindASidecar(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{RequireKey: true})
	if err != nil {
		t.Fatal(err)
	}
	for _, token := range []string{"", "1795276474000"} {
		request := httptest.NewRequest("POST", "/pay", nil)
		want := ""
		if token != "" {
			request.Header.Set("Oncegate-Token", token)
			want = "release"
		}
		response := httptest.NewRecorder()
		protect(http.NotFoundHandler()).ServeHTTP(response, request)
		if response.Code != 400 || response.Header().Get("Idempotency-Store") != want {
			t.Errorf("%q: %d %v", token, response.Code, response.Header())
		}
	}
}

func TestASidecarWithTheSameRecordsIsNamed(t *testing.T) {
	var logged bytes.Buffer
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: log.New(&logged, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	record := ""
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { record = AttemptFrom(r.Context()).Record().String() }))
	for i := 0; i < 3; i++ {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", "a")
		if i > 0 {
			request.Header.Set("Oncegate-Record", record)
		}
		handler.ServeHTTP(httptest.NewRecorder(), request)
	}
	if strings.Count(logged.String(), "a sidecar in front has claimed the same records") != 1 {
		t.Error(logged.String())
	}
}

func TestMemoryStoreForgetsResponsesWhoseRetentionIsOver(t *testing.T) {
	store, ctx, now := NewMemoryStore(), context.Background(), time.Now()
	store.now = func() time.Time { return now }
	complete := func(number byte) {
		reply, err := store.Claim(ctx, RecordID{number}, Claim{Attempt: AttemptID{number}, Lease: time.Second, Retention: time.Second, OnAbandoned: Park})
		if err != nil {
			t.Fatal(err)
		}
		response := StoredResponse{Status: 200, Body: make([]byte, 8<<20)}
		encoded, err := response.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := store.Complete(ctx, RecordID{number}, reply.Token, Completion{Completed, encoded, time.Second}); err != nil {
			t.Fatal(err)
		}
	}
	held := func() (bytes int) {
		for _, record := range store.records {
			bytes += len(record.response)
		}
		return bytes
	}
	for number := byte(1); number < 40; number++ {
		complete(number)
		now = now.Add(2 * time.Second)
		if bytes := held(); bytes > 80<<20 {
			t.Fatal(number, bytes)
		}
	}
	// The tokens are still there.
	if len(store.records) != 39 {
		t.Error(len(store.records))
	}
}
