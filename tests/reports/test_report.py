"""The report: every number in it is in the file, and the pictures have what they promise."""

import importlib.util
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.reports.recorded import RecordedRun, read_run
from lab.reports.timing_tables import fastest_sentence, fastest_table
from lab.reports.timings import figures, report_markdown
from tests.commands.command import run
from tests.reports.recorded_runs import benchmark, entry, host_entry, samples_us, write_run

ROOT = Path(__file__).parent.parent.parent
PORTABLE, TRTLLM = "lab.kernels.portable", "lab.kernels.trtllm"
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="plots need matplotlib: pip install '.[plots]'"
)


def entries() -> list[dict[str, Any]]:
    return [
        entry(f"{mode}/llama-3.1-8b/{requests}q1s4k", implementation, samples_us(level_us, seed=1), requests=requests)
        for mode in ("target_verify", "decode")
        for requests in (64, 8)
        for implementation, level_us in ((TRTLLM, 260.0), (PORTABLE, 280.0))
    ]


def run_of(folder: Path, rows: list[dict[str, Any]], **options: Any) -> RecordedRun:
    return read_run(write_run(folder / "run.json", rows, **options))


def lines_with(text: str, words: str) -> list[str]:
    return [line for line in text.splitlines() if words in line]


def test_a_row_says_what_was_recorded(tmp_path: Path) -> None:
    text = report_markdown(run_of(tmp_path, [entry(samples=[260.0] * 30)]))
    heading, _, line = lines_with(text.split("## GPU time")[1], "|")
    assert line == (
        "| decode/llama-3.1-8b/64q1s4k | trtllm (xqa) | 260.00 | 253.37 (memory) | 1.03 | 0.0 | 4,135 (97 %) | 16.5 (2 %) "
        "| graph, L2 cold by rotation | 64 | bfloat16 | bfloat16 | 64 | 64 | 262,208 | 1,075.1 | 4.3 | 1 | 41.5 |"
    )
    assert heading.count("|") == line.count("|")
    assert "| trtllm | 260.00 |" in report_markdown(run_of(tmp_path, [entry(samples=[260.0] * 30, kernel=None)]))


def test_the_header_says_on_what(tmp_path: Path) -> None:
    text = report_markdown(run_of(tmp_path, entries()))
    for words in (
        "| GPU | NVIDIA H200 |",
        "| driver | 580.159.04 |",
        "| maximum SM clock | 1980 MHz |",
        "| power limit | 700.00 W |",
        "| commit | 0a77b93dd498 |",
        "| flashinfer-python | 0.7.2 |",
        "| SM clock while timing, MHz | 1965 to 1980 |",
        "| highest power, W | 512.3 |",
        "| memory, GB/s | 4,243 | 4,800 |",
        "| matrix units, TFLOP/s (bfloat16) | 790 | 989 |",
        "## Ceilings; datasheet: NVIDIA H200 Tensor Core GPU datasheet, SXM5",
        "| graph, L2 cold by rotation | calls recorded in a CUDA graph",
    ):
        assert words in text


def test_what_is_not_recorded_is_not_stated(tmp_path: Path) -> None:
    text = report_markdown(
        run_of(tmp_path, [entry(floor_us=None, floor_bound=None, host_us=None)], facts={}, ceilings=None)
    )
    for words in ("H200", "driver", "commit", "datasheet", "floor, µs", "host, µs", "None", "nan"):
        assert words not in text
    assert "No GPU recorded" in text
    assert "## Ceilings" not in text


def test_a_ceiling_without_a_datasheet(tmp_path: Path) -> None:
    ceilings = {"bandwidth_gbps": 4243.0, "matrix_rate_tflops": None, "datasheet_bandwidth_gbps": None}
    text = report_markdown(run_of(tmp_path, entries(), ceilings=ceilings))
    assert "| memory, GB/s | 4,243 |" in text
    assert "| matrix units" not in text
    assert "## Ceilings; datasheet: none" in text


def test_rows_are_sorted_by_mode_and_batch_whatever_the_order_of_the_tests(tmp_path: Path) -> None:
    text = report_markdown(run_of(tmp_path, entries()))
    assert "side by side" in text
    alone = report_markdown(run_of(tmp_path, entries()[::2]))
    assert not any(words in alone for words in ("side by side", "Not timed"))
    names = [f"{mode}/llama-3.1-8b/{batch}" for mode in ("decode", "target_verify") for batch in ("8q1s4k", "64q1s4k")]
    shown = [line.split(" | ") for line in lines_with(text.split("## GPU time")[1], "q1s4k")]
    assert [cells[:2] for cells in shown] == [
        [f"| {name}", implementation] for name in names for implementation in ("portable", "trtllm (xqa)")
    ]
    assert text == report_markdown(run_of(tmp_path, entries()[::-1]))


def test_settings_that_differ_get_a_column(tmp_path: Path) -> None:
    text = report_markdown(run_of(tmp_path, [entry(), entry(page_size=32), entry(l2="warm")]))
    (heading, _, *rows) = lines_with(text.split("## GPU time")[1], "|")
    assert "| timed by | page size |" in heading
    assert "dtype |" not in heading
    assert rows == [
        "| graph, L2 cold by rotation | 32 |",
        "| graph, L2 cold by rotation | 64 |",
        "| graph, L2 warm | 64 |",
    ]
    (common,) = lines_with(text, "The following table leaves out columns")
    assert "; dtype = bfloat16; K/V dtype = bfloat16; " in common
    assert "page size" not in common
    assert len(lines_with(text.split("## GPU time")[0], "| graph, L2 warm |")) == 1


def test_a_kernel_without_operations_has_no_rate_of_the_matrix_units(tmp_path: Path) -> None:
    copies = entry(operations=0, rate_tflops=0.0, matrix_rate_percent=0.0)
    alone, both = (
        report_markdown(run_of(tmp_path, rows)).split("## GPU time")[1]
        for rows in ([copies], [copies, entry(page_size=32)])
    )
    assert "FLOP" not in alone
    assert "TFLOP/s" in both
    assert "(0 %)" not in both


def test_throttled_rows_are_marked_and_named(tmp_path: Path) -> None:
    rows = [*entries(), entry("extend/llama-3.1-8b/8q4k", throttled_by=["software power cap", "thermal limit"])]
    text = report_markdown(run_of(tmp_path, rows))
    (line,) = lines_with(text.split("## GPU time")[1], "extend/llama-3.1-8b/8q4k")
    assert "| software power cap, thermal limit |" in line
    assert text.count("software power cap") == 1
    assert "held back by" not in report_markdown(run_of(tmp_path, entries()))
    unwatched = report_markdown(run_of(tmp_path, [*entries(), entry("extend/llama-3.1-8b/8q4k", throttled_by=None)]))
    (line,) = lines_with(unwatched.split("## GPU time")[1], "extend/llama-3.1-8b/8q4k")
    assert "| not known |" in line


def turns() -> list[dict[str, Any]]:
    """One scenario on four implementations; the first two read the same."""
    levels = {PORTABLE: 260.0, TRTLLM: 260.3, "lab.kernels.peers.fa4": 300.0, "lab.kernels.peers.slow": 900.0}
    return [entry(implementation=name, samples=samples_us(level, seed=3)) for name, level in levels.items()]


def test_many_implementations_stand_side_by_side_and_the_fastest_are_named(tmp_path: Path) -> None:
    reason = "it needs a GPU of SM100, this is SM90"
    not_timed = [
        {"scenario": None, "implementation": "lab.kernels.peers.other", "reason": reason},
        {"scenario": "decode/tiny/1q1s1k", "implementation": TRTLLM, "reason": "no such head"},
        {"scenario": "decode/tiny/2q1s1k", "implementation": TRTLLM, "reason": "no such head"},
    ]
    recorded = run_of(tmp_path, [*turns(), entry("extend/llama-3.1-8b/8q4k", PORTABLE)], not_timed=not_timed)
    text = report_markdown(recorded)
    part = text.split("## Implementations side by side")[1].split("\n##")[0]
    heading, _, decode, extend = lines_with(part, "|")
    assert heading == (
        "| scenario | floor, µs | fastest | time over floor | peers.fa4, µs | peers.slow, µs | portable, µs | trtllm, µs |"
    )
    cells = [cell.strip() for cell in decode.split("|")[1:-1]]
    assert cells[:4] == ["decode/llama-3.1-8b/64q1s4k", "253.37 (memory)", "portable, trtllm", "1.03"]
    assert [round(float(cell)) for cell in cells[4:]] == [300, 899, 260, 260]
    assert extend.split("|")[3:8] == [" portable ", " 1.03 ", " – ", " – ", f" {recorded.gpu_rows[-1].median_us:.1f} "]
    assert lines_with(text.split("## Not timed")[1], "|")[2:] == [
        f"| peers.other | {reason} | all |",
        "| trtllm | no such head | decode/tiny/1q1s1k, decode/tiny/2q1s1k |",
    ]


def test_a_scenario_is_won_by_who_is_clearly_the_fastest(tmp_path: Path) -> None:
    other = [
        entry("extend/llama-3.1-8b/8q4k", name, samples_us(level_us, seed=3))
        for name, level_us in ((PORTABLE, 400.0), (TRTLLM, 300.0))
    ]
    alone = entry("extend/llama-3.1-8b/q4k", PORTABLE)
    one = run_of(tmp_path, [*turns(), *other, alone])
    numbers = "trtllm in {}, no clear difference in {}."
    assert fastest_sentence([one]) == f"Fastest in 2 scenarios with several implementations: {numbers.format(1, 1)}"
    both = f"Fastest in 4 scenarios with several implementations, in 2 runs: {numbers.format(2, 2)}"
    assert fastest_sentence([one, run_of(tmp_path, [alone]), one]) == both
    assert fastest_sentence([run_of(tmp_path, [alone])]) == ""


def test_a_median_has_the_style_of_its_verdict_against_the_fastest(tmp_path: Path) -> None:
    near = [260.0 * factor for factor in (0.90, 0.97, 1.0, 1.04, 1.13)]  # around the fastest, and wide
    rows = [*turns(), entry(implementation="lab.kernels.peers.near", samples=near)]
    table = fastest_table(run_of(tmp_path, rows))
    (cells,) = table.rows
    styles = {column.heading: cell.style for column, cell in zip(table.columns, cells, strict=True)}
    assert styles["trtllm, µs"] == styles["portable, µs"] == "faster"
    assert styles["peers.near, µs"] == "unsure"
    assert styles["peers.slow, µs"] == ""


def test_host_time_stands_apart(tmp_path: Path) -> None:
    old = benchmark("test_old", samples_us(100.0), {"method": "some method"})
    text = report_markdown(run_of(tmp_path, [*entries(), host_entry(), old]))
    gpu_time, _, others = text.partition("## Host time, and times without a recorded clock: not GPU time")
    for name in ("test_build_mha_metadata", "test_old"):
        assert name in others
        assert name not in gpu_time


@needs_matplotlib
def test_the_command_writes_report_and_plots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded = write_run(tmp_path / "run.json", [*entries(), entry(l2="warm")])
    assert run(f"report {recorded} --out {tmp_path}/report") == 0
    names = [Path(line).name for line in capsys.readouterr().out.split()]
    assert names == [
        "report.md",
        "roofline-graph-l2-cold-by-rotation.png",
        "time-over-floor-graph-l2-cold-by-rotation.png",
        "roofline-graph-l2-warm.png",
        "time-over-floor-graph-l2-warm.png",
    ]
    text = (tmp_path / "report" / "report.md").read_text()
    for name in names[1:]:
        assert f"]({name})" in text
        width, _ = struct.unpack(">II", (tmp_path / "report" / name).read_bytes()[16:24])
        assert width == 1500


def test_without_matplotlib_the_tables_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    recorded = write_run(tmp_path / "run.json", entries())
    assert run(f"report {recorded}") == 0
    text = (tmp_path / "report.md").read_text()
    assert "## GPU time" in text
    assert "pip install '.[plots]'" in text
    assert ".png" not in text
    assert not list(tmp_path.glob("*.png"))
    assert "plots" in capsys.readouterr().err


def marks_of(figure: Any) -> list[Any]:
    return [line for line in figure.axes[0].get_lines() if line.get_marker() not in ("None", "")]


@needs_matplotlib
class TestPlots:
    def test_roofline(self, tmp_path: Path) -> None:
        run = run_of(tmp_path, [*entries(), entry("extend/llama-3.1-8b/8q4k", throttled_by=["thermal limit"])])
        figure = figures(run)["roofline-graph-l2-cold-by-rotation.png"]
        (axes,) = figure.axes
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert "NVIDIA H200" in figure.get_suptitle()
        assert "0a77b93dd498" in figure.get_suptitle()
        assert "operations per byte" in axes.get_xlabel()
        assert "TFLOP/s" in axes.get_ylabel()
        points = [line for line in axes.get_lines() if line.get_linestyle() == "None"]
        assert len(points) == len(run.gpu_rows)
        first = min(points, key=lambda point: point.get_ydata()[0])
        row = max(run.gpu_rows, key=lambda row: row.median_us)
        assert first.get_xdata()[0] == pytest.approx(row.facts["operations"] / row.facts["bytes_moved"])
        assert first.get_ydata()[0] == pytest.approx(row.facts["rate_tflops"])
        assert [point.get_markerfacecolor() for point in points].count("none") == 1
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert {"portable", "trtllm", "decode", "target verify", "throttled"} <= set(legend)
        solid, dashed = (line for line in axes.get_lines() if line.get_linestyle() != "None")
        assert (solid.get_linestyle(), dashed.get_linestyle()) == ("-", "--")
        assert solid.get_label() == "measured: 4,243 GB/s, 790 TFLOP/s bfloat16"
        assert max(solid.get_ydata()) == pytest.approx(790)
        assert solid.get_xdata()[1] == pytest.approx(790 / 4.243)
        assert solid.get_ydata()[0] == pytest.approx(4.243 * solid.get_xdata()[0])

    def test_no_roof_is_drawn_that_was_not_recorded(self, tmp_path: Path) -> None:
        figure = figures(run_of(tmp_path, entries(), ceilings=None))["roofline-graph-l2-cold-by-rotation.png"]
        assert all(line.get_linestyle() == "None" for line in figure.axes[0].get_lines())

    def test_time_over_floor(self, tmp_path: Path) -> None:
        run = run_of(tmp_path, [*entries(), entry(page_size=128), entry(l2="warm")])
        drawn = figures(run)
        figure = drawn["time-over-floor-graph-l2-cold-by-rotation.png"]
        assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
            f"{name}, page size {size}"
            for name, size in (
                ("decode/llama-3.1-8b/8q1s4k", 64),
                ("decode/llama-3.1-8b/64q1s4k", 64),
                ("decode/llama-3.1-8b/64q1s4k", 128),
                ("target_verify/llama-3.1-8b/8q1s4k", 64),
                ("target_verify/llama-3.1-8b/64q1s4k", 64),
            )
        ]
        assert sorted(mark.get_xdata()[0] for mark in marks_of(figure)) == pytest.approx(
            sorted(row.median_us / row.facts["floor_us"] for row in run.gpu_rows if row.facts["l2"] != "warm")
        )
        assert len(marks_of(drawn["time-over-floor-graph-l2-warm.png"])) == 1

    def test_a_floor_shorter_than_a_launch_has_no_mark_and_no_operations_no_point(self, tmp_path: Path) -> None:
        assert figures(run_of(tmp_path, [entry(operations=None, bytes_moved=None, floor_us=None)])) == {}
        for floor_us in (0.0, 0.99):
            assert figures(run_of(tmp_path, [entry(operations=0, floor_us=floor_us)])) == {}
        (name,) = figures(run_of(tmp_path, [entry(operations=0, floor_us=1.0)]))
        assert name.startswith("time-over-floor")
