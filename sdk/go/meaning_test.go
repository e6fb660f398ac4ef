package oncegate

import (
	"encoding/json"
	"net/http"
	"testing"
)

func TestMeanings(t *testing.T) {
	var file struct {
		Contexts []struct {
			Name         string
			Protection   protection
			ServerErrors string `json:"server_errors"`
			InDoubt      bool   `json:"in_doubt"`
		}
		Statuses  []int
		Responses []struct {
			Name     string
			Body     string
			Headers  [][]string
			Meanings map[string][][]json.RawMessage
		}
	}
	readVectors(t, "client/vectors/meanings.json", &file)
	judged, failed := 0, 0
	for _, response := range file.Responses {
		header := http.Header{}
		for _, line := range response.Headers {
			header.Add(line[0], line[1])
		}
		for _, c := range file.Contexts {
			var wanted []meaning
			for _, run := range response.Meanings[c.Name] {
				var count int
				var word meaning
				json.Unmarshal(run[0], &count)
				json.Unmarshal(run[1], &word)
				for ; count > 0; count-- {
					wanted = append(wanted, word)
				}
			}
			if len(wanted) != len(file.Statuses) {
				t.Fatalf("%s: %d meanings", response.Name, len(wanted))
			}
			for i, status := range file.Statuses {
				judged++
				got := judge(judging{c.Protection, c.ServerErrors, c.InDoubt}, status, header, []byte(response.Body))
				if got != wanted[i] {
					if failed++; failed < 20 {
						t.Errorf("%s, %s, %d: %s, want %s", response.Name, c.Name, status, got, wanted[i])
					}
				}
			}
		}
	}
	t.Logf("%d responses, %d meanings", len(file.Responses), judged)
}
