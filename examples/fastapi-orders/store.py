"""Orders in SQLite. Every write is one transaction."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime

from models import Charge, Item, Ledger, NewOrder, Order, OrderChange

EXPORT_BATCH = 100

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,
  customer    TEXT NOT NULL,
  total_cents INTEGER NOT NULL,
  status      TEXT NOT NULL DEFAULT 'pending',
  created_at  TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS items (
  id          INTEGER PRIMARY KEY,
  order_id    INTEGER NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
  sku         TEXT NOT NULL,
  quantity    INTEGER NOT NULL,
  price_cents INTEGER NOT NULL
);
CREATE INDEX IF NOT EXISTS items_by_order ON items (order_id);
CREATE TABLE IF NOT EXISTS notes (
  id         INTEGER PRIMARY KEY,
  order_id   INTEGER NOT NULL REFERENCES orders (id) ON DELETE CASCADE,
  text       TEXT NOT NULL,
  created_at TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS notes_by_order ON notes (order_id);
-- A charge outlives its order: the money has moved.
CREATE TABLE IF NOT EXISTS charges (
  id           INTEGER PRIMARY KEY,
  order_id     INTEGER NOT NULL,
  amount_cents INTEGER NOT NULL,
  created_at   TEXT NOT NULL
);
"""


class OrderNotFound(LookupError):
    def __init__(self, order_id: int) -> None:
        super().__init__(f"order {order_id} not found")


class OrderStore:
    """A connection per call, so any thread may call."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_schema(self) -> None:
        with self._connection() as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.executescript(SCHEMA)

    def create(self, orders: list[NewOrder]) -> list[Order]:
        """Inserts all the orders or none, and returns them."""
        with self._transaction() as db:
            return [_insert(db, order) for order in orders]

    def all(self) -> list[Order]:
        with self._connection() as db:
            return _select(db, "ORDER BY id")

    def get(self, order_id: int) -> Order:
        with self._connection() as db:
            return _get(db, order_id)

    def change(self, order_id: int, change: OrderChange) -> Order:
        """Changes the status, appends a note, or both."""
        with self._transaction() as db:
            _get(db, order_id)
            if change.status is not None:
                db.execute("UPDATE orders SET status = ? WHERE id = ?", (change.status, order_id))
            if change.add_note is not None:
                db.execute(
                    "INSERT INTO notes (order_id, text, created_at) VALUES (?, ?, ?)",
                    (order_id, change.add_note, _now()),
                )
            return _get(db, order_id)

    def charge(self, order_id: int) -> Charge:
        """Charges the order's total."""
        with self._transaction() as db:
            amount, at = _get(db, order_id).total_cents, _now()
            charge_id = db.execute(
                "INSERT INTO charges (order_id, amount_cents, created_at) VALUES (?, ?, ?)",
                (order_id, amount, at),
            ).lastrowid
            db.execute("UPDATE orders SET status = 'paid' WHERE id = ?", (order_id,))
            return Charge(id=charge_id, order_id=order_id, amount_cents=amount, created_at=at)

    def delete(self, order_id: int) -> None:
        with self._transaction() as db:
            if db.execute("DELETE FROM orders WHERE id = ?", (order_id,)).rowcount == 0:
                raise OrderNotFound(order_id)

    def ledger(self) -> Ledger:
        with self._connection() as db:
            row = db.execute(
                """SELECT (SELECT count(*) FROM orders) AS orders,
                          (SELECT count(*) FROM charges) AS charges,
                          (SELECT count(*) FROM notes) AS notes"""
            ).fetchone()
            return Ledger(**row)

    def stream(self) -> Iterator[Order]:
        """Every order, in batches: a slow reader holds neither a lock nor the whole table."""
        last = 0
        while True:
            with self._connection() as db:
                batch = _select(db, "WHERE id > ? ORDER BY id LIMIT ?", last, EXPORT_BATCH)
            if not batch:
                return
            yield from batch
            last = batch[-1].id

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        # No implicit transactions: whoever writes says BEGIN.
        with closing(sqlite3.connect(self._path, timeout=10, isolation_level=None)) as db:
            db.row_factory = sqlite3.Row
            db.execute("PRAGMA foreign_keys = ON")
            yield db

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._connection() as db:
            db.execute("BEGIN IMMEDIATE")
            with db:  # commits, or rolls back on an exception
                yield db


def _insert(db: sqlite3.Connection, order: NewOrder) -> Order:
    order_id = db.execute(
        "INSERT INTO orders (customer, total_cents, created_at) VALUES (?, ?, ?)",
        (order.customer, order.total_cents, _now()),
    ).lastrowid
    db.executemany(
        "INSERT INTO items (order_id, sku, quantity, price_cents) VALUES (?, ?, ?, ?)",
        [(order_id, item.sku, item.quantity, item.price_cents) for item in order.items],
    )
    return _get(db, order_id)


def _get(db: sqlite3.Connection, order_id: int) -> Order:
    for order in _select(db, "WHERE id = ?", order_id):
        return order
    raise OrderNotFound(order_id)


def _select(db: sqlite3.Connection, clause: str, *values: int) -> list[Order]:
    return [
        Order(**row, items=_items(db, row["id"]), notes=_notes(db, row["id"]))
        for row in db.execute(f"SELECT * FROM orders {clause}", values).fetchall()
    ]


def _items(db: sqlite3.Connection, order_id: int) -> list[Item]:
    rows = db.execute(
        "SELECT sku, quantity, price_cents FROM items WHERE order_id = ? ORDER BY id", (order_id,)
    )
    return [Item(**row) for row in rows]


def _notes(db: sqlite3.Connection, order_id: int) -> list[str]:
    rows = db.execute("SELECT text FROM notes WHERE order_id = ? ORDER BY id", (order_id,))
    return [row["text"] for row in rows]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
