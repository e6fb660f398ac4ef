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
