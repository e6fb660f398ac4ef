"""The edges of an attempt: stores that are full or lose replies, ends that are cancelled, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import io
import secrets
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest

import oncegate
from oncegate import IdempotencyMiddleware, MemoryStore, asgi, current_attempt, http, runtime, wsgi
from oncegate.clocks import Moment
from oncegate.engine import Permit, Policy, Reply, engine_of
from oncegate.engine import _Pending as Pending
from oncegate.errors import StoreUnavailable
from oncegate.runtime import run_blocking
from oncegate.store import Claim, Claimed, StoredRecord
from test_asgi import Sent, ask, scope, status

ONE, OTHER = b"\x01" + bytes(32), b"\x02" + bytes(32)
DAY = 86_400_000


class Store(MemoryStore):
    """A store that waits as one on a server does."""

    is_immediate = False
    is_locked = False
    lost_claims = 0
    takes = 0.0

    async def claim(self, claim: Claim) -> Claimed:
        claimed = await super().claim(claim)
        if self.lost_claims:
            self.lost_claims -= 1
            raise StoreUnavailable("the reply was lost")
        return claimed

    async def renew(self, *arguments: Any) -> Any:
        return "locked" if self.is_locked else await super().renew(*arguments)

    async def release(self, *arguments: Any) -> Any:
        return "locked" if self.is_locked else await super().release(*arguments)

    async def complete(self, *arguments: Any) -> Any:
        await asyncio.sleep(self.takes)
        return await super().complete(*arguments)


def field(sent: Sent, name: bytes) -> bytes | None:
    return dict(sent[0]["headers"]).get(name)


async def until(condition: Any, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def made(store: Any, handler: Any, **settings: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(handler, store=store, **{"scope": "single-tenant", "service": "shop", "wait": 0, **settings})


async def respond(send: Any, code: int, body: bytes = b"paid", **fields: str) -> None:
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def test_renewals_of_blocking_programs_do_not_wait_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many renewals at a time as there are threads: each of them waits for a call of the store in another thread."""
    monkeypatch.setattr("oncegate.runtime.STORE_THREADS", 4)
    threads = runtime.ThreadRuntime()
    together, ended = threading.Barrier(4), []

    async def inner() -> None:
        time.sleep(0.01)

    async def renewal() -> None:
        together.wait(30)
        await threads.call(inner, 5, in_thread=True)
        ended.append(1)

    for _ in range(4):
        threads.later(0.01, renewal)
    deadline = time.monotonic() + 30
    while len(ended) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(ended) == 4


async def test_a_full_store_is_no_outage() -> None:
    class Full(Store):
        is_full = False

        async def claim(self, claim: Claim) -> Claimed:
            if self.is_full and claim.record not in self._records:
                raise StoreUnavailable("full", is_full=True)
            return await super().claim(claim)

    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await respond(send, 201)

    store = Full()
    app = made(store, handler, store_outage="open")
    assert status(await ask(app, scope("paid"))) == 201
    store.is_full = True
    # Each new key is refused by the claim, so that nothing in between is a success of the store.
    engine = app.flow.engine
    for _ in range(10):
        with pytest.raises(StoreUnavailable):
            await engine.call(secrets.token_bytes(32), lambda: store.claim(claim_of(secrets.token_bytes(32))), 5)
    assert field(await ask(app, scope("paid")), b"idempotent-replayed") == b"true"
    assert ran == 1


@pytest.mark.parametrize("kind", ["full", "reached", "refused"])
async def test_a_lost_reply_and_then_a_store_that_refuses(kind: str) -> None:
    """Nothing executes: the store was reached, although it is not known if the first claim was applied."""
    ran = 0

    class Lossy(Store):
        claims = 0

        async def claim(self, claim: Claim) -> Claimed:
            self.claims += 1
            if self.claims == 1:
                raise StoreUnavailable("the connection was lost")
            if kind == "refused":
                raise oncegate.StoreRefused("a right is missing")
            raise StoreUnavailable("READONLY", is_full=kind == "full", is_reached=True)

    async def handler(_: Any, __: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await respond(send, 201)

    app = made(Lossy(), handler, store_outage="open", wait=1)
    assert [status(await ask(app, scope("lost"))) for _ in range(12)] == [503] * 12
    assert ran == 0


def claim_of(record: bytes, fingerprint: bytes = ONE, lease_ms: int = 30_000, on_abandoned: Any = "park") -> Claim:
    return Claim(record, secrets.token_bytes(16), fingerprint, lease_ms, DAY, on_abandoned)


async def test_a_lost_claim_after_an_abandoned_attempt_is_not_released() -> None:
    store, record = Store(), secrets.token_bytes(32)
    engine, policy = engine_of(store, blocking=False), Policy(lease=0.3, on_abandoned="reexecute", wait=2)
    await store.claim(claim_of(record, lease_ms=50, on_abandoned="reexecute"))
    await asyncio.sleep(0.1)
    store.lost_claims = 2
    with pytest.raises(StoreUnavailable):
        await engine.claim(record, ONE, policy)
    await until(lambda: not engine._doubts)
    permit = await engine.claim(record, ONE, policy)
    assert isinstance(permit, Permit)
    assert permit.attempt.is_after_abandoned
    await permit.complete("tombstone")


@pytest.mark.parametrize("other", ["runs", "has ended", "is another request"])
async def test_a_lost_claim_does_not_refuse_what_the_store_has_decided(other: str) -> None:
    """The reply was lost, and another process has the record: each request gets the answer of the store."""
    store, record = Store(), secrets.token_bytes(32)
    engine, policy = engine_of(store, blocking=False), Policy(wait=0)
    owner = await store.claim(claim_of(record, OTHER if other == "is another request" else ONE))
    store.lost_claims = 1
    with pytest.raises(StoreUnavailable):
        await engine.claim(record, ONE, policy)
    assert record in engine._doubts
    if other == "has ended":
        await store.complete(record, owner.token, "completed", b"response", DAY)
    for _ in range(2):
        reply = await engine.claim(record, ONE, policy)
        assert isinstance(reply, Reply)
        assert reply.outcome == {"runs": "in-progress", "has ended": "replay"}.get(other, "mismatch")
    # The request of the record is replayed meanwhile.
    if other == "is another request":
        await store.complete(record, owner.token, "completed", b"response", DAY)
        reply = await engine.claim(record, OTHER, policy)
        assert isinstance(reply, Reply)
        assert reply.outcome == "replay"


async def test_a_mismatch_after_a_lost_reply_is_a_mismatch() -> None:
    store, record = Store(), secrets.token_bytes(32)
    engine = engine_of(store, blocking=False)
    await store.claim(claim_of(record, OTHER))
    store.lost_claims = 1
    reply = await engine.claim(record, ONE, Policy(wait=0.3))
    assert isinstance(reply, Reply)
    assert reply.outcome == "mismatch"


async def test_a_lost_claim_does_not_take_over_an_attempt_of_this_process() -> None:
    class WithoutRenewals(Store):
        async def renew(self, *_: Any) -> Any:
            return "renewed"  # and it was not

    store, record = WithoutRenewals(), secrets.token_bytes(32)
    engine, policy = engine_of(store, blocking=False), Policy(wait=0, lease=0.2)
    owner = await store.claim(claim_of(record))
    store.lost_claims = 1
    with pytest.raises(StoreUnavailable):
        await engine.claim(record, ONE, Policy(wait=0))
    await store.release(record, owner.token, DAY)
    engine._doubts[record] = [(claim_of(record), policy, time.monotonic() + 60)]
    own = claim_of(record, lease_ms=200)
    permit = Permit(engine, own, await store.claim(own), policy, Moment.now())
    engine._running[record] = permit
    await asyncio.sleep(0.5)
    assert await engine._settle_doubts(record) == "elsewhere"
    assert await permit.complete("completed", b"response") == "stored"


@pytest.mark.parametrize(("mark", "kept"), [("tombstone", False), ("release", False), ("replay", True)])
async def test_a_response_that_is_not_to_be_kept_is_not_kept_after_a_commit(mark: Any, kept: bool) -> None:
    """Django gives the whole body of each response that it does not stream."""
    store = Store()
    app = made(store, None)
    keyed = http.begin(app.settings, asgi.head_of(scope()))
    assert isinstance(keyed, http.Keyed)
    permit = await app.flow.engine.claim(secrets.token_bytes(32), ONE, app.flow.policy)
    assert isinstance(permit, Permit)
    permit.attempt.is_completed = True
    await store.complete(permit.attempt.record, permit.attempt.token, "awaited", None, DAY)
    response = http.Executed(201, [], mark, False)
    assert await app.flow.conclude(keyed, permit, response, b"secret") == (None, None)
    found = await store.lookup(permit.attempt.record)
    assert found is not None
    assert (found.state, b"secret" in (found.response or b"")) == ("completed" if kept else "tombstone", kept)


async def test_a_response_that_is_cut_off_after_a_commit() -> None:
    """The record decides: what was committed is the answer, and is not unknown."""
    store = Store()

    async def handler(own: Any, receive: Any, send: Any) -> None:
        attempt = current_attempt()
        assert attempt is not None
        attempt.is_completed = True
        if own["path"] == "/paid":
            kept = oncegate.StoredResponse.of(201, body="paid").encode()
            await store.complete(attempt.record, attempt.token, "completed", kept, DAY)
        await respond(send, 201, b"pa", content_length="4")

    app = made(store, handler)
    sent = await ask(app, scope(path="/paid"))
    assert (status(sent), sent[1]["body"]) == (201, b"paid")
    rolled_back = await ask(app, scope("b", path="/rolled-back"))
    assert (status(rolled_back), b"nothing took effect" in rolled_back[1]["body"]) == (500, True)
    # The key is free.
    assert b"nothing took effect" in (await ask(app, scope("b", path="/rolled-back")))[1]["body"]


async def test_an_error_after_a_rollback_frees_the_key() -> None:
    ran = 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        attempt = current_attempt()
        assert attempt is not None
        attempt.is_completed = ran == 1
        await respond(send, 409 if ran == 1 else 201)

    app = made(Store(), handler)
    assert [status(await ask(app, scope())) for _ in range(3)] == [409, 201, 201]
    assert ran == 2


async def test_a_rollback_after_an_abandoned_attempt_does_not_say_that_nothing_took_effect() -> None:
    store = Store()

    async def handler(own: Any, receive: Any, send: Any) -> None:
        attempt = current_attempt()
        assert attempt is not None
        attempt.is_completed = attempt.is_after_abandoned = True
        await respond(send, 201)

    sent = await ask(made(store, handler), scope())
    assert status(sent) == 500
    assert b"nothing took effect" not in sent[1]["body"]
    assert b"may have taken effect" in sent[1]["body"]


@pytest.mark.parametrize("how", ["open", "race", "after-abandoned"])
async def test_a_commit_that_comes_late_gets_its_response(how: str) -> None:
    """While a transaction holds the record, and if it is committed between a look at the record and what follows from it."""

    class Held(Store):
        state, is_between = "in-progress", False
        ends: list[str] = []

        async def lookup(self, record: bytes) -> Any:
            found = await super().lookup(record)
            return found and StoredRecord(
                self.state, found.fingerprint, found.token, expires_at=found.expires_at, response=None
            )

        async def renew(self, *_: Any) -> Any:
            return "locked" if self.state == "in-progress" else "fenced"

        async def release(self, *_: Any) -> Any:
            self.ends.append("release")
            if how == "race":
                self.state = "awaited"
            return "locked" if self.state == "in-progress" else "fenced"

        async def complete(self, *_: Any) -> Any:
            self.ends.append("complete")
            return "completed"

    store, record = Held(), secrets.token_bytes(32)
    engine = engine_of(store, blocking=False)
    permit = await engine.claim(record, ONE, Policy(lease=30))
    assert isinstance(permit, Permit)
    permit.attempt.is_after_abandoned = how == "after-abandoned"
    engine.settle_by_record(permit, "completed", b"made")
    if how != "race":
        await asyncio.sleep(0.3)
        assert engine.is_running(record)
        store.state = "awaited"
    await until(lambda: not engine.is_running(record))
    assert store.ends[-1:] == ["complete"]
    assert (how == "after-abandoned") == ("release" not in store.ends)


async def test_the_end_of_a_request_that_is_cancelled_is_stored() -> None:
    store = Store()
    store.takes = 0.3

    async def handler(own: Any, receive: Any, send: Any) -> None:
        async with asyncio.timeout(0.1):
            await respond(send, 201)

    app = made(store, handler)
    with contextlib.suppress(TimeoutError):
        await ask(app, scope())
    assert await app.flow.engine.drain(30)
    states = [found.state for found in store._records.values()]
    assert states == ["completed"]


async def test_a_request_that_is_cancelled_while_its_transaction_is_open() -> None:
    """Its end decides: after a rollback the key is free."""
    store, ran = Store(), 0

    async def handler(own: Any, receive: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        if ran > 1:
            await respond(send, 201)
            return
        attempt = current_attempt()
        assert attempt is not None
        attempt.is_completed = store.is_locked = True
        try:
            async with asyncio.timeout(0.1):
                await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        finally:
            store.is_locked = False

    app = made(store, handler)
    assert status(await ask(app, scope())) == 500
    assert await app.flow.engine.drain(30)
    assert status(await ask(app, scope())) == 201


async def test_a_released_record_is_kept_for_its_token_only() -> None:
    store, record = Store(), secrets.token_bytes(32)
    permit = await engine_of(store, blocking=False).claim(record, ONE, Policy(lease=5))
    assert isinstance(permit, Permit)
    await permit.release()
    found = await store.lookup(record)
    assert found is not None
    assert found.expires_at - store._clock() <= 20_000


async def test_a_client_that_leaves_before_the_stream_begins() -> None:
    begins = asyncio.Event()

    async def handler(own: Any, receive: Any, send: Any) -> None:
        await begins.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        while True:
            await send({"type": "http.response.body", "body": b"data: x\n\n", "more_body": True})
            await asyncio.sleep(0.01)

    app = made(Store(), handler, stream_timeout="1s")
    first = asyncio.ensure_future(ask(app, scope(), {"type": "http.request", "body": bytes(1000)}))
    await until(lambda: app._tasks)
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.wait([first])
    # The handler still has the body.
    assert app.flow.limits._held == 1000
    begins.set()
    await until(lambda: not app._tasks)
    await until(lambda: (app.flow.limits._held, app.flow.limits._running) == (0, 0))


@pytest.mark.parametrize("leaves", ["in the stream", "while it is stored"])
async def test_what_runs_after_a_whole_response_is_not_cancelled(leaves: str) -> None:
    """Such as a background task. Only a stream that does not end is, after its client has left."""
    store, reached, done = Store(), asyncio.Event(), asyncio.Event()
    store.pause, part = asyncio.Event(), {"type": "http.response.body", "body": b"a"}

    async def handler(own: Any, receive: Any, send: Any) -> None:
        is_stream = leaves == "in the stream"
        headers = [(b"idempotency-store", b"tombstone")] if is_stream else [(b"content-length", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if is_stream:
            await send({**part, "more_body": True})
            reached.set()
            await store.pause.wait()
        await send(part)
        await asyncio.sleep(0.4)
        done.set()

    if leaves == "while it is stored":
        own_complete = store.complete

        async def complete(*arguments: Any) -> Any:
            reached.set()
            await store.pause.wait()
            return await own_complete(*arguments)

        store.complete = complete
    app = made(store, handler, stream_timeout="100ms")
    first = asyncio.ensure_future(ask(app, scope()))
    await reached.wait()
    first.cancel()
    await asyncio.wait([first])
    store.pause.set()
    await until(lambda: not app._tasks)
    assert done.is_set()


async def test_code_that_raises_after_a_commit_changes_no_success() -> None:
    store = Store()

    async def handler(own: Any, receive: Any, send: Any) -> None:
        attempt = current_attempt()
        assert attempt is not None
        attempt.is_completed = store.is_locked = True
        await respond(send, 201)
        await store.complete(attempt.record, attempt.token, "awaited", None, DAY)
        store.is_locked = False
        raise RuntimeError("clean-up")

    app, sent = made(store, handler), []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"5"}

    async def send(message: Any) -> None:
        sent.append(message)

    with pytest.raises(RuntimeError, match="clean-up"):
        await app(scope(), receive, send)
    assert (status(sent), sent[1]["body"]) == (201, b"paid")
    again = await ask(app, scope())
    assert (status(again), field(again, b"idempotent-replayed")) == (201, b"true")


@pytest.mark.parametrize("parts", [0, 1])
def test_a_wsgi_stream_is_closed(parts: int) -> None:
    closed: list[int] = []

    class Body:
        def __iter__(self) -> Any:
            yield from (b"a", b"b", b"c")

        def close(self) -> None:
            closed.append(1)

    def app(environ: Any, start: Any) -> Any:
        start("200 OK", [("Content-Type", "text/event-stream")])
        return Body()

    own = wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope="single-tenant")
    environ = {
        "REQUEST_METHOD": "POST", "PATH_INFO": "/a", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_HOST": "h",
        "wsgi.input": io.BytesIO(b"12345"), "CONTENT_LENGTH": "5",
    }
    answer: Any = own(environ, lambda *_: None)
    assert own.flow.limits._held == 5
    for _ in range(parts):
        next(iter(answer))
    answer.close()
    answer.close()
    assert closed == [1]
    assert (own.flow.limits._held, own.flow.limits._running) == (0, 0)


@pytest.mark.parametrize("server_errors", ["replay", "release"])
@pytest.mark.parametrize("malformed", ["OK", "", None, "99 x", "1000 x", "-1 x", "2_0_0 x"])
def test_a_status_that_cannot_be_read_ends_its_attempt(malformed: Any, server_errors: str) -> None:
    """It may be that of a success, so the outcome is unknown."""
    ran = 0

    def app(environ: Any, start: Any) -> Any:
        nonlocal ran
        ran += 1
        start(malformed, [("Content-Type", "text/plain")])
        return [b"ok"]

    own = wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope="single-tenant", server_errors=server_errors)
    for _ in range(2):
        environ = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/a", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_HOST": "h",
            "wsgi.input": io.BytesIO(b"12345"), "CONTENT_LENGTH": "5",
        }
        statuses: list[str] = []
        body = b"".join(own(environ, lambda code, *_: statuses.append(code)))
        assert (statuses[0][:3], b"outcome-unknown" in body) == ("500", True)
        assert not own.flow.engine._running
    assert ran == 1


UNREAD: list[Any] = [("X", "\u20ac"), ("X", 5), ("X",), None]


@pytest.mark.parametrize("server_errors", ["replay", "release"])
@pytest.mark.parametrize("field", UNREAD)
@pytest.mark.parametrize("code", [200, 404, 500])
def test_a_header_that_cannot_be_read_ends_its_attempt(code: int, field: Any, server_errors: str) -> None:
    """A success may have had its effect. An error of the server is one, whatever its fields are."""
    ran = 0

    def app(environ: Any, start: Any) -> Any:
        nonlocal ran
        ran += 1
        start(f"{code} x", [("Content-Type", "text/plain"), field])
        return [b"ok"]

    own = wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope="single-tenant", server_errors=server_errors)
    is_released = code == 500 and server_errors == "release"
    for _ in range(2):
        environ = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/a", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_HOST": "h",
            "wsgi.input": io.BytesIO(b"12345"), "CONTENT_LENGTH": "5",
        }
        statuses: list[str] = []
        body = b"".join(own(environ, lambda code, *_: statuses.append(code)))
        assert (statuses[0][:3], b"outcome-unknown" in body) == ("500", not is_released)
        assert not own.flow.engine._running
    assert ran == (2 if is_released else 1)


def test_the_page_for_a_header_that_cannot_be_read_is_the_response() -> None:
    """A framework answers its own exception."""

    def app(environ: Any, start: Any) -> Any:
        try:
            start("200 OK", [("X", "\u20ac")])
        except UnicodeEncodeError:
            start("500 x", [("X", "own")])
        return [b"own"]

    own = wsgi.IdempotencyMiddleware(app, store=MemoryStore(), scope="single-tenant")
    for _ in range(2):
        environ = {
            "REQUEST_METHOD": "POST", "PATH_INFO": "/a", "HTTP_IDEMPOTENCY_KEY": "k", "HTTP_HOST": "h",
            "wsgi.input": io.BytesIO(b"12345"), "CONTENT_LENGTH": "5",
        }
        assert b"".join(own(environ, lambda *_: None)) == b"own"


@pytest.mark.parametrize("server_errors", ["replay", "release"])
@pytest.mark.parametrize("head", [{"status": "200"}, {"headers": [("x", "text")]}, {"headers": [(b"x", None)]}])
async def test_a_head_of_asgi_that_cannot_be_read_ends_its_attempt(head: Any, server_errors: str) -> None:
    ran = 0

    async def handler(_: Any, __: Any, send: Any) -> None:
        nonlocal ran
        ran += 1
        await send({"type": "http.response.start", "status": 200, "headers": [], **head})
        await send({"type": "http.response.body", "body": b"ok"})

    app = made(MemoryStore(), handler, server_errors=server_errors)
    for _ in range(2):
        with contextlib.suppress(TypeError, ValueError):
            sent = await ask(app, scope("unread"))
            assert status(sent) == 500
    assert ran == 1


def test_a_generator_that_raises_when_it_is_closed() -> None:
    def broken() -> Any:
        try:
            yield 1
        finally:
            raise RuntimeError("in finally")

    store = MemoryStore()

    @oncegate.idempotent(name="x", key=lambda key: key, store=store, wait=0)
    def call(key: str) -> Any:
        own = broken()
        next(own)
        return own

    with pytest.raises(oncegate.ConfigError):
        call("a")
    assert not engine_of(store, blocking=True)._running
    with pytest.raises(oncegate.OutcomeUnknown):
        call("a")


def test_comments_before_a_statement_take_no_time() -> None:
    from oncegate.transactions import _ENDS

    began = time.monotonic()
    assert not _ENDS.match("/**/" * 30 + "SELECT 1")
    assert _ENDS.match("/**/" * 30 + "-- x\n;COMMIT")
    assert time.monotonic() - began < 10


def test_a_record_in_memory_has_one_entry_for_its_expiry() -> None:
    store, record = MemoryStore(), secrets.token_bytes(32)
    for _ in range(1000):
        claimed = run_blocking(store.claim(claim_of(record)))
        run_blocking(store.release(record, claimed.token, 120_000))
    assert len(store._expiries) <= 3


async def test_an_end_that_is_stored_twice_leaves_a_later_attempt_alone() -> None:
    """The process forgot the later one, so that `store_outage="open"` executed next to it, and `drain` did not wait for it."""
    first_release, slow_reply = asyncio.Event(), asyncio.Event()

    class Slow(Store):
        is_away, releases = True, 0

        async def release(self, *arguments: Any) -> Any:
            if self.is_away:
                raise StoreUnavailable("away")
            released = await super().release(*arguments)
            self.releases += 1
            if self.releases == 1:
                first_release.set()
                await slow_reply.wait()
            return released

    store, record, policy = Slow(), secrets.token_bytes(32), Policy(wait=0)
    engine = engine_of(store, blocking=False)
    permit: Any = await engine.claim(record, ONE, policy)
    assert await permit.release() == "not-stored"
    store.is_away = False
    await asyncio.wait_for(first_release.wait(), 30)
    later: Any = await engine.claim(record, ONE, policy)
    assert isinstance(later, Permit)
    slow_reply.set()
    await asyncio.sleep(0.05)
    assert (store.releases, engine.is_running(record)) == (2, True)
    assert await later.release() == "stored"
    assert not engine.is_running(record)


@pytest.mark.parametrize("state", ["completed", "tombstone", "unknown"])
async def test_a_duplicate_gets_the_end_of_an_attempt_that_has_overtaken_one_of_this_process(state: Any) -> None:
    """It got a 409 for as long as the handler of the earlier one ran, although the store had the outcome."""
    store, record = Store(), secrets.token_bytes(32)
    engine, policy = engine_of(store, blocking=False), Policy(wait=0, on_abandoned="reexecute")
    stale: Any = await engine.claim(record, ONE, policy)
    stale.end()
    store._clock = lambda: time.time_ns() // 1_000_000 + 60_000
    other = await store.claim(claim_of(record, on_abandoned="reexecute"))
    assert other.token > stale.attempt.token
    running: Any = await engine.claim(record, ONE, policy)
    assert running.outcome == "in-progress"
    response = b"response" if state == "completed" else None
    await store.complete(record, other.token, state, response, DAY)
    found: Any = await engine.claim(record, ONE, policy)
    expected = {"completed": "replay", "tombstone": "unreplayable", "unknown": "unknown"}[state]
    assert (found.outcome, found.response) == (expected, response or b"")
    assert await stale.complete("completed", b"late") == "fenced"


async def test_a_drain_ends_in_time_if_the_store_does_not_answer() -> None:
    """It waited for each end that was not stored."""

    class Hangs(Store):
        hangs = False

        async def complete(self, *arguments: Any) -> Any:
            if self.hangs:
                await asyncio.sleep(3600)
            return await super().complete(*arguments)

    store = Hangs()
    engine = engine_of(store, blocking=False)
    permits: list[Any] = [await engine.claim(secrets.token_bytes(32), ONE, Policy(store_timeout=1)) for _ in range(20)]
    store.hangs = True
    for permit in permits:
        engine._defer(permit, "completed", b"response")
    began_at = time.monotonic()
    assert not await oncegate.drain(store, 0.5)
    assert time.monotonic() - began_at < 10
    store.hangs = False
    assert await oncegate.drain(store, 60)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_drain_stores_several_ends_at_a_time(blocking: bool) -> None:
    together: Any = threading.Barrier(4) if blocking else None

    class Together(Store):
        is_blocking = blocking

        async def complete(self, *arguments: Any) -> Any:
            if blocking:
                together.wait(30)
            else:
                await together.wait()
            return await MemoryStore.complete(self, *arguments)

    async def drained() -> bool:
        nonlocal together
        together = together or asyncio.Barrier(4)
        store = Together()
        engine = engine_of(store, blocking=blocking)
        permits: list[Any] = [await engine.claim(secrets.token_bytes(32), ONE, Policy(store_timeout=20)) for _ in range(4)]
        for permit in permits:
            # Not by their timers, which would come at the same time.
            engine._pending[permit.attempt.record] = Pending(permit, "completed", b"", time.monotonic() + 60)
        return oncegate.drain_blocking(store, 20) if blocking else await oncegate.drain(store, 20)

    assert run_blocking(drained()) if blocking else asyncio.run(drained())


HANGS = """
import time, oncegate
class Hangs(oncegate.MemoryStore):
    is_immediate, is_blocking = False, True
    async def claim(self, claim):
        time.sleep(3600)
@oncegate.idempotent(name="job", key=lambda key: key, store=Hangs(), service="shop", store_timeout=0.2)
def job(key): ...
try:
    oncegate.drain_blocking(oncegate.MemoryStore())
    job("k")
except oncegate.StoreError:
    print("failed", flush=True)
"""


def test_a_blocking_program_ends_although_its_store_never_answers() -> None:
    """The interpreter waited for the thread of the call, without a limit."""
    done = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "failed\n"


async def test_a_store_that_the_program_has_given_up_does_not_stay() -> None:
    def run(number: int) -> Any:
        store = MemoryStore()

        @oncegate.idempotent(name="charge", key=lambda key: key, store=store, service="shop")
        def charge(key: str) -> str:
            return key

        assert charge("a") == charge("a") == "a"
        copied = copy.copy(store)
        assert engine_of(copied, blocking=True).store is copied
        return weakref.ref(store)

    stores = [run(number) for number in range(3)]
    gc.collect()
    assert [store() for store in stores] == [None] * 3
