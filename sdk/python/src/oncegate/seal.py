"""Sealing: responses are encrypted before they reach the store. Needs the package `cryptography`.

The format is that of all libraries and sidecars: AES-256-GCM under a key that is derived for each response.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from .errors import ConfigError, RecordCorrupt, ResponseSealed
from .response import DecodeError, StoredResponse
from .store import Claim, Claimed, EndState, Settled, Store, StoredRecord

__all__ = ["SealKey", "SealKeys", "SealedStore", "open_sealed", "seal"]

_LABEL = b"oncegate-seal-1"
_MAGIC = b"\0ogseal\x01"
_KEY = re.compile(r"ogseal1_([0-9a-f]{16})_([0-9a-f]{64})")
_LEAST = 73
OWNER, OPERATOR = 1, 2
FIELD = "oncegate-sealed"


def _derive(key: bytes, info: bytes, length: int) -> bytes:
    """HKDF-Expand of RFC 5869 with SHA-256, for at most 32 bytes."""
    return hmac.digest(key, info + b"\x01", "sha256")[:length]


@dataclass(frozen=True, slots=True, repr=False)
class SealKey:
    """A key that seals and opens."""

    secret: bytes

    @classmethod
    def parse(cls, text: str) -> SealKey:
        """A key from its text, as `oncegate seal-key new` prints it."""
        found = _KEY.fullmatch(text.strip())
        if not found:
            raise ConfigError("a seal key is a text such as ogseal1_…, with 16 and 64 hexadecimal digits")
        key = cls(bytes.fromhex(found[2]))
        if key.id.hex() != found[1]:
            raise ConfigError("the seal key has a slip: its digits do not fit to its id")
        return key

    @property
    def id(self) -> bytes:
        return _derive(self.secret, _LABEL + b" id", 8)

    def __repr__(self) -> str:
        return f"SealKey({self.id.hex()})"


def context(part: int, record: bytes, token: int, more: bytes = b"") -> bytes:
    return _LABEL + bytes([part]) + record + struct.pack(">Q", token) + more


def seal(key: SealKey, part: int, record: bytes, token: int, plaintext: bytes, more: bytes = b"") -> bytes:
    """The sealed form of a part of a record. `more` is what a step, a journal or a dead letter is bound to in addition."""
    bound = context(part, record, token, more)
    salt_key = _derive(key.secret, _LABEL + b" salt", 32)
    salt = hmac.digest(salt_key, struct.pack(">Q", len(bound)) + bound + plaintext, hashlib.sha256)
    cipher = AESGCM(_derive(key.secret, _LABEL + b" data" + salt, 32))
    head = _MAGIC + key.id + bytes([part]) + struct.pack(">Q", token) + salt
    return head + cipher.encrypt(bytes(12), plaintext, bound)


def open_sealed(keys: Iterable[SealKey], record: bytes, sealed: bytes, more: bytes = b"") -> tuple[int, int, bytes]:
    """The part, the token and the plaintext of a sealed form."""
    if len(sealed) < _LEAST or not sealed.startswith(_MAGIC):
        raise RecordCorrupt("the record is sealed in a form that this library does not know")
    key = next((own for own in keys if hmac.compare_digest(own.id, sealed[8:16])), None)
    if key is None:
        raise ResponseSealed(f"the seal key {sealed[8:16].hex()} is missing: add it to the keys of this process")
    part, token, salt = sealed[16], struct.unpack(">Q", sealed[17:25])[0], sealed[25:57]
    cipher = AESGCM(_derive(key.secret, _LABEL + b" data" + salt, 32))
    try:
        return part, token, cipher.decrypt(bytes(12), sealed[57:], context(part, record, token, more))
    except InvalidTag as error:
        raise RecordCorrupt("the sealed response was changed or moved") from error


class SealKeys:
    """The keys of a program: the first seals, all open.

    With `required`, responses in clear are refused: set it when no record from before the sealing is left. With `opens_only`,
    nothing is sealed.
    """

    def __init__(self, keys: Iterable[SealKey | str], *, required: bool = False, opens_only: bool = False) -> None:
        self.keys = tuple(key if isinstance(key, SealKey) else SealKey.parse(key) for key in keys)
        if not self.keys:
            raise ConfigError("sealing needs at least one key")
        self.required, self.opens_only = required, opens_only

    @classmethod
    def of(cls, keys: SealKeys | Iterable[SealKey | str]) -> SealKeys:
        return keys if isinstance(keys, SealKeys) else cls(keys)

    def seal_response(self, record: bytes, token: int, encoded: bytes) -> bytes:
        """The sealed form of the response of an owner, which is a stored response itself. Unchanged if the keys only open."""
        if self.opens_only:
            return encoded
        sealed = seal(self.keys[0], OWNER, record, token, encoded)
        return StoredResponse(500, ((FIELD, b"1"),), sealed).encode()

    def open_response(self, record: bytes, encoded: bytes, writer: StoredRecord | None = None) -> bytes:
        """The response that was sealed for this record. `writer` is the whole record, if it is known: it must have written it."""
        if not _is_sealed(encoded):
            if self.required:
                raise ResponseSealed("the stored response is not sealed, and must be")
            return encoded
        part, token, plaintext = open_sealed(self.keys, record, StoredResponse.decode(encoded).body)
        is_response = part in (OWNER, OPERATOR)
        if writer is not None:
            is_response = part == OPERATOR if writer.by_operator else (part, token) == (OWNER, writer.token)
        if not is_response:
            raise RecordCorrupt("the sealed response does not belong to this attempt")
        return plaintext


class SealedStore:
    """A store whose responses are sealed with the first of the keys, and opened with any of them."""

    def __init__(self, store: Store, keys: SealKeys | Iterable[SealKey | str]) -> None:
        self.store, self.seal_keys = store, SealKeys.of(keys)
        self.keys = self.seal_keys.keys
        self.is_blocking = store.is_blocking
        self.is_immediate = bool(getattr(store, "is_immediate", False))
        self.is_prompt = bool(getattr(store, "is_prompt", False))
        self.part_of = getattr(store, "part_of", lambda _: "")
        if hasattr(store, "purge"):
            self.purge = store.purge

    async def verify(self) -> None:
        await self.store.verify()

    async def claim(self, claim: Claim) -> Claimed:
        claimed = await self.store.claim(claim)
        if claimed.outcome != "replay":
            return claimed
        if not _is_sealed(claimed.response):
            return replace(claimed, response=self.seal_keys.open_response(claim.record, claimed.response))
        # The record tells who wrote the response, and under which token.
        record = await self.store.lookup(claim.record)
        if record is None or record.response is None:
            raise RecordCorrupt("the sealed response is not there any more")
        return replace(claimed, response=self._open(claim.record, record))

    def _open(self, record: bytes, found: StoredRecord) -> bytes:
        return self.seal_keys.open_response(record, found.response or b"", found)

    async def renew(self, record: bytes, token: int, lease_ms: int, retention_ms: int) -> Settled:
        return await self.store.renew(record, token, lease_ms, retention_ms)

    async def complete(
        self, record: bytes, token: int, state: EndState, response: bytes | None, retention_ms: int
    ) -> Settled:
        if response is not None:
            response = self.seal_keys.seal_response(record, token, response)
        return await self.store.complete(record, token, state, response, retention_ms)

    async def release(self, record: bytes, token: int, retention_ms: int) -> Settled:
        return await self.store.release(record, token, retention_ms)

    async def lookup(self, record: bytes) -> StoredRecord | None:
        found = await self.store.lookup(record)
        return (
            found if found is None else replace(found, response=self._open(record, found) if found.response else None)
        )


def _is_sealed(encoded: bytes) -> bool:
    try:
        response = StoredResponse.decode(encoded)
    except DecodeError as error:
        raise RecordCorrupt("the stored response cannot be read") from error
    return any(name == FIELD for name, _ in response.headers)
