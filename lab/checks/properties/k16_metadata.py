"""Find metadata that does not match its batch: lengths without draft tokens, wrong or empty page tables, old offsets.

A test that repeats a builder's own formula repeats the formula's error. Here the metadata must equal the result of loops over
requests, and attention with it must match the requests' K/V histories. Check K18 (combinations) has further batches.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab import references
from lab.checks.case_run import CaseRun, Result
from lab.checks.explain.call_features import features_of_case
from lab.checks.parameters.metadata import builder_of, expect_metadata, expect_own_tensors
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.forward_modes import mode_cases
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_pool import KVPool
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.expected_metadata import wrong_eager_metadata, wrong_shard
from lab.workloads.inputs.forward_pass import EnginePass, ForwardPass, build_forward
from lab.workloads.interfaces import MetadataFunction


def _cases(scope: Scope) -> Iterator[ForwardCase]:
    q_lens = (1, 4, 7) if scope.is_full else (4,)
    for page_size in (16, 64)[: scope.counted(1, 2)]:
        for case in mode_cases("tiny", page_size, q_lens, long=(3 * page_size + 5, 5 * page_size - 1)):
            yield case
            if not case.encoder_only:
                yield replace(case, sliding_window=True)


def _judge(run: CaseRun) -> None:
    build = builder_of(run, MetadataFunction.MHA_METADATA)
    if run.case.encoder_only and run.case.mode is ForwardMode.TARGET_VERIFY:
        build = partial(build, expand_encoder_only_verify=True)
    forward = build_forward(run.case, run.device, build)
    _parity(run, "the metadata", forward)
    expect_attention(run, forward)
    # Build the metadata of a larger pass, then compare the first pass's metadata again: it must not have changed.
    larger = replace(run.case, prefix_lens=run.case.prefix_lens * 2, q_lens=run.case.q_lens * 2, seed=run.case.seed + 1)
    _parity(run, "the metadata of a larger pass", build_forward(larger, run.device, build))
    _parity(run, "the first pass's metadata, after a larger pass", forward)
    others = replace(run.case, prefix_lens=run.case.prefix_lens[::-1], q_lens=run.case.q_lens[::-1])
    _parity(run, "the metadata of other requests", build_forward(others, run.device, build))
    _parity(run, "the first pass's metadata, after one of its shape", forward)
    judge_own_tensors(run, build, forward)
    _parity(run, "the metadata built again", build_forward(run.case, run.device, build))


def judge_own_tensors(run: CaseRun, build: Callable[[ForwardBatch, KVPool], Any], forward: EnginePass) -> None:
    """Expect that metadata shares no memory with its batch, even if the batch's lengths have the metadata's dtype (int32)."""
    names = ("seq_lens", "req_pool_indices")
    of_batch = {name: getattr(forward.batch, name).to(torch.int32, copy=True) for name in names}
    batch = replace(forward.batch, **of_batch)
    run.judged += 1
    expect_own_tensors(run, batch, forward.pool, build(batch, forward.pool))


def expect_attention(run: CaseRun, forward: EnginePass) -> None:
    """Compute attention with the metadata of a pass. Expect the output that follows from the requests' K/V histories."""
    out, what = forward.new_out(), "attention by this metadata"
    try:
        forward.run(references, out)
    except (IndexError, TypeError, ValueError) as error:
        run.expect(what, [f"{what} is refused: {error}"], kind="invariants")
    else:
        run.expect(what, (), kind="invariants")
        run.expect_close(what, Result(forward.rows_of_requests(out), None), forward.truth())


def _parity(run: CaseRun, what: str, forward: ForwardPass) -> None:
    wrongs = [wrong_eager_metadata(forward.batch, forward.pool, forward.metadata)]
    for rank, shard in enumerate(forward.shards):
        if found := wrong_shard(forward.batch, forward.pool, shard, len(forward.shards), rank):
            wrongs.append(f"of rank {rank}, {found}")
    expect_metadata(run, what, [*filter(None, wrongs)][:1], features_of_case(forward.case))


CHECK = Check("K16", __doc__, _cases, _judge, interfaces=(MetadataFunction.MHA_METADATA,), quick=8)
