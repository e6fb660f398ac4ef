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
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
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
	limits := &limits{perCaller: map[[8]byte]int{}}
	return func(next http.Handler) http.Handler {
		return &protected{engine, c, limits, next}
	}, nil
}

type protected struct {
	engine *Engine
	*compiled
	limits *limits
	next   http.Handler
}

// limits count the requests with a key that run, and the memory of bodies.
type limits struct {
	mu                          sync.Mutex
	running                     int
	perCaller                   map[[8]byte]int
	requestBytes, responseBytes int
}

func (l *limits) enter(c *compiled, caller [8]byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.running >= c.MaxInFlight || !c.caller.isSingleTenant() && l.perCaller[caller] >= c.MaxInFlightPerCaller ||
		l.responseBytes >= c.ResponseBudget {
		return false
	}
	l.running++
	l.perCaller[caller]++
	return true
}

func (l *limits) leave(caller [8]byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.running--
	if l.perCaller[caller]--; l.perCaller[caller] == 0 {
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

// addResponse counts the bytes of a response that is sent even if the budget is used up.
func (l *limits) addResponse(n int) {
	l.mu.Lock()
	l.responseBytes += n
	l.mu.Unlock()
}

// keyed is one request that has a key, or that lacks the key that it must have.
type keyed struct {
	*protected
	w      http.ResponseWriter
	r      *http.Request
	echo   Field
	record string
	path   string
	query  string
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

// pass lets a request through without protection.
func (p *protected) pass(w http.ResponseWriter, r *http.Request, status string) {
	passing := &passingWriter{ResponseWriter: w, status: status}
	p.next.ServeHTTP(withInterfaces(passing, w), r)
	if !passing.isHijacked {
		passing.begin()
	}
}

func (k *keyed) refuse(refusal *refusal) {
	k.setEcho()
	refusal.write(k.w, k.compiled, k.record)
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
	body, held, bodyRefusal := k.readBody()
	defer k.limits.hold(&k.limits.requestBytes, -held, 0)
	if bodyRefusal != nil {
		k.refuse(bodyRefusal)
		return
	}
	decoded, coding := k.decode(body)
	if !isEarly {
		natural, refusal := k.naturalKeyOf(decoded, coding)
		if refusal != nil {
			if refusal.condition.Name == "key-missing" && !k.profile.RequireKey {
				k.protected.pass(k.w, k.withBody(k.r, body), "")
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
	scope := newKeyScope(k.engine.service, caller)
	tag = scope.callerTag()
	if !k.limits.enter(k.compiled, tag) {
		k.refuse(refuse("overloaded").with(detailTooMany).after(1))
		return
	}
	defer k.limits.leave(tag)
	id, operation := k.locate(scope, key)
	k.record = id.String()
	keyTag := keyTag(key)
	fingerprint := k.fingerprintOf(decoded, coding)
	claimed, err := k.engine.claim(k.r.Context(), id, Claim{Fingerprint: fingerprint, CallerTag: tag, KeyTag: &keyTag, Operation: cutOperation(operation)}, k.policy)
	if err != nil {
		k.claimFailed(err, body)
		return
	}
	switch claimed.Outcome {
	case Execute:
		k.execute(claimed.permit, body)
	case Replay:
		k.replay(claimed.Response)
	case InProgress:
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

func (k *keyed) claimFailed(err error, body []byte) {
	kind := kindOf(err)
	isFull := errors.Is(err, errFull)
	switch {
	case kind == RecordCorrupt:
		k.engine.log.Printf("%v (record %s)", err, k.record)
		k.refuse(refuse("record-corrupt"))
	case kind == ResponseSealed:
		k.engine.log.Printf("%v (record %s)", err, k.record)
		k.refuse(refuse("response-sealed").after(30))
	case k.FailOpen && !isFull && (kind == StoreUnavailable || kind == StoreUnsent):
		k.setEcho()
		k.protected.pass(k.w, k.withBody(k.r, body), "failed-open")
	case isFull:
		k.refuse(refuse("store-unavailable").with(detailStoreFull).after(30))
	default:
		if kind != StoreUnsent {
			k.engine.log.Printf("%v (record %s)", err, k.record)
		}
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
	type result struct {
		body    []byte
		held    int
		refusal *refusal
	}
	read := func() (got result) {
		var buffer bytes.Buffer
		for {
			const piece = 32 << 10
			n, err := io.CopyN(&buffer, k.r.Body, piece)
			if !k.limits.hold(&k.limits.requestBytes, int(n), k.RequestBudget) {
				got.refusal = refuse("overloaded").with(detailRequestBudget).after(1)
				return got
			}
			got.held += int(n)
			if buffer.Len() > k.MaxRequestBody {
				got.refusal = refuse("request-too-large").with(fmt.Sprintf("%s At most %d bytes are accepted.",
					refuse("request-too-large").condition.Detail, k.MaxRequestBody))
				return got
			}
			if err == io.EOF {
				got.body = buffer.Bytes()
				return got
			}
			if err != nil {
				got.refusal = refuse("request-incomplete")
				return got
			}
		}
	}
	if k.r.ContentLength > int64(k.MaxRequestBody) {
		return nil, 0, refuse("request-too-large").with(fmt.Sprintf("%s At most %d bytes are accepted.",
			refuse("request-too-large").condition.Detail, k.MaxRequestBody))
	}
	done := make(chan result, 1)
	go func() { done <- read() }()
	timer := time.NewTimer(k.BodyTimeout)
	defer timer.Stop()
	select {
	case got := <-done:
		return got.body, got.held, got.refusal
	case <-timer.C:
		// The connection cannot be used again: the rest of the body may still come.
		k.w.Header().Set("Connection", "close")
		go func() {
			got := <-done
			k.limits.hold(&k.limits.requestBytes, -got.held, 0)
		}()
		return nil, 0, refuse("request-incomplete")
	}
}

// withBody is the request with the body that was read.
func (k *keyed) withBody(r *http.Request, body []byte) *http.Request {
	own := r.WithContext(r.Context())
	own.Body = io.NopCloser(bytes.NewReader(body))
	if len(body) == 0 {
		own.Body = http.NoBody
	}
	own.ContentLength, own.TransferEncoding = int64(len(body)), nil
	return own
}

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

// locate returns the identifier of the record, and the operation that operators see.
func (k *keyed) locate(scope keyScope, key string) (RecordID, string) {
	method, path := asciiUpper(k.r.Method), canonicalPath(k.path, k.ExactSlash)
	var operation []string
	if k.profile.KeyScope == "endpoint" {
		operation = []string{method, path}
	}
	for _, name := range k.profile.KeyScopeHeader {
		var values []string
		lines(k.r.Header, func(own, value string) {
			if own == asciiLower(name) || isOtherSpelling(own, name) {
				values = append(values, value)
			}
		})
		operation = append(operation, asciiLower(name), strings.Join(values, ", "))
	}
	return scope.record(operation, key), method + " " + path
}

func (k *keyed) fingerprintOf(body []byte, coding string) Fingerprint {
	in := fingerprintInput{method: asciiUpper(k.r.Method), target: canonicalPath(k.path, k.ExactSlash) + k.query}
	for _, name := range append(append([]string(nil), k.FingerprintHeaders...), k.profile.Fingerprint.Headers...) {
		for _, value := range k.r.Header.Values(name) {
			in.headers = append(in.headers, formPair{asciiLower(name), value})
		}
	}
	lines(k.r.Header, func(name, value string) {
		if overrideFields[hyphenated(name)] {
			in.headers = append(in.headers, formPair{name, value})
		}
	})
	if !k.comparesNothing {
		in.contentType, in.coding, in.body = joinedLines(k.r.Header, "Content-Type"), coding, body
	}
	fingerprint := k.rules.fingerprint(in)
	if k.Authority == "compare" {
		fingerprint = fingerprint.withHost(authorityOf(k.r))
	}
	return fingerprint
}

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
	run := &execution{keyed: k, permit: p, header: k.w.Header().Clone()}
	if run.header == nil {
		run.header = http.Header{}
	}
	ctx := context.WithValue(detach(k.r.Context()), attemptKey{}, &Attempt{p})
	request := k.withBody(k.r.WithContext(ctx), body)
	// The handler has ended if it returns, panics, or ends its goroutine.
	isReturned := false
	defer func() {
		if isReturned {
			return
		}
		value := recover()
		run.fail()
		if value == http.ErrAbortHandler || run.isStreaming {
			panic(http.ErrAbortHandler)
		}
		if value == nil {
			return
		}
		stack := debug.Stack()
		if k.Panicked != nil {
			k.Panicked(k.r, value, stack)
		} else {
			log.Printf("oncegate: panic serving record %s: %v\n%s", k.record, value, stack)
		}
	}()
	k.next.ServeHTTP(withInterfaces(run, k.w), request)
	isReturned = true
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
	permit *permit
	// header is what the handler sets; sent is what it was when the status was written.
	header, sent http.Header
	status       int
	body         bytes.Buffer
	directive    string
	treatment    treatment
	isStreaming  bool
	isHijacked   bool
	isSettled    bool
	length       int64 // the Content-Length that the handler set, or -1
	written      int64
}

func (x *execution) Header() http.Header { return x.header }

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
	x.sent.Del("Idempotency-Status")
	x.sent.Del(x.marker.Name)
	x.treatment = x.treat()
	x.addFields("response", x.sent, false)
	if x.treatment == treatReplay && status >= 500 {
		x.addFields("kept-server-error", x.sent, false)
	}
	if x.treatment == treatReplay && cannotBeStored(status, x.sent) {
		x.treatment = treatTombstone
		x.stream()
	}
}

// takeDirective removes the field Idempotency-Store, and returns its word. Contradictions are ignored.
func takeDirective(header http.Header) string {
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
		if len(x.header["Content-Type"]) == 0 && len(data) > 0 {
			x.sniff(data)
		}
		x.WriteHeader(http.StatusOK)
	}
	if !bodyAllowed(x.status) {
		return 0, http.ErrBodyNotAllowed
	}
	if x.length >= 0 && x.written+int64(len(data)) > x.length {
		return 0, http.ErrContentLength
	}
	x.written += int64(len(data))
	if x.isStreaming {
		return x.w.Write(data)
	}
	if x.body.Len() == 0 && len(data) > 0 {
		x.sniffSent(data)
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

// sniff sets the media type as net/http does, so that the record has it, too.
func (x *execution) sniff(data []byte) {
	if _, isSet := x.header["Content-Type"]; !isSet && x.header.Get("Content-Encoding") == "" {
		x.header.Set("Content-Type", http.DetectContentType(data))
	}
}

func (x *execution) sniffSent(data []byte) {
	if _, isSet := x.sent["Content-Type"]; !isSet && x.sent.Get("Content-Encoding") == "" {
		x.sent.Set("Content-Type", http.DetectContentType(data))
	}
}

// ReadFrom implements io.ReaderFrom.
func (x *execution) ReadFrom(source io.Reader) (int64, error) {
	if from, ok := x.w.(io.ReaderFrom); ok && x.isStreaming && x.length < 0 {
		n, err := from.ReadFrom(source)
		x.written += n
		return n, err
	}
	return io.Copy(struct{ io.Writer }{x}, source)
}

func (x *execution) sendBody() error {
	_, err := x.w.Write(x.body.Bytes())
	x.body.Reset()
	return err
}

// stream begins to send a response that is not kept. The record says that the operation was done, so that duplicates need not wait for an
// end that may never come. A key that is to be free again stays claimed until the handler has ended.
func (x *execution) stream() {
	if x.isStreaming {
		return
	}
	status := ""
	if x.treatment == treatTombstone {
		status = x.settle()
	}
	x.isStreaming = true
	x.sendHeader(status)
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
	switch x.treatment {
	case treatRelease:
		return x.permit.release().status()
	case treatUnknown:
		return x.permit.complete(OutcomeUnknown, nil).status()
	case treatReplay:
		response := StoredResponse{Status: x.status, Headers: keptOf(x.sent, x.stored), Trailers: x.trailers(), Body: x.body.Bytes()}
		if encoded, err := response.Encode(); err == nil {
			return x.permit.complete(Completed, encoded).status()
		}
	}
	return x.permit.complete(Tombstone, nil).status()
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
	if x.isHijacked {
		return
	}
	if x.status == 0 {
		x.WriteHeader(http.StatusOK)
	}
	if x.length >= 0 && x.written < x.length && bodyAllowed(x.status) && x.r.Method != http.MethodHead {
		// Half of the response would look like the whole.
		x.fail()
		if x.isStreaming {
			panic(http.ErrAbortHandler)
		}
		return
	}
	status := x.settle()
	if x.isStreaming {
		x.sendTrailers()
		return
	}
	x.limits.addResponse(x.body.Len())
	defer x.limits.addResponse(-x.body.Len())
	hasTrailers := len(x.sent["Trailer"]) > 0
	for name := range x.header {
		hasTrailers = hasTrailers || strings.HasPrefix(name, http.TrailerPrefix)
	}
	if bodyAllowed(x.status) && !hasTrailers && x.length < 0 {
		x.sent.Set("Content-Length", strconv.Itoa(x.body.Len()))
	}
	if _, isSet := x.sent["Content-Type"]; !isSet {
		x.sent["Content-Type"] = nil
	}
	x.sendHeader(status)
	x.w.Write(x.body.Bytes())
	x.sendTrailers()
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

// fail ends an attempt whose handler ended without a response, so that its effect is unknown.
func (x *execution) fail() {
	refusal := refuse("outcome-unknown")
	if !x.isSettled {
		x.isSettled = true
		if x.profile.ServerErrors == "release" {
			refusal = refuse("handler-failed")
			x.permit.release()
		} else {
			x.permit.complete(OutcomeUnknown, nil)
		}
	}
	if !x.isStreaming && !x.isHijacked {
		x.refuse(refusal)
	}
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
	if !k.limits.hold(&k.limits.responseBytes, len(stored.Body), k.ResponseBudget) {
		k.refuse(refuse("overloaded").with(detailResponseBudget).after(1))
		return
	}
	defer k.limits.addResponse(-len(stored.Body))
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
	if len(trailers) == 0 && bodyAllowed(stored.Status) {
		header.Set("Content-Length", strconv.Itoa(len(stored.Body)))
	}
	k.w.WriteHeader(stored.Status)
	if bodyAllowed(stored.Status) {
		k.w.Write(stored.Body)
	}
	for name, values := range trailers {
		header[name] = values
	}
}
