"""A store in Redis or Valkey, by its contract: every decision is made by its scripts."""

from __future__ import annotations

import asyncio
import errno
import inspect
import logging
import re
import ssl
from collections import deque
from typing import Any, Literal

from ._contract import contract
from .errors import ConfigError, RecordCorrupt, StoreError, StoreRefused, StoreUnavailable
from .runtime import is_used_up, numbers_of, says_away
from .store import Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["RedisStore"]

log = logging.getLogger("oncegate")
MAX_NODES = 1000
# Pipelines that are under way at a time, each on a connection of its own, and the commands in one.
MAX_PIPELINES, MAX_COMMANDS = 4, 64


class RedisStore:
    """A store over your client: `redis.asyncio.Redis`, or for blocking programs `redis.Redis`, or their clusters.

    An eviction policy other than `noeviction` is refused, because Redis would forget records while their keys are used.
    `allow_eviction=True` accepts that.
    """

    def __init__(self, client: Any, *, allow_eviction: bool = False) -> None:
        if not (hasattr(client, "evalsha") and hasattr(client, "eval")):
            raise ConfigError(
                f"RedisStore needs a client of redis-py, and not {type(client).__name__}: write RedisStore(redis.asyncio.Redis())"
            )
        self._is_cluster = hasattr(client, "get_node_from_key")
        owner = getattr(client, "connection_pool", None) or getattr(client, "nodes_manager", None)
        options = getattr(client, "connection_kwargs", None) or getattr(owner, "connection_kwargs", {})
        if options.get("decode_responses"):
            raise ConfigError("the client has decode_responses=True, and records are bytes: make one without it")
        self.is_blocking = not inspect.iscoroutinefunction(getattr(client, "execute_command", None))
        self.is_prompt = not self.is_blocking and not self._is_cluster and hasattr(client, "pipeline")
        """Its calls end at once if they are cancelled."""
        self._pipelines: _Pipelines | None = None
        self.client = client
        self.allow_eviction = allow_eviction
        self._verified: set[str] = set()

    async def _reply(self, reply: Any) -> Any:
        return await reply if inspect.isawaitable(reply) else reply

    async def _command(self, *command: bytes | str | int) -> Any:
        if not self.is_prompt:
            return await self._reply(self.client.execute_command(*command))
        loop = asyncio.get_running_loop()
        if self._pipelines is None or self._pipelines.loop is not loop:
            self._pipelines = _Pipelines(self.client, loop)
        return await self._pipelines.send(command)

    async def _call(self, script: str, record: bytes, *arguments: bytes | str | int) -> list[Any]:
        own = contract()["redis"][script]
        key = _key(record)
        try:
            try:
                reply = await self._command("EVALSHA", own["sha1"], 1, key, *arguments)
            except Exception as error:
                if "NOSCRIPT" not in _codes(error):
                    raise
                reply = await self._command("EVAL", own["text"], 1, key, *arguments)
        except Exception as error:
            raise _read_error(error) from error
        found: list[Any] = reply
        return found

    def part_of(self, record: bytes) -> str:
        """The node of a cluster that has a record, or nothing. Others may answer while it is away."""
        return getattr(self._node_of(record), "name", "")

    def _node_of(self, record: bytes) -> Any:
        if not self._is_cluster:
            return None
        try:
            return self.client.get_node_from_key(_key(record))
        except Exception:
            # The client has not connected yet, or no node has the slot.
            return None

    async def verify(self) -> None:
        # Each node of a cluster is verified before its first claim: another one may be away.
        if not self._is_cluster:
            await self._verify()

    async def _verify_node(self, record: bytes) -> None:
        node = self._node_of(record)
        if node is not None and node.name not in self._verified:
            try:
                await self._verify(target_nodes=node)
            except StoreRefused:
                raise
            except StoreUnavailable as error:
                raise StoreUnavailable(
                    str(error),
                    is_unsent=True,
                    is_full=error.is_full,
                    is_reached=error.is_reached,
                    is_broken=error.is_broken,
                    timed_out=error.timed_out,
                ) from error
            if len(self._verified) >= MAX_NODES:
                self._verified.clear()
            self._verified.add(node.name)

    async def _verify(self, **target: Any) -> None:
        try:
            if target:
                info = await self._reply(self.client.info("memory", **target))
            else:
                info = await self._command("INFO", "memory")
        except Exception as error:
            read = _read_error(error)
            if _codes(error) & {"NOPERM", "NOPERMISSION"}:
                log.warning("the user of Redis may not call INFO: it is not known if records may be evicted")
                return
            raise read from error
        # Some clients answer for each node, even if there is one.
        nodes = [info] if "maxmemory_policy" in info else [node for node in info.values() if isinstance(node, dict)]
        policies = {str(node.get("maxmemory_policy", "noeviction")) for node in nodes} - {"noeviction"}
        if policies and not self.allow_eviction:
            raise StoreRefused(
                f"Redis evicts records (maxmemory-policy {', '.join(sorted(policies))}), and a retry of an evicted key would "
                "execute again: set it to noeviction, or use RedisStore(client, allow_eviction=True)"
            )

    async def claim(self, claim: Claim) -> Claimed:
        if self._is_cluster:
            await self._verify_node(claim.record)
        word, _, *rest = await self._call(
            "claim",
            claim.record,
            claim.attempt,
            claim.fingerprint,
            claim.lease_ms,
            claim.retention_ms,
            claim.on_abandoned,
            claim.caller,
            claim.operation,
            claim.key_tag or b"",
        )
        match word:
            case b"execute":
                token, attempts, _, after_abandoned = rest
                return Claimed("execute", int(token), int(attempts), bool(int(after_abandoned)))
            case b"replay":
                return Claimed("replay", response=rest[0])
            case b"in-progress":
                return Claimed("in-progress", lease_left_ms=int(rest[0]))
        return Claimed(word.decode())

    async def renew(self, record: bytes, token: int, lease_ms: int, retention_ms: int) -> Settled:
        return _settled(await self._call("renew", record, token, lease_ms, retention_ms))

    async def complete(
        self, record: bytes, token: int, state: EndState, response: bytes | None, retention_ms: int
    ) -> Settled:
        more = () if response is None else (response,)
        return _settled(await self._call("complete", record, token, state, retention_ms, *more))

    async def release(self, record: bytes, token: int, retention_ms: int) -> Settled:
        return _settled(await self._call("release", record, token, retention_ms))

    async def lookup(self, record: bytes) -> StoredRecord | None:
        word, _, *rest = await self._call("lookup", record)
        if word == b"absent":
            return None
        parts = dict(zip(rest[::2], rest[1::2], strict=True))
        by_operator = parts.get(b"by_operator", 0)
        return StoredRecord(
            parts[b"state"].decode(),
            parts[b"fingerprint"],
            int(parts[b"token"]),
            parts.get(b"attempt"),
            parts.get(b"response"),
            by_operator not in (0, b"0", b""),
            int(parts.get(b"lease_until", 0)),
            int(parts[b"expires_at"]),
            parts[b"operation"].decode("utf-8", "replace"),
        )


class _Sent:
    """A command, and who waits for its reply."""

    __slots__ = ("batch", "command", "reply")

    def __init__(self, command: tuple[Any, ...], reply: asyncio.Future[Any]) -> None:
        self.command, self.reply = command, reply
        self.batch: _Batch | None = None


class _Batch:
    """Commands that go to Redis in one pipeline."""

    __slots__ = ("sender", "waiting")

    def __init__(self, sender: asyncio.Task[None] | None, waiting: int) -> None:
        self.sender, self.waiting = sender, waiting

    def leave(self) -> None:
        self.waiting -= 1
        if self.waiting == 0 and self.sender is not None:
            # The client of Redis gives up the connection, whose replies may never come.
            self.sender.cancel()


class _Pipelines:
    """Sends the commands of requests that run at the same time in pipelines: one write and one read for many of them.

    A command goes at once, unless several pipelines are under way: then it goes with the next one. So a process needs a few
    connections, however many requests it has.
    """

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.client, self.loop = client, loop
        self._unsent: deque[_Sent] = deque()
        self._senders: set[asyncio.Task[None]] = set()

    async def send(self, command: tuple[Any, ...]) -> Any:
        sent = _Sent(command, self.loop.create_future())
        self._unsent.append(sent)
        self._start()
        try:
            return await sent.reply
        except asyncio.CancelledError:
            if sent.batch is not None:
                sent.batch.leave()
            raise

    def _start(self) -> None:
        if self._unsent and len(self._senders) < MAX_PIPELINES:
            sender = self.loop.create_task(self._send_all())
            self._senders.add(sender)
            sender.add_done_callback(self._ended)

    def _ended(self, sender: asyncio.Task[None]) -> None:
        self._senders.discard(sender)
        self._start()

    async def _send_all(self) -> None:
        while self._unsent:
            batch: list[_Sent] = []
            while self._unsent and len(batch) < MAX_COMMANDS:
                sent = self._unsent.popleft()
                if not sent.reply.done():
                    batch.append(sent)
            if batch:
                await self._send(batch)

    async def _send(self, batch: list[_Sent]) -> None:
        own = _Batch(asyncio.current_task(), len(batch))
        for sent in batch:
            sent.batch = own
        replies: list[Any] = [ConnectionError("the event loop ends")] * len(batch)
        try:
            if len(batch) == 1:
                replies = [await self.client.execute_command(*batch[0].command)]
            else:
                pipeline = self.client.pipeline(transaction=False)
                for sent in batch:
                    pipeline.execute_command(*sent.command)
                replies = await pipeline.execute(raise_on_error=False)
        except Exception as error:
            replies = [error] * len(batch)
        finally:
            for sent, reply in zip(batch, replies, strict=True):
                sent.batch = None
                if sent.reply.done():
                    continue
                if isinstance(reply, Exception):
                    sent.reply.set_exception(reply)
                else:
                    sent.reply.set_result(reply)


def _key(record: bytes) -> bytes:
    return b"oncegate:{%s}" % record.hex().encode()


def _settled(reply: list[Any]) -> Settled:
    settled: Settled = reply[0].decode()
    return settled


# The codes with which a server that was reached refuses new keys: its memory is used up, it cannot write to its disk, it has too
# few replicas, it is a replica, busy with a script, or reads its data at its start, or a part of the Cluster is away. redis-py
# has own types for some.
TAKES_NO_KEYS = frozenset(
    (
        *("OOM", "OUTOFMEMORY", "MISCONF", "NOREPLICAS", "READONLY", "BUSY", "LOADING", "BUSYLOADING"),
        *("MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN"),
    )
)


def _codes(error: BaseException) -> set[str]:
    """The code of an error of Redis: the first word of its text, or what redis-py has made of it, the type of the error."""
    # The text of a type has the code no more, and the rest may name anything: that of a lost connection names the server.
    return {type(error).__name__.upper().replace("ERROR", ""), str(error).partition(" ")[0]}


# A text of redis-py for a connection that was not made. Each of its other errors of connections is that of one that was there.
_NOT_CONNECTED = re.compile(
    r"Error (?:(?P<number>-?\d+) |(?P<several>.*?))connecting to (?P<server>\S*)|No (?:master|slave) found"
    r"|Redis Cluster cannot be connected",
    re.DOTALL,
)
_BROKEN = frozenset({errno.ECONNRESET, errno.EPIPE, errno.ECONNABORTED})
_Meaning = Literal["away", "connect", "command", "broken", "reached"]


def _meaning(error: BaseException | None) -> _Meaning:
    """The meaning of an error of a client: no connection could be made (`away`), a limit of the client ran out (`connect` or
    `command`), or a connection was there and broke. All others are answers, or errors of this process."""
    found: _Meaning = "reached"
    while error is not None:
        name, text = type(error).__name__, str(error)
        names = {own.__name__ for own in type(error).__mro__ if own.__module__.startswith("redis.")}
        numbers: list[int] = []
        if names & {"ResponseError", "AuthenticationError", "AuthorizationError", "InvalidResponse", "DataError"}:
            return "reached"
        if (
            "max number of clients" in text
            or name == "MaxConnectionsError"
            or text.startswith("No connection available")
        ):
            return "reached"
        if isinstance(error, TimeoutError) or "TimeoutError" in names:
            found = "connect" if found == "connect" or text.startswith("Timeout connecting") else "command"
        elif "ConnectionError" in names or "RedisClusterException" in names:
            told = _NOT_CONNECTED.match(text)
            numbers = [int(told["number"])] if told and told["number"] else numbers_of(text) if told else []
            is_file = bool(told and told["server"] and told["server"].startswith("/"))
            if told is None or _BROKEN.issuperset(numbers or [0]):
                found = "broken"
            else:
                found = "away" if says_away(numbers, is_socket_file=is_file) else "reached"
        elif isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, EOFError)):
            found = "broken"
        elif isinstance(error, ssl.SSLError):
            # A server was reached, and does not speak TLS, or has a certificate that is not trusted.
            return "reached"
        elif isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
            found = "broken"
        elif isinstance(error, OSError):
            numbers = [error.errno] if error.errno else numbers_of(text)
            found = "away" if says_away(numbers) or found == "away" else "reached"
        if found == "reached" and numbers:
            return "reached"
        # Only what an error was made of: the others of its context are those of another command. redis-py does not say of what it
        # has made one with a number.
        error = error.__context__ if numbers and error.__cause__ is None else error.__cause__
    return found


def _read_error(error: Exception) -> StoreError:
    codes = _codes(error)
    if codes & {"CORRUPT", "WRONGTYPE"}:
        return RecordCorrupt("the record cannot be read")
    if "INVALID" in codes:
        return StoreRefused("a script refused an argument of this library")
    # What a script may not call has no code of its own.
    if codes & {"NOPERM", "NOPERMISSION"} or "user executing the script can't run" in str(error):
        return StoreRefused("the user of Redis lacks a right: see docs/reference/store-contract-redis.md of Oncegate")
    if refused := codes & TAKES_NO_KEYS:
        return StoreUnavailable(f"Redis takes no new keys ({min(refused)})", is_full=True)
    # The text of other errors may name the server.
    meaning, name = _meaning(error), type(error).__name__
    if meaning == "broken":
        return StoreUnavailable(f"a connection to Redis broke ({name})", is_broken=True)
    if meaning == "reached" or is_used_up():
        return StoreUnavailable(f"Redis refused ({name})", is_reached=True)
    return StoreUnavailable(f"Redis did not answer ({name})", timed_out=meaning if meaning != "away" else "")
