"""A case that makes no sense, or holds an argument that would be ignored, is refused with a sentence."""

from typing import Any

import pytest
import torch

from lab.checks import ForwardCase
from lab.metadata import AttentionCall, ForwardMode

RUNNING = [mode for mode in ForwardMode if not (mode is ForwardMode.IDLE or mode is ForwardMode.PREBUILT)]
E4M3 = torch.float8_e4m3fn
BLOCK_SPARSE: dict[str, Any] = {"page_size": 128, "block_sparse": True}


def case(mode: ForwardMode = ForwardMode.DECODE, **changes: Any) -> ForwardCase:
    """Two requests of one row each, which every mode can have."""
    return ForwardCase(**{"mode": mode, "geometry": "tiny", "prefix_lens": (3, 5), "q_lens": (1, 1)} | changes)


@pytest.mark.parametrize("mode", RUNNING, ids=repr)
def test_every_mode_that_runs_attention_makes_a_case(mode: ForwardMode) -> None:
    assert eval(repr(case(mode)), {"ForwardCase": ForwardCase, "ForwardMode": ForwardMode}) == case(mode)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"mode": ForwardMode.IDLE}, ValueError, "nothing to judge"),
        ({"q_lens": (2, 2)}, ValueError, "DECODE has one row"),
        ({"q_lens": (1,)}, ValueError, "2 prefix_lens for 1 q_lens"),
        ({"prefix_lens": (-1, 0)}, ValueError, ">= 0"),
        ({"geometry": "llama-3.1-8b", "sliding_window": True}, ValueError, "no sliding-window layers"),
        ({"mode": ForwardMode.TARGET_VERIFY, "q_lens": (1, 2)}, ValueError, "equally many rows"),
        *(
            (BLOCK_SPARSE | change, ValueError, "block_sparse=True")
            for change in (
                *({"page_size": 64}, {"kv_dtype": E4M3}, {"sliding_window": True}, {"virtual_slots": True}),
                *({"draft_step": 1}, {"mode": ForwardMode.EXTEND}),
            )
        ),
        ({"draft_step": -2}, ValueError, "draft_step must be at least -1, got -2"),
        ({"draft_step": -1, "prefix_lens": (0, 5)}, ValueError, "frozen-KV draft is at its request's last token"),
        ({"topk": 2}, ValueError, "topk=2 would be ignored in ForwardMode.DECODE: only a frozen-KV draft"),
        ({"draft_step": -1, "topk": 2, "prefix_lens": (3, 3, 5, 6), "q_lens": (1,) * 4}, ValueError, "length 2 times"),
        (
            {"mode": ForwardMode.MIXED, "split_mixed_tail": True, "kv_dtype": E4M3},
            ValueError,
            "split_mixed_tail=True would be ignored with a query of torch.bfloat16 and a cache of torch.float8_e4m3fn",
        ),
        ({"draft_step": True}, TypeError, "draft_step must be an int, got True"),
        ({"draft_step": 1.0}, TypeError, "draft_step must be an int, got 1.0"),
        ({"prefix_lens": (), "q_lens": ()}, ValueError, "empty batch.* at least one request"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
        ({"page_size": -16}, ValueError, "page_size must be at least 1, got -16"),
        ({"page_size": 48}, ValueError, "page_size=48 must be a power of two"),
        ({"page_size": True}, TypeError, "page_size must be an int, got True"),
        ({"page_size": 16.0}, TypeError, "page_size must be an int, got 16.0"),
        ({"dtype": torch.float32}, TypeError, "dtype=torch.float32 must be torch.float16 or torch.bfloat16"),
        ({"dtype": E4M3}, TypeError, "dtype=torch.float8_e4m3fn must be"),
        ({"kv_dtype": torch.float16}, TypeError, "kv_dtype=torch.float16 must be dtype, torch.bfloat16, or"),
        ({"kv_dtype": torch.int8}, TypeError, "kv_dtype=torch.int8 must be"),
        ({"context_parallel": 0}, ValueError, "context_parallel must be at least 1, got 0"),
        ({"context_parallel": 2}, ValueError, "context_parallel=2 in ForwardMode.DECODE with"),
        ({"mode": ForwardMode.EXTEND, "context_parallel": 2}, ValueError, "deals nothing to ranks"),
        (
            {"mode": ForwardMode.MIXED, "q_lens": (4, 9), "context_parallel": 2, "split_mixed_tail": True},
            ValueError,
            "SGLang splits off no mixed tail with it",
        ),
        ({"query_dtype": torch.float32}, TypeError, "query_dtype=torch.float32 must be torch.float8_e4m3fn"),
        ({"query_dtype": E4M3}, ValueError, "casts no query over a cache of torch.bfloat16"),
        ({"mode": ForwardMode.EXTEND, "kv_dtype": torch.uint8}, ValueError, "over an NVFP4 cache is trtllm-gen's"),
        ({"mode": ForwardMode.DRAFT_EXTEND, "draft_extend": "DECODE"}, TypeError, "must be an AttentionCall"),
    ],
)
def test_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        case(**changes)


@pytest.mark.parametrize("mode", RUNNING, ids=repr)
def test_an_argument_that_the_mode_would_ignore_is_refused(mode: ForwardMode) -> None:
    plain_extends = {ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND}
    meant: dict[str, tuple[Any, set[ForwardMode]]] = {
        "draft_step": (0, {ForwardMode.DECODE}),
        "draft_extend": (AttentionCall.DECODE, {ForwardMode.DRAFT_EXTEND, ForwardMode.DRAFT_EXTEND_V2}),
        "split_mixed_tail": (True, plain_extends),
        "encoder_only": (True, {*plain_extends, ForwardMode.TARGET_VERIFY}),
        "num_padding_rows": (3, {*plain_extends, ForwardMode.DRAFT_EXTEND, ForwardMode.RAGGED_VERIFY}),
    }
    for name, (value, modes) in meant.items():
        if mode in modes:
            assert getattr(case(mode, **{name: value}), name) == value
        else:
            with pytest.raises(ValueError, match=f"{name}=.* leave it"):
                case(mode, **{name: value})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 4096])
def test_accepts_both_half_types_with_either_cache_and_any_power_of_two(dtype: torch.dtype, page_size: int) -> None:
    for kv_dtype in (dtype, E4M3):
        assert case(dtype=dtype, kv_dtype=kv_dtype, page_size=page_size).kv_dtype == kv_dtype
