"""WSGI middleware: for Flask, Django, Bottle and every other WSGI application."""

from __future__ import annotations

import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from . import http
from .engine import Attempt, Permit, engine_of
from .flow import FailOpen, Flow, fail_open_fields, running
from .headers import Field
from .http import Head, Keyed
from .refusal import Answer, Refusal
from .runtime import run_blocking
from .settings import Settings
from .store import Store
from .values import seconds

__all__ = ["IdempotencyMiddleware", "attempt_of"]

Environ = dict[str, Any]
StartResponse = Callable[..., Any]
App = Callable[[Environ, StartResponse], Iterable[bytes]]
ATTEMPT = "oncegate.attempt"
log = logging.getLogger("oncegate")


class _Incomplete(Exception):
    pass


class IdempotencyMiddleware:
    """Makes retries of requests with a key safe. `store` has a blocking pool or client, or is a :class:`MemoryStore`."""

    def __init__(self, app: App, *, store: Store, drain_timeout: float = 30, **settings: Any) -> None:
        self.app = app
        self.settings = Settings.of(**settings)
        self.flow = Flow(self.settings, engine_of(store, blocking=True, ids=self.settings.ids))
        # Outcomes that the store has not taken yet are stored at the end of the process.
        self.flow.engine.drain_at_exit(seconds("drain_timeout", drain_timeout, 0, 86_400))

    def drain(self, timeout: float) -> bool:
        """Waits until no request with a key is running. False if that takes longer."""
        return run_blocking(self.flow.engine.drain(timeout))

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        keyed = http.begin(self.settings, head_of(environ))
        if keyed is None:
            return self._pass(environ, start_response)
        if isinstance(keyed, Answer):
            return answer(start_response, keyed)
        try:
            body = self._read(keyed, environ)
        except _Incomplete:
            return answer(start_response, keyed.refuse(Refusal("request-incomplete")))
        if isinstance(body, Answer):
            return answer(start_response, body)
        return self._with_body(keyed, body, environ, start_response)

    def _pass(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, write_fields(http.passed(self.settings, read_fields(headers))), *rest)

        return self._without_key(environ, started)

    def _without_key(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        # If a handler calls an application in its own process, the attempt of that handler is not the one of this request.
        with running(environ.get(ATTEMPT)):
            return self.app(environ, start_response)

    def _read(self, keyed: Keyed, environ: Environ) -> bytes | Answer:
        limit, source = self.settings.max_request_body, environ["wsgi.input"]
        length = environ.get("CONTENT_LENGTH") or ""
        if length.isdigit():
            if int(length) > limit:
                return http.too_large(keyed)
            wanted: int | None = int(length)
        elif "chunked" in environ.get("HTTP_TRANSFER_ENCODING", "").lower() or environ.get("wsgi.input_terminated"):
            wanted = None
        else:
            wanted = 0
        if wanted is None and not environ.get("wsgi.input_terminated"):
            # A read would wait for the end of the connection, and take the framing of the chunks for content.
            return keyed.refuse(Refusal("request-malformed", http.NO_LENGTH))
        parts, size, is_whole = [], 0, False
        deadline = time.monotonic() + self.settings.body_timeout
        try:
            while wanted is None or size < wanted:
                if time.monotonic() > deadline:
                    raise _Incomplete
                try:
                    part = source.read(65_536 if wanted is None else min(65_536, wanted - size))
                except OSError as error:
                    raise _Incomplete from error
                if not part:
                    break
                if size + len(part) > limit:
                    return http.too_large(keyed)
                if not self.flow.limits.hold(len(part)):
                    return http.overloaded(keyed, http.BUDGET_USED_UP)
                size += len(part)
                parts.append(part)
            if wanted is not None and size < wanted:
                raise _Incomplete
            is_whole = True
            return b"".join(parts)
        finally:
            # Servers have exceptions of their own for malformed bodies, and answer them.
            if not is_whole:
                self.flow.limits.free(size)

    def _with_body(self, keyed: Keyed, body: bytes, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        import io

        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        size, caller, is_streaming = len(body), None, False

        def left() -> None:
            self.flow.limits.free(size)
            if caller is not None:
                self.flow.limits.leave(caller)

        try:
            operation = run_blocking(self.flow.identify(keyed, body))
            if operation is None:
                return self._pass(inner, start_response)
            if isinstance(operation, Answer):
                return answer(start_response, operation)
            if self.flow.is_inner(environ.get(ATTEMPT), operation):
                return self.app(inner, start_response)
            if not self.flow.limits.enter(operation.caller_tag):
                return answer(start_response, http.overloaded(keyed, http.TOO_MANY))
            caller = operation.caller_tag
            claimed = run_blocking(self.flow.claim(keyed, operation))
            if isinstance(claimed, Answer):
                return answer(start_response, claimed)
            if isinstance(claimed, FailOpen):
                return self._fail_open(keyed, inner, start_response)
            execution = _Execution(self.flow, keyed, claimed)
            response = execution.run(self.app, inner, start_response)
            if execution.rest is not None:
                is_streaming = True
                return _Stream(response, execution.close, left)
            return response
        finally:
            if not is_streaming:
                left()

    def _fail_open(self, keyed: Keyed, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            fields = fail_open_fields(keyed, self.settings, read_fields(headers))
            return start_response(status, write_fields(fields), *rest)

        return self._without_key(environ, started)


class _Stream:
    """A body that goes to the client as it comes. The application's iterable is closed at its end."""

    def __init__(self, parts: Iterable[bytes], close: Callable[[], None], end: Callable[[], None]) -> None:
        self._parts, self._close = iter(parts), close
        self._end: Callable[[], None] | None = end

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        if self._end is None:
            return
        end, self._end = self._end, None
        try:
            # Also if nothing was read, so that the generator has not begun.
            self._close()
        finally:
            end()


class _Execution:
    """One execution: runs the application, and stores its response before the client gets it."""

    def __init__(self, flow: Flow, keyed: Keyed, permit: Permit) -> None:
        self.flow, self.keyed, self.permit = flow, keyed, permit
        self.rest: Iterable[bytes] | None = None
        self.close: Callable[[], None] = lambda: None
        self._status = ""
        self._headers: list[Field] = []
        self._is_started = False
        # Its header fields cannot be read, and it may be meant as a success.
        self._is_unread = False
        # What was written and what was iterated, in its order.
        self._chunks: deque[bytes] = deque()
        self._size = 0

    def _add(self, chunk: bytes) -> None:
        # It raises TypeError for what is no bytes, as long as that can still be the failure of the handler.
        self._size += memoryview(chunk).nbytes
        self._chunks.append(chunk)

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if self._is_started and exc_info is None and not self._is_unread:
            raise AssertionError("start_response was called twice")
        self._status, self._headers, self._is_started, self._is_unread = status, [], True, True
        self._headers, self._is_unread = read_fields(headers), False
        return self._add

    def run(self, app: App, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        parts: Iterable[bytes] = ()
        settings = self.flow.settings
        try:
            with running(self.permit.attempt):
                environ[ATTEMPT] = self.permit.attempt
                parts = app(environ, self._start)
                iterator = iter(parts)
                self._add(next(iterator, b""))
                if not self._is_started:
                    raise RuntimeError("the application did not call start_response")
                if self._is_unread:
                    raise RuntimeError("the header fields of the response cannot be read")
                code = _code(self._status)
                response = http.executed(settings, self.keyed.head.path, code, self._headers)
                if response.treatment != "replay":
                    return self._streamed(response, start_response, iterator, parts)
                while (chunk := next(iterator, None)) is not None:
                    self._add(chunk)
                    if self._size > settings.max_response_body:
                        # Too large to be kept: it goes to the client as it comes.
                        return self._streamed(response, start_response, iterator, parts)
        except Exception:
            self._close(parts)
            log.exception("record %s: the handler raised an exception", self.permit.attempt.record.hex())
            return answer(start_response, run_blocking(self._failed()))
        except BaseException:
            self._close(parts)
            run_blocking(self.flow.fail(self.keyed, self.permit, "the handler was ended"))
            raise
        self._close(parts)
        body = b"".join(self._chunks)
        if self.flow.is_cut(response, body):
            reason = "the body of the response is not as long as its Content-Length says"
            return answer(start_response, run_blocking(self.flow.fail(self.keyed, self.permit, reason, response)))
        mark, instead = run_blocking(self.flow.conclude(self.keyed, self.permit, response, body))
        if instead is not None:
            return answer(start_response, instead)
        start_response(self._status, write_fields(http.marked(self.keyed, response.headers, mark)))
        return [body]

    def _close(self, parts: Iterable[bytes]) -> None:
        """Closes what the application returned. Its response is whole, so that a failure here does not change it."""
        try:
            _close(parts)
        except Exception:
            log.exception(
                "record %s: the response raised an exception when it was closed", self.permit.attempt.record.hex()
            )

    def _taken(self) -> Iterator[bytes]:
        while self._chunks:
            yield self._chunks.popleft()

    async def _failed(self) -> Answer:
        if not self._is_started:
            return await self.flow.throw(self.keyed, self.permit)
        try:
            code = _code(self._status)
            if self._is_unread and code < 500:
                raise ValueError
            response = http.executed(self.flow.settings, self.keyed.head.path, code, self._headers)
        except Exception:
            # The failure is that of the status or of a field, and the response may be meant as a success.
            response = http.Executed(200, [], "unknown", False)
        return await self.flow.fail(
            self.keyed, self.permit, "the handler raised an exception in its response", response
        )

    def _streamed(
        self,
        response: http.Executed,
        start_response: StartResponse,
        rest: Iterator[bytes],
        parts: Iterable[bytes],
    ) -> Iterable[bytes]:
        mark, instead = run_blocking(self.flow.conclude(self.keyed, self.permit, response, None))
        if instead is not None:
            self._close(parts)
            return answer(start_response, instead)
        start_response(self._status, write_fields(http.marked(self.keyed, response.headers, mark)))

        def stream() -> Iterator[bytes]:
            yield from self._taken()
            for chunk in rest:
                # What was written while this part was made comes before it.
                yield from self._taken()
                yield chunk
            yield from self._taken()

        self.close = lambda: self._close(parts)
        self.rest = stream()
        return self.rest


def _code(status: str) -> int:
    """Raises an exception for what is no status."""
    code = status.split(" ", 1)[0]
    if not re.fullmatch(r"[1-9][0-9]{2}", code):
        raise ValueError(f"{code!r} is not a status")
    return int(code)


def _close(parts: Iterable[bytes]) -> None:
    close = getattr(parts, "close", None)
    if close is not None:
        close()


def attempt_of(environ: Environ) -> Attempt | None:
    """The attempt of a request, or None if the request has no key."""
    return environ.get(ATTEMPT)


def head_of(environ: Environ) -> Head:
    # WSGI decodes the path. Servers that have it as it was sent give it under one of these names.
    raw = environ.get("RAW_URI") or environ.get("REQUEST_URI")
    query: str | None
    if isinstance(raw, str) and raw.startswith("/"):
        path, question, sent = raw.partition("?")
        query = sent if question else None
    else:
        decoded = (environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")).encode("latin-1")
        path = quote(decoded, safe="/:@!$&'()*+,;=~") or "/"
        query = environ.get("QUERY_STRING") or None
    headers = [
        (name[5:].replace("_", "-").lower(), value.encode("latin-1"))
        for name, value in environ.items()
        if name.startswith("HTTP_")
    ]
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers.append((name.replace("_", "-").lower(), environ[name].encode("latin-1")))
    if not any(name == "host" for name, _ in headers):
        headers.append(("host", f"{environ.get('SERVER_NAME', '')}:{environ.get('SERVER_PORT', '')}".encode()))
    return Head(environ["REQUEST_METHOD"], path, query, headers, request=environ)


def read_fields(headers: Iterable[tuple[str, str]]) -> list[Field]:
    return [(name.lower(), value.encode("latin-1")) for name, value in headers]


def write_fields(fields: Iterable[Field]) -> list[tuple[str, str]]:
    return [(name.title(), value.decode("latin-1")) for name, value in fields]


def answer(start_response: StartResponse, whole: Answer) -> list[bytes]:
    try:
        phrase = HTTPStatus(whole.status).phrase
    except ValueError:
        phrase = "Unknown"
    start_response(f"{whole.status} {phrase}", write_fields(http.sent(whole)))
    return [whole.body]
