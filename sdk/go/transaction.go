package oncegate

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Operation is an operation whose rows and whose record are written in one transaction.
type Operation struct {
	// Service is as in EngineOptions. CallerKind and Caller are what a key is unique within, such as "customer" and its number; without
	// them there is one caller.
	Service, CallerKind, Caller string
	// Name is a part of the record, such as "POST /payments".
	Name string
	// Key has 1 to 255 bytes.
	Key string
	// Input is compared as JSON: another input under the same key is ErrKeyReused.
	Input interface{}
	// Lease and Retention are as in Settings.
	Lease, Retention time.Duration
}

// Querier is a transaction of database/sql: *sql.Tx, or a *sql.Conn on which BEGIN was sent.
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
// After an error roll back, always: then nothing happened, and the key is free. Do nothing else in the transaction after it. If the reply
// to Commit is lost, call again with the same key: it takes effect at most once.
//
// The database needs the contract, and the role the rights to call reserve_or_claim, complete_reserved and complete.
func Transaction[Result any](ctx context.Context, tx Querier, operation Operation, run func(context.Context) (Result, error)) (result Result, err error) {
	if operation.Key == "" || len(operation.Key) > maxKeyBytes || (operation.Caller == "") != (operation.CallerKind == "") {
		return result, ErrInvalidKey
	}
	if err := checkService(operation.Service); err != nil {
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
	scope, tag := newKeyScope(operation.Service, caller), keyTag(operation.Key)
	var parts []string
	if operation.Name != "" {
		parts = []string{operation.Name}
	}
	id := scope.record(parts, operation.Key)
	claim := Claim{Lease: policy.lease, Retention: policy.retention, OnAbandoned: Park, CallerTag: scope.callerTag(), KeyTag: &tag,
		Operation:   cutOperation(operation.Name),
		Fingerprint: (&fingerprintRules{}).fingerprint(fingerprintInput{contentType: "application/json", body: input})}
	if _, err := rand.Read(claim.Attempt[:]); err != nil {
		return result, err
	}
	var reservation sql.NullInt64
	var row claimRow
	err = tx.QueryRowContext(ctx, "SELECT transaction, "+claimColumns+" FROM oncegate.reserve_or_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		claimArguments(id, claim)...).Scan(append([]interface{}{&reservation}, row.fields()...)...)
	if err != nil {
		return result, postgresError("claim", err)
	}
	var reply ClaimReply
	if !reservation.Valid {
		if reply, err = row.reply(); err != nil {
			return result, err
		}
		switch reply.Outcome {
		case Execute:
		case Replay:
			stored, err := DecodeResponse(reply.Response)
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
	}
	if result, err = run(ctx); err != nil {
		return result, err
	}
	body, err := json.Marshal(result)
	if err != nil {
		return result, fmt.Errorf("oncegate: the result of %s cannot be stored, so the transaction must not be committed: %w", operation.Name, err)
	}
	response := StoredResponse{Status: 200, Headers: []Field{{"content-type", "application/json"}}, Body: body}
	encoded, err := response.Encode()
	if err != nil {
		return result, err
	}
	if !reservation.Valid {
		return result, completeIn(ctx, tx, id, reply.Token, encoded)
	}
	var token sql.NullInt64
	err = tx.QueryRowContext(ctx, "SELECT oncegate.complete_reserved($1, $2, $3, $4, $5, $6, $7, $8)", id[:], reservation.Int64,
		claim.Fingerprint[:], encoded, millis(policy.retention), claim.CallerTag[:], claim.Operation, optionalTag(claim.KeyTag)).Scan(&token)
	if err != nil {
		return result, staleOr(err)
	}
	if !token.Valid {
		return result, ErrOutcomeUnknown
	}
	return result, nil
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
	return postgresError("complete", err)
}

// completeIn completes a record in the application's transaction.
func completeIn(ctx context.Context, tx Querier, id RecordID, token uint64, response []byte) error {
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
// commit. The middleware adds the response. After an error roll back and answer with a 5xx.
func (a *Attempt) CompleteIn(ctx context.Context, tx Querier) error {
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
}

// FromSidecar reads the fields of the sidecar (Oncegate-Record, Oncegate-Token, Oncegate-Attempt). It returns nil for a request without a
// key. Only the sidecar may reach the service: it removes these fields from what clients send.
func FromSidecar(header http.Header) (*SidecarAttempt, error) {
	record, token := header.Values("Oncegate-Record"), header.Values("Oncegate-Token")
	if len(record) == 0 && len(token) == 0 {
		return nil, nil
	}
	if len(record) != 1 || len(token) != 1 {
		return nil, errors.New("oncegate: Oncegate-Record and Oncegate-Token must each be there once; only the sidecar may send them")
	}
	var attempt SidecarAttempt
	var err error
	if attempt.Record, err = ParseRecordID(record[0]); err != nil {
		return nil, err
	}
	if attempt.Token, err = strconv.ParseUint(token[0], 10, 63); err != nil {
		return nil, errors.New("oncegate: Oncegate-Token is not a number")
	}
	attempt.Number, _ = strconv.Atoi(header.Get("Oncegate-Attempt"))
	return &attempt, nil
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
		var err error
		if encoded, err = response.Encode(); err != nil {
			return err
		}
	}
	return completeIn(ctx, tx, a.Record, a.Token, encoded)
}
