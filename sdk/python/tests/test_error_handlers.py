"""An application's own response to exceptions, and what middleware outside finds in the scope."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse

import oncegate


class Shop:
    def __init__(self, where: Any, handler: Any, *, debug: bool = False, **settings: Any) -> None:
        self.handled: list[str] = []
        self.runs = 0
        self.routes: list[Any] = []
        own = FastAPI(debug=debug)
        settings = {"store": oncegate.MemoryStore(), "service": "shop", "scope": "single-tenant", **settings}
        own.add_middleware(oncegate.IdempotencyMiddleware, **settings)

        @own.middleware("http")
        async def look(request: Request, call_next: Any) -> Any:
            try:
                return await call_next(request)
            finally:
                self.routes.append((getattr(request.scope.get("route"), "path", None), request.path_params))

        if handler is not None:
            own.exception_handler(where)(handler(self))

        @own.post("/orders/{number}")
        async def fail(number: int) -> Any:
            self.runs += 1
            if number:
                raise RuntimeError("secret")
            return {"number": number}

        self.app = own

    async def ask(self, key: str | None, number: int = 1) -> httpx.Response:
        """Raises nothing, and says with `x-raised` if the server would have an exception for its log."""
        raised: list[str] = []

        async def server(*call: Any) -> None:
            try:
                await self.app(*call)
            except RuntimeError as error:
                raised.append(str(error))

        async with httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://shop.test") as client:
            response = await client.post(f"/orders/{number}", headers={"idempotency-key": key} if key else {})
        response.extensions["raised"] = raised
        return response


def asynchronous(shop: Shop) -> Any:
    async def handler(request: Request, error: Exception) -> Any:
        shop.handled.append(str(error))
        return JSONResponse({"error": "internal", "path": request.url.path}, 500)

    return handler


def blocking(shop: Shop) -> Any:
    def handler(request: Request, error: Exception) -> Any:
        shop.handled.append(str(error))
        return JSONResponse({"error": "internal", "path": request.url.path}, 500)

    return handler


def streaming(shop: Shop) -> Any:
    async def handler(request: Request, error: Exception) -> Any:
        shop.handled.append(str(error))
        return StreamingResponse(iter([b'{"error":"internal",', b'"path":"/orders/1"}']), 500, media_type="application/json")

    return handler


@pytest.mark.parametrize("where", [Exception, 500])
@pytest.mark.parametrize("handler", [asynchronous, blocking, streaming])
async def test_the_own_response_to_an_exception_is_sent_and_kept(where: Any, handler: Any) -> None:
    shop, key = Shop(where, handler), uuid.uuid4().hex
    without = await shop.ask(None)
    first, again = await shop.ask(key), await shop.ask(key)
    for answer in (without, first, again):
        assert (answer.status_code, answer.json()) == (500, {"error": "internal", "path": "/orders/1"})
        assert answer.headers["content-type"] == "application/json"
    assert again.headers["idempotent-replayed"] == "true"
    # Once for each exception, and the server has it for its log.
    assert (shop.handled, shop.runs) == (["secret"] * 2, 2)
    assert [answer.extensions["raised"] for answer in (without, first, again)] == [["secret"], ["secret"], []]
    later = await shop.ask(None)
    assert (later.json()["error"], later.extensions["raised"], len(shop.handled)) == ("internal", ["secret"], 3)


async def test_the_key_is_free_after_an_own_response_under_release() -> None:
    shop, key = Shop(Exception, asynchronous, server_errors="release"), uuid.uuid4().hex
    for runs in (1, 2):
        assert (await shop.ask(key)).json()["error"] == "internal"
        assert (shop.runs, len(shop.handled)) == (runs, runs)


async def test_a_handler_of_exceptions_that_fails_itself() -> None:
    def failing(shop: Shop) -> Any:
        async def handler(_: Request, error: Exception) -> Any:
            shop.handled.append(str(error))
            raise RuntimeError("the handler fails")

        return handler

    shop, key = Shop(Exception, failing), uuid.uuid4().hex
    first, again = await shop.ask(key), await shop.ask(key)
    assert [(answer.status_code, answer.text) for answer in (first, again)] == [(500, "Internal Server Error")] * 2
    assert (first.extensions["raised"], again.extensions["raised"]) == (["the handler fails"], [])
    assert (shop.handled, shop.runs) == (["secret"], 1)


async def test_a_handler_of_exceptions_that_is_cancelled() -> None:
    """The outcome is unknown, and the attempt has ended."""

    def cancelled(shop: Shop) -> Any:
        async def handler(_: Request, error: Exception) -> Any:
            shop.handled.append(str(error))
            raise asyncio.CancelledError

        return handler

    store = oncegate.MemoryStore()
    shop, key = Shop(Exception, cancelled, store=store, wait=0), uuid.uuid4().hex
    await asyncio.wait_for(shop.ask(key), 30)
    again = await shop.ask(key)
    assert (again.status_code, again.json()["type"]) == (500, "urn:oncegate:problem:outcome-unknown")
    assert (shop.handled, shop.runs) == (["secret"], 1)
    assert await oncegate.drain(store, 10)


async def test_a_handler_of_exceptions_is_called_once_behind_a_copy_of_the_scope() -> None:
    class Copy:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            await self.app(dict(scope), receive, send)

    shop, key = Shop(Exception, asynchronous), uuid.uuid4().hex
    shop.app.add_middleware(Copy)
    for answer in (await shop.ask(key), await shop.ask(key)):
        assert (answer.status_code, answer.json()["error"]) == (500, "internal")
    assert shop.handled == ["secret"]


async def test_the_own_response_of_one_request_is_not_that_of_another() -> None:
    """A program may raise one exception again, and middleware outside may have taken it the first time."""
    error, handled, app = RuntimeError("one"), list[str](), FastAPI()
    app.add_middleware(
        oncegate.IdempotencyMiddleware, store=oncegate.MemoryStore(), service="shop", scope="single-tenant"
    )

    class Taking:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            with contextlib.suppress(*[RuntimeError] * (scope["path"] == "/first")):
                await self.app(scope, receive, send)

    app.add_middleware(Taking)

    @app.exception_handler(Exception)
    async def handle(request: Request, _: Exception) -> Any:
        handled.append(request.url.path)
        return PlainTextResponse(request.url.path, 500)

    @app.post("/{name}")
    async def fail() -> Any:
        raise error

    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
        for path, headers in (("/first", {"idempotency-key": uuid.uuid4().hex}), ("/second", {})):
            assert (await client.post(path, headers=headers)).text == path
    assert handled == ["/first", "/second"]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("handler", [None, asynchronous])
async def test_without_a_handler_or_in_debug_mode(debug: bool, handler: Any) -> None:
    if not debug and handler is not None:
        return
    shop, key = Shop(Exception, handler, debug=debug), uuid.uuid4().hex
    without = await shop.ask(None)
    assert ("secret" in without.text) is debug
    for _ in range(2):
        answer = await shop.ask(key)
        assert (answer.status_code, answer.text) == (500, "Internal Server Error")
    assert (shop.handled, shop.runs) == ([], 2)


async def test_middleware_outside_finds_the_route() -> None:
    shop, key = Shop(Exception, asynchronous), uuid.uuid4().hex
    for own in (None, key):
        assert (await shop.ask(own, 0)).status_code == 200
    assert shop.routes == [("/orders/{number}", {"number": "0"})] * 2
    with contextlib.suppress(RuntimeError):
        await shop.ask(uuid.uuid4().hex)
    assert shop.routes[-1][0] == "/orders/{number}"


async def test_an_application_behind_the_middleware_has_its_own_handler() -> None:
    inner = FastAPI()

    @inner.exception_handler(Exception)
    async def handle(_: Request, __: Exception) -> Any:
        return PlainTextResponse("own", 500)

    @inner.post("/")
    async def fail() -> Any:
        raise RuntimeError("secret")

    app = oncegate.IdempotencyMiddleware(inner, store=oncegate.MemoryStore(), service="shop", scope="single-tenant")
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://shop.test") as client:
        for _ in range(2):
            answer = await client.post("/", headers={"idempotency-key": "one"})
            assert (answer.status_code, answer.text) == (500, "own")
