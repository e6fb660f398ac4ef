"""The transports of httpx: one key, as many attempts as it takes, definite and unknown outcomes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import http.server
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from oncegate import ConfigError
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


def test_answers_that_ask_for_another_attempt_give_no_tokens_back() -> None:
    budget = RetryBudget(50)
    for _ in range(60):
        with pytest.raises(SendError):
            post([(503, {}, "")] * 6, budget=budget)
    left = budget._tokens
    assert left < 5
    # A definite response gives its tokens back.
    post([OK], budget=budget)
    assert budget._tokens == left + 1


@pytest.mark.parametrize("blocking", [True, False])
async def test_a_response_that_trickles_ends_at_the_deadline(blocking: bool) -> None:
    class Trickle(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                while True:
                    self.wfile.write(b".")
                    time.sleep(0.05)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, policy = f"http://127.0.0.1:{server.server_port}/", RetryPolicy(deadline=1)
        headers = {"Idempotency-Key": "k"}
        try:
            with pytest.raises(SendError) as late:
                if blocking:

                    def send() -> None:
                        with httpx.Client(transport=RetryTransport(httpx.HTTPTransport(), policy)) as client:
                            client.post(url, headers=headers)

                    await asyncio.wait_for(asyncio.to_thread(send), 60)
                else:
                    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.AsyncHTTPTransport(), policy)) as client:
                        await asyncio.wait_for(client.post(url, headers=headers), 60)
        finally:
            server.shutdown()
    assert (late.value.kind, late.value.may_have_taken_effect) == ("deadline", True)


def test_a_mistyped_scheme_is_not_tried_again() -> None:
    mistyped = httpx.UnsupportedProtocol("htp")
    with pytest.raises(httpx.UnsupportedProtocol):
        post([mistyped])


def test_a_stream_is_sent_once() -> None:
    with pytest.raises(SendError) as stream:
        post([(503, {}, "")], content=(part for part in [b"5"]))
    assert stream.value.kind == "body"


async def test_the_asynchronous_transport() -> None:
    answer, seen = scripted([httpx.ReadError("cut"), (500, {}, ""), OK])
    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.MockTransport(answer), POLICY)) as client:
        response = await client.post("https://shop.test/pay", headers={"Idempotency-Key": "k"})
    assert (response.text, len(seen)) == ("done", 3)


def test_quick_refusals_use_the_budget_up() -> None:
    """A service in an outage gets few retries, although it answers each of them."""
    budget, sent = RetryBudget(50), 0

    def away(request: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        return httpx.Response(503)

    with httpx.Client(transport=RetryTransport(httpx.MockTransport(away), POLICY, budget)) as client:
        for at in range(60):
            with pytest.raises(SendError):
                client.post("https://shop.test/pay", content=b"5", headers={"Idempotency-Key": f"k{at}"})
    assert sent == 60 + 10


@pytest.mark.parametrize("part", [b"x", b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"])
async def test_the_deadline_bounds_an_attempt(part: bytes) -> None:
    """A response that comes a byte at a time, in its head or in its body, is not waited for."""
    ends, running = asyncio.Event(), set()

    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        running.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            writer.write(b"HTTP/1.1 200 OK\r\nx-slow: " if part == b"x" else part)
            while not ends.is_set() and not writer.is_closing():
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    policy = RetryPolicy(deadline=1, backoff_base=0.001)
    headers = {"Idempotency-Key": "k"}
    began = time.monotonic()
    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.AsyncHTTPTransport(), policy)) as client:
        with pytest.raises(SendError) as ended:
            await client.post(url, headers=headers)
    assert (ended.value.kind, ended.value.may_have_taken_effect) == ("deadline", True)

    def blocking() -> SendError:
        transport = RetryTransport(httpx.HTTPTransport(), policy)
        with httpx.Client(transport=transport) as client, pytest.raises(SendError) as ended:
            client.post(url, headers=headers)
        return ended.value

    if part != b"x":
        assert (await asyncio.to_thread(blocking)).kind == "deadline"
    assert time.monotonic() - began < 20
    ends.set()
    await asyncio.gather(*running)
    server.close()
    await server.wait_closed()


EMPTY = "the key is empty; give 1 to 255 characters, such as a UUID"
CHARACTER = (
    "the key has a character that is not allowed; give visible ASCII characters without quote and comma, or put the key in quotes"
)


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (["",], EMPTY), ([" \t "], EMPTY), (['""'], EMPTY), (['"  "'], EMPTY),
        (["a\r\nb"], CHARACTER),
        (["a b"], CHARACTER), (["a, b"], CHARACTER), (["\u00e9"], CHARACTER),
        (['"a'], CHARACTER), (['"a";p'], CHARACTER),
        (["x" * 256], "the key has 256 characters; at most 255 are allowed"),
        (["null"], 'the key is the text "null", as of a missing value; give the key of the intent'),
        (['"None"'], 'the key is the text "None", as of a missing value; give the key of the intent'),
        (["<nil>"], 'the key is the text "<nil>", as of a missing value; give the key of the intent'),
        (["NaN"], 'the key is the text "NaN", as of a missing value; give the key of the intent'),
        (["a", "b"], "the request has more than one key; give one key"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("new_keys", [False, True])
async def test_a_request_without_a_valid_key_is_not_sent(keys: list[str], text: str, new_keys: bool) -> None:
    headers = [("idempotency-key", key.encode()) for key in keys]
    policy = RetryPolicy(new_keys=new_keys)
    answer, seen = scripted([OK])
    with (
        httpx.Client(transport=RetryTransport(httpx.MockTransport(answer), policy)) as client,
        pytest.raises(SendError) as error,
    ):
        client.post("https://shop.test/pay", headers=headers)
    assert (error.value.kind, str(error.value), seen) == ("unsendable", f"{text}; nothing was sent", [])
    assert (error.value.may_have_taken_effect, error.value.attempts, error.value.is_resumable) == (False, 0, False)
    async with httpx.AsyncClient(transport=AsyncRetryTransport(httpx.MockTransport(answer), policy)) as own:
        with pytest.raises(SendError, match="nothing was sent"):
            await own.post("https://shop.test/pay", headers=headers)
    assert seen == []


def test_valid_keys_are_sent_as_they_are() -> None:
    for key in ("k", "x" * 255, '"a, b"', r'"a\"b"', '"' + "x" * 255 + '"'):
        _, seen = post([(503, {}, ""), OK], headers={"Idempotency-Key": key})
        assert [request.headers["idempotency-key"] for request in seen] == [key, key]


def test_a_header_field_that_is_never_sent_is_not_retried() -> None:
    with pytest.raises(SendError) as error:
        post([OK], headers={"Idempotency-Key": "k", "X-Own": "a\r\nb"})
    assert (error.value.kind, error.value.may_have_taken_effect) == ("unsendable", False)


def test_wrong_settings_are_refused() -> None:
    wrong: list[dict[str, Any]] = [
        {"max_attempts": 0}, {"max_attempts": "3"}, {"max_attempts": 1.5}, {"max_attempts": True},
        {"deadline": "1m"}, {"deadline": 0},
        {"deadline": float("nan")}, {"backoff_base": "x"}, {"backoff_base": -1},
        {"backoff_cap": float("inf")}, {"max_retry_after": None},
        {"max_response_bytes": -1}, {"server_errors": "agian"}, {"key_header": ""}, {"key_header": "a b"}, {"key_header": None},
        {"new_keys": "yes"},
    ]  # fmt: skip
    for options in wrong:
        with pytest.raises(ConfigError, match=next(iter(options))):
            RetryPolicy(**options)
    with pytest.raises(ConfigError, match="tokens"):
        RetryBudget("5")  # type: ignore[arg-type]
    inner = httpx.MockTransport(lambda _: httpx.Response(200))
    for kind in (RetryTransport, AsyncRetryTransport):
        for arguments in ((httpx.Client(),), (inner, {"max_attempts": 3}), (inner, None, 5)):
            with pytest.raises(ConfigError):
                kind(*arguments)
    with pytest.raises(ConfigError, match=r"transport is a HTTPTransport; give an httpx\.AsyncBaseTransport"):
        AsyncRetryTransport(httpx.HTTPTransport())  # type: ignore[arg-type]


class Answer(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Gives responses whose bodies are not read yet, as those of a network."""

    def __init__(self, *script: tuple[int, dict[str, str], bytes]) -> None:
        self.script, self.sent = list(script), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        status, headers, body = self.script.pop(0)
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(body))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self.handle_request(request)


GZIP = {"content-encoding": "gzip"}
KEY = {"Idempotency-Key": "k"}


def test_a_body_that_is_not_coded_as_it_says_is_no_response() -> None:
    inner = Answer((502, GZIP, b"not gzip"), (201, GZIP, gzip.compress(b"done")))
    with httpx.Client(transport=RetryTransport(inner, POLICY)) as client:
        response = client.post("https://shop.test/", headers=KEY)
    assert (response.status_code, response.text, inner.sent) == (201, "done", 2)
    inner = Answer(*[(200, GZIP, b"not gzip")] * 2)
    policy = RetryPolicy(max_attempts=2, backoff_base=0)
    with httpx.Client(transport=RetryTransport(inner, policy)) as client, pytest.raises(SendError) as error:
        client.post("https://shop.test/", headers=KEY)
    assert (error.value.kind, error.value.may_have_taken_effect, error.value.attempts) == ("attempts", True, 2)
    assert isinstance(error.value.__cause__, httpx.DecodingError)
    # A small body that becomes a large one is too large.
    inner = Answer((200, GZIP, gzip.compress(bytes(9_000_000))))
    with httpx.Client(transport=RetryTransport(inner, POLICY)) as client, pytest.raises(SendError) as error:
        client.post("https://shop.test/", headers=KEY)
    assert error.value.kind == "response-too-large"


async def test_a_response_is_read_as_every_other_one() -> None:
    raw = gzip.compress(b"done")
    with httpx.Client(transport=RetryTransport(Answer(*[(200, GZIP, raw)] * 3), POLICY)) as client:
        for name, expected in (("iter_raw", raw), ("iter_bytes", b"done")):
            with client.stream("POST", "https://shop.test/", headers=KEY) as response:
                assert b"".join(getattr(response, name)()) == expected
                assert isinstance(response.extensions["oncegate"], Report)
        assert client.post("https://shop.test/", headers=KEY).content == b"done"
    async with (
        httpx.AsyncClient(transport=AsyncRetryTransport(Answer((200, GZIP, raw)), POLICY)) as own,
        own.stream("POST", "https://shop.test/", headers=KEY) as response,
    ):
        assert b"".join([part async for part in response.aiter_raw()]) == raw


def test_a_pause_that_is_no_number_is_ignored() -> None:
    for value in (b"\xb2", b"Mon, 01 Jan 0001 00:00:00 -0000", b"1.5"):
        script = [(503, [(b"retry-after", value)], ""), OK]
        response, seen = post(script)
        assert (response.status_code, len(seen)) == (201, 2)


@pytest.mark.parametrize("field", [("a b", "x"), ("x-own", " x"), ("x-own", "x\t"), ("", "x"), ("x-own", "a\x07b")])
def test_a_header_field_that_http_does_not_carry_is_not_sent(field: tuple[str, str]) -> None:
    answer, seen = scripted([OK])
    headers = [(b"idempotency-key", b"k"), (field[0].encode(), field[1].encode())]
    with (
        httpx.Client(transport=RetryTransport(httpx.MockTransport(answer))) as client,
        pytest.raises(SendError, match="that HTTP does not carry") as error,
    ):
        client.post("https://shop.test/pay", headers=headers)
    assert (error.value.kind, error.value.may_have_taken_effect, seen) == ("unsendable", False, [])


def test_a_proxy_that_refuses_has_sent_nothing() -> None:
    def refused(_: httpx.Request) -> httpx.Response:
        raise httpx.ProxyError("403 Forbidden")

    policy = RetryPolicy(max_attempts=2)
    with (
        httpx.Client(transport=RetryTransport(httpx.MockTransport(refused), policy)) as client,
        pytest.raises(SendError) as error,
    ):
        client.post("https://shop.test/pay", headers={"Idempotency-Key": "k"})
    assert (error.value.kind, error.value.may_have_taken_effect) == ("attempts", False)
