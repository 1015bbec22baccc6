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
# # 1. Forward modes and their metadata, drawn
#
# A serving engine runs one model in several *forward modes*. In each, it hands the attention kernel the same few arguments,
# its *metadata*, but fills them differently. This notebook draws, for each mode, which query row reads which keys on which
# page, and answers one question that is easy to get wrong:
#
# > Why does target verify add `num_draft_tokens` to the lengths, and why does draft extend V2 not?
#
# You should know attention and paged K/V caches. You need not know SGLang: its modes are explained as they come. Everything
# runs on a CPU. What is said of SGLang is of version 0.5.23, and of draft extend v1 of 0.5.13, the last that has it;
# `build_mha_metadata` follows these.

# %%
# %matplotlib inline
from dataclasses import replace

import torch

import lab.references
from lab.checks import ForwardCase, ForwardMode, judge_case
from lab.metadata import ForwardBatch, KVPool, TRTLLMMHAMetadata, build_mha_metadata
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward
from studies.pictures.forward_modes import reading_figure, request_reads

PAGE_SIZE = 4  # so that pages fit a picture; engines use 16 to 128
NUM_DRAFT_TOKENS = 4  # the reader's number: try 1, 3 or 6, and run all cells again
PREFIX_LENS = (9, 6)  # tokens of each request before the pass


def forward_pass(
    mode: ForwardMode,
    prefix_lens: tuple[int, ...],
    q_lens: tuple[int, ...],
    draft_step: int | None = None,
    build_metadata=build_mha_metadata,
) -> ForwardPass:
    """Requests with histories, admitted to a pool of shuffled pages, and their metadata."""
    case = ForwardCase(mode, "tiny", prefix_lens, q_lens, draft_step=draft_step, page_size=PAGE_SIZE)
    return build_forward(case, torch.device("cpu"), build_metadata)


def draw(forward: ForwardPass, title: str | None = None):
    return reading_figure(forward.batch, forward.pool, forward.metadata, title)


# %% [markdown]
# ## The arguments
#
# | argument of FlashInfer's call | shape | what it says |
# |---|---|---|
# | `block_tables` | `[batch_size, most pages]` | which page holds tokens 0 to P-1 of a request, which the next P, … |
# | `seq_lens` | `[batch_size]` | how many keys a request has: how far into its pages the kernel reads |
# | `q_len_per_req` of a decode call | a number | query rows of every request |
# | `cum_seq_lens_q` of a context call | `[batch_size + 1]` | first query row of each request, where they differ |
#
# No argument says *where* a query row stands. A kernel infers it: **the last query row of a request stands at its last key**,
# and the rows before it at the keys before. With n keys and q rows, row j (from 0) stands at position n - q + j and reads the
# keys up to that position, its own included. So the length does two things at once: it says how many keys there are, and it
# places every row. K and V of the new tokens are written into their pages *before* the kernel runs, so it must count them.
#
# Now keep two numbers apart. The **engine's** `seq_lens` is its own book: how many tokens a request has, by its rules. The
# **kernel's** `seq_lens` is what the kernel is handed (`cache_seqlens_int32` in SGLang). In most modes they are equal. Where
# they are not, somebody must add the difference.
#
# ## Decode
#
# One new token per request. The engine counts it when it schedules the pass, because it is certain to stay: the two lengths
# are equal.

# %%
draw(forward_pass(ForwardMode.DECODE, PREFIX_LENS, (1, 1)), "DECODE: one new token each, counted by the engine")

# %% [markdown]
# The pages of a request are not in order, and that is as it should be: an engine hands out whichever is free. A line under
# the tokens is one query row; its cells are the keys that it reads, and the dot is the row's own token.
#
# ## Draft decode
#
# Speculative decoding has a small *draft model* guess the next few tokens one after the other, in decode passes of its own:
# step 0, step 1, … A guess may be thrown away, so **the engine does not count it**: `seq_lens` stays at the last token that
# is certain. But step s must read the tokens that the draft's steps before it wrote, and its own. So s + 1 is added.

# %%
draw(forward_pass(ForwardMode.DECODE, PREFIX_LENS, (1, 1), draft_step=1), "Draft decode, step 1: seq_lens + 2")

# %% [markdown]
# (That is TRT-LLM attention for MHA. SGLang's MLA backend adds nothing in a draft step; `lab.metadata.DraftAttention` has
# both.)
#
# ## Target verify
#
# Now the large *target model* reads all `num_draft_tokens` in one pass, one query row per draft token, and so says at each of
# them what it would have said. How many of them stay is known only *after* this pass. So here, too, the engine cannot have
# counted them. Yet the pass has written their K and V, and row j must read the draft tokens up to its own. The metadata
# therefore adds `num_draft_tokens` (d below): one for each query row.

# %%
draft_rows = tuple(NUM_DRAFT_TOKENS for _ in PREFIX_LENS)
verify = forward_pass(ForwardMode.TARGET_VERIFY, PREFIX_LENS, draft_rows)
draw(verify, "TARGET_VERIFY: nothing is certain yet, so d is added")

# %% [markdown]
# ## Draft extend, v1
#
# Verification has accepted some draft tokens. The draft model must catch up: it needs K and V of the accepted tokens, made
# from the target's hidden states. In the first version it runs over exactly the accepted tokens, a different number for each
# request. **They are certain now, and the engine has counted them** before it runs this pass. Nothing is added.

# %%
accepted = tuple(max(1, NUM_DRAFT_TOKENS - 2 * request) for request in range(len(PREFIX_LENS)))
draw(
    forward_pass(ForwardMode.DRAFT_EXTEND, PREFIX_LENS, accepted),
    "DRAFT_EXTEND (v1): accepted tokens, counted by the engine",
)

# %% [markdown]
# ## Draft extend, V2
#
# Rows that differ per request are awkward to freeze in a CUDA graph, and a decode call of one width for all cannot take them.
# V2 runs over all d tokens of every request, accepted or not; afterwards the engine takes the row of the last accepted token,
# and later lengths stop before what the rejected ones left. The rows and the keys are those of target verify:

# %%
draft_extend = forward_pass(ForwardMode.DRAFT_EXTEND_V2, PREFIX_LENS, draft_rows)
draw(draft_extend, "DRAFT_EXTEND_V2: the same rows, but d is in seq_lens already")

# %% [markdown]
# Only the grey line differs. SGLang prepares this pass as an *extend* of d new tokens per request, and an extend's `seq_lens`
# counts its new tokens by definition: the caller has moved it to prefix + d before any metadata is built. (Prefix + d is a
# working number of this pass, rejected tokens included. It is not what the request has in the end.) Adding d once more would
# count tokens that nobody wrote.
#
# **The answer in one sentence:** the kernel is always told *position of the last query row + 1*. In verify the engine's own
# book stops before the draft, for it cannot know what will stay, so the metadata adds d; in draft extend V2 the caller has
# already put the d tokens into the book, so nothing is left to add.

# %%
for forward in (verify, draft_extend):
    print(f"{forward.batch.forward_mode.name:16} engine {forward.batch.seq_lens.tolist()}", end="  ")
    print(f"kernel {forward.metadata.cache_seqlens_int32.tolist()}", end="  ")
    print(f"rows {[len(each.rows) for each in request_reads(forward.batch, forward.pool, forward.metadata)]}")
assert verify.metadata.cache_seqlens_int32.equal(draft_extend.metadata.cache_seqlens_int32)

# %% [markdown]
# ## Change a number
#
# Move the draft's length and the prefix, and watch three things: the kernel's line is always as far ahead of the engine's as
# there are query rows; the last row always stands at the last key; and a page joins the table only when the longer length
# crosses its boundary. From prefix 5, d = 3 still ends on the second page; try 4, which needs a third one.

# %%
D, PREFIX = 3, 5  # change these
draw(forward_pass(ForwardMode.TARGET_VERIFY, (PREFIX,), (D,)), f"TARGET_VERIFY, prefix {PREFIX}, d = {D}")

# %% [markdown]
# ## Forget it
#
# What if the metadata of a verify pass is built without adding d? Nothing crashes: the lengths are good lengths, the pages
# good pages. This builder forgets, and nothing else:


# %%
def forgets_the_draft(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """As `build_mha_metadata`, but the kernel is handed the engine's own `seq_lens`."""
    right = build_mha_metadata(batch, pool)
    lengths = batch.seq_lens.to(torch.int32)
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return replace(right, cache_seqlens_int32=lengths, cu_seqlens_k=offsets)


forgetful = forward_pass(ForwardMode.TARGET_VERIFY, PREFIX_LENS, draft_rows, build_metadata=forgets_the_draft)
draw(forgetful, "TARGET_VERIFY, d forgotten: every row stands d tokens too early")

# %% [markdown]
# Every row reads d keys too few: not only do rows miss the draft, the first ones miss the end of the prompt too, since the
# last row is now taken to stand at the last *counted* token. The output is finite and looks like attention. The lab's
# references run it as they are told, and the judge holds it against the truth, which is computed from each request's history
# and never saw a length or a page table. An error of 1 is that of an output of zeros:


# %%
def errors(forward: ForwardPass) -> None:
    """Relative L2 error of each query row's output, the worst head's, and what bf16 arithmetic may make."""
    out = torch.empty_like(forward.query)
    forward.run(lab.references, out)
    comparison = forward.truth().compare(out)
    for each in request_reads(forward.batch, forward.pool, forward.metadata):
        for row in each.rows:
            error, bound = comparison.error[row].max(), comparison.bound[row].max()
            verdict = "right" if error <= bound else "WRONG"
            print(f"row {row}: reads {len(each.read(row)):2} of {len(each.wanted(row)):2} keys, ", end="")
            print(f"error {error:.0e} of {bound:.0e} allowed: {verdict}")


print("as SGLang builds it")
errors(verify)
print("with d forgotten")
errors(forgetful)

# %% [markdown]
# The opposite mistake is to add d in draft extend V2, because it looks like verify. Each row then reads d keys too many: the
# draft tokens behind its own, slots that nobody has written, and even a page that the request does not own (page 0 is the
# pool's sink, where padded rows write):


# %%
def adds_the_draft_again(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
    """As `build_mha_metadata` in a pass whose `seq_lens` stands d tokens further on."""
    return build_mha_metadata(replace(batch, seq_lens=batch.seq_lens + NUM_DRAFT_TOKENS), pool)


twice = forward_pass(ForwardMode.DRAFT_EXTEND_V2, PREFIX_LENS, draft_rows, build_metadata=adds_the_draft_again)
draw(twice, "DRAFT_EXTEND_V2, d added twice: every row stands d tokens too late")

# %%
errors(twice)

# %% [markdown]
# The error is as large as a relative error can well be because the judge *poisons* every slot that no pass has written: what
# must not be read is made to show. In production such a slot holds an earlier request's K and V, and the output is wrong
# without looking so.
#
# A metadata builder can be judged by itself: check K16 compares each field with the lab's own loops over requests, and what
# is read through it with the truth. Here on the pass drawn above; `judge(Forgetful)` takes all modes, in about half a minute.


# %%
class Forgetful:
    """An implementation of one function: it is wrong in one mode."""

    @staticmethod
    def build_mha_metadata(batch: ForwardBatch, pool: KVPool) -> TRTLLMMHAMetadata:
        build = forgets_the_draft if batch.forward_mode is ForwardMode.TARGET_VERIFY else build_mha_metadata
        return build(batch, pool)


verdict = judge_case(Forgetful, "K16", verify.case, device="cpu")
print(f"{verdict.outcome.value}: {verdict.judged.wrongs[0]}")

# %% [markdown]
# ## The other modes
#
# **Extend** (prefill) brings many new tokens at once, behind a cached prefix or behind nothing. `seq_lens` counts them,
# `cu_seqlens_q` says whose the rows are, and the context call takes them. When no request has a prefix, queries and keys are
# the same tokens, and SGLang passes one tensor as both `cu_seqlens_q` and `cu_seqlens_k`.

# %%
draw(forward_pass(ForwardMode.EXTEND, (0, 7), (6, 5)), "EXTEND: a whole prompt, and a chunk behind a cached prefix")

# %% [markdown]
# **Mixed** puts a prompt's chunk and decoding requests into one pass. A decoding request is an extend by one token; where the
# platform lets it, SGLang gives this tail to the decode call (`plan_calls(batch, split_mixed_tail=True)`).

# %%
draw(forward_pass(ForwardMode.MIXED, (7, 9, 4), (5, 1, 1)), "MIXED: one chunk of a prompt and two decoding requests")

# %% [markdown]
# **Idle** is a rank without work that must still take part in its group's collectives. The metadata is well-formed and empty,
# and no kernel runs.

# %%
pool = KVPool(num_requests=1, max_context_len=16, page_size=PAGE_SIZE, num_pages=2)
nothing = torch.zeros(0, dtype=torch.int64)
idle = ForwardBatch(ForwardMode.IDLE, nothing, nothing, nothing, num_tokens=0)
reading_figure(idle, pool, build_mha_metadata(idle, pool), "IDLE: an empty batch")

# %% [markdown]
# ## All modes in a table
#
# Made by the builder, not written down: what each mode adds to the engine's `seq_lens`.

# %%
passes = {
    "decode": forward_pass(ForwardMode.DECODE, PREFIX_LENS, (1, 1)),
    "draft decode, step 0": forward_pass(ForwardMode.DECODE, PREFIX_LENS, (1, 1), draft_step=0),
    "draft decode, step 1": forward_pass(ForwardMode.DECODE, PREFIX_LENS, (1, 1), draft_step=1),
    "target verify": verify,
    "draft extend v1": forward_pass(ForwardMode.DRAFT_EXTEND, PREFIX_LENS, accepted),
    "draft extend V2": draft_extend,
    "extend": forward_pass(ForwardMode.EXTEND, PREFIX_LENS, (3, 5)),
    "mixed": forward_pass(ForwardMode.MIXED, PREFIX_LENS, (5, 1)),
}


def line(*cells: object) -> str:
    return "".join(f"{cell!s:{width}}" for cell, width in zip(cells, (23, 10, 7, 10, 12, 8), strict=True)).rstrip()


print(line("mode", "engine", "added", "kernel", "query rows", "call"))
for name, forward in passes.items():
    reads = request_reads(forward.batch, forward.pool, forward.metadata)
    engine, kernel = [each.engine_len for each in reads], [each.kernel_len for each in reads]
    rows = [len(each.rows) for each in reads]
    print(line(name, engine, kernel[0] - engine[0], kernel, rows, forward.plan[0].call.name.lower()))

# %% [markdown]
# Two traps for who reads SGLang's source: `ForwardMode.is_extend()` is true for `TARGET_VERIFY`, which adds, and false for
# `DRAFT_EXTEND_V2`, which does not; and the numbers behind the names moved when v1 was removed, so compare members and never
# integers.
#
# Next: `lab/references/forward_metadata.py` says the same as loops over requests; `lab judge my.module` judges
# your own `build_mha_metadata`.
