"""Findings that the judge cites: a page, and the heading of a section in it."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A finding, cited as "path#heading" by `lab.checks.run.known_failures`.

    Attributes:
        path: of the page, from the root of the repository.
        heading: the anchor of the section (`slug`), such as "2-fmha_v2-with-bf16-ignores-bmm2_scale".
    """

    path: str
    heading: str

    @property
    def target(self) -> str:
        """Return the id of the finding's element in the HTML page."""
        return f"finding-{self.heading}"

    @property
    def label(self) -> str:
        """Return the number that the heading begins with; without one, the whole heading."""
        return (re.match(r"\d+", self.heading) or re.match(".*", self.heading))[0]  # type: ignore[index]

    @property
    def order(self) -> tuple[int, str]:
        """Return a key to sort by: the number, 0 without one, then the heading."""
        return (int(self.label) if self.label.isdigit() else 0, self.heading)


def slug(heading: str) -> str:
    """Return the anchor that GitHub gives a heading: lower case, words joined by hyphens, other characters dropped."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def findings_in(citation: str) -> tuple[Finding, ...]:
    """Return the findings of a recorded citation, "path#heading; path#heading"; text without a "#" names none."""
    return tuple(Finding(*each.split("#", 1)) for each in citation.split("; ") if "#" in each)
