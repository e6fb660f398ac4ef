package oncegate

import "strings"

// canonicalPath is the one spelling of a path: percent-encoded unreserved characters are decoded, dot segments are removed, repeated
// slashes are merged, and a slash at the end is removed unless it counts. A target that is not a path stays as it is.
func canonicalPath(path string, exactSlash bool) string {
	if !strings.HasPrefix(path, "/") {
		return path
	}
	endsWithSlash := len(path) > 1 && strings.HasSuffix(path, "/")
	if !strings.Contains(path, "%") && isASCII(path) && !strings.Contains(path, "//") && !strings.Contains(path, "/.") &&
		(!endsWithSlash || exactSlash) {
		return path
	}
	var segments []string
	endsWithSlash = false
	for _, segment := range strings.Split(decodeUnreserved(path), "/")[1:] {
		endsWithSlash = segment == "" || segment == "." || segment == ".."
		switch segment {
		case "", ".":
		case "..":
			if len(segments) > 0 {
				segments = segments[:len(segments)-1]
			}
		default:
			segments = append(segments, segment)
		}
	}
	spelled := "/" + strings.Join(segments, "/")
	if len(segments) > 0 && endsWithSlash && exactSlash {
		spelled += "/"
	}
	return spelled
}

// decodeUnreserved decodes unreserved characters (RFC 3986, 2.3), encodes bytes that must be encoded, and writes the digits of escapes in
// upper case. A percent sign that starts no escape stays.
func decodeUnreserved(path string) string {
	const digits = "0123456789ABCDEF"
	var out strings.Builder
	for i := 0; i < len(path); i++ {
		c := path[i]
		isEscape := false
		if c == '%' && i+2 < len(path) {
			high, ok1 := hexDigit(path[i+1])
			low, ok2 := hexDigit(path[i+2])
			if isEscape = ok1 && ok2; isEscape {
				c = high<<4 | low
				i += 2
			}
		}
		switch {
		case !isEscape && c < 0x80, isEscape && (isAlnum(c) || strings.IndexByte("-._~", c) >= 0):
			out.WriteByte(c)
		default:
			out.WriteByte('%')
			out.WriteByte(digits[c>>4])
			out.WriteByte(digits[c&15])
		}
	}
	return out.String()
}
