"""Show of each wrong kernel, 531 to 560, that it is right beside its trigger and wrong on it. Arguments: numbers, or none for all."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs as I  # noqa: E402
import torch  # noqa: E402
from form import (  # noqa: E402
    LISTS_PLAIN, C, D, F, ForwardBatch, M, MD, R, SpecInfo, T, batch_of, build, copies, f16, lists, lists_verdict, mla_plain,
    mha_plain, plain, pool_of, replay, rewrite, run_case, same_metadata, twice,
)
from lab import references as ref  # noqa: E402
from lab.references.quantization import interleave_v_scale_factors, quantize_nvfp4  # noqa: E402

bf = torch.bfloat16
LOG2E = 1.4426950408889634


def g(seed=3):
    return I.gen(seed)


def shifted(a, v):
    """Add a number to V's values."""
    k, values = a["kv_cache"]
    return a | dict(kv_cache=(k, (values.float() + v).to(values.dtype)))


def new_pages(a):
    """Rewrite the page table: each request's pages in reverse order of the whole table's."""
    a["block_tables"].copy_(a["block_tables"].flatten().flip(0).reshape(a["block_tables"].shape))


def new_pages_and_lens(a):
    new_pages(a)
    a["seq_lens"].sub_(1)


def far(pages, lens, step, seed=0, kv=1, ps=16, d=64, **more):
    """A decode over a cache whose pages lie so many bytes apart; the memory between is never touched."""
    a = I.decode(lens, 4, kv, d, ps, seed=seed, **more)
    n, step = a["kv_cache"][0].shape[0], step // 2
    ids = torch.arange(pages)[-n:] if pages > n else torch.arange(n)
    sides = []
    for side in a["kv_cache"]:
        memory = torch.empty(pages * step, dtype=side.dtype)
        cache = torch.as_strided(memory, (pages, *side.shape[1:]), (step, *side.stride()[1:]))
        cache[:n] = side * -0.5 + 1
        cache[ids] = side
        sides.append(cache)
    return a | dict(kv_cache=tuple(sides), block_tables=ids[a["block_tables"].long()].to(torch.int32))


def nvfp4(lens=(70, 5, 130), heads=4, kv=2, d=64, ps=16, backend="xqa", separate=False, seed=0, **more):
    """A decode over an NVFP4 cache; `separate`: V has pages, and a table, of its own."""
    a = I.decode(lens, heads, kv, d, ps, seed=seed)
    k, v = (side.float() for side in a["kv_cache"])
    table = a["block_tables"]
    if separate:
        order = torch.randperm(len(v), generator=g(9))
        back = torch.empty_like(order)
        back[order] = torch.arange(len(v))
        v = v[order] * (1 + torch.arange(len(v)) % 3).view(-1, 1, 1, 1)[: len(v)]
        a |= dict(block_tables=torch.stack((table, back[table.long()].to(torch.int32)), 1), uses_shared_paged_kv_idx=False)
    (k4, kf), (v4, vf) = quantize_nvfp4(k, 1.0), quantize_nvfp4(v, 1.0)
    if backend == "trtllm-gen":
        vf = interleave_v_scale_factors(vf.view(torch.uint8)).view(I.E4M3)
    return a | dict(kv_cache=(k4, v4), kv_cache_sf=(kf, vf), backend=backend) | more


def log2_scale(a):
    return a | dict(bmm1_scale_log2=T([a["bmm1_scale"] * LOG2E], dtype=torch.float32))


def growing(a, ps=16):
    """Make a request's later keys larger, and the query like them, in e4m3."""
    k, v = (side.float() for side in a["kv_cache"])
    heads = k.shape[1]
    query = a["query"].float()
    base = torch.randn(heads, 1, k.shape[3], generator=g(4))
    for r, n in enumerate(a["seq_lens"].tolist()):
        for c in range(-(-n // ps)):
            k[int(a["block_tables"][r, c])] = base * (0.2 + 0.8 * c / 8) + 0.3 * torch.randn(heads, ps, k.shape[3], generator=g(c))
    query = 0.3 * base[0] + 0.5 * query
    return a | dict(kv_cache=(k.to(I.E4M3), v.to(I.E4M3)), query=query.to(I.E4M3))


def e4m3(a):
    return a | dict(query=a["query"].to(I.E4M3), kv_cache=tuple(x.to(I.E4M3) for x in a["kv_cache"]), out_dtype=bf)


def late_table(a, at):
    """Give a call a table that begins so many cells into a wider one, whose rows are a multiple of four apart."""
    table, pages = a["block_tables"], a["kv_cache"].shape[0]
    width = -(-(table.shape[1] + at) // 4) * 4
    wide = torch.randint(0, pages, (len(table) + 1, width), generator=g(5)).to(torch.int32)
    wide[: len(table), at : at + table.shape[1]] = table
    return a | dict(block_tables=wide[: len(table), at : at + table.shape[1]])


def counted(a):
    return a | dict(multi_ctas_kv_counter_buffer=torch.zeros(4096, dtype=torch.uint8))


def lse_of(a, shape, **more):
    return a | dict(lse=torch.empty(shape), return_lse=True) | more


def mirrors(a, dtype):
    return a | dict(q_seq_lens_cpu=a["cum_seq_lens_q"].diff().to(dtype), kv_seq_lens_cpu=a["seq_lens"].to(dtype))


def scaled(a, scale, q=1.0):
    return a | dict(bmm1_scale=scale, query=(a["query"].float() * q).to(a["query"].dtype))


def fewer_pages(a, pages):
    """Leave some virtual pages without a physical one."""
    v2p = a["v2p"].clone()
    v2p[pages] = -1
    return a | dict(v2p=v2p)


def ragged_verify(lens, rows, most, page_size=32, cpu=True, **more):
    pool = pool_of(page_size, swa=False)
    ids = [pool.add_request(n + most) for n in lens]
    slots = [pool.slots(i, n, n + c) for i, n, c in zip(ids, lens, rows)]
    return pool, ForwardBatch(
        forward_mode=F.RAGGED_VERIFY, req_pool_indices=T(ids), seq_lens=T(list(lens)), out_cache_loc=torch.cat(slots),
        num_tokens=sum(rows), extend_seq_lens=T(rows), extend_seq_lens_cpu=list(rows), spec_info=SpecInfo(num_draft_tokens=most), **more)


def accepting(pool, batch, accepted):
    return pool, replace(batch, spec_info=SpecInfo(num_accept_tokens=T(accepted)))


def prefill(lens, rows, mode=F.EXTEND, **options):
    pool = pool_of(32, swa=False)
    return pool, batch_of(pool, mode, lens, rows=rows), options


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


def cases(number):
    """Return (function's name, right cases beside the trigger, wrong cases)."""
    s4, s6, s16 = I.sinks(g(), 4), I.sinks(g(), 6), I.sinks(g(), 16)
    if number == 531:
        return D, [
            I.decode(lens=(16384, 90), kv=1), I.decode(lens=(16000, 9000), kv=1, max_seq_len=40000),
        ], [
            I.decode(lens=(17500, 90), kv=1), I.decode(lens=(300, 20000), kv=1, sinks=s4),
            I.decode(lens=(18000,), kv=2, window_left=1500),
        ]
    if number == 532:
        uniform = dict(dtype=f16, bmm1_scale=0.01)
        return D, [
            I.decode(lens=(1200, 700), dtype=f16), shifted(I.decode(lens=(400, 512), **uniform), 200),
            shifted(I.decode(lens=(1200, 700), bmm1_scale=0.01), 200), shifted(I.decode(lens=(1200, 700), **uniform), 40),
        ], [
            shifted(I.decode(lens=(1200, 700), **uniform), 200), shifted(I.decode(lens=(60, 1100), sinks=s4, **uniform), 200),
            shifted(I.decode(lens=(1300, 700), q_len=2, return_lse=True, **uniform), -300),
        ]
    if number == 533:
        even = dict(lens=(60, 50, 64))
        return D, [
            twice(I.decode(**even)), replay(I.decode(**even), new_pages_and_lens),
            replay(I.decode(**even), rewrite("seq_lens", [61, 40, 3])),
        ], [
            replay(I.decode(**even), new_pages), replay(I.decode(q_len=3, sinks=s4, **even), new_pages),
            replay(I.decode(dtype=f16, kv=1, **even), new_pages),
        ]
    if number == 534:
        return D, [
            I.decode(lens=[900] * 30, kv=1), I.decode(lens=[100] * 300, kv=1), I.decode(lens=(30000, 40), kv=1),
        ], [
            I.decode(lens=[1200] * 40, kv=1), I.decode(lens=[90] * 10 + [2000] * 25, kv=1, sinks=s4), I.decode(lens=(40000, 300), kv=1),
        ]
    if number == 535:
        m = I.mask_of(g(), 2, 6)
        return D, [
            I.decode(lens=(300, 200), q_len=6, window_left=40), I.decode(lens=(300, 200), q_len=6, mask=m),
            I.decode(lens=(66, 60), q_len=6, mask=m, window_left=20), I.decode(lens=(120, 60), q_len=6, mask=m, window_left=119),
            I.decode(lens=(125, 190), q_len=6, mask=m, window_left=30),
        ], [
            I.decode(lens=(300, 200), q_len=6, mask=m, window_left=100), I.decode(lens=(140, 75), q_len=6, mask=m, window_left=30, sinks=s4),
            I.decode(lens=(260, 500), q_len=6, mask=m, window_left=150, return_lse=True),
        ]
    if number == 536:
        return D, [
            I.decode(lens=(80, 60), heads=6, kv=1, q_len=10), I.decode(lens=(80, 60), heads=8, kv=1, q_len=12),
            I.decode(lens=(80, 60), heads=12, kv=2, q_len=12, mask=I.mask_of(g(), 2, 12)), I.decode(lens=(80, 60), heads=16, kv=4, q_len=20),
        ], [
            I.decode(lens=(80, 60), heads=6, kv=1, q_len=12), I.decode(lens=(50, 60), heads=14, kv=2, q_len=16),
            I.decode(lens=(80, 60, 30), heads=10, kv=2, widths=(20, 3, 14)),
        ]
    if number == 537:
        return D, [far(60, (70, 5, 130), 2**26), far(80, (70, 5, 130), 2**20), far(20, (70, 5, 130), 2**27)], [
            far(80, (70, 5, 130), 2**26), far(45, (170, 30), 2**27, sinks=s4), far(150, (100, 60, 33), 3 * 2**24),
        ]
    if number == 538:
        return D, [
            nvfp4(), nvfp4(backend="trtllm-gen"), nvfp4(lens=(40, 90), kv=4), I.decode(lens=(40, 90), heads=8),
        ], [
            nvfp4(separate=True), nvfp4(separate=True, backend="trtllm-gen"), nvfp4(lens=(200, 90), separate=True, sinks=s4),
        ]
    if number == 539:
        return D, [
            log2_scale(I.decode()), I.decode(sinks=s4), log2_scale(I.decode(sinks=torch.full((4,), -torch.inf))),
        ], [
            log2_scale(I.decode(sinks=s4)), log2_scale(I.decode(sinks=s4, q_len=3, window_left=20)),
            log2_scale(I.decode(lens=(90, 40), heads=6, sinks=s6, return_lse=True)),
        ]
    if number == 540:
        return D, [
            I.decode(lens=(130, 70, 5), widths=(3, 7, 2)), I.decode(lens=(60, 60, 60), widths=(3, 7, 2)),
            I.decode(lens=(70, 130, 90), widths=(16, 16, 3)), I.decode(lens=(20, 130, 90), q_len=3),
        ], [
            I.decode(lens=(70, 130), widths=(3, 7)), I.decode(lens=(30, 60, 90, 120), widths=(1, 4, 2, 3), sinks=s4),
            I.decode(lens=(40, 200, 90), widths=(17, 5, 8), return_lse=True),
        ]
    if number == 541:
        return C, [
            I.context(lens=(150, 90), widths=(22, 26)), I.context(lens=(150, 90), widths=(50, 26)),
            I.context(lens=(150, 90), widths=(22, 26), causal=False),
        ], [
            I.context(lens=(150, 90), widths=(22, 10)), I.context(lens=(50, 70, 95), widths=(50, 31, 5), max_kv_len=114),
            I.context(lens=(200, 130), widths=(72, 30), sinks=s4), I.context(lens=(100, 90), widths=(60, 64), max_kv_len=128),
        ]
    if number == 542:
        return C, [
            I.context(lens=(600, 90), widths=(80, 50), sinks=s4), I.context(lens=(512, 90), widths=(300, 50), sinks=s4),
            I.context(lens=(600, 90), widths=(200, 50)), I.context(lens=(600, 90), widths=(200, 50), sinks=s4, causal=False),
        ], [
            I.context(lens=(600, 90), widths=(200, 50), sinks=s4 + 3), I.context(lens=(700, 900), widths=(30, 500), sinks=s4 + 3, window_left=60),
            I.context(lens=(520,), widths=(520,), heads=6, sinks=s6, return_lse=True),
        ]
    if number == 543:
        scale = lambda x: T([x], dtype=torch.float32)  # noqa: E731
        return C, [
            I.context(bmm1_scale=scale(0.2)), I.context(bmm1_scale=scale(0.1)), twice(I.context(bmm1_scale=scale(0.1))),
            replay(I.context(bmm1_scale=0.2, bmm2_scale=scale(0.2)), rewrite("bmm2_scale", [0.5])),
        ], [
            replay(I.context(bmm1_scale=scale(0.2)), rewrite("bmm1_scale", [0.1])),
            replay(I.context(bmm1_scale=scale(0.1), sinks=s4), rewrite("bmm1_scale", [0.3])),
            replay(I.context(bmm1_scale=scale(0.2), window_left=20), rewrite("bmm1_scale", [0.02])),
        ]
    if number == 544:
        return C, [I.context(d=96), I.context(d=128), I.context(d=48), I.context(d=160), I.context(d=256)], [
            I.context(d=80), I.context(d=112, sinks=s4), I.context(d=72, dtype=f16), I.context(d=176, window_left=20),
        ]
    if number == 545:
        return C, [
            e4m3(I.context(lens=(60, 64), widths=(30, 9))), growing(e4m3(I.context(lens=(60, 64), widths=(30, 9)))),
            I.context(kv_dtype=I.E4M3, lens=(300, 200), widths=(30, 9)),
            e4m3(I.context(lens=(300, 200), widths=(30, 9), bmm1_scale=0.004)),
        ], [
            growing(e4m3(I.context(lens=(128, 120), widths=(30, 9)))), growing(e4m3(I.context(lens=(60, 140), widths=(30, 90), sinks=s4))),
            growing(e4m3(I.context(lens=(130, 130), widths=(5, 9), kv=1))),
        ]
    if number == 546:
        short = lambda n, **more: I.context(lens=[3 + i % 5 for i in range(n)], widths=[1 + i % 3 for i in range(n)], kv=1, **more)  # noqa: E731
        return C, [short(300), short(512, sinks=s4)], [short(600), short(513), short(800, return_lse=True)]
    if number == 547:
        return M, [
            I.mla(return_lse=True, return_lse_base="basee"), lse_of(I.mla(), (3, 16), return_lse_base="base2"), lse_of(I.mla(q_len=2), (3, 2, 16)),
        ], [
            lse_of(I.mla(), (3, 16), return_lse_base="basee"), lse_of(I.mla(q_len=2, sinks=s16), (3, 2, 16), return_lse_base="basee"),
            lse_of(I.mla(widths=(2, 1, 4)), (7, 16), return_lse_base="basee"),
        ]
    if number == 548:
        return M, [
            late_table(I.mla(lens=(100, 130, 200)), 0), late_table(I.mla(lens=(100, 130, 200)), 4), late_table(I.mla(lens=(300, 5)), 8),
        ], [
            late_table(I.mla(lens=(100, 130, 200)), 1), late_table(I.mla(lens=(300, 90), q_len=2), 2),
            late_table(I.mla(lens=(130, 60), widths=(2, 5), sinks=s16), 3),
        ]
    if number == 549:
        return M, [
            I.mla(lens=(500, 60)), I.mla(lens=(1024, 60)), I.mla(lens=(600, 60), max_seq_len=4096), I.mla(lens=(620, 60), max_seq_len=700),
        ], [I.mla(lens=(700, 60)), I.mla(lens=(60, 1200), q_len=2, sinks=s16), I.mla(lens=(4970,), ps=64), I.mla(lens=(1500, 1590), widths=(3, 1))]
    if number == 550:
        return M, [
            I.mla(widths=(3, 1, 5), pad_rows=4), I.mla(widths=(3, 1, 5)), I.mla(widths=(4, 4, 4)), I.mla(widths=(3, 1, 5), max_q_len=None, pad_rows=2),
        ], [
            I.mla(widths=(3, 1, 5), pad_rows=6), I.mla(widths=(3, 2, 4), pad_rows=3, sinks=s16), I.mla(widths=(3, 1, 2), max_q_len=4, pad_rows=6),
        ]
    if number == 551:
        return M, [
            twice(I.mla(lens=(600, 90), q_len=3)), twice(counted(I.mla(lens=(600, 90)))), twice(counted(I.mla(lens=(200, 90), q_len=3))),
            counted(I.mla(lens=(600, 90), q_len=3)),
        ], [
            twice(counted(I.mla(lens=(600, 90), q_len=3))), twice(counted(I.mla(lens=(90, 300), widths=(1, 4)))),
            twice(counted(I.mla(lens=(600, 900), q_len=2, sinks=s16))),
        ]
    if number == 552:
        return R, [
            mirrors(I.ragged(), torch.int32), mirrors(I.ragged(widths=(30,)), torch.int64),
            mirrors(I.ragged(widths=(4, 9), lens=(50, 30), causal=False), torch.int32),
        ], [
            mirrors(I.ragged(), torch.int64), mirrors(I.ragged(widths=(4, 9), lens=(50, 30), causal=False), torch.int64),
            mirrors(I.ragged(widths=(6, 0, 9), attention_sinks=s4), torch.int64),
        ]
    if number == 553:
        return R, [
            I.ragged(widths=(100, 20), lens=(60, 90)), I.ragged(widths=(100, 90), lens=(60, 0)), I.ragged(widths=(60, 40), lens=(60, 8)),
            I.ragged(widths=(150, 9), lens=(20, 9), causal=False), I.ragged(widths=(150, 9), lens=(20, 9), return_lse=False),
        ], [
            I.ragged(widths=(150, 9), lens=(20, 9)), I.ragged(widths=(70, 200), lens=(70, 33), attention_sinks=s4),
            I.ragged(widths=(65, 64), lens=(1, 9)),
        ]
    if number == 554:
        chunk = dict(causal=False)
        return R, [
            I.ragged(widths=(20, 9), lens=(1024, 90), **chunk), I.ragged(widths=(20, 9), lens=(1500, 90)),
            I.ragged(widths=(20, 9), lens=(1500, 90), return_lse=False, **chunk),
        ], [
            I.ragged(widths=(20, 9), lens=(1500, 90), **chunk), I.ragged(widths=(20, 9), lens=(200, 1100), kv=2, **chunk),
            I.ragged(widths=(5, 30), lens=(3000, 1300), attention_sinks=s4, **chunk),
        ]
    if number == 555:
        yarn = 192**-0.5 * 1.3688879454113937**2  # DeepSeek's
        t = lambda x: T([x], dtype=torch.float32)  # noqa: E731
        return R, [
            scaled(I.ragged(d=192, dv=128), yarn, 12), scaled(I.ragged(d=192, dv=128), t(0.125), 12), scaled(I.ragged(), t(0.25), 5),
        ], [
            scaled(I.ragged(d=192, dv=128), t(yarn), 12), scaled(I.ragged(d=192, dv=128, widths=(9, 30), lens=(200, 90), causal=False), t(yarn), 12),
            scaled(I.ragged(d=192, dv=128, attention_sinks=s4), t(yarn), 15),
        ]
    if number == 556:
        paged = dict(topk=2, page_size=16, virtual=True)
        return "window lists", [
            fewer_pages(window_lists((18, 36), entry=16, **paged), []), window_lists((18, 36), page_size=16, topk=2),
        ], [
            fewer_pages(window_lists((18, 36), entry=16, **paged), list(range(0, 64, 3))),
            fewer_pages(window_lists((40, 70, 5), **paged), list(range(0, 64, 2))),
            fewer_pages(window_lists((60, 70), window=20, sink=4, **paged), list(range(1, 64, 4))),
        ]
    if number == 557:
        return "lists", [
            lists(page_size=4, num_steps=4), lists(page_size=8, num_steps=9, lens=(7, 3, 16)), lists(page_size=4, num_steps=12, topk=1),
            lists(page_size=1, num_steps=12), lists(page_size=4, num_steps=8, lens=(8, 12)),
        ], [
            lists(page_size=4, num_steps=9), lists(page_size=2, num_steps=4, lens=(7, 9, 12), topk=4), lists(page_size=8, num_steps=12, lens=(7, 15)),
        ]
    if number == 558:
        mk = lambda rows, mode=F.DRAFT_EXTEND, lens=(30, 63, 40): build(pool_of(), mode, lens, rows=rows)  # noqa: E731
        return "mha", [mk([3, 1, 2]), accepting(*mk([3, 1, 2]), [3, 1, 2]), accepting(*mk([3, 3, 3]), [3, 3, 3, 1, 1])], [
            accepting(*mk([3, 3, 3]), [2, 3, 1]), accepting(*mk([4, 4, 4]), [1, 4, 2, 1]), accepting(*mk([2, 5, 3]), [2, 4, 3]),
        ]
    if number == 559:
        return "mla", [ragged_verify((30, 63), [2, 4], 4), ragged_verify((30, 63, 9), [5, 1, 3], 5)], [
            ragged_verify((30, 63), [2, 4], 6), ragged_verify((30, 63, 9), [1, 1, 3], 8), ragged_verify((90, 31), [1, 1], 4, seq_lens_cpu=[90, 31]),
        ]
    if number == 560:
        off = dict(disable_chunked_prefix_cache=True)
        return "mla", [
            prefill((30, 63), [30, 63], **off), prefill((30, 63), [10, 63], **off), prefill((30, 63), [30, 20]),
            prefill((30, 63), [30, 20], in_prefill_graph=True),
        ], [
            prefill((30, 63), [30, 20], **off), prefill((30, 63, 40), [30, 63, 1], F.MIXED, **off), prefill((30, 63), [30, 60], **off),
        ]
    raise KeyError(number)


def check_metadata(module, kind, near, trigger):
    plains = mha_plain() if kind == "mha" else mla_plain()
    names = [n for n in ("build_mha_metadata", "build_mla_metadata", "build_mla_decode_metadata", "build_mla_prefill_metadata") if hasattr(module, n)]

    def verdicts(name, listed):
        for pool, batch, *options in listed:
            prefill_only, is_prefill = "prefill" in name, batch.forward_mode.is_prefill
            if ("decode" in name and is_prefill) or (prefill_only and not is_prefill):
                continue
            options = options[0] if options else {}
            yield same_metadata(getattr(module, name)(batch, pool, **options), getattr(MD, name)(batch, pool, **options))

    return tuple([said for name in names for said in verdicts(name, listed)] for listed in (plains + near, trigger))


def check(number):
    module = importlib.import_module(f"wrong_{number}")
    name, near, trigger = cases(number)
    if name in ("lists", "window lists"):
        function = module.generate_draft_decode_kv_indices
        judge, plains = (lists_verdict, LISTS_PLAIN) if name == "lists" else (window_lists_verdict, WINDOW_LISTS_PLAIN)
        return [judge(function, copies(a)) for a in plains + near], [judge(function, copies(a)) for a in trigger]
    if name in ("mha", "mla"):
        return check_metadata(module, name, near, trigger)
    function = getattr(module, name)
    plains = [copies(a) for a in plain(name)] if name != R else [dict(a) for a in plain(name)]
    return [run_case(function, a, name) for a in plains + near], [run_case(function, a, name) for a in trigger]


def main():
    bad = []
    for number in [int(a) for a in sys.argv[1:]] or range(531, 561):
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
