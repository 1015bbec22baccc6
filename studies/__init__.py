"""Studies: questions that measurements on a GPU answer. Each is a module with a `studies.study.Study`, run by `lab
experiments`.
"""

import ast
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

# By the name of the module, which its recording has too: the class.
STUDIES: Mapping[str, str] = {
    "clocks": "Clocks",
    "decode_split": "DecodeSplitStudy",
    "draft_extend_graph": "DraftExtendGraphStudy",
    "draft_extend_kernels": "DraftExtendKernels",
    "draft_steps": "DraftSteps",
    "draft_visibility": "DraftVisibility",
    "kv_read_once": "KVReadOnce",
    "length_copy": "LengthCopy",
    "mla_decode": "MLADecode",
    "plan_stream": "PlanStreamStudy",
    "real_client": "RealClient",
}


# Studies whose kernels run on a CPU too. Triton decides when such a study is imported whether it interprets them.
WITHOUT_GPU = ("draft_visibility", "real_client")


def study_named(name: str) -> Any:
    return getattr(import_module(f"studies.{name}"), STUDIES[name])


def question_of(name: str) -> str:
    """Return a study's question: the first paragraph of its module's docstring."""
    # Read without an import, because some modules import packages that may not be installed.
    source = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    return (ast.get_docstring(ast.parse(source)) or "").split("\n\n", 1)[0].replace("\n", " ")


def command_of(name: str) -> str:
    return f"lab experiments {name.replace('_', '-')}"


__all__ = ["STUDIES", "WITHOUT_GPU", "command_of", "question_of", "study_named"]
