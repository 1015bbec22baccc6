"""Find MLA or DeepSeek-V4 metadata that does not match its batch: lengths without padding or draft tokens, too narrow tables.

In a padded draft extend, lengths, page table and query rows must count the same padding. A test that repeats the formula of one
of them does not show this error. Here the metadata must equal the result of loops over requests, with -1 in the page table
after a request's pages, and attention with it must match the requests' K/V histories.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

from lab.checks.case_run import CaseRun
from lab.checks.explain.call_features import features_of_case
from lab.checks.parameters.metadata import builder_of, expect_metadata
from lab.checks.properties.check import Check, Scope
from lab.checks.properties.k16_metadata import expect_attention, judge_own_tensors
from lab.checks.properties.mla_modes import mla_mode_cases, two_pool_cases
from lab.metadata.engine.forward_mode import ForwardMode
from lab.workloads.inputs.expected_metadata import wrong_dsv4_metadata, wrong_eager_mla_metadata
from lab.workloads.inputs.mla_pass import MLAPass, build_mla_pass
from lab.workloads.interfaces import MetadataFunction
from lab.workloads.mla_case import MLACase

SMALL: dict[str, Any] = {"num_qo_heads": 2, "kv_lora_rank": 64, "qk_rope_head_dim": 16}
BLOCK = 4096  # tokens: the width of the page table is rounded up to this number


def _cases(scope: Scope) -> Iterator[MLACase]:
    if scope.interface is MetadataFunction.DSV4_METADATA:
        passes = two_pool_cases(4, num_qo_heads=2, kv_lora_rank=64)
        # Padding requests are added after the metadata was built, so that they test nothing here.
        yield from (case for case in passes if not case.num_padding_requests)
        return
    page_sizes = scope.ranges.mla_page_sizes
    for page_size in page_sizes if scope.is_full else page_sizes[:1]:
        yield from mla_mode_cases(page_size, (1, 4, 7) if scope.is_full else (4,), **SMALL)
        shared = {"page_size": page_size, **SMALL}
        # Requests near a multiple of BLOCK, which only padding rows or the draft exceed.
        yield MLACase(ForwardMode.DRAFT_EXTEND, (BLOCK - 1, 7), (1, 5), **shared)
        yield MLACase(ForwardMode.TARGET_VERIFY, (BLOCK - 2, 7), (4, 4), **shared)


def _judge(run: CaseRun) -> None:
    is_of_two_pools = run.case.compress_ratio is not None
    build = builder_of(run, MetadataFunction.DSV4_METADATA if is_of_two_pools else MetadataFunction.MLA_METADATA)
    forward = build_mla_pass(run.case, run.device, build)
    _parity(run, "the metadata", forward)
    expect_attention(run, forward)
    others = replace(run.case, prefix_lens=run.case.prefix_lens[::-1], q_lens=run.case.q_lens[::-1], seed=1)
    _parity(run, "the metadata of other requests", build_mla_pass(others, run.device, build))
    _parity(run, "the first pass's metadata, after another of its shape", forward)
    judge_own_tensors(run, build if is_of_two_pools else partial(build, attention=run.case.attention), forward)


def _parity(run: CaseRun, what: str, forward: MLAPass) -> None:
    case, built = forward.case, (forward.batch, forward.pool, cast(Any, forward.metadata))
    is_mla = case.compress_ratio is None
    wrongs = wrong_eager_mla_metadata(*built, case.attention) if is_mla else [wrong_dsv4_metadata(*built)]
    expect_metadata(run, what, wrongs, features_of_case(case))


INTERFACES = (MetadataFunction.MLA_METADATA, MetadataFunction.DSV4_METADATA)
CHECK = Check("K17", __doc__, _cases, _judge, INTERFACES, quick=6)
