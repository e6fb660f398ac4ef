// The service of the cases: it runs the middleware on net/http, with the settings and the store that its standard input names.
//
// Each line is a JSON object: {"settings": {…}, "store": "memory:" | "postgres://…" | "redis://…", "backend": "127.0.0.1:PORT",
// "case": NUMBER, "seal-keys": TEXT, "id-secret": TEXT} opens a listener and answers {"address": "127.0.0.1:PORT"}; its handler asks the
// backend for each response. {"close": "127.0.0.1:PORT"} closes a listener, and answers {"closed": true} when nothing more is sent to its store.
// The end of the input ends the process, and SIGTERM ends it after the requests that it has begun.
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
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	_ "github.com/lib/pq"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

// openStore opens a store, and returns a function that closes its connections.
func openStore(address string) (oncegate.Store, func(), error) {
	nothing := func() {}
	u, err := url.Parse(address)
	if err != nil {
		return nil, nothing, err
	}
	switch u.Scheme {
	case "memory":
		return oncegate.NewMemoryStore(), nothing, nil
	case "postgres":
		// lib/pq asks for TLS unless it is told not to.
		if query := u.Query(); query.Get("sslmode") == "" {
			query.Set("sslmode", "disable")
			u.RawQuery = query.Encode()
		}
		db, err := sql.Open("postgres", u.String())
		if err != nil {
			return nil, nothing, err
		}
		db.SetMaxOpenConns(10)
		db.SetMaxIdleConns(10)
		return oncegate.NewPostgresStore(db), func() { db.Close() }, nil
	case "redis":
		database := 0
		if name := strings.Trim(u.Path, "/"); name != "" {
			if database, err = strconv.Atoi(name); err != nil {
				return nil, nothing, err
			}
		}
		client := resp.NewAt(u.Host, database)
		store, err := oncegate.NewRedisStore[*resp.Reply](client)
		return store, client.Close, err
	}
	return nil, nothing, fmt.Errorf("the store %q is unknown", address)
}

type execution struct {
	Case   int         `json:"case"`
	Method string      `json:"method"`
	Target string      `json:"target"`
	Fields [][2]string `json:"fields"`
	Body   string      `json:"body"`
}

// part is a line of the response of a backend: its head first, then parts of its body, its trailers, and its end; or the order to end
// without a response.
type part struct {
	Status   int         `json:"status"`
	Fields   [][2]string `json:"fields"`
	Length   *int        `json:"length"`
	Data     *string     `json:"data"`
	Trailers [][2]string `json:"trailers"`
	End      bool        `json:"end"`
	Aborts   bool        `json:"aborts"`
	Breaks   bool        `json:"breaks"`
}

var client = &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}}

// text has a character for each byte.
func text(value string) string {
	var out strings.Builder
	for i := 0; i < len(value); i++ {
		out.WriteRune(rune(value[i]))
	}
	return out.String()
}

// octets is the inverse of text.
func octets(value string) string {
	var out []byte
	for _, char := range value {
		out = append(out, byte(char))
	}
	return string(out)
}

// handler asks the backend for the response to each request. Without one, the request names it in the field X-Case.
func handler(backend string, number int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		backend := backend
		if backend == "" {
			backend = r.Header.Get("X-Case")
		}
		body, err := io.ReadAll(r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		asked := execution{Case: number, Method: r.Method, Target: r.RequestURI, Fields: [][2]string{{"host", r.Host}}, Body: hex.EncodeToString(body)}
		for name, values := range r.Header {
			for _, value := range values {
				asked.Fields = append(asked.Fields, [2]string{strings.ToLower(name), text(value)})
			}
		}
		if attempt := oncegate.AttemptFrom(r.Context()); attempt != nil {
			asked.Fields = append(asked.Fields, [2]string{"oncegate-record", attempt.Record().String()},
				[2]string{"oncegate-token", fmt.Sprint(attempt.Token())}, [2]string{"oncegate-attempt", fmt.Sprint(attempt.Number())})
		}
		question, err := json.Marshal(asked)
		if err != nil {
			panic(err)
		}
		response, err := client.Post("http://"+backend+"/parts", "application/json", bytes.NewReader(question))
		if err != nil {
			panic(err)
		}
		defer response.Body.Close()
		parts := json.NewDecoder(response.Body)
		var head part
		if err := parts.Decode(&head); err != nil {
			panic(err)
		}
		if head.Aborts {
			panic(http.ErrAbortHandler)
		}
		w.Header()["Content-Type"] = nil
		for _, field := range head.Fields {
			w.Header().Add(field[0], octets(field[1]))
		}
		w.WriteHeader(head.Status)
		for {
			var next part
			if err := parts.Decode(&next); err != nil {
				panic(http.ErrAbortHandler)
			}
			if next.End {
				return
			}
			if next.Breaks {
				panic(http.ErrAbortHandler)
			}
			for _, field := range next.Trailers {
				w.Header().Add(http.TrailerPrefix+field[0], octets(field[1]))
			}
			if next.Data == nil {
				continue
			}
			content, err := hex.DecodeString(*next.Data)
			if err != nil {
				panic(err)
			}
			w.Write(content)
			if flusher, ok := w.(http.Flusher); ok && head.Length == nil {
				flusher.Flush()
			}
		}
	}
}

type listening struct {
	server *http.Server
	engine *oncegate.Engine
	close  func()
}

func (l *listening) drain(ctx context.Context) {
	l.server.Shutdown(ctx)
	l.engine.Drain(ctx)
	l.close()
}

func open(settings map[string]json.RawMessage, address, backend string, number int, sealKeys, idSecret string) (string, *listening, error) {
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
	store, closeStore, err := openStore(address)
	if err != nil {
		return "", nil, err
	}
	if sealKeys != "" {
		keys, err := oncegate.ParseSealKeys(sealKeys)
		if err != nil {
			return "", nil, err
		}
		store = oncegate.NewSealedStore(store, keys)
	}
	if idSecret != "" {
		if options.IDSecret, err = oncegate.ParseIDSecret(idSecret); err != nil {
			return "", nil, err
		}
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
	server := &http.Server{Handler: protect(handler(backend, number)), ErrorLog: log.New(io.Discard, "", 0)}
	go server.Serve(listener)
	return listener.Addr().String(), &listening{server, engine, closeStore}, nil
}

func main() {
	var mutex sync.Mutex
	services := map[string]*listening{}
	terminated := make(chan os.Signal, 1)
	signal.Notify(terminated, syscall.SIGTERM)
	go func() {
		<-terminated
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		mutex.Lock()
		for _, service := range services {
			service.drain(ctx)
		}
		os.Exit(0)
	}()
	input := bufio.NewScanner(os.Stdin)
	input.Buffer(nil, 1<<20)
	output := json.NewEncoder(os.Stdout)
	for input.Scan() {
		var line struct {
			Settings map[string]json.RawMessage
			Store    string
			Backend  string
			Case     int
			Close    string
			SealKeys string `json:"seal-keys"`
			IDSecret string `json:"id-secret"`
		}
		if err := json.Unmarshal(input.Bytes(), &line); err != nil {
			output.Encode(map[string]string{"error": err.Error()})
			continue
		}
		mutex.Lock()
		if line.Close != "" {
			if service, ok := services[line.Close]; ok {
				// The store first. A request that still waits for its connections must not delay other cases.
				service.close()
				go service.server.Close()
				delete(services, line.Close)
			}
			output.Encode(map[string]bool{"closed": true})
			mutex.Unlock()
			continue
		}
		address, service, err := open(line.Settings, line.Store, line.Backend, line.Case, line.SealKeys, line.IDSecret)
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
		mutex.Unlock()
	}
}
