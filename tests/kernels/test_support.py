"""`why_not`: every rule, from both sides, on every kind of GPU."""

import enum
from dataclasses import fields, make_dataclass, replace
from typing import Any

import pytest
import torch

from lab.calls import AttentionCall, DSV4DecodeCall, Feature
from lab.calls.features import FIELDS
from lab.gpus import Capability, family_of
from lab.kernels import support
from lab.kernels.support import KERNELS, Kernel, refuse_unsupported, why_not
from lab.kernels.support import kernel as support_kernel
from lab.kernels.support.peers import FLASH_MLA, FLEX_ATTENTION, SGLANG_TRITON
from lab.kernels.support.portable import PORTABLE, PORTABLE_MLA, split_head_dim
from lab.kernels.support.trtllm import CAKE, FMHA_V2, kernel_for
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_CONTEXT as GEN_CONTEXT
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_DECODE as GEN_DECODE
from lab.kernels.support.xqa import XQA
from tests.kernels import test_dsv4, test_flash_mla, test_peers_packages, test_support_peers, test_support_trtllm_gen
from tests.kernels.adapter_calls import (
    apart,
    context,
    decode,
    into,
    mla,
    other_order,
    posed,
    ragged,
    shifted,
    with_columns,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
E4M3, U8 = torch.float8_e4m3fn, torch.uint8
CPU, SM75, SM80, SM89, SM90, SM100, SM103 = None, (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (10, 3)
SM120, SM121 = (12, 0), (12, 1)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_kernel, "triton_interprets", lambda: True)


SHAPES = ("heads", "page_size", "head_dim", "dtype", "kv_dtype", "out_dtype", "rank", "rope")


def problem(kernel: Kernel, **changes: Any) -> Any:
    """A plain call of the kernel's kind: bf16, head_dim 64, pages of 16, 4 query and 2 K/V heads; then changed.

    Not all of it is fields: `q_len` and `SHAPES` shape the call, and `k_cache_like` and such change one tensor.
    """
    shapes = {name: changes.pop(name) for name in SHAPES if name in changes}
    is_nvfp4 = shapes.get("kv_dtype") == U8
    if is_nvfp4:
        del shapes["kv_dtype"]
    q_len = changes.pop("q_len", 2)
    if kernel is CAKE:
        shapes = {"head_dim": 128} | shapes
    if kernel is PORTABLE_MLA:
        own = (into(shapes.pop("out_dtype")),) if "out_dtype" in shapes else ()
        usual = {"heads": 4, "rank": 64, "rope": 16, "page_size": 16}
        found = posed(mla(q_len, (5, 7), *own, **usual | shapes))
    else:
        make = context if kernel in (FMHA_V2, GEN_CONTEXT) else decode
        as_sglang = {"kv_layout": "NHD"} if kernel in (SGLANG_TRITON, FLEX_ATTENTION) else {}
        found = posed(make(q_len, (5, 7), **shapes | as_sglang))
    if is_nvfp4:
        pages, heads, page_size, head_dim = found.k_cache.shape
        packed = torch.zeros(pages, heads, page_size, head_dim // 2, dtype=U8)
        factors = torch.zeros(pages, heads, page_size, head_dim // 16, dtype=U8).view(E4M3)
        sides = {"k_cache": packed, "v_cache": packed, "k_scale_factors": factors, "v_scale_factors": factors}
        found = replace(found, **sides, v_scale_factors_interleaved=kernel in (GEN_DECODE, GEN_CONTEXT))
    for name in [name for name in changes if name.endswith("_like")]:
        field = name.removesuffix("_like")
        found = replace(found, **{field: changes.pop(name)(getattr(found, field))})
    return replace(found, **changes)


ONE, SINK, LSE = torch.ones(1), torch.zeros(4), torch.empty(4, 4)
OFFSETS = torch.tensor([0, 2, 4], dtype=torch.int32)
MASK = torch.ones(2, 2, 2, dtype=torch.uint16)
# Pools of pages as the plain call's are: 2 K/V heads, 16 tokens, head_dim 64, bf16.
POOL, WIDE_POOL = torch.zeros(6, 2, 16, 64, dtype=BF16), torch.zeros(6, 2, 16, 128, dtype=BF16)[..., :64]
STACKED, THREE = torch.zeros(3, 2, 2, 16, 64, dtype=BF16), torch.zeros(3, 3, 2, 16, 64, dtype=BF16)
DENSER_V = STACKED.as_strided((3, 2, 16, 64), (4096, 64, 64, 1), 2048)  # begins where V begins in STACKED
STACKED_NHD = torch.zeros(3, 2, 16, 2, 64, dtype=BF16).transpose(2, 3)
# Two allocations, V's whole pages after K's by chance.
MEMORY = bytearray(6 * 4096)
LONE_K, LONE_V = (
    torch.frombuffer(MEMORY, dtype=BF16, count=3 * 2048, offset=start).view(3, 2, 16, 64) for start in (0, 3 * 4096)
)
ONE_POOL = {"k_cache": POOL, "v_cache": POOL}
ODD_HALVES = torch.zeros(6 * 2048 + 1, dtype=BF16)  # V an element after K's whole pages
ODD_K, ODD_V = (ODD_HALVES[start : start + 3 * 2048].view(3, 2, 16, 64) for start in (0, 3 * 2048 + 1))
NO_COLUMN = torch.empty(2, 0, dtype=torch.int32)
OTHER_TABLE = {"v_block_tables_like": torch.clone}
ONLY_SM9_10_12 = "XQA needs a GPU of SM90, SM100, SM103, SM120 and SM121, this is "
ONLY_SM9_12 = "trtllm_fmha_v2_prefill needs a GPU of SM90, SM120 and SM121, this is "

# Of a GPU, a K/V dtype and a head_dim: the groups that XQA compiles for, and others.
XQA_GROUPS: tuple[tuple[Capability, torch.dtype, int, tuple[int, ...], tuple[int, ...]], ...] = (
    (SM90, BF16, 64, (1, 16, 25, 32, 57, 64), (17, 24, 33, 48, 49, 56, 65, 128)),
    (SM90, BF16, 128, (1, 16, 25, 32, 57, 64), (17, 24, 33, 48, 49, 56, 65, 128)),
    (SM90, BF16, 256, (1, 16, 25, 32), (17, 24, 33, 64)),
    (SM90, BF16, 272, (16,), (17,)),
    (SM90, BF16, 512, (1, 16), ()),
    (SM90, E4M3, 64, (17, 24, 32, 49, 64), (33, 48, 65, 128)),
    (SM90, E4M3, 128, (17, 32), (33, 48, 64, 65)),
    (SM90, E4M3, 256, (), (33,)),
    (SM100, BF16, 64, (17, 32, 49, 64), (33, 48, 65)),
    (SM100, BF16, 128, (17, 32, 49, 64), (33, 48, 65)),
    (SM100, BF16, 256, (), (33,)),
    (SM103, E4M3, 256, (17, 32), ()),
    (SM120, BF16, 64, (), (33, 64)),
    (SM120, BF16, 128, (17, 32), ()),
    (SM121, BF16, 128, (), (33, 64)),
    (SM121, BF16, 256, (17, 32), ()),
    (SM120, E4M3, 64, (49, 64), (33, 48, 65)),
    (SM120, U8, 64, (49, 64), ()),
    (SM120, U8, 128, (), (33, 64)),
    (SM120, U8, 512, (1, 16), (17,)),
)

# Capability, change of the call, what the sentence says (None: supported). More of trtllm-gen: `test_support_trtllm_gen.py`.
ROWS: dict[Kernel, list[tuple[Capability | None, dict[str, Any], str | None]]] = {
    PORTABLE: [
        *[(gpu, {}, None) for gpu in (CPU, SM80, SM89, SM90, SM100, SM103, SM120, SM121)],
        (SM75, {}, "needs a GPU of SM80 and later, this is SM75"),
        (SM80, {"kv_dtype": E4M3}, "Triton compiles e4m3 for SM89 and later, and this is SM80"),
        (SM80, {"dtype": E4M3, "out_dtype": BF16}, "SM89"),
        (SM80, {"out_dtype": E4M3}, "SM89"),
        *[(gpu, {"kv_dtype": E4M3}, None) for gpu in (CPU, SM89, SM90, SM121)],
        *[(SM90, {"dtype": dtype}, None) for dtype in (BF16, FP16, E4M3)],
        (SM90, {"dtype": FP32}, "takes fp16, bf16 or e4m3 queries, not torch.float32"),
        (SM90, {"kv_dtype": U8}, "not torch.uint8 (NVFP4)"),
        *[(SM90, {"out_dtype": dtype}, None) for dtype in (BF16, FP16, FP32, E4M3)],
        (SM90, {"out_dtype": FP64}, "writes fp16, bf16, e4m3 or float32, not torch.float64"),
        *[(SM90, {"head_dim": size}, None) for size in (64, 128, 256)],
        *[(SM90, {"head_dim": size}, f"64, 128 and 256, not {size}") for size in (32, 80, 192, 512)],
        *[(SM90, {"page_size": size}, None) for size in (16, 32, 64, 128)],
        *[(SM90, {"page_size": size}, f"16, 32, 64 and 128, not {size}") for size in (1, 8, 256)],
        (SM90, {"lse": LSE}, None),
        (SM90, {"lse": torch.empty(4, 8)[:, :4]}, "contiguous lse"),
        (SM90, {"mask": MASK, "sinks": SINK, "window_left": 3, "bmm1_scale": ONE, "bmm2_scale": ONE}, None),
        (SM90, {"cu_seqlens_q": OFFSETS, "return_lse": True, **OTHER_TABLE}, None),
        (SM90, {"query_like": other_order, "v_cache_like": other_order}, None),
    ],
    PORTABLE_MLA: [
        *[(gpu, {}, None) for gpu in (CPU, SM80, SM89, SM90, SM100, SM103, SM120, SM121)],
        (SM75, {}, "needs a GPU of SM80 and later, this is SM75"),
        (SM80, {"kv_dtype": E4M3}, "Triton compiles e4m3 for SM89 and later, and this is SM80"),
        (SM80, {"out_dtype": E4M3}, "SM89"),
        *[(SM90, {"dtype": dtype}, None) for dtype in (BF16, FP16, E4M3)],
        *[(SM90, {"dtype": dtype, "kv_dtype": E4M3}, None) for dtype in (BF16, FP16)],
        (SM90, {"dtype": FP32}, "the portable Triton MLA kernel takes fp16, bf16 or e4m3 queries, not torch.flo"),
        *[(SM90, {"out_dtype": dtype}, None) for dtype in (BF16, FP16, FP32, E4M3)],
        (SM90, {"out_dtype": FP64}, "the portable Triton MLA kernel writes fp16, bf16, e4m3 or float32"),
        *[(SM90, {"rank": rank}, None) for rank in (16, 32, 64, 128, 256, 512)],
        *[(SM90, {"rank": rank}, f"128, 256 and 512, not {rank}") for rank in (8, 48, 1024)],
        *[(SM90, {"rope": rope}, None) for rope in (0, 16, 32, 64)],
        *[(SM90, {"rope": rope}, f"qk_rope_head_dim of 0, 16, 32 and 64, not {rope}") for rope in (8, 48, 128)],
        *[(SM90, {"page_size": size}, None) for size in (1, 8, 64, 256)],
        (SM90, {"sinks": SINK, "return_lse": True, "bmm1_scale": ONE, "cu_seqlens_q": OFFSETS}, None),
        (SM90, {"mask": MASK}, "a draft mask"),
        (SM90, {"causal": False}, "causal=False"),
        (SM90, {"window_left": 3}, "a window"),
        (SM90, {"v_block_tables": torch.zeros(2, 8, dtype=torch.int32)}, "separate page tables"),
    ],
    XQA: [
        *[(gpu, {}, None) for gpu in (SM90, SM100, SM103, SM120, SM121)],
        (CPU, {}, ONLY_SM9_10_12 + "a CPU"),
        (SM80, {}, ONLY_SM9_10_12 + "SM80"),
        *[(SM90, {"dtype": dtype}, None) for dtype in (BF16, FP16)],
        (SM90, {"dtype": E4M3}, "XQA takes fp16 or bf16 queries, not torch.float8_e4m3fn"),
        (SM90, {"dtype": FP32}, "XQA takes fp16 or bf16 queries, not torch.float32"),
        (SM90, {"kv_dtype": E4M3}, None),
        (SM90, {"kv_dtype": U8}, "NVFP4 K/V on SM120 and SM121 only, not on SM90"),
        (SM100, {"kv_dtype": U8}, "NVFP4 K/V on SM120 and SM121 only, not on SM100"),
        *[(gpu, {"kv_dtype": U8}, None) for gpu in (SM120, SM121)],
        (SM90, {"out_dtype": FP16}, "XQA writes the query's dtype, or e4m3 with e4m3 K/V, not torch.float16"),
        (SM90, {"out_dtype": E4M3}, "e4m3 with e4m3 K/V"),
        (SM90, {"out_dtype": E4M3, "kv_dtype": E4M3}, None),
        (SM90, {"bmm2_scale": 0.5}, "applies no bmm2_scale to fp16 and bf16 K/V"),
        (SM90, {"bmm2_scale": ONE}, "applies no bmm2_scale to fp16 and bf16 K/V"),
        (SM90, {"bmm2_scale": 1}, None),
        *[(SM90, {"bmm2_scale": scale, "kv_dtype": E4M3}, None) for scale in (0.5, ONE)],
        (SM90, {"bmm2_scale": 0.0, "kv_dtype": E4M3}, "divides by bmm2_scale"),
        *[(SM90, {"page_size": size}, None) for size in (16, 32, 64, 128)],
        *[(SM90, {"page_size": size}, f"16, 32, 64 and 128, not {size}") for size in (8, 256)],
        *[(SM90, {"head_dim": size}, None) for size in (16, 80, 256)],
        *[(SM90, {"head_dim": size}, f"multiple of 16 from 16 to 512, not {size}") for size in (8, 24, 528)],
        (SM90, {"head_dim": 512, "q_len": 1}, None),
        (SM90, {"head_dim": 512, "q_len": 2}, "head_dim 512 > 256 needs q_len_per_req 1"),
        *[
            (gpu, {"head_dim": size, "q_len": 1, "heads": (group, 1), "kv_dtype": kv}, words and f"not for {group}")
            for gpu, kv, size, taken, refused in XQA_GROUPS
            for groups, words in ((taken, None), (refused, True))
            for group in groups
        ],
        (
            SM90,
            {"head_dim": 128, "q_len": 1, "heads": (24, 1)},
            "XQA with head_dim 128, torch.bfloat16 K/V and q_len_per_req 1 compiles on SM90 for 1 to 16 or 25 to 32 or "
            "57 to 64 query heads per K/V head, not for 24",
        ),
        *[(SM120, {"kv_dtype": U8, "head_dim": size}, None) for size in (64, 128, 192, 256)],
        *[(SM120, {"kv_dtype": U8, "head_dim": size}, f"multiple of 64, not {size}") for size in (16, 80, 96, 240)],
        *[(gpu, {"head_dim": 128, "q_len": 2, "heads": (128, 1)}, None) for gpu in (SM90, SM120)],
        (SM120, {"head_dim": 128, "q_len": 2, "heads": (65, 1), "kv_dtype": E4M3}, None),
        (SM90, {"head_dim": 64, "q_len": 2, "heads": (64, 1), "kv_dtype": E4M3}, None),
        (SM90, {"head_dim": 64, "q_len": 2, "heads": (65, 1), "kv_dtype": E4M3}, "at most 64 query heads per K/V head"),
        (SM90, {"k_block_tables": NO_COLUMN, "v_block_tables": NO_COLUMN}, "has no column"),
        (SM90, {"cu_seqlens_q": OFFSETS}, "takes no cum_seq_lens_q"),
        (SM90, OTHER_TABLE, "uses_shared_paged_kv_idx must be True"),
        (SM90, {"lse": LSE}, "no LSE"),
        (SM90, {"return_lse": True}, "no LSE"),
        (SM90, {"mask": MASK}, None),
        (SM90, {"mask": MASK[:, :1], "q_len": 1}, "ignores a mask at q_len_per_req 1"),
        (SM90, {"v_cache_like": other_order}, "V with K's strides"),
        (SM90, {"k_cache_like": other_order, "v_cache_like": other_order}, None),
        (SM120, {"kv_dtype": U8, "v_scale_factors_like": other_order}, "strides of K's"),
        (SM90, {"k_cache_like": apart, "v_cache_like": apart}, "strides in whole heads of 64"),
        (SM120, {"kv_dtype": U8, "k_scale_factors_like": apart, "v_scale_factors_like": apart}, None),
        (SM120, {"kv_dtype": U8, "k_cache_like": apart, "v_cache_like": apart}, "strides in whole heads of 32"),
        (SM90, {"query_like": other_order}, "contiguous query"),
        (SM90, {"sinks": SINK, "window_left": 3, "bmm1_scale": ONE}, None),
        (SM90, {"skip_softmax": 1.0}, None),
        (SM90, {"causal": False}, "causal=False"),
        (SM120, {"kv_dtype": U8, "v_scale_factors_interleaved": True}, "interleaved over 4 tokens"),
        (SM90, {"num_visible": torch.ones(4, dtype=torch.int32)}, "does not honour one rank's keys"),
        (
            SM90,
            {"query_like": shifted},
            "loads 16 bytes at a time: query must begin at a multiple of them, not 2 bytes",
        ),
        (SM90, {"k_cache_like": shifted}, "K must begin at a multiple"),
        (
            SM90,
            {"v_cache_like": shifted, "kv_dtype": E4M3},
            "V must begin at a multiple of them, not 1 bytes after one",
        ),
        (
            SM120,
            {"k_cache_like": shifted, "kv_dtype": U8},
            "loads 8 bytes at a time: K must begin at a multiple of them",
        ),
        (SM90, {"out": shifted(torch.empty(4, 4, 64, dtype=BF16))}, "out must begin at a multiple"),
    ],
    FMHA_V2: [
        *[(gpu, {}, None) for gpu in (SM90, SM120, SM121)],
        (CPU, {}, ONLY_SM9_12 + "a CPU"),
        *[(gpu, {}, ONLY_SM9_12 + name) for gpu, name in ((SM80, "SM80"), (SM100, "SM100"), (SM103, "SM103"))],
        *[(SM120, {"dtype": dtype}, None) for dtype in (BF16, FP16)],
        (SM90, {"dtype": FP32}, "takes fp16 and bf16 queries"),
        (SM90, {"dtype": E4M3}, None),
        *[(gpu, {"dtype": E4M3}, "e4m3 on SM90 alone") for gpu in (SM120, SM121)],
        (SM90, {"kv_dtype": E4M3}, "K/V in the query's dtype"),
        (SM90, {"out_dtype": FP16}, "writes the query's dtype torch.bfloat16, not torch.float16"),
        *[(SM90, {"dtype": E4M3, "out_dtype": dtype}, None) for dtype in (BF16, FP16, E4M3)],
        (SM90, {"dtype": E4M3, "out_dtype": FP32}, "fp16 or bf16, not torch.float32"),
        *[(SM90, {"head_dim": size}, None) for size in (64, 128, 256)],
        *[(SM90, {"head_dim": size}, f"64, 128 and 256, not {size}") for size in (32, 80, 512)],
        *[(SM90, {"page_size": size}, None) for size in (16, 32, 64, 128)],
        *[(SM90, {"page_size": size}, f"16, 32, 64 and 128, not {size}") for size in (8, 256)],
        (SM90, {"cu_seqlens_q": None}, "needs cum_seq_lens_q"),
        (SM90, OTHER_TABLE, "uses_shared_paged_kv_idx must be True, or K and V the same contiguous pool"),
        (SM90, {**OTHER_TABLE, **ONE_POOL}, None),
        (SM90, {**OTHER_TABLE, "k_cache": POOL, "v_cache": POOL.transpose(1, 2)}, "the same contiguous pool"),
        (SM90, {**OTHER_TABLE, "k_cache": POOL[:1], "v_cache": POOL[:1]}, "two pages or more"),
        (SM90, {**OTHER_TABLE, "k_cache": WIDE_POOL, "v_cache": WIDE_POOL}, "the same contiguous pool"),
        (SM90, ONE_POOL, "needs K and V to be one contiguous [num_pages, 2, ...] tensor, or contiguous halves"),
        (SM90, {"k_cache": STACKED[:, 0], "v_cache": STACKED[:, 1]}, None),
        (SM90, {"k_cache": STACKED_NHD[:, 0], "v_cache": STACKED_NHD[:, 1]}, None),
        (SM90, {"k_cache": STACKED[:, 0], "v_cache": DENSER_V}, "halves of one allocation"),
        (SM90, {"k_cache": STACKED[:, 1], "v_cache": STACKED[:, 0]}, "V -4096 bytes after K, pages of 4096 bytes"),
        (SM90, {"k_cache": THREE[:, 0], "v_cache": THREE[:, 1]}, "V 4096 bytes after K"),
        (SM90, {"k_cache": POOL[:3], "v_cache": POOL[3:]}, None),
        (SM90, {"k_cache": POOL[3:], "v_cache": POOL[:3]}, "V -12288 bytes after K"),
        (SM90, {"k_cache": ODD_K, "v_cache": ODD_V}, "V 12290 bytes after K"),
        (SM90, {"k_cache": LONE_K, "v_cache": LONE_V}, "halves of one allocation"),
        (SM90, {"k_cache": WIDE_POOL[:3], "v_cache": WIDE_POOL[3:]}, "halves of one allocation"),
        (SM90, {"query_like": shifted}, "query must begin at a multiple of them, not 2 bytes after one"),
        (SM90, {"lse": LSE}, "not the LSE"),
        (SM90, {"return_lse": True}, "not the LSE"),
        (SM90, {"bmm1_scale": ONE}, "host numbers"),
        (SM90, {"bmm2_scale": ONE}, "host numbers"),
        (SM90, {"bmm1_scale": 0.0}, "takes bmm1_scale 0 for 1 / sqrt(head_dim)"),
        (SM90, {"bmm1_scale": 0.3}, None),
        (SM90, {"bmm2_scale": 0.5}, "applies no bmm2_scale to torch.bfloat16: it must be 1.0, not 0.5"),
        (SM90, {"bmm2_scale": 0.5, "dtype": E4M3}, None),
        (SM90, {"query_like": other_order}, "contiguous query"),
        (SM90, {"sinks": SINK, "window_left": 3}, None),
        (SM90, {"causal": False}, None),
        (SM90, {"skip_softmax": 1.0}, None),
        (SM120, {"skip_softmax": 1.0}, "leaves out parts of the softmax on SM90 only, not on SM120"),
        (SM90, {"mask": MASK}, "a draft mask"),
    ],
    GEN_DECODE: [
        (SM100, {"causal": False}, "causal=False"),
        (SM100, {"kv_dtype": U8, "dtype": E4M3, "v_scale_factors_interleaved": False}, "in plain order"),
    ],
    GEN_CONTEXT: [(SM100, {"mask": MASK}, "takes no mask")],
    CAKE: [
        *[(gpu, {}, None) for gpu in (SM100, SM103)],
        *[(gpu, {}, "Cake decode of one rank needs a GPU of SM100 and SM103") for gpu in (CPU, SM90, SM120)],
        (SM100, {"num_visible": torch.ones(4, dtype=torch.int32), "return_lse": True}, None),
        (SM100, {"dtype": FP16}, "takes bf16 queries, not torch.float16"),
        (SM100, {"kv_dtype": U8}, "takes bf16 or e4m3 K/V"),
        (SM100, {"out_dtype": FP16}, "writes bf16, not torch.float16"),
        *[(SM100, {"page_size": size}, f"pages of 16 tokens with torch.bfloat16 K/V, not {size}") for size in (8, 64)],
        (SM100, {"page_size": 64, "kv_dtype": E4M3}, None),
        (SM100, {"kv_dtype": E4M3}, "pages of 64 tokens with torch.float8_e4m3fn K/V, not 16"),
        (SM100, {"head_dim": 64}, "head_dim 128 and 256, not 64"),
        (SM100, {"head_dim": 256}, "over bf16 K/V takes head_dim 128 and bmm2_scale 1, not 256 and 1"),
        (SM100, {"bmm2_scale": 0.5}, "over bf16 K/V takes head_dim 128 and bmm2_scale 1, not 128 and 0.5"),
        (SM100, {"bmm2_scale": 0.5, "page_size": 64, "kv_dtype": E4M3}, None),
        (SM100, {"heads": (8, 1)}, None),
        (SM100, {"heads": (9, 1)}, "at most 8 query heads of a K/V head with head_dim 128, not 9"),
        (SM100, {"head_dim": 256, "page_size": 64, "kv_dtype": E4M3, "heads": (16, 1)}, None),
        (
            SM100,
            {"head_dim": 256, "page_size": 64, "kv_dtype": E4M3},
            "16 query heads over 1 K/V head with head_dim 256",
        ),
        *[(SM100, {"q_len": q_len}, None) for q_len in (1, 6, 8)],
        (SM100, {"q_len": 7}, "is not built for 7 rows with head_dim 128"),
        (SM100, {"q_len": 9}, "7 and 8, not 9"),
        (SM100, {"q_len": 7, "head_dim": 256, "page_size": 64, "kv_dtype": E4M3, "heads": (16, 1)}, None),
        (SM100, {"sinks": SINK}, "does not honour sinks"),
        (SM100, {"query_like": other_order}, "contiguous query"),
    ],
}
TABLE = [(kernel, *row) for kernel, rows in ROWS.items() for row in rows]


def row_id(row: tuple[Kernel, Capability | None, dict[str, Any], str | None]) -> str:
    kernel, capability, changes, fragment = row
    where = "CPU" if capability is None else f"SM{capability[0]}{capability[1]}"
    return f"{kernel.name}-{where}-{','.join(changes) or 'plain'}-{'no' if fragment else 'yes'}"


@pytest.mark.parametrize(("kernel", "capability", "changes", "fragment"), TABLE, ids=map(row_id, TABLE))
def test_why_not(kernel: Kernel, capability: Capability | None, changes: dict[str, Any], fragment: str | None) -> None:
    reason = why_not(kernel, capability, problem(kernel, **changes))
    assert reason is None if fragment is None else fragment in str(reason)
    assert str(reason).strip(" .") == str(reason)


def test_a_cpu_runs_triton_kernels_in_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support_kernel, "triton_interprets", lambda: False)
    assert "set TRITON_INTERPRET=1 first" in str(why_not(PORTABLE, CPU, problem(PORTABLE)))
    assert why_not(PORTABLE, SM90, problem(PORTABLE)) is None
    assert why_not(FLEX_ATTENTION, CPU, problem(FLEX_ATTENTION)) is None  # it is no Triton kernel


@pytest.mark.parametrize("side", ["K", "V"])
def test_flex_attention_counts_elements_in_32_bits(side: str) -> None:
    for gpu, pages, is_taken in ((SM90, 2**20, True), (SM90, 2**20 + 1, False), (CPU, 2**20 + 1, True)):
        pool = torch.empty(pages, 16, 2, 64, dtype=BF16, device="meta").transpose(1, 2)
        reason = why_not(FLEX_ATTENTION, gpu, problem(FLEX_ATTENTION, **{f"{side.lower()}_cache": pool}))
        assert reason is None if is_taken else f"counts the elements of {side} in 32 bits" in str(reason)


@pytest.mark.parametrize("capability", [(6, 0), SM80, SM90, SM100, SM103, SM120, SM121])
def test_which_kernel_an_engine_runs(capability: Capability) -> None:
    """On a GPU without FlashInfer's kernels: those of GPUs without trtllm-gen."""
    decode, context = (GEN_DECODE, GEN_CONTEXT) if capability in (SM100, SM103) else (XQA, FMHA_V2)
    assert kernel_for(AttentionCall.DECODE, capability) is decode
    assert kernel_for(AttentionCall.DECODE, capability, of_one_rank=True) is CAKE
    assert kernel_for(AttentionCall.CONTEXT, capability) is context


def test_a_head_dim_is_divided_into_a_power_of_two_and_the_rest() -> None:
    assert [split_head_dim(size) for size in (64, 96, 192)] == [(64, 0), (64, 32), (128, 64)]


def test_cute_dsl_has_no_row() -> None:
    with pytest.raises(NotImplementedError, match="does not run FlashInfer's CuTe DSL kernels"):
        kernel_for(AttentionCall.MLA_DECODE, SM100, "cute-dsl")


def test_refuse_unsupported_raises_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability_of", lambda device: SM80)
    posed = problem(XQA)
    with pytest.raises(NotImplementedError) as error:
        refuse_unsupported(XQA, posed)
    assert str(error.value) == why_not(XQA, SM80, posed)
    refuse_unsupported(PORTABLE, posed)


def test_a_reason_reads_no_device() -> None:
    """A tensor's value in a sentence would be a synchronisation."""
    reason = why_not(XQA, SM90, problem(XQA, bmm2_scale=torch.full((1,), 0.625)))
    assert reason is not None
    assert "0.625" not in reason


def test_every_kernel_has_rules() -> None:
    others = [*test_peers_packages.REFUSED.values(), *test_support_peers.TABLE, *test_support_trtllm_gen.REFUSED]
    missing = {*KERNELS} - {*(row[0] for row in (*TABLE, *others)), *test_dsv4.KERNELS}
    assert not missing, (
        f"{missing}: write rows of what each supports and refuses, a package's kernel in `REFUSED` of its test"
    )


def plain(kernel: Kernel) -> tuple[Capability, support.Problem]:
    """A GPU that runs the kernel, and a plain problem that it takes there."""
    capability = SM90 if family_of(SM90) in kernel.gpus else kernel.gpus[0].capabilities[0]
    if AttentionCall.RAGGED_CONTEXT in kernel.calls:
        return capability, posed(ragged())
    if AttentionCall.DSV4_DECODE in kernel.calls:
        return capability, DSV4DecodeCall(**test_dsv4.arguments_of()).problem()
    if kernel is FLASH_MLA:
        return capability, posed(test_flash_mla.sparse())
    if AttentionCall.MLA_DECODE in kernel.calls:
        return capability, posed(with_columns(2)(mla(1, (5, 33), heads=128)))
    return capability, problem(kernel)


class Later(enum.Enum):
    """What a release of FlashInfer to come may ask for."""

    BIAS = "a bias of the logits"


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_feature_that_no_row_honours_is_refused_by_every_kernel(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, posed = plain(kernel)
    assert why_not(kernel, capability, posed) is None
    monkeypatch.setitem(FIELDS, "query", {Later.BIAS: lambda problem: True})
    assert why_not(kernel, capability, posed) == f"{kernel.name} does not honour a bias of the logits"


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_field_that_nobody_declared_is_refused_by_every_kernel(kernel: Kernel) -> None:
    capability, posed = plain(kernel)
    grown = make_dataclass("Grown", [("bias", Any, None)], bases=(type(posed),), frozen=True, eq=False)
    values = {each.name: getattr(posed, each.name) for each in fields(posed)}
    reason = why_not(kernel, capability, grown(**values))
    assert reason == f"{kernel.name} does not honour {Feature.UNDECLARED.value}"


@pytest.mark.parametrize("kernel", KERNELS, ids=repr)
def test_a_kernel_refuses_the_problems_of_other_calls(kernel: Kernel) -> None:
    capability, _ = plain(kernel)
    for other in KERNELS:
        _, posed = plain(other)
        if posed.call not in kernel.calls:
            assert f"not {posed.call.value}" in str(why_not(kernel, capability, posed))


def test_all_that_is_refused_is_named() -> None:
    reason = why_not(XQA, SM90, problem(XQA, sinks=SINK, return_lse=True, causal=False))
    assert reason == "XQA computes no LSE, and does not honour causal=False"
