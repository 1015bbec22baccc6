"""Find page offsets that do not fit in 32 bits: pools of more than 2**31 elements, or of more than 2**32 bytes.

A test's pool has a few hundred pages, and an engine's pool fills a GPU. Here all used pages lie at the end of such a large
pool, or only one used page does, which may be in any column of any page table. On a CPU, unused pages take no memory.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from lab.calls.problem import NVFP4
from lab.checks.case_run import CaseRun
from lab.checks.properties.check import KINDS, NVFP4_CACHE, Check, Scope
from lab.workloads.attention_case import AttentionCase, Contents

SIGNED_ELEMENTS = 2**31
UNSIGNED_BYTES = 2**32


def _cases(scope: Scope) -> Iterator[AttentionCase]:
    nvfp4 = NVFP4_CACHE.cases([*scope.balanced(1, 1, seed=18)], scope.ranges, 1)
    for case in chain(scope.balanced(1, 4, seed=18), nvfp4):
        packed = 2 if case.kv_dtype == NVFP4 else 1  # NVFP4 has two numbers in an element of one byte
        page_elements = case.num_kv_heads * case.page_size * case.head_dim // packed
        for first_element in sorted({SIGNED_ELEMENTS, UNSIGNED_BYTES // case.kv_dtype.itemsize}):
            first_page = -(-first_element // page_elements)
            for one_far in (False, True):
                storage = replace(case.storage, first_page=first_page, one_far=one_far)
                # Without a window all pages are read. With random contents each page matters, also a single far one.
                contents = Contents.RANDOM if one_far else Contents.NEEDLES
                yield replace(case, window_left=-1, contents=contents, storage=storage)


def _judge(run: CaseRun) -> None:
    run.base_call("far pages")


# NVFP4 cases are made above, because the smaller NVFP4 pages need another first page.
CHECK = Check("K15", __doc__, _cases, _judge, kinds=tuple(each for each in KINDS if each is not NVFP4_CACHE))
