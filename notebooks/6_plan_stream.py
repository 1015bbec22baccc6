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
# # 6. The plan stream: verify's metadata beside the draft
#
# A speculative iteration drafts, then verifies. Before the verification its metadata must be built: lengths, offsets, page
# tables. It stands between the draft's end and verify's start, on the critical path, unless it is built *while* the draft
# runs: on a second stream, the plan stream. SGLang's change 25925 gave the TRT-LLM MHA backend the hook for that, and the hook
# is a no-op: nothing has to be mended after the draft. This notebook asks
#
# 1. what planned metadata **may depend on**, and how a plan that depends on the draft is caught;
# 2. what the overlap looks like on a GPU;
# 3. what it **saved** on an NVIDIA H200, and where it did not.
#
# The first part runs live on a CPU; the rest draws a recorded profile.

# %%
# %matplotlib inline
import json
import statistics
from pathlib import Path

import torch

import lab
from lab.metadata import ForwardBatch, ForwardMode, KVLayout, KVPool, SpecInfo
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.mha.metadata import MetadataBuilder
from lab.metadata.speculation.plan_stream import (
    ChainVerify,
    FixUp,
    PlannedVerify,
    PlanStream,
    TreeMaskVerify,
    verify_metadata_under,
)
from lab.metadata.speculation.verify_mask import pack_tree_mask
from studies.pictures.plan_stream import dependence_figure, saved_figure, savings_of_overlap, two_lane_figure
from studies.plan_stream import PlanLoopSettings, measure_plannings

D = 4  # draft tokens of each request: the reader's number, 2 to 16
SEQ_LENS = (20, 33, 7)
BACKEND = TRTLLMMHABackend(builder=MetadataBuilder.TORCH_OPERATIONS)  # the other, FUSED, is one Triton launch

# %% [markdown]
# ## What may be planned
#
# A verification of a *chain* is causal: row j sees the accepted tokens and the draft tokens up to its own. Its metadata is
# made of four things, and all are known before the draft runs: the lengths, which requests they are, the request table (the
# draft's slots are already reserved in it), and d. The draft's tokens enter by the model's input ids and by the K/V that it
# writes into those slots; no metadata holds either.
#
# A verification of a *tree* needs more: a mask that says which draft tokens are ancestors of which. That is the draft's
# result.
#
# Let us find out by changing one thing at a time. `TreeMaskVerify` plans a chain's metadata and a mask; `PlanStream.run`
# drafts, plans, fixes up and hands verify what was planned.


# %%
def parents_of(*parents: int) -> torch.Tensor:
    """One tree: the draft token that each one follows; -1 follows the last accepted token."""
    return torch.tensor([parents])


CHAIN = parents_of(*range(-1, D - 1))
FORK = parents_of(*(max(-1, j // 2 - 1) for j in range(D)))  # two tokens follow each


def new_pool() -> tuple[KVPool, list[int]]:
    pool = KVPool(num_requests=8, max_context_len=64, page_size=16, num_pages=40)
    return pool, [pool.add_request(60) for _ in SEQ_LENS]


def batch_of(pool: KVPool, rows: list[int], seq_lens: tuple[int, ...] = SEQ_LENS) -> ForwardBatch:
    slots = [pool.slots(row, length, length + D) for row, length in zip(rows, seq_lens, strict=True)]
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        req_pool_indices=torch.tensor(rows),
        seq_lens=torch.tensor(seq_lens),
        out_cache_loc=torch.cat(slots),
        num_tokens=D * len(rows),
        spec_info=SpecInfo(num_draft_tokens=D),
    )


def draft_of(tree: torch.Tensor, cache=None, slots=None):
    """A draft that fills the buffer it is handed, if any, with a tree, and may write K/V."""

    def draft(buffers) -> None:
        if buffers[0] is not None:
            buffers[0][: len(SEQ_LENS)] = tree
        if cache is not None:
            cache.write(slots, torch.ones(len(slots), 1, 16), torch.ones(len(slots), 1, 16))

    return draft


def handed(pool: KVPool, batch: ForwardBatch, draft) -> dict[str, torch.Tensor]:
    """Copies of all that verify is handed in one iteration."""
    planner = PlanStream(TreeMaskVerify(pool, D, [len(SEQ_LENS)], BACKEND))
    (tensors,) = verify_metadata_under(planner, batch, [draft])
    return {name.removesuffix("_int32"): tensor for name, tensor in tensors.items()}


pool, rows = new_pool()
before = handed(pool, batch_of(pool, rows), draft_of(CHAIN))

longer = tuple(length + 8 for length in SEQ_LENS)  # enough to cross into another page
other_pool, other_rows = new_pool()
other_pool.req_to_token[other_rows[0]] += other_pool.page_size  # the same requests, on other pages
cache = pool.new_cache(1, 16, torch.float32, KVLayout.HND)
batch = batch_of(pool, rows)

after = {
    "lengths": handed(pool, batch_of(pool, rows, longer), draft_of(CHAIN)),
    "which requests": handed(pool, batch_of(pool, rows[::-1]), draft_of(CHAIN)),
    "request table": handed(other_pool, batch_of(other_pool, other_rows), draft_of(CHAIN)),
    "the draft's K/V": handed(pool, batch, draft_of(CHAIN, cache, batch.out_cache_loc)),
    "the draft's tree": handed(pool, batch, draft_of(FORK)),
}
changed = {
    cause: {name: not torch.equal(tensor, before[name]) for name, tensor in tensors.items()}
    for cause, tensors in after.items()
}
known = {cause: "known after the draft" if "draft" in cause else "known before" for cause in changed}
dependence_figure(changed, "What changes verify's metadata", known)

# %% [markdown]
# Only the mask changes with what the draft made. Everything else may be planned beside it. (The offsets of the query rows
# change with nothing: d is fixed when the graph is captured.)
#
# ## The contract
#
# | a backend says | it means | then |
# |---|---|---|
# | `FixUp.NONE` | the draft's tokens, positions and tree are in nothing that it plans | verify starts on the plan |
# | `FixUp.AFTER_DRAFT` | part of it depends on the draft | it defines the hook that mends that part |
# | nothing | nobody has thought about it | it is refused |
#
# The hook is `update_verify_buffers_to_fill_after_draft`, called when draft and plan have ended; writing that part is the
# *fix-up*. It has SGLang's name. There a backend without it raises `NotImplementedError` when the plan stream first calls it;
# here it is refused before anything runs. So is a backend that says one thing and defines another:


# %%
class SaysNothing(ChainVerify):
    fix_up = None


class SaysOneThingAndDoesAnother(TreeMaskVerify):
    fix_up = FixUp.NONE


for backend in (SaysNothing, SaysOneThingAndDoesAnother):
    try:
        PlanStream(backend(pool, D, [len(SEQ_LENS)], BACKEND))
    except (NotImplementedError, ValueError) as refusal:
        print(f"{type(refusal).__name__}: {refusal}\n")

# %% [markdown]
# ## A plan that depends on the draft, caught
#
# A declaration can be wrong. This backend says `NONE`, defines no fix-up, and packs the mask in its *plan*, from the buffer
# that the draft fills:


# %%
class PlansTheTree(ChainVerify):
    """Wrong: the mask is planned, and the draft is in it."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.parents = CHAIN.repeat(len(SEQ_LENS), 1)

    def get_verify_buffers_to_fill_after_draft(self):
        return [self.parents, None]

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        planned = super().plan(batch)
        return PlannedVerify(planned.batch, planned.metadata, pack_tree_mask(self.parents))


def draft_reaches_the_plan(backend) -> list[str]:
    """The tensors that differ between two drafts, although the backend says that no draft is in them."""
    chain, fork = verify_metadata_under(PlanStream(backend), batch, [draft_of(CHAIN), draft_of(FORK)])
    assert backend.fix_up is FixUp.NONE
    return [name for name in chain if not torch.equal(chain[name], fork[name])]


for backend in (ChainVerify, PlansTheTree):
    reached = draft_reaches_the_plan(backend(pool, D, [len(SEQ_LENS)], BACKEND))
    print(f"{backend.__name__}: {'CAUGHT, the draft reaches ' + ', '.join(reached) if reached else 'keeps its word'}")

# %% [markdown]
# No output has to be looked at for that, and none would have told: where everything runs in order, as here, the plan comes
# behind the draft and the mask is right. On two streams the plan may come first. So it would read the tree of the iteration
# before:


# %%
def visible(mask: torch.Tensor) -> list[str]:
    """Request 0's rows: which draft tokens each sees."""
    words = mask[0, :, 0].to(torch.int32)
    return ["".join("x" if word >> j & 1 else "." for j in range(D)) for word in words.tolist()]


def plan_first(backend, tree: torch.Tensor) -> torch.Tensor:
    """As on two streams, where the plan happens to be the faster one."""
    planned = backend.plan(batch)
    draft_of(tree)(backend.get_verify_buffers_to_fill_after_draft())
    if backend.fix_up is FixUp.AFTER_DRAFT:
        backend.update_verify_buffers_to_fill_after_draft(planned)
    return planned.mask


wanted = visible(pack_tree_mask(FORK))
planned_early = visible(plan_first(PlansTheTree(pool, D, [len(SEQ_LENS)], BACKEND), FORK))
fixed_up = visible(plan_first(TreeMaskVerify(pool, D, [len(SEQ_LENS)], BACKEND), FORK))
print("draft token    the tree's   planned early   with a fix-up")
for j in range(D):
    print(f"{j:11}    {wanted[j]:13}{planned_early[j]:16}{fixed_up[j]}")
assert fixed_up == wanted != planned_early

# %% [markdown]
# `TreeMaskVerify`, which writes its mask in the fix-up, is right in either order.
#
# The order of the two streams is held by four events (`PlanStream` has the table): the plan waits until the inputs are final
# and the last verify has ended; the forward stream waits for the plan. SGLang 0.5.11 and 0.5.12 let the plan wait for the
# *draft's* end, and so does 0.5.23, by waiting for all that the forward stream then holds: neither has any overlap with the
# draft. 0.5.13 let it wait for nothing.
#
# ## Two lanes
#
# The recorded run is `lab experiments plan-stream`: stand-ins for draft and target model (CUDA graphs of matrix
# products, as long as asked), real metadata, torch.profiler's trace. Each rectangle is one kernel or copy of one iteration.

# %%
RECORDED = Path(lab.__file__).parents[1] / "results" / "nvidia-h200" / "plan_stream.json"
run = json.loads(RECORDED.read_text(encoding="utf-8"))
loops = run["arms"]
on = f"{run['environment']['gpu']}, commit {run['environment']['commit']}"
one = loops[0]
print(f"{RECORDED.name}: {on}, torch {run['environment']['packages']['torch']}")
print(f"{one['batch_size']} requests of {one['seq_len']:,} tokens and {one['num_draft_tokens']} draft tokens")
print(f"method: {run['method']}")
print(
    f"drafts of {sorted({row['draft_us'] for row in loops})} µs, targets of {sorted({row['verify_us'] for row in loops})} µs"
)


def rows_of(drafts: str, builder: str, draft_us: float) -> dict[str, dict]:
    """The recorded rows of one kind of iteration, by where the plan starts."""
    kind = (drafts, builder, draft_us)
    return {row["start"]: row for row in loops if (row["drafts"], row["builder"], row["draft_us"]) == kind}


PLANNED_WITH = {"torch operations": "torch operations", "fused": "one launch behind three copies"}


def lanes(drafts: str, builder: str, draft_us: float, window_us=None):
    timelines = {
        f"plan {start}: {row['medians']['plan_launches']:.0f} launches": row["timeline"]
        for start, row in rows_of(drafts, builder, draft_us).items()
    }
    return two_lane_figure(timelines, f"{drafts}, {PLANNED_WITH[builder]}, draft of {draft_us:g} µs, {on}", window_us)


lanes("chains", "torch operations", 400.0)

# %% [markdown]
# Above, the plan stands between draft and verify; in the middle it has a stream of its own and waits for the draft, which
# hides nothing; below it runs beside the draft. It takes longer there, because the draft's products fill the GPU, but verify
# no longer waits for it.
#
# A tree's mask cannot be planned. Its fix-up stays between draft and verify wherever the plan is:

# %%
lanes("trees", "fused", 400.0)

# %% [markdown]
# Change the kind of iteration, and the window to look closer (µs; `None` shows all up to verify):

# %%
DRAFTS, PLANNED_BY, DRAFT_US = "chains", "fused", 100.0  # chains, trees; torch operations, fused; 100.0, 400.0
WINDOW_US = (0.0, 140.0)
lanes(DRAFTS, PLANNED_BY, DRAFT_US, WINDOW_US)

# %% [markdown]
# ## What it saved, and where not
#
# Iterations planned in line, less those planned after the inputs. The trace costs the host some time for each launch, so each
# is there twice: with the profiler, and without it by the host's clock over whole runs. Runs took turns; a dot is one round of
# them.

# %%
saved = savings_of_overlap(loops)
saved_figure(saved, f"What planning beside the draft saves: {on}")

# %%
kinds = list(dict.fromkeys((row["drafts"], row["builder"], row["draft_us"]) for row in loops))
print(f"{'':44}the plan beside the draft, µs   draft to verify, µs   rounds without a profiler")
print(f"{'':44}{'whole':>8}{'busy':>8}{'hidden':>9}{'in line':>14}{'beside':>10}   in which it saved")
for each, kind in zip(saved, kinds, strict=True):
    in_line, beside = (rows_of(*kind)[start]["medians"] for start in ("in line", "after the inputs"))
    rounds = each.untraced_rounds_us
    print(
        f"{each.name:44}{beside['plan_us']:8.1f}{beside['plan_busy_us']:8.1f}{beside['hidden_us']:9.1f}"
        f"{in_line['between_us']:14.1f}{beside['between_us']:10.1f}   {sum(us > 0 for us in rounds)} of {len(rounds)}"
    )

# %% [markdown]
# Read from this recording:
#
# * **It holds** for plans of many small launches beside a draft that outlasts them: what was between draft and verify is gone
#   but for a few µs, with chains and, apart from the fix-up, with trees.
# * **It is little** with one launch (`fused`, as in SGLang 0.5.23; the batch's copies into the graph's inputs go before it):
#   there is little left to hide. Compare the two builders *in line*: making the metadata cheap takes more from the critical
#   path than overlapping the rest of it.
# * **It does not hold** beside a draft of 100 µs for chains. With torch operations the plan outlasts the draft; with one
#   launch what the second stream costs the host is more than what it hides. The rounds without a profiler scatter around zero
#   or below it.
#
# What was not measured: a real draft model, whose kernels leave more of the GPU free than these products do, and a host that
# is busy with a scheduler.
#
# ## What the fix-up costs by itself
#
# Writing the packed mask of random trees, as a CUDA graph would replay it. Change the draft's size:

# %%
DRAFT_TOKENS = 16  # 4, 8, 16 or 64
for row in run["fix_ups"]:
    if row["num_draft_tokens"] == DRAFT_TOKENS:
        print(
            f"{row['batch_size']:4} requests: {row['gpu_us']:.1f} µs in {row['launches']} launches of a graph; "
            f"one by one they would take the host {row['host_us']:.0f} µs"
        )

# %% [markdown]
# ## On your GPU
#
# Where a GPU is present, this cell profiles one run of every variant, checks what verify was handed, and prints what
# was between draft and verify.

# %%
if torch.cuda.is_available():
    for row in measure_plannings(PlanLoopSettings(draft_us=400.0, verify_us=1000.0, repeats=1)):
        print(
            f"{row['drafts']}, {row['builder']}, {row['start']}: {row['medians']['between_us']:.1f} µs between, iteration "
            f"{row['medians']['iteration_us']:.1f}, untraced {statistics.median(row['unprofiled_iteration_us']):.1f}"
        )
else:
    print("No GPU here: nothing is profiled. All of it: lab experiments plan-stream")
