"""The transports of httpx: one key, as many attempts as it takes, definite and unknown outcomes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncegate.client import AsyncRetryTransport, Report, RetryBudget, RetryPolicy, RetryTransport, SendError

POLICY = RetryPolicy(backoff_base=0.001, backoff_cap=0.002)
Script = list[Any]


def scripted(script: Script) -> tuple[Callable[[httpx.Request], httpx.Response], list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        step = script.pop(0)
        if isinstance(step, Exception):
            raise step
        status, headers, body = step
        return httpx.Response(status, headers=headers, text=body)

    return answer, seen


def post(script: Script, policy: RetryPolicy = POLICY, budget: RetryBudget | None = None, **request: Any) -> Any:
    answer, seen = scripted(script)
    with httpx.Client(transport=RetryTransport(httpx.MockTransport(answer), policy, budget)) as client:
        request.setdefault("headers", {"Idempotency-Key": "k"})
        return client.post("https://shop.test/pay", **{"content": b"5", **request}), seen


OK = (201, {}, "done")


def test_the_same_request_again() -> None:
    response, seen = post([httpx.ReadTimeout("lost"), (503, {"retry-after": "0"}, ""), (409, {}, ""), OK])
    assert (response.status_code, response.text) == (201, "done")
    assert response.extensions["oncegate"] == Report("done", 4)
    assert {(request.headers["idempotency-key"], request.content) for request in seen} == {("k", b"5")}


def test_a_refusal_is_definite_unless_it_is_in_doubt() -> None:
    response, seen = post([(422, {}, "")])
    assert (response.status_code, len(seen)) == (422, 1)
    with pytest.raises(SendError) as refused:
        post([httpx.ReadTimeout("lost"), (401, {}, "")])
    assert (refused.value.kind, refused.value.may_have_taken_effect) == ("turned-away", True)
    response, seen = post([httpx.ReadTimeout("lost"), (422, {}, ""), (422, {"idempotent-replayed": "true"}, "")])
    assert (response.status_code, len(seen)) == (422, 3)


def test_limits() -> None:
    with pytest.raises(SendError) as attempts:
        post([httpx.ConnectError("refused")] * 6)
    assert (attempts.value.kind, attempts.value.may_have_taken_effect, attempts.value.attempts) == ("attempts", False, 6)
    assert attempts.value.is_resumable
    with pytest.raises(SendError) as later:
        post([(503, {"retry-after": "3600"}, "")])
    assert (later.value.kind, later.value.retry_after) == ("come-back-later", 3600)
    with pytest.raises(SendError) as budget:
        post([(503, {}, "")] * 6, budget=RetryBudget(4))
    assert budget.value.kind == "budget"
    with pytest.raises(SendError) as large:
        post([(200, {}, "x" * 11)], RetryPolicy(max_response_bytes=10))
    assert (large.value.kind, large.value.may_have_taken_effect) == ("response-too-large", True)
    with pytest.raises(SendError) as unknown:
        post([(500, {"idempotency-status": "refused; problem=outcome-unknown; retry=stop"}, "")])
    assert unknown.value.kind == "unknown"


def test_a_request_without_a_key_is_sent_once() -> None:
    response, seen = post([(503, {}, "")], headers={})
    assert (response.status_code, len(seen)) == (503, 1)
    response, seen = post([(503, {}, ""), OK], RetryPolicy(backoff_base=0.001, new_keys=True), headers={})
    assert len({request.headers["idempotency-key"] for request in seen}) == 1
    assert len(seen) == 2


def test_a_stream_is_sent_once() -> None:
    with pytest.raises(SendError) as stream:
        post([(503, {}, "")], content=(part for part in [b"5"]))
    assert stream.value.kind == "body"


async def test_the_asynchronous_transport() -> None:
    answer, seen = scripted([httpx.ReadError("cut"), (500, {}, ""), OK])
    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.MockTransport(answer), POLICY)) as client:
        response = await client.post("https://shop.test/pay", headers={"Idempotency-Key": "k"})
    assert (response.text, len(seen)) == ("done", 3)
