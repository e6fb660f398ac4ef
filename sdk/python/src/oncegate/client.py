"""A client that sends a request again under one key, as transports of httpx.

::

    client = httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))
    client.post("https://shop.example/payments", json=payment, headers={"Idempotency-Key": derived_key("payment", [id])})

A response is definite: 2xx, or a refusal that says that nothing happened. Everything else is a :class:`SendError`, which says
if the request may have taken effect. A request without a key is sent once.
"""

from __future__ import annotations

import asyncio
import email.utils
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import httpx

from .headers import get
from .identity import new_key
from .verdict import Context, Field, Protection, ServerErrors, judge

__all__ = ["AsyncRetryTransport", "Report", "RetryBudget", "RetryPolicy", "RetryTransport", "SendError"]

Kind = Literal[
    "unknown", "turned-away", "attempts", "deadline", "budget", "come-back-later", "body", "response-too-large"
]
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)
_TEXTS: dict[Kind, str] = {
    "unknown": "the outcome is unknown, and another request does not tell: find out what happened",
    "turned-away": "the request was refused while an earlier attempt may have taken effect: find out what happened",
    "attempts": "no definite response in as many attempts as are allowed",
    "deadline": "no definite response until the deadline",
    "budget": "no definite response, and the budget for retries is used up",
    "come-back-later": "the service asks to come back later than this client waits",
    "body": "no definite response, and the body is a stream, which cannot be sent again",
    "response-too-large": "the response is larger than this client reads",
}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """The limits of time and attempts, in seconds."""

    max_attempts: int = 6
    backoff_base: float = 0.2
    backoff_cap: float = 20
    deadline: float = 120
    max_retry_after: float = 60
    max_response_bytes: int = 8 * 1024 * 1024
    server_errors: ServerErrors = "again"
    key_header: str = "Idempotency-Key"
    new_keys: bool = False
    """Makes a key for each POST and PATCH that has none."""


@dataclass(frozen=True, slots=True)
class Report:
    """What the client did, in `response.extensions["oncegate"]`."""

    meaning: str
    attempts: int


class SendError(httpx.TransportError):
    """No definite response. `may_have_taken_effect` is false only if that is certain."""

    def __init__(
        self,
        kind: Kind,
        request: httpx.Request,
        *,
        may_have_taken_effect: bool,
        attempts: int,
        response: httpx.Response | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(_TEXTS[kind], request=request)
        self.kind: Kind = kind
        self.may_have_taken_effect = may_have_taken_effect
        self.attempts = attempts
        self.response = response
        self.retry_after = retry_after

    @property
    def is_resumable(self) -> bool:
        """True if the same request under the same key may get a definite response later."""
        return self.kind in ("attempts", "deadline", "budget", "come-back-later")


class RetryBudget:
    """Tokens for the retries of all requests of a client, so that an outage is not made worse."""

    def __init__(self, tokens: int = 500) -> None:
        self._most = self._tokens = tokens
        self._lock = threading.Lock()

    def take(self, tokens: int) -> bool:
        with self._lock:
            if self._tokens < tokens:
                return False
            self._tokens -= tokens
            return True

    def give(self, tokens: int) -> None:
        with self._lock:
            self._tokens = min(self._most, self._tokens + tokens)


class _TooLarge(Exception):
    def __init__(self, response: httpx.Response) -> None:
        super().__init__()
        self.response = response


class _Sending:
    """One request, over its attempts. The transports only send and wait."""

    def __init__(self, policy: RetryPolicy, budget: RetryBudget, request: httpx.Request) -> None:
        self.policy, self.budget, self.request = policy, budget, request
        self.attempts = 0
        self._in_doubt = False
        self._taken = 0
        self._until = time.monotonic() + policy.deadline
        method = request.method.upper()
        if policy.new_keys and method in ("POST", "PATCH") and policy.key_header not in request.headers:
            request.headers[policy.key_header] = new_key()
        self.is_keyed = method not in _SAFE and policy.key_header in request.headers
        self._protection: Protection = "keyed" if self.is_keyed else "once"
        self._is_stream = not isinstance(request.stream, httpx.ByteStream)

    def answered(self, response: httpx.Response) -> tuple[httpx.Response | None, float]:
        """The response for the caller, or the pause before the next attempt."""
        self.budget.give(self._taken or 1)
        self._taken = 0
        fields: Sequence[Field] = [(name.decode("latin-1").lower(), value) for name, value in response.headers.raw]
        context = Context(self._protection, self.policy.server_errors, self._in_doubt)
        meaning = judge(context, response.status_code, fields, response.content)
        match meaning:
            case "unknown":
                raise self._error("unknown", response, doubt=True)
            case "turned-away in-doubt":
                raise self._error("turned-away", response, doubt=True)
            case "contested":
                return None, self._pause("turned-away", 5, response, _retry_after(fields))
            case _ if meaning.startswith("again"):
                self._in_doubt |= meaning != "again nothing"
                cost = 0 if meaning == "again in-progress" else 5
                return None, self._pause("attempts", cost, response, _retry_after(fields))
        response.extensions["oncegate"] = Report(meaning, self.attempts)
        return response, 0

    def failed(self, error: Exception) -> float:
        """The pause after an attempt without a response."""
        self._in_doubt |= not isinstance(error, _NOT_SENT)
        return self._pause("attempts", 10 if isinstance(error, httpx.TimeoutException) else 5, None, None)

    def too_large(self, response: httpx.Response) -> SendError:
        return self._error("response-too-large", response, doubt=True)

    def _pause(self, last: Kind, cost: int, response: httpx.Response | None, retry_after: float | None) -> float:
        policy = self.policy
        if self._is_stream:
            raise self._error("body", response)
        if self.attempts >= policy.max_attempts:
            raise self._error(last, response)
        if retry_after is not None and retry_after > policy.max_retry_after:
            raise self._error("come-back-later", response, retry_after=retry_after)
        cap = min(policy.backoff_cap, policy.backoff_base * 2 ** (self.attempts - 1))
        pause = max(random.uniform(0, cap), retry_after or 0)
        if time.monotonic() + pause >= self._until:
            raise self._error("deadline", response, retry_after=retry_after)
        if cost and not self.budget.take(cost):
            raise self._error("budget", response, retry_after=retry_after)
        self._taken = cost
        return pause

    def _error(
        self, kind: Kind, response: httpx.Response | None, *, doubt: bool = False, retry_after: float | None = None
    ) -> SendError:
        return SendError(
            kind,
            self.request,
            may_have_taken_effect=doubt or self._in_doubt,
            attempts=self.attempts,
            response=response,
            retry_after=retry_after,
        )

    def whole(self, response: httpx.Response, body: bytes) -> httpx.Response:
        """The response with its body, which was read."""
        headers = [(name, value) for name, value in response.headers.raw if name.lower() != b"transfer-encoding"]
        return httpx.Response(
            response.status_code, headers=headers, content=body, request=self.request, extensions=response.extensions
        )


def _retry_after(fields: Sequence[Field]) -> float | None:
    value = get(fields, "retry-after")
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if text.isdigit():
        return float(text[:9])
    date = get(fields, "date")
    try:
        until = email.utils.parsedate_to_datetime(text).timestamp()
        # A date counts from the response's own date: the clocks may differ.
        now = email.utils.parsedate_to_datetime(date.decode("latin-1")).timestamp() if date else time.time()
    except (TypeError, ValueError):
        return None
    return max(0.0, until - now)


class RetryTransport(httpx.BaseTransport):
    """Sends requests with a key again until their response is definite. It wraps the transport that sends."""

    def __init__(
        self, transport: httpx.BaseTransport, policy: RetryPolicy | None = None, budget: RetryBudget | None = None
    ) -> None:
        self._inner = transport
        self.policy, self.budget = policy or RetryPolicy(), budget or RetryBudget()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        sending = _Sending(self.policy, self.budget, request)
        if not sending.is_keyed:
            return self._inner.handle_request(request)
        while True:
            sending.attempts += 1
            try:
                response = self._read(sending, self._inner.handle_request(request))
            except _TooLarge as large:
                raise sending.too_large(large.response) from None
            except httpx.TransportError as error:
                pause = _after(sending, error)
            else:
                found, pause = sending.answered(response)
                if found is not None:
                    return found
            time.sleep(pause)

    def _read(self, sending: _Sending, response: httpx.Response) -> httpx.Response:
        body = bytearray()
        try:
            for chunk in response.stream:  # type: ignore[union-attr]
                body += chunk
                if len(body) > self.policy.max_response_bytes:
                    raise _TooLarge(sending.whole(response, b""))
        finally:
            response.close()
        return sending.whole(response, bytes(body))

    def close(self) -> None:
        self._inner.close()


class AsyncRetryTransport(httpx.AsyncBaseTransport):
    """:class:`RetryTransport` for `httpx.AsyncClient`."""

    def __init__(
        self,
        transport: httpx.AsyncBaseTransport,
        policy: RetryPolicy | None = None,
        budget: RetryBudget | None = None,
    ) -> None:
        self._inner = transport
        self.policy, self.budget = policy or RetryPolicy(), budget or RetryBudget()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sending = _Sending(self.policy, self.budget, request)
        if not sending.is_keyed:
            return await self._inner.handle_async_request(request)
        while True:
            sending.attempts += 1
            try:
                response = await self._read(sending, await self._inner.handle_async_request(request))
            except _TooLarge as large:
                raise sending.too_large(large.response) from None
            except httpx.TransportError as error:
                pause = _after(sending, error)
            else:
                found, pause = sending.answered(response)
                if found is not None:
                    return found
            await asyncio.sleep(pause)

    async def _read(self, sending: _Sending, response: httpx.Response) -> httpx.Response:
        body = bytearray()
        try:
            async for chunk in response.stream:  # type: ignore[union-attr]
                body += chunk
                if len(body) > self.policy.max_response_bytes:
                    raise _TooLarge(sending.whole(response, b""))
        finally:
            await response.aclose()
        return sending.whole(response, bytes(body))

    async def aclose(self) -> None:
        await self._inner.aclose()


def _after(sending: _Sending, error: Exception) -> float:
    try:
        return sending.failed(error)
    except SendError as end:
        raise end from error
