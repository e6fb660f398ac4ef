package oncegate

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// behind serves a handler behind the middleware, which is behind outer.
func behind(t *testing.T, settings Settings, outer func(http.Handler) http.Handler, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: log.New(io.Discard, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	settings.Scope, settings.Panicked = oneTenant, func(*http.Request, interface{}, []byte) {}
	protect, err := Middleware(engine, settings)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewUnstartedServer(outer(protect(handler)))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// postTo sends a request without a coding that net/http would undo.
func postTo(t *testing.T, url, key, body string, header ...string) reply {
	t.Helper()
	request, err := http.NewRequest("POST", url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Idempotency-Key", key)
	for i := 0; i < len(header); i += 2 {
		request.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableCompression: true}
	defer transport.CloseIdleConnections()
	response, err := transport.RoundTrip(request)
	if err != nil {
		return reply{err: err}
	}
	defer response.Body.Close()
	var source io.Reader = response.Body
	if response.Header.Get("Content-Encoding") == "gzip" {
		if source, err = gzip.NewReader(source); err != nil {
			return reply{status: response.StatusCode, header: response.Header, err: err}
		}
	}
	got, err := io.ReadAll(source)
	for name, values := range response.Trailer {
		response.Header["Trailer-"+name] = values
	}
	return reply{response.StatusCode, string(got), response.Header, err}
}

type gzipWriter struct {
	http.ResponseWriter
	to io.Writer
}

func (w gzipWriter) Write(data []byte) (int, error) { return w.to.Write(data) }

// compressing sets the coding before the handler, as gorilla/handlers does.
func compressing(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Vary", "Accept-Encoding")
		if r.Header.Get("Accept-Encoding") != "gzip" {
			next.ServeHTTP(w, r)
			return
		}
		w.Header().Set("Content-Encoding", "gzip")
		w.Header().Set("Etag", `"compressed"`)
		to := gzip.NewWriter(w)
		defer to.Close()
		next.ServeHTTP(gzipWriter{w, to}, r)
	})
}

func TestCompressionInFront(t *testing.T) {
	s := behind(t, Settings{}, compressing, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		io.WriteString(w, `{"paid":true}`)
	})
	for _, order := range [][]string{{"gzip", "identity", "gzip"}, {"identity", "gzip", "identity"}} {
		for i, coding := range order {
			got := postTo(t, s.URL, strings.Join(order, "-"), "", "Accept-Encoding", coding)
			encoding, tag := got.header.Get("Content-Encoding"), got.header.Get("Etag")
			if got.err != nil || got.status != 200 || got.body != `{"paid":true}` || (encoding == "gzip") != (coding == "gzip") || (tag != "") != (coding == "gzip") ||
				got.isReplay() != (i > 0) || got.header.Get("Vary") != "Accept-Encoding" {
				t.Errorf("%v, request %d: %+v", order, i, got)
			}
		}
	}
}

// A handler that sets no media type has that of net/http, which looks at the first bytes together, also behind a compressing handler, and in replays.
func TestMediaTypeThatNobodySets(t *testing.T) {
	handler := func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/empty" {
			return
		}
		io.WriteString(w, "\n  ")
		io.WriteString(w, "<!DOCTYPE html><p>paid</p>")
	}
	s := behind(t, Settings{}, compressing, handler)
	for _, first := range []string{"gzip", "identity"} {
		for i, coding := range []string{first, "gzip", "identity"} {
			got := postTo(t, s.URL, first, "", "Accept-Encoding", coding)
			if got.err != nil || got.header.Get("Content-Type") != "text/html; charset=utf-8" || !strings.HasSuffix(got.body, "<p>paid</p>") || got.isReplay() != (i > 0) {
				t.Errorf("%s, request %d: %+v", first, i, got)
			}
		}
	}
	for i := 0; i < 2; i++ {
		if got := postTo(t, s.URL+"/empty", "empty", ""); got.err != nil || got.header["Content-Type"] != nil || got.isReplay() != (i > 0) {
			t.Errorf("%+v", got)
		}
	}
}

// wrapped is how Echo wraps a middleware (echo.WrapMiddleware): what its handlers return as an error is written to the writer of the middleware
// after that has returned.
func wrapped(protect func(http.Handler) http.Handler, handler func(w http.ResponseWriter, r *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var err error
		protect(http.HandlerFunc(func(own http.ResponseWriter, r *http.Request) {
			w, err = own, handler(own, r)
		})).ServeHTTP(w, r)
		if err != nil {
			w.WriteHeader(400)
			io.WriteString(w, err.Error())
		}
	}
}

// The log says what to do if a response comes too late, and says nothing if the handler has written it, or nothing is written.
func TestResponsesThatAreWrittenAfterTheHandler(t *testing.T) {
	for name, handler := range map[string]func(w http.ResponseWriter, r *http.Request) error{
		"late":         func(http.ResponseWriter, *http.Request) error { return errors.New("bad") },
		"written":      func(w http.ResponseWriter, r *http.Request) error { w.WriteHeader(201); return errors.New("bad") },
		"empty":        func(http.ResponseWriter, *http.Request) error { return nil },
		"panics later": func(http.ResponseWriter, *http.Request) error { panic(errors.New("bad")) },
	} {
		text := &logged{}
		engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: text})
		if err != nil {
			t.Fatal(err)
		}
		protect, err := Middleware(engine, Settings{Scope: oneTenant, Panicked: func(*http.Request, interface{}, []byte) {}})
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < 2; i++ {
			request := httptest.NewRequest("POST", "/", nil)
			request.Header.Set("Idempotency-Key", "a")
			wrapped(protect, handler).ServeHTTP(httptest.NewRecorder(), request)
		}
		if n := strings.Count(text.String(), "protect(e)"); n != map[bool]int{true: 1, false: 0}[name == "late"] {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// What the handler itself encodes is stored so.
func TestCompressionInside(t *testing.T) {
	s := behind(t, Settings{}, func(next http.Handler) http.Handler { return next }, func(w http.ResponseWriter, r *http.Request) {
		compressing(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid") })).ServeHTTP(w, r)
	})
	for i := 0; i < 2; i++ {
		if got := postTo(t, s.URL, "a", "", "Accept-Encoding", "gzip"); got.err != nil || got.body != "paid" || got.header.Get("Content-Encoding") != "gzip" || got.isReplay() != (i > 0) {
			t.Errorf("%+v", got)
		}
	}
}

// A panic of what reads the body is one of the request, and not the end of the program.
func TestBodiesThatPanic(t *testing.T) {
	for _, value := range []interface{}{"boom", http.ErrAbortHandler} {
		s := behind(t, Settings{}, func(next http.Handler) http.Handler {
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.ContentLength > 0 {
					r.Body = panicBody{r.Body, value}
				}
				next.ServeHTTP(w, r)
			})
		}, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid") })
		if got := postTo(t, s.URL, "a", "body"); got.err == nil {
			t.Errorf("%+v", got)
		}
		if got := postTo(t, s.URL, "a", ""); got.body != "paid" {
			t.Errorf("%+v", got)
		}
	}
}

type panicBody struct {
	io.ReadCloser
	value interface{}
}

func (b panicBody) Read([]byte) (int, error) { panic(b.value) }

func TestMaxBytesHandlerInFront(t *testing.T) {
	s := behind(t, Settings{}, func(next http.Handler) http.Handler { return http.MaxBytesHandler(next, 3) }, func(w http.ResponseWriter, r *http.Request) {
		t.Error("executed")
	})
	if got := postTo(t, s.URL, "a", "body"); got.status != 413 || got.problem() != "request-too-large" || !strings.Contains(got.body, "At most 3 bytes") {
		t.Errorf("%+v", got)
	}
}

// Trailers that the handler has not announced arrive at every client.
func TestUnannouncedTrailers(t *testing.T) {
	handler := func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "paid")
		w.(http.Flusher).Flush()
		w.Header().Set(http.TrailerPrefix+"X-Sum", "42")
	}
	backend := httptest.NewServer(http.HandlerFunc(handler))
	defer backend.Close()
	address, _ := url.Parse(backend.URL)
	none := func(next http.Handler) http.Handler { return next }
	for name, s := range map[string]*httptest.Server{"handler": behind(t, Settings{}, none, handler),
		"proxy": behind(t, Settings{}, none, httputil.NewSingleHostReverseProxy(address).ServeHTTP)} {
		for i := 0; i < 2; i++ {
			if got := postTo(t, s.URL, "a", ""); got.body != "paid" || got.header.Get("Trailer-X-Sum") != "42" || got.isReplay() != (i > 0) {
				t.Errorf("%s, request %d: %+v", name, i, got)
			}
		}
	}
}

// A trailer that the handler has announced in another case, or sets twice, is announced once.
func TestTrailersInAnyCase(t *testing.T) {
	s := behind(t, Settings{}, func(next http.Handler) http.Handler { return next }, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Trailer", "x-checksum")
		io.WriteString(w, "paid")
		w.Header().Add(http.TrailerPrefix+"x-checksum", "42")
		w.Header().Add(http.TrailerPrefix+"X-Other", "1")
		w.Header().Add(http.TrailerPrefix+"x-other", "1")
	})
	for i := 0; i < 2; i++ {
		conn, err := net.Dial("tcp", s.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
		text, _ := io.ReadAll(conn)
		conn.Close()
		got := strings.ToLower(string(text))
		if strings.Count(got, "\r\ntrailer: x-checksum") != 1 || strings.Count(got, "\r\ntrailer: x-other") != 1 || strings.Count(got, "\r\ntrailer:") != 2 ||
			strings.Count(got, "\r\nx-checksum: 42\r\n") != 1 || strings.Count(got, "x-other: 1\r\n") != 2 {
			t.Errorf("request %d: %s", i, text)
		}
	}
}

// A success that is shorter than its Content-Length is no failure that frees the key.
func TestSuccessThatIsTooShort(t *testing.T) {
	executions := int32(0)
	s := behind(t, Settings{ServerErrors: "release"}, func(next http.Handler) http.Handler { return next }, func(w http.ResponseWriter, r *http.Request) {
		atomic.AddInt32(&executions, 1)
		w.Header().Set("Content-Length", "10")
		if r.URL.Path == "/fails" {
			w.WriteHeader(503)
		}
		io.WriteString(w, "short")
	})
	for i := 0; i < 2; i++ {
		if got := postTo(t, s.URL, "a", ""); got.problem() != "outcome-unknown" {
			t.Errorf("%+v", got)
		}
	}
	if executions != 1 {
		t.Error(executions, "executions")
	}
	if got := postTo(t, s.URL+"/fails", "b", ""); got.problem() != "handler-failed" {
		t.Errorf("%+v", got)
	}
}

// What a handler has written before it takes the connection precedes what it writes to that.
func TestHijackedAfterTheStatus(t *testing.T) {
	s := behind(t, Settings{}, func(next http.Handler) http.Handler { return next }, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/vnd.raw-stream")
		w.WriteHeader(200)
		io.WriteString(w, "first")
		w.(http.Flusher).Flush()
		conn, buffer, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		buffer.WriteString(" then")
		buffer.Flush()
	})
	conn, err := net.Dial("tcp", s.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	fmt.Fprint(conn, "POST / HTTP/1.0\r\nIdempotency-Key: a\r\n\r\n")
	text, _ := io.ReadAll(bufio.NewReader(conn))
	if got := string(text); !strings.HasPrefix(got, "HTTP/1.0 200 OK\r\n") || !strings.Contains(got, "application/vnd.raw-stream") || !strings.HasSuffix(got, "\r\n\r\nfirst then") {
		t.Errorf("%q", got)
	}
	if got := postTo(t, s.URL, "a", "", "Host", ""); got.status != 422 {
		t.Errorf("%+v", got)
	}
}

// A proxy whose backend cut a success short does not free the key.
func TestProxyOfASuccessThatIsCutShort(t *testing.T) {
	executions := int32(0)
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		atomic.AddInt32(&executions, 1)
		w.Header().Set("Content-Length", "10")
		w.WriteHeader(201)
		io.WriteString(w, "short")
	}))
	defer backend.Close()
	address, _ := url.Parse(backend.URL)
	proxy := httputil.NewSingleHostReverseProxy(address)
	proxy.ErrorLog = log.New(io.Discard, "", 0)
	s := behind(t, Settings{Profile: "classic"}, func(next http.Handler) http.Handler { return next }, proxy.ServeHTTP)
	postTo(t, s.URL, "a", "")
	if got := postTo(t, s.URL, "a", ""); got.status != 500 || executions != 1 {
		t.Errorf("%d executions, %+v", executions, got)
	}
}

// A body without a length that a handler in front has read must not be the same for all. An empty one is as no body.
func TestBodiesWithoutALength(t *testing.T) {
	read := map[string]func(r *http.Request){
		"/":     func(r *http.Request) {},
		"/read": func(r *http.Request) { io.Copy(io.Discard, r.Body) },
		// The end may come later than the bytes.
		"/bytes":    func(r *http.Request) { io.ReadFull(r.Body, make([]byte, len(`{"cents":5}`))) },
		"/limit":    func(r *http.Request) { r.Body = http.MaxBytesReader(nil, r.Body, 99) },
		"/bounded":  func(r *http.Request) { r.Body = http.MaxBytesReader(nil, r.Body, 99); io.Copy(io.Discard, r.Body) },
		"/embedded": func(r *http.Request) { r.Body = &struct{ io.ReadCloser }{r.Body}; io.Copy(io.Discard, r.Body) },
		"/restored": func(r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(bytes.NewReader(body))
		},
	}
	front := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.ContentLength != -1 {
				t.Error(r.URL, "has the length", r.ContentLength)
			}
			if hasSeenEnd(r.Body) {
				t.Error(r.URL, "has ended before it was read")
			}
			read[r.URL.Path](r)
			// Other versions of net/http may show this only.
			if wasRead := r.URL.Path == "/read" || r.URL.Path == "/bounded" || r.URL.Path == "/embedded"; wasRead && !hasSeenEnd(r.Body) {
				t.Error(r.URL, "has not ended")
			}
			next.ServeHTTP(w, r)
		})
	}
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Scope: oneTenant})
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(front(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(201)
		io.Copy(w, r.Body)
	}))))
	server.EnableHTTP2 = true
	server.StartTLS()
	defer server.Close()
	http1 := func(path, key, body, fields string) (int, string) {
		conn, err := tls.Dial("tcp", server.Listener.Addr().String(), &tls.Config{InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.SetDeadline(time.Now().Add(time.Minute))
		fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nIdempotency-Key: %s\r\nTransfer-Encoding: chunked\r\n%s\r\n", path, key, fields)
		if body != "" {
			fmt.Fprintf(conn, "%x\r\n%s\r\n", len(body), body)
			// Mostly, the end is another packet.
			time.Sleep(20 * time.Millisecond)
		}
		fmt.Fprint(conn, "0\r\n\r\n")
		reader := bufio.NewReader(conn)
		response, err := http.ReadResponse(reader, nil)
		for err == nil && response.StatusCode == 100 {
			response, err = http.ReadResponse(reader, nil)
		}
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		got, _ := io.ReadAll(response.Body)
		return response.StatusCode, string(got)
	}
	http2 := func(path, key, body string) (int, string) {
		request, _ := http.NewRequest("POST", server.URL+path, struct{ io.Reader }{strings.NewReader(body)})
		request.Header.Set("Idempotency-Key", key)
		response, err := server.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		got, _ := io.ReadAll(response.Body)
		if response.ProtoMajor != 2 {
			t.Error(response.Proto)
		}
		return response.StatusCode, string(got)
	}
	for path := range read {
		for i, body := range []string{"", `{"cents":5}`} {
			status := 201
			if body != "" && path != "/" && path != "/limit" && path != "/restored" {
				status = 400
			}
			check := func(version string, got int, text string) {
				if got != status || status == 400 && !strings.Contains(text, "request-incomplete") || status == 201 && text != body {
					t.Errorf("%s %s %q: %d %s", version, path, body, got, text)
				}
			}
			got, text := http1(path, fmt.Sprint("one", path, i), body, "")
			check("HTTP/1.1", got, text)
			got, text = http1(path, fmt.Sprint("expects", path, i), body, "Expect: 100-continue\r\n")
			check("HTTP/1.1 with Expect", got, text)
			got, text = http2(path, fmt.Sprint("two", path, i), body)
			check("HTTP/2", got, text)
		}
	}
	// An empty body equals one that is not there.
	for i := 0; i < 2; i++ {
		request := httptest.NewRequest("POST", "/none", nil)
		request.Body, request.ContentLength = http.NoBody, int64(-i)
		request.Header.Set("Idempotency-Key", "none")
		response := httptest.NewRecorder()
		server := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(201) }))
		if server.ServeHTTP(response, request); response.Code != 201 || (response.Header().Get("Idempotent-Replayed") != "") != (i > 0) {
			t.Error(i, response.Code, response.Body)
		}
	}
}

type panicReply struct{}

func (panicReply) Result() (interface{}, error) { panic("interface conversion") }

type panicClient struct{}

func (panicClient) EvalSha(context.Context, string, []string, ...interface{}) panicReply {
	return panicReply{}
}
func (panicClient) Eval(context.Context, string, []string, ...interface{}) panicReply {
	return panicReply{}
}

// A panic of an adapter or a driver is a failure of the store.
func TestStoresThatPanic(t *testing.T) {
	store, err := NewRedisStore[panicReply](panicClient{})
	if err != nil {
		t.Fatal(err)
	}
	store.AllowEviction = true
	engine, err := NewEngine(store, EngineOptions{Service: "tests", Logger: log.New(io.Discard, "", 0)})
	if err != nil {
		t.Fatal(err)
	}
	_, err = Do(context.Background(), engine, "pay", "a", 5, func(context.Context, *Attempt) (int, error) { return 5, nil })
	var own *StoreError
	if !errors.As(err, &own) || own.Kind != StoreUnavailable || !strings.Contains(err.Error(), "interface conversion") {
		t.Error(err)
	}
}
