"""Cases cover every axis, drawn ones stay inside, and lengths stand at edges."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks import AttentionCase, Ranges
from lab.checks.parameters import attention
from lab.checks.parameters.attention import NUM_BUILDS, balanced, drawn_cases, edge_lengths
from lab.workloads.attention_case import HeadPages
from lab.workloads.interfaces import PAGED_CALLS, Interface, MetadataFunction

NARROW = Ranges(
    dtypes=((torch.float16, E4M3),),
    groups=(3, 5),
    num_kv_heads=(2,),
    head_dims=(128,),
    page_sizes=(32,),
    q_lens=(2, 7),
    windows=(True,),
    sinks=(True,),
    kv_layouts=("NHD",),
    mla_head_dims=((80, 64),),
    mla_heads=(16,),
    mla_page_sizes=(64,),
    longest=90,
)


def values_of(case: AttentionCase) -> dict[str, Any]:
    """Return the values of a case on the axes of its function; rows of a context call are on none."""
    values = attention.values_of(case)
    return {name: values[name] for name in values if case.interface is not AttentionCall.CONTEXT or name != "q_lens"}


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_every_value_of_every_axis_comes_as_often_as_any_other(interface: Interface) -> None:
    cases = list(balanced(Ranges(), interface, 24, seed=3))
    assert len(cases) == 24
    for name in values_of(cases[0]):
        counts = Counter(values_of(case)[name] for case in cases)
        assert set(counts) == set(getattr(Ranges(), name)), name
        assert max(counts.values()) - min(counts.values()) <= 1, name


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_the_same_seed_makes_the_same_cases_and_another_makes_others(interface: Interface) -> None:
    assert list(balanced(Ranges(), interface, 6, 1)) == list(balanced(Ranges(), interface, 6, 1))
    assert list(balanced(Ranges(), interface, 6, 1)) != list(balanced(Ranges(), interface, 6, 2))


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_checks_share_what_a_kernel_is_compiled_for(interface: Interface) -> None:
    """A kernel that compiles for each combination is compiled for 24 of them, however many cases there are."""
    at_run_time = {"num_kv_heads", "kv_layouts"}

    def builds_of(ranges: Ranges, seed: int) -> set[tuple[Any, ...]]:
        found = [values_of(case) for case in balanced(ranges, interface, 48, seed)]
        return {tuple(value for name, value in each.items() if name not in at_run_time) for each in found}

    first, second = builds_of(Ranges(), 1), builds_of(Ranges(), 9)
    assert first == second
    assert len(first) <= NUM_BUILDS
    assert builds_of(Ranges(seed=7), 1) != first


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_a_narrowed_space_is_not_left(interface: Interface) -> None:
    for case in balanced(NARROW, interface, 12):
        assert all(value in getattr(NARROW, name) for name, value in values_of(case).items())
        assert max(case.kv_lens) <= NARROW.longest


@pytest.mark.parametrize("interface", PAGED_CALLS)
@pytest.mark.parametrize("ranges", [NARROW, Ranges()])
def test_a_drawn_case_is_inside_too(interface: Interface, ranges: Ranges) -> None:
    cases = [sample.case for sample in itertools.islice(drawn_cases(interface, ranges), 200)]
    for case in cases:
        assert case.interface is interface
        assert all(value in getattr(ranges, name) for name, value in values_of(case).items())
        assert max(case.kv_lens) <= ranges.longest
        assert all(kv_len >= q_len for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True))
    assert {len(case.kv_lens) for case in cases} == {1, 2, 3, 4}
    assert max(max(case.kv_lens) for case in cases) > 0.9 * ranges.longest
    for name in values_of(cases[0]):
        assert {values_of(case)[name] for case in cases} == set(getattr(ranges, name)), name


def test_a_drawn_prompt_has_as_many_rows_as_its_axis_says() -> None:
    cases = [sample.case for sample in itertools.islice(drawn_cases(AttentionCall.CONTEXT, Ranges()), 200)]
    assert 60 < max(max(case.q_lens) for case in cases) <= 80
    assert len({q_len for case in cases for q_len in case.q_lens}) > 40


def test_every_covering_decode_has_a_request_that_a_window_truncates() -> None:
    for case in balanced(Ranges(windows=(True,)), AttentionCall.DECODE, 24):
        assert max(case.kv_lens) > case.window_left + case.q_lens[0]


def test_e4m3_arithmetic_is_of_e4m3_caches_alone() -> None:
    ranges = replace(Ranges(), e4m3_arithmetic=True)
    for case in balanced(ranges, AttentionCall.DECODE, 12):
        assert case.arithmetic == (E4M3 if case.kv_dtype == E4M3 else None)
    assert all(case.arithmetic is None for case in balanced(Ranges(), AttentionCall.DECODE, 12))


def test_lengths_stand_at_the_edges_of_pages_and_tiles() -> None:
    assert edge_lengths(16, 70) == [1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 69, 70]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kv_lens": (), "q_lens": ()}, "kv_lens"),
        ({"q_lens": (1, 1)}, "q_lens"),
        ({"q_lens": (0,)}, "q_lens"),
        ({"kv_lens": (-1,)}, "kv_lens"),
        ({"kv_lens": (4, 4), "q_lens": (1, 2)}, "q_lens"),
        ({"v_head_dim": 64}, "MLA"),
        ({"interface": AttentionCall.MLA_DECODE}, "MLA"),
        ({"interface": MetadataFunction.DRAFT_KV_INDICES}, "attention call"),
        ({"rank": (3, 4), "kv_lens": (0,), "q_lens": (5,)}, "cannot be the keys of rank 3 of 4"),
        ({"rank": (0, 2), "window_left": 3}, "window_left=3"),
        ({"head_pages": HeadPages.HALF, "window_left": 3}, "window_left=3"),
    ],
)
def test_values_that_make_no_call_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AttentionCase(**{"interface": AttentionCall.DECODE, "kv_lens": (4,), "q_lens": (1,)} | wrong)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"head_dims": ()}, "head_dims=() must be a tuple of at least one value, each a whole number of at least 2"),
        ({"large_batches": ()}, "large_batches=() must be a tuple of at least one value, each a whole number of at"),
        ({"head_dims": 128}, "head_dims=128 must be a tuple"),
        ({"head_dims": [64]}, "head_dims=[64] must be a tuple"),
        ({"page_sizes": (0,)}, "page_sizes=(0,): 0 is not a power of two"),
        ({"page_sizes": (16, 48)}, "page_sizes=(16, 48): 48 is not a power of two"),
        ({"groups": (4, 4)}, "groups=(4, 4) has a value twice"),
        ({"q_lens": (True,)}, "q_lens=(True,): True is not a whole number"),
        ({"windows": (1,)}, "windows=(1,): 1 is not True or False"),
        ({"dtypes": ((torch.float32, torch.float32),)}, "is not one of bf16/bf16, fp16/fp16"),
        ({"dtypes": ("bf16/bf16",)}, "e4m3/e4m3; in Python each is two torch dtypes"),
        ({"dtypes": (torch.bfloat16,)}, "torch.bfloat16 is not one of bf16/bf16"),
        ({"kv_layouts": ("hnd",)}, "'hnd' is not one of HND, NHD"),
        ({"mla_head_dims": ((64, 80),)}, "(64, 80) is not two whole numbers of at least 2"),
        ({"geometries": ("llama",)}, "'llama' is not one of llama-3.1-8b, "),
        ({"head_dims": (127,)}, "an NVFP4 cache stores blocks of 16, which 127 has no whole number of"),
        ({"longest": 4}, "longest=4 must be at least 8: q_lens"),
        ({"e4m3_arithmetic": 1}, "e4m3_arithmetic=1 must be True or False"),
    ],
)
def test_axes_that_make_no_cases_are_refused_with_what_would(axes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        Ranges(**axes)


def test_a_head_dim_that_nvfp4_does_not_store_is_taken_without_it() -> None:
    assert Ranges(head_dims=(127,), nvfp4=(False,)).head_dims == (127,)
