"""Metadata that says something else than the batch: lengths without the draft, tables of tokens or of nothing, stale offsets.

A builder is tested against its own formula, so both are wrong together. Here it must equal loops over requests, leave an
earlier pass's tensors alone, and lead attention to the requests' histories. K18 has further batches, without attention.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from lab import references
from lab.checks.check import Check, Level, first_line
from lab.checks.facts import facts_of_case
from lab.checks.metadata_truth import wrong_eager_metadata, wrong_shard
from lab.checks.properties.forward_modes import mode_cases
from lab.checks.trial import Result, Trial
from lab.metadata.engine.forward_mode import ForwardMode
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward
from lab.workloads.interfaces import Interface

Q_LENS = {Level.SMOKE: (4,), Level.FULL: (1, 4, 7)}
PAGE_SIZES = {Level.SMOKE: (16,), Level.FULL: (16, 64)}


def _cases(interface: Interface, ranges: Ranges, level: Level) -> Iterator[ForwardCase]:
    for page_size in PAGE_SIZES[level]:
        for case in mode_cases("tiny", page_size, Q_LENS[level], long=(3 * page_size + 5, 5 * page_size - 1)):
            yield case
            if not case.encoder_only:
                yield replace(case, sliding_window=True)


def _judge(trial: Trial) -> None:
    build = trial.function(Interface.MHA_METADATA)
    if trial.case.encoder_only and trial.case.mode is ForwardMode.TARGET_VERIFY:
        build = partial(build, expand_encoder_only_verify=True)
    forward = build_forward(trial.case, trial.device, build)
    _parity(trial, "the metadata", forward)
    out = torch.full_like(forward.query, float("nan"))
    what = "attention by this metadata"
    if trial.reads(what, partial(forward.run, references, out)):
        trial.hold(what, Result(forward.rows_of_requests(out), None), forward.truth())
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
    wrong = wrong_eager_metadata(forward.batch, forward.pool, forward.metadata)
    for rank, shard in enumerate(forward.shards):
        if found := wrong_shard(forward.batch, forward.pool, shard, len(forward.shards), rank):
            wrong = wrong or f"of rank {rank}, {found}"
    trial.hold_nothing_wrong(what, [f"{what}: {wrong}"] if wrong else [], "metadata", facts_of_case(forward.case))


CHECK = Check("K16", "metadata", first_line(__doc__), _cases, _judge, interfaces=(Interface.MHA_METADATA,))
