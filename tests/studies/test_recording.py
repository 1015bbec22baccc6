"""What all studies share: no GPU, no measurement; a file that is whole after every point; options; wrong command lines."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import studies
from lab.exit_status import ExitStatus
from lab.kernels import portable
from lab.reports.tables import Table
from studies import STUDIES, WITHOUT_GPU, command_of, question_of, study_named
from studies.recording import table_of
from studies.study import Part, Study
from tests.commands.command import run
from tests.studies.recorded import MODULES, recorded
from tests.studies.simulated import CEILINGS

ON_A_GPU = tuple(name for name in STUDIES if name not in WITHOUT_GPU)
FOLDER = Path(studies.__file__).parent


def line_of(name: str) -> str:
    return command_of(name).removeprefix("lab ")


def test_every_study_is_registered_and_documented() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py") if "Study):" in path.read_text()} - {"study", "loops"}
    assert modules == set(STUDIES), "studies.STUDIES has the class of each module with a study"
    page = (FOLDER.parent / "docs" / "api" / "studies.md").read_text()
    for name in STUDIES:
        assert issubclass(study_named(name), Study)
        assert study_named(name).name() == name
        assert question_of(name)
        assert f".. automodule:: studies.{name}\n" in page, f"docs/api/studies.md needs a section of studies.{name}"


@pytest.mark.parametrize("name", ON_A_GPU)
def test_without_an_option_the_settings_are_the_studys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Study] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("studies.draft_extend_graph.default_implementation", lambda: portable)
    monkeypatch.setattr(study_named(name), "run", lambda study, out: (ran.append(study), 0)[1])
    assert run(line_of(name)) == 0
    (found,) = ran
    if study_named(name).settings is None:
        assert found == study_named(name)()
    else:  # several loops, of times that have no default but the command's
        first, *others = (asdict(loop) for loop in found.loops)
        assert first["batch_size"] == 64
        assert others


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
        ("length_copy", "--steps 1"),
        ("plan_stream", "--steps 0"),
        ("mla_decode", "--only 64q1s8k"),
        *(
            ("decode_split", wrong)
            for wrong in ("--splits 0", "--only extend/tiny/q5s70", "--only decode/nobody/q1s70")
        ),
    ],
)
def test_a_wrong_command_line_is_refused(name: str, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{line_of(name)} --out out.json {wrong}") == 2
    said = capsys.readouterr().err
    assert re.search(r"Error|lab: ", said)
    assert "Traceback" not in said


@dataclass(frozen=True)
class Failing(Study):
    """A study whose third point fails; `found` is what the file holds before each point."""

    lists = ("rows", "wrong")
    ceilings = CEILINGS
    out: Path
    found: list[Mapping[str, Any] | None]

    @property
    def parts(self) -> Sequence[Part]:
        return [Part([1, 2, 3], self._rows_at)]

    def _rows_at(self, point: int) -> Mapping[str, Sequence[dict[str, Any]]]:
        self.found.append(json.loads(self.out.read_text()) if self.out.exists() else None)
        if point == 3:
            raise RuntimeError("the third point fails")
        return {"rows": [{"point": point}, {"point": -point}]}

    def method(self) -> Mapping[str, Any]:
        return {"method": "counted"}

    def derived(self, result: Mapping[str, Any]) -> dict[str, int]:
        return {"total": sum(row["point"] for row in result["rows"] if row["point"] > 0)}


@pytest.mark.usefixtures("simulated_gpu")
def test_the_file_is_whole_after_every_point(tmp_path: Path) -> None:
    failing = Failing(tmp_path / "out.json", [])
    with pytest.raises(RuntimeError, match="third"):
        failing.run(failing.out)
    environment = {"gpu": "simulated", "ceilings": CEILINGS.facts()}
    shared = {"experiment": "test_recording", "environment": environment, "method": "counted", "wrong": []}
    one, two = [{"point": 1}, {"point": -1}], [{"point": 2}, {"point": -2}]
    assert failing.found == [None, shared | {"rows": one, "total": 1}, shared | {"rows": [*one, *two], "total": 3}]
    assert json.loads(failing.out.read_text()) == failing.found[-1]


@pytest.mark.parametrize("name", [*MODULES, "decode_split", "kv_read_once"])
def test_what_a_study_derives_from_its_recorded_rows_is_what_was_recorded(name: str) -> None:
    recording, study = recorded(name), object.__new__(study_named(name))
    assert recording | json.loads(json.dumps(study.derived(recording))) == recording
    tables = [each for each in study.answer(recording) if isinstance(each, Table)]
    assert tables
    assert all(table.rows for table in tables)
    assert study.exit_status(recording) == ExitStatus.DONE


def test_words_and_numbers_are_told_apart() -> None:
    formats = {"variant": "{arm}", "µs": "{us:.1f}", "both": "{us:.0f} / {us:.0f}"}
    table = table_of("times", formats, [{"arm": "a", "us": 1.25}])
    assert [(column.heading, column.is_number) for column in table.columns] == [
        ("variant", False),
        ("µs", True),
        ("both", False),
    ]
    assert [(cell.text, cell.number) for cell in table.rows[0]] == [("a", None), ("1.2", 1.25), ("1 / 1", None)]
