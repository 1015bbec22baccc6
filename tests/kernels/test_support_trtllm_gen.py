"""trtllm-gen's rows, limit by limit. `tests/dry_run/test_sweep.py` holds them to FlashInfer's launcher where nvcc builds it."""

from dataclasses import replace
from typing import Any

import pytest

from lab.dry_run.sweep_points import SWEPT
from lab.gpus import SM90, Capability
from lab.kernels.support import KERNELS, Kernel, why_not
from lab.kernels.support.trtllm import kernel_for
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_KERNELS

B200, B300 = (10, 0), (10, 3)
DECODE, CONTEXT, MLA, RAGGED = TRTLLM_GEN_KERNELS
SAGE: dict[str, Any] = {"dims": (128, 128), "causal": False, "sage": (1, 16)}
NVFP4 = "e4m3/nvfp4/e4m3"
OVER_NVFP4 = {"dtypes": NVFP4}
STRIDES, BEGIN = "must be multiples of them, not", "must begin at a multiple of them, not"
AT_A_TIME = "query heads of a K/V head at a time: more must be a multiple of"
IN_TABLE = "in trtllm-gen's table of FlashInfer 0.6.13"


def posed(kernel: Kernel, **values: Any) -> Any:
    """The plain call of a kernel with some values of its axes."""
    swept = SWEPT[kernel.calls[0]]
    point = swept.model.completed(values)
    assert point is not None
    return swept.make(point).problem()


def refusal(kernel: Kernel, capability: Capability | None = B200, **values: Any) -> str | None:
    return why_not(kernel, capability, posed(kernel, **values))


@pytest.mark.parametrize("kernel", TRTLLM_GEN_KERNELS, ids=repr)
def test_the_plain_call_is_taken_on_sm100_and_sm103_alone(kernel: Kernel) -> None:
    for capability in (B200, B300):
        assert refusal(kernel, capability) is None
        assert kernel_for(kernel.calls[0], capability) is kernel
    for capability, name in (
        (None, "a CPU"),
        ((8, 0), "SM80"),
        ((9, 0), "SM90"),
        ((12, 0), "SM120"),
        ((12, 1), "SM121"),
    ):
        assert refusal(kernel, capability) == f"{kernel.name} needs a GPU of SM100 and SM103, this is {name}"


def test_kernels_of_int8_queries_are_of_sm100_alone() -> None:
    for capability, words in ((B200, "None"), (B300, "has kernels of int8 queries")):
        assert words in str(refusal(RAGGED, capability, **SAGE, dtypes="int8/int8/bf16"))
    assert refusal(RAGGED, B300, **SAGE, dtypes="e4m3/e4m3/bf16") is None


def test_no_other_kernel_takes_scales_of_blocks() -> None:
    problem = posed(RAGGED, **SAGE, dtypes="e4m3/e4m3/bf16")
    others = [kernel for kernel in KERNELS if RAGGED.calls[0] in kernel.calls and kernel is not RAGGED]
    assert others
    for kernel in others:
        reason = str(why_not(kernel, (9, 0) if kernel.gpus == (SM90,) else B200, problem))
        assert "scales of blocks" in reason or "queries, not torch.float8_e4m3fn" in reason


TAKEN: list[tuple[Kernel, dict[str, Any]]] = [
    # head_dim, page size and dtypes together
    *[(call, {"head_dim": size}) for call in (DECODE, CONTEXT) for size in (64, 128, 256)],
    *[(call, {"page_size": page}) for call in (DECODE, CONTEXT) for page in (16, 32, 64, 128, 1024)],
    *[(call, {"head_dim": 512, "page_size": page}) for call in (DECODE, CONTEXT) for page in (16, 32, 64)],
    *[(CONTEXT, {"head_dim": 80, "page_size": page, "dtypes": "fp16/fp16/fp16"}) for page in (16, 32, 64)],
    (DECODE, {"head_dim": 512, "window_left": 20}),
    (CONTEXT, {"head_dim": 80, "window_left": 20}),
    (CONTEXT, {"head_dim": 512, "window_left": 511}),  # of 512 keys: no window
    (CONTEXT, {"head_dim": 512, "causal": False}),
    *[(DECODE, {"dtypes": "fp16/e4m3/fp16", "head_dim": size}) for size in (64, 128, 256, 512)],
    (DECODE, {"dtypes": "bf16/e4m3/bf16"}),
    *[(call, {"dtypes": f"e4m3/e4m3/{out}"}) for call in (DECODE, CONTEXT) for out in ("fp16", "bf16", "e4m3")],
    *[(call, {"dtypes": NVFP4}) for call in (DECODE, CONTEXT)],
    # groups
    *[(DECODE, {"group": group, "page_size": 128}) for group in (1, 5, 33, 64, 65, 127, 128)],
    (DECODE, {"group": 256, "num_kv_heads": 1}),
    *[(DECODE, {"group": group, "dtypes": NVFP4}) for group in (1, 7, 16, 32, 48)],
    (DECODE, {"group": 24, "dtypes": "bf16/e4m3/bf16"}),
    *[(CONTEXT, {"group": group}) for group in (1, 65, 130)],
    # what rows honour
    (DECODE, {"sinks": True, "window_left": 3, "lse": "returned", "rows": "ragged", "q_len": 2}),
    (DECODE, {"scales": "tensors", "query": "rows 16 elements apart", "tables": "separate"}),
    (CONTEXT, {"causal": False, "lse": "strided", "q_len": 2}),
    # addresses and strides
    *[(DECODE, {"gap": gap}) for gap in ("16 bytes a page", "16 elements a token")],
    *[(DECODE, {"cache": cache}) for cache in ("NHD", "stacked HND", "stacked NHD", "K is V")],
    *[(CONTEXT, {"query": query}) for query in ("fused", "rows 16 elements apart")],
    (DECODE, {"kv_start": "K 16 bytes on"}),
    (DECODE, {"dtypes": NVFP4, "gap": "32 bytes a page"}),
    (DECODE, {"dtypes": NVFP4, "head_dim": 64, "gap": "16 bytes a page"}),
    (CONTEXT, {"dtypes": NVFP4, "gap": "16 bytes a page"}),
    (DECODE, {"dtypes": NVFP4, "factors": "16 bytes a page"}),
    # MLA
    *[(MLA, {"heads": heads}) for heads in (1, 7, 64, 128, 192, 256, 512)],
    *[(MLA, {"heads": heads, "dims": (256, 64)}) for heads in (1, 7, 32)],
    *[(MLA, {"heads": 16, "q_len": 4, "page_size": page}) for page in (32, 64)],
    (MLA, {"gap": "16 elements a token"}),
    *[(MLA, {"heads": heads, "max_kv_len": 0}) for heads in (1, 63)],
    # selected entries, and pages of each K/V head
    *[(MLA, {"top_k": 2048, "heads": heads}) for heads in (1, 7, 32, 64, 128, 192)],
    *[(MLA, {"top_k": 64, "lens": True, "dims": (512, 0), "page_size": page}) for page in (32, 64)],
    (MLA, {"top_k": 64, "q_len": 4, "rows": "ragged", "sinks": True, "dtypes": "e4m3/e4m3/bf16"}),
    (MLA, {"top_k": 64, "lse": "given", "scales": "tensors"}),
    (MLA, {"top_k": 64, "heads": 128, "max_kv_len": 0}),
    *[(DECODE, {"block_sparse": True, "rows": rows, "q_len": 2, "sinks": True}) for rows in ("uniform", "ragged")],
    (DECODE, {"block_sparse": True, "lse": "strided", "dtypes": "e4m3/e4m3/bf16"}),
    # ragged
    *[(RAGGED, {"dims": dims}) for dims in ((192, 128), (128, 128), (256, 256))],
    *[(RAGGED, {"dims": dims, "dtypes": "e4m3/e4m3/bf16"}) for dims in ((192, 128), (128, 128), (256, 256))],
    *[(RAGGED, {"dims": (128, 128), "dtypes": f"{q}/{q}/fp16", "causal": False}) for q in ("fp16", "e4m3")],
    *[(RAGGED, SAGE | {"dtypes": dtypes}) for dtypes in ("int8/int8/bf16", "e4m3/e4m3/bf16", "e4m3/e4m3/fp16")],
    *[(RAGGED, SAGE | {"dtypes": "int8/int8/bf16", "sage": (1, keys)}) for keys in (1, 4)],
    (RAGGED, {"window_left": 299}),  # of 300 keys: no window
    *[(RAGGED, {"gap": gap}) for gap in ("fused", "16 elements a head")],
]


@pytest.mark.parametrize(("kernel", "values"), TAKEN, ids=repr)
def test_taken(kernel: Kernel, values: dict[str, Any]) -> None:
    assert refusal(kernel, **values) is None


def test_no_kernel_that_converts_leaves_out_parts_of_the_softmax() -> None:
    for dtypes, taken in (("bf16/bf16/bf16", True), ("e4m3/e4m3/bf16", True), ("bf16/e4m3/bf16", False)):
        reason = why_not(DECODE, B200, replace(posed(DECODE, dtypes=dtypes), skip_softmax=1.0))
        assert (reason is None) is taken
        assert taken or "leaves out parts of the softmax for torch.bfloat16 over torch.float8_e4m3fn" in str(reason)


REFUSED: list[tuple[Kernel, dict[str, Any], str]] = [
    (
        RAGGED,
        SAGE | {"dtypes": "int8/int8/bf16", "dims": (192, 128)},
        "causal=False, head_dim 192; it has them for head_",
    ),
    (
        RAGGED,
        SAGE | {"dtypes": "e4m3/e4m3/bf16", "causal": True},
        "causal rows, head_dim 128; it has them for causal=Fa",
    ),
    (RAGGED, SAGE | {"dtypes": "int8/int8/fp16"}, "writes bf16 for int8 queries, not torch.float16"),
    (RAGGED, SAGE | {"dtypes": "int8/int8/bf16", "sage": (4, 16)}, "must have 1 row, not 4"),
    (DECODE, {"head_dim": 96}, f"trtllm-gen decode has kernels {IN_TABLE} for head_dim 64, 128, 256 and 512, not 96"),
    (DECODE, {"head_dim": 80}, "head_dim 64, 128, 256 and 512, not 80"),
    (CONTEXT, {"head_dim": 96}, "head_dim 64, 80, 128, 256 and 512, not 96"),
    (
        DECODE,
        {"head_dim": 512, "page_size": 128},
        f"trtllm-gen decode has no kernel {IN_TABLE} for bfloat16 queries, bfloat16 K/V and bfloat16 output with causal rows, "
        "head_dim 512, pages of 128; it has them for pages of 16, 32 or 64",
    ),
    (CONTEXT, {"head_dim": 80, "page_size": 128}, "pages of 128; it has them for pages of 16, 32 or 64"),
    (CONTEXT, {"head_dim": 80, "dtypes": "e4m3/e4m3/bf16"}, "it has them for bfloat16, bfloat16, bfloat16 or float16"),
    (
        CONTEXT,
        {"head_dim": 512, "window_left": 20},
        "a window, head_dim 512, pages of 64; it has them for causal rows or",
    ),
    (
        DECODE,
        {"head_dim": 512, "dtypes": NVFP4},
        "float8_e4m3fn output with causal rows, head_dim 512, pages of 64; it",
    ),
    *[
        (call, {"dtypes": f"e4m3/nvfp4/{out}"}, f"of NVFP4 K/V e4m3 alone, not torch.{name} of torch.uint8 (NVFP4)")
        for call in (DECODE, CONTEXT)
        for out, name in (("fp16", "float16"), ("bf16", "bfloat16"))
    ],
    (DECODE, {"dtypes": "bf16/bf16/fp16"}, "writes the query's dtype torch.bfloat16, not torch.float16"),
    (CONTEXT, {"dtypes": "fp16/fp16/bf16"}, "writes the query's dtype torch.float16, not torch.bfloat16"),
    (DECODE, {"dtypes": "fp16/e4m3/bf16"}, "writes the query's dtype torch.float16, not torch.bfloat16"),
    *[(CONTEXT, {"dtypes": f"{q}/e4m3/{q}"}, "reads e4m3 K/V for e4m3 queries, not for") for q in ("fp16", "bf16")],
    *[(call, {"dtypes": "fp32/fp32/fp32"}, "takes fp16, bf16 or e4m3 queries") for call in (DECODE, CONTEXT, RAGGED)],
    (DECODE, {"dtypes": "bf16/bf16/e4m3"}, "writes the query's dtype torch.bfloat16, not torch.float8_e4m3fn"),
    (DECODE, {"dtypes": "bf16/nvfp4/bf16"}, "reads NVFP4 K/V for e4m3 queries only, not for torch.bfloat16"),
    *[
        (call, {"page_size": 8}, "page sizes 16, 32, 64 and powers of two from 128, not 8")
        for call in (DECODE, CONTEXT)
    ],
    # groups
    *[(DECODE, {"group": group, "num_kv_heads": 1}, f"{AT_A_TIME} 128, not {group}") for group in (130, 192)],
    (DECODE, {"group": 192, "num_kv_heads": 2}, "a multiple of 128, not 192"),
    *[(DECODE, {"group": group, "dtypes": NVFP4}, f"{AT_A_TIME} 16, not {group}") for group in (17, 24)],
    *[(DECODE, {"group": group, "dtypes": "fp16/e4m3/fp16"}, f"{AT_A_TIME} 16, not {group}") for group in (17, 24)],
    # addresses and strides
    (DECODE, {"gap": "8 bytes a page"}, f"loads 16 bytes at a time: the strides of K {STRIDES} 32776 bytes"),
    (CONTEXT, {"gap": "4 elements a token"}, f"the strides of K {STRIDES} 264 bytes"),
    (DECODE, {"kv_start": "K 8 bytes on"}, f"loads 16 bytes at a time: K {BEGIN} 8 bytes after"),
    (CONTEXT, {"kv_start": "V 8 bytes on"}, f"loads 16 bytes at a time: V {BEGIN} 8 bytes after"),
    (DECODE, {"query": "8 bytes on"}, f"query {BEGIN} 8 bytes after"),
    (DECODE, {"query": "heads 4 elements apart"}, f"the strides of query {STRIDES}"),
    (CONTEXT, {"query": "rows 4 elements apart"}, f"the strides of query {STRIDES} 2056 bytes"),
    (DECODE, {"query": "expanded"}, "takes a stride of 0 for a contiguous query: it must not be expanded"),
    (CONTEXT, {"out": "8 bytes on"}, f"out {BEGIN} 8 bytes after"),
    (
        DECODE,
        OVER_NVFP4 | {"gap": "16 bytes a page"},
        f"loads 32 bytes at a time: the strides of K {STRIDES} 8208 bytes",
    ),
    (DECODE, OVER_NVFP4 | {"kv_start": "V 16 bytes on"}, f"loads 32 bytes at a time: V {BEGIN}"),
    (
        DECODE,
        OVER_NVFP4 | {"factors": "8 bytes a page"},
        f"16 bytes at a time: the strides of K's scale factors {STRIDES}",
    ),
    (DECODE, OVER_NVFP4 | {"head_dim": 64, "num_kv_heads": 1, "factors": "NHD"}, f"of K's scale factors {STRIDES}"),
    (DECODE, OVER_NVFP4 | {"factors": "V 8 bytes on"}, f"V's scale factors {BEGIN}"),
    (
        DECODE,
        OVER_NVFP4 | {"factors": "NHD"},
        "needs each head's scale factors contiguous in a page: lay them out as HND",
    ),
    (CONTEXT, OVER_NVFP4 | {"factors": "V 16 bytes a page"}, "reads V's scale factors with the strides of K's"),
    *[(call, {"v_strides": "others"}, "reads V with K's strides, and they differ") for call in (DECODE, CONTEXT)],
    (DECODE, {"mask": True, "q_len": 4}, "takes no mask: its rows are causal"),
    # MLA
    *[(MLA, {"heads": heads}, f"a multiple of 64 from 128, not {heads}") for heads in (65, 96, 127, 129, 130, 160)],
    *[
        (MLA, {"heads": heads, "dims": (256, 64)}, f"kv_lora_rank 256 ({IN_TABLE}), not {heads}")
        for heads in (33, 64, 128)
    ],
    (MLA, {"page_size": 16}, "is built for page sizes 32 and 64, not 16"),
    (MLA, {"dtypes": "fp16/fp16/bf16"}, "takes bf16 or e4m3 for both the query and the cache"),
    (MLA, {"dtypes": "bf16/bf16/fp16"}, "writes bfloat16, not torch.float16"),
    (MLA, {"dims": (128, 64)}, "(512, 64) or (256, 64) or (512, 0), not (128, 64)"),
    (MLA, {"dims": (512, 0)}, "qk_rope_head_dim 0 has kernels of selected entries alone: pass sparse_mla_top_k"),
    (MLA, {"dims": (512, 0), "top_k": 64}, "needs sparse_mla_top_k_lens with qk_rope_head_dim 0"),
    (MLA, {"top_k": 64, "lens": True}, "takes no sparse_mla_top_k_lens with qk_rope_head_dim 64"),
    (MLA, {"dims": (256, 64), "heads": 32, "top_k": 64}, f"has no kernel {IN_TABLE} of selected entries for"),
    (MLA, {"top_k": 6}, "sparse_mla_top_k must be a multiple of them, not 6"),
    (MLA, {"top_k": 64, "page_size": 16}, "is built for page sizes 32 and 64, not 16"),
    (MLA, {"top_k": 64, "heads": 65}, "takes at most 64 query heads, or a multiple of 64 from 128, not 65"),
    (MLA, {"top_k": 64, "gap": "16 bytes a page"}, "at multiples of 576 elements: the cache must be contiguous"),
    (MLA, {"top_k": 64, "gap": "16 elements a token"}, "at multiples of 576 elements: the cache must be contiguous"),
    (MLA, {"gap": "4 elements a token"}, f"the strides of K {STRIDES} 1160 bytes"),
    (MLA, {"query": "8 bytes on"}, f"query {BEGIN}"),
    *[(MLA, {"heads": heads, "max_kv_len": 0}, "by max_seq_len with 64 query heads or more") for heads in (64, 128)],
    (MLA, {"rows": "ragged", "lse": "returned"}, "gives no LSE with cum_seq_lens_q"),
    # ragged
    (RAGGED, {"dims": (64, 64)}, "(192, 128) or (128, 128) or (256, 256), not (64, 64)"),
    (RAGGED, {"dtypes": "bf16/bf16/fp32"}, "writes the query's dtype torch.bfloat16, not torch.float32"),
    (RAGGED, {"dtypes": "e4m3/e4m3/fp32"}, "writes fp16 or bf16 for e4m3 queries, not torch.float32"),
    *[(RAGGED, {"dims": dims, "window_left": 20}, "with a window") for dims in ((192, 128), (128, 128), (256, 256))],
    (RAGGED, {"dtypes": "fp16/fp16/fp16"}, f"{IN_TABLE} for float16 queries, float16 K/V and float16 output"),
    (RAGGED, {"dtypes": "fp16/fp16/fp16", "dims": (128, 128)}, "head_dim 128; it has them for causal=False"),
    (RAGGED, {"dtypes": "e4m3/e4m3/fp16", "dims": (128, 128)}, "head_dim 128; it has them for causal=False"),
    (RAGGED, {"dtypes": "fp16/fp16/bf16", "dims": (128, 128)}, "the query's dtype torch.float16, not torch.bfloat16"),
    (RAGGED, {"query": "heads 16 elements apart"}, "needs a contiguous query"),
    (RAGGED, {"gap": "4 elements a head"}, f"the strides of key {STRIDES} 392 bytes"),
    (RAGGED, {"kv_start": "V 8 bytes on"}, f"value {BEGIN} 8 bytes after"),
]


@pytest.mark.parametrize(("kernel", "values", "words"), REFUSED, ids=repr)
def test_refused(kernel: Kernel, values: dict[str, Any], words: str) -> None:
    assert words in str(refusal(kernel, **values))


def test_selected_entries_begin_at_16_bytes() -> None:
    problem = posed(MLA, top_k=64)
    entries = problem.selected
    for skipped, is_taken in ((0, True), (1, False), (4, True)):
        storage = entries.new_zeros(entries.numel() + 4)
        own = replace(problem, selected=storage[skipped : skipped + entries.numel()].view(entries.shape))
        reason = why_not(MLA, B200, own)
        assert (reason is None) == is_taken, reason
