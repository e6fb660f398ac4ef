"""Brings paths into one spelling, because services treat `/orders`, `//orders` and `/%6Frders` alike."""

from __future__ import annotations

import re

_ESCAPE = re.compile(r"%([0-9A-Fa-f]{2})|([^\x00-\x7f])|(%)")
_UNRESERVED = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")


def _decode(found: re.Match[str]) -> str:
    if found[1]:
        letter = chr(int(found[1], 16))
        return letter if letter in _UNRESERVED else f"%{found[1].upper()}"
    if found[2]:
        return "".join(f"%{byte:02X}" for byte in found[2].encode("utf-8", "surrogateescape"))
    return "%25"


def canonical(path: str, *, exact_slash: bool = False) -> str:
    """The path in its canonical spelling."""
    is_spelled_otherwise = (
        "%" in path
        or not path.isascii()
        or "//" in path
        or "/." in path
        or (len(path) > 1 and path.endswith("/") and not exact_slash)
    )
    if not is_spelled_otherwise or not path.startswith("/"):
        return path
    segments: list[str] = []
    ends_with_slash = False
    for segment in _ESCAPE.sub(_decode, path).split("/")[1:]:
        ends_with_slash = segment in ("", ".", "..")
        if segment == "..":
            if segments:
                segments.pop()
        elif segment not in ("", "."):
            segments.append(segment)
    spelled = "".join(f"/{segment}" for segment in segments)
    if not spelled or (ends_with_slash and exact_slash):
        spelled += "/"
    return spelled
