package oncegate

// This file decides if a request may execute without the store (Settings.FailOpen), beyond the error of the store: never if the record may have an
// owner. A store that was away for a moment is no reason to execute what another attempt executes, or has executed.

// ownerSigns counts what says that a record has an owner or a result: this process began to execute under it, or the store has said so. It is
// there while requests wait for the store.
type ownerSigns struct{ watches, count int }

// noteOwner counts a sign that the record has an owner or a result. The lock of the engine is held.
func (e *Engine) noteOwner(id RecordID) {
	if signs := e.signs[id]; signs != nil {
		signs.count++
	}
}

// ownerWatch notices the owners of a record, from the begin of a request on. Asking only after an error would miss those that have ended since.
type ownerWatch struct {
	engine *Engine
	id     RecordID
	signs  *ownerSigns
	// before is the count when the request came, or -1 if this process owned the record.
	before int
}

func (e *Engine) watchOwner(id RecordID) *ownerWatch {
	e.mu.Lock()
	defer e.mu.Unlock()
	signs := e.signs[id]
	if signs == nil {
		signs = &ownerSigns{}
		e.signs[id] = signs
	}
	signs.watches++
	w := &ownerWatch{e, id, signs, signs.count}
	if e.isOwned(id) {
		w.before = -1
	}
	return w
}

func (w *ownerWatch) end() {
	w.engine.mu.Lock()
	defer w.engine.mu.Unlock()
	if w.signs.watches--; w.signs.watches == 0 {
		delete(w.engine.signs, w.id)
	}
}

// open begins an execution without the store. It returns nil if the record may have an owner or a result.
func (w *ownerWatch) open() *openRun {
	e := w.engine
	e.mu.Lock()
	defer e.mu.Unlock()
	if w.signs.count != w.before || e.isOwned(w.id) {
		return nil
	}
	// Duplicates that come while it runs do not execute beside it.
	e.noteOwner(w.id)
	e.addUnsettled(w.id, 1)
	run := &openRun{engine: e, id: w.id}
	for _, lost := range e.lost[w.id] {
		lost.run = run
	}
	return run
}

// openRun is an execution without the store. A lost claim of its key may turn out to be granted while the handler runs, or later. It must not be
// released then, because a retry would execute again: its lease is renewed while the handler runs, and then the record gets a result without a
// response. This process owns the record until then. While the store is away, retries after the end of the handler execute again, as without a claim.
type openRun struct {
	engine *Engine
	id     RecordID
	// isOver is true when the handler has ended, and state is the result. permits are those of claims that were found granted before.
	isOver  bool
	state   CompletionState
	permits []*permit
}

// end is called when the handler has ended.
func (r *openRun) end(state CompletionState) {
	e := r.engine
	e.mu.Lock()
	r.isOver, r.state = true, state
	permits := r.permits
	e.addUnsettled(r.id, -1)
	e.mu.Unlock()
	for _, p := range permits {
		p := p
		e.spawn(func() { p.complete(state, nil) })
	}
}

// executeOpen runs the handler without the store.
func (k *keyed) executeOpen(run *openRun, body []byte) {
	// Drain waits for it.
	defer k.engine.enter()()
	state := OutcomeUnknown
	defer func() { run.end(state) }()
	if k.protected.pass(k.w, withBody(k.r, k.r.Context(), body), "failed-open") < 500 {
		state = Tombstone
	}
}
