package oncegate

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// stuckWriter is the writer of a client that reads nothing.
type stuckWriter struct {
	*httptest.ResponseRecorder
	begun, proceed chan struct{}
}

func (w *stuckWriter) Write(data []byte) (int, error) {
	w.begun <- struct{}{}
	<-w.proceed
	return w.ResponseRecorder.Write(data)
}

// Replays that nobody reads do not stop new requests, also if all callers are one.
func TestReplaysThatNobodyReads(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Service: "test", Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Scope: oneTenant, ResponseBudget: 1000, MaxResponseBody: 200})
	if err != nil {
		t.Fatal(err)
	}
	protected := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, strings.Repeat("x", 100)) }))
	send := func(w http.ResponseWriter, key string) {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", key)
		protected.ServeHTTP(w, request)
	}
	status := func(key string) int {
		w := httptest.NewRecorder()
		send(w, key)
		return w.Code
	}
	begun, proceed, ended := make(chan struct{}, 20), make(chan struct{}), make(chan struct{}, 20)
	replays := 0
	for ; status("a") == 200 && replays < 20; replays++ {
		go func() {
			send(&stuckWriter{httptest.NewRecorder(), begun, proceed}, "a")
			ended <- struct{}{}
		}()
		<-begun
	}
	if first := status("b"); replays != 7 || first != 200 {
		t.Error(replays, "replays of 100 bytes are in 750; a new request:", first)
	}
	close(proceed)
	for i := 0; i < replays; i++ {
		eventually(t, "a replay", ended)
	}
}

// A caller that reads no response gets none any more at some time, and the others still do.
func TestCallerThatReadsNothing(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Service: "test", Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{Scope: []string{"required-header:x-user"}, ResponseBudget: 1000, MaxResponseBody: 200})
	if err != nil {
		t.Fatal(err)
	}
	protected := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, strings.Repeat("x", 100)) })).(*protected)
	send := func(w http.ResponseWriter, user, key string) {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", key)
		request.Header.Set("X-User", user)
		protected.ServeHTTP(w, request)
	}
	status := func(user, key string) int {
		w := httptest.NewRecorder()
		send(w, user, key)
		return w.Code
	}
	if first, other := status("idle", "a"), status("other", "a"); first != 200 || other != 200 {
		t.Fatal(first, other)
	}
	begun, proceed, ended := make(chan struct{}, 20), make(chan struct{}), make(chan struct{}, 20)
	replays := 0
	for ; status("idle", "a") == 200 && replays < 20; replays++ {
		go func() {
			send(&stuckWriter{httptest.NewRecorder(), begun, proceed}, "idle", "a")
			ended <- struct{}{}
		}()
		<-begun
	}
	if replays != 2 {
		t.Error(replays, "replays of 100 bytes are in a share of 250")
	}
	if first, replay, own := status("other", "b"), status("other", "a"), status("idle", "a"); first != 200 || replay != 200 || own != 503 {
		t.Error("another caller:", first, replay, "the one that reads nothing:", own)
	}
	close(proceed)
	for i := 0; i < replays; i++ {
		eventually(t, "a replay", ended)
	}
	if again := status("idle", "a"); again != 200 || protected.limits.responseBytes != 0 || len(protected.limits.perCaller) != 0 {
		t.Error(again, protected.limits.responseBytes, protected.limits.perCaller)
	}
}

// deadlineWriter is a writer with deadlines, as net/http has from Go 1.20.
type deadlineWriter struct {
	http.ResponseWriter
	conn net.Conn
}

func (w deadlineWriter) SetWriteDeadline(deadline time.Time) error {
	return w.conn.SetWriteDeadline(deadline)
}

type connKey struct{}

// A client that takes nothing of its response for WriteTimeout loses its connection. One that reads slowly gets all, and may use its connection again.
func TestClientThatTakesNothing(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Service: "test", Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	const size = 24 << 20
	protect, err := Middleware(engine, Settings{Scope: oneTenant, MaxResponseBody: 32 << 20, WriteTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	own := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			w.Write(make([]byte, size))
		}
	})).(*protected)
	ended := make(chan struct{}, 9)
	outer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		own.ServeHTTP(deadlineWriter{w, r.Context().Value(connKey{}).(net.Conn)}, r)
		ended <- struct{}{}
	})
	server := httptest.NewUnstartedServer(outer)
	server.Config.ConnContext = func(ctx context.Context, conn net.Conn) context.Context {
		return context.WithValue(ctx, connKey{}, conn)
	}
	server.Start()
	defer server.Close()
	dial := func() net.Conn {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conn.SetDeadline(time.Now().Add(time.Minute))
		return conn
	}
	ask := func(conn net.Conn, method string) {
		fmt.Fprintf(conn, "%s /pay HTTP/1.1\r\nHost: x\r\nIdempotency-Key: a\r\nContent-Length: 0\r\n\r\n", method)
	}
	// The first response, and a replay.
	for i := 0; i < 2; i++ {
		idle := dial()
		defer idle.Close()
		ask(idle, "POST")
		eventually(t, "the response that nobody reads", ended)
	}
	own.limits.mu.Lock()
	if own.limits.responseBytes != 0 {
		t.Error(own.limits.responseBytes)
	}
	own.limits.mu.Unlock()
	slow := dial()
	defer slow.Close()
	reader := bufio.NewReader(slow)
	ask(slow, "POST")
	response, err := http.ReadResponse(reader, nil)
	if err != nil || response.StatusCode != 200 || response.Header.Get("Idempotent-Replayed") != "true" {
		t.Fatal(response, err)
	}
	for left := int64(size); left > 0; left -= size / 8 {
		// Longer than WriteTimeout in sum.
		time.Sleep(200 * time.Millisecond)
		if n, err := io.CopyN(io.Discard, response.Body, size/8); err != nil {
			t.Fatal(left, n, err)
		}
	}
	if n, err := io.Copy(io.Discard, response.Body); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	time.Sleep(1200 * time.Millisecond)
	ask(slow, "GET")
	if response, err := http.ReadResponse(reader, nil); err != nil || response.StatusCode != 200 {
		t.Error(response, err)
	}
}
