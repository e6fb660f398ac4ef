"""The service of the benchmarks on FastAPI, with nothing around it (`bare`) or with the library that is named, each as its
documentation shows it. `powertools` and those with `-redis` keep their records at the socket of Redis that the second
argument names, the others in memory."""

import asyncio
import os
import socket
import sys
import time

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

library = sys.argv[1]
app = FastAPI()
executions = 0
failed = set()


def execute() -> int:
    global executions
    executions += 1
    return executions


def fail_once(key: str | None) -> None:
    if key not in failed:
        failed.add(key)
        raise RuntimeError("failed")


@app.get("/executions")
async def count():
    return executions


if library == "powertools":
    import redis
    from aws_lambda_powertools.utilities.idempotency import IdempotencyConfig, idempotent_function
    from aws_lambda_powertools.utilities.idempotency.exceptions import IdempotencyAlreadyInProgressError
    from aws_lambda_powertools.utilities.idempotency.persistence.cache import CachePersistenceLayer

    # It guards functions, not requests: the functions are called by handlers on threads.
    idempotent = idempotent_function(
        data_keyword_argument="request",
        persistence_store=CachePersistenceLayer(client=redis.Redis(unix_socket_path=sys.argv[2])),
        config=IdempotencyConfig(event_key_jmespath="key"),
    )

    @app.exception_handler(IdempotencyAlreadyInProgressError)
    async def in_progress(_request: Request, _error: IdempotencyAlreadyInProgressError):
        return JSONResponse({"error": "in progress"}, 409)

    @idempotent
    def pay_once(*, request: dict):
        return request["body"]

    @idempotent
    def work_once(*, request: dict):
        execution = execute()
        time.sleep(0.1)
        return {"execution": execution}

    @idempotent
    def fail_or_work_once(*, request: dict):
        execution = execute()
        fail_once(request["key"])
        return {"execution": execution}

    @app.post("/pay")
    def pay(request: Request, body: dict):
        return pay_once(request={"key": request.headers.get("idempotency-key"), "body": body})

    @app.post("/work", status_code=201)
    def work(request: Request, body: dict):
        return work_once(request={"key": request.headers.get("idempotency-key"), "body": body})

    @app.post("/fail", status_code=201)
    def fail(request: Request, body: dict):
        return fail_or_work_once(request={"key": request.headers.get("idempotency-key"), "body": body})

else:
    if library == "asgi-idempotency-header":
        from idempotency_header_middleware import IdempotencyHeaderMiddleware
        from idempotency_header_middleware.backends import MemoryBackend

        app.add_middleware(IdempotencyHeaderMiddleware, backend=MemoryBackend())
    elif library == "asgi-idempotency-header-redis":
        from idempotency_header_middleware import IdempotencyHeaderMiddleware
        from idempotency_header_middleware.backends import RedisBackend
        from redis.asyncio import BlockingConnectionPool, Redis

        # The pool of redis-py 8 refuses a 101st command at a time. Requests whose client has left run on next to those of the
        # next round, and such an error ends in a 500 and a closed connection, which a driver may wait for.
        client = Redis.from_pool(BlockingConnectionPool.from_url(f"unix://{sys.argv[2]}", max_connections=100, timeout=None))
        backend = RedisBackend(redis=client)
        app.add_middleware(IdempotencyHeaderMiddleware, backend=backend)
    elif library in ("oncegate", "oncegate-redis"):
        from oncegate import IdempotencyMiddleware, MemoryStore, RedisStore
        from redis.asyncio import Redis

        in_memory = library == "oncegate"
        store = MemoryStore() if in_memory else RedisStore(Redis(unix_socket_path=sys.argv[2]))
        app.add_middleware(IdempotencyMiddleware, store=store, service=f"bench-{os.getpid()}", scope="single-tenant")

    @app.post("/pay")
    async def pay(body: dict):
        return body

    @app.post("/work", status_code=201)
    async def work(body: dict):
        execution = execute()
        await asyncio.sleep(0.1)
        return {"execution": execution}

    @app.post("/fail", status_code=201)
    async def fail(request: Request, body: dict):
        execution = execute()
        fail_once(request.headers.get("idempotency-key"))
        return {"execution": execution}


listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
print(f"listening on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="critical")).run([listener])
