"""Every argument that the lab refuses has a line in the page that says why."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

from lab.calls.allowed import REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "what_runs_where.md"


def test_every_refused_argument_is_in_the_page() -> None:
    _, _, section = PAGE.read_text().partition("## Arguments that are refused")
    spans = re.findall(r"`([a-z0-9_]+\*?)", section.partition("\n## ")[0])
    assert [name for name in REFUSED if not any(fnmatchcase(name, span) for span in spans)] == []
