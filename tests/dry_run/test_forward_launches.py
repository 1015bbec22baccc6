"""Every forward mode on a B200 that is not there: its launch is held to the lab's metadata, and its output to the truth.

Names of kernels rest on the table of flashinfer-cubin 0.6.13, so that only their parts are held: phase, head dims, pages, mask.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.calls.problem import AttentionCall
from lab.checks.properties.forward_modes import mode_cases, quantised_cases
from lab.checks.properties.mla_modes import mla_mode_cases
from lab.dry_run.launches import Launch
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode
from lab.metadata.mha.backend import PlannedCall
from lab.metadata.mla.backend import MLALayer, mla_max_seq_len
from lab.metadata.mla.metadata import QueryLayout, build_mla_prefill_metadata
from lab.metadata.mla.prefill import prepare_mla_prefill
from lab.ranges import Ranges
from lab.workloads.forward_case import ForwardCase
from lab.workloads.graph_case import GraphCase, MLAGraphCase, ReplaySequence, graph_modes
from lab.workloads.inputs.forward_pass import ForwardPass, build_forward
from lab.workloads.inputs.guards import same_bits
from lab.workloads.inputs.mla_pass import MLAPass, build_mla_pass
from lab.workloads.inputs.replay_backends import new_fixture
from lab.workloads.inputs.replay_fixture import ReplayFixture, right_runner
from lab.workloads.mla_case import MLACase
from lab.workloads.requests import admit, new_pool
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER, hold_map, hold_params, launches_of, tensor_map

pytestmark = [NEEDS_A_LAUNCHER, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CPU = torch.device("cpu")
NO_WINDOW = 2**31 - 1
LOG2_E = math.log2(math.e)
# Members of a launch with numbers for scales, one page table and no LSE.
PLAIN = {"ptr_scale_softmax_log2": 0, "ptr_output_scale": 0, "ptr_softmax_stats": 0, "uses_shared_paged_kv_idx": True}


def launched(forward: ForwardPass | MLAPass, empty_rows: Tensor | None = None) -> tuple[list[Launch], Tensor]:
    """Run a pass, and hold its output to the truth; return its launches and the output.

    Rows without keys, of which there may be `empty_rows`, are left as they were by trtllm-gen's MLA kernels.
    """
    out = forward.new_out()
    launches = launches_of(lambda implementation: forward.run(implementation, out))
    if empty_rows is not None:
        assert same_bits(out[empty_rows], forward.new_out()[empty_rows])
        out[empty_rows] = 0
    assert forward.truth().compare(forward.rows_of_requests(out)).passed
    return launches, out


def mha_cases() -> Iterator[ForwardCase]:
    for case in mode_cases("tiny", 64, (4,), long=(197, 300)):
        yield case
        if not case.encoder_only:
            yield replace(case, sliding_window=True)


@pytest.mark.parametrize(
    "case", [case for case in mha_cases() if case.context_parallel == case.decode_splits == 1], ids=repr
)
def test_mha(case: ForwardCase) -> None:
    forward = build_forward(case, CPU)
    launches, out = launched(forward)
    for planned, launch in zip(forward.plan, launches, strict=True):
        widths = list(case.q_lens[planned.first_request : planned.first_request + planned.num_requests])
        hold_mha(launch, forward, planned, widths, out)


@pytest.mark.parametrize("case", [case for case in mha_cases() if case.decode_splits > 1], ids=repr)
def test_mha_divided_by_length(case: ForwardCase) -> None:
    launches, _ = launched(build_forward(case, CPU))
    assert len(launches) == case.decode_splits
    assert sum(launch.params.batch_size for launch in launches) == len(case.q_lens)


@pytest.mark.parametrize("case", [case for case in mha_cases() if case.context_parallel > 1], ids=repr)
def test_mha_dealt_to_ranks(case: ForwardCase) -> None:
    forward = build_forward(case, CPU)
    launches, _ = launched(forward)
    for shard, launch in zip(forward.shards, launches, strict=True):
        table = shard.metadata.swa_page_table if case.sliding_window else shard.metadata.page_table
        hold_params(
            launch,
            ptr_page_idx_kv=table.data_ptr(),
            ptr_seq_lens_kv=shard.metadata.cache_seqlens_int32.data_ptr(),
            ptr_cum_seq_lens_q=shard.metadata.cu_seqlens_q.data_ptr(),
            batch_size=2 * len(case.q_lens),
            max_seq_len_q=shard.metadata.max_seq_len_q,
            sum_of_seq_lens_q=len(shard.rows),
        )


@pytest.mark.parametrize("case", [case for case in quantised_cases(Ranges(), 64) if case.query_dtype], ids=repr)
def test_mha_over_quantised_caches(case: ForwardCase) -> None:
    forward = build_forward(case, CPU)
    launches, _ = launched(forward)
    dtypes = "QE4m3KvE2m1OE4m3" if case.kv_dtype == torch.uint8 else "QkvE4m3OBfloat16"
    assert len(launches) == len(forward.plan)
    for launch in launches:
        assert f"_{dtypes}H64" in launch.name, launch.name
        hold_params(launch, output_scale=forward.layer.v_scale)


def hold_mha(launch: Launch, forward: ForwardPass, planned: PlannedCall, widths: list[int], out: Tensor) -> None:
    case, metadata, layer = forward.case, forward.metadata, forward.layer
    first, row, is_decode = planned.first_request, planned.first_row, planned.call is AttentionCall.DECODE
    table = metadata.swa_page_table if case.sliding_window else metadata.page_table
    lens = metadata.cache_seqlens_int32
    if metadata.encoder_page_table is not None:
        table, lens, widths = metadata.encoder_page_table, metadata.encoder_cache_seqlens, [1] * planned.num_rows
    is_uniform = is_decode and len(set(widths)) == 1
    hold_params(
        launch,
        **PLAIN,
        ptr_o=out[row:].data_ptr(),
        ptr_attention_sinks=layer.sinks.data_ptr(),
        ptr_page_idx_kv=table[first:].data_ptr(),
        ptr_seq_lens_kv=lens[first:].data_ptr(),
        ptr_cum_seq_lens_q=0 if is_uniform else metadata.cu_seqlens_q[first:].data_ptr(),
        ptr_cum_seq_lens_kv=0 if is_decode else metadata.cu_seqlens_k[first:].data_ptr(),
        scale_softmax_log2=layer.softmax_scale * LOG2_E,
        output_scale=1.0,  # the layer's scales count over quantised caches alone
        attention_window_size=case.window_left + 1 if case.sliding_window else NO_WINDOW,
        batch_size=len(widths),
        max_seq_len_q=max(widths) if is_decode else metadata.max_seq_len_q,
        max_seq_len_kv=case.max_context_len,
        max_num_pages_per_seq_kv=table.shape[1],
        num_heads_q=case.model.num_qo_heads,
        num_heads_kv=case.model.num_kv_heads,
        num_tokens_per_page_log2=case.page_size.bit_length() - 1,
        sum_of_seq_lens_q=planned.num_rows,
    )
    for member, side in zip(("tmaK_", "tmaV_"), forward.cache.as_hnd(), strict=True):
        hold_map(launch, member, side, (64, 64, case.model.num_kv_heads, 2 * side.shape[0]))
    assert tensor_map(launch, "tmaQ_").address == forward.query[row:].data_ptr()
    mask = (
        "SlidingOrChunkedCausal"
        if case.sliding_window
        else "Dense"
        if case.encoder_only and not is_decode
        else "Causal"
    )
    assert f"H64PagedKv{mask}P64" in launch.name
    assert launch.name.endswith("ForGen") == is_decode
    hold_grid(launch)


def hold_grid(launch: Launch) -> None:
    """Hold a grid to the parameters: CTAs of rows and of keys along x, which a cluster divides, requests along z."""
    params = launch.params
    ctas = params.max_num_ctas_q * params.max_num_ctas_kv * (2 if "2Cta" in launch.name else 1)
    assert (launch.grid[0], launch.grid[2]) == (ctas, params.batch_size)
    assert ctas % launch.cluster == 0
    assert params.max_num_ctas_q * params.num_tokens_per_cta_q >= params.max_seq_len_q
    assert launch.pdl


MLA_CASES = [
    replace(case, num_qo_heads=heads, page_size=page_size)
    for heads, page_size in ((16, 64), (128, 32))
    for case in mla_mode_cases(64, (4,))
]


@pytest.mark.parametrize("case", MLA_CASES, ids=repr)
def test_mla(case: MLACase) -> None:
    forward = build_mla_pass(case, CPU)
    without_keys = [seen == 0 for seen, rows in zip(case.seen_lens, case.q_lens, strict=True) for _ in range(rows)]
    (launch,), out = launched(forward, torch.tensor(without_keys))
    hold_mla(launch, forward, out)


def hold_mla(launch: Launch, forward: MLAPass, out: Tensor) -> None:
    case, metadata, layer = forward.case, forward.metadata, forward.layer
    cache, table = forward.cache.with_head_axis(), metadata.block_kv_indices
    own = metadata.query_layout is QueryLayout.VIEW
    hold_params(
        launch,
        **PLAIN | ({"ptr_o": out.data_ptr()} if own else {}),
        ptr_attention_sinks=0,
        ptr_page_idx_kv=table.data_ptr(),
        ptr_seq_lens_kv=metadata.seq_lens_k.data_ptr(),
        ptr_cum_seq_lens_q=0,
        ptr_cum_seq_lens_kv=0,
        scale_softmax_log2=layer.softmax_scale * LOG2_E,
        output_scale=1.0,  # the layer's scale counts over an e4m3 cache alone
        attention_window_size=NO_WINDOW,
        batch_size=len(case.q_lens),
        max_seq_len_q=metadata.max_seq_len_q,
        max_seq_len_kv=mla_max_seq_len(case.mode, metadata),
        max_num_pages_per_seq_kv=table.shape[1],
        num_heads_q=case.num_qo_heads,
        num_heads_kv=1,
        num_tokens_per_page_log2=case.page_size.bit_length() - 1,
        sum_of_seq_lens_q=metadata.max_seq_len_q * len(case.q_lens),
    )
    for member in ("tmaK_", "tmaV_"):
        hold_map(launch, member, cache, (case.head_dim, case.page_size, 1, cache.shape[0]))
    if own:
        assert tensor_map(launch, "tmaQ_").address == forward.query.data_ptr()
    assert f"HQk{case.head_dim}HV{case.kv_lora_rank}" in launch.name
    assert f"PagedKvDenseP{case.page_size}" in launch.name
    hold_grid(launch)


@pytest.mark.parametrize("prefix_lens", [(0, 0, 0), (70, 0, 3)], ids=["new tokens", "after prefixes"])
def test_mla_prefill(prefix_lens: tuple[int, ...]) -> None:
    q_lens, heads, layer = (5, 130, 33), 4, MLALayer(softmax_scale=192**-0.5)
    pool = new_pool(
        [sum(lens) for lens in zip(prefix_lens, q_lens, strict=True)], page_size=64, max_context_len=200, device=CPU
    )
    batch = admit(pool, prefix_lens, q_lens).batch(ForwardMode.EXTEND)
    metadata = build_mla_prefill_metadata(batch, pool)
    query, key, value = (
        torch.randn(sum(q_lens), heads, size, dtype=torch.bfloat16) for size in (192, 192, layer.v_head_dim)
    )
    out = torch.full((sum(q_lens), heads, layer.v_head_dim), math.nan, dtype=torch.bfloat16)
    (launch,) = launches_of(
        lambda implementation: prepare_mla_prefill(implementation, batch, metadata, layer, query, key, value, out=out)()
    )
    hold_params(
        launch,
        ptr_o=out.data_ptr(),
        ptr_page_idx_kv=0,
        ptr_seq_lens_kv=metadata.seq_lens.data_ptr(),
        ptr_cum_seq_lens_q=metadata.cum_seq_lens.data_ptr(),
        ptr_cum_seq_lens_kv=metadata.cum_seq_lens.data_ptr(),
        scale_softmax_log2=layer.softmax_scale * LOG2_E,
        output_scale=1.0,
        attention_window_size=NO_WINDOW,
        batch_size=3,
        max_seq_len_q=max(q_lens),
        max_seq_len_kv=max(q_lens),
        sum_of_seq_lens_q=sum(q_lens),
        sum_of_seq_lens_kv=sum(q_lens),
    )
    assert bool(launch.params.ptr_softmax_stats) == any(prefix_lens)
    for member, side in (("tmaK_", key), ("tmaV_", value)):
        hold_map(launch, member, side.permute(1, 0, 2).unsqueeze(0), (side.shape[2], sum(q_lens), heads, 1))
    assert "HQk192HV128SeparateQkvCausalVarSeq" in launch.name
    hold_grid(launch)
    assert bool(out.isfinite().all())


GRAPHS = [
    *(GraphCase(mode, ReplaySequence.A_B_A) for mode in graph_modes(4)),
    GraphCase(GraphMode(ForwardMode.DECODE), ReplaySequence.A_B_A, sliding_window=True),
    *(
        MLAGraphCase(mode, ReplaySequence.A_B_A, page_size=64, kv_lora_rank=512, qk_rope_head_dim=64, num_qo_heads=8)
        for mode in graph_modes(4)
    ),
]


@pytest.mark.parametrize("case", GRAPHS, ids=repr)
def test_padded_rows_of_graphs(case: Any) -> None:
    """Three requests in a graph of four: the launch is for four, from the runner's own buffers, and three are right."""
    made: list[ReplayFixture] = []
    launches_of(lambda implementation: made.append(new_fixture(case, implementation, CPU, right_runner)))
    (replays,) = made
    width = case.mode.num_tokens_per_req
    batch = replays.batch(width + 1, 2 * case.page_size, 3 * case.page_size + 1)
    replayed: list[Any] = []
    (launch,) = launches_of(lambda implementation: replayed.append(replays.replay(batch)))
    metadata = replayed[0].metadata
    is_mla = isinstance(case, MLAGraphCase)
    lengths = metadata.seq_lens_k if is_mla else metadata.cache_seqlens_int32
    windowed = not is_mla and case.sliding_window
    table = metadata.block_kv_indices if is_mla else metadata.swa_page_table if windowed else metadata.page_table
    hold_params(
        launch,
        batch_size=4,
        ptr_seq_lens_kv=lengths.data_ptr(),
        ptr_page_idx_kv=table.data_ptr(),
        max_num_pages_per_seq_kv=table.shape[1],
        sum_of_seq_lens_q=4 * width,
        max_seq_len_q=width,
    )
    assert list(replays.wrongs(batch, replayed[0])) == []


def test_all_modes_are_launched() -> None:
    launched = {case.mode for case in itertools.chain(mha_cases(), MLA_CASES)} | {ForwardMode.EXTEND}
    same_calls = {ForwardMode.SPLIT_PREFILL, ForwardMode.DLLM_EXTEND}  # as EXTEND's
    assert launched | same_calls == set(ForwardMode) - {ForwardMode.IDLE, ForwardMode.PREBUILT}
