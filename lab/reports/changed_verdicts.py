"""Compare two reports of the judge: list the cases that are newly wrong, newly declined (refused by the kernel) or repaired.

The reports may be from two releases of a package, two commits, two GPUs or two kernels. A case of one report is compared with
the case of the other report that has the same check, function and parameters.

Exit status, the first that holds:
    2    a file is not a report of the judge
    1    a case is newly wrong or newly declined
    125  fewer than half of the cases are in both reports; or a report left cases out; or level, checks, ranges or seed differ
    0    otherwise

A few cases that only one report has do not change the exit status: check K18 (combinations) chooses some cases by the values
that a kernel accepts.
"""

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.checks.explain.diagnosis import diagnose
from lab.checks.record import read_cases
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.exit_status import ExitStatus
from lab.files import DAMAGED
from lab.named_enum import TextEnum
from lab.reports.recorded_file import (
    FileKind,
    NotComparableError,
    RecordedFile,
    RecordedFileError,
    facts_of_sides,
    read_file,
)
from lab.reports.tables import Cell, Columns, TableReport, grouped, make_table, number, words
from lab.wording import counted

BAD = (*BROKEN, Outcome.KNOWN)
# If these settings agree, two reports have the same cases.
SETTINGS = ("level", "seed", "ranges", "checks", "left_out")


class VerdictChange(TextEnum):
    """How the verdict on a case changed. Tables list the changes in this order. `style` is the style of their cells."""

    NEWLY_WRONG = "newly wrong", "slower"
    NEWLY_DECLINED = "newly declined", "unsure"
    REPAIRED = "repaired", "faster"
    NEWLY_TAKEN = "newly accepted", "faster"
    SAME = "same", "same"

    def __init__(self, _text: str, style: str) -> None:
        self.style = style


WORSE = (VerdictChange.NEWLY_WRONG, VerdictChange.NEWLY_DECLINED)


@dataclass(frozen=True)
class CasePair:
    before: CaseVerdict
    after: CaseVerdict

    @property
    def change(self) -> VerdictChange:
        was, now = self.before.outcome, self.after.outcome
        if (now in BAD) > (was in BAD):
            return VerdictChange.NEWLY_WRONG
        if was is not now and now is Outcome.DECLINED:
            return VerdictChange.NEWLY_DECLINED
        if now is Outcome.RIGHT and was is not now:
            return VerdictChange.NEWLY_TAKEN if was is Outcome.DECLINED else VerdictChange.REPAIRED
        return VerdictChange.SAME


# A row has the cases of one check and function whose verdicts changed in the same way.
COLUMNS: Columns = {
    "change": lambda row: words(row[0].change, row[0].change.style),
    "check": lambda row: words(row[0].after.check),
    "function": lambda row: words(row[0].after.interface.name.lower()),
    "cases": lambda row: number(len(row)),
    "before": lambda row: _outcomes(pair.before for pair in row),
    "after": lambda row: _outcomes(pair.after for pair in row),
}


def _outcomes(verdicts: Iterable[CaseVerdict]) -> Cell:
    return words(", ".join(dict.fromkeys(verdict.outcome.value for verdict in verdicts)))


def has_report(*paths: str) -> bool:
    return any(Path(path).is_file() and read_file(Path(path)).kind is FileKind.JUDGE for path in paths)


def read_report(path: Path) -> RecordedFile:
    """Read a report of the judge. Raises RecordedFileError if the file is damaged or is no report of the judge."""
    file = read_file(path)
    if file.kind is not FileKind.JUDGE:
        raise RecordedFileError(f"{path}: no report of the judge, so that no report can be compared with it")
    try:
        facts_of_sides([file.environment], [])
        f"{_settings(file)} {file.content.get('left_out', 0):,}"
    except DAMAGED as error:
        raise RecordedFileError(f"{path}: not in the form that the lab writes: {error!r}") from error
    return file


def different_settings(before: RecordedFile, after: RecordedFile) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two reports, such as level or seed: (value before, value after) by name."""
    was, now = _settings(before), _settings(after)
    return {name: (was[name], now[name]) for name in SETTINGS if was[name] != now[name]}


def _settings(file: RecordedFile) -> dict[str, Any]:
    checks = ", ".join(sorted(f"{row['check']} of {row['interface']}" for row in file.content["checks"]))
    return {name: file.content.get(name) for name in SETTINGS} | {"checks": checks}


def compare_verdicts(before_path: Path, after_path: Path) -> TableReport:
    """Return a table of the cases whose verdicts differ between two reports of the judge.

    Raises:
        RecordedFileError, ReportError: a file cannot be read, or is not a report of the judge.
        NotComparableError: both paths are the same file.
    """
    if os.path.realpath(before_path) == os.path.realpath(after_path):
        raise NotComparableError(f"both sides are {before_path}: there is nothing to compare")
    before, after = read_report(before_path), read_report(after_path)
    was, now = (
        {(each.check, each.interface, repr(each.case)): each for each in read_cases(file.content, file.path)}
        for file in (before, after)
    )
    pairs = [CasePair(verdict, now[key]) for key, verdict in was.items() if key in now]
    missing, added = len(was) - len(pairs), len(now) - len(pairs)
    alike = grouped(((pair.change, pair.after.check, pair.after.interface), pair) for pair in pairs)
    changed = [row for (change, *_), row in alike.items() if change is not VerdictChange.SAME]
    rows = sorted(changed, key=lambda row: [*VerdictChange].index(row[0].change))
    counts = Counter(pair.change for pair in pairs)
    summary = ", ".join(f"{counts[change]:,} {change}" for change in VerdictChange)
    summary += f"; {missing:,} only before, {added:,} only after" if missing or added else ""
    facts = facts_of_sides([before.environment], [after.environment])
    unlike = different_settings(before, after)
    located = (VerdictChange.NEWLY_WRONG, VerdictChange.REPAIRED)
    regions = {change: _where(pairs, change) for change in located if counts[change]}
    partial = [file for file in (before, after) if file.content.get("left_out")]
    has_most = 2 * len(pairs) > max(len(was), len(now))
    status = ExitStatus.DONE if has_most and not unlike and not partial else ExitStatus.NOT_JUDGED
    return TableReport(
        above=(
            *(
                f"{side}: {file.content['implementation']} on {file.content['device']}, {file.path}"
                for side, file in (("before", before), ("after", after))
            ),
            *(f"{name}: {one} before, {other} after" for name, (one, other) in facts.items() if one != other),
            *(f"different settings: {name} is {one} before, {other} after" for name, (one, other) in unlike.items()),
            *(
                f"not judged as a whole: {file.content['left_out']:,} cases were left out of {file.path}"
                for file in partial
            ),
        ),
        table=make_table(COLUMNS, rows, caption="cases that changed", say_once=()),
        below=(
            *(f"{change}: {sentence}" for change, sentence in regions.items()),
            *(line for row in rows if row[0].change in WORSE for line in _reasons(row, after_path)),
            f"{summary}{'' if has_most else ': most cases are in one report alone'}"
            if pairs
            else "nothing was compared: the reports have no case in common",
        ),
        record={
            "before": str(before.path),
            "after": str(after.path),
            "environment": {name: {"before": one, "after": other} for name, (one, other) in facts.items()},
            "counts": {change: counts[change] for change in VerdictChange},
            "only_before": missing,
            "only_after": added,
            "regions": regions,
            "cases": [
                {
                    "change": pair.change,
                    "check": pair.after.check,
                    "function": pair.after.interface.value,
                    "case": repr(pair.after.case),
                    "before": {"number": pair.before.number, "outcome": pair.before.outcome.value},
                    "after": {"number": pair.after.number, "outcome": pair.after.outcome.value},
                    "reasons": [*pair.after.judged.wrongs, *pair.after.judged.declines],
                }
                for row in rows
                for pair in row
            ],
        },
        exit_status=ExitStatus.WRONG if any(counts[change] for change in WORSE) else status,
    )


def _where(pairs: Sequence[CasePair], change: VerdictChange) -> str:
    """Say by which parameter values the cases with this change differ from right cases of the report that has them wrong."""
    of_after = change is VerdictChange.NEWLY_WRONG  # repaired cases are wrong in the report before
    sides = [(pair.change, pair.after if of_after else pair.before) for pair in pairs]
    changed = [
        replace(side, judged=replace(side.judged, outcome=Outcome.WRONG)) for each, side in sides if each is change
    ]
    return diagnose([*changed, *(side for _, side in sides if side.outcome is Outcome.RIGHT)]).broken


def _reasons(row: Sequence[CasePair], after: Path) -> Iterator[str]:
    reasons = grouped(
        (next(filter(None, (*now.judged.wrongs, *now.judged.declines, now.finding)), ""), now)
        for now in (pair.after for pair in row)
    )
    reason, verdicts = max(reasons.items(), key=lambda each: len(each[1]))
    rest = f" ({counted(len(row) - len(verdicts), 'case')} for other reasons)" if len(reasons) > 1 else ""
    yield f"{row[0].change}, {verdicts[0].check} of {verdicts[0].interface.name.lower()}: {reason}{rest}"
    yield f"    reproduce with: lab judge --case {shlex.quote(str(after))}#{verdicts[0].number}"
