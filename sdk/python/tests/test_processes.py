"""Whole processes on real sockets: workers, hang-ups, kills, pauses, and a store that is away."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import servers
from servers import wait_for

HERE = Path(__file__).parent

# The time in which a worker has to start or to answer its parent. A parent that asks a worker which is about to exit waits for
# all of it, and starts no other one meanwhile.
WORKER_SECONDS = 60


class Shop:
    def __init__(self, process: subprocess.Popen[bytes], port: int, ledger: Path) -> None:
        self.process, self.port, self.ledger = process, port, ledger
        self.url = f"http://127.0.0.1:{port}"
        self._earlier = 0

    def begin(self) -> None:
        """A test begins: the effects of others do not count any more."""
        self._earlier += len(self.effects())

    def effects(self) -> list[str]:
        return self.ledger.read_text().split()[self._earlier :] if self.ledger.exists() else []

    def charge(self, key: str, body: str = "5", timeout: float = 20, **params: Any) -> httpx.Response:
        return servers.post(
            f"{self.url}/charge", content=body, params=params, headers={"idempotency-key": key}, timeout=timeout
        )


@contextlib.contextmanager
def shop(store: str, ledger: Path, workers: int = 1, port: int = 0, **environment: str) -> Iterator[Shop]:
    port = port or servers.free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(port), "--workers", str(workers),
         "--log-level", "warning", "--timeout-worker-healthcheck", str(WORKER_SECONDS)],
        cwd=HERE,
        env={**os.environ, "STORE": store, "LEDGER": str(ledger), **environment},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: answers(port), "the shop did not start", WORKER_SECONDS)
        yield Shop(process, port, ledger)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def answers(port: int) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return servers.get(f"http://127.0.0.1:{port}/none").status_code == 404
    return False


def new() -> str:
    return uuid.uuid4().hex


def hang_up(shop: Shop, key: str, seconds: float) -> None:
    """Sends a request, waits until its handler runs, and hangs up."""
    before = len(shop.effects())
    with socket.create_connection(("127.0.0.1", shop.port)) as client:
        head = f"POST /charge?seconds={seconds} HTTP/1.1\r\nhost: 127.0.0.1:{shop.port}\r\nidempotency-key: {key}\r\n"
        client.sendall(f"{head}content-length: 1\r\n\r\n5".encode())
        wait_for(lambda: len(shop.effects()) > before, "the handler did not start")


@pytest.fixture(scope="module", params=["postgres", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


@pytest.fixture(scope="module")
def running(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with shop(store_url, tmp_path_factory.mktemp("shop") / "ledger", LEASE="1") as own:
        yield own


@pytest.fixture
def shared(running: Shop) -> Shop:
    """A process that is there before and after each test."""
    running.begin()
    return running


@pytest.fixture(scope="module", params=["postgres", "redis"])
def paused_at_times(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A store of its own that tests pause, and a shop."""
    ledger = tmp_path_factory.mktemp("shop") / "ledger"
    with getattr(servers, request.param)() as store, shop(store.url, ledger, STORE_TIMEOUT="0.5") as own:
        yield store, own


def test_one_effect_over_four_workers(store_url: str, tmp_path: Path) -> None:
    with shop(store_url, tmp_path / "ledger", workers=4) as own, concurrent.futures.ThreadPoolExecutor(40) as threads:
        key = new()
        replies = list(threads.map(lambda _: own.charge(key, seconds=0.2), range(40)))
        assert {(reply.status_code, reply.text) for reply in replies} == {(200, replies[0].text)}
        assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1
        assert own.effects() == ["5"]
        reused = own.charge(key, body="6", seconds=0.2)
        assert (reused.status_code, reused.json()["retry"]) == (422, "new-key")


def test_a_hang_up_does_not_stop_the_handler(shared: Shop) -> None:
    key = new()
    hang_up(shared, key, 0.5)
    reply = shared.charge(key, seconds=0.5)
    assert (reply.status_code, reply.headers["idempotent-replayed"]) == (200, "true")
    assert shared.effects() == ["5"]


def test_a_handler_that_throws(shared: Shop) -> None:
    key = new()
    first, second = (shared.charge(key, throw="1") for _ in range(2))
    assert [(reply.status_code, reply.text) for reply in (first, second)] == [(500, "Internal Server Error")] * 2
    assert second.headers["idempotent-replayed"] == "true"
    assert shared.effects() == ["5"]
    assert servers.post(f"{shared.url}/required").status_code == 400
    assert servers.post(f"{shared.url}/required", headers={"idempotency-key": new()}).json() == {"attempt": 1}


def test_a_killed_process_leaves_an_unknown_outcome(store_url: str, shared: Shop, tmp_path: Path) -> None:
    key = new()
    with shop(store_url, tmp_path / "ledger", LEASE="1") as own:
        hang_up(own, key, 30)
        os.killpg(own.process.pid, signal.SIGKILL)
        own.process.wait(10)
    headers = {"idempotency-key": key, "host": f"127.0.0.1:{own.port}"}
    statuses = []

    def is_unknown() -> bool:
        reply = servers.post(f"{shared.url}/charge?seconds=30", content="5", headers=headers, timeout=20)
        statuses.append(reply.status_code)
        return reply.status_code == 500 and reply.json()["type"] == "urn:oncegate:problem:outcome-unknown"

    wait_for(is_unknown, f"the outcome did not become unknown: {statuses}")
    assert set(statuses) <= {409, 500}
    assert (own.effects(), shared.effects()) == (["5"], [])


def test_a_paused_owner_is_not_executed_twice(store_url: str, shared: Shop, tmp_path: Path) -> None:
    key = new()
    with shop(store_url, tmp_path / "ledger", LEASE="1") as own:
        hang_up(own, key, 0.5)
        os.killpg(own.process.pid, signal.SIGSTOP)
        headers = {"idempotency-key": key, "host": f"127.0.0.1:{own.port}"}

        def ask() -> httpx.Response:
            return servers.post(f"{shared.url}/charge?seconds=0.5", content="5", headers=headers, timeout=20)

        wait_for(lambda: ask().status_code == 500, "the outcome did not become unknown")
        os.killpg(own.process.pid, signal.SIGCONT)
        # The owner was only slow: unknown becomes known.
        wait_for(lambda: ask().status_code == 200, "the owner's response did not come")
        assert (own.effects(), shared.effects()) == (["5"], [])


def test_sigterm_waits_for_handlers_without_a_client(store_url: str, shared: Shop, tmp_path: Path) -> None:
    key = new()
    with shop(store_url, tmp_path / "ledger") as own:
        hang_up(own, key, 0.5)
        own.process.terminate()
        own.process.wait(20)
    headers = {"idempotency-key": key, "host": f"127.0.0.1:{own.port}"}
    reply = servers.post(f"{shared.url}/charge?seconds=0.5", content="5", headers=headers)
    assert (reply.status_code, reply.headers["idempotent-replayed"]) == (200, "true")
    assert (own.effects(), shared.effects()) == (["5"], [])


def test_a_store_that_is_away(paused_at_times: Any) -> None:
    store, own = paused_at_times
    own.begin()
    assert own.charge(new()).status_code == 200
    store.pause()
    try:
        begun = time.monotonic()
        for _ in range(8):
            reply = own.charge(new())
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
            assert reply.json()["type"] == "urn:oncegate:problem:store-unavailable"
        # The breaker ends the waiting for a store that does not answer.
        assert time.monotonic() - begun < 6
        assert own.effects() == ["5"]
    finally:
        store.resume()
    wait_for(lambda: own.charge(new()).status_code == 200, "the store came back, and the shop did not notice")


def test_a_result_that_the_store_does_not_take(paused_at_times: Any) -> None:
    store, own = paused_at_times
    key = new()
    assert own.charge(new()).status_code == 200
    own.begin()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            first = threads.submit(own.charge, key, seconds=0.5)
            wait_for(lambda: len(own.effects()) == 1, "the handler did not start")
            store.pause()
            reply = first.result()
            assert (reply.status_code, reply.headers["idempotency-status"]) == (200, "not-stored")
    finally:
        store.resume()
    wait_for(lambda: own.charge(key, seconds=0.5).headers.get("idempotent-replayed") == "true", "no replay")
    assert own.charge(key, seconds=0.5).text == reply.text
    assert own.effects() == ["5"]


def test_a_pool_that_is_exhausted(postgres: Any, tmp_path: Path) -> None:
    with (
        shop(postgres.url, tmp_path / "ledger", POOL="2", STORE_TIMEOUT="0.5") as own,
        concurrent.futures.ThreadPoolExecutor(1) as threads,
    ):
        holding = threads.submit(servers.post, f"{own.url}/hold", timeout=20)
        wait_for(lambda: own.effects() == ["held"], "the pool was not taken")
        key = new()
        assert own.charge(key).status_code == 503
        holding.result()
        wait_for(lambda: own.charge(key).status_code == 200, "the pool came back, and the shop did not notice")
        assert own.effects() == ["held", "5"]
