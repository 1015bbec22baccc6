"""Judge the functions that build the metadata of attention calls for MHA, MLA and DeepSeek-V4: for one batch, then for another
one. The expected metadata is computed by loops over requests.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lab.checks.case_run import CaseRun
from lab.checks.explain.call_features import CallFeatures, features_of_case, kept
from lab.checks.parameters.metadata_axes import DIVISIBLE, DTYPES, ROWS, TWICE, VIRTUAL_WITH_HOLES, WITH_HOLES
from lab.checks.parameters.models import Configuration
from lab.checks.parameters.values import BatchPadding, Later, Prefixes
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.forward_mode import ForwardMode, QueryRows
from lab.metadata.engine.kv_pool import KVPool
from lab.metadata.engine.lengths import DraftAttention, with_padding_requests
from lab.workloads.inputs.expected_metadata import (
    wrong_dead_cells,
    wrong_dsv4_metadata,
    wrong_eager_metadata,
    wrong_eager_mla_metadata,
    wrong_mla_prefill_metadata,
)
from lab.workloads.interfaces import MetadataFunction
from lab.workloads.requests import PassLens, admit, new_pool

WINDOW_LEFT = 24
SLOTS = 3  # padding requests of a padded batch; also its number of padding rows


@dataclass(frozen=True)
class MetadataCase(PassLens):
    mode: ForwardMode
    prefix_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    draft_step: int | None = None
    page_size: int = 16
    rows: int = 1  # query rows per request in a verification; needed for an empty batch

    def later(self, how: Later) -> "MetadataCase":
        prefix_lens, q_lens, half = self.prefix_lens, self.q_lens, len(self.q_lens) // 2
        if how == Later.LONGER:
            prefix_lens = tuple(prefix + 3 * self.page_size + 5 for prefix in prefix_lens)
        elif how == Later.OTHERS:
            prefix_lens, q_lens = prefix_lens[::-1], q_lens[::-1]
        elif how == Later.FEWER:
            prefix_lens, q_lens = prefix_lens[half:], q_lens[half:]
        elif how == Later.MORE:
            prefix_lens, q_lens = prefix_lens * 2, q_lens * 2
        elif how.more_rows:
            q_lens = tuple(max(q_len + how.more_rows, 1) for q_len in q_lens)
        return replace(self, prefix_lens=prefix_lens, q_lens=q_lens, rows=self.rows + how.more_rows)


def metadata_case(of: Configuration) -> MetadataCase:
    page_size, requests = of["page_size"], of["requests"]
    in_turn = {
        Prefixes.NONE: (0,),
        Prefixes.NO_LIST: (0,),
        Prefixes.SOME_NONE: (0, 40, 0, 7),
        Prefixes.EQUAL: (page_size + 20,),
        Prefixes.AT_PAGE_EDGES: (page_size, page_size - 1, page_size + 1, 2 * page_size),
    }.get(of["prefixes"], (53, 7, 3 * page_size + 5, 17, 90))
    prefixes = [in_turn[request % len(in_turn)] for request in range(requests)]
    if isinstance(of["prefixes"], int) and requests:
        prefixes[of.seed % requests] = of["prefixes"]
    rows = ROWS.get(of["rows"], (of["rows"],))
    if of["rows"] == DIVISIBLE and requests % len(rows):
        rows = rows[:2]
    q_lens = [rows[request % len(rows)] for request in range(requests)]
    if of["rows"] == DIVISIBLE and requests % 2:
        q_lens[-1] = sum(rows) // len(rows)
    step = None if of["draft_step"] == "none" else of["draft_step"]
    return MetadataCase(ForwardMode[of["mode"]], tuple(prefixes), tuple(q_lens), step, page_size, rows[0])


def _tensors_of(*objects: Any) -> dict[str, Tensor]:
    named = {f"{type(each).__name__}.{name}": value for each in objects for name, value in vars(each).items()}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def _watched(*objects: Any) -> Callable[[], dict[str, Tensor]]:
    # The returned function returns copies, from before, of those tensors in attributes of `objects` that have changed.
    before = {name: tensor.clone() for name, tensor in _tensors_of(*objects).items()}
    return lambda: {name: old for name, old in before.items() if not torch.equal(old, _tensors_of(*objects)[name])}


def builder_of(
    run: CaseRun, interface: MetadataFunction, what: str = "the metadata", features: CallFeatures | None = None
) -> Callable[..., Any]:
    """Return the implementation's metadata builder in a wrapper. If the builder changes a tensor of its batch or K/V pool, the
    wrapper restores it, and records an error in which the metadata is named `what`, with `features` (None: the last call's).
    """
    function = run.function(interface)

    def build(batch: ForwardBatch, pool: KVPool, *arguments: Any, **options: Any) -> Any:
        inputs = [*filter(None, (batch, batch.spec_info, pool))]
        changed_inputs = _watched(*inputs)
        metadata = function(batch, pool, *arguments, **options)
        changed = changed_inputs()
        for name, before in changed.items():
            _tensors_of(*inputs)[name].copy_(before)
        run.expect(f"the inputs of {what}", [f"building {what} changed {name}" for name in changed], call=features)
        return metadata

    return build


def judge_metadata(run: CaseRun) -> None:
    """Judge the metadata of a forward pass, and then that of a later pass. When the later metadata is built, the first metadata
    must not change. When an engine overwrites the tensors of the later batch and its pool, the later metadata must not change.
    """
    of = run.case
    first = metadata_case(of)
    later = first.later(of["later"])
    pool = _pool(of, first, later, of.seed, run.device)
    batch = _batch(of, first, pool)
    changed = _watched(_built(run, "the metadata", batch, pool, features_of(run, first)))
    if of["later"] == Later.RENUMBERED:
        _renumber(batch, pool, of.seed)
    else:
        pool = _pool(of, first, later, of.seed + 1, run.device) if of["later"] == Later.ANOTHER_POOL else pool
        batch = _batch(of, later, pool)
    again = _built(run, "the metadata of a later pass", batch, pool, features_of(run, later))
    wrongs = [f"a later pass changed {name} of the first one's metadata" for name in changed()]
    run.expect("the first pass's metadata", wrongs, "invariants", features_of(run, first))
    expect_own_tensors(run, batch, pool, again, features_of(run, later))


def expect_own_tensors(
    run: CaseRun, batch: ForwardBatch, pool: KVPool, metadata: Any, features: CallFeatures | None = None
) -> None:
    changed, of_call = _watched(metadata), features or run.called
    of_batch = {**of_call.features, "narrow_seq_lens": batch.seq_lens.dtype == torch.int32}
    features = replace(of_call, features=kept(of_batch))
    for name, tensor in _tensors_of(batch, pool).items():
        tensor.add_(1)  # an engine writes the numbers of its next batch into the same tensors
        wrongs = [f"the metadata's {each} changed with {name}" for each in changed()]
        run.expect("own tensors", wrongs, "invariants", features)
        if wrongs:
            return


def features_of(run: CaseRun, case: Any) -> CallFeatures:
    """Return the features of `case`, a forward pass or a draft, together with those of `run.case`."""
    of_pass = features_of_case(case)
    return replace(of_pass, features={**of_pass.features, **run.called.features})


def _built(run: CaseRun, what: str, batch: ForwardBatch, pool: KVPool, features: CallFeatures) -> Any:
    metadata = builder_of(run, run.case.interface, what, features)(batch, pool, **_options(run.case))
    expect_metadata(run, what, _wrong(run.case, batch, pool, metadata), features)
    return metadata


def expect_metadata(run: CaseRun, what: str, wrongs: Iterable[str | None], features: CallFeatures) -> None:
    run.judged += 1
    run.expect(what, [f"{what}: {each}" for each in wrongs if each], "metadata", features)


def _options(of: Configuration) -> dict[str, Any]:
    if of.interface is MetadataFunction.MLA_METADATA:
        return {"attention": DraftAttention(of["attention"])}
    if of.interface is MetadataFunction.MLA_PREFILL:
        return {
            "disable_chunked_prefix_cache": of["prefix_cache"] == "not in chunks",
            "in_prefill_graph": of["prefill_graph"],
        }
    return {"expand_encoder_only_verify": True} if of.get("encoder_only") == "asked for" else {}


def _wrong(of: Configuration, batch: ForwardBatch, pool: KVPool, metadata: Any) -> Iterable[str | None]:
    where, options = (_on_cpu(batch), _on_cpu(pool), metadata), _options(of)
    if of.interface is MetadataFunction.MLA_METADATA:
        return wrong_eager_mla_metadata(*where, **options)
    if of.interface is MetadataFunction.MLA_PREFILL:
        return wrong_mla_prefill_metadata(batch, metadata, **options)
    if of.interface is MetadataFunction.DSV4_METADATA:
        return [wrong_dsv4_metadata(*where)]
    given = {"expand_encoder_only_verify": False} | options
    return [wrong_eager_metadata(*where, **given) or wrong_dead_cells(*where)]


def _on_cpu(of: Any) -> Any:
    twin = copy.copy(of)  # loops read tensors on the CPU fast
    vars(twin).update({name: value.cpu() for name, value in vars(of).items() if isinstance(value, Tensor)})
    return twin


def _pool(of: Configuration, first: MetadataCase, later: MetadataCase, seed: int, device: torch.device) -> KVPool:
    lens = (*first.kv_lens, *later.kv_lens) or (1,)
    spare = {"some more": 2 * first.page_size + 1, "a whole page more": first.page_size}
    pool = new_pool(
        lens,
        page_size=first.page_size,
        max_context_len=max(max(lens), 1) + spare.get(of["context"], 0),
        spare_pages=of["spare_pages"],
        # Other than in the full pool, so that the sizes of the two pools differ.
        swa_spare_pages=None if of.get("window", "none") == "none" else of["spare_pages"] - 3,
        virtual_slots=of["slots"] in ("virtual", VIRTUAL_WITH_HOLES),
        seed=seed,
        device=device,
    )
    # Rows of req_to_token still have slots of earlier requests, which belong to other requests now.
    slots = (pool.num_virtual_pages or pool.num_pages) * pool.page_size
    generator = torch.Generator().manual_seed(seed)
    left = torch.randint(pool.page_size, slots, (pool.req_to_token.shape[1],), generator=generator)
    pool.req_to_token[1:] = left.to(device)
    return pool


def _batch(of: Configuration, case: MetadataCase, pool: KVPool) -> ForwardBatch:
    if case.q_lens:
        requests = admit(pool, case.prefix_lens, case.q_lens, case.draft_step)
        if of.get("window", "none") in ("evicted", "evicted as -1"):
            kept = requests.evict(WINDOW_LEFT)
            if of["window"] == "evicted as -1":
                assert pool.full_to_swa is not None
                for row, first_kept in zip(requests.rows, kept, strict=True):
                    pool.full_to_swa[pool.slots(row, 0, first_kept)] = -1
        batch = requests.batch(case.mode, SLOTS if of["padding"] == BatchPadding.ROWS else 0)
        if of["slots"] in WITH_HOLES:
            _make_holes(pool, requests.rows)
        if of["prefixes"] == Prefixes.NO_LIST and not any(case.prefix_lens):
            batch = replace(batch, extend_prefix_lens=None, extend_prefix_lens_cpu=None)
    else:
        none = torch.zeros(0, dtype=torch.int64, device=pool.device)
        info = SpecInfo.of(case.mode, case.rows, draft_step=case.draft_step)
        batch = ForwardBatch(case.mode, none, none, none, 0, spec_info=info)
    if of["table_rows"] == TWICE:
        # The row of the longer request: the other row has no slots for its last tokens
        longer = max(0, len(case.q_lens) - 1, key=case.kv_lens.__getitem__)
        batch.req_pool_indices[[0, -1]] = int(batch.req_pool_indices[longer])
    if of["context"] == "exceeded":
        batch.seq_lens[0] = pool.max_context_len + 3 * pool.page_size  # more than a row of req_to_token holds
    if of["padding"].slot_length is not None:
        batch = _padded(of, case, batch)
    host_lens = tuple(batch.seq_lens.tolist()) if of["host_lens"] == "given" else None
    given = {name: (getattr(batch, name), dtype) for name, dtype in DTYPES[of["dtypes"]].items()}
    typed = {name: value.to(dtype) for name, (value, dtype) in given.items() if value is not None}
    batch = replace(batch, seq_lens_cpu=host_lens, **typed)
    if of["spec_info"] == "of a graph":
        batch = replace(batch, spec_info=_spec_info_of_a_graph(batch))
    return batch if of.get("host_rows", "given") == "given" else replace(batch, extend_seq_lens_cpu=None)


def _make_holes(pool: KVPool, rows: Sequence[int]) -> None:
    for number, row in enumerate(rows):
        first = number % 3 * pool.page_size
        slots = pool.req_to_token[row, first : first + pool.page_size]
        if pool.v2p is not None and number % 2:
            pool.v2p[slots[slots >= 0].long() // pool.page_size] = -1
        else:
            slots.fill_(-1)


def _padded(of: Configuration, case: MetadataCase, batch: ForwardBatch) -> ForwardBatch:
    has_lens = batch.extend_seq_lens is not None
    # If the mode has a fixed number of rows, padding requests have it too.
    width = 0 if has_lens and case.mode.query_rows is not QueryRows.FIXED else case.rows
    if batch.extend_seq_lens is not None:
        lens = torch.nn.functional.pad(batch.extend_seq_lens, (0, SLOTS), value=width)
        most_rows = max(case.q_lens, default=case.rows)
        batch = replace(batch, spec_info=SpecInfo.of(case.mode, most_rows, num_accept_tokens=lens))
    num_tokens = batch.num_tokens + SLOTS * (0 if case.mode is ForwardMode.DRAFT_EXTEND else case.rows)
    padded = with_padding_requests(batch, SLOTS, of["padding"].slot_length, width)
    out_cache_loc = padded.out_cache_loc if has_lens else batch.out_cache_loc
    return replace(padded, num_tokens=num_tokens, out_cache_loc=out_cache_loc)


def _spec_info_of_a_graph(batch: ForwardBatch) -> SpecInfo:
    of_graph = torch.arange(batch.batch_size + SLOTS, dtype=torch.int64, device=batch.seq_lens.device) % 5 + 7
    rows = batch.forward_mode.query_rows
    info = batch.spec_info or SpecInfo()
    longer = 2 if rows.are_bounded or (rows is QueryRows.DRAFT_TOKENS and batch.batch_size) else 0
    return replace(
        info,
        num_draft_tokens=None if info.num_draft_tokens is None else info.num_draft_tokens + longer,
        num_tokens_per_req=-1 if rows is QueryRows.FIXED else 13,
        num_accept_tokens=of_graph,
    )


def _renumber(batch: ForwardBatch, pool: KVPool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def new_pages(count: int) -> Tensor:
        others = torch.randperm(count - 1, generator=generator) + 1
        return torch.cat([torch.zeros(1, dtype=torch.int64), others]).to(pool.device)

    def moved(slots: Tensor, pages: Tensor, page_size: int = pool.page_size) -> Tensor:
        slots = slots.to(torch.int64)
        return torch.where(slots < 0, slots, pages[slots // page_size] * page_size + slots % page_size)

    pages = new_pages(pool.num_pages)
    if pool.v2p is not None:
        pool.v2p.copy_(moved(pool.v2p, pages, 1))
        return
    if pool.full_to_swa is not None:
        assert pool.swa_num_pages is not None
        slots = torch.arange(pool.num_pages * pool.page_size, device=pool.device)
        of_window = moved(pool.full_to_swa[slots], new_pages(pool.swa_num_pages))
        pool.full_to_swa[moved(slots, pages)] = of_window
    pool.req_to_token.copy_(moved(pool.req_to_token, pages))
    batch.out_cache_loc.copy_(moved(batch.out_cache_loc, pages))
