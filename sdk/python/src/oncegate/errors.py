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
    "StoreRefused",
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
    """The store is out of reach, or has no space (`is_full`). `is_unsent` is true if it certainly applied no command, and
    `is_reached` if its server has answered, with an error, or had taken a connection that broke (`is_broken`), or if the error is
    that of this process, or if another attempt owns the record. A call of which the connection broke may be sent again on another
    one.

    A server that was reached is no outage, so `store_outage="open"` does not execute. `timed_out` names the limit of its client
    that has run out: that for a connection (`"connect"`), or that for a command (`"command"`).
    """

    def __init__(
        self,
        text: str,
        *,
        is_unsent: bool = False,
        is_full: bool = False,
        is_reached: bool = False,
        is_broken: bool = False,
        timed_out: str = "",
    ) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.is_unsent = is_unsent or is_full
        self.is_full = is_full
        self.is_broken = is_broken
        self.is_reached = is_reached or is_full or is_broken


class StoreRefused(StoreUnavailable):
    """The store answers and cannot be used as it is: it belongs to an id secret, the contract or a right is missing, it evicts.

    That is no outage, so `store_outage="open"` does not execute either.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, is_unsent=True, is_reached=True)


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
