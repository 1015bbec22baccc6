"""`lab compare` and `lab ab`: two sides by one rule, recorded or measured here."""

from typing import TYPE_CHECKING, Annotated

import typer

from lab.commands.options import (
    L2,
    MISUSED,
    NOT_JUDGED,
    Clock,
    Trace,
    loaded,
    misused,
    need_gpu,
    refuse,
)

if TYPE_CHECKING:
    from lab.timing.statistics import Rule

MinimumEffect = Annotated[float, typer.Option(help="a smaller change is none")]
Significance = Annotated[float, typer.Option(help="of the rank test and the interval")]
Json = Annotated[
    str | None, typer.Option(metavar="PATH", help="write it there too; - for the output, without the table")
]
Markdown = Annotated[str | None, typer.Option(metavar="PATH", help="as --json")]


def _rule(minimum_effect_percent: float, significance: float) -> "Rule":
    from lab.timing.statistics import Rule

    with misused():
        return Rule(minimum_effect_percent, significance)


def compare(
    before: Annotated[str, typer.Argument(help="a recorded run, or a folder of repeated ones")],
    after: Annotated[str | None, typer.Argument(help="the same of the other side")] = None,
    by: Annotated[
        tuple[str, str, str] | None,
        typer.Option(metavar="KEY BEFORE AFTER", help="two values of one recorded fact, within one run"),
    ] = None,
    minimum_effect_percent: MinimumEffect = 3.0,
    significance: Significance = 0.01,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 on an UNSURE row too")] = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Compare two recorded runs, or two implementations or settings within one: the changed rows first.

    Exit status: 1 if a row is SLOWER or missing, 125 if nothing was compared or a row was refused.
    """
    from lab.reports.compare import compare as compare_files
    from lab.reports.comparison import NotComparableError
    from lab.reports.recorded import RecordedFileError

    if (after is None) == (by is None):
        refuse("compare BEFORE with AFTER, or within BEFORE --by KEY and two of its values")
    try:
        report = compare_files(before, after, by, _rule(minimum_effect_percent, significance), strict)
    except (RecordedFileError, NotComparableError) as error:
        refuse(f"not compared: {error}", MISUSED if isinstance(error, RecordedFileError) else NOT_JUDGED)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)


def ab(
    scenario: Annotated[str, typer.Argument(help="such as decode/llama-3.1-8b/64q1s4k")],
    first: Annotated[str, typer.Argument(help="a module with FlashInfer's names, or path/to/file.py")],
    second: Annotated[str | None, typer.Argument(help="another; the same if left out")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SCENARIO", help="the second's scenario; the first's if left out")
    ] = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Annotated[int, typer.Option(min=1, help="of each side, in turns")] = 60,
    minimum_effect_percent: MinimumEffect = 1.0,
    significance: Significance = 0.01,
    trace: Trace = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Measure two kernels, or two settings, against each other on this GPU: in one process, their samples in turns.

    Exit status: 1 if the second is SLOWER, 125 if the two could not be compared.
    """
    from lab.reports.ab import ab_report, measure_sides
    from lab.timing.method import method_named
    from lab.workloads.scenarios import scenario as scenario_named
    from lab.workloads.traces import read_trace

    rule = _rule(minimum_effect_percent, significance)
    sides = [(scenario, first), (against or scenario, second or first)]
    if sides[0] == sides[1]:
        refuse("the two sides are the same: name a second module, or another scenario with --against")
    with misused():
        requests = None if trace is None else read_trace(trace)
        cases = [scenario_named(name, requests) for name, _ in sides]
    modules = [loaded(name) for _, name in sides]
    need_gpu()
    try:
        times = measure_sides(cases, modules, method_named(clock, l2), samples)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        refuse(f"not compared: {type(error).__name__}: {error}", NOT_JUDGED)
    report = ab_report(sides, times, rule)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)
