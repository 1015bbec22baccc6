"""FlashInfer's `BatchMLAPagedAttentionWrapper` behind the name of the MLA decode call: FA3 on SM90, FA2 elsewhere.

A second implementation, for GPUs that trtllm-gen and XQA have no MLA kernel for. It plans on the host from the lengths: each
call copies them there and waits, and none can be captured in a CUDA graph. `plan` does that once, for lengths that stay.
`fa2` and `fa3` are the two by name, such as `python -m lab.checks lab.kernels.peers.flashinfer_mla:fa2`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from lab.calls import takes
from lab.calls.mla_decode import MLADecodeCall
from lab.calls.problem import E4M3, PagedAttention
from lab.kernels.flashinfer_call import (
    behind_semaphores,
    fa_backend,
    installed,
    refuse_planning_in_capture,
    workspace_for,
)
from lab.kernels.support import refuse_unsupported
from lab.kernels.support.peers import BY_BACKEND
from lab.kernels.support.peers import kernel_for as kernel_for

WRAPPER = "BatchMLAPagedAttentionWrapper"


class BatchMLA:
    """The wrapper with one of its backends.

    Attributes:
        backend: "fa2" or "fa3"; "" for FA3 on SM90 and FA2 elsewhere.
    """

    def __init__(self, backend: str = "") -> None:
        self.backend = backend
        self.__name__ = f"{__name__}:{backend}" if backend else __name__
        self.trtllm_batch_decode_with_kv_cache_mla = takes(MLADecodeCall)(self._run)
        self.plan = takes(MLADecodeCall)(self._plan)

    def _run(self, call: MLADecodeCall) -> Any:
        """The MLA decode call, planned and run. Shapes and errors are `lab.calls.MLADecodeCall`'s.

        What the backend does not take raises NotImplementedError with the reason of `lab.kernels.support.why_not`; FlashInfer's
        own planner raises ValueError for more.
        """
        return self._plan(call)()

    def _plan(self, call: MLADecodeCall) -> Callable[[], Any]:
        """The same call, planned: it may be made any number of times, in a CUDA graph too.

        Lengths, rows and page ids are those of the planning; the query's and the cache's contents may change.
        """
        problem = call.problem()
        out, lse = problem.results()
        if problem.num_rows == 0:
            return lambda: call.returned(out, lse)
        backend = self.backend or fa_backend(problem.query.device)
        refuse_unsupported(BY_BACKEND[problem.call][backend], problem)
        refuse_planning_in_capture(WRAPPER, problem.query.device)
        wrapper = _planned(call, problem, backend)
        arguments = _run_arguments(call, problem, out, lse)

        def run() -> Any:
            wrapper.run(**arguments)
            return call.returned(out, lse)

        return run


def _planned(call: MLADecodeCall, problem: PagedAttention, backend: str) -> Any:
    """A wrapper for this call alone."""
    wrapper_type, _ = installed("flashinfer.mla", WRAPPER)
    scratch = behind_semaphores(workspace_for(call.workspace_buffer, problem.query.device))
    wrapper = wrapper_type(scratch, backend=backend)
    quantised = problem.k_cache.dtype == E4M3
    wrapper.plan(
        metadata=_metadata(problem),
        num_heads=problem.num_qo_heads,
        head_dim_ckv=problem.v_head_dim,
        head_dim_kpe=problem.head_dim - problem.v_head_dim,
        page_size=problem.page_size,
        causal=True,
        sm_scale=float(problem.bmm1_scale) / _scale_of_keys(problem),
        q_data_type=problem.query.dtype,
        kv_data_type=problem.k_cache.dtype,
        scale_mode="kv-per-tensor" if quantised else "default",
        lse_mode=(call.return_lse_base or "base2") if call.return_lse else "none",
        output_dtype=problem.out_dtype,
    )
    return wrapper


def _scale_of_keys(problem: PagedAttention) -> float:
    """What keys are multiplied by, as values are, unasked: the cache's scale, as the kernel rounds it."""
    return float(torch.tensor(float(problem.bmm2_scale)).to(problem.query.dtype))


def _metadata(problem: PagedAttention) -> Any:
    """The requests as CSR, which FA2 and FA3 plan from: rows, pages and lengths."""
    metadata_type, _ = installed("flashinfer.mla", "MLAPlanMetadata")
    kv_lens = problem.seq_lens.tolist()
    pages = [-(-kv_len // problem.page_size) for kv_len in kv_lens]
    starts = _row_starts(problem)
    live = [problem.k_block_tables[request, :count] for request, count in enumerate(pages)]
    return metadata_type.csr(
        qo_indptr=torch.tensor(starts, dtype=torch.int32),
        kv_indptr=torch.tensor([0, *itertools.accumulate(pages)], dtype=torch.int32),
        kv_indices=torch.cat(live),
        kv_len_arr=torch.tensor(kv_lens, dtype=torch.int32),
    )


def _row_starts(problem: PagedAttention) -> list[int]:
    """[batch_size + 1]."""
    if problem.cu_seqlens_q is not None:
        return problem.cu_seqlens_q.tolist()
    return list(range(0, problem.num_rows + 1, problem.max_q_len))


def _run_arguments(
    call: MLADecodeCall, problem: PagedAttention, out: torch.Tensor, lse: torch.Tensor | None
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "query": problem.query,
        "kv_cache": problem.k_cache.squeeze(1),
        "out": out,
        "lse": lse,
        "return_lse": call.return_lse,
        "return_lse_base_on_e": call.return_lse and call.return_lse_base == "basee",
    }
    if problem.k_cache.dtype == E4M3:
        scale = float(problem.bmm2_scale)
        arguments |= {"ckv_scale": scale, "kpe_scale": scale}
    return arguments


fa2 = BatchMLA("fa2")
fa3 = BatchMLA("fa3")
_fitting = BatchMLA()
trtllm_batch_decode_with_kv_cache_mla = _fitting.trtllm_batch_decode_with_kv_cache_mla
plan = _fitting.plan
