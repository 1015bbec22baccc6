"""The references are usable, by the loop over requests that one would write first.

On a CPU a batch costs less than that loop; on a GPU far less, where launches are the cost, that is: many requests.
A few long ones are bound by making K and V float64 either way, and gain a factor of 2 to 3. Both sides run in turn in one
test: a time alone would measure the machine.
"""

import time
from collections.abc import Callable

import pytest
import torch

from lab.checks import ForwardCase
from lab.metadata import ForwardMode
from lab.references import relative_l2, trtllm_batch_decode_with_kv_cache
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward


def by_loop(forward: ForwardPass) -> torch.Tensor:
    """One request at a time over dense float64 K/V, heads expanded."""
    k_cache, v_cache = forward.cache.as_hnd()
    rows = []
    for request, kv_len in enumerate(forward.case.kv_lens):
        pages = forward.metadata.page_table[request, : -(-kv_len // forward.case.page_size)].long()
        k, v = (
            cache[pages].transpose(1, 2).flatten(0, 1)[:kv_len].double().repeat_interleave(forward.case.model.group, 1)
            for cache in (k_cache, v_cache)
        )
        q = forward.query[request].double()
        weights = torch.softmax(torch.einsum("hd,khd->hk", q, k) * forward.layer.softmax_scale, dim=-1)
        rows.append(torch.einsum("hk,khd->hd", weights, v))
    return torch.stack(rows)


def by_reference(forward: ForwardPass) -> torch.Tensor:
    return trtllm_batch_decode_with_kv_cache(
        forward.query,
        forward.cache.as_hnd(),
        None,
        forward.metadata.page_table,
        forward.metadata.cache_seqlens_int32,
        forward.case.max_context_len,
        bmm1_scale=forward.layer.softmax_scale,
        out_dtype=torch.float64,
    )


def best_of_5_s(function: Callable[[ForwardPass], torch.Tensor], forward: ForwardPass) -> float:
    times = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        function(forward)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def cpu_seconds(function: Callable[[ForwardPass], torch.Tensor], forward: ForwardPass) -> float:
    start = time.process_time()  # of all threads, so that waiting for a core does not count
    function(forward)
    return time.process_time() - start


def test_no_slower_than_a_loop_on_a_cpu() -> None:
    """4 requests of 2,048 keys, 32/8 heads of 128: the loop takes three times as long."""
    case = ForwardCase(ForwardMode.DECODE, "llama-3.1-8b", (2047,) * 4, (1,) * 4)
    forward = build_forward(case, torch.device("cpu"))
    assert relative_l2(by_reference(forward), by_loop(forward)).max() < 1e-12
    turns = [(cpu_seconds(by_loop, forward), cpu_seconds(by_reference, forward)) for _ in range(3)]
    loop_s, reference_s = (min(times) for times in zip(*turns, strict=True))
    print(f"loop {loop_s:.2f} s, reference {reference_s:.2f} s of CPU time")
    assert reference_s < loop_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares speeds on a GPU, and there is none here")
@pytest.mark.parametrize(
    ("batch_size", "kv_len", "least"), [(256, 256, 5), (128, 512, 5), (64, 512, 4), (64, 4096, 1.5), (16, 4096, 1.5)]
)
def test_faster_than_a_loop_on_a_gpu(batch_size: int, kv_len: int, least: float) -> None:
    case = ForwardCase(ForwardMode.DECODE, "llama-3.1-8b", (kv_len - 1,) * batch_size, (1,) * batch_size)
    forward = build_forward(case, torch.device("cuda"))
    assert relative_l2(by_reference(forward), by_loop(forward)).max() < 1e-12
    loop_s, reference_s = best_of_5_s(by_loop, forward), best_of_5_s(by_reference, forward)
    print(f"loop {loop_s * 1e3:.2f} ms, reference {reference_s * 1e3:.2f} ms, {loop_s / reference_s:.1f} times")
    assert loop_s >= least * reference_s
