"""What no builder of metadata takes is refused with the value, and an empty batch makes no call."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lab.metadata import (
    ForwardBatch,
    ForwardMode,
    KVLayout,
    KVPool,
    SpecInfo,
    build_dsv4_metadata,
    build_mha_metadata,
    build_mla_decode_metadata,
    build_mla_metadata,
    build_mla_prefill_metadata,
)
from lab.metadata.mha.block_sparse import BlockSparseBackend, build_block_sparse_metadata
from lab.metadata.mha.metadata import allocate_mha_metadata, prepare_mha_metadata
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.context_parallel import DecodeContextParallel, build_mla_dcp_metadata
from lab.metadata.mla.dsa import DSABackend, Indexer, build_dsa_metadata
from lab.metadata.mla.dsv4 import DSV4Backend, DSV4Cache, DSV4Layer
from lab.metadata.mla.prefill import plan_prefix_chunks
from tests.metadata.batches import DRAFT_EXTENDS, Case, build, of_mla

Build = Callable[[ForwardBatch, KVPool], Any]
POOLS: dict[str, dict[str, Any]] = {
    "MLA": {"page_size": 32, "sliding_window": False},
    "DSV4": {"page_size": 128, "max_context_len": 300},
    "block-sparse": {"page_size": 128, "max_context_len": 300, "sliding_window": False},
}
CACHES: dict[str, Callable[[KVPool], Any]] = {
    "MLA": lambda pool: pool.new_latent_cache(16, torch.float32),
    "DSV4": lambda pool: DSV4Cache.over(pool, 16, torch.float32, 0),
    "block-sparse": lambda pool: pool.new_cache(2, 16, torch.float32, KVLayout.HND),
}
DSA, DSV4 = partial(build_dsa_metadata, indexer=Indexer()), build_dsv4_metadata
SPARSE, CHUNKS = partial(build_block_sparse_metadata, num_kv_heads=2), plan_prefix_chunks
DCP = {size: partial(build_mla_dcp_metadata, dcp=DecodeContextParallel(size, 0)) for size in (2, 3, 4)}


def prepare(batch: ForwardBatch, pool: KVPool) -> Any:
    """Prepare to write into buffers that are right for the batch."""
    case = of_mla(Case(ForwardMode.DECODE, (5,)))
    return prepare_mha_metadata(batch, pool, allocate_mha_metadata(*build(case)))


@pytest.mark.parametrize(
    ("build_metadata", "pool_of"),
    [
        *((each, "MLA") for each in (build_mha_metadata, build_mla_metadata, allocate_mha_metadata, prepare)),
        *((each, "MLA") for each in (DSA, CHUNKS)),
        (DSV4, "DSV4"),
        (SPARSE, "block-sparse"),
    ],
)
def test_no_attention_or_another_device_is_refused(build_metadata: Build, pool_of: str) -> None:
    case = Case(ForwardMode.DECODE, (5,), **POOLS[pool_of])
    batch, pool = build(case)
    with pytest.raises(ValueError, match="PREBUILT runs no attention"):
        build_metadata(replace(batch, forward_mode=ForwardMode.PREBUILT), pool)
    with pytest.raises(ValueError, match="batch is on cpu but the pool on meta"):
        build_metadata(batch, build(case, device="meta")[1])


DECODE, RAGGED = Case(ForwardMode.DECODE, (5,)), Case(ForwardMode.RAGGED_VERIFY, (40, 70), (3, 1), 4)
UNEQUAL = Case(ForwardMode.DRAFT_EXTEND, (40, 70), (3, 1))


@pytest.mark.parametrize(
    ("build_metadata", "case", "pool_of", "fields", "message"),
    [
        *[
            (
                build_mla_metadata,
                case,
                "MLA",
                {"page_size": size},
                rf"page_size={size}: .*has pages of \(32, 64\) tokens",
            )
            for case in (DECODE, Case(ForwardMode.EXTEND, (5,), (5,)))
            for size in (1, 16, 128, 256)
        ],
        (build_mla_metadata, DECODE, "MLA", {"sliding_window": True}, "sliding-window pages, which MLA does not use"),
        (build_mla_prefill_metadata, DECODE, "MLA", {}, "DECODE is no prefill"),
        (build_mla_decode_metadata, Case(ForwardMode.EXTEND, (5,), (5,)), "MLA", {}, "EXTEND is a prefill"),
        (DSA, UNEQUAL, "MLA", {}, "is no mode of DSA"),
        (DSA, RAGGED, "MLA", {}, "is no mode of DSA"),
        (DSA, DECODE, "MLA", {"page_size": 16}, "page_size=16"),
        (partial(DSA, dcp_size=3), DECODE, "MLA", {"page_size": 64}, "page_size=64 is no multiple of the 3 GPUs"),
        *[
            (DSV4, DECODE, "DSV4", fields, "a pool of DSV4 has sliding-window pages and whole groups of 128")
            for fields in ({"sliding_window": False}, {"page_size": 64})
        ],
        (DSV4, DECODE, "DSV4", {"virtual_slots": True}, "a pool of DSV4 has no virtual slots"),
        (DSV4, UNEQUAL, "DSV4", {}, "is no mode of DSV4"),
        (SPARSE, Case(ForwardMode.EXTEND, (130,), (3,)), "block-sparse", {}, "is no block-sparse decode"),
        (SPARSE, Case(ForwardMode.DECODE, (130,), new=1), "block-sparse", {}, "is no block-sparse decode"),
        (SPARSE, DECODE, "block-sparse", {"page_size": 64}, "page_size=64: block-sparse decode has pages of 128"),
        (DCP[2], Case(ForwardMode.DRAFT_EXTEND_V2, (9, 9), (4, 4)), "MLA", {"page_size": 64}, "not modelled with DCP"),
        (DCP[3], DECODE, "MLA", {"page_size": 64}, "page_size=64 is no multiple of the 3 GPUs"),
        (DCP[4], DECODE, "MLA", {"page_size": 64}, "page_size=16: the TRT-LLM MLA backend has pages of"),
        (CHUNKS, DECODE, "MLA", {}, "DECODE is no prefill"),
    ],
)
def test_other_modes_and_pools_are_refused(
    build_metadata: Build, case: Case, pool_of: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_metadata(*build(replace(case, **POOLS[pool_of] | fields)))


@pytest.mark.parametrize(
    ("backend", "pool_of", "modes"),
    [
        (
            TRTLLMMLABackend(),
            "MLA",
            [ForwardMode.IDLE, ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY, *DRAFT_EXTENDS],
        ),
        (DSABackend(), "MLA", [ForwardMode.IDLE]),
        (DSV4Backend(), "DSV4", [ForwardMode.IDLE]),
        (BlockSparseBackend(num_kv_heads=2), "block-sparse", [ForwardMode.DECODE, ForwardMode.IDLE]),
    ],
)
def test_an_empty_batch_makes_no_call(backend: Any, pool_of: str, modes: list[ForwardMode]) -> None:
    """There is no implementation to call. The sparse backends' outputs of padding become 0."""
    for mode in modes:
        new = 4 * (mode in (ForwardMode.TARGET_VERIFY, ForwardMode.RAGGED_VERIFY))
        padding = 2 * (mode is ForwardMode.IDLE and not isinstance(backend, TRTLLMMLABackend))
        batch, pool = build(Case(mode, (), new=new, num_padding_rows=padding, **POOLS[pool_of]))
        query, out = torch.zeros(padding, 4, 16), torch.full((padding, 4, 16), 9.0)
        cache = CACHES[pool_of](pool)
        given = {} if isinstance(backend, TRTLLMMLABackend) else {"topk_indices": torch.zeros(0, 4).int()}
        metadata = backend.build_metadata(batch, pool)
        run = backend.prepare_attention(batch, metadata, DSV4Layer(1.0), query, cache, out=out, **given)
        assert run() is out
        assert not out.any()


EXTEND, (V1, V2) = Case(ForwardMode.EXTEND, (5,), (2,)), (Case(mode, (5,), (2,)) for mode in DRAFT_EXTENDS)


BOTH = (build_mha_metadata, build_mla_metadata)


@pytest.mark.parametrize(
    ("builders", "case", "missing", "message"),
    [
        (BOTH, EXTEND, {"extend_seq_lens_cpu": None}, "EXTEND needs extend_seq_lens_cpu"),
        (BOTH, EXTEND, {"extend_prefix_lens_cpu": None}, "needs extend_prefix_lens_cpu"),
        (BOTH[:1], EXTEND, {"extend_seq_lens": None}, "device tensor extend_seq_lens"),
        (BOTH[1:], EXTEND, {"extend_prefix_lens": None}, "device tensor extend_prefix_lens"),
        (BOTH, V1, {"extend_seq_lens": None}, "device tensor extend_seq_lens"),
        (BOTH, V2, {"extend_seq_lens_cpu": None}, "needs extend_seq_lens_cpu"),
        (BOTH, Case(ForwardMode.DECODE, (5,), new=1), {"spec_info": SpecInfo()}, "needs SpecInfo.speculative_step_id"),
        (BOTH, Case(ForwardMode.TARGET_VERIFY, (), new=1), {"spec_info": None}, "needs SpecInfo.num_draft_tokens"),
    ],
)
def test_missing_facts_are_asked_for(
    builders: tuple[Build, ...], case: Case, missing: dict[str, Any], message: str
) -> None:
    batch, pool = build(of_mla(case))
    for build_metadata in builders:
        with pytest.raises(ValueError, match=message):
            build_metadata(replace(batch, **missing), pool)
