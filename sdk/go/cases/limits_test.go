package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

func execute(db *sql.DB, statement string) {
	_, err := db.Exec(statement)
	must(err)
}

// A store that takes no writes was reached: nothing new is executed, also with FailOpen, and what it has is replayed.
func TestStoreThatIsFull(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, address string, _ func()) {
		var fill, free func()
		if strings.HasPrefix(address, "redis:") {
			client := resp.New(strings.TrimPrefix(address, "redis://"))
			set := func(memory string) func() {
				return func() {
					_, err := client.Do(context.Background(), "CONFIG", "SET", "maxmemory", memory).Result()
					must(err)
				}
			}
			fill, free = set("1"), set("0")
		} else {
			db, err := sql.Open("postgres", address+"?sslmode=disable")
			must(err)
			t.Cleanup(func() { db.Close() })
			execute(db, `CREATE FUNCTION public.is_full() RETURNS trigger LANGUAGE plpgsql AS
				$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$`)
			fill = func() {
				execute(db, "CREATE TRIGGER is_full BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW EXECUTE FUNCTION public.is_full()")
			}
			free = func() { execute(db, "DROP TRIGGER is_full ON oncegate.records") }
		}
		var warnings logged
		keys := sealKeys(sealKey + strings.Repeat("01", 32))
		for _, own := range []oncegate.Store{store, oncegate.NewSealedStore(store, keys)} {
			shop := newShop(t, own, oncegate.EngineOptions{Logger: log.New(&warnings, "", 0)}, true)
			key := newKey()
			if got := shop.post(t, key); got.status != 201 {
				t.Fatalf("%+v", got)
			}
			fill()
			for i := 0; i < 5; i++ {
				got := shop.post(t, newKey())
				if got.status != 503 || !strings.Contains(got.body, "takes no new keys") || got.header.Get("Retry-After") != "30" {
					t.Errorf("%+v", got)
				}
				if got := shop.post(t, key); got.status != 201 || got.header.Get("Idempotent-Replayed") != "true" {
					t.Errorf("%+v", got)
				}
			}
			free()
			if n := atomic.LoadInt64(&shop.executions); n != 1 {
				t.Errorf("%d executions", n)
			}
			if got := shop.post(t, newKey()); got.status != 201 {
				t.Errorf("%+v", got)
			}
		}
		if warnings.String() == "" {
			t.Error("nothing was logged")
		}
	})
}

// A server that evicts would forget keys, and execute again.
func TestServerThatEvicts(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, address string, _ func()) {
		if !strings.HasPrefix(address, "redis:") {
			t.Skip("only Redis evicts")
		}
		client := resp.New(strings.TrimPrefix(address, "redis://"))
		do := func(words ...interface{}) {
			_, err := client.Do(context.Background(), words...).Result()
			must(err)
		}
		var warnings logged
		shop := newShop(t, store, oncegate.EngineOptions{Logger: log.New(&warnings, "", 0)}, true)
		do("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
		for _, own := range []oncegate.Store{store, oncegate.NewSealedStore(store, sealKeys(sealKey+strings.Repeat("01", 32)))} {
			if got := newShop(t, own, oncegate.EngineOptions{}, true).post(t, newKey()); got.status != 503 {
				t.Errorf("%+v", got)
			}
		}
		if got := shop.post(t, newKey()); got.status != 503 || shop.executions != 0 || !strings.Contains(warnings.String(), "maxmemory-policy allkeys-lru") {
			t.Errorf("%d executions, %+v, %s", shop.executions, got, warnings.String())
		}
		allowing, err := oncegate.NewRedisStore[*resp.Reply](client)
		must(err)
		allowing.AllowEviction = true
		if got := newShop(t, allowing, oncegate.EngineOptions{}, true).post(t, newKey()); got.status != 201 {
			t.Errorf("%+v", got)
		}
		// It is not known what a user may not ask.
		do("ACL", "SETUSER", "default", "-info")
		unasked, err := oncegate.NewRedisStore[*resp.Reply](client)
		must(err)
		if got := newShop(t, unasked, oncegate.EngineOptions{}, true).post(t, newKey()); got.status != 201 {
			t.Errorf("%+v", got)
		}
		do("ACL", "SETUSER", "default", "+info")
		do("CONFIG", "SET", "maxmemory-policy", "noeviction")
		if got := shop.post(t, newKey()); got.status != 201 {
			t.Errorf("%+v", got)
		}
	})
}

func TestRecordsWhoseRetentionIsOverAreRemoved(t *testing.T) {
	db, _ := ownDatabase(t)
	store, ctx := oncegate.NewPostgresStore(db), background(t)
	for i := 0; i < 20; i++ {
		id := oncegate.RecordID{byte(i + 1)}
		reply, err := store.Claim(ctx, id, oncegate.Claim{Attempt: oncegate.AttemptID{1}, Lease: time.Second, Retention: time.Second, OnAbandoned: oncegate.Park})
		must(err)
		_, err = store.Complete(ctx, id, reply.Token, oncegate.Completion{State: oncegate.Tombstone, Retention: time.Second})
		must(err)
	}
	records := func() (n int) {
		must(db.QueryRow("SELECT count(*) FROM oncegate.records").Scan(&n))
		return n
	}
	if n := records(); n != 20 {
		t.Fatal(n)
	}
	// Their retention ends, and after ten more minutes their tokens are not needed either. Nobody waits for that here.
	execute(db, "UPDATE oncegate.records SET expires_at = 1, purge_at = 1")
	shop := newOpenShop(t, store, false)
	if got := shop.post(t, newKey()); got.status != 201 {
		t.Fatalf("%+v", got)
	}
	waitFor("the purge", func() bool { return records() == 1 })
}

// A right that is missing is found before the first effect.
func TestRoleWithoutARight(t *testing.T) {
	db, address := ownDatabase(t)
	role := fmt.Sprintf("shop_%d", time.Now().UnixNano())
	execute(db, "CREATE ROLE "+role+" LOGIN")
	t.Cleanup(func() { db.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	execute(db, "GRANT USAGE ON SCHEMA oncegate TO "+role)
	for _, function := range []string{"contract_version()", "now_ms()", "lookup(bytea)"} {
		execute(db, "REVOKE ALL ON FUNCTION oncegate."+function+" FROM PUBLIC")
		execute(db, "GRANT EXECUTE ON FUNCTION oncegate."+function+" TO "+role)
	}
	execute(db, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncegate FROM PUBLIC")
	execute(db, `DO $$ DECLARE f regprocedure; BEGIN FOR f IN SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = 'oncegate' AND p.proname IN ('claim', 'renew', 'release', 'lookup', 'contract_version', 'now_ms', 'purge') LOOP
		EXECUTE 'GRANT EXECUTE ON FUNCTION ' || f || ' TO `+role+`'; END LOOP; END $$`)
	own, err := url.Parse(address)
	must(err)
	own.User, own.RawQuery = url.User(role), "sslmode=disable"
	pool, err := sql.Open("postgres", own.String())
	must(err)
	t.Cleanup(func() { pool.Close() })
	var warnings logged
	shop := newShop(t, oncegate.NewPostgresStore(pool), oncegate.EngineOptions{Logger: log.New(&warnings, "", 0)}, true)
	shop.mustRefuse(t, newKey())
	if !strings.Contains(warnings.String(), "lacks the right to call oncegate.complete_if_owner") || !strings.Contains(warnings.String(), "Grants") {
		t.Error(warnings.String())
	}
	execute(db, `DO $$ DECLARE f regprocedure; BEGIN FOR f IN SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
		WHERE n.nspname = 'oncegate' AND p.proname = 'complete_if_owner' LOOP EXECUTE 'GRANT EXECUTE ON FUNCTION ' || f || ' TO `+role+`'; END LOOP; END $$`)
	if got := shop.post(t, newKey()); got.status != 201 || got.header.Get("Idempotency-Status") != "" {
		t.Errorf("%+v %s", got, warnings.String())
	}
}

// The rights that the page of the contract names for the middleware are enough. Without the right to purge, it says so once.
func TestRoleThatMayNotPurge(t *testing.T) {
	db, address := ownDatabase(t)
	role := fmt.Sprintf("shop_%d", time.Now().UnixNano())
	execute(db, "CREATE ROLE "+role+" LOGIN")
	t.Cleanup(func() { db.Exec("DROP OWNED BY " + role + "; DROP ROLE " + role) })
	execute(db, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA oncegate FROM PUBLIC")
	execute(db, "GRANT USAGE ON SCHEMA oncegate TO "+role)
	execute(db, "GRANT EXECUTE ON FUNCTION oncegate.contract_version, oncegate.claim, oncegate.renew, oncegate.complete, oncegate.complete_if_owner, "+
		"oncegate.release, oncegate.lookup TO "+role)
	own, err := url.Parse(address)
	must(err)
	own.User, own.RawQuery = url.User(role), "sslmode=disable"
	pool, err := sql.Open("postgres", own.String())
	must(err)
	t.Cleanup(func() { pool.Close() })
	var warnings logged
	shop := newShop(t, oncegate.NewPostgresStore(pool), oncegate.EngineOptions{Logger: log.New(&warnings, "", 0)}, false)
	if got := shop.post(t, newKey()); got.status != 201 || got.header.Get("Idempotency-Status") != "" {
		t.Errorf("%+v %s", got, warnings.String())
	}
	waitFor("the warning", func() bool { return strings.Contains(warnings.String(), "may not call oncegate.purge") })
	// So are those of a transaction.
	ctx := background(t)
	execute(db, "REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate FROM "+role)
	execute(db, "GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.complete, oncegate.complete_if_owner, oncegate.release, oncegate.lookup TO "+role)
	for _, ends := range []bool{false, true} {
		operation := oncegate.Operation{Service: "go-tests", Name: "POST /rights", Key: newKey(), DB: pool}
		call := func() error {
			tx, err := pool.BeginTx(ctx, nil)
			must(err)
			defer tx.Rollback()
			_, err = oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
				if ends {
					must(tx.Rollback())
				}
				return charge{5}, nil
			})
			if err != nil {
				return err
			}
			return tx.Commit()
		}
		if err := call(); ends != errors.Is(err, oncegate.ErrTransactionEnded) || !ends && err != nil {
			t.Error(err)
		}
		if err := call(); ends != (err == oncegate.ErrOutcomeUnknown) || !ends && err != nil {
			t.Error(err)
		}
	}
}

func TestDatabaseWithoutTheSchema(t *testing.T) {
	name := fmt.Sprintf("empty_%d", time.Now().UnixNano())
	execute(database(t), "CREATE DATABASE "+name)
	own, err := url.Parse(postgresURL)
	must(err)
	own.Path = name
	db, err := sql.Open("postgres", own.String())
	must(err)
	t.Cleanup(func() { db.Close() })
	var warnings logged
	shop := newShop(t, oncegate.NewPostgresStore(db), oncegate.EngineOptions{Logger: log.New(&warnings, "", 0)}, true)
	shop.mustRefuse(t, newKey())
	if !strings.Contains(warnings.String(), "run `oncegate schema apply postgres") {
		t.Error(warnings.String())
	}
}
