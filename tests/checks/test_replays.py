"""The check of replays: what it rewrites, that what grows is needed, and what it does with a kernel that takes less."""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from corpus.kernels import kernel
from corpus.matrix import RANGES
from lab import references
from lab.calls.problem import AttentionCall
from lab.checks import AttentionCase, RaggedCase, Ranges
from lab.checks.case_run import CaseRun
from lab.checks.parameters.models import Configuration
from lab.checks.parameters.paged_calls import Lens
from lab.checks.properties import k09_replay as replays
from lab.checks.properties.check import Level
from lab.checks.properties.k09_replay import CHECK, Replay, maker_of
from lab.checks.run.judging import run_case
from lab.checks.run.support_protocol import KernelError, Unsupported
from lab.checks.run.verdicts import Outcome
from lab.workloads.inputs.call import Form, in_forms
from lab.workloads.interfaces import Interface
from tests.checks.small import SMALL, decoding

CPU = torch.device("cpu")
MOST = {"rows": (5, 3, 2), "keys": (130, 70, 90)}
CASES: dict[str, Any] = {
    "decode": AttentionCase(AttentionCall.DECODE, (200, 70, 90), (2, 2, 2), num_kv_heads=1, seed=1),
    "sinks": AttentionCase(AttentionCall.DECODE, (200, 70, 90), (2, 2, 2), num_kv_heads=1, sinks=True, seed=1),
    "offsets": AttentionCase(AttentionCall.DECODE, MOST["keys"], MOST["rows"], num_kv_heads=1, offsets=True),
    "context": AttentionCase(AttentionCall.CONTEXT, MOST["keys"], MOST["rows"], num_kv_heads=1),
    "long": AttentionCase(AttentionCall.DECODE, (4100, 65), (1, 1), num_kv_heads=1, group=1),
    "mla": AttentionCase(
        AttentionCall.MLA_DECODE, (200, 70, 90), (2, 2, 2), num_kv_heads=1, head_dim=80, v_head_dim=64, seed=1
    ),
    "ragged": RaggedCase((100, 60, 3), (5, 3, 70), num_heads=1, seed=1),
    "two pools": Configuration(AttentionCall.DSV4_DECODE, {"q_len": 2, "head_dim": 64, "lengths": "equal"}, 1),
    "two pools, offsets": Configuration(
        AttentionCall.DSV4_DECODE, {"q_len": 3, "head_dim": 64, "offsets": "unequal"}, 2
    ),
}


def shrinking(run: CaseRun) -> list[str]:
    """Capture on the largest batch, and replay with others that are no larger: what is wrong of it."""
    case = run.case
    make = maker_of(run, case)
    room, none = Lens(case.kv_lens, case.q_lens), frozenset[Form]()
    replay = Replay(run, in_forms(make(room), none), in_forms(make(room), none))
    for number, lens in enumerate((room, replays.shrunk(room), replays.shrunk(replays.shrunk(room)), room)):
        replay.expect("a replay", in_forms(make(lens, seed=number, moved=bool(number % 2)), none))
    return run.wrongs


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("frozen_splits", "decode"),
        ("frozen_splits", "context"),
        ("frozen_large_grid", "long"),
        ("frozen_rows", "offsets"),
        ("frozen_rows", "context"),
        ("frozen_requests", "decode"),
        ("mla_frozen_splits", "mla"),
        ("mla_frozen_requests", "mla"),
        ("ragged_frozen_rows", "ragged"),
    ],
)
def test_what_is_frozen_at_a_short_capture_shows_where_requests_grow_alone(name: str, case: str) -> None:
    assert shrinking(CaseRun(kernel(name).implementation(), CASES[case], CPU, RANGES)) == []
    judged = run_case(kernel(name).implementation(), CHECK, CASES[case], CPU, RANGES)
    assert judged.outcome is Outcome.WRONG
    assert any("a replay with " in wrong for wrong in judged.wrongs)


@pytest.mark.parametrize(
    ("name", "case", "changed"),
    [
        ("bmm2_read_once", "decode", "bmm2_scale"),
        ("mla_bmm2_read_once", "mla", "bmm2_scale"),
        ("log2_scale_read_once", "offsets", "bmm1_scale"),
        ("mask_read_once", "decode", "the mask"),
        ("sinks_read_once", "sinks", "the sinks"),
        ("query_read_once", "decode", "the query"),
        ("table_kept_by_length", "context", "K, V and the page table"),
        ("ragged_scales_read_once", "ragged", "bmm1_scale"),
        ("ragged_keys_kept_by_length", "ragged", "K and V"),
    ],
)
def test_each_thing_on_the_device_is_written_by_itself(name: str, case: str, changed: str) -> None:
    judged = run_case(kernel(name).implementation(), CHECK, CASES[case], CPU, RANGES)
    # Not always the first: what goes by addresses may also meet those of tensors that are gone.
    assert any(wrong.startswith(f"a replay after {changed} changed") for wrong in judged.wrongs)


@pytest.mark.parametrize("case", [case for name, case in CASES.items() if name != "long"], ids=lambda case: "")
def test_the_tensors_of_all_replays_are_the_same(case: Any) -> None:
    """The references are right, and every call but the forms that are tried and the eager one has the first's tensors."""
    calls: list[tuple[int, ...]] = []
    interface = getattr(case, "interface", AttentionCall.RAGGED_CONTEXT)
    function = getattr(references, interface.value)

    def noting(**arguments: Any) -> Any:
        calls.append(tuple(value.data_ptr() for value in arguments.values() if isinstance(value, Tensor)))
        return function(**arguments)

    judged = run_case(SimpleNamespace(**{interface.value: noting}), CHECK, case, CPU, RANGES)
    assert judged.outcome is Outcome.RIGHT, judged.wrongs
    assert judged.declines == ()
    assert max(map(calls.count, calls)) >= 9


@pytest.mark.parametrize("interface", CHECK.interfaces)
def test_the_smoke_level_has_every_form_a_long_request_and_rows_that_wait(
    interface: Interface, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[frozenset[Form], Lens, bool]] = []

    def note(run: CaseRun, make: replays.Make, forms: frozenset[Form], room: Lens, waits: bool) -> None:
        told.append((forms, room, waits))

    monkeypatch.setattr(replays, "judge_replays", note)
    for case in CHECK.cases(interface, replace(Ranges(), longest=200), Level.SMOKE):
        run_case(references, CHECK, case, CPU, Ranges())
    wanted = set(Form) if interface is AttentionCall.DECODE else set(Form) - {Form.BMM1_LOG2, Form.MASK}
    wanted -= {Form.NO_BOUND if interface is not AttentionCall.MLA_DECODE else Form.TABLES}
    if interface in (AttentionCall.RAGGED_CONTEXT, AttentionCall.DSV4_DECODE):
        wanted -= {Form.LSE, Form.TABLES}  # the one always returns the LSE, and the other never; neither has tables
    assert {form for forms, _, _ in told for form in forms} == wanted
    assert max(max(room.kv_lens) for _, room, _ in told) > 4096
    assert any(waits for _, _, waits in told)


@pytest.mark.parametrize(
    ("argument", "after"),
    [
        ("query", "after the query changed"),
        ("sinks", "after the sinks changed"),
        ("swa_kv_cache", "after K, V and the selected entries changed"),
        ("compressed_kv_cache", "after K, V and the selected entries changed"),
        ("sparse_indices", "after K, V and the selected entries changed"),
        ("sparse_topk_lens", "with requests"),
        ("seq_lens", "with requests"),
        ("bmm1_scale", "after bmm1_scale changed"),
        ("bmm2_scale", "after bmm2_scale changed"),
    ],
)
def test_an_argument_of_two_pools_that_is_kept_by_address_is_found(argument: str, after: str) -> None:
    kept: dict[int, Tensor] = {}

    def keeping(**arguments: Any) -> Any:
        if isinstance(given := arguments.get(argument), Tensor):
            arguments[argument] = kept.setdefault(given.data_ptr(), given.clone())
        return references.trtllm_batch_decode_sparse_mla_dsv4(**arguments)

    kernel = SimpleNamespace(trtllm_batch_decode_sparse_mla_dsv4=keeping)
    judged = run_case(kernel, CHECK, CASES["two pools"], CPU, RANGES)
    assert judged.outcome is Outcome.WRONG
    assert any(wrong.startswith(f"a replay {after}") for wrong in judged.wrongs)


def plain(**arguments: Any) -> Iterator[str]:
    """Yield what a simple kernel does not take."""
    if any(isinstance(arguments[name], Tensor) for name in ("bmm1_scale", "bmm2_scale")):
        yield "a scale on the device"
    yield from (
        name for name in ("cum_seq_lens_q", "mask", "bmm1_scale_log2", "out") if arguments.get(name) is not None
    )


def test_a_kernel_that_takes_no_form_is_judged_without_and_the_report_names_them() -> None:
    def decode(**arguments: Any) -> Any:
        for why in plain(**arguments):
            raise NotImplementedError(why)
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    case = replace(CASES["decode"], offsets=True, seed=6)
    judged = run_case(decoding(decode), CHECK, case, CPU, SMALL)
    assert judged.outcome is Outcome.RIGHT
    assert judged.judged >= 8
    assert judged.declines == (
        "rows that wait for requests: cum_seq_lens_q",
        "bmm1_scale_log2: bmm1_scale_log2",
        "bmm1_scale as a tensor: a scale on the device",
        "bmm2_scale as a tensor: a scale on the device",
        "an output handed out: out",
    )


@pytest.mark.parametrize(("refused", "error"), [(0, Unsupported), (1, KernelError)])
def test_none_but_the_first_call_of_a_replay_may_be_refused(refused: int, error: type[Exception]) -> None:
    calls: list[Any] = []

    def decode(**arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) > refused:
            raise NotImplementedError("not today")
        return references.trtllm_batch_decode_with_kv_cache(**arguments)

    run = CaseRun(decoding(decode), CASES["decode"], CPU, RANGES)
    call = in_forms(run.build(), frozenset())
    replay = Replay(run, call, call)
    for _ in range(refused):
        replay.again()
    with pytest.raises(error, match="not today"):
        replay.again()


def test_a_planned_call_keeps_its_mask_and_a_prepared_one_does_not() -> None:
    """A kernel that reads the mask when the call is made ready."""

    def ready(**arguments: Any) -> Any:
        mask = {} if arguments.get("mask") is None else {"mask": arguments["mask"].clone()}
        return lambda: references.trtllm_batch_decode_with_kv_cache(**(arguments | mask))

    name = AttentionCall.DECODE.value
    for form, outcome in (("plan_", Outcome.RIGHT), ("prepare_", Outcome.WRONG)):
        kernel = SimpleNamespace(**{name: references.trtllm_batch_decode_with_kv_cache, form + name: ready})
        judged = run_case(kernel, CHECK, CASES["decode"], CPU, RANGES)
        assert judged.outcome is outcome, judged.wrongs
    assert any("after the mask changed" in wrong for wrong in judged.wrongs)


def test_a_prepared_call_without_a_bound_of_rows_gets_no_more_rows_later() -> None:
    """A kernel that reads the largest number of rows from the offsets when the call is made ready."""
    unbounded: list[bool] = []

    def ready(**arguments: Any) -> Any:
        offsets = arguments["cum_seq_lens_q"]
        given = arguments.get("max_q_len")
        most = int(offsets.diff().max()) if given is None else given
        unbounded.append(given is None)

        def run() -> Any:
            assert int(offsets.diff().max()) <= most
            return references.trtllm_batch_decode_with_kv_cache_mla(**arguments)

        return run

    name = AttentionCall.MLA_DECODE.value
    kernel = SimpleNamespace(**{name: references.trtllm_batch_decode_with_kv_cache_mla, f"prepare_{name}": ready})
    case = replace(CASES["mla"], offsets=True, q_lens=(5, 2, 2), seed=2)
    judged = run_case(kernel, CHECK, case, CPU, RANGES)
    assert judged.outcome is Outcome.RIGHT, judged.wrongs
    assert unbounded
    assert all(unbounded)
