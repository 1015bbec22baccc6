"""Files that are written in one step.

A leaf: it needs Python alone.
"""

import os
import shutil
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: a reader sees the old text or the new one, also after an interruption, and never half of one.

    Missing parent folders are made. The text is encoded as UTF-8. A symbolic link stays one: the file that it names is written.

    Raises:
        OSError: the file cannot be written; the old one, if any, is as it was.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():  # a terminal or a pipe cannot be replaced by a file
        target.write_text(text, encoding="utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
