"""What to install for a package that is not there. Needs Python alone."""

import re
from importlib.metadata import PackageNotFoundError, requires

PROJECT = "trtllm-attention-lab"
# Packages whose modules have other names.
PACKAGES = {"cupti": "cupti-python", "flashinfer": "flashinfer-python", "markdown_it": "markdown-it-py"}


def missing(module: str) -> str:
    """Return the sentence that says of a module that it is not there, and what to install if an extra of the lab brings it."""
    top = module.partition(".")[0]
    extras = _extras_of(PACKAGES.get(top, top.replace("_", "-")))
    brought = f": pip install '{PROJECT}[{extras[0]}]'" if extras else ""
    return f"{top} is not installed{brought}"


def _extras_of(package: str) -> list[str]:
    try:
        requirements = requires(PROJECT) or []
    except PackageNotFoundError:
        return []
    of_package = [each for each in requirements if re.match(rf"{re.escape(package)}(?![\w-])", each, re.IGNORECASE)]
    return [extra for each in of_package for extra in re.findall(r"extra == ['\"]([\w-]+)['\"]", each)]
