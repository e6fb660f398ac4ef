package oncegate

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Middleware returns a function that protects a handler: a request with a key is executed once, and its retries get the same response.
//
//	protect, err := oncegate.Middleware(engine, oncegate.Settings{Scope: []string{"required-header:authorization"}})
//	http.ListenAndServe(":8080", protect(mux))
//
// The handler runs to its end even if the client hangs up: its context is not cancelled. Its response is stored before the client gets it,
// so Flush has no effect, unless the response has no end (text/event-stream) or is larger than Settings.MaxResponseBody. AttemptFrom
// returns its attempt.
func Middleware(engine *Engine, settings Settings) (func(http.Handler) http.Handler, error) {
	if engine == nil {
		return nil, errors.New("oncegate: there is no engine; make one with NewEngine")
	}
	c, err := compile(settings)
	if err != nil {
		return nil, err
	}
	for _, method := range settings.Methods {
		if upper := asciiUpper(method); !isRegistered(upper) {
			engine.log.Printf("oncegate: Methods: no registered method is called %q%s", method, didYouMean(upper, registeredMethods))
		}
	}
	if settings.Scope == nil && settings.Caller == nil {
		engine.log.Printf("oncegate: Scope is not set: callers are told apart by Authorization. A retry with a renewed token is another caller and " +
			"executes again. Requests without any credential are one caller: with the same key they get each other's responses. Requests with " +
			"another credential, such as a cookie, are refused")
	} else if names := c.caller.credentials(); names != "" {
		engine.log.Printf("oncegate: callers are told apart by %s. A retry with a renewed value is another caller and executes again. If the value "+
			"changes between retries, such as a token or the cookie of a session, set Caller to what identifies the user", names)
	}
	limits := &limits{perCaller: map[[8]byte]*callerLoad{}}
	return func(next http.Handler) http.Handler {
		return &protected{engine: engine, compiled: c, limits: limits, next: next}
	}, nil
}

type protected struct {
	engine *Engine
	*compiled
	limits *limits
	next   http.Handler
	// sidecarSeen is true if the log says that a sidecar is in front.
	sidecarSeen atomic.Bool
	lastHost    atomic.Pointer[hostPart]
}

// nothingExecuted reports if this refusal means that neither this request nor an earlier one with its key was executed to an end that would
// have to be kept.
func nothingExecuted(condition string) bool {
	switch condition {
	case "outcome-unknown", "handler-failed", "replay-unavailable", "record-corrupt":
		return false
	}
	return true
}

// limits count the requests with a key that run, and the memory of bodies.
type limits struct {
	mu                          sync.Mutex
	running                     int
	perCaller                   map[[8]byte]*callerLoad
	requestBytes, responseBytes int
}

// callerLoad is what one caller has of the limits.
type callerLoad struct{ running, responseBytes int }

// responseShare is how much of ResponseBudget the responses to one caller may fill: one that does not read them must not stop the others.
func (c *compiled) responseShare() int {
	if c.caller.isSingleTenant() {
		return c.ResponseBudget
	}
	return c.partOfBudget(c.ResponseBudget / 4)
}

// replayBudget is how much of ResponseBudget replays may fill: those that nobody reads must not stop new requests.
func (c *compiled) replayBudget() int { return c.partOfBudget(c.ResponseBudget - c.ResponseBudget/4) }

// partOfBudget is large enough for every response, if the budget is.
func (c *compiled) partOfBudget(part int) int {
	if part < c.MaxResponseBody {
		part = c.MaxResponseBody
	}
	if part > c.ResponseBudget {
		part = c.ResponseBudget
	}
	return part
}

func (l *limits) enter(c *compiled, caller [8]byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.perCaller[caller]
	if own == nil {
		own = &callerLoad{}
	}
	if l.running >= c.MaxInFlight || !c.caller.isSingleTenant() && own.running >= c.MaxInFlightPerCaller ||
		l.responseBytes >= c.ResponseBudget || own.responseBytes >= c.responseShare() {
		return false
	}
	l.running++
	own.running++
	l.perCaller[caller] = own
	return true
}

func (l *limits) leave(caller [8]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	if l.perCaller[caller].running--; l.perCaller[caller].running == 0 {
		delete(l.perCaller, caller)
	}
}

func (l *limits) hold(held *int, n, max int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if *held+n > max && n > 0 {
		return false
	}
	*held += n
	return true
}

// holdResponse counts the bytes of a replay, unless the budget of replays or the share of its caller is used up. The caller has entered.
func (l *limits) holdResponse(c *compiled, caller [8]byte, n int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	own := l.perCaller[caller]
	if n > 0 && (l.responseBytes+n > c.replayBudget() || own.responseBytes+n > c.responseShare()) {
		return false
	}
	l.responseBytes += n
	own.responseBytes += n
	return true
}

// addResponse counts the bytes of a response that is sent even if the budget is used up. The caller has entered.
func (l *limits) addResponse(caller [8]byte, n int) {
	l.mu.Lock()
	l.responseBytes += n
	l.perCaller[caller].responseBytes += n
	l.mu.Unlock()
}

// keyed is one request that has a key, or that lacks the key that it must have.
type keyed struct {
	*protected
	w    http.ResponseWriter
	r    *http.Request
	echo Field
	// id is that of the record, as soon as hasID is true.
	id    RecordID
	hasID bool
	// tag is the caller, for the limits.
	tag   [8]byte
	path  string
	query string
}

const (
	detailNoPath  = "Nothing was executed. The target of the request is not a path."
	detailTooMany = "Nothing was executed: too many requests with a key are in progress, or too many responses wait for their " +
		"clients. Send the same request with the same key later."
	detailRequestBudget = "Nothing was executed: the memory for the bodies of requests is used up. Send the same request " +
		"with the same key later."
	detailResponseBudget = "The first request with this key was processed. The memory for responses is used up at the moment. " +
		"Send the same request with the same key later to get the response."
	detailStoreFull = "The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end yet. " +
		"Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the same key later."
	detailSameRecord = "Nothing was executed. A sidecar of Oncegate in front of the service and the service itself use one store and one name of the service, " +
		"so each waits for the other. The operator of the service has to leave the protection to one of them."
	detailReusedMembers = "The key of this operation is built from members of its JSON body. Another request had the same " +
		"members and differed in other parts. Nothing was executed. A request for another operation must differ in these members."
)

// targetOf is the path and the query of a request, as they were sent.
func targetOf(r *http.Request) (path, query string) {
	target := r.RequestURI
	if target == "" {
		target = r.URL.RequestURI()
	}
	if at := strings.Index(target, "://"); at > 0 && !strings.HasPrefix(target, "/") {
		rest := target[at+3:]
		if slash := strings.IndexAny(rest, "/?"); slash < 0 {
			target = "/"
		} else if target = rest[slash:]; target[0] == '?' {
			target = "/" + target
		}
	}
	if at := strings.IndexByte(target, '#'); at >= 0 {
		target = target[:at]
	}
	if at := strings.IndexByte(target, '?'); at >= 0 {
		return target[:at], target[at:]
	}
	return target, ""
}

func hasEffect(method string) bool {
	switch asciiUpper(method) {
	case "GET", "HEAD", "OPTIONS", "TRACE", "CONNECT":
		return false
	}
	return true
}

// hasKeyField reports if a field of the key is there, in any spelling.
func (c *compiled) hasKeyField(header http.Header) bool {
	for _, own := range c.profile.KeyHeader {
		if len(header[own]) > 0 {
			return true
		}
		for name := range header {
			if isOtherSpelling(name, own) {
				return true
			}
		}
	}
	return false
}

func (p *protected) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path, query := targetOf(r)
	switch {
	case !strings.HasPrefix(path, "/") && hasEffect(r.Method):
	case !p.covers(r.Method) && !(p.profile.UncoveredMethods == "refuse" && hasEffect(r.Method) && p.hasKeyField(r.Header)):
		p.pass(w, r, "")
		return
	case !p.hasKeyField(r.Header) && !p.bodyHasKey() && !p.profile.RequireKey:
		p.pass(w, r, "")
		return
	}
	k := &keyed{protected: p, w: w, r: r, path: path, query: query}
	k.serve()
}

// pass lets a request through without protection. It returns the status of the response, or 0 if the connection was hijacked.
func (p *protected) pass(w http.ResponseWriter, r *http.Request, status string) int {
	defer removeFiles(r)
	passing := &passingWriter{ResponseWriter: w, status: status}
	p.next.ServeHTTP(withInterfaces(passing, w), r)
	if !passing.isHijacked {
		passing.begin(http.StatusOK)
	}
	return passing.code
}

// removeFiles removes the files of uploads that a handler has read, as net/http does: that knows only its own request, and not a copy.
func removeFiles(r *http.Request) {
	if r.MultipartForm != nil {
		r.MultipartForm.RemoveAll()
	}
}

func (k *keyed) refuse(refusal *refusal) {
	k.warnOf(refusal.condition.Name)
	k.setEcho()
	isFromSidecar := k.r.Header.Get("Oncegate-Token") != "" || k.r.Header.Get("Oncegate-Record") != ""
	if isFromSidecar && k.protected.sidecarSeen.CompareAndSwap(false, true) {
		k.engine.log.Printf("oncegate: a request came from a sidecar of Oncegate (Oncegate-Record), and this middleware protects it again: " +
			"use one of them. On one store with one service name, nothing is executed")
	}
	if (isFromSidecar || AttemptFrom(k.r.Context()) != nil) && nothingExecuted(refusal.condition.Name) {
		// The sidecar in front, or an outer middleware, must not keep this as the response to the key. It removes the field.
		k.w.Header().Set("Idempotency-Store", "release")
	}
	refusal.write(k.w, k.compiled, k.record())
}

// record is the identifier of the record as a text; "" if it is not known yet.
func (k *keyed) record() string {
	if !k.hasID {
		return ""
	}
	return k.id.String()
}

// warnOf logs the refusals that someone has to do something about, at most once a minute each.
func (k *keyed) warnOf(problem string) {
	text := ""
	switch problem {
	case "scope-not-set":
		text = "requests are refused (scope-not-set), because they have a credential other than Authorization, and Settings.Scope and Settings.Caller are not " +
			"set: set one to what tells callers apart, such as required-cookie:NAME or required-header:NAME with a value that is the same in a retry"
	case "host-differs":
		text = "requests that came first to another host (name or port) are refused (host-differs): if clients reach this service under several names or " +
			"ports, set Settings.Authority to ignore; if each host is a tenant, to scope"
	case "outcome-unknown":
		text = "it is not known if a request took effect, and its retries are refused (outcome-unknown): find out, and settle the record with " +
			"`oncegate keys resolve` through a sidecar on this store, or with the methods of MemoryStore; record " + k.record()
	}
	if text != "" && k.engine.throttle.allow(problem, time.Minute) {
		k.engine.log.Printf("oncegate: %s", text)
	}
}

func (k *keyed) setEcho() {
	if k.echo.Name != "" {
		k.w.Header().Set(k.echo.Name, k.echo.Value)
	}
}

func (k *keyed) invalidKey(err error) *refusal {
	return refuse("key-invalid").with(k.grammar.explain(err))
}

// keyInHead reads the key in the header fields; "" if there is none.
func (k *keyed) keyInHead() (string, *refusal) {
	header := k.r.Header
	for name := range header {
		for _, own := range k.profile.KeyHeader {
			if isOtherSpelling(name, own) && !isKeyHeader(k.profile.KeyHeader, name) {
				return "", k.invalidKey(errSpelling)
			}
		}
	}
	for _, own := range k.profile.KeyHeader {
		if len(header[own]) > 1 {
			return "", k.invalidKey(errSeveralKeys)
		}
	}
	key, echo := "", Field{}
	for _, own := range k.profile.KeyHeader {
		if len(header[own]) == 0 {
			continue
		}
		other, err := k.grammar.parse(header[own][0])
		if err != nil {
			return "", k.invalidKey(err)
		}
		if key != "" && key != other {
			return "", k.invalidKey(errDifferingKeys)
		}
		if key == "" {
			key, echo = other, Field{own, header[own][0]}
		}
	}
	if key != "" && k.profile.EchoKey {
		k.echo = echo
	}
	return key, nil
}

func (k *keyed) callerOf() ([]identity, *refusal) {
	return k.caller.of(k.r, authorityOf(k.r), k.Authority == "scope", k.profile.KeyHeader)
}

func (k *keyed) serve() {
	if !strings.HasPrefix(k.path, "/") {
		k.refuse(refuse("request-malformed").with(detailNoPath))
		return
	}
	if !k.covers(k.r.Method) {
		k.refuse(refuse("key-unsupported"))
		return
	}
	key, caller, tag := "", []identity(nil), [8]byte{}
	isEarly := !k.bodyHasKey()
	if isEarly {
		var keyRefusal, callerRefusal *refusal
		key, keyRefusal = k.keyInHead()
		if caller, callerRefusal = k.callerOf(); callerRefusal != nil {
			k.refuse(callerRefusal)
			return
		}
		if keyRefusal == nil && key == "" {
			keyRefusal = refuse("key-missing")
		}
		if keyRefusal != nil {
			k.refuse(keyRefusal)
			return
		}
	}
	hadEnded := hasSeenEnd(k.r.Body)
	body, held, bodyRefusal := k.readBody()
	defer k.limits.hold(&k.limits.requestBytes, -held, 0)
	if bodyRefusal != nil {
		k.refuse(bodyRefusal)
		return
	}
	if len(body) == 0 && k.wasBodyRead(hadEnded) {
		k.refuse(refuse("request-incomplete").with(detailBodyWasRead))
		return
	}
	decoded, coding := k.decode(body)
	if !isEarly {
		natural, refusal := k.naturalKeyOf(decoded, coding)
		if refusal != nil {
			if refusal.condition.Name == "key-missing" && !k.profile.RequireKey {
				k.protected.pass(k.w, withBody(k.r, k.r.Context(), body), "")
				return
			}
			k.refuse(refusal)
			return
		}
		key = natural
		if caller, refusal = k.callerOf(); refusal != nil {
			k.refuse(refusal)
			return
		}
	}
	scope := k.engine.scopeOf(caller)
	secret := k.engine.secret
	tag = secret.callerTag(scope)
	id, operation := k.locate(scope, key)
	if outer := AttemptFrom(k.r.Context()); outer != nil && outer.permit.id == id && (outer.permit.engine == k.engine || isShared(k.engine.store)) {
		// The middleware is there twice, and this request has the key already.
		own := withBody(k.r, k.r.Context(), body)
		defer removeFiles(own)
		k.next.ServeHTTP(k.w, own)
		return
	}
	isOfSidecar := k.r.Header.Get("Oncegate-Record") == id.String()
	if isOfSidecar && k.engine.throttle.allow("sidecar", time.Minute) {
		k.engine.log.Printf("oncegate: a sidecar in front has claimed the same records on the same store, so this service executes nothing: let one of the two " +
			"protect a request, or give them different names of the service")
	}
	if !k.limits.enter(k.compiled, tag) {
		k.refuse(refuse("overloaded").with(detailTooMany).after(1))
		return
	}
	defer k.limits.leave(tag)
	k.id, k.hasID, k.tag = id, true, tag
	keyTag := secret.keyTag(key)
	fingerprint := k.fingerprintOf(decoded, coding)
	var watch *ownerWatch
	if k.FailOpen {
		watch = k.engine.watchOwner(id)
		defer watch.end()
	}
	leave := k.engine.enter()
	claimed, err := k.engine.claim(k.r.Context(), id, Claim{Fingerprint: fingerprint, CallerTag: tag, KeyTag: &keyTag, Operation: cutOperation(operation)}, k.policy)
	if err == nil && claimed.Outcome == Execute {
		defer leave()
		k.execute(claimed.permit, body)
		return
	}
	leave()
	if err != nil {
		k.claimFailed(err, watch, body)
		return
	}
	switch claimed.Outcome {
	case Replay:
		k.replay(claimed.Response)
	case InProgress:
		if isOfSidecar {
			// A retry would find the same.
			k.refuse(refuse("store-unavailable").with(detailSameRecord).after(30))
			return
		}
		k.refuse(refuse("request-in-progress").after(retryAfterSeconds(claimed.LeaseLeft, claimed.runningFor)))
	case Mismatch:
		k.refuse(k.mismatch(id, fingerprint))
	case Unknown:
		k.refuse(refuse("outcome-unknown"))
	default:
		k.refuse(refuse("replay-unavailable"))
	}
}

// retryAfterSeconds: nearly every request ends within a second, and one that has been running for some time will most likely run as long
// again. It need not be longer than the lease.
func retryAfterSeconds(leaseLeft, runningFor time.Duration) int {
	seconds := int(runningFor / time.Second)
	if seconds > 5 {
		seconds = 5
	}
	if left := int((leaseLeft + time.Second - 1) / time.Second); seconds > left {
		seconds = left
	}
	if seconds < 1 {
		seconds = 1
	}
	return seconds
}

func (k *keyed) claimFailed(err error, watch *ownerWatch, body []byte) {
	kind := kindOf(err)
	isFull := errors.Is(err, errFull)
	opens := k.FailOpen && isOutOfReach(err)
	var run *openRun
	if opens {
		run = watch.open()
	}
	// The guard of the id secret has said why.
	if err != errBreakerOpen && err != errBreakerBroken && !errors.Is(err, ErrIDSecret) && (kind == RecordCorrupt || k.engine.throttle.allow(fmt.Sprint("claim ", kind), time.Second)) {
		k.engine.log.Printf("%v (record %s)", err, k.record())
	}
	switch {
	case kind == RecordCorrupt:
		k.refuse(refuse("record-corrupt"))
	case kind == ResponseSealed:
		k.refuse(refuse("response-sealed").after(30))
	case opens && run == nil:
		// Another attempt executes it, or has executed it.
		k.refuse(refuse("request-in-progress").after(1))
	case opens:
		if k.engine.throttle.allow("failing open", time.Second) {
			k.engine.log.Printf("oncegate: requests with a key are executed without protection, because the store is not available (FailOpen)")
		}
		k.setEcho()
		k.executeOpen(run, body)
	case isFull:
		k.refuse(refuse("store-unavailable").with(detailStoreFull).after(30))
	default:
		k.refuse(refuse("store-unavailable").after(1))
	}
}

// mismatch is the refusal of a request that differs from the one that the key was used for. If only the host differs, it may be one
// request that was sent to two addresses of the service: with a new key, it would take effect twice.
func (k *keyed) mismatch(id RecordID, own Fingerprint) *refusal {
	if k.Authority == "compare" {
		info, err := k.engine.lookup(k.r.Context(), id)
		if err != nil {
			return refuse("store-unavailable").after(1)
		}
		if info != nil && differsInHostOnly(info.Fingerprint, own) {
			return refuse("host-differs")
		}
	}
	if len(k.natural) > 0 {
		return refuse("key-reused").with(detailReusedMembers)
	}
	return refuse("key-reused")
}

// readBody reads the whole body. held is the memory that it counts for.
func (k *keyed) readBody() (body []byte, held int, _ *refusal) {
	if k.r.Body == nil || k.r.Body == http.NoBody {
		return nil, 0, nil
	}
	if k.r.ContentLength > int64(k.MaxRequestBody) {
		return nil, 0, k.tooLarge(int64(k.MaxRequestBody))
	}
	done := make(chan bodyRead, 1)
	go func() {
		var got bodyRead
		defer func() {
			// A panic of the body's reader belongs to the goroutine of the request.
			if got.isPanic = !got.isOver; got.isPanic {
				got.panic, got.stack = recover(), debug.Stack()
			}
			done <- got
		}()
		k.readToEnd(&got)
		got.isOver = true
	}()
	timer := time.NewTimer(k.BodyTimeout)
	defer timer.Stop()
	select {
	case got := <-done:
		if got.isPanic {
			k.limits.hold(&k.limits.requestBytes, -got.held, 0)
			if got.panic == nil {
				// Its goroutine ended.
				return nil, 0, refuse("request-incomplete")
			}
			panic(got.panic)
		}
		if got.refusal != nil && got.refusal.condition.Name == "overloaded" {
			// Otherwise net/http sends the refusal only after the client has sent the rest of its body.
			k.w.Header().Set("Connection", "close")
		}
		return got.body, got.held, got.refusal
	case <-timer.C:
		// The connection cannot be used again: the rest of the body may still come.
		k.w.Header().Set("Connection", "close")
		go func() {
			got := <-done
			k.limits.hold(&k.limits.requestBytes, -got.held, 0)
			if got.panic != nil && got.panic != http.ErrAbortHandler {
				log.Printf("oncegate: panic reading the body of a request that was refused before: %v\n%s", got.panic, got.stack)
			}
		}()
		return nil, 0, refuse("request-incomplete")
	}
}

const detailBodyWasRead = "Another handler of the server has read the body before it could be compared. Nothing was executed."

// wasBodyRead reports if a handler in front has read the body of which nothing was left: with an empty one, all requests would be the same. One
// without a length (chunked, HTTP/2) may be empty. Behind an outer middleware, that has compared it.
func (k *keyed) wasBodyRead(hadEnded bool) bool {
	isForm := len(k.r.PostForm) > 0 || k.r.MultipartForm != nil
	if !isForm && (k.r.ContentLength == 0 || k.r.ContentLength < 0 && !hadContent(k.r.Body, hadEnded)) || AttemptFrom(k.r.Context()) != nil {
		return false
	}
	if k.engine.throttle.allow("body was read", time.Minute) {
		k.engine.log.Printf("oncegate: requests are refused (request-incomplete), because a handler in front of the middleware has read their body, such as " +
			"with FormValue: put the middleware in front of it, or let it set Request.Body to what it has read")
	}
	return true
}

// bodyRead is a body that was read, or the refusal if it could not be.
type bodyRead struct {
	body    []byte
	held    int
	refusal *refusal
	// isPanic is true if the reader panicked, or ended its goroutine (nil).
	isPanic, isOver bool
	panic           interface{}
	stack           []byte
}

// maxFirstBuffer bounds the buffer for a body of which nothing has arrived yet.
const maxFirstBuffer = 2 << 10

func (k *keyed) readToEnd(got *bodyRead) {
	size := 512
	if length := k.r.ContentLength; 0 < length && length < maxFirstBuffer {
		// One more, to read the end.
		size = int(length) + 1
	}
	buffer := make([]byte, 0, size)
	for {
		if len(buffer) == cap(buffer) {
			buffer = append(buffer, 0)[:len(buffer)]
		}
		// Each part counts as soon as it is there: a slow client must not fill memory that no budget knows.
		n, err := k.r.Body.Read(buffer[len(buffer):cap(buffer)])
		buffer = buffer[:len(buffer)+n]
		if !k.limits.hold(&k.limits.requestBytes, n, k.RequestBudget) {
			got.refusal = refuse("overloaded").with(detailRequestBudget).after(1)
			return
		}
		got.held += n
		switch {
		case len(buffer) > k.MaxRequestBody:
			got.refusal = k.tooLarge(int64(k.MaxRequestBody))
			return
		case err == io.EOF:
			got.body = buffer
			return
		case err != nil:
			got.refusal = refuse("request-incomplete")
			if limit := new(http.MaxBytesError); errors.As(err, &limit) {
				// http.MaxBytesHandler in front.
				got.refusal = k.tooLarge(limit.Limit)
			}
			return
		}
	}
}

func (k *keyed) tooLarge(max int64) *refusal {
	refusal := refuse("request-too-large")
	return refusal.with(fmt.Sprintf("%s At most %d bytes are accepted.", refusal.condition.Detail, max))
}

// withBody is the request with the body that was read, and with this context.
func withBody(r *http.Request, ctx context.Context, body []byte) *http.Request {
	own := r.WithContext(ctx)
	own.Body = http.NoBody
	if len(body) > 0 {
		read := new(bodyReader)
		read.Reset(body)
		own.Body = read
	}
	own.ContentLength, own.TransferEncoding = int64(len(body)), nil
	return own
}

// bodyReader reads a body that is in memory.
type bodyReader struct{ bytes.Reader }

func (*bodyReader) Close() error { return nil }

// decode undoes the content coding of a body, so that the same body compressed twice is the same body. One that cannot be decoded stays as
// it is, and its coding is returned. So does one whose result would be too large.
func (k *keyed) decode(body []byte) ([]byte, string) {
	values := k.r.Header.Values("Content-Encoding")
	if len(values) > 1 {
		return body, strings.Join(values, ", ")
	}
	coding := trimASCII(k.r.Header.Get("Content-Encoding"))
	max := len(body) * maxDecodedRatio
	if max < decodedFree {
		max = decodedFree
	}
	if max > k.MaxRequestBody {
		max = k.MaxRequestBody
	}
	read := func(open func(io.Reader) (io.Reader, error)) ([]byte, bool, bool) {
		source := bytes.NewReader(body)
		reader, err := open(source)
		if err != nil {
			return nil, false, false
		}
		out, err := io.ReadAll(io.LimitReader(reader, int64(max)+1))
		return out, err == nil && len(out) <= max && source.Len() == 0, len(out) > max
	}
	switch asciiLower(coding) {
	case "", "identity":
		return body, ""
	case "gzip", "x-gzip":
		if out, ok, _ := read(func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }); ok {
			return out, ""
		}
	case "deflate":
		// RFC 9110, 8.4.1.2: zlib; some clients send bare deflate anyway.
		out, ok, isTooLarge := read(func(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) })
		if !ok && !isTooLarge {
			out, ok, _ = read(func(r io.Reader) (io.Reader, error) { return flate.NewReader(r), nil })
		}
		if ok {
			return out, ""
		}
	}
	return body, coding
}

func (k *keyed) naturalKeyOf(body []byte, coding string) (string, *refusal) {
	defer whileLarge(body)()
	if coding != "" && len(body) > 0 {
		return "", k.invalidKey(errUnreadable)
	}
	missing := func(why string) *refusal {
		var names []string
		for _, member := range k.natural {
			names = append(names, member.text)
		}
		return refuse("key-missing").with("The key of this operation is built from members of its JSON body (" + strings.Join(names, ", ") +
			"), and " + why + ". Nothing was executed.")
	}
	contentType := joinedLines(k.r.Header, "Content-Type")
	if !mayBeJSON(contentType, body) {
		return "", missing(errNotJSON.Error())
	}
	// It is read whatever its type, unless the type names another charset.
	parameters := ""
	if at := strings.IndexByte(contentType, ';'); at >= 0 {
		parameters = contentType[at:]
	}
	key, err := k.natural.of("application/json"+parameters, body)
	if err == errNotJSON {
		return "", k.invalidKey(errUnreadable)
	}
	if err != nil {
		return "", missing(err.Error())
	}
	k.echo = Field{k.profile.KeyHeader[0], `"` + key + `"`}
	return key, nil
}

// mayBeJSON reports if a service may read this body as JSON, by its type or by its first character.
func mayBeJSON(contentType string, body []byte) bool {
	if len(body) > 0 && strings.Contains(asciiLower(contentType), "json") {
		return true
	}
	for _, c := range bytes.TrimPrefix(body, []byte("\xef\xbb\xbf")) {
		// In UTF-16 and UTF-32, marks and zeros precede it.
		if c > ' ' && c != 0xfe && c != 0xff {
			return c == '{' || c == '['
		}
	}
	return false
}

// largeBodies bounds the large bodies that are read as JSON or as a form at the same time: that takes many times their size, and more of them than
// processors would not be faster.
var largeBodies = make(chan struct{}, runtime.GOMAXPROCS(0))

const largeBody = 64 << 10

func whileLarge(body []byte) (leave func()) {
	if len(body) < largeBody {
		return func() {}
	}
	largeBodies <- struct{}{}
	return func() { <-largeBodies }
}

// locate returns the identifier of the record, and the operation that operators see.
func (k *keyed) locate(scope keyScope, key string) (RecordID, string) {
	method, path := asciiUpper(k.r.Method), canonicalPath(k.path, k.ExactSlash)
	var operation []string
	if k.profile.KeyScope == "endpoint" {
		operation = []string{method, path}
	}
	for _, name := range k.profile.KeyScopeHeader {
		var values []string
		eachField(k.r.Header, func(own string) bool { return asciiLower(own) == asciiLower(name) || isOtherSpelling(own, name) },
			func(_ string, own []string) { values = append(values, own...) })
		operation = append(operation, asciiLower(name), strings.Join(values, ", "))
	}
	return k.engine.secret.record(scope.record(operation, key)), method + " " + path
}

func (k *keyed) fingerprintOf(body []byte, coding string) Fingerprint {
	defer whileLarge(body)()
	in := fingerprintInput{method: asciiUpper(k.r.Method), target: canonicalPath(k.path, k.ExactSlash) + k.query}
	for _, list := range [][]string{k.FingerprintHeaders, k.profile.Fingerprint.Headers} {
		for _, name := range list {
			for _, value := range k.r.Header.Values(name) {
				in.headers = append(in.headers, formPair{asciiLower(name), value})
			}
		}
	}
	eachField(k.r.Header, isOverride, func(name string, values []string) {
		for _, value := range values {
			in.headers = append(in.headers, formPair{asciiLower(name), value})
		}
	})
	if !k.comparesNothing {
		in.contentType, in.coding, in.body = joinedLines(k.r.Header, "Content-Type"), coding, body
	}
	secret := k.engine.secret
	fingerprint := secret.fingerprint(k.rules.fingerprint(in))
	if k.Authority == "compare" {
		k.withHost(&fingerprint, authorityOf(k.r))
	}
	return fingerprint
}

// hostPart is the part of a fingerprint that a host makes.
type hostPart struct {
	host   string
	digest [hostBytes]byte
}

// withHost puts the host into a fingerprint. Most requests have the host of the last one.
func (p *protected) withHost(fingerprint *Fingerprint, host string) {
	part := p.lastHost.Load()
	if part == nil || part.host != host {
		part = &hostPart{strings.Clone(host), hostDigest(p.engine.secret, host)}
		if len(host) <= maxCachedHost {
			p.lastHost.Store(part)
		}
	}
	copy(fingerprint[len(fingerprint)-hostBytes:], part.digest[:])
}

const maxCachedHost = 256

// execute runs the handler under a permit. The handler is not stopped when the client hangs up.
func (k *keyed) execute(p *permit, body []byte) {
	if err := p.confirm(); err != nil {
		if p.release() == settleFenced {
			k.refuse(refuse("request-in-progress").after(1))
		} else {
			k.refuse(refuse("store-unavailable").after(1))
		}
		return
	}
	run := &execution{keyed: k, permit: p, header: http.Header{}}
	if header := k.w.Header(); len(header) > 0 {
		run.header, run.outer = header.Clone(), header.Clone()
	}
	own := withAttempt(k.r.Context(), p)
	own.Context, run.cancel = context.WithCancel(own.Context)
	run.over = own.Context.Done()
	request := withBody(k.r, own, body)
	defer removeFiles(request)
	defer run.hasEnded()
	// The handler has ended if it returns, panics, or ends its goroutine.
	isReturned := false
	defer func() {
		if isReturned {
			return
		}
		value := recover()
		run.cancel()
		// A proxy aborts a response that its backend has cut short.
		run.fail(value != http.ErrAbortHandler || run.status == 0 || run.treatment == treatRelease)
		if value == http.ErrAbortHandler || run.isStreaming && run.instead == nil {
			panic(http.ErrAbortHandler)
		}
		if value == nil {
			return
		}
		stack := debug.Stack()
		if k.Panicked != nil {
			k.Panicked(k.r, value, stack)
		} else {
			log.Printf("oncegate: panic serving record %s: %v\n%s", k.record(), value, stack)
		}
	}()
	defer run.end()
	k.next.ServeHTTP(withInterfaces(guardedWriter{run}, k.w), request)
	run.endReturned()
	isReturned = true
	// As net/http does: what the handler left open, such as a transaction, ends.
	run.cancel()
	run.finish()
}

// treatment is what becomes of the record.
type treatment int

const (
	treatReplay treatment = iota
	treatRelease
	treatTombstone
	treatUnknown
)

// execution writes the response of a handler into memory, stores it, and then sends it.
type execution struct {
	*keyed
	// mu is held while the handler writes. isOver is true after it has returned, and isEmpty if it has written nothing by then.
	mu      sync.Mutex
	isOver  bool
	isEmpty bool
	permit  *permit
	// cancel ends the context of the handler, and closes over. ended is made for a stream, and closed when the handler has ended.
	cancel context.CancelFunc
	over   <-chan struct{}
	ended  chan struct{}
	// header is what the handler sets; sent is what it was when the status was written. outer is what handlers in front had set before.
	header, sent, outer http.Header
	status              int
	body                bytes.Buffer
	directive           string
	treatment           treatment
	isStreaming         bool
	isHijacked          bool
	isSettled           bool
	// instead is the answer to a success that did not take place, because the transaction of the handler was not committed.
	instead *refusal
	length  int64 // the Content-Length that the handler set, or -1
	written int64
}

// end is called when the handler has returned or panicked: nothing it has left running changes the response any more.
func (x *execution) end() {
	x.mu.Lock()
	x.isOver = true
	x.mu.Unlock()
}

func (x *execution) endReturned() {
	x.mu.Lock()
	x.isOver, x.isEmpty = true, x.status == 0 && !x.isHijacked
	x.mu.Unlock()
}

func (x *execution) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("invalid WriteHeader code %v", status))
	}
	// Interim responses are not passed on.
	if x.status != 0 || x.isHijacked || status < 200 && status != http.StatusSwitchingProtocols {
		return
	}
	x.status, x.length = status, -1
	if text := x.header.Get("Content-Length"); text != "" {
		if n, err := strconv.ParseInt(text, 10, 64); err == nil && n >= 0 {
			x.length = n
		} else {
			x.header.Del("Content-Length")
		}
	}
	x.sent = x.header.Clone()
	x.directive = takeDirective(x.sent)
	delete(x.sent, "Idempotency-Status")
	delete(x.sent, x.marker.Name)
	x.treatment = x.treat()
	x.addFields("response", x.sent, false)
	if x.treatment == treatReplay && status >= 500 {
		x.addFields("kept-server-error", x.sent, false)
	}
	if cannotBeStored(status, x.sent) {
		if x.treatment == treatReplay {
			x.treatment = treatTombstone
		}
		x.stream()
	}
}

// takeDirective removes the field Idempotency-Store, and returns its word. Contradictions are ignored.
func takeDirective(header http.Header) string {
	if len(header["Idempotency-Store"]) == 0 {
		delete(header, "Idempotency-Store")
		return ""
	}
	word := ""
	for i, line := range header.Values("Idempotency-Store") {
		own := asciiLower(trimASCII(line))
		switch own {
		case "replay", "release", "tombstone", "unknown":
		default:
			own = ""
		}
		if i > 0 && own != word {
			word = ""
			break
		}
		word = own
	}
	header.Del("Idempotency-Store")
	return word
}

func (x *execution) treat() treatment {
	isServerError := x.status >= 500 && x.status <= 599
	switch {
	case x.directive == "replay":
		return treatReplay
	case x.directive == "release":
		return treatRelease
	case x.directive == "tombstone":
		return treatTombstone
	case x.directive == "unknown":
		return treatUnknown
	case x.redirectsToItself(), x.releases[x.status], isServerError && x.profile.ServerErrors == "release":
		return treatRelease
	}
	return treatReplay
}

// redirectsToItself reports if the response leads the client to another spelling of the same path, or to another host. If it were kept,
// the request that follows would be redirected again, for ever.
func (x *execution) redirectsToItself() bool {
	keepsMethod := x.status == http.StatusTemporaryRedirect || x.status == http.StatusPermanentRedirect
	if !keepsMethod && x.status != http.StatusMovedPermanently || x.sent.Get("Location") == "" {
		return false
	}
	location, err := url.Parse(x.sent.Get("Location"))
	if err != nil {
		return false
	}
	path := location.EscapedPath()
	if path == "" {
		path = "/"
	}
	return canonicalPath(path, x.ExactSlash) == canonicalPath(x.path, x.ExactSlash) && (keepsMethod || path != x.path)
}

// cannotBeStored reports if a response has no end, or switches to another protocol.
func cannotBeStored(status int, header http.Header) bool {
	essence, _, _ := strings.Cut(header.Get("Content-Type"), ";")
	essence = asciiLower(trimASCII(essence))
	return status == http.StatusSwitchingProtocols || essence == "text/event-stream" || essence == "multipart/x-mixed-replace" ||
		strings.HasPrefix(essence, "application/grpc")
}

func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}

func (x *execution) Write(data []byte) (int, error) {
	if x.isHijacked {
		return 0, http.ErrHijacked
	}
	if x.status == 0 {
		x.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(x.status) {
		return 0, http.ErrBodyNotAllowed
	}
	if x.length >= 0 && x.written+int64(len(data)) > x.length {
		return 0, http.ErrContentLength
	}
	x.written += int64(len(data))
	if x.isStreaming && x.instead != nil {
		return len(data), nil
	}
	if x.isStreaming {
		return x.w.Write(data)
	}
	x.body.Write(data)
	if x.body.Len() > x.MaxResponseBody {
		if x.treatment == treatReplay {
			x.treatment = treatTombstone
		}
		x.stream()
		return len(data), x.sendBody()
	}
	return len(data), nil
}

// sniff sets the media type as net/http does, so that the record has it, too. A coding that a handler in front has announced is not that of this body.
func (x *execution) sniff() {
	_, isSet := x.sent["Content-Type"]
	if coding := x.sent.Get("Content-Encoding"); !isSet && x.body.Len() > 0 && (coding == "" || coding == x.outer.Get("Content-Encoding")) {
		x.sent.Set("Content-Type", http.DetectContentType(x.body.Bytes()))
	}
}

// readerFrom is what a stream may be copied to without a buffer, or nil.
func (x *execution) readerFrom() io.ReaderFrom {
	if from, ok := x.w.(io.ReaderFrom); ok && x.isStreaming && x.instead == nil && x.length < 0 {
		return from
	}
	return nil
}

func (x *execution) sendBody() error {
	if x.instead != nil {
		x.body.Reset()
		return nil
	}
	_, err := x.w.Write(x.body.Bytes())
	x.body.Reset()
	return err
}

// stream begins to send a response that is not kept. The record says that the operation was done, so that duplicates need not wait for an
// end that may never come. A key that is to be free again, or whose outcome is to be unknown, stays claimed until the handler has ended.
func (x *execution) stream() {
	if x.isStreaming {
		return
	}
	status := ""
	x.sniff()
	if x.treatment == treatTombstone {
		status = x.settle()
	}
	x.isStreaming = true
	if x.instead != nil {
		// Nothing of the success is sent.
		x.refuse(x.instead)
	} else {
		x.sendHeader(status)
	}
	x.ended = make(chan struct{})
	go x.endWithClient(streamGrace)
}

// streamGrace is the time that the handler of a stream has after its client has gone.
var streamGrace = time.Minute

// endWithClient ends the context of a stream's handler some time after its client has gone. The stream may have no other end.
func (x *execution) endWithClient(grace time.Duration) {
	select {
	case <-x.ended:
		return
	case <-x.r.Context().Done():
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-x.ended:
	case <-timer.C:
		x.cancel()
	}
}

func (x *execution) hasEnded() {
	if x.ended != nil {
		close(x.ended)
	}
}

// sendHeader sends the status and the fields of the handler.
func (x *execution) sendHeader(status string) {
	header := x.w.Header()
	for name := range header {
		delete(header, name)
	}
	for name, values := range x.sent {
		header[name] = values
	}
	if status != "" {
		header.Set("Idempotency-Status", status)
	}
	x.setEcho()
	x.w.WriteHeader(x.status)
}

// settle ends the record, once. It returns the Idempotency-Status of the response.
func (x *execution) settle() string {
	if x.isSettled {
		return ""
	}
	x.isSettled = true
	end := x.conclude()
	isResult := x.status < 400 && (x.treatment == treatReplay || x.treatment == treatTombstone)
	switch {
	case !isResult:
	case end == settleRolledBack:
		x.instead = refuse("handler-failed")
	case end == settleLeft:
		// Its transaction is still open.
		x.instead = refuse("request-in-progress").after(1)
	}
	return end.status()
}

// conclude ends the record as the treatment says.
func (x *execution) conclude() settleOutcome {
	if x.status >= 500 && x.treatment == treatReplay && x.permit.isInTransaction() {
		// If the transaction was committed, the error is no result to keep.
		x.treatment = treatRelease
	}
	switch x.treatment {
	case treatRelease:
		return x.permit.release()
	case treatUnknown:
		return x.permit.doubt()
	case treatReplay:
		response := StoredResponse{Status: x.status, Headers: keptOf(x.ofHandler(), x.stored), Trailers: x.trailers(), Body: x.body.Bytes()}
		if encoded, err := response.Encode(); err == nil {
			return x.permit.complete(Completed, encoded)
		}
	}
	return x.permit.complete(Tombstone, nil)
}

// bodyFields describe the bytes of the body.
var bodyFields = [...]string{"Content-Encoding", "Content-Length", "Etag"}

// ofHandler are the fields that were sent, without those that describe what a handler in front makes of the body, such as the coding of one
// that compresses: it does that for a replay as its request wants it.
func (x *execution) ofHandler() http.Header {
	own := x.sent
	for _, name := range bodyFields {
		if outer := x.outer[name]; len(outer) > 0 && strings.Join(outer, ",") == strings.Join(own[name], ",") {
			if own = own.Clone(); own != nil {
				delete(own, name)
			}
		}
	}
	return own
}

// trailers are the trailer fields that are kept.
func (x *execution) trailers() (kept []Field) {
	add := func(name string, values []string) {
		for _, value := range values {
			if name := asciiLower(name); !isNeverKept(name) {
				kept = append(kept, Field{name, value})
			}
		}
	}
	for _, line := range x.sent.Values("Trailer") {
		for _, name := range strings.Split(line, ",") {
			name = http.CanonicalHeaderKey(trimASCII(name))
			add(name, x.header[name])
		}
	}
	for name, values := range x.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			add(name[len(http.TrailerPrefix):], values)
		}
	}
	return kept
}

// finish ends the record and sends the response, when the handler has returned.
func (x *execution) finish() {
	if x.isHijacked || x.isStreaming && x.instead != nil {
		return
	}
	if x.status == 0 {
		x.WriteHeader(http.StatusOK)
	}
	if x.length >= 0 && x.written < x.length && bodyAllowed(x.status) && x.r.Method != http.MethodHead {
		// Half of the response would look like the whole. Its handler has returned, so only what its status says frees the key.
		x.fail(x.treatment == treatRelease)
		if x.isStreaming {
			panic(http.ErrAbortHandler)
		}
		return
	}
	if !x.isStreaming {
		x.sniff()
	}
	status := x.settle()
	if x.isStreaming {
		x.sendTrailers()
		return
	}
	if x.instead != nil {
		x.refuse(x.instead)
		return
	}
	x.limits.addResponse(x.tag, x.body.Len())
	defer x.limits.addResponse(x.tag, -x.body.Len())
	if _, isSet := x.sent["Content-Type"]; !isSet {
		x.sent["Content-Type"] = nil
	}
	x.announceTrailers()
	x.sendHeader(status)
	x.writeBody(x.body.Bytes())
	x.sendTrailers()
}

// announceTrailers announces the trailer fields that the handler has not: without that, HTTP/1.1 has them only after a flush.
func (x *execution) announceTrailers() {
	isAnnounced := map[string]bool(nil)
	for name, values := range x.header {
		own := http.CanonicalHeaderKey(strings.TrimPrefix(name, http.TrailerPrefix))
		if !strings.HasPrefix(name, http.TrailerPrefix) {
			continue
		}
		if isAnnounced == nil {
			isAnnounced = map[string]bool{}
			for _, line := range x.sent.Values("Trailer") {
				for _, other := range strings.Split(line, ",") {
					isAnnounced[http.CanonicalHeaderKey(trimASCII(other))] = true
				}
			}
		}
		delete(x.header, name)
		if isAnnounced[own] {
			// net/http sends both, too.
			x.header[own] = append(values[:len(values):len(values)], x.header[own]...)
			continue
		}
		isAnnounced[own] = true
		x.sent.Add("Trailer", own)
		x.header[own] = values
	}
}

// sendTrailers copies fields that the handler has set after its status.
func (x *execution) sendTrailers() {
	for _, line := range x.sent.Values("Trailer") {
		for _, name := range strings.Split(line, ",") {
			name = http.CanonicalHeaderKey(trimASCII(name))
			if values, ok := x.header[name]; ok {
				x.w.Header()[name] = values
			}
		}
	}
	for name, values := range x.header {
		if strings.HasPrefix(name, http.TrailerPrefix) {
			x.w.Header()[name] = values
		}
	}
}

// fail ends an attempt whose handler ended without a response, so that its effect is unknown. mayFree says that ServerErrors counts.
func (x *execution) fail(mayFree bool) {
	refusal := refuse("outcome-unknown")
	if !x.isSettled {
		x.isSettled = true
		if mayFree && x.profile.ServerErrors == "release" || x.permit.isInTransaction() {
			refusal = x.refusalAfter(x.permit.release())
		} else {
			x.permit.fail()
		}
	}
	if !x.isStreaming && !x.isHijacked {
		x.refuse(refusal)
	}
}

// refusalAfter tells the client of a handler that has failed what became of its key.
func (x *execution) refusalAfter(end settleOutcome) *refusal {
	switch {
	case end == settleLeft || end == settleFenced:
		// The key stays claimed, or another attempt owns the record: a retry gets the outcome.
		return refuse("request-in-progress").after(1)
	case !x.permit.isInTransaction() || end == settleRolledBack:
		return refuse("handler-failed")
	case end == settleDone:
		return refuse("replay-unavailable")
	}
	return refuse("request-in-progress").after(1)
}

func (k *keyed) replay(encoded []byte) {
	stored, err := DecodeResponse(encoded)
	if err != nil {
		k.refuse(refuse("record-corrupt"))
		return
	}
	if stored.isSealed() {
		k.refuse(refuse("response-sealed").after(30))
		return
	}
	if !k.limits.holdResponse(k.compiled, k.tag, len(stored.Body)) {
		k.refuse(refuse("overloaded").with(detailResponseBudget).after(1))
		return
	}
	defer k.limits.addResponse(k.tag, -len(stored.Body))
	header := k.w.Header()
	restore(stored.Headers, header)
	if _, isSet := header["Content-Type"]; !isSet {
		header["Content-Type"] = nil
	}
	for name := range k.profile.Headers["response"] {
		if header.Get(name) == "" {
			k.addFields("response", header, false)
		}
	}
	header.Set(k.marker.Name, k.marker.Value)
	k.setEcho()
	trailers := http.Header{}
	restore(stored.Trailers, trailers)
	for name := range trailers {
		header.Add("Trailer", name)
	}
	k.w.WriteHeader(stored.Status)
	if bodyAllowed(stored.Status) {
		k.writeBody(stored.Body)
	}
	for name, values := range trailers {
		header[name] = values
	}
}

// writePart is the part of a response that a client has WriteTimeout to take.
const writePart = 64 << 10

// writeBody sends a body that is in memory. A client that takes no part of it in WriteTimeout loses its connection, or with HTTP/2 this response.
// If the server has a limit of its own, that decides.
func (k *keyed) writeBody(body []byte) {
	writer, isBounded := inside[interface{ SetWriteDeadline(time.Time) error }](k.w)
	if server, ok := k.r.Context().Value(http.ServerContextKey).(*http.Server); ok && server.WriteTimeout > 0 {
		isBounded = false
	}
	if !isBounded || k.WriteTimeout < 0 {
		k.w.Write(body)
		return
	}
	if len(body) == 0 {
		return
	}
	for len(body) > 0 {
		part := body
		if len(part) > writePart {
			part = part[:writePart]
		}
		if writer.SetWriteDeadline(time.Now().Add(k.WriteTimeout)) != nil {
			// This server has no deadlines.
			k.w.Write(body)
			return
		}
		if _, err := k.w.Write(part); err != nil {
			return
		}
		body = body[len(part):]
	}
	// The connection may be used again.
	writer.SetWriteDeadline(time.Time{})
}
