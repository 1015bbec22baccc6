"""A request whose output depends on the others: strides of the batch, exchanged lengths, rows or tables.

With equal lengths and one table per test an exchanged request is often right by luck. Here each request is computed
alone, in another order, and twice in a batch, and another request's data is changed, which may change no bit of it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lab.checks.attention_inputs import AttentionInputs
from lab.checks.check import Check, Level, counted, first_line, same
from lab.checks.space import Space
from lab.checks.trial import Trial, truth_of_call
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[AttentionCase]:
    yield from space.covering(interface, counted(level, 4, 24), seed=9)


def _judge(trial: Trial) -> None:
    inputs = trial.build()
    together = trial.call(inputs)
    trial.hold("together", together, truth_of_call(inputs))
    count = len(trial.case.kv_lens)
    for request in range(count):
        _hold_part(trial, f"request {request} alone", inputs, [request])
    _hold_part(trial, "in reversed order", inputs, list(reversed(range(count))))
    _hold_part(trial, "with each request twice", inputs, [*range(count), *range(count)])
    _others_keep_their_bits(trial, inputs)


def _hold_part(trial: Trial, what: str, inputs: AttentionInputs, requests: Sequence[int]) -> None:
    part = select(inputs, requests)
    trial.hold(what, trial.attempt(what, part), truth_of_call(part))


def _others_keep_their_bits(trial: Trial, inputs: AttentionInputs) -> None:
    rows = trial.case.q_lens[0]
    query = inputs.query.clone()
    query[:rows] *= -2.0
    before, after = trial.call(inputs), trial.attempt("another query", replace(inputs, query=query))
    if after is not None:
        others = after._replace(out=after.out[rows:])
        trial.same_bits(
            "the other requests, when the first's query changed", others, before._replace(out=before.out[rows:])
        )


def select(inputs: AttentionInputs, requests: Sequence[int]) -> AttentionInputs:
    """The same call over some requests, in that order, over the same pages."""
    case = inputs.case
    starts = [sum(case.q_lens[:request]) for request in range(len(case.q_lens))]
    rows = [torch.arange(starts[request], starts[request] + case.q_lens[request]) for request in requests]
    index = torch.tensor(list(requests), device=inputs.query.device)
    return replace(
        inputs,
        case=replace(
            case,
            kv_lens=tuple(case.kv_lens[request] for request in requests),
            q_lens=tuple(case.q_lens[request] for request in requests),
        ),
        query=inputs.query[torch.cat(rows).to(inputs.query.device)],
        histories=tuple(inputs.histories[request] for request in requests),
        block_tables=inputs.block_tables[index],
        seq_lens=inputs.seq_lens[index],
    )


CHECK = Check("K7", "batch", first_line(__doc__), _cases, _judge, adapt=same)
