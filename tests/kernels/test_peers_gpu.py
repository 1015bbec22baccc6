"""Other people's kernels on a GPU, eager and in a CUDA graph, by the judge's own bound; skipped where a package is missing."""

from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.gpus import capability_of
from lab.kernels import PlannedOnce, prepare
from lab.kernels.implementations import modules_of
from lab.kernels.peers import flash_attention_4, flashinfer_paged
from lab.kernels.support import why_not
from lab.kernels.support.packages import FLASH_ATTENTION_4
from lab.kernels.support.peers import FA2_PAGED, FA3_PAGED
from lab.references import assert_close_to_reference
from tests.devices import graph_of
from tests.kernels import test_flash_attention_4_adapter, test_flashinfer_paged_adapters
from tests.kernels.test_flashinfer_paged_adapters import Arguments, call_of, posed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
CASES = [
    *(
        (getattr(flashinfer_paged, name[0]), name[1], case)
        for name, (_, case) in test_flashinfer_paged_adapters.RIGHT.items()
    ),
    *((flash_attention_4, name, case) for name, case in test_flash_attention_4_adapter.RIGHT.items()),
]
KERNELS = {flashinfer_paged.fa2: FA2_PAGED, flashinfer_paged.fa3: FA3_PAGED, flash_attention_4: FLASH_ATTENTION_4}


def on_gpu(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(on_gpu(each) for each in value)
    return value.cuda() if isinstance(value, torch.Tensor) else value


def skip_unless_it_runs(implementation: Any, arguments: Arguments) -> None:
    capability = capability_of(torch.device("cuda"))
    missing = modules_of(AttentionCall(call_of(arguments)), capability)[implementation.__name__]
    reason = missing or why_not(KERNELS[implementation], capability, posed(arguments))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize(("implementation", "case"), [each[::2] for each in CASES], ids=[each[1] for each in CASES])
def test_it_is_right_eager_and_in_a_graph(implementation: Any, case: Any) -> None:
    arguments = {name: on_gpu(value) for name, value in case().items()}
    skip_unless_it_runs(implementation, arguments)
    try:
        ready = prepare(PlannedOnce(implementation), call_of(arguments), **arguments)
    except FileNotFoundError as error:  # a FlashInfer without its sources compiles nothing
        pytest.skip(f"FlashInfer has no such module here: {error}")
    result = ready()
    assert_close_to_reference(result, **arguments)
    graph = graph_of(ready)
    arguments["query"].copy_(-arguments["query"].float())
    for each in result if isinstance(result, tuple) else (result,):
        each.fill_(float("nan"))
    graph.replay()
    assert_close_to_reference(result, **arguments)
