package oncegate

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// wordsReply is the reply of a server that answers with an error.
type wordsReply struct{ err error }

func (r wordsReply) Result() (interface{}, error) { return nil, r.err }

type wordsClient string

const dialed, timedOut = "no connection was made", "no answer came"

func (c wordsClient) EvalSha(context.Context, string, []string, ...interface{}) wordsReply {
	switch c {
	case dialed:
		return wordsReply{&net.OpError{Op: "dial", Err: syscall.ECONNREFUSED}}
	case timedOut:
		return wordsReply{&net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}}
	}
	return wordsReply{errors.New(string(c))}
}

func (c wordsClient) Eval(ctx context.Context, _ string, keys []string, _ ...interface{}) wordsReply {
	return c.EvalSha(ctx, "", keys)
}

// clusterClient is recognised by the method that only clients of a Cluster have.
type clusterClient struct{ wordsClient }

func (clusterClient) MasterForKey(context.Context, string) (interface{}, error) { return nil, nil }

func TestErrorsOfRedis(t *testing.T) {
	for words, want := range map[string]StoreErrorKind{
		"CLUSTERDOWN Hash slot not served":        StoreUnsent,
		"MOVED 3999 127.0.0.1:6381":               StoreUnsent,
		"READONLY You can't write":                StoreUnsent,
		"OOM command not allowed":                 StoreUnsent,
		"BUSY Redis is busy running a script.":    StoreUnsent,
		"redis: connection pool timeout":          StoreUnsent,
		"CORRUPT the record":                      RecordCorrupt,
		"NOAUTH Authentication required.":         StoreMisused,
		"read tcp 127.0.0.1: connection was lost": StoreUnavailable,
	} {
		store, err := NewRedisStore[wordsReply](wordsClient(words))
		if err != nil || store.IsCluster {
			t.Fatal(store.IsCluster, err)
		}
		store.AllowEviction = true
		_, err = store.Claim(context.Background(), RecordID{}, Claim{})
		if kindOf(err) != want || errors.Is(err, errFull) != hasAnyPrefix(words, "OOM", "READONLY") {
			t.Errorf("%s: %v", words, err)
		}
		// FailOpen executes nothing.
		if isRefusedByStore(err) != !hasAnyPrefix(words, "NOAUTH", "CORRUPT", "read tcp") {
			t.Errorf("%s: %v", words, err)
		}
	}
	cluster, err := NewRedisStore[wordsReply](clusterClient{""})
	if err != nil || !cluster.IsCluster {
		t.Error(cluster.IsCluster, err)
	}
}

// The check comes before the claim, so a claim is not sent if it fails.
func TestCheckOfRedisThatIsAway(t *testing.T) {
	store, err := NewRedisStore[wordsReply](wordsClient("read tcp 127.0.0.1: connection was lost"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err = store.Claim(context.Background(), RecordID{}, Claim{}); kindOf(err) != StoreUnsent {
		t.Error(err)
	}
}

// A server without memory is no outage: nothing is executed, also with FailOpen.
func TestRedisThatTakesNoWrites(t *testing.T) {
	store, err := NewRedisStore[wordsReply](wordsClient("OOM command not allowed when used memory > 'maxmemory'."))
	if err != nil {
		t.Fatal(err)
	}
	engine, err := NewEngine(store, EngineOptions{Service: "shop"})
	if err != nil {
		t.Fatal(err)
	}
	// The mark can be read.
	engine.mark.passedAt = readClocks()
	protect, err := Middleware(engine, Settings{FailOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < 10; i++ {
		request := httptest.NewRequest("POST", "/pay", nil)
		request.Header.Set("Idempotency-Key", "a")
		response := httptest.NewRecorder()
		protect(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("executed") })).ServeHTTP(response, request)
		if response.Code != 503 || !strings.Contains(response.Body.String(), "The store takes no new keys") || response.Header().Get("Retry-After") != "30" {
			t.Fatal(i, response.Code, response.Body)
		}
	}
}

// The numbers are those of CLUSTER KEYSLOT.
func TestSlotsOfACluster(t *testing.T) {
	for text, want := range map[string]int{
		strings.Repeat("00", 32): 16090,
		idMark.String():          11018,
	} {
		id, err := ParseRecordID(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := id.slot(); got != want {
			t.Errorf("%s: %d, want %d", text, got, want)
		}
	}
}

// FailOpen is for a server that is out of reach, and not for one that answers with an error.
func TestFailOpenOnErrorsOfRedis(t *testing.T) {
	for words, want := range map[string]int{"ERR unknown command 'EVALSHA'": 503, "WRONGPASS invalid username-password pair": 503,
		"ERR max number of clients reached": 503, "LOADING Redis is loading the dataset in memory": 503, "UNKNOWNWORD of a proxy": 503,
		"TRYAGAIN Multiple keys request during rehashing of slot": 503, "redigo: connection pool exhausted": 503, "redis: client is closed": 503,
		"MASTERDOWN Link with MASTER is down": 503, "CLUSTERDOWN The cluster is down": 503, "EOF": 503, "write tcp 127.0.0.1: broken pipe": 503, "a client hides what it was": 503, dialed: 200, timedOut: 200} {
		store, err := NewRedisStore[wordsReply](wordsClient(words))
		if err != nil {
			t.Fatal(err)
		}
		send, _ := server(t, store, Settings{Scope: []string{"single-tenant"}, FailOpen: true}, &logged{}, func(http.ResponseWriter, *http.Request) {})
		if got := send("a", ""); got.Code != want {
			t.Errorf("%s: %d", words, got.Code)
		}
	}
}

// movingClient answers with one error after the other, and then with the policy of a server that evicts.
type movingClient struct{ words *[]string }

type policyReply struct{ err error }

func (r policyReply) Result() (interface{}, error) {
	if r.err != nil {
		return nil, r.err
	}
	return "allkeys-lru", nil
}

func (c movingClient) EvalSha(context.Context, string, []string, ...interface{}) policyReply {
	return policyReply{errors.New("NOSCRIPT No matching script")}
}

func (c movingClient) Eval(context.Context, string, []string, ...interface{}) policyReply {
	if len(*c.words) == 0 {
		return policyReply{}
	}
	words := (*c.words)[0]
	*c.words = (*c.words)[1:]
	return policyReply{errors.New(words)}
}

// A server that will never tell its policy passes for good, and an error of a moment only for the moment.
func TestCheckOfRedisThatTellsNoPolicy(t *testing.T) {
	for words, isKept := range map[string]bool{"NOPERM this user has no permissions": true,
		"ERR ACL failure in script: User default has no permissions to run the 'info' command": true, "ERR the proxy has no server": false} {
		store, err := NewRedisStore[policyReply](movingClient{&[]string{words}})
		if err != nil {
			t.Fatal(err)
		}
		if err := store.Check(context.Background()); err != nil {
			t.Errorf("%s: %v", words, err)
		}
		if err := store.Check(context.Background()); (err == nil) != isKept {
			t.Errorf("%s, again: %v", words, err)
		}
	}
}

// retryingClient has the settings of a client of go-redis.
type retryingClient struct {
	wordsClient
	options retryOptions
}

type retryOptions struct{ MaxRetries int }

func (c retryingClient) Options() *retryOptions { return &c.options }

func TestClientsThatSendAgain(t *testing.T) {
	for retries, want := range map[int]bool{0: false, -1: false, 3: true} {
		store, err := NewRedisStore[wordsReply](retryingClient{options: retryOptions{retries}})
		if err != nil || store.resends != want {
			t.Error(retries, store.resends, err)
		}
	}
	if store, err := NewRedisStore[wordsReply](clusterClient{""}); err != nil || !store.resends {
		t.Error(err)
	}
	if store, err := NewRedisStore[wordsReply](wordsClient("")); err != nil || store.resends {
		t.Error(err)
	}
}

// brokenStore is a store whose connections were made and then broke: the first ones, or all.
type brokenStore struct {
	*MemoryStore
	broken int32
	err    error
}

func (s *brokenStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if atomic.AddInt32(&s.broken, -1) >= 0 {
		return ClaimReply{}, &StoreError{StoreUnavailable, "claim", s.err}
	}
	return s.MemoryStore.Claim(ctx, id, claim)
}

// A connection that was made and broke says that the store was reached: others are tried, and nothing executes without an answer.
func TestFailOpenAndBrokenConnections(t *testing.T) {
	for name, err := range map[string]error{
		"reset":         &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ECONNRESET)},
		"pipe":          os.NewSyscallError("write", syscall.EPIPE),
		"lost in TCP":   &net.OpError{Op: "read", Err: os.NewSyscallError("read", syscall.ETIMEDOUT)},
		"EOF":           fmt.Errorf("failed to receive message: %w", io.ErrUnexpectedEOF),
		"bad":           driver.ErrBadConn,
		"terminated":    stateError("57P01"),
		"at its limit":  errors.New("read tcp 127.0.0.1:1->127.0.0.1:2: read: connection reset by peer"),
		"closed by us":  net.ErrClosed,
		"pgx is closed": errors.New("conn closed"),
	} {
		store := &brokenStore{MemoryStore: NewMemoryStore(), err: err}
		executions := 0
		engine, problem := NewEngine(store, EngineOptions{Logger: &logged{}, Service: "test", StoreTimeout: 300 * time.Millisecond})
		if problem != nil {
			t.Fatal(problem)
		}
		protect, problem := Middleware(engine, Settings{Scope: oneTenant, FailOpen: true, Wait: -1})
		if problem != nil {
			t.Fatal(problem)
		}
		protected := protect(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { executions++ }))
		send := func() *httptest.ResponseRecorder {
			request, response := httptest.NewRequest("POST", "/pay", nil), httptest.NewRecorder()
			request.Header.Set("Idempotency-Key", "a")
			protected.ServeHTTP(response, request)
			return response
		}
		if got := send(); got.Code != 200 {
			t.Error(name, got.Code)
		}
		// Of a pool.
		atomic.StoreInt32(&store.broken, 8)
		if got := send(); got.Code != 200 || got.Header().Get("Idempotent-Replayed") != "true" {
			t.Error(name, "some are broken:", got.Code, got.Header())
		}
		// More than the strikes of the breaker.
		atomic.StoreInt32(&store.broken, 1<<30)
		for i := 0; i < breakerStrikes+2; i++ {
			if got := send(); got.Code != 503 {
				t.Error(name, "all are broken:", got.Code, got.Header())
			}
		}
		if executions != 1 {
			t.Error(name, executions, "executions")
		}
	}
}
