"""A call on a GPU that is not there: FlashInfer's launcher selects its kernel, and is given the call's tensors."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lab.gpus
from lab.dry_run import GPUS, LaunchError, Machine, TensorMap, machine
from lab.kernels import trtllm
from tests.dry_run import calls

pytestmark = pytest.mark.usefixtures("_launcher")
# What the prototype of this package launched for the first of these calls, with the table of flashinfer-cubin 0.6.13.
DECODE = "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64MultiCtasKvCgaVarSeqQ8Kv128StaticSwapsAbForGen"


@pytest.fixture(params=["b200", "b300"])
def blackwell(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(request.param) as gpu:
        yield gpu


@pytest.fixture
def b200() -> Iterator[Machine]:
    with machine("b200") as gpu:
        yield gpu


def test_decode(blackwell: Machine) -> None:
    given = calls.decode(keys=8192)
    trtllm.trtllm_batch_decode_with_kv_cache(**given)
    (launch,) = blackwell.launches
    assert launch.name == DECODE
    assert (launch.grid, launch.block, launch.cluster, launch.pdl) == ((4, 4, 8), (512, 1, 1), 4, True)
    assert launch.shared_memory_bytes == 174_696
    maps = {each.member: each for each in launch.tma}
    assert list(maps) == ["tmaQ_", "tmaK_", "tmaV_", "tmaO_"]
    assert maps["tmaQ_"] == TensorMap(
        "tmaQ_", "bfloat16", given["query"].data_ptr(), (128, 8, 4, 8), (256, 2048, 8192), (64, 8, 1, 1), "128B"
    )
    assert maps["tmaK_"].box == (64, 64, 1, 1)


def test_a_window_and_an_lse(blackwell: Machine) -> None:
    _, lse = trtllm.trtllm_batch_decode_with_kv_cache(**calls.decode(window_left=100, lse="returned"))
    attention, lse_kernel = blackwell.launches
    assert "SlidingOrChunkedCausal" in attention.name
    assert attention.params is not None
    assert attention.params.attention_window_size == 101
    assert lse_kernel.lse is not None
    assert (lse_kernel.lse.md, lse_kernel.lse.lse) == (attention.params.ptr_softmax_stats, lse.data_ptr())
    assert (lse_kernel.lse.lse_scale, lse_kernel.lse.n) == (1.0, 8 * 32)


def test_verify_context_mla_and_ragged(blackwell: Machine) -> None:
    trtllm.trtllm_batch_decode_with_kv_cache(**calls.decode(q_len=4))
    trtllm.trtllm_batch_context_with_kv_cache(**calls.context())
    trtllm.trtllm_batch_decode_with_kv_cache_mla(**calls.mla())
    trtllm.trtllm_ragged_attention_deepseek(**calls.ragged())
    sm = {(10, 0): "Sm100f", (10, 3): "Sm103a"}[blackwell.gpu.capability]  # context kernels have a build for SM103
    assert [launch.name for launch in blackwell.launches[:4]] == [
        "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ8Kv128PersistentSwapsAbForGen",
        f"fmha{sm}Kernel_QkvBfloat16OBfloat16H128PagedKvCausalP64VarSeqQ128Kv128PersistentContext",
        "fmhaSm100fKernel_QkvBfloat16OBfloat16HQk576HV512HVPerCta256PagedKvDenseP64VarSeqQ16Kv128PersistentSwapsAbForGen",
        f"fmha{sm}Kernel_QkvBfloat16OBfloat16HQk192HV128SeparateQkvCausalVarSeqQ128Kv128PersistentContext",
    ]
    assert [launch.params.max_seq_len_q for launch in blackwell.launches[:4] if launch.params] == [4, 8, 1, 64]
    assert blackwell.launches[4].lse is not None
    assert len(blackwell.launches) == 5


def test_a_split_mla_call_launches_the_kernel_that_joins_its_parts(b200: Machine) -> None:
    trtllm.trtllm_batch_decode_with_kv_cache_mla(**calls.mla(max_kv_len=8192, batch_size=1, q_len=4))
    attention, joins = b200.launches
    assert "fmhaReductionKernel" in joins.name
    assert joins.params == attention.params


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"gap": "4 elements a token"}, "TMA descriptor: stride 0 of 264 bytes is no multiple of 16"),
        ({"head_dim": 96}, "Missing TRTLLM-GEN kernel (decode)"),
        ({"query": "8 bytes on"}, "0b1111"),
    ],
)
def test_the_launchers_refusal_is_an_exception(values: dict[str, Any], said: str, b200: Machine, capfd: Any) -> None:
    import flashinfer.decode

    with pytest.raises(LaunchError) as refused:
        calls.run_installed(flashinfer.decode.trtllm_batch_decode_with_kv_cache, calls.decode(**values))
    assert said in str(refused.value)
    assert b200.launches == ()
    assert "Error" not in capfd.readouterr().err


def test_a_counter_buffer_that_flashinfer_makes_is_a_fill(b200: Machine) -> None:
    import flashinfer.decode

    calls.run_installed(flashinfer.decode.trtllm_batch_decode_with_kv_cache, calls.decode())
    (fill,) = b200.fills
    params = b200.launches[0].params
    assert params is not None
    assert (fill.address, fill.value) == (params.ptr_multi_ctas_kv_counter, 0)
    assert fill.size_bytes == 4 * 8 * 32  # a counter for each request and head, at least one for each multiprocessor
    b200.clear()
    assert b200.events == ()


@pytest.mark.parametrize("name", ["rtx-pro-6000", "spark", "h200"])
def test_kernels_that_are_compiled_for_a_shape_are_noted_and_not_run(name: str) -> None:
    given = calls.decode(q_len=4)
    with machine(name) as gpu:
        trtllm.trtllm_batch_decode_with_kv_cache(**given)
        trtllm.trtllm_batch_context_with_kv_cache(
            **calls.context() | {"kv_cache": torch.zeros(40, 2, 4, 64, 128, dtype=torch.bfloat16)}
        )
        assert gpu.launches == ()
        decode, context = gpu.compiled_calls
    assert (decode.backend, context.backend) == ("xqa", "fmha_v2")
    assert dict(decode.compiled_for)["head_group_ratio"] == 8
    assert GPUS[name].multiprocessors in decode.arguments


def test_another_guess_of_the_clusters_that_fit_takes_another_kernel() -> None:
    with machine(dataclasses.replace(GPUS["b200"], gpcs=0)) as gpu:
        trtllm.trtllm_batch_decode_with_kv_cache(**calls.decode(keys=8192))
    assert gpu.launches[0].name == DECODE.replace("MultiCtasKvCga", "MultiCtasKv")
    assert gpu.launches[0].cluster == 1


def test_all_is_undone_on_exit() -> None:
    import flashinfer.decode
    import flashinfer.utils

    cpu = torch.device("cpu")

    def functions() -> tuple[object, ...]:
        module = flashinfer.decode
        return lab.gpus.capability_of, module.get_trtllm_gen_fmha_module, flashinfer.utils.get_compute_capability

    before = functions()
    with contextlib.suppress(KeyError), machine("b200"):
        assert lab.gpus.capability_of(cpu) == flashinfer.utils.get_compute_capability(cpu) == (10, 0)
        assert flashinfer.utils.is_sm100a_supported(cpu)
        raise KeyError
    assert functions() == before
    with machine("spark"):
        assert flashinfer.utils.is_sm12x_supported(cpu)
        assert not flashinfer.utils.is_sm100a_supported(cpu)
    with pytest.raises(NotImplementedError, match="CUDA GPU"):
        trtllm.trtllm_batch_decode_with_kv_cache(**calls.decode())


def test_an_unknown_gpu_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="no dry run of 'b100'; known are b200, b300"), machine("b100"):
        pass
