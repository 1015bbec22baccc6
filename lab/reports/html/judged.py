"""Prepare recorded reports of the judge for the HTML page: its first sentences, its tables, and the findings that they cite."""

import functools
import math
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lab.checks.properties import checks_by_key
from lab.checks.run import verdicts
from lab.checks.run.verdicts import Outcome
from lab.reports.recorded import MODULE_PREFIX
from lab.reports.recorded_file import RecordedFile
from lab.reports.tables import ABSENT, Cell, Columns, Table, grouped, make_table, number, words
from lab.wording import counted, slug
from lab.workloads.interfaces import INTERFACES

RIGHT, KNOWN, DECLINED = Outcome.RIGHT.value, Outcome.KNOWN.value, Outcome.DECLINED.value
BROKEN = tuple(outcome.value for outcome in verdicts.BROKEN)
FAULTS = (*BROKEN, KNOWN)
# The order of outcomes in rows and in columns.
WORST_FIRST = (*FAULTS, DECLINED, RIGHT)
CHECKS = checks_by_key()
SHORT_NAMES = {each.value: each.name.lower() for each in INTERFACES}
# The keys of a diagnosis's smallest wrong case that the page shows, in this order.
SMALLEST_CASE_KEYS = ("result", "where", "expected", "got")
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Finding:
    """A section of a Markdown page about a known failure of a kernel. Reports of the judge cite it as "path#heading"."""

    path: str  #: path of the Markdown page, relative to the root of the repository
    heading: str  #: anchor of the section (`slug`), such as "2-fmha_v2-with-bf16-ignores-bmm2_scale"

    @property
    def target(self) -> str:
        return f"finding-{self.heading}"

    @property
    def label(self) -> str:
        number, _, _ = self.heading.partition("-")
        return number if number.isdigit() else self.heading

    @property
    def order(self) -> tuple[int, str]:
        return (int(self.label) if self.label.isdigit() else 0, self.heading)

    def html(self, folder: Path) -> str:
        """Return the section as HTML; "" if `folder` has no such page, or the page has no such section."""
        page = folder / Path(self.path).name
        text = page.read_text(encoding="utf-8") if page.is_file() else ""
        _, *sections = re.split(r"^## +", text, flags=re.MULTILINE)
        chosen = (each for each in sections if slug(each.partition("\n")[0]) == self.heading)
        return next((markdown_html(f"## {each}") for each in chosen), "")


def findings_in(citation: str) -> tuple[Finding, ...]:
    return tuple(Finding(*each.split("#", 1)) for each in citation.split("; ") if "#" in each)


def markdown_html(text: str) -> str:
    """Convert Markdown to HTML without comments and pictures. Links keep only their text, and raw HTML is shown as text."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    for rule in ("link_open", "link_close", "image"):
        markdown.add_render_rule(rule, lambda *_: "")
    tokens = markdown.parse(COMMENT.sub("", text))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1:]) + 2, 6)}"
    return str(markdown.renderer.render(tokens, markdown.options, {}))


@dataclass(frozen=True)
class CheckRow:
    run: "JudgedRun"
    key: str  #: the check's key
    function: str  #: short name, such as "decode"; the recorded name if the lab does not know the function
    outcome: str  #: the worst outcome
    check: Mapping[str, Any]  #: the check's row in the recorded report, with its numbers of outcomes and of results
    cases: Sequence[Mapping[str, Any]]  #: the check's recorded cases; () if the file has no cases

    @property
    def catches(self) -> str:
        return CHECKS[self.key].catches if self.key in CHECKS else ""

    @property
    def worst_right(self) -> float | None:
        """Return the largest ratio of error to bound among the right cases; None if no right case is recorded."""
        return _largest(case.get("worst_ratio", 0.0) for case in self.cases if case["outcome"] == RIGHT)

    @property
    def worst_case(self) -> Mapping[str, Any]:
        return max(self.cases, key=lambda case: float(case.get("worst_ratio", 0.0)))

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(dict.fromkeys(each for case in self.cases for each in findings_in(case.get("finding") or "")))


@dataclass(frozen=True)
class JudgedRun(RecordedFile):
    @property
    def implementation(self) -> str:
        return str(self.content["implementation"]).removeprefix(MODULE_PREFIX)

    def reproduction(self, case: Mapping[str, Any]) -> str:
        """Return the shell command that judges a case again, to run in the page's folder; "" if the case has no number."""
        suffix = self.path.name.removeprefix(Path(self.name).name)
        return f"lab judge --case {shlex.quote(self.name + suffix)}#{case['number']}" if "number" in case else ""

    @property
    def cases(self) -> Sequence[Mapping[str, Any]]:
        return self.content.get("cases") or ()

    @functools.cached_property
    def rows(self) -> list[CheckRow]:
        cases = grouped(((case["check"], case["interface"]), case) for case in self.cases)
        checks = [(check["check"], check["interface"], check) for check in self.content["checks"]]
        return [
            CheckRow(self, key, SHORT_NAMES.get(name, name), check["outcome"], check, cases.get((key, name), ()))
            for key, name, check in checks
        ]

    @functools.cached_property
    def counts(self) -> Counter[str]:
        return sum((Counter(row.check["counts"]) for row in self.rows), Counter())

    @property
    def verdict(self) -> str:
        """Return the worst outcome of all cases. With `--profile ENGINE`, return "right" if that engine's cases are right."""
        if self.content.get("profile") and self.content.get("is_right"):
            return RIGHT
        return next((outcome for outcome in (*FAULTS, RIGHT) if self.counts[outcome]), DECLINED)  # all declined

    @property
    def verdict_text(self) -> str:
        is_partial = self.verdict in (RIGHT, KNOWN) and self.content.get("is_right") is False
        return f"{self.verdict}, but not all judged" if is_partial else self.verdict

    @property
    def diagnosis(self) -> Mapping[str, Any]:
        return self.content.get("diagnosis") or {}

    @property
    def sentence(self) -> str:
        numbers = " and ".join(f"{outcome} in {self.counts[outcome]}" for outcome in BROKEN if self.counts[outcome])
        return str(self.diagnosis.get("sentence") or f"{numbers} of {self.counts.total():,} cases.".capitalize())

    @property
    def details(self) -> list[str]:
        return [*map(self._region_sentence, self.diagnosis.get("regions") or ())] or [
            f"{check_name(row.key)} of {row.function}: {row.outcome}. What the check catches: {row.catches}"
            for row in self.rows
            if row.outcome in BROKEN
        ]

    def _region_sentence(self, region: Mapping[str, Any]) -> str:
        names = ("wrong", "results", "right_outside", "outside")
        wrong, results, right_outside, outside = (region.get(name) or 0 for name in names)
        text, numbers = str(region.get("sentence") or region.get("rule") or "everywhere"), f"{wrong:,} of {results:,}"
        text += "" if f" in {numbers} result" in text else f": wrong in {numbers}"
        text += f", right in {right_outside:,} of {outside:,} other results" if outside else ""
        return f"{text}; {self.reproduction({'number': region['case']})}" if "case" in region else text

    @property
    def smallest_case(self) -> dict[str, str]:
        smallest = self.diagnosis.get("smallest") or {}
        number, facts = smallest.get("case"), {}
        found = next((case for case in self.cases if case.get("number") == number is not None), None)
        if found is not None:
            facts[f"smallest case, #{number}"] = str(found.get("case", ""))
            facts["reproduce with"] = self.reproduction(found)
        shown = {key: smallest[key] for key in SMALLEST_CASE_KEYS if smallest.get(key)}
        return facts | {
            key: " ".join(f"{float(each):.4g}" for each in value) if isinstance(value, list) else str(value)
            for key, value in shown.items()
        }


def check_name(key: str) -> str:
    return f"{key} {CHECKS[key].name}" if key in CHECKS else key


def judged_sentence(runs: Sequence[JudgedRun]) -> str:
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in Counter(run.verdict for run in runs).items())
    return f"{counted(len(runs), 'run')} of the judge: {numbers}." if runs else ""


def summary_table(runs: Sequence[JudgedRun]) -> Table:
    columns: Columns = {
        "run": lambda run: words(run.name),
        "implementation": lambda run: words(run.implementation),
        "verdict": lambda run: words(run.verdict_text, style=run.verdict),
        "largest error of a right case, % of bound": lambda run: _percent(
            _largest(row.worst_right for row in run.rows)
        ),
        "checks": lambda run: number(len({row.key for row in run.rows})),
        "cases": lambda run: number(run.counts.total()),
        "results": lambda run: number(sum(row.check["judged"] for row in run.rows)),
        **_outcome_columns(lambda run: run.counts),
        "not begun": lambda run: number(run.content.get("left_out")),
        "level": lambda run: words(run.content.get("level")),
        "profile": lambda run: words(run.content.get("profile")),
        "commit": lambda run: words(run.environment.get("commit")),
    }
    return make_table(columns, runs, name="judge-runs", caption="Runs of the judge")


def verdict_matrix(rows: Sequence[CheckRow]) -> Table:
    by_function = grouped(((row.run.name, row.function), row) for row in rows)
    met = {row.key for row in rows}
    columns: Columns = {
        "run": lambda item: words(item[0][0]),
        "function": lambda item: words(item[0][1]),
        **{key: partial(_matrix_cell, key) for key in (*CHECKS, *sorted(met - CHECKS.keys())) if key in met},
    }
    caption = "Verdicts by run, function and check; numbers: largest error of a right case, % of its bound"
    return make_table(columns, list(by_function.items()), name="verdict-matrix", caption=caption, say_once=())


def _matrix_cell(key: str, item: tuple[tuple[str, str], Sequence[CheckRow]]) -> Cell:
    row = next((row for row in item[1] if row.key == key), None)
    if row is None:
        return words(None)
    largest = "" if row.worst_right is None else f" {_percent(row.worst_right).text}"
    return words(f"{row.outcome}{largest}", style=row.outcome)


ROW_COLUMNS: Columns = {
    "run": lambda row: words(row.run.name),
    "implementation": lambda row: words(row.run.implementation),
    "check": lambda row: words(check_name(row.key)),
    "function": lambda row: words(row.function),
    "verdict": lambda row: words(row.outcome, style=row.outcome),
}


def verdict_table(rows: Sequence[CheckRow]) -> Table:
    columns: Columns = {
        **ROW_COLUMNS,
        "largest error of a right case, % of bound": lambda row: _percent(row.worst_right),
        "largest error with this verdict, % of bound": lambda row: _percent(row.check.get("worst_ratio")),
        "findings": lambda row: _links_to(row.findings),
        "cases": lambda row: number(sum(row.check["counts"].values())),
        "results": lambda row: number(row.check["judged"]),
        **_outcome_columns(lambda row: row.check["counts"]),
        "the check catches": lambda row: words(row.catches),
    }
    rows = sorted(rows, key=lambda row: WORST_FIRST.index(row.outcome))
    return make_table(columns, rows, name="verdicts", caption="Verdicts per implementation and check")


def fault_table(rows: Sequence[CheckRow]) -> Table:
    """Make a table of the cases that are wrong, failed or known failures. One row stands for all cases with the same run,
    check, function, verdict and findings, and shows the case with the largest error.
    """
    groups = []
    for row in rows:
        faults = (case for case in row.cases if case["outcome"] in FAULTS)
        alike = grouped(((case["outcome"], case.get("finding")), case) for case in faults)
        groups += [replace(row, outcome=outcome, cases=cases) for (outcome, _), cases in alike.items()]
    columns: Columns = {
        **{name: column for name, column in ROW_COLUMNS.items() if name != "implementation"},
        "cases": lambda row: number(len(row.cases)),
        "findings": lambda row: _links_to(row.findings),
        "wrong in the worst case": lambda row: words("; ".join(row.worst_case.get("wrongs", ())), style="long"),
        "reproduce with": lambda row: words(row.run.reproduction(row.worst_case), style="long code"),
    }
    groups.sort(key=lambda row: WORST_FIRST.index(row.outcome))
    return make_table(columns, groups, name="faults", caption="What was wrong, and the worst case of each")


def decline_table(runs: Sequence[JudgedRun]) -> Table:
    refused = [
        (run.name, count, reason, "the lab" if is_of_lab else "the kernel")
        for run in runs
        for (reason, is_of_lab), count in Counter(
            (each, case.get("by_lab", False))
            for case in run.cases
            if case["outcome"] == DECLINED
            for each in case.get("declines", ())
        ).most_common()
    ]
    columns: Columns = {
        "run": lambda item: words(item[0]),
        "cases": lambda item: number(item[1]),
        "by": lambda item: words(item[3]),
        "reason": lambda item: words(item[2], style="long"),
    }
    return make_table(columns, refused, name="declines", caption="What was not judged, and why")


def _outcome_columns(counts_of: Callable[[Any], Mapping[str, int]]) -> Columns:
    def count(outcome: str, record: Any) -> Cell:
        return number(counts_of(record).get(outcome, 0))

    return {outcome: partial(count, outcome) for outcome in WORST_FIRST}


def _links_to(findings: Sequence[Finding]) -> Cell:
    text = ", ".join(finding.label for finding in findings)
    return Cell(text or ABSENT, links=tuple((finding.label, finding.target) for finding in findings))


def _percent(ratio: float | str | None) -> Cell:
    if ratio is None:
        return Cell(ABSENT)
    value = 100 * float(ratio)  # reports have "inf", which JSON cannot express as a number
    return Cell(f"{value:,.0f}", value) if math.isfinite(value) else Cell("not finite", math.inf)


def _largest(ratios: Iterable[float | str | None]) -> float | None:
    return max((float(ratio) for ratio in ratios if ratio is not None), default=None)
