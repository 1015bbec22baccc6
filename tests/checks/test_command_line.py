"""What reproduces a case in a shell, and pytest as a judge of any implementation."""

import shlex
import subprocess
import sys
from pathlib import Path

from lab.checks import Outcome
from tests.checks.test_report import CASE, verdict_of
from tests.timing.inner_pytest import inner_environment

ROOT = Path(__file__).parents[2]
WINDOW = "tests.checks.someone_elses_window"


def test_a_reproduction_is_legible() -> None:
    line = verdict_of(Outcome.WRONG).reproduce
    assert line.endswith(f"print(judge_case('somebody.kernel', 'K1', {CASE!r}, 'cpu'))\"")


def test_a_case_that_a_shell_would_misread_is_quoted() -> None:
    strange = verdict_of(Outcome.WRONG, implementation="a.b:$HOME")
    assert shlex.split(strange.reproduce)[-1].count("a.b:$HOME") == 1
    assert "'\"'\"'" in strange.reproduce


def test_pytest_judges_any_implementation_by_each_check() -> None:
    options = ["-k", "K1-", "-p", "no:cacheprovider", "--implementation", "tests.checks.someone_elses"]
    command = [sys.executable, "-m", "pytest", "-q", "tests/checks/test_implementation.py", *options]
    done = subprocess.run(
        [*command, "--implementation", WINDOW], capture_output=True, text=True, cwd=ROOT, env=inner_environment()
    )
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout
    assert f"[{WINDOW}-K1-oracle-decode]" in done.stdout
    assert "reproduce: " in done.stdout
