"""State frozen in the first call: lengths, tables or pointers that a replayed CUDA graph would not see change.

No attention test of FlashInfer replays a graph with other lengths. Here one set of tensors is kept and its contents change:
a long batch, a short one, the long one again, with an eager call of another shape in between. On a GPU the call is
captured and replayed; elsewhere it is made again with the same tensors.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lab.checks.attention_inputs import AttentionInputs, running_sum
from lab.checks.check import Check, Level, counted, first_line
from lab.checks.space import Space
from lab.checks.trial import Result, Trial, truth_of_call
from lab.metadata.engine.capture import capturing
from lab.workloads.attention_case import AttentionCase
from lab.workloads.interfaces import Interface


def _cases(interface: Interface, space: Space, level: Level) -> Iterator[AttentionCase]:
    for case in space.covering(interface, counted(level, 4, 24), seed=11):
        yield _roomy(case)


def _roomy(case: AttentionCase) -> AttentionCase:
    """Every request has room for any other's rows."""
    return replace(case, kv_lens=tuple(max(kv_len, *case.q_lens) for kv_len in case.kv_lens))


def _judge(trial: Trial) -> None:
    static, long, short = trial.build(), trial.build(), trial.build(_shorter(trial.case))
    arguments = _arguments(trial, static)
    if trial.device.type == "cuda":
        replay = _captured(trial, static.case.interface, arguments)
        first = replay()
    else:
        replay = partial(trial.run_again, trial.case.interface, arguments)
        first = trial.run(trial.case.interface, arguments)
    first = first._replace(out=first.out.clone())
    trial.hold("the first replay", first, truth_of_call(long))
    _load(static, short, arguments)
    trial.hold("a replay with shorter requests", replay(), truth_of_call(short))
    _replay_of_another_scale(trial, replay, short, arguments)
    between = trial.build(_another_batch(trial.case))
    trial.hold("an eager call between replays", trial.attempt("an eager call", between), truth_of_call(between))
    trial.hold("a replay after an eager call", replay(), truth_of_call(short))
    _load(static, long, arguments)
    trial.same_bits("the first batch again", replay(), first)


def _arguments(trial: Trial, inputs: AttentionInputs) -> dict[str, Any]:
    """The call's, with the scale of Q·K^T on the device where the implementation takes it there."""
    scale = torch.tensor([inputs.bmm1_scale], dtype=torch.float32, device=trial.device)
    arguments = inputs.arguments()
    taken = trial.attempt("bmm1_scale as a tensor", inputs, bmm1_scale=scale)
    return arguments if taken is None else arguments | {"bmm1_scale": scale}


def _replay_of_another_scale(
    trial: Trial, replay: Callable[[], Result], inputs: AttentionInputs, arguments: dict[str, Any]
) -> None:
    scale = arguments["bmm1_scale"]
    if isinstance(scale, torch.Tensor):
        scale.mul_(0.75)
        truth = truth_of_call(inputs, bmm1_scale=0.75 * inputs.bmm1_scale)
        trial.hold("a replay with another scale on the device", replay(), truth)
        scale.fill_(inputs.bmm1_scale)


def _captured(trial: Trial, interface: Interface, arguments: dict[str, Any]) -> Callable[[], Result]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what is made once, is made before the capture, on its stream
        trial.run(interface, arguments)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, stream=stream):
            result = trial.run(interface, arguments)
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> Result:
        graph.replay()
        torch.cuda.synchronize()
        return result

    return replay


def _shorter(case: AttentionCase) -> AttentionCase:
    """Other contents, rows shared out in another order, and no request longer than before."""
    q_lens = tuple(reversed(case.q_lens))
    shortest = [max(q_len, kv_len // 2) for kv_len, q_len in zip(case.kv_lens, q_lens, strict=True)]
    storage = replace(case.storage, page_seed=case.storage.page_seed + 1)
    return replace(case, kv_lens=tuple(shortest), q_lens=q_lens, seed=case.seed + 1, storage=storage)


def _another_batch(case: AttentionCase) -> AttentionCase:
    kv_lens = (*case.kv_lens, *(kv_len + 2 * case.page_size for kv_len in case.kv_lens))
    return replace(case, kv_lens=kv_lens, q_lens=(*case.q_lens, *case.q_lens), seed=case.seed + 2)


def _load(static: AttentionInputs, inputs: AttentionInputs, arguments: dict[str, Any]) -> None:
    """Copy a batch's contents into the tensors that the call was made with."""
    static.query.copy_(inputs.query)
    for kept, new in ((static.k_pages, inputs.k_pages), (static.v_pages, inputs.v_pages)):
        as_bytes = kept.dtype == torch.float8_e4m3fn
        kept, new = (side.view(torch.uint8) if as_bytes else side for side in (kept, new))
        kept[: len(new)].copy_(new)
    width = min(inputs.block_tables.shape[1], static.block_tables.shape[1])
    static.block_tables[:, :width] = inputs.block_tables[:, :width]
    static.seq_lens.copy_(inputs.seq_lens)
    if static.sinks is not None and inputs.sinks is not None:
        static.sinks.copy_(inputs.sinks)
    if "cum_seq_lens_q" in arguments:
        device = inputs.query.device
        arguments["cum_seq_lens_q"].copy_(running_sum(inputs.case.q_lens, device))
        arguments["cum_seq_lens_kv"].copy_(running_sum(inputs.case.kv_lens, device))


CHECK = Check("K9", "replay", first_line(__doc__), _cases, _judge, adapt=_roomy)
