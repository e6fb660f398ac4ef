"""Reads the caller's key from its header field."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .values import choice, did_you_mean

__all__ = ["Grammar", "KeyFieldError"]

MAX_KEY_BYTES = 255
Syntax = Literal["lenient", "strict", "raw"]

OTHER_SPELLING = "the name of the field was sent with `_` for `-`, or the reverse; send it as it is written here"
SEVERAL = "the key was sent more than once; send one key"
DIFFERING = "two places have different keys; send one key"
UNREADABLE = (
    "the body is no JSON that every program reads alike, or its content coding cannot be undone, so a key in it may be "
    "overlooked; send JSON in UTF-8, as it is or in gzip"
)
_BAD_STRING = 'the key starts with a quote but is not a string of RFC 9651; send "key" or the key without quotes'
_BAD_BYTE = "the key has a character that is not allowed"
_COMMA = "the key has a comma; send one key, or put it in quotes"
_NOT_QUOTED = "the key must be in double quotes"
_EMPTY = "the key is empty"

_UUID = re.compile(r"[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}")
# Crockford's base 32 has no I, L, O and U; 26 of its digits hold 130 bits, so the first is at most 7.
_ULID = re.compile(r"(?i:[0-7][0-9A-HJKMNP-TV-Z]{25})")


class KeyFieldError(ValueError):
    """The key is malformed. The text is for the client."""

    def __init__(self, text: str, *, wants_advice: bool = False, of_bytes: bool = False) -> None:
        super().__init__(text)
        self.wants_advice = wants_advice
        self.of_bytes = of_bytes


@dataclass(frozen=True, slots=True)
class Grammar:
    """The syntax of the key in its field, and the format of the key itself."""

    syntax: Syntax = "lenient"
    format: str = "any"
    pattern: re.Pattern[str] | None = None

    @classmethod
    def of(cls, syntax: str, key_format: str) -> Grammar:
        choice("key_syntax", syntax, ("lenient", "strict", "raw"))
        if not isinstance(key_format, str):
            raise ConfigError(f"key_format is {key_format!r}; use 'any', 'uuid', 'ulid' or 'pattern:REGEX'")
        if key_format in ("any", "uuid", "ulid"):
            return cls(syntax, key_format)  # type: ignore[arg-type]
        if key_format.startswith("pattern:"):
            try:
                return cls(syntax, key_format, re.compile(key_format.removeprefix("pattern:")))  # type: ignore[arg-type]
            except re.error as error:
                raise ConfigError(f"key_format {key_format!r} is no regular expression: {error}") from error
        hint = did_you_mean(key_format, ("any", "uuid", "ulid"))
        raise ConfigError(f"key_format is {key_format!r}; use 'any', 'uuid', 'ulid' or 'pattern:REGEX'{hint}")

    def parse(self, field: bytes) -> str:
        """The key in a field. Raises :class:`KeyFieldError`."""
        field = field.strip(b" \t")
        if not field:
            raise KeyFieldError(_EMPTY, wants_advice=True)
        if self.syntax == "raw":
            return self.check(_raw(field))
        if field.startswith(b'"'):
            return self.check(_quoted(field))
        if self.syntax == "strict":
            raise KeyFieldError(_NOT_QUOTED)
        return self.check(_bare(field))

    def check(self, key: str) -> str:
        """The key, if it has the format. UUIDs and ULIDs are brought into one case."""
        if not key.strip(" "):
            raise KeyFieldError(_EMPTY, wants_advice=True)
        size = len(key.encode())
        if size > MAX_KEY_BYTES:
            raise KeyFieldError(f"the key has {size} characters; at most {MAX_KEY_BYTES} are allowed")
        match self.format:
            case "any":
                return key
            case "uuid":
                if _UUID.fullmatch(key):
                    return key.lower()
                raise KeyFieldError("the key is not a UUID", wants_advice=True)
            case "ulid":
                if _ULID.fullmatch(key):
                    return key.upper()
                raise KeyFieldError("the key is not a ULID", wants_advice=True)
            case _:
                if self.pattern and self.pattern.fullmatch(key):
                    return key
                raise KeyFieldError("the key is not of the published format", wants_advice=True)

    def explain(self, error: KeyFieldError) -> str:
        """The text of an error, with advice for the client."""
        if error.of_bytes:
            advice = (
                "send text in UTF-8 without control characters"
                if self.syntax == "raw"
                else "send visible ASCII characters without quote and comma, or put the key in quotes"
            )
        elif error.wants_advice:
            match self.format:
                case "any":
                    advice = "send 1 to 255 characters, such as a UUID"
                case "uuid":
                    advice = "send a UUID of 36 characters"
                case "ulid":
                    advice = "send a ULID of 26 characters"
                case _:
                    pattern = self.format.removeprefix("pattern:")
                    advice = f"send one that the regular expression {pattern} matches from end to end"
        else:
            return str(error)
        return f"{error}; {advice}"


def _bare(field: bytes) -> str:
    for byte in field:
        if byte == 0x2C:
            raise KeyFieldError(_COMMA)
        if not 0x21 <= byte <= 0x7E or byte == 0x22:
            raise KeyFieldError(_BAD_BYTE, of_bytes=True)
    return field.decode("ascii")


def _raw(field: bytes) -> str:
    try:
        key = field.decode("utf-8")
    except UnicodeDecodeError as error:
        raise KeyFieldError(_BAD_BYTE, of_bytes=True) from error
    if any(unicodedata.category(letter) == "Cc" for letter in key):
        raise KeyFieldError(_BAD_BYTE, of_bytes=True)
    return key


# A string of RFC 9651 with parameters, whose values are bare items.
_STRING = re.compile(rb'"((?:[ !#-\[\]-~]|\\["\\])*)"')
_PARAMETERS = re.compile(
    rb"""(?:;\ *[a-z*][a-z0-9_\-.*]*(?:=(?:
        "(?:[\ !\#-\[\]-~]|\\["\\])*"
        |-?[0-9]{1,12}\.[0-9]{1,3}|-?[0-9]{1,15}
        |[A-Za-z*][!\#$%&'*+\-.^_`|~0-9A-Za-z:/]*
        |:[A-Za-z0-9+/=]*:
        |\?[01]
        |@-?[0-9]{1,15}
        |%"(?:[\ !\#$&-~]|%[0-9a-f]{2})*"
    ))?)*""",
    re.VERBOSE,
)


def _quoted(field: bytes) -> str:
    found = _STRING.match(field)
    if not found or not _PARAMETERS.fullmatch(field, found.end()):
        raise KeyFieldError(_BAD_STRING)
    return re.sub(rb"\\(.)", rb"\1", found[1]).decode("ascii")
