"""Releases of a package side by side: which finding lives where.

    lab releases 0.6.12.json 0.6.18.json 0.7.2.json --findings results/nvidia-h200/findings.md

Each file is a report of the judge, of one environment; the release is the version of the package in it. A release may have
several reports, of different axes; all releases must have been judged with the same settings (`lab.reports.changed_verdicts`).

A row is a finding that the known failures cite (`lab.checks.run.known_failures`, as they are now and not as they were for the
report), or a region of cases that were wrong without one in the same releases. Its *telling cases* are those that are wrong
with it in some release.
In a release it is

    present         one of them is wrong with it there
    absent          some are right there, and none is wrong with it
    not reachable   all are declined there, were not judged, or are wrong in another way
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

from lab.checks.explain.diagnosis import HELD, diagnose
from lab.checks.run.known_failures import KNOWN_FAILURES, known
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.exit_status import ExitStatus
from lab.reports.changed_verdicts import SETTINGS, cases_of, compare_verdicts, setting
from lab.reports.comparison import NotComparableError
from lab.reports.html.findings import slug
from lab.reports.recorded import Kind, RecordedFile, grouped, read_file, value_at
from lab.reports.tables import Cell, TableReport, make_table, words

Key = tuple[str, ...]  # of a case: the axes, the check, the function, the case
NUMBERED = re.compile(r"^## (\d+\. .*)$", re.MULTILINE)
UNEXPLAINED = BROKEN  # by a finding
CITED = "; "  # between the findings that a case cites
STYLES = {"present": "slower", "absent": "faster", "not reachable": "unsure"}


@dataclass(frozen=True)
class Release:
    """A version of the package, and the reports that were judged with it."""

    version: str
    files: tuple[RecordedFile, ...]


@dataclass(frozen=True)
class _Row:
    """A finding, which reports cite so, or a region, and its telling cases."""

    name: str
    cases: frozenset[Key]
    cited: str = ""


Verdicts = Mapping[str, Mapping[Key, CaseVerdict]]  # by version


def releases_report(
    paths: Sequence[Path], package: str = "flashinfer-python", findings: Path | None = None
) -> TableReport:
    """Line reports of the judge up by release.

    Args:
        paths: of the reports, the oldest release first.
        package: whose version in a report's environment is the release.
        findings: a page whose headings "## 1. ..." are the findings, by their anchors; those that no report cites have a row.

    Raises:
        lab.reports.recorded.RecordedFileError, lab.checks.record.ReportError, OSError: a file cannot be read.
        NotComparableError: a file is no report of the judge or has no version of the package, there is one release alone, or
            one has two reports of the same axes.
    """
    releases = _releases([read_file(path) for path in paths], package)
    verdicts = {each.version: dict(_cases(each)) for each in releases}
    headings = _headings(findings)
    rows = [*_findings(verdicts, headings), *_regions(verdicts)]
    unlike = list(_unlike(releases))
    columns = {"finding": lambda row: words(row.name)} | {
        each.version: partial(_status, verdicts[each.version]) for each in releases
    }
    changes = [line for before, after in pairwise(releases) for line in _changes(before, after)]
    return TableReport(
        above=(*(_environment(each) for each in releases), *unlike),
        table=make_table(columns, rows, caption=f"findings by release of {package}", say_once=()),
        below=(*changes, _summary(rows, verdicts)),
        record={
            "package": package,
            "releases": [
                {"version": each.version, "files": [str(file.path) for file in each.files]} for each in releases
            ],
            "findings": [
                {"finding": row.name} | {version: _counts(row, of) for version, of in verdicts.items()} for row in rows
            ],
            "changes": changes,
        },
        exit_status=ExitStatus.NOT_JUDGED if unlike else ExitStatus.DONE,
    )


def _releases(files: Iterable[RecordedFile], package: str) -> list[Release]:
    by_version: dict[str, list[RecordedFile]] = {}
    for file in files:
        if file.kind is not Kind.JUDGE:
            raise NotComparableError(f"{file.path} is no report of the judge")
        if (version := value_at(file.environment, ("packages", package))) is None:
            raise NotComparableError(f"{file.path} names no version of {package}: name another by --package")
        alike = by_version.setdefault(str(version), [])
        twice = next((other for other in alike if _axes(other) == _axes(file)), None)
        if twice is not None:
            raise NotComparableError(f"{twice.path} and {file.path} are both of {package} {version}, on the same axes")
        alike.append(file)
    if len(by_version) < 2:
        raise NotComparableError(
            f"all reports are of {package} {', '.join(by_version)}: there are no two releases to compare"
        )
    return [Release(version, tuple(alike)) for version, alike in by_version.items()]


def _axes(file: RecordedFile) -> str:
    return str(file.content.get("ranges"))


def _cases(release: Release) -> Iterator[tuple[Key, CaseVerdict]]:
    for file in release.files:
        capability, packages = (file.environment.get(name) for name in ("capability", "packages"))
        for each in cases_of(file):
            told = known(each, KNOWN_FAILURES, tuple(capability) if capability else None, (packages or {}).get)
            yield (_axes(file), each.check, each.interface.value, repr(each.case)), told


def _headings(page: Path | None) -> dict[str, str]:
    found = [] if page is None else NUMBERED.findall(page.read_text(encoding="utf-8"))
    return {slug(heading): heading for heading in found}


def _findings(verdicts: Verdicts, headings: Mapping[str, str]) -> Iterator[_Row]:
    """Yield a row for each heading, and then for each other finding that is cited."""
    telling = grouped(
        (cited, key)
        for of in verdicts.values()
        for key, verdict in of.items()
        for cited in filter(None, verdict.finding.split(CITED))
    )
    by_anchor = {cited.partition("#")[2]: cited for cited in telling}
    for anchor, heading in headings.items():
        cited = by_anchor.get(anchor, "")
        yield _Row(heading, frozenset(telling.pop(cited, ())), cited)
    yield from (_Row(cited, frozenset(cases), cited) for cited, cases in telling.items())


def _regions(verdicts: Verdicts) -> Iterator[_Row]:
    """Yield a row for each region of the cases that are wrong without a finding in the same releases."""
    wrong_in = grouped(
        (key, version)
        for version, of in verdicts.items()
        for key, verdict in of.items()
        if verdict.outcome in UNEXPLAINED
    )
    alike = grouped((tuple(versions), key) for key, versions in wrong_in.items())
    for (first, *_), keys in alike.items():
        cases = frozenset(keys)
        chosen = [each for key, each in verdicts[first].items() if key in cases or each.outcome is Outcome.RIGHT]
        regions = diagnose(chosen).regions
        sentences = (f"{HELD[each.held]} {each.where}" for each in regions)
        yield _Row("; ".join(dict.fromkeys(sentences)), cases)


def _counts(row: _Row, of: Mapping[Key, CaseVerdict]) -> dict[str, int | str]:
    """Return how many of a row's cases are wrong with it, right and declined in a release, and what it is there."""
    told = [of[key] for key in row.cases if key in of]
    found = Counter(each.outcome for each in told)
    wrong = (
        sum(row.cited in each.finding.split(CITED) for each in told)
        if row.cited
        else sum(found[each] for each in UNEXPLAINED)
    )
    right = found[Outcome.RIGHT]
    status = "present" if wrong else "absent" if right else "not reachable"
    return {"status": status, "wrong": wrong, "right": right, "declined": found[Outcome.DECLINED]}


def _status(of: Mapping[Key, CaseVerdict], row: _Row) -> Cell:
    counts = _counts(row, of)
    status, wrong, right = str(counts["status"]), counts["wrong"], counts["right"]
    cases = {"present": f", {wrong} of {len(row.cases)}", "absent": f", {right}"}.get(status, "")
    return words(status + cases, STYLES[status])


def _environment(release: Release) -> str:
    first = release.files[0]
    facts = {"on": ("gpu",), "torch": ("packages", "torch"), "commit": ("commit",)}
    told = [f"{name} {first.fact(*where)}" for name, where in facts.items() if first.fact(*where)]
    return f"{release.version}: {', '.join((first.content['implementation'], *told))}"


def _pairs(before: Release, after: Release) -> Iterator[tuple[RecordedFile, RecordedFile]]:
    """Yield the reports of two releases that are of the same axes."""
    by_axes = {_axes(file): file for file in after.files}
    yield from ((file, by_axes[_axes(file)]) for file in before.files if _axes(file) in by_axes)


def _unlike(releases: Sequence[Release]) -> Iterator[str]:
    """Yield a sentence for each report that is not judged like that of the first release."""
    first = releases[0]
    for release in releases[1:]:
        pairs = list(_pairs(first, release))
        if not len(pairs) == len(first.files) == len(release.files):
            yield f"different settings: {first.version} and {release.version} do not have reports of the same axes"
        for one, other in pairs:
            names = [name for name in SETTINGS if setting(one, name) != setting(other, name)]
            if names:
                yield f"different settings: {other.path} has another {', '.join(names)} than {one.path}"


def _changes(before: Release, after: Release) -> Iterator[str]:
    """Yield the summary that `lab compare` has of two neighbours."""
    name = f"{before.version} to {after.version}"
    for one, other in _pairs(before, after):
        report = compare_verdicts(one.path, other.path)
        yield f"{name}, {one.path.name} to {other.path.name}: {report.below[-1]}"
        yield from (f"{name}, {change}: {where}" for change, where in report.record["regions"].items())


def _summary(rows: Sequence[_Row], verdicts: Verdicts) -> str:
    present = [
        f"{sum(_counts(row, of)['status'] == 'present' for row in rows)} in {version}"
        for version, of in verdicts.items()
    ]
    return f"Findings and regions present, of {len(rows)}: {', '.join(present)}."
