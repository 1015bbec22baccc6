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
# # 4. Decode or context kernel for draft extend?
#
# After a verification, the draft model must catch up: in *draft extend V2* it runs over all d draft tokens of every request
# ([notebook 1](1_forward_modes.ipynb) draws who reads what). A pass with a few query rows over many keys can go to either of
# FlashInfer's TRT-LLM calls: the *context* call, made for prompts, or the *decode* call with `q_len_per_req` = d. SGLang's
# change 24566 moves it from the first to the second.
#
# This notebook has both calls judged on a small batch, and then the map: which is faster on an H200, by how much, at how
# many requests, keys and query rows.
#
# **What ran.** On an H200 (SM90) FlashInfer's decode call is XQA and its context call is fmha_v2. On Blackwell (SM100),
# where SGLang takes this backend by default, both are trtllm-gen. *Nothing here was measured on Blackwell, and nothing here
# says what trtllm-gen would do.*

# %%
# %matplotlib inline
import json
import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

import lab
import lab.kernels.portable
from lab.checks import Outcome, judge_forward
from lab.metadata import AttentionCall
from lab.metadata.mha.backend import call_arguments
from lab.references.errors import relative_l2
from lab.timing.roofline import measure_ceilings
from lab.workloads import parse_batch, scenario
from lab.workloads.inputs.forward_pass import build_forward
from studies.draft_extend_kernels import crossovers, facts_of, point_of
from studies.passes import gpu_works
from studies.pictures.draft_extend_kernels import crossover_figure, floor_share_figure, point_figure
from studies.pictures.forward_modes import reading_figure
from studies.variants import TimingPlan, measure_point

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RECORDED = Path(lab.__file__).parents[1] / "results" / "nvidia-h200" / "draft_extend_kernels.json"

# %% [markdown]
# ## One pass, two calls
#
# The reader's batch, in vLLM's grammar: `2q4s18` is 2 requests of 4 query rows over 18 keys, the rows' own counted. A
# picture has room for 40 keys.

# %%
BATCH = "2q4s18"
PAGE_SIZE = 16  # 16, 32, 64 or 128, as the kernel below takes them

on_decode = scenario(f"draft_extend_v2/tiny/{BATCH}/page{PAGE_SIZE}")
on_context = scenario(f"draft_extend_v2/tiny/{BATCH}/page{PAGE_SIZE}/on_context")
passes = {"decode": build_forward(on_decode, DEVICE), "context": build_forward(on_context, DEVICE)}
drawn = passes["decode"]
reading_figure(drawn.batch, drawn.pool, drawn.metadata, "DRAFT_EXTEND_V2: what either call must read")

# %% [markdown]
# What each call is told of this pass. The decode call takes one width for all requests and no offsets; the context call
# takes offsets of rows and of keys:

# %%


def told(name: str) -> dict[str, str]:
    """Arguments of the pass's call that say who has which rows and keys."""
    forward = passes[name]
    (planned,) = forward.plan
    arguments = call_arguments(
        planned,
        forward.batch,
        forward.metadata,
        forward.layer,
        forward.query,
        forward.cache,
        forward.case.max_context_len,
    )
    shared = ("query", "kv_cache", "block_tables", "bmm1_scale", "bmm2_scale", "window_left", "sinks")
    return {
        argument: str(value.tolist() if isinstance(value, torch.Tensor) else value)
        for argument, value in arguments.items()
        if argument not in shared
    }


for name, forward in passes.items():
    print(forward.plan[0].call.value)
    for argument, value in told(name).items():
        print(f"    {argument:18} {value}")

# %% [markdown]
# So the decode call asks for more: every request as many rows, rows = q_len_per_req x requests, and lengths that count the
# new tokens. Draft extend V2 has all three; v1, whose requests have as many rows as they had accepted tokens, does not. The
# change's own history says that this is not trivial: it was undone within days after an illegal memory access (SGLang 24856)
# and came back later (28241, in 0.5.14). The lab refuses unequal widths before anything is launched:

# %%
try:
    unequal = scenario(f"draft_extend_v2/tiny/q2s18_q4s18/page{PAGE_SIZE}")
    build_forward(unequal, DEVICE)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Both are right
#
# The lab's portable Triton kernels have both calls, and run in Triton's interpreter where there is no GPU. Each is judged by
# the requests' histories; then the two outputs are compared, which are one kernel's behind two interfaces.

# %%
outputs = {}
for name, forward in passes.items():
    verdict = judge_forward(lab.kernels.portable, forward.case, DEVICE)
    assert verdict.outcome is Outcome.RIGHT, verdict
    outputs[name] = torch.empty_like(forward.query)
    forward.run(lab.kernels.portable, outputs[name])
    print(f"{name:7} {verdict.outcome.value}, worst error {verdict.judged.worst_ratio:.0%} of the allowed")
assert torch.equal(passes["decode"].query, passes["context"].query)
print(f"largest difference of an output vector: {relative_l2(*outputs.values()).max():.1e}, relative")

# %% [markdown]
# (FlashInfer's own two calls were judged on the GPU at each of the points below, before and after they were timed.)
#
# ## The map
#
# One layer of the geometry that the next cell prints, on one rank of two: GPU times of both calls, in turns, with nothing
# left in L2. In each cell, how many times as long the context call takes. Blue: the decode call is faster. Orange, with a
# frame: the context call is.

# %%
recorded = json.loads(RECORDED.read_text())
rows, gpu = recorded["rows"], recorded["environment"]["gpu"]
kernels = {row["arm"]: row["kernel"] for row in rows}
print(
    f"{gpu}, commit {recorded['environment']['commit']}, {recorded['geometry']}, tensor parallel {recorded['tensor_parallel']}"
)
print(recorded["method"])
print(f"decode call: {kernels['decode']}; context call: {kernels['context']}")
crossover_figure(rows, f"Draft extend V2: time of the context call over that of the decode call, {gpu}")

# %%
points = [
    (each["requests"], each["kv_len"], q_len, ratio)
    for each in crossovers(rows)
    for q_len, ratio in each["context_over_decode"].items()
]
faster = [point for point in points if point[3] < 1]
for most in (8, 16, 32):
    ratios = [ratio for _, _, q_len, ratio in points if q_len <= most]
    print(
        f"up to {most:2} query rows: context takes {min(ratios):.2f} to {max(ratios):.1f} times as long, {len(ratios)} points"
    )
print(f"the context call is faster at {len(faster)} of {len(points)} points:")
for requests, keys, q_len, ratio in faster:
    print(f"  {requests:2} requests x {keys:6,} keys, {q_len:2} query rows: {ratio:.2f}")
print(f"not measured: {len(recorded['skipped'])} points; the first because {recorded['skipped'][0]['reason']}")

# %% [markdown]
# Speculative decoding drafts few tokens, up to 8 or so, and there the change holds at every point that was measured. It
# would not with 32 rows for a few requests of short contexts.
#
# ## Why
#
# Choose a point, and see both ways through it:

# %%
REQUESTS, KEYS, Q_LEN = 16, 4096, 4  # the reader's point; keys of each request
point_figure(
    rows, f"Draft extend V2 at {REQUESTS} requests of {KEYS:,} keys, {Q_LEN} query rows; {gpu}", REQUESTS, KEYS, Q_LEN
)

# %%
for row in rows:
    if (row["requests"], row["kv_len"], row["q_len"]) == (REQUESTS, KEYS, Q_LEN):
        share = row["floor_us"] / row["median_us"]
        print(f"{row['arm']:16} {row['kernel']:24} {row['median_us']:>8.1f} µs, {share:.0%} of the limit's speed")
        floor = f"floor {row['floor_us']:.1f} µs ({row['floor_bound']})"
print(floor)

# %% [markdown]
# The context call's time does not depend on the query rows, and is a straight line in the keys. The decode call's grows with
# the rows. In numbers:

# %%
context_us, decode_us = (
    {(row["requests"], row["kv_len"], row["q_len"]): row["median_us"] for row in rows if row["arm"] == variant}
    for variant in ("context", "decode")
)


def spread_over_rows(times_us: dict, requests: int, keys: int) -> float:
    """The longest time over the shortest, of 1 to 32 query rows."""
    found = [time for (count, length, _), time in times_us.items() if (count, length) == (requests, keys)]
    return max(found) / min(found)


print(f"{'requests x keys':>18} {'q 1 to q 32: context':>22} {'decode':>8}")
for requests, keys in dict.fromkeys((requests, keys) for requests, keys, _, _ in points):
    spreads = [spread_over_rows(times, requests, keys) for times in (context_us, decode_us)]
    print(f"{requests:>4} x {keys:>11,} {spreads[0]:>21.2f}x {spreads[1]:>7.1f}x")
heads = scenario(f"draft_extend_v2/{recorded['geometry']}/q4s18/tp{recorded['tensor_parallel']}").model.num_qo_heads
print(f"{heads} query heads; the GPU has {recorded['environment']['multiprocessors']} multiprocessors")
print("context call, 4 query rows, 16,384 keys each, by the number of requests:")
print("  " + ", ".join(f"{requests}: {context_us[requests, 16384, 4]:,.0f} µs" for requests in (1, 4, 16, 64)))

# %% [markdown]
# This fits a context kernel that works through a tile of query rows, a head and a request in one go, all keys in sequence: a
# tile is there whether it holds 1 row or 32, so rows are free; 1 request and 4 take the same time, because 32 heads of 4
# requests still fit the multiprocessors at once; from then on time goes with the requests. And it fits a decode kernel that
# shares out a request's keys among many programs, and does work for every few rows. That is read off the times: the kernels'
# source was not consulted, and nothing was counted on the GPU.
#
# ## How far from the limit?
#
# The floor is the longer of bytes and operations over the rates that the same run measured. Here in percent of each call's
# time; 100 is the limit:

# %%
floor_share_figure(rows, f"Draft extend V2: floor in percent of the time, {gpu}")

# %% [markdown]
# With 1 row per request the decode call is at the limit wherever there is enough to read. (Slightly above 100 is possible:
# the floor's bandwidth is that of a large copy, and reading alone can be a little faster.) With more rows it falls away from
# it, although the bytes are nearly the same: keys could be read once for all rows. The context call is far from it
# everywhere. So the better of the two leaves room for a third: the lab's portable kernel is not it at few rows, but look at
# it at 32.

# %%
portable_us = {
    (row["requests"], row["kv_len"], row["q_len"]): row["median_us"] for row in rows if row["arm"] == "portable decode"
}
print("points where the lab's portable decode call is faster than both:")
for q_len in sorted({point[2] for point in portable_us}):
    at = [point for point in portable_us if point[2] == q_len]
    wins = [point for point in at if portable_us[point] < min(decode_us[point], context_us[point])]
    print(f"  {q_len:2} query rows: {len(wins):2} of {len(at)}")

# %% [markdown]
# (The portable kernel has been worked on since; [kernels.md](../results/nvidia-h200/kernels.md) has later times.)
#
# ## On your GPU
#
# The next cell times the lab's two portable calls at one point where there is a CUDA GPU; without one it says so.
# FlashInfer's own calls are compiled when they are first used, fmha_v2 for some minutes, so they are left out unless you ask
# for them.

# %%
LIVE_BATCH = "16q4s4k"
WITH_FLASHINFER = False

calls = (AttentionCall.DECODE, AttentionCall.CONTEXT)
variants = {f"portable {call.name.lower()}": (call, "lab.kernels.portable") for call in calls}
if WITH_FLASHINFER:
    variants |= {call.name.lower(): (call, "lab.kernels.trtllm") for call in calls}
if torch.cuda.is_available():
    point = point_of(parse_batch(LIVE_BATCH), variants)
    outcome = measure_point(point, gpu_works, TimingPlan(measure_ceilings(DEVICE)), facts_of)
    for row in outcome.rows:
        print(f"{row['arm']:17} {row['kernel']:24} {row['median_us']:>8.1f} µs, floor {row['floor_us']:.1f}")
    for row in outcome.declined:
        print(f"{row['arm']:17} declined: {row['reason']}")
else:
    print(f"no CUDA GPU here: {', '.join(variants)} were not timed")

# %% [markdown]
# From a shell, the whole map: `lab experiments draft-extend-kernels --out draft_extend_kernels.json`. The recorded
# run is explained in [graphs.md](../results/nvidia-h200/graphs.md); the graph around the pass is [notebook
# 5](5_draft_extend_graph.ipynb).
