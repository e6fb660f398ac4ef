package oncegate

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"sync"
)

var (
	jsonMarshaler = reflect.TypeOf((*json.Marshaler)(nil)).Elem()
	textMarshaler = reflect.TypeOf((*encoding.TextMarshaler)(nil)).Elem()

	// hidden has the name of the hidden type inside of a type, or "".
	hidden sync.Map
)

// checkVisible refuses a type whose values all have the same JSON although they differ: a struct that has fields, and none that JSON shows.
func checkVisible[T any](what, function string) error {
	return checkVisibleType(reflect.TypeOf((*T)(nil)).Elem(), what, function)
}

func checkVisibleType(own reflect.Type, what, function string) error {
	if own == nil {
		return nil
	}
	name, isKnown := hidden.Load(own)
	if !isKnown {
		name = hiddenIn(own, map[reflect.Type]bool{})
		hidden.Store(own, name)
	}
	if name == "" {
		return nil
	}
	return fmt.Errorf("oncegate: the %s of %s contains a %s, which has no exported field: JSON does not show what is in it, so all its values would be "+
		"the same. Export its fields, or give it MarshalJSON and UnmarshalJSON", what, function, name)
}

func hiddenIn(t reflect.Type, seen map[reflect.Type]bool) string {
	if seen[t] || t.Implements(jsonMarshaler) || t.Implements(textMarshaler) || reflect.PointerTo(t).Implements(jsonMarshaler) ||
		reflect.PointerTo(t).Implements(textMarshaler) {
		return ""
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Slice, reflect.Array, reflect.Map:
		return hiddenIn(t.Elem(), seen)
	case reflect.Struct:
	default:
		return ""
	}
	shown := 0
	for i := 0; i < t.NumField(); i++ {
		field := t.Field(i)
		if !field.IsExported() && !field.Anonymous || field.Tag.Get("json") == "-" {
			continue
		}
		shown++
		if name := hiddenIn(field.Type, seen); name != "" {
			return name
		}
	}
	if shown == 0 && t.NumField() > 0 {
		return t.String()
	}
	return ""
}
