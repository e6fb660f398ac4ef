"""What becomes of a handler's response, by the shared vectors: the record, the first response, and that to a retry."""

from __future__ import annotations

from typing import Any

import pytest

from conftest import settings_of, vectors
from oncegate.asgi import IdempotencyMiddleware
from oncegate.memory import MemoryStore

CASES = vectors("http/vectors/outcomes.json")["cases"]


def options_of(configuration: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("-", "_").replace(".", "_"): value for name, value in configuration.items()}


async def ask(app: Any) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    request = {
        "type": "http",
        "method": "POST",
        "path": "/pay",
        "raw_path": b"/pay",
        "query_string": b"",
        "headers": [(b"host", b"shop.test"), (b"idempotency-key", b"k")],
    }
    parts = [{"type": "http.request", "body": b""}]

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        messages.append(message)

    await app(request, receive, send)
    start, *rest = messages
    headers = sorted([name.decode(), value.decode()] for name, value in start["headers"] if name != b"content-length")
    body = b"".join(message["body"] for message in rest)
    return {"status": start["status"], "headers": headers, "body": body.decode()}


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["name"]))
async def test_outcomes(case: dict[str, Any]) -> None:
    response = case["response"]
    executions = 0

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        nonlocal executions
        executions += 1
        await receive()
        headers = [(name.encode(), value.encode()) for name, value in response["headers"]]
        await send({"type": "http.response.start", "status": response["status"], "headers": headers})
        await send({"type": "http.response.body", "body": response["body"].encode()})

    store = MemoryStore()
    settings_of(case["settings"])
    app = IdempotencyMiddleware(handler, store=store, **options_of(case["settings"]))
    first = await ask(app)
    (record,) = store._records.values()
    expected = case["expect"]
    found: Any = {"completed": record.response.hex()} if record.response is not None else record.state
    retry = await ask(app)
    for answer in (first, retry):
        answer["headers"].sort()
    assert first == expected["first"]
    assert found == expected["record"]
    assert retry == expected["retry"]
    assert executions == expected["executions"]
