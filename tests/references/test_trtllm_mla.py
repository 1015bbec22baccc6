"""The MLA decode reference against a dense second formula, hand-computed cases, what must not matter, and bad input."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import check_values
from lab.references import attention, eager_attention, paged_attention, trtllm_batch_decode_with_kv_cache_mla
from tests.cases import assert_same, running_sum, write_pages

mla = trtllm_batch_decode_with_kv_cache_mla
Arguments = dict[str, Any]
P, RANK, ROPE = 16, 8, 4
E4M3 = torch.float8_e4m3fn
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)


@dataclass(frozen=True)
class Batch:
    """queries[r]: [q_len, num_qo_heads, rank + rope]; entries[r]: [kv_len, rank + rope], the latent vector first."""

    queries: list[Tensor]
    entries: list[Tensor]
    rank: int = RANK

    @property
    def q_lens(self) -> list[int]:
        return [len(rows) for rows in self.queries]


def random_batch(
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    heads: int = 4,
    rank: int = RANK,
    rope: int = ROPE,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(
        [torch.randn(n, heads, rank + rope, generator=generator).to(dtype) for n in q_lens],
        [torch.randn(n, rank + rope, generator=generator).to(kv_dtype or dtype) for n in kv_lens],
        rank,
    )


def mla_arguments(
    batch: Batch,
    page_size: int = P,
    *,
    ragged: bool = False,
    poison: float = 0.0,
    foreign_id: int | None = None,
    seed: int = 0,
    **changes: Any,
) -> Arguments:
    """The call that poses a batch, from a shuffled pool, with an output in float64 and the LSE."""
    histories = [entries.unsqueeze(1) for entries in batch.entries]
    cache, table = write_pages(histories, page_size, seed=seed, poison=poison, foreign_id=foreign_id)
    query = torch.cat(batch.queries) if ragged else torch.stack(batch.queries)
    arguments: Arguments = {
        "query": query,
        "kv_cache": cache,
        "workspace_buffer": None,
        "qk_nope_head_dim": 6,
        "kv_lora_rank": batch.rank,
        "qk_rope_head_dim": query.shape[-1] - batch.rank,
        "block_tables": table,
        "seq_lens": torch.tensor([len(entries) for entries in batch.entries], dtype=torch.int32),
        "max_seq_len": max(len(entries) for entries in batch.entries),
        "out": torch.full((*query.shape[:-1], batch.rank), math.nan, dtype=torch.float64),
        "return_lse": True,
        "return_lse_base": "base2",
    }
    if ragged:
        arguments |= {"cum_seq_lens_q": running_sum(batch.q_lens), "max_q_len": max(batch.q_lens)}
    return arguments | changes


def dense(
    batch: Batch, *, bmm1_scale: float = 1.0, bmm2_scale: float = 1.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output [num_rows, heads, rank] and base-2 LSE [num_rows, heads], float64: one request's full matrix at a time."""
    outs, lses = [], []
    for rows, entries in zip(batch.queries, batch.entries, strict=True):
        q, k = rows.double(), entries.double()
        logits = torch.einsum("ihd,jd->ihj", q, k) * bmm1_scale
        positions = len(k) - len(q) + torch.arange(len(q))
        later = torch.arange(len(k)) > positions.unsqueeze(1)
        logits = logits.masked_fill(later.unsqueeze(1), -math.inf)
        sink = torch.full((q.shape[1],), -math.inf) if sinks is None else sinks
        logits = torch.cat((logits, sink.double().view(1, -1, 1).expand(len(q), -1, 1)), dim=-1)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)[..., :-1]
        outs.append(torch.einsum("ihj,jd->ihd", weights, k[:, : batch.rank]) * bmm2_scale)
        lses.append(torch.logsumexp(logits, dim=-1) / math.log(2.0))
    return torch.cat(outs), torch.cat(lses)


def assert_right(result: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor]) -> None:
    """The call's result, whose output may have the requests as a dimension, against `dense`'s rows."""
    out, lse = result
    assert_same((out.reshape(truth[0].shape), lse), truth)


# By hand


def by_hand(entries: list[list[float]], query: list[float], **changes: Any) -> tuple[list[float], float]:
    """One row of one head, a latent vector of 2 and a rotary part of 1."""
    batch = Batch([torch.tensor([[query]])], [torch.tensor(entries)], rank=2)
    out, lse = mla(**mla_arguments(batch, **changes))
    return out.flatten().tolist(), lse.item()


def test_one_key_returns_its_latent_part() -> None:
    out, lse = by_hand([[3.0, -5.0, 7.0]], [1.0, 2.0, 4.0], bmm1_scale=math.log(2.0))
    assert out == [3.0, -5.0]
    assert lse == pytest.approx(3.0 - 10.0 + 28.0)


def test_two_keys_whose_rotary_parts_make_the_weights() -> None:
    out, lse = by_hand([[1.0, 10.0, 0.0], [5.0, 20.0, 2.0]], [0.0, 0.0, 1.0], bmm1_scale=math.log(3.0) / 2)
    assert out == pytest.approx([(1 + 3 * 5) / 4, (10 + 3 * 20) / 4])  # weights 1 and 3
    assert lse == pytest.approx(2.0)


def test_two_keys_whose_latent_parts_make_the_weights() -> None:
    out, _ = by_hand([[0.0, 10.0, 9.0], [1.0, 20.0, 9.0]], [math.log(4.0), 0.0, 0.0], bmm2_scale=2.0)
    assert out == pytest.approx([2 * 4 / 5, 2 * (10 + 4 * 20) / 5])  # weights 1 and 4


def test_causal_rows_by_hand() -> None:
    """Row i of 2 rows over 3 keys sits at position 1 + i; Q = 0 makes the output a mean."""
    batch = Batch([torch.zeros(2, 1, 2)], [torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 0.0]])], rank=1)
    out, lse = mla(**mla_arguments(batch))
    assert out.flatten().tolist() == [1.5, 3.0]
    torch.testing.assert_close(lse.flatten().tolist(), [1.0, math.log2(3.0)])


def test_a_sink_takes_its_share_and_gives_no_value() -> None:
    batch = Batch([torch.zeros(1, 2, 2)], [torch.full((3, 2), 8.0)], rank=1)
    out, lse = mla(**mla_arguments(batch, sinks=torch.tensor([0.0, math.log(5.0)])))
    torch.testing.assert_close(out.flatten().tolist(), [6.0, 3.0])  # 8 * 3 / (3 + 1) and 8 * 3 / (3 + 5)
    torch.testing.assert_close(lse.flatten().tolist(), [2.0, 3.0])


# Against the dense formula


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 4, 32, 64])
def test_lengths_at_page_edges(page_size: int, q_len: int) -> None:
    kv_lens = [max(0, pages * page_size + rest) for pages in (0, 1, 2) for rest in (-1, 0, 1)]
    batch = random_batch([q_len] * len(kv_lens), kv_lens)
    assert_right(mla(**mla_arguments(batch, page_size, poison=math.nan)), dense(batch))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (E4M3, E4M3),
        (torch.bfloat16, E4M3),
        (torch.float16, E4M3),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
@pytest.mark.parametrize("second_dimension", [False, True])
def test_dtypes_and_cache_ranks(dtype: torch.dtype, kv_dtype: torch.dtype, second_dimension: bool) -> None:
    batch = random_batch([2] * 4, [0, 1, 16, 37], dtype=dtype, kv_dtype=kv_dtype)
    arguments = mla_arguments(batch, bmm1_scale=0.25)
    if not second_dimension:
        arguments["kv_cache"] = arguments["kv_cache"].squeeze(1)
    assert_right(mla(**arguments), dense(batch, bmm1_scale=0.25))


@pytest.mark.parametrize(("rank", "rope"), [(1, 0), (1, 1), (256, 64), (512, 64), (512, 0)])
def test_sizes_of_real_models_and_small_ones(rank: int, rope: int) -> None:
    batch = random_batch([2, 2], [9, 70], rank=rank, rope=rope, heads=3)
    assert_right(mla(**mla_arguments(batch, 32, bmm1_scale=0.05)), dense(batch, bmm1_scale=0.05))


def test_a_cache_that_is_a_view_of_a_wider_pool() -> None:
    batch = random_batch([1, 1], [9, 30])
    arguments = mla_arguments(batch)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat((cache, torch.full_like(cache, math.nan)), dim=-1)[..., : RANK + ROPE]
    assert_right(mla(**arguments), dense(batch))


def test_a_query_whose_rows_are_strided() -> None:
    batch = random_batch([2, 2], [9, 30])
    arguments = mla_arguments(batch)
    query = arguments["query"]
    arguments["query"] = torch.cat((query, torch.full_like(query, math.nan)), dim=2)[:, :, :4]
    assert_right(mla(**arguments), dense(batch))


def as_tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


@pytest.mark.parametrize("wrap", [float, as_tensor, torch.tensor])
def test_scales(wrap: Callable[[float], Any]) -> None:
    batch = random_batch([2, 2], [7, 30], dtype=E4M3)
    scales = {"bmm1_scale": 0.375, "bmm2_scale": -1.75}
    given_as = {name: wrap(value) for name, value in scales.items()}
    assert_right(mla(**mla_arguments(batch, **given_as)), dense(batch, **scales))


@pytest.mark.parametrize("wrap", [lambda sinks: sinks, lambda sinks: [sinks], lambda sinks: (sinks,)])
@pytest.mark.parametrize(
    "sinks",
    [torch.tensor([0.0, 0.5, -1.0, 3.0]), torch.tensor([-math.inf, 50.0, 300.0, -1e30])],
    ids=["plain", "mixed"],
)
def test_sinks(sinks: Tensor, wrap: Callable[[Tensor], Any]) -> None:
    batch = random_batch([3] * 3, [2, 3, 25])
    arguments = mla_arguments(batch, sinks=wrap(sinks), bmm1_scale=0.25)
    assert_right(mla(**arguments), dense(batch, sinks=sinks, bmm1_scale=0.25))


def test_rows_before_the_first_key_are_zero_and_their_lse_is_empty() -> None:
    out, lse = mla(**mla_arguments(random_batch([4] * 3, [0, 2, 4])))
    empty = torch.tensor([True] * 4 + [True, True, False, False] + [False] * 4)
    assert (out.flatten(0, 1)[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize("max_q_len", [7, 100, None])
def test_variable_query_lengths(max_q_len: int | None) -> None:
    batch = random_batch([0, 3, 1, 0, 7, 2, 0], [5, 20, 1, 0, 4, 50, 9])
    assert_right(mla(**mla_arguments(batch, ragged=True, max_q_len=max_q_len)), dense(batch))


@pytest.mark.parametrize("max_q_len", [3, None])
def test_rows_after_the_last_offset_are_padding(max_q_len: int | None) -> None:
    batch = random_batch([2, 3, 2], [9, 30, 4])
    arguments = mla_arguments(batch, ragged=True, max_q_len=max_q_len)
    arguments["query"][5:] = math.nan
    for name in ("block_tables", "seq_lens"):
        arguments[name] = arguments[name][:2]
    arguments["cum_seq_lens_q"] = arguments["cum_seq_lens_q"][:3]
    out, lse = mla(**arguments)
    assert_right((out[:5], lse[:5]), dense(Batch(batch.queries[:2], batch.entries[:2])))
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=4),
    q_len=st.integers(1, 4),
    heads=st.integers(1, 6),
    rank=st.sampled_from([1, 8, 20]),
    rope=st.sampled_from([0, 1, 8]),
    page_size=st.sampled_from([1, 4, 16, 32, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, E4M3]),
    with_sinks=st.booleans(),
    ragged=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_call(
    lengths: list[int],
    q_len: int,
    heads: int,
    rank: int,
    rope: int,
    page_size: int,
    dtype: torch.dtype,
    with_sinks: bool,
    ragged: bool,
    seed: int,
) -> None:
    q_lens = [(q_len + request) % 5 if ragged else q_len for request in range(len(lengths))]
    batch = random_batch(q_lens, lengths, heads=heads, rank=rank, rope=rope, dtype=dtype, seed=seed)
    sinks = torch.linspace(-1, 2, heads) if with_sinks else None
    rule: Any = {"sinks": sinks, "bmm1_scale": 0.3, "bmm2_scale": 1.5}
    arguments = mla_arguments(
        batch, page_size, ragged=ragged, poison=math.nan, foreign_id=2**31 - 1, seed=seed, **rule, max_seq_len=70
    )
    assert_right(mla(**arguments), dense(batch, **rule))


@pytest.mark.parametrize("piece_elements", [1, 300, 2000])
def test_pieces_do_not_matter(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = random_batch([9] * 5, [3, 40, 1, 20, 70])
    monkeypatch.setattr(paged_attention, "PIECE_ELEMENTS", piece_elements)
    assert_right(mla(**mla_arguments(batch, poison=math.nan)), dense(batch))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_on_a_gpu(device: str) -> None:
    batch = random_batch([3] * 4, [0, 2, 16, 37], dtype=E4M3)
    arguments = mla_arguments(batch, poison=math.nan)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    out, lse = mla(**moved)
    assert_right((out.cpu(), lse.cpu()), dense(batch))


# What must not matter


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("foreign_id", [None, -1, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_dead_memory_changes_no_bit(poison: float, foreign_id: int | None, dtype: torch.dtype) -> None:
    batch = random_batch([2] * 5, [0, 1, 15, 16, 33], dtype=dtype)
    clean = mla(**mla_arguments(batch))
    poisoned = mla(**mla_arguments(batch, poison=poison, foreign_id=foreign_id))
    assert poisoned[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_nan_that_is_read_is_not_hidden() -> None:
    for column in (0, RANK + ROPE - 1):
        batch = random_batch([1, 1], [5, 20])
        batch.entries[1][0, column] = math.nan
        nan = mla(**mla_arguments(batch))[0].isnan()
        assert not nan[0].any()
        assert nan[1].all()


def test_nothing_that_is_read_is_written() -> None:
    arguments = mla_arguments(random_batch([2, 2], [5, 30], dtype=E4M3), poison=math.nan)
    tensors = [arguments[name] for name in ("query", "kv_cache", "block_tables", "seq_lens")]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    mla(**arguments)
    assert all(torch.equal(tensor.view(torch.uint8), copy) for tensor, copy in zip(tensors, before, strict=True))


def test_arguments_that_change_no_result_are_free() -> None:
    batch = random_batch([1, 1], [7, 30])
    free = {
        "workspace_buffer": torch.zeros(8, device="meta"),
        "enable_pdl": True,
        "multi_ctas_kv_counter_buffer": torch.zeros(8, device="meta"),
        "qk_nope_head_dim": 128,
    }
    for backend in ("auto", "xqa", "trtllm-gen"):
        assert_right(mla(**mla_arguments(batch, backend=backend) | free), dense(batch))


# Where results go


@pytest.mark.parametrize("dtype", [torch.float16, E4M3, torch.float64])
def test_a_new_output_is_bfloat16(dtype: torch.dtype) -> None:
    batch = random_batch([2, 2], [7, 30], dtype=dtype)
    out = mla(**mla_arguments(batch, out=None, return_lse=False))
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 2, 4, RANK))
    truth = dense(batch)[0].to(torch.bfloat16)
    torch.testing.assert_close(out.flatten(0, 1), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, E4M3])
def test_a_given_output_has_its_own_dtype_and_is_returned(dtype: torch.dtype) -> None:
    batch = random_batch([2, 2], [7, 30])
    given_out = torch.full((2, 2, 4, RANK), math.nan).to(dtype)
    out = mla(**mla_arguments(batch, out=given_out, return_lse=False))
    assert out is given_out
    truth = dense(batch)[0].to(dtype).double()
    torch.testing.assert_close(out.flatten(0, 1).double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_shapes_of_ragged_results() -> None:
    batch = random_batch([1, 3], [7, 30])
    out, lse = mla(**mla_arguments(batch, ragged=True, out=None))
    assert (out.shape, lse.shape) == ((4, 4, RANK), (4, 4))


@pytest.mark.parametrize("base", [None, "base2", "basee"])
@pytest.mark.parametrize("shape", [None, (6, 4), (3, 2, 4)])
def test_lse(base: str | None, shape: tuple[int, ...] | None) -> None:
    batch = random_batch([2] * 3, [1, 7, 30])
    lse = None if shape is None else torch.full(shape, math.nan)
    _, returned = mla(**mla_arguments(batch, lse=lse, return_lse_base=base))
    assert lse is None or returned is lse
    assert returned.dtype == torch.float32
    assert returned.shape == (shape or (6, 4))
    truth = dense(batch)[1] * (math.log(2.0) if base == "basee" else 1.0)
    torch.testing.assert_close(returned.reshape(6, 4).double(), truth, rtol=1e-6, atol=1e-6)


def test_lse_of_a_ragged_call() -> None:
    batch = random_batch([1, 3], [7, 30])
    lse = torch.full((4, 4), math.nan)
    assert mla(**mla_arguments(batch, ragged=True, lse=lse, return_lse_base="basee"))[1] is lse
    torch.testing.assert_close(lse.double(), dense(batch)[1] * math.log(2.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_empty_batch(ragged: bool) -> None:
    arguments = mla_arguments(random_batch([1], [7]), ragged=ragged)
    arguments |= {name: arguments[name][:0] for name in ("query", "block_tables", "seq_lens", "out")}
    arguments |= {"max_seq_len": 0}
    if ragged:
        arguments |= {"cum_seq_lens_q": torch.zeros(1, dtype=torch.int32), "max_q_len": None}
    out, lse = mla(**arguments)
    assert out is arguments["out"]
    assert lse.shape == (0, 4)


# The functions under it, where V is narrower than K


def test_attention_and_its_control_take_values_of_another_head_dim() -> None:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(shape, generator=generator) for shape in ((2, 3, 4, 12), (2, 20, 2, 12)))
    inputs: Any = {"query": query, "keys": keys, "values": keys[..., :5], "visible": torch.ones(2, 3, 20) > 0}
    truth, _ = attention(**inputs)
    padded, _ = attention(**inputs | {"values": torch.nn.functional.pad(keys[..., :5], (0, 7))})
    # Not bit for bit: how a product is summed may depend on its shape, and does on some CPUs.
    torch.testing.assert_close(padded[..., :5], truth, rtol=1e-13, atol=1e-14)
    control = eager_attention(**inputs, arithmetic=torch.float32, out_dtype=torch.float32)
    torch.testing.assert_close(control.double(), truth, rtol=1e-4, atol=1e-5)
    nothing: Any = {"keys": keys[:, :0], "values": keys[:, :0, :, :5], "visible": inputs["visible"][..., :0]}
    control = eager_attention(query, **nothing, arithmetic=torch.float32, out_dtype=torch.float32)
    assert torch.equal(control, torch.zeros(2, 3, 4, 5))


# As a stand-in


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_parameters_are_flashinfers() -> None:
    flashinfer = pytest.importorskip("flashinfer.mla", reason="flashinfer is not installed: nothing to compare with")
    flashinfers = parameters(flashinfer.trtllm_batch_decode_with_kv_cache_mla)
    assert parameters(mla) == flashinfers
    assert parameters(MLADecodeCall) == flashinfers


def test_positional_arguments() -> None:
    batch = random_batch([1, 1], [7, 30])
    arguments = mla_arguments(batch)
    leading = [arguments.pop(name) for name in list(inspect.signature(mla).parameters)[:9]]
    assert_right(mla(*leading, **arguments), dense(batch))


def test_values_can_be_checked_on_request() -> None:
    arguments = mla_arguments(random_batch([1, 1], [7, 30]))
    problem = MLADecodeCall(**arguments).problem()
    check_values(problem)
    assert (problem.head_dim, problem.v_head_dim, problem.num_kv_heads) == (RANK + ROPE, RANK, 1)
    assert problem.v_cache.data_ptr() == problem.k_cache.data_ptr()
    arguments["block_tables"][0, 0] = 1000
    with pytest.raises(ValueError, match="page id 1000"):
        check_values(problem)


# Bad input

POISON = 7.0


def good_arguments() -> Arguments:
    """Two requests of two rows and 4 heads, bf16, into a poisoned `out`."""
    out = torch.full((2, 2, 4, RANK), POISON, dtype=torch.bfloat16)
    return mla_arguments(random_batch([2, 2], [20, 5]), out=out)


def value(**changes: Any) -> Callable[[Arguments], Arguments]:
    return lambda good: changes


def tensor(name: str, change: Callable[[Tensor], Any]) -> Callable[[Arguments], Arguments]:
    return lambda good: {name: change(good[name])}


def entry(name: str, index: tuple[int, ...], number: int) -> Callable[[Arguments], Arguments]:
    def breaks(good: Arguments) -> Arguments:
        changed = good[name].clone()
        changed[index] = number
        return {name: changed}

    return breaks


def to(where: torch.dtype | str) -> Callable[[Tensor], Tensor]:
    return lambda given_tensor: given_tensor.to(where)


def stretched(given_tensor: Tensor) -> Tensor:
    """Same values, every other element of the last dimension of a tensor twice as wide."""
    return given_tensor.repeat_interleave(2, dim=-1)[..., ::2]


def ragged(**changes: Any) -> Callable[[Arguments], Arguments]:
    """The good call with its rows counted by offsets, then changed."""

    def breaks(good: Arguments) -> Arguments:
        rows = {name: good[name].flatten(0, 1) for name in ("query", "out")}
        return rows | {"cum_seq_lens_q": torch.tensor([0, 2, 4], dtype=torch.int32), "max_q_len": 2} | changes

    return breaks


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# name, what breaks the good call, error, words of its message
BAD: list[tuple[str, Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]] = [
    # query
    ("query is a list", value(query=[1]), TypeError, ("query must be a torch.Tensor", "list")),
    (
        "query flat",
        tensor("query", lambda q: q.flatten(0, 1)),
        ValueError,
        ("query must be [batch_size, q_len_per_request", "without cum_seq_lens_q", "[4, 4, 12]"),
    ),
    (
        "ragged query of four dimensions",
        ragged(query=torch.zeros(2, 2, 4, 12)),
        ValueError,
        ("query must be [num_rows", "with cum_seq_lens_q", "[2, 2, 4, 12]"),
    ),
    ("query without rows", tensor("query", lambda q: q[:, :0]), ValueError, ("at least one row", "[2, 0, 4, 12]")),
    ("query without heads", tensor("query", lambda q: q[:, :, :0]), ValueError, ("query", "at least one head")),
    ("query dtype", tensor("query", to(torch.int32)), TypeError, ("query must be", "bfloat16", "int32")),
    ("query stride", tensor("query", stretched), ValueError, ("query", "contiguous", "stride 2")),
    (
        "query head_dim",
        tensor("query", lambda q: q[..., :11]),
        ValueError,
        ("query has head_dim 11", "kv_lora_rank=8", "qk_rope_head_dim=4", "12"),
    ),
    ("query batch", tensor("query", lambda q: q[:1]), ValueError, ("query has 1 requests", "block_tables has 2")),
    # sizes
    ("no latent part", value(kv_lora_rank=0), ValueError, ("kv_lora_rank", "at least 1", "0")),
    ("latent part is a float", value(kv_lora_rank=8.0), TypeError, ("kv_lora_rank", "8.0")),
    ("negative rotary part", value(qk_rope_head_dim=-1), ValueError, ("qk_rope_head_dim", "at least 0", "-1")),
    ("nope head_dim", value(qk_nope_head_dim=None), TypeError, ("qk_nope_head_dim", "None")),
    ("sizes disagree", value(kv_lora_rank=9), ValueError, ("kv_lora_rank=9", "make 13", "12")),
    # kv_cache
    ("cache is a pair", value(kv_cache=(1, 2)), TypeError, ("kv_cache must be a torch.Tensor", "tuple")),
    ("cache dtype", tensor("kv_cache", to(torch.float16)), TypeError, ("kv_cache", "bfloat16, float8", "float16")),
    ("packed cache", tensor("kv_cache", to(torch.uint8)), NotImplementedError, ("kv_cache is uint8", "use bfloat16")),
    (
        "NHD cache",
        tensor("kv_cache", lambda c: c.transpose(1, 2)),
        ValueError,
        ("kv_cache must be", "one head", "1, 12]"),
    ),
    ("two heads", tensor("kv_cache", lambda c: c.repeat(1, 2, 1, 1)), ValueError, ("kv_cache must be", "one head")),
    ("cache rank", tensor("kv_cache", lambda c: c[0, 0]), ValueError, ("kv_cache must be", "got shape [16, 12]")),
    ("cache head_dim", tensor("kv_cache", lambda c: c[..., :8]), ValueError, ("kv_cache must be", "12]", "8]")),
    ("cache stride", tensor("kv_cache", stretched), ValueError, ("kv_cache", "contiguous", "stride 2")),
    ("page size", tensor("kv_cache", lambda c: c[:, :, :12]), ValueError, ("page_size 12", "power of two")),
    # tables and lengths
    ("tables are None", value(block_tables=None), TypeError, ("block_tables", "NoneType")),
    ("tables dtype", tensor("block_tables", to(torch.int64)), TypeError, ("block_tables must be int32", "int64")),
    ("tables rank", tensor("block_tables", lambda t: t[0]), ValueError, ("block_tables must be [batch_size", "shape")),
    ("tables stride", tensor("block_tables", stretched), ValueError, ("block_tables rows must be contiguous",)),
    ("page id", entry("block_tables", (1, 0), 1000), ValueError, ("page id 1000", "request 1")),
    ("lengths are None", value(seq_lens=None), TypeError, ("seq_lens must be a torch.Tensor", "NoneType")),
    ("lengths dtype", tensor("seq_lens", to(torch.int64)), TypeError, ("seq_lens must be int32", "int64")),
    ("lengths shape", tensor("seq_lens", lambda s: s[:1]), ValueError, ("seq_lens must have shape [2]", "[1]")),
    ("negative length", entry("seq_lens", (0,), -1), ValueError, ("seq_lens[0] = -1",)),
    ("length beyond the bound", value(max_seq_len=19), ValueError, ("seq_lens[0] = 20", "19")),
    ("length beyond the table", entry("seq_lens", (0,), 1000), ValueError, ("seq_lens[0] = 1000", "widen")),
    ("bound", value(max_seq_len=-1), ValueError, ("max_seq_len", "-1")),
    ("bound is None", value(max_seq_len=None), TypeError, ("max_seq_len", "None")),
    # ragged rows
    ("max_q_len alone", value(max_q_len=2), ValueError, ("max_q_len=2", "needs cum_seq_lens_q")),
    ("max_q_len too low", ragged(max_q_len=1), ValueError, ("2 rows", "max_q_len = 1")),
    ("negative max_q_len", ragged(max_q_len=-1), ValueError, ("max_q_len", "-1")),
    ("max_q_len is a float", ragged(max_q_len=2.0), TypeError, ("max_q_len", "2.0")),
    ("offsets are a list", ragged(cum_seq_lens_q=[0, 2, 4]), TypeError, ("cum_seq_lens_q", "list")),
    ("offsets dtype", ragged(cum_seq_lens_q=int32(0, 2, 4).long()), TypeError, ("cum_seq_lens_q", "int32", "int64")),
    ("offsets of one", ragged(cum_seq_lens_q=int32(0, 4)), ValueError, ("cum_seq_lens_q", "[3]", "[2]")),
    ("offsets decrease", ragged(cum_seq_lens_q=int32(0, 5, 4)), ValueError, ("cum_seq_lens_q", "decreases")),
    ("offsets start", ragged(cum_seq_lens_q=int32(1, 2, 4)), ValueError, ("cum_seq_lens_q", "start at 0")),
    (
        "offsets past the rows",
        ragged(cum_seq_lens_q=int32(0, 2, 5), max_q_len=None),
        ValueError,
        ("cum_seq_lens_q", "within the 4 query rows"),
    ),
    # scales and sinks
    ("bmm1_scale", value(bmm1_scale="1"), TypeError, ("bmm1_scale", "'1'")),
    ("bmm1_scale is NaN", value(bmm1_scale=math.nan), ValueError, ("bmm1_scale", "finite", "nan")),
    ("bmm1_scale dtype", value(bmm1_scale=torch.ones(1).double()), TypeError, ("bmm1_scale", "float32", "float64")),
    ("bmm2_scale", value(bmm2_scale=None), TypeError, ("bmm2_scale", "None")),
    ("bmm2_scale per head", value(bmm2_scale=torch.ones(4)), TypeError, ("bmm2_scale", "one element", "[4]")),
    ("sinks dtype", value(sinks=torch.zeros(4).bfloat16()), TypeError, ("sinks must be float32", "bfloat16")),
    ("sinks shape", value(sinks=torch.zeros(3)), ValueError, ("sinks must have shape [4]", "[3]")),
    ("two sinks", value(sinks=[torch.zeros(4)] * 2), ValueError, ("sinks must be one tensor", "2 of them")),
    ("sinks are numbers", value(sinks=[0.0]), TypeError, ("sinks must be a torch.Tensor", "float")),
    ("sinks are a number", value(sinks=1.0), TypeError, ("sinks must be a torch.Tensor", "float")),
    # results
    ("out is a list", value(out=[]), TypeError, ("out must be a torch.Tensor", "list")),
    ("out dtype", tensor("out", to(torch.int32)), TypeError, ("out must be", "bfloat16", "int32")),
    ("out of the query's shape", value(out=torch.zeros(2, 2, 4, 12)), ValueError, ("out must be [2, 2, 4, 8]", "12]")),
    ("out flat", tensor("out", lambda o: o.flatten(0, 1)), ValueError, ("out must be [2, 2, 4, 8]", "[4, 4, 8]")),
    ("out stride", tensor("out", stretched), ValueError, ("out must be contiguous", "2)")),
    ("lse dtype", value(lse=torch.zeros(4, 4).double()), TypeError, ("lse must be float32", "float64")),
    ("lse shape", value(lse=torch.zeros(2, 4)), ValueError, ("lse must be [4, 4] or [2, 2, 4]", "got [2, 4]")),
    ("ragged lse shape", ragged(lse=torch.zeros(2, 2, 4)), ValueError, ("lse must be [4, 4], got",)),
    ("lse expanded", value(lse=torch.zeros(4, 1).expand(4, 4)), ValueError, ("lse must be contiguous", "(1, 0)")),
    ("lse is a list", value(lse=[]), TypeError, ("lse must be a torch.Tensor", "list")),
    (
        "lse that is not returned",
        value(lse=torch.zeros(4, 4), return_lse=False),
        ValueError,
        ("lse without return_lse=True", "pass both or neither"),
    ),
    ("return_lse", value(return_lse=None), TypeError, ("return_lse", "None")),
    ("lse base", value(return_lse_base="base10"), ValueError, ("return_lse_base", "'basee'", "'base10'")),
    (
        "ragged lse of no base",
        ragged(return_lse_base=None),
        ValueError,
        ("return_lse with cum_seq_lens_q needs return_lse_base",),
    ),
    # devices
    *(
        (f"{name} elsewhere", tensor(name, to("meta")), ValueError, (f"{name} is on meta", "cpu"))
        for name in ("kv_cache", "block_tables", "seq_lens", "out")
    ),
    ("query elsewhere", tensor("query", to("meta")), ValueError, ("query is on meta", "cpu")),
    ("offsets elsewhere", ragged(cum_seq_lens_q=int32(0, 2, 4).to("meta")), ValueError, ("cum_seq_lens_q is on meta",)),
    ("sinks elsewhere", value(sinks=[torch.zeros(4, device="meta")]), ValueError, ("sinks is on meta", "cpu")),
    ("scale elsewhere", value(bmm1_scale=torch.ones(1, device="meta")), ValueError, ("bmm1_scale is on meta",)),
    ("lse elsewhere", value(lse=torch.zeros(4, 4, device="meta")), ValueError, ("lse is on meta",)),
    # backends, and what the lab does not model
    ("backend", value(backend="fa3"), ValueError, ("backend='fa3'", "auto, xqa, trtllm-gen")),
    *(
        (f"backend {name}", value(backend=name), NotImplementedError, (f"backend='{name}'", "auto, xqa, trtllm-gen"))
        for name in ("cake", "cute-dsl", "sparse")
    ),
    *(
        (name, value(**{name: argument}), NotImplementedError, (f"{name}=", "not modelled", "default"))
        for name, argument in (
            ("sparse_mla_top_k", 2048),
            ("sparse_mla_top_k_lens", int32(1, 1, 1, 1)),
            ("skip_softmax_threshold_scale_factor", 0.0),
            ("is_var_seq", False),
            ("cute_dsl_impl", "modular"),
            ("kv_scale_format", "pow2_fp32"),
            ("enable_dcp", True),
            ("cp_world", 2),
            ("cp_rank", 1),
            ("causal_seqlens_kv_global", int32(1, 1)),
            ("use_fp16_softmax", True),
        )
    ),
    (
        "separate tables",
        value(uses_shared_paged_kv_idx=False),
        NotImplementedError,
        ("uses_shared_paged_kv_idx=False", "one cache entry is a key and its value"),
    ),
    ("shared is None", value(uses_shared_paged_kv_idx=None), TypeError, ("uses_shared_paged_kv_idx", "None")),
    ("unknown argument", value(window_left=3), TypeError, ("window_left",)),
]


@pytest.mark.parametrize(("breaks", "error", "says"), [pytest.param(*row[1:], id=row[0]) for row in BAD])
def test_bad_input_is_refused_before_anything_is_written(
    breaks: Callable[[Arguments], Arguments], error: type[Exception], says: tuple[str, ...]
) -> None:
    good = good_arguments()
    out, lse = good["out"], torch.full((4, 4), POISON)
    with pytest.raises(error) as raised:
        mla(**good | {"lse": lse} | breaks(good))
    missing = [words for words in says if words not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"
    assert (out == POISON).all()
    assert (lse == POISON).all()


@pytest.mark.parametrize("change", [value(), ragged(), ragged(max_q_len=None)])
def test_what_the_rows_break_was_good(change: Callable[[Arguments], Arguments]) -> None:
    good = good_arguments()
    out, _ = mla(**good | change(good))
    assert (out != POISON).any(dim=-1).all()
