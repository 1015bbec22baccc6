"""Kernels that try to get a false time or verdict, each with the message that refuses it; and honest kernels that look similar.

    lab ab decode/llama-3.1-8b/8q1s1k lab.kernels.portable corpus/dishonest/timing.py:CachedByPointer
    lab judge corpus/dishonest/judging.py:PatchesPassed --only K1

`docs/evidence/trust.md` describes each defence. `tests/corpus` checks that every kernel gets the refusal that it names.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DECODE = "trtllm_batch_decode_with_kv_cache"


@dataclass(frozen=True)
class Refusal:
    """The expected refusal of a kernel.

    Attributes:
        said: regular expression for the sentence of the refusal.
        needs_gpu: the kernel cheats a timing, which needs a GPU.
    """

    said: str
    needs_gpu: bool


def dishonest(said: str, *, needs_gpu: bool = False) -> Callable[[type[Any]], Any]:
    """Return a decorator that makes a kernel's class an implementation with its expected refusal."""

    def made(cls: type[Any]) -> Any:
        kernel = cls()
        kernel.__name__, kernel.refusal = cls.__name__, Refusal(said, needs_gpu)
        return kernel

    return made


def kernels(module: Any) -> list[Any]:
    return [each for each in vars(module).values() if isinstance(getattr(each, "refusal", None), Refusal)]
