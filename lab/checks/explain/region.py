"""A region of wrong results: the rule that says where they are, what is wrong, and both as sentences."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from lab.checks.explain.failure_rules import Rule
from lab.checks.run.verdicts import CaseVerdict, CheckedResult
from lab.wording import counted

# What a result can be held for, causes first, and the beginning of a sentence of what is wrong then.
HELD = {
    "arguments": "The arguments are invalid",
    "return": "The call fails",
    "lists": "The lists are wrong",
    "metadata": "The metadata is wrong",
    "output": "The output is wrong",
    "invariants": "An invariant of the metadata is broken",
    "LSE": "The LSE is wrong",
    "merged": "Outputs that are merged by their LSE are wrong",
    "bits": "An equal call returns different bits",
    "memory": "Memory that must not change is written",
    "other": "The returned value is wrong",
}
NAN_READ = "NaN in memory that no row may read reaches the result, as 0 times NaN is NaN,"
NEARLY = 0.9  # of the results: where as many are wrong, it is nearly everywhere


class CaseResult(NamedTuple):
    """One compared result, such as a call's output, and the verdict on its case."""

    verdict: CaseVerdict
    result: CheckedResult


@dataclass(frozen=True)
class Region:
    """A rule that says where results are wrong, and the numbers of results inside and outside of it."""

    literals: Rule  # which must all hold; empty if results are wrong everywhere
    held: str  # the kind of results, such as "output" or "LSE", a key of `HELD`
    wrong: int  # of the results inside the region
    results: int  # inside the region
    right_outside: int
    outside: int
    smallest: CaseResult  # the wrong result in the region with the smallest case
    is_nan: bool = False  # each wrong result in the region is of a call with NaN in memory that no row may read
    is_corner: bool = (
        False  # no engine sends a case of a wrong result in the region, though one sends other cases of the run
    )

    @property
    def what(self) -> str:
        return NAN_READ if self.is_nan else HELD[self.held]

    @property
    def rule(self) -> str:
        """Return the rule as an expression, such as "has_window and q_len >= 2"; "" if results are wrong everywhere."""
        return " and ".join(map(str, self.literals))

    @property
    def words(self) -> str:
        """Return the rule as words that can follow "wherever"."""
        return " and ".join(literal.phrase for literal in self.literals)

    @property
    def where(self) -> str:
        """Return where results are wrong: "wherever ..." if each result in the region is, else "in some cases where ..."."""
        share = self.wrong / self.results
        if self.held == "arguments":  # which are not known
            return f"in {counted(self.wrong, 'case')}"
        if not self.literals:
            part = "in most cases" if share > 0.5 else "in some cases"
            return "everywhere" if share == 1 else "nearly everywhere" if share >= NEARLY else part
        extent = "wherever" if share == 1 else "in most cases where" if share > 0.5 else "in some cases where"
        return f"{extent} {self.words}{', which no engine sends' if self.is_corner else ''}"

    @property
    def sentence(self) -> str:
        return f"{self.what} {self.where}"

    @property
    def counts(self) -> str:
        """Return words that count the wrong results inside the region and the right results outside."""
        where = f" with {self.rule}" if self.literals else ""
        inside = f"{within(self.what)} in {self.wrong:,} of {self.results:,} results{where}"
        outside = f", right in {self.right_outside:,} of {self.outside:,} other results"
        return inside + (outside if self.outside else "")

    def as_record(self) -> dict[str, Any]:
        """Return the region as JSON data: the rule, its words and features, `held`, and the four numbers of results."""
        features = [literal.feature for literal in self.literals]
        record = {"rule": self.rule, "words": self.words, "held": self.held, "features": features}
        record |= {name: getattr(self, name) for name in ("wrong", "results", "right_outside", "outside")}
        return record | {"sentence": self.sentence, "case": self.smallest.verdict.number}


def within(sentence: str) -> str:
    """Return the beginning of a sentence with its first word in lower case, to continue another sentence; NaN stays NaN."""
    return sentence if sentence.startswith("NaN") else sentence[0].lower() + sentence[1:]
