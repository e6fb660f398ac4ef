package oncegate

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Client sends a request under one key until the response is definite. The other side needs no Oncegate: any API that takes a key will do.
// The zero value has the defaults. It is safe for concurrent use. Check reports a wrong setting at the start of a program; without it, the
// first request is refused.
//
//	outcome, err := client.Do(request)   // request.Header has the key, or gets a new one
//
// Its Transport must not follow redirects; http.DefaultTransport does not.
type Client struct {
	// Transport sends one attempt: http.DefaultTransport by default.
	Transport http.RoundTripper
	// KeyHeader is the field of the key: Idempotency-Key by default. Quoted puts new keys in quotes, as the draft demands.
	KeyHeader string
	Quoted    bool
	// WithoutKeys is for an API without keys. A request whose method does not repeat safely is then sent again only if it was certainly
	// not processed.
	WithoutKeys bool
	// MaxAttempts is 6. The pause before the nth retry is random, up to Backoff (200 ms) doubled n times, at most MaxBackoff (20 s).
	MaxAttempts         int
	Backoff, MaxBackoff time.Duration
	// AttemptTimeout (30 s) is until the whole response is there, Deadline (2 min) for everything together. A Retry-After of more than
	// MaxRetryAfter (1 min) ends the sending.
	AttemptTimeout, Deadline, MaxRetryAfter time.Duration
	// MaxResponseBytes (8 MiB) are read before a response is judged.
	MaxResponseBytes int64
	// ServerErrors says what a server error means that nothing else explains: again (the default), final, or unknown.
	ServerErrors string
	// Budget bounds the retries of all requests together. By default each client has its own.
	Budget *RetryBudget

	ownBudget RetryBudget
}

// Verdict is the meaning of a definite response.
type Verdict string

const (
	// Done: the service did the operation.
	Done Verdict = "done"
	// Refused: the service did not do it. Outcome.Advice says what to do.
	Refused Verdict = "refused"
	// TurnedAway: it was refused before the operation (credentials, an address, a limit), and nothing took effect. When that is fixed,
	// send the same request under the same key.
	TurnedAway Verdict = "turned-away"
	// Failed: the service failed, and keeps this response. It does not tell what took effect.
	Failed Verdict = "failed"
	// NotReplayable: the request was processed, and its response cannot be given again.
	NotReplayable Verdict = "unreplayable"
)

// Outcome is a definite response.
type Outcome struct {
	Verdict Verdict
	// Advice is fix-request, new-key or stop, if the verdict is Refused.
	Advice string
	// Response is the response; its body is in memory.
	Response *http.Response
	// Attempts is the number of requests that were sent. Key is the key.
	Attempts int
	Key      string
}

// SendErrorKind says why there is no definite response.
type SendErrorKind string

const (
	// OutcomeIsUnknown: it may have taken effect, and another request does not tell. Find out.
	OutcomeIsUnknown SendErrorKind = "unknown"
	// TurnedAwayInDoubt: the last attempt was refused, and an earlier one may have taken effect.
	TurnedAwayInDoubt SendErrorKind = "turned away in doubt"
	// AttemptsUsedUp, DeadlineReached, BudgetUsedUp: a limit of the client was reached. Send the same request under the same key later.
	AttemptsUsedUp  SendErrorKind = "attempts used up"
	DeadlineReached SendErrorKind = "deadline reached"
	BudgetUsedUp    SendErrorKind = "retry budget used up"
	// ComeBackLater: Retry-After is longer than the client waits. SendError.RetryAfter says how long it is.
	ComeBackLater SendErrorKind = "come back later"
	// Unsendable: the request is invalid, and nothing was sent.
	Unsendable SendErrorKind = "unsendable"
	// Interrupted: the context of the request ended.
	Interrupted SendErrorKind = "interrupted"
)

// SendError is the error of a request without a definite response.
type SendError struct {
	Kind SendErrorKind
	// MayHaveTakenEffect is false only if it is certain that nothing took effect.
	MayHaveTakenEffect bool
	Attempts           int
	Key                string
	RetryAfter         time.Duration
	// Response is the last response, or nil. Err is the last error, or nil.
	Response *http.Response
	Err      error
}

func (e *SendError) Error() string {
	effect := "nothing took effect"
	if e.MayHaveTakenEffect {
		effect = "it may have taken effect"
	}
	last := ""
	switch {
	case e.Err != nil:
		last = ": " + e.Err.Error()
	case e.Response != nil:
		last = fmt.Sprintf(": the last status was %d", e.Response.StatusCode)
	}
	return fmt.Sprintf("oncegate: no definite response after %d attempts (%s); %s%s", e.Attempts, e.Kind, effect, last)
}

// Unwrap returns the last error.
func (e *SendError) Unwrap() error { return e.Err }

// Timeout reports if a time-out was the reason: that of the context, of an attempt or of the client. http.Client shows it, as for other transports.
func (e *SendError) Timeout() bool {
	var timed interface{ Timeout() bool }
	return e.Kind == DeadlineReached || errors.As(e.Err, &timed) && timed.Timeout()
}

// RetryBudget bounds the retries of all requests that share it, so that retries do not make an outage worse. The zero value is full: 500
// tokens. A retry takes 5, after a time-out 10; waiting for a request in progress takes none. A response gives the tokens of the last retry
// back, or one token if there was no retry.
type RetryBudget struct {
	mu    sync.Mutex
	spent int
}

const budgetTokens, retryTokens = 500, 5

func (b *RetryBudget) take(tokens int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spent+tokens > budgetTokens {
		return false
	}
	b.spent += tokens
	return true
}

func (b *RetryBudget) give(tokens int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spent -= tokens; b.spent < 0 {
		b.spent = 0
	}
}

// NewKey returns a new key: a UUID of version 7.
func NewKey() string {
	var bits [16]byte
	if _, err := rand.Read(bits[:]); err != nil {
		panic("oncegate: the system has no random numbers: " + err.Error())
	}
	now := uint64(time.Now().UnixMilli())
	for i := 0; i < 6; i++ {
		bits[i] = byte(now >> (40 - 8*i))
	}
	return uuid(bits, 7)
}

func orDuration(value, fallback time.Duration) time.Duration {
	if value == 0 {
		return fallback
	}
	return value
}

func isSafeMethod(method string) bool {
	switch method {
	case "", "GET", "HEAD", "OPTIONS", "TRACE":
		return true
	}
	return false
}

// Check reports the first setting that is wrong.
func (c *Client) Check() error {
	if c.KeyHeader != "" && !isToken(c.KeyHeader) {
		return fmt.Errorf("oncegate: KeyHeader is %q, which is not the name of a header field", c.KeyHeader)
	}
	switch c.ServerErrors {
	case "", "again", "final", "unknown":
	default:
		return fmt.Errorf("oncegate: ServerErrors is %q; use again, final or unknown", c.ServerErrors)
	}
	if c.MaxAttempts < 0 || c.MaxAttempts > maxClientAttempts {
		return fmt.Errorf("oncegate: MaxAttempts is %d; it may be from 1 to %d, or 0 for the default", c.MaxAttempts, maxClientAttempts)
	}
	if c.MaxResponseBytes < 0 || c.MaxResponseBytes > 1<<53 {
		return fmt.Errorf("oncegate: MaxResponseBytes is %d; it may be from 1 to %d, or 0 for the default", c.MaxResponseBytes, int64(1<<53))
	}
	for _, own := range []struct {
		name  string
		value time.Duration
	}{{"Backoff", c.Backoff}, {"MaxBackoff", c.MaxBackoff}, {"AttemptTimeout", c.AttemptTimeout}, {"Deadline", c.Deadline}, {"MaxRetryAfter", c.MaxRetryAfter}} {
		if err := checkTime(own.name, own.value, minTime); err != nil {
			return err
		}
		if own.value > maxClientWait {
			return fmt.Errorf("oncegate: %s is %s; it may be up to %s, or 0 for the default", own.name, own.value, maxClientWait)
		}
	}
	return nil
}

const (
	maxClientAttempts = 1000
	maxClientWait     = 24 * time.Hour
)

// missingKeys are what a value that is missing turns into as a text. It would be one key for all intents.
var missingKeys = setOf("undefined", "null", "nil", "<nil>", "none", "nan", "[object object]")

// quotedKey is a string of RFC 9651, between its quotes.
var quotedKey = regexp.MustCompile(`^"((?:[ !#-\[\]-~]|\\["\\])*)"$`)

// checkClientKey reports why a value of the header field is not a valid key. The text does not repeat it.
func checkClientKey(field string) error {
	key, isQuoted := field, false
	if found := quotedKey.FindStringSubmatch(field); found != nil {
		key, isQuoted = escapedInKey.ReplaceAllString(found[1], "$1"), true
	}
	if strings.Trim(key, " ") == "" {
		return errors.New("the key is empty; give 1 to 255 characters, such as a UUID")
	}
	if missingKeys[asciiLower(key)] {
		return fmt.Errorf("the key is the text %q, as of a missing value; give the key of the intent", key)
	}
	for i := 0; !isQuoted && i < len(field); i++ {
		if field[i] <= ' ' || field[i] > '~' || field[i] == '"' || field[i] == ',' {
			return errors.New("the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put the key in quotes")
		}
	}
	if len(key) > maxKeyBytes {
		return fmt.Errorf("the key has %d characters; at most %d are allowed", len(key), maxKeyBytes)
	}
	return nil
}

var escapedInKey = regexp.MustCompile(`\\(.)`)

// keyLines removes the field of the key, in whatever case its name is, and returns its lines.
func keyLines(header http.Header, name string) (values []string) {
	for own := range header {
		if strings.EqualFold(own, name) {
			values = append(values, header[own]...)
			delete(header, own)
		}
	}
	return values
}

// hasKey reports if a request has a field of the key, also an empty one.
func hasKey(header http.Header, name string) bool {
	for own, values := range header {
		if len(values) > 0 && strings.EqualFold(own, name) {
			return true
		}
	}
	return false
}

// checkSendable reports why net/http would send nothing of the request: that is no reason to send it again.
func (c *Client) checkSendable(request *http.Request) error {
	if request.URL == nil || request.URL.Host == "" {
		return errors.New("the request has no address")
	}
	_, isOwn := c.Transport.(*http.Transport)
	if (c.Transport == nil || isOwn) && request.URL.Scheme != "http" && request.URL.Scheme != "https" {
		return errors.New("the URL does not begin with http:// or https://")
	}
	if request.Method != "" && !isToken(request.Method) {
		return errors.New("the method is invalid")
	}
	for name, values := range request.Header {
		if !isToken(name) {
			return errors.New("the name of a header field is invalid")
		}
		for _, value := range values {
			for i := 0; i < len(value); i++ {
				if value[i] < ' ' && value[i] != '\t' || value[i] == 0x7f {
					return fmt.Errorf("the header field %s has a control character", name)
				}
			}
		}
	}
	return nil
}

// Do sends the request until the response is definite. A request that may have an effect and has no key gets a new one: keep it, or set one
// yourself (DerivedKey), to send the same intent again later. A definite response is no error, whatever its status.
func (c *Client) Do(request *http.Request) (*Outcome, error) {
	sending := &sending{Client: c, name: http.CanonicalHeaderKey(firstText(c.KeyHeader, "Idempotency-Key"))}
	fail := func(err error) (*Outcome, error) {
		if request.Body != nil {
			request.Body.Close()
		}
		return nil, &SendError{Kind: Unsendable, Err: err, Key: sending.key}
	}
	if err := c.Check(); err != nil {
		return fail(err)
	}
	header := request.Header.Clone()
	if header == nil {
		header = http.Header{}
	}
	switch method := request.Method; {
	case isSafeMethod(method):
		sending.protection = safeRequest
		keyLines(header, sending.name)
	case c.WithoutKeys && (method == "PUT" || method == "DELETE"):
		sending.protection = repeatableRequest
	case c.WithoutKeys:
		sending.protection = onceRequest
	default:
		sending.protection = keyedRequest
		switch values := keyLines(header, sending.name); {
		case len(values) > 1:
			return fail(errors.New("the request has more than one key; give one key"))
		case len(values) == 1:
			key := strings.Trim(values[0], " \t")
			if err := checkClientKey(key); err != nil {
				return fail(err)
			}
			sending.key = key
		default:
			sending.key = NewKey()
			if c.Quoted {
				sending.key = `"` + sending.key + `"`
			}
		}
		header.Set(sending.name, sending.key)
	}
	if err := c.checkSendable(request); err != nil {
		return fail(err)
	}
	var body []byte
	if request.Body != nil && request.Body != http.NoBody {
		// A body that is read once could not be sent again.
		const max = 64 << 20
		var err error
		body, err = io.ReadAll(io.LimitReader(request.Body, max+1))
		if err != nil {
			return fail(fmt.Errorf("the body cannot be read: %w", err))
		}
		if len(body) > max {
			return fail(fmt.Errorf("the body is larger than %d bytes, so it cannot be sent again", max))
		}
		if request.ContentLength > 0 && int64(len(body)) != request.ContentLength {
			return fail(fmt.Errorf("the body has %d bytes, and not %d as ContentLength says", len(body), request.ContentLength))
		}
		request.Body.Close()
	}
	sending.request, sending.header, sending.body = request, header, body
	return sending.run()
}

// sending is the sending of one request.
type sending struct {
	*Client
	name, key  string
	protection protection
	request    *http.Request
	header     http.Header
	body       []byte
	attempts   int
	inDoubt    bool
	lastTokens int
	last       *http.Response
	lastErr    error
}

func (s *sending) error(kind SendErrorKind) error {
	return &SendError{Kind: kind, MayHaveTakenEffect: s.inDoubt && s.protection != safeRequest, Attempts: s.attempts, Key: s.key,
		Response: s.last, Err: s.lastErr}
}

func (s *sending) budget() *RetryBudget {
	if s.Budget != nil {
		return s.Budget
	}
	return &s.ownBudget
}

func (s *sending) run() (*Outcome, error) {
	begun, limit := readClocks(), orDuration(s.Deadline, 2*time.Minute)
	deadline := time.Now().Add(limit)
	max := s.MaxAttempts
	if max == 0 {
		max = 6
	}
	for {
		s.attempts++
		isTimeout, meaning := s.attempt(deadline)
		if verdict, advice, ok := verdictOf(meaning); ok {
			if s.lastTokens > 0 {
				s.budget().give(s.lastTokens)
			} else {
				s.budget().give(1)
			}
			return &Outcome{verdict, advice, s.last, s.attempts, s.key}, nil
		}
		switch meaning {
		case meansUnknown:
			s.inDoubt = true
			return nil, s.error(OutcomeIsUnknown)
		case meansInDoubt:
			return nil, s.error(TurnedAwayInDoubt)
		case meansAgainMaybe, meansInProgress:
			s.inDoubt = true
			if s.protection == onceRequest {
				return nil, s.error(OutcomeIsUnknown)
			}
		}
		if err := s.request.Context().Err(); err != nil {
			s.lastErr = err
			return nil, s.error(Interrupted)
		}
		if s.attempts >= max {
			if meaning == meansContested {
				return nil, s.error(TurnedAwayInDoubt)
			}
			return nil, s.error(AttemptsUsedUp)
		}
		pause := s.pause()
		if s.last != nil {
			if after := retryAfterOf(s.last.Header, time.Now()); after > pause {
				if pause = after; after > orDuration(s.MaxRetryAfter, time.Minute) {
					err := s.error(ComeBackLater).(*SendError)
					err.RetryAfter = after
					return nil, err
				}
			}
		}
		if begun.age()+pause > limit {
			return nil, s.error(DeadlineReached)
		}
		tokens := retryTokens
		switch {
		case meaning == meansInProgress:
			tokens = 0
		case isTimeout:
			tokens *= 2
		}
		if !s.budget().take(tokens) {
			return nil, s.error(BudgetUsedUp)
		}
		s.lastTokens = tokens
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-s.request.Context().Done():
			timer.Stop()
			s.lastErr = s.request.Context().Err()
			return nil, s.error(Interrupted)
		}
		// The pause is longer if the machine was suspended, and the service may have forgotten the key meanwhile.
		if begun.age() > limit {
			return nil, s.error(DeadlineReached)
		}
	}
}

func verdictOf(m meaning) (Verdict, string, bool) {
	switch m {
	case meansDone:
		return Done, "", true
	case meansTurnedAway:
		return TurnedAway, "", true
	case meansFailed:
		return Failed, "", true
	case meansUnreplayable:
		return NotReplayable, "", true
	case meansFixRequest, meansNewKey, meansStop:
		return Refused, strings.TrimPrefix(string(m), "refused "), true
	}
	return "", "", false
}

// pause is random, so that clients that failed together do not retry together.
func (s *sending) pause() time.Duration {
	most, max := orDuration(s.Backoff, 200*time.Millisecond), orDuration(s.MaxBackoff, 20*time.Second)
	for i := 1; i < s.attempts && most < max; i++ {
		most *= 2
	}
	if most > max {
		most = max
	}
	if most < 0 {
		most = 0
	}
	return jitter(most + 1)
}

// attempt sends the request once, and reads the whole response.
func (s *sending) attempt(deadline time.Time) (isTimeout bool, _ meaning) {
	ctx, cancel := context.WithTimeout(s.request.Context(), orDuration(s.AttemptTimeout, 30*time.Second))
	defer cancel()
	ctx, cancelAll := context.WithDeadline(ctx, deadline)
	defer cancelAll()
	request := s.request.Clone(ctx)
	request.Header = s.header.Clone()
	request.Body, request.GetBody, request.ContentLength = nil, nil, 0
	if s.body != nil {
		open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(s.body)), nil }
		request.Body, _ = open()
		request.GetBody, request.ContentLength = open, int64(len(s.body))
	}
	transport := s.Transport
	if transport == nil {
		transport = http.DefaultTransport
	}
	response, err := transport.RoundTrip(request)
	s.last, s.lastErr = nil, nil
	if err == nil && response.Request != nil && response.Request.Response != nil && s.protection != safeRequest {
		response.Body.Close()
		s.lastErr = errors.New("the Transport followed a redirect, so this is not the response to the request; set CheckRedirect to http.ErrUseLastResponse")
		return false, meansUnknown
	}
	var body []byte
	if err == nil {
		max := s.MaxResponseBytes
		if max == 0 {
			max = 8 << 20
		}
		body, err = io.ReadAll(io.LimitReader(response.Body, max+1))
		response.Body.Close()
		if err == nil && int64(len(body)) > max {
			err = fmt.Errorf("the response is larger than %d bytes; send the same request under the same key with a higher MaxResponseBytes", max)
			s.last = response
		}
	}
	if err != nil {
		s.lastErr = err
		if isUnsent(err) {
			return false, meansAgain
		}
		return ctx.Err() == context.DeadlineExceeded, meansAgainMaybe
	}
	response.Body = io.NopCloser(bytes.NewReader(body))
	response.Request = s.request
	s.last = response
	serverErrors := firstText(s.ServerErrors, "again")
	return false, judge(judging{s.protection, serverErrors, s.inDoubt}, response.StatusCode, response.Header, body)
}

// retryAfterOf is the pause in Retry-After: seconds, or a date, which counts from the response's own Date. Of several the longest counts.
func retryAfterOf(header http.Header, now time.Time) (longest time.Duration) {
	for _, value := range header.Values("Retry-After") {
		var after time.Duration
		if value = strings.TrimSpace(value); value != "" && strings.Trim(value, "0123456789") == "" {
			seconds, err := strconv.ParseInt(value, 10, 32)
			if err != nil {
				seconds = 1 << 31
			}
			after = time.Duration(seconds) * time.Second
		} else if then, err := http.ParseTime(value); err == nil {
			from := now
			if date, err := http.ParseTime(header.Get("Date")); err == nil {
				from = date
			}
			after = then.Sub(from)
		}
		if after > longest {
			longest = after
		}
	}
	return longest
}

// Transport is an http.RoundTripper for code that has an http.Client already. A request with a key is sent until its response is definite;
// a request without one is sent once. Turn redirects off (CheckRedirect with http.ErrUseLastResponse): a client that follows them may be
// refused by the second address after the first one did what was asked for.
type Transport struct {
	// Client sends the requests.
	Client *Client
	// NewKeys gives POST and PATCH without a key a new one.
	NewKeys bool
}

// RoundTrip implements http.RoundTripper. A request without a definite response ends with a *SendError.
func (t *Transport) RoundTrip(request *http.Request) (*http.Response, error) {
	client := t.Client
	if client == nil {
		client = &defaultClient
	}
	isKeyed := hasKey(request.Header, firstText(client.KeyHeader, "Idempotency-Key"))
	if isSafeMethod(request.Method) || !isKeyed && !(t.NewKeys && (request.Method == "POST" || request.Method == "PATCH")) {
		if client.Transport != nil {
			return client.Transport.RoundTrip(request)
		}
		return http.DefaultTransport.RoundTrip(request)
	}
	outcome, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	return outcome.Response, nil
}

var defaultClient Client
