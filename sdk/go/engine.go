package oncegate

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand"
	"sync"
	"time"
)

// EngineOptions are the settings of an Engine. The zero value has the defaults.
type EngineOptions struct {
	// Service is the name of the service. Services that share a store must have different names, and all programs of one service the
	// same name. Required for stores that other services use; the name is part of every record.
	Service string
	// StoreTimeout bounds each command to the store: 2 s by default.
	StoreTimeout time.Duration
	// Logger gets warnings. *log.Logger is one. Keys, bodies and credentials are never logged.
	Logger Logger
}

// Logger writes a warning. *log.Logger implements it.
type Logger interface {
	Printf(format string, values ...interface{})
}

type silentLogger struct{}

func (silentLogger) Printf(string, ...interface{}) {}

const (
	defaultStoreTimeout = 2 * time.Second
	defaultLease        = 30 * time.Second
	defaultRetention    = 24 * time.Hour
	defaultWait         = 2 * time.Second

	minLease     = 100 * time.Millisecond
	maxLease     = time.Hour
	minRetention = time.Second
	maxRetention = 400 * 24 * time.Hour

	releasedLeases = 4

	// Attempts whose end is not known to the store yet.
	maxUnsettled     = 65536
	maxDeferredBytes = 256 << 20
)

// Engine claims, renews and settles the records of a store. One engine serves the middleware, the functions and the transactions of a
// program. It is safe for concurrent use.
type Engine struct {
	store   Store
	service string
	timeout time.Duration
	log     Logger
	breaker breaker

	mu sync.Mutex
	// running are the attempts of this process: a duplicate waits for the channel, which is closed at their end.
	running map[RecordID]chan struct{}
	// seen is when a record was first found in progress.
	seen map[RecordID]time.Time
	// unsettled are attempts with a result that the store did not take yet.
	unsettled     map[RecordID]bool
	lost          int
	deferredBytes int
	// tasks is the number of functions that run and of ends that are sent again; idle is signalled when it is zero.
	tasks     int
	idle      *sync.Cond
	closing   chan struct{}
	closeOnce sync.Once
}

// NewEngine returns an engine on a store.
func NewEngine(store Store, options EngineOptions) (*Engine, error) {
	if store == nil {
		return nil, errors.New("oncegate: there is no store; pass NewMemoryStore(), NewPostgresStore(db) or NewRedisStore(client)")
	}
	if err := checkService(options.Service); err != nil {
		return nil, err
	}
	if options.StoreTimeout < 0 {
		return nil, fmt.Errorf("oncegate: the store timeout %s is negative", options.StoreTimeout)
	}
	e := &Engine{
		store: store, service: options.Service, timeout: options.StoreTimeout, log: options.Logger,
		running: map[RecordID]chan struct{}{}, seen: map[RecordID]time.Time{}, unsettled: map[RecordID]bool{},
		closing: make(chan struct{}),
	}
	if e.timeout == 0 {
		e.timeout = defaultStoreTimeout
	}
	if e.log == nil {
		e.log = silentLogger{}
	}
	e.idle = sync.NewCond(&e.mu)
	return e, nil
}

// spawn runs a task that Drain waits for.
func (e *Engine) spawn(task func()) {
	e.mu.Lock()
	e.tasks++
	e.mu.Unlock()
	go func() {
		defer func() {
			e.mu.Lock()
			if e.tasks--; e.tasks == 0 {
				e.idle.Broadcast()
			}
			e.mu.Unlock()
		}()
		task()
	}()
}

// Drain waits until every function has ended, every result is in the store, and every claim whose reply was lost is settled. Call it after
// http.Server.Shutdown. When ctx ends first, results that the store has not taken are given up, and their outcome stays unknown.
func (e *Engine) Drain(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		e.mu.Lock()
		for e.tasks > 0 {
			e.idle.Wait()
		}
		e.mu.Unlock()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		e.closeOnce.Do(func() { close(e.closing) })
		return fmt.Errorf("oncegate: not everything was settled before the end: %w", ctx.Err())
	}
}

// policy is the treatment of one record.
type policy struct {
	lease, retention, wait time.Duration
	onAbandoned            OnAbandoned
}

func (p *policy) check() error {
	if p.lease == 0 {
		p.lease = defaultLease
	}
	if p.retention == 0 {
		p.retention = defaultRetention
	}
	if p.wait == 0 {
		p.wait = defaultWait
	}
	if p.wait < 0 {
		p.wait = 0
	}
	if p.onAbandoned == "" {
		p.onAbandoned = Park
	}
	switch {
	case p.lease < minLease || p.lease > maxLease:
		return fmt.Errorf("oncegate: the lease %s is not from %s to %s", p.lease, minLease, maxLease)
	case p.retention < minRetention || p.retention > maxRetention:
		return fmt.Errorf("oncegate: the retention %s is not from %s to %s", p.retention, minRetention, maxRetention)
	case p.wait > time.Hour:
		return fmt.Errorf("oncegate: the wait %s is longer than an hour", p.wait)
	case p.onAbandoned != Park && p.onAbandoned != Reexecute:
		return fmt.Errorf("oncegate: on-abandoned is %q; write %q or %q", p.onAbandoned, Park, Reexecute)
	}
	return nil
}

// releasedRetention is the time that a released record is kept, for its token only.
func (p policy) releasedRetention() time.Duration {
	kept := p.lease * releasedLeases
	if kept > p.retention {
		kept = p.retention
	}
	if kept < minRetention {
		kept = minRetention
	}
	return kept
}

// claimed is the result of a claim: a reply, and the permit if it is Execute.
type claimed struct {
	ClaimReply
	permit *permit
	// runningFor is how long the record is known to be in progress.
	runningFor time.Duration
}

// claim asks to execute, and waits for another attempt as long as the policy says. The caller's context ends the waiting.
func (e *Engine) claim(ctx context.Context, id RecordID, claim Claim, policy policy) (claimed, error) {
	if _, err := rand.Read(claim.Attempt[:]); err != nil {
		return claimed{}, &StoreError{StoreUnsent, "claim", err}
	}
	claim.Lease, claim.Retention, claim.OnAbandoned = policy.lease, policy.retention, policy.onAbandoned
	deadline := time.Now().Add(policy.wait)
	pause := 25 * time.Millisecond
	for {
		e.mu.Lock()
		ended, isOurs := e.running[id]
		isUnsettled := e.unsettled[id]
		e.mu.Unlock()
		reply := claimed{ClaimReply: ClaimReply{Outcome: InProgress, LeaseLeft: policy.lease}}
		// A record that this process owns must not be claimed: if its lease has ended meanwhile, the claim would make its outcome unknown.
		if !isOurs && !isUnsettled {
			var err error
			if reply, err = e.claimOnce(ctx, id, claim, policy); err != nil {
				return reply, err
			}
		} else {
			// Only the store can say if this is another request.
			info, err := e.lookup(ctx, id)
			if err != nil {
				return reply, err
			}
			if info != nil && info.Fingerprint != claim.Fingerprint && info.State != string(stateReleased) {
				return claimed{ClaimReply: ClaimReply{Outcome: Mismatch}}, nil
			}
		}
		if reply.Outcome == Locked {
			reply.Outcome, reply.LeaseLeft = InProgress, policy.lease
		}
		if reply.Outcome != InProgress {
			e.forgetSeen(id)
			return reply, nil
		}
		reply.runningFor = e.noteSeen(id)
		left := time.Until(deadline)
		if left <= 0 || ctx.Err() != nil {
			return reply, nil
		}
		if left > pause {
			left = pause
		}
		timer := time.NewTimer(left)
		select {
		case <-timer.C:
		case <-ended:
		case <-ctx.Done():
		}
		timer.Stop()
		if ended == nil && pause < 500*time.Millisecond {
			pause += pause/2 + time.Duration(mathrand.Int63n(int64(pause/4)))
		} else if ended != nil {
			pause = time.Second
		}
	}
}

func (e *Engine) noteSeen(id RecordID) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	since, ok := e.seen[id]
	if !ok {
		if len(e.seen) >= 10000 {
			e.seen = map[RecordID]time.Time{}
		}
		since = time.Now()
		e.seen[id] = since
	}
	return time.Since(since)
}

func (e *Engine) forgetSeen(id RecordID) {
	e.mu.Lock()
	delete(e.seen, id)
	e.mu.Unlock()
}

// claimOnce sends a claim, and sends it again with the same attempt if its reply was lost.
func (e *Engine) claimOnce(ctx context.Context, id RecordID, claim Claim, policy policy) (claimed, error) {
	if !e.breaker.allow() {
		return claimed{}, errBreakerOpen
	}
	e.mu.Lock()
	full := len(e.unsettled)+e.lost >= maxUnsettled
	e.mu.Unlock()
	if full {
		return claimed{}, &StoreError{StoreUnsent, "claim", errFull}
	}
	// A client that hangs up must not lose the reply: the time of the command is bounded anyway.
	ctx = detach(ctx)
	begun := time.Now()
	reply, err := e.sendClaim(ctx, id, claim)
	wasLost := err != nil && kindOf(err) == StoreUnavailable
	if wasLost {
		// It is not known if the claim was granted, or still is being granted.
		// A pool may have several connections that broke while nobody used them.
		for tries := 0; tries == 0 || tries < 5 && isBadConn(err); tries++ {
			begun = time.Now()
			reply, err = e.sendClaim(ctx, id, claim)
		}
		isDefinite := err == nil && reply.Outcome != InProgress && reply.Outcome != Locked && reply.Outcome != Mismatch
		if !isDefinite {
			e.settleLostClaim(id, claim)
		}
	}
	e.breaker.report(err)
	if err != nil {
		return claimed{}, err
	}
	result := claimed{ClaimReply: reply}
	if reply.Outcome == Execute {
		result.permit = e.newPermit(id, reply, policy, begun)
		if wasLost {
			result.permit.lost = &claim
		}
	}
	return result, nil
}

func (e *Engine) sendClaim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	return ask(ctx, e, "claim", func(ctx context.Context) (ClaimReply, error) { return e.store.Claim(ctx, id, claim) })
}

// ask sends a command, and gives up waiting for its reply after the store timeout. Drivers may wait longer than their context: lib/pq
// returns only when the server answers.
func ask[Reply any](ctx context.Context, e *Engine, doing string, command func(context.Context) (Reply, error)) (Reply, error) {
	if _, isMemory := e.store.(*MemoryStore); isMemory {
		return command(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, e.timeout)
	done := make(chan answered[Reply], 1)
	go func() {
		defer cancel()
		reply, err := command(ctx)
		done <- answered[Reply]{reply, err}
	}()
	// A driver that obeys its context has the better error.
	timer := time.NewTimer(e.timeout + 20*time.Millisecond)
	defer timer.Stop()
	select {
	case answer := <-done:
		return answer.reply, answer.err
	case <-timer.C:
		var none Reply
		return none, &StoreError{StoreUnavailable, doing, context.DeadlineExceeded}
	}
}

type answered[Reply any] struct {
	reply Reply
	err   error
}

func (e *Engine) lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	if !e.breaker.allow() {
		return nil, errBreakerOpen
	}
	info, err := ask(detach(ctx), e, "lookup", func(ctx context.Context) (*RecordInfo, error) {
		return e.store.Lookup(ctx, id)
	})
	e.breaker.report(err)
	return info, err
}

var errFull = errors.New("too many earlier requests have no recorded end yet")

var errBreakerOpen = &StoreError{StoreUnsent, "claim", errors.New("it did not answer earlier commands, and is asked again in a moment")}

// settleLostClaim keeps asking with the same attempt, and releases the record if the claim was granted: otherwise it would be owned by
// nobody until its lease ends, and its outcome would then be unknown although nothing was executed.
func (e *Engine) settleLostClaim(id RecordID, claim Claim) {
	e.mu.Lock()
	e.lost++
	e.mu.Unlock()
	begun := time.Now()
	e.spawn(func() {
		defer func() {
			e.mu.Lock()
			e.lost--
			e.mu.Unlock()
		}()
		max := 2 * time.Second
		for pause := 50 * time.Millisecond; time.Since(begun) < claim.Retention && e.sleep(pause); pause = longer(pause, max) {
			if time.Since(begun) > 5*time.Minute {
				max = 30 * time.Second
			}
			reply, err := e.sendClaim(context.Background(), id, claim)
			if err != nil {
				if kind := kindOf(err); kind == RecordCorrupt || kind == StoreMisused {
					return
				}
				continue
			}
			switch reply.Outcome {
			case InProgress, Locked, Mismatch:
				continue
			case Execute:
				e.releaseLost(id, claim, reply)
				go e.watchLate(id, claim)
			}
			return
		}
	})
}

func (e *Engine) releaseLost(id RecordID, claim Claim, reply ClaimReply) {
	e.newPermit(id, reply, policy{claim.Lease, claim.Retention, 0, claim.OnAbandoned}, time.Now()).release()
}

// watchLate looks for a claim that was lost, sent again and released since: the first message may still be on its way, such as in the
// buffer of a server that does not run at the moment. If it is granted when it arrives, nobody executes under it.
func (e *Engine) watchLate(id RecordID, claim Claim) {
	begun := time.Now()
	for pause := 100 * time.Millisecond; time.Since(begun) < 3*time.Minute && e.sleep(pause); pause = longer(pause, 10*time.Second) {
		info, err := ask(context.Background(), e, "lookup", func(ctx context.Context) (*RecordInfo, error) { return e.store.Lookup(ctx, id) })
		if err != nil || info == nil || info.State != string(stateInProgress) || info.Attempt != claim.Attempt {
			continue
		}
		if reply, err := e.sendClaim(context.Background(), id, claim); err == nil && reply.Outcome == Execute {
			e.releaseLost(id, claim, reply)
		}
	}
}

// sleep returns false if the engine gave up meanwhile.
func (e *Engine) sleep(pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-e.closing:
		return false
	}
}

func longer(pause, max time.Duration) time.Duration {
	if pause *= 2; pause > max {
		return max
	}
	return pause
}

// settleOutcome is the end of an attempt as its owner sees it.
type settleOutcome int

const (
	settleDone settleOutcome = iota
	// settleFenced: another attempt owns the record.
	settleFenced
	// settleDeferred: the store did not take the result. It is tried again.
	settleDeferred
	// settleLeft: the key stays claimed until its lease ends, because an earlier attempt was abandoned.
	settleLeft
)

func (o settleOutcome) status() string {
	switch o {
	case settleFenced:
		return "fenced"
	case settleDeferred:
		return "not-stored"
	}
	return ""
}

// permit is the ownership of a record. It must be settled.
type permit struct {
	engine *Engine
	id     RecordID
	reply  ClaimReply
	policy policy
	// lost is the claim if it was sent again.
	lost    *Claim
	stopped chan struct{}
	fenced  chan struct{}

	mu      sync.Mutex
	renewal *time.Timer
	leaseAt time.Time // when the last granted lease was asked for
	settled bool
	// inTransaction is true if the record was completed in a transaction of the application, which may have been rolled back.
	inTransaction bool
}

func (e *Engine) newPermit(id RecordID, reply ClaimReply, policy policy, begun time.Time) *permit {
	p := &permit{engine: e, id: id, reply: reply, policy: policy, leaseAt: begun,
		stopped: make(chan struct{}), fenced: make(chan struct{})}
	e.mu.Lock()
	e.running[id] = p.stopped
	e.mu.Unlock()
	p.mu.Lock()
	p.renewal = time.AfterFunc(policy.lease/3, p.renew)
	p.mu.Unlock()
	return p
}

// renew extends the lease every third of it, until the attempt ends or another one took over.
func (p *permit) renew() {
	begun := time.Now()
	settlement, err := p.sendRenewal()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.settled:
	case err == nil && settlement == Fenced:
		close(p.fenced)
	case err == nil && settlement == Settled:
		p.leaseAt = begun
		p.renewal.Reset(p.policy.lease / 3)
	default:
		p.renewal.Reset(p.policy.lease / 12)
	}
}

func (p *permit) sendRenewal() (Settlement, error) {
	return ask(context.Background(), p.engine, "renew", func(ctx context.Context) (Settlement, error) {
		return p.engine.store.Renew(ctx, p.id, p.reply.Token, p.policy.lease, p.policy.retention)
	})
}

// confirm makes sure that the lease still runs: the process may have been paused since the claim.
func (p *permit) confirm() error {
	p.mu.Lock()
	age := time.Since(p.leaseAt)
	p.mu.Unlock()
	if age < p.policy.lease*2/3 {
		return nil
	}
	settlement, err := p.sendRenewal()
	if err != nil {
		return err
	}
	if settlement != Settled {
		return errFenced
	}
	return nil
}

var errFenced = errors.New("oncegate: another attempt owns the record")

// complete ends the attempt with a result.
func (p *permit) complete(state CompletionState, response []byte) settleOutcome {
	completion := Completion{state, response, p.policy.retention}
	return p.settle(len(response), func(ctx context.Context, keepResponse bool) (Settlement, error) {
		completion := completion
		if !keepResponse && completion.State == Completed {
			completion.State, completion.Response = Tombstone, nil
		}
		return p.engine.store.Complete(ctx, p.id, p.reply.Token, completion)
	})
}

// release ends the attempt without a result: the key is free again. After an abandoned attempt the key is left to its lease instead,
// because the effect of the abandoned attempt is unknown.
func (p *permit) release() settleOutcome {
	if p.reply.AfterAbandoned {
		p.finish()
		return settleLeft
	}
	if p.lost != nil {
		go p.engine.watchLate(p.id, *p.lost)
	}
	return p.settle(0, func(ctx context.Context, _ bool) (Settlement, error) {
		return p.engine.store.Release(ctx, p.id, p.reply.Token, p.policy.releasedRetention())
	})
}

// leave stops renewing, and leaves the record to its lease, as after a crash.
func (p *permit) leave() { p.finish() }

// finish stops the renewal and wakes those who wait.
func (p *permit) finish() {
	p.mu.Lock()
	isFirst := !p.settled
	p.settled = true
	p.renewal.Stop()
	p.mu.Unlock()
	if !isFirst {
		return
	}
	e := p.engine
	e.mu.Lock()
	if e.running[p.id] == p.stopped {
		delete(e.running, p.id)
	}
	e.mu.Unlock()
	close(p.stopped)
}

// settle ends the attempt. If the store does not answer, the end is sent again until the retention is over.
func (p *permit) settle(size int, send func(ctx context.Context, keepResponse bool) (Settlement, error)) settleOutcome {
	e := p.engine
	try := func(keepResponse bool) (Settlement, error) {
		return ask(context.Background(), e, "complete", func(ctx context.Context) (Settlement, error) { return send(ctx, keepResponse) })
	}
	settlement, err := try(true)
	for tries := 0; tries < 6 && (err == nil && settlement == Held || tries == 0 && err != nil && kindOf(err) != StoreMisused); tries++ {
		if !e.sleep(25 * time.Millisecond) {
			break
		}
		settlement, err = try(true)
	}
	if err == nil && settlement == Settled {
		p.finish()
		return settleDone
	}
	if err == nil && settlement == Fenced {
		p.finish()
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.inTransaction {
			// The record says that it was done, whatever the response.
			return settleDone
		}
		return settleFenced
	}
	keep := true
	e.mu.Lock()
	e.unsettled[p.id] = true
	if keep = e.deferredBytes+size <= maxDeferredBytes; keep {
		e.deferredBytes += size
	}
	e.mu.Unlock()
	e.log.Printf("oncegate: the result of record %s is not stored yet, and is sent again: %v", p.id, err)
	e.spawn(func() {
		defer p.finish()
		defer func() {
			e.mu.Lock()
			delete(e.unsettled, p.id)
			if keep {
				e.deferredBytes -= size
			}
			e.mu.Unlock()
		}()
		until := time.Now().Add(p.policy.retention)
		for pause := 50 * time.Millisecond; time.Now().Before(until) && e.sleep(pause); pause = longer(pause, 2*time.Second) {
			settlement, err := try(keep)
			if err == nil && settlement != Held {
				if settlement == Fenced {
					e.log.Printf("oncegate: record %s was taken over before its result was stored; there may be a second effect", p.id)
				}
				return
			}
		}
		e.log.Printf("oncegate: the result of record %s was given up; its outcome is unknown", p.id)
	})
	return settleDeferred
}

// breaker refuses claims at once while the store does not answer, instead of after a timeout each.
type breaker struct {
	mu       sync.Mutex
	failures int
	openTill time.Time
	probing  bool
}

const (
	breakerStrikes = 3
	breakerPause   = 500 * time.Millisecond
)

func (b *breaker) allow() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failures < breakerStrikes {
		return true
	}
	// One claim at a time tries the store.
	if time.Now().Before(b.openTill) || b.probing {
		return false
	}
	b.probing = true
	return true
}

func (b *breaker) report(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
	if err == nil || kindOf(err) != StoreUnavailable && kindOf(err) != StoreUnsent {
		b.failures = 0
		return
	}
	b.failures++
	b.openTill = time.Now().Add(breakerPause)
}

// detachedContext has the values of another context, and neither its end nor its deadline.
type detachedContext struct{ context.Context }

func detach(ctx context.Context) context.Context { return detachedContext{ctx} }

func (detachedContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (detachedContext) Done() <-chan struct{}       { return nil }
func (detachedContext) Err() error                  { return nil }

// Attempt is one execution under a key. A handler gets it by AttemptFrom, a function as its argument.
type Attempt struct {
	permit *permit
}

// Record is the identifier of the record.
func (a *Attempt) Record() RecordID { return a.permit.id }

// Token is greater than that of every earlier attempt. A resource that remembers the greatest token that it has seen for a record, and
// refuses smaller ones, cannot be written by an attempt that was overtaken.
func (a *Attempt) Token() uint64 { return a.permit.reply.Token }

// Number counts the attempts of the record: 1, 2, …
func (a *Attempt) Number() int { return a.permit.reply.Attempts }

// AfterAbandoned is true if an earlier attempt was abandoned, so that its effect may have happened.
func (a *Attempt) AfterAbandoned() bool { return a.permit.reply.AfterAbandoned }

// Fenced is closed when the store reports that another attempt owns the record. Stop then: the result will not be stored.
func (a *Attempt) Fenced() <-chan struct{} { return a.permit.fenced }

// DownstreamKey is the key for a call of another API on behalf of this attempt: the same for each attempt, and another one for each step.
func (a *Attempt) DownstreamKey(step string) string { return a.permit.id.DownstreamKey(step) }

type attemptKey struct{}

// AttemptFrom returns the attempt of a request that is executed under a key, or nil if it has no key.
func AttemptFrom(ctx context.Context) *Attempt {
	attempt, _ := ctx.Value(attemptKey{}).(*Attempt)
	return attempt
}
