"""Functions that run once for each key: jobs, handlers of calls, tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from .engine import Attempt, Engine, Permit, Policy, Reply, check_store, engine_of
from .errors import (
    ConfigError,
    InProgress,
    KeyReused,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    Undecodable,
    Unreplayable,
)
from .fingerprint import Rules, parts_fingerprint, tag_and_digest
from .flow import read_stored, running
from .ids import Ids, IdSecret
from .keys import MAX_KEY_BYTES
from .response import StoredResponse
from .runtime import run_blocking
from .values import check_shared, choice, seconds
from .values import service as checked_service

__all__ = ["FunctionFailed", "idempotent"]

P = ParamSpec("P")
R = TypeVar("R")
ErrorFate = Literal["unknown", "store", "release"]
VALUE, ERROR = 200, 500
# The time for which a blocking program waits at its exit for outcomes that are not stored yet, in seconds.
DRAIN_TIMEOUT = 30.0
MAX_RESULT_BYTES = 1024 * 1024
JSON = (("content-type", b"application/json"),)
log = logging.getLogger("oncegate")


class FunctionFailed(Exception):
    """An earlier call with this key failed, and its error was stored. `error` is what was stored."""

    def __init__(self, name: str, error: Any) -> None:
        super().__init__(f"an earlier call of {name} with this key failed, and its error was stored")
        self.error = error


def to_json(value: Any) -> bytes:
    """The value as JSON. Raises ValueError or TypeError if JSON cannot express it exactly."""
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()


def input_fingerprint(value: Any, rules: Rules = Rules()) -> bytes:  # noqa: B008  (it is frozen)
    """The fingerprint of a function's input, by its JSON in its canonical form."""
    return parts_fingerprint("oncegate-function-1", [input_digest(value, rules)])


def input_digest(value: Any, rules: Rules = Rules()) -> bytes:  # noqa: B008  (it is frozen)
    encoded = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    _, digest = tag_and_digest("", "", content_type=b"application/json", body=encoded, rules=rules)
    return digest


def checked_key(key: Any) -> str:
    text = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
    if not isinstance(text, str) or not 1 <= len(text.encode()) <= MAX_KEY_BYTES:
        raise ValueError(f"the key of a call is a text of 1 to {MAX_KEY_BYTES} bytes, or a whole number")
    return text


def checked_caller(caller: Any) -> tuple[tuple[str, bytes], ...]:
    """The caller of a call: a kind and an identity, or nobody in particular."""
    if caller is None:
        return ()
    is_pair = isinstance(caller, tuple | list) and len(caller) == 2
    if not is_pair or not all(isinstance(text, str) and text for text in caller):
        raise ConfigError(f"caller is {caller!r}; write a kind and an identity, such as ('customer', '42')")
    return ((caller[0], caller[1].encode()),)


class Function:
    """The settings of a function. Made by :func:`idempotent`."""

    def __init__(
        self,
        name: str,
        store: Any,
        service: str | None,
        caller: tuple[tuple[str, bytes], ...],
        policy: Policy,
        errors: Callable[[Exception], ErrorFate],
        encode: Callable[[Any], Any],
        decode: Callable[[Any], Any],
        ids: Ids,
    ) -> None:
        self.name, self.store, self.service, self.caller, self.ids = name, store, service, caller, ids
        self.policy, self.errors, self.encode, self.decode = policy, errors, encode, decode

    def record(self, key: str) -> bytes:
        """The identifier of the record of a key."""
        return self.ids.record(self.service, self.caller, [b"function:", self.name.encode()], key.encode())

    async def claim(self, engine: Engine, key: str, fingerprint: bytes) -> Permit | Reply:
        return await engine.claim(
            self.record(key),
            self.ids.fingerprint(fingerprint),
            self.policy,
            caller=self.ids.caller_tag(self.caller),
            operation=self.name,
            key_tag=self.ids.key_tag(key.encode()),
        )

    def replayed(self, reply: Reply) -> Any:
        """The value of an earlier call, or the error that says why there is none."""
        match reply.outcome:
            case "replay":
                return self._decoded(read_stored(reply.response))
            case "in-progress":
                raise InProgress(
                    f"another call of {self.name} with this key is running; call it again later with the same key",
                    retry_after=max(0.0, reply.lease_left),
                )
            case "mismatch":
                raise KeyReused(f"the key of this call of {self.name} was used before with another input")
            case "unknown":
                raise OutcomeUnknown(
                    f"it is not known if an earlier call of {self.name} with this key took effect: find out, and resolve its "
                    "record with `oncegate keys resolve`, through a sidecar on this store"
                )
            case _:
                raise Unreplayable(
                    f"an earlier call of {self.name} with this key was done, and its result was not stored"
                )

    def _decoded(self, response: StoredResponse) -> Any:
        try:
            value = json.loads(response.body) if response.body else None
            if 200 <= response.status <= 299:
                return self.decode(value)
        except Exception as error:
            raise Undecodable(f"the stored result of {self.name} cannot be read by this program") from error
        raise FunctionFailed(self.name, value)

    async def returned(self, permit: Permit, value: Any) -> Any:
        """Stores the value of a call, and returns it, or that of the attempt which overtook this one.

        What JSON cannot express is not stored, and later calls get `Unreplayable`.
        """
        encoded: bytes | None = None
        try:
            body = to_json(self.encode(value))
            if len(body) <= MAX_RESULT_BYTES:
                encoded = StoredResponse(VALUE, JSON, body).encode()
            else:
                log.warning(
                    "the result of %s is not stored: it has %d bytes as JSON, and at most %d are",
                    self.name,
                    len(body),
                    MAX_RESULT_BYTES,
                )
        except Exception as error:
            # The value's own code runs here, after the effect. Its failure must not hide the effect.
            log.warning("the result of %s is not stored: JSON cannot express it (%s)", self.name, type(error).__name__)
        if await permit.complete("completed" if encoded else "tombstone", encoded) == "fenced":
            return await self._overtaken(permit)
        return value

    async def _overtaken(self, permit: Permit) -> Any:
        """The stored result, which all callers get, of a record that another attempt owns."""
        record, found = permit.attempt.record, None
        log.warning("record %s: another attempt has overtaken this one of %s", record.hex(), self.name)
        try:
            found = await permit.lookup()
        except StoreError as error:
            log.warning("record %s: its result was not found: %s", record.hex(), error)
        match found.state if found is not None else None:
            case "completed" if found is not None and found.response is not None:
                return self._decoded(read_stored(found.response))
            case "tombstone" | "awaited":
                return self.replayed(Reply("unreplayable"))
        raise OutcomeUnknown(
            f"another attempt has overtaken this one of {self.name}, and both may have taken effect: call it again with the same "
            "key for the result that counts"
        )

    async def hidden(self, permit: Permit, value: Any) -> ConfigError:
        """Ends a call that returned what still has to run. What the call did before may have taken effect."""
        kind = type(value).__name__
        await permit.park(f"{self.name} returned a {kind}, which has not run")
        if inspect.iscoroutine(value) or inspect.isgenerator(value):
            try:
                value.close()
            except Exception:
                log.exception("%s: the %s that it returned raised an exception when it was closed", self.name, kind)
        return ConfigError(
            f"{self.name} returned a {kind}, which runs after its call has returned. What {self.name} did before it returned may "
            "have taken effect, so the outcome is unknown: write `async def` and `await`, or return its values"
        )

    async def raised(self, permit: Permit, error: BaseException) -> bool:
        """Ends a call that raised an error. True: the error was to be stored, and another attempt has overtaken this one."""
        fate: ErrorFate = "unknown"
        try:
            # Code of the program runs here. Its failure must not keep the key in progress.
            if isinstance(error, Exception):
                fate = self.errors(error)
            stored = b""
            if fate == "store":
                shown = {"type": type(error).__name__, "message": str(error)}
                stored = StoredResponse(ERROR, JSON, json.dumps(shown).encode()).encode()
        except Exception:
            log.exception("%s: it is not known what its error means, so its outcome is unknown", self.name)
            fate = "unknown"
        match fate:
            case "store":
                return await permit.complete("completed", stored) == "fenced"
            case "release":
                await permit.release()
            case _:
                await permit.park(f"{self.name} raised {type(error).__name__}")
        return False


def idempotent(
    *,
    key: Callable[..., Any],
    store: Any,
    name: str,
    fingerprint: Callable[..., Any] | None = None,
    service: str | None = None,
    id_secret: str | IdSecret | None = None,
    caller: tuple[str, str] | None = None,
    errors: ErrorFate | Callable[[Exception], ErrorFate] = "unknown",
    lease: float | str = 30,
    retention: float | str = 86_400,
    wait: float | str = 2,
    on_abandoned: Literal["park", "reexecute"] = "park",
    store_timeout: float | str = 5,
    encode: Callable[[Any], Any] = lambda value: value,
    decode: Callable[[Any], Any] = lambda value: value,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function run once for each key, whether it is `async` or not. Later calls get its stored result.

    `key` gets the arguments of the call and returns its key: `key=lambda order: order.id`. `fingerprint` returns what must be
    equal in two calls with one key, as JSON; by default nothing else than the key is compared, because arguments may be
    anything. `errors` says what an exception means: `"unknown"` (it may have taken effect), `"store"` (later calls raise
    :class:`FunctionFailed`), `"release"` (nothing took effect), or a function from the exception to one of these.

    `name` is the name of the operation: functions of one service with the same name share keys. `service` is the name of the
    service, which a store on a server needs. Services with different names never share keys.

    `id_secret` is the id secret of a store that belongs to one.

    Results are JSON. `encode` turns a result into JSON, and `decode` turns it back. A parameter named `attempt` is not among the
    arguments of `key`: the function gets its :class:`Attempt` in it.
    """
    check_store(store)
    checked_service(service)
    check_shared(store, service)
    if not callable(errors):
        choice("errors", errors, ("unknown", "store", "release"))
    for what, given_function in (
        ("key", key),
        ("encode", encode),
        ("decode", decode),
        ("fingerprint", fingerprint or str),
    ):
        if not callable(given_function):
            raise ConfigError(
                f"{what} is {given_function!r}, which is no function; write one such as lambda order: order.id"
            )
    if not (isinstance(name, str) and name):
        raise ConfigError(f"name is {name!r}; write the name of the operation, such as 'charge'")
    known_caller, ids = checked_caller(caller), Ids.of(id_secret)
    policy = Policy(
        seconds("lease", lease, 0.1, 3600),
        seconds("retention", retention, 1, 400 * 86_400),
        seconds("wait", wait, 0, 3600),
        choice("on_abandoned", on_abandoned, ("park", "reexecute")),
        seconds("store_timeout", store_timeout, 0.05, 3600),
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        settings = Function(
            name,
            store,
            service,
            known_caller,
            policy,
            errors if callable(errors) else lambda _: errors,
            encode,
            decode,
            ids,
        )
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"{name} is a generator, which runs after its call has returned: make it a plain function"
            )
        if (name, service, id(store)) in getattr(function, "_oncegate_names", ()):
            raise ConfigError(
                f"{name} is wrapped twice, so that its own key is in progress when it is called: wrap it once"
            )
        names = {(name, service, id(store)), *getattr(function, "_oncegate_names", ())}
        wants_attempt = "attempt" in inspect.signature(function).parameters

        def identified(args: Any, kwargs: Any) -> tuple[str, bytes]:
            own = checked_key(key(*args, **kwargs))
            return own, input_fingerprint(fingerprint(*args, **kwargs) if fingerprint else None)

        def given(kwargs: Any, attempt: Attempt) -> dict[str, Any]:
            return {**kwargs, "attempt": attempt} if wants_attempt else kwargs

        if _is_async(function):
            tasks: set[asyncio.Task[Any]] = set()

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                # In a task of its own: a time-out around the call does not stop it, and its result is stored.
                own, compared = identified(args, kwargs)

                async def execute() -> Any:
                    engine = engine_of(store, blocking=False, ids=ids)
                    engine.drain_at_exit(DRAIN_TIMEOUT)
                    claimed = await settings.claim(engine, own, compared)
                    if isinstance(claimed, Reply):
                        return settings.replayed(claimed)
                    await _begin(claimed)
                    try:
                        with running(claimed.attempt):
                            value: Any = await function(*args, **given(kwargs, claimed.attempt))  # type: ignore[misc]
                    except BaseException as error:
                        if await settings.raised(claimed, error):
                            return await settings._overtaken(claimed)
                        raise
                    if _is_hidden(value):
                        raise await settings.hidden(claimed, value)
                    return await settings.returned(claimed, value)

                task = asyncio.get_running_loop().create_task(execute())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                return await asyncio.shield(task)

            call._oncegate_names = names  # type: ignore[attr-defined]
            return call  # type: ignore[return-value]

        @functools.wraps(function)
        def blocking_call(*args: Any, **kwargs: Any) -> Any:
            own, compared = identified(args, kwargs)
            engine = engine_of(store, blocking=True, ids=ids)
            engine.drain_at_exit(DRAIN_TIMEOUT)
            claimed = run_blocking(settings.claim(engine, own, compared))
            if isinstance(claimed, Reply):
                return settings.replayed(claimed)
            run_blocking(_begin(claimed))
            try:
                with running(claimed.attempt):
                    value: Any = function(*args, **given(kwargs, claimed.attempt))
            except BaseException as error:
                if run_blocking(settings.raised(claimed, error)):
                    return run_blocking(settings._overtaken(claimed))
                raise
            if _is_hidden(value):
                raise run_blocking(settings.hidden(claimed, value))
            return run_blocking(settings.returned(claimed, value))

        blocking_call._oncegate_names = names  # type: ignore[attr-defined]
        return blocking_call

    return decorate


def _is_async(function: Any) -> bool:
    """True for a coroutine function, and for an object that is called as one."""
    called = None if isinstance(function, type) else getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def _is_hidden(value: Any) -> bool:
    """True if the value is work that has not run yet, such as a coroutine that nobody awaits."""
    return inspect.isawaitable(value) or inspect.isgenerator(value) or inspect.isasyncgen(value)


async def _begin(permit: Permit) -> None:
    if not await permit.confirm():
        await permit.release()
        raise StoreUnavailable("the lease could not be confirmed, so nothing was executed", is_unsent=True)
