package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"oncegate.dev/oncegate"
)

var keys int64

// newKey is a key that no other test has.
func newKey() string {
	return fmt.Sprintf("key-%d-%d", time.Now().UnixNano(), atomic.AddInt64(&keys, 1))
}

// caseServer answers what the service asks, and counts.
type caseServer struct {
	*httptest.Server
	executions int64
	began      chan struct{}
	proceed    chan struct{}
}

func newCase(t *testing.T, holds bool) *caseServer {
	c := &caseServer{began: make(chan struct{}, 100), proceed: make(chan struct{})}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := atomic.AddInt64(&c.executions, 1)
		c.began <- struct{}{}
		if holds {
			select {
			case <-c.proceed:
			case <-r.Context().Done():
			}
		}
		parts := json.NewEncoder(w)
		body := fmt.Sprintf("%x", fmt.Sprintf("execution %d", n))
		parts.Encode(part{Status: 201, Fields: [][2]string{{"content-type", "text/plain"}}})
		parts.Encode(part{Data: &body})
		parts.Encode(part{End: true})
	}))
	t.Cleanup(func() { c.CloseClientConnections(); c.Close() })
	return c
}

func (c *caseServer) address() string { return strings.TrimPrefix(c.URL, "http://") }

// waitBegan waits until the handler runs. It fails after a deadline, because a request that is refused never begins.
func (c *caseServer) waitBegan(t *testing.T) {
	t.Helper()
	select {
	case <-c.began:
	case <-time.After(30 * time.Second):
		t.Fatal("the handler did not begin in 30 s")
	}
}

type answer struct {
	status int
	body   string
	header http.Header
	err    error
}

func post(ctx context.Context, address, key, caseAddress string) answer {
	request, err := http.NewRequestWithContext(ctx, "POST", "http://"+address+"/payments", strings.NewReader(`{"cents":5}`))
	must(err)
	request.Header.Set("Idempotency-Key", key)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Case", caseAddress)
	// All programs of a test are one service, whatever their ports.
	request.Host = "shop.test"
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, string(body), response.Header, err}
}

func settings(more ...interface{}) map[string]interface{} {
	all := map[string]interface{}{"scope": []string{"single-tenant"}, "service": "go-tests"}
	for i := 0; i < len(more); i += 2 {
		all[more[i].(string)] = more[i+1]
	}
	return all
}

func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func TestDuplicatesInTwoProcesses(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		one, two := startService(t), startService(t)
		addresses := []string{one.open(settings("wait", "20s"), url), two.open(settings("wait", "20s"), url)}
		for round := 0; round < 5; round++ {
			c, key := newCase(t, false), newKey()
			var group sync.WaitGroup
			answers := make([]answer, 40)
			for i := range answers {
				group.Add(1)
				go func(i int) {
					defer group.Done()
					answers[i] = post(ctx, addresses[i%2], key, c.address())
				}(i)
			}
			group.Wait()
			replays := 0
			for _, answer := range answers {
				if answer.err != nil || answer.status != 201 || answer.body != "execution 1" {
					t.Fatalf("%+v", answer)
				}
				if answer.header.Get("Idempotent-Replayed") == "true" {
					replays++
				}
			}
			if n := atomic.LoadInt64(&c.executions); n != 1 || replays != 39 {
				t.Fatalf("%d executions, %d replays", n, replays)
			}
		}
	})
}

func TestClientThatHangsUp(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		address := startService(t).open(settings("wait", "20s"), url)
		c, key := newCase(t, true), newKey()
		leaving, leave := context.WithCancel(ctx)
		gone := make(chan answer)
		go func() { gone <- post(leaving, address, key, c.address()) }()
		c.waitBegan(t)
		leave()
		if got := <-gone; got.err == nil {
			t.Fatalf("%+v", got)
		}
		retry := make(chan answer)
		go func() { retry <- post(ctx, address, key, c.address()) }()
		close(c.proceed)
		if got := <-retry; got.status != 201 || got.body != "execution 1" || got.header.Get("Idempotent-Replayed") != "true" {
			t.Fatalf("%+v", got)
		}
	})
}

func TestProcessThatIsKilled(t *testing.T) {
	for _, policy := range []string{"park", "reexecute"} {
		t.Run(policy, func(t *testing.T) {
			eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
				ctx := background(t)
				s := settings("lease", "1s", "on-abandoned", policy, "wait", "0s")
				victim, other := startService(t), startService(t)
				from, to := victim.open(s, url), other.open(s, url)
				c, key := newCase(t, true), newKey()
				go post(ctx, from, key, c.address())
				c.waitBegan(t)
				victim.Process.Kill()
				victim.Wait()
				close(c.proceed)
				if got := post(ctx, to, key, c.address()); got.status != 409 || got.header.Get("Retry-After") != "1" {
					t.Fatalf("%+v", got)
				}
				var got answer
				waitFor("the end of the lease", func() bool { got = post(ctx, to, key, c.address()); return got.status != 409 })
				n := atomic.LoadInt64(&c.executions)
				if policy == "park" && (got.status != 500 || !strings.Contains(got.body, "outcome-unknown") || n != 1) ||
					policy == "reexecute" && (got.status != 201 || got.body != "execution 2" || n != 2) {
					t.Fatalf("%d executions, %+v", n, got)
				}
			})
		})
	}
}

// A process that is stopped for longer than its lease must not overwrite what another one did.
func TestProcessThatIsPaused(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		s := settings("lease", "1s", "on-abandoned", "reexecute", "wait", "0s")
		paused, other := startService(t), startService(t)
		from, to := paused.open(s, url), other.open(s, url)
		c, key := newCase(t, true), newKey()
		first := make(chan answer, 1)
		go func() { first <- post(ctx, from, key, c.address()) }()
		c.waitBegan(t)
		freeze(paused.Process.Pid)
		close(c.proceed)
		var second answer
		waitFor("the end of the lease", func() bool { second = post(ctx, to, key, c.address()); return second.status != 409 })
		if second.body != "execution 2" {
			t.Fatalf("%+v", second)
		}
		paused.Process.Signal(syscall.SIGCONT)
		if got := <-first; got.status != 201 || got.body != "execution 1" || got.header.Get("Idempotency-Status") != "fenced" {
			t.Fatalf("%+v", got)
		}
		if got := post(ctx, from, key, c.address()); got.body != "execution 2" || got.header.Get("Idempotent-Replayed") != "true" {
			t.Fatalf("%+v", got)
		}
	})
}

func TestLeaseIsRenewedWhileTheHandlerRuns(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		s := settings("lease", "1s", "wait", "0s")
		owner, other := startService(t).open(s, url), startService(t).open(s, url)
		c, key := newCase(t, true), newKey()
		first := make(chan answer, 1)
		go func() { first <- post(ctx, owner, key, c.address()) }()
		c.waitBegan(t)
		for until := time.Now().Add(3500 * time.Millisecond); time.Now().Before(until); {
			if got := post(ctx, other, key, c.address()); got.status != 409 {
				t.Fatalf("%+v", got)
			}
		}
		close(c.proceed)
		if got := <-first; got.status != 201 || got.header.Get("Idempotency-Status") != "" {
			t.Fatalf("%+v", got)
		}
	})
}

func TestStoreThatIsAway(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, server *exec.Cmd) {
		ctx := background(t)
		address := startService(t).open(settings("store-timeout", "200ms", "wait", "0s"), url)
		c, key := newCase(t, false), newKey()
		if got := post(ctx, address, newKey(), c.address()); got.status != 201 {
			t.Fatalf("%+v", got)
		}
		executions := atomic.LoadInt64(&c.executions)
		// SIGSTOP of the postmaster does not stop its backends, so those are stopped, too.
		pause(server)
		resumed := false
		defer func() {
			if !resumed {
				resume(server)
			}
		}()
		begun := time.Now()
		for i := 0; i < 20; i++ {
			got := post(ctx, address, key, c.address())
			if got.status != 503 || !strings.Contains(got.body, "store-unavailable") || got.header.Get("Retry-After") != "1" {
				t.Fatalf("%+v", got)
			}
		}
		if n := atomic.LoadInt64(&c.executions); n != executions {
			t.Fatalf("%d executions without a store", n-executions)
		}
		if took := time.Since(begun); took > 8*time.Second {
			t.Fatalf("20 refusals took %s: the breaker does not work", took)
		}
		resume(server)
		resumed = true
		var got answer
		waitFor("the store", func() bool {
			got = post(ctx, address, key, c.address())
			t.Log(got.status, got.body)
			return got.status == 201
		})
		if n := atomic.LoadInt64(&c.executions); n != executions+1 {
			t.Fatalf("%d executions, %+v", n-executions, got)
		}
	})
}

// freeze sends SIGSTOP, and waits until every thread has stopped: the signal alone only asks for it.
func freeze(pid int) {
	must(syscall.Kill(pid, syscall.SIGSTOP))
	waitFor("the process to stop", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, thread := range threads {
			line, err := os.ReadFile(thread)
			// The state follows the name, which is in parentheses and may have spaces.
			if err != nil || !bytes.HasPrefix(line[bytes.LastIndexByte(line, ')')+1:], []byte(" T")) {
				return false
			}
		}
		return len(threads) > 0
	})
}

// pause stops a server and its children.
func pause(server *exec.Cmd) {
	children := childrenOf(server)
	freeze(server.Process.Pid)
	for _, child := range children {
		freeze(child)
	}
}

// resume lets a server and its children go on.
func resume(server *exec.Cmd) {
	for _, pid := range append(childrenOf(server), server.Process.Pid) {
		syscall.Kill(pid, syscall.SIGCONT)
	}
}

func childrenOf(server *exec.Cmd) []int {
	found, _ := exec.Command("pgrep", "-P", fmt.Sprint(server.Process.Pid)).Output()
	var children []int
	for _, text := range strings.Fields(string(found)) {
		child, err := strconv.Atoi(text)
		must(err)
		children = append(children, child)
	}
	return children
}

func TestResultThatTheStoreDoesNotTake(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, server *exec.Cmd) {
		ctx := background(t)
		address := startService(t).open(settings("store-timeout", "1s", "wait", "0s"), url)
		c, key := newCase(t, true), newKey()
		first := make(chan answer, 1)
		go func() { first <- post(ctx, address, key, c.address()) }()
		c.waitBegan(t)
		pause(server)
		close(c.proceed)
		got := <-first
		resume(server)
		if got.status != 201 || got.body != "execution 1" || got.header.Get("Idempotency-Status") != "not-stored" {
			t.Fatalf("%+v", got)
		}
		waitFor("the replay", func() bool { got = post(ctx, address, key, c.address()); return got.status == 201 })
		if got.body != "execution 1" || got.header.Get("Idempotent-Replayed") != "true" {
			t.Fatalf("%+v", got)
		}
	})
}

// silentProxy passes bytes on, and can lose the replies of the server.
type silentProxy struct {
	net.Listener
	loses int32
}

func newProxy(t *testing.T, to string) *silentProxy {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	p := &silentProxy{Listener: listener}
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", to)
			must(err)
			go func() { io.Copy(server, client); server.Close() }()
			go func() {
				buffer := make([]byte, 64<<10)
				for {
					n, err := server.Read(buffer)
					if err != nil || atomic.CompareAndSwapInt32(&p.loses, 1, 0) {
						client.Close()
						server.Close()
						return
					}
					client.Write(buffer[:n])
				}
			}()
		}
	}()
	return p
}

func TestClaimWhoseReplyIsLost(t *testing.T) {
	for _, store := range []string{postgresURL, redisURL} {
		name, rest, _ := strings.Cut(store, "://")
		t.Run(name, func(t *testing.T) {
			ctx := background(t)
			host := rest
			if at := strings.IndexByte(host, '@'); at >= 0 {
				host = host[at+1:]
			}
			host, _, _ = strings.Cut(host, "/")
			proxy := newProxy(t, host)
			address := startService(t).open(settings("wait", "0s", "store-timeout", "1s"), strings.Replace(store, host, proxy.Addr().String(), 1))
			c := newCase(t, false)
			if got := post(ctx, address, newKey(), c.address()); got.status != 201 {
				t.Fatalf("%+v", got)
			}
			for i := 0; i < 10; i++ {
				key := newKey()
				atomic.StoreInt32(&proxy.loses, 1)
				before := atomic.LoadInt64(&c.executions)
				got := post(ctx, address, key, c.address())
				if atomic.LoadInt32(&proxy.loses) != 0 {
					t.Fatal("no reply was lost")
				}
				// The claim is granted on the second sending, or is settled behind the back of the client.
				if got.status != 201 {
					waitFor("the settled claim", func() bool { got = post(ctx, address, key, c.address()); return got.status == 201 })
				}
				if n := atomic.LoadInt64(&c.executions) - before; n != 1 {
					t.Fatalf("%d executions, %+v", n, got)
				}
			}
		})
	}
}

// Connections that go silent without an end, as behind a firewall or a pooler that was replaced, must not use up the pool.
func TestConnectionsThatGoSilent(t *testing.T) {
	address, err := url.Parse(postgresURL)
	must(err)
	for _, parameters := range []string{"", "&binary_parameters=yes"} {
		var silent atomic.Bool
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		must(err)
		defer listener.Close()
		go func() {
			for {
				client, err := listener.Accept()
				if err != nil {
					return
				}
				server, err := net.Dial("tcp", address.Host)
				must(err)
				isNew := silent.Load()
				pass := func(to, from net.Conn) {
					buffer := make([]byte, 64<<10)
					for {
						n, err := from.Read(buffer)
						if err != nil {
							to.Close()
							return
						}
						if isNew || !silent.Load() {
							to.Write(buffer[:n])
						}
					}
				}
				go pass(client, server)
				go pass(server, client)
			}
		}()
		through := *address
		through.Host = listener.Addr().String()
		db, err := sql.Open("postgres", through.String()+parameters)
		must(err)
		defer db.Close()
		db.SetMaxOpenConns(3)
		db.SetMaxIdleConns(3)
		engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests", StoreTimeout: 500 * time.Millisecond, Logger: &lines{}})
		must(err)
		f := oncegate.Function[int, int]{Engine: engine, Name: "silent", Wait: -1}
		call := func() error {
			_, err := f.Do(background(t), newKey(), 1, func(context.Context, *oncegate.Attempt) (int, error) { return 1, nil })
			return err
		}
		var group sync.WaitGroup
		for i := 0; i < 6; i++ {
			group.Add(1)
			go func() { defer group.Done(); call() }()
		}
		group.Wait()
		must(call())
		silent.Store(true)
		if call() == nil {
			t.Fatal("the connections are not silent")
		}
		waitFor("new connections", func() bool { return call() == nil })
		waitFor("the end of the silent ones", func() bool { return db.Stats().InUse == 0 })
	}
}

type charge struct{ Cents int }

func TestTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	if err := oncegate.NewPostgresStore(db).Check(ctx); err != nil {
		t.Fatal(err)
	}
	runs := 0
	pay := func(key string, cents int, commit bool) (charge, error) {
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		defer tx.Rollback()
		operation := oncegate.Operation{Service: "go-tests", CallerKind: "customer", Caller: "42", Name: "POST /payments", Key: key, Input: charge{cents}}
		done, err := oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
			runs++
			_, err := tx.ExecContext(ctx, "INSERT INTO payments VALUES ($1, $2)", key, cents)
			return charge{cents}, err
		})
		if err != nil || !commit {
			return done, err
		}
		return done, tx.Commit()
	}
	rows := func(key string) (n int) {
		must(db.QueryRow("SELECT count(*) FROM payments WHERE key = $1", key).Scan(&n))
		return n
	}
	// Two services without a name would share their keys.
	_, err := oncegate.Transaction(ctx, db, oncegate.Operation{Name: "POST /payments", Key: newKey()}, func(context.Context) (charge, error) {
		t.Error("executed without the name of a service")
		return charge{}, nil
	})
	if err == nil || !strings.Contains(err.Error(), "set Operation.Service") {
		t.Error(err)
	}
	key := newKey()
	if _, err := pay(key, 5, false); err != nil || rows(key) != 0 {
		t.Fatal(err, "rolled back, and not free")
	}
	for i := 0; i < 3; i++ {
		if done, err := pay(key, 5, true); err != nil || done.Cents != 5 {
			t.Fatal(done, err)
		}
	}
	if rows(key) != 1 || runs != 2 {
		t.Fatal(rows(key), runs)
	}
	if _, err := pay(key, 6, true); !errors.Is(err, oncegate.ErrKeyReused) {
		t.Fatal(err)
	}
	// While a transaction is open, a duplicate is refused at once.
	open, err := db.BeginTx(ctx, nil)
	must(err)
	other := newKey()
	operation := oncegate.Operation{Service: "go-tests", CallerKind: "customer", Caller: "42", Name: "POST /payments", Key: other, Input: charge{1}}
	_, err = oncegate.Transaction(ctx, open, operation, func(context.Context) (charge, error) {
		_, duplicate := pay(other, 1, true)
		if !errors.Is(duplicate, oncegate.ErrInProgress) {
			t.Error(duplicate)
		}
		return charge{1}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	must(open.Commit())
}

// embeddedPool is a pool of another package, such as sqlx.DB.
type embeddedPool struct{ *sql.DB }

func TestTransactionNeedsATransaction(t *testing.T) {
	ctx, db := background(t), database(t)
	pay := func(tx oncegate.Querier, key string) error {
		operation := oncegate.Operation{Service: "go-tests", Name: "POST /payments", Key: key, Input: charge{5}}
		_, err := oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) { return charge{5}, nil })
		return err
	}
	conn, err := db.Conn(ctx)
	must(err)
	defer conn.Close()
	for name, tx := range map[string]oncegate.Querier{"a pool": db, "a pool in a struct": embeddedPool{db}, "a connection without BEGIN": conn} {
		if err := pay(tx, newKey()); err == nil || !strings.Contains(err.Error(), "pass the *sql.Tx") {
			t.Errorf("%s: %v", name, err)
		}
	}
	must2 := func(_ sql.Result, err error) { must(err) }
	key := newKey()
	must2(conn.ExecContext(ctx, "BEGIN"))
	if err := pay(conn, key); err != nil {
		t.Error(err)
	}
	must2(conn.ExecContext(ctx, "COMMIT"))
	must2(conn.ExecContext(ctx, "BEGIN"))
	if err := pay(conn, key); err != nil {
		t.Error(err)
	}
	must2(conn.ExecContext(ctx, "ROLLBACK"))
	// After a transaction, the connection has none again.
	if err := pay(conn, newKey()); err == nil {
		t.Error("a connection after ROLLBACK")
	}
	header := http.Header{"Oncegate-Record": {strings.Repeat("ab", 32)}, "Oncegate-Token": {"1"}}
	attempt, err := oncegate.FromSidecar(header)
	must(err)
	if err := attempt.CompleteIn(ctx, db, nil); err == nil || !strings.Contains(err.Error(), "pass the *sql.Tx") {
		t.Error(err)
	}
}

const sealKey, otherSealKey = "ogseal1_d76b7626affc02af_", "ogseal1_b3ee885d8929c226_"

func sealKeys(texts ...string) *oncegate.SealKeys {
	keys, err := oncegate.ParseSealKeys(strings.Join(texts, "\n"))
	must(err)
	return keys
}

func TestSealedTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	first, second := sealKey+strings.Repeat("01", 32), otherSealKey+strings.Repeat("02", 32)
	runs := 0
	pay := func(key string, sealing oncegate.Sealing, fails bool) (charge, error) {
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		defer tx.Rollback()
		operation := oncegate.Operation{Service: "go-tests", CallerKind: "customer", Caller: "42", Name: "POST /sealed", Key: key, Sealing: sealing}
		done, err := oncegate.Transaction(ctx, tx, operation, func(ctx context.Context) (charge, error) {
			runs++
			if _, err := tx.ExecContext(ctx, "INSERT INTO payments VALUES ($1, 5)", key); err != nil {
				return charge{}, err
			}
			if fails {
				return charge{}, errors.New("after the insert")
			}
			return charge{5}, nil
		})
		if err != nil {
			return done, err
		}
		return done, tx.Commit()
	}
	rows := func(key string) (n int) {
		must(db.QueryRow("SELECT count(*) FROM payments WHERE key = $1", key).Scan(&n))
		return n
	}
	stored := func() (id, response []byte) {
		must(db.QueryRow("SELECT id, response FROM oncegate.records WHERE operation = 'POST /sealed' ORDER BY created_at DESC, changed_at DESC LIMIT 1").Scan(&id, &response))
		return id, response
	}
	refused := func(err error, kind oncegate.StoreErrorKind, text string) {
		t.Helper()
		var own *oncegate.StoreError
		if !errors.As(err, &own) || own.Kind != kind || !strings.Contains(err.Error(), text) {
			t.Error(err)
		}
	}
	key, sealing := newKey(), oncegate.Sealing{Keys: sealKeys(first)}
	if _, err := pay(key, sealing, true); err == nil || rows(key) != 0 {
		t.Fatal(err, rows(key))
	}
	for i := 0; i < 2; i++ {
		if done, err := pay(key, sealing, false); err != nil || done.Cents != 5 {
			t.Fatal(done, err)
		}
	}
	_, form := stored()
	if strings.Contains(string(form), "Cents") || !strings.Contains(string(form), "ogseal") {
		t.Errorf("it is stored in clear: %q", form)
	}
	if done, err := pay(key, oncegate.Sealing{Keys: sealKeys(second, first), Required: true}, false); err != nil || done.Cents != 5 {
		t.Error(done, err)
	}
	_, err := pay(key, oncegate.Sealing{}, false)
	refused(err, oncegate.ResponseSealed, "no seal keys")
	_, err = pay(key, oncegate.Sealing{Keys: sealKeys(second)}, false)
	refused(err, oncegate.ResponseSealed, "d76b7626affc02af")
	if runs != 2 || rows(key) != 1 {
		t.Error(runs, rows(key))
	}
	// What is in clear is replayed, unless it must be sealed; keys that only open seal nothing.
	clear := newKey()
	if _, err := pay(clear, oncegate.Sealing{Keys: sealKeys(first), OpensOnly: true}, false); err != nil {
		t.Fatal(err)
	}
	id, response := stored()
	if !strings.Contains(string(response), "Cents") {
		t.Errorf("%q", response)
	}
	if done, err := pay(clear, sealing, false); err != nil || done.Cents != 5 {
		t.Error(done, err)
	}
	_, err = pay(clear, oncegate.Sealing{Keys: sealKeys(first), Required: true}, false)
	refused(err, oncegate.ResponseSealed, "not sealed")
	// Moved to another record, it is refused.
	_, err = db.Exec("UPDATE oncegate.records SET response = $1 WHERE id = $2", form, id)
	must(err)
	_, err = pay(clear, sealing, false)
	refused(err, oncegate.RecordCorrupt, "cannot be read")
	if runs != 3 || rows(clear) != 1 {
		t.Error(runs, rows(clear))
	}
}

// Behind a sidecar that seals, the service seals the response of the sidecar's attempt.
func TestSealedSidecarAttempt(t *testing.T) {
	ctx := background(t)
	db := database(t)
	keys := sealKeys(sealKey + strings.Repeat("01", 32))
	store := oncegate.NewSealedStore(oncegate.NewPostgresStore(db), keys)
	store.Required = true
	id := oncegate.RecordID{0x5e, 0xa1}
	claim := oncegate.Claim{Attempt: oncegate.AttemptID{1}, Lease: time.Minute, Retention: time.Hour, OnAbandoned: oncegate.Park}
	reply, err := store.Claim(ctx, id, claim)
	must(err)
	header := http.Header{"Oncegate-Record": {id.String()}, "Oncegate-Token": {fmt.Sprint(reply.Token)}, "Oncegate-Attempt": {"1"}}
	attempt, err := oncegate.FromSidecar(header)
	must(err)
	attempt.Sealing = oncegate.Sealing{Keys: keys}
	tx, err := db.BeginTx(ctx, nil)
	must(err)
	must(attempt.CompleteIn(ctx, tx, &oncegate.StoredResponse{Status: 201, Body: []byte("the balance is 17")}))
	must(tx.Commit())
	var response []byte
	must(db.QueryRow("SELECT response FROM oncegate.records WHERE id = $1", id[:]).Scan(&response))
	if strings.Contains(string(response), "balance") {
		t.Errorf("it is stored in clear: %q", response)
	}
	claim.Attempt = oncegate.AttemptID{2}
	if reply, err := store.Claim(ctx, id, claim); err != nil || reply.Outcome != oncegate.Replay || !strings.Contains(string(reply.Response), "the balance is 17") {
		t.Error(reply, err)
	}
}

// The handler completes its record in its own transaction; the middleware adds the response.
func TestMiddlewareAndTransaction(t *testing.T) {
	ctx := background(t)
	db := database(t)
	engine, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests"})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}, Lease: 500 * time.Millisecond, OnAbandoned: oncegate.Reexecute, Wait: -1})
	must(err)
	var stale error
	hold := make(chan struct{})
	began := make(chan struct{}, 10)
	server := httptest.NewServer(protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		attempt := oncegate.AttemptFrom(r.Context())
		tx, err := db.BeginTx(r.Context(), nil)
		must(err)
		defer tx.Rollback()
		if _, err := tx.Exec("INSERT INTO payments VALUES ($1, 5)", fmt.Sprint(attempt.Record(), "-", attempt.Number())); err != nil {
			http.Error(w, "no", 500)
			return
		}
		began <- struct{}{}
		if r.URL.Path == "/stale" && attempt.Number() == 1 {
			<-hold
		}
		if err := attempt.CompleteIn(r.Context(), tx); err != nil {
			stale = err
			http.Error(w, "rolled back", 503)
			return
		}
		must(tx.Commit())
		io.WriteString(w, "paid")
	})))
	defer server.Close()
	send := func(path, key string) answer {
		request, err := http.NewRequestWithContext(ctx, "POST", server.URL+path, nil)
		must(err)
		request.Header.Set("Idempotency-Key", key)
		response, err := http.DefaultClient.Do(request)
		must(err)
		defer response.Body.Close()
		body, _ := io.ReadAll(response.Body)
		return answer{response.StatusCode, string(body), response.Header, nil}
	}
	key := newKey()
	for i := 0; i < 2; i++ {
		if got := send("/", key); got.status != 200 || got.body != "paid" || got.header.Get("Idempotency-Status") != "" {
			t.Fatalf("%d: %+v", i, got)
		}
	}
	<-began
	// An attempt that was overtaken rolls back. An operator frees the record while it runs, so that the next claim takes it over.
	key = newKey()
	first := make(chan answer, 1)
	go func() { first <- send("/stale", key) }()
	<-began
	_, err = db.Exec(`SELECT oncegate.resolve(r.id, 'release', NULL, 60000, true, false, 'test', 'test') FROM
		oncegate.list('in-progress', NULL, NULL, 'POST /stale', NULL, NULL, 10) AS r`)
	must(err)
	second, err := oncegate.NewEngine(oncegate.NewPostgresStore(db), oncegate.EngineOptions{Service: "go-tests"})
	must(err)
	_ = second
	other, err := oncegate.Middleware(second, oncegate.Settings{Scope: []string{"single-tenant"}, Wait: -1})
	must(err)
	request := httptest.NewRequest("POST", "/stale", nil)
	request.Host = strings.TrimPrefix(server.URL, "http://")
	request.Header.Set("Idempotency-Key", key)
	recorder := httptest.NewRecorder()
	other(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "second") })).ServeHTTP(recorder, request)
	if recorder.Body.String() != "second" {
		t.Fatal(recorder.Code, recorder.Body)
	}
	close(hold)
	if got := <-first; got.status != 503 || !errors.Is(stale, oncegate.ErrStale) {
		t.Fatalf("%+v %v", got, stale)
	}
	var n int
	must(db.QueryRow("SELECT count(*) FROM payments WHERE length(key) = 66 AND key LIKE $1", "%-1").Scan(&n))
	if n != 1 {
		t.Fatalf("%d rows of first attempts; that of the overtaken one must be rolled back", n)
	}
}

func TestFunctionsOnServers(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, store oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		key := newKey()
		var runs int64
		var group sync.WaitGroup
		for i := 0; i < 20; i++ {
			group.Add(1)
			engine, err := oncegate.NewEngine(store, oncegate.EngineOptions{Service: "go-tests"})
			must(err)
			go func() {
				defer group.Done()
				f := oncegate.Function[charge, string]{Engine: engine, Name: "charge", Wait: 20 * time.Second}
				got, err := f.Do(ctx, key, charge{5}, func(context.Context, *oncegate.Attempt) (string, error) {
					return fmt.Sprint("run ", atomic.AddInt64(&runs, 1)), nil
				})
				if err != nil || got != "run 1" {
					t.Error(got, err)
				}
			}()
		}
		group.Wait()
		if runs != 1 {
			t.Error(runs)
		}
	})
}
