package oncegate

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
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
			tag, _ := rules.readBody(in, readMediaType(in.contentType), new(jsonWriter))
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
	var plain *IDSecret
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
		tag, own := plain.keyTag(key), plain.callerTag(scope)
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

func TestKeyedIDs(t *testing.T) {
	var plain struct {
		Cases []struct {
			Name    string
			Service *string
			Caller  []struct {
				Kind  string
				Value string `json:"identity_hex"`
			}
			OperationHex []string `json:"operation_hex"`
			KeyHex       string   `json:"key_hex"`
		}
	}
	readVectors(t, "core/vectors/record_ids.json", &plain)
	var file struct {
		Secrets []struct {
			SecretHex string `json:"secret_hex"`
			Name      string
			Text      string
			Mark      struct {
				RecordID    string `json:"record_id"`
				Fingerprint string
			}
			Cases []struct {
				Name        string
				RecordID    string `json:"record_id"`
				CallerTag   string `json:"caller_tag"`
				KeyTag      string `json:"key_tag"`
				Digest      string `json:"fingerprint_digest_hex"`
				Fingerprint string
			}
		}
	}
	readVectors(t, "core/vectors/keyed_ids.json", &file)
	cases := 0
	for _, own := range file.Secrets {
		secret, err := ParseIDSecret("# of the shop\n\n  " + own.Text + "\r\n")
		if err != nil || secret.Name() != own.Name {
			t.Fatal(secret, err)
		}
		mark := secret.markFingerprint()
		if idMark.String() != own.Mark.RecordID || hex.EncodeToString(mark[1:]) != own.Mark.Fingerprint || mark[0] != 1 {
			t.Errorf("%s: the mark is %s %x", own.Name, idMark, mark)
		}
		if len(own.Cases) != len(plain.Cases) {
			t.Fatal(len(own.Cases), len(plain.Cases))
		}
		for i, c := range own.Cases {
			from, service := plain.Cases[i], ""
			if from.Name != c.Name {
				t.Fatal(from.Name, c.Name)
			}
			if from.Service != nil {
				service = *from.Service
			}
			var caller []identity
			for _, part := range from.Caller {
				caller = append(caller, identity{part.Kind, string(unhex(t, part.Value))})
			}
			var operation []string
			for _, part := range from.OperationHex {
				operation = append(operation, string(unhex(t, part)))
			}
			key, scope := string(unhex(t, from.KeyHex)), newKeyScope(service, caller)
			var digest [32]byte
			copy(digest[:], unhex(t, c.Digest))
			id, tag, callers := secret.record(scope.record(operation, key)), secret.keyTag(key), secret.callerTag(scope)
			fingerprint := secret.fingerprint(fingerprintOf(digest))
			if id.String() != c.RecordID || hex.EncodeToString(tag[:]) != c.KeyTag || hex.EncodeToString(callers[:]) != c.CallerTag ||
				hex.EncodeToString(fingerprint[:]) != "01"+c.Fingerprint {
				t.Errorf("%s, %s: %s %x %x %x", own.Name, c.Name, id, tag, callers, fingerprint)
			}
			cases++
		}
	}
	if cases < 40 {
		t.Error(cases, "cases")
	}
	t.Logf("%d cases", cases)
}

func TestIDSecretText(t *testing.T) {
	const text = "ogids1_67994b41fd604350_000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	for at := range text {
		slip := []byte(text)
		if slip[at] = '0'; text[at] == '0' {
			slip[at] = '1'
		}
		for _, wrong := range []string{string(slip), text[:at], text + "\n" + text, text + "0", strings.ToUpper(text)} {
			secret, err := ParseIDSecret(wrong)
			if err == nil || secret != nil {
				t.Fatalf("%q is accepted", wrong)
			}
			if strings.Contains(err.Error(), "0102") || strings.Contains(err.Error(), "67994b41fd604350") {
				t.Errorf("%q shows the secret: %v", wrong, err)
			}
		}
	}
	secret, err := ParseIDSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	type service struct {
		Options EngineOptions
		hidden  *IDSecret
		value   IDSecret
	}
	all := service{EngineOptions{IDSecret: secret}, secret, *secret}
	encoded, err := json.Marshal(map[string]interface{}{"pointer": secret, "value": *secret, "options": all.Options.IDSecret})
	if err != nil {
		t.Error(err)
	}
	shown := []string{string(encoded), secret.String()}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		for _, value := range []interface{}{secret, *secret, all, &all, []*IDSecret{secret}, map[string]IDSecret{"a": *secret}} {
			shown = append(shown, fmt.Sprintf(verb, value))
		}
	}
	for _, text := range shown {
		// The first bytes of the secret in hexadecimal digits, as a list of decimal and of hexadecimal numbers.
		for _, bytes := range []string{"0001020304", "0 1 2 3 4", "0x0, 0x1, 0x2", "\x00\x01\x02"} {
			if strings.Contains(text, bytes) {
				t.Errorf("the secret is shown: %s", text)
			}
		}
	}
	if got := fmt.Sprintf("%v %+v", secret, *secret); got != "IDSecret(67994b41fd604350) IDSecret(67994b41fd604350)" {
		t.Error(got)
	}
	if _, err := NewEngine(NewMemoryStore(), EngineOptions{IDSecret: &IDSecret{}}); err == nil || !strings.Contains(err.Error(), "ParseIDSecret") {
		t.Error(err)
	}
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
