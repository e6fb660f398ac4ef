"""One request with a key, from its claim to its end: the same for every framework."""

from __future__ import annotations

import contextvars
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import http
from .engine import Attempt, Engine, Permit, Policy, Reply
from .errors import RecordCorrupt, ResponseSealed, StoreError, StoreUnavailable
from .headers import Field
from .http import Executed, Keyed, Operation
from .refusal import Answer, Refusal
from .response import DecodeError, StoredResponse
from .settings import Settings

log = logging.getLogger("oncegate")
CURRENT: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("oncegate_attempt", default=None)
LARGE_BODY = 64 * 1024
SEALED_FIELD = "oncegate-sealed"
FAILED = http.Executed(500, [("content-type", b"text/plain; charset=utf-8")], "replay", is_kept_server_error=True)
FAILED_BODY = b"Internal Server Error"


def current_attempt() -> Attempt | None:
    """The attempt under whose key the calling code runs, or None."""
    return CURRENT.get()


def read_stored(encoded: bytes) -> StoredResponse:
    """The response of a record. Raises :class:`RecordCorrupt` or :class:`ResponseSealed`."""
    try:
        response = StoredResponse.decode(encoded)
    except DecodeError as error:
        raise RecordCorrupt("the stored response cannot be read") from error
    if any(name == SEALED_FIELD for name, _ in response.headers):
        raise ResponseSealed("the stored response is sealed: give the store the keys with SealedStore(store, keys)")
    return response


class Limits:
    """The requests with a key that are running, and the memory that their bodies hold."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._running = 0
        self._callers: Counter[bytes] = Counter()
        self._held = 0

    def hold(self, size: int) -> bool:
        with self._lock:
            if self._held + size > self._settings.request_budget:
                return False
            self._held += size
            return True

    def free(self, size: int) -> None:
        with self._lock:
            self._held -= size

    def enter(self, caller: bytes) -> bool:
        single = not self._settings.caller.parts
        with self._lock:
            if self._running >= self._settings.max_in_flight or (
                not single and self._callers[caller] >= self._settings.max_in_flight_per_caller
            ):
                return False
            self._running += 1
            if not single:
                self._callers[caller] += 1
            return True

    def leave(self, caller: bytes) -> None:
        with self._lock:
            self._running -= 1
            if caller in self._callers:
                self._callers[caller] -= 1
                if self._callers[caller] <= 0:
                    del self._callers[caller]


@dataclass(frozen=True, slots=True)
class FailOpen:
    """The store is away, and the settings say that the request is executed without protection."""


class Flow:
    """Requests with these settings over this store."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self.settings, self.engine = settings, engine
        self.limits = Limits(settings)
        self.policy = Policy(
            settings.lease, settings.retention, settings.wait, settings.on_abandoned, settings.store_timeout
        )

    async def identify(self, keyed: Keyed, body: bytes) -> Operation | Answer | None:
        if len(body) <= LARGE_BODY and not any(name == "content-encoding" for name, _ in keyed.head.headers):
            return http.identify(keyed, body)
        return await self.engine.runtime.offload(lambda: http.identify(keyed, body))

    async def claim(self, keyed: Keyed, operation: Operation) -> Permit | Answer | FailOpen:
        """Asks the store. An answer ends the request."""
        try:
            claimed = await self.engine.claim(
                operation.record,
                operation.fingerprint,
                self.policy,
                caller=operation.caller_tag,
                operation=operation.name,
                key_tag=operation.key_tag,
            )
            if isinstance(claimed, Permit):
                return await self._begin(keyed, operation, claimed)
            return await self._reply(keyed, operation, claimed)
        except StoreError as error:
            return self._failed_claim(keyed, operation, error)

    async def _begin(self, keyed: Keyed, operation: Operation, permit: Permit) -> Permit | Answer:
        # The process may have been paused for longer than the lease since the claim.
        if await permit.confirm():
            return permit
        fenced = await permit.release() == "fenced"
        condition = "request-in-progress" if fenced else "store-unavailable"
        return keyed.refuse(Refusal(condition, retry_after=1, record=operation.record))

    async def _reply(self, keyed: Keyed, operation: Operation, reply: Reply) -> Answer:
        match reply.outcome:
            case "replay":
                return http.replayed(keyed, read_stored(reply.response))
            case "in-progress":
                seconds = http.retry_after(reply.lease_left, reply.running_for)
                refusal = Refusal("request-in-progress", retry_after=seconds)
            case "unknown":
                refusal = Refusal("outcome-unknown")
            case "unreplayable":
                refusal = Refusal("replay-unavailable")
            case _:
                refusal = await self._mismatch(operation)
        return keyed.refuse(refusal.about(operation.record))

    async def _mismatch(self, operation: Operation) -> Refusal:
        if self.settings.authority == "compare":
            record = await self.engine.lookup(operation.record, self.policy)
            if record is not None and http.differs_in_host_only(record.fingerprint, operation.fingerprint):
                return Refusal("host-differs")
        return Refusal("key-reused", http.REUSED_MEMBERS if self.settings.natural_key else None)

    def _failed_claim(self, keyed: Keyed, operation: Operation, error: StoreError) -> Answer | FailOpen:
        record = operation.record
        log.warning("record %s: the claim failed: %s", record.hex(), error)
        if isinstance(error, RecordCorrupt):
            return keyed.refuse(Refusal("record-corrupt", record=record))
        if isinstance(error, ResponseSealed):
            return keyed.refuse(Refusal("response-sealed", retry_after=30, record=record))
        if isinstance(error, StoreUnavailable) and error.is_full:
            # A full store is no outage: a client that fills it could switch the protection off.
            return keyed.refuse(Refusal("store-unavailable", http.STORE_FULL, retry_after=30, record=record))
        if self.settings.fails_open and isinstance(error, StoreUnavailable):
            return FailOpen()
        return keyed.refuse(Refusal("store-unavailable", retry_after=1, record=record))

    # Ends

    async def conclude(
        self, keyed: Keyed, permit: Permit, response: Executed, body: bytes | None
    ) -> tuple[str | None, Answer | None]:
        """Stores the end of an attempt. Returns the mark of the response, and the answer that takes its place.

        `body` is None if the response is not read to its end, because it is not kept.
        """
        if permit.attempt.is_completed:
            own = await self._completed(keyed, permit, response, body)
            if own is not None:
                return own
            if response.status >= 500:
                # The effect was rolled back with the completion. If its commit is still running, the store waits for it.
                response.treatment = "release"
        if response.treatment == "unknown":
            await permit.park("the handler reported it (Idempotency-Store: unknown)")
            return None, None
        if response.treatment == "release":
            ending = await permit.release()
        else:
            kept = None
            if response.treatment == "replay" and body is not None:
                kept = http.stored(self.settings, response, body)
            try:
                encoded = kept.encode() if kept else None
            except (ValueError, UnicodeEncodeError):
                encoded = None
            ending = await permit.complete("completed" if encoded is not None else "tombstone", encoded)
        return (None if ending == "stored" else ending), None

    async def _completed(
        self, keyed: Keyed, permit: Permit, response: Executed, body: bytes | None
    ) -> tuple[str | None, Answer | None] | None:
        """The end of an attempt that completed its record in its own transaction. None if that was rolled back."""
        try:
            record = await self.engine.lookup(permit.attempt.record, self.policy)
            own = record is not None and record.token == permit.attempt.token
            if record is None or not own or record.state not in ("completed", "awaited", "tombstone"):
                return None
            if record.state == "completed" and record.response is not None:
                self.engine.leave(permit)
                kept = read_stored(record.response)
                fields = http.marked(keyed, list(kept.headers), None)
                return None, Answer(kept.status, fields, kept.body)
            if record.state == "awaited" and body is not None and response.status < 500:
                kept_now = http.stored(self.settings, response, body)
                ending = await permit.complete(
                    "completed" if kept_now else "tombstone", kept_now.encode() if kept_now else None
                )
                return (None if ending == "stored" else ending), None
            self.engine.leave(permit)
            return None, None
        except StoreError as error:
            # It may have been committed: the lease decides, and nothing else is written.
            log.warning("record %s: its completion was not found: %s", permit.attempt.record.hex(), error)
            self.engine.leave(permit)
            return "not-stored", None

    async def fail(self, keyed: Keyed, permit: Permit, reason: str) -> Answer:
        """Ends an attempt that ended without a whole response, so that its effect is unknown."""
        record = permit.attempt.record
        if self.settings.server_errors == "replay":
            await permit.park(reason)
            return keyed.refuse(Refusal("outcome-unknown", record=record))
        await permit.release()
        return keyed.refuse(Refusal("handler-failed", record=record))

    async def throw(self, keyed: Keyed, permit: Permit) -> Answer:
        """Ends an attempt whose handler raised an exception before its response: a 500, which is kept or frees the key."""
        response = http.executed(self.settings, keyed.head.path, 500, list(FAILED.headers))
        mark, instead = await self.conclude(keyed, permit, response, FAILED_BODY)
        if instead is not None:
            return instead
        return Answer(500, http.marked(keyed, response.headers, mark), FAILED_BODY)


@contextmanager
def running(attempt: Attempt) -> Iterator[None]:
    """The attempt of the code inside."""
    token: contextvars.Token[Any] = CURRENT.set(attempt)
    try:
        yield
    finally:
        CURRENT.reset(token)


def fail_open_fields(keyed: Keyed, settings: Settings, headers: list[Field]) -> list[Field]:
    return http.marked(keyed, http.passed(settings, headers), "failed-open")
