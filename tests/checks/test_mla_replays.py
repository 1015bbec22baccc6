"""The MLA backend's replay sequences: right runners pass all of them, and each deliberate defect is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.checks import Outcome, ReplaySequence, judge_case
from lab.kernels import portable
from lab.metadata import DraftAttention, ForwardBatch, KVPool, QueryLayout
from lab.metadata.engine.backend import RebuiltMetadata
from lab.metadata.engine.cuda_graph import GraphRunner
from lab.metadata.engine.graph_inputs import MetadataPlace
from lab.metadata.mla.buffers import MLAGraphMetadata
from lab.workloads.graph_case import MLAGraphCase
from lab.workloads.inputs.replay_fixture import right_runner
from tests.checks.test_graph_replays import MODES, reason, wrong
from tests.devices import IN_INTERPRETER, ON_GPU


@IN_INTERPRETER
@pytest.mark.parametrize("mode", [name for name in MODES if name != "frozen_kv_draft"])
def test_every_mode_passes_with_the_references(mode: str) -> None:
    cases = (MLAGraphCase(MODES[mode], sequence, place) for sequence in ReplaySequence for place in MetadataPlace)
    assert wrong(cases) == {}


DSA_MODES = ("decode", "draft_decode", "target_verify", "draft_extend_v2")


@IN_INTERPRETER
@pytest.mark.parametrize("mode", DSA_MODES)
def test_sparse_attention_passes_with_the_references(mode: str) -> None:
    places = list(MetadataPlace)
    cases = (
        MLAGraphCase(MODES[mode], sequence, places[n % 2], index_topk=48) for n, sequence in enumerate(ReplaySequence)
    )
    assert wrong(cases) == {}


TWO_POOLS: dict[str, Any] = {"page_size": 128, "qk_rope_head_dim": 0, "num_qo_heads": 1}


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("mode", "ratio"),
    [("decode", 4), ("draft_decode", 0), ("target_verify", 128), ("ragged_verify", 2), ("draft_extend_v2", 0)],
)
def test_two_pools_pass_with_the_references(mode: str, ratio: int) -> None:
    places, topk = list(MetadataPlace), 48 if ratio in (2, 4) else None
    cases = (
        MLAGraphCase(MODES[mode], sequence, places[n % 2], index_topk=topk, compress_ratio=ratio, **TWO_POOLS)
        for n, sequence in enumerate(ReplaySequence)
    )
    assert wrong(cases) == {}


@IN_INTERPRETER
def test_the_portable_kernel_passes_with_two_pools() -> None:
    case = MLAGraphCase(MODES["target_verify"], ReplaySequence.POISONED, compress_ratio=128, **TWO_POOLS)
    assert reason(case, portable) == ""


@IN_INTERPRETER
def test_the_portable_kernel_passes_with_sparse_attention() -> None:
    case = MLAGraphCase(MODES["target_verify"], ReplaySequence.POISONED, num_pages=4, index_topk=48)
    assert reason(case, portable) == ""


@IN_INTERPRETER
def test_a_draft_step_that_counts_its_own_token_passes_on_both_page_sizes() -> None:
    case = MLAGraphCase(MODES["draft_decode"], ReplaySequence.A_B_A, attention=DraftAttention.MLA_WITH_OFFSET)
    cases = (
        replace(case, sequence=sequence, page_size=(32, 64)[number % 2])
        for number, sequence in enumerate(ReplaySequence)
    )
    assert wrong(cases) == {}


@IN_INTERPRETER
def test_the_portable_kernel_passes() -> None:
    """Padded rows, of unequal numbers: the other modes' calls are simpler."""
    places = list(MetadataPlace)
    cases = (
        MLAGraphCase(MODES["draft_extend"], sequence, places[n % 2], num_pages=4)
        for n, sequence in enumerate(ReplaySequence)
    )
    assert wrong(cases, portable) == {}


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", [name for name in MODES if name != "frozen_kv_draft"])
def test_the_portable_kernel_passes_in_real_graphs(mode: str, place: MetadataPlace, device: str) -> None:
    for sequence in ReplaySequence:
        verdict = judge_case("lab.kernels.portable", "S2", MLAGraphCase(MODES[mode], sequence, place), device)
        assert verdict.outcome is Outcome.RIGHT, verdict


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("mode", DSA_MODES)
def test_the_portable_kernel_passes_with_sparse_attention_in_real_graphs(mode: str, device: str) -> None:
    for sequence in ReplaySequence:
        case = MLAGraphCase(MODES[mode], sequence, index_topk=48)
        verdict = judge_case("lab.kernels.portable", "S2", case, device)
        assert verdict.outcome is Outcome.RIGHT, verdict


# --- deliberate defects -----------------------------------------------------------------------------------------------

Prepared = Callable[[], None]


class Defective(MLAGraphMetadata):
    """One mode's metadata, whose every rebuild is followed by a defect."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, metadata = super().prepare(view), self.slices(view.batch_size)

        def run() -> None:
            rebuild()
            self.spoil(metadata, view)

        return run

    def spoil(self, metadata: Any, view: ForwardBatch) -> None:
        raise NotImplementedError


class LengthOffByOne(Defective):
    def spoil(self, metadata: Any, view: ForwardBatch) -> None:
        metadata.seq_lens_k.sub_(1)


class SecondRequestsPageIsFirsts(Defective):
    def spoil(self, metadata: Any, view: ForwardBatch) -> None:
        metadata.block_kv_indices[1:, 0] = metadata.block_kv_indices[0, 0]


class LastColumnStale(Defective):
    """The table's fourth column is not written."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, metadata = super(Defective, self).prepare(view), self.slices(view.batch_size)

        def run() -> None:
            before = metadata.block_kv_indices[:, 3].clone()
            rebuild()
            metadata.block_kv_indices[:, 3] = before

        return run


class PaddingNotCounted(Defective):
    """Lengths of a padded draft extend without the padding."""

    def spoil(self, metadata: Any, view: ForwardBatch) -> None:
        metadata.seq_lens_k.add_(metadata.seq_lens_q).sub_(metadata.max_seq_len_q)


class BoundariesOfFullRows(Defective):
    """cu_seqlens_q as if every request had accepted all."""

    def spoil(self, metadata: Any, view: ForwardBatch) -> None:
        steps = torch.arange(len(metadata.cu_seqlens_q), dtype=torch.int32) * metadata.max_seq_len_q
        metadata.cu_seqlens_q.copy_(steps)


class NotRebuilt(Defective):
    """Lengths and pages of the capture."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        return lambda: None


DEFECTS: dict[type[Defective], tuple[str, ReplaySequence]] = {
    LengthOffByOne: ("decode", ReplaySequence.CAPTURED_BELOW_Q),
    SecondRequestsPageIsFirsts: ("target_verify", ReplaySequence.TWO_CAPTURED_SIZES),
    LastColumnStale: ("draft_extend_v2", ReplaySequence.AFTER_A_LONGER_BATCH),
    PaddingNotCounted: ("draft_extend", ReplaySequence.EAGER_EQUALS_REPLAY),
    BoundariesOfFullRows: ("draft_extend", ReplaySequence.POISONED),
    NotRebuilt: ("draft_decode", ReplaySequence.A_B_A),
}


@IN_INTERPRETER
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_of_the_metadata_is_found(defect: type[Defective]) -> None:
    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        right = backend.new_buffers([case.mode], pool, max(sizes))[case.mode]
        spoilt = defect(case.mode, pool, right.block_kv_indices, case.attention)
        return GraphRunner(backend, case.mode, pool, sizes, body, case.place, metadata=spoilt)

    mode, sequence = DEFECTS[defect]
    assert reason(MLAGraphCase(MODES[mode], sequence), make=make)


class DSALengths(RebuiltMetadata[Any]):
    """Every row has the length of its request's last row."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, lens, width = (
            super().prepare(view),
            self.slices(view.batch_size).seq_lens,
            self.mode.num_tokens_per_req,
        )
        return lambda: (rebuild(), lens.copy_(lens[width - 1 :: width].repeat_interleave(width)))  # type: ignore[func-returns-value, return-value]


class DSAPlaces(RebuiltMetadata[Any]):
    """Places of the capture."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, table = super().prepare(view), self.slices(view.batch_size).page_table_1

        def run() -> None:
            before = table.clone()
            rebuild()
            table.copy_(before)

        return run


class DSADraft(RebuiltMetadata[Any]):
    """A draft step that counts its own token."""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, lens = super().prepare(view), self.slices(view.batch_size).seq_lens
        return lambda: (rebuild(), lens.add_(1))  # type: ignore[func-returns-value, return-value]


@IN_INTERPRETER
@pytest.mark.parametrize(
    ("defect", "mode"), [(DSALengths, "target_verify"), (DSAPlaces, "draft_extend_v2"), (DSADraft, "draft_decode")]
)
def test_a_defect_of_sparse_metadata_is_found(defect: type[RebuiltMetadata[Any]], mode: str) -> None:
    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        spoilt = defect(case.mode, pool, backend.build_metadata)
        return GraphRunner(backend, case.mode, pool, sizes, body, case.place, metadata=spoilt)

    assert reason(MLAGraphCase(MODES[mode], ReplaySequence.TWO_CAPTURED_SIZES, index_topk=48), make=make)


class DSV4Kept(RebuiltMetadata[Any]):
    """A tensor of the capture is kept."""

    name = ""

    def prepare(self, view: ForwardBatch) -> Prepared:
        rebuild, kept = super().prepare(view), getattr(self.slices(view.batch_size), self.name)

        def run() -> None:
            before = kept.clone()
            rebuild()
            kept.copy_(before)

        return run


@IN_INTERPRETER
@pytest.mark.parametrize(("name", "ratio"), [("window", 0), ("page_table", 128), ("page_table", 4), ("seq_lens", 0)])
def test_a_stale_tensor_of_two_pools_is_found(name: str, ratio: int) -> None:
    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        spoilt = type("Stale", (DSV4Kept,), {"name": name})(case.mode, pool, backend.build_metadata)
        return GraphRunner(backend, case.mode, pool, sizes, body, case.place, metadata=spoilt)

    topk = 48 if ratio == 4 else None
    case = MLAGraphCase(
        MODES["decode"], ReplaySequence.TWO_CAPTURED_SIZES, index_topk=topk, compress_ratio=ratio, **TWO_POOLS
    )
    assert reason(case, make=make)


@IN_INTERPRETER
def test_rows_as_they_lie_are_found_in_the_first_draft_extend() -> None:
    """What SGLang 0.5.12 captures."""

    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        seen = replace(backend, draft_extend=QueryLayout.VIEW)
        return GraphRunner(seen, case.mode, pool, sizes, body, case.place)

    assert reason(MLAGraphCase(MODES["draft_extend"], ReplaySequence.EAGER_EQUALS_REPLAY), make=make)


@IN_INTERPRETER
def test_a_wrong_implementation_is_found() -> None:
    class LastKeyLost:
        @staticmethod
        def trtllm_batch_decode_with_kv_cache_mla(seq_lens: Tensor, **arguments: Any) -> Any:
            return references.trtllm_batch_decode_with_kv_cache_mla(seq_lens=(seq_lens - 1).clamp(min=0), **arguments)

    for sequence in ReplaySequence:
        assert "output vectors are wrong" in reason(MLAGraphCase(MODES["decode"], sequence), LastKeyLost)


@IN_INTERPRETER
def test_buffers_that_move_are_told() -> None:
    def make(backend: Any, case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        runner = right_runner(backend, case, pool, sizes, body)
        buffers = runner.metadata
        replay = runner.replay

        def moving(batch: ForwardBatch) -> Any:
            for size, metadata in list(buffers.metadata.items()):
                buffers.metadata[size] = replace(metadata, seq_lens_k=metadata.seq_lens_k.clone())
            return replay(batch)

        runner.replay = moving  # type: ignore[method-assign]
        return runner

    assert "moved" in reason(MLAGraphCase(MODES["decode"], ReplaySequence.SAME_BUFFERS), make=make)
