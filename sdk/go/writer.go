package oncegate

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"time"
)

// responseWriter is a writer of this package. withInterfaces adds the optional interfaces of the writer below it.
type responseWriter interface {
	http.ResponseWriter
	io.ReaderFrom
	flush()
	hijack() (net.Conn, *bufio.ReadWriter, error)
	push(target string, options *http.PushOptions) error
	closeNotify() <-chan bool
	// Unwrap is for http.ResponseController, which sets the deadlines of the writer below.
	Unwrap() http.ResponseWriter
}

type (
	plainWriter  struct{ responseWriter }
	flushWriter  struct{ responseWriter }
	hijackWriter struct{ responseWriter }
	http1Writer  struct{ responseWriter }
	http2Writer  struct{ responseWriter }
)

// gin panics without CloseNotify.
func (w http1Writer) CloseNotify() <-chan bool { return w.closeNotify() }
func (w http2Writer) CloseNotify() <-chan bool { return w.closeNotify() }

func (w flushWriter) Flush()                                        { w.flush() }
func (w hijackWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) { return w.hijack() }
func (w http1Writer) Flush()                                        { w.flush() }
func (w http1Writer) Hijack() (net.Conn, *bufio.ReadWriter, error)  { return w.hijack() }
func (w http2Writer) Flush()                                        { w.flush() }
func (w http2Writer) Push(target string, o *http.PushOptions) error { return w.push(target, o) }

// withInterfaces is the writer with the optional interfaces that the writer below has, and no others.
func withInterfaces(own responseWriter, below http.ResponseWriter) http.ResponseWriter {
	_, flushes := flusherOf(below)
	_, hijacks := inside[http.Hijacker](below)
	_, pushes := inside[http.Pusher](below)
	switch {
	case flushes && hijacks:
		return http1Writer{own}
	case flushes && pushes:
		return http2Writer{own}
	case hijacks:
		return hijackWriter{own}
	case flushes:
		return flushWriter{own}
	}
	return plainWriter{own}
}

// inside finds an interface of a writer, or of one that it wraps, as http.ResponseController does: otherwise that would pass this one by.
func inside[T any](w http.ResponseWriter) (own T, ok bool) {
	for {
		if own, ok = w.(T); ok {
			return own, true
		}
		wrapper, wraps := w.(interface{ Unwrap() http.ResponseWriter })
		if !wraps {
			return own, false
		}
		w = wrapper.Unwrap()
	}
}

// flusherOf finds what sends the response so far.
func flusherOf(w http.ResponseWriter) (flush func(), ok bool) {
	if flusher, ok := inside[http.Flusher](w); ok {
		return flusher.Flush, true
	}
	if flusher, ok := inside[interface{ FlushError() error }](w); ok {
		return func() { flusher.FlushError() }, true
	}
	return nil, false
}

var errNotSupported = errors.New("oncegate: the server does not support this")

func hijackBelow(w http.ResponseWriter) (net.Conn, *bufio.ReadWriter, error) {
	if hijacker, ok := inside[http.Hijacker](w); ok {
		return hijacker.Hijack()
	}
	return nil, nil, errNotSupported
}

func pushBelow(w http.ResponseWriter, target string, options *http.PushOptions) error {
	if pusher, ok := inside[http.Pusher](w); ok {
		return pusher.Push(target, options)
	}
	return http.ErrNotSupported
}

// guardedWriter is the writer that a handler gets. A goroutine that outlives the handler must not change a response that is being stored.
type guardedWriter struct{ x *execution }

var errHandlerReturned = errors.New("oncegate: the handler has returned")

// enter is false after the handler has returned. leave must be called otherwise.
func (g guardedWriter) enter() bool {
	g.x.mu.Lock()
	if g.x.isOver {
		isEmpty := g.x.isEmpty
		g.x.mu.Unlock()
		if isEmpty && g.x.engine.throttle.allow("late response", time.Minute) {
			g.x.engine.log.Printf("oncegate: a handler returned without a response, and something wrote one afterwards. That is lost: the client and its "+
				"retries get an empty 200 (record %s). Echo writes the errors that a handler returns, such as echo.NewHTTPError or that of a failed Bind, after "+
				"echo.WrapMiddleware has returned: protect the whole Echo, http.ListenAndServe(address, protect(e)), or call c.Error(err) inside, see \"Echo\" in "+
				"the README of this library", g.x.record())
		}
		return false
	}
	return true
}

func (g guardedWriter) leave() { g.x.mu.Unlock() }

func (g guardedWriter) Header() http.Header { return g.x.header }

func (g guardedWriter) WriteHeader(status int) {
	if g.enter() {
		defer g.leave()
		g.x.WriteHeader(status)
	}
}

func (g guardedWriter) Write(data []byte) (int, error) {
	if !g.enter() {
		return 0, errHandlerReturned
	}
	defer g.leave()
	return g.x.Write(data)
}

// ReadFrom waits for its source without the lock.
func (g guardedWriter) ReadFrom(source io.Reader) (int64, error) {
	if !g.enter() {
		return 0, errHandlerReturned
	}
	from := g.x.readerFrom()
	g.leave()
	if from == nil {
		return io.Copy(struct{ io.Writer }{g}, source)
	}
	n, err := from.ReadFrom(source)
	if g.enter() {
		g.x.written += n
		g.leave()
	}
	return n, err
}

func (g guardedWriter) flush() {
	if g.enter() {
		defer g.leave()
		g.x.flush()
	}
}

func (g guardedWriter) hijack() (net.Conn, *bufio.ReadWriter, error) {
	if !g.enter() {
		return nil, nil, errHandlerReturned
	}
	defer g.leave()
	return g.x.hijack()
}

func (g guardedWriter) push(target string, options *http.PushOptions) error {
	return pushBelow(g.x.w, target, options)
}

func (g guardedWriter) closeNotify() <-chan bool    { return g.x.closeNotify() }
func (g guardedWriter) Unwrap() http.ResponseWriter { return g.x.w }

// flush sends what a stream has. A response that is kept is stored first, so it is not sent before its end.
func (x *execution) flush() {
	if x.status == 0 && !x.isHijacked {
		x.WriteHeader(http.StatusOK)
	}
	if flush, ok := flusherOf(x.w); ok && x.isStreaming {
		flush()
	}
}

// hijack hands the connection to the handler. What follows is no response that could be kept.
func (x *execution) hijack() (net.Conn, *bufio.ReadWriter, error) {
	if _, ok := inside[http.Hijacker](x.w); ok && x.status != 0 && !x.isStreaming {
		// What the handler has written so far precedes what it writes to the connection.
		x.treatment = treatTombstone
		x.stream()
		if x.instead == nil {
			x.sendBody()
		}
		x.flush()
	}
	conn, buffer, err := hijackBelow(x.w)
	if err == nil {
		x.isHijacked = true
		x.treatment = treatTombstone
		x.settle()
	}
	return conn, buffer, err
}

// closeNotify reports the end of the handler's context: the handler runs to its end, also without its client. Only that of a stream ends
// sooner.
func (x *execution) closeNotify() <-chan bool {
	gone := make(chan bool, 1)
	go func() {
		<-x.over
		gone <- true
	}()
	return gone
}

// passingWriter passes the response of a request without a key on. The fields that only this package reads and sets are removed.
type passingWriter struct {
	http.ResponseWriter
	// status is the Idempotency-Status of the response.
	status     string
	isHijacked bool
	// code is the status of the handler, or 0 before it.
	code int
}

// begin sets the fields of the response, once.
func (w *passingWriter) begin(code int) {
	if w.code != 0 {
		return
	}
	w.code = code
	header := w.Header()
	header.Del("Idempotency-Store")
	header.Del("Idempotency-Status")
	if w.status != "" {
		header.Set("Idempotency-Status", w.status)
	}
}

func (w *passingWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.begin(status)
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *passingWriter) Write(data []byte) (int, error) {
	w.begin(http.StatusOK)
	return w.ResponseWriter.Write(data)
}

func (w *passingWriter) ReadFrom(source io.Reader) (int64, error) {
	w.begin(http.StatusOK)
	if from, ok := w.ResponseWriter.(io.ReaderFrom); ok {
		return from.ReadFrom(source)
	}
	return io.Copy(struct{ io.Writer }{w.ResponseWriter}, source)
}

func (w *passingWriter) flush() {
	w.begin(http.StatusOK)
	if flush, ok := flusherOf(w.ResponseWriter); ok {
		flush()
	}
}

func (w *passingWriter) hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := hijackBelow(w.ResponseWriter)
	w.isHijacked = err == nil
	return conn, buffer, err
}

func (w *passingWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func (w *passingWriter) push(target string, options *http.PushOptions) error {
	return pushBelow(w.ResponseWriter, target, options)
}

func (w *passingWriter) closeNotify() <-chan bool {
	//lint:ignore SA1019 Handlers that use it still do.
	if notifier, ok := inside[http.CloseNotifier](w.ResponseWriter); ok {
		return notifier.CloseNotify()
	}
	return nil
}
