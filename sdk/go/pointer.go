package oncegate

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
)

// jsonPointer is a place in a JSON document (RFC 6901).
type jsonPointer struct {
	text  string
	steps []pointerStep
}

type pointerStep struct {
	// name is the member name in its canonical spelling, quotes included.
	name string
	// index is the array index, or -1 if the step cannot be one.
	index int
}

func parsePointer(text string) (jsonPointer, error) {
	pointer := jsonPointer{text: text}
	if text == "" {
		return pointer, nil
	}
	if text[0] != '/' {
		return pointer, fmt.Errorf("oncegate: the JSON pointer %q does not start with a slash; write /%s", text, text)
	}
	for _, token := range strings.Split(text[1:], "/") {
		for i := 0; i < len(token); i++ {
			if token[i] == '~' && (i+1 == len(token) || token[i+1] != '0' && token[i+1] != '1') {
				return pointer, fmt.Errorf("oncegate: in the JSON pointer %q, '~' is not followed by 0 or 1; write ~0 for ~ and ~1 for /", text)
			}
		}
		index := -1
		if token == "0" || token != "" && token[0] != '0' && strings.Trim(token, "0123456789") == "" {
			if n, err := strconv.Atoi(token); err == nil {
				index = n
			}
		}
		// ~1 first: ~01 is the name ~1 (RFC 6901, section 4).
		name := strings.ReplaceAll(strings.ReplaceAll(token, "~1", "/"), "~0", "~")
		pointer.steps = append(pointer.steps, pointerStep{string(quotedJSON(name)), index})
	}
	return pointer, nil
}

// parsePointers reads pointers, sorted and without repetitions: the order of configuration does not count.
func parsePointers(texts []string) ([]jsonPointer, error) {
	var pointers []jsonPointer
	seen := map[string]bool{}
	for _, text := range texts {
		pointer, err := parsePointer(text)
		if err != nil {
			return nil, err
		}
		if !seen[text] {
			pointers = append(pointers, pointer)
		}
		seen[text] = true
	}
	sort.Slice(pointers, func(i, j int) bool { return pointers[i].text < pointers[j].text })
	return pointers, nil
}

// selectJSON returns the value that the pointer finds in a canonical document, without the excluded values; nothing if there is none.
func selectJSON(document []byte, pointer jsonPointer, excluded []jsonPointer) []byte {
	paths := pathsOf(excluded)
	rest := document
	for _, step := range pointer.steps {
		if endsHere(paths) {
			return nil
		}
		found := false
		eachChild(rest, func(child jsonChild) bool {
			if found = child.matches(step); found {
				rest = child.value
			}
			return !found
		})
		if !found {
			return nil
		}
		paths = below(paths, func(first pointerStep) bool { return first == step })
	}
	return pruneJSON(nil, rest, paths)
}

// excludeJSON returns a canonical document without the excluded values.
func excludeJSON(document []byte, excluded []jsonPointer) []byte {
	return pruneJSON(nil, document, pathsOf(excluded))
}

func pathsOf(pointers []jsonPointer) [][]pointerStep {
	var paths [][]pointerStep
	for _, pointer := range pointers {
		paths = append(paths, pointer.steps)
	}
	return paths
}

func endsHere(paths [][]pointerStep) bool {
	for _, path := range paths {
		if len(path) == 0 {
			return true
		}
	}
	return false
}

// below returns the rests of the paths whose first step matches.
func below(paths [][]pointerStep, matches func(pointerStep) bool) [][]pointerStep {
	var rests [][]pointerStep
	for _, path := range paths {
		if len(path) > 0 && matches(path[0]) {
			rests = append(rests, path[1:])
		}
	}
	return rests
}

func pruneJSON(out, value []byte, paths [][]pointerStep) []byte {
	if endsHere(paths) || len(value) == 0 {
		return out
	}
	if len(paths) == 0 || value[0] != '{' && value[0] != '[' {
		return append(out, value...)
	}
	out = append(out, value[0])
	start := len(out)
	eachChild(value, func(child jsonChild) bool {
		rests := below(paths, child.matches)
		if endsHere(rests) {
			return true
		}
		if len(out) > start {
			out = append(out, ',')
		}
		if child.name != nil {
			out = append(append(out, child.name...), ':')
		}
		out = pruneJSON(out, child.value, rests)
		return true
	})
	return append(out, value[len(value)-1])
}

// jsonChild is a member or an element of a canonical value.
type jsonChild struct {
	// name has its quotes; elements have none.
	name  []byte
	index int
	value []byte
}

func (c jsonChild) matches(step pointerStep) bool {
	if c.name != nil {
		return string(c.name) == step.name
	}
	return step.index == c.index
}

// eachChild calls visit for each member or element until it returns false.
func eachChild(value []byte, visit func(jsonChild) bool) {
	if len(value) < 2 || value[0] != '{' && value[0] != '[' {
		return
	}
	isObject := value[0] == '{'
	rest := value[1 : len(value)-1]
	for index := 0; len(rest) > 0; index++ {
		child := jsonChild{index: index}
		if isObject {
			end := valueLen(rest)
			child.name, rest = rest[:end:end], rest[end+1:]
		}
		end := valueLen(rest)
		child.value, rest = rest[:end:end], rest[end:]
		if len(rest) > 0 {
			rest = rest[1:]
		}
		if !visit(child) {
			return
		}
	}
}

// valueLen is the length of the canonical value, or member name, that a text begins with.
func valueLen(text []byte) int {
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			i += stringLen(text[i+1:])
			if depth == 0 {
				return i + 1
			}
		case '{', '[':
			depth++
		case ',':
			if depth == 0 {
				return i
			}
		case '}', ']':
			if depth == 0 {
				return i
			}
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return len(text)
}

// naturalKey builds a key of chosen members of a JSON body.
type naturalKey []jsonPointer

// missingMember is the error of a body without one of the members.
type missingMember string

func (m missingMember) Error() string { return "the body has no member " + string(m) }

var errNotJSON = keyError("the body is no JSON that every program reads alike")

func (k naturalKey) of(contentType string, body []byte) (string, error) {
	if readMediaType(contentType).kind != jsonBody {
		return "", errNotJSON
	}
	document, ok := canonicalJSON(body, false)
	if !ok {
		return "", errNotJSON
	}
	h := newPartHash("oncegate-natural-key-1")
	h.count(len(k))
	for _, member := range k {
		value := selectJSON(document, member, nil)
		if len(value) == 0 {
			return "", missingMember(member.text)
		}
		h.text(member.text)
		h.part(value)
	}
	digest := h.sum()
	return fmt.Sprintf("json-%x", digest[:]), nil
}
