"""Show of each wrong kernel, 471 to 500, that it is right beside its trigger and wrong on it. Arguments: numbers, or none for all."""

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs as I  # noqa: E402
import torch  # noqa: E402
from form import (  # noqa: E402
    C, D, F, M, MD, R, T, biased, build, check_metadata, copies, f16, many, plain, pool_of, ragged_verify, ref,
    replay, rewrite, run_case, same_metadata, untouched, verdict,
)
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4  # noqa: E402

bf = torch.bfloat16


def g(seed=3):
    return I.gen(seed)


def scaled(a, k=1.0, v=1.0):
    """Scale the values of a cache of floats or e4m3."""
    both = zip(a["kv_cache"], (k, v))
    return a | dict(kv_cache=tuple((side.float() * s).to(side.dtype) for side, s in both))


def chain(batch, q_len, without=()):
    """Return the packed causal mask of a chain, without some tokens (a token sees itself all the same unless left out)."""
    shown = torch.ones(q_len, q_len, dtype=torch.bool).tril()
    shown[:, list(without)] = False
    return packed(shown.expand(batch, -1, -1))


def packed(shown):
    batch, q_len, _ = shown.shape
    words = 2 * -(-q_len // 32)
    bits = torch.zeros(batch, q_len, words * 16, dtype=torch.int64)
    bits[:, :, :q_len] = shown
    joined = (bits.unflatten(2, (words, 16)) << torch.arange(16)).sum(3)
    return torch.where(joined >= 2**15, joined - 2**16, joined).to(torch.int16).view(torch.uint16)


def lse_slice(a, heads, width):
    """Give a call an LSE that is the first columns of a wider buffer; return (arguments, the columns after them)."""
    buffer = torch.full((len(a["query"]), width), 7.0)
    return a | dict(lse=buffer[:, :heads], return_lse=True), buffer[:, heads:]


def lse_rows(a, heads, more):
    """Give a call an LSE that is the first rows of a longer buffer; return (arguments, the rows after them)."""
    buffer = torch.full((len(a["query"]) + more, heads), 7.0)
    return a | dict(lse=buffer[: len(a["query"])], return_lse=True), buffer[len(a["query"]) :]


def nvfp4(lens=(70, 5, 130), q_len=1, heads=4, kv=2, d=64, ps=16, dtype=bf, amax_scale=False, dead=None, loud=1.0, seed=0, **more):
    """A decode over an NVFP4 cache for XQA, factors in plain order; `dead`: V's factors after each request's end."""
    a = I.decode(lens, heads, kv, d, ps, q_len, seed=seed)
    k, v = (side.float() * loud for side in a["kv_cache"])
    scales = [float(x.abs().max()) / (448 * 6) if amax_scale else 1.0 for x in (k, v)]
    (k4, kf), (v4, vf) = quantize_nvfp4(k, scales[0]), quantize_nvfp4(v, scales[1])
    if dead is not None:
        for r, n in enumerate(lens):
            if n % ps:
                vf.view(torch.uint8)[int(a["block_tables"][r, n // ps]), :, n % ps :] = dead
    backend = more.get("backend", "xqa")
    if backend == "trtllm-gen":
        vf = interleave_v_scale_factors(vf.view(torch.uint8)).view(I.E4M3)
    a |= dict(query=a["query"].to(dtype), kv_cache=(k4, v4), kv_cache_sf=(kf, vf), backend=backend)
    a |= dict(bmm1_scale=d**-0.5 * scales[0] / loud, bmm2_scale=scales[1] / loud)
    return a | more


def tables(a, spare, layout_columns=None):
    """Give separate tables of K and V, a slice of tables with so many spare columns, which hold other pages."""
    table, gg = a["block_tables"], g(9)
    batch, columns = table.shape
    pages = a["kv_cache"][0].shape[0]
    wide = torch.randint(0, pages, (batch, 2, columns + spare), generator=gg, dtype=torch.int32)
    order = torch.randperm(pages, generator=gg)
    back = torch.empty_like(order)
    back[order] = torch.arange(pages)
    wide[:, 0, :columns] = table
    wide[:, 1, :columns] = back[table.long()].to(torch.int32)
    k, v = a["kv_cache"]
    return a | dict(kv_cache=(k, v[order]), block_tables=wide[:, :, :columns], uses_shared_paged_kv_idx=False)


def sliced_table(a, spare):
    wide = torch.zeros(a["block_tables"].shape[0], a["block_tables"].shape[1] + spare, dtype=torch.int32)
    wide[:, : a["block_tables"].shape[1]] = a["block_tables"]
    return a | dict(block_tables=wide[:, : a["block_tables"].shape[1]])


def both_calls(a, b):
    """A case: an engine keeps the results of two calls, as it does to merge them; each is right by its own arguments."""

    def case(function):
        first, second = function(**a), function(**b)
        said = verdict(lambda **_: first, a)
        return "first call " + said if said != "right" else verdict(lambda **_: second, b)

    return case


def window_lists(lens, topk=1, page_size=1, num_steps=3, window=0, sink=0, entry=1, virtual=False, seed=0):
    gg = g(seed)
    n = len(lens)
    width = max(lens) + topk * (num_steps + 2 * page_size) + 8
    width = -(-width // page_size) * page_size
    kv_lens = T(lens)
    kept = kv_lens.clamp(max=window + sink) if window else kv_lens
    total = topk * (int(kept.sum()) + n * num_steps)
    entries = torch.randint(1, 10**5, (n + 3, width // entry), generator=gg).to(torch.int32)
    v2p = None
    if virtual:
        pages = 64
        entries = torch.randint(0, pages * page_size // entry, (n + 3, width // entry), generator=gg).to(torch.int32)
        v2p = torch.randperm(pages, generator=gg)
    return dict(
        req_pool_indices=torch.randperm(n + 3, generator=gg)[:n].to(torch.int32), req_to_token=entries,
        paged_kernel_lens=kv_lens.to(torch.int32), kv_indices=torch.full((num_steps, total + 5), -7, dtype=torch.int32),
        kv_indptr=torch.zeros(num_steps, n * topk + 1, dtype=torch.int32),
        positions=kv_lens.repeat_interleave(topk).to(torch.int32), topk=topk, page_size=page_size, window_size=window,
        sink_size=sink, entry_page_size=entry, v2p=v2p)


def window_lists_verdict(function, a):
    a = copies(a)
    function(**a)
    given = {k: v for k, v in a.items() if k not in ("kv_indices", "kv_indptr")}
    want_indices, want_indptr = ref.generate_draft_decode_kv_indices(**given, num_steps=len(a["kv_indices"]))
    for step, (indices, indptr) in enumerate(zip(want_indices, want_indptr)):
        if not torch.equal(a["kv_indptr"][step, : len(indptr)].long(), indptr):
            return f"WRONG: kv_indptr of step {step}"
        got = a["kv_indices"][step, : len(indices)].long()
        if not torch.equal(got, indices):
            return f"WRONG: {int((got != indices).sum())} of kv_indices of step {step}"
    return "right"


WINDOW_LISTS_PLAIN = [
    window_lists((7, 3, 12), topk=2), window_lists((20, 40), window=8), window_lists((20, 40, 5), topk=2, window=8, sink=2),
    window_lists((17, 33), topk=2, page_size=16), window_lists((17, 33), page_size=16, entry=16),
    window_lists((18, 36), topk=2, page_size=16, entry=16, virtual=True),
]


def nvfp4_tables(a, spare=2):
    """Separate tables of K and V over an NVFP4 cache: V's pages and factors are in another order."""
    pages = a["kv_cache"][0].shape[0]
    order = torch.randperm(pages, generator=g(9))
    kf, vf = a["kv_cache_sf"]
    factors = vf.view(torch.uint8)[order].view(I.E4M3)
    return tables(a, spare) | dict(kv_cache_sf=(kf, factors))


def at_word(mask, offset):
    """The mask as a part of a larger tensor, from a word on."""
    buffer = torch.zeros(mask.numel() + 8, dtype=torch.int16).view(torch.uint16)
    part = buffer[offset : offset + mask.numel()].view(mask.shape)
    part.view(torch.int16).copy_(mask.view(torch.int16))
    return part


def quiet_pages(a, column, by=0.01):
    """Keys in pages from a column on are small."""
    pages = a["block_tables"][:, column:].flatten().long()
    k, v = a["kv_cache"]
    k = k.clone()
    k[pages] *= by
    return a | dict(kv_cache=(k, v))


def shared_prefix(a, rows, columns):
    table = a["block_tables"].clone()
    table[rows, :columns] = table[rows[0], :columns]
    return a | dict(block_tables=table)


def one_tensor(a, second=2, layout="HND"):
    k, v = a["kv_cache"]
    cache = torch.stack((k, v), 1) if second == 2 else k.unsqueeze(1)
    return a | dict(kv_cache=cache if layout == "HND" else cache.transpose(2, 3).contiguous(), kv_layout=layout)


def far_pages(a, pages, shift):
    """A pool of so many pages; those of the tables are shifted there."""
    cache, table = a["kv_cache"], a["block_tables"]
    big = I.rnd(g(5), pages, *cache.shape[1:], dtype=cache.dtype)
    big[shift : shift + len(cache)] = cache
    return a | dict(kv_cache=big, block_tables=table + shift)


def mirrored(a, dtype):
    return a | dict(q_seq_lens_cpu=a["cum_seq_lens_q"].diff().to(dtype), kv_seq_lens_cpu=a["seq_lens"].to(dtype))


def lse_given(a, form):
    rows, heads = a["query"].shape[:2]
    lse = {"plain": lambda: torch.zeros(rows, heads), "transposed": lambda: torch.zeros(heads, rows).T,
           "columns": lambda: torch.zeros(rows, 2 * heads)[:, :heads]}[form]()
    return a | dict(lse=lse)


def louder(a, by):
    return a | dict(query=(a["query"].float() * by).to(a["query"].dtype))


def cases(number):
    """Return (function's name, right cases beside the trigger, wrong cases)."""
    s4, s6, s16 = I.sinks(g(), 4), I.sinks(g(), 6), I.sinks(g(), 16)
    if number == 471:
        return D, [I.decode(lens=(4096, 30), heads=2, kv=1), I.decode(lens=(3000, 900), window_left=700), I.decode(lens=(5000,), window_left=2000)], [
            I.decode(lens=(4400, 30), heads=2, kv=1), I.decode(lens=(5000, 4300), q_len=2, sinks=s4), I.decode(lens=(6000,), ps=64, return_lse=True)]
    if number == 472:
        fresh = lambda **k: I.decode(sinks=s4.clone(), **k)  # noqa: E731
        lens = rewrite("seq_lens", [60, 4, 100])
        return D, [fresh(), replay(fresh(), lens), fresh(q_len=3)], [
            replay(fresh(), rewrite("sinks", s4 + 2)), replay(fresh(q_len=4, return_lse=True), rewrite("sinks", s4 - 3))]
    if number == 473:
        gen = dict(backend="trtllm-gen")
        return D, [nvfp4(**gen), nvfp4(window_left=18), nvfp4(lens=(70, 130), window_left=17, **gen), nvfp4(lens=(64, 32), window_left=19, **gen)], [
            nvfp4(lens=(70, 130), window_left=18, **gen), nvfp4(lens=(71, 90), window_left=13, q_len=2, **gen),
            nvfp4(lens=(100, 44), window_left=9, d=128, **gen)]
    if number == 474:
        return D, [nvfp4(), nvfp4(backend="trtllm-gen"), tables(I.decode(), 2), tables(I.decode(kv_dtype=I.E4M3), 0)], [
            nvfp4_tables(nvfp4()), nvfp4_tables(nvfp4(q_len=3, window_left=30)), nvfp4_tables(nvfp4(backend="trtllm-gen", d=128), 0)]
    if number == 475:
        return D, [I.decode(heads=6, kv=2), I.decode(q_len=4, heads=8, kv=2), I.decode(q_len=4, heads=4, kv=4),
                   I.decode(q_len=4, heads=6, kv=2, mask=I.mask_of(g(), 3, 4))], [
            I.decode(q_len=4, heads=6, kv=2), I.decode(lens=(40, 30), q_len=2, heads=5, kv=1, sinks=I.sinks(g(), 5)),
            I.decode(widths=(3, 1, 6), heads=14, kv=2, window_left=20)]
    if number == 476:
        return D, [I.decode(lens=(6, 50), q_len=6, mask=I.mask_of(g(), 2, 6)), I.decode(lens=(3, 50), q_len=6)], [
            I.decode(lens=(3, 50), q_len=6, mask=I.mask_of(g(), 2, 6)), I.decode(lens=(90, 5), q_len=8, mask=chain(2, 8), sinks=s4),
            I.decode(lens=(20, 7), q_len=40, mask=I.mask_of(g(), 2, 40), return_lse=True)]
    if number == 477:
        return D, [I.decode(lens=(50, 90), q_len=16, heads=8, kv=1, return_lse=True), I.decode(lens=(50, 90), q_len=20, heads=8, kv=1),
                   I.decode(lens=(50, 90), q_len=40, heads=6, kv=2, return_lse=True)], [
            I.decode(lens=(50, 90), q_len=20, heads=8, kv=1, return_lse=True), I.decode(lens=(200, 90), widths=(70, 4), return_lse=True),
            lse_given(I.decode(lens=(50, 90), q_len=9, heads=16, kv=1), "plain") | dict(return_lse=True)]
    if number == 478:
        e4 = dict(out_dtype=I.E4M3)
        return D, [I.decode(**e4), scaled(I.decode(), v=1500) | dict(bmm2_scale=1 / 64), scaled(I.decode(**e4), v=60) | dict(bmm2_scale=0.5),
                   I.decode(bmm2_scale=0.5, dtype=I.E4M3)], [
            scaled(I.decode(bmm2_scale=1 / 64, **e4), v=3000), scaled(I.decode(lens=(3, 9), q_len=2, bmm2_scale=T([0.01]), dtype=f16, **e4), v=2000),
            scaled(I.decode(lens=(2, 30, 6), bmm2_scale=1 / 16, sinks=s4 - 2, **e4), v=1500)]
    if number == 479:
        m = I.mask_of(g(), 3, 6)
        return D, [I.decode(q_len=6, mask=at_word(m, 0)), I.decode(q_len=6, mask=at_word(m, 2)), I.decode(q_len=6, mask=m)], [
            I.decode(q_len=6, mask=at_word(m, 1)), I.decode(q_len=20, lens=(40, 50, 22), mask=at_word(I.mask_of(g(), 3, 20), 3)),
            I.decode(q_len=6, mask=at_word(chain(3, 6), 5), sinks=s4)]
    if number == 480:
        small = dict(heads=2, kv=1, d=32)
        return D, [I.decode(lens=tuple(many(512, 90)), window_left=10, **small), I.decode(lens=tuple(many(600, 90)), **small),
                   I.decode(lens=(40,) * 700, window_left=10, **small)], [
            I.decode(lens=tuple(many(600, 90)), window_left=10, **small), I.decode(lens=tuple(range(700, 100, -1)), window_left=30, **small),
            I.decode(lens=(90,) * 512 + (60,) * 20, window_left=20, q_len=2, **small)]
    if number == 481:
        return C, [I.context(causal=False), I.context(lens=(70, 33), widths=(20, 33), causal=False), I.context(lens=(10, 40), widths=(20, 33))], [
            I.context(lens=(10, 40), widths=(20, 33), causal=False), I.context(lens=(5, 40, 7), widths=(6, 3, 30), causal=False, sinks=s4),
            I.context(lens=(16,), widths=(64,), causal=False, return_lse=True)]
    if number == 482:
        return C, [I.context(widths=(20, 20, 20), lens=(70, 25, 130)), I.context(pad_rows=40), I.context(), I.context(pad_rows=64)], [
            I.context(pad_rows=41), I.context(lens=(70, 40), widths=(1, 30), pad_rows=29, return_lse=True),
            I.context(lens=(50, 60, 70, 80), widths=(4, 1, 2, 4), pad_rows=5, sinks=s4)]
    if number == 483:
        wide = dict(d=256, heads=2, kv=1)
        return C, [I.context(lens=(64, 40), widths=(20, 40), **wide), I.context(lens=(200, 90), widths=(20, 40), d=128),
                   quiet_pages(I.context(lens=(100, 120), widths=(20, 4), ps=64, **wide), 1)], [
            I.context(lens=(130, 90), widths=(20, 40), **wide), I.context(lens=(250,), widths=(60,), window_left=100, **wide),
            I.context(lens=(100, 70), widths=(9, 33), d=192, sinks=s4)]
    if number == 484:
        three = dict(lens=(70, 80, 90), widths=(20, 5, 33))
        a = I.context(**three)
        return C, [a, shared_prefix(a, [0, 1, 2], 3), shared_prefix(a, [0, 1], 3), shared_prefix(I.context(lens=(70, 90), widths=(9, 9)), [0, 1], 4)], [
            shared_prefix(a, [0, 2], 3), shared_prefix(I.context(lens=(70, 80, 90, 64), widths=(3, 3, 3, 3), sinks=s4), [0, 3], 1),
            shared_prefix(I.context(lens=(70, 80, 90), widths=(9, 9, 9), ps=32, return_lse=True), [0, 2], 2)]
    if number == 485:
        t = lambda x: T([x])  # noqa: E731
        s = 64**-0.5
        return C, [I.context(bmm1_scale=t(s)), I.context(bmm1_scale=t(s), bmm2_scale=t(0.5)), I.context(bmm2_scale=t(0.5)), I.context(bmm2_scale=0.5)], [
            I.context(bmm1_scale=t(s), bmm2_scale=0.5), I.context(bmm1_scale=T(s), bmm2_scale=1.7, kv_dtype=I.E4M3),
            I.context(bmm1_scale=t(s), bmm2_scale=0.25, dtype=f16, sinks=s4)]
    if number == 486:
        return C, [one_tensor(I.context()), one_tensor(I.context(), 2, "NHD"), I.context(), one_tensor(I.context(kv_dtype=I.E4M3))], [
            one_tensor(I.context(), 1), one_tensor(I.context(window_left=20), 1, "NHD"), one_tensor(I.context(kv_dtype=I.E4M3, return_lse=True), 1)]
    if number == 487:
        return M, [far_pages(I.mla(ps=1), 66000, 65200), I.mla(ps=1)], [
            far_pages(I.mla(ps=1), 66000, 65536), far_pages(I.mla(ps=1, q_len=3, return_lse=True), 65900, 65500),
            far_pages(I.mla(ps=2, widths=(3, 1, 5), rank=32), 70000, 65536 + 900)]
    if number == 488:
        return M, [louder(I.mla(lens=(512, 300)), 4), I.mla(lens=(512, 40), q_len=2)], [
            louder(I.mla(lens=(1500, 700), return_lse=True), 6), louder(I.mla(lens=(2000,), q_len=2, sinks=s16 + 8), 6), louder(I.mla(lens=(900, 1100), return_lse=True), 5)]
    if number == 489:
        both = lambda base, **k: (lambda a: a | dict(lse=torch.zeros(a["query"].shape[:-1]), return_lse=True, return_lse_base=base))(I.mla(**k))  # noqa: E731
        return M, [both("base2"), both(None, q_len=2), I.mla(return_lse=True, return_lse_base="basee"), both("base2", widths=(3, 1, 5))], [
            both("basee"), both("basee", q_len=3, sinks=s16), both("basee", widths=(3, 1, 5))]
    if number == 490:
        sk = lambda n: I.sinks(g(4), n)  # noqa: E731
        return M, [I.mla(heads=64, sinks=sk(64)), I.mla(heads=128), I.mla(heads=128, sinks=sk(64).repeat(2))], [
            I.mla(heads=128, sinks=sk(128)), I.mla(heads=96, sinks=[sk(96)], q_len=2), I.mla(heads=128, widths=(3, 1, 5), sinks=(sk(128),))]
    if number == 491:
        free = lambda **k: I.mla(widths=(3, 1, 5), max_q_len=None, **k)  # noqa: E731
        return M, [free(), replay(free(), rewrite("cum_seq_lens_q", [0, 4, 5, 9])), replay(I.mla(widths=(3, 1, 5)) | dict(max_q_len=9), rewrite("cum_seq_lens_q", [0, 1, 2, 9]))], [
            replay(free(), rewrite("cum_seq_lens_q", [0, 1, 2, 9])), replay(free(return_lse=True, return_lse_base="base2"), rewrite("cum_seq_lens_q", [0, 6, 8, 9])),
            replay(free(sinks=s16, pad_rows=4), rewrite("cum_seq_lens_q", [0, 0, 1, 13]))]
    if number == 492:
        i4, i8 = torch.int32, torch.int64
        chunk = I.ragged(widths=(7, 7), lens=[90, 10], causal=False)
        return R, [mirrored(I.ragged(), i4), mirrored(chunk, i4), mirrored(I.ragged(widths=(20,)), i8), mirrored(I.ragged(widths=(5, 0, 9)), i4)], [
            mirrored(I.ragged(), i8), mirrored(chunk, i8), mirrored(I.ragged(widths=(3, 9, 4, 1), attention_sinks=s4), i8)]
    if number == 493:
        return R, [lse_given(I.ragged(), "plain"), lse_given(I.ragged(), "columns"), I.ragged()], [
            lse_given(I.ragged(), "transposed"), lse_given(I.ragged(widths=(7, 7), lens=[90, 10], causal=False), "transposed"),
            lse_given(I.ragged(attention_sinks=s4), "transposed") | dict(return_lse=False)]
    if number == 494:
        return R, [I.ragged(o_sf_scale=-1.0), I.ragged(widths=(7, 7), lens=[90, 10], causal=False, o_sf_scale=-1.0), I.ragged(o_sf_scale=1.0)], [
            I.ragged(o_sf_scale=0.5), I.ragged(widths=(7, 7), lens=[90, 10], causal=False, o_sf_scale=2.0), I.ragged(o_sf_scale=1.5, window_left=9)]
    if number == 495:
        small = dict(heads=1, d=32)
        return R, [I.ragged(widths=(3,), lens=[32768], **small), I.ragged(widths=(3,), lens=[40000], causal=False, **small)], [
            I.ragged(widths=(3,), lens=[40000], **small), I.ragged(widths=(2, 4), lens=[33000, 50], **small),
            I.ragged(widths=(8,), lens=[36000], window_left=100, **small)]
    if number == 496:
        return "lists", [window_lists((8, 20, 11), window=8, sink=3), window_lists((9, 20), window=8), window_lists((4, 7), window=8, sink=6, topk=2)], [
            window_lists((9, 20), window=8, sink=3), window_lists((40, 13), topk=2, window=10, sink=4), window_lists((70,), page_size=16, window=64, sink=16)]
    if number == 497:
        pages = dict(page_size=16, entry=16)
        return "lists", [window_lists((13, 29), **pages), window_lists((16, 32), **pages), window_lists((15, 30), page_size=16)], [
            window_lists((15, 20), **pages), window_lists((31, 14), topk=2, **pages), window_lists((30, 47), topk=2, virtual=True, window=8, **pages)]
    if number == 498:
        virtual = lambda **k: pool_of(num_virtual_pages=500, **k)  # noqa: E731
        return "mha", [build(pool_of(), F.DECODE, (50, 90)), build(virtual(swa=False), F.DECODE, (50, 90))], [
            build(virtual(), F.DECODE, (50, 90)), build(virtual(), F.EXTEND, (50, 30), rows=[10, 20]), build(virtual(), F.TARGET_VERIFY, (50, 30), rows=4)]
    if number == 499:
        return "mha", [build(pool_of(), F.EXTEND, (30, 20), rows=[10, 20]), build(pool_of(), F.EXTEND, (30, 20), rows=[30, 20]), build(pool_of(), F.MIXED, (30, 20), rows=[10, 1])], [
            build(pool_of(), F.EXTEND, (20, 30), rows=[20, 10]), build(pool_of(swa=False), F.MIXED, (20, 30, 40), rows=[20, 1, 1]),
            build(pool_of(), F.SPLIT_PREFILL, (7, 90), rows=[7, 64])]
    if number == 500:
        mk = lambda ps=32: pool_of(ps, swa=False, context=8300, pages=700)  # noqa: E731
        cpu = dict(seq_lens_cpu=True)
        return "mla", [build(mk(), F.DRAFT_EXTEND, (4000, 100), rows=[3, 5], **cpu), build(mk(), F.DRAFT_EXTEND, (4095, 100), rows=[4, 4], **cpu),
                       build(mk(), F.TARGET_VERIFY, (4095, 100), rows=4, **cpu), build(mk(), F.DECODE, (4095, 100), **cpu)], [
            build(mk(), F.DRAFT_EXTEND, (4095, 100), rows=[3, 5], **cpu), build(mk(64), F.DRAFT_EXTEND, (90, 4096, 60), rows=[2, 1, 4], **cpu),
            build(mk(), F.DRAFT_EXTEND, (8190, 33), rows=[1, 4], **cpu)]
    raise KeyError(number)


def check(number):
    module = importlib.import_module(f"wrong_{number}")
    name, near, trigger = cases(number)
    if name == "lists":
        function = module.generate_draft_decode_kv_indices
        rights = [window_lists_verdict(function, a) for a in WINDOW_LISTS_PLAIN + near]
        return rights, [window_lists_verdict(function, a) for a in trigger]
    if name in ("mha", "mla"):
        rights, wrongs = check_metadata(module, near, trigger)
        if name == "mla":  # the function beneath, too
            wrongs += [same_metadata(module.build_mla_decode_metadata(b, p), MD.build_mla_decode_metadata(b, p)) for p, b in trigger]
        return rights, wrongs
    function = getattr(module, name)
    plains = [copies(a) for a in plain(name)]
    if name == R:
        plains = [dict(a) for a in plains]
    return [run_case(function, a, name) for a in plains + near], [run_case(function, a, name) for a in trigger]


def main():
    bad = []
    for number in [int(a) for a in sys.argv[1:]] or range(471, 501):
        rights, wrongs = check(number)
        r, w = sum(x == "right" for x in rights), sum(x != "right" for x in wrongs)
        ok = r == len(rights) and w == len(wrongs) and r and w
        print(f"{number} {'pass' if ok else 'FAIL'} right {r}/{len(rights)}; wrong {w}/{len(wrongs)}   {wrongs[0][:100]}", flush=True)
        if not ok:
            bad.append(number)
            for kind, said in (("right", rights), ("wrong", wrongs)):
                for i, x in enumerate(said):
                    print(f"    {kind} case {i}: {x}")
    print("all pass" if not bad else f"FAIL: {bad}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
