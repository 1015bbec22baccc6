"""The memory that trtllm-gen's kernels are given, read from their launches: scratch after the semaphores, kept counters."""

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lab import kernels
from lab.calls.workspace import SEMAPHORE_BYTES
from lab.dry_run import machine, why_not_built
from lab.dry_run.launches import KernelParams
from lab.dry_run.machine import Machine
from lab.kernels import trtllm
from tests.cases import CONTEXT, DECODE, MLA, RAGGED, Arguments
from tests.devices import Operations
from tests.kernels.test_adapter_memory import CALLS, COUNTING

pytestmark = [
    pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built())),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # FlashInfer's, of CUTLASS, at its import
]

SPLITTING = (DECODE, MLA)  # several CTAs may share a request's keys, and count
INSTALLED = {DECODE: "decode", CONTEXT: "prefill", MLA: "mla"}
# Two float32 of 256 rows for each of 2 requests and of the heads, and a guard of 1 MiB.
STATISTICS = {name: 2 * heads * 256 * 8 + 2**20 for name, heads in zip(CALLS, (4, 4, 128, 2), strict=True)}


@pytest.fixture(params=["b200", "b300"])
def gpu(request: pytest.FixtureRequest) -> Iterator[Machine]:
    with machine(request.param) as made:
        yield made


@pytest.fixture(scope="module")
def workspace() -> Tensor:
    return torch.zeros(SEMAPHORE_BYTES + 72 * 2**20, dtype=torch.uint8)


def attention(gpu: Machine) -> KernelParams:
    (params,) = (launch.params for launch in gpu.launches if launch.params is not None)
    return params


def with_out(name: str, arguments: Arguments) -> Arguments:
    """With the output and the LSE given, as an engine gives them: a call has nothing of its own to allocate."""
    query, last = arguments["query"], {MLA: 512, RAGGED: 128}.get(name, arguments["query"].shape[-1])
    out = torch.empty(*query.shape[:-1], last, dtype=torch.bfloat16)
    lse = torch.empty(query.shape[:-1]) if arguments["return_lse"] else None
    offsets = {"cum_seq_lens_kv": arguments["cum_seq_lens_q"]} if name == RAGGED else {}
    return arguments | offsets | {"out": out, "lse": lse}


@pytest.mark.parametrize("return_lse", [False, True], ids=["plain", "LSE"])
@pytest.mark.parametrize("name", CALLS)
def test_all_that_is_written_lies_after_the_semaphores(
    gpu: Machine, workspace: Tensor, name: str, return_lse: bool
) -> None:
    getattr(trtllm, name)(**with_out(name, CALLS[name](workspace_buffer=workspace, return_lse=return_lse)))
    params, scratch = attention(gpu), workspace.data_ptr() + SEMAPHORE_BYTES
    if return_lse:
        assert params.ptr_softmax_stats == scratch
        scratch += STATISTICS[name]
    assert params.ptr_partial_stats == (0 if name == CONTEXT else scratch)
    assert params.ptr_multi_ctas_kv_counter == (workspace.data_ptr() if name in SPLITTING else 0)


@pytest.mark.parametrize("name", SPLITTING)
def test_counters_that_are_given_are_counted_in(gpu: Machine, name: str) -> None:
    counters = torch.zeros(4096, dtype=torch.uint8)
    getattr(trtllm, name)(**with_out(name, CALLS[name](multi_ctas_kv_counter_buffer=counters)))
    assert attention(gpu).ptr_multi_ctas_kv_counter == counters.data_ptr()


@pytest.mark.parametrize("name", COUNTING)
def test_flashinfer_itself_writes_from_the_first_byte_and_fills_counters_in_each_call(
    gpu: Machine, workspace: Tensor, name: str
) -> None:
    """What the adapter is for: XQA's semaphores would lie there, and a fill in each time."""
    module = pytest.importorskip(f"flashinfer.{INSTALLED[name]}")
    arguments = with_out(name, CALLS[name](workspace_buffer=workspace, return_lse=True))
    assert "aten.zeros" in operations_of(functools.partial(getattr(module, name), **arguments, **named(name)))
    assert attention(gpu).ptr_softmax_stats == workspace.data_ptr()
    if name in SPLITTING:
        gpu.clear()
        getattr(module, name)(**arguments | {"return_lse": False, "lse": None}, **named(name))
        assert attention(gpu).ptr_partial_stats == workspace.data_ptr()


def named(name: str) -> Arguments:
    return {"backend": "trtllm-gen"} if name == MLA else {}


@pytest.mark.parametrize("return_lse", [False, True], ids=["plain", "LSE"])
@pytest.mark.parametrize("name", CALLS)
def test_a_prepared_call_allocates_and_fills_nothing(gpu: Machine, name: str, return_lse: bool) -> None:
    call = kernels.prepare(trtllm, name, **with_out(name, CALLS[name](return_lse=return_lse)))
    assert operations_of(call) == []
    assert gpu.launches
    assert not gpu.fills


VIEWS = ("view", "_unsafe_view", "slice", "select", "transpose", "unsqueeze", "squeeze", "detach", "as_strided")


def operations_of(call: Callable[[], object]) -> list[str]:
    """torch's operations of a call that are no view: what allocates, and what a GPU would run."""
    with Operations() as operations:
        call()
    names = [name.rpartition(".")[0] for name in operations.names]
    return [name for name in names if name.removeprefix("aten.") not in VIEWS]
