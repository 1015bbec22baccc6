"""A scenario's name makes the pass that it says, and a name that says nothing is refused."""

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.metadata import AttentionCall, ForwardMode, KVLayout
from lab.workloads import DEFAULT_SCENARIOS, GEOMETRIES, Batch, ForwardCase, scenario
from lab.workloads.mla_case import MLACase
from lab.workloads.scenarios import timed_scenario
from lab.workloads.traces import TracedRequest, own_trace, snapshot

E4M3 = torch.float8_e4m3fn
MOST_BYTES = 20e9
TRACE = [TracedRequest(0, 100, 50), TracedRequest(100, 200, 50), TracedRequest(200, 300, 50)]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("decode/llama-3.1-8b/2q1s4k", ForwardCase(ForwardMode.DECODE, "llama-3.1-8b", (4095, 4095), (1, 1))),
        ("target_verify/tiny/2q4s1k", ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (1020, 1020), (4, 4))),
        ("draft_extend/tiny/q1s9_q3s9", ForwardCase(ForwardMode.DRAFT_EXTEND, "tiny", (8, 6), (1, 3))),
        ("draft_extend_v2/tiny/2q4s9", ForwardCase(ForwardMode.DRAFT_EXTEND_V2, "tiny", (5, 5), (4, 4))),
        ("extend/tiny/q2k_q5", ForwardCase(ForwardMode.EXTEND, "tiny", (0, 0), (2048, 5))),
        ("extend/tiny/q2ks4k", ForwardCase(ForwardMode.EXTEND, "tiny", (2048,), (2048,))),
        ("mixed/tiny/q9_2q1s5", ForwardCase(ForwardMode.MIXED, "tiny", (0, 4, 4), (9, 1, 1))),
        ("split_prefill/tiny/q9", ForwardCase(ForwardMode.SPLIT_PREFILL, "tiny", (0,), (9,))),
        ("dllm_extend/tiny/q9", ForwardCase(ForwardMode.DLLM_EXTEND, "tiny", (0,), (9,))),
        # At 1 s the three have generated 20, 18 and 16 tokens.
        ("decode/tiny/trace2", ForwardCase(ForwardMode.DECODE, "tiny", (120, 218), (1, 1))),
        ("target_verify/tiny/trace3q4", ForwardCase(ForwardMode.TARGET_VERIFY, "tiny", (120, 218, 316), (4, 4, 4))),
        ("draft_extend/tiny/trace2q3", ForwardCase(ForwardMode.DRAFT_EXTEND, "tiny", (120, 218), (3, 3))),
        ("mixed/tiny/q4s8_trace2", ForwardCase(ForwardMode.MIXED, "tiny", (4, 120, 218), (4, 1, 1))),
        ("extend/tiny/trace2", ForwardCase(ForwardMode.EXTEND, "tiny", (0, 0), (100, 200))),
    ],
)
def test_a_name_makes_the_pass_that_it_says(name: str, case: ForwardCase) -> None:
    assert scenario(name, TRACE) == case


def v4(mode: ForwardMode, prefixes: Any, q_lens: Any, heads: int, ratio: int, **options: Any) -> MLACase:
    sizes = {"num_qo_heads": heads, "qk_rope_head_dim": 0, "page_size": 256} | options
    return MLACase(mode, prefixes, q_lens, compress_ratio=ratio, **sizes)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("decode/deepseek-v3/2q1s4k", MLACase(ForwardMode.DECODE, (4095, 4095), (1, 1), num_qo_heads=128)),
        (
            "target_verify/deepseek-v3/2q4s1k/topk256",
            MLACase(ForwardMode.TARGET_VERIFY, (1020, 1020), (4, 4), num_qo_heads=128, index_topk=256),
        ),
        ("decode/kimi-k2/trace2/tp8", MLACase(ForwardMode.DECODE, (120, 218), (1, 1), num_qo_heads=8)),
        (
            "target_verify/deepseek-v3/2q4s1k/e4m3/e4m3_query/page32/tp8",
            MLACase(
                ForwardMode.TARGET_VERIFY,
                (1020,) * 2,
                (4,) * 2,
                None,
                None,
                page_size=32,
                kv_dtype=E4M3,
                query_dtype=E4M3,
            ),
        ),
        ("decode/deepseek-v4-flash/2q1s4k/tp8", v4(ForwardMode.DECODE, (4095,) * 2, (1,) * 2, 8, 4, index_topk=512)),
        ("extend/deepseek-v4-pro/2q9s1k/ratio128", v4(ForwardMode.EXTEND, (1015,) * 2, (9,) * 2, 128, 128)),
        (
            "target_verify/deepseek-v4-pro/2q4s1k/ratio2/topk64/page128",
            v4(ForwardMode.TARGET_VERIFY, (1020,) * 2, (4,) * 2, 128, 2, index_topk=64, page_size=128),
        ),
        ("decode/tiny/2q1s9", ForwardCase(ForwardMode.DECODE, "tiny", (8, 8), (1, 1))),
    ],
)
def test_a_timed_pass_may_be_of_latent_attention(name: str, case: Any) -> None:
    assert timed_scenario(name, TRACE) == case


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("decode/deepseek-v3/2q1s9/tp3", "2q1s9/tp3': deepseek-v3 has 128 query heads; they do"),
        ("decode/deepseek-v3/2q1s9/window", "'window'; there are e4m3, e4m3_query, topk<N>, page<N>"),
        ("extend/kimi-k2/q9", "computes no attention on the MLA decode kernel"),
        ("decode/kimi-k2/2q1s9/ratio4", "no option of kimi-k2 is called 'ratio4'"),
        ("decode/deepseek-v4-pro/2q1s9/ratio2", "those with 1, 2 and 4 have an indexer"),
        ("decode/kimi-k2", "this one has 2 of the first three parts"),
        ("decode/nothing/2q1s9", "no geometry is called 'nothing'"),
    ],
)
def test_what_latent_attention_does_not_have_is_refused(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        timed_scenario(name)


@pytest.mark.parametrize(
    ("mode", "option", "setting"),
    [
        ("decode", "window", {"sliding_window": True}),
        ("draft_extend", "on_decode", {"draft_extend": AttentionCall.DECODE}),
        ("draft_extend_v2", "on_context", {"draft_extend": AttentionCall.CONTEXT}),
        ("mixed", "split_tail", {"split_mixed_tail": True}),
        ("extend", "padding3", {"num_padding_rows": 3}),
        ("target_verify", "encoder_only", {"encoder_only": True}),
        ("decode", "splits4", {"decode_splits": 4}),
        ("decode", "hnd", {"layout": KVLayout.HND}),
        ("decode", "e4m3", {"kv_dtype": E4M3}),
        ("decode", "e4m3_products", {"arithmetic": E4M3}),
        ("decode", "page16", {"page_size": 16}),
        ("decode", "tp8", {"tensor_parallel": 8}),
        ("decode", "tp8/page128/window", {"tensor_parallel": 8, "page_size": 128, "sliding_window": True}),
    ],
)
def test_an_option_sets(mode: str, option: str, setting: dict[str, Any]) -> None:
    plain = ForwardCase(ForwardMode[mode.upper()], "gpt-oss-120b", (1023,), (1,))
    named = scenario(f"{mode}/gpt-oss-120b/q1s1k/{option}")
    assert named != plain
    assert named == ForwardCase(plain.mode, plain.geometry, plain.prefix_lens, plain.q_lens, **setting)


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["extend", "mixed", "draft_extend"]),
    st.sampled_from(sorted(GEOMETRIES)),
    st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1),
)
def test_a_batch_written_down_comes_back(mode: str, geometry: str, requests: list[tuple[int, int]]) -> None:
    batch = Batch(tuple(new for new, _ in requests), tuple(new + cached for new, cached in requests))
    case = scenario(f"{mode}/{geometry}/{batch}")
    assert (case.q_lens, case.kv_lens, case.prefix_lens) == (batch.q_lens, batch.kv_lens, batch.prefix_lens)
    assert (case.mode.name.lower(), case.geometry) == (mode, geometry)


def test_without_a_trace_the_own_one_is_drawn_from() -> None:
    assert scenario("decode/tiny/trace64").prefix_lens == tuple(snapshot(own_trace(), 64))
    assert scenario("extend/tiny/trace8").q_lens == tuple(request.input_length for request in own_trace()[:8])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "a name is <mode>/<geometry>/<batch>"),
        ("decode/tiny", "a name is <mode>/<geometry>/<batch>.* this one has 2 of"),
        ("prefill/tiny/q1", "no mode .* is called 'prefill'; there are extend, decode, mixed, target_verify"),
        ("DECODE/tiny/q1", "no mode .* is called 'DECODE'"),
        ("idle/tiny/q1", "no mode that computes attention is called 'idle'"),
        ("prebuilt/tiny/q1", "no mode that computes attention is called 'prebuilt'"),
        ("decode/llama-9/q1", r"no geometry is called 'llama-9'; there are llama-3\.1-8b"),
        ("decode/tiny/8r1", "batch group '8r1' is not"),
        ("decode/tiny/8q4s1k", "DECODE has one row for every request"),
        ("target_verify/tiny/q4s1k_q3s1k", "equally many rows for every request"),
        ("draft_extend_v2/tiny/q4s1k_q3s1k", "equally many rows for every request"),
        ("decode/tiny/trace", "batch 'trace' is not trace<count>"),
        ("decode/tiny/trace0", "batch 'trace0' is not trace<count>"),
        ("decode/tiny/trace2k", "batch 'trace2k' is not trace<count>"),
        ("decode/tiny/q1_trace2", "batch group 'trace2' is not"),
        ("decode/tiny/trace2q0", "q_len 0 must be 1 or more"),
        ("decode/tiny/trace2q4", "DECODE has one row for every request"),
        ("decode/tiny/trace4", "never 4 requests of this trace run at once"),
        ("extend/tiny/trace4", "the trace has 3 requests, not 4: take fewer"),
        ("extend/tiny/trace2q4", "batch 'trace2q4': extend takes whole prompts of a trace, trace2; write chunks down"),
        ("mixed/tiny/trace2", "mixed takes no 'trace2' alone: write its chunks down before it, such as q2ks4k_trace2"),
        ("mixed/tiny/q4s8_trace0", "batch 'trace0' is not trace<count>"),
        ("decode/tiny/q1s1k/", "no option is called ''; there are window, .* page<N>, tp<N>"),
        ("decode/tiny/q1s1k/half", "no option is called 'half'"),
        ("decode/tiny/q1s1k/page", "no option is called 'page'"),
        ("decode/tiny/q1s1k/step2", "no option is called 'step2'"),
        ("decode/tiny/q1s1k/page16x", "no option is called 'page16x'"),
        ("decode/tiny/q1s1k/page48", "page_size=48 must be a power of two"),
        ("decode/tiny/q1s1k/page16/hnd/page32", "option 'page32' sets page_size, and so does one before it"),
        ("draft_extend/tiny/q1s1k/on_decode/on_context", "'on_context' sets draft_extend, and so does one before"),
        ("decode/tiny/q1s1k/on_context", "draft_extend=.* would be ignored in ForwardMode.DECODE"),
        ("decode/tiny/q1s1k/split_tail", "split_mixed_tail=True would be ignored"),
        ("decode/llama-3.1-8b/q1s1k/window", r"llama-3\.1-8b has no sliding-window layers"),
        ("decode/tiny/q1s1k/tp4", "6 query heads; they do not divide over 4"),
        ("decode/tiny/q1s1k/tp0", "do not divide over 0"),
    ],
)
def test_a_name_that_says_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^scenario {name!r}: .*{message}"):
        scenario(name, TRACE)


@pytest.mark.parametrize("name", DEFAULT_SCENARIOS)
def test_a_default_scenario_takes_less_than_20_gb_of_keys_and_values(name: str) -> None:
    case = scenario(name)
    tokens = sum(math.ceil(kv_len / case.page_size) * case.page_size for kv_len in case.kv_lens)
    elements = 2 * tokens * case.model.num_kv_heads * case.model.head_dim
    # The pool holds twice the pages, and histories lie beside it.
    assert 2 * elements * case.kv_dtype.itemsize + elements * case.dtype.itemsize < MOST_BYTES


def test_the_default_level_covers_what_an_engine_runs() -> None:
    cases = [scenario(name) for name in DEFAULT_SCENARIOS]
    assert len(set(map(repr, cases))) == len(cases)
    assert 20 <= len(cases) <= 24
    engine_modes = ["DECODE", "TARGET_VERIFY", "DRAFT_EXTEND", "DRAFT_EXTEND_V2", "EXTEND", "MIXED"]
    assert {case.mode.name for case in cases} == set(engine_modes)
    verified = {case.q_lens[0] for case in cases if case.mode is ForwardMode.TARGET_VERIFY}
    assert verified == {2, 4, 8}
    assert {case.draft_extend for case in cases if case.mode is ForwardMode.DRAFT_EXTEND_V2} == {
        None,
        AttentionCall.CONTEXT,
    }
    assert {case.sliding_window for case in cases if case.geometry == "gpt-oss-120b"} == {False, True}
    assert any(case.mode is ForwardMode.EXTEND and min(case.prefix_lens) > 0 for case in cases)


def test_a_trace_of_ones_own_runs_the_default_level() -> None:
    """Whoever passes a trace of his own need not change the names."""
    trace = [TracedRequest(float(number), 50 + number, 100) for number in range(64)]
    lengths = {name: scenario(name, trace).kv_lens for name in DEFAULT_SCENARIOS}
    changed = {name for name in DEFAULT_SCENARIOS if lengths[name] != scenario(name).kv_lens}
    assert changed == {name for name in DEFAULT_SCENARIOS if "trace" in name}
