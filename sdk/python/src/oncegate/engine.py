"""Claims, leases and ends of attempts, over any store.

::

    claim ──▶ execute ──▶ renewed every third of the lease ──▶ complete or release
      │                                                          │
      │                                                          └──▶ the store does not answer: tried again in the
      │                                                               background, and the client is told (not-stored)
      ├──▶ in progress: waits for the owner, with a limit
      └──▶ the reply is lost: asked again with the same attempt, and settled in the background
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .errors import ConfigError, OncegateError, RecordCorrupt, ResponseSealed, StoreError, StoreUnavailable
from .identity import downstream_key
from .runtime import Event, Handle, LoopRuntime, Runtime, ThreadRuntime, Work
from .store import Claim, Claimed, EndState, OnAbandoned, Settled, Store, StoredRecord

T = TypeVar("T")
log = logging.getLogger("oncegate")

POLL_FIRST, POLL_LAST = 0.025, 0.5
MAX_WAITERS = 1000
MAX_UNSETTLED = 65_536
MAX_DEFERRED_BYTES = 256 * 1024 * 1024
RETRY_LAST = 5.0
LOCKED_FOR = 0.25
CHECK_EVERY = 2.0
BREAKER_FAILURES, BREAKER_PAUSE = 5, 1.0
# The record that says that a store belongs to an id secret: SHA-256("oncegate-id-secret-1").
SECRET_MARK = bytes.fromhex("3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac")

Ending = Literal["stored", "fenced", "not-stored"]


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of a claim, in seconds."""

    lease: float = 30
    retention: float = 86_400
    wait: float = 2
    on_abandoned: OnAbandoned = "park"
    store_timeout: float = 5

    @property
    def lease_ms(self) -> int:
        return int(self.lease * 1000)

    @property
    def retention_ms(self) -> int:
        return int(self.retention * 1000)


@dataclass(frozen=True, slots=True)
class Reply:
    """The end of a claim that gives no permission to execute."""

    outcome: Literal["replay", "in-progress", "mismatch", "unknown", "unreplayable"]
    response: bytes = field(default=b"", repr=False)
    lease_left: float = 0
    running_for: float = 0


class Attempt:
    """What the code that runs under a key knows about it.

    A resource that remembers the greatest `token` of a `record`, and refuses smaller ones, cannot be written by an attempt that
    was overtaken.
    """

    __slots__ = ("is_after_abandoned", "is_completed", "number", "record", "token")

    def __init__(self, record: bytes, token: int, number: int = 1, *, is_after_abandoned: bool = False) -> None:
        self.record = record
        """The identifier of the record: 32 bytes."""
        self.token = token
        """The fencing token: greater than that of every earlier attempt."""
        self.number = number
        """1 for the first attempt."""
        self.is_after_abandoned = is_after_abandoned
        """True if an earlier attempt was abandoned, so that it may have taken effect."""
        self.is_completed = False
        """True if the code has called :func:`oncegate.complete` for this attempt."""

    def downstream_key(self, name: str = "") -> str:
        """A key for a call of another service: the same in each attempt. Calls of one operation need different names."""
        return downstream_key(self.record, name)

    def __repr__(self) -> str:
        return f"Attempt(record={self.record.hex()}, token={self.token}, number={self.number})"


class Permit:
    """The permission to execute under a lease, which is renewed until the attempt ends."""

    def __init__(self, engine: Engine, claim: Claim, claimed: Claimed, policy: Policy, asked_at: float) -> None:
        self.attempt = Attempt(
            claim.record, claimed.token, claimed.attempts, is_after_abandoned=claimed.after_abandoned
        )
        self.policy = policy
        self.is_fenced = False
        self._engine = engine
        self._lease_until = asked_at + policy.lease
        self._ended = False
        self._timer: Handle | None = None
        self._schedule(policy.lease / 3)

    def _schedule(self, seconds: float) -> None:
        if not self._ended:
            self._timer = self._engine.runtime.later(seconds, self._renew)

    async def _renew(self) -> None:
        if self._ended:
            return
        pause = self.policy.lease / 3
        try:
            if await self._renew_once() == "locked":
                pause = min(pause, 0.25)
        except StoreError as error:
            pause = min(pause, max(0.05, self.policy.lease / 20))
            log.warning("record %s: the lease was not renewed: %s", self.attempt.record.hex(), error)
        if not self.is_fenced:
            self._schedule(pause)

    async def _renew_once(self) -> Settled:
        asked_at = time.monotonic()
        policy, attempt = self.policy, self.attempt
        settled = await self._engine.call(
            lambda: self._engine.store.renew(attempt.record, attempt.token, policy.lease_ms, policy.retention_ms),
            min(policy.store_timeout, max(policy.lease / 3, 0.1)),
        )
        if settled == "renewed":
            self._lease_until = asked_at + policy.lease
        elif settled == "fenced":
            self.is_fenced = True
            if not self._ended:
                log.warning("record %s: another attempt owns the record now", attempt.record.hex())
        return settled

    async def confirm(self) -> bool:
        """True if the lease still runs: this process may have been paused since the claim."""
        if time.monotonic() < self._lease_until - self.policy.lease / 4:
            return True
        try:
            return await self._renew_once() == "renewed"
        except StoreError:
            return False

    def end(self) -> None:
        """Stops the renewals."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()

    async def complete(self, state: EndState, response: bytes | None = None) -> Ending:
        return await self._engine.settle(self, state, response)

    async def release(self) -> Ending:
        return await self._engine.settle(self, None, None)

    async def park(self, reason: str) -> Ending:
        """The outcome is unknown. Under `reexecute` the lease runs out, and the next claim executes again."""
        log.warning("record %s: the outcome is unknown: %s", self.attempt.record.hex(), reason)
        if self.policy.on_abandoned == "park":
            return await self._engine.settle(self, "unknown", None)
        self._engine.leave(self)
        return "stored"


@dataclass(slots=True)
class _Pending:
    permit: Permit
    state: EndState | None
    response: bytes | None
    until: float
    pause: float = 0.1


class Engine:
    """Claims over one store. Programs use it through a middleware, a function or a transaction."""

    def __init__(self, store: Store, runtime: Runtime) -> None:
        self.store, self.runtime = store, runtime
        self.is_immediate = bool(getattr(store, "is_immediate", False))
        if isinstance(runtime, ThreadRuntime) and not store.is_blocking and not self.is_immediate:
            raise ConfigError(
                f"{type(store).__name__} has an asynchronous pool or client, and this code blocks: give it a blocking one, such "
                "as psycopg_pool.ConnectionPool or redis.Redis"
            )
        self._lock = threading.Lock()
        self._running: dict[bytes, float] = {}
        self._waiters: defaultdict[bytes, list[Event]] = defaultdict(list)
        self._waiting = 0
        self._doubts: dict[bytes, tuple[Claim, Policy, float]] = {}
        self._pending: dict[bytes, _Pending] = {}
        self._deferred_bytes = 0
        self._failures, self._open_until = 0, 0.0
        self._checked_at: float | None = None
        self._is_verified = False

    # Calls of the store

    async def call(self, work: Work[T], timeout: float, *, guarded: bool = False) -> T:
        """One call of the store, with a time limit. `guarded` calls are refused while the store does not answer."""
        if guarded:
            self._check_breaker()
        try:
            if self.is_immediate:
                return await work()
            result = await self.runtime.call(work, timeout, in_thread=self.store.is_blocking)
        except (RecordCorrupt, ResponseSealed):
            self._failures = 0
            raise
        except TimeoutError as error:
            self._failed()
            raise StoreUnavailable(f"the store did not answer within {timeout:g} s") from error
        except StoreUnavailable:
            self._failed()
            raise
        self._failures = 0
        return result

    def _check_breaker(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self._failures < BREAKER_FAILURES:
                return
            if now < self._open_until:
                raise StoreUnavailable("the store did not answer lately", is_unsent=True)
            # One call finds out if it answers again.
            self._open_until = now + BREAKER_PAUSE

    def _failed(self) -> None:
        with self._lock:
            self._failures += 1
            if self._failures == BREAKER_FAILURES:
                log.error("the store does not answer: requests with a key are refused until it does")
            if self._failures >= BREAKER_FAILURES:
                self._open_until = time.monotonic() + BREAKER_PAUSE

    async def check(self, policy: Policy) -> None:
        """Checks the store before the first claim, and from time to time that it belongs to no id secret."""
        now = time.monotonic()
        if self._checked_at is not None and now < self._checked_at + CHECK_EVERY:
            return
        if not self._is_verified:
            await self.call(self.store.verify, policy.store_timeout, guarded=True)
            self._is_verified = True
        mark = await self.call(lambda: self.store.lookup(SECRET_MARK), policy.store_timeout, guarded=True)
        if mark is not None:
            raise StoreUnavailable(
                "the store belongs to an id secret, which this library does not support: use another store",
                is_unsent=True,
            )
        self._checked_at = now

    async def lookup(self, record: bytes, policy: Policy) -> StoredRecord | None:
        return await self.call(lambda: self.store.lookup(record), policy.store_timeout, guarded=True)

    # Claims

    async def claim(
        self,
        record: bytes,
        fingerprint: bytes,
        policy: Policy,
        *,
        caller: bytes = bytes(8),
        operation: str = "",
        key_tag: bytes | None = None,
    ) -> Permit | Reply:
        """Asks for permission to execute. Waits for another owner for `policy.wait`. Raises :class:`StoreError`."""
        if len(self._pending) + len(self._doubts) >= MAX_UNSETTLED:
            raise StoreUnavailable("too many earlier attempts have no recorded end yet", is_full=True)
        await self.check(policy)
        await self._settle_earlier(record)
        claim = Claim(
            record,
            secrets.token_bytes(16),
            fingerprint,
            policy.lease_ms,
            policy.retention_ms,
            policy.on_abandoned,
            caller,
            operation,
            key_tag,
        )
        began_at = time.monotonic()
        deadline, pause = began_at + policy.wait, POLL_FIRST
        is_doubtful = False
        while True:
            asked_at = time.monotonic()
            try:
                claimed = await self.call(lambda: self.store.claim(claim), policy.store_timeout, guarded=True)
            except StoreUnavailable as error:
                if is_doubtful or not error.is_unsent:
                    if not is_doubtful and not error.is_unsent and policy.wait > 0:
                        # Once more at once, with the same attempt: the connection may only have ended.
                        is_doubtful = True
                        continue
                    self._doubt(claim, policy)
                raise
            match claimed.outcome:
                case "execute":
                    permit = Permit(self, claim, claimed, policy, asked_at)
                    with self._lock:
                        self._running[record] = began_at
                    return permit
                case "replay":
                    return Reply("replay", claimed.response)
                case "in-progress" | "locked":
                    pass
                case "mismatch" if is_doubtful:
                    self._doubt(claim, policy)
                    raise StoreUnavailable("it is not known if the claim was applied")
                case "mismatch" | "unknown" | "unreplayable":
                    return Reply(claimed.outcome)
            now = time.monotonic()
            left = claimed.lease_left_ms / 1000
            if now >= deadline or self._waiting >= MAX_WAITERS:
                if is_doubtful:
                    self._doubt(claim, policy)
                since = self._running.get(record, began_at)
                return Reply("in-progress", lease_left=left, running_for=now - since)
            await self._wait(record, min(pause, deadline - now, max(left, POLL_FIRST)))
            pause = min(pause * 2, POLL_LAST)

    async def _wait(self, record: bytes, seconds: float) -> None:
        """Waits until an attempt of this process ends, or for this time."""
        event = self.runtime.event()
        with self._lock:
            self._waiting += 1
            self._waiters[record].append(event)
        try:
            await event.wait(seconds)
        finally:
            with self._lock:
                self._waiting -= 1
                waiters = self._waiters[record]
                if event in waiters:
                    waiters.remove(event)
                if not waiters:
                    del self._waiters[record]

    def leave(self, permit: Permit) -> None:
        """Ends an attempt of this process without a word to the store."""
        permit.end()
        with self._lock:
            self._running.pop(permit.attempt.record, None)
            waiters = list(self._waiters.get(permit.attempt.record, ()))
        for waiter in waiters:
            waiter.set()

    def _doubt(self, claim: Claim, policy: Policy) -> None:
        """Notes a claim whose reply was lost. It may become visible later, and nothing executes under it."""
        with self._lock:
            is_new = claim.record not in self._doubts
            self._doubts[claim.record] = (claim, policy, time.monotonic() + policy.retention)
        if is_new:
            self._doubt_later(claim.record, 0.1)

    def _doubt_later(self, record: bytes, pause: float) -> None:
        async def again() -> None:
            if not await self._settle_doubt(record):
                self._doubt_later(record, min(pause * 2, 30.0))

        self.runtime.later(pause, again)

    async def _settle_doubt(self, record: bytes) -> bool:
        doubt = self._doubts.get(record)
        if doubt is None:
            return True
        claim, policy, until = doubt
        try:
            claimed = await self.call(lambda: self.store.claim(claim), policy.store_timeout)
            if claimed.outcome == "execute":
                settled = await self.call(
                    lambda: self.store.release(record, claimed.token, policy.retention_ms), policy.store_timeout
                )
                if settled == "locked":
                    return False
            elif claimed.outcome in ("in-progress", "locked", "mismatch") and time.monotonic() < until:
                return False
        except StoreError:
            if time.monotonic() < until:
                return False
        with self._lock:
            if self._doubts.get(record) is doubt:
                del self._doubts[record]
        return True

    async def _settle_earlier(self, record: bytes) -> None:
        """Settles what this process left open about a record, before it claims it under a new attempt."""
        if record in self._doubts and not await self._settle_doubt(record):
            raise StoreUnavailable("it is not known if an earlier claim of this record was applied", is_unsent=True)
        pending = self._pending.get(record)
        if pending is not None and not await self._settle_pending(pending):
            raise StoreUnavailable("the end of an earlier attempt is not stored yet", is_unsent=True)

    # Ends

    async def _end(self, permit: Permit, state: EndState | None, response: bytes | None) -> Settled:
        record, token, policy = permit.attempt.record, permit.attempt.token, permit.policy
        if state is None:
            return await self.call(lambda: self.store.release(record, token, policy.retention_ms), policy.store_timeout)
        return await self.call(
            lambda: self.store.complete(record, token, state, response, policy.retention_ms), policy.store_timeout
        )

    async def settle(self, permit: Permit, state: EndState | None, response: bytes | None) -> Ending:
        """Stores the end of an attempt: a state, or a release. What the store does not take is tried again later."""
        if state is None and permit.attempt.is_after_abandoned:
            # The effect of the abandoned attempt is not known, and the next attempt must know that it is not the first.
            self.leave(permit)
            return "stored"
        locked_until, pause, failures = time.monotonic() + LOCKED_FOR, 0.01, 0
        try:
            while True:
                try:
                    settled = await self._end(permit, state, response)
                except StoreError as error:
                    failures += 1
                    if failures < 2 and self._failures < BREAKER_FAILURES:
                        continue
                    log.warning("record %s: the store did not take its end: %s", permit.attempt.record.hex(), error)
                    return self._defer(permit, state, response)
                if settled == "fenced":
                    permit.is_fenced = True
                    return "fenced"
                if settled != "locked":
                    return "stored"
                if time.monotonic() >= locked_until:
                    return self._defer(permit, state, response)
                await self.runtime.sleep(pause)
                pause = min(pause * 2, 0.1)
        finally:
            if permit.attempt.record not in self._pending:
                self.leave(permit)

    def _defer(self, permit: Permit, state: EndState | None, response: bytes | None) -> Ending:
        size = len(response or b"")
        with self._lock:
            if self._deferred_bytes + size > MAX_DEFERRED_BYTES:
                state, response, size = "tombstone", None, 0
            self._deferred_bytes += size
            pending = _Pending(permit, state, response, time.monotonic() + permit.policy.retention)
            self._pending[permit.attempt.record] = pending
        self._pending_later(pending)
        return "not-stored"

    def _pending_later(self, pending: _Pending) -> None:
        async def again() -> None:
            if not await self._settle_pending(pending):
                pending.pause = min(pending.pause * 2, RETRY_LAST)
                self._pending_later(pending)

        self.runtime.later(pending.pause, again)

    async def _settle_pending(self, pending: _Pending) -> bool:
        record = pending.permit.attempt.record
        if self._pending.get(record) is not pending:
            return True
        try:
            settled = await self._end(pending.permit, pending.state, pending.response)
            if settled == "locked":
                return False
            log.info("record %s: the store took its end after all: %s", record.hex(), settled)
        except StoreError:
            if time.monotonic() < pending.until:
                return False
            log.exception("record %s: the store never took its end", record.hex())
        with self._lock:
            if self._pending.get(record) is pending:
                del self._pending[record]
                self._deferred_bytes -= len(pending.response or b"")
        self.leave(pending.permit)
        return True

    async def drain(self, timeout: float) -> bool:
        """Waits until no attempt of this process runs and every end is stored. False if that takes longer."""
        deadline = time.monotonic() + timeout
        while self._running or self._pending:
            if time.monotonic() >= deadline:
                return False
            await self.runtime.sleep(0.02)
        return True


_LOOP, _THREADS = LoopRuntime(), ThreadRuntime()
_ENGINES: weakref.WeakKeyDictionary[Any, dict[str, Engine]] = weakref.WeakKeyDictionary()
_ENGINES_LOCK = threading.Lock()


def engine_of(store: Any, *, blocking: bool) -> Engine:
    """The engine of a store in this process: all middlewares and functions on one store share it."""
    if not (hasattr(store, "claim") and hasattr(store, "is_blocking")):
        raise ConfigError(
            f"{type(store).__name__} is not a store: use MemoryStore(), PostgresStore(pool) or RedisStore(client)"
        )
    with _ENGINES_LOCK:
        engines = _ENGINES.setdefault(store, {})
        kind = "threads" if blocking else "loop"
        if kind not in engines:
            engines[kind] = Engine(store, _THREADS if blocking else _LOOP)
        return engines[kind]


__all__ = ["Attempt", "Engine", "OncegateError", "Permit", "Policy", "Reply", "engine_of"]
