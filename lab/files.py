"""Write files atomically, and read JSON files that may be damaged. This module imports only the standard library."""

import errno
import gzip
import json
import os
import shutil
import stat
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

COMPRESSED = ".gz"
# Errors that code raises if the content of a file has an unexpected form.
DAMAGED = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


def write_text(path: Path, text: str) -> None:
    """Write a text to a file atomically, in UTF-8. The file is compressed if its name ends in ".gz".

    Missing folders are created. If `path` is a symbolic link, the file to which it points is written. Characters that UTF-8
    cannot encode (halves of surrogate pairs) are escaped. If the file cannot be written, raises OSError with the file's name,
    and leaves an old file unchanged.
    """
    target = Path(os.path.realpath(path))  # which raises nothing for a link to itself
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    content = text.encode("utf-8", errors="backslashreplace")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() and not target.is_file():  # a terminal or a pipe cannot be replaced by a file
            target.write_bytes(content)
            return
        temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == COMPRESSED else content)
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # of a full disk
            error.filename = str(path)
        raise


def regular(path: Path) -> Path:
    """Return the path if it is a regular file, else raise OSError. Reading a pipe or a device may never end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is a folder, a pipe or a device, and no file", str(path))
    return path


def read_json(path: Path) -> Any:
    """Read a JSON file, compressed if its name ends in ".gz". Raise OSError or ValueError if it is damaged or not readable."""
    content = regular(path).read_bytes()
    try:
        content = gzip.decompress(content) if path.suffix == COMPRESSED else content
        if not content:
            raise ValueError("the file is empty")
        return json.loads(content)
    except (EOFError, zlib.error) as error:
        raise ValueError(f"the compressed file is damaged: {error}") from error
    except json.JSONDecodeError as error:
        is_cut = not error.doc[error.pos :].strip() or error.msg.startswith("Unterminated")
        what = "its end is missing" if is_cut else f"it is no JSON ({error.msg})"
        raise ValueError(f"{what}: line {error.lineno}, column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("its lists or objects are nested too deep") from error


def without_suffix(path: Path) -> Path:
    return (path.with_suffix("") if path.suffix == COMPRESSED else path).with_suffix("")


def state_of(path: Path | None) -> tuple[int, int, int] | None:
    """Return (modification time in ns, size in bytes, inode) of a file; None if it is not a regular file."""
    try:
        found = (path or Path()).stat()
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if stat.S_ISREG(found.st_mode) else None
