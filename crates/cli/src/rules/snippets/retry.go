package main

import (
	@IMPORTS@
)

@KEY@
func send() (string, error) {
	@READ_KEY@
	client := &http.Client{
		Timeout: 60 * time.Second,
		// A redirect is not followed.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	@CERTIFICATE@
	var after time.Duration
	var last error
	for _, pause := range []time.Duration{0, 1, 2, 4, 8, 16} {
		time.Sleep(min(max(pause*time.Second, after), time.Hour))
		after = 0
		request, err := http.NewRequest(@METHOD@, @URL@, @BODY@)
		if err != nil {
			return "", err
		}
		@FIELDS@
		response, err := client.Do(request)
		if err != nil {
			last = err // no response
			continue
		}
		data, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil {
			last = err // not the whole response
			continue
		}
		text, status := string(data), response.StatusCode
		if status/100 == 2 || status == 303 {
			return text, nil
		}
		@DECISION@
		if !again {
			return "", fmt.Errorf("stopped with status %d: %s", status, text)
		}
		wait := response.Header.Get("Retry-After")
		if seconds, err := strconv.Atoi(wait[:min(len(wait), 9)]); err == nil {
			after = time.Duration(seconds) * time.Second
		} else if date, err := http.ParseTime(wait); err == nil {
			after = time.Until(date)
		}
	}
	return "", fmt.Errorf("the outcome is not known; run this again later@LATER@ (last error: %v)", last)
}

func main() {
	text, err := send()
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(text)
}
