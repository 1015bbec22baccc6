"""A decode call divided by length: the same outputs, groups from the shortest requests to the longest, and graphs."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.kernels import kernel
from lab import references
from lab.checks import ForwardCase, Outcome, judge_forward
from lab.kernels import portable, prepare
from lab.metadata import ForwardMode
from lab.metadata.engine.capture import capture
from lab.metadata.mha.backend import CallSettings
from lab.metadata.mha.decode_split import DecodeSplit
from lab.workloads.inputs.forward_pass import build_forward
from tests.cases import DECODE
from tests.devices import DEVICES, IN_INTERPRETER
from tests.metadata.noted import NotedCalls

LENS = (40, 3, 77, 16, 3, 15, 90)
CASE = ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", LENS, (2,) * 7, page_size=16, decode_splits=3)


def lens_and_rows(noted: NotedCalls) -> list[tuple[list[int], int]]:
    """Return the lengths and the number of rows of each call."""
    assert all(len(given["block_tables"]) == len(given["seq_lens"]) for _, given in noted.calls)
    return [(given["seq_lens"].tolist(), len(given["query"])) for _, given in noted.calls]


@pytest.mark.parametrize("splits", [2, 3, 7, 20])
def test_groups_are_of_sorted_requests_and_the_first_are_the_larger(splits: int) -> None:
    forward = build_forward(replace(CASE, decode_splits=splits), torch.device("cpu"))
    noted, out = NotedCalls(references), forward.new_out()
    forward.run(noted, out)
    whole = sorted(length + 2 for length in LENS)
    wanted = [part.tolist() for part in torch.tensor(whole).tensor_split(min(splits, 7))]
    assert lens_and_rows(noted) == [(lens, 2 * len(lens)) for lens in wanted]
    assert forward.truth().compare(out).passed


def modes() -> list[ForwardCase]:
    """Every kind of call that is divided, and a mixed batch, of which the tail is."""
    one, prefixes = (1,) * 7, LENS
    tail: dict[str, Any] = {"page_size": 16, "split_mixed_tail": True}
    return [
        CASE,
        replace(CASE, sliding_window=True),
        replace(CASE, mode=ForwardMode.DRAFT_EXTEND_V2),
        ForwardCase(ForwardMode.DECODE, "tiny", prefixes, one, page_size=16, decode_splits=3),
        ForwardCase(ForwardMode.DECODE, "tiny", prefixes, one, draft_step=1, page_size=16, decode_splits=2),
        ForwardCase(ForwardMode.MIXED, "tiny", prefixes, (9, 4, *one[2:]), **tail, decode_splits=3),
        ForwardCase(ForwardMode.MIXED, "tiny", prefixes, (9, 4, *one[2:]), **tail, sliding_window=True),
        replace(CASE, kv_dtype=torch.float8_e4m3fn, query_dtype=torch.float8_e4m3fn),
    ]


@pytest.mark.parametrize("case", modes(), ids=repr)
def test_a_divided_pass_is_right(case: ForwardCase) -> None:
    assert judge_forward(references, case, "cpu").outcome is Outcome.RIGHT


def test_a_kernel_that_plans_for_the_first_batch_of_its_shapes_is_found_in_one_pass() -> None:
    """Groups of as many requests have one shape, and the later ones are longer."""
    planning = kernel("cached_lengths_by_shape").implementation
    case = replace(CASE, sliding_window=False, decode_splits=7)
    assert judge_forward(planning(), case, "cpu").outcome is Outcome.WRONG
    assert judge_forward(planning(), replace(case, decode_splits=1), "cpu").outcome is Outcome.RIGHT


@IN_INTERPRETER
def test_the_portable_kernel_is_right() -> None:
    assert judge_forward(portable, replace(CASE, sliding_window=True), "cpu").outcome is Outcome.RIGHT


@pytest.mark.parametrize("device", DEVICES)
def test_a_ready_call_sorts_the_lengths_of_the_time(device: str) -> None:
    """Lengths and queries change under a captured call, so that requests change groups."""
    if device == "cuda":
        implementation: Any = portable
    else:
        implementation = references
    forward = build_forward(CASE, torch.device(device))
    out = forward.new_out()
    ready = forward.prepare(implementation, **forward.arguments(out))
    replay, _ = capture(ready, torch.device(device))
    lengths = forward.metadata.cache_seqlens_int32
    for order in itertools.islice(itertools.permutations((5, 3, 42, 16, 9, 20, 7)), 0, 5000, 1500):
        lengths.copy_(torch.tensor(order, dtype=torch.int32, device=device).clamp(max=lengths))
        forward.query.copy_(torch.randn_like(forward.query))
        replay()
        whole = forward.new_out()
        replace(CASE, decode_splits=1).backend(references).prepare_attention(**forward.arguments(whole))()
        torch.testing.assert_close(out, whole, rtol=2e-2, atol=2e-2)


def arguments_of(**changes: Any) -> dict[str, Any]:
    seq_lens = torch.tensor([3, 1, 2], dtype=torch.int32)
    pages: Tensor = torch.zeros(2, 1, 4, 8)
    return {
        "query": torch.zeros(3, 2, 8),
        "kv_cache": (pages, pages),
        "workspace_buffer": None,
        "block_tables": torch.zeros(3, 1, dtype=torch.int32),
        "seq_lens": seq_lens,
        "max_seq_len": 4,
        "out": torch.zeros(3, 2, 8),
    } | changes


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="num_splits must be at least 1, got 0"):
        DecodeSplit(references, 0)
    with pytest.raises(ValueError, match="decode_splits must be at least 1, got 0; 1 leaves a decode call whole"):
        CallSettings(decode_splits=0)
    for changes in ({"out": None}, {"return_lse": True}, {"lse": torch.zeros(3, 2)}):
        with pytest.raises(NotImplementedError, match="writes to out, and has no LSE"):
            DecodeSplit(references, 2).trtllm_batch_decode_with_kv_cache(**arguments_of(**changes))
    with pytest.raises(ValueError, match=r"decode_splits=3 would be ignored in ForwardMode\.EXTEND"):
        replace(CASE, mode=ForwardMode.EXTEND)


def test_each_run_sorts_by_the_lengths_of_its_time() -> None:
    noted, lens = NotedCalls(), torch.tensor([3, 1, 2], dtype=torch.int32)
    run = prepare(DecodeSplit(noted, 3), DECODE, **arguments_of(seq_lens=lens))
    run()
    lens.copy_(torch.tensor([1, 3, 2]))
    run()
    assert [one for lengths, _ in lens_and_rows(noted) for one in lengths] == [1, 2, 3] * 2


def test_ragged_rows_are_not_divided() -> None:
    noted = NotedCalls(references)
    ragged = {"q_len_per_req": None, "max_q_len": 2, "cum_seq_lens_q": torch.tensor([0, 1, 2, 3], dtype=torch.int32)}
    DecodeSplit(noted, 3).trtllm_batch_decode_with_kv_cache(**arguments_of(**ragged))
    assert lens_and_rows(noted) == [([3, 1, 2], 3)]
    assert (
        DecodeSplit(references, 3).trtllm_batch_context_with_kv_cache is references.trtllm_batch_context_with_kv_cache
    )


def test_one_request_is_not_divided_and_so_may_have_an_lse() -> None:
    one = arguments_of(
        query=torch.zeros(1, 2, 8),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
    )
    out, lse = DecodeSplit(references, 3).trtllm_batch_decode_with_kv_cache(**one | {"out": None, "return_lse": True})
    assert (out.shape, lse.shape) == ((1, 2, 8), (1, 2))
