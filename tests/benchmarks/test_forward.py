"""Every forward mode on every kernel that this machine runs: judged always, timed on a GPU on lengths of a real trace."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.checks import ForwardCase
from lab.checks.forward import compare_with_truth
from lab.checks.forward_pass import build_forward
from lab.metadata import AttentionCall, ForwardMode
from lab.workloads.traces import snapshot
from tests.benchmarks.conftest import GPU_CLOCK, HAS_GPU

IMPLEMENTATIONS = ("lab.kernels.portable", "lab.kernels.trtllm")

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


def timed_cases(decode_lens: list[int], prompt_lens: list[int]) -> dict[str, ForwardCase]:
    """Decode-like passes over a snapshot of running requests, extends over arriving prompts; Llama-3.1-8B, one layer."""
    running, ones, fours = tuple(decode_lens), tuple(1 for _ in decode_lens), tuple(4 for _ in decode_lens)
    arriving = tuple(prompt_lens)
    v2 = ForwardCase(ForwardMode.DRAFT_EXTEND_V2, "llama-3.1-8b", running, fours)
    return {
        "decode": ForwardCase(ForwardMode.DECODE, "llama-3.1-8b", running, ones),
        "target_verify": ForwardCase(ForwardMode.TARGET_VERIFY, "llama-3.1-8b", running, fours),
        "draft_extend_v2": v2,
        "draft_extend_v2_on_context": replace(v2, draft_extend=AttentionCall.CONTEXT),
        "extend": ForwardCase(ForwardMode.EXTEND, "llama-3.1-8b", tuple(0 for _ in arriving), arriving),
        # The second half of each prompt, as chunked prefill runs it.
        "extend_chunk": ForwardCase(
            ForwardMode.EXTEND,
            "llama-3.1-8b",
            tuple(length // 2 for length in arriving),
            tuple(length - length // 2 for length in arriving),
        ),
    }


TIMED = tuple(timed_cases([1], [2]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("sliding_window", [False, True], ids=["full", "window"])
@pytest.mark.parametrize("mode", JUDGED)
@pytest.mark.usefixtures("benchmark")
def test_judged(mode: str, sliding_window: bool, implementation: str, judge: Any) -> None:
    case = replace(JUDGED[mode], sliding_window=sliding_window)
    if implementation == "lab.kernels.trtllm":
        if not HAS_GPU:
            pytest.skip(
                "FlashInfer's kernels need a CUDA GPU, and there is none here; tests/kernels simulates the adapter"
            )
        case = replace(case, geometry="gpt-oss-120b", page_size=64)
    judge(importlib.import_module(implementation), case)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="a kernel's time needs a GPU: without one kernels are judged, not timed")
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("workload", ["uniform", "trace"])
@pytest.mark.parametrize("mode", TIMED)
@pytest.mark.benchmark(timer=GPU_CLOCK)
def test_timed(
    mode: str,
    workload: str,
    implementation: str,
    request: pytest.FixtureRequest,
    bandwidth_gbps: float,
    gpu_benchmark: Any,
) -> None:
    # 64 running requests, and the prompts of eight that arrive.
    if workload == "trace":
        trace = request.getfixturevalue("trace")
        case = timed_cases(snapshot(trace, 64), [traced.input_length for traced in trace[:8]])[mode]
    else:
        case = timed_cases([4096] * 64, [4096] * 8)[mode]
    module = importlib.import_module(implementation)
    forward = build_forward(case, torch.device("cuda"))
    out = torch.full_like(forward.query, float("nan"))

    def call() -> None:
        forward.run(module, out)

    call()
    assert compare_with_truth(forward, out).passed
    out.fill_(float("nan"))
    bytes_moved, operations = case.bytes_moved, case.operations
    median_us = gpu_benchmark(
        call,
        bytes_moved=bytes_moved,
        operations=operations,
        measured_bandwidth_gbps=round(bandwidth_gbps),
        floor_bandwidth_us=round(bytes_moved / bandwidth_gbps / 1000, 2),
        implementation=implementation,
        workload=workload,
        requests=len(case.q_lens),
        kv_tokens=sum(case.kv_lens),
        query_tokens=sum(case.q_lens),
        pool_bytes=forward.cache.storage.nbytes,
        page_size=case.page_size,
        geometry=case.geometry,
    )
    assert median_us > 0
    assert compare_with_truth(forward, out).passed, "right before it was timed, wrong after"
