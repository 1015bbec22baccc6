"""The harness itself, on a simulated GPU: what was measured reaches the JSON, and a benchmark that timed nothing fails."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.benchmarks import conftest
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import write_call
from tests.timing.inner_pytest import ROOT, inner_environment

CONFTEST = """
import torch
import lab.provenance
torch.cuda.is_available = lambda: True
lab.provenance.environment = lambda: {"gpu": "a simulated GPU"}
pytest_plugins = ["tests.conftest", "tests.benchmarks.conftest"]

import tests.benchmarks.conftest as benchmarks
from lab.timing import Ceilings, GpuTime, method_named
from lab.timing.forward import DeclinedError

NAMES = ("lab.kernels.portable", "lab.kernels.trtllm", "lab.references", "lab.kernels.peers.flex_attention")
measured = []

def time_interleaved(case, implementations, method, seed):
    assert seed is None
    names = [each.__name__ for each in implementations]
    measured.append((case, names))
    assert len(measured) == 1
    facts = {"kernel": "XQA", "bytes_moved": 4_000_000, "operations": 8_000_000, "host_us": 9.0, "plan_us": 50.0}
    time = GpuTime((2.0, 4.0, 3.0), method, launches=2)
    return [
        (time, facts | {"implementation": names[0]}),
        DeclinedError("XQA takes no such head"),
        AssertionError("12 output vectors are wrong\\nand more"),
        (GpuTime((0.1, 0.1), method, launches=2), facts | {"implementation": names[3]}),
    ]

benchmarks.time_interleaved = time_interleaved
benchmarks.measure_ceilings = lambda device: Ceilings(4000.0, 800.0)
benchmarks.implementation_names = lambda config: NAMES
"""
BENCHMARKS = """
import pytest
from lab.timing import Ceilings, GpuTime, method_named
from lab.timing.device_state import DeviceState
from tests.benchmarks.conftest import CEILINGS

CEILING = Ceilings(4000.0, 800.0)
FACTS = {"scenario": "decode/tiny/1q1s64", "kernel": "XQA", "bytes_moved": 4_000_000, "operations": 8_000_000, "host_us": 9.0}

@pytest.fixture(autouse=True)
def measured_ceilings(request):
    request.config.stash[CEILINGS] = CEILING

def time(**changes):
    return GpuTime((2.0, 4.0, 3.0), method_named("graph", "cold"), launches=2, **changes)

def test_times(gpu_benchmark):
    gpu_benchmark(time(), CEILING, FACTS)

def test_is_held_back(gpu_benchmark):
    state = DeviceState(throttled_by={"power limit"})
    gpu_benchmark(time(device=state), CEILING, FACTS | {"scenario": "extend/tiny/1q64"})

def test_times_nothing(gpu_benchmark):
    pass

def test_is_declined(gpu_benchmark):
    pytest.skip("XQA takes no such head")

def test_is_wrong(gpu_benchmark):
    raise AssertionError("12 output vectors are wrong")

@pytest.mark.parametrize(
    "name", ["lab.kernels.portable", "lab.kernels.trtllm", "lab.references", "lab.kernels.peers.flex_attention"]
)
def test_turns(name, timed_in_turns, gpu_benchmark):
    measured, facts = timed_in_turns("decode/tiny/2q1s64", "the case", method_named("graph", "cold"), name)
    gpu_benchmark(measured, CEILING, {"scenario": "decode/tiny/2q1s64"} | facts)
"""


@dataclass(frozen=True)
class Run:
    status: int
    output: str
    recorded: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One run of all of them; a process of its own, because a GPU is simulated in it."""
    return run_them(tmp_path_factory.mktemp("benchmarks"), BENCHMARKS)


def run_them(folder: Path, benchmarks: str, *options: str) -> Run:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(benchmarks)
    out = folder / "out.json"
    settings = ["-ra", f"--rootdir={folder}", f"--benchmark-json={out}", *options]
    command = [sys.executable, "-m", "pytest", str(folder), *settings]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=inner_environment())
    return Run(done.returncode, done.stdout, json.loads(out.read_text()))


def test_samples_facts_and_ceilings_reach_the_json(run: Run) -> None:
    row = next(row for row in run.recorded["benchmarks"] if row["name"] == "test_times")
    assert row["stats"]["data"] == pytest.approx([2e-6, 4e-6, 3e-6])
    facts = row["extra_info"]
    assert (facts["median_us"], facts["launches"], facts["floor_us"], facts["floor_bound"]) == (3.0, 2, 1.0, "memory")
    assert (facts["bandwidth_gbps"], facts["clock"], facts["l2"]) == (1333.333, "graph", "cold by rotation")
    assert "CUDA graph" in row["options"]["timer"]
    assert run.recorded["machine_info"]["lab"]["ceilings"]["bandwidth_gbps"] == 4000.0


def test_the_table_shows_the_row_and_what_held_it_back(run: Run) -> None:
    """What all rows have in common stands above the table."""
    common = {"median, µs: 3.00", "floor, µs: 1.00 (memory)", "GB/s: 1,333 (33 %)"}
    assert common <= set(run.output.splitlines())
    (line,) = (line for line in run.output.splitlines() if line.strip().startswith("extend/tiny/1q64 "))
    assert "power limit" in line


def test_a_benchmark_that_timed_nothing_fails_the_run(run: Run) -> None:
    assert run.status == 1
    assert "ERROR at teardown of test_times_nothing" in run.output
    assert "this benchmark timed nothing" in run.output
    assert run.output.count("ERROR at teardown") == 1


def test_a_declined_case_skips_with_its_reason_and_a_wrong_one_fails(run: Run) -> None:
    assert "XQA takes no such head" in run.output
    assert "3 failed, 4 passed, 2 skipped" in run.output


def test_implementations_are_timed_together_once_and_what_is_not_timed_is_recorded_with_its_reason(run: Run) -> None:
    rows = [row["extra_info"] for row in run.recorded["benchmarks"] if "test_turns" in row["name"]]
    assert [(row["implementation"], row["median_us"], row["plan_us"]) for row in rows] == [
        ("lab.kernels.portable", 3.0, 50.0)
    ]
    scenario = "decode/tiny/2q1s64"
    assert run.recorded["not_timed"] == [
        {"scenario": scenario, "implementation": "lab.kernels.trtllm", "reason": "XQA takes no such head"},
        {"scenario": scenario, "implementation": "lab.references", "reason": "wrong: 12 output vectors are wrong"},
        {
            "scenario": scenario,
            "implementation": "lab.kernels.peers.flex_attention",
            "reason": "refused: 0.10 µs, with a floor of 1.00 µs: it would move its bytes at 1,000 % of the bandwidth measured "
            "on this GPU, where a kernel that only reads reaches 110 % at most: it does not do the work, or its time is wrong",
        },
    ]


def test_recorded_calls_are_benchmarks_named_by_their_addresses(tmp_path: Path, pytester: pytest.Pytester) -> None:
    recording = write_call(
        tmp_path / "calls", "trtllm_batch_decode_with_kv_cache", decode_arguments(), (torch.zeros(1),)
    )
    done = run_them(tmp_path, "from tests.benchmarks.test_forward import test_timed\n", f"--lab-calls={recording}")
    rows = [row["extra_info"] for row in done.recorded["benchmarks"]]
    assert [(row["scenario"], row["implementation"]) for row in rows] == [(f"{recording}#1", "lab.kernels.portable")]
    assert {row["scenario"] for row in done.recorded["not_timed"]} == {f"{recording}#1"}
    options = [f"--rootdir={ROOT}", "--collect-only", "-q", "-p", "no:xdist", f"--lab-calls={recording}"]
    listed = pytester.runpytest_inprocess(ROOT / "tests" / "benchmarks", *options)
    names = [line.partition("::")[2] for line in listed.outlines if "::" in line]
    assert names == [
        f"test_timed[{recording}#1-{each}]" for each in conftest.IMPLEMENTATIONS
    ]  # neither drafts nor what has no scenario


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--lab-calls": "dumps", "--lab-scenario": "it"}, "no scenario: leave out --lab-scenario"),
        ({"--lab-calls": "dumps", "--lab-trace": "it"}, "no scenario: leave out --lab-trace"),
        ({"--lab-clock": "wall"}, "no clock is called 'wall'"),
        ({"--lab-l2": "hot"}, "not 'hot'"),
    ],
)
def test_options_that_do_not_go_together_stop_the_run(changed: dict[str, str], message: str) -> None:
    options = {"--lab-clock": "graph", "--lab-l2": "cold"} | changed
    with pytest.raises(pytest.UsageError, match=message):
        conftest.pytest_configure(SimpleNamespace(getoption=options.get, stash=pytest.Stash()))
