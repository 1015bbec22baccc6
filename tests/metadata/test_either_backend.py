"""What must not matter to the metadata of either backend, and what it must not read."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from lab.metadata import ForwardBatch, KVPool, build_mha_metadata, build_mla_decode_metadata
from tests.metadata.host_reads import ForbidHostReads
from tests.metadata.mha_cases import Case, all_modes, assert_same, build, label, tensors_of
from tests.metadata.mla_cases import MLA_WITH_OFFSET, decode_cases

Build = Callable[[ForwardBatch, KVPool], Any]
BUILDS: dict[str, tuple[Build, list[Case]]] = {
    "MHA": (partial(build_mha_metadata, expand_encoder_only_verify=True), all_modes()),
    "MLA": (partial(build_mla_decode_metadata, attention=MLA_WITH_OFFSET), decode_cases(32)),
}
EVERY_CASE = pytest.mark.parametrize(
    ("build_metadata", "case"),
    [
        pytest.param(build_metadata, case, id=f"{name}-{label(case)}-{index}")
        for name, (build_metadata, cases) in BUILDS.items()
        for index, case in enumerate(cases)
    ],
)


@EVERY_CASE
def test_leftovers_in_the_request_table_are_never_looked_at(build_metadata: Build, case: Case) -> None:
    """Beyond each row's keys lie ids that no map has an entry for."""
    batch, pool = build(case)
    clean = build_metadata(batch, pool)
    for row, length in zip(batch.req_pool_indices.tolist(), case.total_lens, strict=True):
        pool.req_to_token[row, length:] = 2**30
    assert_same(build_metadata(batch, pool), clean)


@EVERY_CASE
def test_a_host_mirror_of_the_lengths_changes_no_cell(build_metadata: Build, case: Case) -> None:
    """MLA's block table has fewer columns with it: the longest request is known."""
    without, mirrored = (
        tensors_of(build_metadata(*build(replace(case, host_seq_lens=is_mirrored)))) for is_mirrored in (False, True)
    )
    assert without.keys() == mirrored.keys()
    for name, tensor in without.items():
        columns = min(tensor.shape[-1], mirrored[name].shape[-1])
        assert torch.equal(tensor[..., :columns], mirrored[name][..., :columns]), name


@EVERY_CASE
def test_it_shares_no_memory_with_the_batch_or_the_pool(build_metadata: Build, case: Case) -> None:
    batch, pool = build(replace(case, index_dtype=torch.int32))
    built = build_metadata(batch, pool)
    kept = {name: tensor.clone() for name, tensor in tensors_of(built).items()}
    for tensor in (batch.seq_lens, batch.out_cache_loc, pool.req_to_token, batch.extend_seq_lens):
        if tensor is not None:
            tensor.fill_(7)
    for name, tensor in tensors_of(built).items():
        assert torch.equal(tensor, kept[name]), name


@EVERY_CASE
def test_nothing_reads_the_device(build_metadata: Build, case: Case) -> None:
    batch, pool = build(case)
    with ForbidHostReads():
        real = build_metadata(batch, pool)
    shapes = build_metadata(*build(case, "meta"))
    assert shapes.max_seq_len_q == real.max_seq_len_q
    for name, tensor in tensors_of(real).items():
        other = tensors_of(shapes)[name]
        assert (other.device.type, other.shape, other.dtype) == ("meta", tensor.shape, tensor.dtype), name
