"""Context parallelism: divide an extend's query rows among ranks in zigzag order, and make each rank's call (SGLang 0.5.23).

With n ranks, the new tokens of each request are cut into 2 n blocks. A rank has an early and a late block, so that the rows of
all ranks see about the same number of keys::

    4 ranks    block 0   1   2   3   4   5   6   7
                rank 0   1   2   3   3   2   1   0

K and V of all tokens are gathered and written on every rank before the call. A rank makes one context call over twice the
number of requests: the early blocks of all requests, then the late blocks. The call's page table has each row twice. The
sources are `ZigzagCPStrategy` in `sglang/srt/layers/cp/zigzag.py` and `_maybe_build_cp_zigzag_page_tables` in
`sglang/srt/layers/attention/trtllm_mha_backend.py`. SGLang's other strategy, interleaved rows, does not support MHA.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.metadata.engine.backend import in_turn
from lab.metadata.engine.forward_batch import ForwardBatch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import PagedKVCache
from lab.metadata.engine.lengths import host_lengths, query_rows
from lab.metadata.mha.backend import AttentionLayer, PlannedCall, TRTLLMMHABackend
from lab.metadata.mha.metadata import TRTLLMMHAMetadata

SHARDED_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED)


@dataclass(frozen=True, eq=False)
class ZigzagShard:
    """One rank's query rows in an extend pass with context parallelism, and the metadata of the rank's attention call."""

    rows: Tensor  #: ``[num_rows]`` int64, indices of the rank's query rows in the whole batch, in the order of its call
    #: number of rows of the rank's tensors, the same on all ranks, because collectives require it: the largest number of query
    #: rows of a rank, rounded up to a multiple of twice the number of ranks. Padding rows are in no call; their output is 0
    num_padded_rows: int
    #: metadata of the rank's call, over ``2 * batch_size`` requests. ``swa_out_cache_loc`` is the whole batch's, because
    #: every rank writes all K and V
    metadata: TRTLLMMHAMetadata


def why_not_zigzag(batch: ForwardBatch, num_ranks: int) -> str:
    """Return why a batch's query rows cannot be divided among `num_ranks` ranks, or "" if they can."""
    if num_ranks < 2:
        return f"num_ranks={num_ranks}: nothing is dealt to fewer than 2"
    if batch.forward_mode not in SHARDED_MODES:
        names = " and ".join(mode.name for mode in SHARDED_MODES)
        return f"{batch.forward_mode.name} is run whole on every rank: {names} alone are dealt to ranks"
    lengths = host_lengths(batch, "extend_seq_lens_cpu")
    if min(lengths, default=0) < 2 * num_ranks:
        return (
            f"extend_seq_lens_cpu={list(lengths)}: with {num_ranks} ranks every request needs {2 * num_ranks} new tokens, one "
            "for each block"
        )
    return ""


def zigzag_shard(batch: ForwardBatch, metadata: TRTLLMMHAMetadata, num_ranks: int, rank: int) -> ZigzagShard:
    """Return the query rows of one rank in an EXTEND or MIXED batch, and the metadata of the rank's call.

    The new tokens of a request are cut into n = ``2 * num_ranks`` blocks. The first blocks may be longer by 1. Rank r gets
    blocks r and n - 1 - r. In its call each block is a request whose length includes all earlier tokens, because a context
    call's query rows are a request's last tokens. If `extend_prefix_lens_cpu` is None, no request has a cached prefix.
    """
    if reason := why_not_zigzag(batch, num_ranks):
        raise ValueError(reason)
    if rank not in range(num_ranks):
        raise ValueError(f"rank={rank} must be 0 to {num_ranks - 1}")
    lengths = host_lengths(batch, "extend_seq_lens_cpu")
    query_rows(batch)  # raises where only the device knows the prefixes
    prefixes = batch.extend_prefix_lens_cpu or (0,) * batch.batch_size  # SGLang decides by seq_lens_cpu
    first_rows, blocks = list(accumulate(lengths, initial=0)), 2 * num_ranks
    ends = [
        list(accumulate((length // blocks + (block < length % blocks) for block in range(blocks)), initial=0))
        for length in lengths
    ]
    rows: list[int] = []
    q_lens, kv_lens = [], []
    for block in (rank, blocks - 1 - rank):
        for first_row, prefix, end in zip(first_rows, prefixes, ends, strict=False):
            rows += range(first_row + end[block], first_row + end[block + 1])
            q_lens.append(end[block + 1] - end[block])
            kv_lens.append(prefix + end[block + 1])

    def int32s(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=metadata.page_table.device)

    def twice(table: Tensor) -> Tensor:
        return torch.cat((table, table))

    block_rows = [sum(end[block + 1] - end[block] for end in ends) for block in range(blocks)]
    most_rows = max(block_rows[each] + block_rows[-1 - each] for each in range(num_ranks))
    return ZigzagShard(
        rows=torch.tensor(rows, device=metadata.page_table.device),
        num_padded_rows=-(-most_rows // blocks) * blocks,
        metadata=replace(
            metadata,
            cache_seqlens_int32=int32s(kv_lens),
            max_seq_len_q=max(q_lens),
            cu_seqlens_q=int32s(list(accumulate(q_lens, initial=0))),
            cu_seqlens_k=int32s(list(accumulate(kv_lens, initial=0))),
            page_table=twice(metadata.page_table),
            swa_page_table=None if metadata.swa_page_table is None else twice(metadata.swa_page_table),
        ),
    )


def prepare_zigzag(
    backend: TRTLLMMHABackend,
    batch: ForwardBatch,
    shards: Sequence[ZigzagShard],
    layer: AttentionLayer,
    query: Tensor,
    cache: PagedKVCache,
    *,
    max_context_len: int,
    out: Tensor,
) -> Callable[[], Tensor]:
    """Return a function that computes one layer's attention by one call per rank, and writes all ranks' rows to `out`."""
    steps: list[Callable[[], object]] = []
    for shard in shards:
        mine, result = (each.new_empty(len(shard.rows), *each.shape[1:]) for each in (query, out))
        plan = [PlannedCall(AttentionCall.CONTEXT, 0, 2 * batch.batch_size, 0, len(shard.rows))]
        attend = backend.prepare_attention(
            batch, shard.metadata, layer, mine, cache, max_context_len=max_context_len, out=result, plan=plan
        )
        select = partial(torch.index_select, query, 0, shard.rows, out=mine)
        steps += [select, attend, partial(out.index_copy_, 0, shard.rows, result)]
    return in_turn(steps, out)
