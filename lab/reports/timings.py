"""Write tables and plots of a recorded run: `lab report RUN.json --out DIR`.

The output is report.md and, with the extra `plots`, a roofline and a chart of time over floor per method. Every number comes
from the file: medians and quartiles of its samples, and the facts that the benchmark recorded.
"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lab.files import write_text
from lab.reports.recorded import RecordedRun, Row, environment_facts, grouped, value_at
from lab.reports.tables import ABSENT, items, markdown_of, table_of_lines
from lab.reports.timing_tables import (
    SETTINGS,
    THROTTLED,
    ceiling_table,
    make_table,
    methods,
    narrow_columns,
    not_timed_table,
    plain_table,
    side_by_side_table,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.md"
NO_PLOTS = "Plots need matplotlib: `pip install '.[plots]'`."
# Rows are sorted by these facts, so that the report does not depend on the order of the tests.
ORDER = (
    "mode",
    "geometry",
    "requests",
    "query_tokens",
    "kv_tokens",
    "scenario",
    "page_size",
    "clock",
    "l2",
    "implementation",
)


def report_markdown(run: RecordedRun, pictures: Sequence[str] = ()) -> str:
    """Return the report in Markdown; `pictures` are the file names of the plots in the report's folder."""
    rows = sorted(run.gpu_rows, key=_order)
    blocks = [f"# {run.environment.get('gpu', 'No GPU recorded')}, recorded in {run.path.name}"]
    blocks += ["## Environment", markdown_of(table_of_lines(["what", "value"], list(_environment(run))))]
    ceilings, source = ceiling_table(run), run.ceilings.get("datasheet_source")
    blocks += ["## Ceilings", markdown_of(ceilings) if ceilings.rows else "None recorded."]
    blocks += [f"Datasheet: {source}."] if ceilings.rows and source else []
    if rows:
        blocks += ["## GPU time", *_methods(rows), *_throttled(rows)]
        blocks += [f"![{Path(picture).stem.replace('-', ' ')}]({picture})" for picture in pictures]
    side_by_side = side_by_side_table(run)
    if side_by_side.rows:
        blocks += ["## Side by side", f"{side_by_side.caption}.", markdown_of(side_by_side)]
    columns = narrow_columns([name for name in SETTINGS if len(_said(name, rows)) > 1])
    for mode, mine in grouped((row.mode, row) for row in rows).items():
        blocks += [f"### {mode or 'No mode recorded'}", markdown_of(make_table(columns, mine, say_once=()))]
    others = {
        ("## Host time", "Not GPU time, and not comparable with it."): run.host_rows,
        ("## Times without a recorded clock", "Compared with nothing."): run.rows_without_clock,
    }
    for headings, times in others.items():
        blocks += [*headings, markdown_of(plain_table(times))] if times else []
    if run.not_timed:
        blocks += ["## Not timed", markdown_of(not_timed_table(run))]
    return "\n\n".join(blocks) + "\n"


def write_report(run: RecordedRun, folder: Path) -> list[Path]:
    """Write report.md and, where matplotlib is installed, the plots; return the paths written."""
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
    """Return True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def figures(run: RecordedRun) -> dict[str, "Figure"]:
    """Return, by file name, a roofline and a chart of time over floor for each method. Rows without the needed numbers are left
    out.
    """
    from lab.reports.pictures.timings import floor_figure, roofline_figure

    drawn: dict[str, Figure] = {}
    rows = sorted(run.gpu_rows, key=_order)
    gpu, commit = (run.environment.get(key) or f"no {key} recorded" for key in ("gpu", "commit"))
    for timed_by, mine in grouped((row.timed_by, row) for row in rows).items():
        title, slug = f"{gpu}, {commit}, {timed_by}", re.sub(r"[^a-z0-9]+", "-", timed_by.lower())
        if counted := [row for row in mine if row.facts.get("operations") and row.facts.get("bytes_moved")]:
            drawn[f"roofline-{slug}.png"] = roofline_figure(counted, f"Roofline: {title}", run.ceilings)
        if above_floor := [row for row in mine if row.time_over_floor is not None]:
            drawn[f"time-over-floor-{slug}.png"] = floor_figure(above_floor, f"Time over floor: {title}")
    return drawn


def _order(row: Row) -> tuple[tuple[float, str], ...]:
    """Return a row's sort key from the fields in `ORDER`: numbers sort as numbers, words as words, absent fields come first."""
    values = [row.facts.get(key) for key in ORDER] + [row.name]
    return tuple((value, "") if isinstance(value, int | float) else (0, str(value or "")) for value in values)


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


def _methods(rows: Sequence[Row]) -> Iterator[str]:
    """Yield lines that describe each value of "timed by", the statistics, and the settings that all rows have in common."""
    yield items(f"{timed_by}: {method}." for timed_by, method in methods(rows))
    yield (
        "Median and interquartile range (IQR) over the samples. Percentages of GB/s and TFLOP/s are of the ceilings measured "
        "in this run, and the floor is the least time by them; a kernel that only reads can be a little faster than the "
        "memory's, and e4m3 products than the bf16 matrix rate. L2 is cold by rotation where copies take turns, or where "
        "one pass over the buffers exceeds it. Host time is Python and launches per call: a prepared call where the "
        "implementation prepares, else its whole call, checks included."
    )
    said = {name: _said(name, rows) for name in SETTINGS}
    common = [f"{name} {texts[0]}" for name, texts in said.items() if len(texts) == 1 and texts[0] != ABSENT]
    if common:
        yield f"In all rows: {'; '.join(common)}."


def _said(setting: str, rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(SETTINGS[setting](row).text for row in rows))


def _throttled(rows: Sequence[Row]) -> Iterator[str]:
    unwatched = [row for row in rows if row.facts.get("throttled_by") is None]
    if unwatched:
        yield f"Whether the GPU was held back is not known for {len(unwatched)} of {len(rows)} rows."
    throttled = [row for row in rows if row.throttled_by]
    if throttled:
        yield f"{THROTTLED}: the GPU was held back in {len(throttled)} of {len(rows)} rows:"
        implementation = narrow_columns([])["implementation"]
        named = grouped(
            ((row.scenario, row.timed_by, ", ".join(row.throttled_by)), implementation(row).text) for row in throttled
        )
        yield items(
            f"{scenario}, {', '.join(names)}, {timed_by}: {reasons}"
            for (scenario, timed_by, reasons), names in named.items()
        )
