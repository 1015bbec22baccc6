"""Each wrong kernel of an argument that allows or changes little is found where the smoke level gives this argument alone."""

from typing import Any

import pytest
import torch

from corpus.kernels import kernel
from corpus.right import KERNELS as RIGHT
from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.models import MODELS, Configuration
from lab.ranges import Ranges

# By argument: the axis and its value, and the wrong kernels with the functions that show them.
SAGE = ("sage_keys_by_previous_block", "sage_values_by_head_0", "sage_blocks_across_requests")
FOUND = {
    ("skip_softmax", 3.0): ("skip_threshold_not_divided", "mla_skip_threshold_not_divided"),
    ("skip_softmax", 1e-30): ("skip_threshold_of_logits", "mla_skip_threshold_of_logits"),
    ("o_scale", 0.5): ("o_scale_multiplies_output", "e4m3_output_divided_by_o_scale"),
    ("rank", "3 of 4"): ("rank_keys_to_the_last_rows", "mla_rank_keys_to_the_last_rows"),
    ("rank", "0 of 1"): ("rank_bound_inclusive", "mla_rank_bound_inclusive"),
    ("sage", "int8, 16 keys"): SAGE,
    ("sage", "e4m3, 4 keys"): SAGE,
    ("hints", True): ("v_as_k_with_transform_mode", "mla_scale_ignored_with_scale_format"),
}


def run_of(implementation: Any, function: str, axis: str, value: object) -> CaseRun:
    """Judge the smoke level's case of this value."""
    interface = AttentionCall(function)
    (point, *_) = [point for point in MODELS[interface](Ranges()).alone() if point.get(axis) == value]
    run = CaseRun(implementation, Configuration(interface, point), torch.device("cpu"), Ranges())
    judge_call(run)
    return run


@pytest.mark.parametrize(
    ("axis", "value", "name"), [(*given, name) for given, names in FOUND.items() for name in names]
)
def test_a_wrong_kernel_is_found(axis: str, value: object, name: str) -> None:
    wrong = kernel(name)
    for function in wrong.interface:
        assert run_of(wrong.implementation(), function, axis, value).wrongs
        right = run_of(RIGHT["two_passes"], function, axis, value)
        assert not right.wrongs + right.failures + right.declines


@pytest.mark.parametrize(
    "function", [each.value for each in AttentionCall if "skip_softmax" in MODELS[each](Ranges()).axes]
)
@pytest.mark.parametrize("factor", [1e-30, 3.0])
def test_a_kernel_that_leaves_out_what_it_may_is_right(function: str, factor: float) -> None:
    run = run_of(RIGHT["skipped_keys"], function, "skip_softmax", factor)
    assert not run.wrongs + run.failures + run.declines
