"""A store in the memory of this process, for tests and examples. Other processes do not see its records."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from . import decide
from .errors import StoreUnavailable
from .store import Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["MemoryStore"]

# A running attempt that ends gets no new entry for its expiry, unless that is sooner than its first one by more than this.
_EARLIER_MS = 60_000


class MemoryStore:
    """A store in memory, for tests. It works in asynchronous and in blocking programs, and in threads.

    A restart forgets everything, and other processes do not see its records, so that a retry after the restart, or in
    another worker process, executes again: use PostgreSQL or Redis for what matters.
    """

    is_blocking = False
    is_immediate = True
    """Its methods never wait, so that they need neither a thread nor a time limit."""

    def __init__(
        self,
        *,
        clock: Callable[[], int] | None = None,
        max_records: int = 1_000_000,
        max_bytes: int = 256 * 1024 * 1024,
    ) -> None:
        # Beyond these limits, new keys are refused. `max_bytes` counts the responses.
        self.max_records, self.max_bytes = max_records, max_bytes
        self._bytes = 0
        started, epoch = time.monotonic_ns(), time.time_ns()
        self._clock = clock or (lambda: (epoch + time.monotonic_ns() - started) // 1_000_000)
        self._records: dict[bytes, decide.Record] = {}
        self._expiries: list[tuple[int, bytes]] = []
        # The entry of each record that counts. An earlier one takes the place of a later one, which is then skipped.
        self._listed: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._records)

    async def verify(self) -> None:
        """There is nothing to check."""

    async def claim(self, claim: Claim) -> Claimed:
        outcome = self._apply(
            claim.record,
            decide.claim,
            attempt=claim.attempt,
            fingerprint=claim.fingerprint,
            lease_ms=claim.lease_ms,
            retention_ms=claim.retention_ms,
            on_abandoned=claim.on_abandoned,
            caller=claim.caller,
            operation=claim.operation,
            key_tag=claim.key_tag,
        )
        outcome.pop("lease_until", None)
        return Claimed(**outcome)

    async def renew(self, record: bytes, token: int, lease_ms: int, retention_ms: int) -> Settled:
        return self._settle(record, decide.renew, token=token, lease_ms=lease_ms, retention_ms=retention_ms)

    async def complete(
        self, record: bytes, token: int, state: EndState, response: bytes | None, retention_ms: int
    ) -> Settled:
        return self._settle(
            record, decide.complete, token=token, state=state, response=response, retention_ms=retention_ms
        )

    async def release(self, record: bytes, token: int, retention_ms: int) -> Settled:
        return self._settle(record, decide.release, token=token, retention_ms=retention_ms)

    async def lookup(self, record: bytes) -> StoredRecord | None:
        with self._lock:
            found = self._records.get(record)
            if found is None or self._clock() >= found.expires_at:
                return None
            return StoredRecord(
                found.state,
                found.fingerprint,
                found.token,
                found.attempt or None,
                found.response,
                found.by_operator,
                found.lease_until or 0,
                found.expires_at,
                found.operation,
            )

    def _settle(self, record: bytes, command: Callable[..., decide.Decision], **arguments: Any) -> Settled:
        settled: Settled = self._apply(record, command, **arguments)["outcome"]
        return settled

    def _apply(self, record: bytes, command: Callable[..., decide.Decision], **arguments: Any) -> dict[str, Any]:
        with self._lock:
            now = self._clock()
            self._purge(now)
            outcome, new = command(self._records.get(record), now, **arguments)
            if new is not None:
                known = self._records.get(record)
                if known is None and (len(self._records) >= self.max_records or self._bytes >= self.max_bytes):
                    raise StoreUnavailable("the store in memory has no space for new keys", is_full=True)
                self._bytes += _size(new) - _size(known)
                self._records[record] = new
                listed = self._listed.get(record)
                if listed is None or new.expires_at < listed - _EARLIER_MS:
                    self._list(new.expires_at, record)
            return outcome

    def _list(self, expires_at: int, record: bytes) -> None:
        self._listed[record] = expires_at
        heapq.heappush(self._expiries, (expires_at, record))

    def _purge(self, now: int) -> None:
        # A few at a time: no command waits for a long purge. An entry may be too early.
        for _ in range(4):
            if not self._expiries or self._expiries[0][0] > now:
                return
            expires_at, record = heapq.heappop(self._expiries)
            if self._listed.get(record) != expires_at:
                continue
            found = self._records[record]
            if found.expires_at > expires_at:
                self._list(found.expires_at, record)
                continue
            if now < found.expires_at + 600_000 and found.response is not None:
                # What is kept a while longer is its token, and not its response.
                self._bytes -= _size(found)
                self._records[record] = decide.replace(found, response=None)
            if now < found.expires_at + 600_000:
                self._list(found.expires_at + 600_000, record)
            else:
                self._bytes -= _size(found)
                del self._records[record], self._listed[record]


def _size(record: decide.Record | None) -> int:
    return 0 if record is None or record.response is None else len(record.response)
