package oncegate

import (
	_ "embed" // The contract is a file.
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"
)

//go:embed contract.json
var contractText []byte

// contract is what all libraries share: profiles, conditions, signals and scripts.
type contract struct {
	Profiles        map[string]profile
	Conditions      []condition
	HeaderFields    headerFields `json:"header_fields"`
	Signals         []signalRule
	ProblemStatuses []problemStatuses `json:"problem_statuses"`
	Redis           map[string]struct{ SHA1, Text string }
	byName          map[string]condition
}

// headerFields are the fields that a record keeps or never keeps, and those that identify callers, with parts of their names.
type headerFields struct {
	Kept, Never   []string
	NeverPrefixes []string `json:"never_prefixes"`
	Usual         []string
	Callers       []string
	CallerParts   []string `json:"caller_parts"`
	NoCallerParts []string `json:"no_caller_parts"`
}

// condition is the reason of a refusal, with its values in the profile ietf.
type condition struct {
	Name, Title, Detail, Retry string
	Status                     int
}

// profile is a dialect of keys, as data.
type profile struct {
	KeyHeader        []string `json:"key-header"`
	KeySyntax        string   `json:"key-syntax"`
	KeyFormat        string   `json:"key-format"`
	KeyScope         string   `json:"key-scope"`
	KeyScopeHeader   []string `json:"key-scope-header"`
	RequireKey       bool     `json:"require-key"`
	Methods          []string
	UncoveredMethods string `json:"uncovered-methods"`
	Retention        string
	ServerErrors     string   `json:"server-errors"`
	ReleaseStatuses  []string `json:"release-statuses"`
	ReplayMarker     string   `json:"replay-marker"`
	EchoKey          bool     `json:"echo-key"`
	Fingerprint      struct {
		Body             string
		Include, Exclude []string
		Headers          []string
	}
	Headers map[string]map[string]string
	Refusal map[string]json.RawMessage
}

// refusalWords are the values of a refusal for one condition, or for a class of statuses.
type refusalWords struct {
	Status     int
	Kind, Code string
}

var (
	contractOnce   sync.Once
	loadedContract contract
)

func theContract() *contract {
	contractOnce.Do(func() {
		if err := json.Unmarshal(contractText, &loadedContract); err != nil {
			panic("oncegate: contract.json: " + err.Error())
		}
		loadedContract.byName = map[string]condition{}
		for _, condition := range loadedContract.Conditions {
			loadedContract.byName[condition.Name] = condition
		}
	})
	return &loadedContract
}

// refusalShape is the form of the refusals of a profile.
type refusalShape struct {
	mediaType, body string
	// all are the values of all conditions, rows those of one, or of a class of statuses such as 4xx: "" for those that are not set.
	all  refusalWords
	rows map[string]refusalWords
}

func (p *profile) refusalShape() *refusalShape {
	form := refusalShape{rows: map[string]refusalWords{}}
	for name, into := range map[string]any{"media-type": &form.mediaType, "body": &form.body, "kind": &form.all.Kind, "code": &form.all.Code,
		"status": &form.all.Status} {
		json.Unmarshal(p.Refusal[name], into)
	}
	for name, value := range p.Refusal {
		var row refusalWords
		if json.Unmarshal(value, &row) == nil {
			form.rows[name] = row
		}
	}
	return &form
}

// fill puts values in the places of a text: {name}. Other braces stay.
func fill(text string, value func(name string) (string, bool)) string {
	var out strings.Builder
	for {
		before, rest, _ := strings.Cut(text, "{")
		out.WriteString(before)
		if len(before) == len(text) {
			return out.String()
		}
		name, after, isClosed := strings.Cut(rest, "}")
		if filled, isKnown := value(name); isClosed && isKnown {
			out.WriteString(filled)
			text = after
		} else {
			out.WriteByte('{')
			text = rest
		}
	}
}

// parseDuration reads a number and a unit, as in the sidecar's configuration: 250ms, 30s, 5m, 24h, 7d.
func parseDuration(text string) (time.Duration, error) {
	units := []struct {
		name string
		unit time.Duration
	}{{"ms", time.Millisecond}, {"s", time.Second}, {"m", time.Minute}, {"h", time.Hour}, {"d", 24 * time.Hour}}
	for _, unit := range units {
		number, found := cutSuffix(text, unit.name)
		if !found {
			continue
		}
		if n, err := strconv.ParseInt(number, 10, 64); err == nil && n >= 0 && n <= int64(1000*24*time.Hour/unit.unit) {
			return time.Duration(n) * unit.unit, nil
		}
	}
	return 0, fmt.Errorf("oncegate: %q is not a duration; write a number and a unit, such as 250ms, 30s, 5m, 24h or 7d", text)
}

func cutSuffix(text, suffix string) (string, bool) {
	if !strings.HasSuffix(text, suffix) {
		return text, false
	}
	return text[:len(text)-len(suffix)], true
}

// parseSize reads a number of bytes, as in the sidecar's configuration: 1048576, 64KiB, 2MiB, 10MB.
func parseSize(text string) (int, error) {
	units := []struct {
		name string
		unit int
	}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"B", 1}, {"", 1}}
	for _, unit := range units {
		number, found := cutSuffix(text, unit.name)
		if !found {
			continue
		}
		if n, err := strconv.Atoi(number); err == nil && n >= 0 && n <= 1<<40/unit.unit {
			return n * unit.unit, nil
		}
	}
	return 0, fmt.Errorf("oncegate: %q is not a size; write a number of bytes, or one with a unit such as 64KiB or 2MiB", text)
}
