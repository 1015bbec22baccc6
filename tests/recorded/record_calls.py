"""Record calls of the references with FlashInfer's own recorder, in a process that has it switched on, and with the lab's.

`python -m tests.recorded.record_calls FOLDER OWN_FOLDER`; the arguments are seeded, so that a test makes them again.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

PAGE_SIZE, NUM_PAGES, HEADS, KV_HEADS, HEAD_DIM = 16, 9, 4, 2, 64
LENGTHS = (5, 17, 33)
PAGE_OFFSETS = torch.tensor([0, 1, 3, 6], dtype=torch.int32)  # of these lengths
OWN = "own"  # the folder beside FlashInfer's


def decode_arguments(**changes: Any) -> dict[str, Any]:
    """Make the arguments of a decode of three requests, K/V heads before tokens and strided pages."""
    draw = torch.Generator().manual_seed(3)
    pool = torch.randn(NUM_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM, generator=draw).to(torch.bfloat16)
    arguments = {
        "query": torch.randn(len(LENGTHS), HEADS, HEAD_DIM, generator=draw).to(torch.bfloat16),
        "kv_cache": (pool[:, 0], pool[:, 1]),
        "workspace_buffer": torch.zeros(64, dtype=torch.uint8),
        "block_tables": torch.randperm(NUM_PAGES, generator=draw).view(3, 3).to(torch.int32),
        "seq_lens": torch.tensor(LENGTHS, dtype=torch.int32),
        "max_seq_len": max(LENGTHS),
        "bmm1_scale": HEAD_DIM**-0.5,
    }
    return arguments | changes


def several_rows(**changes: Any) -> dict[str, Any]:
    arguments = decode_arguments(q_len_per_req=2)
    return arguments | {"query": arguments["query"].repeat_interleave(2, dim=0)} | changes


def context_arguments(ends: tuple[int, ...] = (0, 3, 3, 8), num_rows: int = 10, **changes: Any) -> dict[str, Any]:
    """Make the arguments of a context call. Request 1 has no row, and rows after those of the last request are padding."""
    query = torch.randn(num_rows, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    arguments = decode_arguments(query=query)
    arguments |= {"max_kv_len": arguments.pop("max_seq_len"), "max_q_len": 5, "batch_size": 3, "bmm2_scale": 1.0}
    arguments["cum_seq_lens_q"] = torch.tensor(ends, dtype=torch.int32)
    arguments["cum_seq_lens_kv"] = torch.tensor([0, *LENGTHS]).cumsum(0, dtype=torch.int32)
    return arguments | changes


def ragged_arguments(**changes: Any) -> dict[str, Any]:
    """Make the arguments of a ragged call of 2 and 3 rows over 4 and 6 keys, with head_dims 48 and 32."""
    draw = torch.Generator().manual_seed(7)
    shapes = {"query": (5, HEADS, 48), "key": (10, HEADS, 48), "value": (10, HEADS, 32)}
    arguments: dict[str, Any] = {
        name: torch.randn(shape, generator=draw).to(torch.bfloat16) for name, shape in shapes.items()
    }
    numbers = {"seq_lens": [4, 6], "cum_seq_lens_q": [0, 2, 5], "cum_seq_lens_kv": [0, 4, 10]}
    arguments |= {name: torch.tensor(values, dtype=torch.int32) for name, values in numbers.items()}
    arguments |= {"q_seq_lens_cpu": torch.tensor([2, 3]), "kv_seq_lens_cpu": torch.tensor([4, 6])}
    arguments |= {"max_q_len": 3, "max_kv_len": 6, "batch_size": 2, "bmm1_scale": 0.1, "bmm2_scale": 1.5}
    arguments |= {"o_sf_scale": 1.0, "window_left": -1, "enable_pdl": None, "is_causal": True, "return_lse": False}
    return arguments | changes


def latent_arguments(**changes: Any) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(4)
    arguments = {
        "query": torch.randn(2, 1, HEADS, 80, generator=draw).to(torch.bfloat16),
        "kv_cache": torch.randn(4, 32, 80, generator=draw).to(torch.bfloat16),
        "workspace_buffer": torch.zeros(64, dtype=torch.uint8),
        "qk_nope_head_dim": 32,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "block_tables": torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        "seq_lens": torch.tensor([40, 5], dtype=torch.int32),
        "max_seq_len": 40,
        "bmm1_scale": 0.1,
    }
    return arguments | changes


def selecting_arguments(**changes: Any) -> dict[str, Any]:
    """Make the arguments of an MLA decode of two requests of two rows each, which select entries of their pages."""
    of_rows = [[[96, -1, 35, 103], [39, 97, 96, -1]], [[2, 0, -1, 3], [4, 1, 2, 0]]]
    table, query = torch.tensor(of_rows, dtype=torch.int32), latent_arguments()["query"].repeat(1, 2, 1, 1)
    return latent_arguments(query=query, block_tables=table, sparse_mla_top_k=4) | changes


def rank_arguments(num_rows: int = 3) -> dict[str, Any]:
    """Make the arguments of an MLA decode of rank 1 of 2, which holds every second key of requests of 80 and 10 keys."""
    query = latent_arguments()["query"].repeat(1, num_rows, 1, 1)
    ends = torch.tensor([80, 10], dtype=torch.int32)
    rank = {"enable_dcp": True, "cp_world": 2, "cp_rank": 1, "causal_seqlens_kv_global": ends}
    return latent_arguments(query=query, backend="cute-dsl", return_lse=True, **rank)


def main(folder: str, own_folder: str) -> None:
    """Record six calls with both recorders: plain, positional, with a given output and LSE, of float16 output, one that fails,
    and for FlashInfer's recorder one that is no attention.
    """
    os.environ |= {"FLASHINFER_LOGLEVEL": "10", "FLASHINFER_LOGDEST": os.devnull, "FLASHINFER_DUMP_DIR": folder}
    from flashinfer.api_logging import flashinfer_api

    from lab import references
    from lab.recorded import Recorder

    engine = ModuleType("engine")
    engine.trtllm_batch_decode_with_kv_cache = flashinfer_api(  # type: ignore[attr-defined]
        references.trtllm_batch_decode_with_kv_cache
    )
    sys.modules["engine"] = engine
    with Recorder(own_folder, functions=[engine]):
        make_calls(engine.trtllm_batch_decode_with_kv_cache)
    flashinfer_api(torch.nn.functional.relu)(decode_arguments()["query"])


def make_calls(decode: Callable[..., Any]) -> None:
    plain = decode_arguments()
    decode(**plain)
    decode(*plain.values())
    results = {"out": torch.empty_like(plain["query"]), "lse": torch.empty(plain["query"].shape[:2])}
    decode(**plain, **results, return_lse=True)
    decode(**decode_arguments(out_dtype=torch.float16, window_left=3))
    with contextlib.suppress(ValueError):
        decode(**decode_arguments(max_seq_len=4))


if __name__ == "__main__":
    main(*sys.argv[1:])
