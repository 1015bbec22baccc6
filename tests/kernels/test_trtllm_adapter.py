"""The FlashInfer adapter without a GPU: its calls bind to the installed functions, and mean what the references compute."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab import references
from lab.calls.problem import mask_words
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.kernels import flashinfer_call, trtllm
from tests.cases import Batch, context_arguments, decode_arguments, pack_mask, random_batch, write_pages
from tests.kernels.conftest import SimulatedOn, forget
from tests.kernels.held import ROUNDOFF, assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer import SimulatedFlashInfer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # FlashInfer's, of CUTLASS, at its import

DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
BOTH_ENTRIES = pytest.mark.parametrize("entry", ["", "prepare_"], ids=["called", "prepared"])
SM90, SM100, SM120 = (9, 0), (10, 0), (12, 0)
CPU = torch.device("cpu")
# The simulation computes in float64 and rounds once, as the references do: they differ by a flipped rounding at most.
PLAIN_OUTPUT = {"out_dtype": None, "return_lse": False}  # not what an oracle asks for, float64 and the LSE
SINKS = torch.tensor([0.5, -1.0, 2.0, 1.5])
TREE = [[[column == 0 or column == row for column in range(5)] for row in range(5)]] * 3

Arguments = dict[str, Any]
Simulate = Callable[..., SimulatedFlashInfer]


@pytest.fixture
def simulate(simulated_on: SimulatedOn) -> Simulate:
    return lambda capability, **options: simulated_on(
        capability, SimulatedFlashInfer(major=capability[0], **options), flashinfer_call
    )


def decode_case(q_len: int = 1, kv_lens: tuple[int, ...] = (16, 33, 5), **changes: Any) -> Arguments:
    """A decode call as an engine makes it: bf16, head_dim 16, 4 query and 2 K/V heads, no output given."""
    batch = random_batch([q_len] * len(kv_lens), kv_lens, **batch_options(changes))
    return as_engine(decode_arguments(batch, **PLAIN_OUTPUT | changes))


def context_case(
    q_lens: tuple[int, ...] = (5, 0, 17), kv_lens: tuple[int, ...] = (21, 7, 17), **changes: Any
) -> Arguments:
    """A context call; head_dim 64, which fmha_v2 takes, K and V as halves of one allocation."""
    options = {"head_dim": 64, **batch_options(changes)}
    return as_engine(context_arguments(random_batch(q_lens, kv_lens, **options), **PLAIN_OUTPUT | changes))


def batch_options(changes: Arguments) -> Arguments:
    return {name: changes.pop(name) for name in ("dtype", "kv_dtype", "head_dim", "heads") if name in changes}


def as_engine(arguments: Arguments) -> Arguments:
    """The same K and V as halves of one allocation."""
    return arguments | {"kv_cache": tuple(torch.stack(arguments["kv_cache"]))}


def stacked(arguments: Arguments, layout: str = "HND") -> Arguments:
    """The same K and V as one tensor [pages, 2, ...]."""
    k, v = arguments["kv_cache"]
    if layout == "NHD":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    return arguments | {"kv_cache": torch.stack((k, v), dim=1).contiguous(), "kv_layout": layout}


def unstacked(arguments: Arguments) -> Arguments:
    """The same stacked pool as a pair of views."""
    return arguments | {"kv_cache": arguments["kv_cache"].unbind(1)}


def permuted(arguments: Arguments) -> Arguments:
    """The same K and V as HND views of an NHD pool, as an engine hands them."""
    nhd = torch.stack(arguments["kv_cache"]).transpose(2, 3).contiguous()
    return arguments | {"kv_cache": (nhd[0].transpose(1, 2), nhd[1].transpose(1, 2))}


def widened(arguments: Arguments) -> Arguments:
    """The same table as a column slice of a wider one, whose other columns are wrong."""
    table = arguments["block_tables"]
    wide = torch.full((*table.shape[:-1], table.shape[-1] + 3), 0, dtype=torch.int32)
    wide[..., : table.shape[-1]] = table
    return arguments | {"block_tables": wide[..., : table.shape[-1]]}


def expanded(arguments: Arguments, layout: str = "HND") -> Arguments:
    """The same K and V as pages of one pool in any order, the pool as both K and V, and the table counting in it."""
    k, v = arguments["kv_cache"]
    places = torch.randperm(2 * len(k), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    pool = torch.empty(2 * len(k), *k.shape[1:], dtype=k.dtype)
    pool[places] = torch.cat((k, v))
    if layout == "NHD":
        pool = pool.transpose(1, 2).contiguous().transpose(1, 2)
    ids = arguments["block_tables"]
    tables = torch.stack((places[ids], places[ids + len(k)]), dim=1)
    return arguments | {"kv_cache": (pool, pool), "block_tables": tables, "uses_shared_paged_kv_idx": False}


XQA_CASES: dict[str, Callable[[], Arguments]] = {
    "decode": decode_case,
    "fp16": lambda: decode_case(dtype=torch.float16),
    "lengths 0 and 1": lambda: decode_case(kv_lens=(0, 1, 17)),
    "verify": lambda: decode_case(5, bmm1_scale=0.3),
    "verify of 33 tokens": lambda: decode_case(33, kv_lens=(40, 33)),
    "verify of 8, window": lambda: decode_case(8, kv_lens=(40, 9), window_left=3),
    "tree": lambda: decode_case(5, mask=pack_mask(TREE)),
    "window 0": lambda: decode_case(window_left=0),
    "window and sinks": lambda: decode_case(window_left=7, sinks=SINKS),
    "verify and sinks": lambda: decode_case(3, sinks=SINKS),
    "e4m3 K/V and scales": lambda: decode_case(kv_dtype=torch.float8_e4m3fn, bmm1_scale=0.2, bmm2_scale=0.7),
    "e4m3 K/V and output": lambda: decode_case(kv_dtype=torch.float8_e4m3fn, out_dtype=torch.float8_e4m3fn),
    "tensor scales": lambda: decode_case(
        kv_dtype=torch.float8_e4m3fn, bmm1_scale=torch.tensor([0.2]), bmm2_scale=torch.tensor([0.7])
    ),
    "one scale a tensor": lambda: decode_case(
        kv_dtype=torch.float8_e4m3fn, bmm1_scale=torch.tensor(0.2), bmm2_scale=0.5
    ),
    "scale in base 2": lambda: decode_case(bmm1_scale_log2=torch.tensor([0.4]), bmm1_scale=9.0),
    "o_scale None": lambda: decode_case(o_scale=None),
    "integer scales": lambda: decode_case(kv_dtype=torch.float8_e4m3fn, bmm1_scale=1, bmm2_scale=2),
    "uint32 lengths": lambda: decode_case(seq_lens=torch.tensor([16, 33, 5], dtype=torch.uint32)),
    "NHD": lambda: decode_case(kv_layout="NHD"),
    "views of NHD": lambda: permuted(decode_case(3)),
    "stacked": lambda: stacked(decode_case()),
    "stacked NHD": lambda: stacked(decode_case(), "NHD"),
    "K is V": lambda: (lambda case: case | {"kv_cache": case["kv_cache"][0].unsqueeze(1)})(decode_case()),
    "two allocations": lambda: (lambda case: case | {"kv_cache": tuple(x.clone() for x in case["kv_cache"])})(
        decode_case()
    ),
    "slice of a wider table": lambda: widened(decode_case(2)),
    "MQA": lambda: decode_case(heads=(4, 1)),
    "odd group": lambda: decode_case(heads=(6, 2)),
    "given output": lambda: decode_case(out=torch.empty(3, 4, 16, dtype=torch.bfloat16)),
    "explicit backend": lambda: decode_case(backend="xqa"),
}


@pytest.mark.parametrize("name", XQA_CASES)
def test_xqa(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM120 if "explicit" in name else SM90)
    assert_rounded(trtllm, DECODE, XQA_CASES[name]())
    assert [function for function, _ in simulated.calls] == [DECODE]


@pytest.mark.parametrize("q_len", range(1, 9))
def test_xqa_verify_widths(simulate: Simulate, q_len: int) -> None:
    simulate(SM90)
    assert_rounded(trtllm, DECODE, decode_case(q_len, kv_lens=(q_len, 17 + q_len)))


def gen_case(q_len: int = 1, kv_lens: tuple[int, ...] = (16, 33, 5), **changes: Any) -> Arguments:
    """A decode call of a head_dim that trtllm-gen has kernels for."""
    return decode_case(q_len, kv_lens, head_dim=64, **changes)


TRTLLM_GEN_DECODE_CASES: dict[str, Callable[[], Arguments]] = {
    "decode": gen_case,
    "verify": lambda: gen_case(5, bmm1_scale=0.3, bmm2_scale=0.5),
    "window, sinks, LSE": lambda: gen_case(3, window_left=7, sinks=SINKS, out_dtype=torch.bfloat16, return_lse=True),
    "ragged": lambda: as_engine(
        decode_arguments(random_batch([1, 4, 2], [3, 20, 40], head_dim=64), ragged=True, **PLAIN_OUTPUT)
    ),
    "tensor scales": lambda: gen_case(bmm1_scale=torch.tensor([0.2]), bmm2_scale=torch.tensor([0.7])),
    "scale in base 2": lambda: gen_case(bmm1_scale_log2=torch.tensor([0.4]), bmm1_scale=9.0),
    "e4m3": lambda: gen_case(dtype=torch.float8_e4m3fn, bmm1_scale=0.2, bmm2_scale=0.7, out_dtype=torch.bfloat16),
    "separate tables": lambda: gen_case(2, separate_tables=True),
    "slice of a wider table": lambda: widened(gen_case(2)),
    "slice of wider separate tables": lambda: widened(gen_case(2, separate_tables=True)),
    "NHD": lambda: gen_case(kv_layout="NHD"),
    "views of NHD": lambda: permuted(gen_case()),
    "stacked": lambda: stacked(gen_case(kv_dtype=torch.bfloat16)),
    "K is V": lambda: (lambda case: case | {"kv_cache": case["kv_cache"][0].unsqueeze(1)})(gen_case()),
    "given output and LSE": lambda: gen_case(
        out=torch.empty(3, 4, 64, dtype=torch.bfloat16), out_dtype=torch.bfloat16, lse=torch.empty(3, 4)
    ),
}


@pytest.mark.parametrize("name", TRTLLM_GEN_DECODE_CASES)
def test_trtllm_gen_decode(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM100)
    assert_rounded(trtllm, DECODE, TRTLLM_GEN_DECODE_CASES[name]())
    assert [function for function, _ in simulated.calls] == [DECODE]


TRTLLM_GEN_CONTEXT_CASES: dict[str, Callable[[], Arguments]] = {
    "causal": lambda: context_case(bmm1_scale=0.125, bmm2_scale=0.5),
    "not causal": lambda: context_case(causal=False),
    "window, sinks, LSE": lambda: context_case(window_left=3, sinks=SINKS, out_dtype=torch.bfloat16, return_lse=True),
    "separate tables": lambda: context_case(separate_tables=True),
    "slice of a wider table": lambda: widened(context_case()),
    "NHD": lambda: context_case(kv_layout="NHD"),
    "stacked": lambda: stacked(context_case()),
}


@pytest.mark.parametrize("name", TRTLLM_GEN_CONTEXT_CASES)
def test_trtllm_gen_context(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM100)
    assert_rounded(trtllm, CONTEXT, TRTLLM_GEN_CONTEXT_CASES[name]())
    assert [function for function, _ in simulated.calls] == [CONTEXT]


FMHA_V2_CASES: dict[str, Callable[[], Arguments]] = {
    "causal": lambda: context_case(bmm1_scale=0.125),
    "fp16": lambda: context_case(dtype=torch.float16),
    "not causal": lambda: context_case(causal=False),
    "window": lambda: context_case(window_left=3),
    "window 0": lambda: context_case(window_left=0),
    "window and sinks": lambda: context_case(window_left=7, sinks=SINKS),
    "sinks": lambda: context_case(sinks=SINKS),
    "e4m3": lambda: context_case(dtype=torch.float8_e4m3fn, bmm1_scale=0.05, bmm2_scale=0.7, out_dtype=torch.bfloat16),
    "views of NHD": lambda: permuted(context_case()),
    "stacked": lambda: stacked(context_case()),
    "stacked NHD": lambda: stacked(context_case(), "NHD"),
    "slice of a wider table": lambda: widened(context_case()),
    "stacked, slice of a wider table": lambda: widened(stacked(context_case())),
    "views of a stacked pool": lambda: unstacked(stacked(context_case())),
    "views of a stacked NHD pool": lambda: unstacked(stacked(context_case(), "NHD")),
    "expanded table": lambda: expanded(context_case()),
    "expanded table of an NHD pool": lambda: expanded(context_case(), "NHD"),
    "expanded table, slice of a wider one": lambda: widened(expanded(context_case())),
    "expanded table of a pool in one tensor": lambda: (
        lambda case: case | {"kv_cache": case["kv_cache"][0].unsqueeze(1)}
    )(expanded(context_case())),
    "given output": lambda: context_case(out=torch.empty(22, 4, 64, dtype=torch.bfloat16)),
    "bound of rows above bound of keys": lambda: context_case((3,), (3,), max_q_len=64, max_kv_len=3),
}


@pytest.mark.parametrize("name", FMHA_V2_CASES)
def test_fmha_v2(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM90)
    assert_rounded(trtllm, CONTEXT, FMHA_V2_CASES[name]())
    assert [function for function, _ in simulated.calls] == ["trtllm_fmha_v2_prefill"]


def test_fmha_v2_of_an_nhd_pool(simulate: Simulate) -> None:
    """The pool's own NHD halves, named as such."""
    simulate(SM120)
    case = permuted(context_case())
    assert_rounded(
        trtllm, CONTEXT, case | {"kv_cache": tuple(x.transpose(1, 2) for x in case["kv_cache"]), "kv_layout": "NHD"}
    )


def separate_allocations(cache: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """V one byte off a whole number of pages from K, as separate allocations may be."""
    k, v = cache
    buffer = torch.zeros(k.numel() * 2 + 1, dtype=k.dtype)
    k_part, v_part = buffer[: k.numel()].view(k.shape), buffer[k.numel() + 1 :].view(v.shape)
    return k_part.copy_(k), v_part.copy_(v)


@pytest.mark.parametrize(
    "rearrange",
    [
        separate_allocations,
        lambda cache: (cache[1], cache[0]),
        lambda cache: (cache[0], cache[0]),
        lambda cache: cache[0].unsqueeze(1),
        lambda cache: tuple(torch.cat(cache, dim=-1).split(64, dim=-1)),
    ],
    ids=["V between pages", "V before K", "V is K", "K for V", "V beside K in each token"],
)
@BOTH_ENTRIES
def test_fmha_v2_needs_v_whole_pages_after_k(simulate: Simulate, rearrange: Callable[[Any], Any], entry: str) -> None:
    simulated = simulate(SM90)
    case = context_case()
    with pytest.raises(NotImplementedError, match="trtllm_fmha_v2_prefill needs"):
        getattr(trtllm, entry + CONTEXT)(**case | {"kv_cache": rearrange(case["kv_cache"])})
    assert not simulated.calls


@pytest.mark.parametrize(
    "rearrange",
    [
        tuple,
        lambda cache: (cache[0][:1], cache[0][:1]),
        lambda cache: (cache[0], cache[0].clone()),
        lambda cache: (cache[0].repeat(1, 1, 1, 2)[..., :64],) * 2,
    ],
    ids=["halves", "one page", "a copy as V", "gaps in the pool"],
)
@BOTH_ENTRIES
def test_fmha_v2_takes_two_tables_over_one_pool_only(
    simulate: Simulate, rearrange: Callable[[Any], Any], entry: str
) -> None:
    simulated = simulate(SM90)
    case = context_case((3,), (9,))
    tables = torch.zeros(1, 2, 1, dtype=torch.int32)
    changes = {"kv_cache": rearrange(case["kv_cache"]), "block_tables": tables, "uses_shared_paged_kv_idx": False}
    with pytest.raises(NotImplementedError, match="counts the page ids of K and of V from one address"):
        getattr(trtllm, entry + CONTEXT)(**case | changes)
    assert not simulated.calls


def flip_a_bit(arguments: Arguments) -> Arguments:
    mask = arguments["mask"].to(torch.int32)
    mask[0, 0, 0] ^= 2
    return arguments | {"mask": mask.to(torch.uint16)}


def reverse_bits(arguments: Arguments) -> Arguments:
    mask = arguments["mask"].to(torch.int32)
    return arguments | {"mask": sum((mask >> bit & 1) << (15 - bit) for bit in range(16)).to(torch.uint16)}


def shift_v(arguments: Arguments) -> Arguments:
    return arguments | {
        "block_tables": arguments["block_tables"] + torch.tensor([0, 1], dtype=torch.int32).view(1, 2, 1)
    }


def drop(name: str) -> Callable[[Arguments], Arguments]:
    return lambda arguments: {key: value for key, value in arguments.items() if key != name}


def scale(name: str, factor: float) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {name: arguments[name] * factor}


def wider_window(arguments: Arguments) -> Arguments:
    return arguments | {"window_left": arguments["window_left"] + 1}


E4M3 = {"kv_dtype": torch.float8_e4m3fn, "bmm1_scale": 0.2, "bmm2_scale": 0.7}
TAMPERED: dict[str, tuple[str, Callable[[], Arguments], Callable[[Arguments], Arguments]]] = {
    "XQA, one mask bit": (DECODE, lambda: decode_case(5), flip_a_bit),
    "XQA, mask bits reversed": (DECODE, lambda: decode_case(5), reverse_bits),
    "XQA, window dropped": (DECODE, lambda: decode_case(window_left=3), drop("window_left")),
    "XQA, window off by one": (DECODE, lambda: decode_case(window_left=3), wider_window),
    "XQA, sinks dropped": (DECODE, lambda: decode_case(sinks=SINKS), drop("sinks")),
    "XQA, bmm1_scale": (DECODE, lambda: decode_case(bmm1_scale=0.5), scale("bmm1_scale", 1.1)),
    "XQA, bmm2_scale": (DECODE, lambda: decode_case(**E4M3), scale("bmm2_scale", 1.1)),
    "XQA, rows not packed": (DECODE, decode_case, widened),
    "XQA, layout": (DECODE, lambda: decode_case(heads=(16, 16)), lambda arguments: arguments | {"kv_layout": "NHD"}),
    "trtllm-gen, rows not packed": (DECODE, gen_case, widened),
    "fmha_v2, V a page off": (CONTEXT, context_case, shift_v),
    "fmha_v2, window dropped": (CONTEXT, lambda: context_case(window_left=3), lambda a: a | {"window_left": -1}),
    "fmha_v2, window off by one": (CONTEXT, lambda: context_case(window_left=3), wider_window),
    "fmha_v2, mask mode": (CONTEXT, context_case, lambda arguments: arguments | {"mask_mode": "padding"}),
    "fmha_v2, sinks dropped": (CONTEXT, lambda: context_case(sinks=SINKS), drop("sinks")),
    "fmha_v2, bmm1_scale": (CONTEXT, context_case, scale("bmm1_scale", 1.1)),
    "fmha_v2, bmm2_scale": (CONTEXT, lambda: context_case(dtype=torch.float8_e4m3fn), scale("bmm2_scale", 1.5)),
    "fmha_v2, rows not packed": (CONTEXT, lambda: stacked(context_case()), widened),
    "fmha_v2, layout": (
        CONTEXT,
        lambda: context_case(heads=(16, 16)),
        lambda arguments: arguments | {"input_layout": "Q_PAGED_KV_NHD"},
    ),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_the_simulation_notices(simulate: Simulate, name: str) -> None:
    function, case, tamper = TAMPERED[name]
    sinks = torch.linspace(-1, 2, 16) if "layout" in name else None
    simulate(SM100 if "trtllm-gen" in name else SM90, change=tamper)
    with pytest.raises(AssertionError):
        assert_rounded(trtllm, function, case() | ({"sinks": sinks} if sinks is not None else {}))


def test_the_simulation_notices_semaphores_in_use(simulate: Simulate) -> None:
    simulate(SM90)
    with pytest.raises(AssertionError, match="semaphores"):
        assert_rounded(trtllm, DECODE, decode_case(workspace_buffer=torch.ones(9 * MEBIBYTE, dtype=torch.uint8)))


# Signatures.


REAL_CALLS = {
    "trtllm-gen decode": (SM100, DECODE, lambda: gen_case(2, sinks=SINKS, window_left=3)),
    "XQA": (SM90, DECODE, lambda: decode_case(2, sinks=SINKS, window_left=3)),
    "trtllm-gen context": (SM100, CONTEXT, lambda: context_case(sinks=SINKS, window_left=3)),
    "fmha_v2": (SM90, CONTEXT, lambda: context_case(sinks=SINKS, window_left=3)),
}


@pytest.mark.parametrize("name", REAL_CALLS)
@pytest.mark.parametrize("parameter", ["workspace_buffer", "window_left", "sinks", "bmm1_scale"])
@pytest.mark.parametrize("renamed", [True, False], ids=["renamed", "dropped"])
def test_another_flashinfer_is_a_clear_error(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, name: str, parameter: str, renamed: bool
) -> None:
    """Each call binds to the real signature (as every simulated call does), and not to one without the parameter."""
    capability, function, make = REAL_CALLS[name]
    simulated = simulate(capability)
    arguments = make() | ({"bmm1_scale": 0.5} if parameter == "bmm1_scale" else {})
    getattr(trtllm, function)(**arguments)
    (called, passed) = simulated.calls[0]
    assert parameter in passed

    def changed(module: str, name: str) -> tuple[Callable[..., Any], inspect.Signature]:
        real = simulated.installed(module, name)[1]
        new = [
            one.replace(name=f"new_{parameter}") if one.name == parameter else one
            for one in real.parameters.values()
            if renamed or one.name != parameter
        ]
        return lambda **arguments: pytest.fail("called"), real.replace(parameters=new)

    monkeypatch.setattr(flashinfer_call, "installed", changed)
    forget()
    with pytest.raises(NotImplementedError) as error:
        getattr(trtllm, function)(**arguments)
    message = str(error.value)
    assert called in message
    assert f"'{parameter}'" in message or f"'new_{parameter}'" in message
    assert flashinfer_call.version() in message


def test_a_function_that_is_gone_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_call.importlib, "import_module", lambda module: SimpleNamespace())
    with pytest.raises(NotImplementedError, match=r"has no flashinfer\.decode\.no_such_function"):
        flashinfer_call.installed("flashinfer.decode", "no_such_function")


@BOTH_ENTRIES
def test_an_older_flashinfer_takes_a_stacked_pool_and_refuses_a_pair(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
    """As 0.6.12, which asks a pair of K and V for its dimensions."""
    simulated = simulate(SM90)
    monkeypatch.delattr("flashinfer.prefill._check_paged_kv_non_interleaved")
    with pytest.raises(NotImplementedError, match=r"takes K and V as one \[num_pages, 2, \.\.\.\] tensor alone"):
        getattr(trtllm, entry + CONTEXT)(**context_case())
    assert not simulated.calls
    assert_rounded(trtllm, CONTEXT, stacked(context_case()))


def test_the_installed_function_is_called_through_its_real_signature() -> None:
    function, signature = flashinfer_call.installed("flashinfer.decode", DECODE)
    assert callable(function)
    assert list(signature.parameters) == list(inspect.signature(trtllm.trtllm_batch_decode_with_kv_cache).parameters)


def test_defaults_are_not_passed(simulate: Simulate) -> None:
    """So that a FlashInfer without a parameter that nobody uses still runs."""
    simulated = simulate(SM90)
    defaults = decode_case(bmm1_scale=1.0, window_left=-1, o_scale=1.0, uses_shared_paged_kv_idx=True, backend="auto")
    trtllm.trtllm_batch_decode_with_kv_cache(**defaults)
    required = {"query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len"}
    assert set(simulated.calls[0][1]) == required


@pytest.mark.parametrize(("capability", "function"), [(SM90, DECODE), (SM100, DECODE), (SM100, CONTEXT)])
def test_everything_else_is_passed(simulate: Simulate, capability: tuple[int, int], function: str) -> None:
    simulated = simulate(capability)
    changes = {"sinks": SINKS, "window_left": 3, "enable_pdl": False, "out_dtype": torch.bfloat16}
    if function == DECODE:
        changes |= {"kv_dtype": torch.bfloat16, "backend": "xqa" if capability == SM90 else "trtllm-gen"}
    if capability == SM100:
        counters = torch.zeros(1024, dtype=torch.uint8)
        changes |= {"lse": torch.empty(6 if function == DECODE else 22, 4), "multi_ctas_kv_counter_buffer": counters}
    arguments = gen_case(2, **changes) if function == DECODE else context_case(**changes)
    getattr(trtllm, function)(**arguments)
    passed = simulated.calls[0][1]
    for name in changes.keys() - {"kv_dtype"}:
        assert passed[name] is arguments[name], name
    assert passed["query"] is arguments["query"]
    assert passed["seq_lens"] is arguments["seq_lens"]


def test_nvfp4_scale_factors_go_as_a_pair_of_hnd_views(simulate: Simulate) -> None:
    simulated = simulate(SM120)
    packed = torch.zeros(2, 5, 16, 2, 32, dtype=torch.uint8)  # NHD: [pages, tokens, heads, packed head_dim]
    factors = torch.ones(2, 5, 16, 2, 4).to(torch.float8_e4m3fn)
    simulated.call = lambda real, arguments: None
    trtllm.trtllm_batch_decode_with_kv_cache(
        **decode_case(head_dim=64)
        | {
            "kv_cache": tuple(packed),
            "kv_cache_sf": tuple(factors),
            "kv_layout": "NHD",
            "backend": "xqa",
            "block_tables": torch.zeros(3, 3, dtype=torch.int32),
        }
    )
    passed = simulated.calls[0][1]
    assert "kv_layout" not in passed
    for name, last in (("kv_cache", 32), ("kv_cache_sf", 4)):
        assert isinstance(passed[name], tuple)
        assert [list(x.shape) for x in passed[name]] == [[5, 2, 16, last]] * 2


# Prepared calls.


PREPARED_CASES: dict[str, tuple[tuple[int, int], str, Callable[[], Arguments]]] = {
    **{f"XQA, {name}": (SM90, DECODE, case) for name, case in XQA_CASES.items()},
    **{f"trtllm-gen decode, {name}": (SM100, DECODE, case) for name, case in TRTLLM_GEN_DECODE_CASES.items()},
    **{f"trtllm-gen context, {name}": (SM100, CONTEXT, case) for name, case in TRTLLM_GEN_CONTEXT_CASES.items()},
    **{f"fmha_v2, {name}": (SM90, CONTEXT, case) for name, case in FMHA_V2_CASES.items()},
}


def prepare(function: str, arguments: Arguments) -> flashinfer_call.PreparedCall:
    prepared = getattr(trtllm, f"prepare_{function}")(**arguments)
    assert isinstance(prepared, flashinfer_call.PreparedCall)
    return prepared


def bits(result: Any) -> list[Tensor]:
    return [part.view(torch.uint8).clone() for part in (result if isinstance(result, tuple) else (result,))]


@pytest.mark.parametrize("name", PREPARED_CASES)
def test_a_prepared_call_returns_what_the_call_does(simulate: Simulate, name: str) -> None:
    capability, function, case = PREPARED_CASES[name]
    simulated = simulate(capability)
    arguments = case()
    expected = bits(getattr(trtllm, function)(**arguments))
    prepared = prepare(function, arguments)
    assert len(simulated.calls) == 1
    for given in (arguments.get("out"), arguments.get("lse")):
        if given is not None:
            given.fill_(7)
    for _ in range(2):
        assert all(got.equal(want) for got, want in zip(bits(prepared()), expected, strict=True))
    assert [called for called, _ in simulated.calls] == [simulated.calls[0][0]] * 3


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
def test_a_prepared_call_takes_flashinfers_own_parameters(function: str) -> None:
    prepare_it = getattr(trtllm, f"prepare_{function}")
    assert inspect.signature(prepare_it) == inspect.signature(getattr(trtllm, function))


# Two batches of the same shapes: other lengths and widths, pages, queries, keys and values.
OTHER_TREE = [[[column <= row and column != 2 for column in range(5)] for row in range(5)]] * 3
DECODE_BATCHES: tuple[Arguments, Arguments] = ({"kv_lens": (16, 33, 5)}, {"kv_lens": (33, 5, 16), "seed": 7})
CONTEXT_BATCHES: tuple[Arguments, Arguments] = (
    {"q_lens": (5, 0, 17), "kv_lens": (21, 7, 17)},
    {"q_lens": (17, 5, 0), "kv_lens": (17, 21, 7), "seed": 7},
)
REFILLED: dict[str, tuple[tuple[int, int], str, Callable[[int], Arguments]]] = {
    "XQA": (SM90, DECODE, lambda i: decode_case(**DECODE_BATCHES[i])),
    "XQA verify": (SM90, DECODE, lambda i: decode_case(3, **DECODE_BATCHES[i])),
    "XQA tree": (SM90, DECODE, lambda i: decode_case(5, mask=pack_mask((TREE, OTHER_TREE)[i]), **DECODE_BATCHES[i])),
    "XQA, sinks": (SM90, DECODE, lambda i: decode_case(sinks=SINKS.roll(i), **DECODE_BATCHES[i])),
    "XQA, scale tensors": (
        SM90,
        DECODE,
        lambda i: decode_case(
            kv_dtype=torch.float8_e4m3fn,
            bmm1_scale=torch.tensor([0.2 + i]),
            bmm2_scale=torch.tensor([0.7 + i]),
            **DECODE_BATCHES[i],
        ),
    ),
    "XQA, scale in base 2": (
        SM90,
        DECODE,
        lambda i: decode_case(bmm1_scale_log2=torch.tensor([0.4 + i]), **DECODE_BATCHES[i]),
    ),
    "XQA, views of NHD": (SM90, DECODE, lambda i: permuted(decode_case(**DECODE_BATCHES[i]))),
    "XQA, slice of a wider table": (SM90, DECODE, lambda i: widened(decode_case(**DECODE_BATCHES[i]))),
    "trtllm-gen decode": (SM100, DECODE, lambda i: gen_case(2, **DECODE_BATCHES[i])),
    "trtllm-gen decode, slice of wider separate tables": (
        SM100,
        DECODE,
        lambda i: widened(gen_case(2, separate_tables=True, **DECODE_BATCHES[i])),
    ),
    "trtllm-gen context": (SM100, CONTEXT, lambda i: context_case(**CONTEXT_BATCHES[i])),
    "fmha_v2": (SM90, CONTEXT, lambda i: context_case(**CONTEXT_BATCHES[i])),
    "fmha_v2, slice of a wider table": (SM90, CONTEXT, lambda i: widened(context_case(**CONTEXT_BATCHES[i]))),
    "fmha_v2, stacked": (SM90, CONTEXT, lambda i: stacked(context_case(**CONTEXT_BATCHES[i]))),
    "fmha_v2, stacked, slice of a wider table": (
        SM90,
        CONTEXT,
        lambda i: widened(stacked(context_case(**CONTEXT_BATCHES[i]))),
    ),
    "fmha_v2, expanded table": (SM90, CONTEXT, lambda i: expanded(context_case(**CONTEXT_BATCHES[i]))),
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
    capability, function, case = REFILLED[name]
    simulate(capability)
    buffers, other = case(0), case(1)
    other["query"] = -other["query"]
    prepared = prepare(function, buffers)
    prepared()
    refill(buffers, other)
    out = prepared()
    expected = getattr(references, function)(**other)
    assert float(references.relative_l2(out, expected).max()) <= ROUNDOFF[out.dtype]


class Operations(TorchDispatchMode):
    """Notes every operation of torch, views included: on a GPU most of them launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(function))
        return function(*args, **kwargs or {})


def without_attention(simulate: Simulate, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    """A simulated FlashInfer whose functions do nothing."""
    installed = simulate(capability).installed
    monkeypatch.setattr(flashinfer_call, "installed", lambda *of: (lambda **arguments: None, installed(*of)[1]))


OPERATIONS = {
    "XQA": [],
    "XQA verify": [],
    "XQA tree": [],
    "XQA, scale tensors": [],
    "XQA, scale in base 2": ["aten.mul.out"],
    "XQA, slice of a wider table": ["aten.copy_.default"],
    "trtllm-gen decode": [],
    "trtllm-gen context": [],
    "fmha_v2": ["aten.add.out"],
    "fmha_v2, slice of a wider table": ["aten.add.out"],
    "fmha_v2, stacked": [],
    "fmha_v2, stacked, slice of a wider table": ["aten.copy_.default"],
    "fmha_v2, expanded table": [],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_a_prepared_call_does_besides_flashinfers(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    capability, function, case = REFILLED[name]
    without_attention(simulate, monkeypatch, capability)
    prepared = prepare(function, case(0))
    for _ in range(2):
        with Operations() as operations:
            prepared()
        assert operations.names == OPERATIONS[name]


def test_the_table_of_a_split_pool_is_made_without_the_host(
    simulate: Simulate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of host data cannot be captured in a CUDA graph, and the call can: two launches, one in a prepared one."""
    monkeypatch.setattr("lab.calls.paged.check_values", lambda problem: None)  # as on a GPU
    without_attention(simulate, monkeypatch, SM90)
    arguments = context_case() | {"workspace_buffer": torch.zeros(9 * MEBIBYTE, dtype=torch.uint8)}
    with Operations() as operations:
        trtllm.trtllm_batch_context_with_kv_cache(**arguments)
    views = ("select", "slice", "transpose", "view", "unsqueeze", "empty", "detach")
    launches = [name for name in operations.names if name.split(".")[1] not in views]
    assert launches == ["aten.arange.start_step", "aten.add.out"]


def test_keywords_are_bound_once(simulate: Simulate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding takes longer than the other checks together."""
    installed, asked = simulate(SM90).installed, []
    monkeypatch.setattr(flashinfer_call, "installed", lambda *of: asked.append(of) or installed(*of))
    for arguments in (decode_case(), decode_case(), decode_case(window_left=3)):
        trtllm.trtllm_batch_decode_with_kv_cache(**arguments)
    assert len(asked) == 2


# What the adapter supplies.


@pytest.mark.parametrize("q_len", range(1, 41))
def test_causal_mask_is_a_lower_triangle(q_len: int) -> None:
    mask = trtllm.causal_mask(3, q_len, CPU)
    assert mask.dtype == torch.uint16
    assert mask.is_contiguous()
    assert list(mask.shape) == [3, q_len, 2 * ((q_len + 31) // 32)] == [3, q_len, mask_words(q_len)]
    for request in mask.tolist():
        for row, words in enumerate(request):
            shown = [16 * index + bit for index, word in enumerate(words) for bit in range(16) if word >> bit & 1]
            assert shown == list(range(row + 1))


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


def test_the_workspace_is_kept_and_its_semaphores_stay_zero(simulate: Simulate) -> None:
    """fmha_v2, between two decode calls, gets only what is after the semaphores."""
    simulated = simulate(SM90)
    assert_rounded(trtllm, DECODE, decode_case())
    assert_rounded(trtllm, CONTEXT, context_case())
    assert_rounded(trtllm, DECODE, decode_case())
    first, prefill, second = (arguments["workspace_buffer"] for _, arguments in simulated.calls)
    assert first.data_ptr() == second.data_ptr()
    assert first.nbytes == SEMAPHORE_BYTES + flashinfer_call.SCRATCH_BYTES
    assert prefill.data_ptr() - first.data_ptr() == SEMAPHORE_BYTES == 8 * MEBIBYTE


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float32])
def test_a_given_workspace_serves_both_calls(simulate: Simulate, dtype: torch.dtype) -> None:
    simulated = simulate(SM90)
    workspace = torch.zeros(9 * MEBIBYTE // dtype.itemsize, dtype=dtype)
    assert_rounded(trtllm, DECODE, decode_case(workspace_buffer=workspace))
    assert_rounded(trtllm, CONTEXT, context_case(workspace_buffer=workspace))
    assert_rounded(trtllm, DECODE, decode_case(workspace_buffer=workspace))
    decode, prefill, _ = (arguments["workspace_buffer"] for _, arguments in simulated.calls)
    assert decode is workspace
    assert prefill.data_ptr() - workspace.data_ptr() == 8 * MEBIBYTE


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
@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@BOTH_ENTRIES
def test_a_workspace_that_does_not_fit_is_refused(
    simulate: Simulate, workspace: Any, error: type[Exception], message: str, function: str, entry: str
) -> None:
    simulated = simulate(SM90)
    case = decode_case() if function == DECODE else context_case()
    with pytest.raises(error, match=f"workspace_buffer.*{message}"):
        getattr(trtllm, entry + function)(**case | {"workspace_buffer": workspace})
    assert not simulated.calls


def test_packed_rows_are_not_copied(simulate: Simulate) -> None:
    simulated = simulate(SM90)
    case = decode_case()
    trtllm.trtllm_batch_decode_with_kv_cache(**case)
    assert simulated.calls[0][1]["block_tables"] is case["block_tables"]


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@BOTH_ENTRIES
def test_an_unsupported_call_raises_the_reason(simulate: Simulate, function: str, entry: str) -> None:
    simulated = simulate((8, 0))
    case = decode_case() if function == DECODE else context_case()
    with pytest.raises(NotImplementedError, match=r"needs a GPU of SM90.*this is SM80"):
        getattr(trtllm, entry + function)(**case)
    assert not simulated.calls


@pytest.mark.parametrize("function", [DECODE, CONTEXT])
@BOTH_ENTRIES
def test_a_malformed_call_is_refused(simulate: Simulate, function: str, entry: str) -> None:
    simulated = simulate(SM90)
    case = decode_case() if function == DECODE else context_case()
    with pytest.raises(ValueError, match="query must be"):
        getattr(trtllm, entry + function)(**case | {"query": case["query"][0]})
    assert not simulated.calls


def test_a_cpu_is_named() -> None:
    with pytest.raises(NotImplementedError, match="need a CUDA GPU, and these tensors are on cpu"):
        trtllm.trtllm_batch_decode_with_kv_cache(**decode_case())


# Empty batches.


def test_an_empty_batch_returns_empty_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_call, "installed", lambda *_: pytest.fail("FlashInfer was asked for"))
    empty = Batch([], [], [])
    assert empty.q_lens == []
    cache, _ = write_pages([torch.zeros(1, 2, 64, dtype=torch.bfloat16)], 16, seed=0)
    arguments = {
        "query": torch.empty(0, 4, 64, dtype=torch.bfloat16),
        "kv_cache": (cache, cache),
        "workspace_buffer": None,
        "block_tables": torch.empty(0, 4, dtype=torch.int32),
        "seq_lens": torch.empty(0, dtype=torch.int32),
        "return_lse": True,
    }
    offsets = {
        "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32),
        "cum_seq_lens_kv": torch.zeros(1, dtype=torch.int32),
    }
    bounds = {"max_q_len": 0, "max_kv_len": 0, "bmm1_scale": 1.0, "bmm2_scale": 1.0, "batch_size": 0}
    for function, more in ((DECODE, {"max_seq_len": 0}), (CONTEXT, offsets | bounds)):
        call = functools.partial(getattr(trtllm, function), **arguments, **more)
        for made in (call, prepare(function, arguments | more)):
            out, lse = made()
            assert (list(out.shape), list(lse.shape)) == ([0, 4, 64], [0, 4])
    padded = arguments | offsets | bounds | {"query": torch.empty(3, 4, 64, dtype=torch.bfloat16)}
    assert getattr(trtllm, CONTEXT)(**padded)[0].shape == (3, 4, 64)
