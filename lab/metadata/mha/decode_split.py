"""Divide a decode call into several: sort requests by length, divide them into groups of equal size, and make one call per
group.

SGLang 0.5.23 does so if ``SGLANG_TRTLLM_MHA_DECODE_SEQ_LEN_SPLITS`` is above 1 (`_run_fixed_q_len_decode` in
`trtllm_mha_backend.py`), except in a ragged verification. A kernel may choose its schedule for the batch's longest request,
which costs the short requests time. Dividing costs a sort, copies of queries, lengths, tables and outputs, and smaller calls.
All calls get the same ``max_seq_len``. `studies.decode_split` measures the gain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.calls.arguments import check_int
from lab.calls.problem import AttentionCall
from lab.kernels import prepare

DECODE = AttentionCall.DECODE.value


class DecodeSplit:
    """An implementation of FlashInfer's functions that wraps another one: it divides a decode call into several calls of the
    wrapped implementation.

    The first call has the shortest requests. All other functions are the wrapped ones. A divided call must have an `out`, and
    returns no LSE. A call with `cum_seq_lens_q` or with one request is not divided. A prepared call sorts the lengths on the
    device each time, so that a CUDA graph may capture it.

    Args:
        implementation: any object with FlashInfer's decode function, such as `lab.kernels.portable`.
        num_splits: number of calls; a batch with fewer requests has one call per request. If the requests cannot be divided
            equally, the first calls have one more request.

    Raises:
        TypeError, ValueError: `num_splits` is not an int, or below 1.
    """

    def __init__(self, implementation: Any, num_splits: int) -> None:
        self._implementation = implementation
        self._num_splits = check_int("num_splits", num_splits, 1, "it is the number of decode calls of a batch")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._implementation, name)

    def trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Tensor:
        """Run FlashInfer's decode call with these arguments as several calls of the wrapped implementation, and return
        `out`.
        """
        result: Tensor = self.prepare_trtllm_batch_decode_with_kv_cache(**arguments)()
        return result

    def prepare_trtllm_batch_decode_with_kv_cache(self, **arguments: Any) -> Callable[[], Any]:
        """Prepare all decode calls for the arguments of FlashInfer's call (see `lab.kernels.prepare`). Return a function that
        runs them and returns `out`.

        Raises:
            NotImplementedError: a divided call has an LSE, or no `out`.
        """
        num_requests = arguments["seq_lens"].shape[0]
        splits = min(self._num_splits, num_requests)
        if splits <= 1 or arguments.get("cum_seq_lens_q") is not None:
            return prepare(self._implementation, DECODE, **arguments)
        if arguments.get("return_lse") or arguments.get("lse") is not None or arguments.get("out") is None:
            raise NotImplementedError(
                "a decode call that is divided by length writes to out, and has no LSE: pass out alone"
            )
        return _divided(self._implementation, splits, arguments)


@dataclass(frozen=True, eq=False)
class _Group:
    """One of the calls into which a decode call is divided: the indices of its requests in the batch, copies of their inputs
    (`gathered`), and its output.
    """

    requests: Tensor  #: ``[n]`` int64, indices in the batch, a view that each sort rewrites
    #: pairs of a tensor over all requests of the batch, and its copy over the group's requests
    gathered: Sequence[tuple[Tensor, Tensor]]
    out: Tensor  #: ``[n, rows per request, ...]``

    def gather(self) -> None:
        for whole, own in self.gathered:
            torch.index_select(whole, 0, self.requests, out=own)


def _divided(implementation: Any, splits: int, arguments: dict[str, Any]) -> Callable[[], Tensor]:
    """Return a function that sorts the requests of a decode call with these `arguments` by length, divides them into `splits`
    groups, and for each group copies its inputs, makes a call of `implementation` and copies the output back.
    """
    lens, out = _movable(arguments["seq_lens"]), arguments["out"]
    of_requests = {
        "query": arguments["query"].unflatten(0, (len(lens), -1)),
        **{name: arguments[name] for name in ("block_tables", "seq_lens", "mask") if arguments.get(name) is not None},
    }
    outputs = out.unflatten(0, (len(lens), -1))
    sorted_lens, order = torch.sort(lens)
    groups, calls = [], []
    for requests in torch.tensor_split(order, splits):
        own = {name: whole.new_empty(len(requests), *whole.shape[1:]) for name, whole in of_requests.items()}
        gathered = [(_movable(of_requests[name]), _movable(tensor)) for name, tensor in own.items()]
        group = _Group(requests, gathered, outputs.new_empty(len(requests), *outputs.shape[1:]))
        group.gather()  # an implementation may look at lengths and tables when it prepares
        own |= {"query": own["query"].flatten(0, 1), "out": group.out.flatten(0, 1)}
        calls.append(prepare(implementation, DECODE, **arguments | own))
        groups.append(group)

    def run() -> Tensor:
        torch.sort(lens, out=(sorted_lens, order))
        for group, call in zip(groups, calls, strict=True):
            group.gather()
            call()
            _movable(outputs).index_copy_(0, group.requests, _movable(group.out))
        result: Tensor = out
        return result

    return run


def _movable(tensor: Tensor) -> Tensor:
    """Return the tensor in a form that torch can sort and gather: an unusual dtype is viewed as integers of its size."""
    unusual = {torch.uint16: torch.int16, torch.uint32: torch.int32}
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else unusual.get(tensor.dtype, tensor.dtype))
