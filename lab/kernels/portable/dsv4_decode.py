"""FlashInfer's sparse MLA call of DeepSeek-V4 in Triton: the MLA decode kernel with entries selected from two pools."""

from lab.calls import DSV4DecodeCall, takes
from lab.kernels.portable.mla_decode import prepared_mla
from lab.kernels.portable.triton_call import TritonCall
from lab.kernels.support.portable import PORTABLE_DSV4


@takes(DSV4DecodeCall)
def prepare_trtllm_batch_decode_sparse_mla_dsv4(call: DSV4DecodeCall) -> TritonCall:
    """Return a prepared call of DeepSeek-V4's sparse MLA. `lab.calls.DSV4DecodeCall` documents shapes and errors. On a GPU,
    lengths and indices are not checked. A run returns the output, with the query's shape.
    """
    return prepared_mla(PORTABLE_DSV4, call)
