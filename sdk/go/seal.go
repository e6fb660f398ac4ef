package oncegate

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
)

const (
	sealLabel    = "oncegate-seal-1"
	sealMagic    = "\x00ogseal\x01"
	sealHeadSize = 8 + 8 + 1 + 8 + 32
	// sealOverhead is what a seal adds to its content.
	sealOverhead = sealHeadSize + 16
)

// SealKeys are the keys that encrypt stored responses. The first one seals, all open.
type SealKeys struct{ keys []sealKey }

// sealKey has its key in a function, so that nothing that prints a value finds its bytes.
type sealKey struct {
	id  []byte
	key func() []byte
}

// String returns the ids of the keys, and nothing of the keys.
func (k SealKeys) String() string {
	ids := make([]string, len(k.keys))
	for i, key := range k.keys {
		ids[i] = hex.EncodeToString(key.id)
	}
	return "SealKeys(" + strings.Join(ids, " ") + ")"
}

// Format writes the ids, whatever the verb is.
func (k SealKeys) Format(state fmt.State, _ rune) { fmt.Fprint(state, k.String()) }

// ParseSealKeys reads keys as `oncegate seal-key new` prints them, one in each line. Lines that begin with # are comments.
func ParseSealKeys(text string) (*SealKeys, error) {
	var keys SealKeys
	lines := bufio.NewScanner(strings.NewReader(text))
	for number := 1; lines.Scan(); number++ {
		line := strings.TrimSpace(lines.Text())
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.Split(line, "_")
		if len(parts) != 3 || parts[0] != "ogseal1" || len(parts[2]) != 64 {
			return nil, fmt.Errorf("oncegate: line %d is not a seal key; it begins with ogseal1_, as `oncegate seal-key new` prints it", number)
		}
		key, err := hex.DecodeString(parts[2])
		if err != nil {
			return nil, fmt.Errorf("oncegate: the seal key in line %d has a character that is not hexadecimal", number)
		}
		id := expand(key, sealLabel+" id", 8)
		if parts[1] != hex.EncodeToString(id) {
			return nil, fmt.Errorf("oncegate: the seal key in line %d was mistyped: its id does not fit", number)
		}
		keys.keys = append(keys.keys, sealKey{id, func() []byte { return key }})
	}
	if len(keys.keys) == 0 {
		return nil, errors.New("oncegate: there is no seal key; make one with `oncegate seal-key new`")
	}
	return &keys, lines.Err()
}

// expand is HKDF-Expand of RFC 5869 with SHA-256, for at most 32 bytes.
func expand(key []byte, info string, length int) []byte {
	mac := hmac.New(sha256.New, key)
	mac.Write([]byte(info))
	mac.Write([]byte{1})
	return mac.Sum(nil)[:length]
}

// The kinds of content that this library seals or opens: the response of an owner, and that of an operator.
const ownersPart, operatorsPart = 1, 2

// sealResponse is the sealed form of an encoded response: a response whose body is the sealed form, and whose status is that of an error,
// because a program that does not know the seal must not replay a success.
func sealResponse(keys *SealKeys, record RecordID, token uint64, encoded []byte) ([]byte, error) {
	sealed := StoredResponse{Status: 500, Headers: []Field{{sealedField, "1"}}, Body: keys.seal(ownersPart, record, token, nil, encoded)}
	return sealed.Encode()
}

// sealContext is what a seal is bound to: moved to another record or attempt, it cannot be opened.
func sealContext(part byte, record RecordID, token uint64, more []byte) []byte {
	out := append([]byte(sealLabel), part)
	out = append(out, record[:]...)
	out = binary.BigEndian.AppendUint64(out, token)
	return append(out, more...)
}

func sealCipher(key, salt []byte) cipher.AEAD {
	block, err := aes.NewCipher(expand(key, sealLabel+" data"+string(salt), 32))
	if err != nil {
		panic(err) // The key has 32 bytes.
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}

// seal encrypts content under the first key. The salt depends on key, context and content, so each pair of them has a key of its own.
func (k *SealKeys) seal(part byte, record RecordID, token uint64, more, content []byte) []byte {
	key, bound := k.keys[0], sealContext(part, record, token, more)
	mac := hmac.New(sha256.New, expand(key.key(), sealLabel+" salt", 32))
	var length [8]byte
	binary.BigEndian.PutUint64(length[:], uint64(len(bound)))
	mac.Write(length[:])
	mac.Write(bound)
	mac.Write(content)
	salt := mac.Sum(nil)
	out := append([]byte(sealMagic), key.id...)
	out = append(out, part)
	out = binary.BigEndian.AppendUint64(out, token)
	out = append(out, salt...)
	return sealCipher(key.key(), salt).Seal(out, make([]byte, 12), content, bound)
}

var (
	errKeyMissing = errors.New("the key that sealed it is missing")
	errNoSealKeys = errors.New("it is sealed, and this program has no seal keys")
	errBadSeal    = errors.New("its seal is damaged, or was made for another record")
)

// open decrypts a sealed form. Its token is the one in it: the attempt that sealed it may not be the newest one.
func (k *SealKeys) open(part byte, record RecordID, more, sealed []byte) ([]byte, error) {
	if len(sealed) < sealOverhead || string(sealed[:8]) != sealMagic || sealed[16] != part {
		return nil, errBadSeal
	}
	for _, key := range k.keys {
		if subtle.ConstantTimeCompare(key.id, sealed[8:16]) != 1 {
			continue
		}
		bound := sealContext(part, record, binary.BigEndian.Uint64(sealed[17:]), more)
		content, err := sealCipher(key.key(), sealed[25:57]).Open(nil, make([]byte, 12), sealed[57:], bound)
		if err != nil {
			return nil, errBadSeal
		}
		return content, nil
	}
	return nil, fmt.Errorf("%w: %x", errKeyMissing, sealed[8:16])
}

// Sealing is how a program that completes records in its own transaction encrypts them. The zero value seals nothing, and refuses what is
// sealed.
type Sealing struct {
	// Keys are those of the other programs on the database.
	Keys *SealKeys
	// Required refuses responses in clear. Set it when no record from before the sealing is left.
	Required bool
	// OpensOnly seals nothing, and opens what was sealed.
	OpensOnly bool
}

func (s Sealing) seals() bool { return s.Keys != nil && !s.OpensOnly }

// seal returns the encoded response in the form in which it is stored.
func (s Sealing) seal(record RecordID, token uint64, encoded []byte) ([]byte, error) {
	if !s.seals() {
		return encoded, nil
	}
	sealed, err := sealResponse(s.Keys, record, token, encoded)
	if err != nil {
		return nil, &StoreError{StoreMisused, "complete", err}
	}
	return sealed, nil
}

// open returns the encoded response that was stored for this record.
func (s Sealing) open(record RecordID, encoded []byte) ([]byte, error) {
	response, err := DecodeResponse(encoded)
	if err != nil {
		return nil, &StoreError{RecordCorrupt, "claim", err}
	}
	if !response.isSealed() {
		if s.Required {
			return nil, &StoreError{ResponseSealed, "claim", errors.New("it is not sealed")}
		}
		return encoded, nil
	}
	if s.Keys == nil {
		return nil, &StoreError{ResponseSealed, "claim", errNoSealKeys}
	}
	part := byte(ownersPart)
	if len(response.Body) > 16 && response.Body[16] == operatorsPart {
		part = operatorsPart
	}
	opened, err := s.Keys.open(part, record, nil, response.Body)
	switch {
	case err == nil:
		return opened, nil
	case errors.Is(err, errKeyMissing):
		return nil, &StoreError{ResponseSealed, "claim", err}
	}
	return nil, &StoreError{RecordCorrupt, "claim", err}
}

// SealedStore encrypts the responses of a store. Other fields of a record stay in clear.
type SealedStore struct {
	Store
	keys *SealKeys
	// Required refuses responses in clear. Set it when no record from before the sealing is left.
	Required bool
	// OpensOnly seals nothing, and opens what was sealed.
	OpensOnly bool
}

func (s *SealedStore) sealing() Sealing { return Sealing{s.keys, s.Required, s.OpensOnly} }

// NewSealedStore returns a store that seals with the first of the keys, and opens with any.
func NewSealedStore(store Store, keys *SealKeys) *SealedStore {
	return &SealedStore{Store: store, keys: keys}
}

// Claim implements Store.
func (s *SealedStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	reply, err := s.Store.Claim(ctx, id, claim)
	if err != nil || reply.Outcome != Replay {
		return reply, err
	}
	reply.Response, err = s.sealing().open(id, reply.Response)
	return reply, err
}

// read implements recordReader.
func (s *SealedStore) read(ctx context.Context, id RecordID) (*RecordInfo, []byte, error) {
	reader, ok := s.Store.(recordReader)
	if !ok {
		info, err := s.Store.Lookup(ctx, id)
		if info != nil && info.State == string(stateCompleted) {
			// Its response is not known here.
			info = nil
		}
		return info, nil, err
	}
	info, response, err := reader.read(ctx, id)
	if err != nil || info == nil || info.State != string(stateCompleted) {
		return info, nil, err
	}
	response, err = s.sealing().open(id, response)
	return info, response, err
}

// Complete implements Store.
func (s *SealedStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	if completion.State == Completed {
		sealed, err := s.sealing().seal(id, token, completion.Response)
		if err != nil {
			return 0, err
		}
		completion.Response = sealed
	}
	return s.Store.Complete(ctx, id, token, completion)
}
