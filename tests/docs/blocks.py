"""The fenced blocks of a page, found and run by Sybil. Each is run, or checked and says why it is not run; else the page fails.

A comment directly before a block says what is not the rule, which is that a block is run as it stands:

    <!-- checked, not run: why -->       commands are parsed by the programs themselves, and what they name must be there
    <!-- run with: --only K1 -->         these words are put behind its last command, to make it small
    <!-- run with: ...; exits with 1 --> its exit status is not 0

Blocks of text are output, and may hold no command. Python that a page's blocks need and a reader does not is in Sybil's
`<!-- invisible-code-block: python ... -->`.
"""

import ast
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from sybil import Document, Example, Region, Sybil
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

from tests.commands.command import run
from tests.docs.commands import PROGRAMS, ROOT, PageError, check_command

TIME_LIMIT_S = 100
OF_THE_LAB = re.compile(r"lab [^|&;<>$`]*")  # without the shell's own signs
ANY_LANGUAGE = RawFencedCodeBlockLexer(re.compile(r"(?P<language>[^\n]*)$\n", re.MULTILINE))
INVISIBLE = DirectiveInHTMLCommentLexer("invisible-code-block", "python")
COMMENT_BEFORE = re.compile(r"<!-- ((?:(?!-->).)*) -->\n[ \t]*\Z", re.DOTALL)
NOT_RUN = re.compile(r"checked, not run: (?P<reason>\S.*)", re.DOTALL)
RUN = re.compile(r"run(?: with: (?P<more>[^;]+))?(?:[;,] exits with (?P<status>\d))?")
# Sphinx's own, and checked by it: the site is built with warnings as errors.
DIRECTIVES = ("{eval-rst}", "{toctree}")
OUTPUT = "text"


@dataclass(frozen=True)
class Note:
    """What the comment before a block says."""

    not_run_because: str = ""
    more_arguments: str = ""
    exit_status: int = 0


class Blocks:
    """A Sybil parser of every fenced block of a page, in any language or none.

    Attributes:
        said: of each block that was not run as it stands, where it is and why.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self._run_python = PythonEvaluator()

    def __call__(self, document: Document) -> Iterable[Region]:
        for region in INVISIBLE(document):
            yield Region(region.start, region.end, region.lexemes["source"], self._run_python)
        for region in ANY_LANGUAGE(document):
            note = read_note(document.text[: region.start])
            language = region.lexemes["language"].strip()
            yield Region(region.start, region.end, region.lexemes["source"], self._evaluator(language, note))

    def _evaluator(self, language: str, note: Note):
        def evaluate(example: Example) -> None:
            if note != Note():
                self.said.append(f"{Path(example.path).name}:{example.line}: {note}")
            if language == "sh" and note.not_run_because:
                for command in commands(example.parsed):
                    check_command(command, self.folder)
            elif language == "sh":
                run_shell(example.parsed, self.folder, note)
            elif language == "python" and note.not_run_because:
                check_python(example.parsed)
            elif language == "python":
                self._run_python(example)
            elif language == "yaml" and note.not_run_because:
                for command in steps(example.parsed):
                    check_command(command, self.folder)
            elif language == OUTPUT:
                refuse_commands(example.parsed)
            elif language.split(" ")[0] not in DIRECTIVES:
                raise PageError(f"a block of {language or 'no language'} is neither run nor checked")

        return evaluate


def evaluate_page(page: Path, folder: Path) -> list[str]:
    """Run or check every block of a page, in order.

    Args:
        page: a Markdown file.
        folder: the reader's, in which blocks run.

    Returns:
        what was not run as it stands, and why.

    Raises:
        PageError: the page is not right; it names each block that is not, and why.
    """
    blocks, wrong = Blocks(folder), []
    for example in Sybil([blocks]).parse(page).examples():
        try:
            example.evaluate()
        except AssertionError as error:
            wrong.append(f"{page.name}:{example.line}: {error}")
    if wrong:
        raise PageError("\n".join(wrong))
    return blocks.said


def read_note(text_before: str) -> Note:
    """The comment at the end of what stands before a block.

    Raises:
        PageError: there is a comment that says nothing known.
    """
    found = COMMENT_BEFORE.search(text_before)
    if found is None or found[1].startswith("invisible-code-block"):
        return Note()
    not_run, run = NOT_RUN.fullmatch(found[1]), RUN.fullmatch(found[1])
    if not_run:
        return Note(not_run_because=" ".join(not_run["reason"].split()))
    if run:
        return Note(more_arguments=run["more"] or "", exit_status=int(run["status"] or 0))
    raise PageError(f"the comment before a block says neither how it is run nor why not: {found[1]!r}")


def commands(shell: str) -> Iterator[str]:
    """The commands of a block, a line that ends in a backslash joined with the next."""
    for line in shell.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def steps(workflow: str) -> list[str]:
    """The lab's commands in a workflow of GitHub Actions, each up to a pipe.

    Raises:
        PageError: the workflow runs no command of the lab.
    """
    ran = [step.get("run", "") for job in yaml.safe_load(workflow)["jobs"].values() for step in job["steps"]]
    found = [command.split(" | ")[0] for each in ran for command in commands(each) if command.startswith("lab ")]
    if not found:
        raise PageError("the workflow runs no command of the lab")
    return found


def run_shell(shell: str, folder: Path, note: Note) -> None:
    """Run a block as a reader would. Commands of the lab alone run in this process, which has imported what they need."""
    *before, last = (line.split("  #")[0] for line in commands(shell))
    lines = (*before, f"{last} {note.more_arguments}")
    if all(OF_THE_LAB.fullmatch(line) for line in lines):
        statuses = (run(shlex.split(line)[1:]) for line in lines)
        refuse_status(next(filter(None, statuses), 0), note, "what it printed is above")
        return
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=mine | interpreted | {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    refuse_status(ran.returncode, note, f"{ran.stdout[-500:]}{ran.stderr[-1500:]}")


def refuse_status(status: int, note: Note, printed: str) -> None:
    if status != note.exit_status:
        raise PageError(f"exit status {status}, not {note.exit_status}: {printed}")


def check_python(source: str) -> None:
    """It compiles, and everything that it imports is there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                resolve(f"{node.module}.{alias.name}")


def resolve(name: str) -> object:
    """What a dotted name stands for: a module, or what is in one.

    Raises:
        PageError: there is no such thing.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise PageError(f"there is no {name}") from error


def refuse_commands(text: str) -> None:
    """A command must not pass for output."""
    for line in text.splitlines():
        if line.split(" ")[0] in ("$", *PROGRAMS):
            raise PageError(f"a block of output holds a command: {line!r}")
