"""The errors of this library. None of them has a key, a credential or a body in its text."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "InProgress",
    "KeyReused",
    "OncegateError",
    "OutcomeUnknown",
    "RecordCorrupt",
    "ResponseSealed",
    "StaleAttempt",
    "StoreError",
    "StoreUnavailable",
    "Undecodable",
    "Unreplayable",
]


class OncegateError(Exception):
    """The base of all errors of this library."""


class ConfigError(OncegateError, ValueError):
    """A setting is wrong. The text names the setting, and what to write instead."""


class StoreError(OncegateError):
    """The store could not decide. Nothing was executed."""


class StoreUnavailable(StoreError):
    """The store is out of reach, or has no space (`is_full`). `is_unsent` is true if it certainly applied no command."""

    def __init__(self, text: str, *, is_unsent: bool = False, is_full: bool = False) -> None:
        super().__init__(text)
        self.is_unsent = is_unsent or is_full
        self.is_full = is_full


class RecordCorrupt(StoreError):
    """The record cannot be read, so its operation is never executed. An operator has to look at it."""


class ResponseSealed(StoreError):
    """The stored response is sealed, and this process does not have the key to it."""


class KeyReused(OncegateError):
    """The key was used before with another input. A new operation needs a new key."""


class InProgress(OncegateError):
    """Another call with this key is running. Try again later with the same key."""

    def __init__(self, text: str, *, retry_after: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class OutcomeUnknown(OncegateError):
    """It is not known if an earlier call with this key took effect, so it is not run again. Find out what happened."""


class Unreplayable(OncegateError):
    """The operation was done, and its result was not stored. It is never run again."""


class Undecodable(OncegateError):
    """The operation was done, and this program cannot read its stored result. It is never run again."""


class StaleAttempt(OncegateError):
    """Another attempt owns the record, or this one has ended: the transaction must be rolled back."""
