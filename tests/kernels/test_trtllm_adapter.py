"""The FlashInfer adapter without a GPU: its calls bind to the installed functions, and mean what the references compute."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lab import references
from lab.calls.problem import PagedAttention
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.gpus import Capability
from lab.kernels import flashinfer_call, trtllm
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments, pack_mask
from tests.devices import Operations
from tests.kernels.adapter_calls import (
    SINKS,
    SM90,
    SM100,
    SM120,
    TREE,
    TWO_SINKS,
    a_chunk,
    context,
    decode,
    expanded,
    expanded_nhd,
    function_of,
    into,
    k_for_v,
    mla,
    new_tokens,
    one_after_the_other,
    padded,
    permuted,
    ragged,
    remade,
    stacked,
    stacked_nhd,
    two_allocations,
    unstacked,
    widened,
    with_columns,
    without_requests,
)
from tests.kernels.conftest import Simulate
from tests.kernels.held import BF16, E4M3, ROUNDOFF, assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer import FMHA_V2

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FlashInfer's, of CUTLASS, at its import

PAGED = pytest.mark.parametrize("make", [decode, context], ids=["decode", "context"])
CPU = torch.device("cpu")
NO_KEY_AT_ALL = "ragged, no key at all"
SCALES: Arguments = {"bmm1_scale": torch.tensor([0.2]), "bmm2_scale": torch.tensor([0.7])}
QUANTISED: Arguments = {"kv_dtype": E4M3, "bmm1_scale": 0.2, "bmm2_scale": 0.7}
UINT32 = torch.tensor([16, 33, 5], dtype=torch.uint32)
TRANSFORM_MODE, SKIPPED_SOFTMAX = "bf16q_fp8kv_transform_mode", "skip_softmax_threshold_scale_factor"
K_ONLY: Arguments = {TRANSFORM_MODE: "k_only"}
Case = Callable[[], Arguments]


def call(entry: str, arguments: Arguments) -> Any:
    """Make a call, or prepare it."""
    return getattr(trtllm, entry + function_of(arguments))(**arguments)


def small(*args: Any, **changes: Any) -> Arguments:
    """A decode call of heads that XQA alone has kernels for."""
    return decode(*args, head_dim=16, **changes)


def wide_mla(*args: Any, **changes: Any) -> Arguments:
    """An MLA call that XQA takes: 128 heads, and a table of whole 128 tokens."""
    return with_columns(2)(mla(*args, **{"kv_lens": (5, 33), "heads": 128} | changes))


# By the kernel, and the function of FlashInfer's that is called for it. trtllm-gen's other calls are judged in `tests/dry_run`.
XQA: dict[str, Case] = {
    "decode": small,
    "verify": lambda: small(8, (8, 25)),
    "verify of 33 tokens": lambda: small(33, (40, 33)),
    "tree": lambda: small(5, mask=TREE),
    "window and sinks": lambda: small(window_left=7, sinks=SINKS),
    "e4m3 K/V and scales": lambda: small(**QUANTISED),
    "tensor scales": lambda: small(kv_dtype=E4M3, **SCALES),
    "one scale a tensor": lambda: small(kv_dtype=E4M3, bmm1_scale=torch.tensor(0.2), bmm2_scale=0.5),
    "scale in base 2": lambda: small(bmm1_scale_log2=torch.tensor([0.4]), bmm1_scale=9.0),
    "o_scale None": lambda: small(o_scale=None),
    "uint32 lengths": lambda: small(seq_lens=UINT32),
    "NHD": lambda: small(kv_layout="NHD"),
    "views of NHD": lambda: permuted(small(3)),
    "stacked": lambda: stacked(small()),
    "stacked NHD": lambda: stacked_nhd(small()),
    "K is V": lambda: k_for_v(small()),
    "two allocations": lambda: two_allocations(small()),
    "slice of a wider table": lambda: widened(small(2)),
    "given output": lambda: into()(small()),
}
FMHA: dict[str, Case] = {
    "causal": lambda: context(bmm1_scale=0.125),
    "not causal": lambda: context(causal=False),
    "window": lambda: context(window_left=3),
    "window 0": lambda: context(window_left=0),
    "sinks": lambda: context(sinks=SINKS),
    "e4m3": lambda: context(dtype=E4M3, bmm1_scale=0.05, bmm2_scale=0.7, out_dtype=BF16),
    "views of NHD": lambda: permuted(context()),
    "an NHD pool's halves, named as such": lambda: remade(
        "kv_cache", lambda cache: tuple(side.transpose(1, 2) for side in cache)
    )(permuted(context()) | {"kv_layout": "NHD"}),
    "stacked": lambda: stacked(context()),
    "stacked NHD": lambda: stacked_nhd(context()),
    "slice of a wider table": lambda: widened(context()),
    "stacked, slice of a wider table": lambda: widened(stacked(context())),
    "views of a stacked pool": lambda: unstacked(stacked(context())),
    "views of a stacked NHD pool": lambda: unstacked(stacked_nhd(context())),
    "expanded table": lambda: expanded(context()),
    "expanded table of an NHD pool": lambda: expanded_nhd(context()),
    "expanded table, slice of a wider one": lambda: widened(expanded(context())),
    "expanded table of a pool in one tensor": lambda: k_for_v(expanded(context())),
    "given output": lambda: into()(context()),
    "bound of rows above bound of keys": lambda: context((3,), (3,), max_q_len=64, max_kv_len=3),
}
# What FlashInfer's wrappers take too.
RAGGED_CALLS: dict[str, Case] = {
    "causal": ragged,
    "new tokens": new_tokens,
    "new tokens' LSE": lambda: new_tokens(return_lse=True),
    "chunk": a_chunk,
    "chunk with lengths on the host": lambda: a_chunk(on_host=True),
    "causal rows before the first key": lambda: ragged((4, 3, 6), (2, 20, 9), return_lse=True),
    "the same with lengths on the host": lambda: ragged((4, 3, 6), (2, 20, 9), return_lse=True, on_host=True),
    "no key at all": lambda: ragged((2, 1), (0, 0), return_lse=True),
    "requests without rows": lambda: ragged((0, 3, 0), (5, 3, 2)),
    "LSE": lambda: ragged(return_lse=True),
    "given LSE": lambda: ragged(return_lse=True, lse=torch.empty(11, 2)),
    "given out": lambda: into()(ragged()),
    "grouped heads": lambda: ragged(heads=(4, 2)),
    "128": lambda: ragged(dims=(128, 128)),
    "strided keys and values": lambda: one_after_the_other(ragged()),
    "uint32 lengths": lambda: ragged(seq_lens=torch.tensor([4, 20, 9], dtype=torch.uint32)),
}
XQA_MLA: dict[str, Case] = {
    "decode": wide_mla,
    "scales": lambda: wide_mla(dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "given out": lambda: into()(wide_mla()),
    "counters": lambda: wide_mla(multi_ctas_kv_counter_buffer=torch.zeros(1024, dtype=torch.int32)),
    "slice of a wider table": lambda: widened(wide_mla()),
    "one row": lambda: wide_mla(kv_lens=(70,)),
}
TRTLLM_GEN_RAGGED: dict[str, Case] = RAGGED_CALLS | {
    "sinks": lambda: ragged(attention_sinks=TWO_SINKS, return_lse=True),
    "sinks, chunk": lambda: a_chunk(attention_sinks=TWO_SINKS),
    "scales": lambda: ragged(bmm2_scale=0.5, return_lse=True),
    "tensor scales": lambda: a_chunk(bmm1_scale=torch.tensor([0.05]), bmm2_scale=torch.tensor([0.5])),
    "LSE of strided rows": lambda: ragged(return_lse=True, lse=torch.empty(2, 11).T),
    "empty rows looked for": lambda: a_chunk(skip_all_rows_active_check=False),
}
CASES: dict[str, tuple[Capability, str, Case]] = {
    f"{kernel}, {name}": (capability, called, case)
    for kernel, capability, called, cases in (
        ("XQA", SM90, DECODE, XQA),
        ("XQA by name", SM120, DECODE, {"decode": lambda: small(backend="xqa")}),
        ("fmha_v2", SM90, FMHA_V2, FMHA),
        ("XQA MLA", SM120, MLA, XQA_MLA),
        ("ragged", SM100, RAGGED, TRTLLM_GEN_RAGGED),
    )
    for name, case in cases.items()
}


class PreparedTwice:
    """Makes each call by a prepared one, twice: given results are full of 7 before the second time."""

    def __getattr__(self, function: str) -> Callable[..., Any]:
        return partial(self.call, function)

    def call(self, function: str, **arguments: Any) -> Any:
        ready = getattr(trtllm, f"prepare_{function}")(**arguments)
        ready()
        for name in ("out", "lse"):
            if arguments.get(name) is not None:
                arguments[name].fill_(7)
        result = ready()
        assert arguments.get("out") is None or arguments["out"] is (result[0] if isinstance(result, tuple) else result)
        return result


@pytest.mark.parametrize("name", CASES)
def test_a_prepared_call_is_right_again_and_again(simulate: Simulate, name: str) -> None:
    """The simulation computes in float64 and rounds once, as the references do: they differ by a flipped rounding at most."""
    capability, called, case = CASES[name]
    simulated = simulate(capability)
    arguments = case()
    assert_rounded(PreparedTwice(), function_of(arguments), arguments)
    assert [function for function, _ in simulated.calls] == ([] if name == NO_KEY_AT_ALL else [called] * 2)
    assert called != MLA or all(passed["backend"] == "xqa" for _, passed in simulated.calls)


def test_trtllm_gen_leaves_mla_rows_without_keys(simulate: Simulate) -> None:
    """FlashInfer's pull request 4975; rows with keys are right beside them."""
    simulate(SM100)
    arguments = mla(2, (0, 1, 9))
    out = torch.full((3, 2, 2, 512), math.nan, dtype=BF16)
    call("", arguments | {"out": out})
    expected = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert bool(out[0].isnan().all())
    assert bool(out[1, 0].isnan().all())
    torch.testing.assert_close(out[1:].flatten(0, 1)[1:], expected[1:].flatten(0, 1)[1:], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("arguments", "fills"),
    [
        (new_tokens, False),
        (lambda: a_chunk(on_host=True), False),
        (lambda: ragged(on_host=True), False),
        (lambda: ragged((4,), (2,), on_host=True), True),
        (ragged, True),
        (a_chunk, True),
    ],
    ids=["one tensor of offsets", "chunk and host", "causal and host", "too few keys", "causal", "chunk"],
)
def test_rows_without_keys_cost_launches_only_where_they_may_be(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, arguments: Case, fills: bool
) -> None:
    simulate(SM100)
    filled = []
    monkeypatch.setattr("lab.kernels.trtllm.ragged_context.fill_rows_without_keys", lambda *given: filled.append(given))
    call("", arguments())
    assert len(filled) == fills


# Signatures.


@pytest.mark.parametrize("renamed", [True, False], ids=["renamed", "dropped"])
def test_another_flashinfer_is_a_clear_error(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    """Each call binds to the real signature (as every simulated call does), and not to one without the parameter."""
    real = simulate(SM90).installed("flashinfer.decode", DECODE)[1]
    kept = [
        one.replace(name="new_sinks") if one.name == "sinks" else one
        for one in real.parameters.values()
        if renamed or one.name != "sinks"
    ]
    changed = lambda **arguments: pytest.fail("called"), real.replace(parameters=kept)
    monkeypatch.setattr(flashinfer_call, "installed", lambda *of: changed)
    with pytest.raises(NotImplementedError, match=f"{DECODE} of the installed.*'sinks'") as error:
        call("", decode(2, sinks=SINKS))
    assert flashinfer_call.version() in str(error.value)


def test_a_function_that_is_gone_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_call.importlib, "import_module", lambda module: SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"has no flashinfer\.decode\.no_such_function"):
        flashinfer_call.installed("flashinfer.decode", "no_such_function")


def test_an_older_flashinfer_takes_a_stacked_pool_and_refuses_a_pair(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 0.6.12, which asks a pair of K and V for its dimensions."""
    simulate(SM90)
    monkeypatch.delattr("flashinfer.prefill._check_paged_kv_non_interleaved")
    with pytest.raises(NotImplementedError, match=r"takes K and V as one \[num_pages, 2, \.\.\.\] tensor alone"):
        call("prepare_", context())
    assert_rounded(trtllm, CONTEXT, stacked(context()))


def test_defaults_are_not_passed(simulate: Simulate) -> None:
    """So that a FlashInfer without a parameter that nobody uses still runs."""
    simulated = simulate(SM90)
    call("", decode(bmm1_scale=1.0, window_left=-1, o_scale=1.0, uses_shared_paged_kv_idx=True, backend="auto"))
    required = {"query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"}
    assert set(simulated.calls[0][1]) == required


@pytest.mark.parametrize(("capability", "function"), [(SM90, DECODE), (SM100, DECODE), (SM100, CONTEXT)])
def test_everything_else_is_passed(simulate: Simulate, capability: Capability, function: str) -> None:
    simulated = simulate(capability)
    changes: Arguments = {"sinks": SINKS, "window_left": 3, "enable_pdl": False, "out_dtype": BF16}
    if function == DECODE:
        changes["backend"] = "xqa" if capability == SM90 else "trtllm-gen"
    if capability == SM100:
        counters = torch.zeros(1024, dtype=torch.uint8)
        changes |= {"lse": torch.empty(6 if function == DECODE else 22, 4), "multi_ctas_kv_counter_buffer": counters}
    arguments = decode(2, **changes) if function == DECODE else context(**changes)
    call("", arguments)
    for name in (*changes, "query", "seq_lens"):
        assert simulated.calls[0][1][name] is arguments[name], name


@pytest.mark.parametrize(
    ("capability", "make", "name", "expected"),
    [
        (SM100, lambda: decode(kv_dtype=E4M3, out_dtype=BF16, **K_ONLY), TRANSFORM_MODE, "k_only"),
        (SM100, lambda: decode(**K_ONLY), TRANSFORM_MODE, None),
        (SM90, lambda: decode(kv_dtype=E4M3, **K_ONLY), TRANSFORM_MODE, None),
        (SM90, lambda: context(**{SKIPPED_SOFTMAX: 2.0}), SKIPPED_SOFTMAX, 2.0),
        (SM90, lambda: context(**{SKIPPED_SOFTMAX: 0.0}), SKIPPED_SOFTMAX, None),
        (SM100, lambda: mla(return_lse=True, return_lse_base=None), "return_lse_base", "base2"),
    ],
)
def test_only_kernels_that_have_a_setting_get_it(
    simulate: Simulate, capability: Capability, make: Case, name: str, expected: Any
) -> None:
    """FlashInfer refuses a transform mode where nothing is converted (trtllm_fmha_kernel_launcher.cu 200)."""
    simulate(capability)
    assert call("prepare_", make()).arguments.get(name) == expected


def test_sinks_in_a_list_are_passed_as_their_tensor(simulate: Simulate) -> None:
    simulate(SM100)
    assert call("prepare_", mla(2, sinks=[TWO_SINKS])).arguments["sinks"].equal(TWO_SINKS)


def test_one_rank_of_context_parallelism_is_the_cake_kernels(simulate: Simulate) -> None:
    rank: Arguments = {"cp_world": 2, "cp_rank": 1, "causal_seqlens_kv_global": torch.zeros(3, dtype=torch.int32)}
    given = decode(head_dim=128, return_lse=True, **rank)
    simulate(SM100)
    made = trtllm.prepare_trtllm_batch_decode_with_kv_cache(**given)
    assert {name: made.arguments[name] for name in rank} == rank
    simulate(SM90)
    with pytest.raises(NotImplementedError, match="Cake decode of one rank needs a GPU of SM100 and SM103"):
        trtllm.prepare_trtllm_batch_decode_with_kv_cache(**given)


def test_nvfp4_scale_factors_go_as_a_pair_of_hnd_views(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = simulate(SM120)
    packed = torch.zeros(2, 5, 16, 2, 32, dtype=torch.uint8)  # NHD: [pages, tokens, heads, packed head_dim]
    factors = torch.ones(2, 5, 16, 2, 4).to(E4M3)
    monkeypatch.setattr(simulated, "call", lambda real, arguments: None)
    changes = {"kv_cache": tuple(packed), "kv_cache_sf": tuple(factors), "kv_layout": "NHD", "backend": "xqa"}
    call("", decode() | changes | {"block_tables": torch.zeros(3, 3, dtype=torch.int32)})
    passed = simulated.calls[0][1]
    assert "kv_layout" not in passed
    for name, last in (("kv_cache", 32), ("kv_cache_sf", 4)):
        assert isinstance(passed[name], tuple)
        assert [list(x.shape) for x in passed[name]] == [[5, 2, 16, last]] * 2


# Prepared calls.


# Two batches of the same shapes: other lengths and widths, pages, queries, keys and values.
BATCHES: dict[str, tuple[Arguments, Arguments]] = {
    DECODE: ({"kv_lens": (16, 33, 5)}, {"kv_lens": (33, 5, 16), "seed": 7}),
    CONTEXT: (
        {"q_lens": (5, 0, 17), "kv_lens": (21, 7, 17)},
        {"q_lens": (17, 5, 0), "kv_lens": (17, 21, 7), "seed": 7},
    ),
    MLA: ({"kv_lens": (5, 33, 70)}, {"kv_lens": (70, 5, 33), "seed": 7}),
    RAGGED: (
        {"q_lens": (4, 1, 6), "kv_lens": (7, 0, 20), "is_causal": False, "return_lse": True},
        {"q_lens": (6, 4, 1), "kv_lens": (0, 20, 7), "is_causal": False, "return_lse": True},
    ),
}
# The call of one of them, and torch's operations of a prepared call besides FlashInfer's; None: they are not counted.
REFILLED: dict[str, tuple[Capability, str, Callable[..., Arguments], list[str] | None]] = {
    "XQA": (SM90, DECODE, lambda i, **batch: small(**batch), []),
    "XQA, scale in base 2": (
        *(SM90, DECODE),
        lambda i, **batch: small(bmm1_scale_log2=torch.tensor([0.4 + i]), **batch),
        ["aten.mul.out"],
    ),
    "XQA, views of NHD": (SM90, DECODE, lambda i, **batch: permuted(small(**batch)), None),
    "XQA, slice of a wider table": (SM90, DECODE, lambda i, **batch: widened(small(**batch)), ["aten.copy_.default"]),
    "trtllm-gen decode": (SM100, DECODE, lambda i, **batch: decode(2, **batch), []),
    "trtllm-gen decode, slice of wider separate tables": (
        *(SM100, DECODE),
        lambda i, **batch: widened(decode(2, separate_tables=True, **batch)),
        None,
    ),
    "fmha_v2": (SM90, CONTEXT, lambda i, **batch: context(**batch), ["aten.add.out"]),
    "fmha_v2, slice of a wider table": (SM90, CONTEXT, lambda i, **batch: widened(context(**batch)), ["aten.add.out"]),
    "fmha_v2, stacked": (SM90, CONTEXT, lambda i, **batch: stacked(context(**batch)), []),
    "fmha_v2, stacked, slice of a wider table": (
        *(SM90, CONTEXT),
        lambda i, **batch: widened(stacked(context(**batch))),
        ["aten.copy_.default"],
    ),
    "fmha_v2, expanded table": (SM90, CONTEXT, lambda i, **batch: expanded(context(**batch)), []),
    "trtllm-gen MLA": (SM100, MLA, lambda i, **batch: widened(mla(2, **batch)), None),
    "trtllm-gen ragged": (SM100, RAGGED, lambda i, **batch: ragged(**batch), None),
}


def refill(buffers: Arguments, source: Arguments) -> None:
    """The contents of every tensor, as an engine refills the buffers of a CUDA graph."""
    for name, value in buffers.items():
        if isinstance(value, Tensor):
            value.copy_(source[name])
        elif isinstance(value, tuple):
            for part, other in zip(value, source[name], strict=True):
                part.copy_(other)
        else:
            assert value == source[name], f"{name} is no content"


@pytest.mark.parametrize("name", REFILLED)
def test_a_prepared_call_sees_new_contents(simulate: Simulate, name: str) -> None:
    capability, function, make, _ = REFILLED[name]
    simulate(capability)
    buffers, other = (make(i, **BATCHES[function][i]) for i in range(2))
    other["query"] = -other["query"]
    prepared = call("prepare_", buffers)
    prepared()
    refill(buffers, other)
    result, expected = prepared(), getattr(references, function)(**other)
    if function == RAGGED:
        torch.testing.assert_close(result[1], expected[1])
        result, expected = result[0], expected[0]
    assert float(references.relative_l2(result.flatten(0, -3), expected.flatten(0, -3)).max()) <= ROUNDOFF[BF16]


def without_attention(simulate: Simulate, monkeypatch: pytest.MonkeyPatch, capability: Capability) -> None:
    """A simulated FlashInfer whose functions do nothing."""
    installed = simulate(capability).installed
    monkeypatch.setattr(flashinfer_call, "installed", lambda *of: (lambda **arguments: None, installed(*of)[1]))


@pytest.mark.parametrize("name", [name for name, row in REFILLED.items() if row[3] is not None])
def test_what_a_prepared_call_does_besides_flashinfers(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    capability, function, make, expected = REFILLED[name]
    without_attention(simulate, monkeypatch, capability)
    prepared = call("prepare_", make(0, **BATCHES[function][0]))
    for _ in range(2):
        with Operations() as operations:
            prepared()
        assert operations.names == expected


def test_the_table_of_a_split_pool_is_made_without_the_host(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of host data cannot be captured in a CUDA graph, and the call can: two launches, one in a prepared one."""
    monkeypatch.setattr(PagedAttention, "check_values", lambda problem: None)  # as on a GPU
    without_attention(simulate, monkeypatch, SM90)
    arguments = context(workspace_buffer=torch.zeros(9 * MEBIBYTE, dtype=torch.uint8))
    with Operations() as operations:
        call("", arguments)
    views = ("select", "slice", "transpose", "view", "unsqueeze", "empty", "detach")
    launches = [name for name in operations.names if name.split(".")[1] not in views]
    assert launches == ["aten.arange.start_step", "aten.add.out"]


def test_keywords_are_bound_once(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding takes longer than the other checks together."""
    installed, asked = simulate(SM90).installed, []
    monkeypatch.setattr(flashinfer_call, "installed", lambda *of: asked.append(of) or installed(*of))
    for arguments in (small(), small(), small(window_left=3)):
        call("", arguments)
    assert len(asked) == 2


# What the adapter supplies.


@pytest.mark.parametrize("q_len", [1, 15, 16, 17, 31, 32, 33, 40])
def test_causal_mask_is_a_lower_triangle(q_len: int) -> None:
    mask = trtllm.causal_mask(3, q_len, CPU)
    assert mask.is_contiguous()
    assert mask.equal(pack_mask([torch.ones(q_len, q_len).tril().tolist()] * 3))


def test_causal_mask_is_built_once_per_power_of_two() -> None:
    masks = [trtllm.causal_mask(batch_size, 7, CPU) for batch_size in (5, 8, 6)]
    assert {mask.data_ptr() for mask in masks} == {masks[0].data_ptr()}
    assert [len(mask) for mask in masks] == [5, 8, 6]
    assert trtllm.causal_mask(9, 7, CPU).data_ptr() != masks[0].data_ptr()
    assert trtllm.causal_mask(1, 7, CPU).shape[0] == 1


def test_nothing_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    gpu = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match=r"causal mask of 4 requests of 39 tokens.*once before it"):
        trtllm.causal_mask(3, 39, gpu)
    with pytest.raises(RuntimeError, match=r"workspace.*once before it"):
        flashinfer_call.workspace_of(gpu, 12345)


@pytest.mark.parametrize("given", [None, torch.uint8, torch.int32, torch.float32], ids=str)
def test_a_workspace_serves_both_calls(simulate: Simulate, given: torch.dtype | None) -> None:
    """The lab's own or a given one: fmha_v2, between two decode calls, gets only what is after the semaphores."""
    simulated = simulate(SM90)
    workspace = None if given is None else torch.zeros(9 * MEBIBYTE // given.itemsize, dtype=given)
    for make in (small, context, small):
        arguments = make(workspace_buffer=workspace)
        assert_rounded(trtllm, function_of(arguments), arguments)
    first, prefill, second = (arguments["workspace_buffer"] for _, arguments in simulated.calls)
    assert first.data_ptr() == second.data_ptr()
    assert first is workspace or first.nbytes == SEMAPHORE_BYTES + flashinfer_call.SCRATCH_BYTES
    assert prefill.data_ptr() - first.data_ptr() == SEMAPHORE_BYTES == 8 * MEBIBYTE


@pytest.mark.parametrize(
    ("workspace", "error", "message"),
    [
        (torch.zeros(8 * MEBIBYTE, dtype=torch.uint8), ValueError, "has 8388608 bytes"),
        (torch.zeros(16, dtype=torch.uint8), ValueError, "has 16 bytes"),
        (torch.zeros(9 * MEBIBYTE, dtype=torch.uint8, device="meta"), ValueError, "on cpu, got .* on meta"),
        (torch.zeros(9 * MEBIBYTE, 2, dtype=torch.uint8)[:, 0], ValueError, "contiguous"),
        (12345, TypeError, "must be a torch.Tensor or None, got int"),
    ],
    ids=["semaphores alone", "tiny", "elsewhere", "with gaps", "no tensor"],
)
@PAGED
def test_a_workspace_that_does_not_fit_is_refused(
    simulate: Simulate, workspace: Any, error: type[Exception], message: str, make: Case
) -> None:
    simulate(SM90)
    with pytest.raises(error, match=f"workspace_buffer.*{message}"):
        call("prepare_", make() | {"workspace_buffer": workspace})


@PAGED
def test_a_refused_call_is_not_prepared(simulate: Simulate, make: Case) -> None:
    """An unsupported one with the reason, a malformed one with the argument."""
    simulate((8, 0))
    with pytest.raises(NotImplementedError, match=r"needs a GPU of SM90.*this is SM80"):
        call("prepare_", make())
    simulate(SM90)
    with pytest.raises(ValueError, match="query must be"):
        call("prepare_", remade("query", lambda query: query[0])(make()))


@pytest.mark.parametrize("make", [decode, context, mla, ragged], ids=[DECODE, CONTEXT, MLA, RAGGED])
def test_off_the_gpu_it_says_where_to_go(make: Case) -> None:
    with pytest.raises(
        NotImplementedError, match=r"need a CUDA GPU, .* on cpu.*lab.kernels.portable or lab.references"
    ):
        call("", make())


# Empty batches.


NO_ROWS: dict[str, Case] = {
    "decode": lambda: without_requests(decode(return_lse=True)),
    "context": lambda: without_requests(context(return_lse=True)),
    "context, padding": lambda: without_requests(context(return_lse=True), 3),
    "MLA": lambda: without_requests(mla(return_lse=True)),
    "MLA, padding": lambda: without_requests(mla((1, 4, 2), (3, 20, 70), return_lse=True), 7),
    "ragged": lambda: ragged((0, 0), (5, 2), return_lse=True),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_a_batch_without_rows_is_empty_without_flashinfer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_call, "installed", lambda *_: pytest.fail("FlashInfer was asked for"))
    arguments = NO_ROWS[name]()
    query = arguments["query"]
    last = {MLA: 512, RAGGED: 128}.get(function_of(arguments), 64)
    for out, lse in (call("", arguments), call("prepare_", arguments)()):
        assert out.shape == (*query.shape[:-1], last)
        assert lse.shape == out.flatten(0, -3).shape[:2]


def test_padding_is_left_out(simulate: Simulate) -> None:
    simulate(SM100)
    expected = references.trtllm_ragged_attention_deepseek(**ragged(return_lse=True))
    out, lse = (result[:11] for result in call("", padded(ragged(return_lse=True))))
    assert float(references.relative_l2(out, expected[0]).max()) <= ROUNDOFF[BF16]
    torch.testing.assert_close(lse, expected[1])
