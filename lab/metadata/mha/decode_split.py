"""Divide a decode call into several: sort the requests by length, divide them into groups of equal size, and make one call per
group.

SGLang 0.5.23 does so if ``SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS`` is above 1 (`_run_fixed_q_len_decode` in
`trtllm_mha_backend.py`), except in a ragged verification. A kernel may choose its schedule for the batch's longest request,
which costs the short requests time. Dividing costs a sort, copies and smaller calls. `studies.decode_split` measures the gain.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.arguments import check_int
from lab.calls.problem import AttentionCall
from lab.kernels import prepare
from lab.metadata.engine.backend import in_turn

DECODE = AttentionCall.DECODE.value


class DecodeSplit:
    """Wraps an `implementation` of FlashInfer's functions. Each decode call is divided into `num_splits` smaller calls.

    The first call has the shortest requests. If the requests cannot be divided equally, the first calls have one request more.
    A divided call must have an `out`, and returns no LSE. A call with `cum_seq_lens_q` or with one request is not divided. A
    prepared call sorts the lengths on the device each time, so that a CUDA graph may capture it.
    """

    def __init__(self, implementation: Any, num_splits: int) -> None:
        self._implementation = implementation
        self._num_splits = check_int("num_splits", num_splits, 1, "it is the number of decode calls of a batch")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._implementation, name)

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Tensor:
        result: Tensor = self.prepare_trtllm_batch_decode_with_kv_cache(**arguments)()
        return result

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Callable[[], Any]:
        """Return a function that makes the smaller calls. NotImplementedError: a divided call has an LSE or no `out`."""
        num_requests = arguments["seq_lens"].shape[0]
        splits = min(self._num_splits, num_requests)
        if splits <= 1 or arguments.get("cum_seq_lens_q") is not None:
            return prepare(self._implementation, DECODE, **arguments)
        if arguments.get("return_lse") or arguments.get("lse") is not None or arguments.get("out") is None:
            raise NotImplementedError(
                "a decode call that is divided by length writes to out, and has no LSE: pass out alone"
            )
        lens, out = _movable(arguments["seq_lens"]), arguments["out"]
        of_requests = {"query": arguments["query"].unflatten(0, (len(lens), -1))}
        present = [name for name in ("block_tables", "seq_lens", "mask") if arguments.get(name) is not None]
        of_requests |= {name: arguments[name] for name in present}
        outputs = out.unflatten(0, (len(lens), -1))
        sorted_lens, order = torch.sort(lens)
        steps: list[Callable[[], object]] = [partial(torch.sort, lens, out=(sorted_lens, order))]
        for requests in torch.tensor_split(order, splits):  # views, which each sort rewrites
            own = {name: whole.new_empty(len(requests), *whole.shape[1:]) for name, whole in of_requests.items()}
            copies = [
                partial(torch.index_select, _movable(of_requests[name]), 0, requests, out=_movable(tensor))
                for name, tensor in own.items()
            ]
            for copy in copies:  # an implementation may look at lengths and tables when it prepares
                copy()
            own_out = outputs.new_empty(len(requests), *outputs.shape[1:])
            own |= {"query": own["query"].flatten(0, 1), "out": own_out.flatten(0, 1)}
            steps += [*copies, prepare(self._implementation, DECODE, **arguments | own)]
            steps.append(partial(_movable(outputs).index_copy_, 0, requests, _movable(own_out)))
        return in_turn(steps, out)


def _movable(tensor: Tensor) -> Tensor:
    unusual = {torch.uint16: torch.int16, torch.uint32: torch.int32}
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else unusual.get(tensor.dtype, tensor.dtype))
