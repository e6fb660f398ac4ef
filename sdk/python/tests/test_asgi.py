"""The ASGI middleware: limits, streams, web sockets, lifespan, and clients that leave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import oncegate
from oncegate import IdempotencyMiddleware, MemoryStore

Sent = list[Any]


def scope(key: str | None = "k", path: str = "/pay", **headers: str) -> dict[str, Any]:
    fields = {"host": "shop.test", **headers} | ({"idempotency-key": key} if key else {})
    listed = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    return {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": listed}


async def ask(app: Any, own: Any, *parts: Any) -> Sent:
    sent: Sent = []
    queue = list(parts) or [{"type": "http.request", "body": b"5"}]

    async def receive() -> Any:
        if queue:
            return queue.pop(0)
        await asyncio.sleep(3600)
        return None

    async def send(message: Any) -> None:
        sent.append(message)

    await app(own, receive, send)
    return sent


def status(sent: Sent) -> int:
    return int(sent[0]["status"])


def guarded(handler: Any, **settings: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(handler, store=MemoryStore(), **{"scope": "single-tenant", **settings})


async def stream(own: Any, receive: Any, send: Any) -> None:
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for _ in range(3):
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    await send({"type": "http.response.body"})


async def slow(own: Any, receive: Any, send: Any) -> None:
    await asyncio.sleep(0.2)
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": b"made"})


async def test_a_stream_goes_to_the_first_client_as_it_comes() -> None:
    app = guarded(stream)
    sent = await ask(app, scope())
    assert b"".join(message.get("body", b"") for message in sent) == b"data: 1\n\n" * 3
    assert len(sent) == 5
    assert status(await ask(app, scope())) == 422


async def test_web_sockets_and_lifespan_pass() -> None:
    seen: list[str] = []

    async def handler(own: Any, receive: Any, send: Any) -> None:
        seen.append(own["type"])
        if own["type"] == "lifespan":
            assert (await receive())["type"] == "lifespan.shutdown"

    app = guarded(handler)
    await ask(app, {"type": "websocket"})
    await ask(app, {"type": "lifespan"}, {"type": "lifespan.shutdown"})
    assert seen == ["websocket", "lifespan"]


async def test_bodies() -> None:
    ran: list[bytes] = []

    async def handler(own: Any, receive: Any, send: Any) -> None:
        ran.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app = guarded(handler, max_request_body=8, body_timeout=0.1)
    half = {"type": "http.request", "body": b"1234", "more_body": True}
    assert status(await ask(app, scope("a"), half, half, half)) == 413
    assert status(await ask(app, scope("b"), half)) == 400
    assert await ask(app, scope("c"), half, {"type": "http.disconnect"}) == []
    assert ran == []
    assert status(await ask(app, scope("d"), half, {"type": "http.request", "body": b"\x00\xff"})) == 200
    assert ran == [b"1234\x00\xff"]
    assert app.flow.limits._held == 0


async def test_requests_beyond_a_limit_are_refused() -> None:
    app = guarded(slow, max_in_flight=1, wait=0)
    first = asyncio.ensure_future(ask(app, scope("a")))
    await asyncio.sleep(0.05)
    assert status(await ask(app, scope("b"))) == 503
    assert status(await first) == 201
    assert status(await ask(app, scope("b"))) == 201
    one = guarded(slow, max_in_flight_per_caller=1, scope="required-header:x-tenant", wait=0)
    first = asyncio.ensure_future(ask(one, scope("a", x_tenant="1")))
    await asyncio.sleep(0.05)
    assert status(await ask(one, scope("b", x_tenant="1"))) == 503
    assert status(await ask(one, scope("b", x_tenant="2"))) == 201
    await first
    await asyncio.sleep(0.01)
    assert not app.flow.limits._callers
    assert not one.flow.limits._callers


async def test_a_client_that_leaves_does_not_cancel_its_handler() -> None:
    app = guarded(slow)
    first = asyncio.ensure_future(ask(app, scope()))
    await asyncio.sleep(0.05)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    sent = await ask(app, scope())
    assert (status(sent), sent[1]["body"]) == (201, b"made")
    assert (b"idempotent-replayed", b"true") in sent[0]["headers"]
    assert await app.drain(1)


async def test_a_handler_that_ends_half_way() -> None:
    async def handler(own: Any, receive: Any, send: Any) -> None:
        if own["path"] == "/nothing":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ha", "more_body": True})
        if own["path"] == "/throw":
            raise ValueError("half-way")

    app = guarded(handler)
    for path in ("/nothing", "/half"):
        for _ in range(2):
            sent = await ask(app, scope(path=path))
            assert b"outcome-unknown" in sent[1]["body"]
    with pytest.raises(ValueError, match="half-way"):
        await ask(app, scope(path="/throw"))
    assert b"outcome-unknown" in (await ask(app, scope(path="/throw")))[1]["body"]
    released = guarded(handler, server_errors="release")
    assert b"handler-failed" in (await ask(released, scope(path="/half")))[1]["body"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"colour": 1}, "there is no setting 'colour'"),
        ({"profile": "iett"}, "there is no profile 'iett'"),
        ({"scope": "tenant"}, "scope has 'tenant'"),
        ({"lease": "5 minutes"}, "lease is '5 minutes'"),
        ({"retention": 0}, "retention is 0 seconds"),
        ({"key_format": "pattern:("}, "no regular expression"),
        ({"natural_key": ["/a"], "scope": None}, "natural_key needs a scope"),
        ({"stored_headers": ["set-cookie"]}, "must not be stored"),
        ({"on_abandoned": "reconcile"}, "on_abandoned is 'reconcile'"),
    ],
)
def test_wrong_settings(settings: Any, text: str) -> None:
    with pytest.raises(oncegate.ConfigError, match=text.replace("(", r"\(")):
        guarded(slow, **settings)
