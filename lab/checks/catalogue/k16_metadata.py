"""Metadata that says something else than the batch: lengths without the draft, tables of tokens or of nothing, stale offsets.

A builder is tested against its own formula, so both are wrong together. Here it must equal loops over requests, keep the
invariants between its fields, leave an earlier pass's tensors alone, and lead attention to the requests' histories.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from lab import references
from lab.checks.catalogue.forward_modes import mode_cases
from lab.checks.check import Check, Level, first_line
from lab.checks.facts import facts_of_case
from lab.checks.forward_pass import ForwardPass, build_forward
from lab.checks.metadata_truth import wrong_metadata
from lab.checks.space import Space
from lab.checks.trial import Result, Trial
from lab.metadata import ForwardMode
from lab.workloads.forward_case import ForwardCase
from lab.workloads.interfaces import Interface

Q_LENS = {Level.SMOKE: (1, 4), Level.FULL: (1, 2, 3, 4, 5, 6, 7, 8)}
PAGE_SIZES = {Level.SMOKE: (16, 64), Level.FULL: (16, 32, 64, 128)}

LONG = 4200  # tokens: more than 4,096, and more than 256 pages of 16
LARGE_BATCH = tuple(range(17, 57))


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[ForwardCase]:
    for page_size in PAGE_SIZES[level]:
        for case in mode_cases("tiny", page_size, Q_LENS[level], long=(3 * page_size + 5, 5 * page_size - 1)):
            yield case
            yield replace(case, sliding_window=True)
    for mode in (ForwardMode.DECODE, ForwardMode.TARGET_VERIFY):
        q_len = 1 if mode is ForwardMode.DECODE else max(Q_LENS[level])
        yield ForwardCase(mode, "tiny", (LONG, 17), (q_len,) * 2, page_size=16)
        yield ForwardCase(mode, "tiny", LARGE_BATCH, (q_len,) * len(LARGE_BATCH), page_size=16)


def _judge(trial: Trial) -> None:
    build = trial.function(Interface.MHA_METADATA)
    forward = build_forward(trial.case, trial.device, build)
    _parity(trial, "the metadata", forward)
    _invariants(trial, forward)
    out = torch.full_like(forward.query, float("nan"))
    what = "attention by this metadata"
    if trial.reads(what, partial(forward.run, references, out)):
        trial.hold(what, Result(out, None), forward.truth())
    # The same builder for a larger pass, then for the first again: nothing may be left from either.
    larger = replace(
        trial.case, prefix_lens=trial.case.prefix_lens * 2, q_lens=trial.case.q_lens * 2, seed=trial.case.seed + 1
    )
    _parity(trial, "the metadata of a larger pass", build_forward(larger, trial.device, build))
    _parity(trial, "the first pass's metadata, after a larger pass", forward)
    others = replace(trial.case, prefix_lens=trial.case.prefix_lens[::-1], q_lens=trial.case.q_lens[::-1])
    _parity(trial, "the metadata of other requests", build_forward(others, trial.device, build))
    _parity(trial, "the first pass's metadata, after one of its shape", forward)
    _own_tensors(trial, forward)
    _parity(trial, "the metadata built again", build_forward(trial.case, trial.device, build))


def _own_tensors(trial: Trial, forward: ForwardPass) -> None:
    """An engine writes its batch's tensors anew; a pass's metadata stays what it was."""
    names = ("seq_lens", "req_pool_indices")
    batch = replace(forward.batch, **{name: getattr(forward.batch, name).to(torch.int32) for name in names})
    metadata = trial.function(Interface.MHA_METADATA)(batch, forward.pool)
    lengths = metadata.cache_seqlens_int32.tolist()
    trial.judged += 1
    batch.seq_lens.add_(1)
    wrong = "the metadata's lengths are the batch's own tensor: they changed with it"
    is_wrong = metadata.cache_seqlens_int32.tolist() != lengths
    trial.hold_nothing_wrong("own tensors", [wrong] if is_wrong else [], "invariants")


def _parity(trial: Trial, what: str, forward: ForwardPass) -> None:
    trial.judged += 1
    wrong = wrong_metadata(forward.batch, forward.pool, forward.metadata)
    trial.hold_nothing_wrong(what, [f"{what}: {wrong}"] if wrong else [], "metadata", facts_of_case(forward.case))


def _invariants(trial: Trial, forward: ForwardPass) -> None:
    """Note each relation between the fields that does not hold; they hold in every mode."""
    metadata, case = forward.metadata, trial.case
    lengths, rows = metadata.cache_seqlens_int32.tolist(), metadata.cu_seqlens_q.tolist()
    live = [metadata.page_table[i, : -(-n // case.page_size)] for i, n in enumerate(lengths)]
    ids = torch.cat(live) if live else metadata.page_table.flatten()
    facts = {
        "every length is at least its query rows": all(
            length >= after - before for length, before, after in zip(lengths, rows, rows[1:], strict=False)
        ),
        "max_seq_len_q is at least every request's rows": metadata.max_seq_len_q
        >= max(after - before for before, after in itertools.pairwise(rows)),
        "cu_seqlens_q ends at the query's rows": rows[-1] == forward.query.shape[0],
        "the page table has room for the longest request": metadata.page_table.shape[1] * case.page_size
        >= max(lengths),
        "every live page id is within the pool": bool(((ids >= 0) & (ids < forward.cache.storage.shape[1])).all())
        or case.sliding_window,
        "lengths and offsets are int32": metadata.cache_seqlens_int32.dtype
        == metadata.cu_seqlens_q.dtype
        == metadata.page_table.dtype
        == torch.int32,
    }
    wrongs = [f"it does not hold that {fact}" for fact, holds in facts.items() if not holds]
    trial.hold_nothing_wrong("relations between the fields", wrongs, "invariants")


CHECK = Check("K16", "metadata", first_line(__doc__), _cases, _judge, interfaces=(Interface.MHA_METADATA,))
