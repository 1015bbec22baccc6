"""FlashInfer's sparse MLA call of DeepSeek-V4, with trtllm-gen's kernel."""

from lab.calls import DSV4DecodeCall
from lab.calls.dsv4_decode import TwoPools
from lab.kernels.flashinfer_call import PreparedCall, but_defaults, prepared, supported_kernel, trtllm_gen_memory


def prepare_dsv4(call: DSV4DecodeCall, problem: TwoPools) -> PreparedCall:
    """Return FlashInfer's sparse MLA call of DeepSeek-V4, ready to run. It serves decode, verify, draft extend and prefill.

    `lab.calls.DSV4DecodeCall` documents parameters, shapes and errors. Raises NotImplementedError with the reason if the GPU's
    kernel does not support the call (`lab.kernels.support.why_not`). If `multi_ctas_kv_counter_buffer` is None, the first bytes
    of `workspace_buffer` are the counters, because FlashInfer's own buffer has one counter per request and head, and the kernel
    needs one per row and head (SGLang 0.5.23, `deepseek_v4_trtllm_backend.py` 90).
    """
    supported_kernel(problem, call.backend)
    arguments = but_defaults(call, {"backend": "trtllm-gen", **trtllm_gen_memory(call, problem)})
    return prepared(call.module, call.function.value, arguments, ())
