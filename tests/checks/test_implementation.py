"""What fits this machine, judged by a few checks over a few cases: the whole catalogue takes minutes in Triton's interpreter.

`pytest --lab-judge package.module` judges any implementation by every check (`lab.pytest_plugin`).
"""

from dataclasses import replace

import pytest

from lab.checks import judge
from lab.kernels import default_implementation
from tests.checks.small import SMALL

BRIEF = replace(SMALL, windows=(True,), sinks=(True,))


@pytest.mark.parametrize("check", ["K1", "K4"])
def test_what_fits_this_machine_is_right(check: str) -> None:
    report = judge(default_implementation().__name__, only=[check], ranges=BRIEF, drawn=0)
    assert report.is_right, str(report)
