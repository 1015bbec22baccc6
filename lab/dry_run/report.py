"""Make the report of `lab dry-run`: kernel, grid, bytes and least possible time (floor) of each forward pass on an absent GPU,
or the reason why a call is not supported.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lab.dry_run.build import flashinfer_version
from lab.dry_run.launches import Launch
from lab.dry_run.passes import DryCall, DryPass, DryRun
from lab.exit_status import ExitStatus
from lab.gpus import DATASHEETS, Datasheet, sm_name
from lab.provenance import environment
from lab.reports.recorded import read_run
from lab.reports.recorded_file import RecordedFileError
from lab.reports.tables import Cell, Columns, TableReport, make_table, number, words
from lab.timing.forward import case_facts
from lab.timing.roofline import least_us
from lab.wording import counted

ATTENTION = "fmha"  # part of the names of trtllm-gen's kernels; a profiler also lists torch's kernels
IMPLEMENTATION = "lab.kernels.trtllm"
Profiled = Mapping[str, tuple[str, ...]]  # names of kernels by scenario


def profiled_kernels(path: Path) -> Profiled:
    """Return {scenario: kernels that lab.kernels.trtllm ran} in a `lab bench` file. Raises RecordedFileError if it has none."""
    rows = [row for row in read_run(path).rows if row.facts.get("implementation") == IMPLEMENTATION]
    found = {row.scenario: tuple(row.facts["kernels"]) for row in rows if row.facts.get("kernels")}
    if not found:
        raise RecordedFileError(
            f"{path}: it names no kernels of {IMPLEMENTATION}; record them with lab bench --lab-clock cupti"
        )
    return found


def dry_run_report(run: DryRun, profiled: Profiled | None = None) -> TableReport:
    """Return a table with one row per forward pass. `profiled` has the kernels that ran on a real GPU, for comparison."""
    datasheet = DATASHEETS[run.gpu.cuda_name]
    columns: Columns = {
        "pass": lambda each: words(each.name),
        "kernel": lambda each: words(_joined(each, _kernels)),
        "grid": lambda each: words(_of_launches(each, lambda launch: " x ".join(map(str, launch.grid)))),
        "cluster": lambda each: words(_of_launches(each, lambda launch: str(launch.cluster))),
        "bytes, MB": lambda each: number(each.case.bytes_moved, 2, 1e-6),
        "floor, µs": lambda each: number(_floor(each, datasheet)[0], 2),
        "bound": lambda each: words(_floor(each, datasheet)[1]),
        "refused": partial(_refused, run),
        "on the GPU": partial(_on_the_gpu, profiled or {}),
    }
    table = make_table(columns, run.passes, say_once=())
    above, record = _above(run, datasheet), _record(run, datasheet)
    if profiled is None:
        return TableReport(above, table, (_summary(run),), record)
    compared = [each for each in run.passes if each.name in profiled]
    differ = [each.name for each in compared if not _is_same(each, profiled[each.name])]
    summary = f"{len(compared) - len(differ)} of {counted(len(compared), 'pass')} ran the kernels of the dry run."
    record = {**record, "profiled": profiled, "compared": [each.name for each in compared], "differ": differ}
    status = ExitStatus.WRONG if differ else ExitStatus.DONE if compared else ExitStatus.NOT_JUDGED
    return TableReport(above, table, (_summary(run), summary), record, status)


def _is_same(dry_pass: DryPass, names: tuple[str, ...]) -> bool:
    launched = {short_name(launch) for call in dry_pass.calls for launch in call.launches}
    seen = [name for name in names if ATTENTION in name.lower()]
    found = {(name, other) for name in launched for other in seen if name in other}
    return {name for name, _ in found} == launched and {other for _, other in found} == set(seen)


def _on_the_gpu(profiled: Profiled, each: DryPass) -> Cell:
    if each.name not in profiled:
        return words(None)
    names = profiled[each.name]
    return words("the same") if _is_same(each, names) else words(", ".join(names), "failed")


def _summary(run: DryRun) -> str:
    calls = [call for each in run.passes for call in each.calls]
    refused, failed = (sum(getattr(call, name) is not None for call in calls) for name in ("refusal", "failure"))
    without = f", {failed} without a kernel" if failed else ""
    return f"{run.gpu.name}: {counted(len(calls), 'call')}, {refused} refused{without}. Nothing was run."


def _above(run: DryRun, datasheet: Datasheet) -> tuple[str, str, str]:
    gpu, rate = run.gpu, datasheet.matrix_rate_tflops
    source = f"Kernels are by the rules of lab.kernels.support alone: {run.by_rules_because}."
    if run.by_rules_because is None:
        launcher = f"The launcher of FlashInfer {flashinfer_version()}"
        source = f"{launcher} chose kernels and grids from the kernel table of {run.table}, with a fake CUDA driver."
    operations = "" if rate is None else f", or operations divided by {rate:g} TFLOP/s of bf16, whichever is longer"
    return (
        f"Simulated GPU: {gpu.name}, {sm_name(gpu.capability)}, {gpu.multiprocessors} multiprocessors.",
        source,
        f"Floor of a pass: bytes divided by {datasheet.bandwidth_gbps:g} GB/s{operations} ({datasheet.source}).",
    )


def _floor(each: DryPass, datasheet: Datasheet) -> tuple[float, str]:
    memory_us, matrix_us = least_us(each.case.bytes_moved, each.case.operations, datasheet)
    return max(memory_us, matrix_us), "memory" if memory_us >= matrix_us else "matrix"


def _joined(each: DryPass, of_call: Callable[[DryCall], str]) -> str:
    return " + ".join(filter(None, map(of_call, each.calls)))


def _kernels(call: DryCall) -> str:
    if call.refusal is not None or call.failure is not None:
        return ""
    return ", ".join(map(short_name, call.launches)) or call.kernel


def _of_launches(each: DryPass, in_words: Callable[[Launch], str]) -> str:
    return _joined(each, lambda call: ", ".join(map(in_words, call.launches)))


def _refused(run: DryRun, each: DryPass) -> Cell:
    reasons = []
    for call in each.calls:
        if call.refusal is not None:
            reasons.append(call.refusal)
        elif call.failure is not None and "Missing TRTLLM-GEN kernel" in call.failure:
            older = ", which is older than the launcher" if run.table_is_older else ""
            reasons.append(f"no kernel in the table of {run.table}{older}")
        elif call.failure is not None:
            reasons.append(f"FlashInfer's launcher refuses it, and lab.kernels.support does not: {call.failure}")
    return words("; ".join(reasons), "refused")


def short_name(launch: Launch) -> str:
    """Return the name of a launch's kernel. From a C++ mangled name, only the function's name is taken."""
    rest, name = launch.name.removeprefix("_Z").removeprefix("N"), ""
    while found := re.match(r"\d+", rest):  # in a nested name, each part follows its length
        start, end = found.end(), found.end() + int(found[0])
        name, rest = rest[start:end], rest[end:]
    return name or launch.name


def _record(run: DryRun, datasheet: Datasheet) -> Mapping[str, Any]:
    return {
        "environment": environment(),
        "gpu": run.gpu.name,
        "capability": list(run.gpu.capability),
        "multiprocessors": run.gpu.multiprocessors,
        "kernel_table": run.table,
        "kernel_table_is_older": run.table_is_older,
        "by_rules_because": run.by_rules_because,
        "datasheet": vars(datasheet),
        "passes": [_pass_record(each, datasheet) for each in run.passes],
    }


def _pass_record(each: DryPass, datasheet: Datasheet) -> dict[str, Any]:
    floor_us, bound = _floor(each, datasheet)
    names = ("name", "grid", "block", "cluster", "pdl", "shared_memory_bytes")
    launches = [[{name: getattr(launch, name) for name in names} for launch in call.launches] for call in each.calls]
    return {
        "pass": each.name,
        **case_facts(each.case),
        "floor_us": round(floor_us, 3),
        "floor_bound": bound,
        "calls": [vars(call) | {"launches": found} for call, found in zip(each.calls, launches, strict=True)],
    }
