package oncegate

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Operation is an operation whose rows and whose record are written in one transaction.
type Operation struct {
	// Service is as in EngineOptions, and required. CallerKind and Caller are what a key is unique within, such as "customer" and its
	// number; without them there is one caller.
	Service, CallerKind, Caller string
	// Name is a part of the record, such as "POST /payments".
	Name string
	// Key has 1 to 255 bytes.
	Key string
	// Input is compared as JSON: another input under the same key is ErrKeyReused.
	Input interface{}
	// Lease and Retention are as in Settings.
	Lease, Retention time.Duration
	// Sealing encrypts the result, and opens stored ones. Without keys they are stored in clear.
	Sealing Sealing
	// IDSecret is as in EngineOptions: the secret of the database, if it belongs to one.
	IDSecret *IDSecret
	// DB is the pool of the transaction. It is used only if a *sql.Tx has ended: nothing can be sent through that any more, so the record is looked up, and
	// the unknown outcome of the key is written, by another connection. Without it, such a key may be free (ErrTransactionEnded).
	DB *sql.DB
}

// Querier is a transaction of database/sql: *sql.Tx, or a *sql.Conn on which BEGIN was sent. A pool such as *sql.DB is refused: each of its
// statements would be a transaction of its own.
type Querier interface {
	QueryRowContext(ctx context.Context, query string, args ...interface{}) *sql.Row
}

// Transaction runs a function once for a key, in the caller's own transaction: its rows and its result are committed together, or neither
// is. If the key was used before, it returns the stored result and does not run the function.
//
//	tx, err := db.BeginTx(ctx, nil)
//	receipt, err := oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (Receipt, error) { … })
//	if err != nil { tx.Rollback(); return err }
//	return tx.Commit()
//
// After an error roll back, always: then nothing happened, and the key is free, unless the error is ErrOutcomeUnknown (errors.Is). Do nothing
// else in the transaction after it. If the reply to Commit is lost, call again with the same key: it takes effect at most once.
//
// A stored result that cannot be opened is a StoreError of the kind ResponseSealed or RecordCorrupt, and the function does not run.
//
// The function must not end the transaction: no COMMIT or ROLLBACK, no Commit or Rollback of tx, and no helper that begins and commits a
// transaction on the same connection. If it does anyway, the error is ErrTransactionEnded, and the outcome of the key is unknown, because a part
// may be committed. Set Operation.DB for that: without it, a Commit cannot be told from the rollback of database/sql if the context has ended, too. Give
// BeginTx the context that Transaction gets: if another one ends, tx is rolled back, and that cannot be told from a Rollback of the function.
//
// The database needs the contract, and the role the rights to call lookup, claim, complete, complete_if_owner and release.
func Transaction[Result any](ctx context.Context, tx Querier, operation Operation, run func(context.Context) (Result, error)) (result Result, err error) {
	if err := checkKey(operation.Key, operation.CallerKind, operation.Caller); err != nil {
		return result, err
	}
	if err := checkService(operation.Service); err != nil {
		return result, err
	}
	if operation.Service == "" {
		return result, errors.New("oncegate: a database may contain records of other services, so this one needs a name; set Operation.Service, " +
			"such as \"orders\". Programs with the same name share keys")
	}
	if err := checkVisible[Result]("result", operation.Name); err != nil {
		return result, err
	}
	if err := checkVisibleType(reflect.TypeOf(operation.Input), "input", operation.Name); err != nil {
		return result, err
	}
	secret := operation.IDSecret
	if err := secret.check(); err != nil {
		return result, err
	}
	policy := policy{lease: operation.Lease, retention: operation.Retention, wait: -1}
	if err := policy.check(); err != nil {
		return result, err
	}
	input, err := json.Marshal(operation.Input)
	if err != nil {
		return result, fmt.Errorf("oncegate: the input of %s cannot be compared: %w", operation.Name, err)
	}
	var caller []identity
	if operation.Caller != "" {
		caller = []identity{{operation.CallerKind, operation.Caller}}
	}
	scope, tag := newKeyScope(operation.Service, caller), secret.keyTag(operation.Key)
	var parts []string
	if operation.Name != "" {
		parts = []string{operation.Name}
	}
	id := secret.record(scope.record(parts, operation.Key))
	claim := Claim{Lease: policy.lease, Retention: policy.retention, OnAbandoned: Park, CallerTag: secret.callerTag(scope), KeyTag: &tag,
		Operation:   cutOperation(operation.Name),
		Fingerprint: secret.fingerprint((&fingerprintRules{}).fingerprint(fingerprintInput{contentType: "application/json", body: input}))}
	if _, err := rand.Read(claim.Attempt[:]); err != nil {
		return result, err
	}
	if err := checkTransaction(tx); err != nil {
		return result, err
	}
	looked := readClocks()
	began, err := admitTransaction(ctx, tx, secret)
	if err != nil {
		return result, err
	}
	// A claim, and not a reservation: if the function commits the transaction too early, the record stays, and nothing executes again.
	var row claimRow
	var own bool
	query := "SELECT " + claimColumns + ", " + transactionBegan + " = $10 FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
	if err := tx.QueryRowContext(ctx, query, append(claimArguments(id, claim), began)...).Scan(append(row.fields(), &own)...); err != nil {
		return result, conflictOr("claim", err)
	}
	reply, err := row.reply()
	if err != nil {
		return result, err
	}
	if !own {
		// Each statement is a transaction of its own, so the claim is committed.
		if reply.Outcome == Execute {
			var word string
			err := tx.QueryRowContext(ctx, "SELECT outcome FROM oncegate.release($1, $2, $3)", id[:], int64(reply.Token),
				millis(policy.releasedRetention())).Scan(&word)
			if err != nil {
				return result, postgresError("release", err)
			}
		}
		return result, errNoTransaction
	}
	switch reply.Outcome {
	case Execute:
	case Replay:
		opened, err := operation.Sealing.open(id, reply.Response)
		if err != nil {
			return result, err
		}
		stored, err := DecodeResponse(opened)
		if err != nil {
			return result, &StoreError{RecordCorrupt, "claim", err}
		}
		return decodeResult[Result](operation.Name, stored)
	case InProgress, Locked:
		return result, ErrInProgress
	case Mismatch:
		return result, ErrKeyReused
	case Unknown:
		return result, ErrOutcomeUnknown
	default:
		return result, ErrUnreplayable
	}
	// The claim may have waited for another transaction.
	if looked.age() >= markValid {
		if _, err := admitTransaction(ctx, tx, secret); err != nil {
			return result, err
		}
	}
	if err := execute(ctx, tx, "SAVEPOINT "+transactionSavepoint); err != nil {
		return result, postgresError("claim", err)
	}
	ended := func(cause error) error {
		return endedError{cause, keepFromExecution(ctx, tx, operation.DB, id, claim)}
	}
	isOver := func() bool { return isEnded(ctx, tx, began, operation.DB, id, claim.Attempt) }
	isReturned := false
	defer func() {
		// A panic, or the end of the goroutine.
		if !isReturned && isOver() {
			ended(nil)
		}
	}()
	result, err = run(ctx)
	isReturned = true
	if err != nil {
		if isOver() {
			err = ended(err)
		}
		return result, err
	}
	body, err := json.Marshal(result)
	if err != nil {
		err = fmt.Errorf("oncegate: the result of %s cannot be stored, so the transaction must not be committed: %w", operation.Name, err)
	}
	var encoded []byte
	if err == nil {
		response := StoredResponse{Status: 200, Headers: []Field{{"content-type", "application/json"}}, Body: body}
		encoded, err = response.Encode()
	}
	if err == nil {
		encoded, err = operation.Sealing.seal(id, reply.Token, encoded)
	}
	if err == nil && ctx.Err() != nil {
		// The connection could not be asked afterwards.
		err = postgresError("complete", ctx.Err())
	}
	if err != nil {
		if isOver() {
			err = ended(err)
		}
		return result, err
	}
	err = tx.QueryRowContext(ctx, "SELECT CASE WHEN "+transactionBegan+" = $4 THEN oncegate.complete($1, $2, $3)::text IS NOT NULL ELSE false END",
		id[:], int64(reply.Token), encoded, began).Scan(&own)
	switch {
	case err == nil && !own, err != nil && (errors.Is(err, sql.ErrTxDone) || ctx.Err() != nil) && isOver():
		return result, ended(nil)
	case sqlState(err) == "25P02":
		if isOver() {
			return result, ended(err)
		}
		return result, fmt.Errorf("oncegate: a statement of the function failed and its error was ignored, so PostgreSQL rolls the transaction back: "+
			"use savepoints, or return the error: %w", err)
	case err != nil:
		return result, staleOr(err)
	}
	return result, nil
}

// transactionSavepoint is there as long as the transaction has not ended.
const transactionSavepoint = "oncegate_transaction"

// execute sends a statement without a result.
func execute(ctx context.Context, tx Querier, statement string) error {
	if err := tx.QueryRowContext(ctx, statement).Scan(); err != nil && err != sql.ErrNoRows {
		return err
	}
	return nil
}

// isEnded reports if the function has ended the transaction that began at began. The end of ctx does not stop it. If the connection cannot
// tell, nothing of this transaction is committed any more.
func isEnded(ctx context.Context, tx Querier, began int64, db *sql.DB, id RecordID, attempt AttemptID) bool {
	asking, cancel := context.WithTimeout(detach(ctx), keepTimeout)
	defer cancel()
	own := false
	err := tx.QueryRowContext(asking, "SELECT "+transactionBegan+" = $1", began).Scan(&own)
	switch {
	case errors.Is(err, sql.ErrTxDone):
		// By Commit or Rollback of *sql.Tx. At the end of the context of BeginTx, database/sql rolls back, too.
		return ctx.Err() == nil || db != nil && isCommitted(asking, db, id, attempt)
	case sqlState(err) != "25P02":
		return err == nil && !own
	}
	// A statement has failed: in this transaction, or in a later one.
	err = execute(asking, tx, "ROLLBACK TO SAVEPOINT "+transactionSavepoint)
	if err == nil {
		// It stays failed, so that it cannot be committed.
		execute(asking, tx, "ROLLBACK TO SAVEPOINT "+transactionSavepoint+"_none")
	}
	return sqlState(err) == "3B001"
}

// isCommitted reports if the claim of an attempt was committed. One that cannot be looked up may have been.
func isCommitted(ctx context.Context, db *sql.DB, id RecordID, attempt AttemptID) bool {
	own := false
	err := db.QueryRowContext(ctx, "SELECT state = 'in-progress' AND attempt = $2 FROM oncegate.lookup($1)", id[:], attempt[:]).Scan(&own)
	return own || err != nil && err != sql.ErrNoRows
}

// keepFromExecution claims a record again whose claim the function may have rolled back, and writes that its outcome is unknown: what the
// function did may be committed. The end of ctx does not stop it. The error says that the key was not kept.
func keepFromExecution(ctx context.Context, tx Querier, db *sql.DB, id RecordID, claim Claim) error {
	ctx, cancel := context.WithTimeout(detach(ctx), keepTimeout)
	defer cancel()
	// A part that is not committed yet must not be, and the claim must. Without a transaction, each statement is committed at once.
	err := execute(ctx, tx, "ROLLBACK")
	if !errors.Is(err, sql.ErrTxDone) {
		if err = writeUnknown(ctx, tx, id, claim); err == nil || errors.Is(err, errTakenOver) || db == nil {
			return err
		}
	}
	if db == nil {
		return errNoPool
	}
	return writeUnknown(ctx, db, id, claim)
}

// writeUnknown makes the outcome of a record unknown, unless another attempt has it.
func writeUnknown(ctx context.Context, to Querier, id RecordID, claim Claim) error {
	for {
		var row claimRow
		err := to.QueryRowContext(ctx, "SELECT "+claimColumns+" FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)", claimArguments(id, claim)...).
			Scan(row.fields()...)
		if err != nil {
			return err
		}
		reply, err := row.reply()
		switch {
		case err != nil:
			return err
		case reply.Outcome == Unknown:
			return nil
		case reply.Outcome == Execute:
			var outcome sql.NullString
			to.QueryRowContext(ctx, "SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, NULL, $4)", id[:], int64(reply.Token),
				string(OutcomeUnknown), millis(claim.Retention)).Scan(&outcome)
			// If that has failed, the claim is there, and the outcome is unknown when its lease is over.
			return nil
		case reply.Outcome != Locked:
			return errTakenOver
		}
		timer := time.NewTimer(25 * time.Millisecond)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// keepTimeout bounds what is sent after a function that has ended its transaction.
const keepTimeout = 5 * time.Second

var (
	errTakenOver = errors.New("another call has claimed it meanwhile, so there may be a second effect")
	errNoPool    = errors.New("nothing can be sent through a *sql.Tx that has ended: set Operation.DB to its pool")
)

// endedError is ErrTransactionEnded with the error of the function, or nil. notKept is the failure of keepFromExecution.
type endedError struct{ cause, notKept error }

func (e endedError) Error() string {
	text := ErrTransactionEnded.Error()
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	if e.notKept != nil {
		text += ". The key could not be kept, and may be free and be executed again: " + e.notKept.Error()
	}
	return text
}

func (e endedError) Is(target error) bool { return errors.Is(ErrTransactionEnded, target) }

func (e endedError) Unwrap() error { return e.cause }

// transactionBegan is the begin of the transaction in microseconds: two statements with the same one are in one transaction.
const transactionBegan = "(extract(epoch FROM now()) * 1000000)::bigint"

// ErrTransactionEnded is the error of a function that has ended the transaction in which Transaction runs. A part of what it did may be
// committed, so the key is not executed again: its outcome is unknown. If that could not be written, the text says that the key may be free,
// such as after Commit or Rollback of a *sql.Tx without Operation.DB.
var ErrTransactionEnded = fmt.Errorf("%w: the function ended the transaction that Transaction had begun to use; it must not call COMMIT or "+
	"ROLLBACK, or a helper that begins and commits a transaction on the same connection, and BeginTx needs the context that Transaction gets", ErrOutcomeUnknown)

var errNoTransaction = errors.New("oncegate: this needs a transaction, so that the rows and the record are committed together: pass the *sql.Tx of " +
	"BeginTx, or a *sql.Conn on which BEGIN was sent. Nothing was executed")

// checkTransaction refuses what cannot be a transaction.
func checkTransaction(tx Querier) error {
	switch tx.(type) {
	case nil, interface{ Stats() sql.DBStats }:
		return errNoTransaction
	}
	return nil
}

// ErrStale is the error of a completion whose attempt was overtaken, or has ended. Roll back: the effect must not take place.
var ErrStale = errors.New("oncegate: another attempt owns the record, or this one has ended; roll the transaction back")

// ErrRecordHeld is the error of a completion while another transaction holds the record. Roll back and answer with a 5xx.
var ErrRecordHeld = errors.New("oncegate: another transaction holds the record; roll this one back")

func staleOr(err error) error {
	switch sqlState(err) {
	case "OG001":
		return ErrStale
	case "OG002":
		return ErrRecordHeld
	}
	return conflictOr("complete", err)
}

// conflictOr is the error of a statement in a transaction of the application. The server works if that cannot be serialized.
func conflictOr(doing string, err error) error {
	switch sqlState(err) {
	case "40001", "40P01":
		return fmt.Errorf("oncegate: %s: the transaction conflicts with another one; roll back, and call again with the same key: %w", doing, err)
	}
	return postgresError(doing, err)
}

// completeIn completes a record in the application's transaction.
func completeIn(ctx context.Context, tx Querier, id RecordID, token uint64, response []byte) error {
	if err := checkTransaction(tx); err != nil {
		return err
	}
	var nothing sql.NullString
	var encoded interface{}
	if response != nil {
		encoded = response
	}
	err := tx.QueryRowContext(ctx, "SELECT oncegate.complete($1, $2, $3)::text", id[:], int64(token), encoded).Scan(&nothing)
	if err != nil {
		return staleOr(err)
	}
	return nil
}

// CompleteIn completes the record of this attempt in the application's own transaction, on the database of the store: its rows and the
// record are committed together, or neither is. Call it as the last statement before Commit, outside of savepoints, and answer after the
// commit. The middleware adds the response. After an error roll back and answer with a 5xx. A nil attempt, of a request without a key, does
// nothing.
func (a *Attempt) CompleteIn(ctx context.Context, tx Querier) error {
	if a == nil {
		return nil
	}
	if err := completeIn(ctx, tx, a.permit.id, a.permit.reply.Token, nil); err != nil {
		return err
	}
	a.permit.mu.Lock()
	a.permit.inTransaction = true
	a.permit.mu.Unlock()
	return nil
}

// SidecarAttempt is the attempt of a request that the sidecar passes on, for a service without the middleware.
type SidecarAttempt struct {
	Record RecordID
	Token  uint64
	// Number counts the attempts: 1, 2, …
	Number int
	// Sealing encrypts the response of CompleteIn. Set it to the keys of the sidecar, if that seals.
	Sealing Sealing
}

// FromSidecar reads the fields of the sidecar (Oncegate-Record, Oncegate-Token, Oncegate-Attempt). It returns nil for a request without a
// key. Only the sidecar may reach the service: it removes these fields from what clients send.
func FromSidecar(header http.Header) (*SidecarAttempt, error) {
	record, token, number := fieldLines(header, "Oncegate-Record"), fieldLines(header, "Oncegate-Token"), fieldLines(header, "Oncegate-Attempt")
	if len(record) == 0 && len(token) == 0 {
		return nil, nil
	}
	if len(record) != 1 || len(token) != 1 {
		return nil, errors.New("oncegate: Oncegate-Record and Oncegate-Token must each be there once: does this request come from a sidecar?")
	}
	errMalformed := errors.New("oncegate: Oncegate-Record or Oncegate-Token is malformed: does this request come from a sidecar?")
	attempt := SidecarAttempt{Number: 1}
	var err error
	if attempt.Record, err = ParseRecordID(record[0]); err != nil || record[0] != asciiLower(record[0]) {
		return nil, errMalformed
	}
	if attempt.Token, err = strconv.ParseUint(token[0], 10, 63); err != nil {
		return nil, errMalformed
	}
	if len(number) > 1 {
		return nil, errors.New("oncegate: Oncegate-Attempt is there more than once: does this request come from a sidecar?")
	}
	if len(number) > 0 {
		own, err := strconv.ParseUint(number[0], 10, 31)
		if err != nil {
			return nil, errMalformed
		}
		attempt.Number = int(own)
	}
	return &attempt, nil
}

// fieldLines returns the lines of a field, in whatever case its name is.
func fieldLines(header http.Header, name string) (values []string) {
	for own := range header {
		if strings.EqualFold(own, name) {
			values = append(values, header[own]...)
		}
	}
	return values
}

// checkFields reports a field that HTTP does not carry: a replay would not have it.
func checkFields(response *StoredResponse) error {
	for _, field := range append(append([]Field(nil), response.Headers...), response.Trailers...) {
		if !isToken(field.Name) {
			return fmt.Errorf("oncegate: %q is not the name of a header field", field.Name)
		}
		for i := 0; i < len(field.Value); i++ {
			if field.Value[i] < ' ' && field.Value[i] != '\t' || field.Value[i] == 0x7f {
				return fmt.Errorf("oncegate: the header field %s of the response has a character that HTTP does not carry", field.Name)
			}
		}
	}
	return nil
}

// lowerFields returns the fields with names in lower case, as records have them.
func lowerFields(fields []Field) (lower []Field) {
	for _, field := range fields {
		lower = append(lower, Field{asciiLower(field.Name), field.Value})
	}
	return lower
}

// CompleteIn completes the record in the service's own transaction, on a route with completion = "upstream": call it as the last statement
// before Commit. With a response, every retry gets this response from the commit on: send exactly it, too. Without one (nil), the sidecar
// adds the response that it sees. After an error roll back and answer with a 5xx. A nil attempt, of a request without a key, does nothing.
func (a *SidecarAttempt) CompleteIn(ctx context.Context, tx Querier, response *StoredResponse) error {
	if a == nil {
		return nil
	}
	var encoded []byte
	if response != nil {
		if err := checkFields(response); err != nil {
			return err
		}
		own := *response
		own.Headers, own.Trailers = lowerFields(own.Headers), lowerFields(own.Trailers)
		var err error
		if encoded, err = own.Encode(); err != nil {
			return err
		}
		if encoded, err = a.Sealing.seal(a.Record, a.Token, encoded); err != nil {
			return err
		}
	}
	return completeIn(ctx, tx, a.Record, a.Token, encoded)
}
