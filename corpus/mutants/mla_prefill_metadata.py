"""Mutants of the metadata builder of MLA's prefill."""

from dataclasses import replace
from typing import Any

import torch

from corpus.mutants.mutant import MLA_PREFILL, Defective, Memory
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import exclusive_cumsum
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata, build_mla_prefill_metadata


class MLAPrefillBuilder(Defective, is_model=True, interface=(MLA_PREFILL,)):
    """`lab.metadata.build_mla_prefill_metadata`, and one change of what it built."""

    def build_mla_prefill_metadata(
        self, batch: ForwardBatch, pool: KVPool, **settings: bool
    ) -> TRTLLMMLAPrefillMetadata:
        """As `lab.metadata.build_mla_prefill_metadata`."""
        return self.changed(build_mla_prefill_metadata(batch, pool, **settings), batch, settings)

    def changed(
        self, metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, settings: dict[str, bool]
    ) -> TRTLLMMLAPrefillMetadata:
        return self.misread(metadata, batch, settings)


def _of_keys(metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, _: Any) -> TRTLLMMLAPrefillMetadata:
    keys = batch.seq_lens.to(torch.int32)
    return replace(metadata, seq_lens=keys, cum_seq_lens=exclusive_cumsum(keys))


class MLAPrefillCountsCachedTokens(MLAPrefillBuilder, changed=_of_keys):
    """The lengths of a prefill count the cached prefixes, whose calls are others."""


class MLAPrefillMaximumOfFirst(
    MLAPrefillBuilder, instead={"max_seq_len": lambda _, batch, __: next(iter(batch.extend_seq_lens_cpu), 0)}
):
    """max_seq_len is the first request's."""


class MLAPrefillMaximumOfKeys(
    MLAPrefillBuilder,
    instead={
        "max_seq_len": lambda _, batch, __: max(
            map(sum, zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True))
        )
    },
):
    """max_seq_len is the longest request's, with its cached prefix."""


class MLAPrefillFallsBackWithoutPrefix(
    MLAPrefillBuilder,
    instead={
        "fallback_to_flashinfer_impl": lambda right, _, settings: (
            right.fallback_to_flashinfer_impl or settings["disable_chunked_prefix_cache"]
        )
    },
):
    """A prefill without the chunked prefix cache falls back also if no request has a cached prefix."""


class MLAPrefillIgnoresItsGraph(
    MLAPrefillBuilder,
    instead={
        "fallback_to_flashinfer_impl": lambda right, batch, settings: (
            settings["disable_chunked_prefix_cache"] and any(batch.extend_prefix_lens_cpu)
        )
    },
):
    """A prefill that is captured in a graph does not fall back."""


class MLAPrefillLengthsOfTheEngine(MLAPrefillBuilder, instead={"seq_lens": lambda _, batch, __: batch.extend_seq_lens}):
    """seq_lens is the engine's own tensor of new lengths, which the next batch is written into."""


class MLAPrefillOffsetsKept(Memory, MLAPrefillBuilder):
    """The offsets of the first prefill with so many requests serve all of them."""

    def changed(
        self, metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, settings: dict[str, bool]
    ) -> TRTLLMMLAPrefillMetadata:
        return replace(metadata, cum_seq_lens=self.first(batch.batch_size, metadata.cum_seq_lens.clone))
