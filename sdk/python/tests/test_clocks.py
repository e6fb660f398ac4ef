"""A machine that was suspended: its monotonic clock stood still, and its wall clock did not. A wall clock that was set back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from oncegate import MemoryStore, clocks, transactions
from oncegate.client import AsyncRetryTransport, RetryPolicy, RetryTransport, SendError
from oncegate.clocks import Moment
from oncegate.engine import Permit, Policy, engine_of
from test_client import OK, scripted
from test_id_secret import Service, Watched

POLICY = RetryPolicy(backoff_base=0.001, backoff_cap=0.002)


@pytest.fixture
def suspend(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that suspends the machine for these seconds; fewer than none set its wall clock back."""
    ahead = 0.0
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic=time.monotonic, time=lambda: time.time() + ahead))

    def suspended(seconds: float) -> None:
        nonlocal ahead
        ahead += seconds

    return suspended


def test_the_age_of_a_moment(suspend: Callable[[float], None]) -> None:
    moment = Moment.now()
    assert moment.age() < 60
    suspend(3600)
    assert 3600 <= moment.age() < 3660
    suspend(-7200)
    assert 0 <= moment.age() < 60


@pytest.mark.parametrize("where", ["pause", "request"])
async def test_a_key_is_not_sent_an_hour_later(
    where: str, suspend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import asyncio

    from oncegate import client

    answer, seen = scripted([httpx.ReadTimeout("lost"), OK, httpx.ReadTimeout("lost"), OK])

    def answered(request: httpx.Request) -> httpx.Response:
        if where == "request":
            suspend(3600)
        return answer(request)

    def paused(seconds: float) -> None:
        if where == "pause":
            suspend(3600)

    async def paused_too(seconds: float) -> None:
        paused(seconds)

    monkeypatch.setattr(client, "time", SimpleNamespace(sleep=paused, time=time.time, monotonic=time.monotonic))
    monkeypatch.setattr(client, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": paused_too}))
    headers = {"Idempotency-Key": "k"}
    with (
        httpx.Client(transport=RetryTransport(httpx.MockTransport(answered), POLICY)) as own,
        pytest.raises(SendError) as late,
    ):
        own.post("https://shop.test/pay", headers=headers)
    assert (late.value.kind, late.value.may_have_taken_effect, late.value.attempts) == ("deadline", True, 1)
    assert len(seen) == 1
    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.MockTransport(answered), POLICY)) as own_too:
        response = await own_too.post("https://shop.test/pay", headers=headers)
        assert response.text == "done"
        with pytest.raises(SendError) as late:
            await own_too.post("https://shop.test/pay", headers=headers)
    assert (late.value.kind, late.value.attempts) == ("deadline", 1)


async def test_a_lease_is_renewed_before_the_handler_begins(suspend: Callable[[float], None]) -> None:
    class Counting(MemoryStore):
        renewals = 0
        is_fenced = False

        async def renew(self, *arguments: Any) -> Any:
            self.renewals += 1
            return "fenced" if self.is_fenced else await super().renew(*arguments)

    store = Counting()
    for is_fenced in (False, True):
        store.is_fenced, store.renewals = is_fenced, 0
        permit = await engine_of(store, blocking=False).claim(uuid.uuid4().bytes * 2, b"\x01" + bytes(32), Policy())
        assert isinstance(permit, Permit)
        assert await permit.confirm()
        assert store.renewals == 0
        suspend(3600)
        assert await permit.confirm() is not is_fenced
        assert store.renewals == 1
        permit.end()


async def test_the_mark_is_looked_up_again(suspend: Callable[[float], None]) -> None:
    store = Watched(MemoryStore())
    service = Service(store, "closed")
    for _ in range(2):
        assert await service.post() == 201
        assert store.looks == 1
    suspend(3600)
    assert await service.post() == 201
    assert store.looks == 2


async def test_a_claim_that_was_granted_late_looks_again(suspend: Callable[[float], None]) -> None:
    store = Watched(MemoryStore())

    async def suspended() -> None:
        suspend(3600)

    store.before_claim = suspended
    assert await Service(store, "closed").post() == 201
    assert store.looks == 2


async def test_a_transaction_looks_again(
    postgres: Any, suspend: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import psycopg

    own_row, statements = transactions._Connection.row, []

    async def row(self: Any, statement: str, arguments: Any) -> Any:
        statements.append(statement)
        if statement == transactions.CLAIM:
            suspend(3600)
        return await own_row(self, statement, arguments)

    monkeypatch.setattr(transactions._Connection, "row", row)
    async with (
        await psycopg.AsyncConnection.connect(postgres.url) as connection,
        transactions.transaction(connection, uuid.uuid4().hex, name="pay", service="shop") as attempt,
    ):
        attempt.complete(None)
    assert statements[:3] == [transactions.LOOK, transactions.CLAIM, transactions.LOOK]
