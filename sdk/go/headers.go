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

// eachField calls visit for the names of the fields that pass, in their order.
func eachField(header http.Header, passes func(name string) bool, visit func(name string, values []string)) {
	var few [16]string
	names := few[:0]
	for name := range header {
		if passes(name) {
			names = append(names, name)
		}
	}
	sortNames(names)
	for _, name := range names {
		visit(name, header[name])
	}
}

// sortNames is sort.Strings, and leaves a few names where they are in memory.
func sortNames(names []string) {
	if len(names) > 16 {
		sorted := append([]string(nil), names...)
		sort.Strings(sorted)
		copy(names, sorted)
		return
	}
	for i := range names {
		for j := i; j > 0 && names[j] < names[j-1]; j-- {
			names[j], names[j-1] = names[j-1], names[j]
		}
	}
}

// keptOf returns the fields of a response that are kept, in the order of their names.
func keptOf(header http.Header, more map[string]bool) (kept []Field) {
	nominated := map[string]bool(nil)
	if connection := header["Connection"]; len(connection) > 0 {
		nominated = map[string]bool{}
		for _, value := range connection {
			for _, token := range strings.Split(value, ",") {
				nominated[asciiLower(trimASCII(token))] = true
			}
		}
	}
	eachField(header, func(name string) bool {
		lower := lowerName(name)
		return (keptFields[lower] || more[lower]) && !nominated[lower]
	}, func(name string, values []string) {
		for _, value := range values {
			kept = append(kept, Field{lowerName(name), lineBreaks.Replace(value)})
		}
	})
	return kept
}

// lineBreaks makes a value what net/http sends.
var lineBreaks = strings.NewReplacer("\r", " ", "\n", " ")

// usualNames has the usual names of fields in lower case, by their usual spelling.
var usualNames = func() map[string]string {
	names := map[string]string{}
	fields := theContract().HeaderFields
	for _, list := range [][]string{fields.Kept, fields.Never, fields.Usual, {"authorization", "idempotency-key"}} {
		for _, name := range list {
			names[http.CanonicalHeaderKey(name)] = name
		}
	}
	return names
}()

// lowerName is the name of a field in lower case.
func lowerName(name string) string {
	if lower, ok := usualNames[name]; ok {
		return lower
	}
	return asciiLower(name)
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
	if values := header.Values(name); len(values) != 1 {
		return strings.Join(values, ", ")
	} else {
		return values[0]
	}
}

// overrideFields name another method or path than the request line.
var overrideFields = setOf("x-http-method-override", "x-http-method", "x-method-override", "x-original-method", "x-original-url",
	"x-original-uri", "x-rewrite-url")

// isOverride reports if a field names another method or path than the request line.
func isOverride(name string) bool {
	if _, isUsual := usualNames[name]; isUsual || len(name) == 0 || lowerOf(name[0]) != 'x' {
		return false
	}
	return overrideFields[hyphenated(name)]
}

// hyphenated is a name as services read it that take _ for -.
func hyphenated(name string) string { return strings.ReplaceAll(asciiLower(name), "_", "-") }

// isOtherSpelling reports if two names differ, and are equal to a service that takes _ for -.
func isOtherSpelling(one, other string) bool {
	if len(one) != len(other) {
		return false
	}
	differs := false
	for i := 0; i < len(one); i++ {
		x, y := lowerOf(one[i]), lowerOf(other[i])
		if x == y {
			continue
		}
		if x != '_' && x != '-' || y != '_' && y != '-' {
			return false
		}
		differs = true
	}
	return differs
}
