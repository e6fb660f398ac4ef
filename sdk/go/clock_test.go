package oncegate

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"
)

// suspended is how long the machine of the tests was suspended: the wall clock went on, and the monotonic one did not.
var suspended int64

func init() {
	own := readClocks
	readClocks = func() moment {
		now := own()
		now.wall += time.Duration(atomic.LoadInt64(&suspended))
		return now
	}
}

func suspend(d time.Duration) { atomic.AddInt64(&suspended, int64(d)) }

func TestAgeIsThatOfTheClockThatShowsMore(t *testing.T) {
	begun := readClocks()
	if age := begun.age(); age < 0 || age > time.Minute {
		t.Error(age)
	}
	suspend(time.Hour)
	if age := begun.age(); age < time.Hour {
		t.Error(age)
	}
	begun = readClocks()
	begun.monotonic -= time.Minute
	suspend(-2 * time.Hour) // The wall clock was set back.
	if age := begun.age(); age < time.Minute || age > 2*time.Minute {
		t.Error(age)
	}
}

// suspendingStore suspends the machine while a claim is on its way.
type suspendingStore struct {
	*MemoryStore
	claim         func()
	looks, renews int64
	isOvertaken   bool
}

func (s *suspendingStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if s.claim != nil {
		s.claim()
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

func (s *suspendingStore) Renew(ctx context.Context, id RecordID, token uint64, lease, retention time.Duration) (Settlement, error) {
	atomic.AddInt64(&s.renews, 1)
	if s.isOvertaken {
		return Fenced, nil
	}
	return s.MemoryStore.Renew(ctx, id, token, lease, retention)
}

func (s *suspendingStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	if s.isOvertaken {
		return Fenced, nil
	}
	return s.MemoryStore.Release(ctx, id, token, retention)
}

func (s *suspendingStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	if id == idMark {
		atomic.AddInt64(&s.looks, 1)
	}
	return s.MemoryStore.Lookup(ctx, id)
}

func TestMiddlewareAfterASuspension(t *testing.T) {
	store := &suspendingStore{MemoryStore: NewMemoryStore()}
	engine, err := NewEngine(store, EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	protect, err := Middleware(engine, Settings{})
	if err != nil {
		t.Fatal(err)
	}
	executions := 0
	handler := protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { executions++ }))
	send := func(key string) int {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", key)
		response := httptest.NewRecorder()
		handler.ServeHTTP(response, request)
		return response.Code
	}
	expect := func(key string, status, looks, renews, executed int) {
		t.Helper()
		store.looks, store.renews, executions = 0, 0, 0
		if got := send(key); got != status || int(store.looks) != looks || int(store.renews) != renews || executions != executed {
			t.Errorf("%s: %d, %d looks, %d renewals, %d executions", key, got, store.looks, store.renews, executions)
		}
	}
	expect("first", 200, 1, 0, 1)
	expect("second", 200, 0, 0, 1)
	suspend(time.Hour)
	expect("after-an-hour", 200, 1, 0, 1)
	// The look and the lease are old when the claim is granted.
	store.claim = func() { suspend(time.Hour) }
	expect("during-the-claim", 200, 1, 1, 1)
	store.isOvertaken = true
	expect("overtaken", 409, 1, 1, 0)
}

func TestClientAfterASuspension(t *testing.T) {
	for _, isDuringThePause := range []bool{false, true} {
		var requests int64
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			atomic.AddInt64(&requests, 1)
			w.Header().Set("Retry-After", "1")
			if isDuringThePause {
				time.AfterFunc(300*time.Millisecond, func() { suspend(time.Hour) })
			} else {
				suspend(time.Hour)
			}
			http.Error(w, "later", 503)
		}))
		request, _ := http.NewRequest("POST", server.URL, nil)
		_, err := (&Client{}).Do(request)
		var own *SendError
		if !errors.As(err, &own) || own.Kind != DeadlineReached || own.Attempts != 1 || atomic.LoadInt64(&requests) != 1 {
			t.Errorf("during the pause: %t: %v, %d requests", isDuringThePause, err, requests)
		}
		server.Close()
	}
}
