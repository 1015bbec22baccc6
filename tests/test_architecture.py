"""The layout's promises: which part imports which, and what importing a part brings in."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A part may import itself and these: the arrows run one way, from the leaves up.
ALLOWED: dict[str, set[str]] = {
    "gpus": set(),
    "provenance": set(),
    "calls": {"gpus"},
    "references": {"calls"},
    "kernels": {"calls", "gpus"},
    "metadata": {"calls", "kernels"},
    "workloads": {"calls", "metadata"},
    "checks": {"calls", "gpus", "provenance", "references", "kernels", "metadata", "workloads"},
    "timing": {"gpus", "provenance", "references", "kernels", "metadata", "workloads", "checks"},
    "experiments": {"gpus", "provenance", "references", "kernels", "metadata", "workloads", "checks", "timing"},
    "reports": {"provenance", "references", "metadata", "workloads", "checks", "timing", "experiments"},
}


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
    assert not any(name.split(".")[0] == "tests" for name in names)
    imported_parts = {name.split(".")[1] for name in names if name.startswith("lab.")}
    assert imported_parts - {part} <= ALLOWED.get(part, set())


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("lab.references", ("triton", "flashinfer", "pytest", "rich")),
        ("lab.metadata", ("triton", "flashinfer", "pytest", "rich")),
        ("lab.checks", ("triton", "flashinfer", "pytest", "rich", "hypothesis", "pebble")),
        ("lab.workloads", ("triton", "flashinfer", "pytest", "rich")),
        ("lab.kernels.support", ("triton", "flashinfer", "pytest", "rich")),
        ("lab.kernels.trtllm", ("triton", "flashinfer", "pytest", "rich")),
    ],
)
def test_an_import_is_light(module: str, absent: tuple[str, ...]) -> None:
    program = (
        f"import sys, torch, {module}\n"
        f"print([name for name in {absent!r} if name in sys.modules], torch.cuda.is_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[] False"
