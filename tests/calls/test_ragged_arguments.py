"""Bad input of the ragged context call: every row is refused with words that help, before anything is written."""

from typing import Any

import pytest
import torch

from lab.calls import RaggedContextCall
from lab.references import trtllm_ragged_attention_deepseek as ragged
from tests.calls.breaks import (
    POISON,
    Bad,
    Breaks,
    assert_refused,
    bad_of_every_call,
    bad_offsets,
    each_of,
    elsewhere,
    int32,
    not_modelled,
    stretched,
    tensor,
    to,
    value,
)
from tests.cases import Arguments, ragged_arguments, ragged_batch

E4M3 = torch.float8_e4m3fn


def good_arguments() -> Arguments:
    """Two requests of two rows and 4/2 heads, bf16, into a poisoned `out`."""
    batch = ragged_batch([2, 2], [20, 5], heads=(4, 2))
    return ragged_arguments(batch, out=torch.full((4, 4, 8), POISON, dtype=torch.bfloat16))


def mirrored(q_lens: Any = (2, 2), kv_lens: Any = (20, 5)) -> Breaks:
    def as_tensor(lengths: Any) -> Any:
        return torch.tensor(lengths) if isinstance(lengths, tuple) else lengths

    return value(q_seq_lens_cpu=as_tensor(q_lens), kv_seq_lens_cpu=as_tensor(kv_lens))


def sage(**changes: Any) -> Breaks:
    """The good call with an int8 query and key and an e4m3 value, scales of rows and of blocks of 16 keys; then `changes` of
    arguments and scales.
    """
    scales = {"q_sf": torch.ones(4, 5), "k_sf": torch.ones(2, 3), "p_sf": None, "v_sf": torch.ones(2, 8)}
    own = {name: changes.pop(name) for name in scales if name in changes}
    stored = {"query": (4, 4, 12), "key": (25, 2, 12), "value": (25, 2, 8)}
    good = {name: torch.zeros(shape).to(E4M3 if name == "value" else torch.int8) for name, shape in stored.items()}
    good |= {"sage_attn_sfs": tuple((scales | own).values()), "num_elts_per_sage_attn_blk": (1, 16, 0, 1)}
    return value(**good | changes)


BAD: list[Bad] = [
    *bad_of_every_call(sinks="attention_sinks"),
    # query, key, value
    (tensor("query", lambda q: q[0]), ValueError, "query must be [num_rows", "[4, 12]"),
    (value(key=None), TypeError, "key must be a torch.Tensor", "NoneType"),
    (tensor("key", lambda k: k[:, 0]), ValueError, "key must be [num_tokens", "[25, 12]"),
    (tensor("key", lambda k: k[:, :0]), ValueError, "key must be", "[25, 0, 12]"),
    (tensor("key", to(torch.float16)), TypeError, "key must have the query's dtype", "float16"),
    (tensor("key", stretched), ValueError, "key", "contiguous", "stride 2"),
    (tensor("key", lambda k: k[..., :8]), ValueError, "key has head_dim 8", "query has 12"),
    (tensor("value", lambda v: v[None]), ValueError, "value must be [num_tokens", "[1, 25, 2, 8]"),
    (tensor("value", to(E4M3)), TypeError, "value must have the query's dtype", "float8"),
    (tensor("value", stretched), ValueError, "value", "contiguous", "stride 2"),
    (tensor("value", lambda v: v[1:]), ValueError, "same tokens and heads", "[24, 2, 8]"),
    (tensor("value", lambda v: v[:, :1]), ValueError, "same tokens and heads", "[25, 1, 8]"),
    (
        value(key=torch.zeros(25, 3, 12).bfloat16(), value=torch.zeros(25, 3, 8).bfloat16()),
        ValueError,
        "the 4 heads of query",
        "3 heads of key",
    ),
    # lengths and offsets
    (value(batch_size=3), ValueError, "seq_lens must have shape [3]", "[2]"),
    (value(batch_size=None), TypeError, "batch_size", "None"),
    (value(batch_size=-1), ValueError, "batch_size", "-1"),
    (value(max_kv_len=19), ValueError, "seq_lens[0] = 20", "max_kv_len = 19"),
    (value(max_kv_len=None), TypeError, "max_kv_len", "None"),
    *bad_offsets(),
    (value(cum_seq_lens_q=None), TypeError, "cum_seq_lens_q must be a torch.Tensor"),
    (value(cum_seq_lens_kv=None), TypeError, "cum_seq_lens_kv must be a torch.Tensor"),
    (tensor("cum_seq_lens_kv", to(torch.int64)), TypeError, "cum_seq_lens_kv must be int32", "int64"),
    (value(cum_seq_lens_kv=int32(0, 25)), ValueError, "cum_seq_lens_kv must have shape [3]", "[2]"),
    (value(cum_seq_lens_q=int32(0, 2, 5)), ValueError, "within the 4 query rows"),
    (value(cum_seq_lens_kv=int32(0, 19, 25)), ValueError, "cum_seq_lens_kv = [0, 19, 25]", "expected [0, 20, 25]"),
    (value(cum_seq_lens_kv=int32(0, 20, 26), seq_lens=int32(20, 6)), ValueError, "ends at 26", "25 tokens"),
    (value(q_seq_lens_cpu=int32(2, 2)), ValueError, "go together"),
    (mirrored([2, 2]), TypeError, "q_seq_lens_cpu must be a torch.Tensor", "list"),
    (mirrored((2.0, 2.0)), TypeError, "q_seq_lens_cpu must be int32, int64", "float32"),
    (mirrored(kv_lens=(25,)), ValueError, "kv_seq_lens_cpu must have shape [2]"),
    (mirrored(torch.ones(2, device="meta").int()), ValueError, "on meta", "CPU"),
    (mirrored(kv_lens=(20, 4)), ValueError, "kv_seq_lens_cpu = [20, 4]", "all 25 tokens"),
    (mirrored((3, 1)), ValueError, "q_seq_lens_cpu = [3, 1]", "bound 2"),
    (mirrored(kv_lens=(-1, 26)), ValueError, "kv_seq_lens_cpu = [-1, 26]"),
    (mirrored(kv_lens=(19, 6)), ValueError, "[19, 6]", "offsets say [20, 5]"),
    # scales, window, sinks
    (value(o_sf_scale=None), TypeError, "o_sf_scale", "None"),
    (value(o_sf_scale=torch.ones(1)), TypeError, "o_sf_scale must be a number"),
    (value(window_left=-2), ValueError, "window_left", "-2"),
    (value(window_left=3, is_causal=False), NotImplementedError, "False with window_left=3", "window_left=-1"),
    (value(is_causal=1), TypeError, "is_causal", "1"),
    (value(skip_all_rows_active_check=None), TypeError, "skip_all_rows_active_check", "None"),
    # results
    (tensor("out", to(E4M3)), TypeError, "out must be float16, bfloat16", "float8_e4m3fn"),
    (value(out=torch.zeros(4, 4, 12)), ValueError, "out must be [4, 4, 8]", "12]"),
    (value(lse=torch.zeros(2, 4)), ValueError, "lse must be [num_rows, num_qo_heads] = [4, 4]"),
    (value(lse=torch.zeros(4, 1).expand(4, 4)), ValueError, "lse", "share memory"),
    # devices
    *elsewhere("key", "value", "cum_seq_lens_kv"),
    # backends, and what the lab does not model
    (value(backend="cute-dsl"), NotImplementedError, "backend='cute-dsl'", "use trtllm-gen"),
    *not_modelled(use_fp16_softmax=True, uses_spcompress=True),
    # scales of blocks
    (value(sage_attn_sfs=None), TypeError, "sage_attn_sfs must be a tuple", "NoneType"),
    (value(sage_attn_sfs=(None,)), ValueError, "sage_attn_sfs must have the four parts q_sf, k_sf, p_sf, v_sf", "1"),
    (value(num_elts_per_sage_attn_blk=1), TypeError, "num_elts_per_sage_attn_blk must be a tuple", "int"),
    (value(num_elts_per_sage_attn_blk=(1, 16, 0, 1)), ValueError, "(1, 16, 0, 1) goes with sage_attn_sfs"),
    (sage(query=torch.zeros(4, 4, 12).bfloat16()), TypeError, "query must be int8, float8_e4m3fn", "bfloat16"),
    (value(query=torch.zeros(4, 4, 12).to(torch.int8)), TypeError, "query must be", "int8"),
    (sage(key=torch.zeros(25, 2, 12).to(E4M3)), TypeError, "key must have the query's dtype torch.int8", "float8"),
    (sage(value=torch.zeros(25, 2, 8).bfloat16()), TypeError, "value must have with sage_attn_sfs", "bfloat16"),
    (sage(p_sf=torch.ones(1)), NotImplementedError, "sage_attn_sfs=(", "not modelled", "(q_sf, k_sf, None, v_sf)"),
    *((sage(**{name: None}), NotImplementedError, "not modelled", "6954") for name in ("q_sf", "k_sf", "v_sf")),
    *(
        (sage(num_elts_per_sage_attn_blk=sizes), NotImplementedError, f"blk={sizes}", "1, 4, 16 rows")
        for sizes in ((2, 16, 0, 1), (1, 0, 0, 1), (1, 16, 4, 1), (1, 16, 0, 4))
    ),
    (sage(q_sf=torch.ones(4, 4)), ValueError, "q_sf of sage_attn_sfs must be contiguous [4, 5]", "[4, 4]"),
    (sage(k_sf=torch.ones(2, 2)), ValueError, "k_sf of sage_attn_sfs must be contiguous [2, 3]", "[2, 2]"),
    (sage(v_sf=torch.ones(8)), ValueError, "v_sf of sage_attn_sfs must be contiguous [2, 8]", "[8]"),
    (sage(k_sf=torch.ones(3, 2).T), ValueError, "k_sf of sage_attn_sfs", "contiguous", "(1, 2)"),
    (sage(v_sf=torch.ones(2, 8).bfloat16()), TypeError, "v_sf of sage_attn_sfs must be float32", "bfloat16"),
    (sage(q_sf=[]), TypeError, "q_sf of sage_attn_sfs must be a torch.Tensor", "list"),
    (sage(q_sf=torch.ones(4, 5, device="meta")), ValueError, "sage_attn_sfs is on meta"),
]


@each_of(BAD)
def test_bad_input_is_refused_before_anything_is_written(row: Bad) -> None:
    assert_refused(ragged, good_arguments(), row)


@pytest.mark.parametrize("change", [value(), mirrored(), sage()])
def test_what_the_rows_break_was_good(change: Breaks) -> None:
    good = good_arguments()
    out, _ = ragged(**good | change(good))
    assert (out != POISON).any(dim=-1).all()


def test_lengths_are_on_the_host_where_the_caller_has_them() -> None:
    assert RaggedContextCall(**good_arguments()).host_lengths() is None
    assert RaggedContextCall(**(good_arguments() | mirrored()(good_arguments()))).host_lengths() == ([2, 2], [20, 5])
