package main

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"oncegate.dev/oncegate"
	"oncegate.dev/oncegate/cases/resp"
)

// The servers of all tests. They are started once, and ended by their process ids.
var (
	directory   string
	binary      string
	postgres    *exec.Cmd
	postgresURL string
	redis       *exec.Cmd
	redisURL    string
)

func TestMain(m *testing.M) {
	// Pdeathsig is sent when the thread ends that has started a server.
	runtime.LockOSThread()
	os.Exit(func() int {
		var err error
		if directory, err = os.MkdirTemp("", "oncegate-go-"); err != nil {
			panic(err)
		}
		defer os.RemoveAll(directory)
		must(os.Chmod(directory, 0o755))
		binary = filepath.Join(directory, "service")
		build := exec.Command("go", "build", "-o", binary, ".")
		build.Stderr = os.Stderr
		must(build.Run())
		startPostgres()
		defer stop(postgres, syscall.SIGINT)
		startRedis()
		defer stop(redis, syscall.SIGTERM)
		return m.Run()
	}())
}

func must(err error) {
	if err != nil {
		panic(err)
	}
}

func stop(server *exec.Cmd, signal syscall.Signal) {
	server.Process.Signal(syscall.SIGCONT)
	server.Process.Signal(signal)
	server.Wait()
}

func freePort() int {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	must(err)
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port
}

// waitFor calls until it returns true, and fails after a deadline.
func waitFor(what string, ready func() bool) {
	for deadline := time.Now().Add(30 * time.Second); !ready(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			panic("not in 30 s: " + what)
		}
	}
}

// schema is the SQL of the contract: the files of crates/postgres in the order of its module.
func schema() string {
	root := filepath.Join("..", "..", "..", "crates", "postgres")
	module, err := os.ReadFile(filepath.Join(root, "src", "schema", "mod.rs"))
	must(err)
	text := ""
	for _, name := range regexp.MustCompile(`include_str!\("../../sql/(\w+\.sql)"\)`).FindAllSubmatch(module, -1) {
		part, err := os.ReadFile(filepath.Join(root, "sql", string(name[1])))
		must(err)
		text += string(part) + "\n"
	}
	return text
}

func startPostgres() {
	bin := "/usr/lib/postgresql/15/bin/"
	data := filepath.Join(directory, "postgres")
	must(os.Mkdir(data, 0o700))
	var credential *syscall.Credential
	if os.Geteuid() == 0 {
		// PostgreSQL does not run as root.
		own, err := user.Lookup("postgres")
		must(err)
		uid, _ := strconv.Atoi(own.Uid)
		gid, _ := strconv.Atoi(own.Gid)
		credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
		must(os.Chown(data, uid, gid))
	}
	command := func(name string, args ...string) *exec.Cmd {
		cmd := exec.Command(bin+name, args...)
		cmd.Dir, cmd.Env = data, append(os.Environ(), "LC_ALL=C")
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential, Pdeathsig: syscall.SIGKILL}
		return cmd
	}
	if output, err := command("initdb", "-D", data, "-U", "owner", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync").CombinedOutput(); err != nil {
		panic(string(output))
	}
	port := strconv.Itoa(freePort())
	log, err := os.Create(filepath.Join(directory, "postgres.log"))
	must(err)
	postgres = command("postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=200")
	postgres.Stdout, postgres.Stderr = log, log
	must(postgres.Start())
	postgresURL = "postgres://owner@127.0.0.1:" + port + "/postgres?sslmode=disable"
	db, err := sql.Open("postgres", postgresURL)
	must(err)
	defer db.Close()
	waitFor("PostgreSQL", func() bool { return db.Ping() == nil })
	tx, err := db.Begin()
	must(err)
	_, err = tx.Exec(schema())
	must(err)
	must(tx.Commit())
	_, err = db.Exec("CREATE TABLE public.payments (key text PRIMARY KEY, cents int NOT NULL)")
	must(err)
}

func startRedis() {
	port := strconv.Itoa(freePort())
	redis = exec.Command("redis-server", "--port", port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", directory)
	redis.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	must(redis.Start())
	redisURL = "redis://127.0.0.1:" + port
	waitFor("Redis", func() bool {
		_, err := resp.New("127.0.0.1:"+port).Do(context.Background(), "PING").Result()
		return err == nil
	})
}

// database is a pool of a test.
func database(t *testing.T) *sql.DB {
	db, err := sql.Open("postgres", postgresURL)
	must(err)
	t.Cleanup(func() { db.Close() })
	return db
}

// stores are those on servers, each with the process to pause.
func eachStore(t *testing.T, test func(t *testing.T, url string, store oncegate.Store, server *exec.Cmd)) {
	t.Run("postgres", func(t *testing.T) { test(t, postgresURL, oncegate.NewPostgresStore(database(t)), postgres) })
	t.Run("redis", func(t *testing.T) {
		store, err := oncegate.NewRedisStore[*resp.Reply](resp.New(redisURL[len("redis://"):]))
		must(err)
		test(t, redisURL, store, redis)
	})
}

// service is a process of its own.
type service struct {
	*exec.Cmd
	input  io.WriteCloser
	output *bufio.Reader
	mu     sync.Mutex
}

func startService(t *testing.T) *service {
	s := &service{Cmd: exec.Command(binary)}
	s.Stderr = os.Stderr
	// It ends with its input, whatever happens to this process.
	var err error
	s.input, err = s.StdinPipe()
	must(err)
	output, err := s.StdoutPipe()
	must(err)
	s.output = bufio.NewReader(output)
	must(s.Start())
	t.Cleanup(func() {
		s.Process.Signal(syscall.SIGCONT)
		s.Process.Kill()
		s.Wait()
	})
	return s
}

// open returns the address of a listener with these settings.
func (s *service) open(settings map[string]interface{}, store string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	line, err := json.Marshal(map[string]interface{}{"settings": settings, "store": store})
	must(err)
	_, err = fmt.Fprintf(s.input, "%s\n", line)
	must(err)
	text, err := s.output.ReadBytes('\n')
	must(err)
	var answer struct{ Address, Error, Unsupported string }
	must(json.Unmarshal(text, &answer))
	if answer.Address == "" {
		panic(string(text))
	}
	return answer.Address
}
