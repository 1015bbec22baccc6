"""How much time does the copy of the lengths to the host cost a decode loop (SGLang's PR 26824), according to a profile?

    lab experiments length-copy --out length_copy.json
    lab experiments length-copy --gpu-us 500,1000,2000 --host-us 0,200 --out length_copy.json

A loop of target-verify steps stands for SGLang's. Each step spins for the scheduler's time on the host, builds the step's
metadata on the device without reading it, replays a CUDA graph of matrix products of a chosen duration, and adds the
accepted tokens to the lengths on the device. One variant then copies the lengths to the host and waits for them, as SGLang does
before the next step if a backend needs them there; the other goes on. Nothing else differs: the lengths that were copied are
not used. The variants are interleaved, each run is profiled, and its first steps are left out.

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
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lab.metadata.engine.host_mirrors import LengthMirror
from lab.metadata.mha.metadata import build_mha_metadata
from lab.metadata.speculation.verify_mask import VerifyMask, VerifyMaskForm, fill_verify_mask, preallocate_verify_mask
from lab.named_enum import NamedEnum
from lab.reports.tables import Table, number
from lab.timing.work import GpuWork
from studies.loops import METHOD, LoopSettings, LoopStudy, MatrixProducts, Steps, VerifyLoop, WarmUpSteps, facts_alone
from studies.recording import Formats, Recorded, table_of
from studies.step_profile import TIMELINE_STEPS, step_facts, summary, timeline
from studies.study import Part, times_us

# The worked case of the verify mask.
MASK_SIZES: Mapping[str, Any] = {"max_batch_size": 256, "num_draft_tokens": 4, "max_context_len": 131072}


class StepEnd(NamedEnum):
    """The two variants of the loop: how a step ends."""

    WITH_COPY = "with the copy"
    WITHOUT_COPY = "without the copy"


@dataclass(frozen=True, kw_only=True)
class CopyLoopSettings(LoopSettings):
    """The settings of a decode loop. A step's GPU time deviates from `gpu_us` by at most one matrix product."""

    gpu_us: Annotated[float, times_us("GPU time of a step", "500,2000")]
    host_us: Annotated[float, times_us("time of the scheduler on the host in a step", "200")] = field(
        metadata={"least": 0}
    )
    warm_up_steps: WarmUpSteps = 5
    steps: Steps = field(default=15, metadata={"least": TIMELINE_STEPS})


class DecodeLoop(VerifyLoop[StepEnd]):
    """A loop of target-verify steps. `forward` launches matrix products in place of the model."""

    settings: CopyLoopSettings

    def __init__(self, settings: CopyLoopSettings, forward: Callable[[], object], device: torch.device) -> None:
        super().__init__(settings, settings.longest, device)
        self.forward = forward
        self.mirror = LengthMirror(settings.batch_size, device)

    def step(self, variant: StepEnd, seq_lens: Tensor, number: int) -> Tensor:
        with record_function("schedule"):
            _spin(self.settings.host_us)
        with record_function("metadata"):
            build_mha_metadata(self.batch(seq_lens), self.pool)
        with record_function("forward"):
            self.forward()
            seq_lens = seq_lens + self.accepted
        if variant is StepEnd.WITH_COPY:
            with record_function("copy lengths"):
                self.mirror.read(seq_lens)
        return seq_lens


def _spin(duration_us: float) -> None:
    end_ns = time.perf_counter_ns() + 1000 * duration_us
    while time.perf_counter_ns() < end_ns:
        pass


def measure_ends(settings: CopyLoopSettings) -> list[dict[str, Any]]:
    """Measure both variants of a loop on this GPU, with interleaved runs. Return the recorded rows."""
    device = torch.device("cuda", torch.cuda.current_device())
    forward = MatrixProducts(settings.gpu_us, device)
    loop = DecodeLoop(settings, forward.graph.replay, device)
    for variant in StepEnd:
        loop.run(variant)
    runs = loop.measure([list(StepEnd)] * settings.repeats)
    first = settings.warm_up_steps
    return [
        {
            "arm": variant.value,
            **asdict(settings),
            "matrix_products": forward.products,
            **found.facts(partial(step_facts, first=first), summary),
            "unprofiled_step_us": found.unprofiled_us,
            "timeline": timeline(found.profiles[-1], first + settings.steps // 2 - TIMELINE_STEPS // 2),
        }
        for variant, found in runs.items()
    ]


def measure_masks(device: torch.device) -> list[dict[str, Any]]:
    """Measure each kind of verify mask: its size, and the GPU time of filling it for the largest batch."""
    rows = []
    for form in VerifyMaskForm:
        mask = preallocate_verify_mask(form, **MASK_SIZES, device=device)
        assert mask is not None
        fill = GpuWork.of(fill_verify_mask, mask.nbytes, mask=mask, batch_size=mask.max_batch_size)
        facts = facts_alone(replace(fill, check=_check_filled), "fill")
        rows.append({"form": form.value, **MASK_SIZES, "mask_bytes": mask.nbytes, **facts})
    return rows


def _check_filled(arguments: Mapping[str, Any]) -> None:
    mask: VerifyMask = arguments["mask"]
    assert bool(mask.buffer.all()), "the mask was not filled"
    mask.buffer.zero_()


VARIANT_COLUMNS: Formats = {
    "variant": "{arm}",
    "GPU work, µs": "{gpu_us:,.0f}",
    "host work, µs": "{host_us:,.0f}",
    "synchronisations": "{medians[synchronisations]:g}",
    "blocked, µs": "{medians[blocked_us]:,.1f}",
    "other calls, µs": "{medians[other_calls_us]:,.1f}",
    "gap, µs": "{medians[gap_us]:,.1f}",
    "idle, µs": "{medians[idle_us]:,.1f}",
    "idle, %": "{medians[idle_percent]:.1f}",
    "step, µs": "{medians[step_us]:,.1f}",
    "step unprofiled, µs": lambda row: number(statistics.median(row["unprofiled_step_us"]), 1),
}
MASK_COLUMNS: Formats = {"verify mask": "{form}", "bytes": "{mask_bytes:,}", "fill, µs": "{fill_us:,.2f}"}


@dataclass(frozen=True)
class LengthCopy(LoopStudy):
    """Measures decode loops, and the masks of target verify."""

    lists = ("arms", "verify_masks")
    settings = CopyLoopSettings

    @property
    def parts(self) -> Sequence[Part]:
        devices = [torch.device("cuda")]
        return [
            Part(self.loops, lambda settings: {"arms": measure_ends(settings)}, "loops"),
            Part(devices, lambda device: {"verify_masks": measure_masks(device)}, "masks"),
        ]

    def method(self) -> Mapping[str, Any]:
        return {"method": METHOD.format(part="step", steps="steps")}

    def answer(self, result: Recorded) -> Iterable[Table]:
        yield table_of("A decode loop, per step", VARIANT_COLUMNS, result["arms"])
        sizes = ", ".join(f"{name} {size:,}" for name, size in MASK_SIZES.items())
        yield table_of(f"The mask of target verify ({sizes})", MASK_COLUMNS, result["verify_masks"])
