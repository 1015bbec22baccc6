"""`lab judge`: judge an implementation."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console

from lab.axes import E4M3_ARITHMETIC, LONGEST, SEVERAL, SOME, options_of, space_of
from lab.commands.options import (
    DONE,
    INTERRUPTED,
    MISUSED,
    NOT_JUDGED,
    Device,
    Implementation,
    Out,
    prepare_machine,
    refuse,
    several,
)
from lab.commands.progress import shown_progress
from lab.commands.watch import rounds
from lab.loading import LoadError

if TYPE_CHECKING:
    from lab.checks.progress import Progress
    from lab.checks.report import Report

AXES = "Axes: narrow the cases to what the kernel was built for"


def _check(name: str) -> str:
    from lab.checks.catalogue import checks

    known = {spelling for check in checks() for spelling in (check.key, check.key.lower(), check.name)}
    if name not in known:
        keys = ", ".join(f"{check.key} {check.name}" for check in checks())
        raise ValueError(f"there is no check {name!r}; there are {keys}")
    return name


def _function(name: str) -> str:
    from lab.workloads.interfaces import Interface

    for interface in Interface:
        if name in (interface.value, interface.name.lower()):
            return interface.value
    names = ", ".join(f"{interface.name.lower()} ({interface.value})" for interface in Interface)
    raise ValueError(f"there is no function {name!r}; there are {names}")


def _axis(name: str) -> Any:
    axis = SEVERAL[name]
    return several(axis.read, axis.words, axis.metavar, AXES)


def _some(name: str) -> Any:
    return typer.Option(f"--{name}/--no-{name}", help=f"some cases have {SOME[name]}", rich_help_panel=AXES)


Only = Annotated[list[str] | None, several(_check, "keys or names of checks, see `lab checks`", "CHECK,...")]
Functions = Annotated[list[str] | None, several(_function, "all that it has if left out", "NAME,...")]
InProcess = Annotated[bool, typer.Option("--in-process", help="no worker: a crash or a hang ends the judge")]
MostSeconds = Annotated[float, typer.Option(min=0, help="begin no further case after so long", show_default="no limit")]
Drawn = Annotated[int | None, typer.Option(min=0, help="cases that Hypothesis draws per check and function")]
Longest = Annotated[int | None, typer.Option(min=1, help=LONGEST, rich_help_panel=AXES)]
E4M3Arithmetic = Annotated[bool, typer.Option("--e4m3-arithmetic", help=E4M3_ARITHMETIC, rich_help_panel=AXES)]


def judge(
    context: typer.Context,
    implementation: Annotated[str | None, Implementation] = None,
    level: Annotated[Literal["smoke", "full"], typer.Option(help="how much is judged")] = "smoke",
    only: Only = None,
    functions: Functions = None,
    device: Device = None,
    in_process: InProcess = False,
    time_limit_s: Annotated[float, typer.Option(min=0.001, help="of one case")] = 120.0,
    workers: Annotated[int, typer.Option(min=1, help="processes that judge at a time")] = 2,
    most_seconds: MostSeconds = math.inf,
    drawn: Drawn = None,
    out: Out = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="judge again what the --out file of the same run holds")
    ] = False,
    case: Annotated[str | None, typer.Option(metavar="REPORT.json#17", help="judge one case of a report again")] = None,
    first_failure: Annotated[
        bool, typer.Option("--first-failure", help="end at the first wrong or failed case")
    ] = False,
    refusals: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="exceptions that are refusals, such as my.kernel.Unsupported")
    ] = None,
    watch: Annotated[
        Path | None, typer.Option(help="judge again whenever this file changes", exists=True, dir_okay=False)
    ] = None,
    probe: Annotated[bool, typer.Option(help="where most is declined, find what is taken and judge that too")] = True,
    dtypes: Annotated[list[str] | None, _axis("dtypes")] = None,
    groups: Annotated[list[int] | None, _axis("groups")] = None,
    num_kv_heads: Annotated[list[int] | None, _axis("num_kv_heads")] = None,
    head_dims: Annotated[list[int] | None, _axis("head_dims")] = None,
    page_sizes: Annotated[list[int] | None, _axis("page_sizes")] = None,
    q_lens: Annotated[list[int] | None, _axis("q_lens")] = None,
    large_batches: Annotated[list[int] | None, _axis("large_batches")] = None,
    masked_rows: Annotated[list[int] | None, _axis("masked_rows")] = None,
    mla_head_dims: Annotated[list[str] | None, _axis("mla_head_dims")] = None,
    mla_heads: Annotated[list[int] | None, _axis("mla_heads")] = None,
    mla_page_sizes: Annotated[list[int] | None, _axis("mla_page_sizes")] = None,
    geometries: Annotated[list[str] | None, _axis("geometries")] = None,
    kv_layouts: Annotated[list[str] | None, _axis("kv_layouts")] = None,
    longest: Longest = None,
    e4m3_arithmetic: E4M3Arithmetic = False,
    windows: Annotated[bool, _some("windows")] = True,
    sinks: Annotated[bool, _some("sinks")] = True,
    nvfp4: Annotated[bool, _some("nvfp4")] = True,
) -> None:
    """Judge an implementation: a module, a file or an object with one or more of FlashInfer's functions."""
    if case is not None and (out is not None or first_failure or only or functions):
        refuse("--case judges one case: it goes with none of --out, --first-failure, --only and --functions")
    if watch is not None and in_process:
        refuse("--watch needs workers, which import the kernel anew: leave --in-process out")
    how: dict[str, Any] = {"device": device, "isolated": not in_process, "time_limit_s": time_limit_s}
    if case is not None:
        _end(partial(_judge_case, *_report_and_number(case), implementation, how), watch)
    try:
        space, refused = space_of(context.params), None if refusals is None else _resolved(refusals)
    except ValueError as error:
        refuse(str(error))
    prepare_machine(device)
    from lab.kernels import default_implementation

    how |= {"level": level, "space": space, "refusals": refused, "only": only or (), "functions": functions or ()}
    how |= {"workers": workers, "most_seconds": most_seconds, "drawn": drawn, "probe": probe}
    how |= {"out": out, "fresh": fresh, "first_failure": first_failure}
    _end(partial(_judge_all, implementation or default_implementation(device).__name__, how), watch)


def _resolved(refusals: str) -> Any:
    from lab.checks.refusals import resolve_refusals

    return resolve_refusals(refusals)


def _end(judge_round: Callable[[Console], int], watched: Path | None) -> NoReturn:
    """Judge, again whenever a file changes if there is one, and end with the exit status."""
    status, console = DONE, Console()
    try:
        for number in rounds(watched):
            if number:
                console.rule(f"{watched} has changed")
            status = judge_round(console)
            if watched is not None:
                console.print(f"exit status {status}; waiting for {watched} to change, until Ctrl-C", highlight=False)
    except KeyboardInterrupt:
        status = INTERRUPTED
    raise typer.Exit(status)


def _report_and_number(case: str) -> tuple[Path, int]:
    """Read "REPORT.json#17"."""
    path, _, number = case.rpartition("#")
    if not path or not number.isdecimal():
        refuse(f"--case {case} names no case of a report: give its file and number, such as report.json#17")
    return Path(path), int(number)


def _judge_case(path: Path, number: int, name: str | None, how: Mapping[str, Any], console: Console) -> int:
    """Judge one case of a report, print its verdict, and return the exit status."""
    from lab.checks.judge import judge_recorded
    from lab.checks.recording import ReportError, read_case
    from lab.checks.verdicts import Outcome

    try:
        prepare_machine(how["device"] or read_case(path, number).device)
        verdict = judge_recorded(path, number, implementation=name, **how)
    except LoadError as error:
        return _said(str(error), NOT_JUDGED)
    except (ReportError, ValueError) as error:
        return _said(str(error), MISUSED)
    console.print(str(verdict), markup=False, highlight=False, soft_wrap=True)
    was = read_case(path, number)
    is_same = verdict.implementation == was.implementation
    if is_same and verdict.exit_status == DONE and was.outcome in (Outcome.WRONG, Outcome.FAILED):
        sentence = (
            f"  In {path} it is {was.outcome.value}. If the kernel has not changed since, it depends on what ran before the "
            "case: look for what it keeps from one call to the next."
        )
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    return verdict.exit_status


def _judge_all(name: str, how: Mapping[str, Any], console: Console) -> int:
    """Judge an implementation, print the report, and return the exit status."""
    from lab.checks.check import Level
    from lab.checks.judge import judge as judge_it

    recalled = 0
    try:
        with shown_progress(console) as show:

            def tell(progress: "Progress") -> None:
                nonlocal recalled
                recalled += not progress.is_new
                show(progress)

            report = judge_it(name, progress=tell, **{**how, "level": Level(how["level"])})
    except (LoadError, ValueError) as error:
        return _said(str(error), MISUSED)
    if recalled:
        console.print(f"{recalled} verdicts are from {how['out']}, where nothing has changed since: --fresh judges all")
    report.print(console)
    _print_narrowings(console, report)
    return report.exit_status


def _print_narrowings(console: Console, report: "Report") -> None:
    several_functions = len({verdict.interface for verdict in report.verdicts}) > 1
    for interface, space in report.narrowed:
        only = f"--functions {interface.value} " if several_functions else ""
        console.print(
            f"{interface.value} declines most of the axes, and was judged on those that it takes too: "
            f"lab judge {report.implementation} {only}{options_of(space)}",
            highlight=False,
            soft_wrap=True,
        )


def _said(sentence: str, status: int) -> int:
    typer.echo(f"lab: {sentence}", err=True)
    return status
