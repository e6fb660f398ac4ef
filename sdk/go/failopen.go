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
	return &openRun{engine: e, id: w.id}
}

// openRun is an execution without the store.
type openRun struct {
	engine *Engine
	id     RecordID
}

// end is called when the handler has ended.
func (r *openRun) end() {
	r.engine.mu.Lock()
	defer r.engine.mu.Unlock()
	r.engine.addUnsettled(r.id, -1)
}
