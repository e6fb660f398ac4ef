"""The effect and its record in one transaction, over each driver."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
import threading
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest

import oncegate
from oncegate import InProgress, KeyReused, StaleAttempt, blocking_transaction, transaction

DRIVERS = ["psycopg", "asyncpg", "sqlalchemy"]


@contextlib.asynccontextmanager
async def connected(driver: str, url: str) -> Any:
    match driver:
        case "psycopg":
            import psycopg

            connection = await psycopg.AsyncConnection.connect(url)
            async with connection:
                yield connection
        case "asyncpg":
            import asyncpg

            connection = await asyncpg.connect(url)
            try:
                yield connection
            finally:
                await connection.close()
        case "sqlalchemy":
            from sqlalchemy.ext.asyncio import create_async_engine

            engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
            try:
                async with engine.connect() as connection:
                    yield connection
            finally:
                await engine.dispose()


async def execute(connection: Any, statement: str) -> None:
    if "sqlalchemy" in type(connection).__module__:
        from sqlalchemy import text

        await connection.execute(text(statement))
    else:
        await connection.execute(statement)


def ledger(postgres: Any) -> str:
    import psycopg

    name = f"ledger_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.url) as connection:
        connection.execute(f"CREATE TABLE {name} (n int)")
    return name


def count(postgres: Any, table: str) -> int:
    import psycopg

    with psycopg.connect(postgres.url) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@pytest.mark.parametrize("driver", DRIVERS)
async def test_both_or_neither(driver: str, postgres: Any) -> None:
    table, key = ledger(postgres), uuid.uuid4().hex
    async with connected(driver, postgres.url) as connection, connected(driver, postgres.url) as other:

        async def charge(amount: int, connection: Any = connection, fail: bool = False) -> Any:
            async with transaction(connection, key, name="charge", service="shop", input=amount) as attempt:
                if not attempt.is_replayed:
                    await execute(connection, f"INSERT INTO {table} VALUES ({amount})")
                    attempt.complete({"charged": amount})
                    if fail:
                        raise RuntimeError("in the middle")
            return attempt.value

        with pytest.raises(RuntimeError):
            await charge(5, fail=True)
        assert count(postgres, table) == 0
        async with transaction(connection, key, name="charge", service="shop", input=5) as attempt:
            await execute(connection, f"INSERT INTO {table} VALUES (5)")
            with pytest.raises(InProgress):
                await charge(5, connection=other)
            attempt.complete({"charged": 5})
        assert await charge(5, connection=other) == {"charged": 5}
        with pytest.raises(KeyReused):
            await charge(6)
        assert count(postgres, table) == 1


def test_blocking_connections(postgres: Any) -> None:
    import psycopg
    import sqlalchemy

    table = ledger(postgres)
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    with psycopg.connect(postgres.url) as plain, engine.connect() as alchemy:
        for connection in (plain, alchemy):
            key = uuid.uuid4().hex
            for _ in range(2):
                with blocking_transaction(connection, key, name="charge", service="shop") as attempt:
                    if not attempt.is_replayed:
                        statement: Any = f"INSERT INTO {table} VALUES (1)"
                        connection.execute(sqlalchemy.text(statement) if connection is alchemy else statement)
                        attempt.complete("done")
                assert attempt.value == "done"
        with pytest.raises(oncegate.ConfigError, match="blocking_transaction"):
            asyncio.run(_enter(plain))
    engine.dispose()
    assert count(postgres, table) == 2


async def _enter(connection: Any) -> None:
    async with transaction(connection, "k", name="charge", service="shop"):
        pass


async def test_services_on_one_database_share_no_keys(postgres: Any) -> None:
    import psycopg

    key = uuid.uuid4().hex
    async with connected("psycopg", postgres.url) as connection:
        with pytest.raises(oncegate.ConfigError, match="service is not set"):
            async with transaction(connection, key, name="charge"):
                pass
        for service in ("shop", "warehouse"):
            for is_replayed in (False, True):
                async with transaction(connection, key, name="charge", service=service) as attempt:
                    assert attempt.is_replayed is is_replayed
                    if not is_replayed:
                        attempt.complete(service)
                assert attempt.value == service
    with (
        psycopg.connect(postgres.url) as connection,
        pytest.raises(oncegate.ConfigError, match="service is not set"),
        blocking_transaction(connection, key, name="charge"),
    ):
        pass


async def test_a_late_commit_is_rolled_back(postgres: Any) -> None:
    """An attempt whose record was taken over by another one must not commit its effect."""
    import psycopg
    from psycopg_pool import AsyncConnectionPool

    from oncegate.engine import Permit, Policy, engine_of

    table, record = ledger(postgres), uuid.uuid4().bytes * 2
    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=2, open=False) as pool:
        # Each process has an engine of its own.
        engine, other = (engine_of(oncegate.PostgresStore(pool), blocking=False) for _ in range(2))
        policy = Policy(lease=0.1, on_abandoned="reexecute", wait=5)
        slow = await other.claim(record, b"\x01" + bytes(32), policy)
        assert isinstance(slow, Permit)
        slow.end()
        fast = await engine.claim(record, b"\x01" + bytes(32), policy)
        assert isinstance(fast, Permit)
        assert fast.attempt.is_after_abandoned
        async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
            with pytest.raises(StaleAttempt):
                async with connection.transaction():
                    await connection.execute(f"INSERT INTO {table} VALUES (1)")
                    await oncegate.complete(connection, slow.attempt)
            async with connection.transaction():
                await connection.execute(f"INSERT INTO {table} VALUES (2)")
                await oncegate.complete(connection, fast.attempt, oncegate.StoredResponse.of(201, body="done"))
        fast.end()
        found = await engine.lookup(record, policy)
        assert found is not None
        assert found.state == "completed"
    assert count(postgres, table) == 1


async def execute_unseen(connection: Any, statement: str) -> None:
    """In a form that the library cannot see before it is sent."""
    if "sqlalchemy" in type(connection).__module__:
        raw = await connection.get_raw_connection()
        await raw.driver_connection.execute(statement)
    elif "psycopg" in type(connection).__module__:
        await connection.execute(f"SELECT 1; {statement}")
    else:
        await connection.execute(statement)


@pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy"])
async def test_a_statement_that_would_end_the_transaction_is_refused(driver: str, postgres: Any) -> None:
    import psycopg.sql

    table, key = ledger(postgres), uuid.uuid4().hex
    refused = [
        *("COMMIT", "end", "ABORT", "Rollback work", "BEGIN", "START TRANSACTION", "PREPARE TRANSACTION 'a'"),
        "  -- a comment\n/* and one */ ; rollback and chain",
    ]
    async with connected(driver, postgres.url) as connection:
        for _ in range(2):
            async with transaction(connection, key, name="charge", service="shop") as attempt:
                if not attempt.is_replayed:
                    await execute(connection, f"INSERT INTO {table} VALUES (1)")
                    for statement in refused:
                        with pytest.raises(oncegate.OncegateError, match="must not end the transaction; use savepoints"):
                            await execute(connection, statement)
                    if driver == "psycopg":
                        for query in (b"COMMIT", psycopg.sql.SQL("COMMIT"), psycopg.sql.SQL("{}").format(psycopg.sql.SQL("END"))):
                            with pytest.raises(oncegate.OncegateError, match="use savepoints"):
                                await connection.cursor().execute(query)
                        async with connection.transaction():
                            pass
                    for statement in ("SAVEPOINT a", "ROLLBACK TO a", "rollback transaction to savepoint a", "RELEASE a"):
                        await execute(connection, statement)
                    attempt.complete("done")
            assert attempt.value == "done"
        # Afterwards the connection takes them again.
        if driver == "psycopg":
            await connection.rollback()
            assert connection.cursor_factory is psycopg.AsyncCursor
            assert "cursor_factory" in vars(connection)
        await execute(connection, "ROLLBACK")
    assert count(postgres, table) == 1


@pytest.mark.parametrize("ends", ["completes", "raises"])
@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_commit_of_its_own_is_noticed(driver: str, sealed: bool, ends: str, postgres: Any) -> None:
    """What the run has committed cannot be taken back. Nothing else runs under its key, before its end and after it."""
    from oncegate.seal import SealKey

    table, key = ledger(postgres), uuid.uuid4().hex
    keys = [SealKey(b"\x01" * 32)] if sealed else None
    committed, seen = asyncio.Event(), asyncio.Event()

    async def charge() -> Any:
        async with (
            connected(driver, postgres.url) as connection,
            transaction(connection, key, name="charge", service="shop", seal_keys=keys) as attempt,
        ):
            if not attempt.is_replayed:
                await execute(connection, f"INSERT INTO {table} VALUES (1)")
                await execute_unseen(connection, "COMMIT")
                committed.set()
                await seen.wait()
                if ends == "raises":
                    raise RuntimeError("after the commit")
                attempt.complete("done")
        return attempt.value

    first = asyncio.ensure_future(charge())
    await asyncio.wait_for(committed.wait(), 60)
    with pytest.raises(InProgress):
        await asyncio.wait_for(charge(), 60)
    seen.set()
    with pytest.raises(oncegate.OutcomeUnknown, match="must not end the transaction; use savepoints"):
        await first
    for _ in range(2):
        with pytest.raises(oncegate.OutcomeUnknown, match="not known"):
            await charge()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("how", ["writes", "commits", "raises", "begins"])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_rollback_of_its_own_is_noticed(driver: str, how: str, postgres: Any) -> None:
    """It removes the claim, so that what is written after it may be there without a record."""
    table, key = ledger(postgres), uuid.uuid4().hex

    async def charge() -> Any:
        async with connected(driver, postgres.url) as connection:
            async with transaction(connection, key, name="charge", service="shop") as attempt:
                if not attempt.is_replayed:
                    await execute_unseen(connection, "ROLLBACK")
                    if how != "writes":
                        await execute_unseen(connection, "BEGIN")
                    await execute_unseen(connection, f"INSERT INTO {table} VALUES (1)")
                    if how in ("commits", "raises"):
                        await execute_unseen(connection, "COMMIT")
                    if how == "raises":
                        raise RuntimeError("after the commit")
                    attempt.complete("done")
            return attempt.value

    with pytest.raises(oncegate.OutcomeUnknown, match="use savepoints"):
        await charge()
    rows = count(postgres, table)
    for _ in range(2):
        with pytest.raises(oncegate.OutcomeUnknown, match="not known"):
            await charge()
    assert count(postgres, table) == rows
    # psycopg begins a transaction before a statement, which is rolled back in the end.
    assert rows == (0 if how == "begins" or (how == "writes" and driver == "psycopg") else 1)


@pytest.mark.parametrize("ends", ["completes", "raises", "executes"])
@pytest.mark.parametrize("how", ["session", "alchemy"])
def test_a_rollback_by_sqlalchemy_frees_the_key(how: str, ends: str, postgres: Any) -> None:
    """SQLAlchemy runs nothing after it: it is certain that nothing took effect."""
    import sqlalchemy
    from sqlalchemy.exc import InvalidRequestError
    from sqlalchemy.orm import Session

    table, key = ledger(postgres), uuid.uuid4().hex
    insert = sqlalchemy.text(f"INSERT INTO {table} VALUES (1)")
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    errors = {"completes": StaleAttempt, "raises": RuntimeError, "executes": InvalidRequestError}
    try:
        with Session(engine) if how == "session" else engine.connect() as connection:
            with (
                pytest.raises(errors[ends]) as raised,
                blocking_transaction(connection, key, name="charge", service="shop") as attempt,
            ):
                connection.execute(insert)
                with connection.begin_nested() as nested:
                    nested.rollback()
                connection.rollback()
                if ends == "raises":
                    raise RuntimeError("after the rollback")
                if ends == "executes":
                    connection.execute(insert)
            assert ends != "completes" or "rolled it back, so nothing took effect" in str(raised.value)
            with blocking_transaction(connection, key, name="charge", service="shop") as attempt:
                connection.execute(insert)
                attempt.complete("done")
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("ends", ["completes", "raises"])
@pytest.mark.parametrize("text", ["INSERT INTO {} VALUES (1); COMMIT", "SELECT 1; ROLLBACK; INSERT INTO {} VALUES (1); COMMIT"])
@pytest.mark.parametrize("how", ["session", "alchemy", "psycopg"])
def test_a_rollback_after_a_commit_in_the_same_text_is_noticed(how: str, text: str, ends: str, postgres: Any) -> None:
    """The rollback is that of another transaction, or of none: the effect is there."""
    import psycopg
    import sqlalchemy
    from sqlalchemy.orm import Session

    table, key = ledger(postgres), uuid.uuid4().hex
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    opened: Any = {
        "session": lambda: Session(engine),
        "alchemy": engine.connect,
        "psycopg": lambda: psycopg.connect(postgres.url),
    }
    statement: Any = text.format(table)
    try:
        for at in range(3):
            with (
                opened[how]() as connection,
                pytest.raises(oncegate.OutcomeUnknown, match="use savepoints" if at == 0 else "not known"),
                blocking_transaction(connection, key, name="charge", service="shop") as attempt,
            ):
                connection.execute(statement if how == "psycopg" else sqlalchemy.text(statement))
                if how != "psycopg":
                    connection.rollback()
                if ends == "raises":
                    raise RuntimeError("after the rollback")
                attempt.complete("done")
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_statement_that_fails_after_a_rollback_of_its_own(driver: str, postgres: Any) -> None:
    """What was written between the two transactions is there, and no record of it."""
    table, key = ledger(postgres), uuid.uuid4().hex

    async def charge() -> Any:
        async with connected(driver, postgres.url) as connection:
            async with transaction(connection, key, name="charge", service="shop") as attempt:
                if not attempt.is_replayed:
                    await execute_unseen(connection, f"SELECT 1; ROLLBACK; INSERT INTO {table} VALUES (1)")
                    with contextlib.suppress(Exception):
                        await execute_unseen(connection, "SELECT 1; BEGIN")
                    await execute_unseen(connection, "INSERT INTO a_table_that_is_missing VALUES (1)")
                    attempt.complete("done")
            return attempt.value

    with pytest.raises(oncegate.OutcomeUnknown, match="use savepoints"):
        await charge()
    with pytest.raises(oncegate.OutcomeUnknown, match="not known"):
        await charge()


@pytest.mark.parametrize("fate", ["unsaid", "taken", "parked"])
def test_what_is_said_of_a_run_that_has_ended_its_transaction_is_true(
    fate: str, postgres: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Its outcome is unknown, or another attempt has the key, or the database did not take that it is unknown."""
    import psycopg

    table, key, runs = ledger(postgres), uuid.uuid4().hex, 0
    sentences = {
        "unsaid": "did not take that its outcome is unknown: the key may be free",
        "taken": "Another attempt has its key",
        "parked": "its outcome is unknown until an operator resolves it",
    }

    def charge(connection: Any) -> None:
        nonlocal runs
        with blocking_transaction(connection, key, name="charge", service="shop") as attempt:
            if attempt.is_replayed:
                return
            runs += 1
            if runs == 1:
                connection.execute(f"SELECT 1; ROLLBACK; BEGIN; INSERT INTO {table} VALUES (1); COMMIT")
                if fate == "unsaid":
                    connection.close()
                if fate == "taken":
                    with psycopg.connect(postgres.url) as other:
                        charge(other)
                if fate == "unsaid":
                    raise RuntimeError("the connection is lost")
            attempt.complete("done")

    with psycopg.connect(postgres.url) as connection, pytest.raises(oncegate.OutcomeUnknown, match=sentences[fate]):
        charge(connection)
    warnings = [entry.getMessage() for entry in caplog.records if "ended it" in entry.getMessage()]
    assert len(warnings) == 1
    assert all((sentence in warnings[0]) is (name == fate) for name, sentence in sentences.items())
    with psycopg.connect(postgres.url) as connection:
        expected: Any = contextlib.nullcontext() if fate != "parked" else pytest.raises(oncegate.OutcomeUnknown)
        with expected:
            charge(connection)
    assert runs == {"unsaid": 2, "taken": 2, "parked": 1}[fate]


def test_a_statement_of_the_driver_after_a_rollback_by_sqlalchemy(postgres: Any) -> None:
    """SQLAlchemy does not see it. It may have taken effect outside of the transaction."""
    import sqlalchemy

    table, key = ledger(postgres), uuid.uuid4().hex
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    try:
        for at in range(2):
            with (
                engine.connect() as connection,
                pytest.raises(oncegate.OutcomeUnknown, match="use savepoints" if at == 0 else "not known"),
                blocking_transaction(connection, key, name="charge", service="shop") as attempt,
            ):
                connection.rollback()
                raw = connection.connection
                raw.cursor().execute(f"INSERT INTO {table} VALUES (1)")
                raw.commit()
                attempt.complete("done")
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


def test_statements_of_others_on_a_connection_that_is_in_its_pool_again(postgres: Any) -> None:
    """`rollback()` of a session gives the connection back, and another request takes it: each run sees its own statements."""
    import psycopg
    import sqlalchemy
    from sqlalchemy.orm import Session

    table, key, other = ledger(postgres), uuid.uuid4().hex, uuid.uuid4().hex
    insert = sqlalchemy.text(f"INSERT INTO {table} VALUES (1)")
    url = postgres.url.replace("postgresql:", "postgresql+psycopg:")
    engine = sqlalchemy.create_engine(url, pool_size=1, max_overflow=0)
    try:
        with Session(engine) as one, Session(engine) as two:
            first = blocking_transaction(one, key, name="charge", service="shop")
            second = blocking_transaction(two, other, name="charge", service="shop")
            first.__enter__()
            one.execute(insert)
            driver: Any = one.connection().connection.driver_connection
            one.rollback()
            second.__enter__()
            assert two.connection().connection.driver_connection is driver
            two.execute(sqlalchemy.text("SELECT 1"))
            error = RuntimeError("after the rollback")
            # Not OutcomeUnknown: the statements are none of its own.
            assert not first.__exit__(RuntimeError, error, None)
            driver.cursor().execute("SELECT 1; COMMIT")
            two.rollback()
            with pytest.raises(oncegate.OutcomeUnknown, match="use savepoints"):
                second.__exit__(None, None, None)
        assert driver.cursor_factory is psycopg.Cursor
        with Session(engine) as one, blocking_transaction(one, key, name="charge", service="shop") as attempt:
            assert not attempt.is_replayed
            one.execute(insert)
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_block_of_do_ends_no_transaction(driver: str, postgres: Any) -> None:
    """A statement that fails after it leaves the key free. Behind an unread text, the outcome is unknown."""
    table, key = ledger(postgres), uuid.uuid4().hex
    async with connected(driver, postgres.url) as connection:
        for _ in range(2):
            with pytest.raises(Exception, match="missing") as raised:
                async with transaction(connection, key, name="charge", service="shop"):
                    await execute(connection, "DO $$ BEGIN PERFORM 1; END $$")
                    await execute(connection, "SELECT missing")
            assert not isinstance(raised.value, oncegate.OncegateError)
        async with transaction(connection, key, name="charge", service="shop") as attempt:
            assert not attempt.is_replayed
            await execute(connection, f"INSERT INTO {table} VALUES (1)")
    assert count(postgres, table) == 1


@pytest.mark.parametrize(
    ("text", "may_end"),
    [
        ("DO $x$ BEGIN PERFORM 1; END $x$;", False),
        ("DO $$ BEGIN PERFORM 1; END $$; DO $$ BEGIN NULL; END $$", False),
        ("DO $$ BEGIN PERFORM 1; END $$; COMMIT", True),
        ("SELECT 1 ;; /* a */ ; COMMIT", True),
        ("INSERT INTO a VALUES ('$$'); COMMIT; SELECT '$$'", True),
        ("SELECT a$$; COMMIT; SELECT b$$", True),
        ("SELECT 1 -- $$\n; COMMIT -- $$", True),
        ("SELECT $1; COMMIT; SELECT $1$$", True),
        ("SELECT 1; ROLLBACK TO a; SELECT 2", False),
        ("SELECT '" + "x" * 9000 + "'; COMMIT", True),
        ("SELECT '" + "x" * 9000 + "', CASE WHEN true THEN 1 END;", False),
        ("-- check\nDO $$ BEGIN PERFORM 1; END $$", False),
        ("/* a /* b */ ; COMMIT */ DO 'BEGIN PERFORM 1; END'; SELECT 1", False),
        ("/* a /* b */ ; END */; COMMIT", True),
        ("DO $$ BEGIN " + "PERFORM 1; " * 5000 + "END $$", False),
        ("DO $$ BEGIN " + "PERFORM 1; " * 5000 + "END $$; COMMIT", True),
        ("INSERT INTO a VALUES ('see; end of story') /* ; end */ -- ; end", False),
        ("SELECT 1 -- '\n; COMMIT -- '", True),
        ("SELECT 1 -- x\r; COMMIT", True),
        ("SELECT '--'; COMMIT", True),
        ("SELECT '/*'; COMMIT; SELECT '*/'", True),
        ("SELECT $$'$$; COMMIT; SELECT $$'$$", True),
        ("SELECT $a$ $$ $a$; COMMIT; SELECT $a$ $$ $a$", True),
        ('SELECT "a;""\' end"', False),
        ('SELECT "\'"; COMMIT; SELECT "\'"', True),
        ("SELECT '\"'; COMMIT; SELECT '\"'", True),
        ("SELECT E'it\\'s; end'", False),
        ("SELECT E'\\\\'; COMMIT; SELECT E'\\\\'", True),
        ("SELECT e'a''\\''; COMMIT; SELECT ''", True),
        ("SELECT typE'\\'; COMMIT; SELECT '\\'", True),
        ("SELECT 'a\\'; COMMIT; SELECT 'b\\'", True),
        ("SELECT 'it''s; end'", False),
        ("SELECT a\u20ac$$; COMMIT; SELECT b\u20ac$$", True),
        ("SELECT $\u20ac$; end $\u20ac$", False),
        ("SELECT '; COMMIT", True),
        ("SELECT $$; COMMIT", True),
        ("SELECT 1; /* COMMIT", True),
        ("SELECT 1 /*; COMMIT */; /* x */ -- y\n END", True),
        ("SELECT '" + "a; end " * 10_000 + "'", False),
        # What is longer is not read.
        ("SELECT '" + "a; end " * 20_000 + "'", True),
    ],
)
def test_a_text_that_may_end_a_transaction(text: str, may_end: bool) -> None:
    from oncegate.transactions import _may_end

    assert _may_end(text) == may_end


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("/* a /* b */ c */ COMMIT", True),
        ("/* /* */ COMMIT */ SELECT 1", False),
        ("-- a\rCOMMIT", True),
        ("/* ' */ COMMIT /* ' */", True),
        ("'COMMIT'", False),
        ("/* COMMIT", False),
    ],
)
def test_a_text_that_ends_a_transaction_at_once(text: str, ends: bool) -> None:
    from oncegate.transactions import _ends_at_once

    assert _ends_at_once(text) == ends


@pytest.mark.parametrize("driver", DRIVERS)
@pytest.mark.parametrize(
    "texts",
    [
        ["-- check\nDO $$ BEGIN RAISE EXCEPTION 'no duplicate'; END $$"],
        ["/* orders */ DO $$ BEGIN PERFORM 1; END $$", "{duplicate}"],
        ["DO 'BEGIN RAISE EXCEPTION ''no duplicate''; END'"],
        ["DO $$ BEGIN " + "PERFORM 1; " * 500 + "RAISE EXCEPTION 'no duplicate'; END $$"],
        ["SELECT CASE WHEN '" + "x" * 5000 + "' = '' THEN 1 END;", "{duplicate}"],
        ["SELECT 'see; end of story'", "{duplicate} /* ; end */"],
    ],
)
async def test_a_failure_behind_a_text_that_ends_nothing_is_that_of_the_driver(
    driver: str, texts: list[str], postgres: Any
) -> None:
    import psycopg

    table, key = ledger(postgres), uuid.uuid4().hex
    duplicate = f"CREATE UNIQUE INDEX ON {table} ((1)); INSERT INTO {table} VALUES (1); INSERT INTO {table} VALUES (1)"
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        *made, last = duplicate.split("; ")
        for statement in made:
            admin.execute(statement)
    async with connected(driver, postgres.url) as connection:
        for _ in range(2):
            with pytest.raises(Exception, match="duplicate") as raised:
                async with transaction(connection, key, name="charge", service="shop"):
                    for text in texts:
                        await execute(connection, text.replace("{duplicate}", last))
            assert not isinstance(raised.value, oncegate.OncegateError)
    assert count(postgres, table) == 1


@pytest.mark.parametrize("part", [";", ";/*", "; ", ";/**/", " $a$ ", ";--", "'", "E'\\", '"', "$$", "*/", "$a", ";$1"])
def test_a_hostile_text_is_read_in_no_time(part: str) -> None:
    from oncegate.transactions import _may_end

    began = time.process_time()
    for number in (700, 2_000, 300_000):
        _may_end(part * number + " x end;")
    assert time.process_time() - began < 5


def test_a_session_with_several_engines_is_refused(postgres: Any) -> None:
    """Their transactions are committed one by one, so that one may be there without the other."""
    import sqlalchemy
    from sqlalchemy.orm import Session

    table, key = ledger(postgres), uuid.uuid4().hex
    url = postgres.url.replace("postgresql:", "postgresql+psycopg:")
    made = engines = [sqlalchemy.create_engine(url) for _ in range(2)]

    class Routing(Session):
        def get_bind(self, mapper: Any = None, *, clause: Any = None, **_: Any) -> Any:
            return engines[isinstance(clause, sqlalchemy.Insert)]

    rows = sqlalchemy.table(table, sqlalchemy.column("n"))
    try:
        for _ in range(2):
            with (
                Routing() as session,
                pytest.raises(oncegate.ConfigError, match="several engines"),
                blocking_transaction(session, key, name="charge", service="shop") as attempt,
            ):
                session.execute(sqlalchemy.insert(rows).values(n=1))
                attempt.complete("done")
        assert count(postgres, table) == 0
        # All of it on one engine is fine.
        engines = [made[0]] * 2
        with Routing() as session, blocking_transaction(session, key, name="charge", service="shop") as attempt:
            session.execute(sqlalchemy.insert(rows).values(n=1))
            attempt.complete("done")
    finally:
        for engine in made:
            engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("kind", ["session", "scoped_session", "psycopg"])
def test_types_that_are_made_of_those_of_a_driver(kind: str, postgres: Any) -> None:
    """Such as the sessions of SQLModel and Flask-SQLAlchemy."""
    import psycopg
    import sqlalchemy
    from sqlalchemy.orm import Session, scoped_session, sessionmaker

    class OwnConnection(psycopg.Connection[Any]):
        pass

    class OwnSession(Session):
        pass

    table, key = ledger(postgres), uuid.uuid4().hex
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    made: Any = {
        "session": lambda: OwnSession(engine),
        "scoped_session": lambda: scoped_session(sessionmaker(engine, class_=OwnSession)),
        "psycopg": lambda: OwnConnection.connect(postgres.url),
    }
    try:
        for is_replayed in (False, True):
            connection = made[kind]()
            with blocking_transaction(connection, key, name="charge", service="shop") as attempt:
                assert attempt.is_replayed is is_replayed
                if not is_replayed:
                    statement: Any = f"INSERT INTO {table} VALUES (1)"
                    connection.execute(statement if kind == "psycopg" else sqlalchemy.text(statement))
                    with pytest.raises(oncegate.OncegateError, match="use savepoints"):
                        connection.execute("COMMIT" if kind == "psycopg" else sqlalchemy.text("COMMIT"))
                    attempt.complete("done")
            assert attempt.value == "done"
            connection.close()
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_commit_that_is_not_answered_ends_with_its_task(
    driver: str, postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does without the library: the connection is asked nothing more."""
    from psycopg import AsyncConnection, waiting

    from oncegate.transactions import _Run

    # psycopg waits twice for 5 s before it gives up: once for its request to cancel, and once for the statement.
    own_cancel, own_wait = AsyncConnection._try_cancel, waiting.wait_async

    async def cancel(self: Any, *, timeout: float) -> None:
        await own_cancel(self, timeout=min(timeout, 0.5))

    async def wait(*arguments: Any, timeout: float | None = None, **options: Any) -> Any:
        return await own_wait(*arguments, timeout=0.5 if timeout == 5.0 else timeout, **options)

    monkeypatch.setattr(AsyncConnection, "_try_cancel", cancel)
    monkeypatch.setattr(waiting, "wait_async", wait)
    key, committing, own_commit = uuid.uuid4().hex, asyncio.Event(), _Run.commit

    async def commit(self: Any) -> None:
        postgres.pause()
        committing.set()
        await own_commit(self)

    async def charge() -> None:
        async with connected(driver, postgres.url) as connection:
            try:
                async with transaction(connection, key, name="charge", service="shop") as attempt:
                    attempt.complete("done")
            finally:
                ended.set()

    ended = asyncio.Event()
    monkeypatch.setattr(_Run, "commit", commit)
    task = asyncio.create_task(charge())
    try:
        await asyncio.wait_for(committing.wait(), 60)
        await asyncio.sleep(0.1)
        task.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 20)
        is_done = ended.is_set()
    finally:
        postgres.resume()
        await asyncio.wait({task}, timeout=60)
    assert is_done
    monkeypatch.undo()
    # It was not known. The record knows.
    async with connected(driver, postgres.url) as connection:
        async with transaction(connection, key, name="charge", service="shop") as attempt:
            if not attempt.is_replayed:
                attempt.complete("done")
        assert attempt.value == "done"


@pytest.mark.parametrize("ends", ["completes", "raises"])
@pytest.mark.parametrize("how", ["session", "alchemy", "psycopg"])
def test_a_commit_of_its_own_is_noticed_in_blocking_programs(how: str, ends: str, postgres: Any) -> None:
    import psycopg
    import sqlalchemy
    from sqlalchemy.orm import Session

    table, key = ledger(postgres), uuid.uuid4().hex
    insert: Any = f"INSERT INTO {table} VALUES (1)"
    engine = sqlalchemy.create_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))
    opened: Any = {
        "session": lambda: Session(engine),
        "alchemy": engine.connect,
        "psycopg": lambda: psycopg.connect(postgres.url),
    }
    try:
        for at in range(3):
            with opened[how]() as connection:
                with (
                    pytest.raises(oncegate.OutcomeUnknown, match="use savepoints" if at == 0 else "not known"),
                    blocking_transaction(connection, key, name="charge", service="shop") as attempt,
                ):
                    connection.execute(insert if how == "psycopg" else sqlalchemy.text(insert))
                    if how == "psycopg":
                        connection.execute("SELECT 1; COMMIT")
                    else:
                        connection.commit()
                    with opened[how]() as other, pytest.raises(InProgress):  # noqa: SIM117
                        with blocking_transaction(other, key, name="charge", service="shop"):
                            pass
                    if ends == "raises":
                        raise RuntimeError("after the commit")
                    attempt.complete("done")
                # The connection is of use afterwards.
                with blocking_transaction(connection, uuid.uuid4().hex, name="charge", service="shop") as attempt:
                    attempt.complete("done")
    finally:
        engine.dispose()
    assert count(postgres, table) == 1


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, GeneratorExit])
async def test_a_program_that_ends_after_a_commit_of_its_own(end: Any, postgres: Any) -> None:
    import psycopg

    table = ledger(postgres)
    key = uuid.uuid4().hex
    with psycopg.connect(postgres.url) as connection:
        with pytest.raises(end), blocking_transaction(connection, key, name="charge", service="shop"):
            connection.execute(f"INSERT INTO {table} VALUES (1)")
            connection.execute("SELECT 1; COMMIT")
            raise end
        with (
            pytest.raises((oncegate.OutcomeUnknown, InProgress)),
            blocking_transaction(connection, key, name="charge", service="shop"),
        ):
            connection.execute(f"INSERT INTO {table} VALUES (1)")
    key = uuid.uuid4().hex
    async with connected("psycopg", postgres.url) as other:
        with pytest.raises(end):
            async with transaction(other, key, name="charge", service="shop"):
                await other.execute(f"INSERT INTO {table} VALUES (1)")
                await other.execute("SELECT 1; COMMIT")
                raise end
    async with connected("psycopg", postgres.url) as other:
        with pytest.raises((oncegate.OutcomeUnknown, InProgress)):
            async with transaction(other, key, name="charge", service="shop"):
                await other.execute(f"INSERT INTO {table} VALUES (1)")
    assert count(postgres, table) == 2


KILLED = """
import sys, time, psycopg, oncegate
connection = psycopg.connect(sys.argv[1])
with oncegate.blocking_transaction(connection, sys.argv[3], name="charge", service="shop", lease=1):
    connection.execute(f"INSERT INTO {sys.argv[2]} VALUES (1)")
    connection.execute("SELECT 1; COMMIT")
    print("committed", flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_killed_after_a_commit_of_its_own(postgres: Any) -> None:
    import psycopg

    table, key = ledger(postgres), uuid.uuid4().hex
    with subprocess.Popen([sys.executable, "-c", KILLED, postgres.url, table, key], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"committed\n"
        process.kill()
    deadline = time.monotonic() + 60
    with psycopg.connect(postgres.url) as connection:
        while True:
            with (
                pytest.raises((InProgress, oncegate.OutcomeUnknown)) as refused,
                blocking_transaction(connection, key, name="charge", service="shop"),
            ):
                connection.execute(f"INSERT INTO {table} VALUES (1)")
            if refused.type is oncegate.OutcomeUnknown:
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert count(postgres, table) == 1


@pytest.mark.parametrize("kind", ["threads", "tasks"])
async def test_a_connection_has_one_transaction_at_a_time(kind: str, postgres: Any) -> None:
    """The transaction of another thread or task on the connection would be a savepoint, and be rolled back with the first one."""
    import psycopg

    table, ready = ledger(postgres), threading.Barrier(2)
    outcomes: list[str] = []
    if kind == "threads":
        for _ in range(20):
            with psycopg.connect(postgres.url) as plain:

                def charge(connection: Any = plain) -> None:
                    try:
                        ready.wait(60)
                        with blocking_transaction(connection, uuid.uuid4().hex, name="charge", service="shop") as attempt:
                            connection.execute(f"INSERT INTO {table} VALUES (1)")
                            attempt.complete("done")
                        outcomes.append("done")
                    except oncegate.ConfigError:
                        outcomes.append("refused")

                await asyncio.gather(asyncio.to_thread(charge), asyncio.to_thread(charge))
    else:
        async with connected("psycopg", postgres.url) as connection:

            async def charge_async() -> None:
                try:
                    async with transaction(connection, uuid.uuid4().hex, name="charge", service="shop") as attempt:
                        await connection.execute(f"INSERT INTO {table} VALUES (1)")
                        attempt.complete("done")
                    outcomes.append("done")
                except oncegate.ConfigError:
                    outcomes.append("refused")

            await asyncio.gather(charge_async(), charge_async())
    assert outcomes.count("done") == count(postgres, table)
    assert "refused" in outcomes


async def test_row_and_cursor_factories(postgres: Any) -> None:
    import psycopg
    from psycopg.rows import dict_row, namedtuple_row, scalar_row
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    every: list[dict[str, Any]] = [{"row_factory": factory} for factory in (dict_row, namedtuple_row, scalar_row)]
    for options in [*every, {"cursor_factory": psycopg.AsyncRawCursor}, {"cursor_factory": psycopg.AsyncClientCursor}]:
        key = uuid.uuid4().hex
        async with await psycopg.AsyncConnection.connect(postgres.url, **options) as connection:
            for _ in range(2):
                async with transaction(connection, key, name="charge", service="shop") as attempt:
                    if not attempt.is_replayed:
                        attempt.complete("done")
                assert attempt.value == "done"
        async with AsyncConnectionPool(postgres.url, min_size=1, open=False, kwargs=options) as pool:
            once = oncegate.idempotent(name="work", key=lambda k: k, store=oncegate.PostgresStore(pool), service="shop")

            async def work(_: str) -> int:
                return 5

            assert [await once(work)(key) for _ in range(2)] == [5, 5]
        blocking = {name: getattr(psycopg, value.__name__[5:]) if "cursor" in name else value for name, value in options.items()}

        def in_thread(key: str = key, options: Any = blocking) -> None:
            with ConnectionPool(postgres.url, min_size=1, open=False, kwargs=options) as pool:
                store = oncegate.PostgresStore(pool)
                charge = oncegate.idempotent(name="charge", key=lambda k: k, store=store, service="shop")(lambda _: 5)
                assert [charge(key) for _ in range(2)] == [5, 5]

        await asyncio.to_thread(in_thread)


async def test_the_record_of_a_transaction_is_that_of_all_languages(postgres: Any) -> None:
    """The operation is the name alone, and the fingerprint is that of the input's JSON."""
    from oncegate.fingerprint import tag_and_digest
    from oncegate.identity import record_id

    key = uuid.uuid4().hex
    async with connected("psycopg", postgres.url) as connection:
        async with transaction(connection, key, name="charge", service="shop", input={"b": 1, "a": 2}) as attempt:
            attempt.complete("done")
        assert attempt.record == record_id("shop", (), [b"charge"], key.encode())
        found = await connection.execute("SELECT fingerprint FROM oncegate.lookup(%s)", (attempt.record,))
        _, digest = tag_and_digest("", "", content_type=b"application/json", body=b'{"a":2,"b":1}')
        assert await found.fetchone() == (b"\x01" + digest,)


@pytest.mark.parametrize("driver", ["psycopg", "sqlalchemy"])
async def test_a_commit_that_is_a_rollback_is_no_success(driver: str, postgres: Any) -> None:
    """Another task makes a statement fail on the connection. PostgreSQL then answers COMMIT with ROLLBACK, and no error."""
    import psycopg
    from sqlalchemy.ext.asyncio import create_async_engine

    table = ledger(postgres)
    outcomes = set()
    engine = create_async_engine(postgres.url.replace("postgresql:", "postgresql+psycopg:"))

    async def audit(own: Any, statements: int) -> None:
        with contextlib.suppress(psycopg.Error):
            for _ in range(statements):
                await own.execute("SELECT 1")
            await own.execute("INSERT INTO a_table_that_is_missing VALUES (1)")

    for statements, pauses in itertools.product(range(3), range(3)):
        async with contextlib.AsyncExitStack() as stack:
            connection: Any
            if driver == "sqlalchemy":
                connection = await stack.enter_async_context(engine.connect())
                own = (await connection.get_raw_connection()).driver_connection
            else:
                own = connection = await stack.enter_async_context(await psycopg.AsyncConnection.connect(postgres.url))
            before = count(postgres, table)
            try:
                async with transaction(connection, uuid.uuid4().hex, name="charge", service="shop") as attempt:
                    await execute(connection, f"INSERT INTO {table} VALUES (1)")
                    task = asyncio.create_task(audit(own, statements))
                    attempt.complete("done")
                    for _ in range(pauses):
                        await asyncio.sleep(0)
                outcome = "committed"
            except Exception:
                outcome = "failed"
            await task
            if own.info.transaction_status:
                await own.rollback()
            assert count(postgres, table) == before + (outcome == "committed"), (statements, pauses, outcome)
            outcomes.add(outcome)
    await engine.dispose()
    assert "failed" in outcomes


@pytest.mark.parametrize("sealed", [False, True])
def test_a_connection_without_transactions_is_refused(sealed: bool, postgres: Any) -> None:
    import sqlalchemy

    from oncegate.seal import SealKey

    keys, runs, key = [SealKey(b"\x01" * 32)] if sealed else None, 0, uuid.uuid4().hex
    url = postgres.url.replace("postgresql:", "postgresql+psycopg:")
    engine = sqlalchemy.create_engine(url, isolation_level="AUTOCOMMIT")
    with (
        engine.connect() as connection,
        pytest.raises(oncegate.ConfigError, match="commits each statement"),
        blocking_transaction(connection, key, name="charge", service="shop", seal_keys=keys),
    ):
        runs += 1
    engine.dispose()
    assert runs == 0
    # The claim that was committed by itself is released.
    engine = sqlalchemy.create_engine(url)
    with (
        engine.connect() as connection,
        blocking_transaction(connection, key, name="charge", service="shop", seal_keys=keys) as attempt,
    ):
        assert not attempt.is_replayed
        attempt.complete("done")
    engine.dispose()


@pytest.mark.filterwarnings("ignore:Accessing the database during app initialization")
def test_connections_of_other_kinds(postgres: Any) -> None:
    import django.conf
    import psycopg_pool

    with (
        psycopg_pool.ConnectionPool(postgres.url, min_size=1, open=True) as pool,
        pytest.raises(oncegate.ConfigError, match="and not the pool"),
        blocking_transaction(pool, "k", name="charge", service="shop"),
    ):
        pass
    if not django.conf.settings.configured:
        django.conf.settings.configure()
    from django.db.backends.postgresql.base import DatabaseWrapper
    from django.db.utils import ConnectionHandler

    from oncegate import Attempt

    parts = urlsplit(postgres.url)
    database = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "owner", "HOST": parts.hostname}
    connections = ConnectionHandler({"default": {**database, "PORT": parts.port}})
    connection = connections["default"]
    assert isinstance(connection, DatabaseWrapper)
    connection.set_autocommit(False)
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        # No attempt has this record, so that the call reached the database.
        with pytest.raises(StaleAttempt):
            oncegate.complete_blocking(connection, Attempt(uuid.uuid4().bytes * 2, 1), oncegate.StoredResponse.of(201))
    finally:
        connection.rollback()
        connection.close()


async def test_a_rollback_that_the_driver_hides_has_no_value(postgres: Any) -> None:
    import psycopg

    table = ledger(postgres)
    async with connected("psycopg", postgres.url) as connection:
        async with transaction(connection, uuid.uuid4().hex, name="charge", service="shop") as attempt:
            await connection.execute(f"INSERT INTO {table} VALUES (1)")
            attempt.complete("done")
            raise psycopg.Rollback
        assert attempt.value is None
    assert count(postgres, table) == 0


async def test_a_run_that_is_cancelled_after_a_commit_of_its_own(postgres: Any) -> None:
    table, key = ledger(postgres), uuid.uuid4().hex
    committed = asyncio.Event()

    async def charge() -> None:
        async with (
            connected("psycopg", postgres.url) as connection,
            transaction(connection, key, name="charge", service="shop"),
        ):
            await connection.execute(f"INSERT INTO {table} VALUES (1)")
            await connection.execute("SELECT 1; COMMIT")
            committed.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(charge())
    await asyncio.wait_for(committed.wait(), 60)
    task.cancel()
    with pytest.raises((oncegate.OutcomeUnknown, asyncio.CancelledError)):
        await task
    with pytest.raises(oncegate.OutcomeUnknown):
        await charge()
    assert count(postgres, table) == 1


async def test_a_connection_inside_of_a_transaction_is_refused(postgres: Any) -> None:
    async with connected("asyncpg", postgres.url) as connection, connection.transaction():
        with pytest.raises(oncegate.ConfigError, match="savepoint"):
            async with transaction(connection, "k", name="charge", service="shop"):
                pass


def test_the_fields_of_a_sidecar() -> None:
    assert oncegate.sidecar_attempt({}) is None
    attempt = oncegate.sidecar_attempt({"Oncegate-Record": "07" * 32, "Oncegate-Token": "17", "Oncegate-Attempt": "2"})
    assert attempt is not None
    assert (attempt.record, attempt.token, attempt.number) == (b"\x07" * 32, 17, 2)
    with pytest.raises(oncegate.ConfigError):
        oncegate.sidecar_attempt({"oncegate-record": "7", "oncegate-token": "1"})


async def test_the_record_of_a_request_in_the_transaction_of_its_handler(postgres: Any) -> None:
    """Both are committed, or neither is: what was rolled back is executed again, and what was committed is replayed."""
    from psycopg_pool import AsyncConnectionPool

    from oncegate import IdempotencyMiddleware, StoredResponse

    table, key = ledger(postgres), uuid.uuid4().hex
    runs = 0

    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=4, open=False) as pool:

        async def handler(own: Any, receive: Any, send: Any) -> None:
            nonlocal runs
            runs += 1
            async with pool.connection() as connection, connection.transaction():
                await connection.execute(f"INSERT INTO {table} VALUES (1)")
                made = StoredResponse.of(201, [("content-type", "text/plain")], "made") if own["path"] == "/with" else None
                await oncegate.complete(connection, response=made)
                if runs == 1:
                    raise ConnectionError("the commit fails")
            await send({"type": "http.response.start", "status": 201, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"made"})

        app = IdempotencyMiddleware(handler, store=oncegate.PostgresStore(pool), service="tests", scope="single-tenant")

        async def ask(path: str) -> tuple[int, bytes, bool]:
            sent: list[Any] = []

            async def receive() -> Any:
                return {"type": "http.request", "body": b""}

            async def send(message: Any) -> None:
                sent.append(message)

            headers = [(b"host", b"shop.test"), (b"idempotency-key", key.encode())]
            own = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": headers}
            with contextlib.suppress(ConnectionError):
                await app(own, receive, send)
            return sent[0]["status"], sent[1]["body"], (b"idempotent-replayed", b"true") in sent[0]["headers"]

        assert (await ask("/with"))[0] == 500
        assert count(postgres, table) == 0
        assert await ask("/with") == (201, b"made", False)
        assert await ask("/with") == (201, b"made", True)
        assert await ask("/without") == (201, b"made", False)
        assert await ask("/without") == (201, b"made", True)
    assert (runs, count(postgres, table)) == (3, 2)


@pytest.mark.parametrize("commit", ["works", "fails", "raises"])
@pytest.mark.parametrize("form", ["dependency", "handler", "background"])
async def test_a_commit_after_the_response_decides(form: str, commit: str, postgres: Any) -> None:
    """FastAPI ends a dependency with `yield` after the response. The client gets no success that was rolled back."""
    import httpx
    import psycopg
    from fastapi import Depends, FastAPI, HTTPException
    from psycopg_pool import AsyncConnectionPool
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse

    table, key = ledger(postgres), uuid.uuid4().hex
    with psycopg.connect(postgres.url) as direct:
        direct.execute(f"ALTER TABLE {table} ADD UNIQUE (n) DEFERRABLE INITIALLY DEFERRED")
    runs = 0

    @contextlib.asynccontextmanager
    async def transaction_of() -> Any:
        async with await psycopg.AsyncConnection.connect(postgres.url) as connection, connection.transaction():
            yield connection

    async def opened() -> Any:
        async with transaction_of() as connection:
            yield connection

    async def pay(connection: Any) -> dict[str, int]:
        nonlocal runs
        runs += 1
        await connection.execute(f"INSERT INTO {table} VALUES (1)")
        if commit == "fails" and runs == 1:
            await connection.execute(f"INSERT INTO {table} VALUES (1)")
        await oncegate.complete(connection)
        if commit == "raises" and runs == 1:
            raise HTTPException(402, "declined")
        return {"run": runs}

    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=4, open=False) as pool:
        app = FastAPI()
        app.add_middleware(
            oncegate.IdempotencyMiddleware, store=oncegate.PostgresStore(pool), service="tests", scope="single-tenant"
        )

        @app.post("/dependency")
        async def dependency(connection: Any = Depends(opened)) -> Any:
            return await pay(connection)

        @app.post("/handler")
        async def handler() -> Any:
            async with transaction_of() as connection:
                return await pay(connection)

        @app.post("/background")
        async def background(connection: Any = Depends(opened)) -> Any:
            return JSONResponse(await pay(connection), background=BackgroundTask(asyncio.sleep, 0.1))

        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test", timeout=60) as client:
            answers = [await client.post(f"/{form}", headers={"idempotency-key": key}) for _ in range(3)]
    statuses = [(answer.status_code, answer.headers.get("idempotent-replayed")) for answer in answers]
    if commit == "works":
        assert statuses == [(200, None), (200, "true"), (200, "true")]
        assert (runs, count(postgres, table)) == (1, 1)
    elif commit == "fails":
        # Rolled back, as was seen: the retry executes.
        assert statuses == [(500, None), (200, None), (200, "true")]
        assert (runs, count(postgres, table)) == (2, 1)
    else:
        # The handler's own response after a rollback, which frees the key.
        assert statuses == [(402, None), (200, None), (200, "true")]
        assert (runs, count(postgres, table)) == (2, 1)
    assert "not-stored" not in str([answer.headers for answer in answers])


@pytest.mark.parametrize("ends", ["commit", "rollback"])
@pytest.mark.parametrize(("status", "server_errors"), [(201, "replay"), (500, "replay"), (500, "release")])
async def test_a_transaction_that_is_open_after_the_request(
    status: int, server_errors: str, ends: str, postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is left to its transaction, and the response is not recorded in its place."""
    import httpx
    import psycopg
    from psycopg_pool import AsyncConnectionPool
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    is_over, runs = False, 0
    monkeypatch.setattr("oncegate.asgi.COMMIT_TIMEOUT", 0.2)
    monkeypatch.setattr("oncegate.flow.COMMIT_WAIT", 0.2)
    table, key = ledger(postgres), uuid.uuid4().hex
    async with (
        AsyncConnectionPool(postgres.url, min_size=1, max_size=4, open=False) as pool,
        await psycopg.AsyncConnection.connect(postgres.url) as connection,
    ):

        async def handler(_: Any) -> Response:
            nonlocal runs
            runs += 1
            if is_over:
                return Response("made", 201)
            await connection.execute(f"INSERT INTO {table} VALUES (1)")
            made = oncegate.StoredResponse.of(201, body="made")
            await oncegate.complete(connection, response=made)
            return Response("made", status)

        store = oncegate.PostgresStore(pool)
        app = oncegate.IdempotencyMiddleware(
            Starlette(routes=[Route("/", handler, methods=["POST"])]),
            store=store, service="tests", scope="single-tenant", wait=0, server_errors=server_errors,
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test", timeout=60) as client:

            async def ask() -> Any:
                return await client.post("/", headers={"idempotency-key": key})

            first = await ask()
            assert first.status_code == (409 if status == 201 else 500)
            assert "replay" not in first.headers.get("idempotency-status", "")
            assert (await ask()).status_code in (409, 503)
            await (connection.commit() if ends == "commit" else connection.rollback())
            is_over = True
            deadline = time.monotonic() + 60
            while (again := await ask()).status_code in (409, 503):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            assert (again.status_code, again.text) == (201, "made")
            # After the rollback the key was free.
            assert again.headers.get("idempotent-replayed") == ("true" if ends == "commit" else None)
    assert (runs, count(postgres, table)) == ((1, 1) if ends == "commit" else (2, 0))


async def _stored(postgres: Any, record: bytes) -> bytes:
    import psycopg

    async with await psycopg.AsyncConnection.connect(postgres.url) as connection:
        found = await connection.execute("SELECT response FROM oncegate.records WHERE id = %s", (record,))
        row = await found.fetchone()
    assert row is not None
    return bytes(row[0])


@pytest.mark.parametrize("driver", DRIVERS)
async def test_values_are_sealed(driver: str, postgres: Any) -> None:
    from oncegate.seal import SealKey, SealKeys

    keys = [SealKey(b"\x01" * 32)]
    other = SealKey(b"\x02" * 32)
    table = ledger(postgres)
    runs = 0
    async with connected(driver, postgres.url) as connection:

        async def charge(key: str, seal_keys: Any = None, fail: bool = False) -> tuple[Any, bytes]:
            nonlocal runs
            async with transaction(connection, key, name="charge", service="shop", input=5, seal_keys=seal_keys) as attempt:
                if not attempt.is_replayed:
                    runs += 1
                    await execute(connection, f"INSERT INTO {table} VALUES (5)")
                    attempt.complete({"balance": 17})
                    if fail:
                        raise RuntimeError("in the middle")
            return attempt.value, attempt.record

        key = uuid.uuid4().hex
        with pytest.raises(RuntimeError):
            await charge(key, keys, fail=True)
        assert count(postgres, table) == 0
        value, record = await charge(key, keys)
        stored = await _stored(postgres, record)
        assert value == {"balance": 17}
        assert b"balance" not in stored
        assert b"ogseal" in stored
        assert (await charge(key, SealKeys([other, *keys], required=True)))[0] == {"balance": 17}
        with pytest.raises(oncegate.ResponseSealed):
            await charge(key)
        with pytest.raises(oncegate.ResponseSealed, match=keys[0].id.hex()):
            await charge(key, [other])
        with pytest.raises(KeyReused):
            async with transaction(connection, key, name="charge", service="shop", input=6, seal_keys=[other]):
                pass

        # What is in clear is replayed, unless it must be sealed; keys that only open seal nothing.
        key = uuid.uuid4().hex
        _, clear = await charge(key, SealKeys(keys, opens_only=True))
        assert b"balance" in await _stored(postgres, clear)
        assert (await charge(key, keys))[0] == {"balance": 17}
        with pytest.raises(oncegate.ResponseSealed):
            await charge(key, SealKeys(keys, required=True))

        # Moved to another record, it is refused.
        import psycopg

        with psycopg.connect(postgres.url) as direct:
            direct.execute("UPDATE oncegate.records SET response = %s WHERE id = %s", (stored, clear))
        with pytest.raises(oncegate.RecordCorrupt):
            await charge(key, keys)
    assert (runs, count(postgres, table)) == (3, 2)


async def test_a_response_in_the_transaction_of_a_handler_is_sealed(postgres: Any) -> None:
    """By the keys of the middleware's store, or of the sidecar in front."""
    from psycopg_pool import AsyncConnectionPool

    from oncegate import StoredResponse
    from oncegate.engine import Permit, Policy, Reply, engine_of
    from oncegate.seal import SealedStore, SealKey, SealKeys

    keys = SealKeys([SealKey(b"\x01" * 32)], required=True)
    made = StoredResponse.of(201, body="the balance is 17")
    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=4, open=False) as pool:
        engine = engine_of(SealedStore(oncegate.PostgresStore(pool), keys), blocking=False)
        policy = Policy(lease=30, wait=5)
        for behind_a_sidecar in (False, True):
            record = uuid.uuid4().bytes * 2
            permit = await engine.claim(record, b"\x01" + bytes(32), policy)
            assert isinstance(permit, Permit)
            engine.leave(permit)
            attempt: Any = permit.attempt
            if behind_a_sidecar:
                fields = {"oncegate-record": record.hex(), "oncegate-token": str(attempt.token)}
                attempt = oncegate.sidecar_attempt(fields)
            async with pool.connection() as connection, connection.transaction():
                seal_keys = keys if behind_a_sidecar else None
                await oncegate.complete(connection, attempt, made, seal_keys=seal_keys)
            assert b"balance" not in await _stored(postgres, record)
            reply = await engine.claim(record, b"\x01" + bytes(32), policy)
            assert isinstance(reply, Reply)
            assert StoredResponse.decode(reply.response).body == b"the balance is 17"


def _responses() -> Any:
    import django.conf
    from django.http import HttpResponse
    from fastapi.responses import JSONResponse
    from starlette.responses import Response

    if not django.conf.settings.configured:
        django.conf.settings.configure()
    made = JSONResponse({"charged": 5}, 201, {"X-Trace": "7", "Set-Cookie": "sid=1", "Location": "/charges/1"})
    view = HttpResponse(b'{"charged":5}', status=201, content_type="application/json", headers={"Location": "/charges/1"})
    plain = Response(b'{"charged":5}', 201, {"location": "/charges/1"}, "application/json")
    return [made, view, plain]


@pytest.mark.parametrize("at", range(3))
def test_a_response_of_a_framework_is_stored(at: int) -> None:
    from oncegate.response import response_of

    stored = response_of(_responses()[at])
    assert (stored.status, stored.body) == (201, b'{"charged":5}')
    names = {name for name, _ in stored.headers}
    assert {"content-type", "location"} <= names
    assert not names & {"set-cookie", "x-trace"}
    with_more = response_of(_responses()[0], frozenset({"x-trace"}))
    assert ("x-trace", b"7") in with_more.headers
    made = oncegate.StoredResponse.of(201, body="made")
    assert response_of(made) is made


async def test_what_is_no_response_is_a_type_error(postgres: Any) -> None:
    import psycopg
    from fastapi.responses import StreamingResponse

    attempt = oncegate.Attempt(bytes(32), 1)
    async with await psycopg.AsyncConnection.connect(postgres.url) as connection, connection.transaction():
        for wrong in ({"charged": 5}, "made", b"", 0, StreamingResponse(iter([b"made"]))):
            with pytest.raises(TypeError, match="pass a StoredResponse, such as"):
                await oncegate.complete(connection, attempt, wrong)
        assert not attempt.is_completed


def test_the_record_is_that_of_the_other_languages() -> None:
    """One key has one effect among the libraries on one database. What the library for Node computes stands here."""
    from oncegate.transactions import _attempt

    for options, record, fingerprint in [
        (
            {"input": {"total": 5, "currency": "EUR"}},
            "ef21453421b6087af3c40e153a26be2b6f15015738f7db45dfdd8e3e18e9aa05",
            "015d11099d439407416aa8b48fc456063dfb55f702c2d31f247a16d12cda5091ce",
        ),
        (
            {"caller": ("caller", "ann")},
            "83f7f7c1a69e40e9c397b4acaea50908ce7cba05c93f2cd0a5e4c28ca3786f69",
            "01042fb8272d1b3caac24522c0ee07b0d9b6164514bcf2b19433ae6bb2b60e3def",
        ),
    ]:
        attempt = _attempt("order-1", {"name": "charge", "service": "shop", **options})
        own = attempt._claim_arguments()
        assert (own[0].hex(), own[2].hex(), own[7]) == (record, fingerprint, "charge")
        assert attempt.record.hex() == record
