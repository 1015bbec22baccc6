"""SGLang's Triton attention under the names of FlashInfer's decode and context calls.

The installed SGLang is imported at the first call; the lab is written for 0.5.23. A call with one row per request runs
`decode_attention_fwd`, which splits keys among programs and merges their results. All other calls run
`extend_attention_fwd_unified`, which reads all keys from the pool. `extend_attention_fwd` and `verify_splitkv_fwd` are not
used, because they take the new tokens' keys as separate tensors. `plan_<name>` makes lists of tokens and numbers of splits once
for all layers of a pass, as SGLang does (`TritonAttnBackend` in `sglang/srt/layers/attention/triton_backend.py`).
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from lab.calls import ContextCall, DecodeCall
from lab.calls.problem import AttentionCall, PagedAttention, shown_draft_tokens
from lab.gpus import capability_of
from lab.kernels.flashinfer_call import PreparedCall, entries, installed_function
from lab.kernels.support.peers import SGLANG_TRITON
from lab.kernels.support.stored_cache import token_list

WRITTEN_FOR = "0.5.23"
DECODE = "sglang.kernels.ops.attention.decode_attention.decode_attention_fwd"
EXTEND = "sglang.kernels.ops.attention.extend_attention.extend_attention_fwd_unified"
NUM_SPLITS = "sglang.kernels.ops.attention.metadata.get_num_kv_splits_triton"
MOST_SPLITS = 8  # --triton-attention-num-kv-splits
SCHEDULED_REQUESTS = 256  # smallest MAX_NUM_SEQ in `TritonAttnBackend.get_num_kv_splits`


def _plan(call: DecodeCall | ContextCall, problem: PagedAttention) -> PreparedCall:
    """Return a function that runs a decode or context call by SGLang's kernels. `lab.calls.DecodeCall` and `ContextCall`
    document shapes, dtypes and errors. Raises NotImplementedError with the reason if the kernels do not support the call, a
    CUDA graph is being captured, or a row sees no key; TypeError if the installed function takes other arguments.
    `workspace_buffer` is not used.
    """
    out, _ = problem.results()
    offsets, kv_lens = problem.row_offsets(), problem.seq_lens.tolist()
    q_lens = [end - start for start, end in itertools.pairwise(offsets)]
    least = [rows if problem.causal else 1 for rows in q_lens]
    too_few = any(kv_len < keys for kv_len, keys, rows in zip(kv_lens, least, q_lens, strict=True) if rows)
    shown = None if problem.mask is None else shown_draft_tokens(problem.mask.to(torch.int32))
    if too_few or (shown is not None and _hides_every_key(shown, problem.window_left, kv_lens)):
        raise NotImplementedError("SGLang's Triton attention divides 0 by 0 in a row that sees no key")
    # A request's list of tokens begins at the first one that its first row sees, as in SGLang.
    firsts = [kv_len - rows - problem.window_left for rows, kv_len in zip(q_lens, kv_lens, strict=True)]
    starts = [max(0, first) if problem.window_left >= 0 else 0 for first in firsts]
    counts = [kv_len - start for start, kv_len in zip(starts, kv_lens, strict=True)]
    kv_indptr, kv_indices = _token_lists(problem, starts, counts)
    arguments = {
        "q": problem.query,
        "o": out,
        "k_buffer": token_list(problem.k_cache),
        "v_buffer": token_list(problem.v_cache),
        "k_scale": 1.0,  # it is in bmm1_scale
        "v_scale": float(problem.bmm2_scale),
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "sm_scale": float(problem.bmm1_scale),
        "sinks": problem.sinks,
    }
    if problem.call is AttentionCall.DECODE and problem.cu_seqlens_q is None and problem.max_q_len == 1:
        name = DECODE
        arguments |= _decode_arguments(problem, counts)
    else:
        name = EXTEND
        on_device = partial(torch.tensor, dtype=torch.int32, device=problem.query.device)
        prefixes = [count - rows for count, rows in zip(counts, q_lens, strict=True)]
        arguments |= {
            "qo_indptr": on_device(offsets),
            "prefix_lens": on_device(prefixes),
            "max_len_extend": problem.max_q_len,
            "is_causal": problem.causal,
            "sliding_window_size": problem.window_left,
            "window_start_pos": on_device(starts),
        }
        if shown is not None:
            sizes = [rows * count for rows, count in zip(q_lens, counts, strict=True)]
            pairs = zip(shown, prefixes, strict=True)  # every row sees all keys before the draft
            masks = [torch.cat([draft.new_ones(len(draft), prefix), draft], dim=1).flatten() for draft, prefix in pairs]
            mask_indptr = torch.tensor([0, *itertools.accumulate(sizes)], device=problem.query.device)
            arguments |= {"custom_mask": torch.cat(masks), "mask_indptr": mask_indptr}
    attention = installed_function(__name__, name, WRITTEN_FOR, frozenset(arguments))
    return PreparedCall(attention, arguments, returned=out)


def _hides_every_key(shown: torch.Tensor, window_left: int, kv_lens: Sequence[int]) -> bool:
    """Return True if at least one row sees no key, by window and draft mask (`shown`, bool [batch_size, q_len, q_len])."""
    q_len = shown.shape[1]
    window = min(window_left, q_len) if window_left >= 0 else q_len
    row = torch.arange(q_len, device=shown.device)
    has_prefix = torch.tensor([kv_len > q_len for kv_len in kv_lens], device=shown.device)
    sees_prefix = has_prefix.unsqueeze(1) & (row < window)
    sees_draft = shown.triu(-window).any(-1)
    return not bool((sees_prefix | sees_draft).all())


def _token_lists(
    problem: PagedAttention, starts: Sequence[int], counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return SGLang's list of the tokens to read: (where each request begins in the list, int32 [batch_size + 1]; index of each
    token in the pool, int64). Request i has `counts[i]` tokens, from position `starts[i]` on.
    """
    device, page_size = problem.query.device, problem.page_size
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=device)
    on_device = partial(torch.tensor, device=device)
    requests = torch.arange(len(counts), device=device).repeat_interleave(on_device(counts), output_size=sum(counts))
    positions = torch.arange(sum(counts), device=device) - indptr[requests] + on_device(starts)[requests]
    pages = problem.k_block_tables[requests, positions // page_size].to(torch.int64)
    return indptr, pages * page_size + positions % page_size


def _decode_arguments(problem: PagedAttention, counts: Sequence[int]) -> dict[str, Any]:
    device, batch_size = problem.query.device, problem.batch_size
    capability = capability_of(device)
    splits = torch.full((batch_size,), MOST_SPLITS, dtype=torch.int32, device=device)
    if device.type == "cuda":
        kernel: Any = installed_function(__name__, NUM_SPLITS, WRITTEN_FOR)
        kernel[(1,)](
            splits,
            torch.tensor(counts, device=device),
            batch_size,
            1,
            problem.num_qo_heads,
            problem.num_kv_heads,
            MOST_SPLITS,
            torch.cuda.get_device_properties(device).multi_processor_count,
            MAX_NUM_SEQ=max(SCHEDULED_REQUESTS, 1 << (batch_size - 1).bit_length()),
        )
    shape = (batch_size, problem.num_qo_heads, MOST_SPLITS)
    return {
        "attn_logits": torch.empty((*shape, problem.v_head_dim), dtype=torch.float32, device=device),
        "attn_lse": torch.empty(shape, dtype=torch.float32, device=device),
        "num_kv_splits": splits,
        "max_kv_splits": MOST_SPLITS,
        "use_pdl": capability is not None and capability[0] >= 9,
    }


plan_trtllm_batch_decode_with_kv_cache, trtllm_batch_decode_with_kv_cache = entries(
    "plan", DecodeCall, _plan, SGLANG_TRITON
)
plan_trtllm_batch_context_with_kv_cache, trtllm_batch_context_with_kv_cache = entries(
    "plan", ContextCall, _plan, SGLANG_TRITON
)
