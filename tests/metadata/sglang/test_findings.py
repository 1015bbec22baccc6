"""The page of findings about SGLang: its code runs as it stands, against SGLang's own wheel, and prints what the page says."""

import re
from pathlib import Path

import pytest

from tests.devices import IN_INTERPRETER

PAGE = Path(__file__).parents[3] / "results" / "sglang" / "findings.md"
BEFORE, *FINDINGS = re.split(r"^## (?=\d+\. )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)


def block(text: str, language: str) -> str:
    """Return a text's one block of a language."""
    (source,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(source)


@IN_INTERPRETER
@pytest.mark.parametrize("finding", FINDINGS, ids=lambda finding: finding.partition(".")[0])
def test_a_finding_prints_what_the_page_says(finding: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(block(BEFORE, "python") + block(finding, "python"), {})
    assert capsys.readouterr().out == block(finding, "text")


def test_the_table_has_every_finding() -> None:
    rows = re.findall(r"^\| \[(\d+)\]\(#([^)]+)\)", BEFORE, re.MULTILINE)
    titles = [finding.partition("\n")[0] for finding in FINDINGS]
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert rows == [(str(number), anchor) for number, anchor in enumerate(anchors, 1)]
