"""Any implementation, every check: `pytest tests/checks/test_implementation.py --implementation package.module`.

Without the option, what fits this machine is judged by a few checks over a few cases: the whole catalogue takes Triton's
interpreter half an hour.
"""

from dataclasses import replace

import pytest

from lab.checks import Outcome, Space, judge
from lab.checks.catalogue import checks
from lab.checks.check import Check
from lab.checks.judge import interfaces_of
from lab.kernels import default_implementation
from lab.loading import load
from lab.workloads.interfaces import Interface
from tests.checks.small import SMALL

BRIEF = replace(SMALL, windows=(True,), sinks=(True,))
BRIEF_CHECKS = ("K1", "K4", "L1")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test for each check of each function of each implementation."""
    named = metafunc.config.getoption("--implementation")
    wanted = [check for check in checks() if named or check.key in BRIEF_CHECKS]
    rows = []
    for name in named or [default_implementation().__name__]:
        try:
            offered = interfaces_of(load(name))
        except (ImportError, AttributeError) as error:
            raise pytest.UsageError(f"{name} cannot be imported: {error}") from error
        if not offered:
            raise pytest.UsageError(f"{name} has none of {', '.join(interface.value for interface in Interface)}")
        rows += [
            pytest.param(name, check, interface, id=f"{name}-{check.key}-{check.name}-{interface.name.lower()}")
            for check in wanted
            for interface in offered
            if interface in check.interfaces
        ]
    metafunc.parametrize(("name", "check", "interface"), rows)


def test_an_implementation_is_right(
    name: str, check: Check, interface: Interface, request: pytest.FixtureRequest
) -> None:
    is_named = request.config.getoption("--implementation")
    report = judge(
        name,
        only=[check.key],
        functions=[interface.value],
        space=Space() if is_named else BRIEF,
        drawn=None if is_named else 0,
    )
    (row,) = report.rows
    if row.outcome is Outcome.DECLINED:
        pytest.skip("; ".join(row.declines))
    if row.outcome in (Outcome.WRONG, Outcome.FAILED):
        pytest.fail(f"{row.worst}\n  reproduce: {row.worst.reproduce}", pytrace=False)
