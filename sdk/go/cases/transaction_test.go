package main

import (
	"context"
	"database/sql"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"oncegate.dev/oncegate"
)

// receipt is a result that may be none.
type receipt struct {
	Cents int
	fails bool
}

func (r *receipt) MarshalJSON() ([]byte, error) {
	if r != nil && r.fails {
		return nil, errors.New("no JSON")
	}
	return []byte("5"), nil
}

// A function that ends the transaction may have an effect that nothing undoes. The key is not executed again, from its end on.
func TestFunctionThatEndsItsTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	failed := errors.New("card declined")
	for name, statements := range map[string][]string{
		"commit":                               {"COMMIT"},
		"commit and begin":                     {"COMMIT", "BEGIN"},
		"commit, begin and a failure":          {"COMMIT", "BEGIN", "SELECT 1/0"},
		"rollback":                             {"ROLLBACK", "INSERT INTO payments VALUES ('after', 5)"},
		"rollback and begin":                   {"ROLLBACK", "BEGIN"},
		"rollback, begin and commit":           {"ROLLBACK", "BEGIN", "INSERT INTO payments VALUES ('after', 5)", "COMMIT"},
		"rollback, begin and a failure":        {"ROLLBACK", "INSERT INTO payments VALUES ('after', 5)", "BEGIN", "SELECT 1/0"},
		"failure, rollback and a failure":      {"SELECT 1/0", "ROLLBACK", "INSERT INTO payments VALUES ('after', 5)", "BEGIN", "SELECT 1/0"},
		"rollback and chain, and a failure":    {"ROLLBACK AND CHAIN", "SELECT 1/0"},
		"one text of rollback and the rest":    {"ROLLBACK; INSERT INTO payments VALUES ('after', 5); BEGIN"},
		"Commit of *sql.Tx":                    {"tx.Commit"},
		"Rollback of *sql.Tx":                  {"tx.Rollback"},
		"failure, and Rollback of *sql.Tx":     {"SELECT 1/0", "tx.Rollback"},
		"rollback, and Commit of *sql.Tx":      {"ROLLBACK", "INSERT INTO payments VALUES ('after', 5)", "BEGIN", "tx.Commit"},
		"rollback, and a savepoint":            {"ROLLBACK", "BEGIN", "SAVEPOINT own", "SELECT 1/0"},
		"rollback to a savepoint and rollback": {"SAVEPOINT own", "SELECT 1/0", "ROLLBACK TO own", "ROLLBACK"},
	} {
		for _, end := range []string{"success", "failure", "panic", "not JSON"} {
			for _, isSealed := range []bool{false, true} {
				key, runs := newKey(), 0
				operation := oncegate.Operation{Service: "go-tests", Name: "POST /ends", Key: key, DB: db}
				if isSealed {
					operation.Sealing = oncegate.Sealing{Keys: sealKeys(sealKey + strings.Repeat("01", 32))}
				}
				call := func() (err error) {
					tx, err := db.BeginTx(ctx, nil)
					must(err)
					defer tx.Rollback()
					defer func() {
						if value := recover(); value != nil {
							err = failed
						}
					}()
					_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (*receipt, error) {
						runs++
						_, err := tx.ExecContext(ctx, "INSERT INTO payments VALUES ($1, 5)", newKey())
						must(err)
						for _, statement := range statements {
							switch statement {
							case "tx.Commit":
								tx.Commit()
							case "tx.Rollback":
								tx.Rollback()
							default:
								tx.ExecContext(ctx, strings.Replace(statement, "after", newKey(), 1))
							}
						}
						switch end {
						case "failure":
							return nil, failed
						case "panic":
							panic(failed)
						case "not JSON":
							return &receipt{fails: true}, nil
						}
						return &receipt{Cents: 5}, nil
					})
					if err != nil {
						return err
					}
					return tx.Commit()
				}
				first := call()
				if end == "failure" && !errors.Is(first, failed) || end == "panic" && first != failed {
					t.Errorf("%s, %s: %v", name, end, first)
				}
				if end != "panic" && (!errors.Is(first, oncegate.ErrTransactionEnded) || strings.Contains(first.Error(), "may be free")) {
					t.Errorf("%s, %s: %v", name, end, first)
				}
				if again := call(); again != oncegate.ErrOutcomeUnknown || runs != 1 {
					t.Errorf("%s, %s, sealed %v: %d runs, %v", name, end, isSealed, runs, again)
				}
			}
		}
	}
}

// A statement that fails, in the transaction of the call, leaves the key free.
func TestFunctionWithAStatementThatFails(t *testing.T) {
	ctx := background(t)
	db := database(t)
	for _, end := range []error{nil, errors.New("card declined")} {
		for _, statements := range [][]string{{"SELECT 1/0"}, {"SAVEPOINT own", "SELECT 1/0"}, {"SAVEPOINT own", "SELECT 1/0", "ROLLBACK TO own", "SELECT 1/0"}} {
			operation := oncegate.Operation{Service: "go-tests", Name: "POST /fails", Key: newKey(), DB: db}
			payment, runs := newKey(), 0
			call := func() error {
				tx, err := db.BeginTx(ctx, nil)
				must(err)
				_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
					if runs++; runs > 1 {
						return charge{}, nil
					}
					_, err := tx.ExecContext(ctx, "INSERT INTO payments VALUES ($1, 5)", payment)
					must(err)
					for _, statement := range statements {
						tx.ExecContext(ctx, statement)
					}
					return charge{}, end
				})
				// Also without the rollback that it should have, nothing is committed.
				if commit := tx.Commit(); err == nil {
					err = commit
				}
				return err
			}
			if err := call(); err == nil || errors.Is(err, oncegate.ErrOutcomeUnknown) || end != nil && err != end {
				t.Error(statements, err)
			}
			if err := call(); err != nil || runs != 2 {
				t.Error(statements, runs, err)
			}
			var rows int
			must(db.QueryRow("SELECT count(*) FROM payments WHERE key = $1", payment).Scan(&rows))
			if rows != 0 {
				t.Error(statements, rows, "rows")
			}
		}
	}
}

// Without a connection for it, the outcome cannot be written, and the error says that the key may be free.
func TestFunctionThatEndsItsTransactionWithoutAPool(t *testing.T) {
	ctx := background(t)
	db := database(t)
	tx, err := db.BeginTx(ctx, nil)
	must(err)
	operation := oncegate.Operation{Service: "go-tests", Name: "POST /no-pool", Key: newKey()}
	_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) { return charge{}, tx.Rollback() })
	if !errors.Is(err, oncegate.ErrTransactionEnded) || !strings.Contains(err.Error(), "may be free") || !strings.Contains(err.Error(), "Operation.DB") {
		t.Error(err)
	}
}

// If another call has the key meanwhile, nothing is written over it, and the error says so.
func TestFunctionWhoseKeyIsTakenMeanwhile(t *testing.T) {
	ctx := background(t)
	db := database(t)
	operation := oncegate.Operation{Service: "go-tests", Name: "POST /taken", Key: newKey(), DB: db}
	tx, err := db.BeginTx(ctx, nil)
	must(err)
	_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
		must(tx.Rollback())
		other, err := db.BeginTx(ctx, nil)
		must(err)
		_, err = oncegate.Transaction(ctx, other, operation, func(context.Context) (charge, error) { return charge{Cents: 7}, nil })
		must(err)
		return charge{}, other.Commit()
	})
	if !errors.Is(err, oncegate.ErrTransactionEnded) || !strings.Contains(err.Error(), "second effect") {
		t.Error(err)
	}
	tx, err = db.BeginTx(ctx, nil)
	must(err)
	defer tx.Rollback()
	stored, err := oncegate.Transaction(ctx, tx, operation, func(context.Context) (charge, error) { return charge{}, errors.New("executed") })
	if err != nil || stored.Cents != 7 {
		t.Error(stored, err)
	}
}

// A conflict of transactions is no outage.
func TestTransactionsThatConflict(t *testing.T) {
	ctx := background(t)
	db := database(t)
	operation := oncegate.Operation{Service: "go-tests", Name: "POST /serializable", Key: newKey(), DB: db}
	late, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelSerializable})
	must(err)
	defer late.Rollback()
	_, err = late.Exec("SELECT count(*) FROM payments")
	must(err)
	run := func(tx *sql.Tx) error {
		_, err := oncegate.Transaction(ctx, tx, operation, func(context.Context) (charge, error) { return charge{Cents: 5}, nil })
		return err
	}
	first, err := db.BeginTx(ctx, nil)
	must(err)
	must(run(first))
	must(first.Commit())
	if err := run(late); err == nil || !strings.Contains(err.Error(), "conflicts with another one") || strings.Contains(err.Error(), "not available") {
		t.Error(err)
	}
}

// A caller that has gone does not free a key whose function has ended the transaction. If the key cannot be kept, the error says so.
func TestFunctionThatEndsItsTransactionWithoutItsCaller(t *testing.T) {
	db := database(t)
	for _, c := range []struct{ isCut, succeeds bool }{{false, false}, {true, false}, {false, true}} {
		isCut := c.isCut
		operation := oncegate.Operation{Service: "go-tests", Name: "POST /gone", Key: newKey(), Lease: 200 * time.Millisecond}
		runs := 0
		call := func() error {
			ctx, cancel := context.WithCancel(background(t))
			defer cancel()
			conn, err := db.Conn(ctx)
			must(err)
			defer conn.Close()
			_, err = conn.ExecContext(ctx, "BEGIN")
			must(err)
			defer conn.ExecContext(background(t), "ROLLBACK")
			_, err = oncegate.Transaction(ctx, cutQuerier{conn, isCut}, operation, func(ctx context.Context) (charge, error) {
				runs++
				_, err := conn.ExecContext(ctx, "ROLLBACK")
				must(err)
				_, err = conn.ExecContext(ctx, "INSERT INTO payments VALUES ($1, 5)", newKey())
				must(err)
				cancel()
				if c.succeeds {
					return charge{5}, nil
				}
				return charge{}, ctx.Err()
			})
			return err
		}
		first := call()
		if !errors.Is(first, oncegate.ErrTransactionEnded) || strings.Contains(first.Error(), "may be free and be executed again: pq: division by zero") != isCut {
			t.Error(isCut, first)
		}
		if isCut {
			continue
		}
		var again error
		waitFor("the end of the lease", func() bool { again = call(); return !errors.Is(again, oncegate.ErrInProgress) })
		if !errors.Is(again, oncegate.ErrOutcomeUnknown) || runs != 1 {
			t.Errorf("%d runs, %v", runs, again)
		}
	}
}

// A function that has committed is noticed if its caller has gone, too. Without a commit, the key is free, because database/sql rolls back.
func TestFunctionThatCommitsWithoutItsCaller(t *testing.T) {
	db := database(t)
	for _, c := range []struct{ isCommitted, fails bool }{{true, false}, {true, true}, {false, false}, {false, true}} {
		operation := oncegate.Operation{Service: "go-tests", Name: "POST /gone", Key: newKey(), DB: db}
		runs := 0
		call := func() error {
			ctx, cancel := context.WithCancel(background(t))
			defer cancel()
			tx, err := db.BeginTx(ctx, nil)
			must(err)
			defer tx.Rollback()
			_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
				if runs++; runs > 1 {
					return charge{5}, nil
				}
				if c.isCommitted {
					must(tx.Commit())
				}
				cancel()
				if c.fails {
					return charge{}, ctx.Err()
				}
				return charge{5}, nil
			})
			return err
		}
		if err := call(); err == nil || errors.Is(err, oncegate.ErrTransactionEnded) != c.isCommitted {
			t.Error(c, err)
		}
		if err := call(); c.isCommitted && err != oncegate.ErrOutcomeUnknown || !c.isCommitted && err != nil {
			t.Error(c, err)
		}
	}
}

// cutQuerier fails the claim after a ROLLBACK.
type cutQuerier struct {
	*sql.Conn
	isCut bool
}

func (q cutQuerier) QueryRowContext(ctx context.Context, query string, args ...interface{}) *sql.Row {
	if q.isCut && strings.HasSuffix(query, "response FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)") {
		return q.Conn.QueryRowContext(ctx, "SELECT 1/0")
	}
	return q.Conn.QueryRowContext(ctx, query, args...)
}

// What is no transaction is refused, and leaves no record.
func TestTransactionWithoutTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	conn, err := db.Conn(ctx)
	must(err)
	defer conn.Close()
	operation := oncegate.Operation{Service: "go-tests", Name: "POST /pool", Key: newKey(), Input: charge{5}}
	for name, querier := range map[string]oncegate.Querier{"pool": db, "embedded pool": embeddedPool{db}, "connection": conn} {
		_, err := oncegate.Transaction(ctx, querier, operation, func(context.Context) (charge, error) {
			t.Errorf("%s: executed", name)
			return charge{}, nil
		})
		if err == nil || !strings.Contains(err.Error(), "needs a transaction") {
			t.Errorf("%s: %v", name, err)
		}
	}
	attempt := &oncegate.SidecarAttempt{Record: oncegate.RecordID{1}, Token: 1}
	if err := attempt.CompleteIn(ctx, db, nil); err == nil || !strings.Contains(err.Error(), "needs a transaction") {
		t.Error(err)
	}
	// The key is free.
	_, err = conn.ExecContext(ctx, "BEGIN")
	must(err)
	done, err := oncegate.Transaction(ctx, conn, operation, func(context.Context) (charge, error) { return charge{5}, nil })
	if err != nil || done.Cents != 5 {
		t.Error(done, err)
	}
	_, err = conn.ExecContext(ctx, "COMMIT")
	must(err)
}

// A request without a key has no attempt, and nothing to complete.
func TestNoAttemptToComplete(t *testing.T) {
	if err := oncegate.AttemptFrom(context.Background()).CompleteIn(context.Background(), database(t)); err != nil {
		t.Error(err)
	}
}

// A handler that fails after its transaction: if that was committed, it has done its work, and if not, nothing took effect.
func TestHandlerThatFailsAfterItsTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests", Logger: &lines{}})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}, Wait: -1,
		Panicked: func(*http.Request, interface{}, []byte) {}})
	must(err)
	for _, c := range []struct {
		name, end, first, retry string
		runs                    int
	}{
		{"panic after the commit", "panic", "replay-unavailable", "replay-unavailable", 1},
		{"panic after the rollback", "panic", "handler-failed", "done", 2},
		// As after a COMMIT whose reply was lost.
		{"error after the commit", "error", "not known", "replay-unavailable", 1},
		{"error after the rollback", "error", "not known", "done", 2},
		{"unknown after the commit", "unknown", "not known", "replay-unavailable", 1},
		// There may be an effect outside of the database.
		{"unknown after the rollback", "unknown", "not known", "outcome-unknown", 1},
		{"panic before its end", "open", "request-in-progress", "done", 2},
		{"success after the rollback", "", "handler-failed", "done", 2},
		{"success after the commit", "", "paid", "paid", 1},
	} {
		runs := 0
		var open *sql.Tx
		handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			tx, err := db.BeginTx(ctx, nil)
			must(err)
			must(oncegate.AttemptFrom(r.Context()).CompleteIn(ctx, tx))
			if runs++; runs > 1 {
				must(tx.Commit())
				io.WriteString(w, "done")
				return
			}
			switch {
			case c.end == "open":
				open = tx
			case strings.HasSuffix(c.name, "commit"):
				must(tx.Commit())
			default:
				must(tx.Rollback())
			}
			if c.end == "panic" || c.end == "open" {
				panic(c.name)
			}
			if c.end == "unknown" {
				w.Header().Set("Idempotency-Store", "unknown")
			}
			if strings.HasPrefix(c.name, "success") {
				io.WriteString(w, "paid")
				return
			}
			http.Error(w, "not known", 500)
		}))
		key := newKey()
		send := func() string {
			request := httptest.NewRequest("POST", "/fails", nil)
			request.Header.Set("Idempotency-Key", key)
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, request)
			return recorder.Body.String()
		}
		if got := send(); !strings.Contains(got, c.first) {
			t.Errorf("%s: %s", c.name, got)
		}
		if open != nil {
			must(open.Rollback())
		}
		var got string
		waitFor("the retry", func() bool { got = send(); return !strings.Contains(got, "request-in-progress") })
		if !strings.Contains(got, c.retry) || runs != c.runs {
			t.Errorf("%s: %d runs, %s", c.name, runs, got)
		}
	}
}
