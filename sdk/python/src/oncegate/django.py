"""Middleware for Django, for views of both kinds.

::

    MIDDLEWARE = ["oncegate.django.IdempotencyMiddleware", ...]
    ONCEGATE = {"store": "shop.stores.store", "service": "shop", "scope": "required-header:authorization"}

`store` is a store, or the dotted name of a store or of a function that makes one. Under WSGI it has a blocking pool or
client, under ASGI an asynchronous one or a blocking one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.conf import settings as django_settings
from django.http import HttpRequest, HttpResponse
from django.http.request import RawPostDataException
from django.utils.module_loading import import_string

from . import http, wsgi
from .engine import Attempt, Permit, engine_of
from .errors import ConfigError
from .flow import FailOpen, Flow, fail_open_fields, running
from .headers import Field
from .http import Head, Keyed
from .refusal import Answer, Refusal
from .runtime import run_blocking
from .settings import Settings
from .values import seconds

__all__ = ["IdempotencyMiddleware", "attempt_of"]


class IdempotencyMiddleware:
    """Makes retries of requests with a key safe. Its settings are the dictionary `ONCEGATE` of Django's settings.

    Put it early, so that it sees the responses of all others but those that add fields for each client, or compress. What Django
    makes of an exception in a view is its response.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[Any], Any]) -> None:
        self.get_response = get_response
        options = dict(getattr(django_settings, "ONCEGATE", {}))
        store = options.pop("store", None)
        if isinstance(store, str):
            store = import_string(store)
        if callable(store) and not hasattr(store, "claim"):
            store = store()
        if store is None:
            raise ConfigError(
                "Django's settings have no ONCEGATE = {'store': …}: name a store, or a function that makes one"
            )
        drain_timeout = seconds("drain_timeout", options.pop("drain_timeout", 30), 0, 86_400)
        self.settings = Settings.of(**options)
        self.is_async = iscoroutinefunction(get_response)
        self.flow = Flow(self.settings, engine_of(store, blocking=not self.is_async, ids=self.settings.ids))
        if not self.is_async:
            self.flow.engine.drain_at_exit(drain_timeout)
        self._tasks: set[asyncio.Task[Any]] = set()
        if self.is_async:
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if self.is_async:
            return self._call(request)
        return run_blocking(self._call(request, blocking=True))

    async def _respond(self, request: HttpRequest, *, blocking: bool) -> Any:
        response = self.get_response(request)
        return response if blocking else await response

    async def _respond_without_key(self, request: HttpRequest, *, blocking: bool) -> Any:
        # If a view calls an application in its own process, the attempt of that view is not the one of this request.
        with running(outer_of(request)):
            return await self._respond(request, blocking=blocking)

    async def _call(self, request: HttpRequest, *, blocking: bool = False) -> Any:
        keyed = http.begin(self.settings, replace(head_of(request), request=request))
        if keyed is None:
            return self._passed(await self._respond_without_key(request, blocking=blocking))
        if isinstance(keyed, Answer):
            return written(keyed)
        length = request.META.get("CONTENT_LENGTH") or "0"
        is_chunked = "chunked" in request.META.get("HTTP_TRANSFER_ENCODING", "").lower()
        if is_chunked and "wsgi.input" in request.META and not request.META.get("CONTENT_LENGTH"):
            # Django takes such a body for an empty one.
            return written(keyed.refuse(Refusal("request-malformed", http.NO_LENGTH)))
        if length.isdigit() and int(length) > self.settings.max_request_body:
            return written(http.too_large(keyed))
        try:
            body: bytes = request.body
        except Exception as error:
            if type(error).__name__ == "RequestDataTooBig":
                return written(http.too_large(keyed))
            if isinstance(error, RawPostDataException):
                raise ConfigError(
                    "another middleware has read request.POST of a body that Django does not keep, so that it cannot be "
                    "compared: put oncegate.django.IdempotencyMiddleware before it in MIDDLEWARE. Nothing was executed"
                ) from error
            return written(keyed.refuse(Refusal("request-incomplete")))
        if len(body) > self.settings.max_request_body:
            return written(http.too_large(keyed))
        if not self.flow.limits.hold(len(body)):
            return written(http.overloaded(keyed, http.BUDGET_USED_UP))
        return await self._with_body(keyed, body, request, blocking=blocking)

    async def _with_body(self, keyed: Keyed, body: bytes, request: HttpRequest, *, blocking: bool) -> Any:
        is_handed_over = False
        try:
            operation = await self.flow.identify(keyed, body)
            if operation is None:
                return self._passed(await self._respond_without_key(request, blocking=blocking))
            if isinstance(operation, Answer):
                return written(operation)
            if self.flow.is_inner(outer_of(request), operation):
                return await self._respond(request, blocking=blocking)
            if not self.flow.limits.enter(operation.caller_tag):
                return written(http.overloaded(keyed, http.TOO_MANY))
            is_handed_over = True
        finally:
            if not is_handed_over:
                self.flow.limits.free(len(body))

        async def work() -> Any:
            try:
                claimed = await self.flow.claim(keyed, operation)
                if isinstance(claimed, Answer):
                    return written(claimed)
                if isinstance(claimed, FailOpen):
                    response = await self._respond_without_key(request, blocking=blocking)
                    return rewritten(response, fail_open_fields(keyed, self.settings, fields_of(response)))
                return await self._execute(keyed, claimed, request, blocking=blocking)
            finally:
                # A view whose client has left still has the body.
                self.flow.limits.free(len(body))
                self.flow.limits.leave(operation.caller_tag)

        if blocking:
            return await work()
        # In a task of its own: Django cancels a view whose client hangs up.
        task = asyncio.get_running_loop().create_task(work())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _execute(self, keyed: Keyed, permit: Permit, request: Any, *, blocking: bool) -> Any:
        request.oncegate_attempt = permit.attempt
        try:
            with running(permit.attempt):
                response = await self._respond(request, blocking=blocking)
                if hasattr(response, "render") and callable(response.render):
                    response = response.render()
                    if not blocking and asyncio.iscoroutine(response):
                        response = await response
        except Exception:
            await self.flow.throw(keyed, permit)
            raise
        except BaseException:
            await self.flow.fail(keyed, permit, "the handler was ended")
            raise
        executed = http.executed(self.settings, keyed.head.path, response.status_code, fields_of(response))
        body = None if response.streaming else bytes(response.content)
        if body is not None and self.flow.is_cut(executed, body):
            return written(
                await self.flow.fail(keyed, permit, "the body is not as long as its Content-Length says", executed)
            )
        mark, instead = await self.flow.conclude(keyed, permit, executed, body)
        if instead is not None:
            return written(instead)
        return rewritten(response, http.marked(keyed, executed.headers, mark))

    def _passed(self, response: Any) -> Any:
        for name in ("Idempotency-Store", "Idempotency-Status"):
            if name in response.headers:
                del response[name]
        return response


def attempt_of(request: HttpRequest) -> Attempt | None:
    """The attempt of a request, or None if the request has no key."""
    return getattr(request, "oncegate_attempt", None)


def outer_of(request: Any) -> Attempt | None:
    """The attempt of another middleware for this request, which may be that of WSGI or ASGI around Django."""
    outer: Attempt | None = attempt_of(request) or request.META.get(wsgi.ATTEMPT)
    return outer or getattr(request, "scope", {}).get(wsgi.ATTEMPT)


def head_of(request: Any) -> Head:
    scope = getattr(request, "scope", None)
    if scope is not None:
        from .asgi import head_of as head_of_scope

        return head_of_scope(scope)
    head = wsgi.head_of(request.META)
    if "RAW_URI" in request.META or "REQUEST_URI" in request.META:
        return head
    return Head(head.method, quote(request.path, safe="/:@!$&'()*+,;=~"), head.query, head.headers)


def fields_of(response: Any) -> list[Field]:
    return [(name.lower(), value.encode("latin-1")) for name, value in response.items()]


def rewritten(response: Any, fields: list[Field]) -> Any:
    """The response with these fields. Django keeps cookies elsewhere."""
    for name in list(response.headers):
        del response[name]
    for name, value in fields:
        response[name.title()] = value.decode("latin-1")
    return response


def written(answer: Answer) -> HttpResponse:
    response = HttpResponse(answer.body, status=answer.status)
    return rewritten(response, http.sent(answer))
