"""Values of settings: each is read and checked here, and an error names the setting, what is wrong, and what to write."""

from __future__ import annotations

import difflib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .errors import ConfigError

Duration = float | int | str
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_SIZE = re.compile(r"(\d+) ?(?:([kmg])(i?)b)?", re.IGNORECASE)
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_WITHOUT_EFFECT = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})
# The methods of the HTTP Method Registry that a key can protect.
_METHODS = (
    "ACL", "BASELINE-CONTROL", "BIND", "CHECKIN", "CHECKOUT", "COPY", "DELETE", "LABEL", "LINK", "LOCK", "MERGE", "MKACTIVITY",
    "MKCALENDAR", "MKCOL", "MKREDIRECTREF", "MKWORKSPACE", "MOVE", "ORDERPATCH", "PATCH", "POST", "PROPPATCH", "PUT", "REBIND",
    "UNBIND", "UNCHECKOUT", "UNLINK", "UNLOCK", "UPDATE", "UPDATEREDIRECTREF", "VERSION-CONTROL",
)  # fmt: skip
NO_SERVICE = (
    "service is not set: a store on a server may contain records of other services, so this one needs a name: write "
    "service='orders', for example. Processes with the same name share keys"
)
log = logging.getLogger("oncegate")


class Throttle:
    """A warning that is logged once a minute at most."""

    def __init__(self) -> None:
        self._next = 0.0

    def warn(self, text: str, *arguments: Any) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 60
            log.warning(text, *arguments)


def did_you_mean(written: Any, candidates: Iterable[str]) -> str:
    """`; did you mean 'X'?` for the candidate that is nearest to what was written, or nothing if none is near."""
    lowered = {name.lower(): name for name in candidates}
    near = difflib.get_close_matches(str(written).lower(), lowered, 1, 0.7)
    return f"; did you mean {lowered[near[0]]!r}?" if near else ""


def seconds(name: str, value: Any, least: float, most: float) -> float:
    """A duration: a number of seconds, or a text such as `30s`, `250ms`, `24h`."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found:
        value = float(found[1]) * _UNITS[found[2]]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} is {value!r}; write a number of seconds, or a text such as '30s' or '250ms'")
    if not least <= value <= most:
        raise ConfigError(f"{name} is {value:g} seconds; it may be from {least:g} to {most:g}")
    return float(value)


def size(name: str, value: Any, least: int = 0) -> int:
    """A number of bytes, or a text such as `64KiB` or `2MiB`."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found:
        power = " kmg".index(found[2].lower()) if found[2] else 0
        value = int(found[1]) * (1024 if found[3] else 1000) ** power
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; write a number of bytes from {least} on, or a text such as '2MiB'")
    return value


def number(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; write a whole number from {least} on")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; write True or False")
    return value


def text(name: str, value: Any, example: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is {value!r}, which is no text; write one such as {example!r}")
    return value


def choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(value, choices)
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(map(repr, choices))}{hint}")
    return value


def items(name: str, value: Any, example: Any) -> tuple[Any, ...]:
    """The items of a list. One text or number is a list of one."""
    if isinstance(value, str | int) and not isinstance(value, bool):
        return (value,)
    if isinstance(value, bytes | bytearray | Mapping) or not isinstance(value, Iterable):
        raise ConfigError(f"{name} is {value!r}; write {example!r}, or a list such as [{example!r}]")
    return tuple(value)


def texts(name: str, value: Any, example: str) -> tuple[str, ...]:
    """A list of texts, or one text."""
    listed = items(name, value, example)
    for own in listed:
        if not isinstance(own, str):
            raise ConfigError(
                f"{name} has {own!r}, which is no text; write {example!r}, or a list such as [{example!r}]"
            )
        if "," in own and not own.startswith("/"):
            parts = [part.strip() for part in own.split(",")]
            raise ConfigError(f"{name} has {own!r}, which is one text; write a list: {parts!r}")
    return listed


def names(name: str, value: Any, example: str, *, least: int = 0) -> tuple[str, ...]:
    """Names of header fields, in lower case."""
    listed = texts(name, value, example)
    for own in listed:
        if not _TOKEN.fullmatch(own):
            raise ConfigError(
                f"{name} has {own!r}, which is not the name of a header field; write one such as {example!r}"
            )
    if len(listed) < least:
        raise ConfigError(
            f"{name} is empty, so no request would have a key; write a name such as {example!r}, or leave it out"
        )
    return tuple(own.lower() for own in listed)


# Fields that requests use for another purpose, in lower case.
_OTHER_FIELDS = frozenset({
    "accept", "authorization", "baggage", "cache-control", "connection", "cookie", "date", "depth", "destination",
    "digest", "dnt", "dpop", "expect", "forwarded", "from", "host", "http2-settings", "keep-alive", "link",
    "location", "max-forwards", "origin", "overwrite", "pragma", "prefer", "priority", "range", "referer",
    "save-data", "set-cookie", "te", "timeout", "traceparent", "tracestate", "trailer", "transfer-encoding",
    "upgrade", "user-agent", "via", "x-http-method-override", "x-real-ip", "x-requested-with",
})  # fmt: skip
_OTHER_PREFIXES = (
    "accept-", "access-control-", "content-", "if-", "oncegate-", "proxy-", "sec-", "upgrade-", "x-forwarded-",
)  # fmt: skip


def key_headers(name: str, value: Any) -> tuple[str, ...]:
    """Names of header fields that may have the key."""
    listed = names(name, value, "Idempotency-Key", least=1)
    for own in listed:
        if own in _OTHER_FIELDS or own.startswith(_OTHER_PREFIXES):
            raise ConfigError(
                f"{name} has {own!r}, which has another purpose, and many requests have the same value there; write the name of "
                "a field that has only keys, such as 'Idempotency-Key'"
            )
        if listed.count(own) > 1:
            raise ConfigError(f"{name} has {own!r} twice; write it once")
    return listed


def pointers(name: str, value: Any) -> tuple[str, ...]:
    """JSON pointers to members."""
    listed = texts(name, value, "/customer")
    for own in listed:
        if not own.startswith("/") or re.search(r"~(?![01])", own):
            raise ConfigError(f"{name} has {own!r}, which is not a JSON pointer; write one such as '/customer'")
    return listed


def methods(name: str, value: Any) -> frozenset[str]:
    """Methods that a key protects. A list that protects nothing is refused, and an unknown method is warned of."""
    listed = [own.upper() for own in texts(name, value, "POST")]
    if not listed:
        raise ConfigError(
            f"{name} is empty, so nothing would be protected; write a list such as ['POST', 'PATCH'], or leave it out"
        )
    for own in listed:
        if not _TOKEN.fullmatch(own):
            raise ConfigError(f"{name} has {own!r}, which is not a method; write a list such as ['POST', 'PATCH']")
        if own in _WITHOUT_EFFECT:
            raise ConfigError(
                f"{name} has {own!r}, which cannot be covered: a key protects requests that change something"
            )
        if own not in _METHODS:
            log.warning("%s: no registered method is called %r%s", name, own, did_you_mean(own, _METHODS))
    return frozenset(listed)


def statuses(name: str, value: Any) -> tuple[frozenset[int], tuple[str, ...]]:
    """Statuses of errors, and their classes."""
    single: set[int] = set()
    classes: list[str] = []
    for own in items(name, value, 422):
        is_number = isinstance(own, int | str) and not isinstance(own, bool) and re.fullmatch(r"[45]\d\d", str(own))
        if is_number:
            single.add(int(own))
        elif own in ("4xx", "5xx"):
            classes.append(own)
        else:
            raise ConfigError(
                f"{name} has {own!r}; write a status from 400 to 599 such as 422, '4xx', '5xx', or a list of them"
            )
    return frozenset(single), tuple(classes)


def service(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[!-~]{1,100}", value)):
        raise ConfigError(
            f"service is {value!r}; write a name of 1 to 100 visible ASCII characters without spaces, such as 'orders'"
        )
    return value


def check_shared(store: Any, name: str | None) -> None:
    """Refuses a store on a server without the name of the service: two services would get each other's responses."""
    if name is None and not getattr(store, "is_immediate", False):
        raise ConfigError(NO_SERVICE)
