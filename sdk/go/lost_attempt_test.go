package oncegate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// farStore is a store that takes some milliseconds for each way. The first claim of each key is granted, and its replies are those of a fault.
type farStore struct {
	*MemoryStore
	way time.Duration
	// replies are those of the first claims of a key.
	replies []func() (ClaimReply, error)

	mu   sync.Mutex
	sent map[RecordID]int
}

func (s *farStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	s.mu.Lock()
	number := s.sent[id]
	s.sent[id]++
	s.mu.Unlock()
	time.Sleep(s.way)
	defer time.Sleep(s.way)
	if id == idMark || number >= len(s.replies) {
		return s.MemoryStore.Claim(ctx, id, claim)
	}
	if number == 0 {
		s.MemoryStore.Claim(ctx, id, claim)
	}
	return s.replies[number]()
}

func (s *farStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	time.Sleep(s.way)
	defer time.Sleep(s.way)
	return s.MemoryStore.Lookup(ctx, id)
}

func (s *farStore) read(ctx context.Context, id RecordID) (*RecordInfo, []byte, error) {
	time.Sleep(s.way)
	defer time.Sleep(s.way)
	return s.MemoryStore.read(ctx, id)
}

func (s *farStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	time.Sleep(s.way)
	defer time.Sleep(s.way)
	return s.MemoryStore.Release(ctx, id, token, retention)
}

func full() (ClaimReply, error) {
	time.Sleep(hiddenResend)
	return ClaimReply{}, redisError("claim", errors.New("OOM command not allowed when used memory > 'maxmemory'."))
}

func broken() (ClaimReply, error) {
	return ClaimReply{}, &StoreError{StoreUnavailable, "claim", errors.New("read: connection reset by peer")}
}

func locked() (ClaimReply, error) { return ClaimReply{Outcome: Locked}, nil }

func loading() (ClaimReply, error) {
	time.Sleep(hiddenResend)
	return ClaimReply{}, redisError("claim", errors.New("LOADING Redis is loading the dataset in memory"))
}

// A claim that waits claims with another attempt than the one that others settle: they release what that is granted, also under a handler.
func TestAClaimThatWaitsAfterALostReply(t *testing.T) {
	for name, replies := range map[string][]func() (ClaimReply, error){"full": {full}, "locked": {broken, locked}} {
		for _, way := range []time.Duration{6 * time.Millisecond, 10 * time.Millisecond, 14 * time.Millisecond} {
			store := &farStore{MemoryStore: NewMemoryStore(), way: way, replies: replies, sent: map[RecordID]int{}}
			var mu sync.Mutex
			runs := map[string]int{}
			send, engine := server(t, store, Settings{Scope: oneTenant}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				runs[r.Header.Get("Idempotency-Key")]++
				mu.Unlock()
				time.Sleep(150 * time.Millisecond)
				io.WriteString(w, "paid")
			})
			engine.resends = true
			var all sync.WaitGroup
			for i := 0; i < 30; i++ {
				key := fmt.Sprint("key-", i)
				all.Add(1)
				go func() {
					defer all.Done()
					send(key, "")
					send(key, "")
				}()
				time.Sleep(3 * time.Millisecond)
			}
			all.Wait()
			for key, count := range runs {
				if count != 1 {
					t.Error(name, way, key, "was executed", count, "times")
				}
			}
			if len(runs) != 30 {
				t.Error(name, way, len(runs))
			}
		}
	}
}

// A client that sends commands again by itself may end with the answer of a server that loads its data, after an earlier message was granted.
func TestAClaimThatWasGrantedBeforeARestart(t *testing.T) {
	store := &farStore{MemoryStore: NewMemoryStore(), replies: []func() (ClaimReply, error){loading, loading}, sent: map[RecordID]int{}}
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1, Lease: time.Second}, &logged{}, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "paid") })
	engine.resends = true
	if got := send("a", ""); got.Code != 503 {
		t.Fatal(got.Code, got.Body)
	}
	for begun := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		got := send("a", "")
		if got.Code == 200 {
			return
		}
		if got.Code != 409 && got.Code != 503 || time.Since(begun) > 20*time.Second {
			t.Fatal(got.Code, got.Body)
		}
	}
}

// abandonedStore has an abandoned attempt of each key. The replies of the first two claims that take it over are lost.
type abandonedStore struct {
	*MemoryStore
	claims int32
}

func (s *abandonedStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if id == idMark {
		return s.MemoryStore.Claim(ctx, id, claim)
	}
	number := atomic.AddInt32(&s.claims, 1)
	if number == 1 {
		other := claim
		other.Attempt, other.Lease = AttemptID{}, time.Millisecond
		s.MemoryStore.Claim(ctx, id, other)
		time.Sleep(10 * time.Millisecond)
	}
	reply, err := s.MemoryStore.Claim(ctx, id, claim)
	if number <= 2 {
		return broken()
	}
	return reply, err
}

// A lost claim that has taken over an abandoned attempt is left to its lease: it must not be sent again and again, which extends the lease.
func TestALostClaimAfterAnAbandonedAttempt(t *testing.T) {
	store := &abandonedStore{MemoryStore: NewMemoryStore()}
	executions := int32(0)
	settings := Settings{Scope: oneTenant, Wait: -1, Lease: time.Second, OnAbandoned: Reexecute}
	send, engine := server(t, store, settings, &logged{}, func(w http.ResponseWriter, r *http.Request) {
		atomic.AddInt32(&executions, 1)
		io.WriteString(w, "paid")
	})
	engine.timeout = 10 * time.Millisecond
	for begun := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		got := send("a", "")
		if got.Code == 200 {
			break
		}
		if got.Code != 409 && got.Code != 503 || time.Since(begun) > 10*time.Second {
			t.Fatal(time.Since(begun), got.Code, got.Body)
		}
	}
	if n := atomic.LoadInt32(&executions); n != 1 {
		t.Error(n)
	}
}

// An attempt that was overtaken before its handler begins does not begin, however young its lease is.
func TestAttemptThatIsFencedBeforeItBegins(t *testing.T) {
	store := NewMemoryStore()
	engine, err := NewEngine(store, EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	claim := Claim{Attempt: AttemptID{1}, Lease: time.Minute, Retention: time.Hour, OnAbandoned: Park}
	reply, err := store.Claim(context.Background(), RecordID{1}, claim)
	if err != nil {
		t.Fatal(err)
	}
	p := engine.newPermit(RecordID{1}, reply, policy{lease: claim.Lease, retention: claim.Retention}, readClocks())
	defer p.finish()
	if err := p.confirm(); err != nil {
		t.Error(err)
	}
	if !store.resolve(RecordID{1}, resolution{kind: "release", force: true, retention: time.Minute}) {
		t.Fatal("not released")
	}
	p.renew()
	if err := p.confirm(); err != errFenced {
		t.Error(err)
	}
}
