"""A store in PostgreSQL, by its contract: every decision is made by the functions in the schema `oncegate`."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any

from ._contract import contract
from .errors import ConfigError, RecordCorrupt, StoreError, StoreRefused, StoreUnavailable
from .runtime import CALL, Call, is_used_up, numbers_of, says_away
from .store import PURGE_ROWS, Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["PostgresStore"]

CLAIM = (
    "SELECT outcome, token, attempts, after_abandoned, lease_left_ms, response "
    "FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
RENEW = "SELECT outcome FROM oncegate.renew($1, $2, $3, $4)"
COMPLETE = "SELECT outcome FROM oncegate.complete_if_owner($1, $2, $3, $4, $5)"
RELEASE = "SELECT outcome FROM oncegate.release($1, $2, $3)"
LOOKUP = (
    "SELECT state, fingerprint, token, attempt, response, by_operator, lease_until, expires_at, operation "
    "FROM oncegate.lookup($1)"
)
VERSION = "SELECT oncegate.contract_version()"
PURGE = "SELECT purged FROM oncegate.purge($1)"
MISSING_RIGHTS = (
    "SELECT string_agg(DISTINCT 'oncegate.' || p.proname::text, ', ') FROM pg_proc p JOIN pg_namespace n "
    "ON n.oid = p.pronamespace WHERE n.nspname = 'oncegate' AND p.proname IN ('claim', 'renew', 'complete_if_owner', 'release', "
    "'lookup', 'contract_version') AND NOT has_function_privilege(p.oid, 'EXECUTE')"
)
# The other side has ended a connection with TLS.
TLS_ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
GRANTS = "see the grants in docs/reference/store-contract-postgres.md"
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


def plain_cursor(connection: Any) -> Any:
    """A cursor of psycopg with rows that are tuples, whatever the factories of the connection make."""
    import psycopg
    from psycopg.rows import tuple_row

    is_async = isinstance(connection, psycopg.AsyncConnection)
    factory: Any = psycopg.AsyncCursor if is_async else psycopg.Cursor
    if "Client" in getattr(connection.cursor_factory, "__name__", ""):
        # It never prepares statements, which a pooler may need.
        factory = psycopg.AsyncClientCursor if is_async else psycopg.ClientCursor
    return factory(connection, row_factory=tuple_row)


def _is_function(value: Any) -> bool:
    """True for what can be called without arguments, and is no type and no maker of sessions of SQLAlchemy."""
    if not callable(value) or isinstance(value, type) or type(value).__module__.startswith("sqlalchemy"):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:
        return True  # it does not say
    return True


# Reasons of psycopg for a connection that was not made.
_NOT_CONNECTED = re.compile(
    r"Connection refused|timeout expired|Connection timed out|No route to host|Network is unreachable|Host is down"
    r"|Name or service not known|No address associated with hostname|socket .*No such file or directory"
)
_REASON = re.compile(r"^.*(?:failed|failed to resolve host .*|could not translate host name .*): .+$", re.MULTILINE)


def _is_away(error: BaseException) -> bool:
    """True if no connection to PostgreSQL could be made."""
    if isinstance(error, OSError):
        numbers = [error.errno] if error.errno else numbers_of(str(error))
        # Files of certificates may be missing, too.
        is_socket_file = isinstance(error, FileNotFoundError) and _is_of_asyncio(error)
        return says_away(numbers, is_socket_file=is_socket_file)
    text = str(error)
    reasons = _REASON.findall(text)
    return (
        type(error).__name__ == "OperationalError"
        and "FATAL" not in text
        and bool(reasons)
        and all(_NOT_CONNECTED.search(reason) for reason in reasons)
    )


def _is_of_asyncio(error: BaseException) -> bool:
    """True if an event loop has raised the error, as it connected."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("asyncio.")


def _is_broken(error: BaseException, state: str | None) -> bool:
    """True if a connection was there, and ended: another one may be whole."""
    if state is not None:
        # That of a protocol is an error of the server, or of a pooler.
        return (state.startswith("08") and state != "08P01") or state in ("57P01", "57P02", "57P05")
    name, text = type(error).__name__, str(error)
    return (
        isinstance(error, (ConnectionError, *TLS_ENDED))
        or (name == "OperationalError" and "FATAL" not in text)
        # asyncpg, also for one whose end it has read in part.
        or name == "InternalClientError"
        or (name == "InterfaceError" and "closed" in text)
    )


def _shut(connection: Any) -> None:
    """Ends a connection of psycopg on which a call waits that was given up. Its server may be silent for ever, such as behind a
    firewall that has forgotten the connection, and the pool would not get it back."""
    with contextlib.suppress(Exception), socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.shutdown(socket.SHUT_RDWR)


def data(value: Any) -> bytes | None:
    return None if value is None else bytes(value)


class PostgresStore:
    """A store over your pool: `psycopg_pool.AsyncConnectionPool`, `asyncpg.Pool`, or for blocking programs
    `psycopg_pool.ConnectionPool`. Or a function that returns an asynchronous pool, and is called at the first use of the store: a
    pool of asyncpg belongs to the event loop that runs when it is made.

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
        elif _is_function(pool):
            self.is_blocking = False
            self._row = self._first
        else:
            raise ConfigError(
                f"PostgresStore needs a pool of psycopg_pool or asyncpg, and not {module}.{name}: write "
                "PostgresStore(psycopg_pool.AsyncConnectionPool(url, open=False)), and open the pool when the program starts"
            )
        self.pool = pool
        # Connections that a process has opened before it forks are of no use in the other one.
        self._opened_by = os.getpid() if getattr(pool, "closed", True) is False else None

    async def _first(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        """Asks the function for its pool."""
        try:
            own = PostgresStore(self.pool())
        except ConfigError as error:
            raise StoreRefused(str(error)) from error
        except Exception as error:
            # That is no outage of the server. The text of the error may name anything.
            raise StoreRefused(f"the function that PostgresStore was given raised {type(error).__name__}") from error
        if own.is_blocking or own._row == own._first:
            raise StoreRefused("the function that PostgresStore was given has to return an asynchronous pool")
        self.pool, self._row, self._opened_by = own.pool, own._row, os.getpid()
        return await self._row(statement, arguments)

    async def _psycopg(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        call = CALL.get() or Call()
        async with self.pool.connection() as connection:
            call.abort = lambda: _shut(connection)
            # A call is a transaction of its own, so that none stays open, with its record, if this process stands still.
            is_own = not connection.autocommit
            if is_own:
                await connection.set_autocommit(True)
            try:
                cursor = await plain_cursor(connection).execute(percent(statement), arguments)
                return await cursor.fetchone()
            finally:
                call.abort = None
                if is_own and not connection.closed:
                    # The pool closes a connection on which a statement still runs, or rolls back.
                    with contextlib.suppress(Exception):
                        await connection.set_autocommit(False)

    async def _psycopg_blocking(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        call = CALL.get() or Call()
        with self.pool.connection() as connection:
            call.abort = lambda: _shut(connection)
            is_own = not connection.autocommit
            if is_own:
                connection.autocommit = True
            try:
                return plain_cursor(connection).execute(percent(statement), arguments).fetchone()
            finally:
                call.abort = None
                if is_own and not connection.closed:
                    with contextlib.suppress(Exception):
                        connection.autocommit = False

    async def _asyncpg(self, statement: str, arguments: tuple[Any, ...]) -> Row:
        pool, call, asked_at = self.pool, CALL.get() or Call(), time.monotonic()
        # The pool connects when it needs another connection. If it has as many as it may, others have to give one back first.
        call.is_waiting = pool.get_size() - pool.get_idle_size() >= pool.get_max_size()
        try:
            connection = await pool.acquire()
        except Exception as error:
            raise self._read_error(error, is_connecting=True) from error
        if call.is_waiting:
            call.begins(asked_at)
        try:
            return await connection.fetchrow(statement, *arguments)
        except BaseException as error:
            if not isinstance(error, Exception):
                # Nobody waits for it any more. A server that does not answer would keep the pool from taking it back.
                connection.terminate()
            raise
        finally:
            await pool.release(connection)

    async def _query(self, statement: str, arguments: tuple[Any, ...] = ()) -> Row:
        if self._opened_by not in (None, os.getpid()):
            raise StoreRefused(
                "the pool of the store was opened before this process was forked, so both would use the same connections: make "
                "it with open=False, and open it in each process (gunicorn: without --preload, or in post_fork)"
            )
        try:
            return await self._row(statement, arguments)
        except StoreError:
            raise
        except Exception as error:
            raise self._read_error(error) from error

    def _read_error(self, error: Exception, *, is_connecting: bool = False) -> StoreError:
        state = sqlstate(error)
        name = type(error).__name__
        match state:
            case "OG003":
                return RecordCorrupt("the record has a state or a version that this contract does not know")
            case "42501":
                return StoreRefused(f"the role lacks a right in the schema oncegate: {GRANTS}")
            case "3F000" | "42883":
                return StoreRefused(
                    "the database does not have the contract: run `oncegate schema apply postgres --url …`"
                )
            case "22023":
                return StoreRefused("the contract refused an argument of this library")
            case "53100" | "53200" | "25006":
                return StoreUnavailable("PostgreSQL is full, or only reads", is_full=True)
        if name == "PoolClosed" or (name == "InterfaceError" and "pool is not initialized" in str(error)):
            return StoreUnavailable(
                f"its pool is not open ({name}): open it when the program starts, such as in the lifespan of FastAPI",
                is_unsent=True,
                is_reached=True,
            )
        if state is None and not isinstance(error, ssl.SSLError):
            # A pool of psycopg does not say why it has no connection. That of asyncpg raises the error of connecting, and psycopg
            # one with a text of its own.
            is_late = isinstance(error, TimeoutError) and not error.errno
            is_connecting = is_connecting or name in ("PoolTimeout", "ConnectionTimeout", "OperationalError")
            is_late = is_late or name in ("PoolTimeout", "ConnectionTimeout")
            if (is_late or (is_connecting and _is_away(error))) and not is_used_up():
                return StoreUnavailable(
                    f"PostgreSQL did not answer ({name})",
                    is_unsent=is_connecting,
                    timed_out="" if not is_late else "connect" if is_connecting else "command",
                )
        if _is_broken(error, state):
            return StoreUnavailable(f"a connection to PostgreSQL broke ({state or name})", is_broken=True)
        # Every other code is an answer, whatever it means, and every other error is that of this process.
        return StoreUnavailable(
            f"PostgreSQL refused ({state or name})",
            is_unsent=name in ("TooManyRequests", "PoolTimeout"),
            is_reached=True,
        )

    async def verify(self) -> None:
        missing = (await self._query(MISSING_RIGHTS))[0]
        if missing:
            # A service would find out after its effect.
            raise StoreRefused(f"the role may not call {missing}: {GRANTS}")
        row = await self._query(VERSION)
        needed = contract()["postgres_version"]
        if row[0] != needed:
            what = "run `oncegate schema apply postgres`" if row[0] < needed else "upgrade this library"
            raise StoreRefused(
                f"the contract in the database has version {row[0]}, and this library needs {needed}: {what}"
            )

    async def purge(self) -> int:
        """Removes at most :data:`PURGE_ROWS` records whose retention is over, and returns their number."""
        return int((await self._query(PURGE, (PURGE_ROWS,)))[0])

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
        return StoredRecord(
            row[0], bytes(row[1]), row[2], data(row[3]), data(row[4]), bool(row[5]), row[6] or 0, row[7], row[8] or ""
        )


def claimed(row: Row) -> Claimed:
    outcome, token, attempts, after_abandoned, lease_left_ms, response = row
    return Claimed(outcome, token or 0, attempts or 0, bool(after_abandoned), lease_left_ms or 0, data(response) or b"")
