"""Frozen-KV drafts against SGLang's own worker helpers, views and backend, on random batches, eagerly and in a graph."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import ForwardBatch, ForwardMode, build_mha_metadata
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.engine.lengths import pad_requests
from lab.metadata.speculation.draft_steps import frozen_kv_batch
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import Case, build, drawn_cases
from tests.metadata.sglang.mha import NAMES, REAL, Load, assert_same, captured, new_backend, replayed, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

UTILS = "sglang.srt.speculative.frozen_kv_mtp_utils"
# Decode batches of a target.
TARGETS = (
    drawn_cases([ForwardMode.DECODE])
    .filter(lambda case: bool(case.total_lens))
    .map(lambda case: replace(case, new=0, host_seq_lens=True))
)

sglang = sglang_fixture(*REAL, UTILS, names=NAMES)


def expanded(load: Load, target: ForwardBatch, topk: int) -> Any:
    """The batch that SGLang's worker makes of the target's: rows for branches, no write locations, a SpecInfo of its own."""
    theirs = server_batch(
        load,
        target,
        spec_info=SimpleNamespace(ragged_verify_layout=None),
        seq_lens_cpu=torch.tensor(target.seq_lens_cpu),
        global_num_token_non_padded=None,
        mrope_positions=None,
    )
    load(UTILS).expand_for_topk_draft(theirs, topk)
    theirs.out_cache_loc = None
    return theirs


@given(case=TARGETS, topk=st.integers(1, 4), step_id=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_eager_passes(sglang: Load, case: Case, topk: int, step_id: int) -> None:
    """Whatever the backend's step: SGLang hides the SpecInfo from it."""
    target, pool = build(case)
    backend = new_backend(sglang, pool, speculative_step_id=step_id, token_to_kv_pool=None)
    theirs = expanded(sglang, target, topk)
    with sglang(UTILS).frozen_kv_target_view(theirs, SimpleNamespace(target_token_to_kv_pool=None), backend):
        backend.init_forward_metadata(theirs)
    ours = build_mha_metadata(frozen_kv_batch(target, topk), pool)
    # Nothing is written, so SGLang has no locations; the lab's name the sink.
    assert ours.swa_out_cache_loc is None or not ours.swa_out_cache_loc.any()
    assert_same(replace(ours, swa_out_cache_loc=None), backend.forward_metadata, pool.page_size)


@given(case=TARGETS, topk=st.integers(1, 4), step_id=st.integers(0, 3), spare=st.integers(0, 2))
@settings(deadline=None, derandomize=True, max_examples=25)
def test_graphs(sglang: Load, case: Case, topk: int, step_id: int, spare: int) -> None:
    """A graph of more rows than the batch has: both are handed the padded batch."""
    target, pool = build(case)
    batch = frozen_kv_batch(target, topk)
    rows = (target.batch_size + spare) * topk
    padded = replace(pad_requests(batch, rows), seq_lens_cpu=None)
    fields = {"speculative_step_id": step_id, "token_to_kv_pool": None, "speculative_num_draft_tokens": 4}
    backend, theirs = new_backend(sglang, pool, **fields), server_batch(sglang, padded, out_cache_loc=None)
    with sglang(UTILS).frozen_kv_target_view(theirs, SimpleNamespace(target_token_to_kv_pool=None), backend):
        captured(backend, theirs, num_requests=rows, num_tokens=rows)
    ours, _ = replayed(GraphMode.draft_decode(FROZEN_KV_STEP), pool, batch, rows)
    assert_same(ours, backend.forward_metadata, pool.page_size)
