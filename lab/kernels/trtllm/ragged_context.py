"""FlashInfer's `trtllm_ragged_attention_deepseek`, which runs trtllm-gen on SM100 and SM103.

The lab had no such GPU: the call was checked with FlashInfer's own launcher on a CPU (`lab.dry_run`). The kernel does not write
rows that see no key. If there may be such rows, the adapter writes them after the kernel, as SGLang 0.5.23's backend does.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from lab.calls.ragged_context import RaggedAttention, RaggedContextCall
from lab.calls.workspace import semaphores_and_scratch
from lab.kernels.flashinfer_call import (
    PreparedCall,
    but_defaults,
    prepared,
    returning,
    supported_kernel,
    takes_counters,
    workspace_for,
)


def prepare_ragged(call: RaggedContextCall, problem: RaggedAttention) -> PreparedCall:
    """Return FlashInfer's ragged call, ready to run: MLA's prefill before absorption, in which new tokens attend to themselves
    or to a part of the cached prefix.

    `lab.calls.RaggedContextCall` documents shapes and errors. Raises NotImplementedError with the reason if the kernel does not
    support the call (`lab.kernels.support.why_not`). Without a `workspace_buffer` the lab's own is used, one per device and
    stream. A given workspace may be the decode call's: its first 8 MiB stay zero. Further launches write the results of rows
    that see no key, unless Q and K/V have the same offsets tensor, or lengths on the host show that FlashInfer writes all rows.
    """
    supported_kernel(problem)
    if not len(problem.key):  # a TMA descriptor has at least one row (kernelParams.h, `buildNdTmaDescriptor`)
        return _then_filled(returning(problem, problem.returned), problem)
    workspace = workspace_for(call.workspace_buffer, problem.query.device)
    if takes_counters():  # else the workspace has the counters
        workspace = semaphores_and_scratch(workspace)[1]
    changes = {"workspace_buffer": workspace, "window_left": problem.window_left}
    made = prepared("flashinfer.prefill", "trtllm_ragged_attention_deepseek", but_defaults(call, changes), ())
    return _then_filled(made, problem) if _may_lack_keys(call, problem) else made


def _may_lack_keys(call: RaggedContextCall, problem: RaggedAttention) -> bool:
    # True if, as far as the host knows, a row sees no key and FlashInfer does not write its result.
    if call.cum_seq_lens_q is call.cum_seq_lens_kv:
        return False
    lengths = call.host_lengths()
    if lengths is None:
        return True
    # FlashInfer leaves out requests without keys when their lengths are on the host.
    return problem.causal and any(keys < rows for rows, keys in zip(*lengths, strict=True))


def _then_filled(made: PreparedCall, problem: RaggedAttention) -> PreparedCall:
    function = made.function

    def run(**arguments: Any) -> Any:
        result = function(**arguments)
        out, lse = result if problem.return_lse else (result, problem.lse)
        fill_rows_without_keys(problem, out, lse)
        return result

    return replace(made, function=run)


def fill_rows_without_keys(problem: RaggedAttention, out: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Write the results of rows that see no key: output 0; LSE -inf, or the sink's logit in base 2. The host does not wait."""
    rows = torch.arange(problem.num_rows, dtype=torch.int32, device=problem.query.device)
    ends = problem.cu_seqlens_q[1:]
    request = torch.searchsorted(ends, rows, right=True).clamp(max=problem.batch_size - 1)
    kv_lens = problem.cu_seqlens_kv.diff()[request]
    # The position of a causal row is kv_len - (ends - row), which is negative if the row sees no key.
    lacks_keys = (kv_lens + rows < ends[request] if problem.causal else kv_lens == 0).unsqueeze(1)
    out.masked_fill_(lacks_keys.unsqueeze(2), 0.0)
    if lse is not None and problem.sinks is None:
        lse.masked_fill_(lacks_keys, -math.inf)
    elif lse is not None and problem.sinks is not None:
        lse.copy_(torch.where(lacks_keys, problem.sinks / math.log(2.0), lse))
