"""The gate: its exit status, its refusals, and pytest-benchmark's own on the same rows."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lab.reports.compare import compare as reports_compare
from lab.reports.tables import FittedTable
from tests.commands.command import run as run_lab
from tests.reports.recorded_runs import entry, environment, host_entry, samples_us, write_run

PORTABLE, TRTLLM = "lab.kernels.portable", "lab.kernels.trtllm"


def rows(*medians_us: float, seed: int = 0, **changes: Any) -> list[dict[str, Any]]:
    """A row of each median, each its own scenario."""
    return [
        entry(f"decode/llama-3.1-8b/{2**index}q1s4k", samples=samples_us(median_us, seed=seed + index), **changes)
        for index, median_us in enumerate(medians_us)
    ]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Compare two lists of entries; returns the exit status and what was said."""

    def compared(before: Any, after: Any, *options: str, facts: Any = None) -> tuple[int, str]:
        paths = write_run(tmp_path / "before.json", before), write_run(tmp_path / "after.json", after, facts)
        status = run_lab(["compare", *map(str, paths), *options])
        said = capsys.readouterr()
        return status, said.out + said.err

    return compared


SAME = entry("extend/llama-3.1-8b/8q4k")
FEW = [[entry(samples=samples_us(level_us, count=5))] for level_us in (250, 275)]
NOISY = [[entry(samples=samples_us(level_us, 15, 10, seed))] for level_us, seed in ((250, 1), (275, 2))]
WARM, E4M3, LIMITED = {"l2": "warm"}, {"kv_dtype": "float8_e4m3fn"}, {"throttled_by": ["power limit"]}
SLOW_CLOCK = {"sm_clock_mhz": [1500, 1980]}
UPDATED = {"commit": "ffffffffffff", "packages": {"flashinfer-python": "0.8.0"}, "driver_version": "590"}

Entries = list[dict[str, Any]]
# Rows before and after, options, the exit status and what is said.
COMPARED: dict[str, tuple[Entries, Entries, str, int, tuple[str, ...]]] = {
    "the same code": (
        rows(250, 900),
        rows(252, 895, seed=9),
        "",
        0,
        ("0 FASTER, 0 SLOWER, 2 SAME, 0 UNSURE, 0 refused, 0 missing, 0 new",),
    ),
    "10 % slower": (rows(250, 900), rows(275, 900, seed=9), "", 1, ("1 SLOWER, 1 SAME", "geometric mean of 2: 1.04")),
    "10 % faster": (rows(300), rows(270, seed=9), "", 0, ("1 FASTER",)),
    # A kernel that skips its work is no faster one; a warm L2 may give four times the memory's bandwidth.
    "an impossible time": (
        rows(250),
        rows(200, seed=9),
        "",
        125,
        ("refused, the time after is refused: it would move its bytes at", "1 refused"),
    ),
    "from a warm L2": (rows(250, **WARM), rows(200, seed=9, **WARM), "", 0, ("1 FASTER",)),
    "an impossible rate": (
        rows(250, matrix_rate_percent=131.0),
        rows(250),
        "",
        125,
        ("the time before is refused: it would compute at",),
    ),
    "a rate of e4m3": (rows(300, matrix_rate_percent=131.0, **E4M3), rows(270, **E4M3), "", 0, ("1 FASTER",)),
    "a large minimum effect": (rows(250), rows(275, seed=9), "--minimum-effect-percent 15", 0, ("1 SAME",)),
    "a small minimum effect": (rows(250), rows(255, seed=9), "--minimum-effect-percent 1", 1, ("1 SLOWER",)),
    "5 samples": (*FEW, "", 1, ("1 SLOWER",)),
    "5 samples cannot reach p = 0.001": (*FEW, "--significance 0.001", 0, ("1 UNSURE",)),
    "no significance": (*FEW, "--significance 2", 2, ("must be above 0 and at most 0.5, not 2",)),
    "unsure": (*NOISY, "", 0, ("1 UNSURE", "reaches across the minimum effect")),
    "unsure, strict": (*NOISY, "--strict", 1, ("1 UNSURE",)),
    "the same, strict": (rows(250), rows(250, seed=9), "--strict", 0, ("1 SAME",)),
    "vanished": (rows(250, 900), rows(250), "", 1, ("only before: decode/llama-3.1-8b/2q1s4k",)),
    "new": (rows(250), rows(250, 900), "", 0, ("only after: decode/llama-3.1-8b/2q1s4k",)),
    **{
        f"refused, {words}": (
            [*rows(250), SAME],
            [*rows(500, **changes), SAME],
            "",
            125,
            (words, "0 SLOWER, 1 SAME, 0 UNSURE, 1 refused, 0 missing, 0 new"),
        )
        for changes, words in (
            ({"clock": "cupti"}, "two methods: graph, L2 cold by rotation and cupti, L2 cold by rotation"),
            (WARM, "two methods: graph, L2 cold by rotation and graph, L2 warm"),
            ({"method": "another sentence"}, "and another sentence"),
            ({"kv_tokens": 1}, "two workloads, kv_tokens: 262208 and 1"),
            (SLOW_CLOCK, "two SM clocks: 1965 to 1980 MHz and 1500 to 1980 MHz"),
            ({"sm_clock_mhz": [1700, 1700]}, "two SM clocks: 1965 to 1980 MHz and 1700 MHz"),
            ({"sm_clock_mhz": None}, "two SM clocks: 1965 to 1980 MHz and not recorded"),
            ({"memory_clock_mhz": 2600}, "two memory clocks: 3201 MHz and 2600 MHz"),
        )
    },
    "slower, and one refused": (
        [*rows(250), SAME],
        [*rows(275, seed=9), entry("extend/llama-3.1-8b/8q4k", sm_clock_mhz=[1500, 1500])],
        "",
        1,
        ("1 SLOWER", "1 refused"),
    ),
    "a step of the clock": (rows(250), rows(250, sm_clock_mhz=[1950, 1965]), "", 0, ("1 SAME",)),
    "no recorded clocks": (rows(250, sm_clock_mhz=None), rows(250, sm_clock_mhz=None), "", 0, ("1 SAME",)),
    "host times beside": ([*rows(250), host_entry()], [*rows(250), host_entry()], "", 0, ("1 SAME", "host time")),
    "host times alone": ([host_entry()], [host_entry()], "", 125, ("nothing was compared",)),
    "nothing in common": (rows(250), [SAME], "", 125, ("nothing was compared",)),
    # A verdict that a limit may have made is none.
    "limited before, no slower": (rows(250, **LIMITED), rows(250), "", 0, ("1 SAME",)),
    "limited after, no slower": (rows(250), rows(250, **LIMITED), "", 0, ("1 SAME",)),
    "limited after, slower": (rows(250), rows(300, **LIMITED), "", 0, ("1 UNSURE", "held back")),
    "limited after, and faster all the same": (rows(320), rows(280, **LIMITED), "", 0, ("1 FASTER",)),
    "limited before, and slower all the same": (rows(250, **LIMITED), rows(300), "", 1, ("1 SLOWER",)),
    "limited before, faster": (rows(320, **LIMITED), rows(280), "", 0, ("1 UNSURE", "held back")),
    "limited both": (rows(250, **LIMITED), rows(300, **LIMITED), "", 0, ("1 UNSURE", "held back")),
    "slow clock before, slower": (rows(250, **LIMITED, **SLOW_CLOCK), rows(300), "", 1, ("1 SLOWER",)),
    "slow clock before, the same": (rows(250, **LIMITED, **SLOW_CLOCK), rows(250), "", 0, ("1 UNSURE", "held back")),
    "limited, another memory clock": (rows(250, **LIMITED), rows(250, memory_clock_mhz=1600), "", 125, ("1 refused",)),
}


@pytest.mark.parametrize("name", COMPARED)
def test_rows_are_compared(compare: Any, name: str) -> None:
    before, after, options, status, words = COMPARED[name]
    found, said = compare(before, after, *options.split())
    assert found == status
    assert [each for each in words if each not in said] == []
    assert ("held back" in said) == ("held back" in words)


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        (
            UPDATED,
            1,
            ("flashinfer-python: 0.7.2 before, 0.8.0 after", "commit: 0a77b93dd498 before, ffffffffffff after"),
        ),
        ({"gpu": "NVIDIA B200"}, 125, ("another GPU", "NVIDIA H200 in", "NVIDIA B200 in")),
        ({"gpu": None}, 125, ("names no GPU",)),
        ({"power.limit": "500.00 W"}, 125, ("another power limit", "700.00 W in", "500.00 W in")),
        ({"clocks.max.sm": "1755 MHz"}, 125, ("another maximum SM clock", "1980 MHz in", "1755 MHz in")),
    ],
)
def test_versions_are_compared_and_other_machines_refused(
    compare: Any, changes: dict[str, Any], status: int, words: tuple[str, ...]
) -> None:
    found, said = compare(rows(250), rows(500), facts=environment(**changes))
    assert found == status
    assert all(word in said for word in words)
    assert ("1 SLOWER" in said) == (status == 1)


def test_settings_that_differ_get_a_column_and_the_others_a_line(compare: Any) -> None:
    mixed = rows(250) + rows(250, page_size=32)
    _, said = compare(mixed, mixed)
    (heading,) = (line for line in said.splitlines() if "before, µs" in line)
    assert "page size" in heading
    assert "implementation" not in heading
    assert f"implementation: {TRTLLM}\n" in said
    assert "page size:" not in said


def test_a_file_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_run(tmp_path / "run.json", rows(250)))
    assert run_lab(["compare", path, path]) == 125
    assert "there is nothing to compare" in capsys.readouterr().err


def test_a_file_that_is_no_run_is_refused(compare: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "survey.json").write_text('{"verdicts": []}')
    good = write_run(tmp_path / "good.json", rows(250))
    assert run_lab(["compare", str(tmp_path / "survey.json"), str(good)]) == 2
    assert "no list of benchmarks" in capsys.readouterr().err


def test_folders_hold_repeated_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, level_us in (("before", 250), ("after", 275)):
        (tmp_path / side).mkdir()
        for run in range(5):
            write_run(tmp_path / side / f"{run}.json", rows(level_us * (1 + 0.002 * run), seed=run))
    assert run_lab(["compare", str(tmp_path / "before"), str(tmp_path / "after")]) == 1
    assert "0.008" in capsys.readouterr().out, "the rank test's least p of 5 and 5"
    assert run_lab(["compare", str(tmp_path / "before"), str(tmp_path / "before")]) == 125, "a folder with itself"


def test_one_odd_run_in_a_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write_run(tmp_path / "before.json", rows(250))
    (tmp_path / "after").mkdir()
    write_run(tmp_path / "after" / "1.json", rows(250))
    write_run(tmp_path / "after" / "2.json", rows(250, sm_clock_mhz=[1500, 1500]))
    assert run_lab(["compare", str(before), str(tmp_path / "after")]) == 125
    assert "two SM clocks" in capsys.readouterr().out


SCENARIOS = [entry("a"), entry("b", samples=samples_us(300)), entry("c", kv_tokens=1)]


@pytest.mark.parametrize(
    ("entries", "by", "status", "words"),
    [
        (
            rows(250, 900) + rows(275, 700, implementation=PORTABLE),
            f"implementation {TRTLLM} {PORTABLE}",
            1,
            "1 FASTER, 1 SLOWER",
        ),
        (rows(250), f"implementation {TRTLLM} {TRTLLM}", 125, TRTLLM),
        (rows(250), f"implementation {TRTLLM} {PORTABLE}", 125, f"has implementation {PORTABLE}; there is {TRTLLM}"),
        (rows(250) + rows(260, page_size=32), "page_size 64 32", 1, "1 SLOWER"),
        (
            rows(250, 900) + rows(250, implementation=PORTABLE),
            f"implementation {TRTLLM} {PORTABLE}",
            0,
            "only before: decode/llama-3.1-8b/2q1s4k",
        ),
        *(
            (rows(250), f"{key} one two", 125, f"two values of {key} are two methods")
            for key in ("clock", "l2", "method")
        ),
        (SCENARIOS, "scenario a b", 1, "1 SLOWER"),
        (SCENARIOS, "scenario a c", 125, "two workloads, kv_tokens: 262208 and 1"),
    ],
)
def test_two_sides_of_one_run_are_compared(
    entries: Entries, by: str, status: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_lab(["compare", str(write_run(tmp_path / "run.json", entries)), "--by", *by.split()]) == status
    said = capsys.readouterr()
    assert words in said.out + said.err


BENCHMARK = """
import os
import pytest
from lab.timing import DeviceClock

CLOCK = DeviceClock("made up")
MEDIAN_US = 250 * float(os.environ["SLOWDOWN"])

@pytest.mark.benchmark(timer=CLOCK)
def test_kernel(benchmark):
    samples = iter([MEDIAN_US * (1 + 0.0002 * sample) for sample in range(-10, 11)])
    benchmark.extra_info.update(scenario="decode", implementation="made up", clock="graph", l2="warm", method="made up")
    benchmark.pedantic(lambda: CLOCK.advance(next(samples) * 1e-6), rounds=21)
"""
MACHINE_INFO = """
def pytest_benchmark_update_machine_info(machine_info):
    machine_info["lab"] = {"gpu": "made up"}
"""


def test_both_gates_trip_on_a_kernel_slowed_on_purpose(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest-benchmark's `--benchmark-compare-fail` and the lab's, on recorded runs; 10 % trips them, 1 % does not."""
    pytester.makepyfile(test_made_up=BENCHMARK)
    pytester.makeconftest(MACHINE_INFO)
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # where it is set, pytest-benchmark measures nothing

    def run(name: str, slowdown: float, *options: str) -> pytest.RunResult:
        monkeypatch.setenv("SLOWDOWN", str(slowdown))
        return pytester.runpytest_inprocess("-q", "-p", "no:xdist", f"--benchmark-json={name}", *options)

    assert run("before.json", 1.0, "--benchmark-save=before").ret == 0
    for slowdown, trips in ((1.10, True), (1.01, False)):
        after = run("after.json", slowdown, "--benchmark-compare", "--benchmark-compare-fail=median:5%")
        assert bool(after.ret) == trips
        assert ("Performance has regressed" in str(after.stdout) + str(after.stderr)) == trips
        assert run_lab(["compare", "before.json", "after.json"]) == trips


class TestWritten:
    """What is written as JSON and Markdown is what the table shows, the changed rows first."""

    BEFORE, AFTER = (250, 900, 300, 400), (251, 905, 270, 480)
    ORDER = ("slower", "faster", "same", "same")

    def test_json(self, compare: Any, tmp_path: Path) -> None:
        path = tmp_path / "made" / "compared.json"
        status, said = compare(rows(*self.BEFORE), rows(*self.AFTER, seed=9), "--json", str(path))
        record = json.loads(path.read_text())
        assert [row["verdict"] for row in record["rows"]] == list(self.ORDER)
        assert record["exit_status"] == status == 1
        assert record["summary"] in said
        first = record["rows"][0]
        assert first["scenario"] == "decode/llama-3.1-8b/8q1s4k"
        assert (first["before_us"], first["after_us"]) == (pytest.approx(400, rel=0.01), pytest.approx(480, rel=0.01))

    def test_markdown_alone(self, compare: Any) -> None:
        _, said = compare(rows(*self.BEFORE), rows(*self.AFTER, seed=9), "--markdown", "-")
        assert said.startswith("1 FASTER, 1 SLOWER, 2 SAME")
        table = [line.split(" | ") for line in said.splitlines() if line.startswith("| decode/")]
        assert [cells[-1].strip(" |").lower() for cells in table] == list(self.ORDER)
        assert "─" not in said

    def test_a_refused_row_says_why(self, compare: Any) -> None:
        _, said = compare(rows(250, 900), rows(250) + rows(1, 900, kv_tokens=1)[1:], "--json", "-")
        refused = json.loads(said)["rows"][0]
        assert refused["verdict"] == "refused"
        assert "kv_tokens" in refused["reason"]

    def test_no_name_is_cut_in_a_narrow_terminal(self, tmp_path: Path) -> None:
        names = [f"draft_extend_v2/qwen3-coder-480b/64q4s4k/page16/{end}" for end in ("window", "e4m3")]
        paths = [
            write_run(tmp_path / f"{side}.json", [entry(name, samples=samples_us(level_us)) for name in names])
            for side, level_us in (("before", 12345.6), ("after", 23456.7))
        ]
        console = Console(width=80, file=io.StringIO())
        console.print(FittedTable(reports_compare(*paths).table))
        lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines)) <= 80
        assert [line for line in lines if line.startswith("draft")] == names
        assert len([line for line in lines if re.search(r" 12,3\d\d\.\d\d .* 23,4\d\d\.\d\d .*SLOWER", line)]) == 2
