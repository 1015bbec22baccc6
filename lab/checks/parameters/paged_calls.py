"""Build the tensors and arguments of a call over a paged cache from a `Configuration`, a value for each parameter."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from lab.calls.problem import E4M3, AttentionCall
from lab.checks.parameters.attention import edge_lengths
from lab.checks.parameters.paged_axes import EQUAL, HEAD_PAGES, NO_SELECTION, RANKS, REQUESTS, SHORT
from lab.checks.parameters.values import (
    Cache,
    Chosen,
    Lengths,
    LongestRequest,
    Mask,
    Offsets,
    Pages,
    Rows,
    SeqLens,
    Sinks,
    Tables,
    empty_requests,
)
from lab.metadata.mla.metadata import allocate_multi_ctas_kv_counters
from lab.ranges import Ranges
from lab.workloads.attention_case import AttentionCase, Contents, Entries, Storage, TableTail
from lab.workloads.inputs.attention import AttentionInputs, build_attention
from lab.workloads.inputs.call import BuiltCall, random_mask
from lab.workloads.inputs.guards import embedded
from lab.workloads.inputs.masks import draft_masks, with_bits_after
from lab.workloads.inputs.ragged import padded
from lab.workloads.inputs.views import GAP, Layout, apart, with_odd_strides

LONGEST_OF_MANY = 600  # keys of the longest request in a large batch, so that a kernel splits only this request
CONTEXT_ROWS = (5, 1, 17, 2, 33)  # query rows of the requests in turn, in a context call
WIDE = 4200  # columns of a wide page table: more than 4,096
TAILS = {Tables.NEGATIVE_TAIL: TableTail.NEGATIVE, Tables.FAR_TAIL: TableTail.FAR}
PADDED = (Offsets.PADDED, Offsets.PADDED_WITH_NAN)
FAR_ENTRY = 2**30  # far outside every pool


class Lens(NamedTuple):
    kv_lens: tuple[int, ...]
    q_lens: tuple[int, ...]


def attention_case(of: Chosen, ranges: Ranges) -> AttentionCase:
    interface, page_size, dtypes = AttentionCall(of.interface), of["page_size"], of["dtypes"]
    lens = lens_of(of)
    width = max(-(-kv_len // page_size) for kv_len in lens.kv_lens)
    if interface is AttentionCall.MLA_DECODE:
        dims = of["head_dims"]
        heads = {"group": of["heads"], "num_kv_heads": 1, "head_dim": dims.head_dim, "v_head_dim": dims.v_head_dim}
    else:
        heads = {name: of[name] for name in ("group", "num_kv_heads", "head_dim")}
    return AttentionCase(
        interface,
        lens.kv_lens,
        lens.q_lens,
        **heads,
        dtype=dtypes.query,
        kv_dtype=dtypes.cache,
        arithmetic=ranges.arithmetic(dtypes.query, dtypes.cache),
        window_left=of.get("window_left", -1),
        sinks=of["sinks"] != Sinks.NONE,
        head_pages=HEAD_PAGES[of.get("head_pages", NO_SELECTION)],
        rank=RANKS[of.get("rank", "none")],
        offsets=interface is not AttentionCall.CONTEXT and of["offsets"] != Offsets.NONE,
        top_k=of.get("top_k", 0),
        entries=Entries[of["entries"].upper()] if of.get("top_k") else None,
        top_k_lens=of.get("top_k_lens", False),
        contents=Contents[of["contents"].upper()],
        seed=of.seed,
        storage=Storage(
            page_size,
            kv_layout=of.get("kv_layout", "HND"),
            table_tail=TAILS.get(of["block_tables"], TableTail.FOREIGN),
            spare_columns=max(WIDE - width, 0) if of["block_tables"] == Tables.WIDE else 3,
            page_seed=of.seed,
            stacked=of["cache"].is_one_tensor or of["cache"] == Cache.K_IS_V,
        ),
    )


def lens_of(of: Chosen) -> Lens:
    if of.interface is AttentionCall.CONTEXT:
        q_lens = rows_of_prompts(of)
    else:
        is_unequal, most = of["offsets"] == Offsets.UNEQUAL, of["q_len"]
        rows = [1 + (request + of.seed) % most if is_unequal else most for request in range(of["requests"])]
        q_lens = emptied(rows, of["offsets"])
    return Lens(kv_lens_of(of, q_lens), q_lens)


def rows_of_prompts(of: Chosen) -> tuple[int, ...]:
    unequal = CONTEXT_ROWS if of["requests"] <= REQUESTS else (1, 2, 3)
    rows = {Rows.UNEQUAL: unequal, Rows.ONE_EACH: (1,)}.get(of["rows"], (of["rows"], *CONTEXT_ROWS))
    q_lens = [rows[request % len(rows)] for request in range(of["requests"])]
    if isinstance(of["rows"], int):
        of_prompt = next(iter(longest_requests(of)))
        q_lens[0], q_lens[of_prompt] = q_lens[of_prompt], q_lens[0]
    return emptied(q_lens, of["offsets"])


def longest_requests(of: Chosen) -> list[int]:
    count = of["requests"]
    empty = {*empty_requests(of["offsets"], count), *empty_requests(of["lengths"], count)}
    places: LongestRequest = of.get("longest_request", LongestRequest.LAST)
    return [request for request in places.requests(count) if request not in empty] or [count - 1]


def emptied(lens: Sequence[int], without: Any) -> tuple[int, ...]:
    empty = empty_requests(without, len(lens))
    return tuple(0 if request in empty else length for request, length in enumerate(lens))


def with_long(kv_lens: list[int], of: Chosen, longest: Callable[[], int]) -> None:
    """Set `kv_lens` of the requests that `of["longest_request"]` selects: alternately to `longest()` and to half of it."""
    for number, request in enumerate(longest_requests(of)):
        kv_lens[request] = longest() // (1 + number % 2)


def fitted(kv_lens: Sequence[int], q_lens: Sequence[int], lengths: Any) -> tuple[int, ...]:
    of_rows: dict[Any, Sequence[int]] = {
        Lengths.AS_ROWS: q_lens,
        Lengths.OF_THE_NEXT: (*q_lens[1:], q_lens[0]),
        # 1 or 2 keys fewer than rows, but at least 1 if a request has several rows
        Lengths.FEWER: [max(rows - 1 - request % 2, rows // 2) for request, rows in enumerate(q_lens)],
    }
    return emptied(of_rows.get(lengths, list(map(max, kv_lens, q_lens))), lengths)


def generator(of: Chosen) -> random.Random:
    return random.Random(repr((of.interface.name, of.seed)))


def short_lens(rng: random.Random, tile: int, least: Sequence[int]) -> list[int]:
    if len(least) > REQUESTS:
        return [fewest + 3 * request % 47 for request, fewest in enumerate(least)]
    edges = edge_lengths(tile, EQUAL)
    return [rng.choice(edges) for _ in least]


def kv_lens_of(of: Chosen, q_lens: Sequence[int]) -> tuple[int, ...]:
    lengths, count, page_size, rng = of["lengths"], len(q_lens), of["page_size"], generator(of)
    kv_lens = short_lens(rng, page_size, [8] * count)
    if isinstance(lengths, int):
        with_long(kv_lens, of, lambda: lengths + rng.randrange(page_size))
    elif count > REQUESTS:
        with_long(kv_lens, of, lambda: LONGEST_OF_MANY)
    else:
        with_long(kv_lens, of, lambda: SHORT - rng.randrange(20))  # long enough that a window hides keys
        if of.get("pages") == Pages.TWICE:
            kv_lens = [kv_len + page_size for kv_len in kv_lens]
    if of.get("mask") == Mask.OWN_BIT_CLEAR:
        # One request has only the keys of the draft, so that its first row sees no key.
        kv_lens[min({*range(count)}.difference(longest_requests(of)), default=0)] = 0
    if lengths == Lengths.EQUAL:
        kv_lens = [EQUAL] * count
    return fitted(kv_lens, q_lens, lengths)


def paged_inputs(of: Chosen, ranges: Ranges, device: torch.device) -> AttentionInputs:
    inputs = _stored(build_attention(attention_case(of, ranges), device), of)
    mask: Mask = of.get("mask", Mask.NONE)
    if mask == Mask.NONE:
        return inputs
    shown = draft_masks(inputs.case)[mask.shown or "causal mask"]
    return replace(inputs, shown=(shown.tril(-1) if mask == Mask.OWN_BIT_CLEAR else shown).to(device))


def redrawn_paged(
    case: AttentionCase, ranges: Ranges, device: torch.device, lens: Lens, seed: int = 0, moved: bool = False
) -> AttentionInputs:
    """Return the tensors of a case for a graph replay, with the lengths `lens` and a random mask. The call has sinks if the
    case has them or, for MLA, if `ranges` permits them. `seed` is added to the seed of the data. If `moved`, the requests have
    other pages.
    """
    has_sinks = case.sinks or (case.is_mla and True in ranges.sinks)
    storage = replace(case.storage, page_seed=case.storage.page_seed + moved)
    drawn = replace(case, **lens._asdict(), seed=case.seed + seed, sinks=has_sinks, storage=storage)
    return replace(build_attention(drawn, device), shown=random_mask(drawn).to(device))


def _stored(inputs: AttentionInputs, of: Chosen) -> AttentionInputs:
    if of["pages"] == Pages.TWICE:
        inputs = _with_page_twice(inputs)
    form, case = of["cache"], inputs.case
    tokens = 1 if case.is_mla or case.storage.kv_layout == "NHD" else 2
    k_pages = form.of(inputs.k_pages, tokens)
    v_pages = k_pages if case.is_mla else form.of(inputs.v_pages, tokens)
    if form == Cache.V_OTHERWISE:
        v_pages = Cache.PAGES_APART.of(v_pages, tokens)
    elif form == Cache.V_INSIDE:
        v_pages = apart(v_pages, 2, GAP)
    elif form == Cache.K_IS_V:
        v_pages = k_pages
        inputs = replace(inputs, histories=tuple((keys, keys) for keys, _ in inputs.histories))
    inputs = replace(inputs, k_pages=k_pages, v_pages=v_pages)
    return inputs.with_separate_tables() if of["block_tables"].is_separate else inputs


def _with_page_twice(inputs: AttentionInputs) -> AttentionInputs:
    size, block_tables = inputs.case.page_size, inputs.block_tables.clone()
    histories = list(inputs.histories)
    for request, kv_len in enumerate(inputs.case.kv_lens):
        last = (kv_len - 1) // size
        if last > 0:
            block_tables[request, last] = block_tables[request, last - 1]
            positions = torch.arange(kv_len, device=block_tables.device)
            positions[last * size :] -= size
            keys, values = (side[positions] for side in histories[request])
            histories[request] = keys, values
    return replace(inputs, block_tables=block_tables, histories=tuple(histories))


def _backend(call: BuiltCall) -> None:
    case = call.inputs.case
    if call.forms.get("backend", "auto") != "auto":
        call.given["backend"] = call.forms["backend"]
        if call.inputs.scale_factors is not None:
            call.given |= call.inputs.scale_factor_arguments(interleaved=True)
    if call.forms.get("qk_nope_head_dim") == "a half":
        call.given["qk_nope_head_dim"] *= 2
    if call.forms.get("hints"):  # they only select which kernel runs
        is_var_seq = len(set(call.inputs.kv_lens)) > 1
        of_mla = {"is_var_seq": is_var_seq, "cute_dsl_impl": "modular", "kv_scale_format": "arbitrary_fp32"}
        call.given |= of_mla if case.is_mla else {"bf16q_fp8kv_transform_mode": "k_only"}
    # An engine passes the counters in every call. They must be zero again afterwards, so they count as an unchanged input.
    # One SM, because the counters of the engine's 8,192 requests are more than any GPU has SMs.
    call.given["multi_ctas_kv_counter_buffer"] = allocate_multi_ctas_kv_counters(
        len(case.q_lens), case.num_qo_heads, sm_count=1, device=call.device
    )


def _cache(call: BuiltCall) -> None:
    form, pages = call.forms["cache"], call.inputs.k_pages
    if form.is_one_tensor:
        whole = torch.stack((pages, call.inputs.v_pages), dim=1)
        if form == Cache.HALVES:
            whole = whole.transpose(0, 1).contiguous().transpose(0, 1)
        call.given["kv_cache"] = whole
        # Only a context call takes the scale factors of K and V as one tensor.
        if call.inputs.scale_factors is not None and call.interface is AttentionCall.CONTEXT:
            k, v = (each.view(torch.uint8) for each in call.given["kv_cache_sf"])
            call.given["kv_cache_sf"] = torch.stack((k, v), 1).view(E4M3)
    elif form in (Cache.K_IS_V, Cache.FOUR_AXES, Cache.FOUR_AXES_ODD_STRIDES):
        cache = pages.unsqueeze(1)
        call.given["kv_cache"] = with_odd_strides(cache) if form == Cache.FOUR_AXES_ODD_STRIDES else cache


def _selection(call: BuiltCall) -> None:
    if not call.inputs.case.top_k:
        return
    # Padding rows have entries far outside the pool.
    padding = {"block_tables": FAR_ENTRY, "sparse_mla_top_k_lens": call.inputs.case.top_k}
    for name, value in padding.items() if call.forms["offsets"] in PADDED else ():
        if name in call.given:
            call.given[name] = padded(call.given[name], value)
    if call.forms["seq_lens"] == SeqLens.AMID_OTHERS and "sparse_mla_top_k_lens" in call.given:
        call.given["sparse_mla_top_k_lens"] = embedded(call.given["sparse_mla_top_k_lens"], call.inputs.case.top_k)


def set_paged_forms(call: BuiltCall) -> None:
    _backend(call)
    _cache(call)
    _selection(call)
    tables, mask = call.forms["block_tables"], call.forms.get("mask", Mask.NONE)
    if tables in (Tables.ROWS_APART, Tables.SEPARATE_ROWS_APART):
        call.given["block_tables"] = apart(call.given["block_tables"], -2, GAP + 1)
    elif tables == Tables.AT_AN_ELEMENT:
        call.given["block_tables"] = Layout.AT_AN_ELEMENT.of(call.given["block_tables"])
    if mask == Mask.BITS_AFTER:
        call.given["mask"] = with_bits_after(call.given["mask"].cpu()).to(call.device)
    elif mask == Mask.AT_A_WORD:
        call.given["mask"] = Layout.AT_AN_ELEMENT.of(call.given["mask"])
