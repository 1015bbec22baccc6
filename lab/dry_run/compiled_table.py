"""Compare the lab's rules for supported shapes (`why_not`) with the assertions in FlashInfer's sources of XQA, XQA MLA and
fmha_v2.

    python -m lab.dry_run.compiled_table results/blackwell-dry-run

compiles each shape in compiled.json again, and writes compiled.json and compiled.md. This takes about five minutes on an idle
core. The shapes lie just inside and just outside each limit of the kernels. To add a shape, add a row with "verdicts": [] and
"why_not": null to the file.
"""

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lab.dry_run import build, sweep_calls
from lab.dry_run.compiled import Compiled, Shape, compiled
from lab.files import write_text
from lab.gpus import sm_name
from lab.kernels.support import why_not
from lab.kernels.support.trtllm import FMHA_V2
from lab.kernels.support.xqa import XQA, XQA_MLA
from lab.provenance import environment
from lab.reports.tables import grouped

MLA_ROPE = 64
KERNELS = {kernel.name: kernel for kernel in (XQA, XQA_MLA, FMHA_V2)}
NAMES = {dtype: name for name, dtype in sweep_calls.DTYPES.items()}
METHOD = (
    "nvcc's front end compiled FlashInfer's own source with FlashInfer's own macros for each GPU (`lab.dry_run.compiled`). An "
    "assertion at the end of the source, which always fails, stopped nvcc before it generated code, and nothing was run. The "
    "compilation also checked that XQA's calls of `exactDiv` divide without a remainder, which FlashInfer's own flags leave "
    "unchecked."
)


@dataclass(frozen=True)
class JudgedShape:
    shape: Shape
    verdicts: tuple[Compiled, ...]  #: the compiler's verdict on each source
    why_not: str | None  #: the sentence with which the lab refuses the shape; None if the lab accepts it

    @property
    def refusal(self) -> str | None:
        return next((each.refusal for each in self.verdicts if each.refusal is not None), None)


def judged(shape: Shape) -> str | None:
    """Return the sentence with which the lab's rules refuse a call with these sizes and dtypes; None if they accept it."""
    sizes: dict[str, Any] = {
        "q_len": shape.q_len,
        "max_kv_len": shape.q_len,
        "page_size": shape.page_size,
        "batch_size": 1,
    }
    sizes |= {"dtypes": "/".join(NAMES[dtype] for dtype in shape.dtypes)}
    given: dict[str, Any] = {"bmm2_scale": 1.0, "backend": "xqa"}
    call: Any
    if shape.kernel is XQA_MLA:
        sizes |= {"heads": shape.group, "dims": (shape.head_dim - MLA_ROPE, MLA_ROPE)}
        given["block_tables"] = torch.zeros(1, 128, dtype=torch.int32)
        call = sweep_calls.mla_decode(sweep_calls.MLA_DECODE.default | sizes)
    else:
        sizes |= {"head_dim": shape.head_dim, "group": shape.group, "num_kv_heads": 1, "cache": "stacked HND"}
        if shape.kernel is FMHA_V2:
            del given["backend"]
            call = sweep_calls.context(sweep_calls.CONTEXT.default | sizes)
        else:
            call = sweep_calls.decode(sweep_calls.DECODE.default | sizes | {"window_left": 3 if shape.window else -1})
    return why_not(shape.kernel, shape.capability, replace(call, **given).problem())


def record(folder: Path, report: Callable[[str], None] = print) -> None:
    version = subprocess.run([str(build.nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    facts = environment() | {"nvcc": version.splitlines()[-1]}
    rows = []
    for shape in (row.shape for row in read(folder / "compiled.json")):
        rows.append(JudgedShape(shape, compiled(shape), judged(shape)))
        report(f"{_words(shape)}: {rows[-1].refusal or 'compiles'}")
    head = json.dumps({"method": METHOD, "environment": facts}, indent=1).removesuffix("\n}")
    body = ",\n  ".join(json.dumps(written(row)) for row in rows)
    write_text(folder / "compiled.json", f'{head},\n "rows": [\n  {body}\n ]\n}}\n')
    write_text(folder / "compiled.md", markdown(rows, facts))


def read(path: Path) -> tuple[JudgedShape, ...]:
    found = []
    for row in json.loads(path.read_text())["rows"]:
        verdicts, sentence = tuple(Compiled(**each) for each in row.pop("verdicts")), row.pop("why_not")
        q, kv, out = (sweep_calls.DTYPES[name] for name in row.pop("dtypes"))
        kernel, (major, minor) = KERNELS[row.pop("kernel")], row.pop("capability")
        found.append(JudgedShape(Shape(kernel, (major, minor), (q, kv, out), **row), verdicts, sentence))
    return tuple(found)


def written(row: JudgedShape) -> dict[str, Any]:
    named = {"kernel": row.shape.kernel.name, "dtypes": [NAMES[dtype] for dtype in row.shape.dtypes]}
    verdicts = {"verdicts": [asdict(each) for each in row.verdicts], "why_not": row.why_not}
    return vars(row.shape) | named | verdicts


def _words(shape: Shape) -> str:
    sizes = _formatted(shape, "head_dim {head_dim} group {group} q_len {q_len} pages of {page_size}{windowed}")
    return " ".join((shape.kernel.name, *_target(shape), sizes))


def markdown(rows: Sequence[JudgedShape], facts: dict[str, Any]) -> str:
    seconds = [each.seconds for row in rows for each in row.verdicts if each.seconds]
    refused = sum(row.refusal is not None for row in rows)
    differ = [row for row in rows if (row.refusal is None) != (row.why_not is None)]
    took = f"{statistics.median(seconds):.1f} s (median of {len(seconds)} sources, wall clock, on a shared machine)"
    lines = [
        "# What FlashInfer compiles for SM90, SM100, SM120 and SM121: XQA, XQA MLA and fmha_v2",
        "",
        f"{METHOD} The software was FlashInfer {facts['packages']['flashinfer-python']} and nvcc {facts['nvcc']}. nvcc took "
        f"{took}. `python -m lab.dry_run.compiled_table results/blackwell-dry-run` writes this page and compiled.json again.",
        "",
        f"Of {len(rows)} shapes (GPU, dtypes and sizes of a call), {len(rows) - refused} compile and {refused} do not compile. "
        f"The lab's function `why_not` says which shapes the lab declines. `why_not` agrees with nvcc on "
        f"{len(rows) - len(differ)} shapes. `why_not` accepts no shape that does not compile, and declines "
        f"{len(differ)} shapes of fmha_v2 that compile, because the lab never judged their head_dim. The column "
        "*shared memory* has the bytes of shared memory of the last shape in the column *compiles*.",
        "",
    ]
    for title, is_shown, columns, item in SECTIONS:
        lines += _section(title, [row for row in rows if is_shown(row.shape)], columns, item)
    return "\n".join(lines)


def _is_plain_xqa(shape: Shape) -> bool:
    return shape.kernel is XQA and shape.page_size == 64 and not shape.window


# Of each section of the page: title, which shapes it has, and, as formats of a shape's fields, the columns after GPU and
# dtypes by their headings, and a shape's text.
SECTIONS: tuple[tuple[str, Callable[[Shape], bool], Mapping[str, str], str], ...] = (
    (
        "XQA, one query row: query heads per K/V head",
        lambda shape: _is_plain_xqa(shape) and shape.q_len == 1,
        {"head_dim": "{head_dim}"},
        "{group}",
    ),
    (
        "XQA, several query rows: query heads per K/V head x rows",
        lambda shape: _is_plain_xqa(shape) and shape.q_len > 1,
        {"head_dim": "{head_dim}"},
        "{group} x {q_len}",
    ),
    (
        "XQA: page sizes, with and without a window",
        lambda shape: shape.kernel is XQA and not _is_plain_xqa(shape),
        {"head_dim": "{head_dim}", "heads x rows": "{group} x {q_len}"},
        "{page_size}{windowed}",
    ),
    (
        "XQA MLA: head_dim, query heads, page size",
        lambda shape: shape.kernel is XQA_MLA,
        {},
        "{head_dim}, {group}, {page_size}",
    ),
    ("fmha_v2 over a paged cache: head_dim", lambda shape: shape.kernel is FMHA_V2, {}, "{head_dim}"),
)


def _formatted(shape: Shape, text: str) -> str:
    return text.format(**vars(shape), windowed=" windowed" if shape.window else "")


def _target(shape: Shape) -> tuple[str, str]:
    return sm_name(shape.capability), "/".join(NAMES[dtype] for dtype in shape.dtypes)


def _section(title: str, rows: Iterable[JudgedShape], columns: Mapping[str, str], item: str) -> list[str]:
    heads = ("GPU", "query/K/V/output", *columns, "compiles", "shared memory", "does not compile")
    heads += ("compiles, and the lab declines it",)
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    gathered = grouped(
        ((*_target(row.shape), *(_formatted(row.shape, column) for column in columns.values())), row) for row in rows
    )
    for values, members in gathered.items():
        fits = [row for row in members if row.refusal is None]
        refused = grouped((row.refusal, _formatted(row.shape, item)) for row in members if row.refusal is not None)
        cells = (
            *values,
            "; ".join(_formatted(row.shape, item) for row in fits),
            " and ".join(str(each.shared_memory_bytes) for each in fits[-1].verdicts) if fits else "",
            "; ".join(f"{', '.join(items)}: `{why}`" for why, items in refused.items()),
            "; ".join(_formatted(row.shape, item) for row in fits if row.why_not is not None),
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return [*lines, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile XQA, XQA MLA and fmha_v2 for shapes at their limits.")
    parser.add_argument("folder", type=Path, help="of compiled.json, which has the shapes, and compiled.md")
    record(parser.parse_args().folder)
