"""Every order in which the partitions of the Gluon kernel can go on, over what they do in a simulated run.

A partition's waits, arrivals, copies and products do not depend on the others' speed, so that one run has them all. A state is
how far each partition has come and which tiles have landed. In none may a product launch before its tile has landed, a copy
begin into a slot that a product still reads, or all partitions wait.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lab.calls import ContextCall
from lab.kernels.portable import hopper
from lab.kernels.portable.tiles import HopperTile
from tests.cases import context_arguments, random_batch
from tests.kernels import simulated_gluon
from tests.kernels.simulated_gluon import Barrier, Simulator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's tests have it")

# ("wait", barrier, parity), ("arrive", barrier, 0), ("copy", slot, barrier), ("launch", slot, 0), ("complete", left, 0)
Step = tuple[str, Any, int]
NAMES = ("consumer 0", "consumer 1", "producer")


class Recorder(Simulator):
    """A simulator that writes down what each partition does."""

    steps: dict[str, list[Step]]

    def __init__(self, seed: int, unwaited: str | None = None) -> None:
        super().__init__(seed)
        Recorder.steps = {name: [] for name in NAMES}
        Recorder.counts: dict[int, int] = {}
        for name, note in (
            ("wait", lambda barrier, parity, pred=True: [("wait", id(barrier), int(parity))] * bool(pred)),
            ("arrive", lambda barrier: [("arrive", id(barrier), 0)]),
        ):
            setattr(self._globals["mbarrier"], name, self._noting(getattr(self._globals["mbarrier"], name), note))
        tma, copied = self._globals["tma"], lambda _d, _at, barrier, box: [("copy", _slot(box), id(barrier))]
        tma.async_copy_global_to_shared = self._noting(tma.async_copy_global_to_shared, copied)
        launched = lambda a, b, *_, **__: [("launch", _slot(b._slot._memory if hasattr(b, "_slot") else b._memory), 0)]  # noqa: E731
        self._globals["warpgroup_mma"] = self._noting(self._globals["warpgroup_mma"], launched)
        waited = self._globals["warpgroup_mma_wait"]
        self._globals["warpgroup_mma_wait"] = self._noting(waited, lambda left, _: [("complete", left, 0)])
        init = self._globals["mbarrier"].init

        def counting(barrier: Barrier, count: int) -> None:
            Recorder.counts[id(barrier)] = count
            Recorder.kept.append(barrier)
            init(barrier, count)

        Recorder.kept: list[Barrier] = []
        self._globals["mbarrier"].init = counting

    def _noting(self, call: Any, note: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            Recorder.steps[self.scheduler.name.value] += note(*args, **named)
            return call(*args, **named)

        return noted


def _slot(memory: torch.Tensor) -> int:
    """Return a tile's slot: the number of its memory in the ring, which copies fill box by box."""
    return memory.untyped_storage().data_ptr() + memory.storage_offset() // SLOT_ELEMENTS


KEYS, DIMS = 64, 64
SLOT_ELEMENTS = KEYS * DIMS
State = tuple[int, int, int, frozenset[int]]  # steps of each partition, copies that have landed


class Orders:
    """The steps of a run, and the states that they can come to."""

    def __init__(self, steps: dict[str, list[Step]], counts: dict[int, int]) -> None:
        self.steps, self.counts = [steps[name] for name in NAMES], counts
        self.copies = [step for step in self.steps[2] if step[0] == "copy"]

    def phases(self, state: State, barrier: int) -> int:
        """Completed phases: of landed tiles, or of arrivals."""
        copies = [number for number, copy in enumerate(self.copies) if copy[2] == barrier]
        if copies:  # one box a tile here
            return sum(number in state[3] for number in copies)
        arrivals = sum(step[:2] == ("arrive", barrier) for part in range(3) for step in self.steps[part][: state[part]])
        return arrivals // self.counts[barrier]

    def after(self, state: State) -> Iterator[State]:
        """Return the states that one step or one landing makes of a state; check the step."""
        begun = sum(step[0] == "copy" for step in self.steps[2][: state[2]])
        for number in set(range(begun)) - state[3]:
            yield (*state[:3], state[3] | {number})
        for part in range(3):
            if state[part] == len(self.steps[part]):
                continue
            kind, what, parity = self.steps[part][state[part]]
            if kind == "wait" and self.phases(state, what) & 1 == parity:
                continue
            if kind == "launch":
                version = sum(step[:2] == ("launch", what) for step in self.steps[part][: state[part]])
                into = [number for number, copy in enumerate(self.copies) if copy[1] == what]
                assert into[version] in state[3], "a product of a tile that has not landed"
                assert begun <= (into[version + 1] if len(into) > version + 1 else begun), "a tile was overwritten"
            if kind == "copy":
                version = sum(copy[1] == what for copy in self.copies[:begun])
                assert all(self._read(reader, state, what) >= version for reader in (0, 1)), "a copy into a slot in use"
            zero, one, two = (done + (part == each) for each, done in enumerate(state[:3]))
            yield zero, one, two, state[3]

    def _read(self, part: int, state: State, slot: int) -> int:
        """Tiles of a slot that a consumer has multiplied, and waited for."""
        flying: list[int] = []
        done = 0
        for kind, what, _ in self.steps[part][: state[part]]:
            if kind == "launch":
                flying.append(what)
            elif kind == "complete":
                done += sum(each == slot for each in flying[: len(flying) - what])
                flying = flying[len(flying) - what :]
        return done

    def walk(self) -> int:
        """Visit every state; return their number."""
        start: State = (0, 0, 0, frozenset())
        end: State = (*map(len, self.steps), frozenset(range(len(self.copies))))  # type: ignore[assignment]
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            found = [each for each in self.after(state) if each not in seen]
            assert found or state == end or any(True for _ in self.after(state)), f"everybody waits at {state[:3]}"
            seen.update(found)
            left += found
        assert end in seen
        return len(seen)


def test_no_order_deadlocks_or_overwrites(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _device: 1)
    monkeypatch.setattr(simulated_gluon, "Simulator", Recorder)
    batch = random_batch([65], [4 * KEYS], heads=(1, 1), head_dim=DIMS)
    arguments = context_arguments(batch, KEYS, out_dtype=torch.bfloat16, causal=False)
    problem = ContextCall(**arguments).problem()
    tile = HopperTile(128, KEYS, stages=2)
    simulated_gluon.simulate(hopper.hopper_launches(problem, problem.results(), tile, None)[0])
    assert Orders(Recorder.steps, Recorder.counts).walk() > 1000
