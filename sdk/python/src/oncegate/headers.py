"""The header fields that a record keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from oncegate._contract import contract

_LISTS = contract()["header_fields"]
KEPT = frozenset(_LISTS["kept"])
_NEVER = frozenset(_LISTS["never"])
_NEVER_PREFIXES = tuple(_LISTS["never_prefixes"])

Field = tuple[str, bytes]
MAX_KEPT_FIELDS = 128


def is_never_kept(name: str) -> bool:
    return name in _NEVER or name.startswith(_NEVER_PREFIXES)


def get(headers: Iterable[Field], name: str) -> bytes | None:
    """The first value of a field."""
    return next((value for own, value in headers if own == name), None)


def get_all(headers: Iterable[Field], name: str) -> list[bytes]:
    return [value for own, value in headers if own == name]


def put(headers: Sequence[Field], name: str, value: bytes) -> list[Field]:
    """The fields with this one instead of others of its name."""
    out, is_in = [], False
    for field in headers:
        if field[0] != name:
            out.append(field)
        elif not is_in:
            out.append((name, value))
            is_in = True
    if not is_in:
        out.append((name, value))
    return out


def without(headers: Iterable[Field], *names: str) -> list[Field]:
    return [field for field in headers if field[0] not in names]


def kept(headers: Sequence[Field], more: frozenset[str]) -> list[Field]:
    """The fields that a record keeps, fields of one name next to each other."""
    connection = get_all(headers, "connection")
    nominated = {token.strip(b" \t").lower() for value in connection for token in value.split(b",")}
    groups: dict[str, list[Field]] = {}
    for field in headers:
        name = field[0]
        if (name in KEPT or name in more) and not (nominated and name.encode() in nominated):
            groups.setdefault(name, []).append(field)
    return [field for group in groups.values() for field in group]


def restored(headers: Iterable[Field]) -> list[Field]:
    """The fields of a record that may be sent."""
    return [field for field in headers if field[0] in KEPT or not is_never_kept(field[0])]
