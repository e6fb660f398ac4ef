package oncegate

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

// IDSecret keys what a store gets instead of keys, callers and requests: the ids of records, the tags of callers and keys, and fingerprints.
// A reader of the store who guesses one of them cannot confirm the guess. A store keeps its secret for its whole life, and all programs on
// it have the same one. Nothing shows more of it than its name.
type IDSecret struct {
	name string
	// mac is a function, so that nothing that prints a value finds the bytes of the secret.
	mac func(parts ...[]byte) [32]byte
}

const (
	idLabel      = "oncegate-id-1 "
	idPrefix     = "ogids1_"
	idNameDigits = 16
)

// ParseIDSecret reads a secret as `oncegate id-secret new` writes it. Lines that begin with # are comments.
func ParseIDSecret(text string) (*IDSecret, error) {
	var found []string
	for _, line := range strings.Split(text, "\n") {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			found = append(found, line)
		}
	}
	switch {
	case len(found) == 0:
		return nil, errors.New("oncegate: there is no id secret in it; `oncegate id-secret new` makes one for a new store")
	case len(found) > 1:
		return nil, errors.New("oncegate: there is more than one line; a store has one id secret, and it is never replaced")
	}
	errForm := errors.New("oncegate: an id secret has the form ogids1_, the 16 hexadecimal digits of its name, _ and 64 hexadecimal digits; " +
		"`oncegate id-secret new` makes one for a new store")
	rest := strings.TrimPrefix(found[0], idPrefix)
	name, digits, isPair := strings.Cut(rest, "_")
	key, err := hex.DecodeString(digits)
	if rest == found[0] || !isPair || err != nil || len(key) != sha256.Size || len(name) != idNameDigits || asciiLower(rest) != rest {
		return nil, errForm
	}
	if _, err := hex.DecodeString(name); err != nil {
		return nil, errForm
	}
	secret := newIDSecret(key)
	if secret.name != name {
		return nil, errors.New("oncegate: the digits of the id secret do not fit its name: it was cut, changed or put together of two secrets")
	}
	return secret, nil
}

func newIDSecret(key []byte) *IDSecret {
	s := &IDSecret{mac: func(parts ...[]byte) (digest [32]byte) {
		mac := hmac.New(sha256.New, key)
		for _, part := range parts {
			mac.Write(part)
		}
		mac.Sum(digest[:0])
		return digest
	}}
	named := s.digest("name")
	s.name = hex.EncodeToString(named[:idNameDigits/2])
	return s
}

// Name is the public name of the secret, which the store, logs and operators have.
func (s *IDSecret) Name() string { return s.name }

// String returns the name, and nothing of the secret.
func (s IDSecret) String() string { return "IDSecret(" + s.name + ")" }

// Format writes the name, whatever the verb is.
func (s IDSecret) Format(state fmt.State, _ rune) { fmt.Fprint(state, s.String()) }

// check refuses a secret that was not made by ParseIDSecret.
func (s *IDSecret) check() error {
	if s != nil && s.mac == nil {
		return errors.New("oncegate: the id secret is empty; read it with ParseIDSecret")
	}
	return nil
}

func (s *IDSecret) digest(label string, plain ...[]byte) [32]byte {
	return s.mac(append([][]byte{[]byte(idLabel + label)}, plain...)...)
}

// The identities that a store gets. Without a secret (nil) they are plain hashes.

func (s *IDSecret) record(plain RecordID) RecordID {
	if s == nil {
		return plain
	}
	return s.digest("record", plain.bytes())
}

// callerTag is zeros for a single tenant.
func (s *IDSecret) callerTag(scope keyScope) (tag [8]byte) {
	plain := scope.caller
	if s != nil && plain != ([32]byte{}) {
		plain = s.digest("caller", RecordID(plain).bytes())
	}
	copy(tag[:], plain[:])
	return tag
}

// keyTag is a short mark of a key, by which an operator finds its records. It proves nothing: two keys may have the same tag.
func (s *IDSecret) keyTag(key string) (tag [8]byte) {
	digest := keyDigest(key)
	if s != nil {
		digest = s.digest("key", RecordID(digest).bytes())
	}
	copy(tag[:], digest[:])
	return tag
}

func (s *IDSecret) fingerprint(plain Fingerprint) Fingerprint {
	if s == nil {
		return plain
	}
	keyed := fingerprintOf(s.digest("compare", plain.bytes()))
	keyed[0] = plain[0]
	return keyed
}

// A copy, so that digests stay where they are in memory if there is no secret.

func (id RecordID) bytes() []byte { return append([]byte(nil), id[:]...) }

func (f Fingerprint) bytes() []byte { return append([]byte(nil), f[:]...) }

// markFingerprint is the fingerprint of the mark of a store that belongs to this secret.
func (s *IDSecret) markFingerprint() Fingerprint { return fingerprintOf(s.digest("check")) }
