package oncegate

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// claimsStore notes what a store gets instead of keys, callers and requests.
type claimsStore struct {
	*MemoryStore
	ids    []RecordID
	claims []Claim
}

func (s *claimsStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	s.ids, s.claims = append(s.ids, id), append(s.claims, claim)
	return s.MemoryStore.Claim(ctx, id, claim)
}

func TestWithAnIDSecretTheStoreGetsNothingPlain(t *testing.T) {
	const text = "ogids1_67994b41fd604350_000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
	secret, err := ParseIDSecret(text)
	if err != nil {
		t.Fatal(err)
	}
	run := func(secret *IDSecret, authority string) *claimsStore {
		store := &claimsStore{MemoryStore: NewMemoryStore()}
		engine, err := NewEngine(store, EngineOptions{Service: "shop", IDSecret: secret})
		if err != nil {
			t.Fatal(err)
		}
		protect, err := Middleware(engine, Settings{Authority: authority})
		if err != nil {
			t.Fatal(err)
		}
		request := httptest.NewRequest("POST", "/pay", strings.NewReader("5"))
		request.Header.Set("Idempotency-Key", "order-123")
		request.Header.Set("Authorization", "A")
		protect(http.NotFoundHandler()).ServeHTTP(httptest.NewRecorder(), request)
		charge := Function[int, int]{Engine: engine, Name: "charge", CallerKind: "customer", Caller: "42"}
		if _, err := charge.Do(context.Background(), "order-123", 5, func(context.Context, *Attempt) (int, error) { return 1, nil }); err != nil {
			t.Fatal(err)
		}
		return store
	}
	for _, authority := range []string{"ignore", "scope"} {
		plain, keyed := run(nil, authority), run(secret, authority)
		for i := range plain.ids {
			was, is := plain.claims[i], keyed.claims[i]
			var caller [8]byte
			if was.CallerTag == caller || is.CallerTag == caller || is.CallerTag == was.CallerTag {
				t.Errorf("%s %d: the caller is %x, and was %x", authority, i, is.CallerTag, was.CallerTag)
			}
			if keyed.ids[i] != secret.record(plain.ids[i]) || is.Fingerprint != secret.fingerprint(was.Fingerprint) || *is.KeyTag != secret.keyTag("order-123") {
				t.Errorf("%s %d: %s %x %x", authority, i, keyed.ids[i], is.Fingerprint, *is.KeyTag)
			}
		}
		if len(plain.ids) != 2 || len(keyed.ids) != 2 {
			t.Error(len(plain.ids), len(keyed.ids))
		}
	}
}
