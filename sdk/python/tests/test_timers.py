"""Timers that many requests share, and threads that cannot be started."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from typing import Any

import pytest

from oncegate import MemoryStore, runtime
from oncegate.engine import Engine, Policy
from oncegate.errors import StoreUnavailable
from oncegate.ids import Ids
from oncegate.store import Claim, Claimed


async def test_long_timers_end_after_their_time_and_cancelled_ones_never() -> None:
    timers, loop, ended = runtime.long_timers(), asyncio.get_running_loop(), asyncio.Event()
    seen: list[str] = []
    began = loop.time()
    kept = [timers.later(1.0, lambda own=own: seen.append(own)) for own in ("a", "b")]
    timers.later(1.0, lambda: seen.append("cancelled")).cancel()
    timers.later(1.2, ended.set)
    kept[1].cancel()
    kept[1].cancel()
    async with asyncio.timeout(30):
        await ended.wait()
    assert (seen, loop.time() - began >= 1.2) == (["a"], True)
    kept[0].cancel()
    assert not timers._steps


async def test_a_shared_timer_has_the_context_of_no_request() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    seen = asyncio.get_running_loop().create_future()
    name.set("of a request")
    runtime.long_timers().later(1.0, lambda: seen.set_result(name.get()))
    async with asyncio.timeout(30):
        assert await seen == "none"


@pytest.mark.parametrize("seconds", [0.05, 1.0])
async def test_a_time_limit(seconds: float) -> None:
    with pytest.raises(TimeoutError), runtime.TimeLimit(seconds):
        await asyncio.sleep(3600)
    with runtime.TimeLimit(seconds):
        await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_cancellation_from_outside_is_no_time_limit() -> None:
    async def limited() -> None:
        with runtime.TimeLimit(60):
            await asyncio.sleep(3600)

    task = asyncio.create_task(limited())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_inner_of_two_limits_ends() -> None:
    with runtime.TimeLimit(60):
        with pytest.raises(TimeoutError), runtime.TimeLimit(0.05):
            await asyncio.sleep(3600)
        await asyncio.sleep(0)


async def test_the_store_in_memory_forgets_what_was_renewed_completed_and_used_again() -> None:
    now = time.time_ns() // 1_000_000
    store = MemoryStore(clock=lambda: now)
    for lease_ms in (30_000, 3_600_000):
        for _ in range(2):
            own = Claim(b"r" * 32, b"a" * 16, b"f" * 33, lease_ms, 1000, "park")
            token = (await store.claim(own)).token
            await store.renew(own.record, token, lease_ms, 1000)
            await store.complete(own.record, token, "completed", b"response", 1000)
            # The response stays as long as its retention, and then for the rest of a short lease at most.
            now += 61_000
            await store.lookup(own.record)
            await store.release(b"other", 0, 1000)
            assert store._bytes == 0
    now += 2 * 3_600_000
    for _ in range(4):
        await store.release(b"other", 0, 1000)
    assert (len(store), store._expiries) == (0, [])


class Limit:
    """A limit of threads that this process has reached. It counts the starts that have failed, of threads with these names."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
        self.failures, start = 0, threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if thread.name.startswith(name) and self.failures < most:
                self.failures += 1
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.mark.parametrize("name", ["oncegate-background", "oncegate-timers"])
def test_a_moment_without_threads_does_not_end_the_timers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lease was renewed any more in the process, and no end stored."""
    limit, threads = Limit(monkeypatch, name, 2), runtime.ThreadRuntime()
    ended = [threading.Event() for _ in range(3)]

    async def end(event: threading.Event) -> None:
        event.set()

    for event in ended:
        threads.later(0, lambda own=event: end(own))
    assert all(event.wait(30) for event in ended)
    assert limit.failures == 2


class BlockingStore(MemoryStore):
    is_blocking, is_immediate, claims = True, False, 0

    async def claim(self, claim: Claim) -> Claimed:
        self.claims += 1
        return await super().claim(claim)


@pytest.mark.parametrize("kind", ["loop", "threads"])
async def test_a_call_that_gets_no_thread_is_not_sent(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was queued, and ran later, although its caller had an error, or had sent it again by itself."""
    limit = Limit(monkeypatch, "", 10_000)
    store = BlockingStore()
    own: Any = runtime.LoopRuntime() if kind == "loop" else runtime.ThreadRuntime()
    engine, record = Engine(store, own, Ids()), bytes(32)
    engine._is_verified, engine._is_checked = True, lambda *_: True  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreUnavailable) as caught:
        await engine.claim(record, bytes(33), Policy())
    assert (caught.value.is_reached, caught.value.is_unsent, engine._doubts, store.claims) == (True, True, {}, 0)
    monkeypatch.undo()
    assert limit.failures > 0
    permit: Any = await engine.claim(record, bytes(33), Policy())
    assert store.claims == 1
    assert await permit.release() == "stored"


def test_the_delay_of_a_call_is_that_of_this_process_if_it_is_late_at_the_end_or_for_a_part_of_the_time() -> None:
    def is_own(seconds: float, *late: float, is_last: bool = False) -> bool:
        call = runtime.Call(seconds)
        for one in late:
            call.look(time.monotonic() - one, is_last=is_last)
        return call.is_own_delay

    assert not is_own(20, 1, 0.5)
    assert is_own(20, 1, 0.5, 1)
    assert is_own(20, 0.2, is_last=True)
    # In a step, so short a time would be late, too.
    assert is_own(0.3, 0.2)
