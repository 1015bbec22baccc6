"""The study's works judged on a CPU, its arithmetic and tables on made-up rows, its command line; times on a GPU."""

from typing import Any

import pytest
import torch

from lab.kernels import portable
from lab.metadata import ForwardMode
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput
from studies import draft_extend_graph, variants
from studies.draft_extend_graph import (
    draw,
    free,
    measure_forms,
    measure_mode,
    new_model,
)
from studies.model_pass import ModelWorks, pass_bytes, pass_operations
from studies.stand_in_model import GRAPH_MODES, TINY_SIZES, StandInModel
from studies.variants import WARM, TimingPlan
from tests.devices import IN_INTERPRETER
from tests.studies.conftest import Command
from tests.studies.recorded import recorded
from tests.studies.simulated import CEILINGS, measured_interleaved, quick_host_time

ALL_ROWS, WITH_TOPK, SELECTED = DraftExtendOutput
V2 = ForwardMode.DRAFT_EXTEND_V2
WIDTH = 4
BACKEND = TRTLLMMHABackend(portable)
PLAN = TimingPlan(CEILINGS, WARM, 3)


def tiny(device: str = "cpu") -> StandInModel:
    return new_model(TINY_SIZES, 3, 80, torch.device(device))


def drawn_works(mode: ForwardMode) -> ModelWorks:
    """Of a pass of three requests."""
    model = tiny()
    return ModelWorks.of(model, BACKEND, draw(model, mode, 3, WIDTH, 70), WIDTH)


@IN_INTERPRETER
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=repr)
def test_what_is_timed_is_right_and_a_wrong_output_is_found(mode: ForwardMode) -> None:
    made = drawn_works(mode)
    replay, outputs = made.replay(ALL_ROWS)
    replay()
    made.hold(outputs, ALL_ROWS)
    works = {"eager": made.eager(ALL_ROWS), "graph": made.graph(ALL_ROWS)}
    for work in works.values():
        assert work.check is not None
        call = work.call()
        for _ in range(2):  # a check wipes what it has seen
            call()
            work.check(work.arguments)
        with pytest.raises(AssertionError, match="rows of hidden_states are wrong"):
            work.check(work.arguments)
    assert works["eager"].bytes_moved == works["graph"].bytes_moved


def test_the_copies_are_all_that_a_load_is() -> None:
    made = drawn_works(V2)
    work, drawn = made.load(), made.drawn
    work.call()()
    static, inputs = work.arguments["static"], work.arguments["inputs"]
    assert torch.equal(static.seq_lens, drawn.batch.seq_lens)
    assert torch.equal(static.out_cache_loc, drawn.batch.out_cache_loc)
    assert torch.equal(inputs.hidden_states, drawn.hidden_states)
    rows, requests = 12, 3
    assert work.bytes_moved == 2 * (2 * 8 * requests + 2 * 8 * rows + 2 * 48 * rows)


def test_requests_of_v1_accepted_different_numbers_and_all_are_given_back() -> None:
    model = tiny()
    for mode, q_lens in ((ForwardMode.DRAFT_EXTEND, (1, 2, 3)), (ForwardMode.DECODE, (1, 1, 1)), (V2, (4, 4, 4))):
        drawn = draw(model, mode, 3, WIDTH, 80)
        assert drawn.q_lens == q_lens
        assert [len(keys) + q_len for (keys, _), q_len in zip(drawn.histories, q_lens, strict=True)] == [80] * 3
        free(model, drawn)


def test_the_floor_in_numbers() -> None:
    model = tiny()
    drawn = draw(model, V2, 2, WIDTH, 70)
    hidden, vocab, kv = 48, 97, 2 * 64
    weights = 2 * (2 * hidden * (6 * 64 + 2 * kv) + 6 * 64 * hidden + hidden * vocab)
    cache = 2 * 2 * kv * (2 * 70 + 2 * 4)
    inputs = 8 * (8 + 2 * 2 * hidden)
    one_output = 4 * vocab + 2 * hidden
    shared = weights + cache + inputs
    assert pass_bytes(TINY_SIZES, drawn, SELECTED) == shared + 2 * one_output
    assert pass_bytes(TINY_SIZES, drawn, ALL_ROWS) == shared + 8 * one_output
    assert pass_bytes(TINY_SIZES, drawn, WITH_TOPK) == shared + 8 * (one_output + 12)
    pairs = 2 * (67 + 68 + 69 + 70)
    layer = 2 * 8 * (2 * hidden * (6 * 64 + 2 * kv) + 6 * 64 * hidden) + 4 * 64 * 6 * pairs
    assert pass_operations(TINY_SIZES, drawn, SELECTED) == layer + 2 * 2 * hidden * vocab
    assert pass_operations(TINY_SIZES, drawn, ALL_ROWS) == layer + 2 * 8 * hidden * vocab


def test_the_command_line_measures_all_points_and_writes_json(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = recorded("draft_extend_graph")

    def of(name: str, **point: Any) -> list[dict[str, Any]]:
        return [row for row in recording[name] if row | point == row]

    simulated: dict[str, Any] = {
        "new_model": lambda *arguments: None,
        "measure_mode": lambda model, backend, mode, size, *rest: of("modes", mode=mode.name.lower(), batch_size=size),
        "measure_forms": lambda model, backend, size, width, *rest: of(
            "forms", batch_size=size, num_draft_tokens=width
        ),
    }
    for name, function in simulated.items():
        monkeypatch.setattr(draft_extend_graph, name, function)
    done = command("draft-extend-graph --implementation lab.kernels.trtllm")
    assert (done.status, done.recorded["environment"]["gpu"]) == (0, "simulated")
    for name in ("implementation", "modes", "forms", "savings", "model", "host_method"):
        assert done.recorded[name] == recording[name], name
    figures = [f"{row['median_us']:,.1f} ({row['floor_us']:,.1f})" for row in recording["forms"]]
    figures += [f"{row['completion_us']:,.1f}" for row in recording["modes"] if row["arm"] != "load"]
    for words in ("target_verify", *figures, *(f"{row['saved_percent']:.1f}" for row in recording["savings"])):
        assert words in done.printed


@IN_INTERPRETER
def test_points_make_a_row_per_variant_and_per_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "measure_interleaved", measured_interleaved)
    monkeypatch.setattr(draft_extend_graph, "host_time", quick_host_time)
    waited: list[str] = []
    monkeypatch.setattr(draft_extend_graph, "drain", lambda: waited.append("until it is idle"))
    model = tiny()
    modes = measure_mode(model, BACKEND, ForwardMode.TARGET_VERIFY, 2, 70, PLAN)
    assert [(row["arm"], row["mode"], row["median_us"]) for row in modes] == [
        ("eager", "target_verify", 10.0),
        ("graph", "target_verify", 11.0),
        ("load", "target_verify", 12.0),
    ]
    assert [row.get("host_us") for row in modes] == [20.5, 30.5, None]
    assert [row.get("completion_us") for row in modes] == [20.5, 30.5, None]
    assert len(waited) == 2  # one for each call whose completion was timed
    draft_extend_graph.until_idle(lambda: waited.append("a call"))
    assert waited[2:] == ["a call", "until it is idle"]
    forms = measure_forms(model, BACKEND, 2, WIDTH, 70, PLAN)
    assert [row["form"] for row in forms] == [form.value for form in DraftExtendOutput]
    assert [row["logits_bytes"] for row in forms] == [8 * 97 * 4, 8 * 97 * 4, 2 * 97 * 4]
    assert {(row["batch_size"], row["num_draft_tokens"], row["kv_len"]) for row in modes + forms} == {(2, WIDTH, 70)}
    assert model.pool.add_request(1) is not None  # all requests were given back


@pytest.mark.gpu
@pytest.mark.parametrize("mode", GRAPH_MODES, ids=repr)
def test_a_mode_is_measured_eagerly_and_in_a_graph(mode: ForwardMode) -> None:
    rows = {row["arm"]: row for row in measure_mode(tiny("cuda"), BACKEND, mode, 3, 70, PLAN)}
    assert rows["graph"]["launches"] < rows["eager"]["launches"]
    assert rows["load"]["launches"] >= 5
    assert "host_us" not in rows["load"]
    # Which variant is faster is the study's to say: with other tests on the same GPU either may be.
    assert all(rows[variant][time] > 0 for variant in ("eager", "graph") for time in ("host_us", "completion_us"))
    assert all(row["median_us"] > 0 for row in rows.values())


@pytest.mark.gpu
def test_forms_are_measured_and_the_top_k_costs_launches() -> None:
    rows = {row["form"]: row for row in measure_forms(tiny("cuda"), BACKEND, 3, WIDTH, 70, PLAN)}
    assert rows[WITH_TOPK.value]["launches"] > rows[ALL_ROWS.value]["launches"]
    assert rows[SELECTED.value]["logits_bytes"] == 3 * 97 * 4
    assert rows[ALL_ROWS.value]["logits_bytes"] == 12 * 97 * 4
