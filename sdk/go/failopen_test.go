package oncegate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// hookedStore is a store of which a test answers some commands. A nil hook leaves them to the memory, and so does false.
type hookedStore struct {
	*MemoryStore
	onClaim  func(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error, bool)
	onLookup func(ctx context.Context, id RecordID) (*RecordInfo, error, bool)
	onRenew  func()
	// onRelease is called before a release.
	onRelease func()
}

func (s *hookedStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if s.onClaim != nil {
		if reply, err, isAnswered := s.onClaim(ctx, id, claim); isAnswered {
			return reply, err
		}
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

func (s *hookedStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	if s.onLookup != nil && id != idMark {
		if info, err, isAnswered := s.onLookup(ctx, id); isAnswered {
			return info, err
		}
	}
	return s.MemoryStore.Lookup(ctx, id)
}

func (s *hookedStore) Renew(ctx context.Context, id RecordID, token uint64, lease, retention time.Duration) (Settlement, error) {
	if s.onRenew != nil {
		s.onRenew()
	}
	return s.MemoryStore.Renew(ctx, id, token, lease, retention)
}

func (s *hookedStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	if s.onRelease != nil {
		s.onRelease()
	}
	return s.MemoryStore.Release(ctx, id, token, retention)
}

// refusedDial is the error of a store that does not run.
func refusedDial() error {
	return &StoreError{StoreUnsent, "claim", &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}}
}

// silence is the error of a store that gives no answer.
func silence() error { return &StoreError{StoreUnavailable, "claim", context.DeadlineExceeded} }

func drain(t *testing.T, engine *Engine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if err := engine.Drain(ctx); err != nil {
		t.Error(err)
	}
}

// A duplicate that was told of an owner does not execute when the store is away at its next look.
func TestFailOpenAfterAnOwnerWasSeen(t *testing.T) {
	for _, outcome := range []ClaimOutcome{InProgress, Locked} {
		claims := int32(0)
		store := &hookedStore{MemoryStore: NewMemoryStore()}
		store.onClaim = func(context.Context, RecordID, Claim) (ClaimReply, error, bool) {
			if atomic.AddInt32(&claims, 1) == 1 {
				return ClaimReply{Outcome: outcome, LeaseLeft: time.Minute}, nil, true
			}
			return ClaimReply{}, refusedDial(), true
		}
		send, _ := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: time.Minute}, &logged{}, func(http.ResponseWriter, *http.Request) { t.Error("executed") })
		if got := send("a", ""); got.Code != 409 {
			t.Error(outcome, got.Code, got.Body)
		}
		if n := atomic.LoadInt32(&claims); n < 2 {
			t.Error(n, "claims")
		}
	}
}

// So does one whose lost claim shows that the record is that of another attempt, or has a result.
func TestFailOpenAfterALostClaimHasFoundAnother(t *testing.T) {
	for _, state := range []recordState{stateInProgress, stateCompleted} {
		var mu sync.Mutex
		attempts := map[AttemptID]bool{}
		isAway := int32(0)
		store := &hookedStore{MemoryStore: NewMemoryStore()}
		store.onClaim = func(_ context.Context, _ RecordID, claim Claim) (ClaimReply, error, bool) {
			mu.Lock()
			defer mu.Unlock()
			if atomic.LoadInt32(&isAway) == 0 {
				attempts[claim.Attempt] = true
				reply, err := broken()
				return reply, err, true
			}
			if !attempts[claim.Attempt] {
				return ClaimReply{}, refusedDial(), true
			}
			if state == stateCompleted {
				return ClaimReply{Outcome: Replay}, nil, true
			}
			return ClaimReply{Outcome: InProgress, LeaseLeft: time.Minute}, nil, true
		}
		store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
			if atomic.LoadInt32(&isAway) == 0 {
				return nil, silence(), true
			}
			return &RecordInfo{State: string(state), Attempt: AttemptID{9}}, nil, true
		}
		send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: -1}, &logged{}, func(http.ResponseWriter, *http.Request) { t.Error("executed:", state) })
		engine.timeout = 10 * time.Millisecond
		if got := send("a", ""); got.Code != 503 {
			t.Error(got.Code, got.Body)
		}
		engine.breakers[0].report(nil)
		// The background does not look in the meantime, so that the duplicate does.
		engine.closeOnce.Do(func() { close(engine.closing) })
		atomic.StoreInt32(&isAway, 1)
		if got := send("a", ""); got.Code != 409 {
			t.Error(state, got.Code, got.Body)
		}
	}
}

// A duplicate whose look or claim gets no answer does not execute if this process has executed the key since it came.
func TestFailOpenAfterThisProcessHasExecuted(t *testing.T) {
	for _, isBefore := range []bool{true, false} {
		store := &hookedStore{MemoryStore: NewMemoryStore()}
		asked, isOver, begun, proceed := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan struct{})
		var once sync.Once
		var mu sync.Mutex
		var duplicate *AttemptID
		store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
			if !isBefore {
				return nil, nil, false
			}
			once.Do(func() { close(asked) })
			<-isOver
			return nil, silence(), true
		}
		store.onClaim = func(_ context.Context, _ RecordID, claim Claim) (ClaimReply, error, bool) {
			mu.Lock()
			if duplicate == nil && !isBefore {
				duplicate = &claim.Attempt
			}
			isDuplicate := duplicate != nil && *duplicate == claim.Attempt
			mu.Unlock()
			if !isDuplicate {
				return ClaimReply{}, nil, false
			}
			once.Do(func() { close(asked) })
			<-isOver
			return ClaimReply{}, silence(), true
		}
		executions := int32(0)
		send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
			if atomic.AddInt32(&executions, 1) == 1 {
				close(begun)
				<-proceed
			}
			io.WriteString(w, "paid")
		})
		engine.timeout = 20 * time.Second
		first, second := make(chan *httptest.ResponseRecorder, 1), make(chan *httptest.ResponseRecorder, 1)
		begin := func() {
			go func() { first <- send("a", "") }()
			eventually(t, "the handler runs", begun)
		}
		if isBefore {
			begin()
		}
		go func() { second <- send("a", "") }()
		eventually(t, "the duplicate asks the store", asked)
		if !isBefore {
			begin()
		}
		close(proceed)
		if got := <-first; got.Code != 200 {
			t.Error(got.Code, got.Body)
		}
		close(isOver)
		if got := <-second; got.Code != 409 || atomic.LoadInt32(&executions) != 1 {
			t.Error(isBefore, got.Code, got.Header(), got.Body, atomic.LoadInt32(&executions))
		}
	}
}

// Only a server that cannot be reached is out of reach, and not a process that has no means to reach it.
func TestErrorsOfConnecting(t *testing.T) {
	dial := func(network string, err error) error { return &net.OpError{Op: "dial", Net: network, Err: err} }
	connect := func(errno syscall.Errno) error { return dial("tcp", os.NewSyscallError("connect", errno)) }
	for _, own := range []struct {
		err  error
		want bool
	}{
		{connect(syscall.ECONNREFUSED), true}, {connect(syscall.EHOSTUNREACH), true}, {connect(syscall.ENETUNREACH), true},
		{connect(syscall.EHOSTDOWN), true}, {connect(syscall.ETIMEDOUT), true}, {dial("unix", os.NewSyscallError("connect", syscall.ENOENT)), true},
		{dial("tcp", os.ErrDeadlineExceeded), true}, {dial("tcp", &net.DNSError{Err: "no such host", IsNotFound: true}), true},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, true}, {context.DeadlineExceeded, true},
		{connect(syscall.EMFILE), false}, {connect(syscall.ENFILE), false}, {connect(syscall.EADDRNOTAVAIL), false}, {connect(syscall.ENOBUFS), false},
		{connect(syscall.ENOMEM), false}, {connect(syscall.EAGAIN), false}, {connect(syscall.EACCES), false}, {connect(syscall.EPERM), false},
		{connect(syscall.ENOENT), false}, {syscall.ENOENT, false}, {&os.PathError{Op: "open", Path: "root.crt", Err: syscall.ENOENT}, false},
		{syscall.EAGAIN, false}, {syscall.ETIMEDOUT, false}, {dial("tcp", errors.New("of a dialer")), false},
		{&net.DNSError{Err: "too many open files", IsNotFound: true}, false}, {&net.DNSError{Err: "server misbehaving", IsTemporary: true}, false},
		{fmt.Errorf("%w; %v", connect(syscall.ECONNREFUSED), connect(syscall.EMFILE)), false},
	} {
		for name, err := range map[string]error{"redis": redisError("claim", own.err), "postgres": unsentError("claim", own.err)} {
			if got := isOutOfReach(err); got != own.want {
				t.Errorf("%s: %v: %v", name, err, got)
			}
		}
	}
}

// The search for a lost claim does not take the record of a live owner over, whose renewals do not arrive.
func TestSearchForALostClaimAndALiveOwner(t *testing.T) {
	var id RecordID
	var claims int32
	events := make(chan string, 100)
	store := &hookedStore{MemoryStore: NewMemoryStore()}
	now := time.Now()
	store.now = func() time.Time { return now }
	owner := Claim{Attempt: AttemptID{9}, Lease: time.Second, Retention: time.Hour, OnAbandoned: Reexecute}
	store.onClaim = func(ctx context.Context, record RecordID, claim Claim) (ClaimReply, error, bool) {
		if n := atomic.AddInt32(&claims, 1); n > 2 {
			events <- "claim"
			return ClaimReply{}, nil, false
		} else if n == 1 {
			// Another process executes. Its lease has ended.
			id, owner.Fingerprint = record, claim.Fingerprint
			store.MemoryStore.Claim(ctx, id, owner)
			now = now.Add(time.Minute)
		}
		return ClaimReply{}, silence(), true
	}
	store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
		events <- "lookup"
		return nil, nil, false
	}
	send, engine := server(t, store, Settings{Scope: oneTenant, Wait: -1, OnAbandoned: Reexecute}, &logged{}, func(http.ResponseWriter, *http.Request) { t.Error("executed") })
	if got := send("a", ""); got.Code != 503 {
		t.Error(got.Code, got.Body)
	}
	if event := <-events; event != "lookup" {
		t.Error("the background has sent a", event)
	}
	drain(t, engine)
	if record := store.records[id]; record.attempt != owner.Attempt || record.state != stateInProgress {
		t.Error(record)
	}
}

// A lost claim that was not granted when the process looked, and is granted later, is given back.
func TestALostClaimThatArrivesLate(t *testing.T) {
	var mu sync.Mutex
	var id RecordID
	var first Claim
	sent := 0
	released := make(chan struct{}, 10)
	looked := make(chan struct{}, 1000)
	store := &hookedStore{MemoryStore: NewMemoryStore(), onRelease: func() { released <- struct{}{} }}
	store.onClaim = func(_ context.Context, record RecordID, claim Claim) (ClaimReply, error, bool) {
		mu.Lock()
		defer mu.Unlock()
		if sent++; sent <= 2 {
			id, first = record, claim
			return ClaimReply{}, silence(), true
		}
		return ClaimReply{}, nil, false
	}
	store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
		select {
		case looked <- struct{}{}:
		default:
		}
		return nil, nil, false
	}
	send, _ := server(t, store, Settings{Scope: oneTenant, Wait: -1, Lease: time.Second}, &logged{}, func(http.ResponseWriter, *http.Request) {})
	if got := send("a", ""); got.Code != 503 {
		t.Error(got.Code, got.Body)
	}
	eventually(t, "a look", looked)
	mu.Lock()
	reply, err := store.MemoryStore.Claim(context.Background(), id, first)
	mu.Unlock()
	if err != nil || reply.Outcome != Execute {
		t.Fatal(reply, err)
	}
	eventually(t, "the release", released)
	if got := send("a", ""); got.Code != 200 {
		t.Error(got.Code, got.Body)
	}
}

// A look that asks no store says nothing about it.
func TestSearchThatAsksNoStore(t *testing.T) {
	engine, err := NewEngine(&hookedStore{MemoryStore: NewMemoryStore()}, EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	breaker := &engine.breakers[0]
	for i := 0; i < breakerStrikes; i++ {
		breaker.report(silence())
	}
	breaker.openTill = time.Now().Add(-time.Second)
	lost := engine.noteLost(RecordID{1}, Claim{})
	lost.isOver = true
	lost.mu.Unlock()
	if err := engine.settleLostClaims(RecordID{1}); err != nil || breaker.failures != breakerStrikes || breaker.probing {
		t.Error(err, breaker.failures, breaker.probing)
	}
	engine.pending = maxUnsettled
	if _, err := engine.claimOnce(context.Background(), RecordID{2}, Claim{}, policy{}); !errors.Is(err, errFull) || breaker.failures != breakerStrikes || breaker.probing {
		t.Error(err, breaker.failures, breaker.probing)
	}
}

// A claim that was granted while its request executes without the store keeps the key until the handler ends, and afterwards.
func TestFailOpenUnderAClaimThatWasGranted(t *testing.T) {
	for _, status := range []int{200, 500, 0} {
		isSilent, executions := int32(1), int32(0)
		found := make(chan string, 100)
		store := &hookedStore{MemoryStore: NewMemoryStore(), onRenew: func() { found <- "renew" }, onRelease: func() { found <- "release" }}
		store.onClaim = func(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error, bool) {
			if atomic.LoadInt32(&isSilent) == 0 {
				return ClaimReply{}, nil, false
			}
			store.MemoryStore.Claim(ctx, id, claim)
			return ClaimReply{}, silence(), true
		}
		store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
			return nil, silence(), atomic.LoadInt32(&isSilent) == 1
		}
		begun, proceed, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
		send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true, Wait: -1}, &logged{}, func(w http.ResponseWriter, r *http.Request) {
			if atomic.AddInt32(&executions, 1) > 1 {
				return
			}
			close(begun)
			<-proceed
			if status == 0 {
				panic(http.ErrAbortHandler)
			}
			w.WriteHeader(status)
		})
		go func() {
			defer close(ended)
			defer func() { recover() }()
			if got := send("a", ""); got.Code != status || got.Header().Get("Idempotency-Status") != "failed-open" {
				t.Error(got.Code, got.Header())
			}
		}()
		eventually(t, "the handler runs", begun)
		if got := send("a", ""); got.Code != 409 {
			t.Error("while the store is silent:", got.Code, got.Header())
		}
		atomic.StoreInt32(&isSilent, 0)
		if event := <-found; event != "renew" {
			t.Error("the claim of a request that executes gets a", event)
		}
		if got := send("a", ""); got.Code != 409 {
			t.Error("while the handler runs:", got.Code, got.Header())
		}
		close(proceed)
		eventually(t, "the end of the handler", ended)
		drain(t, engine)
		want := map[int]int{200: 422, 500: 500, 0: 500}[status]
		if got := send("a", ""); got.Code != want || atomic.LoadInt32(&executions) != 1 {
			t.Error("afterwards:", status, got.Code, got.Body, atomic.LoadInt32(&executions))
		}
	}
}

// While the store is away, a retry after the end of its request executes again, also if the claim of the first one was lost.
func TestFailOpenAgain(t *testing.T) {
	store := &hookedStore{MemoryStore: NewMemoryStore()}
	isAway, executions := int32(1), 0
	store.onClaim = func(_ context.Context, _ RecordID, claim Claim) (ClaimReply, error, bool) {
		return ClaimReply{}, silence(), atomic.LoadInt32(&isAway) == 1
	}
	store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
		return nil, refusedDial(), atomic.LoadInt32(&isAway) == 1
	}
	send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true}, &logged{}, func(http.ResponseWriter, *http.Request) { executions++ })
	for i := 1; i < 4; i++ {
		if got := send("a", ""); got.Header().Get("Idempotency-Status") != "failed-open" || executions != i {
			t.Error(got.Code, got.Header(), executions)
		}
	}
	atomic.StoreInt32(&isAway, 0)
	engine.breakers[0].report(nil)
	if got := send("a", ""); got.Code != 200 || got.Header().Get("Idempotency-Status") != "" || executions != 4 {
		t.Error(got.Code, got.Header(), executions)
	}
}

// The many requests of one caller wait for each other, so that the store goes on to answer.
func TestCommandsUnderWayAreBounded(t *testing.T) {
	const requests = 3 * maxCommands
	var underWay, most int32
	proceed := make(chan struct{})
	arrived := make(chan struct{}, requests)
	store := &hookedStore{MemoryStore: NewMemoryStore()}
	store.onClaim = func(context.Context, RecordID, Claim) (ClaimReply, error, bool) {
		n := atomic.AddInt32(&underWay, 1)
		for before := atomic.LoadInt32(&most); n > before && !atomic.CompareAndSwapInt32(&most, before, n); before = atomic.LoadInt32(&most) {
		}
		arrived <- struct{}{}
		<-proceed
		atomic.AddInt32(&underWay, -1)
		return ClaimReply{}, nil, false
	}
	executions := int32(0)
	send, engine := server(t, store, Settings{Scope: oneTenant, FailOpen: true}, &logged{}, func(http.ResponseWriter, *http.Request) { atomic.AddInt32(&executions, 1) })
	engine.timeout = 20 * time.Second
	if err := engine.VerifyIDs(); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := 0; i < requests; i++ {
		key := fmt.Sprint("key-", i)
		all.Add(1)
		go func() {
			defer all.Done()
			if got := send(key, ""); got.Code != 200 || got.Header().Get("Idempotency-Status") != "" {
				t.Error(got.Code, got.Header(), got.Body)
			}
		}()
	}
	for i := 0; i < maxCommands; i++ {
		eventually(t, "a claim", arrived)
	}
	for tasks := 0; tasks < requests; time.Sleep(time.Millisecond) {
		engine.mu.Lock()
		tasks = engine.tasks
		engine.mu.Unlock()
	}
	// Renewals and ends do not wait behind claims, and too long a wait is no outage.
	if leave, err := engine.enterStore("complete"); err != nil {
		t.Error(err)
	} else {
		leave()
		leave()
	}
	close(proceed)
	all.Wait()
	if most != maxCommands || executions != requests {
		t.Error(most, executions)
	}
	for i := 0; i < maxCommands; i++ {
		engine.claiming <- struct{}{}
	}
	engine.timeout = 10 * time.Millisecond
	for i := 0; i < 2*breakerStrikes; i++ {
		if got := send("another", ""); got.Code != 503 || executions != requests {
			t.Error(got.Code, got.Header(), executions)
		}
	}
	for i := 0; i < maxCommands; i++ {
		<-engine.claiming
	}
	if len(engine.owning) != 0 {
		t.Error(len(engine.owning))
	}
}

// A driver that never returns does not hold its place for ever.
func TestCommandsThatNeverReturn(t *testing.T) {
	never := make(chan struct{})
	defer close(never)
	store := &hookedStore{MemoryStore: NewMemoryStore()}
	store.onLookup = func(context.Context, RecordID) (*RecordInfo, error, bool) {
		<-never
		return nil, nil, false
	}
	engine, err := NewEngine(store, EngineOptions{Logger: &logged{}, StoreTimeout: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := engine.lookup(context.Background(), RecordID{1}); !isOutOfReach(err) {
		t.Error(err)
	}
	for begun := time.Now(); len(engine.claiming) > 0; time.Sleep(time.Millisecond) {
		if time.Since(begun) > 20*time.Second {
			t.Fatal("the place is not free")
		}
	}
}
