"""The blind kernels: a sample of each module is found, the model that they change is right, and the page has their numbers."""

import re
from pathlib import Path

import pytest

from corpus import right
from corpus.dishonest.cases import small_cases
from corpus.kernels import BLIND, kernel
from corpus.matrix import RANGES
from corpus.models.attention import Attention
from lab.checks import Outcome, judge, judge_case

# Of each module one that few cases of a check find; `python -m corpus` judges all.
SAMPLE = {
    "blind20": "K1",
    "blind30": "K1",
    "blind63": "K1",
    "blind47": "M3",
    "blind52": "L1",
    "blind60": "K17",
}


@pytest.mark.parametrize(("name", "check"), SAMPLE.items())
def test_a_sample_is_found(name: str, check: str) -> None:
    implementation = kernel(name).implementation()
    report = judge(implementation, only=[check], ranges=RANGES, device="cpu", first_failure=True, drawn=0, probe=False)
    assert any(report.wrong), report.diagnosis.sentence


@pytest.mark.parametrize("implementation", [Attention(), right.right2, right.right3], ids=["model", "splits", "torch"])
def test_the_model_and_right_kernels_are_right(implementation: object) -> None:
    for case in list(small_cases())[:3]:
        assert judge_case(implementation, "K1", case, "cpu").outcome is Outcome.RIGHT


def test_the_page_knows_every_number_that_was_not_found() -> None:
    page = Path(__file__).parents[2].joinpath("results", "blind.md").read_text()
    assert {f"blind{int(number)}" for number in re.findall(r"wrong_(\d+)", page)} <= set(BLIND)
