"""The stand-in model against its history-based truth in every mode that has a graph, and the truth against mistakes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lab.metadata import ForwardMode, build_mha_metadata
from lab.metadata.mha.backend import TRTLLMMHABackend
from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput, DraftOutputs
from studies.stand_in_model import (
    GRAPH_MODES,
    TINY_SIZES,
    StandInModel,
    StandInPass,
    StandInSizes,
    draw_pass,
    truth_of_pass,
)
from tests.metadata.draft_extend_cases import MAX_CONTEXT_LEN, PLACES, implementation, new_model

V2 = ForwardMode.DRAFT_EXTEND_V2
ALL_ROWS = DraftExtendOutput.ALL_ROWS
# The second crosses a page in its new tokens, and the tiny window of 24 lies before all three ends.
PREFIX_LENS = (5, 61, 40)


def draw(model: StandInModel, mode: ForwardMode = V2, **changes: Any) -> StandInPass:
    """Three requests, 4 rows each where the mode is uniform."""
    q_lens = {ForwardMode.DECODE: (1, 1, 1), ForwardMode.DRAFT_EXTEND: (4, 1, 3)}.get(mode, (4, 4, 4))
    return draw_pass(model, mode, **{"prefix_lens": PREFIX_LENS, "q_lens": q_lens} | changes)


def run(model: StandInModel, drawn: StandInPass, module: Any, form: DraftExtendOutput = ALL_ROWS) -> DraftOutputs:
    """The pass eagerly."""
    batch = drawn.batch
    inputs = model.new_inputs(batch.batch_size, batch.num_tokens)
    last_accepted = drawn.accept_lens + torch.arange(batch.batch_size, device=batch.seq_lens.device) * 4 - 1
    inputs.load(drawn.input_ids, drawn.hidden_states, last_accepted if form is DraftExtendOutput.SELECTED_ROW else None)
    outputs = model.new_outputs(form, batch.batch_size, batch.num_tokens)
    metadata = build_mha_metadata(batch, model.pool)
    model.prepare(TRTLLMMHABackend(module), batch, metadata, inputs, outputs, form)()
    return outputs


@pytest.mark.parametrize("mode", GRAPH_MODES, ids=repr)
@pytest.mark.parametrize(("device", "name"), PLACES)
def test_a_window_layer_gives_what_the_histories_give(device: str, name: str, mode: ForwardMode) -> None:
    """Layers without a window are judged as works of `studies.model_pass`, and forms of outputs as graphs of a draft extend."""
    model = new_model(device, sliding_window=True)
    drawn = draw(model, mode)
    truth_of_pass(model, drawn).hold(run(model, drawn, implementation(name)), ALL_ROWS)


def test_it_writes_k_and_v_of_the_new_tokens_alone() -> None:
    model = new_model("cpu")
    drawn = draw(model)
    before = model.cache.storage.clone()
    run(model, drawn, implementation("lab.references"))
    written = torch.zeros(before.shape[1:3], dtype=torch.bool).flatten()
    written[drawn.batch.out_cache_loc] = True
    changed = (model.cache.storage != before).any(dim=-1).any(dim=-1)
    assert changed.flatten(1).tolist() == [written.tolist()] * 2


def shift_history(drawn: StandInPass) -> None:
    keys, values = drawn.histories[1]
    drawn.histories[1] = keys.roll(1, dims=0), values


def exchange_k_and_v(drawn: StandInPass) -> None:
    drawn.histories[2] = drawn.histories[2][1], drawn.histories[2][0]


def other_token(drawn: StandInPass) -> None:
    drawn.input_ids[6] = (drawn.input_ids[6] + 1) % TINY_SIZES.vocab_size


def other_hidden_state(drawn: StandInPass) -> None:
    drawn.hidden_states[6] = -drawn.hidden_states[6]


@pytest.mark.parametrize("mistake", [shift_history, exchange_k_and_v, other_token, other_hidden_state])
def test_a_pass_over_something_else_is_wrong(mistake: Any) -> None:
    model = new_model("cpu")
    drawn = draw(model)
    outputs = run(model, drawn, implementation("lab.references"))
    truth_of_pass(model, drawn).hold(outputs, ALL_ROWS)
    mistake(drawn)
    with pytest.raises(AssertionError, match="rows of hidden_states are wrong"):
        truth_of_pass(model, drawn).hold(outputs, ALL_ROWS)


def test_logits_top_k_and_the_selected_row_are_judged_too() -> None:
    model = new_model("cpu")
    drawn = draw(model)
    truth, form = truth_of_pass(model, drawn), DraftExtendOutput.ALL_ROWS_WITH_TOPK
    outputs = run(model, drawn, implementation("lab.references"), form)
    truth.hold(outputs, form)
    assert outputs.topk_index is not None
    assert outputs.topk_p is not None
    outputs.topk_p[3] = 0.5
    with pytest.raises(AssertionError, match="topk_p must be 1"):
        truth.hold(outputs, form)
    outputs.topk_index[3] = outputs.logits[3].argmin()
    with pytest.raises(AssertionError, match="topk_index does not name the largest logit"):
        truth.hold(outputs, form)
    outputs.logits[3].zero_()
    with pytest.raises(AssertionError, match="1 of 12 rows of logits are wrong, the worst row 3"):
        truth.hold(outputs, ALL_ROWS)
    drawn.accept_lens.copy_(drawn.accept_lens % 4 + 1)
    chosen = run(model, drawn, implementation("lab.references"), DraftExtendOutput.SELECTED_ROW)
    with pytest.raises(AssertionError, match="3 of 3 rows of hidden_states are wrong"):
        truth.hold(chosen, DraftExtendOutput.SELECTED_ROW)


def test_a_pass_that_cannot_be_run_is_refused_before_anything_is_written() -> None:
    model = new_model("cpu")
    drawn = draw(model, ForwardMode.TARGET_VERIFY)
    batch, metadata = drawn.batch, build_mha_metadata(drawn.batch, model.pool)
    inputs, outputs = model.new_inputs(3, 12), model.new_outputs(ALL_ROWS, 3, 12)
    backend = TRTLLMMHABackend(implementation("lab.references"))
    with pytest.raises(ValueError, match="no row to select"):
        model.prepare(backend, batch, metadata, inputs, outputs, DraftExtendOutput.SELECTED_ROW)
    with pytest.raises(ValueError, match="input_ids has 11 rows, but this pass has 12"):
        model.prepare(backend, batch, metadata, inputs.first(3, 11), outputs, ALL_ROWS)
    with pytest.raises(ValueError, match="logits has 3 rows, but this pass has 12"):
        model.prepare(backend, batch, metadata, inputs, outputs.first(3), ALL_ROWS)
    with pytest.raises(ValueError, match="metadata has no swa_out_cache_loc"):
        new_model("cpu", sliding_window=True).prepare(backend, batch, metadata, inputs, outputs, ALL_ROWS)


def select_of_different_widths() -> None:
    model = new_model("cpu")
    drawn = draw(model, ForwardMode.DRAFT_EXTEND)
    truth_of_pass(model, drawn).hold(
        run(model, drawn, implementation("lab.references")), DraftExtendOutput.SELECTED_ROW
    )


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (lambda: StandInSizes(0, 8, "tiny"), "vocab_size=0"),
        (lambda: StandInSizes(8, 0, "tiny"), "hidden_size=0"),
        (lambda: StandInSizes(8, 8, "none"), "no geometry is called 'none'"),
        (lambda: draw(new_model("cpu"), ForwardMode.EXTEND), "is not drawn"),
        (
            lambda: draw(new_model("cpu"), prefix_lens=(5, 5, MAX_CONTEXT_LEN - 3)),
            f"more than max_context_len={MAX_CONTEXT_LEN}",
        ),
        (
            lambda: StandInModel(StandInSizes(8, 8, "llama-3.1-8b"), new_model("cpu").pool, sliding_window=True),
            "no sliding-window layers",
        ),
        (lambda: StandInModel(TINY_SIZES, new_model("cpu").pool, sliding_window=True), "no sliding-window pages"),
        (select_of_different_widths, "there is no row to select"),
    ],
)
def test_what_a_model_or_a_pool_has_not_is_refused(refused: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        refused()
