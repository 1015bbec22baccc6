"""What the copy of the lengths to the host costs a decode loop (SGLang's PR 26824), read from a profile.

    python -m lab.experiments.length_copy --out length_copy.json
    python -m lab.experiments.length_copy --gpu-us 500 1000 2000 --host-us 0 200 --out length_copy.json

A loop of target-verify steps stands for SGLang's. Each step spins for the scheduler's time on the host, builds the step's
metadata on the device without reading it, replays a CUDA graph of matrix products that lasts as long as asked, and adds the
accepted tokens to the lengths on the device. One arm then copies the lengths to the host and waits for them, as SGLang does
before the next step if a backend needs them there; the other goes on. Nothing else differs: the lengths that were copied are
not used. The arms take turns, each run is profiled, and its first steps are left out.

What the table says, per step, as medians over steps:

    synchronisations  CUDA calls that wait for the GPU, and blocking copies
    blocked           host time inside them
    other calls       host time inside all other CUDA calls; long ones mean that the driver's queue was full
    gap               GPU: from the end of the step before to this step's start, 0 if they overlap
    idle              GPU: time in which nothing ran, from the end of the step before to the end of this one
    step              GPU: from the end of the step before to the end of this one

CUPTI and the annotations make the host slower, by a microsecond or so a launch. So the same loop is also timed without a
profile, by the host's clock over all steps of a run.

The masks of target verify belong to the same change: the size of each form and the GPU time of filling it are measured too.
Exit status: 2 without a GPU.
"""

import argparse
import enum
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lab.experiments.recording import NO_GPU, Columns, Recording, gpu_is_here, table_of
from lab.experiments.stand_in import MatrixProducts, VerifyRequests
from lab.metadata.engine.host_mirrors import LengthMirror
from lab.metadata.mha.metadata import build_mha_metadata
from lab.metadata.speculation.verify_mask import VerifyMask, VerifyMaskForm, fill_verify_mask, preallocate_verify_mask
from lab.timing.gpu_time import measure
from lab.timing.method import L2, Clock, Method
from lab.timing.step_profile import (
    TIMELINE_STEPS,
    LoopProfile,
    StepFacts,
    profiled,
    step_facts,
    summary,
    timeline,
    unprofiled_us,
)
from lab.timing.work import GpuWork

METHOD = (
    "torch.profiler (CUPTI), CPU and CUDA activities; GPU work belongs to the step whose launch has its correlation id; "
    "medians over the steps of all runs, the arms' runs in turns"
)
GRAPH_CLOCK = Method(Clock.GRAPH, L2.WARM)
# The worked case of the verify mask.
MASK_SIZES: Mapping[str, Any] = {"max_batch_size": 256, "num_draft_tokens": 4, "max_context_len": 131072}


class Arm(enum.Enum):
    """What one step of the loop ends with."""

    WITH_COPY = "with the copy"
    WITHOUT_COPY = "without the copy"

    def __repr__(self) -> str:
        return f"Arm.{self.name}"


@dataclass(frozen=True)
class LoopSettings:
    """A decode loop, and how often it is run.

    Attributes:
        gpu_us: GPU time of the stand-in for the model's forward pass, one step; met to within one matrix product.
        host_us: host time of the stand-in for the scheduler, one step.
        batch_size, num_draft_tokens, seq_len, page_size: requests, query rows of each, their tokens at the start, tokens
            per page.
        warm_up_steps, steps: of one run; the first are not counted. So few that the driver's queue of about a thousand
            launches holds them: an arm without a copy runs ahead of the GPU.
        repeats: runs of each arm.

    Raises:
        ValueError: a size is too small.
    """

    gpu_us: float
    host_us: float
    batch_size: int = 64
    num_draft_tokens: int = 4
    seq_len: int = 4096
    page_size: int = 64
    warm_up_steps: int = 5
    steps: int = 15
    repeats: int = 5

    def __post_init__(self) -> None:
        least: Mapping[str, float] = {each.name: 1 for each in fields(self)} | {"host_us": 0, "steps": TIMELINE_STEPS}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {bound}")

    @property
    def steps_per_run(self) -> int:
        return self.warm_up_steps + self.steps


class DecodeLoop:
    """A loop of target-verify steps, ready to be run many times from the same lengths.

    Args:
        settings: the loop.
        forward: launches what stands for the model's forward pass.
        device: where lengths, request table and metadata are.
    """

    def __init__(self, settings: LoopSettings, forward: Callable[[], object], device: torch.device) -> None:
        longest = settings.seq_len + (settings.steps_per_run + 1) * settings.num_draft_tokens
        self.settings = settings
        self.forward = forward
        self.requests = VerifyRequests(
            batch_size=settings.batch_size,
            num_draft_tokens=settings.num_draft_tokens,
            seq_len=settings.seq_len,
            longest=longest,
            page_size=settings.page_size,
            max_context_len=longest,
            generator=torch.Generator().manual_seed(0),
            device=device,
        )
        self.mirror = LengthMirror(settings.batch_size, device)

    def run(self, arm: Arm) -> None:
        """Launch all steps of one run, each in a range "step N". The GPU may still be at work afterwards."""
        seq_lens = self.requests.first_seq_lens
        for number in range(self.settings.steps_per_run):
            with record_function(f"step {number}"):
                seq_lens = self._step(seq_lens, arm)

    def _step(self, seq_lens: Tensor, arm: Arm) -> Tensor:
        with record_function("schedule"):
            _spin(self.settings.host_us)
        with record_function("metadata"):
            build_mha_metadata(self.requests.batch(seq_lens), self.requests.pool)
        with record_function("forward"):
            self.forward()
            seq_lens = seq_lens + self.requests.accepted
        if arm is Arm.WITH_COPY:
            with record_function("copy lengths"):
                self.mirror.read(seq_lens)
        return seq_lens


def _spin(duration_us: float) -> None:
    end_ns = time.perf_counter_ns() + 1000 * duration_us
    while time.perf_counter_ns() < end_ns:
        pass


def measure_arms(settings: LoopSettings) -> list[dict[str, Any]]:
    """Both arms of a loop on this GPU, their runs in turns, JSON-ready.

    Raises:
        IncompleteProfileError: a profile lacks what the figures are made of.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    forward = MatrixProducts(settings.gpu_us, device)
    loop = DecodeLoop(settings, forward.graph.replay, device)
    first = settings.warm_up_steps
    unprofiled: dict[Arm, list[float]] = {arm: [] for arm in Arm}
    profiles: dict[Arm, list[LoopProfile]] = {arm: [] for arm in Arm}
    for arm in Arm:
        loop.run(arm)
    for _ in range(settings.repeats):
        for arm in Arm:
            unprofiled[arm].append(unprofiled_us(partial(loop.run, arm)) / settings.steps_per_run)
            profiles[arm].append(profiled(partial(loop.run, arm)))
    return [
        {
            "arm": arm.value,
            **asdict(settings),
            "matrix_products": forward.products,
            **_recorded([step_facts(each, first) for each in profiles[arm]]),
            "unprofiled_step_us": [round(value, 3) for value in unprofiled[arm]],
            "timeline": timeline(profiles[arm][-1], first + settings.steps // 2 - TIMELINE_STEPS // 2),
        }
        for arm in Arm
    ]


def _recorded(runs: Sequence[Sequence[StepFacts]]) -> dict[str, Any]:
    return {
        "medians": summary([each for run in runs for each in run]),
        "runs": [[asdict(each) for each in run] for run in runs],
    }


def measure_masks(device: torch.device) -> list[dict[str, Any]]:
    """The size of each form of the verify mask, and the GPU time of filling it for the largest batch, JSON-ready."""
    return [_measured_mask(form, device) for form in VerifyMaskForm]


def _measured_mask(form: VerifyMaskForm, device: torch.device) -> dict[str, Any]:
    mask = preallocate_verify_mask(form, **MASK_SIZES, device=device)
    assert mask is not None
    fill = GpuWork.of(fill_verify_mask, mask.nbytes, mask=mask, batch_size=mask.max_batch_size)
    filled = measure(replace(fill, check=_check_filled), GRAPH_CLOCK)
    return {
        "form": form.value,
        **MASK_SIZES,
        "mask_bytes": mask.nbytes,
        "fill_us": round(filled.median_us, 3),
        "fill_iqr_us": round(filled.iqr_us, 3),
        "method": str(filled.method),
        "device": filled.device.facts(),
    }


def _check_filled(arguments: Mapping[str, Any]) -> None:
    mask: VerifyMask = arguments["mask"]
    assert bool(mask.buffer.all()), "the mask was not filled"
    mask.buffer.zero_()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.length_copy", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--gpu-us", type=float, nargs="+", default=[500.0, 2000.0], help="GPU time of a step")
    parser.add_argument("--host-us", type=float, nargs="+", default=[200.0], help="the scheduler's time of a step")
    for name in ("batch_size", "seq_len", "warm_up_steps", "steps", "repeats"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(LoopSettings, name))
    parser.add_argument("--out", type=Path, help="also write a JSON file")
    given = vars(parser.parse_args(argv))
    out, gpu_times, host_times = given.pop("out"), given.pop("gpu_us"), given.pop("host_us")
    try:
        loops = [LoopSettings(gpu_us, host_us, **given) for gpu_us in gpu_times for host_us in host_times]
    except ValueError as error:
        parser.error(str(error))
    if not gpu_is_here():
        return NO_GPU
    recording = Recording(out, {"method": METHOD}, ("arms", "verify_masks"))
    recording.measure(loops, lambda settings: {"arms": measure_arms(settings)}, "loops")
    recording.measure([torch.device("cuda")], lambda device: {"verify_masks": measure_masks(device)}, "masks")
    _print(recording)
    return recording.exit_status


# Column header, what it shows of an arm.
ARM_COLUMNS: Columns = {
    "GPU work, µs": lambda row: f"{row['gpu_us']:,.0f}",
    "host work, µs": lambda row: f"{row['host_us']:,.0f}",
    "arm": lambda row: str(row["arm"]),
    "synchronisations": lambda row: f"{row['medians']['synchronisations']:g}",
    "blocked, µs": lambda row: f"{row['medians']['blocked_us']:,.1f}",
    "other calls, µs": lambda row: f"{row['medians']['other_calls_us']:,.1f}",
    "gap, µs": lambda row: f"{row['medians']['gap_us']:,.1f}",
    "idle, µs": lambda row: f"{row['medians']['idle_us']:,.1f}",
    "idle, %": lambda row: f"{row['medians']['idle_percent']:.1f}",
    "step, µs": lambda row: f"{row['medians']['step_us']:,.1f}",
    "step unprofiled, µs": lambda row: f"{statistics.median(row['unprofiled_step_us']):,.1f}",
}
MASK_COLUMNS: Columns = {
    "verify mask": lambda row: str(row["form"]),
    "bytes": lambda row: f"{row['mask_bytes']:,}",
    "fill, µs": lambda row: f"{row['fill_us']:,.2f}",
}


def _print(recording: Recording) -> None:
    words = ("arm", "verify mask")
    recording.console.print(table_of("A decode loop, per step", ARM_COLUMNS, recording.result["arms"], words=words))
    sizes = ", ".join(f"{name} {size:,}" for name, size in MASK_SIZES.items())
    title = f"The mask of target verify ({sizes})"
    recording.console.print(table_of(title, MASK_COLUMNS, recording.result["verify_masks"], words=words))


if __name__ == "__main__":
    sys.exit(main())
