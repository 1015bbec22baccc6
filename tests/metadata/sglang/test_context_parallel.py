"""Context parallelism in zigzag against SGLang's own strategy and backend, on random extends."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings

from lab.metadata import ForwardMode, build_mha_metadata
from lab.metadata.mha.context_parallel import why_not_zigzag, zigzag_shard
from tests.metadata.batches import Case, build
from tests.metadata.sglang.mha import NAMES, REAL, Load, assert_same_live_pages, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_fixture
from tests.metadata.test_context_parallel import dealt_cases

ZIGZAG, PADDING = "sglang.srt.layers.cp.zigzag", "sglang.srt.layers.cp.padding"
BASE = "sglang.srt.layers.cp.base"
parallel = SimpleNamespace(attn_cp_rank=0, attn_cp_size=1)


sglang = sglang_fixture(
    *(*REAL, ZIGZAG, PADDING, BASE),
    names=NAMES
    | {
        "sglang.srt.runtime_context.get_parallel": lambda: parallel,
        "sglang.srt.runtime_context.get_device": lambda: SimpleNamespace(device="cpu"),
        "sglang.srt.layers.cp.utils.is_cp_active": lambda batch: batch.is_dealt,
    },
)


@given(dealt_cases())
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_rank(sglang: Load, drawn: tuple[Case, int]) -> None:
    case, ranks = drawn
    batch, pool = build(case)
    metadata = build_mha_metadata(batch, pool)
    sglang(BASE).is_zigzag = lambda: True  # type: ignore[attr-defined]
    strategy = sglang(ZIGZAG).ZigzagCPStrategy(ranks)
    given = server_batch(sglang, batch, is_dealt=True)
    assert strategy.can_apply(batch.num_tokens, given)
    backend = new_backend(sglang, pool)
    backend.init_forward_metadata(given)
    theirs = backend.forward_metadata
    for rank in range(ranks):
        parallel.attn_cp_rank, parallel.attn_cp_size = rank, ranks
        share = strategy.build_metadata(
            batch.num_tokens, list(batch.seq_lens_cpu or ()), list(batch.extend_seq_lens_cpu or ())
        )
        sglang(PADDING).pad_logical_token_to_physical(share)
        shard = zigzag_shard(batch, metadata, ranks, rank)
        given.attn_cp_metadata = share
        assert shard.rows.tolist() == strategy.local_q_indices(batch.num_tokens, given).tolist()
        assert shard.num_padded_rows == share.per_rank_actual_token[rank]
        ours = shard.metadata
        assert ours.max_seq_len_q == share.max_seqlen_q_combined
        for a, b in (
            (ours.cache_seqlens_int32, share.kv_len_combined_tensor),
            (ours.cu_seqlens_q, share.cu_seqlens_q_combined_tensor),
            (ours.cu_seqlens_k, share.cu_seqlens_kv_combined_tensor),
        ):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)
        lengths = ours.cache_seqlens_int32.tolist()
        for name in ("page_table", "swa_page_table"):
            assert_same_live_pages(
                name, getattr(ours, name), getattr(theirs, f"zigzag_{name}"), lengths, pool.page_size
            )


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "case",
    [
        Case(ForwardMode.EXTEND, (40, 17, 64), new_lens=(6, 7, 8)),
        Case(ForwardMode.MIXED, (40, 17, 64), new_lens=(8, 8, 1)),
        Case(ForwardMode.EXTEND, (3,), new_lens=(3,)),
        Case(ForwardMode.SPLIT_PREFILL, (40, 17), new_lens=(8, 8)),
        Case(ForwardMode.DLLM_EXTEND, (40, 17), new_lens=(8, 8)),
        Case(ForwardMode.DECODE, (17, 20)),
        Case(ForwardMode.TARGET_VERIFY, (17, 20), new=8),
        Case(ForwardMode.DRAFT_EXTEND_V2, (17, 20), new_lens=(8, 8)),
    ],
)
def test_which_passes_are_dealt(sglang: Load, case: Case, ranks: int) -> None:
    batch, _ = build(case)
    strategy = sglang(ZIGZAG).ZigzagCPStrategy(ranks)
    assert strategy.can_apply(batch.num_tokens, server_batch(sglang, batch)) == (not why_not_zigzag(batch, ranks))
