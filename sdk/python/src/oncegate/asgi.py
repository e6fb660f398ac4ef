"""Pure ASGI middleware: for FastAPI, Starlette, Litestar, Quart, Django and every other ASGI application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from . import http
from .engine import Attempt, Permit, engine_of
from .flow import FailOpen, Flow, fail_open_fields, running
from .headers import Field
from .http import Head, Keyed
from .refusal import Answer, Refusal
from .settings import Settings
from .store import Store

__all__ = ["IdempotencyMiddleware", "attempt_of"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
log = logging.getLogger("oncegate")

ATTEMPT = "oncegate.attempt"
"""The name in the scope under which an application finds its attempt."""
_LAG = 16


class IdempotencyMiddleware:
    """Makes retries of requests with a key safe.

    `store` is a :class:`PostgresStore`, a :class:`RedisStore` or a :class:`MemoryStore`. All other arguments are settings.
    Requests without a key, lifespan events and web sockets pass through.
    """

    def __init__(self, app: App, *, store: Store, drain_timeout: float = 30, **settings: Any) -> None:
        self.app = app
        self.settings = Settings.of(**settings)
        self.flow = Flow(self.settings, engine_of(store, blocking=False))
        self.drain_timeout = drain_timeout
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, self._draining(receive), send)
        elif scope["type"] != "http":
            await self.app(scope, receive, send)
        else:
            await self._request(scope, receive, send)

    def _draining(self, receive: Receive) -> Receive:
        """Waits for running requests before the application closes what they use."""

        async def received() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown" and not await self.drain(self.drain_timeout):
                log.warning("requests with a key were still running at the shutdown: their outcomes may stay unknown")
            return message

        return received

    async def drain(self, timeout: float) -> bool:
        """Waits until no request with a key is running. False if that takes longer."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout)
        return await self.flow.engine.drain(max(0.0, deadline - loop.time())) and not self._tasks

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        keyed = http.begin(self.settings, head_of(scope))
        if keyed is None:
            await self.app(scope, receive, self._passing(send))
            return
        if isinstance(keyed, Answer):
            await answer(send, keyed)
            return
        held = 0
        try:
            body = await self._read(keyed, receive)
            if not isinstance(body, bytes):
                if body is not None:
                    await answer(send, body)
                return
            held = len(body)
            await self._with_body(keyed, body, (scope, receive, send))
        finally:
            if held:
                self.flow.limits.free(held)

    def _passing(self, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                fields = http.passed(self.settings, read_fields(message))
                message = {**message, "headers": write_fields(fields)}
            await send(message)

        return sent

    async def _read(self, keyed: Keyed, receive: Receive) -> bytes | Answer | None:
        """The whole body, whose size is held in the budget. None: the client is gone."""
        limit, limits = self.settings.max_request_body, self.flow.limits
        parts: list[bytes] = []
        size, whole = 0, False
        try:
            async with asyncio.timeout(self.settings.body_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    if size + len(part) > limit:
                        return http.too_large(keyed)
                    if part:
                        if not limits.hold(len(part)):
                            return http.overloaded(keyed, http.BUDGET_USED_UP)
                        size += len(part)
                        parts.append(part)
                    if not message.get("more_body", False):
                        whole = True
                        return b"".join(parts)
        except TimeoutError:
            return keyed.refuse(Refusal("request-incomplete"))
        finally:
            if not whole:
                limits.free(size)

    async def _with_body(self, keyed: Keyed, body: bytes, call: tuple[Scope, Receive, Send]) -> None:
        scope, receive, send = call
        operation = await self.flow.identify(keyed, body)
        if operation is None:
            await self.app(scope, _replayed_body(body, receive), self._passing(send))
            return
        if isinstance(operation, Answer):
            await answer(send, operation)
            return
        if not self.flow.limits.enter(operation.caller_tag):
            await answer(send, http.overloaded(keyed, http.TOO_MANY))
            return
        is_handed_over = False
        try:
            # In a task of its own: a client that hangs up must not end it between the claim and the handler.
            claim = asyncio.ensure_future(self.flow.claim(keyed, operation))
            try:
                claimed = await asyncio.shield(claim)
            except asyncio.CancelledError:
                claim.add_done_callback(self._abandon)
                raise
            if isinstance(claimed, Answer):
                await answer(send, claimed)
            elif isinstance(claimed, FailOpen):
                await self.app(scope, _replayed_body(body, receive), _failing_open(keyed, self.settings, send))
            else:
                is_handed_over = True
                await self._execute(keyed, claimed, scope, body, send, operation.caller_tag)
        finally:
            if not is_handed_over:
                self.flow.limits.leave(operation.caller_tag)

    def _abandon(self, claim: asyncio.Future[Any]) -> None:
        """The client left before its handler began: the key is free again."""
        if not claim.cancelled() and claim.exception() is None and isinstance(claim.result(), Permit):
            self._spawn(_released(claim.result()))

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _execute(
        self, keyed: Keyed, permit: Permit, scope: Scope, body: bytes, send: Send, caller: bytes
    ) -> None:
        """Runs the application in a task of its own, which goes on if the client hangs up."""
        execution = _Execution(self.flow, keyed, permit)
        task = self._spawn(execution.run(self.app, scope, body))
        task.add_done_callback(lambda _: self.flow.limits.leave(caller))
        try:
            while (message := await execution.outgoing.get()) is not None:
                await send(message)
        finally:
            execution.client_left()
        if execution.error is not None:
            raise execution.error


async def _released(permit: Permit) -> None:
    await permit.release()


class _Execution:
    """One execution: runs the application, and stores its response before the client gets it."""

    def __init__(self, flow: Flow, keyed: Keyed, permit: Permit) -> None:
        self.flow, self.keyed, self.permit = flow, keyed, permit
        self.outgoing: asyncio.Queue[Message | None] = asyncio.Queue(_LAG)
        self.error: BaseException | None = None
        self._response: http.Executed | None = None
        self._message: Message = {}
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_concluded = False
        self._is_whole = False
        self._is_client_gone = asyncio.Event()
        self._task: asyncio.Task[Any] | None = None

    def client_left(self) -> None:
        """Nobody takes messages any more. A stream is read on for a while, so that the application can end."""
        self._is_client_gone.set()
        while not self.outgoing.empty():
            self.outgoing.get_nowait()
        if self._is_concluded and not self._is_whole and self._task is not None:
            asyncio.get_running_loop().call_later(self.flow.settings.stream_timeout, self._task.cancel)

    async def run(self, app: App, scope: Scope, body: bytes) -> None:
        self._task = asyncio.current_task()
        attempt = self.permit.attempt
        inner = {**scope, ATTEMPT: attempt}
        try:
            with running(attempt):
                await app(inner, _only_body(body), self._send)
        except Exception as error:
            self.error = error
            if self._is_client_gone.is_set():
                log.exception("record %s: the handler raised an exception", self.permit.attempt.record.hex())
            if not self._is_concluded:
                await self._threw()
        except BaseException:
            # The task was cancelled, or the process ends: the effect is unknown.
            if not self._is_concluded:
                self._is_concluded = True
                refusal = await self.flow.fail(self.keyed, self.permit, "the handler was cancelled")
                await self._put_answer(refusal)
            raise
        else:
            if not self._is_concluded:
                self._is_concluded = True
                reason = "the handler ended without a whole response"
                await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason))
        finally:
            await self._put(None)

    async def _threw(self) -> None:
        self._is_concluded = True
        if self._response is None:
            await self._put_answer(await self.flow.throw(self.keyed, self.permit))
        else:
            reason = "the handler raised an exception in the middle of its response"
            await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason))

    async def _put(self, message: Message | None) -> None:
        if self._is_client_gone.is_set():
            return
        if not self.outgoing.full():
            self.outgoing.put_nowait(message)
            return
        put = asyncio.ensure_future(self.outgoing.put(message))
        gone = asyncio.ensure_future(self._is_client_gone.wait())
        try:
            await asyncio.wait(
                {put, gone}, timeout=self.flow.settings.stream_timeout, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            put.cancel()
            gone.cancel()

    async def _put_answer(self, whole: Answer) -> None:
        await self._put(
            {"type": "http.response.start", "status": whole.status, "headers": write_fields(http.sent(whole))}
        )
        await self._put({"type": "http.response.body", "body": whole.body})

    async def _send(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                self._message = message
                path, status = self.keyed.head.path, message["status"]
                self._response = http.executed(self.flow.settings, path, status, read_fields(message))
                if self._response.treatment != "replay":
                    await self._conclude(None)
            case "http.response.body" if self._response is not None:
                await self._body(message)
            case _:
                # Trailers, pushes and other extensions, which a record does not keep.
                if self._is_concluded:
                    await self._put(message)

    async def _body(self, message: Message) -> None:
        is_last = not message.get("more_body", False)
        if self._is_concluded:
            self._is_whole = is_last
            await self._put(message)
            return
        chunk = message.get("body", b"")
        self._chunks.append(chunk)
        self._size += len(chunk)
        if is_last:
            await self._conclude(b"".join(self._chunks))
        elif self._size > self.flow.settings.max_response_body:
            # Too large to be kept: it goes to the client as it comes.
            await self._conclude(None)
            for earlier in self._chunks:
                await self._put({"type": "http.response.body", "body": earlier, "more_body": True})
            self._chunks.clear()

    async def _conclude(self, body: bytes | None) -> None:
        """Ends the record, and then lets the client have the response."""
        assert self._response is not None
        response = self._response
        self._is_concluded = True
        mark, instead = await self.flow.conclude(self.keyed, self.permit, response, body)
        if instead is not None:
            self._is_whole = True
            await self._put_answer(instead)
            self._is_client_gone.set()
            self.outgoing.put_nowait(None)
            return
        fields = http.marked(self.keyed, response.headers, mark)
        await self._put({**self._message, "headers": write_fields(fields)})
        if body is not None:
            self._is_whole = True
            await self._put({"type": "http.response.body", "body": body})


def head_of(scope: Scope) -> Head:
    raw = scope.get("raw_path")
    path = raw.decode("ascii", "surrogateescape") if raw else quote(scope["path"], safe="/:@!$&'()*+,;=~%")
    query = scope.get("query_string") or b""
    return Head(
        scope["method"],
        path.partition("?")[0],
        query.decode("latin-1") if query else None,
        [(name.decode("latin-1").lower(), value) for name, value in scope["headers"]],
    )


def read_fields(message: Message) -> list[Field]:
    return [(bytes(name).decode("latin-1").lower(), bytes(value)) for name, value in message.get("headers", ())]


def write_fields(fields: list[Field]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value) for name, value in fields]


async def answer(send: Send, whole: Answer) -> None:
    await send({"type": "http.response.start", "status": whole.status, "headers": write_fields(http.sent(whole))})
    await send({"type": "http.response.body", "body": whole.body})


def _only_body(body: bytes) -> Receive:
    """The body, and then nothing: an execution never hears that its client has left."""
    is_given = False

    async def receive() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    return receive


def _replayed_body(body: bytes, receive: Receive) -> Receive:
    is_given = False

    async def received() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return received


def _failing_open(keyed: Keyed, settings: Settings, send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            fields = fail_open_fields(keyed, settings, read_fields(message))
            message = {**message, "headers": write_fields(fields)}
        await send(message)

    return sent


def attempt_of(scope: Scope) -> Attempt | None:
    """The attempt of a request, or None if the request has no key."""
    return scope.get(ATTEMPT)
