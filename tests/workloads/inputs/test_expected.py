"""Truths that are worked out late: equal to those that are worked out at once, and of what was there when they were begun."""

import gc

import pytest
import torch

from lab.integrity import ChangedBindingsError
from lab.references import softmax_attention
from lab.references.errors import Truth
from lab.references.softmax_attention import Rules
from lab.workloads.inputs.expected import LateTruth, made, truth_of_requests

RULES = Rules(bmm1_scale=0.125, bmm2_scale=1.0, arithmetic=torch.bfloat16, out_dtype=torch.bfloat16)
SHAPE = (3, 2, 24)


def begun() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], Truth]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(*SHAPE, generator=generator).bfloat16()
    histories = [(torch.randn(9, 1, 24, generator=generator).bfloat16(),) * 2 for _ in range(3)]
    return query, histories, truth_of_requests(query, histories, [1, 1, 1], RULES)


def test_a_late_truth_is_that_of_the_query_as_it_was() -> None:
    query, histories, late = begun()
    at_once = softmax_attention.truth_of_requests(query.clone(), histories, [1, 1, 1], RULES)
    query.zero_()  # as a kernel that writes into it does
    assert isinstance(late, LateTruth)
    assert torch.equal(late.expected, at_once.expected)
    assert late.compare(at_once.expected).passed
    assert made(at_once) is at_once


def test_nobody_finds_an_expected_output() -> None:
    *_, late = begun()
    assert not late.compare(torch.zeros(*SHAPE)).passed
    found = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.shape == SHAPE]
    assert not [each for each in found if each.dtype == torch.float64]


def test_a_kernel_that_changes_what_is_expected_is_named() -> None:
    _, histories, late = begun()
    histories[1][1].zero_()
    with pytest.raises(ChangedBindingsError, match="the tensors that the expected result is made from"):
        late.compare(torch.zeros(*SHAPE))
