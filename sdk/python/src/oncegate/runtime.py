"""The two ways in which a program waits: on an event loop, or in threads. The engine is written once for both.

In a blocking program the coroutines of the engine never suspend: whatever they wait for waits in the calling thread. So
:func:`run_blocking` drives them to their end in one step.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
log = logging.getLogger("oncegate")
STORE_THREADS = 32
# The number of timers from which cancelled ones are removed.
MOST_TIMERS = 1000
# Timers on an event loop that run for at least a second share one for each 50 ms.
LONG, STEP = 1.0, 0.05


# The process, or the machine, has no file descriptors or memory for a connection.
USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


def is_used_up() -> bool:
    """True if this process can open nothing, so that an error does not tell if a server is away. Clients may have caused it.

    The name of a server is not found either then, for example.
    """
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return True
    return False


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("an asynchronous store was used in a blocking program")


class Event(Protocol):
    def set(self) -> None: ...

    async def wait(self, timeout: float) -> None: ...


class Handle(Protocol):
    def cancel(self) -> Any: ...


class Runtime(Protocol):
    async def call(self, work: Work[T], timeout: float, *, in_thread: bool) -> T:
        """Runs one call of the store. Raises TimeoutError."""

    async def sleep(self, seconds: float) -> None: ...

    async def offload(self, work: Callable[[], T]) -> T:
        """Runs what takes a processor for long."""

    def later(self, seconds: float, work: Work[Any]) -> Handle: ...

    def event(self) -> Event: ...


# On an event loop


class _LoopEvent:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await self._event.wait()
        except TimeoutError:
            pass


def _retrieve(task: asyncio.Task[Any]) -> None:
    """The caller has the error, or does not wait any more."""
    if not task.cancelled():
        task.exception()


class _LongTimer:
    __slots__ = ("_others", "callback")

    def __init__(self, others: dict[_LongTimer, None], callback: Callable[[], Any]) -> None:
        self._others, self.callback = others, callback
        others[self] = None

    def cancel(self) -> None:
        self._others.pop(self, None)


class _LongTimers:
    """Timers of an event loop that may be some milliseconds late.

    Each request has some, which are nearly always cancelled. Those of the loop cost several times as much, and stay in memory
    until they are due.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._steps: dict[int, dict[_LongTimer, None]] = {}

    def later(self, seconds: float, callback: Callable[[], Any]) -> Handle:
        if seconds < LONG:
            return self.loop.call_later(seconds, callback)
        step = int((self.loop.time() + seconds) / STEP) + 1
        timers = self._steps.get(step)
        if timers is None:
            timers = self._steps[step] = {}
            # It serves many requests, so that it has the context of none.
            self.loop.call_at(step * STEP, self._run, step, context=contextvars.Context())
        return _LongTimer(timers, callback)

    def _run(self, step: int) -> None:
        timers = self._steps.pop(step)
        while timers:
            timer, _ = timers.popitem()
            timer.callback()


_timers: _LongTimers | None = None


def long_timers() -> _LongTimers:
    """Those of the running event loop."""
    global _timers
    loop, own = asyncio.get_running_loop(), _timers
    if own is None or own.loop is not loop:
        own = _timers = _LongTimers(loop)
    return own


class TimeLimit:
    """What `asyncio.timeout` does, by a long timer: the block raises TimeoutError if it takes longer."""

    __slots__ = ("_cancelling", "_is_over", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds, self._is_over = seconds, False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._timer = long_timers().later(self._seconds, self._end)

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        self._timer.cancel()
        if self._is_over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class LoopRuntime:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def call(self, work: Work[T], timeout: float, *, in_thread: bool) -> T:
        if in_thread:
            task = self.spawn(asyncio.to_thread(lambda: run_blocking(work())))
        else:
            task = self.spawn(work())
        task.add_done_callback(_retrieve)
        # A driver may take seconds to cancel its command, if its server does not answer. Nobody waits for that.
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if not done:
            task.cancel()
            raise TimeoutError
        return task.result()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def offload(self, work: Callable[[], T]) -> T:
        return await asyncio.to_thread(work)

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def later(self, seconds: float, work: Work[Any]) -> Handle:
        return long_timers().later(seconds, lambda: self.spawn(work()))

    def event(self) -> Event:
        return _LoopEvent()


# In threads


class _ThreadEvent:
    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self, timeout: float) -> None:
        self._event.wait(timeout)


class _TimerHandle:
    __slots__ = ("is_cancelled",)

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class ThreadRuntime:
    """Threads that are started when they are needed, and anew in a process that was forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._pool: ThreadPoolExecutor | None = None
        # Work in the background waits for calls of the store, so that it must not take their threads.
        self._background: ThreadPoolExecutor | None = None
        self._wakes = threading.Condition(threading.Lock())
        self._timers: list[tuple[float, int, _TimerHandle, Work[Any]]] = []
        self._most_timers = MOST_TIMERS
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    def _executor(self, *, background: bool = False) -> ThreadPoolExecutor:
        with self._lock:
            if self._process != os.getpid():
                self._reset()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(STORE_THREADS, "oncegate")
            if self._background is None:
                self._background = ThreadPoolExecutor(STORE_THREADS, "oncegate-background")
            return self._background if background else self._pool

    async def call(self, work: Work[T], timeout: float, *, in_thread: bool) -> T:
        if not in_thread:
            return run_blocking(work())
        try:
            future = self._executor().submit(lambda: run_blocking(work()))
        except RuntimeError:
            # The interpreter is ending, and starts no threads any more.
            return run_blocking(work())
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            future.cancel()
            raise TimeoutError from None

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  (this runtime blocks)

    async def offload(self, work: Callable[[], T]) -> T:
        return work()

    def later(self, seconds: float, work: Work[Any]) -> Handle:
        self._executor()
        handle = _TimerHandle()
        with self._wakes:
            if len(self._timers) >= self._most_timers:
                # Those of attempts that have ended would stay until a third of their leases is over.
                self._timers = [timer for timer in self._timers if not timer[2].is_cancelled]
                heapq.heapify(self._timers)
                self._most_timers = max(MOST_TIMERS, 2 * len(self._timers))
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), handle, work))
            if self._thread is None:
                self._thread = threading.Thread(target=self._tick, name="oncegate-timers", daemon=True)
                self._thread.start()
            elif self._timers[0][2] is handle:
                self._wakes.notify()
        return handle

    def _tick(self) -> None:
        while True:
            with self._wakes:
                while not self._timers or self._timers[0][0] > time.monotonic():
                    self._wakes.wait(self._timers[0][0] - time.monotonic() if self._timers else None)
                _, _, handle, work = heapq.heappop(self._timers)
            if not handle.is_cancelled:
                try:
                    self._executor(background=True).submit(_logged, work)
                except RuntimeError:
                    return  # the interpreter is ending

    def event(self) -> Event:
        return _ThreadEvent()


def _logged(work: Work[Any]) -> None:
    try:
        run_blocking(work())
    except Exception:
        log.exception("work in the background failed")
