"""FlashInfer's sparse MLA call of DeepSeek-V4 under its own name. Only trtllm-gen's kernel is run."""

from lab.calls import DSV4DecodeCall
from lab.calls.dsv4_decode import TwoPools
from lab.kernels.entries import entries
from lab.kernels.flashinfer_call import PreparedCall, but_defaults, prepared, supported_kernel, trtllm_gen_memory


def _prepare(call: DSV4DecodeCall, problem: TwoPools) -> PreparedCall:
    """Prepare FlashInfer's sparse MLA call of DeepSeek-V4: decode, verify, draft extend and prefill.

    `lab.calls.DSV4DecodeCall` documents parameters, shapes and errors. If `multi_ctas_kv_counter_buffer` is None, the first
    bytes of `workspace_buffer` are the counters. FlashInfer's own would be too small for several rows per request: it counts
    requests, and the kernel rows (SGLang 0.5.23, `deepseek_v4_trtllm_backend.py` 90). If the GPU's kernel does not support the
    call, NotImplementedError is raised with the reason of `lab.kernels.support.why_not`.
    """
    supported_kernel(problem, call.backend)
    arguments = but_defaults(call, {"backend": "trtllm-gen", **trtllm_gen_memory(call, problem)})
    return prepared(call.module, call.function.value, arguments, ())


prepare_trtllm_batch_decode_sparse_mla_dsv4, trtllm_batch_decode_sparse_mla_dsv4 = entries(
    "prepare", DSV4DecodeCall, _prepare
)
