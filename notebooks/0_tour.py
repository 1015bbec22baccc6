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
# # 0. The lab on one page
#
# Two questions about an LLM attention kernel: **is it right**, and **how far from the hardware's limit is it?** The lab rests
# on one idea: *a kernel is a callable with FlashInfer's own name and keyword arguments*. References, fast kernels and your
# own are then exchanged by changing an import.
#
# This page runs on a CPU in less than a minute. Where a GPU is present, the marked cell uses it.

# %%
# %matplotlib inline
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

import lab
from lab.checks import Ranges, judge, judge_forward
from lab.kernels import default_implementation
from lab.references import trtllm_batch_decode_with_kv_cache as expected
from lab.references.errors import relative_l2
from lab.reports.recorded import read_run
from lab.reports.timings import figures
from lab.workloads import scenario

# %% [markdown]
# ## Judge a kernel
#
# Here is batch decode over a paged K/V cache as anybody would write it: gather each request's pages, call torch's attention.
# With more than one query row per request (speculative decoding verifies several draft tokens at once), row j may see the
# keys up to its own and no further.


# %%
def gathered(cache, table, length):
    """[num_kv_heads, length, head_dim] of one request, from [pages, num_kv_heads, page_size, head_dim]."""
    return cache[table[: -(-length // cache.shape[2])].long()].transpose(0, 1).flatten(1, 2)[:, :length]


def causal(q_len, length):
    """bool [q_len, length]: the last row stands at the last key."""
    return torch.arange(length) <= length - q_len + torch.arange(q_len)[:, None]


class Mine:
    """An implementation: an object with one or more of FlashInfer's names."""

    visible = staticmethod(causal)

    @classmethod
    def trtllm_batch_decode_with_kv_cache(
        cls,
        query,
        kv_cache,
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale=1.0,
        bmm2_scale=1.0,
        out=None,
        q_len_per_req=1,
    ):
        out = torch.empty_like(query) if out is None else out
        for request, length in enumerate(seq_lens.tolist()):
            rows = slice(request * q_len_per_req, (request + 1) * q_len_per_req)
            keys, values = (gathered(cache, block_tables[request], length) for cache in kv_cache)
            mask = cls.visible(q_len_per_req, length)
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1), keys, values, mask, scale=float(bmm1_scale), enable_gqa=True
            )
            out[rows] = attended.transpose(0, 1) * float(bmm2_scale)
        return out


# %% [markdown]
# The judge makes cases in which mistakes show, runs them, and holds every output vector against a float64 oracle. A `Ranges`
# says what a kernel was built for. All checks take some minutes here; three will do: K1 (any error), K4 (what must not matter
# is poisoned), K8 (a verify of n tokens is n decodes).

# %%
BUILT_FOR = Ranges(
    dtypes=((torch.bfloat16, torch.bfloat16),),
    groups=(1, 4),
    num_kv_heads=(2,),
    head_dims=(64,),
    page_sizes=(16, 32),
    q_lens=(1, 4),
    windows=(False,),
    sinks=(False,),
    nvfp4=(False,),
    kv_layouts=("HND",),
    large_batches=(40,),
    longest=100,
)


def judged(implementation):
    return judge(implementation, ranges=BUILT_FOR, only=["K1", "K4", "K8"], device="cpu", drawn=0)


report = judged(Mine)
for row in report.rows:
    print(f"{row.check:3} {row.outcome.value:9} {row.judged} results")
assert report.is_right, str(report)

# %% [markdown]
# Now a mistake that decoding cannot show: no mask, so that in a verify each row sees the draft tokens *behind* its own.


# %%
class SeesAhead(Mine):
    visible = staticmethod(lambda q_len, length: torch.ones(q_len, length, dtype=torch.bool))


report = judged(SeesAhead)
for row in report.rows:
    print(f"{row.check:3} {row.outcome.value:9} {row.judged} results")
wrong = next(verdict for verdict in report.verdicts if verdict.judged.wrongs)
print(wrong.judged.wrongs[0])
assert not report.is_right

# %% [markdown]
# The same from a shell, with a worker process that survives crashes: `lab judge my.module`. `lab.reports.judgement.details` has
# a line that reproduces each failure.
#
# ## A whole forward pass
#
# `judge_forward` builds what a serving engine hands a kernel (pool, page tables, lengths) for a scenario given by name, and
# judges the outputs from the requests' histories. On an NVIDIA GPU with FlashInfer's kernels this runs them; here, the lab's
# portable Triton kernel in Triton's interpreter.

# %%
# Runs on the GPU where there is one.
verdict = judge_forward(default_implementation(), scenario("target_verify/tiny/2q4s40/page16"))
print(f"{verdict.implementation}: {verdict.outcome.value}")

# %% [markdown]
# ## A reference in your own test
#
# `lab.references` needs torch alone, computes in float64, and takes the arguments that your kernel takes.

# %%
generator = torch.Generator().manual_seed(0)
page_size, head_dim, seq_lens = 16, 64, torch.tensor([20, 33], dtype=torch.int32)
k_cache, v_cache = torch.randn(2, 8, 2, page_size, head_dim, generator=generator).bfloat16()
query = torch.randn(2, 8, head_dim, generator=generator).bfloat16()
block_tables = torch.tensor([[3, 1, 0], [7, 2, 5]], dtype=torch.int32)
arguments = (query, (k_cache, v_cache), None, block_tables, seq_lens, 48)


def test_my_kernel():
    mine = Mine.trtllm_batch_decode_with_kv_cache(*arguments, bmm1_scale=head_dim**-0.5)
    truth = expected(*arguments, bmm1_scale=head_dim**-0.5, out_dtype=torch.float64)
    assert relative_l2(mine, truth).max() < 0.01


test_my_kernel()

# %% [markdown]
# ## How far from the limit?
#
# A time says little without the least time that the work can take: bytes that must move and operations, over the rates that
# the same run measured. This is a recorded run on an NVIDIA H200: one attention layer of Llama-3.1-8B, bf16, 64 requests of
# 4,096 keys. 1 is the limit.

# %%
RUN = Path(lab.__file__).parents[1] / "results" / "nvidia-h200" / "timings.json"
SHOWN = tuple(
    f"{mode}/llama-3.1-8b/64q{rows}s4k" for mode, rows in (("decode", 1), ("target_verify", 4), ("target_verify", 8))
)
run = read_run(RUN)
few = replace(run, rows=tuple(row for row in run.gpu_rows if row.scenario in SHOWN))
print(f"{RUN.name}, recorded {run.recorded_at[:10]} on {run.environment['gpu']}, commit {run.environment['commit']}")
next(figure for name, figure in figures(few).items() if name.startswith("time-over-floor"))

# %% [markdown]
# `trtllm` is FlashInfer's XQA kernel there, `portable` the lab's Triton kernel, and `peers` are kernels of other libraries.
# How each number was taken, on what clocks, and all other scenarios: [results/nvidia-h200](../results/nvidia-h200/README.md).
# On your own GPU: `make bench`.
#
# ## Where to go next
#
# | you want to | go to |
# |---|---|
# | understand what a kernel is handed in each forward mode | [notebook 1](1_forward_modes.ipynb) |
# | judge your kernel | [Judge your own kernel](../docs/judge.md) |
# | time it | [Time a kernel](../docs/time.md) |
# | know what FlashInfer's kernels do that callers may not expect | [findings](../results/nvidia-h200/findings.md) |
# | add a check, a kernel or a mode | [CONTRIBUTING](../CONTRIBUTING.md) |
