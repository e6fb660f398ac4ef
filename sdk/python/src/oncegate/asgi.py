"""Pure ASGI middleware: for FastAPI, Starlette, Litestar, Quart, Django and every other ASGI application."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, overload
from urllib.parse import quote

from . import http
from .engine import Attempt, Permit, engine_of
from .errors import ConfigError
from .flow import CURRENT, FAILED_BODY, FailOpen, Flow, fail_open_fields, running
from .headers import Field, get
from .http import Head, Keyed, Operation
from .refusal import Answer, Refusal
from .runtime import TimeLimit
from .settings import Settings
from .store import Store
from .values import seconds

__all__ = ["IdempotencyMiddleware", "attempt_of"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
# As Starlette declares it: frameworks differ in the types of scopes and messages.
App = Callable[[Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]
log = logging.getLogger("oncegate")

ATTEMPT = "oncegate.attempt"
"""The name in the scope under which an application finds its attempt."""
_HANDLED = "oncegate.handled"
"""The name in an exception of its own response, if the handler of the application was called for it already.

Nothing would be found in the scope, if middleware outside passes a copy of it on."""
# Extensions by which an application lets the server send the body, which the middleware would never see.
_OTHER_BODIES = frozenset({"http.response.pathsend", "http.response.zerocopysend"})
_LAG = 16
# The time for which a whole response waits for the end of the transaction in which its record was completed, in seconds.
COMMIT_TIMEOUT = 5.0
# The time for which a whole stream waits for the end of its application, in seconds: `BaseHTTPMiddleware` of Starlette ends one
# that was cut off by an exception as if it were whole, and raises the exception then.
STREAM_END_TIMEOUT = 1.0


class ClientStalled(ConnectionAbortedError):
    """The client did not read its response for `stream_timeout`, so that its connection ends. The execution is not affected."""


class IdempotencyMiddleware:
    """Makes retries of requests with a key safe.

    `store` is a :class:`PostgresStore`, a :class:`RedisStore` or a :class:`MemoryStore`. All other arguments are settings.
    Requests without a key, lifespan events and web sockets pass through.
    """

    # The name of the first parameter could be that of a setting, for which reason type checkers refuse it in `add_middleware`.
    @overload
    def __init__(self, app: App, /, *, store: Store, drain_timeout: float = 30, **settings: Any) -> None: ...

    @overload
    def __init__(self, *, app: App, store: Store, drain_timeout: float = 30, **settings: Any) -> None: ...

    def __init__(  # type: ignore[misc]
        self, app: App, *, store: Store, drain_timeout: float = 30, **settings: Any
    ) -> None:
        self.app = app
        self._error: ConfigError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        try:
            self.settings = Settings.of(**settings)
            self.flow = Flow(self.settings, engine_of(store, blocking=False, ids=self.settings.ids))
            self.drain_timeout = seconds("drain_timeout", drain_timeout, 0, 86_400)
        except ConfigError as error:
            if not _is_made_while_serving():
                raise
            self._error = error
            log.critical("IdempotencyMiddleware: %s", error)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._error is not None:
            if scope["type"] != "lifespan":
                raise self._error
            # The server stops at once, and prints the message.
            await receive()
            await send({"type": "lifespan.startup.failed", "message": f"IdempotencyMiddleware: {self._error}"})
        elif scope["type"] == "lifespan":
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
        while True:
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=max(0.0, deadline - loop.time()))
            if not await self.flow.engine.drain(max(0.0, deadline - loop.time())):
                return False
            # A claim that was under way has begun another one.
            if not self._tasks or loop.time() >= deadline:
                return not self._tasks

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        keyed = http.begin(self.settings, head_of(scope))
        if keyed is None:
            await self._without_key(scope, receive, self._passing(send))
            return
        if isinstance(keyed, Answer):
            await answer(send, keyed)
            return
        body = await self._read(keyed, receive)
        if isinstance(body, bytes):
            await self._with_body(keyed, body, (scope, receive, send))
        elif body is not None:
            await answer(send, body)

    async def _without_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        # If a handler calls an application in its own process, the attempt of that handler is not the one of this request.
        with running(scope.get(ATTEMPT)):
            await self.app(scope, receive, send)

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
            with TimeLimit(self.settings.body_timeout):
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
        caller: bytes | None = None
        is_handed_over = False
        try:
            operation = await self.flow.identify(keyed, body)
            if operation is None:
                await self._without_key(scope, _replayed_body(body, receive), self._passing(send))
                return
            if isinstance(operation, Answer):
                await answer(send, operation)
                return
            if self.flow.is_inner(scope.get(ATTEMPT), operation):
                await self.app(scope, _replayed_body(body, receive), send)
                return
            if not self.flow.limits.enter(operation.caller_tag):
                await answer(send, http.overloaded(keyed, http.TOO_MANY))
                return
            caller = operation.caller_tag
            claimed = await self._claim(keyed, operation)
            if isinstance(claimed, Answer):
                await answer(send, claimed)
            elif isinstance(claimed, FailOpen):
                await self._without_key(scope, _replayed_body(body, receive), _failing_open(keyed, self.settings, send))
            else:
                is_handed_over = True
                await self._execute(keyed, claimed, call, body, caller)
        finally:
            if not is_handed_over:
                self._left(caller, len(body))

    def _left(self, caller: bytes | None, size: int) -> None:
        """Nothing of a request is in memory any more. A handler whose client has left still has the body."""
        self.flow.limits.free(size)
        if caller is not None:
            self.flow.limits.leave(caller)

    async def _claim(self, keyed: Keyed, operation: Operation) -> Permit | Answer | FailOpen:
        if self.flow.engine.is_immediate:
            # It waits for the owners of other attempts only, so that nothing comes between the claim and the handler.
            return await self.flow.claim(keyed, operation)
        # In a task of its own: a client that hangs up must not end it between the claim and the handler.
        claim = asyncio.ensure_future(self.flow.claim(keyed, operation))
        try:
            return await asyncio.shield(claim)
        except asyncio.CancelledError:
            claim.add_done_callback(self._abandon)
            raise

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
        self, keyed: Keyed, permit: Permit, call: tuple[Scope, Receive, Send], body: bytes, caller: bytes
    ) -> None:
        """Runs the application in a task of its own, which goes on if the client hangs up."""
        scope, receive, send = call
        execution = _Execution(self.flow, keyed, permit)
        task = self._spawn(execution.run(self.app, scope, body))
        size = len(body)
        task.add_done_callback(lambda _: self._left(caller, size))
        execution.sender = asyncio.current_task()
        watch: asyncio.Task[None] | None = None
        try:
            while (message := await execution.outgoing.get()) is not None:
                if watch is None and execution.is_streaming:
                    # Servers take the messages for a client that has left, and say nothing.
                    watch = asyncio.get_running_loop().create_task(_until_left(receive, execution.outgoing))
                await send(message)
        except asyncio.CancelledError:
            if not execution.is_cut or execution.sender is None or execution.sender.uncancel() > 0:
                raise
            # The server ends the connection.
            record = permit.attempt.record.hex()
            raise ClientStalled(f"record {record}: the client did not read its response for stream_timeout") from None
        finally:
            if watch is not None:
                watch.cancel()
            execution.sender = None
            execution.client_left()
        if execution.error is not None:
            if execution.is_handled:
                # A program may raise one exception several times: the fields tell which request it was.
                execution.error.__dict__[_HANDLED] = list(scope["headers"]), execution.own_response
            raise execution.error


def _is_made_while_serving() -> bool:
    """True if Starlette makes this middleware at its first event, which is the start.

    It does not make it in `add_middleware`, and servers take an exception there for an application without a start: they would go
    on, and answer every request with a 500.
    """
    frame: Any = sys._getframe(2)
    is_starlette = frame.f_code.co_name == "build_middleware_stack" and frame.f_back is not None
    return is_starlette and frame.f_back.f_code.co_name == "__call__"


def _error_handler(scope: Scope) -> _ErrorHandler | None:
    """The handler of an application of Starlette for exceptions that nothing else handles, or None. In debug mode it has none.

    Starlette calls it outside of all middleware, where its response reaches neither the record nor, after a whole response, the
    client. So it is called here, and not a second time there.
    """
    stack: Any = getattr(scope.get("app"), "middleware_stack", None)
    kind = type(stack)
    if kind.__name__ != "ServerErrorMiddleware" or not kind.__module__.startswith("starlette.") or stack.debug:
        return None
    if stack.handler is not None and not isinstance(stack.handler, _ErrorHandler):
        stack.handler = _ErrorHandler(stack.handler)
    found: _ErrorHandler | None = stack.handler
    return found


class _ErrorHandler:
    """A handler of Starlette, which is not called for what it has handled."""

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    async def answer(self, request: Any, error: Exception) -> Any:
        from starlette.concurrency import run_in_threadpool

        own = self.handler
        if inspect.iscoroutinefunction(own) or inspect.iscoroutinefunction(type(own).__call__):
            return await own(request, error)
        found = await run_in_threadpool(own, request, error)
        return await found if inspect.isawaitable(found) else found

    async def __call__(self, request: Any, error: Exception) -> Any:
        fields, response = error.__dict__.pop(_HANDLED, ((), None))
        # Starlette makes other lists of them.
        if not fields or list(map(id, fields)) != list(map(id, request.scope["headers"])):
            return await self.answer(request, error)
        from starlette.responses import PlainTextResponse

        # The client has a response already, so that this one goes nowhere.
        return response or PlainTextResponse(FAILED_BODY, 500)


def _is_of_background_task(error: BaseException) -> bool:
    """True if the exception comes from a task of Starlette that runs after the response."""
    # Groups and causes are looked at, too, and may refer to each other.
    errors, seen = [error], set[int]()
    while errors:
        own = errors.pop()
        seen.add(id(own))
        inner = (*getattr(own, "exceptions", ()), own.__cause__, own.__context__)
        errors += [other for other in inner if other is not None and id(other) not in seen]
        frame = own.__traceback__
        while frame is not None:
            if frame.tb_frame.f_globals.get("__name__") == "starlette.background":
                return True
            frame = frame.tb_next
    return False


async def _until_left(receive: Receive, outgoing: _Outgoing) -> None:
    try:
        # The body was read to its end, so that nothing else can come.
        if (await receive())["type"] == "http.disconnect":
            outgoing.abandon()
    except Exception as error:
        log.debug("a server does not say if its client is there: %s", type(error).__name__)


async def _released(permit: Permit) -> None:
    await permit.release()


class _Outgoing:
    """The messages of an execution that its client has not taken yet."""

    __slots__ = ("_change", "_messages", "is_abandoned")

    def __init__(self) -> None:
        self._messages: deque[Message | None] = deque()
        self._change: asyncio.Future[None] | None = None
        self.is_abandoned = False
        """True if the client takes no more messages, so that what is put goes nowhere."""

    @property
    def is_full(self) -> bool:
        return len(self._messages) >= _LAG

    def put(self, message: Message | None) -> None:
        if not self.is_abandoned:
            self._messages.append(message)
            self._changed()

    def end(self) -> None:
        """Nothing follows: the client has what was put, and then the end."""
        self.put(None)
        self.is_abandoned = True

    def abandon(self) -> None:
        self.is_abandoned = True
        self._messages.clear()
        self._changed()

    async def get(self) -> Message | None:
        """The next message. None: there are no more."""
        while not self._messages:
            if self.is_abandoned:
                return None
            await self._next_change()
        message = self._messages.popleft()
        self._changed()
        return message

    async def has_space(self, timeout: float) -> bool:
        """Waits until the client takes a message, or leaves. False if that takes longer."""
        try:
            async with asyncio.timeout(timeout):
                while self.is_full:
                    await self._next_change()
        except TimeoutError:
            return False
        return True

    # Only one side waits at a time: one for a message, the other for space.

    def _changed(self) -> None:
        if self._change is not None and not self._change.done():
            self._change.set_result(None)

    async def _next_change(self) -> None:
        self._change = asyncio.get_running_loop().create_future()
        await self._change


class _Execution:
    """One execution: runs the application, and stores its response before the client gets it."""

    def __init__(self, flow: Flow, keyed: Keyed, permit: Permit) -> None:
        self.flow, self.keyed, self.permit = flow, keyed, permit
        self.outgoing = _Outgoing()
        self.error: BaseException | None = None
        self._response: http.Executed | None = None
        self._message: Message = {}
        self._chunks: list[bytes] = []
        self._size = 0
        self._is_concluded = False
        self._is_whole = False
        self._is_given_up = False
        self._task: asyncio.Task[Any] | None = None
        # A whole body that waits for the end of the transaction in which the handler has completed its record.
        self._waiting: bytes | None = None
        self._timer: asyncio.TimerHandle | None = None
        # Stores the end of the attempt, once. What cancels the application, such as a time limit inside, does not reach it.
        self._ending: asyncio.Task[None] | None = None
        # A whole stream of which the application may still say by an exception that it was cut off.
        self._ended_stream: bytes | None = None
        self.sender: asyncio.Task[Any] | None = None
        self.is_cut = False
        self.is_handled = False
        """True if the handler of the application for exceptions was called for `error`."""
        self.own_response: Any = None
        self._scope: Scope = {}
        self._inner: Scope = {}

    @property
    def is_streaming(self) -> bool:
        """True if the response goes to the client as it comes, and its end has not come."""
        return self._is_concluded and not self._is_whole

    def client_left(self) -> None:
        """Nobody takes messages any more. A stream is read on for a while, so that the application can end."""
        self.outgoing.abandon()
        self._limit_stream()

    def _limit_stream(self) -> None:
        if self.outgoing.is_abandoned and self._is_concluded and not self._is_whole and self._task is not None:
            asyncio.get_running_loop().call_later(self.flow.settings.stream_timeout, self._cancel_stream)

    def _cancel_stream(self) -> None:
        # What runs after a whole response goes on, such as a background task.
        if not self._is_whole and self._task is not None:
            self._task.cancel()

    async def run(self, app: App, scope: Scope, body: bytes) -> None:
        self._task = asyncio.current_task()
        attempt = self.permit.attempt
        self._scope, self._inner = scope, (inner := {**scope, ATTEMPT: attempt})
        handler = _error_handler(scope)
        extensions = scope.get("extensions")
        if extensions:
            inner["extensions"] = {name: own for name, own in extensions.items() if name not in _OTHER_BODIES}
        try:
            # For this task only.
            CURRENT.set(attempt)
            try:
                await app(inner, _only_body(body), self._send)
            finally:
                await self._until_ended()
        except Exception as error:
            self.error = error
            if self.outgoing.is_abandoned:
                log.exception("record %s: the handler raised an exception", self.permit.attempt.record.hex())
            # A commit after the response may have failed, such as that of a dependency with `yield`. The record decides.
            await self._conclude_waiting(has_failed=True)
            if self._ended_stream is not None and _is_of_background_task(error):
                await self._conclude_stream()
            self._ended_stream = None
            if not self._is_concluded and self._response is None and handler is not None:
                await self._handle(handler, error)
            if not self._is_concluded:
                await self._threw()
        except BaseException:
            # The task was cancelled, or the process ends: the effect is unknown.
            await self._was_cancelled("the handler was cancelled")
            raise
        else:
            await self._conclude_waiting()
            await self._conclude_stream()
            if not self._is_concluded:
                self._is_concluded = True
                reason = "the handler ended without a whole response"
                await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason, self._response))
        finally:
            await self._until_ended()
            await self._put(None)

    async def _handle(self, handler: _ErrorHandler, error: Exception) -> None:
        """The application's own response to an exception."""
        from starlette.requests import Request

        self.is_handled = True
        try:
            self.own_response = await handler.answer(Request(self._inner), error)
            try:
                await self.own_response(self._inner, _only_body(b""), self._send)
            finally:
                await self._until_ended()
        except Exception as failure:
            self.error = failure
        except BaseException:
            await self._was_cancelled("the handler of exceptions was cancelled")
            raise
        # A commit may have failed: the record decides.
        await self._conclude_waiting(has_failed=True)
        await self._conclude_stream()

    async def _was_cancelled(self, reason: str) -> None:
        await self._until_ended()
        await self._conclude_waiting(has_failed=True)
        await self._conclude_stream()
        if not self._is_concluded:
            self._is_concluded = True
            await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason, self._response))

    def _share_scope(self) -> None:
        """Middleware outside finds what the router has set, such as the route."""
        # A thread of the application may write into it.
        for name, own in list(self._inner.items()):
            if name not in (ATTEMPT, "extensions"):
                self._scope[name] = own

    async def _threw(self) -> None:
        self._share_scope()
        self._is_concluded = True
        if self._response is None:
            await self._put_answer(await self.flow.throw(self.keyed, self.permit))
        else:
            reason = "the handler raised an exception in the middle of its response"
            await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason, self._response))

    async def _put(self, message: Message | None) -> None:
        if self.outgoing.is_abandoned:
            return
        if self.outgoing.is_full and not await self.outgoing.has_space(self.flow.settings.stream_timeout):
            # A part is missing from now on, so the response must not end as if it were whole.
            self.is_cut = True
            self.outgoing.abandon()
            if self.sender is not None:
                self.sender.cancel()
        self.outgoing.put(message)

    async def _put_answer(self, whole: Answer) -> None:
        await self._put(
            {"type": "http.response.start", "status": whole.status, "headers": write_fields(http.sent(whole))}
        )
        await self._put({"type": "http.response.body", "body": whole.body})

    async def _send(self, message: Message) -> None:
        if self._waiting is not None or self._ended_stream is not None or self._is_given_up:
            return
        match message["type"]:
            case "http.response.start" if self._is_concluded:
                # The application has given up its first response, of which the end is stored or being stored. If that was a
                # stream, its rest never comes: it must not end as if it were whole.
                self._is_given_up = True
            case "http.response.start":
                self._share_scope()
                self._message = message
                path, status = self.keyed.head.path, message["status"]
                try:
                    self._response = http.executed(self.flow.settings, path, status, read_fields(message))
                except Exception:
                    # It may be meant as a success.
                    is_error = isinstance(status, int) and status >= 500
                    self._response = (
                        http.executed(self.flow.settings, path, status, [])
                        if is_error
                        else http.Executed(200, [], "unknown", False)
                    )
                    raise
                if self._response.treatment != "replay":
                    await self._end(self._conclude(None))
            case "http.response.body" if self._response is not None:
                await self._body(message)
            case _:
                # Trailers, pushes and other extensions, which a record does not keep.
                if self._is_concluded:
                    await self._put(message)

    async def _body(self, message: Message) -> None:
        is_last = not message.get("more_body", False)
        if self._is_concluded:
            # Its start comes first.
            await self._until_ended()
            self._is_whole = self._is_whole or is_last
            await self._put(message)
            return
        chunk = message.get("body", b"")
        self._chunks.append(chunk)
        self._size += len(chunk)
        if is_last:
            self._is_whole = True
            await self._end(self._conclude_whole(b"".join(self._chunks)))
        elif self._size > self.flow.settings.max_response_body:
            # Too large to be kept: it goes to the client as it comes.
            await self._end(self._conclude_large())

    async def _end(self, work: Coroutine[Any, Any, None]) -> None:
        """Ends the attempt in a task of its own."""
        self._is_concluded = True
        self._ending = asyncio.ensure_future(work)
        await asyncio.shield(self._ending)

    async def _until_ended(self) -> None:
        if self._ending is not None and not self._ending.done():
            await asyncio.wait({self._ending})

    async def _conclude_whole(self, body: bytes) -> None:
        response = self._response
        assert response is not None
        if self.flow.is_cut(response, body):
            reason = "the body of the response is not as long as its Content-Length says"
            await self._put_answer(await self.flow.fail(self.keyed, self.permit, reason, response))
            self.outgoing.end()
        elif await self.flow.is_open(self.permit):
            # A framework may end it after this call, such as FastAPI in a dependency with `yield`.
            self._waiting = body
            self._timer = asyncio.get_running_loop().call_later(COMMIT_TIMEOUT, self._wait_no_longer)
        elif response.status not in (204, 304) and get(response.headers, "content-length") is None:
            self._is_concluded = self._is_whole = False
            self._ended_stream = body
            self._timer = asyncio.get_running_loop().call_later(STREAM_END_TIMEOUT, self._wait_no_longer)
        else:
            await self._conclude(body)

    async def _conclude_large(self) -> None:
        await self._conclude(None)
        for earlier in self._chunks:
            await self._put({"type": "http.response.body", "body": earlier, "more_body": True})
        self._chunks.clear()

    def _wait_no_longer(self) -> None:
        work = self._conclude_waiting() if self._waiting is not None else self._conclude_stream()
        self._ending = asyncio.ensure_future(work)

    async def _conclude_waiting(self, *, has_failed: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._waiting is not None:
            body, self._waiting = self._waiting, None
            await self._conclude(body, has_failed=has_failed)

    async def _conclude_stream(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._ended_stream is not None:
            body, self._ended_stream = self._ended_stream, None
            await self._conclude(body)

    async def _conclude(self, body: bytes | None, *, has_failed: bool = False) -> None:
        """Ends the record, and then lets the client have the response."""
        assert self._response is not None
        response = self._response
        self._is_concluded = True
        mark, instead = await self.flow.conclude(self.keyed, self.permit, response, body, has_failed=has_failed)
        if instead is not None:
            self._is_whole = True
            await self._put_answer(instead)
            # The client has a whole answer: what the application sends from now on goes nowhere.
            self.outgoing.end()
            return
        fields = http.marked(self.keyed, response.headers, mark)
        await self._put({**self._message, "headers": write_fields(fields)})
        if body is not None:
            self._is_whole = True
            await self._put({"type": "http.response.body", "body": body})
        else:
            # The client may have left before the stream began.
            self._limit_stream()


def head_of(scope: Scope) -> Head:
    raw = scope.get("raw_path")
    path = raw.decode("ascii", "surrogateescape") if raw else quote(scope["path"], safe="/:@!$&'()*+,;=~%")
    query = scope.get("query_string") or b""
    return Head(
        scope["method"],
        path.partition("?")[0],
        query.decode("latin-1") if query else None,
        [(name.decode("latin-1").lower(), value) for name, value in scope["headers"]],
        request=scope,
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
