"""Stores that belong to an id secret, which this library shares with a sidecar. It never makes the mark of a store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import psycopg
import pytest
from psycopg_pool import AsyncConnectionPool, ConnectionPool
from redis.asyncio import Redis

import servers
from conftest import LOOK_AGAIN, LOOK_COUNTS, vectors
from oncegate import (
    ConfigError,
    IdempotencyMiddleware,
    IdSecret,
    MemoryStore,
    PostgresStore,
    RedisStore,
    StoreRefused,
    StoreUnavailable,
    blocking_transaction,
    idempotent,
    transaction,
    wsgi,
)
from oncegate.ids import MARK, IdGuard, Ids
from oncegate.seal import SealedStore
from oncegate.store import Claim, StoredRecord
from test_asgi import ask, scope, status
from test_id_secret import Watched, own_database, until
from test_transactions import DRIVERS, connected

pytestmark = pytest.mark.usefixtures("short_looks")
OWN, OTHER = (own["text"] for own in vectors("core/vectors/keyed_ids.json")["secrets"])
SECRET = IdSecret.parse(OWN)
YEAR = 400 * 86_400_000

needs_sidecar = pytest.mark.skipif(
    servers.program() is None, reason="the program oncegate is not built, and ONCEGATE_BIN does not name it"
)


async def set_mark(store: Any, secret: str = OWN, *, on_trial: bool = False) -> int:
    """Marks a store, as a sidecar with this secret does."""
    own = IdSecret.parse(secret)
    lease, retention = (30_000, 90_000) if on_trial else (3_600_000, YEAR)
    operation = f"id secret {own.name} of this store (not a request)"
    claim = Claim(MARK, own.digest(b"attempt")[:16], own.mark_fingerprint, lease, retention, "park", operation=operation)
    while True:
        # A busy machine may need more time than the client has.
        with contextlib.suppress(StoreUnavailable):
            return int((await store.claim(claim)).token)


@dataclass
class Opened:
    url: str
    open: Any
    """Opens a new store on the server: each has an engine of its own, as each process has."""


@contextlib.asynccontextmanager
async def new_server(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    if kind == "redis":
        with servers.redis() as server:
            async with Redis.from_url(server.url) as client:
                yield Opened(server.url, lambda: RedisStore(client))
        return
    url = own_database(request.getfixturevalue("postgres"))
    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        yield Opened(url, lambda: PostgresStore(pool))


@pytest.fixture(params=["postgres", "redis"])
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opened]:
    async with new_server(request.param, request) as own:
        yield own


class Service:
    """A service with the middleware, with the settings of the sidecar of the tests."""

    def __init__(self, store: Any, id_secret: str | None = OWN, **settings: Any) -> None:
        self.executions = 0
        self.app = IdempotencyMiddleware(
            self._handle, store=store, service="pay", scope="single-tenant", authority="ignore", store_timeout=20,
            id_secret=id_secret, **settings,
        )

    async def _handle(self, own: Any, receive: Any, send: Any) -> None:
        self.executions += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made by the library's service"})

    async def post(self, key: str, body: bytes = b"5") -> tuple[int, bytes, bool]:
        sent = await ask(self.app, scope(key), {"type": "http.request", "body": body})
        return status(sent), sent[1]["body"], (b"idempotent-replayed", b"true") in sent[0]["headers"]

    async def is_refused(self, key: str = "") -> bool:
        before = self.executions
        found, _, _ = await self.post(key or uuid.uuid4().hex)
        return found == 503 and self.executions == before

    async def serves(self) -> bool:
        before = self.executions
        found, _, _ = await self.post(uuid.uuid4().hex)
        return found == 201 and self.executions == before + 1


@needs_sidecar
async def test_one_effect_with_a_sidecar_in_both_directions(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """On both stores at the same time, because a sidecar waits for 6 s before it uses one that is new to its secret."""
    caplog.set_level(logging.WARNING, "oncegate")
    async with new_server("postgres", request) as postgres, new_server("redis", request) as redis:
        await asyncio.gather(one_effect(postgres), one_effect(redis))
    for text in (
        f"does not have the mark of the id secret {SECRET.name}",
        "start a sidecar with this secret",
        f"belongs to the id secret {SECRET.name}, and this process has {IdSecret.parse(OTHER).name}",
        f"belongs to the id secret {SECRET.name}, and this process has none",
    ):
        assert caplog.text.count(text) >= 2, text
    for secret in (OWN, OTHER):
        assert secret.rpartition("_")[2] not in caplog.text


async def one_effect(opened: Opened) -> None:
    runs_of_transactions = await refused_transactions(opened.url) if opened.url.startswith("postgres") else None
    service, function_runs = Service(opened.open(), store_outage="open"), 0
    # The store is new. Only a sidecar marks it.
    assert await service.is_refused("first")
    sidecar = servers.Sidecar(opened.url, OWN, "--service=pay")
    with sidecar:
        async with httpx.AsyncClient(timeout=30, verify=False) as client:

            async def post(key: str, body: bytes = b"5") -> httpx.Response:
                return await client.post(f"{sidecar.url}/pay", content=body, headers={"idempotency-key": key})

            async def sidecar_serves() -> bool:
                return (await post("first")).status_code == 201

            await until(sidecar_serves, "the sidecar does not serve")
            assert sidecar.executions == 1
            # The process that was refused serves from now on, and finds what the sidecar has stored.
            await until(service.serves, "the library does not serve")
            runs = service.executions
            assert await service.post("first") == (201, b"made by the sidecar's service", True)
            assert (await service.post("first", b"6"))[0] == 422
            assert (await service.post("second"))[0] == 201
            replayed = await post("second")
            assert (replayed.text, replayed.headers["idempotent-replayed"]) == ("made by the library's service", "true")
            assert (await post("second", b"6")).status_code == 422
            assert (sidecar.executions, service.executions) == (1, runs + 1)

            # Functions have the ids of the secret, too.
            store = opened.open()

            @idempotent(name="work", key=lambda order: order, store=store, service="pay", id_secret=OWN)
            async def charge(order: str) -> int:
                nonlocal function_runs
                function_runs += 1
                return function_runs

            assert [await charge("order-1"), await charge("order-1")] == [1, 1]

            # Another secret, and none, are refused, and find nothing out.
            for wrong in (OTHER, None):
                refused = Service(opened.open(), wrong, store_outage="open")
                assert await refused.is_refused("first")
                assert await refused.is_refused()
    if runs_of_transactions is not None:
        await runs_of_transactions()
    # The mark was not touched: a sidecar starts again, at once.
    with servers.Sidecar(opened.url, OWN, "--service=pay") as again:
        reply = servers.post(f"{again.url}/pay", content=b"5", headers={"idempotency-key": "first"}, timeout=30)
        assert (reply.status_code, reply.headers["idempotent-replayed"], again.executions) == (201, "true", 0)


async def refused_transactions(url: str) -> Any:
    """Transactions before the mark is there. Returns those after it."""
    runs = 0

    async def run(driver: str, key: str, id_secret: str | None, input: int = 5) -> Any:
        nonlocal runs
        async with connected(driver, url) as connection:
            async with transaction(
                connection, key, name="charge", service="pay", input=input, id_secret=id_secret
            ) as attempt:
                if not attempt.is_replayed:
                    runs += 1
                    attempt.complete({"run": runs})
            return attempt.value

    for driver in DRIVERS:
        with pytest.raises(StoreRefused, match="does not have the mark"):
            await run(driver, "order-1", OWN)

    async def once() -> None:
        for driver in DRIVERS:
            assert await run(driver, "order-1", OWN) == {"run": 1}
            with pytest.raises(StoreRefused, match="this process has none"):
                await run(driver, uuid.uuid4().hex, None)
            with pytest.raises(StoreRefused, match=IdSecret.parse(OTHER).name):
                await run(driver, uuid.uuid4().hex, OTHER)
        with psycopg.connect(url) as connection, blocking_transaction(
            connection, "order-1", name="charge", service="pay", input=5, id_secret=SECRET
        ) as attempt:
            assert (attempt.is_replayed, attempt.value) == (True, {"run": 1})
        assert runs == 1

    return once


async def test_the_mark_must_be_there_and_not_on_trial(opened: Opened) -> None:
    store, service = opened.open(), Service(opened.open(), store_outage="open")
    assert await service.is_refused()
    trial = await set_mark(store, on_trial=True)
    for _ in range(3):
        assert await service.is_refused()
        await asyncio.sleep(LOOK_AGAIN)
    # The end of the trial is seen without a start.
    await store.renew(MARK, trial, 3_600_000, YEAR)
    await until(service.serves, "the end of the trial was not seen")
    # A mark that is gone is not put back here.
    await store.release(MARK, trial, 3_600_000)
    await until(service.is_refused, "the loss of the mark was not seen")
    assert (await store.lookup(MARK)).state == "released"
    await set_mark(store)
    await until(service.serves, "the mark that came back was not seen")


async def test_the_mark_of_another_secret_refuses_for_good_unless_it_is_on_trial(opened: Opened) -> None:
    store, service = opened.open(), Service(opened.open(), store_outage="open")
    trial = await set_mark(store, OTHER, on_trial=True)
    assert await service.is_refused()
    await store.release(MARK, trial, 3_600_000)
    await set_mark(store)
    await until(service.serves, "the trial of another secret lapsed, and was not forgotten")
    # The own mark gone, and that of another secret there for good.
    found = await store.lookup(MARK)
    await store.release(MARK, found.token, 3_600_000)
    other = await set_mark(store, OTHER)
    await until(service.is_refused, "the mark of another secret was not seen")
    await store.release(MARK, other, 3_600_000)
    for _ in range(3):
        assert await service.is_refused()
        await asyncio.sleep(LOOK_AGAIN)
    # Only the own mark shows that the store has the right records after all.
    own = await set_mark(store)
    await until(service.serves, "the own mark was not seen")
    await store.release(MARK, own, 3_600_000)
    await until(service.is_refused, "the loss of the mark was not seen")
    await set_mark(store)
    await until(service.serves, "the mark that came back was not seen")


def test_the_own_mark_ends_the_refusal_by_another_one() -> None:
    def mark(secret: IdSecret, lease: int, retention: int) -> StoredRecord:
        return StoredRecord("in-progress", secret.mark_fingerprint, 1, lease_until=lease, expires_at=lease + retention)

    guard, other = IdGuard(Ids(SECRET)), IdSecret.parse(OTHER)
    with pytest.raises(StoreRefused, match=f"and this process has {SECRET.name}"):
        guard.judge(mark(other, 3_600_000, YEAR))
    with pytest.raises(StoreRefused, match=f"and this process has {SECRET.name}"):
        guard.judge(None)
    guard.judge(mark(SECRET, 3_600_000, YEAR))
    with pytest.raises(StoreRefused, match="does not have the mark"):
        guard.judge(None)
    with pytest.raises(StoreRefused, match="is new to the id secret"):
        guard.judge(mark(SECRET, 30_000, 90_000))


async def test_a_process_that_has_served_goes_on_if_the_mark_cannot_be_read(opened: Opened) -> None:
    await set_mark(opened.open())
    store, new = Watched(opened.open()), Watched(opened.open())
    service = Service(store)
    assert await service.serves()
    store.failure = new.failure = StoreUnavailable("the node is down")
    before = store.looks

    async def has_looked_twice() -> bool:
        assert await service.serves()
        return store.looks >= before + 2

    await until(has_looked_twice, "it does not look again")
    assert await Service(new).is_refused()


async def test_a_slow_claim_looks_again(opened: Opened) -> None:
    store, token = Watched(opened.open()), await set_mark(opened.open())

    async def lose_the_mark_and_wait() -> None:
        await store.own.release(MARK, token, 3_600_000)
        await asyncio.sleep(LOOK_COUNTS + 0.1)

    store.before_claim = lose_the_mark_and_wait
    assert await Service(store, store_outage="open").is_refused("slow")
    # The key is free again.
    await set_mark(store.own)
    assert (await Service(opened.open()).post("slow"))[0] == 201


async def test_sealed_and_keyed(opened: Opened) -> None:
    from oncegate.seal import SealKey

    await set_mark(opened.open())
    key = SealKey(b"\x01" * 32)
    first = Service(SealedStore(opened.open(), [key]))
    assert (await first.post("k"))[0] == 201
    again = Service(SealedStore(opened.open(), [key]))
    assert await again.post("k") == (201, b"made by the library's service", True)
    assert again.executions == 0


async def test_the_host_is_compared(opened: Opened) -> None:
    await set_mark(opened.open())
    service = Service(opened.open())
    service.app.settings = service.app.flow.settings = type(service.app.settings).of(
        service="pay", scope="single-tenant", id_secret=OWN
    )
    assert (await service.post("k"))[0] == 201
    other_host = await ask(service.app, scope("k", host="other.test"))
    assert status(other_host) == 422
    assert b"host-differs" in other_host[1]["body"]
    assert (await service.post("k", b"6"))[0] == 422


async def test_a_store_in_memory_needs_no_mark() -> None:
    store = MemoryStore()
    keyed, plain = Service(store), Service(store, None)
    assert (await keyed.post("k"))[0] == 201
    assert (await keyed.post("k"))[2]
    # Without a secret it is another key. Programs on one store have one secret.
    assert not (await plain.post("k"))[2]
    assert len(store) == 2


def blocking(request: pytest.FixtureRequest, kind: str) -> Iterator[Any]:
    if kind == "redis":
        import redis

        with servers.redis() as server, redis.Redis.from_url(server.url) as client:
            yield RedisStore(client)
    else:
        url = own_database(request.getfixturevalue("postgres"))
        with ConnectionPool(url, min_size=1, max_size=4, open=True) as pool:
            yield PostgresStore(pool)


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_blocking_programs(kind: str, request: pytest.FixtureRequest) -> None:
    runs, statuses = 0, []

    def app(environ: Any, start_response: Any) -> list[bytes]:
        nonlocal runs
        runs += 1
        start_response("201 Created", [])
        return [b"made"]

    def post(own: Any) -> int:
        environ = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_HOST": "shop.test", "HTTP_IDEMPOTENCY_KEY": "k",
            "wsgi.input": None,
        }
        list(own(environ, lambda status, *_: statuses.append(int(status[:3]))))
        return statuses[-1]

    for store in blocking(request, kind):
        refused = wsgi.IdempotencyMiddleware(app, store=store, service="pay", scope="single-tenant")
        own = wsgi.IdempotencyMiddleware(app, store=store, service="pay", scope="single-tenant", id_secret=OWN)
        assert post(own) == 503
        from oncegate.runtime import run_blocking

        run_blocking(set_mark(store))
        servers.wait_for(lambda: post(own) == 201, "the mark was not seen")
        assert post(own) == 201
        assert post(refused) == 503
        assert runs == 1


def test_a_wrong_secret_stops_the_start() -> None:
    for wrong in (OWN[:-1], OWN[:-1] + "x", "", b"secret", 5):
        for make in (
            lambda: IdempotencyMiddleware(None, store=MemoryStore(), id_secret=wrong),  # type: ignore[arg-type]
            lambda: idempotent(name="work", key=str, store=MemoryStore(), id_secret=wrong),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError, match="id_secret") as refused:
                make()
            assert OWN[30:-1] not in str(refused.value)
