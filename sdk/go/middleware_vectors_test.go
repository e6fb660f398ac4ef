package oncegate

import (
	"bufio"
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"sort"
	"strings"
	"testing"
	"time"
)

// notingStore notes claims and ends.
type notingStore struct {
	*MemoryStore
	ids    []RecordID
	claims []Claim
	end    string
	stored []byte
}

func (s *notingStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	s.ids, s.claims = append(s.ids, id), append(s.claims, claim)
	return s.MemoryStore.Claim(ctx, id, claim)
}

func (s *notingStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	if s.end == "" {
		s.end, s.stored = string(completion.State), completion.Response
	}
	return s.MemoryStore.Complete(ctx, id, token, completion)
}

func (s *notingStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	if s.end == "" {
		s.end = "released"
	}
	return s.MemoryStore.Release(ctx, id, token, retention)
}

type vectorResponse struct {
	Status  int
	Headers [][2]string
	Body    string
}

func vectorEngine(t *testing.T, settings json.RawMessage, handler http.HandlerFunc) (*notingStore, http.Handler) {
	t.Helper()
	store := &notingStore{MemoryStore: NewMemoryStore()}
	engine, err := NewEngine(store, EngineOptions{})
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := ParseSettings(settings)
	if err != nil {
		t.Fatal(err)
	}
	parsed.Wait = -1
	protect, err := Middleware(engine, parsed)
	if err != nil {
		t.Fatal(err)
	}
	return store, protect(handler)
}

// shown is a response as the vectors have it: without the length, and without the fields that only the server adds.
func shown(recorder *httptest.ResponseRecorder) vectorResponse {
	response := recorder.Result()
	body, _ := io.ReadAll(response.Body)
	got := vectorResponse{Status: response.StatusCode, Headers: [][2]string{}, Body: string(body)}
	for name, values := range response.Header {
		for _, value := range values {
			if name != "Content-Length" {
				got.Headers = append(got.Headers, [2]string{strings.ToLower(name), value})
			}
		}
	}
	sortHeaders(got.Headers)
	return got
}

func sortHeaders(headers [][2]string) {
	sort.Slice(headers, func(i, j int) bool { return fmt.Sprint(headers[i]) < fmt.Sprint(headers[j]) })
}

func TestRequestVectors(t *testing.T) {
	var file struct {
		Cases []struct {
			Name     string
			Settings json.RawMessage
			Request  struct {
				Method, Target, Body string
				Headers              [][]string
			}
			Expect json.RawMessage
		}
	}
	readVectors(t, "http/vectors/requests.json", &file)
	for _, c := range file.Cases {
		executions := 0
		store, handler := vectorEngine(t, c.Settings, func(w http.ResponseWriter, r *http.Request) {
			executions++
			w.Header()["Content-Type"] = nil
			io.WriteString(w, "done")
		})
		// The bytes of the request, read as a server reads them.
		var head strings.Builder
		fmt.Fprintf(&head, "%s %s HTTP/1.1\r\n", c.Request.Method, c.Request.Target)
		for _, line := range c.Request.Headers {
			fmt.Fprintf(&head, "%s: %s\r\n", line[0], line[1])
		}
		fmt.Fprintf(&head, "Content-Length: %d\r\n\r\n%s", len(c.Request.Body), c.Request.Body)
		request, err := http.ReadRequest(bufio.NewReader(strings.NewReader(head.String())))
		if err != nil {
			t.Errorf("%s: %v", c.Name, err)
			continue
		}
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(recorder, request)
		var want struct {
			Refused                                         *vectorResponse
			Caller, Fingerprint, Operation, Record, Key_Tag string
		}
		if string(c.Expect) == `"passes"` {
			if len(store.claims) != 0 || executions != 1 {
				t.Errorf("%s: it does not pass: %+v", c.Name, shown(recorder))
			}
			continue
		}
		if err := json.Unmarshal(c.Expect, &want); err != nil {
			t.Fatal(err)
		}
		got := shown(recorder)
		if want.Refused != nil {
			sortHeaders(want.Refused.Headers)
			if !reflect.DeepEqual(&got, want.Refused) {
				t.Errorf("%s:\n got %+v\nwant %+v", c.Name, got, *want.Refused)
			}
			continue
		}
		if len(store.claims) != 1 || executions != 1 {
			t.Errorf("%s: %d claims, %d executions, %+v", c.Name, len(store.claims), executions, got)
			continue
		}
		claim := store.claims[0]
		have := fmt.Sprintf("%x %x %x %s %s", claim.CallerTag, claim.Fingerprint, *claim.KeyTag, claim.Operation, store.ids[0])
		if wanted := fmt.Sprintf("%s %s %s %s %s", want.Caller, want.Fingerprint, want.Key_Tag, want.Operation, want.Record); have != wanted {
			t.Errorf("%s:\n got %s\nwant %s", c.Name, have, wanted)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func TestOutcomeVectors(t *testing.T) {
	var file struct {
		Cases []struct {
			Name     string
			Settings json.RawMessage
			Response vectorResponse
			Expect   struct {
				Executions   int
				First, Retry vectorResponse
				Record       json.RawMessage
			}
		}
	}
	readVectors(t, "http/vectors/outcomes.json", &file)
	for _, c := range file.Cases {
		executions := 0
		store, handler := vectorEngine(t, c.Settings, func(w http.ResponseWriter, r *http.Request) {
			executions++
			w.Header()["Content-Type"] = nil
			for _, line := range c.Response.Headers {
				w.Header().Add(line[0], line[1])
			}
			w.WriteHeader(c.Response.Status)
			io.WriteString(w, c.Response.Body)
		})
		send := func() vectorResponse {
			request := httptest.NewRequest("POST", "/pay", nil)
			request.Host = "shop.test"
			request.Header.Set("Idempotency-Key", "k")
			recorder := httptest.NewRecorder()
			handler.ServeHTTP(recorder, request)
			return shown(recorder)
		}
		first, retry := send(), send()
		for _, headers := range [][][2]string{c.Expect.First.Headers, c.Expect.Retry.Headers} {
			sortHeaders(headers)
		}
		if executions != c.Expect.Executions || !reflect.DeepEqual(first, c.Expect.First) || !reflect.DeepEqual(retry, c.Expect.Retry) {
			t.Errorf("%s: %d executions\n got %+v\nwant %+v\n got %+v\nwant %+v", c.Name, executions, first, c.Expect.First, retry, c.Expect.Retry)
		}
		var word string
		if json.Unmarshal(c.Expect.Record, &word) == nil {
			if store.end != word {
				t.Errorf("%s: %q, want %q", c.Name, store.end, word)
			}
			continue
		}
		var want struct{ Completed string }
		json.Unmarshal(c.Expect.Record, &want)
		// Header maps of net/http have no order, so the stored fields are in the order of their names.
		if got, wanted := sortedResponse(t, store.stored), sortedResponse(t, unhex(t, want.Completed)); store.end != "completed" || got != wanted {
			t.Errorf("%s: %s\n got %s\nwant %s", c.Name, store.end, got, wanted)
		}
	}
	t.Logf("%d cases", len(file.Cases))
}

func sortedResponse(t *testing.T, encoded []byte) string {
	response, err := DecodeResponse(encoded)
	if err != nil {
		return "undecodable " + hex.EncodeToString(encoded)
	}
	sort.SliceStable(response.Headers, func(i, j int) bool { return response.Headers[i].Name < response.Headers[j].Name })
	sorted, err := response.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(sorted)
}

func TestConditions(t *testing.T) {
	var file struct{ Cases []condition }
	readVectors(t, "http/vectors/conditions.json", &file)
	if !reflect.DeepEqual(file.Cases, theContract().Conditions) {
		t.Error("contract.json has other conditions than the vectors")
	}
	t.Logf("%d conditions", len(file.Cases))
}
