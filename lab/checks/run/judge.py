"""Judge an implementation of attention functions: run checks on its functions, and report the verdict on each case."""

import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lab.checks.parameters.covering import Shard
from lab.checks.properties.check import Check, Level
from lab.checks.properties.recorded import check_of
from lab.checks.record import ReportError, read_case, read_record, replaceable
from lab.checks.report import Report
from lab.checks.run.judge_run import Progress, Run
from lab.checks.run.judging import Refusals, checks_named, device_of, named_implementation, note_current
from lab.checks.run.known_failures import KNOWN_FAILURES, Findings, known
from lab.checks.run.sources import digest_of_files, earlier_verdicts, offer_of
from lab.checks.run.verdicts import CaseVerdict
from lab.checks.run.workers import Workers
from lab.gpus import capability_of
from lab.loading import is_same_module, load, module_of, place_of
from lab.names import functions_named, of_name, profile_name
from lab.provenance import environment
from lab.ranges import Ranges
from lab.recorded.case import NAME_OF_OUTPUTS, recorded_cases
from lab.workloads.interfaces import Interface, interfaces_of

DRAWN_CASES = {Level.QUICK: 0, Level.SMOKE: 2, Level.FULL: 16}
MOST_SECONDS = {Level.QUICK: 17.0}  # the whole run, with the start of workers and the diagnosis, takes 30 s
LEAST_SECONDS = 8.0  # in which cases begin after the start of the first worker, which is slow on a busy machine
TIME_LIMIT_S, LONGEST_LIMIT_S = 120.0, 7 * 86_400.0
WORKERS_PER_CORE, LEAST_MOST_WORKERS, MOST_DRAWN = 4, 16, 1_000_000
OF_LAB = "lab."  # the lab's own kernels are found wherever the lab runs
VERDICT_PARTS = ("python", "packages", "gpu", "capability", "cuda")  # keys of the environment on which verdicts depend


def judge(
    implementation: Any,
    *,
    level: Level | str = Level.SMOKE,
    ranges: Ranges | None = None,
    only: str | Sequence[str | Check] = (),
    functions: Sequence[str] = (),
    device: torch.device | str | None = None,
    isolated: bool = False,
    workers: int | Workers = 1,
    time_limit_s: float = TIME_LIMIT_S,
    most_seconds: float | None = None,
    drawn: int | None = None,
    refusals: Sequence[type[BaseException]] | str | None = None,
    known_failures: Findings = KNOWN_FAILURES,
    progress: Callable[[Progress], None] | None = None,
    out: Path | str | None = None,
    fresh: bool = False,
    first_failure: bool = False,
    discover: bool = True,
    seed: int | None = None,
    profile: str = "",
    for_seconds: float = 0.0,
    shard: str = "",
) -> Report:
    """Find out whether an implementation is right: run checks on its functions, and return the report.

    A check judges many cases, which describe calls. A refused call (`lab.checks.run.support_protocol`) is made again with
    equivalent arguments. If these are refused too, the case is DECLINED. After Ctrl-C, the report has the verdicts so far.

    Args:
        implementation: a module or object with at least one of the functions in `lab.workloads.interfaces.INTERFACES`, or its
            name: "package.module" or "path/to/file.py", either with ":attribute" after it.
        level: QUICK, SMOKE or FULL, or "quick", "smoke" or "full".
        ranges: the parameter values of the cases, such as dtypes and page sizes. Narrow them to those that a kernel supports.
        only: the checks to run, each by key ("K4"), by name ("poison") or as a `Check`; () for all checks.
        functions: the functions to judge, by FlashInfer's names or short ones such as "decode"; () for all.
        device: the device to run on; None for a GPU if there is one, else the CPU.
        isolated: judge cases in worker processes, which are replaced if they crash or hang. The implementation must be a name.
        workers: number of worker processes if `isolated`; or open `Workers` with the same implementation and settings.
        time_limit_s: time limit of one case if `isolated`.
        most_seconds: no case begins later, except within 8 s (or `most_seconds`, if less) after the first worker's start. Cases
            that run 2 s after the end are left out. None: 17 s (or a larger `for_seconds`) at the quick level, else no limit.
        drawn: number of random cases for each check and function; None for the default of the level.
        refusals: the exceptions that count as refusals, or their names; None for those of `support_protocol.invoke`.
        known_failures: documented failures, by page and heading. A wrong case that they explain is KNOWN, not WRONG.
        progress: called after each verdict, with the verdict and the counts of the run.
        out: file of the report, which is written during the run.
        fresh: judge all cases. False: keep right and declined verdicts of the report `out` if settings and sources are equal.
        first_failure: begin no case after the first wrong or failed case.
        discover: if most cases of a function are declined, judge it again with the parameter values that it accepts.
        seed: seed of random choices, instead of the seed in `ranges` (default 0).
        profile: name of an engine ("sglang" or "vllm"), to judge only the cases that this engine sends; "" for all cases.
        for_seconds: after the level's cases, judge random cases of check K18 (combinations) until the run has taken this time.
        shard: the part of the run to judge, such as "3/8". `lab.checks.record.merged` unites the reports of all parts.

    Raises:
        ValueError: the implementation has none of the functions, a setting is invalid, or a name in `refusals` is no exception.
        lab.loading.LoadError: the implementation cannot be imported.
    """
    start, depth = time.monotonic(), _level_of(level, profile, shard)
    where, chosen, wanted = device_of(device), checks_named(only), functions_named(functions)
    _check_settings(isolated, implementation, time_limit_s, workers, drawn, most_seconds)
    name, subject = (implementation, implementation) if isolated else named_implementation(implementation)
    path = None if out is None else replaceable(Path(out))
    refused = None if refusals is None else Refusals.of(refusals, name)
    given = (ranges or Ranges()) if seed is None else replace(ranges or Ranges(), seed=seed)
    count = DRAWN_CASES[depth] if drawn is None else drawn
    finds = partial(known, findings=known_failures, capability=capability_of(where))
    most = max(MOST_SECONDS.get(depth, math.inf), for_seconds) if most_seconds is None else most_seconds
    opened = workers if isinstance(workers, Workers) else Workers(subject, where, given, time_limit_s, workers, refused)
    with nullcontext(opened) if opened is workers else opened as pool:
        offered, sources = _offered(pool, name, wanted, isinstance(implementation, str) and bool(path or shard))
        report = Report(name, depth, environment(), str(where), (), ranges=given, profile=profile, shard=shard)
        report = replace(report, refusals=refused.names if refused else (), folder=_folder_of(implementation))
        digest = _digest(report, sources, offered, [each.key for each in chosen], count, discover)
        report, earlier = replace(report, run=digest), {} if fresh else earlier_verdicts(path, digest)
        end = max(start + most, time.monotonic() + min(most, LEAST_SECONDS))
        run = Run(pool, report, chosen, count, end, first_failure, earlier, path, finds, progress)
        return run.judge(offered, discover, start + for_seconds)


def judge_calls(recording: Path | str, implementation: str = NAME_OF_OUTPUTS, **settings: Any) -> Report:
    """Judge recorded calls of an engine: the recorded results, or the results of an implementation for the recorded inputs.

    The expected results are computed from the K/V that the recorded page table names, so that wrong page ids are not found.
    The case of each verdict is a `lab.recorded.case.RecordedCase`. Raises the errors of `judge`.

    Args:
        recording: a folder of calls that `lab record` or FlashInfer recorded, or "FOLDER#3" for only the third call.
        implementation: name of the implementation that is called; by default the recorded results are judged.
        settings: other settings of `judge`.
    """
    cases = recorded_cases(recording)
    functions = list(dict.fromkeys(case.interface.value for case in cases))
    chosen: dict[str, Any] = {"only": [check_of(cases)], "functions": functions}
    return judge(implementation, **chosen, drawn=0, discover=False, fresh=True, **settings)


def judge_recorded(
    path: Path | str,
    number: int,
    *,
    implementation: str | None = None,
    device: torch.device | str | None = None,
    isolated: bool = True,
    time_limit_s: float = TIME_LIMIT_S,
    refusals: Sequence[type[BaseException]] | str | None = None,
) -> CaseVerdict:
    """Judge one case of a report again. Known failures are not looked up: a case that is KNOWN in the report is WRONG here.

    Args:
        path: path of the report.
        number: number of the case in the report, from 1.
        implementation: name of the implementation to import; None for the implementation of the report.
        device: the device to run on; None for the device of the report.
        refusals: exceptions that count as refusals, or their names; None for those of the report, which must be built-in or
            from the kernel's package.
        isolated, time_limit_s: judge in a worker process, within this time limit.

    Raises:
        lab.checks.record.ReportError: there is no such report or case, or the report has refusals of another package.
        lab.loading.LoadError: the implementation cannot be imported.
    """
    was = read_case(Path(path), number)
    name, where = implementation or was.implementation, device_of(device or was.device)
    _check_settings(isolated, name, time_limit_s)
    refused = _recorded_refusals(Path(path), name) if refusals is None else Refusals.of(refusals, name)
    note_current()
    with Workers(name if isolated else load(name), where, was.ranges, time_limit_s, refusals=refused) as pool:
        pool.call(interfaces_of)
        judged = pool.submit(was.check, was.case)()
    return replace(was, implementation=name, device=str(where), judged=judged, finding="")


def _recorded_refusals(path: Path, kernel: str) -> Refusals | None:
    # A report must not decide which modules are imported.
    names = list(map(str, read_record(path).get("refusals") or ()))
    own = kernel.partition(":")[0]
    package = module_of(Path(own))[0] if own.endswith(".py") else own.partition(".")[0]
    for name in names:
        module = name.rpartition(":" if ":" in name else ".")[0]
        if module and module.partition(".")[0] not in ("builtins", package) and not is_same_module(module, own):
            raise ReportError(
                f"{path} counts {name} as a refusal, which is not in the kernel's package {package}: name it by --refusals"
            )
    return Refusals.of(",".join(names), kernel) if names else None


def _digest(report: Report, sources: str, *settings: Any) -> str:
    machine = [report.environment.get(part) for part in VERDICT_PARTS]
    whole = replace(report, environment={}, shard="", folder="")  # the shards of a run have one digest
    return hashlib.sha256(repr((sources, whole, machine, settings)).encode()).hexdigest() if sources else ""


def _folder_of(implementation: Any) -> str:
    if not isinstance(implementation, str) or implementation.startswith(OF_LAB):
        return ""
    folder = Path.cwd()
    is_anywhere = place_of(implementation, folder) == place_of(implementation, Path(folder.root))
    return "" if is_anywhere else str(folder)


def _offered(pool: Workers, name: str, wanted: Sequence[Interface], is_digested: bool) -> tuple[list[Interface], str]:
    has, sources = pool.call(partial(offer_of, name if is_digested else ""))
    if not (offered := [each for each in has if each in wanted]):
        raise ValueError(f"{name} has none of {', '.join(each.value for each in wanted)}")
    return offered, sources and sources + digest_of_files(name)


def _level_of(level: Level | str, profile: str, shard: str) -> Level:
    found = of_name(level, {each: (each.value,) for each in Level}, "level")
    if profile:
        profile_name(profile)
    if Shard.of(shard) != Shard() and found is Level.QUICK:
        raise ValueError(f"shard={shard}: the quick level is not divided, as it takes half a minute")
    return found


def _check_settings(
    isolated: bool,
    implementation: Any,
    time_limit_s: float,
    workers: int | Workers = 1,
    drawn: int | None = None,
    most_seconds: float | None = None,
) -> None:
    if isolated and not isinstance(implementation, str):
        raise ValueError(f"an isolated judge imports the implementation by name; got {implementation!r}")
    most_workers = max(LEAST_MOST_WORKERS, WORKERS_PER_CORE * (os.cpu_count() or 1))
    if isinstance(workers, int) and not 1 <= workers <= most_workers:
        raise ValueError(f"workers={workers} must be from 1 to {most_workers} on this machine")
    if not 0 < time_limit_s <= LONGEST_LIMIT_S:
        raise ValueError(
            f"time_limit_s={time_limit_s} must be more than 0 and at most {LONGEST_LIMIT_S:g} seconds for each case"
        )
    if drawn is not None and not 0 <= drawn <= MOST_DRAWN:
        raise ValueError(f"drawn={drawn} must be from 0 to {MOST_DRAWN} cases, or None for the level's number")
    if most_seconds is not None and not most_seconds >= 0:
        raise ValueError(f"most_seconds={most_seconds} must be at least 0, or None for the level's time")
