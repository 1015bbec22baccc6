"""A command that a page shows, checked without being run: that it names what is there, and is parsed by the program itself."""

import argparse
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tomllib
import typer
from typer.core import TyperCommand

from lab.commands.app import app
from lab.loading import LoadError, load
from lab.workloads.scenarios import timed_scenario
from studies.draft_scenarios import draft_scenario, is_draft_scenario
from tests.commands.command import made_once

ROOT = Path(__file__).parents[2]
ASSIGNMENT = re.compile(r"[A-Z_]+=")
FILE = re.compile(r".*\.(json|jsonl|csv|md|py|txt)$")
# What follows is written by the command.
OUTPUTS = ("--out", "--json", "--markdown", "--benchmark-json")
# What a command line calls its scenarios and the modules that it loads.
SCENARIOS = ("scenario", "against", "lab_scenario")
MODULES = ("implementation", "first", "second", "lab_implementation", "lab_judge")


class PageError(AssertionError):
    """What a page shows is not so."""


def check_command(command: str, folder: Path) -> None:
    """Check one line of a shell.

    Args:
        command: such as "lab judge my.kernel  # a comment", or several joined by "&&".
        folder: what stands for the reader's: the files that a command names are looked for there.

    Raises:
        PageError: it would not be taken as it stands, or no rule here knows the program.
    """
    words = shlex.split(command, comments=True)
    for part in _parts(words):
        _refuse_absent_files(part, folder)
        program, *arguments = [word for place, word in enumerate(part) if place or not ASSIGNMENT.match(word)] or [""]
        while ASSIGNMENT.match(program) and arguments:
            program, *arguments = arguments
        if program not in PROGRAMS:
            raise PageError(f"{command!r} is neither run nor checked: no rule for {program!r}")
        try:
            PROGRAMS[program](arguments)
        except PageError as error:
            raise PageError(f"{command!r}: {error}") from error


def _parts(words: Sequence[str]) -> Iterator[list[str]]:
    return (list(part) for is_end, part in groupby(words, "&&".__eq__) if not is_end)


def _refuse_absent_files(words: Sequence[str], folder: Path) -> None:
    for before, word in zip(["", *words], words, strict=False):
        name = word.split("=", 1)[1] if word.startswith("RUN=") else word
        written = before in OUTPUTS or word.startswith(("OUT=", *(f"{option}=" for option in OUTPUTS)))
        if FILE.match(name) and " " not in name and not written and not (folder / name).exists():
            raise PageError(f"there is no file {name}")


def _check_python(arguments: Sequence[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        compile(rest[0], "<page>", "exec")
    elif first != "-m":
        _check_script(first, rest)
    elif rest[0] in ("pytest", "lab"):
        PROGRAMS[rest[0]](rest[1:])
    else:
        _check_script(_script_of(rest[0]), rest[1:])


def _check_lab(arguments: Sequence[str]) -> None:
    """Parse the arguments as the command does, and run nothing."""
    parsed: list[Mapping[str, Any]] = []

    def stop(command: TyperCommand, context: typer.Context) -> None:
        parsed.append(context.params)
        if context.args:  # which `lab bench` hands to pytest
            _check_pytest(["tests/benchmarks", *context.args])

    said = io.StringIO()
    wide = mock.patch.dict(os.environ, COLUMNS="1000")
    with (
        wide,
        made_once(),
        mock.patch.object(TyperCommand, "invoke", stop),
        redirect_stderr(said),
        redirect_stdout(said),
    ):
        try:
            app(args=[*arguments, *(["--help"] if len(arguments) < 2 else [])], prog_name="lab")  # its name alone
        except SystemExit as ended:
            if ended.code:
                raise PageError(said.getvalue()) from ended
    for given in parsed:
        _check_namespace(given)


def _script_of(module: str) -> str:
    """Return the file of the checkout that `python -m` runs, relative to `ROOT`."""
    path = module.replace(".", "/")
    for script in (f"{path}/__main__.py", f"{path}.py"):
        if (ROOT / script).is_file():
            return script
    raise PageError(f"python -m {module}: the checkout has no such program")


def _check_script(script: str, arguments: Sequence[str]) -> None:
    if "ArgumentParser(" not in (ROOT / script).read_text(encoding="utf-8"):  # it would run to its end here
        raise PageError(f"{script} parses no arguments: run it, or do not show it")
    run = partial(runpy.run_path, str(ROOT / script), run_name="__main__")
    _check_namespace(vars(_parsed(run, script, arguments)))


class _Parsed(BaseException):
    """Ends a program as soon as its arguments are parsed. No `Exception`: the program must not catch it."""


def _parsed(program: Callable[[], Any], name: str, arguments: Sequence[str]) -> argparse.Namespace:
    """What the program's own parser makes of the arguments; the program goes no further."""
    parse_args = argparse.ArgumentParser.parse_args
    parsed: list[argparse.Namespace] = []

    def stop(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> argparse.Namespace:
        parsed.append(parse_args(parser, args, namespace))
        raise _Parsed

    said = io.StringIO()
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", stop),
        mock.patch.object(sys, "argv", [name, *arguments]),
        warnings.catch_warnings(),  # the module may be imported already; it is run again, and only up to its parser
        redirect_stderr(said),
        redirect_stdout(said),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            program()
        except _Parsed:
            pass
        except SystemExit as ended:
            if ended.code:
                raise PageError(said.getvalue().strip().splitlines()[-1]) from ended
    return parsed[0] if parsed else argparse.Namespace()  # --help and --version end before


def _check_namespace(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        values = [each for each in (value if isinstance(value, list | tuple) else [value]) if each is not None]
        is_scenario = name in SCENARIOS and not given.get("calls")  # with --calls the first argument is a module
        if is_scenario:
            _refuse_unknown_scenarios(values)
        elif name in (*MODULES, *SCENARIOS):
            for module in values:
                if module.endswith(".json"):
                    continue  # a recorded report, whose coverage is printed
                try:
                    load(module)
                except LoadError as error:
                    raise PageError(str(error)) from error


def _refuse_unknown_scenarios(names: Iterable[str]) -> None:
    for name in names:
        try:
            (draft_scenario if is_draft_scenario(name) else timed_scenario)(name)
        except ValueError as error:
            raise PageError(str(error)) from error


def _check_pytest(arguments: Sequence[str]) -> None:
    """Collect, and run nothing. Without arguments it is the whole suite, which is what runs this."""
    if not arguments:
        return
    options, said = dict[str, Any](), io.StringIO()
    noted = SimpleNamespace(pytest_configure=lambda config: options.update(vars(config.option)))
    settings = ["--collect-only", "--quiet", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={ROOT}"]
    with redirect_stdout(said), redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        for variable in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID"):
            patch.delenv(variable, raising=False)
        status = pytest.main([*arguments, *settings], plugins=[noted])
    if status != pytest.ExitCode.OK:
        raise PageError(f"pytest collects nothing, {status!r}: {said.getvalue().strip()[-500:]}")
    _check_namespace(options)


def _check_make(arguments: Sequence[str]) -> None:
    ran = subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise PageError(ran.stderr.strip())


def _check_pip(arguments: Sequence[str]) -> None:
    """Extras of this package alone, and whatever options; nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = set(project["optional-dependencies"])
    wanted = {extra for word in arguments for extra in re.findall(r"^\.\[([\w,]+)\]$", word)}
    for extra in (each for group in wanted for each in group.split(",")):
        if extra not in declared:
            raise PageError(f"pyproject.toml has no extra {extra!r}, it has {', '.join(sorted(declared))}")
    if not wanted and "." not in arguments:
        raise PageError("it installs something else than this package")


def _only(*known: str) -> Callable[[Sequence[str]], None]:
    """A program of which these first arguments are known."""

    def check(arguments: Sequence[str]) -> None:
        if known and arguments[0] not in known:
            raise PageError(f"{arguments[0]!r} is none of {', '.join(known)}")

    return check


PROGRAMS: dict[str, Callable[[Sequence[str]], None]] = {
    "lab": _check_lab,
    "python": _check_python,
    "python3": _check_python,
    "pytest": _check_pytest,
    "make": _check_make,
    "pip": _check_pip,
    "git": _only("clone"),
    "cd": _only(),
    "source": _only(".venv/bin/activate"),
    "pre-commit": _only("install"),
}


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules in this folder can be imported, and are forgotten afterwards."""
    before = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "my":
            del sys.modules[name]
