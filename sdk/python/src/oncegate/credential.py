"""Recognises header fields that identify a caller, by their names."""

from __future__ import annotations

from functools import lru_cache

from oncegate._contract import contract

_LISTS = contract()["header_fields"]
_USUAL = frozenset(_LISTS["usual"])
_LISTED = frozenset(_LISTS["callers"])
_PARTS: list[str] = _LISTS["caller_parts"]
_NONE_PARTS: list[str] = [*_LISTS["no_caller_parts"], "verification-token"]
_NONE_BEGINNINGS = ("sec-", "www-", "oncegate-")
_NEW_SCHEMES = frozenset(b"digest signature hawk mac aws sharedkey sharedkeylite negotiate ntlm hoba mutual".split())
SCHEMES = frozenset(b"bearer basic digest token apikey dpop hmac negotiate".split())
_OVERRIDES = frozenset(
    [
        "x-http-method-override",
        "x-http-method",
        "x-method-override",
        "x-original-method",
        "x-original-url",
        "x-original-uri",
        "x-rewrite-url",
    ]
)


@lru_cache(maxsize=1024)
def is_credential(name: str) -> bool:
    """True for a field, other than Authorization, that may identify a caller."""
    if name in _USUAL or name == "authorization":
        return False
    name = name.replace("_", "-")
    if name in _LISTED:
        return True
    looks = any(part in name for part in _PARTS) or _has_auth(name)
    is_none = name == "lock-token" or name.startswith(_NONE_BEGINNINGS) or any(part in name for part in _NONE_PARTS)
    return looks and not is_none


def _has_auth(name: str) -> bool:
    at = name.find("auth")
    while at >= 0:
        after = name[at + 4 :]
        is_of_authors = after.startswith("or") and not after.startswith(("oriz", "oris"))
        if not is_of_authors:
            return True
        at = name.find("auth", at + 1)
    return False


def changes_each_time(name: str) -> bool:
    """True for a field that signs the request, next to the credential."""
    return any(part in name for part in ("signature", "dpop", "hmac"))


def is_new_each_time(authorization: bytes) -> bool:
    """True for an Authorization that differs in each retry, so that a retry looks like another caller."""
    scheme, _, rest = authorization.partition(b" ")
    has_rest = len(authorization) > len(scheme)
    scheme = scheme.lower()
    return (
        scheme in _NEW_SCHEMES
        or (has_rest and (b"hmac" in scheme or scheme.startswith(b"scram-")))
        or (scheme == b"oauth" and b"oauth_nonce" in rest)
    )


def is_other_spelling(one: str, other: str) -> bool:
    """True if the names differ in `_` and `-` only."""
    return len(one) == len(other) and one != other and one.replace("_", "-") == other.replace("_", "-")


def is_override(name: str) -> bool:
    """True for a field that names another method or path, which some services follow."""
    return name.startswith("x") and name.replace("_", "-") in _OVERRIDES
