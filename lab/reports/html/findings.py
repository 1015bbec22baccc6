"""Findings that the judge cites: pages, and sections of them."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A citation, "path#heading" as `lab.checks.ledger` writes it."""

    path: str
    heading: str

    @property
    def target(self) -> str:
        """Id of the finding in the page."""
        return f"finding-{self.heading}"

    @property
    def short(self) -> str:
        """Its number; its whole heading if it has none."""
        return (re.match(r"\d+", self.heading) or re.match(".*", self.heading))[0]  # type: ignore[index]

    @property
    def order(self) -> tuple[int, str]:
        """By number, then by heading."""
        return (int(self.short) if self.short.isdigit() else 0, self.heading)


def findings_in(citation: str) -> tuple[Finding, ...]:
    """Return the findings that a case cites: "path#heading; path#heading"."""
    return tuple(Finding(*each.split("#", 1)) for each in citation.split("; ") if "#" in each)
