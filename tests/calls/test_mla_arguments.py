"""Bad input of the MLA decode call: every row is refused with words that help, before anything is written."""

from typing import Any

import pytest
import torch

from lab.calls.arguments import check_table_rows
from lab.references import trtllm_batch_decode_with_kv_cache_mla as mla
from tests.calls.breaks import (
    POISON,
    Bad,
    Breaks,
    assert_refused,
    bad_of_every_call,
    bad_offsets,
    each_of,
    elsewhere,
    entry,
    int32,
    not_modelled,
    stretched,
    tensor,
    to,
    value,
)
from tests.cases import RANK, Arguments, latent_batch, mla_arguments


def good_arguments() -> Arguments:
    """Two requests of two rows and 4 heads, bf16, into a poisoned `out`."""
    out = torch.full((2, 2, 4, RANK), POISON, dtype=torch.bfloat16)
    return mla_arguments(latent_batch([2, 2], [20, 5]), out=out)


def ragged(**changes: Any) -> Breaks:
    """The good call with its rows counted by offsets, then changed."""

    def breaks(good: Arguments) -> Arguments:
        rows = {name: good[name].flatten(0, 1) for name in ("query", "out")}
        return rows | {"cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32), "max_q_len": 2} | changes

    return breaks


def sparse(flat: bool = False, **changes: Any) -> Breaks:
    """The good call with 8 selected entries of each row, then changed. `flat`: its rows are counted by offsets."""

    def breaks(good: Arguments) -> Arguments:
        table = torch.arange(32, dtype=torch.int32).view(2, 2, 8)
        given = {"sparse_mla_top_k": 8, "block_tables": table}
        given |= ragged(block_tables=table.flatten(0, 1))(good) if flat else {}
        return given | {name: change(given) if callable(change) else change for name, change in changes.items()}

    return breaks


def places(index: tuple[int, ...], number: int) -> Any:
    """A change of one cell of the selected entries."""
    return lambda given: entry("block_tables", index, number)(given)["block_tables"]


def lens(*numbers: int) -> dict[str, Any]:
    return {"sparse_mla_top_k_lens": int32(*numbers)}


BAD: list[Bad] = [
    *bad_of_every_call(),
    # query
    (tensor("query", lambda q: q.flatten(0, 1)), ValueError, "query must be [batch", "got shape [4,"),
    (ragged(query=torch.zeros(2, 2, 4, 12)), ValueError, "query must be [num_rows", "got shape [2, 2,"),
    (tensor("query", lambda q: q[:, :0]), ValueError, "at least one row", "[2, 0, 4, 12]"),
    (tensor("query", lambda q: q[..., :11]), ValueError, "query has head_dim 11", "=8 and qk_rope_head_dim=4 make 12"),
    (tensor("query", lambda q: stretched(q.repeat(1, 2, 1, 1))[:, :2]), ValueError, "head_dim must be contiguous"),
    (tensor("query", lambda q: q[:1]), ValueError, "query has 1 requests", "block_tables has 2"),
    # sizes
    (value(kv_lora_rank=0), ValueError, "kv_lora_rank", "at least 1", "0"),
    (value(kv_lora_rank=8.0), TypeError, "kv_lora_rank", "8.0"),
    (value(qk_rope_head_dim=-1), ValueError, "qk_rope_head_dim", "at least 0", "-1"),
    (value(qk_nope_head_dim=None), TypeError, "qk_nope_head_dim", "None"),
    (value(kv_lora_rank=9), ValueError, "kv_lora_rank=9", "make 13", "12"),
    # kv_cache
    (value(kv_cache=(1, 2)), TypeError, "kv_cache must be a torch.Tensor", "tuple"),
    (tensor("kv_cache", to(torch.float16)), TypeError, "kv_cache", "bfloat16, float8", "float16"),
    (tensor("kv_cache", to(torch.uint8)), NotImplementedError, "kv_cache is uint8", "use bfloat16"),
    (sparse(kv_cache=torch.zeros(4, 16, 656, dtype=torch.uint8)), NotImplementedError, "kv_cache is uint8", "SM120"),
    (tensor("kv_cache", lambda c: c.transpose(1, 2)), ValueError, "kv_cache must be", "one head", "1, 12]"),
    (tensor("kv_cache", lambda c: c.repeat(1, 2, 1, 1)), ValueError, "kv_cache must be", "one head"),
    (tensor("kv_cache", lambda c: c[0, 0]), ValueError, "kv_cache must be", "got shape [16, 12]"),
    (tensor("kv_cache", lambda c: c[..., :8]), ValueError, "kv_cache must be", "12]", "8]"),
    (tensor("kv_cache", stretched), ValueError, "kv_cache", "contiguous", "stride 2"),
    (tensor("kv_cache", lambda c: c[:, :, :12]), ValueError, "page_size 12", "power of two"),
    # tables and lengths
    (value(block_tables=None), TypeError, "block_tables", "NoneType"),
    (tensor("block_tables", to(torch.int64)), TypeError, "block_tables must be int32", "int64"),
    (tensor("block_tables", lambda t: t[0]), ValueError, "block_tables must be [batch_size", "shape"),
    (tensor("block_tables", stretched), ValueError, "block_tables rows must be contiguous"),
    (entry("block_tables", (1, 0), 1000), ValueError, "page id 1000", "request 1"),
    (value(max_seq_len=19), ValueError, "seq_lens[0] = 20", "19"),
    (entry("seq_lens", (0,), 1000), ValueError, "seq_lens[0] = 1000", "widen"),
    (value(max_seq_len=-1), ValueError, "max_seq_len", "-1"),
    (value(max_seq_len=None), TypeError, "max_seq_len", "None"),
    # selected entries
    (sparse(sparse_mla_top_k=8.0), TypeError, "sparse_mla_top_k", "8.0"),
    (sparse(sparse_mla_top_k=-1), ValueError, "sparse_mla_top_k", "at least 0", "-1"),
    (value(**lens(1, 1, 1, 1)), ValueError, "sparse_mla_top_k_lens", "which is 0"),
    (value(sparse_mla_top_k=8), ValueError, "block_tables must be [2, 2, 8] with sparse_mla_top_k=8", "shape [2, 4]"),
    (sparse(sparse_mla_top_k=9), ValueError, "block_tables must be [2, 2, 9]", "[2, 2, 8]"),
    (sparse(block_tables=torch.zeros(4, 8, dtype=torch.int32)), ValueError, "block_tables must be [2, 2, 8]", "[4, 8]"),
    (sparse(flat=True, block_tables=torch.zeros(2, 2, 8, dtype=torch.int32)), ValueError, "be [4, 8]", "[2, 2, 8]"),
    (sparse(block_tables=torch.zeros(2, 2, 8, dtype=torch.int64)), TypeError, "block_tables must be int32", "int64"),
    (sparse(block_tables=None), TypeError, "block_tables", "NoneType"),
    (sparse(block_tables=lambda given: stretched(given["block_tables"])), ValueError, "rows must be contiguous"),
    (sparse(block_tables=lambda given: given["block_tables"].repeat(1, 2, 1)[:, :2]), ValueError, "rows, (32, 8, 1)"),
    (sparse(block_tables=places((1, 0, 2), 1000)), ValueError, "1000 of row 2, column 2 is outside the pool of 96"),
    (sparse(flat=True, block_tables=places((3, 4), 96)), ValueError, "entry 96 of row 3"),
    (sparse(sparse_mla_top_k_lens=[1] * 4), TypeError, "sparse_mla_top_k_lens", "list"),
    (sparse(sparse_mla_top_k_lens=int32(1, 1, 1, 1).long()), TypeError, "sparse_mla_top_k_lens must be int32", "int64"),
    (sparse(**lens(1, 1)), ValueError, "sparse_mla_top_k_lens must have shape [4]", "[2]"),
    (sparse(**lens(1, 1, -1, 1)), ValueError, "sparse_mla_top_k_lens[2] = -1", "between 0 and"),
    (sparse(**lens(1, 8, 1, 9)), ValueError, "sparse_mla_top_k_lens[3] = 9", "= 8"),
    (sparse(sparse_mla_top_k_lens=int32(1, 1, 1, 1).to("meta")), ValueError, "sparse_mla_top_k_lens is on meta", "cpu"),
    (sparse(seq_lens=int32(20, -1)), ValueError, "seq_lens[1] = -1"),
    (sparse(max_seq_len=19), ValueError, "seq_lens[0] = 20", "max_seq_len = 19"),
    (sparse(flat=True, seq_lens=int32(20)), ValueError, "cum_seq_lens_q", "[2]", "[3]"),
    # ragged rows
    (value(max_q_len=2), ValueError, "max_q_len=2", "needs cum_seq_lens_q"),
    *bad_offsets(ragged),
    (ragged(cum_seq_lens_q=int32(0, 2, 5), max_q_len=None), ValueError, "cum_seq_lens_q", "within the 4 query rows"),
    # scales and sinks
    (value(sinks=[torch.zeros(4)] * 2), ValueError, "sinks must be one tensor", "2 of them"),
    (value(sinks=[0.0]), TypeError, "sinks must be a torch.Tensor", "float"),
    # results
    (value(out=torch.zeros(2, 2, 4, 12)), ValueError, "out must be [2, 2, 4, 8]", "12]"),
    (tensor("out", lambda o: o.flatten(0, 1)), ValueError, "out must be [2, 2, 4, 8]", "[4, 4, 8]"),
    (value(lse=torch.zeros(2, 4)), ValueError, "lse must be [4, 4] or [2, 2, 4]", "got [2, 4]"),
    (ragged(lse=torch.zeros(2, 2, 4)), ValueError, "lse must be [4, 4], got"),
    (value(lse=torch.zeros(4, 1).expand(4, 4)), ValueError, "lse must be contiguous", "(1, 0)"),
    (value(lse=torch.zeros(4, 4), return_lse=False), ValueError, "lse without return_lse=True", "pass both or neither"),
    (value(return_lse_base="base10"), ValueError, "return_lse_base", "'basee'", "'base10'"),
    (ragged(return_lse_base=None), ValueError, "return_lse with cum_seq_lens_q needs return_lse_base"),
    # devices
    *elsewhere("kv_cache", "block_tables"),
    (value(sinks=[torch.zeros(4, device="meta")]), ValueError, "sinks is on meta", "cpu"),
    # backends, and what the lab does not model
    *(
        (value(backend=name), NotImplementedError, f"backend='{name}'", "auto, xqa, trtllm-gen")
        for name in ("cake", "sparse")
    ),
    (
        value(sparse_mla_top_k=4, skip_softmax_threshold_scale_factor=1.0),
        ValueError,
        "skip_softmax_threshold_scale_factor is 1.0 with sparse_mla_top_k=4",
        "not skipped",
    ),
    (value(is_var_seq=None), TypeError, "is_var_seq", "True or False", "None"),
    (value(cute_dsl_impl="fast"), ValueError, "cute_dsl_impl", "'modular'", "'fast'"),
    (value(kv_scale_format="fp8"), ValueError, "kv_scale_format", "'pow2_fp32'", "'fp8'"),
    (value(kv_scale_format=None), TypeError, "kv_scale_format", "None"),
    *not_modelled(use_fp16_softmax=True),
    (value(uses_shared_paged_kv_idx=False), NotImplementedError, "kv_idx=False", "one cache entry is a key"),
    (value(uses_shared_paged_kv_idx=None), TypeError, "uses_shared_paged_kv_idx", "None"),
]


@each_of(BAD)
def test_bad_input_is_refused_before_anything_is_written(row: Bad) -> None:
    assert_refused(mla, good_arguments(), row)


GOOD = [
    *(value(), ragged(), ragged(max_q_len=None), sparse(), sparse(flat=True), sparse(**lens(1, 8, 3, 1))),
    sparse(block_tables=places((1, 0, 5), 1000)),  # after the columns that row 2, at position 3, uses
    sparse(seq_lens=int32(1000, 5), max_seq_len=1000),
]


@pytest.mark.parametrize("change", GOOD)
def test_what_the_rows_break_was_good(change: Breaks) -> None:
    good = good_arguments()
    out, _ = mla(**good | change(good))
    assert (out != POISON).any(dim=-1).all()


def test_the_stride_of_a_table_counts_if_it_has_several_columns() -> None:
    with pytest.raises(ValueError, match="rows must be contiguous"):
        check_table_rows(torch.zeros(1, 6, dtype=torch.int32)[:, ::2])
    check_table_rows(torch.zeros(3, 6, dtype=torch.int32)[:, ::6])
