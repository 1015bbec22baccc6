"""Kernels that want a time or a verdict that they have not earned, each with what refuses it; and honest ones that look alike.

    lab ab decode/llama-3.1-8b/8q1s1k lab.kernels.portable corpus/dishonest/timing.py:CachedByPointer
    lab judge corpus/dishonest/judging.py:PatchesPassed --only K1

`docs/evidence/trust.md` says what each defence is. `tests/corpus` holds every kernel to the refusal that it names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DECODE = "trtllm_batch_decode_with_kv_cache"


@dataclass(frozen=True)
class Refusal:
    """What refuses a kernel.

    Attributes:
        said: a regular expression of the sentence.
        needs_gpu: the kernel cheats a timing, which a CPU has not.
    """

    said: str
    needs_gpu: bool


def dishonest(said: str, *, needs_gpu: bool = False) -> Callable[[type[Any]], Any]:
    """Make a kernel's class the implementation of that name, with what refuses it."""

    def made(cls: type[Any]) -> Any:
        kernel = cls()
        kernel.__name__, kernel.refusal = cls.__name__, Refusal(said, needs_gpu)
        return kernel

    return made


def kernels(module: Any) -> list[Any]:
    """Return the dishonest kernels of a module."""
    return [each for each in vars(module).values() if isinstance(getattr(each, "refusal", None), Refusal)]
