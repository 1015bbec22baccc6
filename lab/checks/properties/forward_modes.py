"""Find a call that is right in a unit test and wrong in an engine's forward pass.

The check makes forward passes in all forward modes of an engine. It writes each request's tokens into a paged K/V pool, builds
the metadata, and calls the kernel with an engine's padding and offsets. The smoke level judges a small synthetic model. The
full level covers every pair of settings (model, page size, sliding window, tensor-parallel size, tensor contents), and every
combination of mode, model and page size.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.calls.problem import E4M3, NVFP4, AttentionCall
from lab.checks.case_run import CallForm, CaseRun, Result
from lab.checks.parameters.covering import Model, constraints
from lab.checks.parameters.paged_axes import MHA
from lab.checks.properties.check import Check, Scope
from lab.checks.run.support_protocol import Unsupported
from lab.metadata.engine.forward_batch import FROZEN_KV_STEP
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.mha.vllm import Engine
from lab.ranges import Ranges
from lab.workloads.attention_case import Contents
from lab.workloads.forward_case import PASS_CONTENTS, ForwardCase
from lab.workloads.geometries import geometry
from lab.workloads.inputs.contents import fill, unwritten
from lab.workloads.inputs.forward_pass import EnginePass, build_forward
from lab.workloads.inputs.guards import guarded, wrong_guards

# For each model, the number of tensor-parallel GPUs that gives the fewest heads per GPU without replicated K/V heads.
TENSOR_PARALLEL = {"llama-3.1-8b": 8, "llama-3.1-70b": 8, "qwen3-32b": 4, "gpt-oss-120b": 8, "gemma-3-27b": 8}


def mode_cases(
    name: str, page_size: int, q_lens: Sequence[int], long: Sequence[int] = (700, 2500)
) -> Iterator[ForwardCase]:
    """Yield forward passes of the model `name` in each forward mode. `long`: prefix lengths that exceed the sliding window."""

    def case(mode: ForwardMode, prefix_lens: Sequence[int], q_lens: Sequence[int], **settings: Any) -> ForwardCase:
        return ForwardCase(mode, name, tuple(prefix_lens), tuple(q_lens), page_size=page_size, **settings)

    prefixes = (0, page_size - 1, page_size, page_size + 1, *long)
    unequal, dealt, new = (5, 1, 2, 4, 3, 1), (5, page_size + 1, 70, 4, 130, 33), (5, page_size + 1, 70, 1, 130, 33)
    for step in (None, 0, 2):
        yield case(ForwardMode.DECODE, prefixes, (1,) * len(prefixes), draft_step=step)
    # A step of a frozen-KV draft writes no token, so that each request needs a prefix. Each prefix occurs twice: two branches.
    branches = [prefix for prefix in (1, *prefixes[1:]) for _ in range(2)]
    yield case(ForwardMode.DECODE, branches, (1,) * len(branches), draft_step=FROZEN_KV_STEP, topk=2)
    for q_len in q_lens:
        # Drafts that begin before, at and after a page edge.
        edge = max(page_size - q_len, 0)
        crossing = (0, edge, edge + 1, page_size, *long)
        verify = case(ForwardMode.TARGET_VERIFY, crossing, (q_len,) * len(crossing))
        yield verify
        yield replace(verify, mode=ForwardMode.DRAFT_EXTEND_V2)
        # Settings that need one pass only: the HND layout, virtual slots, an encoder-only layer, and a batch in four calls.
        if q_len == 4:
            yield replace(verify, layout=KVLayout.HND)
            yield replace(verify, virtual_slots=True)
        if q_len == max(q_lens):
            yield replace(verify, encoder_only=True)
            yield replace(verify, decode_splits=4)
    yield case(ForwardMode.DRAFT_EXTEND, prefixes, unequal)
    yield case(ForwardMode.DRAFT_EXTEND, prefixes, unequal, draft_extend=AttentionCall.DECODE)
    yield case(ForwardMode.RAGGED_VERIFY, prefixes, unequal)
    yield case(ForwardMode.RAGGED_VERIFY, prefixes, unequal, num_padding_rows=7)
    # The draft extend of fixed width on the context kernel, as in SGLang's change 24566.
    yield case(ForwardMode.DRAFT_EXTEND_V2, prefixes, (4,) * len(prefixes), draft_extend=AttentionCall.CONTEXT)
    yield case(ForwardMode.EXTEND, (0,) * len(new), new)
    yield case(ForwardMode.EXTEND, prefixes, new)
    yield case(ForwardMode.EXTEND, prefixes, new, num_padding_rows=7)
    yield case(ForwardMode.EXTEND, prefixes, new, encoder_only=True)
    yield case(ForwardMode.EXTEND, prefixes, new, virtual_slots=True)
    # Context parallelism: each rank has an early and a late block of the rows of each request.
    yield case(ForwardMode.EXTEND, prefixes, dealt, context_parallel=2)
    for splits_tail in (False, True):
        yield case(ForwardMode.MIXED, prefixes, (5, 70, 2, 1, 1, 1), split_mixed_tail=splits_tail)


def _cases(scope: Scope) -> Iterator[ForwardCase]:
    ranges = scope.ranges
    page_size, dtypes = usual_page_size(ranges), _first_dtypes(ranges)
    q_lens = tuple(ranges.q_lens) if scope.is_full else smoke_q_lens(ranges)
    cases = list[ForwardCase]()
    for case in mode_cases(ranges.tiny, page_size, q_lens, long=(3 * page_size + 5, 300)):
        if not (case.split_mixed_tail and len(set(ranges.dtypes[0])) > 1):
            cases.append(replace(case, contents=Contents.NEEDLES, **dtypes))
            if True in ranges.windows and not case.encoder_only:
                cases.append(replace(case, sliding_window=True, **dtypes))
    cases += quantised_cases(ranges, page_size)
    cases += vllm_cases(ranges, page_size, q_lens)
    cases += block_sparse_cases(ranges, q_lens)
    if scope.is_full:
        cases += geometry_cases(ranges)
    yield from (case for case in cases if case.interface is scope.interface)


def vllm_cases(ranges: Ranges, page_size: int, q_lens: Sequence[int]) -> Iterator[ForwardCase]:
    """Yield forward passes of vLLM: padded as in a CUDA graph, or split into a decode call and a context call."""
    prefixes, windows = (0, page_size - 1, page_size, 300), itertools.cycle(ranges.windows_of(geometry(ranges.tiny)))
    shared = {"page_size": page_size, "contents": Contents.NEEDLES, **_first_dtypes(ranges)}
    decode = ForwardCase(ForwardMode.EXTEND, ranges.tiny, prefixes, (1,) * 4, **shared)

    def case(engine: Engine, q_lens: tuple[int, ...], threshold: int = 1, **padding: int) -> ForwardCase:
        changes: dict[str, Any] = {"engine": engine, "q_lens": q_lens, "decode_threshold": threshold, **padding}
        return replace(decode, sliding_window=next(windows), **changes)

    for engine in (Engine.VLLM, Engine.VLLM_XQA):
        yield case(engine, (1,) * 4, num_padding_requests=3, num_padding_rows=3)
        for q_len in q_lens:
            yield case(engine, (q_len,) * 4, q_len, num_padding_requests=2, num_padding_rows=2 * q_len)
            yield case(engine, (q_len, q_len, 1, q_len), q_len)
            yield case(engine, (q_len, q_len, q_len + 1, 2 * page_size + 5), q_len)


def block_sparse_cases(ranges: Ranges, q_lens: Sequence[int]) -> Iterator[ForwardCase]:
    """Yield forward passes of MiniMax-M3 (block-sparse attention). One request has one page more than a row may select."""
    dtype = pass_dtypes(ranges.dtypes[0])["dtype"]
    modes = ((ForwardMode.DECODE, 1), *((ForwardMode.TARGET_VERIFY, q_len) for q_len in q_lens))
    for mode, q_len in modes if (dtype, dtype) in ranges.dtypes else ():
        prefixes, dtypes = (0, 126, 300, 2049 - q_len), dict[str, Any](dtype=dtype, kv_dtype=dtype)
        yield ForwardCase(mode, ranges.tiny, prefixes, (q_len,) * 4, page_size=128, block_sparse=True, **dtypes)


def quantised_cases(ranges: Ranges, page_size: int) -> Iterator[ForwardCase]:
    """Yield forward passes with an e4m3 query over an e4m3 or NVFP4 cache, the dtypes that trtllm-gen and fmha_v2 need."""
    prefixes, (q_len, *_) = (0, page_size - 1, 3 * page_size + 5, 300), smoke_q_lens(ranges)
    modes = (
        (ForwardMode.DECODE, (1,) * 4),
        (ForwardMode.TARGET_VERIFY, (q_len,) * 4),
        (ForwardMode.EXTEND, (5, page_size + 1, 33, 1)),
    )
    has_e4m3 = any(kv_dtype == E4M3 for _, kv_dtype in ranges.dtypes)
    caches = [*((E4M3,) if has_e4m3 else ()), *((NVFP4,) if True in ranges.nvfp4 else ())]
    for kv_dtype, (mode, q_lens) in itertools.product(caches, modes):
        window = True in ranges.windows and mode is ForwardMode.TARGET_VERIFY
        dtypes = pass_dtypes(ranges.dtypes[0]) | {"kv_dtype": kv_dtype, "query_dtype": E4M3}
        case = ForwardCase(mode, ranges.tiny, prefixes, q_lens, page_size=page_size, sliding_window=window, **dtypes)
        yield case
        if kv_dtype == NVFP4 and case.interface is AttentionCall.DECODE:
            yield replace(case, query_dtype=None)  # as XQA needs it
        if kv_dtype == E4M3 and mode is ForwardMode.EXTEND:  # its last request is a tail
            yield replace(case, split_mixed_tail=True)


def usual_page_size(ranges: Ranges) -> int:
    return 64 if 64 in ranges.page_sizes else ranges.page_sizes[0]


def smoke_q_lens(ranges: Ranges) -> tuple[int, ...]:
    return (4,) if 4 in ranges.q_lens else (max(ranges.q_lens),)


def pass_dtypes(pair: tuple[torch.dtype, torch.dtype]) -> dict[str, Any]:
    """Return the dtype fields of a `PassCase` for the pair (query dtype, K/V dtype). An e4m3 query is cast from bf16."""
    query, kv_dtype = pair
    cast = {"dtype": torch.bfloat16, "query_dtype": E4M3} if query == E4M3 else {"dtype": query}
    return cast | {"kv_dtype": kv_dtype}


def _first_dtypes(ranges: Ranges) -> dict[str, Any]:
    pair = ranges.dtypes[0]
    return pass_dtypes(pair) | {"arithmetic": ranges.arithmetic(*pair)}


def geometry_cases(ranges: Ranges) -> Iterator[ForwardCase]:
    """Yield forward passes that cover all pairs of settings, such as model and page size, and some triples of settings."""
    one_page_size = usual_page_size(ranges)
    variants = list(mode_cases("tiny", one_page_size, ranges.q_lens))
    axes: dict[str, tuple[Any, ...]] = {
        "variant": tuple(range(len(variants))),
        "model": tuple(name for name in ranges.geometries if ranges.holds(geometry(name))),
        "page_size": (one_page_size, *(size for size in ranges.page_sizes if size != one_page_size)),
        "sliding_window": (False, True) if True in ranges.windows else (False,),
        "is_slice": (False, True),
        "contents": PASS_CONTENTS,
        "dtypes": (ranges.dtypes[0], *(pair for pair in ranges.dtypes[1:] if pair[0] != pair[1])),
    }
    if not axes["model"]:
        return
    rules = constraints(
        {
            "no window": lambda model, sliding_window: sliding_window in ranges.windows_of(geometry(model)),
            "no slice": lambda model, is_slice: not is_slice or TENSOR_PARALLEL.get(model, 1) > 1,
            "pages of one size": lambda page_size, dtypes: page_size == one_page_size or dtypes == ranges.dtypes[0],
            "a mixed tail is split where both dtypes are one": lambda variant, dtypes: (
                dtypes[0] == dtypes[1] or not variants[variant].split_mixed_tail
            ),
            "an encoder-only layer has no window": lambda variant, sliding_window: (
                not sliding_window or not variants[variant].encoder_only
            ),
        }
    )
    triples = (("variant", "model", "sliding_window"), ("variant", "model", "page_size"))
    for point in Model(axes, rules, triples).covering(ranges.seed):
        of_page_size = list(mode_cases(point["model"], point["page_size"], ranges.q_lens))
        yield replace(
            of_page_size[point["variant"]],
            sliding_window=point["sliding_window"],
            tensor_parallel=TENSOR_PARALLEL[point["model"]] if point["is_slice"] else 1,
            contents=point["contents"],
            **pass_dtypes(point["dtypes"]),
            arithmetic=ranges.arithmetic(*point["dtypes"]),
        )


def judge_pass(run: CaseRun, forward: EnginePass) -> None:
    """Run a forward pass. Record an error for a wrong output, a write next to the output, and a changed input."""
    truth = forward.truth()
    before = {name: tensor.clone() for name, tensor in forward.inputs().items()}
    out, around = guarded(forward.new_out())
    try:
        forward.run(run.engine(), out)
        run.expect_close("the pass", Result(forward.rows_of_requests(out), None), truth)
        others = {"the pass, by whole calls": CallForm.WHOLE} if CallForm.PREPARED in run.forms else {}
        for form in run.forms[1:] if not getattr(forward, "shards", ()) else ():
            others[f"the pass, {form.name.lower()} on other contents"] = form
        for what, form in others.items():
            unwritten(out)
            make = forward.run if form is CallForm.WHOLE else partial(_made_before, forward)
            with run.noting(what):
                make(run.engine(form), out)  # each engine has a workspace, of 520 MiB on a GPU
                run.expect_close(what, Result(forward.rows_of_requests(out), None), truth)
    except Unsupported as declined:
        if declined.late:
            run.wrong(f"it declined, after it had written ({declined})")
        raise
    finally:
        run.expect("around out", wrong_guards("its output", around))
        run.expect_unchanged(forward.inputs(), before)


def _made_before(forward: EnginePass, engine: Any, out: Tensor) -> None:
    tensors = (forward.query, forward.cache.storage)
    held = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        fill(tensor, 0.0)
    try:
        call = forward.prepare(engine, **forward.arguments(out))
    finally:
        for tensor, contents in zip(tensors, held, strict=True):
            tensor.copy_(contents)
    call()


CHECK = Check("M1", __doc__, _cases, lambda run: judge_pass(run, build_forward(run.case, run.device)), MHA, quick=5)
