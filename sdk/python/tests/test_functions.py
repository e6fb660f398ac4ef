"""Functions run once for each key, on every store."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import uuid
from typing import Any

import pytest

import oncegate
from conftest import STORES, opened
from oncegate import FunctionFailed, InProgress, KeyReused, OutcomeUnknown, StoreUnavailable, Unreplayable, idempotent


def new() -> str:
    return uuid.uuid4().hex


async def test_one_effect(store: Any) -> None:
    ran: list[str] = []

    @idempotent(name="work", key=lambda order: order, store=store, service="tests")
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
            idempotent(name="work", key=lambda n: n, store=store, service="tests")(lambda n: n)(new())
        return
    ran: list[str] = []
    pause = threading.Event()

    @idempotent(name="charge", key=lambda order: order, store=store, service="tests")
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

    @idempotent(
        name="charge", key=lambda key, amount: key, fingerprint=lambda key, amount: amount, store=store, wait=0, errors="store"
    )
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

    @idempotent(name="work", key=lambda: "k", store=oncegate.MemoryStore(), errors=errors)
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


@pytest.mark.parametrize("kind", ["raises", "text", "word"])
async def test_an_error_that_cannot_be_judged_is_unknown(kind: str) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def judged(_: Exception) -> Any:
        if kind == "raises":
            raise RuntimeError("no judgement")
        return "store" if kind == "text" else "stoer"

    @idempotent(name="work", key=lambda: "k", store=oncegate.MemoryStore(), errors=judged, wait=0)
    def work() -> None:
        raise Mute

    with pytest.raises(Mute):
        work()
    with pytest.raises(OutcomeUnknown):
        work()


async def test_a_coroutine_of_a_plain_function_is_refused() -> None:
    ran = 0

    async def work() -> int:
        nonlocal ran
        ran += 1
        return ran

    store = oncegate.MemoryStore()
    wrapped = idempotent(name="work", key=lambda: "k", store=store)(lambda: work())
    with pytest.raises(oncegate.ConfigError, match="returned a coroutine"):
        wrapped()
    with pytest.raises(OutcomeUnknown):
        wrapped()
    assert await idempotent(name="other", key=lambda: "k", store=store)(work)() == 1

    class Work:
        async def __call__(self) -> int:
            return await work()

    called = idempotent(name="object", key=lambda: "k", store=store)(Work())
    assert [await called(), await called()] == [2, 2]


async def test_a_store_that_is_away_runs_nothing(redis: Any) -> None:
    from redis.asyncio import Redis

    import servers

    ran = 0
    async with Redis.from_url(f"redis://127.0.0.1:{servers.free_port()}") as client:

        @idempotent(name="work", key=lambda: new(), store=oncegate.RedisStore(client), service="tests", store_timeout=1)
        async def work() -> None:
            nonlocal ran
            ran += 1

        for _ in range(8):
            with pytest.raises(StoreUnavailable):
                await work()
    assert ran == 0


async def test_the_lease_is_renewed_while_the_function_runs(request: pytest.FixtureRequest) -> None:
    """In all stores at the same time."""
    async with contextlib.AsyncExitStack() as stack:
        stores = [await stack.enter_async_context(opened(kind, request)) for kind in STORES]
        await asyncio.gather(*map(renews, stores))


async def renews(store: Any) -> None:
    @idempotent(name="work", key=lambda key: key, store=store, service="tests", lease=0.3, wait=0, on_abandoned="reexecute")
    async def work(key: str) -> str:
        await is_asked.wait()
        return "once"

    key, is_asked = new(), asyncio.Event()
    first = asyncio.ensure_future(work(key))
    await asyncio.sleep(0.7)
    with pytest.raises(InProgress):
        await work(key)
    is_asked.set()
    assert await first == "once"


async def _twice(call: Any) -> list[str]:
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(repr(await call()))
        except Exception as error:
            outcomes.append(type(error).__name__)
    return outcomes


class Unprintable(Exception):
    def __str__(self) -> Any:
        raise RuntimeError("no text")


def _broken(error: Exception) -> Any:
    raise AttributeError("the judge fails")


@pytest.mark.parametrize(
    ("errors", "error", "second"),
    [
        (_broken, ConnectionError(), "OutcomeUnknown"),
        ("store", Unprintable(), "OutcomeUnknown"),
        ("store", FileNotFoundError(2, "no such file", "\udcff.pdf"), "FunctionFailed"),
    ],
)
async def test_an_error_whose_meaning_cannot_be_judged(errors: Any, error: Exception, second: str) -> None:
    """The key does not stay in progress, and the call raises its own error."""
    store = oncegate.MemoryStore()

    @idempotent(key=lambda: "k", store=store, name="loop", errors=errors, wait=0)
    async def on_loop() -> None:
        raise error

    @idempotent(key=lambda: "k", store=store, name="threads", errors=errors, wait=0)
    def in_thread() -> None:
        raise error

    for call in (on_loop, lambda: asyncio.to_thread(in_thread)):
        assert await _twice(call) == [type(error).__name__, second]


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async_generator", "Task"])
async def test_what_runs_after_its_call_is_an_unknown_outcome(kind: str) -> None:
    """The function may have taken effect before it returned it. It is never run again."""
    store, paid = oncegate.MemoryStore(), []

    async def notify() -> str:
        return "sent"

    async def parts() -> Any:
        yield 1

    made: Any = {
        "coroutine": notify,
        "generator": lambda: (line for line in "ab"),
        "async_generator": parts,
        "Task": lambda: asyncio.ensure_future(notify()),
    }

    def charge() -> Any:
        paid.append(1)
        return made[kind]()

    async def charge_async() -> Any:
        return charge()

    plain = idempotent(key=lambda: "k", store=store, name="plain", wait=0)(charge)
    on_loop = idempotent(key=lambda: "k", store=store, name="loop", wait=0)(charge_async)
    with pytest.raises(oncegate.ConfigError, match=f"returned a {kind}, .* may have taken effect"):
        plain()
    with pytest.raises(oncegate.ConfigError, match=f"returned a {kind}, .* may have taken effect"):
        await on_loop()
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            plain()
        with pytest.raises(OutcomeUnknown):
            await on_loop()
    assert paid == [1, 1]


async def test_generators_and_functions_that_are_wrapped_already_are_refused() -> None:
    store = oncegate.MemoryStore()

    async def charge() -> str:
        return "done"

    async def parts() -> Any:
        yield 1

    decorate = idempotent(key=lambda: "k", store=store, name="charge", wait=0)
    with pytest.raises(oncegate.ConfigError, match="generator"):
        decorate(parts)
    with pytest.raises(oncegate.ConfigError, match="wrapped twice"):
        decorate(decorate(charge))
    outer = idempotent(key=lambda: "k", store=store, name="outer", wait=0)(decorate(charge))
    assert await outer() == "done"


OVERTAKEN = """
import sys, time, oncegate
from psycopg_pool import ConnectionPool
pool = ConnectionPool(sys.argv[1], open=True, min_size=1)
store = oncegate.PostgresStore(pool)
@oncegate.idempotent(
    name="work", key=lambda key: key, store=store, service="tests", lease=0.5, wait=30, on_abandoned="reexecute", errors="store"
)
def work(key):
    print("runs", flush=True)
    sys.stdin.readline()
    if sys.argv[3] == "raises":
        raise ValueError("of its own")
    return sys.argv[3]
try:
    print("got", work(sys.argv[2]), flush=True)
except Exception as error:
    print("got", type(error).__name__, flush=True)
pool.close()
"""


@pytest.mark.parametrize("own", ["first", "raises"])
@pytest.mark.parametrize("second", ["ends", "runs"])
def test_an_attempt_that_was_overtaken_returns_the_result_of_the_record(own: str, second: str, postgres: Any) -> None:
    key = new()

    def start(value: str) -> Any:
        command = [sys.executable, "-c", OVERTAKEN, postgres.url, key, value]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "runs\n"
        return process

    def end(process: Any) -> str:
        process.stdin.write("\n")
        process.stdin.flush()
        return str(process.stdout.readline().strip())

    first = start(own)
    first.send_signal(signal.SIGSTOP)
    other = start("second")
    try:
        if second == "ends":
            assert end(other) == "got second"
        first.send_signal(signal.SIGCONT)
        assert end(first) == ("got second" if second == "ends" else "got OutcomeUnknown")
        if second == "runs":
            assert end(other) == "got second"
    finally:
        for process in (first, other):
            process.kill()
            process.communicate()


AT_EXIT = """
import sys, oncegate
from psycopg_pool import ConnectionPool
pool = ConnectionPool(sys.argv[1], open=True, min_size=1, timeout=1)
store = oncegate.PostgresStore(pool)
@oncegate.idempotent(name="job", key=lambda key: key, store=store, service="tests", lease=60, store_timeout=0.5)
def job(key):
    print("runs", flush=True)
    sys.stdin.readline()
    return "done"
print(job(sys.argv[2]), flush=True)
if sys.argv[3] == "drain":
    print(oncegate.drain_blocking(store, 60), flush=True)
"""


def test_a_job_waits_at_its_exit_until_its_result_is_stored(postgres: Any) -> None:
    """One by a drain, and one without, at the same time."""
    import psycopg

    from test_id_secret import own_database

    url, jobs = own_database(postgres), {"exit": new(), "drain": new()}
    database = url.rpartition("/")[2]
    with psycopg.connect(postgres.url, autocommit=True) as control, contextlib.ExitStack() as stack:
        processes: dict[str, Any] = {}
        for how, key in jobs.items():
            command = [sys.executable, "-c", AT_EXIT, url, key, how]
            processes[how] = stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
        for process in processes.values():
            assert process.stdout.readline() == "runs\n"
        control.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS false")
        control.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{database}'")
        for process in processes.values():
            process.stdin.write("\n")
            process.stdin.flush()
        for process in processes.values():
            assert process.stdout.readline() == "done\n"
        with pytest.raises(subprocess.TimeoutExpired):
            processes["exit"].wait(0.5)
        assert processes["drain"].poll() is None
        control.execute(f"ALTER DATABASE {database} ALLOW_CONNECTIONS true")
        assert processes["drain"].stdout.readline() == "True\n"
        for process in processes.values():
            assert process.wait(60) == 0
    from psycopg_pool import ConnectionPool

    with ConnectionPool(url, min_size=1, open=False) as pool:
        store = oncegate.PostgresStore(pool)
        replayed = idempotent(name="job", key=lambda key: key, store=store, service="tests", wait=0)(lambda _: "again")
        assert [replayed(key) for key in jobs.values()] == ["done", "done"]


async def test_drain_waits_for_functions_that_run() -> None:
    store = oncegate.MemoryStore()
    go = asyncio.Event()

    @idempotent(name="work", key=lambda key: key, store=store)
    async def work(_: str) -> str:
        await go.wait()
        return "done"

    assert await oncegate.drain(store, 0)
    running = asyncio.ensure_future(work("k"))
    await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    assert not await oncegate.drain(store, 0.05)
    go.set()
    assert await oncegate.drain(store, 60)
    assert await running == "done"


def test_a_result_that_is_too_large_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @idempotent(name="large", key=lambda key: key, store=oncegate.MemoryStore())
    def large(_: str) -> str:
        return "x" * 1024 * 1024

    assert len(large("k")) == 1024 * 1024
    assert "the result of large is not stored: it has 1048578 bytes as JSON, and at most 1048576 are" in caplog.text
    with pytest.raises(oncegate.Unreplayable):
        large("k")


@pytest.mark.parametrize("waits", ["claim", "duplicate"])
async def test_drain_waits_for_what_may_still_begin(waits: str) -> None:
    """A claim under way, or a call that waits for another process, would begin when the pool is closed already."""
    from oncegate.store import Claim, Claimed

    go, claims = asyncio.Event(), 0

    class Slow(oncegate.MemoryStore):
        is_immediate = False

        async def claim(self, claim: Claim) -> Claimed:
            nonlocal claims
            claims += 1
            if waits == "claim":
                await go.wait()
            elif not go.is_set():
                return Claimed("in-progress", lease_left_ms=60_000)
            return await super().claim(claim)

    store = Slow()

    @idempotent(name="work", key=lambda key: key, store=store, service="tests", wait=60)
    async def work(_: str) -> str:
        return "done"

    running = asyncio.ensure_future(work("k"))
    while not claims:
        await asyncio.sleep(0.01)
    assert not await oncegate.drain(store, 0.1)
    draining = asyncio.ensure_future(oncegate.drain(store, 60))
    await asyncio.sleep(0.05)
    assert not draining.done()
    go.set()
    assert await draining
    assert running.done()
    assert await running == "done"


FORKS = """
import logging, os, sys, time, oncegate
logging.basicConfig(level=logging.INFO)
@oncegate.idempotent(name="job", key=lambda key: key, store=oncegate.MemoryStore())
def job(key):
    child = os.fork()
    if child == 0:
        sys.exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(job("k"), flush=True)
"""


def test_a_process_that_a_function_forks_waits_for_nothing() -> None:
    """What the parent runs is none of its business at its exit."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "3\n"
    assert "waits" not in done.stderr
    assert "its end is not stored" not in done.stderr


def test_cancelled_timers_do_not_stay() -> None:
    from oncegate.runtime import MOST_TIMERS, ThreadRuntime

    async def nothing() -> None:
        pass

    runtime = ThreadRuntime()
    kept = [runtime.later(1200, nothing) for _ in range(10)]
    for _ in range(5 * MOST_TIMERS):
        runtime.later(1200, nothing).cancel()
    assert len(runtime._timers) <= MOST_TIMERS
    assert {id(handle) for handle in kept} <= {id(timer[2]) for timer in runtime._timers}
