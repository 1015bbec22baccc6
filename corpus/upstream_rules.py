"""The tolerances that upstream projects' tests apply to attention outputs, as data.

Sources: FlashInfer, SGLang and vLLM as of September 2026. All compare element by element.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class UpstreamRule:
    """The tolerance of an upstream test: when an element counts as wrong, and how many elements may be wrong.

    Attributes:
        name: dtypes and call to which the rule applies.
        source: project and test.
        rtol, atol: relative and absolute tolerance.
        wrong_share: fraction of the elements that may be wrong.
        either: an element is right if it meets one of the two tolerances; otherwise the tolerance is their sum `atol + rtol *
            |expected|`.
        nan_is_equal: NaN counts as right, because the upstream helper counts the elements that are greater than their
            tolerance.
    """

    name: str
    source: str
    rtol: float
    atol: float
    wrong_share: float = 0.0
    either: bool = False
    nan_is_equal: bool = False


_GEN = "FlashInfer test_trtllm_gen_attention_decode"
UPSTREAM_RULES: tuple[UpstreamRule, ...] = (
    UpstreamRule("gen-bf16", _GEN, 1e-2, 1e-2, wrong_share=5e-5, nan_is_equal=True),
    UpstreamRule("gen-bf16-spec", f"{_GEN}, q_len > 1", 2e-2, 2e-2, wrong_share=5e-5, nan_is_equal=True),
    UpstreamRule("gen-fp8q", f"{_GEN}, fp8 query, cache and output", 5e-2, 7e-2, wrong_share=5e-5, nan_is_equal=True),
    UpstreamRule("xqa-fp8kv-spec", f"{_GEN}, backend xqa, q_len > 1", 2e-1, 2e-1, wrong_share=5e-5, nan_is_equal=True),
    UpstreamRule("xqa_batch-fp8", "FlashInfer test_xqa_batch_decode", 1e-1, 1e-1),
    UpstreamRule("test_xqa-bf16", "FlashInfer test_xqa", 1e-2, 1e-2, wrong_share=0.02, either=True),
    UpstreamRule("test_xqa-fp8", "FlashInfer test_xqa, fp8 cache", 5e-2, 5e-2, wrong_share=0.02, either=True),
    UpstreamRule("fmha_v2-fp8", "FlashInfer fmha_v2 prefill, fp8 output", 1e-1, 1e-1),
    UpstreamRule("sglang", "SGLang attention kit, dense", 3e-2, 3e-2),
    UpstreamRule("vllm-fp8kv", "vLLM trtllm tests, fp8 cache", 4e-2, 6e-2),
)


def passes(rule: UpstreamRule, out: Tensor, expected: Tensor) -> bool:
    """Return True if a rule accepts an output.

    Args:
        out, expected: tensors of the same shape, with any float dtypes.

    Raises:
        ValueError: the shapes differ.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out has shape {list(out.shape)}, but expected has {list(expected.shape)}")
    out, expected = out.to(torch.float32), expected.to(torch.float32)
    difference, size = (out - expected).abs(), expected.abs()
    if rule.either:
        right = (difference <= rule.atol) | (difference <= rule.rtol * size)
    else:
        right = difference <= rule.atol + rule.rtol * size
    if rule.nan_is_equal:
        right = right | difference.isnan()
    return int((~right).sum()) <= rule.wrong_share * out.numel()
