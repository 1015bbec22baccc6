"""FlashInfer's attention calls as dataclasses. A call checks its arguments and converts them to an attention problem, which has
the same field names for all calls.

References and kernels share this package, which imports only torch. On a CPU the contents of tensors are checked. On a GPU only
`check_values` and `refuse_nan` check them, which wait for the GPU.
"""

from lab.calls.dsv4_decode import DSV4DecodeCall
from lab.calls.entry import made_at_once, takes
from lab.calls.features import Feature
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.paged import ContextCall, DecodeCall
from lab.calls.problem import AttentionCall, PagedAttention, refuse_nan
from lab.calls.ragged_context import RaggedAttention, RaggedContextCall

Problem = PagedAttention | RaggedAttention
CALL_TYPES = {
    each.function: each for each in (DecodeCall, ContextCall, MLADecodeCall, RaggedContextCall, DSV4DecodeCall)
}
__all__ = [
    "CALL_TYPES",
    "AttentionCall",
    "ContextCall",
    "DSV4DecodeCall",
    "DecodeCall",
    "Feature",
    "MLADecodeCall",
    "PagedAttention",
    "Problem",
    "RaggedAttention",
    "RaggedContextCall",
    "made_at_once",
    "refuse_nan",
    "takes",
]
