"""The protocol as one pure function, for the store in memory: a translation of the function that decides everything.

PostgreSQL and Redis decide in their own functions and scripts. The shared vectors compare all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["in-progress", "unknown", "completed", "awaited", "tombstone", "released"]
MAX_LEASE_MS = 60 * 60 * 1000
MAX_STEPS = 256
MAX_STEPS_BYTES = 1024 * 1024
_COMPLETED = ("completed", "awaited", "tombstone")


@dataclass(slots=True)
class Record:
    """A record of the store in memory, which does not change. Times are milliseconds."""

    fingerprint: bytes
    token: int
    attempts: int
    state: State
    caller: bytes
    operation: str
    key_tag: bytes | None
    created_at: int
    changed_at: int
    expires_at: int
    attempt: bytes = b""
    lease_until: int = 0
    after_abandoned: bool = False
    steps: tuple[tuple[str, bytes], ...] = ()
    by_operator: bool = False
    response: bytes | None = field(default=None, repr=False)

    def name(self, now: int) -> str:
        """The state as operators see it."""
        if self.state == "in-progress" and now >= self.lease_until:
            return "abandoned"
        return "tombstone" if self.state == "awaited" else self.state


_FIELDS: tuple[str, ...] = Record.__slots__


def replace(record: Record, **changes: Any) -> Record:
    """A copy with these changes. That of `dataclasses` takes several times as long."""
    for name in _FIELDS:
        if name not in changes:
            changes[name] = getattr(record, name)
    return Record(**changes)


Outcome = dict[str, Any]
Decision = tuple[Outcome, Record | None]
"""The outcome, and the record to write. None: nothing is written."""


def claim(
    record: Record | None,
    now: int,
    *,
    attempt: bytes,
    fingerprint: bytes,
    lease_ms: int,
    retention_ms: int,
    on_abandoned: str,
    caller: bytes,
    operation: str,
    key_tag: bytes | None,
) -> Decision:
    live = _live(record, now)

    def execute(after_abandoned: bool) -> Decision:
        token = max(0 if record is None else record.token + 1, now)
        lease_until = now + lease_ms
        attempts = (live.attempts if live else 0) + 1
        new = Record(
            fingerprint=fingerprint,
            token=token,
            attempts=attempts,
            state="in-progress",
            attempt=attempt,
            lease_until=lease_until,
            after_abandoned=after_abandoned,
            caller=caller,
            operation=operation,
            key_tag=key_tag,
            created_at=live.created_at if live else now,
            changed_at=now,
            expires_at=lease_until + retention_ms,
            steps=live.steps if live else (),
        )
        return _granted(new), new

    if live is None:
        return execute(after_abandoned=False)
    is_free = live.state == "released" and not live.steps
    if not is_free and live.fingerprint != fingerprint:
        return {"outcome": "mismatch"}, None
    match live.state:
        case "released":
            return execute(after_abandoned=False)
        case "in-progress" if live.attempt == attempt:
            lease_until = now + lease_ms
            same = replace(live, lease_until=lease_until, expires_at=lease_until + retention_ms)
            return _granted(same), same
        case "in-progress" if now < live.lease_until:
            return _in_progress(live, now, lease_ms)
        case "in-progress" if on_abandoned == "park":
            parked = _ended(live, "unknown", now, expires_at=now + retention_ms, by_operator=False)
            return {"outcome": "unknown"}, parked
        case "in-progress":
            return execute(after_abandoned=True)
        case "unknown":
            return {"outcome": "unknown"}, None
        case "completed":
            return {"outcome": "replay", "response": live.response}, None
        case _:
            return {"outcome": "unreplayable"}, None


def _live(record: Record | None, now: int) -> Record | None:
    # A record past its retention is absent. Only its token still counts, so that tokens keep growing.
    return record if record is not None and now < record.expires_at else None


def _granted(record: Record) -> Outcome:
    return {
        "outcome": "execute",
        "token": record.token,
        "attempts": record.attempts,
        "lease_until": record.lease_until,
        "after_abandoned": record.after_abandoned,
    }


def _ended(record: Record, state: State, now: int, *, response: bytes | None = None, **changes: Any) -> Record:
    return replace(
        record,
        state=state,
        attempt=b"",
        lease_until=0,
        after_abandoned=False,
        response=response,
        changed_at=now,
        **changes,
    )


def _in_progress(record: Record, now: int, lease_ms: int) -> Decision:
    lease_left = record.lease_until - now
    bound = max(max(0, record.lease_until - record.changed_at), lease_ms)
    if lease_left <= max(MAX_LEASE_MS, bound):
        return {"outcome": "in-progress", "lease_left_ms": lease_left}, None
    # The clock was set back: the lease is shortened to its length, counted from now.
    shortened = now + bound
    kept = max(0, record.expires_at - record.lease_until)
    new = replace(record, lease_until=shortened, changed_at=now, expires_at=shortened + kept)
    return {"outcome": "in-progress", "lease_left_ms": bound}, new


def renew(record: Record | None, now: int, *, token: int, lease_ms: int, retention_ms: int) -> Decision:
    live = _live(record, now)
    if live is None or live.token != token or live.state != "in-progress":
        return {"outcome": "fenced"}, None
    lease_until = now + lease_ms
    new = replace(live, lease_until=lease_until, expires_at=lease_until + retention_ms)
    return {"outcome": "renewed", "lease_until": lease_until}, new


def step(record: Record | None, now: int, *, token: int, number: int, name: str, result: bytes) -> Decision:
    live = _live(record, now)
    if live is None or live.token != token or live.state != "in-progress":
        return {"outcome": "fenced"}, None
    own = (name, result)
    if number < len(live.steps):
        return {"outcome": "recorded" if live.steps[number] == own else "differs"}, None
    if number > len(live.steps):
        return {"outcome": "differs"}, None
    size = sum(len(other.encode()) + len(value) for other, value in (*live.steps, own))
    if len(live.steps) >= MAX_STEPS or size > MAX_STEPS_BYTES:
        return {"outcome": "full"}, None
    return {"outcome": "recorded"}, replace(live, steps=(*live.steps, own))


def complete(
    record: Record | None, now: int, *, token: int, state: State, response: bytes | None, retention_ms: int
) -> Decision:
    live = _live(record, now)
    if live is None or live.token != token:
        return {"outcome": "fenced"}, None
    may_end = (
        live.state == "in-progress"
        # An unknown outcome became known after all: the owner of the current token reports it.
        or (live.state == "unknown" and state in _COMPLETED)
        # The owner adds the response that its own transaction left out.
        or (live.state == "awaited" and state in ("completed", "tombstone"))
    )
    if not may_end:
        is_same = live.state == state and live.response == (response if state == "completed" else None)
        return {"outcome": "completed" if is_same else "fenced"}, None
    new = _ended(
        live,
        state,
        now,
        expires_at=now + retention_ms,
        # After an unknown outcome, a later attempt may have to continue after the steps.
        steps=live.steps if state == "unknown" else (),
        by_operator=False,
        response=response if state == "completed" else None,
    )
    return {"outcome": "completed"}, new


def release(record: Record | None, now: int, *, token: int, retention_ms: int) -> Decision:
    live = _live(record, now)
    if live is None or live.token != token or live.state in _COMPLETED:
        return {"outcome": "fenced"}, None
    if live.state == "released":
        return {"outcome": "released"}, None
    return {"outcome": "released"}, _released(live, now, retention_ms)


def _released(record: Record, now: int, retention_ms: int) -> Record:
    expires_at = now + retention_ms
    if record.steps:
        expires_at = max(expires_at, record.expires_at)
    return _ended(record, "released", now, expires_at=expires_at, by_operator=False)


def resolve(
    record: Record | None,
    now: int,
    *,
    resolution: str,
    response: bytes | None,
    retention_ms: int,
    force: bool,
    amend: bool,
) -> Decision:
    live = _live(record, now)
    if live is None:
        return {"outcome": "not-resolvable", "state_before": None}, None
    before = live.name(now)
    if not _may_resolve(live, before, resolution, force=force, amend=amend):
        return {"outcome": "not-resolvable", "state_before": before}, None
    match resolution:
        case "complete":
            state: State = "tombstone" if response is None else "completed"
            # The steps stay: this resolution may be taken back.
            new = _ended(live, state, now, expires_at=now + retention_ms, response=response)
        case "release":
            new = _released(live, now, retention_ms)
        case _:
            # A new token that no attempt owns, so that a fenced owner stays fenced.
            new = _ended(
                live,
                "unknown",
                now,
                token=max(live.token + 1, now),
                expires_at=max(now + retention_ms, live.expires_at),
            )
    return {"outcome": "resolved", "state_before": before}, replace(new, by_operator=True)


def _may_resolve(record: Record, before: str, resolution: str, *, force: bool, amend: bool) -> bool:
    is_amendment = amend and record.by_operator
    if resolution == "park":
        return before == "released" or (before in ("completed", "tombstone") and record.by_operator)
    match before:
        case "unknown" | "abandoned":
            return not amend
        case "in-progress":
            return resolution == "release" and force and not amend
        case "completed" | "tombstone":
            return is_amendment
        case "released":
            return resolution == "complete" and (is_amendment or (not amend and bool(record.steps)))
    return False
