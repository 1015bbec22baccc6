"""Define `lab judge`, which checks whether a kernel is right, and `lab merge`, which unites the reports of shards of a run."""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from lab.commands.options import (
    Device,
    Implementation,
    ProfileKey,
    list_option,
    prepare_machine,
    refuse,
    refuse_options_without,
    refuse_unreadable,
    refusing_errors,
    refusing_recordings,
    with_options_of_ranges,
)
from lab.commands.progress import shown_progress
from lab.exit_status import ExitStatus
from lab.files import state_of
from lab.loading import LoadError, check_source, last_report, place_of
from lab.names import check_key, function_name
from lab.ranges import ranges_of
from lab.reports.tables import print_lines, terminal, terminal_of

if TYPE_CHECKING:
    from lab.checks.parameters.coverage import Coverage
    from lab.checks.report import Report
    from lab.checks.run.judge_run import Progress

POLL_INTERVAL_S = 0.3  # time between two checks whether a watched file has changed
# Parameters that can be given together with --case.
OF_ONE_CASE = {"implementation", "device", "in_process", "time_limit_s", "case", "watch", "refusals"}
# Parameters that can be given together with --calls.
OF_CALLS = OF_ONE_CASE | {"calls", "workers", "most_seconds", "out", "first_failure", "e4m3_arithmetic"}


def _seconds(text: str) -> float:
    if not (found := re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([smh])", text)):
        raise typer.BadParameter(f"{text} is no time: a number and s, m or h, such as 90s, 10m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


Only = Annotated[
    list[str] | None, list_option(check_key, "keys or names of checks, see `lab checks`; all if left out", "CHECK,...")
]
Functions = Annotated[
    list[str] | None,
    list_option(function_name, "functions to judge; all that the implementation has if left out", "NAME,..."),
]
InProcess = Annotated[
    bool, typer.Option("--in-process", help="use no worker process: a crash or a hang of the kernel ends the judge")
]
MostSeconds = Annotated[
    float | None,
    typer.Option(
        min=0, help="begin no further case after this time; if left out, 17 at the quick level and no limit else"
    ),
]
TimeLimit = Annotated[float, typer.Option(min=0.001, help="most seconds for one case")]
NumWorkers = Annotated[int, typer.Option(min=1, help="worker processes that judge at the same time")]
Drawn = Annotated[
    int | None, typer.Option(min=0, help="random cases of each check and function; the level's number if left out")
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
RefusalNames = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="exceptions that count as refusals: Python's, the kernel's own such as Unsupported, or my/errors.py:Unsupported",
    ),
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
Calls = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER[#3]",
        help="judge calls that `lab record` or FlashInfer recorded in an engine: their outputs, or those of IMPLEMENTATION "
        "for their inputs",
    ),
]
ShardText = Annotated[
    str,
    typer.Option(
        "--shard", metavar="3/8", help="judge a part of the cases, such as the third of 8; lab merge unites the reports"
    ),
]
Watched = Annotated[
    Path | None, typer.Option(help="judge again whenever this file changes", exists=True, dir_okay=False)
]
Discover = Annotated[
    bool, typer.Option(help="where most cases are declined, find the axes that are taken and judge those too")
]


@with_options_of_ranges
def judge(
    context: typer.Context,
    implementation: Annotated[str | None, Implementation] = None,
    level: Annotated[
        Literal["quick", "smoke", "full"], typer.Option(help="quick judges the fewest cases, full the most")
    ] = "smoke",
    only: Only = None,
    functions: Functions = None,
    device: Device = None,
    in_process: InProcess = False,
    time_limit_s: TimeLimit = 120.0,
    workers: NumWorkers = 2,
    most_seconds: MostSeconds = None,
    drawn: Drawn = None,
    out: ReportFile = None,
    fresh: Fresh = False,
    case: Annotated[str | None, typer.Option(metavar="REPORT.json#17", help="judge one case of a report again")] = None,
    calls: Calls = None,
    first_failure: FirstFailure = False,
    refusals: RefusalNames = None,
    watch: Watched = None,
    discover: Discover = True,
    for_seconds: For = None,
    profile: ProfileKey = None,
    shard: ShardText = "",
    coverage: ShowsCoverage = False,
    **narrowed: Any,
) -> None:
    """Judge an implementation: a module, a file or an object with one or more of FlashInfer's functions."""
    watch = watch and watch.absolute()  # --case may change the folder
    if watch is not None and in_process:
        refuse("--watch needs workers, which import the kernel anew: leave --in-process out")
    settings: dict[str, Any] = {"device": device, "isolated": not in_process, "time_limit_s": time_limit_s}
    if case is not None and Path(case.rpartition("#")[0] or case).is_dir():
        calls, case = case, None
    if case is not None:
        refuse_options_without(context, OF_ONE_CASE, "--case judges one case as its report says")
        path, number = _report_and_number(case)
        _judge_and_exit(partial(_judge_case, path, number, implementation, refusals, settings), watch)
    if implementation is not None and implementation.partition("#")[0].endswith((".json", ".json.gz")):
        _print_recorded_coverage(implementation.partition("#")[0], coverage)
        raise typer.Exit
    if implementation is not None:
        with refusing_errors():
            check_source(implementation)
    from lab.checks.run.judge import judge as judge_kernel
    from lab.checks.run.judge import judge_calls
    from lab.checks.run.judging import device_of

    with refusing_errors():
        device_of(device)
        settings |= {"ranges": ranges_of(narrowed), "workers": workers, "out": out}
        settings |= {"most_seconds": most_seconds, "first_failure": first_failure}
    if calls is not None:
        refuse_options_without(context, OF_CALLS, "--calls judges the calls of a folder and no other case")
        if implementation is not None:
            prepare_machine(device)
            settings |= {"implementation": implementation, "refusals": refusals}
        _judge_and_exit(partial(_judge_and_show, partial(judge_calls, calls, **settings), False), watch)
    prepare_machine(device)
    from lab.kernels import default_implementation

    name = implementation or default_implementation(device).__name__
    settings |= {
        "level": level,
        "only": only or (),
        "functions": functions or (),
        "drawn": drawn,
        "discover": discover,
        "for_seconds": for_seconds or 0.0,
        "profile": profile or "",
        "shard": shard,
        "refusals": refusals,
        "out": out or last_report(name),
        "fresh": fresh or out is None,
    }
    _judge_and_exit(partial(_judge_and_show, partial(judge_kernel, name, **settings), coverage), watch)


def _judge_and_exit(judge_once: Callable[[Console], ExitStatus], watched: Path | None) -> NoReturn:
    """Judge once, or again after each change of a watched file until Ctrl-C. End the command with the last exit status."""
    status, console = ExitStatus.DONE, terminal()
    try:
        for number in rounds(watched):
            if number:
                console.rule(Text(f"{watched} has changed"))
            try:
                status = judge_once(console)
            except typer.Exit as refused:
                status = ExitStatus(refused.exit_code)
            if watched is not None:
                print_lines(console, [f"exit status {status}; waiting for {watched} to change, until Ctrl-C"])
    except KeyboardInterrupt:
        status = ExitStatus.INTERRUPTED
    raise typer.Exit(status)


def _report_and_number(case: str) -> tuple[Path, int]:
    path, _, number = case.rpartition("#")
    if not path or not re.fullmatch("[0-9]{1,9}", number):
        refuse(f"--case {case} names no case of a report: give its file and number, such as report.json#17")
    refuse_unreadable("not judged", path)
    return Path(path).absolute(), int(number)


def _judge_case(
    path: Path, number: int, name: str | None, refusals: str | None, settings: Mapping[str, Any], console: Console
) -> ExitStatus:
    from lab.checks.record import read_case, read_record
    from lab.checks.run.judge import judge_recorded
    from lab.checks.run.verdicts import BROKEN

    with refusing_errors():
        was = read_case(path, number)
        folder, here = Path(read_record(path).get("folder") or "."), Path.cwd()
        place = place_of(was.implementation, folder.absolute())
        if name is None and place != place_of(was.implementation, here) and folder.is_dir():
            os.chdir(folder)  # as the report's kernel was named there
            sys.path.insert(0, str(folder))
        prepare_machine(settings["device"] or was.device)
        try:
            verdict = judge_recorded(path, number, implementation=name, refusals=refusals, **settings)
        except LoadError as error:
            refuse(str(error), ExitStatus.NOT_JUDGED)
    print_lines(console, [str(verdict)])
    if place_of(verdict.implementation, Path.cwd()) != place:
        print_lines(console, [f"  {path} is of another kernel: {was.implementation} in {folder.absolute()}"])
    elif verdict.exit_status is ExitStatus.DONE and was.outcome in BROKEN:
        line = (
            f"  In {path} the case is {was.outcome.value}. If the kernel has not changed since, its result depends on the "
            "calls before the case: look for state that the kernel keeps from one call to the next."
        )
        print_lines(console, [line])
    return verdict.exit_status


def _judge_and_show(judge_it: "Callable[..., Report]", shows_coverage: bool, console: Console) -> ExitStatus:
    from lab.reports.judgement import show as show_report

    reused: Counter[str] = Counter()
    with refusing_errors(), shown_progress(Console(stderr=True)) as show:

        def count_and_show(progress: "Progress") -> None:
            reused[progress.verdict.recorded_in] += not progress.is_new
            show(progress)

        report = judge_it(progress=count_and_show)
    unchanged = "since neither the kernel nor the lab has changed: --fresh judges all"
    print_lines(console, (f"{number} verdicts are from {path}, {unchanged}" for path, number in (+reused).items()))
    show_report(report, console)
    if shows_coverage:
        _print_coverage(console, report.coverages)
    return report.exit_status


def merge(
    reports: Annotated[list[Path], typer.Argument(help="the reports of all shards of one run")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="the file of the united report")],
) -> None:
    """Unite the reports of `lab judge --shard 1/8`, `--shard 2/8` and so on. The exit status is that of an undivided run."""
    with refusing_recordings("not merged", *reports):
        from lab.checks.record import merged, replaceable
        from lab.reports.judgement import show as show_report

        report = merged(reports, replaceable(out))
        report.write(out)
        show_report(report, terminal())
    raise typer.Exit(report.exit_status)


def _print_recorded_coverage(report: str, is_wanted: bool) -> None:
    if not is_wanted:
        refuse(
            f"{report} names a report and no kernel: --coverage prints what the report judged, "
            f"--case {report}#17 judges its case 17 again, and lab compare compares two reports"
        )
    path = Path(report)
    with refusing_recordings("no coverage", path):
        from lab.checks.parameters.coverage import coverages
        from lab.checks.record import read_cases, read_expression, read_record

        record = read_record(path)
        found = coverages(list(read_cases(record, path)), read_expression(record["ranges"]))
    _print_coverage(terminal(), found)


def _print_coverage(console: Console, coverages: "Sequence[Coverage]") -> None:
    from lab.reports.judgement import coverage_notes, coverage_table

    if not coverages:
        print_lines(console, ["check K18 judged nothing, so there is no coverage: --only K18 runs it alone"])
    for each in coverages:
        console.print(terminal_of(coverage_table(each)))
        print_lines(console, coverage_notes(each))


def rounds(file: Path | None) -> Iterator[int]:
    """Yield 0, then 1, 2 and so on, each after a change of the file. Without a file, yield only 0."""
    number, seen = 0, state_of(file)
    yield number
    while file is not None:
        while (now := state_of(file)) == seen or now is None:  # None: an editor may remove the file for a moment
            time.sleep(POLL_INTERVAL_S)
        number, seen = number + 1, now
        yield number
