"""Write the report of a recorded benchmark run: report.md and, with the extra `plots`, two plots for each way of timing."""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lab.files import write_text
from lab.reports.recorded import RecordedRun
from lab.reports.recorded_file import environment_facts, value_at
from lab.reports.tables import grouped, markdown_of, table_of_lines
from lab.reports.timing_tables import ceiling_table, fastest_table, methods, sorted_rows, timing_tables

REPORT = "report.md"
NO_PLOTS = "Plots need matplotlib: `pip install '.[plots]'`."
WORDS = (
    ("median, IQR", "computed from the samples of a row; IQR is the interquartile range"),
    (
        "floor, percentages of GB/s and TFLOP/s",
        "computed with the *ceilings*, the rates that a large copy and a large matrix product reached in this run. A kernel "
        "that only reads can exceed the bandwidth of a copy, and a matrix product in e4m3 can exceed the bf16 rate",
    ),
    ("L2 cold by rotation", "each call has its own buffers, or the buffers of one pass are larger than L2"),
    (
        "host time",
        "the time of Python and of the launches of one call, including checks of arguments. If an implementation prepares "
        "calls (checks arguments once), the host time is that of a prepared call",
    ),
)


def report_markdown(run: RecordedRun, pictures: Sequence[str] = ()) -> str:
    """Return the report in Markdown. `pictures` are the file names of the plots that it shows."""
    blocks = [f"# {run.environment.get('gpu', 'No GPU recorded')}, recorded in {run.path.name}"]
    blocks += ["## Environment", markdown_of(table_of_lines(["what", "value"], list(_environment(run))))]
    if run.gpu_rows:
        blocks += [
            "## Method",
            markdown_of(table_of_lines(["word", "what it means"], [*map(list, methods(run.gpu_rows)), *WORDS])),
        ]
        for picture in pictures:
            name = Path(picture).stem.replace("-", " ")
            shown = "is a roofline chart" if name.startswith("roofline") else "shows each time divided by its floor"
            blocks.append(f"The following picture {shown}. ![{name}]({picture})")
    for table in filter(lambda table: table.rows, (ceiling_table(run), fastest_table(run), *timing_tables(run))):
        common = "; ".join(f"{heading} = {text}" for heading, text in table.common)
        blocks += [
            f"## {table.caption}",
            *([f"The following table leaves out columns that have one value in all rows: {common}."] if common else ()),
            markdown_of(table),
        ]
    return "\n\n".join(blocks) + "\n"


def write_report(run: RecordedRun, folder: Path) -> list[Path]:
    """Write report.md and, if matplotlib is installed, the plots into a folder. Return the written paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures(run).items() if can_plot() else ():
        written.append(folder / name)
        figure.savefig(folder / name)
    report = report_markdown(run, [path.name for path in written])
    if not can_plot():
        report += f"\n{NO_PLOTS}\n"
    write_text(folder / REPORT, report)
    return [folder / REPORT, *written]


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def figures(run: RecordedRun) -> dict[str, Any]:
    """Return matplotlib figures by file name: for each way of timing, such as "graph, L2 cold by rotation", a roofline plot and
    a plot of the times divided by their floors (least possible times).
    """
    from lab.reports.pictures.timings import floor_figure, roofline_figure

    drawn = {}
    rows = sorted_rows(run.gpu_rows)
    gpu, commit = (run.environment.get(key) or f"no {key} recorded" for key in ("gpu", "commit"))
    for timed_by, mine in grouped((row.timed_by, row) for row in rows).items():
        title, slug = f"{gpu}, {commit}, {timed_by}", re.sub(r"[^a-z0-9]+", "-", timed_by.lower())
        if counted := [row for row in mine if row.facts.get("operations") and row.facts.get("bytes_moved")]:
            drawn[f"roofline-{slug}.png"] = roofline_figure(counted, f"Roofline: {title}", run.ceilings)
        if above_floor := [row for row in mine if row.time_over_floor is not None]:
            drawn[f"time-over-floor-{slug}.png"] = floor_figure(above_floor, f"Time over floor: {title}")
    return drawn


def _environment(run: RecordedRun) -> Iterator[list[str]]:
    if run.recorded_at:
        yield ["recorded", run.recorded_at]
    for name, keys in environment_facts([run.environment]).items():
        found = value_at(run.environment, keys)
        if found is not None:
            yield [name, f"{found:,}" if isinstance(found, int) else str(found)]
    clocks = [clock for row in run.gpu_rows for clock in row.facts.get("sm_clock_mhz") or ()]
    if clocks:
        yield ["SM clock while timing, MHz", f"{min(clocks):g} to {max(clocks):g}"]
    for name, key in (("highest power, W", "power_w"), ("highest temperature, °C", "temperature_c")):
        values = [row.facts[key] for row in run.gpu_rows if row.facts.get(key) is not None]
        if values:
            yield [name, f"{max(values):g}"]
