"""The blind kernels: all are there, say what shows their defect, and a sample is judged as `python -m corpus.blind` does."""

import re
from pathlib import Path

import pytest

from corpus.blind import kernels, right
from corpus.blind.model import Kernel, decode_of
from corpus.dishonest.cases import small_cases
from corpus.matrix import RANGES
from lab.checks import Outcome, judge, judge_case
from lab.workloads.interfaces import Interface

KERNELS = kernels()
NAMES = {interface.value for interface in Interface}
# Of each function, found by few cases of one check.
SAMPLE = {
    "Blind20": "K1",
    "Blind30": "K1",
    "Blind63": "K1",
    "Blind47": "M3",
    "Blind52": "L1",
    "Blind60": "K17",
}


def test_there_are_590_with_a_defect_a_trigger_and_a_function_each() -> None:
    assert len({name.partition(":")[2] for name in KERNELS}) == len(KERNELS) == 590
    for kernel in KERNELS.values():
        assert kernel.__doc__
        assert kernel.trigger
        assert any(hasattr(kernel, name) for name in NAMES)


@pytest.mark.parametrize(("name", "check"), SAMPLE.items())
def test_a_sample_is_found(name: str, check: str) -> None:
    (kernel,) = (kernel for full, kernel in KERNELS.items() if full.endswith(f":{name}"))
    report = judge(kernel, only=[check], ranges=RANGES, device="cpu", first_failure=True, drawn=0, probe=False)
    assert any(report.wrong), report.diagnosis.sentence


def test_the_model_is_right() -> None:
    @right(decode_of)
    class Model(Kernel):
        pass

    for case in list(small_cases())[:3]:
        assert judge_case(Model, "K1", case, "cpu").outcome is Outcome.RIGHT


def test_the_page_knows_every_number_that_was_not_found() -> None:
    page = Path(__file__).parents[2].joinpath("results", "blind.md").read_text()
    there = {int(name.rpartition("Blind")[2]) for name in KERNELS}
    assert {int(number) for number in re.findall(r"wrong_(\d+)", page)} <= there
