"""The ragged context reference against a dense second formula, by hand, in chunks that merge, and on bad input."""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.calls.ragged_context import RaggedContextCall, check_ragged_values
from lab.references import paged_attention, trtllm_ragged_attention_deepseek
from tests.cases import Batch, assert_same, running_sum

ragged = trtllm_ragged_attention_deepseek
Arguments = dict[str, Any]
E4M3 = torch.float8_e4m3fn
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)


def ragged_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: tuple[int, int] = (3, 3),
    dims: tuple[int, int] = (12, 8),
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Batch:
    """Normally distributed; `heads` are query and K/V heads, `dims` those of keys and of values."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, num_heads: int, head_dim: int) -> Tensor:
        return torch.randn(length, num_heads, head_dim, generator=generator).to(dtype)

    return Batch(
        [draw(n, heads[0], dims[0]) for n in q_lens],
        [draw(n, heads[1], dims[0]) for n in kv_lens],
        [draw(n, heads[1], dims[1]) for n in kv_lens],
    )


def ragged_arguments(batch: Batch, **changes: Any) -> Arguments:
    """The call that poses a batch, causal, with an output in float64 and the LSE."""
    query, key, value = (torch.cat(side) for side in (batch.queries, batch.keys, batch.values))
    out = torch.full((*query.shape[:2], value.shape[2]), math.nan, dtype=torch.float64)
    arguments: Arguments = {
        "query": query,
        "key": key,
        "value": value,
        "workspace_buffer": None,
        "seq_lens": torch.tensor(batch.kv_lens, dtype=torch.int32),
        "max_q_len": max(batch.q_lens),
        "max_kv_len": max(batch.kv_lens),
        "bmm1_scale": 0.25,
        "bmm2_scale": 1.0,
        "o_sf_scale": 1.0,
        "batch_size": len(batch.queries),
        "window_left": -1,
        "cum_seq_lens_q": running_sum(batch.q_lens),
        "cum_seq_lens_kv": running_sum(batch.kv_lens),
        "enable_pdl": None,
        "is_causal": True,
        "return_lse": True,
        "out": out,
    }
    return arguments | changes


def mirrors(batch: Batch, dtype: torch.dtype = torch.int32) -> Arguments:
    return {
        "q_seq_lens_cpu": torch.tensor(batch.q_lens, dtype=dtype),
        "kv_seq_lens_cpu": torch.tensor(batch.kv_lens, dtype=dtype),
    }


def dense(
    batch: Batch,
    *,
    causal: bool = True,
    window_left: int = -1,
    bmm1_scale: float = 0.25,
    bmm2_scale: float = 1.0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and base-2 LSE, float64: one request's full matrix at a time, masked by torch's own lower triangle."""
    outs, lses = [], []
    for q, k, v in zip(batch.queries, batch.keys, batch.values, strict=True):
        k, v = (side.double().repeat_interleave(q.shape[1] // side.shape[1], dim=1) for side in (k, v))
        logits = torch.einsum("ihd,jhd->hij", q.double(), k) * bmm1_scale
        seen = torch.ones(len(q), len(k), dtype=torch.bool)
        if causal:
            seen = seen.tril(len(k) - len(q))
        if window_left >= 0:
            seen = seen.triu(len(k) - len(q) - window_left)
        logits = logits.masked_fill(~seen, -math.inf)
        sink = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
        logits = torch.cat((logits, sink.double().view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :-1]
        outs.append(torch.einsum("hij,jhd->ihd", weights, v) * bmm2_scale)
        lses.append(torch.logsumexp(logits, dim=-1).T / math.log(2.0))
    return torch.cat(outs), torch.cat(lses)


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
NAMES = {"causal": "is_causal", "sinks": "attention_sinks"}  # of `dense`'s arguments in the call


@pytest.mark.parametrize("name", RULES)
def test_lengths_and_rules(name: str) -> None:
    """Rows fewer than keys, as many, more; requests without rows, and without keys."""
    batch = ragged_batch([1, 3, 5, 0, 4, 2, 0], [1, 20, 5, 7, 2, 0, 0])
    rule = RULES[name]
    call = {NAMES.get(key, key): value for key, value in rule.items()}
    assert_same(ragged(**ragged_arguments(batch, **call)), dense(batch, **rule))


@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (256, 256), (48, 32), (5, 3), (1, 1), (3, 7)], ids=str)
def test_sizes_of_real_models_and_others(dims: tuple[int, int]) -> None:
    batch = ragged_batch([3, 4], [3, 30], dims=dims)
    assert_same(ragged(**ragged_arguments(batch)), dense(batch))


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (6, 1)], ids=str)
def test_heads_share_keys_where_there_are_fewer(heads: tuple[int, int]) -> None:
    batch = ragged_batch([3, 4], [3, 30], heads=heads)
    assert_same(ragged(**ragged_arguments(batch)), dense(batch))


@pytest.mark.parametrize("wrap", [float, lambda value: torch.tensor([value]), torch.tensor])
def test_scales_as_numbers_and_tensors(wrap: Callable[[float], Any]) -> None:
    batch = ragged_batch([3, 4], [3, 30])
    scales = {"bmm1_scale": 0.375, "bmm2_scale": -1.75}
    given_as = {name: wrap(value) for name, value in scales.items()}
    assert_same(ragged(**ragged_arguments(batch, **given_as)), dense(batch, **scales))


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
    expected = dense(Batch(batch.queries[:2], batch.keys[:2], batch.values[:2]))
    arguments["seq_lens"] = arguments["seq_lens"][:2]
    for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
        arguments[name] = arguments[name][:3]
    for name, end in (("query", 5), ("key", 39), ("value", 39)):
        arguments[name][end:] = math.nan
    out, lse = ragged(**arguments | {"batch_size": 2})
    assert_same((out[:5], lse[:5]), expected)
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
    assert_same(ragged(**arguments), dense(batch))


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
    assert_same(ragged(**arguments), dense(batch, causal=causal, sinks=sinks))


@pytest.mark.parametrize("piece_elements", [1, 50, 300])
def test_pieces_do_not_matter(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = ragged_batch([9, 3, 7], [3, 40, 9])
    monkeypatch.setattr(paged_attention, "PIECE_ELEMENTS", piece_elements)
    for causal in (True, False):
        assert_same(ragged(**ragged_arguments(batch, is_causal=causal)), dense(batch, causal=causal))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_on_a_gpu(device: str) -> None:
    batch = ragged_batch([3, 0, 5], [3, 2, 40], dtype=E4M3)
    arguments = ragged_arguments(batch)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    out, lse = ragged(**moved | mirrors(batch))
    assert_same((out.cpu(), lse.cpu()), dense(batch))


# Chunks


def merged(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """What an engine makes of results over disjoint keys: a mean weighted by 2 ** LSE."""
    lses = torch.stack([lse for _, lse in parts]).double()
    total = torch.logsumexp(lses * math.log(2.0), dim=0) / math.log(2.0)
    weights = torch.exp2(lses - total).nan_to_num(0.0)
    return torch.stack([out for out, _ in parts]).mul(weights.unsqueeze(-1)).sum(0), total


def chunk(batch: Batch, starts: Sequence[int], ends: Sequence[int]) -> Batch:
    keys, values = (
        [rows[start:end] for rows, start, end in zip(side, starts, ends, strict=True)]
        for side in (batch.keys, batch.values)
    )
    return Batch(batch.queries, keys, values)


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
    expected = dense(batch)
    out, lse = merged(parts)
    # The LSE that weighs the parts is float32.
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-6, atol=1e-6)


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
    torch.testing.assert_close(out, dense(batch)[0].to(out_dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_given_output_has_its_own_dtype_and_is_returned(dtype: torch.dtype) -> None:
    batch = ragged_batch([2, 2], [7, 30], dtype=E4M3)
    given_out = torch.full((4, 3, 8), math.nan, dtype=dtype)
    out = ragged(**ragged_arguments(batch, out=given_out, return_lse=False))
    assert out is given_out
    torch.testing.assert_close(out, dense(batch)[0].to(dtype))


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("lse", [torch.full((4, 3), math.nan), torch.full((3, 4), math.nan).T], ids=["rows", "columns"])
def test_a_given_lse_is_filled(return_lse: bool, lse: Tensor) -> None:
    batch = ragged_batch([2, 2], [7, 30])
    lse.fill_(math.nan)
    result = ragged(**ragged_arguments(batch, lse=lse, return_lse=return_lse))
    assert isinstance(result, tuple) == return_lse
    assert not return_lse or result[1] is lse
    torch.testing.assert_close(lse.double(), dense(batch)[1], rtol=1e-6, atol=1e-6)


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
    assert_same(ragged(**ragged_arguments(batch) | free), dense(batch))


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


# Bad input

POISON = 7.0


def good_arguments() -> Arguments:
    """Two requests of two rows and 4/2 heads, bf16, into a poisoned `out`."""
    batch = ragged_batch([2, 2], [20, 5], heads=(4, 2))
    return ragged_arguments(batch, out=torch.full((4, 4, 8), POISON, dtype=torch.bfloat16))


def value(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda good: changes


def tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: change(good[name])}


def mirrored(q_lens: Any = (2, 2), kv_lens: Any = (20, 5)) -> Callable[[Arguments], Arguments]:
    def as_tensor(lengths: Any) -> Any:
        return torch.tensor(lengths) if isinstance(lengths, tuple) else lengths

    return value(q_seq_lens_cpu=as_tensor(q_lens), kv_seq_lens_cpu=as_tensor(kv_lens))


def to(where: torch.dtype | str) -> Callable[[Tensor], Tensor]:
    return lambda given_tensor: given_tensor.to(where)


def stretched(given_tensor: Tensor) -> Tensor:
    """Same values, every other element of the last dimension of a tensor twice as wide."""
    return given_tensor.repeat_interleave(2, dim=-1)[..., ::2]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# name, what breaks the good call, error, words of its message
BAD: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]] = [
    # query, key, value
    ("query is a list", value(query=[1]), TypeError, ("query must be a torch.Tensor", "list")),
    ("query rank", tensor("query", lambda q: q[0]), ValueError, ("query must be [num_rows", "[4, 12]")),
    ("query dtype", tensor("query", to(torch.int32)), TypeError, ("query must be", "bfloat16", "int32")),
    ("query stride", tensor("query", stretched), ValueError, ("query", "contiguous", "stride 2")),
    ("key is None", value(key=None), TypeError, ("key must be a torch.Tensor", "NoneType")),
    ("key rank", tensor("key", lambda k: k[:, 0]), ValueError, ("key must be [num_tokens", "[25, 12]")),
    ("key without heads", tensor("key", lambda k: k[:, :0]), ValueError, ("key must be", "[25, 0, 12]")),
    ("key dtype", tensor("key", to(torch.float16)), TypeError, ("key must have the query's dtype", "float16")),
    ("key stride", tensor("key", stretched), ValueError, ("key", "contiguous", "stride 2")),
    ("key head_dim", tensor("key", lambda k: k[..., :8]), ValueError, ("key has head_dim 8", "query has 12")),
    ("value rank", tensor("value", lambda v: v[None]), ValueError, ("value must be [num_tokens", "[1, 25, 2, 8]")),
    ("value dtype", tensor("value", to(E4M3)), TypeError, ("value must have the query's dtype", "float8")),
    ("value stride", tensor("value", stretched), ValueError, ("value", "contiguous", "stride 2")),
    ("value tokens", tensor("value", lambda v: v[1:]), ValueError, ("same tokens and heads", "[24, 2, 8]")),
    ("value heads", tensor("value", lambda v: v[:, :1]), ValueError, ("same tokens and heads", "[25, 1, 8]")),
    (
        "heads",
        value(key=torch.zeros(25, 3, 12).bfloat16(), value=torch.zeros(25, 3, 8).bfloat16()),
        ValueError,
        ("4 heads of query", "3 heads of key"),
    ),
    # lengths and offsets
    ("batch_size", value(batch_size=3), ValueError, ("seq_lens must have shape [3]", "[2]")),
    ("batch_size is None", value(batch_size=None), TypeError, ("batch_size", "None")),
    ("negative batch_size", value(batch_size=-1), ValueError, ("batch_size", "-1")),
    ("lengths are a list", value(seq_lens=[20, 5]), TypeError, ("seq_lens must be a torch.Tensor", "list")),
    ("lengths dtype", tensor("seq_lens", to(torch.int64)), TypeError, ("seq_lens must be int32", "int64")),
    ("negative length", value(seq_lens=int32(-1, 5)), ValueError, ("seq_lens[0] = -1",)),
    ("length beyond the bound", value(max_kv_len=19), ValueError, ("seq_lens[0] = 20", "max_kv_len = 19")),
    ("rows beyond the bound", value(max_q_len=1), ValueError, ("2 rows", "max_q_len = 1")),
    ("bound is None", value(max_kv_len=None), TypeError, ("max_kv_len", "None")),
    ("negative bound", value(max_q_len=-1), ValueError, ("max_q_len", "-1")),
    *(
        row
        for name, last in (("cum_seq_lens_q", 4), ("cum_seq_lens_kv", 25))
        for row in (
            (f"{name} is None", value(**{name: None}), TypeError, (f"{name} must be a torch.Tensor",)),
            (f"{name} dtype", tensor(name, to(torch.int64)), TypeError, (f"{name} must be int32", "int64")),
            (f"{name} of one", value(**{name: int32(0, last)}), ValueError, (f"{name} must have shape [3]", "[2]")),
        )
    ),
    ("rows start at 1", value(cum_seq_lens_q=int32(1, 2, 4)), ValueError, ("cum_seq_lens_q", "start at 0")),
    ("rows decrease", value(cum_seq_lens_q=int32(0, 5, 4)), ValueError, ("cum_seq_lens_q", "decreases")),
    ("rows past the query", value(cum_seq_lens_q=int32(0, 2, 5)), ValueError, ("within the 4 query rows",)),
    (
        "keys unlike the lengths",
        value(cum_seq_lens_kv=int32(0, 19, 25)),
        ValueError,
        ("cum_seq_lens_kv = [0, 19, 25]", "expected [0, 20, 25]"),
    ),
    (
        "keys past the tokens",
        value(cum_seq_lens_kv=int32(0, 20, 26), seq_lens=int32(20, 6)),
        ValueError,
        ("cum_seq_lens_kv ends at 26", "25 tokens"),
    ),
    ("one mirror", value(q_seq_lens_cpu=int32(2, 2)), ValueError, ("go together",)),
    ("mirror is a list", mirrored([2, 2]), TypeError, ("q_seq_lens_cpu must be a torch.Tensor", "list")),
    ("mirror dtype", mirrored((2.0, 2.0)), TypeError, ("q_seq_lens_cpu must be int32, int64", "float32")),
    ("mirror shape", mirrored(kv_lens=(25,)), ValueError, ("kv_seq_lens_cpu must have shape [2]",)),
    ("mirror elsewhere", mirrored(torch.ones(2, device="meta").int()), ValueError, ("on meta", "CPU")),
    ("mirror sum", mirrored(kv_lens=(20, 4)), ValueError, ("kv_seq_lens_cpu = [20, 4]", "all 25 tokens")),
    ("mirror bound", mirrored((3, 1)), ValueError, ("q_seq_lens_cpu = [3, 1]", "bound 2")),
    ("negative mirror", mirrored(kv_lens=(-1, 26)), ValueError, ("kv_seq_lens_cpu = [-1, 26]",)),
    ("mirror unlike the offsets", mirrored(kv_lens=(19, 6)), ValueError, ("[19, 6]", "offsets say [20, 5]")),
    # scales, window, sinks
    ("bmm1_scale", value(bmm1_scale="1"), TypeError, ("bmm1_scale", "'1'")),
    ("bmm1_scale is NaN", value(bmm1_scale=math.nan), ValueError, ("bmm1_scale", "finite", "nan")),
    ("bmm2_scale dtype", value(bmm2_scale=torch.ones(1).double()), TypeError, ("bmm2_scale", "float32", "float64")),
    ("o_sf_scale", value(o_sf_scale=None), TypeError, ("o_sf_scale", "None")),
    ("o_sf_scale is a tensor", value(o_sf_scale=torch.ones(1)), TypeError, ("o_sf_scale must be a number",)),
    ("window", value(window_left=-2), ValueError, ("window_left", "-2")),
    (
        "window, not causal",
        value(window_left=3, is_causal=False),
        NotImplementedError,
        ("is_causal=False with window_left=3", "window_left=-1"),
    ),
    ("sinks dtype", value(attention_sinks=torch.zeros(4).bfloat16()), TypeError, ("attention_sinks must be float32",)),
    ("sinks shape", value(attention_sinks=torch.zeros(2)), ValueError, ("attention_sinks must have shape [4]", "[2]")),
    ("causal", value(is_causal=1), TypeError, ("is_causal", "1")),
    ("skip check", value(skip_all_rows_active_check=None), TypeError, ("skip_all_rows_active_check", "None")),
    # results
    ("out is a list", value(out=[]), TypeError, ("out must be a torch.Tensor", "list")),
    ("out dtype", tensor("out", to(torch.int32)), TypeError, ("out must be", "bfloat16", "int32")),
    ("out of e4m3", tensor("out", to(E4M3)), TypeError, ("out must be float16, bfloat16", "float8_e4m3fn")),
    ("out of the query's shape", value(out=torch.zeros(4, 4, 12)), ValueError, ("out must be [4, 4, 8]", "12]")),
    ("out stride", tensor("out", stretched), ValueError, ("out must be contiguous", "2)")),
    ("lse dtype", value(lse=torch.zeros(4, 4).double()), TypeError, ("lse must be float32", "float64")),
    ("lse shape", value(lse=torch.zeros(2, 4)), ValueError, ("lse must be [num_rows, num_qo_heads] = [4, 4]",)),
    ("lse expanded", value(lse=torch.zeros(4, 1).expand(4, 4)), ValueError, ("lse", "share memory")),
    ("return_lse", value(return_lse=None), TypeError, ("return_lse", "None")),
    # devices
    *(
        (f"{name} elsewhere", tensor(name, to("meta")), ValueError, (f"{name} is on meta", "cpu"))
        for name in ("key", "value", "seq_lens", "cum_seq_lens_q", "cum_seq_lens_kv", "out")
    ),
    ("scale elsewhere", value(bmm1_scale=torch.ones(1, device="meta")), ValueError, ("bmm1_scale is on meta",)),
    # backends, and what the lab does not model
    ("backend", value(backend="fa3"), ValueError, ("backend='fa3'", "trtllm-gen")),
    ("cute-dsl", value(backend="cute-dsl"), NotImplementedError, ("backend='cute-dsl'", "use trtllm-gen")),
    *(
        (name, value(**{name: argument}), NotImplementedError, (f"{name}=", "not modelled", "default"))
        for name, argument in (
            ("skip_softmax_threshold_scale_factor", 0.0),
            ("sage_attn_sfs", (torch.ones(1), None, None, None)),
            ("num_elts_per_sage_attn_blk", (1, 0, 0, 0)),
            ("use_fp16_softmax", True),
            ("uses_spcompress", False),
        )
    ),
    ("unknown argument", value(causal=True), TypeError, ("causal",)),
]


@pytest.mark.parametrize(("breaks", "error", "says"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_input_is_refused_before_anything_is_written(
    breaks: Callable[[Arguments], Arguments], error: type[Exception], says: tuple[str, ...]
) -> None:
    good = good_arguments()
    out, lse = good["out"], torch.full((4, 4), POISON)
    with pytest.raises(error) as raised:
        ragged(**good | {"lse": lse} | breaks(good))
    missing = [words for words in says if words not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (out == POISON).all()
    assert (lse == POISON).all()


@pytest.mark.parametrize("change", [value(), mirrored()])
def test_what_the_rows_break_was_good(change: Callable[[Arguments], Arguments]) -> None:
    good = good_arguments()
    out, _ = ragged(**good | change(good))
    assert (out != POISON).any(dim=-1).all()
