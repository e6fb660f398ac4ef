package oncegate

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
)

// EngineOptions are the settings of an Engine. The zero value has the defaults.
type EngineOptions struct {
	// Service is the name of the service. Services that share a store must have different names, and all programs of one service the
	// same name. Required for every store but MemoryStore, because other services may use it; the name is part of every record.
	Service string
	// IDSecret keys the ids of records (ParseIDSecret). The store must belong to it: a sidecar with the secret marks a new store. Without one,
	// the store must belong to none.
	IDSecret *IDSecret
	// StoreTimeout bounds each command to the store: 2 s by default, and at least 10 ms.
	StoreTimeout time.Duration
	// Logger gets warnings: log.Default() by default, log.New(io.Discard, "", 0) to discard them. Keys, bodies and credentials are
	// never logged.
	Logger Logger
}

// Logger writes a warning. *log.Logger implements it.
type Logger interface {
	Printf(format string, values ...interface{})
}

const (
	defaultStoreTimeout = 2 * time.Second
	defaultLease        = 30 * time.Second
	defaultRetention    = 24 * time.Hour
	defaultWait         = 2 * time.Second

	minStoreTimeout = 10 * time.Millisecond
	// minTime is the least of all other times. What is less is a number that lacks its unit.
	minTime = time.Millisecond

	minLease     = 100 * time.Millisecond
	maxLease     = time.Hour
	minRetention = time.Second
	maxRetention = 400 * 24 * time.Hour

	releasedLeases = 4

	// maxCommands bounds the commands of each kind that are under way.
	maxCommands = 64

	// Attempts whose end is not known to the store yet.
	maxUnsettled     = 65536
	maxDeferredBytes = 256 << 20
)

// Engine claims, renews and settles the records of a store. One engine serves the middleware, the functions and the transactions of a
// program. It is safe for concurrent use.
type Engine struct {
	store   Store
	service string
	secret  *IDSecret
	// anyone is the scope of requests without a caller.
	anyone keyScope
	// memory is the store if it is one in memory: its commands take no time, and nothing has to wait for them.
	memory *MemoryStore
	// resends is true if the client of the store sends commands again by itself.
	resends bool
	timeout time.Duration
	log     Logger
	// breakers are one for each group of records that fail together.
	breakers []breaker
	mark     markGuard
	throttle logThrottle
	// claiming and owning hold the commands that are under way: those of requests that ask to execute, and those of attempts. The ends of attempts
	// do not wait behind claims.
	claiming, owning chan struct{}

	mu sync.Mutex
	// running are the attempts of this process: a duplicate waits for their end.
	running map[RecordID]*permit
	// signs are those of owners, for records that requests with FailOpen wait for.
	signs map[RecordID]*ownerSigns
	// seen is when a record was first found in progress.
	seen map[RecordID]time.Time
	// unsettled counts the attempts of a record whose end is not known to the store yet.
	unsettled map[RecordID]int
	// lost are claims whose replies were lost: they may have been granted, or may still be.
	lost          map[RecordID][]*lostClaim
	pending       int
	watchers      int
	deferredBytes int
	// tasks is the number of handlers and functions that run and of ends that are sent again; idle is signalled when it is zero.
	tasks     int
	idle      *sync.Cond
	closing   chan struct{}
	closeOnce sync.Once
	purgeOnce sync.Once
	// drained is closed when Drain was called: nothing is purged or watched any more.
	drained   chan struct{}
	drainOnce sync.Once
}

// NewEngine returns an engine on a store.
func NewEngine(store Store, options EngineOptions) (*Engine, error) {
	if store == nil {
		return nil, errors.New("oncegate: there is no store; pass NewMemoryStore(), NewPostgresStore(db) or NewRedisStore(client)")
	}
	if own, ok := innermost(store).(*PostgresStore); ok && (own == nil || own.db == nil) {
		return nil, fmt.Errorf("oncegate: %w", errNoDatabase)
	}
	if err := checkService(options.Service); err != nil {
		return nil, err
	}
	if options.Service == "" && isShared(store) {
		return nil, errors.New("oncegate: a store on a server may contain records of other services, so this one needs a name; set " +
			"EngineOptions.Service, such as \"orders\". Programs with the same name share keys")
	}
	if err := options.IDSecret.check(); err != nil {
		return nil, err
	}
	if err := checkTime("StoreTimeout", options.StoreTimeout, minStoreTimeout); err != nil {
		return nil, err
	}
	e := &Engine{
		store: store, service: options.Service, secret: options.IDSecret, timeout: options.StoreTimeout, log: options.Logger, breakers: breakersOf(store),
		running: map[RecordID]*permit{}, signs: map[RecordID]*ownerSigns{}, seen: map[RecordID]time.Time{}, unsettled: map[RecordID]int{},
		lost: map[RecordID][]*lostClaim{}, claiming: make(chan struct{}, maxCommands), owning: make(chan struct{}, maxCommands),
		closing: make(chan struct{}), drained: make(chan struct{}),
	}
	e.anyone = newKeyScope(e.service, nil)
	e.memory, _ = store.(*MemoryStore)
	if own, ok := innermost(store).(*RedisStore); ok {
		e.resends = own.resends
	}
	if e.timeout == 0 {
		e.timeout = defaultStoreTimeout
	}
	if e.log == nil {
		e.log = log.Default()
	}
	e.idle = sync.NewCond(&e.mu)
	return e, nil
}

// scopeOf is what the keys of a caller are unique within.
func (e *Engine) scopeOf(caller []identity) keyScope {
	if len(caller) == 0 {
		return e.anyone
	}
	return newKeyScope(e.service, caller)
}

// innermost is the store that a SealedStore has.
func innermost(store Store) Store {
	if own, ok := store.(*SealedStore); ok {
		return innermost(own.Store)
	}
	return store
}

// isShared is true for a store that other programs may use.
func isShared(store Store) bool {
	_, isInProcess := innermost(store).(interface{ isInProcess() })
	return !isInProcess
}

// spawn runs a task that Drain waits for.
func (e *Engine) spawn(task func()) {
	leave := e.enter()
	go func() {
		defer leave()
		task()
	}()
}

// enter begins what Drain waits for, until leave is called.
func (e *Engine) enter() (leave func()) {
	e.mu.Lock()
	e.tasks++
	e.mu.Unlock()
	return func() {
		e.mu.Lock()
		if e.tasks--; e.tasks == 0 {
			e.idle.Broadcast()
		}
		e.mu.Unlock()
	}
}

// isOwned reports if this process executes under the record, or has executed and its end is not stored yet. The lock is held.
func (e *Engine) isOwned(id RecordID) bool {
	_, isRunning := e.running[id]
	return isRunning || e.unsettled[id] > 0
}

// addUnsettled changes the number of attempts whose end is not known to the store yet. The lock is held.
func (e *Engine) addUnsettled(id RecordID, n int) {
	if e.unsettled[id] += n; e.unsettled[id] == 0 {
		delete(e.unsettled, id)
	}
}

// noteUnsettled begins an end that is sent again, until it is forgotten. A record has several if its key was given back meanwhile, or if its
// transaction was committed and the response is not stored yet. fits is false if too much waits already to keep so many bytes.
func (e *Engine) noteUnsettled(id RecordID, bytes int) (forget func(), fits bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.addUnsettled(id, 1)
	if fits = e.deferredBytes+bytes <= maxDeferredBytes; !fits {
		bytes = 0
	}
	e.deferredBytes += bytes
	return func() {
		e.mu.Lock()
		e.addUnsettled(id, -1)
		e.deferredBytes -= bytes
		e.mu.Unlock()
	}, fits
}

// Drain waits until every handler of the middleware and every function has ended, also those that wait for another one or whose claim is under
// way, every result is in the store, and every claim whose reply was lost is settled. Call it after http.Server.Shutdown. When ctx ends first, results that the store has not taken are given up, and their outcome stays unknown.
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
	e.drainOnce.Do(func() { close(e.drained) })
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

// checkTime refuses a time that is negative or less than min. Zero is the default.
func checkTime(name string, value, min time.Duration) error {
	switch {
	case value < 0:
		return fmt.Errorf("oncegate: %s is %s, which is negative", name, value)
	case value > 0 && value < min:
		return fmt.Errorf("oncegate: %s is %s, and must be at least %s. A number without a unit counts nanoseconds: write 2*time.Second, for example", name, value, min)
	}
	return nil
}

func (p *policy) check() error {
	if err := checkTime("Lease", p.lease, minLease); err != nil {
		return err
	}
	if err := checkTime("Retention", p.retention, minRetention); err != nil {
		return err
	}
	if err := checkTime("Wait", p.wait, minTime); err != nil && p.wait > 0 {
		return err
	}
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
	case p.lease > maxLease:
		return fmt.Errorf("oncegate: the lease %s is longer than %s", p.lease, maxLease)
	case p.retention > maxRetention:
		return fmt.Errorf("oncegate: the retention %s is longer than %s", p.retention, maxRetention)
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
	attempt, err := e.newAttempt()
	if err != nil {
		return claimed{}, &StoreError{StoreUnsent, "claim", err}
	}
	claim.Attempt = attempt
	claim.Lease, claim.Retention, claim.OnAbandoned = policy.lease, policy.retention, policy.onAbandoned
	deadline := time.Now().Add(policy.wait)
	pause := 25 * time.Millisecond
	for {
		if err := e.settleLostClaims(id); err != nil {
			return claimed{}, err
		}
		e.mu.Lock()
		isLost := false
		for _, lost := range e.lost[id] {
			isLost = isLost || lost.claim.Attempt == claim.Attempt
		}
		running, isOurs := e.running[id]
		var ended chan struct{}
		if isOurs {
			if running.ended == nil {
				running.ended = make(chan struct{})
			}
			ended = running.ended
		}
		isUnsettled := e.unsettled[id] > 0
		e.mu.Unlock()
		if isLost {
			// What this attempt is granted is given back by those who settle the lost claim, also under a handler.
			if claim.Attempt, err = e.newAttempt(); err != nil {
				return claimed{}, &StoreError{StoreUnsent, "claim", err}
			}
		}
		reply := claimed{ClaimReply: ClaimReply{Outcome: InProgress, LeaseLeft: policy.lease}}
		mayClaim := !isOurs && !isUnsettled
		if !mayClaim {
			// A record that this process owns must not be claimed: if its lease has ended meanwhile, the claim would make its outcome unknown.
			// Only the store can say if this is another request.
			info, err := e.lookup(ctx, id)
			if err != nil {
				return reply, err
			}
			if info != nil && info.Fingerprint != claim.Fingerprint && info.State != string(stateReleased) {
				return claimed{ClaimReply: ClaimReply{Outcome: Mismatch}}, nil
			}
			// The store may have taken the end of the attempt, and only its reply was lost.
			mayClaim = isUnsettled && info != nil && info.State != string(stateInProgress) && info.State != string(stateAwaited)
		}
		if mayClaim {
			err := e.admit(markLookAgain)
			if err != nil {
				return reply, err
			}
			if reply, err = e.claimOnce(ctx, id, claim, policy); err != nil {
				return reply, err
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
			pause += pause/2 + jitter(pause/4)
		} else if ended != nil {
			pause = time.Second
		}
	}
}

// newAttempt asks the system each time: a copy of a virtual machine must not have the numbers of the original. A store in memory is copied
// with the machine, and no other process claims in it.
func (e *Engine) newAttempt() (attempt AttemptID, err error) {
	if e.memory != nil {
		binary.BigEndian.PutUint64(attempt[:], memoryAttempts.Add(1))
		return attempt, nil
	}
	random := make([]byte, len(attempt))
	_, err = rand.Read(random)
	copy(attempt[:], random)
	return attempt, err
}

var memoryAttempts atomic.Uint64

func (e *Engine) noteSeen(id RecordID) time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.noteOwner(id)
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
	e.mu.Lock()
	full := len(e.unsettled)+e.pending >= maxUnsettled
	e.mu.Unlock()
	if full {
		return e.recorded(id, claim, false, &StoreError{StoreUnsent, "claim", errFull})
	}
	breaker := e.breakerOf(id)
	if !breaker.allow() {
		return claimed{}, breaker.refusal()
	}
	if e.memory == nil {
		// A client that hangs up must not lose the reply: the time of the command is bounded anyway.
		ctx = detach(ctx)
	}
	var begun moment
	var reply ClaimReply
	var err error
	var lost *lostClaim
	asked := time.Now()
	for tries := 0; ; tries++ {
		begun = readClocks()
		reply, err = e.sendClaim(ctx, id, claim)
		if lost == nil && e.mayBeGranted(err, asked) {
			// It is not known if the claim was granted, or still is being granted.
			lost = e.noteLost(id, claim)
		}
		// A pool may have several connections that broke while nobody used them, and a server at its limit closes new ones.
		if isAgain := tries == 0 && lost != nil || isBroken(err) && time.Since(asked) < e.brokenTime(); !isAgain || tries > 0 && !e.sleep(pauseAfter(tries)) {
			break
		}
	}
	var permit *permit
	if lost != nil {
		isDefinite := err == nil && reply.Outcome != InProgress && reply.Outcome != Locked && reply.Outcome != Mismatch
		if isDefinite {
			if reply.Outcome == Execute {
				permit = e.newPermit(id, reply, policy, begun)
				own := claim
				permit.lost = &own
			}
			lost.isOver = true
			e.forgetLost(id, lost)
			lost.mu.Unlock()
		} else {
			lost.mu.Unlock()
			e.pursue(id, lost)
		}
	}
	breaker.report(err)
	if errors.Is(err, errFull) {
		return e.recorded(id, claim, true, err)
	}
	if err != nil {
		return claimed{}, err
	}
	result := claimed{ClaimReply: reply, permit: permit}
	if reply.Outcome == Execute {
		if result.permit == nil {
			result.permit = e.newPermit(id, reply, policy, begun)
			if e.mayBeHidden(asked) {
				own := claim
				result.permit.lost = &own
			}
		}
		// A claim that was under way for long may have been granted after another process began to use the store with an id secret.
		if err := e.admit(markValid); err != nil {
			result.permit.release()
			return claimed{}, err
		}
		e.startPurge()
	}
	return result, nil
}

// brokenTime is the time for which a command is sent again whose connections break. A store that breaks all of them must not hold requests for long.
func (e *Engine) brokenTime() time.Duration {
	if max := 250 * time.Millisecond; e.timeout > max {
		return max
	}
	return e.timeout
}

// pauseAfter is the pause after a connection that broke. The first ones of a pool are given up fast.
func pauseAfter(tries int) time.Duration {
	pause := time.Duration(tries) * 2 * time.Millisecond
	if max := 50 * time.Millisecond; pause > max {
		pause = max
	}
	return pause/2 + jitter(pause/2)
}

// hiddenResend is the shortest time in which a client notices that it has to send a command again, because the reply does not come.
const hiddenResend = 20 * time.Millisecond

// mayBeHidden reports if the client of the store may have sent a command more than once, whatever the last reply was.
func (e *Engine) mayBeHidden(asked time.Time) bool {
	return e.resends && time.Since(asked) >= hiddenResend
}

// mayBeGranted reports if a claim that has ended with this error may have been granted, or may still be.
func (e *Engine) mayBeGranted(err error, asked time.Time) bool {
	switch {
	case err == nil:
		return false
	case kindOf(err) == StoreUnsent:
		// A server that takes no writes is asked for the record at once. After another answer, such as that of one that loads its data after a
		// restart, an earlier message of the client may have been granted.
		return e.mayBeHidden(asked) && !errors.Is(err, errFull) && !errors.Is(err, errPoolBusy)
	}
	return kindOf(err) == StoreUnavailable
}

// recordReader reads a record with its response, encoded.
type recordReader interface {
	read(ctx context.Context, id RecordID) (*RecordInfo, []byte, error)
}

// recorded answers a claim that a full store refuses, if it has the record already. The error is that of the claim if it has not.
func (e *Engine) recorded(id RecordID, claim Claim, wasSent bool, refusal error) (claimed, error) {
	reader, ok := e.store.(recordReader)
	if !ok {
		return claimed{}, refusal
	}
	type record struct {
		info     *RecordInfo
		response []byte
	}
	found, err := ask(context.Background(), e, "lookup", func(ctx context.Context) (found record, err error) {
		found.info, found.response, err = reader.read(ctx, id)
		return found, err
	})
	switch {
	case err != nil && (kindOf(err) == RecordCorrupt || kindOf(err) == ResponseSealed):
		return claimed{}, err
	case err != nil && wasSent && e.resends:
		// The client may have sent the claim twice, and only the second one was refused.
		e.pursueByLookups(id, claim)
		return claimed{}, refusal
	case err != nil || found.info == nil || found.info.State == string(stateReleased):
		return claimed{}, refusal
	}
	if found.info.State == string(stateInProgress) && found.info.Attempt == claim.Attempt {
		// The client has sent the claim twice, and only the second one was refused.
		e.pursueByLookups(id, claim)
	}
	reply := ClaimReply{Outcome: Unreplayable}
	switch {
	case found.info.Fingerprint != claim.Fingerprint:
		reply.Outcome = Mismatch
	case found.info.State == string(stateInProgress):
		reply = ClaimReply{Outcome: InProgress, LeaseLeft: claim.Lease}
	case found.info.State == string(stateUnknown):
		reply.Outcome = Unknown
	case found.info.State == string(stateCompleted):
		reply = ClaimReply{Outcome: Replay, Response: found.response}
	}
	return claimed{ClaimReply: reply}, nil
}

func (e *Engine) sendClaim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if e.memory != nil {
		return e.memory.Claim(ctx, id, claim)
	}
	return ask(ctx, e, "claim", func(ctx context.Context) (ClaimReply, error) { return e.store.Claim(ctx, id, claim) })
}

// ask sends a command, and gives up waiting for its reply after the store timeout. Drivers may wait longer than their context: lib/pq
// returns only when the server answers.
func ask[Reply any](ctx context.Context, e *Engine, doing string, command func(context.Context) (Reply, error)) (Reply, error) {
	if _, isMemory := e.store.(*MemoryStore); isMemory {
		return command(ctx)
	}
	leave, err := e.enterStore(doing)
	if err != nil {
		var none Reply
		return none, err
	}
	ctx, cancel := context.WithTimeout(ctx, e.timeout)
	done := make(chan answered[Reply], 1)
	go func() {
		defer leave()
		answer := answered[Reply]{err: &StoreError{StoreUnavailable, doing, errors.New("the goroutine of the command ended")}}
		defer func() {
			if value := recover(); value != nil {
				// Of a driver or an adapter. It must not end the program.
				log.Printf("oncegate: panic in the store (%s): %v\n%s", doing, value, debug.Stack())
				answer.err = &StoreError{StoreUnavailable, doing, fmt.Errorf("panic: %v", value)}
			}
			done <- answer
		}()
		answer.reply, answer.err = command(ctx)
	}()
	select {
	case answer := <-done:
		cancel()
		return answer.reply, answer.err
	case <-ctx.Done():
	}
	defer cancel()
	// A driver that obeys its context has the better error.
	timer := time.NewTimer(20 * time.Millisecond)
	defer timer.Stop()
	select {
	case answer := <-done:
		return answer.reply, answer.err
	case <-timer.C:
		// Its connection is closed by then. A driver that never returns must not hold the place for ever.
		time.AfterFunc(2*silentGrace, leave)
		var none Reply
		return none, &StoreError{StoreUnavailable, doing, context.DeadlineExceeded}
	}
}

// enterStore waits until few enough commands are under way. Without a bound, the many requests of one caller would make the store too slow to answer
// in time, and that would look like a store that is away. The wait does not count as time of the command, and if it is too long, the error is that
// of a busy pool. leave may be called more than once.
func (e *Engine) enterStore(doing string) (leave func(), _ error) {
	places := e.claiming
	if doing == "complete" || doing == "renew" {
		places = e.owning
	}
	select {
	case places <- struct{}{}:
	default:
		timer := time.NewTimer(e.timeout)
		defer timer.Stop()
		select {
		case places <- struct{}{}:
		case <-timer.C:
			return nil, &StoreError{StoreUnsent, doing, busyError{}}
		}
	}
	once := new(sync.Once)
	return func() { once.Do(func() { <-places }) }, nil
}

type answered[Reply any] struct {
	reply Reply
	err   error
}

func (e *Engine) lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	breaker := e.breakerOf(id)
	if !breaker.allow() {
		return nil, breaker.refusal()
	}
	asked := time.Now()
	var info *RecordInfo
	var err error
	for tries := 0; ; tries++ {
		info, err = ask(detach(ctx), e, "lookup", func(ctx context.Context) (*RecordInfo, error) { return e.store.Lookup(ctx, id) })
		if !isBroken(err) || time.Since(asked) >= e.brokenTime() || tries > 0 && !e.sleep(pauseAfter(tries)) {
			break
		}
	}
	breaker.report(err)
	return info, err
}

// errPoolBusy is a pool of the application without a free connection.
var errPoolBusy = errors.New("all connections of its pool are in use")

// busyError is errPoolBusy of an engine that has as many commands under way as it may.
type busyError struct{}

func (busyError) Error() string {
	return fmt.Sprintf("%d commands of this process are under way, and none of them ended in time", maxCommands)
}

func (busyError) Is(target error) bool { return target == errPoolBusy }

var errFull = errors.New("too many earlier requests have no recorded end yet")

// errBreakerOpen and errBreakerBroken refuse commands at once: for a store that was out of reach, and for one that breaks its connections.
var (
	errBreakerOpen   = &StoreError{StoreUnsent, "claim", errors.New("it did not answer earlier commands, and is asked again in a moment")}
	errBreakerBroken = &StoreError{StoreUnsent, "claim", refusedError{errors.New("it broke the connections of earlier commands, and is asked again in a moment")}}
)

// logThrottle lets one warning of each kind pass in a time. There are few kinds.
type logThrottle struct {
	mu   sync.Mutex
	last map[string]time.Time
}

func (t *logThrottle) allow(kind string, every time.Duration) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := time.Now()
	if last, ok := t.last[kind]; ok && now.Sub(last) < every {
		return false
	}
	if t.last == nil {
		t.last = map[string]time.Time{}
	}
	t.last[kind] = now
	return true
}

// lostClaim is a claim whose reply was lost. No process executes under it. If it was granted, it must be released: otherwise its lease
// ends, and another attempt then makes the outcome unknown, although nothing was executed. So this process looks for it before it claims the
// record, and in the background.
//
// It is only looked for, and never sent again: if the lease of a live owner has ended meanwhile, because its renewals do not arrive, the claim
// would take the record over, or make its outcome unknown. What a look does not find was not granted so far. Its message may still be on its way,
// such as in the buffer of a server that does not run at the moment, so it is watched for some time (watchLate).
type lostClaim struct {
	claim Claim
	// mu is held while a command about the claim is under way.
	mu sync.Mutex
	// isOver: it cannot be granted any more.
	isOver bool
	// run is the last execution without the store that has begun after the claim, or nil. It is guarded by the lock of the engine.
	run *openRun
}

// noteLost returns the new lost claim. It is locked.
func (e *Engine) noteLost(id RecordID, claim Claim) *lostClaim {
	lost := &lostClaim{claim: claim}
	lost.mu.Lock()
	e.mu.Lock()
	e.lost[id] = append(e.lost[id], lost)
	e.mu.Unlock()
	return lost
}

func (e *Engine) forgetLost(id RecordID, lost *lostClaim) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var others []*lostClaim
	for _, other := range e.lost[id] {
		if other != lost {
			others = append(others, other)
		}
	}
	if e.lost[id] = others; len(others) == 0 {
		delete(e.lost, id)
	}
}

// settleLostClaims settles the lost claims of a record before it is claimed again. The error says that the store did not answer.
func (e *Engine) settleLostClaims(id RecordID) error {
	e.mu.Lock()
	all := e.lost[id]
	e.mu.Unlock()
	for _, lost := range all {
		if _, err := e.settleLost(id, lost); err != nil {
			return err
		}
	}
	return nil
}

// settleLost looks if the claim was granted, and then releases the record, unless its request was executed without the store. isSettled is false
// while this process executes under the record.
func (e *Engine) settleLost(id RecordID, lost *lostClaim) (isSettled bool, _ error) {
	lost.mu.Lock()
	defer lost.mu.Unlock()
	if lost.isOver {
		return true, nil
	}
	e.mu.Lock()
	_, isOurs := e.running[id]
	e.mu.Unlock()
	if isOurs {
		return false, nil
	}
	info, err := e.lookup(context.Background(), id)
	if err != nil {
		if kind := kindOf(err); kind == RecordCorrupt || kind == StoreMisused {
			lost.isOver = true
			return true, nil
		}
		return false, err
	}
	isInProgress := info != nil && info.State == string(stateInProgress)
	if !isInProgress || info.Attempt != lost.claim.Attempt {
		if info != nil && info.State != string(stateReleased) {
			e.mu.Lock()
			e.noteOwner(id)
			e.mu.Unlock()
			// A record with a result grants nothing.
			lost.isOver = !isInProgress
		}
		return true, nil
	}
	claim := lost.claim
	reply := ClaimReply{Outcome: Execute, Token: info.Token, AfterAbandoned: info.AfterAbandoned}
	p := e.makePermit(id, reply, policy{claim.Lease, claim.Retention, 0, claim.OnAbandoned}, readClocks())
	e.mu.Lock()
	if _, isOurs := e.running[id]; isOurs {
		e.mu.Unlock()
		p.finish()
		return false, nil
	}
	e.addRunning(p)
	run := lost.run
	isRunning := run != nil && !run.isOver
	if isRunning {
		run.permits = append(run.permits, p)
	}
	e.mu.Unlock()
	// After an abandoned attempt the record is left to its lease.
	lost.isOver = run != nil || info.AfterAbandoned
	switch {
	case isRunning:
		p.renew()
	case run != nil:
		p.complete(run.state, nil)
	case p.release() == settleDeferred:
		return false, &StoreError{StoreUnavailable, "release", errors.New("it did not take a release")}
	}
	return true, nil
}

// pursue settles a lost claim in the background, and then watches for its first message.
func (e *Engine) pursue(id RecordID, lost *lostClaim) {
	e.mu.Lock()
	e.pending++
	e.mu.Unlock()
	begun := time.Now()
	e.spawn(func() {
		defer func() {
			e.mu.Lock()
			e.pending--
			e.mu.Unlock()
			go e.watchLate(id, lost)
		}()
		max := 2 * time.Second
		for pause := 50 * time.Millisecond; time.Since(begun) < lost.claim.Retention && e.sleep(pause); pause = longer(pause, max) {
			if time.Since(begun) > 5*time.Minute {
				// It may be granted as soon as the store is back, and then its lease runs.
				if max = 30 * time.Second; max > lost.claim.Lease/3 {
					max = lost.claim.Lease / 3
				}
			}
			if isSettled, err := e.settleLost(id, lost); err == nil && isSettled {
				return
			}
		}
	})
}

// pursueByLookups gives back what a claim was granted that is not sent again.
func (e *Engine) pursueByLookups(id RecordID, claim Claim) {
	lost := e.noteLost(id, claim)
	lost.mu.Unlock()
	e.pursue(id, lost)
}

// watchLate looks for a lost claim that was not granted so far, or that was released since. If one of its messages arrives later and is granted,
// nobody executes under it.
func (e *Engine) watchLate(id RecordID, lost *lostClaim) {
	defer e.forgetLost(id, lost)
	e.mu.Lock()
	isOneTooMany := e.watchers >= maxWatchers
	if !isOneTooMany {
		e.watchers++
	}
	e.mu.Unlock()
	if isOneTooMany {
		return
	}
	defer func() {
		e.mu.Lock()
		e.watchers--
		e.mu.Unlock()
	}()
	begun := time.Now()
	max := 10 * time.Second
	if max > lost.claim.Lease/3 {
		max = lost.claim.Lease / 3
	}
	for pause := longer(50*time.Millisecond, max); time.Since(begun) < 3*time.Minute && e.sleepUnlessDrained(pause); pause = longer(pause, max) {
		lost.mu.Lock()
		isOver := lost.isOver
		lost.mu.Unlock()
		if isOver {
			return
		}
		e.settleLost(id, lost)
	}
}

// maxWatchers bounds the claims that are watched after their end.
const maxWatchers = 1000

// purger is a store that does not remove records by itself when their retention is over.
type purger interface {
	Purge(ctx context.Context, max int) (int, error)
}

const (
	purgeEvery = time.Minute
	purgeStep  = 500
)

// startPurge begins to purge the store, once. It goes on until Drain is called.
func (e *Engine) startPurge() {
	e.purgeOnce.Do(func() {
		if own, ok := innermost(e.store).(purger); ok {
			go e.purge(own, purgeEvery)
		}
	})
}

func (e *Engine) purge(store purger, every time.Duration) {
	warned := ""
	for next := jitter(every / 20); ; {
		timer := time.NewTimer(next)
		select {
		case <-timer.C:
		case <-e.drained:
			timer.Stop()
			return
		}
		begun := time.Now()
		purged, err := ask(context.Background(), e, "purge", func(ctx context.Context) (int, error) { return store.Purge(ctx, purgeStep) })
		next = every
		if sqlState(err) == "42501" {
			e.log.Printf("oncegate: the role may not call oncegate.purge, so this process does not remove records whose retention is over: another program on " +
				"the store has to, or give the role the right and start again")
			return
		}
		if err != nil {
			if text := err.Error(); text != warned {
				warned = text
				e.log.Printf("oncegate: records whose retention is over were not removed, and it is tried again: %v", err)
			}
			continue
		}
		warned = ""
		if purged >= purgeStep {
			// There is more. It rests for as long as the purge took.
			if next = time.Since(begun); next > every/20 {
				next = every / 20
			}
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

// sleepUnlessDrained returns false if Drain was called meanwhile.
func (e *Engine) sleepUnlessDrained(pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-e.drained:
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
	// settleLeft: the key stays claimed until its lease ends, because an earlier attempt was abandoned, or because a transaction of the
	// application is still open.
	settleLeft
	// settleRolledBack: the transaction of the application was rolled back, so nothing took effect, and the key is free.
	settleRolledBack
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
	// lost is the claim if it was sent again, or may have been.
	lost *Claim
	// ended is closed at the end of the attempt. A duplicate that waits makes it, under the lock of the engine.
	ended chan struct{}

	mu      sync.Mutex
	renewal *time.Timer
	leaseAt moment // when the last granted lease was asked for
	settled bool
	// fenced is closed when the store reports another owner, if something waits for that.
	fenced   chan struct{}
	isFenced bool
	// inTransaction is true if the record was completed in a transaction of the application, which may have been rolled back.
	inTransaction bool
}

func (e *Engine) newPermit(id RecordID, reply ClaimReply, policy policy, begun moment) *permit {
	p := e.makePermit(id, reply, policy, begun)
	e.mu.Lock()
	e.addRunning(p)
	e.mu.Unlock()
	return p
}

// makePermit makes a permit that is not known to others yet. It is renewed from now on.
func (e *Engine) makePermit(id RecordID, reply ClaimReply, policy policy, begun moment) *permit {
	p := &permit{engine: e, id: id, reply: reply, policy: policy, leaseAt: begun}
	p.mu.Lock()
	p.renewal = time.AfterFunc(policy.lease/3, p.renew)
	p.mu.Unlock()
	return p
}

// addRunning makes the permit that of its record. The lock is held.
func (e *Engine) addRunning(p *permit) {
	e.running[p.id] = p
	e.noteOwner(p.id)
}

// whenFenced returns a channel that is closed when another attempt owns the record.
func (p *permit) whenFenced() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.fenced == nil {
		p.fenced = make(chan struct{})
		if p.isFenced {
			close(p.fenced)
		}
	}
	return p.fenced
}

// renew extends the lease every third of it, until the attempt ends or another one took over.
func (p *permit) renew() {
	begun := readClocks()
	settlement, err := p.sendRenewal()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.settled:
	case err == nil && settlement == Fenced && p.inTransaction:
		// Most likely its own commit: the record decides at the end.
	case err == nil && settlement == Fenced:
		p.isFenced = true
		if p.fenced != nil {
			close(p.fenced)
		}
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

// confirm makes sure that the lease still runs: the process may have been paused since the claim, or the machine suspended. A renewal may have
// found another owner.
func (p *permit) confirm() error {
	p.mu.Lock()
	age, isFenced := p.leaseAt.age(), p.isFenced
	p.mu.Unlock()
	if isFenced {
		return errFenced
	}
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

// ending is the end of an attempt: a result, or the release of the key.
type ending struct {
	isRelease bool
	Completion
}

// complete ends the attempt with a result.
func (p *permit) complete(state CompletionState, response []byte) settleOutcome {
	return p.settle(ending{Completion: Completion{state, response, p.policy.retention}})
}

// release ends the attempt without a result: the key is free again. After an abandoned attempt the key is left to its lease instead,
// because the effect of the abandoned attempt is unknown.
func (p *permit) release() settleOutcome {
	if p.isInTransaction() {
		return p.settleByRecord(ending{isRelease: true}, ending{isRelease: true})
	}
	if p.reply.AfterAbandoned {
		p.finish()
		return settleLeft
	}
	p.watchLost()
	return p.settleAnyway(ending{isRelease: true})
}

// watchLost looks for the first message of a claim that was sent again: it may arrive after the release. Other ends answer it.
func (p *permit) watchLost() {
	if p.lost == nil {
		return
	}
	lost := p.engine.noteLost(p.id, *p.lost)
	lost.mu.Unlock()
	p.lost = nil
	go p.engine.watchLate(p.id, lost)
}

// send sends the end of the attempt.
func (p *permit) send(ctx context.Context, end ending) (Settlement, error) {
	if end.isRelease {
		return p.engine.store.Release(ctx, p.id, p.reply.Token, p.policy.releasedRetention())
	}
	return p.engine.store.Complete(ctx, p.id, p.reply.Token, end.Completion)
}

func (p *permit) trySend(end ending) (Settlement, error) {
	if p.engine.memory != nil {
		return p.send(context.Background(), end)
	}
	return ask(context.Background(), p.engine, "complete", func(ctx context.Context) (Settlement, error) { return p.send(ctx, end) })
}

// fail ends an attempt without a result: its outcome is unknown, unless its record was completed in a transaction of the application.
func (p *permit) fail() settleOutcome {
	if p.isInTransaction() {
		return p.settleByRecord(ending{isRelease: true}, ending{isRelease: true})
	}
	return p.complete(OutcomeUnknown, nil)
}

// doubt ends an attempt whose owner does not know its outcome, also if its transaction was rolled back: there may be another effect.
func (p *permit) doubt() settleOutcome {
	if p.isInTransaction() {
		return p.settleByRecord(ending{isRelease: true}, ending{Completion: Completion{OutcomeUnknown, nil, p.policy.retention}})
	}
	return p.complete(OutcomeUnknown, nil)
}

func (p *permit) isInTransaction() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.inTransaction
}

// settleByRecord ends an attempt whose record was completed in a transaction of the application. The record decides: if that was committed,
// the attempt is done, and a result only adds the response. If it was rolled back, the end is rolledBack: nothing took effect, and the key is
// free, unless the owner is in doubt. While it is open, that is tried until the lease would end.
func (p *permit) settleByRecord(end, rolledBack ending) settleOutcome {
	e := p.engine
	outcome, found := settleLeft, recordIsHidden
	for tries := 0; tries < settleTries; tries++ {
		if outcome, found = p.askRecord(end, rolledBack); found == recordHasDecided {
			p.finish()
			return outcome
		}
		if !e.sleep(25 * time.Millisecond) {
			break
		}
	}
	forget, fits := e.noteUnsettled(p.id, len(end.Response))
	if !fits {
		end = ending{isRelease: true}
	}
	e.spawn(func() {
		defer p.finish()
		defer forget()
		// A store that does not answer decides when it is back. A transaction that stays open is left after a lease.
		until, openUntil := time.Now().Add(p.policy.retention), time.Time{}
		for pause := 50 * time.Millisecond; time.Now().Before(until) && e.sleep(pause); pause = longer(pause, 2*time.Second) {
			if found == recordIsOpen && openUntil.IsZero() {
				openUntil = time.Now().Add(p.policy.lease)
			}
			if _, found = p.askRecord(end, rolledBack); found == recordHasDecided {
				return
			}
			if found == recordIsOpen && !openUntil.IsZero() && time.Now().After(openUntil) {
				e.log.Printf("oncegate: the transaction of record %s has not ended within the lease; if it is not committed, its outcome is unknown", p.id)
				return
			}
		}
		e.log.Printf("oncegate: the end of the transaction of record %s is left to its record: the store did not answer", p.id)
	})
	return outcome
}

// recordSays is what a record says of the transaction of the application.
type recordSays int

const (
	// recordIsHidden: the store does not answer.
	recordIsHidden recordSays = iota
	// recordIsOpen: the store answers, and the transaction holds the record.
	recordIsOpen
	recordHasDecided
)

// askRecord asks if the transaction of the application was committed. The outcome is settleDeferred if the store did not show the record, and
// settleLeft if that does not say so: the transaction is open, or the store did not take its end.
func (p *permit) askRecord(end, rolledBack ending) (outcome settleOutcome, says recordSays) {
	info, err := p.engine.lookup(context.Background(), p.id)
	switch {
	case err != nil:
		return settleDeferred, recordIsHidden
	case info == nil || info.Token != p.reply.Token:
		return settleFenced, recordHasDecided
	case info.State != string(stateInProgress) && info.State != string(stateReleased) && info.State != string(stateUnknown):
		if end.isRelease {
			return settleDone, recordHasDecided
		}
		return p.settleAnyway(end), recordHasDecided
	case !rolledBack.isRelease && info.State == string(stateReleased):
		// By an operator.
		return settleFenced, recordHasDecided
	case rolledBack.isRelease && p.reply.AfterAbandoned:
		return settleLeft, recordHasDecided
	}
	// While the transaction is open, the record is held, so this decides only after its end.
	if rolledBack.isRelease {
		p.watchLost()
	}
	if settlement, err := p.trySend(rolledBack); err != nil {
		return settleLeft, recordIsHidden
	} else if settlement != Settled {
		return settleLeft, recordIsOpen
	}
	if !rolledBack.isRelease {
		return settleDone, recordHasDecided
	}
	return settleRolledBack, recordHasDecided
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
	if e.running[p.id] == p {
		delete(e.running, p.id)
	}
	ended := p.ended
	e.mu.Unlock()
	if ended != nil {
		close(ended)
	}
}

// settleTries bounds how often an end is sent before the response is: each 25 ms.
const settleTries = 7

// settle ends the attempt. If the store does not answer, the end is sent again until the retention is over.
func (p *permit) settle(end ending) settleOutcome {
	if p.isInTransaction() {
		return p.settleByRecord(end, ending{isRelease: true})
	}
	return p.settleAnyway(end)
}

func (p *permit) settleAnyway(end ending) settleOutcome {
	e := p.engine
	settlement, err := p.trySend(end)
	for tries := 1; tries < settleTries && (err == nil && settlement == Held || tries == 1 && err != nil && kindOf(err) != StoreMisused); tries++ {
		if !e.sleep(25 * time.Millisecond) {
			break
		}
		settlement, err = p.trySend(end)
	}
	if err == nil && settlement == Settled {
		p.finish()
		return settleDone
	}
	if err == nil && settlement == Fenced {
		p.finish()
		return settleFenced
	}
	p.settleLater(end, err)
	return settleDeferred
}

// settleLater sends the end of the attempt until the store takes it. If too much waits already, the response is given up.
func (p *permit) settleLater(end ending, err error) {
	e := p.engine
	forget, fits := e.noteUnsettled(p.id, len(end.Response))
	if !fits {
		end.State, end.Response = Tombstone, nil
	}
	e.log.Printf("oncegate: the result of record %s is not stored yet, and is sent again: %v", p.id, err)
	e.spawn(func() {
		defer p.finish()
		defer forget()
		until := time.Now().Add(p.policy.retention)
		for pause := 50 * time.Millisecond; time.Now().Before(until) && e.sleep(pause); pause = longer(pause, 2*time.Second) {
			settlement, err := p.trySend(end)
			if err == nil && settlement != Held {
				// A key that was given back may have another attempt by now.
				if settlement == Fenced && !end.isRelease {
					e.log.Printf("oncegate: record %s was taken over before its result was stored; there may be a second effect", p.id)
				}
				return
			}
		}
		e.log.Printf("oncegate: the result of record %s was given up; its outcome is unknown", p.id)
	})
}

// clusterGroups is the number of parts of a Cluster that have a breaker each: few enough to notice a node that is away, and so many that
// the parts with records of two nodes are small.
const clusterGroups = 256

func breakersOf(store Store) []breaker {
	if own, ok := innermost(store).(*RedisStore); ok && own.IsCluster {
		return make([]breaker, clusterGroups)
	}
	return make([]breaker, 1)
}

func (e *Engine) breakerOf(id RecordID) *breaker {
	if len(e.breakers) == 1 {
		return &e.breakers[0]
	}
	return &e.breakers[id.slot()/(redisSlots/clusterGroups)]
}

// breaker refuses claims at once while the store does not answer, instead of after a timeout each.
type breaker struct {
	mu       sync.Mutex
	failures int
	openTill time.Time
	probing  bool
	// isReached is true if the last failure was one of a store that was reached.
	isReached bool
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

// refusal is the error of a command that is not allowed.
func (b *breaker) refusal() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.isReached {
		return errBreakerBroken
	}
	return errBreakerOpen
}

func (b *breaker) report(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.probing = false
	if errors.Is(err, errPoolBusy) {
		// This says nothing about the server.
		return
	}
	// A server that refuses, such as one that takes no writes, still answers.
	if err == nil || isRefusedByStore(err) || kindOf(err) != StoreUnavailable && kindOf(err) != StoreUnsent {
		b.failures = 0
		return
	}
	b.failures++
	b.isReached = !isOutOfReach(err)
	b.openTill = time.Now().Add(breakerPause)
}

// detachedContext has the values of another context, and neither its end nor its deadline.
type detachedContext struct{ context.Context }

func detach(ctx context.Context) context.Context { return detachedContext{ctx} }

func (detachedContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (detachedContext) Done() <-chan struct{}       { return nil }
func (detachedContext) Err() error                  { return nil }

// attemptContext is the context of a handler or function. It has the values of another context, and neither its end nor its deadline.
type attemptContext struct {
	context.Context
	attempt Attempt
}

func withAttempt(ctx context.Context, p *permit) *attemptContext {
	return &attemptContext{detachedContext{ctx}, Attempt{p}}
}

func (c *attemptContext) Value(key any) any {
	if key == (attemptKey{}) {
		return &c.attempt
	}
	return c.Context.Value(key)
}

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
func (a *Attempt) Fenced() <-chan struct{} { return a.permit.whenFenced() }

// DownstreamKey is the key for a call of another API on behalf of this attempt: the same for each attempt, and another one for each step.
func (a *Attempt) DownstreamKey(step string) string { return a.permit.id.DownstreamKey(step) }

type attemptKey struct{}

// AttemptFrom returns the attempt of a request that is executed under a key, or nil if it has no key.
func AttemptFrom(ctx context.Context) *Attempt {
	attempt, _ := ctx.Value(attemptKey{}).(*Attempt)
	return attempt
}
