"""Each number or special value that docstrings of calls and metadata builders name is in the models, or has a reason. Some case
passes each argument of a call.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch

import lab.metadata
from lab.calls import CALL_TYPES, ContextCall, DecodeCall, MLADecodeCall, RaggedContextCall
from lab.calls.allowed import CHOICES, FREE_ARGUMENTS, REFUSED
from lab.calls.problem import AttentionCall
from lab.checks.parameters.calls import built_call
from lab.checks.parameters.models import MODELS, Configuration
from lab.metadata.engine.forward_batch import ForwardBatch, SpecInfo
from lab.metadata.engine.kv_pool import KVPool
from lab.ranges import Ranges
from lab.references import generate_draft_decode_kv_indices
from lab.workloads.interfaces import Interface, MetadataFunction

MHA = MetadataFunction.MHA_METADATA
DESCRIBED: dict[Any, Interface] = {
    DecodeCall: AttentionCall.DECODE,
    ContextCall: AttentionCall.CONTEXT,
    MLADecodeCall: AttentionCall.MLA_DECODE,
    RaggedContextCall: AttentionCall.RAGGED_CONTEXT,
    ForwardBatch: MHA,
    SpecInfo: MHA,
    KVPool: MHA,
    lab.metadata.build_mla_decode_metadata: MetadataFunction.MLA_METADATA,
    lab.metadata.build_mla_prefill_metadata: MetadataFunction.MLA_PREFILL,
    generate_draft_decode_kv_indices: MetadataFunction.DRAFT_KV_INDICES,
}
SOURCE = re.compile(
    r"\([^()]*(?:FlashInfer|SGLang|PR |arxiv|\.py|\.cu|\.h)[^()]*\)|(?:FlashInfer|SGLang|PR|vLLM) ?\d[\d.]*|\bSM\d+"
)
SHAPE = re.compile(r"\[[^\]]*\]")
VALUE = re.compile(
    r'"[a-z0-9_-]+"|\bNone\b|\bNaN\b|-?\binf\b|\bTrue\b|\bFalse\b|(?<![\w.\]/*+-])-?\d[\d,]*(?:\.\d+)?(?:\*\*\d+)?(?![\w\]])'
)
# By what a docstring names, if no axis of the model has this name and value: another axis and its value, as texts, or the
# reason why no axis has the value.
BOUND = "no case has a batch without requests: a server makes no call for one"
SIZE = "a part of a formula or of a shape"
DEFAULT = "every call without the argument"
HELD: dict[str, str] = {
    "DecodeCall.kv_cache 1": "cache=K is V",
    "DecodeCall.kv_cache 2": "cache=one tensor",
    "DecodeCall.block_tables False": "block_tables=separate",
    "DecodeCall.max_seq_len 0": BOUND,
    "DecodeCall.sinks -inf": "sinks=some minus infinity",
    "DecodeCall.q_len_per_req None": "offsets=equal",
    "DecodeCall.mask 1": SIZE,
    "DecodeCall.mask 16": SIZE,
    "DecodeCall.kv_cache_sf 16": SIZE,
    "DecodeCall.lse, return_lse 2": SIZE,
    "DecodeCall.enable_block_sparse_attention True": "head_pages=half",
    "DecodeCall.skip_softmax_threshold_scale_factor 0": "skip_softmax=0.0",
    "DecodeCall.skip_softmax_threshold_scale_factor None": "skip_softmax=None",
    "DecodeCall.out, out_dtype 448": "the largest number of e4m3, at which every conversion saturates",
    "DecodeCall.o_scale 0": "the docstring excludes it",
    "DecodeCall.o_scale 1": "o_scale=1.0",
    "DecodeCall.causal_seqlens_kv_global 0": SIZE,
    "DecodeCall.causal_seqlens_kv_global 1": SIZE,
    "DecodeCall.causal_seqlens_kv_global None": "rank=none",
    "DecodeCall.cp_world, cp_rank 0": "rank=0 of 1",
    "DecodeCall.cp_world, cp_rank 1": "rank=0 of 1",
    'DecodeCall.bf16q_fp8kv_transform_mode "k_only"': "hints=True",
    'DecodeCall.bf16q_fp8kv_transform_mode "separate_kv"': "it changes no result, and the other value is judged",
    "DecodeCall.bf16q_fp8kv_transform_mode None": "hints=False",
    "ContextCall.cum_seq_lens_q NaN": "offsets=padding of NaN",
    "ContextCall.max_q_len, max_kv_len 0": BOUND,
    "ContextCall.use_fp16_softmax, uses_spcompress False": "the lab refuses other values",
    "ContextCall.use_fp16_softmax, uses_spcompress None": DEFAULT,
    "MLADecodeCall.block_tables -1": "entries=mixed",
    "MLADecodeCall.causal_seqlens_kv_global None": "rank=none",
    'MLADecodeCall.cute_dsl_impl "auto"': "hints=False",
    'MLADecodeCall.cute_dsl_impl "modular"': "hints=True",
    'MLADecodeCall.cute_dsl_impl "monolithic"': "it changes no result, and the other value is judged",
    "MLADecodeCall.enable_dcp True": "rank=0 of 2",
    "MLADecodeCall.is_var_seq False": "hints=True",
    "MLADecodeCall.kv_cache 1": "cache=4-D",
    'MLADecodeCall.kv_scale_format "arbitrary_fp32"': "hints=True",
    'MLADecodeCall.kv_scale_format "auto"': "hints=False",
    'MLADecodeCall.kv_scale_format "pow2_fp32"': "it changes no result, and the other value is judged",
    'MLADecodeCall.return_lse_base "auto"': "a backend, which the axis of that name has",
    'MLADecodeCall.return_lse_base "base2"': "lse=returned",
    'MLADecodeCall.return_lse_base "basee"': "lse=base e",
    'MLADecodeCall.return_lse_base "cute-dsl"': "a backend that the judge does not name: its LSE has another base",
    "MLADecodeCall.return_lse_base None": "lse=given",
    "MLADecodeCall.skip_softmax_threshold_scale_factor None": "skip_softmax=None",
    "MLADecodeCall.sparse_mla_top_k 0": "top_k=0",
    "MLADecodeCall.sparse_mla_top_k 1": SIZE,
    "MLADecodeCall.sparse_mla_top_k_lens -1": "the docstring excludes it before the last entry",
    "RaggedContextCall.attention_sinks None": "sinks=none",
    "RaggedContextCall.is_causal False": "causal=False",
    "RaggedContextCall.max_q_len, max_kv_len 0": BOUND,
    "RaggedContextCall.num_elts_per_sage_attn_blk 0": "sage=none",
    "RaggedContextCall.num_elts_per_sage_attn_blk 1": "sage=int8, 16 keys",
    "RaggedContextCall.num_elts_per_sage_attn_blk 4": "sage=e4m3, 4 keys",
    "RaggedContextCall.num_elts_per_sage_attn_blk 16": "sage=int8, 16 keys",
    "RaggedContextCall.o_sf_scale 4": SIZE,
    "RaggedContextCall.sage_attn_sfs None": "sage=none",
    "ForwardBatch.extend_seq_lens, extend_prefix_lens None": "prefixes=none, and no list of them",
    "ForwardBatch.extend_seq_lens_cpu, extend_prefix_lens_cpu, seq_lens_cpu None": "host_lens=none",
    "ForwardBatch.req_pool_indices 0": "padding=slots of length 0",
    "SpecInfo.num_accept_tokens None": DEFAULT,
    "SpecInfo.num_draft_tokens None": DEFAULT,
    "SpecInfo.num_tokens_per_req -1": "spec_info=of a graph",
    "SpecInfo.speculative_step_id 0": "draft_step=0",
    "SpecInfo.speculative_step_id None": DEFAULT,
    "KVPool.full_to_swa -1": "slots=where they lie, some -1",
    "KVPool.full_to_swa 0": "window=evicted",
    "KVPool.full_to_swa None": "window=none",
    "KVPool.num_virtual_pages None": "slots=where they lie",
    "KVPool.req_to_token 0": "padding=slots of length 1",
    "KVPool.swa_num_pages None": "window=none",
    "KVPool.v2p -1": "slots=virtual, some -1 or without a page",
    "KVPool.v2p 0": "padding=slots of length 1",
    "KVPool.v2p None": "slots=where they lie",
    "generate_draft_decode_kv_indices.entry_page_size 1": "entries=slots",
    "generate_draft_decode_kv_indices.v2p 0": "translated=True",
}


def attributes(described: Any) -> Iterator[tuple[str, str]]:
    """Yield the names of the attributes and arguments that a docstring describes, and the text about each."""
    for section in re.findall(r"^(?:Attributes|Args):\n(.*?)(?=^\S|\Z)", inspect.getdoc(described) or "", re.S | re.M):
        for name, text in re.findall(r"^ {4}([a-z]\w*(?:, [a-z]\w*)*): (.*?)(?=^ {4}[a-z]|\Z)", section, re.S | re.M):
            yield name, " ".join(text.split())


def named_values(described: Any) -> set[str]:
    """Return what a docstring names, such as "DecodeCall.window_left -1"."""
    found = set()
    for name, text in attributes(described):
        for value in VALUE.findall(SHAPE.sub("", SOURCE.sub("", text))):
            found.add(f"{described.__name__}.{name} {value.rstrip(',')}")
    return found


@pytest.mark.parametrize("described", DESCRIBED)
def test_each_value_that_a_docstring_names_is_in_the_model_or_has_a_reason(described: Any) -> None:
    named = named_values(described)
    held = {name: where for name, where in HELD.items() if name.startswith(f"{described.__name__}.")}
    axes = MODELS[DESCRIBED[described]](Ranges()).axes
    values = {f"{axis}={value}" for axis, each in axes.items() for value in each}
    of_axes = {f"{described.__name__}.{value.replace('=', ' ')}".lower() for value in values}
    assert {name for name in named if name.lower() not in of_axes} == set(held)
    # A reason is a sentence; a value has the form of `values`, and its axis is one word.
    assert {where for where in held.values() if re.match(r"\w+=", where)} <= values


@pytest.mark.parametrize("interface", [each for each in DESCRIBED.values() if isinstance(each, AttentionCall)])
def test_each_scale_is_exactly_1_and_1e_6_and_large(interface: AttentionCall) -> None:
    axes = MODELS[interface](Ranges()).axes
    for name in ("bmm1_size", "bmm2_size", *(["o_scale"] if interface is AttentionCall.DECODE else [])):
        sizes = [value for value in axes[name] if isinstance(value, float)]
        assert {1.0, 1e-6} < set(sizes)
        assert max(sizes) > 10


# Axes of sizes and contents, which change no argument's form: their largest values take long to build.
SIZES = "requests lengths rows q_len page_size pages group num_kv_heads heads far contents"
# Arguments for which the lab takes one value in some calls.
OF_ONE_VALUE = {"backend", "o_sf_scale", "o_sf_vec_size", "uses_shared_paged_kv_idx"}


@pytest.mark.parametrize("function", AttentionCall)
def test_some_case_passes_each_argument(function: AttentionCall) -> None:
    ranges, passed = Ranges(), set[str]()
    model = MODELS[function](ranges)
    for axis, value in (
        (axis, value) for axis, values in model.axes.items() for value in values if axis not in SIZES.split()
    ):
        if (point := model.completed({axis: value})) is not None:
            given = built_call(Configuration(function, point), ranges, torch.device("cpu")).given
            passed |= {each.name for each in fields(CALL_TYPES[function]) if _is_passed(given, each)}
    judged = {each.name for each in fields(CALL_TYPES[function])} - {*REFUSED, *CHOICES, *FREE_ARGUMENTS} - OF_ONE_VALUE
    assert judged <= passed, f"no axis of {function.name} in lab.checks.parameters gives {judged - passed}: add one"


def _is_passed(given: dict[str, Any], argument: Any) -> bool:
    value = given.get(argument.name, argument.default)
    return isinstance(value, torch.Tensor | tuple) or value != argument.default
