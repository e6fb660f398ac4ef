package oncegate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Settings are those of the middleware. The zero value is the profile ietf. Fields that are not set have the value of the profile.
type Settings struct {
	// Profile is ietf, stripe or classic.
	Profile string
	// Scope says what identifies a caller: header:NAME, required-header:NAME, cookie:NAME, required-cookie:NAME, host, several of them,
	// or single-tenant. Not set, callers are told apart by Authorization, and a request with another credential is refused.
	Scope []string
	// Caller identifies the caller in place of Scope, for example by what an earlier middleware has verified. false refuses the request.
	Caller func(*http.Request) (identity string, ok bool)
	// Authority is compare (another host is another request, the default), scope (each host has its own keys) or ignore.
	Authority string
	// RequireKey refuses covered requests without a key.
	RequireKey bool
	// KeyHeaders are the fields that may carry the key.
	KeyHeaders []string
	// NaturalKey are JSON pointers to the members of the body from which the key is built, whatever key the client sends.
	NaturalKey []string
	// KeySyntax is lenient, strict or raw. KeyFormat is any, uuid, ulid or pattern:REGEX.
	KeySyntax, KeyFormat string
	// KeyScope is endpoint, or caller if a key belongs to all endpoints together.
	KeyScope string
	// ExactSlash keeps /orders and /orders/ apart.
	ExactSlash bool
	// Methods are the covered methods.
	Methods []string
	// StoredHeaders are further response fields that are kept.
	StoredHeaders []string
	// ReplayMarker is the name of the field that marks a replay.
	ReplayMarker string
	// Documentation is the address of a page about keys, to which refusals link. ProblemBaseURL begins the types of problems.
	Documentation, ProblemBaseURL string
	// MaxRequestBody (2 MiB) and MaxResponseBody (1 MiB) are in bytes. A larger response is sent, and not kept.
	MaxRequestBody, MaxResponseBody int
	// ServerErrors is replay or release: what becomes of responses from 500 and of panics.
	ServerErrors string
	// ReleaseStatuses free the key.
	ReleaseStatuses []int
	// FingerprintBody is canonical, raw or nothing. The others choose what is compared: header fields, and JSON pointers.
	FingerprintBody                                            string
	FingerprintHeaders, FingerprintInclude, FingerprintExclude []string
	// Lease is how long a key stays blocked after a crash (30 s): it is renewed while the handler runs. Retention is how long a response
	// is kept (24 h). Wait is how long a duplicate waits for the first request (2 s; negative: not at all).
	Lease, Retention, Wait time.Duration
	// OnAbandoned is what a retry does that finds an attempt without an end: Park or Reexecute.
	OnAbandoned OnAbandoned
	// FailOpen executes requests without protection while the store is out of reach: no connection can be made, or it gives no answer in
	// StoreTimeout. Such responses are marked.
	FailOpen bool
	// MaxInFlight (2048) and MaxInFlightPerCaller (1024) bound the requests with a key that run. RequestBudget and ResponseBudget (256 MiB
	// each) bound the memory for their bodies, and for responses that clients have not taken yet; one caller gets a quarter of ResponseBudget,
	// unless all are one. BodyTimeout (1 min) is how long a body may take. WriteTimeout (1 min; negative: no limit) is how long a client may
	// take nothing of a response; it needs Go 1.20, it replaces a write deadline that a handler has set, and a WriteTimeout of the http.Server
	// replaces it.
	MaxInFlight, MaxInFlightPerCaller int
	RequestBudget, ResponseBudget     int
	BodyTimeout, WriteTimeout         time.Duration
	// Panicked is called with the value of a panic of the handler and its stack. By default it is written to the log, as net/http does.
	Panicked func(r *http.Request, value interface{}, stack []byte)
}

// UnsupportedSetting is the error of a setting of the sidecar that this library does not have.
type UnsupportedSetting struct{ Name string }

func (e *UnsupportedSetting) Error() string {
	return fmt.Sprintf("oncegate: the setting %q is unknown, or is one that only the sidecar has%s", e.Name, didYouMean(e.Name, settingNames))
}

// settingNames are those of ParseSettings.
var settingNames = []string{"profile", "scope", "authority", "require-key", "key-header", "natural-key", "key-syntax", "key-format", "key-scope",
	"trailing-slash", "methods", "stored-headers", "replay-marker", "documentation", "problem-base-url", "max-request-body",
	"max-response-body", "request-budget", "response-budget", "server-errors", "release-statuses", "fingerprint.body", "fingerprint.headers",
	"fingerprint.include", "fingerprint.exclude", "lease", "retention", "wait", "on-abandoned", "max-in-flight", "max-in-flight-per-caller",
	"store-outage"}

// ParseSettings reads settings from a JSON object. Their names and values are those of the sidecar's configuration, which is TOML:
//
//	{"profile": "stripe", "scope": ["required-header:x-tenant"], "lease": "10s", "fingerprint.exclude": ["/sent_at"]}
func ParseSettings(text []byte) (Settings, error) {
	var s Settings
	var values map[string]json.RawMessage
	if err := json.Unmarshal(text, &values); err != nil {
		return s, fmt.Errorf("oncegate: the settings are not a JSON object: %w", err)
	}
	for name, value := range values {
		if err := s.parse(name, value); err != nil {
			var unsupported *UnsupportedSetting
			if errors.As(err, &unsupported) {
				return s, err
			}
			return s, fmt.Errorf("oncegate: the setting %q: %w", name, err)
		}
	}
	return s, nil
}

func (s *Settings) parse(name string, value json.RawMessage) (err error) {
	into := func(to interface{}) error {
		if json.Unmarshal(value, to) == nil && strings.TrimSpace(string(value)) != "null" {
			return nil
		}
		what := "a text"
		switch to.(type) {
		case *bool:
			what = "true or false"
		case *int:
			what = "a whole number"
		case *[]*string:
			what = "a text, or a list of texts"
		case *[]json.RawMessage:
			what = "a status such as 422, \"4xx\", \"5xx\", or a list of them"
		}
		return fmt.Errorf("%s cannot be used; write %s", value, what)
	}
	list := func(to *[]string) error {
		var single string
		if value[0] == '"' && json.Unmarshal(value, &single) == nil {
			*to = []string{single}
			return nil
		}
		var listed []*string
		if err := into(&listed); err != nil {
			return err
		}
		*to = []string{}
		for _, text := range listed {
			if text == nil {
				return fmt.Errorf("%s has null; write a list of texts", value)
			}
			*to = append(*to, *text)
		}
		return nil
	}
	duration := func(to *time.Duration) error {
		var text string
		if err := into(&text); err != nil {
			return err
		}
		*to, err = parseDuration(text)
		return err
	}
	size := func(to *int) error {
		var text string
		if value[0] == '"' && json.Unmarshal(value, &text) == nil {
			*to, err = parseSize(text)
			return err
		}
		return into(to)
	}
	exact := func(to *bool, other string) error {
		var text string
		if err := into(&text); err != nil {
			return err
		}
		if *to = text == "exact"; !*to && text != other {
			return fmt.Errorf("%q is not exact or %s", text, other)
		}
		return nil
	}
	switch name {
	case "profile":
		return into(&s.Profile)
	case "scope":
		return list(&s.Scope)
	case "authority":
		return into(&s.Authority)
	case "require-key":
		return into(&s.RequireKey)
	case "key-header":
		return list(&s.KeyHeaders)
	case "natural-key":
		return list(&s.NaturalKey)
	case "key-syntax":
		return into(&s.KeySyntax)
	case "key-format":
		return into(&s.KeyFormat)
	case "key-scope":
		return into(&s.KeyScope)
	case "trailing-slash":
		return exact(&s.ExactSlash, "ignore")
	case "methods":
		return list(&s.Methods)
	case "stored-headers":
		return list(&s.StoredHeaders)
	case "replay-marker":
		return into(&s.ReplayMarker)
	case "documentation":
		return into(&s.Documentation)
	case "problem-base-url":
		return into(&s.ProblemBaseURL)
	case "max-request-body":
		return size(&s.MaxRequestBody)
	case "max-response-body":
		return size(&s.MaxResponseBody)
	case "request-budget":
		return size(&s.RequestBudget)
	case "response-budget":
		return size(&s.ResponseBudget)
	case "server-errors":
		return into(&s.ServerErrors)
	case "release-statuses":
		return s.parseStatuses(value, into)
	case "fingerprint.body":
		return into(&s.FingerprintBody)
	case "fingerprint.headers":
		return list(&s.FingerprintHeaders)
	case "fingerprint.include":
		return list(&s.FingerprintInclude)
	case "fingerprint.exclude":
		return list(&s.FingerprintExclude)
	case "lease":
		return duration(&s.Lease)
	case "retention":
		return duration(&s.Retention)
	case "wait":
		err := duration(&s.Wait)
		if s.Wait == 0 {
			s.Wait = -1
		}
		return err
	case "on-abandoned":
		return into(&s.OnAbandoned)
	case "max-in-flight":
		return into(&s.MaxInFlight)
	case "max-in-flight-per-caller":
		return into(&s.MaxInFlightPerCaller)
	case "store-outage":
		var word string
		if err := into(&word); err != nil {
			return err
		}
		if s.FailOpen = word == "open"; !s.FailOpen && word != "refuse" && word != "closed" {
			return fmt.Errorf("%q is not open or closed", word)
		}
		return nil
	}
	return &UnsupportedSetting{name}
}

// parseStatuses reads statuses of errors and their classes: one, or a list.
func (s *Settings) parseStatuses(value json.RawMessage, into func(interface{}) error) error {
	listed := []json.RawMessage{value}
	if value[0] == '[' || value[0] == '{' || value[0] == 'n' {
		listed = nil
		if err := into(&listed); err != nil {
			return err
		}
	}
	s.ReleaseStatuses = nil
	for _, own := range listed {
		text := strings.Trim(string(own), "\"")
		status, err := strconv.Atoi(text)
		switch {
		case text == "4xx" || text == "5xx":
			for status := int(text[0]-'0') * 100; status%100 != 99; status++ {
				s.ReleaseStatuses = append(s.ReleaseStatuses, status)
			}
			s.ReleaseStatuses = append(s.ReleaseStatuses, int(text[0]-'0')*100+99)
		case err == nil && status >= 400 && status <= 599:
			s.ReleaseStatuses = append(s.ReleaseStatuses, status)
		default:
			return fmt.Errorf("%s is not a status that can free the key; write one from 400 to 599 such as 422, \"4xx\" or \"5xx\"", own)
		}
	}
	return nil
}

// registeredMethods are those of the HTTP Method Registry that a key can protect.
var registeredMethods = []string{"ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "DELETE", "LABEL", "LINK", "LOCK", "MERGE",
	"MKACTIVITY", "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE", "ORDERPATCH", "PATCH", "POST", "PROPPATCH", "PUT", "REBIND",
	"UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE", "UPDATEREDIRECTREF", "VERSION-CONTROL"}

func isRegistered(method string) bool {
	for _, name := range registeredMethods {
		if name == method {
			return true
		}
	}
	return false
}

// didYouMean returns the candidate that is nearest to what was written, as a part of a message; "" if none is near.
func didYouMean(written string, candidates []string) string {
	nearest, least := "", 3
	for _, candidate := range candidates {
		if distance := editDistance(written, candidate); distance < least && distance*2 <= len(candidate) {
			nearest, least = candidate, distance
		}
	}
	if nearest == "" {
		return ""
	}
	return fmt.Sprintf("; did you mean %q?", nearest)
}

// editDistance counts the letters to change, to add or to remove.
func editDistance(one, other string) int {
	row := make([]int, len(other)+1)
	for j := range row {
		row[j] = j
	}
	for i := 1; i <= len(one); i++ {
		diagonal := row[0]
		row[0] = i
		for j := 1; j <= len(other); j++ {
			best := diagonal
			if one[i-1] != other[j-1] {
				best++
			}
			if row[j]+1 < best {
				best = row[j] + 1
			}
			if row[j-1]+1 < best {
				best = row[j-1] + 1
			}
			diagonal, row[j] = row[j], best
		}
	}
	return row[len(other)]
}

// compiled are settings on top of their profile, checked.
type compiled struct {
	Settings
	profile         profile
	refusals        *refusalShape
	caller          callerScope
	grammar         keyGrammar
	rules           fingerprintRules
	natural         naturalKey
	methods         map[string]bool
	releases        map[int]bool
	stored          map[string]bool
	policy          policy
	marker          Field
	problemBase     string
	documentation   string
	comparesNothing bool
}

func compile(s Settings) (*compiled, error) {
	if s.Profile == "" {
		s.Profile = "ietf"
	}
	base, found := theContract().Profiles[s.Profile]
	if !found {
		return nil, fmt.Errorf("oncegate: the profile %q is unknown; this library has ietf, stripe and classic", s.Profile)
	}
	c := &compiled{Settings: s, profile: base, problemBase: firstText(s.ProblemBaseURL, "urn:oncegate:problem:"), documentation: s.Documentation}
	p := &c.profile
	if len(s.KeyHeaders) > 0 {
		p.KeyHeader = nil
		for _, name := range s.KeyHeaders {
			if !isToken(name) || keyHeaderHasOtherPurpose(asciiLower(name)) {
				return nil, fmt.Errorf("oncegate: the header field %q cannot carry the key, because requests use it for another purpose or its name is invalid", name)
			}
			p.KeyHeader = append(p.KeyHeader, http.CanonicalHeaderKey(name))
		}
	}
	p.RequireKey = p.RequireKey || s.RequireKey
	p.KeySyntax, p.KeyFormat = firstText(s.KeySyntax, p.KeySyntax), firstText(s.KeyFormat, p.KeyFormat)
	p.KeyScope, p.ServerErrors = firstText(s.KeyScope, p.KeyScope), firstText(s.ServerErrors, p.ServerErrors)
	oneOf := func(name, value string, words ...string) error {
		for _, word := range words {
			if value == word {
				return nil
			}
		}
		return fmt.Errorf("oncegate: %s is %q; write %s", name, value, strings.Join(words, " or "))
	}
	c.Authority = firstText(s.Authority, "compare")
	body := firstText(s.FingerprintBody, p.Fingerprint.Body)
	for _, err := range []error{
		oneOf("Authority", c.Authority, "compare", "scope", "ignore"),
		oneOf("KeyScope", p.KeyScope, "endpoint", "caller"),
		oneOf("ServerErrors", p.ServerErrors, "replay", "release"),
		oneOf("FingerprintBody", body, "canonical", "raw", "nothing"),
	} {
		if err != nil {
			return nil, err
		}
	}
	for _, list := range []struct {
		name, why string
		value     []string
	}{{"Methods", "nothing would be protected", s.Methods}, {"KeyHeaders", "no request would have a key", s.KeyHeaders},
		{"Scope", "callers would not be told apart", s.Scope}, {"NaturalKey", "no key could be built", s.NaturalKey}} {
		if list.value != nil && len(list.value) == 0 {
			return nil, fmt.Errorf("oncegate: %s is empty, so %s; leave it nil for the default", list.name, list.why)
		}
	}
	var err error
	if c.caller, err = newCallerScope(s.Scope, s.Caller); err != nil {
		return nil, err
	}
	if c.grammar, err = newKeyGrammar(p.KeySyntax, p.KeyFormat); err != nil {
		return nil, err
	}
	c.refusals = p.refusalShape()
	c.rules.raw, c.comparesNothing = body == "raw", body == "nothing"
	if c.rules.include, err = parsePointers(append(append([]string(nil), p.Fingerprint.Include...), s.FingerprintInclude...)); err != nil {
		return nil, err
	}
	if c.rules.exclude, err = parsePointers(append(append([]string(nil), p.Fingerprint.Exclude...), s.FingerprintExclude...)); err != nil {
		return nil, err
	}
	members, err := parsePointers(s.NaturalKey)
	if err != nil {
		return nil, err
	}
	if len(members) > maxKeyMembers {
		return nil, fmt.Errorf("oncegate: the natural key has %d members; at most %d are allowed", len(members), maxKeyMembers)
	}
	if c.natural = members; len(members) > 0 && c.caller.allowsAnonymous() {
		return nil, errors.New("oncegate: a natural key is easy to guess, so callers must be told apart; set Scope to something required, or to single-tenant")
	}
	if len(s.Methods) > 0 {
		p.Methods = s.Methods
	}
	c.methods = map[string]bool{}
	for _, method := range p.Methods {
		switch upper := asciiUpper(method); {
		case !isToken(method):
			return nil, fmt.Errorf("oncegate: Methods has %q, which is not a method; write each as a text of its own, such as \"POST\", \"PATCH\"", method)
		case upper == "GET" || upper == "HEAD" || upper == "OPTIONS" || upper == "TRACE" || upper == "CONNECT":
			return nil, fmt.Errorf("oncegate: Methods has %s, which cannot be covered: a key protects requests that change something", upper)
		}
		c.methods[asciiUpper(method)] = true
	}
	c.releases = map[int]bool{401: true, 403: true, 407: true, 408: true, 421: true, 425: true, 429: true}
	for _, status := range p.ReleaseStatuses {
		for code := 400; code < 600; code++ {
			text := strconv.Itoa(code)
			if text == status || text[:1]+"xx" == status {
				c.releases[code] = true
			}
		}
	}
	for _, status := range s.ReleaseStatuses {
		if status < 400 || status > 599 {
			return nil, fmt.Errorf("oncegate: the status %d cannot free the key; only those from 400 to 599 can", status)
		}
		c.releases[status] = true
	}
	c.stored = map[string]bool{}
	for _, name := range s.StoredHeaders {
		if name = asciiLower(name); !isToken(name) || isNeverKept(name) {
			return nil, fmt.Errorf("oncegate: the header field %s must not be stored and replayed", name)
		}
		c.stored[name] = true
	}
	for _, table := range []string{"response", "kept-server-error"} {
		for name := range p.Headers[table] {
			c.stored[asciiLower(name)] = true
		}
	}
	marker, value, _ := strings.Cut(p.ReplayMarker, ":")
	c.marker = Field{marker, trimASCII(value)}
	if s.ReplayMarker != "" {
		name, own, hasValue := strings.Cut(s.ReplayMarker, ":")
		if !isToken(name) || keptFields[asciiLower(name)] || isNeverKept(asciiLower(name)) {
			return nil, fmt.Errorf("oncegate: the header field %q cannot mark a replay, because it has another purpose", name)
		}
		if c.marker.Name = name; hasValue {
			c.marker.Value = trimASCII(own)
		}
	}
	c.marker.Name = http.CanonicalHeaderKey(c.marker.Name)
	for _, address := range []string{s.Documentation, s.ProblemBaseURL} {
		if u, err := url.Parse(address); address != "" && (err != nil || !u.IsAbs() || strings.ContainsAny(address, "<>\" \r\n")) {
			return nil, fmt.Errorf("oncegate: %q is not an address; write one with its scheme", address)
		}
	}
	defaults := []struct {
		name     string
		value    *int
		fallback int
	}{{"MaxRequestBody", &c.MaxRequestBody, 2 << 20}, {"MaxResponseBody", &c.MaxResponseBody, 1 << 20}, {"MaxInFlight", &c.MaxInFlight, 2048},
		{"MaxInFlightPerCaller", &c.MaxInFlightPerCaller, 1024}, {"RequestBudget", &c.RequestBudget, 256 << 20},
		{"ResponseBudget", &c.ResponseBudget, 256 << 20}}
	for _, limit := range defaults {
		if *limit.value < 0 {
			return nil, fmt.Errorf("oncegate: %s is negative", limit.name)
		}
		if *limit.value == 0 {
			*limit.value = limit.fallback
		}
	}
	if c.MaxResponseBody > maxResponseBytes/2 {
		return nil, fmt.Errorf("oncegate: MaxResponseBody is larger than %d", maxResponseBytes/2)
	}
	if err := checkTime("BodyTimeout", c.BodyTimeout, minTime); err != nil {
		return nil, err
	}
	if err := checkTime("WriteTimeout", c.WriteTimeout, minTime); err != nil && c.WriteTimeout > 0 {
		return nil, err
	}
	if c.WriteTimeout == 0 {
		c.WriteTimeout = time.Minute
	}
	if c.BodyTimeout == 0 {
		c.BodyTimeout = time.Minute
	}
	c.policy = policy{s.Lease, s.Retention, s.Wait, s.OnAbandoned}
	if c.policy.retention == 0 {
		if c.policy.retention, err = parseDuration(p.Retention); err != nil {
			return nil, err
		}
	}
	return c, c.policy.check()
}

var otherPurposes = setOf("accept", "authorization", "baggage", "cache-control", "connection", "cookie", "date", "depth", "destination", "digest",
	"dnt", "dpop", "expect", "forwarded", "from", "host", "http2-settings", "keep-alive", "link", "location", "max-forwards", "origin",
	"overwrite", "pragma", "prefer", "priority", "range", "referer", "save-data", "set-cookie", "te", "timeout", "traceparent", "tracestate",
	"trailer", "transfer-encoding", "upgrade", "user-agent", "via", "x-http-method-override", "x-real-ip", "x-requested-with")

func keyHeaderHasOtherPurpose(name string) bool {
	for _, prefix := range []string{"accept-", "access-control-", "content-", "if-", "oncegate-", "proxy-", "sec-", "upgrade-", "x-forwarded-"} {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return otherPurposes[name]
}

func (c *compiled) covers(method string) bool { return c.methods[asciiUpper(method)] }

func (c *compiled) bodyHasKey() bool { return len(c.natural) > 0 }

// addFields adds the fields of a table of the profile. A field whose value needs another one that is not there is left out.
func (c *compiled) addFields(table string, header http.Header, isRetryable bool) {
	for name, value := range c.profile.Headers[table] {
		if from, found := cutBetween(value, "{response:", "}"); found {
			own := header.Get(from)
			if own == "" {
				continue
			}
			value = strings.Replace(value, "{response:"+from+"}", own, 1)
		}
		header.Set(name, strings.ReplaceAll(value, "{retryable}", strconv.FormatBool(isRetryable)))
	}
}

func cutBetween(text, open, end string) (string, bool) {
	_, rest, found := strings.Cut(text, open)
	if !found {
		return "", false
	}
	inside, _, found := strings.Cut(rest, end)
	return inside, found
}
