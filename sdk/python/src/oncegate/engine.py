"""Claims, leases and ends of attempts, over any store.

::

    claim ──▶ execute ──▶ renewed every third of the lease ──▶ complete or release
      │                                                          │
      │                                                          └──▶ the store does not answer: tried again in the
      │                                                               background, and the client is told (not-stored)
      ├──▶ in progress: waits for the owner, with a limit
      └──▶ the reply is lost: asked again with the same attempt, settled in the background, and watched for, because the first
           message may arrive after that
"""

from __future__ import annotations

import atexit
import functools
import logging
import multiprocessing
import os
import random
import secrets
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from .clocks import Moment
from .errors import (
    ConfigError,
    OncegateError,
    RecordCorrupt,
    ResponseSealed,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from .identity import downstream_key
from .ids import MARK, IdGuard, Ids
from .runtime import (
    MAX_LAG,
    Call,
    Event,
    Handle,
    LoopRuntime,
    NoThread,
    Runtime,
    ThreadRuntime,
    TimeLimit,
    Work,
    is_used_up,
    run_blocking,
)
from .store import PURGE_ROWS, Claim, Claimed, EndState, OnAbandoned, Settled, Store, StoredRecord

T = TypeVar("T")
log = logging.getLogger("oncegate")

POLL_FIRST, POLL_LAST = 0.025, 0.5
MAX_WAITERS = 1000
MAX_UNSETTLED = 65_536
MAX_DEFERRED_BYTES = 256 * 1024 * 1024
RETRY_LAST = 5.0
SETTLED_AT_ONCE = 16
# The time for which calls are sent again because their connections broke, and the pauses between them, in seconds.
AGAIN_FOR, AGAIN_FIRST, AGAIN_LAST = 0.25, 0.01, 0.04
# Claims that were sent again and released: their first messages may still be on their way, such as in the buffer of a server that
# stands still. They are watched for at growing pauses, in seconds. Beyond the limit, a claim is left to its lease.
LATE_FOR, LATE_FIRST, LATE_LAST = 300.0, 0.1, 10.0
MAX_LATE = 1000
LOCKED_FOR = 0.25
# The age of the last look for the mark from which a claim looks again first, and from which nothing executes without another
# look. The latter is less than the 6 s for which a process with an id secret waits before it uses a new store.
LOOK_AGAIN, LOOK_COUNTS = 2.0, 4.0
BREAKER_FAILURES, BREAKER_PAUSE = 5, 1.0
# A store has as many parts as its cluster has nodes.
MAX_PARTS = 2000
# A process with a store in PostgreSQL removes records whose retention is over, as a sidecar does. In seconds.
PURGE_EVERY, PURGE_TIMEOUT = 10.0, 30.0
# The time for which a refusal by the mark is repeated without another look.
REFUSED_FOR = 1.0

Ending = Literal["stored", "fenced", "not-stored"]
# The end of a claim whose reply was lost. "elsewhere": the store has answered that another attempt has the record, so that the
# claim may only be granted later. "refused": it has answered with an error. After both, a new claim gets its own answer.
_DoubtEnd = Literal["settled", "elsewhere", "refused", "unanswered", "broken"]


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

    @property
    def released_ms(self) -> int:
        """The time that a released record is kept, for its token only."""
        return max(1000, min(4 * self.lease_ms, self.retention_ms))


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

    __slots__ = (
        "is_after_abandoned",
        "is_completed",
        "is_in_savepoint",
        "is_open",
        "number",
        "record",
        "seal_keys",
        "stored_headers",
        "token",
    )

    def __init__(self, record: bytes, token: int, number: int = 1, *, is_after_abandoned: bool = False) -> None:
        self.record = record
        """The identifier of the record: 32 bytes."""
        self.token = token
        """The fencing token: greater than that of every earlier attempt."""
        self.number = number
        """1 for the first attempt."""
        self.is_after_abandoned = is_after_abandoned
        """True if an earlier attempt was abandoned, so that it may have taken effect."""
        self.seal_keys: Any = None
        """The keys with which :func:`oncegate.complete` seals a response: those of the store of the middleware."""
        self.stored_headers: frozenset[str] = frozenset()
        """The further header fields that the middleware keeps."""
        self.is_completed = False
        """True if the code has called :func:`oncegate.complete` for this attempt."""
        self.is_in_savepoint = False
        """True if that call was in a savepoint, as far as its driver shows it."""
        self.is_open: Callable[[], bool] = bool
        """True if the connection of that call has a transaction, as far as its driver shows it."""

    def downstream_key(self, name: str = "") -> str:
        """A key for a call of another service: the same in each attempt. Calls of one operation need different names."""
        return downstream_key(self.record, name)

    def __repr__(self) -> str:
        return f"Attempt(record={self.record.hex()}, token={self.token}, number={self.number})"


class Permit:
    """The permission to execute under a lease, which is renewed until the attempt ends."""

    __slots__ = (
        "_ended",
        "_engine",
        "_has_end",
        "_leased_at",
        "_timer",
        "attempt",
        "began_at",
        "is_fenced",
        "is_released",
        "lost_claim",
        "policy",
    )

    def __init__(self, engine: Engine, claim: Claim, claimed: Claimed, policy: Policy, asked_at: Moment) -> None:
        self.attempt = Attempt(
            claim.record, claimed.token, claimed.attempts, is_after_abandoned=claimed.after_abandoned
        )
        self.attempt.seal_keys = getattr(engine.store, "seal_keys", None)
        self.policy = policy
        self.began_at = 0.0
        self.is_fenced = False
        self.is_released = False
        """True if the store has released the record."""
        self.lost_claim: Claim | None = None
        """The claim, if it was sent several times. An earlier one may arrive after the release."""
        self._engine = engine
        self._leased_at = asked_at
        self._ended = False
        self._has_end = False
        self._timer: Handle | None = None
        self._schedule(policy.lease / 3)

    def _schedule(self, seconds: float) -> None:
        if not self._ended:
            self._timer = self._engine.runtime.later(seconds, self._renew)

    async def _renew(self) -> None:
        if self._ended:
            return
        pause = min(self.policy.lease / 3, max(0.05, self.policy.lease / 20))
        try:
            renewed = await self._renew_once()
            pause = min(self.policy.lease / 3, 0.25 if renewed == "locked" else self.policy.lease)
        except StoreError as error:
            log.warning("record %s: the lease was not renewed: %s", self.attempt.record.hex(), error)
        finally:
            if not self.is_fenced:
                self._schedule(pause)

    async def _renew_once(self) -> Settled:
        asked_at = Moment.now()
        policy, attempt = self.policy, self.attempt
        settled = await self._engine.call(
            attempt.record,
            lambda: self._engine.store.renew(attempt.record, attempt.token, policy.lease_ms, policy.retention_ms),
            policy.store_timeout,
            at_most=max(policy.lease / 3, 0.1),
        )
        if settled == "renewed":
            self._leased_at = asked_at
        elif settled == "fenced":
            self.is_fenced = True
            # Its own completion ends the lease, too.
            if not (self._ended or attempt.is_completed):
                log.warning("record %s: another attempt owns the record now", attempt.record.hex())
        return settled

    async def confirm(self) -> bool:
        """True if the lease still runs: this process may have been paused since the claim."""
        if self._leased_at.age() < self.policy.lease * 3 / 4:
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

    def take_end(self) -> bool:
        """False if the attempt has an end already, which may still be on its way to the store. There is no second one."""
        is_first, self._has_end = not self._has_end, True
        return is_first

    async def complete(self, state: EndState, response: bytes | None = None) -> Ending:
        return await self._engine.settle(self, state, response) if self.take_end() else "not-stored"

    async def release(self) -> Ending:
        return await self._engine.settle(self, None, None) if self.take_end() else "not-stored"

    async def lookup(self) -> StoredRecord | None:
        return await self._engine.lookup(self.attempt.record, self.policy)

    async def park(self, reason: str) -> Ending:
        """The outcome is unknown. Under `reexecute` the lease runs out, and the next claim executes again."""
        log.warning("record %s: the outcome is unknown: %s", self.attempt.record.hex(), reason)
        if self.policy.on_abandoned == "park":
            return await self.complete("unknown")
        if not self.take_end():
            return "not-stored"
        self._engine.leave(self)
        return "stored"


class _Asker:
    """A request that asks for permission to execute."""

    __slots__ = ("has_owner",)

    def __init__(self) -> None:
        self.has_owner = False
        """True if another attempt is known to own the record, or to have owned it since the request came. Then nothing executes
        without protection."""


class _Late(StoreUnavailable):
    """The store took the whole time that a call may take. A client has waited long enough for it."""


@dataclass(slots=True)
class _Breaker:
    """Refuses calls while a part of the store does not answer."""

    part: str
    failures: int = 0
    open_until: float = 0.0
    # When it answered last, with a value or an error.
    answered_at: float = 0.0
    # True if the last failure was that of a server that was reached.
    is_reached: bool = False


@dataclass(slots=True)
class _LateClaim:
    """A claim under which nothing executes, and which was released."""

    claim: Claim
    policy: Policy
    until: float
    pause: float
    look_at: float


@dataclass(slots=True)
class _Pending:
    permit: Permit
    state: EndState | None
    response: bytes | None
    until: float
    pause: float = 0.1
    # The handler has completed the record in its own transaction, or was about to: the record says what is to be written.
    is_by_record: bool = False


def _left(last_until: float | None) -> float:
    """The time for a call that ends at `last_until` at the latest."""
    return float("inf") if last_until is None else max(0.01, last_until - time.monotonic())


class Engine:
    """Claims over one store. Programs use it through a middleware, a function or a transaction."""

    def __init__(self, store: Store, runtime: Runtime, ids: Ids) -> None:
        self.store, self.runtime = store, runtime
        self.is_immediate = bool(getattr(store, "is_immediate", False))
        self._is_prompt = bool(getattr(store, "is_prompt", False))
        if isinstance(runtime, ThreadRuntime) and not store.is_blocking and not self.is_immediate:
            raise ConfigError(
                f"{type(store).__name__} has an asynchronous pool or client, and this code blocks: give it a blocking one, such "
                "as psycopg_pool.ConnectionPool or redis.Redis"
            )
        self._lock = threading.Lock()
        self._running: dict[bytes, Permit] = {}
        # The process of those: a program may make its middleware, and then fork workers.
        self._process = os.getpid()
        self._waiters: defaultdict[bytes, list[Event]] = defaultdict(list)
        self._waiting = 0
        # Claims under way, and duplicates that wait: what they are for may still begin.
        self._claiming = 0
        self._askers: dict[bytes, list[_Asker]] = {}
        # Claims whose replies were lost: several about one record, if duplicates lose theirs at the same time.
        self._doubts: dict[bytes, list[tuple[Claim, Policy, float]]] = {}
        self._number_of_doubts = 0
        self._late: dict[bytes, list[_LateClaim]] = {}
        self._number_of_late = 0
        # When the next look for them is due. Timers end with their event loop or process, so that it may never come.
        self._look_for_late_at = 0.0
        self._pending: dict[bytes, _Pending] = {}
        self._deferred_bytes = 0
        self._part_of: Callable[[bytes], str] = getattr(store, "part_of", lambda _: "")
        self._breakers: dict[str, _Breaker] = {}
        self._is_verified = False
        self._purge: Work[int] | None = getattr(store, "purge", None)
        # When a claim begins to purge, unless a purge has done so by then: timers end with their event loop or process.
        self._purge_at = 0.0
        self._drains_at_exit = False
        self._guard = IdGuard(ids)
        # When the last look for the mark began that was a success, when the last one ended that got no reply, and when the last
        # one began that was a refusal.
        self._looked_at: Moment | None = None
        self._look_failed_at: Moment | None = None
        self._refused: tuple[Moment, str] | None = None
        self._is_looking = False

    # Calls of the store

    async def call(
        self,
        record: bytes,
        work: Work[T],
        timeout: float,
        *,
        at_most: float = float("inf"),
        guarded: bool = False,
        again: bool = False,
    ) -> T:
        """One call of the store about a record, with the time limit of the store, or a shorter one (`at_most`).

        `guarded` calls are refused while the part of the store that has the record does not answer. Calls `again` are sent again
        while their connections break, as a pool may have several that are of no use any more.

        Time that has run out says that the store is away if it was that of the store, no part of it was lost in this process, and
        the store has not answered anything else meanwhile.
        """
        breaker = self._breaker_of(record)
        if guarded:
            self._check_breaker(breaker)
        limit, began_at = min(timeout, at_most), time.monotonic()
        own = Call(limit)
        try:
            if self.is_immediate:
                return await work()
            try:
                result = await self._send(work, limit, own)
            except StoreUnavailable as error:
                if not (again and error.is_broken):
                    raise
                result = await self._send_again(work, limit, own, error)
        except (RecordCorrupt, ResponseSealed, StoreRefused):
            self._answered(breaker)
            raise
        except NoThread as error:
            raise StoreUnavailable(str(error), is_unsent=True, is_reached=True) from error
        except TimeoutError as error:
            is_away = limit >= timeout and self._is_silent(breaker, began_at, own)
            if limit >= timeout and not own.is_own_delay:
                self._failed(breaker, is_reached=not is_away)
            raise _Late(f"the store did not answer within {limit:g} s", is_reached=not is_away) from error
        except StoreUnavailable as error:
            if error.timed_out:
                is_whole = error.timed_out == "connect" or time.monotonic() - began_at > timeout - MAX_LAG
                error.is_reached = not (is_whole and self._is_silent(breaker, began_at, own))
                if not own.is_own_delay:
                    self._failed(breaker, is_reached=error.is_reached)
            elif error.is_reached and not error.is_broken:
                self._answered(breaker)
            else:
                self._failed(breaker, is_reached=error.is_broken)
            raise
        self._answered(breaker)
        return result

    def _answered(self, breaker: _Breaker) -> None:
        breaker.failures, breaker.answered_at = 0, time.monotonic()

    def _is_silent(self, breaker: _Breaker, began_at: float, own: Call) -> bool:
        """True if a call has run out of time because its part of the store is away."""
        return not own.is_own_delay and breaker.answered_at < began_at and not is_used_up()

    async def _send(self, work: Work[T], timeout: float, own: Call) -> T:
        if self._is_prompt:
            with TimeLimit(timeout, own):
                return await work()
        return await self.runtime.call(work, timeout, in_thread=self.store.is_blocking, call=own)

    async def _send_again(self, work: Work[T], timeout: float, own: Call, error: StoreUnavailable) -> T:
        """Sends a call again whose connection broke, for a short time: an own limit, because a client waits for each of them."""
        now, pause = time.monotonic(), AGAIN_FIRST
        deadline, last_at = now + timeout, now + min(timeout, AGAIN_FOR)
        while (now := time.monotonic()) + pause < last_at:
            left = deadline - now - pause
            await self.runtime.sleep(pause)
            pause = min(pause * 2, AGAIN_LAST)
            try:
                return await self._send(work, left, own)
            except NoThread:
                break
            except TimeoutError:
                if left < timeout / 2:
                    # It had little time.
                    break
                # A pool does not say why it has no connection.
                raise
            except StoreUnavailable as other:
                if not other.is_broken:
                    raise
                error = other
        raise error

    def _breaker_of(self, record: bytes) -> _Breaker:
        """The breaker of the part of the store that has a record. A node of a cluster may be away while others answer."""
        part = self._part_of(record)
        breaker = self._breakers.get(part)
        if breaker is None:
            with self._lock:
                if len(self._breakers) >= MAX_PARTS:
                    self._breakers.clear()
                breaker = self._breakers.setdefault(part, _Breaker(part))
        return breaker

    def _check_breaker(self, breaker: _Breaker) -> None:
        if breaker.failures < BREAKER_FAILURES:
            return
        now = time.monotonic()
        with self._lock:
            if breaker.failures < BREAKER_FAILURES:
                return
            if now < breaker.open_until:
                raise StoreUnavailable("the store did not answer lately", is_unsent=True, is_reached=breaker.is_reached)
            # One call finds out if it answers again.
            breaker.open_until = now + BREAKER_PAUSE

    def _failed(self, breaker: _Breaker, *, is_reached: bool = False) -> None:
        with self._lock:
            breaker.failures += 1
            breaker.is_reached = is_reached
            if breaker.failures == BREAKER_FAILURES:
                what = f"the node {breaker.part} of the store" if breaker.part else "the store"
                log.error(
                    "%s does not answer: until it does, its requests are refused, or unprotected if you chose so", what
                )
            if breaker.failures >= BREAKER_FAILURES:
                breaker.open_until = time.monotonic() + BREAKER_PAUSE

    def _is_checked(self, max_age: float = LOOK_AGAIN) -> bool:
        """True if the last look for the mark was a success and is younger than this."""
        self._guard.check()
        return self._looked_at is not None and self._looked_at.age() < max_age

    async def check(self, policy: Policy, max_age: float = LOOK_AGAIN, record: bytes | None = None) -> None:
        """Checks the store before the first claim, and that its records have the ids of this process, unless the last look is
        younger than `max_age`.

        If the store does not answer, a process whose earlier look was a success goes on: on a cluster, the mark may be on another
        node than the `record`. If it is on the same one, and took all the time, the claim would take as much.
        """
        self._guard.check()
        now = Moment.now()
        if self._looked_at is not None:
            age, failed_at = self._looked_at.age(now), self._look_failed_at
            has_failed = failed_at is not None and failed_at.age(now) < LOOK_AGAIN
            # While a look counts, one claim looks again, and the others go on.
            if age < max_age or has_failed or (self._is_looking and age < LOOK_COUNTS):
                return
        elif self._refused is not None and self._refused[0].age(now) < REFUSED_FOR:
            raise StoreRefused(self._refused[1])
        if not self._is_verified:
            await self.call(MARK, self.store.verify, policy.store_timeout, guarded=True, again=True)
            self._is_verified = True
        self._is_looking = True
        try:
            mark = await self.call(
                MARK, lambda: self.store.lookup(MARK), policy.store_timeout, guarded=True, again=True
            )
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            self._look_failed_at = Moment.now()
            is_late = isinstance(error, _Late) or error.is_broken
            is_hopeless = is_late and record and self._part_of(record) == self._part_of(MARK)
            if self._looked_at is None or is_hopeless:
                raise
            return
        except StoreError as error:
            # There is a mark, or there may be one: that is no outage.
            raise StoreRefused("it cannot be read if the store belongs to an id secret") from error
        finally:
            self._is_looking = False
        try:
            self._guard.judge(mark, is_own_memory=self.is_immediate)
        except StoreRefused as refusal:
            self._looked_at, self._refused = None, (now, str(refusal))
            raise
        if self._refused is not None and self._refused[0].monotonic > now.monotonic:
            # A look that began later has refused since, and this one was only slow.
            raise StoreRefused(self._refused[1])
        self._looked_at, self._look_failed_at, self._refused = now, None, None

    async def lookup(self, record: bytes, policy: Policy) -> StoredRecord | None:
        return await self.call(
            record, lambda: self.store.lookup(record), policy.store_timeout, guarded=True, again=True
        )

    # Purges

    def _purge_soon(self) -> None:
        if self._purge is None:
            return
        now = time.monotonic()
        with self._lock:
            if self._purge is None or now < self._purge_at:
                return
            self._purge_at = now + 3 * PURGE_EVERY + PURGE_TIMEOUT
        # Processes that start together do not purge together.
        self._purge_in(random.uniform(0, PURGE_EVERY / 5))

    def _purge_in(self, pause: float) -> None:
        # The timer does not keep a store that the program has given up.
        engine = weakref.ref(self)

        async def purge() -> None:
            own = engine()
            if own is not None:
                await own._purge_once()

        self.runtime.later(pause, purge)

    async def _purge_once(self) -> None:
        purge = self._purge
        if purge is None:
            return
        pause = PURGE_EVERY
        try:
            purged = await self.runtime.call(purge, PURGE_TIMEOUT, in_thread=self.store.is_blocking)
            if purged >= PURGE_ROWS:
                pause /= 20
        except StoreRefused as error:
            self._purge, self._purge_at = None, float("inf")
            log.warning("records are not removed after their retention: %s", error)
            return
        except Exception as error:
            log.debug("a purge failed and will be tried again: %s", type(error).__name__)
        with self._lock:
            self._purge_at = time.monotonic() + pause + 2 * PURGE_EVERY + PURGE_TIMEOUT
        self._purge_in(pause)

    # Claims

    def is_running(self, record: bytes) -> bool:
        """True if this process executes under the record, or has executed and not stored the end yet."""
        return record in self._running

    async def _of_full_store(self, record: bytes, fingerprint: bytes, policy: Policy) -> Reply | None:
        """The reply for a record that a full store has. None: it has none, or the reply is not certain without a claim."""
        stored = await self.lookup(record, policy)
        if stored is None or stored.state == "released":
            return None
        if stored.fingerprint != fingerprint:
            return Reply("mismatch")
        match stored.state:
            case "completed" if stored.response is not None:
                return Reply("replay", stored.response)
            case "completed" | "tombstone" | "awaited":
                return Reply("unreplayable")
            case "unknown":
                return Reply("unknown")
        return None

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
        asker = _Asker()
        with self._lock:
            self._claiming += 1
            self._askers.setdefault(record, []).append(asker)
            asker.has_owner = record in self._running or record in self._pending
        try:
            return await self._claim(record, fingerprint, policy, caller, operation, key_tag, asker)
        except StoreUnavailable as error:
            error.is_reached = error.is_reached or asker.has_owner
            raise
        finally:
            with self._lock:
                self._claiming -= 1
                askers = self._askers[record]
                askers.remove(asker)
                if not askers:
                    del self._askers[record]

    async def _claim(
        self,
        record: bytes,
        fingerprint: bytes,
        policy: Policy,
        caller: bytes,
        operation: str,
        key_tag: bytes | None,
        asker: _Asker,
    ) -> Permit | Reply:
        if len(self._pending) + self._number_of_doubts >= MAX_UNSETTLED:
            raise StoreUnavailable("too many earlier attempts have no recorded end yet", is_full=True)
        if not self._is_checked():
            await self.check(policy, record=record)
        if record in self._doubts or record in self._pending or record in self._late:
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
        is_doubtful, sent = False, 0

        def send() -> Coroutine[Any, Any, Claimed]:
            nonlocal sent
            sent += 1
            return self.store.claim(claim)

        while True:
            try:
                if not self._is_checked():
                    await self.check(policy, record=record)
            except StoreError:
                if is_doubtful:
                    self._doubt(claim, policy)
                raise
            asked_at = Moment.now()
            try:
                if record in self._running and not is_doubtful:
                    claimed = await self._own_record(claim, policy)
                else:
                    sent = 0
                    claimed = await self.call(record, send, policy.store_timeout, guarded=True, again=True)
                    is_doubtful = is_doubtful or sent > 1
            except StoreUnavailable as error:
                is_doubtful = is_doubtful or sent > 1
                if error.is_full and not is_doubtful:
                    try:
                        found = await self._of_full_store(record, fingerprint, policy)
                    except StoreError:
                        raise error from None
                    if found is not None:
                        return found
                if is_doubtful or not error.is_unsent:
                    if not is_doubtful and not isinstance(error, _Late) and policy.wait > 0:
                        # Once more at once, with the same attempt: the connection may only have ended.
                        is_doubtful = True
                        continue
                    self._doubt(claim, policy)
                raise
            match claimed.outcome:
                case "execute":
                    permit = Permit(self, claim, claimed, policy, asked_at)
                    if is_doubtful:
                        permit.lost_claim = claim
                    permit.began_at = began_at
                    with self._lock:
                        self._running[record] = permit
                        for other in self._askers.get(record, ()):
                            other.has_owner = True
                        self._process = os.getpid()
                    self._purge_soon()
                    try:
                        # A claim that was under way for long may have been granted after another process began to use the store
                        # with an id secret.
                        if not self._is_checked(LOOK_COUNTS):
                            await self.check(policy, LOOK_COUNTS)
                    except StoreError:
                        await permit.release()
                        raise
                    return permit
                case "replay":
                    return Reply("replay", claimed.response)
                case "in-progress" | "locked":
                    asker.has_owner = True
                case "mismatch" | "unknown" | "unreplayable":
                    if is_doubtful and claimed.outcome == "mismatch":
                        # The store has answered. The claim that was lost may be granted later, if the other one is released.
                        self._doubt(claim, policy)
                    return Reply(claimed.outcome)
            now = time.monotonic()
            left = claimed.lease_left_ms / 1000
            if now >= deadline or self._waiting >= MAX_WAITERS:
                if is_doubtful:
                    self._doubt(claim, policy)
                owner = self._running.get(record)
                since = began_at if owner is None else owner.began_at
                return Reply("in-progress", lease_left=left, running_for=now - since)
            await self._wait(record, min(pause, deadline - now, max(left, POLL_FIRST)))
            pause = min(pause * 2, POLL_LAST)

    async def _own_record(self, claim: Claim, policy: Policy) -> Claimed:
        """The reply to a claim of a record under which this process executes.

        It is not claimed: if its lease has ended meanwhile, a claim would make its outcome unknown, or execute a second
        time, although the handler is alive. Only the store can say if this is another request.
        """
        try:
            stored = await self.lookup(claim.record, policy)
        except StoreUnavailable as error:
            # Nothing was claimed.
            raise StoreUnavailable(str(error), is_unsent=True, is_reached=error.is_reached) from error
        if stored is None or stored.state == "released":
            return Claimed("in-progress", lease_left_ms=policy.lease_ms)
        if stored.fingerprint != claim.fingerprint:
            return Claimed("mismatch")
        match stored.state:
            case "completed" if stored.response is not None:
                # Such as the end of an attempt that has overtaken the one of this process.
                return Claimed("replay", response=stored.response)
            case "completed" | "tombstone":
                return Claimed("unreplayable")
            case "unknown":
                return Claimed("unknown")
        return Claimed("in-progress", lease_left_ms=policy.lease_ms)

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
            # The record may be that of a later attempt by now.
            if self._running.get(permit.attempt.record) is permit:
                del self._running[permit.attempt.record]
            waiters = list(self._waiters.get(permit.attempt.record, ())) if self._waiters else ()
        for waiter in waiters:
            waiter.set()
        if permit.lost_claim is not None and permit.is_released:
            # Otherwise the record says that it may have taken effect, and must go on to do so.
            self._watch(permit.lost_claim, permit.policy)

    def _doubt(self, claim: Claim, policy: Policy) -> None:
        """Notes a claim whose reply was lost. It may become visible later, and nothing executes under it."""
        doubt = (claim, policy, time.monotonic() + policy.retention)
        with self._lock:
            is_new = claim.record not in self._doubts
            self._doubts.setdefault(claim.record, []).append(doubt)
            self._number_of_doubts += 1
        if is_new:
            self._doubt_later(claim.record, 0.1)

    def _doubt_later(self, record: bytes, pause: float) -> None:
        async def again() -> None:
            if await self._settle_doubts(record) != "settled":
                self._doubt_later(record, min(pause * 2, 30.0))

        self.runtime.later(pause, again)

    async def _settle_doubts(self, record: bytes, last_until: float | None = None) -> _DoubtEnd:
        """Settles the claims about a record whose replies were lost. No call takes longer than until `last_until`."""
        while doubts := list(self._doubts.get(record, ())):
            settled: list[Any] = []
            unsettled: list[Any] = []
            worst: _DoubtEnd = "elsewhere"
            for doubt in doubts:
                end = await self._settle_doubt(doubt, last_until)
                (settled if end == "settled" else unsettled).append(doubt)
                if end in ("refused", "unanswered", "broken"):
                    # The others would wait as long, and a client with them.
                    worst = end
                    break
            with self._lock:
                known = self._doubts.pop(record, [])
                left = [doubt for doubt in known if not any(doubt is own for own in settled)]
                # Another call may have settled it meanwhile, and this one has sent its claim again.
                left += [doubt for doubt in unsettled if not any(doubt is own for own in left)]
                self._number_of_doubts += len(left) - len(known)
                if left:
                    self._doubts[record] = left
            if left and not known:
                self._doubt_later(record, 0.1)
            if not settled or worst != "elsewhere":
                return worst
            # The others may have waited for the one that was granted.
        return "settled"

    async def _settle_doubt(self, doubt: tuple[Claim, Policy, float], last_until: float | None) -> _DoubtEnd:
        claim, policy, until = doubt
        record = claim.record
        if record in self._running:
            # As in `_own_record`: if the lease of the attempt has ended, the claim would take it over.
            return "elsewhere"
        try:
            claimed = await self.call(
                record, lambda: self.store.claim(claim), policy.store_timeout, at_most=_left(last_until), again=True
            )
            if claimed.outcome == "execute" and not claimed.after_abandoned:
                settled = await self.call(
                    record,
                    lambda: self.store.release(record, claimed.token, policy.released_ms),
                    policy.store_timeout,
                    at_most=_left(last_until),
                )
                if settled == "locked":
                    return "elsewhere"
                self._watch(claim, policy)
                return "settled"
            # After an abandoned attempt it keeps its lease, so that the next attempt knows that it is not the first.
            is_left = claimed.outcome in ("in-progress", "locked", "mismatch") and time.monotonic() < until
            return "elsewhere" if is_left else "settled"
        except (RecordCorrupt, ResponseSealed):
            # The record has ended: the claim was not granted.
            return "settled"
        except StoreError as error:
            if time.monotonic() >= until:
                return "settled"
            if isinstance(error, StoreUnavailable) and error.is_broken:
                return "broken"
            return "refused" if isinstance(error, StoreUnavailable) and error.is_reached else "unanswered"

    def _watch(self, claim: Claim, policy: Policy) -> None:
        """Notes a claim that was released, and of which an earlier message may still arrive."""
        if self.is_immediate:
            return
        now, pause = time.monotonic(), min(LATE_FIRST, policy.lease / 3)
        with self._lock:
            others = self._late.get(claim.record, [])
            if self._number_of_late >= MAX_LATE or any(late.claim.attempt == claim.attempt for late in others):
                return
            self._late[claim.record] = [*others, _LateClaim(claim, policy, now + LATE_FOR, pause, now + pause)]
            self._number_of_late += 1
        self._look_for_late_in(pause)

    def _forget_late(self, late: _LateClaim) -> None:
        with self._lock:
            others = self._late.get(late.claim.record, [])
            left = [other for other in others if other is not late]
            self._number_of_late += len(left) - len(others)
            if left:
                self._late[late.claim.record] = left
            else:
                self._late.pop(late.claim.record, None)

    def _look_for_late_in(self, pause: float) -> None:
        """One timer for all of them."""
        now = time.monotonic()
        with self._lock:
            if now - 1 < self._look_for_late_at <= now + pause:
                return
            self._look_for_late_at = at = now + pause

        async def look() -> None:
            # A timer that was set since is the earlier one.
            if self._look_for_late_at == at:
                await self._look_for_late()

        self.runtime.later(pause, look)

    async def _look_for_late(self, last_until: float | None = None) -> None:
        """Looks for late claims, one at a time. With `last_until`: for the last time, for all of them, until then."""
        least = LATE_FIRST
        for late in [late for claims in list(self._late.values()) for late in claims]:
            now = time.monotonic()
            if last_until is not None and now >= last_until:
                return
            if last_until is not None or late.look_at <= now:
                # The timer of this run keeps its place while it runs.
                self._look_for_late_at = now
                error = await self._look_for(late, last_until)
                late.pause = min(late.pause * 2, LATE_LAST, late.policy.lease / 3)
                late.look_at = time.monotonic() + late.pause
                if error is not None:
                    # The others wait, too.
                    least = BREAKER_PAUSE
                    break
        if last_until is not None:
            return
        looks = [late.look_at for claims in list(self._late.values()) for late in claims]
        if looks:
            self._look_for_late_at = 0.0
            self._look_for_late_in(max(least, min(looks) - time.monotonic()))

    async def _look_for(self, late: _LateClaim, last_until: float | None = None) -> StoreError | None:
        """One look, and the release of what it finds. The error says that the store did not answer."""
        claim, policy = late.claim, late.policy
        record = claim.record
        if record in self._running or record in self._doubts:
            return None

        try:
            found = await self.call(
                record, lambda: self.store.lookup(record), policy.store_timeout, at_most=_left(last_until)
            )
            if found is not None and found.state == "in-progress" and found.attempt == claim.attempt:
                # Only the store says if an earlier attempt was abandoned. Then the lease runs out: each look would extend it.
                claimed = await self.call(
                    record, lambda: self.store.claim(claim), policy.store_timeout, at_most=_left(last_until)
                )
                if claimed.after_abandoned:
                    self._forget_late(late)
                elif claimed.outcome == "execute":
                    await self.call(
                        record,
                        lambda: self.store.release(record, claimed.token, policy.released_ms),
                        policy.store_timeout,
                        at_most=_left(last_until),
                    )
                    log.info(
                        "record %s: a claim that came late, and under which nothing ran, was released", record.hex()
                    )
            elif found is not None and found.state not in ("in-progress", "released"):
                # It has ended, so that no claim is granted any more.
                self._forget_late(late)
        except (RecordCorrupt, ResponseSealed):
            self._forget_late(late)
        except StoreError as error:
            return error
        if time.monotonic() >= late.until:
            self._forget_late(late)
        return None

    async def _settle_earlier(self, record: bytes) -> None:
        """Settles what this process left open about a record, before it claims it under a new attempt."""
        for late in self._late.get(record, []):
            error = await self._look_for(late)
            if isinstance(error, _Late):
                # A client has waited long enough.
                raise StoreUnavailable(str(error), is_unsent=True, is_reached=error.is_reached)
            if error is not None:
                # The others would wait as long. The claim gets its own answer.
                break
        end = await self._settle_doubts(record) if record in self._doubts else "settled"
        if end in ("unanswered", "broken"):
            raise StoreUnavailable(
                "it is not known if an earlier claim of this record was applied",
                is_unsent=True,
                is_reached=end == "broken",
            )
        pending = self._pending.get(record)
        if pending is not None and not await self._settle_pending(pending):
            raise StoreUnavailable("the end of an earlier attempt is not stored yet", is_unsent=True)

    # Ends

    async def _end(
        self, permit: Permit, state: EndState | None, response: bytes | None, last_until: float | None = None
    ) -> Settled:
        record, token, policy = permit.attempt.record, permit.attempt.token, permit.policy
        if state is None:
            settled = await self.call(
                record,
                lambda: self.store.release(record, token, policy.released_ms),
                policy.store_timeout,
                at_most=_left(last_until),
                again=True,
            )
            if settled == "released":
                permit.is_released = True
            return settled
        return await self.call(
            record,
            lambda: self.store.complete(record, token, state, response, policy.retention_ms),
            policy.store_timeout,
            at_most=_left(last_until),
            again=True,
        )

    async def _end_by_record(self, pending: _Pending, last_until: float | None) -> Settled:
        """The end of an attempt that has completed its record in its own transaction. What was committed there is not changed.

        Only the response that the transaction left out is added, and what was rolled back frees the key.
        """
        permit, state = pending.permit, pending.state
        attempt = permit.attempt
        record = await self.call(
            attempt.record,
            lambda: self.store.lookup(attempt.record),
            permit.policy.store_timeout,
            at_most=_left(last_until),
        )
        if record is None or record.token != attempt.token:
            return "fenced"
        if record.state == "awaited" and state is not None:
            return await self._end(permit, state, pending.response, last_until)
        if record.state != "in-progress":
            return "fenced"
        if attempt.is_after_abandoned:
            # The effect of the abandoned attempt is not known, and the next attempt must know that it is not the first: the lease
            # is left to its end, once no transaction holds the record.
            policy = permit.policy
            held = await self.call(
                attempt.record,
                lambda: self.store.renew(attempt.record, attempt.token, policy.lease_ms, policy.retention_ms),
                policy.store_timeout,
                at_most=_left(last_until),
            )
            return "fenced" if held == "renewed" else "locked"
        settled = await self._end(permit, None, None, last_until)
        # A commit may have come between the two: the next look tells.
        return "locked" if settled == "fenced" else settled

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
                    if failures < 2 and self._breaker_of(permit.attempt.record).failures < BREAKER_FAILURES:
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
        except BaseException:
            # The caller was cancelled: the end must not get lost.
            self._defer(permit, state, response)
            raise
        finally:
            if permit.attempt.record not in self._pending:
                self.leave(permit)

    def settle_by_record(self, permit: Permit, state: EndState | None = None, response: bytes | None = None) -> None:
        """Ends an attempt that has completed its record in its own transaction, in the background, as soon as the store says how
        that has ended, unless another end is under way already. `state` and `response` are for a record without a response.

        Until then the record stays one under which this process executes.
        """
        if permit.take_end():
            self._defer(permit, state, response, is_by_record=True)

    def _defer(
        self, permit: Permit, state: EndState | None, response: bytes | None, *, is_by_record: bool = False
    ) -> Ending:
        size = len(response or b"")
        with self._lock:
            if self._deferred_bytes + size > MAX_DEFERRED_BYTES:
                state, response, size = "tombstone", None, 0
            self._deferred_bytes += size
            until = time.monotonic() + permit.policy.retention
            pending = _Pending(permit, state, response, until, is_by_record=is_by_record)
            self._pending[permit.attempt.record] = pending
        self._pending_later(pending)
        return "not-stored"

    def _pending_later(self, pending: _Pending) -> None:
        async def again() -> None:
            if not await self._settle_pending(pending):
                pending.pause = min(pending.pause * 2, RETRY_LAST)
                self._pending_later(pending)

        self.runtime.later(pending.pause, again)

    async def _settle_pending(self, pending: _Pending, last_until: float | None = None) -> bool | None:
        """True if the end is stored, or was given up. None if the store did not answer in time. No call takes longer than until
        `last_until`."""
        record = pending.permit.attempt.record
        if self._pending.get(record) is not pending:
            return True
        try:
            if pending.is_by_record:
                settled = await self._end_by_record(pending, last_until)
            else:
                settled = await self._end(pending.permit, pending.state, pending.response, last_until)
            if settled == "locked":
                return False
            log.info("record %s: the store took its end after all: %s", record.hex(), settled)
        except StoreError as error:
            if time.monotonic() < pending.until:
                return None if isinstance(error, _Late) else False
            log.exception("record %s: the store never took its end", record.hex())
        with self._lock:
            if self._pending.get(record) is not pending:
                # Another call has settled it meanwhile.
                return True
            del self._pending[record]
            self._deferred_bytes -= len(pending.response or b"")
        self.leave(pending.permit)
        return True

    async def _settle_all(self, last_until: float) -> None:
        """Stores the ends that are not stored yet, several at a time, until one is late: the others would wait as long."""
        pending = list(self._pending.values())
        while pending and time.monotonic() < last_until:
            some, pending = pending[:SETTLED_AT_ONCE], pending[SETTLED_AT_ONCE:]
            ends = await self.runtime.each([lambda one=one: self._settle_pending(one, last_until) for one in some])  # type: ignore[misc]
            if None in ends:
                return

    async def drain(self, timeout: float) -> bool:
        """Waits until no attempt of this process runs or may still begin, and every end is stored. False if that takes longer."""
        deadline, pause = time.monotonic() + timeout, 0.02
        while self._claiming or self._running or self._pending:
            if time.monotonic() >= deadline:
                return False
            # The timers may have ended with the program already.
            await self._settle_all(deadline)
            await self.runtime.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            pause = min(pause * 1.5, 0.5)
        # Once: a store that is away, or a claim that most likely never arrives, does not keep the process from ending.
        for record in list(self._doubts):
            if time.monotonic() >= deadline:
                break
            if await self._settle_doubts(record, deadline) not in ("settled", "elsewhere"):
                break
        await self._look_for_late(deadline)
        with self._lock:
            self._late.clear()
            self._number_of_late = 0
        return True

    def drain_at_exit(self, timeout: float) -> None:
        """Waits at the end of a blocking program, which has no event for its shutdown, for what is not stored yet.

        The event loop of an asynchronous program has ended by then: only the log says what is not stored.
        """
        if self._drains_at_exit:
            return
        with self._lock:
            if self._drains_at_exit:
                return
            self._drains_at_exit = True

        # What is not stored yet is in the timers, so that an engine that is gone has nothing to wait for.
        engine = weakref.ref(self)

        def drain() -> None:
            own = engine()
            if own is not None:
                own._drain_last(timeout)

        atexit.register(drain)
        weakref.finalize(self, atexit.unregister, drain).atexit = False

    def _drain_last(self, timeout: float) -> None:
        # A handler may fork: the attempts of the parent are none of the child's.
        if os.getpid() != self._process or not (self._running or self._pending or self._doubts):
            return
        is_stored = False
        if isinstance(self.runtime, ThreadRuntime):
            left = max(0.0, _exit_began_at() + timeout - time.monotonic())
            log.warning("the process waits up to %g s until its last outcomes are stored", left)
            is_stored = run_blocking(self.drain(left))
        if not is_stored:
            for record in [*self._running, *self._pending][:100]:
                log.error("record %s: its end is not stored, so its outcome will be unknown", record.hex())


@functools.cache
def _exit_began_at() -> float:
    """When the first engine began to wait at the exit of the process. The others do not wait longer than it."""
    return time.monotonic()


_LOOP, _THREADS = LoopRuntime(), ThreadRuntime()
PLAIN = Ids()
_Engines = dict[tuple[str, Ids], Engine]
# Those of stores that take no attributes, which stay in memory with their engines.
_ENGINES: weakref.WeakKeyDictionary[Any, _Engines] = weakref.WeakKeyDictionary()
_ENGINES_LOCK = threading.Lock()


def _engines_of(store: Any) -> _Engines:
    """The engines of a store. They are in the store itself, because they refer to it."""
    attributes = getattr(store, "__dict__", None)
    if attributes is None:
        return _ENGINES.setdefault(store, {})
    engines: _Engines = attributes.setdefault("_oncegate_engines", {})
    if any(engine.store is not store for engine in engines.values()):
        # A copy of another store has its attributes.
        engines = attributes["_oncegate_engines"] = {}
    return engines


def check_store(store: Any) -> None:
    if isinstance(store, type) or not (hasattr(store, "claim") and hasattr(store, "is_blocking")):
        kind = store if isinstance(store, type) else type(store)
        raise ConfigError(
            f"{kind.__name__} is not a store: use MemoryStore(), PostgresStore(pool) or RedisStore(client)"
        )


def _is_one_of_several(store: Any) -> bool:
    """True if a store in memory is in a process that looks like a worker, as those of uvicorn, hypercorn and gunicorn do."""
    if not getattr(store, "is_immediate", False):
        return False
    workers = os.environ.get("WEB_CONCURRENCY", "")
    is_gunicorn = "gunicorn" in os.environ.get("SERVER_SOFTWARE", "")
    return multiprocessing.parent_process() is not None or is_gunicorn or (workers.isdigit() and int(workers) > 1)


def engine_of(store: Any, *, blocking: bool, ids: Ids = PLAIN) -> Engine:
    """The engine of a store in this process: all middlewares and functions on one store and with one id secret share it."""
    check_store(store)
    with _ENGINES_LOCK:
        engines = _engines_of(store)
        kind = ("threads" if blocking else "loop", ids)
        if kind not in engines:
            if not engines and _is_one_of_several(store):
                log.warning(
                    "the store is in the memory of this worker process: with several workers, each executes a key once. "
                    "Use PostgresStore or RedisStore with more than one"
                )
            engines[kind] = Engine(store, _THREADS if blocking else _LOOP, ids)
        return engines[kind]


async def drain(store: Store, timeout: float = 30) -> bool:
    """Waits until no function or request of this process runs under a key of the store, and every end is stored.

    Call it before the pool of the store is closed. False if that takes longer than `timeout`, in seconds: then outcomes of this
    process may be unknown afterwards.
    """
    return await _drain(store, timeout, _LOOP)


def drain_blocking(store: Store, timeout: float = 30) -> bool:
    """:func:`drain` for blocking programs. They also wait at their exit, for at most 30 s."""
    return run_blocking(_drain(store, timeout, _THREADS))


async def _drain(store: Store, timeout: float, runtime: Runtime) -> bool:
    check_store(store)
    deadline = time.monotonic() + timeout
    with _ENGINES_LOCK:
        engines = [engine for engine in _engines_of(store).values() if engine.runtime is runtime]
    return all([await engine.drain(max(0.0, deadline - time.monotonic())) for engine in engines])


__all__ = ["Attempt", "Engine", "OncegateError", "Permit", "Policy", "Reply", "drain", "drain_blocking", "engine_of"]
