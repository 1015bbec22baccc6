"""Pages of findings in `results/`: a setup block, then one section per finding, whose code prints the text after it."""

import re
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results"


class FindingsPage:
    """A page of findings: `numbers` are its sections' numbers, in order."""

    def __init__(self, path: str) -> None:
        text = (RESULTS / path).read_text(encoding="utf-8")
        self._before, *self._sections = re.split(r"^## (?=\d+\. )", text, flags=re.MULTILINE)
        self.numbers = [section.partition(".")[0] for section in self._sections]

    def code(self, number: str) -> str:
        return _block(self._before, "python") + _block(self._section(number), "python")

    def printed(self, number: str) -> str:
        return _block(self._section(number), "text")

    def check_table(self) -> None:
        """Raise AssertionError unless the page's table links every section in order."""
        rows = re.findall(r"^\| \[(\d+)\]\(#([^)]+)\)", self._before, re.MULTILINE)
        titles = [section.partition("\n")[0] for section in self._sections]
        anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
        assert rows == [(str(number), anchor) for number, anchor in enumerate(anchors, 1)]

    def _section(self, number: str) -> str:
        return self._sections[self.numbers.index(number)]


def _block(text: str, language: str) -> str:
    (source,) = re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return str(source)
