"""Kernels that try to get a false time or verdict, each with the message that refuses it; and honest kernels that look similar.

    lab ab decode/llama-3.1-8b/8q1s1k lab.kernels.portable corpus/dishonest/timing.py:CachedByPointer
    lab judge corpus/dishonest/judging.py:PatchesPassed --only K1

`docs/evidence/trust.md` describes each defence. `tests/corpus` checks that every kernel gets the refusal that it names.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch

DECODE = "trtllm_batch_decode_with_kv_cache"


@dataclass(frozen=True)
class Refusal:
    """The expected refusal of a kernel.

    Attributes:
        said: regular expression for the sentence of the refusal.
        needs_gpu: the kernel cheats a timing, which needs a GPU.
    """

    said: str
    needs_gpu: bool


def dishonest(said: str, *, needs_gpu: bool = False) -> Callable[[type[Any]], Any]:
    """Return a decorator that makes a kernel's class an implementation with its expected refusal."""

    def made(cls: type[Any]) -> Any:
        kernel = cls()
        kernel.__name__, kernel.refusal = cls.__name__, Refusal(said, needs_gpu)
        return kernel

    return made


def kernels(module: Any) -> list[Any]:
    return [each for each in vars(module).values() if isinstance(getattr(each, "refusal", None), Refusal)]


def zeros(query: torch.Tensor, out: torch.Tensor | None = None, **_: Any) -> torch.Tensor:
    """Return an output of zeros, without any work."""
    return torch.zeros_like(query) if out is None else out.zero_()


def honest(**arguments: Any) -> Any:
    from lab import references

    return getattr(references, DECODE)(**arguments)


def frames(innermost: FrameType | None = None) -> Iterator[FrameType]:
    """Yield a frame (None: the current one) and the frames of its callers, the innermost first."""
    frame = innermost or sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def frame_of_worker() -> FrameType | None:
    """Return the frame of the worker's loop, which has its channel and its task; None outside a worker."""
    return next((frame for frame in frames() if "channel" in frame.f_locals), None)


def send(status: str, value: Any) -> None:
    """Send the judging process a result of the current case, through the worker's pipe. Do nothing outside a worker."""
    from pebble.common import Result, ResultStatus
    from pebble.pool.process import TaskResult

    frame = frame_of_worker()
    if frame is not None:
        result = TaskResult(frame.f_locals["task"].id, Result(ResultStatus[status], value))
        frame.f_locals["channel"].send(result)


def send_right_verdict() -> None:
    from lab.checks.run.verdicts import Judged, Outcome

    send("SUCCESS", Judged(Outcome.RIGHT, judged=1, worst_ratio=0.2))
