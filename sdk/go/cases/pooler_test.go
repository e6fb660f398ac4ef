package main

import (
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"oncegate.dev/oncegate"
)

// startPooler starts PgBouncer in transaction mode before a database, with few connections for many clients.
func startPooler(t *testing.T, address string) string {
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer"
	}
	own, err := url.Parse(address)
	must(err)
	directory, err := os.MkdirTemp(directory, "pooler")
	must(err)
	port := strconv.Itoa(freePort())
	must(os.WriteFile(filepath.Join(directory, "users.txt"), []byte(`"owner" ""`), 0o644))
	must(os.WriteFile(filepath.Join(directory, "pooler.ini"), []byte(fmt.Sprintf(`[databases]
* = host=127.0.0.1 port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = trust
auth_file = %s
pool_mode = transaction
default_pool_size = 3
max_client_conn = 200
ignore_startup_parameters = extra_float_digits
`, own.Port(), port, filepath.Join(directory, "users.txt"))), 0o644))
	must(os.Chmod(directory, 0o755))
	pooler := exec.Command(program, filepath.Join(directory, "pooler.ini"))
	pooler.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() == 0 {
		// PgBouncer does not run as root.
		account, err := user.Lookup("postgres")
		must(err)
		uid, _ := strconv.Atoi(account.Uid)
		gid, _ := strconv.Atoi(account.Gid)
		pooler.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	}
	must(pooler.Start())
	t.Cleanup(func() { stop(pooler, syscall.SIGINT) })
	own.Host, own.RawQuery = "127.0.0.1:"+port, "sslmode=disable"
	return own.String()
}

// Behind a pooler in transaction mode, the statements of the store and those of the application do not mix.
func TestPoolerInTransactionMode(t *testing.T) {
	direct, address := ownDatabase(t)
	execute(direct, "CREATE TABLE public.rows (of_application boolean NOT NULL, note text NOT NULL)")
	pooled := startPooler(t, address)
	open := func() *sql.DB {
		db, err := sql.Open("postgres", pooled)
		must(err)
		t.Cleanup(func() { db.Close() })
		return db
	}
	application := open()
	waitFor("the pooler", func() bool { return application.Ping() == nil })
	shop := newShop(t, oncegate.NewPostgresStore(open()), oncegate.EngineOptions{}, false)
	// The application writes in transactions, as it has to with lib/pq behind a pooler, and has statements of the same shape.
	done := make(chan struct{})
	var group sync.WaitGroup
	for i := 0; i < 8; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for {
				select {
				case <-done:
					return
				default:
				}
				tx, err := application.Begin()
				must(err)
				_, err = tx.Exec("INSERT INTO public.rows VALUES ($1, $2)", true, "note")
				must(err)
				must(tx.Commit())
			}
		}()
	}
	var clients sync.WaitGroup
	for i := 0; i < 16; i++ {
		clients.Add(1)
		go func() {
			defer clients.Done()
			for n := 0; n < 25; n++ {
				key := newKey()
				got := shop.post(t, key)
				if retry := shop.post(t, key); got.status != 201 || got.header.Get("Idempotency-Status") != "" || retry.body != got.body {
					t.Errorf("%+v, %+v", got, retry)
				}
			}
		}()
	}
	clients.Wait()
	close(done)
	group.Wait()
	if shop.executions != 16*25 {
		t.Errorf("%d executions", shop.executions)
	}
	var strange int
	must(direct.QueryRow("SELECT count(*) FROM public.rows WHERE NOT of_application OR note <> 'note'").Scan(&strange))
	if strange != 0 {
		t.Errorf("%d rows with arguments of the store", strange)
	}
	var operation string
	must(direct.QueryRow("SELECT DISTINCT operation FROM oncegate.records").Scan(&operation))
	if !strings.HasPrefix(operation, "POST /payments") {
		t.Error(operation)
	}
}
