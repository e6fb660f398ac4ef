"""What happens to a request with a key, without any input or output: the same for every framework."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from . import credential, paths
from .fingerprint import MissingMember, NotJson, decode_body, fingerprint, natural_key, parts_fingerprint
from .headers import MAX_KEPT_FIELDS, Field, get, get_all, kept, put, restored, without
from .identity import caller_tag, key_tag, record_id
from .keys import DIFFERING, OTHER_SPELLING, SEVERAL, UNREADABLE, KeyFieldError
from .refusal import Answer, Refusal, add_fields
from .response import StoredResponse
from .scope import NoCaller
from .settings import Settings

HOST_BYTES = 10
_EFFECT_FREE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE", "CONNECT"})
MAX_OPERATION_BYTES = 256

REUSED_MEMBERS = (
    "The key of this operation is built from members of its JSON body. Another request had the same members and differed in "
    "other parts. Nothing was executed. A request for another operation must differ in these members."
)
Treatment = Literal["replay", "release", "tombstone", "unknown"]


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a request. The path is as it was sent, percent-encoded. Names of fields are in lower case."""

    method: str
    path: str
    query: str | None
    headers: list[Field]
    authority: str | None = None

    def host(self) -> str:
        """The host in lower case, without a default port."""
        if self.authority is not None:
            host = self.authority.lower()
        else:
            host = b", ".join(get_all(self.headers, "host")).decode("utf-8", "replace").strip().lower()
        host = host.rpartition("@")[2]
        # TLS may have ended in a proxy in front, so both ports are default ports.
        for port in (":80", ":443", ":"):
            if host.endswith(port):
                return host.removesuffix(port)
        return host


@dataclass(slots=True)
class Keyed:
    """A request with a key, of which the body is not read yet."""

    settings: Settings
    head: Head
    key: str | None
    caller: list[tuple[str, bytes]]
    echo: Field | None = None

    def refuse(self, refusal: Refusal) -> Answer:
        return self.echoed(refusal.answer(self.settings))

    def echoed(self, answer: Answer) -> Answer:
        if self.echo is None:
            return answer
        return Answer(answer.status, put(answer.headers, *self.echo), answer.body, answer.problem)


@dataclass(frozen=True, slots=True)
class Operation:
    """What is claimed."""

    record: bytes
    fingerprint: bytes
    caller_tag: bytes
    key_tag: bytes
    name: str
    key: str = field(repr=False)


def may_have_key(settings: Settings, head: Head) -> bool:
    """False if the request passes without a look at its body."""
    names = {name for name, _ in head.headers}
    return (
        bool(settings.natural_key)
        or any(name in names for name in settings.key_headers)
        or _is_misspelt(settings, names)
    )


def _is_misspelt(settings: Settings, names: set[str]) -> bool:
    own = settings.key_headers
    return any(name not in own and any(credential.is_other_spelling(name, key) for key in own) for name in names)


def begin(settings: Settings, head: Head) -> Keyed | Answer | None:
    """Looks at the head of a request. None: it passes. An answer: it is refused. Otherwise its body has to be read."""
    method = head.method.upper()
    has_path = head.path.startswith("/")
    if not has_path and method not in _EFFECT_FREE:
        detail = "Nothing was executed. The target of the request is not a path."
        return Refusal("request-malformed", detail).answer(settings)
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
        keyed.caller = settings.caller.identify(head.headers, head.host(), authority, settings.key_headers)
    except NoCaller as error:
        return keyed.refuse(Refusal(error.condition, str(error), status=error.status))
    return None


def _key_in_head(settings: Settings, head: Head) -> tuple[str | None, Field | None]:
    if _is_misspelt(settings, {name for name, _ in head.headers}):
        raise KeyFieldError(OTHER_SPELLING)
    fields = [(name, lines) for name in settings.key_headers if (lines := get_all(head.headers, name))]
    if any(len(lines) > 1 for _, lines in fields):
        raise KeyFieldError(SEVERAL)
    if not fields:
        return None, None
    keys = {settings.grammar.parse(lines[0]) for _, lines in fields}
    if len(keys) > 1:
        raise KeyFieldError(DIFFERING)
    echo = (fields[0][0], fields[0][1][0]) if settings.echo_key else None
    return keys.pop(), echo


def identify(keyed: Keyed, body: bytes) -> Operation | Answer | None:
    """Looks at the body of a request. None: it has no key and needs none, so it passes."""
    settings, head = keyed.settings, keyed.head
    codings = get_all(head.headers, "content-encoding")
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
        record_id(settings.service, keyed.caller, parts, own_key),
        _fingerprint(settings, head, path, content_type, coding, decoded),
        caller_tag(keyed.caller),
        key_tag(own_key),
        _cut(f"{method} {path}"),
        key,
    )


def _cut(name: str) -> str:
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
    if settings.authority != "compare":
        return digest
    # The last bytes are those of the host, so that a request to another host can be told from another request.
    return digest[:-HOST_BYTES] + parts_fingerprint("host", [head.host().encode()])[-HOST_BYTES:]


def differs_in_host_only(stored: bytes, own: bytes) -> bool:
    return stored != own and stored[:-HOST_BYTES] == own[:-HOST_BYTES]


def retry_after(lease_left: float, running_for: float) -> int:
    """The seconds after which a client should ask again: as long as the request has been running, from 1 to 5."""
    return max(1, min(int(running_for), 5, -int(-lease_left // 1)))


# Responses

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
    lines = [value.strip().lower() for value in get_all(headers, "idempotency-store")]
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
_AGAIN = "Send the same request with the same key later."
BUDGET_USED_UP = f"Nothing was executed: the memory for the bodies of requests is used up. {_AGAIN}"
STORE_FULL = (
    "The store takes no new keys at the moment: it is full, it cannot write, or too many earlier requests have no recorded end "
    "yet. Requests with keys that it already has may still be answered. Nothing was executed. Send the same request with the "
    "same key later."
)
