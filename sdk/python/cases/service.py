"""A service on FastAPI with the middleware, for a suite of cases that runs in another program.

It reads lines of JSON: {"settings": {…}, "store": URL, "backend": ADDRESS} opens a listener and prints
{"address": "127.0.0.1:PORT"}, and {"close": ADDRESS} closes it and prints {"closed": true} when nothing more is sent to its
store. The handler asks the backend for each response. The end of the input ends the process, and SIGTERM ends it after the
requests that it has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse

from oncegate import ConfigError, IdempotencyMiddleware, MemoryStore, PostgresStore, RedisStore, attempt_of
from oncegate.seal import SealedStore

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
        "id-secret",
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
        "request-budget",
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


async def ask(backend: str, execution: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The parts of the response that the case gives to this execution: its head, parts of its body, and its end."""
    host, _, port = backend.partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=2**26)
    try:
        body = json.dumps(execution).encode()
        # Of HTTP/1.0: the response ends with the connection, and its last part says that it is whole.
        writer.write(b"POST /parts HTTP/1.0\r\nhost: case\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await reader.readuntil(b"\r\n\r\n")
        while line := await reader.readline():
            part = json.loads(line)
            if "end" in part:
                return
            yield part
            if "aborts" in part:
                return
    finally:
        writer.close()
    raise ConnectionError("the response of the case is cut off")


class NoResponse(Response):
    """An application that ends without a response."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        pass


async def execute(request: Request, backend: str, case: int) -> Response:
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
    execution = {
        "case": case,
        "method": request.method,
        "target": target.decode("latin-1"),
        "fields": fields,
        "body": body.hex(),
    }
    parts = ask(backend, execution)
    head = await anext(parts)
    if head.get("aborts"):
        return NoResponse()

    async def data() -> AsyncIterator[bytes]:
        async for part in parts:
            if part.get("breaks"):
                raise ConnectionError("the response breaks off")
            yield bytes.fromhex(part.get("data", ""))

    response: Response
    if head["length"] is None:
        response = StreamingResponse(data(), head["status"])
    else:
        response = Response(b"".join([part async for part in data()]), head["status"])
    for name, value in head["fields"]:
        response.raw_headers.append((name.encode("latin-1"), value.encode("latin-1")))
    return response


class Server(uvicorn.Server):
    """A server among others of its process, which handles signals for all of them."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Listener:
    """One listener with its own middleware, and its own pool."""

    def __init__(self, server: Server, task: asyncio.Task[None], close: Any) -> None:
        self.server, self.task, self.close = server, task, close

    async def end(self) -> None:
        """Ends after the requests that it has begun."""
        self.server.should_exit = True
        await self.task
        await self.close()

    async def end_at_once(self) -> asyncio.Task[None]:
        """Ends the use of the store, and returns the task that ends when the server has."""
        self.server.should_exit = self.server.force_exit = True
        await self.close()
        return self.task


async def nothing() -> None:
    pass


async def open_store(url: str) -> tuple[Any, Any]:
    if url.startswith("postgres"):
        from psycopg_pool import AsyncConnectionPool

        pool: Any = AsyncConnectionPool(url, min_size=1, max_size=8, open=False)
        await pool.open()
        return PostgresStore(pool), pool.close
    if url.startswith("redis"):
        from redis.asyncio import BlockingConnectionPool, Connection, Redis

        closed = False

        class EndingConnection(Connection):
            """The pool and the client open closed connections again, unless they cannot."""

            async def _connect(self) -> None:
                if closed:
                    raise OSError("the service is closed")
                await super()._connect()  # type: ignore[no-untyped-call]

        async def close() -> None:
            nonlocal closed
            closed = True
            await connections.aclose()

        # A server takes only so many connections, and each request with a key needs one.
        options = {"socket_timeout": 15, "socket_connect_timeout": 15, "connection_class": EndingConnection}
        connections: Any = BlockingConnectionPool.from_url(url, max_connections=20, timeout=15, **options)
        client: Any = Redis(connection_pool=connections)
        return RedisStore(client), close
    return MemoryStore(), nothing


async def start(asked: dict[str, Any]) -> tuple[str, Listener]:
    settings, backend = asked["settings"], asked.get("backend", "")
    case = asked.get("case", 0)
    store, close = await open_store(asked["store"])
    if asked.get("seal-keys"):
        store = SealedStore(store, asked["seal-keys"].split(","))
    app = FastAPI(openapi_url=None)

    async def run(request: Request) -> Response:
        return await execute(request, backend, case)

    app.add_api_route("/{path:path}", run, methods=METHODS)
    options = {name.replace("-", "_").replace(".", "_"): value for name, value in settings.items()}
    app.add_middleware(IdempotencyMiddleware, store=store, **options)
    app.build_middleware_stack()  # a wrong setting raises here
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        app,
        log_level="critical",
        server_header=False,
        lifespan="on",
        backlog=4096,
        h11_max_incomplete_event_size=256 * 1024,
    )
    server = Server(config)
    task = asyncio.create_task(server.serve([listening]))
    while not server.started:
        await asyncio.sleep(0.005)
        if task.done():
            await task
    return f"127.0.0.1:{listening.getsockname()[1]}", Listener(server, task, close)


async def main() -> None:
    listeners: dict[str, Listener] = {}
    closing: set[asyncio.Task[None]] = set()
    lines = asyncio.StreamReader(limit=2**20)
    loop = asyncio.get_running_loop()
    terminated = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, terminated.set)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    ends = asyncio.ensure_future(terminated.wait())
    while True:
        reading = asyncio.ensure_future(lines.readline())
        await asyncio.wait({reading, ends}, return_when=asyncio.FIRST_COMPLETED)
        if ends.done() or not (line := await reading):
            break
        asked = json.loads(line)
        if "close" in asked:
            listener = listeners.pop(asked["close"], None)
            if listener is not None:
                task = await listener.end_at_once()
                closing.add(task)
                task.add_done_callback(closing.discard)
            print(json.dumps({"closed": True}), flush=True)
            continue
        unknown = next((name for name in asked["settings"] if name not in SETTINGS), None)
        reply: dict[str, str]
        if unknown is not None:
            reply = {"unsupported": unknown}
        else:
            try:
                address, listener = await start(asked)
                listeners[address] = listener
                reply = {"address": address}
            except ConfigError as error:
                reply = {"unsupported": str(error)}
        print(json.dumps(reply), flush=True)
    for listener in listeners.values():
        listener.server.force_exit = not terminated.is_set()
    await asyncio.gather(*(listener.end() for listener in listeners.values()))


if __name__ == "__main__":
    asyncio.run(main())
