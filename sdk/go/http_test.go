package oncegate

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// harness is a real server on a real socket.
type harness struct {
	*httptest.Server
	engine     *Engine
	store      *MemoryStore
	executions int64
}

func serve(t *testing.T, settings Settings, handler http.HandlerFunc) *harness {
	t.Helper()
	h := &harness{store: NewMemoryStore()}
	var err error
	if h.engine, err = NewEngine(h.store, EngineOptions{}); err != nil {
		t.Fatal(err)
	}
	if settings.Scope == nil && settings.Caller == nil {
		settings.Scope = []string{"single-tenant"}
	}
	if settings.Panicked == nil {
		settings.Panicked = func(*http.Request, interface{}, []byte) {}
	}
	protect, err := Middleware(h.engine, settings)
	if err != nil {
		t.Fatal(err)
	}
	h.Server = httptest.NewUnstartedServer(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		atomic.AddInt64(&h.executions, 1)
		handler(w, r)
	})))
	h.Config.ErrorLog = log.New(io.Discard, "", 0)
	h.Start()
	t.Cleanup(h.Close)
	return h
}

type reply struct {
	status int
	body   string
	header http.Header
	err    error
}

func (h *harness) post(key, body string, more ...string) reply {
	request, _ := http.NewRequest("POST", h.URL+"/pay", strings.NewReader(body))
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	for i := 0; i < len(more); i += 2 {
		if more[i] == "Host" {
			request.Host = more[i+1]
			continue
		}
		request.Header.Set(more[i], more[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return reply{err: err}
	}
	defer response.Body.Close()
	got, err := io.ReadAll(response.Body)
	for name, values := range response.Trailer {
		response.Header["Trailer-"+name] = values
	}
	return reply{response.StatusCode, string(got), response.Header, err}
}

func (r reply) problem() string {
	_, rest, _ := strings.Cut(r.header.Get("Idempotency-Status"), "problem=")
	name, _, _ := strings.Cut(rest, ";")
	return name
}

func (r reply) isReplay() bool { return r.header.Get("Idempotent-Replayed") == "true" }

func TestHandlersThatFail(t *testing.T) {
	for _, c := range []struct {
		name           string
		handler        http.HandlerFunc
		errors         string
		status         int
		problem, retry string
	}{
		{"panic", func(w http.ResponseWriter, r *http.Request) { w.Write([]byte("half")); panic("boom") }, "replay", 500, "outcome-unknown", "outcome-unknown"},
		{"panic, released", func(w http.ResponseWriter, r *http.Request) { panic("boom") }, "release", 500, "handler-failed", "handler-failed"},
		{"abort", func(w http.ResponseWriter, r *http.Request) { panic(http.ErrAbortHandler) }, "replay", 0, "", "outcome-unknown"},
		{"end of the goroutine", func(w http.ResponseWriter, r *http.Request) { runtime.Goexit() }, "replay", 0, "", "outcome-unknown"},
		{"less than Content-Length", func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "100")
			w.Write([]byte("half"))
		}, "replay", 500, "outcome-unknown", "outcome-unknown"},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := serve(t, Settings{ServerErrors: c.errors}, c.handler)
			// A handler that ends its goroutine leaves the connection to its client's timeout.
			http.DefaultClient.Timeout = 2 * time.Second
			defer func() { http.DefaultClient.Timeout = 0 }()
			first := h.post("k", "x")
			if c.status != 0 && (first.status != c.status || first.problem() != c.problem) || c.status == 0 && c.name == "abort" && first.err == nil {
				t.Fatalf("%+v", first)
			}
			if retry := h.post("k", "x"); retry.problem() != c.retry || strings.Contains(retry.body, "half") {
				t.Fatalf("%+v", retry)
			}
		})
	}
}

// gin asks for CloseNotify, and panics without it.
func TestHandlerThatAsksForCloseNotify(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case <-w.(http.CloseNotifier).CloseNotify():
			t.Error("the client is there")
		default:
			io.WriteString(w, "done")
		}
	})))
	defer server.Close()
	for _, key := range []string{"a", ""} {
		request, _ := http.NewRequest("POST", server.URL, nil)
		if key != "" {
			request.Header.Set("Idempotency-Key", key)
		}
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != 200 || string(body) != "done" {
			t.Error(key, response.StatusCode, string(body))
		}
	}
}

func TestPanicsAreReported(t *testing.T) {
	reported := make(chan interface{}, 1)
	h := serve(t, Settings{Panicked: func(r *http.Request, value interface{}, stack []byte) {
		if bytes.Contains(stack, []byte("http_test.go")) {
			reported <- value
		}
	}}, func(http.ResponseWriter, *http.Request) { panic("boom") })
	h.post("k", "")
	if value := <-reported; value != "boom" {
		t.Error(value)
	}
}

func TestResponsesWithoutEnd(t *testing.T) {
	proceed := make(chan struct{})
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		<-proceed
		io.WriteString(w, "data: 2\n\n")
	})
	request, _ := http.NewRequest("POST", h.URL, nil)
	request.Header.Set("Idempotency-Key", "k")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	reader := bufio.NewReader(response.Body)
	if line, _ := reader.ReadString('\n'); line != "data: 1\n" {
		t.Fatal(line)
	}
	// The stream has not ended, and a duplicate is answered at once.
	request, _ = http.NewRequest("POST", h.URL, nil)
	request.Header.Set("Idempotency-Key", "k")
	duplicate, err := http.DefaultClient.Do(request)
	if err != nil || duplicate.StatusCode != 422 {
		t.Fatal(duplicate, err)
	}
	close(proceed)
	if rest, _ := io.ReadAll(reader); !strings.HasSuffix(string(rest), "data: 2\n\n") {
		t.Fatal(string(rest))
	}
}

func TestLargeResponsesAndOptionalInterfaces(t *testing.T) {
	large := strings.Repeat("x", 3<<20)
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		if _, ok := w.(http.Hijacker); !ok {
			t.Error("no Hijacker")
		}
		w.(http.Flusher).Flush()
		if n, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader(large)); n != int64(len(large)) || err != nil {
			t.Error(n, err)
		}
	})
	if got := h.post("k", ""); got.body != large {
		t.Error(len(got.body), got.err)
	}
	if got := h.post("k", ""); got.problem() != "replay-unavailable" || h.executions != 1 {
		t.Errorf("%+v", got)
	}
	// A writer without the optional interfaces does not get them.
	protect, _ := Middleware(h.engine, Settings{Scope: []string{"single-tenant"}})
	request := httptest.NewRequest("POST", "/", nil)
	request.Header.Set("Idempotency-Key", "other")
	protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, flushes := w.(http.Flusher)
		_, hijacks := w.(http.Hijacker)
		if flushes || hijacks {
			t.Error("interfaces that the server does not have")
		}
	})).ServeHTTP(struct{ http.ResponseWriter }{httptest.NewRecorder()}, request)
}

func TestHijack(t *testing.T) {
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		conn, _, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 3\r\nConnection: close\r\n\r\nown")
		conn.Close()
		if _, err := w.Write([]byte("x")); err != http.ErrHijacked {
			t.Error(err)
		}
	})
	if got := h.post("k", ""); got.body != "own" {
		t.Fatalf("%+v", got)
	}
	if got := h.post("k", ""); got.problem() != "replay-unavailable" {
		t.Fatalf("%+v", got)
	}
}

func TestTrailersTypesAndCodings(t *testing.T) {
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Trailer", "X-Sum")
		fmt.Fprintf(w, "<html>%d", len(body))
		w.Header().Set("X-Sum", "5")
	})
	first, retry := h.post("k", "body"), h.post("k", "body")
	for i, got := range []reply{first, retry} {
		if got.body != "<html>4" || got.header.Get("Content-Type") != "text/html; charset=utf-8" || got.header.Get("Trailer-X-Sum") != "5" {
			t.Errorf("%d: %+v", i, got)
		}
	}
	if !retry.isReplay() || first.isReplay() {
		t.Error("marks")
	}
	// The same body, compressed or not, is the same request; the handler gets it as it was sent.
	h = serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprint(w, len(body))
	})
	var packed bytes.Buffer
	zip := gzip.NewWriter(&packed)
	io.WriteString(zip, `{"cents": 5}`)
	zip.Close()
	first = h.post("k", packed.String(), "Content-Encoding", "gzip", "Content-Type", "application/json")
	if got := h.post("k", `{"cents":5.0}`, "Content-Type", "application/json"); first.body != fmt.Sprint(packed.Len()) || got.body != first.body || !got.isReplay() {
		t.Errorf("%+v %+v", first, got)
	}
}

func TestOtherRequests(t *testing.T) {
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "done") })
	h.post("k", "a")
	if got := h.post("k", "b"); got.problem() != "key-reused" || got.status != 422 {
		t.Errorf("%+v", got)
	}
	if got := h.post("k", "a", "Host", "other.test"); got.problem() != "host-differs" {
		t.Errorf("%+v", got)
	}
	if got := h.post("", "b"); got.body != "done" {
		t.Errorf("%+v", got)
	}
	if h.executions != 2 {
		t.Error(h.executions)
	}
}

func TestDuplicatesWaitOrAreRefused(t *testing.T) {
	began, proceed := make(chan struct{}, 9), make(chan struct{})
	handler := func(w http.ResponseWriter, r *http.Request) {
		began <- struct{}{}
		<-proceed
		io.WriteString(w, "done")
	}
	h := serve(t, Settings{Wait: -1}, handler)
	first := make(chan reply, 1)
	go func() { first <- h.post("k", "") }()
	<-began
	if got := h.post("k", ""); got.status != 409 || got.header.Get("Retry-After") != "1" {
		t.Errorf("%+v", got)
	}
	if got := h.post("k", "other"); got.problem() != "key-reused" {
		t.Errorf("%+v", got)
	}
	proceed <- struct{}{}
	<-first
	h = serve(t, Settings{Wait: 20 * time.Second}, handler)
	var group sync.WaitGroup
	for i := 0; i < 20; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			if got := h.post("k", ""); got.body != "done" {
				t.Errorf("%+v", got)
			}
		}()
	}
	<-began
	close(proceed)
	group.Wait()
	if h.executions != 1 {
		t.Error(h.executions)
	}
}

func TestTheHandlerOutlivesItsClient(t *testing.T) {
	began, proceed := make(chan struct{}), make(chan struct{})
	h := serve(t, Settings{Wait: 20 * time.Second}, func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-proceed
		select {
		case <-r.Context().Done():
			t.Error("the context ended with the client")
		default:
		}
		attempt := AttemptFrom(r.Context())
		fmt.Fprint(w, attempt.Number(), attempt.Token() > 0, r.Context().Value(http.ServerContextKey) != nil)
	})
	conn, err := net.Dial("tcp", h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(conn, "POST /pay HTTP/1.1\r\nHost: %s\r\nIdempotency-Key: k\r\nContent-Length: 0\r\n\r\n", h.Listener.Addr())
	<-began
	conn.Close()
	close(proceed)
	if got := h.post("k", ""); got.body != "1 true true" || !got.isReplay() {
		t.Errorf("%+v", got)
	}
}

func TestTimeoutHandlerOutside(t *testing.T) {
	proceed := make(chan struct{})
	h := serve(t, Settings{Wait: 20 * time.Second}, func(w http.ResponseWriter, r *http.Request) {
		<-proceed
		io.WriteString(w, "done")
	})
	outer := httptest.NewServer(http.TimeoutHandler(h.Config.Handler, 50*time.Millisecond, "late"))
	defer outer.Close()
	request, _ := http.NewRequest("POST", outer.URL+"/pay", nil)
	request.Host = h.Listener.Addr().String()
	request.Header.Set("Idempotency-Key", "k")
	if got, err := http.DefaultClient.Do(request); err != nil || got.StatusCode != 503 {
		t.Fatal(got, err)
	}
	close(proceed)
	if got := h.post("k", ""); got.body != "done" || !got.isReplay() {
		t.Fatalf("%+v", got)
	}
}

func TestShutdownWaitsForHandlers(t *testing.T) {
	began, proceed := make(chan struct{}), make(chan struct{})
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-proceed
		io.WriteString(w, "done")
	})
	first := make(chan reply, 1)
	go func() { first <- h.post("k", "") }()
	<-began
	ended := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		err := h.Config.Shutdown(ctx)
		if err == nil {
			err = h.engine.Drain(ctx)
		}
		ended <- err
	}()
	close(proceed)
	if got := <-first; got.body != "done" {
		t.Errorf("%+v", got)
	}
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestLimits(t *testing.T) {
	began, proceed := make(chan struct{}, 9), make(chan struct{})
	h := serve(t, Settings{MaxInFlight: 1, MaxRequestBody: 10, RequestBudget: 8}, func(w http.ResponseWriter, r *http.Request) {
		began <- struct{}{}
		<-proceed
	})
	if got := h.post("large", strings.Repeat("x", 11)); got.status != 413 {
		t.Errorf("%+v", got)
	}
	if got := h.post("budget", strings.Repeat("x", 9)); got.problem() != "overloaded" {
		t.Errorf("%+v", got)
	}
	first := make(chan reply, 1)
	go func() { first <- h.post("k", "") }()
	<-began
	if got := h.post("other", ""); got.status != 503 || got.problem() != "overloaded" || got.header.Get("Retry-After") != "1" {
		t.Errorf("%+v", got)
	}
	close(proceed)
	<-first
	if got := h.post("other", ""); got.status != 200 {
		t.Errorf("%+v", got)
	}
	// A body that is cut short executes nothing.
	h = serve(t, Settings{BodyTimeout: 50 * time.Millisecond}, func(w http.ResponseWriter, r *http.Request) {})
	conn, err := net.Dial("tcp", h.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "POST /pay HTTP/1.1\r\nHost: x\r\nIdempotency-Key: k\r\nContent-Length: 9\r\n\r\nhalf")
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || response.StatusCode != 400 || h.executions != 0 {
		t.Error(response, err, h.executions)
	}
}

// The parts of a body that a client has sent so far count, and a client that is refused need not send the rest.
func TestSlowBodiesCount(t *testing.T) {
	h := serve(t, Settings{MaxRequestBody: 1000, RequestBudget: 1000}, func(w http.ResponseWriter, r *http.Request) {})
	slow := func() *bufio.Reader {
		conn, err := net.Dial("tcp", h.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conn.SetDeadline(time.Now().Add(30 * time.Second))
		fmt.Fprintf(conn, "POST /pay HTTP/1.1\r\nHost: x\r\nIdempotency-Key: slow\r\nContent-Length: 1000\r\n\r\n%s", strings.Repeat("x", 600))
		return bufio.NewReader(conn)
	}
	slow()
	deadline := time.Now().Add(30 * time.Second)
	for look := 0; h.post(fmt.Sprint("look", look), strings.Repeat("x", 401)).status != 503; look++ {
		if time.Now().After(deadline) {
			t.Fatal("600 bytes of 1000 never count")
		}
	}
	response, err := http.ReadResponse(slow(), nil)
	if err != nil || response.StatusCode != 503 {
		t.Error(response, err)
	}
}

func TestSettingsAreChecked(t *testing.T) {
	engine, _ := NewEngine(NewMemoryStore(), EngineOptions{})
	for _, settings := range []Settings{
		{Profile: "other"}, {Scope: []string{"x"}}, {Scope: []string{"single-tenant", "host"}}, {KeyFormat: "pattern:("}, {KeySyntax: "x"},
		{KeyHeaders: []string{"Cookie"}}, {Methods: []string{"a b"}}, {Lease: time.Millisecond}, {Retention: time.Millisecond},
		{OnAbandoned: "x"}, {StoredHeaders: []string{"Set-Cookie"}}, {ReplayMarker: "Date"}, {ReleaseStatuses: []int{200}},
		{Methods: []string{}}, {KeyHeaders: []string{}}, {Scope: []string{}}, {NaturalKey: []string{}}, {Methods: []string{"POST,PATCH"}}, {Methods: []string{"GET"}},
		{NaturalKey: []string{"/a"}}, {FingerprintExclude: []string{"a"}}, {Documentation: "x"}, {MaxInFlight: -1}, {Authority: "x"},
	} {
		if _, err := Middleware(engine, settings); err == nil || !strings.HasPrefix(err.Error(), "oncegate: ") {
			t.Errorf("%+v: %v", settings, err)
		}
	}
	var unsupported *UnsupportedSetting
	if _, err := ParseSettings([]byte(`{"jwt-keys": "x"}`)); !errors.As(err, &unsupported) || unsupported.Name != "jwt-keys" {
		t.Error(err)
	}
	if _, err := ParseSettings([]byte(`{"release-status": 404}`)); err == nil || !strings.Contains(err.Error(), `did you mean "release-statuses"?`) {
		t.Error(err)
	}
	if _, err := NewEngine(NewMemoryStore(), EngineOptions{Service: "a b"}); err == nil {
		t.Error("a service name with a space")
	}
}

func TestParsedSettings(t *testing.T) {
	for text, want := range map[string]Settings{
		`{"methods": "POST"}`:                {Methods: []string{"POST"}},
		`{"release-statuses": 404}`:          {ReleaseStatuses: []int{404}},
		`{"release-statuses": "404"}`:        {ReleaseStatuses: []int{404}},
		`{"release-statuses": [404, "422"]}`: {ReleaseStatuses: []int{404, 422}},
	} {
		if got, err := ParseSettings([]byte(text)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	got, err := ParseSettings([]byte(`{"release-statuses": ["4xx"]}`))
	if err != nil || len(got.ReleaseStatuses) != 100 || got.ReleaseStatuses[0] != 400 || got.ReleaseStatuses[99] != 499 {
		t.Error(got.ReleaseStatuses, err)
	}
	for _, name := range settingNames {
		for _, value := range []string{"null", "{}", "[null]", "[[1]]", "1.5"} {
			_, err := ParseSettings([]byte(fmt.Sprintf(`{%q: %s}`, name, value)))
			if err == nil || !strings.Contains(err.Error(), strconv.Quote(name)) || strings.Contains(err.Error(), "json:") {
				t.Errorf("%s: %s: %v", name, value, err)
			}
		}
	}
}

func TestAnUnknownMethodIsWarnedOf(t *testing.T) {
	var warnings bytes.Buffer
	engine, _ := NewEngine(NewMemoryStore(), EngineOptions{Logger: log.New(&warnings, "", 0)})
	if _, err := Middleware(engine, Settings{Scope: []string{"single-tenant"}, Methods: []string{"PSOT", "PATCH"}}); err != nil {
		t.Fatal(err)
	}
	if got := warnings.String(); got != "oncegate: Methods: no registered method is called \"PSOT\"; did you mean \"POST\"?\n" {
		t.Error(got)
	}
}

// awayStore is a store on a server that does not answer.
type awayStore struct{ Store }

func (awayStore) Claim(context.Context, RecordID, Claim) (ClaimReply, error) {
	return ClaimReply{}, &StoreError{StoreMisused, "claim", errors.New("the schema is missing")}
}

func TestAStoreOnAServerNeedsTheNameOfTheService(t *testing.T) {
	keys := &SealKeys{}
	for _, store := range []Store{awayStore{NewMemoryStore()}, NewPostgresStore(&sql.DB{}), NewSealedStore(NewPostgresStore(&sql.DB{}), keys)} {
		if _, err := NewEngine(store, EngineOptions{}); err == nil || !strings.Contains(err.Error(), "set EngineOptions.Service") {
			t.Errorf("%T: %v", store, err)
		}
		if _, err := NewEngine(store, EngineOptions{Service: "orders"}); err != nil {
			t.Errorf("%T: %v", store, err)
		}
	}
	for _, store := range []Store{NewMemoryStore(), NewSealedStore(NewMemoryStore(), keys)} {
		if _, err := NewEngine(store, EngineOptions{}); err != nil {
			t.Errorf("%T: %v", store, err)
		}
	}
}

func TestFailuresAreLoggedByDefault(t *testing.T) {
	var logged bytes.Buffer
	log.SetOutput(&logged)
	defer log.SetOutput(os.Stderr)
	engine, err := NewEngine(awayStore{NewMemoryStore()}, EngineOptions{Service: "orders"})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	request := httptest.NewRequest("POST", "/pay", strings.NewReader("5"))
	request.Header.Set("Idempotency-Key", "secret-key")
	response := httptest.NewRecorder()
	protect(http.NotFoundHandler()).ServeHTTP(response, request)
	if response.Code != 503 || !strings.Contains(logged.String(), "the schema is missing") || strings.Contains(logged.String(), "secret-key") {
		t.Error(response.Code, logged.String())
	}
}

func TestRefusalsThatNeedSomeoneAreLogged(t *testing.T) {
	var logged bytes.Buffer
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: log.New(&logged, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Header().Set("Idempotency-Store", "unknown") }))
	send := func(host, cookie string) {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", "secret-key")
		if request.Host = host; cookie != "" {
			request.Header.Set("Cookie", cookie)
		}
		handler.ServeHTTP(httptest.NewRecorder(), request)
	}
	for i := 0; i < 3; i++ {
		send("shop.test", "sid=secret-cookie")
		send("shop.test", "")
		send("other.test", "")
	}
	for _, text := range []string{"scope-not-set", "outcome-unknown", "host-differs"} {
		if n := strings.Count(logged.String(), text); n != 1 {
			t.Errorf("%s is logged %d times: %s", text, n, logged.String())
		}
	}
	if strings.Contains(logged.String(), "secret") {
		t.Error(logged.String())
	}
}

type order struct{ Cents int }

type hiddenOrder struct{ cents int }

func TestStructsWithoutExportedFieldsAreRefused(t *testing.T) {
	engine, _ := NewEngine(NewMemoryStore(), EngineOptions{})
	ctx, runs := context.Background(), 0
	_, err := Do(ctx, engine, "charge", "a", hiddenOrder{1}, func(context.Context, *Attempt) (int, error) { runs++; return 1, nil })
	if err == nil || !strings.Contains(err.Error(), "has no exported field") {
		t.Error(err)
	}
	_, err = Do(ctx, engine, "charge", "a", &hiddenOrder{1}, func(context.Context, *Attempt) (int, error) { runs++; return 1, nil })
	if err == nil {
		t.Error("by a pointer")
	}
	_, err = Do(ctx, engine, "charge", "a", 1, func(context.Context, *Attempt) (hiddenOrder, error) { runs++; return hiddenOrder{1}, nil })
	if err == nil || runs != 0 {
		t.Error(err, runs)
	}
	// These have a JSON of their own, or nothing to lose.
	for i, input := range []interface{}{time.Now(), struct{}{}, order{1}, nil} {
		if _, err := Do(ctx, engine, "charge", fmt.Sprint("b", i), input, func(context.Context, *Attempt) (int, error) { return 1, nil }); err != nil {
			t.Error(i, err)
		}
	}
}

func TestFunctions(t *testing.T) {
	ctx := context.Background()
	engine, _ := NewEngine(NewMemoryStore(), EngineOptions{})
	charge := Function[order, string]{Engine: engine, Name: "charge", Wait: -1}
	runs := 0
	run := func(context.Context, *Attempt) (string, error) { runs++; return fmt.Sprint("run ", runs), nil }
	for i := 0; i < 3; i++ {
		if got, err := charge.Do(ctx, "a", order{5}, run); got != "run 1" || err != nil {
			t.Fatal(got, err)
		}
	}
	if _, err := charge.Do(ctx, "a", order{6}, run); !errors.Is(err, ErrKeyReused) {
		t.Error(err)
	}
	over, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := charge.Do(over, "over", order{5}, run); err != context.Canceled || runs != 1 {
		t.Error(err, runs)
	}
	if _, err := charge.Do(ctx, "", order{6}, run); !errors.Is(err, ErrInvalidKey) {
		t.Error(err)
	}
	if got, err := Do(ctx, engine, "charge", "a", order{5}, run); got != "run 1" || err != nil {
		t.Error(got, err)
	}
	if _, err := (Function[order, int]{Engine: engine, Name: "charge"}).Do(ctx, "a", order{5}, nil); !errors.As(err, new(*UndecodableError)) {
		t.Error(err)
	}
	declined := errors.New("declined")
	fails := func(context.Context, *Attempt) (string, error) { return "", declined }
	for fate, want := range map[ErrorFate]func(error) bool{
		FateUnknown: func(err error) bool { return errors.Is(err, ErrOutcomeUnknown) },
		FateRelease: func(err error) bool { return err == nil },
		FateStore: func(err error) bool {
			var stored *StoredError
			return errors.As(err, &stored) && stored.Message == "declined"
		},
	} {
		own := charge
		fate := fate
		own.Errors = func(error) ErrorFate { return fate }
		key := fmt.Sprint("error ", fate)
		if _, err := own.Do(ctx, key, order{5}, fails); err != declined {
			t.Error(err)
		}
		if _, err := own.Do(ctx, key, order{5}, run); !want(err) {
			t.Errorf("%d: %v", fate, err)
		}
	}
	panics := func(context.Context, *Attempt) (string, error) { panic("boom") }
	log.SetOutput(io.Discard)
	if _, err := charge.Do(ctx, "p", order{5}, panics); !errors.As(err, new(*PanicError)) {
		t.Error(err)
	}
	if _, err := charge.Do(ctx, "p", order{5}, run); !errors.Is(err, ErrOutcomeUnknown) {
		t.Error(err)
	}
	exits := func(context.Context, *Attempt) (string, error) { runtime.Goexit(); return "", nil }
	if _, err := charge.Do(ctx, "e", order{5}, exits); !errors.As(err, new(*PanicError)) {
		t.Error(err)
	}
	// A caller that goes away does not stop the function.
	began, proceed := make(chan struct{}), make(chan struct{})
	leaving, leave := context.WithCancel(ctx)
	gone := make(chan error, 1)
	go func() {
		_, err := charge.Do(leaving, "slow", order{5}, func(inner context.Context, _ *Attempt) (string, error) {
			close(began)
			<-proceed
			return "slow", inner.Err()
		})
		gone <- err
	}()
	<-began
	leave()
	if err := <-gone; err != context.Canceled {
		t.Error(err)
	}
	if _, err := charge.Do(ctx, "slow", order{5}, run); !errors.Is(err, ErrInProgress) {
		t.Error(err)
	}
	close(proceed)
	if err := engine.Drain(ctx); err != nil {
		t.Error(err)
	}
	if got, err := charge.Do(ctx, "slow", order{5}, run); got != "slow" || err != nil {
		t.Error(got, err)
	}
}

func TestSidecarFields(t *testing.T) {
	if attempt, err := FromSidecar(http.Header{}); attempt != nil || err != nil || attempt.CompleteIn(context.Background(), nil, nil) != nil {
		t.Error(attempt, err)
	}
	// Nor has a request without a key an attempt of the middleware.
	if err := AttemptFrom(context.Background()).CompleteIn(context.Background(), nil); err != nil {
		t.Error(err)
	}
	header := http.Header{}
	header.Set("Oncegate-Record", strings.Repeat("ab", 32))
	header.Set("Oncegate-Token", "1795276474000")
	header.Set("Oncegate-Attempt", "2")
	attempt, err := FromSidecar(header)
	if err != nil || attempt.Token != 1795276474000 || attempt.Number != 2 || attempt.Record.String() != strings.Repeat("ab", 32) {
		t.Error(attempt, err)
	}
	header.Add("Oncegate-Token", "1")
	if _, err := FromSidecar(header); err == nil {
		t.Error("two tokens")
	}
}
