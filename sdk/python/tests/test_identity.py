"""Identifiers, fingerprints, stored responses and derived keys, by the shared vectors."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from conftest import vectors
from oncegate import identity
from oncegate.fingerprint import Rules, parts_fingerprint, tag_and_digest
from oncegate.response import DecodeError, StoredResponse

FINGERPRINTS = vectors("core/vectors/fingerprints.json")


def by_name(case: dict[str, Any]) -> str:
    return str(case.get("name", ""))


@pytest.mark.parametrize("case", FINGERPRINTS["requests"], ids=by_name)
def test_fingerprints(case: dict[str, Any]) -> None:
    body = base64.b64decode(case["body_base64"]) if "body_base64" in case else case["body"].encode()
    rules = case["rules"]
    tag, digest = tag_and_digest(
        case["method"],
        case["target"],
        authority=case.get("authority", ""),
        headers=[(name, value.encode()) for name, value in case["headers"]],
        content_type=case["content_type"].encode(),
        content_coding=case["content_coding"],
        body=body,
        rules=Rules(rules["raw_bodies"], tuple(rules["include"]), tuple(rules["exclude"])),
    )
    assert (tag, digest.hex()) == (case["tag"], case["digest"])


@pytest.mark.parametrize("case", FINGERPRINTS["parts"], ids=by_name)
def test_fingerprints_of_parts(case: dict[str, Any]) -> None:
    found = parts_fingerprint(case["domain"], [text.encode() for text in case["parts"]])
    assert found.hex() == "01" + case["digest"]


@pytest.mark.parametrize("case", vectors("core/vectors/record_ids.json")["cases"], ids=by_name)
def test_record_ids(case: dict[str, Any]) -> None:
    caller = [(part["kind"], bytes.fromhex(part["identity_hex"])) for part in case["caller"]]
    key = bytes.fromhex(case["key_hex"])
    record = identity.record_id(case["service"], caller, [bytes.fromhex(part) for part in case["operation_hex"]], key)
    assert record.hex() == case["record_id"]
    assert identity.key_tag(key).hex() == case["key_tag"]
    assert identity.caller_tag(caller).hex() == case["caller_tag"]
    for step, expected in case["downstream_keys"].items():
        assert identity.downstream_key(record, step) == expected


@pytest.mark.parametrize("case", vectors("core/vectors/intent_keys.json")["cases"], ids=by_name)
def test_derived_keys(case: dict[str, Any]) -> None:
    assert identity.derived_key(case["name"], case["parts"]) == case["key"]


@pytest.mark.parametrize("case", vectors("core/vectors/responses.json")["cases"], ids=by_name)
def test_responses(case: dict[str, Any]) -> None:
    response = StoredResponse(
        case["status"],
        tuple((name, bytes.fromhex(value)) for name, value in case["headers"]),
        bytes.fromhex(case["body_hex"]),
        tuple((name, bytes.fromhex(value)) for name, value in case["trailers"]),
    )
    encoded = bytes.fromhex(case["encoded_hex"])
    assert response.encode() == encoded
    assert StoredResponse.decode(encoded) == response
    head = len(encoded) - len(response.body)
    for end in range(head):
        with pytest.raises(DecodeError):
            StoredResponse.decode(encoded[:end])


def test_a_derived_key_takes_a_list() -> None:
    with pytest.raises(TypeError):
        identity.derived_key("order", "order-123")


def test_new_keys_are_uuids_of_version_7() -> None:
    import uuid

    keys = {identity.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {uuid.UUID(key).version for key in keys} == {7}
