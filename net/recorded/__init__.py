"""The recorded state: `<part>.json.gz`."""

import gzip
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def read(path: Path) -> Any:
    """Read JSON, compressed or not."""
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)


def write(path: Path, content: Any) -> None:
    """Write compressed JSON, the same bytes for the same content."""
    text = json.dumps(content, indent=0, ensure_ascii=False, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))
