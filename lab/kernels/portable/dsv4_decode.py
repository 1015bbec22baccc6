"""FlashInfer's sparse MLA call of DeepSeek-V4 in Triton: the MLA decode kernel, which reads selected entries of two pools."""

from lab.calls import DSV4DecodeCall, takes
from lab.kernels.portable.kept_calls import kept_at_once
from lab.kernels.portable.mla_decode import prepared_mla
from lab.kernels.portable.triton_call import TritonCall
from lab.kernels.support.portable import PORTABLE_DSV4


@takes(DSV4DecodeCall)
def prepare_trtllm_batch_decode_sparse_mla_dsv4(call: DSV4DecodeCall) -> TritonCall:
    """Return a prepared call: DeepSeek-V4's attention, in which each row attends to selected entries of two pools.

    `lab.calls.DSV4DecodeCall` documents parameters, shapes, dtypes and errors. For products, checks and rows that are not
    written see `prepare_trtllm_batch_decode_with_kv_cache_mla`.
    """
    return prepared_mla(PORTABLE_DSV4, call)


trtllm_batch_decode_sparse_mla_dsv4 = kept_at_once(prepare_trtllm_batch_decode_sparse_mla_dsv4)
