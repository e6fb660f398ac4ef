"""A service on FastAPI with the middleware, for a suite of cases that runs in another program.

It reads lines of JSON: {"settings": {…}, "store": URL} opens a listener and prints {"address": "127.0.0.1:PORT"}, and
{"close": ADDRESS} closes it. The handler asks the case that the header x-case names for each response.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import sys
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool

from oncegate import ConfigError, IdempotencyMiddleware, MemoryStore, PostgresStore, RedisStore, attempt_of

METHODS = ["DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"]
SETTINGS = frozenset(
    [
        "authority",
        "documentation",
        "echo-key",
        "fingerprint.body",
        "fingerprint.exclude",
        "fingerprint.headers",
        "fingerprint.include",
        "key-format",
        "key-header",
        "key-scope",
        "key-scope-header",
        "key-syntax",
        "lease",
        "max-in-flight",
        "max-in-flight-per-caller",
        "max-request-body",
        "max-response-body",
        "methods",
        "natural-key",
        "on-abandoned",
        "problem-base-url",
        "profile",
        "release-statuses",
        "replay-marker",
        "replay-statuses",
        "require-key",
        "retention",
        "scope",
        "server-errors",
        "service",
        "store-outage",
        "store-timeout",
        "stored-headers",
        "trailing-slash",
        "wait",
    ]
)


def ask(case: str, execution: dict[str, Any]) -> Any:
    connection = http.client.HTTPConnection(case, timeout=60)
    try:
        connection.request("POST", "/", json.dumps(execution))
        return json.load(connection.getresponse())
    finally:
        connection.close()


async def execute(request: Request) -> Response:
    body = await request.body()
    query = request.scope["query_string"]
    target = request.scope["raw_path"] + (b"?" + query if query else b"")
    fields = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.headers.raw]
    attempt = attempt_of(request.scope)
    if attempt is not None:
        fields += [
            ["oncegate-record", attempt.record.hex()],
            ["oncegate-token", str(attempt.token)],
            ["oncegate-attempt", str(attempt.number)],
        ]
    execution = {"method": request.method, "target": target.decode("latin-1"), "fields": fields, "body": body.hex()}
    scripted = await run_in_threadpool(ask, request.headers["x-case"], execution)
    response = Response(bytes.fromhex(scripted["body"]), scripted["status"])
    for name, value in scripted["fields"]:
        response.raw_headers.append((name.encode("latin-1"), value.encode("latin-1")))
    return response


class Listener:
    """One listener with its own middleware, and its own pool."""

    def __init__(self, server: uvicorn.Server, task: asyncio.Task[None], close: Any) -> None:
        self.server, self.task, self.close = server, task, close

    async def end(self) -> None:
        self.server.should_exit = True
        await self.task
        await self.close()


async def nothing() -> None:
    pass


async def open_store(url: str) -> tuple[Any, Any]:
    if url.startswith("postgres"):
        from psycopg_pool import AsyncConnectionPool

        pool: Any = AsyncConnectionPool(url, min_size=1, max_size=8, open=False)
        await pool.open()
        return PostgresStore(pool), pool.close
    if url.startswith("redis"):
        from redis.asyncio import Redis

        client: Any = Redis.from_url(url)
        return RedisStore(client), client.aclose
    return MemoryStore(), nothing


async def start(settings: dict[str, Any], url: str) -> tuple[str, Listener]:
    store, close = await open_store(url)
    app = FastAPI(openapi_url=None)
    app.add_api_route("/{path:path}", execute, methods=METHODS)
    options = {name.replace("-", "_").replace(".", "_"): value for name, value in settings.items()}
    app.add_middleware(IdempotencyMiddleware, store=store, **options)  # type: ignore[arg-type]
    app.build_middleware_stack()  # a wrong setting raises here
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", server_header=False, lifespan="on"))
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            await task
    return f"127.0.0.1:{listening.getsockname()[1]}", Listener(server, task, close)


async def main() -> None:
    listeners: dict[str, Listener] = {}
    lines = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        asked = json.loads(line)
        if "close" in asked:
            listener = listeners.pop(asked["close"], None)
            if listener is not None:
                await listener.end()
            continue
        unknown = next((name for name in asked["settings"] if name not in SETTINGS), None)
        reply: dict[str, str]
        if unknown is not None:
            reply = {"unsupported": unknown}
        else:
            try:
                address, listener = await start(asked["settings"], asked["store"])
                listeners[address] = listener
                reply = {"address": address}
            except ConfigError as error:
                reply = {"unsupported": str(error)}
        print(json.dumps(reply), flush=True)
    for listener in listeners.values():
        await listener.end()


if __name__ == "__main__":
    asyncio.run(main())
