package oncegate

import (
	"context"
	"strings"
	"testing"
	"time"
)

// A number without a unit counts nanoseconds, which nobody means: 2000 is not two seconds.
func TestTimesWithoutAUnit(t *testing.T) {
	newEngine := func(timeout time.Duration) error {
		_, err := NewEngine(NewMemoryStore(), EngineOptions{StoreTimeout: timeout})
		return err
	}
	engine, err := NewEngine(NewMemoryStore(), EngineOptions{Logger: &logged{}})
	if err != nil {
		t.Fatal(err)
	}
	middleware := func(settings Settings) error {
		settings.Scope = oneTenant
		_, err := Middleware(engine, settings)
		return err
	}
	for name, err := range map[string]error{
		"StoreTimeout":   newEngine(2000),
		"Wait":           middleware(Settings{Wait: 2000}),
		"BodyTimeout":    middleware(Settings{BodyTimeout: 60}),
		"WriteTimeout":   middleware(Settings{WriteTimeout: 60}),
		"Lease":          middleware(Settings{Lease: 30}),
		"Retention":      middleware(Settings{Retention: 86400}),
		"Backoff":        (&Client{Backoff: 100}).Check(),
		"MaxBackoff":     (&Client{MaxBackoff: 100}).Check(),
		"AttemptTimeout": (&Client{AttemptTimeout: 100}).Check(),
		"Deadline":       (&Client{Deadline: 100}).Check(),
		"MaxRetryAfter":  (&Client{MaxRetryAfter: 100}).Check(),
	} {
		if err == nil || !strings.Contains(err.Error(), name+" is ") || !strings.Contains(err.Error(), "time.Second") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err = Function[int, int]{Engine: engine, Name: "pay", Wait: 2000}.Do(context.Background(), "a", 1, func(context.Context, *Attempt) (int, error) { return 1, nil })
	if err == nil || !strings.Contains(err.Error(), "Wait is 2\u00b5s") {
		t.Error(err)
	}
	for _, err := range []error{newEngine(0), newEngine(10 * time.Millisecond), middleware(Settings{}), middleware(Settings{Wait: -1, WriteTimeout: -1}),
		middleware(Settings{Wait: time.Millisecond, BodyTimeout: time.Millisecond, WriteTimeout: time.Millisecond}), (&Client{Backoff: time.Millisecond}).Check()} {
		if err != nil {
			t.Error(err)
		}
	}
}
