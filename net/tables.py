"""The tables that the commands make of `results/`, as lines of text."""

import re
import subprocess
import sys
import tempfile
from difflib import unified_diff
from pathlib import Path

ROOT = Path(__file__).parents[1]
H100, H200 = "results/nvidia-h100", "results/nvidia-h200"
MARKDOWN = ("--markdown", "-")
# Arguments of `lab`; OUT is a folder, whose text files are read. A recorded file may be compressed: its name's ".gz" is added.
COMMANDS = (
    *(("report", f"{H100}/{name}.json", "--out", "OUT") for name in ("timings", "corners")),
    *(
        ("report", f"{H200}/{name}.json", "--out", "OUT")
        for name in ("timings", "corners", "timings_draft", "timings_windows")
    ),
    (
        "compare",
        f"{H200}/timings.json",
        "--by",
        "implementation",
        "lab.kernels.portable",
        "lab.kernels.trtllm",
        *MARKDOWN,
    ),
    ("compare", f"{H100}/judge/xqa.json", f"{H200}/judge/xqa.json", *MARKDOWN),
    ("compare", f"{H100}/judge/fmha.json", f"{H200}/judge/fmha.json", *MARKDOWN),
    ("releases", "results/nvidia-h200-releases/*-e4m3.json", "--findings", f"{H200}/findings.md", *MARKDOWN),
    ("releases", "results/nvidia-h200-releases/*-bf16.json", *MARKDOWN),
    ("judge", f"{H200}/judge/fmha.json", "--coverage"),
    ("experiments", "changes", "--out", "OUT"),
    ("html", H100, "--out", "OUT/page.html"),
)


def record(only: str = "") -> dict[str, list[str]]:
    """Run the commands, and return the lines of each by its arguments."""
    return {name: lines_of(command) for command in COMMANDS if only in (name := " ".join(command))}


def lines_of(command: tuple[str, ...]) -> list[str]:
    """Return the lines that a command prints, or those of the files that it writes."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [text for argument in command for text in _existing(argument.replace("OUT", folder))]
        done = subprocess.run([sys.executable, "-m", "lab", *arguments], capture_output=True, text=True, cwd=ROOT)
        written = [path.read_text() for path in sorted(Path(folder).rglob("*")) if path.suffix in (".md", ".html")]
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode in (0, 1, 125), done.stderr
    text = "\n".join(written) if written else done.stdout
    text = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", text)
    text = re.sub(r"<[^>]*>", "\n", text).replace(".json.gz", ".json")
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def _existing(argument: str) -> list[str]:
    """Return the recorded files that an argument names; any other argument as it is."""
    if not argument.startswith("results/") or not re.search(r"\.json$", argument):
        return [argument]
    return sorted(str(path.relative_to(ROOT)) for end in ("", ".gz") for path in ROOT.glob(argument + end))


def compare_lines(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[str]:
    """Return what changed, a unified diff without context for each name."""
    faults = []
    for name, lines in after.items():
        changes = [
            line for line in unified_diff(before[name], lines, n=0, lineterm="") if line[:2] not in ("--", "++", "@@")
        ]
        if changes:
            faults.append("\n    ".join((name, *changes)))
    return faults
