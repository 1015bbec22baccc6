"""K6 by the kernel family that runs: what XQA must leave zero, what trtllm-gen may write, and what facts call scratch."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.models.split_kv import SplitKV
from lab import references
from lab.calls import workspace
from lab.calls.problem import AttentionCall
from lab.calls.workspace import SEMAPHORE_BYTES, counts_in_workspace, semaphores_and_scratch
from lab.checks import judge_case
from lab.checks.run.verdicts import Outcome
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import PAGED_CALLS, Interface

CPU = torch.device("cpu")
CASES = {
    AttentionCall.DECODE: AttentionCase(
        AttentionCall.DECODE, (20, 3, 33), (2, 2, 2), num_kv_heads=1, group=2, head_dim=64
    ),
    AttentionCall.CONTEXT: AttentionCase(AttentionCall.CONTEXT, (20, 9), (3, 9), num_kv_heads=1, group=2, head_dim=64),
    AttentionCall.MLA_DECODE: AttentionCase(
        AttentionCall.MLA_DECODE, (20, 3), (1, 1), num_kv_heads=1, group=4, head_dim=80, v_head_dim=64
    ),
}
GPUS = {"SM90": (9, 0), "SM100": (10, 0), "SM103": (10, 3), "SM120": (12, 0)}
WITH_TRTLLM_GEN = ("SM100", "SM103")
SCRATCH_USED = 4096

Writes = Callable[[Tensor, Tensor | None], None]


def stand_in(writes: Writes, takes_counters: bool = True) -> SimpleNamespace:
    """The references, which write a call's workspace (as bytes) and counters before they compute."""

    def made(name: str) -> Callable[..., Any]:
        def call(*, workspace_buffer: Tensor, **arguments: Any) -> Any:
            counters = arguments.get("multi_ctas_kv_counter_buffer")
            if counters is not None and not takes_counters:
                raise TypeError("call() got an unexpected keyword argument 'multi_ctas_kv_counter_buffer'")
            writes(workspace_buffer.view(torch.uint8), counters)
            return getattr(references, name)(workspace_buffer=None, **arguments)

        return call

    return SimpleNamespace(**{each.value: made(each.value) for each in PAGED_CALLS})


def from_the_first_byte(workspace_buffer: Tensor, counters: Tensor | None) -> None:
    """As trtllm-gen: statistics and partial results; its counters, counted in and left zero."""
    workspace_buffer[:SCRATCH_USED] = 0xA5
    if counters is not None:
        assert not counters.any()
        counters[:64] += 1
        counters[:64] = 0


def counters_left(workspace_buffer: Tensor, counters: Tensor | None) -> None:
    from_the_first_byte(workspace_buffer, counters)
    if counters is not None:
        counters[40] = 1


def after_the_semaphores(workspace_buffer: Tensor, counters: Tensor | None) -> None:
    semaphores, scratch = semaphores_and_scratch(workspace_buffer)
    assert not semaphores.any()
    scratch[:SCRATCH_USED] = 0xA5


def a_semaphore_left(workspace_buffer: Tensor, counters: Tensor | None) -> None:
    """Leave a counter, which a later call finds as it was: what counts is no scratch, and nothing else is written there."""
    semaphores, _ = semaphores_and_scratch(workspace_buffer)
    assert int(semaphores.max()) <= 1
    workspace_buffer[1000] = 1


@pytest.fixture
def wrongs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, ...]]:
    """What K6 finds wrong of an implementation on a GPU."""

    def find(implementation: Any, gpu: str, interface: Interface = AttentionCall.DECODE) -> tuple[str, ...]:
        monkeypatch.setattr(workspace, "capability_of", lambda device: GPUS[gpu])
        judged = judge_case(implementation, "K6", CASES[interface], CPU).judged
        assert judged.outcome is (Outcome.WRONG if judged.wrongs else Outcome.RIGHT)
        return judged.wrongs

    return find


@pytest.mark.parametrize("interface", CASES, ids=lambda interface: interface.name.lower())
@pytest.mark.parametrize("takes_counters", [True, False])
@pytest.mark.parametrize("gpu", WITH_TRTLLM_GEN)
def test_trtllm_gen_may_write_from_the_first_byte(
    wrongs: Callable[..., Any], gpu: str, takes_counters: bool, interface: Interface
) -> None:
    assert not wrongs(stand_in(from_the_first_byte, takes_counters), gpu, interface)


@pytest.mark.parametrize("gpu", ["SM90", "SM120"])
def test_where_xqa_runs_the_first_bytes_must_stay_zero(wrongs: Callable[..., Any], gpu: str) -> None:
    (first, other) = wrongs(stand_in(from_the_first_byte), gpu)
    assert first == f"a call left {SCRATCH_USED} of the workspace's first {SEMAPHORE_BYTES} bytes non-zero"
    assert other.startswith("a call of another shape left")


@pytest.mark.parametrize("gpu", ["SM90", "SM120"])
def test_a_semaphore_left_at_one_is_wrong_where_xqa_runs(wrongs: Callable[..., Any], gpu: str) -> None:
    found = wrongs(stand_in(a_semaphore_left), gpu)
    assert f"left 1 of the workspace's first {SEMAPHORE_BYTES} bytes" in found[0]
    assert not any("refused a call" in wrong for wrong in found)
    assert not wrongs(stand_in(after_the_semaphores), gpu)


def test_a_write_to_the_workspace_of_earlier_calls_is_wrong(wrongs: Callable[..., Any]) -> None:
    kept: list[Tensor] = []

    def into_the_first(workspace_buffer: Tensor, counters: Tensor | None) -> None:
        kept.append(workspace_buffer)
        kept[0][SEMAPHORE_BYTES + 5] = 1

    assert wrongs(stand_in(into_the_first), "SM90") == (
        "a call with another workspace wrote 1 bytes of an earlier call's",
    )


@pytest.mark.parametrize("interface", CASES, ids=lambda interface: interface.name.lower())
def test_counters_that_trtllm_gen_leaves_are_wrong(wrongs: Callable[..., Any], interface: Interface) -> None:
    found = wrongs(stand_in(counters_left), "SM100", interface)
    assert found[0].startswith("a call left 1 of multi_ctas_kv_counter_buffer's first")


def test_what_the_first_bytes_hold_must_not_reach_a_result_of_trtllm_gen(wrongs: Callable[..., Any]) -> None:
    def decode(*, workspace_buffer: Tensor, **arguments: Any) -> Any:
        held = float(workspace_buffer[64])
        workspace_buffer[:64] = 0xA5
        return references.trtllm_batch_decode_with_kv_cache(workspace_buffer=None, **arguments) + held

    found = wrongs(SimpleNamespace(trtllm_batch_decode_with_kv_cache=decode), "SM100")
    assert [each.partition(":")[0] for each in found] == ["scratch that holds NaN", "scratch that holds large values"]


@pytest.mark.parametrize("gpu", GPUS)
def test_a_kernel_that_counts_in_the_first_bytes_and_leaves_them_zero_is_right_anywhere(
    wrongs: Callable[..., Any], gpu: str
) -> None:
    assert not wrongs(SplitKV(), gpu)


def test_the_backend_that_a_call_names_says_where_its_kernel_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [counts_in_workspace(backend, CPU) for backend in ("auto", "xqa", "trtllm-gen")] == [True, True, False]
    for gpu, capability in GPUS.items():
        monkeypatch.setattr(workspace, "capability_of", lambda device, capability=capability: capability)
        found = [counts_in_workspace(backend, CPU) for backend in ("auto", "xqa", "trtllm-gen")]
        assert found == [gpu not in WITH_TRTLLM_GEN, True, False]
