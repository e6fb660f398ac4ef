package oncegate

import (
	"context"
	"errors"
	"sync"
	"time"
)

// MemoryStore keeps records in the memory of one process: for tests and for trying things out. A restart forgets everything.
type MemoryStore struct {
	mu      sync.Mutex
	records map[RecordID]*memoryRecord
	now     func() time.Time
	// MaxRecords and MaxBytes (1 000 000, and 256 MiB of responses) are the limits from which new keys are refused. Set them before the store
	// is used.
	MaxRecords, MaxBytes int

	bytes int
	// sweepAt is the time of the next sweep in milliseconds.
	sweepAt int64
}

// isInProcess marks a store that no other program uses, also one that embeds it.
func (*MemoryStore) isInProcess() {}

// NewMemoryStore returns an empty store.
func NewMemoryStore() *MemoryStore {
	// A wall clock that is set ends no record.
	began := time.Now()
	now := func() time.Time { return began.Add(time.Since(began)) }
	return &MemoryStore{records: map[RecordID]*memoryRecord{}, now: now, MaxRecords: 1_000_000, MaxBytes: 256 << 20}
}

// apply runs one decision. decide returns the record to write, or nil if it stays.
func (s *MemoryStore) apply(id RecordID, decide func(record *memoryRecord, now int64) *memoryRecord) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.write(id, decide)
}

// write is apply for a caller that holds the lock.
func (s *MemoryStore) write(id RecordID, decide func(record *memoryRecord, now int64) *memoryRecord) {
	now := s.now().UnixMilli()
	if next := decide(s.records[id], now); next != nil {
		s.put(id, next)
		s.sweep(now)
	}
}

// put writes a record, or removes it (nil).
func (s *MemoryStore) put(id RecordID, next *memoryRecord) {
	s.bytes += next.size() - s.records[id].size()
	if next == nil {
		delete(s.records, id)
		return
	}
	s.records[id] = next
}

// sweep removes the content of records whose retention is over, and later the records: they are kept for ten minutes for their token. One
// sweep takes at most a tenth of the time.
func (s *MemoryStore) sweep(now int64) {
	if wait := s.sweepAt - now; wait > 0 && wait < 60*60*1000 {
		return
	}
	begun := time.Now()
	for id, record := range s.records {
		switch {
		case now >= record.expiresAt+10*60*1000:
			s.put(id, nil)
		case now >= record.expiresAt && record.size() > 0:
			empty := *record
			empty.response, empty.steps = nil, nil
			s.put(id, &empty)
		}
	}
	pause := 10 * time.Since(begun)
	if pause < time.Second {
		pause = time.Second
	}
	s.sweepAt = now + millis(pause)
}

// size is the content of a record in bytes.
func (r *memoryRecord) size() (n int) {
	if r == nil {
		return 0
	}
	for _, step := range r.steps {
		n += len(step.name) + len(step.result)
	}
	return n + len(r.response)
}

// Claim implements Store.
func (s *MemoryStore) Claim(_ context.Context, id RecordID, claim Claim) (reply ClaimReply, _ error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.records[id] == nil && (len(s.records) >= s.MaxRecords || s.bytes >= s.MaxBytes) {
		s.sweep(s.now().UnixMilli())
		if len(s.records) >= s.MaxRecords || s.bytes >= s.MaxBytes {
			return reply, &StoreError{StoreUnsent, "claim", fullError{errMemoryFull}}
		}
	}
	s.write(id, func(record *memoryRecord, now int64) (next *memoryRecord) {
		next, reply = decideClaim(record, claim, now)
		return next
	})
	return reply, nil
}

var errMemoryFull = errors.New("MaxRecords or MaxBytes of MemoryStore is reached")

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
			info = &RecordInfo{State: string(live.state), Fingerprint: live.fingerprint, Token: live.token, Attempt: live.attempt,
				Operation: live.operation, LeaseUntil: time.UnixMilli(live.leaseUntil), ExpiresAt: time.UnixMilli(live.expiresAt),
				AfterAbandoned: live.afterAbandoned}
		}
		return nil
	})
	return info, nil
}

// read implements recordReader.
func (s *MemoryStore) read(_ context.Context, id RecordID) (info *RecordInfo, response []byte, _ error) {
	info, err := s.Lookup(nil, id)
	if info != nil {
		s.apply(id, func(record *memoryRecord, now int64) *memoryRecord {
			response = record.response
			return nil
		})
	}
	return info, response, err
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
