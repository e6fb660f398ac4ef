package main

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/http/httptest"
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

// The secrets of crates/core/vectors/keyed_ids.json.
const (
	idSecretText = "ogids1_67994b41fd604350_000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	otherSecret  = "ogids1_d675b28a2539c80a_ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
)

func idSecret(text string) *oncegate.IDSecret {
	secret, err := oncegate.ParseIDSecret(text)
	must(err)
	return secret
}

// keepMark writes the mark of the first secret, as a sidecar does.
func keepMark(store oncegate.Store, lease, retention time.Duration) uint64 {
	claim := oncegate.Claim{Lease: lease, Retention: retention, OnAbandoned: oncegate.Park, Operation: "id secret 67994b41fd604350 of this store (not a request)"}
	hex.Decode(claim.Attempt[:], []byte("ccf28681dac7eeb77d17fdcda2e140e2"))
	hex.Decode(claim.Fingerprint[:], []byte("01c77f54b5d90dbee28e2fe69861e58304fb7e5bdaf8e3bd6bf94d31504f2b2454"))
	reply, err := store.Claim(context.Background(), markID(), claim)
	must(err)
	if reply.Outcome != oncegate.Execute {
		panic(fmt.Sprintf("the mark: %+v", reply))
	}
	return reply.Token
}

// program is the path of the program oncegate: that in ONCEGATE_BIN, or the one that was built in this repository.
func program(t *testing.T) string {
	if own := os.Getenv("ONCEGATE_BIN"); own != "" {
		return own
	}
	built, err := filepath.Abs("../../../target/debug/oncegate")
	must(err)
	if _, err := os.Stat(built); err != nil {
		t.Skip("there is no program oncegate: build it, or name it in ONCEGATE_BIN")
	}
	return built
}

// sidecar is the program oncegate in front of a service that counts.
type sidecar struct {
	*exec.Cmd
	address, admin string
	executions     int64
}

func startSidecar(t *testing.T, store, secret string) *sidecar {
	s := &sidecar{}
	s.startBefore(t, store, secret, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(201)
		fmt.Fprintf(w, "the sidecar's execution %d", atomic.AddInt64(&s.executions, 1))
	}))
	return s
}

func (s *sidecar) startBefore(t *testing.T, store, secret string, handler http.Handler) {
	s.address, s.admin = "127.0.0.1:"+strconv.Itoa(freePort()), "127.0.0.1:"+strconv.Itoa(freePort())
	service := httptest.NewServer(handler)
	t.Cleanup(service.Close)
	s.Cmd = exec.Command(program(t), "proxy", "--listen", s.address, "--admin", s.admin, "--to", service.URL, "--store", store,
		"--service", "pay", "--scope", "single-tenant")
	if s.Env = []string{}; secret != "" {
		s.Env = []string{"ONCEGATE_ID_SECRET=" + secret}
	}
	s.Stderr = &logged{}
	s.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(s.Start())
	t.Cleanup(func() {
		if s.end(); t.Failed() {
			t.Log(s.Stderr)
		}
	})
}

// end stops it. A second call does nothing.
func (s *sidecar) end() {
	if s.ProcessState == nil {
		stop(s.Cmd, syscall.SIGTERM)
	}
}

// logged collects what several goroutines write.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *logged) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

func TestOneStoreOfASidecarAndTheLibraryWithAnIDSecret(t *testing.T) {
	program(t)
	ownStores(t, func(t *testing.T, store oncegate.Store, address string, empty func()) {
		ctx := background(t)
		var log1 logged
		own := newShop(t, store, oncegate.EngineOptions{IDSecret: idSecret(idSecretText), Logger: log.New(&log1, "", 0)}, true)
		// Nothing has marked the store.
		own.mustRefuse(t, newKey())
		if !strings.Contains(log1.String(), "does not have the mark of the id secret 67994b41fd604350") || !strings.Contains(log1.String(), "start a sidecar") {
			t.Error(log1.String())
		}
		if err := own.engine.VerifyIDs(); !errors.Is(err, oncegate.ErrIDSecret) {
			t.Error(err)
		}
		// A sidecar with the secret marks it, after a trial of six seconds. The process need not be started again.
		sidecar := startSidecar(t, address, idSecretText)
		var got answer
		first := newKey()
		waitFor("the sidecar", func() bool { got = post(ctx, sidecar.address, first, ""); return got.status == 201 })
		replayed := own.post(t, first)
		if replayed.status != 201 || replayed.body != got.body || replayed.header.Get("Idempotent-Replayed") != "true" || own.executions != 0 {
			t.Fatalf("%+v, %+v, %d executions", got, replayed, own.executions)
		}
		second := newKey()
		got = own.post(t, second)
		replayed = post(ctx, sidecar.address, second, "")
		if got.status != 201 || replayed.body != got.body || replayed.header.Get("Idempotent-Replayed") != "true" || own.executions != 1 || sidecar.executions != 1 {
			t.Fatalf("%+v, %+v, %d, %d executions", got, replayed, own.executions, sidecar.executions)
		}
		// They compare requests alike, and hosts.
		for _, host := range []string{"", "other.test"} {
			for _, to := range []string{sidecar.address, strings.TrimPrefix(own.URL, "http://")} {
				for _, key := range []string{first, second} {
					request, err := http.NewRequestWithContext(ctx, "POST", "http://"+to+"/payments", strings.NewReader(`{"cents":6}`))
					must(err)
					want := "key-reused"
					if request.Host = "shop.test"; host != "" {
						request, err = http.NewRequestWithContext(ctx, "POST", "http://"+to+"/payments", strings.NewReader(`{"cents":5}`))
						must(err)
						request.Host, want = host, "host-differs"
					}
					request.Header.Set("Content-Type", "application/json")
					request.Header.Set("Idempotency-Key", key)
					response, err := http.DefaultClient.Do(request)
					must(err)
					var body bytes.Buffer
					body.ReadFrom(response.Body)
					response.Body.Close()
					if response.StatusCode != 422 || !strings.Contains(body.String(), want) {
						t.Errorf("%s %s: %d %s", to, host, response.StatusCode, body.String())
					}
				}
			}
		}
		charge, key := oncegate.Function[int, int]{Engine: own.engine, Name: "charge"}, newKey()
		runs := 0
		for i := 0; i < 2; i++ {
			value, err := charge.Do(ctx, key, 5, func(context.Context, *oncegate.Attempt) (int, error) { runs++; return runs, nil })
			if err != nil || value != 1 {
				t.Fatal(value, err)
			}
		}
		// Another secret, and none.
		var log2 logged
		wrong := newShop(t, store, oncegate.EngineOptions{IDSecret: idSecret(otherSecret), Logger: log.New(&log2, "", 0)}, true)
		wrong.mustRefuse(t, first)
		wrong.mustRefuse(t, newKey())
		if !strings.Contains(log2.String(), "belongs to the id secret 67994b41fd604350, and this process has d675b28a2539c80a") {
			t.Error(log2.String())
		}
		none := newShop(t, store, oncegate.EngineOptions{Logger: log.New(&log2, "", 0)}, true)
		none.mustRefuse(t, first)
		none.mustRefuse(t, newKey())
		if !strings.Contains(log2.String(), "belongs to the id secret 67994b41fd604350, and this process has none") {
			t.Error(log2.String())
		}
		// A store that was emptied has lost its mark. The library does not put it back, and goes on until it looks again.
		sidecar.end()
		own.post(t, first)
		empty()
		kept := newKey()
		hasRecords := own.post(t, kept).status == 201
		waitFor("the refusal", func() bool { return own.post(t, newKey()).status == 503 })
		own.mustRefuse(t, newKey())
		wrong.mustRefuse(t, newKey())
		none.mustRefuse(t, newKey())
		again := startSidecar(t, address, idSecretText)
		third := newKey()
		if hasRecords {
			// The sidecar asks for the command that the library names.
			restore := func() ([]byte, error) {
				return exec.Command(program(t), "id-secret", "restore", "--admin", "http://"+again.admin, "--key", kept, "--reason", "a test", "--yes").CombinedOutput()
			}
			var output []byte
			waitFor("the restored mark", func() bool {
				var err error
				output, err = restore()
				return err == nil
			})
			t.Logf("%s", output)
		}
		waitFor("the sidecar", func() bool { got = post(ctx, again.address, third, ""); return got.status == 201 })
		if replayed := own.post(t, third); replayed.body != got.body {
			t.Errorf("%+v, %+v", got, replayed)
		}
		for _, text := range []string{log1.String(), log2.String()} {
			if strings.Contains(text, "000102") || strings.Contains(text, "ffffff") || strings.Contains(text, first) {
				t.Error("the log has a secret or a key:", text)
			}
		}
	})
}

func TestMarkOfAnIDSecret(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, _ string, empty func()) {
		var away int32
		watched := &watchedStore{Store: store, lookup: func() error {
			if atomic.LoadInt32(&away) == 1 {
				return &oncegate.StoreError{Kind: oncegate.StoreUnavailable, Doing: "lookup", Err: errors.New("the node is down")}
			}
			return nil
		}}
		options := oncegate.EngineOptions{IDSecret: idSecret(idSecretText)}
		shop := newShop(t, watched, options, true)
		shop.mustRefuse(t, newKey())
		// On trial, it may lapse.
		keepMark(store, 30*time.Second, 90*time.Second)
		shop.mustRefuse(t, newKey())
		empty()
		keepMark(store, time.Hour, 400*24*time.Hour)
		key := newKey()
		if got := shop.post(t, key); got.status != 201 {
			t.Fatalf("%+v", got)
		}
		// While the mark cannot be read, a process that has passed goes on. One that has not executes nothing.
		atomic.StoreInt32(&away, 1)
		before := atomic.LoadInt64(&watched.looks)
		waitFor("two looks", func() bool {
			if got := shop.post(t, newKey()); got.status != 201 {
				t.Fatalf("%+v", got)
			}
			return atomic.LoadInt64(&watched.looks) >= before+2
		})
		newShop(t, watched, options, false).mustRefuse(t, newKey())
		atomic.StoreInt32(&away, 0)
		// The mark of another secret refuses, also when it is gone.
		empty()
		setMark(store)
		waitFor("the refusal", func() bool { return shop.post(t, newKey()).status == 503 })
		shop.mustRefuse(t, key)
		empty()
		shop.mustRefuse(t, newKey())
		if err := shop.engine.VerifyIDs(); !errors.Is(err, oncegate.ErrIDSecret) || !strings.Contains(err.Error(), "belongs to the id secret 0123456789abcdef") {
			t.Error(err)
		}
		// The own mark does not.
		keepMark(store, time.Hour, 400*24*time.Hour)
		if got := shop.post(t, newKey()); got.status != 201 {
			t.Fatalf("%+v", got)
		}
	})
}

func TestTransactionWithAnIDSecret(t *testing.T) {
	ctx := background(t)
	db, _ := ownDatabase(t)
	store, runs := oncegate.NewPostgresStore(db), 0
	pay := func(key string, secret *oncegate.IDSecret, sealing oncegate.Sealing) error {
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		defer tx.Rollback()
		operation := oncegate.Operation{Service: "pay", CallerKind: "customer", Caller: "42", Name: "POST /payments", Key: key, Input: 5, IDSecret: secret, Sealing: sealing}
		_, err = oncegate.Transaction(ctx, tx, operation, func(context.Context) (int, error) { runs++; return runs, nil })
		if err != nil {
			return err
		}
		return tx.Commit()
	}
	own, other, clear := idSecret(idSecretText), idSecret(otherSecret), oncegate.Sealing{}
	refused := func(err error, text string) {
		t.Helper()
		if !errors.Is(err, oncegate.ErrIDSecret) || !strings.Contains(err.Error(), text) {
			t.Error(err)
		}
	}
	key := newKey()
	refused(pay(key, own, clear), "does not have the mark")
	keepMark(store, 30*time.Second, 90*time.Second)
	refused(pay(key, own, clear), "is new to the id secret")
	_, err := db.Exec("DELETE FROM oncegate.records")
	must(err)
	keepMark(store, time.Hour, 400*24*time.Hour)
	refused(pay(key, other, clear), "belongs to the id secret 67994b41fd604350, and this process has d675b28a2539c80a")
	refused(pay(key, nil, clear), "and this process has none")
	if runs != 0 {
		t.Fatal(runs, "executions")
	}
	for i := 0; i < 2; i++ {
		if err := pay(key, own, clear); err != nil || runs != 1 {
			t.Fatal(err, runs)
		}
	}
	if err := pay(newKey(), own, oncegate.Sealing{Keys: sealKeys(sealKey + strings.Repeat("01", 32))}); err != nil || runs != 2 {
		t.Fatal(err, runs)
	}
	// Who has found the mark of another secret stays refused.
	_, err = db.Exec("DELETE FROM oncegate.records")
	must(err)
	refused(pay(key, other, clear), "belongs to the id secret 67994b41fd604350")
	refused(pay(key, nil, clear), "belongs to the id secret 67994b41fd604350")
	refused(pay(key, own, clear), "does not have the mark")
	if runs != 2 {
		t.Fatal(runs, "executions")
	}
}

// A sidecar in front of the middleware keeps no refusal of it as the response.
func TestSidecarBeforeTheLibrary(t *testing.T) {
	ctx := background(t)
	store, log := oncegate.NewMemoryStore(), &lines{}
	store.MaxRecords = 0
	engine, err := oncegate.NewEngine(store, oncegate.EngineOptions{Service: "behind", Logger: log})
	must(err)
	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}})
	must(err)
	executions := 0
	before := &sidecar{}
	before.startBefore(t, postgresURL, "", protect(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		executions++
		w.WriteHeader(201)
		fmt.Fprint(w, "execution ", executions)
	})))
	key := newKey()
	var got answer
	waitFor("the sidecar", func() bool { got = post(ctx, before.address, key, ""); return got.err == nil })
	for i := 0; i < 2; i++ {
		got = post(ctx, before.address, key, "")
		if got.status != 503 || got.header.Get("Idempotent-Replayed") != "" || executions != 0 {
			t.Errorf("%+v", got)
		}
	}
	// The store of the library takes keys again.
	store.MaxRecords = 100
	for i := 0; i < 2; i++ {
		if got = post(ctx, before.address, key, ""); got.status != 201 || got.body != "execution 1" {
			t.Errorf("%+v", got)
		}
	}
	if n := strings.Count(log.String(), "came from a sidecar"); n != 1 {
		t.Error(log)
	}
}
