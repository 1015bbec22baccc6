"""The ragged context reference against a dense second formula, by hand, in chunks that merge, and on bad input."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.calls.ragged_context import RaggedContextCall, check_ragged_values
from lab.references import paged_attention, trtllm_ragged_attention_deepseek
from tests.cases import (
    Arguments,
    Batch,
    assert_same,
    chunk,
    expected,
    merged,
    mirrors,
    ragged_arguments,
    ragged_batch,
)

ragged = trtllm_ragged_attention_deepseek
E4M3 = torch.float8_e4m3fn
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)


# By hand


def by_hand(queries: list[float], keys: list[float], values: list[float], **changes: Any) -> tuple[Any, Any]:
    """One request of one head whose keys have one element, and values two: the number and its negative."""
    column = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1)
    batch = Batch(
        [torch.tensor(queries, dtype=torch.float64).view(-1, 1, 1)],
        [torch.tensor(keys, dtype=torch.float64).view(-1, 1, 1)],
        [torch.cat((column, -column), dim=2)],
    )
    out, lse = ragged(**ragged_arguments(batch, bmm1_scale=1.0, **changes))
    assert torch.equal(out[..., 1], -out[..., 0])
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


def test_one_key_returns_its_value() -> None:
    out, lse = by_hand([2.0], [3.0], [7.0])
    assert out == [7.0]
    assert lse == pytest.approx([6.0 / math.log(2.0)])


def test_causal_rows_stand_at_the_end_of_their_keys() -> None:
    """Row i of 2 rows over 3 keys sits at position 1 + i; Q = 0 makes the output a mean."""
    out, lse = by_hand([0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0])
    assert out == pytest.approx([1.5, 3.0])
    assert lse == pytest.approx([1.0, math.log2(3.0)])


def test_without_causal_every_row_sees_every_key() -> None:
    out, lse = by_hand([0.0, 0.0], [1.0, 2.0, 3.0], [1.0, 2.0, 6.0], is_causal=False)
    assert out == pytest.approx([3.0, 3.0])
    assert lse == pytest.approx([math.log2(3.0)] * 2)


def test_weights_and_scales() -> None:
    """Weights 1 and 3, and the output doubled."""
    out, lse = by_hand([math.log(3.0)], [0.0, 1.0], [4.0, 8.0], bmm2_scale=2.0)
    assert out == pytest.approx([2 * (4 + 3 * 8) / 4])
    assert lse == pytest.approx([2.0])


def test_a_window() -> None:
    """A row at position p sees p - 1 and p: 2 keys, and row 0 of 3 its own alone."""
    out, lse = by_hand([0.0] * 3, [1.0] * 3, [1.0, 3.0, 9.0], window_left=1)
    assert out == pytest.approx([1.0, 2.0, 6.0])
    assert lse == pytest.approx([0.0, 1.0, 1.0])


def test_a_sink_takes_its_share_and_gives_no_value() -> None:
    out, lse = by_hand([0.0], [1.0] * 3, [8.0] * 3, attention_sinks=torch.tensor([math.log(5.0)]))
    assert out == pytest.approx([3.0])  # 8 * 3 / (3 + 5)
    assert lse == pytest.approx([3.0])


# Against the dense formula


RULES: dict[str, Arguments] = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window_left": 4},
    "window of the row's own key": {"window_left": 0},
    "sinks": {"sinks": torch.tensor([0.0, -2.0, 3.0])},
    "sinks, not causal": {"sinks": torch.tensor([0.0, -math.inf, 30.0]), "causal": False},
    "scales": {"bmm1_scale": 0.375, "bmm2_scale": -1.75},
}
NAMES = {"causal": "is_causal", "sinks": "attention_sinks"}  # of `expected`'s arguments in the call


@pytest.mark.parametrize("name", RULES)
def test_lengths_and_rules(name: str) -> None:
    """Rows fewer than keys, as many, more; requests without rows, and without keys."""
    batch = ragged_batch([1, 3, 5, 0, 4, 2, 0], [1, 20, 5, 7, 2, 0, 0])
    rule = RULES[name]
    call = {NAMES.get(key, key): value for key, value in rule.items()}
    assert_same(ragged(**ragged_arguments(batch, **call)), expected(batch, **rule))


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256), (48, 32), (5, 3), (1, 1), (3, 7)], ids=str)
def test_sizes_of_real_models_and_others(dims: tuple[int, int]) -> None:
    batch = ragged_batch([3, 4], [3, 30], dims=dims)
    assert_same(ragged(**ragged_arguments(batch)), expected(batch))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 1)], ids=str)
def test_heads_share_keys_where_there_are_fewer(heads: tuple[int, int]) -> None:
    batch = ragged_batch([3, 4], [3, 30], heads=heads)
    assert_same(ragged(**ragged_arguments(batch)), expected(batch))


@pytest.mark.parametrize("wrap", [float, lambda value: torch.tensor([value]), torch.tensor])
def test_scales_as_numbers_and_tensors(wrap: Callable[[float], Any]) -> None:
    batch = ragged_batch([3, 4], [3, 30])
    scales = {"bmm1_scale": 0.375, "bmm2_scale": -1.75}
    given_as = {name: wrap(value) for name, value in scales.items()}
    assert_same(ragged(**ragged_arguments(batch, **given_as)), expected(batch, **scales))


def test_rows_without_keys_are_zero_and_their_lse_is_empty() -> None:
    batch = ragged_batch([2, 4, 3], [0, 2, 3])
    out, lse = ragged(**ragged_arguments(batch))
    empty = torch.tensor([True, True, True, True, False, False, False, False, False])
    assert (out[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()
    out, lse = ragged(**ragged_arguments(batch, is_causal=False))
    assert (out[:2] == 0).all()
    assert (lse[:2] == -math.inf).all()
    assert lse[2:].isfinite().all()


def test_rows_and_keys_behind_the_last_request_belong_to_nobody() -> None:
    batch = ragged_batch([2, 3, 2], [9, 30, 4])
    arguments = ragged_arguments(batch)
    truth = expected(Batch(batch.queries[:2], batch.keys[:2], batch.values[:2]))
    arguments["seq_lens"] = arguments["seq_lens"][:2]
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        arguments[name] = arguments[name][:3]
    for name, end in (("query", 5), ("key", 39), ("value", 39)):
        arguments[name][end:] = math.nan
    out, lse = ragged(**arguments | {"batch_size": 2})
    assert_same((out[:5], lse[:5]), truth)
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


def test_strided_rows_keys_and_values() -> None:
    """Values as an up-projection leaves them: after each head's part of the keys."""
    batch = ragged_batch([2, 3], [9, 30])
    arguments = ragged_arguments(batch)
    for name in ("query", "key", "value"):
        wide = torch.full((len(arguments[name]), 4, 30), math.nan, dtype=torch.bfloat16)
        view = wide[:, 1:, 7 : 7 + arguments[name].shape[2]]
        arguments[name] = view.copy_(arguments[name])
    assert_same(ragged(**arguments), expected(batch))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2)]),
    dims=st.sampled_from([(12, 8), (3, 2), (8, 8)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, E4M3]),
    causal=st.booleans(),
    with_sinks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_call(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    causal: bool,
    with_sinks: bool,
    seed: int,
) -> None:
    q_lens, kv_lens = zip(*lengths, strict=True)
    batch = ragged_batch(q_lens, kv_lens, heads=heads, dims=dims, dtype=dtype, seed=seed)
    sinks = torch.linspace(-1, 2, heads[0]) if with_sinks else None
    arguments = ragged_arguments(batch, is_causal=causal, attention_sinks=sinks)
    assert_same(ragged(**arguments), expected(batch, causal=causal, sinks=sinks))


@pytest.mark.parametrize("piece_elements", [1, 50, 300])
def test_pieces_do_not_matter(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged_batch([9, 3, 7], [3, 40, 9])
    monkeypatch.setattr(paged_attention, "PIECE_ELEMENTS", piece_elements)
    for causal in (True, False):
        assert_same(ragged(**ragged_arguments(batch, is_causal=causal)), expected(batch, causal=causal))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_on_a_gpu(device: str) -> None:
    batch = ragged_batch([3, 0, 5], [3, 2, 40], dtype=E4M3)
    arguments = ragged_arguments(batch)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    out, lse = ragged(**moved | mirrors(batch))
    assert_same((out.cpu(), lse.cpu()), expected(batch))


# Chunks


def test_new_tokens_and_chunks_of_the_prefix_merge_to_the_whole() -> None:
    """As SGLang prefills over a cached prefix: new tokens causal, two chunks not, some requests without a key in one."""
    new = [4, 1, 6, 3]
    prefixes = [11, 0, 25, 9]
    lengths = [prefix + rows for prefix, rows in zip(prefixes, new, strict=True)]
    batch = ragged_batch(new, lengths)
    middle = [min(prefix, 10) for prefix in prefixes]
    parts = [
        ragged(**ragged_arguments(chunk(batch, prefixes, lengths), is_causal=True)),
        ragged(**ragged_arguments(chunk(batch, [0] * 4, middle), is_causal=False, o_sf_scale=-1.0)),
        ragged(**ragged_arguments(chunk(batch, middle, prefixes), is_causal=False, o_sf_scale=-1.0)),
    ]
    truth = expected(batch)
    out, lse = merged(parts)
    # The LSE that weighs the parts is float32.
    torch.testing.assert_close(out, truth[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, truth[1], rtol=1e-6, atol=1e-6)


# Where results go


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (E4M3, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_a_new_output(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    batch = ragged_batch([2, 2], [7, 30], dtype=dtype)
    out = ragged(**ragged_arguments(batch, out=None, return_lse=False))
    assert (out.dtype, out.shape) == (out_dtype, (4, 3, 8))
    torch.testing.assert_close(out, expected(batch)[0].to(out_dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_given_output_has_its_own_dtype_and_is_returned(dtype: torch.dtype) -> None:
    batch = ragged_batch([2, 2], [7, 30], dtype=E4M3)
    given_out = torch.full((4, 3, 8), math.nan, dtype=dtype)
    out = ragged(**ragged_arguments(batch, out=given_out, return_lse=False))
    assert out is given_out
    torch.testing.assert_close(out, expected(batch)[0].to(dtype))


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("lse", [torch.full((4, 3), math.nan), torch.full((3, 4), math.nan).T], ids=["rows", "columns"])
def test_a_given_lse_is_filled(return_lse: bool, lse: Tensor) -> None:
    batch = ragged_batch([2, 2], [7, 30])
    lse.fill_(math.nan)
    result = ragged(**ragged_arguments(batch, lse=lse, return_lse=return_lse))
    assert isinstance(result, tuple) == return_lse
    assert not return_lse or result[1] is lse
    torch.testing.assert_close(lse.double(), expected(batch)[1], rtol=1e-6, atol=1e-6)


def test_empty_batch() -> None:
    arguments = ragged_arguments(ragged_batch([0], [0])) | {
        "batch_size": 0,
        "seq_lens": torch.empty(0, dtype=torch.int32),
        "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32),
        "cum_seq_lens_kv": torch.zeros(1, dtype=torch.int32),
    }
    out, lse = ragged(**arguments)
    assert out is arguments["out"]
    assert lse.shape == (0, 3)


# What must not matter


def test_nothing_that_is_read_is_written() -> None:
    arguments = ragged_arguments(ragged_batch([2, 2], [5, 30], dtype=E4M3))
    tensors = [arguments[name] for name in ("query", "key", "value", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv")]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    ragged(**arguments)
    assert all(torch.equal(tensor.view(torch.uint8), copy) for tensor, copy in zip(tensors, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_arguments_that_change_no_result_are_free(dtype: torch.dtype) -> None:
    batch = ragged_batch([2, 3, 0], [7, 0, 4])
    free = {
        "workspace_buffer": torch.zeros(8, device="meta"),
        "enable_pdl": True,
        "o_sf_scale": -1.0,
        "skip_all_rows_active_check": False,
        "window_left": 10**6,
        "seq_lens": torch.tensor([7, 0, 4], dtype=torch.uint32),
        **mirrors(batch, dtype),
    }
    assert_same(ragged(**ragged_arguments(batch) | free), expected(batch))


def test_nan_that_is_read_is_not_hidden() -> None:
    for name in ("query", "key", "value"):
        batch = ragged_batch([1, 1], [5, 20])
        arguments = ragged_arguments(batch)
        arguments[name][-1, :, -1] = math.nan
        nan = ragged(**arguments)[0].isnan()
        assert not nan[0].any()
        assert nan[1].any(dim=-1).all()


# As a stand-in


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_call_has_flashinfers_parameters() -> None:
    flashinfer = pytest.importorskip(
        "flashinfer.prefill", reason="flashinfer is not installed: nothing to compare with"
    )
    assert parameters(RaggedContextCall) == parameters(flashinfer.trtllm_ragged_attention_deepseek)


def test_values_can_be_checked_on_request() -> None:
    arguments = ragged_arguments(ragged_batch([1, 1], [7, 30]))
    problem = RaggedContextCall(**arguments).problem()
    check_ragged_values(problem)
    assert (problem.head_dim, problem.v_head_dim, problem.num_kv_heads, problem.batch_size) == (12, 8, 3, 2)
    arguments["cum_seq_lens_kv"][1] = 8
    with pytest.raises(ValueError, match="running sum"):
        check_ragged_values(problem)
