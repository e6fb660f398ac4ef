"""Orders and charges in PostgreSQL, each committed in one transaction with the record of its Idempotency-Key.

For `oncegate proxy --completion upstream --reconcile-path /oncegate/outcome` on the same database. Environment: DATABASE_URL, PORT, HOST.
"""

import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Annotated

import psycopg
from fastapi import Depends, FastAPI, Header, HTTPException, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from psycopg.rows import DictRow, dict_row
from psycopg.types.json import Json

from models import Charge, NewOrder, Order
from serve import serve

SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
  id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  customer    text NOT NULL,
  items       jsonb NOT NULL,
  total_cents bigint NOT NULL,
  status      text NOT NULL DEFAULT 'pending',
  created_at  timestamptz NOT NULL DEFAULT now()
);
CREATE TABLE IF NOT EXISTS charges (
  id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  order_id     bigint NOT NULL REFERENCES orders (id),
  amount_cents bigint NOT NULL,
  created_at   timestamptz NOT NULL DEFAULT now(),
  -- The attempt that made it, to find it by when the sidecar asks.
  record       bytea,
  token        bigint,
  UNIQUE (record, token)
);
"""

Database = psycopg.Connection[DictRow]


@contextmanager
def transaction() -> Iterator[Database]:
    """Commits at the end, or rolls back on an exception."""
    with psycopg.connect(os.environ["DATABASE_URL"], row_factory=dict_row) as db:
        yield db


class Attempt:
    """What the sidecar says of a request that has a key."""

    def __init__(
        self,
        oncegate_record: Annotated[str | None, Header()] = None,
        oncegate_token: Annotated[int | None, Header()] = None,
    ) -> None:
        self.record = oncegate_record and bytes.fromhex(oncegate_record)
        self.token = oncegate_token

    def complete(self, db: Database) -> None:
        """The last statement of a transaction: it raises if another attempt owns the record by now."""
        if self.record:
            db.execute("SELECT oncegate.complete(%s, %s)", (self.record, self.token))

    def complete_with(self, db: Database, response: Response) -> None:
        """The same, and retries get this response from the commit on, even if nobody lives to send it."""
        if self.record:
            fields = {name: value for name, value in response.headers.items() if name != "content-length"}
            db.execute(
                "SELECT oncegate.complete(%s, %s, oncegate.response(%s, %s, %s, %s))",
                (self.record, self.token, response.status_code, list(fields), list(fields.values()), response.body),
            )


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    with transaction() as db:
        db.execute(SCHEMA)
    yield


app = FastAPI(title="Orders", lifespan=lifespan)


@app.exception_handler(psycopg.Error)
def database_error(_request: Request, error: psycopg.Error) -> JSONResponse:
    """A server error decides nothing, and the sidecar finds out what was committed.

    That is also right if the reply to COMMIT was lost: it may still run, and until it ends, no query shows whether it will succeed.
    """
    return JSONResponse({"detail": f"the database refused: {error.sqlstate}"}, status_code=503)


@app.post("/orders", status_code=201)
def create_order(
    new: NewOrder,
    attempt: Annotated[Attempt, Depends()],
    delay_ms: Annotated[int, Query(ge=0, le=60_000)] = 0,
) -> Response:
    """Completes its record with the response."""
    with transaction() as db:
        items = [item.model_dump() for item in new.items]
        row = db.execute(
            "INSERT INTO orders (customer, items, total_cents) VALUES (%s, %s, %s) RETURNING *",
            (new.customer, Json(items), new.total_cents),
        ).fetchone()
        response = Response(
            order(row).model_dump_json(),
            status_code=201,
            headers={"Location": f"/orders/{row['id']}"},
            media_type="application/json",
        )
        attempt.complete_with(db, response)
    # Stands for a slow network: the order is committed, the response takes its time.
    time.sleep(delay_ms / 1000)
    return response


@app.post("/orders/{order_id}/pay", status_code=201)
def pay_order(order_id: Annotated[int, Path(ge=1, lt=2**53)], attempt: Annotated[Attempt, Depends()]) -> Charge:
    """Completes its record without the response, which the sidecar adds."""
    with transaction() as db:
        row = db.execute(
            "UPDATE orders SET status = 'paid' WHERE id = %s RETURNING total_cents", (order_id,)
        ).fetchone()
        if row is None:
            raise HTTPException(404, f"order {order_id} not found")
        charge = db.execute(
            "INSERT INTO charges (order_id, amount_cents, record, token) VALUES (%s, %s, %s, %s) RETURNING *",
            (order_id, row["total_cents"], attempt.record, attempt.token),
        ).fetchone()
        attempt.complete(db)
    return charged(charge)


@app.get("/oncegate/outcome", status_code=201)
def outcome(response: Response, attempt: Annotated[Attempt, Depends()]) -> Charge:
    """Gives the response of a payment once more, if nobody lived to add it to its record."""
    if not attempt.record:
        raise HTTPException(400, "only the sidecar asks here")
    with transaction() as db:
        charge = db.execute(
            "SELECT * FROM charges WHERE record = %s AND token = %s", (attempt.record, attempt.token)
        ).fetchone()
    asked = {"Oncegate-Record": attempt.record.hex(), "Oncegate-Token": str(attempt.token)}
    if charge is None:
        raise HTTPException(404, "no such charge", {"Oncegate-Outcome": "unknown", **asked})
    response.headers.update({"Oncegate-Outcome": "happened", **asked})
    return charged(charge)


@app.get("/orders")
def list_orders() -> list[Order]:
    with transaction() as db:
        return [order(row) for row in db.execute("SELECT * FROM orders ORDER BY id")]


@app.get("/ledger")
def ledger() -> dict[str, int]:
    with transaction() as db:
        return db.execute(
            "SELECT (SELECT count(*) FROM orders) AS orders, (SELECT count(*) FROM charges) AS charges"
        ).fetchone()


def charged(row: DictRow) -> Charge:
    return Charge(**{**row, "created_at": row["created_at"].isoformat()})


def order(row: DictRow) -> Order:
    return Order(**{**row, "created_at": row["created_at"].isoformat(), "notes": []})


if __name__ == "__main__":
    serve(app)
