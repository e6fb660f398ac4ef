"""Identifiers, fingerprints, stored responses and derived keys, by the shared vectors."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import uuid
from typing import Any

import pytest

from conftest import vectors
from oncegate import ConfigError, IdSecret, derived_key, identity
from oncegate.fingerprint import Rules, parts_fingerprint, tag_and_digest
from oncegate.identity import downstream_key
from oncegate.ids import MARK, Ids
from oncegate.response import DecodeError, StoredResponse
from oncegate.settings import Settings

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


SAME = [("a", "A"), ("ß", "SS"), ("\u017f", "s"), ("\u212a", "k"), ("Σ", "ς"), ("\u0149", "\u02bcN")]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_names_that_differ_in_case_only(one: str, other: str) -> None:
    def tag(*names: str) -> str:
        body = json.dumps(dict.fromkeys(names, 1)).encode()
        return tag_and_digest("POST", "/", content_type=b"application/json", body=body, rules=Rules())[0]

    assert tag(one, other) == tag("a", "A") != tag(one, "b")
    assert tag(one, "b") == tag("a", "b")


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


KEYED = vectors("core/vectors/keyed_ids.json")["secrets"]
PLAIN = {case["name"]: case for case in vectors("core/vectors/record_ids.json")["cases"]}


@pytest.mark.parametrize("own", KEYED, ids=lambda own: own["name"])
def test_keyed_ids(own: dict[str, Any]) -> None:
    secret = IdSecret.parse(own["text"])
    ids = Ids(secret)
    assert secret.name == own["name"]
    assert MARK.hex() == own["mark"]["record_id"]
    assert secret.mark_fingerprint.hex() == "01" + own["mark"]["fingerprint"]
    assert len(own["cases"]) == len(PLAIN)
    for case in own["cases"]:
        plain = PLAIN[case["name"]]
        caller = [(part["kind"], bytes.fromhex(part["identity_hex"])) for part in plain["caller"]]
        operation, key = [bytes.fromhex(part) for part in plain["operation_hex"]], bytes.fromhex(plain["key_hex"])
        assert ids.record(plain["service"], caller, operation, key).hex() == case["record_id"]
        assert ids.caller_tag(caller).hex() == case["caller_tag"]
        assert ids.key_tag(key).hex() == case["key_tag"]
        keyed = ids.fingerprint(b"\x01" + bytes.fromhex(case["fingerprint_digest_hex"]))
        assert keyed.hex() == "01" + case["fingerprint"]


def test_an_id_secret_reads_back_and_slips_are_refused() -> None:
    text = KEYED[0]["text"]
    assert IdSecret.parse(f"# ours\n\n  {text}\n") == IdSecret.parse(text)
    for at in range(len(text)):
        slip = text[:at] + ("1" if text[at] == "0" else "0") + text[at + 1 :]
        for wrong in (slip, text[:at], text + "0", f"{text}\n{text}"):
            with pytest.raises(ConfigError) as refused:
                IdSecret.parse(wrong)
            assert text[30:] not in str(refused.value)
    for value in (b"x" * 32, 7, text.encode()):
        with pytest.raises(ConfigError, match="oncegate id-secret new") as refused:
            Ids.of(value)
        assert text[30:] not in str(refused.value)


def test_nothing_shows_an_id_secret() -> None:
    text = KEYED[0]["text"]
    settings = Settings.of(id_secret=text)
    copied = copy.deepcopy(settings)
    assert copied == settings
    for shown in (repr(settings), str(settings.ids), f"{settings.ids.secret!r}", repr(copied)):
        assert KEYED[0]["name"] in shown
        assert KEYED[0]["secret_hex"] not in shown
        assert repr(bytes.fromhex(KEYED[0]["secret_hex"])) not in shown
    with pytest.raises(TypeError):
        pickle.dumps(settings)


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


@pytest.mark.parametrize("wrong", [True, 2**53, -(2**53), 1.5, None, b"7", ["7"], uuid.UUID(int=7), "\ud800"])
def test_a_part_of_a_derived_key_that_is_no_text(wrong: Any) -> None:
    """Identities that differ must not have one key, and the key is the same in all languages."""
    with pytest.raises(TypeError, match="derived_key: part 1 "):
        derived_key("payment", ["order-7", wrong])
    with pytest.raises(TypeError, match="derived_key: the name "):
        derived_key(wrong if wrong != "\ud800" else 7, ["order-7"])
    with pytest.raises(TypeError, match="downstream_key: the name "):
        downstream_key(bytes(32), 7)  # type: ignore[arg-type]
    assert derived_key("payment", [7]) == derived_key("payment", ["7"])
    assert derived_key("payment", [2**53 - 1]) == derived_key("payment", ["9007199254740991"])


def test_a_derived_key_takes_a_list() -> None:
    with pytest.raises(TypeError):
        identity.derived_key("order", "order-123")


def test_new_keys_are_uuids_of_version_7() -> None:
    import uuid

    keys = {identity.new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {uuid.UUID(key).version for key in keys} == {7}
