"""The contract with asyncpg: prepared statements, binary parameters, and its own transactions. Argument: the URL."""

import asyncio
import os
import sys

import asyncpg

CLAIM = "SELECT * FROM oncegate.claim($1, $2, $3, $4, $5, on_abandoned => $6, operation => $7)"


async def claim(db, record, fingerprint=b"\x01" + b"f" * 32, lease_ms=30_000, on_abandoned="park"):
    operation = "POST /payments'; --"
    return await db.fetchrow(CLAIM, record, os.urandom(16), fingerprint, lease_ms, 60_000, on_abandoned, operation)


async def pay(app, record, token, amount, response=None):
    """One business transaction: the effect, then the completion as its last statement."""
    async with app.transaction():
        await app.execute("INSERT INTO payments VALUES ($1)", amount)
        await app.execute("SELECT oncegate.complete($1, $2, $3)", record, token, response)


async def main(url):
    db, app = await asyncpg.connect(url), await asyncpg.connect(url)
    await db.execute("CREATE TABLE payments (amount integer NOT NULL)")

    # Executes once. The response commits with the rows, and is replayed byte for byte.
    record = os.urandom(32)
    granted = await claim(db, record)
    assert granted["outcome"] == "execute" and granted["attempts"] == 1, granted
    waiting = await claim(db, record)
    assert waiting["outcome"] == "in-progress" and 0 < waiting["lease_left_ms"] <= 30_000, waiting
    assert (await claim(db, record, b"\x01" + b"g" * 32))["outcome"] == "mismatch"
    reply = await db.fetchval(
        "SELECT oncegate.response(201, $1, $2, $3)", ["Content-Type"], ["application/json"], b'{"paid":5}\x00\xff'
    )
    await pay(app, record, granted["token"], 5, reply)
    replay = await claim(db, record)
    assert replay["outcome"] == "replay" and replay["response"] == reply, replay
    assert reply.endswith(b'{"paid":5}\x00\xff')

    # Exactly one of many concurrent claims executes.
    record = os.urandom(32)
    async with asyncpg.create_pool(url, min_size=8, max_size=8) as pool:
        outcomes = [row["outcome"] for row in await asyncio.gather(*(claim(pool, record) for _ in range(40)))]
    assert sorted(outcomes) == ["execute"] + ["in-progress"] * 39, outcomes

    # A stale owner gets an error, and its rows are rolled back.
    record = os.urandom(32)
    stale = await claim(db, record, lease_ms=1)
    while (taken := await claim(db, record, on_abandoned="reexecute"))["outcome"] == "in-progress":
        pass
    assert taken["outcome"] == "execute" and taken["after_abandoned"] and taken["token"] > stale["token"], taken
    try:
        await pay(app, record, stale["token"], 100)
    except asyncpg.PostgresError as error:
        assert error.sqlstate == "OG001", error
    else:
        raise AssertionError("a stale owner has completed")

    # While the owner's transaction is open, other callers are answered at once.
    async with app.transaction():
        await app.execute("INSERT INTO payments VALUES (7)")
        await app.execute("SELECT oncegate.complete($1, $2)", record, taken["token"])
        assert (await claim(db, record))["outcome"] == "in-progress"
        renewed = await db.fetchrow("SELECT * FROM oncegate.renew($1, $2, 30000, 60000)", record, taken["token"])
        assert renewed["outcome"] == "locked", renewed
    assert (await claim(db, record))["outcome"] == "unreplayable"
    assert await db.fetchval("SELECT sum(amount) FROM payments") == 12

    # A step outlives its attempt, and the next attempt continues after it.
    half_way = os.urandom(32)
    first = (await claim(db, half_way))["token"]
    step = "SELECT outcome FROM oncegate.step($1, $2, 0, 'charge', $3)"
    assert await db.fetchval(step, half_way, first, b"\x00\xff") == "recorded"
    await db.fetchrow("SELECT * FROM oncegate.release($1, $2, 60000)", half_way, first)
    second = (await claim(db, half_way))["token"]
    steps = await db.fetchrow("SELECT * FROM oncegate.lookup($1)", half_way)
    assert (steps["token"], steps["step_names"], steps["step_results"]) == (second, ["charge"], [b"\x00\xff"]), steps

    found = await db.fetchrow("SELECT * FROM oncegate.lookup($1)", record)
    assert found["state"] == "awaited" and found["operation"] == "POST /payments'; --", found
    await db.close()
    await app.close()
    print("ok")


asyncio.run(main(sys.argv[1]))
