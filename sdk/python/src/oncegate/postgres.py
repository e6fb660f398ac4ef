"""A store in PostgreSQL, by its contract: every decision is made by the functions in the schema `oncegate`."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ._contract import contract
from .errors import ConfigError, RecordCorrupt, StoreError, StoreUnavailable
from .store import Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["PostgresStore"]

CLAIM = (
    "SELECT outcome, token, attempts, after_abandoned, lease_left_ms, response "
    "FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
RENEW = "SELECT outcome FROM oncegate.renew($1, $2, $3, $4)"
COMPLETE = "SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)"
RELEASE = "SELECT outcome FROM oncegate.release($1, $2, $3)"
LOOKUP = "SELECT state, fingerprint, token, attempt, response, by_operator FROM oncegate.lookup($1)"
VERSION = "SELECT oncegate.contract_version()"
Row = Any
_PARAMETER = re.compile(r"\$\d+")


def sqlstate(error: BaseException) -> str | None:
    """The SQLSTATE of a driver's error."""
    for own in (error, getattr(error, "orig", None), getattr(error, "__cause__", None)):
        for name in ("sqlstate", "pgcode"):
            state = getattr(own, name, None)
            if isinstance(state, str):
                return state
    return None


def percent(statement: str) -> str:
    """The statement with the parameters of psycopg. They stand in their order in all statements."""
    return _PARAMETER.sub("%s", statement)


def data(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


class PostgresStore:
    """A store over your pool: `psycopg_pool.AsyncConnectionPool`, `asyncpg.Pool`, or for blocking programs
    `psycopg_pool.ConnectionPool`.

    The database needs the contract (`oncegate schema apply postgres`), and your role the rights to call its functions.
    """

    def __init__(self, pool: Any) -> None:
        module, name = type(pool).__module__, type(pool).__name__
        if module.startswith("asyncpg"):
            self._row: Callable[[str, tuple[Any, ...]], Any] = self._asyncpg
            self.is_blocking = False
        elif hasattr(pool, "connection") and hasattr(pool, "getconn"):
            self.is_blocking = "Async" not in name
            self._row = self._psycopg_blocking if self.is_blocking else self._psycopg
        else:
            raise ConfigError(
                f"PostgresStore needs a pool of psycopg_pool or asyncpg, and not {module}.{name}: write "
                "PostgresStore(psycopg_pool.AsyncConnectionPool(url))"
            )
        self.pool = pool

    async def _psycopg(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        async with self._acquired(self.pool.connection()) as connection:
            cursor = await connection.execute(percent(statement), arguments)
            return await cursor.fetchone()

    async def _psycopg_blocking(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        with self.pool.connection() as connection:
            return connection.execute(percent(statement), arguments).fetchone()

    async def _asyncpg(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        async with self._acquired(self.pool.acquire()) as connection:
            return await connection.fetchrow(statement, *arguments)

    @asynccontextmanager
    async def _acquired(self, connection: Any) -> AsyncIterator[Any]:
        async with connection as own:
            yield own

    async def _query(self, statement: str, arguments: tuple[Any, ...] = ()) -> Row:
        try:
            return await self._row(statement, arguments)
        except StoreError:
            raise
        except Exception as error:
            raise self._read_error(error) from error

    def _read_error(self, error: Exception) -> StoreError:
        state = sqlstate(error)
        name = type(error).__name__
        match state:
            case "OG003":
                return RecordCorrupt("the record has a state or a version that this contract does not know")
            case "42501":
                return StoreUnavailable("the role lacks a right in the schema oncegate: see the grants of the contract")
            case "3F000" | "42883":
                return StoreUnavailable(
                    "the database does not have the contract: run `oncegate schema apply postgres --url …`",
                    is_unsent=True,
                )
            case "22023":
                return StoreUnavailable("the contract refused an argument of this library", is_unsent=True)
            case "53100" | "53200" | "25006":
                return StoreUnavailable("PostgreSQL is full, or only reads", is_full=True)
        is_unsent = name in ("PoolTimeout", "TooManyRequests", "PoolClosed")
        return StoreUnavailable(f"PostgreSQL did not answer ({state or name})", is_unsent=is_unsent)

    async def verify(self) -> None:
        row = await self._query(VERSION)
        needed = contract()["postgres_version"]
        if row[0] != needed:
            what = "run `oncegate schema apply postgres`" if row[0] < needed else "upgrade this library"
            raise StoreUnavailable(
                f"the contract in the database has version {row[0]}, and this library needs {needed}: {what}",
                is_unsent=True,
            )

    async def claim(self, claim: Claim) -> Claimed:
        row = await self._query(
            CLAIM,
            (
                claim.record,
                claim.attempt,
                claim.fingerprint,
                claim.lease_ms,
                claim.retention_ms,
                claim.on_abandoned,
                claim.caller,
                claim.operation,
                claim.key_tag,
            ),
        )
        return claimed(row)

    async def renew(self, record: bytes, token: int, lease_ms: int, retention_ms: int) -> Settled:
        settled: Settled = (await self._query(RENEW, (record, token, lease_ms, retention_ms)))[0]
        return settled

    async def complete(
        self, record: bytes, token: int, state: EndState, response: bytes | None, retention_ms: int
    ) -> Settled:
        settled: Settled = (await self._query(COMPLETE, (record, token, state, response, retention_ms)))[0]
        return settled

    async def release(self, record: bytes, token: int, retention_ms: int) -> Settled:
        settled: Settled = (await self._query(RELEASE, (record, token, retention_ms)))[0]
        return settled

    async def lookup(self, record: bytes) -> StoredRecord | None:
        row = await self._query(LOOKUP, (record,))
        if row is None or row[0] is None:
            return None
        return StoredRecord(row[0], bytes(row[1]), row[2], data(row[3]), data(row[4]), bool(row[5]))


def claimed(row: Row) -> Claimed:
    outcome, token, attempts, after_abandoned, lease_left_ms, response = row
    return Claimed(outcome, token or 0, attempts or 0, bool(after_abandoned), lease_left_ms or 0, data(response) or b"")
