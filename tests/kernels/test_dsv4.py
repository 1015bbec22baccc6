"""DeepSeek-V4's call on FlashInfer: what its row refuses, and what the adapter passes."""

import math
from typing import Any

import pytest
import torch

from lab.calls import AttentionCall, DSV4DecodeCall
from lab.kernels import flashinfer_call, trtllm
from lab.kernels.flashinfer_call import SCRATCH_BYTES
from lab.kernels.support import why_not
from lab.kernels.support.portable import PORTABLE_DSV4
from lab.kernels.support.trtllm import kernel_for
from lab.kernels.support.trtllm_gen import TRTLLM_GEN_DSV4
from tests.calls.breaks import Breaks, tensor, value
from tests.cases import Arguments
from tests.kernels.adapter_calls import apart, shifted

B200, SPAN = (10, 0), 132
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
NAME = AttentionCall.DSV4_DECODE.value


def arguments_of(heads: int = 8, head_dim: int = 512, dtype: torch.dtype = BF16) -> Arguments:
    """Two requests of two rows over two pools of two pages."""
    pool = torch.zeros(2, 1, 64, head_dim).to(dtype)
    return {
        "query": torch.zeros(2, 2, heads, head_dim).to(dtype),
        "swa_kv_cache": pool,
        "workspace_buffer": None,
        "sparse_indices": torch.zeros(4, SPAN, dtype=torch.int32),
        "compressed_kv_cache": pool.clone(),
        "sparse_topk_lens": torch.full((4,), SPAN, dtype=torch.int32),
        "seq_lens": torch.tensor([5, 9], dtype=torch.int32),
    }


def refusal(*changes: Breaks, **made: Any) -> str | None:
    arguments = arguments_of(**made)
    for change in changes:
        arguments |= change(arguments)
    return why_not(TRTLLM_GEN_DSV4, B200, DSV4DecodeCall(**arguments).problem())


def ragged(good: Arguments) -> Arguments:
    offsets = torch.tensor([0, 1, 4], dtype=torch.int32)
    return {"query": good["query"].flatten(0, 1), "cum_seq_lens_q": offsets, "max_q_len": 3}


KERNELS = (TRTLLM_GEN_DSV4, PORTABLE_DSV4)  # whose rows are tested here
PLACES = value(sparse_indices_are_storage_offsets=False)
NOTHING = value(sparse_indices=torch.full((4, SPAN), -1, dtype=torch.int32))
ODD_PAGES = torch.zeros(2, 64 * 512 + 8, dtype=BF16)[:, : 64 * 512].view(2, 1, 64, 512)


@pytest.mark.parametrize("heads", [8, 16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, E4M3])
def test_what_flashinfer_documents_is_taken(heads: int, dtype: torch.dtype) -> None:
    sinks = value(sinks=torch.zeros(heads), bmm1_scale=torch.ones(1), bmm2_scale=0.5)
    assert refusal(sinks, tensor("sparse_indices", apart), heads=heads, dtype=dtype) is None
    assert refusal(ragged, heads=heads, dtype=dtype) is None
    assert refusal(PLACES, tensor("swa_kv_cache", lambda pool: apart(pool, 64, 2)), heads=heads) is None


@pytest.mark.parametrize(
    ("made", "changes", "words"),
    [
        ({"heads": 4}, (), "query heads 8, 16, 32, 64 and 128, not 4"),
        ({"head_dim": 256}, (), "for head_dim 512, not 256"),
        ({"dtype": torch.float16}, (), "takes bf16 or e4m3"),
        ({}, (value(out=torch.zeros(2, 2, 8, 512)),), "writes bfloat16, not torch.float32"),
        ({}, (tensor("swa_kv_cache", shifted),), "swa_kv_cache must begin at a multiple"),
        ({}, (tensor("sparse_indices", shifted),), "sparse_indices must begin at a multiple"),
        ({}, (tensor("query", shifted),), "query must begin at a multiple"),
        ({}, (value(out=shifted(torch.zeros(2, 2, 8, 512, dtype=BF16))),), "out must begin at a multiple"),
        ({}, (PLACES, tensor("compressed_kv_cache", lambda pool: apart(pool, 8, 3))), "at multiples of 512 elements"),
        ({}, (PLACES, tensor("swa_kv_cache", lambda _: ODD_PAGES)), "swa_kv_cache at multiples of 512"),
        ({}, (NOTHING, tensor("swa_kv_cache", lambda pool: pool[:0])), "at least one page of swa_kv_cache"),
    ],
)
def test_what_its_launcher_refuses_is_refused(made: Arguments, changes: tuple[Breaks, ...], words: str) -> None:
    assert words in str(refusal(*changes, **made))


def test_the_portable_kernel_refuses_other_dtypes() -> None:
    problem = DSV4DecodeCall(**arguments_of(dtype=torch.float32)).problem()
    assert "float32" in str(why_not(PORTABLE_DSV4, (9, 0), problem))


def test_other_gpus_have_no_kernel() -> None:
    problem = DSV4DecodeCall(**arguments_of()).problem()
    for capability in (None, (9, 0), (12, 0)):
        assert "needs a GPU of SM100 and SM103" in str(why_not(TRTLLM_GEN_DSV4, capability, problem))
    for capability in ((8, 0), (9, 0), (12, 0), B200):
        assert kernel_for(AttentionCall.DSV4_DECODE, capability) is TRTLLM_GEN_DSV4


def test_a_call_on_a_cpu_says_what_it_needs() -> None:
    with pytest.raises(NotImplementedError, match="CUDA GPU"):
        trtllm.trtllm_batch_decode_sparse_mla_dsv4(**arguments_of())


def test_a_call_without_rows_is_returned_without_flashinfer() -> None:
    none = {"query": torch.zeros(0, 2, 8, 512, dtype=BF16), "seq_lens": torch.zeros(0, dtype=torch.int32)}
    none |= {"sparse_indices": torch.zeros(0, SPAN, dtype=torch.int32), "sparse_topk_lens": none["seq_lens"]}
    assert trtllm.trtllm_batch_decode_sparse_mla_dsv4(**arguments_of() | none).shape == (0, 2, 8, 512)


def test_what_the_adapter_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters before the scratch of one workspace, trtllm-gen by name, and no argument that has its default."""
    pytest.importorskip("flashinfer.mla", reason="flashinfer is not installed")
    monkeypatch.setattr(flashinfer_call, "capability_of", lambda _: B200)
    monkeypatch.setattr("lab.kernels.support.capability_of", lambda _: B200)
    workspace = torch.zeros(2**23 + SCRATCH_BYTES // 4, dtype=torch.uint8)
    given = arguments_of() | {"workspace_buffer": workspace, "sinks": torch.zeros(8), "bmm1_scale": 0.25}
    prepared = trtllm.prepare_trtllm_batch_decode_sparse_mla_dsv4(**given)
    assert prepared.function.__name__ == NAME
    assert not prepared.refreshes
    passed = dict(prepared.arguments)
    counters, scratch = passed.pop("multi_ctas_kv_counter_buffer"), passed.pop("workspace_buffer")
    assert (counters.data_ptr(), counters.nbytes) == (workspace.data_ptr(), 2**23)
    assert (scratch.data_ptr(), scratch.nbytes) == (workspace.data_ptr() + 2**23, SCRATCH_BYTES // 4)
    assert passed.pop("backend") == "trtllm-gen"
    assert passed.keys() == given.keys() - {"workspace_buffer"}
    assert all(passed[name] is given[name] for name in passed)
    assert math.isclose(passed["bmm1_scale"], 0.25)
    own = torch.zeros(64, dtype=torch.uint8)
    again = trtllm.prepare_trtllm_batch_decode_sparse_mla_dsv4(**given, multi_ctas_kv_counter_buffer=own)
    assert again.arguments["multi_ctas_kv_counter_buffer"] is own
