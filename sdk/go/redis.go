package oncegate

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// RedisReply is the reply of a script, such as *redis.Cmd of go-redis. Arrays are []interface{}, strings string or []byte, numbers int64.
type RedisReply interface {
	Result() (interface{}, error)
}

// RedisClient calls scripts. The clients of go-redis (v8 and v9; one server, Sentinel and Cluster) have these methods.
type RedisClient[Reply RedisReply] interface {
	EvalSha(ctx context.Context, sha1 string, keys []string, args ...interface{}) Reply
	Eval(ctx context.Context, script string, keys []string, args ...interface{}) Reply
}

// RedisStore keeps records in Redis 7 or Valkey 7.2 and later (contract version 1).
type RedisStore struct {
	// IsCluster says that the records are on several nodes, so that the failure of one must not refuse the keys of the others. NewRedisStore
	// sets it for the ClusterClient of go-redis. Set it for another client of a Cluster before the store is used.
	IsCluster bool
	// AllowEviction accepts servers with a maxmemory-policy other than noeviction: they forget records when memory is used up, and a retry
	// of a forgotten key executes again. Set it before the store is used.
	AllowEviction bool

	// resends is true if the client sends a command again by itself. What it has sent before may arrive later.
	resends bool
	// kept says for each part of the slots if their server is known to evict nothing. A single server has all slots.
	kept          [clusterGroups]atomic.Bool
	evalSha, eval func(ctx context.Context, script string, keys []string, args ...interface{}) (interface{}, error)
}

// NewRedisStore returns a store on a client of the application:
//
//	store, err := oncegate.NewRedisStore[*redis.Cmd](client)
//
// All processes use the same server, database or Cluster. Use a server that keeps what it acknowledged (appendonly yes): a lost record
// executes again. A server that evicts records (maxmemory-policy) is refused at the first claim.
func NewRedisStore[Reply RedisReply](client RedisClient[Reply]) (*RedisStore, error) {
	for name, script := range theContract().Redis {
		digest := sha1.Sum([]byte(script.Text))
		if hex.EncodeToString(digest[:]) != script.SHA1 {
			return nil, fmt.Errorf("oncegate: the script %s of this library is damaged; install the library again", name)
		}
	}
	// Only a client of a Cluster looks for the master of a key.
	_, isCluster := reflect.TypeOf(client).MethodByName("MasterForKey")
	return &RedisStore{
		IsCluster: isCluster,
		resends:   isCluster || retriesOf(client) > 0,
		evalSha: func(ctx context.Context, digest string, keys []string, args ...interface{}) (interface{}, error) {
			return client.EvalSha(ctx, digest, keys, args...).Result()
		},
		eval: func(ctx context.Context, text string, keys []string, args ...interface{}) (interface{}, error) {
			return client.Eval(ctx, text, keys, args...).Result()
		},
	}, nil
}

// retriesOf is Options().MaxRetries of a client, as go-redis has it.
func retriesOf(client interface{}) (retries int64) {
	// A client that is nil fails at its first command.
	defer func() { recover() }()
	options := reflect.ValueOf(client).MethodByName("Options")
	if !options.IsValid() || options.Type().NumIn() != 0 || options.Type().NumOut() != 1 {
		return 0
	}
	own := reflect.Indirect(options.Call(nil)[0])
	if own.Kind() != reflect.Struct {
		return 0
	}
	if field := own.FieldByName("MaxRetries"); field.IsValid() && field.CanInt() {
		return field.Int()
	}
	return 0
}

// redisReply are the parts of a reply: a word, the server's time, and what the page of the contract says.
type redisReply []interface{}

func (r redisReply) text(at int) string {
	if at >= len(r) {
		return ""
	}
	switch part := r[at].(type) {
	case string:
		return part
	case []byte:
		return string(part)
	case int64:
		return strconv.FormatInt(part, 10)
	}
	return ""
}

func (r redisReply) number(at int) int64 {
	if at < len(r) {
		if number, ok := r[at].(int64); ok {
			return number
		}
	}
	number, _ := strconv.ParseInt(r.text(at), 10, 64)
	return number
}

func (s *RedisStore) call(ctx context.Context, name string, id RecordID, args ...interface{}) (redisReply, error) {
	script := theContract().Redis[name]
	keys := redisKeys(id)
	value, err := s.evalSha(ctx, script.SHA1, keys, args...)
	if err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		value, err = s.eval(ctx, script.Text, keys, args...)
	}
	if err != nil {
		return nil, redisError(name, err)
	}
	parts, ok := value.([]interface{})
	if !ok || len(parts) < 2 {
		return nil, &StoreError{StoreMisused, name, errors.New("the reply is not that of the contract; upgrade the library")}
	}
	return parts, nil
}

func redisKeys(id RecordID) []string { return []string{"oncegate:{" + id.String() + "}"} }

// Check reports if the server evicts records when its memory is used up. Call it at the start. The first claim does so, too, on a Cluster
// that of each part of the slots: nothing is executed until it has succeeded once. A server that does not tell its policy passes.
func (s *RedisStore) Check(ctx context.Context) error { return s.check(ctx, RecordID{}) }

func (s *RedisStore) check(ctx context.Context, id RecordID) error {
	part := 0
	if s.IsCluster {
		part = id.slot() / (redisSlots / clusterGroups)
	}
	if s.AllowEviction || s.kept[part].Load() {
		return nil
	}
	value, err := s.eval(ctx, "return redis.call('INFO', 'memory'):match('maxmemory_policy:([%w-]+)') or ''", redisKeys(id))
	if err != nil && !hasAnyPrefix(err.Error(), "NOPERM", "ERR ") || isAtItsLimit(err) {
		return redisError("check", err)
	}
	if policy := (redisReply{value}).text(0); err == nil && policy != "" && policy != "noeviction" {
		return &StoreError{StoreMisused, "check", fmt.Errorf("Redis evicts records (maxmemory-policy %s), and a retry of an evicted key would "+
			"execute again: set it to noeviction, or set AllowEviction of the RedisStore", policy)}
	}
	// Other errors may be those of a moment.
	if err == nil || hidesPolicy(err.Error()) {
		s.kept[part].Store(true)
	}
	return nil
}

// hidesPolicy reports if a server will never tell its policy: it refuses INFO to this user, or in scripts.
func hidesPolicy(text string) bool {
	return strings.HasPrefix(text, "NOPERM") || strings.HasPrefix(text, "ERR ") && (strings.Contains(text, "script") || strings.Contains(text, "ACL"))
}

// isAtItsLimit reports if the server accepts no more connections.
func isAtItsLimit(err error) bool {
	return err != nil && strings.HasPrefix(err.Error(), "ERR max number of clients")
}

func redisError(doing string, err error) error {
	kind := StoreUnavailable
	switch text := err.Error(); {
	case strings.HasPrefix(text, "CORRUPT"), strings.HasPrefix(text, "WRONGTYPE"):
		kind = RecordCorrupt
	case hasAnyPrefix(text, "INVALID", "NOPERM", "NOAUTH", "WRONGPASS"):
		kind = StoreMisused
	case hasAnyPrefix(text, "OOM", "MISCONF", "NOREPLICAS", "READONLY"):
		// The server takes no writes.
		kind, err = StoreUnsent, fullError{err}
	case hasAnyPrefix(text, "redis: connection pool timeout"):
		// Of go-redis.
		kind, err = StoreUnsent, fmt.Errorf("%w: %v", errPoolBusy, err)
	case hasAnyPrefix(text, "BUSY "):
		// Another script runs.
		kind, err = StoreUnsent, refusedError{err}
	case hasAnyPrefix(text, "redigo: connection pool exhausted"):
		kind, err = StoreUnsent, fmt.Errorf("%w: %v", errPoolBusy, err)
	case isUnsent(err):
		kind = StoreUnsent
	case hasAnyPrefix(text, "CLUSTERDOWN", "MASTERDOWN", "LOADING", "TRYAGAIN", "MOVED", "ASK"):
		// The script has not run.
		kind, err = StoreUnsent, refusedError{err}
	case isAnswer(text), text == "redis: client is closed":
		err = refusedError{err}
	}
	return &StoreError{kind, doing, err}
}

// isAnswer reports if an error is one that a server of Redis sends: its first word is in capitals. Those of clients and networks are not.
func isAnswer(text string) bool {
	word, _, hasMore := strings.Cut(text, " ")
	for _, c := range word {
		if c < 'A' || c > 'Z' {
			return false
		}
	}
	return hasMore && len(word) > 1 && word != "EOF"
}

func hasAnyPrefix(text string, prefixes ...string) bool {
	for _, prefix := range prefixes {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}

// fullError is errFull with the words of the server.
type fullError struct{ error }

func (e fullError) Error() string {
	return "it takes no new keys, because it is full or cannot write: " + e.error.Error()
}

func (e fullError) Is(target error) bool { return target == errFull }

func (e fullError) Unwrap() error { return e.error }

// refusedError is the error of a server that was reached and works.
type refusedError struct{ error }

func (e refusedError) Unwrap() error { return e.error }

const redisSlots = 16384

// slot is the part of a Cluster that has the record.
func (id RecordID) slot() int {
	crc := uint16(0)
	// Only the part of the key that is in braces counts.
	for _, c := range []byte(id.String()) {
		crc ^= uint16(c) << 8
		for i := 0; i < 8; i++ {
			if carry := crc&0x8000 != 0; carry {
				crc = crc<<1 ^ 0x1021
			} else {
				crc <<= 1
			}
		}
	}
	return int(crc) % redisSlots
}

// Claim implements Store.
func (s *RedisStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
	if err := s.check(ctx, id); err != nil {
		var own *StoreError
		if errors.As(err, &own) && own.Kind == StoreUnavailable {
			// The claim was not sent.
			own.Kind = StoreUnsent
		}
		return ClaimReply{}, err
	}
	tag := ""
	if claim.KeyTag != nil {
		tag = string(claim.KeyTag[:])
	}
	reply, err := s.call(ctx, "claim", id, string(claim.Attempt[:]), string(claim.Fingerprint[:]), millis(claim.Lease), millis(claim.Retention),
		string(claim.OnAbandoned), string(claim.CallerTag[:]), claim.Operation, tag)
	if err != nil {
		return ClaimReply{}, err
	}
	outcome, known := claimOutcomes[reply.text(0)]
	if !known {
		return ClaimReply{}, &StoreError{StoreMisused, "claim", fmt.Errorf("the outcome %q is unknown; upgrade the library", reply.text(0))}
	}
	result := ClaimReply{Outcome: outcome}
	switch outcome {
	case Execute:
		result.Token, result.Attempts, result.AfterAbandoned = uint64(reply.number(2)), int(reply.number(3)), reply.number(5) == 1
	case Replay:
		result.Response = []byte(reply.text(2))
	case InProgress:
		result.LeaseLeft = time.Duration(reply.number(2)) * time.Millisecond
	}
	return result, nil
}

func (s *RedisStore) settle(ctx context.Context, name string, id RecordID, args ...interface{}) (Settlement, error) {
	reply, err := s.call(ctx, name, id, args...)
	if err != nil {
		return 0, err
	}
	switch word := reply.text(0); word {
	case "renewed", "completed", "released":
		return Settled, nil
	case "fenced":
		return Fenced, nil
	default:
		return 0, &StoreError{StoreMisused, name, fmt.Errorf("the outcome %q is unknown; upgrade the library", word)}
	}
}

// Renew implements Store.
func (s *RedisStore) Renew(ctx context.Context, id RecordID, token uint64, lease, retention time.Duration) (Settlement, error) {
	return s.settle(ctx, "renew", id, token, millis(lease), millis(retention))
}

// Complete implements Store.
func (s *RedisStore) Complete(ctx context.Context, id RecordID, token uint64, completion Completion) (Settlement, error) {
	args := []interface{}{token, string(completion.State), millis(completion.Retention)}
	if completion.State == Completed {
		args = append(args, completion.Response)
	}
	return s.settle(ctx, "complete", id, args...)
}

// Release implements Store.
func (s *RedisStore) Release(ctx context.Context, id RecordID, token uint64, retention time.Duration) (Settlement, error) {
	return s.settle(ctx, "release", id, token, millis(retention))
}

// Lookup implements Store.
func (s *RedisStore) Lookup(ctx context.Context, id RecordID) (*RecordInfo, error) {
	reply, err := s.call(ctx, "lookup", id, "head")
	if err != nil {
		return nil, err
	}
	info, _ := reply.record()
	return info, nil
}

// read implements recordReader. A server without memory still runs this script.
func (s *RedisStore) read(ctx context.Context, id RecordID) (*RecordInfo, []byte, error) {
	reply, err := s.call(ctx, "lookup", id)
	if err != nil {
		return nil, nil, err
	}
	info, response := reply.record()
	return info, response, nil
}

// record is the record and its response in the reply of a lookup; nil if there is none.
func (reply redisReply) record() (_ *RecordInfo, response []byte) {
	if reply.text(0) == "absent" {
		return nil, nil
	}
	var info RecordInfo
	for at := 2; at+1 < len(reply); at += 2 {
		switch value := reply.text(at + 1); reply.text(at) {
		case "state":
			info.State = value
		case "fingerprint":
			copy(info.Fingerprint[:], value)
		case "token":
			info.Token = uint64(reply.number(at + 1))
		case "attempt":
			copy(info.Attempt[:], value)
		case "operation":
			info.Operation = value
		case "lease_until":
			info.LeaseUntil = time.UnixMilli(reply.number(at + 1))
		case "after_abandoned":
			info.AfterAbandoned = reply.number(at+1) == 1
		case "expires_at":
			info.ExpiresAt = time.UnixMilli(reply.number(at + 1))
		case "response":
			response = []byte(value)
		}
	}
	return &info, response
}
