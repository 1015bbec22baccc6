"""FlashAttention-4's adapter without a GPU or the package: its arguments mean what the references compute."""

import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import references
from lab.kernels import prepare, support
from lab.kernels.peers import flash_attention_4
from lab.kernels.peers.installed import installed_function
from lab.kernels.support import Kernel, why_not
from lab.kernels.support.packages import FLASH_ATTENTION_4
from tests.cases import pack_mask
from tests.kernels.held import ROUNDOFF
from tests.kernels.simulated_flash_attention_4 import SimulatedFlashAttention4
from tests.kernels.test_flashinfer_paged_adapters import (
    BF16,
    BOTH,
    DECODE_CALL,
    E4M3,
    FP16,
    FP32,
    SM80,
    SM90,
    SM100,
    SM120,
    Arguments,
    assert_right,
    call_of,
    context,
    decode,
    gapped,
    into,
    own_rows,
    posed,
    ragged_rows,
    v_elsewhere,
    with_scale,
)
from tests.kernels.test_trtllm_adapter import SINKS, TREE

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

Simulate = Callable[..., SimulatedFlashAttention4]
RIGHT: dict[str, Callable[[], Arguments]] = {
    **{name: arguments for name, (_, arguments) in BOTH.items() if "bmm2_scale" not in name},
    "decode, V elsewhere": lambda: v_elsewhere(decode()),
    "verify, a strided query": lambda: gapped(decode(5), 8),
    "a strided LSE": lambda: decode(5, return_lse=True, lse=torch.empty(4, 15).T),
    "context, a strided LSE": lambda: context(return_lse=True, lse=torch.empty(4, 22).T),
    "uint32 lengths": lambda: decode(seq_lens=torch.tensor([16, 33, 5], dtype=torch.uint32)),
}


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch) -> Simulate:
    """A GPU of some capability, with `_flash_attn_fwd` simulated."""

    def start(capability: tuple[int, int] = SM90, **options: Any) -> SimulatedFlashAttention4:
        simulated = SimulatedFlashAttention4(major=capability[0], **options)
        for module in (flash_attention_4, support):
            monkeypatch.setattr(module, "capability_of", lambda device: capability)
        monkeypatch.setattr(flash_attention_4, "installed_function", simulated.installed_function)
        return simulated

    return start


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_right(simulate: Simulate, name: str) -> None:
    simulated = simulate()
    assert_right(flash_attention_4, with_scale(RIGHT[name]()))
    assert len(simulated.calls) == 1


def test_rows_of_different_widths_and_padding(simulate: Simulate) -> None:
    simulate()
    arguments = ragged_rows(decode(1, kv_lens=(16, 33, 5), return_lse=True))
    arguments["query"] = torch.cat((arguments["query"][:3], arguments["query"][:2], arguments["query"][3:]))
    own = own_rows(arguments, 5)
    result, expected = (getattr(own(each), DECODE_CALL)(**arguments) for each in (flash_attention_4, references))
    assert float(references.relative_l2(result[0], expected[0]).max()) <= ROUNDOFF[BF16]
    torch.testing.assert_close(result[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("capability", "num_splits"), [(SM90, 1), (SM100, 0)])
def test_keys_are_split_where_the_gpu_has_it(simulate: Simulate, capability: tuple[int, int], num_splits: int) -> None:
    simulated = simulate(capability)
    assert_right(flash_attention_4, with_scale(decode()))
    assert simulated.calls[0]["num_splits"] == num_splits


@pytest.mark.parametrize("arguments", [decode, context], ids=["decode", "context"])
def test_a_given_out_and_lse_are_written(simulate: Simulate, arguments: Callable[..., Arguments]) -> None:
    simulated = simulate()
    given = with_scale(arguments(return_lse=True))
    shape = given["query"].shape
    given |= {"out": torch.full(shape, math.nan, dtype=BF16), "lse": torch.full(shape[:2], math.nan)}
    assert_right(flash_attention_4, given)
    assert not given["out"].isnan().any()
    assert not given["lse"].isnan().any()
    assert simulated.calls[0]["out"].data_ptr() == given["out"].data_ptr()


@pytest.mark.parametrize("return_lse", [True, False])
def test_a_prepared_call_follows_contents(simulate: Simulate, return_lse: bool) -> None:
    simulate()
    arguments = decode(5, kv_lens=(16, 33, 12), sinks=SINKS.clone(), return_lse=return_lse)
    ready = prepare(flash_attention_4, DECODE_CALL, **arguments)
    ready()
    arguments["query"].mul_(-2.0)
    arguments["seq_lens"].sub_(2)
    arguments["block_tables"].copy_(arguments["block_tables"].flip(1))
    arguments["seq_lens"].copy_(torch.tensor([9, 16, 8]))
    expected = references.trtllm_batch_decode_with_kv_cache(**arguments)
    torch.testing.assert_close(ready(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("arguments", [decode, context], ids=["decode", "context"])
def test_without_rows_nobody_is_asked(simulate: Simulate, arguments: Callable[..., Arguments]) -> None:
    simulated = simulate()
    given = arguments()
    offsets = {"cum_seq_lens_q": torch.zeros(4, dtype=torch.int32), "max_q_len": 0}
    given |= offsets if "max_kv_len" in given else offsets | {"q_len_per_req": None}
    assert getattr(flash_attention_4, call_of(given))(**given).shape == given["query"].shape
    assert not simulated.calls


TAMPERED: dict[str, Callable[[Arguments], Arguments]] = {
    "scale": lambda a: a | {"softmax_scale": 1.5 * a["softmax_scale"]},
    "causal": lambda a: a | {"causal": False},
    "window": lambda a: a | {"window_size_left": None},
    "table": lambda a: a | {"page_table": a["page_table"].flip(0)},
    "lengths": lambda a: a | {"seqused_k": a["seqused_k"] - 1},
    "sinks": lambda a: a | {"learnable_sink": None},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_the_simulation_would_show_it(simulate: Simulate, name: str) -> None:
    simulate(change=TAMPERED[name])
    with pytest.raises(AssertionError):
        assert_right(flash_attention_4, with_scale(decode(5, window_left=3, sinks=SINKS)))


def test_without_the_package_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name == "flash_attn" else find(name, *of)
    )
    monkeypatch.setattr(support, "capability_of", lambda device: SM90)
    installed_function.cache_clear()
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn, which is not installed: pip install '\.\[fa4\]'"):
        flash_attention_4.trtllm_batch_decode_with_kv_cache(**decode())


def test_the_simulation_has_the_installed_functions_parameters() -> None:
    interface = pytest.importorskip("flash_attn.cute.interface", reason="FlashAttention-4 is not installed")
    simulated = inspect.signature(SimulatedFlashAttention4._forward).parameters
    assert {*simulated} - {"self"} <= {*inspect.signature(interface._flash_attn_fwd).parameters}


REFUSED: dict[str, tuple[Kernel, tuple[int, int] | None, Callable[[], Arguments], str]] = {
    "on a CPU": (FLASH_ATTENTION_4, None, decode, "needs a GPU of SM90, SM100 and SM103, this is a CPU"),
    "on SM80": (FLASH_ATTENTION_4, SM80, decode, "this is SM80"),
    "on SM120": (FLASH_ATTENTION_4, SM120, decode, "this is SM120"),
    "e4m3": (FLASH_ATTENTION_4, SM90, lambda: decode(dtype=E4M3, out_dtype=BF16), "fp16 or bf16 queries"),
    "e4m3 K/V": (FLASH_ATTENTION_4, SM90, lambda: decode(kv_dtype=E4M3), "K/V in the query's dtype"),
    "into float32": (FLASH_ATTENTION_4, SM90, lambda: into(decode(), FP32), "writes the query's dtype"),
    "head_dim 512": (FLASH_ATTENTION_4, SM90, lambda: decode(head_dim=512), "64, 128 and 256, not 512"),
    "pages of a tile": (FLASH_ATTENTION_4, SM90, lambda: decode(page_size=128), "reads a page of 128 tokens whole"),
    "pages of a window's tile": (
        FLASH_ATTENTION_4,
        SM90,
        lambda: decode(head_dim=256, page_size=64, window_left=4),
        "reads a page of 64 tokens whole",
    ),
    "separate tables": (FLASH_ATTENTION_4, SM90, lambda: context(separate_tables=True), "must be True"),
    "a mask": (FLASH_ATTENTION_4, SM90, lambda: decode(5, mask=pack_mask(TREE)), "takes no packed mask"),
    "tensor scales": (FLASH_ATTENTION_4, SM90, lambda: decode(bmm1_scale=torch.tensor([0.1])), "as numbers"),
    "bmm2_scale": (FLASH_ATTENTION_4, SM90, lambda: decode(bmm2_scale=0.5), "bmm2_scale must be 1"),
    "a negative scale": (FLASH_ATTENTION_4, SM90, lambda: decode(bmm1_scale=-0.1), "a positive bmm1_scale, not -0.1"),
    "odd queries": (FLASH_ATTENTION_4, SM90, lambda: gapped(decode()), "the strides of query must be multiples"),
    "no column": (
        FLASH_ATTENTION_4,
        SM90,
        lambda: decode(kv_lens=(0, 0, 0), block_tables=torch.empty(3, 0, dtype=torch.int32)),
        "block_tables has no column",
    ),
}
TAKEN: dict[str, tuple[tuple[int, int], Callable[[], Arguments]]] = {
    "decode on SM90": (SM90, decode),
    "context on SM100": (SM100, context),
    "pages of half a tile": (SM90, lambda: decode(page_size=64)),
    "pages of 64 of head_dim 256": (SM90, lambda: decode(head_dim=256, page_size=64)),
    "a window of head_dim 256 on SM100": (SM100, lambda: decode(head_dim=256, page_size=64, window_left=4)),
    "fp16": (SM90, lambda: decode(dtype=FP16)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str) -> None:
    kernel, capability, arguments, reason = REFUSED[name]
    assert reason in (why_not(kernel, capability, posed(arguments())) or "taken")


@pytest.mark.parametrize("name", TAKEN)
def test_the_rest_is_taken(name: str) -> None:
    capability, arguments = TAKEN[name]
    assert why_not(FLASH_ATTENTION_4, capability, posed(arguments())) is None
