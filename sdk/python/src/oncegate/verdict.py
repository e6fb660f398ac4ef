"""The meaning of a response to a client that sends a request again under one key. No other code judges a status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ._contract import contract
from .headers import get, get_all

Field = tuple[str, bytes]
Protection = Literal["keyed", "safe", "repeatable", "once"]
ServerErrors = Literal["again", "final", "unknown"]
Advice = Literal["same-key", "new-key", "fix-request", "stop"]
MAX_PROBLEM_BYTES = 64 * 1024
_NAMES = ("type", "code", "name", "error.code", "error.type")
_MCP_TYPE = "error.data.type"
_CODES = ("code", "error.code", "errorCode", "__type", "details[].issue", "errors[].code", _MCP_TYPE)
# After these, a request with a new key may be a second effect, and no other service uses the words for something else.
_CODED = ("outcome-unknown", "record-corrupt", "host-differs", "replay-unavailable")
_PROBLEMS = "urn:oncegate:problem:"
_ADVICE = ("same-key", "new-key", "fix-request", "stop")
_ABOUT_THE_WAY = frozenset({401, 403, 404, 405, 407, 411, 413, 417, 421, 426, 431, 501, 505, 511})


@dataclass(frozen=True, slots=True)
class Context:
    """What is known about a request when its response arrives."""

    protection: Protection
    server_errors: ServerErrors = "again"
    in_doubt: bool = False


Meaning = str
"""`done`, `refused ADVICE`, `turned-away`, `failed`, `unreplayable` are definite. `again nothing`, `again maybe` and `again
in-progress` say that the same request may get another response, and what the attempt may have done. `unknown`, `contested`
and `turned-away in-doubt` are the others."""


def judge(context: Context, status: int, headers: Sequence[Field], body: bytes) -> Meaning:
    """The meaning of a response. Names of header fields are in lower case."""
    # A safe request has no effect, so it is never in doubt.
    in_doubt = context.in_doubt and context.protection != "safe"
    kind, meaning = _read(context, status, headers, body)
    if kind == "plain" or not in_doubt:
        return meaning
    # A service that marks replays will mark this refusal when the request is sent again. Without a key there is no replay.
    if kind == "refused" and context.protection == "keyed":
        return "contested"
    return "turned-away in-doubt"


_Reading = tuple[Literal["plain", "refused", "before"], Meaning]


def _read(context: Context, status: int, headers: Sequence[Field], body: bytes) -> _Reading:
    protection, server_errors = context.protection, context.server_errors
    form = _form(status, headers, body)
    is_own = form == "own"
    code = 502 if 200 <= status <= 299 and form in ("own", "other-call") else status
    keyed = protection == "keyed"
    if code <= 299 or code == 303:
        return "plain", "done"
    if code in (301, 302, 304):
        # Old services redirect after the operation, gateways instead of it.
        return "plain", "done" if protection == "safe" else "unknown"
    if code <= 399:
        return "before", "turned-away"
    hint = _hint(status, headers, body)
    signal = hint.signal
    if keyed and signal == "Replayed":
        return "plain", "failed" if code >= 500 else "refused fix-request"
    if keyed and signal == "Accepted" and code < 500:
        return "plain", "refused fix-request"
    if signal == "InProgress":
        doubt = "in-progress"
    elif (signal == "NotExecuted" and (is_own or (keyed and hint.has_usual_status))) or code in (425, 429):
        doubt = "nothing"
    else:
        doubt = "maybe"
    retry = hint.retry
    if retry == "same-key":
        return "plain", f"again {doubt}"
    if retry is not None:
        if signal == "ScopeUnavailable" and (code < 500 or is_own):
            return "before", "turned-away"
        if retry == "stop":
            if signal == "ReplayUnavailable":
                return "plain", "unreplayable"
            if signal == "OutcomeUnknown" or code >= 500:
                return "plain", "unknown"
            return "before", "refused stop"
        if code in _ABOUT_THE_WAY:
            return "before", "turned-away"
        if code < 500 or is_own:
            return "before", f"refused {retry}"
    if keyed:
        if signal in ("InProgress", "Again"):
            return "plain", f"again {doubt}"
        if signal == "ReplayUnavailable":
            return "plain", "unreplayable"
        if signal == "KeyReused" and code < 500:
            return "before", "refused new-key"
        if signal == "ScopeUnavailable" and code < 500:
            return "before", "turned-away"
    if signal == "OutcomeUnknown":
        return "plain", "unknown"
    should_retry = get(headers, "stripe-should-retry")
    if should_retry == b"true":
        return "plain", f"again {doubt}"
    if should_retry == b"false":
        if code in _ABOUT_THE_WAY:
            return "before", "turned-away"
        if code < 500:
            return "refused", "refused stop"
        return "plain", "failed" if server_errors == "final" else "unknown"
    return _by_status(code, doubt, context, is_named=hint.is_named)


def _by_status(code: int, doubt: str, context: Context, *, is_named: bool) -> _Reading:
    if code == 408:
        return "plain", "again maybe"
    # Without a name, a conflict or a lock under a key may mean a request in progress.
    if code in (409, 423) and context.protection == "keyed" and not is_named:
        return "plain", "again in-progress"
    if code in (425, 429):
        return "plain", "again nothing"
    if code in _ABOUT_THE_WAY:
        return "before", "turned-away"
    if code in (414, 415):
        return "before", "refused fix-request"
    if code <= 499:
        return "refused", "refused fix-request"
    if code in (502, 503, 504):
        return "plain", f"again {doubt}"
    if context.server_errors == "final":
        return "plain", "failed"
    if context.protection == "once" or context.server_errors == "unknown":
        return "plain", "unknown"
    return "plain", f"again {doubt}"


# Refusals of Oncegate, which name their condition in a field


def own_refusal(headers: Sequence[Field]) -> tuple[str, Advice | None] | None:
    """The condition and the advice in the field `Idempotency-Status`."""
    values = get_all(headers, "idempotency-status")
    # A gateway may have joined two fields.
    if len(values) != 1 or b"," in values[0]:
        return None
    first, *parts = (part.strip() for part in values[0].decode("latin-1").split(";"))
    if first != "refused":
        return None
    named = [part.partition("=") for part in parts]
    words = {name: value for name, equals, value in reversed(named) if equals}
    problem = words.get("problem")
    return (problem, _advice(words.get("retry"))) if problem else None


def _advice(word: Any) -> Advice | None:
    return word if word in _ADVICE else None


def _statuses(problem: str) -> Mapping[str, list[int]] | None:
    return next((row for row in contract()["problem_statuses"] if row["problem"] == problem), None)


def _form(status: int, headers: Sequence[Field], body: bytes) -> Literal["none", "other", "other-call", "own"]:
    """How a response compares with the refusal in its field: a service may pass the field on from another API."""
    own = own_refusal(headers)
    if own is None:
        return "none"
    problem = own[0]
    row = _statuses(problem)
    if not 200 <= status <= 299:
        return "own" if row and status in row["http"] else "other"
    if (get(headers, "content-type") or b"")[:16].lower() == b"application/grpc":
        text = get(headers, "grpc-status") or b""
        code = int(text) if text.isdigit() else 0
        if code == 0:
            return "other"
        return "own" if row and code in row["grpc"] else "other-call"
    message = _json(headers, body)
    if message is None or not _is_failed_call(message):
        return "other"
    named = _member(message, "result", "_meta", "oncegate/problem", "type")
    if named is None:
        named = _member(message, "error", "data", "type")
    return "own" if isinstance(named, str) and _end(named) == problem else "other-call"


def _member(value: Any, *names: str) -> Any:
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _is_failed_call(message: dict[str, Any]) -> bool:
    is_error = _member(message, "result", "isError") is True
    return "jsonrpc" in message and (is_error or isinstance(message.get("error"), dict))


# Hints in a response, beyond its status


@dataclass(frozen=True, slots=True)
class _Hint:
    signal: str | None
    retry: Advice | None
    is_named: bool
    has_usual_status: bool


def _hint(status: int, headers: Sequence[Field], body: bytes) -> _Hint:
    rules = contract()["signals"]
    own = own_refusal(headers)
    if own is not None:
        signal = next((rule["signal"] for rule in rules if rule["at"].get("problem") == own[0]), None)
        return _Hint(signal, own[1], is_named=True, has_usual_status=False)
    value = _json(headers, body)
    rule = next((rule for rule in rules if _applies(rule, status, headers, value)), None)
    is_named = value is not None and any(
        _any(value, path, lambda name: name not in ("", "about:blank")) for path in _NAMES
    )
    problem = rule["at"].get("problem") if rule else None
    row = _statuses(problem) if problem else None
    return _Hint(
        rule["signal"] if rule else None,
        _advice(value.get("retry")) if value is not None else None,
        is_named,
        bool(row and status in row["http"]),
    )


def _json(headers: Sequence[Field], body: bytes) -> dict[str, Any] | None:
    essence = (get(headers, "content-type") or b"").decode("latin-1").partition(";")[0].strip().lower()
    # The JSON protocols of AWS have media types of their own.
    is_json = (
        essence == "application/json" or essence.endswith("+json") or essence.startswith("application/x-amz-json-")
    )
    if not is_json or len(body) > MAX_PROBLEM_BYTES:
        return None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _applies(rule: Mapping[str, Any], status: int, headers: Sequence[Field], body: dict[str, Any] | None) -> bool:
    at = rule["at"]
    if "header" in at:
        value = get(headers, at["header"])
        if "value" in at:
            return value is not None and value.lower() == at["value"].lower().encode()
        return value is not None and status != at["unless_status"]
    if body is None:
        return False
    if "member" in at:
        return _any(body, at["member"], lambda value: value == at["value"])
    if "name" in at:
        name = at["name"]
        return any(_any(body, path, lambda value: name in (value, _end(value))) for path in _NAMES)
    problem = at["problem"]
    if _any(body, "type", lambda uri: uri == _PROBLEMS + problem):
        return True
    is_named = any(_any(body, path, lambda value: _end(value) == problem) for path in (*_NAMES, _MCP_TYPE))
    if is_named and (rule["signal"] != "NotExecuted" or body.get("retry") == "same-key"):
        return True
    return problem in _CODED and any(
        _any(body, path, lambda code: _plain(_end(code)) == _plain(problem)) for path in _CODES
    )


def _plain(code: str) -> str:
    return code.replace("-", "").replace("_", "").lower()


def _end(uri: str) -> str:
    """The last part of the URI of a problem, which is its name."""
    return uri.replace("/", ":").replace("#", ":").rpartition(":")[2]


def _any(value: Any, path: str, passes: Callable[[str], bool]) -> bool:
    """True if a text or number at this path passes."""
    first, _, rest = path.partition(".")
    if not first:
        if isinstance(value, str):
            return passes(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and passes(json.dumps(value))
    if not isinstance(value, dict):
        return False
    if first.endswith("[]"):
        elements = value.get(first[:-2])
        return isinstance(elements, list) and any(_any(element, rest, passes) for element in elements)
    return first in value and _any(value[first], rest, passes)
