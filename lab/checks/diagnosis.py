"""A diagnosis of a judge's verdicts: what is broken and where, the smallest case that shows it, and what only follows."""

from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lab.checks.facts import Fact, Facts, facts_of_case, together
from lab.checks.regions import Bits, Rule, find_rules, weights_of
from lab.checks.run.verdicts import BROKEN, IT_FAILED, CheckedResult, Outcome, WrongVector

if TYPE_CHECKING:
    from lab.checks.report import CaseVerdict

# What a result can be held for, causes first, and the beginning of a sentence of what is wrong then.
HELD = {
    "return": "It fails",
    "lists": "The lists are wrong",
    "metadata": "The metadata is wrong",
    "output": "Wrong",
    "invariants": "What metadata must keep is broken",
    "LSE": "The LSE is wrong",
    "bits": "An equal call gives other bits",
    "memory": "Memory is written that must stay as it is",
    "other": "What is returned is wrong",
    "lab": "The lab itself fails",
}
# Such results are noted only where they are wrong: the outputs are right beside them.
WITHOUT_RIGHT_ONES = ("return", "other", "lab")
FOLLOWS_FROM_NOTHING = (*WITHOUT_RIGHT_ONES, "memory")
THE_CASE = "the case"  # a result's name where its calls are not known
PLACES = ("request", "last request")  # facts of one request, which say nothing of a whole batch
MOST_TOLD = 2  # regions of a kind after the first in the sentence; the others follow it
EXPLAINED = 0.9  # of the wrong results of a kind lie in regions of a plainer one: they have no region of their own
MOST_UNITS = 4000  # wrong ones, and right ones, among which rules are searched; of more, every so many


@dataclass(frozen=True)
class Region:
    """Where results are wrong.

    Attributes:
        rule: of facts, such as "window_left >= 0 and q_len >= 2"; empty if it is everywhere.
        words: the same, to follow "wherever".
        held: what the results are held for, a key of `HELD`.
        facts: that the rule names.
        wrong, results: wrong results within it, and all within it.
        right_outside, outside: right results outside it, and all outside it.
    """

    rule: str
    words: str
    held: str
    facts: tuple[str, ...]
    wrong: int
    results: int
    right_outside: int
    outside: int

    @property
    def counts(self) -> str:
        """Return the counts in words."""
        where = f" with {self.rule}" if self.rule else ""
        inside = f"{_within(HELD[self.held])} in {self.wrong:,} of {self.results:,} results{where}"
        return inside + (f", right in {self.right_outside:,} of {self.outside:,} others" if self.outside else "")

    def as_record(self) -> dict[str, Any]:
        """Return the region as JSON data."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}


class Smallest(NamedTuple):
    """The smallest wrong case of a region, the result in it, and one of its vectors."""

    verdict: "CaseVerdict"
    result: str
    example: WrongVector | None


@dataclass(frozen=True)
class Diagnosis:
    """What verdicts say together.

    Attributes:
        sentence: is it right and, if not, what is broken.
        regions: where, the plainest and then the largest first.
        smallest: a case of each region.
        follows: checks that say no more than that, a sentence each.
    """

    sentence: str
    regions: tuple[Region, ...] = ()
    smallest: tuple[Smallest, ...] = ()
    follows: tuple[str, ...] = ()

    def as_record(self) -> dict[str, Any]:
        """Return the diagnosis as JSON data: `sentence`, `regions`, `smallest` and `follows`."""
        record: dict[str, Any] = {"sentence": self.sentence, "regions": [each.as_record() for each in self.regions]}
        if self.smallest:
            verdict, result, example = self.smallest[0]
            record["smallest"] = {"case": verdict.number, "check": verdict.check, "result": result}
            if example is not None:
                shown = {"expected": example.expected, "got": example.got}
                record["smallest"] |= {"where": example.where} | {
                    name: list(map(str, values)) for name, values in shown.items()
                }
        return record | {"follows": list(self.follows)}


def diagnose(verdicts: Sequence["CaseVerdict"], *, is_whole: bool = True) -> Diagnosis:
    """Return what the verdicts say together; those of KNOWN findings and declined ones say nothing.

    Args:
        verdicts: of a run.
        is_whole: no case of the run was left out.
    """
    if deceived := [each for each in verdicts if each.outcome is Outcome.DISHONEST]:
        return Diagnosis(f"Dishonest, and not judged: {deceived[0].judged.wrongs[0]}.")
    told = [each for each in verdicts if each.outcome in (Outcome.RIGHT, *BROKEN)]
    results = [(verdict, result) for verdict in told for result in _results_of(verdict)]
    if not any(result.wrong for _, result in results):
        return Diagnosis(_without_wrong_ones(verdicts, told))
    regions: list[Region] = []
    smallest: list[Smallest] = []
    rules: list[Rule] = []
    untold = 0
    for held in HELD:
        kind = _kind(results, held)
        if not kind.wrong.any() or _follows_from(kind, held, rules, results):
            continue
        found, others = _regions(kind, held)
        untold += others
        for rule, region in found:
            rules.append(rule)
            regions.append(region)
            smallest.append(_smallest(results, rule, held))
    return Diagnosis(_sentence(regions, untold, is_whole), tuple(regions), tuple(smallest), tuple(_follows(told)))


def _without_wrong_ones(verdicts: Sequence["CaseVerdict"], told: Sequence["CaseVerdict"]) -> str:
    known = sum(verdict.outcome is Outcome.KNOWN for verdict in verdicts)
    if not told and not known:
        return (
            f"Nothing could be judged: {f'{len(verdicts):,} cases, all declined' if verdicts else 'no case was begun'}."
        )
    results = sum(verdict.judged.judged for verdict in told)
    right = f"{results:,} results of {len(told):,} cases are what they must be"
    declined = sum(verdict.outcome is Outcome.DECLINED for verdict in verdicts)
    if 2 * declined > len(verdicts):
        right += f"; most, {declined:,} of {len(verdicts):,} cases, were declined"
    return f"Right but for known findings, in {known:,} cases; {right}." if known else f"Right: {right}."


def _results_of(verdict: "CaseVerdict") -> tuple[CheckedResult, ...]:
    """Return a verdict's results; one of a crash, or that was read from a file, has none but what its case says."""
    if verdict.judged.results:
        return verdict.judged.results
    is_wrong = verdict.outcome is not Outcome.RIGHT
    held = "return" if verdict.outcome is Outcome.FAILED else "output"
    return (CheckedResult(THE_CASE, {"held": held, **_facts_of_case(verdict)}, is_wrong),)


def _facts_of_case(verdict: "CaseVerdict") -> dict[str, Fact]:
    found = facts_of_case(verdict.case)
    told = together(found.facts, found.of_requests)
    return {name: value for name, value in told.items() if name not in PLACES}


class _Kind(NamedTuple):
    """Units among which rules of one kind are searched: requests of results, or results where requests are not told apart.

    Attributes:
        units: facts of each.
        wrong: whether each is.
        result_of: number of each one's result.
        case_of: number of each one's case.
    """

    units: list[Facts]
    wrong: Bits
    result_of: Bits
    case_of: list[int]


def _kind(results: Sequence[tuple["CaseVerdict", CheckedResult]], held: str) -> _Kind:
    """Return the units of the results that are held for something."""
    kinds = {held, "output", "lists", "metadata"} if held in WITHOUT_RIGHT_ONES else {held}
    chosen = [(verdict, result) for verdict, result in results if result.facts["held"] in kinds]
    # The arguments of a call that crashed are not known. Beside such results all others have the facts of their cases alone.
    by_case = held in WITHOUT_RIGHT_ONES and any(
        result.name == THE_CASE and result.facts["held"] == held for _, result in chosen
    )
    units: list[Facts] = []
    wrong: list[bool] = []
    result_of: list[int] = []
    case_of: list[int] = []
    cases: dict[int, int] = {}
    for number, (verdict, result) in enumerate(chosen):
        counts = result.facts["held"] == held
        shared: dict[str, Fact] = {**result.facts, "result": result.name}
        del shared["held"]
        if result.name in (IT_FAILED, THE_CASE):
            del shared["result"]  # "it fails wherever it failed" tells nothing
        parts = [(facts, is_wrong) for facts, is_wrong in result.requests if facts.get("q_len") != 0]
        if held in WITHOUT_RIGHT_ONES:
            shared = _facts_of_case(verdict) if by_case else together(shared, [facts for facts, _ in parts])
            parts = []
        if not counts or (result.wrong and not any(is_wrong for _, is_wrong in parts)):
            parts = []  # what is wrong is of none of its requests
        for facts, is_wrong in parts or [({}, result.wrong)]:
            units.append(ChainMap(dict(facts), shared))
            wrong.append(bool(is_wrong and counts))
            result_of.append(number)
            case_of.append(cases.setdefault(id(verdict), len(cases)))
    return _Kind(units, np.array(wrong, dtype=bool), np.array(result_of, dtype=int), case_of)


def _holds(rule: Rule, units: Iterable[Facts]) -> Bits:
    return np.array([all(literal.holds(facts) for literal in rule) for facts in units], dtype=bool)


def _follows_from(
    kind: _Kind, held: str, rules: Sequence[Rule], results: Sequence[tuple["CaseVerdict", CheckedResult]]
) -> bool:
    """Tell whether what is wrong of a kind lies where a plainer one is; an LSE's, if the outputs beside it are wrong."""
    if held in FOLLOWS_FROM_NOTHING or (held == "LSE" and not _outputs_are_wrong(results)):
        return False
    units = [facts for facts, is_wrong in zip(kind.units, kind.wrong, strict=True) if is_wrong]
    inside = np.zeros(len(units), dtype=bool)
    for rule in rules:
        inside |= _holds(rule, units)
    return bool(inside.mean() >= EXPLAINED)


def _outputs_are_wrong(results: Sequence[tuple["CaseVerdict", CheckedResult]]) -> bool:
    """Tell whether most results whose LSE is wrong have a wrong output too."""
    wrong = {
        held: {(id(v), r.name) for v, r in results if r.wrong and r.facts["held"] == held} for held in ("output", "LSE")
    }
    return len(wrong["LSE"] & wrong["output"]) > len(wrong["LSE"]) / 2


def _regions(kind: _Kind, held: str) -> tuple[list[tuple[Rule, Region]], int]:
    """Return the rules of a kind with their regions, and how many results of it are wrong outside all of them.

    Results are counted, not their requests.
    """
    number = int(kind.result_of.max()) + 1
    present, wrong_results = np.zeros(number, dtype=bool), np.zeros(number, dtype=bool)
    present[kind.result_of] = True
    wrong_results[kind.result_of[kind.wrong]] = True
    found: list[tuple[Rule, Region]] = []
    told = np.zeros(number, dtype=bool)
    for rule in _rules(kind):
        holds = _holds(rule, kind.units)
        inside, wrong_inside = np.zeros(number, dtype=bool), np.zeros(number, dtype=bool)
        inside[kind.result_of[holds]] = True
        wrong_inside[kind.result_of[holds & kind.wrong]] = True
        if found and not (wrong_inside & ~told).any():
            continue  # another request of results that a rule before tells
        told |= wrong_inside
        outside = present & ~inside
        region = Region(
            rule=" and ".join(map(str, rule)),
            words=" and ".join(literal.phrase for literal in rule),
            held=held,
            facts=tuple(literal.fact for literal in rule),
            wrong=int(wrong_inside.sum()),
            results=int(inside.sum()),
            right_outside=int((outside & ~wrong_results).sum()),
            outside=int(outside.sum()),
        )
        found.append((rule, region))
    return found, int((wrong_results & ~told).sum())


def _rules(kind: _Kind) -> list[Rule]:
    """Search the rules, among every so many units where there are very many."""
    weights = weights_of(kind.case_of)
    chosen = []
    for side in (np.flatnonzero(kind.wrong), np.flatnonzero(~kind.wrong)):
        step = max(1, -(-len(side) // MOST_UNITS))
        weights[side] *= step
        chosen.append(side[::step])
    at = np.sort(np.concatenate(chosen))
    return find_rules([dict(kind.units[number]) for number in at], kind.wrong[at], weights[at])


def _smallest(results: Sequence[tuple["CaseVerdict", CheckedResult]], rule: Rule, held: str) -> Smallest:
    """Return the wrong result of a region with the fewest rows times keys times heads; one with a vector if there is one."""

    def size(each: tuple["CaseVerdict", CheckedResult]) -> tuple[bool, bool, int]:
        facts = each[1].facts
        numbers = [facts.get(name, 1) for name in ("rows_of_batch", "longest kv_len", "num_qo_heads")]
        rows, keys, heads = (number if isinstance(number, int) else 1 for number in numbers)
        return (not _is_inside(each[1], rule), each[1].example is None, max(rows, 1) * max(keys, 1) * max(heads, 1))

    verdict, result = min((each for each in results if each[1].wrong and each[1].facts["held"] == held), key=size)
    return Smallest(verdict, result.name, result.example)


def _is_inside(result: CheckedResult, rule: Rule) -> bool:
    parts = result.requests or ((result.facts, result.wrong),)
    units = [{**result.facts, "result": result.name, **facts} for facts, is_wrong in parts if is_wrong]
    return bool(units) and bool(_holds(rule, units).any())


def _sentence(regions: Sequence[Region], untold: int, is_whole: bool) -> str:
    """Say what is broken: the first region whole, others by their words, and whether anything else is wrong.

    Args:
        regions: the plainest kind's first.
        untold: results that are wrong outside the regions of their kind.
        is_whole: no case was left out.
    """
    first, *others = regions
    where = f"wherever {first.words}" if first.rule else "everywhere"
    told = f"{HELD[first.held]} {where} ({first.wrong:,} of {first.results:,} results)"
    alike = [other for other in others if other.held == first.held]
    for other in alike[:MOST_TOLD]:
        told += f"; and wherever {other.words} ({other.wrong:,} of {other.results:,})"
    for held in dict.fromkeys(other.held for other in others if other.held != first.held):
        parts = [other for other in others if other.held == held][:MOST_TOLD]
        words = " or ".join(f"wherever {other.words}" if other.rule else "everywhere" for other in parts)
        told += f"; {_within(HELD[held])} {words}"
    if untold:
        others_are = f"{untold:,} other results are" if untold > 1 else "another result is"
        return f"{told}; {others_are} wrong too."
    if len(regions) > 1 or not first.rule:
        return f"{told}."
    return f"{told}; everything else {'is' if is_whole else 'that was judged is'} right."


def _within(sentence: str) -> str:
    """Return a sentence's beginning as it stands within another."""
    return sentence[0].lower() + sentence[1:]


def _follows(verdicts: Sequence["CaseVerdict"]) -> list[str]:
    """Return the checks of each function all of whose wrong cases are wrong in their plain call."""
    firsts: dict[tuple[str, str], list[bool]] = {}
    for verdict in verdicts:
        if verdict.outcome is not Outcome.RIGHT and (results := verdict.judged.results):
            plain = results[0].wrong and results[0].facts["held"] not in WITHOUT_RIGHT_ONES
            firsts.setdefault((verdict.interface.name.lower(), verdict.check), []).append(plain)
    found: dict[str, list[str]] = {}
    for (function, check), plain_calls in firsts.items():
        if all(plain_calls):
            found.setdefault(function, []).append(check)
    return [
        f"plain call already wrong, so no more is told: {', '.join(sorted(keys, key=_place))} of {name}"
        for name, keys in found.items()
    ]


def _place(key: str) -> tuple[str, int]:
    """Return a key's place in the catalogue."""
    return key[0], int(key[1:])
