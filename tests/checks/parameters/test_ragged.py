from typing import Any

import pytest
import torch

from lab import references
from lab.checks import Configuration, Interface, Level, Ranges
from lab.checks.case_run import CaseRun
from lab.checks.parameters.call_cases import ragged_case
from lab.checks.parameters.calls import judge_call
from lab.checks.parameters.covering import Model
from lab.checks.parameters.paged_axes import VACUOUS
from lab.checks.parameters.ragged import ragged_model
from lab.checks.properties.k18_combinations import CHECK


def configuration(**values: Any) -> Configuration:
    return Configuration(Interface.RAGGED_CONTEXT, values)


def arguments_of(**values: Any) -> dict[str, Any]:
    """The arguments of the call that a configuration makes, which the references answer right."""
    seen: dict[str, Any] = {}

    class Seeing:
        @staticmethod
        def trtllm_ragged_attention_deepseek(**arguments: Any) -> Any:
            seen.update(arguments)
            return references.trtllm_ragged_attention_deepseek(**arguments)

    run = CaseRun(Seeing, configuration(**values), torch.device("cpu"))
    judge_call(run)
    assert not run.wrongs
    return seen


def test_lengths_are_what_their_names_say() -> None:
    plain = ragged_case(configuration())
    assert plain.q_lens == (5, 1, 17)
    assert all(kv_len >= rows for kv_len, rows in zip(plain.kv_lens, plain.q_lens, strict=True))
    assert ragged_case(configuration(lengths="as rows")).kv_lens == plain.q_lens
    assert ragged_case(configuration(lengths="fewer than rows")).kv_lens == (4, 0, 16)
    assert ragged_case(configuration(lengths="none first")).kv_lens[0] == 0
    assert ragged_case(configuration(lengths="none twice")).kv_lens[:2] == (0, 0)
    assert ragged_case(configuration(lengths=65_600, num_kv_heads=1)).kv_lens[0] >= 65_600
    assert ragged_case(configuration(offsets="none twice")).q_lens == (0, 0, 17)
    assert len(ragged_case(configuration(requests=257)).q_lens) == 257


def test_every_point_of_the_full_level_has_keys_to_attend_to() -> None:
    for case in CHECK.cases(Interface.RAGGED_CONTEXT, Ranges(), Level.FULL):
        lens = ragged_case(case)
        some = any(q_len and kv_len for q_len, kv_len in zip(lens.q_lens, lens.kv_lens, strict=True))
        assert some or not VACUOUS.isdisjoint(case.values.items()), case


def test_strides_are_what_their_names_say() -> None:
    found = arguments_of(kv="of one tensor")
    key, value = found["key"], found["value"]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert key.stride() == value.stride() == (2 * (192 + 128), 192 + 128, 1)
    found = arguments_of(kv="V of a projection")
    assert found["key"].is_contiguous()
    assert found["value"].stride() == (2 * (96 + 128), 96 + 128, 1)
    assert arguments_of(kv="heads first")["key"].stride(0) == 192
    assert not arguments_of(query="heads apart")["query"].is_contiguous()


def test_padding_lies_after_the_last_offset_and_lengths_on_the_host_have_none() -> None:
    found = arguments_of(padding="rows and keys")
    assert int(found["cum_seq_lens_q"][-1]) == len(found["query"]) - 3
    assert int(found["cum_seq_lens_kv"][-1]) == len(found["key"]) - 3
    found = arguments_of(padding="rows and keys of NaN")
    for name, of in (("query", "q"), ("key", "kv"), ("value", "kv")):
        end = int(found[f"cum_seq_lens_{of}"][-1])
        assert found[name][:end].isfinite().all()
        assert found[name][end:].isnan().all()
        assert len(found[name]) == end + 3
    found = arguments_of(mirrors="int64")
    assert found["q_seq_lens_cpu"].tolist() == found["cum_seq_lens_q"].diff().tolist()
    model: Model = ragged_model(Ranges())
    assert not model.fits({"padding": "keys", "mirrors": "int32"})


@pytest.mark.parametrize(("dtype", "out_dtype"), [("e4m3", torch.bfloat16), ("fp16", torch.float16)])
def test_an_output_that_the_call_makes_has_the_documented_dtype(dtype: str, out_dtype: torch.dtype) -> None:
    class Other:
        @staticmethod
        def trtllm_ragged_attention_deepseek(**arguments: Any) -> Any:
            return references.trtllm_ragged_attention_deepseek(**arguments).to(torch.float32)

    run = CaseRun(Other, configuration(dtype=dtype), torch.device("cpu"))
    judge_call(run)
    assert run.wrongs == [f"the output is torch.float32, not {out_dtype}"]
