"""The pytest plugin: a test for each check of each function of a kernel, and a fixture for other tests.

pytest finds it wherever the lab is installed: `pytest --lab-judge my.kernel`. Importing it imports no torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lab.axes import E4M3_ARITHMETIC, LONGEST, SEVERAL, SOME, options_of, positive, space_of
from lab.extras import require
from lab.loading import LoadError, load

if TYPE_CHECKING:
    from lab.checks.check import Check
    from lab.checks.report import CheckSummary
    from lab.checks.space import Space
    from lab.workloads.interfaces import Interface

OPTION = "--lab-judge"
PREFIX = "--lab-"


@pytest.fixture(scope="session")
def assert_close_to_reference() -> Callable[..., None]:
    """`lab.references.assert_close_to_reference`: a kernel's output is right, by the arguments that the kernel got."""
    from lab.references import assert_close_to_reference

    return assert_close_to_reference


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lab-judge", "judge attention kernels (the attention lab)")
    group.addoption(
        OPTION,
        action="append",
        default=[],
        metavar="KERNEL",
        help="judge package.module or path/to/file.py, or :attribute of either, in a test for each check of each of its "
        "functions; without a path on the command line, these tests alone. Several kernels: repeat",
    )
    group.addoption(f"{PREFIX}level", choices=("smoke", "full"), default="smoke", help="how much is judged")
    for name, axis in SEVERAL.items():
        _add_axis(group, name, axis.words, type=partial(_read, axis.values), metavar=axis.metavar)
    for name, words in SOME.items():
        _add_axis(group, name, f"no case has {words}", but="no-", action="store_false")
    _add_axis(group, "longest", LONGEST, type=partial(_read, positive), metavar="N")
    _add_axis(group, "e4m3_arithmetic", E4M3_ARITHMETIC, action="store_true")


def _add_axis(group: Any, name: str, words: str, but: str = "", **how: Any) -> None:
    group.addoption(f"{PREFIX}{but}{name.replace('_', '-')}", dest=f"lab_{name}", default=None, help=words, **how)


def _read(read: Callable[[str], Any], text: str) -> Any:
    try:
        return read(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def pytest_configure(config: pytest.Config) -> None:
    if config.option.lab_judge and config.args_source is not config.ArgsSource.ARGS:
        config.args = []  # nobody asked for other tests


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of the kernels that are named."""
    if not config.option.lab_judge:
        return
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:  # as `python -m pytest` has it
        sys.path.insert(0, folder)
    try:
        require(OPTION, "torch", "hypothesis", "pebble", "rich")
        _let_triton_interpret()
        space = space_of({name.removeprefix("lab_"): value for name, value in vars(config.option).items()})
        for name in config.option.lab_judge:
            kernel = Kernel.from_parent(session, name=name, nodeid=name, space=space, offered=_offered(name))
            items += session.genitems(kernel)
    except (LoadError, ModuleNotFoundError, ValueError) as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from error


def _let_triton_interpret() -> None:
    """Have Triton's kernels run in its interpreter where there is no GPU; Triton reads this when it is imported."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


def _offered(name: str) -> list["Interface"]:
    """Return the functions of a kernel; raise LoadError or ValueError where there is none."""
    from lab.checks.judge import interfaces_of
    from lab.workloads.interfaces import Interface

    offered = interfaces_of(load(name))
    if not offered:
        raise ValueError(f"{name} has none of {', '.join(interface.value for interface in Interface)}")
    return offered


class Kernel(pytest.Collector):
    """A kernel that is judged.

    Attributes:
        space: the axes.
        offered: its functions.
        judged: functions of which something was judged, or nothing could be, so far as is known.
    """

    def __init__(self, *, space: "Space", offered: list["Interface"], **node: Any) -> None:
        super().__init__(**node)
        self.space, self.offered = space, offered
        self.judged: dict[Interface, bool] = {}

    def collect(self) -> Sequence["CheckOfFunction"]:
        """Return a test for each check of each function."""
        from lab.checks.catalogue import checks

        return [
            CheckOfFunction.from_parent(
                self, name=f"{check.key}-{check.name}[{interface.name.lower()}]", check=check, interface=interface
            )
            for check in checks()
            for interface in self.offered
            if interface in check.interfaces
        ]

    def judge(self, check: "Check", interface: "Interface", **how: Any) -> "CheckSummary | None":
        """Judge a function by a check; None where the axes have no case for it."""
        from lab.checks import Level, judge

        level = Level(self.config.option.lab_level)
        report = judge(self.name, only=[check.key], functions=[interface.value], space=self.space, level=level, **how)
        if report.interrupted:
            raise KeyboardInterrupt
        row = report.rows[0] if report.rows else None
        if row is not None and row.judged:
            self.judged[interface] = True
        return row

    def can_be_judged(self, interface: "Interface") -> bool:
        """Return True where some check judges something of a function."""
        if interface not in self.judged:
            self.judged[interface] = any(self._rows(interface))
        return self.judged[interface]

    def _rows(self, interface: "Interface") -> Iterator[bool]:
        from lab.checks.catalogue import checks

        for check in checks():
            if interface in check.interfaces:
                row = self.judge(check, interface, drawn=0)
                yield row is not None and row.judged > 0


class NotRight(Exception):  # noqa: N818 - a verdict
    """A kernel is wrong, or could not be judged at all; the message is the report."""


class CheckOfFunction(pytest.Item):
    """One check of one function of a kernel, as a test."""

    def __init__(self, *, check: "Check", interface: "Interface", **node: Any) -> None:
        super().__init__(**node)
        self.check, self.interface = check, interface

    def runtest(self) -> None:
        """Judge.

        Raises:
            NotRight: something is wrong, or nothing of the function could be judged by any check.
        """
        from lab.checks.verdicts import Outcome

        kernel = self.parent
        assert isinstance(kernel, Kernel)
        row = kernel.judge(self.check, self.interface)
        if row is not None and row.outcome in (Outcome.WRONG, Outcome.FAILED):
            raise NotRight(f"{row.worst}\n  reproduce: {row.worst.reproduce}")
        if row is None or row.outcome is Outcome.DECLINED:
            reason = "the axes have no case for it" if row is None else "; ".join(row.declines)
            if kernel.can_be_judged(self.interface):
                pytest.skip(reason)
            axes = options_of(kernel.space, PREFIX) or "the default axes"
            raise NotRight(
                f"nothing of {self.interface.value} could be judged: it declines every case of {axes}, here with: {reason}. "
                f"Name what it takes by the options of the axes, such as {PREFIX}head-dims 128"
            )

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any, **__: Any) -> Any:
        """Show a verdict as it is, and another error with its traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, NotRight) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return what a report calls this test."""
        return self.path, None, self.nodeid
