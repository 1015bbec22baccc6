"""What a CPU can honestly time: the references and the metadata builder, in host time."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import lab.references
from lab.checks import ForwardCase
from lab.metadata import ForwardMode, KVPool, build_mha_metadata
from lab.workloads.inputs.forward_pass import build_forward

CPU = torch.device("cpu")


def test_reference_decode(benchmark: Any) -> None:
    """16 requests of 4,096 keys, 32/8 heads of 128, float64 inside."""
    case = ForwardCase(ForwardMode.DECODE, "llama-3.1-8b", (4095,) * 16, (1,) * 16)
    forward = build_forward(case, CPU)
    benchmark.extra_info.update(clock="host", method="host time", requests=16, kv_tokens=sum(case.kv_lens))
    benchmark.pedantic(
        lab.references.trtllm_batch_decode_with_kv_cache,
        kwargs={
            "query": forward.query,
            "kv_cache": forward.cache.as_hnd(),
            "workspace_buffer": None,
            "block_tables": forward.metadata.page_table,
            "seq_lens": forward.metadata.cache_seqlens_int32,
            "max_seq_len": case.max_context_len,
            "bmm1_scale": forward.layer.softmax_scale,
        },
        rounds=3,
        warmup_rounds=1,
    )


@pytest.mark.parametrize(
    "mode",
    [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2],
    ids=lambda mode: mode.name.lower(),
)
def test_build_mha_metadata(mode: ForwardMode, benchmark: Any) -> None:
    """64 requests of 4,096 tokens in a context of 131,072, page size 64, with sliding-window tables: host time."""
    width = 1 if mode is ForwardMode.DECODE else 4
    case = ForwardCase(mode, "tiny", (64,) * 64, (width,) * 64)
    batch = build_forward(case, CPU).batch
    pool = KVPool(
        num_requests=64, max_context_len=131072, page_size=64, num_pages=64 * 65 + 1, swa_num_pages=64 * 65 + 1
    )
    rows = torch.tensor([pool.add_request(4096 + width) for _ in range(64)])
    batch = replace(batch, req_pool_indices=rows, seq_lens=torch.full((64,), 4096))
    benchmark.extra_info.update(clock="host", method="host time", requests=64)
    benchmark(build_mha_metadata, batch, pool)
