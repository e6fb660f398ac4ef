"""The fingerprint of a request: what makes two requests the same one.

JSON is compared by RFC 8785, forms by their pairs, multipart by its parts, and everything else byte for byte. A body whose
canonical form would make different bodies equal is compared byte for byte as well.
"""

from __future__ import annotations

import decimal
import hashlib
import json
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from json.encoder import encode_basestring
from typing import Any, Final

from .identity import count, part

__all__ = ["Rules", "fingerprint", "natural_key", "parts_fingerprint"]

VERSION: Final = b"\x01"
MAX_SAFE_INTEGER = 2**53 - 1
MAX_DEPTH = 128
MAX_PAIRS = 16_384
MAX_MULTIPART_ITEMS = 16_384
MAX_DECODED_RATIO = 100
DECODED_FREE = 64 * 1024
TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"


class NotCanonical(Exception):
    """The body has no canonical form."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The parts of a body that are compared: JSON pointers to members that count, and to members that do not."""

    raw_bodies: bool = False
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()


# Media types

_ESSENCE = re.compile(rb"(%b)/(%b)[ \t]*(?=;|\Z)" % (TOKEN, TOKEN))
_PARAMETER = re.compile(
    rb"""[ \t]*;[ \t]*(?:
        (?P<name>%b)=(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[!#-+\--:<-\[\]-~]+))
        |(?=;|\Z)
    )[ \t]*(?=;|\Z)"""
    % TOKEN,
    re.DOTALL | re.VERBOSE,
)


_MediaType = tuple[bytes, tuple[bytes, bytes] | None, bytes | None]


def media_type(field: bytes) -> _MediaType:
    """The name that is compared, the type (None if the body is raw for its type), and the boundary."""
    return _short_media_type(field) if len(field) <= 64 else _media_type(field)


def _media_type(field: bytes) -> _MediaType:
    field = field.strip(b" \t")
    essence = _ESSENCE.match(field)
    if not essence:
        return field, None, None
    parameters: dict[bytes, bytes] = {}
    at = essence.end()
    while at < len(field):
        found = _PARAMETER.match(field, at)
        if not found:
            return field, None, None
        at = found.end()
        if found["name"]:
            name = found["name"].lower()
            value = found["bare"]
            if value is None:
                value = re.sub(rb"(?s)\\(.)", rb"\1", found["quoted"])
            if name in (b"charset", b"boundary") and name in parameters:
                return field, None, None
            parameters[name] = value
    top, sub = essence[1].lower(), essence[2].lower()
    name = top + b"/" + sub
    if b"charset" in parameters:
        charset = parameters[b"charset"].lower()
        if not re.fullmatch(TOKEN, charset):
            return field, None, None
        if charset not in (b"utf-8", b"utf8"):
            return name + b";charset=" + charset, None, None
    return name, (top, sub), parameters.get(b"boundary")


_short_media_type = lru_cache(maxsize=256)(_media_type)


# JSON


class _Number(str):
    """A number in its canonical form, if Python may write it in another way."""

    __slots__ = ()


_NUMBER = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?")


def _canonical_number(text: str) -> str:
    found = _NUMBER.fullmatch(text)
    if not found:
        raise NotCanonical("number")
    sign, digits, fraction, exponent = found.groups()
    if fraction is None and exponent is None and len(digits) < 16:
        return "0" if digits == "0" else sign + digits
    significant = (digits + (fraction or "")).strip("0")
    if not significant:
        return "0"
    if len((exponent or "").lstrip("+-0")) > 15:
        raise NotCanonical("exponent")
    value = decimal.Decimal(text.removeprefix("-"))
    if value > MAX_SAFE_INTEGER:
        raise NotCanonical("magnitude")
    if value == int(value):
        return sign + str(int(value))
    if len(significant) > 15 or value < decimal.Decimal("1e-307"):
        raise NotCanonical("precision")
    # ECMAScript's Number::toString, from the shortest digits of the double.
    _, shortest_digits, scale = decimal.Decimal(repr(float(text))).normalize().as_tuple()
    shortest = "".join(map(str, shortest_digits))
    point = len(shortest) + int(scale)
    if point > 0:
        return f"{sign}{shortest[:point]}.{shortest[point:]}"
    if point > -6:
        return f"{sign}0.{'0' * -point}{shortest}"
    return f"{sign}{shortest[0]}{'.' if len(shortest) > 1 else ''}{shortest[1:]}e{point - 1}"


def _folded(name: str) -> str:
    """The name without regard to case. Both ways, letter by letter: `ß` is `SS` only in upper case."""
    if name.isascii():
        return name.lower()
    return "".join(map(str.lower, "".join(map(str.upper, name))))


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Some programs read members without regard to case.
    if len({_folded(name) for name, _ in pairs}) < len(pairs):
        raise NotCanonical("two members of one name")
    return dict(pairs)


def _no_constant(text: str) -> Any:
    raise NotCanonical(text)


def _integer(text: str) -> int:
    number = int(text)
    if not -MAX_SAFE_INTEGER <= number <= MAX_SAFE_INTEGER:
        raise NotCanonical("magnitude")
    return number


def _usual_float(text: str) -> float | int | None:
    number = float(text)
    # At most 15 digits survive the way into a double and back, and in this range Python and ECMAScript write them alike.
    if len(text) > 16 or not 1e-4 <= abs(number) < 1e15 or "e" in text or "E" in text:
        return None
    return int(number) if number.is_integer() else number


def _float(text: str) -> float | int | _Number:
    usual = _usual_float(text)
    return _Number(_canonical_number(text)) if usual is None else usual


# Hooks in Python, and not types, let other threads run while a large body is decoded.
_DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_float, parse_constant=_no_constant, object_pairs_hook=_members
)


class _Unusual(Exception):
    """The encoder of Python may write this value in another way than RFC 8785."""


def _usual_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    names = "".join(members)
    if not names.isascii():
        # Python sorts by code points, and RFC 8785 by units of UTF-16.
        raise _Unusual
    # Names in lower case are equal or differ for every program.
    return members if len(members) == len(pairs) and names == names.lower() else _members(pairs)


def _only_usual_float(text: str) -> float | int:
    usual = _usual_float(text)
    if usual is None:
        raise _Unusual
    return usual


_USUAL_DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_only_usual_float, parse_constant=_no_constant, object_pairs_hook=_usual_members
)
_USUAL_ENCODER = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":"))


def _usual_json(text: str) -> bytes | None:
    """The canonical form of a text by the encoder of Python. None: it has something that this encoder may write otherwise.

    Raises ValueError, RecursionError or :class:`NotCanonical` if there is none.
    """
    # It cannot be nested deeper than it has brackets.
    if text.count("{") + text.count("[") > MAX_DEPTH:
        return None
    try:
        # Half a surrogate pair cannot be encoded.
        return _USUAL_ENCODER.encode(_USUAL_DECODER.decode(text)).encode()
    except _Unusual:
        return None


def parse_json(body: bytes) -> Any:
    """The value of a body. Raises :class:`NotCanonical` if not every program reads it alike."""
    try:
        text = body.decode("utf-8")
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise NotCanonical("no JSON") from error


_SURROGATE = re.compile("[\ud800-\udfff]")


def _canonical_string(text: str) -> str:
    if _SURROGATE.search(text):
        raise NotCanonical("half a surrogate pair")
    # This is what `json.dumps` does with ensure_ascii=False, which leaves alone what RFC 8785 leaves alone.
    return encode_basestring(text)


def canonical_json(value: Any, depth: int = 0) -> str:
    """The value by RFC 8785."""
    if isinstance(value, str):
        return value if isinstance(value, _Number) else _canonical_string(value)
    if isinstance(value, list | dict) and depth == MAX_DEPTH:
        raise NotCanonical("depth")
    if isinstance(value, list):
        return "[" + ",".join(canonical_json(item, depth + 1) for item in value) + "]"
    if isinstance(value, dict):
        named = [(name, _canonical_string(name)) for name in value]
        named.sort(key=lambda pair: pair[0].encode("utf-16-be"))
        return "{" + ",".join(f"{text}:{canonical_json(value[name], depth + 1)}" for name, text in named) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    return repr(value)


_ABSENT: Final = object()
_Path = list[str]


def tokens(pointer: str) -> _Path:
    return [token.replace("~1", "/").replace("~0", "~") for token in pointer.split("/")[1:]]


def _index(token: str) -> int | None:
    return int(token) if re.fullmatch("0|[1-9][0-9]{0,15}", token) else None


def _without(value: Any, paths: list[_Path]) -> Any:
    """The value without what the paths lead to."""
    if not paths:
        return value
    if [] in paths:
        return _ABSENT

    def below(step: Callable[[str], bool]) -> list[_Path]:
        return [path[1:] for path in paths if step(path[0])]

    if isinstance(value, dict):
        kept = {name: _without(item, below(name.__eq__)) for name, item in value.items()}
        return {name: item for name, item in kept.items() if item is not _ABSENT}
    if isinstance(value, list):
        left = [_without(item, below(lambda token, at=at: _index(token) == at)) for at, item in enumerate(value)]  # type: ignore[misc]
        return [item for item in left if item is not _ABSENT]
    return value


def _select(value: Any, path: _Path, excluded: list[_Path]) -> Any:
    """The value that the path leads to, without what is excluded."""
    for token in path:
        if [] in excluded:
            return _ABSENT
        index = _index(token)
        if isinstance(value, dict) and token in value:
            value = value[token]
        elif isinstance(value, list) and index is not None and index < len(value):
            value = value[index]
        else:
            return _ABSENT
        excluded = [other[1:] for other in excluded if other[0] == token]
    return _without(value, excluded)


def _says_something(value: Any) -> bool:
    """True if there is a text, a number, true or false in it."""
    if isinstance(value, dict):
        return any(map(_says_something, value.values()))
    if isinstance(value, list):
        return any(map(_says_something, value))
    return value is not _ABSENT and value is not None


def _json_body(body: bytes, rules: Rules) -> tuple[bytes, bytes]:
    if not rules.include and not rules.exclude:
        try:
            usual = _usual_json(body.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise NotCanonical("no JSON") from error
        if usual is not None:
            return b"json", part(usual)
    value = parse_json(body)
    whole = canonical_json(value)
    if not rules.include and not rules.exclude:
        return b"json", part(whole.encode())
    excluded = [tokens(pointer) for pointer in rules.exclude]
    if not any(_says_something(_select(value, tokens(pointer), excluded)) for pointer in rules.include):
        left = _without(value, excluded)
        return b"json", part((canonical_json(left) if _says_something(left) else whole).encode())
    pointers = sorted({pointer.encode() for pointer in rules.include})
    out = count(len(pointers))
    for pointer in pointers:
        found = _select(value, tokens(pointer.decode()), excluded)
        out += part(pointer) + part(b"absent" if found is _ABSENT else canonical_json(found).encode())
    return b"json-include", out


# Forms

_BAD_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PERCENT = re.compile(rb"%(..)")
_PRINTABLE = re.compile(rb"[ -~]*")
_WORD = re.compile(rb"[0-9A-Za-z]+")


def _decode_form(text: bytes) -> bytes:
    if _BAD_PERCENT.search(text):
        raise NotCanonical("percent")
    return _PERCENT.sub(lambda found: bytes([int(found[1], 16)]), text.replace(b"+", b" "))


def _stem(name: bytes) -> bytes:
    found = _WORD.search(name)
    return found[0].lower() if found else b""


def _form_body(body: bytes) -> tuple[bytes, bytes]:
    if b";" in body or body.count(b"&") >= MAX_PAIRS:
        raise NotCanonical("read in different ways, or too long")
    pairs = []
    for segment in body.split(b"&"):
        name, equals, value = segment.partition(b"=")
        if not equals:
            raise NotCanonical("no pair")
        pairs.append((_decode_form(name), _decode_form(value)))
    if all(_PRINTABLE.fullmatch(name) for name, _ in pairs):
        pairs.sort(key=lambda pair: _stem(pair[0]))
    return b"form", count(len(pairs)) + b"".join(part(name) + part(value) for name, value in pairs)


# Multipart

_BOUNDARY = re.compile(rb"[ -~]{0,69}[!-~]")
_FIELD = re.compile(rb"(%b):([^\r\n\0]*)" % TOKEN)


def _multipart_body(body: bytes, boundary: bytes | None) -> tuple[bytes, bytes]:
    if boundary is None or not _BOUNDARY.fullmatch(boundary):
        raise NotCanonical("boundary")
    delimiter = b"\r\n--" + boundary
    # The start of the body is as good as the CRLF before a delimiter.
    if not body.startswith(b"\r\n"):
        body = b"\r\n" + body
    pieces = body.split(delimiter, MAX_MULTIPART_ITEMS + 2)
    if len(pieces) < 2 or pieces[0] or pieces[-1] not in (b"--", b"--\r\n"):
        raise NotCanonical("delimiters")
    out = [count(len(pieces) - 2)]
    items = len(pieces) - 2
    for piece in pieces[1:-1]:
        if not piece.startswith(b"\r\n") or piece[2:].startswith(delimiter[2:]):
            raise NotCanonical("delimiter")
        # The CRLF that ends the delimiter makes a part without header lines look like the others.
        head, empty_line, content = piece.partition(b"\r\n\r\n")
        if not empty_line:
            raise NotCanonical("no empty line")
        items += head.count(b"\r\n")
        if items > MAX_MULTIPART_ITEMS:
            raise NotCanonical("too many parts and header lines")
        fields = []
        for line in head.split(b"\r\n")[1:]:
            field = _FIELD.fullmatch(line)
            if not field:
                raise NotCanonical("header line")
            fields.append((field[1].lower(), field[2].strip(b" \t")))
        fields.sort(key=lambda field: field[0])
        out.append(count(len(fields)))
        out += [part(name) + part(value) for name, value in fields]
        out.append(part(content))
    return b"multipart", b"".join(out)


# Fingerprints


def _read_body(
    body: bytes, kind: tuple[bytes, bytes] | None, boundary: bytes | None, coding: str, rules: Rules
) -> tuple[bytes, bytes]:
    if rules.raw_bodies or coding or not body or kind is None:
        raise NotCanonical("as it is")
    top, sub = kind
    if top == b"multipart":
        return _multipart_body(body, boundary)
    if kind == (b"application", b"x-www-form-urlencoded"):
        return _form_body(body)
    if kind == (b"application", b"json") or (sub.endswith(b"+json") and len(sub) > 5):
        return _json_body(body, rules)
    raise NotCanonical("no known type")


def tag_and_digest(
    method: str,
    target: str,
    *,
    authority: str = "",
    headers: Iterable[tuple[str, bytes]] = (),
    content_type: bytes = b"",
    content_coding: str = "",
    body: bytes = b"",
    rules: Rules = Rules(),
) -> tuple[str, bytes]:
    """The way in which the body is compared, and the SHA-256 of what is compared."""
    name, kind, boundary = media_type(content_type)
    try:
        tag, content = _read_body(body, kind, boundary, content_coding, rules)
    except (NotCanonical, RecursionError):
        tag, content = b"raw", part(body)
    listed = sorted(((field.encode(), value) for field, value in headers), key=lambda header: header[0])
    parts = [b"oncegate-fp-1", method.encode(), authority.encode(), target.encode(), name, tag]
    digest = hashlib.sha256(b"".join(map(part, [*parts, content_coding.lower().encode()])) + count(len(listed)))
    for field, value in listed:
        digest.update(part(field) + part(value))
    digest.update(content)
    return tag.decode(), digest.digest()


def fingerprint(method: str, target: str, **request: Any) -> bytes:
    """The fingerprint of a request: its version, and 32 bytes. The keywords are those of :func:`tag_and_digest`."""
    return VERSION + tag_and_digest(method, target, **request)[1]


def parts_fingerprint(domain: str, parts: Sequence[bytes]) -> bytes:
    """The fingerprint of a list of parts, for what is no HTTP request."""
    texts = [b"oncegate-fp-parts-1", domain.encode(), *parts]
    return VERSION + hashlib.sha256(b"".join(map(part, texts))).digest()


# Keys that are built from members of the body


class MissingMember(Exception):
    """The body lacks a member of which the key is built. The argument is its pointer."""


class NotJson(Exception):
    """The body is no JSON that every program reads alike."""


def natural_key(pointers: Sequence[str], content_type: bytes, body: bytes) -> str:
    """The key that is built from these members of a JSON body."""
    _, kind, _ = media_type(content_type)
    if kind != (b"application", b"json"):
        raise NotJson
    try:
        value = parse_json(body)
        canonical_json(value)
    except (NotCanonical, RecursionError) as error:
        raise NotJson from error
    members = sorted(set(pointers), key=str.encode)
    hashed = part(b"oncegate-natural-key-1") + count(len(members))
    for pointer in members:
        found = _select(value, tokens(pointer), [])
        if found is _ABSENT:
            raise MissingMember(pointer)
        hashed += part(pointer.encode()) + part(canonical_json(found).encode())
    return f"json-{hashlib.sha256(hashed).hexdigest()}"


# Content codings


def decode_body(coding: bytes, lines: int, body: bytes, max_bytes: int) -> tuple[bytes, str]:
    """The body with its content coding undone, and the coding that could not be undone."""
    if lines > 1:
        # The middleware does not know which of several lines the service reads.
        return body, coding.decode("utf-8", "replace")
    name = coding.strip(b" \t\n\r\x0c").decode("utf-8", "replace")
    limit = min(max_bytes, max(len(body) * MAX_DECODED_RATIO, DECODED_FREE))
    match name.lower():
        case "" | "identity":
            return body, ""
        case "gzip" | "x-gzip":
            undone = _inflate(body, 31, limit, several=True)
        case "deflate":
            # RFC 9110, 8.4.1.2: zlib; some clients send bare deflate anyway.
            undone = _inflate(body, 15, limit) or _inflate(body, -15, limit)
        case _:
            undone = None
    return (body, name) if undone is None else (undone[0], "")


def _inflate(body: bytes, window: int, limit: int, *, several: bool = False) -> tuple[bytes] | None:
    out: list[bytes] = []
    size = 0
    while True:
        stream = zlib.decompressobj(window)
        try:
            piece = stream.decompress(body, limit - size + 1)
        except zlib.error:
            return None
        size += len(piece)
        out.append(piece)
        if size > limit or not stream.eof:
            return None
        body = stream.unused_data
        if not body:
            return (b"".join(out),)
        if not several:
            return None
