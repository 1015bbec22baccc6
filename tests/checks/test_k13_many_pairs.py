"""K13's calls of more rows and heads than 16 bits count."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Level, Outcome, Ranges
from lab.checks.properties.k13_boundaries import CHECK
from lab.checks.run.judging import run_case
from lab.workloads.attention_case import AttentionCase

DECODES = (AttentionCall.DECODE, AttentionCall.MLA_DECODE)
CPU = torch.device("cpu")


def with_many_pairs(interface: AttentionCall, ranges: Ranges) -> list[AttentionCase]:
    cases = CHECK.cases(interface, ranges, Level.SMOKE)
    return [case for case in cases if sum(case.q_lens) * case.num_qo_heads > 65_535]


@pytest.mark.parametrize("interface", DECODES)
def test_the_smoke_level_has_a_cheap_call_of_more_than_65535_rows_and_heads(interface: AttentionCall) -> None:
    (case,) = with_many_pairs(interface, Ranges())
    assert sum(case.q_lens) * case.num_qo_heads * case.head_dim < 2**23
    assert max(case.kv_lens) < 16


def test_a_kernel_of_one_head_is_not_asked_for_as_many_requests() -> None:
    ranges = Ranges(groups=(1,), num_kv_heads=(1,), q_lens=(1,), mla_heads=(1,))
    assert not any(with_many_pairs(interface, ranges) for interface in DECODES)


def test_a_context_call_has_them_at_the_full_level() -> None:
    cases = CHECK.cases(AttentionCall.CONTEXT, Ranges(), Level.FULL)
    assert any(sum(case.q_lens) * case.num_qo_heads > 65_535 for case in cases)


@pytest.mark.parametrize("interface", DECODES)
def test_a_grid_of_65535_programs_is_wrong_in_it(interface: AttentionCall) -> None:
    def cut(**arguments: Any) -> Any:
        out = getattr(references, interface.value)(**arguments)
        out.view(-1, out.shape[-1])[65_535:] = 0
        return out

    (case,) = with_many_pairs(interface, Ranges())
    outcomes = [
        run_case(SimpleNamespace(**{interface.value: function}), CHECK, case, CPU, Ranges()).outcome
        for function in (getattr(references, interface.value), cut)
    ]
    assert outcomes == [Outcome.RIGHT, Outcome.WRONG]
