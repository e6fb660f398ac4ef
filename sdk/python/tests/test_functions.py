"""Functions run once for each key, on every store."""

from __future__ import annotations

import asyncio
import threading
import uuid
from typing import Any

import pytest

import oncegate
from oncegate import FunctionFailed, InProgress, KeyReused, OutcomeUnknown, StoreUnavailable, Unreplayable, idempotent


def new() -> str:
    return uuid.uuid4().hex


async def test_one_effect(store: Any) -> None:
    ran: list[str] = []

    @idempotent(key=lambda order: order, store=store)
    async def charge(order: str, attempt: oncegate.Attempt | None = None) -> dict[str, int]:
        assert attempt is not None
        assert oncegate.current_attempt() is attempt
        ran.append(order)
        await asyncio.sleep(0.05)
        return {"charged": 5}

    order = new()
    results = await asyncio.gather(*(charge(order) for _ in range(5)))
    assert results == [{"charged": 5}] * 5
    assert ran == [order]


async def test_blocking_functions(store: Any) -> None:
    if not (store.is_blocking or getattr(store, "is_immediate", False)):
        with pytest.raises(oncegate.ConfigError, match="asynchronous"):
            idempotent(key=lambda n: n, store=store)(lambda n: n)(new())
        return
    ran: list[str] = []
    pause = threading.Event()

    @idempotent(key=lambda order: order, store=store, name="charge")
    def charge(order: str) -> int:
        ran.append(order)
        pause.wait(0.1)
        return len(ran)

    order = new()

    def work() -> list[int]:
        results: list[int] = []
        threads = [threading.Thread(target=lambda: results.append(charge(order))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    assert await asyncio.to_thread(work) == [1] * 5
    assert ran == [order]


async def test_what_calls_get() -> None:
    store = oncegate.MemoryStore()

    @idempotent(key=lambda key, amount: key, fingerprint=lambda key, amount: amount, store=store, wait=0, errors="store")
    async def charge(key: str, amount: Any) -> Any:
        if amount == "fail":
            raise ValueError("no such card")
        if amount == "slow":
            await asyncio.sleep(0.2)
        return object() if amount == "object" else amount

    assert await charge("a", 5) == 5
    with pytest.raises(KeyReused):
        await charge("a", 6)
    with pytest.raises(ValueError, match="no such card"):
        await charge("b", "fail")
    with pytest.raises(FunctionFailed) as failed:
        await charge("b", "fail")
    assert failed.value.error == {"type": "ValueError", "message": "no such card"}
    await charge("c", "object")
    with pytest.raises(Unreplayable):
        await charge("c", "object")
    slow = asyncio.ensure_future(charge("d", "slow"))
    await asyncio.sleep(0.05)
    with pytest.raises(InProgress):
        await charge("d", "slow")
    # A time-out does not stop it.
    slow.cancel()
    await asyncio.sleep(0.3)
    assert await charge("d", "slow") == "slow"
    with pytest.raises(ValueError, match="1 to 255"):
        await charge("", 1)


@pytest.mark.parametrize("errors", ["unknown", "release"])
async def test_errors(errors: Any) -> None:
    ran = 0

    @idempotent(key=lambda: "k", store=oncegate.MemoryStore(), errors=errors)
    def work() -> int:
        nonlocal ran
        ran += 1
        if ran == 1:
            raise ConnectionError
        return ran

    with pytest.raises(ConnectionError):
        work()
    if errors == "release":
        assert work() == 2
    else:
        with pytest.raises(OutcomeUnknown):
            work()
        assert ran == 1


async def test_a_store_that_is_away_runs_nothing(redis: Any) -> None:
    from redis.asyncio import Redis

    import servers

    ran = 0
    async with Redis.from_url(f"redis://127.0.0.1:{servers.free_port()}") as client:

        @idempotent(key=lambda: new(), store=oncegate.RedisStore(client), store_timeout=1)
        async def work() -> None:
            nonlocal ran
            ran += 1

        for _ in range(8):
            with pytest.raises(StoreUnavailable):
                await work()
    assert ran == 0


async def test_the_lease_is_renewed_while_the_function_runs(store: Any) -> None:
    @idempotent(key=lambda key: key, store=store, lease=0.3, wait=0, on_abandoned="reexecute")
    async def work(key: str) -> str:
        await asyncio.sleep(1)
        return "once"

    key = new()
    first = asyncio.ensure_future(work(key))
    await asyncio.sleep(0.7)
    with pytest.raises(InProgress):
        await work(key)
    assert await first == "once"
