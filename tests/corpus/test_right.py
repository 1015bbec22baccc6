"""Right kernels, written differently, in which the judge must find nothing wrong; and what they are when they are biased."""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from corpus.models.attention import Attention
from corpus.right import KERNELS
from lab.calls.problem import AttentionCall
from lab.checks import CaseVerdict, judge
from lab.checks.report import Report
from lab.workloads.interfaces import PAGED_CALLS
from tests.checks.small import SMALL

pytestmark = pytest.mark.usefixtures("one_thread")
B, H, E = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# Every argument of a call, on few sizes.
RANGES = replace(
    SMALL,
    dtypes=((B, B), (H, H), (B, E)),
    groups=(3,),
    num_kv_heads=(2,),
    q_lens=(1, 4),
    windows=(False, True),
    sinks=(False, True),
    kv_layouts=("HND", "NHD"),
    nvfp4=(False, True),
    longest=150,
)
CHECKS = ("K1", "K2", "K3", "K13", "M3")  # those in which arithmetic shows
SAMPLED = 3  # kernels that are judged without --whole-corpus


def sample() -> list[str]:
    return random.Random(0).sample(sorted(KERNELS), SAMPLED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        metafunc.parametrize("name", KERNELS if metafunc.config.getoption("--whole-corpus") else sample())


def declined(report: Report) -> list[CaseVerdict]:
    """Return the verdicts with a refusal, but for block-sparse calls and calls of one rank, which the models do not know."""
    special = [
        each for each in report.verdicts if getattr(each.case, "head_pages", None) or getattr(each.case, "rank", None)
    ]
    return [each for each in report.verdicts if each.judged.declines and each not in special]


def test_a_right_kernel_is_right(name: str, request: pytest.FixtureRequest) -> None:
    """K11 takes every argument, and as long as all other checks: of the sample, one kernel's."""
    ranges = replace(RANGES, top_ks=(0,))  # these models refuse rows that select entries: corpus.models.ragged has them
    takes_every_argument = name == sample()[0] or request.config.getoption("--whole-corpus")
    checks = (*CHECKS, "K11") if takes_every_argument else CHECKS
    report = judge(KERNELS[name], ranges=ranges, only=checks, device="cpu", drawn=0)
    assert report.is_right, str(report)
    assert {verdict.interface for verdict in report.verdicts} == {*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT}
    assert not declined(report)


def test_a_sum_in_the_order_of_pages_is_right() -> None:
    report = judge(KERNELS["pages_by_number"], ranges=SMALL, only=("K7", "K10"), device="cpu", drawn=0)
    assert report.is_right, str(report)


def biased(kernel: Attention, bias: Callable[[torch.Tensor], None]) -> SimpleNamespace:
    """A kernel whose outputs are changed in place before they are returned."""

    def changed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            returned = function(**arguments)
            bias(returned[0] if isinstance(returned, tuple) else returned)
            return returned

        return call

    names = [each.value for each in (*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT)]
    return SimpleNamespace(**{name: changed(getattr(kernel, name)) for name in names})


def everywhere(out: torch.Tensor) -> None:
    out *= 0.995


def last_head(out: torch.Tensor) -> None:
    out[..., -1, :] *= 1.005


@pytest.mark.parametrize("bias", [everywhere, last_head])
def test_half_a_percent_is_found_in_every_call(bias: Callable[[torch.Tensor], None]) -> None:
    ranges = replace(RANGES, dtypes=((B, B),), kv_layouts=("HND",))
    report = judge(biased(KERNELS["two_passes"], bias), ranges=ranges, only=("K1", "M3"), device="cpu", drawn=0)
    wrong = {verdict.interface for verdict in report.verdicts if "all outputs" in " ".join(verdict.judged.wrongs)}
    assert wrong == {*PAGED_CALLS, AttentionCall.RAGGED_CONTEXT}
