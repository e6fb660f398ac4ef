package oncegate

import (
	"context"
	"sync"
	"time"
)

// MemoryStore keeps records in the memory of one process: for tests and for trying things out. A restart forgets everything.
type MemoryStore struct {
	mu      sync.Mutex
	records map[RecordID]*memoryRecord
	now     func() time.Time
	writes  int
}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore {
	return &MemoryStore{records: map[RecordID]*memoryRecord{}, now: time.Now}
}

// apply runs one decision. decide returns the record to write, or nil if it stays.
func (s *MemoryStore) apply(id RecordID, decide func(record *memoryRecord, now int64) *memoryRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now().UnixMilli()
	if next := decide(s.records[id], now); next != nil {
		s.records[id] = next
		// Expired records are removed now and then. They are kept for ten minutes after their end for their token.
		if s.writes++; s.writes%10000 == 0 {
			for id, record := range s.records {
				if now >= record.expiresAt+10*60*1000 {
					delete(s.records, id)
				}
			}
		}
	}
}

// Claim implements Store.
func (s *MemoryStore) Claim(_ context.Context, id RecordID, claim Claim) (reply ClaimReply, _ error) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideClaim(record, claim, now)
		return next
	})
	return reply, nil
}

// Renew implements Store.
func (s *MemoryStore) Renew(_ context.Context, id RecordID, token uint64, lease, retention time.Duration) (reply Settlement, _ error) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideRenew(record, token, lease, retention, now)
		return next
	})
	return reply, nil
}

// Complete implements Store.
func (s *MemoryStore) Complete(_ context.Context, id RecordID, token uint64, completion Completion) (reply Settlement, _ error) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideComplete(record, token, recordState(completion.State), completion.Response, completion.Retention, now)
		return next
	})
	return reply, nil
}

// Release implements Store.
func (s *MemoryStore) Release(_ context.Context, id RecordID, token uint64, retention time.Duration) (reply Settlement, _ error) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideRelease(record, token, retention, now)
		return next
	})
	return reply, nil
}

// Lookup implements Store.
func (s *MemoryStore) Lookup(_ context.Context, id RecordID) (info *RecordInfo, _ error) {
	s.apply(id, func(record *memoryRecord, now int64) *memoryRecord {
		if live := record.live(now); live != nil {
			info = &RecordInfo{State: string(live.state), Fingerprint: live.fingerprint, Token: live.token, Attempt: live.attempt}
		}
		return nil
	})
	return info, nil
}

// Step records a finished step of an attempt, as the contract of the stores defines it: "recorded", "differs", "full" or "fenced".
func (s *MemoryStore) Step(id RecordID, token uint64, number int, name string, result []byte) (reply string) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideStep(record, token, number, recordStep{name, result}, now)
		return next
	})
	return reply
}

// ReleaseUnknown frees a key whose outcome is unknown, as an operator does who has found out that nothing happened. It returns false if
// the outcome of the record is not unknown.
func (s *MemoryStore) ReleaseUnknown(id RecordID, retention time.Duration) (done bool) {
	return s.resolve(id, resolution{kind: "release", retention: retention})
}

// CompleteUnknown gives a key whose outcome is unknown a response, as an operator does who has found out that the operation took place.
// Without a response, retries learn that it took place. It returns false if the outcome of the record is not unknown.
func (s *MemoryStore) CompleteUnknown(id RecordID, response *StoredResponse, retention time.Duration) (bool, error) {
	decision := resolution{kind: "complete", retention: retention}
	if response != nil {
		encoded, err := response.Encode()
		if err != nil {
			return false, err
		}
		decision.response = encoded
	}
	return s.resolve(id, decision), nil
}

func (s *MemoryStore) resolve(id RecordID, decision resolution) (done bool) {
	s.apply(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, _, done = decideResolve(record, decision, now)
		return next
	})
	return done
}
