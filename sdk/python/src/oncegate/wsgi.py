"""WSGI middleware: for Flask, Django, Bottle and every other WSGI application."""

from __future__ import annotations

import logging
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

    def __init__(self, app: App, *, store: Store, **settings: Any) -> None:
        self.app = app
        self.settings = Settings.of(**settings)
        self.flow = Flow(self.settings, engine_of(store, blocking=True))

    def drain(self, timeout: float) -> bool:
        """Waits until no request with a key is running. False if that takes longer."""
        return run_blocking(self.flow.engine.drain(timeout))

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        keyed = http.begin(self.settings, head_of(environ))
        if keyed is None:
            return self._pass(environ, start_response)
        if isinstance(keyed, Answer):
            return answer(start_response, keyed)
        limits = self.flow.limits
        try:
            body = self._read(keyed, environ)
        except _Incomplete:
            return answer(start_response, keyed.refuse(Refusal("request-incomplete")))
        if isinstance(body, Answer):
            return answer(start_response, body)
        try:
            return self._with_body(keyed, body, environ, start_response)
        finally:
            limits.free(len(body))

    def _pass(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            return start_response(status, write_fields(http.passed(self.settings, read_fields(headers))), *rest)

        return self.app(environ, started)

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
        parts, size = [], 0
        while wanted is None or size < wanted:
            try:
                part = source.read(65_536 if wanted is None else min(65_536, wanted - size))
            except OSError as error:
                self.flow.limits.free(size)
                raise _Incomplete from error
            if not part:
                break
            if size + len(part) > limit or not self.flow.limits.hold(len(part)):
                self.flow.limits.free(size)
                too_large = size + len(part) > limit
                return http.too_large(keyed) if too_large else http.overloaded(keyed, http.BUDGET_USED_UP)
            size += len(part)
            parts.append(part)
        if wanted is not None and size < wanted:
            self.flow.limits.free(size)
            raise _Incomplete
        return b"".join(parts)

    def _with_body(self, keyed: Keyed, body: bytes, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        import io

        inner = {**environ, "wsgi.input": io.BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        operation = run_blocking(self.flow.identify(keyed, body))
        if operation is None:
            return self._pass(inner, start_response)
        if isinstance(operation, Answer):
            return answer(start_response, operation)
        if not self.flow.limits.enter(operation.caller_tag):
            return answer(start_response, http.overloaded(keyed, http.TOO_MANY))
        is_streaming = False
        try:
            claimed = run_blocking(self.flow.claim(keyed, operation))
            if isinstance(claimed, Answer):
                return answer(start_response, claimed)
            if isinstance(claimed, FailOpen):
                return self._fail_open(keyed, inner, start_response)
            execution = _Execution(self.flow, keyed, claimed)
            response = execution.run(self.app, inner, start_response)
            if execution.rest is not None:
                is_streaming = True
                return _Stream(response, lambda: self.flow.limits.leave(operation.caller_tag))
            return response
        finally:
            if not is_streaming:
                self.flow.limits.leave(operation.caller_tag)

    def _fail_open(self, keyed: Keyed, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        def started(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            fields = fail_open_fields(keyed, self.settings, read_fields(headers))
            return start_response(status, write_fields(fields), *rest)

        return self.app(environ, started)


class _Stream:
    """A body that goes to the client as it comes. The application's iterable is closed at its end."""

    def __init__(self, parts: Iterable[bytes], end: Callable[[], None]) -> None:
        self._parts = iter(parts)
        self._end: Callable[[], None] | None = end

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        close = getattr(self._parts, "close", None)
        if close is not None:
            close()
        if self._end is not None:
            self._end()
            self._end = None


class _Execution:
    """One execution: runs the application, and stores its response before the client gets it."""

    def __init__(self, flow: Flow, keyed: Keyed, permit: Permit) -> None:
        self.flow, self.keyed, self.permit = flow, keyed, permit
        self.rest: Iterable[bytes] | None = None
        self._status = ""
        self._headers: list[Field] = []
        self._is_started = False
        self._written: list[bytes] = []

    def _start(self, status: str, headers: list[tuple[str, str]], exc_info: Any = None) -> Callable[[bytes], None]:
        if self._is_started and exc_info is None:
            raise AssertionError("start_response was called twice")
        self._status, self._headers, self._is_started = status, read_fields(headers), True
        return self._written.append

    def run(self, app: App, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        parts: Iterable[bytes] = ()
        try:
            with running(self.permit.attempt):
                environ[ATTEMPT] = self.permit.attempt
                parts = app(environ, self._start)
                iterator = iter(parts)
                first = next(iterator, b"")
                if not self._is_started:
                    raise RuntimeError("the application did not call start_response")
                settings = self.flow.settings
                code = int(self._status.split(" ", 1)[0])
                response = http.executed(settings, self.keyed.head.path, code, self._headers)
                if response.treatment != "replay":
                    return self._streamed(response, start_response, first, iterator, parts)
                chunks, size = [*self._written, first], sum(map(len, self._written)) + len(first)
                while size <= settings.max_response_body:
                    chunk = next(iterator, None)
                    if chunk is None:
                        break
                    chunks.append(chunk)
                    size += len(chunk)
                else:
                    # Too large to be kept: it goes to the client as it comes.
                    self._written.clear()
                    return self._streamed(response, start_response, b"".join(chunks), iterator, parts)
        except Exception:
            _close(parts)
            log.exception("record %s: the handler raised an exception", self.permit.attempt.record.hex())
            return answer(start_response, run_blocking(self._failed()))
        except BaseException:
            _close(parts)
            run_blocking(self.flow.fail(self.keyed, self.permit, "the handler was ended"))
            raise
        _close(parts)
        body = b"".join(chunks)
        mark, instead = run_blocking(self.flow.conclude(self.keyed, self.permit, response, body))
        if instead is not None:
            return answer(start_response, instead)
        start_response(self._status, write_fields(http.marked(self.keyed, response.headers, mark)))
        return [body]

    async def _failed(self) -> Answer:
        if not self._is_started:
            return await self.flow.throw(self.keyed, self.permit)
        return await self.flow.fail(self.keyed, self.permit, "the handler raised an exception in its response")

    def _streamed(
        self,
        response: http.Executed,
        start_response: StartResponse,
        first: bytes,
        rest: Iterator[bytes],
        parts: Iterable[bytes],
    ) -> Iterable[bytes]:
        mark, instead = run_blocking(self.flow.conclude(self.keyed, self.permit, response, None))
        if instead is not None:
            _close(parts)
            return answer(start_response, instead)
        start_response(self._status, write_fields(http.marked(self.keyed, response.headers, mark)))

        def stream() -> Iterator[bytes]:
            try:
                yield from self._written
                yield first
                yield from rest
            finally:
                _close(parts)

        self.rest = stream()
        return self.rest


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
    return Head(environ["REQUEST_METHOD"], path, query, headers)


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
