package oncegate

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// keyError is the error in a key. Its text is for the caller and repeats nothing of the key.
type keyError string

func (e keyError) Error() string { return string(e) }

const (
	errSeveralKeys   = keyError("the key was sent more than once; send one key")
	errDifferingKeys = keyError("two places have different keys; send one key")
	errEmptyKey      = keyError("the key is empty")
	errBadString     = keyError("the key starts with a quote but is not a string of RFC 9651; send \"key\" or the key without quotes")
	errBadByte       = keyError("the key has a character that is not allowed")
	errCommaInKey    = keyError("the key has a comma; send one key, or put it in quotes")
	errNotQuoted     = keyError("the key must be in double quotes")
	errUnreadable    = keyError("the body is no JSON that every program reads alike, or its content coding cannot be undone, so a key in it may be " +
		"overlooked; send JSON in UTF-8, as it is or in gzip")
	errSpelling = keyError("the name of the field was sent with `_` for `-`, or the reverse; send it as it is written here")
)

// keyFormatError is the error of a key that does not have the format.
type keyFormatError struct{ want string }

func (e keyFormatError) Error() string { return "the key is not " + e.want }

// keyGrammar is the syntax of the key's header field and the format of the key.
type keyGrammar struct {
	syntax  string
	format  string
	pattern *regexp.Regexp
}

func newKeyGrammar(syntax, format string) (keyGrammar, error) {
	g := keyGrammar{syntax: syntax, format: format}
	switch syntax {
	case "lenient", "strict", "raw":
	default:
		return g, fmt.Errorf("oncegate: the key syntax %q is unknown; write lenient, strict or raw", syntax)
	}
	switch {
	case format == "any" || format == "uuid" || format == "ulid":
	case strings.HasPrefix(format, "pattern:"):
		pattern, err := regexp.Compile("^(?:" + format[len("pattern:"):] + ")$")
		if err != nil {
			return g, fmt.Errorf("oncegate: the key format %q is not a regular expression: %w", format, err)
		}
		g.pattern = pattern
	default:
		return g, fmt.Errorf("oncegate: the key format %q is unknown; write any, uuid, ulid or pattern:REGEX", format)
	}
	return g, nil
}

// parse reads the value of a field.
func (g keyGrammar) parse(field string) (string, error) {
	field = strings.Trim(field, " \t")
	if field == "" {
		return "", errEmptyKey
	}
	switch {
	case g.syntax == "raw":
		if !utf8.ValidString(field) || strings.IndexFunc(field, unicode.IsControl) >= 0 {
			return "", errBadByte
		}
		return g.key(field)
	case field[0] == '"':
		key, ok := parseSFString(field)
		if !ok {
			return "", errBadString
		}
		return g.key(key)
	case g.syntax == "strict":
		return "", errNotQuoted
	}
	for i := 0; i < len(field); i++ {
		switch c := field[i]; {
		case c == ',':
			return "", errCommaInKey
		case c <= ' ' || c > '~' || c == '"':
			return "", errBadByte
		}
	}
	return g.key(field)
}

// key checks the format of a key.
func (g keyGrammar) key(key string) (string, error) {
	if strings.Trim(key, " ") == "" {
		return "", errEmptyKey
	}
	if len(key) > maxKeyBytes {
		return "", keyError(fmt.Sprintf("the key has %d characters; at most %d are allowed", len(key), maxKeyBytes))
	}
	switch {
	case g.pattern != nil:
		if !g.pattern.MatchString(key) {
			return "", keyFormatError{"of the published format"}
		}
	case g.format == "uuid":
		if !isUUID(key) {
			return "", keyFormatError{"a UUID"}
		}
		return asciiLower(key), nil
	case g.format == "ulid":
		if !isULID(key) {
			return "", keyFormatError{"a ULID"}
		}
		return asciiUpper(key), nil
	}
	return key, nil
}

// explain returns the error, and what to send instead.
func (g keyGrammar) explain(err error) string {
	_, isFormat := err.(keyFormatError)
	switch {
	case err == errBadByte && g.syntax == "raw":
		return err.Error() + "; send text in UTF-8 without control characters"
	case err == errBadByte:
		return err.Error() + "; send visible ASCII characters without quote and comma, or put the key in quotes"
	case err != errEmptyKey && !isFormat:
		return err.Error()
	}
	advice := "send 1 to 255 characters, such as a UUID"
	switch {
	case g.pattern != nil:
		advice = "send one that the regular expression " + g.format[len("pattern:"):] + " matches from end to end"
	case g.format == "uuid":
		advice = "send a UUID of 36 characters"
	case g.format == "ulid":
		advice = "send a ULID of 26 characters"
	}
	return err.Error() + "; " + advice
}

func isUUID(key string) bool {
	if len(key) != 36 {
		return false
	}
	for i := 0; i < len(key); i++ {
		if i == 8 || i == 13 || i == 18 || i == 23 {
			if key[i] != '-' {
				return false
			}
		} else if _, ok := hexDigit(key[i]); !ok {
			return false
		}
	}
	return true
}

// isULID: Crockford's base 32 has no I, L, O and U; 26 of its digits hold 130 bits, so the first is at most 7.
func isULID(key string) bool {
	if len(key) != 26 || key[0] > '7' {
		return false
	}
	for i := 0; i < len(key); i++ {
		if !isAlnum(key[i]) || strings.IndexByte("ILOUilou", key[i]) >= 0 {
			return false
		}
	}
	return true
}

// parseSFString reads an item of RFC 9651 that is a string. Its parameters are checked and ignored.
func parseSFString(field string) (string, bool) {
	var text []byte
	i := 1
	for ; ; i++ {
		if i >= len(field) {
			return "", false
		}
		c := field[i]
		if c == '"' {
			break
		}
		if c == '\\' {
			if i++; i >= len(field) || field[i] != '"' && field[i] != '\\' {
				return "", false
			}
			c = field[i]
		} else if c < ' ' || c > '~' {
			return "", false
		}
		text = append(text, c)
	}
	return string(text), skipSFParameters(field[i+1:])
}

// skipSFParameters reports if a text is a list of parameters (RFC 9651, 3.1.2), to its end.
func skipSFParameters(rest string) bool {
	for strings.HasPrefix(rest, ";") {
		rest = strings.TrimLeft(rest[1:], " ")
		end := 0
		for end < len(rest) && (isLower(rest[end]) || rest[end] == '*' || end > 0 && (isDigit(rest[end]) || strings.IndexByte("_-.*", rest[end]) >= 0)) {
			end++
		}
		if end == 0 {
			return false
		}
		rest = rest[end:]
		if strings.HasPrefix(rest, "=") {
			var ok bool
			if rest, ok = skipSFBareItem(rest[1:]); !ok {
				return false
			}
		}
	}
	return strings.Trim(rest, " ") == ""
}

func isLower(c byte) bool { return 'a' <= c && c <= 'z' }
func isDigit(c byte) bool { return '0' <= c && c <= '9' }

func skipSFBareItem(rest string) (string, bool) {
	if rest == "" {
		return "", false
	}
	span := func(from int, allowed func(byte) bool) int {
		for from < len(rest) && allowed(rest[from]) {
			from++
		}
		return from
	}
	number := func(from int) (int, bool, bool) {
		start := from
		if from < len(rest) && rest[from] == '-' {
			from, start = from+1, start+1
		}
		from = span(from, isDigit)
		whole := from - start
		if whole == 0 || whole > 15 {
			return from, false, false
		}
		if from < len(rest) && rest[from] == '.' {
			end := span(from+1, isDigit)
			fraction := end - from - 1
			return end, true, whole <= 12 && 1 <= fraction && fraction <= 3
		}
		return from, false, true
	}
	switch c := rest[0]; {
	case c == '"':
		for i := 1; i < len(rest); i++ {
			switch {
			case rest[i] == '"':
				return rest[i+1:], true
			case rest[i] == '\\':
				if i++; i >= len(rest) || rest[i] != '"' && rest[i] != '\\' {
					return "", false
				}
			case rest[i] < ' ' || rest[i] > '~':
				return "", false
			}
		}
		return "", false
	case c == '-' || isDigit(c):
		end, _, ok := number(0)
		return rest[end:], ok
	case c == '*' || 'A' <= c && c <= 'Z' || isLower(c):
		end := span(0, func(c byte) bool { return isAlnum(c) || strings.IndexByte("!#$%&'*+-.^_`|~:/", c) >= 0 })
		return rest[end:], true
	case c == ':':
		end := span(1, func(c byte) bool { return isAlnum(c) || strings.IndexByte("+/=", c) >= 0 })
		if end >= len(rest) || rest[end] != ':' {
			return "", false
		}
		return rest[end+1:], true
	case c == '?':
		if len(rest) < 2 || rest[1] != '0' && rest[1] != '1' {
			return "", false
		}
		return rest[2:], true
	case c == '@':
		end, isDecimal, ok := number(1)
		return rest[end:], ok && !isDecimal
	case c == '%':
		if len(rest) < 2 || rest[1] != '"' {
			return "", false
		}
		end := strings.IndexByte(rest[2:], '"')
		if end < 0 {
			return "", false
		}
		return rest[2+end+1:], true
	}
	return "", false
}
