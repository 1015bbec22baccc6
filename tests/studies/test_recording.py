"""What all experiments share: no GPU, no measurement; a file that is whole after every point; wrong command lines."""

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import studies
from lab.exit_status import ExitStatus
from studies import EXPERIMENTS, command_of
from studies.recording import Columns, Recording, table_of
from tests.commands.command import run
from tests.studies.simulated import CEILINGS

ON_A_GPU = tuple(name for name in EXPERIMENTS if name != "draft_visibility")
FOLDER = Path(studies.__file__).parent


def line_of(name: str) -> str:
    return command_of(name).removeprefix("lab ")


def test_every_module_that_runs_is_registered_and_documented() -> None:
    runs = [path.stem for path in sorted(FOLDER.glob("*.py")) if "\ndef run(" in path.read_text()]
    assert runs == list(EXPERIMENTS)
    pages = (FOLDER.parent / "docs" / "api" / "studies.md").read_text()
    for module in EXPERIMENTS.values():
        assert (importlib.import_module(module).__doc__ or "").split("\n", 1)[0].strip()
        assert f".. automodule:: {module}\n" in pages


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_is_a_command_that_can_write_a_file(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{line_of(name)} --help") == 0
    assert "--out " in capsys.readouterr().out


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_a_gpu_it_says_so_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "out.json"
    assert run(f"{line_of(name)} --out {out}") == 125
    assert "not measured" in (said := capsys.readouterr().err)
    assert "no CUDA GPU here" in said
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *(("draft_extend_graph", f"{option} 0") for option in ("--batch-sizes", "--num-draft-tokens", "--samples")),
        ("draft_extend_graph", "--kv-len 7"),
        ("draft_extend_graph", "--clock sundial"),
        ("draft_extend_kernels", "--only 3q4s1k"),
        ("draft_steps", "--l2 lukewarm"),
        *(("draft_extend_kernels", f"{option} 0") for option in ("--q-lens", "--requests", "--samples", "--most-keys")),
        ("draft_extend_kernels", "--keys 16"),
        ("draft_steps", "--only 64y8k"),
        ("draft_steps", "--trace missing.jsonl"),
        *(("kv_read_once", wrong) for wrong in ("--samples 0", "--only 64x1", "--trace missing.jsonl")),
        ("kv_read_once", "--only trace --trace a.txt"),
        *(("mla_decode", f"{option} 0") for option in ("--q-lens", "--heads", "--samples")),
        *(("mla_decode", wrong) for wrong in ("--shapes 0x64", "--shapes 64", "--shapes 2x3 --q-lens 4")),
        ("mla_decode", "--kv-dtype x"),
        ("mla_decode", "--only 64q1s8k"),
    ],
)
def test_a_wrong_command_line_is_refused(name: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{line_of(name)} --out out.json {wrong}") == 2
    said = capsys.readouterr().err
    assert re.search(r"Error|lab: ", said)
    assert "Traceback" not in said


@pytest.mark.usefixtures("simulated_gpu")
def test_the_file_is_whole_after_every_point(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found: list[Mapping[str, Any] | None] = []

    def rows_at(point: int) -> Mapping[str, Sequence[dict[str, Any]]]:
        found.append(json.loads(out.read_text()) if out.exists() else None)
        if point == 3:
            raise RuntimeError("the third point fails")
        return {"rows": [{"point": point}, {"point": -point}]}

    total = {"total": lambda result: sum(row["point"] for row in result["rows"] if row["point"] > 0)}
    recording = Recording("counting", out, {"method": "counted", **total}, ("rows", "wrong"), ceilings=CEILINGS)
    with pytest.raises(RuntimeError, match="third"):
        recording.measure([1, 2, 3], rows_at)
    environment = {"gpu": "simulated", "ceilings": CEILINGS.facts()}
    shared = {"experiment": "counting", "environment": environment, "method": "counted", "wrong": []}
    one, two = [{"point": 1}, {"point": -1}], [{"point": 2}, {"point": -2}]
    assert found == [None, shared | {"rows": one, "total": 1}, shared | {"rows": [*one, *two], "total": 3}]
    assert json.loads(out.read_text()) == found[-1]
    recording.add("claim", 7)
    assert json.loads(out.read_text())["claim"] == 7


@pytest.mark.usefixtures("simulated_gpu")
def test_a_wrong_arm_is_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    recording = Recording("counting", None, {}, ("declined", "wrong"))
    assert recording.result["environment"] == {"gpu": "simulated"}
    assert recording.exit_status == ExitStatus.DONE
    reason = {"point": "2q4", "arm": "one", "reason": "not [here]"}
    recording.measure([0], lambda _: {"declined": [reason]})
    assert recording.exit_status == ExitStatus.DONE
    recording.measure([0], lambda _: {"wrong": [reason | {"arm": "other"}]})
    assert recording.exit_status == ExitStatus.WRONG
    recording.print_reasons()
    printed = capsys.readouterr().out
    assert "declined: 2q4, one: not [here]" in printed
    assert "wrong: 2q4, other: not [here]" in printed


def test_words_are_aligned_as_words() -> None:
    columns: Columns = {"arm": "{arm}", "µs": lambda row: f"{row['us']:.1f}"}
    table = table_of("times", columns, [{"arm": "a", "us": 1.25}], words=("arm",))
    assert [(column.header, column.justify, *column.cells) for column in table.columns] == [
        ("arm", "left", "a"),
        ("µs", "right", "1.2"),
    ]
