"""The calls of vLLM's passes, by their rules as `lab.metadata.mha.vllm` cites them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import AttentionCall
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.mha.vllm import Engine
from lab.workloads.forward_case import ForwardCase
from lab.workloads.inputs.forward_pass import build_forward

DECODE, CONTEXT = AttentionCall.DECODE.value, AttentionCall.CONTEXT.value
OFFSETS = ("cum_seq_lens_q", "cum_seq_lens_kv")


def calls_of(prefix_lens: Sequence[int], q_lens: Sequence[int], **settings: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the name and arguments of each call of a pass over pages of 16, after the references computed it rightly."""
    settings = {"engine": Engine.VLLM, "page_size": 16} | settings
    case = ForwardCase(ForwardMode.EXTEND, "tiny", tuple(prefix_lens), tuple(q_lens), **settings)
    forward, calls = build_forward(case, torch.device("cpu")), list[tuple[str, dict[str, Any]]]()

    def noting(name: str) -> Any:
        def call(**arguments: Any) -> Any:
            calls.append((name, arguments))
            return getattr(references, name)(**arguments)

        return call

    forward.run(SimpleNamespace(**{name: noting(name) for name in (DECODE, CONTEXT)}), out := forward.new_out())
    assert forward.truth().compare(forward.rows_of_requests(out)).passed
    assert forward.functions == [name for name, _ in calls]
    assert case.interface.value == calls[-1][0]
    return calls


def widths(arguments: dict[str, Any]) -> tuple[Any, ...]:
    offsets = arguments.get("cum_seq_lens_q")
    return arguments["q_len_per_req"], arguments.get("max_q_len"), None if offsets is None else offsets.tolist()


@pytest.mark.parametrize(
    ("q_lens", "settings", "expected"),
    [
        ((1, 1, 1), {}, (1, None, None)),
        ((1, 1, 1), {"num_padding_requests": 2, "num_padding_rows": 2}, (1, None, None)),
        ((4, 4, 4), {"decode_threshold": 4}, (4, None, None)),
        (
            (4, 4, 4),
            {"decode_threshold": 4, "num_padding_requests": 2, "num_padding_rows": 8},
            (None, 4, [0, 4, 8, 12, 12, 12]),
        ),
        (
            (4, 4, 4),
            {"decode_threshold": 4, "num_padding_requests": 2, "num_padding_rows": 8, "engine": Engine.VLLM_XQA},
            (4, None, None),
        ),
        ((4, 2, 4), {"decode_threshold": 4, "engine": Engine.VLLM_XQA}, (None, 4, [0, 4, 6, 10])),
    ],
)
def test_a_decode_call_has_all_requests_and_the_padding(
    q_lens: tuple[int, ...], settings: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    ((name, arguments),) = calls_of((0, 15, 40), q_lens, **settings)
    padding = settings.get("num_padding_requests", 0)
    assert name == DECODE
    assert widths(arguments) == expected
    assert arguments["seq_lens"].tolist() == [q_lens[0], 15 + q_lens[1], 40 + q_lens[2], *[0] * padding]
    assert arguments["max_seq_len"] == 40 + q_lens[2]
    assert len(arguments["query"]) == len(arguments["out"]) == sum(q_lens) + settings.get("num_padding_rows", 0)


@pytest.mark.parametrize(("engine", "key_offsets"), [(Engine.VLLM, [0, 4, 7]), (Engine.VLLM_XQA, [0, 49, 82])])
def test_requests_of_more_rows_get_a_context_call_whose_offsets_of_keys_count_pages_for_trtllm_gen(
    engine: Engine, key_offsets: list[int]
) -> None:
    (decode, of_decode), (context, of_context) = calls_of(
        (20, 7, 40, 0), (2, 2, 9, 33), decode_threshold=2, engine=engine
    )
    assert (decode, context) == (DECODE, CONTEXT)
    assert widths(of_decode) == (2, None, None)
    assert of_decode["seq_lens"].tolist() == [22, 9]
    assert (of_context["max_q_len"], of_context["max_kv_len"], of_context["batch_size"]) == (33, 49, 2)
    assert [of_context[name].tolist() for name in OFFSETS] == [[0, 9, 42], key_offsets]
    assert of_context["seq_lens"].tolist() == [49, 33]


def test_trtllm_gen_decodes_requests_of_equal_rows_and_xqa_all_of_few() -> None:
    for engine, decoded in ((Engine.VLLM, 1), (Engine.VLLM_XQA, 3)):
        calls = calls_of((20, 7, 40, 3), (2, 3, 1, 4), decode_threshold=3, engine=engine)
        assert [len(arguments["seq_lens"]) for _, arguments in calls] == [decoded, 4 - decoded]
    (decode, _), (context, arguments) = calls_of((20, 7, 40), (1, 2, 1))
    assert (decode, context, len(arguments["seq_lens"])) == (DECODE, CONTEXT, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"engine": Engine.SGLANG, "decode_threshold": 4}, "decode_threshold=4 would be ignored"),
        ({"num_padding_requests": 1}, "at most decode_threshold rows, 1"),
        ({"num_padding_rows": 1}, "at most decode_threshold rows, 1"),
        ({"virtual_slots": True}, "virtual_slots=True would be ignored"),
        ({"mode": ForwardMode.TARGET_VERIFY}, "each pass of vLLM has ForwardMode.EXTEND"),
    ],
)
def test_what_vllm_does_not_do_is_refused(settings: dict[str, Any], says: str) -> None:
    of: dict[str, Any] = {"mode": ForwardMode.EXTEND, "engine": Engine.VLLM} | settings
    with pytest.raises(ValueError, match=says):
        ForwardCase(geometry="tiny", prefix_lens=(0, 3), q_lens=(2, 2), **of)
