"""A shop on FastAPI for the tests of whole processes. Each execution is a line in the file LEDGER."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request

from oncegate import IdempotencyMiddleware, PostgresStore, RedisStore
from oncegate.fastapi import CurrentAttempt, RequiredAttempt

URL, LEDGER = os.environ["STORE"], os.environ["LEDGER"]
CONNECT_TIMEOUT = float(os.environ.get("CONNECT_TIMEOUT", "1"))
pool: Any = None
store: Any
if URL.startswith("redis"):
    from redis.asyncio import Redis

    store = RedisStore(Redis.from_url(URL, socket_connect_timeout=CONNECT_TIMEOUT))
else:
    from psycopg_pool import AsyncConnectionPool

    pool = AsyncConnectionPool(URL, min_size=1, max_size=int(os.environ.get("POOL", "4")), timeout=CONNECT_TIMEOUT, open=False)
    store = PostgresStore(pool)


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    if pool is not None:
        await pool.open()
    yield
    if pool is not None:
        await pool.close()


app = FastAPI(lifespan=lifespan)
app.add_middleware(
    IdempotencyMiddleware,
    store=store,
    service="shop",
    scope="single-tenant",
    lease=float(os.environ.get("LEASE", "30")),
    wait=float(os.environ.get("WAIT", "10")),
    store_timeout=float(os.environ.get("STORE_TIMEOUT", "15")),
)


def effect(what: str) -> None:
    with open(LEDGER, "a") as ledger:
        ledger.write(f"{what}\n")


@app.post("/charge")
async def charge(request: Request, attempt: CurrentAttempt) -> dict[str, Any]:
    effect((await request.body()).decode())
    await asyncio.sleep(float(request.query_params.get("seconds", "0")))
    if request.query_params.get("throw"):
        raise RuntimeError("the handler throws")
    return {"charged": 1, "token": attempt.token if attempt else None}


@app.post("/required")
async def required(attempt: RequiredAttempt) -> dict[str, int]:
    return {"attempt": attempt.number}


@app.post("/hold")
async def hold() -> dict[str, bool]:
    """Takes all connections of the pool for a while."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(pool.max_size):
            await stack.enter_async_context(pool.connection())
        effect("held")
        await asyncio.sleep(2)
    return {"held": True}
