"""The workspace of FlashInfer's calls: 8 MiB that are zero between calls, followed by scratch memory with any contents.

The first 8 MiB are XQA's semaphores, which it leaves zero (FlashInfer 0.7.2, `xqa_batch_decode_with_kv_cache` and
`xqa_batch_decode_with_kv_cache_mla`). trtllm-gen uses the whole workspace as scratch: the statistics of a call with LSE, then
the partial results of splits (trtllm_fmha_kernel_launcher.cu, `softmaxStatsPtr` and `multiCtasKvScratchPtr`; kernelParams.h,
`ptrPartialStats`). Its counters are in `multi_ctas_kv_counter_buffer`, which it leaves zero. FlashInfer allocates and fills
this buffer in each call without one. `lab.kernels.trtllm` passes the scratch to trtllm-gen as its workspace and the first 8 MiB
as its counters, so that calls of every backend can use one workspace.
"""

import torch

from lab.gpus import capability_of, trtllm_backend_of

SEMAPHORE_BYTES = 8 * 2**20


def semaphores_and_scratch(workspace: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two views of a contiguous workspace: its semaphores, uint8 [SEMAPHORE_BYTES], and the scratch after them."""
    data = workspace.view(-1).view(torch.uint8)
    return data[:SEMAPHORE_BYTES], data[SEMAPHORE_BYTES:]


def counts_in_workspace(backend: str, device: torch.device) -> bool:
    """Return False for trtllm-gen (even if "auto" selects it), whose counters are not in the workspace, else True."""
    return trtllm_backend_of(capability_of(device), backend) != "trtllm-gen"
