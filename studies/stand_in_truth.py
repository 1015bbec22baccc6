"""Compute the expected outputs of a stand-in model's pass only from each request's K and V, without pages, tables or graphs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.metadata.speculation.draft_extend_graph import DraftExtendOutput, DraftOutputs, selected_rows
from lab.references.errors import Comparison, Truth, compare
from lab.workloads.inputs.expected import made
from lab.workloads.inputs.forward_pass import mha_truth
from studies.stand_in_model import DTYPE, StandInModel, StandInPass

Project = Callable[[Tensor, Tensor], Tensor]  # rows and a weight to their product


@dataclass(frozen=True, eq=False)
class StandInTruth:
    """The expected output of every row of a pass, and the control output, which is computed in bf16 by plain torch.

    Attributes:
        hidden_states, logits: float64 [num_tokens, hidden_size] and [num_tokens, vocab_size].
        hidden_states_control, logits_control: the same, rounded to bf16 after every step.
        request_of_row: int64 [num_tokens].
        selected: int64 [batch_size], the row of each request's last accepted token; None for requests of different widths.
    """

    hidden_states: Tensor
    logits: Tensor
    hidden_states_control: Tensor
    logits_control: Tensor
    request_of_row: Tensor
    selected: Tensor | None

    def compare(self, outputs: DraftOutputs, form: DraftExtendOutput) -> dict[str, Comparison]:
        """Compare each row's hidden states and logits with the expected ones. `outputs` have no padding rows."""
        rows = torch.arange(self.logits.shape[0], device=self.logits.device)
        if form is DraftExtendOutput.SELECTED_ROW:
            if self.selected is None:
                raise ValueError("the requests have different numbers of rows: there is no row to select")
            rows = self.selected
        groups = self.request_of_row[rows]
        triples = {
            "hidden_states": (outputs.hidden_states, self.hidden_states, self.hidden_states_control),
            "logits": (outputs.logits, self.logits, self.logits_control),
        }
        return {
            name: compare(out.unsqueeze(1), expected[rows].unsqueeze(1), control[rows].unsqueeze(1), groups)
            for name, (out, expected, control) in triples.items()
        }

    def hold(self, outputs: DraftOutputs, form: DraftExtendOutput) -> None:
        """Raise AssertionError if rows are wrong. A top-k output must name the largest of the output's own logits."""
        for name, comparison in self.compare(outputs, form).items():
            if not comparison.passed:
                (worst,) = comparison.worst(1)
                raise AssertionError(
                    f"{int(comparison.wrong.sum())} of {comparison.wrong.numel()} rows of {name} are wrong, the worst row "
                    f"{worst[0]} with error {float(comparison.error[worst]):.3g}, {comparison.worst_ratio:.3g} times what is "
                    "allowed"
                )
        if form is DraftExtendOutput.ALL_ROWS_WITH_TOPK:
            assert outputs.topk_index is not None
            assert outputs.topk_p is not None
            best = outputs.logits.gather(1, outputs.topk_index)
            if not torch.equal(best, outputs.logits.amax(dim=1, keepdim=True)):
                raise AssertionError("topk_index does not name the largest logit of each row")
            if not bool((outputs.topk_p == 1).all()):
                raise AssertionError("topk_p must be 1: a chain takes its token for certain")


def truth_of_pass(model: StandInModel, drawn: StandInPass) -> StandInTruth:
    """Return the expected outputs of a pass. This makes float64 copies of the weights: 4 GB for an LM head of 128K tokens."""
    exact = _hidden_states(model, drawn, _exact, lambda truth: truth.expected)
    rounded = _hidden_states(model, drawn, _rounded, lambda truth: truth.control)
    device = exact.device
    requests = [request for request, q_len in enumerate(drawn.q_lens) for _ in range(q_len)]
    uniform = len(set(drawn.q_lens)) == 1
    return StandInTruth(
        hidden_states=exact,
        logits=_exact(exact, model.head_weight),
        hidden_states_control=rounded,
        logits_control=_rounded(rounded, model.head_weight),
        request_of_row=torch.tensor(requests, dtype=torch.int64, device=device),
        selected=selected_rows(drawn.accept_lens, drawn.q_lens[0]) if uniform else None,
    )


def _exact(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.to(torch.float64) @ weight.to(torch.float64)


def _rounded(rows: Tensor, weight: Tensor) -> Tensor:
    return (rows.to(torch.float32) @ weight.to(torch.float32)).to(DTYPE)


def _hidden_states(
    model: StandInModel, drawn: StandInPass, project: Project, attended: Callable[[Truth], Tensor]
) -> Tensor:
    sizes = model.sizes
    features = torch.cat((model.embedding[drawn.input_ids], drawn.hidden_states), dim=1)
    widths = (sizes.q_size, sizes.kv_size, sizes.kv_size)
    projected = project(features, model.qkv_weight).split(widths, dim=1)
    query, *new = (side.unflatten(1, (-1, sizes.attention.head_dim)) for side in projected)
    new_of_requests = zip(*(side.split(drawn.q_lens) for side in new), strict=True)
    histories = [
        tuple(torch.cat((old.to(added.dtype), added)) for old, added in zip(history, own, strict=True))
        for history, own in zip(drawn.histories, new_of_requests, strict=True)
    ]
    truth = mha_truth(query, histories, drawn.q_lens, model.layer, kv_dtype=DTYPE, out_dtype=DTYPE, arithmetic=DTYPE)
    return project(attended(made(truth)).flatten(1), model.out_weight)
