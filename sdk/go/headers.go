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

// keptFields are kept by default: they describe the response, and not its time or its connection. Those of neverKept, and those with
// one of the prefixes, are never kept, even if they are configured.
var (
	keptFields        = setOf(theContract().HeaderFields.Kept...)
	neverKept         = setOf(theContract().HeaderFields.Never...)
	neverKeptPrefixes = theContract().HeaderFields.NeverPrefixes
)

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
