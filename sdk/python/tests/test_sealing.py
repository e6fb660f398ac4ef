"""Sealed forms, by the shared vectors, and over a store."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest

import oncegate
from conftest import vectors
from oncegate.seal import SealedStore, SealKey, open_sealed, seal

VECTORS = vectors("seal/vectors/sealed.json")
KEY = SealKey(bytes.fromhex(VECTORS["key"]))
OTHER = SealKey(bytes(32))


def lp(text: str) -> bytes:
    return struct.pack(">I", len(text.encode())) + text.encode()


def cases() -> list[Any]:
    record = bytes.fromhex(VECTORS["record"])
    found = []
    for case in VECTORS["parts"]:
        more = struct.pack(">I", case["number"]) + case["name"].encode() if case["part"] == 3 else b""
        found.append((case["part"], record, int(case["token"]), case["plaintext"], case["sealed"], more))
    for case in VECTORS["intents"]:
        found.append((4, bytes(32), 0, case["plaintext"], case["sealed"], case["file"].encode()))
    for case in VECTORS["dead_letters"]:
        place, names = lp(case["consumer"]) + lp(case["topic"]), case["header_names"]
        values = b"".join(struct.pack(">I", len(bytes.fromhex(v))) + bytes.fromhex(v) for v in case["header_values"])
        bound = place + struct.pack(">I", len(names)) + b"".join(map(lp, names))
        letter = bytes.fromhex(case["id"])
        found.append((5, letter, 0, values.hex() + case["payload"], case["sealed"], bound))
        error = case["sealed_error"].removeprefix("ogseal:")
        found.append((6, letter, 0, case["error"].encode().hex(), error, place))
    for case in VECTORS["stream_events"]:
        place = lp(case["consumer"]) + lp(case["stream"]) + struct.pack(">Q", int(case["sequence"]))
        found.append((7, bytes(32), 0, case["event"], case["sealed"], place))
    return found


@pytest.mark.parametrize("case", cases())
def test_sealed_forms(case: Any) -> None:
    part, record, token, plaintext, sealed, more = case
    assert seal(KEY, part, record, token, bytes.fromhex(plaintext), more).hex() == sealed
    assert open_sealed([OTHER, KEY], record, bytes.fromhex(sealed), more) == (part, token, bytes.fromhex(plaintext))
    with pytest.raises(oncegate.ResponseSealed):
        open_sealed([OTHER], record, bytes.fromhex(sealed), more)
    with pytest.raises(oncegate.RecordCorrupt):
        open_sealed([KEY], bytes(31) + b"\x01", bytes.fromhex(sealed), more)


def test_keys() -> None:
    assert SealKey.parse(VECTORS["key_text"]) == KEY
    assert KEY.id.hex() == VECTORS["key_id"]
    assert VECTORS["key"] not in repr(KEY)
    with pytest.raises(oncegate.ConfigError):
        SealKey.parse(VECTORS["key_text"].replace("_01", "_02"))


async def test_a_sealed_store(store: Any) -> None:
    sealed = SealedStore(store, [VECTORS["key_text"]])

    def on(own: Any) -> Any:
        @oncegate.idempotent(key=lambda key: key, store=own, service="tests", name="secret")
        async def work(key: str) -> str:
            return "the balance is 17"

        return work

    key = uuid.uuid4().hex
    for _ in range(2):
        assert await on(sealed)(key) == "the balance is 17"
    with pytest.raises(oncegate.ResponseSealed):
        await on(store)(key)
    with pytest.raises(oncegate.ResponseSealed):
        await on(SealedStore(store, [OTHER]))(key)
