"""A pytest plugin that makes one test per check and function of a kernel (`pytest --lab-judge my.kernel`), and a fixture.

pytest finds the plugin wherever the lab is installed. Importing this module does not import torch.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from lab.loading import LoadError, last_report
from lab.names import INTERFACES, Interface, profile_name
from lab.ranges import OPTIONS, Ranges, options_of, ranges_of

OPTION = "--lab-judge"
PREFIX = "--lab-"
DISCOVERING_CHECK = "K1"  # it finds the values that a function supports which does not support most cases
TAKEN = "axes that a kernel takes"  # property in pytest's report of a test that was judged only on the supported values


@pytest.fixture(scope="session")
def assert_close_to_reference() -> Callable[..., None]:
    """Return `lab.references.assert_close_to_reference`, which compares a kernel's output with the reference for its call."""
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
    group.addoption(f"{PREFIX}level", choices=("quick", "smoke", "full"), default="smoke", help="how much is judged")
    engine = partial(_read, profile_name)
    group.addoption(f"{PREFIX}profile", type=engine, metavar="ENGINE", help="judge only what sglang or vllm sends")
    group.addoption(
        f"{PREFIX}refusals",
        metavar="NAME,...",
        help="exceptions that are refusals instead of the usual ones, such as NotImplementedError,my/errors.py:Unsupported; "
        "a name alone is one of Python's, or of the kernel's own module",
    )
    for name, option in OPTIONS.items():
        spelt, words, how = name.replace("_", "-"), option.help, dict[str, Any]()
        if option.is_switch and option.is_several:
            spelt, words, how["action"] = f"no-{spelt}", f"no case has {words}", "store_false"
        elif option.is_switch:
            how["action"] = "store_true"
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
        config.args = []  # only the judge's tests run


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.option.lab_judge:
        return
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:  # `python -m pytest` has it
        sys.path.insert(0, folder)
    try:
        import torch

        if not torch.cuda.is_available():  # Triton reads this when it is imported
            os.environ.setdefault("TRITON_INTERPRET", "1")
        from lab.workloads.interfaces import interfaces_of

        options = vars(config.option).items()  # includes the options of other plugins
        ranges = ranges_of({name.removeprefix("lab_"): value for name, value in options if name.startswith("lab_")})
        for name in config.option.lab_judge:
            with _workers(name, config) as pool:
                offered = pool.call(interfaces_of)
            if not offered:
                raise ValueError(f"{name} has none of {', '.join(interface.value for interface in INTERFACES)}")
            kernel = JudgedKernel.from_parent(session, name=name, nodeid=name, ranges=ranges, offered=offered)
            items += session.genitems(kernel)
    except (LoadError, ModuleNotFoundError, ValueError) as error:
        raise pytest.UsageError(f"{OPTION}: {error}") from error


def _workers(name: str, config: pytest.Config) -> Any:
    """Return a pool with one worker process for the kernel `name`, so that a kernel that crashes does not end pytest."""
    from lab.checks.run.judge import TIME_LIMIT_S
    from lab.checks.run.judging import Refusals, device_of
    from lab.checks.run.workers import Workers

    named = config.option.lab_refusals
    refusals = None if named is None else Refusals.of(named, name)
    return Workers(name, device_of(None), Ranges(), TIME_LIMIT_S, refusals=refusals)


class JudgedKernel(pytest.Collector):
    """A pytest collector for one kernel. For each of the kernel's functions (`offered`) it has one test per check."""

    def __init__(self, *, ranges: Ranges, offered: list[Interface], **node: Any) -> None:
        super().__init__(**node)
        self.ranges, self.offered = ranges, offered
        self._stack = ExitStack()
        self._ranges: dict[Interface, Ranges] = {}
        self._judged: dict[Interface, bool] = {}  # by function: whether some check judged a case, as far as known

    def setup(self) -> None:
        self._pool = self._stack.enter_context(_workers(self.name, self.config))

    def teardown(self) -> None:
        self._stack.close()

    def collect(self) -> Sequence["CheckOfFunction"]:
        from lab.checks.properties import checks

        return [
            CheckOfFunction.from_parent(
                self, name=f"{check.key}-{check.name}[{interface.name.lower()}]", check=check.key, interface=interface
            )
            for check in checks()
            for interface in self.offered
            if interface in check.interfaces
        ]

    def ranges_of(self, interface: Interface) -> Ranges:
        """Return the ranges of parameters with which a function is judged: those that pytest's options request. If the function
        declines most cases, unsupported values are removed.
        """
        from lab.workloads.interfaces import PAGED_CALLS

        if interface not in self._ranges:
            narrowed: dict[Interface, Ranges] = {}
            if interface in PAGED_CALLS:
                found = self.judge(DISCOVERING_CHECK, interface, ranges=self.ranges, discover=True, drawn=0)
                narrowed = dict(found.narrowed)
                # A function that declines every plain call is judged by no check.
                self._judged.setdefault(interface, False)
            self._ranges[interface] = narrowed.get(interface, self.ranges)
        return self._ranges[interface]

    def judge(self, check: str, interface: Interface, **how: Any) -> Any:
        from lab.checks import judge

        settings = {
            "ranges": how.get("ranges") or self.ranges_of(interface),
            "discover": False,
            "level": self.config.option.lab_level,
            "profile": self.config.option.lab_profile or "",
            "refusals": self.config.option.lab_refusals,
            "fresh": True,
            "isolated": True,
            "workers": self._pool,
            "out": last_report(self.name, f"{check} {interface.value}"),
        }
        report = judge(self.name, only=check, functions=[interface.value], **settings | how)
        if report.interrupted:
            raise KeyboardInterrupt
        if any(row.judged for row in report.rows):
            self._judged[interface] = True
        return report

    def can_be_judged(self, interface: Interface) -> bool:
        from lab.checks.properties import checks

        if interface not in self._judged:
            keys = [check.key for check in checks() if interface in check.interfaces]
            self._judged[interface] = any(
                row.judged for key in keys for row in self.judge(key, interface, drawn=0).rows
            )
        return self._judged[interface]


class NotRight(Exception):  # noqa: N818 - a verdict
    """A kernel is wrong, or none of its cases could be judged. The message is a summary of the report."""


class CheckOfFunction(pytest.Item):
    def __init__(self, *, check: str, interface: Interface, **node: Any) -> None:
        super().__init__(**node)
        self.check, self.interface = check, interface

    def runtest(self) -> None:
        from lab.checks.run.verdicts import Outcome
        from lab.reports.judgement import SHOWN_DECLINES, summary

        kernel = self.parent
        assert isinstance(kernel, JudgedKernel)
        report, ranges = kernel.judge(self.check, self.interface), kernel.ranges_of(self.interface)
        named = options_of(ranges, PREFIX)
        if ranges != kernel.ranges:
            self.user_properties.append(
                (TAKEN, f"{kernel.name}: {self.interface.value} was judged on what it takes: {named}")
            )
        row = next(iter(report.rows), None)
        if row is None or row.outcome is Outcome.DECLINED:
            reason = "; ".join(row.declines[:SHOWN_DECLINES]) if row else "the axes have no case for it"
            if kernel.can_be_judged(self.interface):
                pytest.skip(reason)
            raise NotRight(
                f"nothing of {self.interface.value} could be judged: it declines every case of "
                f"{named or 'the default axes'}, here with: {reason}. Name what it takes by the options of "
                f"the axes, such as {PREFIX}head-dims 96 (pytest --help, under {OPTION})"
            )
        if any(report.wrong):
            worst = () if report.diagnosis.regions else (str(row.worst),)  # a region shows its smallest case
            raise NotRight("\n".join((*summary(report), *worst)))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any, **__: Any) -> Any:
        return str(excinfo.value) if isinstance(excinfo.value, NotRight) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.nodeid


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a line for each judged function (of FlashInfer) whose cases had only a part of the requested parameter values, such
    as page sizes. The line names the values that were judged.
    """
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    lines = [text for report in reports for name, text in getattr(report, "user_properties", ()) if name == TAKEN]
    for text in dict.fromkeys(lines):
        terminalreporter.write_line(text)
