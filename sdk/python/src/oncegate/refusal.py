"""Refusals: the responses of the middleware itself, with the reason and with advice for the client."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from ._contract import conditions
from .headers import Field, put
from .settings import Settings

_NAME = re.compile(r"\{([A-Za-z0-9_:-]+)\}")
_REJECTIONS = frozenset(
    [
        "key-missing",
        "key-invalid",
        "key-expired",
        "key-unsupported",
        "key-reused",
        "request-too-large",
        "request-malformed",
        "request-head-too-large",
        "request-unsupported",
    ]
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response for a client."""

    status: int
    headers: list[Field]
    body: bytes = b""
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that is not executed, and why."""

    condition: str
    detail: str | None = None
    retry_after: int | None = None
    status: int | None = None
    record: bytes | None = None
    key_detail: str | None = field(default=None)

    def about(self, record: bytes | None) -> Refusal:
        return replace(self, record=record)

    def answer(self, settings: Settings) -> Answer:
        row = conditions()[self.condition]
        table = settings.refusal
        own = table.get(self.condition, {})
        status: int = self.status or own.get("status") or table.get("status") or row["status"]
        places = [_shown(name) for name in settings.key_headers]
        if self.key_detail is not None:
            detail = f"{' or '.join(places)}: {self.key_detail}."
        elif self.detail is not None:
            detail = self.detail
        else:
            detail = row["detail"].replace("{place}", " or ".join(f"the header field {place}" for place in places))

        def word(name: str) -> str | None:
            for words in (own, table.get(f"{status // 100}xx", {}), table):
                if isinstance(words.get(name), str):
                    return str(words[name])
            return None

        texts: dict[str, str] = {
            "type": settings.problem_base + self.condition,
            "title": row["title"],
            "detail": detail,
            "retry": row["retry"],
            "slug": self.condition,
            "code": word("code") or self.condition.replace("-", "_"),
            "kind": word("kind") or "api_error",
            "reason": HTTPStatus(status).phrase.replace("Request Entity Too Large", "Payload Too Large"),
        }

        def render(found: re.Match[str]) -> str:
            name = found[1]
            if name == "status":
                return str(status)
            if name == "instance":
                return f',"instance":"urn:oncegate:record:{self.record.hex()}"' if self.record else ""
            return json.dumps(texts[name], ensure_ascii=False)[1:-1] if name in texts else found[0]

        body = _NAME.sub(render, table["body"]).encode()
        headers: list[Field] = [
            ("content-type", table["media-type"].encode()),
            ("content-language", b"en"),
            ("cache-control", b"no-store"),
        ]
        if settings.documentation:
            headers.append(("link", f'<{settings.documentation}>; rel="describedby"'.encode()))
        if status == 401:
            # RFC 9110, 11.6.1: a 401 names a scheme. The middleware does not know that of the service; this is the usual one.
            headers.append(("www-authenticate", b"Bearer"))
        if self.retry_after is not None:
            headers.append(("retry-after", str(self.retry_after).encode()))
        retryable = row["retry"] == "same-key"
        headers = add_fields(headers, settings.headers.get("refusal", {}), retryable=retryable)
        if self.condition in _REJECTIONS:
            headers = add_fields(headers, settings.headers.get("rejection", {}), retryable=retryable)
        mark = f"refused; problem={self.condition}; retry={row['retry']}"
        headers.append(("idempotency-status", mark.encode()))
        return Answer(status, headers, body, self.condition)


def add_fields(headers: list[Field], fields: Any, *, retryable: bool = False) -> list[Field]:
    """The fields, with those of a profile. A field that repeats a missing one is left out."""
    for name, template in fields.items():
        is_complete = True

        def render(found: re.Match[str], headers: list[Field] = headers) -> str:
            nonlocal is_complete
            what = found[1]
            if what == "retryable":
                return "true" if retryable else "false"
            wanted = what.removeprefix("response:").lower()
            value = next((value for own, value in headers if own == wanted), None)
            if value is None:
                is_complete = False
                return ""
            return value.decode("latin-1")

        value = _NAME.sub(render, template)
        if is_complete:
            headers = put(headers, name.lower(), value.encode("latin-1"))
    return headers


def _shown(name: str) -> str:
    return "-".join(word[:1].upper() + word[1:] for word in name.split("-"))
