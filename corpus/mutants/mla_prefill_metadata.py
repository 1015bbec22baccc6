"""Mutants of the metadata builder of MLA's prefill."""

from dataclasses import replace
from typing import Any

import torch

from corpus.models.metadata import MLAPrefillBuilder
from corpus.wrong import wrong
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.lengths import exclusive_cumsum
from lab.metadata.mla.metadata import TRTLLMMLAPrefillMetadata


def _of_keys(metadata: TRTLLMMLAPrefillMetadata, batch: ForwardBatch, _: Any) -> TRTLLMMLAPrefillMetadata:
    keys = batch.seq_lens.to(torch.int32)
    return replace(metadata, seq_lens=keys, cum_seq_lens=exclusive_cumsum(keys))


class MLAPrefillMetadata(MLAPrefillBuilder):
    """Kernels of the metadata builder of MLA's prefill."""

    mla_prefill_counts_cached_tokens = wrong(changed=_of_keys)(
        "The lengths of a prefill count the cached prefixes, whose calls are others."
    )
    mla_prefill_maximum_of_first = wrong(
        instead={"max_seq_len": lambda _, batch, __: next(iter(batch.extend_seq_lens_cpu), 0)}
    )("max_seq_len is the first request's.")
    mla_prefill_maximum_of_keys = wrong(
        instead={
            "max_seq_len": lambda _, batch, __: max(
                map(sum, zip(batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu, strict=True))
            )
        }
    )("max_seq_len is the longest request's, with its cached prefix.")
    mla_prefill_falls_back_without_prefix = wrong(
        instead={
            "fallback_to_flashinfer_impl": lambda right, _, settings: (
                right.fallback_to_flashinfer_impl or settings["disable_chunked_prefix_cache"]
            )
        }
    )("A prefill without the chunked prefix cache falls back also if no request has a cached prefix.")
    mla_prefill_ignores_its_graph = wrong(
        instead={
            "fallback_to_flashinfer_impl": lambda right, batch, settings: (
                settings["disable_chunked_prefix_cache"] and any(batch.extend_prefix_lens_cpu)
            )
        }
    )("A prefill that is captured in a graph does not fall back.")
    mla_prefill_lengths_of_the_engine = wrong(instead={"seq_lens": lambda _, batch, __: batch.extend_seq_lens})(
        "seq_lens is the engine's own tensor of new lengths, which the next batch is written into."
    )

    @wrong(stage="changed")
    def mla_prefill_offsets_kept(self, metadata, batch, settings):
        """The offsets of the first prefill with so many requests serve all of them."""
        return replace(metadata, cum_seq_lens=self.first(batch.batch_size, metadata.cum_seq_lens.clone))
