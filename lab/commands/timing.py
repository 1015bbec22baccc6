"""Define `lab bench` and `lab ab`, which time kernels, `lab compare` and `lab releases`, which compare recorded runs or judge
reports, and `lab report` and `lab html`, which show recorded results as tables, plots and an HTML page.
"""

from pathlib import Path
from typing import Annotated

import typer

import lab
from lab.commands.options import (
    L2,
    Clock,
    Json,
    Markdown,
    TimedCalls,
    Trace,
    need_gpu,
    one_call,
    refuse,
    refuse_options_without,
    refusing_errors,
    refusing_recordings,
)
from lab.exit_status import ExitStatus
from lab.loading import load

# The index is pytest's own exit status, 0 to 5.
STATUS_BY_PYTEST = (
    ExitStatus.DONE,  # all passed
    ExitStatus.WRONG,  # some failed
    ExitStatus.INTERRUPTED,
    ExitStatus.NOT_JUDGED,  # internal error
    ExitStatus.MISUSED,
    ExitStatus.MISUSED,  # no test selected
)
RECORDING = Path(".benchmarks/last_run.json")
MinimumEffect = Annotated[float, typer.Option(help="a smaller change of the median, in percent, counts as no change")]
Significance = Annotated[float, typer.Option(help="level of the rank test, and error of the confidence interval")]


def compare(
    before: Annotated[
        str, typer.Argument(help="a recorded run, a folder of runs that repeat it, or a report of the judge")
    ],
    after: Annotated[str | None, typer.Argument(help="a run, a folder of runs or a report to compare it with")] = None,
    by: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            metavar="KEY VALUE VALUE",
            help="compare two values of one recorded fact within one run, such as implementation and two modules",
        ),
    ] = None,
    minimum_effect_percent: MinimumEffect = 3.0,
    significance: Significance = 0.01,
    strict: Annotated[bool, typer.Option("--strict", help="exit with 1 on an UNSURE row too")] = False,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Compare two recorded runs, two reports of the judge, or two implementations or settings within one run.

    Exit status: 1 if a row is SLOWER or missing, or a case is newly wrong or newly refused by the kernel; 125 if a row or case
    could not be compared.
    """
    if (after is None) == (by is None):
        refuse("compare BEFORE with AFTER, or two values of one fact within BEFORE: --by KEY VALUE VALUE")
    with refusing_recordings("not compared", *filter(None, (before, after))):
        from lab.reports.changed_verdicts import compare_verdicts, has_report

        if after is not None and has_report(before, after):
            report = compare_verdicts(Path(before), Path(after))
        else:
            from lab.reports.compare import compare as compare_files
            from lab.timing.statistics import Rule

            with refusing_errors():
                rule = Rule(minimum_effect_percent, significance)
            report = compare_files(before, after, by, rule, strict)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)


def releases(
    reports: Annotated[
        list[Path], typer.Argument(help="reports of the judge, the oldest release first; a release may have several")
    ],
    package: Annotated[str, typer.Option(help="the package whose version is the release")] = "flashinfer-python",
    findings: Annotated[
        Path | None,
        typer.Option(help="a page of numbered findings, each of which gets a row", exists=True, dir_okay=False),
    ] = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Show which known failures (findings) each release of a package has, and the changes between releases.

    A finding is "not reachable" in a release if each of its cases is declined, not judged or wrong for another reason there.
    Exit status: 125 if the reports have different settings.
    """
    with refusing_recordings("not compared", *reports):
        from lab.reports.releases import releases_report

        report = releases_report(reports, package, findings)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)


def bench(
    context: typer.Context,
    implementations: Annotated[
        str,
        typer.Option(
            metavar="all|A,B,...", help="modules to time, in turns; all: every one that has a kernel on this machine"
        ),
    ] = "",
    calls: TimedCalls = None,
) -> None:
    """Time the default scenarios or recorded calls on the GPU. Without a GPU, only check the scenarios' results.

    The samples of several implementations are interleaved within a scenario. All other options go to pytest: pytest's own
    options, those of pytest-benchmark, and --lab-scenario, --lab-implementation, --lab-clock, --lab-l2 and --lab-trace
    (docs/time.md). The times are written to .benchmarks/last_run.json, or to the file of --benchmark-json.
    """
    from lab.extras import require

    require("lab bench", "pytest_benchmark", "triton")
    checkout = Path(lab.__file__).parents[1]
    if not (checkout / "tests" / "benchmarks").is_dir():
        refuse(
            "the benchmarks are in the lab's checkout: install the lab there with pip install --editable '.[bench,triton]'"
        )
    if calls is not None:
        from lab.recorded.case import recorded_cases

        with refusing_errors():
            recorded_cases(calls)
    import pytest

    RECORDING.parent.mkdir(exist_ok=True)
    options = ["--benchmark-only", "--benchmark-columns=median,iqr,rounds", f"--benchmark-json={RECORDING}"]
    options += [f"--lab-calls={calls}"] if calls is not None else []
    options += [f"--lab-implementation={name}" for name in filter(None, implementations.split(","))]
    status = pytest.main([str(checkout / "tests" / "benchmarks"), *options, *context.args])
    raise typer.Exit(STATUS_BY_PYTEST[int(status)])


def ab(
    context: typer.Context,
    scenario: Annotated[
        str, typer.Argument(help="the work to time, such as decode/llama-3.1-8b/64q1s4k; left out with --calls")
    ],
    first: Annotated[str | None, typer.Argument(help="a module with FlashInfer's names, or path/to/file.py")] = None,
    second: Annotated[str | None, typer.Argument(help="another such module; the same one if left out")] = None,
    against: Annotated[
        str | None, typer.Option(metavar="SCENARIO", help="scenario of the second side; that of the first if left out")
    ] = None,
    calls: TimedCalls = None,
    clock: Clock = "graph",
    l2: L2 = "cold",
    samples: Annotated[int, typer.Option(min=1, help="samples of each side; the sides take turns")] = 60,
    seed: Annotated[
        int | None, typer.Option(help="of the contents, as a recording names it; drawn anew if left out")
    ] = None,
    minimum_effect_percent: MinimumEffect = 1.0,
    significance: Significance = 0.01,
    trace: Trace = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Compare the times of two kernels, or of two scenarios, on this GPU. The samples are interleaved in one process.

    Exit status: 1 if the second side is SLOWER; 3 if a time is refused: a result is wrong, the time is shorter than the GPU can
    reach, two clocks disagree, or a kernel changed functions that time or judge it; 125 if the sides could not be compared.
    """
    from lab.integrity import ChangedBindingsError, bindings
    from lab.reports.ab import ab_report, measure_sides
    from lab.timing.gpu_time import WrongWorkError
    from lab.timing.method import method_named
    from lab.timing.sampling import RefusedTimeError
    from lab.timing.statistics import Rule
    from lab.workloads.scenarios import timed_scenario
    from lab.workloads.traces import read_trace

    with refusing_errors():
        rule = Rule(minimum_effect_percent, significance)
    recorded = None
    if calls is not None:
        fitting = context.params.keys() - {"against", "trace"}
        refuse_options_without(context, fitting, "--calls times a recorded call and no scenario")
        recorded = one_call(calls, "; lab bench --calls times all of them")
        if second is not None:
            refuse(f"--calls times the call {recorded.address} on two modules, and {second} is a third argument")
        scenario, first, second = recorded.address, scenario, first
    if first is None:
        refuse("name a module to time, such as lab.kernels.portable")
    sides = [(scenario, first), (against or scenario, second or first)]
    if sides[0] == sides[1]:
        refuse("the two sides are the same: name a second module, or another scenario with --against")
    with refusing_errors():
        requests = None if trace is None else read_trace(trace)
        cases = [recorded or timed_scenario(name, requests) for name, _ in sides]
        before = bindings()
        modules = [load(name) for _, name in sides]
    need_gpu()
    try:
        try:
            measured = measure_sides(sides, cases, modules, method_named(clock, l2), samples, seed)
        finally:
            before.check()
    except (RefusedTimeError, ChangedBindingsError, WrongWorkError) as error:
        refuse(f"refused: {error}", ExitStatus.REFUSED)
    except (AssertionError, NotImplementedError, RuntimeError, ValueError) as error:
        refuse(f"not compared: {type(error).__name__}: {error}", ExitStatus.NOT_JUDGED)
    report = ab_report(measured, rule)
    report.show(json, markdown)
    raise typer.Exit(report.exit_status)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a JSON file that `lab bench` recorded")],
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="the folder to write into; that of RUN if left out")
    ] = None,
) -> None:
    """Write tables and plots of a recorded run."""
    with refusing_recordings("no report", run):
        from lab.reports.recorded import read_run
        from lab.reports.timings import NO_PLOTS, can_plot, write_report

        paths = write_report(read_run(run), out or run.parent)
    for path in paths:
        print(path)
    if not can_plot():
        typer.echo(NO_PLOTS, err=True)


def html(
    folder: Annotated[Path, typer.Argument(help="a folder of recorded results, such as results/nvidia-h200")],
    out: Annotated[Path, typer.Option(dir_okay=False, help="the file to write")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page of a folder of recorded results."""
    from lab.extras import require

    if not folder.is_dir():
        refuse(
            f"no report: {folder} is no folder: name the folder of the recorded results, such as results/nvidia-h200"
        )
    require("lab html", "itables", "jinja2", "markdown_it", "matplotlib")
    from lab.files import write_text
    from lab.reports.html.page import html_report
    from lab.reports.recorded_file import read_folder

    with refusing_recordings("no report"):
        page = html_report(folder, read_folder(folder))
    write_text(out, page)
    print(f"{out}: {out.stat().st_size / 1e6:.1f} MB")
