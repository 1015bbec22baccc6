"""Judge one forward pass end to end: from each request's K/V history to a kernel's output.

The pool, the metadata and the kernel's arguments are built as an engine builds them. The truth is computed from the
histories, as they were written token by token, and never from a page table, a length or an offset; so a wrong one of
these fails like a wrong kernel does. Everything that must not matter is poisoned.
"""

import enum
import os
import shlex
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from lab.metadata.dispatch import AttentionCall, AttentionLayer, PlannedCall, plan_calls, run_attention
from lab.metadata.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.forward_mode import ForwardMode
from lab.metadata.kv_pool import KVLayout, KVPool, PagedKVCache
from lab.metadata.mha import TRTLLMMHAMetadata, build_mha_metadata
from lab.references.errors import Comparison, compare, eager_attention
from lab.references.paged_attention import attention, piece_elements, visible_keys
from lab.references.quantization import quantize_e4m3
from lab.workloads.geometries import Geometry, geometry

E4M3 = torch.float8_e4m3fn
# Finite, and so large that one poisoned value in a product shows; e4m3 holds nothing larger than 448.
POISON = {torch.bfloat16: 1e30, torch.float16: 6e4, E4M3: 448.0}
# Scales of an e4m3 cache: unequal, and far from 1, so that a dropped or exchanged one shows.
E4M3_K_SCALE = 0.03125
E4M3_V_SCALE = 0.0625
GUARD_ROWS = 8  # rows before and after the output that must stay as they were
SHOWN_FINDINGS = 8


class Inputs(enum.Enum):
    """What the tensors hold."""

    RANDOM = "N(0, 1) throughout: what rounding does"
    NEEDLES = "a few keys outweigh all others: those at a row's limits, and those just beyond them"

    def __repr__(self) -> str:
        return f"Inputs.{self.name}"


class Outcome(enum.Enum):
    """What became of a case."""

    RIGHT = "right"
    WRONG = "wrong"
    DECLINED = "declined"


@dataclass(frozen=True, repr=False)
class ForwardCase:
    """One forward pass, as data; its `repr` is an expression that makes it again, defaults left out.

    Attributes:
        mode: the forward mode. Not IDLE (no request) nor PREBUILT (no attention).
        geometry: a name of `lab.workloads.GEOMETRIES`.
        prefix_lens: tokens of each request before this pass's.
        q_lens: query rows of each request: its new tokens. 1 throughout in DECODE.
        draft_step: for a draft decode step, its number s from 0: the query is the last of s + 1 draft tokens. Else None.
        page_size, layout: of the K/V pool.
        tensor_parallel: the geometry is one rank's slice.
        sliding_window: a sliding-window layer, reading the sliding-window pool.
        draft_extend: the call that a draft extend makes, if not the engine's choice.
        split_mixed_tail: trailing requests of one new token go to the decode call.
        dtype, kv_dtype: of the query and output, and of the cache.
        arithmetic: what the control rounds the operands of both products to: the query's dtype, or a lower one that the
            kernel is known to use (XQA on SM90 rounds Q and P to e4m3 for an e4m3 cache and one query token).
        inputs: what the tensors hold.
        seed: of everything drawn.
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
        if len(self.prefix_lens) != len(self.q_lens):
            raise ValueError(f"{len(self.prefix_lens)} prefix_lens for {len(self.q_lens)} q_lens: one each per request")
        if self.mode.is_idle() or self.mode.is_prebuilt():
            raise ValueError(f"{self.mode!r} computes no attention; there is nothing to judge")
        if min(self.prefix_lens, default=0) < 0 or min(self.q_lens, default=1) < 1:
            raise ValueError(f"prefix_lens {self.prefix_lens} must be >= 0 and q_lens {self.q_lens} >= 1")
        if self.draft_step is not None and not self.mode.is_decode():
            raise ValueError(f"draft_step={self.draft_step} belongs to ForwardMode.DECODE, not {self.mode!r}")
        uniform = self.mode.is_decode() or self.mode.is_target_verify() or self.mode.is_draft_extend_v2()
        if uniform and len(set(self.q_lens)) > 1:
            raise ValueError(f"{self.mode!r} has equally many rows for every request, not {self.q_lens}")
        if self.mode.is_decode() and set(self.q_lens) - {1}:
            raise ValueError(f"DECODE has one row for every request, not {self.q_lens}")
        if self.sliding_window and geometry(self.geometry).sliding_window is None:
            raise ValueError(f"{self.geometry} has no sliding-window layers")

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


@dataclass(frozen=True)
class Finding:
    """One output vector that is wrong: whose it is, its relative L2 error, and what was allowed."""

    request: int
    row: int  # among the request's rows
    head: int
    error: float
    bound: float

    def __str__(self) -> str:
        return f"request {self.request} row {self.row} head {self.head}: error {self.error:.3g}, bound {self.bound:.3g}"


@dataclass(frozen=True)
class Verdict:
    """What the judge says of one case.

    Attributes:
        case: what was run.
        implementation: its module name.
        device: where it ran.
        outcome: RIGHT, WRONG, or DECLINED (it raised NotImplementedError before doing anything).
        worst_ratio: largest error over its bound; at most 1 if right.
        worst_error: that vector's error, relative L2.
        num_wrong: output vectors beyond their bound.
        findings: the worst of them.
        reason: what was declined, or was wrong besides the vectors.
    """

    case: ForwardCase
    implementation: str
    device: str
    outcome: Outcome
    worst_ratio: float = 0.0
    worst_error: float = 0.0
    num_wrong: int = 0
    findings: tuple[Finding, ...] = field(default=())
    reason: str = ""

    @property
    def reproduce(self) -> str:
        """A shell line that judges the case again."""
        program = (
            "import torch, importlib; from lab.checks import *; from lab.metadata import *; "
            f"print(judge_forward(importlib.import_module({self.implementation!r}), {self.case!r}, {self.device!r}))"
        )
        interpreted = "TRITON_INTERPRET=1 " if os.environ.get("TRITON_INTERPRET") == "1" else ""
        return f"{interpreted}python -c {shlex.quote(program)}"

    def __str__(self) -> str:
        lines = [f"{self.implementation} is {self.outcome.value}: {self.case!r}"]
        if self.outcome is not Outcome.DECLINED:
            lines.append(f"  worst error {self.worst_error:.3g}, {self.worst_ratio:.3g} of what is allowed")
        if self.reason:
            lines.append(f"  {self.reason}")
        lines += [f"  {finding}" for finding in self.findings]
        if self.num_wrong > len(self.findings):
            lines.append(f"  … and {self.num_wrong - len(self.findings)} more vectors")
        if self.outcome is Outcome.WRONG:
            lines.append(f"  reproduce: {self.reproduce}")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """A case made concrete: what the engine would hand over, and the histories behind it.

    Attributes:
        batch, metadata, layer, cache, plan: the engine's side.
        query: [num_rows, num_qo_heads, head_dim].
        histories: per request (K, V) as a kernel must understand them: [kv_len, num_kv_heads, head_dim], dequantised but for
            the cache's scales, which are the layer's.
    """

    case: ForwardCase
    batch: ForwardBatch
    metadata: TRTLLMMHAMetadata
    layer: AttentionLayer
    cache: PagedKVCache
    plan: list[PlannedCall]
    query: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]


def judge_forward(implementation: Any, case: ForwardCase, device: torch.device | str | None = None) -> Verdict:
    """Judge one forward pass of an implementation.

    Args:
        implementation: any module or object with FlashInfer's two names.
        case: the pass.
        device: where to run; a GPU if there is one.
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = getattr(implementation, "__name__", type(implementation).__name__)
    forward = build_forward(case, where)
    guarded = torch.full(
        (forward.query.shape[0] + 2 * GUARD_ROWS, *forward.query.shape[1:]),
        float("nan"),
        dtype=case.dtype,
        device=where,
    )
    out = guarded[GUARD_ROWS : GUARD_ROWS + forward.query.shape[0]]
    try:
        run_attention(
            implementation,
            forward.batch,
            forward.metadata,
            forward.layer,
            forward.query,
            forward.cache,
            max_context_len=case.max_context_len,
            out=out,
            plan=forward.plan,
        )
    except NotImplementedError as declined:
        return Verdict(case, name, str(where), Outcome.DECLINED, reason=str(declined))
    guards = torch.cat((guarded[:GUARD_ROWS], guarded[GUARD_ROWS + out.shape[0] :]))
    reason = "" if bool(guards.isnan().all()) else "it wrote outside its output"
    return _verdict(forward, name, compare_with_truth(forward, out), reason)


def build_forward(case: ForwardCase, device: torch.device) -> ForwardPass:
    """Build the pool, write the histories, poison the rest, and build the metadata."""
    generator = torch.Generator(device=device).manual_seed(case.seed)
    pool = _new_pool(case, device)
    cache = pool.new_cache(
        case.model.num_kv_heads, case.model.head_dim, case.kv_dtype, case.layout, sliding_window=case.sliding_window
    )
    _fill_with_poison(cache)
    query, histories = _draw_inputs(case, device, generator)

    requests, write_slots = [], []
    for request, (keys, values) in enumerate(histories):
        index = pool.add_request(case.prefix_lens[request])
        new_slots = pool.extend_request(index, case.new_tokens[request])
        requests.append(index)
        write_slots.append(new_slots[-case.q_lens[request] :])
        # The engine has written all tokens but this pass's; a window's pages before it have been given back.
        first = _evict(case, pool, index, request) if case.sliding_window else 0
        last = case.kv_lens[request] - case.q_lens[request]
        slots = pool.slots(index, first, last)
        cache.write(pool.swa_slots(slots) if case.sliding_window else slots, keys[first:last], values[first:last])

    batch = _new_batch(case, device, requests, torch.cat(write_slots))
    metadata = build_mha_metadata(batch, pool)
    new_keys = torch.cat([keys[-rows:] for (keys, _), rows in zip(histories, case.q_lens, strict=True)])
    new_values = torch.cat([values[-rows:] for (_, values), rows in zip(histories, case.q_lens, strict=True)])
    cache.write(_write_locations(case, batch, metadata), new_keys, new_values)
    _poison_table_tails(metadata, cache, case)
    return ForwardPass(
        case=case,
        batch=batch,
        metadata=metadata,
        layer=_new_layer(case, device, generator),
        cache=cache,
        plan=plan_calls(batch, case.draft_extend, case.split_mixed_tail),
        query=query,
        histories=histories,
    )


def compare_with_truth(forward: ForwardPass, out: torch.Tensor) -> Comparison:
    """Errors and bounds of an output of the pass, from its histories alone."""
    expected, control = [], []
    first_row = 0
    for request, q_len in enumerate(forward.case.q_lens):
        rows_at_once = max(1, piece_elements(out.device) // (forward.query.shape[1] * forward.case.kv_lens[request]))
        for start in range(0, q_len, rows_at_once):
            rows = range(start, min(start + rows_at_once, q_len))
            query = forward.query[first_row + rows.start : first_row + rows.stop]
            exact, rounded = _truth_and_control(forward, request, rows, query)
            expected.append(exact)
            control.append(rounded)
        first_row += q_len
    return compare(out, torch.cat(expected), torch.cat(control), _request_of_row(forward.case, out.device))


def _truth_and_control(
    forward: ForwardPass, request: int, rows: range, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What some rows of one request must give, in float64, and what low-precision arithmetic makes of them."""
    case, layer = forward.case, forward.layer
    kv_len = case.kv_lens[request]
    first = kv_len - case.q_lens[request]
    keys, values = (side[: first + rows.stop].to(torch.float32).unsqueeze(0) for side in forward.histories[request])
    visible = visible_keys(
        torch.arange(first + rows.start, first + rows.stop, device=query.device).unsqueeze(0),
        torch.arange(keys.shape[1], device=query.device).unsqueeze(0),
        torch.tensor([kv_len], device=query.device),
        causal=True,
        window_left=case.window_left,
    )
    scales: dict[str, Any] = {
        "bmm1_scale": layer.softmax_scale * layer.k_scale,
        "bmm2_scale": layer.v_scale,
        "sinks": layer.sinks,
    }
    arithmetic = case.dtype if case.arithmetic is None else case.arithmetic
    exact, _ = attention(query.unsqueeze(0), keys, values, visible, **scales)
    rounded = eager_attention(
        query.unsqueeze(0), keys, values, visible, arithmetic=arithmetic, out_dtype=case.dtype, **scales
    )
    return exact[0], rounded[0]


def _request_of_row(case: ForwardCase, device: torch.device) -> torch.Tensor:
    requests = [request for request, q_len in enumerate(case.q_lens) for _ in range(q_len)]
    return torch.tensor(requests, dtype=torch.int64, device=device)


def _verdict(forward: ForwardPass, name: str, comparison: Comparison, reason: str) -> Verdict:
    case = forward.case
    row, head = comparison.worst()
    right = comparison.passed and not reason
    return Verdict(
        case=case,
        implementation=name,
        device=str(forward.query.device),
        outcome=Outcome.RIGHT if right else Outcome.WRONG,
        worst_ratio=comparison.worst_ratio,
        worst_error=float(comparison.error[row, head]),
        num_wrong=int(comparison.wrong.sum()),
        findings=_worst_findings(case, comparison),
        reason=reason,
    )


def _worst_findings(case: ForwardCase, comparison: Comparison) -> tuple[Finding, ...]:
    ratio = torch.where(comparison.wrong, comparison.error / comparison.bound, torch.zeros_like(comparison.error))
    starts = [sum(case.q_lens[:request]) for request in range(len(case.q_lens))]
    requests = _request_of_row(case, torch.device("cpu")).tolist()
    findings = []
    for index in ratio.flatten().topk(min(SHOWN_FINDINGS, int(comparison.wrong.sum()))).indices.tolist():
        row, head = divmod(index, ratio.shape[1])
        error, bound = float(comparison.error[row, head]), float(comparison.bound[row, head])
        findings.append(Finding(requests[row], row - starts[requests[row]], head, error, bound))
    return tuple(findings)


def _new_pool(case: ForwardCase, device: torch.device) -> KVPool:
    pages = sum(-(-kv_len // case.page_size) for kv_len in case.kv_lens)
    return KVPool(
        num_requests=len(case.q_lens),
        max_context_len=case.max_context_len,
        page_size=case.page_size,
        num_pages=2 * pages + 2,  # half of them stay poisoned
        swa_num_pages=pages + 2 if case.sliding_window else None,
        seed=case.seed,
        device=device,
    )


def _new_layer(case: ForwardCase, device: torch.device, generator: torch.Generator) -> AttentionLayer:
    model, quantised = case.model, case.kv_dtype == E4M3
    sinks = None
    if model.has_sinks:
        # Trained sinks lie around the largest logits; distinct per head, so that an exchanged one shows.
        sinks = torch.randn(model.num_qo_heads, device=device, generator=generator) + 2.0
    return AttentionLayer(
        softmax_scale=model.softmax_scale,
        k_scale=E4M3_K_SCALE if quantised else 1.0,
        v_scale=E4M3_V_SCALE if quantised else 1.0,
        window_left=case.window_left,
        reads_swa_pool=case.sliding_window,
        sinks=sinks,
    )


def _new_batch(
    case: ForwardCase, device: torch.device, requests: list[int], out_cache_loc: torch.Tensor
) -> ForwardBatch:
    mode = case.mode
    counts_new_tokens = case.draft_step is None and not mode.is_target_verify()
    seq_lens = case.kv_lens if counts_new_tokens else case.prefix_lens
    extends = mode.is_extend(include_draft_extend_v2=True) and not mode.is_target_verify()
    return ForwardBatch(
        forward_mode=mode,
        req_pool_indices=torch.tensor(requests, device=device),
        seq_lens=torch.tensor(seq_lens, device=device),
        out_cache_loc=out_cache_loc,
        num_tokens=sum(case.q_lens),
        extend_seq_lens=torch.tensor(case.q_lens, device=device) if extends else None,
        extend_prefix_lens=torch.tensor(case.prefix_lens, device=device) if extends else None,
        extend_seq_lens_cpu=case.q_lens if extends else None,
        extend_prefix_lens_cpu=case.prefix_lens if extends else None,
        spec_info=_spec_info(case),
    )


def _spec_info(case: ForwardCase) -> SpecInfo | None:
    width = case.q_lens[0]
    if case.draft_step is not None:
        return SpecInfo(speculative_step_id=case.draft_step)
    if case.mode.is_target_verify():
        return SpecInfo(num_draft_tokens=width)
    if case.mode.is_draft_extend_v2():
        return SpecInfo(num_tokens_per_req=width)
    return SpecInfo() if case.mode.is_draft_extend() else None


def _evict(case: ForwardCase, pool: KVPool, index: int, request: int) -> int:
    """Give back the pages that no row of this pass sees; returns the first position that is kept."""
    first_row = case.kv_lens[request] - case.q_lens[request]
    before = min(max(0, first_row - case.window_left), first_row)
    pool.evict_swa(index, before)
    return before // case.page_size * case.page_size


def _write_locations(case: ForwardCase, batch: ForwardBatch, metadata: TRTLLMMHAMetadata) -> torch.Tensor:
    if not case.sliding_window:
        return batch.out_cache_loc
    assert metadata.swa_out_cache_loc is not None
    return metadata.swa_out_cache_loc


def _fill_with_poison(cache: PagedKVCache) -> None:
    poison = torch.tensor(POISON[cache.storage.dtype]).to(cache.storage.dtype)
    if cache.storage.dtype == E4M3:
        cache.storage.view(torch.uint8).fill_(int(poison.view(torch.uint8)))
    else:
        cache.storage.fill_(float(poison))


def _poison_table_tails(metadata: TRTLLMMHAMetadata, cache: PagedKVCache, case: ForwardCase) -> None:
    """Dead cells name live pages of other requests and pages never written, as a replayed table's stale cells do."""
    tables = (
        [metadata.page_table] if metadata.swa_page_table is None else [metadata.page_table, metadata.swa_page_table]
    )
    for table in tables:
        live = -(-metadata.cache_seqlens_int32 // case.page_size)
        columns = torch.arange(table.shape[1], device=table.device)
        foreign = (columns * 7 + 1) % cache.storage.shape[1]
        table.copy_(torch.where(columns < live.unsqueeze(1), table, foreign.to(torch.int32)))


def _draw_inputs(
    case: ForwardCase, device: torch.device, generator: torch.Generator
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
    model = case.model

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    query = randn(sum(case.q_lens), model.num_qo_heads, model.head_dim)
    directions = randn(model.num_kv_heads, model.head_dim)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    if case.inputs is Inputs.NEEDLES:
        # Every row leans toward its K/V head's direction; the needles' logits stand 10 above the others' ± 1.
        query = query + 4.0 * directions.repeat_interleave(model.group, dim=0)
    histories = []
    for request, kv_len in enumerate(case.kv_lens):
        keys = randn(kv_len, model.num_kv_heads, model.head_dim)
        values = randn(kv_len, model.num_kv_heads, model.head_dim)
        if case.inputs is Inputs.NEEDLES:
            needles = torch.tensor(_needles(case, request), dtype=torch.int64, device=device)
            keys[needles] += directions * (10.0 / (4.0 * model.softmax_scale))
        histories.append((_stored(keys, E4M3_K_SCALE, case), _stored(values, E4M3_V_SCALE, case)))
    return query.to(case.dtype), histories


def _needles(case: ForwardCase, request: int) -> list[int]:
    """Positions where an error of one shows: the ends of what each row sees, the pages' edges there, and their neighbours."""
    kv_len, q_len, size = case.kv_lens[request], case.q_lens[request], case.page_size
    edges = {0, kv_len - 1, (kv_len - 1) // size * size}
    for position in {kv_len - q_len, kv_len - q_len // 2 - 1, kv_len - 1}:
        edges |= {position, position // size * size}
        if case.window_left >= 0:
            edges |= {position - case.window_left}
    return sorted({position for edge in edges for position in (edge - 1, edge, edge + 1) if 0 <= position < kv_len})


def _stored(values: torch.Tensor, scale: float, case: ForwardCase) -> torch.Tensor:
    return quantize_e4m3(values, scale) if case.kv_dtype == E4M3 else values.to(case.kv_dtype)
