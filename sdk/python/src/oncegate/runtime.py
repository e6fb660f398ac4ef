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
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent import futures
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]
log = logging.getLogger("oncegate")
# Threads for calls of a blocking store, and those in which an asynchronous program reads large bodies.
STORE_THREADS, BODY_THREADS = 32, 2
# The pause after which a timer is tried again for which no thread could be started, in seconds.
NO_THREAD_PAUSE = 0.1
# A call that takes long is looked at in these steps. The delay is that of this process if it is late by more than `MAX_LAG` at
# the end, or by more than a part of the time in all steps.
WATCH_STEP, MAX_LAG, MAX_LAG_PART = 0.5, 0.1, 0.1
# The number of timers from which cancelled ones are removed.
MOST_TIMERS = 1000
# Timers on an event loop that run for at least a second share one for each 50 ms.
LONG, STEP = 1.0, 0.05


# The process, or the machine, has no file descriptors or memory for a connection.
USED_UP = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# The errors of connecting that say that a server is away. The negative ones are those of a name that is not found. Every other
# one, known or not, may be that of this process.
AWAY = frozenset(
    (
        *(errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT),
        *(socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)),
    )
)
# The time for which an error of `USED_UP` makes others doubtful, in seconds.
USED_UP_FOR = 5.0
# A process that cannot open so many at a time has none left.
FEW_DESCRIPTORS = 8
_used_up_at = -USED_UP_FOR


def is_used_up() -> bool:
    """True if this process can open nothing, or could not lately, so that an error does not tell if a server is away. Clients may
    have caused it.

    The name of a server is not found either then, for example.
    """
    global _used_up_at
    now, opened = time.monotonic(), list[int]()
    try:
        # Several, as the others come and go.
        for _ in range(FEW_DESCRIPTORS):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        _used_up_at = now
    for descriptor in opened:
        os.close(descriptor)
    return now < _used_up_at + USED_UP_FOR


def says_away(numbers: Collection[int], *, is_socket_file: bool = False) -> bool:
    """True if the errors of all attempts to connect say that the server is away."""
    global _used_up_at
    if USED_UP & set(numbers):
        _used_up_at = time.monotonic()
    allowed = AWAY | {errno.ENOENT} if is_socket_file else AWAY
    return bool(numbers) and allowed.issuperset(numbers)


def numbers_of(text: str) -> list[int]:
    """Those in a text of several errors, such as `Multiple exceptions: [Errno 111] …, [Errno 24] …`."""
    return [int(number) for number in re.findall(r"\[Errno (-?\d+)\]", text)]


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that never suspends."""
    try:
        work.send(None)
    except StopIteration as end:
        value: T = end.value
        return value
    work.close()
    raise RuntimeError("an asynchronous store was used in a blocking program")


class NoThread(RuntimeError):
    """No thread could be started, such as at a limit of processes. The work is not queued, and never runs."""


def is_ending() -> bool:
    """True if the interpreter ends, and may start no threads any more."""
    return not threading.main_thread().is_alive()


class Threads:
    """Threads that are started when they are needed, and anew in a process that was forked.

    The end of the interpreter does not wait for them, as it does for those of `concurrent.futures`: one of them may wait for a
    server that never answers.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._started = 0
        # What is queued or runs.
        self._unfinished = 0

    def submit(self, work: Callable[[], T]) -> futures.Future[T]:
        """Raises :class:`NoThread`."""
        future: futures.Future[T] = futures.Future()
        with self._lock:
            if self._process != os.getpid():
                self._reset()
            if self._unfinished >= self._started < self._most:
                try:
                    threading.Thread(target=self._run, args=(self._queue,), name=self._name, daemon=True).start()
                    self._started += 1
                except RuntimeError as error:
                    if not self._started:
                        raise NoThread("this process can start no thread") from error
            self._unfinished += 1
            self._queue.put((future, work))
        return future

    def _run(self, own: queue.SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]]]) -> None:
        while True:
            self._run_one(*own.get())

    def _run_one(self, future: futures.Future[Any], work: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            self._finished()
            return
        try:
            result = work()
        except BaseException as error:
            self._finished()
            future.set_exception(error)
        else:
            self._finished()
            future.set_result(result)

    def _finished(self) -> None:
        with self._lock:
            self._unfinished -= 1


class Call:
    """A call of the store that is under way. The store finds it in :data:`CALL`."""

    __slots__ = ("_lag", "_max_lag", "abort", "is_own_delay", "is_waiting")

    def __init__(self, seconds: float = 0) -> None:
        self._lag, self._max_lag = 0.0, max(MAX_LAG, seconds * MAX_LAG_PART)
        self.is_waiting = False
        """True while it waits for a thread of this process, or for a connection of a pool that others use."""
        self.is_own_delay = False
        """True if this process was late, or if the call has waited in it: it did not have its whole time."""
        self.abort: Callable[[], None] | None = None
        """Ends the command of a call that is given up, if that is not done by its cancellation."""

    def begins(self, asked_at: float) -> None:
        """It has waited in this process since then."""
        self.is_waiting = False
        self.look(asked_at, is_last=True)

    def look(self, due: float, *, is_last: bool) -> None:
        """Called when something should have happened at `due`."""
        late = max(0.0, time.monotonic() - due)
        self._lag += late
        if self._lag > self._max_lag or (is_last and late > MAX_LAG):
            self.is_own_delay = True

    def give_up(self) -> None:
        self.is_own_delay = self.is_own_delay or self.is_waiting
        abort = self.abort
        if abort is not None:
            abort()


CALL: contextvars.ContextVar[Call | None] = contextvars.ContextVar("oncegate_call", default=None)


def _prepared(work: Work[T], call: Call) -> Callable[[], T]:
    """The work for a thread."""
    context, asked_at = contextvars.copy_context(), time.monotonic()
    context.run(CALL.set, call)
    call.is_waiting = True

    def run() -> T:
        call.begins(asked_at)
        return run_blocking(work())

    return lambda: context.run(run)


class Event(Protocol):
    def set(self) -> None: ...

    async def wait(self, timeout: float) -> None: ...


class Handle(Protocol):
    def cancel(self) -> Any: ...


class Runtime(Protocol):
    async def call(self, work: Work[T], timeout: float, *, in_thread: bool, call: Call | None = None) -> T:
        """Runs one call of the store. Raises TimeoutError or :class:`NoThread`."""

    async def each(self, works: list[Work[T]]) -> list[T]:
        """Runs them at the same time."""

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


def _retrieve(task: asyncio.Future[Any]) -> None:
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
    """What `asyncio.timeout` does, by a long timer: the block raises TimeoutError if it takes longer.

    A `call` gets to know if the event loop was late meanwhile.
    """

    __slots__ = ("_call", "_cancelling", "_due", "_is_over", "_task", "_timer", "_until")

    def __init__(self, seconds: float, call: Call | None = None) -> None:
        self._until, self._is_over, self._call = time.monotonic() + seconds, False, call

    def __enter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._set()

    def _set(self) -> None:
        now = time.monotonic()
        self._due = self._until if self._call is None else min(self._until, now + LONG)
        self._timer = long_timers().later(max(0.0, self._due - now), self._end)

    def _look(self) -> None:
        if self._call is not None:
            self._call.look(self._due + STEP, is_last=self._due == self._until)

    def _end(self) -> None:
        self._look()
        if time.monotonic() < self._until:
            self._set()
            return
        self._is_over = True
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: Any) -> None:
        self._timer.cancel()
        self._look()
        if self._is_over and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error


class LoopRuntime:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        # Not those of the loop, which the application uses, too: its work would look like a store that does not answer.
        self._threads = Threads(STORE_THREADS, "oncegate")
        self._bodies = Threads(BODY_THREADS, "oncegate-bodies")

    async def call(self, work: Work[T], timeout: float, *, in_thread: bool, call: Call | None = None) -> T:
        call = call or Call(timeout)
        waited: asyncio.Future[T]
        if in_thread:
            waited = asyncio.wrap_future(self._threads.submit(_prepared(work, call)))
        else:
            context = contextvars.copy_context()
            context.run(CALL.set, call)
            waited = self.spawn(work(), context)
        waited.add_done_callback(_retrieve)
        until = time.monotonic() + timeout
        while not waited.done():
            due = min(until, time.monotonic() + WATCH_STEP)
            # A driver may take seconds to cancel its command, if its server does not answer. Nobody waits for that.
            await asyncio.wait({waited}, timeout=max(0.0, due - time.monotonic()))
            call.look(due, is_last=due == until)
            if not waited.done() and time.monotonic() >= until:
                call.give_up()
                waited.cancel()
                raise TimeoutError
        return waited.result()

    async def each(self, works: list[Work[T]]) -> list[T]:
        return await asyncio.gather(*(work() for work in works))

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def offload(self, work: Callable[[], T]) -> T:
        context = contextvars.copy_context()
        try:
            future = self._bodies.submit(lambda: context.run(work))
        except NoThread:
            return work()
        return await asyncio.wrap_future(future)

    def spawn(self, work: Coroutine[Any, Any, T], context: contextvars.Context | None = None) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, context=context)
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
    __slots__ = ("work",)

    def __init__(self, work: Work[Any]) -> None:
        self.work: Work[Any] | None = work

    @property
    def is_cancelled(self) -> bool:
        return self.work is None

    def cancel(self) -> None:
        # It stays in the heap until it is due, and its work must not.
        self.work = None


class ThreadRuntime:
    """Threads that are started when they are needed, and anew in a process that was forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads = Threads(STORE_THREADS, "oncegate")
        # Work in the background waits for calls of the store, so that it must not take their threads.
        self._background = Threads(STORE_THREADS, "oncegate-background")
        self._is_warned = False
        self._reset()

    def _reset(self) -> None:
        self._process = os.getpid()
        self._wakes = threading.Condition(threading.Lock())
        self._timers: list[tuple[float, int, _TimerHandle]] = []
        self._most_timers = MOST_TIMERS
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None

    async def call(self, work: Work[T], timeout: float, *, in_thread: bool, call: Call | None = None) -> T:
        if not in_thread:
            return run_blocking(work())
        call = call or Call(timeout)
        try:
            future = self._threads.submit(_prepared(work, call))
        except NoThread:
            if not is_ending():
                raise
            return run_blocking(work())
        until = time.monotonic() + timeout
        while not future.done():
            due = min(until, time.monotonic() + WATCH_STEP)
            futures.wait({future}, max(0.0, due - time.monotonic()))
            call.look(due, is_last=due == until)
            if not future.done() and time.monotonic() >= until:
                call.give_up()
                future.cancel()
                raise TimeoutError
        return future.result()

    async def each(self, works: list[Work[T]]) -> list[T]:
        waited: list[futures.Future[T]] = []
        for work in works:
            try:
                waited.append(self._background.submit(lambda own=work: run_blocking(own())))  # type: ignore[misc]
            except NoThread:
                waited.append(futures.Future())
                waited[-1].set_result(run_blocking(work()))
        return [future.result() for future in waited]

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251  (this runtime blocks)

    async def offload(self, work: Callable[[], T]) -> T:
        return work()

    def later(self, seconds: float, work: Work[Any]) -> Handle:
        with self._lock:
            if self._process != os.getpid():
                self._reset()
        handle = _TimerHandle(work)
        with self._wakes:
            if len(self._timers) >= self._most_timers:
                # Those of attempts that have ended would stay until a third of their leases is over.
                self._timers = [timer for timer in self._timers if not timer[2].is_cancelled]
                heapq.heapify(self._timers)
                self._most_timers = max(MOST_TIMERS, 2 * len(self._timers))
            heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), handle))
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._tick, name="oncegate-timers", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:
                    # The next timer tries again.
                    self._warn()
            elif self._timers[0][2] is handle:
                self._wakes.notify()
        return handle

    def _warn(self) -> None:
        if not (self._is_warned or is_ending()):
            self._is_warned = True
            log.error("this process can start no thread: leases are renewed late, and ends are stored late")

    def _tick(self) -> None:
        while True:
            with self._wakes:
                while not self._timers or self._timers[0][0] > time.monotonic():
                    self._wakes.wait(self._timers[0][0] - time.monotonic() if self._timers else None)
                _, _, handle = heapq.heappop(self._timers)
            work = handle.work
            if work is not None:
                try:
                    self._background.submit(lambda own=work: _logged(own))  # type: ignore[misc]
                except NoThread:
                    if is_ending():
                        return
                    self._warn()
                    with self._wakes:
                        again_at = time.monotonic() + NO_THREAD_PAUSE
                        heapq.heappush(self._timers, (again_at, next(self._numbers), handle))
            # This thread keeps nothing while it waits for the next one.
            del handle, work

    def event(self) -> Event:
        return _ThreadEvent()


def _logged(work: Work[Any]) -> None:
    try:
        run_blocking(work())
    except Exception:
        log.exception("work in the background failed")
