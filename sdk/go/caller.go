package oncegate

import (
	"fmt"
	"net/http"
	"sort"
	"strings"
	"sync"
)

// callerScope tells callers apart, so that one caller's key never meets another's record.
type callerScope struct {
	parts []callerPart
	// chosen is false for the default scope.
	chosen bool
	custom func(*http.Request) (string, bool)
}

type callerPart struct {
	// kind keeps equal values of different parts apart.
	kind     string
	source   string
	name     string
	required bool
}

func newCallerScope(settings []string, custom func(*http.Request) (string, bool)) (callerScope, error) {
	if custom != nil {
		if len(settings) > 0 {
			return callerScope{}, fmt.Errorf("oncegate: Scope and Caller are both set; set one of them")
		}
		return callerScope{chosen: true, custom: custom}, nil
	}
	if len(settings) == 0 {
		return callerScope{parts: []callerPart{{"header:authorization", "header", "Authorization", false}}}, nil
	}
	scope := callerScope{chosen: true}
	for _, setting := range settings {
		source, name, _ := strings.Cut(setting, ":")
		required := strings.HasPrefix(source, "required-")
		part := callerPart{source: strings.TrimPrefix(source, "required-"), name: name, required: required}
		switch {
		case setting == "single-tenant":
			if len(settings) > 1 {
				return scope, fmt.Errorf("oncegate: the scope single-tenant cannot be combined with others")
			}
			return scope, nil
		case setting == "host":
			part.kind, part.required = "host", true
		case part.source == "header" && isToken(name):
			part.kind, part.name = "header:"+asciiLower(name), http.CanonicalHeaderKey(name)
		case part.source == "cookie" && isToken(name):
			part.kind = "cookie:" + name
		default:
			return scope, fmt.Errorf("oncegate: the scope %q is unknown; write header:NAME, required-header:NAME, cookie:NAME, "+
				"required-cookie:NAME, host or single-tenant, or set Caller", setting)
		}
		isNew := true
		for i := range scope.parts {
			if scope.parts[i].kind == part.kind {
				scope.parts[i].required = scope.parts[i].required || part.required
				isNew = false
			}
		}
		if isNew {
			scope.parts = append(scope.parts, part)
		}
	}
	sort.Slice(scope.parts, func(i, j int) bool { return scope.parts[i].kind < scope.parts[j].kind })
	return scope, nil
}

func (s callerScope) isSingleTenant() bool { return len(s.parts) == 0 && s.custom == nil }

// allowsAnonymous reports if requests that do not identify their caller share a scope. The host identifies nobody.
func (s callerScope) allowsAnonymous() bool {
	if s.isSingleTenant() || s.custom != nil {
		return false
	}
	for _, part := range s.parts {
		if part.required && part.source != "host" {
			return false
		}
	}
	return true
}

// credentials names the parts of the scope whose values change while the caller stays the same: Authorization and cookies.
func (s callerScope) credentials() string {
	var names []string
	for _, part := range s.parts {
		switch {
		case part.name == "Authorization":
			names = append(names, part.name)
		case part.source == "cookie":
			names = append(names, "the cookie "+part.name)
		}
	}
	return strings.Join(names, " and ")
}

// of returns the caller of a request. authority is the host if hosts have keys of their own.
func (s callerScope) of(r *http.Request, authority string, byAuthority bool, keyHeaders []string) ([]identity, *refusal) {
	var identities []identity
	if s.custom != nil {
		value, ok := s.custom(r)
		if !ok || value == "" {
			return nil, missingCaller("The identity of the caller", false)
		}
		identities = append(identities, identity{"function", value})
	}
	for _, part := range s.parts {
		value, refusal := part.identity(r)
		if refusal != nil {
			return nil, refusal
		}
		if value != "" {
			identities = append(identities, identity{part.kind, value})
		} else if part.required {
			return nil, missingCaller(part.shown(), part.name == "Authorization")
		}
	}
	if !s.chosen {
		if refusal := doubtOf(r, keyHeaders, len(identities) > 0); refusal != nil {
			return nil, refusal
		}
	}
	if len(identities) == 0 && !s.isSingleTenant() {
		identities = append(identities, identity{"anonymous", ""})
	}
	if byAuthority {
		identities = append(identities, identity{"authority", authority})
		sort.SliceStable(identities, func(i, j int) bool { return identities[i].kind < identities[j].kind })
	}
	return identities, nil
}

func (p callerPart) shown() string {
	switch p.source {
	case "header":
		return "The header field " + asciiLower(p.name)
	case "cookie":
		return "The cookie " + p.name
	}
	return "The host"
}

func missingCaller(part string, isAuthorization bool) *refusal {
	refusal := refuse("scope-unavailable").with(part + " is missing or empty, and the service tells callers apart by it. Nothing was executed for this request.")
	if isAuthorization {
		refusal.status = http.StatusUnauthorized
	}
	return refusal
}

// bareSchemes are schemes of Authorization. A field with a scheme and nothing after it has no credential.
var bareSchemes = setOf("bearer", "basic", "digest", "token", "apikey", "dpop", "hmac", "negotiate")

func (p callerPart) identity(r *http.Request) (string, *refusal) {
	repeated := func() *refusal {
		return refuse("scope-unavailable").with(p.shown() + " was sent more than once, or with a `_` instead of a `-` in its name, and the service " +
			"tells callers apart by it. Nothing was executed for this request.")
	}
	switch p.source {
	case "header":
		if p.name == "Host" {
			return trimASCII(r.Host), nil
		}
		values := r.Header.Values(p.name)
		if len(values) > 1 {
			return "", repeated()
		}
		for other, values := range r.Header {
			if isOtherSpelling(other, p.name) && hasValue(values) {
				return "", repeated()
			}
		}
		if len(values) == 0 {
			return "", nil
		}
		value := trimASCII(values[0])
		if p.name == "Authorization" && bareSchemes[asciiLower(value)] {
			return "", nil
		}
		return value, nil
	case "cookie":
		value, found := "", false
		for _, line := range r.Header.Values("Cookie") {
			for _, pair := range strings.Split(line, ";") {
				name, own, hasValue := strings.Cut(pair, "=")
				if !hasValue || trimASCII(name) != p.name {
					continue
				}
				// Browsers send cookies of several paths under one name; the same value twice is one caller.
				if own = trimASCII(own); found && own != value {
					return "", repeated()
				}
				value, found = own, true
			}
		}
		return value, nil
	}
	return authorityOf(r), nil
}

// authorityOf is the host that a request is for: in lower case, with its port unless that is the one of HTTP or HTTPS.
func authorityOf(r *http.Request) string {
	authority := strings.ToLower(strings.TrimSpace(r.Host))
	if at := strings.LastIndexByte(authority, '@'); at >= 0 {
		authority = authority[at+1:]
	}
	// TLS may have ended in a proxy in front, so both ports are default ports.
	for _, port := range []string{":80", ":443", ":"} {
		if host, found := cutSuffix(authority, port); found {
			return host
		}
	}
	return authority
}

func hasValue(values []string) bool {
	for _, value := range values {
		if trimASCII(value) != "" {
			return true
		}
	}
	return false
}

// doubtOf refuses a request if it is doubtful that Authorization identifies its caller.
func doubtOf(r *http.Request, keyHeaders []string, isAuthorized bool) *refusal {
	notSet := func(what string) *refusal {
		return refuse("scope-not-set").with("The request has " + what + ", and the service is not configured to tell callers apart by it: the setting " +
			"`scope` is missing. Nothing was executed for this request.")
	}
	authorization := ""
	if isAuthorized {
		authorization = trimASCII(r.Header.Get("Authorization"))
	}
	if isNewEachTime(authorization) {
		return notSet("an Authorization that is new each time, so that a retry would look like another caller")
	}
	// A site behind one shared password: its browsers send the same Basic for all users, and a cookie for each.
	isSharedPassword := len(authorization) >= 6 && asciiLower(authorization[:6]) == "basic "
	// The first one by its name, so that the refusal is the same each time.
	doubtful := ""
	for own, values := range r.Header {
		if doubtful != "" && own > doubtful {
			continue
		}
		name := lowerName(own)
		if !isCredential(name) || !hasValue(values) || isKeyHeader(keyHeaders, own) {
			continue
		}
		if isAuthorized && (strings.Contains(name, "signature") || strings.Contains(name, "dpop") || strings.Contains(name, "hmac") ||
			(name == "cookie" || name == "mcp-session-id") && !isSharedPassword) {
			continue
		}
		doubtful = own
	}
	switch {
	case doubtful == "":
		return nil
	case isAuthorized:
		return notSet("the header field " + asciiLower(doubtful) + " in addition to Authorization")
	}
	return notSet("the header field " + asciiLower(doubtful) + " and no Authorization")
}

func isKeyHeader(keyHeaders []string, name string) bool {
	for _, own := range keyHeaders {
		if own == name {
			return true
		}
	}
	return false
}

var schemesNewEachTime = setOf("digest", "signature", "hawk", "mac", "aws", "sharedkey", "sharedkeylite", "negotiate", "ntlm", "hoba", "mutual")

// isNewEachTime reports if a credential signs the request, the time or a counter: a retry then has another one.
func isNewEachTime(authorization string) bool {
	scheme, rest, found := strings.Cut(authorization, " ")
	scheme = asciiLower(scheme)
	return authorization != "" && (schemesNewEachTime[scheme] ||
		found && (strings.Contains(scheme, "hmac") || strings.HasPrefix(scheme, "scram-")) ||
		scheme == "oauth" && strings.Contains(rest, "oauth_nonce"))
}

var (
	usualFields       = setOf(append(theContract().HeaderFields.Usual, "authorization")...)
	listedCredentials = setOf(theContract().HeaderFields.Callers...)
	credentialParts   = theContract().HeaderFields.CallerParts
	noCredentialParts = append(theContract().HeaderFields.NoCallerParts, "verification-token")
)

// isCredential reports if a field of this name usually carries a credential, or names the caller that a proxy in front identified. A field
// that is wrongly taken for one costs a refusal that names it; one that is not recognised would give one caller the response of another.
func isCredential(name string) bool {
	if usualFields[name] {
		return false
	}
	return credentialNames.of(name, readsAsCredential)
}

// credentialNames has the names of fields that requests had, and whether they are credentials.
var credentialNames nameCache

// nameCache remembers a property of names.
type nameCache struct {
	mu    sync.RWMutex
	known map[string]bool
}

// maxCachedNames bounds a cache: clients choose the names.
const maxCachedNames = 1000

func (c *nameCache) of(name string, read func(string) bool) bool {
	c.mu.RLock()
	has, isKnown := c.known[name]
	c.mu.RUnlock()
	if isKnown {
		return has
	}
	has = read(name)
	if len(name) > 64 {
		return has
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.known == nil || len(c.known) >= maxCachedNames {
		c.known = map[string]bool{}
	}
	c.known[strings.Clone(name)] = has
	return has
}

func readsAsCredential(name string) bool {
	name = hyphenated(name)
	if listedCredentials[name] {
		return true
	}
	looksLikeOne := false
	for _, part := range credentialParts {
		looksLikeOne = looksLikeOne || strings.Contains(name, part)
	}
	for rest := name; !looksLikeOne; {
		at := strings.Index(rest, "auth")
		if at < 0 {
			break
		}
		rest = rest[at+4:]
		// author and authority, but not authorization
		isOfAuthors := strings.HasPrefix(rest, "or") && !strings.HasPrefix(rest, "oriz") && !strings.HasPrefix(rest, "oris")
		looksLikeOne = !isOfAuthors
	}
	if !looksLikeOne || name == "lock-token" {
		return false
	}
	for _, beginning := range []string{"sec-", "www-", "oncegate-"} {
		if strings.HasPrefix(name, beginning) {
			return false
		}
	}
	for _, part := range noCredentialParts {
		if strings.Contains(name, part) {
			return false
		}
	}
	return true
}
