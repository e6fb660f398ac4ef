"""What becomes of a request, by the shared vectors: identifiers, fingerprints, and refusals byte for byte."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import settings_of, vectors
from oncegate import http
from oncegate.refusal import Answer

CASES = vectors("http/vectors/requests.json")["cases"]


def head_of(request: dict[str, Any]) -> http.Head:
    path, question, query = request["target"].partition("?")
    headers = [(name, value.encode()) for name, value in request["headers"]]
    return http.Head(request["method"], path, query if question else None, headers)


def outcome(case: dict[str, Any]) -> Any:
    settings = settings_of(case["settings"])
    body = case["request"]["body"].encode()
    keyed = http.begin(settings, head_of(case["request"]))
    found: Any = keyed
    if isinstance(keyed, http.Keyed):
        if len(body) > settings.max_request_body:
            found = http.too_large(keyed)
        else:
            found = http.identify(keyed, body)
    if found is None:
        return "passes"
    if isinstance(found, Answer):
        headers = sorted([name, value.decode()] for name, value in found.headers)
        return {"refused": {"status": found.status, "headers": headers, "body": found.body.decode()}}
    return {
        "record": found.record.hex(),
        "fingerprint": found.fingerprint.hex(),
        "caller": found.caller_tag.hex(),
        "key_tag": found.key_tag.hex(),
        "operation": found.name,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["name"]))
def test_requests(case: dict[str, Any]) -> None:
    assert outcome(case) == case["expect"]
