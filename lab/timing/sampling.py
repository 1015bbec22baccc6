"""Take samples of timed calls by a clock, and compare this clock with the host's. The host's clock measures the time between
two waits for the whole GPU, and so sees work on every stream. Functions that read time are looked up before a kernel is loaded,
which might replace them.
"""

import random
import statistics
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.timing.device_state import DeviceState

# The GPU spins about a millisecond while the host launches the timed work, so that no sample contains a wait for a launch.
LEAD_CYCLES = 2_000_000
# The largest allowed difference of the two clocks: a percentage plus a slack. The host's clock also includes launches and the
# end of the wait; the launches of a queued sample are hidden while the GPU spins.
AGREE_PERCENT = 3.0
QUEUED_SLACK_US = 25.0
IDLE_SLACK_US = 150.0
READ_EVERY = 3  # steps

CudaEvent = torch.cuda.Event
_synchronize, _now_ns = torch.cuda.synchronize, time.perf_counter_ns
_record, _elapsed_ms = CudaEvent.record, CudaEvent.elapsed_time

# The folders of code that may run in threads: Python's, the installed packages' and the lab's.
_PACKAGES = ("site-packages", "dist-packages")
_INSTALLED = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]),
)

# (before, run): a function that is called before the timed run, or None; and the timed run.
Step = tuple[Callable[[], object] | None, Callable[[], object]]


class RefusedTimeError(RuntimeError):
    """A time is refused: the hardware cannot reach it, two clocks disagree, or foreign work ran on the GPU or in a thread."""


@dataclass(frozen=True)
class Sample:
    us: float  # by the method's clock
    host_us: float | None  # by the host's clock; None if the host read the GPU's state during the sample


def between_events(steps: Iterable[Step], state: DeviceState, device_index: int, *, queued: bool) -> list[Sample]:
    """Return a sample of each step, measured by CUDA events. With `queued` the GPU spins while the host launches; otherwise a
    sample includes the host's launch time. Every third step also reads the GPU's state.
    """
    lead = partial(torch.cuda._sleep, LEAD_CYCLES) if queued else None
    samples = []
    for number, (before, run) in enumerate(steps):
        if before is not None:
            before()
        _, empty_us = _timed(None, lead)  # right before the sample: the clocks of the GPU are the same
        reading = partial(state.read, device_index) if number % READ_EVERY == 0 else None
        us, host_us = _timed(run, lead, reading)
        samples.append(Sample(us, None if reading else host_us - empty_us))
    return samples


def _timed(
    run: Callable[[], object] | None, lead: Callable[[], object] | None, meanwhile: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Call `lead`, `run`, `meanwhile` in turn. Return (µs of `run` by CUDA events, µs of all three by the host's clock)."""
    start, end = CudaEvent(enable_timing=True), CudaEvent(enable_timing=True)
    _synchronize()
    start_ns = _now_ns()
    if lead is not None:
        lead()
    _record(start)
    if run is not None:
        run()
    _record(end)
    if meanwhile is not None:
        meanwhile()
    _synchronize()
    end_ns = _now_ns()
    return _elapsed_ms(start, end) * 1000, (end_ns - start_ns) / 1000


def check_clocks(samples: Iterable[Sample], slack_us: float) -> None:
    both = [(each.us, each.host_us) for each in samples if each.host_us is not None]
    if not both:
        return
    us, host_us = (statistics.median(side) for side in zip(*both, strict=True))
    if abs(us - host_us) > AGREE_PERCENT / 100 * max(us, host_us) + slack_us:
        raise RefusedTimeError(
            f"it takes {us:,.1f} µs by the timing's clock and {host_us:,.1f} µs by the host's, between two waits for "
            f"the whole GPU: they may be {AGREE_PERCENT:g} % and {slack_us:g} µs apart. Work that the first clock does "
            "not see, such as on another stream, or a changed clock makes such a difference; the time is refused"
        )


def fresh_seed() -> int:
    return random.SystemRandom().getrandbits(62)


def refuse_foreign_threads() -> None:
    """Raise RefusedTimeError if a thread runs code from elsewhere than Python, installed packages and the lab."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = None if thread is threading.current_thread() else frames.get(thread.ident or 0)
        while frame is not None:
            file = frame.f_code.co_filename
            if not file.startswith(("<", *_INSTALLED)) and not any(part in file for part in _PACKAGES):
                raise RefusedTimeError(
                    f"a thread runs {file} while kernels are timed, and may slow others down or work ahead"
                )
            frame = frame.f_back


def driver() -> Any:
    try:
        from cuda.bindings import driver  # comes with torch's CUDA wheels
    except ImportError as error:
        raise RuntimeError("timing on a GPU needs cuda.bindings: pip install cuda-bindings") from error
    return driver
