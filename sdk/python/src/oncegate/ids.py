"""Identifiers under an id secret, and the guard of a store against programs with another secret, or with none.

A store belongs to one id secret for its whole life, or to none, because under another one every key is new and each retry
executes again. It says so in a record with a constant identifier, the mark. Sidecars and programs in Rust make and renew the
mark; this library only reads it.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, StoreRefused
from .identity import CallerParts, caller_digest, key_digest, record_id
from .store import StoredRecord

__all__ = ["IdGuard", "IdSecret", "Ids"]

MARK = bytes.fromhex("3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac")
"""The record that says to which id secret a store belongs: SHA-256("oncegate-id-secret-1")."""

_LABEL = b"oncegate-id-1 "
_TEXT = re.compile(r"ogids1_([0-9a-f]{16})_([0-9a-f]{64})")
_OPERATION = re.compile(r"id secret ([0-9a-f]{16}) of this store \(not a request\)")
# A mark on trial lives for 90 s after its lease; one that is there for good lives for 400 days.
_TRIAL_MS = 180_000


class IdSecret:
    """A secret that keys the identifiers of all records of a store. Its `name` is public, and all that is ever shown of it."""

    __slots__ = ("_key", "name")

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise ConfigError("an id secret has 32 bytes")
        self._key = key
        self.name = self.digest(b"name")[:8].hex()

    @classmethod
    def parse(cls, text: str) -> IdSecret:
        """A secret from its text, as `oncegate id-secret new` writes it. Lines that begin with `#` are comments."""
        lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
        if not lines:
            raise ConfigError("id_secret has no id secret in it; `oncegate id-secret new` makes one for a new store")
        if len(lines) > 1:
            raise ConfigError("id_secret has more than one line; a store has one id secret, and it is never replaced")
        found = _TEXT.fullmatch(lines[0])
        if not found:
            raise ConfigError(
                "id_secret has the form ogids1_, the 16 hexadecimal digits of its name, _ and 64 hexadecimal digits; "
                "`oncegate id-secret new` makes one for a new store"
            )
        secret = cls(bytes.fromhex(found[2]))
        if secret.name != found[1]:
            raise ConfigError(
                "the digits of id_secret do not fit its name: it was cut, changed or put together of two secrets"
            )
        return secret

    def digest(self, what: bytes, plain: bytes = b"") -> bytes:
        return hmac.digest(self._key, _LABEL + what + plain, "sha256")

    @property
    def mark_fingerprint(self) -> bytes:
        """The fingerprint of the mark of a store that belongs to this secret."""
        return b"\x01" + self.digest(b"check")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdSecret) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"IdSecret({self.name})"

    def __copy__(self) -> IdSecret:
        return self

    def __deepcopy__(self, _: Any) -> IdSecret:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("an id secret cannot be pickled: it would be written in clear")


@dataclass(frozen=True, slots=True)
class Ids:
    """The computation of what a store gets instead of keys, callers and requests: plain hashes, or keyed ones with a secret."""

    secret: IdSecret | None = None

    @classmethod
    def of(cls, value: Any) -> Ids:
        """The value of the setting `id_secret`."""
        if value is None or isinstance(value, IdSecret):
            return cls(value)
        if not isinstance(value, str):
            # The value is not shown: it may be the secret in another form.
            raise ConfigError(
                f"id_secret is a {type(value).__name__}; give the text that `oncegate id-secret new` prints, or an IdSecret"
            )
        return cls(IdSecret.parse(value))

    def record(self, service: str | None, caller: CallerParts, operation: Sequence[bytes], key: bytes) -> bytes:
        """The 32 bytes that identify a record."""
        plain = record_id(service, caller, operation, key)
        return plain if self.secret is None else self.secret.digest(b"record", plain)

    def caller_tag(self, caller: CallerParts) -> bytes:
        """The 8 bytes by which operators find the records of a caller. Zeros for a single tenant."""
        plain = caller_digest(caller)
        return (plain if self.secret is None or not caller else self.secret.digest(b"caller", plain))[:8]

    def key_tag(self, key: bytes) -> bytes:
        """The 8 bytes by which operators find the records of a key."""
        plain = key_digest(key)
        return (plain if self.secret is None else self.secret.digest(b"key", plain))[:8]

    def fingerprint(self, plain: bytes) -> bytes:
        """The fingerprint to store for this plain one, which is a version and a digest."""
        return plain if self.secret is None else plain[:1] + self.secret.digest(b"compare", plain)


def binds(mark: StoredRecord | None) -> bool:
    """True if a mark in this state binds its store. A program may have released it."""
    return mark is not None and mark.state != "released"


def _is_for_good(mark: StoredRecord) -> bool:
    return mark.state != "in-progress" or mark.expires_at - mark.lease_until > _TRIAL_MS


def _name_in(mark: StoredRecord) -> str:
    found = _OPERATION.fullmatch(mark.operation)
    return found[1] if found else "of another program"


class IdGuard:
    """Judges the mark of one store for a process with these identifiers.

    A process that has found the mark of another secret stays refused until it is started again, even if that mark is gone
    later: the store may have lost it and kept the records.
    """

    def __init__(self, ids: Ids) -> None:
        self.ids = ids
        self.foreign: str | None = None

    def check(self) -> None:
        """Raises :class:`StoreRefused` if the store is known to belong to another secret, so that nothing has to be asked."""
        if self.foreign is not None and self.ids.secret is None:
            raise StoreRefused(self.foreign)

    def judge(self, mark: StoredRecord | None, *, is_own_memory: bool = False) -> None:
        """Raises :class:`StoreRefused` unless the store with this mark has the identifiers that this process computes.

        A store in the memory of this process has no other programs, and needs no mark.
        """
        refusal = self._refusal(mark if binds(mark) else None, is_own_memory)
        if refusal is not None:
            raise StoreRefused(refusal)

    def _refusal(self, mark: StoredRecord | None, is_own_memory: bool) -> str | None:
        secret = self.ids.secret
        if mark is None:
            if self.foreign is not None or secret is None or is_own_memory:
                return self.foreign
            return (
                f"the store does not have the mark of the id secret {secret.name}, and this library does not make it: start a "
                "sidecar with this secret on it once. If the store has records of this secret and lost its mark, "
                "`oncegate id-secret restore` puts it back. Never remove the secret"
            )
        if secret is None:
            self.foreign = (
                f"the store belongs to the id secret {_name_in(mark)}, and this process has none: without it every key would be "
                "new, and retries would execute again. Configure that id secret, or use another store, and start this process "
                "again"
            )
            return self.foreign
        if mark.fingerprint != secret.mark_fingerprint:
            refusal = (
                f"the store belongs to the id secret {_name_in(mark)}, and this process has {secret.name}: with it every key "
                "would be new, and retries would execute again. Configure the id secret of the store, or use another store, and "
                "start this process again"
            )
            # A mark on trial may lapse.
            if _is_for_good(mark):
                self.foreign = refusal
            return refusal
        self.foreign = None
        if not _is_for_good(mark):
            return (
                f"the store is new to the id secret {secret.name}, and a program with it waits until all others have noticed: "
                "this process uses the store when that has ended"
            )
        return None
