package oncegate

import (
	"io"
	"reflect"
	"strings"
)

// The bodies of net/http do not tell if a handler in front has read them. Their fields do: they are only read, and if another version has others,
// it is not known.

var readerType = reflect.TypeOf((*io.Reader)(nil)).Elem()

// bodyOfServer is the body that the server made, below http.MaxBytesReader, the reader that waits for 100-continue, and wrappers that embed it.
// It has a field sawEOF. It is invalid if there is none.
func bodyOfServer(body io.Reader) reflect.Value {
	value := reflect.ValueOf(body)
	for depth := 0; depth < 16; depth++ {
		for value.Kind() == reflect.Interface || value.Kind() == reflect.Pointer {
			value = value.Elem()
		}
		if value.Kind() != reflect.Struct {
			return reflect.Value{}
		}
		own := value.Type()
		isOfServer := strings.HasPrefix(own.PkgPath()+"/", "net/http/") || strings.HasSuffix(own.PkgPath(), "golang.org/x/net/http2")
		if field, ok := own.FieldByName("sawEOF"); ok && isOfServer && field.Type.Kind() == reflect.Bool && len(field.Index) == 1 {
			return value
		}
		below := reflect.Value{}
		for i := 0; i < own.NumField() && !below.IsValid(); i++ {
			field := own.Field(i)
			if (isOfServer || field.Anonymous) && field.Type.Kind() == reflect.Interface && field.Type.Implements(readerType) {
				below = value.Field(i)
			}
		}
		if !below.IsValid() {
			return reflect.Value{}
		}
		value = below
	}
	return reflect.Value{}
}

// hasSeenEnd reports if a body of the server was read to its end.
func hasSeenEnd(body io.Reader) bool {
	own := bodyOfServer(body)
	return own.IsValid() && own.FieldByName("sawEOF").Bool()
}

// hadContent reports if a body without a length had bytes that were read before. It is called after its end was read, and hadEnded is what
// hasSeenEnd said before that. The end that is still to be read may be that of a body whose bytes were read, and the end that was read that of
// an empty body.
func hadContent(body io.Reader, hadEnded bool) bool {
	own := bodyOfServer(body)
	if !own.IsValid() {
		return false
	}
	field := func(of reflect.Value, name string) reflect.Value {
		for of.Kind() == reflect.Interface || of.Kind() == reflect.Pointer {
			of = of.Elem()
		}
		if of.Kind() != reflect.Struct {
			return reflect.Value{}
		}
		return of.FieldByName(name)
	}
	// HTTP/1.1: the line break that ended the last chunk with bytes.
	if ends := field(field(own, "src"), "buf"); ends.Kind() == reflect.Array && ends.Type().Elem().Kind() == reflect.Uint8 && ends.Len() == 2 {
		return ends.Index(0).Uint() != 0
	}
	// HTTP/2: the server has counted them before it made the end known.
	if count := field(field(own, "stream"), "bodyBytes"); count.Kind() == reflect.Int64 {
		return count.Int() > 0
	}
	return hadEnded
}
