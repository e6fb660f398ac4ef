"""A store in Redis or Valkey, by its contract: every decision is made by its scripts."""

from __future__ import annotations

import inspect
import logging
from typing import Any

from ._contract import contract
from .errors import ConfigError, RecordCorrupt, StoreError, StoreUnavailable
from .store import Claim, Claimed, EndState, Settled, StoredRecord

__all__ = ["RedisStore"]

log = logging.getLogger("oncegate")


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
        connections = getattr(client, "connection_pool", None)
        if connections is not None and connections.connection_kwargs.get("decode_responses"):
            raise ConfigError("the client has decode_responses=True, and records are bytes: make one without it")
        self.is_blocking = not inspect.iscoroutinefunction(getattr(client, "execute_command", None))
        self.client = client
        self.allow_eviction = allow_eviction

    async def _reply(self, reply: Any) -> Any:
        return await reply if inspect.isawaitable(reply) else reply

    async def _call(self, script: str, record: bytes, *arguments: bytes | str | int) -> list[Any]:
        own = contract()["redis"][script]
        key = b"oncegate:{%s}" % record.hex().encode()
        try:
            try:
                reply = await self._reply(self.client.evalsha(own["sha1"], 1, key, *arguments))
            except Exception as error:
                if "NOSCRIPT" not in _text(error):
                    raise
                reply = await self._reply(self.client.eval(own["text"], 1, key, *arguments))
        except Exception as error:
            raise _read_error(error) from error
        found: list[Any] = reply
        return found

    async def verify(self) -> None:
        try:
            info = await self._reply(self.client.info("memory"))
        except Exception as error:
            read = _read_error(error)
            if "NOPERM" in _text(error):
                log.warning("the user of Redis may not call INFO: it is not known if records may be evicted")
                return
            raise read from error
        # A cluster answers for each of its nodes.
        nodes = [info] if "maxmemory_policy" in info else [node for node in info.values() if isinstance(node, dict)]
        policies = {str(node.get("maxmemory_policy", "noeviction")) for node in nodes} - {"noeviction"}
        if policies and not self.allow_eviction:
            raise StoreUnavailable(
                f"Redis evicts records (maxmemory-policy {', '.join(sorted(policies))}), and a retry of an evicted key would "
                "execute again: set it to noeviction, or use RedisStore(client, allow_eviction=True)",
                is_unsent=True,
            )

    async def claim(self, claim: Claim) -> Claimed:
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
        )


def _settled(reply: list[Any]) -> Settled:
    settled: Settled = reply[0].decode()
    return settled


def _text(error: BaseException) -> str:
    # redis-py takes the first word of some errors off the text, and makes it the type.
    return f"{type(error).__name__.upper().replace('ERROR', '')} {error}"


def _read_error(error: Exception) -> StoreError:
    text = _text(error)
    if "CORRUPT" in text:
        return RecordCorrupt("the record cannot be read")
    if "INVALID" in text:
        return StoreUnavailable("a script refused an argument of this library", is_unsent=True)
    if "OOM" in text:
        return StoreUnavailable("Redis has no memory for new keys", is_full=True)
    # The text of other errors may name the server.
    return StoreUnavailable(f"Redis did not answer ({type(error).__name__})")
