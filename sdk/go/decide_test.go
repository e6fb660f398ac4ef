package oncegate

import (
	"context"
	"encoding/hex"
	"fmt"
	"reflect"
	"testing"
	"time"
)

// The walks run on the memory store itself, with its clock set by hand.
func TestDecisions(t *testing.T) {
	type vectorRecord struct {
		State          string
		Response       *string
		Fingerprint    string
		Token          uint64
		Attempts       int
		Attempt        *string
		LeaseUntil     *int64 `json:"lease_until"`
		AfterAbandoned *bool  `json:"after_abandoned"`
		CreatedAt      int64  `json:"created_at"`
		ChangedAt      int64  `json:"changed_at"`
		ExpiresAt      int64  `json:"expires_at"`
		Caller         string
		KeyTag         *string `json:"key_tag"`
		Operation      string
		Steps          [][]string
		ByOperator     bool `json:"by_operator"`
	}
	type expectation struct {
		Outcome        string
		Token          uint64
		Attempts       int
		LeaseUntil     int64 `json:"lease_until"`
		LeaseLeftMs    int64 `json:"lease_left_ms"`
		AfterAbandoned bool  `json:"after_abandoned"`
		Response       string
		StateBefore    *string `json:"state_before"`
	}
	var file struct {
		Walks [][]struct {
			Command, Attempt, Caller, Fingerprint, Operation, Name, Result, State, Resolution string
			KeyTag                                                                            *string `json:"key_tag"`
			LeaseMs                                                                           int64   `json:"lease_ms"`
			RetentionMs                                                                       int64   `json:"retention_ms"`
			OnAbandoned                                                                       string  `json:"on_abandoned"`
			Now                                                                               int64
			Token                                                                             uint64
			Number                                                                            int
			Response                                                                          *string
			Force, Amend                                                                      bool
			Expect                                                                            expectation
			Record                                                                            *vectorRecord
		}
	}
	readVectors(t, "core/vectors/decisions.json", &file)
	ctx := context.Background()
	optional := func(text *string) []byte {
		if text == nil {
			return nil
		}
		return unhex(t, *text)
	}
	commands := 0
	for w, walk := range file.Walks {
		store := NewMemoryStore()
		id := RecordID{1}
		for n, c := range walk {
			commands++
			store.now = func() time.Time { return time.UnixMilli(c.Now) }
			lease, retention := time.Duration(c.LeaseMs)*time.Millisecond, time.Duration(c.RetentionMs)*time.Millisecond
			settled := map[Settlement]string{Fenced: "fenced"}
			var got expectation
			switch c.Command {
			case "claim":
				claim := Claim{Lease: lease, Retention: retention, OnAbandoned: OnAbandoned(c.OnAbandoned), Operation: c.Operation}
				copy(claim.Attempt[:], unhex(t, c.Attempt))
				copy(claim.Fingerprint[:], unhex(t, c.Fingerprint))
				copy(claim.CallerTag[:], unhex(t, c.Caller))
				if c.KeyTag != nil {
					claim.KeyTag = new([8]byte)
					copy(claim.KeyTag[:], unhex(t, *c.KeyTag))
				}
				reply, _ := store.Claim(ctx, id, claim)
				names := map[ClaimOutcome]string{Execute: "execute", Replay: "replay", InProgress: "in-progress", Mismatch: "mismatch",
					Unknown: "unknown", Unreplayable: "unreplayable"}
				got = expectation{Outcome: names[reply.Outcome], Token: reply.Token, Attempts: reply.Attempts,
					AfterAbandoned: reply.AfterAbandoned, Response: hex.EncodeToString(reply.Response), LeaseLeftMs: reply.LeaseLeft.Milliseconds()}
				if reply.Outcome == Execute {
					got.LeaseUntil = store.records[id].leaseUntil
				}
			case "renew":
				reply, _ := store.Renew(ctx, id, c.Token, lease, retention)
				settled[Settled] = "renewed"
				got.Outcome = settled[reply]
				if reply == Settled {
					got.LeaseUntil = store.records[id].leaseUntil
				}
			case "step":
				got.Outcome = store.Step(id, c.Token, c.Number, c.Name, unhex(t, c.Result))
			case "complete":
				reply, _ := store.Complete(ctx, id, c.Token, Completion{CompletionState(c.State), optional(c.Response), retention})
				settled[Settled] = "completed"
				got.Outcome = settled[reply]
			case "release":
				reply, _ := store.Release(ctx, id, c.Token, retention)
				settled[Settled] = "released"
				got.Outcome = settled[reply]
			case "resolve":
				store.apply(id, func(record *memoryRecord, now int64) *memoryRecord {
					next, before, done := decideResolve(record, resolution{c.Resolution, optional(c.Response), retention, c.Force, c.Amend}, now)
					got.Outcome = map[bool]string{true: "resolved", false: "not-resolvable"}[done]
					if before != "" {
						got.StateBefore = &before
					}
					return next
				})
			default:
				t.Fatal(c.Command)
			}
			if !reflect.DeepEqual(got, c.Expect) {
				t.Fatalf("walk %d, command %d (%s): got %+v, want %+v", w, n, c.Command, got, c.Expect)
			}
			var record *vectorRecord
			if own := store.records[id]; own != nil {
				record = &vectorRecord{State: string(own.state), Fingerprint: hex.EncodeToString(own.fingerprint[:]), Token: own.token,
					Attempts: own.attempts, CreatedAt: own.createdAt, ChangedAt: own.changedAt, ExpiresAt: own.expiresAt,
					Caller: hex.EncodeToString(own.caller[:]), Operation: own.operation, Steps: [][]string{}, ByOperator: own.byOperator}
				if own.state == stateCompleted {
					response := hex.EncodeToString(own.response)
					record.Response = &response
				}
				if own.state == stateInProgress {
					attempt := hex.EncodeToString(own.attempt[:])
					record.Attempt, record.LeaseUntil, record.AfterAbandoned = &attempt, &own.leaseUntil, &own.afterAbandoned
				}
				if own.keyTag != nil {
					tag := hex.EncodeToString(own.keyTag[:])
					record.KeyTag = &tag
				}
				for _, step := range own.steps {
					record.Steps = append(record.Steps, []string{step.name, hex.EncodeToString(step.result)})
				}
			}
			if !reflect.DeepEqual(record, c.Record) {
				t.Fatalf("walk %d, command %d (%s): the record is %+v, want %+v", w, n, c.Command, record, c.Record)
			}
		}
	}
	t.Log(fmt.Sprintf("%d commands in %d walks", commands, len(file.Walks)))
}
