"""Run the worker processes that judge cases. A worker that crashes or does not return is replaced: only its case is lost."""

import faulthandler
import functools
import itertools
import math
import multiprocessing.context
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_futures
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, TypeVar

import torch

from lab.checks.run import transport
from lab.checks.run.judging import Refusals, Task, judge_task, noted, without_memory
from lab.checks.run.verdicts import BROKEN, Judged, Outcome, TooLate, credible
from lab.exit_status import ENDING_SIGNALS
from lab.interpreter import quicken
from lab.loading import LoadError, load, message_of
from lab.ranges import Ranges

Answer = TypeVar("Answer")


CANNOT_BEGIN = 'no worker can begin: a script that judges in isolation needs `if __name__ == "__main__":`'
START_LIMIT_S = 60.0  # time for the start of a worker, in addition to the time limit of its first case
WATCHED_EVERY_S = 1.0
IMPORT_LIMIT_S = 600.0  # least time limit of the first import, in which a module may compile its kernels
# Most GPU memory that a worker keeps between two cases: workers share a GPU, and a long request takes 14 GiB.
MOST_KEPT_BYTES = 4 * 2**30
MOST_LAST_WORDS = 10_000  # characters
SPOILED, ENDED_WITH_0 = 70, 71  # exit statuses of a worker: it can judge no more cases; a kernel ended it with status 0
FORKS_ENDED = 255  # exit status of each worker if the process that forks all workers has ended
NOTED_AT = 0.9  # share of the time limit after which a worker records its stack
STACK = ".stack"  # suffix of the file to which it records the stack
SHOWN_FRAMES = 3  # innermost frames of this stack in the verdict
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Pending:
    """A case that was submitted for judging. Calling this object waits for the judgement and returns it."""

    result: Callable[[], Judged]  # waits for the judgement of the worker
    future: Future[Judged] | None = None  # None if the case is judged in this process, when `result` is called

    def __call__(self) -> Judged:
        return replace(credible(self.result()), alone="")  # a worker does not know whether it is the case's only one


# A generator that submits cases and keeps their verdicts. It yields each case that it must wait for.
Waits = Generator[Pending, None, None]


class Workers:
    """The processes that judge cases: worker processes if the implementation is given by name, else this process.

    A worker that crashes, loses its CUDA context or exceeds the time limit is replaced, and its case is FAILED. If Linux killed
    the worker because no memory was left, the case is judged once more, and is DECLINED by the lab if this happens again. If
    `device` is "cuda" without an index, the workers are divided among all GPUs.
    """

    def __init__(
        self,
        implementation: Any,
        device: torch.device,
        ranges: Ranges,
        time_limit_s: float,
        workers: int = 1,
        refusals: Refusals | None = None,
    ) -> None:
        self.implementation, self.device, self.ranges = implementation, device, ranges
        self.time_limit_s, self.workers, self.refusals = time_limit_s, workers, refusals
        self.is_apart = isinstance(implementation, str)  # cases run in other processes than this one
        self._pool: Any = None
        self._pool_without_kernel: Any = None
        self._begun: Any = None  # the number of workers so far, which share it
        self._pools_of_one = set[Any]()  # each judges one case
        self._has_worked, self._num_tasks = False, 0
        self._kills_before = kills_for_memory()
        self._limits_s = dict[Future[Any], float]()  # time limits of the cases that are not finished
        self._last_end, self._is_over, self._lock = 0.0, threading.Event(), threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> "Workers":
        noted()
        if self.is_apart:
            made = tempfile.TemporaryDirectory(prefix="lab-judge-", ignore_cleanup_errors=True)
            self._folder = Path(self._stack.enter_context(made))
            self._stack.enter_context(transport.guarded())
            self._stack.callback(self.stop)
            self._stack.callback(self._is_over.set)
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _new_pool(self, workers: int) -> Any:
        from pebble import ProcessPool

        context = _context()
        self._begun = self._begun or context.Value("i", 0)
        begins = (dict(os.environ), self.device, self._begun)
        return ProcessPool(workers, context=context, initializer=_begin, initargs=begins)

    def stop(self) -> None:
        """End all workers, with the cases that they are judging. The next submitted case starts new ones."""
        with self._lock:
            for pool in filter(None, (self._pool, self._pool_without_kernel, *self._pools_of_one)):
                pool.stop()
                pool.join()
            self._pool = self._pool_without_kernel = None
            self._pools_of_one.clear()

    def _watch(self) -> None:
        # Stop all workers if no case ends in time: a kernel may have damaged the pipe that they share.
        while not self._is_over.wait(WATCHED_EVERY_S):
            limits_s = dict(self._limits_s)
            if limits_s and time.monotonic() > self._last_end + max(limits_s.values()) + START_LIMIT_S:
                self.stop()
                for future in limits_s:
                    with suppress(InvalidStateError):
                        future.set_exception(BrokenProcessPool("its worker does not answer"))

    def call(self, function: Callable[[Any], Answer]) -> Answer:
        """Call `function(implementation)` in a worker, and return the result. Raises LoadError if the implementation cannot be
        imported, and ValueError if a name in `Workers.refusals` is not the name of an exception.
        """
        if not self.is_apart:
            if self.refusals:
                self.refusals.resolve()
            return function(self.implementation)
        from pebble import ProcessExpired

        name, limit_s = self.implementation, max(self.time_limit_s, IMPORT_LIMIT_S)
        future = self._schedule(_call_with, (function, name, self.refusals), limit_s)
        try:
            answer: Answer = future.result()
        except FutureTimeoutError:
            raise LoadError(f"{name} was not imported within {limit_s:g} s") from None
        except ProcessExpired as error:
            raise LoadError(f"{name} ends its process when it is imported ({_ending(error.exitcode)})") from None
        except BrokenProcessPool as error:
            raise RuntimeError(CANNOT_BEGIN) from error
        self._has_worked = True
        return answer

    def apart(self, work: Callable[..., Judged], *arguments: Any) -> Judged:
        """Run `work(*arguments)` in a process without the kernel's code. Return its judgement; FAILED if it raises an error."""
        for _ in range(2):  # a kernel may have ended the process that forks all workers
            try:
                if self._pool_without_kernel is None or not self._pool_without_kernel.active:
                    self._pool_without_kernel = self._new_pool(1)
                future = self._pool_without_kernel.schedule(work, args=arguments, timeout=IMPORT_LIMIT_S)
                return credible(future.result())
            except Exception as error:  # an output may be anything
                failed = Judged(Outcome.FAILED, (f"its output cannot be judged: {type(error).__name__}: {error}",))
        return failed

    def submit(self, check: str, case: Any, ranges: Ranges | None = None, end: float = math.inf) -> Pending:
        """Submit a case to the check with the key `check`, which may add parameter values from `ranges` (None:
        `self.ranges`). Calling the returned `Pending` raises TooLate if the case did not begin by `end` (`time.monotonic`).
        """
        task = Task(check, case, str(self.device), ranges or self.ranges, self.refusals, end)
        if not self.is_apart:
            return Pending(functools.partial(judge_task, self.implementation, task))
        arguments = self._arguments(task)
        future = self._schedule(_work, arguments)
        return Pending(functools.partial(self._result, future, arguments), future)

    def _arguments(self, task: Task) -> tuple[str, Task, float, Path]:  # of `_work`
        self._num_tasks += 1
        return self.implementation, task, self.time_limit_s, self._folder / str(self._num_tasks)

    def submit_alone(self, check: str, case: Any, ranges: Ranges, end: float) -> Pending:
        """Submit a case to a new process, which judges no other case, in the same way as `submit` does to a worker."""
        arguments = self._arguments(Task(check, case, str(self.device), ranges, self.refusals, end))
        pool = self._new_pool(1)
        self._pools_of_one.add(pool)
        future = self._watched(pool.schedule(_work, args=arguments, timeout=self.time_limit_s), self.time_limit_s)
        pool.close()  # it ends after this case

        def result() -> Judged:
            try:
                return self._result(future, arguments, attempts=1)
            finally:
                pool.join()
                self._pools_of_one.discard(pool)

        return Pending(result, future)

    def _schedule(self, work: Callable[..., Any], arguments: tuple[Any, ...], limit_s: float | None = None) -> Any:
        pool = self._pool
        if pool is None or not pool.active:  # a worker that died between two cases ended its pool
            self.stop()
            pool = self._pool = self._new_pool(self.workers)
        limit_s = limit_s or self.time_limit_s
        return self._watched(pool.schedule(work, args=arguments, timeout=limit_s), limit_s)

    def _watched(self, future: Any, limit_s: float) -> Any:
        self._last_end = self._last_end if self._limits_s else time.monotonic()
        self._limits_s[future] = limit_s
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Any) -> None:
        self._last_end = time.monotonic()
        self._limits_s.pop(future, None)

    def _result(self, future: Any, arguments: tuple[Any, Task, float, Path], attempts: int = 2) -> Judged:
        from pebble import ProcessExpired

        last_words = arguments[-1]
        try:
            result: Judged = future.result()
            self._has_worked = True
        except BrokenProcessPool as error:  # the case has not begun
            if attempts > 1:
                return self._result(self._schedule(_work, arguments), arguments, attempts - 1)
            if not self._has_worked:
                raise RuntimeError(CANNOT_BEGIN) from error
            return Judged(Outcome.FAILED, (f"its worker died before it began, or broke its pipe: {error}",))
        except FutureTimeoutError:
            return Judged(Outcome.FAILED, (f"it did not return within {self.time_limit_s:g} s{_calls_in(last_words)}",))
        except ProcessExpired as error:
            is_of_memory = error.exitcode == -signal.SIGKILL and kills_for_memory() > self._kills_before
            if (is_of_memory or error.exitcode == FORKS_ENDED) and attempts > 1:  # perhaps because of another case
                return self._result(self._schedule(_work, arguments), arguments, attempts - 1)
            if is_of_memory:
                return without_memory(signal.SIGKILL.name)
            # The kernel may have written the last words. They say why the case failed, and nothing else.
            if error.exitcode == SPOILED and last_words.is_file():
                with last_words.open(errors="replace") as words:
                    sentences = tuple(words.read(MOST_LAST_WORDS).splitlines())
                if sentences:
                    return Judged(Outcome.FAILED, sentences)
            return Judged(Outcome.FAILED, (f"it crashed its process ({_ending(error.exitcode)})",))
        except Exception as error:  # a kernel that breaks its worker may make it raise any
            is_late = isinstance(error, TooLate) and time.monotonic() > arguments[1].end
            if is_late or (isinstance(error, LoadError) and not self._has_worked):
                raise
            return Judged(Outcome.FAILED, (f"its worker could not go on: {type(error).__name__}: {error}",))
        return result


def kills_for_memory() -> int:
    """Return how many processes of this machine Linux has killed because no memory was left; 0 on another system."""
    counters = Path("/proc/vmstat")
    found = re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE) if counters.exists() else None
    return int(found.group(1)) if found else 0


def _ending(exitcode: int | None) -> str:
    if exitcode is not None and -exitcode in set(signal.Signals):
        return f"killed by signal {-exitcode}, {signal.Signals(-exitcode).name}"
    return f"exit status {0 if exitcode == ENDED_WITH_0 else exitcode}"


def _context() -> multiprocessing.context.BaseContext:
    # Its processes start fast: as forks of a process that has imported torch and not initialised CUDA.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    # The processes that are started here must ignore Ctrl-C: they end after this process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    resource_tracker.ensure_running()  # which unblocks two of the signals
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    # Start one process that needs no locks of a pool. A worker whose start Ctrl-C interrupts would not find such locks.
    first = context.Process(target=os.getpid)
    first.start()
    first.join()
    return context


def _begin(environment: dict[str, str], device: torch.device, begun: "Synchronized[int]") -> None:
    os.environ.clear()  # a fork has the environment of the time at which the first worker began
    os.environ.update(environment)
    os.dup2(2, 1)  # a kernel's output goes to stderr, because stdout is for the report
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    os.setpgid(0, 0)  # a signal that a kernel sends to its process group reaches no other process of the lab
    noted()
    # If a kernel ends its worker with status 0, the pool would wait for the case until its time limit.
    end: Any = os._exit
    os._exit = lambda status: end(status or ENDED_WITH_0)
    # A fork of this worker, made by a kernel, must not send a judgement.
    os.register_at_fork(after_in_child=functools.partial(os._exit, 1))
    torch.set_num_threads(1)  # cases are too small for several threads
    if device.type == "cuda" and device.index is None:
        _take_gpu(begun)


def _take_gpu(begun: "Synchronized[int]") -> None:
    with begun.get_lock():
        turn, begun.value = begun.value, begun.value + 1
    torch.cuda.set_device(turn % torch.cuda.device_count())


def _call_with(function: Callable[[Any], Answer], name: str, refusals: Refusals | None) -> Answer:
    implementation = load(name)
    if refusals:
        refusals.resolve()
    try:
        return function(implementation)
    except Exception as error:  # of an attribute that raises one
        raise LoadError(f"{name} cannot be judged: {type(error).__name__}: {message_of(error)}") from error


def _work(name: str, task: Task, time_limit_s: float, last_words: Path) -> Judged:
    where = torch.device(task.device)
    last_words.parent.mkdir(exist_ok=True)  # a kernel may have removed the folder
    with last_words.with_suffix(STACK).open("w") as stack, last_words.open("w") as words:
        faulthandler.dump_traceback_later(NOTED_AT * time_limit_s, file=stack)
        try:
            implementation = load(name)
            quicken()  # speed up Triton's interpreter if the kernel has imported it
            judged = judge_task(implementation, task)
        finally:
            faulthandler.cancel_dump_traceback_later()
        if judged.outcome is not Outcome.DISHONEST and (lost := _lost(judged, where)):  # a dishonest case ends the run
            words.write("\n".join((*judged.wrongs, lost)))  # for the main process
            words.flush()
            os._exit(SPOILED)
    if where.type == "cuda" and torch.cuda.memory_reserved(where) > MOST_KEPT_BYTES:
        torch.cuda.empty_cache()
    return judged


def _lost(judged: Judged, where: torch.device) -> str:
    if judged.outcome in BROKEN and where.type == "cuda":
        try:
            torch.cuda.synchronize(where)
        except RuntimeError as error:
            return f"it crashed its process, for the GPU's context is lost: {str(error).splitlines()[0]}"
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return f"it crashed its process, for no file can be opened: {error.strerror}"
    return ""


def _calls_in(last_words: Path) -> str:
    # The functions in which the worker was shortly before its time limit, from the stack that it recorded.
    path = last_words.with_suffix(STACK)
    threads = path.read_text(errors="replace").split("Thread 0x") if path.exists() else []
    frames = _FRAME.findall(threads[-1])[:SHOWN_FRAMES] if threads else []  # the main thread is the last
    chain = ", called by ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames)
    return f"; it was in {chain}" if chain else ""


def in_turns(waits_of_each: Iterable[Waits], goes_on: Callable[[], bool] = lambda: True, end: float = math.inf) -> int:
    """Advance each generator when the case that it yielded is judged: a case that takes minutes delays only its own generator.
    Stop if `goes_on` returns False, or at the time `end` of `time.monotonic`, and return the number of cases that still run.
    """
    with ExitStack() as stack:
        waiting = list[tuple[Waits, Pending]]()
        for waits in waits_of_each:
            stack.enter_context(closing(waits))
            waiting.extend((waits, pending) for pending in itertools.islice(waits, 1))
        while waiting and goes_on():
            futures = [pending.future for _, pending in waiting if pending.future is not None]
            if len(futures) == len(waiting):
                left = None if end == math.inf else max(end - time.monotonic(), 0)
                wait_for_futures(futures, left, FIRST_COMPLETED)
            ready = next(
                (at for at, (_, each) in enumerate(waiting) if each.future is None or each.future.done()), None
            )
            if ready is None:
                return sum(pending.future is not None and pending.future.running() for _, pending in waiting)
            waits, _ = waiting.pop(ready)
            waiting.extend((waits, following) for following in itertools.islice(waits, 1))
    return 0
