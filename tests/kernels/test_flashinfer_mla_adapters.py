"""Both ways to FlashInfer's MLA without a GPU: calls bind to the installed functions, and mean what the reference does."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.mla_decode import MLADecodeCall
from lab.kernels import flashinfer_call, trtllm
from lab.kernels.peers import flashinfer_mla
from lab.kernels.support import Kernel, why_not
from lab.kernels.support.peers import FA2_MLA, FA3_MLA
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_MLA
from lab.kernels.support.xqa import XQA_MLA
from tests.cases import latent_batch, mla_arguments
from tests.kernels.conftest import SimulatedOn
from tests.kernels.held import assert_rounded
from tests.kernels.simulated import MEBIBYTE
from tests.kernels.simulated_flashinfer_mla import NAME, SimulatedMLA

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

E4M3 = torch.float8_e4m3fn
SM80, SM90, SM100, SM120 = (8, 0), (9, 0), (10, 0), (12, 0)
Arguments = dict[str, Any]
Simulate = Callable[..., SimulatedMLA]


@pytest.fixture
def simulate(simulated_on: SimulatedOn) -> Simulate:
    return lambda capability, **options: simulated_on(
        capability, SimulatedMLA(**options), flashinfer_call, flashinfer_mla
    )


def case(
    q_len: int = 1, kv_lens: tuple[int, ...] = (5, 33, 70), *, heads: int = 2, page_size: int = 64, **changes: Any
) -> Arguments:
    """A call as an engine makes it, DeepSeek's dimensions."""
    of_batch = {name: changes.pop(name) for name in ("dtype", "kv_dtype", "rank") if name in changes}
    batch = latent_batch([q_len] * len(kv_lens), kv_lens, heads=heads, **{"rank": 512, "rope": 64} | of_batch)
    usual = {"out": None, "return_lse": False, "return_lse_base": None, "bmm1_scale": 0.05}
    return mla_arguments(batch, page_size, **usual | changes)


def ragged(**changes: Any) -> Arguments:
    batch = latent_batch([1, 4, 2], [3, 20, 70], heads=2, rank=512, rope=64)
    usual = {"out": None, "return_lse": False, "return_lse_base": None, "bmm1_scale": 0.05, "ragged": True}
    return mla_arguments(batch, 64, **usual | changes)


def widened(arguments: Arguments) -> Arguments:
    """The same table as a column slice of a wider one, whose other columns are wrong."""
    table = arguments["block_tables"]
    wide = torch.cat((table, torch.zeros_like(table)), dim=1)
    return arguments | {"block_tables": wide[:, : table.shape[1]]}


def with_gaps(arguments: Arguments) -> Arguments:
    cache = arguments["kv_cache"]
    return arguments | {"kv_cache": torch.stack((cache, torch.full_like(cache, math.nan)), dim=1)[:, 0]}


def misplaced(arguments: Arguments) -> Arguments:
    """The same cache, one element later in memory."""
    cache = arguments["kv_cache"]
    moved = torch.empty(cache.numel() + 1, dtype=cache.dtype)[1:].view(cache.shape)
    return arguments | {"kv_cache": moved.copy_(cache)}


def into(arguments: Arguments, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    return arguments | {"out": torch.empty(*arguments["query"].shape[:-1], 512, dtype=dtype)}


def with_columns(arguments: Arguments, columns: int) -> Arguments:
    table = arguments["block_tables"]
    return arguments | {"block_tables": torch.nn.functional.pad(table, (0, columns - table.shape[1]))}


SINKS = torch.tensor([0.5, -1.0])
TRTLLM_GEN: dict[str, Callable[[], Arguments]] = {
    "decode": case,
    "verify": lambda: case(4, bmm2_scale=0.5),
    "pages of 32": lambda: case(3, page_size=32),
    "e4m3": lambda: case(2, dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "sinks": lambda: case(2, sinks=SINKS),
    "sinks in a list": lambda: case(2, sinks=[SINKS]),
    "LSE": lambda: case(3, return_lse=True),
    "LSE in base e": lambda: case(3, return_lse=True, return_lse_base="basee"),
    "given LSE": lambda: case(return_lse=True, lse=torch.empty(3, 1, 2)),
    "given out": lambda: into(case(2)),
    "ragged": ragged,
    "tensor scales": lambda: case(bmm1_scale=torch.tensor([0.05]), bmm2_scale=torch.tensor([0.5])),
    "slice of a wider table": lambda: widened(case(2)),
    "pages with gaps": lambda: with_gaps(case(2)),
    "rank 256": lambda: case(2, rank=256),
    "128 heads": lambda: case(kv_lens=(5, 33), heads=128),
    "uint32 lengths": lambda: case(seq_lens=torch.tensor([5, 33, 70], dtype=torch.uint32)),
    "counters": lambda: case(multi_ctas_kv_counter_buffer=torch.zeros(1024, dtype=torch.int32)),
}


@pytest.mark.parametrize("name", TRTLLM_GEN)
def test_trtllm_gen(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM100)
    assert_rounded(trtllm, NAME, TRTLLM_GEN[name]())
    ((_, call),) = simulated.calls
    assert call["backend"] == "trtllm-gen"
    assert not call.get("return_lse") or call["return_lse_base"] in ("base2", "basee")


def test_trtllm_gen_leaves_rows_without_keys(simulate: Simulate) -> None:
    """FlashInfer's pull request 4975; rows with keys are right beside them."""
    simulate(SM100)
    arguments = case(2, kv_lens=(0, 1, 9))
    out = torch.full((3, 2, 2, 512), math.nan, dtype=torch.bfloat16)
    trtllm.trtllm_batch_decode_with_kv_cache_mla(**arguments | {"out": out})
    expected = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert bool(out[0].isnan().all())
    assert bool(out[1, 0].isnan().all())
    torch.testing.assert_close(out[1:].flatten(0, 1)[1:], expected[1:].flatten(0, 1)[1:], rtol=2**-7, atol=2**-7)


XQA: dict[str, Callable[[], Arguments]] = {
    "decode": lambda: case(kv_lens=(5, 33), heads=128),
    "scales": lambda: case(kv_lens=(5, 33), heads=128, dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "given out": lambda: into(case(kv_lens=(5, 33), heads=128)),
    "counters": lambda: case(
        kv_lens=(5, 33), heads=128, multi_ctas_kv_counter_buffer=torch.zeros(1024, dtype=torch.int32)
    ),
    "slice of a wider table": lambda: widened(with_columns(case(kv_lens=(5, 33), heads=128), 2)),
    "one row": lambda: case(kv_lens=(70,), heads=128),
}


@pytest.mark.parametrize("name", XQA)
def test_xqa(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM120)
    arguments = XQA[name]()
    assert_rounded(trtllm, NAME, with_columns(arguments, 2) if "wider" not in name else arguments)
    assert simulated.calls[0][1]["backend"] == "xqa"


def test_a_given_out_is_what_xqa_returns(simulate: Simulate) -> None:
    simulate(SM120)
    arguments = with_columns(XQA["given out"](), 2)
    assert trtllm.trtllm_batch_decode_with_kv_cache_mla(**arguments) is arguments["out"]


def test_a_prepared_call_sees_new_contents(simulate: Simulate) -> None:
    simulate(SM100)
    arguments = widened(case(2))
    prepared = trtllm.prepare_trtllm_batch_decode_with_kv_cache_mla(**arguments)
    arguments["seq_lens"].sub_(1)
    arguments["query"].mul_(2.0)
    arguments["block_tables"].copy_(arguments["block_tables"].flip(0))
    arguments["seq_lens"].copy_(arguments["seq_lens"].flip(0))
    expected = references.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    torch.testing.assert_close(prepared(), expected, rtol=2**-7, atol=2**-7)


def test_a_call_without_rows_asks_nobody(simulate: Simulate) -> None:
    simulated = simulate(SM100)
    arguments = case() | {
        "query": torch.empty(0, 1, 2, 576, dtype=torch.bfloat16),
        "seq_lens": torch.empty(0, dtype=torch.int32),
        "block_tables": torch.empty(0, 4, dtype=torch.int32),
        "return_lse": True,
    }
    out, lse = trtllm.trtllm_batch_decode_with_kv_cache_mla(**arguments)
    assert (out.shape, lse.shape) == ((0, 1, 2, 512), (0, 2))
    assert not simulated.calls


@pytest.mark.parametrize("implementation", [trtllm, flashinfer_mla])
def test_padding_without_requests_asks_nobody(simulate: Simulate, implementation: Any) -> None:
    """Rows of a graph's buffer of which no request has one."""
    simulated = simulate(SM100)
    arguments = ragged() | {
        "seq_lens": torch.empty(0, dtype=torch.int32),
        "block_tables": torch.empty(0, 4, dtype=torch.int32),
        "cum_seq_lens_q": torch.zeros(1, dtype=torch.int32),
    }
    assert implementation.trtllm_batch_decode_with_kv_cache_mla(**arguments).shape == (7, 2, 512)
    assert not simulated.calls


def test_a_small_workspace_is_refused_for_xqa(simulate: Simulate) -> None:
    simulate(SM120)
    small = torch.zeros(8 * MEBIBYTE + 100, dtype=torch.uint8)
    with pytest.raises(ValueError, match="less than"):
        trtllm.trtllm_batch_decode_with_kv_cache_mla(**with_columns(XQA["decode"](), 2) | {"workspace_buffer": small})


def test_off_the_gpu_it_says_where_to_go() -> None:
    with pytest.raises(NotImplementedError, match=r"lab.kernels.portable or lab.references"):
        trtllm.trtllm_batch_decode_with_kv_cache_mla(**case())


TAMPERED: dict[str, Callable[[Arguments], Arguments]] = {
    "bmm1_scale": lambda a: a | {"bmm1_scale": 1.1 * a["bmm1_scale"]},
    "bmm2_scale": lambda a: a | {"bmm2_scale": 1.1 * a.get("bmm2_scale", 1.0)},
    "seq_lens": lambda a: a | {"seq_lens": a["seq_lens"] - 1},
    "block_tables": lambda a: a | {"block_tables": a["block_tables"].flip(0)},
    "sinks": lambda a: a | {"sinks": None},
}


@pytest.mark.parametrize("name", TAMPERED)
def test_the_simulation_would_show_it(simulate: Simulate, name: str) -> None:
    simulate(SM100, change=TAMPERED[name])
    with pytest.raises(AssertionError):
        assert_rounded(trtllm, NAME, case(2, sinks=SINKS))


# The wrapper

WRAPPER: dict[str, Callable[[], Arguments]] = {
    "decode": case,
    "verify": lambda: case(4),
    "fp16": lambda: into(case(2, dtype=torch.float16), torch.float16),
    "e4m3 cache": lambda: case(2, kv_dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7),
    "LSE": lambda: case(3, return_lse=True),
    "LSE in base e": lambda: case(3, return_lse=True, return_lse_base="basee"),
    "given LSE": lambda: case(return_lse=True, lse=torch.empty(3, 1, 2)),
    "ragged": ragged,
    "ragged LSE": lambda: ragged(return_lse=True, return_lse_base="base2"),
    "slice of a wider table": lambda: widened(case(2)),
    "pages with gaps": lambda: with_gaps(case(2)),
    "given out": lambda: into(case(2)),
    "no keys": lambda: case(2, kv_lens=(0, 1, 9)),
    "no key at all": lambda: case(kv_lens=(0, 0)),
    "pages of 16": lambda: case(2, page_size=16),
}


@pytest.mark.parametrize("name", WRAPPER)
def test_wrapper(simulate: Simulate, name: str) -> None:
    simulated = simulate(SM90)
    assert_rounded(flashinfer_mla, NAME, WRAPPER[name]())
    assert [plan["backend"] for plan in simulated.plans] == ["fa3"]


def test_logits_have_their_scale_though_the_kernel_rounds_the_caches(simulate: Simulate) -> None:
    simulated = simulate(SM90)
    flashinfer_mla.trtllm_batch_decode_with_kv_cache_mla(**case(2, kv_dtype=E4M3, bmm1_scale=0.02, bmm2_scale=0.7))
    (planned,) = simulated.plans
    assert planned["sm_scale"] * float(torch.tensor(0.7).to(torch.bfloat16)) == pytest.approx(0.02, rel=1e-6)


@pytest.mark.parametrize(("implementation", "backend"), [(flashinfer_mla.fa2, "fa2"), (flashinfer_mla.fa3, "fa3")])
def test_either_backend_by_name(simulate: Simulate, implementation: Any, backend: str) -> None:
    simulated = simulate(SM90)
    assert_rounded(implementation, NAME, case(2))
    assert simulated.plans[0]["backend"] == backend
    assert implementation.__name__ == f"lab.kernels.peers.flashinfer_mla:{backend}"


def test_elsewhere_it_is_fa2(simulate: Simulate) -> None:
    simulated = simulate(SM80)
    assert_rounded(flashinfer_mla, NAME, case())
    assert simulated.plans[0]["backend"] == "fa2"


def test_a_plan_runs_again_over_new_queries(simulate: Simulate) -> None:
    simulated = simulate(SM90)
    arguments = case(2)
    run = flashinfer_mla.plan_trtllm_batch_decode_with_kv_cache_mla(**arguments)
    run()
    arguments["query"].mul_(-2.0)
    torch.testing.assert_close(
        run(), references.trtllm_batch_decode_with_kv_cache_mla(**arguments), rtol=2**-7, atol=2**-7
    )
    assert (len(simulated.plans), len(simulated.runs)) == (1, 2)


def test_the_workspace_keeps_its_zeros(simulate: Simulate) -> None:
    """A trtllm-gen or XQA call may have the same one."""
    simulate(SM90)
    workspace = torch.zeros(8 * MEBIBYTE + 8192, dtype=torch.uint8)
    flashinfer_mla.trtllm_batch_decode_with_kv_cache_mla(**case() | {"workspace_buffer": workspace})
    assert not workspace[: 8 * MEBIBYTE].any()


REFUSED: dict[str, tuple[Kernel, tuple[int, int] | None, Callable[[], Arguments], str]] = {
    "gen on SM90": (TRTLLM_GEN_MLA, SM90, case, "SM100 and SM103"),
    "gen of 80 heads": (TRTLLM_GEN_MLA, SM100, lambda: case(heads=80), "at most 64 query heads"),
    "gen of page 16": (TRTLLM_GEN_MLA, SM100, lambda: case(page_size=16), "page sizes 32 and 64"),
    "gen of rank 128": (TRTLLM_GEN_MLA, SM100, lambda: case(rank=128), "kv_lora_rank"),
    "gen of fp16": (TRTLLM_GEN_MLA, SM100, lambda: case(dtype=torch.float16), "bf16 or e4m3"),
    "gen into fp16": (TRTLLM_GEN_MLA, SM100, lambda: into(case(), torch.float16), "writes bfloat16"),
    "gen's LSE of ragged rows": (
        TRTLLM_GEN_MLA,
        SM100,
        lambda: ragged(return_lse=True, return_lse_base="base2"),
        "no LSE with cum_seq_lens_q",
    ),
    "XQA on SM90": (XQA_MLA, SM90, case, "SM120 and SM121"),
    "XQA of 16 heads": (XQA_MLA, SM120, lambda: case(heads=16), "128 query heads"),
    "XQA of 2 rows": (XQA_MLA, SM120, lambda: case(2, heads=128), "one query row"),
    "XQA of an odd table": (XQA_MLA, SM120, lambda: with_columns(case(heads=128), 3), "whole 128 tokens"),
    "XQA of sinks": (XQA_MLA, SM120, lambda: with_columns(case(heads=128, sinks=torch.ones(128)), 2), "sinks"),
    "XQA's LSE": (XQA_MLA, SM120, lambda: with_columns(case(heads=128, return_lse=True), 2), "LSE"),
    "XQA of tensor scales": (
        XQA_MLA,
        SM120,
        lambda: with_columns(case(heads=128, bmm1_scale=torch.tensor([0.1])), 2),
        "as numbers",
    ),
    "XQA of scale 0": (
        XQA_MLA,
        SM120,
        lambda: with_columns(case(heads=128, bmm2_scale=0.0), 2),
        "must not be 0",
    ),
    "XQA of gaps": (XQA_MLA, SM120, lambda: with_columns(with_gaps(case(heads=128)), 2), "contiguous"),
    "XQA of a misplaced cache": (
        XQA_MLA,
        SM120,
        lambda: with_columns(misplaced(case(heads=128)), 2),
        "K must begin at a multiple of them, not 2 bytes after one",
    ),
    "wrapper on a CPU": (FA2_MLA, None, case, "a CPU"),
    "FA3 on SM100": (FA3_MLA, SM100, case, "SM90"),
    "FA3 of rank 384": (FA3_MLA, SM90, lambda: case(rank=384), "128, 256 and 512"),
    "FA2 of rank 64": (FA2_MLA, SM90, lambda: case(rank=64), "whole 128"),
    "wrapper of sinks": (FA3_MLA, SM90, lambda: case(sinks=SINKS), "sinks"),
    "wrapper of fp16 into bf16": (FA3_MLA, SM90, lambda: case(dtype=torch.float16), "writes the query's dtype"),
    "wrapper of e4m3 on SM80": (FA2_MLA, SM80, lambda: case(kv_dtype=E4M3), "e4m3 cache on SM90"),
    "wrapper of e4m3 queries": (
        FA3_MLA,
        SM90,
        lambda: case(dtype=E4M3) | {"out": torch.empty(3, 1, 2, 512, dtype=E4M3)},
        "fp16 or bf16 queries",
    ),
    "wrapper of bmm2_scale": (FA3_MLA, SM90, lambda: case(bmm2_scale=0.5), "must be 1"),
    "wrapper of scale 0": (FA3_MLA, SM90, lambda: case(kv_dtype=E4M3, bmm2_scale=0.0), "positive"),
    "wrapper of a negative scale": (
        FA3_MLA,
        SM90,
        lambda: case(bmm1_scale=-0.1),
        "a positive bmm1_scale, not -0.1",
    ),
    "wrapper of tensor scales": (FA3_MLA, SM90, lambda: case(bmm1_scale=torch.tensor([0.1])), "as numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(name: str) -> None:
    kernel, capability, arguments, reason = REFUSED[name]
    assert reason in (why_not(kernel, capability, MLADecodeCall(**arguments()).problem()) or "taken")
