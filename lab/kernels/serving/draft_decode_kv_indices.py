"""The K/V lists of a multi-step draft in Triton, for any GPU that Triton compiles for and for its CPU interpreter.

Glossary:

* step: one decode pass of the draft model. It has a row of `kv_indices` and a row of `kv_indptr`.
* branch: one of the `topk` continuations that each request drafts. A branch drafts one token per step.
* prefix: the tokens that a request has before the draft. With a window, a list has only its last tokens and its first (sink).
* slot: the index of a token in the K/V pool. `v2p` maps virtual slots and pages to those of the pool.
* list: the slots that one branch reads in one step: those of its prefix and of the tokens that it has drafted, including the
  step's own. The lists of a step lie end to end, and list i ends before boundary i + 1 of `kv_indptr`.
* block: the tokens that a program copies at a time.
* share: the blocks of a prefix that one of n programs copies: every n-th block.

One request with a prefix of 3 tokens (p), two branches (a, b), two steps, page size 1::

    req_to_token   p0 p1 p2 a0 a1 b0 b1
    kv_indices[0]  p0 p1 p2 a0 p0 p1 p2 b0          kv_indptr[0]  0 4 8
    kv_indices[1]  p0 p1 p2 a0 a1 p0 p1 p2 b0 b1    kv_indptr[1]  0 5 10
"""

import torch
import triton
from torch import Tensor

from lab.calls.arguments import check_int, check_tensor, check_vector
from lab.kernels.serving.arguments import INDEX_DTYPES, check_matrix
from lab.kernels.serving.draft_decode_kv_indices_kernel import (
    STORE_ALIGNMENT,
    ListsForm,
    _serial_kernel,
    _spread_kernel,
)
from lab.kernels.support import refuse_without_triton
from lab.named_enum import NamedEnum

SERIAL_BLOCK_TOKENS = 128  # of a block in the SERIAL schedule, as in SGLang 0.5.11
# Tokens of a block in the other two schedules, as in SGLang 0.5.23. With SPREAD each of 128 threads stores 16 bytes of int32.
# This number and MAX_SPREAD_PROGRAMS were measured: results/nvidia-h200/kernels.md, "Metadata kernels".
BLOCK_TOKENS = 512
# Largest number of programs that divide a list with TOKEN_BLOCKS, as in SGLang 0.5.23 (`common_template` of
# `flashinfer_backend.py`).
MAX_TOKEN_BLOCKS = 32
# Largest number of programs that copy prefixes with SPREAD, before it is rounded up to a multiple of the requests: three times
# as many as an H200 runs at a time. With more, programs of short requests have nothing to copy. With fewer, programs of long
# requests copy many blocks one after another.
MAX_SPREAD_PROGRAMS = 6144
BLOCK_REQUESTS = 256  # requests whose lengths a program sums at a time


class Schedule(NamedEnum):
    SERIAL = "serial"  # one program per (step, request, branch) copies a whole list, as in SGLang
    TOKEN_BLOCKS = "token_blocks"  # several programs divide each list: SGLang's kernel for long contexts (0.5.23)
    SPREAD = "spread"  # several programs divide each prefix; a program reads a slot once and writes it to all lists


def generate_draft_decode_kv_indices(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    paged_kernel_lens: Tensor,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    positions: Tensor,
    *,
    topk: int,
    page_size: int,
    window_size: int = 0,
    sink_size: int = 0,
    entry_page_size: int = 1,
    v2p: Tensor | None = None,
    schedule: Schedule = Schedule.SPREAD,
) -> None:
    """Write the K/V lists of a multi-step draft: for each step, request and branch, the K/V slots that the branch reads.

    `lab.references.generate_draft_decode_kv_indices` defines the lists, and documents the arguments that are not listed here.
    All tensors are int32 or int64, vectors contiguous, and matrices have contiguous rows. The host reads no tensor's contents,
    so a CUDA graph can capture the launch. Not written: cells of ``kv_indices`` after a step's last list, and column 0 of
    ``kv_indptr``, in which the engine keeps 0. A list that is too long for its row of ``kv_indices`` is cut at the row's end.
    Tokens beyond the last column of ``req_to_token`` get slot 0.

    Triton compiles one kernel per schedule, number of steps, ``topk``, page size, window, sink and dtypes, and another if the
    address of ``kv_indices`` is not a multiple of 16 bytes, but not per batch size, length or row width.

    Args:
        kv_indices: ``[num_steps, capacity]``, written in place: one row per step, with the lists of all branches.
        kv_indptr: at least ``[num_steps, num_requests * topk + 1]``, written in place: boundaries of the lists.
        v2p: physical page of each virtual page, for all that ``req_to_token`` contains. None: slots are not virtual.
        schedule: SPREAD, the lab's own, or one of SGLang's two schedules for comparison.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: an argument has the wrong shape, stride or device, a number is too small, a sink has no window, or
            ``entry_page_size`` is neither 1 nor ``page_size``.
        NotImplementedError: Triton does not run on the device of ``kv_indices``.
    """
    vectors = {"req_pool_indices": req_pool_indices, "paged_kernel_lens": paged_kernel_lens, "positions": positions}
    matrices = {"req_to_token": req_to_token, "kv_indices": kv_indices, "kv_indptr": kv_indptr}
    _check_numbers(topk, page_size, window_size, sink_size, entry_page_size)
    _check_tensors(vectors, matrices, topk, v2p)
    refuse_without_triton(kv_indices.device)
    num_requests, num_steps = req_pool_indices.shape[0], kv_indices.shape[0]
    if num_requests == 0 or num_steps == 0:
        return
    block_tokens = SERIAL_BLOCK_TOKENS if schedule is Schedule.SERIAL else BLOCK_TOKENS
    numbers = (num_steps, topk, page_size, window_size, sink_size, entry_page_size)
    blocks = (triton.next_power_of_2(num_steps), BLOCK_REQUESTS, block_tokens)
    form = ListsForm(*numbers, *blocks, by_token_blocks=schedule is Schedule.TOKEN_BLOCKS)
    row_tokens = req_to_token.shape[1] * entry_page_size
    longest = min(row_tokens, window_size + sink_size) if window_size else row_tokens
    kernel = _spread_kernel if schedule is Schedule.SPREAD else _serial_kernel
    tensors = (req_pool_indices, req_to_token, paged_kernel_lens, kv_indices, kv_indptr, positions)
    with torch.cuda.device_of(kv_indices):  # Triton launches on the current device
        kernel[_grid(schedule, num_steps, num_requests, topk, longest)](
            *tensors,
            num_requests,
            req_to_token.shape[1],
            req_to_token.stride(0),
            kv_indices.shape[1],
            kv_indices.stride(0),
            kv_indptr.stride(0),
            v2p,
            FORM=form,
        )


def _grid(schedule: Schedule, num_steps: int, num_requests: int, topk: int, longest: int) -> tuple[int, ...]:
    """Return the grid of a launch. `longest` is an upper bound of the number of prefix tokens in one K/V list."""
    if schedule is Schedule.SPREAD:
        # Row 0 of the grid writes kv_indptr, and row 1 + i the lists of request i.
        blocks = triton.cdiv(longest + STORE_ALIGNMENT.value, BLOCK_TOKENS)
        return min(blocks, triton.cdiv(MAX_SPREAD_PROGRAMS, num_requests)), num_requests + 1
    blocks = min(MAX_TOKEN_BLOCKS, max(1, triton.cdiv(longest, BLOCK_TOKENS)))
    return num_steps * (blocks if schedule is Schedule.TOKEN_BLOCKS else 1), num_requests, topk


def _check_numbers(topk: int, page_size: int, window_size: int, sink_size: int, entry_page_size: int) -> None:
    check_int("topk", topk, 1, "it is the number of branches per request")
    check_int("page_size", page_size, 1, "it is the number of tokens per page")
    check_int("window_size", window_size, 0, "it is the number of tokens at a prefix's end, and 0 stands for no window")
    check_int("sink_size", sink_size, 0, "it is the number of tokens at a prefix's start")
    if sink_size and not window_size:
        raise ValueError(f"sink_size={sink_size} has no meaning without a window; give window_size, or leave it 0")
    if check_int("entry_page_size", entry_page_size, 1, "it is 1 or page_size") not in (1, page_size):
        raise ValueError(f"entry_page_size={entry_page_size} must be 1 or page_size={page_size}")


def _check_tensors(vectors: dict[str, Tensor], matrices: dict[str, Tensor], topk: int, v2p: Tensor | None) -> None:
    num_requests = check_tensor("req_pool_indices", vectors["req_pool_indices"]).numel()
    for name, tensor in vectors.items():
        check_vector(name, tensor, num_requests * (topk if name == "positions" else 1), INDEX_DTYPES)
    for name, matrix in matrices.items():
        check_matrix(name, matrix, INDEX_DTYPES)
    kv_indices, kv_indptr = matrices["kv_indices"], matrices["kv_indptr"]
    min_steps, min_boundaries = kv_indices.shape[0], num_requests * topk + 1
    if kv_indptr.shape[0] < min_steps or kv_indptr.shape[1] < min_boundaries:
        raise ValueError(
            f"kv_indptr must be at least [num_steps, num_requests * topk + 1] = {[min_steps, min_boundaries]}, "
            f"got {list(kv_indptr.shape)}"
        )
    tensors = vectors | matrices
    if v2p is not None:
        check_vector("v2p", v2p, check_tensor("v2p", v2p).numel(), INDEX_DTYPES)
        tensors["v2p"] = v2p
    for name, tensor in tensors.items():
        if tensor.device != kv_indices.device:
            raise ValueError(f"{name} is on {tensor.device}, but kv_indices is on {kv_indices.device}; move it there")
