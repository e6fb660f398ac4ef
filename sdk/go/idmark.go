package oncegate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// ErrIDSecret is the error of a claim on a store that does not have the id secret of this process (EngineOptions.IDSecret): every key would be
// new, and retries would execute again. The text of the error says what to do. A process that has found the mark of another secret executes
// nothing until it is started again, even if that mark disappears.
var ErrIDSecret = errors.New("the store and this process do not have the same id secret")

// idSecretError is ErrIDSecret with the names of the secrets.
type idSecretError string

func (e idSecretError) Error() string { return string(e) }

func (e idSecretError) Is(target error) bool { return target == ErrIDSecret }

// idMark is the record that says to which id secret a store belongs: SHA-256("oncegate-id-secret-1"). Sidecars and programs in Rust make it
// and renew it; this library only reads it.
var idMark = RecordID{
	0x3a, 0x75, 0x29, 0x7e, 0x59, 0x71, 0x97, 0xee, 0x0c, 0xe1, 0x8f, 0xc3, 0x7d, 0xbf, 0x72, 0x73,
	0x15, 0x93, 0x7c, 0x8c, 0x01, 0xac, 0x21, 0x4d, 0x7c, 0x7b, 0xbc, 0x0a, 0x3c, 0x33, 0x3c, 0xac,
}

const (
	// The age of the last look from which a claim looks again first.
	markLookAgain = 2 * time.Second
	// The age of the last look from which nothing executes without another one. It is less than the 6 s for which a process with an id
	// secret waits before it uses a new store.
	markValid = 4 * time.Second
	// The age of a look without a reply from which one claim looks again.
	markRetry = time.Second
	// A mark on trial lives for 90 s after its lease, one that is there for good for 400 days.
	markTrial = 180 * time.Second
)

func markBinds(mark *RecordInfo) bool { return mark != nil && mark.State != string(stateReleased) }

func isMarkForGood(mark *RecordInfo) bool {
	return mark.State != string(stateInProgress) || mark.ExpiresAt.Sub(mark.LeaseUntil) > markTrial
}

// secretNameIn is the name of the secret in the operation of a mark.
func secretNameIn(mark *RecordInfo) string {
	rest := strings.TrimPrefix(mark.Operation, "id secret ")
	if name, found := cutSuffix(rest, " of this store (not a request)"); found && rest != mark.Operation && len(name) == idNameDigits {
		return name
	}
	return "of another program"
}

// judge returns the reason why a process with this secret, or without one (nil), may not use a store with this mark; nil if it may. The
// reason is for good if the store belongs to another secret for its whole life.
func (s *IDSecret) judge(mark *RecordInfo, needsMark bool) (problem error, isForGood bool) {
	switch {
	case !markBinds(mark):
		if s == nil || !needsMark {
			return nil, false
		}
		return idSecretError(fmt.Sprintf("the store does not have the mark of the id secret %s, and this library does not make it: start a sidecar "+
			"with this secret on it once. If the store has records of this secret and lost its mark, `oncegate id-secret restore` puts it back. "+
			"Never remove the secret", s.name)), false
	case s == nil:
		return idSecretError(fmt.Sprintf("the store belongs to the id secret %s, and this process has none: without it every key would be new, and "+
			"retries would execute again. Configure that id secret, or use another store, and start this process again", secretNameIn(mark))), true
	case mark.Fingerprint != s.markFingerprint():
		// A mark on trial may lapse.
		return idSecretError(fmt.Sprintf("the store belongs to the id secret %s, and this process has %s: with it every key would be new, and "+
			"retries would execute again. Configure the id secret of the store, or use another store, and start this process again",
			secretNameIn(mark), s.name)), isMarkForGood(mark)
	case !isMarkForGood(mark):
		return idSecretError(fmt.Sprintf("the store is new to the id secret %s, and a program with it waits until all others have noticed: "+
			"this process uses the store when that has ended", s.name)), false
	}
	return nil, false
}

// markGuard refuses claims on a store that does not have the id secret of this process.
type markGuard struct {
	mu sync.Mutex
	// foreign is set when the mark of another secret was found: the records of a store that lost its mark still have its ids.
	foreign error
	// logged is the last refusal that was logged, at the time loggedAt.
	logged   string
	loggedAt moment
	// passedAt is when the last look began that succeeded. It is not set if there was none, or if one has refused since.
	passedAt moment
	// failedAt is when the last look began that got no reply.
	failedAt moment
	// looking is the look that is under way, or nil.
	looking *markLook
}

// markLook is a look for the mark. Claims that wait for it share its result.
type markLook struct {
	done chan struct{}
	err  error
}

// admit looks for the mark unless the last look began less than maxAge ago. If the store does not answer, a process that has passed a look
// goes on: on a cluster, the mark may be on another node than the record.
func (e *Engine) admit(maxAge time.Duration) error {
	g := &e.mark
	for {
		g.mu.Lock()
		hasPassed, age := g.passedAt.isSet(), g.passedAt.age()
		isValid := hasPassed && age < markValid
		mayGoOn := isValid || hasPassed && g.failedAt.isSet() && g.failedAt.age() < markValid
		switch {
		case g.foreign != nil && e.secret == nil:
			err := g.foreign
			g.mu.Unlock()
			return &StoreError{StoreMisused, "claim", err}
		case hasPassed && age < maxAge:
			g.mu.Unlock()
			return nil
		case mayGoOn && (g.looking != nil || !isValid && g.failedAt.age() < markRetry):
			// One claim looks, and the others go on.
			g.mu.Unlock()
			return nil
		case g.looking != nil:
			look := g.looking
			g.mu.Unlock()
			if <-look.done; look.err != nil {
				return look.err
			}
			continue
		}
		look := &markLook{done: make(chan struct{})}
		g.looking = look
		g.mu.Unlock()
		begun := readClocks()
		info, err := e.lookup(context.Background(), idMark)
		g.mu.Lock()
		look.err = e.judgeMark(begun, info, err)
		g.looking = nil
		g.mu.Unlock()
		close(look.done)
		return look.err
	}
}

// judgeMark notes the result of a look. The lock is held.
func (e *Engine) judgeMark(begun moment, info *RecordInfo, err error) error {
	g := &e.mark
	if err == nil {
		// A store in the memory of this process has no other programs.
		problem, isForGood := e.secret.judge(info, isShared(e.store))
		switch {
		case isForGood:
			g.foreign = problem
		case g.foreign != nil && !markBinds(info):
			problem = g.foreign
		case problem == nil:
			g.foreign = nil
		}
		if problem == nil {
			g.passedAt, g.failedAt = begun, moment{}
			return nil
		}
		g.passedAt, g.failedAt = moment{}, moment{}
		// The requests are not logged, so the reason is repeated now and then.
		if text := problem.Error(); text != g.logged || g.loggedAt.age() >= time.Minute {
			g.logged, g.loggedAt = text, begun
			e.log.Printf("oncegate: %s", text)
		}
		return &StoreError{StoreMisused, "claim", problem}
	}
	if kind := kindOf(err); kind != StoreUnavailable && kind != StoreUnsent {
		// There is a mark, or there may be one: that is no outage.
		return &StoreError{StoreMisused, "claim", errMarkUnreadable{err}}
	}
	g.failedAt = begun
	if !g.passedAt.isSet() {
		return err
	}
	return nil
}

type errMarkUnreadable struct{ error }

func (e errMarkUnreadable) Error() string {
	return e.error.Error() + " (so it is not known if the store belongs to an id secret)"
}

func (e errMarkUnreadable) Unwrap() error { return e.error }

// VerifyIDs looks now if the store has the id secret of this process, as a claim does: for the check that a service is ready. The error is
// ErrIDSecret if it does not, and otherwise that of the store.
func (e *Engine) VerifyIDs() error { return e.admit(0) }

// foreignDatabases are those in which a transaction has found the mark of another secret, by the name of the own one. There are few; beyond
// the limit only the mark itself refuses.
var foreignDatabases = struct {
	mu       sync.Mutex
	problems map[string]error
}{problems: map[string]error{}}

const maxForeignDatabases = 1000

// admitTransaction looks for the mark in a transaction of the application. began is when that began.
func admitTransaction(ctx context.Context, tx Querier, secret *IDSecret) (began int64, _ error) {
	var name string
	var state, operation sql.NullString
	var leaseUntil, expiresAt sql.NullInt64
	var fingerprint []byte
	err := tx.QueryRowContext(ctx, "SELECT "+transactionBegan+", concat_ws(' ', current_database(), inet_server_addr(), inet_server_port()), "+
		"m.state, m.fingerprint, m.operation, m.lease_until, m.expires_at FROM (SELECT) AS one LEFT JOIN oncegate.lookup($1) AS m ON true",
		idMark[:]).Scan(&began, &name, &state, &fingerprint, &operation, &leaseUntil, &expiresAt)
	if err != nil {
		return began, postgresError("claim", err)
	}
	var mark *RecordInfo
	if state.Valid {
		mark = &RecordInfo{State: state.String, Operation: operation.String, LeaseUntil: time.UnixMilli(leaseUntil.Int64),
			ExpiresAt: time.UnixMilli(expiresAt.Int64)}
		copy(mark.Fingerprint[:], fingerprint)
	}
	if secret != nil {
		name += " " + secret.name
	}
	problem, isForGood := secret.judge(mark, true)
	known := &foreignDatabases
	known.mu.Lock()
	defer known.mu.Unlock()
	switch {
	case isForGood && len(known.problems) < maxForeignDatabases:
		known.problems[name] = problem
	case !markBinds(mark) && known.problems[name] != nil:
		problem = known.problems[name]
	case problem == nil:
		delete(known.problems, name)
	}
	if problem != nil {
		return began, &StoreError{StoreMisused, "claim", problem}
	}
	return began, nil
}
