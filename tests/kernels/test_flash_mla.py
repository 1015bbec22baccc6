"""FlashMLA's sparse kernel without a GPU: a simulation gets what it requires, and calls mean what the references do.

The simulation has the parameters and checks of `flash_mla_sparse_fwd` of sgl-flash-mla 1.0.0, and its results: an LSE to the
base e without the sink, which is +inf for a row without entries.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.kernels import prepare, support
from lab.kernels.peers import flash_mla
from tests.cases import MLA, Arguments, latent_batch, sparse_arguments
from tests.kernels.adapter_calls import (
    SM90,
    Change,
    gapped,
    into,
    remade,
    with_gaps,
)
from tests.kernels.held import BF16, assert_rounded

HEADS, COLUMNS, SINKS = 64, 128, torch.linspace(-3.0, 3.0, 64)
Case = Callable[[], Arguments]


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    (rows, heads, head_dim), columns = q.shape, indices.shape[2]
    assert q.dtype == kv.dtype == BF16
    assert heads in (64, 128)
    assert (head_dim, d_v) in ((576, 512), (512, 512))
    assert kv.shape[1:] == (1, head_dim)
    assert (indices.shape, indices.dtype) == ((rows, 1, columns), torch.int32)
    assert columns > 0 == columns % 128
    assert topk_length is not None
    assert (topk_length.shape, topk_length.dtype) == ((rows,), torch.int32)
    assert 0 <= int(topk_length.min()) <= int(topk_length.max()) <= columns, "the kernel would read other rows' columns"
    assert attn_sink is None or (attn_sink.shape, attn_sink.dtype) == ((heads,), torch.float32)
    assert use_legacy, "the current kernels are for SM100"
    assert return_log2_lse is not True
    out, lse = torch.zeros(rows, heads, d_v, dtype=torch.float64), torch.full((rows, heads), math.inf)
    for row, used in enumerate(topk_length.tolist()):
        entries = [place for place in indices[row, 0, :used].tolist() if 0 <= place < len(kv)]
        if not entries:
            continue
        keys = kv[entries, 0].to(torch.float64)
        logits = q[row].to(torch.float64) @ keys.T * sm_scale
        lse[row] = logits.logsumexp(1)
        total = lse[row] if attn_sink is None else torch.logaddexp(lse[row], attn_sink)
        out[row] = torch.exp(logits - total.to(torch.float64).unsqueeze(1)) @ keys[:, :d_v]
    wanted = return_log2_lse is not False
    return out.to(BF16), lse if wanted else None, lse if wanted else None


def sparse(
    q_len: int = 1, *changed: Change, rope: int = 64, lens: list[int] | None = None, **changes: Any
) -> Arguments:
    """A call of three requests with few keys or none, 9 and 150. A row selects the first positions; its fourth column is -1."""
    kv_lens = [q_len // 3, 9, 150]
    batch = latent_batch([q_len] * 3, kv_lens, heads=HEADS, rank=512, rope=rope, dtype=BF16)
    columns = [
        [-1 if column == 3 or column >= kv_len else column for column in range(COLUMNS)]
        for kv_len in kv_lens
        for _ in range(q_len)
    ]
    arguments = sparse_arguments(batch, columns, lens=lens, **{"out": None, "bmm1_scale": 0.05} | changes)
    for change in changed:
        arguments = change(arguments)
    return arguments


def narrow(arguments: Arguments) -> Arguments:
    return arguments | {"block_tables": arguments["block_tables"][..., :68], "sparse_mla_top_k": 68}


RIGHT: dict[str, Case] = {
    "decode": sparse,
    "without LSE": lambda: sparse(return_lse=False, return_lse_base=None),
    "base e": lambda: sparse(return_lse_base="basee"),
    "verify, rows before the first key": lambda: sparse(4),
    "sinks": lambda: sparse(2, sinks=SINKS),
    "lengths, and places after them outside the pool": lambda: sparse(lens=[0, 2, 100]),
    "no rotary part": lambda: sparse(rope=0, lens=[0, 3, COLUMNS]),
    "columns that are not whole 128": lambda: sparse(2, narrow),
    "rows of entries apart": lambda: sparse(2, width=COLUMNS + 3),
    "a strided query": lambda: sparse(2, gapped("query", 8)),
    "requests apart": lambda: sparse(2, remade("query", lambda q: torch.stack((q, q), 1)[:, 0])),
    "given results": lambda: into()(sparse(2, lse=torch.full((3, 2, HEADS), math.nan))),
    "uint32 lengths": lambda: sparse(2, remade("seq_lens", lambda lengths: lengths.to(torch.uint32))),
}


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> list[Arguments]:
    """Simulate FlashMLA on an SM90 GPU; the arguments of its calls."""
    calls: list[Arguments] = []

    def called(**arguments: Any) -> Any:
        calls.append(arguments)
        return flash_mla_sparse_fwd(**arguments)

    def installed(part: str, name: str, written_for: str, keywords: frozenset[str]) -> Any:
        assert name == "flash_mla.flash_mla_sparse_fwd"
        inspect.signature(flash_mla_sparse_fwd).bind(**dict.fromkeys(keywords))
        return called

    monkeypatch.setattr(support, "capability_of", lambda device: SM90)
    monkeypatch.setattr(flash_mla, "installed_function", installed)
    return calls


@pytest.mark.parametrize("name", RIGHT)
def test_a_call_is_right(on_hopper: list[Arguments], name: str) -> None:
    assert_rounded(flash_mla, MLA, RIGHT[name]())
    assert len(on_hopper) == 1


def test_a_cache_with_gaps_is_refused_and_a_pool_is_not_copied(on_hopper: list[Arguments]) -> None:
    arguments = sparse()
    getattr(flash_mla, MLA)(**arguments)
    assert on_hopper[0]["kv"].data_ptr() == arguments["kv_cache"].data_ptr()
    with pytest.raises(NotImplementedError, match="K's pages must touch and be NHD"):
        getattr(flash_mla, MLA)(**with_gaps(arguments))


@pytest.mark.parametrize("change", [remade("query", lambda q: torch.stack((q, q), 1)[:, 0]), narrow])
@pytest.mark.parametrize("lens", [None, [1, 1, 2, 2, 60, 60]])
def test_a_prepared_call_follows_contents(change: Change, lens: list[int] | None) -> None:
    arguments = sparse(2, change, lens=lens)
    ready = prepare(flash_mla, MLA, **arguments)
    ready()
    arguments["query"].mul_(-2.0)
    arguments["block_tables"].copy_(arguments["block_tables"].flip(0))
    for lengths in ("seq_lens", "sparse_mla_top_k_lens"):
        if lengths in arguments:
            arguments[lengths].copy_(arguments[lengths].flip(0))
    results, expected = ready(), getattr(references, MLA)(**arguments)
    for own, truth in zip(results, expected, strict=True):
        torch.testing.assert_close(own, truth, rtol=2**-7, atol=2**-7)
