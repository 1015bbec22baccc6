"""Reading recorded runs: what is in them, and what is refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab.reports.recorded import in_words, read_run, read_runs
from lab.reports.recorded_file import FileKind, RecordedFileError, read_file, read_folder
from tests.reports.recorded_runs import CEILINGS, benchmark, entry, host_entry, write_run

RESULTS = Path(__file__).parent.parent.parent / "results"
TIMINGS = sorted(RESULTS.glob("*/timings*.json"))


def test_a_run_is_read(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run.json", [entry(samples=[3.0, 1.0, 2.0]), host_entry()])
    run = read_run(path)
    assert run.environment["gpu"] == "NVIDIA H200"
    assert "ceilings" not in run.environment
    assert run.ceilings == CEILINGS
    (row,) = run.gpu_rows
    assert row.samples_us == pytest.approx((3.0, 1.0, 2.0))
    assert row.median_us == pytest.approx(2.0)
    assert row.iqr_percent == pytest.approx(50.0)
    assert row.timed_by == "graph, L2 cold by rotation"
    assert [other.facts["clock"] for other in run.other_rows] == ["host"]


def test_identity_is_what_was_measured_and_how_and_not_what_was_reached(tmp_path: Path) -> None:
    reached = read_run(write_run(tmp_path / "reached.json", [entry(samples=[1.0], launches=2, kernel="trtllm-gen")]))
    changes: list[dict[str, Any]] = [
        {},
        {"implementation": "lab.kernels.portable"},
        {"page_size": 32},
        {"kv_dtype": "float8_e4m3fn"},
        {"clock": "cupti"},
        {"l2": "warm"},
    ]
    run = read_run(write_run(tmp_path / "run.json", [entry(**change) for change in changes]))
    assert len({row.identity for row in run.rows}) == len(changes)
    assert run.rows[0].identity == reached.rows[0].identity
    assert in_words(run.rows[0].identity) == (
        "decode/llama-3.1-8b/64q1s4k, lab.kernels.trtllm, page_size 64, dtype bfloat16, kv_dtype bfloat16, "
        "clock graph, l2 cold by rotation"
    )


@pytest.mark.parametrize(
    ("clock", "is_gpu_time"),
    [(None, False), ("host", False), ("wall", False), ("graph", True), ("cupti", True), ("events", True)],
)
def test_only_a_gpu_clock_is_gpu_time(tmp_path: Path, clock: str | None, is_gpu_time: bool) -> None:
    run = read_run(write_run(tmp_path / "run.json", [entry(clock=clock)], ceilings=None))
    assert (len(run.gpu_rows), len(run.other_rows)) == ((1, 0) if is_gpu_time else (0, 1))
    assert run.ceilings == {}


def benchmarks(*listed: object) -> str:
    return json.dumps({"benchmarks": listed})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not json", "not JSON"),
        ("[]", "no list of benchmarks"),
        ('{"verdicts": []}', "no list of benchmarks"),
        (benchmarks({"stats": {"data": [1]}}), "without a name"),
        (benchmarks({"name": "one"}), "no raw samples; .*--benchmark-save-data"),
        (benchmarks(5), "not in the form"),
        (json.dumps({"benchmarks": [], "machine_info": {"lab": None}}), "not in the form"),
        (benchmarks({"name": "one", "stats": {"data": ["x"]}}), "not in the form"),
        (benchmarks({"name": "one", "stats": {"data": [1]}, "extra_info": [1]}), "no mapping"),
        (benchmarks(entry(), entry()), "the benchmark is there twice: tests/benchmarks/.*trtllm"),
        (
            benchmarks(*(benchmark(name, [1.0], entry()["extra_info"]) for name in ("one", "two"))),
            r"the measurement is there twice: decode/llama-3\.1-8b",
        ),
        *(
            (benchmarks(entry(samples=[1.0, sample, 2.0])), "a benchmark that timed nothing")
            for sample in (0.0, -1.0, float("nan"), float("inf"))
        ),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "other.json"
    with pytest.raises(RecordedFileError, match="No such file"):
        read_run(path)
    path.write_text(text)
    with pytest.raises(RecordedFileError, match=words) as refusal:
        read_run(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("path", TIMINGS, ids=lambda path: path.parent.name)
def test_what_the_lab_recorded_can_be_read(path: Path) -> None:
    run = read_run(path)
    assert run.environment["gpu"]
    assert len(run.gpu_rows) + len(run.other_rows) == len(run.rows) > 0


def test_a_folder_holds_repeated_runs(tmp_path: Path) -> None:
    with pytest.raises(RecordedFileError, match="without a JSON file"):
        read_runs(tmp_path)
    paths = [write_run(tmp_path / name, [entry()]) for name in ("1.json", "2.json")]
    assert [run.path for run in read_runs(tmp_path)] == paths
    assert [run.path for run in read_runs(paths[1])] == paths[1:]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvidia-h200/timings.json", FileKind.BENCHMARKS),
        ("nvidia-h200/judge/portable.json.gz", FileKind.JUDGE),
        ("nvidia-h200/survey_trtllm.json.gz", FileKind.OTHER),
        ("nvidia-h200/graphs_trtllm.json.gz", FileKind.OTHER),
        ("nvidia-h200/plan_stream.json", FileKind.EXPERIMENT),
        ("nvidia-h200/clocks.json", FileKind.EXPERIMENT),
        ("mutants.json.gz", FileKind.OTHER),
    ],
)
def test_a_file_says_what_it_is(name: str, kind: FileKind) -> None:
    file = read_file(RESULTS / name)
    assert file.kind is kind
    assert file.environment.get("commit") or name == "mutants.json.gz"
    assert {each.kind for each in read_folder(RESULTS / "cpu")} == {FileKind.JUDGE, FileKind.EXPERIMENT}


def test_an_experiment_names_itself_or_is_of_its_files_name(tmp_path: Path) -> None:
    path = tmp_path / "later.json"
    path.write_text('{"rows": []}')
    assert read_file(path).experiment == "later"
    path.write_text('{"experiment": "plan_stream"}')
    assert read_file(path).experiment == "plan_stream"
    assert read_file(path).fact("nvidia_smi", "power.limit") is None
