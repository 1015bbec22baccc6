"""The portable kernel on small batches, compiled for a GPU: one launch, whoever arrives last, thousands of times."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import triton

from lab import references
from lab.kernels import portable
from lab.kernels.portable import paged, partial_results
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.partial_results import PartialResults
from lab.metadata.engine.capture import capturing
from tests.cases import DECODE
from tests.devices import ON_GPU
from tests.kernels.held import E4M3
from tests.kernels.test_portable_gpu import BOUND, assert_right, posed, skip_without_e4m3

pytestmark = [*ON_GPU]

LAUNCHES = 3000
# One request, few and many, equal, unequal and empty; the first three have groups of pieces to merge.
BATCHES = {
    "1 x 4,096": [4096],
    "1 x 40,000": [40_000],
    "3 unequal": [20_000, 5, 700],
    "16 x 512": [512] * 16,
    "8 x 1,000": [1000] * 8,
    "33 x 512": [512] * 33,
    "32 from 0 to 4,000": [130 * number for number in range(31)] + [4000],
    "100 unequal": [37 * number * number % 1000 for number in range(99)] + [6000],
    "200 unequal": [37 * number * number % 1000 for number in range(199)] + [6000],
}


@pytest.fixture(params=[True, False], ids=["at once", "by a launch"])
def merges_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Merge as asked, whatever would be faster."""
    monkeypatch.setattr(paged, "merges_at_once", lambda *_: request.param)
    portable.trtllm_batch_decode_with_kv_cache.cache_clear()  # calls that merge otherwise
    yield request.param
    portable.trtllm_batch_decode_with_kv_cache.cache_clear()


@pytest.fixture
def allocated(merges_at_once: bool, monkeypatch: pytest.MonkeyPatch) -> list[PartialResults | None]:
    """What calls allocate for their partial results."""
    kept: list[PartialResults | None] = []

    def new_partials(shares: Shares, *arguments: Any) -> PartialResults | None:
        assert shares.merges_at_once == merges_at_once
        kept.append(partial_results.new_partials(shares, *arguments))
        return kept[-1]

    monkeypatch.setattr(paged, "new_partials", new_partials)
    return kept


def left_over(partials: PartialResults | None, merges_at_once: bool) -> bool:
    """Return True if a counter is not zero."""
    assert partials is not None
    return merges_at_once and bool(partials.of_units.any())


def prepared(q_len: int, kv_lens: list[int], **changes: Any) -> tuple[dict[str, Any], Any]:
    arguments = posed(DECODE, [q_len] * len(kv_lens), kv_lens, **changes)
    return arguments, portable.prepare_trtllm_batch_decode_with_kv_cache(**arguments)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_right(
    batch: str, q_len: int, head_dim: int, merges_at_once: bool, allocated: list[PartialResults | None]
) -> None:
    sinks = torch.linspace(-2.0, 6.0, 8)
    assert_right(DECODE, posed(DECODE, [q_len] * len(BATCHES[batch]), BATCHES[batch], head_dim=head_dim, sinks=sinks))
    assert not left_over(allocated[0], merges_at_once)


@pytest.mark.parametrize("batch", ["1 x 4,096", "8 x 1,000"])
def test_over_e4m3(batch: str) -> None:
    skip_without_e4m3()
    assert_right(DECODE, posed(DECODE, [2] * len(BATCHES[batch]), BATCHES[batch], kv_dtype=E4M3))


def test_one_launch() -> None:
    launched: list[str] = []

    def note(metadata: Any) -> None:
        launched.append(metadata.get()["name"])

    _, call = prepared(1, BATCHES["16 x 512"])
    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        call()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    assert launched == ["_attention_kernel"]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("q_len", [1, 4])
def test_thousands_of_launches_beside_other_work(
    batch: str, q_len: int, merges_at_once: bool, allocated: list[PartialResults | None]
) -> None:
    """Products on another stream take multiprocessors away now and then, so that programs end in ever other orders."""
    arguments, call = prepared(q_len, BATCHES[batch])
    first = [each.clone() for each in call()]
    truth = references.trtllm_batch_decode_with_kv_cache(**arguments | {"out_dtype": torch.float64})[0]
    assert float(references.relative_l2(first[0], truth).max()) <= BOUND
    beside, matrix = torch.cuda.Stream(), torch.randn(1024, 1024, device="cuda")
    beside.wait_stream(torch.cuda.current_stream())
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    results = call()
    for launch in range(LAUNCHES):
        if launch % 7 == 0:
            with torch.cuda.stream(beside):
                torch.mm(matrix, matrix)
        for result in results:  # what a launch does not write is seen
            result.fill_(float("nan"))
        call()
        for result, expected in zip(results, first, strict=True):
            wrong += (result != expected).any()
    assert int(wrong) == 0
    assert not left_over(allocated[0], merges_at_once)


@pytest.mark.parametrize("batch", ["1 x 40,000", "3 unequal", "32 from 0 to 4,000"])
def test_replays_back_to_back(batch: str, merges_at_once: bool, allocated: list[PartialResults | None]) -> None:
    """Launches that begin beside the end of the one before, of two calls in turns, and lengths that change in between."""
    kv_lens = BATCHES[batch]
    first_arguments, first = prepared(1, kv_lens)
    other_arguments, other = prepared(2, kv_lens)
    results = [*first(), *other()]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        for _ in range(20):
            first()
            other()
    for lengths in (kv_lens, [max(2, kv_len // 3) for kv_len in kv_lens], [2] * len(kv_lens), kv_lens):
        expected = []
        for arguments in (first_arguments, other_arguments):
            arguments["seq_lens"].copy_(torch.tensor(lengths))
            expected += portable.trtllm_batch_decode_with_kv_cache(**arguments)
        for _ in range(50):
            graph.replay()
        for result, right in zip(results, expected, strict=True):
            assert result.equal(right)
        assert not left_over(allocated[0], merges_at_once)
        assert not left_over(allocated[1], merges_at_once)


def test_a_graph_that_captured_the_whole_call() -> None:
    """Its counters are filled in the graph, in each replay."""
    arguments = posed(DECODE, [1], [40_000])
    out = torch.empty_like(arguments["query"])
    portable.trtllm_batch_decode_with_kv_cache(**arguments)
    graph = torch.cuda.CUDAGraph()
    with capturing(graph):
        portable.trtllm_batch_decode_with_kv_cache(**arguments | {"out": out})
    for kv_len in (40_000, 100, 40_000):
        arguments["seq_lens"].fill_(kv_len)
        graph.replay()
        assert out.equal(portable.trtllm_batch_decode_with_kv_cache(**arguments)[0])


def test_two_streams_at_once() -> None:
    """Two prepared calls have counters of their own."""
    calls = [prepared(1, BATCHES["1 x 4,096"])[1], prepared(1, BATCHES["8 x 1,000"])[1]]
    expected = [[each.clone() for each in call()] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(500):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    for call, rights in zip(calls, expected, strict=True):
        for result, right in zip(call(), rights, strict=True):
            assert result.equal(right)
