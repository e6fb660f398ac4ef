package oncegate

import (
	"bytes"
	"time"
)

// This file translates crates/core/src/decide.rs for the memory store. PostgreSQL and Redis decide for themselves.
//
// The rules:
//  1. renew, step, complete and release compare the token. A stale owner is fenced and changes nothing.
//  2. Another fingerprint is a mismatch in every state, except that a released key without steps is free for any request.
//  3. A completed record never changes before it expires, except that its own owner may add a response that it awaits, and that an
//     operator may replace or park the decision of an operator.
//  4. A command that is sent again gets the same reply.
//  5. A record past its retention is absent, but its token still counts.
//  6. Only the owner adds steps, one after the other. They outlive their attempt and end with the owner's completion.
//  7. A park by an operator gives the record a new token that no attempt owns.

const maxLeaseMillis = int64(time.Hour / time.Millisecond)

type recordState string

const (
	stateInProgress recordState = "in-progress"
	stateUnknown    recordState = "unknown"
	stateCompleted  recordState = "completed"
	stateAwaited    recordState = "awaited"
	stateTombstone  recordState = "tombstone"
	stateReleased   recordState = "released"
)

type recordStep struct {
	name   string
	result []byte
}

// memoryRecord is a record as decide sees it. Times are milliseconds. Records are never changed, only replaced.
type memoryRecord struct {
	state          recordState
	response       []byte
	fingerprint    Fingerprint
	token          uint64
	attempts       int
	attempt        AttemptID
	leaseUntil     int64
	afterAbandoned bool
	createdAt      int64
	changedAt      int64
	expiresAt      int64
	caller         [8]byte
	keyTag         *[8]byte
	operation      string
	steps          []recordStep
	byOperator     bool
}

func (r *memoryRecord) live(now int64) *memoryRecord {
	if r == nil || now >= r.expiresAt {
		return nil
	}
	return r
}

// stateName is the state for operators.
func (r *memoryRecord) stateName(now int64) string {
	switch {
	case r.state == stateInProgress && now >= r.leaseUntil:
		return "abandoned"
	case r.state == stateAwaited:
		return string(stateTombstone)
	}
	return string(r.state)
}

func (r *memoryRecord) isCompleted() bool {
	return r.state == stateCompleted || r.state == stateAwaited || r.state == stateTombstone
}

func millis(d time.Duration) int64 {
	return int64((d + time.Millisecond - 1) / time.Millisecond)
}

// decideClaim returns the record to write, or nil if it stays as it is.
func decideClaim(record *memoryRecord, claim Claim, now int64) (*memoryRecord, ClaimReply) {
	live := record.live(now)
	if live == nil {
		return grantClaim(record, nil, claim, now, false)
	}
	if isFree := live.state == stateReleased && len(live.steps) == 0; !isFree && live.fingerprint != claim.Fingerprint {
		return nil, ClaimReply{Outcome: Mismatch}
	}
	switch live.state {
	case stateReleased:
		return grantClaim(record, live, claim, now, false)
	case stateInProgress:
		if live.attempt == claim.Attempt {
			return claimAgain(live, claim, now)
		}
		if now < live.leaseUntil {
			return claimWhileInProgress(live, claim, now)
		}
		if claim.OnAbandoned != Park {
			return grantClaim(record, live, claim, now, true)
		}
		parked := *live
		parked.state, parked.changedAt, parked.expiresAt, parked.byOperator = stateUnknown, now, now+millis(claim.Retention), false
		return &parked, ClaimReply{Outcome: Unknown}
	case stateUnknown:
		return nil, ClaimReply{Outcome: Unknown}
	case stateCompleted:
		return nil, ClaimReply{Outcome: Replay, Response: live.response}
	}
	return nil, ClaimReply{Outcome: Unreplayable}
}

// claimWhileInProgress answers while the lease of another attempt lasts. If more than the longest lease is left, the clock was set back
// since the lease was given, and the owner may be dead. The lease is then shortened to the longest time that it can have had.
func claimWhileInProgress(record *memoryRecord, claim Claim, now int64) (*memoryRecord, ClaimReply) {
	left := record.leaseUntil - now
	bound := record.leaseUntil - record.changedAt
	if bound < 0 {
		bound = 0
	}
	if lease := millis(claim.Lease); bound < lease {
		bound = lease
	}
	if left <= maxLeaseMillis || left <= bound {
		return nil, ClaimReply{Outcome: InProgress, LeaseLeft: time.Duration(left) * time.Millisecond}
	}
	shortened := *record
	kept := record.expiresAt - record.leaseUntil
	if kept < 0 {
		kept = 0
	}
	shortened.leaseUntil, shortened.changedAt = now+bound, now
	shortened.expiresAt = shortened.leaseUntil + kept
	return &shortened, ClaimReply{Outcome: InProgress, LeaseLeft: time.Duration(bound) * time.Millisecond}
}

// grantClaim gives ownership under a token that is greater than all earlier ones.
func grantClaim(last, live *memoryRecord, claim Claim, now int64, afterAbandoned bool) (*memoryRecord, ClaimReply) {
	next := memoryRecord{
		state: stateInProgress, fingerprint: claim.Fingerprint, token: nextToken(last, now), attempts: 1, attempt: claim.Attempt,
		leaseUntil: now + millis(claim.Lease), afterAbandoned: afterAbandoned, createdAt: now, changedAt: now,
		caller: claim.CallerTag, keyTag: claim.KeyTag, operation: claim.Operation,
	}
	if live != nil {
		next.attempts, next.createdAt, next.steps = live.attempts+1, live.createdAt, live.steps
	}
	next.expiresAt = next.leaseUntil + millis(claim.Retention)
	return &next, granted(&next)
}

func granted(r *memoryRecord) ClaimReply {
	return ClaimReply{Outcome: Execute, Token: r.token, Attempts: r.attempts, AfterAbandoned: r.afterAbandoned}
}

func nextToken(last *memoryRecord, now int64) uint64 {
	token := uint64(now)
	if last != nil && last.token+1 > token {
		token = last.token + 1
	}
	return token
}

// claimAgain answers a claim that was sent again because its reply was lost: the same token, and the lease counts from now.
func claimAgain(record *memoryRecord, claim Claim, now int64) (*memoryRecord, ClaimReply) {
	again := *record
	again.leaseUntil = now + millis(claim.Lease)
	again.expiresAt = again.leaseUntil + millis(claim.Retention)
	return &again, granted(&again)
}

// decideRenew also renews a lease that has ended, as long as no other attempt took over: the owner is alive.
func decideRenew(record *memoryRecord, token uint64, lease, retention time.Duration, now int64) (*memoryRecord, Settlement) {
	live := record.live(now)
	if live == nil || live.token != token || live.state != stateInProgress {
		return nil, Fenced
	}
	renewed := *live
	renewed.leaseUntil = now + millis(lease)
	renewed.expiresAt = renewed.leaseUntil + millis(retention)
	return &renewed, Settled
}

func decideComplete(record *memoryRecord, token uint64, state recordState, response []byte, retention time.Duration, now int64) (*memoryRecord, Settlement) {
	live := record.live(now)
	if live == nil || live.token != token {
		return nil, Fenced
	}
	switch {
	case live.state == stateInProgress:
	case live.state == stateUnknown && state != stateUnknown:
		// An unknown outcome became known after all.
	case live.state == stateAwaited && (state == stateCompleted || state == stateTombstone):
		// The owner adds the response that its own transaction left out.
	case live.state == state && bytes.Equal(live.response, response):
		return nil, Settled
	default:
		return nil, Fenced
	}
	done := *live
	done.state, done.response, done.changedAt, done.byOperator = state, response, now, false
	done.expiresAt = now + millis(retention)
	done.attempt, done.leaseUntil, done.afterAbandoned = AttemptID{}, 0, false
	if state != stateUnknown {
		// After an unknown outcome, a later attempt may have to continue after the steps.
		done.steps = nil
	}
	return &done, Settled
}

func decideRelease(record *memoryRecord, token uint64, retention time.Duration, now int64) (*memoryRecord, Settlement) {
	live := record.live(now)
	if live == nil || live.token != token || live.isCompleted() {
		return nil, Fenced
	}
	if live.state == stateReleased {
		return nil, Settled
	}
	return releasedRecord(live, retention, now), Settled
}

// releasedRecord is kept for its token. A record with steps keeps its earlier expiry, because its sender may not know of them.
func releasedRecord(record *memoryRecord, retention time.Duration, now int64) *memoryRecord {
	free := *record
	free.state, free.response, free.changedAt, free.byOperator = stateReleased, nil, now, false
	free.attempt, free.leaseUntil, free.afterAbandoned = AttemptID{}, 0, false
	free.expiresAt = now + millis(retention)
	if len(free.steps) > 0 && record.expiresAt > free.expiresAt {
		free.expiresAt = record.expiresAt
	}
	return &free
}

// decideStep returns recorded, differs, full or fenced.
func decideStep(record *memoryRecord, token uint64, number int, step recordStep, now int64) (*memoryRecord, string) {
	live := record.live(now)
	if live == nil || live.token != token || live.state != stateInProgress {
		return nil, "fenced"
	}
	if number < len(live.steps) {
		if same := live.steps[number]; same.name == step.name && bytes.Equal(same.result, step.result) {
			return nil, "recorded"
		}
		return nil, "differs"
	}
	if number > len(live.steps) {
		return nil, "differs"
	}
	size := len(step.name) + len(step.result)
	for _, own := range live.steps {
		size += len(own.name) + len(own.result)
	}
	if len(live.steps) >= maxSteps || size > maxStepsBytes {
		return nil, "full"
	}
	next := *live
	next.steps = append(append([]recordStep(nil), live.steps...), step)
	return &next, "recorded"
}

// resolution is an operator's decision.
type resolution struct {
	// kind is complete, release or park.
	kind         string
	response     []byte
	retention    time.Duration
	force, amend bool
}

// decideResolve returns the state before; false if the decision does not fit the record.
func decideResolve(record *memoryRecord, resolve resolution, now int64) (*memoryRecord, string, bool) {
	live := record.live(now)
	if live == nil {
		return nil, "", false
	}
	before := live.stateName(now)
	if !mayResolve(live, before, resolve) {
		return nil, before, false
	}
	var next memoryRecord
	switch resolve.kind {
	case "complete":
		// The steps stay: this decision may be taken back, and then the next attempt must not begin at the first step.
		next = *live
		next.state, next.response = stateTombstone, nil
		if resolve.response != nil {
			next.state, next.response = stateCompleted, resolve.response
		}
		next.changedAt, next.expiresAt = now, now+millis(resolve.retention)
	case "release":
		next = *releasedRecord(live, resolve.retention, now)
	case "park":
		next = *live
		next.state, next.response, next.token, next.changedAt = stateUnknown, nil, nextToken(live, now), now
		if next.expiresAt = now + millis(resolve.retention); next.expiresAt < live.expiresAt {
			next.expiresAt = live.expiresAt
		}
	}
	next.attempt, next.leaseUntil, next.afterAbandoned = AttemptID{}, 0, false
	next.byOperator = true
	return &next, before, true
}

func mayResolve(record *memoryRecord, before string, resolve resolution) bool {
	isAmendment := resolve.amend && record.byOperator
	switch {
	case resolve.kind == "park":
		isEnd := before == "completed" || before == "tombstone"
		return isEnd && record.byOperator || before == "released"
	case before == "unknown" || before == "abandoned":
		return !resolve.amend
	case before == "in-progress":
		return resolve.kind == "release" && resolve.force && !resolve.amend
	case before == "completed" || before == "tombstone":
		return isAmendment
	}
	return resolve.kind == "complete" && (isAmendment || !resolve.amend && len(record.steps) > 0)
}
