"""Runs every Triton kernel of the lab on small, awkward problems on a GPU, and checks the results: for compute-sanitizer.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m tests.kernels.every_triton_kernel
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.kernels.every_triton_kernel

Without the caching allocator each tensor is an allocation of its own, so that an access beside it is noticed. It is an error if
a kernel of `lab.kernels` was not launched. `--with-defect` adds a kernel that stores one element after its tensor, which
memcheck must report.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import lab.kernels
from lab import references
from lab.kernels import portable
from studies.draft_scenarios import CHOICES, draft_scenario
from studies.draft_work import draft_work
from tests.cases import (
    CONTEXT,
    DECODE,
    MLA,
    RAGGED,
    block_sparse_arguments,
    context_arguments,
    decode_arguments,
    latent_batch,
    mla_arguments,
    pack_mask,
    ragged_arguments,
    ragged_batch,
    random_batch,
    sparse_arguments,
)
from tests.kernels.held import on

BOUND = 4 * 2.0**-8  # a weight and an output rounded to bf16, each at most one unit roundoff of its vector, times two
# Lengths around the edges of pages, tiles and stores; one row width each.
DRAFT_BATCHES = ("1x1", "3x63", "5x513", "2x4k")


def kernels() -> set[str]:
    """Names of the kernels that something in `lab.kernels` launches; what they call is named otherwise."""
    modules = [
        importlib.import_module(each.name) for each in pkgutil.walk_packages(lab.kernels.__path__, "lab.kernels.")
    ]
    named = {name: value for module in modules for name, value in vars(module).items()}
    found = {name for name, value in named.items() if isinstance(value, JITFunction) and name.endswith("_kernel")}
    return (
        found
        if torch.cuda.get_device_capability() == (9, 0)
        else found - {"hopper_attention_kernel", "hopper_mla_kernel"}
    )


def attention_problems() -> Iterator[tuple[str, dict[str, Any]]]:
    """Calls whose tiles, pages, splits and windows end in the middle of something."""
    half = {"heads": (8, 2), "head_dim": 64, "dtype": torch.bfloat16}
    options = {"out_dtype": None, "bmm1_scale": 0.125, "poison": float("nan"), "foreign_id": 0}
    triangle = [[[token <= row for token in range(3)] for row in range(3)] for _ in range(2)]
    sinks = torch.linspace(-1, 1, 8)
    yield DECODE, decode_arguments(random_batch([1, 1, 1], [1, 65, 4097], **half), 64, **options)
    yield DECODE, decode_arguments(random_batch([4, 4], [4, 1030], **half), 16, window_left=70, sinks=sinks, **options)
    yield DECODE, decode_arguments(random_batch([3, 3], [40, 129], **half), 32, mask=pack_mask(triangle), **options)
    yield CONTEXT, context_arguments(random_batch([1, 70, 129], [200, 70, 700], **half), 64, **options)
    yield DECODE, decode_arguments(random_batch([17, 17], [17, 2000], **half), 64, **options)  # 128 rows, in shares
    # Requests of two kinds, the first in shares: the second's in blocks of rows, then, after long prefixes, in shares.
    yield CONTEXT, context_arguments(random_batch([16, 1, 700, 17, 0], [1030, 65, 700, 17, 9], **half), 64, **options)
    yield CONTEXT, context_arguments(random_batch([1, 130, 4, 40], [4097, 2000, 300, 900], **half), 64, **options)
    if torch.cuda.get_device_capability() >= (8, 9):
        # Read as pairs in tiles of 16 and 32 rows, byte by byte in 64. On SM90 32, 64 and 160 rows are the Gluon kernel's.
        for q_len in (1, 8, 16, 40):
            batch = random_batch([q_len] * 2, [q_len + 1, 4097], **half, kv_dtype=torch.float8_e4m3fn)
            yield DECODE, decode_arguments(batch, 16, **options)
    for q_len, heads in ((1, 16), (2, 16), (5, 16)):  # tiles of 16, 32 and 64 rows
        yield MLA, deepseek(q_len, heads, [q_len, 65, 4097])
    selected = [list(range(row, row + 70)) for row in range(4)]  # of entries, a tile and a part of one
    entries = latent_batch([2, 2], [90, 4097], heads=16, rank=512, rope=64)
    yield MLA, sparse_arguments(entries, selected, 64, out=None, bmm1_scale=192**-0.5)
    pages = [[[0], [1, 40, 64]], [[], [0, 64]]]
    yield DECODE, block_sparse_arguments(random_batch([1, 1], [1, 4097], **half), pages, 64, **options)
    for q_lens in ([1, 7, 13], [3, 64, 200]):  # tiles of 16 and of 128 rows; fewer keys than rows, and none
        batch = ragged_batch(q_lens, [200, 0, 129], dims=(192, 128))
        for rule in ({"is_causal": False}, {"window_left": 70, "attention_sinks": torch.linspace(-1, 1, 3)}):
            yield RAGGED, ragged_arguments(batch, out=None, **rule)


def deepseek(q_len: int, heads: int, kv_lens: list[int], **changes: Any) -> dict[str, Any]:
    """An MLA decode of DeepSeek-V3's sizes with sinks and the LSE, a NaN wherever no request has a key."""
    batch = latent_batch([q_len] * len(kv_lens), kv_lens, heads=heads, rank=512, rope=64)
    usual = {"out": None, "bmm1_scale": 192**-0.5, "sinks": torch.linspace(-1, 1, heads)}
    return mla_arguments(batch, 64, poison=float("nan"), foreign_id=0, **usual | changes)


def run_attention() -> None:
    for function, arguments in attention_problems():
        given = {name: on("cuda", value) for name, value in arguments.items()}
        out, _ = getattr(portable, function)(**given)
        # MLA's calls have no out_dtype: their output's dtype is that of the one they are given.
        exact = {"out": out.double()} if function in (MLA, RAGGED) else {"out_dtype": torch.float64}
        truth, _ = getattr(references, function)(**given | exact)
        worst = float(references.relative_l2(out, truth).max())
        assert worst <= BOUND, f"{function}: {worst}"


def run_metadata() -> None:
    names = [f"kv_indices/{schedule}" for schedule in CHOICES["kv_indices"][0]]
    names += [f"forward_metadata/{passes}" for passes in CHOICES["forward_metadata"][0]]
    for name in names:
        for batch in DRAFT_BATCHES:
            work = draft_work(draft_scenario(f"{name}/{batch}/steps5"), torch.device("cuda"))
            work.call()()
            assert work.check is not None
            work.check(work.arguments)


@triton.jit
def _store_after(tensor, size):
    tl.store(tensor + size, 0)


def run_defect() -> None:
    tensor = torch.zeros(128, dtype=torch.int32, device="cuda")
    _store_after[(1,)](tensor, tensor.numel())


def main() -> int:
    launched: set[str] = set()
    triton.knobs.runtime.launch_enter_hook.add(lambda metadata: launched.add(metadata.get()["name"]))
    run_attention()
    run_metadata()
    if "--with-defect" in sys.argv:
        run_defect()
    torch.cuda.synchronize()
    missing = kernels() - launched
    print(f"ran {len(launched)} kernels: {', '.join(sorted(launched))}" + (f"; not {missing}" if missing else ""))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
