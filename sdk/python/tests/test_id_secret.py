"""A store that belongs to an id secret executes nothing, whatever the settings say."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

import servers
from conftest import LOOK_COUNTS
from oncegate import (
    IdempotencyMiddleware,
    PostgresStore,
    RecordCorrupt,
    RedisStore,
    StoreRefused,
    StoreUnavailable,
    blocking_transaction,
    idempotent,
    transaction,
)
from oncegate.store import Claim
from test_asgi import ask, scope, status
from test_transactions import DRIVERS, connected

pytestmark = pytest.mark.usefixtures("short_looks")
MARK = bytes.fromhex("3a75297e597197ee0ce18fc37dbf727315937c8c01ac214d7c7bbc0a3c333cac")


def own_database(postgres: Any) -> str:
    """A new database with the contract: a mark refuses everything else in it."""
    import psycopg

    name = f"marked_{uuid.uuid4().hex}"
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    url = postgres.url.rsplit("/", 1)[0] + f"/{name}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(servers.schema())
    return url


@pytest.fixture(params=["postgres", "redis"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A function that opens a new store on one server: each has an engine of its own, as each process has."""
    if request.param == "redis":
        from redis.asyncio import Redis

        with servers.redis() as server:
            async with Redis.from_url(server.url) as client:
                yield lambda: RedisStore(client)
        return
    from psycopg_pool import AsyncConnectionPool

    url = own_database(request.getfixturevalue("postgres"))
    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        yield lambda: PostgresStore(pool)


async def set_mark(store: Any) -> int:
    """Marks a store, as a process with an id secret does."""
    fingerprint, operation = b"\x01" * 33, "id secret 0123456789abcdef of this store (not a request)"
    claim = Claim(MARK, bytes(16), fingerprint, 3_600_000, 86_400_000, "park", operation=operation)
    return int((await store.claim(claim)).token)


class Service:
    def __init__(self, store: Any, store_outage: str) -> None:
        self.executions = 0
        self.app = IdempotencyMiddleware(
            self._handle, store=store, service="pay", scope="single-tenant", store_outage=store_outage, store_timeout=20
        )

    async def _handle(self, own: Any, receive: Any, send: Any) -> None:
        self.executions += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    async def post(self, key: str = "") -> int:
        return status(await ask(self.app, scope(key or uuid.uuid4().hex)))

    async def is_refused(self, key: str = "") -> bool:
        before = self.executions
        sent = await ask(self.app, scope(key or uuid.uuid4().hex))
        assert b"failed-open" not in b"".join(value for _, value in sent[0]["headers"])
        return status(sent) == 503 and self.executions == before


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.05)


async def test_nothing_is_executed_on_a_marked_store(opened: Any) -> None:
    store = opened()
    before = Service(opened(), "open")
    assert await before.post("first") == 201
    token = await set_mark(store)
    marked = opened()
    after = Service(marked, "open")
    assert await after.is_refused()
    assert await after.is_refused("first")

    @idempotent(name="work", key=lambda order: order, store=marked, service="pay")
    async def charge(order: str) -> None:
        raise AssertionError("the function was executed")

    with pytest.raises(StoreRefused, match="id secret"):
        await charge("order-1")
    # A process that found no mark before looks again while it is used.
    await until(before.is_refused, "the mark was not seen")
    # A store that loses its mark still has keyed records.
    await store.release(MARK, token, 3_600_000)
    lost_at = time.monotonic()
    while time.monotonic() < lost_at + 2 * LOOK_COUNTS:
        assert await before.is_refused()
        assert await after.is_refused()
        await asyncio.sleep(0.1)
    # A released mark binds no process that is started now.
    assert await Service(opened(), "closed").post() == 201


class Watched:
    """A store whose claims, or whose looks for the mark, do something before."""

    def __init__(self, own: Any) -> None:
        self.own, self.looks = own, 0
        self.before_claim: Any = None
        self.failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    async def claim(self, claim: Claim) -> Any:
        if self.before_claim is not None:
            await self.before_claim()
        return await self.own.claim(claim)

    async def lookup(self, record: bytes) -> Any:
        if record == MARK:
            self.looks += 1
            if self.failure is not None:
                raise self.failure
        return await self.own.lookup(record)


async def test_a_slow_claim_looks_again(opened: Any) -> None:
    store, token = Watched(opened()), 0

    async def mark_and_wait() -> None:
        nonlocal token
        token = await set_mark(store.own)
        await asyncio.sleep(LOOK_COUNTS + 0.1)

    store.before_claim = mark_and_wait
    assert await Service(store, "open").is_refused("slow")
    assert store.looks >= 2
    # The key is free again.
    await store.own.release(MARK, token, 3_600_000)
    assert await Service(opened(), "closed").post("slow") == 201


async def test_a_mark_that_cannot_be_read(opened: Any) -> None:
    store = Watched(opened())
    service = Service(store, "closed")
    assert await service.post() == 201
    store.failure = StoreUnavailable("the node is down")
    before = store.looks

    async def has_looked_twice() -> bool:
        assert await service.post() == 201
        return store.looks >= before + 2

    await until(has_looked_twice, "it does not look again")
    other = Watched(opened())
    other.failure = store.failure
    assert await Service(other, "closed").is_refused()
    # A mark that is damaged is no outage.
    other.failure = RecordCorrupt("damaged")
    assert await Service(other, "open").is_refused()
    store.failure = other.failure
    await until(service.is_refused, "a damaged mark")


@pytest.mark.parametrize("driver", DRIVERS)
async def test_a_transaction_on_a_marked_database(driver: str, postgres: Any) -> None:
    import psycopg
    from psycopg_pool import AsyncConnectionPool

    url = own_database(postgres)
    runs = 0

    async def is_refused() -> bool:
        nonlocal runs
        async with connected(driver, url) as connection:
            try:
                async with transaction(connection, uuid.uuid4().hex, name="pay", service="shop") as attempt:
                    runs += 1
                    attempt.complete(None)
            except StoreRefused as error:
                return "id secret" in str(error)
        return False

    assert not await is_refused()
    async with AsyncConnectionPool(url, min_size=1, max_size=1, open=False) as pool:
        await set_mark(PostgresStore(pool))
    assert await is_refused()
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DELETE FROM oncegate.records")
    assert await is_refused()
    with (
        psycopg.connect(url) as connection,
        pytest.raises(StoreRefused),
        blocking_transaction(connection, "k", name="pay", service="shop"),
    ):
        runs += 1
    assert runs == 1


async def test_a_slow_transaction_looks_again(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg
    from psycopg_pool import AsyncConnectionPool

    from oncegate import transactions

    url = own_database(postgres)
    own_row, runs = transactions._Connection.row, 0
    async with AsyncConnectionPool(url, min_size=1, max_size=1, open=False) as pool:

        async def row(self: Any, statement: str, arguments: Any) -> Any:
            if statement == transactions.CLAIM:
                await set_mark(PostgresStore(pool))
                await asyncio.sleep(LOOK_COUNTS + 0.1)
            return await own_row(self, statement, arguments)

        monkeypatch.setattr(transactions._Connection, "row", row)
        connection = await psycopg.AsyncConnection.connect(url)
        async with connection:
            with pytest.raises(StoreRefused, match="id secret"):
                async with transaction(connection, "slow", name="pay", service="shop"):
                    runs += 1
    assert runs == 0
