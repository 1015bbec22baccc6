"""`lab judge`: judge an implementation."""

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from lab.axes import E4M3_ARITHMETIC, LONGEST, SEVERAL, SOME, space_of
from lab.commands.options import (
    DONE,
    NOT_JUDGED,
    WRONG,
    Device,
    Implementation,
    Out,
    loaded,
    prepare_machine,
    refuse,
    several,
)

if TYPE_CHECKING:
    from lab.checks.progress import Progress as ProgressOfJudge
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

    names = [interface.value for interface in Interface]
    if name not in names:
        raise ValueError(f"there is no function {name!r}; there are {', '.join(names)}")
    return name


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
    prepare_machine(device)
    from lab.checks.judge import interfaces_of
    from lab.kernels import default_implementation
    from lab.workloads.interfaces import Interface

    name = implementation or default_implementation(device).__name__
    if not interfaces_of(loaded(name)):
        refuse(f"{name} has none of {', '.join(interface.value for interface in Interface)}")
    console = Console()
    report = _report(
        console,
        name,
        level=level,
        space=space_of(context.params),
        only=only or (),
        functions=functions or (),
        device=device,
        isolated=not in_process,
        workers=workers,
        time_limit_s=time_limit_s,
        most_seconds=most_seconds,
        drawn=drawn,
    )
    report.print(console)
    if out is not None:
        report.write(out)
    raise typer.Exit(DONE if report.is_right else WRONG if any(report.wrong) else NOT_JUDGED)


def _report(console: Console, name: str, *, level: str, **how: Any) -> "Report":
    """Judge, with a line of progress on a terminal."""
    from lab.checks.check import Level
    from lab.checks.judge import judge as judge_it
    from lab.checks.verdicts import Outcome

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting")

        def tell(told: "ProgressOfJudge") -> None:
            verdict = told.verdict
            progress.update(task, advance=1, description=f"{verdict.check} of {verdict.interface.value}")
            if verdict.outcome in (Outcome.WRONG, Outcome.FAILED) and not verdict.drawn:
                progress.console.print(f"{verdict.check} of {verdict.interface.value} is {verdict.outcome.value}")

        return judge_it(name, level=Level(level), progress=tell if console.is_terminal else None, **how)
