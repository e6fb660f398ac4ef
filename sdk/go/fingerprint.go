package oncegate

import (
	"bytes"
	"sort"
	"strings"
)

type bodyKind int

const (
	rawBody bodyKind = iota
	jsonBody
	formBody
	multipartBody
)

// mediaType is a media type, reduced to what the fingerprint uses.
type mediaType struct {
	// name is the text that is hashed.
	name     string
	kind     bodyKind
	boundary string
}

// readMediaType reads a field value. One that does not follow RFC 9110, section 8.3.1, is kept as it is, and its body is raw.
func readMediaType(field string) mediaType {
	field = strings.Trim(field, " \t")
	if parsed, ok := parseMediaType(field); ok {
		return parsed
	}
	return mediaType{name: field}
}

func parseMediaType(field string) (mediaType, bool) {
	name, rest := field, ""
	if at := strings.IndexByte(field, ';'); at >= 0 {
		name, rest = field[:at], field[at:]
	}
	name = asciiLower(strings.Trim(name, " \t"))
	kind, subtype, found := strings.Cut(name, "/")
	if !found || !isToken(kind) || !isToken(subtype) {
		return mediaType{}, false
	}
	var charset, boundary string
	var hasCharset, hasBoundary bool
	for {
		parameter, value, after, ok := nextParameter(rest)
		if !ok {
			return mediaType{}, false
		}
		if parameter == "" {
			break
		}
		rest = after
		switch parameter {
		case "charset":
			if hasCharset {
				return mediaType{}, false
			}
			charset, hasCharset = asciiLower(value), true
		case "boundary":
			if hasBoundary {
				return mediaType{}, false
			}
			boundary, hasBoundary = value, true
		}
	}
	read := mediaType{name: name}
	switch {
	case name == "application/json":
		read.kind = jsonBody
	case name == "application/x-www-form-urlencoded":
		read.kind = formBody
	case kind == "multipart":
		if hasBoundary && isBoundary(boundary) {
			read.kind, read.boundary = multipartBody, boundary
		}
	case strings.HasSuffix(subtype, "+json") && len(subtype) > len("+json"):
		read.kind = jsonBody
	}
	if hasCharset {
		if !isToken(charset) {
			return mediaType{}, false
		}
		if charset != "utf-8" && charset != "utf8" {
			// In another charset, the same bytes are another text.
			read.name, read.kind = name+";charset="+charset, rawBody
		}
	}
	return read, true
}

// nextParameter reads the next parameter. An empty name is the end; false is a syntax error.
func nextParameter(rest string) (name, value, after string, ok bool) {
	rest = strings.Trim(rest, " \t")
	for strings.HasPrefix(rest, ";") {
		rest = strings.Trim(rest[1:], " \t")
		// Parameters may be empty.
		if rest == "" || rest[0] == ';' {
			continue
		}
		name, value, found := strings.Cut(rest, "=")
		if !found || !isToken(name) {
			return "", "", "", false
		}
		if strings.HasPrefix(value, `"`) {
			var text []byte
			for i := 1; i < len(value); i++ {
				switch value[i] {
				case '"':
					return asciiLower(name), string(text), value[i+1:], true
				case '\\':
					if i++; i == len(value) {
						return "", "", "", false
					}
				}
				text = append(text, value[i])
			}
			return "", "", "", false
		}
		end := 0
		for end < len(value) && value[end] > ' ' && value[end] <= '~' && !strings.ContainsRune(`",;\`, rune(value[end])) {
			end++
		}
		return asciiLower(name), value[:end], value[end:], end > 0
	}
	return "", "", "", rest == ""
}

func isToken(text string) bool {
	for i := 0; i < len(text); i++ {
		c := text[i]
		if !isAlnum(c) && strings.IndexByte("!#$%&'*+-.^_`|~", c) < 0 {
			return false
		}
	}
	return text != ""
}

func isAlnum(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// isBoundary follows RFC 2046, section 5.1.1, with any printable ASCII.
func isBoundary(boundary string) bool {
	for i := 0; i < len(boundary); i++ {
		if boundary[i] < ' ' || boundary[i] > '~' {
			return false
		}
	}
	return 1 <= len(boundary) && len(boundary) <= 70 && !strings.HasSuffix(boundary, " ")
}

type formPair struct{ name, value string }

// readForm reads a form in canonical order, or returns false if servers read it in different ways.
func readForm(body []byte) ([]formPair, bool) {
	if bytes.IndexByte(body, ';') >= 0 || bytes.Count(body, []byte("&")) >= maxFormPairs {
		return nil, false
	}
	var pairs []formPair
	sortable := true
	for _, segment := range strings.Split(string(body), "&") {
		name, value, found := strings.Cut(segment, "=")
		if !found {
			return nil, false
		}
		name, ok := decodeForm(name)
		if !ok {
			return nil, false
		}
		value, ok = decodeForm(value)
		if !ok {
			return nil, false
		}
		for i := 0; i < len(name); i++ {
			sortable = sortable && name[i] >= ' ' && name[i] <= '~'
		}
		pairs = append(pairs, formPair{name, value})
	}
	if sortable {
		// Stable: pairs of one stem keep their order.
		sort.SliceStable(pairs, func(i, j int) bool { return stem(pairs[i].name) < stem(pairs[j].name) })
	}
	return pairs, true
}

func decodeForm(text string) (string, bool) {
	if strings.IndexByte(text, '+') < 0 && strings.IndexByte(text, '%') < 0 {
		return text, true
	}
	var out []byte
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '+':
			out = append(out, ' ')
		case '%':
			if i+2 >= len(text) {
				return "", false
			}
			high, ok1 := hexDigit(text[i+1])
			low, ok2 := hexDigit(text[i+2])
			if !ok1 || !ok2 {
				return "", false
			}
			out = append(out, high<<4|low)
			i += 2
		default:
			out = append(out, text[i])
		}
	}
	return string(out), true
}

// stem is the first run of letters and digits of a name, in lower case. Names that some framework treats as one have the same stem.
func stem(name string) string {
	start := 0
	for start < len(name) && !isAlnum(name[start]) {
		start++
	}
	end := start
	for end < len(name) && isAlnum(name[end]) {
		end++
	}
	return asciiLower(name[start:end])
}

type bodyPart struct {
	headers []formPair
	body    []byte
}

// readMultipart reads the parts of a body. It is strict: if two readers could see different parts, the body is raw.
func readMultipart(body []byte, boundary string) ([]bodyPart, bool) {
	delimiter := []byte("\r\n--" + boundary)
	dashes := delimiter[2:]
	rest, ok := cutPrefix(bytes.TrimPrefix(body, []byte("\r\n")), dashes)
	if !ok {
		return nil, false
	}
	var parts []bodyPart
	left := maxMultipartItems
	for {
		if epilogue, ok := cutPrefix(rest, []byte("--")); ok {
			return parts, len(epilogue) == 0 || string(epilogue) == "\r\n"
		}
		rest, ok = cutPrefix(rest, []byte("\r\n"))
		if !ok {
			return nil, false
		}
		end := bytes.Index(rest, delimiter)
		if end < 0 || bytes.HasPrefix(rest[:end], dashes) {
			return nil, false
		}
		part, ok := readPart(rest[:end], left)
		if left -= 1 + len(part.headers); !ok || left < 0 {
			return nil, false
		}
		parts = append(parts, part)
		rest = rest[end+len(delimiter):]
	}
}

func readPart(rest []byte, max int) (bodyPart, bool) {
	var part bodyPart
	for {
		end := bytes.Index(rest, []byte("\r\n"))
		if end < 0 {
			return part, false
		}
		line := rest[:end]
		rest = rest[end+2:]
		if len(line) == 0 {
			break
		}
		// A line that continues the one before has no token before its colon.
		name, value, found := strings.Cut(string(line), ":")
		if !found || len(part.headers) == max || !isToken(name) || bytes.ContainsAny(line, "\r\n\x00") {
			return part, false
		}
		part.headers = append(part.headers, formPair{asciiLower(name), strings.Trim(value, " \t")})
	}
	sort.SliceStable(part.headers, func(i, j int) bool { return part.headers[i].name < part.headers[j].name })
	part.body = rest
	return part, true
}

func cutPrefix(text, prefix []byte) ([]byte, bool) {
	if !bytes.HasPrefix(text, prefix) {
		return text, false
	}
	return text[len(prefix):], true
}

// fingerprintRules are the rules by which requests are compared.
type fingerprintRules struct {
	raw              bool
	include, exclude []jsonPointer
}

// fingerprintInput are the parts of a request that the fingerprint covers.
type fingerprintInput struct {
	method, authority, target, contentType string
	// coding is the content coding that could not be undone.
	coding  string
	headers []formPair
	body    []byte
}

func (rules *fingerprintRules) fingerprint(in fingerprintInput) Fingerprint {
	media := readMediaType(in.contentType)
	canonical := jsonWriters.Get().(*jsonWriter)
	defer canonical.free()
	tag, write := rules.readBody(in, media, canonical)
	h := newPartHash("oncegate-fp-1")
	h.text(in.method)
	h.text(in.authority)
	h.text(in.target)
	h.text(media.name)
	h.text(tag)
	h.text(asciiLower(in.coding))
	headers := in.headers
	if len(headers) > 1 {
		headers = append([]formPair(nil), headers...)
		sort.SliceStable(headers, func(i, j int) bool { return headers[i].name < headers[j].name })
	}
	writePairs(h, headers)
	write(h)
	return fingerprintOf(h.sum())
}

func writePairs(h *partHash, pairs []formPair) {
	h.count(len(pairs))
	for _, pair := range pairs {
		h.text(pair.name)
		h.text(pair.value)
	}
}

// readBody returns the tag of a body, and the function that hashes the body in the form in which it is compared.
func (rules *fingerprintRules) readBody(in fingerprintInput, media mediaType, canonical *jsonWriter) (string, func(*partHash)) {
	kind := media.kind
	if rules.raw || len(in.body) == 0 || in.coding != "" {
		kind = rawBody
	}
	switch kind {
	case jsonBody:
		if document, ok := canonical.write(in.body); ok {
			return rules.selectBody(document)
		}
	case formBody:
		if pairs, ok := readForm(in.body); ok {
			return "form", func(h *partHash) { writePairs(h, pairs) }
		}
	case multipartBody:
		if parts, ok := readMultipart(in.body, media.boundary); ok {
			return "multipart", func(h *partHash) {
				h.count(len(parts))
				for _, part := range parts {
					writePairs(h, part.headers)
					h.part(part.body)
				}
			}
		}
	}
	body := in.body
	return "raw", func(h *partHash) { h.part(body) }
}

// selectBody chooses the part of a document that counts, and never so little that all documents would be equal.
func (rules *fingerprintRules) selectBody(document []byte) (string, func(*partHash)) {
	for _, pointer := range rules.include {
		if !hasJSONValue(selectJSON(document, pointer, rules.exclude)) {
			continue
		}
		return "json-include", func(h *partHash) {
			h.count(len(rules.include))
			for _, pointer := range rules.include {
				value := selectJSON(document, pointer, rules.exclude)
				if len(value) == 0 {
					value = []byte("absent")
				}
				h.text(pointer.text)
				h.part(value)
			}
		}
	}
	if len(rules.exclude) > 0 {
		if rest := excludeJSON(document, rules.exclude); hasJSONValue(rest) {
			return "json", func(h *partHash) { h.part(rest) }
		}
	}
	return "json", func(h *partHash) { h.part(document) }
}
