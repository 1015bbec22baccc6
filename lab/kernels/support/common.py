"""What the rules of `lab.kernels.support` share: the kernels by name, what Triton runs and where, and words of a refusal."""

import enum

import torch

from lab.calls.problem import HALF_DTYPES, Scale
from lab.gpus import Capability, family_of, family_that_runs, sm_name

E4M3 = torch.float8_e4m3fn


class Kernel(enum.Enum):
    """An implementation behind one of the calls."""

    PORTABLE = "the portable Triton kernel"
    PORTABLE_MLA = "the portable Triton MLA kernel"
    XQA = "XQA"
    FMHA_V2 = "trtllm_fmha_v2_prefill"
    TRTLLM_GEN_DECODE = "trtllm-gen decode"
    TRTLLM_GEN_CONTEXT = "trtllm-gen context"
    XQA_MLA = "XQA MLA"
    TRTLLM_GEN_MLA = "trtllm-gen MLA"
    FA2_MLA = "BatchMLAPagedAttentionWrapper with FA2"
    FA3_MLA = "BatchMLAPagedAttentionWrapper with FA3"
    PORTABLE_RAGGED = "the portable Triton ragged kernel"
    TRTLLM_GEN_RAGGED = "trtllm-gen ragged"
    FA2_RAGGED = "BatchPrefillWithRaggedKVCacheWrapper with FA2"
    FA3_RAGGED = "BatchPrefillWithRaggedKVCacheWrapper with FA3"

    def __repr__(self) -> str:
        return f"Kernel.{self.name}"


def triton_interprets() -> bool:
    """True where Triton runs its kernels in the interpreter, on a CPU: TRITON_INTERPRET=1 was set when it was imported."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def no_triton(capability: Capability | None) -> str | None:
    if capability is None and not triton_interprets():
        return "Triton kernels run on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1 first"
    if capability is not None and family_of(capability) is None:
        return wrong_gpu("Triton kernels", "SM80 and later", capability)
    return None


def portable_dtypes(
    name: str, capability: Capability | None, query: torch.dtype, kv: torch.dtype, out: torch.dtype
) -> str | None:
    """The kernels' own limits, and those of Triton 3.7 (its NVIDIA back end's `supported_fp8_dtypes`)."""
    reason = no_triton(capability)
    if reason is not None:
        return reason
    if capability is not None and not family_that_runs(capability).has_e4m3 and E4M3 in (query, kv, out):
        return f"Triton compiles e4m3 for SM89 and later, and this is {sm_name(capability)}"
    if query not in (*HALF_DTYPES, E4M3):
        return f"{name} takes fp16, bf16 or e4m3 queries, not {query}"
    if kv not in (query, E4M3):
        return f"{name} takes K/V in the query's dtype or e4m3, not {kv} (NVFP4)"
    if out not in (*HALF_DTYPES, E4M3, torch.float32):
        return f"{name} writes fp16, bf16, e4m3 or float32, not {out}"
    return None


def is_one(scale: Scale) -> bool:
    return not isinstance(scale, torch.Tensor) and scale == 1


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether both are views of one allocation."""
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def wrong_gpu(name: str, needed: str, capability: Capability | None) -> str:
    return f"{name} needs a GPU of {needed}, this is {'a CPU' if capability is None else sm_name(capability)}"


def listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
