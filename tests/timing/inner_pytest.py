"""What a pytest that a test starts needs of this one's environment."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def inner_environment(**changes: str) -> dict[str, str]:
    """This environment with the lab importable and without pytest's own variables: the inner pytest is no xdist worker."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return mine | {"PYTHONPATH": str(ROOT)} | changes
