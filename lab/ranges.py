"""The ranges of the cases that are judged: the values of their parameters, which a caller may narrow."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lab.calls.problem import E4M3, NVFP4_BLOCK
from lab.workloads.attention_case import short_repr
from lab.workloads.geometries import GEOMETRIES, Geometry, geometry, tiny

HALF_PAIRS = ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))

SEEDS = 100_000  # of cases, that a seed of ranges has


@dataclass(frozen=True)
class Ranges:
    """The axes from which cases are made; narrow one to what a kernel was built for.

    Attributes:
        dtypes: (query, cache) pairs.
        groups: query heads per K/V head.
        num_kv_heads, head_dims, page_sizes: of the cache.
        q_lens: query rows of a request in a decode call.
        windows: whether some cases have a sliding window; sinks: a sink per head.
        nvfp4: whether some cases have an NVFP4 cache.
        kv_layouts: orders of a page's axes.
        long_requests: keys of K18's long requests, each in a case of few heads and rows.
        large_batches: requests of the batches that are larger than the others: above a warp's 32 lanes, and above 128.
        masked_rows: query rows of the calls with a draft mask; more than 16 take a row's second word.
        mla_head_dims: (head_dim, v_head_dim) of MLA, 576 and 512 in DeepSeek-V3; mla_heads: its query heads;
            mla_page_sizes: of its cache.
        geometries: of the forward passes and graph stories of the full level, names of `lab.workloads.GEOMETRIES`.
        e4m3_arithmetic: over an e4m3 cache the kernel is known to round Q and the softmax's weights to e4m3 too.
        longest: keys of the longest request, about; of the checks but K18.
        seed: of what is drawn: covering arrays, lengths, contents, and random cases.

    K18 judges further values of an axis that is left as it is (`lab.checks.parameters.paged_axes.BEYOND`), which a kernel for
    the usual sizes declines.

    Raises:
        ValueError: an axis has no value, one twice, or one that no case can be made of.
    """

    dtypes: tuple[tuple[torch.dtype, torch.dtype], ...] = (*HALF_PAIRS, (torch.bfloat16, E4M3))
    groups: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 16)
    num_kv_heads: tuple[int, ...] = (1, 2, 3)
    head_dims: tuple[int, ...] = (64, 128, 256)
    page_sizes: tuple[int, ...] = (16, 32, 64, 128)
    q_lens: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 7, 8)
    windows: tuple[bool, ...] = (False, True)
    sinks: tuple[bool, ...] = (False, True)
    nvfp4: tuple[bool, ...] = (False, True)
    kv_layouts: tuple[str, ...] = ("HND", "NHD")
    long_requests: tuple[int, ...] = (4_100, 16_500, 131_072)
    large_batches: tuple[int, ...] = (40, 130)
    masked_rows: tuple[int, ...] = (4, 8, 20, 40)
    mla_head_dims: tuple[tuple[int, int], ...] = ((80, 64), (576, 512))
    mla_heads: tuple[int, ...] = (1, 8, 16, 128)
    mla_page_sizes: tuple[int, ...] = (32, 64)
    geometries: tuple[str, ...] = ("gemma-3-27b", "gpt-oss-120b", "llama-3.1-70b", "llama-3.1-8b", "qwen3-32b")
    e4m3_arithmetic: bool = False
    longest: int = 700
    seed: int = 0

    def __post_init__(self) -> None:
        for axis, (is_one, words) in _VALUES.items():
            values = getattr(self, axis)
            if not isinstance(values, tuple) or not values:
                raise ValueError(f"{axis}={values!r} must be a tuple of at least one value, each {words}")
            wrong = next((value for value in values if not is_one(value)), None)
            if wrong is not None:
                raise ValueError(f"{axis}={values!r}: {wrong!r} is not {words}")
            if len(set(values)) < len(values):
                raise ValueError(f"{axis}={values!r} has a value twice")
        if not _is_whole(self.longest, 1) or self.longest < max(self.q_lens):
            raise ValueError(
                f"longest={self.longest!r} must be a whole number of keys, at least {max(self.q_lens)}: q_lens"
            )
        if not _is_whole(self.seed, 0):
            raise ValueError(f"seed={self.seed!r} must be a whole number of at least 0")
        if not isinstance(self.e4m3_arithmetic, bool):
            raise ValueError(f"e4m3_arithmetic={self.e4m3_arithmetic!r} must be True or False")
        odd = [head_dim for head_dim in self.head_dims if head_dim % NVFP4_BLOCK]
        if odd and True in self.nvfp4:
            raise ValueError(
                f"head_dims={self.head_dims}: an NVFP4 cache stores blocks of {NVFP4_BLOCK}, which {odd[0]} has no whole "
                "number of: leave it out, or NVFP4 by nvfp4=(False,), in a shell --no-nvfp4"
            )

    def __repr__(self) -> str:
        return short_repr(self)

    def arithmetic(self, kv_dtype: torch.dtype) -> torch.dtype | None:
        """Of the control over a cache of this dtype, `AttentionCase.arithmetic`."""
        return E4M3 if self.e4m3_arithmetic and kv_dtype == E4M3 else None

    def holds(self, model: Geometry) -> bool:
        """Tell whether the axes have a model's head_dim, group and sinks."""
        return (
            model.head_dim in self.head_dims
            and model.group in self.groups
            and (True in self.sinks or not model.has_sinks)
        )

    @property
    def tiny(self) -> str:
        """Return the name of a small geometry within the axes: the lab's own "tiny", as far as the axes have its numbers."""
        usual = geometry("tiny")
        return tiny(
            usual.group if usual.group in self.groups else self.groups[0],
            usual.num_kv_heads if usual.num_kv_heads in self.num_kv_heads else self.num_kv_heads[0],
            usual.head_dim if usual.head_dim in self.head_dims else self.head_dims[0],
            True in self.sinks,
        )

    def windows_of(self, model: Geometry) -> tuple[bool, ...]:
        """Values of `sliding_window` of a model's layers."""
        return (False, True) if model.sliding_window is not None and True in self.windows else (False,)


def _is_whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _whole(least: int) -> "_Values":
    return partial(_is_whole, least=least), f"a whole number of at least {least}"


def _one_of(*values: Any) -> "_Values":
    """Compare types too: 1 is not True."""
    return lambda value: any(type(value) is type(one) and value == one for one in values), f"one of {values}"


def _is_power_of_two(value: Any) -> bool:
    return _is_whole(value, 1) and not value & (value - 1)


def _is_mla_pair(value: Any) -> bool:
    """Tell whether V can be the first part of a latent entry."""
    is_pair = isinstance(value, tuple) and len(value) == 2 and all(_is_whole(each, 2) for each in value)
    return is_pair and value[1] <= value[0]


_Values = tuple[Callable[[Any], bool], str]
_PAIRS = (*HALF_PAIRS, *((dtype, E4M3) for dtype, _ in HALF_PAIRS))
_PAGE_SIZE: _Values = (_is_power_of_two, "a power of two")
# Per axis: whether a case can be made of a value, and words for those that one can be made of.
_VALUES: dict[str, _Values] = {
    "dtypes": _one_of(*_PAIRS),
    "groups": _whole(1),
    "num_kv_heads": _whole(1),
    "head_dims": _whole(2),
    "page_sizes": _PAGE_SIZE,
    "q_lens": _whole(1),
    "windows": _one_of(False, True),
    "sinks": _one_of(False, True),
    "nvfp4": _one_of(False, True),
    "kv_layouts": _one_of("HND", "NHD"),
    "long_requests": _whole(1),
    "large_batches": _whole(1),
    "masked_rows": _whole(1),
    "mla_head_dims": (
        _is_mla_pair,
        "a pair (head_dim, v_head_dim) of whole numbers of at least 2, the second no larger than the first",
    ),
    "mla_heads": _whole(1),
    "mla_page_sizes": _PAGE_SIZE,
    "geometries": _one_of(*GEOMETRIES),
}
