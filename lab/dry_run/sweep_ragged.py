"""Define the arguments of the ragged context call that the sweep (`lab.dry_run.sweep`) varies, and make the calls. An axis is
an argument, and a point has one value for each axis.
"""

from collections.abc import Sequence
from typing import Any

import torch

from lab.calls import RaggedContextCall
from lab.calls.block_scales import SAGE_DTYPES
from lab.calls.problem import E4M3
from lab.checks.parameters.covering import Constraint, Model, Point
from lab.dry_run import sweep_calls
from lab.dry_run.sweep_calls import amount, offsets_of, strided

AXES: dict[str, Sequence[Any]] = {
    "dtypes": (
        "bf16/bf16/bf16",
        *(f"{q}/{q}/{out}" for q in (*sweep_calls.OUTS, "int8") for out in ("fp16", "bf16")),
        "fp32/fp32/fp32",
        "bf16/bf16/fp32",
    ),
    "dims": ((192, 128), (128, 128), (256, 256), (64, 64), (192, 192)),
    "num_kv_heads": (8, 1, 16),
    "group": (1, 2, 3, 4, 8, 64),
    "q_len": (64, 1, 3, 17, 300),
    "kv_len": (300, 1, 64, 1000),
    "batch_size": (2, 1, 3, 17),
    "causal": (True, False),
    "window_left": (-1, 0, 20, 126, 299, 999),
    "gap": ("none", "fused", "4 elements a head", "16 elements a head", "4 elements a token"),
    "kv_start": ("aligned", "K 8 bytes on", "V 8 bytes on", "K 16 bytes on"),
    "query": ("packed", "heads 16 elements apart", "8 bytes on"),
    "lengths": ("on the GPU", "mirrored"),
    **sweep_calls.SOFTMAX_AXES,
    "scales": ("numbers", "tensors"),
    "sage": ((0, 0), (1, 16), (1, 4), (1, 1), (4, 16)),  # (rows, keys) of a block with a scale; (0, 0): no scales
}
RAGGED_CONTEXT = Model(
    AXES,
    (
        sweep_calls.WINDOW_IS_CAUSAL,
        Constraint(
            lambda dtypes, sage: sage == (0, 0) or dtypes.startswith(("int8", "e4m3")), "scales of quantised blocks"
        ),
        Constraint(lambda dtypes, sage: sage != (0, 0) or not dtypes.startswith("int8"), "int8 has scales of blocks"),
        Constraint(lambda dims, gap: dims != (256, 256) or gap != "fused", "as SGLang's are"),
    ),
    (("dtypes", "dims", "causal"), ("dtypes", "dims", "window_left"), ("dtypes", "sage", "causal")),
)
BASES: tuple[Point, ...] = ({}, {"dtypes": "e4m3/e4m3/bf16"}, {"dims": (128, 128), "causal": False})


def ragged_context(point: Point) -> RaggedContextCall:
    q, _, out = (sweep_calls.DTYPES[name] for name in point["dtypes"].split("/"))
    (width, v_width), kv_heads, batch = point["dims"], point["num_kv_heads"], point["batch_size"]
    heads, rows, tokens = kv_heads * point["group"], batch * point["q_len"], batch * point["kv_len"]
    gap = 128 if point["gap"] == "fused" else amount(point["gap"], "# elements a head")
    spare = amount(point["gap"], "# elements a token")
    key, value = (
        strided((tokens, kv_heads, size), (kv_heads * (size + gap) + spare, size + gap, 1), dtype, start)
        for size, dtype, start in (
            (width, q, amount(point["kv_start"], "K # bytes on")),
            (v_width, E4M3 if q == torch.int8 else q, amount(point["kv_start"], "V # bytes on")),
        )
    )
    lengths = [torch.full((batch,), each, dtype=torch.int32) for each in (point["q_len"], point["kv_len"])]
    mirrored = point["lengths"] == "mirrored"
    results = sweep_calls.results_of(point, (rows, heads, v_width), out)
    if "out" not in results and out != (torch.bfloat16 if q in SAGE_DTYPES else q):
        results["out"] = torch.empty(rows, heads, v_width, dtype=out)
    if any(blocks := point["sage"]):
        counts = (-(-total // size) + batch - 1 for total, size in zip((rows, tokens), blocks, strict=True))
        q_sf, k_sf = (torch.ones(each, count) for each, count in zip((heads, kv_heads), counts, strict=True))
        results["sage_attn_sfs"] = (q_sf, k_sf, None, torch.ones(kv_heads, v_width))
        results["num_elts_per_sage_attn_blk"] = (*blocks, 0, 1)
    return RaggedContextCall(
        query=sweep_calls.query_of(point["query"], (rows, heads, width), q),
        key=key,
        value=value,
        workspace_buffer=None,
        seq_lens=lengths[1],
        max_q_len=point["q_len"],
        max_kv_len=point["kv_len"],
        o_sf_scale=1.0,
        batch_size=batch,
        window_left=point["window_left"],
        cum_seq_lens_q=offsets_of(batch, point["q_len"]),
        cum_seq_lens_kv=offsets_of(batch, point["kv_len"]),
        enable_pdl=None,
        is_causal=point["causal"],
        attention_sinks=torch.zeros(heads) if point["sinks"] else None,
        q_seq_lens_cpu=lengths[0] if mirrored else None,
        kv_seq_lens_cpu=lengths[1] if mirrored else None,
        **results,
        **sweep_calls.scales_of(point["scales"]),
    )
