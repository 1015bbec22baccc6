"""Every block of every page is run, or checked as far as is honest without running it. `tests/docs/blocks.py` has the rules."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("sybil", reason="sybil finds the blocks of the pages: the extra dev brings it")

from tests.docs.blocks import evaluate_page, resolve
from tests.docs.commands import ROOT, PageError, check_command, importable

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "notebooks/README.md")),
    *sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
SHOWN_RUN = "results/nvidia-h200/timings.json"
# What the pages take for the reader's own.
READERS_FILES = {
    "my/kernel.py": "from tests.checks.someone_elses import *",
    "base/my/kernel.py": "from tests.checks.someone_elses import *",
    "my/__init__.py": "",
    "conversation_trace.jsonl": "",
}
READERS_RUNS = ("timings.json", "before.json", "after.json", "shard-1.json", "shard-2.json")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The checkout with the reader's files in it: a folder of links, so that what a block writes is not in the checkout.

    What a test imports from it is forgotten, and its entries of `sys.path` go: another test has a module `my.kernel` too.
    """
    for path in ROOT.iterdir():
        if not path.name.startswith("."):
            (tmp_path / path.name).symlink_to(path)
    for name, text in READERS_FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    run = json.loads((ROOT / SHOWN_RUN).read_text())
    run["benchmarks"] = run["benchmarks"][:2]
    for name in READERS_RUNS:
        (tmp_path / name).write_text(json.dumps(run))
    monkeypatch.chdir(tmp_path)
    with importable(tmp_path):
        yield tmp_path


@each_page
def test_every_block_is_run_or_checked(page: Path, folder: Path) -> None:
    for line in evaluate_page(page, folder):
        print(line)


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """Code within sentences, such as a command or the name of a module; a line's end within one is a ranges."""
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose(page))]


@each_page
def test_what_sentences_name_is_there(page: Path, folder: Path) -> None:
    wrong = []
    for span in spans(page):
        try:
            check_span(span, folder)
        except PageError as error:
            wrong.append(str(error))
    assert not wrong


def check_span(span: str, folder: Path) -> None:
    if "<" in span or "…" in span:
        return  # a form, not an instance
    if re.match(r"(python3? -m|lab|pytest|make|pip|pre-commit) \S", span):
        check_command(span, folder)
    elif re.fullmatch(r"lab(\.\w+)+", span):
        resolve(span)
    elif re.fullmatch(r"(lab|tests|results|notebooks|docs)/[\w./*-]+", span) and not list(ROOT.glob(span.rstrip("/"))):
        raise PageError(f"there is no {span}")


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    absent = [link for link in LINK.findall(prose(page)) if not (page.parent / link).exists()]
    assert not absent


CHECKED = "<!-- checked, not run: it takes long -->\n"


def checked(command: str) -> str:
    return f"{CHECKED}```sh\n{command}\n```\n"


@pytest.mark.parametrize(
    ("page", "says"),
    [
        (checked("lab judge my.kernel --levle full"), "--levle"),
        (checked("lab judge my.kernel --level fuller"), "'fuller' is not one of 'quick', 'smoke', 'full'"),
        (checked("lab juge my.kernel"), "No such command 'juge'"),
        (checked("lab judge my.kernal"), "my.kernal cannot be imported"),
        (checked("lab ab decode/llama-3.1-8b/64q1s4kk a b"), "64q1s4kk"),
        (checked("lab ab decode/llama-9/64q1s4k a b"), "llama-9"),
        (checked("lab compare befour.json after.json"), "there is no file befour.json"),
        (checked("python -m lab.absent"), "the checkout has no such program"),
        (checked("python tests/docs/blocks.py"), "parses no arguments"),
        (checked("python notebooks/execut.py"), "there is no file notebooks/execut.py"),
        (checked("pytest tests/benchmarks --lab-clok graph"), "--lab-clok"),
        (checked("pytest tests/benchmark --benchmark-only"), "tests/benchmark"),
        (checked("pytest tests/benchmarks --benchmark-only --lab-scenario decode/x/1q1s4k"), "decode/x"),
        (checked("make banch"), "banch"),
        (checked("make report RUN=timing.json"), "there is no file timing.json"),
        (checked("pip install '.[plot]'"), "no extra 'plot'"),
        (checked("pip install sybil"), "something else"),
        (checked("curl example.org"), "neither run nor checked"),
        (f"{CHECKED}```python\nfrom lab.checks import juge\n```\n", "there is no lab.checks.juge"),
        ("```sh\nls absent\n```\n", "exit status 2, not 0"),
        ("```sh\nlab --absent\nlab --version\n```\n", "exit status 2, not 0"),
        ("<!-- run, exits with 1 -->\n```sh\ntrue\n```\n", "exit status 0, not 1"),
        ("<!-- run with: absent -->\n```sh\ncat README.md  # all of it\n```\n", "absent"),
        ("<!-- checked, not run: -->\n```sh\nmake bench\n```\n", "neither how it is run nor why not"),
        ("<!-- slow -->\n```sh\nmake bench\n```\n", "neither how it is run nor why not"),
        ("```python\nassert 1 == 2\n```\n", "page.md:1"),
        ("```\nmake bench\n```\n", "neither run nor checked"),
        ("```console\nmake bench\n```\n", "neither run nor checked"),
        ("* a list\n\n  ```console\n  make bench\n  ```\n", "neither run nor checked"),
        ("```text\nmake bench\n```\n", "a block of output holds a command"),
    ],
)
def test_what_is_wrong_with_a_page_is_found(page: str, says: str, folder: Path) -> None:
    (folder / "page.md").write_text(page)
    with pytest.raises(PageError, match=re.escape(says)):
        evaluate_page(folder / "page.md", folder)


def test_a_block_that_is_not_run_says_why(folder: Path) -> None:
    (folder / "page.md").write_text(checked("make bench"))
    (said,) = evaluate_page(folder / "page.md", folder)
    assert said.startswith("page.md:2: ")
    assert "it takes long" in said


@pytest.mark.parametrize(
    ("span", "says"),
    [
        ("make banch", "banch"),
        ("lab.checks.juge", "lab.checks.juge"),
        ("lab/cheks/judge.py", "lab/cheks"),
        ("lab judge --levle", "--levle"),
    ],
)
def test_what_is_wrong_with_a_sentence_is_found(span: str, says: str, folder: Path) -> None:
    with pytest.raises(PageError, match=re.escape(says)):
        check_span(span, folder)
