"""Judge many forward passes and record the verdicts: `python -m lab.checks.survey lab.kernels.trtllm --out report.json`.

Every mode, on the geometries of real models and a tensor-parallel slice of each, at every page size, with 1 to 8 query
tokens per request, full and sliding-window layers, random and needle inputs.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import torch

from lab.checks.forward import Verdict, judge_forward
from lab.checks.verdicts import Outcome
from lab.kernels import default_implementation
from lab.metadata.engine.forward_mode import AttentionCall, ForwardMode
from lab.metadata.engine.kv_cache import KVLayout
from lab.provenance import environment
from lab.workloads.forward_case import ForwardCase, Inputs
from lab.workloads.geometries import GEOMETRIES, geometry

PAGE_SIZES = (16, 32, 64, 128)
MOST_REASON_CHARACTERS = 500
DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
Q_LENS = (1, 2, 3, 4, 5, 6, 7, 8)
# The slice that brings each model to its fewest heads per GPU without replicating K/V.
TENSOR_PARALLEL = {"llama-3.1-8b": 8, "llama-3.1-70b": 8, "qwen3-32b": 4, "gpt-oss-120b": 8, "gemma-3-27b": 8}


def survey_cases(
    geometries: Sequence[str], page_sizes: Sequence[int] = PAGE_SIZES, q_lens: Sequence[int] = Q_LENS
) -> Iterator[ForwardCase]:
    """All cases of the named geometries."""
    for name in geometries:
        kinds = (False, True) if geometry(name).sliding_window is not None else (False,)
        for sliding_window in kinds:
            for tensor_parallel in sorted({1, TENSOR_PARALLEL.get(name, 1)}):
                for page_size in page_sizes:
                    for case in mode_cases(name, page_size, q_lens):
                        changed = replace(case, sliding_window=sliding_window, tensor_parallel=tensor_parallel)
                        for inputs in Inputs:
                            yield replace(changed, inputs=inputs)


def mode_cases(
    name: str, page_size: int, q_lens: Sequence[int] = Q_LENS, long: Sequence[int] = (700, 2500)
) -> Iterator[ForwardCase]:
    """Every mode on one geometry: lengths at the edges of pages, on both sides of a window, empty and long.

    Args:
        long: prefixes beyond the geometry's window, where the GPU's work is.
    """
    prefixes = (0, page_size - 1, page_size, page_size + 1, *long)
    ones = tuple(1 for _ in prefixes)
    yield ForwardCase(ForwardMode.DECODE, name, prefixes, ones, page_size=page_size)
    for step in (0, 2):
        yield ForwardCase(ForwardMode.DECODE, name, prefixes, ones, draft_step=step, page_size=page_size)
    for q_len in q_lens:
        # Offsets that cross a page: the request before the edge gains a page, the one on it too.
        crossing = (0, page_size - q_len, page_size - q_len + 1, page_size, *long)
        widths = tuple(q_len for _ in crossing)
        verify = ForwardCase(ForwardMode.TARGET_VERIFY, name, crossing, widths, page_size=page_size)
        yield verify
        yield replace(verify, mode=ForwardMode.DRAFT_EXTEND_V2)
        # A pool that lies in memory as the kernels see it.
        if q_len == 4:
            yield replace(verify, layout=KVLayout.HND)
    v1 = ForwardCase(ForwardMode.DRAFT_EXTEND, name, prefixes, (5, 1, 2, 4, 3, 1), page_size=page_size)
    yield v1
    yield replace(v1, draft_extend=AttentionCall.DECODE)
    # The same on the other call of change 24566: V2 on the context kernel.
    widths = tuple(4 for _ in prefixes)
    yield ForwardCase(
        ForwardMode.DRAFT_EXTEND_V2, name, prefixes, widths, page_size=page_size, draft_extend=AttentionCall.CONTEXT
    )
    extend_lens = (5, page_size + 1, 70, 1, 130, 33)
    yield ForwardCase(ForwardMode.EXTEND, name, tuple(0 for _ in extend_lens), extend_lens, page_size=page_size)
    yield ForwardCase(ForwardMode.EXTEND, name, prefixes, extend_lens, page_size=page_size)
    mixed = ForwardCase(ForwardMode.MIXED, name, prefixes, (5, 70, 2, 1, 1, 1), page_size=page_size)
    yield mixed
    yield replace(mixed, split_mixed_tail=True)


def judge_cases(implementation: str, cases: Sequence[ForwardCase]) -> list[Verdict]:
    """Judge cases of the module of that name, in order."""
    module = importlib.import_module(implementation)
    return [_judge(module, implementation, case) for case in cases]


def _judge(module: Any, name: str, case: ForwardCase) -> Verdict:
    """A survey goes on after an error: a refusal that is no NotImplementedError, or a CUDA error, is recorded as FAILED."""
    try:
        return judge_forward(module, case)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        return Verdict(
            case, name, "", Outcome.FAILED, reason=f"{type(error).__name__}: {error}"[:MOST_REASON_CHARACTERS]
        )


def _result(future: Future[list[Verdict]], name: str, share: Sequence[ForwardCase]) -> list[Verdict]:
    """A share's verdicts; FAILED throughout where its process died, or one that shared the pool with it."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        return [Verdict(case, name, "", Outcome.FAILED, reason=str(error)) for case in share]


def summary(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Counts per mode and outcome, the worst right case, and the reasons of what was declined."""
    modes = sorted({verdict.case.mode for verdict in verdicts})
    right = [verdict for verdict in verdicts if verdict.outcome is Outcome.RIGHT]
    worst = max(right, key=lambda verdict: verdict.worst_ratio, default=None)
    return {
        "modes": {
            mode.name: Counter(verdict.outcome.value for verdict in verdicts if verdict.case.mode is mode)
            for mode in modes
        },
        "worst_right": None if worst is None else {"ratio": worst.worst_ratio, "case": repr(worst.case)},
        "declined": Counter(verdict.reason for verdict in verdicts if verdict.outcome is Outcome.DECLINED),
    }


def as_record(verdict: Verdict) -> dict[str, Any]:
    """One verdict as JSON; findings and the reproduction only where something is wrong."""
    record: dict[str, Any] = {
        "case": repr(verdict.case),
        "outcome": verdict.outcome.value,
        "worst_ratio": round(verdict.worst_ratio, 4),
        "worst_error": round(verdict.worst_error, 6),
    }
    if verdict.outcome in (Outcome.DECLINED, Outcome.FAILED):
        record |= {"reason": verdict.reason}
    if verdict.outcome is Outcome.WRONG:
        record |= {
            "num_wrong": verdict.num_wrong,
            "reason": verdict.reason,
            "findings": [str(finding) for finding in verdict.findings],
            "reproduce": verdict.reproduce,
        }
    return record


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, print, record. The exit status is 1 if anything is wrong, or nothing was judged."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "implementation",
        nargs="?",
        help="a module with FlashInfer's names (default: FlashInfer's kernels where the GPU has them, else the portable ones)",
    )
    parser.add_argument("--geometries", nargs="+", choices=sorted(GEOMETRIES), default=sorted(TENSOR_PARALLEL))
    parser.add_argument("--page-sizes", nargs="+", type=int, default=list(PAGE_SIZES))
    parser.add_argument("--q-lens", nargs="+", type=int, default=list(Q_LENS))
    parser.add_argument("--kv-dtype", choices=sorted(DTYPES), default="bfloat16", help="of the K/V cache")
    parser.add_argument("--arithmetic", choices=sorted(DTYPES), help="of the control; see ForwardCase.arithmetic")
    parser.add_argument("--jobs", type=int, default=1, help="processes; they share one GPU")
    parser.add_argument("--out", help="where to write the report, JSON")
    options = parser.parse_args(argv)
    # Only when nothing was named: finding the default imports it, and Triton or FlashInfer with it.
    implementation = options.implementation or default_implementation().__name__
    verdicts = []
    shares = [
        [
            replace(case, kv_dtype=DTYPES[options.kv_dtype], arithmetic=DTYPES.get(options.arithmetic))
            for case in survey_cases([name], [page_size], options.q_lens)
        ]
        for name in options.geometries
        for page_size in options.page_sizes
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(judge_cases, implementation, share) for share in shares]
        for share, future in zip(shares, futures, strict=True):
            judged = _result(future, implementation, share)
            verdicts += judged
            for verdict in judged:
                if verdict.outcome in (Outcome.WRONG, Outcome.FAILED):
                    print(verdict, flush=True)
    report = {
        "implementation": implementation,
        "environment": environment(),
        "summary": summary(verdicts),
        "verdicts": [as_record(verdict) for verdict in verdicts],
    }
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=1)
    print(json.dumps(report["summary"], indent=1))
    judged = [verdict for verdict in verdicts if verdict.outcome is not Outcome.DECLINED]
    return 1 if not judged or any(verdict.outcome is not Outcome.RIGHT for verdict in judged) else 0


if __name__ == "__main__":
    sys.exit(main())
