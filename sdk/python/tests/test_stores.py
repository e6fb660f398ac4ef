"""Every store gives the same replies, over each driver, and each command may be sent again."""

from __future__ import annotations

import secrets
from typing import Any

from oncegate.response import StoredResponse
from oncegate.store import Claim

FINGERPRINT = b"\x01" + bytes(32)
RESPONSE = StoredResponse.of(201, [("content-type", "application/json")], b'{"id":1}').encode()


def new_claim(record: bytes, **changes: Any) -> Claim:
    values = {
        "record": record,
        "attempt": secrets.token_bytes(16),
        "fingerprint": FINGERPRINT,
        "lease_ms": 30_000,
        "retention_ms": 600_000,
        "on_abandoned": "park",
        "caller": b"\x07" * 8,
        "operation": "POST /pay",
        "key_tag": b"\x09" * 8,
    }
    return Claim(**{**values, **changes})


async def test_the_way_of_a_record(store: Any) -> None:
    await store.verify()
    record = secrets.token_bytes(32)
    assert await store.lookup(record) is None
    claim = new_claim(record)
    granted = await store.claim(claim)
    assert (granted.outcome, granted.attempts, granted.after_abandoned) == ("execute", 1, False)
    again = await store.claim(claim)
    assert (again.outcome, again.token) == ("execute", granted.token)
    other = await store.claim(new_claim(record))
    assert other.outcome == "in-progress"
    assert 0 < other.lease_left_ms <= 30_000
    assert (await store.claim(new_claim(record, fingerprint=b"\x01" * 33))).outcome == "mismatch"
    assert await store.renew(record, granted.token, 30_000, 600_000) == "renewed"
    assert await store.renew(record, granted.token - 1, 30_000, 600_000) == "fenced"
    found = await store.lookup(record)
    assert (found.state, found.token, found.attempt) == ("in-progress", granted.token, claim.attempt)
    for _ in range(2):
        assert await store.release(record, granted.token, 600_000) == "released"
    second = await store.claim(new_claim(record))
    assert second.outcome == "execute"
    assert second.token > granted.token
    assert await store.complete(record, granted.token, "completed", RESPONSE, 600_000) == "fenced"
    for _ in range(2):
        assert await store.complete(record, second.token, "completed", RESPONSE, 600_000) == "completed"
    replay = await store.claim(new_claim(record))
    assert (replay.outcome, replay.response) == ("replay", RESPONSE)
    found = await store.lookup(record)
    assert (found.state, found.response, found.by_operator) == ("completed", RESPONSE, False)


async def test_an_abandoned_record(store: Any) -> None:
    record = secrets.token_bytes(32)
    first = await store.claim(new_claim(record, lease_ms=1))
    second = await store.claim(new_claim(record, on_abandoned="reexecute", lease_ms=1))
    while second.outcome == "in-progress":
        second = await store.claim(new_claim(record, on_abandoned="reexecute", lease_ms=1))
    assert second.outcome == "execute"
    assert second.after_abandoned
    assert second.token > first.token
    parked = await store.claim(new_claim(record))
    while parked.outcome == "in-progress":
        parked = await store.claim(new_claim(record))
    assert parked.outcome == "unknown"
    assert await store.complete(record, second.token, "tombstone", None, 600_000) == "completed"
    assert (await store.claim(new_claim(record))).outcome == "unreplayable"
