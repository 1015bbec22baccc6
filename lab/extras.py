"""Name the pip extra that installs each optional package. This module imports only the standard library."""

import importlib.util
from collections.abc import Iterable

# Import name of a package -> the extra of pyproject.toml that installs it.
EXTRA_OF = {
    "numpy": "judge",
    "pebble": "judge",
    "rich": "judge",
    "typer": "judge",
    "triton": "triton",
    "flashinfer": "flashinfer",
    "flash_attn": "fa4",
    "flash_mla": "flashmla",
    "pynvml": "bench",
    "pytest_benchmark": "bench",
    "scipy": "bench",
    "itables": "html",
    "jinja2": "html",
    "markdown_it": "html",
    "matplotlib": "plots",
    "cupti": "cupti",
    "transformers": "engine",
    "psutil": "engine",
}


def require(part: str, *packages: str) -> None:
    """Raise ModuleNotFoundError with the pip command if a package that `part`, such as "The judge", needs is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModuleNotFoundError(sentence(part, missing), name=missing[0])


def sentence(part: str, missing: Iterable[str]) -> str:
    """Return a sentence that names a part of the lab, the packages that it needs, and the pip command that installs them."""
    names = list(missing)
    extras = ",".join(dict.fromkeys(EXTRA_OF[name] for name in names if name in EXTRA_OF))
    is_are = "is" if len(names) == 1 else "are"
    remedy = f"pip install '.[{extras}]' in the lab's checkout" if extras else f"pip install {' '.join(names)}"
    return f"{part} needs {', '.join(names)}, which {is_are} not installed: {remedy}"
