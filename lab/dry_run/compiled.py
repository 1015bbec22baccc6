"""Find out without a GPU which shapes XQA, XQA MLA and fmha_v2 support, from the static assertions in FlashInfer's sources.

nvcc compiles a source of FlashInfer with FlashInfer's macros. The lab adds an assertion that always fails: its message contains
the size of the kernel's shared memory, and nvcc stops there, before it generates code. If no other assertion fails, the source
supports the shape. This takes half a second on an idle core. Registers, code and outputs are not examined.

XQA's function `exactDiv` asserts that a division has no remainder, but FlashInfer compiles with NDEBUG, which removes the
assertion: it would compile a kernel that skips data. The lab refuses such a shape.

    compiled(Shape(XQA, (9, 0), (torch.bfloat16,) * 3, head_dim=128, group=20))
"""

import functools
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from lab.dry_run import build
from lab.gpus import Capability, family_of, sm_name
from lab.kernels.support import Kernel
from lab.kernels.support.trtllm import FMHA_V2
from lab.kernels.support.xqa import XQA

# The added assertion is in a template, so that the compiler's error contains the template's argument.
DISCOVERY = """
template <unsigned long long bytes> struct SharedMemory {{ static_assert(bytes == ~0ull, "all others hold"); }};
template struct SharedMemory<{bytes}>;
"""
VALUE = re.compile(r"SharedMemory<bytes> \[with bytes=(\d+)ULL\]")
ERROR = re.compile(r"^(?P<path>[^\n(]+)\((?P<line>\d+)\): error: (?P<words>.*)$", re.MULTILINE)
# Changes of XQA's sources. NDEBUG removes the assertion that a division has no remainder, so the first change makes such a
# division non-constant. The second change does so for a value that is computed even if its branch is not taken: outside a
# template `if constexpr` discards nothing.
CHANGES = (
    (
        "utils.h",
        """constexpr inline uint32_t exactDiv(uint32_t a, uint32_t b) {
  assert(a % b == 0);
  return a / b;
}""",
        """inline uint32_t inexact(uint32_t a, uint32_t b) { return a / b; }
HOST_DEVICE_FUNC constexpr inline uint32_t exactDiv(uint32_t a, uint32_t b) { return a % b ? inexact(a, b) : a / b; }""",
    ),
    ("mha.cu", "constexpr auto step_per_viter", "auto const step_per_viter"),
)
XQA_SOURCES = ("mha.cu", "mha_sm90.cu", "mla_sm120.cu")  # the sources with a kernel
XQA_BYTES, FMHA_V2_BYTES = "smemSize", {90: "Ktraits::BYTES_PER_SMEM", 120: "Kernel_traits_nl_causal::BYTES_PER_SMEM"}
TILED_BYTES = "Kernel_traits_nl_tiled_causal::BYTES_PER_SMEM"  # fmha_v2's kernel on SM120 for head_dim above 64
# The file names of fmha_v2's plain kernels: without ALiBi, soft cap, softmax statistics or skipped softmax.
PLAIN_FMHA_V2 = re.compile(r"_paged_kv_(\d+)(?:_output_\w+?)?(?:_tma_ws)?_sm(\d+)\.cu$")


@dataclass(frozen=True)
class Shape:
    """The sizes, dtypes and GPU for which FlashInfer compiles a module of XQA, XQA MLA or fmha_v2."""

    kernel: Kernel  #: `XQA`, `XQA_MLA` or `FMHA_V2`
    capability: Capability  #: (major, minor) of the target
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]  #: query, K/V and output; uint8 is NVFP4
    head_dim: int  #: elements of a head; for MLA, kv_lora_rank + qk_rope_head_dim
    group: int = 1  #: query heads per K/V head; fmha_v2 takes it at run time
    q_len: int = 1  #: query rows of each request; fmha_v2 takes it at run time
    page_size: int = 64  #: tokens per page; fmha_v2 takes it at run time
    window: bool = False  #: XQA is compiled with a sliding window


@dataclass(frozen=True)
class Compiled:
    source: str  #: file name
    #: the first assertion that fails, with its file and line, or another error of nvcc or FlashInfer; None if the source
    #: supports the shape
    refusal: str | None
    shared_memory_bytes: int | None = None  #: shared memory that the kernel needs; None if it is not known
    seconds: float = 0.0  #: wall-clock time of the compiler


def compiled(shape: Shape) -> tuple[Compiled, ...]:
    """Check with nvcc whether the static assertions in each of FlashInfer's kernel sources hold for a shape. Return one result
    per source. FlashInfer supports the shape if no result has a `refusal`.

    Raises NotBuiltError if nvcc or FlashInfer is missing, and RuntimeError if nvcc fails for another reason.
    """
    if (reason := build.why_not_built()) is not None:
        raise build.NotBuiltError(reason)
    return _fmha_v2(shape) if shape.kernel is FMHA_V2 else _xqa(shape)


def _xqa(shape: Shape) -> tuple[Compiled, ...]:
    from flashinfer.jit import xqa

    q, kv, out = shape.dtypes
    arguments: tuple[Any, ...] = (q, kv, shape.page_size, shape.head_dim, shape.group)
    name = "gen_xqa_module_mla"
    if shape.kernel is XQA:
        name, arguments = "gen_xqa_module", (*arguments, shape.window, out, shape.q_len)
    with flashinfer_targets(shape.capability):
        try:
            module: Any = getattr(xqa, name)(*arguments)
        except (AssertionError, RuntimeError, ValueError) as refusal:
            return (Compiled(name, str(refusal)),)
    sources, flags = module.sources, module.extra_cuda_cflags
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(shutil.copytree(sources[0].parent, Path(folder, "xqa")))
        for name, before, after in CHANGES:
            text = (copied / name).read_text()
            if before not in text:
                raise RuntimeError(f"{sources[0].parent / name} has no {before!r}, which is changed here")
            (copied / name).write_text(text.replace(before, after))
        kernels = [copied / source.name for source in sources if source.name in XQA_SOURCES]
        return tuple(_front_end(shape, each.name, f'#include "{each}"', flags, XQA_BYTES) for each in kernels)


def _fmha_v2(shape: Shape) -> tuple[Compiled, ...]:
    q, _, out = shape.dtypes
    sources, flags = _fmha_v2_sources(shape.capability, q, out)
    named = {int(found[1]): (name, int(found[2])) for name in sources if (found := PLAIN_FMHA_V2.search(name))}
    if shape.head_dim not in named:
        refusal = f"no kernel is generated for head_dim {shape.head_dim}: it launches nothing"
        return (Compiled("fmha_v2_api.h", refusal),)
    name, sm = named[shape.head_dim]
    bytes_of = TILED_BYTES if sm == 120 and shape.head_dim > 64 else FMHA_V2_BYTES[sm]
    return (_front_end(shape, name, sources[name], flags, bytes_of),)


@functools.cache
def _fmha_v2_sources(capability: Capability, q: torch.dtype, out: torch.dtype) -> tuple[Mapping[str, str], list[str]]:
    from flashinfer.jit import gen_fmha_v2_module

    with flashinfer_targets(capability):
        module: Any = gen_fmha_v2_module("Q_PAGED_KV_HND", q, out)
        texts = {source.name: source.read_text() for source in module.sources if PLAIN_FMHA_V2.search(source.name)}
    return texts, module.extra_cuda_cflags


@contextmanager
def flashinfer_targets(capability: Capability) -> Iterator[None]:
    """In the `with` block, FlashInfer generates code only for this compute capability, in a temporary folder."""
    from flashinfer.compilation_context import CompilationContext
    from flashinfer.jit import core, env
    from flashinfer.jit import xqa as jit_xqa

    with ExitStack() as undone:
        folder = Path(undone.enter_context(tempfile.TemporaryDirectory()))
        architectures = {"FLASHINFER_CUDA_ARCH_LIST": "{}.{}".format(*capability)}
        undone.enter_context(mock.patch.dict(os.environ, architectures))
        undone.enter_context(mock.patch.object(env, "FLASHINFER_GEN_SRC_DIR", folder))
        targets = CompilationContext().TARGET_CUDA_ARCHS
        undone.enter_context(mock.patch.object(core.current_compilation_context, "TARGET_CUDA_ARCHS", targets))
        undone.callback(jit_xqa._has_sm90_target.cache_clear)
        jit_xqa._has_sm90_target.cache_clear()
        yield


def _front_end(shape: Shape, name: str, text: str, flags: Sequence[str], shared_memory: str) -> Compiled:
    """Compile C++ `text` to PTX with nvcc, which checks its static assertions. Return the result. The C++ expression
    `shared_memory` gives the bytes of shared memory that the kernel needs; the GPU may have fewer, which is a refusal too.
    """
    (target,) = (flag.rpartition("=")[2] for flag in flags if flag.startswith("-gencode"))
    others = [flag for flag in flags if not flag.startswith(("-gencode", "-Xfatbin", "--compress-mode", "--threads"))]
    data = build.flashinfer_data()
    with tempfile.TemporaryDirectory() as folder:
        probe = Path(folder, f"probe_{name}")
        probe.write_text(text + DISCOVERY.format(bytes=shared_memory))
        lines = len(text.splitlines())
        for header, declarations in _cublas().items():
            Path(folder, header).write_text(declarations)
        command = [str(build.nvcc()), "-ptx", "-w", f"-arch={target}", "--expt-relaxed-constexpr", *others]
        command += [f"-I{path}" for path in (folder, data / "csrc", data / "include")]
        begin = time.perf_counter()
        run = subprocess.run([*command, str(probe), "-o", f"{folder}/probe.ptx"], capture_output=True, text=True)
        seconds = time.perf_counter() - begin
        printed = run.stdout + run.stderr
        errors = [
            each for each in ERROR.finditer(printed) if (Path(each["path"]), int(each["line"]) > lines) != (probe, True)
        ]
        refusal = _assertion(errors[0]) if errors else None
    value = VALUE.search(printed)
    if refusal is None and value is None:
        raise RuntimeError(f"nvcc did not come to the end of {name}: {printed.strip()}")
    needed, family = int(value[1]) if value else None, family_of(shape.capability)
    assert family is not None
    most = family.shared_memory_kib * 1024
    if refusal is None and needed is not None and needed > most:
        refusal = f"it needs {needed} bytes of shared memory, and {sm_name(shape.capability)} has {most}"
    return Compiled(name, refusal, needed, seconds)


def _assertion(error: re.Match[str]) -> str:
    path, words = Path(error["path"]), error["words"]
    text = "\n".join(path.read_text().splitlines()[int(error["line"]) - 1 :])
    statement = " ".join(text[: text.index(";")].split())
    if words.startswith("static assertion failed"):
        words = statement
    elif "exactDiv" in statement:
        words = f"not exact: {statement}"
    return f"{path.name}:{error['line']}: {words}"


@functools.cache
def _cublas() -> dict[str, str]:
    """Return headers, text by file name, that replace cuBLAS's: fmha_v2 includes them, but none of its kernels calls cuBLAS."""
    text = (build.flashinfer_data() / "csrc/fmha_v2/fused_multihead_attention_utils.h").read_text()
    types, constants, functions = (
        sorted(set(re.findall(pattern, text))) for pattern in (r"\bcublas\w+_t\b", r"\bCUBLAS\w+", r"\b(cublas\w+)\(")
    )
    declared = [f"typedef int {name};" for name in types] + [f"enum {{ {', '.join(constants)} }};"]
    declared += [f"template <class... T> int {name}(T...);" for name in functions]
    return {
        "cublasLt.h": "\n".join(["#pragma once", "#include <library_types.h>", *declared, ""]),
        "cublas_v2.h": "#pragma once\n",
    }
