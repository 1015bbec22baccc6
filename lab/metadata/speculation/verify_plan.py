"""Backends that plan a verify pass while the draft runs (`lab.metadata.engine.plan_stream`), for chains and for trees."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.metadata.engine.backend import Backend
from lab.metadata.engine.cuda_graph import check_sizes, size_for, sized_passes
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import QueryRows
from lab.metadata.engine.graph_inputs import GraphMode, StaticInputs
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import check_attends
from lab.metadata.engine.plan_stream import FixUp, PlannedVerify, VerifyBackend, VerifyBuffers
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.verify_mask import VerifyMask, pack_tree_mask

FUSED_MHA = TRTLLMMHABackend()


class CapturedVerify(VerifyBackend):
    """A `VerifyBackend` for verify passes in CUDA graphs. A plan writes the inputs and the metadata of a captured batch size.

    Args:
        attention: the backend that makes the metadata's buffers: TRT-LLM MHA, or TRT-LLM MLA. The MLA kernel takes no mask:
            with MLA, `mask` must be None.
        mask: a buffer for the decode call's packed mask (see `PlannedVerify`) of ``max(batch_sizes)`` requests; None: causal.

    Raises:
        ValueError: there is no size, a number is below 1, or the backend does not support the pool.
        NotImplementedError: `attention` writes its metadata by Triton, as TRT-LLM MHA does with `MetadataBuilder.FUSED`, and
            Triton does not run on the pool's device.
    """

    def __init__(
        self,
        pool: KVPool,
        num_draft_tokens: int,
        batch_sizes: Sequence[int],
        attention: Backend[Any] = FUSED_MHA,
        mask: Tensor | None = None,
    ) -> None:
        check_sizes(batch_sizes)
        mode = GraphMode.target_verify(num_draft_tokens)
        self.pool = pool
        self.num_draft_tokens = num_draft_tokens
        self.inputs = StaticInputs(mode, max(batch_sizes), pool.device)
        self.buffers = attention.new_buffers([mode], pool, max(batch_sizes))[mode]
        # Prepared now, to save the host's time in a plan.
        self._passes = sized_passes(self.inputs, self.buffers, batch_sizes)
        self._planned = {
            size: PlannedVerify(each.view, each.metadata, None if mask is None else mask[:size])
            for size, each in self._passes.items()
        }

    @property
    def device(self) -> torch.device:
        return self.pool.device

    def planned(self, batch_size: int) -> PlannedVerify:
        """Return the buffers of the smallest captured batch size for `batch_size` requests."""
        return self._planned[size_for(batch_size, list(self._planned))]

    def check(self, batch: ForwardBatch) -> None:
        self.planned(batch.batch_size)
        if batch.forward_mode.query_rows is not QueryRows.DRAFT_TOKENS:
            raise ValueError(f"{batch.forward_mode!r} is not verified: pass a TARGET_VERIFY batch")
        check_attends(batch, self.pool)
        if batch.num_tokens != batch.batch_size * self.num_draft_tokens:
            raise ValueError(
                f"the batch has {batch.num_tokens} rows for {batch.batch_size} requests, but this backend verifies "
                f"{self.num_draft_tokens} rows of each"
            )

    def plan(self, batch: ForwardBatch) -> PlannedVerify:
        planned = self.planned(batch.batch_size)
        size = planned.batch.batch_size
        self.inputs.load(batch, size)
        self._passes[size].rebuild()
        return planned


class ChainVerify(CapturedVerify):
    """Plans the verification of chains (top-k 1). Rows are causal, so no part of the plan depends on the draft. SGLang's draft
    fills `verify_mask` while it builds a tree, and no kernel reads it; None: the draft allocates one.
    """

    fix_up = FixUp.NONE

    def __init__(
        self,
        pool: KVPool,
        num_draft_tokens: int,
        batch_sizes: Sequence[int],
        attention: Backend[Any] = FUSED_MHA,
        verify_mask: VerifyMask | None = None,
    ) -> None:
        self.verify_mask = verify_mask
        super().__init__(pool, num_draft_tokens, batch_sizes, attention)

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        return [None if self.verify_mask is None else self.verify_mask.buffer, None]


class TreeMaskVerify(CapturedVerify):
    """Plans the verification of trees. The metadata is the same as for chains, and a mask lets each draft token see only itself
    and its ancestors among the draft tokens.

    Attributes:
        parents: ``[max_batch_size, d]`` int64, the parent of each draft token as in `pack_tree_mask`. The draft writes it;
            before that the trees are chains.
        mask: uint16 ``[max_batch_size, d, 2 * ceil(d / 32)]``, which the fix-up writes after the draft.
    """

    fix_up = FixUp.AFTER_DRAFT

    def __init__(
        self, pool: KVPool, num_draft_tokens: int, batch_sizes: Sequence[int], attention: Backend[Any] = FUSED_MHA
    ) -> None:
        chain = torch.arange(-1, num_draft_tokens - 1, device=pool.device)
        self.parents = chain.repeat(max(batch_sizes, default=0), 1)
        self.mask = pack_tree_mask(self.parents)
        super().__init__(pool, num_draft_tokens, batch_sizes, attention, self.mask)

    def get_verify_buffers_to_fill_after_draft(self) -> VerifyBuffers:
        return [self.parents, None]

    def update_verify_buffers_to_fill_after_draft(self, planned: PlannedVerify) -> None:
        assert planned.mask is not None
        pack_tree_mask(self.parents[: planned.batch.batch_size], out=planned.mask)
