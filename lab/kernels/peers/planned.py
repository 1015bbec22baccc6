"""FlashInfer's own wrappers under the names of its TRT-LLM calls. The wrappers plan on the host from the lengths."""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from lab.calls import AttentionCall, PagedAttention
from lab.gpus import Capability
from lab.kernels.flashinfer_call import Ready, capability_for, entries, refuse_planning_in_capture
from lab.kernels.support import Kernel, refuse_unsupported
from lab.kernels.support.peers import BY_BACKEND, fa_backend


class PlannedWrapper:
    """An implementation of TRT-LLM calls by FlashInfer's own wrappers with `backend` "fa2" or "fa3"; "": FA3 on SM90, else FA2.

    A function `<name>` copies lengths to the host in each call, so that no CUDA graph can capture the call. `plan_<name>`
    copies the lengths once: lengths, numbers of rows, page ids and masks must then not change between runs.
    """

    def __init__(
        self, module: str, call_types: Iterable[type[Any]], plan: Callable[[Any, Any, str], Ready], backend: str = ""
    ) -> None:
        def planned(call: Any, problem: Any) -> Ready:
            """Check and plan a call. Return a function that runs it. The class of `call` documents shapes and errors."""
            device = problem.query.device
            chosen = backend or fa_backend(capability_for(device))
            kernel = BY_BACKEND[problem.call][chosen]
            refuse_unsupported(kernel, problem)
            refuse_planning_in_capture(kernel.name, device)
            return plan(call, problem, chosen)

        self.__name__ = f"{module}:{backend}" if backend else module
        self._backend = backend
        for call_type in call_types:
            for entry in entries("plan", call_type, planned):
                setattr(self, entry.__name__, entry)

    def kernel_for(self, call: AttentionCall, capability: Capability) -> Kernel:
        return BY_BACKEND[call][self._backend or fa_backend(capability)]


def live_pages(problem: PagedAttention) -> tuple[torch.Tensor, ...]:
    """Return int32 tensors for `plan` of FlashInfer's wrappers: (number of keys of each request; where each request begins in
    the list of page ids; this list, on the device; number of tokens in each request's last page). The last number is
    `page_size` for a request without pages, so that FlashInfer's (pages - 1) * page_size + last_page_len is 0.
    """
    kv_lens = problem.seq_lens.tolist()
    counts = [-(-kv_len // problem.page_size) for kv_len in kv_lens]
    live = [problem.k_block_tables[request, :count] for request, count in enumerate(counts)]
    last_page_len = [(kv_len - 1) % problem.page_size + 1 for kv_len in kv_lens]
    on_host = partial(torch.tensor, dtype=torch.int32)
    return on_host(kv_lens), on_host([0, *itertools.accumulate(counts)]), torch.cat(live), on_host(last_page_len)
