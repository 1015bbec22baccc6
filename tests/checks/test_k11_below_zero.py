"""The bound of K11's scale below 0 leaves room for a query that is cast to e4m3."""

from dataclasses import replace

import pytest
import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.properties.k11_sensitivity import scale_below_0
from lab.workloads.attention_case import AttentionCase, Contents, Storage
from lab.workloads.inputs.attention import build_attention

CASE = AttentionCase(
    AttentionCall.DECODE,
    (63, 199, 128, 175),
    (1, 1, 1, 1),
    num_kv_heads=1,
    group=8,
    head_dim=128,
    kv_dtype=E4M3,
    arithmetic=E4M3,
    contents=Contents.NEEDLES,
    seed=14,
    storage=Storage(page_size=64, page_seed=14),
)


@pytest.mark.parametrize("seed", range(13, 19))
def test_a_query_cast_to_e4m3_is_within_the_bound(seed: int) -> None:
    inputs = build_attention(replace(CASE, seed=seed), torch.device("cpu"))
    cast = replace(inputs, query=inputs.query.to(E4M3).to(inputs.query.dtype))
    rules = {"bmm1_scale": scale_below_0(inputs)}
    assert inputs.truth(**rules).compare(cast.truth(arithmetic=torch.bfloat16, **rules).control).passed


def test_where_a_kernel_does_not_round_q_more_products_overflow() -> None:
    inputs = build_attention(CASE, torch.device("cpu"))
    plain = build_attention(replace(CASE, arithmetic=None), torch.device("cpu"))
    factors = [scale_below_0(each) / each.bmm1_scale for each in (inputs, plain)]
    assert factors == pytest.approx([-8.0, -25.0])
