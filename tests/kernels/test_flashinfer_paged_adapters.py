"""FlashInfer's paged wrappers without a GPU: calls bind to the installed functions, and mean what the references do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import references
from lab.calls import ContextCall, DecodeCall, PagedAttention
from lab.kernels.peers import flashinfer_paged
from lab.kernels.support import Kernel, kernel_names, why_not
from lab.kernels.support.peers import FA2_PAGED, FA3_PAGED
from tests.cases import pack_mask
from tests.kernels.conftest import SimulatedOn
from tests.kernels.held import ROUNDOFF, assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer_paged import DECODE, PREFILL, SimulatedPaged
from tests.kernels.test_trtllm_adapter import SINKS, TREE, context_case, decode_case

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

E4M3, FP16, BF16, FP32 = torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32
SM75, SM80, SM90, SM100, SM120 = (7, 5), (8, 0), (9, 0), (10, 0), (12, 0)
DECODE_CALL, CONTEXT_CALL = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
Arguments = dict[str, Any]
Simulate = Callable[..., SimulatedPaged]


@pytest.fixture
def simulate(simulated_on: SimulatedOn) -> Simulate:
    return lambda capability=SM90, **options: simulated_on(capability, SimulatedPaged(**options), flashinfer_paged)


def decode(q_len: int = 1, **changes: Any) -> Arguments:
    return decode_case(q_len, **{"head_dim": 64, "bmm1_scale": 0.125} | changes)


def context(**changes: Any) -> Arguments:
    return context_case(**{"bmm1_scale": 0.125} | changes)


def call_of(arguments: Arguments) -> str:
    return CONTEXT_CALL if "max_kv_len" in arguments else DECODE_CALL


def posed(arguments: Arguments) -> Any:
    return (ContextCall if "max_kv_len" in arguments else DecodeCall)(**arguments).problem()


def assert_right(implementation: Any, arguments: Arguments) -> None:
    """The simulation computes in float64 and rounds once, as the references do, but bmm2_scale is a second rounding."""
    assert_rounded(implementation, call_of(arguments), arguments, 1 if arguments["bmm2_scale"] == 1 else 2)


def with_scale(arguments: Arguments) -> Arguments:
    return {"bmm2_scale": 1.0} | arguments


def v_elsewhere(arguments: Arguments) -> Arguments:
    """V in pages that are stored the other way round."""
    k, v = arguments["kv_cache"]
    return arguments | {"kv_cache": (k, v.transpose(1, 2).contiguous().transpose(1, 2))}


def ragged_rows(arguments: Arguments, **changes: Any) -> Arguments:
    """The decode call's form of requests of different widths, with rows after the last that nobody has."""
    query = torch.cat((arguments["query"], torch.full_like(arguments["query"][:2], math.nan)))
    offsets = {"q_len_per_req": None, "max_q_len": 3, "cum_seq_lens_q": torch.tensor([0, 3, 3, 5], dtype=torch.int32)}
    return arguments | offsets | {"query": query} | changes


def own_rows(arguments: Arguments, num_rows: int) -> Any:
    """The call without its padding, of an implementation."""

    class OwnRows:
        def __init__(self, implementation: Any) -> None:
            self.implementation = implementation

        def __getattr__(self, name: str) -> Callable[..., Any]:
            def call(**given: Any) -> Any:
                result = getattr(self.implementation, name)(**given)
                return tuple(each[:num_rows] for each in result) if isinstance(result, tuple) else result[:num_rows]

            return call

    return OwnRows


# By the wrapper that the call comes to.
BOTH: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "decode": (DECODE, decode),
    "decode of every head its own K/V": (DECODE, lambda: decode(heads=(2, 2))),
    "decode of groups of 3": (DECODE, lambda: decode(heads=(6, 2))),
    "decode of groups of 8": (DECODE, lambda: decode(heads=(8, 1))),
    "decode, window": (DECODE, lambda: decode(window_left=4)),
    "decode, LSE": (DECODE, lambda: decode(return_lse=True)),
    "decode, no keys": (DECODE, lambda: decode(kv_lens=(0, 1, 16), return_lse=True)),
    "decode, NHD": (DECODE, lambda: decode(kv_layout="NHD")),
    "decode, fp16": (DECODE, lambda: decode(dtype=FP16)),
    "decode, bmm2_scale": (DECODE, lambda: decode(bmm2_scale=0.7, return_lse=True)),
    "decode, sinks": (PREFILL, lambda: decode(sinks=SINKS, return_lse=True)),
    "decode, sinks and window": (PREFILL, lambda: decode(sinks=SINKS, window_left=4)),
    "verify": (PREFILL, lambda: decode(5, kv_lens=(16, 33, 5))),
    "verify, rows before the first key": (PREFILL, lambda: decode(5, kv_lens=(16, 3, 0), return_lse=True)),
    "verify, window and LSE": (PREFILL, lambda: decode(5, window_left=3, return_lse=True)),
    "verify, sinks": (PREFILL, lambda: decode(5, sinks=SINKS, return_lse=True)),
    "context": (PREFILL, context),
    "context, not causal": (PREFILL, lambda: context(causal=False, return_lse=True)),
    "context, window": (PREFILL, lambda: context(window_left=4, return_lse=True)),
    "context, sinks": (PREFILL, lambda: context(sinks=SINKS, return_lse=True)),
    "context, pages of 1": (PREFILL, lambda: context(page_size=1)),
}
FA2: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "decode, e4m3 K/V": (DECODE, lambda: decode(kv_dtype=E4M3, bmm2_scale=0.5)),
    "verify, e4m3 K/V": (PREFILL, lambda: decode(5, kv_dtype=E4M3)),
    "verify, a tree": (PREFILL, lambda: decode(5, mask=pack_mask(TREE), return_lse=True)),
    "verify, a tree and a window": (PREFILL, lambda: decode(5, mask=pack_mask(TREE), window_left=3)),
    "verify, a tree without keys": (PREFILL, lambda: decode(5, kv_lens=(16, 0, 7), mask=pack_mask(TREE))),
    "verify, a tree of fewer keys": (PREFILL, lambda: decode(5, kv_lens=(3, 16, 7), mask=pack_mask(TREE))),
    "decode, V elsewhere": (PREFILL, lambda: v_elsewhere(decode())),
    "verify, V elsewhere": (PREFILL, lambda: v_elsewhere(decode(5))),
}
FA3: dict[str, tuple[str, Callable[[], Arguments]]] = {
    "decode, e4m3": (DECODE, lambda: decode(dtype=E4M3, out_dtype=BF16, bmm2_scale=0.5)),
    "context, e4m3": (PREFILL, lambda: context(dtype=E4M3, out_dtype=FP16, return_lse=True)),
}
RIGHT = {("fa2", name): case for name, case in (BOTH | FA2).items()} | {
    ("fa3", name): case for name, case in (BOTH | FA3).items()
}


@pytest.mark.parametrize(("backend", "name"), RIGHT)
def test_either_backend(simulate: Simulate, backend: str, name: str) -> None:
    simulated = simulate()
    wrapper, arguments = RIGHT[backend, name]
    assert_right(getattr(flashinfer_paged, backend), with_scale(arguments()))
    assert [(plan["wrapper"], plan["backend"]) for plan in simulated.plans] == [(wrapper, backend)]


@pytest.mark.parametrize(("capability", "backend"), [(SM80, "fa2"), (SM90, "fa3"), (SM100, "fa2"), (SM120, "fa2")])
def test_a_gpu_has_its_own(simulate: Simulate, capability: tuple[int, int], backend: str) -> None:
    simulated = simulate(capability)
    assert_right(flashinfer_paged, with_scale(decode(5)))
    assert simulated.plans[0]["backend"] == backend
    kernel = FA2_PAGED if backend == "fa2" else FA3_PAGED
    assert kernel_names(flashinfer_paged, [DECODE_CALL], torch.device("cpu")) == kernel.name
    assert kernel_names(flashinfer_paged.fa2, [DECODE_CALL], torch.device("cpu")) == FA2_PAGED.name


@pytest.mark.parametrize(
    ("changes", "on_tensor_cores"),
    [({}, False), ({"heads": (8, 2)}, True), ({"heads": (6, 2)}, False), ({"kv_dtype": E4M3}, True)],
)
def test_decode_has_tensor_cores_where_sglang_has_them(
    simulate: Simulate, changes: dict[str, Any], on_tensor_cores: bool
) -> None:
    simulated = simulate()
    assert_right(flashinfer_paged.fa2, with_scale(decode(**changes)))
    assert simulated.plans[0]["use_tensor_cores"] == on_tensor_cores


def test_rows_of_different_widths_and_padding(simulate: Simulate) -> None:
    simulated = simulate()
    arguments = with_scale(ragged_rows(decode(1, kv_lens=(16, 33, 5), return_lse=True)))
    # Of three rows and none and two, where there are three rows of one each: as many rows as the call has requests.
    arguments["query"] = torch.cat((arguments["query"][:3], arguments["query"][:2], arguments["query"][3:]))
    own = own_rows(arguments, 5)
    name = DECODE_CALL
    result, expected = (getattr(own(each), name)(**arguments) for each in (flashinfer_paged, references))
    assert float(references.relative_l2(result[0], expected[0]).max()) <= ROUNDOFF[BF16]
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5)
    assert simulated.plans[0]["wrapper"] == PREFILL


@pytest.mark.parametrize("arguments", [decode, context], ids=["decode", "context"])
def test_a_given_out_and_lse_are_written(simulate: Simulate, arguments: Callable[..., Arguments]) -> None:
    simulate()
    given = with_scale(arguments(return_lse=True))
    shape = given["query"].shape
    given |= {"out": torch.full(shape, math.nan, dtype=BF16), "lse": torch.full(shape[:2], math.nan)}
    assert_right(flashinfer_paged, given)
    assert not given["out"].isnan().any()
    assert not given["lse"].isnan().any()


def test_a_plan_runs_again_over_new_contents(simulate: Simulate) -> None:
    simulated = simulate()
    arguments = decode(5, sinks=SINKS.clone())
    run = flashinfer_paged.plan_trtllm_batch_decode_with_kv_cache(**arguments)
    run()
    arguments["query"].mul_(-2.0)
    arguments["sinks"].add_(1.0)
    expected = references.trtllm_batch_decode_with_kv_cache(**arguments)
    torch.testing.assert_close(run(), expected, rtol=2**-7, atol=2**-7)
    assert (len(simulated.plans), len(simulated.runs)) == (1, 2)


@pytest.mark.parametrize("arguments", [decode, context], ids=["decode", "context"])
def test_a_capture_is_refused_before_offsets_are_read(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, arguments: Callable[..., Arguments]
) -> None:
    simulate()

    def refuse(wrapper: str, device: torch.device) -> None:
        raise NotImplementedError(f"{wrapper} is captured")

    def read(problem: PagedAttention) -> list[int]:
        raise AssertionError("offsets were read")

    monkeypatch.setattr(flashinfer_paged, "refuse_planning_in_capture", refuse)
    monkeypatch.setattr(PagedAttention, "row_offsets", read)
    given = arguments()
    with pytest.raises(NotImplementedError, match="WithPagedKVCacheWrapper is captured"):
        getattr(flashinfer_paged, call_of(given))(**given)


@pytest.mark.parametrize("arguments", [decode, context], ids=["decode", "context"])
def test_without_rows_nobody_is_asked(simulate: Simulate, arguments: Callable[..., Arguments]) -> None:
    simulated = simulate()
    given = arguments()
    offsets = {"cum_seq_lens_q": torch.zeros(4, dtype=torch.int32), "max_q_len": 2}
    given |= offsets if "max_kv_len" in given else offsets | {"q_len_per_req": None}
    assert getattr(flashinfer_paged, call_of(given))(**given).shape == given["query"].shape
    assert not simulated.plans


def test_the_workspace_keeps_its_zeros(simulate: Simulate) -> None:
    """An XQA call may have the same one."""
    simulate()
    workspace = torch.zeros(12 * MEBIBYTE, dtype=torch.uint8)
    flashinfer_paged.trtllm_batch_decode_with_kv_cache(**decode(workspace_buffer=workspace))
    assert not workspace[: 8 * MEBIBYTE].any()
    assert workspace[8 * MEBIBYTE :].any()


def test_kernels_of_several_head_dims_have_modules_of_their_own(simulate: Simulate) -> None:
    simulated = simulate()
    for changes in ({}, {"head_dim": 128}, {"kv_dtype": E4M3}, {"window_left": 4}):
        flashinfer_paged.fa2.trtllm_batch_decode_with_kv_cache(**decode(sinks=SINKS, **changes))
    assert len({plan["jit_args"][0] for plan in simulated.plans}) == 4


@pytest.mark.parametrize("call", [DECODE_CALL, CONTEXT_CALL])
def test_off_the_gpu_it_says_where_to_go(call: str) -> None:
    with pytest.raises(NotImplementedError, match=r"lab.kernels.portable or lab.references"):
        getattr(flashinfer_paged, call)(**(decode() if call == DECODE_CALL else context()))


TAMPERED: dict[str, Callable[[Arguments], Arguments]] = {
    "scale": lambda a: a | {"sm_scale": 1.5 * a["sm_scale"]},
    "causal": lambda a: a | {"causal": False},
    "window": lambda a: a | {"window_left": -1},
    "page ids": lambda a: a | {"paged_kv_indices": a["paged_kv_indices"].flip(0)},
    "rows": lambda a: a | {"qo_indptr": torch.tensor([0, 4, 10, 15], dtype=torch.int32)},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_the_simulation_would_show_it(simulate: Simulate, name: str) -> None:
    simulate(change=TAMPERED[name])
    with pytest.raises(AssertionError):
        assert_right(flashinfer_paged, with_scale(decode(5, window_left=3)))


def into(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return arguments | {"out": torch.empty(arguments["query"].shape, dtype=dtype)}


def gapped(arguments: Arguments, gap: int = 4) -> Arguments:
    """The query with elements between its heads."""
    wide = torch.nn.functional.pad(arguments["query"], (0, gap))
    return arguments | {"query": wide[..., : arguments["query"].shape[2]]}


REFUSED: dict[str, tuple[Kernel, tuple[int, int] | None, Callable[[], Arguments], str]] = {
    "on a CPU": (FA2_PAGED, None, decode, "a CPU"),
    "FA2 on SM75": (FA2_PAGED, SM75, decode, "SM80 and later"),
    "FA3 on SM100": (FA3_PAGED, SM100, decode, "needs a GPU of SM90"),
    "FA2 of e4m3 queries": (FA2_PAGED, SM90, lambda: decode(dtype=E4M3, out_dtype=BF16), "fp16 or bf16 queries"),
    "FA3 of e4m3 K/V": (FA3_PAGED, SM90, lambda: decode(kv_dtype=E4M3), "K/V in the query's dtype"),
    "FA3 of e4m3 into e4m3": (FA3_PAGED, SM90, lambda: decode(dtype=E4M3, out_dtype=E4M3), "fp16 or bf16 for e4m3"),
    "into float32": (FA2_PAGED, SM90, lambda: into(decode(), FP32), "writes the query's dtype"),
    "head_dim 80": (FA3_PAGED, SM90, lambda: decode(head_dim=80), "64, 128 and 256, not 80"),
    "separate tables": (
        FA2_PAGED,
        SM90,
        lambda: context(separate_tables=True),
        "uses_shared_paged_kv_idx must be True",
    ),
    "FA3 of V elsewhere": (FA3_PAGED, SM90, lambda: v_elsewhere(decode()), "V with K's strides"),
    "FA3 of a mask": (FA3_PAGED, SM90, lambda: decode(5, mask=pack_mask(TREE)), "takes no mask"),
    "FA2 of a mask with sinks": (
        FA2_PAGED,
        SM90,
        lambda: decode(5, mask=pack_mask(TREE), sinks=SINKS),
        "no mask where it has sinks",
    ),
    "FA3 of e4m3 with sinks": (
        FA3_PAGED,
        SM90,
        lambda: decode(dtype=E4M3, out_dtype=BF16, sinks=SINKS),
        "sinks for fp16 and bf16",
    ),
    "tensor scales": (FA2_PAGED, SM90, lambda: decode(bmm1_scale=torch.tensor([0.1])), "as numbers"),
    "scale 0": (FA3_PAGED, SM90, lambda: decode(bmm1_scale=0.0), "a positive bmm1_scale, not 0.0"),
    "a strided LSE": (FA2_PAGED, SM90, lambda: decode(lse=torch.empty(4, 3).T), "contiguous lse"),
    "odd queries": (FA2_PAGED, SM80, lambda: gapped(decode()), "the strides of query must be multiples of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str) -> None:
    kernel, capability, arguments, reason = REFUSED[name]
    assert reason in (why_not(kernel, capability, posed(arguments())) or "taken")


@pytest.mark.parametrize("gpu", [SM80, SM90, SM100, SM120])
def test_fa2_runs_on_every_gpu_since_sm80(gpu: tuple[int, int]) -> None:
    assert why_not(FA2_PAGED, gpu, posed(gapped(decode(), 8))) is None
