package oncegate

import (
	"crypto/rand"
	"encoding/binary"
	mathrand "math/rand"
	"sync"
	"time"
)

// jitterSource has a seed of its own: before Go 1.20, the source of math/rand gives every process the same numbers.
var jitterSource = mathrand.New(mathrand.NewSource(jitterSeed()))

var jitterLock sync.Mutex

func jitterSeed() int64 {
	seed := make([]byte, 8)
	if _, err := rand.Read(seed); err != nil {
		return time.Now().UnixNano()
	}
	return int64(binary.BigEndian.Uint64(seed))
}

// jitter is a random pause that is shorter than this one.
func jitter(pause time.Duration) time.Duration {
	if pause <= 0 {
		return 0
	}
	jitterLock.Lock()
	defer jitterLock.Unlock()
	return time.Duration(jitterSource.Int63n(int64(pause)))
}
