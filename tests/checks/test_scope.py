"""A scope makes a check's fixed cases: as many as its level has, of its function, within its ranges."""

import pytest

from lab.calls.problem import AttentionCall
from lab.checks import Level, Ranges
from lab.checks.properties.check import Scope
from lab.workloads.interfaces import PAGED_CALLS, Interface


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_the_fewest_heads_of_the_ranges(interface: Interface) -> None:
    ranges = Ranges()
    scope = Scope(interface, ranges, Level.SMOKE)
    least = (
        (1, min(ranges.mla_heads))
        if interface is AttentionCall.MLA_DECODE
        else (min(ranges.num_kv_heads), min(ranges.groups))
    )
    for case in scope.balanced(6, 6, seed=1):
        few = scope.on_fewest_heads(case)
        assert (few.num_kv_heads, few.group) == least
        assert (few.kv_lens, few.q_lens, few.seed) == (case.kv_lens, case.q_lens, case.seed)


@pytest.mark.parametrize("interface", PAGED_CALLS)
def test_the_quick_level_shares_few_compiled_kernels_and_has_every_value(interface: Interface) -> None:
    scope = Scope(interface, Ranges(), Level.QUICK)
    cases = [case for seed in range(4) for case in scope.balanced(8, 8, seed=seed)]
    compiled = {
        (case.dtype, case.kv_dtype, case.head_dim, case.group, case.page_size, case.q_lens[0]) for case in cases
    }
    assert len(compiled) <= 8 + (interface is AttentionCall.CONTEXT) * len(cases)
    groups = Ranges().mla_heads if interface is AttentionCall.MLA_DECODE else Ranges().groups
    assert {case.group for case in cases} == set(groups)
