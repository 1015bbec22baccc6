"""The tile of each Triton kernel on each class of GPU: GPUs without 227 KiB of shared memory (SM80, SM86, SM89, SM120, SM121
and unknown GPUs), SM90, and SM100 with SM103, whose accumulators lie in tensor memory. The interpreter runs SM90's tiles.

SM90's tiles were chosen by measurement on an H200 (results/nvidia-h200/kernels.md, "Tiles and their neighbours"), all other
tiles by the output of Triton's compiler, never timed (results/blackwell-dry-run/portable.md names the tiles that spill
registers).
"""

import triton

from lab.gpus import SM90, Capability, family_that_runs
from lab.kernels.portable.tiles import ProgramTile

# Tiles of SM100 and SM103 that differ from SM90's, by (rows, head_dim, bytes of an element of K and V). With a head_dim of 256
# all tiles for tcgen05, the matrix instruction of these GPUs, spill; these tiles spill least.
SM100_PAGED = {
    (16, 128, 2): ProgramTile(16, 64, num_warps=4, num_stages=3, per_multiprocessor=2),
    (32, 64, 2): ProgramTile(32, 32, num_warps=4, num_stages=3, per_multiprocessor=2),
    (32, 128, 2): ProgramTile(32, 32, num_warps=4, num_stages=3, per_multiprocessor=2),
    (32, 256, 2): ProgramTile(32, 32, num_warps=4, num_stages=3, per_multiprocessor=2),
    (64, 64, 2): ProgramTile(64, 32, num_warps=4, num_stages=4, per_multiprocessor=2),
    (64, 64, 1): ProgramTile(64, 64, num_warps=4, num_stages=4, per_multiprocessor=2),
    (64, 128, 2): ProgramTile(64, 32, num_warps=8, num_stages=4),
    (64, 128, 1): ProgramTile(64, 64, num_warps=8, num_stages=3),
    (64, 256, 2): ProgramTile(64, 16, num_warps=8, num_stages=4),
    (64, 256, 1): ProgramTile(64, 16, num_warps=8, num_stages=4),
    (128, 128, 2): ProgramTile(64, 32, num_warps=8, num_stages=4),
    (128, 128, 1): ProgramTile(64, 64, num_warps=8, num_stages=3),
    (128, 256, 2): ProgramTile(64, 16, num_warps=8, num_stages=4),
    (128, 256, 1): ProgramTile(64, 16, num_warps=8, num_stages=4),
}
# The tiles of `choose_prefill_tile` on SM100 and SM103, by (head_dim, bytes of an element of K and V).
SM100_PREFILL = {
    (128, 2): ProgramTile(128, 32, num_warps=8, num_stages=3, by_descriptor=True),
    (128, 1): ProgramTile(128, 32, num_warps=8, num_stages=3),
    (256, 2): ProgramTile(64, 16, num_warps=8, num_stages=4, by_descriptor=True),
}


def choose_tile(num_packed_rows: int, head_dim: int, kv_bytes: int, capability: Capability | None) -> ProgramTile:
    """Return the tile of the paged kernel for requests of at most `num_packed_rows` rows (max_q_len * query heads per K/V
    head). `kv_bytes`: bytes of an element of K/V.

    A matrix unit takes at least 16 rows. Up to 64 rows the call is bound by reading K/V: the tile is as small as the rows
    allow, and two programs on a multiprocessor hide each other's waits. With more rows SM90 is bound by its matrix
    products, and tiles have 128 rows, for two warp groups. Programs with such tiles load K/V by TMA, so that no registers hold
    addresses. Programs with tiles of up to 32 rows load K/V by TMA because the first keys then arrive sooner.
    """
    family = family_that_runs(capability)
    rows = max(16, triton.next_power_of_2(num_packed_rows))
    if not family.has_large_shared_memory:
        return _small_paged(rows, head_dim)
    rows = min(rows, 128)
    tile = _sm90_paged(rows, head_dim, kv_bytes)
    if not family.has_tensor_memory:
        return tile
    return SM100_PAGED.get((rows, head_dim, kv_bytes), tile._replace(by_descriptor=tile.rows == 128))


def _small_paged(rows: int, head_dim: int) -> ProgramTile:
    # The sums of 64 rows and a head_dim of 128 need the registers of 8 warps, those of 32 rows and 256 the registers of 4.
    rows = min(rows, 64 if head_dim <= 128 else 32)
    keys = max(16, 32 * 128 // max(head_dim, 128))
    if rows == 64 and head_dim > 64:
        return ProgramTile(rows, keys, num_warps=8, num_stages=2)
    return ProgramTile(rows, keys, num_warps=4, num_stages=2, per_multiprocessor=2)


def _sm90_paged(rows: int, head_dim: int, kv_bytes: int) -> ProgramTile:
    if rows == 128:
        keys, num_stages = (64, 3) if head_dim <= 128 else (32, 2)
        return ProgramTile(rows, keys, num_warps=8, num_stages=num_stages, start_keys=512, by_descriptor=True)
    if rows == 64:
        return ProgramTile(
            rows, 64 * 128 // (max(head_dim, 64) * kv_bytes), num_warps=4, num_stages=4, per_multiprocessor=2
        )
    return ProgramTile(
        rows,
        64 * 128 // max(head_dim, 128),
        num_warps=4,
        num_stages=3 if kv_bytes > 1 else 4,
        per_multiprocessor=2,
        by_descriptor=True,
        denominator_per_key=(rows, head_dim, kv_bytes) != (32, 128, 2),
    )


def choose_prefill_tile(
    tile: ProgramTile, head_dim: int, kv_bytes: int, described: bool, capability: Capability | None
) -> ProgramTile:
    """Return the tile of the paged kernel for launches in which one program reads all keys of a block of rows. `tile`: the
    result of `choose_tile`. `described`: True if TMA can load the tiles of K and V.

    Blocks of 64 rows read no more from memory than blocks of 128, because programs of one request find its keys in L2, and they
    mask fewer keys. With pages of 16 tokens, which TMA does not load, blocks of 64 rows were slower on SM90. On SM100 one
    product takes 128 rows. If a request has up to 32 rows, a program has two warps, so that four programs run on a
    multiprocessor and hide each other's waits.
    """
    if family_that_runs(capability).has_tensor_memory:
        return SM100_PREFILL.get((head_dim, kv_bytes), tile) if tile.rows >= 64 else tile
    if tile.rows <= 32 and head_dim <= 128 and family_that_runs(capability) is SM90:
        return tile._replace(keys=32, num_warps=2)
    narrow = tile._replace(rows=64, num_warps=4, per_multiprocessor=2)
    return narrow if tile.rows == 128 and described else tile


def choose_mla_tile(num_packed_rows: int, kv_bytes: int, capability: Capability | None) -> ProgramTile:
    """Return the tile of the MLA kernel for requests of at most `num_packed_rows` rows (max_q_len * num_qo_heads). At a
    kv_lora_rank of 512 the sums of 64 rows take half the registers of an SM90 multiprocessor.
    """
    family = family_that_runs(capability)
    if not family.has_large_shared_memory:
        most_rows = 16
    elif family.has_tensor_memory:  # tiles of 64 rows spill (results/blackwell-dry-run/portable.md, "MLA on SM100")
        most_rows = 32 if kv_bytes > 1 else 16
    else:
        most_rows = 64
    rows = min(max(16, triton.next_power_of_2(num_packed_rows)), most_rows)
    if most_rows == 16:
        return ProgramTile(rows, keys=32, num_warps=8, num_stages=3, denominator_per_key=True)
    return ProgramTile(
        rows,
        keys=32 if family.has_tensor_memory and rows == 32 else 64,
        num_warps=8,
        num_stages=2 if rows == 64 else 3,
        by_descriptor=rows == 64,
        denominator_per_key=rows == 16,
    )


def choose_ragged_tile(max_q_len: int, head_dim: int, v_head_dim: int, capability: Capability | None) -> ProgramTile:
    """Return the tile of the ragged kernel: as large as registers and shared memory allow. The tiles were not timed. There are
    few different tiles, so that a new length rarely compiles a new kernel.
    """
    roomy = family_that_runs(capability).has_large_shared_memory
    wide = head_dim + v_head_dim > 320
    rows = min(max(16, triton.next_power_of_2(max_q_len)), 128 if roomy and not wide else 64)
    num_warps = 8 if rows == 128 or (wide and rows == 64) else 4
    return ProgramTile(rows, keys=64 if roomy else 32, num_warps=num_warps, num_stages=3 if roomy and not wide else 2)
