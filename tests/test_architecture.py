"""The layout's promises: which part imports which, and what importing a part brings in."""

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Container
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A part may import itself and these: the arrows run one way, from the leaves up.
LEAVES = "exit_status extras files gpus integrity interpreter loading named_enum names provenance shrinking"
IMPORTED = {
    "calls": "gpus",
    "references": "calls",
    "kernels": "calls gpus",
    "metadata": "calls kernels",
    "workloads": "calls kernels metadata references",
    "recorded": "calls kernels provenance references shrinking workloads",
    "checks": "calls gpus interpreter kernels loading metadata provenance ranges recorded references shrinking workloads",
    "timing": "calls gpus kernels metadata provenance recorded references workloads",
    "budget": "calls ranges recorded references workloads",
    "dry_run": "calls checks gpus kernels metadata provenance references reports timing workloads",
    "reports": "budget checks gpus kernels loading metadata provenance ranges recorded references timing workloads",
    "ranges": "calls workloads",
    "pytest_plugin": "checks loading ranges references reports workloads",
    "__main__": "commands",
}
ALLOWED = {part: {*names.split()} for part, names in (dict.fromkeys(LEAVES.split(), "") | IMPORTED).items()}
ALLOWED["commands"] = set(ALLOWED)  # on top of everything: nothing but the program imports it


@functools.cache
def imported_modules(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted((ROOT / "lab").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_arrows(path: Path) -> None:
    part = path.relative_to(ROOT / "lab").parts[0].removesuffix(".py")
    names = imported_modules(path)
    assert not any(name.split(".")[0] in ("tests", "corpus", "studies") for name in names)
    imported_parts = {name.split(".")[1] for name in names if name.startswith("lab.")}
    everywhere = {part, "named_enum", "names", "files", "extras", "exit_status", "integrity", "wording"}
    refused = imported_parts - everywhere - ALLOWED.get(part, set())
    assert not refused, f"{part} may not import {', '.join(sorted(refused))}: ALLOWED lists what it may import"


def test_nothing_but_its_command_imports_the_dry_run() -> None:
    """It patches modules and compiles C++, which belongs in no other process."""
    paths = (path.relative_to(ROOT / "lab") for path in (ROOT / "lab").rglob("*.py"))
    importers = {
        str(path)
        for path in paths
        if path.parts[0] != "dry_run"
        and any(name.startswith("lab.dry_run") for name in imported_modules(ROOT / "lab" / path))
    }
    assert importers == {"commands/dry_run.py"}


@pytest.mark.parametrize("path", sorted((ROOT / "studies").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_studies_import_neither_the_corpus_nor_tests(path: Path) -> None:
    assert not {name.split(".")[0] for name in imported_modules(path)} & {"corpus", "tests"}


# Inside lab.checks, from the bottom up: a module imports those of its own layer and of those below.
LAYERS = (
    (
        "explain.feature",
        "explain.features",
        "explain.entry_features",
        "explain.request_features",
        "explain.call_features",
    ),
    ("run.verdicts", "run.support_protocol"),
    ("case_run",),
    ("parameters",),
    ("properties", "replays"),
    ("explain",),
    ("report", "record"),
    ("run",),
)


@functools.cache
def modules_of_lab() -> dict[str, set[str]]:
    """Return what each module imports of the others, those in functions and for types too; a package's own file is none."""
    paths = {path for path in (ROOT / "lab").rglob("*.py") if path.name != "__init__.py"}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {
        name: {each for imported in imported_modules(path) if (each := _module(imported, names))} - {name}
        for name, path in names.items()
    }


def _module(imported: str, names: Container[str]) -> str:
    return imported if imported in names else parent if (parent := imported.rpartition(".")[0]) in names else ""


def test_no_module_leads_back_to_itself() -> None:
    TopologicalSorter(modules_of_lab()).prepare()  # which raises CycleError, with the circle


def _layer(module: str) -> int:
    inside = module.removeprefix("lab.checks.")
    found = {
        len(prefix): number
        for number, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if inside == prefix or inside.startswith(f"{prefix}.")
    }
    assert found, f"{module} is in no layer of lab.checks"
    return found[max(found)]  # of the longest prefix


def test_the_arrows_inside_the_judge_run_one_way() -> None:
    inside = {name: imports for name, imports in modules_of_lab().items() if name.startswith("lab.checks.")}
    upward = [
        f"{name} imports {each}"
        for name, imports in inside.items()
        for each in imports
        if each in inside and _layer(each) > _layer(name)
    ]
    assert not upward


# The folders of lab.metadata, and those that each may import: engine knows no backend, and no backend knows the other.
METADATA = {"engine": set(), "mha": {"engine"}, "mla": {"engine"}, "speculation": {"engine", "mha", "mla"}}


@pytest.mark.parametrize("folder", METADATA)
def test_a_folder_of_metadata_imports_what_is_below_it(folder: str) -> None:
    for path in (ROOT / "lab" / "metadata" / folder).glob("*.py"):
        names = (name.split(".") for name in imported_modules(path) if name.startswith("lab.metadata."))
        assert {parts[2] for parts in names} <= METADATA[folder] | {folder}, path.name


MOST_FILES = 12  # outside the family's own files, whose names begin with the call's
# The names of a family, and the stems of its own files; M3 is the ragged call's own check.
FAMILIES = {
    r"\bRAGGED_CONTEXT\b|\bRaggedContextCall\b|\btrtllm_ragged_attention_deepseek\b": "ragged|mla_prefill",
    r"\bDSV4_DECODE\b|\bDSV4DecodeCall\b|\btrtllm_batch_decode_sparse_mla_dsv4\b": "dsv4",
}


@pytest.mark.parametrize(("names", "own"), FAMILIES.items())
def test_few_files_know_a_family_of_calls(names: str, own: str) -> None:
    """These calls are families of their own: whoever adds the next follows their names through the lab."""
    paths = (path for path in (ROOT / "lab").rglob("*.py") if not re.search(own, path.stem))
    naming = sorted(str(path.relative_to(ROOT)) for path in paths if re.search(names, path.read_text()))
    assert len(naming) <= MOST_FILES, (
        f"{len(naming)} files name {names}, more than {MOST_FILES}: {', '.join(naming)}. Take what is asked "
        "from AttentionCall, CALL_TYPES, the problem that the call poses or a row of lab.checks.parameters.models.FAMILIES, "
        "or put it into a file of the family's own"
    )


def test_kinds_of_query_rows_are_told_apart_by_their_properties() -> None:
    """The first kinds are named in more files; each later one has declared its properties in forward_mode."""
    for kind in ("ACCEPTED", "VERIFIED", "NEW_TOKENS"):
        name = re.compile(rf"\bQueryRows\.{kind}\b")
        naming = [str(path.relative_to(ROOT)) for path in (ROOT / "lab").rglob("*.py") if name.search(path.read_text())]
        assert len(naming) <= 5, f"QueryRows.{kind} is named in {', '.join(naming)}: ask a property of QueryRows"


# In the order of one process, in which modules only come in: what is absent after a step was absent after those before it.
HEAVY = ("triton", "flashinfer", "pytest", "rich")
STEPS: list[tuple[str, tuple[str, ...]]] = [
    ("lab.references", (*HEAVY, "hypothesis", "pandas", "scipy", "matplotlib")),
    ("lab.metadata", HEAVY),
    ("lab.workloads", HEAVY),
    ("lab.kernels.support", HEAVY),
    ("lab.kernels.trtllm", HEAVY),
    ("lab.timing.forward", ("lab.checks", "hypothesis", "pebble", "pytest", "rich")),  # who times needs no judge
    ("lab.checks", (*HEAVY, "hypothesis", "pebble")),
    ("lab.checks.properties.graph_replays", HEAVY),  # the judge judges where there is no Triton
    ("lab.timing.statistics", ("scipy.stats", "matplotlib", "rich")),
    ("lab.reports.recorded", ("scipy.stats", "matplotlib", "rich")),
    ("lab.reports.compare", ("scipy.stats", "matplotlib", "rich")),
    ("lab.reports.timings", ("scipy.stats", "matplotlib", "rich")),
]
IMPORTS = """
import importlib, json, sys, torch
steps = json.loads(sys.argv[1])
before = set(sys.modules)
found = {}
for module, absent in steps:
    importlib.import_module(module)
    found[module] = [name for name in absent if name in sys.modules]
    if module == "lab.references":
        new = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)
        found["beside torch"] = sorted(new)
found["CUDA"] = torch.cuda.is_initialized()
had_triton = "triton" in sys.modules
import lab.kernels
lab.kernels.generate_draft_decode_kv_indices
found["triton before and after its kernel"] = [had_triton, "triton" in sys.modules]
print(json.dumps(found))
"""


def test_an_import_is_light() -> None:
    """One process: each needs two seconds for torch alone."""
    program = [sys.executable, "-c", IMPORTS, json.dumps(STEPS)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == {module: [] for module, _ in STEPS} | {
        "beside torch": ["lab"],
        "CUDA": False,
        "triton before and after its kernel": [False, True],
    }
