package oncegate

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"
)

type sealExample struct {
	Part                      byte
	Number                    uint32
	Name, File                string
	Plaintext, Sealed, Token  string
	Consumer, Topic, ID       string
	Error, Payload            string
	HeaderNames, HeaderValues []string
	SealedError               string
}

func TestSealedForms(t *testing.T) {
	var file struct {
		Key, Record string
		KeyText     string `json:"key_text"`
		Parts       []sealExample
		Intents     []sealExample
		DeadLetters []struct {
			Consumer, Topic, ID, Error, Payload, Sealed string
			HeaderNames                                 []string `json:"header_names"`
			HeaderValues                                []string `json:"header_values"`
			SealedError                                 string   `json:"sealed_error"`
		} `json:"dead_letters"`
		StreamEvents []struct {
			Consumer, Stream, Sequence, Event, Sealed string
		} `json:"stream_events"`
	}
	readVectors(t, "seal/vectors/sealed.json", &file)
	keys, err := ParseSealKeys("# ours\n" + file.KeyText + "\n")
	if err != nil {
		t.Fatal(err)
	}
	others := "ogseal1_" + hex.EncodeToString(expand(make([]byte, 32), sealLabel+" id", 8)) + "_" + strings.Repeat("00", 32)
	stranger, err := ParseSealKeys(others)
	if err != nil {
		t.Fatal(err)
	}
	record, err := ParseRecordID(file.Record)
	if err != nil {
		t.Fatal(err)
	}
	forms := 0
	check := func(part byte, record RecordID, token uint64, more []byte, plaintext, sealed string) {
		t.Helper()
		forms++
		content, want := unhex(t, plaintext), unhex(t, sealed)
		if got := keys.seal(part, record, token, more, content); hex.EncodeToString(got) != sealed {
			t.Errorf("part %d: sealed %x", part, got)
		}
		if got, err := keys.open(part, record, more, want); err != nil || hex.EncodeToString(got) != plaintext {
			t.Errorf("part %d: opened %x, %v", part, got, err)
		}
		if _, err := keys.open(part, RecordID{9}, more, want); err != errBadSeal {
			t.Errorf("part %d: opened for another record: %v", part, err)
		}
		if _, err := stranger.open(part, record, more, want); !errors.Is(err, errKeyMissing) {
			t.Errorf("part %d: opened with another key: %v", part, err)
		}
		want[len(want)-1] ^= 1
		if _, err := keys.open(part, record, more, want); err != errBadSeal {
			t.Errorf("part %d: opened although it is damaged: %v", part, err)
		}
	}
	for _, c := range file.Parts {
		token, _ := strconv.ParseUint(c.Token, 10, 64)
		var more []byte
		if c.Part == 3 {
			more = append(binary.BigEndian.AppendUint32(nil, c.Number), c.Name...)
		}
		check(c.Part, record, token, more, c.Plaintext, c.Sealed)
	}
	for _, c := range file.Intents {
		check(4, RecordID{}, 0, []byte(c.File), c.Plaintext, c.Sealed)
	}
	lp := func(text string) []byte {
		return append(binary.BigEndian.AppendUint32(nil, uint32(len(text))), text...)
	}
	for _, c := range file.DeadLetters {
		id, err := ParseRecordID(c.ID)
		if err != nil {
			t.Fatal(err)
		}
		place := append(lp(c.Consumer), lp(c.Topic)...)
		named := binary.BigEndian.AppendUint32(append([]byte(nil), place...), uint32(len(c.HeaderNames)))
		for _, name := range c.HeaderNames {
			named = append(named, lp(name)...)
		}
		var content []byte
		for _, value := range c.HeaderValues {
			content = append(content, lp(string(unhex(t, value)))...)
		}
		content = append(content, unhex(t, c.Payload)...)
		check(5, id, 0, named, hex.EncodeToString(content), c.Sealed)
		check(6, id, 0, place, hex.EncodeToString([]byte(c.Error)), strings.TrimPrefix(c.SealedError, "ogseal:"))
	}
	for _, c := range file.StreamEvents {
		number, err := strconv.ParseUint(c.Sequence, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		place := binary.BigEndian.AppendUint64(append(lp(c.Consumer), lp(c.Stream)...), number)
		check(7, RecordID{}, 0, place, c.Event, c.Sealed)
	}
	t.Logf("%d sealed forms", forms)
	if _, err := ParseSealKeys(strings.Replace(file.KeyText, "01", "02", 1)); err == nil || strings.Contains(err.Error(), "0101") {
		t.Error("a mistyped key is accepted, or shown: ", err)
	}
}

func TestSealedStore(t *testing.T) {
	ctx := context.Background()
	text := "ogseal1_" + hex.EncodeToString(expand(make([]byte, 32), sealLabel+" id", 8)) + "_" + strings.Repeat("00", 32)
	keys, err := ParseSealKeys(text)
	if err != nil {
		t.Fatal(err)
	}
	memory := NewMemoryStore()
	store := NewSealedStore(memory, keys)
	claim := Claim{Attempt: AttemptID{1}, Lease: time.Minute, Retention: time.Hour, OnAbandoned: Park}
	reply, _ := store.Claim(ctx, RecordID{}, claim)
	encoded, _ := (&StoredResponse{Status: 200, Body: []byte("secret")}).Encode()
	if settled, err := store.Complete(ctx, RecordID{}, reply.Token, Completion{Completed, encoded, time.Hour}); settled != Settled || err != nil {
		t.Fatal(settled, err)
	}
	if strings.Contains(string(memory.records[RecordID{}].response), "secret") {
		t.Error("it is stored in clear")
	}
	claim.Attempt = AttemptID{2}
	if reply, err := store.Claim(ctx, RecordID{}, claim); err != nil || string(reply.Response) != string(encoded) {
		t.Error(reply, err)
	}
	other := NewSealedStore(memory, &SealKeys{[]sealKey{{expand([]byte("x"), sealLabel+" id", 8), func() []byte { return []byte("x") }}}})
	var own *StoreError
	if _, err := other.Claim(ctx, RecordID{}, claim); !errors.As(err, &own) || own.Kind != ResponseSealed {
		t.Error(err)
	}
}

func TestSealKeysAreNotPrinted(t *testing.T) {
	keys, err := ParseSealKeys("ogseal1_d76b7626affc02af_" + strings.Repeat("01", 32))
	if err != nil {
		t.Fatal(err)
	}
	type service struct {
		Sealing Sealing
		hidden  *SealKeys
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%x", "%d"} {
		for _, value := range []interface{}{keys, *keys, Sealing{Keys: keys}, NewSealedStore(NewMemoryStore(), keys), service{Sealing{Keys: keys}, keys}} {
			for _, bytes := range []string{"010101", "1 1 1", "0x1, 0x1"} {
				if text := fmt.Sprintf(verb, value); strings.Contains(text, bytes) {
					t.Errorf("%s of %T shows the key: %s", verb, value, text)
				}
			}
		}
	}
	if got := fmt.Sprint(keys); got != "SealKeys(d76b7626affc02af)" {
		t.Error(got)
	}
}
