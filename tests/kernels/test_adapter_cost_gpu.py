"""What the FlashInfer adapter costs on a GPU: at most 2 µs of host time over FlashInfer's own call, and no GPU work."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import DeviceType

from lab import references
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.kernels import flashinfer_call, trtllm
from lab.metadata.engine.capture import capturing
from lab.timing.host_time import host_time

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
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 64  # llama 3.1 8B
KV_LENS = (64, 64)  # so little that the GPU keeps up with the host
PAGES = 6
BF16_BOUND = 4 * 2.0**-8  # weights and output rounded once, each at most one unit roundoff of its vector, times two

Arguments = dict[str, Any]


def pool() -> Tensor:
    """K and V as halves of one allocation, as an engine's: [2, num_pages, page_size, num_kv_heads, head_dim]."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    shape = (2, PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda", generator=generator)


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def new_workspace() -> Tensor:
    return torch.zeros(SEMAPHORE_BYTES + flashinfer_call.SCRATCH_BYTES, dtype=torch.uint8, device="cuda")


def decode_arguments(q_len: int) -> Arguments:
    """Everything given that the adapter would make, so that FlashInfer's own function takes the same arguments."""
    cache = pool()
    query = torch.randn(len(KV_LENS) * q_len, NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    mask = trtllm.causal_mask(len(KV_LENS), q_len, query.device) if q_len > 1 else None
    return {
        "query": query,
        "kv_cache": tuple(cache.transpose(2, 3)),
        "workspace_buffer": new_workspace(),
        "block_tables": int32([[3], [1]]),
        "seq_lens": int32(KV_LENS),
        "max_seq_len": max(KV_LENS),
        "bmm1_scale": HEAD_DIM**-0.5,
        "out": torch.empty_like(query),
        "q_len_per_req": q_len,
        "mask": mask,
    }


def context_arguments() -> Arguments:
    """Prompts of the whole lengths, over `pool`; without `kv_cache` and `block_tables`."""
    rows = sum(KV_LENS)
    query = torch.randn(rows, NUM_QO_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    offsets = int32([0, KV_LENS[0], rows])
    return {
        "query": query,
        "workspace_buffer": new_workspace(),
        "seq_lens": int32(KV_LENS),
        "max_q_len": max(KV_LENS),
        "max_kv_len": max(KV_LENS),
        "bmm1_scale": HEAD_DIM**-0.5,
        "bmm2_scale": 1.0,
        "batch_size": len(KV_LENS),
        "cum_seq_lens_q": offsets,
        "cum_seq_lens_kv": offsets,
        "kv_layout": "NHD",
        "out": torch.empty_like(query),
    }


def pools() -> dict[str, Arguments]:
    """The same K/V and pages in the three forms that the adapter hands to fmha_v2."""
    halves, ids = pool(), int32([[3], [1]])
    return {
        "halves": {"kv_cache": (halves[0], halves[1]), "block_tables": ids},
        "stacked": {"kv_cache": halves.transpose(0, 1).contiguous(), "block_tables": ids},
        "expanded table": {
            "kv_cache": (halves.flatten(0, 1),) * 2,
            "block_tables": torch.stack((ids, ids + PAGES), dim=1),
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
    for name, cache in pools().items():
        arguments = context_arguments() | cache
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
    arguments = context_arguments() | pools()["halves"]
    call = functools.partial(getattr(trtllm, CONTEXT), **arguments)
    if prepared:
        call = trtllm.prepare_trtllm_batch_context_with_kv_cache(**arguments)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        call()
    for ids in ([[3], [1]], [[0], [5]]):
        arguments["block_tables"].copy_(int32(ids))
        arguments["out"].fill_(float("nan"))
        graph.replay()
        truth = references.trtllm_batch_context_with_kv_cache(**arguments | {"out": None, "out_dtype": torch.float64})
        assert float(references.relative_l2(arguments["out"], truth).max()) <= BF16_BOUND
