package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

type lines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lines) Printf(format string, values ...interface{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	fmt.Fprintf(&l.text, format+"\n", values...)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// local is a handler behind the middleware in this process, and the number of its executions.
func local(t *testing.T, store oncegate.Store, settings oncegate.Settings) (send func(key string) answer, executions *int64, log *lines) {
	log, executions = &lines{}, new(int64)
	engine, err := oncegate.NewEngine(store, oncegate.EngineOptions{Service: "go-tests", Logger: log})
	must(err)
	settings.Scope = []string{"single-tenant"}
	protect, err := oncegate.Middleware(engine, settings)
	must(err)
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "execution ", atomic.AddInt64(executions, 1))
	}))
	return func(key string) answer {
		request := httptest.NewRequest("POST", "/local", nil)
		request.Header.Set("Idempotency-Key", key)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		return answer{recorder.Code, recorder.Body.String(), recorder.Result().Header, nil}
	}, executions, log
}

// A pooler gives each transaction another connection. The commands of the library are not mixed with the statements of others.
func TestPoolerAndStatementsOutsideOfTransactions(t *testing.T) {
	address := startPooler(t, postgresURL)
	for name, more := range map[string]string{"statement and arguments apart": "", "in one message": "&binary_parameters=yes"} {
		t.Run(name, func(t *testing.T) {
			open := func(more string) *sql.DB {
				db, err := sql.Open("postgres", address+more)
				must(err)
				db.SetMaxIdleConns(20)
				t.Cleanup(func() { db.Close() })
				return db
			}
			direct := database(t)
			waitFor("the pooler", func() bool { return open("").Ping() == nil })
			_, err := direct.Exec("CREATE TABLE IF NOT EXISTS effects (one text, two bigint, three bigint)")
			must(err)
			_, err = direct.Exec("TRUNCATE effects")
			must(err)
			send, executions, log := local(t, oncegate.NewPostgresStore(open(more)), oncegate.Settings{Wait: 10 * time.Second})
			// The application has statements of its own, of as many arguments as a release, on the same pooler.
			var group sync.WaitGroup
			var isOver int32
			others := open("")
			for i := 0; i < 6; i++ {
				group.Add(1)
				go func() {
					defer group.Done()
					for atomic.LoadInt32(&isOver) == 0 {
						others.Exec("INSERT INTO effects SELECT encode($1::bytea, 'hex'), $2::bigint, $3::bigint", []byte("own"), 1, 2)
					}
				}()
			}
			var clients sync.WaitGroup
			for i := 0; i < 8; i++ {
				clients.Add(1)
				go func() {
					defer clients.Done()
					for n := 0; n < 25; n++ {
						key := newKey()
						for try := 0; try < 2; try++ {
							if got := send(key); got.status != 200 {
								t.Errorf("%+v", got)
							}
						}
					}
				}()
			}
			clients.Wait()
			atomic.StoreInt32(&isOver, 1)
			group.Wait()
			var foreign int
			must(direct.QueryRow("SELECT count(*) FROM effects WHERE one <> encode('own'::bytea, 'hex')").Scan(&foreign))
			if foreign != 0 || *executions != 200 || log.String() != "" {
				t.Errorf("%d foreign rows, %d executions, %s", foreign, *executions, log)
			}
		})
	}
}

// A server that was reached and takes no writes executes nothing, also with FailOpen. It answers for the keys that it has.
func TestFailOpenOnFullServers(t *testing.T) {
	open := oncegate.Settings{FailOpen: true, Wait: -1}
	check := func(t *testing.T, store oncegate.Store, fill func() (empty func())) {
		send, executions, log := local(t, store, open)
		key := newKey()
		if got := send(key); got.status != 200 {
			t.Fatalf("%+v", got)
		}
		empty := fill()
		defer empty()
		if got := send(newKey()); got.status != 503 || !strings.Contains(got.body, "takes no new keys") || *executions != 1 {
			t.Errorf("%d executions, %+v", *executions, got)
		}
		if got := send(key); got.status != 200 || got.header.Get("Idempotent-Replayed") != "true" || *executions != 1 {
			t.Errorf("%d executions, %+v", *executions, got)
		}
		if !strings.Contains(log.String(), "it takes no new keys") {
			t.Error(log)
		}
	}
	for name, raised := range map[string]string{"full": "53100", "refusing": "XX001"} {
		t.Run("postgres "+name, func(t *testing.T) {
			db := database(t)
			if name == "refusing" {
				send, executions, _ := local(t, oncegate.NewPostgresStore(db), open)
				must(raise(db, raised))
				defer unraise(db)
				if got := send(newKey()); got.status != 503 || *executions != 0 {
					t.Errorf("%d executions, %+v", *executions, got)
				}
				return
			}
			check(t, oncegate.NewPostgresStore(db), func() func() {
				must(raise(db, raised))
				return func() { unraise(db) }
			})
		})
	}
	t.Run("redis", func(t *testing.T) {
		client := resp.New(redisURL[len("redis://"):])
		store, err := oncegate.NewRedisStore[*resp.Reply](client)
		must(err)
		set := func(size string) {
			_, err := client.Do(context.Background(), "CONFIG", "SET", "maxmemory", size).Result()
			must(err)
		}
		check(t, store, func() func() { set("1"); return func() { set("0") } })
	})
	t.Run("sealed redis", func(t *testing.T) {
		client := resp.New(redisURL[len("redis://"):])
		store, err := oncegate.NewRedisStore[*resp.Reply](client)
		must(err)
		set := func(size string) {
			_, err := client.Do(context.Background(), "CONFIG", "SET", "maxmemory", size).Result()
			must(err)
		}
		check(t, oncegate.NewSealedStore(store, sealKeys(sealKey+strings.Repeat("01", 32))), func() func() { set("1"); return func() { set("0") } })
	})
}

func raise(db *sql.DB, state string) error {
	_, err := db.Exec(`CREATE OR REPLACE FUNCTION public.fails() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN RAISE EXCEPTION 'no space left on device' USING ERRCODE = '` + state + `'; END $$;
		CREATE TRIGGER fails BEFORE INSERT ON oncegate.records FOR EACH ROW EXECUTE FUNCTION public.fails()`)
	return err
}

func unraise(db *sql.DB) {
	_, err := db.Exec("DROP TRIGGER fails ON oncegate.records")
	must(err)
}

// A role that may claim and not complete must not begin to execute.
func TestRightsAreCheckedBeforeTheFirstClaim(t *testing.T) {
	db := database(t)
	_, err := db.Exec(`CREATE ROLE poor LOGIN; GRANT USAGE ON SCHEMA oncegate TO poor;
		GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.lookup, oncegate.contract_version, oncegate.now_ms TO poor`)
	must(err)
	poor, err := sql.Open("postgres", strings.Replace(postgresURL, "owner@", "poor@", 1))
	must(err)
	defer poor.Close()
	store := oncegate.NewPostgresStore(poor)
	send, executions, log := local(t, store, oncegate.Settings{FailOpen: true})
	if got := send(newKey()); got.status != 503 || *executions != 0 {
		t.Errorf("%d executions, %+v", *executions, got)
	}
	if !strings.Contains(log.String(), "the role lacks the right to call oncegate.complete_if_owner, oncegate.release, oncegate.renew; see \"Grants\"") {
		t.Error(log)
	}
	// The right can be given while the program runs.
	_, err = db.Exec("GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO poor")
	must(err)
	if got := send(newKey()); got.status != 200 || *executions != 1 {
		t.Errorf("%d executions, %+v", *executions, got)
	}
	// A password that is wrong, or a database without the contract, is no outage.
	for address, words := range map[string]string{
		strings.Replace(postgresURL, "owner@", "nobody@", 1):       "does not exist",
		strings.Replace(postgresURL, "/postgres", "/template1", 1): "oncegate schema apply postgres",
	} {
		other, err := sql.Open("postgres", address)
		must(err)
		defer other.Close()
		send, executions, log := local(t, oncegate.NewPostgresStore(other), oncegate.Settings{FailOpen: true})
		if got := send(newKey()); got.status != 503 || *executions != 0 || !strings.Contains(log.String(), words) {
			t.Errorf("%d executions, %+v, %s", *executions, got, log)
		}
	}
}

// Records whose retention is over are removed.
func TestPurge(t *testing.T) {
	ctx := background(t)
	db := database(t)
	store := oncegate.NewPostgresStore(db)
	claim := oncegate.Claim{Attempt: oncegate.AttemptID{1}, Lease: time.Millisecond, Retention: time.Millisecond, OnAbandoned: oncegate.Park, Operation: "POST /purged"}
	for n := byte(1); n <= 5; n++ {
		id := oncegate.RecordID{0x9a, n}
		reply, err := store.Claim(ctx, id, claim)
		must(err)
		_, err = store.Complete(ctx, id, reply.Token, oncegate.Completion{State: oncegate.Completed, Response: mustEncode(), Retention: time.Millisecond})
		must(err)
	}
	waitFor("the purge", func() bool {
		_, err := store.Purge(ctx, 500)
		must(err)
		var n int
		must(db.QueryRow("SELECT count(*) FROM oncegate.records WHERE operation = 'POST /purged'").Scan(&n))
		if n > 0 {
			// Records are found an hour later if their expiry was passed while they were written.
			_, err = db.Exec("UPDATE oncegate.purge_marks SET place = 0")
			must(err)
		}
		return n == 0
	})
}

func mustEncode() []byte {
	encoded, err := (&oncegate.StoredResponse{Status: 200}).Encode()
	must(err)
	return encoded
}

// A server that answers was reached, whatever it says: FailOpen executes nothing.
func TestFailOpenOnRefusals(t *testing.T) {
	ctx := background(t)
	db := database(t)
	_, err := db.Exec("CREATE ROLE refused LOGIN; GRANT USAGE ON SCHEMA oncegate TO refused; GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA oncegate TO refused")
	must(err)
	pool, err := sql.Open("postgres", strings.Replace(postgresURL, "owner@", "refused@", 1))
	must(err)
	defer pool.Close()
	pool.SetMaxIdleConns(-1)
	send, executions, log := local(t, oncegate.NewPostgresStore(pool), oncegate.Settings{FailOpen: true, Wait: -1})
	key := newKey()
	if got := send(key); got.status != 200 || *executions != 1 {
		t.Fatalf("%+v", got)
	}
	refuses := func(words string) {
		t.Helper()
		for i := 0; i < 5; i++ {
			if got := send(key); got.status != 503 || *executions != 1 {
				t.Errorf("%d executions, %+v", *executions, got)
			}
		}
		if !strings.Contains(log.String(), words) {
			t.Error(log)
		}
	}
	_, err = db.Exec("ALTER ROLE refused CONNECTION LIMIT 0")
	must(err)
	refuses("too many connections")
	_, err = db.Exec("ALTER ROLE refused CONNECTION LIMIT -1; ALTER ROLE refused SET statement_timeout = '50ms'")
	must(err)
	lock, err := db.BeginTx(ctx, nil)
	must(err)
	defer lock.Rollback()
	_, err = lock.Exec("LOCK TABLE oncegate.records IN ACCESS EXCLUSIVE MODE")
	must(err)
	time.Sleep(1100 * time.Millisecond) // the log has each kind of failure once in a second
	refuses("statement timeout")
	must(lock.Rollback())
	waitFor("the replay", func() bool { return send(key).header.Get("Idempotent-Replayed") == "true" })
	must(pool.Close())
	refuses("database is closed")
	if *executions != 1 {
		t.Error(*executions)
	}
}

// A server that ends the connections of a pool was reached: each of them that is tried says nothing of the record, and the next one does.
func TestFailOpenOnConnectionsThatWereEnded(t *testing.T) {
	db := database(t)
	name := newKey()
	pool, err := sql.Open("postgres", postgresURL+"&application_name="+name)
	must(err)
	defer pool.Close()
	pool.SetMaxIdleConns(10)
	send, executions, _ := local(t, oncegate.NewPostgresStore(pool), oncegate.Settings{FailOpen: true, Wait: -1})
	key := newKey()
	if got := send(key); got.status != 200 || *executions != 1 {
		t.Fatalf("%+v", got)
	}
	for i := 0; i < 5; i++ {
		var conns []*sql.Conn
		for len(conns) < 10 {
			conn, err := pool.Conn(background(t))
			must(err)
			must(conn.PingContext(background(t)))
			conns = append(conns, conn)
		}
		for _, conn := range conns {
			must(conn.Close())
		}
		var ended int
		must(db.QueryRow("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1", name).Scan(&ended))
		if got := send(key); got.status != 200 || got.header.Get("Idempotent-Replayed") != "true" || *executions != 1 || ended < 10 {
			t.Errorf("%d executions, %d ended, %+v", *executions, ended, got)
		}
	}
}

// A pool whose connections are all in use says nothing about the store, and FailOpen executes nothing.
func TestFailOpenOnABusyPool(t *testing.T) {
	ctx := background(t)
	db, err := sql.Open("postgres", postgresURL)
	must(err)
	defer db.Close()
	db.SetMaxOpenConns(2)
	log, executions := &lines{}, 0
	engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests", StoreTimeout: 200 * time.Millisecond, Logger: log})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}, FailOpen: true, Wait: -1})
	must(err)
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { executions++ }))
	send := func(key string) int {
		request := httptest.NewRequest("POST", "/local", nil)
		request.Header.Set("Idempotency-Key", key)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		return recorder.Code
	}
	key := newKey()
	if got := send(key); got != 200 {
		t.Fatal(got, log)
	}
	var held []*sql.Conn
	for i := 0; i < 2; i++ {
		conn, err := db.Conn(ctx)
		must(err)
		held = append(held, conn)
	}
	for i := 0; i < 5; i++ {
		if got := send(key); got != 503 || executions != 1 {
			t.Error(got, executions)
		}
	}
	if !strings.Contains(log.String(), "all connections of its pool are in use (2)") {
		t.Error(log)
	}
	for _, conn := range held {
		must(conn.Close())
	}
	if got := send(key); got != 200 || executions != 1 {
		t.Error(got, executions)
	}
}

// A role or a database may have another isolation level by default. The calls of the store then conflict, and are sent again.
func TestStoreUnderSerializable(t *testing.T) {
	db, err := sql.Open("postgres", postgresURL+"&default_transaction_isolation=serializable")
	must(err)
	defer db.Close()
	db.SetMaxOpenConns(12)
	db.SetMaxIdleConns(12)
	send, executions, log := local(t, oncegate.NewPostgresStore(db), oncegate.Settings{Wait: 10 * time.Second})
	var group sync.WaitGroup
	for i := 0; i < 12; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for n := 0; n < 40; n++ {
				key := newKey()
				for try := 0; try < 2; try++ {
					if got := send(key); got.status != 200 {
						t.Errorf("%+v", got)
						return
					}
				}
			}
		}()
	}
	group.Wait()
	if *executions != 12*40 || log.String() != "" {
		t.Errorf("%d executions, %s", *executions, log)
	}
}

// Names are any bytes. PostgreSQL takes only UTF-8 as a text.
func TestNamesThatAreNotUTF8(t *testing.T) {
	ctx := background(t)
	db := database(t)
	log := &lines{}
	engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests", Logger: log})
	must(err)
	for _, name := range []string{"caf\xe9", "zero\x00", strings.Repeat("\xff", 300)} {
		for try := 0; try < 2; try++ {
			got, err := oncegate.Do(ctx, engine, name, "key-of-names", 5, func(context.Context, *oncegate.Attempt) (int, error) { return try, nil })
			if err != nil || got != 0 {
				t.Errorf("%q: %d, %v, %s", name, got, err, log)
			}
			tx, err := db.BeginTx(ctx, nil)
			must(err)
			_, err = oncegate.Transaction(ctx, tx, oncegate.Operation{Service: "go-tests", Name: name, Key: "key-of-names"}, func(context.Context) (int, error) { return 5, nil })
			if err != nil {
				t.Errorf("%q: %v", name, err)
			}
			must(tx.Commit())
		}
	}
}

// After a commit, a server that stands still for longer than the lease gets the response when it goes on.
func TestCommitBeforeAnOutageOfTheStore(t *testing.T) {
	ctx := background(t)
	db := database(t)
	stored, err := sql.Open("postgres", postgresURL)
	must(err)
	defer stored.Close()
	engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(stored), oncegate.EngineOptions{Service: "go-tests", StoreTimeout: 200 * time.Millisecond, Logger: &lines{}})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}, FailOpen: true, Wait: -1, Lease: 300 * time.Millisecond})
	must(err)
	executions := 0
	handler := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if executions++; executions > 1 {
			return
		}
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		must(oncegate.AttemptFrom(r.Context()).CompleteIn(ctx, tx))
		must(tx.Commit())
		pause(postgres)
		fmt.Fprint(w, "receipt")
	}))
	key := newKey()
	send := func() (int, string) {
		request := httptest.NewRequest("POST", "/local", nil)
		request.Header.Set("Idempotency-Key", key)
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		return recorder.Code, recorder.Body.String()
	}
	defer resume(postgres)
	if status, body := send(); status != 200 || body != "receipt" {
		t.Error(status, body)
	}
	for begun := time.Now(); time.Since(begun) < 2*time.Second; time.Sleep(100 * time.Millisecond) {
		if status, body := send(); status == 200 || executions != 1 {
			t.Fatal(status, body, executions)
		}
	}
	resume(postgres)
	waitFor("the response", func() bool {
		status, body := send()
		if status != 200 && status != 409 && status != 503 {
			t.Fatal(status, body)
		}
		return status == 200 && body == "receipt"
	})
	if executions != 1 {
		t.Error(executions, "executions")
	}
}
