"""A client that sends a request again under one key, as transports of httpx.

::

    client = httpx.Client(transport=RetryTransport(httpx.HTTPTransport()))
    client.post("https://shop.example/payments", json=payment, headers={"Idempotency-Key": derived_key("payment", [id])})

A response is definite: 2xx, or a refusal that says that nothing happened. Everything else is a :class:`SendError`, which says
if the request may have taken effect. A request without a key is sent once, and one whose key is invalid is not sent at all.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import httpx

from . import values
from .clocks import Moment
from .errors import ConfigError
from .headers import get
from .identity import new_key
from .verdict import Context, Field, Protection, ServerErrors, judge

__all__ = ["AsyncRetryTransport", "Report", "RetryBudget", "RetryPolicy", "RetryTransport", "SendError"]

Kind = Literal[
    "unknown",
    "turned-away",
    "attempts",
    "deadline",
    "budget",
    "come-back-later",
    "body",
    "response-too-large",
    "unsendable",
]
_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
_NOT_SENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_VALUE = re.compile(rb"(?:[!-~\x80-\xff](?:[\t -~\x80-\xff]*[!-~\x80-\xff])?)?")
_TEXTS: dict[Kind, str] = {
    "unknown": "the outcome is unknown, and another request does not tell: find out what happened",
    "turned-away": "the request was refused while an earlier attempt may have taken effect: find out what happened",
    "attempts": "no definite response in as many attempts as are allowed",
    "deadline": "no definite response until the deadline",
    "budget": "no definite response, and the budget for retries is used up",
    "come-back-later": "the service asks to come back later than this client waits",
    "body": "no definite response, and the body is a stream, which cannot be sent again",
    "response-too-large": "the response is larger than this client reads",
    "unsendable": "the request is invalid",
}
_MAX_KEY_LENGTH = 255
_DAY = 86_400
# What a value that is missing turns into as a text. It would be one key for all intents.
_MISSING = frozenset({"undefined", "null", "nil", "<nil>", "none", "nan", "[object object]"})
_QUOTED = re.compile(r'"((?:[ !#-\[\]-~]|\\["\\])*)"')


def _key_fault(lines: Sequence[bytes]) -> str | None:
    """Why these lines of the header field are not one valid key. The text does not repeat it."""
    if len(lines) != 1:
        return "the request has more than one key; give one key"
    field = lines[0].decode("latin-1").strip(" \t")
    quoted = _QUOTED.fullmatch(field)
    key = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else field
    if not key.strip(" "):
        return "the key is empty; give 1 to 255 characters, such as a UUID"
    if key.lower() in _MISSING:
        return f'the key is the text "{key}", as of a missing value; give the key of the intent'
    if not quoted and not re.fullmatch(r"[!#-+\--~]*", field):
        return (
            "the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put "
            "the key in quotes"
        )
    if len(key) > _MAX_KEY_LENGTH:
        return f"the key has {len(key)} characters; at most {_MAX_KEY_LENGTH} are allowed"
    return None


def _whole(name: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ConfigError(f"{name} is {value!r}; write a whole number from {least} to {most}")


def _seconds(name: str, value: object, least: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= _DAY:  # type: ignore[operator]
        raise ConfigError(f"{name} is {value!r}; write a number of seconds from {least:g} to {_DAY}")


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

    def __post_init__(self) -> None:
        _whole("max_attempts", self.max_attempts, 1, 1000)
        _whole("max_response_bytes", self.max_response_bytes, 0, 1 << 53)
        _seconds("backoff_base", self.backoff_base, 0)
        _seconds("backoff_cap", self.backoff_cap, 0)
        _seconds("deadline", self.deadline, 0.001)
        _seconds("max_retry_after", self.max_retry_after, 0)
        values.choice("server_errors", self.server_errors, ("again", "final", "unknown"))
        values.flag("new_keys", self.new_keys)
        if not isinstance(self.key_header, str) or not re.fullmatch(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+", self.key_header):
            raise ConfigError(f"key_header is {self.key_header!r}, which is not the name of a header field")


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
        text: str | None = None,
    ) -> None:
        super().__init__(text or _TEXTS[kind], request=request)
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
        _whole("tokens", tokens, 0, 1 << 53)
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
        self._last: httpx.Response | None = None
        self._in_doubt = False
        self._taken = 0
        self._begun = Moment.now()
        method = request.method.upper()
        if policy.new_keys and method in ("POST", "PATCH") and policy.key_header not in request.headers:
            request.headers[policy.key_header] = new_key()
        self.is_keyed = method not in _SAFE and policy.key_header in request.headers
        self._protection: Protection = "keyed" if self.is_keyed else "once"
        self._is_stream = not isinstance(request.stream, httpx.ByteStream)
        if self.is_keyed:
            self._check()

    def _check(self) -> None:
        """Raises :class:`SendError` if the request would not be protected, or could not be sent."""
        wanted = self.policy.key_header.lower().encode()
        fields = self.request.headers.raw
        fault = _key_fault([value for name, value in fields if name.lower() == wanted])
        if fault is None and not all(_NAME.fullmatch(name) and _VALUE.fullmatch(value) for name, value in fields):
            fault = "a header field has a name or a value that HTTP does not carry, such as a line break or a space at its end"
        if fault is not None:
            raise SendError(
                "unsendable",
                self.request,
                may_have_taken_effect=False,
                attempts=0,
                text=f"{fault}; nothing was sent",
            )

    def answered(self, response: httpx.Response, raw: bytes) -> tuple[httpx.Response | None, float]:
        """The response for the caller, or the pause before the next attempt."""
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
        # Only what needs no retry gives tokens back: a service that refuses quickly is in an outage, too.
        self.budget.give(self._taken or 1)
        self._taken = 0
        response.extensions["oncegate"] = Report(meaning, self.attempts)
        # Not read yet, as that of any transport: `iter_raw` gets the bytes as they came.
        return self._response(response, raw), 0

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
        if self._begun.age() >= policy.deadline:
            raise self._error("deadline", response, retry_after=retry_after)
        if self.attempts >= policy.max_attempts:
            raise self._error(last, response)
        if retry_after is not None and retry_after > policy.max_retry_after:
            raise self._error("come-back-later", response, retry_after=retry_after)
        cap = min(policy.backoff_cap, policy.backoff_base * 2 ** (self.attempts - 1))
        pause = max(random.uniform(0, cap), retry_after or 0)
        if self._begun.age() + pause >= policy.deadline:
            raise self._error("deadline", response, retry_after=retry_after)
        if cost and not self.budget.take(cost):
            raise self._error("budget", response, retry_after=retry_after)
        self._taken = cost
        self._last = response
        return pause

    def next_attempt(self) -> None:
        """Counts an attempt. Raises :class:`SendError` if the deadline has passed in the pause before it.

        The machine may have been suspended, and a service forgets a key after a while.
        """
        if self.attempts and self._begun.age() >= self.policy.deadline:
            raise self._error("deadline", self._last)
        self.attempts += 1

    def left(self) -> float:
        """The seconds until the deadline."""
        return self.policy.deadline - (time.monotonic() - self._begun.monotonic)

    def limit_attempt(self) -> None:
        """Makes each wait of the attempt end by the deadline."""
        left = max(self.left(), 0.001)
        limits = dict(self.request.extensions.get("timeout") or {})
        for name in ("connect", "read", "write", "pool"):
            own = limits.get(name)
            limits[name] = left if own is None else min(own, left)
        self.request.extensions = {**self.request.extensions, "timeout": limits}

    def check_deadline(self) -> None:
        """Raises an error of httpx if the deadline has passed in the middle of a response.

        Not by the wall clock: a response that was there when the machine was suspended is of use.
        """
        if time.monotonic() - self._begun.monotonic >= self.policy.deadline:
            raise httpx.ReadTimeout("the deadline has passed while the response came", request=self.request)

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

    def whole(self, response: httpx.Response, raw: bytes) -> httpx.Response:
        """The response with its body, which was read. Raises an error of httpx if its content coding is not the one it names."""
        whole = self._response(response, raw)
        if "content-encoding" in whole.headers:
            size = 0
            for piece in self._response(response, raw).iter_bytes():
                size += len(piece)
                if size > self.policy.max_response_bytes:
                    raise self.too_large_error(response)
        whole.read()
        return whole

    def _response(
        self, response: httpx.Response, raw: bytes, *, without: frozenset[bytes] = frozenset()
    ) -> httpx.Response:
        left_out = {b"transfer-encoding", *without}
        headers = [(name, value) for name, value in response.headers.raw if name.lower() not in left_out]
        return httpx.Response(
            response.status_code,
            headers=headers,
            stream=_Pieces(raw),
            request=self.request,
            extensions=response.extensions,
        )

    def too_large_error(self, response: httpx.Response) -> _TooLarge:
        large = self._response(response, b"", without=frozenset({b"content-encoding"}))
        large.read()
        return _TooLarge(large)


class _Pieces(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in pieces, so that a small one that is decoded into a very large one is noticed."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        for at in range(0, len(self._data), 16384):
            yield self._data[at : at + 16384]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def _retry_after(fields: Sequence[Field]) -> float | None:
    value = get(fields, "retry-after")
    if value is None:
        return None
    text = value.decode("latin-1").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    date = get(fields, "date")
    try:
        until = email.utils.parsedate_to_datetime(text).timestamp()
        # A date counts from the response's own date: the clocks may differ.
        now = email.utils.parsedate_to_datetime(date.decode("latin-1")).timestamp() if date else time.time()
    except (TypeError, ValueError, OverflowError):
        return None
    return max(0.0, until - now)


def _check_parts(transport: object, kind: type, policy: object, budget: object) -> None:
    if not isinstance(transport, kind):
        raise ConfigError(f"transport is a {type(transport).__name__}; give an httpx.{kind.__name__}")
    if not isinstance(policy, RetryPolicy | None):
        raise ConfigError(f"policy is a {type(policy).__name__}; give a RetryPolicy")
    if not isinstance(budget, RetryBudget | None):
        raise ConfigError(f"budget is a {type(budget).__name__}; give a RetryBudget")


class RetryTransport(httpx.BaseTransport):
    """Sends requests with a key again until their response is definite. It wraps the transport that sends."""

    def __init__(
        self, transport: httpx.BaseTransport, policy: RetryPolicy | None = None, budget: RetryBudget | None = None
    ) -> None:
        _check_parts(transport, httpx.BaseTransport, policy, budget)
        self._inner = transport
        self.policy, self.budget = policy or RetryPolicy(), budget or RetryBudget()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        sending = _Sending(self.policy, self.budget, request)
        if not sending.is_keyed:
            return self._inner.handle_request(request)
        while True:
            sending.next_attempt()
            sending.limit_attempt()
            try:
                response, raw = self._read(sending, self._inner.handle_request(request))
            except _TooLarge as large:
                raise sending.too_large(large.response) from None
            except httpx.UnsupportedProtocol:
                raise  # a mistyped URL
            except (httpx.TransportError, httpx.DecodingError) as error:
                pause = _after(sending, error)
            else:
                found, pause = sending.answered(response, raw)
                if found is not None:
                    return found
            time.sleep(pause)

    def _read(self, sending: _Sending, response: httpx.Response) -> tuple[httpx.Response, bytes]:
        body = bytearray()
        try:
            for chunk in response.stream:  # type: ignore[union-attr]
                body += chunk
                sending.check_deadline()
                if len(body) > self.policy.max_response_bytes:
                    raise sending.too_large_error(response)
        finally:
            response.close()
        raw = bytes(body)
        return sending.whole(response, raw), raw

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
        _check_parts(transport, httpx.AsyncBaseTransport, policy, budget)
        self._inner = transport
        self.policy, self.budget = policy or RetryPolicy(), budget or RetryBudget()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        sending = _Sending(self.policy, self.budget, request)
        if not sending.is_keyed:
            return await self._inner.handle_async_request(request)
        while True:
            sending.next_attempt()
            sending.limit_attempt()
            try:
                response, raw = await self._attempt(sending, request)
            except _TooLarge as large:
                raise sending.too_large(large.response) from None
            except httpx.UnsupportedProtocol:
                raise  # a mistyped URL
            except (httpx.TransportError, httpx.DecodingError) as error:
                pause = _after(sending, error)
            else:
                found, pause = sending.answered(response, raw)
                if found is not None:
                    return found
            await asyncio.sleep(pause)

    async def _attempt(self, sending: _Sending, request: httpx.Request) -> tuple[httpx.Response, bytes]:
        try:
            async with asyncio.timeout(max(sending.left(), 0.001)):
                return await self._read(sending, await self._inner.handle_async_request(request))
        except TimeoutError as error:
            raise httpx.ReadTimeout("the deadline has passed while the response came", request=request) from error

    async def _read(self, sending: _Sending, response: httpx.Response) -> tuple[httpx.Response, bytes]:
        body = bytearray()
        try:
            async for chunk in response.stream:  # type: ignore[union-attr]
                body += chunk
                if len(body) > self.policy.max_response_bytes:
                    raise sending.too_large_error(response)
        finally:
            await response.aclose()
        raw = bytes(body)
        return sending.whole(response, raw), raw

    async def aclose(self) -> None:
        await self._inner.aclose()


def _after(sending: _Sending, error: Exception) -> float:
    try:
        return sending.failed(error)
    except SendError as end:
        raise end from error
