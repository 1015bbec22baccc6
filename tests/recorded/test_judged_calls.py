"""Recorded calls are judged: by what the engine's kernel returned, or by what an implementation returns for their inputs."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import DecodeCall
from lab.calls.problem import E4M3
from lab.checks import Outcome, Ranges, Report
from lab.checks.record import read_case
from lab.checks.run.judge import judge_calls, judge_recorded
from lab.exit_status import ExitStatus
from lab.recorded.call import RecordingError
from lab.recorded.case import recorded_cases
from lab.recorded.flashinfer_dumps import METADATA, listed
from lab.references.assertion import truth_of_problem
from lab.reports.judgement import details, reproduction
from tests.cases import DECODE, MLA
from tests.commands.command import run
from tests.recorded.record_calls import LENGTHS, decode_arguments, latent_arguments, several_rows
from tests.recorded.write_calls import write_call


def _judged(recording: Path | str, **settings: Any) -> Report:
    return judge_calls(recording, device="cpu", isolated=False, **settings)


def _change_output(dumps: Path, number: int, change: Callable[[torch.Tensor], object]) -> None:
    path = listed(dumps)[number - 1].path / "outputs.pt"
    outputs = torch.load(path, weights_only=True)
    for each in outputs.values():
        change(each)
    torch.save(outputs, path)


def test_right_outputs_are_right_and_invalid_arguments_are_wrong(recorded_once: Path) -> None:
    report = _judged(recorded_once)
    assert [verdict.outcome.value for verdict in report.verdicts] == [*["right"] * 4, "wrong"]
    assert [verdict.case.number for verdict in report.verdicts] == [1, 2, 3, 4, 5]
    assert report.exit_status is ExitStatus.WRONG
    assert str(report).startswith("Wrong: 1 of 5 cases. The arguments are invalid in 1 case (1 of 1 result).")
    sentence = "the arguments are invalid: call 5: seq_lens[0] = 5 "
    assert report.verdicts[4].judged.wrongs[0].startswith(sentence)
    assert any(sentence in line and not line.endswith("…") for line in details(report))
    assert sum(verdict.judged.judged for verdict in report.verdicts) == 4
    lines = details(report)
    assert any("a wrong table is judged as it stands" in line for line in lines)
    assert sum("alignment are lost" in line for line in lines) == 1  # of the recording, not of each call


def test_a_wrong_output_is_found_with_its_call_and_where_it_is_wrong(dumps: Path) -> None:
    for number in (2, 4):
        _change_output(dumps, number, lambda out: out[2].mul_(1.5))
    report = _judged(dumps)
    assert [verdict.case.number for verdict in report.wrong] == [2, 4, 5]
    assert report.exit_status is ExitStatus.WRONG
    lines = details(report)
    assert lines[0] == "Wrong: 3 of 5 cases."
    assert "he output is wrong " in lines[1]
    (first,) = (line for line in lines if line.startswith("first wrong call of trtllm_batch_decode_with_kv_cache: "))
    assert f": {dumps}#2, " in first
    assert first.endswith(f", in {Path(recorded_cases(dumps)[1].path).name}")
    assert f"lab judge --calls {dumps}#2" in [reproduction(verdict).replace("'", "") for verdict in report.wrong]
    (alone,) = _judged(f"{dumps}#4").verdicts
    assert alone.outcome is Outcome.WRONG
    assert "of requests [2]" in alone.judged.wrongs[0]
    (result,) = alone.judged.results
    assert [request[0]["kv_len"] for request in result.requests] == list(LENGTHS)


def test_an_implementation_gets_the_recorded_inputs(recorded_once: Path) -> None:
    assert not any(_judged(recorded_once, implementation=references).wrong)
    seen = []

    def without_window(**arguments: Any) -> Any:
        seen.append(arguments)
        return references.trtllm_batch_decode_with_kv_cache(**arguments | {"window_left": -1})

    report = _judged(recorded_once, implementation=SimpleNamespace(trtllm_batch_decode_with_kv_cache=without_window))
    assert [verdict.case.number for verdict in report.wrong] == [4]
    given = decode_arguments()
    assert torch.equal(seen[0]["query"], given["query"])
    assert len(seen[0]["workspace_buffer"]) > len(
        given["workspace_buffer"]
    )  # a kernel's of today, not the recorded one


def test_requests_with_a_key_that_is_not_finite_are_left_out_and_named(dumps: Path, tmp_path: Path) -> None:
    path = listed(dumps)[0].path / "inputs.pt"
    inputs = torch.load(path, weights_only=True)
    inputs["kwarg_kv_cache__0"][inputs["kwarg_block_tables"][1, 0], 1, 3, 0] = torch.nan
    torch.save(inputs, path)
    _change_output(dumps, 1, lambda out: out[1, 2:].fill_(torch.nan))
    (verdict,) = _judged(f"{dumps}#1").verdicts
    assert verdict.outcome is Outcome.RIGHT
    (lost,), found = verdict.judged.remarks, verdict.judged.suspicions
    assert "offsets and alignment are lost" in lost
    assert len(found) == 2
    assert all("K of request 1, key 3" in each for each in found)
    assert found[1].startswith("call 1: row 1 (request 1) head 2 is not finite: it sees")
    assert str(verdict).startswith("R1 of trtllm_batch_decode_with_kv_cache is right, but its inputs are suspicious: ")
    report = _judged(dumps, out=tmp_path / "report.json")
    shutil.rmtree(recorded_cases(dumps)[4].path)
    answer = "Right, but the inputs of 1 case are suspicious, as the notes say: 4 cases."
    assert str(_judged(dumps)) == answer
    assert set(found) <= set(details(report))
    assert read_case(tmp_path / "report.json", 1).judged.suspicions == found
    _change_output(dumps, 1, lambda out: out[2].fill_(0))
    (verdict,) = _judged(f"{dumps}#1").verdicts
    assert verdict.outcome is Outcome.WRONG
    assert "row 2 (request 2) head " in verdict.judged.wrongs[0]


def test_a_call_that_makes_no_sense_is_wrong_and_a_damaged_one_declined(
    dumps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = listed(dumps)[0].path / "inputs.pt"
    inputs = torch.load(path, weights_only=True)
    inputs["kwarg_block_tables"][2, 1] = 99
    torch.save(inputs, path)
    (listed(dumps)[1].path / METADATA).write_text("{")
    first, second, *others = _judged(dumps).verdicts
    assert "K page id 99 of request 2, column 1 is outside the pool" in first.reason
    assert "is damaged" in second.reason
    assert [each.outcome for each in (first, second)] == [Outcome.WRONG, Outcome.DECLINED]
    assert len(others) == 3
    (alone,) = _judged(f"{dumps}#1", implementation=references).verdicts  # which did not make the arguments
    assert alone.outcome is Outcome.DECLINED
    assert "K page id 99" in alone.reason
    report, line = _judged(dumps), f"not judged: {second.reason}"
    assert second.reason in report.diagnosis.reach
    assert line not in [*details(report)]
    monkeypatch.setattr("lab.reports.judgement.SHOWN_REASON", len(second.reason) - 1)
    assert line in [*details(report)]


def test_a_call_that_did_not_return_has_failed(dumps: Path) -> None:
    (listed(dumps)[1].path / "outputs.pt").unlink()
    report = _judged(f"{dumps}#2")
    assert (report.verdicts[0].outcome, report.verdicts[0].reason) == (Outcome.FAILED, "it did not return")
    assert str(report).startswith("Failed: 1 of 1 case.")
    assert report.exit_status is ExitStatus.WRONG
    assert _judged(f"{dumps}#2", implementation=references).is_right


def test_a_failure_that_is_documented_is_named(tmp_path: Path) -> None:
    """As FlashInfer's XQA, which leaves bmm2_scale out, and is wrong where a request has fewer keys than rows."""
    few = several_rows(seq_lens=torch.tensor([1, 17, 33], dtype=torch.int32))
    many = several_rows()
    right = references.trtllm_batch_decode_with_kv_cache(**few)
    wrong = {"few": right.clone(), "first": right.clone()}
    wrong["few"][:2] += 1
    wrong["first"][:3] += 1
    calls = {name: (few, out) for name, out in wrong.items()}
    calls["scale"] = (many | {"bmm2_scale": 2.0}, references.trtllm_batch_decode_with_kv_cache(**many))
    found = {}
    for name, (arguments, out) in calls.items():
        folder = write_call(tmp_path / name, DECODE, arguments, (out,))
        (call,) = folder.iterdir()
        record = json.loads((call / METADATA).read_text())
        (call / METADATA).write_text(json.dumps(record | {"versions": {"flashinfer": "0.7.2"}}))
        found[name] = " ".join(_judged(folder).verdicts[0].judged.remarks)
    assert "findings.md#3-xqa-is-wrong-for-a-request" in found["few"]
    assert "findings.md#" not in found["first"]
    assert "findings.md#1-xqa-with-bf16" in found["scale"]


def test_a_case_of_the_report_is_judged_again(dumps: Path, tmp_path: Path) -> None:
    _change_output(dumps, 2, lambda out: out.zero_())
    path = tmp_path / "report.json"
    report = _judged(dumps, out=path)
    wrong, _ = report.wrong
    assert read_case(path, wrong.number).case == wrong.case
    assert judge_recorded(path, wrong.number, isolated=False).outcome is Outcome.WRONG
    assert json.loads(path.read_text())["cases"][1]["case"] == repr(wrong.case)


@pytest.mark.parametrize(
    ("recording", "sentence"),
    [
        ("/absent", "is no folder of recorded calls"),
        ("", "has no recorded calls; subfolders are not searched"),
        ("#3", "has no recorded calls"),
        ("#one", "#one is no folder of recorded calls; one call is named as in calls#3"),
        ("/dumps#9", "has no call 9; it has 5"),
    ],
)
def test_a_recording_without_the_call_is_refused(dumps: Path, recording: str, sentence: str) -> None:
    with pytest.raises(RecordingError, match=sentence):
        recorded_cases(f"{dumps.parent}{recording}")


@pytest.mark.parametrize("option", ["--calls", "--case"])
def test_the_command_judges_one_call(dumps: Path, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    _change_output(dumps, 2, lambda out: out.zero_())
    assert run(["judge", option, f"{dumps}#2", "--device", "cpu", "--in-process"]) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("Wrong: 1 of 1 case.")
    assert f"{dumps}#2" in shown.replace("\n", "")
    assert run(["judge", "lab.references", option, f"{dumps}#2", "--device", "cpu", "--in-process"]) == 0


def test_an_lse_in_base_e_is_judged_in_base_e(tmp_path: Path) -> None:
    arguments = latent_arguments(return_lse=True, return_lse_base="basee")
    out, lse = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    (right,) = _judged(write_call(tmp_path / "right", MLA, arguments, (out, lse))).verdicts
    assert right.outcome is Outcome.RIGHT
    (wrong,) = _judged(write_call(tmp_path / "wrong", MLA, arguments, (out, lse / math.log(2)))).verdicts
    assert "LSE" in wrong.judged.wrongs[0]


def test_e4m3_arithmetic_is_judged_by_its_own_bound(tmp_path: Path) -> None:
    arguments = decode_arguments()
    arguments["kv_cache"] = tuple(each.to(E4M3) for each in arguments["kv_cache"])
    truth = truth_of_problem(DecodeCall(**arguments).problem(), E4M3)
    out = (truth.expected * 1.03).to(torch.bfloat16)
    recording = write_call(tmp_path, DECODE, arguments, (out,))
    (by_query,) = _judged(recording).verdicts
    (by_e4m3,) = _judged(recording, ranges=Ranges(e4m3_arithmetic=True)).verdicts
    assert [by_query.outcome, by_e4m3.outcome] == [Outcome.WRONG, Outcome.RIGHT]


def test_rows_of_no_request_are_not_judged_and_a_bad_lse_is_beside_a_request_that_is_left_out(tmp_path: Path) -> None:
    offsets = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    arguments = decode_arguments(cum_seq_lens_q=offsets, max_q_len=1, q_len_per_req=None, return_lse=True)
    arguments["kv_cache"][0][arguments["block_tables"][0, 0], :, 0, 0] = torch.nan
    out, lse = references.trtllm_batch_decode_with_kv_cache(**arguments)
    out[2] = 7
    (right,) = _judged(write_call(tmp_path / "right", DECODE, arguments, (out, lse))).verdicts
    assert right.outcome is Outcome.RIGHT
    lse[1] += 1
    (wrong,) = _judged(write_call(tmp_path / "wrong", DECODE, arguments, (out, lse))).verdicts
    assert "LSE" in wrong.judged.wrongs[0]
