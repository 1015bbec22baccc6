"""Record which checks find which mutants: `lab mutants --out results/mutants.json.gz`.

Every mutant of `corpus.mutants` is judged at the smoke level by every check that applies to it, each until its first wrong
case. A mutant that no check finds is also judged by K18 at the full level, which combines arguments in pairs. The matrix also
has the verdict of each upstream tolerance rule on the mutant, for inputs as upstream's tests draw them.
"""

import functools
import json
import resource
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from corpus.kernels import MUTANTS, kernel
from corpus.upstream_rules import UPSTREAM_RULES, passes
from corpus.wrong import WrongKernel
from lab.calls.problem import AttentionCall
from lab.checks.case_run import CaseRun
from lab.checks.properties import checks, checks_by_key
from lab.checks.properties.check import Check, Level
from lab.checks.run.judging import run_case
from lab.checks.run.support_protocol import KernelError, Unsupported
from lab.checks.run.verdicts import BROKEN
from lab.files import without_suffix, write_text
from lab.interpreter import quicken
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Storage
from lab.workloads.inputs.attention import build_attention
from lab.workloads.interfaces import PAGED_CALLS, Interface, interface_of

# Small enough for every mutant on a CPU, wide enough that each axis takes every value.
RANGES = Ranges(
    num_kv_heads=(1, 2),
    head_dims=(64, 256),
    page_sizes=(16, 128),
    mla_head_dims=((80, 64),),
    mla_heads=(4, 128),
    long_requests=(4_100, 16_500),
    longest=150,
)
COMBINATIONS = "K18"  # the check whose full level has the pairs of arguments that show some mutants
# K18 has cases for values that no other check has: the ranges of its cases are as wide as its mutants need.
COMBINED_RANGES = replace(
    RANGES,
    head_dims=Ranges().head_dims,
    page_sizes=Ranges().page_sizes,
    mla_head_dims=(*RANGES.mla_head_dims, (64, 64), (224, 128)),
    mla_heads=(*RANGES.mla_heads, 32, 64, 24, 20),
)
# A mutant that copies a pool of large ids would take all of a small machine's memory; that it is stopped is no finding.
MOST_MEMORY_BYTES = 24 * 2**30
NO_MEMORY = "can't allocate memory"


def record_of(name: str) -> dict[str, Any]:
    """Judge the mutant of this name by every check. (Its class cannot be pickled.)

    Returns:
        The mutant's record in results/mutants.json.gz: the description of the mutant, `kills` (the `first_kill` of each check
        that finds it, by the check's key) and `upstream` (see `let_through`).
    """
    judged = kernel(name)
    let = let_through(judged)
    kills = {check.key: kill for check in checks() if (kill := first_kill(judged, check)) is not None}
    if not kills and (kill := first_kill(judged, checks_by_key()[COMBINATIONS], Level.FULL)) is not None:
        kills[COMBINATIONS] = kill
    return {
        "mutant": judged.name,
        "defect": judged.defect,
        "source": judged.source,
        "interface": list(judged.interface),
        "kills": kills,
        "upstream": None if let is None else list(let),
    }


def ranges_of(check: Check) -> Ranges:
    """Return the axes on which a check judges mutants."""
    return COMBINED_RANGES if check.key == COMBINATIONS else RANGES


def cases_of(check: Check, interface: Interface, level: Level) -> Iterator[Any]:
    """Yield a check's cases for mutants; at the full level only the cases that the smoke level does not have."""
    cases = check.cases(interface, ranges_of(check), level) if interface in check.interfaces else ()
    known = set(map(repr, cases_of(check, interface, Level.SMOKE))) if level is Level.FULL else set()
    yield from (case for case in cases if repr(case) not in known)


def first_kill(judged: WrongKernel, check: Check, level: Level = Level.SMOKE) -> dict[str, str] | None:
    """Return the first case of a check in which a mutant is wrong; each case gets a new instance of the mutant.

    Returns:
        `case` (its `repr`), `interface` (the function's name) and `wrong` (the first sentence about the error), or None.
    """
    for interface in map(interface_of, judged.interface):
        for case in cases_of(check, interface, level):
            quicken()
            found = run_case(judged.implementation(), check, case, torch.device("cpu"), ranges_of(check))
            if found.outcome in BROKEN and NO_MEMORY not in found.wrongs[-1]:
                return {"case": repr(case), "interface": interface.value, "wrong": found.wrongs[0]}
    return None


# What upstream's tests draw (`upstream_rules`): normal inputs, short requests, windows that never truncate, scales of 1.
UPSTREAM_LENGTHS = (110, 1024, 8192)


def upstream_case(interface: AttentionCall, kv_len: int, q_len: int) -> AttentionCase:
    """Return a case of four requests with the same length, as in `test_trtllm_gen_attention_decode`: 16/2 heads of 128, pages
    of 64.
    """
    if interface is AttentionCall.MLA_DECODE:
        heads: dict[str, Any] = {"num_kv_heads": 1, "head_dim": 80, "v_head_dim": 64}
    else:
        short = kv_len == UPSTREAM_LENGTHS[0]
        heads = {"num_kv_heads": 2, "head_dim": 128, "window_left": 127 if short else -1, "sinks": short}
    return AttentionCase(interface, (kv_len,) * 4, (q_len,) * 4, group=8, storage=Storage(page_size=64), **heads)


def let_through(judged: WrongKernel) -> tuple[int, ...] | None:
    """Return the numbers of the upstream rules that accept a mutant's outputs at every length, on inputs as upstream's tests
    draw them.

    Every rule accepts a declined call. The result is None for a mutant without an output.
    """
    names = [AttentionCall(name) for name in judged.interface if name in {each.value for each in PAGED_CALLS}]
    if not names:
        return None
    passing = set(range(len(UPSTREAM_RULES)))
    for interface in names:
        for kv_len in UPSTREAM_LENGTHS:
            passing &= _passing(judged, upstream_case(interface, kv_len, 4))
    return tuple(sorted(passing))


def _passing(judged: WrongKernel, case: AttentionCase) -> set[int]:
    run = CaseRun(judged.implementation(), case, torch.device("cpu"))
    inputs = run.build()
    try:
        out = run.call(inputs).out
    except Unsupported:
        return set(range(len(UPSTREAM_RULES)))
    except KernelError:
        return set()
    expected = _upstream_truth(case)
    if out.shape != expected.shape:
        return set()
    return {number for number, rule in enumerate(UPSTREAM_RULES) if passes(rule, out, expected)}


@functools.lru_cache(maxsize=16)
def _upstream_truth(case: AttentionCase) -> torch.Tensor:
    """Return the expected output, which is the same for every mutant."""
    return build_attention(case, torch.device("cpu")).truth().expected


TITLE = "# Which check finds which mutant"
LEGEND = (
    "A *mutant* is a kernel with one deliberate defect; `lab judge corpus:NAME` judges the mutant NAME. A cross marks each "
    "[check](../docs/checks.md) of the judge that finds the mutant of the row. `UPSTREAM_RULES` of `corpus.upstream_rules` has "
    "the tolerance rules of other projects' tests, numbered from 0. The last column has the numbers of the rules that accept "
    "the mutant's outputs for the kind of inputs that these tests use. In the last column, *all* means that every rule accepts "
    "the outputs, – means that no rule accepts the outputs, and an empty cell means that the rules do not apply to the mutant."
)


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """Render the matrix as a table: a cross for each check that finds the mutant, and the upstream rules that accept it."""
    keys = [check.key for check in checks()]
    columns = f"| mutant | {' | '.join(keys)} | passes upstream rules |"
    rows = [TITLE, "", LEGEND, "", columns, f"|---|{'---|' * (len(keys) + 1)}"]
    for record in records:
        marks = ["×" if key in record["kills"] else "" for key in keys]
        rows.append(f"| {record['mutant']} | {' | '.join(marks)} | {_accepting(record['upstream'])} |")
    return "\n".join(rows) + "\n"


def _accepting(upstream: Sequence[int] | None) -> str:
    """Return the cell of the upstream rules that accept a mutant; None if the rules do not apply."""
    if upstream is None:
        return ""
    return "all" if len(upstream) == len(UPSTREAM_RULES) else " ".join(map(str, upstream)) or "–"


def _start_worker() -> None:
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))


def write_matrix(out: Path, mutants: Sequence[WrongKernel], workers: int) -> bool:
    """Judge mutants and write the matrix; return True if each mutant is found and, with all mutants, each check finds at least
    one.

    Args:
        out: path of the JSON file, which is rewritten after each mutant; the table is written to the same path with ".md".
        mutants: the mutants to judge.
        workers: number of concurrent processes.
    """
    records = []
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker) as pool:
        for record in pool.map(record_of, [mutant.name for mutant in mutants]):
            records.append(record)
            write_text(out, json.dumps(records, indent=1) + "\n")  # what is done stays, whatever comes
            kills = ", ".join(record["kills"]) or "LIVES"
            print(f"{len(records)}/{len(mutants)} {record['mutant']}: {kills}", flush=True)
    write_text(without_suffix(out).with_suffix(".md"), markdown(records))
    alive = [record["mutant"] for record in records if not record["kills"]]
    idle = [check.key for check in checks() if not any(check.key in record["kills"] for record in records)]
    print(f"alive: {alive}; checks that killed none: {idle}")
    return not alive and (not idle or len(mutants) < len(MUTANTS))
