"""The effect and its record in one transaction of PostgreSQL: both are committed, or neither is."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from .engine import Attempt, Policy, Reply
from .errors import ConfigError, OncegateError, StaleAttempt, StoreUnavailable
from .flow import current_attempt
from .functions import JSON, VALUE, Function, checked_key, input_fingerprint
from .identity import caller_tag, key_tag
from .postgres import data, percent, sqlstate
from .response import StoredResponse
from .runtime import run_blocking
from .settings import seconds

__all__ = ["blocking_transaction", "complete", "complete_blocking", "sidecar_attempt", "transaction"]

RESERVE = (
    "SELECT transaction, outcome, token, attempts, after_abandoned, lease_left_ms, response "
    "FROM oncegate.reserve_or_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
COMPLETE_RESERVED = "SELECT oncegate.complete_reserved($1, $2, $3, $4, $5, $6, $7, $8)"
COMPLETE = "SELECT oncegate.complete($1, $2, $3)"
_UNSET: Any = object()


class TransactionAttempt:
    """One run of a transaction under a key."""

    def __init__(self, function: Function, key: str, fingerprint: bytes) -> None:
        self._function, self._key, self._fingerprint = function, key, fingerprint
        self._transaction: int | None = None
        self._token = 0
        self._value: Any = _UNSET
        self.record = function.record(key)
        """The identifier of the record: 32 bytes."""
        self.is_replayed = False
        """True if an earlier transaction was committed under this key. Then `value` is its value; write nothing."""

    @property
    def value(self) -> Any:
        """The value that was stored, by an earlier transaction or by :meth:`complete`."""
        return None if self._value is _UNSET else self._value

    def complete(self, value: Any = None) -> Any:
        """Sets the value that is committed with the transaction. Later calls get it."""
        if self.is_replayed:
            raise OncegateError("the transaction was committed before: look at `is_replayed`, and write nothing")
        self._value = value
        return value

    def _claim_arguments(self) -> tuple[Any, ...]:
        policy = self._function.policy
        return (
            self.record,
            secrets.token_bytes(16),
            self._fingerprint,
            policy.lease_ms,
            policy.retention_ms,
            "reexecute",
            caller_tag(self._function.caller),
            self._function.name,
            key_tag(self._key.encode()),
        )

    def _claimed(self, row: Any) -> None:
        transaction, outcome, token, _, _, lease_left_ms, response = row
        self._transaction = transaction
        if transaction is not None:
            return
        if outcome == "execute":
            self._token = token
            return
        if outcome == "locked":
            outcome = "in-progress"
        reply = Reply(outcome, data(response) or b"", (lease_left_ms or 0) / 1000)
        self._value = self._function.replayed(reply)
        self.is_replayed = True

    def _completion(self) -> tuple[str, tuple[Any, ...]]:
        body = json.dumps(self._function.encode(self.value), allow_nan=False, ensure_ascii=False).encode()
        response = StoredResponse(VALUE, JSON, body).encode()
        if self._transaction is None:
            return COMPLETE, (self.record, self._token, response)
        return COMPLETE_RESERVED, (
            self.record,
            self._transaction,
            self._fingerprint,
            response,
            self._function.policy.retention_ms,
            caller_tag(self._function.caller),
            self._function.name,
            key_tag(self._key.encode()),
        )


def _read_error(error: Exception) -> Exception:
    """The error of this library for that of a driver, or the same error."""
    match sqlstate(error):
        case "OG001":
            return StaleAttempt(
                "another attempt owns the record, or this one has ended: the transaction is rolled back"
            )
        case "OG002":
            return StaleAttempt("another transaction holds the record: this one is rolled back; run it again later")
        case "3F000" | "42883":
            return StoreUnavailable(
                "the database does not have the contract: run `oncegate schema apply postgres --url …`", is_unsent=True
            )
        case "42501":
            return StoreUnavailable("the role lacks a right in the schema oncegate: see the grants of the contract")
    return error


class _Connection:
    """A connection of psycopg, asyncpg or SQLAlchemy, as this module uses it."""

    def __init__(self, connection: Any, *, blocking: bool) -> None:
        self.own = connection
        module, name = type(connection).__module__, type(connection).__name__
        self._names = "psycopg"
        if module.startswith("asyncpg"):
            self._names = "asyncpg"
        elif module.startswith("sqlalchemy"):
            self._names = "sqlalchemy"
        elif not module.startswith("psycopg"):
            raise ConfigError(
                f"transaction() needs a connection of psycopg, asyncpg or SQLAlchemy, and not {module}.{name}"
            )
        is_async = name.startswith("Async") or self._names == "asyncpg"
        if is_async == blocking:
            other = "transaction()" if is_async else "blocking_transaction()"
            raise ConfigError(f"{module}.{name} is {'asynchronous' if is_async else 'blocking'}: use {other}")

    def in_transaction(self) -> bool:
        match self._names:
            case "asyncpg":
                return bool(self.own.is_in_transaction())
            case "sqlalchemy":
                return bool(self.own.in_transaction())
            case _:
                return int(self.own.info.transaction_status) != 0

    def check(self) -> None:
        if self.in_transaction():
            raise ConfigError(
                "the connection has a transaction already, in which the record would be in a savepoint: give transaction() a "
                "connection outside of a transaction"
            )

    def begin(self) -> Any:
        if self._names == "sqlalchemy":
            return self.own.begin()
        return self.own.transaction()

    def _statement(self, statement: str, arguments: tuple[Any, ...]) -> Callable[[], Any]:
        if self._names == "asyncpg":
            return lambda: self.own.fetchrow(statement, *arguments)
        if self._names == "sqlalchemy":
            from sqlalchemy import LargeBinary, bindparam, text

            named = {f"p{at + 1}": value for at, value in enumerate(arguments)}
            for at in range(len(arguments), 0, -1):
                statement = statement.replace(f"${at}", f":p{at}")
            typed = text(statement).bindparams(
                *(bindparam(name, type_=LargeBinary) for name, value in named.items() if isinstance(value, bytes))
            )
            return lambda: self.own.execute(typed, named)
        return lambda: self.own.execute(percent(statement), arguments)

    async def row(self, statement: str, arguments: tuple[Any, ...]) -> Any:
        result = await self._statement(statement, arguments)()
        if self._names == "psycopg":
            return await result.fetchone()
        return result.fetchone() if self._names == "sqlalchemy" else result

    def blocking_row(self, statement: str, arguments: tuple[Any, ...]) -> Any:
        return self._statement(statement, arguments)().fetchone()


def _attempt(key: Any, options: dict[str, Any]) -> TransactionAttempt:
    own = checked_key(key)
    caller = options.get("caller")
    policy = Policy(
        seconds("lease", options.get("lease", 60), 0.1, 3600),
        seconds("retention", options.get("retention", 86_400), 1, 400 * 86_400),
    )
    function = Function(
        options["name"],
        None,
        options.get("service"),
        ((caller[0], caller[1].encode()),) if caller else (),
        policy,
        lambda _: "unknown",
        lambda value: value,
        lambda value: value,
    )
    return TransactionAttempt(function, own, input_fingerprint(options.get("input")))


@asynccontextmanager
async def transaction(connection: Any, key: Any, *, name: str, **options: Any) -> AsyncIterator[TransactionAttempt]:
    """A transaction that takes effect once for its key::

        async with oncegate.transaction(connection, order.id, name="charge", input=order.total) as attempt:
            if not attempt.is_replayed:
                await connection.execute("INSERT INTO payments VALUES (%s)", (order.total,))
                attempt.complete({"charged": order.total})
        return attempt.value

    The connection is one of psycopg, asyncpg or SQLAlchemy, outside of a transaction. `name` is the operation; `input` is what
    must be equal in two calls with one key. Further options: `service`, `caller`, `lease`, `retention`. An exception rolls back,
    and the key is free. A commit after another attempt took over raises :class:`StaleAttempt`, and is rolled back.
    """
    own = _Connection(connection, blocking=False)
    own.check()
    attempt = _attempt(key, {"name": name, **options})
    try:
        async with own.begin():
            attempt._claimed(await own.row(RESERVE, attempt._claim_arguments()))
            yield attempt
            if not attempt.is_replayed:
                row = await own.row(*attempt._completion())
                _check_completed(attempt, row)
    except Exception as error:
        read = _read_error(error)
        if read is error:
            raise
        raise read from error


@contextmanager
def blocking_transaction(connection: Any, key: Any, *, name: str, **options: Any) -> Iterator[TransactionAttempt]:
    """:func:`transaction` for blocking connections of psycopg and SQLAlchemy."""
    own = _Connection(connection, blocking=True)
    own.check()
    attempt = _attempt(key, {"name": name, **options})
    try:
        with own.begin():
            attempt._claimed(own.blocking_row(RESERVE, attempt._claim_arguments()))
            yield attempt
            if not attempt.is_replayed:
                _check_completed(attempt, own.blocking_row(*attempt._completion()))
    except Exception as error:
        read = _read_error(error)
        if read is error:
            raise
        raise read from error


def _check_completed(attempt: TransactionAttempt, row: Any) -> None:
    if attempt._transaction is not None and row[0] is None:
        raise StaleAttempt(
            "an earlier transaction with this number was committed without its record: its outcome is unknown"
        )


# Completing the record of a request


def sidecar_attempt(headers: Mapping[str, str]) -> Attempt | None:
    """The attempt in the header fields of a request that comes from a sidecar. None: the request has no key.

    Only a sidecar can set these fields, and only if nothing else reaches the service.
    """
    fields = {name.lower(): value for name, value in headers.items()}
    record, token = fields.get("oncegate-record"), fields.get("oncegate-token")
    if record is None or token is None:
        return None
    try:
        found = bytes.fromhex(record)
        if len(found) != 32:
            raise ValueError
        return Attempt(found, int(token), int(fields.get("oncegate-attempt", "1")))
    except ValueError as error:
        raise ConfigError("the fields Oncegate-Record and Oncegate-Token do not come from a sidecar") from error


async def complete(connection: Any, attempt: Attempt | None = None, response: StoredResponse | None = None) -> None:
    """Completes the record of a request in the transaction of `connection`: call it last, before the commit.

    `attempt` is that of the middleware by default, or :func:`sidecar_attempt`. With `response`, retries get it from the commit
    on; without, they get the response that is sent. Raises :class:`StaleAttempt` if another attempt owns the record: roll back.
    A request without a key has no attempt, and nothing happens.
    """
    await _complete(_Connection(connection, blocking=False), attempt, response, blocking=False)


def complete_blocking(connection: Any, attempt: Attempt | None = None, response: StoredResponse | None = None) -> None:
    """:func:`complete` for blocking connections."""
    run_blocking(_complete(_Connection(connection, blocking=True), attempt, response, blocking=True))


async def _complete(
    own: _Connection, attempt: Attempt | None, response: StoredResponse | None, *, blocking: bool
) -> None:
    attempt = attempt or current_attempt()
    if attempt is None:
        return
    if not own.in_transaction():
        raise ConfigError("complete() belongs into the transaction of the effect: begin one first")
    arguments = (attempt.record, attempt.token, response.encode() if response else None)
    attempt.is_completed = True
    try:
        if blocking:
            own.blocking_row(COMPLETE, arguments)
        else:
            await own.row(COMPLETE, arguments)
    except Exception as error:
        read = _read_error(error)
        if read is error:
            raise
        raise read from error
