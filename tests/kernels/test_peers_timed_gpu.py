"""SGLang's and vLLM's Triton attention and torch's flex_attention on a GPU, right before and after they were timed."""

from importlib.util import find_spec
from types import ModuleType

import pytest

from lab.kernels.peers import flex_attention, sglang_triton, vllm_triton
from lab.timing import method_named
from lab.timing.forward import DeclinedError, time_forward
from lab.workloads import scenario
from tests.devices import ON_GPU

pytestmark = [*ON_GPU]

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
