package oncegate

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"
)

// Store holds records. NewMemoryStore, NewPostgresStore and NewRedisStore make one; each decides by the rules of the same contract, so
// programs in other languages may use the same store at the same time.
//
// Every method may be called again with the same arguments if its reply was lost.
type Store interface {
	// Claim asks to execute.
	Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error)
	// Renew extends the lease of an attempt.
	Renew(ctx context.Context, id RecordID, token uint64, lease, retention time.Duration) (Settlement, error)
	// Complete ends an attempt with a result.
	Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error)
	// Release ends an attempt that decided nothing: the key is free again.
	Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error)
	// Lookup reads a record without its response; nil if there is none.
	Lookup(ctx context.Context, id RecordID) (*RecordInfo, error)
}

// AttemptID is a random number of a claim, by which the store recognises a claim that is sent again because its reply was lost.
type AttemptID [16]byte

// OnAbandoned is the action of a claim that finds an attempt whose lease ended without a result.
type OnAbandoned string

const (
	// Park leaves the outcome unknown until an operator resolves it: at most one execution. The default.
	Park OnAbandoned = "park"
	// Reexecute executes again under a greater token: at least one execution.
	Reexecute OnAbandoned = "reexecute"
)

// Claim is a request to execute.
type Claim struct {
	Attempt     AttemptID
	Fingerprint Fingerprint
	Lease       time.Duration
	// Retention is how long the record is kept after its lease.
	Retention   time.Duration
	OnAbandoned OnAbandoned
	// CallerTag, KeyTag and Operation are for operators.
	CallerTag [8]byte
	KeyTag    *[8]byte
	Operation string
}

// ClaimOutcome is the decision about a claim.
type ClaimOutcome int

const (
	// Execute: the record is yours, under Token.
	Execute ClaimOutcome = iota + 1
	// Replay: the operation took place, and Response is its encoded response.
	Replay
	// InProgress: another attempt owns the record, for LeaseLeft.
	InProgress
	// Mismatch: the key was used for another request.
	Mismatch
	// Unknown: it is not known if the operation took place.
	Unknown
	// Unreplayable: the operation took place, and there is no response to replay.
	Unreplayable
	// Locked: a transaction holds the record. Nothing was decided.
	Locked
)

// ClaimReply is the store's answer to a claim.
type ClaimReply struct {
	Outcome ClaimOutcome
	// Token, Attempts and AfterAbandoned are set with Execute.
	Token          uint64
	Attempts       int
	AfterAbandoned bool
	// Response is set with Replay.
	Response []byte
	// LeaseLeft is set with InProgress.
	LeaseLeft time.Duration
}

// CompletionState is the result of an attempt.
type CompletionState string

const (
	// Completed: the operation took place, with a response.
	Completed CompletionState = "completed"
	// Tombstone: the operation took place, and its response can never be replayed.
	Tombstone CompletionState = "tombstone"
	// OutcomeUnknown: the owner does not know if the operation took place.
	OutcomeUnknown CompletionState = "unknown"
)

// Completion is the end of an attempt with a result.
type Completion struct {
	State CompletionState
	// Response is the encoded response if the state is Completed.
	Response []byte
	// Retention is how long the record is kept from now.
	Retention time.Duration
}

// Settlement is the store's answer to the owner of an attempt.
type Settlement int

const (
	// Settled: it is done.
	Settled Settlement = iota + 1
	// Fenced: another attempt owns the record, or it has another outcome already. Nothing was changed.
	Fenced
	// Held: a transaction holds the record. Nothing was decided; try again.
	Held
)

// RecordInfo is what Lookup returns.
type RecordInfo struct {
	State       string
	Fingerprint Fingerprint
	Token       uint64
	Attempt     AttemptID
	// Operation is that of the claim. LeaseUntil is set while the state is in-progress; it and ExpiresAt are by the clock of the store.
	Operation             string
	LeaseUntil, ExpiresAt time.Time
	// AfterAbandoned is true if the attempt in progress has taken over an abandoned one.
	AfterAbandoned bool
}

// StoreErrorKind says what a StoreError means.
type StoreErrorKind int

const (
	// StoreUnavailable: it is not known if the command was applied.
	StoreUnavailable StoreErrorKind = iota
	// StoreUnsent: the command was not sent, so it was not applied.
	StoreUnsent
	// RecordCorrupt: the record cannot be read. Never execute; an operator has to look.
	RecordCorrupt
	// ResponseSealed: the response is sealed with a key that this process does not have, or is not sealed and must be.
	ResponseSealed
	// StoreMisused: an argument, a right or the schema is wrong. Trying again does not help.
	StoreMisused
)

// StoreError is a failure of a store. It has no keys and no content of records. With Settings.FailOpen, Err decides if requests are executed: only if
// it shows that no connection can be made (*net.OpError of a dial with ECONNREFUSED and the like, *net.DNSError with IsNotFound) or that there was no
// answer in time (context.DeadlineExceeded, Timeout()).
type StoreError struct {
	Kind StoreErrorKind
	// Doing is the command, such as "claim".
	Doing string
	Err   error
}

func (e *StoreError) Error() string {
	switch e.Kind {
	case RecordCorrupt:
		return fmt.Sprintf("oncegate: %s: the record cannot be read; an operator has to look at it", e.Doing)
	case ResponseSealed:
		return fmt.Sprintf("oncegate: %s: the stored response cannot be opened, and nothing is executed: %v", e.Doing, e.Err)
	case StoreMisused:
		return fmt.Sprintf("oncegate: %s: the store refuses the command: %v", e.Doing, e.Err)
	}
	return fmt.Sprintf("oncegate: %s: the store is not available: %v", e.Doing, e.Err)
}

// Unwrap returns the error of the driver.
func (e *StoreError) Unwrap() error { return e.Err }

func kindOf(err error) StoreErrorKind {
	var own *StoreError
	if errors.As(err, &own) {
		return own.Kind
	}
	return StoreUnavailable
}

// isRefusedByStore reports if the store was reached and refused: it may have the record, so nothing executes, whatever FailOpen says.
func isRefusedByStore(err error) bool {
	return errors.Is(err, errFull) || errors.Is(err, errPoolBusy) || errors.As(err, new(refusedError)) || isRefusedState(sqlState(err))
}

// isOutOfReach reports if no connection to the store could be made, or if it gave no answer in time: only then FailOpen executes. All other errors
// may be those of a store that was reached and has the record, or of a process that has no means to reach it.
func isOutOfReach(err error) bool {
	kind := kindOf(err)
	if err == nil || kind != StoreUnavailable && kind != StoreUnsent || isRefusedByStore(err) || isBroken(err) || strings.Contains(err.Error(), "too many open files") {
		return false
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		var network *net.OpError
		return errors.As(err, &network) && network.Op == "dial" && (isUnreachable(errno) || errno == syscall.ENOENT && network.Net == "unix")
	}
	// 57014 is the end of our own time, 08001 a failed connect.
	state := sqlState(err)
	var name *net.DNSError
	var timed interface{ Timeout() bool }
	isMissing := state == "08001" || errors.As(err, &name) && name.IsNotFound
	isLate := state == "57014" || err == errBreakerOpen || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timed) && timed.Timeout()
	return (isMissing || isLate) && !isUsedUp()
}

// isUnreachable reports if an error of connecting says that the server does not run, or that there is no way to it. All others, such as those of a
// process that has no port or no memory left, do not say so.
func isUnreachable(errno syscall.Errno) bool {
	switch errno {
	case syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ENETUNREACH, syscall.EHOSTDOWN, syscall.ETIMEDOUT:
		return true
	case 10061, 10065, 10051, 10064, 10060:
		// The same of Windows.
		return true
	}
	return false
}

// isUsedUp reports if this process can open nothing, as when clients hold all of its file descriptors. Then a name is not found, too, and a driver may
// not say why it cannot connect.
func isUsedUp() bool {
	file, err := os.Open(os.DevNull)
	if err != nil {
		return true
	}
	file.Close()
	return false
}

// isBroken reports if a connection was made, and broke: another one may work. A pool may have several that broke while nobody used them, and a server
// at its limit closes new ones.
func isBroken(err error) bool {
	if kind := kindOf(err); err == nil || kind != StoreUnavailable && kind != StoreUnsent {
		return false
	}
	if state := sqlState(err); state != "" {
		// The server ends this connection.
		return state == "57P01" || state == "57P02"
	}
	if isRefusedByStore(err) {
		return false
	}
	text := err.Error()
	if strings.HasSuffix(text, "EOF") || strings.Contains(text, "connection reset by peer") || strings.Contains(text, "broken pipe") ||
		strings.Contains(text, "conn closed") || isBadConn(err) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, net.ErrClosed) {
		return true
	}
	var network *net.OpError
	return errors.As(err, &network) && network.Op != "dial" && (!network.Timeout() || errors.Is(err, syscall.ETIMEDOUT))
}
