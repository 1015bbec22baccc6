"""Which kernel runs each of FlashInfer's TRT-LLM functions: trtllm-gen's, or XQA or fmha_v2 on GPUs without trtllm-gen."""

from lab.calls.problem import AttentionCall
from lab.gpus import Capability, family_of
from lab.kernels.support.fmha_v2 import FMHA_V2
from lab.kernels.support.kernel import Kernel
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_CONTEXT, TRTLLM_GEN_DECODE, TRTLLM_GEN_MLA, TRTLLM_GEN_RAGGED
from lab.kernels.support.xqa import XQA, XQA_MLA

# trtllm-gen's kernel, and what FlashInfer has elsewhere.
BY_CALL = {
    AttentionCall.DECODE: (TRTLLM_GEN_DECODE, XQA),
    AttentionCall.CONTEXT: (TRTLLM_GEN_CONTEXT, FMHA_V2),
    AttentionCall.MLA_DECODE: (TRTLLM_GEN_MLA, XQA_MLA),
    AttentionCall.RAGGED_CONTEXT: (TRTLLM_GEN_RAGGED, TRTLLM_GEN_RAGGED),
}
KERNELS = tuple(dict.fromkeys(kernel for pair in BY_CALL.values() for kernel in pair))


def kernel_for(call: AttentionCall, capability: Capability, backend: str = "auto") -> Kernel:
    """Return the kernel that FlashInfer runs for a call on a GPU. `why_not` says whether that kernel supports the call there.

    Args:
        call: one of the four calls. The context call runs fmha_v2 where there is no trtllm-gen, as in SGLang 0.5.23.
        capability: (major, minor) of the GPU.
        backend: the call's `backend`: "auto", "trtllm-gen" or "xqa". The lab leaves CuTe DSL out.
    """
    if backend == "auto":
        family = family_of(capability)
        backend = "xqa" if family is None or family.trtllm_backend is None else family.trtllm_backend
    return BY_CALL[call][0 if backend == "trtllm-gen" else 1]
