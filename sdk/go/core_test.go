package oncegate

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// readVectors reads a file of golden vectors of the Rust crates.
func readVectors(t *testing.T, path string, into interface{}) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("..", "..", "crates", path))
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, into); err != nil {
		t.Fatal(path, err)
	}
}

func unhex(t *testing.T, text string) []byte {
	t.Helper()
	bytes, err := hex.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	return bytes
}

func TestFingerprints(t *testing.T) {
	var file struct {
		Requests []struct {
			Name, Method, Authority, Target string
			ContentType                     *string `json:"content_type"`
			ContentTypeBase64               *string `json:"content_type_base64"`
			ContentCoding                   string  `json:"content_coding"`
			Headers                         [][]string
			Rules                           struct {
				RawBodies        bool `json:"raw_bodies"`
				Include, Exclude []string
			}
			Body       *string
			BodyBase64 *string `json:"body_base64"`
			Tag        string
			Digest     string
		}
		Parts []struct {
			Name, Domain string
			Parts        []string
			Digest       string
		}
	}
	readVectors(t, "core/vectors/fingerprints.json", &file)
	for _, c := range file.Requests {
		in := fingerprintInput{method: c.Method, authority: c.Authority, target: c.Target, coding: c.ContentCoding}
		if c.ContentType != nil {
			in.contentType = *c.ContentType
		}
		if c.ContentTypeBase64 != nil {
			bytes, _ := base64.StdEncoding.DecodeString(*c.ContentTypeBase64)
			in.contentType = string(bytes)
		}
		for _, pair := range c.Headers {
			in.headers = append(in.headers, formPair{pair[0], pair[1]})
		}
		if c.Body != nil {
			in.body = []byte(*c.Body)
		} else if c.BodyBase64 != nil {
			in.body, _ = base64.StdEncoding.DecodeString(*c.BodyBase64)
		}
		include, err := parsePointers(c.Rules.Include)
		if err != nil {
			t.Fatal(err)
		}
		exclude, err := parsePointers(c.Rules.Exclude)
		if err != nil {
			t.Fatal(err)
		}
		rules := fingerprintRules{c.Rules.RawBodies, include, exclude}
		if got := fmt.Sprintf("%x", rules.fingerprint(in)); got != "01"+c.Digest {
			tag, _ := rules.readBody(in, readMediaType(in.contentType))
			t.Errorf("%s: %s (%s), want %s (%s)", c.Name, got, tag, c.Digest, c.Tag)
		}
	}
	for _, c := range file.Parts {
		var parts [][]byte
		for _, part := range c.Parts {
			parts = append(parts, []byte(part))
		}
		if got := fmt.Sprintf("%x", fingerprintOfParts(c.Domain, parts...)); got != "01"+c.Digest {
			t.Errorf("%s: %s", c.Name, got)
		}
	}
	t.Logf("%d requests, %d parts", len(file.Requests), len(file.Parts))
}

func TestRecordIDs(t *testing.T) {
	var file struct {
		Cases []struct {
			Name    string
			Service *string
			Caller  []struct {
				Kind  string
				Value string `json:"identity_hex"`
			}
			OperationHex []string          `json:"operation_hex"`
			KeyHex       string            `json:"key_hex"`
			KeyTag       string            `json:"key_tag"`
			CallerTag    string            `json:"caller_tag"`
			RecordID     string            `json:"record_id"`
			Downstream   map[string]string `json:"downstream_keys"`
		}
	}
	readVectors(t, "core/vectors/record_ids.json", &file)
	for _, c := range file.Cases {
		service := ""
		if c.Service != nil {
			service = *c.Service
		}
		var caller []identity
		for _, part := range c.Caller {
			caller = append(caller, identity{part.Kind, string(unhex(t, part.Value))})
		}
		scope := newKeyScope(service, caller)
		var operation []string
		for _, part := range c.OperationHex {
			operation = append(operation, string(unhex(t, part)))
		}
		key := string(unhex(t, c.KeyHex))
		id := scope.record(operation, key)
		tag, own := keyTag(key), scope.callerTag()
		if id.String() != c.RecordID || hex.EncodeToString(tag[:]) != c.KeyTag || hex.EncodeToString(own[:]) != c.CallerTag {
			t.Errorf("%s: %s %x %x", c.Name, id, tag, own)
		}
		for step, want := range c.Downstream {
			if got := id.DownstreamKey(step); got != want {
				t.Errorf("%s, step %q: %s, want %s", c.Name, step, got, want)
			}
		}
		if parsed, err := ParseRecordID(c.RecordID); err != nil || parsed != id {
			t.Error(parsed, err)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func TestIntentKeys(t *testing.T) {
	var file struct {
		Cases []struct {
			Name  string
			Parts []string
			Key   string
		}
	}
	readVectors(t, "core/vectors/intent_keys.json", &file)
	for _, c := range file.Cases {
		if got := DerivedKey(c.Name, c.Parts...); got != c.Key {
			t.Errorf("%s %q: %s, want %s", c.Name, c.Parts, got, c.Key)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func TestResponses(t *testing.T) {
	var file struct {
		Cases []struct {
			Name              string
			Status            int
			Headers, Trailers [][]string
			BodyHex           string `json:"body_hex"`
			EncodedHex        string `json:"encoded_hex"`
		}
	}
	readVectors(t, "core/vectors/responses.json", &file)
	fields := func(of [][]string) (fields []Field) {
		for _, pair := range of {
			fields = append(fields, Field{pair[0], string(unhex(t, pair[1]))})
		}
		return fields
	}
	for _, c := range file.Cases {
		response := StoredResponse{c.Status, fields(c.Headers), fields(c.Trailers), unhex(t, c.BodyHex)}
		encoded, err := response.Encode()
		if err != nil || hex.EncodeToString(encoded) != c.EncodedHex {
			t.Errorf("%s: %x %v", c.Name, encoded, err)
		}
		decoded, err := DecodeResponse(encoded)
		if err != nil || fmt.Sprintf("%+v", *decoded) != fmt.Sprintf("%+v", response) {
			t.Errorf("%s: %+v, want %+v", c.Name, decoded, response)
		}
		for end := 0; end < len(encoded)-len(response.Body); end++ {
			if _, err := DecodeResponse(encoded[:end]); err == nil {
				t.Errorf("%s: decoded %d of %d bytes", c.Name, end, len(encoded))
			}
		}
	}
	t.Logf("%d cases", len(file.Cases))
}
