"""The effect and its record in one transaction of PostgreSQL: both are committed, or neither is."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import re
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from .clocks import Moment
from .engine import LOOK_COUNTS, Attempt, Policy, Reply
from .errors import ConfigError, OncegateError, OutcomeUnknown, StaleAttempt, StoreRefused
from .flow import current_attempt
from .functions import JSON, VALUE, Function, checked_caller, checked_key, input_digest
from .ids import MARK, IdGuard, Ids, IdSecret
from .postgres import GRANTS, data, percent, plain_cursor, sqlstate
from .response import StoredResponse, response_of
from .runtime import run_blocking
from .store import StoredRecord
from .values import NO_SERVICE, did_you_mean, seconds
from .values import service as checked_service

__all__ = ["blocking_transaction", "complete", "complete_blocking", "sidecar_attempt", "transaction"]
log = logging.getLogger("oncegate")

# The begin of the transaction in microseconds: two statements with the same one are in one transaction.
BEGAN = "(extract(epoch FROM now()) * 1000000)::bigint"
# A claim, and not a reservation: if the code commits the transaction too early, the record stays, and nothing executes again.
CLAIM = (
    f"SELECT outcome, token, lease_left_ms, response, {BEGAN} "  # noqa: S608  (it is a constant)
    "FROM oncegate.claim($1, $2, $3, $4, $5, $6, $7, $8, $9)"
)
COMPLETE_OWN = f"SELECT CASE WHEN {BEGAN} = $1 THEN oncegate.complete($2, $3, $4)::text IS NOT NULL ELSE false END"
COMPLETE = "SELECT oncegate.complete($1, $2, $3)"
RELEASE = "SELECT outcome FROM oncegate.release($1, $2, $3)"
OWN_ATTEMPT = "SELECT attempt FROM oncegate.lookup($1) WHERE state = 'in-progress'"
UNKNOWN = "SELECT outcome FROM oncegate.complete_if_owner($1, $2, 'unknown', NULL, $3)"
LOOK = (
    "SELECT concat_ws(' ', current_database(), inet_server_addr(), inet_server_port()), "  # noqa: S608  (it is a constant)
    f"mark.state, mark.fingerprint, mark.token, mark.lease_until, mark.expires_at, mark.operation, {BEGAN} "
    "FROM (SELECT) AS one LEFT JOIN oncegate.lookup($1) AS mark ON true"
)
# The databases in which a transaction has found the mark of another id secret, by the secret of the transaction. There are few;
# beyond the limit, only the mark refuses.
_FOREIGN: dict[tuple[str, IdSecret | None], IdGuard] = {}
MAX_FOREIGN = 1000
_UNSET: Any = object()
IDLE, IN_TRANSACTION, IN_ERROR = 0, 2, 3
# A claim that conflicts with a transaction that a snapshot does not show is sent again, because nothing has run yet.
CLAIM_TRIES = 3
# The first word of a statement that ends the transaction, or begins another one. ROLLBACK TO a savepoint does not.
_END_WORDS = (
    r"(?:\s|--[^\n]*(?:\n|$)|/\*.*?\*/|;)*+"
    r"(?:(?:COMMIT|END|ABORT|BEGIN|START\s+TRANSACTION|PREPARE\s+TRANSACTION)\b"
    r"|ROLLBACK\b(?!\s+(?:(?:WORK|TRANSACTION)\s+)?TO\b))"
)
_ENDS = re.compile(_END_WORDS, re.IGNORECASE | re.DOTALL)
# What is looked for is behind another statement in one text. Longer texts are not read, because the event loop would stand still.
_END_WORD = re.compile(r"\b(?:COMMIT|END|ABORT|BEGIN|START|PREPARE|ROLLBACK)\b", re.IGNORECASE)
_SEMICOLONS = re.compile(r";[\s;]*+")
MAX_READ = 128 * 1024
# What begins a comment or a literal, such as the body of DO, which PostgreSQL lets end no transaction. To PostgreSQL, every
# character outside of ASCII is a letter.
_OPENING = re.compile(r"--|/\*|['\"$]")
_COMMENT_MARK = re.compile(r"/\*|\*/")
_LINE_END = re.compile(r"[\n\r]")
_DOLLARS = re.compile(r"\$(?:[A-Za-z_\x80-\U0010ffff][\w\x80-\U0010ffff]*)?\$", re.ASCII)
_LETTER = re.compile(r"[\w$\x80-\U0010ffff]", re.ASCII)
_ESCAPED_LITERAL = re.compile(r"'(?:[^'\\]|''|\\.)*+'", re.DOTALL)
USE_SAVEPOINTS = "the function must not end the transaction; use savepoints"
# The connections with a transaction of this module: one that another thread or task uses at the same time is refused.
_IN_USE: set[int] = set()
_IN_USE_LOCK = threading.Lock()


class TransactionAttempt:
    """One run of a transaction under a key."""

    def __init__(self, function: Function, key: str, fingerprint: bytes, seal_keys: Any = None) -> None:
        self._function, self._key = function, key
        self._fingerprint = function.ids.fingerprint(fingerprint)
        self._is_done = False
        self._began_at: int | None = None
        self._seal_keys = _seal_keys(seal_keys)
        self._token = 0
        self._own_attempt = secrets.token_bytes(16)
        self._value: Any = _UNSET
        # The operation of a transaction is its name, in all languages. It has other records than a function of this name.
        self.record = function.ids.record(function.service, function.caller, [function.name.encode()], key.encode())
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

    def _end(self) -> None:
        """After a transaction that was not committed, perhaps without an error, such as for `psycopg.Rollback`."""
        if not (self.is_replayed or self._is_done):
            self._value = _UNSET

    def _claim(self) -> tuple[str, tuple[Any, ...]]:
        return CLAIM, self._claim_arguments()

    def _claim_arguments(self) -> tuple[Any, ...]:
        policy = self._function.policy
        return (
            self.record,
            self._own_attempt,
            self._fingerprint,
            policy.lease_ms,
            policy.retention_ms,
            # A record that is left in progress is that of a run which committed by itself.
            "park",
            self._function.ids.caller_tag(self._function.caller),
            self._function.name,
            self._function.ids.key_tag(self._key.encode()),
        )

    def _look(self) -> tuple[str, tuple[Any, ...]]:
        return LOOK, (MARK,)

    def _judge(self, row: Any) -> None:
        """Refuses a database whose records have other ids than this transaction computes."""
        database, state, fingerprint, token, lease_until, expires_at, operation, self._began_at = row
        mark = None
        if state is not None:
            mark = StoredRecord(
                state,
                data(fingerprint) or b"",
                token,
                lease_until=lease_until or 0,
                expires_at=expires_at,
                operation=operation or "",
            )
        ids = self._function.ids
        guard = _FOREIGN.get((database, ids.secret)) or IdGuard(ids)
        try:
            guard.judge(mark)
        finally:
            if guard.foreign is None:
                _FOREIGN.pop((database, ids.secret), None)
            elif len(_FOREIGN) < MAX_FOREIGN:
                _FOREIGN[database, ids.secret] = guard

    def _claimed(self, row: Any) -> None:
        outcome, token, lease_left_ms, response, _ = row
        if outcome == "execute":
            self._token = token
            return
        if outcome == "locked":
            outcome = "in-progress"
        stored = data(response) or b""
        if outcome == "replay" and self._seal_keys is not None:
            stored = self._seal_keys.open_response(self.record, stored)
        reply = Reply(outcome, stored, (lease_left_ms or 0) / 1000)
        self._value = self._function.replayed(reply)
        self.is_replayed = True

    def _completion(self) -> tuple[str, tuple[Any, ...]]:
        body = json.dumps(self._function.encode(self.value), allow_nan=False, ensure_ascii=False).encode()
        response = StoredResponse(VALUE, JSON, body).encode()
        if self._seal_keys is not None:
            response = self._seal_keys.seal_response(self.record, self._token, response)
        return COMPLETE_OWN, (self._began_at, self.record, self._token, response)


def _seal_keys(keys: Any) -> Any:
    """The keys of an option, or None. The package `cryptography` is needed only with keys."""
    if keys is None:
        return None
    from .seal import SealKeys

    return SealKeys.of(keys)


def _read_error(error: BaseException) -> BaseException:
    """The error of this library for that of a driver, or the same error."""
    match sqlstate(error):
        case "OG001":
            return StaleAttempt(
                "another attempt owns the record, or this one has ended: the transaction must be rolled back"
            )
        case "OG002":
            return StaleAttempt("another transaction holds the record: roll this one back, and run it again later")
        case "3F000" | "42883":
            return StoreRefused("the database does not have the contract: run `oncegate schema apply postgres --url …`")
        case "42501":
            return StoreRefused(f"the role lacks a right in the schema oncegate: {GRANTS}")
    return error


def _text(query: Any, connection: Any) -> str:
    """The statement of a query of psycopg, as far as it is known: a text, bytes, or composed."""
    if isinstance(query, bytes):
        return query.decode("utf-8", "replace")
    if hasattr(query, "as_string"):
        return str(query.as_string(connection))
    return query if isinstance(query, str) else str(next(iter(getattr(query, "strings", ())), ""))


def _skeleton(text: str) -> str | None:
    """The text without its comments, and without what is in its literals. None: it cannot be read with certainty."""
    parts: list[str] = []
    at = 0
    while opening := _OPENING.search(text, at):
        begin, mark = opening.start(), opening[0]
        parts.append(text[at:begin])
        is_after_letter = begin > 0 and _LETTER.match(text[begin - 1]) is not None
        match mark:
            case "--":
                end = _LINE_END.search(text, begin)
                at = end.start() if end else len(text)
                parts.append(" ")
            case "/*":
                # They are in one another.
                depth, at = 1, begin + 2
                while depth:
                    found = _COMMENT_MARK.search(text, at)
                    if found is None:
                        return None
                    depth, at = depth + (1 if found[0] == "/*" else -1), found.end()
                parts.append(" ")
            case '"':
                at = text.find('"', begin + 1) + 1
                parts.append('""')
            case "$":
                dollars = _DOLLARS.match(text, begin)
                if dollars is None:
                    parts.append("$")
                    at = begin + 1
                    continue
                if is_after_letter:
                    return None
                at = text.find(dollars[0], dollars.end()) + len(dollars[0])
                if at < dollars.end():
                    return None
                parts.append("''")
            case _ if (
                is_after_letter and text[begin - 1] in "eE" and not _LETTER.match(text, max(begin - 2, 0), begin - 1)
            ):
                literal = _ESCAPED_LITERAL.match(text, begin)
                at = literal.end() if literal else 0
                parts.append("''")
            case _:
                at = text.find("'", begin + 1) + 1
                # With `standard_conforming_strings` off, or behind another literal, it may escape the quote.
                if text[at - 2 : at - 1] == "\\":
                    return None
                parts.append("''")
        if at <= begin:
            return None
    return "".join([*parts, text[at:]])


def _ends_at_once(statement: str) -> bool:
    """True if the first statement of a text ends the transaction."""
    if not _END_WORD.search(statement):
        return False
    read = _skeleton(statement) if len(statement) <= MAX_READ else None
    return _ENDS.match(statement if read is None else read) is not None


def _refuse_end(statement: str) -> None:
    if _ends_at_once(statement):
        raise OncegateError(f"{USE_SAVEPOINTS}: {statement.strip()[:20]!r} was not sent")


def _may_end(statement: str) -> bool:
    """True if the transaction may end behind another statement of this text."""
    if ";" not in statement or not _END_WORD.search(statement):
        return False
    read = _skeleton(statement) if len(statement) <= MAX_READ else None
    return read is None or any(_ENDS.match(read, run.end()) for run in _SEMICOLONS.finditer(read))


class _Watched:
    """A cursor of psycopg that shows its statements before it sends them. It is mixed into that of the connection."""

    def execute(self, query: Any, *arguments: Any, **options: Any) -> Any:
        watcher = _WATCHERS.get(self.connection)  # type: ignore[attr-defined]
        if watcher is not None:
            watcher.see_statement(_text(query, self))
        return super().execute(query, *arguments, **options)  # type: ignore[misc]


@functools.lru_cache(maxsize=100)
def _watched(factory: type) -> type:
    return type(factory.__name__, (_Watched, factory), {})


_MODULES = ("psycopg", "psycopg_pool", "psycopg2", "asyncpg", "sqlalchemy")


def _known_type(connection: Any) -> type:
    """The type of a driver of which a connection is, as a subclass, such as the session of a framework."""
    kind = type(connection)
    return next((own for own in kind.__mro__ if own.__module__.partition(".")[0] in _MODULES), kind)


class _Connection:
    """A connection of psycopg, asyncpg or SQLAlchemy, as this module uses it."""

    def __init__(self, connection: Any, *, blocking: bool) -> None:
        # Those of Django, in which an `atomic()` in another one is.
        self._savepoints = [own for own in getattr(connection, "savepoint_ids", ()) if own]
        if type(connection).__module__.startswith("django."):
            # The connection of Django, which has that of psycopg.
            connection.ensure_connection()
            connection = connection.connection
        elif type(connection).__name__ == "scoped_session":
            connection = connection()  # the session of this thread
        self.own, self.is_blocking = connection, blocking
        self.driver: Any = None
        """The connection of psycopg or asyncpg below, once the transaction has begun."""
        self._lent: Any = None
        """What the pool of SQLAlchemy has lent for it: not valid any more after `rollback()` of a session, for example."""
        self._unguards: list[Callable[[], None]] = []
        self.has_seen_end = False
        """True if the code has ended the transaction, as far as the driver shows it."""
        self.was_rolled_back = False
        """True if the code has rolled the transaction back, with `rollback()` of SQLAlchemy, and has run nothing after it."""
        self.may_have_ended = False
        """True if a text of several statements may have ended the transaction, as far as the driver shows it."""
        kind = _known_type(connection)
        module, name = kind.__module__, kind.__name__
        self._names = "psycopg"
        if module.startswith("asyncpg"):
            self._names = "asyncpg"
        elif module.startswith("sqlalchemy"):
            self._names = "sqlalchemy"
        elif module.startswith("psycopg2") or not module.startswith("psycopg"):
            raise ConfigError(
                f"a connection of psycopg 3, asyncpg or SQLAlchemy is needed here, and not {module}.{name}"
            )
        if name.endswith("Pool"):
            raise ConfigError(f"a connection is needed here, and not the pool {module}.{name}: take one from it")
        is_async = name.startswith("Async") or self._names == "asyncpg"
        if is_async == blocking:
            others = "transaction() or complete()" if is_async else "blocking_transaction() or complete_blocking()"
            raise ConfigError(f"{module}.{name} is {'asynchronous' if is_async else 'blocking'}: use {others}")

    def in_transaction(self) -> bool:
        match self._names:
            case "asyncpg":
                return bool(self.own.is_in_transaction())
            case "sqlalchemy":
                return bool(self.own.in_transaction())
            case _:
                return int(self.own.info.transaction_status) != 0

    def is_in_savepoint(self) -> bool:
        """True if the driver or framework shows that a savepoint is open. asyncpg does not."""
        if self._names == "sqlalchemy":
            return bool(self.own.in_nested_transaction())
        return bool(self._savepoints) or int(getattr(self.own, "_num_transactions", 0)) > 1

    def has_open_transaction(self) -> bool:
        """:meth:`in_transaction` of a connection that may be closed, or in its pool again."""
        try:
            return not getattr(self.own, "closed", False) and self.in_transaction()
        except Exception:
            return False

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Holds the connection for one transaction of this module, from before its BEGIN to its end."""
        with _IN_USE_LOCK:
            is_free = id(self.own) not in _IN_USE and not self.in_transaction()
            if is_free:
                _IN_USE.add(id(self.own))
        if not is_free:
            raise ConfigError(
                "the connection has a transaction already, in which the record would be in a savepoint: give transaction() a "
                "connection outside of a transaction, that no other thread or task uses"
            )
        try:
            yield
        finally:
            _IN_USE.discard(id(self.own))

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

    async def enter(self, block: Any) -> None:
        if self.is_blocking:
            block.__enter__()
        else:
            await block.__aenter__()

    async def exit(self, block: Any, error: BaseException | None = None) -> bool:
        """Ends the block of a transaction, as `with` does. True: the driver takes the error for no error."""
        kind, trace = (type(error), error.__traceback__) if error is not None else (None, None)
        if self.is_blocking:
            return bool(block.__exit__(kind, error, trace))
        return bool(await block.__aexit__(kind, error, trace))

    async def row(self, statement: str, arguments: tuple[Any, ...]) -> Any:
        if self._names == "psycopg":
            cursor = plain_cursor(self.own)
            if self.is_blocking:
                return cursor.execute(percent(statement), arguments).fetchone()
            return await (await cursor.execute(percent(statement), arguments)).fetchone()
        result = self._statement(statement, arguments)()
        if not self.is_blocking:
            result = await result
        return result.fetchone() if self._names == "sqlalchemy" else result

    async def rollback(self) -> None:
        result = self.own.execute("ROLLBACK") if self._names == "asyncpg" else self.own.rollback()
        if not self.is_blocking:
            await result

    # What the code in the transaction does to it

    async def guard(self) -> None:
        """Refuses statements that end the transaction, as far as the driver shows them before it sends them."""
        self.driver = self.own
        if self._names == "sqlalchemy":
            connection = self.own
            if hasattr(connection, "get_bind"):
                connection = self.own.connection()  # of a session
                if not self.is_blocking:
                    connection = await connection
            if self.is_blocking:
                self._lent = connection.connection
            else:
                self._lent = await connection.get_raw_connection()
                connection = connection.sync_connection
            self.driver = self._lent.driver_connection
            self._guard_sqlalchemy(connection)
        if _known_type(self.driver).__module__.partition(".")[0] == "psycopg":
            self._watch_psycopg(self.driver)
        if _known_type(self.driver).__module__.partition(".")[0] not in ("psycopg", "asyncpg"):
            self.driver = None
        elif hasattr(self.driver, "add_query_logger"):
            self.driver.add_query_logger(self._see)
            self._unguards.append(lambda: self.driver.remove_query_logger(self._see))

    def _guard_sqlalchemy(self, connection: Any) -> None:
        from sqlalchemy import event

        is_removed = False

        def execute(_: Any, __: Any, statement: str, *___: Any) -> None:
            if not is_removed:
                _refuse_end(statement)
                if _may_end(statement):
                    self.may_have_ended = True
                # It runs after a rollback, outside of the transaction.
                self.was_rolled_back = False

        def commit(_: Any) -> None:
            if not is_removed:
                self.has_seen_end, self.was_rolled_back = True, False

        def rollback(_: Any) -> None:
            if not (is_removed or self.has_seen_end):
                self.has_seen_end = True
                # Otherwise it rolls back another transaction, or nothing.
                self.was_rolled_back = not self.may_have_ended and self._is_open()

        listeners: dict[str, Callable[..., Any]] = {
            "before_cursor_execute": execute,
            "commit": commit,
            "rollback": rollback,
        }

        def remove() -> None:
            nonlocal is_removed
            is_removed = True
            for name, listener in listeners.items():
                event.remove(connection, name, listener)

        for name, listener in listeners.items():
            event.listen(connection, name, listener)
        self._unguards.append(remove)

    def see_statement(self, statement: str) -> None:
        """A statement of psycopg, before it is sent. Those of the session or connection of SQLAlchemy are refused there."""
        if self._names == "psycopg":
            _refuse_end(statement)
        if self._lent is not None and not self._lent.is_valid:
            return  # the connection is in its pool again, or another run has it
        if _may_end(statement) or _ends_at_once(statement):
            self.may_have_ended = True
        # It runs after a rollback, outside of the transaction.
        self.was_rolled_back = False

    def _watch_psycopg(self, own: Any) -> None:
        factory, was_set = own.cursor_factory, "cursor_factory" in vars(own)
        if not isinstance(factory, type):
            return
        if issubclass(factory, _Watched):
            # By a run that has given the connection back to its pool, and not ended yet.
            factory = factory.__mro__[2]
        own.cursor_factory = watched = _watched(factory)
        _WATCHERS[own] = self

        def remove() -> None:
            if _WATCHERS.get(own) is not self:
                return  # another run watches it now
            del _WATCHERS[own]
            if own.cursor_factory is not watched:
                return  # the code has set another one
            if was_set:
                own.cursor_factory = factory
            else:
                del own.cursor_factory

        self._unguards.append(remove)

    def _see(self, query: Any) -> None:
        """asyncpg shows a statement after it has run."""
        if query.exception is None and _ends_at_once(query.query):
            self.has_seen_end = True
        elif _may_end(query.query):
            self.may_have_ended = True

    def _is_open(self) -> bool:
        """False if the driver shows that no transaction is open."""
        driver = self.driver
        if hasattr(driver, "is_in_transaction"):
            return bool(driver.is_in_transaction())
        return driver is None or int(driver.info.transaction_status) != IDLE

    def unguard(self) -> None:
        unguards, self._unguards = self._unguards, []
        for remove in unguards:
            try:
                remove()
            except Exception as error:
                log.debug("a guard of a connection was not removed: %s", type(error).__name__)

    async def is_over(self, began_at: int | None) -> bool:
        """True if the transaction that began at this time has ended: the code in it has ended it."""
        driver = self.driver
        if self.has_seen_end or driver is None:
            # The connection of a session may be in its pool again.
            return self.has_seen_end
        try:
            if hasattr(driver, "is_in_transaction"):
                await asyncio.sleep(0)  # for what _see is called with
                if self.has_seen_end or driver.is_closed():
                    return self.has_seen_end or self.may_have_ended
                if not driver.is_in_transaction():
                    return True
            else:
                status = int(driver.info.transaction_status)
                if status != IN_TRANSACTION:
                    return status == IDLE or self.may_have_ended
            own = _Connection(driver, blocking=self.is_blocking) if self._names == "sqlalchemy" else self
            return bool((await own.row(f"SELECT {BEGAN}", ()))[0] != began_at)
        except Exception:
            # It has failed, or the connection is lost: then nobody saw that it has ended.
            return self.may_have_ended

    def check_one_database(self) -> None:
        """Raises :class:`ConfigError` for a session whose transaction has several connections: they are committed one by one."""
        session = getattr(self.own, "sync_session", self.own)
        begun = getattr(session, "get_transaction", lambda: None)()
        connections = getattr(begun, "_connections", None) if self._names == "sqlalchemy" else None
        if isinstance(connections, dict) and len({id(own[0]) for own in connections.values()}) > 1:
            raise ConfigError(
                "the session has several connections in this transaction (several engines, or binds), so the effect and its "
                "record would not be committed together, and were rolled back: give transaction() a session with one engine"
            )

    async def check_commit(self) -> None:
        """Raises :class:`StaleAttempt` if a statement of another task has failed: PostgreSQL would answer the commit with a
        rollback, and no error."""
        lock, info = getattr(self.driver, "lock", None), getattr(self.driver, "info", None)
        if self.is_blocking or info is None or not hasattr(info, "transaction_status"):
            return  # asyncpg refuses a statement while another one runs
        # The commit must not stand behind statements that wait for the connection.
        while lock is not None and (lock.locked() or getattr(lock, "_waiters", None)):
            async with lock:
                pass
        if int(info.transaction_status) == IN_ERROR:
            raise StaleAttempt(
                "a statement failed while the transaction was completed, so PostgreSQL rolls it back: do not share its "
                "connection with other tasks"
            )


_OPTIONS = ("name", "input", "service", "caller", "lease", "retention", "seal_keys", "id_secret")


def _attempt(key: Any, options: dict[str, Any]) -> TransactionAttempt:
    own = checked_key(key)
    for option in options:
        if option not in _OPTIONS:
            raise ConfigError(f"there is no option {option!r} of a transaction{did_you_mean(option, _OPTIONS)}")
    if not (isinstance(options["name"], str) and options["name"]):
        raise ConfigError(f"name is {options['name']!r}; write the name of the operation, such as 'charge'")
    if options.get("service") is None:
        raise ConfigError(NO_SERVICE)
    policy = Policy(
        seconds("lease", options.get("lease", 60), 0.1, 3600),
        seconds("retention", options.get("retention", 86_400), 1, 400 * 86_400),
    )
    function = Function(
        options["name"],
        None,
        checked_service(options.get("service")),
        checked_caller(options.get("caller")),
        policy,
        lambda _: "unknown",
        lambda value: value,
        lambda value: value,
        Ids.of(options.get("id_secret")),
    )
    fingerprint = b"\x01" + input_digest(options.get("input"))
    return TransactionAttempt(function, own, fingerprint, options.get("seal_keys"))


@asynccontextmanager
async def transaction(connection: Any, key: Any, *, name: str, **options: Any) -> AsyncIterator[TransactionAttempt]:
    """A transaction that takes effect once for its key::

        async with oncegate.transaction(
            connection, order.id, name="charge", service="shop", input=order.total
        ) as attempt:
            if not attempt.is_replayed:
                await connection.execute("INSERT INTO payments VALUES (%s)", (order.total,))
                attempt.complete({"charged": order.total})
        return attempt.value

    The connection is one of psycopg, asyncpg or SQLAlchemy, outside of a transaction. `name` is the operation, `service` the name
    of the service, which other services never share; `input` is what must be equal in two calls with one key. Further options:
    `caller`, `lease`, `retention`, `seal_keys`, `id_secret`. An exception rolls back, and the key is free. A commit after another
    attempt took over raises :class:`StaleAttempt`, and is rolled back.

    The function must not end the transaction; use savepoints. Statements that do are refused, if the driver shows them before it
    sends them. Otherwise :class:`OutcomeUnknown` is raised at the end, and the key is not executed again, because a part may be
    committed. Until then, a `COMMIT` leaves the key in progress, and a `ROLLBACK` leaves it free.

    With `seal_keys`, a list of keys or :class:`oncegate.seal.SealKeys`, the value is encrypted, and stored values are opened. One
    that cannot be opened raises :class:`ResponseSealed`, and nothing runs. The role must be able to call `lookup`, `claim`,
    `complete`, `complete_if_owner` and `release`.
    """
    run = _Run(_Connection(connection, blocking=False), _attempt(key, {"name": name, **options}))
    with run.own.in_use():
        await run.begin()
        try:
            yield run.attempt
            await run.complete()
        except BaseException as error:
            await run.failed(error)
        else:
            await run.commit()


@contextmanager
def blocking_transaction(connection: Any, key: Any, *, name: str, **options: Any) -> Iterator[TransactionAttempt]:
    """:func:`transaction` for blocking connections of psycopg and SQLAlchemy.

    That of Django is refused, because Django does not see a transaction that it has not begun, and its `atomic()` fails in it.
    """
    if type(connection).__module__.startswith("django."):
        raise ConfigError(
            "the connection of Django is for complete_blocking(), in transaction.atomic(): in a transaction that Django has not "
            "begun, its atomic() fails. Give blocking_transaction() a connection of psycopg of your own"
        )
    run = _Run(_Connection(connection, blocking=True), _attempt(key, {"name": name, **options}))
    with run.own.in_use():
        run_blocking(run.begin())
        try:
            yield run.attempt
            run_blocking(run.complete())
        except BaseException as error:
            run_blocking(run.failed(error))
        else:
            run_blocking(run.commit())


# What is true of the key of a run whose code has ended the transaction: its outcome is unknown, another attempt has it, or that
# could not be found out or written.
_Fate = Literal["parked", "taken", "unsaid"]
_FATES: dict[_Fate, str] = {
    "parked": "It is not run again: its outcome is unknown until an operator resolves it",
    "taken": "Another attempt has its key, which was free for a while: both may have taken effect",
    "unsaid": "The database did not take that its outcome is unknown: the key may be free, so find out before you call it again",
}


# Of the connections of psycopg in a transaction of this module.
_WATCHERS: weakref.WeakKeyDictionary[Any, _Connection] = weakref.WeakKeyDictionary()


class _Run:
    """One transaction, from its BEGIN to its end. Its coroutines never suspend for a blocking connection."""

    def __init__(self, own: _Connection, attempt: TransactionAttempt) -> None:
        self.own, self.attempt = own, attempt
        self._block: Any = None
        self._is_over = False
        self._own_error: OncegateError | None = None

    async def begin(self) -> None:
        """Begins and claims. Nothing has run before it returns."""
        for tried in range(1, CLAIM_TRIES + 1):
            self._block = self.own.begin()
            await self.own.enter(self._block)
            try:
                await self._claim()
                if not self.attempt.is_replayed:
                    await self.own.guard()
                return
            except BaseException as error:
                self.own.unguard()
                await self.own.exit(self._block, error)
                if sqlstate(error) == "40001" and tried < CLAIM_TRIES:
                    continue
                read = _read_error(error)
                if read is error:
                    raise
                raise read from error

    async def _claim(self) -> None:
        own, attempt = self.own, self.attempt
        looked_at = Moment.now()
        attempt._judge(await own.row(*attempt._look()))
        row = await own.row(*attempt._claim())
        if row[-1] != attempt._began_at:
            # The claim is committed, and nothing has run.
            if row[0] == "execute":
                await own.row(RELEASE, (attempt.record, row[1], attempt._function.policy.retention_ms))
            raise ConfigError(
                "the connection commits each statement by itself (AUTOCOMMIT of SQLAlchemy, for example), so it has no "
                "transactions: give transaction() another one"
            )
        attempt._claimed(row)
        # The claim may have waited for another transaction.
        if not attempt.is_replayed and looked_at.age() >= LOOK_COUNTS:
            attempt._judge(await own.row(*attempt._look()))

    def _ended(self, fate: _Fate = "parked") -> OncegateError:
        """The error of a run whose code has ended the transaction."""
        name = self.attempt._function.name
        if self.own.was_rolled_back:
            self._own_error = StaleAttempt(
                f"the code in the transaction of {name} rolled it back, so nothing took effect, and the key is free. "
                f"{USE_SAVEPOINTS.capitalize()}"
            )
        else:
            self._own_error = OutcomeUnknown(
                f"the code in the transaction of {name} ended it, so that a part of the effect may be there without its record. "
                f"{_FATES[fate]}. {USE_SAVEPOINTS.capitalize()}"
            )
        return self._own_error

    async def complete(self) -> None:
        """Completes the record, as the last statement before the commit."""
        if self.attempt.is_replayed:
            return
        self.own.unguard()
        self.own.check_one_database()
        completion = self.attempt._completion()
        if self.own.has_seen_end or not (await self.own.row(*completion))[0]:
            self._is_over = True
            raise self._ended()
        await self.own.check_commit()

    async def commit(self) -> None:
        try:
            await self.own.exit(self._block)
            self.attempt._is_done = True
        except BaseException as error:
            # The completion was in the transaction, whose own record decides. The connection may not answer any more.
            self.attempt._end()
            read = _read_error(error)
            if read is error:
                raise
            raise read from error

    async def failed(self, error: BaseException) -> None:
        """Rolls back, and raises the error of the run. It returns if the driver takes it for no error."""
        is_closing = isinstance(error, GeneratorExit) and not self.own.is_blocking
        if not (self.attempt.is_replayed or self._is_over or is_closing):
            self._is_over = await self.own.is_over(self.attempt._began_at)
        self.own.unguard()
        self.attempt._end()
        try:
            if await self.own.exit(self._block, error) and not self._is_over:
                return
        except BaseException as raised:
            if raised is not error:
                raised.__cause__ = raised.__cause__ or error
                error = raised
        if is_closing:
            raise error
        await self._explain(error)

    async def _explain(self, error: BaseException) -> None:
        """Raises what the error of a run means."""
        self.attempt._end()
        if self._is_over and self.own.was_rolled_back:
            # Nothing took effect, and the key is free.
            raise error
        fate = None if self.attempt.is_replayed else await self._park()
        if fate is not None:
            log.warning("record %s: the code in the transaction ended it. %s", self.attempt.record.hex(), _FATES[fate])
            # An end of the program or of the task stays one.
            if error is self._own_error:
                raise self._ended(fate) from error.__cause__
            if isinstance(error, Exception):
                raise self._ended(fate) from error
        read = _read_error(error)
        if read is error:
            raise error
        raise read from error

    async def _park(self) -> _Fate | None:
        """Makes the outcome unknown if the run has ended the transaction by statements of its own. None: it has not.

        If it was rolled back, there is no record: it is claimed for that, unless another attempt has it.
        """
        own, attempt = self.own, self.attempt
        retention = attempt._function.policy.retention_ms
        try:
            if own.in_transaction():
                await own.rollback()
            block = own.begin()
            await own.enter(block)
            try:
                row = await own.row(OWN_ATTEMPT, (attempt.record,))
                is_own, token = row is not None and data(row[0]) == attempt._own_attempt, attempt._token
                if not is_own and self._is_over:
                    claimed = await own.row(*attempt._claim())
                    is_own, token = claimed[0] == "execute", claimed[1]
                if is_own:
                    await own.row(UNKNOWN, (attempt.record, token, retention))
            except BaseException as error:
                await own.exit(block, error)
                raise
            await own.exit(block)
        except Exception:
            return "unsaid" if self._is_over else None
        if is_own:
            return "parked"
        return "taken" if self._is_over else None


# Completing the record of a request


def sidecar_attempt(headers: Mapping[str, str]) -> Attempt | None:
    """The attempt in the header fields of a request that comes from a sidecar. None: the request has no key.

    Only a sidecar can set these fields, and only if nothing else reaches the service.
    """
    found: dict[str, list[str]] = {"oncegate-record": [], "oncegate-token": [], "oncegate-attempt": []}
    # Some mappings have one line for each field of a name, and some names are not in lower case.
    for name, value in getattr(headers, "multi_items", headers.items)():
        if name.lower() in found:
            found[name.lower()].append(value)
    records, tokens, attempts = found.values()
    if not records and not tokens:
        return None
    if len(records) != 1 or len(tokens) != 1:
        raise ConfigError(
            "Oncegate-Record and Oncegate-Token must each be there once: does this request come from a sidecar?"
        )
    record, token, number = records[0], tokens[0], attempts[0] if attempts else "1"
    is_token = re.fullmatch(r"[0-9]{1,19}", token) and int(token) < 1 << 63
    if not re.fullmatch(r"[0-9a-f]{64}", record) or not is_token or not re.fullmatch(r"[0-9]{1,9}", number):
        raise ConfigError("Oncegate-Record or Oncegate-Token is malformed: does this request come from a sidecar?")
    return Attempt(bytes.fromhex(record), int(token), int(number))


def _check_fields(response: StoredResponse) -> None:
    """Raises ConfigError for a field that HTTP does not carry: a replay would not have it."""
    for name, value in (*response.headers, *response.trailers):
        if not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", name):
            raise ConfigError(f"{name!r} is not the name of a header field")
        if re.search(rb"[\0-\x08\x0a-\x1f\x7f]", value):
            raise ConfigError(f"the header field {name} of the response has a character that HTTP does not carry")


async def complete(
    connection: Any,
    attempt: Attempt | None = None,
    response: Any = None,
    *,
    seal_keys: Any = None,
) -> None:
    """Completes the record of a request in the transaction of `connection`: call it last, before the commit, and outside of
    savepoints. Commit before you respond.

    `attempt` is that of the middleware by default, or :func:`sidecar_attempt`. With `response`, retries get it from the commit
    on; without, they get the response that is sent. Raises :class:`StaleAttempt` if another attempt owns the record: roll back.
    A request without a key has no attempt, and nothing happens.

    `response` is a :class:`StoredResponse`, or a whole response of Starlette, FastAPI, Django or Flask, of which the header
    fields that a record keeps are stored. Anything else is a TypeError.

    The response is encrypted with `seal_keys`, by default with those of the middleware's store. Behind a sidecar that seals, give
    its keys.
    """
    await _complete(_Connection(connection, blocking=False), attempt, response, seal_keys)


def complete_blocking(
    connection: Any,
    attempt: Attempt | None = None,
    response: Any = None,
    *,
    seal_keys: Any = None,
) -> None:
    """:func:`complete` for blocking connections."""
    run_blocking(_complete(_Connection(connection, blocking=True), attempt, response, seal_keys))


async def _complete(own: _Connection, attempt: Attempt | None, response: Any, seal_keys: Any) -> None:
    attempt = attempt or current_attempt()
    if attempt is None:
        return
    if not own.in_transaction():
        raise ConfigError("complete() belongs into the transaction of the effect: begin one first")
    encoded = None
    if response is not None:
        made = response_of(response, attempt.stored_headers)
        _check_fields(made)
        encoded = made.encode()
    keys = _seal_keys(seal_keys if seal_keys is not None else attempt.seal_keys)
    if encoded is not None and keys is not None:
        encoded = keys.seal_response(attempt.record, attempt.token, encoded)
    arguments = (attempt.record, attempt.token, encoded)
    attempt.is_completed, attempt.is_open = True, own.has_open_transaction
    attempt.is_in_savepoint = own.is_in_savepoint()
    try:
        await own.row(COMPLETE, arguments)
    except Exception as error:
        read = _read_error(error)
        if read is error:
            raise
        raise read from error
