package oncegate

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
)

// responseWriter is a writer of this package. withInterfaces adds the optional interfaces of the writer below it.
type responseWriter interface {
	http.ResponseWriter
	io.ReaderFrom
	flush()
	hijack() (net.Conn, *bufio.ReadWriter, error)
	push(target string, options *http.PushOptions) error
}

type (
	plainWriter  struct{ responseWriter }
	flushWriter  struct{ responseWriter }
	hijackWriter struct{ responseWriter }
	http1Writer  struct{ responseWriter }
	http2Writer  struct{ responseWriter }
)

func (w flushWriter) Flush()                                        { w.flush() }
func (w hijackWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) { return w.hijack() }
func (w http1Writer) Flush()                                        { w.flush() }
func (w http1Writer) Hijack() (net.Conn, *bufio.ReadWriter, error)  { return w.hijack() }
func (w http2Writer) Flush()                                        { w.flush() }
func (w http2Writer) Push(target string, o *http.PushOptions) error { return w.push(target, o) }

// withInterfaces is the writer with the optional interfaces that the writer below has, and no others.
func withInterfaces(own responseWriter, below http.ResponseWriter) http.ResponseWriter {
	_, flushes := below.(http.Flusher)
	_, hijacks := below.(http.Hijacker)
	_, pushes := below.(http.Pusher)
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

var errNotSupported = errors.New("oncegate: the server does not support this")

func hijackBelow(w http.ResponseWriter) (net.Conn, *bufio.ReadWriter, error) {
	if hijacker, ok := w.(http.Hijacker); ok {
		return hijacker.Hijack()
	}
	return nil, nil, errNotSupported
}

func pushBelow(w http.ResponseWriter, target string, options *http.PushOptions) error {
	if pusher, ok := w.(http.Pusher); ok {
		return pusher.Push(target, options)
	}
	return http.ErrNotSupported
}

// flush sends what a stream has. A response that is kept is stored first, so it is not sent before its end.
func (x *execution) flush() {
	if x.status == 0 && !x.isHijacked {
		x.WriteHeader(http.StatusOK)
	}
	if flusher, ok := x.w.(http.Flusher); ok && x.isStreaming {
		flusher.Flush()
	}
}

// hijack hands the connection to the handler. What follows is no response that could be kept.
func (x *execution) hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := hijackBelow(x.w)
	if err == nil {
		x.isHijacked = true
		x.treatment = treatTombstone
		x.settle()
	}
	return conn, buffer, err
}

func (x *execution) push(target string, options *http.PushOptions) error {
	return pushBelow(x.w, target, options)
}

// passingWriter passes the response of a request without a key on. The fields that only this package reads and sets are removed.
type passingWriter struct {
	http.ResponseWriter
	// status is the Idempotency-Status of the response.
	status              string
	isBegun, isHijacked bool
}

func (w *passingWriter) begin() {
	if w.isBegun {
		return
	}
	w.isBegun = true
	header := w.Header()
	header.Del("Idempotency-Store")
	header.Del("Idempotency-Status")
	if w.status != "" {
		header.Set("Idempotency-Status", w.status)
	}
}

func (w *passingWriter) WriteHeader(status int) {
	if status >= 200 || status == http.StatusSwitchingProtocols {
		w.begin()
	}
	w.ResponseWriter.WriteHeader(status)
}

func (w *passingWriter) Write(data []byte) (int, error) {
	w.begin()
	return w.ResponseWriter.Write(data)
}

func (w *passingWriter) ReadFrom(source io.Reader) (int64, error) {
	w.begin()
	if from, ok := w.ResponseWriter.(io.ReaderFrom); ok {
		return from.ReadFrom(source)
	}
	return io.Copy(struct{ io.Writer }{w.ResponseWriter}, source)
}

func (w *passingWriter) flush() {
	w.begin()
	if flusher, ok := w.ResponseWriter.(http.Flusher); ok {
		flusher.Flush()
	}
}

func (w *passingWriter) hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffer, err := hijackBelow(w.ResponseWriter)
	w.isHijacked = err == nil
	return conn, buffer, err
}

func (w *passingWriter) push(target string, options *http.PushOptions) error {
	return pushBelow(w.ResponseWriter, target, options)
}
