import math
from typing import Any

import pytest
import torch

from lab import references
from lab.calls.problem import mask_words
from lab.checks import Configuration, Interface, Level, Ranges
from lab.checks.case_run import CaseRun
from lab.checks.parameters.call_cases import attention_case, fewer_than_rows
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.paged_axes import VACUOUS, paged_model
from lab.checks.parameters.values import HeadDims, Pages
from lab.checks.properties.k18_combinations import CHECK

HEADS = 3


def judged(interface: Interface = Interface.DECODE, **values: Any) -> tuple[dict[str, Any], Any]:
    """The arguments of the call that a configuration makes, and what the references return, which is right."""
    seen: dict[str, Any] = {}

    class Seeing:
        pass

    def function(**arguments: Any) -> Any:
        seen["arguments"] = arguments
        seen["returned"] = getattr(references, interface.value)(**arguments)
        return seen["returned"]

    setattr(Seeing, interface.value, staticmethod(function))
    run = CaseRun(Seeing, Configuration(interface, values), torch.device("cpu"))
    judge_call(run)
    assert not run.wrongs
    return seen["arguments"], seen["returned"]


@pytest.mark.parametrize("sinks", ["none", "per head"])
def test_a_row_that_its_mask_and_its_request_leave_without_a_key_has_the_sinks_lse(sinks: str) -> None:
    arguments, (out, lse) = judged(q_len=4, mask="own bit clear", sinks=sinks, group=HEADS, lse="returned")
    assert int(arguments["seq_lens"][0]) == 4
    assert int(arguments["seq_lens"][1:].min()) >= 4
    assert arguments["mask"].to(torch.int32)[..., 0].tolist() == [[0, 0b1, 0b11, 0b111]] * 3
    assert not out[0].any()
    expected = torch.full((HEADS,), -math.inf) if sinks == "none" else arguments["sinks"] * math.log2(math.e)
    torch.testing.assert_close(lse[0], expected)


@pytest.mark.parametrize("q_len", [2, 20, 40])
def test_all_bits_after_the_draft_are_set(q_len: int) -> None:
    words = judged(q_len=q_len, mask="bits after the draft")[0]["mask"].to(torch.int32)
    plain = judged(q_len=q_len, mask="tree")[0]["mask"].to(torch.int32)
    bits, own = (((each.unsqueeze(-1) >> torch.arange(16)) & 1).flatten(2) for each in (words, plain))
    assert bits.shape[-1] == 16 * mask_words(q_len)
    assert torch.equal(bits[..., :q_len], own[..., :q_len])
    assert bits[..., q_len:].all()
    assert not own[..., q_len:].any()


@pytest.mark.parametrize("interface", [Interface.DECODE, Interface.CONTEXT, Interface.MLA_DECODE])
@pytest.mark.parametrize("page_size", [32, 128])
def test_a_request_of_several_pages_has_its_last_twice(interface: Interface, page_size: int) -> None:
    arguments, _ = judged(interface, page_size=page_size, pages="the last twice")
    for cells, kv_len in zip(arguments["block_tables"].tolist(), arguments["seq_lens"].tolist(), strict=True):
        named = cells[: -(-kv_len // page_size)]
        assert len(named) >= 2
        assert named[-1] == named[-2]
        assert len(set(named)) == len(named) - 1


@pytest.mark.parametrize("interface", [Interface.DECODE, Interface.CONTEXT, Interface.MLA_DECODE])
def test_every_point_of_the_full_level_has_keys_to_attend_to_and_pages_to_double(interface: Interface) -> None:
    for case in CHECK.cases(interface, Ranges(), Level.FULL):
        if not VACUOUS.isdisjoint(case.values.items()):
            continue
        of = attention_case(case, Ranges())
        assert any(q_len and kv_len for q_len, kv_len in zip(of.q_lens, of.kv_lens, strict=True)), case
        assert case["pages"] != Pages.TWICE or max(of.kv_lens) > of.storage.page_size, case


@pytest.mark.parametrize("q_lens", [(2, 2, 2), (1, 2, 1), (0, 0, 17), (5, 1, 17)])
def test_fewer_keys_than_rows_are_some_of_every_request_of_several_rows(q_lens: tuple[int, ...]) -> None:
    for q_len, kv_len in zip(q_lens, fewer_than_rows(q_lens), strict=True):
        assert min(q_len - 1, 1) <= kv_len < q_len or q_len == kv_len == 0


@pytest.mark.parametrize("interface", [Interface.DECODE, Interface.CONTEXT, Interface.MLA_DECODE])
def test_strides_an_element_apart_are_no_whole_loads(interface: Interface) -> None:
    for form, axis in (("pages an element apart", 0), ("tokens an element apart", -2)):
        cache = judged(interface, cache=form)[0]["kv_cache"]
        for side in (cache,) if isinstance(cache, torch.Tensor) else cache:
            assert side.stride(axis) * side.element_size() % 16
            assert side.stride(axis) % 16


def test_no_key_shades_others_where_mla_has_no_rotary_part() -> None:
    """Its value would be its logit, and so large that an output shows nothing else."""
    model = paged_model(Interface.MLA_DECODE, Ranges())
    assert model.completed({"head_dims": HeadDims("80/64"), "contents": "shaded"})
    assert not model.completed({"head_dims": HeadDims("64/64"), "contents": "shaded"})


@pytest.mark.parametrize("interface", [Interface.DECODE, Interface.CONTEXT])
def test_no_key_shades_others_where_keys_are_values(interface: Interface) -> None:
    model = paged_model(interface, Ranges())
    assert model.completed({"cache": "one tensor", "contents": "shaded"})
    assert not model.completed({"cache": "K is V", "contents": "shaded"})
