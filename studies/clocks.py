"""What does each clock read for the same kernels, and do CUPTI and the graph clock agree?

    lab experiments clocks --out clocks.json
    lab experiments clocks lab.kernels.trtllm --scenario decode/llama-3.1-8b/64q1s4k

CUPTI and the graph clock (CUDA events around a replay) time the same replays, with warm and cold L2, so they must agree. The
exit status is 1 if they differ by more than 3 % for work of at least 20 µs per launch. Shorter work is only marked, because the
0.1 to 0.7 µs that CUPTI adds to each traced launch on an H200 exceed 3 %. The exit status is 125 if work cannot be timed.

The rows of the events clock show the time that CUDA events add to an eager call. L2 is made cold by other buffers for each call
(rotation) or by a flush. The times differ, because the flush also evicts a kernel's instructions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lab.exit_status import ExitStatus
from lab.loading import load
from lab.timing.forward import TimedPasses
from lab.timing.gpu_time import measure
from lab.timing.method import L2, METHODS, Clock, Method
from lab.timing.roofline import negation
from lab.timing.staging import TooSmallError
from lab.timing.work import GpuWork
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import build_forward
from lab.workloads.scenarios import scenario
from studies.passes import FLASHINFER_MODULE, PORTABLE_MODULE
from studies.recording import Recorded
from studies.study import Modules, Part, Scenarios, Study

MOST_APART_PERCENT = 3.0
SHORT_US_PER_LAUNCH = 20.0
JUDGED = (L2.WARM, L2.COLD_ROTATION)
NEGATION_BYTES = (2**15, 2**23, 2**27, 2**31)
SCENARIOS = (
    "decode/llama-3.1-8b/8q1s1k",
    "decode/llama-3.1-8b/64q1s4k",
    "target_verify/llama-3.1-8b/64q4s4k",
    "draft_extend_v2/llama-3.1-8b/64q4s4k/on_context",
    "extend/llama-3.1-8b/2q1k",
)


@dataclass(frozen=True, kw_only=True)
class Clocks(Study):
    """Times the forward passes of scenarios and torch's negation by every clock."""

    lists = ("rows_us", "not_timed")

    implementations: Modules = (FLASHINFER_MODULE, PORTABLE_MODULE)
    scenario: Scenarios = SCENARIOS

    @property
    def modules(self) -> tuple[str, ...]:
        return self.implementations

    @property
    def parts(self) -> Sequence[Part]:
        cases = [(name, scenario(name)) for name in self.scenario]
        return Part(NEGATION_BYTES, _negation_row, "negations"), Part(cases, self._pass_rows, "passes")

    def facts(self) -> Mapping[str, Any]:
        return {"methods": {key_of(method): str(method) for method in METHODS}}

    def exit_status(self, result: Recorded) -> ExitStatus:
        if any(are_apart(row) for row in result["rows_us"]):
            return ExitStatus.WRONG
        return ExitStatus.NOT_JUDGED if result["not_timed"] else ExitStatus.DONE

    def _pass_rows(self, named: tuple[str, ForwardCase]) -> dict[str, list[Any]]:
        name, case = named
        passes = TimedPasses.over(build_forward(case, torch.device("cuda")))
        found: dict[str, list[Any]] = {"rows_us": [], "not_timed": []}
        for module in self.implementations:
            try:
                row = row_of(f"{name}, {module}", passes.work(load(module)))
                found["rows_us"].append(row)
            except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
                found["not_timed"].append(f"{name}, {module}: {type(error).__name__}: {error}")
                print(found["not_timed"][-1], flush=True)
        return found


def _negation_row(size_bytes: int) -> dict[str, list[Any]]:
    return {"rows_us": [row_of(f"negation, {size_bytes:,} bytes", negation(size_bytes, torch.device("cuda")))]}


def row_of(name: str, work: GpuWork) -> dict[str, Any]:
    """Measure the median time of a call in µs by every method that can time it. Print and return the medians."""
    row: dict[str, Any] = {"work": name}
    for method in METHODS:
        try:
            time = measure(work, method)
            row[key_of(method)], row["launches"] = round(time.median_us, 3), time.launches
        except TooSmallError as reason:
            row[key_of(method)], row["not_rotated"] = None, str(reason)
    for l2 in JUDGED:
        row[f"cupti over graph, {l2.value}, percent"] = apart_percent(row, l2)
    row["long_enough_to_judge"] = is_long_enough(row)
    print("  ".join(f"{key}: {value}" for key, value in row.items() if key != "not_rotated"), flush=True)
    return row


def key_of(method: Method) -> str:
    return f"{method.clock.value} {method.l2.value}"


def apart_percent(row: dict[str, Any], l2: L2) -> float | None:
    """Return CUPTI's median over the graph clock's, minus 1, in percent; None if a time is missing."""
    graph_us, cupti_us = row[key_of(Method(Clock.GRAPH, l2))], row[key_of(Method(Clock.CUPTI, l2))]
    return None if graph_us is None or cupti_us is None else round(100 * (cupti_us / graph_us - 1), 2)


def is_long_enough(row: dict[str, Any]) -> bool:
    return bool(row[key_of(Method(Clock.GRAPH, L2.WARM))] >= SHORT_US_PER_LAUNCH * row["launches"])


def are_apart(row: dict[str, Any]) -> bool:
    shares = [apart_percent(row, l2) for l2 in JUDGED]
    return is_long_enough(row) and any(share is not None and abs(share) > MOST_APART_PERCENT for share in shares)
