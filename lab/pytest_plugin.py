"""The pytest plugin: a test for each check of each function of a kernel, and a fixture for other tests.

pytest finds it wherever the lab is installed: `pytest --lab-judge my.kernel`. Importing it imports no torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lab.loading import LoadError, load
from lab.ranges import OPTIONS, Option, options_of, ranges_of

if TYPE_CHECKING:
    from lab.checks.report import Report
    from lab.ranges import Ranges
    from lab.workloads.interfaces import Interface

OPTION = "--lab-judge"
PREFIX = "--lab-"
PROBING_CHECK = "K1"  # finds the axes that a function takes which declines most cases
TAKEN = "axes that a kernel takes"  # the property, in pytest's report, of a test that was judged on these alone


@pytest.fixture(scope="session")
def assert_close_to_reference() -> Callable[..., None]:
    """Return `lab.references.assert_close_to_reference`, which checks a kernel's output from the arguments of its call."""
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
    group.addoption(
        f"{PREFIX}refusals",
        metavar="NAME,...",
        help="exceptions that are refusals instead of the usual ones, such as NotImplementedError,my.kernel.Unsupported",
    )
    for name, option in OPTIONS.items():
        _add_range(group, name, option)


def _add_range(group: Any, name: str, option: Option) -> None:
    """Add the option of a field of `lab.ranges.Ranges`."""
    spelt, words, how = name.replace("_", "-"), option.help, dict[str, Any]()
    if option.is_switch:
        how["action"] = "store_false" if option.is_several else "store_true"
        spelt, words = (f"no-{spelt}", f"no case has {words}") if option.is_several else (spelt, words)
    else:
        how["type"] = partial(_read, option.values if option.is_several else option.kind.read)
        how["metavar"] = option.kind.metavar if option.is_several else "N"
    group.addoption(f"{PREFIX}{spelt}", dest=f"lab_{name}", default=None, help=words, **how)


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
        _let_triton_interpret()
        from lab.checks.run.support_protocol import resolve_refusals

        options = vars(config.option).items()  # those of other plugins among them
        ranges = ranges_of({name.removeprefix("lab_"): value for name, value in options if name.startswith("lab_")})
        named = config.option.lab_refusals
        refusals = None if named is None else resolve_refusals(named)
        for name in config.option.lab_judge:
            kernel = JudgedKernel.from_parent(
                session, name=name, nodeid=name, ranges=ranges, offered=_offered(name), refusals=refusals
            )
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
    from lab.checks.run.judge import interfaces_of
    from lab.workloads.interfaces import Interface

    offered = interfaces_of(load(name))
    if not offered:
        raise ValueError(f"{name} has none of {', '.join(interface.value for interface in Interface)}")
    return offered


class JudgedKernel(pytest.Collector):
    """A kernel that is judged.

    Attributes:
        ranges: the axes that were asked for.
        offered: its functions.
        refusals: exceptions that are refusals, or None for the usual ones.
        axes: by function that was tried, the axes that it is judged on: those that it takes, if it declines most cases.
        judged: by function, True if some check judged a case of it, False if none does, as far as is known.
    """

    def __init__(self, *, ranges: "Ranges", offered: list["Interface"], refusals: Any, **node: Any) -> None:
        super().__init__(**node)
        self.ranges, self.offered, self.refusals = ranges, offered, refusals
        self.axes: dict[Interface, Ranges] = {}
        self.judged: dict[Interface, bool] = {}

    def collect(self) -> Sequence["CheckOfFunction"]:
        """Return a test for each check of each function."""
        from lab.checks.properties import checks

        return [
            CheckOfFunction.from_parent(
                self, name=f"{check.key}-{check.name}[{interface.name.lower()}]", check=check.key, interface=interface
            )
            for check in checks()
            for interface in self.offered
            if interface in check.interfaces
        ]

    def judge(self, check: str, interface: "Interface", **how: Any) -> "Report":
        """Judge a function by a check, on the axes that the function takes."""
        if interface not in self.axes:
            self.axes[interface] = self._discover(interface)
        return self._judge(check, interface, self.axes[interface], discover=False, **how)

    def _discover(self, interface: "Interface") -> "Ranges":
        from lab.workloads.interfaces import ATTENTION

        if interface not in ATTENTION:
            return self.ranges
        tried = self._judge(PROBING_CHECK, interface, self.ranges, drawn=0)
        self.judged.setdefault(interface, False)  # no check judges a function that takes no plain call
        return dict(tried.narrowed).get(interface, self.ranges)

    def _judge(self, check: str, interface: "Interface", ranges: "Ranges", **how: Any) -> "Report":
        from lab.checks import judge

        level = self.config.option.lab_level
        how |= {"ranges": ranges, "level": level, "refusals": self.refusals}
        report = judge(self.name, only=[check], functions=[interface.value], **how)
        if report.interrupted:
            raise KeyboardInterrupt
        for row in report.rows:
            if row.judged:
                self.judged[row.interface] = True
        return report

    def can_be_judged(self, interface: "Interface") -> bool:
        """Return True if some check judges a case of a function."""
        from lab.checks.properties import checks

        if interface not in self.judged:
            of_it = (check.key for check in checks() if interface in check.interfaces)
            self.judged[interface] = any(
                row.judged for key in of_it for row in self.judge(key, interface, drawn=0).rows
            )
        return self.judged[interface]


class NotRight(Exception):  # noqa: N818 - a verdict
    """A kernel is wrong, or could not be judged at all; the message is the report."""


class CheckOfFunction(pytest.Item):
    """One check of one function of a kernel, as a test."""

    def __init__(self, *, check: str, interface: "Interface", **node: Any) -> None:
        super().__init__(**node)
        self.check, self.interface = check, interface

    def runtest(self) -> None:
        """Judge.

        Raises:
            NotRight: something is wrong, or nothing of the function could be judged by any check.
        """
        from lab.checks.run.verdicts import BROKEN, Outcome
        from lab.reports.judgement import SHOWN_DECLINES, summary

        kernel = self.parent
        assert isinstance(kernel, JudgedKernel)
        report = kernel.judge(self.check, self.interface)
        rows = report.rows
        axes = kernel.axes[self.interface]
        if axes != kernel.ranges:
            taken = options_of(axes, PREFIX)
            self.user_properties.append(
                (TAKEN, f"{kernel.name}: {self.interface.value} was judged on what it takes: {taken}")
            )
        if not rows or rows[0].outcome is Outcome.DECLINED:
            reason = "; ".join(rows[0].declines[:SHOWN_DECLINES]) if rows else "the axes have no case for it"
            if kernel.can_be_judged(self.interface):
                pytest.skip(reason)
            raise NotRight(
                f"nothing of {self.interface.value} could be judged: it declines every case of "
                f"{options_of(axes, PREFIX) or 'the default axes'}, here with: {reason}. Name what it takes by the options of "
                f"the axes, such as {PREFIX}head-dims 96 (pytest --help, under {OPTION})"
            )
        if rows[0].outcome in BROKEN:
            raise NotRight("\n".join((*summary(report), str(rows[0].worst))))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any, **__: Any) -> Any:
        """Show a verdict as it is, and another error with its traceback."""
        return str(excinfo.value) if isinstance(excinfo.value, NotRight) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the path and the name of this test for pytest's report."""
        return self.path, None, self.nodeid


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the kernels that were judged on the axes that they take, and not on all that were asked for."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    said = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == TAKEN]
    for text in dict.fromkeys(said):
        terminalreporter.write_line(text)
