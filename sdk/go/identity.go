package oncegate

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strings"
)

// The largest sizes of the contract.
const (
	maxKeyBytes       = 255
	maxKeyMembers     = 16
	maxServiceChars   = 100
	maxOperationBytes = 256
	maxResponseBytes  = 64 << 20
	maxHeaderFields   = 128
	maxSteps          = 256
	maxStepsBytes     = 1 << 20
	maxFormPairs      = 16384
	maxMultipartItems = 16384
	maxDecodedRatio   = 100
	decodedFree       = 64 << 10
)

// RecordID is the identifier of a record: the SHA-256 of the length-prefixed parts of its scope and its key.
type RecordID [32]byte

// String returns the 64 hexadecimal digits of the identifier.
func (id RecordID) String() string { return hex.EncodeToString(id[:]) }

// ParseRecordID reads the 64 hexadecimal digits of an identifier, as in the header field Oncegate-Record.
func ParseRecordID(text string) (RecordID, error) {
	var id RecordID
	bytes, err := hex.DecodeString(text)
	if err != nil || len(bytes) != len(id) {
		return id, errors.New("oncegate: a record has 64 hexadecimal digits")
	}
	copy(id[:], bytes)
	return id, nil
}

// DownstreamKey returns the key for a call of another API on behalf of this record, so that repeated calls take effect once. It
// differs for each step, and is the same for each attempt: a UUID of version 8.
func (id RecordID) DownstreamKey(step string) string {
	h := newPartHash("oncegate-downstream-1")
	h.part(id[:])
	h.text(step)
	return uuidOfDigest(h.sum())
}

// Fingerprint is a versioned SHA-256 of a request: equal fingerprints mean the same request.
type Fingerprint [33]byte

const fingerprintVersion = 1

func fingerprintOf(digest [32]byte) Fingerprint {
	var fingerprint Fingerprint
	fingerprint[0] = fingerprintVersion
	copy(fingerprint[1:], digest[:])
	return fingerprint
}

// fingerprintOfParts is the fingerprint of something that is not an HTTP request.
func fingerprintOfParts(domain string, parts ...[]byte) Fingerprint {
	h := newPartHash("oncegate-fp-parts-1")
	h.text(domain)
	for _, part := range parts {
		h.part(part)
	}
	return fingerprintOf(h.sum())
}

// hostBytes is the number of bytes at the end of a digest that hash the host alone, if the host is compared.
const hostBytes = 10

func (f Fingerprint) withHost(host string) Fingerprint {
	own := fingerprintOfParts("host", []byte(host))
	copy(f[len(f)-hostBytes:], own[len(own)-hostBytes:])
	return f
}

// differsInHostOnly reports if two fingerprints differ in nothing but the host.
func differsInHostOnly(stored, own Fingerprint) bool {
	end := len(own) - hostBytes
	return stored != own && string(stored[:end]) == string(own[:end])
}

// partHash is a SHA-256 over length-prefixed parts. Lengths keep the parts apart, so no separator can collide.
type partHash struct{ hash.Hash }

func newPartHash(domain string) partHash {
	h := partHash{sha256.New()}
	h.text(domain)
	return h
}

func (h partHash) count(n int) {
	var bytes [8]byte
	binary.BigEndian.PutUint64(bytes[:], uint64(n))
	h.Write(bytes[:])
}

func (h partHash) part(bytes []byte) {
	h.count(len(bytes))
	h.Write(bytes)
}

func (h partHash) text(text string) { h.part([]byte(text)) }

func (h partHash) sum() (digest [32]byte) {
	h.Sum(digest[:0])
	return digest
}

// identity is one part that identifies a caller: its kind, such as header:x-tenant, and its value.
type identity struct{ kind, value string }

// keyScope is what a key is unique within: a caller, also a service if several share the store.
type keyScope struct {
	caller [32]byte
	owner  [32]byte
}

func newKeyScope(service string, caller []identity) keyScope {
	var s keyScope
	if len(caller) > 0 {
		h := newPartHash("oncegate-caller-1")
		for _, part := range caller {
			h.text(part.kind)
			h.text(part.value)
		}
		s.caller = h.sum()
	}
	s.owner = s.caller
	if service != "" {
		h := newPartHash("oncegate-service-1")
		h.text(service)
		h.part(s.caller[:])
		s.owner = h.sum()
	}
	return s
}

func (s keyScope) callerTag() (tag [8]byte) {
	copy(tag[:], s.caller[:])
	return tag
}

func (s keyScope) record(operation []string, key string) RecordID {
	h := newPartHash("oncegate-record-1")
	h.part(s.owner[:])
	h.count(len(operation))
	for _, part := range operation {
		h.text(part)
	}
	h.text(key)
	return h.sum()
}

// keyTag is a short mark of a key, by which an operator finds its records. It proves nothing: two keys may have the same tag.
func keyTag(key string) (tag [8]byte) {
	h := newPartHash("oncegate-key-1")
	h.text(asciiLower(key))
	digest := h.sum()
	copy(tag[:], digest[:])
	return tag
}

// cutOperation is an operation of at most 256 bytes, cut between two characters.
func cutOperation(operation string) string {
	if len(operation) <= maxOperationBytes {
		return operation
	}
	end := maxOperationBytes
	for end > 0 && operation[end]&0xc0 == 0x80 {
		end--
	}
	return operation[:end]
}

func checkService(name string) error {
	for i := 0; i < len(name); i++ {
		if name[i] <= ' ' || name[i] > '~' {
			return fmt.Errorf("oncegate: the service name %q has a character other than visible ASCII; use letters, digits and hyphens", name)
		}
	}
	if len(name) > maxServiceChars {
		return fmt.Errorf("oncegate: the service name has %d characters; at most %d are allowed", len(name), maxServiceChars)
	}
	return nil
}

// DerivedKey returns the key of a business identity: the same name and parts give the same key in every process, in every language
// and in every release. A corrected request is another intent and must differ in a part. The key is a UUID of version 8.
func DerivedKey(name string, parts ...string) string {
	h := newPartHash("oncegate-intent-1")
	h.text(name)
	h.count(len(parts))
	for _, part := range parts {
		h.text(part)
	}
	return uuidOfDigest(h.sum())
}

func uuidOfDigest(digest [32]byte) string {
	var bits [16]byte
	copy(bits[:], digest[:])
	return uuid(bits, 8)
}

func uuid(bits [16]byte, version byte) string {
	bits[6] = bits[6]&0x0f | version<<4
	bits[8] = bits[8]&0x3f | 0x80
	text := hex.EncodeToString(bits[:])
	return strings.Join([]string{text[:8], text[8:12], text[12:16], text[16:20], text[20:]}, "-")
}

// asciiLower turns ASCII letters into lower case and leaves all other bytes.
func asciiLower(text string) string {
	for i := 0; i < len(text); i++ {
		if c := text[i]; 'A' <= c && c <= 'Z' {
			bytes := []byte(text)
			for ; i < len(bytes); i++ {
				if c := bytes[i]; 'A' <= c && c <= 'Z' {
					bytes[i] = c + ('a' - 'A')
				}
			}
			return string(bytes)
		}
	}
	return text
}

func asciiUpper(text string) string {
	bytes := []byte(text)
	for i, c := range bytes {
		if 'a' <= c && c <= 'z' {
			bytes[i] = c - ('a' - 'A')
		}
	}
	return string(bytes)
}
