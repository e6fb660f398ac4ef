"""The settings of a middleware: a profile, and the values that override it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ._contract import contract
from .errors import ConfigError
from .fingerprint import Rules
from .headers import is_never_kept
from .keys import Grammar
from .scope import CallerScope

__all__ = ["Settings"]

Duration = float | int | str
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
DEFAULT_BUDGET = 256 * 1024 * 1024
# Reasons: nothing was decided about the operation.
UNDECIDED = frozenset({401, 403, 407, 408, 421, 425, 429})


def seconds(name: str, value: Duration, least: float, most: float) -> float:
    """A duration: a number of seconds, or a text such as `30s`, `250ms`, `24h`."""
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        if not found:
            raise ConfigError(f"{name} is {value!r}; write a number of seconds, or a text such as '30s' or '250ms'")
        value = float(found[1]) * _UNITS[found[2]]
    if isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{name} is {value:g} seconds; it may be from {least:g} to {most:g}")
    return float(value)


def _choice(name: str, value: Any, choices: Sequence[str]) -> Any:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}; use one of {', '.join(map(repr, choices))}")
    return value


def _size(name: str, value: Any, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} is {value!r}; write a number of at least {least}")
    return value


def _names(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else tuple(value)
    for own in listed:
        if not isinstance(own, str) or not _TOKEN.fullmatch(own):
            raise ConfigError(f"{name} has {own!r}, which is not the name of a header field")
    return tuple(own.lower() for own in listed)


def _pointers(name: str, value: str | Iterable[str]) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else tuple(value)
    for own in listed:
        if not own.startswith("/") or re.search(r"~(?![01])", own):
            raise ConfigError(f"{name} has {own!r}, which is not a JSON pointer; write one such as '/customer'")
    return listed


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a middleware. Make them with :meth:`of`, which checks each value."""

    profile: str
    grammar: Grammar
    caller: CallerScope
    service: str | None
    key_headers: tuple[str, ...]
    key_scope: Literal["endpoint", "caller"]
    key_scope_headers: tuple[str, ...]
    methods: frozenset[str]
    require_key: bool
    server_errors: Literal["replay", "release"]
    release_statuses: frozenset[int]
    replay_statuses: Mapping[int, int]
    replay_marker: tuple[str, bytes]
    echo_key: bool
    authority: Literal["compare", "ignore", "scope"]
    exact_slash: bool
    rules: Rules
    compare_body: bool
    fingerprint_headers: tuple[str, ...]
    natural_key: tuple[str, ...]
    documentation: str | None
    problem_base: str
    stored_headers: frozenset[str]
    headers: Mapping[str, Mapping[str, str]]
    refusal: Mapping[str, Any]
    max_request_body: int
    max_response_body: int
    retention: float
    lease: float
    wait: float
    on_abandoned: Literal["park", "reexecute"]
    fails_open: bool
    max_in_flight: int
    max_in_flight_per_caller: int
    request_budget: int
    body_timeout: float
    stream_timeout: float
    store_timeout: float
    release_texts: tuple[str, ...] = field(default=())

    @classmethod
    def of(cls, *, profile: str = "ietf", **options: Any) -> Settings:
        """Settings with these values on top of a profile. Names are those of the sidecar's configuration, with `_` for
        `-` and `.`: `require_key`, `key_syntax`, `fingerprint_exclude`."""
        profiles = contract()["profiles"]
        base = profiles.get(profile)
        if base is None:
            raise ConfigError(f"there is no profile {profile!r}; use one of {', '.join(map(repr, profiles))}")

        def take(name: str, default: Any) -> Any:
            return options.pop(name.replace("-", "_"), default)

        def given(name: str) -> Any:
            return take(name, base.get(name))

        compared = base.get("fingerprint", {})
        body = _choice(
            "fingerprint_body", take("fingerprint_body", compared.get("body")), ("canonical", "raw", "nothing")
        )
        rules = Rules(
            body == "raw",
            _pointers("fingerprint_include", take("fingerprint_include", compared.get("include", ()))),
            _pointers("fingerprint_exclude", take("fingerprint_exclude", compared.get("exclude", ()))),
        )
        natural = _pointers("natural_key", take("natural-key", ()))
        if len(natural) > 16:
            raise ConfigError(f"natural_key has {len(natural)} members; at most 16 are allowed")
        caller = CallerScope.of(take("scope", None))
        if natural and caller.allows_anonymous():
            raise ConfigError(
                "natural_key needs a scope that tells callers apart, because such keys are easy to guess: set scope to "
                "'required-header:NAME', 'required-cookie:NAME' or 'single-tenant'"
            )
        marker, _, marker_value = str(given("replay-marker")).partition(":")
        stored = _names("stored_headers", take("stored-headers", ()))
        for name in stored:
            if is_never_kept(name):
                raise ConfigError(f"stored_headers has {name!r}, which must not be stored and replayed")
        added = base.get("headers", {})
        own = {name.lower() for group in ("response", "kept-server-error") for name in added.get(group, {})}
        released: set[int] = set()
        texts: list[str] = []
        for status in given("release-statuses"):
            if str(status).endswith("xx"):
                texts.append(str(status))
            else:
                released.add(int(status))
        service = take("service", None)
        if service is not None and not (isinstance(service, str) and 1 <= len(service) <= 100):
            raise ConfigError("service is not a name of 1 to 100 characters")
        documentation = take("documentation", None)
        if documentation is not None and not re.fullmatch(r"[!-~]+", documentation):
            raise ConfigError("documentation is not a URL")
        settings = cls(
            profile=profile,
            grammar=Grammar.of(given("key-syntax"), given("key-format")),
            caller=caller,
            service=service,
            key_headers=_names("key_header", given("key-header")),
            key_scope=_choice("key_scope", given("key-scope"), ("endpoint", "caller")),
            key_scope_headers=_names("key_scope_header", given("key-scope-header") or ()),
            methods=frozenset(method.upper() for method in given("methods")),
            require_key=bool(given("require-key")),
            server_errors=_choice("server_errors", given("server-errors"), ("replay", "release")),
            release_statuses=frozenset(released),
            replay_statuses={int(one): int(other) for one, other in (given("replay-statuses") or {}).items()},
            replay_marker=(_names("replay_marker", marker)[0], marker_value.strip().encode() or b"true"),
            echo_key=bool(given("echo-key")),
            authority=_choice("authority", take("authority", "compare"), ("compare", "ignore", "scope")),
            exact_slash=_choice("trailing_slash", take("trailing-slash", "ignore"), ("ignore", "exact")) == "exact",
            rules=rules,
            compare_body=body != "nothing",
            fingerprint_headers=_names("fingerprint_headers", take("fingerprint_headers", ())),
            natural_key=natural,
            documentation=documentation,
            problem_base=take("problem-base-url", "urn:oncegate:problem:"),
            stored_headers=frozenset(stored) | own,
            headers=added,
            refusal=base["refusal"],
            max_request_body=_size("max_request_body", take("max-request-body", 2 * 1024 * 1024)),
            max_response_body=_size("max_response_body", take("max-response-body", 1024 * 1024)),
            retention=seconds("retention", given("retention"), 1, 400 * 86_400),
            lease=seconds("lease", take("lease", 30), 0.1, 3600),
            wait=seconds("wait", take("wait", 2), 0, 3600),
            on_abandoned=_choice("on_abandoned", take("on-abandoned", "park"), ("park", "reexecute")),
            fails_open=_choice("store_outage", take("store-outage", "closed"), ("closed", "open")) == "open",
            max_in_flight=_size("max_in_flight", take("max-in-flight", 2048), 1),
            max_in_flight_per_caller=_size("max_in_flight_per_caller", take("max-in-flight-per-caller", 1024), 1),
            request_budget=_size("request_budget", take("request-budget", DEFAULT_BUDGET), 1),
            body_timeout=seconds("body_timeout", take("body-timeout", 60), 0.05, 3600),
            stream_timeout=seconds("stream_timeout", take("stream-timeout", 60), 0.05, 3600),
            store_timeout=seconds("store_timeout", take("store-timeout", 5), 0.05, 3600),
            release_texts=tuple(texts),
        )
        if options:
            unknown = ", ".join(map(repr, sorted(options)))
            raise ConfigError(f"there is no setting {unknown}; the README lists all settings")
        if settings.max_response_body > 64 * 1024 * 1024 - 1024 * 1024:
            raise ConfigError("max_response_body is larger than a record may be; use at most 63 MiB")
        return settings

    def frees_key(self, status: int) -> bool:
        """True if a response with this status decides nothing about the operation."""
        return status in UNDECIDED or status in self.release_statuses or f"{status // 100}xx" in self.release_texts
