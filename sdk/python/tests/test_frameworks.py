"""WSGI and Django, on real sockets and through Django's own clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import httpx
import pytest

import oncegate
import servers
from oncegate import wsgi


class Quiet(WSGIRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        pass


class Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    server = make_server("127.0.0.1", 0, app, Threads, Quiet)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_wsgi(store: Any) -> None:
    executions: list[bytes] = []
    pause = threading.Event()

    def app(environ: Any, start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ["PATH_INFO"] == "/throw":
            executions.append(b"throw")
            raise RuntimeError("the handler throws")
        if environ["REQUEST_METHOD"] == "POST":
            executions.append(body)
            pause.wait(0.1)
        big = environ["PATH_INFO"] == "/big"
        start_response("201 Created", [("Content-Type", "text/plain"), ("Set-Cookie", "a=1")])
        return (part for part in [b"x" * 100_000] * 20) if big else [b"made ", body]

    if not (store.is_blocking or getattr(store, "is_immediate", False)):
        with pytest.raises(oncegate.ConfigError, match="asynchronous"):
            wsgi.IdempotencyMiddleware(app, store=store, service="tests")
        return

    def work() -> None:
        guarded = wsgi.IdempotencyMiddleware(app, store=store, service="tests", scope="single-tenant")
        with served(guarded) as url, ThreadPoolExecutor(10) as threads:

            def post(key: str, path: str = "/pay", body: Any = b"5") -> httpx.Response:
                return servers.post(url + path, content=body, headers={"idempotency-key": key}, timeout=20)

            key = uuid.uuid4().hex
            replies = list(threads.map(lambda _: post(key), range(10)))
            assert {(reply.status_code, reply.text) for reply in replies} == {(201, "made 5")}
            assert executions == [b"5"]
            assert sum("set-cookie" in reply.headers for reply in replies) == 1
            assert post(key, body=b"6").status_code == 422
            key = uuid.uuid4().hex
            assert [post(key, "/throw").status_code for _ in range(2)] == [500, 500]
            assert executions == [b"5", b"throw"]
            key = uuid.uuid4().hex
            assert len(post(key, "/big").content) == 2_000_000
            assert post(key, "/big").json()["type"] == "urn:oncegate:problem:replay-unavailable"
            assert post(uuid.uuid4().hex, body=bytes(3_000_000)).status_code == 413
            assert servers.get(url).text == "made "
        assert guarded.drain(1)

    await asyncio.to_thread(work)


def _post(url: str, path: str, **more: Any) -> httpx.Response:
    return servers.post(url + path, content=more.pop("body", b"5"), headers={"idempotency-key": path}, timeout=20)


def test_what_a_wsgi_application_may_do() -> None:
    """Closing that raises, write() in the middle of the iteration, and a body that was cut off."""
    ran: list[str] = []

    class Parts:
        def __init__(self, *parts: bytes) -> None:
            self._parts = iter(parts)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> bytes:
            return next(self._parts)

        def close(self) -> None:
            raise RuntimeError("the temporary file is gone")

    def app(environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        ran.append(path)
        length = [("Content-Length", "1000")] if path == "/cut" else []
        write = start_response("201 Created", [("Content-Type", "text/plain"), *length])
        if path == "/close":
            return Parts(b"made")
        if path == "/cut":
            return [b"only a part"]

        def parts() -> Any:
            write(b"A")
            yield b"B" * (2_000_000 if path == "/big" else 1)
            write(b"C")
            yield b"D"
            write(b"E")

        return parts()

    guarded = wsgi.IdempotencyMiddleware(app, store=oncegate.MemoryStore(), scope="single-tenant", wait=0)
    with served(guarded) as url:
        for _ in range(2):
            reply = _post(url, "/close")
            assert (reply.status_code, reply.text) == (201, "made")
            assert _post(url, "/write").text == "ABCDE"
            reply = _post(url, "/cut")
            assert (reply.status_code, reply.json()["type"]) == (500, "urn:oncegate:problem:outcome-unknown")
        big = _post(url, "/big").text
        assert big == "A" + "B" * 2_000_000 + "CDE"
        assert _post(url, "/big").json()["type"] == "urn:oncegate:problem:replay-unavailable"
        assert ran == ["/close", "/write", "/cut", "/big"]
        # wsgiref does not tell where a body in chunks ends.
        reply = _post(url, "/chunks", body=(part for part in [b"5"]))
        assert (reply.status_code, "Content-Length" in reply.text) == (400, True)
    assert guarded.drain(1)


def test_the_middleware_twice_under_wsgi() -> None:
    ran: list[int] = []

    def app(environ: Any, start_response: Any) -> Any:
        ran.append(1)
        start_response("201 Created", [])
        return [b"made"]

    store = oncegate.MemoryStore()
    inner = wsgi.IdempotencyMiddleware(app, store=store, scope="single-tenant")
    with served(wsgi.IdempotencyMiddleware(inner, store=store, scope="single-tenant")) as url:
        assert [_post(url, "/").status_code for _ in range(2)] == [201, 201]
    assert ran == [1]


SHOP = """
import sys, threading
from wsgiref.simple_server import WSGIServer, WSGIRequestHandler, make_server
from socketserver import ThreadingMixIn
from psycopg_pool import ConnectionPool
from oncegate import PostgresStore
from oncegate.wsgi import IdempotencyMiddleware

class Server(ThreadingMixIn, WSGIServer):
    pass

def app(environ, start_response):
    print("running", flush=True)
    sys.stdin.readline()
    start_response("201 Created", [])
    return [b"made"]

pool = ConnectionPool(sys.argv[1], min_size=1, max_size=2, timeout=0.2, open=True)
guarded = IdempotencyMiddleware(app, store=PostgresStore(pool), service="drain", scope="single-tenant", store_timeout=0.3)
server = make_server("127.0.0.1", 0, guarded, Server)
print(server.server_port, flush=True)
server.handle_request()
server.server_close()
print("ending", flush=True)
"""


def test_a_wsgi_process_stores_its_outcomes_before_it_ends() -> None:
    """The store is away when the handler ends, and comes back while the process ends."""
    import subprocess
    import sys

    import psycopg

    key = uuid.uuid4().hex
    with servers.postgres() as server, ThreadPoolExecutor(1) as threads:
        shop = subprocess.Popen(
            [sys.executable, "-c", SHOP, server.url],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        try:
            assert shop.stdin and shop.stdout and shop.stderr
            url = f"http://127.0.0.1:{int(shop.stdout.readline())}/"
            sent = threads.submit(servers.post, url, headers={"idempotency-key": key}, timeout=60)
            assert shop.stdout.readline() == "running\n"
            server.pause()
            shop.stdin.write("\n")
            shop.stdin.flush()
            assert sent.result(60).headers["idempotency-status"] == "not-stored"
            assert shop.stdout.readline() == "ending\n"
            threading.Event().wait(0.5)
            assert shop.poll() is None
            server.resume()
            _, log = shop.communicate(timeout=60)
        finally:
            server.resume()
            shop.kill()
            shop.wait()
        assert "waits up to 30 s" in log, log
        with psycopg.connect(server.url) as connection:
            assert connection.execute("SELECT state FROM oncegate.records").fetchall() == [("completed",)]


PRELOADED = """
import io, logging, os, sys

from oncegate import MemoryStore, StoreUnavailable
from oncegate.wsgi import IdempotencyMiddleware

class Store(MemoryStore):
    is_away = False

    async def complete(self, *arguments):
        if self.is_away:
            raise StoreUnavailable("away")
        print(os.getpid(), "stored", flush=True)
        return await super().complete(*arguments)

def app(environ, start_response):
    store.is_away = True
    start_response("201 Created", [])
    return [b"made"]

logging.basicConfig(format="%(process)d %(message)s")
store = Store()
guarded = IdempotencyMiddleware(app, store=store, service="drain", scope="single-tenant")

def ask(key):
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/a", "HTTP_IDEMPOTENCY_KEY": key, "HTTP_HOST": "h",
        "wsgi.input": io.BytesIO(b"12345"), "CONTENT_LENGTH": "5",
    }
    guarded(environ, lambda *_: None)

# As gunicorn does with --preload, and as a handler may do.
if sys.argv[1] == "parent":
    ask("parent")
child = os.fork()
if child:
    store.is_away = False
    os.waitpid(child, 0)
elif sys.argv[1] == "worker":
    ask("worker")
    store.is_away = False
print(os.getpid(), "ends", bool(child), flush=True)
"""


@pytest.mark.parametrize("who", ["worker", "parent"])
def test_the_process_that_executes_stores_its_outcomes_before_it_ends(who: str) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", PRELOADED, who], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    ends = next(line for line in lines if line.endswith(str(who == "parent")))
    own = ends.split()[0]
    assert [line for line in lines if "stored" in line] == [f"{own} stored"], done
    assert all(line.startswith(own) for line in done.stderr.splitlines() if "the process waits" in line), done.stderr


EXECUTIONS: list[bytes] = []
DJANGO_STORE = oncegate.MemoryStore()


def pay(request: Any) -> Any:
    from django.http import HttpResponse

    EXECUTIONS.append(request.body)
    if request.GET.get("throw"):
        raise RuntimeError("the view throws")
    return HttpResponse(b"made " + request.body, status=201)


async def pay_async(request: Any) -> Any:
    await asyncio.sleep(0.05)
    return pay(request)


@pytest.fixture(scope="module")
def django() -> None:
    import django
    from django.conf import settings
    from django.urls import path

    if settings.configured:
        # Tests of another file use it, too.
        return
    global urlpatterns
    urlpatterns = [path("pay", pay), path("pay-async", pay_async)]
    settings.configure(
        ROOT_URLCONF=__name__,
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="-",
        MIDDLEWARE=["oncegate.django.IdempotencyMiddleware"],
        ONCEGATE={"store": DJANGO_STORE, "scope": "single-tenant"},
        LOGGING_CONFIG=None,
    )
    django.setup()


def post(app: Any, path: str = "/") -> tuple[int, bytes]:
    import io

    started: list[int] = []
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": path, "HTTP_HOST": "shop.test", "HTTP_IDEMPOTENCY_KEY": "k",
        "wsgi.input": io.BytesIO(b""), "CONTENT_LENGTH": "0",
    }
    parts = app(environ, lambda status, *_: started.append(int(status[:3])))
    body = b"".join(parts)
    getattr(parts, "close", lambda: None)()
    return started[-1], body


def test_wsgi_responses_of_every_kind() -> None:
    runs: list[str] = []

    class Response:
        def __iter__(self) -> Iterator[bytes]:
            yield b"made"

        def close(self) -> None:
            raise RuntimeError("the end fails")

    def app(environ: Any, start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        runs.append(path)
        write = start_response("201 Created", [("Content-Length", "9")] if path == "/cut" else [])
        if path == "/closes":
            return Response()
        if path == "/cut":
            return [b"made"]

        def parts() -> Iterator[bytes]:
            write(b"A")
            yield b"B"
            write(b"C")
            yield b"D"
            write(b"E")

        return parts()

    store = oncegate.MemoryStore()
    own = wsgi.IdempotencyMiddleware(app, store=store, scope="single-tenant")
    twice = wsgi.IdempotencyMiddleware(own, store=store, scope="single-tenant")
    assert [post(own, "/closes") for _ in range(2)] == [(201, b"made")] * 2
    assert [post(own, "/writes") for _ in range(2)] == [(201, b"ABCDE")] * 2
    assert [post(own, "/cut")[0] for _ in range(2)] == [500, 500]
    assert [post(twice, "/twice") for _ in range(2)] == [(201, b"ABCDE")] * 2
    assert runs == ["/closes", "/writes", "/cut", "/twice"]
    assert own.drain(0)


def test_django_under_wsgi(django: None) -> None:
    from django.test import Client

    EXECUTIONS.clear()
    client, key = Client(raise_request_exception=False), uuid.uuid4().hex

    def post(**more: Any) -> Any:
        target = "/pay" + more.pop("query", "")
        headers = {"idempotency-key": key}
        return client.post(target, more.pop("body", b"5"), content_type="text/plain", headers=headers)

    first, second = post(), post()
    assert (first.status_code, first.content) == (second.status_code, second.content) == (201, b"made 5")
    assert "idempotent-replayed" not in first
    assert second["idempotent-replayed"] == "true"
    assert post(body=b"6").status_code == 422
    key = uuid.uuid4().hex
    assert [post(query="?throw=1").status_code for _ in range(2)] == [500, 500]
    assert EXECUTIONS == [b"5", b"5"]


async def test_django_under_asgi(django: None) -> None:
    from django.test import AsyncClient

    EXECUTIONS.clear()
    client, key = AsyncClient(), uuid.uuid4().hex

    async def post() -> Any:
        return await client.post("/pay-async", b"5", content_type="text/plain", headers={"idempotency-key": key})

    replies = await asyncio.gather(*(post() for _ in range(5)))
    assert {(reply.status_code, reply.content) for reply in replies} == {(201, b"made 5")}
    assert EXECUTIONS == [b"5"]


def test_the_connection_of_django(django: None, postgres: Any) -> None:
    """Django's own connection is that of `complete_blocking`, in `atomic` of Django."""
    import urllib.parse

    from django.db.backends.postgresql.base import DatabaseWrapper
    from psycopg_pool import ConnectionPool

    from oncegate.engine import Permit, Policy, Reply, engine_of
    from oncegate.runtime import run_blocking
    from test_transactions import count, ledger

    table, record = ledger(postgres), uuid.uuid4().bytes * 2
    address = urllib.parse.urlsplit(postgres.url)
    settings = {
        "ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": "owner", "HOST": address.hostname,
        "PORT": address.port, "PASSWORD": "", "OPTIONS": {}, "TIME_ZONE": None, "CONN_HEALTH_CHECKS": False, "CONN_MAX_AGE": 0,
        "AUTOCOMMIT": True, "ATOMIC_REQUESTS": False, "TEST": {},
    }  # fmt: skip
    wrapper = DatabaseWrapper(settings)
    with ConnectionPool(postgres.url, min_size=1, max_size=2, open=True) as pool:
        engine = engine_of(oncegate.PostgresStore(pool), blocking=True)
        permit = run_blocking(engine.claim(record, b"\x01" + bytes(32), Policy()))
        assert isinstance(permit, Permit)
        engine.leave(permit)
        wrapper.set_autocommit(False)
        with wrapper.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} VALUES (1)")
        made = oncegate.StoredResponse.of(201, {"content-type": "text/plain"}, "made")
        oncegate.complete_blocking(wrapper, permit.attempt, made)
        wrapper.commit()
        reply = run_blocking(engine.claim(record, b"\x01" + bytes(32), Policy()))
        assert isinstance(reply, Reply)
        assert oncegate.StoredResponse.decode(reply.response).body == b"made"
        with (
            pytest.raises(oncegate.ConfigError, match="is for complete_blocking"),
            oncegate.blocking_transaction(wrapper, "k", name="pay", service="tests"),
        ):
            raise AssertionError
        with pytest.raises(oncegate.ConfigError, match="a connection of psycopg 3"):
            oncegate.complete_blocking(object(), permit.attempt)
    wrapper.close()
    assert count(postgres, table) == 1
