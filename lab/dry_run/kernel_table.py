"""Read and write the table of trtllm-gen's kernels, from which FlashInfer's launcher selects a kernel.

`python -m lab.dry_run.kernel_table WHEEL_OR_FOLDER` converts flashinfer-cubin's C++ header `flashInferMetaInfo.h` to the file
in which the lab keeps the table: a compressed header with all columns that a launcher reads to select a kernel.

The newest flashinfer-cubin on the package index is 0.6.13, whose table matches the launcher of flashinfer-python 0.6.13. The
launcher of a later FlashInfer reads flags that this table does not have; `header` writes them as false. So the selection of a
later launcher *depends on the table of 0.6.13*: later kernels are missing, and whether an older kernel has a newer flag is not
known.
"""

import argparse
import enum
import functools
import lzma
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path

import torch

from lab.calls.problem import E4M3

HEADER_NAME = "flashInferMetaInfo.h"
FACTS = f"{HEADER_NAME}.xz"
STRUCT = "TllmGenFmhaKernelMetaInfo"
# Columns without facts about a kernel: its machine code, which is not run here, and reserved members.
WITHOUT_FACTS = ("mCubin", "mCubinSize", "sha256", "mReserved1", "mReserved2")
NO_MACHINE_CODE = '"' + 64 * "0" + '"'


class MaskType(enum.IntEnum):
    """The masks of trtllm-gen's kernels: FlashInfer's `TrtllmGenAttentionMaskType` (`fmhaRunnerParams.h`)."""

    DENSE = 0
    CAUSAL = 1
    SLIDING_OR_CHUNKED_CAUSAL = 2
    CUSTOM = 3


DTYPES = {
    "DATA_TYPE_FP16": torch.float16,
    "DATA_TYPE_BF16": torch.bfloat16,
    "DATA_TYPE_E4M3": E4M3,
    "DATA_TYPE_INT8": torch.int8,
    "DATA_TYPE_E2M1": torch.uint8,  # two NVFP4 elements per byte
}
CONTEXT = 0  # FmhaKernelType::Context
PAGED = 2  # QkvLayout::PagedKv


@dataclass(frozen=True)
class KernelFacts:
    """The properties of a trtllm-gen kernel that determine what it computes, read from its row of the kernel table."""

    name: str  #: name under which the kernel is launched
    dtypes: Mapping[
        str, torch.dtype
    ]  #: of the elements of "Q", "K", "V" and "O"; uint8 is NVFP4, two elements per byte
    #: head_dim of the query and K, and of V and the output
    head_dim_qk: int
    head_dim_v: int
    mask: MaskType  #: the mask in the kernel's name. A generation kernel is causal even if its name says dense.
    is_context: bool  #: True for the context phase, False for generation (decode calls)
    is_paged: bool  #: K and V are paged
    is_sparse: bool  #: the kernel reads only selected keys


@dataclass(frozen=True)
class KernelTable:
    """The table of trtllm-gen's kernels (flashInferMetaInfo.h), with one row per kernel. It is stored by column."""

    source: str  #: origin of the table, such as "flashinfer-cubin 0.6.13"
    types: dict[str, str]  #: C++ type of each column, by FlashInfer's member name
    columns: dict[str, tuple[str, ...]]  #: values of each column, one string per kernel, as in the header

    def __len__(self) -> int:
        return len(self.columns["mFuncName"])

    def row(self, index: int) -> dict[str, str]:
        return {name: values[index] for name, values in self.columns.items()}

    def lacks(self, members: frozenset[str]) -> tuple[str, ...]:
        return tuple(sorted(members - set(self.columns)))


def parsed(text: str, source: str) -> KernelTable:
    """Parse the text of a header `flashInferMetaInfo.h`. Raises ValueError if the text is not such a header."""
    struct = re.search(rf"struct {STRUCT}\s*\{{(.*?)\}};", text, re.DOTALL)
    rows = [[value.strip() for value in row.split(",")] for row in re.findall(r"^\{ (.*)\},?$", text, re.MULTILINE)]
    if struct is None or not rows:
        raise ValueError(f"{source}: no {HEADER_NAME} with a struct {STRUCT} and rows of kernels")
    members = re.findall(r"^\s*([\w ]+?[ *]+)(\w+);", struct[1], re.MULTILINE)
    types = {name: kind.strip() for kind, name in members}
    if {len(row) for row in rows} != {len(types)}:
        raise ValueError(f"{source}: rows of {sorted({len(row) for row in rows})} values, and {len(types)} members")
    rows.sort(key=lambda row: row[list(types).index("mFuncName")])
    columns = dict(zip(types, zip(*rows, strict=True), strict=True))
    kept = [name for name in types if name not in WITHOUT_FACTS]
    return KernelTable(source, {name: types[name] for name in kept}, {name: columns[name] for name in kept})


@functools.cache
def recorded() -> KernelTable:
    text = lzma.decompress((resources.files("lab.dry_run") / "data" / FACTS).read_bytes()).decode()
    return parsed(text, text.removeprefix("// ").partition(",")[0])


def newest() -> KernelTable:
    """Return the kernel table in the folder `FLASHINFER_CUBIN_DIR`, else of the installed flashinfer-cubin, else the lab's."""
    folder = os.environ.get("FLASHINFER_CUBIN_DIR")
    if folder and any(Path(folder).rglob(HEADER_NAME)):
        return parsed(header_text(Path(folder)), f"FLASHINFER_CUBIN_DIR={folder}")
    try:
        installed = metadata.distribution("flashinfer-cubin")
    except metadata.PackageNotFoundError:
        return recorded()
    folder = str(installed.locate_file("flashinfer_cubin"))
    return parsed(header_text(Path(folder)), f"flashinfer-cubin {installed.version}")


@functools.cache
def kernel_facts(name: str) -> KernelFacts:
    """Return what the newest kernel table says about a trtllm-gen kernel. Raises KeyError for an unknown name or dtype."""
    table, rows = _newest()
    row = table.row(rows[name])
    return KernelFacts(
        name,
        dtypes={side: DTYPES[row[f"mDataType{side}"]] for side in "QKVO"},
        head_dim_qk=int(row["mHeadDimQk"]),
        head_dim_v=int(row["mHeadDimV"]),
        mask=MaskType(int(row["mMaskType"])),
        is_context=int(row["mKernelType"]) == CONTEXT,
        is_paged=int(row["mQkvLayout"]) == PAGED,
        is_sparse=int(row["mSparseAttn"]) != 0,
    )


@functools.cache
def _newest() -> tuple[KernelTable, dict[str, int]]:
    table = newest()
    return table, {name.strip('"'): index for index, name in enumerate(table.columns["mFuncName"])}


def header(table: KernelTable, members: frozenset[str]) -> str:
    """Return the text of `flashInferMetaInfo.h`. Columns of `members` that the table lacks are added with only false."""
    lacking = table.lacks(members)
    types = table.types | dict.fromkeys(lacking, "bool")
    struct = [f"  {kind}{'' if kind.endswith('*') else ' '}{name};" for name, kind in types.items()]
    false = ", false" * len(lacking)
    rows = [f"{{ {', '.join(row)}{false}, {NO_MACHINE_CODE}}}," for row in zip(*table.columns.values(), strict=True)]
    return "\n".join(
        [
            f"// {table.source}, written by lab.dry_run.kernel_table; false in every row: {', '.join(lacking) or 'nothing'}",
            "#pragma once",
            "#include <flashinfer/trtllm/fmha/kernelParams.h>",
            "namespace tensorrt_llm { namespace kernels {",
            f"struct {STRUCT} {{",
            *struct,
            "  const char* sha256;",
            "};",
            f"static const {STRUCT} sTllmGenFmhaKernelMetaInfos[] = {{",
            rows[0],
            "#ifndef __CUDA_ARCH__  // the host reads it: nvcc's pass for the device is spared",
            *rows[1:],
            "#endif",
            "};",
            "}}  // namespace tensorrt_llm::kernels",
            "",
        ]
    )


def header_text(path: Path) -> str:
    if path.is_file():
        with zipfile.ZipFile(path) as wheel:
            found = [name for name in wheel.namelist() if name.endswith(HEADER_NAME)]
            if len(found) == 1:
                return wheel.read(found[0]).decode()
    else:
        found = [str(each) for each in sorted(path.rglob(HEADER_NAME))]
        if len(found) == 1:
            return Path(found[0]).read_text()
    raise ValueError(f"{path}: wanted one {HEADER_NAME}, found {len(found)}: {', '.join(found)}")


def main(arguments: list[str] | None = None) -> None:
    """Convert flashinfer-cubin's kernel table to the file in which the lab keeps it."""
    parser = argparse.ArgumentParser(prog="python -m lab.dry_run.kernel_table", description=main.__doc__)
    parser.add_argument("path", type=Path, help="flashinfer-cubin's wheel, or a folder that it lies in")
    parser.add_argument("--version", help="flashinfer-cubin's version, where the path's name does not say it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data" / FACTS)
    given = parser.parse_args(arguments)
    found = re.search(r"flashinfer_cubin-([0-9][\w.]*?)-", given.path.name)
    if given.version is None and found is None:
        parser.error(f"{given.path.name} names no version of flashinfer-cubin; say --version")
    version = given.version or (found[1] if found else "")
    table = parsed(header_text(given.path), f"flashinfer-cubin {version}")
    given.out.write_bytes(lzma.compress(header(table, frozenset()).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{given.out}: {len(table)} kernels of {table.source}, {given.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
