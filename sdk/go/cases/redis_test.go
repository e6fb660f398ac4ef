package main

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

// resendingClient sends the next claim a second time when its reply does not come, as go-redis does by itself. The first message arrives
// when late is closed.
type resendingClient struct {
	*resp.Client
	next    int32
	late    chan struct{}
	arrived chan struct{}
}

func (c *resendingClient) Options() *struct{ MaxRetries int } { return &struct{ MaxRetries int }{3} }

func (c *resendingClient) EvalSha(ctx context.Context, sha1 string, keys []string, args ...interface{}) *resp.Reply {
	// Only a claim has so many arguments.
	if len(args) == 8 && atomic.CompareAndSwapInt32(&c.next, 1, 0) {
		go func() {
			<-c.late
			c.Client.EvalSha(context.Background(), sha1, keys, args...)
			close(c.arrived)
		}()
		time.Sleep(100 * time.Millisecond)
	}
	return c.Client.EvalSha(ctx, sha1, keys, args...)
}

// A claim that a client has sent twice by itself, and whose first message arrives after the release, holds no key.
func TestClaimThatTheClientOfRedisSendsAgain(t *testing.T) {
	client := &resendingClient{Client: resp.New(redisURL[len("redis://"):]), late: make(chan struct{}), arrived: make(chan struct{})}
	store, err := oncegate.NewRedisStore[*resp.Reply](client)
	must(err)
	engine, err := oncegate.NewEngine(store, oncegate.EngineOptions{Service: "go-tests", Logger: &lines{}})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}, Wait: -1, Lease: time.Hour, ReleaseStatuses: []int{429}})
	must(err)
	executions := 0
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if executions++; executions == 2 {
			w.WriteHeader(429)
			return
		}
		fmt.Fprint(w, "execution ", executions)
	}))
	send := func(key string) *httptest.ResponseRecorder {
		request := httptest.NewRequest("POST", "/local", nil)
		request.Header.Set("Idempotency-Key", key)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		return recorder
	}
	send(newKey())
	key := newKey()
	atomic.StoreInt32(&client.next, 1)
	if got := send(key); got.Code != 429 {
		t.Fatal(got.Code, got.Body)
	}
	close(client.late)
	<-client.arrived
	var got *httptest.ResponseRecorder
	waitFor("the key", func() bool { got = send(key); return got.Code != 409 })
	if got.Code != 200 || got.Body.String() != "execution 3" {
		t.Error(got.Code, got.Body)
	}
}
