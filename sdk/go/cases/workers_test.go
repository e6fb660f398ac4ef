package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"oncegate.dev/oncegate"
)

// ledger is the service behind the workers. It counts the executions of each key.
type ledger struct {
	*httptest.Server
	mu    sync.Mutex
	count map[string]int
}

func newLedger(t *testing.T) *ledger {
	l := &ledger{count: map[string]int{}}
	l.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var asked execution
		must(json.NewDecoder(r.Body).Decode(&asked))
		key := ""
		for _, field := range asked.Fields {
			if field[0] == "idempotency-key" {
				key = field[1]
			}
		}
		l.mu.Lock()
		l.count[key]++
		n := l.count[key]
		l.mu.Unlock()
		// Work that a signal finds in the middle.
		time.Sleep(20 * time.Millisecond)
		parts := json.NewEncoder(w)
		body := fmt.Sprintf("%x", fmt.Sprintf("%s %d", key, n))
		parts.Encode(part{Status: 201})
		parts.Encode(part{Data: &body})
		parts.Encode(part{End: true})
	}))
	t.Cleanup(l.Close)
	return l
}

// worker is a process of the service that can be replaced.
type worker struct {
	mu      sync.Mutex
	process *service
	address string
}

func (w *worker) start(t *testing.T, store string) {
	process := startService(t)
	address := process.open(settings(), store)
	w.mu.Lock()
	defer w.mu.Unlock()
	w.process, w.address = process, address
}

func (w *worker) at() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.address
}

// end asks the process to end, and waits until it has.
func (w *worker) end(t *testing.T) {
	w.process.Process.Signal(syscall.SIGTERM)
	if err := w.process.Wait(); err != nil {
		t.Errorf("a worker ended with %v", err)
	}
}

// Two workers are ended and started again, one after the other, while clients send.
func TestWorkersThatAreReplacedUnderLoad(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
		defer cancel()
		books := newLedger(t)
		backend := strings.TrimPrefix(books.URL, "http://")
		workers := []*worker{{}, {}}
		for _, worker := range workers {
			worker.start(t, url)
		}
		var group sync.WaitGroup
		var isOver int32
		var cut int64
		results := make([]map[string]string, 8)
		for i := range results {
			results[i] = map[string]string{}
			group.Add(1)
			go func(i int) {
				defer group.Done()
				for n := 0; atomic.LoadInt32(&isOver) == 0; n++ {
					key := newKey()
					for try := 0; ; try++ {
						got := post(ctx, workers[(i+n+try)%2].at(), key, backend)
						if got.err == nil && got.status == 201 {
							results[i][key] = got.body
							break
						}
						// Only a connection that http.Server.Shutdown has closed is sent again. Without the middleware it would be, too.
						if got.err == nil || ctx.Err() != nil {
							t.Errorf("%s: %+v", key, got)
							return
						}
						atomic.AddInt64(&cut, 1)
					}
				}
			}(i)
		}
		for round := 0; round < 6; round++ {
			// The clients have used both for a while.
			seen := func() (n int) {
				books.mu.Lock()
				defer books.mu.Unlock()
				return len(books.count)
			}
			before := seen()
			waitFor("requests", func() bool { return seen() >= before+40 })
			worker := workers[round%2]
			worker.end(t)
			worker.start(t, url)
		}
		atomic.StoreInt32(&isOver, 1)
		group.Wait()
		keys := 0
		for _, own := range results {
			for key, body := range own {
				if keys++; body != key+" 1" {
					t.Errorf("%s: %q", key, body)
				}
				// Every process replays it.
				if got := post(ctx, workers[keys%2].at(), key, backend); got.body != body || got.header.Get("Idempotent-Replayed") != "true" {
					t.Errorf("%s: %+v", key, got)
				}
			}
		}
		for key, n := range books.count {
			if n != 1 {
				t.Errorf("%s: %d executions", key, n)
			}
		}
		t.Logf("%d keys, %d connections cut", keys, cut)
	})
}

// A worker that is asked to end finishes its requests, and their results are stored.
func TestWorkerEndsAfterItsRequests(t *testing.T) {
	eachStore(t, func(t *testing.T, url string, _ oncegate.Store, _ *exec.Cmd) {
		ctx := background(t)
		ending, other := &worker{}, &worker{}
		ending.start(t, url)
		other.start(t, url)
		c, key := newCase(t, true), newKey()
		first := make(chan answer, 1)
		go func() { first <- post(ctx, ending.at(), key, c.address()) }()
		c.waitBegan(t)
		ending.process.Process.Signal(syscall.SIGTERM)
		waitFor("the closed listener", func() bool {
			conn, err := net.Dial("tcp", ending.at())
			if err == nil {
				conn.Close()
			}
			return err != nil
		})
		close(c.proceed)
		if got := <-first; got.status != 201 || got.body != "execution 1" || got.header.Get("Idempotency-Status") != "" {
			t.Errorf("%+v", got)
		}
		if err := ending.process.Wait(); err != nil {
			t.Error(err)
		}
		if got := post(ctx, other.at(), key, c.address()); got.status != 201 || got.body != "execution 1" || got.header.Get("Idempotent-Replayed") != "true" {
			t.Errorf("%+v", got)
		}
	})
}
