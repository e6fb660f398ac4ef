"""A small order API on FastAPI and SQLite, with no idempotency of its own.

Environment: PORT (0 = any free port), HOST, DATABASE.
"""

import asyncio
import csv
import io
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, HTTPException, Path, Query, Request, Response, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import ValidationError

from models import Charge, Imported, ImportedRows, Ledger, NewOrder, Order, OrderChange
from serve import serve
from store import OrderNotFound, OrderStore

MAX_IMPORT_BYTES = 1024 * 1024
EVENT_INTERVAL_SECONDS = 0.1

OrderId = Annotated[int, Path(ge=1, lt=2**53)]

store = OrderStore(os.environ.get("DATABASE", "./orders.db"))


@asynccontextmanager
async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
    store.create_schema()
    yield


app = FastAPI(title="Orders", lifespan=lifespan)


@app.exception_handler(OrderNotFound)
def order_not_found(_request: Request, error: OrderNotFound) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, status_code=404)


@app.get("/healthz")
def healthz() -> dict[str, str]:
    return {"status": "ok"}


@app.get("/ledger")
def ledger() -> Ledger:
    return store.ledger()


@app.post("/orders", status_code=201)
async def create_order(
    order: NewOrder,
    response: Response,
    delay_ms: Annotated[int, Query(ge=0, le=60_000)] = 0,
) -> Order:
    [created] = await run_in_threadpool(store.create, [order])
    # Stands for a slow payment provider: the order is stored, the response takes its time.
    await asyncio.sleep(delay_ms / 1000)
    response.headers["Location"] = f"/orders/{created.id}"
    return created


@app.get("/orders")
def list_orders() -> list[Order]:
    return store.all()


@app.post("/orders/import", status_code=201)
def import_orders(file: UploadFile) -> Imported:
    data = file.file.read(MAX_IMPORT_BYTES + 1)
    if len(data) > MAX_IMPORT_BYTES:
        raise HTTPException(413, f"the file is larger than {MAX_IMPORT_BYTES} bytes")
    try:
        text = io.StringIO(data.decode("utf-8-sig"), newline="")
        rows = ImportedRows.validate_python(list(csv.DictReader(text, strict=True)))
    except (UnicodeDecodeError, csv.Error) as error:
        raise HTTPException(422, f"invalid CSV: {error}") from error
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False)) from error
    orders = store.create([row.order() for row in rows])
    return Imported(imported=len(orders), ids=[order.id for order in orders])


@app.get("/orders/export")
def export_orders() -> StreamingResponse:
    lines = (f"{order.model_dump_json()}\n" for order in store.stream())
    return StreamingResponse(lines, media_type="application/x-ndjson")


@app.get("/orders/{order_id}")
def get_order(order_id: OrderId) -> Order:
    return store.get(order_id)


@app.patch("/orders/{order_id}")
def change_order(order_id: OrderId, change: OrderChange) -> Order:
    return store.change(order_id, change)


@app.delete("/orders/{order_id}", status_code=204)
def delete_order(order_id: OrderId) -> None:
    store.delete(order_id)


@app.post("/orders/{order_id}/pay", status_code=201)
def pay_order(order_id: OrderId) -> Charge:
    return store.charge(order_id)


def start_fulfilment(order_id: OrderId) -> Order:
    """Leaves a note on the order; an unknown order is a 404 before the stream begins."""
    return store.change(order_id, OrderChange(add_note="fulfilment started"))


@app.post("/orders/{order_id}/events", response_class=EventSourceResponse)
async def follow_fulfilment(
    order: Annotated[Order, Depends(start_fulfilment)],
) -> AsyncIterator[ServerSentEvent]:
    for step in ("accepted", "packed", "shipped"):
        yield ServerSentEvent(event=step, data={"order_id": order.id})
        await asyncio.sleep(EVENT_INTERVAL_SECONDS)


if __name__ == "__main__":
    serve(app)
