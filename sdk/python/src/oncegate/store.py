"""What a store does, whatever it is: the commands of the protocol, and their outcomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

__all__ = ["Claim", "Claimed", "Settled", "Store", "StoredRecord"]

PURGE_ROWS = 1000
"""The most records that one purge removes."""

OnAbandoned = Literal["park", "reexecute", "reconcile"]
EndState = Literal["completed", "awaited", "tombstone", "unknown"]
Settled = Literal["completed", "released", "renewed", "fenced", "locked"]


@dataclass(slots=True)
class Claim:
    """A request for permission to execute. It does not change, and is sent again as it is if its reply was lost."""

    record: bytes
    attempt: bytes
    fingerprint: bytes
    lease_ms: int
    retention_ms: int
    on_abandoned: OnAbandoned
    caller: bytes = bytes(8)
    operation: str = ""
    key_tag: bytes | None = None


@dataclass(slots=True)
class Claimed:
    """The reply to a claim. It does not change."""

    outcome: Literal["execute", "replay", "in-progress", "mismatch", "unknown", "unreplayable", "locked"]
    token: int = 0
    attempts: int = 0
    after_abandoned: bool = False
    lease_left_ms: int = 0
    response: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record, as far as this library needs it."""

    state: str
    fingerprint: bytes
    token: int
    attempt: bytes | None = None
    response: bytes | None = field(default=None, repr=False)
    by_operator: bool = False
    # Of the mark of an id secret; zero or empty if the store does not say it.
    lease_until: int = 0
    expires_at: int = 0
    operation: str = ""


class Store(Protocol):
    """A store of records. Its methods raise :class:`oncegate.StoreError`, and never guess.

    `is_blocking` is true if its methods wait in the calling thread: then they never suspend, although they are declared
    `async`, and an asynchronous program calls them in threads.
    """

    @property
    def is_blocking(self) -> bool: ...

    async def verify(self) -> None:
        """Checks that the store has the version of the contract that this library needs."""

    async def claim(self, claim: Claim) -> Claimed: ...

    async def renew(self, record: bytes, token: int, lease_ms: int, retention_ms: int) -> Settled: ...

    async def complete(
        self, record: bytes, token: int, state: EndState, response: bytes | None, retention_ms: int
    ) -> Settled: ...

    async def release(self, record: bytes, token: int, retention_ms: int) -> Settled: ...

    async def lookup(self, record: bytes) -> StoredRecord | None: ...
