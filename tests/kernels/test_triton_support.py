"""What the attention kernels share, by itself: how many pieces a request gets."""

from fractions import Fraction

import pytest
import torch
import triton
import triton.language as tl

from lab.kernels.triton_support import BLOCK_REQUESTS, own_share
from tests.devices import DEVICES


@triton.jit
def _every_share(shares, seq_lens, most_keys, batch_size, total_splits, num_splits):
    request = tl.program_id(0)
    kv_len = tl.load(seq_lens + request).to(tl.int32)
    tl.store(shares + request, own_share(seq_lens, kv_len, most_keys, batch_size, total_splits, num_splits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch_size", [1, 3, BLOCK_REQUESTS.value, 2 * BLOCK_REQUESTS.value + 5])
@pytest.mark.parametrize("most_keys", [90, 2**31 - 1])
def test_shares_go_by_length(device: str, batch_size: int, most_keys: int) -> None:
    """The rounded share of the keys that count, but one piece at least and `num_splits` at most; whatever the batch."""
    lengths = [(37 * request * request) % 1000 for request in range(batch_size)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    shares = torch.full((batch_size,), -1, dtype=torch.int32, device=device)
    total, most = 3 * batch_size + 1, 7
    _every_share[(batch_size,)](shares, seq_lens, most_keys, batch_size, total, most)
    counted = [min(length, most_keys) for length in lengths]
    every_key = max(sum(counted), 1)
    expected = [
        min(max(int(Fraction(length * total, every_key) + Fraction(every_key // 2, every_key)), 1), most)
        for length in counted
    ]
    assert shares.tolist() == expected


@pytest.mark.parametrize("device", DEVICES)
def test_shares_of_long_batches_do_not_overflow(device: str) -> None:
    """A product of a length and the pieces, and the sum of the lengths, beyond 32 bits."""
    seq_lens = torch.full((40,), 2**30, dtype=torch.int32, device=device)
    shares = torch.full((40,), -1, dtype=torch.int32, device=device)
    _every_share[(40,)](shares, seq_lens, 2**31 - 1, 40, 160, 64)
    assert shares.tolist() == [4] * 40
