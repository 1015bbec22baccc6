"""The MLA decode reference against a dense second formula, hand-computed cases, what must not matter, and bad input."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import check_values
from lab.references import attention, eager_attention, paged_attention, trtllm_batch_decode_with_kv_cache_mla
from tests.cases import RANK, ROPE, Batch, assert_same, expected, latent_batch, mla_arguments, of_entries

mla = trtllm_batch_decode_with_kv_cache_mla
P = 16
E4M3 = torch.float8_e4m3fn
ON_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
)


# By hand


def by_hand(entries: list[list[float]], query: list[float], **changes: Any) -> tuple[list[float], float]:
    """One row of one head, a latent vector of 2 and a rotary part of 1."""
    batch = of_entries([torch.tensor([[query]])], [torch.tensor(entries)], rank=2)
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
    batch = of_entries([torch.zeros(2, 1, 2)], [torch.tensor([[1.0, 0.0], [2.0, 0.0], [6.0, 0.0]])], rank=1)
    out, lse = mla(**mla_arguments(batch))
    assert out.flatten().tolist() == [1.5, 3.0]
    torch.testing.assert_close(lse.flatten().tolist(), [1.0, math.log2(3.0)])


def test_a_sink_takes_its_share_and_gives_no_value() -> None:
    batch = of_entries([torch.zeros(1, 2, 2)], [torch.full((3, 2), 8.0)], rank=1)
    out, lse = mla(**mla_arguments(batch, sinks=torch.tensor([0.0, math.log(5.0)])))
    torch.testing.assert_close(out.flatten().tolist(), [6.0, 3.0])  # 8 * 3 / (3 + 1) and 8 * 3 / (3 + 5)
    torch.testing.assert_close(lse.flatten().tolist(), [2.0, 3.0])


# Against the dense formula


@pytest.mark.parametrize("q_len", [1, 2, 3, 4])
@pytest.mark.parametrize("page_size", [1, 4, 32, 64])
def test_lengths_at_page_edges(page_size: int, q_len: int) -> None:
    kv_lens = [max(0, pages * page_size + rest) for pages in (0, 1, 2) for rest in (-1, 0, 1)]
    batch = latent_batch([q_len] * len(kv_lens), kv_lens)
    assert_same(mla(**mla_arguments(batch, page_size, poison=math.nan)), expected(batch))


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
    batch = latent_batch([2] * 4, [0, 1, 16, 37], dtype=dtype, kv_dtype=kv_dtype)
    arguments = mla_arguments(batch, bmm1_scale=0.25)
    if not second_dimension:
        arguments["kv_cache"] = arguments["kv_cache"].squeeze(1)
    assert_same(mla(**arguments), expected(batch, bmm1_scale=0.25))


@pytest.mark.parametrize(("rank", "rope"), [(1, 0), (1, 1), (256, 64), (512, 64), (512, 0)])
def test_sizes_of_real_models_and_small_ones(rank: int, rope: int) -> None:
    batch = latent_batch([2, 2], [9, 70], rank=rank, rope=rope, heads=3)
    assert_same(mla(**mla_arguments(batch, 32, bmm1_scale=0.05)), expected(batch, bmm1_scale=0.05))


def test_a_cache_that_is_a_view_of_a_wider_pool() -> None:
    batch = latent_batch([1, 1], [9, 30])
    arguments = mla_arguments(batch)
    cache = arguments["kv_cache"]
    arguments["kv_cache"] = torch.cat((cache, torch.full_like(cache, math.nan)), dim=-1)[..., : RANK + ROPE]
    assert_same(mla(**arguments), expected(batch))


def test_a_query_whose_rows_are_strided() -> None:
    batch = latent_batch([2, 2], [9, 30])
    arguments = mla_arguments(batch)
    query = arguments["query"]
    arguments["query"] = torch.cat((query, torch.full_like(query, math.nan)), dim=2)[:, :, :4]
    assert_same(mla(**arguments), expected(batch))


def as_tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float32)


@pytest.mark.parametrize("wrap", [float, as_tensor, torch.tensor])
def test_scales(wrap: Callable[[float], Any]) -> None:
    batch = latent_batch([2, 2], [7, 30], dtype=E4M3)
    scales = {"bmm1_scale": 0.375, "bmm2_scale": -1.75}
    given_as = {name: wrap(value) for name, value in scales.items()}
    assert_same(mla(**mla_arguments(batch, **given_as)), expected(batch, **scales))


@pytest.mark.parametrize("wrap", [lambda sinks: sinks, lambda sinks: [sinks], lambda sinks: (sinks,)])
@pytest.mark.parametrize(
    "sinks",
    [torch.tensor([0.0, 0.5, -1.0, 3.0]), torch.tensor([-math.inf, 50.0, 300.0, -1e30])],
    ids=["plain", "mixed"],
)
def test_sinks(sinks: Tensor, wrap: Callable[[Tensor], Any]) -> None:
    batch = latent_batch([3] * 3, [2, 3, 25])
    arguments = mla_arguments(batch, sinks=wrap(sinks), bmm1_scale=0.25)
    assert_same(mla(**arguments), expected(batch, sinks=sinks, bmm1_scale=0.25))


def test_rows_before_the_first_key_are_zero_and_their_lse_is_empty() -> None:
    out, lse = mla(**mla_arguments(latent_batch([4] * 3, [0, 2, 4])))
    empty = torch.tensor([True] * 4 + [True, True, False, False] + [False] * 4)
    assert (out.flatten(0, 1)[empty] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert lse[~empty].isfinite().all()


@pytest.mark.parametrize("max_q_len", [7, 100, None])
def test_variable_query_lengths(max_q_len: int | None) -> None:
    batch = latent_batch([0, 3, 1, 0, 7, 2, 0], [5, 20, 1, 0, 4, 50, 9])
    assert_same(mla(**mla_arguments(batch, ragged=True, max_q_len=max_q_len)), expected(batch))


@pytest.mark.parametrize("max_q_len", [3, None])
def test_rows_after_the_last_offset_are_padding(max_q_len: int | None) -> None:
    batch = latent_batch([2, 3, 2], [9, 30, 4])
    arguments = mla_arguments(batch, ragged=True, max_q_len=max_q_len)
    arguments["query"][5:] = math.nan
    for name in ("block_tables", "seq_lens"):
        arguments[name] = arguments[name][:2]
    arguments["cum_seq_lens_q"] = arguments["cum_seq_lens_q"][:3]
    out, lse = mla(**arguments)
    assert_same((out[:5], lse[:5]), expected(Batch(batch.queries[:2], batch.keys[:2], batch.values[:2])))
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
    batch = latent_batch(q_lens, lengths, heads=heads, rank=rank, rope=rope, dtype=dtype, seed=seed)
    sinks = torch.linspace(-1, 2, heads) if with_sinks else None
    rule: Any = {"sinks": sinks, "bmm1_scale": 0.3, "bmm2_scale": 1.5}
    arguments = mla_arguments(
        batch, page_size, ragged=ragged, poison=math.nan, foreign_id=2**31 - 1, seed=seed, **rule, max_seq_len=70
    )
    assert_same(mla(**arguments), expected(batch, **rule))


@pytest.mark.parametrize("piece_elements", [1, 300, 2000])
def test_pieces_do_not_matter(piece_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = latent_batch([9] * 5, [3, 40, 1, 20, 70])
    monkeypatch.setattr(paged_attention, "PIECE_ELEMENTS", piece_elements)
    assert_same(mla(**mla_arguments(batch, poison=math.nan)), expected(batch))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_on_a_gpu(device: str) -> None:
    batch = latent_batch([3] * 4, [0, 2, 16, 37], dtype=E4M3)
    arguments = mla_arguments(batch, poison=math.nan)
    moved = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    out, lse = mla(**moved)
    assert_same((out.cpu(), lse.cpu()), expected(batch))


# What must not matter


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("foreign_id", [None, -1, 2**31 - 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_dead_memory_changes_no_bit(poison: float, foreign_id: int | None, dtype: torch.dtype) -> None:
    batch = latent_batch([2] * 5, [0, 1, 15, 16, 33], dtype=dtype)
    clean = mla(**mla_arguments(batch))
    poisoned = mla(**mla_arguments(batch, poison=poison, foreign_id=foreign_id))
    assert poisoned[0].isfinite().all()
    assert all(torch.equal(a, b) for a, b in zip(clean, poisoned, strict=True))


def test_nan_that_is_read_is_not_hidden() -> None:
    for column in (0, RANK + ROPE - 1):
        batch = latent_batch([1, 1], [5, 20])
        batch.keys[1][0, 0, column] = math.nan
        nan = mla(**mla_arguments(batch))[0].isnan()
        assert not nan[0].any()
        assert nan[1].all()


def test_nothing_that_is_read_is_written() -> None:
    arguments = mla_arguments(latent_batch([2, 2], [5, 30], dtype=E4M3), poison=math.nan)
    tensors = [arguments[name] for name in ("query", "kv_cache", "block_tables", "seq_lens")]
    before = [tensor.clone().view(torch.uint8) for tensor in tensors]
    mla(**arguments)
    assert all(torch.equal(tensor.view(torch.uint8), copy) for tensor, copy in zip(tensors, before, strict=True))


def test_arguments_that_change_no_result_are_free() -> None:
    batch = latent_batch([1, 1], [7, 30])
    free = {
        "workspace_buffer": torch.zeros(8, device="meta"),
        "enable_pdl": True,
        "multi_ctas_kv_counter_buffer": torch.zeros(8, device="meta"),
        "qk_nope_head_dim": 128,
    }
    for backend in ("auto", "xqa", "trtllm-gen"):
        assert_same(mla(**mla_arguments(batch, backend=backend) | free), expected(batch))


# Where results go


@pytest.mark.parametrize("dtype", [torch.float16, E4M3, torch.float64])
def test_a_new_output_is_bfloat16(dtype: torch.dtype) -> None:
    batch = latent_batch([2, 2], [7, 30], dtype=dtype)
    out = mla(**mla_arguments(batch, out=None, return_lse=False))
    assert (out.dtype, out.shape) == (torch.bfloat16, (2, 2, 4, RANK))
    truth = expected(batch)[0].to(torch.bfloat16)
    torch.testing.assert_close(out.flatten(0, 1), truth)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, E4M3])
def test_a_given_output_has_its_own_dtype_and_is_returned(dtype: torch.dtype) -> None:
    batch = latent_batch([2, 2], [7, 30])
    given_out = torch.full((2, 2, 4, RANK), math.nan).to(dtype)
    out = mla(**mla_arguments(batch, out=given_out, return_lse=False))
    assert out is given_out
    truth = expected(batch)[0].to(dtype).double()
    torch.testing.assert_close(out.flatten(0, 1).double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-12)


def test_shapes_of_ragged_results() -> None:
    batch = latent_batch([1, 3], [7, 30])
    out, lse = mla(**mla_arguments(batch, ragged=True, out=None))
    assert (out.shape, lse.shape) == ((4, 4, RANK), (4, 4))


@pytest.mark.parametrize("base", [None, "base2", "basee"])
@pytest.mark.parametrize("shape", [None, (6, 4), (3, 2, 4)])
def test_lse(base: str | None, shape: tuple[int, ...] | None) -> None:
    batch = latent_batch([2] * 3, [1, 7, 30])
    lse = None if shape is None else torch.full(shape, math.nan)
    _, returned = mla(**mla_arguments(batch, lse=lse, return_lse_base=base))
    assert lse is None or returned is lse
    assert returned.dtype == torch.float32
    assert returned.shape == (shape or (6, 4))
    truth = expected(batch)[1] * (math.log(2.0) if base == "basee" else 1.0)
    torch.testing.assert_close(returned.reshape(6, 4).double(), truth, rtol=1e-6, atol=1e-6)


def test_lse_of_a_ragged_call() -> None:
    batch = latent_batch([1, 3], [7, 30])
    lse = torch.full((4, 4), math.nan)
    assert mla(**mla_arguments(batch, ragged=True, lse=lse, return_lse_base="basee"))[1] is lse
    torch.testing.assert_close(lse.double(), expected(batch)[1] * math.log(2.0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ragged", [False, True])
def test_empty_batch(ragged: bool) -> None:
    arguments = mla_arguments(latent_batch([1], [7]), ragged=ragged)
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
    batch = latent_batch([1, 1], [7, 30])
    arguments = mla_arguments(batch)
    leading = [arguments.pop(name) for name in list(inspect.signature(mla).parameters)[:9]]
    assert_same(mla(*leading, **arguments), expected(batch))


def test_values_can_be_checked_on_request() -> None:
    arguments = mla_arguments(latent_batch([1, 1], [7, 30]))
    problem = MLADecodeCall(**arguments).problem()
    check_values(problem)
    assert (problem.head_dim, problem.v_head_dim, problem.num_kv_heads) == (RANK + ROPE, RANK, 1)
    assert problem.v_cache.data_ptr() == problem.k_cache.data_ptr()
    arguments["block_tables"][0, 0] = 1000
    with pytest.raises(ValueError, match="page id 1000"):
        check_values(problem)
