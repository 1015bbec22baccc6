"""Truths that are worked out late: equal to those that are worked out at once, and of what was there when they were begun."""

import gc

import pytest
import torch

from lab.integrity import ChangedBindingsError
from lab.references import truth
from lab.references.errors import Truth
from lab.references.softmax_attention import Rules
from lab.workloads.inputs import expected
from lab.workloads.inputs.expected import LateTruth, made, truth_of_requests
from lab.workloads.inputs.guards import copied_together, same_bits

RULES = Rules(bmm1_scale=0.125, bmm2_scale=1.0, arithmetic=torch.bfloat16, out_dtype=torch.bfloat16)
SHAPE = (3, 2, 24)


def begun() -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], Truth]:
    generator = torch.Generator().manual_seed(3)
    query = torch.randn(*SHAPE, generator=generator).bfloat16()
    histories = [(torch.randn(9, 1, 24, generator=generator).bfloat16(),) * 2 for _ in range(3)]
    return query, histories, truth_of_requests(query, histories, [1, 1, 1], RULES)


def test_a_late_truth_is_that_of_the_query_as_it_was() -> None:
    query, histories, late = begun()
    at_once = truth.truth_of_requests(query.clone(), histories, [1, 1, 1], RULES)
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


def test_results_are_the_same_each_time_and_in_memory_of_their_own() -> None:
    *_, late = begun()
    first = made(late)
    expected = first.expected.clone()
    for each in (first, made(late)):
        each.expected.zero_()
    again = made(late)
    assert torch.equal(again.expected, expected)
    assert again.expected.dtype == torch.float64
    assert torch.equal(again.control, first.control)
    assert again.arithmetic == first.arithmetic
    assert torch.equal(again.request_of_row, first.request_of_row)
    assert again.rows is None


def test_results_are_computed_once_unless_they_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    solve = truth.truth_of_requests
    monkeypatch.setattr(truth, "truth_of_requests", lambda *given: calls.append(given) or solve(*given))
    *_, late = begun()
    assert made(late) is not made(late)
    assert len(calls) == 1
    monkeypatch.setattr(expected, "MOST_KEPT_ELEMENTS", 3 * 2 * 24 - 1)
    *_, large = begun()
    assert torch.equal(made(large).expected, made(large).expected)
    assert len(calls) == 3


@pytest.mark.parametrize("most_bytes", [0, 2**20])
def test_a_change_of_one_element_is_seen_in_each_tensor(most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "SMALL_BYTES", most_bytes)
    for at in range(3):
        _, histories, late = begun()
        made(late)
        histories[at][0].view(torch.uint8)[4, 0, 1] += 1
        with pytest.raises(ChangedBindingsError):
            made(late)


def test_a_kernel_that_changes_what_is_expected_is_named() -> None:
    _, histories, late = begun()
    histories[1][1].zero_()
    with pytest.raises(ChangedBindingsError, match="the tensors that the expected result is made from"):
        late.compare(torch.zeros(*SHAPE))


def test_tensors_of_all_dtypes_are_copied_together() -> None:
    scale, rows = torch.tensor(3.5), torch.randn(3, 5, dtype=torch.float64)[:, ::2]
    flags, lens = torch.tensor([True, False, True]), torch.arange(5).to(torch.uint32)
    given = [scale, rows, torch.zeros(0, 4), flags, lens, torch.randn(4).to(torch.float8_e4m3fn), scale.bfloat16()]
    copies = copied_together({str(number): each for number, each in enumerate(given)})
    for tensor, copy in zip(given, copies.values(), strict=True):
        assert (copy.dtype, copy.shape) == (tensor.dtype, tensor.shape)
        assert same_bits(copy, tensor.contiguous())
        assert copy.data_ptr() != tensor.data_ptr() or not tensor.numel()
