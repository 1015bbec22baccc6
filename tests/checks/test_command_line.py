"""What reproduces a case in a shell, and pytest as a judge of any implementation."""

import shlex
from pathlib import Path

from lab.checks import Outcome
from lab.reports.judgement import reproduction
from tests.checks.test_report import CASE, verdict_of

ROOT = Path(__file__).parents[2]
WINDOW = "tests.checks.someone_elses_window"


def test_a_reproduction_is_legible() -> None:
    line = reproduction(verdict_of(Outcome.WRONG))
    assert line.endswith(f"print(judge_case('somebody.kernel', 'K1', {CASE!r}, 'cpu'))\"")


def test_a_case_that_a_shell_would_misread_is_quoted() -> None:
    strange = verdict_of(Outcome.WRONG, implementation="a.b:$HOME")
    assert shlex.split(reproduction(strange))[-1].count("a.b:$HOME") == 1
    assert "'\"'\"'" in reproduction(strange)
