"""Diagnose the verdicts of a run: what is broken, where, and the smallest case that shows it.

A feature is a named property of a call, such as `q_len`. A rule, such as `has_window and q_len >= 2`, is a conjunction of
literals, which are tests of one feature. A region is all results of one kind, such as outputs, for which a rule holds.
"""

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lab.checks.explain.answer import state_between_calls
from lab.checks.explain.call_features import features_of_case
from lab.checks.explain.failure_rules import FEW, find_rules, sharpened, supported
from lab.checks.explain.feature import Bits, Features, Value, of_any_request
from lab.checks.explain.features import feature_named
from lab.checks.explain.literal import Rule, all_hold
from lab.checks.run.verdicts import BROKEN, IT_FAILED, RETURNED, CaseVerdict, CheckedResult, Outcome
from lab.recorded.case import RecordedCase
from lab.wording import counted, joined

# The kinds of compared results, each with the beginning of a sentence about wrong ones. Errors of an earlier kind can cause
# errors of a later kind.
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
NEARLY = 0.9  # share of wrong results from which the sentence says "nearly everywhere"
# Kinds that are recorded only if they are wrong. Results of the kinds in STAND_INS count as their right ones.
WITHOUT_RIGHT_ONES = ("return", "other")
CALLS = ("arguments", "return")  # kinds of errors of calls that return no result
STAND_INS = ("output", "lists", "metadata")
FOLLOWS_FROM_NOTHING = (*WITHOUT_RIGHT_ONES, "memory")  # kinds that no earlier kind can cause
THE_CASE = "the case"  # name of a result if the single calls of the case are not known
# Features of a request that are not meaningful for a whole call
PLACES = (
    *("request", "first_request", "last_request", "previous_kv_len", "previous_q_len"),
    *("work_items", "rows_so_far", "rows_before", "keys_before"),
)
MOST_SHARED = 5  # features in the sentence about what all wrong calls of a recording share
MOST_SHOWN = 2  # regions of one kind in the sentence, besides the first region
EXPLAINED = 0.9  # a kind gets no regions if this share of its wrong results lies in regions of earlier kinds


class CaseResult(NamedTuple):
    verdict: CaseVerdict
    result: CheckedResult


@dataclass(frozen=True)
class Region:
    """The results of a kind, such as "output", for which a failure rule such as `q_len >= 2` holds, and how many are wrong."""

    literals: Rule  # the literals of the rule; () if results are wrong everywhere
    held: str  # the kind of results, a key of `HELD` such as "output"
    wrong: int  # number of wrong results inside the region
    results: int  # number of results inside the region
    right_outside: int  # number of right results outside
    outside: int  # number of results outside
    smallest: CaseResult  # the wrong result inside the region whose case is smallest
    is_nan: bool = False  # every wrong result inside is of a call with NaN in memory that no row may read
    # No engine sends a case with a wrong result inside, but an engine sends other cases of the run.
    is_corner: bool = False

    @property
    def what(self) -> str:
        return NAN_READ if self.is_nan else HELD[self.held]

    @property
    def rule(self) -> str:
        return " and ".join(map(str, self.literals))

    @property
    def words(self) -> str:
        return " and ".join(literal.phrase for literal in self.literals)

    @property
    def where(self) -> str:
        """Return words such as "everywhere", "wherever <rule>" or "in some cases where <rule>"."""
        share = self.wrong / self.results
        if self.held == "arguments":  # the features of invalid arguments are not known
            return f"in {counted(self.wrong, 'case')}"
        if not self.literals:
            part = "in most cases" if share > 0.5 else "in some cases"
            return "everywhere" if share == 1 else "nearly everywhere" if share >= NEARLY else part
        extent = "wherever" if share == 1 else "in most cases where" if share > 0.5 else "in some cases where"
        if self.is_small:
            extent = f"in {self.wrong} of {counted(self.results, 'result')} where"
        return f"{extent} {self.words}{', which no engine sends' if self.is_corner else ''}"

    @property
    def is_small(self) -> bool:
        return self.wrong < FEW and bool(self.literals) and self.held != "arguments"

    @property
    def sentence(self) -> str:
        return f"{self.what} {self.where}"

    @property
    def counts(self) -> str:
        where = f" with {self.rule}" if self.literals else ""
        inside = f"{within(self.what)} in {self.wrong:,} of {counted(self.results, 'result')}{where}"
        outside = f", right in {self.right_outside:,} of {counted(self.outside, 'other result')}"
        return inside + (outside if self.outside else "")

    def as_record(self) -> dict[str, Any]:
        features = [name for literal in self.literals for name in literal.features]
        record = {"rule": self.rule, "words": self.words, "held": self.held, "features": features}
        record |= {name: getattr(self, name) for name in ("wrong", "results", "right_outside", "outside")}
        return record | {"sentence": self.sentence, "case": self.smallest.verdict.number}


def within(sentence: str) -> str:
    """Return the sentence with a small first letter, unless it begins with "NaN", so that it can continue another sentence."""
    return sentence if sentence.startswith("NaN") else sentence[0].lower() + sentence[1:]


@dataclass(frozen=True)
class Diagnosis:
    """The conclusion from all verdicts of a run: whether it is right, what is broken and where, and what was not judged."""

    answer: str  # whether the implementation is right, for which engines, and what was not judged
    reach: str = ""  # how much was compared, and in full what was not judged
    broken: str = ""  # what is broken, and where; "" if no result is wrong
    # First the regions of cases that engines send, then documented corners; within both, in the order of `HELD`. Regions of
    # fewer than `FEW` wrong results follow.
    regions: tuple[Region, ...] = ()
    follows: tuple[str, ...] = ()  # sentences that name checks whose errors follow from a wrong plain call

    @property
    def sentence(self) -> str:
        return f"{self.answer} {self.broken}".strip()

    def as_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {
            "sentence": self.sentence,
            "reach": self.reach,
            "regions": [each.as_record() for each in self.regions],
        }
        if self.regions:
            verdict, result = self.regions[0].smallest
            record["smallest"] = {"case": verdict.number, "check": verdict.check, "result": result.name}
            if (example := result.example) is not None:
                record["smallest"] |= {
                    "where": example.where,
                    "expected": list(map(str, example.expected)),
                    "got": list(map(str, example.got)),
                }
        return record | {"follows": list(self.follows)}


def diagnose(verdicts: Sequence[CaseVerdict], answer: str = "", reach: str = "", *, is_whole: bool = True) -> Diagnosis:
    """Return the diagnosis of a run's verdicts, without known failures and declined cases. `answer` and `reach` are the lines
    that `lab.checks.explain.answer` writes. `is_whole` is False if the run left cases out. If a verdict is "dishonest"
    (the kernel tampered with the judge), the diagnosis has only the answer.
    """
    if any(each.outcome is Outcome.DISHONEST for each in verdicts):
        return Diagnosis(answer)
    judged = [each for each in verdicts if each.outcome in (Outcome.RIGHT, *BROKEN)]
    if state := state_between_calls(judged):  # a wrong case that was not repeated may be wrong after other cases only
        judged = [each for each in judged if each.outcome is not Outcome.WRONG or each.judged.alone]
    results = [CaseResult(verdict, result) for verdict in judged for result in _results_of(verdict)]
    wrong = [each.result.held for each in results if each.result.wrong]
    if not wrong:
        return Diagnosis(answer, reach, state)
    is_written = 2 * wrong.count("memory") > len(wrong)  # a kernel that writes its inputs makes later results wrong
    regions, unexplained = list[Region](), 0
    for held in sorted(HELD, key=lambda held: is_written and held != "memory"):
        units = _units(results, held)
        if not units.wrong.any():
            continue
        inside = _inside(units, regions)
        if _follows_from(units, held, inside, results):
            unexplained += units.unexplained(units.results_with(units.wrong & inside))
        else:
            found, outside = _regions(units, held)
            regions += found
            unexplained += outside
    regions.sort(key=lambda each: (each.is_small, each.is_corner))
    broken = _broken(regions, unexplained, is_whole, bool(state))
    if all(isinstance(each.case, RecordedCase) and each.outcome in BROKEN for each in judged):
        broken = _of_wrong_calls(broken, regions, results)
    return Diagnosis(answer, reach, f"{broken} {state}".strip(), tuple(regions), _follows(judged))


def _results_of(verdict: CaseVerdict) -> tuple[CheckedResult, ...]:
    if verdict.judged.results:
        return verdict.judged.results
    held = "return" if verdict.outcome is Outcome.FAILED else "output"
    return (CheckedResult(THE_CASE, held, _features_of(verdict), verdict.is_wrong_alone),)


def _features_of(verdict: CaseVerdict) -> dict[str, Value]:
    found = features_of_case(verdict.case)
    return _without_places(of_any_request(found.features, found.of_requests))


def _without_places(features: Features) -> dict[str, Value]:
    return {name: value for name, value in features.items() if name not in PLACES}


class _Units(NamedTuple):
    """The units that failure rules separate into wrong and right ones. A unit is one request of a compared result, or the whole
    result if its requests were not compared separately.
    """

    results: list[CaseResult]
    features: list[Features]  # of each unit
    wrong: Bits  # bool [units]
    result_of: Bits  # for each unit, the index of its result in `results`
    case_of: list[int]  # for each unit, the number of its case

    def with_rule(self, rule: Rule) -> Bits:
        return all_hold(rule, self.features)

    def results_with(self, units: Bits) -> Bits:
        return np.bincount(self.result_of[units], minlength=len(self.results)) > 0

    def unexplained(self, explained: Bits) -> int:
        return int((self.results_with(self.wrong) & ~explained).sum())

    def vacuous_with(self, rule: Rule) -> Bits:
        """Return bool [results]: True if all requests of the result are ignored (it has no unit), and one meets the rule."""
        found = ~self.results_with(np.ones(len(self.features), dtype=bool))
        for number in np.flatnonzero(found).tolist():
            _, result = self.results[number]
            requests = [{**result.features, "result": result.name, **features} for features, _ in result.requests]
            found[number] = all_hold(rule, requests).any()
        return found


def _units(results: Sequence[CaseResult], held: str) -> _Units:
    is_alone = held in WITHOUT_RIGHT_ONES
    kinds = {held, *STAND_INS} if is_alone else {held}
    chosen = [each for each in results if each.result.held in kinds]
    # The arguments of a crashed call are not known. If there is one, each result gets only the features of its case.
    by_case = is_alone and any(result.name == THE_CASE and result.held == held for _, result in chosen)
    units: list[tuple[Features, bool, int, int]] = []
    cases: dict[int, int] = {}
    vacuous = _vacuous(chosen, held)
    for number, (verdict, result) in enumerate(chosen):
        counts = result.held == held
        # These names only repeat that something is wrong: a rule on them would explain nothing.
        name = {} if result.name in (IT_FAILED, RETURNED, THE_CASE) else {"result": result.name}
        shared: dict[str, Value] = {**result.features, **name}
        parts = [each for each in result.requests if not any(each[0].get(name) for name in vacuous)]
        if is_alone:  # a failed call has the features of all its requests, so that a right one must have them too
            whole = of_any_request(shared, [features for features, _ in result.requests])
            shared = _features_of(verdict) if by_case else _without_places(whole)
        elif result.requests and not parts and not result.wrong:
            continue
        no_request_is_wrong = result.wrong and not any(is_wrong for _, is_wrong in parts)
        if is_alone or no_request_is_wrong:
            parts = []
        case = cases.setdefault(id(verdict), len(cases))
        for features, is_wrong in parts or [({}, result.wrong)]:
            units.append((ChainMap(dict(features), shared), bool(is_wrong and counts), number, case))
    features_of_units, wrong, results_of, cases_of = zip(*units, strict=True) if units else ((), (), (), ())
    return _Units(chosen, list(features_of_units), np.array(wrong, bool), np.array(results_of, int), list(cases_of))


def _vacuous(results: Sequence[CaseResult], held: str) -> tuple[str, ...]:
    """Return the features of requests to ignore: "no_rows", and "no_keys" unless one without keys is wrong (kind `held`)."""
    of_requests = (each for _, result in results if result.held == held for each in result.requests)
    is_telling = any(is_wrong and features.get("no_keys") for features, is_wrong in of_requests)
    return ("no_rows",) if is_telling else ("no_rows", "no_keys")


def _follows_from(units: _Units, held: str, inside: Bits, results: Sequence[CaseResult]) -> bool:
    """Return True if errors of kind `held`, such as "LSE", only follow from errors of the kinds before it in `HELD`: nearly all
    wrong units are `inside`, where a rule of such a kind holds, and for "LSE" most calls with a wrong LSE have a wrong output.
    """
    if held in FOLLOWS_FROM_NOTHING:
        return False
    if held == "LSE":
        output, lse = (
            {(id(verdict), each.name) for verdict, each in results if each.wrong and each.held == kind}
            for kind in ("output", "LSE")
        )
        if len(lse & output) <= len(lse) / 2:
            return False
    return bool(inside[units.wrong].mean() >= EXPLAINED)


def _inside(units: _Units, regions: Sequence[Region]) -> Bits:
    inside = np.zeros(len(units.features), dtype=bool)
    for region in regions:
        # If calls fail everywhere without a rule, the calls that do return are wrong for another reason.
        if region.literals or region.held not in CALLS:
            inside |= units.with_rule(region.literals)
    return inside


def _regions(units: _Units, held: str) -> tuple[list[Region], int]:
    """Return (a region for each failure rule of the results of kind `held`, number of wrong results that meet no rule)."""
    wrong = units.results_with(units.wrong)
    has_senders = any(verdict.sent_by for verdict, _ in units.results)
    found: list[Region] = []
    explained = np.zeros_like(wrong)
    for whole_rule in find_rules(units.features, units.wrong, units.case_of):
        of_units = (units.features, units.wrong, units.result_of)
        rule = sharpened(supported(whole_rule, *of_units), *of_units, units.case_of)
        holds = units.with_rule(rule)
        wrong_inside = units.results_with(holds & units.wrong)
        inside = units.results_with(holds) if rule else np.ones_like(wrong)  # also results of vacuous requests
        outside = ~inside & ~units.vacuous_with(rule)
        explains_more = (wrong_inside & ~explained).any() and wrong_inside.sum() >= min(FEW, inside.sum() / 2)
        if found and not explains_more:
            continue  # all its wrong results meet an earlier rule, or they are few and most of its results are right
        explained |= wrong_inside
        of_region = [units.results[number] for number in np.flatnonzero(wrong_inside)]
        found.append(
            Region(
                literals=rule,
                held=held,
                wrong=len(of_region),
                results=int(inside.sum()),
                right_outside=int((outside & ~wrong).sum()),
                outside=int(outside.sum()),
                smallest=_smallest(of_region),
                is_nan=all(result.features.get("dead") == "nan" for _, result in of_region),
                is_corner=has_senders and not any(verdict.sent_by for verdict, _ in of_region),
            )
        )
    return found, units.unexplained(explained)


def _smallest(wrong: Sequence[CaseResult]) -> CaseResult:
    def size(each: CaseResult) -> tuple[bool, bool, int]:
        numbers = [each.result.features.get(name, 1) for name in ("rows_of_batch", "longest_kv_len", "num_qo_heads")]
        product = math.prod(max(int(number), 1) for number in numbers)
        return not each.verdict.sent_by, each.result.example is None, product

    return min(wrong, key=size)


def _broken(regions: Sequence[Region], unexplained: int, is_whole: bool, has_state: bool = False) -> str:
    first, *later = regions
    parts = [first.sentence + ("" if first.is_small else f" ({first.wrong:,} of {counted(first.results, 'result')})")]
    same_kind = [region for region in later if region.held == first.held][:MOST_SHOWN]
    numbers = ["" if each.is_small else f" ({each.wrong:,} of {each.results:,})" for each in same_kind]
    parts += [f"and {each.where}{number}" for each, number in zip(same_kind, numbers, strict=True)]
    for held in dict.fromkeys(region.held for region in later if region.held != first.held):
        of_kind = [region for region in later if region.held == held][:MOST_SHOWN]
        sent = [region.where for region in of_kind if not region.is_corner]
        parts.append(f"{within(of_kind[0].what)} {' or '.join(sent) or of_kind.pop(0).where}")
        parts += [f"and {region.where}" for region in of_kind if region.is_corner]
    if unexplained:
        parts.append(f"{counted(unexplained, 'other result')} {'is' if unexplained == 1 else 'are'} wrong too")
    elif not later and first.outside and not has_state:
        parts.append(f"every other result {'' if is_whole else 'that was judged '}is right")
    return f"{'; '.join(parts)}."


def _of_wrong_calls(broken: str, regions: Sequence[Region], results: Sequence[CaseResult]) -> str:
    first, *_ = regions
    units = _units(results, first.held)
    features = [each for each, is_wrong in zip(units.features, units.wrong, strict=True) if is_wrong]
    names = (name for name in features[0] if name not in PLACES and all(each.get(name) is True for each in features))
    shared = sorted(map(feature_named, names), key=lambda each: each.cost)
    share = f" All share: {'; '.join(each.phrase('is', True) for each in shared[:MOST_SHARED])}." if shared else ""
    rest = f"Among their requests, {within(broken)}" if any(region.literals for region in regions) else broken
    return f"No judged call is right, so that the recording shows no rule.{share} {rest}"


def _follows(verdicts: Sequence[CaseVerdict]) -> tuple[str, ...]:
    """Return for each function a sentence that names the checks whose errors a wrong first call explains: in each of their
    wrong cases, the result of the first call is wrong. A first call without a result, such as a failed one, does not count.
    """
    firsts: dict[tuple[str, str], list[bool]] = {}
    for verdict in verdicts:
        is_recorded = isinstance(verdict.case, RecordedCase)  # a recorded case has only one call
        if verdict.is_wrong_alone and not is_recorded and (results := verdict.judged.results):
            plain = results[0].wrong and results[0].held not in WITHOUT_RIGHT_ONES
            firsts.setdefault((verdict.interface.name.lower(), verdict.check), []).append(plain)
    found: dict[str, list[str]] = {}
    for (function, check), plain_calls in firsts.items():
        if all(plain_calls):
            found.setdefault(function, []).append(check)
    return tuple(
        f"{joined(sorted(keys, key=_place))} of {name}: no further error, because the first call of each wrong case is wrong"
        for name, keys in found.items()
    )


def _place(key: str) -> tuple[str, int, str]:
    return key.rstrip("0123456789"), len(key), key
