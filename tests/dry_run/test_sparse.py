"""Sparse decode on a B200 that is not there: its launches are held to the calls and the metadata, and computed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls import AttentionCall
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.models import Configuration
from lab.checks.properties.mla_modes import two_pool_cases
from lab.dry_run.arithmetic import UnsoundLaunchError
from lab.dry_run.launches import Launch
from lab.dry_run.machine import machine
from lab.dry_run.passes import dry_run
from lab.kernels import trtllm
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.mha.backend import AttentionLayer
from lab.metadata.mha.block_sparse import BlockSparseBackend, build_block_sparse_metadata
from lab.ranges import Ranges
from lab.workloads.inputs.mla_pass import build_mla_pass
from lab.workloads.mla_case import MLACase
from lab.workloads.scenarios import timed_scenario
from tests.cases import DECODE, MLA, Arguments, block_sparse_arguments, latent_batch, random_batch, sparse_arguments
from tests.dry_run.on_a_b200 import NEEDS_A_LAUNCHER, hold_params, launches_of, tensor_map
from tests.kernels.held import BF16, E4M3, ROUNDOFF, assert_rounded
from tests.kernels.portable_calls import sinks_of
from tests.metadata.batches import build
from tests.metadata.test_block_sparse import HEADS, select
from tests.metadata.test_block_sparse import case_of as block_sparse_case

pytestmark = [NEEDS_A_LAUNCHER, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
INT_MAX = 2**31 - 1

# Passes of DeepSeek sparse attention.

PREFIXES = (1, 63, 64, 197, 300)
PASSES = [
    MLACase(mode, PREFIXES, q_lens, index_topk=130, num_qo_heads=heads, page_size=page_size, **options)
    for heads, page_size in ((16, 64), (128, 32))
    for mode, q_lens, options in (
        (ForwardMode.DECODE, (1,) * 5, {}),
        (ForwardMode.DECODE, (1,) * 5, {"draft_step": 1}),
        (ForwardMode.TARGET_VERIFY, (4,) * 5, {}),
        (ForwardMode.DRAFT_EXTEND_V2, (4,) * 5, {}),
        (ForwardMode.EXTEND, (5, 2, 70, 4, 1), {}),
    )
]


def right_pass(case: MLACase) -> tuple[Any, Tensor, Launch]:
    """Run a pass that makes one launch, and hold its output to the expected one. Return the pass, the output and the launch."""
    forward = build_mla_pass(case, torch.device("cpu"))
    out = forward.new_out()
    (launch,) = launches_of(lambda implementation: forward.run(implementation, out))
    assert forward.truth().compare(forward.rows_of_requests(out)).passed
    return forward, out, launch


@pytest.mark.parametrize("case", PASSES, ids=repr)
def test_a_pass(case: MLACase) -> None:
    """A row is a request of one row, and 130 columns are made 132."""
    forward, out, launch = right_pass(case)
    metadata: Any = forward.metadata
    rows = len(metadata.seq_lens)
    hold_params(
        launch,
        ptr_o=out.data_ptr(),
        ptr_seq_lens_kv=metadata.seq_lens.data_ptr(),
        ptr_cum_seq_lens_q=0,
        ptr_sparse_mla_top_k_lens=0,
        batch_size=rows,
        max_seq_len_q=1,
        max_seq_len_kv=metadata.max_seq_len,
        max_num_pages_per_seq_kv=132,
        sparse_attn_top_k=132,
        num_heads_q=case.num_qo_heads,
        sum_of_seq_lens_q=rows,
    )
    hold_pool(launch, forward.cache.storage)
    assert "HQk576HV512" in launch.name
    assert "PagedKvDenseStaticTokenSparseP1" in launch.name


@pytest.mark.parametrize(
    ("name", "columns", "heads"),
    [
        ("deepseek-v3/4q1s8k/topk2048/tp8", 2048, 16),
        ("deepseek-v4-flash/4q1s8k/tp8", 128 + 512, 8),
        ("deepseek-v4-flash/4q1s8k/tp8/ratio128", 128 + 128, 8),
        ("deepseek-v4-flash/4q1s8k/tp8/ratio0", 128, 8),
    ],
)
def test_a_scenario(name: str, columns: int, heads: int) -> None:
    """`lab dry-run` shows its launch without contents, and the floor counts the selected entries."""
    (dry,) = dry_run("b200", [(name, timed_scenario(f"decode/{name}"))]).passes
    (call,) = dry.calls
    assert (call.refusal, call.failure) == (None, None)
    hold_params(call.launches[0], sparse_attn_top_k=columns, batch_size=4, max_seq_len_q=1, num_heads_q=heads)
    if columns == 2048:
        assert "StaticTokenSparse" in call.launches[0].name
        assert dry.case.bytes_moved == 4 * 2048 * 576 * 2 + 4 * 16 * (576 + 512) * 2


def hold_pool(launch: Any, cache: Tensor) -> None:
    """The pool is rows of one entry, of which the launcher says that there are 2**31 - 1."""
    held = tensor_map(launch, "tmaK_")
    assert (held.address, held.dims) == (cache.data_ptr(), (cache.shape[-1], INT_MAX))
    assert held.strides_bytes == (cache.shape[-1] * cache.element_size(),)


# Passes of DeepSeek-V4, over two pools.


@pytest.mark.parametrize("case", [*two_pool_cases(4, num_qo_heads=16)], ids=str)
def test_a_pass_over_two_pools(case: MLACase) -> None:
    """Rows of a prefill are of its requests, and all other rows are requests of one row."""
    forward, out, launch = right_pass(case)
    metadata: Any = forward.metadata
    rows, offsets = len(metadata.seq_lens), metadata.cum_seq_lens_q
    lens = metadata.seq_lens if offsets is None else metadata.request_lens
    columns = metadata.sparse_indices(case.compress_ratio, getattr(forward, "topk_indices", None)).shape[1]
    hold_params(
        launch,
        ptr_o=out.data_ptr(),
        ptr_seq_lens_kv=lens.data_ptr(),
        ptr_cum_seq_lens_q=0 if offsets is None else offsets.data_ptr(),
        ptr_attention_sinks=forward.layer.sinks.data_ptr(),
        batch_size=len(lens),
        max_seq_len_q=metadata.max_q_len or 1,
        max_num_pages_per_seq_kv=columns,
        sparse_attn_top_k=columns,
        attention_window_size=128,
        num_heads_q=16,
        sum_of_seq_lens_q=rows,
    )
    hold_pool(launch, forward.cache.compressed.storage)
    assert tensor_map(launch, "tmaKSlidingWindowKvPool_").address == forward.cache.window.storage.data_ptr()


def over_two_pools(**values: Any) -> Any:
    return built_call(Configuration(AttentionCall.DSV4_DECODE, values, 1), Ranges(), torch.device("cpu"))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"dtypes": "e4m3/e4m3", "heads": 64, "q_len": 3, "sinks": "per head", "window_entries": "ordered"},
        {"q_len": 3, "offsets": "unequal", "columns": 640, "sparse_indices": "tail far outside"},
        {"columns": 128, "compressed_page_size": 32, "bmm2_scale": "0.9 as a tensor [1]"},
    ],
    ids=str,
)
def test_entries_of_two_pools(values: Arguments) -> None:
    call = over_two_pools(**{"heads": 8} | values)
    with machine("b200", computes=True):
        out = trtllm.trtllm_batch_decode_sparse_mla_dsv4(**call.given | {"workspace_buffer": None})
    assert call.truth().compare(out.flatten(0, -3)[: call.rows]).passed


def test_places_that_flashinfer_changes_on_the_gpu_are_refused() -> None:
    call = over_two_pools(heads=8, cache="pages apart")
    with machine("b200", computes=True), pytest.raises(NotImplementedError, match="pages have gaps"):
        trtllm.trtllm_batch_decode_sparse_mla_dsv4(**call.given | {"workspace_buffer": None})


# Decodes and verifications of MiniMax-M3, over copies of the pages that each K/V head selects.


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_block_sparse_pass(mode: ForwardMode) -> None:
    batch, pool = build(block_sparse_case(mode))
    metadata = build_block_sparse_metadata(batch, pool, HEADS)
    generator = torch.Generator().manual_seed(0)
    cache = pool.new_cache(HEADS, 64, BF16, KVLayout.NHD)
    cache.storage.normal_(generator=generator)
    rows, topk = len(metadata.query_seq_lens), select(batch, generator)
    query = torch.randn(rows, HEADS * 8, 64, generator=generator).to(BF16)

    def attend(implementation: Any) -> Tensor:
        out = torch.full_like(query, float("nan"))
        backend, layer = BlockSparseBackend(implementation), AttentionLayer(0.1)
        return backend.prepare_attention(batch, metadata, layer, query, cache, out=out, topk_indices=topk)()

    found: list[Tensor] = []
    (launch,) = launches_of(lambda implementation: found.append(attend(implementation)))
    assert float(references.relative_l2(found[0], attend(references)).max()) <= ROUNDOFF[BF16]
    hold_params(
        launch,
        use_block_sparse_attention=True,
        ptr_page_idx_kv=metadata.block_tables.data_ptr(),
        ptr_seq_lens_kv=metadata.seq_lens.data_ptr(),
        ptr_cum_seq_lens_q=0,
        batch_size=rows,
        max_seq_len_q=1,
        max_seq_len_kv=2048,
        max_num_pages_per_seq_kv=16,
        num_heads_kv=HEADS,
        num_tokens_per_page_log2=7,
        sum_of_seq_lens_q=rows,
    )
    page_bytes = 128 * 64 * 2
    assert tensor_map(launch, "tmaK_").strides_bytes[1:] == (16 * page_bytes, page_bytes)  # of heads, and of pages
    assert tensor_map(launch, "tmaV_").strides_bytes == tensor_map(launch, "tmaK_").strides_bytes


# Calls.


def entries(q_lens: list[int], kv_lens: list[int], heads: int = 8, rope: int = 64, **changes: Any) -> Arguments:
    drawn = {name: changes.pop(name) for name in ("dtype", "kv_dtype") if name in changes}
    batch = latent_batch(q_lens, kv_lens, heads=heads, rank=512, rope=rope, **drawn)
    columns = [
        [3 * column % (position + 1) if column <= position and column % 3 != 1 else -1 for column in range(12)]
        for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
        for position in range(kv_len - q_len, kv_len)
    ]
    usual = {"out": None, "bmm1_scale": 0.05, "return_lse": False, "return_lse_base": None}
    return sparse_arguments(batch, columns, 64, **usual | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"heads": 128},
        {"heads": 20, "width": 20},
        {"dtype": E4M3, "kv_dtype": E4M3, "bmm2_scale": 0.7},
        {"sinks": sinks_of(8), "return_lse": True},
        {"return_lse": True, "return_lse_base": "basee"},
        {"bmm1_scale": torch.tensor([0.05]), "bmm2_scale": torch.tensor([0.7])},
    ],
    ids=str,
)
def test_selected_entries(changes: Arguments) -> None:
    with machine("b200", computes=True):
        assert_rounded(trtllm, MLA, entries([2, 2], [20, 70], **changes))
        if "return_lse" not in changes:
            assert_rounded(trtllm, MLA, entries([2, 1, 4], [20, 5, 70], ragged=True, max_q_len=5, **changes))


def test_columns_after_a_rows_position_are_not_read() -> None:
    arguments = entries([2], [3])
    places = arguments["block_tables"][0]
    assert places[:, 3:].eq(-1).all()
    places[0, 2] = places[0, 0] + 1  # the first row is at position 1
    with machine("b200", computes=True):
        assert_rounded(trtllm, MLA, arguments)


@pytest.mark.parametrize("heads", [8, 128])
def test_numbers_of_selected_entries(heads: int) -> None:
    """Only without a rotary part does the launcher take them; the kernel has a second descriptor of the same pool."""
    arguments = entries([2, 2], [20, 70], heads, 0, lens=[1, 12, 5, 12], return_lse=True)
    with machine("b200", computes=True) as gpu:
        assert_rounded(trtllm, MLA, arguments)
        (launch,) = (each for each in gpu.launches if each.name.startswith("fmhaSm"))
    hold_params(launch, ptr_sparse_mla_top_k_lens=arguments["sparse_mla_top_k_lens"].data_ptr(), sparse_attn_top_k=12)
    hold_pool(launch, arguments["kv_cache"])
    assert tensor_map(launch, "tmaKSlidingWindowKvPool_").address == arguments["kv_cache"].data_ptr()
    assert "DynamicTokenSparseP1" in launch.name


def test_an_entry_outside_the_pool_is_found() -> None:
    arguments = entries([1], [20])
    unchecked = {"block_tables": arguments["block_tables"].clone()}
    with machine("b200", computes=True):
        call = trtllm.prepare_trtllm_batch_decode_with_kv_cache_mla(**arguments | unchecked)
        unchecked["block_tables"][0, 0, 0] = arguments["kv_cache"][..., 0].numel()
        with pytest.raises(UnsoundLaunchError, match="K's entries"):
            call()


def pages(batch_kv_lens: list[int], page_size: int, num_kv_heads: int) -> list[list[list[int]]]:
    counts = [-(-kv_len // page_size) for kv_len in batch_kv_lens]
    return [[sorted(range(count - 1, -1, -(head + 1))) for count in counts] for head in range(num_kv_heads)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 64, "kv_layout": "NHD"},
        {"sinks": sinks_of(6)},
        {"return_lse": True},
        {"kv_dtype": E4M3, "dtype": E4M3, "bmm2_scale": 0.7},
        {"bmm1_scale_log2": torch.tensor([0.1])},
    ],
    ids=str,
)
@pytest.mark.parametrize("q_lens", [[1, 1, 1], [3, 3, 3], [1, 4, 2]], ids=str)
def test_pages_of_each_head(q_lens: list[int], changes: Arguments) -> None:
    changes, kv_lens = dict(changes), [50, 250, 300]
    page_size = changes.pop("page_size", 16)
    drawn = {"dtype": BF16} | {name: changes.pop(name) for name in ("dtype", "kv_dtype") if name in changes}
    batch = random_batch(q_lens, kv_lens, heads=(6, 2), head_dim=64, **drawn)
    usual: Arguments = {"bmm1_scale": 0.1, "out_dtype": BF16, "return_lse": False, "poison": float("nan")}
    if drawn["dtype"] == E4M3:
        usual["poison"] = 0.0
    usual["ragged"] = len(set(q_lens)) > 1
    arguments = block_sparse_arguments(batch, pages(kv_lens, page_size, 2), page_size, **usual | changes)
    with machine("b200", computes=True) as gpu:
        assert_rounded(trtllm, DECODE, arguments)
        launch = next(each for each in gpu.launches if each.name.startswith("fmhaSm"))
    hold_params(
        launch,
        use_block_sparse_attention=True,
        ptr_page_idx_kv=arguments["block_tables"].data_ptr(),
        ptr_seq_lens_kv=arguments["seq_lens"].data_ptr(),
        max_num_pages_per_seq_kv=arguments["block_tables"].shape[2],
        batch_size=3,
        num_heads_kv=2,
        sum_of_seq_lens_q=sum(q_lens),
        attention_window_size=INT_MAX,
    )
