"""FlashInfer's wrappers and FlashAttention-4 without a GPU: calls bind to their functions, and mean what the references do."""

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import PagedAttention
from lab.gpus import Capability
from lab.kernels import prepare, trtllm
from lab.kernels.peers import flash_attention_4, flashinfer_mla, flashinfer_paged, flashinfer_ragged, planned
from lab.kernels.support import Kernel, kernel_names
from lab.kernels.support.peers import FA2_PAGED, FA3_PAGED, FLASH_ATTENTION_4
from tests.cases import CONTEXT, DECODE, Arguments
from tests.kernels.adapter_calls import (
    SINKS,
    SM80,
    SM90,
    SM100,
    SM120,
    TREE,
    case,
    function_of,
    gapped,
    into,
    mla,
    padded,
    ragged,
    v_elsewhere,
    widened,
    with_gaps,
    without_requests,
    without_rows,
)
from tests.kernels.conftest import Simulate
from tests.kernels.held import BF16, E4M3, FP16, ROUNDOFF, assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flash_attention_4 import SimulatedFlashAttention4
from tests.kernels.simulated_flashinfer import DECODE_WRAPPER, MLA_WRAPPER, PREFILL_WRAPPER, RAGGED_WRAPPER
from tests.kernels.test_trtllm_adapter import NO_KEY_AT_ALL, RAGGED_CALLS

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

decode, context = (partial(case, function, bmm1_scale=0.125) for function in (DECODE, CONTEXT))
Case = Callable[[], Arguments]
WRAPPED: dict[str, tuple[Any, Case]] = {  # an implementation by wrappers, and a call that it takes
    "decode": (flashinfer_paged, decode),
    "context": (flashinfer_paged, context),
    "MLA": (flashinfer_mla, mla),
    "ragged": (flashinfer_ragged, ragged),
}
WITH_FA4 = WRAPPED | {
    "FlashAttention-4, decode": (flash_attention_4, decode),
    "FlashAttention-4, context": (flash_attention_4, context),
}
FA4 = "_flash_attn_fwd"
EACH = pytest.mark.parametrize("name", WRAPPED)
OWN = ("fa2", "fa3", "fa2", "fa2")  # on SM80, SM90, SM100 and SM120
# Those of the paged wrappers, by the wrapper that the call comes to, and FlashAttention-4's.
BOTH: dict[str, tuple[str, Case]] = {
    "decode": (DECODE_WRAPPER, decode),
    "decode of every head its own K/V": (DECODE_WRAPPER, lambda: decode(heads=(2, 2))),
    "decode of groups of 3": (DECODE_WRAPPER, lambda: decode(heads=(6, 2))),
    "decode of groups of 8": (DECODE_WRAPPER, lambda: decode(heads=(8, 1))),
    "decode, window": (DECODE_WRAPPER, lambda: decode(window_left=4)),
    "decode, window 0": (DECODE_WRAPPER, lambda: decode(window_left=0)),
    "decode, LSE": (DECODE_WRAPPER, lambda: decode(return_lse=True)),
    "decode, no keys": (DECODE_WRAPPER, lambda: decode(1, (0, 1, 16), return_lse=True)),
    "decode, NHD": (DECODE_WRAPPER, lambda: decode(kv_layout="NHD")),
    "decode, fp16": (DECODE_WRAPPER, lambda: decode(dtype=FP16)),
    "decode, bmm2_scale": (DECODE_WRAPPER, lambda: decode(bmm2_scale=0.7, return_lse=True)),
    "decode, sinks": (PREFILL_WRAPPER, lambda: decode(sinks=SINKS, return_lse=True)),
    "decode, sinks and window": (PREFILL_WRAPPER, lambda: decode(sinks=SINKS, window_left=4)),
    "verify": (PREFILL_WRAPPER, lambda: decode(5)),
    "verify, rows before the first key": (PREFILL_WRAPPER, lambda: decode(5, (16, 3, 0), return_lse=True)),
    "verify, window and LSE": (PREFILL_WRAPPER, lambda: decode(5, window_left=3, return_lse=True)),
    "verify, sinks": (PREFILL_WRAPPER, lambda: decode(5, sinks=SINKS, return_lse=True)),
    "context": (PREFILL_WRAPPER, context),
    "context, not causal": (PREFILL_WRAPPER, lambda: context(causal=False, return_lse=True)),
    "context, window": (PREFILL_WRAPPER, lambda: context(window_left=4, return_lse=True)),
    "context, sinks": (PREFILL_WRAPPER, lambda: context(sinks=SINKS, return_lse=True)),
    "context, pages of 1": (PREFILL_WRAPPER, lambda: context(page_size=1)),
}
FA2: dict[str, tuple[str, Case]] = {
    "decode, e4m3 K/V": (DECODE_WRAPPER, lambda: decode(kv_dtype=E4M3, bmm2_scale=0.5)),
    "verify, e4m3 K/V": (PREFILL_WRAPPER, lambda: decode(5, kv_dtype=E4M3)),
    "verify, a tree": (PREFILL_WRAPPER, lambda: decode(5, mask=TREE, return_lse=True)),
    "verify, a tree and a window": (PREFILL_WRAPPER, lambda: decode(5, mask=TREE, window_left=3)),
    "verify, a tree without keys": (PREFILL_WRAPPER, lambda: decode(5, (16, 0, 7), mask=TREE)),
    "verify, a tree of fewer keys": (PREFILL_WRAPPER, lambda: decode(5, (3, 16, 7), mask=TREE)),
    "decode, V elsewhere": (PREFILL_WRAPPER, lambda: v_elsewhere(decode())),
    "verify, V elsewhere": (PREFILL_WRAPPER, lambda: v_elsewhere(decode(5))),
}
FA3: dict[str, tuple[str, Case]] = {
    "decode, e4m3": (DECODE_WRAPPER, lambda: decode(dtype=E4M3, out_dtype=BF16, bmm2_scale=0.5)),
    "context, e4m3": (PREFILL_WRAPPER, lambda: context(dtype=E4M3, out_dtype=FP16, return_lse=True)),
}
MLA_WRAPPED: dict[str, Case] = {
    "decode": mla,
    "verify": lambda: mla(4),
    "LSE": lambda: mla(3, return_lse=True),
    "LSE in base e": lambda: mla(3, return_lse=True, return_lse_base="basee"),
    "given LSE": lambda: mla(return_lse=True, lse=torch.empty(3, 1, 2)),
    "given out": lambda: into()(mla(2)),
    "ragged": lambda: mla((1, 4, 2), (3, 20, 70)),
    "slice of a wider table": lambda: widened(mla(2)),
    "pages with gaps": lambda: with_gaps(mla(2)),
    "uint32 lengths": lambda: mla(seq_lens=torch.tensor([5, 33, 70], dtype=torch.uint32)),
    "fp16": lambda: into(FP16)(mla(2, dtype=FP16)),
    "e4m3 cache": lambda: mla(2, kv_dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "ragged LSE": lambda: mla((1, 4, 2), (3, 20, 70), return_lse=True),
    "no keys": lambda: mla(2, (0, 1, 9)),
    "no key at all": lambda: mla(1, (0, 0)),
    "pages of 16": lambda: mla(2, page_size=16),
}
# What trtllm-gen has no kernel for in the table of flashinfer-cubin 0.6.13, besides the calls that both take.
RAGGED_WRAPPED: dict[str, Case] = RAGGED_CALLS | {
    "fp16": lambda: ragged(dtype=FP16),
    "window": lambda: ragged(window_left=3, return_lse=True),
    "wide window": lambda: ragged(window_left=20, return_lse=True),
}
# Of FlashAttention-4, which has no bmm2_scale.
FOR_FA4: dict[str, Case] = {
    **{name: arguments for name, (_, arguments) in BOTH.items() if "bmm2_scale" not in name},
    "decode, V elsewhere": lambda: v_elsewhere(decode()),
    "verify, a strided query": lambda: gapped("query", 8)(decode(5)),
    "a strided LSE": lambda: decode(5, return_lse=True, lse=torch.empty(4, 15).T),
    "context, a strided LSE": lambda: context(return_lse=True, lse=torch.empty(4, 22).T),
    "uint32 lengths": lambda: decode(seq_lens=torch.tensor([16, 33, 5], dtype=torch.uint32)),
}
# Implementation, its wrapper and backend, and the call.
RIGHT: dict[str, tuple[Any, str, str, Case]] = {
    **{f"fa2, {name}": (flashinfer_paged.fa2, row[0], "fa2", row[1]) for name, row in (BOTH | FA2).items()},
    **{f"fa3, {name}": (flashinfer_paged.fa3, row[0], "fa3", row[1]) for name, row in (BOTH | FA3).items()},
    **{f"MLA, {name}": (flashinfer_mla, MLA_WRAPPER, "fa3", case) for name, case in MLA_WRAPPED.items()},
    **{f"ragged, {name}": (flashinfer_ragged, RAGGED_WRAPPER, "fa3", case) for name, case in RAGGED_WRAPPED.items()},
    **{f"FlashAttention-4, {name}": (flash_attention_4, FA4, "", case) for name, case in FOR_FA4.items()},
}


def assert_right(implementation: Any, arguments: Arguments) -> None:
    """The simulation computes in float64 and rounds once, as the references do, but a paged bmm2_scale is a second rounding."""
    roundings = 1 if arguments.get("bmm2_scale", 1.0) == 1 else 2
    assert_rounded(implementation, function_of(arguments), arguments, roundings)


def call(implementation: Any, arguments: Arguments, entry: str = "") -> Any:
    return getattr(implementation, entry + function_of(arguments))(**arguments)


@pytest.mark.parametrize("name", RIGHT)
def test_a_wrapper_is_right(simulate: Simulate, name: str) -> None:
    simulated = simulate()
    implementation, wrapper, backend, arguments = RIGHT[name]
    assert_right(implementation, arguments())
    called = [(plan["wrapper"], plan["backend"]) for plan in simulated.plans] + [(FA4, "")] * len(simulated.fa4.calls)
    assert called == ([] if name == NO_KEY_AT_ALL else [(wrapper, backend)])


# Which backend, and what it chooses.


@EACH
def test_a_gpu_has_its_own_backend_and_either_by_name(simulate: Simulate, name: str) -> None:
    module, make = WRAPPED[name]
    own = [(module, capability, backend) for capability, backend in zip((SM80, SM90, SM100, SM120), OWN, strict=True)]
    for implementation, capability, backend in (*own, (module.fa2, SM90, "fa2"), (module.fa3, SM90, "fa3")):
        simulated = simulate(capability)
        call(implementation, make(), "plan_")
        assert simulated.plans[0]["backend"] == backend
        assert implementation is module or implementation.__name__ == f"{module.__name__}:{backend}"


@pytest.mark.parametrize(("capability", "kernel"), [(SM90, FA3_PAGED), (SM100, FA2_PAGED)], ids=str)
def test_a_report_names_the_kernel_that_runs(simulate: Simulate, capability: Capability, kernel: Kernel) -> None:
    simulate(capability)
    named = ((flashinfer_paged, kernel), (flashinfer_paged.fa2, FA2_PAGED), (flash_attention_4, FLASH_ATTENTION_4))
    for implementation, its_kernel in named:
        assert kernel_names(implementation, [DECODE], torch.device("cpu")) == its_kernel.name
    assert kernel_names(trtllm.mla_decode, [DECODE], torch.device("cpu")) == "mla_decode"


def test_decode_has_tensor_cores_where_sglang_has_them(simulate: Simulate) -> None:
    simulated = simulate()
    for changes in ({}, {"heads": (6, 2)}, {"heads": (8, 2)}, {"kv_dtype": E4M3}):
        call(flashinfer_paged.fa2, decode(**changes))
    assert [plan["use_tensor_cores"] for plan in simulated.plans] == [False, False, True, True]


def test_kernels_of_several_head_dims_have_modules_of_their_own(simulate: Simulate) -> None:
    simulated = simulate()
    for changes in ({}, {"head_dim": 128}, {"kv_dtype": E4M3}, {"window_left": 4}):
        call(flashinfer_paged.fa2, decode(sinks=SINKS, **changes))
    assert len({plan["jit_args"][0] for plan in simulated.plans}) == 4


def test_logits_have_their_scale_though_the_mla_kernel_rounds_the_caches(simulate: Simulate) -> None:
    simulated = simulate()
    call(flashinfer_mla, mla(2, kv_dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7))
    (plan,) = simulated.plans
    assert plan["sm_scale"] * float(torch.tensor(0.7).to(BF16)) == pytest.approx(0.02, rel=1e-6)


def test_flash_attention_4_splits_keys_where_the_gpu_has_it(simulate: Simulate) -> None:
    for capability, num_splits in ((SM90, 1), (SM100, 0)):
        simulated = simulate(capability)
        call(flash_attention_4, decode())
        assert simulated.fa4.calls[0]["num_splits"] == num_splits


# Rows, results and contents.


def ragged_rows() -> Arguments:
    """Rows of three requests and none and two, where three of one row each have as many, and two rows that nobody has."""
    arguments = decode(return_lse=True)
    offsets = {"q_len_per_req": None, "max_q_len": 3, "cum_seq_lens_q": torch.tensor([0, 3, 3, 5], dtype=torch.int32)}
    return padded(arguments | offsets | {"query": torch.cat((arguments["query"], arguments["query"][:2]))})


@pytest.mark.parametrize(
    ("implementation", "make", "num_rows"),
    [
        (flashinfer_paged, ragged_rows, 5),
        (flash_attention_4, ragged_rows, 5),
        (flashinfer_ragged, lambda: padded(ragged(return_lse=True)), 11),
    ],
    ids=["paged", "FlashAttention-4", "ragged"],
)
def test_rows_of_different_widths_and_padding(
    simulate: Simulate, implementation: Any, make: Case, num_rows: int
) -> None:
    simulated = simulate()
    results, expected = (call(module, make()) for module in (implementation, references))
    own, truth = results[0][:num_rows], expected[0][:num_rows]
    assert float(references.relative_l2(own, truth).max()) <= ROUNDOFF[BF16]
    torch.testing.assert_close(results[1][:num_rows], expected[1][:num_rows], rtol=1e-5, atol=1e-5)
    assert implementation is not flashinfer_paged or simulated.plans[0]["wrapper"] == PREFILL_WRAPPER


def with_results(arguments: Arguments) -> Arguments:
    """An output and an LSE that are full of NaN."""
    arguments = into()(arguments)
    return arguments | {"lse": torch.full(arguments["query"].shape[:-1], math.nan)}


@pytest.mark.parametrize("name", WITH_FA4)
@pytest.mark.parametrize("return_lse", [True, False])
def test_given_results_are_written(simulate: Simulate, name: str, return_lse: bool) -> None:
    implementation, make = WITH_FA4[name]
    simulated = simulate()
    if name == "MLA" and not return_lse:
        pytest.skip("the call takes no LSE that it does not return")
    given = with_results(make(return_lse=return_lse))
    assert_right(implementation, given)
    expected = call(references, make(return_lse=True))[1]
    torch.testing.assert_close(given["lse"].view(expected.shape), expected, rtol=1e-5, atol=1e-5)
    assert not given["out"].isnan().any()
    assert all(passed["out"].data_ptr() == given["out"].data_ptr() for passed in simulated.fa4.calls)


@EACH
def test_a_plan_runs_again_over_new_contents(simulate: Simulate, name: str) -> None:
    simulated = simulate()
    implementation, make = WRAPPED[name]
    arguments = make(sinks=SINKS.clone()) if implementation is flashinfer_paged else make()
    run = call(implementation, arguments, "plan_")
    run()
    arguments["query"].mul_(-2.0)
    for contents in ("sinks", "value"):
        if contents in arguments:
            arguments[contents].add_(1.0)
    torch.testing.assert_close(run(), call(references, arguments), rtol=2**-7, atol=2**-7)
    assert (len(simulated.plans), len(simulated.runs)) == (1, 2)


@pytest.mark.parametrize("return_lse", [True, False])
def test_a_prepared_call_of_flash_attention_4_follows_contents(simulate: Simulate, return_lse: bool) -> None:
    simulate()
    arguments = decode(5, (16, 33, 12), sinks=SINKS.clone(), return_lse=return_lse)
    ready = prepare(flash_attention_4, DECODE, **arguments)
    ready()
    arguments["query"].mul_(-2.0)
    arguments["block_tables"].copy_(arguments["block_tables"].flip(1))
    arguments["seq_lens"].copy_(torch.tensor([9, 16, 8]))
    torch.testing.assert_close(ready(), call(references, arguments), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize(
    ("implementation", "make"),
    [
        (flashinfer_paged, lambda: without_rows(decode(), 2)),
        (flashinfer_paged, lambda: without_rows(context(), 2)),
        (flash_attention_4, lambda: without_rows(decode())),
        (flash_attention_4, lambda: without_rows(context())),
        (flashinfer_mla, lambda: without_requests(mla((1, 4, 2), (3, 20, 70)), 7)),
        (flashinfer_ragged, lambda: ragged((0, 0), (5, 2))),
    ],
)
def test_without_rows_nobody_is_asked(simulate: Simulate, implementation: Any, make: Case) -> None:
    simulated, arguments = simulate(), make()
    assert call(implementation, arguments).shape[:-1] == arguments["query"].shape[:-1]
    assert not simulated.plans + simulated.fa4.calls


@EACH
def test_the_workspace_keeps_its_zeros(simulate: Simulate, name: str) -> None:
    """An XQA or trtllm-gen call may have the same one."""
    simulate()
    implementation, make = WRAPPED[name]
    workspace = torch.zeros(12 * MEBIBYTE, dtype=torch.uint8)
    call(implementation, make(workspace_buffer=workspace))
    assert not workspace[: 8 * MEBIBYTE].any()
    assert workspace[8 * MEBIBYTE :].any()
    with pytest.raises(ValueError, match="less than"):
        call(implementation, make(workspace_buffer=workspace[: 8 * MEBIBYTE + 100]))


# Refusals of the machine.


@EACH
def test_off_the_gpu_it_says_where_to_go(name: str) -> None:
    implementation, make = WRAPPED[name]
    with pytest.raises(NotImplementedError, match=r"lab.kernels.portable or lab.references"):
        call(implementation, make())


def test_a_capture_is_refused_before_offsets_are_read(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate()

    def refuse(kernel: str, device: torch.device) -> None:
        raise NotImplementedError(f"{kernel} is captured")

    monkeypatch.setattr(planned, "refuse_planning_in_capture", refuse)
    monkeypatch.setattr(PagedAttention, "row_offsets", lambda problem: pytest.fail("offsets were read"))
    for make in (decode, context):
        with pytest.raises(NotImplementedError, match=f"{FA3_PAGED.name} is captured"):
            call(flashinfer_paged, make())


def test_a_capture_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="no CUDA graph can: call plan before"):
        planned.refuse_planning_in_capture("a kernel", torch.device("cuda"))


def test_the_simulation_has_the_installed_functions_parameters() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="FlashAttention-4 is not installed")
    simulated = inspect.signature(SimulatedFlashAttention4._forward).parameters
    assert {*simulated} - {"self"} <= {*inspect.signature(interface._flash_attn_fwd).parameters}
