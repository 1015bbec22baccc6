"""The lengths of recorded requests are a trace, and a scenario takes the recorded batch from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.recorded.call import RecordingError
from lab.recorded.case import recorded_cases, traced_requests
from lab.recorded.flashinfer_dumps import METADATA
from lab.workloads import scenario
from lab.workloads.traces import read_trace, snapshot
from tests.cases import CONTEXT, DECODE, MLA
from tests.commands.command import run
from tests.recorded.record_calls import LENGTHS, context_arguments, decode_arguments, latent_arguments, several_rows
from tests.recorded.write_calls import write_call


def _written(folder: Path, *calls: tuple[str, dict[str, Any]]) -> Path:
    for number, (function, arguments) in enumerate(calls):
        (path,) = write_call(folder / "one", function, arguments, (torch.zeros(1),)).iterdir()
        path.rename(folder / f"{number}{path.name}")
    (folder / "one").rmdir()
    return folder


def _lens(*lengths: int) -> dict[str, Any]:
    return decode_arguments(seq_lens=torch.tensor(lengths, dtype=torch.int32))


def test_a_scenario_takes_the_batch_of_the_first_pass_that_is_large_enough(tmp_path: Path) -> None:
    """Two layers of a pass; one with a request that pads it; and a pass of more requests than that."""
    calls = [
        (DECODE, _lens(5, 9, 1)),
        (DECODE, _lens(5, 9, 1)),
        (CONTEXT, context_arguments()),
        (DECODE, _lens(*LENGTHS)),
    ]
    requests = traced_requests(recorded_cases(_written(tmp_path, *calls)))
    assert [(each.arrival_ms, each.input_length, each.output_length) for each in requests] == [
        *((0.0, length, 1) for length in (4, 8)),
        *((1000.0, length - 1, 1) for length in LENGTHS),
    ]
    assert scenario("decode/tiny/trace2", requests).prefix_lens == (4, 8)
    assert scenario("decode/tiny/trace3", requests).kv_lens == LENGTHS
    with pytest.raises(ValueError, match="never 4 requests"):
        snapshot(requests, 4)


@pytest.mark.parametrize(
    ("calls", "lengths"),
    [
        ([(DECODE, _lens(*lengths)) for lengths in ((5, 9, 1), (7, 9, 1), (5, 9, 1))], [4, 8, 6, 8, 4, 8]),
        ([(MLA, latent_arguments()), (DECODE, several_rows())], [39, 4, 3, 15, 31]),
    ],
    ids=["lengths that come again are another pass", "rows of a request are not cached yet"],
)
def test_lengths_are_those_before_the_call(
    calls: list[tuple[str, dict[str, Any]]], lengths: list[int], tmp_path: Path
) -> None:
    assert [each.input_length for each in traced_requests(recorded_cases(_written(tmp_path, *calls)))] == lengths


def test_prompts_are_those_of_context_calls_where_nothing_decodes(tmp_path: Path) -> None:
    requests = traced_requests(recorded_cases(_written(tmp_path, (CONTEXT, context_arguments()))))
    assert [each.input_length for each in requests] == [3, 5]
    assert scenario("extend/tiny/trace2", requests).q_lens == (3, 5)


def test_a_call_that_cannot_be_read_is_left_out_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = _written(tmp_path, (DECODE, _lens(7, 7, 7)), (DECODE, _lens(5, 9, 1)), (DECODE, _lens(1, 1, 1)))
    (next(recording.glob("0*")) / METADATA).write_text("{")
    assert [each.input_length for each in traced_requests(recorded_cases(recording))] == [4, 8]
    with pytest.raises(RecordingError, match=r"no recorded call has a request with a length$"):
        traced_requests(recorded_cases(f"{recording}#3"))
    assert run(["recorded", "scenario", str(recording), "--out", str(tmp_path / "trace.jsonl")]) == 0
    assert "left out: call 1: " in (said := capsys.readouterr().err)
    assert "metadata.jsonl is damaged: JSONDecodeError" in said


def test_the_command_writes_a_trace_that_benchmarks_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, out = _written(tmp_path / "calls", (DECODE, _lens(*LENGTHS))), tmp_path / "trace.jsonl"
    assert run(["recorded", "scenario", str(recording), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 1 forward pass of up to 3 requests\n"
    assert read_trace(out) == traced_requests(recorded_cases(recording))
    assert run(["recorded", "scenario", str(recording), "--out", "trace.csv"]) == 2
    assert "trace.csv: a trace in Mooncake's format ends in .jsonl" in capsys.readouterr().err
    assert run(["recorded", "scenario", str(tmp_path / "absent")]) == 2
    assert "absent is no folder of recorded calls" in capsys.readouterr().err
