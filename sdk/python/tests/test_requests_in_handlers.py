"""A handler calls an application in its own process: that request has an attempt of its own, or none."""

from __future__ import annotations

import io
import uuid
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

import oncegate
from oncegate import IdempotencyMiddleware, MemoryStore, wsgi
from test_asgi import guarded
from test_frameworks import django as django_configured

__all__ = ["django_configured"]


@pytest.mark.parametrize("form", ["plain", "no natural key", "store is away"])
async def test_a_request_without_a_key_in_a_handler_has_no_attempt(form: str) -> None:
    class Away(MemoryStore):
        async def claim(self, claim: Any) -> Any:
            raise oncegate.StoreUnavailable("the store is away", is_unsent=True)

    seen: list[Any] = []

    async def inner(request: Any) -> Response:
        seen.append(oncegate.current_attempt())
        return Response("inner")

    options: dict[str, Any] = {"store": MemoryStore(), "scope": "single-tenant"}
    headers = {}
    if form == "no natural key":
        options["natural_key"] = ["/id"]
    elif form == "store is away":
        options |= {"store": Away(), "store_outage": "open", "wait": 0, "store_timeout": 0.2}
        headers = {"idempotency-key": "other"}
    other = IdempotencyMiddleware(Starlette(routes=[Route("/", inner, methods=["POST"])]), **options)

    async def outer(request: Any) -> Response:
        own = oncegate.current_attempt()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(other), base_url="http://shop.test") as client:
            reply = await client.post("/", headers=headers, json={"name": "without id"})
        seen.append(oncegate.current_attempt() is own is not None)
        return Response(reply.text)

    app = guarded(Starlette(routes=[Route("/pay", outer, methods=["POST"])]))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop.test") as client:
        answer = await client.post("/pay", headers={"idempotency-key": "k"})
    assert (answer.status_code, answer.text) == (200, "inner")
    assert seen == [None, True]


def _environ(path: str, key: str | None) -> dict[str, Any]:
    fields = {"HTTP_IDEMPOTENCY_KEY": key} if key else {}
    return {
        "REQUEST_METHOD": "POST", "PATH_INFO": path, "HTTP_HOST": "shop.test", "SERVER_NAME": "shop.test", "SERVER_PORT": "80",
        "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(b"5"), "CONTENT_LENGTH": "1", "CONTENT_TYPE": "text/plain", **fields,
    }  # fmt: skip


@pytest.mark.parametrize("framework", ["wsgi", "django"])
def test_a_request_without_a_key_in_a_blocking_handler_has_no_attempt(
    framework: str, django_configured: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import test_frameworks

    seen: list[Any] = []

    def inner(environ: Any, start_response: Any) -> Any:
        seen.append(oncegate.current_attempt())
        start_response("200 OK", [])
        return [b"inner"]

    other: Any = wsgi.IdempotencyMiddleware(inner, store=MemoryStore(), scope="single-tenant")
    if framework == "django":
        from django.core.handlers.wsgi import WSGIHandler

        other = WSGIHandler()
        class Executions(list[bytes]):
            def append(self, body: bytes) -> None:
                seen.append(oncegate.current_attempt())

        monkeypatch.setattr(test_frameworks, "EXECUTIONS", Executions())

    def outer(environ: Any, start_response: Any) -> Any:
        own = oncegate.current_attempt()
        body = b"".join(other(_environ("/pay", None), lambda *_: None))
        seen.append(oncegate.current_attempt() is own is not None)
        start_response("200 OK", [])
        return [body]

    app = wsgi.IdempotencyMiddleware(outer, store=MemoryStore(), scope="single-tenant")
    started: list[str] = []
    body = b"".join(app(_environ("/", uuid.uuid4().hex), lambda line, *_: started.append(line)))
    assert (started, body) == (["200 OK"], b"made 5" if framework == "django" else b"inner")
    assert seen == [None, True]
