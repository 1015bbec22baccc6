"""Named forward passes. A scenario's name describes the pass completely and is parsed to make it.

A name is `<mode>/<geometry>/<batch>[/<option>...]`, such as `target_verify/gpt-oss-120b/64q4s4k/window`.

    mode       a `ForwardMode` in lower case: decode, target_verify, draft_extend (v1), draft_extend_v2, extend, mixed …
    geometry   a name of `lab.workloads.GEOMETRIES`
    batch      as `lab.workloads.parse_batch` reads it, where keys include this pass's tokens: 64q1s4k, q2ks4k_63q1s4k;
               or from a trace: trace<count>[q<q_len>]. In decode, verification and draft extends this is a snapshot of <count>
               running requests, each with q_len new rows after its tokens (default 1): trace64, trace64q4. In extends it is
               the whole prompts of the first <count> requests: trace8. In mixed it follows the chunks: q2ks4k_trace63

    option         what it sets of `ForwardCase`
    window         sliding_window: a sliding-window layer
    on_decode      draft_extend: a draft extend on the decode call, if that is not the engine's choice
    on_context     draft_extend: a draft extend on the context call
    split_tail     split_mixed_tail: the trailing requests of one new token go to the decode call
    splits<N>      decode_splits: decode calls are divided into N, over requests sorted by length
    encoder_only   encoder_only: a layer whose rows see all keys of their request
    hnd            layout: HND
    e4m3           kv_dtype: an e4m3 cache
    e4m3_products  arithmetic: an error bound for products in e4m3, as XQA on SM90 computes one query token over an e4m3 cache
    page<N>        page_size: tokens per page; 64 if left out
    padding<N>     num_padding_rows: query rows after the requests', in an extend or a ragged verification
    tp<N>          tensor_parallel: one rank's slice of N

The geometries deepseek-v3 and kimi-k2 are of latent attention (MLA) and run on FlashInfer's MLA decode call:
decode/deepseek-v3/64q1s4k is a `lab.workloads.mla_case.MLACase`. The modes are those that run on this call, the options are
e4m3, page<N>, padding<N>, tp<N> and

    e4m3_query     query_dtype: an engine casts the query to e4m3 too
    topk<N>        index_topk: each row sees at most N of its keys, as in DeepSeek-V3.2 (2048); extends run on this call too

The geometries deepseek-v4-flash and deepseek-v4-pro run on FlashInfer's call over two pools, with pages of 256 tokens. They
have these options too, where topk<N> is the number of compressed entries that a row selects, and

    ratio<N>       compress_ratio: tokens that a compressed entry stands for: 4 if left out, 128, or 0 without such entries
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lab.calls.problem import AttentionCall
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.workloads.batches import Batch, parse_batch
from lab.workloads.forward_case import ATTENDING_MODES, ForwardCase
from lab.workloads.geometries import INDEXED_RATIO, LATENT_HEADS, V4_INDEX_TOPK, geometry
from lab.workloads.mla_case import MLACase
from lab.workloads.traces import TracedRequest, own_trace, snapshot

# The default level of the benchmarks.
DEFAULT_SCENARIOS = (
    "decode/llama-3.1-8b/8q1s1k",
    "decode/llama-3.1-8b/64q1s4k",
    "decode/llama-3.1-8b/16q1s32k",
    "decode/llama-3.1-8b/1q1s80k",
    "decode/llama-3.1-8b/trace64",
    "decode/llama-3.1-8b/64q1s4k/page16",
    "decode/llama-3.1-8b/64q1s4k/e4m3/e4m3_products",
    "decode/llama-3.1-70b/64q1s4k/tp8",
    "decode/gpt-oss-120b/64q1s4k",
    "decode/gpt-oss-120b/64q1s4k/window",
    "target_verify/llama-3.1-8b/64q2s4k",
    "target_verify/llama-3.1-8b/64q4s4k",
    "target_verify/llama-3.1-8b/64q8s4k",
    "target_verify/llama-3.1-8b/trace64q4",
    "target_verify/gpt-oss-120b/64q4s4k/window",
    "draft_extend_v2/llama-3.1-8b/64q4s4k",
    "draft_extend_v2/llama-3.1-8b/64q4s4k/on_context",
    "draft_extend/llama-3.1-8b/16q1s4k_16q2s4k_16q3s4k_16q4s4k",
    "extend/llama-3.1-8b/8q4k",
    "extend/llama-3.1-8b/8q2ks4k",
    "extend/llama-3.1-8b/trace8",
    "extend/gpt-oss-120b/8q4k/window",
    "mixed/llama-3.1-8b/q2ks4k_63q1s4k",
)

_MODES = {mode.name.lower(): mode for mode in ATTENDING_MODES}
_OPTIONS: dict[str, tuple[str, Any]] = {
    "window": ("sliding_window", True),
    "on_decode": ("draft_extend", AttentionCall.DECODE),
    "on_context": ("draft_extend", AttentionCall.CONTEXT),
    "split_tail": ("split_mixed_tail", True),
    "encoder_only": ("encoder_only", True),
    "hnd": ("layout", KVLayout.HND),
    "e4m3": ("kv_dtype", torch.float8_e4m3fn),
    "e4m3_products": ("arithmetic", torch.float8_e4m3fn),
}
_NUMBERED_OPTIONS = {
    "page": "page_size",
    "tp": "tensor_parallel",
    "padding": "num_padding_rows",
    "splits": "decode_splits",
}
_LATENT_OPTIONS = {"e4m3": _OPTIONS["e4m3"], "e4m3_query": ("query_dtype", torch.float8_e4m3fn)}
_LATENT_NUMBERED_OPTIONS = {"topk": "index_topk"} | {
    name: _NUMBERED_OPTIONS[name] for name in ("page", "tp", "padding")
}
_TWO_POOLS_NUMBERED_OPTIONS = _LATENT_NUMBERED_OPTIONS | {"ratio": "compress_ratio"}
_NUMBERED = re.compile(r"(?P<option>[a-z]+)(?P<number>[0-9]+)")
_TRACED = re.compile(r"trace(?P<count>[0-9]+)(q(?P<q_len>[0-9]+))?")


def scenario(name: str, trace: Sequence[TracedRequest] | None = None) -> ForwardCase:
    """Return the forward pass of a name like "decode/llama-3.1-8b/64q1s4k". If `trace` is None, the lab's own trace is used."""
    with naming_scenario(name):
        mode, geometry_name, batch_text, options = _parts(name)
        settings = read_options(options, _OPTIONS, _NUMBERED_OPTIONS)
        geometry(geometry_name).tensor_parallel(settings.get("tensor_parallel", 1))  # raises for an unknown name
        batch = _batch(batch_text, mode, trace)
        return ForwardCase(mode, geometry_name, batch.prefix_lens, batch.q_lens, **settings)


def timed_scenario(name: str, trace: Sequence[TracedRequest] | None = None) -> ForwardCase | MLACase:
    """Return the forward pass of a name such as "decode/llama-3.1-8b/64q1s4k" or, with MLA, "decode/deepseek-v3/64q1s4k"."""
    if not LATENT_HEADS.keys() & set(name.split("/")[1:2]):
        return scenario(name, trace)
    with naming_scenario(name):
        mode, geometry_name, batch_text, options = _parts(name)
        index_topk = V4_INDEX_TOPK.get(geometry_name)
        numbered = _LATENT_NUMBERED_OPTIONS if index_topk is None else _TWO_POOLS_NUMBERED_OPTIONS
        settings = read_options(options, _LATENT_OPTIONS, numbered, f" of {geometry_name}")
        if index_topk is not None:
            ratio = settings.setdefault("compress_ratio", INDEXED_RATIO)
            selected = index_topk if ratio == INDEXED_RATIO else None
            settings = {"page_size": 256, "qk_rope_head_dim": 0, "index_topk": selected} | settings
        heads, ranks = LATENT_HEADS[geometry_name], settings.pop("tensor_parallel", 1)
        if ranks < 1 or heads % ranks:
            raise ValueError(f"{geometry_name} has {heads} query heads; they do not divide over {ranks} GPUs")
        batch = _batch(batch_text, mode, trace)
        return MLACase(mode, batch.prefix_lens, batch.q_lens, num_qo_heads=heads // ranks, **settings)


def _parts(name: str) -> tuple[ForwardMode, str, str, list[str]]:
    parts = name.split("/")
    if len(parts) < 3:
        raise ValueError(
            "a name is <mode>/<geometry>/<batch>[/<option>...], such as decode/llama-3.1-8b/64q1s4k; this one has "
            f"{len(parts)} of the first three parts"
        )
    mode, geometry_name, batch_text, *options = parts
    if mode not in _MODES:
        raise ValueError(f"no mode that computes attention is called {mode!r}; there are {', '.join(_MODES)}")
    return _MODES[mode], geometry_name, batch_text, options


@contextlib.contextmanager
def naming_scenario(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"scenario {name!r}: {error}") from error


def read_options(
    options: Sequence[str], flags: Mapping[str, tuple[str, Any]], numbered: Mapping[str, str], of: str = ""
) -> dict[str, Any]:
    """Return the keyword arguments that options such as "hnd" and "page16" set. `flags` maps "hnd" to (argument, value), and
    `numbered` maps "page" to an argument. Raise ValueError for an unknown option (`of` is a part of the message), or if two
    options set the same argument.
    """
    settings: dict[str, Any] = {}
    for option in options:
        match = _NUMBERED.fullmatch(option)
        if option in flags:
            argument, value = flags[option]
        elif match is not None and match["option"] in numbered:
            argument, value = numbered[match["option"]], int(match["number"])
        else:
            known = [*flags, *(f"{each}<N>" for each in numbered)]
            raise ValueError(f"no option{of} is called {option!r}; there are {', '.join(known)}")
        if argument in settings:
            raise ValueError(f"option {option!r} sets {argument}, and so does one before it: leave one of them out")
        settings[argument] = value
    return settings


def _batch(text: str, mode: ForwardMode, trace: Sequence[TracedRequest] | None) -> Batch:
    chunks, _, running = text.rpartition("_trace")
    if chunks and mode is ForwardMode.MIXED:
        return parse_batch(chunks) + _batch(f"trace{running}", ForwardMode.DECODE, trace)
    if not text.startswith("trace"):
        return parse_batch(text)
    match = _TRACED.fullmatch(text)
    if match is None or int(match["count"]) < 1:
        raise ValueError(
            f"batch {text!r} is not trace<count>[q<q_len>]: trace64, for instance, is 64 requests of the trace"
        )
    requests, count = own_trace() if trace is None else trace, int(match["count"])
    if not mode.is_prefill:  # the rows are new tokens of running requests, after their cached tokens
        q_len = int(match["q_len"] or 1)
        return Batch((q_len,) * count, tuple(length + q_len for length in snapshot(requests, count)))
    if mode is ForwardMode.MIXED:
        raise ValueError(f"mixed takes no {text!r} alone: write its chunks down before it, such as q2ks4k_{text}")
    if match["q_len"] is not None:
        raise ValueError(
            f"batch {text!r}: {mode.name.lower()} takes whole prompts of a trace, trace{match['count']}; write chunks down, "
            "such as 8q2ks4k"
        )
    if count > len(requests):
        raise ValueError(f"the trace has {len(requests)} requests, not {count}: take fewer")
    prompts = tuple(request.input_length for request in requests[:count])  # no token is cached
    return Batch(prompts, prompts)
