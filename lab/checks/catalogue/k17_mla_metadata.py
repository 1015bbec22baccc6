"""MLA metadata that says something else than the batch: lengths without padding or draft, a table too narrow, stale rows.

A padded draft extend is right only if lengths, table and rows count the same padding, which no formula of one of them shows.
Here a builder must equal loops over requests, keep -1 after its live pages and an earlier pass's tensors as they were, and
lead attention to the requests' histories.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab import references
from lab.checks.catalogue.mla_modes import mla_mode_cases
from lab.checks.check import Check, Level, first_line
from lab.checks.facts import facts_of_case
from lab.checks.metadata_truth import wrong_mla_metadata
from lab.checks.mla_pass import MLAPass, build_mla_pass
from lab.checks.space import Space
from lab.checks.trial import Result, Trial
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mla.metadata import DEAD_PAGE
from lab.references.forward_metadata import mla_forward_metadata
from lab.workloads.interfaces import Interface
from lab.workloads.mla_case import MLACase

SMALL: dict[str, Any] = {"num_qo_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
Q_LENS = {Level.SMOKE: (1, 4), Level.FULL: (1, 2, 3, 4, 5, 6, 7, 8)}
BLOCK = 4096  # tokens that a table's row is rounded up to


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[MLACase]:
    for page_size in space.mla_page_sizes:
        yield from mla_mode_cases(page_size, Q_LENS[level], **SMALL)
        shared = {"page_size": page_size, **SMALL}
        # Padding after a request that ends where a row of the table would.
        yield MLACase(ForwardMode.DRAFT_EXTEND, (BLOCK - 1, 7), (1, 5), **shared)
        yield MLACase(ForwardMode.TARGET_VERIFY, (BLOCK - 2, 7), (4, 4), **shared)
    yield MLACase(ForwardMode.DECODE, tuple(range(17, 57)), (1,) * 40, **shared)


def _judge(trial: Trial) -> None:
    build = trial.function(Interface.MLA_METADATA)
    forward = build_mla_pass(trial.case, trial.device, build)
    _parity(trial, "the metadata", forward)
    _tails(trial, forward)
    out = forward.new_out()
    what = "attention by this metadata"
    if trial.reads(what, partial(forward.run, references, out)):
        trial.hold(what, Result(out, None), forward.truth())
    others = replace(trial.case, prefix_lens=trial.case.prefix_lens[::-1], q_lens=trial.case.q_lens[::-1], seed=1)
    _parity(trial, "the metadata of other requests", build_mla_pass(others, trial.device, build))
    _parity(trial, "the first pass's metadata, after another of its shape", forward)
    lengths = forward.metadata.seq_lens_k.clone()
    forward.batch.seq_lens.add_(1)
    wrong = "the metadata's lengths are the batch's own tensor: they changed with it"
    is_wrong = not torch.equal(forward.metadata.seq_lens_k, lengths)
    trial.hold_nothing_wrong("own tensors", [wrong] if is_wrong else [], "invariants")


def _parity(trial: Trial, what: str, forward: MLAPass) -> None:
    trial.judged += 1
    wrong = wrong_mla_metadata(forward.batch, forward.pool, forward.metadata, forward.case.attention)
    trial.hold_nothing_wrong(what, [f"{what}: {wrong}"] if wrong else [], "metadata", facts_of_case(forward.case))


def _tails(trial: Trial, forward: MLAPass) -> None:
    trial.hold_nothing_wrong("the table's tail and its bound", _wrong_tails(forward), "invariants")


def _wrong_tails(forward: MLAPass) -> Iterator[str]:
    """An eager table ends in -1, and its bound is no less than any length that the kernel is told."""
    metadata, counts_draft = forward.metadata, forward.case.attention is not DraftAttention.MLA
    expected = mla_forward_metadata(forward.batch, forward.pool, counts_draft=counts_draft)
    for request, (cells, pages) in enumerate(
        zip(metadata.block_kv_indices.tolist(), expected.block_table, strict=True)
    ):
        if set(cells[len(pages) :]) - {DEAD_PAGE}:
            yield (f"request {request}'s row of the table ends in {sorted(set(cells[len(pages) :]))}, not in -1")
    rows = 0 if forward.batch.forward_mode.query_rows is QueryRows.ONE else metadata.max_seq_len_q
    if max(expected.seq_lens_k) > metadata.max_seq_len_k + rows:
        yield (f"max_seq_len_k={metadata.max_seq_len_k} is less than the longest of {expected.seq_lens_k}")


CHECK = Check("K17", "mla_metadata", first_line(__doc__), _cases, _judge, interfaces=(Interface.MLA_METADATA,))
