package oncegate

import (
	"net/http"
	"sort"
	"strings"
)

func setOf(names ...string) map[string]bool {
	set := make(map[string]bool, len(names))
	for _, name := range names {
		set[name] = true
	}
	return set
}

// keptFields are kept by default: they describe the response, and not its time or its connection.
var keptFields = setOf("content-type", "content-encoding", "content-language", "content-disposition", "content-location", "location", "etag",
	"last-modified", "link", "cache-control", "vary", "content-range", "accept-patch", "preference-applied", "deprecation", "sunset")

// neverKept are never kept, even if they are configured: hop-by-hop, recomputed, secret, temporary, or the name of one request.
var neverKept = setOf("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "date",
	"age", "expires", "set-cookie", "set-cookie2", "authorization", "www-authenticate", "authentication-info", "authentication-control",
	"optional-www-authenticate", "proxy-authenticate", "proxy-authentication-info", "proxy-authorization", "clear-site-data",
	"strict-transport-security", "alt-svc", "via", "server", "traceparent", "tracestate", "baggage", "b3", "x-request-id", "request-id",
	"x-correlation-id", "x-trace-id", "server-timing", "retry-after", "idempotency-key", "idempotency-store", "idempotency-status",

	"traceresponse", "grpc-trace-bin", "uber-trace-id", "sentry-trace", "newrelic", "elastic-apm-traceparent", "x-ot-span-context",
	"x-cloud-trace-context", "x-guploader-uploadid", "x-amzn-trace-id", "x-amzn-requestid", "x-amzn-request-id", "x-amz-request-id",
	"x-amz-id-2", "x-amz-apigw-id", "apigw-requestid", "x-ms-request-id", "x-ms-client-request-id", "x-ms-correlation-request-id",
	"x-ms-routing-request-id", "x-msedge-ref", "x-azure-ref", "request-context", "x-correlationid", "correlation-id", "x-oss-request-id",
	"eagleeye-traceid", "cf-ray", "cf-request-id", "fly-request-id", "x-vercel-id", "x-nf-request-id", "x-akamai-request-id", "x-served-by",
	"x-timer", "x-github-request-id", "x-gitlab-meta", "paypal-debug-id", "x-shopify-request-id", "x-runtime")

var neverKeptPrefixes = []string{"access-control-", "oncegate-", "ratelimit", "x-ratelimit-", "x-b3-", "x-datadog-", "x-instana-", "x-envoy-",
	"x-amz-cf-", "x-newrelic-"}

func isNeverKept(name string) bool {
	if neverKept[name] {
		return true
	}
	for _, prefix := range neverKeptPrefixes {
		if strings.HasPrefix(name, prefix) {
			return true
		}
	}
	return false
}

// lines calls visit for each field line, in the order of the names in lower case.
func lines(header http.Header, visit func(name, value string)) {
	names := make([]string, 0, len(header))
	for name := range header {
		names = append(names, name)
	}
	sort.Strings(names)
	for _, name := range names {
		for _, value := range header[name] {
			visit(asciiLower(name), value)
		}
	}
}

// keptOf returns the fields of a response that are kept.
func keptOf(header http.Header, more map[string]bool) (kept []Field) {
	nominated := map[string]bool{}
	for _, value := range header.Values("Connection") {
		for _, token := range strings.Split(value, ",") {
			nominated[asciiLower(trimASCII(token))] = true
		}
	}
	lines(header, func(name, value string) {
		if (keptFields[name] || more[name]) && !nominated[name] {
			kept = append(kept, Field{name, value})
		}
	})
	return kept
}

// restore adds kept fields, without those that are never kept: a service that completes its record itself may have put any field there.
func restore(fields []Field, header http.Header) {
	fresh := map[string]bool{}
	for _, field := range fields {
		if !isToken(field.Name) || strings.ContainsAny(field.Value, "\r\n\x00") || !keptFields[field.Name] && isNeverKept(field.Name) {
			continue
		}
		name := http.CanonicalHeaderKey(field.Name)
		if !fresh[name] {
			header.Del(name)
			fresh[name] = true
		}
		header[name] = append(header[name], field.Value)
	}
}

// trimASCII removes white space around a value.
func trimASCII(text string) string { return strings.Trim(text, " \t\n\r\f") }

// joinedLines is the value of a header field with all its lines: it is not known which of them the service reads.
func joinedLines(header http.Header, name string) string {
	return strings.Join(header.Values(name), ", ")
}

// overrideFields name another method or path than the request line.
var overrideFields = setOf("x-http-method-override", "x-http-method", "x-method-override", "x-original-method", "x-original-url",
	"x-original-uri", "x-rewrite-url")

// hyphenated is a name as services read it that take _ for -.
func hyphenated(name string) string { return strings.ReplaceAll(asciiLower(name), "_", "-") }

// isOtherSpelling reports if two names differ, and are equal to a service that takes _ for -.
func isOtherSpelling(one, other string) bool {
	return len(one) == len(other) && asciiLower(one) != asciiLower(other) && hyphenated(one) == hyphenated(other)
}
