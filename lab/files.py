"""Write files atomically, and read JSON files, compressed or not.

This module imports only the standard library.
"""

import gzip
import json
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

COMPRESSED = ".gz"


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the whole old text or the whole new text, even after an interruption.

    Missing parent folders are created. The text is encoded as UTF-8, and compressed by gzip if the file's name ends in ".gz".
    For a symbolic link, the file that the link names is written.

    Raises:
        OSError: the file cannot be written; an old file is then unchanged.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and not target.is_file():  # a terminal or a pipe cannot be replaced by a file
        target.write_text(text, encoding="utf-8")
        return
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        content = text.encode("utf-8")
        temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == COMPRESSED else content)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Read a JSON file; decompress it if its name ends in ".gz".

    Raises:
        OSError: the file cannot be read, or is not compressed by gzip.
        ValueError: the file is not JSON, or it is truncated.
    """
    content = path.read_bytes()
    try:
        return json.loads(gzip.decompress(content) if path.suffix == COMPRESSED else content)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"the compressed file is damaged: {error}") from error


def without_suffix(path: Path) -> Path:
    """Return the path of a JSON file without ".json" or ".json.gz"."""
    return (path.with_suffix("") if path.suffix == COMPRESSED else path).with_suffix("")
