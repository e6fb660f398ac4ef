"""Worker processes that are ended by SIGTERM under load, and started again: each key takes effect once, and gets its result."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import servers
from servers import wait_for
from test_processes import WORKER_SECONDS, new, shop

THREADS, WORKERS = 8, 2


@pytest.fixture(params=["postgres", "redis"])
def store_url(request: pytest.FixtureRequest) -> str:
    return str(request.getfixturevalue(request.param).url)


class Load:
    """Clients that send requests without a break. If the connection fails, a client sends its request again under its key.

    A server that ends closes connections on which a request is just coming, with or without us.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.failures = 0
        self.done: dict[str, httpx.Response] = {}
        self.wrong: list[str] = []
        self._is_ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(THREADS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        self._is_ended.set()
        for thread in self._threads:
            thread.join(5 * WORKER_SECONDS)
            assert not thread.is_alive()

    def _run(self) -> None:
        while not self._is_ended.is_set():
            key = new()
            reply = self._reply(key)
            if reply is None or reply.status_code != 200 or reply.json()["charged"] != 1:
                self.wrong.append(f"{reply} {reply.text if reply else ''}")
            else:
                self.done[key] = reply

    def _reply(self, key: str) -> httpx.Response | None:
        deadline = time.monotonic() + 4 * WORKER_SECONDS
        while time.monotonic() < deadline:
            try:
                return servers.post(
                    f"http://127.0.0.1:{self.port}/charge?seconds=0.1", content=key, headers={"idempotency-key": key}, timeout=60
                )
            except httpx.TransportError:
                self.failures += 1
                time.sleep(0.02)
        return None


def workers(parent: int) -> list[int]:
    own = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()

    def command(process: str) -> str:
        try:
            return Path(f"/proc/{process}/cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""

    return [int(process) for process in own if "spawn_main" in command(process)]


def until_more(load: Load, count: int) -> None:
    """Waits until so many more requests are done."""
    before = len(load.done)
    wait_for(lambda: len(load.done) >= before + count or load.wrong, "no request is done", 120)


def replaced(parent: int, old: int) -> Callable[[], bool]:
    return lambda: old not in workers(parent) and len(workers(parent)) == WORKERS


def test_workers_that_are_ended_and_started_again(store_url: str, tmp_path: Path) -> None:
    ledger, port = tmp_path / "ledger", servers.free_port()
    # On a busy machine, a worker may need more than 1 s for its first connections, and a 503 counts as wrong here.
    limits = {"CONNECT_TIMEOUT": str(WORKER_SECONDS), "STORE_TIMEOUT": "30"}
    options: dict[str, Any] = {"workers": WORKERS, "port": port, "WAIT": "30", **limits}
    with Load(port) as load:
        with shop(store_url, ledger, **options) as own:
            parent = own.process.pid
            wait_for(lambda: len(workers(parent)) == WORKERS, "no workers")
            until_more(load, 20)
            ended = workers(parent)[0]
            os.kill(ended, signal.SIGTERM)
            wait_for(replaced(parent, ended), "the worker was not replaced", 3 * WORKER_SECONDS)
            until_more(load, 20)
            # All of them, one by one.
            before = set(workers(parent))
            os.kill(parent, signal.SIGHUP)
            wait_for(lambda: not before & set(workers(parent)), "the workers were not replaced", 4 * WORKER_SECONDS)
            until_more(load, 20)
            own.process.terminate()
            own.process.wait(3 * WORKER_SECONDS)
        with shop(store_url, ledger, **options) as own:
            until_more(load, 20)
            load.end()
            # What was done before and between is replayed by the new processes.
            for key, reply in list(load.done.items())[:: max(1, len(load.done) // 20)]:
                again = servers.post(f"{own.url}/charge?seconds=0.1", content=key, headers={"idempotency-key": key}, timeout=60)
                assert (again.text, again.headers["idempotent-replayed"]) == (reply.text, "true")
            effects = Counter(own.effects())
    assert not load.wrong
    assert len(load.done) >= 80
    assert {key for key, count in effects.items() if count != 1} == set()
    assert set(effects) == set(load.done)
