"""The kernel that runs each of FlashInfer's TRT-LLM functions: trtllm-gen's, or XQA or fmha_v2 on GPUs without trtllm-gen."""

from lab.calls.problem import AttentionCall
from lab.gpus import Capability, trtllm_backend_of
from lab.kernels.support.cake import CAKE
from lab.kernels.support.dsv4 import TRTLLM_GEN_DSV4
from lab.kernels.support.fmha_v2 import FMHA_V2
from lab.kernels.support.kernel import Kernel
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_KERNELS
from lab.kernels.support.xqa import XQA, XQA_MLA

KERNELS = (CAKE, *TRTLLM_GEN_KERNELS, TRTLLM_GEN_DSV4, XQA, FMHA_V2, XQA_MLA)
TRTLLM_GEN = {call: kernel for kernel in (*TRTLLM_GEN_KERNELS, TRTLLM_GEN_DSV4) for call in kernel.calls}
# The kernel of each call on GPUs without trtllm-gen. If only trtllm-gen has one, `why_not` refuses the call there.
ELSEWHERE = {call: kernel for kernel in KERNELS[1:] for call in kernel.calls}


def kernel_for(call: AttentionCall, capability: Capability, backend: str = "auto", of_one_rank: bool = False) -> Kernel:
    """Return the kernel that FlashInfer runs for a call on a GPU. `why_not` says whether that kernel supports the call there.

    Args:
        call: FlashInfer's function. On GPUs without trtllm-gen, CONTEXT runs fmha_v2, as in SGLang 0.5.23.
        capability: (major, minor) of the GPU.
        backend: the call's `backend`: "auto", "trtllm-gen" or "xqa". "cute-dsl" raises NotImplementedError.
        of_one_rank: True if the call has only the keys of one rank of decode context parallelism.
    """
    if backend == "cute-dsl":
        raise NotImplementedError(
            "lab.kernels.trtllm does not run FlashInfer's CuTe DSL kernels: use backend 'auto' or 'trtllm-gen', or "
            "lab.references"
        )
    if of_one_rank and call is AttentionCall.DECODE:
        return CAKE
    return (TRTLLM_GEN if trtllm_backend_of(capability, backend) == "trtllm-gen" else ELSEWHERE)[call]
