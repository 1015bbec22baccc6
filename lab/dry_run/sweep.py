"""Compare the lab's rules for unsupported calls (`why_not`) with FlashInfer's own launcher on SM100 and SM103, for many calls
with different arguments (`lab.dry_run.sweep_points`).

`why_not` refuses a call rightly if the launcher fails for the same reason, or launches a kernel that misreads the call: its
descriptors have other strides, the kernel's name has other sizes, or the mask is ignored. `why_not` may also refuse a call for
which the launcher fails with more or longer requests.

`python -m lab.dry_run.sweep FOLDER` writes the results.
"""

import argparse
import json
import lzma
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lab.calls.dsv4_decode import TwoPools
from lab.calls.problem import AttentionCall, PagedAttention
from lab.checks.parameters.covering import Point
from lab.dry_run import build, kernel_table
from lab.dry_run.launches import Launch, TensorMap
from lab.dry_run.machine import GPUS, Machine, machine
from lab.dry_run.sweep_points import SWEPT, points
from lab.exit_status import ExitStatus
from lab.files import write_text
from lab.gpus import Capability
from lab.kernels import flashinfer_call, trtllm
from lab.kernels.support import Kernel, Problem, why_not
from lab.kernels.support.trtllm import kernel_for
from lab.kernels.support.trtllm_gen import LIMITS, division
from lab.provenance import environment
from lab.reports.tables import grouped, markdown_of, table_of_lines

SWEPT_GPUS = ("b200", "b300")
DRAWN = 1000  # number of random calls of each function
MOST_WORDS = 500  # most characters of a recorded failure
# exceptions with which the launcher and FlashInfer's Python code refuse a call
REFUSALS = (RuntimeError, ValueError, NotImplementedError, AssertionError, TypeError)


BUILT = "no kernel of these dtypes, sizes and masks"
# By reason: a pattern of the messages of FlashInfer's launcher, of its Python code and of `misread`; and a pattern of the
# sentences with which `lab.kernels.support.trtllm_gen` refuses a call.
REASONS = {
    BUILT: (
        r"Missing TRTLLM-GEN kernel|kernels not found|Expect \(32 <= headDim|headDimPerCtaV is not supported|"
        r"Unsupported (out_dtype|\w+ data type|head dimensions|MLA dimensions)|Invalid dtype of out|requires block_size|"
        r"head dimensions|Expected (query head dim|[\d, ]+or \d+ query heads)|only supports BF16",
        r"table of FlashInfer|has kernels|is built for|query's dtype|(takes|reads|writes) .*(fp16|bf16|e4m3|bfloat16)",
    ),
    "query heads that one CTA cannot take": (
        r"numHeadsQ/numHeadsKv is not supported|64 < num_heads_q < 128|must be <= 64, got",
        r"query heads",
    ),
    "an address or stride that the launcher cannot hand on": (
        r"0b1111|address|stride|aligned",
        r"bytes at a time|strides?\b|contiguous",
    ),
    "an LSE with cum_seq_lens_q": (r"return_lse/lse with cum_seq_lens_q", r"no LSE with"),
    "a draft mask": (r"the mask is not read", r"takes no mask"),
    "a division by max_seq_len": (r"SIGFPE", r"divides by max_seq_len"),
    "selected entries": (r"sparse_mla_top_k|SparseMlaTopK|selected entries", r"sparse_mla_top_k|selected entries"),
}


@dataclass(frozen=True)
class Verdict:
    call: str  #: name of the function
    non_default: dict[str, Any]  #: the values, by axis, in which the call differs from the default call
    refusal: str | None  #: the sentence with which `why_not` refuses the call; None if it accepts the call
    #: the error of the launcher or FlashInfer, or a sentence about a misread call; None if the call was launched correctly
    failure: str | None
    kernel: str | None  #: the attention kernel's name, or None
    agreement: str  #: a kind of agreement in `AGREED`, or a description of the disagreement


AGREED = ("taken by both", "refused by both", "refused for longer requests", "in a later table")


def sweep(gpu_name: str, drawn: int = DRAWN, every: int = 1, seed: int = 0) -> Iterator[Verdict]:
    """Yield whether the lab and the launcher refuse each `every`-th call of `points` (`drawn` random calls per function)."""
    with unguarded_machine(gpu_name) as gpu:
        for call in SWEPT:
            for index, point in enumerate(points(call, drawn, seed)):
                if index % every == 0:
                    yield judged(gpu, call, point)


@contextmanager
def unguarded_machine(gpu: str) -> Iterator[Machine]:
    """In the `with` block, simulate an absent GPU (`machine`). Calls that the lab's rules refuse also reach the launcher."""
    with machine(gpu) as made, mock.patch.object(flashinfer_call, "refuse_unsupported", return_value=None):
        yield made


def judged(gpu: Machine, call: AttentionCall, point: Point) -> Verdict:
    problem = SWEPT[call].make(point).problem()
    kernel = kernel_for(call, gpu.gpu.capability)
    refusal = why_not(kernel, gpu.gpu.capability, problem)
    failure, name = _launched(gpu, call, point)
    if refusal is None and failure is None:
        agreement = "taken by both"
    elif failure is None:
        # The launcher selects an MLA kernel by the number and the lengths of requests.
        longer = point | {"batch_size": 40, "max_kv_len": 131072}
        fails_longer = call is AttentionCall.MLA_DECODE and _launched(gpu, call, longer)[0] is not None
        agreement = "refused for longer requests" if fails_longer else "refused, and launched"
    else:
        by_launcher = {why for why, (pattern, _) in REASONS.items() if re.search(pattern, failure)}
        refusals = list(_refusals(kernel, gpu.gpu.capability, problem))
        by_lab = {why for why, (_, pattern) in REASONS.items() if any(re.search(pattern, each) for each in refusals)}
        if refusal is not None and by_launcher & by_lab:
            agreement = "refused by both"
        elif by_launcher == {BUILT} and _is_in_a_later_table(gpu, problem):
            agreement = "in a later table"
        else:
            agreement = "taken, and the launcher fails" if refusal is None else "refused for another reason"
    plain = SWEPT[call].model.default
    non_default = {axis: value for axis, value in point.items() if value != plain[axis]}
    return Verdict(call.value, non_default, refusal, failure, name, agreement)


def _refusals(kernel: Kernel, capability: Capability, problem: Problem) -> Iterator[str]:
    """Yield every sentence with which a kernel's rules refuse a call (`lab.kernels.support.why_not` returns only the first)."""
    if (words := kernel.dtypes.why_not(problem.query.dtype, problem.kv_dtype, problem.out_dtype)) is not None:
        yield words
    yield from (limit.words for limit in kernel.sizes if limit.size(problem) not in limit.among)
    yield from (kernel.says.get(each, each.value) for each in problem.features() - kernel.honours)
    of_problem = (limit(problem) for limit in LIMITS.get(problem.call, ()))
    yield from filter(None, (*of_problem, kernel.limits(capability, problem)))


def _is_in_a_later_table(gpu: Machine, problem: Problem) -> bool:
    """Return True if FlashInfer 0.7.2's launcher would select a kernel that 0.6.13's kernel table does not have."""
    if "mSeparateTransformedKv" not in gpu.table_lacks:
        return False
    if problem.call is AttentionCall.DECODE:
        return (problem.query.dtype, problem.kv_dtype) == (torch.bfloat16, torch.float8_e4m3fn)
    return (
        isinstance(problem, PagedAttention)
        and problem.call is AttentionCall.MLA_DECODE
        and problem.num_qo_heads in (8, 16, 32)
        and (problem.max_q_len > 1 and problem.batch_size <= 16 and problem.page_size == 32)
    )


def _launched(gpu: Machine, call: AttentionCall, point: Point) -> tuple[str | None, str | None]:
    """Make the call that `point` describes. Return (sentence about an error or misread argument, kernel name), each or None."""
    arguments = SWEPT[call].make(point)
    problem = arguments.problem()
    # A division by 0 would end the process, so a predicted one runs in a child. An unpredicted one ends this process visibly.
    divides = isinstance(problem, PagedAttention) and division in LIMITS.get(call, ()) and division(problem)
    if divides and not _survives(call, arguments):
        return "the process was killed by SIGFPE", None
    gpu.clear()
    try:
        getattr(trtllm, call.value)(**vars(arguments))
    except REFUSALS as error:
        words = re.sub(r"(?<= at )\S*/", "", f"{type(error).__name__}: {error}")  # without the folders of a file's path
        return words.strip()[:MOST_WORDS], None
    launch = next((each for each in gpu.launches if each.params is not None), None)
    if launch is None:
        return None, None  # FlashInfer itself filled the output
    return misread(launch, problem), launch.name


def _survives(call: AttentionCall, arguments: Any) -> bool:
    child = os.fork()
    if child == 0:
        try:
            getattr(trtllm, call.value)(**vars(arguments))
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1] != signal.SIGFPE


def misread(launch: Launch, problem: Problem) -> str | None:
    """Return a sentence about the first size, stride or mask that a launch misreads; None if it reads all correctly."""
    sizes = re.search(r"H(?:Qk)?(\d+)(?:HV(\d+))?(?:HVPerCta\d+)?(?:Packed|Paged|Separate|Contiguous)", launch.name)
    assert sizes is not None, launch.name
    of_kernel = (int(sizes[1]), int(sizes[2] or sizes[1]))
    if of_kernel != (problem.head_dim, problem.v_head_dim):
        return f"launched with the head dimensions {of_kernel}"
    maps = {each.member: each for each in launch.tma}
    grouped = maps["tmaQ_"].dims[1]
    if problem.group % grouped:
        return f"launched with {grouped} query heads of several K/V heads in one CTA: numHeadsQ/numHeadsKv is not supported"
    if isinstance(problem, PagedAttention):
        top_k = 0 if problem.selected is None else problem.selected.shape[1]
        assert launch.params is not None
        if (launch.params.sparse_attn_top_k, launch.params.use_block_sparse_attention) != (
            top_k,
            problem.is_block_sparse,
        ):
            return "launched with another number of selected entries, or with another form of the page table"
        return _misread_paged(maps, problem)
    sides = (("tmaK_", problem.key), ("tmaV_", problem.value))
    if not problem.query.is_contiguous():
        return "launched with strides of a contiguous query"  # the launcher gets only the query's address
    return next(
        (f"{name} has other strides" for name, side in sides if not _is_read(maps[name], side.unsqueeze(0))), None
    )


def _misread_paged(maps: dict[str, TensorMap], problem: PagedAttention) -> str | None:
    if problem.mask is not None:
        return "launched, and the mask is not read"
    query = problem.query
    given = [stride * query.element_size() for stride in query.stride()[:2]]
    read = (maps["tmaQ_"].strides_bytes[2], maps["tmaQ_"].strides_bytes[0])
    if any(size > 1 and own != its for size, own, its in zip(query.shape, given, read, strict=False)):
        return f"launched with other strides of the query: {read}"
    sides = {"tmaK_": problem.k_cache, "tmaV_": problem.v_cache}
    if problem.call is AttentionCall.MLA_DECODE:
        sides["tmaV_"] = problem.k_cache
    if isinstance(problem, TwoPools):
        for name, pool in (("tmaKSlidingWindowKvPool_", problem.window_cache), ("tmaK_", problem.k_cache)):
            row_bytes = pool.shape[3] * pool.element_size()
            if (maps[name].address, maps[name].strides_bytes) != (pool.data_ptr(), (row_bytes,)):
                return f"launched with other strides of {name}"
        return None
    if problem.selected is not None:
        cache, (row_bytes,) = problem.k_cache, maps["tmaK_"].strides_bytes
        page, _, token = (stride * cache.element_size() for stride in cache.stride()[:3])
        if (token, page) != (row_bytes, row_bytes * problem.page_size):
            return "launched with other strides of selected entries"
        sides = {}
    for name, side in sides.items():
        if not _is_read(maps[name], side.transpose(1, 2)):
            return f"launched with other strides of {name}"
    for name, factors in (("tmaKSf_", problem.k_scale_factors), ("tmaVSf_", problem.v_scale_factors)):
        if factors is not None and not _is_read(maps[name], factors.transpose(1, 2), is_joined=True):
            return f"launched with other strides of {name}"
    return None


def _is_read(tma: TensorMap, side: torch.Tensor, is_joined: bool = False) -> bool:
    """Return True if a TMA descriptor has the address and strides of `side`: K or V, or their scale factors, [pages, tokens,
    heads, last dimension]. `is_joined`: True if the tokens of a head must be adjacent, as for scale factors.
    """
    pages, tokens, heads, width = side.shape
    page, token, head = (stride * side.element_size() for stride in side.stride()[:3])
    if tma.address != side.data_ptr():
        return False
    if (heads > 1 and tma.strides_bytes[1] != head) or (pages > 1 and tma.strides_bytes[2] != page):
        return False
    joined = tokens // tma.dims[1] if tma.dims[1] else 1
    is_packed = token == width * side.element_size()
    return tokens == 1 or (tma.strides_bytes[0] == token * joined and (is_packed or (joined == 1 and not is_joined)))


def counted(verdicts: Sequence[Verdict]) -> dict[str, Counter[str]]:
    return {call.value: Counter(each.agreement for each in verdicts if each.call == call.value) for call in SWEPT}


def record(verdicts: Mapping[str, Sequence[Verdict]]) -> dict[str, Any]:
    table = kernel_table.newest()
    return {
        "environment": environment(),
        "flashinfer": build.flashinfer_version(),
        "table": table.source,
        "table_lacks": table.lacks(build.launcher_members()),
        "counts": {name: counted(each) for name, each in verdicts.items()},
        "verdicts": {name: [asdict(verdict) for verdict in each] for name, each in verdicts.items()},
    }


def page(verdicts: Mapping[str, Sequence[Verdict]]) -> str:
    table = kernel_table.newest()
    rows = []
    for name, each in verdicts.items():
        for call, counts in counted(each).items():
            agreed = [counts[agreement] for agreement in AGREED]
            cells = (counts.total(), *agreed, counts.total() - sum(agreed))
            rows.append((GPUS[name].name, f"`{call}`", *(f"{cell:,}" for cell in cells)))
    lacking = ", ".join(table.lacks(build.launcher_members()))
    flags = f"Flags of the launcher that the kernel table lacks count as false: {lacking}. " if lacking else ""
    blocks = [
        f"# `why_not` against the launcher of FlashInfer {build.flashinfer_version()}",
        f"The launcher chose among the kernels of {table.source}, and no kernel ran. {flags}"
        "`python -m lab.dry_run.sweep` wrote this page and a JSON file with every call.",
        markdown_of(table_of_lines(("GPU", "call", "calls", *AGREED, "disagree"), rows)),
    ]
    every = [each for of_gpu in verdicts.values() for each in of_gpu]
    later = "in a later table"
    for title, among in {
        "Refusals": [each for each in every if each.refusal and each.agreement in AGREED],
        "Taken, from a later table": [each for each in every if not each.refusal and each.agreement == later],
        "Disagreements": [each for each in every if each.agreement not in AGREED],
    }.items():
        examples = markdown_of(table_of_lines(EXAMPLES, list(_examples(among)))) if among else "None."
        blocks += [f"## {title}", examples]
    return "\n\n".join(blocks) + "\n"


EXAMPLES = ("call", "of the launcher", "calls", "such as", "`why_not`", "launcher")


def _reason_of(verdict: Verdict) -> str:
    reasons = sorted(why for why, (pattern, _) in REASONS.items() if re.search(pattern, verdict.failure or ""))
    return (" or ".join(reasons) if verdict.failure else verdict.agreement) or "another reason"


def _examples(verdicts: Iterable[Verdict]) -> Iterator[tuple[str, ...]]:
    kinds = grouped(((each.call, _reason_of(each), each.agreement), each) for each in verdicts)
    for (call, why, _), found in kinds.items():
        plainest = min(found, key=lambda each: len(each.non_default))
        failure = (plainest.failure or "launches it").partition(": qkvLayout")[0]
        non_default = ", ".join(f"{axis} {value}" for axis, value in plainest.non_default.items()) or "the plain one"
        yield f"`{call}`", why, f"{len(found):,}", non_default, plainest.refusal or "takes it", failure


def main(arguments: list[str] | None = None) -> int:
    """Compare which calls the lab and FlashInfer's launcher refuse, among many calls for a B200 and a B300. Write the results
    as JSON and as a page.
    """
    parser = argparse.ArgumentParser(prog="python -m lab.dry_run.sweep", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--drawn", type=int, default=DRAWN, help=f"random calls of each function (default {DRAWN})")
    given = parser.parse_args(arguments)
    if (reason := build.why_not_built()) is not None:
        parser.error(reason)
    verdicts = {name: list(sweep(name, given.drawn)) for name in SWEPT_GPUS}
    name = f"sweep-{build.flashinfer_version()}"
    given.folder.mkdir(parents=True, exist_ok=True)
    data = json.dumps(record(verdicts), indent=None).encode()
    (given.folder / f"{name}.json.xz").write_bytes(lzma.compress(data, preset=9))
    write_text(given.folder / f"{name}.md", page(verdicts))
    counts = Counter(each.agreement for of_gpu in verdicts.values() for each in of_gpu)
    print(", ".join(f"{count:,} {agreement}" for agreement, count in counts.most_common()))
    return ExitStatus.DONE if set(counts) <= set(AGREED) else ExitStatus.WRONG


if __name__ == "__main__":
    sys.exit(main())
