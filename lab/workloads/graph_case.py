"""One sequence of CUDA graph replays as data: its backend, its forward mode and its requests."""

from dataclasses import dataclass
from typing import Any

from lab.calls.problem import AttentionCall
from lab.metadata.engine.forward_batch import SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.graph_inputs import PADDED_SEQ_LEN, GraphMode, MetadataPlace
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.backend import CallSettings, TRTLLMMHABackend
from lab.metadata.mha.block_sparse import BlockSparseBackend
from lab.named_enum import NamedEnum
from lab.workloads.attention_case import short_repr
from lab.workloads.forward_case import GroupedLayer
from lab.workloads.mla_case import LatentLayer


class ReplaySequence(NamedEnum):
    """A sequence of CUDA graph replays, eager passes and overwritten buffers, run by `lab.checks.properties.graph_replays`."""

    CAPTURED_BELOW_Q = "captured below q"
    EAGER_EQUALS_REPLAY = "eager equals replay"
    AFTER_A_LONGER_BATCH = "after a longer batch"
    A_B_A = "A, B, A"
    TWO_CAPTURED_SIZES = "two captured sizes"
    EAGER_BETWEEN_REPLAYS = "eager between replays"
    SAME_BUFFERS = "same buffers"
    POISONED = "poisoned"


@dataclass(frozen=True, repr=False)
class ReplayCase:
    """A sequence of CUDA graph replays in one forward mode, as data. Each backend has a subclass."""

    mode: GraphMode  #: the forward mode of the graphs, their query rows per request, and their draft step
    sequence: ReplaySequence
    #: where the metadata is rebuilt: before the replay, or inside the graph
    place: MetadataPlace = MetadataPlace.IN_GRAPH
    page_size: int = 16  #: tokens per page
    num_pages: int = 6  #: pages of each request's history, and so of the longest length
    #: length of padding requests (`lab.metadata.engine.graph_inputs.StaticInputs`); 0 in vLLM
    padded_seq_len: int = PADDED_SEQ_LEN
    seed: int = 0  #: seed of all random numbers

    __repr__ = short_repr

    @property
    def max_context_len(self) -> int:
        return self.page_size * self.num_pages


@dataclass(frozen=True, repr=False)
class GraphCase(GroupedLayer, ReplayCase):
    geometry: str = "tiny"  #: a name of `lab.workloads.GEOMETRIES`
    sliding_window: bool = False  #: the layer has a sliding window and a pool of its own
    decode_splits: int = 1  #: calls into which the engine divides a decode call, with requests sorted by length
    encoder_only: bool = False  #: in a verification, rows of the layer see all keys of their request
    virtual_slots: bool = False  #: the pool has virtual pages, which its `v2p` maps to pages of the cache
    block_sparse: bool = False  #: K/V heads of each row see at most 16 pages of 128 tokens; the layer has no sinks

    @property
    def interface(self) -> AttentionCall:
        return self.mode.forward_mode.mha_call or AttentionCall.DECODE

    def backend(self, implementation: Any = None) -> Any:
        if self.block_sparse:
            return BlockSparseBackend(implementation, self.model.num_kv_heads)
        settings = CallSettings(decode_splits=self.decode_splits)
        return TRTLLMMHABackend(implementation, settings=settings, expand_encoder_only_verify=self.encoder_only)


@dataclass(frozen=True, repr=False)
class MLAGraphCase(LatentLayer, ReplayCase):
    """A sequence of CUDA graph replays of an MLA backend: DeepSeek-V4's (DSV4) if `compress_ratio` is set, otherwise that of
    DeepSeek sparse attention (DSA) if `index_topk` is set, otherwise the backend without selection.
    """

    page_size: int = 32  #: 32 or 64; with `compress_ratio` 128
    num_pages: int = 5
    attention: DraftAttention = DraftAttention.MLA
    index_topk: int | None = None
    compress_ratio: int | None = None
    num_qo_heads: int = 4
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16

    virtual_slots = False  # only `GraphCase` can have them

    @property
    def sliding_window(self) -> bool:
        return self.compress_ratio is not None


def vllm_graph_modes(width: int) -> tuple[GraphMode, GraphMode]:
    """Return the modes that vLLM captures in CUDA graphs: a decode, and a verification of `width` query rows per request."""
    # vLLM's lengths count the rows of a verification, as those of DRAFT_EXTEND_V2 do and those of TARGET_VERIFY do not.
    return GraphMode(ForwardMode.DECODE), GraphMode.draft_extend_v2(SpecInfo(num_tokens_per_req=width))


def graph_modes(width: int) -> tuple[GraphMode, ...]:
    """Return every forward mode that runs in CUDA graphs, with `width` query rows per request unless the mode has one row."""
    several = [mode for mode in ForwardMode if mode.in_graph and mode.query_rows is not QueryRows.ONE]
    several.sort(key=lambda mode: mode.extends_draft)
    return GraphMode(ForwardMode.DECODE), GraphMode.draft_decode(1), *(GraphMode(mode, width) for mode in several)
