package oncegate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log"
	"reflect"
	"runtime/debug"
	"time"
)

// ErrorFate is what an error of a function means for its key.
type ErrorFate int

const (
	// FateUnknown: the outcome is unknown. The default, because an error says that a function failed, and not that nothing happened.
	FateUnknown ErrorFate = iota
	// FateStore: later calls get the same error, as a *StoredError.
	FateStore
	// FateRelease: nothing took effect, and the key is free again.
	FateRelease
)

// Function is a function whose effect takes place once for each key.
//
//	charge := oncegate.Function[Order, Receipt]{Engine: engine, Name: "charge"}
//	receipt, err := charge.Do(ctx, order.ID, order, func(ctx context.Context, attempt *oncegate.Attempt) (Receipt, error) { … })
//
// The zero values of the optional fields are the defaults.
type Function[Input, Result any] struct {
	// Engine and Name are required. The name is a part of the record: a renamed function has new keys.
	Engine *Engine
	Name   string
	// CallerKind and Caller make keys unique within a caller, such as "customer" and its number.
	CallerKind, Caller string
	// Errors says what an error means for the key.
	Errors func(error) ErrorFate
	// Include and Exclude are JSON pointers to the parts of the input that are compared, or not.
	Include, Exclude []string
	// MaxResultBytes is the largest JSON of a result: 1 MiB by default. A larger one is not stored.
	MaxResultBytes int
	// As in Settings.
	Lease, Retention, Wait time.Duration
	OnAbandoned            OnAbandoned
}

// The reasons why a function was not executed, or has no result. Compare with errors.Is.
var (
	// ErrInProgress: another call with the key is running. Call again later, with the same key.
	ErrInProgress = errors.New("oncegate: a call with this key is in progress; call again later with the same key")
	// ErrKeyReused: the key was used with another input.
	ErrKeyReused = errors.New("oncegate: the key was used with another input; another operation needs another key")
	// ErrOutcomeUnknown: it is not known if an earlier call took effect. Find out before you use a new key.
	ErrOutcomeUnknown = errors.New("oncegate: it is not known if an earlier call with this key took effect; find out before you call with another key. " +
		"An operator settles it by `oncegate keys resolve`, with a sidecar on the store")
	// ErrUnreplayable: an earlier call took effect, and its result was not stored.
	ErrUnreplayable = errors.New("oncegate: an earlier call with this key took effect, and its result cannot be given again")
	// ErrRolledBack: the transaction in which the function completed its record was rolled back. Nothing took effect, and the key is free.
	ErrRolledBack = errors.New("oncegate: the transaction of the function was rolled back, so nothing took effect; call again with the same key")
	// ErrInvalidKey: the key is empty or too long, or only one of Caller and CallerKind is set.
	ErrInvalidKey = errors.New("oncegate: the key or the caller is invalid")
)

func checkKey(key, callerKind, caller string) error {
	switch {
	case key == "" || len(key) > maxKeyBytes:
		return fmt.Errorf("%w: the key must have 1 to %d bytes, and has %d", ErrInvalidKey, maxKeyBytes, len(key))
	case callerKind == "" && caller != "":
		return fmt.Errorf("%w: Caller is set and CallerKind is empty; write what the caller is, such as \"customer\"", ErrInvalidKey)
	case callerKind != "" && caller == "":
		return fmt.Errorf("%w: CallerKind is %q and Caller is empty; an empty caller would share keys with others", ErrInvalidKey, callerKind)
	}
	return nil
}

// StoredError is the error of the first call with the key.
type StoredError struct{ Message string }

func (e *StoredError) Error() string { return e.Message }

// PanicError is the error after a panic of the function, of Errors, or of a method of its result or error. Its outcome is unknown.
type PanicError struct{ Value interface{} }

func (e *PanicError) Error() string {
	return "oncegate: the function panicked; it is not known if it took effect"
}

// UndecodableError is the error of a stored result that does not fit the type. Nothing was executed.
type UndecodableError struct {
	Function string
	Err      error
}

func (e *UndecodableError) Error() string {
	return fmt.Sprintf("oncegate: the stored result of %s does not fit its type; add fields only, and give them defaults: %v", e.Function, e.Err)
}

// Unwrap returns the error of encoding/json.
func (e *UndecodableError) Unwrap() error { return e.Err }

// Do runs a function once for a key, with the defaults: Function.Do of a function with this name.
func Do[Input, Result any](ctx context.Context, engine *Engine, name, key string, input Input,
	run func(context.Context, *Attempt) (Result, error)) (Result, error) {
	return Function[Input, Result]{Engine: engine, Name: name}.Do(ctx, key, input, run)
}

// Do runs the function, unless the key was used before: then it returns the result of the first call. The function runs in a goroutine of
// its own, and ctx ends only the waiting: a function that has begun runs to its end, and its result is stored. Its context has the values
// of ctx. Engine.Drain waits for it.
func (f Function[Input, Result]) Do(ctx context.Context, key string, input Input, run func(context.Context, *Attempt) (Result, error)) (Result, error) {
	var none Result
	if f.Engine == nil || f.Name == "" {
		return none, errors.New("oncegate: a function needs an Engine and a Name")
	}
	if err := checkKey(key, f.CallerKind, f.Caller); err != nil {
		return none, err
	}
	policy := policy{f.Lease, f.Retention, f.Wait, f.OnAbandoned}
	if err := policy.check(); err != nil {
		return none, err
	}
	if err := checkVisible[Input]("input", f.Name); err != nil {
		return none, err
	}
	if err := checkVisibleType(reflect.TypeOf(input), "input", f.Name); err != nil {
		return none, err
	}
	if err := checkVisible[Result]("result", f.Name); err != nil {
		return none, err
	}
	fingerprint, err := f.fingerprint(input)
	if err != nil {
		return none, err
	}
	if err := ctx.Err(); err != nil {
		return none, err
	}
	var caller []identity
	if f.Caller != "" {
		caller = []identity{{f.CallerKind, f.Caller}}
	}
	defer f.Engine.enter()()
	secret := f.Engine.secret
	scope, tag := f.Engine.scopeOf(caller), secret.keyTag(key)
	id := secret.record(scope.record([]string{"function:", f.Name}, key))
	claimed, err := f.Engine.claim(ctx, id, Claim{Fingerprint: secret.fingerprint(fingerprint), CallerTag: secret.callerTag(scope), KeyTag: &tag,
		Operation: cutOperation(f.Name)}, policy)
	if err != nil {
		return none, err
	}
	switch claimed.Outcome {
	case Execute:
	case Replay:
		return f.replay(claimed.Response)
	case InProgress:
		if err := ctx.Err(); err != nil {
			return none, err
		}
		return none, ErrInProgress
	case Mismatch:
		return none, ErrKeyReused
	case Unknown:
		return none, ErrOutcomeUnknown
	default:
		return none, ErrUnreplayable
	}
	done := make(chan functionEnd[Result], 1)
	f.Engine.spawn(func() {
		end := functionEnd[Result]{err: &PanicError{}}
		// The function may end its goroutine.
		defer func() { done <- end }()
		end.result, end.err = f.execute(ctx, claimed.permit, run)
	})
	select {
	case end := <-done:
		return end.result, end.err
	case <-ctx.Done():
		select {
		case end := <-done:
			return end.result, end.err
		default:
			return none, ctx.Err()
		}
	}
}

type functionEnd[Result any] struct {
	result Result
	err    error
}

func (f Function[Input, Result]) fingerprint(input Input) (Fingerprint, error) {
	body, err := json.Marshal(input)
	if err != nil {
		return Fingerprint{}, fmt.Errorf("oncegate: the input of %s cannot be compared: %w", f.Name, err)
	}
	var rules fingerprintRules
	if rules.include, err = parsePointers(f.Include); err != nil {
		return Fingerprint{}, err
	}
	if rules.exclude, err = parsePointers(f.Exclude); err != nil {
		return Fingerprint{}, err
	}
	plain := rules.fingerprint(fingerprintInput{contentType: "application/json", body: body})
	return fingerprintOfParts("oncegate-function-1", plain[1:]), nil
}

func (f Function[Input, Result]) execute(ctx context.Context, p *permit, run func(context.Context, *Attempt) (Result, error)) (result Result, err error) {
	if confirmErr := p.confirm(); confirmErr != nil {
		p.release()
		if confirmErr == errFenced {
			return result, ErrInProgress
		}
		return result, confirmErr
	}
	// settled is what is known so far: panics of the function, and of the methods of its values, must not end the program.
	isSettled := false
	stage := "the function"
	defer func() {
		if isSettled {
			return
		}
		value := recover()
		if value != nil {
			log.Printf("oncegate: panic of %s of %s, record %s: %v\n%s", stage, f.Name, p.id, value, debug.Stack())
		}
		err = &PanicError{value}
		f.endUnknown(p)
	}()
	own := withAttempt(ctx, p)
	result, err = run(own, &own.attempt)
	if err == nil {
		stage = "MarshalJSON of the result"
		body, encodeErr := json.Marshal(result)
		if encodeErr != nil {
			f.Engine.log.Printf("oncegate: the result of %s, record %s, cannot be stored: %v", f.Name, p.id, encodeErr)
		}
		isSettled = true
		switch f.store(p, 200, body) {
		case settleFenced:
			return f.ofRecord(p)
		case settleRolledBack:
			var none Result
			return none, ErrRolledBack
		case settleLeft:
			// Its transaction is still open.
			var none Result
			return none, ErrInProgress
		}
		return result, nil
	}
	fate := FateUnknown
	if f.Errors != nil {
		stage = "Errors"
		fate = f.Errors(err)
	}
	var body []byte
	if fate == FateStore {
		stage = "Error() of the error"
		body, _ = json.Marshal(err.Error())
	}
	isSettled = true
	switch fate {
	case FateStore:
		if f.store(p, 500, body) == settleFenced {
			return f.ofRecord(p)
		}
	case FateRelease:
		p.release()
	default:
		f.endUnknown(p)
	}
	return result, err
}

// endUnknown leaves the record to its lease under Reexecute, so that the function runs again after it.
func (f Function[Input, Result]) endUnknown(p *permit) {
	if p.policy.onAbandoned == Reexecute && !p.isInTransaction() {
		p.leave()
	} else {
		p.fail()
	}
}

func (f Function[Input, Result]) store(p *permit, status int, body []byte) settleOutcome {
	max := f.MaxResultBytes
	if max == 0 {
		max = 1 << 20
	}
	response := StoredResponse{Status: status, Headers: []Field{{"content-type", "application/json"}}, Body: body}
	encoded, err := response.Encode()
	if body == nil || len(body) > max || err != nil {
		return p.complete(Tombstone, nil)
	}
	return p.complete(Completed, encoded)
}

// ofRecord is the result of an attempt that was overtaken: that of the record, which all other callers get. If there is none, the outcome is
// unknown.
func (f Function[Input, Result]) ofRecord(p *permit) (result Result, _ error) {
	f.Engine.log.Printf("oncegate: another attempt has taken over record %s of %s while its function ran; there may be a second effect", p.id, f.Name)
	reader, ok := f.Engine.store.(recordReader)
	if !ok {
		return result, ErrOutcomeUnknown
	}
	encoded, err := ask(context.Background(), f.Engine, "lookup", func(ctx context.Context) ([]byte, error) {
		info, response, err := reader.read(ctx, p.id)
		switch {
		case err != nil || info == nil:
			return nil, err
		case info.State == string(stateTombstone) || info.State == string(stateAwaited):
			return nil, ErrUnreplayable
		case info.State != string(stateCompleted):
			response = nil
		}
		return response, nil
	})
	if err == ErrUnreplayable {
		return result, err
	}
	if err != nil || encoded == nil {
		return result, ErrOutcomeUnknown
	}
	return f.replay(encoded)
}

func (f Function[Input, Result]) replay(encoded []byte) (result Result, _ error) {
	stored, err := DecodeResponse(encoded)
	if err != nil {
		return result, &StoreError{RecordCorrupt, "claim", err}
	}
	return decodeResult[Result](f.Name, stored)
}

func decodeResult[Result any](name string, stored *StoredResponse) (result Result, _ error) {
	if stored.isSealed() {
		return result, &StoreError{ResponseSealed, "claim", errNoSealKeys}
	}
	body := stored.Body
	if len(body) == 0 {
		body = []byte("null")
	}
	if stored.Status < 200 || stored.Status > 299 {
		var message string
		if err := json.Unmarshal(body, &message); err != nil {
			// Another language stores its errors as values.
			message = string(body)
		}
		return result, &StoredError{message}
	}
	if err := json.Unmarshal(body, &result); err != nil {
		return result, &UndecodableError{name, err}
	}
	return result, nil
}
