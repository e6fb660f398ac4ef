"""Stores that are full, records whose retention is over, and roles without a right."""

from __future__ import annotations

import uuid
from typing import Any

import psycopg
import pytest
import redis
import redis.asyncio
from psycopg_pool import AsyncConnectionPool

import servers
from oncegate import IdempotencyMiddleware, PostgresStore, RedisStore, StoreRefused
from oncegate.engine import Policy, engine_of
from test_asgi import ask, scope, status
from test_id_secret import own_database, until


class Service:
    def __init__(self, store: Any, **settings: Any) -> None:
        self.executions = 0
        self.app = IdempotencyMiddleware(
            self._handle, store=store, service="pay", scope="single-tenant", store_outage="open", **settings
        )

    async def _handle(self, own: Any, receive: Any, send: Any) -> None:
        self.executions += 1
        await send({"type": "http.response.start", "status": 201, "headers": []})
        await send({"type": "http.response.body", "body": b"made"})

    async def post(self, key: str, body: bytes = b"5") -> tuple[int, bool]:
        sent = await ask(self.app, scope(key), {"type": "http.request", "body": body})
        return status(sent), (b"idempotent-replayed", b"true") in sent[0]["headers"]


async def test_a_full_redis_executes_nothing_and_replays() -> None:
    with servers.redis() as server:
        async with redis.asyncio.Redis.from_url(server.url) as client:
            service = Service(RedisStore(client))
            assert await service.post("first") == (201, False)
            with redis.Redis.from_url(server.url) as own:
                own.config_set("maxmemory", "1mb")
            assert await service.post("first") == (201, True)
            assert (await service.post("first", b"6"))[0] == 422
            assert (await service.post("second"))[0] == 503
            assert service.executions == 1


async def test_a_full_postgres_executes_nothing_and_replays(postgres: Any) -> None:
    url = own_database(postgres)
    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        service = Service(PostgresStore(pool))
        assert await service.post("first") == (201, False)
        with psycopg.connect(url, autocommit=True) as own:
            own.execute(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
                "$$BEGIN RAISE EXCEPTION 'full' USING ERRCODE = '53100'; END$$"
            )
            own.execute(
                "CREATE TRIGGER full_disk BEFORE INSERT OR UPDATE ON oncegate.records FOR EACH ROW EXECUTE FUNCTION full_disk()"
            )
        assert await service.post("first") == (201, True)
        assert (await service.post("second"))[0] == 503
        assert service.executions == 1


def records(url: str) -> int:
    with psycopg.connect(url) as own:
        return own.execute("SELECT count(*) FROM oncegate.records").fetchone()[0]


async def test_records_are_removed_after_their_retention(postgres: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncegate.engine.PURGE_EVERY", 0.1)
    monkeypatch.setattr("oncegate.engine.LOOK_AGAIN", 0.05)
    url = own_database(postgres)
    async with AsyncConnectionPool(url, min_size=1, max_size=4, open=False) as pool:
        service = Service(PostgresStore(pool), lease=1, retention=1)
        for _ in range(20):
            assert await service.post(uuid.uuid4().hex) == (201, False)
        kept = Service(PostgresStore(pool))

        async def are_removed() -> bool:
            # A process that is used removes what others have left, too. Its own two records stay.
            assert (await kept.post("kept"))[0] == 201
            return records(url) <= 1

        await until(are_removed, "the records were not removed")
        assert await kept.post("kept") == (201, True)


async def test_a_role_without_a_right_is_found_before_an_effect(postgres: Any, caplog: pytest.LogCaptureFixture) -> None:
    url, role = own_database(postgres), f"shop_{uuid.uuid4().hex}"
    with psycopg.connect(url, autocommit=True) as own:
        own.execute(f"CREATE ROLE {role} LOGIN")
        own.execute(f"GRANT USAGE ON SCHEMA oncegate TO {role}")
        own.execute(
            f"GRANT EXECUTE ON FUNCTION oncegate.claim, oncegate.lookup, oncegate.contract_version, oncegate.now_ms TO {role}"
        )
    async with AsyncConnectionPool(url.replace("owner@", f"{role}@"), min_size=1, max_size=4, open=False) as pool:
        service, store = Service(PostgresStore(pool)), PostgresStore(pool)
        assert (await service.post("first"))[0] == 503
        assert service.executions == 0
        assert "oncegate.complete_if_owner, oncegate.release, oncegate.renew" in caplog.text
        with psycopg.connect(url, autocommit=True) as own:
            own.execute(f"GRANT EXECUTE ON FUNCTION oncegate.complete_if_owner, oncegate.release, oncegate.renew TO {role}")
        assert await service.post("first") == (201, False)
        assert await service.post("first") == (201, True)
        # Without the right to purge, everything else works, and the log says so once.
        with pytest.raises(StoreRefused, match="grants"):
            await store.purge()
        engine = engine_of(store, blocking=False)
        await engine.check(Policy())

        async def is_said() -> bool:
            return "records are not removed after their retention" in caplog.text

        await until(is_said, "the missing right was not reported")
        assert engine._purge_at == float("inf") or service.app.flow.engine._purge_at == float("inf")
