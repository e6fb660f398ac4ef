"""The store is away after a handler has completed its record in its own transaction: the record decides, whatever it says."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import oncegate
from oncegate.engine import engine_of
from oncegate.errors import StoreUnavailable
from test_transactions import count, ledger


class Outage(oncegate.PostgresStore):
    """A store that can be away."""

    is_away = False

    async def _query(self, *arguments: Any) -> Any:
        if self.is_away:
            raise StoreUnavailable("the store is away")
        return await super()._query(*arguments)


class Shop:
    """A handler that completes its record, and ends its transaction when `end` does so: before its response, or after it."""

    def __init__(self, postgres: Any, store: Outage, **settings: Any) -> None:
        self.postgres, self.store, self.runs = postgres, store, 0
        self.table, self.key = ledger(postgres), uuid.uuid4().hex
        self.end: Callable[[Any], Any] = lambda connection: connection.commit()
        self.response: Any = None
        self.is_late = False
        self.app = oncegate.IdempotencyMiddleware(
            self.handle, store=store, service="tests", scope="single-tenant", wait=0, **settings
        )

    async def handle(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        async with await psycopg.AsyncConnection.connect(self.postgres.url) as connection:
            await connection.execute(f"INSERT INTO {self.table} VALUES (1)")
            await oncegate.complete(connection, response=self.response)
            if self.is_late:
                await Response("made", 201)(scope, receive, send)
            self.store.is_away = True
            await self.end(connection)
        if not self.is_late:
            self.store.is_away = True
            await Response("made", 201)(scope, receive, send)

    async def ask(self) -> Any:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop.test", timeout=60) as client:
            return await client.post("/", headers={"idempotency-key": self.key})

    async def ask_until_decided(self) -> Any:
        deadline = time.monotonic() + 60
        while (answer := await self.ask()).status_code in (409, 503):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        return answer


@contextlib.asynccontextmanager
async def store_of(postgres: Any) -> AsyncIterator[Outage]:
    async with AsyncConnectionPool(postgres.url, min_size=1, max_size=4, open=False) as pool:
        yield Outage(pool)


@pytest.mark.parametrize("store_outage", ["closed", "open"])
@pytest.mark.parametrize("has_response", [True, False])
async def test_an_outage_after_the_commit(has_response: bool, store_outage: str, postgres: Any) -> None:
    """The outage is longer than the lease. The first client has its response, nothing executes again, and retries get it."""
    async with store_of(postgres) as store:
        shop = Shop(postgres, store, store_outage=store_outage, lease=0.5)
        shop.response = oncegate.StoredResponse.of(201, body="made") if has_response else None
        first = await shop.ask()
        assert (first.status_code, first.text) == (201, "made")
        assert first.headers["idempotency-status"] == "not-stored"
        asked = time.monotonic()
        while time.monotonic() - asked < 1:
            assert (await shop.ask()).status_code == (409 if store_outage == "open" else 503)
            await asyncio.sleep(0.1)
        store.is_away = False
        again = await shop.ask_until_decided()
        assert (again.status_code, again.text, again.headers["idempotent-replayed"]) == (201, "made", "true")
        assert shop.runs == count(postgres, shop.table) == 1
        assert await oncegate.drain(store, 10)


@pytest.mark.parametrize("store_outage", ["closed", "open"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_an_outage_at_a_rollback(is_late: bool, store_outage: str, postgres: Any) -> None:
    """No client gets a success before it is certain, and the key is free as soon as the store says that it was rolled back."""

    async def fail(connection: Any) -> None:
        await connection.rollback()
        raise ConnectionError("the commit fails")

    async with store_of(postgres) as store:
        shop = Shop(postgres, store, store_outage=store_outage)
        shop.end, shop.is_late = fail, is_late
        first = await shop.ask()
        assert first.status_code == (409 if is_late else 500)
        if is_late:
            assert "cannot be found out yet if the transaction" in first.json()["detail"]
        assert (await shop.ask()).status_code == (409 if store_outage == "open" else 503)
        assert shop.runs == 1
        store.is_away = False
        shop.end, shop.is_late = (lambda connection: connection.commit()), False
        deadline = time.monotonic() + 60
        while shop.runs == 1:
            assert time.monotonic() < deadline
            again = await shop.ask()
        assert (again.status_code, again.text) == (201, "made")
        assert count(postgres, shop.table) == 1


async def test_an_outage_while_the_transaction_is_open(postgres: Any) -> None:
    """The response comes before the commit, and the store cannot say so."""
    async with store_of(postgres) as store:

        async def end(connection: Any) -> None:
            pass

        shop = Shop(postgres, store)
        shop.end = end
        runs: list[Any] = []

        async def handle(request: Any) -> Response:
            connection = await psycopg.AsyncConnection.connect(postgres.url)
            runs.append(connection)
            await connection.execute(f"INSERT INTO {shop.table} VALUES (1)")
            await oncegate.complete(connection)
            store.is_away = True
            return Response("made", 201)

        shop.app.app = Starlette(routes=[Route("/", handle, methods=["POST"])])
        first = await shop.ask()
        assert first.status_code == 409
        assert "cannot be found out yet" in first.json()["detail"]
        await runs[0].commit()
        await runs[0].close()
        store.is_away = False
        again = await shop.ask_until_decided()
        assert (again.status_code, again.text) == (201, "made")
        assert len(runs) == count(postgres, shop.table) == 1


async def test_a_response_that_could_not_wait_for_its_commit(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client was told to ask again. Its retry gets the response, which this process has kept."""
    monkeypatch.setattr("oncegate.asgi.COMMIT_TIMEOUT", 0.2)
    monkeypatch.setattr("oncegate.flow.COMMIT_WAIT", 0.2)
    async with store_of(postgres) as store:
        shop, committing = Shop(postgres, store), asyncio.Event()

        async def end(connection: Any) -> None:
            store.is_away = False
            await committing.wait()
            await connection.commit()

        shop.end, shop.is_late = end, True
        assert (await shop.ask()).status_code == 409
        assert (await shop.ask()).status_code in (409, 503)
        committing.set()
        again = await shop.ask_until_decided()
        assert (again.status_code, again.text, again.headers["idempotent-replayed"]) == (201, "made", "true")
        assert shop.runs == count(postgres, shop.table) == 1


async def test_a_completion_in_a_savepoint_that_is_rolled_back(postgres: Any) -> None:
    """The effect may be there, so that nobody says that nothing took effect, and nothing executes again."""
    async with store_of(postgres) as store:
        shop = Shop(postgres, store)

        async def handle(own: Any, receive: Any, send: Any) -> None:
            shop.runs += 1
            async with await psycopg.AsyncConnection.connect(postgres.url) as connection, connection.transaction():
                await connection.execute(f"INSERT INTO {shop.table} VALUES (1)")
                async with connection.transaction():
                    await oncegate.complete(connection)
                    raise psycopg.Rollback
            await Response("made", 201)(own, receive, send)

        shop.app.app = handle
        for _ in range(2):
            answer = await shop.ask()
            assert (answer.status_code, answer.json()["type"]) == (500, "urn:oncegate:problem:outcome-unknown")
        assert shop.runs == count(postgres, shop.table) == 1


async def test_what_this_process_left_open_is_found_by_drain(postgres: Any) -> None:
    async with store_of(postgres) as store:
        shop = Shop(postgres, store)
        await shop.ask()
        assert not await oncegate.drain(store, 0.3)
        store.is_away = False
        assert await oncegate.drain(store, 30)
        assert engine_of(store, blocking=False)._running == {}
        assert (await shop.ask()).headers["idempotent-replayed"] == "true"
