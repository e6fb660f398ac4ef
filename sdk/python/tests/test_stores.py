"""Every store gives the same replies, over each driver, and each command may be sent again."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

import oncegate
from conftest import opened
from oncegate.errors import RecordCorrupt, StoreRefused, StoreUnavailable
from oncegate.response import StoredResponse
from oncegate.store import Claim

FINGERPRINT = b"\x01" + bytes(32)
RESPONSE = StoredResponse.of(201, [("content-type", "application/json")], b'{"id":1}').encode()


def new_claim(record: bytes, **changes: Any) -> Claim:
    values = {
        "record": record,
        "attempt": secrets.token_bytes(16),
        "fingerprint": FINGERPRINT,
        "lease_ms": 30_000,
        "retention_ms": 600_000,
        "on_abandoned": "park",
        "caller": b"\x07" * 8,
        "operation": "POST /pay",
        "key_tag": b"\x09" * 8,
    }
    return Claim(**{**values, **changes})


async def test_the_way_of_a_record(store: Any) -> None:
    await store.verify()
    record = secrets.token_bytes(32)
    assert await store.lookup(record) is None
    claim = new_claim(record)
    granted = await store.claim(claim)
    assert (granted.outcome, granted.attempts, granted.after_abandoned) == ("execute", 1, False)
    again = await store.claim(claim)
    assert (again.outcome, again.token) == ("execute", granted.token)
    other = await store.claim(new_claim(record))
    assert other.outcome == "in-progress"
    assert 0 < other.lease_left_ms <= 30_000
    assert (await store.claim(new_claim(record, fingerprint=b"\x01" * 33))).outcome == "mismatch"
    assert await store.renew(record, granted.token, 30_000, 600_000) == "renewed"
    assert await store.renew(record, granted.token - 1, 30_000, 600_000) == "fenced"
    found = await store.lookup(record)
    assert (found.state, found.token, found.attempt) == ("in-progress", granted.token, claim.attempt)
    for _ in range(2):
        assert await store.release(record, granted.token, 600_000) == "released"
    second = await store.claim(new_claim(record))
    assert second.outcome == "execute"
    assert second.token > granted.token
    assert await store.complete(record, granted.token, "completed", RESPONSE, 600_000) == "fenced"
    for _ in range(2):
        assert await store.complete(record, second.token, "completed", RESPONSE, 600_000) == "completed"
    replay = await store.claim(new_claim(record))
    assert (replay.outcome, replay.response) == ("replay", RESPONSE)
    found = await store.lookup(record)
    assert (found.state, found.response, found.by_operator) == ("completed", RESPONSE, False)


async def test_an_abandoned_record(store: Any) -> None:
    record = secrets.token_bytes(32)
    first = await store.claim(new_claim(record, lease_ms=1))
    second = await store.claim(new_claim(record, on_abandoned="reexecute", lease_ms=1))
    while second.outcome == "in-progress":
        second = await store.claim(new_claim(record, on_abandoned="reexecute", lease_ms=1))
    assert second.outcome == "execute"
    assert second.after_abandoned
    assert second.token > first.token
    parked = await store.claim(new_claim(record))
    while parked.outcome == "in-progress":
        parked = await store.claim(new_claim(record))
    assert parked.outcome == "unknown"
    assert await store.complete(record, second.token, "tombstone", None, 600_000) == "completed"
    assert (await store.claim(new_claim(record))).outcome == "unreplayable"


async def test_memory_is_bounded() -> None:
    now = 0
    store = oncegate.MemoryStore(clock=lambda: now, max_records=3, max_bytes=2 * len(RESPONSE))
    records = [secrets.token_bytes(32) for _ in range(4)]
    for record in records[:2]:
        token = (await store.claim(new_claim(record))).token
        await store.complete(record, token, "completed", RESPONSE, 1000)
    with pytest.raises(oncegate.StoreUnavailable) as full:
        await store.claim(new_claim(records[2]))
    assert full.value.is_full
    # What it has is replayed, and what has expired makes space at once.
    assert (await store.claim(new_claim(records[0]))).outcome == "replay"
    now = 1001
    assert (await store.claim(new_claim(records[2]))).outcome == "execute"
    assert store._bytes == 0
    with pytest.raises(oncegate.StoreUnavailable):
        await store.claim(new_claim(records[3]))
    now = 601_002
    assert (await store.claim(new_claim(records[3]))).outcome == "execute"


async def _claims(engine: Any, record: bytes, fingerprint: bytes = FINGERPRINT) -> Any:
    from oncegate.engine import Policy

    return await engine.claim(record, fingerprint, Policy(wait=0))


@pytest.mark.parametrize("kind", ["redis", "redis-blocking"])
async def test_a_full_redis_replays_what_it_has(kind: str) -> None:
    """It takes no new keys, and that is no outage: with store_outage="open", too, nothing is executed."""
    import redis as driver
    import redis.asyncio as asynchronous

    import servers
    from oncegate import IdempotencyMiddleware, RedisStore
    from test_asgi import ask, scope, status

    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    with servers.redis() as server:
        admin = driver.Redis(port=server.port)
        client: Any = asynchronous.Redis(port=server.port) if kind == "redis" else driver.Redis(port=server.port)
        app = IdempotencyMiddleware(
            handler, store=RedisStore(client), service="shop", scope="single-tenant", store_outage="open"
        )
        assert status(await ask(app, scope("old"))) == 201
        admin.config_set("maxmemory", "1mb")
        for _ in range(2):
            sent = await ask(app, scope("old"))
            assert (status(sent), sent[1]["body"]) == (201, b"made")
            sent = await ask(app, scope("new"))
            assert (status(sent), b"takes no new keys" in sent[1]["body"]) == (503, True)
        assert status(await ask(app, scope("old"), {"type": "http.request", "body": b"6"})) == 422
        assert ran == 1
        admin.close()
        if kind == "redis":
            await client.aclose()
        else:
            client.close()


@pytest.mark.parametrize("kind", ["psycopg", "psycopg-blocking", "asyncpg"])
async def test_a_full_postgres_replays_what_it_has(kind: str, request: pytest.FixtureRequest) -> None:
    import psycopg

    from conftest import opened
    from oncegate.engine import Permit, Reply, engine_of

    url = request.getfixturevalue("postgres").url
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    async with opened(kind, request) as store:
        engine = engine_of(store, blocking=False)
        permit = await _claims(engine, old)
        assert isinstance(permit, Permit)
        await permit.complete("completed", RESPONSE)
        # As a full disk: every statement that writes a record fails.
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute(
                "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53100'; END$$"
            )
            on = "BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW"
            admin.execute(f"CREATE TRIGGER refuse {on} EXECUTE FUNCTION public.refuse()")
            try:
                with pytest.raises(oncegate.StoreUnavailable) as full:
                    await _claims(engine, new)
                assert full.value.is_full
                assert await _claims(engine, old) == Reply("replay", RESPONSE)
                assert await _claims(engine, old, b"\x01" * 33) == Reply("mismatch")
            finally:
                admin.execute("DROP FUNCTION public.refuse CASCADE")


@pytest.mark.parametrize("store_outage", ["closed", "open"])
async def test_a_redis_that_takes_no_writes_was_reached(redis: Any, store_outage: Any) -> None:
    """Nothing executes, also with `store_outage="open"`. A replica runs no script that may write, so it is not read either."""
    import httpx
    from redis.asyncio import Redis as Client
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    effects = 0

    async def pay(request: Request) -> Response:
        nonlocal effects
        effects += 1
        return JSONResponse(effects)

    async with Client.from_url(redis.url) as client:
        app = oncegate.IdempotencyMiddleware(
            Starlette(routes=[Route("/pay", pay, methods=["POST"])]),
            store=oncegate.RedisStore(client),
            service=secrets.token_hex(8),
            scope="single-tenant",
            store_outage=store_outage,
        )

        async def ask(key: str) -> tuple[int, str | None]:
            headers = {"idempotency-key": key}
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as web:
                response = await web.post("/pay", headers=headers, content=b"1")
            return response.status_code, response.headers.get("idempotent-replayed")

        assert await ask("known") == (200, None)
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            # More often than the breaker needs.
            for time in range(12):
                assert await ask("known") == (503, None)
                assert await ask(f"new-{time}") == (503, None)
        finally:
            await client.execute_command("REPLICAOF", "NO", "ONE")
        assert effects == 1
        assert await ask("new-0") == (200, None)


@pytest.mark.parametrize("how", ["psycopg-XX000", "asyncpg-57P03", "asyncpg-55P03", "no-connections"])
async def test_an_error_of_postgres_is_no_outage(how: str, request: pytest.FixtureRequest) -> None:
    """A server that answers was reached, also if what it says is not known: nothing executes with `store_outage="open"`."""
    import asyncpg
    import psycopg

    from oncegate import IdempotencyMiddleware
    from test_asgi import ask, scope, status

    url, role = request.getfixturevalue("postgres").url, f"few_{secrets.token_hex(4)}"
    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await receive()
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    def app_of(store: Any) -> Any:
        return IdempotencyMiddleware(
            handler, store=store, service=secrets.token_hex(8), scope="single-tenant", store_outage="open"
        )

    async def ask_all(app: Any) -> list[int]:
        # More often than the breaker needs.
        return [status(await ask(app, scope(key))) for key in ("old", "new") * 6]

    with psycopg.connect(url, autocommit=True) as admin:
        if how == "no-connections":
            admin.execute(f"CREATE ROLE {role} LOGIN CONNECTION LIMIT 0")
            try:
                async with asyncpg.create_pool(url, user=role, min_size=0, max_size=2) as pool:
                    assert set(await ask_all(app_of(oncegate.PostgresStore(pool)))) == {503}
            finally:
                admin.execute(f"DROP ROLE {role}")
            assert ran == 0
            return
        kind, code = how.split("-")
        async with opened(kind, request) as store:
            app = app_of(store)
            assert status(await ask(app, scope("old"))) == 201
            admin.execute(
                "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
                f"$$BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = '{code}'; END$$"
            )
            on = "BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW"
            admin.execute(f"CREATE TRIGGER refuse {on} EXECUTE FUNCTION public.refuse()")
            try:
                assert 201 not in (await ask_all(app))[1::2]
                assert ran == 1
            finally:
                admin.execute("DROP FUNCTION public.refuse CASCADE")


async def test_records_are_removed_after_their_retention(
    postgres: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all drivers at the same time, because PostgreSQL gives records two to four seconds more."""
    import asyncio

    import asyncpg
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    from oncegate import engine as engines
    from test_id_secret import own_database

    monkeypatch.setattr(engines, "PURGE_EVERY", 0.2)
    sizes: Any = {"min_size": 1, "max_size": 4}
    async with (
        AsyncConnectionPool(own_database(postgres), open=False, **sizes) as first,
        asyncpg.create_pool(own_database(postgres), **sizes) as second,
    ):
        with ConnectionPool(own_database(postgres), open=False, **sizes) as third:
            await asyncio.gather(*(removes_records(oncegate.PostgresStore(pool)) for pool in (first, second, third)))


async def removes_records(store: Any) -> None:
    import asyncio

    from oncegate.engine import Permit, Policy, engine_of

    async def stored(wanted: set[bytes]) -> set[bytes]:
        rows = await store._query("SELECT array_agg(id) FROM oncegate.records")
        return wanted & {bytes(row) for row in rows[0] or ()}

    engine = engine_of(store, blocking=False)
    records: set[bytes] = set()
    for _ in range(5):
        record = secrets.token_bytes(32)
        permit = await engine.claim(record, FINGERPRINT, Policy(lease=1, retention=1, wait=0))
        assert isinstance(permit, Permit)
        await permit.complete("completed", RESPONSE)
        records.add(record)
    assert await stored(records) == records
    async with asyncio.timeout(60):
        while await stored(records):
            await asyncio.sleep(0.1)
    # It goes on without further claims, and ends with the test.
    engine._purge = None


async def test_a_missing_right_is_found_before_the_effect(postgres: Any) -> None:
    import psycopg
    from psycopg_pool import AsyncConnectionPool

    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE half LOGIN")
        admin.execute("GRANT USAGE ON SCHEMA oncegate TO half")
        admin.execute(
            "GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.lookup, oncegate.now_ms TO half"
        )
    url = postgres.url.replace("owner@", "half@")
    async with AsyncConnectionPool(url, min_size=1, max_size=2, open=False) as pool:
        from oncegate.engine import engine_of

        missing = r"complete_if_owner, oncegate\.contract_version, oncegate\.release, oncegate\.renew: see the grants"
        with pytest.raises(oncegate.StoreRefused, match=missing):
            await _claims(engine_of(oncegate.PostgresStore(pool), blocking=False), secrets.token_bytes(32))


@pytest.mark.parametrize("driver", ["psycopg", "psycopg-blocking", "asyncpg"])
async def test_a_pool_that_is_not_open(driver: str, postgres: Any) -> None:
    """The text says what to do. FastAPI opens no pool by itself."""
    import asyncpg
    from psycopg_pool import AsyncConnectionPool, ConnectionPool

    made: Any = {
        "psycopg": lambda: AsyncConnectionPool(postgres.url, open=False),
        "psycopg-blocking": lambda: ConnectionPool(postgres.url, open=False),
        "asyncpg": lambda: asyncpg.create_pool(postgres.url),
    }
    with pytest.raises(StoreUnavailable, match=r"its pool is not open .* in the lifespan of FastAPI") as raised:
        await oncegate.PostgresStore(made[driver]()).verify()
    assert raised.value.is_unsent


@pytest.mark.parametrize("driver", ["psycopg", "psycopg-blocking"])
async def test_a_call_leaves_no_transaction_open(driver: str, request: pytest.FixtureRequest) -> None:
    """A process that stands still between two statements would hold its record beyond the lease. Connections of the pool stay as
    they were, also after an error."""
    async with opened(driver, request) as store:
        for _ in range(2):
            assert (await store._query("SELECT now() = statement_timestamp() AND pg_sleep(0.01)::text = ''"))[0] is True
            with pytest.raises(StoreUnavailable):
                await store._query("SELECT 1 / 0")
        if driver == "psycopg":
            async with store.pool.connection() as own:
                assert not own.autocommit
        else:
            with store.pool.connection() as own:
                assert not own.autocommit


FORKED = """
import os, sys, oncegate
from psycopg_pool import ConnectionPool
from oncegate.runtime import run_blocking
pool = ConnectionPool(sys.argv[1], open=True, min_size=1)
store = oncegate.PostgresStore(pool)
run_blocking(store.verify())
child = os.fork()
if child == 0:
    try:
        run_blocking(store.verify())
    except oncegate.StoreRefused as error:
        print("refused", "opened before this process was forked" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
run_blocking(store.verify())
pool.close()
"""


def test_a_pool_that_was_opened_before_a_fork(postgres: Any) -> None:
    """As with gunicorn --preload. Both processes would use its connections."""
    import subprocess
    import sys

    command = [sys.executable, "-c", FORKED, postgres.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "refused True\n"


async def test_a_function_that_returns_the_pool(postgres: Any) -> None:
    """It is called once, at the first use, in the event loop that runs then."""
    import asyncpg
    from psycopg_pool import ConnectionPool

    made: list[Any] = []

    def pool() -> Any:
        made.append(asyncpg.create_pool(postgres.url, min_size=1, max_size=2))
        return made[0]

    store = oncegate.PostgresStore(pool)
    assert (made, store.is_blocking) == ([], False)
    with pytest.raises(StoreUnavailable, match="its pool is not open"):
        await store.verify()
    async with made[0]:
        await store.verify()
    assert len(made) == 1
    wrong: tuple[tuple[Any, str], ...] = (
        (lambda: ConnectionPool(postgres.url, open=False), "has to return an asynchronous pool"),
        (lambda: pool, "has to return an asynchronous pool"),
        (lambda: postgres.url, "needs a pool of psycopg_pool or asyncpg"),
        (lambda: oncegate.missing, "raised AttributeError"),
    )
    for function, text in wrong:
        with pytest.raises(StoreRefused, match=text):
            await oncegate.PostgresStore(function).verify()


def test_what_is_no_function_that_returns_a_pool() -> None:
    import functools

    from sqlalchemy.ext.asyncio import async_sessionmaker
    from sqlalchemy.orm import sessionmaker

    for wrong in (sessionmaker(), async_sessionmaker(), lambda url: url, "postgresql:", object(), oncegate.MemoryStore):
        with pytest.raises(oncegate.ConfigError, match="needs a pool of psycopg_pool or asyncpg"):
            oncegate.PostgresStore(wrong)
    for function in (lambda: None, functools.cache(lambda: None), functools.partial(lambda url: url, ""), lambda url="": url):
        assert not oncegate.PostgresStore(function).is_blocking


async def test_a_function_of_the_pool_that_raises_is_no_outage() -> None:
    from oncegate import IdempotencyMiddleware
    from test_asgi import ask, scope, status

    async def handler(own: Any, receive: Any, send: Any) -> None:
        raise AssertionError("it was executed")

    store = oncegate.PostgresStore(lambda: oncegate.missing)
    app = IdempotencyMiddleware(handler, store=store, service="shop", scope="single-tenant", store_outage="open")
    assert [status(await ask(app, scope())) for _ in range(12)] == [503] * 12


@pytest.mark.parametrize("may_purge", [False, True])
async def test_the_rights_that_the_readme_names(may_purge: bool, postgres: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Everything works with them. Without the right to call `purge`, the log says once who has to do it."""
    import re
    from pathlib import Path

    import psycopg
    from psycopg_pool import AsyncConnectionPool

    from oncegate.engine import Permit, Reply, engine_of

    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    (grants,) = re.findall(r"```sql\n(.*?)```", readme, re.DOTALL)
    role = f"granted_{may_purge}".lower()
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN")
        for statement in grants.replace("TO shop", f"TO {role}").split(";")[: 3 if may_purge else 2]:
            admin.execute(statement)
    url = postgres.url.replace("owner@", f"{role}@")
    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        engine, record = engine_of(oncegate.PostgresStore(pool), blocking=False), secrets.token_bytes(32)
        permit = await _claims(engine, record)
        assert isinstance(permit, Permit)
        assert await permit.confirm()
        assert await permit._renew_once() == "renewed"
        assert await permit.complete("completed", RESPONSE) == "stored"
        assert isinstance(await _claims(engine, record), Reply)
        other = await _claims(engine, secrets.token_bytes(32))
        assert isinstance(other, Permit)
        assert await other.release() == "stored"
        await engine._purge_once()
    assert ("records are not removed after their retention" in caplog.text) is not may_purge


def test_only_the_code_of_an_error_of_redis_counts() -> None:
    """Other words of its text are those of anything, such as of the address of a server."""
    from redis import exceptions

    from oncegate.redis import _read_error

    for error in (
        exceptions.InvalidResponse("Protocol Error: b'INVALID'"),
        exceptions.ConnectionError("Error 111 connecting to ROOM-1.INVALID:6379."),
        exceptions.ResponseError("ERR the text CORRUPT, WRONGTYPE, NOPERM, OOM or INVALID"),
    ):
        read = _read_error(error)
        assert type(read) is StoreUnavailable, error
        assert not (read.is_unsent or read.is_full), error
    for error in (
        exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."),
        exceptions.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
        exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
        exceptions.ReadOnlyError("You can't write against a read only replica."),
        exceptions.ResponseError("BUSY Redis is busy running a script."),
        exceptions.MasterDownError("Link with MASTER is down"),
        exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
        exceptions.ResponseError("LOADING Redis is loading the dataset in memory"),
        exceptions.ClusterDownError("CLUSTERDOWN Hash slot not served"),
        exceptions.TryAgainError("Multiple keys request during rehashing of slot"),
    ):
        read = _read_error(error)
        assert isinstance(read, StoreUnavailable) and read.is_full, error
    assert isinstance(_read_error(exceptions.ResponseError("INVALID an argument is missing")), StoreRefused)
    assert isinstance(_read_error(exceptions.ResponseError("CORRUPT the record has an unknown version")), RecordCorrupt)
    assert isinstance(_read_error(exceptions.ResponseError("WRONGTYPE Operation against a key")), RecordCorrupt)


def test_rights_of_a_script_that_are_missing(redis: Any) -> None:
    """Redis answers that without a code."""
    from redis import Redis as Client

    from oncegate.redis import _read_error

    with Client.from_url(redis.url) as owner:
        owner.execute_command("ACL", "SETUSER", "limited", "on", ">secret", "~*", "+eval", "+evalsha")
        url = redis.url.replace("redis://", "redis://limited:secret@")
        with Client.from_url(url) as client, pytest.raises(Exception, match="can't run") as raised:
            client.eval("return redis.call('set', KEYS[1], 1)", 1, "k")
        owner.execute_command("ACL", "DELUSER", "limited")
    assert isinstance(_read_error(raised.value), StoreRefused)
