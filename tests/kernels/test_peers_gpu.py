"""Other people's kernels on a GPU, by the judge's own bound: eager, in a CUDA graph, and before and after they were timed.

Skipped where a package is missing.
"""

from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.gpus import capability_of
from lab.kernels import PlannedOnce, prepare
from lab.kernels.peers import flash_attention_4, flash_mla, flashinfer_paged, flex_attention, sglang_triton, vllm_triton
from lab.kernels.support import modules_of, why_not
from lab.kernels.support.peers import FA2_PAGED, FA3_PAGED, FLASH_ATTENTION_4, FLASH_MLA
from lab.references import assert_close_to_reference
from lab.timing import method_named
from lab.timing.forward import DeclinedError, time_forward
from lab.workloads import scenario
from tests.cases import Arguments
from tests.devices import ON_GPU, graph_of
from tests.kernels.adapter_calls import function_of, posed
from tests.kernels.held import on
from tests.kernels.test_flash_mla import RIGHT as RIGHT_FLASH_MLA
from tests.kernels.test_peers import RIGHT

pytestmark = [*ON_GPU, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
KERNELS = {
    flashinfer_paged.fa2: FA2_PAGED,
    flashinfer_paged.fa3: FA3_PAGED,
    flash_attention_4: FLASH_ATTENTION_4,
    flash_mla: FLASH_MLA,
}
CASES = {
    **{name: (module, case) for name, (module, _, _, case) in RIGHT.items() if module in KERNELS},
    **{f"FlashMLA, {name}": (flash_mla, case) for name, case in RIGHT_FLASH_MLA.items()},
}


def skip_unless_it_runs(implementation: Any, arguments: Arguments) -> None:
    capability = capability_of(torch.device("cuda"))
    missing = modules_of(AttentionCall(function_of(arguments)), capability)[implementation.__name__]
    reason = missing or why_not(KERNELS[implementation], capability, posed(arguments))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("name", CASES)
def test_it_is_right_eager_and_in_a_graph(name: str) -> None:
    implementation, case = CASES[name]
    arguments = {argument: on("cuda", value) for argument, value in case().items()}
    skip_unless_it_runs(implementation, arguments)
    try:
        ready = prepare(PlannedOnce(implementation), function_of(arguments), **arguments)
        result = ready()
    except FileNotFoundError as error:  # a FlashInfer without its sources compiles nothing
        pytest.skip(f"FlashInfer has no such module here: {error}")
    assert_close_to_reference(result, **arguments)
    graph = graph_of(ready)
    arguments["query"].copy_(-arguments["query"].float())
    for each in result if isinstance(result, tuple) else (result,):
        each.fill_(float("nan"))
    graph.replay()
    assert_close_to_reference(result, **arguments)


# Right before and after they were timed.

PACKAGES = {sglang_triton: "sglang", vllm_triton: "vllm", flex_attention: "torch"}
SCENARIOS = (
    "decode/llama-3.1-8b/3q1s300",
    "decode/llama-3.1-8b/70q1s100/page16",
    "decode/gpt-oss-120b/3q1s300/window",
    "target_verify/llama-3.1-8b/3q4s300",
    "draft_extend/llama-3.1-8b/2q1s300_2q3s200",
    "extend/llama-3.1-8b/2q300s700_q40",
    "extend/llama-3.1-8b/2q40s300",
    "extend/gpt-oss-120b/2q300/window",
    "mixed/llama-3.1-8b/q200s300_5q1s400",
)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("module", PACKAGES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_pass_is_right_before_and_after_it_was_timed(module: ModuleType, name: str) -> None:
    package = PACKAGES[module]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    case, method = scenario(name), method_named("graph", "warm")
    if module is flex_attention and "gpt-oss" in name:
        with pytest.raises(DeclinedError, match="has no sinks"):
            time_forward(case, module, method)
        return
    time, facts = time_forward(case, module, method)
    assert time.median_us > 0
    assert ("plan_us" in facts) == (module is not vllm_triton)
