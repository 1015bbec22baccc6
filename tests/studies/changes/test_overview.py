"""The page and the table: of the recordings, and of what they were altered to; and the command line of both."""

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from rich.console import Console

from lab.reports.tables import terminal_of
from studies.changes import CHANGES
from studies.changes.entries import Entry, day_of, file_of, read_entries
from studies.changes.overview import PAGE, claims_table, kernels_sentence, page
from studies.changes.run import DEFAULT_OUT, run_command, show
from tests.commands.command import run
from tests.studies.recorded import FOLDER, MODULES, recorded, slowed

DAY = re.compile(r"\| \d{4}-\d\d-\d\d \|")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with copies of the recordings."""
    for module in MODULES:
        write(tmp_path, module, recorded(module))
    return tmp_path


def write(folder: Path, module: str, recording: object) -> None:
    file_of(folder, module).write_text(json.dumps(recording))


def page_of(folder: Path) -> str:
    return page(read_entries(folder), folder)


def printed(entries: Sequence[Entry]) -> str:
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(terminal_of(claims_table(entries)))
    return console.export_text()


def test_the_page_in_the_repository_is_that_of_its_recordings() -> None:
    # If this fails: lab experiments changes --recorded results/nvidia-h200 --out results/nvidia-h200
    written = (FOLDER / PAGE).read_text(encoding="utf-8")
    assert DAY.sub("", written) == DAY.sub("", page_of(FOLDER))


FIGURES = re.compile(r"[\d,.]+ → [\d,.]+ µs")


def test_every_time_gpu_and_commit_on_the_page_is_the_recordings(folder: Path) -> None:
    real = set(FIGURES.findall(page_of(folder)))
    assert len(real) > 20
    for module in MODULES:
        recording = slowed(recorded(module), 3.7)
        recording["environment"] |= {"gpu": "NVIDIA B200", "commit": "abc123", "capability": [10, 0]}
        for row in recording.get("rows", ()):
            row["throttled_by"] = ["power limit"]
        write(folder, module, recording)
    text = page_of(folder)
    assert not real & set(FIGURES.findall(text))
    assert "measured on NVIDIA B200" in text.splitlines()[0]
    assert "H200" not in text
    assert text.count("`abc123`") == len(MODULES)
    rows = len(recorded("draft_extend_kernels")["rows"])
    assert f"| {rows} of {rows} rows that record it (power limit) |" in text


def test_the_kernels_are_those_that_ran(folder: Path) -> None:
    recording = recorded("draft_extend_kernels")
    for row in recording["rows"]:
        if row["implementation"] == "lab.kernels.trtllm":
            row["kernel"] = f"trtllm-gen {row['arm']}"
    recording["environment"]["capability"] = [10, 0]
    write(folder, "draft_extend_kernels", recording)
    said = kernels_sentence(read_entries(folder))
    assert "trtllm-gen decode for trtllm_batch_decode_with_kv_cache" in said
    assert "not measured with trtllm-gen" not in said
    assert said.startswith("On SM90 and SM100")
    file_of(folder, "draft_extend_kernels").unlink()
    assert "no recording here names a kernel" in kernels_sentence(read_entries(folder))


def test_what_is_not_recorded_says_so_and_what_cannot_be_read_says_why(folder: Path) -> None:
    file_of(folder, "length_copy").unlink()
    file_of(folder, "plan_stream").write_text('{"arms": [')
    write(folder, "draft_steps", {"rows": [{"scenario": "x"}]})
    write(folder, "draft_extend_graph", [])
    entries = {entry.change.module: entry for entry in read_entries(folder)}
    assert (entries["length_copy"].verdict, entries["length_copy"].failure) == ("not recorded", "")
    assert "plan_stream.json: not JSON" in entries["plan_stream"].failure
    assert (
        "draft_steps.json: not in the form that the study writes: KeyError: 'point'" in entries["draft_steps"].failure
    )
    assert "draft_extend_graph.json: holds no study's recording but other JSON" in entries["draft_extend_graph"].failure
    assert entries["draft_extend_kernels"].answer is not None
    text, table = page_of(folder), " ".join(printed(list(entries.values())).split())
    assert text.count("**Failed**: ") == table.count("failed: ") == 3
    assert (text.count("**Not recorded.**"), table.count("not recorded")) == (4, 2 * 4)  # a change and its statement


# --- the command line ---------------------------------------------------------------------------------------------------


class Commands:
    """Stands for the studies' processes: writes recordings, and ends as it is told."""

    def __init__(self, statuses: dict[str, int] | None = None) -> None:
        self.statuses = statuses or {}
        self.ran: list[str] = []

    def __call__(self, line: Sequence[str]) -> int:
        python, *command, dash_out, out = line
        assert (python, *command[:3], dash_out) == (sys.executable, "-m", "lab", "experiments", "--out")
        assert not Path(out).exists()
        name = command[3].replace("-", "_")
        self.ran.append(name)
        status = self.statuses.get(name, 0)
        if status == 0:
            write(Path(out).parent, name, recorded(name))
        return status


@pytest.mark.parametrize("only", [(), (26824, 24566)])
def test_on_a_gpu_studies_run_and_the_overview_is_of_what_they_wrote(
    only: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    commands = Commands()
    out = tmp_path / "measured"
    assert show(None, out, only, commands) == 0
    assert commands.ran == [change.module for change in CHANGES if not only or change.number in only]
    text = (out / PAGE).read_text()
    assert text.startswith("# Changes of SGLang's" if only else "# Five changes of SGLang's")
    assert all((f"]({change.module}.json)" in text) == (change.module in commands.ran) for change in CHANGES)
    assert ("26241 No ragged lists for MLA's draft steps" in capsys.readouterr().out) == (not only)


def test_one_that_fails_does_not_stop_the_others_and_is_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    commands = Commands({"plan_stream": 3, "draft_extend_kernels": -9})
    write(tmp_path, "plan_stream", recorded("plan_stream"))  # of an earlier run
    assert show(None, tmp_path, run=commands) == 1
    assert len(commands.ran) == len(CHANGES)
    text = (tmp_path / PAGE).read_text()
    assert "**Failed**: its command ended with exit status 3." in text
    assert "**Failed**: its command ended with exit status -9." in text
    assert "[plan_stream.json]" not in text
    assert "[length_copy.json]" in text


def never(line: Sequence[str]) -> int:
    raise AssertionError(f"{line} was run")


def test_without_a_gpu_it_shows_the_recorded_run_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert show(None, None, run=never) == 0
    said = capsys.readouterr().out
    assert "No CUDA GPU here, so nothing is measured" in said
    assert "nvidia-h200" in said
    text = (tmp_path / DEFAULT_OUT / PAGE).read_text()
    (link,) = set(re.findall(r"\]\((\S*plan_stream\.json)\)", text))
    assert (tmp_path / DEFAULT_OUT / link).resolve() == FOLDER / "plan_stream.json"


def test_recordings_alone_measure_nothing_and_write_only_where_asked(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(folder, None, run=never) == 0
    assert not (folder / PAGE).exists()
    assert "trtllm-gen" in capsys.readouterr().out
    file_of(folder, "plan_stream").write_text("{")
    assert show(folder, None, run=never) == 1


@pytest.mark.parametrize("wrong", ["--recorded nowhere", "--only 12345", "--out page.md"])
def test_a_wrong_command_line_is_refused(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"experiments changes {wrong}") == 2
    said = capsys.readouterr().err
    assert wrong.split()[1] in said
    assert "Traceback" not in said
    assert run(f"experiments changes --recorded {tmp_path}") == 125
    assert "none of the recordings" in capsys.readouterr().err


def test_a_commands_exit_status_is_handed_on() -> None:
    assert run_command([sys.executable, "-c", "raise SystemExit(5)"]) == 5


def test_a_file_that_git_does_not_know_is_of_the_day_on_which_it_was_written(folder: Path) -> None:
    noon = datetime(2031, 4, 5, 12, tzinfo=timezone.utc).timestamp()
    os.utime(file_of(folder, "plan_stream"), (noon, noon))
    days = {found.path.stem: day_of(found.path) for entry in read_entries(folder) for found in entry.files}
    assert days.pop("plan_stream") == "2031-04-05"
    assert "2031-04-05" not in days.values()
