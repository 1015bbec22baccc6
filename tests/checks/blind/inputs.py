"""Inputs of the documented calls for check.py."""

import torch

E4M3 = torch.float8_e4m3fn


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def rnd(g, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=g, dtype=torch.float32).to(dtype)


def table_of(g, lens, ps, extra=3, columns=None):
    """Shuffled pages: (int32 [batch, columns], pages in the pool)."""
    counts = [-(-n // ps) for n in lens]
    pool = sum(counts) + extra
    ids = torch.randperm(pool, generator=g).to(torch.int32)
    width = max(max(counts), 1) if columns is None else columns
    table = torch.zeros(len(lens), width, dtype=torch.int32)
    at = 0
    for r, c in enumerate(counts):
        table[r, :c] = ids[at : at + c]
        at += c
    return table, pool


def decode(lens=(70, 5, 130), heads=4, kv=2, d=64, ps=16, q_len=1, dtype=torch.bfloat16, kv_dtype=None, seed=0, widths=None,
           pad_rows=0, **more):
    g = gen(seed)
    table, pool = table_of(g, lens, ps)
    rows = (sum(widths) if widths else len(lens) * q_len) + pad_rows
    cache = tuple(rnd(g, pool, kv, ps, d, dtype=kv_dtype or dtype) for _ in "kv")
    a = dict(query=rnd(g, rows, heads, d, dtype=dtype), kv_cache=cache, workspace_buffer=None, block_tables=table,
             seq_lens=torch.tensor(lens, dtype=torch.int32), max_seq_len=max(lens), bmm1_scale=d**-0.5)
    if widths:
        a |= dict(q_len_per_req=None, max_q_len=max(widths), cum_seq_lens_q=cum(widths))
    else:
        a |= dict(q_len_per_req=q_len)
    return a | more


def cum(xs):
    return torch.tensor([0, *torch.tensor(list(xs)).cumsum(0).tolist()], dtype=torch.int32)


def context(lens=(70, 5, 130), widths=(20, 5, 33), heads=4, kv=2, d=64, ps=16, dtype=torch.bfloat16, kv_dtype=None, seed=0,
            pad_rows=0, **more):
    g = gen(seed)
    table, pool = table_of(g, lens, ps)
    cache = tuple(rnd(g, pool, kv, ps, d, dtype=kv_dtype or dtype) for _ in "kv")
    return dict(query=rnd(g, sum(widths) + pad_rows, heads, d, dtype=dtype), kv_cache=cache, workspace_buffer=None,
                block_tables=table, seq_lens=torch.tensor(lens, dtype=torch.int32), max_q_len=max(widths),
                max_kv_len=max(lens), bmm1_scale=d**-0.5, bmm2_scale=1.0, batch_size=len(lens), cum_seq_lens_q=cum(widths),
                cum_seq_lens_kv=cum(lens)) | more


def mla(lens=(70, 5, 130), q_len=1, heads=16, rank=64, rope=16, ps=32, dtype=torch.bfloat16, kv_dtype=None, seed=0, widths=None,
        pad_rows=0, **more):
    g = gen(seed)
    table, pool = table_of(g, lens, ps)
    d = rank + rope
    a = dict(kv_cache=rnd(g, pool, ps, d, dtype=kv_dtype or dtype), workspace_buffer=None, qk_nope_head_dim=32,
             kv_lora_rank=rank, qk_rope_head_dim=rope, block_tables=table, seq_lens=torch.tensor(lens, dtype=torch.int32),
             max_seq_len=max(lens), bmm1_scale=d**-0.5)
    if widths:
        a |= dict(query=rnd(g, sum(widths) + pad_rows, heads, d, dtype=dtype), cum_seq_lens_q=cum(widths), max_q_len=max(widths))
    else:
        a |= dict(query=rnd(g, len(lens), q_len, heads, d, dtype=dtype))
    return a | more


def ragged(widths=(20, 5, 33), lens=None, heads=4, kv=None, d=48, dv=32, dtype=torch.bfloat16, causal=True, seed=0, pad_rows=0,
           **more):
    g = gen(seed)
    lens = list(widths) if lens is None else lens
    kv = heads if kv is None else kv
    return dict(query=rnd(g, sum(widths) + pad_rows, heads, d, dtype=dtype), key=rnd(g, sum(lens), kv, d, dtype=dtype),
                value=rnd(g, sum(lens), kv, dv, dtype=dtype), workspace_buffer=None,
                seq_lens=torch.tensor(lens, dtype=torch.int32), max_q_len=max(widths), max_kv_len=max(lens),
                bmm1_scale=d**-0.5, bmm2_scale=1.0, o_sf_scale=1.0, batch_size=len(lens), window_left=-1,
                cum_seq_lens_q=cum(widths), cum_seq_lens_kv=cum(lens), enable_pdl=None, is_causal=causal,
                return_lse=True) | more


def mask_of(g, batch, q_len):
    """A packed random tree mask whose rows see themselves; returns uint16 words."""
    shown = (torch.rand(batch, q_len, q_len, generator=g) < 0.5).tril() | torch.eye(q_len, dtype=torch.bool)
    words = 2 * -(-q_len // 32)
    bits = torch.zeros(batch, q_len, words * 16, dtype=torch.int64)
    bits[:, :, :q_len] = shown
    packed = (bits.unflatten(2, (words, 16)) << torch.arange(16)).sum(3)
    return torch.where(packed >= 2**15, packed - 2**16, packed).to(torch.int16).view(torch.uint16)


def sinks(g, heads):
    return torch.randn(heads, generator=g) + 2
