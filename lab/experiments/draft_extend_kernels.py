"""Draft extend V2 on the decode call against the context call: where does SGLang's change 24566 pay, and where would it not?

    python -m lab.experiments.draft_extend_kernels --out draft_extend_kernels.json
    python -m lab.experiments.draft_extend_kernels --q-lens 4 --requests 1 --keys 4096 81920 --out draft_extend_kernels.json

One layer of 32 query and 4 K/V heads of 128 (Qwen3-32B, one rank of two), pages of 64, bf16. At every point the decode call,
the context call and the portable kernel's decode call take turns in one process, each on its own copies of the same pool, query
and output; cold by rotation. Every output is judged by the requests' histories before and after. The file is written anew after
every point. Exit status: 2 without a GPU.
"""

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from lab.checks.forward_pass import ForwardPass, build_forward
from lab.experiments.arms import Outcome, declined_by, named_in_failures, reason_rows
from lab.experiments.recording import NO_GPU, Recording, ceilings_of_gpu, gpu_is_here
from lab.metadata.engine.forward_mode import AttentionCall, ForwardMode
from lab.metadata.mha.calls import plan_calls, prepare_attention
from lab.timing.forward import case_facts, forward_work, kernel_names, time_facts
from lab.timing.gpu_time import measure_interleaved
from lab.timing.method import L2, Clock, Method
from lab.timing.roofline import Ceilings
from lab.timing.work import GpuWork
from lab.workloads.batches import Batch, sweep
from lab.workloads.forward_case import ForwardCase

METHOD = Method(Clock.GRAPH, L2.COLD_ROTATION)
GEOMETRY, TENSOR_PARALLEL = "qwen3-32b", 2  # 64 / 8 heads of 128 over two GPUs: 32 / 4
PAGE_SIZE = 64
Q_LENS = (1, 2, 4, 8, 16, 32)
REQUESTS = (1, 4, 16, 64)
KEYS = (1024, 4096, 16384, 65536, 131072)
# Keys of one point over all requests: 4 GB of K and V here, pools of twice that, and one pool for each of three arms.
MOST_KEYS = 2 * 1024 * 1024
SAMPLES = 15


@dataclass(frozen=True)
class Arm:
    """One way to run the same pass: a name, the call, and the module that has it."""

    name: str
    call: AttentionCall
    module: str


ARMS = (
    Arm("decode", AttentionCall.DECODE, "lab.kernels.trtllm"),
    Arm("context", AttentionCall.CONTEXT, "lab.kernels.trtllm"),
    Arm("portable decode", AttentionCall.DECODE, "lab.kernels.portable"),
)


def case_of(batch: Batch, call: AttentionCall) -> ForwardCase:
    """The draft extend of a batch on a call."""
    return ForwardCase(
        ForwardMode.DRAFT_EXTEND_V2,
        GEOMETRY,
        batch.prefix_lens,
        batch.q_lens,
        page_size=PAGE_SIZE,
        tensor_parallel=TENSOR_PARALLEL,
        draft_extend=call,
    )


def split_by_size(batches: Sequence[Batch], most_keys: int) -> tuple[list[Batch], list[dict[str, Any]]]:
    """What fits, and rows that say why the rest does not."""
    fitting = [batch for batch in batches if sum(batch.kv_lens) <= most_keys]
    skipped = [batch for batch in batches if sum(batch.kv_lens) > most_keys]
    return fitting, [point_facts(batch) | {"reason": _too_many_keys(batch, most_keys)} for batch in skipped]


def _too_many_keys(batch: Batch, most_keys: int) -> str:
    keys = sum(batch.kv_lens)
    model = case_of(batch, AttentionCall.DECODE).model
    gigabytes = keys * 2 * model.num_kv_heads * model.head_dim * 2 / 1e9
    return f"{keys:,} keys, {gigabytes:.1f} GB of K and V, are more than the bound of {most_keys:,} keys"


def point_facts(batch: Batch) -> dict[str, Any]:
    """What every row says of its point: `kv_len` of each request, its new tokens included."""
    return {
        "point": str(batch),
        "q_len": batch.q_lens[0],
        "requests": len(batch.q_lens),
        "kv_len": batch.kv_lens[0],
    }


def arms_of(forward: ForwardPass, arms: Sequence[Arm] = ARMS) -> dict[str, tuple[ForwardPass, GpuWork]]:
    """Each arm's pass and work. All are judged by one truth; every arm but the first has copies of the tensors.

    Args:
        forward: of the draft extend; its own plan is not looked at.
        arms: whose modules are imported here.
    """
    found: dict[str, tuple[ForwardPass, GpuWork]] = {}
    first: GpuWork | None = None
    for arm in arms:
        implementation = importlib.import_module(arm.module)
        case = replace(forward.case, draft_extend=arm.call)
        planned = replace(forward, case=case, plan=plan_calls(forward.batch, arm.call))
        if first is None:
            work = first = forward_work(planned, implementation)
        else:
            copied = first.copies(2)[1]
            arguments = dict(copied.arguments) | {"plan": planned.plan}
            work = replace(copied, prepare=partial(prepare_attention, implementation), arguments=arguments)
        found[arm.name] = planned, work
    return found


def measure_point(batch: Batch, ceilings: Ceilings, samples: int = SAMPLES, arms: Sequence[Arm] = ARMS) -> Outcome:
    """GPU times of all arms at one point, in turns; and rows of those that decline it. None is wrong: that is an error.

    Raises:
        PointFailedError: anything else went wrong, such as a wrong output or a kernel that is not there.
    """
    with named_in_failures(str(batch)):
        planned = arms_of(build_forward(case_of(batch, AttentionCall.DECODE), torch.device("cuda")), arms)
        reasons = declined_by({name: work for name, (_, work) in planned.items()})
        works = {name: work for name, (_, work) in planned.items() if name not in reasons}
        times = measure_interleaved(works, METHOD, samples) if works else {}
    rows = []
    for arm in arms:
        if arm.name in reasons:
            continue
        forward, work = planned[arm.name]
        rows.append(
            {"arm": arm.name, "kernel": kernel_names(forward, importlib.import_module(arm.module))}
            | point_facts(batch)
            | {"implementation": arm.module, "call": arm.call.value}
            | case_facts(forward.case)
            | time_facts(times[arm.name], ceilings, work.bytes_moved, work.operations)
        )
    return Outcome(rows, reason_rows(point_facts(batch), reasons))


def crossovers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per requests and keys: context over decode time for each q, and the least measured q at which context is faster.

    A point that lacks one of the two is left out.
    """
    times_us = {(row["requests"], row["kv_len"], row["q_len"], row["arm"]): row["median_us"] for row in rows}
    found = []
    for requests, kv_len in dict.fromkeys((row["requests"], row["kv_len"]) for row in rows):
        ratios = {}
        for q_len in sorted({row["q_len"] for row in rows}):
            decode, context = (times_us.get((requests, kv_len, q_len, arm)) for arm in ("decode", "context"))
            if decode is not None and context is not None:
                ratios[q_len] = round(context / decode, 3)
        if ratios:
            faster = [q_len for q_len, ratio in ratios.items() if ratio < 1]
            found.append(
                {
                    "requests": requests,
                    "kv_len": kv_len,
                    "context_over_decode": ratios,
                    "context_faster_from_q_len": min(faster, default=None),
                }
            )
    return found


def crossover_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """One line per requests and keys, one column per q: decode / context in µs, and how many times as long context takes."""
    q_lens = sorted({row["q_len"] for row in rows})
    times_us = {(row["requests"], row["kv_len"], row["q_len"], row["arm"]): row["median_us"] for row in rows}
    table = Table(title=f"Draft extend V2, decode / context call in µs (ratio): {METHOD}", title_justify="left")
    for header in ("requests", "keys", *(f"q {q_len}" for q_len in q_lens)):
        table.add_column(header, justify="right")
    for found in crossovers(rows):
        point = (found["requests"], found["kv_len"])
        cells = []
        for q_len in q_lens:
            ratio = found["context_over_decode"].get(q_len)
            both = (times_us.get((*point, q_len, arm)) for arm in ("decode", "context"))
            cells.append("" if ratio is None else " / ".join(f"{time:,.1f}" for time in both) + f" ({ratio:.2f})")
        table.add_row(*(f"{value:,}" for value in point), *cells)
    return table


def main(argv: Sequence[str] | None = None) -> int:
    given = _arguments(argv)
    batches, skipped = split_by_size(sweep(given.requests, given.keys, given.q_lens), given.most_keys)
    if not gpu_is_here():
        return NO_GPU
    ceilings = ceilings_of_gpu()
    facts = {
        "method": str(METHOD),
        "geometry": GEOMETRY,
        "tensor_parallel": TENSOR_PARALLEL,
        "samples": given.samples,
        "most_keys": given.most_keys,
        "skipped": skipped,
    }
    recording = Recording(
        given.out,
        facts,
        ("rows", "declined"),
        ceilings=ceilings,
        derived={"crossovers": lambda result: crossovers(result["rows"])},
    )

    def outcome_of(batch: Batch) -> Mapping[str, Sequence[dict[str, Any]]]:
        outcome = measure_point(batch, ceilings, given.samples)
        return {"rows": outcome.rows, "declined": outcome.declined}

    recording.measure(batches, outcome_of)
    recording.console.print(crossover_table(recording.result["rows"]))
    recording.console.print(
        f"{len(recording.result['declined'])} declined, {len(skipped)} skipped: reasons in {given.out}"
    )
    return recording.exit_status


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lab.experiments.draft_extend_kernels", description=__doc__.split("\n", 1)[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    parser.add_argument("--q-lens", type=int, nargs="+", default=list(Q_LENS), help="query rows of each request")
    parser.add_argument("--requests", type=int, nargs="+", default=list(REQUESTS))
    parser.add_argument(
        "--keys", type=int, nargs="+", default=list(KEYS), help="of each request, the new tokens' included"
    )
    parser.add_argument(
        "--most-keys", type=int, default=MOST_KEYS, help="skip points with more keys over all requests (%(default)s)"
    )
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each GPU time (%(default)s)")
    given = parser.parse_args(argv)
    if min(*given.q_lens, *given.requests, given.most_keys, given.samples) < 1:
        parser.error("query rows, requests, samples and the bound of keys must be at least 1")
    if min(given.keys) < max(given.q_lens):
        parser.error(f"--keys {min(given.keys)} counts the new tokens, and there are {max(given.q_lens)} of them")
    return given


if __name__ == "__main__":
    sys.exit(main())
