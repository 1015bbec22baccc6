"""Who needs lengths on the host, and the copy that brings them there."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from lab.metadata.engine.host_mirrors import LengthMirror, decide_needs_cpu_seq_lens

NEEDS, NEEDS_NOT = (SimpleNamespace(needs_cpu_seq_lens=needs) for needs in (True, False))
ANSWERS = [(NEEDS, True), (NEEDS_NOT, False), (SimpleNamespace(), True), (None, False)]  # one says nothing, one is none


@pytest.mark.parametrize("count", range(4))
def test_one_backend_that_reads_lengths_on_the_host_is_enough(count: int) -> None:
    """Work that splits the batch on the host needs them whatever the backends say."""
    for backends in itertools.product(ANSWERS, repeat=count):
        objects = [backend for backend, _ in backends]
        assert decide_needs_cpu_seq_lens(objects) is any(answer for _, answer in backends)
        for flag in ("two_batch_overlap", "ngram"):
            assert decide_needs_cpu_seq_lens(objects, **{flag: True}) is True
            assert decide_needs_cpu_seq_lens(objects, **{flag: False}) is decide_needs_cpu_seq_lens(objects)


@pytest.mark.parametrize(
    ("lengths", "dtype"),
    [
        ([2**40], torch.int64),
        *itertools.product(([], [7], [3, 0, 2**31 - 1, 5]), (torch.int32, torch.int64)),
    ],
)
def test_reads_lengths_and_their_sum(lengths: list[int], dtype: torch.dtype) -> None:
    seq_lens_cpu, seq_lens_sum = LengthMirror(4, "cpu").read(torch.tensor(lengths, dtype=dtype))
    assert seq_lens_cpu == lengths
    assert type(seq_lens_sum) is int
    assert seq_lens_sum == sum(lengths)  # above int32's range too


def test_a_later_read_leaves_an_earlier_ones_numbers_alone() -> None:
    mirror = LengthMirror(3, "cpu")
    seq_lens = torch.tensor([1, 2, 3])
    first, _ = mirror.read(seq_lens)
    second, _ = mirror.read(seq_lens[::2] + 10)
    assert (first, second) == ([1, 2, 3], [11, 13])


@pytest.mark.parametrize(
    ("seq_lens", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), ValueError, "3 entries, more than max_batch_size=2"),
        (torch.zeros(2), TypeError, r"expected torch.int32 or torch.int64: convert it with .to\(torch.int64\)"),
        (torch.zeros(1, 2, dtype=torch.int64), ValueError, r"shape \[1, 2\]"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), ValueError, "on meta, but this mirror copies from cpu"),
    ],
)
def test_what_it_cannot_copy_is_refused(seq_lens: torch.Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        LengthMirror(2, "cpu").read(seq_lens)


@pytest.mark.parametrize(("size", "device", "message"), [(0, "cpu", "max_batch_size=0"), (1, "meta", "device='meta'")])
def test_a_mirror_of_nothing_is_refused(size: int, device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LengthMirror(size, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU, and there is none here")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_waits_for_what_the_current_stream_still_writes(dtype: torch.dtype) -> None:
    """The lengths are written after milliseconds of work, on a stream that is not the default one."""
    mirror, side = LengthMirror(64), torch.cuda.Stream()
    matrix = torch.randn(4096, 4096, device="cuda")
    seq_lens = torch.zeros(64, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        for _ in range(20):
            matrix @ matrix
        seq_lens += 3
        assert mirror.read(seq_lens) == ([3] * 64, 192)
