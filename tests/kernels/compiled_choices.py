"""Compiles every Triton kernel that the host code chooses, for every GPU that it knows, on a machine without one.

    python -m tests.kernels.compiled_choices --record results/blackwell-dry-run/portable.json.gz   # 800 kernels: half an hour
    python -m tests.kernels.compiled_choices --tables results/blackwell-dry-run/portable.json.gz   # in Markdown
    python -m tests.kernels.compiled_choices --check results/blackwell-dry-run/portable.json.gz    # all choices, a few compiled

`TRITON_CACHE_DIR` keeps what was compiled.
"""

import argparse
import dataclasses
import importlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import triton
from triton import knobs
from triton.runtime.jit import JITFunction

import lab.kernels.portable
import lab.kernels.serving
from lab.files import read_json, write_text
from lab.gpus import family_that_runs, sm_name
from tests.kernels.every_choice import every_choice
from tests.kernels.gpu_target import MULTIPROCESSORS, TENSOR_MEMORY_COLUMNS, Compiled, forget_line_numbers, gpu_target

TARGETS = {sm_name(capability): capability for capability in MULTIPROCESSORS}
MOST_REGISTERS = 255  # of a thread: with fewer, ptxas spills for the sake of one program more, not for want of them
# What `--check` compiles: the large tiles of each class of GPU and each matrix instruction, and a kernel of metadata.
FEW = {
    "SM80": ("MLA, 16 rows, bf16 over bf16",),
    "SM86": ("decode, 64 rows, heads of 256, bf16 over bf16",),
    "SM89": ("decode, 64 rows, heads of 128, bf16 over e4m3",),
    "SM90": (
        "decode, 8 rows, heads of 128, bf16 over bf16",
        "ragged, 4096 rows, bf16",
        "kv_indices, serial, topk 4",
        "kv_indices, spread, topk 1",
    ),
    "SM100": ("decode, 64 rows, heads of 128, bf16 over bf16", "MLA, 16 rows, bf16 over e4m3"),
    "SM103": ("ragged, 64 rows, e4m3", "forward metadata, five passes"),
    "SM120": ("MLA, 16 rows, bf16 over e4m3",),
    "SM121": ("ragged, 4096 rows, bf16", "kv_indices, spread, topk 4"),
}
SAME_CODE = "kv_indices"  # calls whose kernels have parameters that fold away where they are not given
Record = dict[str, Any]


def compiled(target: str, description: str) -> list[Compiled]:
    """Return what a call's launches compile to."""
    with gpu_target(TARGETS[target]) as found:
        every_choice(TARGETS[target])[description]()
    return found


def record(targets: list[str]) -> Record:
    """Compile all; a merge that several calls have is listed with the first."""
    found: Record = {}
    for target in targets:
        seen, rows = set(), []
        for description in every_choice(TARGETS[target]):
            for each in compiled(target, description):
                key = (each.kernel, each.ptx_sha256)
                if each.tile is not None or key not in seen:
                    rows.append({"call": description} | dataclasses.asdict(each))
                seen.add(key)
            print(f"{target}: {description}", file=sys.stderr, flush=True)
        found[target] = rows
    return {"versions": compilers(), "kernels": found}


def compilers() -> dict[str, str]:
    """Return the versions of Triton and of the assemblers that it runs; PTX is written for the assembler's."""
    return {"triton": triton.__version__} | {
        name: getattr(knobs.nvidia, name).version for name in ("ptxas", "ptxas_blackwell")
    }


def as_json(recorded: Record) -> str:
    """Return the record as JSON, a kernel in each line."""
    kernels = ",\n".join(
        f'  "{target}": [\n' + ",\n".join(f"   {json.dumps(row)}" for row in rows) + "\n  ]"
        for target, rows in recorded["kernels"].items()
    )
    return f'{{\n "versions": {json.dumps(recorded["versions"])},\n "kernels": {{\n{kernels}\n }}\n}}\n'


def chosen(target: str) -> dict[str, list[Any]]:
    """Return (kernel, tile, warps) of every call's launches, without compiling them."""
    choices: dict[str, list[Any]] = {}

    def note(kernel: Any, *_args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        tile = options.get("TILE")
        if tile is not None:
            choices[description].append([kernel.__name__, tile._asdict()])

    with gpu_target(TARGETS[target]), mock.patch.object(JITFunction, "run", note):
        for description, call in every_choice(TARGETS[target]).items():
            choices[description] = []
            call()
    return choices


def check(recorded: Record) -> list[str]:
    """Return the faults of the record, of the choices, and of the few that are compiled; none is right."""
    faults = []
    for target in TARGETS:
        for description, choice in chosen(target).items():
            rows = [row for row in recorded["kernels"][target] if row["call"] == description and row["tile"]]
            if choice != [[row["kernel"], row["tile"]] for row in rows]:
                faults.append(f"{target}: the host code chooses {choice} for {description!r}: make the record anew")
        for row in recorded["kernels"][target]:
            faults += unfit(target, row)
    same_compiler = recorded["versions"] == compilers()
    for target, descriptions in FEW.items():
        for description in descriptions:
            first = dataclasses.asdict(compiled(target, description)[0])
            faults += unfit(target, {"call": description} | first)
            row = next(row for row in recorded["kernels"][target] if row["call"] == description)
            if same_compiler and first["spill_store_bytes"] > row["spill_store_bytes"]:
                faults.append(
                    f"{target}: {description!r} spills {first['spill_store_bytes']} bytes, {row['spill_store_bytes']} in the "
                    "record: choose another tile, or make the record anew"
                )
            if same_compiler and description.startswith(SAME_CODE) and first["ptx_sha256"] != row["ptx_sha256"]:
                faults.append(f"{target}: the code of {description!r} is not the record's: make the record anew")
    return faults


def unfit(target: str, row: Record) -> list[str]:
    """Return the faults of one compiled kernel: more than a program may have, or fewer programs than are launched."""
    where = f"{target}: {row['kernel']} of {row['call']!r}"
    faults = []
    most_kib = family_that_runs(TARGETS[target]).shared_memory_kib
    if row["shared_bytes"] > most_kib * 1024:
        faults.append(f"{where} takes {row['shared_bytes']} bytes of shared memory, more than {most_kib} KiB")
    if row["tensor_memory_columns"] > TENSOR_MEMORY_COLUMNS:
        faults.append(f"{where} takes {row['tensor_memory_columns']} columns of tensor memory, of 512")
    launched = row["tile"]["per_multiprocessor"] if row["tile"] else 1
    if row["fit"] < launched:
        faults.append(
            f"{where}: a multiprocessor has room for {row['fit']} programs, and {launched} are launched for it"
        )
    return faults


def tables(recorded: Record) -> str:
    """Return the record as Markdown: a line for each GPU, and one for each kernel that spills."""
    lines = [
        "| target | calls | kernels | most shared memory, KiB | most tensor memory, columns | kernels that spill | most bytes "
        "stored | matrix instructions |",
        "|---|---|---|---|---|---|---|---|",
    ]
    spilling = [
        "| target | call | rows, keys | warps, stages | spilled, bytes stored, loaded |",
        "|---|---|---|---|---|",
    ]
    for target, rows in recorded["kernels"].items():
        distinct = {(row["kernel"], row["ptx_sha256"]): row for row in rows}
        spills = [row for row in distinct.values() if spills_for_want(row)]
        instructions = sorted({name for row in rows for name in row["matrix"]})
        lines.append(
            f"| {target} | {len({row['call'] for row in rows})} | {len(distinct)} "
            f"| {max(row['shared_bytes'] for row in rows) / 1024:.0f} of {family_that_runs(TARGETS[target]).shared_memory_kib} "
            f"| {max(row['tensor_memory_columns'] for row in rows)} | {len(spills)} "
            f"| {max((row['spill_store_bytes'] for row in spills), default=0)} | {', '.join(instructions)} |"
        )
        for row in spills:
            tile = row["tile"] or {"rows": "", "keys": ""}
            spilling.append(
                f"| {target} | {row['call']} | {tile['rows']}, {tile['keys']} | {row['num_warps']}, {row['num_stages']} "
                f"| {row['spill_store_bytes']}, {row['spill_load_bytes']} |"
            )
    return "\n".join((*lines, "", *spilling, ""))


def spills_for_want(row: Record) -> bool:
    """Return True where a kernel has all the registers that a thread may have, and keeps others in memory."""
    most = min(MOST_REGISTERS, 65536 // (32 * row["num_warps"]) // 8 * 8)
    return bool(row["spill_store_bytes"]) and row["registers"] >= most


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = parser.add_mutually_exclusive_group(required=True)
    for name in ("record", "tables", "check"):
        task.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    options = parser.parse_args()
    for package in (lab.kernels.portable, lab.kernels.serving):
        names = [each.name for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]
        forget_line_numbers(*map(importlib.import_module, names))
    if options.record:
        write_text(options.record, as_json(record(options.targets)))
        return 0
    recorded = read_json(options.tables or options.check)
    if options.tables:
        print(tables(recorded), end="")
        return 0
    faults = check(recorded)
    print("\n".join(faults) or "all choices are the record's, and fit")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
