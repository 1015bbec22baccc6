"""Virtual slots against SGLang's unified pool: its translator and plan, its kernels, and the tables that its backend reads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import ForwardBatch, ForwardMode, KVPool, build_mha_metadata
from lab.metadata.engine.lengths import pad_requests
from tests.devices import IN_INTERPRETER
from tests.metadata.batches import MODES, Case, build, drawn_cases
from tests.metadata.sglang.mha import NAMES, REAL, Load, assert_same, captured, new_backend, server_batch
from tests.metadata.sglang.wheel import sglang_fixture

pytestmark = IN_INTERPRETER

ALLOCATOR = "sglang.srt.mem_cache.allocator.unified_hybrid_swa"
SLOTS = "sglang.kernels.ops.memory.virtual_slot"
TRANSLATOR = "sglang.srt.mem_cache.kv_index_translator"
IN_BOTH = [mode for mode in MODES if mode not in (ForwardMode.DRAFT_EXTEND, ForwardMode.RAGGED_VERIFY)]


sglang = sglang_fixture(
    *(*REAL, TRANSLATOR, SLOTS, "sglang.kernels.ops.kvcache.kv_read_table"),
    names=NAMES
    | {
        "sglang.srt.runtime_context.get_parallel": lambda: SimpleNamespace(attn_dcp_size=1),
        "sglang.srt.utils.is_npu": lambda: False,
        "sglang.srt.mem_cache.unified_draft_pool.fused_draft_host_allocator": lambda pool: None,
    },
)


def pages_of_window(pool: KVPool) -> torch.Tensor | None:
    """Return the window's page of each virtual one, -1 for none, and -1 at the end, as SGLang's table has it."""
    if pool.full_to_swa is None:
        return None
    pages = pool.full_to_swa[:-1].view(-1, pool.page_size)[:, 0] // pool.page_size
    pages = pages.masked_fill(pages == 0, -1)
    pages[0] = 0
    return torch.cat([pages, pages.new_tensor([-1])])


def translated(slots: torch.Tensor, pages: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots by a table of pages, one by one; what has no page is the sink."""
    found = []
    for slot in slots.tolist():
        page = int(pages[slot // page_size]) if slot >= 0 else -1
        found.append(page * page_size + slot % page_size if page > 0 else (slot % page_size if page == 0 else 0))
    return torch.tensor(found, dtype=torch.int64)


def new_translator(load: Load, pool: KVPool) -> Any:
    """Make SGLang's translator over an allocator that has the lab's pool's tables."""
    of_window, page_size, kv_pool = pages_of_window(pool), pool.page_size, object()
    full = torch.cat([pool.v2p, pool.v2p.new_tensor([-1])])
    name = "UnifiedMambaTokenToKVPoolAllocator" if of_window is None else "UnifiedSWAAllocatorBase"
    module = ALLOCATOR if of_window is not None else "sglang.srt.mem_cache.allocator.unified_mamba"
    allocator = getattr(load(module), name)()
    vars(allocator).update(
        page_size=page_size,
        full_v2p_page_table=full,
        swa_v2p_page_table=of_window,
        get_kvcache=lambda: kv_pool,
        translate_kv_loc=lambda slots: translated(slots, full, page_size),
        translate_write_loc=lambda slots: translated(slots, full, page_size),
        translate_loc_from_full_to_swa=lambda slots: translated(slots, of_window, page_size),
    )
    return load(TRANSLATOR).KVIndexTranslator(
        req_to_token=pool.req_to_token,
        token_to_kv_pool_allocator=allocator,
        token_to_kv_pool=kv_pool,
        page_size=page_size,
        device="cpu",
    )


def planned(translator: Any, server: Any, batch: ForwardBatch, case: Case) -> Any:
    """Bind the plan of a pass's iteration: of a draft it has the slots of all steps up to this one."""
    slots = server.out_cache_loc
    is_draft = batch.forward_mode in (ForwardMode.DECODE, ForwardMode.IDLE) and batch.spec_info is not None
    plan = translator.plan(
        req_pool_indices=server.req_pool_indices,
        seq_lens=server.seq_lens,
        seq_lens_cpu=server.seq_lens_cpu,
        write_virtual=slots,
        read_extent=case.new if is_draft or batch.forward_mode is ForwardMode.TARGET_VERIFY else 0,
    )
    plan.bind(server, translator)
    return plan


@given(case=drawn_cases(IN_BOTH, virtual=True).filter(lambda case: case.total_lens))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_every_mode(sglang: Load, case: Case) -> None:
    case = replace(case, host_seq_lens=False)
    batch, pool = build(case)
    server, translator = server_batch(sglang, batch), new_translator(sglang, pool)
    planned(translator, server, batch, case)
    backend = new_backend(
        sglang,
        pool,
        kv_index_translator=translator,
        speculative_step_id=case.new - 1,
        speculative_num_draft_tokens=None if batch.spec_info is None else batch.spec_info.num_draft_tokens,
        _swa_full_to_swa_mapping=None,
    )
    backend.init_forward_metadata(server)
    ours = build_mha_metadata(batch, pool)
    assert_same(ours, backend.forward_metadata, pool.page_size)
    padded = torch.nn.functional.pad(pool.physical_slots(batch.out_cache_loc), (0, case.num_padding_rows))
    assert server.out_cache_loc.tolist()[: len(padded)] == padded.tolist()
    # SGLang's table ends in the sink, as the lab's does.
    live = -(-ours.cache_seqlens_int32 // pool.page_size)
    for i, pages in enumerate(live.tolist()):
        assert not ours.page_table[i, pages:].any()


IN_GRAPHS = [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2]


def is_uniform(case: Case) -> bool:
    return bool(case.total_lens) and not case.num_padding_rows and len(set(case.new_lens)) <= 1


@given(case=drawn_cases(IN_GRAPHS, virtual=True).filter(is_uniform), padding=st.integers(0, 2))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_in_a_graph(sglang: Load, case: Case, padding: int) -> None:
    """The table is copied before the replay, and the graph's kernel writes lengths: together they are the eager pass's."""
    batch, pool = build(replace(case, host_seq_lens=False))
    if batch.spec_info is not None:
        batch = replace(batch, spec_info=replace(batch.spec_info, num_accept_tokens=None))
    padded = pad_requests(batch, batch.batch_size + padding)
    width = padded.num_tokens // padded.batch_size
    server, translator = server_batch(sglang, padded), new_translator(sglang, pool)
    planned(translator, server, padded, case)
    if padded.forward_mode is ForwardMode.DRAFT_EXTEND_V2:
        server.spec_info.num_tokens_per_req = width
    backend = new_backend(
        sglang,
        pool,
        kv_index_translator=translator,
        speculative_step_id=case.new - 1,
        speculative_num_draft_tokens=width if padded.spec_info is not None else None,
        _swa_full_to_swa_mapping=None,
    )
    theirs = captured(backend, server, num_requests=padded.batch_size + 1, num_tokens=padded.num_tokens + width)
    assert_same(build_mha_metadata(padded, pool), theirs, pool.page_size)


def test_slots_of_unmapped_pages(sglang: Load) -> None:
    """A slot whose virtual page has no page of the caches, and slot -1, are index 0 and no other cell of the sink."""
    pool = KVPool(num_requests=2, max_context_len=64, page_size=32, num_pages=5, num_virtual_pages=11)
    slots = torch.cat([pool.slots(pool.add_request(40), 0, 40), torch.arange(-1, 11 * 32)])
    theirs = sglang(SLOTS).translate_token_ids(loc=slots, v2p=pool.v2p, page_size=32, dcp_size=1, dcp_rank=0)
    assert (pool.v2p < 0).sum() == 8
    assert pool.physical_slots(slots).tolist() == theirs.tolist()
