"""Every order in which the partitions of a Gluon kernel can go on, over what they do in a simulated run.

A partition's waits, arrivals, copies and products do not depend on the others' speed, so that one run has them all. A state is
how far each partition has come and which copies have landed. In none may anything be read before it was written, or be written
while it is still read; and in none but the last may all partitions wait.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lab.calls import ContextCall
from lab.calls.mla_decode import MLADecodeCall
from lab.kernels.portable import hopper
from lab.kernels.portable.key_shares import Shares
from lab.kernels.portable.tiles import HopperTile
from lab.kernels.portable.triton_call import TritonLaunch
from tests.cases import CONTEXT, MLA
from tests.kernels import simulated_gluon
from tests.kernels.portable_calls import PortableKernel
from tests.kernels.simulated_gluon import Simulator
from tests.kernels.simulated_shared_memory import Barrier, Shared, Vectors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU's tests have it")

# ("wait", barrier, parity), ("arrive", barrier, 0), ("copy", slots, barrier), ("store", slots, 0), ("load", slots, 0),
# ("launch", slots, 0), ("complete", products left in flight, 0); a slot is an address, a barrier an index
Step = tuple[str, Any, int]
NAMES = ("partition 0", "partition 1", "partition 2")  # two consumers, then the producer


class Recorder(Simulator):
    """A simulator that writes down what each partition does."""

    last: "Recorder"

    def __init__(self, seed: int, barriers: tuple[str, ...]) -> None:
        super().__init__(seed, barriers)
        Recorder.last = self
        self.steps: dict[str, list[Step]] = {name: [] for name in NAMES}
        self.barriers_made: list[Barrier] = []
        mbarrier = self._globals["mbarrier"]
        tma = self._globals["tma"]
        mbarrier.wait = self._noting(
            mbarrier.wait, lambda barrier, parity, pred=True: [("wait", self._index(barrier), int(parity))] * bool(pred)
        )
        mbarrier.arrive = self._noting(mbarrier.arrive, lambda barrier: [("arrive", self._index(barrier), 0)])
        copy = tma.async_copy_global_to_shared
        tma.async_copy_global_to_shared = self._noting(
            copy, lambda _d, _at, barrier, box: [("copy", (box.data_ptr(),), self._index(barrier))]
        )
        for name, note in (
            ("warpgroup_mma", lambda a, b, *_, **__: [("launch", tuple(_slots_of(a) + _slots_of(b)), 0)]),
            ("warpgroup_mma_wait", lambda left, _: [("complete", left, 0)]),
        ):
            self._globals[name] = self._noting(self._globals[name], note)
        init = mbarrier.init

        def counting(barrier: Barrier, count: int) -> None:
            self.barriers_made.append(barrier)
            init(barrier, count)

        mbarrier.init = counting

    def _index(self, barrier: Barrier) -> int:
        return next(index for index, each in enumerate(self.barriers_made) if each is barrier)

    def note(self, steps: list[Step]) -> None:
        """Append steps of the partition that runs; copies that complete the same phase of a barrier become one."""
        noted = self.steps[self.scheduler.name.value]
        for kind, what, other in steps:
            if kind == "copy" and noted and noted[-1][0] == "copy" and noted[-1][2] == other:
                what += noted.pop()[1]
            noted.append((kind, what, other))

    def _noting(self, call: Any, note: Callable[..., list[Step]]) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            self.note(note(*args, **named))
            return call(*args, **named)

        return noted


def _slots_of(operand: Any) -> list[int]:
    operand = getattr(operand, "_slot", operand)  # a transposed one
    return [operand._memory.data_ptr()] if isinstance(operand, Shared) else []


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_gluon, "Simulator", Recorder)
    for of, name, kind in ((Shared, "store", "store"), (Vectors, "store", "store"), (Vectors, "load", "load")):
        call = getattr(of, name)

        def noted(slot: Any, *args: Any, _call: Any = call, _kind: str = kind) -> Any:
            Recorder.last.note([(_kind, (slot._memory.data_ptr(),), 0)])
            return _call(slot, *args)

        monkeypatch.setattr(of, name, noted)


State = tuple[int, int, int, frozenset[int]]  # steps of each partition, copies that have landed


class Orders:
    """The steps of a run, and the states that they can come to."""

    def __init__(self, steps: dict[str, list[Step]], barriers: list[Barrier]) -> None:
        self.steps = [steps[name] for name in NAMES]
        self.counts = [barrier.count for barrier in barriers]
        self.copies = [step for step in self.steps[2] if step[0] == "copy"]
        self.filled_by_copies = {copy[2] for copy in self.copies}
        # After each number of steps of a partition: reads begun and reads done of each slot, writes begun, arrivals.
        self.done = [self._counted(part) for part in self.steps]
        last = [counted[-1] for counted in self.done]
        writes = sum((each["written"] for each in last), Counter())
        self.reads_per_write = [
            {slot: each["read"][slot] // number for slot, number in writes.items()} for each in last
        ]

    @staticmethod
    def _counted(steps: list[Step]) -> list[dict[str, Counter[int]]]:
        counted: list[dict[str, Counter[int]]] = [{name: Counter() for name in ("begun", "read", "written", "arrived")}]
        flying: list[tuple[int, ...]] = []
        for kind, what, _ in steps:
            now = {name: counter.copy() for name, counter in counted[-1].items()}
            if kind == "launch":
                now["begun"].update(what)
                flying.append(what)
            elif kind == "complete":
                while len(flying) > what:
                    now["read"].update(flying.pop(0))
            elif kind == "load":
                now["begun"].update(what)
                now["read"].update(what)
            elif kind in ("copy", "store"):
                now["written"].update(what)
            elif kind == "arrive":
                now["arrived"][what] += 1
            counted.append(now)
        return counted

    def phases(self, state: State, barrier: int) -> int:
        """Completed phases: of landed tiles, or of arrivals."""
        if barrier in self.filled_by_copies:
            return sum(self.copies[number][2] == barrier for number in state[3])
        return sum(self.done[part][state[part]]["arrived"][barrier] for part in range(3)) // self.counts[barrier]

    def after(self, state: State) -> Iterator[State]:
        """Return the states that one step or one landing makes of a state; check the step."""
        begun = sum(step[0] == "copy" for step in self.steps[2][: state[2]])
        for number in set(range(begun)) - state[3]:
            yield (*state[:3], state[3] | {number})
        done = [self.done[part][state[part]] for part in range(3)]
        flying = set(range(begun)) - state[3]
        for part in range(3):
            if state[part] == len(self.steps[part]):
                continue
            kind, what, parity = self.steps[part][state[part]]
            if kind == "wait" and self.phases(state, what) & 1 == parity:
                continue
            for slot in what if kind in ("launch", "load", "copy", "store") else ():
                writes = sum(each["written"][slot] for each in done)
                if kind in ("launch", "load"):
                    version = done[part]["begun"][slot] // self.reads_per_write[part][slot]
                    assert writes == version + 1, "something was read too early, or overwritten"
                    assert not any(slot in self.copies[number][1] for number in flying), "a read before the copy landed"
                else:
                    reads = [each["read"][slot] for each in done]
                    needed = [writes * self.reads_per_write[reader][slot] for reader in range(3)]
                    assert all(map(int.__ge__, reads, needed)), "a write into a slot in use"
            zero, one, two = (steps + (part == each) for each, steps in enumerate(state[:3]))
            yield zero, one, two, state[3]

    def walk(self) -> int:
        """Visit every state; return their number."""
        start: State = (0, 0, 0, frozenset())
        end: State = (*map(len, self.steps), frozenset(range(len(self.copies))))  # type: ignore[assignment]
        seen, left = {start}, [start]
        while left:
            state = left.pop()
            after = list(self.after(state))
            assert after or state == end, f"everybody waits at {state[:3]}"
            found = set(after) - seen
            seen |= found
            left += found
        assert end in seen
        return len(seen)


KEYS, DIMS = 64, 64  # of a slot, which one box fills


def mha_launch() -> TritonLaunch:
    """Four tiles of one request."""
    arguments = PortableKernel(CONTEXT).pose([65], [4 * KEYS], KEYS, heads=1, head_dim=DIMS, causal=False)
    problem = ContextCall(**arguments).problem()
    return hopper.hopper_launches(problem, problem.results(), HopperTile(128, KEYS, stages=2), None, None)[0]


def mla_launch() -> TritonLaunch:
    """Four tiles of each of two requests: every slot is read as often after each write."""
    arguments = PortableKernel(MLA).pose([1, 1], [4 * KEYS] * 2, KEYS, heads=64, rank=2 * DIMS, rope=DIMS)
    problem = MLADecodeCall(**arguments).problem()
    tile = HopperTile(64, KEYS, stages=2, start_keys=KEYS)
    return hopper.hopper_mla_launches(problem, problem.results(), tile, Shares(1))[0]


def recorded(launch: TritonLaunch) -> Recorder:
    simulated_gluon.simulate(launch)
    return Recorder.last


@pytest.mark.parametrize("make", [mha_launch, mla_launch])
def test_no_order_deadlocks_or_overwrites(make: Callable[[], TritonLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _device: 1)
    run = recorded(make())
    assert Orders(run.steps, run.barriers_made).walk() > 1000


@pytest.mark.parametrize("make", [mha_launch, mla_launch])
def test_each_wait_is_needed(make: Callable[[], TritonLaunch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the waits for a kind of barrier, some order is wrong."""
    monkeypatch.setattr(hopper, "num_multiprocessors", lambda _device: 1)
    run = recorded(make())
    for name in {barrier.name for barrier in run.barriers_made}:
        without = {
            part: [step for step in steps if step[0] != "wait" or run.barriers_made[step[1]].name != name]
            for part, steps in run.steps.items()
        }
        with pytest.raises(AssertionError):
            Orders(without, run.barriers_made).walk()
