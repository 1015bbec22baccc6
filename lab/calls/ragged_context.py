"""FlashInfer's ragged context call as data: its parameters, and the attention problem over contiguous K/V that it defines."""

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from lab.calls import allowed, arguments
from lab.calls.block_scales import SAGE_DTYPES, BlockScales, check_block_scales, has_block_scales, scaled_blocks
from lab.calls.problem import E4M3, AttentionCall, AttentionProblem, Scale, check_lengths, checked

RAGGED_OUT_DTYPES = tuple(dtype for dtype in arguments.OUT_DTYPES if dtype != E4M3)
MIRRORS = ("q_seq_lens_cpu", "kv_seq_lens_cpu")  # arguments that lie on the host
MIRROR_DTYPES = (torch.int32, torch.int64)


@dataclass(frozen=True, eq=False)
class RaggedAttention(AttentionProblem):
    """An attention problem over contiguous K/V: request r has the query rows cu_seqlens_q[r] … cu_seqlens_q[r + 1] - 1 and the
    keys cu_seqlens_kv[r] … cu_seqlens_kv[r + 1] - 1. Rows and keys after the last offsets belong to no request.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_kv: torch.Tensor
    key: torch.Tensor  #: [num_tokens, num_kv_heads, head_dim]
    value: torch.Tensor  #: [num_tokens, num_kv_heads, v_head_dim]
    #: SageAttention's scales of an int8 or e4m3 query and key and of an e4m3 value; or None
    block_scales: BlockScales | None = None

    @property
    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key, self.value

    def dequantized(self) -> "RaggedAttention":
        """Return an equal problem without `block_scales`: query, key and value are float64, multiplied by their scales."""
        scales = self.block_scales
        if scales is None:
            return self
        assert self.cu_seqlens_q is not None
        return replace(
            self,
            query=scaled_blocks(self.query, scales.query, scales.q_block, self.cu_seqlens_q),
            key=scaled_blocks(self.key, scales.key, scales.k_block, self.cu_seqlens_kv),
            value=self.value.to(torch.float64) * scales.value.to(torch.float64),
            block_scales=None,
        )

    def parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        spans = itertools.pairwise(self.cu_seqlens_kv.tolist())
        return [(self.key[first:end], self.value[first:end]) for first, end in spans]

    def check_values(self) -> None:
        check_lengths(self, self.seq_lens.tolist(), "max_kv_len")
        last, num_tokens = int(self.cu_seqlens_kv[-1]), self.key.shape[0]
        if last > num_tokens:
            raise ValueError(f"cum_seq_lens_kv ends at {last}, after the {num_tokens} tokens of key and value")


@dataclass(frozen=True, eq=False)
class RaggedContextCall:
    """The arguments of FlashInfer 0.7.2's `trtllm_ragged_attention_deepseek`: same names, order and defaults.

    The call computes attention of an MLA prefill before absorption, over contiguous K/V. An engine makes one causal call over
    the new tokens, and one call without a causal mask over each chunk of a cached prefix, and merges the results by their LSEs.
    FlashInfer has kernels for the head_dims (192, 128) of DeepSeek, (128, 128) and (256, 256); the references take any.

    The last dimension of `query`, `key` and `value` is contiguous. Their other strides and those of `lse` are free as long as
    no elements overlap. Other tensors are contiguous. `out` and `lse` begin at a multiple of 16 bytes, other tensors at any
    element. The output of a row that sees no key is zero; its LSE is log2(e) * sink, or -inf without a sink. `DecodeCall`
    documents the attributes that are not listed here.

    Attributes:
        query: [num_rows, num_qo_heads, head_dim], fp16, bf16 or e4m3 (references also take float32 and float64). Rows after
            the last offset are padding. Padding and rows of a request without keys may contain any values.
        key: [num_tokens, num_kv_heads, head_dim], the query's dtype. Query head h reads K/V head h // (num_qo_heads /
            num_kv_heads); in DeepSeek both numbers are equal. Tokens after the last offset may contain any values.
        value: [num_tokens, num_kv_heads, v_head_dim], the query's dtype. Tokens after the last offset may contain any values.
        max_q_len, max_kv_len: ints, upper bounds of the rows and keys of one request; 0 for an empty batch.
        seq_lens: int32 or uint32 [batch_size], number of keys of each request in this call.
        o_sf_scale: a number. It scales 4-bit outputs, which this call does not have, so it changes no result.
        window_left: number of keys before its own position that a row sees; -1 for all. A window requires `is_causal`.
        cum_seq_lens_q, cum_seq_lens_kv: int32 [batch_size + 1] offsets of the rows and of the keys.
        is_causal: row i of a request with q rows and L keys is at position L - q + i and sees the keys up to this
            position. False: every row sees every key of its request.
        return_lse: whether the call returns (out, lse).
        attention_sinks: float32 [num_qo_heads] or None: exp(sink) of each head is added to the softmax's denominator.
        out: where the output is written, contiguous [num_rows, num_qo_heads, v_head_dim], in any dtype of a query except e4m3,
            which FlashInfer's ragged kernels do not write. None makes a tensor in the query's dtype, bfloat16 for e4m3.
        lse: where the LSE is written, with or without `return_lse`: float32 [num_rows, num_qo_heads], log2 of the
            softmax's denominator, the sink included (FlashInfer's lse.cuh).
        q_seq_lens_cpu, kv_seq_lens_cpu: number of rows and of keys of each request on the host, int32 or int64, both or
            neither. With them there must be no row or key after the last offset.
        sage_attn_sfs: (q_sf, k_sf, None, v_sf), float32 scales of SageAttention; four times None without scales. With scales,
            query and key are int8 or e4m3, and value is e4m3. Each is multiplied by its scales first: a row of a query head and
            a key of a K/V head by the scale of its block (`lab.calls.block_scales`), value by v_sf [num_kv_heads, v_head_dim].
        num_elts_per_sage_attn_blk: (rows of a block, keys of a block, 0, 1), rows and keys 1, 4 or 16; all 0 without scales.
        skip_all_rows_active_check: True promises FlashInfer that no request is empty. The lab does not rely on it.
    """

    function: ClassVar[AttentionCall] = AttentionCall.RAGGED_CONTEXT
    module: ClassVar[str] = "flashinfer.prefill"

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    workspace_buffer: torch.Tensor | None
    seq_lens: torch.Tensor
    max_q_len: int
    max_kv_len: int
    bmm1_scale: Scale
    bmm2_scale: Scale
    o_sf_scale: float
    batch_size: int
    window_left: int
    cum_seq_lens_q: torch.Tensor
    cum_seq_lens_kv: torch.Tensor
    enable_pdl: bool | None
    is_causal: bool
    return_lse: bool
    attention_sinks: torch.Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None
    sage_attn_sfs: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    num_elts_per_sage_attn_blk: tuple[int, int, int, int] = (0, 0, 0, 0)
    backend: str = "trtllm-gen"
    q_seq_lens_cpu: torch.Tensor | None = None
    kv_seq_lens_cpu: torch.Tensor | None = None
    use_fp16_softmax: bool | None = None
    uses_spcompress: bool | None = None
    skip_all_rows_active_check: bool = True

    def problem(self) -> RaggedAttention:
        allowed.check_modelled(self, ("trtllm-gen",), ("cake", "cute-dsl"))
        has_scales = has_block_scales(self)
        arguments.check_query(self.query, SAGE_DTYPES if has_scales else arguments.QUERY_DTYPES)
        self._check_kv(E4M3 if has_scales else self.query.dtype)
        batch_size = arguments.check_int("batch_size", self.batch_size, 0, "it counts the requests")
        arguments.check_vector("seq_lens", self.seq_lens, batch_size, arguments.LENGTH_DTYPES)
        for name in ("cum_seq_lens_q", "cum_seq_lens_kv"):
            arguments.check_vector(name, getattr(self, name), batch_size + 1, (torch.int32,))
        for name in ("is_causal", "return_lse", "skip_all_rows_active_check"):
            arguments.check_bool(name, getattr(self, name))
        if isinstance(arguments.check_scale("o_sf_scale", self.o_sf_scale), torch.Tensor):
            raise TypeError("o_sf_scale must be a number, got a tensor")
        max_q_len = arguments.check_int("max_q_len", self.max_q_len, 0, "it bounds the rows of one request")
        max_kv_len = arguments.check_int("max_kv_len", self.max_kv_len, 0, "it bounds the keys of one request")
        problem = RaggedAttention(
            query=self.query,
            key=self.key,
            value=self.value,
            block_scales=check_block_scales(self, batch_size),
            cu_seqlens_kv=self.cum_seq_lens_kv,
            max_q_len=max_q_len,
            max_kv_len=max_kv_len,
            causal=self.is_causal,
            window_left=self._window_left(max_kv_len),
            **arguments.common_fields(self, self.attention_sinks, "attention_sinks"),
            out=self.out,
            out_dtype=self._out_dtype(),
            lse=arguments.check_lse(self),
            return_lse=self.return_lse,
        )
        arguments.check_devices(self, on_host=MIRRORS)
        arguments.check_results_apart(self)
        checked(problem)
        self._check_mirrors()
        return problem

    def host_lengths(self) -> tuple[list[int], list[int]] | None:
        if self.q_seq_lens_cpu is None or self.kv_seq_lens_cpu is None:
            return None
        return self.q_seq_lens_cpu.tolist(), self.kv_seq_lens_cpu.tolist()

    def _check_kv(self, v_dtype: torch.dtype) -> None:
        key, value = arguments.check_tensor("key", self.key), arguments.check_tensor("value", self.value)
        for name, side, last in (("key", key, "head_dim"), ("value", value, "v_head_dim")):
            if side.ndim != 3 or 0 in side.shape[1:]:
                raise ValueError(f"{name} must be [num_tokens, num_kv_heads, {last}], got shape {list(side.shape)}")
            if side.dtype != (expected := v_dtype if name == "value" else self.query.dtype):
                whose = "the query's dtype" if expected == self.query.dtype else "with sage_attn_sfs the dtype"
                raise TypeError(f"{name} must have {whose} {expected}, got {side.dtype}")
            arguments.check_head_dim_stride(name, side)
        if key.shape[2] != self.query.shape[2]:
            raise ValueError(f"key has head_dim {key.shape[2]}, but query has {self.query.shape[2]}: they must agree")
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"key and value must have the same tokens and heads, got {list(key.shape)} and {list(value.shape)}"
            )
        if self.query.shape[1] % key.shape[1]:
            raise ValueError(
                f"the {self.query.shape[1]} heads of query do not divide evenly over the {key.shape[1]} heads of key"
            )

    def _window_left(self, max_kv_len: int) -> int:
        window_left = arguments.check_int("window_left", self.window_left, -1, "-1 means no window")
        if window_left >= 0 and not self.is_causal:
            raise NotImplementedError(
                f"is_causal=False with window_left={window_left}: trtllm-gen's windows are causal (FlashInfer 0.7.2, "
                "fmhaKernels.cuh); pass window_left=-1"
            )
        # A window as wide as the longest request is none.
        return -1 if window_left >= max_kv_len else window_left

    def _out_dtype(self) -> torch.dtype:
        if self.out is None:
            return torch.bfloat16 if self.query.dtype in SAGE_DTYPES else self.query.dtype
        expected = (*self.query.shape[:2], self.value.shape[2])
        return arguments.check_out(self.out, expected, "its last dimension value's", RAGGED_OUT_DTYPES).dtype

    def _check_mirrors(self) -> None:
        if (self.q_seq_lens_cpu is None) != (self.kv_seq_lens_cpu is None):
            raise ValueError("q_seq_lens_cpu and kv_seq_lens_cpu go together: pass both or neither")
        bounds = (
            (self.query.shape[0], self.max_q_len, self.cum_seq_lens_q),
            (self.key.shape[0], self.max_kv_len, self.cum_seq_lens_kv),
        )
        for name, (total, most, offsets) in zip(MIRRORS, bounds, strict=True):
            if getattr(self, name) is None:
                continue
            mirror = arguments.check_tensor(name, getattr(self, name))
            arguments.check_vector(name, mirror, self.batch_size, MIRROR_DTYPES)
            if mirror.device.type != "cpu":
                raise ValueError(f"{name} is on {mirror.device}, but it says lengths to the host; move it to the CPU")
            lengths = mirror.tolist()
            if min(lengths, default=0) < 0 or max(lengths, default=0) > most or sum(lengths) != total:
                raise ValueError(
                    f"{name} = {lengths} must lie between 0 and the bound {most} and add up to all {total} tokens: cut "
                    "off those after the last offset"
                )
            if offsets.device.type == "cpu" and lengths != offsets.diff().tolist():
                raise ValueError(f"{name} = {lengths}, but the offsets say {offsets.diff().tolist()}")
