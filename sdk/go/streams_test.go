package oncegate

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// A stream has no end of its own: its handler waits for the end of its context.
func TestStreamEndsAfterItsClient(t *testing.T) {
	defer func(before time.Duration) { streamGrace = before }(streamGrace)
	streamGrace = 20 * time.Millisecond
	ended := make(chan error, 1)
	h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		io.WriteString(w, "data: 1\n\n")
		w.(http.Flusher).Flush()
		derived, cancel := context.WithTimeout(r.Context(), time.Minute)
		defer cancel()
		<-derived.Done()
		ended <- r.Context().Err()
	})
	ctx, cancel := context.WithCancel(context.Background())
	request, _ := http.NewRequestWithContext(ctx, "POST", h.URL, nil)
	request.Header.Set("Idempotency-Key", "a")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	response.Body.Read(make([]byte, 10))
	cancel()
	select {
	case err := <-ended:
		if err != context.Canceled {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the handler did not end")
	}
}

// Handlers in front that change the body, such as a simple gzip, must not get a length that the handler did not set.
func TestNoLengthThatTheHandlerDidNotSet(t *testing.T) {
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if unwraps, ok := w.(interface{ Unwrap() http.ResponseWriter }); !ok || unwraps.Unwrap() == nil {
			t.Error("http.ResponseController needs Unwrap")
		}
		w.Header().Set("Location", "/a\r\nSet-Cookie: b")
		io.WriteString(w, strings.Repeat("x", 5000))
	}))
	for i := 0; i < 2; i++ {
		request := httptest.NewRequest("POST", "/", nil)
		request.Header.Set("Idempotency-Key", "a")
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		location := lineBreaks.Replace(recorder.Header().Get("Location"))
		if recorder.Header().Get("Content-Length") != "" || recorder.Body.Len() != 5000 || location != "/a  Set-Cookie: b" {
			t.Errorf("%d: %v", i, recorder.Header())
		}
	}
}

// All callers of a key get the same result, also the one whose attempt was overtaken.
func TestFunctionThatWasOvertaken(t *testing.T) {
	store := NewMemoryStore()
	engine, err := NewEngine(store, EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	other, err := NewEngine(store, EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for name, takeOver := range map[string]bool{"another attempt": true, "none": false} {
		got, err := Do(context.Background(), engine, "charge", name, 5, func(_ context.Context, attempt *Attempt) (string, error) {
			if !store.resolve(attempt.Record(), resolution{kind: "release", force: true, retention: time.Minute}) {
				t.Fatal("not released")
			}
			if takeOver {
				got, err := Do(context.Background(), other, "charge", name, 5, func(context.Context, *Attempt) (string, error) { return "second", nil })
				if err != nil || got != "second" {
					t.Error(got, err)
				}
			}
			return "first", nil
		})
		if takeOver && (err != nil || got != "second") || !takeOver && !errors.Is(err, ErrOutcomeUnknown) {
			t.Errorf("%s: %q %v", name, got, err)
		}
	}
}

// closedBody notices its Close.
type closedBody struct {
	io.Reader
	isClosed bool
}

func (b *closedBody) Close() error {
	b.isClosed = true
	return nil
}

func TestClientRefusesAKeyThatCannotBeSent(t *testing.T) {
	body := &closedBody{Reader: strings.NewReader("x")}
	request, _ := http.NewRequest("POST", "http://127.0.0.1:1", body)
	request.Header["Idempotency-Key"] = []string{"a\r\nb"}
	var failed *SendError
	_, err := (&Client{Backoff: -5}).Do(request)
	if !errors.As(err, &failed) || failed.Kind != Unsendable || failed.MayHaveTakenEffect || !body.isClosed {
		t.Errorf("%v, closed: %v", err, body.isClosed)
	}
	(&sending{Client: &Client{Backoff: -5}}).pause()
}

// A response without an end reaches its client whatever becomes of the record, and its handler ends after its client.
func TestStreamsWithADirective(t *testing.T) {
	defer func(before time.Duration) { streamGrace = before }(streamGrace)
	streamGrace = 20 * time.Millisecond
	for name, own := range map[string]struct {
		directive string
		status    int
		retry     int
	}{
		"replay": {"replay", 200, 422}, "tombstone": {"tombstone", 200, 422}, "release": {"release", 200, 200}, "unknown": {"unknown", 200, 500},
		"freeing status": {"", 429, 429},
	} {
		ended := make(chan struct{}, 1)
		giveUp := make(chan struct{})
		var executions int32
		h := serve(t, Settings{}, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", "text/event-stream")
			if own.directive != "" {
				w.Header().Set("Idempotency-Store", own.directive)
			}
			w.WriteHeader(own.status)
			io.WriteString(w, "data: 1\n\n")
			w.(http.Flusher).Flush()
			if atomic.AddInt32(&executions, 1) > 1 {
				return
			}
			select {
			case <-r.Context().Done():
			case <-giveUp:
			}
			ended <- struct{}{}
		})
		send := func(ctx context.Context) (*http.Response, error) {
			request, _ := http.NewRequestWithContext(ctx, "POST", h.URL, nil)
			request.Header.Set("Idempotency-Key", "a")
			return http.DefaultClient.Do(request)
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		response, err := send(ctx)
		if err != nil {
			t.Error(name, "nothing reaches the client:", err)
			cancel()
			close(giveUp)
			continue
		}
		head := make([]byte, 9)
		if _, err := io.ReadFull(response.Body, head); err != nil || string(head) != "data: 1\n\n" || response.StatusCode != own.status || response.Header.Get("Idempotency-Store") != "" {
			t.Error(name, response.StatusCode, string(head), err)
		}
		cancel()
		response.Body.Close()
		eventually(t, "the end of the handler: "+name, ended)
		drain(t, h.engine)
		response, err = send(context.Background())
		if err != nil {
			t.Fatal(name, err)
		}
		response.Body.Close()
		if response.StatusCode != own.retry {
			t.Error(name, "retry:", response.StatusCode)
		}
		drain(t, h.engine)
	}
}
