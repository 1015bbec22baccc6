"""The folders of lab.metadata import each other in one direction: engine knows no backend, and no backend knows the other."""

import ast
from pathlib import Path

import pytest

import lab.metadata

FOLDERS = {"engine": set(), "mha": {"engine"}, "mla": {"engine"}, "speculation": {"engine", "mha", "mla"}}


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_what_is_below_it(folder: str) -> None:
    below = FOLDERS[folder] | {folder}
    for path in (Path(lab.metadata.__file__).parent / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported = {name.split(".")[2] for name in modules if name.startswith("lab.metadata.")}
            assert imported <= below, f"{path.name} imports {imported - below}"
