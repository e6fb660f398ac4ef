"""The contract as a service in Python uses it: with psycopg and SQL. Argument: the database's URL."""

import os
import sys

import psycopg

RESERVE = "SELECT transaction, outcome FROM oncegate.reserve_or_claim(%s, %s, %s, 60000, 60000)"
CLAIM = "SELECT * FROM oncegate.claim(%s, %s, %s, %s, %s, on_abandoned => %s, operation => %s)"


def named(cursor):
    return dict(zip([column.name for column in cursor.description], cursor.fetchone()))


def claim(db, record, fingerprint=b"\x01" + b"f" * 32, lease_ms=30_000, on_abandoned="park"):
    operation = "POST /payments'; --"
    args = (record, os.urandom(16), fingerprint, lease_ms, 60_000, on_abandoned, operation)
    return named(db.execute(CLAIM, args))


def pay(app, record, token, amount, response=None):
    """One business transaction: the effect, then the completion as its last statement."""
    with app.transaction():
        app.execute("INSERT INTO payments VALUES (%s)", (amount,))
        app.execute("SELECT oncegate.complete(%s, %s, %s)", (record, token, response))


def total(db):
    return db.execute("SELECT coalesce(sum(amount), 0) FROM payments").fetchone()[0]


def main(url):
    with psycopg.connect(url, autocommit=True) as db, psycopg.connect(url, autocommit=True) as app:
        db.execute("CREATE TABLE payments (amount integer NOT NULL)")

        # Executes once. The response commits with the rows, and is replayed byte for byte.
        record = os.urandom(32)
        granted = claim(db, record)
        assert granted["outcome"] == "execute" and granted["attempts"] == 1, granted
        waiting = claim(db, record)
        assert waiting["outcome"] == "in-progress" and 0 < waiting["lease_left_ms"] <= 30_000, waiting
        assert claim(db, record, b"\x01" + b"g" * 32)["outcome"] == "mismatch"
        reply = db.execute(
            "SELECT oncegate.response(201, %s, %s, %s)", (["Content-Type"], ["application/json"], b'{"paid":5}\x00\xff')
        ).fetchone()[0]
        pay(app, record, granted["token"], 5, reply)
        replay = claim(db, record)
        assert replay["outcome"] == "replay" and replay["response"] == reply, replay
        assert reply.endswith(b'{"paid":5}\x00\xff') and total(db) == 5

        # A second run with the same token is rolled back: an attempt commits once.
        try:
            pay(app, record, granted["token"], 5, reply)
        except psycopg.Error as error:
            assert error.sqlstate == "OG001", error
        else:
            raise AssertionError("an attempt has committed twice")
        assert total(db) == 5

        # A stale owner gets an error, and its rows are rolled back.
        record = os.urandom(32)
        stale = claim(db, record, lease_ms=1)
        while (taken := claim(db, record, on_abandoned="reexecute"))["outcome"] == "in-progress":
            pass
        assert taken["outcome"] == "execute" and taken["after_abandoned"] and taken["token"] > stale["token"], taken
        try:
            pay(app, record, stale["token"], 100)
        except psycopg.Error as error:
            assert error.sqlstate == "OG001", error
        else:
            raise AssertionError("a stale owner has completed")
        assert total(db) == 5

        # While the owner's transaction is open, other callers are answered at once.
        with app.transaction():
            app.execute("INSERT INTO payments VALUES (7)")
            app.execute("SELECT oncegate.complete(%s, %s)", (record, taken["token"]))
            assert claim(db, record)["outcome"] == "in-progress"
            renewed = named(db.execute("SELECT * FROM oncegate.renew(%s, %s, 30000, 60000)", (record, taken["token"])))
            assert renewed["outcome"] == "locked", renewed
        assert claim(db, record)["outcome"] == "unreplayable"
        assert total(db) == 12

        # A step outlives its attempt, and the next attempt continues after it.
        half_way = os.urandom(32)
        first = claim(db, half_way)["token"]
        noted = named(db.execute("SELECT * FROM oncegate.step(%s, %s, 0, 'charge', %s)", (half_way, first, b"\x00\xff")))
        assert noted["outcome"] == "recorded", noted
        db.execute("SELECT * FROM oncegate.release(%s, %s, 60000)", (half_way, first))
        second = claim(db, half_way)["token"]
        steps = named(db.execute("SELECT * FROM oncegate.lookup(%s)", (half_way,)))
        assert (steps["token"], steps["step_names"], steps["step_results"]) == (second, ["charge"], [b"\x00\xff"]), steps

        # A transaction that does everything inserts its record once, already completed.
        once = os.urandom(32)
        fingerprint = b"\x01" + b"f" * 32
        with app.transaction():
            number = app.execute(RESERVE, (once, os.urandom(16), fingerprint)).fetchone()[0]
            app.execute("INSERT INTO payments VALUES (9)")
            assert claim(db, once)["outcome"] == "in-progress"
            args = (once, number, fingerprint, reply, 60_000, b"\x00" * 8, "POST /payments")
            app.execute("SELECT oncegate.complete_reserved(%s, %s, %s, %s, %s, %s, %s)", args)
        assert claim(db, once)["response"] == reply
        reserved = db.execute(RESERVE, (once, os.urandom(16), fingerprint)).fetchone()
        assert reserved == (None, "replay"), reserved
        assert total(db) == 21

        found = named(db.execute("SELECT * FROM oncegate.lookup(%s)", (record,)))
        assert found["state"] == "awaited" and found["operation"] == "POST /payments'; --", found
    print("ok")


main(sys.argv[1])
