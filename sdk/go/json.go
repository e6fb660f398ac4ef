package oncegate

import (
	"bytes"
	"sort"
	"strconv"
	"sync"
	"unicode/utf8"
)

// maxJSONDepth bounds the nesting of arrays and objects. Deeper bodies are compared byte by byte.
const maxJSONDepth = 128

// canonicalJSON returns the canonical form of RFC 8785, or false if no canonical form distinguishes the text from every other one.
// With keepNumbers, numbers that a double may not hold stay as they are spelt.
func canonicalJSON(text []byte, keepNumbers bool) ([]byte, bool) {
	w := jsonWriter{keepNumbers: keepNumbers, out: make([]byte, 0, len(text))}
	return w.write(text)
}

// jsonWriter writes canonical documents. Its buffers serve one document after the other.
type jsonWriter struct {
	text        []byte
	at          int
	keepNumbers bool
	out         []byte
	// members are those of the objects that are being written, the innermost last.
	members []jsonMember
	// sorted is where the members of an object are put in order.
	sorted []byte
}

// jsonMember is a member of an object that is being written: its name without escapes, and its place in the output.
type jsonMember struct {
	name     []byte
	from, to int
}

// The largest buffers that are kept for later documents.
const (
	maxKeptBytes   = 64 << 10
	maxKeptMembers = 256
)

var jsonWriters = sync.Pool{New: func() any { return new(jsonWriter) }}

// free keeps the writer for another document. What it has written must not be used any more.
func (w *jsonWriter) free() {
	if cap(w.out) > maxKeptBytes || cap(w.sorted) > maxKeptBytes || cap(w.members) > maxKeptMembers {
		return
	}
	members := w.members[:cap(w.members)]
	for i := range members {
		// The names are parts of the body.
		members[i].name = nil
	}
	w.text = nil
	jsonWriters.Put(w)
}

// write returns the canonical form of a document. It is valid until the next call.
func (w *jsonWriter) write(text []byte) ([]byte, bool) {
	if !utf8.Valid(text) {
		return nil, false
	}
	w.text, w.at, w.out, w.members = text, 0, w.out[:0], w.members[:0]
	w.space()
	if !w.value(maxJSONDepth) {
		return nil, false
	}
	w.space()
	return w.out, w.at == len(text)
}

// peek is the next byte, or 0, which no rule of the grammar accepts, at the end.
func (w *jsonWriter) peek() byte {
	if w.at < len(w.text) {
		return w.text[w.at]
	}
	return 0
}

func (w *jsonWriter) space() {
	for w.at < len(w.text) {
		switch w.text[w.at] {
		case ' ', '\n', '\r', '\t':
			w.at++
		default:
			return
		}
	}
}

func (w *jsonWriter) literal(word string) bool {
	if end := w.at + len(word); end > len(w.text) || string(w.text[w.at:end]) != word {
		return false
	}
	w.at += len(word)
	w.out = append(w.out, word...)
	return true
}

func (w *jsonWriter) value(depth int) bool {
	switch c := w.peek(); {
	case c == '"':
		_, ok := w.string()
		return ok
	case c == '-' || '0' <= c && c <= '9':
		return w.number()
	case c == '{':
		return depth > 0 && w.object(depth-1)
	case c == '[':
		return depth > 0 && w.array(depth-1)
	case c == 't':
		return w.literal("true")
	case c == 'f':
		return w.literal("false")
	case c == 'n':
		return w.literal("null")
	}
	return false
}

func (w *jsonWriter) array(depth int) bool {
	w.at++
	w.out = append(w.out, '[')
	w.space()
	if w.peek() == ']' {
		w.at++
		w.out = append(w.out, ']')
		return true
	}
	for {
		if !w.value(depth) {
			return false
		}
		w.space()
		switch w.peek() {
		case ',':
			w.at++
			w.out = append(w.out, ',')
			w.space()
		case ']':
			w.at++
			w.out = append(w.out, ']')
			return true
		default:
			return false
		}
	}
}

func (w *jsonWriter) object(depth int) bool {
	w.at++
	w.out = append(w.out, '{')
	start := len(w.out)
	w.space()
	if w.peek() == '}' {
		w.at++
		w.out = append(w.out, '}')
		return true
	}
	first := len(w.members)
	for {
		if w.peek() != '"' {
			return false
		}
		from := len(w.out)
		name, ok := w.string()
		if !ok {
			return false
		}
		w.space()
		if w.peek() != ':' {
			return false
		}
		w.at++
		w.out = append(w.out, ':')
		w.space()
		if !w.value(depth) {
			return false
		}
		w.members = append(w.members, jsonMember{name, from, len(w.out)})
		w.space()
		c := w.peek()
		w.at++
		if c == '}' {
			break
		}
		if c != ',' {
			return false
		}
		w.out = append(w.out, ',')
		w.space()
	}
	members := w.members[first:]
	w.members = w.members[:first]
	if hasSameName(members) {
		return false
	}
	if sortMembers(members) {
		w.sorted = w.sorted[:0]
		for i, member := range members {
			if i > 0 {
				w.sorted = append(w.sorted, ',')
			}
			w.sorted = append(w.sorted, w.out[member.from:member.to]...)
		}
		w.out = append(w.out[:start], w.sorted...)
	}
	w.out = append(w.out, '}')
	return true
}

// fewMembers is the number of members up to which all pairs of names are compared.
const fewMembers = 16

// hasSameName reports if two names differ at most in case. Programs that ignore case read such names as one member, and which of the two
// counts depends on their order.
func hasSameName(members []jsonMember) bool {
	areFew := len(members) <= fewMembers
	for i := 0; areFew && i < len(members); i++ {
		areFew = isASCII(members[i].name)
	}
	if areFew {
		for i := range members {
			for j := range members[:i] {
				if sameInLower(members[i].name, members[j].name) {
					return true
				}
			}
		}
		return false
	}
	seen := make(map[string]bool, len(members))
	for _, member := range members {
		folded := asciiLower(string(member.name))
		if !isASCII(folded) {
			folded = foldCase(string(member.name))
		}
		if seen[folded] {
			return true
		}
		seen[folded] = true
	}
	return false
}

// sortMembers sorts by name, and reports if that changed the order.
func sortMembers(members []jsonMember) (changed bool) {
	if len(members) > fewMembers {
		less := func(i, j int) bool { return lessUTF16(members[i].name, members[j].name) }
		if changed = !sort.SliceIsSorted(members, less); changed {
			sort.Slice(members, less)
		}
		return changed
	}
	for i := range members {
		for j := i; j > 0 && lessUTF16(members[j].name, members[j-1].name); j-- {
			members[j], members[j-1] = members[j-1], members[j]
			changed = true
		}
	}
	return changed
}

// lessUTF16 orders texts in UTF-8 by their UTF-16 code units (RFC 8785, section 3.2.3): characters beyond the basic plane come before
// U+E000. Otherwise the order is that of the bytes.
func lessUTF16(a, b []byte) bool {
	for i := 0; i < len(a) && i < len(b); i++ {
		x, y := a[i], b[i]
		if x == y {
			continue
		}
		// 0xf0 begins a character beyond the basic plane, 0xee the first one from U+E000.
		if isAstral := x >= 0xf0; isAstral != (y >= 0xf0) && x >= 0xee && y >= 0xee {
			return isAstral
		}
		return x < y
	}
	return len(a) < len(b)
}

// string writes the string at the reading position, and returns it without escapes. It may be a part of the text.
func (w *jsonWriter) string() ([]byte, bool) {
	w.at++
	start := w.at
	var unescaped []byte
	for {
		end := w.at
		for end < len(w.text) && w.text[end] != '"' && w.text[end] != '\\' && w.text[end] >= 0x20 {
			end++
		}
		w.at = end
		switch {
		case w.peek() == '"' && unescaped == nil:
			w.at++
			w.out = append(w.out, w.text[start-1:w.at]...)
			return w.text[start:end], true
		case w.peek() == '"':
			w.at++
			unescaped = append(unescaped, w.text[start:end]...)
			w.out = append(w.out, '"')
			for _, r := range string(unescaped) {
				w.out = appendJSONRune(w.out, r)
			}
			w.out = append(w.out, '"')
			return unescaped, true
		case w.peek() != '\\':
			return nil, false
		}
		unescaped = append(unescaped, w.text[start:end]...)
		r, ok := w.escape()
		if !ok {
			return nil, false
		}
		unescaped = utf8.AppendRune(unescaped, r)
		start = w.at
	}
}

func (w *jsonWriter) escape() (rune, bool) {
	w.at++
	c := w.peek()
	w.at++
	switch c {
	case '"', '\\', '/':
		return rune(c), true
	case 'b':
		return '\b', true
	case 'f':
		return '\f', true
	case 'n':
		return '\n', true
	case 'r':
		return '\r', true
	case 't':
		return '\t', true
	case 'u':
		code, ok := w.hex()
		if !ok || 0xdc00 <= code && code < 0xe000 {
			return 0, false
		}
		if code < 0xd800 || code >= 0xe000 {
			return code, true
		}
		if !bytes.HasPrefix(w.text[w.at:], []byte(`\u`)) {
			return 0, false
		}
		w.at += 2
		low, ok := w.hex()
		if !ok || low < 0xdc00 || low >= 0xe000 {
			return 0, false
		}
		return 0x10000 + (code-0xd800)<<10 + (low - 0xdc00), true
	}
	return 0, false
}

func (w *jsonWriter) hex() (rune, bool) {
	if w.at+4 > len(w.text) {
		return 0, false
	}
	code := rune(0)
	for _, digit := range w.text[w.at : w.at+4] {
		value, ok := hexDigit(digit)
		if !ok {
			return 0, false
		}
		code = code<<4 | rune(value)
	}
	w.at += 4
	return code, true
}

func hexDigit(digit byte) (byte, bool) {
	switch {
	case '0' <= digit && digit <= '9':
		return digit - '0', true
	case 'a' <= digit && digit <= 'f':
		return digit - 'a' + 10, true
	case 'A' <= digit && digit <= 'F':
		return digit - 'A' + 10, true
	}
	return 0, false
}

// appendJSONRune writes one character of a string as RFC 8785 spells it.
func appendJSONRune(out []byte, r rune) []byte {
	switch r {
	case '"', '\\':
		return append(out, '\\', byte(r))
	case '\b':
		return append(out, `\b`...)
	case '\t':
		return append(out, `\t`...)
	case '\n':
		return append(out, `\n`...)
	case '\f':
		return append(out, `\f`...)
	case '\r':
		return append(out, `\r`...)
	}
	if r < 0x20 {
		const digits = "0123456789abcdef"
		return append(out, '\\', 'u', '0', '0', digits[r>>4], digits[r&15])
	}
	return utf8.AppendRune(out, r)
}

func quotedJSON(text string) []byte {
	out := []byte{'"'}
	for _, r := range text {
		out = appendJSONRune(out, r)
	}
	return append(out, '"')
}

func (w *jsonWriter) digits() string {
	start := w.at
	for c := w.peek(); '0' <= c && c <= '9'; c = w.peek() {
		w.at++
	}
	return string(w.text[start:w.at])
}

// plainInteger returns the end of an integer that is canonical as it is: at most 15 digits, and no zero in front. It returns the reading
// position if there is none.
func (w *jsonWriter) plainInteger() int {
	first := w.at
	if w.peek() == '-' {
		first++
	}
	end := first
	for end < len(w.text) && isDigit(w.text[end]) {
		end++
	}
	hasMore := end < len(w.text) && (w.text[end] == '.' || w.text[end]|0x20 == 'e')
	if hasMore || end == first || end > first+15 || w.text[first] == '0' && end-w.at > 1 {
		return w.at
	}
	return end
}

func (w *jsonWriter) number() bool {
	if end := w.plainInteger(); end > w.at {
		w.out = append(w.out, w.text[w.at:end]...)
		w.at = end
		return true
	}
	start := w.at
	negative := w.peek() == '-'
	if negative {
		w.at++
	}
	whole := w.digits()
	if whole == "" || whole[0] == '0' && len(whole) > 1 {
		return false
	}
	fraction, exponent := "", int64(0)
	if w.peek() == '.' {
		w.at++
		if fraction = w.digits(); fraction == "" {
			return false
		}
	}
	if c := w.peek(); c == 'e' || c == 'E' {
		w.at++
		sign := w.peek()
		if sign == '+' || sign == '-' {
			w.at++
		}
		digits := w.digits()
		if digits == "" {
			return false
		}
		size, err := strconv.ParseInt(digits, 10, 32)
		if err != nil {
			size = 1 << 40
		}
		exponent = size
		if sign == '-' {
			exponent = -size
		}
	}
	spelled, ok := spellNumber(whole+fraction, exponent-int64(len(fraction)))
	switch {
	case ok && negative && spelled != "0":
		w.out = append(append(w.out, '-'), spelled...)
	case ok:
		w.out = append(w.out, spelled...)
	case w.keepNumbers:
		w.out = append(w.out, w.text[start:w.at]...)
	default:
		return false
	}
	return true
}

// spellNumber prints digits × 10^scale as ECMAScript does, or returns false if the number may equal another one as a double.
func spellNumber(all string, scale int64) (string, bool) {
	for all != "" && all[0] == '0' {
		all = all[1:]
	}
	if all == "" {
		return "0", true
	}
	for all[len(all)-1] == '0' {
		all, scale = all[:len(all)-1], scale+1
	}
	// The number of digits before the decimal point; negative if the point is followed by zeros.
	point := scale + int64(len(all))
	if scale >= 0 {
		if point > 16 {
			return "", false
		}
		for ; scale > 0; scale-- {
			all += "0"
		}
		// 2^53 − 1: the last integer that differs as a double from all its neighbours.
		if len(all) == 16 && all > "9007199254740991" {
			return "", false
		}
		return all, true
	}
	// Any decimal of 15 digits survives the way through a double, down to the smallest normal one.
	if len(all) > 15 || point <= -307 {
		return "", false
	}
	switch {
	case point > 0:
		return all[:point] + "." + all[point:], true
	case point > -6:
		return "0." + "000000"[:-point] + all, true
	}
	if len(all) > 1 {
		all = all[:1] + "." + all[1:]
	}
	return all + "e-" + strconv.FormatInt(1-point, 10), true
}

// hasJSONValue reports if a canonical text has a string, a number, true or false in it. null and empty arrays and objects do not
// distinguish two documents.
func hasJSONValue(text []byte) bool {
	for len(text) > 0 {
		switch c := text[0]; {
		case c == 't' || c == 'f' || c == '-' || '0' <= c && c <= '9':
			return true
		case c == '"':
			rest := text[1+stringLen(text[1:]):]
			if len(rest) == 0 || rest[0] != ':' {
				return true
			}
			// A name: its value follows.
			text = rest[1:]
		default:
			text = text[1:]
		}
	}
	return false
}

// stringLen is the length of a string whose opening quote was removed, with its closing quote.
func stringLen(text []byte) int {
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			return i + 1
		case '\\':
			i++
		}
	}
	return len(text)
}
