"""Which errors of a store are an outage, for `store_outage="open"`: no connection can be made, or no answer comes in time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest

import oncegate
import servers
from oncegate import IdempotencyMiddleware, runtime
from oncegate.engine import BREAKER_FAILURES, Policy, engine_of
from oncegate.errors import StoreUnavailable
from oncegate.store import Claim, Claimed
from test_asgi import ask, scope, status
from test_doubt import until


class Service:
    def __init__(self, store: Any, **settings: Any) -> None:
        self.runs = 0
        settings = {"store_timeout": 2, **settings}
        self.app = IdempotencyMiddleware(
            self.handle, store=store, service="shop", scope="single-tenant", store_outage="open", **settings
        )

    async def handle(self, _: Any, __: Any, send: Any) -> None:
        self.runs += 1
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, key: str | None = None) -> int:
        return int(status(await ask(self.app, scope(key or uuid.uuid4().hex))))


class Silent(oncegate.MemoryStore):
    """A store that gives no answer to claims while `answers` is not set."""

    is_immediate, is_prompt = False, False

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()
        self.answers.set()
        self.begun = asyncio.Event()

    async def claim(self, claim: Claim) -> Claimed:
        self.begun.set()
        await self.answers.wait()
        return await super().claim(claim)


@pytest.mark.parametrize("is_prompt", [True, False])
async def test_a_process_that_stands_still_is_no_outage(is_prompt: bool) -> None:
    store = Silent()
    store.is_prompt = is_prompt
    service = Service(store, store_timeout=0.3)
    assert await service.ask() == 201
    store.answers.clear()
    store.begun.clear()
    asked = asyncio.ensure_future(service.ask())
    await store.begun.wait()
    # A handler that blocks.
    time.sleep(0.6)
    assert (await asked, service.runs) == (503, 1)
    assert service.app.flow.engine._breaker_of(b"").failures == 0
    # This time the delay is that of the store.
    assert (await service.ask(), service.runs) == (201, 2)


async def test_a_store_that_answers_others_is_no_outage() -> None:
    store = Silent()
    service = Service(store, store_timeout=0.3)
    assert await service.ask() == 201
    store.answers.clear()
    store.begun.clear()
    asked = asyncio.ensure_future(service.ask())
    await store.begun.wait()
    assert await service.app.flow.engine.lookup(bytes(32), Policy()) is None
    assert (await asked, service.runs) == (503, 1)


@pytest.mark.parametrize(("timed_out", "expected"), [("connect", 201), ("command", 503)])
async def test_a_command_that_had_less_than_the_time_of_the_store_is_no_outage(timed_out: str, expected: int) -> None:
    class Short(oncegate.MemoryStore):
        is_immediate = False

        async def claim(self, claim: Claim) -> Claimed:
            raise StoreUnavailable("a limit of the client", timed_out=timed_out)

    assert [await Service(Short(), wait=0).ask() for _ in range(2 * BREAKER_FAILURES)] == [expected] * 2 * BREAKER_FAILURES


async def test_short_limits_do_not_open_the_breaker() -> None:
    """Those of renewals: their store may only be slow."""
    store = Silent()
    engine = engine_of(store, blocking=False)
    for _ in range(2 * BREAKER_FAILURES):
        with pytest.raises(StoreUnavailable) as caught:
            await engine.call(bytes(32), lambda: asyncio.sleep(60), 5, at_most=0.01)
        assert caught.value.is_reached
    assert engine._breaker_of(bytes(32)).failures == 0


class Blocking(oncegate.MemoryStore):
    is_blocking, is_immediate = True, False


async def test_a_process_whose_threads_are_used_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    store, is_ended = Blocking(), threading.Event()
    service = Service(store, store_timeout=0.3)
    assert await service.ask() == 201
    own: Any = runtime.LoopRuntime()
    own._threads = runtime.Threads(1, "oncegate")
    monkeypatch.setattr(service.app.flow.engine, "runtime", own)
    # One of the library, and all of the loop, which are those of the application.
    own._threads.submit(is_ended.wait)
    try:
        assert (await service.ask(), service.runs) == (503, 1)
    finally:
        is_ended.set()
    loop, is_ended = asyncio.get_running_loop(), threading.Event()
    busy = [loop.run_in_executor(None, is_ended.wait) for _ in range(64)]
    try:
        key = uuid.uuid4().hex
        assert ([await service.ask(key) for _ in range(2)], service.runs) == ([201, 201], 2)
    finally:
        is_ended.set()
    await asyncio.gather(*busy)


async def test_a_pool_of_asyncpg_that_others_use_is_no_outage(postgres: Any) -> None:
    import asyncpg

    async with asyncpg.create_pool(postgres.url, min_size=1, max_size=1) as pool:
        service, key = Service(oncegate.PostgresStore(pool), store_timeout=0.5), uuid.uuid4().hex
        assert await service.ask() == 201
        async with pool.acquire():
            assert (await service.ask(key), service.runs) == (503, 1)
        assert ([await service.ask(key) for _ in range(2)], service.runs) == ([201, 201], 2)


async def test_nothing_executes_without_protection_while_an_owner_is_known() -> None:
    """A store that has answered "in progress", and is away then."""

    class Owned(oncegate.MemoryStore):
        is_immediate, claims = False, 0

        async def claim(self, claim: Claim) -> Claimed:
            self.claims += 1
            if self.claims > 1:
                raise StoreUnavailable("away")
            return Claimed("in-progress", lease_left_ms=30_000)

    service = Service(Owned(), wait=1)
    assert (await service.ask(), service.runs) == (503, 0)
    assert (await service.ask(), service.runs) == (201, 1)


async def test_nothing_executes_without_protection_if_this_process_had_an_owner_meanwhile() -> None:
    class Away(Silent):
        claims = 0

        async def claim(self, claim: Claim) -> Claimed:
            self.claims += 1
            if self.claims > 1:
                return await oncegate.MemoryStore.claim(self, claim)
            await super().claim(claim)
            raise StoreUnavailable("away")

    store = Away()
    engine, policy = engine_of(store, blocking=False), Policy(wait=0)
    store.answers.clear()
    late = asyncio.ensure_future(engine.claim(bytes(32), bytes(33), policy))
    await store.begun.wait()
    permit: Any = await engine.claim(bytes(32), bytes(33), policy)
    assert await permit.complete("completed", b"response") == "stored"
    store.answers.set()
    with pytest.raises(StoreUnavailable) as caught:
        await late
    assert caught.value.is_reached


NUMBERS = {
    errno.ECONNREFUSED: True, errno.EHOSTUNREACH: True, errno.ENETUNREACH: True, errno.EHOSTDOWN: True,
    errno.ETIMEDOUT: True, socket.EAI_NONAME: True, errno.ENOENT: False, errno.EMFILE: False, errno.ENFILE: False,
    errno.ENOBUFS: False, errno.ENOMEM: False, errno.EAGAIN: False, errno.EADDRNOTAVAIL: False, errno.EACCES: False,
    errno.EPERM: False, errno.EINVAL: False, socket.EAI_MEMORY: False, 9999: False,
}  # fmt: skip


@pytest.mark.parametrize(("number", "is_away"), NUMBERS.items())
def test_the_errors_of_connecting_that_are_an_outage(number: int, is_away: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All others may be those of this process."""
    from redis import exceptions

    from oncegate.redis import _read_error

    monkeypatch.setattr(runtime, "_used_up_at", 0.0, raising=False)
    monkeypatch.setattr(runtime, "USED_UP_FOR", 0.0, raising=False)
    postgres = oncegate.PostgresStore(lambda: None)
    error = socket.gaierror(number, "x") if number < 0 else OSError(number, os.strerror(number))
    several = OSError(f"Multiple exceptions: [Errno 111] refused, [Errno {number}] another")
    for own in (error, several):
        shown = f"{number} " if own is error else f"{own} "
        text = f"Error {shown}connecting to server:6379. x."
        assert _read_error(exceptions.ConnectionError(text)).is_reached != is_away
        assert postgres._read_error(own, is_connecting=True).is_reached != is_away
    assert not _read_error(exceptions.ConnectionError("Error 2 connecting to /run/redis.sock. x.")).is_reached
    assert _read_error(exceptions.ConnectionError("Error connecting to server:6379.")).is_reached


def test_an_error_that_descriptors_are_used_up_makes_others_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a server is not found, or time runs out, for the same reason."""
    postgres = oncegate.PostgresStore(lambda: None)
    monkeypatch.setattr(runtime, "_used_up_at", -60.0, raising=False)
    name = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert not postgres._read_error(name, is_connecting=True).is_reached
    assert postgres._read_error(OSError(errno.EMFILE, "x"), is_connecting=True).is_reached
    assert postgres._read_error(name, is_connecting=True).is_reached
    assert postgres._read_error(TimeoutError(), is_connecting=True).is_reached


@contextlib.asynccontextmanager
async def redis_store(url: str) -> AsyncIterator[Any]:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    async with Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as client:
        yield oncegate.RedisStore(client)


ANSWERS = ["NOAUTH", "WRONGPASS", "a disabled user", "max number of clients", "unknown command"]


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_redis_that_answers_with_an_error_is_no_outage(answer: str) -> None:
    from redis import Redis

    options = ["--rename-command", "EVAL", "", "--rename-command", "EVALSHA", ""] if answer == ANSWERS[-1] else []
    with servers.redis(*options) as server:
        url = server.url.replace("127", ":wrong@127") if answer == "WRONGPASS" else server.url
        async with redis_store(url) as store:
            service, is_served = Service(store), answer in (ANSWERS[0], ANSWERS[2], ANSWERS[3])
            if is_served:
                assert await service.ask() == 201
                await store.client.connection_pool.disconnect()
            with Redis.from_url(server.url) as admin:
                match answer:
                    case "NOAUTH" | "WRONGPASS":
                        admin.config_set("requirepass", "right")
                    case "a disabled user":
                        admin.execute_command("ACL", "SETUSER", "default", "off")
                    case "max number of clients":
                        admin.config_set("maxclients", 1)
                key = uuid.uuid4().hex
                assert [await service.ask(key) for _ in range(7)] == [503] * 7
            assert service.runs == is_served


async def test_a_redis_that_is_away_or_does_not_answer_is_an_outage() -> None:
    with servers.redis() as server:
        async with redis_store(server.url) as store:
            service = Service(store, store_timeout=0.5)
            assert await service.ask() == 201
            server.pause()
            assert await service.ask() == 201
            server.resume()
            server.process.kill()
            server.process.wait(20)
            assert [await service.ask() for _ in range(7)] == [201] * 7
    async with redis_store(f"redis://127.0.0.1:{servers.free_port()}/0") as store:
        assert await Service(store).ask() == 201


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("kind", ["redis", "asyncpg"])
async def test_a_process_without_file_descriptors_is_no_outage(kind: str, host: str, request: Any) -> None:
    """Clients that open connections could switch the protection off."""
    async with contextlib.AsyncExitStack() as stack:
        url = request.getfixturevalue("redis" if kind == "redis" else "postgres").url.replace("127.0.0.1", host)
        if kind == "redis":
            store = await stack.enter_async_context(redis_store(url))
        else:
            import asyncpg

            store = oncegate.PostgresStore(await stack.enter_async_context(asyncpg.create_pool(url, min_size=0)))
        service, key = Service(store), uuid.uuid4().hex
        assert await service.ask(key) == 201
        if kind == "redis":
            await store.client.connection_pool.disconnect()
        else:
            await store.pool.expire_connections()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.ExitStack() as held:
            held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            statuses = []
            for _ in range(7):
                with contextlib.suppress(OSError):
                    while True:
                        held.enter_context(open(os.devnull))
                statuses.append(await service.ask(key))
        # The old connection of asyncpg leaves a descriptor when it is closed, so that there may be replays.
        assert statuses[0] == 503
        assert service.runs == 1
        assert await service.ask(key) == 201


@pytest.mark.parametrize("kind", ["redis", "asyncpg"])
async def test_a_server_that_takes_connections_and_breaks_them_is_no_outage(kind: str) -> None:
    """It is tried again for a short time."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, taken = listener.getsockname()[1], 0

        async def take(reader: Any, writer: Any) -> None:
            nonlocal taken
            taken += 1
            await reader.read(1)
            writer.transport.abort()

        server = await asyncio.start_server(take, sock=listener)
        async with contextlib.AsyncExitStack() as stack:
            if kind == "redis":
                store = await stack.enter_async_context(redis_store(f"redis://127.0.0.1:{port}/0"))
            else:
                import asyncpg

                url = f"postgresql://owner@127.0.0.1:{port}/postgres?sslmode=disable"
                store = oncegate.PostgresStore(await stack.enter_async_context(asyncpg.create_pool(url, min_size=0)))
            service = Service(store, store_timeout=0.5)
            key, began_at = uuid.uuid4().hex, time.monotonic()
            assert [await service.ask(key) for _ in range(8)] == [503] * 8
            assert (service.runs, taken > 8) == (0, True)
            assert time.monotonic() - began_at < 20
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("kind", ["redis", "asyncpg"])
async def test_a_server_without_tls_is_no_outage(kind: str) -> None:
    async def refuse(reader: Any, writer: Any) -> None:
        # PostgreSQL asks first if TLS is spoken.
        if kind == "asyncpg":
            await reader.read(8)
            writer.write(b"S")
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with contextlib.AsyncExitStack() as stack:
        if kind == "redis":
            store = await stack.enter_async_context(redis_store(f"rediss://127.0.0.1:{port}/0?ssl_cert_reqs=none"))
        else:
            import asyncpg

            url = f"postgresql://owner@127.0.0.1:{port}/postgres?sslmode=require"
            store = oncegate.PostgresStore(await stack.enter_async_context(asyncpg.create_pool(url, min_size=0)))
        service = Service(store)
        assert [await service.ask() for _ in range(7)] == [503] * 7
        assert service.runs == 0
    server.close()
    await server.wait_closed()


@contextlib.asynccontextmanager
async def postgres_store(driver: str, url: str) -> AsyncIterator[Any]:
    if driver == "asyncpg":
        import asyncpg

        async with asyncpg.create_pool(url, min_size=2, max_size=2) as pool:
            yield oncegate.PostgresStore(pool)
    else:
        from psycopg_pool import AsyncConnectionPool

        async with AsyncConnectionPool(url, min_size=2, max_size=2, open=False) as pool:
            await pool.wait(30)
            yield oncegate.PostgresStore(pool)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_a_postgres_that_ends_a_statement_is_no_outage(driver: str, postgres: Any) -> None:
    role = f"hasty_{driver}"
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN SUPERUSER; ALTER ROLE {role} SET statement_timeout = '200ms'")
        async with postgres_store(driver, postgres.url.replace("owner@", f"{role}@")) as store:
            service = Service(store, wait=0)
            assert await service.ask() == 201
            with admin.transaction():
                (table,) = admin.execute(
                    "SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
                    "WHERE n.nspname = 'oncegate' AND c.relname = 'records'"
                ).fetchone()
                admin.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                key = uuid.uuid4().hex
                assert [await service.ask(key) for _ in range(7)] == [503] * 7
            assert service.runs == 1
        admin.execute(f"DROP ROLE {role}")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_connections_that_were_ended_are_no_outage(driver: str, postgres: Any) -> None:
    """Both of a pool: the request is protected, and executed once."""
    async with postgres_store(driver, postgres.url + f"?application_name=ended_{driver}") as store:
        service, key = Service(store, wait=0), uuid.uuid4().hex
        assert await service.ask() == 201
        with psycopg.connect(postgres.url, autocommit=True) as admin:
            ended = admin.execute(
                "SELECT pid, pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = %s",
                [f"ended_{driver}"],
            ).fetchall()
            assert len(ended) == 2
            # The pool may have new ones by then, such as for a purge.
            left, pids = "SELECT 1 FROM pg_stat_activity WHERE pid = ANY(%s)", [pid for pid, _ in ended]
            await until(
                lambda: asyncio.sleep(0, not admin.execute(left, [pids]).fetchall()), "the connections did not end"
            )
        assert [await service.ask(key) for _ in range(3)] == [201] * 3
        assert service.runs == 2


class Forgetful:
    """A network that can forget its connections: nothing arrives on them any more, and nothing says so. New ones work."""

    def __init__(self, port: int) -> None:
        self.port, self.generation = port, 0
        self.tasks: list[Any] = []
        self.writers: list[Any] = []

    async def take(self, reader: Any, writer: Any) -> None:
        own = self.generation
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def pass_on(source: Any, target: Any) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65_536):
                    if own == self.generation:
                        target.write(data)
                if own == self.generation:
                    target.close()

        for pair in ((reader, server_writer), (server_reader, writer)):
            self.tasks.append(asyncio.ensure_future(pass_on(*pair)))
        self.writers += [writer, server_writer]

    async def close(self) -> None:
        for writer in self.writers:
            writer.transport.abort()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg", "psycopg-blocking"])
async def test_connections_that_died_without_a_word_are_given_up(driver: str, postgres: Any) -> None:
    """The pool never got them back."""
    network = Forgetful(postgres.port)
    server = await asyncio.start_server(network.take, "127.0.0.1", 0)
    url = postgres.url.replace(str(postgres.port), str(server.sockets[0].getsockname()[1]))
    pool: Any
    if driver == "asyncpg":
        import asyncpg

        pool = await asyncpg.create_pool(url, min_size=1, max_size=1, ssl=False)
    elif driver == "psycopg":
        from psycopg_pool import AsyncConnectionPool

        pool = AsyncConnectionPool(url, min_size=1, max_size=1, open=False)
        await pool.open()
    else:
        from psycopg_pool import ConnectionPool

        pool = ConnectionPool(url, min_size=1, max_size=1, open=False)
        await asyncio.to_thread(pool.open)
    store = oncegate.PostgresStore(pool)
    engine = engine_of(store, blocking=False)

    async def is_there() -> bool:
        try:
            return await engine.call(bytes(32), lambda: store.lookup(bytes(32)), 0.5) is None
        except StoreUnavailable:
            return False

    await until(is_there, "the server is not there")
    network.generation += 1
    assert not await is_there()
    await until(is_there, "the pool did not get its connection back")
    if driver == "asyncpg":
        pool.terminate()
    else:
        await (pool.close() if driver == "psycopg" else asyncio.to_thread(pool.close))
    server.close()
    await network.close()
    await asyncio.sleep(0.05)
