package oncegate

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Field is a header or trailer field of a stored response.
type Field struct{ Name, Value string }

// StoredResponse is the response that a record keeps.
type StoredResponse struct {
	// Status is from 200 to 999.
	Status int
	// Headers have names in lower case.
	Headers []Field
	// Trailers have names in lower case.
	Trailers []Field
	Body     []byte
}

// sealedField is the name of the only header field of a sealed response.
const sealedField = "oncegate-sealed"

const responseVersion = 1

func (r *StoredResponse) isSealed() bool {
	return len(r.Headers) > 0 && r.Headers[0].Name == sealedField
}

// Encode returns the published bytes of the response, as stores keep them.
func (r *StoredResponse) Encode() ([]byte, error) {
	if r.Status < 200 || r.Status > 999 {
		return nil, errors.New("oncegate: the status of the response is not from 200 to 999")
	}
	if len(r.Headers) > maxHeaderFields || len(r.Trailers) > maxHeaderFields {
		return nil, fmt.Errorf("oncegate: the response has more than %d header or trailer fields", maxHeaderFields)
	}
	size := 7 + len(r.Body)
	for _, fields := range [...][]Field{r.Headers, r.Trailers} {
		for _, field := range fields {
			if len(field.Name) > 0xffff || !isASCII(field.Name) {
				return nil, errors.New("oncegate: the response has a field name that is too long or not ASCII")
			}
			size += 6 + len(field.Name) + len(field.Value)
		}
	}
	if size > maxResponseBytes {
		return nil, fmt.Errorf("oncegate: the response is larger than %d bytes", maxResponseBytes)
	}
	out := make([]byte, 0, size)
	out = append(out, responseVersion)
	out = binary.BigEndian.AppendUint16(out, uint16(r.Status))
	out = binary.BigEndian.AppendUint16(out, uint16(len(r.Headers)))
	out = binary.BigEndian.AppendUint16(out, uint16(len(r.Trailers)))
	for _, fields := range [...][]Field{r.Headers, r.Trailers} {
		for _, field := range fields {
			out = binary.BigEndian.AppendUint16(out, uint16(len(field.Name)))
			out = binary.BigEndian.AppendUint32(out, uint32(len(field.Value)))
			out = append(out, field.Name...)
			out = append(out, field.Value...)
		}
	}
	return append(out, r.Body...), nil
}

var errBadResponse = errors.New("oncegate: the stored response is incomplete, invalid or of an unknown version")

// DecodeResponse reads the published bytes of a response. The body shares their memory.
func DecodeResponse(encoded []byte) (*StoredResponse, error) {
	if len(encoded) < 7 || len(encoded) > maxResponseBytes || encoded[0] != responseVersion {
		return nil, errBadResponse
	}
	r := &StoredResponse{Status: int(binary.BigEndian.Uint16(encoded[1:]))}
	if r.Status < 200 || r.Status > 999 {
		return nil, errBadResponse
	}
	headers, trailers := int(binary.BigEndian.Uint16(encoded[3:])), int(binary.BigEndian.Uint16(encoded[5:]))
	if headers+trailers > 2*maxHeaderFields {
		return nil, errBadResponse
	}
	rest := encoded[7:]
	for i := 0; i < headers+trailers; i++ {
		if len(rest) < 6 {
			return nil, errBadResponse
		}
		name, value := uint64(binary.BigEndian.Uint16(rest)), uint64(binary.BigEndian.Uint32(rest[2:]))
		rest = rest[6:]
		if uint64(len(rest)) < name+value {
			return nil, errBadResponse
		}
		field := Field{string(rest[:name]), string(rest[name : name+value])}
		rest = rest[name+value:]
		if !isASCII(field.Name) {
			return nil, errBadResponse
		}
		if i < headers {
			r.Headers = append(r.Headers, field)
		} else {
			r.Trailers = append(r.Trailers, field)
		}
	}
	r.Body = rest
	return r, nil
}

func isASCII[Text string | []byte](text Text) bool {
	for i := 0; i < len(text); i++ {
		if text[i] >= 0x80 {
			return false
		}
	}
	return true
}
