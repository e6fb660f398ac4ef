"""A store in the memory of this process, for tests and examples. Other processes do not see its records."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from typing import Any

from . import decide
from .store import Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["MemoryStore"]


class MemoryStore:
    """A store in memory, for tests. It works in asynchronous and in blocking programs, and in threads.

    A restart forgets everything, so a retry after it executes again: use PostgreSQL or Redis for what matters.
    """

    is_blocking = False
    is_immediate = True
    """Its methods never wait, so that they need neither a thread nor a time limit."""

    def __init__(self, *, clock: Callable[[], int] | None = None) -> None:
        started, epoch = time.monotonic_ns(), time.time_ns()
        self._clock = clock or (lambda: (epoch + time.monotonic_ns() - started) // 1_000_000)
        self._records: dict[bytes, decide.Record] = {}
        self._expiries: list[tuple[int, bytes]] = []
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
                found.state, found.fingerprint, found.token, found.attempt or None, found.response, found.by_operator
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
                self._records[record] = new
                heapq.heappush(self._expiries, (new.expires_at, record))
            return outcome

    def _purge(self, now: int) -> None:
        # A few at a time: no command waits for a long purge. Renewed records have several entries, of which the last counts.
        for _ in range(4):
            if not self._expiries or self._expiries[0][0] > now - 600_000:
                return
            expires_at, record = heapq.heappop(self._expiries)
            found = self._records.get(record)
            if found is not None and found.expires_at == expires_at:
                del self._records[record]
