package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// readmePreamble has what the examples of the README take for granted.
const readmePreamble = `package readme

import (
	"context"
	"database/sql"
	"errors"
	"log"
	"net/http"
	"os"

	"oncegate.dev/oncegate"
	"example.test/readme/bank"
	"example.test/readme/echo"
	"example.test/readme/redis"
)

type (
	Order   = bank.Order
	Receipt = bank.Receipt
	Payment struct { Customer string; Cents int }
)

var (
	db      *sql.DB
	client  *redis.Client
	store   oncegate.Store
	keys    *oncegate.SealKeys
	request *http.Request
	e       *echo.Echo
	protect func(http.Handler) http.Handler
	_       = errors.Is
	_       = log.Fatal
	_       = os.ReadFile
	_       context.Context
)
`

const readmeBank = `package bank

import (
	"context"
	"errors"
)

type (
	Order   struct { ID, Customer string }
	Receipt struct { Cents int }
)

var ErrDeclined, ErrUnreachable = errors.New("declined"), errors.New("unreachable")

func Charge(context.Context, Order, string) (Receipt, error) { return Receipt{}, nil }
`

const readmeRedis = `package redis

import "context"

type Cmd struct{}

func (*Cmd) Result() (interface{}, error) { return nil, nil }

type Client struct{}

func (*Client) EvalSha(context.Context, string, []string, ...interface{}) *Cmd { return nil }
func (*Client) Eval(context.Context, string, []string, ...interface{}) *Cmd    { return nil }
`

// readmeEcho has the types of Echo.
const readmeEcho = `package echo

import "net/http"

type (
	Context        interface{ Error(err error) }
	HandlerFunc    func(c Context) error
	MiddlewareFunc func(next HandlerFunc) HandlerFunc
	Echo           struct{ http.Handler }
)

func WrapMiddleware(func(http.Handler) http.Handler) MiddlewareFunc { return nil }
`

// Every example of the README compiles as it stands there.
func TestExamplesOfTheReadme(t *testing.T) {
	library, err := filepath.Abs("..")
	must(err)
	text, err := os.ReadFile(filepath.Join(library, "README.md"))
	must(err)
	directory := t.TempDir()
	write := func(name, text string) {
		path := filepath.Join(directory, name)
		must(os.MkdirAll(filepath.Dir(path), 0o755))
		must(os.WriteFile(path, []byte(text), 0o600))
	}
	examples := 0
	for _, block := range strings.Split(string(text), "```go\n")[1:] {
		block, _, _ = strings.Cut(block, "```")
		examples++
		name := fmt.Sprintf("example%d", examples)
		switch {
		case strings.HasPrefix(block, "package "):
			write(name+"/main.go", block)
			continue
		case !strings.HasPrefix(block, "func "):
			block = "func " + name + "() {\n" + block + "}\n"
			for _, unused := range []string{"existing"} {
				if strings.Contains(block, unused+" := ") {
					block = strings.TrimSuffix(block, "}\n") + "_ = " + unused + ".Timeout\n}\n"
				}
			}
		}
		write(name+"/example.go", readmePreamble+block)
	}
	write("bank/bank.go", readmeBank)
	write("redis/redis.go", readmeRedis)
	write("echo/echo.go", readmeEcho)
	write("go.mod", "module example.test/readme\n\ngo 1.19\n\nrequire oncegate.dev/oncegate v0.0.0\n\nreplace oncegate.dev/oncegate => "+library+"\n")
	vet := exec.Command("go", "vet", "./...")
	vet.Dir, vet.Env = directory, append(os.Environ(), "GOFLAGS=-mod=mod", "GOPROXY=off", "GOTOOLCHAIN=local")
	if output, err := vet.CombinedOutput(); err != nil || examples < 6 {
		t.Errorf("%d examples, %v\n%s", examples, err, output)
	}
}
