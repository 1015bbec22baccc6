"""What upstream's tolerances let through: cells of the table that says why the lab has others."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.upstream_rules import UPSTREAM_RULES, passes
from lab.references import attention, visible_keys

ALL = set(range(10))
BATCH, Q_LEN, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 16, 2, 128


@functools.cache
def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values of N(0, 1), and sinks of U(0, 5)."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, Q_LEN, HEADS, HEAD_DIM, generator=generator)
    keys, values = (torch.randn(BATCH, length, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
    return query, keys, values, 5 * torch.rand(HEADS, generator=generator)


def output(length: int, window_left: int = -1, sinks: bool = False, lost_keys: int = 0, **scales: float) -> Tensor:
    query, keys, values, sink_logits = inputs(length)
    positions = torch.arange(length).expand(BATCH, -1)
    kv_lens = torch.full((BATCH,), length - lost_keys)
    rows = positions[:, length - Q_LEN :] - lost_keys
    visible = visible_keys(rows, positions, kv_lens, causal=True, window_left=window_left)
    numbers = {"bmm1_scale": HEAD_DIM**-0.5} | scales
    return attention(query, keys, values, visible, sinks=sink_logits if sinks else None, **numbers)[0]


def escapes(out: Tensor, expected: Tensor) -> set[int]:
    return {index for index, rule in enumerate(UPSTREAM_RULES) if passes(rule, out, expected)}


@pytest.mark.parametrize("length", [110, 1024, 8192])
def test_the_right_output_passes_every_rule(length: int) -> None:
    expected = output(length)
    assert escapes(expected.to(torch.bfloat16), expected) == ALL


@pytest.mark.parametrize("length", [110, 1024])
def test_nan_in_one_head_passes(length: int) -> None:
    expected = output(length)
    out = expected.clone()
    out[0, 0, 0] = math.nan
    assert escapes(out, expected) == {0, 1, 2, 3, 5, 6}


def test_zeros_pass_where_the_output_is_small() -> None:
    expected = output(8192)
    escaped = escapes(torch.zeros_like(expected), expected)
    assert escaped >= {3, 4, 6, 7}
    assert not escaped & {0, 1, 5, 8, 9}
    short = output(1024)
    assert not escapes(torch.zeros_like(short), short)


def test_a_window_must_truncate_to_be_tested() -> None:
    settings: dict[str, Any] = {"sinks": True}
    assert escapes(output(110, **settings), output(110, window_left=127, **settings)) == ALL
    assert not escapes(output(1024, **settings), output(1024, window_left=127, **settings))


def test_a_lost_sink_passes_where_the_keys_are_many() -> None:
    assert escapes(output(1024), output(1024, sinks=True)) == ALL
    assert escapes(output(110), output(110, sinks=True)) == {3}


def test_a_lost_key_passes_where_the_keys_are_many() -> None:
    assert escapes(output(8192, lost_keys=1), output(8192)) == ALL
    assert escapes(output(110, lost_keys=1, sinks=True), output(110, sinks=True)) == {3, 6}


@pytest.mark.parametrize(
    ("length", "sinks", "expected"), [(110, True, {2, 3, 4, 6, 7, 8, 9}), (1024, True, ALL), (8192, False, ALL)]
)
def test_a_scale_that_is_five_percent_off_passes(length: int, sinks: bool, expected: set[int]) -> None:
    # UpstreamRule 0 at 1,024 keys is a matter of a few elements.
    escaped = escapes(output(length, sinks=sinks, bmm2_scale=1.05), output(length, sinks=sinks))
    assert escaped - {0} == expected - {0}


def test_a_budget_counts_elements() -> None:
    rule = dataclasses.replace(UPSTREAM_RULES[4], wrong_share=0.25)
    expected = torch.ones(8)
    assert passes(rule, torch.tensor([9.0, 9.0, 1, 1, 1, 1, 1, 1]), expected)
    assert not passes(rule, torch.tensor([9.0, 9.0, 9.0, 1, 1, 1, 1, 1]), expected)
