package oncegate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"
)

// PostgresStore keeps records in the schema oncegate of a PostgreSQL database (contract version 1). `oncegate schema apply postgres` makes
// the schema. Any driver of database/sql works.
type PostgresStore struct{ db *sql.DB }

// NewPostgresStore returns a store on the pool of the application. It has no connection of its own.
func NewPostgresStore(db *sql.DB) *PostgresStore { return &PostgresStore{db} }

const postgresVersion = 1

// Check reports if the database has the contract that this library needs. Call it at the start.
func (s *PostgresStore) Check(ctx context.Context) error {
	var version int
	if err := s.query(ctx, "check", "SELECT oncegate.contract_version()", nil, &version); err != nil {
		return err
	}
	if version < postgresVersion {
		return fmt.Errorf("oncegate: the database has version %d of the contract and this library needs %d; run `oncegate schema apply postgres`", version, postgresVersion)
	}
	if version > postgresVersion {
		return fmt.Errorf("oncegate: the database has version %d of the contract and this library knows %d; upgrade the library", version, postgresVersion)
	}
	return nil
}

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
	case state == "22023", state == "42501", state == "42883", state == "3F000", state == "42P01":
		kind = StoreMisused
	case state == "" && isUnsent(err):
		kind = StoreUnsent
	}
	return &StoreError{kind, doing, err}
}

// isUnsent reports if no connection was made, so that nothing was sent.
func isUnsent(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) && network.Op == "dial"
}

// query calls a function once. It does not use the retries of database/sql: whoever sends a claim again has to know that it does.
func (s *PostgresStore) query(ctx context.Context, doing, text string, args []interface{}, into ...interface{}) error {
	conn, err := s.db.Conn(ctx)
	if err != nil {
		// Nothing was sent.
		return &StoreError{StoreUnsent, doing, err}
	}
	defer conn.Close()
	err = conn.QueryRowContext(ctx, text, args...).Scan(into...)
	if err == sql.ErrNoRows {
		return err
	}
	if err != nil {
		return postgresError(doing, err)
	}
	return nil
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

// Lookup implements Store.
func (s *PostgresStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	var info RecordInfo
	var fingerprint, attempt []byte
	var token int64
	err := s.query(ctx, "lookup", "SELECT state, fingerprint, token, attempt FROM oncegate.lookup($1)", []interface{}{id[:]}, &info.State,
		&fingerprint, &token, &attempt)
	if err == sql.ErrNoRows {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	info.Token = uint64(token)
	copy(info.Fingerprint[:], fingerprint)
	copy(info.Attempt[:], attempt)
	return &info, nil
}

// isBadConn reports if a pool had a connection that was broken before.
func isBadConn(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || err != nil && strings.Contains(err.Error(), driver.ErrBadConn.Error())
}
