"""Functions that run once for each key: jobs, handlers of calls, tools."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeVar

from .engine import Attempt, Engine, Permit, Policy, Reply, engine_of
from .errors import (
    ConfigError,
    InProgress,
    KeyReused,
    OutcomeUnknown,
    StoreUnavailable,
    Undecodable,
    Unreplayable,
)
from .fingerprint import Rules, parts_fingerprint, tag_and_digest
from .flow import read_stored, running
from .identity import caller_tag, key_tag, record_id
from .keys import MAX_KEY_BYTES
from .response import StoredResponse
from .runtime import run_blocking
from .settings import seconds

__all__ = ["FunctionFailed", "idempotent"]

P = ParamSpec("P")
R = TypeVar("R")
ErrorFate = Literal["unknown", "store", "release"]
VALUE, ERROR = 200, 500
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
    encoded = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()
    _, digest = tag_and_digest("", "", content_type=b"application/json", body=encoded, rules=rules)
    return parts_fingerprint("oncegate-function-1", [digest])


def checked_key(key: Any) -> str:
    text = str(key) if isinstance(key, int) and not isinstance(key, bool) else key
    if not isinstance(text, str) or not 1 <= len(text.encode()) <= MAX_KEY_BYTES:
        raise ValueError(f"the key of a call is a text of 1 to {MAX_KEY_BYTES} bytes, or a whole number")
    return text


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
    ) -> None:
        self.name, self.store, self.service, self.caller = name, store, service, caller
        self.policy, self.errors, self.encode, self.decode = policy, errors, encode, decode

    def record(self, key: str) -> bytes:
        """The identifier of the record of a key."""
        return record_id(self.service, self.caller, [b"function:", self.name.encode()], key.encode())

    async def claim(self, engine: Engine, key: str, fingerprint: bytes) -> Permit | Reply:
        return await engine.claim(
            self.record(key),
            fingerprint,
            self.policy,
            caller=caller_tag(self.caller),
            operation=self.name,
            key_tag=key_tag(key.encode()),
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
                    f"it is not known if an earlier call of {self.name} with this key took effect; an operator has to resolve it"
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

    async def returned(self, permit: Permit, value: Any) -> None:
        """Stores the value of a call. What JSON cannot express is not stored, and later calls get `Unreplayable`."""
        encoded: bytes | None = None
        try:
            body = to_json(self.encode(value))
            if len(body) <= MAX_RESULT_BYTES:
                encoded = StoredResponse(VALUE, JSON, body).encode()
        except Exception as error:
            # The value's own code runs here, after the effect. Its failure must not hide the effect.
            log.warning("the result of %s is not stored: JSON cannot express it (%s)", self.name, type(error).__name__)
        await permit.complete("completed" if encoded else "tombstone", encoded)

    async def raised(self, permit: Permit, error: BaseException) -> None:
        """Ends a call that raised an error."""
        fate: ErrorFate = self.errors(error) if isinstance(error, Exception) else "unknown"
        match fate:
            case "store":
                shown = {"type": type(error).__name__, "message": str(error)}
                await permit.complete("completed", StoredResponse(ERROR, JSON, to_json(shown)).encode())
            case "release":
                await permit.release()
            case _:
                await permit.park(f"{self.name} raised {type(error).__name__}")


def idempotent(
    *,
    key: Callable[..., Any],
    store: Any,
    name: str | None = None,
    fingerprint: Callable[..., Any] | None = None,
    service: str | None = None,
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

    Results are JSON. `encode` turns a result into JSON, and `decode` turns it back. A parameter named `attempt` is not among the
    arguments of `key`: the function gets its :class:`Attempt` in it.
    """
    fates = ("unknown", "store", "release")
    if isinstance(errors, str) and errors not in fates:
        raise ConfigError(f"errors is {errors!r}; use 'unknown', 'store', 'release' or a function")
    policy = Policy(
        seconds("lease", lease, 0.1, 3600),
        seconds("retention", retention, 1, 400 * 86_400),
        seconds("wait", wait, 0, 3600),
        on_abandoned,
        seconds("store_timeout", store_timeout, 0.05, 3600),
    )

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        settings = Function(
            name or function.__name__,
            store,
            service,
            ((caller[0], caller[1].encode()),) if caller else (),
            policy,
            errors if callable(errors) else lambda _: errors,
            encode,
            decode,
        )
        wants_attempt = "attempt" in inspect.signature(function).parameters

        def identified(args: Any, kwargs: Any) -> tuple[str, bytes]:
            own = checked_key(key(*args, **kwargs))
            return own, input_fingerprint(fingerprint(*args, **kwargs) if fingerprint else None)

        def given(kwargs: Any, attempt: Attempt) -> dict[str, Any]:
            return {**kwargs, "attempt": attempt} if wants_attempt else kwargs

        if inspect.iscoroutinefunction(function):
            tasks: set[asyncio.Task[Any]] = set()

            @functools.wraps(function)
            async def call(*args: Any, **kwargs: Any) -> Any:
                # In a task of its own: a time-out around the call does not stop it, and its result is stored.
                own, compared = identified(args, kwargs)

                async def execute() -> Any:
                    engine = engine_of(store, blocking=False)
                    claimed = await settings.claim(engine, own, compared)
                    if isinstance(claimed, Reply):
                        return settings.replayed(claimed)
                    await _begin(claimed)
                    try:
                        with running(claimed.attempt):
                            value = await function(*args, **given(kwargs, claimed.attempt))
                    except BaseException as error:
                        await settings.raised(claimed, error)
                        raise
                    await settings.returned(claimed, value)
                    return value

                task = asyncio.get_running_loop().create_task(execute())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                return await asyncio.shield(task)

            return call  # type: ignore[return-value]

        @functools.wraps(function)
        def blocking_call(*args: Any, **kwargs: Any) -> Any:
            own, compared = identified(args, kwargs)
            engine = engine_of(store, blocking=True)
            claimed = run_blocking(settings.claim(engine, own, compared))
            if isinstance(claimed, Reply):
                return settings.replayed(claimed)
            run_blocking(_begin(claimed))
            try:
                with running(claimed.attempt):
                    value: Any = function(*args, **given(kwargs, claimed.attempt))
            except BaseException as error:
                run_blocking(settings.raised(claimed, error))
                raise
            run_blocking(settings.returned(claimed, value))
            return value

        return blocking_call

    return decorate


async def _begin(permit: Permit) -> None:
    if not await permit.confirm():
        await permit.release()
        raise StoreUnavailable("the lease could not be confirmed, so nothing was executed", is_unsent=True)
