"""Show in a table which known failures of kernels (findings) each release of a package has.

    lab releases 0.6.12.json 0.6.18.json 0.7.2.json --findings results/nvidia-h200/findings.md

Each file is a report of the judge. The release is the version of the package in the report's environment. A release may have
several reports with different ranges of parameters. All releases must be judged with equal settings, such as level and seed
(`lab.reports.changed_verdicts.different_settings`).

A row of the table is a finding, or a region: a group of cases that are wrong in the same releases and have no finding. Findings
are assigned to cases by the current list of known failures (`lab.checks.run.known_failures`), not by the list at the time of
the report. The *affected cases* of a finding are those that are wrong by this finding in at least one release. The status of a
finding in a release is

    present         an affected case is wrong by this finding in this release
    absent          some affected cases are right in this release, and none is wrong by this finding
    not reachable   all affected cases were declined, were not judged, or are wrong for another reason
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lab.checks.explain.diagnosis import diagnose
from lab.checks.record import read_cases
from lab.checks.run.known_failures import KNOWN_FAILURES, known
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.exit_status import ExitStatus
from lab.reports.changed_verdicts import compare_verdicts, different_settings, read_report
from lab.reports.recorded_file import NotComparableError, RecordedFile
from lab.reports.tables import Cell, TableReport, grouped, make_table, words
from lab.wording import slug

CaseKey = tuple[str, ...]  # ranges of parameters, check, function and case
Verdicts = Mapping[CaseKey, CaseVerdict]
Files = Mapping[str, RecordedFile]  # the reports of a release by their ranges of parameters
NUMBERED = re.compile(r"^## (\d+\. .*)$", re.MULTILINE)
CITED = "; "  # separates the findings that a case cites
STYLES = {"present": "slower", "absent": "faster", "not reachable": "unsure"}


@dataclass(frozen=True)
class FindingRow:
    """A row of the table of releases: a finding (a known failure), or a region (a group of wrong cases without a finding)."""

    name: str
    cases: frozenset[CaseKey]  #: the affected cases
    cited: str = ""  #: "path#heading" of the finding; "" for a region, and if no verdict cites the finding

    def presence(self, release: Verdicts) -> dict[str, Any]:
        """Return how many of the row's cases are "wrong", "right" and "declined" in a release, and its "status": "present" if
        a case is wrong, else "absent" if a case is right, else "not reachable". A finding's case is wrong if its verdict
        cites the finding. A region's case is wrong if its outcome is in `BROKEN`.
        """
        there = [release[key] for key in self.cases if key in release]
        found = Counter(each.outcome for each in there)
        cited = sum(self.cited in each.finding.split(CITED) for each in there)
        wrong = cited if self.cited else sum(found[outcome] for outcome in BROKEN)
        right = found[Outcome.RIGHT]
        status = "present" if wrong else "absent" if right else "not reachable"
        return {"status": status, "wrong": wrong, "right": right, "declined": found[Outcome.DECLINED]}

    def cell(self, release: Verdicts) -> Cell:
        found = self.presence(release)
        cases = {"present": f", {found['wrong']} of {len(self.cases)}", "absent": f", {found['right']}"}
        return words(found["status"] + cases.get(found["status"], ""), STYLES[found["status"]])


def releases_report(
    paths: Sequence[Path], package: str = "flashinfer-python", findings: Path | None = None
) -> TableReport:
    """Return a table with one row per finding and one column per release, in the order of `paths`.

    Args:
        package: the package whose version, in a report's environment, is the release.
        findings: a Markdown page. Each of its headings like "## 1. ..." gets a row, even if no report cites it.

    Raises:
        RecordedFileError, ReportError, OSError: a file cannot be read, or is not a report of the judge.
        NotComparableError: a report lacks the package's version, there is only one release, or a release has two reports with
            the same ranges of parameters.
    """
    releases = _by_version([read_report(path) for path in paths], package)
    verdicts = {
        version: {key: each for axes, file in files.items() for key, each in _cases(axes, file)}
        for version, files in releases.items()
    }
    headings = [] if findings is None else NUMBERED.findall(findings.read_text(encoding="utf-8"))
    rows = [*_findings(verdicts, {slug(heading): heading for heading in headings}), *_regions(verdicts)]
    unlike = list(_unlike(releases))
    columns = {"finding": lambda row: words(row.name)} | {
        version: lambda row, of=of: row.cell(of) for version, of in verdicts.items()
    }
    changes = [line for before, after in pairwise(releases.items()) for line in _changes(before, after)]
    presences = [{version: row.presence(of) for version, of in verdicts.items()} for row in rows]
    present = [f"{sum(row[version]['status'] == 'present' for row in presences)} in {version}" for version in verdicts]
    return TableReport(
        above=(*(_environment(*each) for each in releases.items()), *unlike),
        table=make_table(columns, rows, caption=f"findings by release of {package}", say_once=()),
        below=(*changes, f"Findings and regions present, of {len(rows)}: {', '.join(present)}."),
        record={
            "package": package,
            "releases": [
                {"version": version, "files": [str(file.path) for file in files.values()]}
                for version, files in releases.items()
            ],
            "findings": [{"finding": row.name} | presence for row, presence in zip(rows, presences, strict=True)],
            "changes": changes,
        },
        exit_status=ExitStatus.NOT_JUDGED if unlike else ExitStatus.DONE,
    )


def _by_version(files: Iterable[RecordedFile], package: str) -> dict[str, Files]:
    by_version: dict[str, dict[str, RecordedFile]] = {}
    for file in files:
        if (version := file.fact("packages", package)) is None:
            raise NotComparableError(
                f"{file.path} has no version of the package {package}: name the package by --package"
            )
        other = by_version.setdefault(str(version), {}).setdefault(str(file.content.get("ranges")), file)
        if other is not file:
            raise NotComparableError(f"{other.path} and {file.path} are both of {package} {version}, on the same axes")
    if len(by_version) < 2:
        raise NotComparableError(
            f"all reports are of {package} {', '.join(by_version)}: there are no two releases to compare"
        )
    return {**by_version}


def _cases(axes: str, file: RecordedFile) -> Iterator[tuple[CaseKey, CaseVerdict]]:
    capability, packages = (file.environment.get(name) for name in ("capability", "packages"))
    for each in read_cases(file.content, file.path):
        verdict = known(each, KNOWN_FAILURES, tuple(capability) if capability else None, (packages or {}).get)
        yield (axes, each.check, each.interface.value, repr(each.case)), verdict


def _findings(verdicts: Mapping[str, Verdicts], headings: Mapping[str, str]) -> Iterator[FindingRow]:
    affected = grouped(
        (cited, key)
        for of in verdicts.values()
        for key, verdict in of.items()
        for cited in filter(None, verdict.finding.split(CITED))
    )
    by_anchor = {cited.partition("#")[2]: cited for cited in affected}
    for anchor, heading in headings.items():
        cited = by_anchor.get(anchor, "")
        yield FindingRow(heading, frozenset(affected.pop(cited, ())), cited)
    yield from (FindingRow(cited, frozenset(cases), cited) for cited, cases in affected.items())


def _regions(verdicts: Mapping[str, Verdicts]) -> Iterator[FindingRow]:
    """Yield a row for each group of cases that have no finding and are wrong in the same releases."""
    wrong_in = grouped(
        (key, version) for version, of in verdicts.items() for key, verdict in of.items() if verdict.outcome in BROKEN
    )
    alike = grouped((tuple(versions), key) for key, versions in wrong_in.items())
    for (first, *_), keys in alike.items():
        cases = frozenset(keys)
        chosen = [each for key, each in verdicts[first].items() if key in cases or each.outcome is Outcome.RIGHT]
        sentences = (each.sentence for each in diagnose(chosen).regions)
        yield FindingRow("; ".join(dict.fromkeys(sentences)), cases)


def _environment(version: str, files: Files) -> str:
    first = next(iter(files.values()))
    facts = {"on": ("gpu",), "torch": ("packages", "torch"), "commit": ("commit",)}
    described = [f"{name} {first.fact(*keys)}" for name, keys in facts.items() if first.fact(*keys)]
    return f"{version}: {', '.join((first.content['implementation'], *described))}"


def _pairs(before: Files, after: Files) -> list[tuple[RecordedFile, RecordedFile]]:
    return [(file, after[axes]) for axes, file in before.items() if axes in after]


def _unlike(releases: Mapping[str, Files]) -> Iterator[str]:
    (first, first_files), *later = releases.items()
    for version, files in later:
        if first_files.keys() != files.keys():
            yield f"different settings: {first} and {version} do not have reports of the same axes"
        for one, other in _pairs(first_files, files):
            if names := different_settings(one, other):
                yield f"different settings: {other.path} has another {', '.join(names)} than {one.path}"


def _changes(before: tuple[str, Files], after: tuple[str, Files]) -> Iterator[str]:
    name = f"{before[0]} to {after[0]}"
    for one, other in _pairs(before[1], after[1]):
        report = compare_verdicts(one.path, other.path)
        yield f"{name}, {one.path.name} to {other.path.name}: {report.below[-1]}"
        yield from (f"{name}, {change}: {where}" for change, where in report.record["regions"].items())
