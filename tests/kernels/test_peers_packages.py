"""SGLang's and vLLM's Triton attention and torch's flex_attention under FlashInfer's names.

SGLang's kernels are interpreted, vLLM's function is simulated, and flex_attention is not compiled.
"""

import importlib.util
import sys
from collections.abc import Iterator
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from lab import references
from lab.kernels import PlannedOnce, flashinfer_call, prepare, support
from lab.kernels.flashinfer_call import installed_function
from lab.kernels.peers import flash_attention_4, flash_mla, flex_attention, sglang_triton, vllm_triton
from lab.kernels.support import Kernel
from lab.kernels.support.peers import FLEX_ATTENTION, SGLANG_TRITON, VLLM_TRITON
from tests.cases import DECODE, Arguments, context_arguments, decode_arguments, pack_mask, random_batch
from tests.kernels.adapter_calls import decode, function_of
from tests.kernels.adapter_calls import posed as problem_of
from tests.kernels.held import E4M3, FP16
from tests.kernels.test_flash_mla import sparse
from tests.metadata.sglang.wheel import sglang_modules

ATTENTION = "sglang.kernels.ops.attention"
SGLANG = [f"{ATTENTION}.{name}" for name in ("decode_attention", "extend_attention", "score_mod", "metadata")]
FEW_ROUNDINGS = 2.0**-9  # of fp16; with as many K/V heads as query heads, SGLang rounds each product of Q and K
UNCOMPILED = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def posed(q_lens: list[int], kv_lens: list[int], heads: tuple[int, int] = (4, 2), **changes: Any) -> Arguments:
    """A decode call, or a context call where `context` says so, over pages as SGLang's pool has them, without an LSE.

    In fp16, which Triton's interpreter multiplies; it does not multiply bf16.
    """
    make = context_arguments if changes.pop("context", False) else decode_arguments
    drawn = {name: changes.pop(name) for name in ("kv_dtype", "head_dim") if name in changes}
    batch = random_batch(q_lens, kv_lens, heads=heads, dtype=FP16, **{"head_dim": 32} | drawn)
    return make(batch, **{"kv_layout": "NHD", "out_dtype": None, "return_lse": False} | changes)


def draft_mask(requests: int, q_len: int) -> torch.Tensor:
    visible = torch.rand(requests, q_len, q_len, generator=torch.Generator().manual_seed(0)) < 0.5
    return pack_mask((visible | torch.eye(q_len, dtype=torch.bool)).tolist())


SINKS = torch.linspace(-1.0, 2.0, 4)
# Row 0's own bit is clear; row 1 sees both tokens of the draft.
FIRST_ROW_HIDDEN = torch.tensor([[[0, 0], [3, 0]]] * 2, dtype=torch.int32).to(torch.uint16)
EXTEND = ([3, 20, 1], [5, 70, 1])
PASSES: dict[str, Arguments] = {
    "decode": posed([1, 1, 1], [5, 70, 33]),
    "decode of as many K/V heads": posed([1, 1], [5, 70], (2, 2)),
    "decode in a window, with sinks": posed([1, 1], [5, 70], window_left=9, sinks=SINKS),
    "verify": posed([3, 3], [5, 70], sinks=SINKS),
    "verify in a window": posed([3, 3], [5, 70], window_left=9),
    "ragged rows": posed([3, 0, 1], [5, 70, 1], ragged=True),
    "extend": posed(*EXTEND, context=True),
    "extend in a window, with sinks": posed(*EXTEND, context=True, window_left=9, sinks=SINKS),
    "every key": posed(*EXTEND, context=True, causal=False),
}
FLEX: Arguments = {"head_dim": 16, "return_lse": True}
FLEX_PASSES: dict[str, Arguments] = {
    "decode, one request without keys": posed([1, 1, 1], [0, 70, 33], **FLEX),
    "verify in a window": posed([3, 3], [5, 70], window_left=9, **FLEX),
    "a draft mask": posed([20, 20], [25, 90], mask=draft_mask(2, 20), **FLEX),
    "ragged rows": posed([3, 0, 1], [5, 70, 1], ragged=True, **FLEX),
    "extend in a window": posed([3, 300, 1], [5, 470, 1], context=True, window_left=200, **FLEX),
    "every key": posed([3, 300, 1], [5, 320, 40], context=True, causal=False, **FLEX),
}


def assert_right(implementation: Any, arguments: Arguments, rounding: float = FEW_ROUNDINGS) -> None:
    function = function_of(arguments)
    wanted = getattr(references, function)(**arguments | {"out_dtype": torch.float64})
    out = torch.full_like(arguments["query"], float("nan"))
    got = prepare(implementation, function, **arguments | {"out": out})()
    if arguments["return_lse"]:
        torch.testing.assert_close(got[1].double(), wanted[1].double(), rtol=0, atol=1e-3)
        got, wanted = got[0], wanted[0]
    assert got.data_ptr() == out.data_ptr()
    assert bool(((out.double() - wanted).norm(dim=-1) <= rounding * wanted.norm(dim=-1)).all())


# Kernel, module, changes of a plain call, and what the sentence says.
REFUSED: dict[str, tuple[Kernel, ModuleType, Arguments, str]] = {
    "SGLang, HND": (SGLANG_TRITON, sglang_triton, {"kv_layout": "HND"}, "K's pages must touch and be NHD"),
    "SGLang, LSE": (SGLANG_TRITON, sglang_triton, {"return_lse": True}, "hands no LSE of all keys out"),
    "SGLang, window 0": (SGLANG_TRITON, sglang_triton, {"window_left": 0}, "no key to the left for no window"),
    "SGLang, scale 0": (SGLANG_TRITON, sglang_triton, {"bmm1_scale": 0.0}, "a bmm1_scale of 0 for none given"),
    "SGLang, tensors": (SGLANG_TRITON, sglang_triton, {"bmm1_scale": torch.tensor([1.0])}, "scales as numbers"),
    "vLLM, LSE": (VLLM_TRITON, vllm_triton, {"return_lse": True}, "hands no LSE out"),
    "vLLM, scale of V": (VLLM_TRITON, vllm_triton, {"bmm2_scale": 0.25}, r"no scale of a torch\.float16 cache"),
    "vLLM, a larger scale of V": (VLLM_TRITON, vllm_triton, {"bmm2_scale": 4.0}, r"no scale of a torch\.float16 cache"),
    "vLLM, mask": (VLLM_TRITON, vllm_triton, {"mask": torch.ones(2, 2, 2, dtype=torch.uint16)}, "no mask of each"),
    "flex, sinks": (FLEX_ATTENTION, flex_attention, {"sinks": torch.zeros(4)}, "has no sinks"),
    "flex, HND": (FLEX_ATTENTION, flex_attention, {"kv_layout": "HND"}, "K's pages must touch and be NHD"),
    "flex, a scale of V": (FLEX_ATTENTION, flex_attention, {"bmm2_scale": 0.5}, "has no scale of its values"),
    "flex, a tensor": (FLEX_ATTENTION, flex_attention, {"bmm1_scale": torch.tensor([1.0])}, "its scale as a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_is_refused_in_a_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))
    kernel, module, changes, reason = REFUSED[name]
    width = 2 if "mask" in changes else 1
    with pytest.raises(NotImplementedError, match=f"{kernel.name} .*{reason}"):
        module.trtllm_batch_decode_with_kv_cache(**posed([width, width], [5, 70], **changes))


@pytest.fixture
def forgotten() -> Iterator[None]:
    """No function is remembered from before, or afterwards."""
    installed_function.cache_clear()
    yield
    installed_function.cache_clear()


@pytest.fixture
def sglang(forgotten: None) -> Iterator[None]:
    with sglang_modules(*SGLANG, names={f"sglang.srt.utils.{name}": lambda: False for name in ("is_hip", "is_cuda")}):
        yield


@UNCOMPILED
@pytest.mark.parametrize("module", [sglang_triton, flex_attention], ids=["SGLang", "flex"])
def test_a_plan_keeps_lengths_and_not_contents(module: ModuleType, request: pytest.FixtureRequest) -> None:
    if module is sglang_triton:
        request.getfixturevalue("sglang")
    arguments = posed([1, 1], [5, 70])
    call = prepare(PlannedOnce(module), DECODE, **arguments)
    changed = arguments | {"query": arguments["query"].flip(0).contiguous()}
    wanted = module.trtllm_batch_decode_with_kv_cache(**changed)
    arguments["query"].copy_(changed["query"])
    arguments["seq_lens"].fill_(1)
    assert call().equal(wanted)


@pytest.mark.usefixtures("sglang")
class TestSGLang:
    @pytest.mark.parametrize("name", PASSES)
    def test_its_kernels_mean_what_the_reference_does(self, name: str) -> None:
        assert_right(sglang_triton, PASSES[name])
        assert_right(PlannedOnce(sglang_triton), PASSES[name])

    def test_values_have_a_scale(self) -> None:
        for name in ("decode", "extend"):
            assert_right(sglang_triton, PASSES[name] | {"bmm1_scale": 0.3, "bmm2_scale": 0.25})

    @pytest.mark.parametrize("window_left", [-1, 40])
    def test_a_draft_mask_is_each_requests_own(self, window_left: int) -> None:
        assert_right(sglang_triton, posed([20, 20], [25, 70], window_left=window_left, mask=draft_mask(2, 20)))

    @pytest.mark.parametrize(("kv_lens", "window_left"), [([3, 70], -1), ([3, 70], 1), ([70, 70], 2)])
    def test_a_mask_may_hide_all_but_one_key_of_a_row(self, kv_lens: list[int], window_left: int) -> None:
        assert_right(sglang_triton, posed([2, 2], kv_lens, window_left=window_left, mask=FIRST_ROW_HIDDEN))

    @pytest.mark.parametrize(
        "arguments",
        [
            posed([1, 1], [0, 70]),
            posed([2, 2], [2, 70], mask=FIRST_ROW_HIDDEN),
            posed([2, 2], [2, 70], window_left=5, mask=FIRST_ROW_HIDDEN),
        ],
        ids=["no keys", "hidden by a mask", "hidden by a mask and a window"],
    )
    def test_a_row_without_keys_is_refused(self, arguments: Arguments) -> None:
        arguments = arguments | {"seq_lens": arguments["seq_lens"].view(torch.uint32)}
        with pytest.raises(NotImplementedError, match="a row that sees no key"):
            sglang_triton.trtllm_batch_decode_with_kv_cache(**arguments)

    def test_an_e4m3_cache_is_multiplied_in_e4m3(self) -> None:
        """So its error is that of rounding weights to 3 bits, and below the normal numbers of e4m3 to fewer."""
        arguments = posed([1, 1], [5, 70], kv_dtype=E4M3, bmm1_scale=0.1)
        assert_right(sglang_triton, arguments, rounding=0.3)
        with pytest.raises(AssertionError):
            assert_right(sglang_triton, arguments, rounding=0.01)

    def test_without_rows_nothing_is_asked_for(self) -> None:
        arguments = posed([0, 0], [3, 5], context=True)
        assert sglang_triton.trtllm_batch_context_with_kv_cache(**arguments).shape[0] == 0


class SimulatedVLLM:
    """vLLM's `unified_attention` with its parameters, over the reference."""

    class KVQuantMode(Enum):
        NONE = 0
        FP8_PER_TENSOR = 1

    def __init__(self) -> None:
        self.passed: Arguments = {}

    def unified_attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        cu_seqlens_q: Any,
        max_seqlen_q: int,
        seqused_k: Any,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: Any,
        softcap: float,
        q_descale: Any,
        k_descale: Any,
        v_descale: Any,
        seq_threshold_3D: Any = None,
        num_par_softmax_segments: Any = None,
        softmax_segm_output: Any = None,
        softmax_segm_max: Any = None,
        softmax_segm_expsum: Any = None,
        sinks: Any = None,
        kv_quant_mode: Any = KVQuantMode.NONE,
    ) -> None:
        self.passed = {name: value for name, value in locals().items() if name != "self"}
        quantised = k.dtype == E4M3
        assert quantised == (kv_quant_mode is self.KVQuantMode.FP8_PER_TENSOR) == (k_descale is not None)
        references.trtllm_batch_context_with_kv_cache(
            query=q,
            kv_cache=(k, v),
            kv_layout="NHD",
            workspace_buffer=None,
            block_tables=block_table,
            seq_lens=seqused_k,
            max_q_len=max_seqlen_q,
            max_kv_len=max_seqlen_k,
            bmm1_scale=softmax_scale * (float(k_descale) if quantised else 1.0),
            bmm2_scale=float(v_descale) if quantised else 1.0,
            batch_size=len(seqused_k),
            cum_seq_lens_q=cu_seqlens_q,
            cum_seq_lens_kv=torch.nn.functional.pad(seqused_k.cumsum(0), (1, 0)).to(torch.int32),
            window_left=window_size[0],
            sinks=sinks,
            causal=causal,
            out=out,
        )


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch, forgotten: None) -> SimulatedVLLM:
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))
    simulated = SimulatedVLLM()
    modules = {
        vllm_triton.UNIFIED: {"unified_attention": simulated.unified_attention},
        vllm_triton.QUANT_MODE: {"KVQuantMode": simulated.KVQuantMode},
    }
    for name, functions in modules.items():
        parts = name.split(".")[:-1]
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        monkeypatch.setitem(sys.modules, ".".join(parts), SimpleNamespace(**functions))  # type: ignore[misc]
    monkeypatch.setattr(flashinfer_call, "require", lambda *names: None)
    return simulated


class TestVLLM:
    @pytest.mark.parametrize("name", PASSES)
    def test_calls_bind_to_its_function_and_mean_what_the_reference_does(self, name: str, vllm: SimulatedVLLM) -> None:
        assert_right(vllm_triton, PASSES[name])
        hnd = tuple(each.transpose(1, 2).contiguous() for each in PASSES[name]["kv_cache"])
        assert_right(vllm_triton, PASSES[name] | {"kv_layout": "HND", "kv_cache": hnd})

    def test_an_e4m3_cache_has_scales(self, vllm: SimulatedVLLM) -> None:
        assert_right(vllm_triton, posed([1, 1], [5, 70], kv_dtype=E4M3, bmm1_scale=0.1, bmm2_scale=0.25))

    def test_keys_are_split_where_vllm_splits_them(self, vllm: SimulatedVLLM) -> None:
        for q_len, requests, splits in ((1, 2, True), (8, 64, True), (9, 2, False), (1, 65, False)):
            prepare(vllm_triton, DECODE, **posed([q_len] * requests, [q_len] * requests))()
            segments, most_requests = vllm.passed["softmax_segm_output"], vllm.passed["seq_threshold_3D"]
            if splits:
                assert most_requests == 64  # 128 programs of 2 K/V heads
                assert segments.shape == (q_len * requests, 4, 16, 32)
            else:
                assert segments is None

    def test_another_release_is_named_with_what_it_lacks(
        self, monkeypatch: pytest.MonkeyPatch, vllm: SimulatedVLLM
    ) -> None:
        module = sys.modules[vllm_triton.UNIFIED.rpartition(".")[0]]
        monkeypatch.setattr(module, "unified_attention", lambda q, k, v: None)
        with pytest.raises(TypeError, match=r"does not take this call: .*the lab is written for 0\.33\.0"):
            vllm_triton.trtllm_batch_decode_with_kv_cache(**PASSES["decode"])


def test_vllm_has_no_triton_on_a_cpu() -> None:
    with pytest.raises(NotImplementedError, match="needs a GPU of SM80 and later, this is a CPU"):
        vllm_triton.trtllm_batch_decode_with_kv_cache(**PASSES["decode"])


@pytest.mark.parametrize(
    ("module", "package", "remedy", "arguments"),
    [
        (sglang_triton, "sglang", "sglang", PASSES["decode"]),
        (vllm_triton, "vllm", "vllm", PASSES["decode"]),
        (flash_attention_4, "flash_attn", r"'\.\[fa4\]'", decode(head_dim=64)),
        (flash_mla, "flash_mla", r"'\.\[flashmla\]'", sparse()),
    ],
)
@pytest.mark.usefixtures("forgotten")
def test_a_package_that_is_not_installed_costs_nothing_until_it_is_called(
    module: ModuleType, package: str, remedy: str, arguments: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name == package else find(name, *of))
    with pytest.raises(ModuleNotFoundError, match=f"{package}, which is not installed: pip install {remedy}"):
        getattr(module, function_of(arguments))(**arguments)


@UNCOMPILED
class TestFlexAttention:
    @pytest.mark.parametrize("name", FLEX_PASSES)
    def test_outputs_and_lses_are_right(self, name: str) -> None:
        assert_right(flex_attention, FLEX_PASSES[name])

    def test_a_request_with_a_page_twice_is_refused(self) -> None:
        """Two requests may share a page."""
        arguments = posed([1, 1], [70, 70], **FLEX)
        tables = arguments["block_tables"].clone()
        tables[1] = tables[0]
        flex_attention.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})
        tables[1, 1] = tables[1, 0]
        with pytest.raises(NotImplementedError, match=f"request 1 must not have page {int(tables[1, 0])} twice"):
            flex_attention.trtllm_batch_decode_with_kv_cache(**arguments | {"block_tables": tables})

    @pytest.mark.parametrize("name", FLEX_PASSES)
    def test_a_block_read_wholly_is_seen_wholly_and_what_is_seen_is_read(self, name: str) -> None:
        """The blocks of keys that a GPU reads."""
        arguments = FLEX_PASSES[name]
        problem = problem_of(arguments)
        rows = flex_attention._rows_of(problem)
        num_tokens = problem.k_cache.shape[0] * problem.page_size
        blocks = flex_attention._block_mask(problem, rows, num_tokens)
        num_entries, num_rows = rows.request.shape
        seen = create_mask(blocks.mask_mod, num_entries, 1, num_rows, num_tokens, device="cpu")
        assert seen.any()
        some_are_whole = False
        places = torch.cartesian_prod(*map(torch.arange, (seen.shape[0], blocks.kv_num_blocks.shape[2])))
        for entry, block in places.tolist():
            mine = seen[entry, 0, block * flex_attention.Q_BLOCK :][: flex_attention.Q_BLOCK]
            by_page = mine.view(len(mine), -1, problem.page_size)
            partial, full = (
                set(ids[entry, 0, block, : counts[entry, 0, block]].tolist())
                for counts, ids in (
                    (blocks.kv_num_blocks, blocks.kv_indices),
                    (blocks.full_kv_num_blocks, blocks.full_kv_indices),
                )
            )
            assert not partial & full
            assert partial | full == set(by_page.any(dim=(0, 2)).nonzero().flatten().tolist())
            assert full == set(by_page.all(dim=2).all(dim=0).nonzero().flatten().tolist())
            some_are_whole |= bool(full)
        assert some_are_whole == (name not in ("verify in a window", "ragged rows"))
