"""Commands to Redis that go in pipelines: requests share connections, and none waits for a connection that is dead."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import redis.asyncio

import servers
from oncegate import IdempotencyMiddleware, RedisStore
from oncegate.redis import MAX_PIPELINES
from test_asgi import ask, scope, status


async def pay(own: Any, receive: Any, send: Any) -> None:
    body = (await receive())["body"]
    await send({"type": "http.response.start", "status": 201, "headers": []})
    await send({"type": "http.response.body", "body": body})


def guarded(client: Any, **settings: Any) -> IdempotencyMiddleware:
    return IdempotencyMiddleware(pay, store=RedisStore(client), service="shop", scope="single-tenant", **settings)


async def test_a_burst_needs_few_connections_and_each_request_gets_its_own_reply() -> None:
    with servers.redis() as server:
        async with redis.asyncio.Redis(port=server.port, max_connections=10) as client:
            app = guarded(client)

            async def one(number: int) -> None:
                body = {"type": "http.request", "body": b"%d" % number}
                sent = await ask(app, scope(f"key-{number}"), body)
                assert (status(sent), sent[1]["body"]) == (201, body["body"])

            for _ in range(2):
                await asyncio.gather(*map(one, range(300)))
            assert (await client.info("clients"))["connected_clients"] <= 6


async def test_scripts_that_the_server_forgets_are_sent_again() -> None:
    with servers.redis() as server:
        async with redis.asyncio.Redis(port=server.port) as client:
            app = guarded(client)
            for turn in range(2):
                await client.script_flush()
                sent = await asyncio.gather(*(ask(app, scope(f"{turn}-{number}")) for number in range(20)))
                assert set(map(status, sent)) == {201}


async def test_a_damaged_record_fails_alone() -> None:
    with servers.redis() as server:
        async with redis.asyncio.Redis(port=server.port) as client:
            app = guarded(client)
            await ask(app, scope("damaged"))
            (name,) = await client.keys()
            await client.delete(name)
            await client.set(name, "damaged")
            sent = await asyncio.gather(*(ask(app, scope(key)) for key in ["a", "damaged", "b", "c"]))
            assert list(map(status, sent)) == [201, 500, 201, 201]


class Network:
    """Passes bytes on to a server. Connections stay dead that were made, or in use, while it was down."""

    def __init__(self, port: int) -> None:
        self.port, self.is_down, self.dead = port, False, 0
        self.writers: list[asyncio.StreamWriter] = []

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        there, back = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(back)
        is_dead = False

        async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            nonlocal is_dead
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    if self.is_down and not is_dead:
                        is_dead = True
                        self.dead += 1
                    if not is_dead:
                        to.write(data)
                        await to.drain()

        await asyncio.gather(copy(reader, back), copy(there, writer))

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            server.close()
            for writer in self.writers:
                writer.close()
            await asyncio.sleep(0)


async def test_dead_connections_are_given_up() -> None:
    with servers.redis() as server:
        network = Network(server.port)
        async with (
            network.opened() as port,
            redis.asyncio.Redis(port=port, socket_timeout=None, retry=None) as client,
        ):
            app = guarded(client, store_timeout=1, wait=0)
            assert status(await ask(app, scope("before"))) == 201
            network.is_down = True
            asked = []
            for number in range(MAX_PIPELINES):
                asked += [asyncio.create_task(ask(app, scope(f"down-{5 * number + more}"))) for more in range(5)]
                async with asyncio.timeout(30):
                    while network.dead <= number:
                        await asyncio.sleep(0.01)
            assert Counter(map(status, await asyncio.gather(*asked))) == {503: 20}
            network.is_down = False
            async with asyncio.timeout(30):
                while status(await ask(app, scope("after"))) != 201:
                    await asyncio.sleep(0.1)
                # What was refused was not executed, and is not in the way.
                for number in range(20):
                    while status(await ask(app, scope(f"down-{number}"))) != 201:
                        await asyncio.sleep(0.1)
