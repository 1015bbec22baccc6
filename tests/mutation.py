"""Mutation testing: change one operator or constant of a room, and find out whether the room's own tests see it.

    python -m tests.mutation --seed 1 --count 200                  # 200 mutations, the same number in each room
    python -m tests.mutation --seed 1 --count 30 --rooms timing
    python -m tests.mutation --seed 1 --count 200 --again          # once more those that were not seen

cosmic-ray makes the mutations. Each is made in a copy of the checkout; the room's tests run there until the first failure, for
120 seconds at most. They run there without a mutation before: where they fail, none would survive. Tests that name the changed
module run first. `--out` keeps the outcomes and is read at the start: what it holds is not run again. Mutations that change
nothing are in `equal_mutations.py`, each with its reason; they are not run.
"""

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from lab.files import write_text
from tests.equal_mutations import EQUAL

ROOT = Path(__file__).parents[1]
LIMIT_S = 120
SEEN, SURVIVED, SLOW = "seen", "survived", "over the time limit"
# Not cosmic-ray's exchange of `==` for `is`, nor its changes of names, decorators and caught exceptions.
OPERATORS = ("AddNot", "NumberReplacer", "ReplaceBinary", "ReplaceBreak", "ReplaceContinue", "ZeroIteration")
OPERATORS += ("ReplaceAnd", "ReplaceOr", "ReplaceTrue", "ReplaceFalse", "ReplaceUnary", "ReplaceComparison")
OF_EVERY_ROOM = "tests/test_dataclasses.py"
COPIED = ("lab", "tests", "corpus", "studies", "docs", "pyproject.toml")


@dataclass(frozen=True)
class Room:
    """Patterns of the files that are mutated, and of the tests that must see it."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "calls": Room(
        ("lab/calls/*.py", "lab/gpus.py"),
        (
            "tests/calls/test_*.py",
            *(f"tests/references/test_{name}.py" for name in ("trtllm_*", "dsv4", "context_parallel", "every_call")),
        ),
    ),
    "references": Room(("lab/references/*.py",), ("tests/references/test_*.py",)),
    "metadata": Room(("lab/metadata/**/*.py",), ("tests/metadata/**/test_*.py",)),
    "timing": Room(("lab/timing/*.py",), ("tests/timing/test_*.py",)),
    "support": Room(
        ("lab/kernels/support/*.py",),
        tuple(
            f"tests/kernels/test_{name}.py"
            for name in ("support*", "trtllm_adapter", "prepare", "dsv4", "peers_packages", "implementations")
        ),
    ),
    "explain": Room(("lab/checks/explain/*.py",), ("tests/checks/explain/test_*.py", "tests/checks/test_report.py")),
}


@dataclass(frozen=True)
class Mutation:
    """One mutation of a file: the file's text afterwards, and the first line that differs."""

    room: str
    path: str
    text: str
    line: int
    before: str
    after: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What names the mutation in a file of outcomes and in `EQUAL`, also when lines have moved."""
        return self.path, self.before, self.after


def sample(room: str, count: int, seed: int) -> list[Mutation]:
    rng = random.Random(f"{seed} {room}")
    files = sorted({path for pattern in ROOMS[room].sources for path in ROOT.glob(pattern)})
    places = [(path, choices) for path in files for choices in mutable_places(path.read_text(encoding="utf-8"))]
    rng.shuffle(places)
    drawn = (_mutation(room, path, rng.sample(choices, len(choices))) for path, choices in places)
    return list(itertools.islice(filter(None, drawn), count))


def mutable_places(text: str) -> list[list[tuple[str, int]]]:
    """Return the mutations of each place of a source: (operator, occurrence). Annotations have none, nor has a `*` between
    parameters.
    """
    skipped = list(_annotations(text))
    nodes = list(ast_nodes(get_ast(text)))
    found: dict[tuple[int, int], list[tuple[str, int]]] = defaultdict(list)
    for name in operator_names():
        is_exchange_for_identity = "_Is" in name and name.count("_Is") == 1
        if not name.removeprefix("core/").startswith(OPERATORS) or is_exchange_for_identity:
            continue
        operator = get_operator(name)()
        places = ((node, place) for node in nodes for place, _ in operator.mutation_positions(node))
        for occurrence, (node, place) in enumerate(places):
            is_parameter = getattr(node.parent, "type", "") == "parameters"
            if not is_parameter and not any(start <= place < end for start, end in skipped):
                found[place].append((name, occurrence))
    return [found[place] for place in sorted(found)]


def _annotations(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for node in ast.walk(ast.parse(text)):
        for name in ("annotation", "returns"):
            if (each := getattr(node, name, None)) is not None:
                yield (each.lineno, each.col_offset), (each.end_lineno, each.end_col_offset)


def _mutation(room: str, path: Path, choices: Sequence[tuple[str, int]]) -> Mutation | None:
    """Make the first of the mutations that leaves a program; None if none does."""
    text = path.read_text(encoding="utf-8")
    for name, occurrence in choices:
        changed = mutate_code(text, get_operator(name)(), occurrence)
        lines = zip(itertools.count(1), text.splitlines(), (changed or text).splitlines(), strict=False)
        differing = next(((number, *pair) for number, *pair in lines if pair[0] != pair[1]), None)
        with contextlib.suppress(SyntaxError):
            if differing is not None and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(text)):
                line, before, after = differing
                return Mutation(room, path.relative_to(ROOT).as_posix(), changed, line, before.strip(), after.strip())
    return None


class Copy:
    """A copy of the checkout, in which one mutation at a time is made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            copy = shutil.copytree if source.is_dir() else shutil.copy2
            copy(source, folder / name)
        (folder / "results").symlink_to(ROOT / "results")

    def outcome(self, mutation: Mutation, limit_s: float) -> str:
        """Make the mutation, run its room's tests, and restore the file."""
        path = self.folder / mutation.path
        was = path.stat()
        original = path.read_bytes()
        path.write_text(mutation.text, encoding="utf-8")
        try:
            return self._run(self._tests(mutation.room, path.stem), limit_s)
        finally:
            path.write_bytes(original)
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))  # its compiled file is right again

    def check(self, room: str) -> None:
        """Run the room's tests without a mutation; exit with the end of their output if they fail."""
        done = subprocess.run(
            self._command(self._tests(room)), capture_output=True, text=True, check=False, **self._place
        )
        if done.returncode:
            sys.exit(f"the tests of {room} fail without a mutation:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")

    def _tests(self, room: str, stem: str = "") -> list[str]:
        """Return the room's files of tests, those first that name the module, and of these the one of its name."""
        found = {path for pattern in (*ROOMS[room].tests, OF_EVERY_ROOM) for path in self.folder.glob(pattern)}
        ranks = {path: (path.stem != f"test_{stem}", stem not in path.read_text(encoding="utf-8")) for path in found}
        return [str(path.relative_to(self.folder)) for path in sorted(found, key=lambda path: (ranks[path], path))]

    @property
    def _place(self) -> dict[str, Any]:
        variables = {"PYTHONPATH": str(self.folder), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        variables |= {"PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}  # a GPU would change what tests see
        return {"cwd": self.folder, "env": os.environ | variables}

    def _command(self, tests: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not gpu", *tests]

    def _run(self, tests: Sequence[str], limit_s: float) -> str:
        nowhere, command = subprocess.DEVNULL, self._command(tests)
        process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, start_new_session=True, **self._place)
        try:
            return SURVIVED if process.wait(limit_s) == 0 else SEEN
        except subprocess.TimeoutExpired:
            return SLOW
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what the tests started too
            process.wait()


def run(mutations: Sequence[Mutation], known: dict[str, str], workers: int, out: Path, limit_s: float) -> None:
    """Run what is not known, and note each outcome in the file of outcomes."""
    copies: Queue[Copy] = Queue()
    writing = Lock()

    def one(mutation: Mutation) -> None:
        name = " | ".join(mutation.key)
        if name in known or mutation.key in EQUAL:
            return
        copy, start = copies.get(), time.monotonic()
        try:
            known[name] = copy.outcome(mutation, limit_s)
        finally:
            copies.put(copy)
        with writing:
            write_text(out, json.dumps(known, indent=1, ensure_ascii=False) + "\n")
        print(f"{known[name]} ({time.monotonic() - start:.0f} s) {mutation.path}:{mutation.line}", flush=True)
        if known[name] != SEEN:
            print(f"    {mutation.before}\n    {mutation.after}", flush=True)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        for number in range(workers):
            copies.put(Copy(Path(folder) / str(number)))
        list(pool.map(copies.queue[0].check, dict.fromkeys(each.room for each in mutations)))
        list(pool.map(one, mutations))


def summary(mutations: Sequence[Mutation], known: dict[str, str]) -> Iterator[str]:
    for room in dict.fromkeys(each.room for each in mutations):
        counts = Counter(
            "equal" if each.key in EQUAL else known.get(" | ".join(each.key), "not run")
            for each in mutations
            if each.room == room
        )
        yield f"{room}: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}"
    names = {" | ".join(each.key) for each in mutations if each.key not in EQUAL} & known.keys()
    seen = sum(known[name] == SEEN for name in names)
    yield f"{seen} of {len(names)} mutations that change something are seen ({seen / max(1, len(names)):.0%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200, help="mutations of all rooms together")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=list(ROOMS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="most seconds for the tests of one mutation")
    parser.add_argument("--out", type=Path, default=ROOT / ".benchmarks" / "mutation.json")
    parser.add_argument("--again", action="store_true", help="run those again that were not seen")
    options = parser.parse_args()
    each = -(-options.count // len(options.rooms))
    mutations = [mutation for room in options.rooms for mutation in sample(room, each, options.seed)]
    known = json.loads(options.out.read_text()) if options.out.exists() else {}
    if options.again:
        known = {name: outcome for name, outcome in known.items() if outcome == SEEN}
    try:
        run(mutations, known, options.workers, options.out, options.limit_s)
    finally:
        print("\n".join(summary(mutations, known)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
