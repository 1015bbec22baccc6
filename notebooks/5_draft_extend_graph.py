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
# # 5. Draft extend in a CUDA graph: what is stale, what is live
#
# After a verification the draft model catches up on the accepted tokens: *draft extend V2* runs over all d draft tokens of
# every request ([notebook 1](1_forward_modes.ipynb) draws who reads which key). SGLang's change 25002 put this pass into a
# CUDA graph for the TRT-LLM MHA backend. This notebook asks three things:
#
# 1. A graph reads fixed addresses. At a replay, which of their cells hold this batch, which hold padding, and which still hold
#    **an earlier batch**?
# 2. What does the graph save?
# 3. The worker wants one row of the d. What does **trimming** the others save, and what would be handed out without it?
#
# The first part runs live: on a GPU in real CUDA graphs, on a CPU by making the same calls on the same buffers again. The
# times are recorded ones of an NVIDIA H200. What is said of SGLang is of the version named.

# %%
# %matplotlib inline
import json
import os
from functools import partial
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

import lab.references
from lab.kernels import default_implementation, portable
from lab.metadata import ForwardMode, KVPool, SpecInfo
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendGraph, DraftExtendOutput
from lab.timing.roofline import measure_ceilings
from studies.draft_extend_graph import measure_forms, new_model
from studies.pictures.draft_extend_graph import eager_or_graph_figure, forms_figure
from studies.pictures.forward_modes import reading_figure
from studies.pictures.static_buffers import (
    CellState,
    buffers_figure,
    replayed_buffers,
    static_buffers,
    written_cells,
)
from studies.stand_in_model import LLAMA_8B_SIZES, TINY_SIZES, StandInModel, draw_pass, truth_of_pass
from studies.variants import WARM, TimingPlan

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTENTION = portable if torch.cuda.is_available() else lab.references
WIDTH = 4  # d, query rows of each request: the reader's number, try 2 or 6
CAPTURED = (2, 4)  # batch sizes that have a graph
# Three batches: tokens of each request before the pass.
FIRST, SECOND, THIRD = (56, 23, 70, 37), (12, 30, 20), (18,)

# %% [markdown]
# ## Buffers that stay
#
# The engine keeps one set of input and metadata buffers for its largest batch. Every captured batch size reads leading slices
# of them. A batch is copied in and padded to the next captured size; the metadata is then rebuilt in place, in 0.5.23 by the
# graph itself. So a graph never sees new tensors, and **whatever a replay does not write is what the last one left**.
#
# The model is a stand-in of a draft model: embedding, projections, one attention layer with a paged cache, an LM head.

# %%
SELECTED = DraftExtendOutput.SELECTED_ROW
pool = KVPool(num_requests=16, max_context_len=80, page_size=16, num_pages=80, device=DEVICE)
model = StandInModel(TINY_SIZES, pool)


def new_graph(form=SELECTED):
    spec_info = SpecInfo(num_tokens_per_req=WIDTH)
    return DraftExtendGraph(TRTLLMMHABackend(ATTENTION), model, pool, spec_info, CAPTURED, form)


def drawn(prefix_lens, seed):
    return draw_pass(model, ForwardMode.DRAFT_EXTEND_V2, prefix_lens, (WIDTH,) * len(prefix_lens), seed)


def replay(graph, batch):
    accept_lens = batch.accept_lens if graph.form is SELECTED else None
    return graph.replay(batch.batch, batch.input_ids, batch.hidden_states, accept_lens)


graph = new_graph()
buffers = static_buffers(graph)
addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
first, second, third = (drawn(lens, seed) for seed, lens in enumerate((FIRST, SECOND, THIRD)))

# %% [markdown]
# Which cells a replay writes is found out, not assumed: `written_cells` replays the batch on buffers full of zeros and again
# on buffers full of ones; what is the same afterwards was written. The first batch fills the largest size:

# %%
written = [written_cells(buffers, partial(replay, graph, first))]
buffers_figure(replayed_buffers(graph, len(FIRST), written[0]), "First replay: the largest captured size is full")

# %% [markdown]
# Everything is written, but for the page table: of each row the launch writes the pages that the request has, and no more.
# (The lab's launch writes the 0 in front of the running sums too. SGLang's relies on its buffer having been made of zeros.)
#
# Now a batch that is one request short of a captured size:

# %%
written.append(written_cells(buffers, partial(replay, graph, second)))
at_second = replayed_buffers(graph, len(SECOND), written[1], written[:1])
buffers_figure(at_second, "Second replay: a smaller batch, padded")

# %% [markdown]
# Three kinds of cells are not this batch's:
#
# * **Padding, written each time.** The missing request gets length 1, the reserved request 0, slot 0 of the *sink* page, and
#   the width d. SGLang 0.5.12 left `req_pool_indices` as it was, so that padded rows read an earlier request's pages; 0.5.13
#   zeroes it.
# * **Stale and read.** Ids, hidden states and the selected row of the padding are not reset, in SGLang and here: padded rows
#   run the model on an earlier batch's data. That is allowed for one reason: nothing of it may reach a real row. Ids stay
#   valid ids, a selected row of request i stays one of its own rows, and K/V of padded rows are written into the sink.
# * **Stale and not read.** The page table keeps an earlier request's pages behind the live ones. The kernel stops at the
#   length, so it never looks there: right lengths are all that stands between a request and another one's pages.
#
# The addresses did not move, and the real rows are right by the requests' histories. To see that the stale cells *are* read
# and reach nobody, poison them: the padded rows' K and V become NaN, in the sink page and in no other, and the selected
# rows are the same bits.

# %%
assert {name: tensor.data_ptr() for name, tensor in buffers.items()} == addresses
outputs = replay(graph, second)
truth_of_pass(model, second).hold(outputs, SELECTED)
clean = outputs.logits.clone(), outputs.hidden_states.clone()

graph.inputs.hidden_states[len(SECOND) * WIDTH :] = float("nan")
poisoned = replay(graph, second)
same = torch.equal(poisoned.logits, clean[0]) and torch.equal(poisoned.hidden_states, clean[1])
in_page = model.cache.storage.isnan().flatten(2).any(dim=2).any(dim=0)
print(f"selected rows: {poisoned.logits.shape[0]}, {'the same bits' if same else 'DIFFERENT'}")
print(f"pages that hold NaN now: {in_page.nonzero().flatten().tolist()}")
assert same

# %% [markdown]
# A smaller captured size uses the *same* storage. The third batch runs in the graph of the smaller size, and what lies behind
# that size is left alone altogether:

# %%
written.append(written_cells(buffers, partial(replay, graph, third)))
at_third = replayed_buffers(graph, len(THIRD), written[2], written[:2])
buffers_figure(at_third, "Third replay: a smaller captured size over the same storage")

# %%
for name, at in (("second", at_second), ("third", at_third)):
    counts = {state: sum(at.count(buffer, state) for buffer in at.states) for state in CellState}
    print(f"{name} replay: {', '.join(f'{state.name.lower()} {count}' for state, count in counts.items())}")

# %% [markdown]
# ## What a padded row sees
#
# The padded request has length 1 but d query rows. The kernel puts the last row at the last key, so the rows before it stand
# at *negative* positions and see no key at all: an empty softmax. (Target verify has no such rows: there the padding's length
# is 1 + d.) A kernel may write anything there, NaN too, as long as it writes nothing elsewhere. This is the metadata of the
# third replay as the kernel is handed it:

# %%
size = graph.runner.size_for(len(THIRD))
reading_figure(
    graph.runner.inputs.view(size), pool, graph.runner.metadata.slices(size), "Third replay, its padding included"
)

# %% [markdown]
# The lab's checks run such sequences in every mode and judge each replay by the requests' histories:
# `lab judge --only S1,S2`. What they found on the H200: [graphs](../results/nvidia-h200/graphs.md), "Invariants".
#
# ## What the graph saves
#
# The recorded run is `lab experiments draft-extend-graph` on a stand-in with Llama-3.1-8B's sizes. A bar is what an
# iteration feels: from the call until the GPU is idle, by the host's clock. The marks are the two parts by themselves.

# %%
RECORDED = Path(lab.__file__).parents[1] / "results" / "nvidia-h200" / "draft_extend_graph.json"
run = json.loads(RECORDED.read_text(encoding="utf-8"))
MODE = "draft_extend_v2"  # change it: decode, target_verify, draft_extend, draft_extend_v2
rows = [row for row in run["modes"] if row["mode"] == MODE and row["arm"] != "load"]
on = f"{run['environment']['gpu']}, commit {run['environment']['commit']}"
where = f"{rows[0]['kv_len']:,} keys, {rows[0]['num_draft_tokens']} query rows a request"
print(f"{RECORDED.name}: {on}, torch {run['environment']['packages']['torch']}, {run['implementation']}")
print(f"GPU time: {run['method']}\nuntil idle: {run['completion_method']}")
eager_or_graph_figure(rows, f"{MODE}: {where}, {on}")

# %%
for size in sorted({row["batch_size"] for row in rows}):
    eager, graphed = (
        next(row for row in rows if (row["batch_size"], row["arm"]) == (size, variant))
        for variant in ("eager", "graph")
    )
    print(
        f"{size:3} requests: {eager['launches']} launches and {eager['host_us']:.0f} µs of the host become "
        f"{graphed['launches']} and {graphed['host_us']:.0f}; {eager['completion_us'] - graphed['completion_us']:.0f} µs "
        "sooner idle"
    )

# %% [markdown]
# A graph removes launches, not work. The round marks of a pair are close to each other, the diamonds are not: what goes is the
# host's time. (With `draft_extend`, the first version, the kernels take *longer* in the graph where requests are many: it has
# room for d rows of each and computes them all, however few were accepted.) Two limits of this comparison. The lab's eager
# pass checks its arguments in Python, and its cache write is ten launches where an engine has one; an engine's eager pass is
# shorter, so it gains less. And the stand-in has one layer.
#
# ## What is handed out, and the trim
#
# The worker needs, of each request, the row of its last accepted token. What the graph computes and hands out has changed:
#
# | form | SGLang | rows with logits and hidden states |
# |---|---|---|
# | all rows with top-k | 0.5.13's captured body | all `batch_size * d`; and the best token of each, which nobody reads |
# | all rows | what 0.5.13 and 0.5.14 return | all `batch_size * d`; the worker then picks its own |
# | selected row | 0.5.23 | `batch_size`, picked by `select_index` in the graph, *before* the LM head |
#
# Without the trim a replay hands out slices of the graph's own buffers, which the next replay overwrites. The selected row's
# hidden states are a copy, because the worker keeps them until the next draft; its logits are still the graph's.


# %%
def survives(tensor: torch.Tensor, kept: torch.Tensor) -> str:
    return "kept" if torch.equal(tensor, kept) else "overwritten"


for form in DraftExtendOutput:
    other = new_graph(form)
    outputs = replay(other, first)
    logits, hidden_states = outputs.logits.clone(), outputs.hidden_states.clone()
    replay(other, second)
    print(
        f"{form.value:20} {outputs.logits.shape[0]:3} rows; after the next replay logits "
        f"{survives(outputs.logits, logits)}, hidden states {survives(outputs.hidden_states, hidden_states)}"
    )

# %% [markdown]
# How much that is, for a vocabulary of a real size. Change the numbers:

# %%
REQUESTS, DRAFT_TOKENS = 64, 8  # change these
for form in (DraftExtendOutput.ALL_ROWS, SELECTED):
    num_rows = form.num_rows(REQUESTS, REQUESTS * DRAFT_TOKENS)
    logits_mb = num_rows * LLAMA_8B_SIZES.vocab_size * 4 / 1e6  # float32
    head_tflop = 2 * num_rows * LLAMA_8B_SIZES.head_parameters / 1e12
    print(f"{form.value:13} {num_rows:5} rows, {logits_mb:7.1f} MB of logits, {head_tflop:.3f} TFLOP in the LM head")

# %% [markdown]
# The LM head's weights are read once, however many rows go through it, and each weight makes two operations a row. At this
# run's ceilings reading one takes as long as computing with it for as many rows as there are operations per byte; only beyond
# that does the head's product itself take longer:

# %%
ceilings = run["environment"]["ceilings"]
print(f"{1e3 * ceilings['matrix_rate_tflops'] / ceilings['bandwidth_gbps']:.0f} rows")

# %% [markdown]
# The recorded times, the floor of each as a line:

# %%
forms_figure(run["forms"], f"Draft extend V2, GPU time, {on}")

# %%
print("requests x d   selected row, µs   + other rows' logits   + dead top-k   all of it, share")
for saved in run["savings"]:
    point = f"{saved['batch_size']} x {saved['num_draft_tokens']}"
    print(
        f"{point:>12} {saved['selected_row_us']:18.1f} {saved['other_rows_cost_us']:+22.1f} "
        f"{saved['dead_topk_cost_us']:+14.1f} {saved['saved_percent']:17.1f} %"
    )
slower = [saved for saved in run["savings"] if saved["other_rows_cost_us"] < 0]
print(f"points where computing all rows was the faster one: {len(slower)} of {len(run['savings'])}")

# %% [markdown]
# In this recording the argmax over all rows costs something everywhere, although its result is read by nobody. The other rows'
# logits cost next to nothing with few rows, and the more the more rows there are; they are written as float32, so that bytes
# grow too. Choosing the row is a launch of its own, which few rows do not pay back.
#
# ## On your GPU
#
# Where a GPU is present, this cell times the three forms at one point, and judges each output before and after.

# %%
if torch.cuda.is_available():
    large = new_model(LLAMA_8B_SIZES, 8, 4096, DEVICE)
    backend = TRTLLMMHABackend(default_implementation(DEVICE))
    plan = TimingPlan(measure_ceilings(DEVICE), WARM, samples=10)
    for row in measure_forms(large, backend, 8, WIDTH, 4096, plan):
        print(f"8 x {WIDTH}, {row['form']:20} {row['median_us']:.1f} µs, floor {row['floor_us']:.1f} µs")
else:
    print("No GPU here: nothing is timed. All of it: lab experiments draft-extend-graph")
