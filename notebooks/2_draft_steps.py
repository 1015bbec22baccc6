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
# # 2. The draft steps' dead work
#
# In speculative decoding a small draft model runs several decode passes in a row, each of which drafts a token. Each pass,
# or *draft step*, needs metadata of its own. SGLang has one template that makes it for many attention backends: first the
# ragged K/V lists of all steps, in one launch, then each backend's own metadata, a launch per step. The TRT-LLM backends
# never look at the lists. SGLang's change 26241 skips them for MLA, and states what that saves.
#
# This notebook shows what is made and what of it is read, then what each part takes on an H200, and where the saving is
# large and where it is not. You should know what a page table is ([notebook 1](1_forward_modes.ipynb) draws it). Everything
# runs on a CPU; where there is a GPU, the lists are made there, and one cell at the end times them.

# %%
# %matplotlib inline
import json
import os
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

import lab
from lab.kernels.serving.draft_decode_kv_indices import SERIAL_BLOCK_TOKENS
from lab.metadata import KVLayout
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.speculation.draft_steps import DraftPlan, MultiStepDraft, allocate_draft, prepare_draft
from lab.references import generate_draft_decode_kv_indices, trtllm_batch_decode_with_kv_cache
from lab.timing.roofline import measure_ceilings
from lab.workloads.traces import own_trace
from studies.draft_scenarios import DraftCase, build_verify, draft_decode
from studies.draft_steps import facts_of, implied_saving_us, median_of, point_of, works_of
from studies.draft_visibility import in_words, look
from studies.pictures.draft_steps import built_figure, claim_figure, draft_times_figure, lists_figure, steps_figure
from studies.variants import WARM, TimingPlan, measure_all

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# The reader's numbers: change them and run all cells again.
PREFIX_LENS = (9, 6)  # tokens of each request before the draft
NUM_STEPS = 3  # speculative_num_steps, 2 to 8
PAGE_SIZE = 4  # so that pages fit a picture; engines use 16 to 128

# %% [markdown]
# ## What is made, and what is read
#
# A draft of S = `speculative_num_steps` tokens runs the draft model S - 1 times by decode: the first token comes from the
# draft extend before it. Step s (from 0) reads a request's prefix and the s + 1 tokens drafted so far, its own included.
#
# The template says this twice. Each step's **page table** (`block_tables`) and **lengths** (`seq_lens`) name pages. Each
# step's **ragged list** (`kv_indices`, with `kv_indptr` for where each request's part begins) names every token's slot.
# FlashInfer's own backends read the list. The TRT-LLM kernels take pages and lengths alone. And the lists' kernel writes S
# lists, one for a step that no backend runs.

# %%
case = DraftCase(PREFIX_LENS, NUM_STEPS, PAGE_SIZE, max_context_len=64)
verify, pool = build_verify(case, DEVICE)
batch = draft_decode(verify)
template = MultiStepDraft(DraftAttention.MHA, NUM_STEPS, DraftPlan.COMMON_TEMPLATE)
buffers = allocate_draft(template, pool, batch.batch_size)
draft = prepare_draft(template, batch, pool, buffers)
draft.write()
built_figure(batch, pool, draft, buffers, f"What the common template makes for a draft of {NUM_STEPS} steps")

# %% [markdown]
# The lists are right: they are what the lab's reference, a loop over steps, requests and tokens, says.

# %%
kv_indices, kv_indptr = generate_draft_decode_kv_indices(
    batch.req_pool_indices,
    pool.req_to_token,
    batch.seq_lens,
    batch.seq_lens,
    num_steps=NUM_STEPS,
    topk=1,
    page_size=PAGE_SIZE,
)
for step in range(NUM_STEPS):
    written = buffers.kv_indices[step, : len(kv_indices[step])].cpu()
    assert torch.equal(written.long(), kv_indices[step])
    assert torch.equal(buffers.kv_indptr[step].cpu().long(), kv_indptr[step])
    print(f"list {step}: kv_indptr {kv_indptr[step].tolist()}, {len(kv_indices[step])} slots")

# %% [markdown]
# Right, and of no use. Spoil them, and each step's attention gives the same bits. Spoil one cell of a page table, and it
# does not:

# %%
generator = torch.Generator(DEVICE).manual_seed(0)
cache = pool.new_cache(1, 16, torch.float32, KVLayout.HND)
cache.storage.normal_(generator=generator)
query = torch.randn(batch.batch_size, 2, 16, generator=generator, device=DEVICE)


def attention_of_each_step() -> list[torch.Tensor]:
    """What a TRT-LLM decode call computes from each step's metadata: there is no argument for a list."""
    return [
        trtllm_batch_decode_with_kv_cache(
            query,
            cache.as_hnd(),
            None,
            step.metadata.page_table,
            step.metadata.cache_seqlens_int32,
            case.max_context_len,
        )
        for step in draft.steps
    ]


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[int]:
    return [step for step, pair in enumerate(zip(before, after, strict=True)) if not torch.equal(*pair)]


before = attention_of_each_step()
buffers.kv_indices.fill_(-7)
buffers.kv_indptr.fill_(-7)
print("lists spoilt: steps whose output changed:", changed(before, attention_of_each_step()) or "none")
draft.steps[0].metadata.page_table[0, 0] = 0  # the pool's sink, which holds no token of the request
print("a cell of step 0's page table spoilt:", changed(before, attention_of_each_step()))

# %% [markdown]
# The dead part is also the larger one. A list has a cell per token, a table a cell per page:

# %%
REQUESTS, TOKENS = 64, 80 * 1024  # the reader's numbers again, for what follows
CELL_BYTES = 4  # int32
BIG_PAGE = 64

lists_bytes = CELL_BYTES * sum(REQUESTS * (TOKENS + step + 1) for step in range(NUM_STEPS))
tables_bytes = CELL_BYTES * sum(REQUESTS * -(-(TOKENS + step + 1) // BIG_PAGE) for step in range(NUM_STEPS - 1))
print(f"{REQUESTS} requests of {TOKENS:,} tokens, {NUM_STEPS} steps, pages of {BIG_PAGE}:")
print(f"  ragged lists, written and not read  {lists_bytes:>12,} bytes")
print(f"  page tables, written and read       {tables_bytes:>12,} bytes")

# %% [markdown]
# ## What it takes on an H200
#
# What follows is recorded: [draft_steps.json](../results/nvidia-h200/draft_steps.json), made by `python -m
# studies.draft_steps`, explained in [draft_steps.md](../results/nvidia-h200/draft_steps.md). Times are of the GPU,
# by the method that the next cell prints, all plans of a point in turns, each output checked before and after. The kernels
# are the lab's own Triton ones: the serial lists follow SGLang's schedule, one program per step and request that walks the
# whole prefix, 128 tokens at a time.

# %%
RECORDED = Path(lab.__file__).parents[1] / "results" / "nvidia-h200" / "draft_steps.json"
recorded = json.loads(RECORDED.read_text())
rows, gpu = recorded["rows"], recorded["environment"]["gpu"]
print(
    f"{gpu}, commit {recorded['environment']['commit']}: {len({row['point'] for row in rows})} points, {len(rows)} rows"
)
print(recorded["method"])
draft_times_figure(rows, f"Metadata of one draft of 3 steps, static buffers, {gpu}")

# %% [markdown]
# MHA and MLA look alike: their own metadata differs, the lists before it are the same. Three things to see:
#
# * The shaded part is what nobody reads. It grows with the tokens of the *longest* request, and at first hardly with the
#   number of requests: programs run side by side, and each walks alone.
# * What is left, the steps' own metadata, is a few microseconds, until the page tables themselves are large.
# * One launch for all steps takes half of that, because with 3 steps it replaces two.
#
# ### Was it the lists, or how they were made?
#
# The serial walk is far from what the bytes would take. A kernel that reads each prefix once and shares it out among many
# programs is not:

# %%
lists_figure(rows, f"The ragged lists of 3 steps alone, {gpu}")

# %%


def lists_us(schedule: str, point: str) -> float:
    return median_of(rows, f"kv_indices/{schedule}/{{}}", point)


short, long = 1024, 131072
per_block_us = (
    (lists_us("serial", "1x128k/steps3") - lists_us("serial", "1x1k/steps3")) * SERIAL_BLOCK_TOKENS / (long - short)
)
print(f"serial: {per_block_us:.2f} µs for each {SERIAL_BLOCK_TOKENS} tokens of one request's prefix")
print(f"{'requests x tokens':>18} {'serial, µs':>11} {'read once, µs':>14} {'serial is':>11}")
for point in (f"{count}x{length}" for count in (1, 8, 64, 256) for length in ("1k", "8k", "32k", "128k")):
    serial, spread = (lists_us(schedule, f"{point}/steps3") for schedule in ("serial", "spread"))
    print(f"{point:>18} {serial:>11.1f} {spread:>14.1f} {serial / spread:>10.1f}x")

# %% [markdown]
# At many short requests the shared-out kernel is the slower one: it does not know the lengths when it shares, and most of
# its programs find nothing to do. Everywhere else most of what 26241 saved was the serial schedule. Skipping the lists is
# right all the same, for nobody reads them, and the best kernel for dead work is none.
#
# ### One launch for all steps
#
# The steps' page tables are the same table (a step reads no page that the next does not), and the lengths differ by one. So
# one launch can write one table and all lengths. It does not grow with the steps:

# %%
STEPS_AT = (64, 8192)  # requests, tokens: a point of the grid, for instance (1, 131072) or (256, 1024)
steps_figure(rows, f"{STEPS_AT[0]} requests of {STEPS_AT[1]:,} tokens, {gpu}", requests=STEPS_AT[0], tokens=STEPS_AT[1])

# %% [markdown]
# Times on the host, of the calls that launch this at one point of the grid. Where no CUDA graph holds the launches, the
# lists keep the host busy as well:

# %%
host = {row["call"]: row["host_us"] for row in recorded["host"]}
print(recorded["host_method"])
print(
    f"{'host µs per draft, MHA, 64 requests of 8,192 tokens':52} {'lists and steps':>16} {'steps':>7} {'one launch':>11}"
)
for words, form in (("static buffers", ""), ("the same, replayed in a CUDA graph", " in a graph"), ("eager", "/eager")):
    calls = [f"draft_steps/mha/{plan}/64x8k/steps3{form}" for plan in ("common_template", "per_step", "one_launch")]
    cells = [f"{host[call]:.0f}" if call in host else "" for call in calls]
    print(f"{words:52} {cells[0]:>16} {cells[1]:>7} {cells[2]:>11}")

# %% [markdown]
# *Eager* is the template as SGLang runs it without a graph: it also allocates and clears room for the longest context of
# every request in each draft, and copies each step's list.
#
# ## The claim
#
# 26241's description gives the time per output token before and after, and how many tokens an iteration yields. That makes a
# saving per iteration:

# %%
stated = recorded["pr_26241"]["claim"]
print(
    f"stated: {stated['tpot_before_ms']} -> {stated['tpot_after_ms']} ms per token, {stated['accept_length']} tokens each"
)
print(f"that is {implied_saving_us(stated):.0f} µs per iteration")
for point, saved_us in recorded["pr_26241"]["gpu_saving_us_per_draft_mla"].items():
    print(
        f"saved on the GPU here, {point:>13}: {saved_us:>3.0f} µs, {saved_us / implied_saving_us(stated):>4.0%} of it"
    )
claim_figure(recorded["pr_26241"], f"What skipping the lists saves here, {gpu}, MLA, 3 steps; and what 26241 states")

# %% [markdown]
# The claim's context is 80K tokens and 3 steps; its GPU and batch size are not stated, and it ran a whole engine, which this
# does not. What can be said:
#
# * **It holds in kind.** At 80K tokens the skip saves the GPU what is drawn above; where the host is what an iteration waits
#   for, the host's share counts too. (The host's times are those of MHA with 1 request of 8K tokens; lengths hardly matter
#   to them.) On an H200 both together are less than what is stated, but for the largest batch.
# * **It needs long contexts.** The next cell has the saving over the whole grid: at 1K tokens it is a few microseconds.
# * **It needs the serial schedule.** Lists made by the kernel that reads each prefix once would leave much less to save: the
#   last column.
# * **It is no matter of MLA.** The same lists would cost MHA as much, whose backend does not read them either.

# %%
print(f"{'':>18} {'saved by skipping the lists, µs':^44}")
print(f"{'requests x tokens':>18} {'MHA, serial':>12} {'MLA, serial':>12} {'lists that read once':>21}")
for point in dict.fromkeys(row["point"] for row in rows if row["num_steps"] == 3):
    saved = [
        median_of(rows, f"draft_steps/{attention}/common_template/{{}}", point)
        - median_of(rows, f"draft_steps/{attention}/per_step/{{}}", point)
        for attention in ("mha", "mla")
    ]
    print(f"{point.split('/')[0]:>18} {saved[0]:>12.1f} {saved[1]:>12.1f} {lists_us('spread', point):>21.1f}")

# %% [markdown]
# `trace` rows are running requests of a recorded trace, of very different lengths; the longest decide. The last column is
# the GPU time of those lists by themselves: a template with them was not timed.
#
# ## What a draft step sees
#
# Reading both backends' metadata shows something else. MHA's step s is told `seq_lens + s + 1`. MLA's backend tells every
# step `seq_lens` (SGLang 0.5.11 to 0.5.23). What that lets a query see can be computed: the lab's reference attends over
# coded values, from which the set of keys can be read off.

# %%
for attention in (DraftAttention.MHA, DraftAttention.MLA, DraftAttention.MLA_WITH_OFFSET):
    for sight in look(attention, [31], NUM_STEPS, DEVICE):
        print(in_words(sight))

# %% [markdown]
# With MLA's lengths a draft step sees neither its own token nor those that the draft wrote before it, although all are in
# the cache. The target model verifies every token, so outputs stay right; drafts may be accepted less often. How often was
# not measured: that takes a trained draft model.
#
# ## On your GPU
#
# The next cell times all plans at one point where there is a CUDA GPU; without one it says so. All other cells are the same
# everywhere.

# %%
POINT = "8x80k/steps3"  # requests x tokens, steps
if torch.cuda.is_available():
    plan = TimingPlan(measure_ceilings(torch.device("cuda")), WARM)
    measured = measure_all(point_of(POINT, own_trace()), works_of, plan, facts_of)
    for row in measured:
        print(f"{row['scenario']:52} {row['median_us']:>8.1f} µs")
else:
    print("no CUDA GPU here: nothing was timed")

# %% [markdown]
# The same from a shell, over the whole grid: `lab experiments draft-steps --out draft_steps.json`. The two
# schedules are in `lab/kernels/serving/draft_decode_kv_indices.py`, what they must write in
# `lab/references/draft_decode_kv_indices.py`, and `judge(my_kernel, only=["L1"])` judges another.
