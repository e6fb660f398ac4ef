"""The ASGI middleware: limits, streams, web sockets, lifespan, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

import oncegate
from oncegate import IdempotencyMiddleware, MemoryStore, asgi, http
from oncegate.engine import Permit, Policy, engine_of

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
    assert await app.drain(30)
    await asyncio.sleep(0.01)
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


async def test_a_scope_that_is_a_function() -> None:
    """A session whose cookie changes with each response is one caller."""
    ran = 0

    async def made(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made for %s" % str(own["session"]["user"]).encode()})

    app = guarded(made, scope=lambda request: request["session"].get("user"))

    async def post(user: Any, cookie: str) -> tuple[int, bytes]:
        sent = await ask(app, {**scope(cookie=f"session={cookie}"), "session": {"user": user}})
        return status(sent), sent[1]["body"]

    assert await post("ann", "first") == await post("ann", "second") == (201, b"made for ann")
    assert await post("ben", "third") == (201, b"made for ben")
    assert await post(7, "fourth") == await post("7", "fifth") == (201, b"made for 7")
    assert ran == 3
    for nobody in (None, ""):
        assert (await post(nobody, "sixth"))[0] == 400
    for wrong in (1.5, True, later()):
        with pytest.raises(oncegate.ConfigError, match="return a text or a whole number"):
            await post(wrong, "seventh")
    assert ran == 3


async def later() -> str:
    return "ann"


async def test_a_scope_that_is_not_set_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    app = IdempotencyMiddleware(slow, store=MemoryStore())
    http.NOT_SET._next = 0.0
    for _ in range(3):
        assert status(await ask(app, scope(cookie="sid=secret-value"))) == 400
    assert sum("set `scope`" in message for message in caplog.messages) == 1
    assert "secret-value" not in caplog.text


async def test_a_client_that_stalls_gets_no_response_that_looks_whole() -> None:
    async def large(own: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for number in range(100):
            await send({"type": "http.response.body", "body": b"%d " % number, "more_body": True})
        await send({"type": "http.response.body"})

    app = guarded(large, stream_timeout=0.2)
    sent: Sent = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        if len(sent) == 3:
            # The client takes nothing until a part was given up, and then reads on.
            await asyncio.wait_for(gave_up.wait(), 30)
        sent.append(message)

    gave_up = asyncio.Event()
    own_put = asgi._Execution._put

    async def put(self: Any, message: Any) -> None:
        await own_put(self, message)
        if self.is_cut:
            gave_up.set()

    asgi._Execution._put = put  # type: ignore[method-assign]
    try:
        with pytest.raises(ConnectionAbortedError):
            await app(scope(), receive, send)
    finally:
        asgi._Execution._put = own_put  # type: ignore[method-assign]
    numbers = b"".join(message.get("body", b"") for message in sent).split()
    assert numbers == [b"%d" % number for number in range(len(numbers))]
    assert len(numbers) < 100
    assert all(message.get("more_body") for message in sent[1:])


@pytest.mark.parametrize("sends", [b"cut", b"longer than it says", b"", b"whole"])
async def test_a_response_that_ends_before_its_length_is_not_kept(sends: bytes) -> None:
    ran = 0

    async def cut(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await send({"type": "http.response.start", "status": 201, "headers": [(b"content-length", b"5")]})
        await send({"type": "http.response.body", "body": sends})

    app = guarded(cut)
    for _ in range(2):
        sent = await ask(app, scope())
        if sends == b"whole":
            assert (status(sent), sent[1]["body"]) == (201, b"whole")
        else:
            assert status(sent) == 500
            assert b"outcome-unknown" in sent[1]["body"]
    assert ran == 1


async def test_a_middleware_in_a_middleware(caplog: pytest.LogCaptureFixture) -> None:
    ran = 0

    async def made(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        assert (await receive())["body"] == b"5"
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    store = MemoryStore()
    inner = IdempotencyMiddleware(made, store=store, scope="single-tenant")
    app = IdempotencyMiddleware(inner, store=store, scope="single-tenant")
    replies = [await ask(app, scope()) for _ in range(2)]
    assert [(status(sent), sent[1]["body"]) for sent in replies] == [(201, b"made")] * 2
    assert ran == 1
    assert sum("there twice" in message for message in caplog.messages) == 1
    # Another service protects something else, and has a record of its own.
    outer = IdempotencyMiddleware(app, store=store, scope="single-tenant", service="gateway")
    assert status(await ask(outer, scope("other"))) == 201


async def test_another_request_is_never_executed_because_of_an_outage() -> None:
    class Failing(MemoryStore):
        is_failing = False

        async def lookup(self, record: bytes) -> Any:
            if self.is_failing:
                raise oncegate.StoreUnavailable("away")
            return await super().lookup(record)

    store, ran = Failing(), 0

    async def made(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await slow(own, receive, send)

    app = IdempotencyMiddleware(made, store=store, scope="single-tenant", store_outage="open")
    assert status(await ask(app, scope())) == 201
    store.is_failing = True
    assert status(await ask(app, scope(), {"type": "http.request", "body": b"6"})) == 503
    store.is_failing = False
    assert status(await ask(app, scope(), {"type": "http.request", "body": b"6"})) == 422
    assert ran == 1


async def test_a_client_that_leaves_does_not_cancel_its_handler() -> None:
    begun = asyncio.Event()

    async def begins(own: Any, receive: Any, send: Any) -> None:
        begun.set()
        await slow(own, receive, send)

    app = guarded(begins)
    first = asyncio.ensure_future(ask(app, scope()))
    await begun.wait()
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
    assert b"handler-failed" in (await ask(released, scope(path="/nothing")))[1]["body"]
    assert b"outcome-unknown" in (await ask(released, scope(path="/half")))[1]["body"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"colour": 1}, "there is no setting 'colour'"),
        ({"profile": "iett"}, "profile is 'iett'"),
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


async def test_a_body_that_was_cut_off_is_not_replayed_as_whole() -> None:
    async def handler(own: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
        await send({"type": "http.response.body", "body": b"only a part"})

    app = guarded(handler)
    for _ in range(2):
        sent = await ask(app, scope())
        assert status(sent) == 500
        assert b"outcome-unknown" in sent[1]["body"]
    released = guarded(handler, server_errors="release")
    # It was a success, and none of the errors after which nothing took effect.
    assert b"outcome-unknown" in (await ask(released, scope()))[1]["body"]


async def test_a_client_that_does_not_read_gets_no_clean_end() -> None:
    """Over a real socket: a part of the response is missing, so its end must be missing, too."""
    import uvicorn

    part, parts = b"x" * 65_536, 400
    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(parts):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    app = guarded(handler, stream_timeout=0.5)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=65_536)
    writer.write(b"POST / HTTP/1.1\r\nhost: shop.test\r\nidempotency-key: k\r\ncontent-length: 0\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    async with asyncio.timeout(60):
        # The server gives up on the client, and the handler has ended by then.
        while app._tasks or not ran:
            await asyncio.sleep(0.05)
    read = b""
    async with asyncio.timeout(60):
        while chunk := await reader.read(1 << 20):
            read += chunk
    assert len(read) < len(part) * parts
    assert not read.endswith(b"\r\n0\r\n\r\n")
    assert read.count(part) == read.count(b"10000\r\n") or not read.endswith(b"\r\n")
    writer.close()
    assert status(await ask(app, scope(path="/"))) == 422
    assert ran == 1
    server.should_exit = True
    await serving


async def test_refusals_behind_a_sidecar_free_its_key(caplog: pytest.LogCaptureFixture) -> None:
    http.SIDECAR._next = 0.0
    app = guarded(slow, wait=0)
    first = asyncio.ensure_future(ask(app, scope()))
    await asyncio.sleep(0.05)
    sent = await ask(app, scope(oncegate_record="07" * 32))
    assert status(sent) == 409
    assert (b"idempotency-store", b"release") in sent[0]["headers"]
    assert (b"idempotency-store", b"release") not in (await ask(app, scope()))[0]["headers"]
    await first
    assert len([text for text in caplog.messages if "sidecar" in text]) == 1


async def test_a_lookup_that_fails_after_a_refusal_opens_nothing() -> None:
    """The store has said that the key has another request. That is no outage."""
    from oncegate.ids import MARK
    from oncegate.store import StoredRecord

    class Store(MemoryStore):
        is_away = False

        async def lookup(self, record: bytes) -> StoredRecord | None:
            if self.is_away and record != MARK:
                raise oncegate.StoreUnavailable("the connection was ended")
            return await super().lookup(record)

    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await slow(own, receive, send)

    store = Store()
    app = IdempotencyMiddleware(handler, store=store, scope="single-tenant", store_outage="open")
    assert status(await ask(app, scope(), {"type": "http.request", "body": b"5"})) == 201
    store.is_away = True
    assert status(await ask(app, scope(), {"type": "http.request", "body": b"900"})) == 503
    assert ran == 1


async def test_an_outage_opens_no_request_that_this_process_executes() -> None:
    class Store(MemoryStore):
        is_away = False

        async def lookup(self, record: bytes) -> Any:
            if self.is_away:
                raise oncegate.StoreUnavailable("the connection was ended")
            return await super().lookup(record)

    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await slow(own, receive, send)

    store = Store()
    app = IdempotencyMiddleware(handler, store=store, scope="single-tenant", store_outage="open", wait=0)
    first = asyncio.ensure_future(ask(app, scope()))
    await asyncio.sleep(0.05)
    store.is_away = True
    assert status(await ask(app, scope())) == 409
    assert status(await first) == 201
    assert ran == 1


def test_a_credential_as_scope_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    guarded(slow, scope=lambda own: own["user"])
    guarded(slow, scope="required-header:x-tenant")
    assert caplog.messages == []
    for own in ("required-cookie:session", "header:authorization", "required-header:x-api-key", None):
        caplog.clear()
        guarded(slow, scope=own)
        assert "executes again" in caplog.text


async def test_a_sidecar_in_front_with_the_same_records() -> None:
    """Each would wait for the other. The sidecar does not keep the refusal, and nothing executes."""
    from oncegate.ids import Ids

    runs, store = 0, MemoryStore()

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    app = IdempotencyMiddleware(handler, store=store, service="pay", scope="single-tenant")
    own = scope("k")
    record = Ids().record("pay", [], [b"POST", b"/pay"], b"k").hex().encode()
    sent = await ask(app, {**own, "headers": [*own["headers"], (b"oncegate-record", record), (b"oncegate-token", b"1")]})
    assert status(sent) == 503
    assert b"leave the protection to one of them" in sent[1]["body"]
    assert (b"idempotency-store", b"release") in sent[0]["headers"]
    assert (runs, len(store)) == (0, 0)
    # That of another record is none of its business.
    sent = await ask(app, {**own, "headers": [*own["headers"], (b"oncegate-record", b"07" * 32), (b"oncegate-token", b"1")]})
    assert status(sent) == 201


async def test_the_attempt_of_a_handler_is_not_that_of_requests_it_makes() -> None:
    """A request without a key has no attempt, also if it comes from a handler in the same process."""
    from oncegate import current_attempt, wsgi

    found: list[Any] = []

    async def inner(own: Any, receive: Any, send: Any) -> None:
        found.append((own["path"], current_attempt()))
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    def blocking(environ: Any, start_response: Any) -> Any:
        found.append((environ["PATH_INFO"], current_attempt()))
        start_response("201 Created", [])
        return [b"made"]

    below = guarded(inner)
    below_wsgi = wsgi.IdempotencyMiddleware(blocking, store=MemoryStore(), scope="single-tenant")

    async def handler(own: Any, receive: Any, send: Any) -> None:
        await ask(below, scope(None, "/called"))
        below_wsgi({"REQUEST_METHOD": "POST", "PATH_INFO": "/blocking", "HTTP_HOST": "shop.test"}, lambda *_: None)
        await inner(own, receive, send)

    assert status(await ask(guarded(handler), scope("k"))) == 201
    assert [(path, attempt is None) for path, attempt in found] == [("/called", True), ("/blocking", True), ("/pay", False)]


@pytest.mark.parametrize("parts", [0, 1])
@pytest.mark.parametrize("fails", ["stream", "background", "nothing"])
async def test_a_stream_that_a_middleware_of_starlette_ends(fails: str, parts: int) -> None:
    """`BaseHTTPMiddleware` ends the body of a stream that was cut off as if it were whole, and raises the exception then."""
    import httpx
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    async def body() -> Any:
        for _ in range(parts):
            yield b"a part"
        if fails == "stream":
            raise RuntimeError("in the middle")

    async def task() -> None:
        if fails == "background":
            raise RuntimeError("after the response")

    async def handler(_: Any) -> Any:
        return StreamingResponse(body(), 201, background=BackgroundTask(task))

    async def dispatch(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    inner = Middleware(BaseHTTPMiddleware, dispatch=dispatch)
    app = guarded(Starlette(routes=[Route("/pay", handler, methods=["POST"])], middleware=[inner]))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test", timeout=60) as client:
        answers = [await client.post("/pay", headers={"idempotency-key": "k"}) for _ in range(2)]
    if fails == "stream":
        assert [answer.status_code for answer in answers] == [500, 500]
        assert all("outcome-unknown" in answer.text for answer in answers)
    else:
        assert [(answer.status_code, answer.text) for answer in answers] == [(201, "a part" * parts)] * 2
        assert answers[1].headers["idempotent-replayed"] == "true"


async def test_a_stream_whose_client_left_ends_although_the_server_does_not_say_so() -> None:
    """uvicorn takes the messages for a client that has left, and only `receive` tells."""
    left, is_ended = asyncio.Event(), asyncio.Event()

    async def endless(own: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
                await asyncio.sleep(0.01)
        finally:
            is_ended.set()

    app = guarded(endless, stream_timeout=0.2)
    parts = [{"type": "http.request", "body": b"5"}]

    async def receive() -> Any:
        if parts:
            return parts.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    sent: Sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            left.set()

    await asyncio.wait_for(app(scope("k"), receive, send), 60)
    await asyncio.wait_for(is_ended.wait(), 60)
    assert await app.drain(60)
    assert app.flow.limits._running == 0


@pytest.mark.parametrize("status_code", [201, 503])
@pytest.mark.parametrize("how", ["short", "raises", "ends"])
async def test_a_success_that_is_cut_off_does_not_free_the_key(how: str, status_code: int) -> None:
    """Under `release`, errors undo everything. A success does not."""
    from oncegate import wsgi

    runs = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        fields = [(b"content-length", b"10")] if how == "short" else []
        await send({"type": "http.response.start", "status": status_code, "headers": fields})
        await send({"type": "http.response.body", "body": b"12345", "more_body": how != "short"})
        if how == "raises":
            raise RuntimeError("in the middle")

    app = guarded(handler, server_errors="release")
    for _ in range(2):
        try:
            sent = await ask(app, scope("k"))
        except RuntimeError:
            continue
        assert status(sent) == 500 if status_code == 201 else status(sent) in (500, 503)
    assert runs == (1 if status_code == 201 else 2)

    def blocking(environ: Any, start_response: Any) -> Any:
        nonlocal runs
        runs += 1
        start_response(f"{status_code} Text", [("Content-Length", "10")] if how == "short" else [])
        yield b"12345"
        if how == "raises":
            raise RuntimeError("in the middle")

    if how != "ends":
        runs = 0
        below = wsgi.IdempotencyMiddleware(blocking, store=MemoryStore(), scope="single-tenant", server_errors="release")
        environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/pay", "HTTP_HOST": "shop.test", "HTTP_IDEMPOTENCY_KEY": "k"}
        for _ in range(2):
            with contextlib.suppress(RuntimeError):
                list(below({**environ, "wsgi.input": None}, lambda *_: None))
        assert runs == (1 if status_code == 201 else 2)


async def test_endless_streams_of_clients_that_left_end_under_uvicorn() -> None:
    """They would take all of `max_in_flight`, and keep the server from its end."""
    import uvicorn

    runs = 0

    async def endless(own: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await asyncio.sleep(0.02)

    app = guarded(endless, stream_timeout=0.2, max_in_flight=2)
    server = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        for turn in range(2):
            for client in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                head = f"POST / HTTP/1.1\r\nhost: shop.test\r\nidempotency-key: k-{turn}-{client}\r\ncontent-length: 0\r\n\r\n"
                writer.write(head.encode())
                await reader.readuntil(b"data: 1")
                writer.close()
            async with asyncio.timeout(20):
                while app._tasks:
                    await asyncio.sleep(0.02)
        assert (runs, app.flow.limits._running) == (4, 0)
    finally:
        for task in app._tasks:
            task.cancel()
        server.should_exit = True
        await serving


@pytest.mark.parametrize("code", [504, 408])
async def test_a_time_limit_inside_does_not_end_an_attempt_twice(code: int) -> None:
    """A status that frees the key came after the end that was being stored, and another one left a body without a start."""
    begun, goes_on, runs = asyncio.Event(), asyncio.Event(), 0

    class Slow(MemoryStore):
        is_immediate = False

        async def complete(self, *arguments: Any) -> Any:
            begun.set()
            await goes_on.wait()
            return await super().complete(*arguments)

    async def respond(send: Any, number: int, body: bytes) -> None:
        length = str(len(body)).encode()
        await send({"type": "http.response.start", "status": number, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": body})

    async def limited(own: Any, receive: Any, send: Any) -> None:
        nonlocal runs
        runs += 1
        handler = asyncio.ensure_future(respond(send, 201, b"made"))
        await begun.wait()
        handler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await handler
        asyncio.get_running_loop().call_later(0.1, goes_on.set)
        await respond(send, code, b"")

    app = IdempotencyMiddleware(limited, store=Slow(), service="shop", scope="single-tenant")
    first = await ask(app, scope())
    assert [message["type"] for message in first] == ["http.response.start", "http.response.body"]
    assert (status(first), first[1]["body"], runs) == (201, b"made", 1)
    again = await ask(app, scope())
    assert (status(again), again[1]["body"], runs) == (201, b"made", 1)


async def test_a_stream_that_a_time_limit_inside_has_given_up_does_not_end_as_if_it_were_whole() -> None:
    async def limited(own: Any, receive: Any, send: Any) -> None:
        length = [(b"content-length", b"4"), (b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": length})
        await send({"type": "http.response.body", "body": b"on", "more_body": True})
        await send({"type": "http.response.start", "status": 504, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    sent = await ask(guarded(limited), scope())
    assert [message.get("status", message.get("body")) for message in sent] == [200, b"on"]
    assert all(message.get("more_body") for message in sent[1:])


async def test_an_attempt_has_one_end() -> None:
    store = MemoryStore()
    engine = engine_of(store, blocking=False)
    permit = await engine.claim(bytes(32), bytes(33), Policy())
    assert isinstance(permit, Permit)
    assert await permit.complete("completed", b"response") == "stored"
    assert await permit.release() == await permit.park("a second end") == "not-stored"
    found = await store.lookup(bytes(32))
    assert found is not None
    assert (found.state, found.response) == ("completed", b"response")
