"""The identity of a caller, within which a key is unique."""

from __future__ import annotations

import inspect
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import credential
from .errors import ConfigError
from .headers import Field, get_all
from .values import did_you_mean, texts

_COOKIE_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
EXAMPLE = "scope=lambda request: request['session'].get('user')"
_SPACE = b" \t\n\r\x0c"


class NoCaller(Exception):
    """The request does not identify its caller. The text is for the client."""

    def __init__(self, detail: str, *, condition: str = "scope-unavailable", status: int | None = None) -> None:
        super().__init__(detail)
        self.condition = condition
        self.status = status


@dataclass(frozen=True, slots=True)
class _Part:
    kind: str
    source: Literal["header", "cookie", "host", "function"]
    name: str
    required: bool
    identify: Callable[[Any], Any] | None = None

    def shown(self) -> str:
        match self.source:
            case "header":
                return f"The header field {self.name}"
            case "cookie":
                return f"The cookie {self.name}"
            case "function":
                return "The identity of the caller"
            case _:
                return "The host"


@dataclass(frozen=True, slots=True)
class CallerScope:
    """The parts of a request that tell callers apart."""

    parts: tuple[_Part, ...]
    is_chosen: bool

    @classmethod
    def of(cls, scope: Any) -> CallerScope:
        """A scope by its names: `required-header:x-tenant`, `cookie:sid`, `host`, `single-tenant`, or a list of them.

        Or a function from the request of the framework to the identity of its caller.
        """
        if callable(scope) and not isinstance(scope, type):
            if inspect.iscoroutinefunction(scope):
                raise ConfigError(f"scope is a function that is async; write one that returns the identity: {EXAMPLE}")
            return cls((_Part("function", "function", "", True, scope),), True)
        if scope is None:
            return cls((_Part("header:authorization", "header", "authorization", False),), False)
        names = texts("scope", scope, "required-header:x-tenant")
        if names == ("single-tenant",):
            return cls((), True)
        parts: dict[str, _Part] = {}
        for name in names:
            own = _part(name)
            known = parts.get(own.kind)
            parts[own.kind] = _Part(
                own.kind, own.source, own.name, own.required or (known is not None and known.required)
            )
        if not parts:
            raise ConfigError("scope is empty; write 'single-tenant' if there is one caller only")
        return cls(tuple(sorted(parts.values(), key=lambda part: part.kind)), True)

    def advice(self) -> str | None:
        """What the operator should know about this scope at the start."""
        if not self.is_chosen:
            return (
                "scope is not set: Authorization tells callers apart, and a caller with another Authorization is another caller, "
                "so that a retry with a renewed token executes again. Requests with other credentials are refused"
            )
        for part in self.parts:
            is_credential = part.source == "cookie" or (part.source == "header" and credential.is_credential(part.name))
            if is_credential or part.name == "authorization":
                return (
                    f"scope has {part.kind}: a caller whose credential has changed is another caller, so that a retry with it "
                    "executes again. Tokens that are renewed and cookies that contain the session change: use a function that "
                    "returns the user"
                )
        return None

    def allows_anonymous(self) -> bool:
        return bool(self.parts) and not any(part.required and part.source != "host" for part in self.parts)

    def identify(
        self,
        headers: Sequence[Field],
        host: Callable[[], str],
        authority: str | None,
        key_headers: Iterable[str],
        request: Any = None,
    ) -> list[tuple[str, bytes]]:
        """The parts that identify the caller. Raises :class:`NoCaller`."""
        found: list[tuple[str, bytes]] = []
        if not self.parts and authority is None:
            return found
        for part in self.parts:
            value = _identity(part, headers, host) if part.identify is None else _of_function(part.identify(request))
            if value:
                found.append((part.kind, value))
            elif part.required:
                is_authorization = part.source == "header" and part.name == "authorization"
                raise NoCaller(
                    f"{part.shown()} is missing or empty, and the service tells callers apart by it. Nothing was executed "
                    "for this request.",
                    status=401 if is_authorization else None,
                )
        if not self.is_chosen:
            _check_doubt(headers, frozenset(key_headers), bool(found))
        if not found and self.parts:
            found.append(("anonymous", b""))
        if authority is not None:
            found.append(("authority", authority.encode()))
            found.sort(key=lambda pair: pair[0])
        return found


def _of_function(identity: Any) -> bytes | None:
    if identity is None or isinstance(identity, str):
        return (identity or "").encode() or None
    if isinstance(identity, int | uuid.UUID) and not isinstance(identity, bool):
        return str(identity).encode()
    if inspect.iscoroutine(identity):
        identity.close()
    raise ConfigError(
        f"the function of scope returned a {type(identity).__name__}; return a text or a whole number, or None if nothing "
        f"identifies the caller: {EXAMPLE}"
    )


def _part(name: str) -> _Part:
    source, colon, own = name.partition(":")
    required = source.startswith("required-")
    source = source.removeprefix("required-")
    if source == "header" and colon and _COOKIE_NAME.fullmatch(own):
        return _Part(f"header:{own.lower()}", "header", own.lower(), required)
    if source == "cookie" and colon and _COOKIE_NAME.fullmatch(own):
        return _Part(f"cookie:{own}", "cookie", own, required)
    if name == "host":
        return _Part("host", "host", "", True)
    hint = did_you_mean(name, ("single-tenant", "host"))
    if not hint and "-" in name and _COOKIE_NAME.fullmatch(name):
        # The name of a field, such as `X-Api-Key`.
        hint = f"; did you mean 'required-header:{name}'?"
    raise ConfigError(
        f"scope has {name!r}; use 'header:NAME', 'required-header:NAME', 'cookie:NAME', 'required-cookie:NAME', 'host', or "
        f"'single-tenant' alone{hint if name != 'single-tenant' else ''}"
    )


def _identity(part: _Part, headers: Sequence[Field], host: Callable[[], str]) -> bytes | None:
    repeated = NoCaller(
        f"{part.shown()} was sent more than once, or with a `_` instead of a `-` in its name, and the service tells callers "
        "apart by it. Nothing was executed for this request."
    )
    if part.source == "host":
        return host().encode()
    if part.source == "cookie":
        name = part.name.encode()
        pairs = [pair.partition(b"=") for line in get_all(headers, "cookie") for pair in line.split(b";")]
        values = {value.strip(_SPACE) for own, equals, value in pairs if equals and own.strip(_SPACE) == name}
        # Browsers send cookies of several paths under one name; the same value twice is one caller.
        if len(values) > 1:
            raise repeated
        return values.pop() if values else None
    lines = get_all(headers, part.name)
    others = (name for name, value in headers if credential.is_other_spelling(name, part.name) and value.strip(_SPACE))
    # The middleware does not know which line the service reads.
    if len(lines) > 1 or next(others, None) is not None:
        raise repeated
    if not lines:
        return None
    value = lines[0].strip(_SPACE)
    if part.name == "authorization" and value.lower() in credential.SCHEMES:
        return None
    return value


def _check_doubt(headers: Sequence[Field], key_headers: frozenset[str], is_authorized: bool) -> None:
    def refusal(what: str) -> NoCaller:
        return NoCaller(
            f"The request has {what}, and the service is not configured to tell callers apart by it: the setting `scope` is "
            "missing. Nothing was executed for this request.",
            condition="scope-not-set",
        )

    lines = get_all(headers, "authorization") if is_authorized else []
    authorization = lines[0].strip(_SPACE) if lines else b""
    if is_authorized and credential.is_new_each_time(authorization):
        raise refusal("an Authorization that is new each time, so that a retry would look like another caller")
    # A site behind one shared password: its browsers send the same `Basic` for all users, and a cookie for each.
    is_shared = authorization[:6].lower() == b"basic "
    for name, value in headers:
        if name in key_headers or not value.strip(_SPACE) or not credential.is_credential(name):
            continue
        if not is_authorized:
            raise refusal(f"the header field {name} and no Authorization")
        if not credential.changes_each_time(name) and (name not in ("cookie", "mcp-session-id") or is_shared):
            raise refusal(f"the header field {name} in addition to Authorization")
