# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 8. Rooflines: how far from the limit
#
# A time says little without the least time that the work can take. The lab calls that the **floor**. This notebook shows how
# it is computed, sets recorded times against it, and asks where attention stops being bound by memory and starts being bound
# by the matrix units, as query tokens grow and, for MLA, as heads do.
#
# Everything runs on a CPU. Floors are computed live; times are read from files of recorded runs, and every number below that
# is a time or a rate comes from them. A newer recording gives other numbers; the cells print which one they read.

# %%
# %matplotlib inline
import json
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import torch

import lab
from lab.kernels import default_implementation
from lab.metadata import ForwardMode
from lab.reports.pictures.timings import floor_figure, roofline_figure
from lab.reports.recorded import Row, read_run
from lab.reports.timings import figures
from lab.timing import L2, Ceilings, Clock, Method, measure_ceilings, roofline
from lab.timing.forward import time_forward
from lab.workloads import GEOMETRIES, Batch, ForwardCase, geometry, scenario
from lab.workloads.mla_case import MLACase
from studies.clocks import MOST_APART_PERCENT, apart_percent
from studies.pictures.rooflines import FloorParts, bound_figure, clocks_figure

RESULTS = Path(lab.__file__).parents[1] / "results" / "nvidia-h200"
run = read_run(RESULTS / "timings.json")
print(
    f"{run.path.name}: recorded {run.recorded_at[:10]} on {run.environment['gpu']}, commit {run.environment['commit']}"
)

# %% [markdown]
# ## Bytes and operations
#
# The floor counts what *must* be done, of the actual lengths of each request, not of the longest one's, and not what a kernel
# happens to do:
#
# * **bytes**: each key and value that some row sees is read once, each query row read, each output row written. Page tables
#   and partial results are not counted.
# * **operations**: two products (Q·K^T and P·V) over the (row, key) pairs that are visible: `4 * head_dim` for each pair and
#   query head.
#
# Written out for a scenario without a window, and held against what the lab counts:

# %%
SCENARIO = "decode/llama-3.1-8b/trace64"  # change it: "target_verify/llama-3.1-8b/64q8s4k", "extend/llama-3.1-8b/8q4k"
case = scenario(SCENARIO)
model = case.model

kv_bytes = 2 * sum(case.kv_lens) * model.num_kv_heads * model.head_dim * case.kv_dtype.itemsize
row_bytes = 2 * sum(case.q_lens) * model.num_qo_heads * model.head_dim * case.dtype.itemsize
pairs = sum(
    position + 1
    for kv_len, q_len in zip(case.kv_lens, case.q_lens, strict=True)
    for position in range(kv_len - q_len, kv_len)
)
operations = 4 * model.head_dim * model.num_qo_heads * pairs
assert (kv_bytes + row_bytes, operations) == (case.bytes_moved, case.operations)

padded_bytes = kv_bytes * len(case.kv_lens) * max(case.kv_lens) // sum(case.kv_lens)
print(f"{len(case.kv_lens)} requests of {min(case.kv_lens):,} to {max(case.kv_lens):,} keys")
print(f"K/V {kv_bytes / 1e6:,.1f} MB, query and output {row_bytes / 1e6:,.1f} MB, {operations / 1e9:,.2f} GFLOP")
print(f"operations per byte: {case.operations / case.bytes_moved:.1f}")
print(
    f"K/V if all were as long as the longest: {padded_bytes / 1e6:,.1f} MB, {padded_bytes / kv_bytes:.1f} times as much"
)

# %% [markdown]
# A floor of padded lengths would be met by a kernel that reads padding. For short requests beside long ones it would flatter
# every kernel.
#
# ## Ceilings
#
# Bytes and operations are divided by rates that were **measured on the same GPU in the same run**, because no kernel reaches
# the datasheet's: a large elementwise kernel for memory, a large bf16 matrix product on random data for the matrix units
# (`lab.timing.roofline.measure_ceilings`). Each recorded run has its own:


# %%
def ceilings_of(environment: dict) -> Ceilings:
    facts = environment["ceilings"]
    return Ceilings(facts["bandwidth_gbps"], facts["matrix_rate_tflops"])


environments = {run.path.name: dict(run.environment) | {"ceilings": run.ceilings}}
for name in ("mla_decode.json", "draft_extend_graph.json", "draft_extend_kernels.json", "draft_steps.json"):
    environments[name] = json.loads((RESULTS / name).read_text(encoding="utf-8"))["environment"]
for name, environment in environments.items():
    if not environment.get("ceilings"):
        continue
    ceilings = ceilings_of(environment)
    ridge = 1e3 * ceilings.matrix_rate_tflops / ceilings.bandwidth_gbps
    print(
        f"{name:26} commit {environment['commit']}: {ceilings.bandwidth_gbps:,.0f} GB/s, "
        f"{ceilings.matrix_rate_tflops:,.0f} TFLOP/s; they meet at {ridge:.0f} operations per byte"
    )
stated = run.ceilings
print(
    f"{'datasheet':26} {stated['datasheet_bandwidth_gbps']:,.0f} GB/s, "
    f"{stated['datasheet_matrix_rate_tflops']:,.0f} TFLOP/s"
)

# %% [markdown]
# The floor is the longer of the two quotients. Two things that these ceilings are not: the memory's is that of a kernel that
# reads *and* writes, so one that only reads can pass it by a little; and the matrix units' is of bf16, so e4m3 products can
# pass it.

# %%
CEILINGS = ceilings_of(environments[run.path.name])
floor = roofline(median_us=1.0, bytes_moved=case.bytes_moved, operations=case.operations, ceilings=CEILINGS)
print(f"{SCENARIO}: floor {floor.floor_us:.1f} µs, bound by {floor.floor_bound}")

# %% [markdown]
# ## Clocks
#
# A time over a floor is as good as its clock. The default clock replays calls recorded in a CUDA graph between two events; it
# needs no profiler. `lab experiments clocks` times the same work by every clock and L2 state of the lab:

# %%
clocks = json.loads((RESULTS / "clocks.json").read_text(encoding="utf-8"))
BASE = "graph warm"
SHOWN = ("cupti warm", "graph cold by rotation", "cupti cold by rotation", "cupti cold by flush", "events warm")
readings = {
    row["work"].replace("lab.kernels.", ""): {name: row[name] for name in (BASE, *SHOWN)} for row in clocks["rows_us"]
}
clocks_on = f"{clocks['environment']['gpu']}, commit {clocks['environment']['commit']}"
clocks_figure(readings, BASE, f"The same kernels by other clocks: {clocks_on}")

# %%
for name in (BASE, *SHOWN):
    print(f"{name:24} {clocks['methods'].get(name, 'not described in this file')}")
apart = [
    abs(share)
    for row in clocks["rows_us"]
    if row["long_enough_to_judge"]
    for l2 in (L2.WARM, L2.COLD_ROTATION)
    if (share := apart_percent(row, l2)) is not None
]
print(
    f"CUPTI and the graph clock, rows long enough: at most {max(apart):.2f} % apart (allowed: {MOST_APART_PERCENT:g} %)"
)

# %% [markdown]
# *Events* around an eager call contain what the host does between launches; they are there to show how much that is. *Cold by
# rotation* lets copies of all buffers take turns, so that none is still in L2.
#
# ## Recorded times
#
# The default scenarios, one attention layer each. Every output was judged right before it was timed and again after; a wrong
# one has no time. First each rate against operations per byte: the sloping roof is memory, the flat one the matrix units. By
# what factor a point lies below the roof above it is its time over floor.

# %%
attention = replace(run, rows=tuple(row for row in run.gpu_rows if row.facts.get("geometry")))
pictures = figures(attention)
next(figure for name, figure in pictures.items() if name.startswith("roofline"))

# %% [markdown]
# Then time over floor of each scenario; 1 is the limit. A name says mode, model, batch (`64q4s4k`: 64 requests of 4 query
# tokens and 4,096 keys, or a snapshot of a trace) and options.

# %%
next(figure for name, figure in pictures.items() if name.startswith("time-over-floor"))

# %%
NEAR = 1.2  # change it
for implementation in dict.fromkeys(row.facts["implementation"] for row in attention.rows):
    mine = [row for row in attention.rows if row.facts["implementation"] == implementation]
    print(f"{implementation}: {len(mine)} scenarios")
    for bound in ("memory", "matrix"):
        over = sorted(row.median_us / row.facts["floor_us"] for row in mine if row.facts["floor_bound"] == bound)
        if over:
            near = sum(each <= NEAR for each in over)
            print(
                f"  bound by {bound}: {len(over)}, within {NEAR:g} times the floor {near}, worst {over[-1]:.1f} times"
            )
    held_back = [row.scenario for row in mine if row.throttled_by]
    print(f"  clocks held back while it ran: {', '.join(held_back) or 'none'}")

# %% [markdown]
# Three reasons for a large ratio that are not a slow inner loop, and that the floor does not know: a floor of a few µs is not
# far above what a launch takes; a sliding window leaves little to read, spread thin; requests of very different lengths leave
# some multiprocessors idle unless the work is split across them.
#
# ## Where memory turns into the matrix units
#
# With a bf16 cache a row of one request makes `num_qo_heads / num_kv_heads` operations for each byte of K/V that it reads, and
# q rows of a request share those bytes. So operations per byte grow with q, up to where causality and the rows' own bytes
# count. Verification (small q), chunked prefill and prefill are the same curve. Change the numbers:

# %%
GEOMETRY = "llama-3.1-8b"  # a name of lab.workloads.GEOMETRIES
REQUESTS, KV_LEN = 64, 4096
KV_DTYPE = torch.bfloat16  # or torch.float8_e4m3fn


def verify(q_len: int, name: str = GEOMETRY, kv_dtype: torch.dtype = KV_DTYPE) -> ForwardCase:
    """So many query tokens of each request, at the end of its keys."""
    return ForwardCase(
        ForwardMode.TARGET_VERIFY, name, (KV_LEN - q_len,) * REQUESTS, (q_len,) * REQUESTS, kv_dtype=kv_dtype
    )


def parts(case: ForwardCase | MLACase, amount: float, ceilings: Ceilings = CEILINGS) -> FloorParts:
    """The two times of a case: the floor of its bytes alone, and of its operations alone."""
    memory, matrix = (
        roofline(1.0, bytes_moved, operations, ceilings).floor_us
        for bytes_moved, operations in ((case.bytes_moved, 0), (0, case.operations))
    )
    return FloorParts(amount, memory, matrix)


def first_matrix_bound(case_of, most: int, ceilings: Ceilings = CEILINGS) -> int | None:
    """The least number from 1 to `most` from which the matrix units are the limit; None for none."""
    found = 1 + bisect_left(range(1, most + 1), True, key=lambda n: parts(case_of(n), n, ceilings).is_matrix_bound)
    return found if found <= most else None


def in_words(turn: int | None, most: int) -> str:
    return f"the matrix units are the limit from {turn}" if turn else f"memory is the limit, up to {most}"


def amounts(most: int, turn: int | None) -> list[int]:
    """From 1 to `most`, evenly on a logarithmic axis, and where it turns."""
    steps = {round(most ** (step / 40)) for step in range(41)}
    return sorted(steps | {turn - 1, turn} - {0} if turn else steps)


MOST = min(KV_LEN, 1024)
turn = first_matrix_bound(verify, MOST)
batches = {q_len: Batch((q_len,) * REQUESTS, (KV_LEN,) * REQUESTS) for q_len in range(1, 33)}
names = {f"target_verify/{GEOMETRY}/{batch}": q_len for q_len, batch in batches.items()}
names[f"decode/{GEOMETRY}/{batches[1]}"] = 1
timed = [(names[row.scenario], row) for row in attention.rows if row.scenario in names and KV_DTYPE is torch.bfloat16]
print(f"{GEOMETRY}, {REQUESTS} x {KV_LEN:,} keys: {in_words(turn, MOST)} query tokens per request")
bound_figure(
    [parts(verify(q_len), q_len) for q_len in amounts(MOST, turn)],
    f"{GEOMETRY}, {REQUESTS} requests of {KV_LEN:,} keys, ceilings of {run.path.name}",
    "query tokens per request",
    timed,
)

# %% [markdown]
# Marks are the recorded times of this batch, if the file has any. Left of the turn a kernel that reads each key once can have
# more rows for nothing, as far as the floor is concerned; whether a kernel does is what the marks say.
#
# The same for every geometry, with both caches. A larger group of query heads per K/V head turns sooner, and so does a cache
# of half the bytes, since the ceiling of the matrix units is that of bf16 products in either case:

# %%
print(f"{REQUESTS} x {KV_LEN:,} keys; query tokens per request from which the matrix units are the limit")
print(f"{'geometry':16} {'query heads per K/V head':>26} {'bf16 cache':>12} {'e4m3 cache':>12}")
for name in GEOMETRIES:
    turns = [
        first_matrix_bound(lambda n, name=name, kv_dtype=kv_dtype: verify(n, name, kv_dtype), MOST)
        for kv_dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    print(f"{name:16} {geometry(name).group:26} {turns[0] or '-':>12} {turns[1] or '-':>12}")

# %% [markdown]
# ## MLA
#
# After absorption every query head reads the *same* entry, of 512 + 64 numbers, which is key and value in one. So operations
# per byte grow with the number of heads, and a decode alone can be bound by the matrix units. The recorded run is
# `lab experiments mla-decode`: DeepSeek-V3's layer with 16 heads (one rank of eight) and with all 128.

# %%
mla = json.loads((RESULTS / "mla_decode.json").read_text(encoding="utf-8"))
mla_ceilings = ceilings_of(mla["environment"])
mla_on = f"{mla['environment']['gpu']}, commit {mla['environment']['commit']}"
mla_rows = [
    Row(row["point"], tuple(row["samples_us"]), row | {"implementation": row["arm"], "mode": row["point"]})
    for row in mla["rows"]
]
print(f"mla_decode.json: {mla_on}; {mla['method']}")
roofline_figure(mla_rows, f"MLA decode: {mla_on}", mla["environment"]["ceilings"])

# %%
floor_figure(mla_rows, f"MLA decode, time over floor: {mla_on}")

# %% [markdown]
# `wrapper` is FlashInfer's MLA wrapper (its plan, made on the host before, is not in the time), `portable` the lab's Triton
# kernel; [kernels](../results/nvidia-h200/kernels.md) says what limits it. And live: with how many heads a decode turns, and a
# verification of several tokens. Change them:

# %%
MLA_REQUESTS, MLA_KV_LEN, MLA_Q_LEN = 64, 8192, 1


def mla_case(heads: int, q_len: int = MLA_Q_LEN) -> MLACase:
    mode = ForwardMode.DECODE if q_len == 1 else ForwardMode.TARGET_VERIFY
    return MLACase(mode, (MLA_KV_LEN - q_len,) * MLA_REQUESTS, (q_len,) * MLA_REQUESTS, num_qo_heads=heads)


mla_turn = first_matrix_bound(mla_case, 128, mla_ceilings)
point = (MLA_REQUESTS, MLA_KV_LEN, MLA_Q_LEN)
mla_timed = [
    (row.facts["heads"], row)
    for row in mla_rows
    if tuple(row.facts[name] for name in ("requests", "kv_len", "q_len")) == point
    and row.facts["kv_dtype"] == "bfloat16"
]
for q_len in (1, 2, 4, 8):
    heads = first_matrix_bound(lambda n, q_len=q_len: mla_case(n, q_len), 128, mla_ceilings)
    print(f"query tokens per request {q_len}: {in_words(heads, 128)} heads")
bound_figure(
    [parts(mla_case(heads), heads, mla_ceilings) for heads in amounts(128, mla_turn)],
    f"MLA, {MLA_REQUESTS} requests of {MLA_KV_LEN:,} keys, query tokens of each {MLA_Q_LEN}, ceilings of mla_decode.json",
    "query heads on one GPU",
    mla_timed,
)

# %% [markdown]
# ## On your GPU
#
# Where a GPU is present, this cell measures its ceilings, and one scenario against them. The output is judged before and
# after.

# %%
if torch.cuda.is_available():
    here = measure_ceilings(torch.device("cuda"))
    time, facts = time_forward(scenario(SCENARIO), default_implementation(), Method(Clock.GRAPH, L2.COLD_ROTATION))
    mine = roofline(time.median_us, case.bytes_moved, case.operations, here)
    print(f"{here.bandwidth_gbps:,.0f} GB/s, {here.matrix_rate_tflops:,.0f} TFLOP/s")
    print(f"{SCENARIO}: {time.median_us:.1f} µs, floor {mine.floor_us:.1f} µs ({mine.floor_bound}), {facts['kernel']}")
else:
    print("No GPU here: nothing is timed. All scenarios: make bench, then make report")
