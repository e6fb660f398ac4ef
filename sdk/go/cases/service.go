// The service of the cases: it runs the middleware on net/http, with the settings and the store that its standard input names.
//
// Each line is a JSON object: {"settings": {…}, "store": "memory:" | "postgres://…" | "redis://…"} opens a listener and answers
// {"address": "127.0.0.1:PORT"}; {"close": "127.0.0.1:PORT"} closes one. The end of the input ends the process.
package main

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	_ "github.com/lib/pq"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

// stores are kept: all services of one process with one store share it, and with it the memory store.
var stores = map[string]oncegate.Store{}

func storeOf(address string) (oncegate.Store, error) {
	if store, ok := stores[address]; ok {
		return store, nil
	}
	var store oncegate.Store
	switch {
	case address == "memory:":
		return oncegate.NewMemoryStore(), nil
	case strings.HasPrefix(address, "memory:"):
		store = oncegate.NewMemoryStore()
	case strings.HasPrefix(address, "postgres://"):
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		// lib/pq asks for TLS unless it is told not to.
		if query := u.Query(); query.Get("sslmode") == "" {
			query.Set("sslmode", "disable")
			u.RawQuery = query.Encode()
		}
		db, err := sql.Open("postgres", u.String())
		if err != nil {
			return nil, err
		}
		db.SetMaxOpenConns(20)
		db.SetMaxIdleConns(20)
		store = oncegate.NewPostgresStore(db)
	case strings.HasPrefix(address, "redis://"):
		u, err := url.Parse(address)
		if err != nil {
			return nil, err
		}
		redis, err := oncegate.NewRedisStore[*resp.Reply](resp.New(u.Host))
		if err != nil {
			return nil, err
		}
		store = redis
	default:
		return nil, fmt.Errorf("the store %q is unknown", address)
	}
	stores[address] = store
	return store, nil
}

type execution struct {
	Method string      `json:"method"`
	Target string      `json:"target"`
	Fields [][2]string `json:"fields"`
	Body   string      `json:"body"`
}

type scripted struct {
	Status int         `json:"status"`
	Fields [][2]string `json:"fields"`
	Body   string      `json:"body"`
}

var client = &http.Client{Timeout: time.Minute}

// handle asks the case for the response to each request.
func handle(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	asked := execution{Method: r.Method, Target: r.RequestURI, Fields: [][2]string{{"host", r.Host}}, Body: hex.EncodeToString(body)}
	for name, values := range r.Header {
		for _, value := range values {
			asked.Fields = append(asked.Fields, [2]string{strings.ToLower(name), value})
		}
	}
	if attempt := oncegate.AttemptFrom(r.Context()); attempt != nil {
		asked.Fields = append(asked.Fields, [2]string{"oncegate-record", attempt.Record().String()},
			[2]string{"oncegate-token", fmt.Sprint(attempt.Token())}, [2]string{"oncegate-attempt", fmt.Sprint(attempt.Number())})
	}
	text, err := json.Marshal(asked)
	if err != nil {
		panic(err)
	}
	response, err := client.Post("http://"+r.Header.Get("X-Case")+"/", "application/json", bytes.NewReader(text))
	if err != nil {
		panic(err)
	}
	defer response.Body.Close()
	var answer scripted
	if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
		panic(err)
	}
	content, err := hex.DecodeString(answer.Body)
	if err != nil {
		panic(err)
	}
	w.Header()["Content-Type"] = nil
	for _, field := range answer.Fields {
		w.Header().Add(field[0], field[1])
	}
	w.WriteHeader(answer.Status)
	w.Write(content)
}

type listening struct {
	server *http.Server
	engine *oncegate.Engine
}

func open(settings map[string]json.RawMessage, address string) (string, *listening, error) {
	options := oncegate.EngineOptions{Logger: log.New(os.Stderr, "", log.LstdFlags)}
	if text, ok := settings["service"]; ok {
		if err := json.Unmarshal(text, &options.Service); err != nil {
			return "", nil, err
		}
		delete(settings, "service")
	}
	if text, ok := settings["store-timeout"]; ok {
		var word string
		if err := json.Unmarshal(text, &word); err != nil {
			return "", nil, err
		}
		var err error
		if options.StoreTimeout, err = time.ParseDuration(word); err != nil {
			return "", nil, err
		}
		delete(settings, "store-timeout")
	}
	text, err := json.Marshal(settings)
	if err != nil {
		return "", nil, err
	}
	parsed, err := oncegate.ParseSettings(text)
	if err != nil {
		return "", nil, err
	}
	store, err := storeOf(address)
	if err != nil {
		return "", nil, err
	}
	engine, err := oncegate.NewEngine(store, options)
	if err != nil {
		return "", nil, err
	}
	protect, err := oncegate.Middleware(engine, parsed)
	if err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, err
	}
	server := &http.Server{Handler: protect(http.HandlerFunc(handle))}
	go server.Serve(listener)
	return listener.Addr().String(), &listening{server, engine}, nil
}

func main() {
	services := map[string]*listening{}
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	output := json.NewEncoder(os.Stdout)
	for input.Scan() {
		var line struct {
			Settings map[string]json.RawMessage
			Store    string
			Close    string
		}
		if err := json.Unmarshal(input.Bytes(), &line); err != nil {
			output.Encode(map[string]string{"error": err.Error()})
			continue
		}
		if line.Close != "" {
			if service, ok := services[line.Close]; ok {
				service.server.Close()
				delete(services, line.Close)
			}
			continue
		}
		address, service, err := open(line.Settings, line.Store)
		var unsupported *oncegate.UnsupportedSetting
		switch {
		case errors.As(err, &unsupported):
			output.Encode(map[string]string{"unsupported": unsupported.Name})
		case err != nil:
			output.Encode(map[string]string{"error": err.Error()})
		default:
			services[address] = service
			output.Encode(map[string]string{"address": address})
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	for _, service := range services {
		service.server.Close()
		service.engine.Drain(ctx)
	}
}
