"""One request with a key, from its claim to its end: the same for every framework."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from . import http
from .engine import Attempt, Engine, Permit, Policy, Reply
from .errors import RecordCorrupt, ResponseSealed, StoreError, StoreUnavailable
from .headers import Field, get
from .http import Executed, Keyed, Operation
from .refusal import Answer, Refusal
from .response import DecodeError, StoredResponse
from .settings import Settings
from .store import EndState, Settled, StoredRecord
from .values import check_shared

log = logging.getLogger("oncegate")
CURRENT: contextvars.ContextVar[Attempt | None] = contextvars.ContextVar("oncegate_attempt", default=None)
LARGE_BODY = 64 * 1024
SEALED_FIELD = "oncegate-sealed"
# The time for which the end of a transaction is waited for, in which the handler has completed its record, in seconds.
COMMIT_WAIT = 1.0
ROLLED_BACK = (
    "The transaction of the operation was rolled back: nothing took effect. Send the request again with the same key."
)
ROLLED_BACK_AGAIN = (
    "The transaction of this attempt was rolled back, but an earlier attempt was abandoned and may have taken effect. Send the "
    "request again with the same key."
)
NOT_COMMITTED = (
    "The transaction of the operation has not ended yet. Send the request again with the same key to get its outcome."
)
NOT_FOUND = (
    "It cannot be found out yet if the transaction of the operation was committed. Send the request again with the same key to "
    "get its outcome."
)
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
        check_shared(engine.store, settings.service)
        self.settings, self.engine = settings, engine
        self._is_warned = False
        advice = settings.caller.advice()
        if advice is not None:
            log.warning("%s", advice)
        self.limits = Limits(settings)
        self.policy = Policy(
            settings.lease, settings.retention, settings.wait, settings.on_abandoned, settings.store_timeout
        )

    async def identify(self, keyed: Keyed, body: bytes) -> Operation | Answer | None:
        if len(body) <= LARGE_BODY and not any(name == "content-encoding" for name, _ in keyed.head.headers):
            return http.identify(keyed, body)
        return await self.engine.runtime.offload(lambda: http.identify(keyed, body))

    def is_inner(self, outer: Attempt | None, operation: Operation) -> bool:
        """True if another middleware executes this request already, under the same record, and this one has nothing to do."""
        if outer is None or outer.record != operation.record:
            return False
        if not self._is_warned:
            self._is_warned = True
            log.warning("IdempotencyMiddleware is there twice for one request: the inner one does nothing. Remove one")
        return True

    async def claim(self, keyed: Keyed, operation: Operation) -> Permit | Answer | FailOpen:
        """Asks the store. An answer ends the request."""
        if get(keyed.head.headers, "oncegate-record") == operation.record.hex().encode():
            # It would wait for the sidecar, and the sidecar for it.
            return keyed.refuse(Refusal("store-unavailable", http.SAME_RECORD, retry_after=30, record=operation.record))
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
        except StoreError as error:
            return self._failed_claim(keyed, operation, error)
        try:
            return await self._reply(keyed, operation, claimed)
        except StoreError as error:
            # The store has answered that it must not be executed.
            return self._failed_claim(keyed, operation, error, has_answered=True)

    async def _begin(self, keyed: Keyed, operation: Operation, permit: Permit) -> Permit | Answer:
        # The process may have been paused for longer than the lease since the claim.
        if await permit.confirm():
            permit.attempt.stored_headers = self.settings.stored_headers
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

    def _failed_claim(
        self, keyed: Keyed, operation: Operation, error: StoreError, *, has_answered: bool = False
    ) -> Answer | FailOpen:
        record = operation.record
        log.warning("record %s: the claim failed: %s", record.hex(), error)
        if isinstance(error, RecordCorrupt):
            return keyed.refuse(Refusal("record-corrupt", record=record))
        if isinstance(error, ResponseSealed):
            return keyed.refuse(Refusal("response-sealed", retry_after=30, record=record))
        if self.settings.fails_open and self.engine.is_running(record):
            # This process is executing it, or has done so.
            return keyed.refuse(Refusal("request-in-progress", retry_after=1, record=record))
        if isinstance(error, StoreUnavailable) and error.is_full:
            # A full store is no outage: a client that fills it could switch the protection off.
            return keyed.refuse(Refusal("store-unavailable", http.STORE_FULL, retry_after=30, record=record))
        # A store that answers and refuses is no outage.
        if (
            self.settings.fails_open
            and not has_answered
            and isinstance(error, StoreUnavailable)
            and not error.is_reached
        ):
            return FailOpen()
        return keyed.refuse(Refusal("store-unavailable", retry_after=1, record=record))

    # Ends

    async def conclude(
        self, keyed: Keyed, permit: Permit, response: Executed, body: bytes | None, *, has_failed: bool = False
    ) -> tuple[str | None, Answer | None]:
        """Stores the end of an attempt. Returns the mark of the response, and the answer that takes its place.

        `body` is None if the response is not read to its end, because it is not kept. `has_failed` is true if the handler has
        raised an exception after its response, such as that of a commit.
        """
        if permit.attempt.is_completed:
            own = await self._completed(keyed, permit, response, body, has_failed=has_failed)
            if own is not None:
                return own
            # The effect was rolled back with the completion: that was seen.
            if response.status < 400 and permit.attempt.is_in_savepoint:
                # Or only a savepoint was, with the completion in it, and the effect is there.
                await permit.park("its completion was in a savepoint that was rolled back")
                return None, keyed.refuse(Refusal("outcome-unknown", record=permit.attempt.record))
            if response.status < 400:
                await permit.release()
                return None, self._rolled_back(keyed, permit)
            if response.treatment != "unknown":
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

    def _rolled_back(self, keyed: Keyed, permit: Permit) -> Answer:
        detail = ROLLED_BACK_AGAIN if permit.attempt.is_after_abandoned else ROLLED_BACK
        return keyed.refuse(Refusal("handler-failed", detail, record=permit.attempt.record))

    async def is_open(self, permit: Permit) -> bool:
        """True if the handler has completed the record in a transaction that has not ended yet."""
        try:
            return permit.attempt.is_completed and await self._held(permit) == "locked"
        except StoreError:
            return False

    async def _held(self, permit: Permit) -> Settled:
        """`locked` while the transaction of a completion is open; `renewed` if it was rolled back; otherwise `fenced`."""
        record, token, policy = permit.attempt.record, permit.attempt.token, self.policy
        return await self.engine.call(
            record,
            lambda: self.engine.store.renew(record, token, policy.lease_ms, policy.retention_ms),
            policy.store_timeout,
        )

    async def _completed(
        self, keyed: Keyed, permit: Permit, response: Executed, body: bytes | None, *, has_failed: bool = False
    ) -> tuple[str | None, Answer | None] | None:
        """The end of an attempt that completed its record in its own transaction. None if that was rolled back.

        The record decides. It is never completed with another response, because a commit may still come.
        """
        deadline, pause = time.monotonic() + COMMIT_WAIT, 0.01
        try:
            while True:
                record = await self.engine.lookup(permit.attempt.record, self.policy)
                if record is None or record.token != permit.attempt.token:
                    break
                if record.state in ("completed", "awaited", "tombstone"):
                    return await self._replayed(keyed, permit, record, response, body)
                if record.state != "in-progress":
                    break
                held = await self._held(permit)
                if held == "renewed":
                    return None
                if held == "locked" and time.monotonic() >= deadline:
                    log.error(
                        "record %s: the transaction in which the handler completed it is still open after the response: commit "
                        "before you respond",
                        permit.attempt.record.hex(),
                    )
                    # Its end decides, in the background: a rollback frees the key, and a commit gets its response.
                    self.engine.settle_by_record(permit, *self._left_out(response, body))
                    return self._undecided(keyed, permit, response)
                await self.engine.runtime.sleep(pause)
                pause = min(pause * 2, 0.1)
        except StoreError as error:
            # It may have been committed: the record decides, as soon as it can be read, and nothing else is written.
            log.warning("record %s: its completion was not found: %s", permit.attempt.record.hex(), error)
            self.engine.settle_by_record(permit, *self._left_out(response, body))
            if has_failed or permit.attempt.is_open():
                # The handler may have sent a success before its commit.
                return self._undecided(keyed, permit, response, NOT_FOUND)
            return "not-stored", None
        except BaseException:
            # The caller was cancelled: the end of the transaction decides in the background.
            self.engine.settle_by_record(permit, *self._left_out(response, body))
            raise
        self.engine.leave(permit)
        return self._undecided(keyed, permit, response, NOT_FOUND)

    def _undecided(
        self, keyed: Keyed, permit: Permit, response: Executed, detail: str = NOT_COMMITTED
    ) -> tuple[str | None, Answer | None]:
        if response.status >= 400:
            return "not-stored", None
        # The record will tell, to a retry with the same key.
        return None, keyed.refuse(Refusal("request-in-progress", detail, retry_after=1, record=permit.attempt.record))

    async def _replayed(
        self, keyed: Keyed, permit: Permit, record: StoredRecord, response: Executed, body: bytes | None
    ) -> tuple[str | None, Answer | None]:
        if record.state == "completed" and record.response is not None:
            self.engine.leave(permit)
            kept = read_stored(record.response)
            fields = http.marked(keyed, list(kept.headers), None)
            return None, Answer(kept.status, fields, kept.body)
        state, encoded = self._left_out(response, body)
        if record.state == "awaited" and state is not None:
            ending = await permit.complete(state, encoded)
            return (None if ending == "stored" else ending), None
        self.engine.leave(permit)
        return None, None

    def _left_out(self, response: Executed, body: bytes | None) -> tuple[EndState | None, bytes | None]:
        """What is written to a record that was completed without a response. None: nothing."""
        if body is None or response.status >= 500:
            return None, None
        kept = http.stored(self.settings, response, body) if response.treatment == "replay" else None
        return ("completed", kept.encode()) if kept else ("tombstone", None)

    def is_cut(self, response: Executed, body: bytes) -> bool:
        """True if a whole body is not as long as its head says: the handler passed on what was cut off."""
        length = get(response.headers, "content-length")
        if length is None or response.status in (204, 304):
            return False
        text = length.strip()
        return not text.isdigit() or int(text) != len(body)

    async def fail(self, keyed: Keyed, permit: Permit, reason: str, response: Executed | None = None) -> Answer:
        """Ends an attempt that ended without a whole response, of which `response` may be there: its effect is unknown."""
        record = permit.attempt.record
        if permit.attempt.is_completed:
            own = await self._completed(keyed, permit, Executed(500, [], "release", False), None)
            if own is None:
                await permit.release()
                return self._rolled_back(keyed, permit)
            mark, answer = own
            if answer is None:
                refusal = Refusal("request-in-progress", NOT_FOUND, retry_after=1)
                if mark is None:
                    # The record is complete, and has no response.
                    refusal = Refusal("replay-unavailable")
                answer = keyed.refuse(refusal.about(record))
            return answer
        # A success that was cut off is none of the errors after which nothing took effect.
        has_success = response is not None and response.status < 500 and response.treatment != "release"
        if self.settings.server_errors == "replay" or has_success:
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
def running(attempt: Attempt | None) -> Iterator[None]:
    """The attempt of the code inside, or none."""
    token: contextvars.Token[Any] = CURRENT.set(attempt)
    try:
        yield
    finally:
        CURRENT.reset(token)


def fail_open_fields(keyed: Keyed, settings: Settings, headers: list[Field]) -> list[Field]:
    return http.marked(keyed, http.passed(settings, headers), "failed-open")
