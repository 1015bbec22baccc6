"""Compile FlashInfer's trtllm-gen launcher and the fake CUDA into one shared library in the user's cache.

nvcc compiles `trtllm_fmha_kernel_launcher.cu` and `fmhaReduction.cu` of the installed FlashInfer without changes. The library
contains the fake CUDA driver and runtime, and calls them even if torch has loaded the real ones. The library is in a folder of
`$XDG_CACHE_HOME/trtllm-attention-lab` (by default `~/.cache/...`), whose name is a digest of all sources.
"""

import fcntl
import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from importlib import metadata
from pathlib import Path

from lab.dry_run import kernel_table
from lab.extras import sentence

HERE = Path(__file__).parent
SOURCES = ("fake_cuda.h", "fake_cuda.cpp", "kernel_params.cpp")
LAUNCHER = ("trtllm_fmha_kernel_launcher.cu", "fmhaReduction.cu")
LIBRARY = "trtllm_gen_launcher.so"
FLAGS = (
    *("-std=c++17", "-w", "-O0", "-DNDEBUG", "--expt-relaxed-constexpr", "-static-global-template-stub=false"),
    *("-gencode=arch=compute_100a,code=compute_100a", "-Xcompiler=-fPIC,-fno-gnu-unique"),
    *(f"-DFLASHINFER_ENABLE_{dtype}" for dtype in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2")),
    '-DTLLM_GEN_FMHA_CUBIN_PATH="fmha/trtllm-gen/"',
    '-DTLLM_GEN_FMHA_METAINFO_HASH="none"',
)
# FlashInfer includes cuBLAS's header only for the names of one enumeration. FlashInfer 0.6.13 includes NVRTC's without use.
CUBLAS_STATUS = (
    *("SUCCESS", "NOT_INITIALIZED", "ALLOC_FAILED", "INVALID_VALUE", "ARCH_MISMATCH", "MAPPING_ERROR"),
    *("EXECUTION_FAILED", "INTERNAL_ERROR", "NOT_SUPPORTED", "LICENSE_ERROR"),
)


class NotBuiltError(RuntimeError):
    """FlashInfer's launcher cannot be compiled on this machine. The message has the reason."""


def why_not_built() -> str | None:
    """Return a sentence that names what is missing to compile FlashInfer's launcher; None if nothing is missing."""
    if importlib.util.find_spec("flashinfer") is None:
        return sentence("a dry run", ["flashinfer"])
    if nvcc() is None:
        return "a dry run compiles FlashInfer's launcher with CUDA's nvcc, which is neither on PATH nor in /usr/local/cuda/bin"
    if shutil.which("g++") is None:
        return "a dry run compiles FlashInfer's launcher with nvcc, which needs g++, and there is none on PATH"
    absent = [name for name in LAUNCHER if not (flashinfer_data() / "csrc" / name).exists()]
    if absent:
        return f"the installed FlashInfer {flashinfer_version()} has no csrc/{absent[0]}, the launcher that a dry run compiles"
    return None


def nvcc() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    candidates = [os.environ.get("NVCC"), shutil.which("nvcc"), *(f"{home}/bin/nvcc" for home in homes if home)]
    return next((each for each in candidates if each and os.access(each, os.X_OK)), None)


def flashinfer_version() -> str:
    return metadata.version("flashinfer-python")


@functools.cache
def flashinfer_data() -> Path:
    """Return the folder of the installed FlashInfer's sources. FlashInfer is not imported, because that takes seconds."""
    spec = importlib.util.find_spec("flashinfer")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "data"


def library(table: kernel_table.KernelTable | None = None) -> Path:
    """Return the path of a shared library with FlashInfer's launcher and a kernel table (None: `kernel_table.newest()`).

    The library is compiled if the cache does not have it, which takes about a minute on an idle core. Raises NotBuiltError if
    compiling fails.
    """
    reason = why_not_built()
    if reason is not None:
        raise NotBuiltError(reason)
    headers = generated(table or kernel_table.newest())
    path = _library_path(headers)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one process builds, and other processes wait
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                _compile(Path(work), headers)
                Path(work, LIBRARY).replace(path)
    return path


def is_built() -> bool:
    return _library_path(generated(kernel_table.newest())).exists()


def generated(table: kernel_table.KernelTable) -> dict[str, str]:
    """Return the C++ headers, text by file name, that the lab writes to compile FlashInfer's launcher with a kernel table."""
    status = ", ".join(f"CUBLAS_STATUS_{name}" for name in CUBLAS_STATUS)
    return {
        kernel_table.HEADER_NAME: kernel_table.header(table, launcher_members()),
        "kernel_params_fields.inc": "".join(f"FIELD({name})\n" for name in kernel_params_members()),
        "cublas_v2.h": f"#pragma once\ntypedef enum {{ {status} }} cublasStatus_t;\n",
        "cublasLt.h": '#pragma once\n#include "cublas_v2.h"\n',
        "nvrtc.h": "#pragma once\n",
    }


@functools.cache
def launcher_members() -> frozenset[str]:
    """Return the C++ names of the columns of the kernel table that the installed FlashInfer's launcher reads."""
    fmha = sorted((flashinfer_data() / "include/flashinfer/trtllm/fmha").iterdir())
    sources = [*fmha, *(flashinfer_data() / "csrc" / name for name in LAUNCHER)]
    return frozenset(name for each in sources for name in re.findall(r"\bkernelMeta\.(m[A-Z0-9]\w+)", each.read_text()))


@functools.cache
def kernel_params_members() -> tuple[str, ...]:
    """Return the member names of FlashInfer's struct `KernelParams`, in order, without those of type `FastModDivInt32`."""
    text = (flashinfer_data() / "include/flashinfer/trtllm/fmha/kernelParams.h").read_text()
    struct = text.partition("struct KernelParams {")[2].partition("template <")[0]
    code = re.sub(r"//.*", "", struct)
    declaration = r"^\s*([\w ]+?[\s*]+(?:const\s*\*?\s*)?)((?:\w+)(?:\{[^}]*\})?(?:,\s*\w+)*);"
    declared = (names for kind, names in re.findall(declaration, code, re.MULTILINE) if "Div" not in kind)
    return tuple(re.sub(r"\{.*", "", name.strip()) for names in declared for name in names.split(","))


def _library_path(headers: dict[str, str]) -> Path:
    """Return the compiled launcher's path in the user's cache. The folder's name is a digest of sources, flags and versions."""
    parts = [
        *(f"{name}\n{text}" for name, text in sorted(headers.items())),
        *((HERE / name).read_text() for name in SOURCES),
    ]
    compiler = subprocess.run([str(nvcc()), "--version"], capture_output=True, text=True, check=True).stdout
    parts += [*FLAGS, compiler, str(flashinfer_data()), flashinfer_version(), metadata.version("apache-tvm-ffi")]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "trtllm-attention-lab" / "dry-run" / digest / LIBRARY


def _compile(work: Path, headers: dict[str, str]) -> None:
    for name, text in headers.items():
        (work / name).write_text(text)
    data = flashinfer_data()
    tvm_ffi = importlib.util.find_spec("tvm_ffi")
    assert tvm_ffi is not None
    assert tvm_ffi.origin is not None
    ffi = Path(tvm_ffi.origin).parent
    cccl = next(data.glob("cccl/**/libcudacxx/include/cuda")).parent
    own = [data / each for each in ("include", "csrc", "csrc/nv_internal", "csrc/nv_internal/include")]
    others = [data / each for each in ("cutlass/include", "cutlass/tools/util/include", "spdlog/include")]
    folders = [work, HERE, *own, cccl, *others, ffi / "include"]
    compile_cuda = [str(nvcc()), *FLAGS, *(f"-I{folder}" for folder in folders), "-c"]
    # All sources are one unit, so that the headers, which take most of the time, are read once.
    units = [*(data / "csrc" / name for name in LAUNCHER), HERE / "kernel_params.cpp"]
    (work / "launcher.cu").write_text("".join(f'#include "{unit}"\n' for unit in units))
    objects = [str(work / "launcher.o"), str(work / "fake_cuda.o")]
    _run([*compile_cuda, str(work / "launcher.cu"), "-o", objects[0]])
    _run([*compile_cuda, str(HERE / "fake_cuda.cpp"), "-o", objects[1]])
    rpath = f"-Wl,-rpath,{ffi / 'lib'}"
    # -Bsymbolic: the library uses the fake's functions even if torch has loaded the real libcudart.
    link = ["g++", "-shared", "-Wl,-Bsymbolic", *objects, f"-L{ffi / 'lib'}", "-ltvm_ffi", "-ldl", rpath]
    _run([*link, "-o", str(work / LIBRARY)])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        output = (done.stdout + done.stderr)[-2000:]
        raise NotBuiltError(
            f"{Path(command[0]).name} {Path(command[-3]).name} failed with FlashInfer {flashinfer_version()}:\n{output}"
        )
