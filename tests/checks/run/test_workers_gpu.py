"""A kernel that reads an illegal address and one that never returns cost their own cases and nothing else."""

import re

import pytest
import torch

from lab.checks import Outcome, Ranges, judge
from lab.reports.judgement import reproduction
from tests.checks.hostile_kernels import HOSTILE_HEAD_DIM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="hostile to a CUDA context, and there is none here"),
]
RANGES = Ranges(
    dtypes=((torch.bfloat16, torch.bfloat16),),
    groups=(4,),
    num_kv_heads=(2,),
    head_dims=(64, HOSTILE_HEAD_DIM),
    page_sizes=(16,),
    q_lens=(1,),
    windows=(False,),
)


@pytest.mark.parametrize(
    ("name", "limit_s", "says"),  # a case that compiles on a busy machine can take longer than 15 s
    [("illegal", 90.0, "crashed.*illegal memory access"), ("endless", 15.0, "it did not return within 15 s")],
)
def test_the_hostile_cases_alone_are_lost(name: str, limit_s: float, says: str) -> None:
    kernel = f"tests.checks.hostile_kernels:{name}"
    report = judge(kernel, only=["K1"], ranges=RANGES, isolated=True, time_limit_s=limit_s, drawn=0)
    outcomes = {head_dim: set() for head_dim in RANGES.head_dims}
    for verdict in report.verdicts:
        if verdict.outcome is not Outcome.DECLINED:  # NVFP4 and one rank's keys, which the portable kernel refuses
            outcomes[verdict.case.head_dim].add(verdict.outcome)
        if verdict.case.head_dim == HOSTILE_HEAD_DIM:
            assert re.search(says, verdict.reason), verdict.reason
            assert "hostile_kernels" in reproduction(verdict)
    assert outcomes == {64: {Outcome.RIGHT}, HOSTILE_HEAD_DIM: {Outcome.FAILED}}
