"""Measure whether the regions that a diagnosis names are the mutants' triggers.

    python -m tests.checks.measure_regions --workers 32 --out results/diagnosis.json.gz

Each mutant is judged by every check on the axes of results/mutants.json.gz, one that is right there by the full level of K18
too, and its diagnosis is held to mutant_triggers.json: features that were written down from each defect before any region of it
was seen. A trigger has alternatives; each lists concepts that a region must all name, by any of their features, and an empty
one says that the mutant is wrong everywhere.
"""

import argparse
import functools
import json
import resource
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from corpus.kernels import MUTANTS, kernel
from corpus.matrix import COMBINATIONS, MOST_MEMORY_BYTES, NO_MEMORY, cases_of, ranges_of
from lab.checks.explain.diagnosis import Region, diagnose
from lab.checks.properties import checks, checks_by_key
from lab.checks.properties.check import Check, Level
from lab.checks.run.judging import run_case
from lab.checks.run.verdicts import BROKEN, CaseVerdict, Outcome
from lab.files import without_suffix, write_text
from lab.interpreter import quicken
from lab.workloads.interfaces import interface_of

TRIGGERS = Path(__file__).with_name("mutant_triggers.json")
GOAL = 0.8  # of the mutants that are found, whose region must name the trigger
CPU = torch.device("cpu")


@functools.cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(TRIGGERS.read_text())
    return known


def names_trigger(region: Region, name: str) -> bool:
    """Tell whether a region names the trigger of the mutant with that name."""
    named = {name for literal in region.literals for name in literal.features} | {f"held == '{region.held}'"}
    named |= {f"{literal.feature} {literal.operator}" for literal in region.literals}
    concepts = _known()["concepts"]
    return any(
        not region.rule if not trigger else all(named & set(concepts[concept]) for concept in trigger)
        for trigger in _known()["triggers"][name]
    )


def _judged(name: str, chosen: Sequence[Check], level: Level) -> Iterator[CaseVerdict]:
    """Judge a mutant, a fresh implementation for each case; what a small machine's memory stops says nothing."""
    judged = kernel(name)
    for interface in map(interface_of, judged.interface):
        for check in chosen:
            ranges = ranges_of(check)
            for case in cases_of(check, interface, level):
                quicken()
                found = run_case(judged.implementation(), check, case, CPU, ranges)
                if found.outcome is Outcome.FAILED and any(NO_MEMORY in wrong for wrong in found.wrongs):
                    continue
                yield CaseVerdict(name, check.key, interface, case, "cpu", found, ranges)


def record_of(name: str) -> dict[str, Any]:
    """Judge a mutant and return its name, defect, trigger, diagnosis, and which of the regions name the trigger."""
    judged = kernel(name)
    verdicts = list(_judged(name, checks(), Level.SMOKE))
    if not any(verdict.judged.outcome in BROKEN for verdict in verdicts):
        verdicts += _judged(name, [checks_by_key()[COMBINATIONS]], Level.FULL)
    diagnosis = diagnose(verdicts)
    return {
        "mutant": name,
        "defect": judged.defect,
        "trigger": _known()["triggers"][name],
        "sentence": diagnosis.sentence,
        "regions": [region.counts for region in diagnosis.regions],
        "named_by": [number for number, region in enumerate(diagnosis.regions) if names_trigger(region, name)],
    }


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Say of how many mutants that were found the first region, or any, names the trigger."""
    found = [record for record in records if record["regions"]]
    first, some = (sum(test(record["named_by"]) for record in found) for test in (lambda by: 0 in by, bool))
    share = [f"{count} ({count / max(len(found), 1):.1%})" for count in (first, some)]
    return (
        f"The judge found {len(found)} of {len(records)} measured mutants (kernels with one deliberate defect) wrong. For "
        f"{share[0]} of the found mutants, the first rule of the judge's diagnosis names the inputs that make the mutant "
        f"wrong. For {share[1]} of the found mutants, one of the rules of the judge's diagnosis names the inputs that make the "
        "mutant wrong."
    )


LEGEND = (
    "The *trigger* of a mutant is the feature of a case that makes the mutant's result wrong. A *region* of the judge's "
    "diagnosis is a rule that separates wrong results from right results. The column *named by* says which region "
    "of the diagnosis names the mutant's trigger: the first region, a later region, or none."
)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Render the mutants, their defects and diagnoses, those whose trigger no region names first."""
    marks = {True: "first", False: "later"}
    rows = ["# Which regions name the trigger of a mutant", "", summary(records), "", LEGEND, ""]
    rows += ["| mutant | defect | named by | diagnosis |", "|---|---|---|---|"]
    for record in sorted(records, key=lambda each: (bool(each["named_by"]), 0 in each["named_by"])):
        by = marks[0 in record["named_by"]] if record["named_by"] else "none" if record["regions"] else "not found"
        cells = (record["mutant"], record["defect"], by, record["sentence"])
        rows.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(rows) + "\n"


def _start_worker() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def main(argv: Sequence[str] | None = None) -> int:
    """Judge and diagnose mutants; the exit status is 1 if fewer regions than the goal name their triggers."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks.measure_regions")
    parser.add_argument("--out", type=Path, required=True, help="JSON; a table is written beside it, .md")
    parser.add_argument("--mutants", nargs="+", default=list(MUTANTS))
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args(argv)
    records: dict[str, dict[str, Any]] = {}
    with ProcessPoolExecutor(given.workers, get_context("spawn"), _start_worker) as pool:
        waiting = {pool.submit(record_of, name): name for name in given.mutants}
        for done in as_completed(waiting):
            records[waiting[done]] = done.result()
            ordered = [records[name] for name in given.mutants if name in records]
            write_text(given.out, json.dumps(ordered, indent=1) + "\n")  # what is done stays, whatever comes
            last = records[waiting[done]]
            print(
                f"{len(records)}/{len(given.mutants)} {last['mutant']} {last['named_by']}: {last['sentence']}",
                flush=True,
            )
    write_text(without_suffix(given.out).with_suffix(".md"), markdown(ordered))
    print(summary(ordered))
    found = [record for record in ordered if record["regions"]]
    return 0 if sum(0 in record["named_by"] for record in found) >= GOAL * len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
