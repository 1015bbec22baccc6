"""The facts of a loop's steps, read from profiles made by hand."""

from typing import Any

import pytest

from studies.step_profile import (
    IncompleteProfileError,
    StepFacts,
    is_waiting_call,
    read_profile,
    step_facts,
    summary,
    timeline,
)

HOST, OTHER_THREAD = (1, 1), (1, 2)
STREAM, COPY_STREAM = (0, 7), (0, 20)
LAUNCH, SYNC, COPY = "cudaLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync"


def entry(
    cat: str, name: str, start_us: float, duration_us: float, lane: tuple[int, int] = HOST, correlation: int = 0
) -> dict[str, Any]:
    args = {"correlation": correlation} if correlation else {}
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": lane[0],
        "tid": lane[1],
        "ts": start_us,
        "dur": duration_us,
        "args": args,
    }


def step(number: int, start_us: float, duration_us: float) -> dict[str, Any]:
    return entry("user_annotation", f"step {number}", start_us, duration_us)


def call(name: str, start_us: float, duration_us: float, correlation: int, lane: Any = HOST) -> dict[str, Any]:
    return entry("cuda_runtime", name, start_us, duration_us, lane, correlation)


def kernel(start_us: float, duration_us: float, correlation: int, lane: Any = STREAM) -> dict[str, Any]:
    return entry("kernel", "gemm", start_us, duration_us, lane, correlation)


def with_copy() -> list[dict[str, Any]]:
    """Two steps: the host launches two kernels that overlap and a copy, and waits for them. Times in µs.

    GPU of step 0: 20..50. Of step 1: kernels 130..170 on two streams, nothing, then the copy 175..180.
    """
    return [
        step(0, 0, 60),
        call(LAUNCH, 5, 5, 1),
        kernel(20, 30, 1),
        call(SYNC, 15, 37, 2),
        step(1, 100, 95),
        call(LAUNCH, 105, 5, 11),
        call(LAUNCH, 110, 4, 12),
        call(COPY, 115, 3, 13),
        call(SYNC, 120, 62, 14),
        kernel(130, 30, 11),
        kernel(150, 20, 12, COPY_STREAM),
        entry("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 175, 5, COPY_STREAM, 13),
    ]


def running_ahead(steps: int = 5) -> list[dict[str, Any]]:
    """A host that takes 10 µs a step and never waits, a GPU that takes 50: step n runs from 20 + 50 n, without a gap."""
    entries = []
    for number in range(steps):
        entries += [
            step(number, 10 * number, 9),
            call("cudaGraphLaunch", 10 * number + 2, 3, 100 + number),
            kernel(20 + 50 * number, 30, 100 + number),
            kernel(50 + 50 * number, 20, 100 + number),
        ]
    return entries


def trace(*entries: dict[str, Any]) -> dict[str, Any]:
    return {"schemaVersion": 1, "traceEvents": [{"ph": "M", "name": "process_name", "pid": 1}, *entries]}


def facts_of(entries: list[dict[str, Any]], first: int = 1) -> list[StepFacts]:
    return step_facts(read_profile(trace(*entries)), first)


def test_a_step_by_hand() -> None:
    """From 50, where step 0 ended, to 180: 40 busy µs of kernels, whose overlap counts once, and 5 of the copy."""
    expected = [
        StepFacts(
            step=1,
            synchronisations=1,
            blocked_us=62,
            other_calls_us=5 + 4 + 3,
            gap_us=80,
            idle_us=130 - 45,
            step_us=130,
            gpu_activities=3,
        )
    ]
    assert facts_of(with_copy()) == facts_of(with_copy()[::-1]) == expected
    outside = [
        call("cudaDeviceSynchronize", 60, 30, 90),  # between the steps
        call("cudaDeviceSynchronize", 400, 30, 90),  # after the last
        call(SYNC, 120, 30, 90, OTHER_THREAD),  # during a step, by somebody else
        entry("cuda_sync", "Stream Sync", 120, 30, STREAM, 90),  # the GPU's side of a wait is no work
        entry("gpu_user_annotation", "step 1", 130, 50, STREAM),
        entry("cpu_op", "aten::item", 120, 30),
    ]
    assert facts_of([*with_copy(), *outside]) == expected


def test_gpu_work_belongs_to_the_step_that_launched_it_whenever_it_runs() -> None:
    """Step 1 of the GPU runs while the host is in steps 7 to 11, or done."""
    loop = read_profile(trace(*running_ahead(12)))
    for each in loop.steps:
        assert [(event.start_ns, event.end_ns) for event in each.gpu] == [
            (1000 * (20 + 50 * each.number), 1000 * (50 + 50 * each.number)),
            (1000 * (50 + 50 * each.number), 1000 * (70 + 50 * each.number)),
        ]
    for facts in step_facts(loop, 1):
        assert (facts.gap_us, facts.idle_us, facts.step_us, facts.gpu_activities) == (0, 0, 50, 2)
        assert (facts.synchronisations, facts.blocked_us, facts.other_calls_us) == (0, 0, 3)


def test_work_that_no_step_launched_keeps_the_gpu_busy_and_is_in_no_step() -> None:
    (alone,) = facts_of(with_copy())
    (beside,) = facts_of([*with_copy(), kernel(60, 10, 99)])
    assert beside.idle_us == alone.idle_us - 10
    assert (beside.gap_us, beside.gpu_activities) == (alone.gap_us, alone.gpu_activities)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        # Step 1 begins before step 0 has ended: there is no gap.
        (
            [
                *(step(0, 0, 9), call(LAUNCH, 1, 1, 1), kernel(20, 50, 1)),
                *(step(1, 10, 9), call(LAUNCH, 11, 1, 2), kernel(60, 30, 2, COPY_STREAM)),
            ],
            (0, 0, 20),
        ),
        # A step ends with the last of its work to end, not to start: 20..70 beside 30..40, then 80..90 around 82..83.
        (
            [
                *(step(0, 0, 9), call(LAUNCH, 1, 1, 1), call(COPY, 3, 1, 2)),
                *(kernel(20, 50, 1), entry("gpu_memcpy", "Memcpy DtoD", 30, 10, COPY_STREAM, 2)),
                *(step(1, 10, 9), call(LAUNCH, 11, 1, 3), call(COPY, 13, 1, 4)),
                *(kernel(80, 10, 3), entry("gpu_memcpy", "Memcpy DtoD", 82, 1, COPY_STREAM, 4)),
            ],
            (10, 10, 20),
        ),
    ],
)
def test_a_step_lasts_from_the_last_end_to_the_last_end(entries: list[Any], expected: tuple[int, ...]) -> None:
    (facts,) = facts_of(entries)
    assert (facts.gap_us, facts.idle_us, facts.step_us) == expected


def test_which_calls_wait() -> None:
    waiting = ["cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cuStreamSynchronize_ptsz"]
    waiting += ["cudaMemcpy", "cuMemcpyDtoH_v2"]
    # The stream waits for an event, and the host does not.
    others = ["cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaEventRecord", "cudaEventQuery", "cudaLaunchKernel"]
    assert [name for name in (*waiting, *others) if is_waiting_call(name)] == waiting


@pytest.mark.parametrize(
    ("copy", "synchronisations"),
    [
        ("Memcpy DtoH (Device -> Pageable)", 2),
        ("Memcpy DtoH (Device -> Pinned)", 1),
        ("Memcpy HtoD (Pageable -> Device)", 1),
    ],
)
def test_a_copy_to_pageable_memory_waits_though_its_call_is_asynchronous(copy: str, synchronisations: int) -> None:
    entries = [each | {"name": copy} if each["cat"] == "gpu_memcpy" else each for each in with_copy()]
    (facts,) = facts_of(entries)
    assert facts.synchronisations == synchronisations
    assert facts.blocked_us == 62 + 3 * (synchronisations - 1)
    assert facts.blocked_us + facts.other_calls_us == 62 + 5 + 4 + 3


def without(entries: list[dict[str, Any]], cat: str) -> list[dict[str, Any]]:
    return [each for each in entries if each["cat"] != cat]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "no GPU activity"),
        (without(running_ahead(), "kernel"), "no GPU activity"),
        (without(running_ahead(), "user_annotation"), 'no range called "step N"'),
        (without(running_ahead(), "cuda_runtime"), "step 0 launched nothing"),
        ([*running_ahead(3), step(3, 30, 9)], "step 3 launched nothing"),
        ([each for each in running_ahead() if each["name"] != "step 2"], r"steps \[0, 1, 3, 4\]"),
        ([*running_ahead(2), *running_ahead(1)], r"steps \[0, 0, 1\]"),
    ],
)
def test_a_profile_that_lacks_something_is_refused(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(IncompleteProfileError, match=message):
        read_profile(trace(*entries))


def test_a_lost_kernel_is_noticed_unless_it_is_a_warm_up_steps() -> None:
    entries = running_ahead(5)
    lost = [each for each in entries if each["cat"] != "kernel" or each["ts"] != 50 + 50 * 1]
    with pytest.raises(IncompleteProfileError, match=r"have \[1, 2\] GPU activities"):
        facts_of(lost, 1)
    assert [each.step for each in facts_of(lost, 2)] == [2, 3, 4]
    for first in (0, 5, -1):
        with pytest.raises(IncompleteProfileError, match=f"no facts from step {first} on"):
            facts_of(entries, first)


def test_a_summary_has_medians_and_the_idle_share_of_all_time() -> None:
    base = {"other_calls_us": 1, "gpu_activities": 3}
    rows = [
        StepFacts(step=1, synchronisations=1, blocked_us=10, gap_us=2, idle_us=50, step_us=100, **base),
        StepFacts(step=2, synchronisations=1, blocked_us=20, gap_us=4, idle_us=0, step_us=100, **base),
        StepFacts(step=3, synchronisations=2, blocked_us=90, gap_us=3, idle_us=10, step_us=400, **base),
    ]
    assert summary(rows) == {
        "synchronisations": 1,
        "blocked_us": 20,
        "other_calls_us": 1,
        "gap_us": 3,
        "idle_us": 10,
        "step_us": 100,
        "gpu_activities": 3,
        "idle_percent": 10,
    }


def test_a_timeline_has_what_belongs_to_its_steps() -> None:
    entries = [*running_ahead(5), entry("user_annotation", "schedule", 11, 2), entry("user_annotation", "late", 41, 2)]
    drawn = timeline(read_profile(trace(*entries)), 1)
    assert [row for row in drawn if row[0] == "host"] == [
        ("host", "step 1", 0, 9),
        ("host", "schedule", 1, 2),
        ("host", "step 2", 10, 9),
        ("host", "step 3", 20, 9),
    ]
    assert [row[2:] for row in drawn if row[0] == "CUDA calls"] == [(2, 3), (12, 3), (22, 3)]
    assert [row[2:] for row in drawn if row[0] == "GPU stream 7"] == [
        (60, 30),
        (90, 20),
        (110, 30),
        (140, 20),
        (160, 30),
        (190, 20),
    ]
