"""The MCP library for Python, unchanged, as client and as server, with a sidecar between them. The first line on the standard output
is the port of the server; the first line on the standard input has the address of the sidecar. Ends with 0 if every check held,
and prints each check.
"""

import contextlib
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import time

import anyio
from mcp import Client, MCPError
from mcp_types import ElicitResult

TEMPORARY = tempfile.TemporaryDirectory()
DIRECTORY = pathlib.Path(TEMPORARY.name)
EFFECTS, GATE = DIRECTORY / "effects", DIRECTORY / "gate"
SERVER = pathlib.Path(__file__).with_name("mcp_server.py")
DEADLINE = 120


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def effects():
    return len(EFFECTS.read_text().splitlines()) if EFFECTS.exists() else 0


async def until(holds):
    with anyio.fail_after(DEADLINE):
        while not holds():
            await anyio.sleep(0.01)


@contextlib.contextmanager
def closed_gate():
    GATE.touch()
    try:
        yield
    finally:
        GATE.unlink(missing_ok=True)


def text(result):
    return " ".join(part.text for part in result.content)


def key(text):
    return {"idempotencyKey": text}


async def call(client, tool, arguments, meta=None, **options):
    with anyio.fail_after(DEADLINE):
        return await client.call_tool(tool, arguments, meta=meta, **options)


class Checks:
    def __init__(self, name, url, mode, start):
        self.name, self.url, self.mode, self.start = name, url, mode, start

    def passed(self, what):
        print(f"{self.name}: {what}", flush=True)

    def connect(self, **options):
        return Client(self.url, mode=self.mode, **options)

    async def run(self):
        async with self.connect(elicitation_callback=self.consent) as client:
            await self.replays(client)
            await self.reused_key(client)
            await self.running_duplicate(client)
            await self.lost_reply(client)
            await self.intents(client)
            await self.kept_error(client)
            await self.other_messages(client)
            await self.question(client)
        await self.question_after_an_effect()
        await self.client_that_leaves()
        await self.dead_server()

    async def consent(self, *_):
        return ElicitResult(action="accept", content={"agreed": True})

    async def replays(self, client):
        seen = []

        async def progress(done, *_):
            seen.append(done)

        first = await call(client, "pay", {"amount": 5}, key(f"{self.name} a"), progress_callback=progress)
        assert not first.is_error and text(first).startswith("paid"), first
        assert seen == [1, 2], seen
        before = effects()
        again = await call(client, "pay", {"amount": 5}, key(f"{self.name} a"), progress_callback=progress)
        assert text(again) == text(first) and effects() == before, again
        assert again.meta["oncegate/replayed"] is True and "oncegate/replayed" not in (first.meta or {})
        other = await call(client, "pay", {"amount": 5}, key(f"{self.name} b"))
        assert text(other) != text(first) and effects() == before + 1
        self.passed("a call with the same key has the first result")

    async def reused_key(self, client):
        before = effects()
        result = await call(client, "pay", {"amount": 6}, key(f"{self.name} a"))
        assert result.is_error and "already used" in text(result) and effects() == before, result
        assert result.meta["oncegate/problem"]["type"] == "urn:oncegate:problem:key-reused", result
        self.passed("the same key with other arguments is a tool error")

    async def running_duplicate(self, client):
        before = effects()
        results = []

        async def first():
            results.append(await call(client, "order", {"item": "tea"}, {"runId": f"{self.name} running"}))

        with closed_gate():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first)
                await until(lambda: effects() == before + 1)
                same = await call(client, "order", {"item": "tea"}, {"runId": f"{self.name} running"})
                assert same.is_error and "Make the same call again, unchanged, in" in text(same), same
                assert same.meta["oncegate/problem"]["retry"] == "same-key", same
                GATE.unlink()
        assert not results[0].is_error and effects() == before + 1, results
        self.passed("a duplicate of a running call is a tool error with advice")

    async def lost_reply(self, client):
        before = effects()
        with closed_gate():
            try:
                await client.call_tool("pay", {"amount": 9}, meta=key(f"{self.name} lost"), read_timeout_seconds=1)
                raise AssertionError("there was a result")
            except MCPError:
                pass
            # The effect may come after the client left.
            await until(lambda: effects() == before + 1)
        with anyio.fail_after(DEADLINE):
            while True:
                again = await call(client, "pay", {"amount": 9}, key(f"{self.name} lost"))
                if not again.is_error:
                    break
                assert again.meta["oncegate/problem"]["type"].endswith("request-in-progress"), again
        assert effects() == before + 1 and again.meta["oncegate/replayed"] is True, again
        self.passed("a call whose reply was lost has the result of the first")

    async def intents(self, client):
        before = effects()
        run = {"runId": f"{self.name} run"}
        first = await call(client, "order", {"item": "cup", "count": 2}, run)
        again = await call(client, "order", {"count": 2, "item": "cup"}, {**run, "idempotencyKey": "a model made it up"})
        assert first.structured_content == again.structured_content and effects() == before + 1, again
        other = await call(client, "order", {"item": "cup", "count": 3}, run)
        assert other.structured_content != first.structured_content and effects() == before + 2, other
        other_run = await call(client, "order", {"item": "cup", "count": 2}, {"runId": f"{self.name} run 2"})
        assert other_run.structured_content != first.structured_content and effects() == before + 3, other_run
        session = await call(client, "order", {"item": "cup", "count": 2})
        if self.mode == "legacy":
            assert not session.is_error and effects() == before + 4, session
            again = await call(client, "order", {"item": "cup", "count": 2})
            assert again.structured_content == session.structured_content and effects() == before + 4, again
        else:
            assert session.is_error and "/params/_meta/runId" in text(session) and effects() == before + 3, session
        self.passed("the same intent in one run is one call, whatever the key")

    async def kept_error(self, client):
        before = effects()
        first = await call(client, "fail", {"amount": 1}, key(f"{self.name} fail"))
        again = await call(client, "fail", {"amount": 1}, key(f"{self.name} fail"))
        assert first.is_error and again.is_error and text(first) == text(again) and effects() == before + 1, again
        for _ in range(2):
            wrong = await call_error(client, "pay", {"amount": "much"}, key(f"{self.name} wrong"))
            assert wrong, wrong
        self.passed("an error of a tool is kept")

    async def other_messages(self, client):
        before = effects()
        tools = await client.list_tools()
        assert {tool.name for tool in tools.tools} >= {"pay", "order"}, tools
        for number in (1, 2):
            read = await call(client, "get_orders", {}, key(f"{self.name} read"))
            assert text(read) == f"read {before + number}", read
            unprotected = await call(client, "pay", {"amount": 1})
            assert not unprotected.is_error and "oncegate/replayed" not in (unprotected.meta or {}), unprotected
            before += 1
        self.passed("other messages, reading tools and calls without a key pass")

    async def question(self, client):
        before = effects()
        first = await call(client, "pay_with_consent", {"amount": 3}, key(f"{self.name} question"))
        assert text(first).startswith("paid with consent") and effects() == before + 1, first
        again = await call(client, "pay_with_consent", {"amount": 3}, key(f"{self.name} question"))
        assert text(again) == text(first) and effects() == before + 1, again
        self.passed("a tool may ask its user")

    async def question_after_an_effect(self):
        """A client that cannot answer questions."""
        async with self.connect() as client:
            before = effects()
            for _ in range(2):
                error = await call_error(client, "pay_then_ask", {"amount": 3}, key(f"{self.name} asked"))
                assert error, error
            assert effects() == before + 1
        self.passed("an error after the effect is kept")

    async def client_that_leaves(self):
        """A client that gives up, and comes back. Leaving ends its session."""
        before = effects()
        with closed_gate():
            async with self.connect() as client:
                try:
                    await client.call_tool("pay", {"amount": 8}, meta=key(f"{self.name} left"), read_timeout_seconds=1)
                    raise AssertionError("there was a result")
                except MCPError:
                    pass
                await until(lambda: effects() == before + 1)
        async with self.connect() as client:
            with anyio.fail_after(DEADLINE):
                while (again := await call(client, "pay", {"amount": 8}, key(f"{self.name} left"))).is_error:
                    assert again.meta["oncegate/problem"]["type"].endswith("request-in-progress"), again
        assert effects() == before + 1 and again.meta["oncegate/replayed"] is True, again
        self.passed("a client that left and came back has the result")

    async def dead_server(self):
        """Another connection: the session of a server ends with it."""
        async with self.connect() as client:
            before = effects()
            results = []

            async def first():
                results.append(await call(client, "pay", {"amount": 7}, key(f"{self.name} dead")))

            with closed_gate():
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(first)
                    await until(lambda: effects() == before + 1)
                    self.start.kill()
            assert results[0].is_error and "not known" in text(results[0]), results
            assert "Do not make this call again" in text(results[0]), results
        self.start()
        async with self.connect() as client:
            again = await call(client, "pay", {"amount": 7}, key(f"{self.name} dead"))
            assert again.is_error and effects() == before + 1, again
            assert again.meta["oncegate/problem"]["type"] == "urn:oncegate:problem:outcome-unknown", again
        self.passed("an unknown outcome is a tool error with advice")


async def call_error(client, tool, arguments, meta):
    """The error of a call: in its result, or of the protocol."""
    try:
        result = await call(client, tool, arguments, meta)
        return text(result) if result.is_error else None
    except MCPError as error:
        return str(error)


class Server:
    def __init__(self, port):
        self.port, self.process = port, None

    def __call__(self):
        self.process = subprocess.Popen([sys.executable, SERVER, str(self.port), DIRECTORY], stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server ended"
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError("the server does not listen")

    def kill(self):
        self.process.kill()
        self.process.wait()


async def main():
    server = Server(free_port())
    server()
    try:
        print(server.port, flush=True)
        url = f"http://{json.loads(sys.stdin.readline())['mcp']}/mcp"
        for mode in ("auto", "legacy"):
            await Checks(mode, url, mode, server).run()
    finally:
        server.kill()


anyio.run(main)
