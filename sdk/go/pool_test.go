package oncegate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"testing"
	"time"
)

// idleDriver has connections that nothing is sent on.
type idleDriver struct{ driver.Conn }

func (d idleDriver) Connect(context.Context) (driver.Conn, error) { return d, nil }
func (d idleDriver) Driver() driver.Driver                        { return nil }
func (idleDriver) Close() error                                   { return nil }
func (idleDriver) Begin() (driver.Tx, error)                      { return nil, errors.New("not sent") }
func (idleDriver) Prepare(string) (driver.Stmt, error)            { return nil, errors.New("not sent") }

// A pool of which a connection becomes free when the wait for it ends was busy. That is no store that is out of reach, so FailOpen does not act.
func TestAPoolThatIsFreeAtTheEndOfTheWait(t *testing.T) {
	db := sql.OpenDB(idleDriver{})
	defer db.Close()
	db.SetMaxOpenConns(1)
	store := NewPostgresStore(db)
	for round := 0; round < 20; round++ {
		conn, err := db.Conn(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		// The wait for a connection ends sooner than the context.
		deadline := time.Now().Add(80 * time.Millisecond)
		ctx, cancel := context.WithDeadline(context.Background(), deadline)
		var all sync.WaitGroup
		for i := 0; i < 200; i++ {
			all.Add(1)
			go func() {
				defer all.Done()
				if _, err := store.Lookup(ctx, RecordID{}); isOutOfReach(err) {
					t.Error(err)
				}
			}()
		}
		time.Sleep(time.Until(deadline.Add(-10 * time.Millisecond)))
		conn.Close()
		all.Wait()
		cancel()
	}
}

// conflictDriver has connections whose server answers each statement in the same way, after a moment.
type conflictDriver struct {
	driver.Conn
	err error
}

func (d conflictDriver) Connect(context.Context) (driver.Conn, error) { return d, nil }
func (d conflictDriver) Driver() driver.Driver                        { return nil }
func (conflictDriver) Close() error                                   { return nil }
func (d conflictDriver) Prepare(string) (driver.Stmt, error)          { return nil, d.err }
func (d conflictDriver) Begin() (driver.Tx, error)                    { return nil, d.err }
func (d conflictDriver) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) {
	time.Sleep(time.Millisecond)
	if sqlState(d.err) == "" {
		return nil, d.err
	}
	return d, nil
}
func (conflictDriver) Commit() error   { return nil }
func (conflictDriver) Rollback() error { return nil }

// A server that answers until the time is over has answered, so FailOpen does not act.
func TestAnswersUntilTheTimeIsOver(t *testing.T) {
	for _, answer := range []error{stateError("40001"), stateError("40P01"), driver.ErrBadConn} {
		db := sql.OpenDB(conflictDriver{err: answer})
		engine, err := NewEngine(NewPostgresStore(db), EngineOptions{Service: "test", Logger: &logged{}, StoreTimeout: 60 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		_, err = engine.lookup(context.Background(), RecordID{})
		if isOutOfReach(err) || !errors.Is(err, answer) {
			t.Error(answer, time.Since(begun), err)
		}
		db.Close()
	}
}
