"""What happens to a request with a key, without any input or output: the same for every framework."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal
from urllib.parse import urlsplit

from . import credential, paths
from .fingerprint import MissingMember, NotJson, decode_body, fingerprint, natural_key, parts_fingerprint
from .headers import MAX_KEPT_FIELDS, Field, get, get_all, kept, put, restored, without
from .ids import Ids
from .keys import DIFFERING, OTHER_SPELLING, SEVERAL, UNREADABLE, KeyFieldError
from .refusal import Answer, Refusal, add_fields
from .response import StoredResponse
from .scope import NoCaller
from .settings import Settings
from .values import Throttle

HOST_BYTES = 10
NOT_SET, SIDECAR = Throttle(), Throttle()
_EFFECT_FREE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})
MAX_OPERATION_BYTES = 256

REUSED_MEMBERS = (
    "The key of this operation is built from members of its JSON body. Another request had the same members and differed in "
    "other parts. Nothing was executed. A request for another operation must differ in these members."
)
Treatment = Literal["replay", "release", "tombstone", "unknown"]


@dataclass(slots=True)
class Head:
    """The head of a request. It does not change.

    The path is as it was sent, percent-encoded. Names of fields are in lower case.
    """

    method: str
    path: str
    query: str | None
    headers: list[Field]
    authority: str | None = None
    request: Any = field(default=None, repr=False, compare=False)
    """The request as the framework has it: the scope of ASGI, the environ of WSGI, or the request of Django."""

    def host(self) -> str:
        """The host in lower case, without a default port."""
        if self.authority is not None:
            host = self.authority.lower()
        else:
            host = b", ".join(get_all(self.headers, "host")).decode("utf-8", "replace").strip().lower()
        if "@" in host:
            host = host.rpartition("@")[2]
        if not host.endswith(("0", "3", ":")):
            return host
        # TLS may have ended in a proxy in front, so both ports are default ports.
        for port in (":80", ":443", ":"):
            if host.endswith(port):
                return host.removesuffix(port)
        return host


def _for_sidecar(head: Head, refused: Answer) -> Answer:
    """The refusal of a request that comes through a sidecar: the sidecar does not keep it as the response of the operation."""
    if get(head.headers, "oncegate-record") is None:
        return refused
    SIDECAR.warn(
        "requests with a key come through a sidecar, which has claimed the key already. Use the sidecar or the middleware for a "
        "path, and not both; oncegate.sidecar_attempt has the attempt of the sidecar"
    )
    return Answer(refused.status, put(refused.headers, "idempotency-store", b"release"), refused.body, refused.problem)


@dataclass(slots=True)
class Keyed:
    """A request with a key, of which the body is not read yet."""

    settings: Settings
    head: Head
    key: str | None
    caller: list[tuple[str, bytes]]
    echo: Field | None = None

    def refuse(self, refusal: Refusal) -> Answer:
        return self.echoed(_for_sidecar(self.head, refusal.answer(self.settings)))

    def echoed(self, answer: Answer) -> Answer:
        if self.echo is None:
            return answer
        return Answer(answer.status, put(answer.headers, *self.echo), answer.body, answer.problem)


@dataclass(slots=True)
class Operation:
    """What is claimed. It does not change."""

    record: bytes
    fingerprint: bytes
    caller_tag: bytes
    key_tag: bytes
    name: str
    key: str = field(repr=False)


def may_have_key(settings: Settings, head: Head) -> bool:
    """False if the request passes without a look at its body."""
    own = settings.key_headers
    return bool(settings.natural_key) or any(name in own for name, _ in head.headers) or _is_misspelt(own, head.headers)


def _is_misspelt(own: tuple[str, ...], headers: list[Field]) -> bool:
    for key in own:
        size = len(key)
        for name, _ in headers:
            if len(name) == size and name not in own and credential.is_other_spelling(name, key):
                return True
    return False


def begin(settings: Settings, head: Head) -> Keyed | Answer | None:
    """Looks at the head of a request. None: it passes. An answer: it is refused. Otherwise its body has to be read."""
    method = head.method.upper()
    has_path = head.path.startswith("/")
    if not has_path and method not in _EFFECT_FREE:
        detail = "Nothing was executed. The target of the request is not a path."
        return _for_sidecar(head, Refusal("request-malformed", detail).answer(settings))
    if method not in settings.methods or not has_path:
        return None
    if not may_have_key(settings, head) and not settings.require_key:
        return None
    keyed = Keyed(settings, head, None, [])
    error: KeyFieldError | None = None
    if not settings.natural_key:
        try:
            keyed.key, keyed.echo = _key_in_head(settings, head)
        except KeyFieldError as malformed:
            error = malformed
    if not (settings.natural_key and not settings.require_key):
        # A request without a key need not identify its caller.
        refusal = _identify(keyed)
        if refusal is not None:
            return refusal
    if error is not None:
        return keyed.refuse(Refusal("key-invalid", key_detail=settings.grammar.explain(error)))
    if keyed.key is None and not settings.natural_key:
        return keyed.refuse(Refusal("key-missing"))
    return keyed


def _identify(keyed: Keyed) -> Answer | None:
    settings, head = keyed.settings, keyed.head
    authority = head.host() if settings.authority == "scope" else None
    try:
        keyed.caller = settings.caller.identify(head.headers, head.host, authority, settings.key_headers, head.request)
    except NoCaller as error:
        if error.condition == "scope-not-set":
            NOT_SET.warn("a request was refused (scope-not-set): set `scope` to what tells callers apart. %s", error)
        return keyed.refuse(Refusal(error.condition, str(error), status=error.status))
    return None


def _key_in_head(settings: Settings, head: Head) -> tuple[str | None, Field | None]:
    if _is_misspelt(settings.key_headers, head.headers):
        raise KeyFieldError(OTHER_SPELLING)
    fields = [(name, lines) for name in settings.key_headers if (lines := get_all(head.headers, name))]
    if any(len(lines) > 1 for _, lines in fields):
        raise KeyFieldError(SEVERAL)
    if not fields:
        return None, None
    (name, (line,)), *others = fields
    key = settings.grammar.parse(line)
    if any(settings.grammar.parse(lines[0]) != key for _, lines in others):
        raise KeyFieldError(DIFFERING)
    return key, (name, line) if settings.echo_key else None


def identify(keyed: Keyed, body: bytes) -> Operation | Answer | None:
    """Looks at the body of a request. None: it has no key and needs none, so it passes."""
    settings, head = keyed.settings, keyed.head
    codings = get_all(head.headers, "content-encoding")
    decoded, coding = body, ""
    if codings:
        decoded, coding = decode_body(b", ".join(codings), len(codings), body, settings.max_request_body)
    content_type = b", ".join(get_all(head.headers, "content-type"))
    key = keyed.key
    if settings.natural_key:
        found = _natural_key(keyed, content_type, decoded, coding)
        if isinstance(found, Refusal):
            if found.condition == "key-missing" and not settings.require_key:
                return None
            return keyed.refuse(found)
        key = found
        if not settings.require_key:
            refusal = _identify(keyed)
            if refusal is not None:
                return refusal
        if settings.key_headers:
            keyed.echo = (settings.key_headers[0], f'"{key}"'.encode())
    if key is None:
        return keyed.refuse(Refusal("key-missing"))
    method = head.method.upper()
    path = paths.canonical(head.path, exact_slash=settings.exact_slash)
    parts = [method.encode(), path.encode()] if settings.key_scope == "endpoint" else []
    for name in settings.key_scope_headers:
        lines = [value for own, value in head.headers if own == name or credential.is_other_spelling(own, name)]
        parts += [name.encode(), b", ".join(lines)]
    own_key = key.encode()
    return Operation(
        settings.ids.record(settings.service, keyed.caller, parts, own_key),
        _fingerprint(settings, head, path, content_type, coding, decoded),
        settings.ids.caller_tag(keyed.caller),
        settings.ids.key_tag(own_key),
        _cut(f"{method} {path}"),
        key,
    )


def _cut(name: str) -> str:
    if name.isascii():
        return name[:MAX_OPERATION_BYTES]
    return name.encode()[:MAX_OPERATION_BYTES].decode("utf-8", "ignore")


def _natural_key(keyed: Keyed, content_type: bytes, body: bytes, coding: str) -> str | Refusal:
    settings = keyed.settings
    unreadable = Refusal("key-invalid", key_detail=settings.grammar.explain(KeyFieldError(UNREADABLE)))
    if coding and body:
        return unreadable

    def missing(why: str) -> Refusal:
        members = ", ".join(sorted(set(settings.natural_key)))
        return Refusal(
            "key-missing",
            f"The key of this operation is built from members of its JSON body ({members}), and {why}. Nothing was executed.",
        )

    start = body.removeprefix(b"\xef\xbb\xbf").lstrip(bytes(range(33)) + b"\xfe\xff")[:1]
    if not ((b"json" in content_type.lower() and body) or start in (b"{", b"[")):
        return missing("the body is no JSON that every program reads alike")
    # It is read whatever its type, unless the type names another charset.
    parameters = content_type[content_type.find(b";") :] if b";" in content_type else b""
    try:
        return natural_key(settings.natural_key, b"application/json" + parameters, body)
    except NotJson:
        return unreadable
    except MissingMember as error:
        return missing(f"the body has no member {error}")


def _fingerprint(settings: Settings, head: Head, path: str, content_type: bytes, coding: str, body: bytes) -> bytes:
    target = path if head.query is None else f"{path}?{head.query}"
    fields = [(name, value) for name in settings.fingerprint_headers for value in get_all(head.headers, name)]
    fields += [(name, value) for name, value in head.headers if credential.is_override(name)]
    if settings.compare_body:
        digest = fingerprint(
            head.method.upper(),
            target,
            headers=fields,
            content_type=content_type,
            content_coding=coding,
            body=body,
            rules=settings.rules,
        )
    else:
        digest = fingerprint(head.method.upper(), target, headers=fields)
    own = settings.ids.fingerprint(digest)
    if settings.authority != "compare":
        return own
    # The last bytes are those of the host, so that a request to another host can be told from another request.
    host = head.host()
    return own[:-HOST_BYTES] + (_usual_host_end if len(host) <= 64 else _host_end)(settings.ids, host)


def _host_end(ids: Ids, host: str) -> bytes:
    return ids.fingerprint(parts_fingerprint("host", [host.encode()]))[-HOST_BYTES:]


_usual_host_end = lru_cache(maxsize=256)(_host_end)


def differs_in_host_only(stored: bytes, own: bytes) -> bool:
    return stored != own and stored[:-HOST_BYTES] == own[:-HOST_BYTES]


def retry_after(lease_left: float, running_for: float) -> int:
    """The seconds after which a client should ask again: as long as the request has been running, from 1 to 5."""
    return max(1, min(int(running_for), 5, -int(-lease_left // 1)))


# Responses

_NOT_IN_FIELDS = re.compile(rb"[\r\n\0]")
_DIRECTIVES = frozenset({b"replay", b"release", b"tombstone", b"unknown"})


@dataclass(slots=True)
class Executed:
    """The head of the handler's response, and what is done with it."""

    status: int
    headers: list[Field]
    treatment: Treatment
    is_kept_server_error: bool


def passed(settings: Settings, headers: list[Field]) -> list[Field]:
    """The fields of a response that passes without protection."""
    return without(headers, "idempotency-store", "idempotency-status")


def executed(settings: Settings, path: str, status: int, headers: list[Field]) -> Executed:
    """Decides what is done with a handler's response, by its head."""
    if any(_NOT_IN_FIELDS.search(value) for _, value in headers):
        # No server sends these characters, so that each replay would fail.
        headers = [(name, _NOT_IN_FIELDS.sub(b" ", value)) for name, value in headers]
    lines = [value.strip().lower() for name, value in headers if name == "idempotency-store"]
    directive = lines[0] if lines and lines[0] in _DIRECTIVES and len(set(lines)) == 1 else None
    headers = passed(settings, headers)
    treatment = _treatment(settings, path, status, headers, directive)
    headers = add_fields(headers, settings.headers.get("response", {}))
    is_kept_server_error = treatment == "replay" and 500 <= status <= 599
    if treatment == "replay" and _cannot_be_stored(status, headers):
        treatment = "tombstone"
    if is_kept_server_error:
        headers = add_fields(headers, settings.headers.get("kept-server-error", {}))
    headers = without(headers, settings.replay_marker[0])
    return Executed(status, headers, treatment, is_kept_server_error)


def _treatment(settings: Settings, path: str, status: int, headers: list[Field], directive: bytes | None) -> Treatment:
    match directive:
        case b"replay" | b"release" | b"tombstone" | b"unknown":
            return directive.decode()  # type: ignore[return-value]
    if _redirects_to_itself(settings, path, status, headers) or settings.frees_key(status):
        return "release"
    if 500 <= status <= 599 and settings.server_errors == "release":
        return "release"
    return "replay"


def _redirects_to_itself(settings: Settings, path: str, status: int, headers: list[Field]) -> bool:
    """True for a redirect to another spelling of the path, or to another host. It is not the outcome of the operation."""
    if status not in (301, 307, 308):
        return False
    location = get(headers, "location")
    if location is None:
        return False
    try:
        target = urlsplit(location.decode("latin-1"))
    except ValueError:
        return False
    if not target.path.startswith("/"):
        return False
    same = paths.canonical(target.path, exact_slash=settings.exact_slash) == paths.canonical(
        path, exact_slash=settings.exact_slash
    )
    return same and (status != 301 or target.path != path)


def _cannot_be_stored(status: int, headers: list[Field]) -> bool:
    essence = (get(headers, "content-type") or b"").partition(b";")[0].strip().lower()
    return (
        status == 101
        or essence in (b"text/event-stream", b"multipart/x-mixed-replace")
        or essence.startswith(b"application/grpc")
    )


def stored(settings: Settings, response: Executed, body: bytes) -> StoredResponse | None:
    """The response as the record keeps it. None if it cannot be kept."""
    fields = kept(response.headers, settings.stored_headers)
    if len(fields) > MAX_KEPT_FIELDS or len(body) > settings.max_response_body:
        return None
    return StoredResponse(response.status, tuple(fields), body)


def replayed(keyed: Keyed, response: StoredResponse) -> Answer:
    """The answer to a retry."""
    settings = keyed.settings
    headers = restored(response.headers)
    own = settings.headers.get("response", {})
    if any(get(headers, name.lower()) is None for name in own):
        headers = add_fields(headers, own)
    headers = put(headers, *settings.replay_marker)
    status = settings.replay_statuses.get(response.status, response.status)
    return keyed.echoed(Answer(status, headers, response.body))


def marked(keyed: Keyed, headers: list[Field], mark: str | None) -> list[Field]:
    """The fields of an executed request's response, with the mark of what is unusual about it."""
    if mark is not None:
        headers = put(headers, "idempotency-status", mark.encode())
    return put(headers, *keyed.echo) if keyed.echo else headers


def sent(answer: Answer) -> list[Field]:
    """The fields of an answer as they are sent, with the length of its body."""
    if answer.status in (204, 304) or get(answer.headers, "content-length") is not None:
        return answer.headers
    return [*answer.headers, ("content-length", str(len(answer.body)).encode())]


def too_large(keyed: Keyed) -> Answer:
    limit = keyed.settings.max_request_body
    text = "Nothing was executed. Send a smaller body."
    return keyed.refuse(Refusal("request-too-large", f"{text} At most {limit} bytes are accepted."))


def overloaded(keyed: Keyed, detail: str) -> Answer:
    return keyed.refuse(Refusal("overloaded", detail, retry_after=1))


TOO_MANY = (
    "Nothing was executed: too many requests with a key are in progress, or too many responses wait for their clients. Send "
    "the same request with the same key later."
)
NO_LENGTH = (
    "Nothing was executed: the request has no Content-Length, and the server of this service cannot tell where its body ends. "
    "Send the field Content-Length."
)
SAME_RECORD = (
    "Nothing was executed. A sidecar of Oncegate in front of the service and the service itself use one store and one name of "
    "the service, so each waits for the other. The operator of the service has to leave the protection to one of them."
)
_AGAIN = "Send the same request with the same key later."
BUDGET_USED_UP = f"Nothing was executed: the memory for the bodies of requests is used up. {_AGAIN}"
STORE_FULL = (
    "The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end "
    "yet. Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the "
    "same key later."
)
