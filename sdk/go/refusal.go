package oncegate

import (
	"net/http"
	"strconv"
	"strings"
)

// refusal is a response of the middleware itself.
type refusal struct {
	condition  condition
	detail     string
	retryAfter int
	status     int
}

func refuse(name string) *refusal { return &refusal{condition: theContract().byName[name]} }

func (r *refusal) with(detail string) *refusal {
	r.detail = detail
	return r
}

func (r *refusal) after(seconds int) *refusal {
	r.retryAfter = seconds
	return r
}

// rejections refuse the request itself: no earlier request of the same content has taken effect within the retention.
var rejections = setOf("key-missing", "key-invalid", "key-expired", "key-unsupported", "key-reused", "request-too-large", "request-malformed",
	"request-head-too-large", "request-unsupported")

// write sends the refusal in the shape of the profile.
func (r *refusal) write(w http.ResponseWriter, s *compiled, record string) {
	name, status := r.condition.Name, r.status
	form := s.refusals
	row, all := form.rows[name], form.all
	if status == 0 {
		status = firstInt(row.Status, all.Status, r.condition.Status)
	}
	class := form.rows[strconv.Itoa(status/100)+"xx"]
	detail := r.detail
	switch {
	case detail != "" && name == "key-invalid":
		detail = strings.Join(s.profile.KeyHeader, " or ") + ": " + detail + "."
	case detail == "" && name == "key-missing":
		places := "the header field " + strings.Join(s.profile.KeyHeader, " or the header field ")
		detail = strings.Replace(r.condition.Detail, "{place}", places, 1)
	case detail == "":
		detail = r.condition.Detail
	}
	escape := func(text string) string { return text }
	if strings.Contains(form.mediaType, "json") {
		escape = func(text string) string {
			quoted := quotedJSON(text)
			return string(quoted[1 : len(quoted)-1])
		}
	}
	instance := ""
	if record != "" {
		instance = `,"instance":"urn:oncegate:record:` + record + `"`
	}
	reason := http.StatusText(status)
	switch {
	case reason == "":
		reason = "Error"
	case status == http.StatusRequestEntityTooLarge:
		// The name that the other libraries use.
		reason = "Payload Too Large"
	}
	body := fill(form.body, func(place string) (string, bool) {
		switch place {
		case "type":
			return escape(s.problemBase + name), true
		case "title":
			return escape(r.condition.Title), true
		case "status":
			return strconv.Itoa(status), true
		case "detail":
			return escape(detail), true
		case "retry":
			return r.condition.Retry, true
		case "slug":
			return name, true
		case "instance":
			return instance, true
		case "reason":
			return escape(reason), true
		case "code":
			return escape(firstText(row.Code, class.Code, all.Code, strings.ReplaceAll(name, "-", "_"))), true
		case "kind":
			return escape(firstText(row.Kind, class.Kind, all.Kind, "api_error")), true
		}
		return "", false
	})
	header := w.Header()
	header.Set("Content-Type", form.mediaType)
	header.Set("Content-Language", "en")
	header.Set("Cache-Control", "no-store")
	header.Set("Content-Length", strconv.Itoa(len(body)))
	if s.documentation != "" {
		header.Set("Link", "<"+s.documentation+`>; rel="describedby"`)
	}
	if status == http.StatusUnauthorized {
		header.Set("WWW-Authenticate", "Bearer")
	}
	if r.retryAfter > 0 {
		header.Set("Retry-After", strconv.Itoa(r.retryAfter))
	}
	isRetryable := r.condition.Retry == "same-key"
	s.addFields("refusal", header, isRetryable)
	if rejections[name] {
		s.addFields("rejection", header, isRetryable)
	}
	header.Set("Idempotency-Status", "refused; problem="+name+"; retry="+r.condition.Retry)
	w.WriteHeader(status)
	w.Write([]byte(body))
}

func firstInt(values ...int) int {
	for _, value := range values {
		if value != 0 {
			return value
		}
	}
	return 0
}

func firstText(values ...string) string {
	for _, value := range values {
		if value != "" {
			return value
		}
	}
	return ""
}
