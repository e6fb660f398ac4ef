// Package resp is a small client of Redis, for tests: it has the two methods of scripts that go-redis has.
package resp

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"time"
)

// Client opens connections as they are needed, and keeps them.
type Client struct {
	Address  string
	database int
	idle     chan *conn
}

type conn struct {
	net.Conn
	reader *bufio.Reader
}

// New returns a client of the server at this address.
func New(address string) *Client { return NewAt(address, 0) }

// NewAt returns a client of a database of the server at this address.
func NewAt(address string, database int) *Client {
	return &Client{address, database, make(chan *conn, 64)}
}

// Close closes the connections that are not in use.
func (c *Client) Close() {
	for {
		select {
		case own := <-c.idle:
			own.Close()
		default:
			return
		}
	}
}

// Reply has the shape of *redis.Cmd.
type Reply struct {
	value interface{}
	err   error
}

// Result returns the value.
func (r *Reply) Result() (interface{}, error) { return r.value, r.err }

// EvalSha calls a script by its digest.
func (c *Client) EvalSha(ctx context.Context, sha1 string, keys []string, args ...interface{}) *Reply {
	return c.Do(ctx, append(command("EVALSHA", sha1, len(keys), keys), args...)...)
}

// Eval calls a script by its text.
func (c *Client) Eval(ctx context.Context, script string, keys []string, args ...interface{}) *Reply {
	return c.Do(ctx, append(command("EVAL", script, len(keys), keys), args...)...)
}

func command(name, script string, count int, keys []string) []interface{} {
	words := []interface{}{name, script, count}
	for _, key := range keys {
		words = append(words, key)
	}
	return words
}

// Do sends a command.
func (c *Client) Do(ctx context.Context, words ...interface{}) *Reply {
	var own *conn
	select {
	case own = <-c.idle:
	default:
		dialer := net.Dialer{}
		raw, err := dialer.DialContext(ctx, "tcp", c.Address)
		if err != nil {
			return &Reply{err: err}
		}
		own = &conn{raw, bufio.NewReader(raw)}
		if c.database != 0 {
			if reply := c.exchange(ctx, own, []interface{}{"SELECT", c.database}); reply.err != nil {
				own.Close()
				return reply
			}
		}
	}
	reply := c.exchange(ctx, own, words)
	var refused serverError
	if reply.err != nil && !errors.As(reply.err, &refused) {
		own.Close()
		return reply
	}
	select {
	case c.idle <- own:
	default:
		own.Close()
	}
	return reply
}

func (c *Client) exchange(ctx context.Context, own *conn, words []interface{}) *Reply {
	deadline, _ := ctx.Deadline()
	own.SetDeadline(deadline)
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case <-ctx.Done():
			own.SetDeadline(time.Unix(1, 0))
		case <-stop:
		}
	}()
	out := []byte(fmt.Sprintf("*%d\r\n", len(words)))
	for _, word := range words {
		text := ""
		switch word := word.(type) {
		case []byte:
			text = string(word)
		default:
			text = fmt.Sprint(word)
		}
		out = append(out, fmt.Sprintf("$%d\r\n%s\r\n", len(text), text)...)
	}
	_, err := own.Write(out)
	var value interface{}
	if err == nil {
		value, err = own.read()
	}
	close(stop)
	// Otherwise it could end the next command on this connection.
	<-stopped
	return &Reply{value, err}
}

type serverError string

func (e serverError) Error() string { return string(e) }

func (c *conn) read() (interface{}, error) {
	line, err := c.reader.ReadString('\n')
	if err != nil {
		return nil, err
	}
	if len(line) < 3 {
		return nil, errors.New("resp: a short line")
	}
	text := line[1 : len(line)-2]
	number := func() (int, error) { return strconv.Atoi(text) }
	switch line[0] {
	case '+':
		return text, nil
	case '-':
		return nil, serverError(text)
	case ':':
		n, err := strconv.ParseInt(text, 10, 64)
		return n, err
	case '$':
		n, err := number()
		if err != nil || n < 0 {
			return nil, err
		}
		bytes := make([]byte, n+2)
		_, err = io.ReadFull(c.reader, bytes)
		return string(bytes[:n]), err
	case '*':
		n, err := number()
		if err != nil || n < 0 {
			return nil, err
		}
		values := make([]interface{}, n)
		var failed error
		for i := range values {
			if values[i], err = c.read(); err != nil {
				var own serverError
				if !errors.As(err, &own) {
					return nil, err
				}
				failed = err
			}
		}
		return values, failed
	}
	return nil, fmt.Errorf("resp: an unknown reply %q", line)
}
