"""`lab record` runs a server, and records the calls of its worker processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from lab.recorded import Triggers, recorded_cases
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
    print("torch" in sys.modules, os.environ.get("OF_THE_SITE"), *sys.argv[1:])
    workers = [multiprocessing.get_context("spawn").Process(target=work) for _ in range(2)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    sys.exit(7)
"""
CALLS = f"""
from server_kernels import {DECODE} as decode
from tests.recorded.record_calls import decode_arguments
for _ in range(3):
    decode(**decode_arguments())
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "server_kernels.py").write_text(KERNELS)
    (folder / "serve.py").write_text(SERVER)
    (folder / "sitecustomize.py").write_text("import os\nos.environ['OF_THE_SITE'] = 'set'\n")
    return folder


class Started(NamedTuple):
    """What `lab record` has in place of itself: the server's command, and the server's environment."""

    command: list[str]
    environment: dict[str, str]


def _started(server: Path, out: Path, *options: str) -> Started:
    """Return what `lab record` starts for a server, without starting it."""
    started: list[Started] = []
    path = os.pathsep.join((str(server), str(ROOT)))
    line = ["record", "--out", str(out), *options, "--", sys.executable, str(server / "serve.py")]
    execve = mock.patch.object(os, "execve", lambda program, *process: started.append(Started(*process)))
    with execve, mock.patch.dict(os.environ, PYTHONPATH=path):
        assert run(line) == 0
    return started[0]


def _record(server: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command, environment = _started(server, out, *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)


def test_calls_of_all_worker_processes_are_recorded(server: Path, tmp_path: Path) -> None:
    out = tmp_path / "my calls"
    command = [sys.executable, "-m", "lab", "record", "--out", str(out), "--functions", "server_kernels"]
    command += ["--every", "3", "--longest", "33", "--", sys.executable, str(server / "serve.py"), "--port", "30000"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(server), str(ROOT)))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment)
    assert done.returncode == 7
    # No torch before FlashInfer, and the site's own module.
    assert done.stdout.split() == ["False", "set", "--port", "30000"]
    assert f"recording into {out}; afterwards judge with lab judge --calls '{out}'" in done.stderr
    assert done.stderr.count(f": 1 of 3 calls recorded in {out}") == 2
    names = [Path(case.path).stem for case in recorded_cases(out)]
    assert len({name.split("_")[3] for name in names}) == 2, done.stderr  # of both processes
    assert len({name.rpartition("call")[2] for name in names}) == 1  # the same call of each


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ("", {}),
        ("--every 2 --layers 4,3 --longest 33", {"triggers": Triggers(2, (4, 3), longest=33)}),
        ("--from-s 2 --until-s 1000 --non-finite", {"triggers": Triggers(1, (), 2, 1000, non_finite=True)}),
        ("--shadow 3 --e4m3-arithmetic", {"triggers": Triggers(shadow=3, e4m3_arithmetic=True)}),
        ("--most-calls 5 --most-gb 2 --before", {"most_calls": 5, "most_bytes": 2 * 10**9, "before": True}),
        ("--functions engine,other.kernels", {"functions": ["engine", "other.kernels"]}),
    ],
)
def test_each_option_reaches_the_server(server: Path, tmp_path: Path, options: str, changed: dict[str, Any]) -> None:
    settings = json.loads(_started(server, tmp_path, *options.split()).environment["LAB_RECORD"])
    usual = {"out": str(tmp_path), "triggers": Triggers(), "functions": ["flashinfer"], "before": False}
    usual |= {"most_calls": 1000, "most_bytes": 20 * 10**9}
    settings["triggers"] = Triggers(**settings["triggers"] | {"layers": tuple(settings["triggers"]["layers"])})
    assert settings == usual | changed


def test_functions_of_the_lab_itself_are_recorded(server: Path, tmp_path: Path) -> None:
    (server / "serve.py").write_text(CALLS)
    done = _record(server, tmp_path / "calls", "--functions", "lab.references", "--most-calls", "1", "--before")
    assert len(recorded_cases(tmp_path / "calls")) == 1, done.stderr


def test_the_end_says_in_the_first_process_that_no_function_was_imported(server: Path, tmp_path: Path) -> None:
    (server / "serve.py").write_text(SERVER.replace("def work():", "def work(): ...\ndef unused():"))
    done = _record(server, tmp_path / "calls", "--functions", "never_imported")
    assert (done.returncode, done.stderr.count("never imported never_imported")) == (7, 1), done.stderr


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
    (server / "server_kernels.py").write_text("")
    (server / "serve.py").write_text(
        "import sys, types\nfor name in ('lab', 'lab.recorded', 'lab.recorded.recorder'):\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        f"def fail(): raise {error}('no start')\n"
        "sys.modules[name].start_from_environment = fail\nimport server_kernels\n"
    )
    done = _record(server, tmp_path / "calls", "--functions", "server_kernels")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is recorded: no start") == 1


def test_the_server_does_not_start_where_nothing_can_be_recorded(
    server: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calls").touch()
    out = tmp_path / "calls" / "below_a_file"
    with mock.patch.object(os, "execve") as execve:
        assert run(["record", "--out", str(out), "--", sys.executable, str(server / "serve.py")]) == 2
    execve.assert_not_called()
    assert "below_a_file: Not a directory" in capsys.readouterr().err
