"""A right model of DeepSeek-V4's call. A wrong kernel replaces one stage."""

from typing import Any

from torch import Tensor

from corpus.wrong import DSV4, Model
from lab.calls import DSV4DecodeCall, takes
from lab.calls.dsv4_decode import TwoPools
from lab.references.paged_attention import paged_attention


class DSV4Decode(Model, interface=(DSV4,)):
    """A right model of FlashInfer's sparse MLA call of DeepSeek-V4."""

    def __init__(self) -> None:
        self.trtllm_batch_decode_sparse_mla_dsv4 = takes(DSV4DecodeCall)(self.launch)

    def launch(self, call: DSV4DecodeCall) -> Any:
        problem = self.changed(call.problem(), call)
        out, _ = paged_attention(problem)
        self.finish(problem, out)
        return call.returned(out)

    def changed(self, problem: TwoPools, call: DSV4DecodeCall) -> TwoPools:
        return self.misread(problem, call)

    def finish(self, problem: TwoPools, out: Tensor) -> None:
        """A wrong kernel may change the rows of the output in place here."""
