"""The MLA backend's graph stories: right runners pass all of them, and each deliberate defect is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.checks.graphs import GraphVerdict
from lab.checks.mla_graphs import MLAGraphCase, judge_mla_graphs, right_mla_runner
from lab.checks.verdicts import Outcome
from lab.kernels import portable
from lab.metadata import DraftAttention, ForwardBatch, KVPool, QueryLayout, SpecInfo
from lab.metadata.engine.cuda_graph import GraphRunner, MetadataPlace
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mla.backend import TRTLLMMLABackend
from lab.metadata.mla.buffers import MLAGraphMetadata, MLAGraphState
from tests.devices import IN_INTERPRETER, ON_GPU

CPU = torch.device("cpu")
WIDTH = 4
MODES = {
    "decode": GraphMode.decode(),
    "draft_decode": GraphMode.draft_decode(1),
    "target_verify": GraphMode.target_verify(WIDTH),
    "draft_extend": GraphMode.draft_extend(WIDTH),
    "draft_extend_v2": GraphMode.draft_extend_v2(SpecInfo(num_tokens_per_req=WIDTH)),
}


def wrong(verdicts: list[GraphVerdict]) -> dict[str, str]:
    return {each.check: each.reason for each in verdicts if each.outcome is not Outcome.RIGHT}


@IN_INTERPRETER
@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_passes_with_the_references(mode: str, place: MetadataPlace) -> None:
    assert wrong(judge_mla_graphs(references, MLAGraphCase(MODES[mode], place), CPU)) == {}


@IN_INTERPRETER
@pytest.mark.parametrize("page_size", [32, 64])
def test_a_draft_step_that_counts_its_own_token_passes(page_size: int) -> None:
    case = MLAGraphCase(MODES["draft_decode"], attention=DraftAttention.MLA_WITH_OFFSET, page_size=page_size)
    assert wrong(judge_mla_graphs(references, case, CPU)) == {}


@pytest.mark.parametrize(
    ("mode", "device"),
    [
        # Padded rows, of unequal numbers: the other modes' calls are simpler.
        pytest.param("draft_extend", "cpu", marks=IN_INTERPRETER),
        *(pytest.param(mode, "cuda", marks=ON_GPU) for mode in MODES),
    ],
)
@pytest.mark.parametrize("place", list(MetadataPlace), ids=lambda place: place.name.lower())
def test_the_portable_kernel_passes(mode: str, device: str, place: MetadataPlace) -> None:
    assert wrong(judge_mla_graphs(portable, MLAGraphCase(MODES[mode], place), device)) == {}


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


DEFECTS: dict[type[Defective], str] = {
    LengthOffByOne: "decode",
    SecondRequestsPageIsFirsts: "target_verify",
    LastColumnStale: "draft_extend_v2",
    PaddingNotCounted: "draft_extend",
    BoundariesOfFullRows: "draft_extend",
    NotRebuilt: "draft_decode",
}


@IN_INTERPRETER
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_of_the_metadata_is_found(defect: type[Defective]) -> None:
    def make(case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        state = MLAGraphState(pool, max(sizes), [case.mode], attention=case.attention)
        spoilt = defect(case.mode, state)
        return GraphRunner(TRTLLMMLABackend(), case.mode, pool, sizes, body, case.place, metadata=spoilt)

    assert wrong(judge_mla_graphs(references, MLAGraphCase(MODES[DEFECTS[defect]]), CPU, make))


@IN_INTERPRETER
def test_rows_as_they_lie_are_found_in_the_first_draft_extend() -> None:
    """What SGLang 0.5.12 captures."""

    def make(case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        backend = TRTLLMMLABackend(draft_extend=QueryLayout.VIEW)
        return GraphRunner(backend, case.mode, pool, sizes, body, case.place)

    assert wrong(judge_mla_graphs(references, MLAGraphCase(MODES["draft_extend"]), CPU, make))


@IN_INTERPRETER
def test_a_wrong_implementation_is_found() -> None:
    class LastKeyLost:
        @staticmethod
        def trtllm_batch_decode_with_kv_cache_mla(seq_lens: Tensor, **arguments: Any) -> Any:
            return references.trtllm_batch_decode_with_kv_cache_mla(seq_lens=(seq_lens - 1).clamp(min=0), **arguments)

    assert set(wrong(judge_mla_graphs(LastKeyLost, MLAGraphCase(MODES["decode"]), CPU)))


@IN_INTERPRETER
def test_buffers_that_move_are_told() -> None:
    def make(case: MLAGraphCase, pool: KVPool, sizes: Sequence[int], body: Any) -> GraphRunner[Any]:
        runner = right_mla_runner(case, pool, sizes, body)
        state = runner.metadata.state
        replay = runner.replay

        def moving(batch: ForwardBatch) -> Any:
            for key, metadata in list(state.metadata.items()):
                state.metadata[key] = replace(metadata, seq_lens_k=metadata.seq_lens_k.clone())
            return replay(batch)

        runner.replay = moving  # type: ignore[method-assign]
        return runner

    assert "moved" in wrong(judge_mla_graphs(references, MLAGraphCase(MODES["decode"]), CPU, make))["same_buffers"]
