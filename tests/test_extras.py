"""Packaging: the base needs torch alone, and a missing package is named with the extra that installs it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lab
from lab.extras import EXTRA_OF

ROOT = Path(__file__).parent.parent
# Distributions whose modules have another name.
DISTRIBUTIONS = {
    "flashinfer": "flashinfer-python",
    "flash_attn": "flash-attn-4",
    "flash_mla": "sgl-flash-mla",
    "pynvml": "nvidia-ml-py",
    "cupti": "cupti-python",
    "markdown_it": "markdown-it-py",
}
WITHOUT = """
import importlib.util, json, sys
find = importlib.util.find_spec
for program, packages in json.loads(sys.argv[1]):
    importlib.util.find_spec = lambda name, package=None: None if name in packages else find(name, package)
    try:
        exec(program)
    except ModuleNotFoundError as error:
        print(error)
"""


def declared(table: str) -> dict[str, str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split(f"[{table}]\n", 1)[1]
    return dict(re.findall(r"^([\w-]+) = \[((?:[^\]\[]|\[\w[\w,]*\])*)\]", text, re.MULTILINE))


def test_the_base_needs_torch_alone() -> None:
    assert re.findall(r'"([\w-]+)', declared("project")["dependencies"]) == ["torch"]


@pytest.mark.parametrize("package", EXTRA_OF)
def test_the_extra_that_a_sentence_names_installs_the_package(package: str) -> None:
    wanted = DISTRIBUTIONS.get(package, package).replace("_", "-")
    installed = declared("project.optional-dependencies")[EXTRA_OF[package]]
    assert wanted in re.findall(r'"([\w-]+)', installed)


def test_all_has_every_extra_that_a_kernel_needs_to_be_judged_and_timed() -> None:
    assert declared("project.optional-dependencies")["all"] == '"trtllm-attention-lab[bench,flashinfer,judge,triton]"'


# A program, the packages that it does not find, what it says, and the extra.
PROGRAMS = (
    ("import lab.checks", "numpy rich", "The judge needs numpy, rich", "judge"),
    ("import lab.timing", "scipy", "lab.timing needs scipy", "bench"),
    ("import lab.kernels.portable", "triton", "lab.kernels.portable needs triton", "triton"),
    ("from lab.kernels import write_forward_metadata", "triton", "lab.kernels.write_forward_metadata needs", "triton"),
    (
        "from lab.kernels.flashinfer_call import installed; installed('a', 'b')",
        "flashinfer",
        "lab.kernels.trtllm needs flashinfer",
        "flashinfer",
    ),
    ("from lab.kernels.support.kernel import no_triton; print(no_triton(None))", "triton", "needs triton", "triton"),
)


def test_a_missing_package_is_named_with_its_extra() -> None:
    """One process: each needs two seconds for torch alone."""
    programs = json.dumps([(program, packages.split()) for program, packages, *_ in PROGRAMS])
    command = [sys.executable, "-c", WITHOUT, programs]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    for said, (_, _, says, extra) in zip(done.stdout.splitlines(), PROGRAMS, strict=True):
        assert says in said
        assert f"pip install '.[{extra}]'" in said


NARROW = "--only K3 --dtypes fp16/fp16 --head-dims 64 --groups 1 --page-sizes 16 --drawn 0 --no-discover --in-process"
# Commands of the extra "judge", in the order in which they need the files that they write.
JUDGING = (
    "checks --profile sglang",
    "implementations",
    f"judge tests.checks.someone_elses {NARROW} --shard 1/1 --out {{folder}}/shard.json",
    "merge {folder}/shard.json --out {folder}/all.json",
    "judge --case {folder}/all.json#1 --in-process",
    "judge {folder}/all.json --coverage",
    "compare {folder}/all.json {folder}/shard.json",
    "releases {folder}/all.json --package torch",
    "invariance tests.checks.someone_elses --factors batch-size --functions decode --dtypes fp16/fp16 --head-dims 64 "
    "--no-nvfp4 --groups 1 --page-sizes 16 --q-lens 1 --long-requests 100 --in-process",
    "budget --kv bf16 --keys 16 --values normal",
    "record --out {folder}/calls -- true",
)
WITH_THE_JUDGE_ALONE = """
import json, sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
from lab.__main__ import main
import lab.pytest_plugin
for command in json.loads(sys.argv[1]):
    try:
        status = main(command.split())
    except SystemExit as ended:
        status = ended.code
    assert status in (None, 0, 125), f"lab {command}: {status}"  # 125: one release is not compared
"""


def test_the_commands_of_the_judge_need_the_packages_of_its_extra_alone(tmp_path: Path) -> None:
    brought = {"markdown_it", "jinja2"}  # by rich and by torch
    hidden = [each for each, extra in EXTRA_OF.items() if extra in ("bench", "html", "plots") and each not in brought]
    commands = json.dumps([command.format(folder=tmp_path) for command in JUDGING])
    program = [sys.executable, "-c", WITH_THE_JUDGE_ALONE, commands, *hidden]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, check=False)
    assert not done.returncode, done.stderr


def test_the_version_is_a_constant_and_types_are_marked() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", lab.__version__)
    assert (Path(lab.__file__).parent / "py.typed").exists()
