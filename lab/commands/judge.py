"""`lab judge`: judge an implementation."""

import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from lab.commands.options import Device, Implementation, list_option, prepare_machine, refuse, with_options_of_ranges
from lab.commands.progress import shown_progress
from lab.exit_status import ExitStatus
from lab.loading import LoadError
from lab.ranges import options_of, ranges_of

if TYPE_CHECKING:
    from lab.checks.parameters.coverage import Coverage
    from lab.checks.report import Report
    from lab.checks.run.progress import Progress

POLL_INTERVAL_S = 0.3  # of a file that is watched
# Parameters that go with --case.
OF_ONE_CASE = {"implementation", "device", "in_process", "time_limit_s", "case", "watch"}


def _check_named(name: str) -> str:
    """Return the key or name of a check as it is; raise ValueError, with the checks that there are, for any other text."""
    from lab.checks.properties import checks

    names = {spelling for check in checks() for spelling in (check.key, check.key.lower(), check.name)}
    if name not in names:
        keys = ", ".join(f"{check.key} {check.name}" for check in checks())
        raise ValueError(f"there is no check {name!r}; there are {keys}")
    return name


def _function_named(name: str) -> str:
    """Return the name of a function as it is; raise ValueError, with the functions that there are, for any other text."""
    from lab.workloads.interfaces import Interface

    for interface in Interface:
        if name in (interface.value, interface.name.lower()):
            return interface.value
    names = ", ".join(f"{interface.name.lower()} ({interface.value})" for interface in Interface)
    raise ValueError(f"there is no function {name!r}; there are {names}")


def _seconds(text: str) -> float:
    """Read a time such as 90s, 10m or 2h; raise BadParameter for any other text."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)):
        raise typer.BadParameter(f"{text} is no time: a number and s, m or h, such as 90s, 10m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


Only = Annotated[
    list[str] | None,
    list_option(_check_named, "keys or names of checks, see `lab checks`; all if left out", "CHECK,..."),
]
Functions = Annotated[
    list[str] | None,
    list_option(_function_named, "functions to judge; all that the implementation has if left out", "NAME,..."),
]
InProcess = Annotated[
    bool, typer.Option("--in-process", help="use no worker process: a crash or a hang of the kernel ends the judge")
]
MostSeconds = Annotated[
    float, typer.Option(min=0, help="begin no further case after this time", show_default="no limit")
]
Drawn = Annotated[
    int | None,
    typer.Option(min=0, help="random cases of each check and function; the level's number if left out"),
]
ReportFile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="the report, JSON; the user's cache keeps the last of each kernel if left out"),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="judge every case, also those that an earlier report in --out holds")
]
FirstFailure = Annotated[
    bool, typer.Option("--first-failure", help="begin no further case after the first wrong or failed one")
]
Refusals = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="exceptions that count as refusals, such as my.kernel.Unsupported"),
]
ShowsCoverage = Annotated[
    bool,
    typer.Option(
        "--coverage",
        help="print the values and pairs of K18 that were judged, declined or left out; with a report's file in place "
        "of a kernel, print those of the report and judge nothing",
    ),
]
For = Annotated[
    float | None,
    typer.Option(
        "--for",
        parser=_seconds,
        metavar="TIME",
        help="after the level's cases, judge random ones of K18 until the run has taken so long: 90s, 10m, 2h",
    ),
]
Watched = Annotated[
    Path | None, typer.Option(help="judge again whenever this file changes", exists=True, dir_okay=False)
]


@with_options_of_ranges
def judge(
    context: typer.Context,
    implementation: Annotated[str | None, Implementation] = None,
    level: Annotated[Literal["smoke", "full"], typer.Option(help="smoke judges fewer cases than full")] = "smoke",
    only: Only = None,
    functions: Functions = None,
    device: Device = None,
    in_process: InProcess = False,
    time_limit_s: Annotated[float, typer.Option(min=0.001, help="most seconds for one case")] = 120.0,
    workers: Annotated[int, typer.Option(min=1, help="worker processes that judge at the same time")] = 2,
    most_seconds: MostSeconds = math.inf,
    drawn: Drawn = None,
    out: ReportFile = None,
    fresh: Fresh = False,
    case: Annotated[str | None, typer.Option(metavar="REPORT.json#17", help="judge one case of a report again")] = None,
    first_failure: FirstFailure = False,
    refusals: Refusals = None,
    watch: Watched = None,
    discover: Annotated[
        bool, typer.Option(help="where most cases are declined, find the axes that are taken and judge those too")
    ] = True,
    for_seconds: For = None,
    coverage: ShowsCoverage = False,
    **narrowed: Any,
) -> None:
    """Judge an implementation: a module, a file or an object with one or more of FlashInfer's functions."""
    if case is not None:
        _refuse_beside_case(context)
    if watch is not None and in_process:
        refuse("--watch needs workers, which import the kernel anew: leave --in-process out")
    if coverage and implementation is not None and implementation.endswith((".json", ".json.gz")):
        raise typer.Exit(_print_recorded_coverage(Path(implementation)))
    settings: dict[str, Any] = {"device": device, "isolated": not in_process, "time_limit_s": time_limit_s}
    if case is not None:
        _judge_and_exit(partial(_judge_case, *_report_and_number(case), implementation, settings), watch)
    try:
        ranges = ranges_of(narrowed)
        exceptions = None if refusals is None else _exceptions_named(refusals)
    except ValueError as error:
        refuse(str(error))
    prepare_machine(device)
    from lab.kernels import default_implementation

    name = implementation or default_implementation(device).__name__
    settings |= {
        "level": level,
        "ranges": ranges,
        "refusals": exceptions,
        "only": only or (),
        "functions": functions or (),
        "workers": workers,
        "most_seconds": most_seconds,
        "drawn": drawn,
        "discover": discover,
        "for_seconds": for_seconds or 0.0,
        "out": out or _last_report(name),
        "fresh": fresh or out is None,
        "first_failure": first_failure,
    }
    _judge_and_exit(partial(_judge_all, name, settings, coverage), watch)


def _last_report(name: str) -> Path | None:
    """Return where the last report of a kernel is kept, so that its cases have numbers; None where nothing can be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lab"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return cache / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-')}.json" if os.access(cache, os.W_OK) else None


def _exceptions_named(refusals: str) -> Any:
    """Import exceptions by their names, separated by commas; raise ValueError for a name of no exception."""
    from lab.checks.run.support_protocol import resolve_refusals

    return resolve_refusals(refusals)


def _judge_and_exit(judge_once: Callable[[Console], ExitStatus], watched: Path | None) -> NoReturn:
    """Judge once, and again whenever the watched file changes if there is one; end the command with the last exit status."""
    status, console = ExitStatus.DONE, Console()
    try:
        for number in rounds(watched):
            if number:
                console.rule(Text(f"{watched} has changed"))
            status = judge_once(console)
            if watched is not None:
                console.print(
                    f"exit status {status}; waiting for {watched} to change, until Ctrl-C",
                    markup=False,
                    highlight=False,
                )
    except KeyboardInterrupt:
        status = ExitStatus.INTERRUPTED
    raise typer.Exit(status)


def _refuse_beside_case(context: typer.Context) -> None:
    """End the command if its line gives a parameter that --case would ignore."""
    sources = {name: context.get_parameter_source(name) for name in context.params.keys() - OF_ONE_CASE}
    given = sorted(name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE")
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        refuse(f"--case judges one case as its report says: leave out {named}")


def _report_and_number(case: str) -> tuple[Path, int]:
    """Return the path and the number of "REPORT.json#17", or end the command if the text is not of that form."""
    path, _, number = case.rpartition("#")
    if not path or not number.isdecimal():
        refuse(f"--case {case} names no case of a report: give its file and number, such as report.json#17")
    return Path(path), int(number)


def _judge_case(path: Path, number: int, name: str | None, settings: Mapping[str, Any], console: Console) -> ExitStatus:
    """Judge one case of a report, print its verdict, and return the exit status."""
    from lab.checks.record import ReportError, read_case
    from lab.checks.run.judge import judge_recorded
    from lab.checks.run.verdicts import BROKEN

    try:
        prepare_machine(settings["device"] or read_case(path, number).device)
        verdict = judge_recorded(path, number, implementation=name, **settings)
    except LoadError as error:
        return _print_error(str(error), ExitStatus.NOT_JUDGED)
    except (ReportError, ValueError) as error:
        return _print_error(str(error), ExitStatus.MISUSED)
    console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
    was = read_case(path, number)
    is_same = verdict.implementation == was.implementation
    if is_same and verdict.exit_status is ExitStatus.DONE and was.outcome in BROKEN:
        sentence = (
            f"  In {path} the case is {was.outcome.value}. If the kernel has not changed since, its result depends on the "
            "calls before the case: look for state that the kernel keeps from one call to the next."
        )
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    return verdict.exit_status


def _judge_all(name: str, settings: Mapping[str, Any], shows_coverage: bool, console: Console) -> ExitStatus:
    """Judge an implementation, print the report, with the coverage if it is to be shown, and return the exit status."""
    from lab.checks.properties.check import Level
    from lab.checks.run.judge import judge as judge_it
    from lab.reports.judgement import show as show_report

    num_reused = 0
    try:
        with shown_progress(console) as show:

            def tell(progress: "Progress") -> None:
                nonlocal num_reused
                num_reused += not progress.is_new
                show(progress)

            report = judge_it(name, progress=tell, **{**settings, "level": Level(settings["level"])})
    except (LoadError, ValueError) as error:
        return _print_error(str(error), ExitStatus.MISUSED)
    if num_reused:
        console.print(
            f"{num_reused} verdicts are from {settings['out']}, since neither the kernel nor the lab has changed: "
            "--fresh judges all",
            markup=False,
        )
    show_report(report, console)
    _print_narrowings(console, report)
    if shows_coverage:
        _print_coverage(console, report.coverages)
    return report.exit_status


def _print_recorded_coverage(path: Path) -> ExitStatus:
    """Print the coverage of a report's file, and return the exit status."""
    from lab.checks.parameters.coverage import coverages
    from lab.checks.record import ReportError, read_cases, read_expression, read_record

    try:
        record = read_record(path)
        verdicts = list(read_cases(record))
    except ReportError as error:
        return _print_error(str(error), ExitStatus.MISUSED)
    _print_coverage(Console(), coverages(verdicts, read_expression(record["ranges"])))
    return ExitStatus.DONE


def _print_coverage(console: Console, coverages: "Sequence[Coverage]") -> None:
    from lab.reports.judgement import coverage_notes, coverage_table
    from lab.reports.tables import terminal_of

    if not coverages:
        console.print("check K18 judged nothing, so there is no coverage: --only K18 runs it alone")
    for each in coverages:
        console.print(terminal_of(coverage_table(each)))
        for line in coverage_notes(each):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print_narrowings(console: Console, report: "Report") -> None:
    """Print, for each function that declined most cases, the command that judges the axes that it takes."""
    several_functions = len({verdict.interface for verdict in report.verdicts}) > 1
    for interface, ranges in report.narrowed:
        only = f"--functions {interface.value} " if several_functions else ""
        console.print(
            f"{interface.value} declines most of the axes. It was judged again on the axes that it takes: "
            f"lab judge {report.implementation} {only}{options_of(ranges)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _print_error(sentence: str, status: ExitStatus) -> ExitStatus:
    typer.echo(f"lab: {sentence}", err=True)
    return status


def rounds(file: Path | None) -> Iterator[int]:
    """Yield the number of each round: 0 at once, then, if a file is given, the next number each time the file was written."""
    number, seen = 0, _state_of(file)
    yield number
    while file is not None:
        while (now := _state_of(file)) == seen or now is None:  # None: an editor may remove the file for a moment
            time.sleep(POLL_INTERVAL_S)
        number, seen = number + 1, now
        yield number


def _state_of(file: Path | None) -> tuple[int, int] | None:
    """Return the modification time (ns) and size (bytes) of a file; None for no file, or one that is not there."""
    try:
        stat = file.stat() if file is not None else None
    except FileNotFoundError:
        return None
    return None if stat is None else (stat.st_mtime_ns, stat.st_size)
