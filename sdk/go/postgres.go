package oncegate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log"
	"net"
	"reflect"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"
)

// PostgresStore keeps records in the schema oncegate of a PostgreSQL database (contract version 1). `oncegate schema apply postgres` makes
// the schema. Any driver of database/sql works.
type PostgresStore struct {
	db *sql.DB
	// exchange is how the driver sends a statement with arguments, as far as it is known.
	exchange int32
	// isChecked is 1 when Check has succeeded once.
	isChecked int32
}

// NewPostgresStore returns a store on a pool of the application. It has no connection of its own. Give it a pool that handlers do not wait for
// while they have a connection of the same pool: otherwise requests wait for each other.
func NewPostgresStore(db *sql.DB) *PostgresStore { return &PostgresStore{db: db} }

var errNoDatabase = errors.New("there is no database; pass the *sql.DB of sql.Open to NewPostgresStore")

const postgresVersion = 1

// Check reports if the database has the contract that this library needs, and if the role may call its functions. Call it at the start. The
// first claim calls it, too: nothing is executed until it has succeeded once.
func (s *PostgresStore) Check(ctx context.Context) error {
	var version int
	if err := s.query(ctx, "check", "SELECT oncegate.contract_version()", nil, &version); err != nil {
		return err
	}
	problem := ""
	switch {
	case version < postgresVersion:
		problem = fmt.Sprintf("the database has version %d of the contract and this library needs %d; run `oncegate schema apply postgres`", version, postgresVersion)
	case version > postgresVersion:
		problem = fmt.Sprintf("the database has version %d of the contract and this library knows %d; upgrade the library", version, postgresVersion)
	default:
		missing := ""
		if err := s.query(ctx, "check", missingRights, nil, &missing); err != nil {
			return err
		}
		if missing == "" {
			atomic.StoreInt32(&s.isChecked, 1)
			return nil
		}
		problem = "the role lacks the right to call " + missing + grantsHint
	}
	return &StoreError{StoreMisused, "check", errors.New(problem)}
}

// missingRights names the functions that every attempt needs and the role may not call.
const missingRights = "SELECT coalesce(string_agg(DISTINCT 'oncegate.' || p.proname, ', '), '') FROM pg_catalog.pg_proc AS p " +
	"WHERE p.pronamespace = 'oncegate'::regnamespace AND p.proname IN ('claim', 'renew', 'complete_if_owner', 'release', 'lookup') " +
	"AND NOT has_function_privilege(p.oid, 'EXECUTE')"

const (
	grantsHint = "; see \"Grants\" in docs/reference/store-contract-postgres.md: the role of this service needs USAGE on the schema oncegate, and EXECUTE on its " +
		"functions contract_version, claim, renew, complete_if_owner, release and lookup, for transactions complete, and if it is to remove expired records purge"
	schemaHint = "; run `oncegate schema apply postgres --url URL` as the owner of the database"
)

// sqlState is the SQLSTATE of an error of any driver, or "".
func sqlState(err error) string {
	var own interface{ SQLState() string }
	if errors.As(err, &own) {
		return own.SQLState()
	}
	return ""
}

func postgresError(doing string, err error) error {
	kind := StoreUnavailable
	switch state := sqlState(err); {
	case state == "OG003":
		kind = RecordCorrupt
	case state == "42501":
		kind, err = StoreMisused, hintedError{err, grantsHint}
	case state == "42883", state == "3F000", state == "42P01":
		kind, err = StoreMisused, hintedError{err, schemaHint}
	case state == "22023", isLoginState(state):
		kind = StoreMisused
	case state == "53100", state == "25006":
		// The disk is full, or the server is a standby: the statement was undone.
		kind, err = StoreUnsent, fullError{err}
	case state == "26000", state == "42P05", state == "08P01":
		err = hintedError{err, poolerHint}
	case state == "" && isUnsent(err):
		kind = StoreUnsent
	}
	return &StoreError{kind, doing, err}
}

const poolerHint = "; if a pooler such as PgBouncer is in front of PostgreSQL, see \"Stores\" in the README of this library"

// hintedError is an error of the driver with what to do.
type hintedError struct {
	error
	hint string
}

func (e hintedError) Error() string { return e.error.Error() + e.hint }

func (e hintedError) Unwrap() error { return e.error }

// isLoginState reports if the server does not let the role in, or does not have the database.
func isLoginState(state string) bool {
	return strings.HasPrefix(state, "28") || strings.HasPrefix(state, "3D")
}

// isRefusedState reports if this SQLSTATE is the answer of a server or pooler, and not of a driver that does not reach it (08001). The end of our own
// time cancels a statement, too (57014).
func isRefusedState(state string) bool { return state != "" && state != "57014" && state != "08001" }

// statementError is the error of a statement that was sent.
func statementError(ctx context.Context, doing string, err error) error {
	if sqlState(err) == "57014" && ctx.Err() == nil {
		// Another limit than ours, such as statement_timeout.
		err = refusedError{err}
	}
	return postgresError(doing, err)
}

// isUnsent reports if no connection was made, so that nothing was sent.
func isUnsent(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) && network.Op == "dial"
}

// The ways in which drivers send a statement with arguments.
const (
	exchangeUnknown int32 = iota
	// exchangeOnce: in one message, or by a named statement. A pooler cannot come between.
	exchangeOnce
	// exchangeSplit: the text in one message and the arguments in a later one. A pooler that gives each transaction another connection may
	// run the statement of another client with these arguments, so each call needs a transaction.
	exchangeSplit
)

func isPgx(connection driver.Conn) bool {
	kind := reflect.TypeOf(connection)
	return kind != nil && kind.Kind() == reflect.Pointer && strings.Contains(kind.Elem().PkgPath(), "jackc/pgx")
}

// exchangeOf looks at the connection of the driver. An unknown one may split.
func exchangeOf(connection interface{}) int32 {
	value := reflect.ValueOf(connection)
	if value.Kind() != reflect.Pointer || value.IsNil() || value.Elem().Kind() != reflect.Struct {
		return exchangeSplit
	}
	switch path := value.Elem().Type().PkgPath(); {
	case strings.Contains(path, "jackc/pgx"):
		return exchangeOnce
	case strings.HasSuffix(path, "lib/pq"):
		if binary := value.Elem().FieldByName("binaryParameters"); binary.Kind() == reflect.Bool && binary.Bool() {
			return exchangeOnce
		}
	}
	return exchangeSplit
}

// query calls a function once. It does not use the retries of database/sql: whoever sends a claim again has to know that it does.
func (s *PostgresStore) query(ctx context.Context, doing, text string, args []interface{}, into ...interface{}) error {
	if s.db == nil {
		return &StoreError{StoreMisused, doing, errNoDatabase}
	}
	var answer error
	for tries := 0; ; tries++ {
		err := s.queryOnce(ctx, doing, text, args, into...)
		// If the pool has another isolation level by default, PostgreSQL may have undone the call. A pool may have many connections that broke while
		// nobody used them, and BEGIN may be sent again.
		state := sqlState(err)
		isConflict := state == "40001" || state == "40P01"
		isAgain := isConflict || errors.As(err, new(notBegunError))
		if isAgain && answer == nil {
			answer = err
		}
		if !isAgain && answer != nil && isOutOfReach(err) {
			// The server has answered. Only the time for trying again is over.
			err = &StoreError{kindOf(err), doing, errors.Unwrap(answer)}
		}
		if !isAgain || tries == 100 || ctx.Err() != nil {
			return err
		}
		if isConflict {
			timer := time.NewTimer(jitter(time.Duration(tries+1) * time.Millisecond))
			select {
			case <-timer.C:
			case <-ctx.Done():
			}
			timer.Stop()
		}
	}
}

// notBegunError is the error of BEGIN on a connection that was broken before.
type notBegunError struct{ error }

func (e notBegunError) Unwrap() error { return e.error }

func (s *PostgresStore) queryOnce(ctx context.Context, doing, text string, args []interface{}, into ...interface{}) error {
	waiting, cancel := endingSooner(ctx)
	defer cancel()
	conn, err := s.db.Conn(waiting)
	if err != nil {
		// database/sql returns the bare error of the context to those who wait for a connection. One may be free again by now.
		isWaiting := err == waiting.Err()
		if stats := s.db.Stats(); stats.MaxOpenConnections > 0 && (isWaiting || waiting.Err() != nil && stats.InUse >= stats.MaxOpenConnections) {
			err = fmt.Errorf("%w (%d)", errPoolBusy, stats.InUse)
		}
		return unsentError(doing, err)
	}
	defer conn.Close()
	var own driver.Conn
	err = conn.Raw(func(raw interface{}) error {
		own, _ = raw.(driver.Conn)
		if atomic.LoadInt32(&s.exchange) == exchangeUnknown {
			atomic.StoreInt32(&s.exchange, exchangeOf(raw))
		}
		return nil
	})
	if err != nil {
		return unsentError(doing, err)
	}
	if !isPgx(own) {
		// Connections of pgx end with their context, and are not made to be closed by another goroutine.
		defer closeIfSilent(ctx, conn, own)()
	}
	if len(args) > 0 && atomic.LoadInt32(&s.exchange) == exchangeSplit {
		return queryInTransaction(ctx, conn, doing, text, args, into...)
	}
	err = conn.QueryRowContext(ctx, text, args...).Scan(into...)
	if err == sql.ErrNoRows {
		return err
	}
	if err != nil {
		return statementError(ctx, doing, err)
	}
	return nil
}

// endingSooner leaves time to report that no connection was free, before the command is given up as one without an answer.
func endingSooner(ctx context.Context) (context.Context, context.CancelFunc) {
	deadline, isBounded := ctx.Deadline()
	if !isBounded {
		return context.WithCancel(ctx)
	}
	sooner := time.Until(deadline) / 8
	if max := 250 * time.Millisecond; sooner > max {
		sooner = max
	}
	return context.WithDeadline(ctx, deadline.Add(-sooner))
}

// silentGrace is the time that a driver has to notice the end of its context.
const silentGrace = 500 * time.Millisecond

// closeIfSilent closes the connection of a driver that does not return after the end of its context, such as lib/pq on a connection that went
// silent without an end. Otherwise the pool would keep it, and have no other one at some time. The result is called after the command.
func closeIfSilent(ctx context.Context, conn *sql.Conn, own driver.Conn) func() {
	deadline, isBounded := ctx.Deadline()
	if !isBounded || own == nil {
		return func() {}
	}
	timer := time.AfterFunc(time.Until(deadline)+silentGrace, func() {
		defer func() {
			if value := recover(); value != nil {
				// Of the driver. It must not end the program.
				log.Printf("oncegate: panic closing a connection: %v\n%s", value, debug.Stack())
			}
		}()
		own.Close()
	})
	return func() {
		if !timer.Stop() {
			// It must not go back to the pool.
			conn.Raw(func(interface{}) error { return driver.ErrBadConn })
		}
	}
}

// queryInTransaction calls a function in a transaction, which a pooler gives one connection.
func queryInTransaction(ctx context.Context, conn *sql.Conn, doing, text string, args []interface{}, into ...interface{}) error {
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		if isBadConn(err) {
			err = notBegunError{err}
		}
		return unsentError(doing, err)
	}
	err = tx.QueryRowContext(ctx, text, args...).Scan(into...)
	if err != nil {
		tx.Rollback()
		if err == sql.ErrNoRows {
			return err
		}
		return statementError(ctx, doing, err)
	}
	if err := tx.Commit(); err != nil {
		return statementError(ctx, doing, err)
	}
	return nil
}

// unsentError is the error of a command that was not sent.
func unsentError(doing string, err error) error {
	kind := StoreUnsent
	if isLoginState(sqlState(err)) {
		kind = StoreMisused
	}
	if strings.Contains(err.Error(), "sql: database is closed") {
		// By this process.
		err = refusedError{err}
	}
	return &StoreError{kind, doing, err}
}

func optionalTag(tag *[8]byte) interface{} {
	if tag == nil {
		return nil
	}
	return tag[:]
}

func claimArguments(id RecordID, claim Claim) []interface{} {
	return []interface{}{id[:], claim.Attempt[:], claim.Fingerprint[:], millis(claim.Lease), millis(claim.Retention), string(claim.OnAbandoned),
		claim.CallerTag[:], claim.Operation, optionalTag(claim.KeyTag)}
}

var claimOutcomes = map[string]ClaimOutcome{"execute": Execute, "replay": Replay, "in-progress": InProgress, "mismatch": Mismatch,
	"unknown": Unknown, "unreplayable": Unreplayable, "locked": Locked}

// claimRow is a row of oncegate.claim.
type claimRow struct {
	outcome                  sql.NullString
	token, attempts, leaseMs sql.NullInt64
	afterAbandoned           sql.NullBool
	response                 []byte
}

func (r *claimRow) fields() []interface{} {
	return []interface{}{&r.outcome, &r.token, &r.attempts, &r.leaseMs, &r.afterAbandoned, &r.response}
}

const claimColumns = "outcome, token, attempts, lease_left_ms, after_abandoned, response"

func (r *claimRow) reply() (ClaimReply, error) {
	outcome, known := claimOutcomes[r.outcome.String]
	if !known {
		return ClaimReply{}, &StoreError{StoreMisused, "claim", fmt.Errorf("the outcome %q is unknown; upgrade the library", r.outcome.String)}
	}
	return ClaimReply{Outcome: outcome, Token: uint64(r.token.Int64), Attempts: int(r.attempts.Int64), AfterAbandoned: r.afterAbandoned.Bool,
		Response: r.response, LeaseLeft: time.Duration(r.leaseMs.Int64) * time.Millisecond}, nil
}

// Claim implements Store.
func (s *PostgresStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if atomic.LoadInt32(&s.isChecked) == 0 {
		if err := s.Check(ctx); err != nil {
			var own *StoreError
			if errors.As(err, &own) && own.Kind == StoreUnavailable {
				// The claim was not sent.
				own.Kind = StoreUnsent
			}
			return ClaimReply{}, err
		}
	}
	var row claimRow
	err := s.query(ctx, "claim", "SELECT "+claimColumns+" FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)", claimArguments(id, claim), row.fields()...)
	if err != nil {
		return ClaimReply{}, err
	}
	return row.reply()
}

func (s *PostgresStore) settle(ctx context.Context, doing, text string, args ...interface{}) (Settlement, error) {
	var outcome string
	if err := s.query(ctx, doing, text, args, &outcome); err != nil {
		return 0, err
	}
	switch outcome {
	case "renewed", "completed", "released":
		return Settled, nil
	case "fenced":
		return Fenced, nil
	case "locked":
		return Held, nil
	}
	return 0, &StoreError{StoreMisused, doing, fmt.Errorf("the outcome %q is unknown; upgrade the library", outcome)}
}

// Renew implements Store.
func (s *PostgresStore) Renew(ctx context.Context, id RecordID, token uint64, lease, retention time.Duration) (Settlement, error) {
	return s.settle(ctx, "renew", "SELECT outcome FROM oncegate.renew($1, $2, $3, $4)", id[:], int64(token), millis(lease), millis(retention))
}

// Complete implements Store.
func (s *PostgresStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	var response interface{}
	if completion.State == Completed {
		response = completion.Response
	}
	return s.settle(ctx, "complete", "SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)",
		id[:], int64(token), string(completion.State), response, millis(completion.Retention))
}

// Release implements Store.
func (s *PostgresStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	return s.settle(ctx, "release", "SELECT outcome FROM oncegate.release($1, $2, $3)", id[:], int64(token), millis(retention))
}

// Purge removes records whose retention is over, at most max (1000), and returns their number. The engine calls it about once a minute.
func (s *PostgresStore) Purge(ctx context.Context, max int) (purged int, err error) {
	err = s.query(ctx, "purge", "SELECT purged FROM oncegate.purge($1)", []interface{}{max}, &purged)
	return purged, err
}

// Lookup implements Store.
func (s *PostgresStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	info, _, err := s.lookup(ctx, id, "NULL::bytea")
	return info, err
}

// read implements recordReader.
func (s *PostgresStore) read(ctx context.Context, id RecordID) (*RecordInfo, []byte, error) {
	return s.lookup(ctx, id, "response")
}

func (s *PostgresStore) lookup(ctx context.Context, id RecordID, responseColumn string) (_ *RecordInfo, response []byte, _ error) {
	var info RecordInfo
	var fingerprint, attempt []byte
	var token, expiresAt int64
	var leaseUntil sql.NullInt64
	var afterAbandoned sql.NullBool
	err := s.query(ctx, "lookup", "SELECT state, fingerprint, token, attempt, operation, lease_until, expires_at, after_abandoned, "+responseColumn+
		" FROM oncegate.lookup($1)",
		[]interface{}{id[:]}, &info.State, &fingerprint, &token, &attempt, &info.Operation, &leaseUntil, &expiresAt, &afterAbandoned, &response)
	if err == sql.ErrNoRows {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	info.AfterAbandoned = afterAbandoned.Bool
	info.Token, info.LeaseUntil, info.ExpiresAt = uint64(token), time.UnixMilli(leaseUntil.Int64), time.UnixMilli(expiresAt)
	copy(info.Fingerprint[:], fingerprint)
	copy(info.Attempt[:], attempt)
	return &info, response, nil
}

// isBadConn reports if a pool had a connection that was broken before.
func isBadConn(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || err != nil && strings.Contains(err.Error(), driver.ErrBadConn.Error())
}
