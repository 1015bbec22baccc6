"""What the FlashInfer adapter costs on a GPU: at most 2 µs of host time over FlashInfer's own call, and no GPU work."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType

from lab import references
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.kernels import flashinfer_call, trtllm
from lab.metadata.engine.capture import capturing
from lab.timing.host_time import host_time
from tests.cases import CONTEXT, DECODE, Arguments
from tests.kernels.adapter_calls import case, into
from tests.kernels.held import on

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a CUDA GPU of SM90, on which FlashInfer runs XQA and fmha_v2",
    ),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times the host, which other workers use meanwhile"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FlashInfer's, of CUTLASS, at its import
]

MOST_ADDED_US = 2.0
LLAMA: Arguments = {"heads": (32, 8), "head_dim": 128, "page_size": 64, "bmm1_scale": 128**-0.5}  # 3.1 8B
KV_LENS = (64, 64)  # so little that the GPU keeps up with the host
BF16_BOUND = 4 * 2.0**-8  # weights and output rounded once, each at most one unit roundoff of its vector, times two


def posed(function: str, q_len: Any, **changes: Any) -> Arguments:
    """Everything given that the adapter would make, so that FlashInfer's own function takes the same arguments."""
    workspace = torch.zeros(SEMAPHORE_BYTES + flashinfer_call.SCRATCH_BYTES, dtype=torch.uint8)
    arguments = case(function, q_len, KV_LENS, into(), **LLAMA, workspace_buffer=workspace, **changes)
    return {name: on("cuda", value) for name, value in arguments.items()}


def decode_arguments(q_len: int) -> Arguments:
    arguments = posed(DECODE, q_len)
    mask = trtllm.causal_mask(len(KV_LENS), q_len, arguments["query"].device) if q_len > 1 else None
    return arguments | {"mask": mask}


def context_calls() -> dict[str, Arguments]:
    """Prompts of the whole lengths, the same K/V and pages in the three forms that the adapter hands to fmha_v2."""
    arguments = posed(CONTEXT, KV_LENS, kv_layout="NHD")
    halves, ids = torch.stack(arguments["kv_cache"]), arguments["block_tables"]
    return {
        "halves": arguments | {"kv_cache": (halves[0], halves[1])},
        "stacked": arguments | {"kv_cache": halves.transpose(0, 1).contiguous()},
        "expanded table": arguments
        | {
            "kv_cache": (halves.flatten(0, 1),) * 2,
            "block_tables": torch.stack((ids, ids + halves.shape[1]), dim=1),
            "uses_shared_paged_kv_idx": False,
        },
    }


def gpu_work(call: Callable[[], object]) -> list[str]:
    """Names of the kernels, copies and fills of a call that has run before."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return sorted(event.name for event in profile.events() if event.device_type == DeviceType.CUDA)


def installed(function: str) -> Callable[..., Any]:
    return getattr(pytest.importorskip("flashinfer.decode"), function)


@pytest.mark.parametrize("q_len", [1, 4], ids=["decode", "verify"])
def test_a_prepared_call_adds_two_microseconds_at_most(q_len: int) -> None:
    arguments = decode_arguments(q_len)
    one_shot = functools.partial(getattr(trtllm, DECODE), **arguments)
    prepared = trtllm.prepare_trtllm_batch_decode_with_kv_cache(**arguments)
    own = functools.partial(installed(DECODE), **arguments)
    times = host_time({"FlashInfer's own": own, "prepared": prepared, "one-shot": one_shot})
    medians = {name: time.median_us for name, time in times.items()}
    print(f"\nhost time per call, µs, q_len {q_len}: {medians}")
    assert medians["prepared"] - medians["FlashInfer's own"] <= MOST_ADDED_US


@pytest.mark.parametrize("q_len", [1, 4], ids=["decode", "verify"])
def test_the_decode_call_adds_no_gpu_work(q_len: int) -> None:
    arguments = decode_arguments(q_len)
    own = gpu_work(functools.partial(installed(DECODE), **arguments))
    assert own
    assert gpu_work(trtllm.prepare_trtllm_batch_decode_with_kv_cache(**arguments)) == own
    assert gpu_work(functools.partial(getattr(trtllm, DECODE), **arguments)) == own


def test_the_context_call_adds_one_launch_for_a_split_pool_and_else_none() -> None:
    work = {}
    for name, arguments in context_calls().items():
        prepared = trtllm.prepare_trtllm_batch_context_with_kv_cache(**arguments)
        work[name] = gpu_work(prepared)
        truth = references.trtllm_batch_context_with_kv_cache(**arguments | {"out": None, "out_dtype": torch.float64})
        arguments["out"].fill_(float("nan"))
        assert float(references.relative_l2(prepared(), truth).max()) <= BF16_BOUND, name
    assert work["stacked"]
    assert len(work["stacked"]) == len(work["expanded table"]) == len(work["halves"]) - 1


@pytest.mark.parametrize("prepared", [True, False], ids=["prepared", "called"])
def test_a_graph_of_a_split_pool_follows_its_page_table(prepared: bool) -> None:
    """Captured once; the table's new contents are in each replay."""
    arguments = context_calls()["halves"]
    call = functools.partial(getattr(trtllm, CONTEXT), **arguments)
    if prepared:
        call = trtllm.prepare_trtllm_batch_context_with_kv_cache(**arguments)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        call()
    for shift in (0, 1):
        arguments["block_tables"].copy_(arguments["block_tables"].roll(shift, dims=0))
        arguments["out"].fill_(float("nan"))
        graph.replay()
        truth = references.trtllm_batch_context_with_kv_cache(**arguments | {"out": None, "out_dtype": torch.float64})
        assert float(references.relative_l2(arguments["out"], truth).max()) <= BF16_BOUND
