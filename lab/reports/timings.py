"""Tables and plots of a recorded run: `python -m lab.reports.timings RUN.json --out DIR`.

Writes report.md, and with the extra `plots` a roofline and a chart of time over floor per method. Everything in it is in the
file: medians and quartiles of its samples, and what the benchmark recorded beside them.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.reports.recorded import RecordedRun, RecordedRunError, Row, read_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "report.md"
NO_PLOTS = "Plots need matplotlib: `pip install '.[plots]'`."
ABSENT = "–"
MODULE_PREFIX = "lab.kernels."
THROTTLED = "**throttled**"
# Rows in the order of these facts, so that the report does not depend on the order of the tests.
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
# Heading, and where its value lies in the environment.
FACTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("GPU", ("gpu",)),
    ("multiprocessors", ("multiprocessors",)),
    ("L2, bytes", ("l2_bytes",)),
    ("driver", ("nvidia_smi", "driver_version")),
    ("CUDA", ("cuda",)),
    ("maximum SM clock", ("nvidia_smi", "clocks.max.sm")),
    ("SM clock at the start", ("nvidia_smi", "clocks.sm")),
    ("memory clock at the start", ("nvidia_smi", "clocks.mem")),
    ("power limit", ("nvidia_smi", "power.limit")),
    ("commit", ("commit",)),
    ("Python", ("python",)),
)

Table = list[list[str]]


def _text(row: Row, key: str) -> str:
    value = row.facts.get(key)
    return "" if value is None else str(value)


# A launch alone takes one to two microseconds: time over a floor shorter than this says nothing, and has no bar.
LEAST_FLOOR_US = 1.0

# A column each, unless they are the same in all rows; then they are said once.
SETTINGS: dict[str, Callable[[Row], str]] = {
    "timed by": lambda row: row.timed_by,
    "page size": lambda row: _text(row, "page_size"),
    "dtype": lambda row: _text(row, "dtype"),
    "K/V dtype": lambda row: _text(row, "kv_dtype"),
}


def report_markdown(run: RecordedRun, pictures: Sequence[str] = ()) -> str:
    """The report as Markdown.

    Args:
        pictures: file names of plots to show, beside the report.
    """
    rows = sorted(run.gpu_rows, key=_order)
    blocks = [f"# {run.environment.get('gpu', 'No GPU recorded')}, recorded in {run.path.name}"]
    blocks += ["## Environment", _markdown([["what", "value"], *_environment(run)])]
    blocks += ["## Ceilings", _ceilings(run)]
    if rows:
        blocks += ["## GPU time", *_methods(rows), *_throttled(rows)]
        blocks += [f"![{Path(picture).stem.replace('-', ' ')}]({picture})" for picture in pictures]
    settings = [name for name, cell in SETTINGS.items() if _varies(cell, rows)]
    for mode in dict.fromkeys(_text(row, "mode") for row in rows):
        blocks += [f"### {mode.replace('_', ' ')}" if mode else "### No mode recorded"]
        blocks += [_markdown(_timings([row for row in rows if _text(row, "mode") == mode], settings))]
    host = [row for row in run.other_rows if row.facts.get("clock") == "host"]
    others = [row for row in run.other_rows if row.facts.get("clock") != "host"]
    if host:
        blocks += ["## Host time", "Not GPU time, and not comparable with it.", _markdown(_plain_timings(host))]
    if others:
        blocks += ["## Times without a recorded clock", "Compared with nothing.", _markdown(_plain_timings(others))]
    return "\n\n".join(blocks) + "\n"


def write_report(run: RecordedRun, folder: Path) -> list[Path]:
    """Write report.md and, where matplotlib is installed, the plots; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in figures(run).items() if can_plot() else ():
        written.append(folder / name)
        figure.savefig(folder / name)
    report = report_markdown(run, [path.name for path in written])
    if not can_plot():
        report += f"\n{NO_PLOTS}\n"
    (folder / REPORT).write_text(report, encoding="utf-8")
    return [folder / REPORT, *written]


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def figures(run: RecordedRun) -> dict[str, "Figure"]:
    """The plots of a run by file name, for each method its own. Rows without the numbers for a plot are left out of it."""
    from lab.reports.pictures.timings import floor_figure, roofline_figure

    drawn: dict[str, Figure] = {}
    rows = sorted(run.gpu_rows, key=_order)
    for timed_by in dict.fromkeys(row.timed_by for row in rows):
        mine = [row for row in rows if row.timed_by == timed_by]
        gpu, commit = (run.environment.get(key) or f"no {key} recorded" for key in ("gpu", "commit"))
        title = f"{gpu}, {commit}, {timed_by}"
        slug = re.sub(r"[^a-z0-9]+", "-", timed_by.lower())
        if points := list(_points(mine)):
            drawn[f"roofline-{slug}.png"] = roofline_figure(points, f"Roofline: {title}", *_roofs(run))
        if bars := list(_bars(mine)):
            drawn[f"time-over-floor-{slug}.png"] = floor_figure(bars, f"Time over floor: {title}")
    return drawn


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status, 2 for a file that is not a recorded run."""
    parser = argparse.ArgumentParser("lab.reports.timings", description="Tables and plots of a recorded run.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a JSON file that the benchmarks recorded")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write (default: beside the file)")
    options = parser.parse_args(argv)
    try:
        run = read_run(options.run)
    except RecordedRunError as error:
        print(f"no report: {error}", file=sys.stderr)
        return 2
    for path in write_report(run, options.out or options.run.parent):
        print(path)
    if not can_plot():
        print(NO_PLOTS, file=sys.stderr)
    return 0


def _order(row: Row) -> tuple[tuple[float, str], ...]:
    """Numbers as numbers, words as words, what is absent first."""
    values = [row.facts.get(key) for key in ORDER] + [row.name]
    return tuple((value, "") if isinstance(value, int | float) else (0, str(value or "")) for value in values)


def _environment(run: RecordedRun) -> Iterator[list[str]]:
    if run.recorded_at:
        yield ["recorded", run.recorded_at]
    for name, where in FACTS:
        found = run.environment_at(where)
        if found is not None:
            yield [name, f"{found:,}" if isinstance(found, int) else str(found)]
    for name, version in (run.environment.get("packages") or {}).items():
        if version is not None:
            yield [name, str(version)]
    yield from _seen(run.gpu_rows)


def _seen(rows: Sequence[Row]) -> Iterator[list[str]]:
    """What the GPU did over all rows."""
    clocks = [clock for row in rows for clock in row.facts.get("sm_clock_mhz") or ()]
    if clocks:
        yield ["SM clock while timing, MHz", f"{min(clocks):g} to {max(clocks):g}"]
    for name, key in (("highest power, W", "power_w"), ("highest temperature, °C", "temperature_c")):
        values = [row.facts[key] for row in rows if row.facts.get(key) is not None]
        if values:
            yield [name, f"{max(values):g}"]


def _ceilings(run: RecordedRun) -> str:
    ceilings = run.ceilings
    dtype = f" ({ceilings.matrix_dtype})" if ceilings.matrix_dtype else ""
    lines = [
        ["memory, GB/s", ceilings.bandwidth_gbps, ceilings.datasheet_bandwidth_gbps],
        [f"matrix units, TFLOP/s{dtype}", ceilings.matrix_rate_tflops, ceilings.datasheet_matrix_rate_tflops],
    ]
    known = [[str(line[0]), *(_number(value, 0) for value in line[1:])] for line in lines if any(line[1:])]
    if not known:
        return "None recorded."
    table = _markdown([["ceiling", "measured in this run", "datasheet"], *known])
    return f"{table}\n\nDatasheet: {ceilings.datasheet_source}." if ceilings.datasheet_source else table


def _methods(rows: Sequence[Row]) -> Iterator[str]:
    """How every row was timed, and what else all have in common."""
    methods = dict.fromkeys((row.timed_by, _text(row, "method")) for row in rows)
    yield "\n".join(f"* {timed_by}: {method or 'no method recorded'}." for timed_by, method in methods)
    yield (
        "Median and interquartile range (IQR) over the samples. Percentages of GB/s and TFLOP/s are of the ceilings measured "
        "in this run, and the floor is the least time by them; a kernel that only reads can be a little faster than the "
        "memory's, and e4m3 products than the bf16 matrix rate. L2 is cold by rotation where copies take turns, or where "
        "one pass over the buffers exceeds it. Host time is Python and launches per call: a prepared call where the "
        "implementation prepares, else its whole call, checks included."
    )
    common = [f"{name} {cell(rows[0])}" for name, cell in SETTINGS.items() if cell(rows[0]) and not _varies(cell, rows)]
    if common:
        yield f"In all rows: {'; '.join(common)}."


def _varies(cell: Callable[[Row], str], rows: Sequence[Row]) -> bool:
    return len({cell(row) for row in rows}) > 1


def _throttled(rows: Sequence[Row]) -> Iterator[str]:
    unwatched = [row for row in rows if row.facts.get("throttled_by") is None]
    if unwatched:
        yield f"Whether the GPU was held back is not known for {len(unwatched)} of {len(rows)} rows."
    throttled = [row for row in rows if row.throttled_by]
    if throttled:
        yield f"{THROTTLED}: the GPU was held back in {len(throttled)} of {len(rows)} rows:"
        yield "\n".join(
            f"* {row.scenario}, {_implementation(row)}, {row.timed_by}: {', '.join(row.throttled_by)}"
            for row in throttled
        )


def _timings(rows: Sequence[Row], settings: Sequence[str]) -> Table:
    """The rows of one mode; `settings` are those of `SETTINGS` that tell rows of this run apart."""
    columns: dict[str, Callable[[Row], str]] = {
        "scenario": lambda row: row.scenario,
        "implementation": _implementation,
        **{name: SETTINGS[name] for name in settings},
        "requests": lambda row: _fact(row, "requests", 0),
        "query tokens": lambda row: _fact(row, "query_tokens", 0),
        "keys": lambda row: _fact(row, "kv_tokens", 0),
        "median, µs": _median,
        "IQR, %": lambda row: _number(row.iqr_percent, 1),
        "GB/s": lambda row: _share(row, "bandwidth_gbps", 0, "bandwidth_percent"),
        "TFLOP/s": lambda row: _share(row, "rate_tflops", 1, "matrix_rate_percent"),
        "floor, µs": _floor,
        "floor / median, %": lambda row: _fact(row, "floor_percent", 1),
        "MB": lambda row: _scaled(row, "bytes_moved", 1e-6),
        "GFLOP": lambda row: _scaled(row, "operations", 1e-9),
        "launches": lambda row: _fact(row, "launches", 0),
        "host, µs": lambda row: _fact(row, "host_us", 1),
    }
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def _plain_timings(rows: Sequence[Row]) -> Table:
    lines = [
        [
            row.name,
            _number(row.median_us, 2),
            _number(row.iqr_percent, 1),
            str(len(row.samples_us)),
            _text(row, "method"),
        ]
        for row in sorted(rows, key=lambda row: row.name)
    ]
    return [["benchmark", "median, µs", "IQR, %", "samples", "method"], *lines]


def _implementation(row: Row) -> str:
    name = _text(row, "implementation").removeprefix(MODULE_PREFIX)
    kernel = _text(row, "kernel")
    return f"{name} ({kernel})" if kernel and kernel != name else name


def _median(row: Row) -> str:
    return f"{_number(row.median_us, 2)} {THROTTLED}" if row.throttled_by else _number(row.median_us, 2)


def _share(row: Row, key: str, digits: int, percent_key: str) -> str:
    """A rate, and in brackets its share of the measured ceiling."""
    percent = row.facts.get(percent_key)
    return _fact(row, key, digits) + (f" ({percent:.0f} %)" if percent is not None else "")


def _floor(row: Row) -> str:
    bound = _text(row, "floor_bound")
    return _fact(row, "floor_us", 2) + (f" ({bound})" if bound else "")


def _fact(row: Row, key: str, digits: int) -> str:
    return _number(row.facts.get(key), digits)


def _scaled(row: Row, key: str, scale: float) -> str:
    value = row.facts.get(key)
    return _number(None if value is None else scale * value, 1)


def _number(value: Any, digits: int) -> str:
    return ABSENT if value is None else f"{value:,.{digits}f}"


def _markdown(table: Table) -> str:
    """A Markdown table, first line the heading. Columns of which no line says anything are left out."""
    heading, *lines = table
    kept = [column for column in range(len(heading)) if any(line[column] not in ("", ABSENT) for line in lines)]
    shown = [heading, ["---" for _ in heading], *lines]
    return "\n".join(f"| {' | '.join(line[column].replace('|', chr(92) + '|') for column in kept)} |" for line in shown)


def _points(rows: Sequence[Row]) -> Iterator[Any]:
    from lab.reports.pictures.timings import RooflinePoint

    for row in rows:
        operations, bytes_moved = row.facts.get("operations"), row.facts.get("bytes_moved")
        if operations and bytes_moved:
            rate_tflops = operations / row.median_us / 1e6
            name, mode = _implementation_name(row), _text(row, "mode").replace("_", " ") or "no mode recorded"
            yield RooflinePoint(name, mode, operations / bytes_moved, rate_tflops, bool(row.throttled_by))


def _bars(rows: Sequence[Row]) -> Iterator[Any]:
    from lab.reports.pictures.timings import FloorBar

    # A scenario's name says what it is; settings are added where it alone does not tell two rows apart.
    named = [(row.scenario, _implementation_name(row)) for row in rows]
    varying = {name: cell for name, cell in SETTINGS.items() if len(set(named)) < len(named) and _varies(cell, rows)}
    for row in rows:
        if (row.facts.get("floor_us") or 0) >= LEAST_FLOOR_US:
            name = ", ".join([row.scenario, *(f"{name} {cell(row)}" for name, cell in varying.items())])
            over = row.median_us / row.facts["floor_us"]
            yield FloorBar(name, _implementation_name(row), over, bool(row.throttled_by))


def _implementation_name(row: Row) -> str:
    return _text(row, "implementation").removeprefix(MODULE_PREFIX) or "no implementation recorded"


def _roofs(run: RecordedRun) -> tuple[Any, Any]:
    """Measured and datasheet; None where one half of it is not recorded."""
    from lab.reports.pictures.timings import Roofs

    ceilings, dtype = run.ceilings, run.ceilings.matrix_dtype or ""
    pairs = (
        (ceilings.bandwidth_gbps, ceilings.matrix_rate_tflops),
        (ceilings.datasheet_bandwidth_gbps, ceilings.datasheet_matrix_rate_tflops),
    )
    measured, datasheet = (Roofs(bandwidth, rate, dtype) if bandwidth and rate else None for bandwidth, rate in pairs)
    return measured, datasheet


if __name__ == "__main__":
    sys.exit(main())
