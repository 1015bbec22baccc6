"""Arguments of FlashInfer's calls for which the lab supports only some values, and the reasons. Line numbers are those of
FlashInfer 0.7.2.post1.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

# Argument -> (allowed values, reason why no other value is allowed).
Reasons = Mapping[str, tuple[tuple[Any, ...], str]]

# Scratch memory and a launch hint. They change no result, so they may have any value, on any device.
FREE_ARGUMENTS = (*("workspace_buffer", "enable_pdl", "multi_ctas_kv_counter_buffer"), "remapped_sparse_indices_buffer")
# Arguments that select one of several kernels with equal results. They change no result, but must have one of these values.
CHOICES: dict[str, tuple[Any, ...]] = {
    "bf16q_fp8kv_transform_mode": (None, "k_only", "separate_kv"),  # decode.py 3954: how e4m3 K/V become bf16
    "is_var_seq": (True, False),  # mla/_core.py 3252: False keeps CuTe DSL's blocks on the GPU between requests
    "cute_dsl_impl": ("auto", "modular", "monolithic"),  # mla/_core.py 4000
    # mla/_core.py 4013: of packed (uint8) caches of selected entries, which the lab refuses; other kernels ignore it.
    "kv_scale_format": ("auto", "pow2_fp32", "arbitrary_fp32"),
}
ONLY_SM107 = "FlashInfer has such kernels for SM107 alone (utils.py 328), which is no GPU of the lab's"
ONLY_HCA = "only the backend cute-dsl takes it (mla/_core.py 2407), which the lab does not model for DSV4"
REFUSED: Reasons = {
    "use_fp16_softmax": ((None, False), ONLY_SM107),
    "uses_spcompress": ((None, False), f"{ONLY_SM107}, and does not document which parts of a result they leave out"),
    "request_order": ((None,), "only the backend cake orders requests (decode.py 3986), which the lab does not model"),
    **dict.fromkeys(
        ("swa_topk_lens", "extra_sparse_indices", "extra_sparse_topk_lens"),
        ((None,), "only SM120's kernels of packed entries and the backend cake take it (mla/_core.py 2543)"),
    ),
    **dict.fromkeys(
        ("hca_swa_indices", "hca_compressed_block_tables", "hca_seq_lens", "hca_sparse_indices_format"),
        ((None,), ONLY_HCA),
    ),
    "hca_is_causal": ((True,), ONLY_HCA),
    "hca_use_persistent": ((False,), ONLY_HCA),
    "sparse_indices_are_storage_offsets": (
        (None, False),
        "places as offsets of a strided pool's storage have no documented unit (mla/_core.py 2160)",
    ),
    "dsv4_inv_rope_cos_sin_cache": (
        (None,),
        "an output that is rotated back and quantised with packed scales is another result (mla/_core.py 2164)",
    ),
    "dsv4_output_scale": ((None,), "it goes with dsv4_inv_rope_cos_sin_cache"),
    "sparse_topk_lens_offset": ((0,), "only the backend cake takes it (mla/_core.py 2554)"),
    "kv_cache_format": (
        ("fp8",),
        "packed entries are SM120's and the backend cake's (mla/_core.py 1271), which the lab does not model",
    ),
    "request_order_plan": ((None,), "it goes with request_order, which only the backend cake takes (decode.py 3988)"),
}
# The values of other arguments that a block-sparse call allows (FlashInfer 0.7.2, decode.py 3911-3918 and 4074,
# trtllm_fmha_kernel_launcher.cu 274-287).
WITH_BLOCK_SPARSE: Reasons = {
    "backend": (("auto", "trtllm-gen"), "only trtllm-gen has block-sparse attention"),
    "window_left": ((-1,), "block-sparse attention has no window"),
    "mask": ((None,), "only XQA reads a draft mask, and it has no block-sparse attention"),
    "uses_shared_paged_kv_idx": ((True,), "block-sparse attention has one page id for K and V"),
    "skip_softmax_threshold_scale_factor": ((None,), "block-sparse attention does not skip parts of the softmax"),
    "causal_seqlens_kv_global": ((None,), "context parallelism has no block-sparse attention"),
}


def not_modelled(name: str, value: object, remedy: str) -> NoReturn:
    """Raise NotImplementedError for a value that FlashInfer supports and the lab does not. `remedy`: what to pass instead."""
    raise NotImplementedError(f"{name}={_shown(value)} is not modelled by the lab; {remedy}")


def check_modelled(call: Any, backends: Sequence[str], others: Sequence[str] = ("cake",)) -> None:
    """Raise an error for a backend, or a value of an argument in the tables `CHOICES` and `REFUSED`, that the lab does not
    support.

    Args:
        backends: names of the backends that the lab supports.
        others: names of FlashInfer's backends that the lab does not support.

    Raises:
        NotImplementedError: FlashInfer supports the backend or value, and the lab does not.
        TypeError, ValueError: FlashInfer does not support the backend or value.
    """
    for name, choices in CHOICES.items():
        value = getattr(call, name, choices[0])
        if not _is_one_of(value, choices):
            error = ValueError if isinstance(value, str) else TypeError
            raise error(f"{name} must be {_listed(choices)}, got {value!r}")
    for name, (allowed, why) in REFUSED.items():
        value = getattr(call, name, allowed[0])
        if not _is_one_of(value, allowed):
            if len(allowed) > 1 and not isinstance(value, bool):
                raise TypeError(f"{name} must be True, False or None, got {value!r}")
            not_modelled(name, value, f"{why}: pass {_listed(allowed)}")
    remedy = f"use {'one of ' if len(backends) > 1 else ''}{', '.join(backends)}"
    if call.backend in others:
        not_modelled("backend", call.backend, remedy)
    if call.backend not in backends:
        raise ValueError(f"backend={call.backend!r} is unknown; {remedy}")


def check_combination(call: Any, argument: str, required: Reasons) -> None:
    """Raise ValueError if the value of another argument is not allowed together with `argument`, such as "cp_world=2".
    `required` maps the name of each restricted argument, such as "mask", to (allowed values, reason).
    """
    for name, (allowed, why) in required.items():
        value = getattr(call, name)
        if isinstance(value, torch.Tensor) or value not in allowed:
            raise ValueError(f"{name} is {_shown(value)} with {argument}, but {why}: pass {_listed(allowed)}")


def _is_one_of(value: object, values: Sequence[Any]) -> bool:
    return any(value is each or (type(value) is type(each) and value == each) for each in values)


def _listed(values: Sequence[Any]) -> str:
    return " or ".join(map(repr, values))


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))})"
    return "a tensor" if isinstance(value, torch.Tensor) else repr(value)
