"""The report of one run of the judge, as data: the verdict on each case, a summary for each check, and the diagnosis."""

import functools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.checks.explain.answer import NotJudged, answer, deciding, judged_functions, not_judged, reach
from lab.checks.explain.diagnosis import Diagnosis, diagnose
from lab.checks.parameters.coverage import Coverage, coverages
from lab.checks.parameters.profiles import profiles
from lab.checks.properties.check import Level
from lab.checks.run.verdicts import BROKEN, SENTENCES, CaseVerdict, Outcome
from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.ranges import Ranges
from lab.wording import counted
from lab.workloads.interfaces import Interface

WORST_FIRST = (Outcome.DISHONEST, Outcome.WRONG, Outcome.FAILED, Outcome.KNOWN, Outcome.RIGHT, Outcome.DECLINED)

# A quick run that left cases out answers nothing if it compared less than this share of its begun cases that an engine sends.
LEAST_COMPARED = 0.5

# Properties of a report that its file has under their own names.
WRITTEN = (
    *("implementation", "folder", "device", "is_right", "shard", "left_out", "unended", "ended", "interrupted"),
    *("num_random", "audited", "profile", "run", "environment"),
)


@dataclass(frozen=True)
class CheckSummary:
    """The result of one check on one function in a run: the verdicts on its cases, and the worst outcome among them."""

    check: str
    interface: Interface
    verdicts: tuple[CaseVerdict, ...]

    @functools.cached_property
    def counts(self) -> dict[Outcome, int]:
        return dict(Counter(verdict.outcome for verdict in self.verdicts))

    @property
    def outcome(self) -> Outcome:
        return next(outcome for outcome in WORST_FIRST if self.counts.get(outcome))

    @property
    def judged(self) -> int:
        return sum(verdict.judged.judged for verdict in self.verdicts)

    @property
    def worst(self) -> CaseVerdict:
        of_outcome = (verdict for verdict in self.verdicts if verdict.outcome is self.outcome)
        return max(of_outcome, key=lambda verdict: verdict.judged.worst_ratio)

    @property
    def declines(self) -> tuple[str, ...]:
        counts = Counter(reason for verdict in self.verdicts for reason in verdict.judged.declines)
        return tuple(reason for reason, _ in counts.most_common())


@dataclass(frozen=True)
class Report:
    """The result of one run of the judge: its settings, the verdict on each case, and how many cases were left out."""

    implementation: str  #: name of the implementation
    level: Level
    environment: dict[str, Any]  #: the run's `lab.provenance.environment`
    device: str  #: the device on which the run was made
    verdicts: tuple[CaseVerdict, ...]  #: the verdict on each case
    left_out: int = 0  #: number of planned cases that were not judged
    ranges: Ranges = field(default_factory=Ranges)  #: the parameter values that were judged
    ended: str = "the time was over"  #: a clause that says why cases were left out
    interrupted: bool = False  #: the user interrupted the run; `left_out` counts the remaining cases
    narrowed: tuple[
        tuple[Interface, Ranges], ...
    ] = ()  #: functions that were judged only on values that they support, and these values
    refusals: tuple[str, ...] = ()  #: names of the exceptions that count as refusals; () for the default list
    run: str = ""  #: a digest of everything that determines the verdicts; "" if the sources are unknown
    num_random: int = 0  #: number of random cases that were judged after the level's cases
    audited: int = 0  #: number of right cases that a process without the kernel's code judged again
    profile: str = ""  #: name of the engine if only the cases that it sends count, or ""
    functions: tuple[Interface, ...] = ()  #: the functions that have cases, even if none of their cases was begun
    unended: int = 0  #: number of left out cases that had begun before the time was over
    shard: str = ""  #: the part of the run that was judged, such as "3/8"; "" for the whole run
    folder: str = ""  #: the folder in which the name of the implementation was found; "" if it is found in any folder
    is_overwritten: bool = False  #: whether another run wrote the report's file during this run

    def __str__(self) -> str:
        return self.diagnosis.sentence

    @property
    def rows(self) -> list[CheckSummary]:
        grouped: dict[tuple[str, Interface], list[CaseVerdict]] = {}
        for verdict in self.verdicts:
            grouped.setdefault((verdict.check, verdict.interface), []).append(verdict)
        return [CheckSummary(check, interface, tuple(found)) for (check, interface), found in grouped.items()]

    @property
    def wrong(self) -> Iterator[CaseVerdict]:
        """Yield the verdicts "wrong", "failed" and "dishonest" (the kernel tampered with the judge). If the report is for one
        engine (`profile`), leave out cases that this engine does not send.
        """
        return (verdict for verdict in deciding(self.verdicts, self.profile) if verdict.outcome in BROKEN)

    @property
    def is_right(self) -> bool:
        return self._is_whole and bool(self.verdicts) and not any(self.wrong)

    @property
    def _is_whole(self) -> bool:
        judged = judged_functions(self.verdicts, self.profile)
        functions = {*self.functions, *(verdict.interface for verdict in self.verdicts)}
        sent = [verdict.judged.judged > 0 for verdict in self.verdicts if verdict.sent_by]
        is_hardly_judged = sum(sent) < LEAST_COMPARED * len(sent)
        is_left_out = self.left_out and (self.level is not Level.QUICK or self.unended or is_hardly_judged)
        # The cases of a shard's other functions may be of other shards.
        return not is_left_out and (bool(judged) if self.shard else judged == functions)

    @property
    def exit_status(self) -> ExitStatus:
        if self.interrupted:
            return ExitStatus.INTERRUPTED
        if any(verdict.outcome is Outcome.DISHONEST for verdict in self.verdicts):
            return ExitStatus.REFUSED
        if any(self.wrong):
            return ExitStatus.WRONG
        return ExitStatus.DONE if self.is_right else ExitStatus.NOT_JUDGED

    def write(self, path: Path, *, is_diagnosed: bool = True) -> None:
        write_text(path, json.dumps(self.as_record(is_diagnosed), indent=1) + "\n")

    def as_record(self, is_diagnosed: bool = True) -> dict[str, Any]:
        """Return the report as JSON data. Unless `is_diagnosed`, omit diagnosis and coverage, whose computation is slow."""
        return {
            **{name: getattr(self, name) for name in WRITTEN},
            "level": self.level.value,
            "functions": [each.value for each in self.functions],
            "seed": self.ranges.seed,
            "engines": {name: str(engine) for name, engine in profiles().items()},
            "ranges": repr(self.ranges),
            "narrowed": {interface.value: repr(ranges) for interface, ranges in self.narrowed},
            "refusals": list(self.refusals),
            "diagnosis": self.diagnosis.as_record() if is_diagnosed else None,
            "checks": [
                {
                    "check": row.check,
                    "interface": row.interface.value,
                    "outcome": row.outcome.value,
                    "counts": {outcome.value: count for outcome, count in row.counts.items()},
                    "judged": row.judged,
                    "worst_ratio": _number(row.worst.judged.worst_ratio),
                }
                for row in self.rows
            ],
            "coverage": {each.interface.value: each.as_record() for each in self.coverages} if is_diagnosed else {},
            "cases": [self._record_of(verdict) for verdict in self.verdicts],
        }

    def _record_of(self, verdict: CaseVerdict) -> dict[str, Any]:
        record = {
            **{name: getattr(verdict, name) for name in ("number", "check", "drawn", "finding")},
            "interface": verdict.interface.value,
            "outcome": verdict.outcome.value,
            "case": repr(verdict.case),
            **{name: list(getattr(verdict.judged, name)) for name in SENTENCES},
            "differences": [[each.what, _number(each.ulps)] for each in verdict.judged.differences],
            "worst_ratio": _number(verdict.judged.worst_ratio),
            "judged": verdict.judged.judged,
            "by_lab": verdict.judged.by_lab,
            "alone": verdict.judged.alone,
            "sent_by": list(verdict.sent_by),
            "ranges": "" if verdict.ranges == self.ranges else repr(verdict.ranges),
        }
        return {name: value for name, value in record.items() if value or name == "outcome"}

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        left_out = f"{counted(self.left_out, 'case')} left out, {self.ended}" if self.left_out else ""
        chosen_by = f"the {self.level.value} level" + (f" of the profile {self.profile}" if self.profile else "")
        missing = list(not_judged(self.verdicts, self.coverages, left_out, chosen_by, self.profile))
        if self.shard:
            shard = f"this is shard {self.shard}"
            missing.insert(0, NotJudged(f"{shard}, and `lab merge` unites the reports of all shards", shard))
        return diagnose(
            self.verdicts,
            answer(self.verdicts, self.profile, missing, self._is_whole and not self.shard, self.left_out),
            reach(self.verdicts, missing),
            is_whole=self._is_whole or not self.left_out,
        )

    @functools.cached_property
    def coverages(self) -> tuple[Coverage, ...]:
        return coverages(self.verdicts, self.ranges)


def _number(ratio: float) -> float | str:
    return round(ratio, 4) if math.isfinite(ratio) else "inf"  # JSON has neither infinity nor NaN
