"""`lab invariance`: what it prints and writes, its exit status, and the page that shows it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from lab.checks.properties.invariance import FACTORS
from tests.commands.command import run

PAGE = Path(__file__).parents[2] / "docs" / "invariance.md"
KERNEL = "tests.checks.dependent_kernels:by_batch_size"
NARROW = shlex.split(
    "--device cpu --functions decode --dtypes bf16/bf16 --no-nvfp4 --head-dims 64 --groups 2 --page-sizes 16,32 --q-lens 1,2 "
    "--long-requests 300 --large-batches 5 --no-sinks"
)
ON_THE_PAGE = [word.replace("bf16/bf16", "bf16/bf16,bf16/e4m3") for word in NARROW]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def lines_of(text: str) -> list[str]:
    """The lines that are not empty, without the lengths of requests, which are drawn."""
    return [re.sub(r"\d+, \d+ and \d+ (?=keys|rows)", "", line.rstrip()) for line in text.splitlines() if line.strip()]


def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    required = ["--require", "batch-size,repeated-runs", "--out", "invariance.json", "--markdown", "invariance.md"]
    assert run(["invariance", KERNEL, "--in-process", *required, *ON_THE_PAGE]) == 1
    said = capsys.readouterr().out.replace(KERNEL, "my/kernel.py")
    shown = lines_of(said)
    (block,) = re.findall(r"```text\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    assert shown == lines_of(block)
    assert max(map(len, shown[: shown.index(next(line for line in shown if "tactic" in line))])) <= 80
    written = (folder / "invariance.md").read_text()
    title, summary = written.split("\n\n")[:2]
    assert title == f"# {KERNEL} on cpu: what do output bits depend on?"
    assert summary.startswith("bits differ within the bound: batch-size; same bits: position,")
    assert "| decode | batch-size | 1 ulp 3 |" in written
    row = r"\| (decode batch-size, .* with request 0 alone) \| (reproduce with requests of .*invariance\.json#\d+) \|"
    assert set(re.search(row, written).groups()) <= {line.strip() for line in said.splitlines()}
    assert "| cuda-graph not tried: no GPU |  |" in written
    record = json.loads((folder / "invariance.json").read_text())
    assert record["exit_status"] == 1
    assert record["required"] == ["batch-size", "repeated-runs"]
    (number,) = set(re.findall(r"lab judge --case invariance.json#(\d+)", said))
    assert run(["judge", "--case", f"invariance.json#{number}", "--in-process"]) == 0
    assert "  other bits: request 0 alone, by up to 1 ulp" in capsys.readouterr().out


def test_the_page_has_each_factor_with_its_meaning() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [(factor.key, factor.doc) for factor in FACTORS]


def test_a_dependence_that_nobody_forbids_is_no_error(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    assert run(["invariance", KERNEL, "--factors", "batch-size,position", "--in-process", *NARROW]) == 0
    said = capsys.readouterr().out
    assert "1 ulp 3" in said
    assert "workspace" not in said
    (path,) = folder.glob("cache/lab/*invariance.json")
    assert f"lab judge --case {path}#" in said


def test_a_wrong_result_is_an_error_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = "tests.checks.dependent_kernels:wrong_in_large_batches"
    assert run(["invariance", wrong, "--factors", "batch-size", "--in-process", *NARROW]) == 1
    said = capsys.readouterr().out
    assert "wrong 3" in said
    assert "decode batch-size, wrong: the batch 2 times in one call: " in said


def test_the_labs_own_kernels_are_tried_if_none_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.checks import dependent_kernels

    monkeypatch.setattr("lab.kernels.default_implementation", lambda _: dependent_kernels.invariant_module)
    assert run(["invariance", "--factors", "position", *NARROW]) == 0
    assert capsys.readouterr().out.startswith("tests.checks.dependent_kernels:invariant on cpu")


def test_reasons_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    refusing = "tests.checks.dependent_kernels:of_three_requests"
    assert run(["invariance", refusing, "--factors", "batch-size,workspace", "--in-process", *NARROW]) == 0
    said = capsys.readouterr().out
    assert "batch-size unsupported: request 0 alone: three requests alone" in said
    assert "same bits: workspace; unsupported: batch-size" in said


def test_a_refused_argument_does_not_stand_for_a_factor_that_was_not_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel without sinks refuses a case of each factor, also of the factor that needs a GPU."""
    factors = ["--factors", "workspace,cuda-graph", "--in-process"]
    assert run(["invariance", "tests.checks.someone_elses", *factors, *NARROW, "--sinks"]) == 0
    said = capsys.readouterr().out
    assert "same bits: workspace; not tried: cuda-graph" in said
    assert "cuda-graph not tried: no GPU" in said
    assert "unsupported" not in said


def test_a_run_that_leaves_cases_out_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["invariance", KERNEL, "--most-seconds", "0", "--in-process", *NARROW]) == 125
    assert "left out" in capsys.readouterr().out
