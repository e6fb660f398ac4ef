"""Redis Cluster, with the asynchronous and the blocking client: a node that is away refuses its keys, and no others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import itertools
import os
import signal
import uuid
import warnings
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
import redis.asyncio

import servers
from conftest import LOOK_COUNTS
from oncegate import ConfigError, IdempotencyMiddleware, RedisStore
from oncegate.engine import engine_of
from oncegate.ids import MARK, Ids
from test_asgi import ask, scope, status
from test_id_secret import until

pytestmark = pytest.mark.usefixtures("short_looks")


@pytest.fixture(autouse=True)
def abandoned_nodes() -> Iterator[None]:
    """The asynchronous client of redis-py does not close nodes that it replaces, and warns of them when they are collected."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[servers.Cluster]]:
    """They need two seconds until they serve, and are started at the same time: one for each test that kills a node, and one."""
    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(5) as threads:
        starts = [threads.submit(stack.enter_context, servers.redis_cluster()) for _ in range(5)]
        yield [start.result() for start in starts]


@pytest.fixture
def cluster(clusters: list[servers.Cluster]) -> servers.Cluster:
    """The one whose nodes stay, or come back."""
    return clusters[0]


@pytest.fixture
def mortal(clusters: list[servers.Cluster]) -> servers.Cluster:
    """One for this test only."""
    return clusters.pop()


@contextlib.asynccontextmanager
async def client(kind: str, cluster: servers.Cluster) -> AsyncIterator[Any]:
    options = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5, "cluster_error_retry_attempts": 1}
    if kind == "asyncio":
        nodes: Any = [redis.asyncio.cluster.ClusterNode("127.0.0.1", node.port) for node in cluster.nodes]
        own = redis.asyncio.RedisCluster(startup_nodes=nodes, **options)
        try:
            yield own
        finally:
            await own.aclose()
    else:
        nodes = [redis.cluster.ClusterNode("127.0.0.1", node.port) for node in cluster.nodes]
        blocking = await asyncio.to_thread(lambda: redis.RedisCluster(startup_nodes=nodes, **options))
        try:
            yield blocking
        finally:
            await asyncio.to_thread(blocking.close)


class Service:
    def __init__(self, store: RedisStore) -> None:
        self.store = store
        self.executions: list[str] = []
        self.app = IdempotencyMiddleware(
            self._handle, store=store, service="pay", scope="single-tenant", store_timeout=5, wait=0, lease=60
        )

    async def _handle(self, own: Any, receive: Any, send: Any) -> None:
        self.executions.append(dict(own["headers"])[b"idempotency-key"].decode())
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    async def post(self, key: str) -> tuple[int, bool]:
        sent = await ask(self.app, scope(key))
        return status(sent), (b"idempotent-replayed", b"true") in sent[0]["headers"]

    def node_of(self, key: str) -> str:
        return self.store.part_of(Ids().record("pay", [], [b"POST", b"/pay"], key.encode()))

    def keys_at(self, node: str) -> Iterator[str]:
        """New keys whose records are at a node."""
        return (key for key in (uuid.uuid4().hex for _ in itertools.count()) if self.node_of(key) == node)


def kill(node: servers.Server) -> None:
    os.kill(node.process.pid, signal.SIGKILL)
    node.process.wait(10)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_node_that_is_away(kind: str, how: str, request: pytest.FixtureRequest) -> None:
    cluster: servers.Cluster = request.getfixturevalue("mortal" if how == "killed" else "cluster")
    async with client(kind, cluster) as own, client(kind, cluster) as another:
        service, other_process = Service(RedisStore(own)), Service(RedisStore(another))
        first = uuid.uuid4().hex
        assert [await service.post(first) for _ in range(2)] == [(201, False), (201, True)]
        names = {f"127.0.0.1:{node.port}" for node in cluster.nodes}
        keys = {name: service.keys_at(name) for name in names}
        stored = {name: next(keys[name]) for name in names}
        for name in names:
            assert await service.post(stored[name]) == (201, False)
            assert await service.post(stored[name]) == (201, True)
            assert await other_process.post(stored[name]) == (201, True)
        marked = service.store.part_of(MARK)
        # A new asynchronous client asks its default node about the commands, and does not connect without it.
        gone = next(name for name in sorted(names) if name not in (marked, own.get_default_node().name))
        node = cluster.node(gone)
        before = len(service.executions)
        kill(node) if how == "killed" else node.pause()
        try:
            # More refusals than open the breaker, and the keys of other nodes are served all the while.
            for _ in range(7):
                assert (await service.post(next(keys[gone])))[0] == 503
            for _ in range(7):
                for name in names - {gone}:
                    assert await service.post(next(keys[name])) == (201, False)
                    assert await service.post(stored[name]) == (201, True)
            assert (await service.post(stored[gone]))[0] == 503
            assert len(service.executions) == before + 14
            # A process that starts now serves them, too.
            async with client(kind, cluster) as third:
                started = Service(RedisStore(third))

                async def has_started() -> bool:
                    return (await started.post(stored[marked]))[0] == 201

                await until(has_started, "it does not start")
                for name in names - {gone}:
                    assert await started.post(stored[name]) == (201, True)
                    assert await started.post(next(keys[name])) == (201, False)
                assert (await started.post(stored[gone]))[0] == 503
        finally:
            if how == "stopped":
                node.resume()
        if how == "stopped":

            async def is_back() -> bool:
                return await service.post(stored[gone]) == (201, True)

            await until(is_back, "the node came back, and was not asked")
            assert await service.post(next(keys[gone])) == (201, False)


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_the_node_of_the_mark_is_away(kind: str, mortal: servers.Cluster) -> None:
    async with client(kind, mortal) as own, client(kind, mortal) as another:
        service, started = Service(RedisStore(own)), Service(RedisStore(another))
        assert await service.post("first") == (201, False)
        marked = service.store.part_of(MARK)
        other = next(name for node in mortal.nodes if (name := f"127.0.0.1:{node.port}") != marked)
        keys = service.keys_at(other)
        kill(mortal.node(marked))
        # A process that has served goes on, longer than a look counts. One that has not executes nothing.
        begun = asyncio.get_running_loop().time()
        while asyncio.get_running_loop().time() < begun + 2 * LOOK_COUNTS:
            assert await service.post(next(keys)) == (201, False)
            assert (await started.post(next(keys)))[0] == 503
        assert not started.executions


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_node_that_evicts(kind: str, cluster: servers.Cluster) -> None:
    async with client(kind, cluster) as own:
        service = Service(RedisStore(own))
        assert (await service.post(uuid.uuid4().hex))[0] == 201
        evicts = f"127.0.0.1:{cluster.nodes[1].port}"
        other = f"127.0.0.1:{cluster.nodes[2].port}"
        with redis.Redis(port=cluster.nodes[1].port) as node:
            node.config_set("maxmemory-policy", "allkeys-lru")
            started = Service(RedisStore(own))
            assert (await started.post(next(service.keys_at(evicts))))[0] == 503
            assert await started.post(next(service.keys_at(other))) == (201, False)
            assert engine_of(started.store, blocking=False)._breaker_of(MARK).failures == 0
            node.config_set("maxmemory-policy", "noeviction")


async def test_clients_that_decode_are_refused(cluster: servers.Cluster) -> None:
    port = cluster.nodes[0].port
    with pytest.raises(ConfigError, match="decode_responses"):
        RedisStore(redis.asyncio.RedisCluster("127.0.0.1", port, decode_responses=True))
    with (
        contextlib.closing(redis.RedisCluster("127.0.0.1", port, decode_responses=True)) as own,
        pytest.raises(ConfigError, match="decode_responses"),
    ):
        RedisStore(own)
