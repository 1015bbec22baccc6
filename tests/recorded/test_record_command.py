"""`lab record` runs a server, and records the calls of its worker processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.recorded.case import recorded_cases
from tests.cases import DECODE
from tests.commands.command import run

ROOT = Path(__file__).parents[2]
# The server's module has FlashInfer's name for a function, and its worker imports it at the first request.
KERNELS = f"""
from lab import references

def {DECODE}(**arguments):
    return references.{DECODE}(**arguments)
"""
SERVER = """
import importlib.util, multiprocessing, os, sys

def work():
    from tests.recorded.record_calls import decode_arguments
    assert importlib.util.find_spec("server_kernels")
    from server_kernels import trtllm_batch_decode_with_kv_cache as decode
    for _ in range(3):
        decode(**decode_arguments())

if __name__ == "__main__":
    print("torch" in sys.modules, os.environ.get("OF_THE_SITE"), len(sys.argv))
    workers = [multiprocessing.get_context("spawn").Process(target=work) for _ in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    sys.exit(7)
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """The folder of a server, with a `sitecustomize` of its own."""
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "server_kernels.py").write_text(KERNELS)
    (folder / "serve.py").write_text(SERVER)
    (folder / "sitecustomize.py").write_text("import os\nos.environ['OF_THE_SITE'] = 'set'\n")
    return folder


def _record(server: Path, out: Path, *options: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab", "record", "--out", str(out), *options]
    command += ["--", python, str(server / "serve.py"), "--port", "30000"]
    path = os.pathsep.join((str(server), str(ROOT)))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}
    )


def test_calls_of_all_worker_processes_are_recorded(server: Path, tmp_path: Path) -> None:
    out = tmp_path / "calls"
    done = _record(server, out, "--functions", "server_kernels", "--every", "2", "--layers", "4,3", "--longest", "33")
    assert done.returncode == 7
    assert done.stdout.split() == ["False", "set", "3"]  # no torch before FlashInfer, and the site's own module
    assert f"recording into {out}; afterwards judge with lab judge --calls {out}" in done.stderr
    assert done.stderr.count(f"none of 3 calls recorded in {out}") == 2
    assert list(out.iterdir()) == []  # of these layers there are none
    done = _record(server, out, "--functions", "server_kernels", "--every", "3", "--longest", "33")
    assert done.stderr.count(f": 1 of 3 calls recorded in {out}") == 2
    assert len({Path(case.path).name.split("_")[3] for case in recorded_cases(out)}) == 2, done.stderr
    assert len({Path(case.path).stem.rpartition("call")[2] for case in recorded_cases(out)}) == 1  # of both ranks
    assert run(["judge", "--calls", str(out), "--device", "cpu", "--in-process"]) == 0


def test_functions_of_the_lab_itself_are_recorded(server: Path, tmp_path: Path) -> None:
    done = _record(server, tmp_path / "calls", "--functions", "lab.references", "--most-calls", "1", "--shadow", "1")
    assert done.returncode == 7
    assert list((tmp_path / "calls").iterdir()) == []  # all are right
    _record(server, tmp_path / "calls", "--functions", "lab.references", "--most-calls", "1", "--before")
    assert len(recorded_cases(tmp_path / "calls")) == 2


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--functions", "never_imported"), "never imported never_imported"),
        (("--functions", "server_kernels", "--from-s", "1000"), "none of 3 calls recorded in "),
        (("--functions", "lab.references", "--shadow", "3"), "/calls; 1 judged, 0 wrong"),
    ],
)
def test_the_end_says_why_no_call_is_recorded(server: Path, tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    done = _record(server, tmp_path / "calls", *options)
    assert done.stderr.count(why) == (1 if "never" in why else 2), done.stderr


CALL = f"""
from tests.recorded.record_calls import decode_arguments
kernels.{DECODE}(**decode_arguments())
"""


def test_a_package_that_cannot_be_imported_costs_only_its_own_functions(server: Path, tmp_path: Path) -> None:
    package = server / "engine"
    package.mkdir()
    (package / "__init__.py").write_text("from engine import kernels\nIS_READY = True\n")
    (package / "kernels.py").write_text(KERNELS)
    (package / "late.py").write_text(f"from engine import IS_READY\n{KERNELS}")
    (server / "broken.py").write_text("None.missing\n")
    (server / "serve.py").write_text(
        f"import engine\nfrom engine import kernels, late\n{CALL}{CALL.replace('kernels.', 'late.')}"
    )
    done = _record(server, tmp_path / "calls", "--functions", "engine.kernels,broken,engine.late")
    assert (done.returncode, done.stderr.count(": 2 of 2 calls recorded")) == (0, 1), done.stderr
    assert done.stderr.count("no call of broken is recorded: AttributeError: 'NoneType'") == 1


def test_a_package_without_a_file_is_recorded_when_its_import_succeeds_at_last(server: Path, tmp_path: Path) -> None:
    (server / "folder_alone").mkdir()
    (server / "folder_alone" / "kernels.py").write_text(f"import sys\nsys.of_test\n{KERNELS}")
    retry = "try:\n    import folder_alone.kernels\nexcept AttributeError:\n    sys.of_test = True\n"
    (server / "serve.py").write_text(f"import sys\n{retry}from folder_alone import kernels\n{CALL}")
    done = _record(server, tmp_path / "calls", "--functions", "folder_alone")
    assert (done.returncode, done.stderr.count(": 1 of 1 call recorded")) == (0, 1), done.stderr


@pytest.mark.parametrize("error", ["AttributeError", "OSError"])
def test_an_error_of_the_start_does_not_reach_the_server(server: Path, tmp_path: Path, error: str) -> None:
    (server / "serve.py").write_text(
        f"import lab.recorded.recorder as recorder\ndef fail(): raise {error}('no start')\n"
        "recorder.start_from_environment = fail\nimport server_kernels\n"
    )
    done = _record(server, tmp_path / "calls", "--functions", "server_kernels")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is recorded: no start") == 1


def test_the_server_does_not_start_where_nothing_can_be_recorded(server: Path, tmp_path: Path) -> None:
    (tmp_path / "calls").touch()
    done = _record(server, tmp_path / "calls" / "below_a_file", "--functions", "server_kernels")
    assert (done.returncode, done.stdout) == (2, "")
    assert "below_a_file: Not a directory" in done.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--out", "x", "--", "no-such-server"], "there is no command no-such-server"),
        (["--out", "x", "--every", "0", "--", "python"], "Invalid value for '--every'"),
        (["--out", "x"], "Missing argument"),
        (["--out", "x", "--shadow", "2", "--every", "3", "--", "python"], "shadow=2 takes the place of every=3"),
        (["--out", "x", "--from-s", "60", "--until-s", "6", "--", "python"], "until_s=6 must be after from_s=60"),
    ],
)
def test_a_wrong_command_line_is_refused(options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["record", *options]) == 2
    assert sentence in capsys.readouterr().err
