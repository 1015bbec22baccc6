"""Cases in a worker process that is replaced when it crashes or does not return, so that a case costs itself alone."""

import functools
import importlib
import multiprocessing
import os
import tempfile
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from lab.checks.catalogue import checks
from lab.checks.check import Check
from lab.checks.trial import Declined, Trial
from lab.checks.verdicts import Judged, Outcome

LOST_CONTEXT = 70  # exit status of a worker whose CUDA context is lost
SHOWN_CHARACTERS = 1000


def load(name: str) -> Any:
    """The implementation of that name: "package.module", or "package.module:attribute".

    Raises:
        ImportError, AttributeError: there is none.
    """
    module, _, attribute = name.partition(":")
    loaded = importlib.import_module(module)
    return functools.reduce(getattr, filter(None, attribute.split(".")), loaded)


class Isolation:
    """Judges cases one after another: here, or in a worker process if the implementation is given by name.

    A worker that crashes, loses its CUDA context or passes the time limit is replaced, and its case is FAILED.
    """

    def __init__(self, implementation: Any, device: torch.device, time_limit_s: float) -> None:
        self.implementation, self.device, self.time_limit_s = implementation, device, time_limit_s
        self._pool: Any = None
        self._last_words: Path | None = None

    def __enter__(self) -> "Isolation":
        if isinstance(self.implementation, str):
            from pebble import ProcessPool

            descriptor, path = tempfile.mkstemp(prefix="lab-judge-")
            os.close(descriptor)
            self._last_words = Path(path)
            self._pool = ProcessPool(max_workers=1, context=multiprocessing.get_context("spawn"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._pool is not None and self._last_words is not None:
            self._pool.stop()
            self._pool.join()
            self._last_words.unlink()

    def __call__(self, check: str, case: Any) -> Judged:
        """Judge one case of the check with that key."""
        if self._pool is None:
            return run_trial(self.implementation, _check(check), case, self.device)
        from pebble import ProcessExpired

        arguments = (self.implementation, check, case, str(self.device), str(self._last_words))
        future = self._pool.schedule(_work, args=arguments, timeout=self.time_limit_s)
        try:
            result: Judged = future.result()
        except FutureTimeoutError:
            return Judged(Outcome.FAILED, (f"it did not return within {self.time_limit_s:g} s",))
        except ProcessExpired as error:
            return Judged(Outcome.FAILED, (self._epitaph(error.exitcode),))
        return result

    def _epitaph(self, exit_code: int) -> str:
        assert self._last_words is not None
        said = self._last_words.read_text()
        self._last_words.write_text("")
        return f"it crashed its process (exit status {exit_code})" + (f": {said}" if said else "")


def _work(name: str, check: str, case: Any, device: str, last_words: str) -> Judged:
    """In the worker: judge, and end the process where its CUDA context is lost, so that no later case pays for it."""
    where = torch.device(device)
    torch.set_num_threads(1)  # the cases are small: threads only wait for each other
    judged = run_trial(load(name), _check(check), case, where)
    if judged.outcome is Outcome.FAILED and where.type == "cuda":
        try:
            torch.cuda.synchronize(where)
        except RuntimeError as error:
            Path(last_words).write_text(f"{judged.wrongs[-1]}; {error}"[:SHOWN_CHARACTERS])
            os._exit(LOST_CONTEXT)
    return judged


@functools.cache
def _check(key: str) -> Check:
    return next(check for check in checks() if check.key == key)


def run_trial(implementation: Any, check: Check, case: Any, device: torch.device) -> Judged:
    """One case, here and now; whatever the implementation raises is its own."""
    trial = Trial(implementation, case, device)
    try:
        check.judge(trial)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Declined as declined:
        if not trial.wrongs:
            return Judged(Outcome.DECLINED, declines=(str(declined),))
    except (RuntimeError, TypeError, AttributeError, AssertionError, LookupError, ArithmeticError, OSError) as error:
        trial.wrong(f"it raised {type(error).__name__}: {error}"[:SHOWN_CHARACTERS])
        return Judged(Outcome.FAILED, tuple(trial.wrongs), tuple(trial.declines), trial.worst_ratio, trial.judged)
    outcome = Outcome.WRONG if trial.wrongs else Outcome.RIGHT if trial.judged else Outcome.DECLINED
    return Judged(outcome, tuple(trial.wrongs), tuple(trial.declines), trial.worst_ratio, trial.judged)
