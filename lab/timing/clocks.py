"""Every clock on the same kernels: what each reads, and whether CUPTI and the graph clock agree.

    python -m lab.timing.clocks --out clocks.json
    python -m lab.timing.clocks lab.kernels.trtllm --scenario decode/llama-3.1-8b/64q1s4k

CUPTI and the graph clock time the same replays, so they must agree; the exit status is 1 if they differ by more than 3 % on
anything of 20 µs or more a launch. On less, what CUPTI adds to each traced launch, 0.1 to 0.7 µs on an H200, is more than
that. Events show what they add to an eager call. Flush and rotation differ: the flush also evicts a kernel's instructions.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lab.checks.forward_pass import build_forward
from lab.provenance import environment
from lab.timing.forward import forward_work
from lab.timing.gpu_time import measure
from lab.timing.method import L2, Clock, Method
from lab.timing.work import GpuWork
from lab.workloads.scenarios import scenario

MOST_APART_PERCENT = 3.0
SHORT_US_PER_LAUNCH = 20.0
NEGATION_BYTES = (2**15, 2**23, 2**27, 2**31)
SCENARIOS = (
    "decode/llama-3.1-8b/8q1s1k",
    "decode/llama-3.1-8b/64q1s4k",
    "target_verify/llama-3.1-8b/64q4s4k",
    "draft_extend_v2/llama-3.1-8b/64q4s4k/on_context",
    "extend/llama-3.1-8b/2q1k",
)
METHODS = tuple(Method(clock, l2) for clock in Clock for l2 in L2 if (clock, l2) != (Clock.GRAPH, L2.COLD_FLUSH))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.timing.clocks", description=__doc__.split("\n", 1)[0])
    parser.add_argument("implementation", nargs="*", default=["lab.kernels.trtllm", "lab.kernels.portable"])
    parser.add_argument("--scenario", action="append", help="instead of the default ones")
    parser.add_argument("--out", type=Path, help="also write a JSON file")
    given = parser.parse_args(argv)
    rows = [row_of(f"negation, {size_bytes:,} bytes", negation(size_bytes)) for size_bytes in NEGATION_BYTES]
    for name in given.scenario or SCENARIOS:
        forward = build_forward(scenario(name), torch.device("cuda"))
        for module in given.implementation:
            rows.append(row_of(f"{name}, {module}", forward_work(forward, importlib.import_module(module))))
    if given.out is not None:
        methods = {key_of(method): str(method) for method in METHODS}
        recorded = {"environment": environment(), "methods": methods, "rows_us": rows}
        given.out.write_text(json.dumps(recorded, indent=1) + "\n")
    return 1 if any(are_apart(row) for row in rows) else 0


def row_of(name: str, work: GpuWork) -> dict[str, Any]:
    """The medians in µs by every method that can time this work, printed and returned."""
    row: dict[str, Any] = {"work": name}
    for method in METHODS:
        try:
            time = measure(work, method)
            row[key_of(method)], row["launches"] = round(time.median_us, 3), time.launches
        except ValueError as cannot:  # too small to be cold by rotation
            row[key_of(method)] = None
            row["left_out"] = str(cannot)
    row["cupti_over_graph_percent"] = round(apart_percent(row), 2)
    print("  ".join(f"{key} {value}" for key, value in row.items() if key != "left_out"), flush=True)
    return row


def key_of(method: Method) -> str:
    return f"{method.clock.value} {method.l2.value}"


def apart_percent(row: dict[str, Any]) -> float:
    return 100 * (row["cupti warm"] / row["graph warm"] - 1)


def are_apart(row: dict[str, Any]) -> bool:
    long_enough = row["graph warm"] >= SHORT_US_PER_LAUNCH * row["launches"]
    return long_enough and abs(apart_percent(row)) > MOST_APART_PERCENT


def negation(size_bytes: int) -> GpuWork:
    """An elementwise kernel that reads half of `size_bytes` and writes the other half."""
    source = torch.randn(size_bytes // 8, device="cuda")
    return GpuWork.of(torch.neg, size_bytes, input=source, out=torch.empty_like(source))


if __name__ == "__main__":
    sys.exit(main())
