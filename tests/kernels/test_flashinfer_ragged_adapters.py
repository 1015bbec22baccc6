"""Both ways to FlashInfer's ragged kernels without a GPU: calls bind to its functions, and mean what the reference does."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.ragged_context import RaggedContextCall
from lab.kernels import flashinfer_call, trtllm
from lab.kernels.peers import flashinfer_ragged, planned
from lab.kernels.support import Kernel, why_not
from lab.kernels.support import kernel as support_kernel
from lab.kernels.support.peers import FA2_RAGGED, FA3_RAGGED
from lab.kernels.support.portable import PORTABLE_RAGGED
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_RAGGED
from tests.cases import mirrors, ragged_arguments, ragged_batch
from tests.kernels.conftest import SimulatedOn
from tests.kernels.held import ROUNDOFF, assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer_ragged import NAME, SimulatedRagged

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

E4M3, BF16, FP16, FP32 = torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32
SM75, SM80, SM90, SM100, SM103, SM120 = (7, 5), (8, 0), (9, 0), (10, 0), (10, 3), (12, 0)
Arguments = dict[str, Any]
Simulate = Callable[..., SimulatedRagged]


@pytest.fixture
def simulate(simulated_on: SimulatedOn) -> Simulate:
    return lambda capability, **options: simulated_on(
        capability, SimulatedRagged(**options), flashinfer_call, flashinfer_ragged
    )


def case(q_lens: tuple[int, ...] = (4, 1, 6), kv_lens: tuple[int, ...] = (4, 20, 9), **changes: Any) -> Arguments:
    """A call as an engine makes it, DeepSeek's dimensions."""
    options = {name: changes.pop(name) for name in ("dtype", "heads", "dims") if name in changes}
    batch = ragged_batch(q_lens, kv_lens, **{"heads": (2, 2), "dims": (192, 128)} | options)
    mirrored = mirrors(batch) if changes.pop("mirrored", False) else {}
    usual = {"out": None, "return_lse": False, "bmm1_scale": 0.05}
    return ragged_arguments(batch, **usual | mirrored | changes)


def new_tokens(**changes: Any) -> Arguments:
    """As SGLang calls it over new tokens: one tensor of offsets."""
    arguments = case((4, 1, 6), (4, 1, 6), **changes)
    return arguments | {"cum_seq_lens_kv": arguments["cum_seq_lens_q"]}


def a_chunk(**changes: Any) -> Arguments:
    """As SGLang calls it over a chunk of the prefixes, one of which is over."""
    return case((4, 1, 6), (7, 0, 20), **{"is_causal": False, "return_lse": True, "o_sf_scale": -1.0} | changes)


def one_after_the_other(arguments: Arguments) -> Arguments:
    """Keys' first part and values in one tensor, as an up-projection leaves them; keys and values of a wider one."""
    wide = torch.full((len(arguments["key"]), 2, 192 + 128), math.nan, dtype=BF16)
    return arguments | {
        "key": wide[..., :192].copy_(arguments["key"]),
        "value": wide[..., 192:].copy_(arguments["value"]),
    }


def padded(arguments: Arguments) -> Arguments:
    """Rows and keys after those of the last request, as in a graph's buffers."""
    longer = {
        name: torch.cat((arguments[name], torch.full_like(arguments[name][:3], math.nan)))
        for name in ("query", "key", "value")
    }
    return arguments | longer


def own_rows(function: Callable[..., Any], num_rows: int = 11) -> Callable[..., Any]:
    """The function's results without padding."""

    def run(**arguments: Any) -> Any:
        result = function(**arguments)
        return tuple(each[:num_rows] for each in result) if isinstance(result, tuple) else result[:num_rows]

    return run


def into(arguments: Arguments, dtype: torch.dtype = BF16) -> Arguments:
    return arguments | {"out": torch.full((len(arguments["query"]), 2, 128), math.nan, dtype=dtype)}


SINKS = torch.tensor([0.5, -1.0])
BOTH: dict[str, Callable[[], Arguments]] = {
    "causal": case,
    "new tokens": new_tokens,
    "new tokens' LSE": lambda: new_tokens(return_lse=True),
    "chunk": a_chunk,
    "chunk with lengths on the host": lambda: a_chunk(mirrored=True),
    "causal rows before the first key": lambda: case((4, 3, 6), (2, 20, 9), return_lse=True),
    "the same with lengths on the host": lambda: case((4, 3, 6), (2, 20, 9), return_lse=True, mirrored=True),
    "no key at all": lambda: case((2, 1), (0, 0), return_lse=True),
    "requests without rows": lambda: case((0, 3, 0), (5, 3, 2)),
    "LSE": lambda: case(return_lse=True),
    "given LSE": lambda: case(return_lse=True, lse=torch.empty(11, 2)),
    "given out": lambda: into(case()),
    "grouped heads": lambda: case(heads=(4, 2)),
    "128": lambda: case(dims=(128, 128)),
    "256": lambda: case(dims=(256, 256)),
    "strided keys and values": lambda: one_after_the_other(case()),
    "uint32 lengths": lambda: case(seq_lens=torch.tensor([4, 20, 9], dtype=torch.uint32)),
}
# What trtllm-gen has no kernel for in the table of flashinfer-cubin 0.6.13.
WRAPPER_ALONE: dict[str, Callable[[], Arguments]] = {
    "fp16": lambda: case(dtype=FP16),
    "window": lambda: case(window_left=3, return_lse=True),
    "wide window": lambda: case(window_left=20, return_lse=True),
}
TRTLLM_GEN: dict[str, Callable[[], Arguments]] = BOTH | {
    "e4m3": lambda: case(dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "sinks": lambda: case(attention_sinks=SINKS, return_lse=True),
    "sinks, chunk": lambda: a_chunk(attention_sinks=SINKS),
    "scales": lambda: case(bmm2_scale=0.5, return_lse=True),
    "tensor scales": lambda: a_chunk(bmm1_scale=torch.tensor([0.05]), bmm2_scale=torch.tensor([0.5])),
    "LSE of strided rows": lambda: case(return_lse=True, lse=torch.empty(2, 11).T),
    "empty rows looked for": lambda: a_chunk(skip_all_rows_active_check=False),
}


@pytest.mark.parametrize("name", TRTLLM_GEN)
def test_trtllm_gen(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM100)
    assert_rounded(trtllm, NAME, TRTLLM_GEN[name]())
    assert len(simulated.calls) == (name != "no key at all")


@pytest.mark.parametrize("name", [*BOTH, *WRAPPER_ALONE])
def test_wrapper(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM90)
    assert_rounded(flashinfer_ragged, NAME, (BOTH | WRAPPER_ALONE)[name]())
    assert [plan["backend"] for plan in simulated.plans] == ([] if name == "no key at all" else ["fa3"])


def test_padding_is_left_out(simulate: Simulate) -> None:
    for capability, function in (
        (SM100, trtllm.trtllm_ragged_attention_deepseek),
        (SM90, flashinfer_ragged.trtllm_ragged_attention_deepseek),
    ):
        simulate(capability)
        expected = references.trtllm_ragged_attention_deepseek(**case(return_lse=True))
        out, lse = own_rows(function)(**padded(case(return_lse=True)))
        assert float(references.relative_l2(out, expected[0]).max()) <= ROUNDOFF[BF16]
        torch.testing.assert_close(lse, expected[1])


@pytest.mark.parametrize("return_lse", [True, False])
@pytest.mark.parametrize("name", ["trtllm", "wrapper"])
def test_a_given_lse_is_written(simulate: Simulate, name: str, return_lse: bool) -> None:
    simulate(SM100 if name == "trtllm" else SM90)
    implementation = trtllm if name == "trtllm" else flashinfer_ragged
    arguments = a_chunk(return_lse=return_lse, lse=torch.full((11, 2), math.nan))
    result = implementation.trtllm_ragged_attention_deepseek(**arguments)
    assert isinstance(result, tuple) == return_lse
    expected = references.trtllm_ragged_attention_deepseek(**a_chunk())[1]
    torch.testing.assert_close(arguments["lse"], expected)


def test_a_prepared_call_sees_new_contents(simulate: Simulate) -> None:
    simulate(SM100)
    arguments = a_chunk()
    ready = trtllm.prepare_trtllm_ragged_attention_deepseek(**arguments)
    ready()
    arguments["query"].mul_(2.0)
    arguments["seq_lens"].copy_(torch.tensor([0, 20, 7]))
    arguments["cum_seq_lens_kv"].copy_(torch.tensor([0, 0, 20, 27]))
    out, lse = ready()
    expected = references.trtllm_ragged_attention_deepseek(**arguments)
    torch.testing.assert_close(out, expected[0], rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, expected[1])


@pytest.mark.parametrize(
    ("arguments", "fills"),
    [
        (new_tokens, False),
        (lambda: a_chunk(mirrored=True), False),
        (lambda: case(mirrored=True), False),
        (lambda: case((4,), (2,), mirrored=True), True),
        (case, True),
        (a_chunk, True),
    ],
    ids=["one tensor of offsets", "chunk and host", "causal and host", "too few keys", "causal", "chunk"],
)
def test_rows_without_keys_cost_launches_only_where_they_may_be(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, arguments: Callable[[], Arguments], fills: bool
) -> None:
    simulate(SM100)
    filled = []
    monkeypatch.setattr("lab.kernels.trtllm.ragged_context.fill_rows_without_keys", lambda *given: filled.append(given))
    trtllm.trtllm_ragged_attention_deepseek(**arguments())
    assert len(filled) == fills


def test_what_flashinfer_cannot_leave_out_it_refuses(simulate: Simulate) -> None:
    simulate(SM100)
    with pytest.raises(ValueError, match="sinks"):
        trtllm.trtllm_ragged_attention_deepseek(**a_chunk(mirrored=True, attention_sinks=SINKS))


@pytest.mark.parametrize("name", ["trtllm", "wrapper"])
def test_a_call_without_rows_asks_nobody(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM100 if name == "trtllm" else SM90)
    implementation = trtllm if name == "trtllm" else flashinfer_ragged
    out, lse = implementation.trtllm_ragged_attention_deepseek(**case((0, 0), (5, 2), return_lse=True))
    assert (out.shape, lse.shape) == ((0, 2, 128), (0, 2))
    assert not simulated.calls
    assert not simulated.plans


@pytest.mark.parametrize("name", ["trtllm", "wrapper"])
def test_the_workspace_keeps_its_zeros(simulate: Simulate, name: str) -> None:
    """A decode call may have the same one."""
    simulate(SM100 if name == "trtllm" else SM90)
    implementation = trtllm if name == "trtllm" else flashinfer_ragged
    workspace = torch.zeros(12 * MEBIBYTE, dtype=torch.uint8)
    implementation.trtllm_ragged_attention_deepseek(**case(workspace_buffer=workspace, return_lse=True))
    assert not workspace[: 8 * MEBIBYTE].any()
    assert workspace[8 * MEBIBYTE :].any()
    with pytest.raises(ValueError, match="less than"):
        implementation.trtllm_ragged_attention_deepseek(**case(workspace_buffer=workspace[: 8 * MEBIBYTE + 100]))


def test_off_the_gpu_it_says_where_to_go() -> None:
    for implementation in (trtllm, flashinfer_ragged):
        with pytest.raises(NotImplementedError, match=r"lab.kernels.portable or lab.references"):
            implementation.trtllm_ragged_attention_deepseek(**case())


TAMPERED: dict[str, Callable[[Arguments], Arguments]] = {
    "bmm1_scale": lambda a: a | {"bmm1_scale": 1.1 * a["bmm1_scale"]},
    "bmm2_scale": lambda a: a | {"bmm2_scale": 1.1 * a["bmm2_scale"]},
    "causal": lambda a: a | {"is_causal": False},
    "keys": lambda a: a | {"key": a["key"].roll(1, dims=0)},
    "values": lambda a: a | {"value": a["value"].roll(1, dims=2)},
    "rows": lambda a: a | {"cum_seq_lens_q": torch.tensor([0, 3, 5, 11], dtype=torch.int32)},
    "sinks": lambda a: a | {"attention_sinks": None},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_the_simulation_would_show_it(simulate: Simulate, name: str) -> None:
    simulate(SM100, change=TAMPERED[name])
    with pytest.raises(AssertionError):
        assert_rounded(trtllm, NAME, case(attention_sinks=SINKS))


# The wrapper


@pytest.mark.parametrize(
    ("implementation", "backend"), [(flashinfer_ragged.fa2, "fa2"), (flashinfer_ragged.fa3, "fa3")]
)
def test_either_backend_by_name(simulate: Simulate, implementation: Any, backend: str) -> None:
    simulated = simulate(SM90)
    assert_rounded(implementation, NAME, case())
    assert simulated.plans[0]["backend"] == backend
    assert implementation.__name__ == f"lab.kernels.peers.flashinfer_ragged:{backend}"


@pytest.mark.parametrize("capability", [SM80, SM100, SM120])
def test_elsewhere_it_is_fa2(simulate: Simulate, capability: tuple[int, int]) -> None:
    simulated = simulate(capability)
    assert_rounded(flashinfer_ragged, NAME, case())
    assert simulated.plans[0]["backend"] == "fa2"


def test_a_plan_runs_again_over_new_contents(simulate: Simulate) -> None:
    simulated = simulate(SM90)
    arguments = case()
    run = flashinfer_ragged.plan_trtllm_ragged_attention_deepseek(**arguments)
    run()
    arguments["query"].mul_(-2.0)
    arguments["value"].mul_(0.5)
    expected = references.trtllm_ragged_attention_deepseek(**arguments)
    torch.testing.assert_close(run(), expected, rtol=2**-7, atol=2**-7)
    assert (len(simulated.plans), len(simulated.runs)) == (1, 2)


def test_a_capture_is_refused_with_a_reason(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(SM90)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(NotImplementedError, match="no CUDA graph can: call plan before"):
        planned.refuse_planning_in_capture(flashinfer_ragged.WRAPPER, torch.device("cuda"))


def strided(name: str, gap: int) -> Arguments:
    """One of the tensors with `gap` elements after each head."""
    arguments = case()
    wide = torch.nn.functional.pad(arguments[name], (0, gap))
    return arguments | {name: wide[..., : arguments[name].shape[2]]}


RAGGED, GEN, FA2, FA3 = PORTABLE_RAGGED, TRTLLM_GEN_RAGGED, FA2_RAGGED, FA3_RAGGED
REFUSED: dict[str, tuple[Kernel, tuple[int, int] | None, Callable[[], Arguments], str]] = {
    "portable on SM75": (RAGGED, SM75, case, "SM80 and later"),
    "portable of e4m3 on SM80": (RAGGED, SM80, lambda: case(dtype=E4M3), "SM89"),
    "portable of float32": (RAGGED, SM90, lambda: case(dtype=FP32), "the portable Triton ragged kernel takes fp16"),
    "portable into float64": (RAGGED, SM90, lambda: into(case(), torch.float64), "writes fp16"),
    "portable of head_dim 224": (RAGGED, SM90, lambda: case(dims=(224, 128)), "not 224"),
    "portable of head_dim 320": (RAGGED, SM90, lambda: case(dims=(320, 128)), "not 320"),
    "portable of v_head_dim 96": (RAGGED, SM90, lambda: case(dims=(192, 96)), "v_head_dim"),
    "gen on a CPU": (GEN, None, case, "this is a CPU"),
    "gen on SM90": (GEN, SM90, case, "SM100 and SM103"),
    "gen of float32": (GEN, SM100, lambda: case(dtype=FP32), "fp16, bf16 or e4m3 queries"),
    "gen of bf16 into fp16": (GEN, SM100, lambda: into(case(), FP16), "writes the query's dtype"),
    "gen of e4m3 into float32": (GEN, SM100, lambda: into(case(dtype=E4M3), FP32), "fp16 or bf16 for e4m3"),
    "gen of (48, 32)": (GEN, SM100, lambda: case(dims=(48, 32)), "(192, 128) or (128, 128) or (256, 256)"),
    "gen of a strided query": (GEN, SM100, lambda: strided("query", 8), "contiguous query"),
    "gen of odd keys": (
        GEN,
        SM100,
        lambda: strided("key", 4),
        "the strides of key must be multiples of them, not 392 bytes",
    ),
    "wrapper on a CPU": (FA2, None, case, "a CPU"),
    "FA2 on SM75": (FA2, SM75, case, "SM80 and later"),
    "FA3 on SM100": (FA3, SM100, case, "SM90"),
    "wrapper of e4m3": (FA3, SM90, lambda: case(dtype=E4M3), "fp16 or bf16 queries"),
    "wrapper into float32": (FA2, SM90, lambda: into(case(), FP32), "writes the query's dtype"),
    "wrapper of (64, 64)": (FA3, SM90, lambda: case(dims=(64, 64)), "has kernels for"),
    "wrapper of sinks": (FA3, SM90, lambda: case(attention_sinks=SINKS), "sinks"),
    "wrapper of tensor scales": (FA3, SM90, lambda: case(bmm1_scale=torch.tensor([0.1])), "as numbers"),
    "wrapper of scale 0": (FA2, SM90, lambda: case(bmm1_scale=0.0), "positive bmm1_scale"),
    "wrapper of bmm2_scale": (FA3, SM90, lambda: case(bmm2_scale=0.5), "must be 1"),
    "wrapper of a strided LSE": (FA3, SM90, lambda: case(lse=torch.empty(2, 11).T), "contiguous lse"),
    "wrapper of odd queries": (
        FA2,
        SM80,
        lambda: strided("query", 4),
        "the strides of query must be multiples of them, not 392 bytes",
    ),
    "wrapper of odd values": (
        FA3,
        SM90,
        lambda: strided("value", 2),
        "the strides of value must be multiples of them, not 520 bytes",
    ),
}
TAKEN: dict[str, tuple[Kernel, tuple[int, int] | None, Callable[[], Arguments]]] = {
    **{f"portable on {gpu}": (RAGGED, gpu, case) for gpu in (None, SM80, SM90, SM100, SM120)},
    **{f"portable of {dims}": (RAGGED, SM90, lambda dims=dims: case(dims=dims)) for dims in ((48, 32), (256, 16))},
    "portable with all options": (RAGGED, SM90, lambda: into(case(attention_sinks=SINKS, bmm1_scale=-1), FP32)),
    **{f"gen on {gpu}": (GEN, gpu, case) for gpu in (SM100, SM103)},
    "gen of strided values": (GEN, SM100, lambda: strided("value", 8)),
    **{f"FA2 on {gpu}": (FA2, gpu, case) for gpu in (SM80, SM90, SM100, SM120)},
    "FA3 of a strided query": (FA3, SM90, lambda: strided("query", 8)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str) -> None:
    kernel, capability, arguments, reason = REFUSED[name]
    assert reason in (why_not(kernel, capability, RaggedContextCall(**arguments()).problem()) or "taken")


@pytest.mark.parametrize("name", TAKEN)
def test_the_rest_is_taken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(support_kernel, "triton_interprets", lambda: True)  # as where there is no GPU
    kernel, capability, arguments = TAKEN[name]
    assert why_not(kernel, capability, RaggedContextCall(**arguments()).problem()) is None
