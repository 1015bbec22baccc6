"""One forward pass as data: which mode, which model, how long the requests are, what the tensors hold."""

import enum
from dataclasses import dataclass, fields

import torch

from lab.metadata.engine.forward_mode import AttentionCall, ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.workloads.geometries import Geometry, geometry

DTYPES = (torch.float16, torch.bfloat16)


class Inputs(enum.Enum):
    """What the tensors hold."""

    RANDOM = "N(0, 1) throughout: what rounding does"
    NEEDLES = "a few keys outweigh all others: those at a row's limits, and those just beyond them"

    def __repr__(self) -> str:
        return f"Inputs.{self.name}"


@dataclass(frozen=True, repr=False)
class ForwardCase:
    """One forward pass, as data; its `repr` is an expression that makes it again, defaults left out.

    Attributes:
        mode: the forward mode. Not IDLE (no request) nor PREBUILT (no attention).
        geometry: a name of `lab.workloads.GEOMETRIES`.
        prefix_lens: tokens of each request before this pass's; at least one request.
        q_lens: query rows of each request: its new tokens. 1 throughout in DECODE.
        draft_step: for a draft decode step, its number s from 0: the query is the last of s + 1 draft tokens. Else None.
        page_size, layout: of the K/V pool; tokens per page, a power of two.
        tensor_parallel: the geometry is one rank's slice.
        sliding_window: a sliding-window layer, reading the sliding-window pool.
        draft_extend: the call that a draft extend makes, if not the engine's choice. None in other modes.
        split_mixed_tail: trailing requests of one new token go to the decode call. False but in extends without speculation.
        dtype, kv_dtype: of the query and output (float16 or bfloat16), and of the cache (the same or float8_e4m3fn).
        arithmetic: what the control rounds the operands of both products to: the query's dtype, or a lower one that the
            kernel is known to use (XQA on SM90 rounds Q and P to e4m3 for an e4m3 cache and one query token).
        inputs: what the tensors hold.
        seed: of everything drawn.

    Raises:
        TypeError: an argument of another type, or a dtype that the judge has no bound for.
        ValueError: a number out of range, or an argument that means nothing in the mode and would be ignored.
    """

    mode: ForwardMode
    geometry: str
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    page_size: int = 64
    layout: KVLayout = KVLayout.NHD
    tensor_parallel: int = 1
    sliding_window: bool = False
    draft_extend: AttentionCall | None = None
    split_mixed_tail: bool = False
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype = torch.bfloat16
    arithmetic: torch.dtype | None = None
    inputs: Inputs = Inputs.RANDOM
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_requests()
        self._check_mode()
        self._check_storage()

    def _check_requests(self) -> None:
        if len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(f"{len(self.prefix_lens)} prefix_lens for {len(self.q_lens)} q_lens: one each per request")
        if not self.q_lens:
            raise ValueError("q_lens=() is an empty batch; there is nothing to judge: give at least one request")
        if min(self.prefix_lens) < 0 or min(self.q_lens) < 1:
            raise ValueError(f"prefix_lens {self.prefix_lens} must be >= 0 and q_lens {self.q_lens} >= 1")

    def _check_mode(self) -> None:
        """The mode computes attention, and every other argument means something in it."""
        if self.mode.is_idle() or self.mode.is_prebuilt():
            raise ValueError(f"{self.mode!r} computes no attention; there is nothing to judge")
        uniform = self.mode.is_decode() or self.mode.is_target_verify() or self.mode.is_draft_extend_v2()
        if uniform and len(set(self.q_lens)) > 1:
            raise ValueError(f"{self.mode!r} has equally many rows for every request, not {self.q_lens}")
        if self.mode.is_decode() and set(self.q_lens) - {1}:
            raise ValueError(f"DECODE has one row for every request, not {self.q_lens}")
        if self.draft_step is not None:
            self._check_draft_step(self.draft_step)
        if self.draft_extend is not None:
            self._check_draft_extend(self.draft_extend)
        if self.split_mixed_tail and not self.mode.is_extend_without_speculative():
            raise ValueError(
                f"split_mixed_tail={self.split_mixed_tail} would be ignored in {self.mode!r}: only extends without "
                "speculation, such as ForwardMode.MIXED, have a tail to split off; leave it False"
            )

    def _check_draft_step(self, draft_step: object) -> None:
        if not self.mode.is_decode():
            raise ValueError(f"draft_step={draft_step} belongs to ForwardMode.DECODE, not {self.mode!r}: leave it None")
        if isinstance(draft_step, bool) or not isinstance(draft_step, int):
            raise TypeError(f"draft_step={draft_step!r} must be an int, or None outside drafting")
        if draft_step < 0:
            raise ValueError(
                f"draft_step={draft_step} must be 0 or more: the first draft step is 0, a plain decode None"
            )

    def _check_draft_extend(self, draft_extend: object) -> None:
        if not isinstance(draft_extend, AttentionCall):
            raise TypeError(f"draft_extend={draft_extend!r} must be an AttentionCall, such as AttentionCall.DECODE")
        if not self.mode.is_draft_extend(include_v2=True):
            raise ValueError(
                f"draft_extend={draft_extend!r} would be ignored in {self.mode!r}: only DRAFT_EXTEND and "
                "DRAFT_EXTEND_V2 have a choice of the call; leave it None"
            )

    def _check_storage(self) -> None:
        if isinstance(self.page_size, bool) or not isinstance(self.page_size, int):
            raise TypeError(f"page_size={self.page_size!r} must be an int: tokens per page, a power of two such as 64")
        if self.page_size < 1 or self.page_size & (self.page_size - 1):
            raise ValueError(f"page_size={self.page_size} must be a power of two, 1 or more: kernels divide by shifts")
        if self.dtype not in DTYPES:
            raise TypeError(f"dtype={self.dtype} must be torch.float16 or torch.bfloat16, the query's and the output's")
        if self.kv_dtype not in (self.dtype, torch.float8_e4m3fn):
            raise TypeError(f"kv_dtype={self.kv_dtype} must be dtype, {self.dtype}, or torch.float8_e4m3fn")
        if self.sliding_window and geometry(self.geometry).sliding_window is None:
            raise ValueError(f"{self.geometry} has no sliding-window layers: leave sliding_window False")

    def __repr__(self) -> str:
        values = [(each.name, getattr(self, each.name), each.default) for each in fields(self)]
        return f"ForwardCase({', '.join(f'{name}={value!r}' for name, value, default in values if value != default)})"

    @property
    def model(self) -> Geometry:
        return geometry(self.geometry).tensor_parallel(self.tensor_parallel)

    @property
    def new_tokens(self) -> tuple[int, ...]:
        """Tokens that this pass adds to each request; a draft step stands behind the ones of the steps before it."""
        return self.q_lens if self.draft_step is None else tuple(self.draft_step + 1 for _ in self.q_lens)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Tokens of each request with this pass's."""
        return tuple(prefix + new for prefix, new in zip(self.prefix_lens, self.new_tokens, strict=True))

    @property
    def max_context_len(self) -> int:
        """The engine's bound: past every request, so that tables have dead columns."""
        return max(self.kv_lens, default=1) + 2 * self.page_size + 1

    @property
    def window_left(self) -> int:
        return self.model.window_left if self.sliding_window else -1

    @property
    def visible_pairs(self) -> int:
        """(query row, key) pairs that are visible, over all requests."""
        pairs = 0
        for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True):
            for position in range(kv_len - q_len, kv_len):
                pairs += position + 1 if self.window_left < 0 else min(position, self.window_left) + 1
        return pairs

    @property
    def operations(self) -> int:
        """Floating-point operations of the two products over visible pairs: 2 · 2 · head_dim per pair and query head."""
        return 4 * self.model.head_dim * self.model.num_qo_heads * self.visible_pairs

    @property
    def bytes_moved(self) -> int:
        """Bytes that must move at least once: each visible key and value read, each query read and output written."""
        keys = 0
        for kv_len, q_len in zip(self.kv_lens, self.q_lens, strict=True):
            keys += kv_len if self.window_left < 0 else min(kv_len, q_len + self.window_left)
        kv_bytes = 2 * keys * self.model.num_kv_heads * self.model.head_dim * self.kv_dtype.itemsize
        return kv_bytes + 2 * sum(self.q_lens) * self.model.num_qo_heads * self.model.head_dim * self.dtype.itemsize
