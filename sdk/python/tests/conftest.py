from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import servers

CRATES = Path(__file__).resolve().parents[3] / "crates"


def vectors(path: str) -> Any:
    return json.loads((CRATES / path).read_text(encoding="utf-8"))


def settings_of(configuration: dict[str, Any]) -> Any:
    """Settings from the names of the sidecar's configuration."""
    from oncegate.settings import Settings

    return Settings.of(**{name.replace("-", "_").replace(".", "_"): value for name, value in configuration.items()})


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.Server]:
    with servers.postgres() as server:
        yield server


@pytest.fixture(scope="session")
def redis() -> Iterator[servers.Server]:
    with servers.redis() as server:
        yield server


# The ages of a look for the mark in tests that wait for them, instead of 2 s and 4 s, and that of a refusal, instead of 1 s.
LOOK_AGAIN, LOOK_COUNTS, REFUSED_FOR = 0.25, 0.5, 0.25


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for the mark of an id secret are over sooner, so that tests wait less for the next one."""
    from oncegate import engine, transactions

    monkeypatch.setattr(engine.Engine._is_checked, "__defaults__", (LOOK_AGAIN,))
    monkeypatch.setattr(engine.Engine.check, "__defaults__", (LOOK_AGAIN, None))
    monkeypatch.setattr(engine, "LOOK_AGAIN", LOOK_AGAIN)
    monkeypatch.setattr(engine, "LOOK_COUNTS", LOOK_COUNTS)
    monkeypatch.setattr(engine, "REFUSED_FOR", REFUSED_FOR)
    monkeypatch.setattr(transactions, "LOOK_COUNTS", LOOK_COUNTS)


STORES = ["memory", "psycopg", "psycopg-blocking", "asyncpg", "redis", "redis-blocking"]


@contextlib.asynccontextmanager
async def opened(kind: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """A store of this kind, over a pool or client of its own."""
    from oncegate import MemoryStore, PostgresStore, RedisStore

    if kind == "memory":
        yield MemoryStore()
        return
    url = request.getfixturevalue("redis" if kind.startswith("redis") else "postgres").url
    match kind:
        case "psycopg":
            from psycopg_pool import AsyncConnectionPool

            async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
                yield PostgresStore(pool)
        case "psycopg-blocking":
            from psycopg_pool import ConnectionPool

            with ConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
                yield PostgresStore(pool)
        case "asyncpg":
            import asyncpg

            async with asyncpg.create_pool(url, min_size=1, max_size=4) as pool:
                yield PostgresStore(pool)
        case "redis":
            from redis.asyncio import Redis as Client

            async with Client.from_url(url) as client:
                yield RedisStore(client)
        case "redis-blocking":
            from redis import Redis

            with Redis.from_url(url) as client:
                yield RedisStore(client)


@pytest.fixture(params=STORES)
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    async with opened(request.param, request) as own:
        yield own
