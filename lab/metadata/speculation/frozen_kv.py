"""The passes of a frozen-KV draft: the draft model reads the target's K/V and writes none (SGLang 0.5.23, `FROZEN_KV_MTP`).

SGLang runs such a draft for Gemma 4's assistant models. It has no draft extend. All its ``speculative_num_steps`` passes read
the tokens that the target has committed, ``[0, seq_lens)``, and take the last position as their own. So one set of metadata
serves all passes. They read the target's pool, including its sliding-window pages.

With ``topk`` above 1 the branches of a request are rows of the batch, next to each other: branch j of request i is row ``i *
topk + j``. All branches read the same pages. The engine expands the batch on its own stream, before the metadata is built
(`expand_for_topk_draft` in `frozen_kv_mtp_utils.py`), and its graphs are captured for ``requests * topk`` rows.
"""

from dataclasses import replace

from lab.calls.arguments import check_int
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP, ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import QueryRows


def frozen_kv_batch(batch: ForwardBatch, topk: int = 1) -> ForwardBatch:
    """Return the batch that every pass of a frozen-KV draft uses. The host reads nothing from the device.

    Args:
        batch: a plain DECODE batch of the target's requests. ``seq_lens`` counts the committed tokens.
        topk: branches of each request.

    Returns:
        A batch of ``batch_size * topk`` rows in new tensors, without write locations. Its lengths are the committed tokens.

    Raises:
        TypeError: `topk` is not an int.
        ValueError: `topk` is below 1, or the batch is not a plain decode.
    """
    check_int("topk", topk, 1, "it is the number of branches per request")
    if batch.forward_mode.query_rows is not QueryRows.ONE or batch.spec_info is not None:
        raise ValueError(
            f"{batch.forward_mode!r} {'with' if batch.spec_info else 'without'} a SpecInfo: a frozen-KV draft is made from a "
            "plain DECODE batch of the target's requests"
        )
    lens = batch.seq_lens_cpu
    return replace(
        batch,
        req_pool_indices=batch.req_pool_indices.repeat_interleave(topk),
        seq_lens=batch.seq_lens.repeat_interleave(topk),
        seq_lens_cpu=None if lens is None else [length for length in lens for _ in range(topk)],
        out_cache_loc=batch.out_cache_loc[:0].clone(),
        num_tokens=batch.num_tokens * topk,
        spec_info=SpecInfo(speculative_step_id=FROZEN_KV_STEP),
    )
