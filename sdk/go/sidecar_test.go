package oncegate

import (
	"context"
	"net/http"
	"strings"
	"testing"
)

func TestFromSidecar(t *testing.T) {
	record := strings.Repeat("17", 32)
	if attempt, err := FromSidecar(http.Header{}); attempt != nil || err != nil {
		t.Fatal(attempt, err)
	}
	for _, c := range []struct {
		header http.Header
		text   string
	}{
		{http.Header{"Oncegate-Record": {record}}, "once"},
		{http.Header{"Oncegate-Token": {"3"}}, "once"},
		{http.Header{"Oncegate-Record": {record, record}, "Oncegate-Token": {"3"}}, "once"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {"3"}, "oncegate-token": {"4"}}, "once"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {"-1"}}, "malformed"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {""}}, "malformed"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {"9223372036854775808"}}, "malformed"},
		{http.Header{"Oncegate-Record": {strings.Repeat("AB", 32)}, "Oncegate-Token": {"3"}}, "malformed"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {"3"}, "Oncegate-Attempt": {"x"}}, "malformed"},
		{http.Header{"Oncegate-Record": {record}, "Oncegate-Token": {"3"}, "Oncegate-Attempt": {"1", "2"}}, "more than once"},
	} {
		if attempt, err := FromSidecar(c.header); attempt != nil || err == nil || !strings.Contains(err.Error(), c.text) || !strings.HasSuffix(err.Error(), ": does this request come from a sidecar?") {
			t.Errorf("%v: %v %v", c.header, attempt, err)
		}
	}
	for _, header := range []http.Header{
		{"Oncegate-Record": {record}, "Oncegate-Token": {"9223372036854775807"}},
		{"oncegate-record": {record}, "oncegate-token": {"9223372036854775807"}, "oncegate-attempt": {"1"}},
	} {
		attempt, err := FromSidecar(header)
		if err != nil || attempt.Token != 1<<63-1 || attempt.Number != 1 || attempt.Record[0] != 0x17 {
			t.Errorf("%v: %+v %v", header, attempt, err)
		}
	}
}

func TestSidecarAttemptStoresNoInvalidField(t *testing.T) {
	attempt := &SidecarAttempt{Token: 1}
	for _, field := range []Field{{"a b", "c"}, {"location", "/a\r\nSet-Cookie: b"}, {"location", "a\x00"}} {
		err := attempt.CompleteIn(context.Background(), nil, &StoredResponse{Status: 201, Headers: []Field{field}})
		if err == nil || !strings.Contains(err.Error(), "header field") {
			t.Errorf("%v: %v", field, err)
		}
	}
	if got := lowerFields([]Field{{"Location", "/A"}})[0]; got != (Field{"location", "/A"}) {
		t.Error(got)
	}
}
