"""FlashInfer's ragged kernels by simulation: what 0.7.2 makes of the arguments it receives, on a CPU, one row at a time.

trtllm-gen is FlashInfer's own call, on a B200 that is not there. The wrapper plans from the host's
offsets and forgets what it was not told.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.dry_run.on_a_b200 import on_a_b200
from tests.kernels.simulated import Arguments, Simulated, attend

NAME = "trtllm_ragged_attention_deepseek"
WRAPPER = "BatchPrefillWithRaggedKVCacheWrapper"


class SimulatedRagged(Simulated):
    functions = (NAME,)
    wrappers = (WRAPPER,)

    def call(self, real: Callable[..., Any], arguments: Arguments) -> Any:
        return on_a_b200(real, arguments)

    def run(self, planned: Arguments, **arguments: Any) -> Any:
        return _wrapper_run(planned, **arguments)


def _wrapper_run(planned: Arguments, *, q: Tensor, k: Tensor, v: Tensor, **others: Any) -> Any:
    query, key, value = q, k, v
    assert planned["kv_layout"] == "NHD"
    q_offsets, kv_offsets = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
    assert planned["qo_indptr"].device.type == "cpu"
    assert len(query) == q_offsets[-1]
    dtypes = tuple(planned[name] for name in ("q_data_type", "kv_data_type", "o_data_type"))
    assert (query.dtype, key.dtype, others["out"].dtype) == dtypes
    sizes = tuple(planned[name] for name in ("num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo"))
    assert (query.shape[1], key.shape[1], query.shape[2], value.shape[2]) == sizes
    assert others["return_lse"] == (others["lse"] is not None)
    for request in range(len(q_offsets) - 1):
        rows, keys = (slice(*offsets[request : request + 2]) for offsets in (q_offsets, kv_offsets))
        _request(planned, query, range(rows.start, rows.stop), key[keys], value[keys], others["out"], others["lse"])
    return (others["out"], others["lse"]) if others["return_lse"] else others["out"]


def _request(
    planned: Arguments, query: Tensor, rows: range, keys: Tensor, values: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Row i of q over L keys sits at L - q + i; one without keys gets NaN."""
    causal, window_left = planned["causal"], planned["window_left"]
    for row in rows:
        position = len(keys) - (rows.stop - row)
        first = max(0, position - window_left) if causal and window_left >= 0 else 0
        seen = range(first, max(0, position + 1) if causal else len(keys))
        row_lse = None if lse is None else lse[row]
        attend(query[row], keys, values, seen, planned["sm_scale"], 1.0, None, out[row], row_lse)
        if not len(seen):
            out[row] = math.nan
            if row_lse is not None:
                row_lse.fill_(math.nan)
