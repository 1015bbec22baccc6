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
# # 9. Recorded calls: what an engine asked for, and where its kernel was wrong
#
# A server returns nonsense. Its attention calls were recorded (`lab record`, or FlashInfer's own recorder; see [Debug a
# server](../docs/debug.md)). This notebook makes a small recording of a made-up engine and shows what can be seen in any
# recording: lengths, pages, which requests share pages, the verdict, and the requests and heads in which the output is wrong.
#
# It runs on a CPU.

# %%
# %matplotlib inline
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

from lab import references
from lab.checks.run.judge import judge_calls
from lab.recorded import Recorder, recorded_cases
from lab.recorded.case import traced_requests
from lab.recorded.suspicions import RecordedInputs
from lab.references.assertion import histories_of, truth_of_problem
from lab.workloads import scenario
from studies.pictures.forward_modes import pages_figure
from studies.pictures.judging import vector_errors_figure

# The reader's: change it and run all cells again. The engine's kernel forgets the keys after this one, in its last K/V head.
LAST_KEY = 128

# %% [markdown]
# ## An engine with a defect
#
# Five requests decode together. Requests 1 and 2 begin with the same system prompt, so they share their first four pages. The
# kernel divides long requests into two splits, and the merge loses the second split of the last K/V head: a request is wrong
# if it has more keys than one split, in half of its heads. Short requests are right, so that the server seems to work.

# %%
PAGE_SIZE, NUM_PAGES, HEADS, KV_HEADS, HEAD_DIM = 16, 80, 8, 2, 64
SHARED_PAGES, STEPS = 4, 3
draw = torch.Generator().manual_seed(9)


def with_lost_split(query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, **others):
    """The kernel: exact, except for the heads that lose the second split."""
    arguments = others | {"query": query, "kv_cache": kv_cache, "workspace_buffer": None, "block_tables": block_tables}
    out = references.trtllm_batch_decode_with_kv_cache(**arguments, seq_lens=seq_lens, max_seq_len=max_seq_len)
    one_split = seq_lens.clamp(max=LAST_KEY)
    lost = references.trtllm_batch_decode_with_kv_cache(**arguments, seq_lens=one_split, max_seq_len=max_seq_len)
    of_last = HEADS // KV_HEADS
    out[:, -of_last:] = lost[:, -of_last:]
    return out


engine = ModuleType("engine")  # its kernel has FlashInfer's name
engine.trtllm_batch_decode_with_kv_cache = with_lost_split
sys.modules["engine"] = engine

# %%
lengths = torch.tensor([200, 90, 75, 150, 40], dtype=torch.int32)  # keys before the first step
kv_cache = tuple(torch.randn(NUM_PAGES, KV_HEADS, PAGE_SIZE, HEAD_DIM, generator=draw).bfloat16() for _ in range(2))
tables = torch.randperm(NUM_PAGES, generator=draw)[: 5 * 13].view(5, 13).to(torch.int32)
tables[2, :SHARED_PAGES] = tables[1, :SHARED_PAGES]

folder = Path(tempfile.mkdtemp()) / "recording"
with Recorder(folder, functions=["engine"]) as recorder:
    for _ in range(STEPS):
        lengths += 1  # the engine has written this step's keys
        engine.trtllm_batch_decode_with_kv_cache(
            query=torch.randn(5, HEADS, HEAD_DIM, generator=draw).bfloat16(),
            kv_cache=kv_cache,
            workspace_buffer=None,
            block_tables=tables,
            seq_lens=lengths,
            max_seq_len=int(lengths.max()),
            bmm1_scale=HEAD_DIM**-0.5,
        )
pool_bytes = sum(side.nbytes for side in kv_cache)
print(f"{recorder.kept} calls recorded; the engine's pool has {pool_bytes / 1e6:.2f} MB")
largest_bytes = max(path.stat().st_size for path in folder.iterdir())
print(f"a file has {largest_bytes / 1e6:.2f} MB: the pages that the call reads, and no others")

# %% [markdown]
# ## What is in a call
#
# `recorded_cases` lists the calls of a folder. A call has the arguments by FlashInfer's names. `problem()` checks them, and
# gives them one form for every layout.

# %%
cases = recorded_cases(folder)
for case in cases:
    call = case.read()
    problem = call.problem()
    print(f"#{case.number} {call.function.value}: keys {problem.seq_lens.tolist()}, output {list(call.out.shape)}")

# %% [markdown]
# ## Pages
#
# Each line is a request's row of the page table. The recorder numbers the pages anew, in the order of the engine's ids,
# because it keeps only the pages that are read. Requests 1 and 2 share the pages of their prompt, and each has its own after
# it. Cells after a request's last page are not read, and the recorder writes 0 there.

# %%
pages_figure(problem.k_block_tables, problem.seq_lens, problem.page_size, f"Call #{case.number}: pages of each request")

# %% [markdown]
# Two requests may share a full page. If they shared a partly filled last page, each of them would write its next key into it.
# The lab looks for such traces of an engine's mistake. This call has none:

# %%
histories = histories_of(problem)
RecordedInputs(problem, histories).suspicions()

# %% [markdown]
# The same call with request 2's last page taken from request 1:

# %%
spoilt = case.read()
last = [int(length) // PAGE_SIZE for length in problem.seq_lens]
spoilt.given["block_tables"][2, last[2]] = spoilt.given["block_tables"][1, last[1]]
for sentence in RecordedInputs(spoilt.problem(), histories_of(spoilt.problem())).suspicions():
    print(sentence)

# %% [markdown]
# ## The verdict
#
# `lab judge --calls recording` compares each recorded output with float64 arithmetic on the recorded inputs. Its first
# sentences name what the wrong results have in common. Each of these calls is wrong, but only in its long requests.

# %%
report = judge_calls(folder, device="cpu", isolated=False)
print(report)
print([verdict.outcome.value for verdict in report.verdicts])

# %% [markdown]
# ## Where the error lies
#
# A cell is one output vector: a request's query row, in one head. The error is relative to the vector's length, and divided
# by the bound, which is what low-precision arithmetic makes on the same inputs. The picture shows both halves of the defect:
# the long requests, and the heads of one K/V head.

# %%
truth = truth_of_problem(problem, histories=histories)
comparison = truth.compare(call.out)
wrong = f"{int(comparison.wrong.sum())} of {comparison.wrong.numel()} vectors are wrong"
vector_errors_figure(comparison.error, comparison.bound, truth.request_of_row, f"Call #{case.number}: {wrong}")

# %% [markdown]
# ## The same lengths elsewhere
#
# The recorded lengths are a trace, so that any model and mode can be judged and timed on the batches that the engine had.
# `lab recorded scenario` writes it for `--lab-trace`; `lab bench --calls` times kernels on the recorded tables themselves.

# %%
trace = traced_requests(cases)
print(scenario("decode/llama-3.1-8b/trace5", trace).kv_lens)
