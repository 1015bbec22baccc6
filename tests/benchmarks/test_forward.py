"""Every forward mode on every kernel that this machine runs: judged always, timed on a GPU in named scenarios."""

from dataclasses import replace
from typing import Any

import pytest

from lab.checks import ForwardCase
from lab.metadata import ForwardMode
from lab.timing import Ceilings, Method
from lab.timing.forward import TimedCase
from tests.benchmarks.conftest import HAS_GPU, Timer

# One small pass per mode, with a window and sinks, at lengths around a page's edge.
JUDGED = {
    "decode": ForwardCase(ForwardMode.DECODE, "tiny", (31, 32, 75), (1, 1, 1), page_size=32),
    "draft_decode": ForwardCase(ForwardMode.DECODE, "tiny", (30, 31, 75), (1, 1, 1), draft_step=1, page_size=32),
    "target_verify": ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (29, 0, 75), (4, 4, 4), page_size=32),
    "draft_extend_v1": ForwardCase(ForwardMode.DRAFT_EXTEND, "tiny", (29, 0, 75), (1, 4, 3), page_size=32),
    "draft_extend_v2": ForwardCase(ForwardMode.DRAFT_EXTEND_V2, "tiny", (28, 0, 75), (4, 4, 4), page_size=32),
    "extend": ForwardCase(ForwardMode.EXTEND, "tiny", (10, 0, 32), (23, 1, 40), page_size=32),
    "mixed": ForwardCase(ForwardMode.MIXED, "tiny", (10, 30, 63), (33, 1, 1), page_size=32),
}


@pytest.mark.parametrize("sliding_window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("mode", JUDGED)
@pytest.mark.usefixtures("benchmark")
def test_judged(mode: str, sliding_window: bool, implementation_module: Any, judge: Any) -> None:
    case = replace(JUDGED[mode], sliding_window=sliding_window)
    if HAS_GPU and implementation_module.__name__ != "lab.kernels.portable":
        case = replace(case, geometry="gpt-oss-120b", page_size=64)  # few others have a kernel for heads of 16
    judge(implementation_module, case)


def test_timed(
    scenario_name: str,
    case: TimedCase,
    implementation: str,
    timed_in_turns: Timer,
    method: Method,
    ceilings: Ceilings,
    gpu_benchmark: Any,
) -> None:
    time, facts = timed_in_turns(scenario_name, case, method, implementation)
    gpu_benchmark(time, ceilings, {"scenario": scenario_name} | facts)
