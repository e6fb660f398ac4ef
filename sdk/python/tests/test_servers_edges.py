"""What servers and frameworks do at the edges: malformed bodies, other ways to send a body, fields that no server sends."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import pytest

import oncegate
from oncegate import wsgi
from test_asgi import ask, guarded, scope, status
from test_frameworks import django as django_configured
from test_frameworks import post

__all__ = ["django_configured"]


class MalformedChunk(Exception):
    """As gunicorn's InvalidChunkSize, which is no OSError."""


def test_malformed_bodies_use_up_no_memory() -> None:
    class Input:
        def __init__(self) -> None:
            self.parts = [b"x" * 60_000] * 10

        def read(self, size: int) -> bytes:
            if self.parts:
                return self.parts.pop()
            raise MalformedChunk

    def app(environ: Any, start_response: Any) -> Any:
        start_response("201 Created", [])
        return [b"made"]

    own = wsgi.IdempotencyMiddleware(
        app, store=oncegate.MemoryStore(), scope="single-tenant", request_budget=1_000_000
    )
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/", "HTTP_HOST": "shop.test", "HTTP_IDEMPOTENCY_KEY": "k",
        "HTTP_TRANSFER_ENCODING": "chunked", "wsgi.input_terminated": True,
    }  # fmt: skip
    for _ in range(5):
        with pytest.raises(MalformedChunk):
            own({**environ, "wsgi.input": Input()}, lambda *_: None)
    assert own.flow.limits._held == 0
    assert post(own) == (201, b"made")


def test_a_body_of_many_parts_takes_time_for_each_once() -> None:
    rows = 100_000

    def app(environ: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return (b"%06d\n" % row for row in range(rows))

    began = time.monotonic()
    for settings in ({}, {"max_response_body": 100_000}):
        own = wsgi.IdempotencyMiddleware(app, store=oncegate.MemoryStore(), scope="single-tenant", **settings)
        code, body = post(own)
        assert (code, len(body), body[-7:]) == (200, 7 * rows, b"099999\n")
    # It was minutes.
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("path", ["/first", "/later", "/written"])
def test_texts_in_place_of_bytes_end_the_attempt(path: str) -> None:
    runs = 0

    def app(environ: Any, start_response: Any) -> Any:
        nonlocal runs
        runs += 1
        write = start_response("200 OK", [])
        if path == "/written":
            write("text")
        return iter(["text"] if path == "/first" else [b"bytes", "text"])

    own = wsgi.IdempotencyMiddleware(app, store=oncegate.MemoryStore(), scope="single-tenant", wait=0)
    replies = [post(own, path) for _ in range(2)]
    assert [code for code, _ in replies] == [500, 500]
    assert b"outcome-unknown" in replies[1][1]
    assert (runs, own.drain(0)) == (1, True)


async def test_an_application_is_not_offered_to_let_the_server_send_its_body() -> None:
    async def file(own: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        # As FileResponse of Starlette does.
        if "http.response.pathsend" in own.get("extensions", {}):
            await send({"type": "http.response.pathsend", "path": "/etc/hostname"})
        else:
            await send({"type": "http.response.body", "body": ",".join(own["extensions"]).encode()})

    app = guarded(file)
    extensions = {"http.response.pathsend": {}, "tls": {}, "http.response.zerocopysend": {}}
    for _ in range(2):
        sent = await ask(app, {**scope(), "extensions": extensions})
        assert (status(sent), sent[1]["body"]) == (200, b"tls")
    # Without a key the server may send it.
    sent = await ask(app, {**scope(None), "extensions": extensions})
    assert sent[1]["type"] == "http.response.pathsend"


async def test_characters_that_no_server_sends_are_taken_off_fields() -> None:
    async def redirect(own: Any, receive: Any, send: Any) -> None:
        fields = [(b"location", b"/a\r\nX-Evil: 1"), (b"link", b"<\0>"), (b"etag", b'"1"')]
        await send({"type": "http.response.start", "status": 201, "headers": fields})
        await send({"type": "http.response.body", "body": b"made"})

    app = guarded(redirect)
    for _ in range(2):
        fields = dict((await ask(app, scope()))[0]["headers"])
        assert (fields[b"location"], fields[b"link"], fields[b"etag"]) == (b"/a  X-Evil: 1", b"< >", b'"1"')


def test_chunked_bodies_that_django_takes_for_empty_ones_are_refused(django_configured: None) -> None:
    from django.core.handlers.wsgi import WSGIHandler

    import test_frameworks

    test_frameworks.EXECUTIONS.clear()
    app, started = WSGIHandler(), []

    def chunked(own: Any, **more: Any) -> Iterator[bytes]:
        environ = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_HOST": "shop.test", "HTTP_IDEMPOTENCY_KEY": "chunked",
            "SERVER_NAME": "shop.test", "SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(b"5"), **more,
        }  # fmt: skip
        return own(environ, lambda code, *_: started.append(int(code[:3])))

    body = b"".join(chunked(app, HTTP_TRANSFER_ENCODING="chunked"))
    assert b"Content-Length" in body
    own = wsgi.IdempotencyMiddleware(app, store=oncegate.MemoryStore(), scope="single-tenant")
    assert b"".join(chunked(own, HTTP_TRANSFER_ENCODING="chunked", **{"wsgi.input_terminated": True})) == b"made 5"
    assert (started, test_frameworks.EXECUTIONS) == ([400, 201], [b"5"])


def test_a_form_that_django_has_read_is_a_mistake_of_the_configuration(
    django_configured: None, caplog: pytest.LogCaptureFixture
) -> None:
    from django.http import HttpRequest
    from django.test import RequestFactory

    from oncegate.django import IdempotencyMiddleware

    ran: list[HttpRequest] = []
    middleware = IdempotencyMiddleware(ran.append)
    request = RequestFactory().post("/pay", {"amount": "5"}, headers={"idempotency-key": "form"})
    assert request.POST["amount"] == "5"
    with pytest.raises(oncegate.ConfigError, match=r"read request\.POST"):
        middleware(request)
    assert ran == []
