"""`lab judge`: exit status, what it prints and writes, and how the axes are narrowed."""

import io
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.calls.problem import AttentionCall
from lab.checks import Outcome, Ranges, judge
from lab.checks.run.judge_run import Progress
from lab.checks.run.verdicts import Judged
from lab.commands import judge as judge_module
from lab.commands import progress as progress_module
from lab.commands.judge import rounds
from lab.ranges import options_of
from lab.reports.judgement import notes
from tests.checks.hostile import LAST_WORD
from tests.checks.small import SMALL
from tests.checks.test_report import report_of, verdict_of
from tests.commands.command import run

ROOT = Path(__file__).parents[2]
NARROW = shlex.split(
    "--device cpu --in-process --drawn 0 --groups 2 --num-kv-heads 1 --head-dims 64 --page-sizes 16 --q-lens 1,2 "
    "--dtypes bf16/bf16 --no-sinks --no-nvfp4 --kv-layouts HND --longest 40"
)
WINDOW = "tests.checks.someone_elses_window"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the judge is asked, with nothing judged; its answer is one right case."""
    asked: dict[str, Any] = {}

    def judge(implementation: str, **how: Any) -> Any:
        asked.update(how, implementation=implementation)
        return report_of(verdict_of(Outcome.RIGHT))

    monkeypatch.setattr("lab.checks.run.judge.judge", judge)
    return asked


def test_what_is_right_ends_in_0(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages given back before windows, batches, replays; what it has no parameter for is declined."""
    assert run(["judge", "tests.checks.someone_elses", "--only", "K1,K4,K7,K9", *NARROW]) == 0
    said = capsys.readouterr().out
    assert "K1 oracle" in said
    assert "return_lse: it does not take these arguments" in said
    assert said.startswith("Right ")


def test_what_is_wrong_ends_in_1_and_is_written_and_judged_again_with_the_exit_status_of_a_bisection(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.json"
    assert run(["judge", WINDOW, "--only", "coded", *NARROW, "--out", str(out)]) == 1
    report = json.loads(out.read_text())
    assert (report["implementation"], report["level"], report["is_right"]) == (WINDOW, "smoke", False)
    said = capsys.readouterr().out
    assert said.startswith("Wrong in ")
    assert "The output is wrong wherever a request's number of keys is larger than window_left" in said
    answer, broken, reach, *_ = said.splitlines()
    assert report["diagnosis"]["sentence"] == f"{answer} {broken}"
    assert report["diagnosis"]["reach"] == reach.strip()
    (number,) = re.findall(rf"reproduce with: lab judge --case {re.escape(str(out))}#(\d+)", said)
    assert int(number) in [case["number"] for case in report["cases"] if case["outcome"] == "wrong"]
    assert run(["judge", "--case", f"{out}#{number}"]) == 1
    assert "K3 of trtllm_batch_decode_with_kv_cache is wrong" in capsys.readouterr().out
    assert run(["judge", "lab.references", "--case", f"{out}#{number}", "--in-process"]) == 0
    assert run(["judge", "tests.checks.nowhere", "--case", f"{out}#{number}", "--in-process"]) == 125
    assert "tests.checks.nowhere cannot be imported" in capsys.readouterr().err
    for mistake in (f"{out}#999", str(out), f"{tmp_path}/none.json#1"):
        assert run(["judge", "--case", mistake]) == 2
    assert "has no case 999: it has " in capsys.readouterr().err


def test_a_profile_judges_only_what_its_engine_sends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.json"
    assert run(["judge", WINDOW, "--only", "K13", *NARROW, "--profile", "sglang", "--out", str(out)]) == 1
    assert capsys.readouterr().out.startswith("Wrong in ")
    report = json.loads(out.read_text())
    assert {tuple(case.get("sent_by", ())) for case in report["cases"] if case["outcome"] != "declined"} <= {
        ("sglang",),
        ("sglang", "vllm"),
    }
    assert run(["judge", WINDOW, "--profile", "trt"]) == 2
    assert "no profile is called 'trt'" in capsys.readouterr().err


def test_a_case_has_a_number_without_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):  # nothing of the first report is taken up
        assert run(["judge", WINDOW, "--only", "coded", *NARROW]) == 1
        said = capsys.readouterr().out
        assert re.search(rf"reproduce with: lab judge --case {tmp_path}/lab/{WINDOW}-[0-9a-f]{{8}}\.json#", said)
        assert "verdicts are from" not in said


def test_a_cache_that_cannot_be_written_costs_the_numbers_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(["judge", WINDOW, "--only", "coded", *NARROW]) == 1
    assert "judge_case(" in capsys.readouterr().out


def test_what_declines_everything_was_not_judged() -> None:
    narrow = [word.replace("bf16/bf16", "bf16/e4m3") for word in NARROW]
    assert run(["judge", "tests.checks.someone_elses", "--only", "K1", *narrow]) == 125


def test_the_whole_command_runs_isolated_in_a_shell() -> None:
    narrow = shlex.split(shlex.join(NARROW).replace("--in-process", "").replace("--groups 2", "--groups 1,3"))
    command = [sys.executable, "-m", "lab", "judge", "tests.checks.hostile", "--only", "K12", *narrow]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert "it crashed its process (exit status 7)" in done.stdout
    assert LAST_WORD in done.stderr
    assert not [word for word in (LAST_WORD, "\x1b", "starting") if word in done.stdout]
    assert "FAILED" not in done.stderr


def interrupted(folder: Path, pattern: str, signals: tuple[signal.Signals, ...]) -> tuple[int, str, str]:
    """Send signals to a judge when a path in a folder matches a pattern. Return its status, stdout and stderr."""
    narrow = shlex.split(shlex.join(NARROW).replace("--in-process", ""))
    # nohup, or a shell that runs this suite in the background, lets each process ignore these signals. preexec_fn would
    # undo that too, but needs a fork of this process, which fails where the memory of a long run cannot be had twice.
    listening = ["env", "--default-signal=INT,HUP"]
    command = [*listening, sys.executable, "-m", "lab", "judge", "tests.checks.hostile:hangs", "--only", "K12", *narrow]
    settings: dict[str, Any] = {"cwd": ROOT, "env": {**os.environ, "TMPDIR": str(folder)}, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings) as judging:
        until = time.monotonic() + 120.0
        while not list(folder.glob(pattern)) and time.monotonic() < until:
            time.sleep(0.1)
        for number in signals:
            os.killpg(judging.pid, number)
            time.sleep(0.05)
        out, err = judging.communicate(timeout=60)
    assert "Traceback" not in err
    assert "KeyboardInterrupt" not in err
    assert not list(folder.glob("lab-judge-*"))
    return judging.returncode, out, err


@pytest.mark.parametrize("signals", [(signal.SIGHUP,), (signal.SIGINT,) * 3], ids=lambda all: all[0].name)
def test_an_interrupted_command_ends_quietly_and_removes_its_scratch_folder(
    signals: tuple[signal.Signals, ...], tmp_path: Path
) -> None:
    status, out, _ = interrupted(tmp_path, "lab-judge-*/*.stack", signals)
    assert status == 130
    assert out.startswith("Not judged: ")


def test_a_command_that_is_interrupted_while_its_workers_start_ends_quietly(tmp_path: Path) -> None:
    assert interrupted(tmp_path, "lab-judge-*", (signal.SIGTERM,))[0] == 130


def test_a_report_that_cannot_be_written_is_refused_before_a_case_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(pipe := tmp_path / "pipe.json")
    for out, sentence in ((pipe, "is a pipe"), (Path("/proc/none/report.json"), "cannot be written: ")):
        assert run(["judge", WINDOW, "--only", "coded", *NARROW, "--out", str(out)]) == 2
        assert f"lab: {out} {sentence}" in capsys.readouterr().err


def test_a_command_ends_quietly_without_an_output() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$0" -m lab --version >&-', sys.executable], stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("reader", "says"), [("| true", "0"), ("> /dev/full", "lab: standard output: No space left on device\n2")]
)
def test_an_output_that_nobody_reads_is_dropped_and_one_that_is_lost_is_an_error(reader: str, says: str) -> None:
    script = f'{{ sleep 0.1; "$0" -m lab --version; echo $? >&2; }} {reader}'
    done = subprocess.run(["sh", "-c", script, sys.executable], stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.stderr == f"{says}\n"


def shown_after_each(monkeypatch: pytest.MonkeyPatch, *steps: Progress, **console: Any) -> list[str]:
    """Return what stands on the screen after each step of a judge whose last verdict is its report."""
    screen, made, texts = io.StringIO(), judge_module.Console, list[str]()

    def judge(implementation: str, **how: Any) -> Any:
        for step in steps:
            how["progress"](step)
            texts.append(screen.getvalue())
        return report_of(steps[-1].verdict)

    monkeypatch.setattr("lab.checks.run.judge.judge", judge)
    monkeypatch.setattr(judge_module, "Console", lambda **_: made(file=screen, width=200, **console))
    assert run(["judge", "lab.references"]) == (steps[-1].verdict.outcome is Outcome.WRONG)
    return texts


def test_elsewhere_than_on_a_terminal_a_line_a_minute_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    minutes = itertools.count(step=40.0)
    monkeypatch.setattr(progress_module, "time", SimpleNamespace(monotonic=lambda: next(minutes)))
    steps = Progress(verdict_of(Outcome.WRONG), 1, 60, None), Progress(verdict_of(Outcome.RIGHT), 2, 60, 300.0)
    assert shown_after_each(monkeypatch, *steps) == [
        "",
        "2 of 60 cases judged, 1 wrong or failed, about 5 minutes left\n",
    ]


def test_a_wrong_case_is_told_on_a_terminal_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = (verdict_of(Outcome.RIGHT), verdict_of(Outcome.WRONG, drawn=True), verdict_of(Outcome.WRONG))
    steps = (Progress(verdict, number, 3, None) for number, verdict in enumerate(verdicts, start=1))
    texts = shown_after_each(monkeypatch, *steps, force_terminal=True, color_system=None)
    is_told = ["K1 of trtllm_batch_decode_with_kv_cache is wrong" in text for text in texts]
    assert is_told == [False, False, True]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"ranges": Ranges(), "isolated": True, "level": "smoke", "only": (), "for_seconds": 0}),
        (
            f"--in-process --drawn 0 {options_of(SMALL)} --e4m3-arithmetic",
            {"isolated": False, "drawn": 0, "ranges": replace(SMALL, e4m3_arithmetic=True)},
        ),
        (
            "--dtypes fp16/fp16,bf16/e4m3 --seed 7",
            {"ranges": Ranges(dtypes=((torch.float16, torch.float16), (torch.bfloat16, torch.float8_e4m3fn)), seed=7)},
        ),
        (
            "--level full --only K4,batch --time-limit-s 9 --workers 3 --most-seconds 60 --drawn 7",
            {
                "level": "full",
                "only": ["K4", "K7"],
                "time_limit_s": 9.0,
                "workers": 3,
                "most_seconds": 60.0,
                "drawn": 7,
            },
        ),
        (
            f"--functions decode,{AttentionCall.MLA_DECODE.value}",
            {"functions": ["decode", AttentionCall.MLA_DECODE.value]},
        ),
        *(
            (f"--for {text}", {"for_seconds": seconds})
            for text, seconds in {"90s": 90, "10m": 600, "1.5h": 5400}.items()
        ),
    ],
)
def test_options_reach_the_judge(asked: dict[str, Any], line: str, expected: dict[str, Any]) -> None:
    run(f"judge lab.references {line}")
    assert {name: asked[name] for name in expected} == expected


def test_what_fits_the_machine_is_judged_by_default(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from lab import references

    monkeypatch.setattr("lab.kernels.default_implementation", lambda device: references)
    run(["judge"])
    assert asked["implementation"] == "lab.references"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("README.md", "README.md cannot be imported: a file's name ends in .py, and a module's has dots"),
        ("report.json", "report.json names a report and no kernel: --coverage prints what"),
        ("report.json.gz#3", "report.json.gz names a report and no kernel: --coverage prints what"),
        (".", ". cannot be imported: a file's name ends in .py"),
        ("json", f"json has none of {AttentionCall.DECODE.value}, "),
        ("lab.references --head-dims 64,0", "0 is not a whole number of at least 2"),
        ("lab.references --head-dims 127", "an NVFP4 cache stores blocks of 16, which 127 has no whole number of"),
        ("lab.references --q-lens 1 4", "unexpected extra argument"),
        ("lab.references --level most", "'--level': 'most' is not one of 'quick', 'smoke', 'full'"),
        ("lab.references --workers 0", "'--workers': 0 must be greater than or equal to 1"),
        ("lab.references --workers two", "'--workers': two must be a valid integer"),
        (f"lab.references --for {'9' * 400}s", "is no time: a number and s, m or h"),
        *((f"lab.references --for={text}", "90s, 10m or 2h") for text in ("2", "h", "-1h", "'2 hours'", "1d")),
        ("lab.references --device gpu", "'gpu' is no device: cpu, cuda, or cuda:1 for the second GPU"),
        ("lab.references --device cuda:99", "there is no GPU 'cuda:99' here"),
        ("lab.references --refusals my.kernel.Nothing", "'my.kernel.Nothing' is no exception"),
        (
            "lab.references --out README.md",
            "README.md cannot be read: it is no JSON (Expecting value): line 1, column 1. Only a report of the judge",
        ),
        (
            "lab.references --out results/nvidia-h200/clocks.json",
            "clocks.json is no report of the judge. Only a report of the judge",
        ),
        ("lab.references --watch setup.cfg --in-process", "--watch"),
        ("lab.references --case report.json", "--case report.json names no case of a report"),
        ("lab.references --case report.json#1 --first-failure", "--case judges one case"),
        ("lab.references --case report.json#1 --only K3", "--case judges one case"),
        (
            "lab.references --case report.json#1 --level full --e4m3-arithmetic",
            "leave out --e4m3-arithmetic, --level",
        ),
    ],
)
def test_a_mistake_ends_in_2_with_a_sentence(line: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"judge {line}") == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_an_attribute_that_is_no_function_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kernel.py").write_text(f"{AttentionCall.DECODE.value} = 5\n")
    assert run(f"judge {tmp_path}/kernel.py --in-process") == 2
    assert f"its {AttentionCall.DECODE.value} is of type int, and no function" in capsys.readouterr().err


def test_known_findings_are_shown_and_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = verdict_of(Outcome.KNOWN, judged=Judged(Outcome.KNOWN, ("off by one",), judged=1), finding="page#heading")
    monkeypatch.setattr("lab.checks.run.judge.judge", lambda *_, **__: report_of(known))
    assert run(["judge", "lab.references"]) == 0
    assert "known: page#heading" in capsys.readouterr().out


def test_a_case_is_of_the_kernel_in_the_folder_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    commands = {}
    for folder, kernel in (("wrong", WINDOW), ("right", "tests.checks.someone_elses")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.py").write_text(f"from {kernel} import *\n")
        monkeypatch.chdir(tmp_path / folder)
        assert run(["judge", "kernel.py", "--only", "coded", *NARROW]) == (folder == "wrong")
        commands |= {folder: re.findall(r"reproduce with: lab (judge --case \S+)", capsys.readouterr().out)}
    again = commands["wrong"][0]
    assert run(again) == 1  # in the folder of the right kernel
    assert Path.cwd() == tmp_path / "wrong"
    assert "another kernel" not in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        judge_module, "rounds", lambda watched: range(1 if watched is None else 2 * watched.is_absolute())
    )
    report, _, number = again.split()[-1].rpartition("#")
    assert run(f"judge --case {os.path.relpath(report)}#{number} --watch right/kernel.py") == 1
    assert capsys.readouterr().out.count("K3 of trtllm_batch_decode_with_kv_cache is wrong") == 2
    monkeypatch.chdir(tmp_path / "right")
    assert run(f"{again} kernel.py --in-process") == 0
    assert f"is of another kernel: kernel.py in {tmp_path}/wrong" in capsys.readouterr().out


def test_another_run_that_writes_the_same_report_is_named(tmp_path: Path) -> None:
    found, out = [], tmp_path / "report.json"

    def others(progress: Progress) -> None:
        if not found:
            out.write_text("{}")
        found.append(progress)

    ranges = Ranges(longest=40, head_dims=(64,), page_sizes=(16,), groups=(2,), num_kv_heads=(1,), q_lens=(1,))
    for is_rival in (True, False):
        report = judge("tests.checks.someone_elses", only="K12", drawn=0, ranges=ranges, out=out, progress=others)
        assert any(line.startswith("another run wrote") for line in notes(report)) is is_rival


def test_a_case_that_is_right_by_itself_was_wrong_by_what_ran_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report of a kernel that keeps something from one call to the next; here the word is changed in the file."""
    out = tmp_path / "report.json"
    assert run(["judge", "tests.checks.someone_elses", "--only", "coded", *NARROW, "--out", str(out)]) == 0
    capsys.readouterr()
    number = next(case["number"] for case in json.loads(out.read_text())["cases"] if case["outcome"] == "right")
    assert run(["judge", "--case", f"{out}#{number}", "--in-process"]) == 0
    assert "If the kernel has not changed" not in capsys.readouterr().out
    out.write_text(out.read_text().replace('"outcome": "right"', '"outcome": "wrong"'))
    assert run(["judge", "--case", f"{out}#{number}", "--in-process"]) == 0
    assert f"In {out} the case is wrong. If the kernel has not changed since" in capsys.readouterr().out


def test_a_narrow_kernel_is_right_and_what_it_takes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("judge tests.checks.narrow --only K5 --drawn 0 --device cpu --in-process") == 0
    said = capsys.readouterr().out
    assert "lab judge tests.checks.narrow --dtypes bf16/bf16 --head-dims 128 --page-sizes 64" in said


def test_a_watched_file_brings_a_round_whenever_it_is_written(tmp_path: Path) -> None:
    kernel = tmp_path / "kernel.py"
    kernel.write_text("first")
    watched = rounds(kernel)
    assert next(watched) == 0
    kernel.write_text("second version")
    assert next(watched) == 1
    assert list(rounds(None)) == [0]


def test_the_coverage_of_a_run_is_printed_again_from_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "report.json")
    only = ["--only", "K18", "--functions", "draft_kv_indices"]  # of few cases
    assert run(["judge", "lab.references", *only, *NARROW, "--out", out, "--coverage"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"K18 judged (\d+) of \1 values and [\d,]+ of [\d,]+ pairs of draft_kv_indices", said)
    table = said[said.index("K18's model of") :]
    assert run(["judge", out, "--coverage"]) == 0
    assert capsys.readouterr().out.endswith(table)
    record = json.loads(Path(out).read_text())["coverage"]["generate_draft_decode_kv_indices"]
    assert record["values"]["prefixes"] == {
        "judged": ["short", "some none", "all none", "equal", "at page edges", "4,100", "9,000", "70,000"]
    }
    assert run(["judge", str(tmp_path / "none.json"), "--coverage"]) == 2
