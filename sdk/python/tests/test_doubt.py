"""Claims whose replies are lost, and ends that the store does not take: nothing executes twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

import oncegate
from oncegate.engine import Permit, Policy, Reply, engine_of
from oncegate.errors import StoreUnavailable
from oncegate.store import Claim, Claimed

FINGERPRINT = b"\x01" + bytes(32)
POLICY = Policy(wait=0.3, lease=5)


class LossyStore(oncegate.MemoryStore):
    """A store that applies commands, and loses replies."""

    def __init__(self) -> None:
        super().__init__()
        self.lost_claims = self.lost_ends = 0
        self.attempts: list[bytes] = []

    async def claim(self, claim: Claim) -> Claimed:
        self.attempts.append(claim.attempt)
        claimed = await super().claim(claim)
        if self.lost_claims:
            self.lost_claims -= 1
            raise StoreUnavailable("the reply was lost")
        return claimed

    async def complete(self, *arguments: Any) -> Any:
        if self.lost_ends:
            self.lost_ends -= 1
            raise StoreUnavailable("the command was lost")
        return await super().complete(*arguments)


async def claimed(store: Any, record: bytes) -> Permit | Reply:
    return await engine_of(store, blocking=False).claim(record, FINGERPRINT, POLICY)


async def test_a_lost_reply_is_asked_for_again_with_the_same_attempt() -> None:
    store, record = LossyStore(), secrets.token_bytes(32)
    store.lost_claims = 1
    permit = await claimed(store, record)
    assert isinstance(permit, Permit)
    assert permit.attempt.number == 1
    assert len(set(store.attempts)) == 1
    assert await permit.complete("tombstone") == "stored"


async def test_a_claim_in_doubt_is_released_and_the_key_is_free() -> None:
    store, record = LossyStore(), secrets.token_bytes(32)
    store.lost_claims = 2
    with pytest.raises(StoreUnavailable):
        await claimed(store, record)
    found = await store.lookup(record)
    assert found is not None
    assert found.state == "in-progress"
    # A new claim of this process settles it first.
    permit = await claimed(store, record)
    assert isinstance(permit, Permit)
    assert permit.attempt.number == 2
    assert not permit.attempt.is_after_abandoned
    permit.end()


async def test_a_claim_in_doubt_is_settled_in_the_background() -> None:
    store, record = LossyStore(), secrets.token_bytes(32)
    store.lost_claims = 2
    with pytest.raises(StoreUnavailable):
        await claimed(store, record)
    for _ in range(100):
        found = await store.lookup(record)
        assert found is not None
        if found.state == "released":
            return
        await asyncio.sleep(0.02)
    pytest.fail("the claim was not released")


async def test_an_end_that_the_store_does_not_take_is_tried_again() -> None:
    store, record = LossyStore(), secrets.token_bytes(32)
    permit = await claimed(store, record)
    assert isinstance(permit, Permit)
    store.lost_ends = 3
    response = oncegate.StoredResponse.of(200, body="done").encode()
    assert await permit.complete("completed", response) == "not-stored"
    assert await engine_of(store, blocking=False).drain(5)
    reply = await claimed(store, record)
    assert isinstance(reply, Reply)
    assert reply.response == response


async def test_a_store_of_an_id_secret_is_refused() -> None:
    from oncegate.engine import SECRET_MARK

    store = oncegate.MemoryStore()
    await store.claim(Claim(SECRET_MARK, bytes(16), FINGERPRINT, 1000, 60_000, "park"))
    with pytest.raises(StoreUnavailable, match="id secret"):
        await claimed(store, secrets.token_bytes(32))
