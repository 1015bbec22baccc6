"""Copies of work: every tensor its own, views of one memory still views of one memory."""

from dataclasses import dataclass

import torch

from lab.timing import GpuWork


@dataclass(frozen=True)
class Nested:
    inside: tuple[torch.Tensor, torch.Tensor]


def test_a_copy_shares_no_memory_and_keeps_its_views() -> None:
    pool = torch.arange(24.0).view(2, 3, 4)
    out = torch.zeros(4, 3)

    def total(nested: Nested, out: torch.Tensor) -> None:
        out.copy_(nested.inside[0] + nested.inside[1])

    work = GpuWork.of(total, 1, nested=Nested((pool[0].T, pool[1].T)), out=out)
    second = work.copy(1)
    k, v = second.arguments["nested"].inside
    assert k.stride() == pool[0].T.stride()
    assert v.data_ptr() - k.data_ptr() == pool[1].data_ptr() - pool[0].data_ptr()
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() != pool.untyped_storage().data_ptr()
    second.call()()
    assert torch.equal(second.arguments["out"], pool[0].T + pool[1].T)
    assert not out.any()
