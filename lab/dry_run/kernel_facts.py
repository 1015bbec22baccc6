"""Read from the kernel table what determines the attention of a trtllm-gen kernel: dtypes, head dims, mask, phase and
layout.
"""

import enum
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lab.calls.problem import E4M3
from lab.dry_run.kernel_table import KernelTable, newest


class MaskType(enum.IntEnum):
    """The masks of trtllm-gen's kernels: FlashInfer's `TrtllmGenAttentionMaskType` (`fmhaRunnerParams.h`)."""

    DENSE = 0
    CAUSAL = 1
    SLIDING_OR_CHUNKED_CAUSAL = 2
    CUSTOM = 3


DTYPES = {
    "DATA_TYPE_FP16": torch.float16,
    "DATA_TYPE_BF16": torch.bfloat16,
    "DATA_TYPE_E4M3": E4M3,
    "DATA_TYPE_E2M1": torch.uint8,  # two NVFP4 elements per byte
}
CONTEXT = 0  # FmhaKernelType::Context
PAGED = 2  # QkvLayout::PagedKv


@dataclass(frozen=True)
class KernelFacts:
    """The properties of a trtllm-gen kernel that determine what it computes, read from its row of the kernel table."""

    name: str  #: name under which the kernel is launched
    dtypes: Mapping[
        str, torch.dtype
    ]  #: of the elements of "Q", "K", "V" and "O"; uint8 is NVFP4, two elements per byte
    #: head_dim of the query and K, and of V and the output
    head_dim_qk: int
    head_dim_v: int
    mask: MaskType  #: the mask in the kernel's name. A generation kernel is causal even if its name says dense.
    is_context: bool  #: True for the context phase, False for generation (decode calls)
    is_paged: bool  #: K and V are paged
    is_sparse: bool  #: the kernel reads only selected keys

    @property
    def sees_all_keys(self) -> bool:
        return self.is_context and self.mask is MaskType.DENSE

    @property
    def has_window(self) -> bool:
        return self.mask is MaskType.SLIDING_OR_CHUNKED_CAUSAL


@functools.cache
def kernel_facts(name: str) -> KernelFacts:
    """Return the properties of the kernel with this name. Raises KeyError for an unknown name or dtype."""
    table, rows = _newest()
    row = table.row(rows[name])
    return KernelFacts(
        name,
        dtypes={side: DTYPES[row[f"mDataType{side}"]] for side in "QKVO"},
        head_dim_qk=int(row["mHeadDimQk"]),
        head_dim_v=int(row["mHeadDimV"]),
        mask=MaskType(int(row["mMaskType"])),
        is_context=int(row["mKernelType"]) == CONTEXT,
        is_paged=int(row["mQkvLayout"]) == PAGED,
        is_sparse=int(row["mSparseAttn"]) != 0,
    )


@functools.cache
def _newest() -> tuple[KernelTable, dict[str, int]]:
    table = newest()
    return table, {name.strip('"'): index for index, name in enumerate(table.columns["mFuncName"])}
