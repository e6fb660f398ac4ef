package oncegate

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"strings"
	"sync"
	"unicode/utf8"
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

func hostDigest(secret *IDSecret, host string) (digest [hostBytes]byte) {
	own := secret.fingerprint(fingerprintOfParts("host", []byte(host)))
	copy(digest[:], own[len(own)-hostBytes:])
	return digest
}

// differsInHostOnly reports if two fingerprints differ in nothing but the host.
func differsInHostOnly(stored, own Fingerprint) bool {
	end := len(own) - hostBytes
	return stored != own && string(stored[:end]) == string(own[:end])
}

// partHash is a SHA-256 over length-prefixed parts. Lengths keep the parts apart, so no separator can collide. It is used once: sum ends it.
type partHash struct {
	// collected are the parts that are not hashed yet: short ones are hashed together.
	collected []byte
	// long has what was hashed before them, or is nil.
	long hash.Hash
}

// maxCollected bounds what a hash collects.
const maxCollected = 4096

var partHashes = sync.Pool{New: func() any { return &partHash{collected: make([]byte, 0, 512)} }}

func newPartHash(domain string) *partHash {
	h := partHashes.Get().(*partHash)
	h.text(domain)
	return h
}

func (h *partHash) count(n int) { h.collected = binary.BigEndian.AppendUint64(h.collected, uint64(n)) }

func (h *partHash) part(bytes []byte) {
	h.count(len(bytes))
	if h.makeRoom(len(bytes)) {
		h.collected = append(h.collected, bytes...)
	} else {
		h.long.Write(bytes)
	}
}

func (h *partHash) text(text string) {
	h.count(len(text))
	if h.makeRoom(len(text)) {
		h.collected = append(h.collected, text...)
	} else {
		h.long.Write([]byte(text))
	}
}

// makeRoom returns false if a part of this size is too long to be collected. What was collected before it is hashed then.
func (h *partHash) makeRoom(size int) bool {
	if len(h.collected)+size <= maxCollected {
		return true
	}
	if h.long == nil {
		h.long = sha256.New()
	}
	h.long.Write(h.collected)
	h.collected = h.collected[:0]
	return size <= maxCollected
}

func (h *partHash) sum() (digest [32]byte) {
	if h.long == nil {
		digest = sha256.Sum256(h.collected)
	} else {
		h.long.Write(h.collected)
		copy(digest[:], h.long.Sum(h.collected[:0]))
	}
	h.collected, h.long = h.collected[:0], nil
	partHashes.Put(h)
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

// record is the plain identifier.
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

func keyDigest(key string) [32]byte {
	h := newPartHash("oncegate-key-1")
	h.text(asciiLower(key))
	return h.sum()
}

// cutOperation is an operation of at most 256 bytes, cut between two characters.
func cutOperation(operation string) string {
	// PostgreSQL takes no other text. The id of the record has the operation as it is.
	if !utf8.ValidString(operation) || strings.IndexByte(operation, 0) >= 0 {
		operation = strings.ReplaceAll(strings.ToValidUTF8(operation, "\uFFFD"), "\x00", "\uFFFD")
	}
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
	for i := 0; i < len(text); i++ {
		if isLower(text[i]) {
			bytes := []byte(text)
			for ; i < len(bytes); i++ {
				if isLower(bytes[i]) {
					bytes[i] -= 'a' - 'A'
				}
			}
			return string(bytes)
		}
	}
	return text
}

// sameInLower reports if two texts in ASCII differ at most in case.
func sameInLower(one, other []byte) bool {
	if len(one) != len(other) {
		return false
	}
	for i, c := range one {
		if lowerOf(c) != lowerOf(other[i]) {
			return false
		}
	}
	return true
}

func lowerOf(c byte) byte {
	if 'A' <= c && c <= 'Z' {
		return c + ('a' - 'A')
	}
	return c
}
