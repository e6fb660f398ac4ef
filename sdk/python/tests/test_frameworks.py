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
            wsgi.IdempotencyMiddleware(app, store=store)
        return

    def work() -> None:
        guarded = wsgi.IdempotencyMiddleware(app, store=store, scope="single-tenant")
        with served(guarded) as url, ThreadPoolExecutor(10) as threads:

            def post(key: str, path: str = "/pay", body: Any = b"5") -> httpx.Response:
                return httpx.post(url + path, content=body, headers={"idempotency-key": key}, timeout=20)

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
            assert httpx.get(url).text == "made "
        assert guarded.drain(1)

    await asyncio.to_thread(work)


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
