"""The settings of a middleware: a profile, and the values that override it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from . import values
from ._contract import contract
from .errors import ConfigError
from .fingerprint import Rules
from .headers import KEPT, is_never_kept
from .ids import Ids
from .keys import Grammar
from .scope import CallerScope
from .values import choice, did_you_mean, flag, names, number, pointers, seconds, size

__all__ = ["Settings"]

DEFAULT_BUDGET = 256 * 1024 * 1024
# Reasons: nothing was decided about the operation.
UNDECIDED = frozenset({401, 403, 407, 408, 421, 425, 429})


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a middleware. Make them with :meth:`of`, which checks each value."""

    profile: str
    grammar: Grammar
    caller: CallerScope
    service: str | None
    ids: Ids
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
        base = profiles[choice("profile", profile, tuple(profiles))]
        known, given_names = ["profile"], frozenset(options)

        def take(name: str, default: Any) -> Any:
            known.append(name.replace("-", "_"))
            return options.pop(known[-1], default)

        def given(name: str) -> Any:
            return take(name, base.get(name))

        compared = base.get("fingerprint", {})
        body = choice(
            "fingerprint_body", take("fingerprint_body", compared.get("body")), ("canonical", "raw", "nothing")
        )
        rules = Rules(
            body == "raw",
            pointers("fingerprint_include", take("fingerprint_include", compared.get("include", ()))),
            pointers("fingerprint_exclude", take("fingerprint_exclude", compared.get("exclude", ()))),
        )
        natural = pointers("natural_key", take("natural-key", ()))
        if not natural and "natural_key" in given_names:
            raise ConfigError(
                "natural_key is empty, so no request would have a key; write a member such as '/order/id', or leave it out"
            )
        if len(natural) > 16:
            raise ConfigError(f"natural_key has {len(natural)} members; at most 16 are allowed")
        caller = CallerScope.of(take("scope", None))
        if natural and caller.allows_anonymous():
            raise ConfigError(
                "natural_key needs a scope that tells callers apart, because such keys are easy to guess: set scope to "
                "'required-header:NAME', 'required-cookie:NAME' or 'single-tenant'"
            )
        stored = names("stored_headers", take("stored-headers", ()), "x-request-id")
        for name in stored:
            if is_never_kept(name):
                raise ConfigError(f"stored_headers has {name!r}, which must not be stored and replayed")
        added = base.get("headers", {})
        own = {name.lower() for group in ("response", "kept-server-error") for name in added.get(group, {})}
        released, texts = values.statuses("release_statuses", given("release-statuses"))
        documentation = take("documentation", None)
        if documentation is not None and not re.fullmatch(
            r"(https?://|/(?!/))[!-;=?-~]+",
            values.text("documentation", documentation, "https://developer.example.com/keys"),
        ):
            raise ConfigError(
                f"documentation is {documentation!r}; write a URL such as 'https://developer.example.com/keys', or a path"
            )
        problems = "https://developer.example.com/problems/"
        problem_base = values.text("problem_base_url", take("problem-base-url", "urn:oncegate:problem:"), problems)
        if not re.fullmatch(r"[!-~]*[/#:]", problem_base):
            raise ConfigError(
                f"problem_base_url is {problem_base!r}; write a URL that ends with / or #, such as {problems!r}"
            )
        settings = cls(
            profile=profile,
            grammar=Grammar.of(given("key-syntax"), given("key-format")),
            caller=caller,
            service=values.service(take("service", None)),
            ids=Ids.of(take("id-secret", None)),
            key_headers=values.key_headers("key_header", given("key-header")),
            key_scope=choice("key_scope", given("key-scope"), ("endpoint", "caller")),
            key_scope_headers=names(
                "key_scope_header", take("key-scope-header", base.get("key-scope-header", ())), "x-account"
            ),
            methods=values.methods("methods", given("methods")),
            require_key=flag("require_key", given("require-key")),
            server_errors=choice("server_errors", given("server-errors"), ("replay", "release")),
            release_statuses=released,
            replay_statuses=_replay_statuses(take("replay-statuses", base.get("replay-statuses", {}))),
            replay_marker=_marker(given("replay-marker")),
            echo_key=flag("echo_key", given("echo-key")),
            authority=choice("authority", take("authority", "compare"), ("compare", "ignore", "scope")),
            exact_slash=choice("trailing_slash", take("trailing-slash", "ignore"), ("ignore", "exact")) == "exact",
            rules=rules,
            compare_body=body != "nothing",
            fingerprint_headers=names("fingerprint_headers", take("fingerprint_headers", ()), "x-version"),
            natural_key=natural,
            documentation=documentation,
            problem_base=problem_base,
            stored_headers=frozenset(stored) | own,
            headers=added,
            refusal=base["refusal"],
            max_request_body=size("max_request_body", take("max-request-body", 2 * 1024 * 1024)),
            max_response_body=size("max_response_body", take("max-response-body", 1024 * 1024)),
            retention=seconds("retention", given("retention"), 1, 400 * 86_400),
            lease=seconds("lease", take("lease", 30), 0.1, 3600),
            wait=seconds("wait", take("wait", 2), 0, 3600),
            on_abandoned=choice("on_abandoned", take("on-abandoned", "park"), ("park", "reexecute")),
            fails_open=choice("store_outage", take("store-outage", "closed"), ("closed", "open")) == "open",
            max_in_flight=number("max_in_flight", take("max-in-flight", 2048), 1),
            max_in_flight_per_caller=number("max_in_flight_per_caller", take("max-in-flight-per-caller", 1024), 1),
            request_budget=size("request_budget", take("request-budget", DEFAULT_BUDGET), 1),
            body_timeout=seconds("body_timeout", take("body-timeout", 60), 0.05, 3600),
            stream_timeout=seconds("stream_timeout", take("stream-timeout", 60), 0.05, 3600),
            store_timeout=seconds("store_timeout", take("store-timeout", 5), 0.05, 3600),
            release_texts=texts,
        )
        if options:
            unknown = ", ".join(map(repr, sorted(options)))
            hint = did_you_mean(sorted(options)[0], known)
            raise ConfigError(f"there is no setting {unknown}{hint or '; the README lists all settings'}")
        if settings.max_response_body > 64 * 1024 * 1024 - 1024 * 1024:
            raise ConfigError("max_response_body is larger than a record may be; use at most 63 MiB")
        return settings

    def frees_key(self, status: int) -> bool:
        """True if a response with this status decides nothing about the operation."""
        return status in UNDECIDED or status in self.release_statuses or f"{status // 100}xx" in self.release_texts


def _replay_statuses(value: Any) -> Mapping[int, int]:
    try:
        found = {int(one): int(other) for one, other in value.items()}
    except (AttributeError, TypeError, ValueError):
        found = {0: 0}
    for status in (*found, *found.values()):
        if not 200 <= status <= 599:
            raise ConfigError(
                f"replay_statuses is {value!r}; write a dictionary of statuses of responses "
                "and of their replays, such as {201: 200}"
            )
    return found


def _marker(value: Any) -> tuple[str, bytes]:
    name, _, own = values.text("replay_marker", value, "Idempotent-Replayed: true").partition(":")
    (name,) = names("replay_marker", name, "Idempotent-Replayed")
    if name in KEPT or is_never_kept(name):
        raise ConfigError(
            f"replay_marker has {name!r}, which has another purpose; write one such as 'Idempotent-Replayed: true'"
        )
    if not re.fullmatch(r"[ -~]*", own):
        raise ConfigError(f"replay_marker has the value {own!r}; write visible ASCII characters, such as 'true'")
    return name, own.strip().encode() or b"true"
