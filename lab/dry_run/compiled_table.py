"""Compare the lab's rules for supported shapes (`why_not`) with the assertions in FlashInfer's sources of XQA, XQA MLA and
fmha_v2, for shapes at the limits of these kernels.

    python -m lab.dry_run.compiled_table results/blackwell-dry-run

writes compiled.json and compiled.md. It takes about five minutes on an idle core.
"""

import argparse
import itertools
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.calls.problem import E4M3, PagedAttention
from lab.dry_run import build, sweep_calls
from lab.dry_run.compiled import Compiled, Shape, compiled
from lab.dry_run.sweep_axes import CONTEXT, DECODE, MLA_DECODE
from lab.files import write_text
from lab.gpus import sm_name
from lab.kernels.support import why_not
from lab.kernels.support.fmha_v2 import FMHA_V2
from lab.kernels.support.xqa import XQA, XQA_MLA
from lab.provenance import environment

BF16, FP16, NVFP4 = torch.bfloat16, torch.float16, torch.uint8
SM90, SM100, SM103, SM120, SM121 = (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)
MLA_ROPE = 64
KERNELS = {kernel.name: kernel for kernel in (XQA, XQA_MLA, FMHA_V2)}
NAMES = {BF16: "bf16", FP16: "fp16", E4M3: "e4m3", NVFP4: "nvfp4"}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# By head_dim: numbers of query heads per K/V head just below and above each limit, for q_len_per_req 1.
ON_SM90 = {
    64: (1, 16, 17, 24, 25, 32, 33, 48, 49, 56, 57, 64, 65, 128),
    128: (24, 25, 32, 48, 56, 57, 64, 65),
    256: (24, 25, 32, 33),
    512: (16, 17),
}
ELSEWHERE = {64: (24, 32, 33, 48, 49, 64, 65), 128: (32, 49, 64), 256: (32, 33), 512: (16, 17)}
METHOD = (
    "nvcc's front end compiled FlashInfer's own source with FlashInfer's own macros for the target, and stopped at its end, "
    "where an assertion always fails (`lab.dry_run.compiled`). XQA's divisions that must be exact were checked too, which "
    "FlashInfer's own flags leave out. No code was generated, and nothing was run."
)


@dataclass(frozen=True)
class JudgedShape:
    """One shape (the sizes for which FlashInfer compiles a kernel), and whether the compiler and the lab support it."""

    shape: Shape
    verdicts: tuple[Compiled, ...]  #: the compiler's verdict on each source
    why_not: str | None  #: the sentence with which the lab refuses the shape; None if the lab accepts it

    @property
    def refusal(self) -> str | None:
        return next((each.refusal for each in self.verdicts if each.refusal is not None), None)


def shapes() -> tuple[Shape, ...]:
    return tuple(dict.fromkeys(itertools.chain(_one_row(), _several_rows(), _other_xqa(), _mla(), _context())))


def _one_row() -> Iterator[Shape]:
    for capability, kv in (
        *((SM90, kv) for kv in (BF16, E4M3)),
        *((SM100, kv) for kv in (BF16, E4M3)),
        *((SM120, kv) for kv in (BF16, E4M3, NVFP4)),
    ):
        for head_dim, groups in (ON_SM90 if capability == SM90 else ELSEWHERE).items():
            yield from (Shape(XQA, capability, (BF16, kv, BF16), head_dim, group) for group in groups)


def _several_rows() -> Iterator[Shape]:
    for capability, kv in ((SM90, BF16), (SM90, E4M3), (SM100, E4M3), (SM120, BF16), (SM120, E4M3), (SM120, NVFP4)):
        for group, q_len in ((1, 2), (16, 3), (64, 2), (65, 2)):
            yield Shape(XQA, capability, (BF16, kv, BF16), 256, group, q_len)
        yield Shape(XQA, capability, (BF16, kv, BF16), 128, 128, 2)
        yield Shape(XQA, capability, (BF16, kv, BF16), 272, 1, 2)


def _other_xqa() -> Iterator[Shape]:
    for capability, kv in ((SM90, BF16), (SM90, E4M3), (SM120, BF16), (SM120, E4M3), (SM120, NVFP4)):
        for head_dim in (16, 80, 144, 192, 272):
            yield Shape(XQA, capability, (BF16, kv, BF16), head_dim, 8)
    for head_dim, group in ((80, 64), (48, 57), (144, 32), (144, 24), (272, 16)):
        yield Shape(XQA, SM90, (BF16, BF16, BF16), head_dim, group)
    for capability, group in itertools.product((SM90, SM120), (24, 64)):
        yield Shape(XQA, capability, (FP16, FP16, FP16), 128, group)
    for capability, head_dim in itertools.product((SM90, SM120), (64, 128)):
        yield Shape(XQA, capability, (FP16, E4M3, E4M3), head_dim, 64)
    for capability, group in itertools.product((SM103, SM121), (24, 64)):
        yield Shape(XQA, capability, (BF16, BF16, BF16), 128, group)
    # Page sizes and windows where shared memory is nearly full.
    for page_size, window in ((16, True), (128, False)):
        for capability, kv, head_dim, group in (
            (SM90, BF16, 128, 64),
            (SM90, E4M3, 256, 32),
            (SM120, BF16, 256, 32),
            (SM120, NVFP4, 64, 64),
        ):
            yield Shape(XQA, capability, (BF16, kv, BF16), head_dim, group, 1, page_size, window)
        yield Shape(XQA, SM120, (BF16, BF16, BF16), 256, 32, 4, page_size, window)
    yield Shape(XQA, SM90, (BF16, BF16, BF16), 128, 8, page_size=8)


def _mla() -> Iterator[Shape]:
    for capability, dtype, page_size in itertools.product((SM120, SM121), (BF16, E4M3), (16, 128)):
        yield Shape(XQA_MLA, capability, (dtype, dtype, BF16), 576, 128, page_size=page_size)
    yield Shape(XQA_MLA, SM120, (BF16, BF16, BF16), 576, 64)
    yield Shape(XQA_MLA, SM120, (BF16, BF16, BF16), 320, 128)
    yield Shape(XQA_MLA, SM120, (BF16, BF16, BF16), 576, 128, page_size=8)
    yield Shape(XQA_MLA, SM120, (BF16, E4M3, BF16), 576, 128)
    yield Shape(XQA_MLA, SM90, (BF16, BF16, BF16), 576, 128)


def _context() -> Iterator[Shape]:
    every, taken = (16, 32, 48, 64, 72, 80, 96, 128, 192, 256, 512), (64, 128, 256)
    for dtypes, head_dims in (
        ((BF16,) * 3, every),
        ((FP16,) * 3, taken),
        ((E4M3,) * 3, every),
        ((E4M3, E4M3, BF16), taken),
        ((E4M3, E4M3, FP16), taken),
    ):
        yield from (Shape(FMHA_V2, SM90, dtypes, head_dim) for head_dim in head_dims)
    for head_dim in (32, *taken, 80, 96, 192, 512):
        yield Shape(FMHA_V2, SM120, (BF16,) * 3, head_dim)
    yield from (Shape(FMHA_V2, SM120, (FP16,) * 3, head_dim) for head_dim in taken)


def problem(shape: Shape) -> PagedAttention:
    sizes: dict[str, Any] = {
        "q_len": shape.q_len,
        "max_kv_len": shape.q_len,
        "page_size": shape.page_size,
        "batch_size": 1,
    }
    sizes["dtypes"] = "/".join(NAMES[dtype] for dtype in shape.dtypes)
    given: dict[str, Any] = {"bmm2_scale": 1.0, "backend": "xqa"}
    if shape.kernel is XQA_MLA:
        sizes |= {"heads": shape.group, "dims": (shape.head_dim - MLA_ROPE, MLA_ROPE)}
        given["block_tables"] = torch.zeros(1, 128, dtype=torch.int32)
        return replace(sweep_calls.mla_decode(MLA_DECODE.default | sizes), **given).problem()
    sizes |= {"head_dim": shape.head_dim, "group": shape.group, "num_kv_heads": 1, "cache": "stacked HND"}
    if shape.kernel is FMHA_V2:
        return replace(sweep_calls.context(CONTEXT.default | sizes), bmm2_scale=1.0).problem()
    sizes["window_left"] = 3 if shape.window else -1
    return replace(sweep_calls.decode(DECODE.default | sizes), **given).problem()


def judged(shape: Shape) -> str | None:
    """Return the sentence with which the lab refuses a shape (`why_not`); None if the lab accepts it."""
    return why_not(shape.kernel, shape.capability, problem(shape))


def record(folder: Path, report: Callable[[str], None] = print) -> None:
    version = subprocess.run([str(build.nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    facts = environment() | {"nvcc": version.splitlines()[-1]}
    rows = []
    for shape in shapes():
        rows.append(JudgedShape(shape, compiled(shape), judged(shape)))
        report(f"{_words(shape)}: {rows[-1].refusal or 'compiles'}")
    head = json.dumps({"method": METHOD, "environment": facts}, indent=1).removesuffix("\n}")
    body = ",\n  ".join(json.dumps(_written(row)) for row in rows)
    write_text(folder / "compiled.json", f'{head},\n "rows": [\n  {body}\n ]\n}}\n')
    write_text(folder / "compiled.md", markdown(rows, facts))


def read(path: Path) -> tuple[JudgedShape, ...]:
    return tuple(_read(row) for row in json.loads(path.read_text())["rows"])


def _written(row: JudgedShape) -> dict[str, Any]:
    shape = {field: getattr(row.shape, field) for field in ("head_dim", "group", "q_len", "page_size", "window")}
    names = {"kernel": row.shape.kernel.name, "capability": row.shape.capability}
    dtypes = {"dtypes": [NAMES[dtype] for dtype in row.shape.dtypes]}
    return names | dtypes | shape | {"verdicts": [asdict(each) for each in row.verdicts], "why_not": row.why_not}


def _read(row: dict[str, Any]) -> JudgedShape:
    verdicts, sentence = tuple(Compiled(**each) for each in row.pop("verdicts")), row.pop("why_not")
    q, kv, out = (DTYPES[name] for name in row.pop("dtypes"))
    kernel, (major, minor) = KERNELS[row.pop("kernel")], row.pop("capability")
    return JudgedShape(Shape(kernel, (major, minor), (q, kv, out), **row), verdicts, sentence)


def _words(shape: Shape) -> str:
    dtypes = "/".join(NAMES[dtype] for dtype in shape.dtypes)
    sizes = f"head_dim {shape.head_dim} group {shape.group} q_len {shape.q_len} pages of {shape.page_size}"
    return f"{shape.kernel.name} {sm_name(shape.capability)} {dtypes} {sizes}{' windowed' if shape.window else ''}"


def markdown(rows: Sequence[JudgedShape], facts: dict[str, Any]) -> str:
    seconds = [each.seconds for row in rows for each in row.verdicts if each.seconds]
    refused = sum(row.refusal is not None for row in rows)
    differ = [row for row in rows if (row.refusal is None) != (row.why_not is None)]
    plain = [row for row in rows if row.shape.page_size == 64 and not row.shape.window]
    xqa = [row for row in rows if row.shape.kernel is XQA]
    took = f"{statistics.median(seconds):.1f} s (median of {len(seconds)}, wall clock, beside other work)"
    lines = [
        "# What FlashInfer compiles for SM90, SM100, SM120 and SM121: XQA, XQA MLA and fmha_v2",
        "",
        f"{METHOD} FlashInfer {facts['packages']['flashinfer-python']}, nvcc {facts['nvcc']}; a source took {took}. "
        "`python -m lab.dry_run.compiled_table results/blackwell-dry-run` makes this page and compiled.json anew.",
        "",
        f"{len(rows)} shapes: {len(rows) - refused} compile, {refused} do not. `why_not` says the same of "
        f"{len(rows) - len(differ)}. It takes nothing that does not compile; {len(differ)} others, of fmha_v2, have a head_dim "
        "that the lab never judged. Shared memory, in bytes, is that of the last shape that compiles.",
        "",
    ]
    lines += _section(
        "XQA, one query row: query heads per K/V head",
        [row for row in xqa if row in plain and row.shape.q_len == 1],
        lambda shape: (*_target(shape), shape.head_dim),
        ("GPU", "query/K/V/output", "head_dim"),
        lambda shape: str(shape.group),
    )
    lines += _section(
        "XQA, several query rows: query heads per K/V head x rows",
        [row for row in xqa if row in plain and row.shape.q_len > 1],
        lambda shape: (*_target(shape), shape.head_dim),
        ("GPU", "query/K/V/output", "head_dim"),
        lambda shape: f"{shape.group} x {shape.q_len}",
    )
    lines += _section(
        "XQA: page sizes, with and without a window",
        [row for row in xqa if row not in plain],
        lambda shape: (*_target(shape), shape.head_dim, f"{shape.group} x {shape.q_len}"),
        ("GPU", "query/K/V/output", "head_dim", "heads x rows"),
        lambda shape: f"{shape.page_size}{' windowed' if shape.window else ''}",
    )
    lines += _section(
        "XQA MLA: head_dim, query heads, page size",
        [row for row in rows if row.shape.kernel is XQA_MLA],
        _target,
        ("GPU", "query/K/V/output"),
        lambda shape: f"{shape.head_dim}, {shape.group}, {shape.page_size}",
    )
    lines += _section(
        "fmha_v2 over a paged cache: head_dim",
        [row for row in rows if row.shape.kernel is FMHA_V2],
        _target,
        ("GPU", "query/K/V/output"),
        lambda shape: str(shape.head_dim),
    )
    return "\n".join(lines)


def _target(shape: Shape) -> tuple[str, str]:
    return sm_name(shape.capability), "/".join(NAMES[dtype] for dtype in shape.dtypes)


def _section(
    title: str,
    rows: Iterable[JudgedShape],
    key: Callable[[Shape], tuple[Any, ...]],
    columns: tuple[str, ...],
    item: Callable[[Shape], str],
) -> list[str]:
    heads = (*columns, "compiles", "shared memory", "does not compile", "compiles, and the lab declines it")
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    gathered: dict[tuple[Any, ...], list[JudgedShape]] = {}
    for row in rows:
        gathered.setdefault(key(row.shape), []).append(row)
    for values, members in gathered.items():
        fits = [row for row in members if row.refusal is None]
        refused: dict[str, list[str]] = {}
        for row in members:
            if row.refusal is not None:
                refused.setdefault(row.refusal, []).append(item(row.shape))
        cells = (
            *map(str, values),
            "; ".join(item(row.shape) for row in fits),
            " and ".join(str(each.shared_memory_bytes) for each in fits[-1].verdicts) if fits else "",
            "; ".join(f"{', '.join(items)}: `{why}`" for why, items in refused.items()),
            "; ".join(item(row.shape) for row in fits if row.why_not is not None),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile XQA, XQA MLA and fmha_v2 for shapes at their limits.")
    parser.add_argument("folder", type=Path, help="of compiled.json and compiled.md")
    record(parser.parse_args().folder)
