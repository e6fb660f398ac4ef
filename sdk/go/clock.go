package oncegate

import "time"

// moment is a time by both clocks of the machine. The monotonic one stands still while the machine is suspended, and the wall clock may be
// set. The zero value is no moment.
type moment struct{ monotonic, wall time.Duration }

var processStart = time.Now()

// readClocks is a variable for the tests of this package, which cannot suspend the machine.
var readClocks = func() moment {
	now := time.Now()
	return moment{now.Sub(processStart), time.Duration(now.UnixNano())}
}

// age is the time since a moment by the clock that shows more of it. What a process believes ends by the clock that shows it first: a wall
// clock that is set forward costs one check more.
func (m moment) age() time.Duration {
	now := readClocks()
	monotonic, wall := now.monotonic-m.monotonic, now.wall-m.wall
	if wall > monotonic {
		return wall
	}
	return monotonic
}

func (m moment) isSet() bool { return m != moment{} }
