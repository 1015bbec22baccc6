"""The definition under the references, against torch's scaled_dot_product_attention in float64 and torch.logsumexp."""

import inspect
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lab.references import attention, eager_attention, visible_keys


def random_inputs(q_len: int, kv_len: int, heads: tuple[int, int], magnitude: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(q_len * 1000 + kv_len)
    shapes = [(2, q_len, heads[0], 32), (2, kv_len, heads[1], 32), (2, kv_len, heads[1], 32)]
    query, keys, values = (torch.randn(shape, generator=generator).bfloat16() * magnitude for shape in shapes)
    return query, keys, values


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1), (6, 1)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 300), (7, 7), (33, 300)])
@pytest.mark.parametrize("magnitude", [1.0, 10.0])
def test_matches_torch(heads: tuple[int, int], q_len: int, kv_len: int, magnitude: float) -> None:
    query, keys, values = random_inputs(q_len, kv_len, heads, magnitude)
    visible = torch.ones(q_len, kv_len, dtype=torch.bool).tril(kv_len - q_len)
    out, lse_log2 = attention(query, keys, values, visible.expand(2, -1, -1), bmm1_scale=32**-0.5, bmm2_scale=0.5)
    q, k, v = (side.double().transpose(1, 2) for side in (query, keys, values))
    truth = scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True) * 0.5
    torch.testing.assert_close(out, truth.transpose(1, 2), rtol=1e-11, atol=1e-12 * magnitude)

    k = k.repeat_interleave(heads[0] // heads[1], dim=1)
    logits = (q @ k.mT * 32**-0.5).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(lse_log2, torch.logsumexp(logits, -1).transpose(1, 2) / math.log(2.0))


@pytest.mark.parametrize("sinks", [None, torch.tensor([-1000.0, 3.0])], ids=["no sinks", "sinks"])
def test_without_keys_the_lse_is_that_of_the_sinks(sinks: Tensor | None) -> None:
    query, keys, values = random_inputs(2, 0, (2, 1), 1.0)
    out, lse_log2 = attention(query, keys, values, torch.ones(2, 2, 0, dtype=torch.bool), sinks=sinks)
    assert not out.any()
    empty = torch.full((2,), -math.inf, dtype=torch.float64) if sinks is None else sinks.double() / math.log(2.0)
    torch.testing.assert_close(lse_log2, empty.expand(2, 2, 2))


def test_huge_logits_do_not_overflow() -> None:
    query, keys, values = random_inputs(3, 20, (2, 2), 100.0)
    out, lse_log2 = attention(query, keys, values, torch.ones(2, 3, 20, dtype=torch.bool))
    assert out.isfinite().all()
    assert lse_log2.isfinite().all()
    assert float(lse_log2.max()) > 10_000


def test_visible_keys_without_causal_rule_stop_at_the_length() -> None:
    visible = visible_keys(
        torch.tensor([[0]]), torch.tensor([[-1, 0, 1, 2]]), torch.tensor([2]), causal=False, window_left=-1
    )
    assert visible.int().tolist() == [[[0, 1, 1, 0]]]


def inputs() -> dict[str, Any]:
    query, keys, values = random_inputs(2, 5, (4, 2), 1.0)
    return {"query": query, "keys": keys, "values": values, "visible": torch.ones(2, 2, 5, dtype=torch.bool)}


NAN = torch.tensor(math.nan)
BAD = [
    ({"query": None}, TypeError, "query must be a torch.Tensor"),
    ({"keys": torch.zeros(2, 5, 2, 32, dtype=torch.uint8)}, TypeError, "must be of a float dtype, got torch.uint8"),
    ({"query": torch.zeros(2, 4, 32)}, ValueError, "[batch, q_len, heads, head_dim], got shape [2, 4, 32]"),
    ({"values": torch.zeros(2, 4, 2, 32)}, ValueError, "must have the query's batch, 2, and the same tokens and heads"),
    ({"query": torch.zeros(1, 2, 4, 32)}, ValueError, "must have the query's batch, 1"),
    ({"query": torch.zeros(2, 2, 4, 16)}, ValueError, "keys have head_dim 32, but query has 16"),
    ({"query": torch.zeros(2, 2, 3, 32)}, ValueError, "3 heads of query do not divide evenly over the 2 heads of keys"),
    ({"visible": torch.ones(2, 2, 5)}, TypeError, "visible must be bool, got torch.float32"),
    ({"visible": torch.ones(2, 5, dtype=torch.bool)}, ValueError, "[batch, q_len, kv_len] = [2, 2, 5], got [2, 5]"),
    ({"sinks": torch.zeros(2)}, ValueError, "sinks must have shape [4], got [2]"),
    ({"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta, but query is on cpu"),
    ({"sinks": NAN.repeat(4)}, ValueError, "sinks holds NaN"),
    ({"query": NAN.repeat(2, 2, 4, 32)}, ValueError, "query holds NaN"),
    ({"bmm1_scale": NAN}, ValueError, "bmm1_scale holds NaN"),
    ({"bmm2_scale": math.inf}, ValueError, "bmm2_scale must be finite, got inf"),
    ({"bmm1_scale": torch.ones(2)}, ValueError, "bmm1_scale as a tensor must have one element, got shape [2]"),
    ({"bmm1_scale": "1"}, TypeError, "bmm1_scale must be a number"),
]


@pytest.mark.parametrize(("change", "error", "says"), BAD, ids=[says for _, _, says in BAD])
def test_bad_arguments_are_refused_in_a_sentence(change: dict[str, Any], error: type[Exception], says: str) -> None:
    attention(**inputs())
    with pytest.raises(error, match=re.escape(says)):
        attention(**inputs() | change)
    with pytest.raises(error, match=re.escape(says)):
        eager_attention(**inputs() | change, arithmetic=torch.bfloat16, out_dtype=torch.bfloat16)


def test_the_signature_names_the_terms_of_the_softmax() -> None:
    for function in (attention, eager_attention):
        assert {"bmm1_scale", "bmm2_scale", "sinks"} < set(inspect.signature(function).parameters)


def test_dtypes_of_a_control_are_float_dtypes() -> None:
    good = {"arithmetic": torch.bfloat16, "out_dtype": torch.bfloat16}
    for name, bad in (("arithmetic", torch.int8), ("arithmetic", "bf16"), ("out_dtype", torch.int32)):
        with pytest.raises(TypeError, match=f"{name} must be .*got {bad!r}"):
            eager_attention(**inputs() | good | {name: bad})
