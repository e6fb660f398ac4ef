"""Identifiers of records, tags for operators, and keys derived from business identities.

The computations are those of the contract: a program that shares a store with a sidecar derives the same identifiers.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
import time
import uuid
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

__all__ = [
    "caller_digest",
    "caller_tag",
    "derived_key",
    "downstream_key",
    "key_digest",
    "key_tag",
    "new_key",
    "record_id",
]

CallerParts = Sequence[tuple[str, bytes]]
"""The parts that identify a caller: a kind, such as ``header:authorization``, and its value. Empty: a single tenant."""

SINGLE_TENANT: CallerParts = ()


count = struct.Struct(">Q").pack


def part(data: bytes) -> bytes:
    """The data after its length, so that no separator can collide."""
    return count(len(data)) + data


def caller_digest(caller: CallerParts) -> bytes:
    if not caller:
        return bytes(32)
    pairs = b"".join(part(kind.encode()) + part(value) for kind, value in sorted(caller, key=lambda pair: pair[0]))
    return hashlib.sha256(part(b"oncegate-caller-1") + pairs).digest()


def caller_tag(caller: CallerParts) -> bytes:
    """The 8 bytes by which operators find the records of a caller."""
    return caller_digest(caller)[:8]


def record_id(service: str | None, caller: CallerParts, operation: Sequence[bytes], key: bytes) -> bytes:
    """The 32 bytes that identify a record: of the service, the caller, the operation and the key."""
    owner = caller_digest(caller)
    if service is not None:
        owner = _owner(service, owner)
    parts = b"".join(map(part, [b"oncegate-record-1", owner]))
    return hashlib.sha256(parts + count(len(operation)) + b"".join(map(part, [*operation, key]))).digest()


@lru_cache(maxsize=1024)
def _owner(service: str, caller: bytes) -> bytes:
    return hashlib.sha256(b"".join(map(part, [b"oncegate-service-1", service.encode(), caller]))).digest()


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(part(b"oncegate-key-1") + part(key.lower())).digest()


def key_tag(key: bytes) -> bytes:
    """The 8 bytes by which operators find the records of a key."""
    return key_digest(key)[:8]


def downstream_key(record: bytes, step: str = "") -> str:
    """A key for a call of another service: the same for each attempt of a record and each name."""
    if not isinstance(step, str):
        raise TypeError(f"downstream_key: the name is of type {type(step).__name__}: give a text")
    return _uuid(part(b"oncegate-downstream-1") + part(record) + part(step.encode()))


MAX_SAFE_INTEGER = 2**53 - 1


def _intent_part(value: Any, what: str) -> bytes:
    """A part of a derived key as bytes. Identities that differ must not have one key."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MAX_SAFE_INTEGER:
        value = str(value)
    if not isinstance(value, str):
        raise TypeError(
            f"derived_key: {what} is of type {type(value).__name__}: give a text, or a whole number up to 2^53 - 1; write others "
            "as a text, such as str(order.id)"
        )
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise TypeError(f"derived_key: {what} has half of a surrogate pair") from None


def derived_key(name: str, parts: Iterable[str | int] = ()) -> str:
    """The key of a business identity: the same for the same name and parts, in every process, language and release.

    A part is a text or a whole number, which counts as its digits. Everything else is a TypeError.

    >>> derived_key("order", ["order-123", "v2"])
    'e1dde4ae-4c4e-8443-89b1-ed82fab1773a'
    """
    listed = list(parts)
    if isinstance(parts, str):
        raise TypeError("the parts of a derived key are a list of texts, and not one text: write [part]")
    if not isinstance(name, str):
        raise TypeError(f"derived_key: the name is of type {type(name).__name__}: give a text")
    hashed = part(b"oncegate-intent-1") + part(_intent_part(name, "the name")) + count(len(listed))
    return _uuid(hashed + b"".join(part(_intent_part(own, f"part {at}")) for at, own in enumerate(listed)))


def new_key() -> str:
    """A new key: a UUID of version 7, which is new with each call. Make one per intent, and keep it for its retries."""
    milliseconds = time.time_ns() // 1_000_000 & (1 << 48) - 1
    number = milliseconds << 80 | 7 << 76 | secrets.randbits(12) << 64 | 2 << 62 | secrets.randbits(62)
    return str(uuid.UUID(int=number))


def _uuid(hashed: bytes) -> str:
    bits = bytearray(hashlib.sha256(hashed).digest()[:16])
    bits[6] = bits[6] & 0x0F | 0x80
    bits[8] = bits[8] & 0x3F | 0x80
    return str(uuid.UUID(bytes=bytes(bits)))
