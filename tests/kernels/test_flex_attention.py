"""torch's flex_attention over a paged cache, uncompiled: outputs and LSEs are right, and so are the blocks that a GPU reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from lab import references
from lab.calls import ContextCall, DecodeCall
from lab.kernels import PlannedOnce, prepare
from lab.kernels.peers import flex_attention
from lab.kernels.support import Kernel
from lab.kernels.support.packages import FLEX_ATTENTION
from tests.cases import Batch, context_arguments, decode_arguments, random_batch

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

FP16 = torch.float16
DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
CALLS = {DECODE: DecodeCall, CONTEXT: ContextCall}
FEW_ROUNDINGS = 2.0**-9


def batch(q_lens: list[int], kv_lens: list[int]) -> Batch:
    return random_batch(q_lens, kv_lens, head_dim=16, dtype=FP16)


def usual(**changes: Any) -> dict[str, Any]:
    return {"kv_layout": "NHD", "out_dtype": None} | changes


def draft_mask(requests: int, q_len: int) -> torch.Tensor:
    visible = torch.rand(requests, q_len, q_len, generator=torch.Generator().manual_seed(0)) < 0.5
    visible |= torch.eye(q_len, dtype=torch.bool)
    bits = torch.nn.functional.pad(visible, (0, 32 - q_len)).view(requests, q_len, 2, 16).to(torch.int64)
    return (bits << torch.arange(16)).sum(-1).to(torch.uint16)


PASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "decode, one request without keys": (DECODE, decode_arguments(batch([1, 1, 1], [0, 70, 33]), **usual())),
    "verify in a window": (DECODE, decode_arguments(batch([3, 3], [5, 70]), **usual(window_left=9))),
    "a draft mask": (DECODE, decode_arguments(batch([20, 20], [25, 90]), **usual(mask=draft_mask(2, 20)))),
    "ragged rows": (DECODE, decode_arguments(batch([3, 0, 1], [5, 70, 1]), ragged=True, **usual())),
    "extend in a window": (CONTEXT, context_arguments(batch([3, 300, 1], [5, 470, 1]), **usual(window_left=200))),
    "every key": (CONTEXT, context_arguments(batch([3, 300, 1], [5, 320, 40]), **usual(causal=False))),
}


@pytest.mark.parametrize("name", PASSES)
def test_outputs_and_lses_are_right(name: str) -> None:
    function, arguments = PASSES[name]
    wanted, wanted_lse = getattr(references, function)(**arguments | {"out_dtype": torch.float64})
    out = torch.full_like(arguments["query"], float("nan"))
    got, lse = prepare(flex_attention, function, **arguments | {"out": out})()
    assert got.data_ptr() == out.data_ptr()
    error = (out.to(torch.float64) - wanted).norm(dim=-1)
    assert bool((error <= FEW_ROUNDINGS * wanted.norm(dim=-1)).all())
    torch.testing.assert_close(lse.to(torch.float64), wanted_lse.to(torch.float64), rtol=0, atol=1e-3)


def test_a_request_with_a_page_twice_is_refused() -> None:
    """Two requests may share a page."""
    arguments = decode_arguments(batch([1, 1], [70, 70]), **usual())
    tables = arguments["block_tables"].clone()
    tables[1] = tables[0]
    flex_attention.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})
    tables[1, 1] = tables[1, 0]
    with pytest.raises(NotImplementedError, match=f"request 1 must not have page {int(tables[1, 0])} twice"):
        flex_attention.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})


@pytest.mark.parametrize("name", PASSES)
def test_a_block_read_wholly_is_seen_wholly_and_what_is_seen_is_read(name: str) -> None:
    function, arguments = PASSES[name]
    problem = CALLS[function](**arguments).problem()
    rows = flex_attention._rows_of(problem)
    num_tokens = problem.k_cache.shape[0] * problem.page_size
    blocks = flex_attention._block_mask(problem, rows, num_tokens)
    seen = create_mask(blocks.mask_mod, len(rows.grid), 1, len(rows.grid[0]), num_tokens, device="cpu")
    assert seen.any()
    some_are_whole = False
    for entry, block in torch.cartesian_prod(
        *map(torch.arange, (seen.shape[0], blocks.kv_num_blocks.shape[2]))
    ).tolist():
        mine = seen[entry, 0, block * flex_attention.Q_BLOCK :][: flex_attention.Q_BLOCK]
        by_page = mine.view(len(mine), -1, problem.page_size)
        partial, full = (
            set(ids[entry, 0, block, : counts[entry, 0, block]].tolist())
            for counts, ids in (
                (blocks.kv_num_blocks, blocks.kv_indices),
                (blocks.full_kv_num_blocks, blocks.full_kv_indices),
            )
        )
        assert not partial & full
        assert partial | full == set(by_page.any(dim=(0, 2)).nonzero().flatten().tolist())
        assert full == set(by_page.all(dim=2).all(dim=0).nonzero().flatten().tolist())
        some_are_whole |= bool(full)
    assert some_are_whole == (name not in ("verify in a window", "ragged rows"))


def test_a_plan_keeps_lengths_and_not_contents() -> None:
    arguments = decode_arguments(batch([1, 1], [5, 70]), **usual(return_lse=False))
    arguments |= {"query": arguments["query"].clone(), "seq_lens": arguments["seq_lens"].clone()}
    changed = arguments | {"query": arguments["query"].flip(0).contiguous()}
    wanted = flex_attention.trtllm_batch_decode_with_kv_cache(**changed)
    call = prepare(PlannedOnce(flex_attention), DECODE, **arguments)
    arguments["query"].copy_(changed["query"])
    arguments["seq_lens"].fill_(1)
    assert call().equal(wanted)


# Kernel, changes of a plain call, and what the sentence says.
REFUSED: dict[str, tuple[Kernel, dict[str, Any], str]] = {
    "sinks": (FLEX_ATTENTION, {"sinks": torch.zeros(4)}, "has no sinks"),
    "HND": (FLEX_ATTENTION, {"kv_layout": "HND"}, "K's pages must touch and be NHD"),
    "a scale of V": (FLEX_ATTENTION, {"bmm2_scale": 0.5}, "has no scale of its values"),
    "a tensor": (FLEX_ATTENTION, {"bmm1_scale": torch.tensor([1.0])}, "its scale as a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_is_refused_in_a_sentence(name: str) -> None:
    kernel, changes, reason = REFUSED[name]
    arguments = decode_arguments(batch([1, 1], [5, 70]), **usual(**changes))
    with pytest.raises(NotImplementedError, match=f"{kernel.name} .*{reason}"):
        flex_attention.trtllm_batch_decode_with_kv_cache(**arguments)


@pytest.mark.parametrize("side", ["K", "V"])
def test_a_pool_past_32_bits_is_refused_on_a_gpu(side: str) -> None:
    problem = DecodeCall(**decode_arguments(batch([1, 1], [5, 70]), **usual())).problem()
    page_elements = problem.k_cache[0].numel()
    for num_pages, fits in ((2**31 // page_elements, True), (2**31 // page_elements + 1, False)):
        pool = torch.empty(num_pages, problem.page_size, problem.num_kv_heads, problem.head_dim, device="meta")
        large = replace(problem, **{f"{side.lower()}_cache": pool.transpose(1, 2)})
        assert FLEX_ATTENTION.limits(None, large) is None
        told = FLEX_ATTENTION.limits((9, 0), large)
        assert told is None if fits else told and told.startswith(f"counts the elements of {side} in 32 bits")
