package oncegate

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"
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
	evalSha, eval func(ctx context.Context, script string, keys []string, args ...interface{}) (interface{}, error)
}

// NewRedisStore returns a store on a client of the application:
//
//	store, err := oncegate.NewRedisStore[*redis.Cmd](client)
//
// Use a server that keeps what it acknowledged (appendonly yes, maxmemory-policy noeviction): a lost record executes again.
func NewRedisStore[Reply RedisReply](client RedisClient[Reply]) (*RedisStore, error) {
	for name, script := range theContract().Redis {
		digest := sha1.Sum([]byte(script.Text))
		if hex.EncodeToString(digest[:]) != script.SHA1 {
			return nil, fmt.Errorf("oncegate: the script %s of this library is damaged; install the library again", name)
		}
	}
	return &RedisStore{
		evalSha: func(ctx context.Context, digest string, keys []string, args ...interface{}) (interface{}, error) {
			return client.EvalSha(ctx, digest, keys, args...).Result()
		},
		eval: func(ctx context.Context, text string, keys []string, args ...interface{}) (interface{}, error) {
			return client.Eval(ctx, text, keys, args...).Result()
		},
	}, nil
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
	keys := []string{"oncegate:{" + id.String() + "}"}
	value, err := s.evalSha(ctx, script.SHA1, keys, args...)
	if err != nil && strings.HasPrefix(err.Error(), "NOSCRIPT") {
		value, err = s.eval(ctx, script.Text, keys, args...)
	}
	if err != nil {
		kind := StoreUnavailable
		switch text := err.Error(); {
		case strings.HasPrefix(text, "CORRUPT"), strings.HasPrefix(text, "WRONGTYPE"):
			kind = RecordCorrupt
		case strings.HasPrefix(text, "INVALID"), strings.HasPrefix(text, "NOPERM"), strings.HasPrefix(text, "NOAUTH"):
			kind = StoreMisused
		case isUnsent(err):
			kind = StoreUnsent
		}
		return nil, &StoreError{kind, name, err}
	}
	parts, ok := value.([]interface{})
	if !ok || len(parts) < 2 {
		return nil, &StoreError{StoreMisused, name, errors.New("the reply is not that of the contract; upgrade the library")}
	}
	return parts, nil
}

// Claim implements Store.
func (s *RedisStore) Claim(ctx context.Context, id RecordID, claim Claim) (ClaimReply, error) {
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
	if err != nil || reply.text(0) == "absent" {
		return nil, err
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
		}
	}
	return &info, nil
}
