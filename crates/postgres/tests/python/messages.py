"""Messages processed once by a consumer in Python: with psycopg and SQL. Argument: the database's URL."""

import random
import sys

import psycopg

KEPT = 7 * 86_400_000
MAX = 3


class Poison(Exception):
    pass


def handle(db, me, message, order, effect):
    """Processes a message in the transaction of its effect. Returns True if it is to be acknowledged."""
    record = db.execute("SELECT oncegate.message_record('billing', %s)", (message,)).fetchone()[0]
    # Counts the attempt before the handler runs, so that a message that kills its process is counted, too.
    begun, attempts, _ = db.execute("SELECT * FROM oncegate.begin_messages(%s, %s, %s)", ([record], me, KEPT)).fetchone()
    if begun != "process":
        return begun != "in-flight"
    if attempts >= MAX:
        return give_up(db, record, order, "attempts-exhausted", attempts, "its last attempt did not end")
    try:
        with db.transaction():
            outcome, _, _ = db.execute("SELECT * FROM oncegate.receive(%s)", (record,)).fetchone()
            if outcome == "process":
                effect(db, order)
        return outcome != "in-flight"
    except Poison as error:
        outcome, attempts = db.execute("SELECT * FROM oncegate.fail_message(%s, %s)", (record, KEPT)).fetchone()
        if outcome == "failed" and attempts >= MAX:
            return give_up(db, record, order, "attempts-exhausted", attempts, str(error))
        return False


def give_up(db, record, order, reason, attempts, error):
    args = (record, reason, attempts, error, [], [], order.encode(), KEPT)
    sql = "SELECT * FROM oncegate.write_dead_letter(%s, 'billing', %s, %s, %s, 'orders', null, null, %s, %s, %s, %s)"
    outcome, *_ = db.execute(sql, args).fetchone()
    return outcome != "in-flight"


def insert(db, order):
    db.execute("INSERT INTO invoices VALUES (%s)", (order,))
    if order == "poison":
        raise Poison("no such order")


def one(db, sql, *args):
    return db.execute(sql, args).fetchone()[0]


def main(url):
    me = random.getrandbits(63)
    with psycopg.connect(url, autocommit=True) as db, psycopg.connect(url, autocommit=True) as other:
        db.execute("CREATE TABLE invoices (order_number text)")
        assert handle(db, me, "evt_1", "17", insert)
        assert handle(db, me, "evt_1", "17", insert)
        assert one(db, "SELECT count(*) FROM invoices") == 1

        # While the transaction of another consumer is open, a duplicate gets a reply at once.
        with other.transaction():
            record = one(other, "SELECT oncegate.message_record('billing', 'evt_2')")
            assert one(other, "SELECT outcome FROM oncegate.receive(%s)", record) == "process"
            insert(other, "18")
            assert not handle(db, me, "evt_2", "18", insert)
        assert handle(db, me, "evt_2", "18", insert)
        assert one(db, "SELECT count(*) FROM invoices") == 2

        # A poison message becomes one dead letter, and an operator sends it again.
        acknowledged = [handle(db, me, "evt_3", "poison", insert) for _ in range(4)]
        assert acknowledged == [False, False, True, True], acknowledged
        number, error = db.execute("SELECT number, error FROM oncegate.list_dead_letters('billing', null, 10)").fetchone()
        assert error == "no such order", error
        with db.transaction():
            payload = one(db, "SELECT payload FROM oncegate.take_dead_letter(%s)", number)
            assert payload == b"poison"
            assert not handle(other, me, "evt_3", "19", insert)
        assert handle(other, me, "evt_3", "19", insert)

        # A message that kills its process: each process counts its attempt, and none reports a result.
        record = one(db, "SELECT oncegate.message_record('billing', 'evt_4')")
        for crash in range(MAX):
            attempts = one(db, "SELECT attempts FROM oncegate.begin_messages(%s, %s, %s)", [record], crash, KEPT)
            assert attempts == crash, attempts
        assert handle(db, me, "evt_4", "20", insert)
        assert one(db, "SELECT outcome FROM oncegate.receive(%s)", record) == "dead"
        # Giving it up again writes no second dead letter. A processed message cannot be given up.
        assert give_up(db, record, "20", "rejected", 1, "again")
        assert give_up(db, one(db, "SELECT oncegate.message_record('billing', 'evt_1')"), "17", "rejected", 1, "no")
        assert one(db, "SELECT count(*) FROM oncegate.dead_letters") == 1
        failed = db.execute("SELECT * FROM oncegate.fail_message(%s, %s)", (record, KEPT)).fetchone()
        assert failed == ("dead", MAX), failed

        # Many messages in one statement, in order.
        sql = "SELECT array_agg(oncegate.message_record('billing', m)) FROM unnest(%s::text[]) AS u (m)"
        records = one(db, sql, ["evt_1", "evt_5", "evt_5"])
        with db.transaction():
            rows = db.execute("SELECT outcome FROM oncegate.receive_many(%s, %s)", (records, KEPT)).fetchall()
        assert rows == [("processed",), ("process",), ("processed",)], rows

        # Events of a stream, in order.
        outcomes = []
        for sequence in (1, 3, 3, 2, 2):
            with db.transaction():
                sql = "SELECT outcome, is_more FROM oncegate.stream_event('history', 'order-17', %s, event => %s)"
                outcome, is_more = db.execute(sql, (sequence, b"event %d" % sequence)).fetchone()
                outcomes.append(outcome)
                while is_more:
                    buffered, event, is_more = db.execute("SELECT * FROM oncegate.take_buffered('history', 'order-17')").fetchone()
                    outcomes.append((buffered, event))
        assert outcomes == ["apply", "buffered", "buffered", "apply", (3, b"event 3"), "applied"], outcomes
        # Message 20 was given up before it took effect.
        assert one(db, "SELECT string_agg(order_number, ' ' ORDER BY order_number) FROM invoices") == "17 18 19"
    print("ok")


main(sys.argv[1])
