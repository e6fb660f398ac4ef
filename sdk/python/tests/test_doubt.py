"""Claims whose replies are lost, and ends that the store does not take: nothing executes twice, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

import oncegate
from oncegate.clocks import Moment
from oncegate.engine import Permit, Policy, Reply, engine_of
from oncegate.errors import StoreUnavailable
from oncegate.runtime import run_blocking
from oncegate.store import Claim, Claimed
from servers import wait_for

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


@pytest.mark.parametrize("number", [2, 5])
async def test_claims_of_duplicates_in_doubt_are_all_released(number: int) -> None:
    """The one that was granted must not be forgotten for one that was not."""

    class Waiting(LossyStore):
        is_immediate = False

        async def claim(self, claim: Claim) -> Claimed:
            arrived.add(claim.attempt)
            if len(arrived) == number:
                ready.set()
            await ready.wait()
            return await super().claim(claim)

    ready, arrived = asyncio.Event(), set[bytes]()
    store, record = Waiting(), secrets.token_bytes(32)
    store.lost_claims = 1000
    outcomes = await asyncio.gather(*(claimed(store, record) for _ in range(number)), return_exceptions=True)
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    assert len(set(store.attempts)) == number
    engine = engine_of(store, blocking=False)
    assert engine._number_of_doubts == number
    store.lost_claims = 0
    permit = await claimed(store, record)
    assert isinstance(permit, Permit)
    assert not permit.attempt.is_after_abandoned
    permit.end()
    assert (engine._number_of_doubts, engine._doubts) == (0, {})


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


@pytest.mark.parametrize("hangs", ["lookup", "claim"])
async def test_a_client_waits_for_one_call_that_takes_too_long(hangs: str) -> None:
    class Hanging(oncegate.MemoryStore):
        is_immediate = False
        calls: list[str] = []
        hangs = ""

        async def lookup(self, record: bytes) -> Any:
            return await self._called("lookup", super().lookup(record))

        async def claim(self, claim: Claim) -> Claimed:
            return await self._called("claim", super().claim(claim))

        async def _called(self, name: str, work: Any) -> Any:
            self.calls.append(name)
            found = await work
            if self.hangs == name:
                await asyncio.Event().wait()
            return found

    store = Hanging()
    engine, policy = engine_of(store, blocking=False), Policy(wait=5, store_timeout=0.2)
    assert isinstance(await engine.claim(secrets.token_bytes(32), FINGERPRINT, policy), Permit)
    store.hangs = hangs
    assert engine._looked_at is not None
    engine._looked_at = Moment(engine._looked_at.monotonic - 3, engine._looked_at.wall)
    store.calls.clear()
    with pytest.raises(StoreUnavailable, match="did not answer within"):
        await engine.claim(secrets.token_bytes(32), FINGERPRINT, policy)
    assert store.calls == ["lookup", "claim"][: 2 if hangs == "claim" else 1]


async def test_a_store_of_an_id_secret_is_refused() -> None:
    from oncegate.ids import MARK

    store = oncegate.MemoryStore()
    await store.claim(Claim(MARK, bytes(16), FINGERPRINT, 1000, 60_000, "park"))
    with pytest.raises(StoreUnavailable, match="id secret"):
        await claimed(store, secrets.token_bytes(32))


@pytest.mark.parametrize("on_abandoned", ["park", "reexecute"])
async def test_an_attempt_of_this_process_is_not_abandoned_while_it_runs(on_abandoned: Any) -> None:
    class WithoutRenewals(oncegate.MemoryStore):
        async def renew(self, *_: Any) -> Any:
            return "renewed"  # and it was not

    store, record = WithoutRenewals(), secrets.token_bytes(32)
    policy = Policy(wait=0, lease=0.1, on_abandoned=on_abandoned)
    engine = engine_of(store, blocking=False)
    permit = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(permit, Permit)
    await asyncio.sleep(0.3)
    again = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(again, Reply)
    assert again.outcome == "in-progress"
    other = await engine.claim(record, b"\x01" + bytes(31) + b"\x01", policy)
    assert isinstance(other, Reply)
    assert other.outcome == "mismatch"
    assert await permit.complete("tombstone") == "stored"
    over = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(over, Reply)
    assert over.outcome == "unreplayable"


class Stalling:
    """A proxy to a server. While it stalls, it keeps what connections send, and delivers that later, although their clients have
    closed them meanwhile: as a network does that sends lost packets again, or a server that stands still."""

    def __init__(self, port: int) -> None:
        self.server, self.is_stalling, self.kept = port, False, 0
        self.delivers = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.sockets, self.threads = [self.listener], list[threading.Thread]()
        self.start(self.accept)

    def start(self, target: Any, *arguments: Any) -> None:
        self.threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self.threads[-1].start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.server))
                self.sockets += [client, server]
                self.start(self.copy, client, server, True)
                self.start(self.copy, server, client, False)

    def copy(self, source: socket.socket, target: socket.socket, may_stall: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if may_stall and self.is_stalling:
                    self.kept += 1
                    self.delivers.wait(60)
                target.sendall(data)
            if may_stall:
                # The server answers first, and then hears that its client is gone.
                time.sleep(0.2)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.delivers.set()
        for own in self.sockets:
            with contextlib.suppress(OSError):
                own.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(20)
        for own in self.sockets:
            own.close()


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_retried_meanwhile", [False, True])
async def test_a_claim_that_arrives_after_its_release_leaves_no_unknown_outcome(
    redis: Any, is_retried_meanwhile: bool
) -> None:
    from redis.asyncio import Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    proxy = Stalling(redis.port)
    url = f"redis://127.0.0.1:{proxy.port}/0"
    async with (
        Redis.from_url(url, retry=Retry(NoBackoff(), 0)) as client,
        Redis.from_url(redis.url) as direct,
    ):
        own, other = oncegate.RedisStore(client), oncegate.RedisStore(direct)
        record, policy = secrets.token_bytes(32), Policy(wait=0, lease=1.5, store_timeout=0.5)
        engine = engine_of(own, blocking=False)
        # The look at the mark, before the proxy stalls.
        warm = await engine.claim(secrets.token_bytes(32), FINGERPRINT, policy)
        assert isinstance(warm, Permit)
        await warm.release()
        proxy.is_stalling = True
        with pytest.raises(StoreUnavailable):
            await engine.claim(record, FINGERPRINT, policy)
        assert proxy.kept
        proxy.is_stalling = False

        async def is_released() -> bool:
            found = await other.lookup(record)
            return found is not None and found.state == "released"

        await until(is_released, "the claim was not settled")
        before = await other.lookup(record)
        assert before is not None

        async def has_arrived() -> bool:
            found = await other.lookup(record)
            return found is not None and found.token > before.token

        await asyncio.sleep(0.3)
        proxy.delivers.set()
        await until(has_arrived, "the late claim did not arrive")
        if not is_retried_meanwhile:
            await until(is_released, "the late claim was not released")
            await asyncio.sleep(policy.lease + 0.5)
        elsewhere = engine_of(own if is_retried_meanwhile else other, blocking=False)
        permit = await elsewhere.claim(record, FINGERPRINT, policy)
        assert isinstance(permit, Permit), permit
        assert await permit.complete("tombstone") == "stored"
        assert await engine.drain(10)
        assert engine._number_of_late == 0
    proxy.close()


async def test_the_claims_that_are_watched_for_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from oncegate import engine as module

    class Remote(LossyStore):
        is_immediate = False

    monkeypatch.setattr(module, "MAX_LATE", 3)
    store = Remote()
    engine = engine_of(store, blocking=False)
    for _ in range(5):
        store.lost_claims, record = 2, secrets.token_bytes(32)
        with pytest.raises(StoreUnavailable):
            await claimed(store, record)
        permit = await claimed(store, record)
        assert isinstance(permit, Permit)
        await permit.complete("tombstone")
    assert engine._number_of_late <= 3
    # Records that have ended are forgotten at the next look.
    await until(lambda: asyncio.sleep(0, not engine._late), "ended records are watched for")
    assert engine._number_of_late == 0


class Remote(LossyStore):
    is_immediate = False


async def test_a_drain_does_not_wait_for_a_look_at_a_claim_that_may_be_late() -> None:
    store = Remote()
    engine, policy = engine_of(store, blocking=False), Policy(wait=0.3, store_timeout=30)
    store.lost_claims = 1
    permit = await engine.claim(secrets.token_bytes(32), FINGERPRINT, policy)
    assert isinstance(permit, Permit)
    await permit.release()
    assert engine._number_of_late == 1
    store.lookup = lambda _: asyncio.Event().wait()  # type: ignore[assignment, method-assign, return-value]
    began_at = time.monotonic()
    assert await engine.drain(0.5)
    assert time.monotonic() - began_at < 15


class Breaking(oncegate.MemoryStore):
    """Each of the next calls finds a connection that is broken."""

    is_immediate = False

    def __init__(self) -> None:
        super().__init__()
        self.broken = self.claims = 0

    async def take(self) -> None:
        await asyncio.sleep(0)
        if self.broken:
            self.broken -= 1
            raise StoreUnavailable("a connection broke", is_broken=True)

    async def claim(self, claim: Claim) -> Claimed:
        self.claims += 1
        await self.take()
        return await super().claim(claim)

    async def complete(self, *arguments: Any) -> Any:
        await self.take()
        return await super().complete(*arguments)

    async def release(self, *arguments: Any) -> Any:
        await self.take()
        return await super().release(*arguments)


async def test_a_retry_does_not_wait_for_each_claim_in_doubt() -> None:
    store, record = Breaking(), secrets.token_bytes(32)
    engine, policy = engine_of(store, blocking=False), Policy(store_timeout=2)
    await engine.check(policy)
    store.broken = 10_000
    outcomes = await asyncio.gather(
        *(engine.claim(record, FINGERPRINT, policy) for _ in range(8)), return_exceptions=True
    )
    assert all(isinstance(outcome, StoreUnavailable) for outcome in outcomes)
    store.claims, began_at = 0, time.monotonic()
    with pytest.raises(StoreUnavailable, match="not known"):
        await engine.claim(record, FINGERPRINT, policy)
    # Those of one claim, and some of the timer.
    assert store.claims < 25
    assert time.monotonic() - began_at < 8
    store.broken = 0
    permit = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(permit, Permit)
    assert engine._number_of_doubts == 0
    permit.end()


async def test_a_retry_does_not_wait_for_each_claim_that_the_store_answers_with_an_error() -> None:
    """Such as a `statement_timeout` behind a lock: each of them takes as long."""

    class Refusing(LossyStore):
        is_immediate = False
        refuses = False

        async def claim(self, claim: Claim) -> Claimed:
            self.attempts.append(claim.attempt)
            if self.refuses:
                raise StoreUnavailable("57014", is_reached=True)
            return await super().claim(claim)

    store, record = Refusing(), secrets.token_bytes(32)
    store.refuses = True
    for _ in range(8):
        store.attempts.clear()
        with pytest.raises(StoreUnavailable, match="57014"):
            await engine_of(store, blocking=False).claim(record, FINGERPRINT, Policy(wait=0))
        # That of one in doubt, perhaps another by the timer, and the new one.
        assert len(store.attempts) <= 3
    store.refuses = False
    permit = await claimed(store, record)
    assert isinstance(permit, Permit)
    assert engine_of(store, blocking=False)._number_of_doubts == 0
    permit.end()


async def test_a_claim_in_doubt_is_released_by_a_drain() -> None:
    """The next process finds no unknown outcome."""
    store, record = LossyStore(), secrets.token_bytes(32)
    store.lost_claims = 2
    with pytest.raises(StoreUnavailable):
        await claimed(store, record)
    assert await oncegate.drain(store, 10)
    found = await store.lookup(record)
    assert found is not None
    assert found.state == "released"


async def test_a_drain_waits_for_one_claim_in_doubt_if_the_store_is_away() -> None:
    class Away(LossyStore):
        is_immediate = False

        async def claim(self, claim: Claim) -> Claimed:
            self.attempts.append(claim.attempt)
            await asyncio.sleep(60)
            raise AssertionError

    store = Away()
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await engine_of(store, blocking=False).claim(secrets.token_bytes(32), FINGERPRINT, Policy(store_timeout=0.05))
    engine, began_at = engine_of(store, blocking=False), time.monotonic()
    engine._doubts = {
        record: [(claim, Policy(store_timeout=60), until) for claim, _, until in doubts]
        for record, doubts in engine._doubts.items()
    }
    assert await oncegate.drain(store, 0.5)
    assert time.monotonic() - began_at < 5


IN_DOUBT = """
import atexit, secrets, oncegate
from oncegate.runtime import run_blocking
class Lossy(oncegate.MemoryStore):
    lost, records = 2, []
    async def claim(self, claim):
        claimed = await super().claim(claim)
        if self.lost:
            self.lost -= 1
            self.records.append(claim.record)
            raise oncegate.StoreUnavailable("the reply was lost")
        return claimed
store = Lossy()
# It is called last.
atexit.register(lambda: print(run_blocking(store.lookup(store.records[-1])).state, flush=True))
@oncegate.idempotent(name="job", key=lambda key: key, store=store)
def job(key): ...
try:
    job("k")
except oncegate.StoreUnavailable:
    print("failed", flush=True)
"""


def test_a_claim_in_doubt_is_released_at_the_exit_of_a_blocking_program() -> None:
    done = subprocess.run([sys.executable, "-c", IN_DOUBT], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["failed", "released"], done.stderr


async def test_ends_on_connections_that_broke_are_sent_again() -> None:
    """As many as a pool has after a failover."""
    store = Breaking()
    engine = engine_of(store, blocking=False)
    permits = [await engine.claim(secrets.token_bytes(32), FINGERPRINT, Policy()) for _ in range(10)]
    store.broken = 10
    ends = await asyncio.gather(
        *(
            permit.complete("completed", b"") if number % 2 else permit.release()
            for number, permit in enumerate(permits)
            if isinstance(permit, Permit)
        )
    )
    assert (ends, store.broken) == (["stored"] * 10, 0)


async def test_an_attempt_whose_outcome_is_unknown_keeps_its_lease_after_a_lost_claim() -> None:
    store, record = Remote(), secrets.token_bytes(32)
    policy = Policy(wait=0.3, lease=2, on_abandoned="reexecute")
    engine = engine_of(store, blocking=False)
    store.lost_claims = 1
    permit = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(permit, Permit)
    await permit.park("the handler ran, and was cancelled")
    reply = await engine.claim(record, FINGERPRINT, policy)
    assert isinstance(reply, Reply)
    assert reply.outcome == "in-progress"
    deadline = time.monotonic() + 20
    while not isinstance(later := await engine.claim(record, FINGERPRINT, policy), Permit):
        assert time.monotonic() < deadline, later
    assert later.attempt.is_after_abandoned
    later.end()


async def test_a_late_claim_after_an_abandoned_attempt_is_left_to_its_lease() -> None:
    store, record = Remote(), secrets.token_bytes(32)
    policy = Policy(wait=0, lease=1, on_abandoned="reexecute")
    engine = engine_of(store, blocking=False)
    lost: list[Claim] = []
    own = store.claim

    async def claim(claim: Claim) -> Claimed:
        lost.append(claim)
        return await own(claim)

    store.claim = claim  # type: ignore[method-assign]
    store.lost_claims = 1
    with pytest.raises(StoreUnavailable):
        await engine.claim(record, FINGERPRINT, policy)
    await until(lambda: asyncio.sleep(0, engine._number_of_late == 1), "the claim was not settled")
    other = Claim(record, secrets.token_bytes(16), FINGERPRINT, 100, 60_000, "reexecute")
    assert (await oncegate.MemoryStore.claim(store, other)).outcome == "execute"
    # Its process is gone. The first message of the lost claim arrives after that.
    await asyncio.sleep(0.3)
    assert (await oncegate.MemoryStore.claim(store, lost[0])).after_abandoned
    other = Claim(record, secrets.token_bytes(16), FINGERPRINT, 1000, 60_000, "reexecute")
    deadline = time.monotonic() + 10
    while (claimed := await oncegate.MemoryStore.claim(store, other)).outcome != "execute":
        assert time.monotonic() < deadline, "the lease is extended for ever"
        await asyncio.sleep(0.05)
    assert claimed.after_abandoned


def test_a_blocking_program_watches_for_late_claims_with_one_timer() -> None:
    class Remote(LossyStore):
        is_immediate, is_blocking = False, True
        claims: list[Claim] = []

        async def claim(self, claim: Claim) -> Claimed:
            self.claims.append(claim)
            return await super().claim(claim)

    def state() -> str:
        found = run_blocking(store.lookup(claim.record))
        return found.state if found else ""

    store = Remote()
    engine = engine_of(store, blocking=True)
    policy = Policy(wait=0.3, lease=2)

    def answers() -> bool:
        try:
            run_blocking(engine.lookup(bytes(32), policy))
        except StoreUnavailable:
            return False
        return True

    # A claim is not sent if those that are sent again in the background have just failed too often.
    while len({claim.record for claim in store.claims}) < 20:
        store.lost_claims = 1000
        with pytest.raises(StoreUnavailable):
            run_blocking(engine.claim(secrets.token_bytes(32), FINGERPRINT, policy))
        store.lost_claims = 0
        wait_for(answers, "the store is not asked again")
    lost = list({claim.record: claim for claim in store.claims}.values())
    for claim in lost:
        wait_for(lambda: state() == "released", "the claim was not settled")
    assert engine._number_of_late == 20
    for claim in lost:
        # The first message arrives.
        assert run_blocking(oncegate.MemoryStore.claim(store, claim)).outcome == "execute"
    for claim in lost:
        wait_for(lambda: state() == "released", "the late claim was not released")
    assert run_blocking(engine.drain(5))
    assert engine._late == {}
