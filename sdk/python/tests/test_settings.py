"""Wrong settings: each is refused with a text that names the setting, what is wrong, and what to write."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import oncegate
import oncegate.wsgi
import servers
from oncegate.settings import Settings


@pytest.mark.parametrize(
    ("one", "list_of_it"),
    [
        ({"methods": "POST"}, {"methods": ["post"]}),
        ({"scope": "required-header:x-tenant"}, {"scope": ["required-header:x-tenant"]}),
        ({"key_header": "X-Key"}, {"key_header": ("X-Key",)}),
        ({"key_scope_header": "x-account"}, {"key_scope_header": ["X-Account"]}),
        ({"natural_key": "/a,b", "scope": "single-tenant"}, {"natural_key": ["/a,b"], "scope": ["single-tenant"]}),
        ({"fingerprint_include": "/a"}, {"fingerprint_include": ["/a"]}),
        ({"fingerprint_exclude": "/a"}, {"fingerprint_exclude": {"/a"}}),
        ({"fingerprint_headers": "x-version"}, {"fingerprint_headers": ["X-Version"]}),
        ({"stored_headers": "x-trace"}, {"stored_headers": ["X-Trace"]}),
        ({"release_statuses": "404"}, {"release_statuses": [404]}),
        ({"release_statuses": 404}, {"release_statuses": ["404"]}),
        ({"release_statuses": "4xx"}, {"release_statuses": ["4xx"]}),
        ({"max_request_body": "2MiB"}, {"max_request_body": 2 * 1024 * 1024}),
        ({"lease": "500ms"}, {"lease": 0.5}),
    ],
)
def test_one_value_is_a_list_of_one(one: Any, list_of_it: Any) -> None:
    assert Settings.of(**one) == Settings.of(**list_of_it)


def test_the_usual_spellings_protect() -> None:
    assert Settings.of(methods="POST").methods == {"POST"}
    settings = Settings.of(release_statuses="404")
    assert settings.frees_key(404)
    assert not settings.frees_key(400)


LISTS = (
    "methods", "scope", "key_header", "key_scope_header", "natural_key", "fingerprint_include", "fingerprint_exclude",
    "fingerprint_headers", "stored_headers", "release_statuses",
)  # fmt: skip
OTHERS = (
    "profile", "service", "require_key", "key_syntax", "key_format", "key_scope", "authority", "trailing_slash",
    "fingerprint_body", "replay_marker", "echo_key", "server_errors", "replay_statuses", "retention", "lease", "wait",
    "on_abandoned", "store_outage", "store_timeout", "max_request_body", "max_response_body", "max_in_flight",
    "max_in_flight_per_caller", "request_budget", "body_timeout", "stream_timeout", "documentation", "problem_base_url",
)  # fmt: skip


@pytest.mark.parametrize("name", LISTS + OTHERS)
def test_every_setting_refuses_what_it_cannot_read(name: str) -> None:
    for value in (object(), [object()], b"POST", 1.5j, {"a": "b"}, True, 7, "", "a,b", "x y\n", [None], [True], float("nan")):
        is_fine = (name in ("require_key", "echo_key") and value is True) or (name in OTHERS and value == 7)
        if is_fine or (name == "service" and value == "a,b"):
            continue
        with pytest.raises(oncegate.ConfigError) as refused:
            Settings.of(**{name: value})
        assert name in str(refused.value), (value, str(refused.value))
        assert re.search(r"write|use|may be|leave", str(refused.value)), (value, str(refused.value))


@pytest.mark.parametrize("name", ["methods", "key_header", "scope", "natural_key"])
def test_an_empty_list_would_protect_nothing(name: str) -> None:
    with pytest.raises(oncegate.ConfigError, match=f"{name} is empty"):
        Settings.of(**{name: []})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"methods": "POST,PATCH"}, "write a list: ['POST', 'PATCH']"),
        ({"methods": ["GET"]}, "methods has 'GET', which cannot be covered"),
        ({"scope": "header:a, cookie:b"}, "write a list: ['header:a', 'cookie:b']"),
        ({"scope": "X-Api-Key"}, "did you mean 'required-header:X-Api-Key'?"),
        ({"release_statuses": 200}, "release_statuses has 200; write a status from 400 to 599"),
        ({"release_statuses": ["4x"]}, "release_statuses has '4x'"),
        ({"replay_marker": "set-cookie: a"}, "replay_marker has 'set-cookie', which has another purpose"),
        ({"profile": "strip"}, "did you mean 'stripe'?"),
        ({"retnetion": "7d"}, "there is no setting 'retnetion'; did you mean 'retention'?"),
        ({"key_header": "content-type"}, "key_header has 'content-type', which has another purpose"),
        ({"key_header": ["x-key", "Cookie"]}, "key_header has 'cookie', which has another purpose"),
        ({"key_header": ["x-key", "X-Key"]}, "key_header has 'x-key' twice"),
        ({"service": "a shop"}, "service is 'a shop'; write a name"),
    ],
)
def test_the_text_says_what_to_write(settings: Any, text: str) -> None:
    with pytest.raises(oncegate.ConfigError, match=re.escape(text)):
        Settings.of(**settings)


def test_an_unknown_method_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "oncegate"):
        assert Settings.of(methods=["PSOT", "PATCH"]).methods == {"PSOT", "PATCH"}
    assert caplog.messages == ["methods: no registered method is called 'PSOT'; did you mean 'POST'?"]


def test_options_of_functions_and_transactions() -> None:
    from oncegate.transactions import _attempt

    for options, text in [
        ({"caller": "42"}, "caller is '42'; write a kind and an identity"),
        ({"caller": ("customer", "")}, "caller is"),
        ({"service": "a b"}, "service is 'a b'"),
        ({"name": 5}, "name is 5"),
        ({"lease": None}, "lease is None"),
    ]:
        with pytest.raises(oncegate.ConfigError, match=re.escape(text)):
            oncegate.idempotent(**{"name": "work", "key": lambda: "k", "store": oncegate.MemoryStore(), **options})
        with pytest.raises(oncegate.ConfigError, match=re.escape(text)):
            _attempt("k", {"name": "charge", "service": "shop", **options})
    with pytest.raises(oncegate.ConfigError, match="did you mean 'service'"):
        _attempt("k", {"name": "charge", "servce": "shop"})
    for options, text in [
        ({"errors": "unknwon"}, "did you mean 'unknown'?"),
        ({"errors": 5}, "errors is 5"),
        ({"on_abandoned": "reconcile"}, "on_abandoned is 'reconcile'"),
        ({"key": "order"}, "key is 'order', which is no function"),
        ({"store": None}, "NoneType is not a store"),
    ]:
        with pytest.raises(oncegate.ConfigError, match=re.escape(text)):
            oncegate.idempotent(**{"name": "work", "key": lambda: "k", "store": oncegate.MemoryStore(), **options})


def test_slips_in_what_is_given() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with pytest.raises(oncegate.ConfigError, match="MemoryStore is not a store: use MemoryStore"):
        oncegate.IdempotencyMiddleware(app, store=oncegate.MemoryStore)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name"):
        oncegate.idempotent(key=str, store=oncegate.MemoryStore())  # type: ignore[call-arg]
    with pytest.raises(oncegate.ConfigError, match="name is ''"):
        oncegate.idempotent(name="", key=str, store=oncegate.MemoryStore())

    async def later(request: Any) -> str:
        return "ann"

    with pytest.raises(oncegate.ConfigError, match="scope is a function that is async"):
        Settings.of(scope=later)
    made = oncegate.StoredResponse.of(201, {"Content-Type": "text/plain"}, "made")
    assert made == oncegate.StoredResponse.of(201, [("content-type", b"text/plain")], b"made")


async def test_a_store_on_a_server_needs_the_name_of_the_service(store: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    refused = pytest.raises(oncegate.ConfigError, match=re.escape("write service='orders', for example"))
    is_memory = isinstance(store, oncegate.MemoryStore)
    is_blocking = store.is_blocking or is_memory
    with contextlib.nullcontext() if is_memory else refused:
        oncegate.IdempotencyMiddleware(app, store=store)
    with contextlib.nullcontext() if is_memory else refused:
        oncegate.idempotent(name="work", key=lambda: "k", store=store)
    if is_blocking:
        with contextlib.nullcontext() if is_memory else refused:
            oncegate.wsgi.IdempotencyMiddleware(app, store=store)
    oncegate.IdempotencyMiddleware(app, store=store, service="shop")
    oncegate.idempotent(name="work", key=lambda: "k", store=store, service="shop")


async def test_services_on_one_store_share_no_keys(store: Any) -> None:
    key, ran = uuid.uuid4().hex, []

    def function_of(service: str) -> Any:
        @oncegate.idempotent(name="charge", key=lambda: key, store=store, service=service)
        def charge() -> str:
            ran.append(service)
            return service

        return charge

    if not (store.is_blocking or isinstance(store, oncegate.MemoryStore)):
        return
    shop, warehouse = function_of("shop"), function_of("warehouse")
    results = await asyncio.to_thread(lambda: [shop(), warehouse(), shop()])
    assert results == ["shop", "warehouse", "shop"]
    assert ran == ["shop", "warehouse"]


def test_a_wrong_setting_stops_the_start(tmp_path: Path) -> None:
    program = """
from fastapi import FastAPI
from oncegate import IdempotencyMiddleware, MemoryStore
app = FastAPI()
app.add_middleware(IdempotencyMiddleware, store=MemoryStore(), retnetion="7d")
"""
    (tmp_path / "shop.py").write_text(program)
    command = [sys.executable, "-m", "uvicorn", "shop:app", "--port", str(servers.free_port())]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3
    assert "ERROR:    IdempotencyMiddleware: there is no setting 'retnetion'; did you mean 'retention'?" in ended.stderr


def test_workers_with_a_store_in_memory_are_warned(tmp_path: Path) -> None:
    start = (Path(__file__).parents[1] / "README.md").read_text().split("## Stores")[0]
    (program,) = re.findall(r"```python\n(.*?)```", start, re.DOTALL)
    (tmp_path / "shop.py").write_text(program)
    port = servers.free_port()
    with (tmp_path / "log").open("w") as written:
        command = [sys.executable, "-m", "uvicorn", "shop:app", "--workers", "2", "--port", str(port)]
        shop = subprocess.Popen(command, cwd=tmp_path, stdout=written, stderr=written)
        try:
            servers.wait_for(
                lambda: (tmp_path / "log").read_text().count("the store is in the memory of this worker process") == 2,
                "the workers did not warn", 60,
            )
        finally:
            shop.send_signal(signal.SIGTERM)
            shop.wait(30)
