"""What a narrow kernel takes is found, named as a command line, and judged in the same run."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import Ranges, judge
from lab.checks.parameters.attention import discover
from lab.checks.run.workers import Workers
from lab.ranges import options_of
from lab.workloads.interfaces import Interface
from tests.checks import narrow
from tests.checks.small import SMALL, declining_if

BF16 = (torch.bfloat16, torch.bfloat16)
CPU = torch.device("cpu")


def found(implementation: Any, ranges: Ranges, interface: Interface = AttentionCall.DECODE) -> Ranges | None:
    with Workers(implementation, CPU, ranges, 10.0) as isolation:
        return discover(isolation.submit, interface, ranges)


def test_a_kernel_of_e4m3_queries_alone_is_found() -> None:
    takes = declining_if(lambda query, **_: query.dtype != torch.float8_e4m3fn)
    ranges = found(takes, Ranges(groups=(1, 2), q_lens=(1, 2)))
    assert ranges is not None
    assert options_of(ranges) == "--dtypes e4m3/e4m3 --groups 1,2 --q-lens 1,2"


def test_of_a_kernel_that_takes_everything_or_nothing_no_axes_are_named() -> None:
    ranges = replace(SMALL, groups=(1, 2), page_sizes=(16, 64), windows=(False, True), sinks=(False, True))
    assert found(references, ranges) is None
    assert found(references, ranges, AttentionCall.MLA_DECODE) is None
    assert found(narrow, replace(SMALL, head_dims=(64, 256))) is None


def test_a_narrow_right_kernel_is_right_and_its_axes_are_named() -> None:
    judged = partial(judge, narrow, only=["K5"], device="cpu", drawn=0)
    report = judged()
    assert report.exit_status == 0
    ((interface, ranges),) = report.narrowed
    assert interface is AttentionCall.DECODE
    assert options_of(ranges) == "--dtypes bf16/bf16 --head-dims 128 --page-sizes 64"
    assert report.left_out == 0
    assert judged(discover=False).narrowed == ()


def test_a_function_that_takes_most_is_not_probed() -> None:
    assert judge(references, only=["K5"], functions=[AttentionCall.CONTEXT.value], device="cpu", drawn=0).narrowed == ()
