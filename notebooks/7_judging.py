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
# # 7. Judging a kernel: a mutant for each check
#
# A check that never fails says nothing. The lab keeps **mutants**: implementations of its functions that are right but for one
# defect. Many are bugs that a kernel library or an engine had, and cite the thread. A check is in the catalogue because it
# finds a mutant, and every mutant is found by some check.
#
# Beside each mutant stands what the tolerances of upstream's own tests say of it. This notebook draws that record, judges some
# mutants live, and ends with an output of zeros.
#
# It runs on a CPU. The marked cell uses a GPU where there is one.

# %%
# %matplotlib inline
import os
from dataclasses import replace
from pathlib import Path

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton decides when it is imported

import lab
from corpus.kernels import kernel
from corpus.matrix import RANGES, upstream_case
from corpus.models.split_kv import SplitKV
from corpus.upstream_rules import UPSTREAM_RULES, passes
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, Dead, Storage, judge_case
from lab.checks.case_run import CaseRun
from lab.checks.properties import checks
from lab.checks.record import read_expression
from lab.files import read_json
from lab.kernels import default_implementation
from lab.references.errors import relative_l2
from lab.workloads.inputs.attention import build_attention
from studies.pictures.judging import (
    few_figure,
    matrix_figure,
    one_for_each_check,
    passing_figure,
    vector_errors_figure,
)

CPU = torch.device("cpu")

# The reader's: change it and run all cells again. Any name of results/mutants.md will do.
MUTANT = "verify_rows_at_last_position"

# %% [markdown]
# ## Which check finds which mutant
#
# `lab mutants` judges every mutant by every check that applies to it, and writes
# [results/mutants.json](../results/mutants.json.gz). Each column below is one mutant. A blue cell: the check of that line finds
# it. An orange cell: the upstream rule of that line lets it pass, on inputs as upstream's tests draw them (normal data; lengths
# of 110, 1,024 and 8,192, equal within a batch; a window that never truncates; scales of 1). The numbers in brackets count
# them.

# %%
RECORDED = Path(lab.__file__).parents[1] / "results" / "mutants.json.gz"
records = read_json(RECORDED)
named = {record["mutant"]: record for record in records}
keys, rules = [check.key for check in checks()], [rule.name for rule in UPSTREAM_RULES]
matrix_figure(records, keys, rules)

# %%
with_output = [record for record in records if record["upstream"] is not None]
passing_all = [record for record in with_output if len(record["upstream"]) == len(rules)]
print(f"{sum(bool(record['kills']) for record in records)} of {len(records)} mutants are found by a check")
print(f"{sum(len(record['kills']) == 1 for record in records)} of them by one check alone")
print(f"{sum(bool(record['source']) for record in records)} cite the thread of a project that had the defect")
passing_some = [record for record in with_output if 0 < len(record["upstream"]) < len(rules)]
print(f"{len(passing_all)} of {len(with_output)} with an attention output pass all {len(rules)} upstream rules")
print(f"{len(passing_some)} pass some of them: {', '.join(record['mutant'] for record in passing_some[:12])}, …")

# %% [markdown]
# Not every orange cell is a bad tolerance. A mutant that passes all rules mostly leaves *these outputs* right: it is wrong only
# in a case that upstream's tests do not draw (unequal lengths, a scale other than 1, a window that truncates), or it spoils
# memory beside the output, an LSE, or a later call. No tolerance sees that; other inputs and other questions do. A mutant that
# passes some rules and not others has a wrong output there, and the tolerance decides: an absolute one of 0.01 to 0.2 is large
# beside an attention output. The last section shows that.
#
# ## One mutant for each check
#
# For each check, the mutant that the fewest others find. A cell beside the diagonal is another check that finds it too.

# %%
few = one_for_each_check(records, keys)
few_figure(few, keys, rules)

# %%
for key, record in zip(keys, few, strict=True):
    print(f"{key:3} {record['mutant']}: {record['defect']}" + (f" ({record['source']})" if record["source"] else ""))

# %% [markdown]
# ## Judge one live
#
# Here is the mutant named at the top, in the first recorded case of some checks that find it. `judge_case` is what a
# reproduction line of a report calls. The sentences are the judge's: request, row and head of the worst vectors, their error,
# and what it may be. Then the same cases for the model that the mutant was made of, which is right.

# %%
MOST_SHOWN = 3  # checks


def judged_live(implementation, key, recorded):
    """The verdict on one recorded case."""
    case = read_expression(recorded["case"])
    return judge_case(implementation, key, case, CPU, RANGES)


record = named[MUTANT]
print(f"{MUTANT}: {record['defect']} {record['source']}")
passed = record["upstream"] and ", ".join(rules[rule] for rule in record["upstream"])
print(f"passes the upstream rules: {passed or 'none that could judge it'}")
print(f"found by {', '.join(record['kills'])}")
for key, kill in list(record["kills"].items())[:MOST_SHOWN]:
    verdict = judged_live(kernel(MUTANT).implementation(), key, kill)
    print(f"\n{key} of {kill['interface']}: {verdict.outcome.value}\n  {kill['case']}")
    for sentence in verdict.judged.wrongs[:2]:
        print(f"  {sentence}")
    if isinstance(kernel(MUTANT).make(), SplitKV):
        print(f"  without the defect: {judged_live(SplitKV(), key, kill).outcome.value}")

# %% [markdown]
# ## Where an output is wrong
#
# The judge holds each output vector, a (query row, head), by itself. So the pattern of what is wrong is there to see. The case
# below is a verify of four draft tokens, four requests whose lengths lie around page edges. First the mutant named at the top.
# The default one places every row at the last position: the first three rows of each request see draft tokens after their own,
# and the last row of each is right. So are a few heads that give those tokens next to no weight.

# %%
CASE = AttentionCase(
    AttentionCall.DECODE,
    kv_lens=(61, 128, 33, 95),
    q_lens=(4, 4, 4, 4),
    num_kv_heads=2,
    group=4,
    head_dim=128,
    storage=Storage(page_size=32),
)


def errors_of(implementation, case, title):
    """The errors of one call, drawn."""
    run = CaseRun(implementation, case, CPU)
    inputs = run.build()
    truth = inputs.truth()
    comparison = truth.compare(run.call(inputs).out)
    wrong = f"{int(comparison.wrong.sum())} of {comparison.wrong.numel()} vectors are wrong"
    return vector_errors_figure(comparison.error, comparison.bound, truth.request_of_row, f"{title}: {wrong}")


# A mutant of metadata or of another call has no output of this one.
shown = MUTANT if AttentionCall.DECODE.value in record["interface"] else "verify_rows_at_last_position"
errors_of(kernel(shown).implementation(), CASE, shown)

# %% [markdown]
# A second one reads V's last page whole and multiplies its tail, where no token is, by weights of zero. With finite numbers in
# the tail that is no error. The check K4 puts NaN there, as a reused pool may hold: 0 · NaN is NaN. A request whose length is
# a whole number of pages (request 1 here) has no tail, and is right.

# %%
poisoned = replace(CASE, storage=replace(CASE.storage, dead=Dead.NAN))
errors_of(kernel("tail_multiply").implementation(), poisoned, "tail_multiply, NaN in page tails")

# %% [markdown]
# A third loses the first key of its window, one key of 32: enough for nearly every vector to be beyond the bound, which is what
# bf16 arithmetic makes of the same inputs times four. Rows whose window begins before the first key (the first two of request
# 2, which has 33 keys) lose nothing. All upstream rules pass it, since no window of their tests truncates.

# %%
windowed = replace(CASE, window_left=31)
errors_of(kernel("window_off_by_one_narrow").implementation(), windowed, "window_off_by_one_narrow, window_left 31")

# %% [markdown]
# The same case, of a real kernel: FlashInfer's on an NVIDIA GPU that it runs on, else the lab's portable one, on a CPU in
# Triton's interpreter.

# %%
# Runs on the GPU where there is one.
verdict = judge_case(default_implementation(), "K1", CASE)
print(f"{verdict.implementation}: {verdict.outcome.value}, worst error {verdict.judged.worst_ratio:.0%} of its bound")

# %% [markdown]
# ## An output of zeros
#
# Attention averages values. If n of them are independent with a spread of 1, and all weigh about the same, the average has a
# spread of about 1/sqrt(n): the longer the request, the smaller a right output. An absolute tolerance stays as it is. So at
# some length a kernel that writes nothing but zeros passes. Here it is, live, on upstream's own distribution, one request.
#
# The relative error of zeros is 1 at any length, and the lab's bound is never above 0.5.

# %%
LENGTHS = (128, 1024, 8192, 32768, 131072)  # the reader's, too


def rules_passed(out, expected):
    """Whether each upstream rule lets the output pass."""
    return [passes(rule, out, expected) for rule in UPSTREAM_RULES]


zeros, nans = [], []
print("    keys   largest element   error of zeros   bound   rules that zeros pass, and NaN")
for length in LENGTHS:
    case = replace(
        upstream_case(AttentionCall.DECODE, length, 4), kv_lens=(length,), q_lens=(4,), window_left=-1, sinks=False
    )
    truth = build_attention(case, CPU).truth()
    out = torch.zeros_like(truth.control)
    zeros.append(rules_passed(out, truth.expected))
    nans.append(rules_passed(torch.full_like(out, torch.nan), truth.expected))
    error, bound = float(relative_l2(out, truth.expected).max()), float(truth.compare(out).bound.max())
    largest = float(truth.expected.abs().max())
    print(
        f"{length:8,} {largest:17.3f} {error:16.2f} {bound:7.3f} {sum(zeros[-1]):14} of {len(rules)}, {sum(nans[-1])}"
    )

# %%
passing_figure(
    list(zip(*zeros, strict=True)), LENGTHS, rules, "An output of zeros: which upstream rule lets it pass, by length"
)

# %% [markdown]
# NaN passes the rules of helpers that count elements *greater* than their tolerance, at any length: NaN is greater than
# nothing. The judge counts a vector that is not finite as infinitely wrong.
#
# ## Where to go next
#
# | you want to | go to |
# |---|---|
# | judge your kernel | [Judge your own kernel](../docs/judge.md) |
# | see all mutants | [results/mutants.md](../results/mutants.md) |
# | read a mutant | `corpus/mutants` |
# | know the rules' sources | `corpus/upstream_rules.py` |
# | know what the judge said of real kernels | [results/nvidia-h200/judge.md](../results/nvidia-h200/judge.md) |
