package main

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

const markHex = "3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac"

func markID() (id oncegate.RecordID) {
	hex.Decode(id[:], []byte(markHex))
	return id
}

// setMark marks a store, as a process with an id secret does.
func setMark(store oncegate.Store) uint64 {
	claim := oncegate.Claim{Lease: time.Hour, Retention: 24 * time.Hour, OnAbandoned: oncegate.Park, Operation: "id secret 0123456789abcdef of this store (not a request)"}
	claim.Fingerprint[0] = 1
	reply, err := store.Claim(context.Background(), markID(), claim)
	must(err)
	return reply.Token
}

// ownDatabase is a new database with the contract: a mark refuses everything else in it.
func ownDatabase(t *testing.T) (*sql.DB, string) {
	name := fmt.Sprintf("marked_%d", time.Now().UnixNano())
	_, err := database(t).Exec("CREATE DATABASE " + name)
	must(err)
	address, err := url.Parse(postgresURL)
	must(err)
	address.Path = name
	db, err := sql.Open("postgres", address.String())
	must(err)
	t.Cleanup(func() { db.Close() })
	tx, err := db.Begin()
	must(err)
	_, err = tx.Exec(schema())
	must(err)
	must(tx.Commit())
	address.RawQuery = ""
	return db, address.String()
}

// ownStores are new stores, each with its address, and a function that removes every record.
func ownStores(t *testing.T, test func(t *testing.T, store oncegate.Store, address string, empty func())) {
	t.Run("postgres", func(t *testing.T) {
		db, address := ownDatabase(t)
		test(t, oncegate.NewPostgresStore(db), address, func() {
			_, err := db.Exec("DELETE FROM oncegate.records")
			must(err)
		})
	})
	t.Run("redis", func(t *testing.T) {
		port := strconv.Itoa(freePort())
		server := exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory)
		server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		must(server.Start())
		t.Cleanup(func() { stop(server, syscall.SIGTERM) })
		client := resp.New("127.0.0.1:" + port)
		waitFor("Redis", func() bool {
			_, err := client.Do(context.Background(), "PING").Result()
			return err == nil
		})
		store, err := oncegate.NewRedisStore[*resp.Reply](client)
		must(err)
		test(t, store, "redis://127.0.0.1:"+port, func() {
			_, err := client.Do(context.Background(), "FLUSHALL").Result()
			must(err)
		})
	})
}

// openShop is a service that executes without protection if its store is away.
type openShop struct {
	*httptest.Server
	engine     *oncegate.Engine
	executions int64
}

func newOpenShop(t *testing.T, store oncegate.Store, failOpen bool) *openShop {
	return newShop(t, store, oncegate.EngineOptions{}, failOpen)
}

func newShop(t *testing.T, store oncegate.Store, options oncegate.EngineOptions, failOpen bool) *openShop {
	s := &openShop{}
	var err error
	options.Service, options.StoreTimeout = "pay", 20*time.Second
	s.engine, err = oncegate.NewEngine(store, options)
	must(err)
	protect, err := oncegate.Middleware(s.engine, oncegate.Settings{Scope: []string{"single-tenant"}, FailOpen: failOpen})
	must(err)
	s.Server = httptest.NewServer(protect(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(201)
		fmt.Fprintf(w, "execution %d", atomic.AddInt64(&s.executions, 1))
	})))
	t.Cleanup(s.Close)
	return s
}

func (s *openShop) post(t *testing.T, key string) answer {
	return post(background(t), strings.TrimPrefix(s.URL, "http://"), key, "")
}

func (s *openShop) mustRefuse(t *testing.T, key string) {
	t.Helper()
	before := atomic.LoadInt64(&s.executions)
	got := s.post(t, key)
	if got.status != 503 || !strings.Contains(got.body, "store-unavailable") || atomic.LoadInt64(&s.executions) != before {
		t.Fatalf("%d executions, %+v", atomic.LoadInt64(&s.executions)-before, got)
	}
}

func TestStoreOfAnIDSecretExecutesNothing(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, _ string, empty func()) {
		marked := newOpenShop(t, store, true)
		key := newKey()
		if got := marked.post(t, key); got.status != 201 {
			t.Fatalf("%+v", got)
		}
		token := setMark(store)
		other := newOpenShop(t, store, true)
		other.mustRefuse(t, newKey())
		other.mustRefuse(t, key)
		charge := oncegate.Function[int, int]{Engine: other.engine, Name: "charge"}
		_, err := charge.Do(background(t), newKey(), 1, func(context.Context, *oncegate.Attempt) (int, error) {
			t.Error("the function was executed")
			return 1, nil
		})
		if !errors.Is(err, oncegate.ErrIDSecret) {
			t.Fatal(err)
		}
		// A process that found no mark before looks again while it is used.
		waitFor("the refusal", func() bool { return marked.post(t, newKey()).status == 503 })
		marked.mustRefuse(t, newKey())
		// A store that loses its mark still has keyed records.
		if _, err := store.Release(context.Background(), markID(), token, time.Hour); err != nil {
			t.Fatal(err)
		}
		for lost := time.Now(); time.Since(lost) < 5*time.Second; time.Sleep(100 * time.Millisecond) {
			marked.mustRefuse(t, newKey())
			other.mustRefuse(t, newKey())
		}
		// A released mark binds no process that is started now.
		if got := newOpenShop(t, store, false).post(t, newKey()); got.status != 201 {
			t.Fatalf("%+v", got)
		}
		empty()
		other.mustRefuse(t, newKey())
	})
}

// watchedStore changes how a store answers.
type watchedStore struct {
	oncegate.Store
	claim  func()
	lookup func() error
	looks  int64
}

func (s *watchedStore) Claim(ctx context.Context, id oncegate.RecordID, claim oncegate.Claim) (oncegate.ClaimReply, error) {
	if s.claim != nil {
		s.claim()
	}
	return s.Store.Claim(ctx, id, claim)
}

func (s *watchedStore) Lookup(ctx context.Context, id oncegate.RecordID) (*oncegate.RecordInfo, error) {
	if id == markID() {
		atomic.AddInt64(&s.looks, 1)
		if s.lookup != nil {
			if err := s.lookup(); err != nil {
				return nil, err
			}
		}
	}
	return s.Store.Lookup(ctx, id)
}

// The claim is on its way for longer than a look counts, and another process begins to use the store with an id secret meanwhile.
func TestSlowClaimLooksAgain(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, _ string, empty func()) {
		slow := &watchedStore{Store: store, claim: func() {
			setMark(store)
			time.Sleep(4500 * time.Millisecond)
		}}
		shop, key := newOpenShop(t, slow, true), newKey()
		shop.mustRefuse(t, key)
		if looks := atomic.LoadInt64(&slow.looks); looks != 2 {
			t.Fatal(looks, "looks")
		}
		// The key is free again.
		empty()
		if got := newOpenShop(t, store, false).post(t, key); got.status != 201 {
			t.Fatalf("%+v", got)
		}
	})
}

func TestMarkThatCannotBeRead(t *testing.T) {
	ownStores(t, func(t *testing.T, store oncegate.Store, _ string, _ func()) {
		var failure atomic.Value
		away := &watchedStore{Store: store, lookup: func() error {
			if err, ok := failure.Load().(*oncegate.StoreError); ok && err.Err != nil {
				return err
			}
			return nil
		}}
		// A process that has found no mark before goes on, and keeps looking.
		shop := newOpenShop(t, away, false)
		if got := shop.post(t, newKey()); got.status != 201 {
			t.Fatalf("%+v", got)
		}
		failure.Store(&oncegate.StoreError{Kind: oncegate.StoreUnavailable, Doing: "lookup", Err: errors.New("the node is down")})
		before := atomic.LoadInt64(&away.looks)
		waitFor("two looks", func() bool {
			if got := shop.post(t, newKey()); got.status != 201 {
				t.Fatalf("%+v", got)
			}
			return atomic.LoadInt64(&away.looks) >= before+2
		})
		// One that has not executes nothing.
		newOpenShop(t, away, false).mustRefuse(t, newKey())
		// A mark that is damaged is no outage.
		failure.Store(&oncegate.StoreError{Kind: oncegate.RecordCorrupt, Doing: "lookup", Err: errors.New("damaged")})
		newOpenShop(t, away, true).mustRefuse(t, newKey())
	})
}

// slowQuerier is a transaction whose claim takes long.
type slowQuerier struct {
	oncegate.Querier
	claim func()
}

func (q *slowQuerier) QueryRowContext(ctx context.Context, query string, args ...interface{}) *sql.Row {
	if strings.Contains(query, "oncegate.claim(") {
		q.claim()
	}
	return q.Querier.QueryRowContext(ctx, query, args...)
}

func TestTransactionOnAMarkedDatabase(t *testing.T) {
	ctx := background(t)
	db, _ := ownDatabase(t)
	store := oncegate.NewPostgresStore(db)
	runs := 0
	pay := func(claim func()) error {
		tx, err := db.BeginTx(ctx, nil)
		must(err)
		defer tx.Rollback()
		operation := oncegate.Operation{Service: "pay", Name: "POST /payments", Key: newKey()}
		_, err = oncegate.Transaction(ctx, &slowQuerier{tx, claim}, operation, func(context.Context) (int, error) {
			runs++
			return runs, nil
		})
		if err != nil {
			return err
		}
		return tx.Commit()
	}
	if err := pay(func() {}); err != nil || runs != 1 {
		t.Fatal(err, runs)
	}
	slow := func() { setMark(store); time.Sleep(4500 * time.Millisecond) }
	if err := pay(slow); !errors.Is(err, oncegate.ErrIDSecret) || runs != 1 {
		t.Fatal(err, runs, "executions: the claim was slower than a look counts")
	}
	_, err := db.Exec("DELETE FROM oncegate.records")
	must(err)
	if err := pay(func() {}); !errors.Is(err, oncegate.ErrIDSecret) || runs != 1 {
		t.Fatal(err, runs, "executions: the process has seen the mark")
	}
}
