// The service of the benchmarks on net/http, with nothing around it (`bare`) or with the library, whose records are in memory.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"oncegate.dev/oncegate"
)

var executions atomic.Int64

func reply(w http.ResponseWriter, status int, value any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(value); err != nil {
		log.Print(err)
	}
}

func only(method string, handler http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method != method {
			w.WriteHeader(http.StatusMethodNotAllowed)
			return
		}
		handler(w, r)
	}
}

func service() http.Handler {
	routes := http.NewServeMux()
	routes.HandleFunc("/pay", only(http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
		var payment map[string]any
		if err := json.NewDecoder(io.LimitReader(r.Body, 1<<20)).Decode(&payment); err != nil {
			reply(w, http.StatusBadRequest, map[string]string{"error": err.Error()})
			return
		}
		reply(w, http.StatusOK, payment)
	}))
	routes.HandleFunc("/work", only(http.MethodPost, func(w http.ResponseWriter, _ *http.Request) {
		execution := executions.Add(1)
		time.Sleep(100 * time.Millisecond)
		reply(w, http.StatusCreated, map[string]int64{"execution": execution})
	}))
	var failed sync.Map
	routes.HandleFunc("/fail", only(http.MethodPost, func(w http.ResponseWriter, r *http.Request) {
		execution := executions.Add(1)
		if _, known := failed.LoadOrStore(r.Header.Get("Idempotency-Key"), true); !known {
			reply(w, http.StatusInternalServerError, map[string]string{"error": "failed"})
			return
		}
		reply(w, http.StatusCreated, map[string]int64{"execution": execution})
	}))
	routes.HandleFunc("/executions", only(http.MethodGet, func(w http.ResponseWriter, _ *http.Request) {
		reply(w, http.StatusOK, executions.Load())
	}))
	return routes
}

func main() {
	handler := service()
	if os.Args[1] == "oncegate" {
		engine, err := oncegate.NewEngine(oncegate.NewMemoryStore(), oncegate.EngineOptions{})
		if err != nil {
			log.Fatal(err)
		}
		once, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"single-tenant"}})
		if err != nil {
			log.Fatal(err)
		}
		handler = once(handler)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on http://%s\n", listener.Addr())
	log.Fatal(http.Serve(listener, handler))
}
