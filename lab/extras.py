"""The extras of the package, which install what a part of the lab needs beyond torch, and the sentence where one is missing.

A leaf: it needs Python alone.
"""

import importlib.util
from collections.abc import Iterable

# Package, by the name that it is imported by -> the extra of pyproject.toml that installs it.
EXTRA_OF = {
    "hypothesis": "judge",
    "numpy": "judge",
    "pebble": "judge",
    "rich": "judge",
    "typer": "judge",
    "triton": "triton",
    "flashinfer": "flashinfer",
    "flash_attn": "fa4",
    "pynvml": "bench",
    "pytest_benchmark": "bench",
    "scipy": "bench",
    "itables": "html",
    "jinja2": "html",
    "markdown_it": "html",
    "matplotlib": "plots",
    "cupti": "cupti",
}


def require(part: str, *packages: str) -> None:
    """Look for the packages that a part of the lab needs, and import none.

    Raises:
        ModuleNotFoundError: packages are missing; the sentence names them and the extra that installs them.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(sentence(part, missing), name=missing[0])


def sentence(part: str, missing: Iterable[str]) -> str:
    """Say which packages a part of the lab misses, and how they or the lab's extra that has them are installed."""
    names = list(missing)
    extras = ",".join(dict.fromkeys(EXTRA_OF[name] for name in names if name in EXTRA_OF))
    is_are = "is" if len(names) == 1 else "are"
    remedy = f"pip install '.[{extras}]' in the lab's checkout" if extras else f"pip install {' '.join(names)}"
    return f"{part} needs {', '.join(names)}, which {is_are} not installed: {remedy}"
