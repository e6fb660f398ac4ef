"""The effect and its record in one transaction, over each driver."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

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
            yield connection
            await connection.close()
        case "sqlalchemy":
            from sqlalchemy.ext.asyncio import create_async_engine

            engine = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
            async with engine.connect() as connection:
                yield connection
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
            async with transaction(connection, key, name="charge", input=amount) as attempt:
                if not attempt.is_replayed:
                    await execute(connection, f"INSERT INTO {table} VALUES ({amount})")
                    attempt.complete({"charged": amount})
                    if fail:
                        raise RuntimeError("in the middle")
            return attempt.value

        with pytest.raises(RuntimeError):
            await charge(5, fail=True)
        assert count(postgres, table) == 0
        async with transaction(connection, key, name="charge", input=5) as attempt:
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
                with blocking_transaction(connection, key, name="charge") as attempt:
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
    async with transaction(connection, "k", name="charge"):
        pass


async def test_a_late_commit_is_rolled_back(postgres: Any) -> None:
    """An attempt whose record was taken over by another one must not commit its effect."""
    import psycopg
    from psycopg_pool import AsyncConnectionPool

    from oncegate.engine import Permit, Policy, engine_of

    table, record = ledger(postgres), uuid.uuid4().bytes * 2
    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=2, open=False) as pool:
        engine = engine_of(oncegate.PostgresStore(pool), blocking=False)
        policy = Policy(lease=0.1, on_abandoned="reexecute", wait=5)
        slow = await engine.claim(record, b"\x01" + bytes(32), policy)
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


async def test_a_connection_inside_of_a_transaction_is_refused(postgres: Any) -> None:
    async with connected("asyncpg", postgres.url) as connection, connection.transaction():
        with pytest.raises(oncegate.ConfigError, match="savepoint"):
            async with transaction(connection, "k", name="charge"):
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

        app = IdempotencyMiddleware(handler, store=oncegate.PostgresStore(pool), scope="single-tenant")

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
