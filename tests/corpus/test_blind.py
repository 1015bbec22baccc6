"""The blind kernels: a sample of each module is found, and the page has their numbers."""

import re
from pathlib import Path

import pytest

from corpus.kernels import BLIND, kernel
from corpus.matrix import RANGES
from lab.checks import judge

# Of each module one, by the check that finds it in its first cases; `python -m corpus` judges all.
SAMPLE = {
    "K1": "30 63 134 135 182 235 290 364 366 420 421 570",
    "K2": "285",
    "K16": "99",
    "K17": "409",
    "L1": "96",
    "M3": "199 260 343 403 404",
}
FOUND = [(f"blind{number}", check) for check, numbers in SAMPLE.items() for number in numbers.split()]


@pytest.mark.parametrize(("name", "check"), FOUND)
def test_a_sample_is_found(name: str, check: str) -> None:
    implementation = kernel(name).implementation()
    report = judge(
        implementation, only=[check], ranges=RANGES, device="cpu", first_failure=True, drawn=0, discover=False
    )
    assert any(report.wrong), report.diagnosis.sentence


def test_the_sample_is_of_every_module() -> None:
    assert {kernel(name).make.__module__ for name, _ in FOUND} == {each.make.__module__ for each in BLIND.values()}


def test_the_page_knows_every_number_that_was_not_found() -> None:
    page = Path(__file__).parents[2].joinpath("results", "blind.md").read_text()
    assert {f"blind{int(number)}" for number in re.findall(r"wrong_(\d+)", page)} <= set(BLIND)
