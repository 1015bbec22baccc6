"""FlashMLA's sparse kernel for SM90 under the name of the MLA decode call, for calls that select entries for each row.

The kernel is the bf16 kernel of `flash_mla_sparse_fwd`, which DeepSeek wrote for prefill: one program reads all entries of a
row, so that few rows leave most of a GPU idle. FlashMLA's own sparse decode kernel reads packed entries of 656 bytes, which the
lab does not model. The package is the fork that SGLang 0.5.23 uses, in which the kernels for SM90 have the name "legacy".

A small launch before each call writes how many of its selected entries each row uses. The kernel reads 128
columns at a time: a table whose width is no multiple of 128 is copied. The kernel has no `out`: its result is copied, and the
time of a call includes the copy. The kernel's LSE is a natural logarithm without the sink, and +inf for a row without entries.
"""

import math
from typing import Any

import torch

from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import PagedAttention
from lab.kernels.flashinfer_call import Ready, entries, installed_function
from lab.kernels.support.peers import FLASH_MLA
from lab.kernels.support.stored_cache import share_memory, token_list

FUNCTION, WRITTEN_FOR = "flash_mla.flash_mla_sparse_fwd", "sgl-flash-mla 1.0.0"
BLOCK_COLUMNS = 128  # of sm90/prefill/sparse/phase1.cuh, 2 * B_TOPK


def _prepare(call: MLADecodeCall, problem: PagedAttention) -> Ready:
    """Return a function that runs an MLA decode call with selected entries by FlashMLA. `lab.calls.MLADecodeCall` documents
    shapes and errors. Raises NotImplementedError with the reason if FlashMLA does not support the call, and TypeError if the
    installed function takes other arguments. `workspace_buffer` is not used.
    """
    out, lse = problem.results()
    selected = problem.selected
    assert selected is not None
    beyond = -selected.shape[1] % BLOCK_COLUMNS
    columns = torch.nn.functional.pad(selected, (0, beyond), value=-1) if beyond else selected
    arguments: dict[str, Any] = {
        "q": problem.query,
        "kv": token_list(problem.k_cache),
        "indices": columns.unsqueeze(1),
        "sm_scale": float(problem.bmm1_scale),
        "d_v": problem.v_head_dim,
        "attn_sink": problem.sinks,
        "topk_length": torch.empty(problem.num_rows, dtype=torch.int32, device=problem.query.device),
        "use_legacy": True,
        "return_log2_lse": None if problem.return_lse else False,  # False: writes none
    }
    attend = installed_function(__name__, FUNCTION, WRITTEN_FOR, frozenset(arguments))

    def run() -> Any:
        if not share_memory(problem.query, call.query):  # `problem.query` is a copy, because no view has its shape
            problem.query.view(call.query.shape).copy_(call.query)
        write_columns_in_use(problem, arguments["topk_length"])
        if columns is not selected:
            columns[:, : selected.shape[1]].copy_(selected)
        rows, _, natural = attend(**arguments)
        out.view(rows.shape).copy_(rows)
        if lse is not None:
            natural = natural.masked_fill(natural == math.inf, -math.inf)
            if problem.sinks is not None:
                natural = torch.logaddexp(natural, problem.sinks)
            torch.mul(natural, 1.0 if call.lse_is_base_e else math.log2(math.e), out=lse)
        return call.returned(out, lse)

    return run


def write_columns_in_use(problem: PagedAttention, columns: torch.Tensor) -> None:
    """Write to `columns`, int32 [num_rows], the number of selected entries that each query row uses: its value in
    `sparse_mla_top_k_lens`, or its position + 1 without this tensor, but at most top_k. The host reads no length.
    """
    assert problem.selected is not None
    most, lens = problem.selected.shape[1], problem.selected_lens
    if lens is None:
        lens = problem.seq_lens.view(torch.int32)
        if problem.max_q_len > 1:
            to_row = torch.arange(1 - problem.max_q_len, 1, dtype=torch.int32, device=columns.device)
            lens = (lens.unsqueeze(1) + to_row).flatten()
    torch.clamp(lens, 0, most, out=columns)


prepare_trtllm_batch_decode_with_kv_cache_mla, trtllm_batch_decode_with_kv_cache_mla = entries(
    "prepare", MLADecodeCall, _prepare, FLASH_MLA
)
