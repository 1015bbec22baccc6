"""The command as a whole: its list, its version, what it imports, and mistakes that end in a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lab
from tests.commands.command import run
from tests.recorded.record_calls import decode_arguments
from tests.recorded.write_calls import write_call

ROOT = Path(__file__).parents[2]
COMMANDS = "invariance judge checks mutants bench ab dry-run experiments compare releases recorded report html"
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
# In a process of its own: prints after each line which of these modules are imported, and the environment's switch.
IMPORTED = """
import os, shlex, sys
from lab.__main__ import main
for line in sys.argv[1:] or [""]:
    try:
        main(shlex.split(line))
    except SystemExit as ended:
        print(ended.code)
    heavy = [name for name in ("torch", "numpy", "triton", "pytest") if name in sys.modules]
    print(heavy, os.environ.get("TRITON_INTERPRET"))
"""


def in_a_process(*lines: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    mine = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    mine |= {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | environment
    command = [sys.executable, "-c", IMPORTED, *lines]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=mine, cwd=cwd)


def test_every_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    said = capsys.readouterr().out
    assert all(f" {command} " in said for command in COMMANDS.split())
    assert "125 could not be judged" in said


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"lab {lab.__version__}\n"


def test_help_and_completion_are_quick() -> None:
    assert in_a_process("judge --help").stdout.endswith("0\n[] None\n")
    completed = in_a_process(_LAB_COMPLETE="complete_bash", COMP_WORDS="lab exp", COMP_CWORD="1").stdout
    assert completed.startswith("experiments\n")
    assert completed.endswith("[] None\n")


WITHOUT_TORCH = {
    "judge lab.references --only K99": "there is no check 'K99'; there are K1 or oracle, K2 or finite, ",
    "judge lab.references --functions decoding": "there is no function 'decoding'; there are decode or trtllm_batch_decode",
    "judge lab.references --profile trt": "no profile is called 'trt'",
    "judge broken.py": "broken.py cannot be imported: SyntaxError: invalid syntax (broken.py, line 1)",
    "judge broken:kernel": "broken:kernel cannot be imported: SyntaxError: ",
    "judge absent.py": "absent.py cannot be imported: there is no such file",
    "invariance broken.py": "broken.py cannot be imported: SyntaxError: ",
    "compare empty.json cut.json": "not compared: empty.json cannot be read: the file is empty",
    "releases cut.json cut.json": "not compared: cut.json cannot be read: its end is missing: line 2, column ",
    "judge --case cut.json#1": "not judged: cut.json cannot be read: its end is missing",
    "judge broken.json --coverage": "no coverage: broken.json cannot be read: it is no JSON (Expecting property",
    "merge absent.json --out all.json": "not merged: absent.json cannot be read: No such file",
    "report empty.json": "no report: empty.json cannot be read: the file is empty",
    "html broken.json": "no report: broken.json is no folder",
}


def test_what_needs_no_torch_is_refused_before_its_import(tmp_path: Path) -> None:
    texts = {"broken.py": "def f(:\n", "broken.json": "{]", "empty.json": "", "cut.json": '{"a":\n  [1, '}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    done = in_a_process(*WITHOUT_TORCH, cwd=tmp_path)
    assert done.stdout == "2\n[] None\n" * len(WITHOUT_TORCH)
    said = done.stderr
    for sentence in WITHOUT_TORCH.values():  # in the order of the lines
        assert sentence in said
        said = said.partition(sentence)[2]


@no_gpu
def test_the_interpreter_is_switched_on_where_there_is_no_gpu_and_a_module_of_the_folder_is_found(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine.py").write_text(
        "import os, pathlib, triton\npathlib.Path('seen').write_text(os.environ['TRITON_INTERPRET'])\n"
    )
    done = in_a_process("judge mine --in-process", cwd=tmp_path)
    assert "mine has none of trtllm_batch_decode_with_kv_cache" in done.stderr
    assert done.stdout.startswith("2\n")
    assert (tmp_path / "seen").read_text() == "1"


SCENARIO = "decode/llama-3.1-8b/1q1s16"


@pytest.mark.parametrize(
    ("line", "status", "sentence"),
    [
        ("juge", 2, "No such command 'juge'"),
        ("ab decode/nosuch/1q1s16 lab.references lab.kernels.portable", 2, "nosuch"),
        (f"ab {SCENARIO} lab.references nowhere", 2, "nowhere cannot be imported: No module named 'nowhere'"),
        (f"ab {SCENARIO} lab.references", 2, "the two sides are the same"),
        (f"ab {SCENARIO} lab.references a --clock wall", 2, "'wall' is not one of 'graph', 'cupti', 'events'"),
        pytest.param(
            f"ab {SCENARIO} lab.references lab.kernels.portable", 125, "there is no CUDA GPU here", marks=no_gpu
        ),
        pytest.param("experiments clocks", 125, "there is no CUDA GPU here", marks=no_gpu),
        ("experiments clocks --scenario decode/nosuch/1q1s16", 2, "nosuch"),
        ("experiments clocks nowhere", 2 if torch.cuda.is_available() else 125, "no"),
        ("dry-run", 2, "Missing option '--gpu'"),
        ("dry-run --gpu b100", 2, "'b100' is not one of 'b200'"),
        ("dry-run --gpu b200 --scenario decode/nosuch/1q1s16", 2, "nosuch"),
        ("dry-run --gpu b200 --only nowhere,never", 2, "no pass has nowhere or never in its name; there are decode/"),
        ("experiments nothing", 2, "No such command 'nothing'"),
        ("ab lab.references", 2, "name a module to time"),
        ("ab --calls absent lab.references lab.kernels.portable", 2, "absent is no folder of recorded calls"),
        ("ab --calls absent a b --against c --trace t.csv", 2, "no scenario: leave out --against, --trace"),
        ("bench --calls absent", 2, "absent is no folder of recorded calls"),
        ("compare", 2, "Missing argument"),
        ("compare a.json", 2, "compare BEFORE with AFTER"),
        ("compare a.json b.json", 2, "not compared: "),
        ("compare a.json b.json --by k 1 2", 2, "compare BEFORE with AFTER"),
        ("report nowhere.json", 2, "no report: "),
        ("html nowhere", 2, "no report: "),
        ("mutants", 2, "Missing option '--out'"),
        ("record --out x -- no-such-server", 2, "there is no command no-such-server"),
        ("record --out x --every 0 -- python", 2, "Invalid value for '--every'"),
        ("record --out x", 2, "Missing argument"),
        ("record --out x --shadow 2 --every 3 -- python", 2, "shadow=2 takes the place of every=3"),
        ("record --out x --from-s 60 --until-s 6 -- python", 2, "until_s=6 must be after from_s=60"),
        ("judge --calls absent", 2, "absent is no folder of recorded calls"),
        ("judge --calls . --only K1", 2, "no other case: leave out --only"),
        ("invariance lab.references --require batch", 2, "no factor 'batch'; there are batch-size, position"),
        ("invariance lab.references --factors K7", 2, "there is no factor 'K7'"),
        ("invariance lab.references --functions encode", 2, "there is no function 'encode'"),
        ("invariance lab.references --head-dims 0", 2, "is not a whole number"),
        ("invariance lab.references --level quick", 2, "'quick' is not one of"),
    ],
)
def test_a_mistake_is_a_sentence_and_an_exit_status(
    line: str,
    status: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(line) == status
    said = capsys.readouterr().err
    assert sentence in said
    assert "Traceback" not in said


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "typer" or name.startswith("lab.commands")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "typer", None)
    assert run("--help") == 2
    assert capsys.readouterr().err == (
        "lab: the command needs typer, which is not installed: pip install '.[judge]' in the lab's checkout\n"
    )


def test_what_the_encoding_does_not_have_is_printed_in_escapes() -> None:
    program = "import atexit; atexit.register(print, '\\udcff µ'); from lab.__main__ import main; main(['--version'])"
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.endswith(r"\udcff \xb5" + "\n")


def test_ctrl_c_has_a_status_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lab.checks.properties.checks", interrupted)
    assert run("checks") == 130


def test_a_definition_that_is_interrupted_leaves_the_exit_status(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "from contextlib import suppress\nfrom lab.__main__ import main\n"
        "try:\n    main(['--version'])\n"
        "finally:\n    with suppress(KeyboardInterrupt):\n        exec('raise KeyboardInterrupt')\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    assert subprocess.run([sys.executable, "-m", "interrupted"], env=environment).returncode == 130


@no_gpu
def test_a_study_that_runs_on_a_cpu_has_its_kernels_interpreted() -> None:
    said = in_a_process("experiments draft-visibility --steps 2 --prefix-len 3").stdout
    assert said.endswith("'triton'] 1\n")


def test_a_missing_folder_is_made_and_a_file_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"experiments draft-visibility --steps 2 --prefix-len 3 --out {tmp_path}/made/seen.json") == 0
    assert (tmp_path / "made" / "seen.json").exists()
    assert run(f"experiments draft-visibility --steps 2 --prefix-len 3 --out {tmp_path}/made/seen.json/no.json") == 2
    assert f"lab: {tmp_path}/made/seen.json: File exists\n" in capsys.readouterr().err


def test_benchmarks_belong_to_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "lab" / "__init__.py"))
    assert run("bench") == 2
    assert "the benchmarks are in the lab's checkout" in capsys.readouterr().err


@pytest.mark.parametrize(("ended", "status"), [(0, 0), (1, 1), (2, 130), (4, 2), (5, 2)])
def test_benchmarks_take_pytests_options_and_end_with_the_labs_status(
    ended: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytest, "main", lambda words: (asked.append(words), ended)[1])
    assert run(f"bench --lab-scenario {SCENARIO} -k portable") == status
    folder, *options = asked[0]
    assert Path(folder) == ROOT / "tests" / "benchmarks"
    assert "--benchmark-only" in options
    assert options[-4:] == ["--lab-scenario", SCENARIO, "-k", "portable"]


def test_benchmarks_of_recorded_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    recording = write_call(
        tmp_path / "calls", "trtllm_batch_decode_with_kv_cache", decode_arguments(), (torch.zeros(1),)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pytest, "main", lambda words: (asked.append(words), 0)[1])
    assert run(f"bench --calls {recording}#1 --implementations a,b") == 0
    assert asked[0][-3:] == [f"--lab-calls={recording}#1", "--lab-implementation=a", "--lab-implementation=b"]
