"""FlashInfer's MLA kernels by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one key at a time.

trtllm-gen is FlashInfer's own call, on a B200 that is not there. XQA multiplies its logits by both scales and the output
by the second. The wrapper plans from CSR and forgets what it was not told.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.dry_run.on_a_b200 import on_a_b200
from tests.kernels.simulated import Arguments, Simulated, attend, paged, write_scratch

NAME = "trtllm_batch_decode_with_kv_cache_mla"


class SimulatedMLA(Simulated):
    functions = (NAME,)
    wrappers = ("BatchMLAPagedAttentionWrapper",)

    def call(self, real: Callable[..., Any], arguments: Arguments) -> Any:
        return on_a_b200(real, arguments) if arguments["backend"] == "trtllm-gen" else _xqa(**arguments)

    def run(self, planned: Arguments, **arguments: Any) -> Any:
        return _wrapper_run(planned, **arguments)


def _xqa(
    *, query: Tensor, kv_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, workspace_buffer: Tensor, **others: Any
) -> Any:
    unsupported = ("sinks", "lse", "cum_seq_lens_q", "max_q_len", "multi_ctas_kv_counter_buffer")
    assert all(others[name] is None for name in unsupported)
    assert query.shape[1] == 1
    assert not others["return_lse"]
    write_scratch(workspace_buffer)
    rank, out = others["kv_lora_rank"], others["out"]
    if out is None:
        out = torch.empty(*query.shape[:-1], rank, dtype=torch.bfloat16)
    else:
        assert out.shape == (len(query), query.shape[2], rank)
    q_scale, kv_scale = others["bmm1_scale"], others["bmm2_scale"]
    lse = torch.empty(len(query), query.shape[2])
    for request, kv_len in enumerate(seq_lens.tolist()):
        entries = paged(kv_cache, block_tables[request], kv_len)
        scales = (q_scale * kv_scale, kv_scale)
        _request(
            query.flatten(0, 1), range(request, request + 1), entries, rank, scales, out.view(*lse.shape, rank), lse
        )
    return out


def _wrapper_run(planned: dict[str, Any], *, query: Tensor, kv_cache: Tensor, out: Tensor, **others: Any) -> Any:
    metadata, rank = planned["metadata"], planned["head_dim_ckv"]
    quantised = planned["kv_data_type"] == torch.float8_e4m3fn
    assert (query.dtype, kv_cache.dtype, out.dtype) == tuple(
        planned[name] for name in ("q_data_type", "kv_data_type", "output_dtype")
    )
    assert quantised == (planned["scale_mode"] == "kv-per-tensor") == (others["ckv_scale"] is not None)
    assert others["ckv_scale"] == others["kpe_scale"]
    mode = ("basee" if others["return_lse_base_on_e"] else "base2") if others["return_lse"] else "none"
    assert mode == planned["lse_mode"]
    # FA3's kernel multiplies the entries in the query's dtype (`mla_hopper.cuh`, `ckv_scale_packed`).
    scale = float(torch.tensor(others["ckv_scale"] if quantised else 1.0).to(query.dtype))
    lse = torch.empty(query.shape[:2]) if others["lse"] is None else others["lse"]
    starts, pages = metadata.qo_indptr.tolist(), metadata.kv_indptr.tolist()
    for request, kv_len in enumerate(metadata.kv_len_arr.tolist()):
        ids = metadata.kv_indices[pages[request] : pages[request + 1]]
        assert len(ids) == -(-kv_len // planned["page_size"])
        entries = paged(kv_cache.unsqueeze(1), ids, kv_len)
        rows = range(*starts[request : request + 2])
        _request(query, rows, entries, rank, (planned["sm_scale"] * scale, scale), out, lse)
    if mode == "basee":
        lse *= math.log(2.0)
    return (out, lse) if others["return_lse"] else out


def _request(
    query: Tensor, rows: range, entries: Tensor, rank: int, scales: tuple[float, float], out: Tensor, lse: Tensor
) -> None:
    """Row i of q sees the keys up to its own, L - q + i; `entries` are [kv_len, 1, rank + rope]."""
    for row in rows:
        seen = range(max(0, len(entries) - (rows.stop - row) + 1))
        attend(query[row], entries, entries[..., :rank], seen, *scales, None, out[row], lse[row])
