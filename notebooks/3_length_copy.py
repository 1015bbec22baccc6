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
# # 3. The copy of the lengths, and the verify mask
#
# The lengths of a batch live on the GPU: only after verification is it known how many draft tokens were accepted. If any
# attention backend wants them on the host, SGLang copies them there in each iteration and *waits*. The copy is a few hundred
# bytes. What it costs is the waiting: the host can only begin the next iteration when the GPU has finished this one.
#
# SGLang's change 26824 lets the TRT-LLM MLA backend say that it needs no lengths on the host. One of the places that used
# them was the mask of target verify, whose size was a sum of lengths; so the mask is allocated once, for the largest batch.
#
# This notebook shows both as an H200 ran them, and has a small model of the loop to change numbers in. Everything runs on a
# CPU; one cell uses a GPU if there is one.

# %%
# %matplotlib inline
import json
from pathlib import Path
from statistics import median

import torch

import lab
from lab.metadata.engine.host_mirrors import decide_needs_cpu_seq_lens
from lab.metadata.speculation.verify_mask import (
    VerifyMaskForm,
    fill_verify_mask,
    preallocate_verify_mask,
    verify_mask_cells,
    write_chain_mask,
)
from studies.length_copy import CopyLoopSettings, measure_ends
from studies.pictures.length_copy import (
    Lane,
    LoopExcerpt,
    Span,
    recorded_excerpt,
    step_time_figure,
    timeline_figure,
    variants_figure,
    verify_mask_figure,
)

RESULTS = Path(lab.__file__).parents[1] / "results" / "nvidia-h200"
recorded = json.loads((RESULTS / "length_copy.json").read_text())
gpu = recorded["environment"]["gpu"]
settings = list(dict.fromkeys((row["gpu_us"], row["host_us"]) for row in recorded["arms"]))
print(f"{gpu}, commit {recorded['environment']['commit']}; recorded loops:")
for gpu_us, host_us in settings:
    print(f"  {gpu_us:,.0f} µs of GPU work and {host_us:,.0f} µs of scheduling in a step")
first = recorded["arms"][0]
small_launches = first["medians"]["gpu_activities"] - first["matrix_products"]
print(f"{first['batch_size']} requests; in a step {small_launches} small pieces of GPU work besides the model's")
print(recorded["method"])

# %% [markdown]
# ## One backend decides for all
#
# The engine asks each backend whether it needs the lengths on the host; one that says nothing is taken to need them. One yes
# is enough, and then every iteration pays.


# %%
class NeedsNothing:
    needs_cpu_seq_lens = False


class SaysNothing:
    pass


for backends in ([NeedsNothing()], [NeedsNothing(), NeedsNothing()], [NeedsNothing(), SaysNothing()]):
    names = " and ".join(type(backend).__name__ for backend in backends)
    print(f"{names:30} copy in each iteration: {decide_needs_cpu_seq_lens(backends)}")

# %% [markdown]
# ## The timeline, recorded
#
# A loop of target-verify steps stands for SGLang's. In each step the host schedules (it spins for a stated time), builds the
# metadata of a batch (the small pieces of GPU work counted above), and replays a CUDA graph of matrix products that stands
# for the model and takes a stated time. One *variant* then copies the lengths to the host and waits for them; the other goes
# on. Nothing else differs.
#
# The picture is drawn from a profile of three steps. Choose another loop from the list above:

# %%
GPU_US, HOST_US = 500, 0  # the reader's choice: one of the recorded loops


def rows_of(gpu_us: float, host_us: float) -> list[dict]:
    return [row for row in recorded["arms"] if (row["gpu_us"], row["host_us"]) == (gpu_us, host_us)]


timeline_figure(
    [recorded_excerpt(row) for row in rows_of(GPU_US, HOST_US)],
    f"Three steps of a loop with {GPU_US:,} µs of GPU work and {HOST_US:,} µs of scheduling, {gpu}",
)

# %% [markdown]
# **With the copy** the lanes take turns. The CPU stands still (hatched) until the GPU has drained; then the GPU stands still
# (red) while the CPU schedules and launches the next step's metadata. The thin strokes in the red are these small launches.
#
# **Without it** the CPU runs ahead: the dotted lines lead from the end of a step on the CPU to the start of its work on the
# GPU, which still has earlier steps to do. All that the CPU does is hidden behind them.
#
# All recorded loops:

# %%
variants_figure(recorded["arms"], f"A step on the GPU: busy and idle; medians per step, {gpu}")

# %%
print(
    f"{'GPU, host work':>16}  {'arm':17} {'syncs':>5} {'blocked':>8} {'idle':>6} {'step':>6} {'without profiler':>17}"
)
for row in recorded["arms"]:
    facts = row["medians"]
    print(
        f"{row['gpu_us']:>7,.0f}, {row['host_us']:>4,.0f} µs  {row['arm']:17} {facts['synchronisations']:>5} "
        f"{facts['blocked_us']:>8,.0f} {facts['idle_us']:>6,.0f} {facts['step_us']:>6,.0f} "
        f"{median(row['unprofiled_step_us']):>17,.0f}"
    )

# %% [markdown]
# The loop stands for an engine and is none: an engine's scheduler and metadata take other times than these. And one loop
# without the copy has a bubble too (500 µs of GPU work, 200 µs of scheduling). Why?
#
# ## A small model
#
# A step is so much work of the host, *then* so much of the GPU. The GPU does one step after the other. With the copy the
# host waits for the end of its own step; without it, for nothing. That is all of the model:


# %%
def modelled(host_us: float, gpu_us: float, *, with_copy: bool, num_steps: int = 5) -> LoopExcerpt:
    """A loop from its first step on, CPU and GPU."""
    spans, cpu_us, gpu_free_us = [], 0.0, 0.0
    for step in range(num_steps):
        launched_us = cpu_us + host_us
        started_us = max(launched_us, gpu_free_us)
        gpu_free_us = started_us + gpu_us
        spans.append(Span(Lane.CPU, step, cpu_us, launched_us))
        spans.append(Span(Lane.GPU, step, started_us, gpu_free_us))
        cpu_us = launched_us
        if with_copy:
            spans.append(Span(Lane.CPU, step, launched_us, gpu_free_us, waits=True))
            cpu_us = gpu_free_us
    return LoopExcerpt("with the copy" if with_copy else "without the copy", tuple(spans), is_whole=True)


def step_us_of(excerpt: LoopExcerpt) -> float:
    """From the end of a step on the GPU to the end of the next, once the loop has settled."""
    before, last = excerpt.of(Lane.GPU)[-2:]
    return last.end_us - before.end_us


# %% [markdown]
# So a step takes *host + GPU* with the copy, and the larger of the two without. Is that what was recorded? The host's work
# is read from the timelines (three steps of each loop), the GPU's is the busy time of a step:

# %%


def host_us_of(row: dict) -> float:
    """Median over the recorded steps of what the CPU does besides waiting."""
    busy = [span for span in recorded_excerpt(row).of(Lane.CPU) if not span.waits]
    steps = {span.step for span in busy}
    return median(sum(span.end_us - span.start_us for span in busy if span.step == step) for step in steps)


print(f"{'GPU, host work':>16}  {'arm':17} {'host':>5} {'GPU':>6} {'model':>7} {'recorded':>9} {'off by':>7}")
for row in recorded["arms"]:
    busy_us = row["medians"]["step_us"] - row["medians"]["idle_us"]
    host_us = host_us_of(row)
    model_us = step_us_of(modelled(host_us, busy_us, with_copy=row["arm"] == "with the copy"))
    off = model_us / row["medians"]["step_us"] - 1
    print(
        f"{row['gpu_us']:>7,.0f}, {row['host_us']:>4,.0f} µs  {row['arm']:17} {host_us:>5,.0f} {busy_us:>6,.0f} "
        f"{model_us:>7,.0f} {row['medians']['step_us']:>9,.0f} {off:>7.1%}"
    )

# %% [markdown]
# Close enough to think with. What is missing is small gaps between kernels, the copy itself, and that the GPU does the
# metadata's small launches while the host still makes others.
#
# Now the question above answers itself: where the host's work is longer than the GPU's, the GPU waits for the host, copy or
# not.
#
# ## When does the bubble appear?
#
# Change the numbers. A layer's time here is what reading its weights takes, the least that a small batch can take: those of
# Llama-3.1-8B in bf16 (hidden size 4,096, 1,024 of K and of V, 14,336 in the MLP, by its config.json), over the bandwidth
# that a recorded run measured.

# %%
bandwidth_gbps = json.loads((RESULTS / "draft_steps.json").read_text())["environment"]["ceilings"]["bandwidth_gbps"]
hidden, kv, mlp = 4096, 1024, 14336
layer_bytes = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * mlp)

NUM_LAYERS = 32  # the reader's numbers: 1 is a draft model of one layer
HOST_WORK_US = 650  # of one step: scheduling, metadata, launches
LAYER_US = layer_bytes / (bandwidth_gbps * 1e3)

gpu_work_us = NUM_LAYERS * LAYER_US
loops = [modelled(HOST_WORK_US, gpu_work_us, with_copy=with_copy) for with_copy in (True, False)]
print(f"a layer {LAYER_US:.0f} µs; a step: host {HOST_WORK_US:,} µs, GPU {gpu_work_us:,.0f} µs")
for loop in loops:
    step_us = step_us_of(loop)
    print(f"{loop.name:17} a step takes {step_us:,.0f} µs, the GPU is idle for {1 - gpu_work_us / step_us:.0%} of it")
timeline_figure(loops, f"The model: {NUM_LAYERS} layers of {LAYER_US:.0f} µs, host work of {HOST_WORK_US:,} µs")

# %%
even = HOST_WORK_US / LAYER_US
print(f"below {even:.1f} layers the host is what a step waits for, with the copy and without")
layers = range(1, 49)
step_us = {
    name: [step_us_of(modelled(HOST_WORK_US, n * LAYER_US, with_copy=with_copy)) for n in layers]
    for name, with_copy in (("with the copy", True), ("without the copy", False))
}
step_time_figure(
    layers,
    [n * LAYER_US for n in layers],
    step_us,
    f"The model: a step over the number of layers, host work of {HOST_WORK_US:,} µs",
    chosen=NUM_LAYERS,
)

# %% [markdown]
# Three regimes:
#
# * **Many layers**: the copy costs all of the host's work in each step, and leaving it out hides that work entirely. The
#   share of the step shrinks as the GPU's work grows.
# * **As much GPU work as host work**: the copy doubles the step. This is the most that it can cost.
# * **Few layers** (a draft model): the host is the bottleneck. Leaving the copy out saves no more than the GPU's own time,
#   and a CUDA graph or a fused metadata kernel, which make the *host* cheaper, help more.
#
# ## The verify mask
#
# Target verify may read a mask of which draft token sees which. For a request of L tokens and d draft tokens, the full form
# is a block of d rows and L + d columns; the blocks lie end to end. SGLang's TRT-LLM backends draft chains, and their
# kernels take no such mask: causality is enough. (XQA on SM90 wants a packed mask of the draft tokens alone, another
# buffer.) The mask is made all the same, because the code that builds the tree of drafts writes one.
#
# Its size is where the lengths come in: *d times the sum of all lengths*. Without lengths on the host there are two ways
# out. SGLang 0.5.13 allocates the full form once for the largest batch and context. SGLang 0.5.23 sees that no kernel reads
# it and keeps the columns of the draft tokens alone. The picture has both for a small batch, as the lab writes them:

# %%
SEQ_LENS, NUM_DRAFT_TOKENS = (9, 5), 4  # the reader's numbers
small = [
    preallocate_verify_mask(form, max_batch_size=4, num_draft_tokens=NUM_DRAFT_TOKENS, max_context_len=16, device="cpu")
    for form in VerifyMaskForm
]
for mask in small:
    write_chain_mask(mask, torch.tensor(SEQ_LENS))
verify_mask_figure(small, SEQ_LENS, f"Masks of {len(SEQ_LENS)} requests, buffers for 4 requests of 16 tokens")

# %% [markdown]
# The fill is where the cost of the first way lies. Building a tree starts from a buffer of True, and without lengths the
# host cannot say where this batch's part ends: 0.5.13 fills the whole buffer in each step, however small the batch. Shown
# here, on buffers that were just cleared:

# %%
for mask in small:
    mask.buffer.zero_()
    fill_verify_mask(mask, batch_size=1)
    print(f"{mask.form.name:10} a batch of 1 sets {int(mask.buffer.sum())} of {mask.nbytes} bytes")

# %% [markdown]
# In a server's sizes, computed here:

# %%
MAX_BATCH_SIZE, D, MAX_CONTEXT_LEN = 256, 4, 131072  # the reader's numbers: what the server allows
BATCH_SIZE, LENGTH = 64, 8192  # and what one step has

sizes = {"batch_size": BATCH_SIZE, "num_draft_tokens": D, "max_context_len": MAX_CONTEXT_LEN}
largest = sizes | {"batch_size": MAX_BATCH_SIZE}
by_lengths = verify_mask_cells(VerifyMaskForm.FULL, **sizes, seq_lens_sum=BATCH_SIZE * LENGTH)
full, drafts = (verify_mask_cells(form, **largest) for form in (VerifyMaskForm.FULL, VerifyMaskForm.QLEN_ONLY))
print(f"{'':45} {'allocated':>15} {'bytes':>12} {'filled in a step':>17}")
for words, when, num_bytes in (
    ("before 26824: full, by the lengths on the host", "in each step", by_lengths),
    ("0.5.13: full, for the largest batch", "once", full),
    ("0.5.23: draft tokens alone, the same batch", "once", drafts),
):
    print(f"{words:46} {when:>14} {num_bytes:>12,} {num_bytes:>17,}")

# %% [markdown]
# And recorded, the GPU time of one fill for the largest batch:

# %%
for row in recorded["verify_masks"]:
    rate_gbps = row["mask_bytes"] / row["fill_us"] / 1e3
    print(
        f"{row['form']:18} {row['max_batch_size']} requests, {row['num_draft_tokens']} draft tokens, context "
        f"{row['max_context_len']:,}: {row['mask_bytes']:>11,} bytes, {row['fill_us']:>5.1f} µs ({rate_gbps:,.0f} GB/s)"
    )

# %% [markdown]
# The preallocated full mask bought freedom from the copy at the price of that fill in each step, and of the memory. A good
# trade wherever the host's work, which the copy lays bare, takes longer than the fill; the small mask has the freedom for
# next to nothing. What it took to fill a mask of a batch's own size was not measured.
#
# ## On your GPU
#
# The next cell runs one loop of the experiment with both variants where there is a CUDA GPU, and draws it. Without one it says
# so and draws the model's loop with the host's work that an H200's machine had.

# %%
LIVE = CopyLoopSettings(gpu_us=500, host_us=200, repeats=2)
if torch.cuda.is_available():
    where = f"on {torch.cuda.get_device_name()}, just now"
    excerpts = [recorded_excerpt(row) for row in measure_ends(LIVE)]
else:
    where = "the model: no CUDA GPU here"
    work_us = host_us_of(rows_of(500, 200)[1])
    excerpts = [modelled(work_us, LIVE.gpu_us, with_copy=with_copy, num_steps=3) for with_copy in (True, False)]
print(where)
timeline_figure(excerpts, f"{LIVE.gpu_us:,.0f} µs of GPU work, {LIVE.host_us:,.0f} µs of scheduling: {where}")

# %% [markdown]
# From a shell: `lab experiments length-copy --gpu-us 500,2000 --host-us 0,200 --out length_copy.json`. What the
# recorded numbers mean is in [draft_steps.md](../results/nvidia-h200/draft_steps.md), the copy itself in
# `lab/metadata/engine/host_mirrors.py`, the masks in `lab/metadata/speculation/verify_mask.py`.
