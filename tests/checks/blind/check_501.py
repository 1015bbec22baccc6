"""Show of each wrong kernel, 501 to 530, that it is right beside its trigger and wrong on it. Arguments: numbers, or none for all."""

import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import inputs as I  # noqa: E402
import torch  # noqa: E402
from form import (  # noqa: E402
    C, D, F, M, MD, R, T, biased, build, check_metadata, copies, f16, plain, pool_of, ragged_verify, ref,
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


def one_tensor(a, spare=0):
    """Give the cache as one tensor [pages, 2, ...], the factors (if any) as they are."""
    return a | dict(kv_cache=torch.stack(a["kv_cache"], 1))


def split_factors(a):
    """Give the factors as one tensor [pages, 2, ...], the cache as it is."""
    return a | dict(kv_cache_sf=torch.stack([x.view(torch.uint8) for x in a["kv_cache_sf"]], 1).view(I.E4M3))


def log2(scale):
    return T([scale * math.log2(math.e)])


def forked(lens, widths, shared):
    """A context batch whose request r has its first shared[r] pages from request 0."""
    a = I.context(lens=lens, widths=widths)
    for r, n in enumerate(shared):
        a["block_tables"][r, :n] = a["block_tables"][0, :n]
    return a


def regrown(lens, first, **more):
    """A replay of a decode whose lengths were `first` and are `lens` then."""
    a = I.decode(lens=lens, **more)
    a["seq_lens"].copy_(T(first))
    return replay(a, rewrite("seq_lens", lens))


def new_table(a, lens=None):
    """A replay whose table names other pages then, perhaps with other lengths."""
    def second(a):
        live = a["block_tables"]
        live.copy_(live.flip(0) if lens is None else live[torch.arange(len(live)).roll(1)])
        if lens is not None:
            a["seq_lens"].copy_(T(lens))
    return replay(a, second)


def lse_of(a, transposed, heads=4):
    n = len(a["query"])
    lse = torch.full((heads, n), 7.0).T if transposed else torch.full((n, heads), 7.0)
    return a | dict(lse=lse, return_lse=True)


def roomy(a, more):
    """Give an MLA query as a slice of a buffer with room for so many rows more of each request."""
    q = a["query"]
    wide = I.rnd(g(), q.shape[0], q.shape[1] + more, *q.shape[2:], dtype=q.dtype)
    wide[:, : q.shape[1]] = q
    return a | dict(query=wide[:, : q.shape[1]])


def wide_value(a, more_heads=0, more_dim=0):
    v = a["value"]
    wide = I.rnd(g(), v.shape[0], v.shape[1] + more_heads, v.shape[2] + more_dim, dtype=v.dtype)
    wide[:, : v.shape[1], : v.shape[2]] = v
    return a | dict(value=wide[:, : v.shape[1], : v.shape[2]])


def tail_tokens(a, count, fill):
    """Give K and V tokens after the last offset."""
    return a | {n: torch.cat((a[n], torch.full((count, *a[n].shape[1:]), fill, dtype=a[n].dtype))) for n in ("key", "value")}


def mirrors(a, dtype):
    return a | dict(q_seq_lens_cpu=a["cum_seq_lens_q"].diff().to(dtype), kv_seq_lens_cpu=a["cum_seq_lens_kv"].diff().to(dtype))


def chunks_twice(lens, rows, requests, **pool_more):
    """An extend in which requests stand as often as said, with so many keys and rows each."""
    pool = pool_of(**pool_more)
    most = {q: max(n for n, p in zip(lens, requests) if p == q) for q in requests}
    ids = {q: pool.add_request(n) for q, n in most.items()}
    slots = [pool.slots(ids[q], n - c, n) for q, n, c in zip(requests, lens, rows)]
    pre = [n - c for n, c in zip(lens, rows)]
    return pool, MD.ForwardBatch(
        forward_mode=F.EXTEND, req_pool_indices=T([ids[q] for q in requests]), seq_lens=T(list(lens)), out_cache_loc=torch.cat(slots),
        num_tokens=sum(rows), extend_seq_lens=T(rows), extend_seq_lens_cpu=list(rows), extend_prefix_lens=T(pre),
        extend_prefix_lens_cpu=pre)


def ragged_verify_of(lens, rows):
    return ragged_verify(pool_of(32, swa=False), lens, rows)


def shrunk(lens, first):
    """A replay of a decode whose lengths shrink from `first` to `lens`."""
    return replay(I.decode(lens=first), rewrite("seq_lens", lens))


def twice_of(a):
    return replay(a, lambda a: None)


def cases(number):
    """Return (function's name, right cases beside the trigger, wrong cases)."""
    s4, s6, s16 = I.sinks(g(), 4), I.sinks(g(), 6), I.sinks(g(), 16)
    if number == 501:
        return D, [I.decode(lens=(8192, 40)), I.decode(lens=(12000, 40), window_left=4000)], [
            I.decode(lens=(12000, 40)), I.decode(lens=(16000,), q_len=3, sinks=s4), I.decode(lens=(12000, 40), window_left=10000)]
    if number == 502:
        return D, [
            new_table(I.decode(lens=(60, 60, 50)), (50, 60, 60)), regrown((70, 90, 64), (65, 81, 49)), twice_of(I.decode()),
        ], [new_table(I.decode(lens=(60, 33, 60))), new_table(I.decode(lens=(100, 100), q_len=3, window_left=30)),
            new_table(tables(I.decode(lens=(60, 60)), 2))]
    if number == 503:
        few = [5] * 1022
        return D, [I.decode(lens=[600, 5] + few + [512, 30], d=32), I.decode(lens=[700] + few + [900], d=32)], [
            I.decode(lens=[600, 5] + few + [30, 600], d=32), I.decode(lens=few + [5, 5, 513, 800], d=32, sinks=s4)]
    if number == 504:
        return D, [I.decode(q_len=4, mask=chain(3, 4), sinks=s4), I.decode(q_len=4, window_left=10),
                   I.decode(q_len=4, window_left=200, mask=chain(3, 4)), I.decode(lens=(40, 9), q_len=1, window_left=6, mask=chain(2, 1))], [
            I.decode(q_len=4, window_left=10, mask=chain(3, 4)), I.decode(lens=(90, 40), q_len=6, window_left=5, mask=I.mask_of(g(), 2, 6)),
            I.decode(lens=(90, 40), q_len=8, window_left=12, mask=chain(2, 8), sinks=s4)]
    if number == 505:
        return D, [nvfp4(), nvfp4(q_len=3, backend="trtllm-gen"),
                   one_tensor(nvfp4()) | dict(kv_cache_sf=torch.stack([x.view(torch.uint8) for x in nvfp4()["kv_cache_sf"]], 1).view(I.E4M3))], [
            one_tensor(nvfp4()), one_tensor(nvfp4(q_len=3, window_left=40)), split_factors(nvfp4(backend="trtllm-gen", lens=(90, 300)))]
    if number == 506:
        return D, [regrown((512, 90), (300, 20)), shrunk((700, 90), (1500, 200)),
                   I.decode(lens=(3000, 5))], [
            regrown((1500, 900), (300, 200)), regrown((2500, 5), (1000, 5), sinks=s4), regrown((1200, 900), (500, 400), q_len=4)]
    if number == 507:
        big = lambda a, k, plus: a | dict(query=a["query"] * 0.1, kv_cache=(a["kv_cache"][0], a["kv_cache"][1] * k + plus))  # noqa: E731
        return D, [big(I.decode(lens=(2000, 5), dtype=f16), 1, 10), big(I.decode(lens=(2000, 5)), 1, 80), I.decode(lens=(3000,), dtype=f16)], [
            big(I.decode(lens=(2000, 5), dtype=f16), 1, 80), big(I.decode(lens=(500, 300), dtype=f16), 100, 1000),
            big(I.decode(lens=(3000, 300), q_len=2, dtype=f16, return_lse=True), 1, -60)]
    if number == 508:
        return D, [I.decode(q_len=4, heads=32), I.decode(q_len=16, heads=8), I.decode(q_len=40, heads=2), I.decode(q_len=6, heads=20, lens=(70, 90))], [
            I.decode(lens=(70, 90), q_len=6, heads=32), I.decode(lens=(70, 90), q_len=40, heads=4, sinks=s4),
            I.decode(lens=(70, 90), widths=(3, 9), heads=32, window_left=30)]
    if number == 509:
        return D, [I.decode(lens=(4, 0, 9), q_len=4, sinks=s4), I.decode(lens=(4, 8, 9), q_len=4, sinks=s4, return_lse=True),
                   I.decode(lens=(4, 0, 2), q_len=4, return_lse=True)], [
            I.decode(lens=(9, 0, 20), sinks=s4, return_lse=True), I.decode(lens=(9, 2, 20), q_len=4, sinks=s4, return_lse=True),
            I.decode(lens=(9, 2, 20), widths=(1, 4, 2), sinks=s4, return_lse=True)]
    if number == 510:
        return D, [I.decode() | dict(bmm1_scale=1.0, bmm1_scale_log2=log2(0.2)), I.decode() | dict(bmm1_scale=T([0.2])),
                   I.decode() | dict(bmm1_scale=T([0.125]), bmm1_scale_log2=log2(0.125))], [
            I.decode() | dict(bmm1_scale=T([1.0]), bmm1_scale_log2=log2(0.2)), I.decode(q_len=3) | dict(bmm1_scale=T([0.125]), bmm1_scale_log2=log2(0.3))]
    if number == 511:
        return C, [I.context(lens=(70, 5, 130), widths=(20, 5, 0)), I.context(lens=(70, 5), widths=(70, 3))], [
            I.context(lens=(70, 50, 130), widths=(20, 0, 33)), I.context(lens=(90, 30), widths=(0, 8), return_lse=True),
            I.context(lens=(0, 70, 50), widths=(0, 20, 5))]
    if number == 512:
        return C, [I.context(lens=(70, 128), widths=(20, 128), causal=False), I.context(lens=(300, 200), widths=(40, 64), causal=False),
                   I.context(lens=(300,), widths=(300,))], [
            I.context(lens=(300, 20), widths=(300, 20), causal=False), I.context(lens=(400,), widths=(200,), causal=False),
            I.context(lens=(5, 60), widths=(9, 200), causal=False, return_lse=True)]
    if number == 513:
        return C, [I.context(lens=(300,), widths=(300,)), I.context(lens=(200, 60), widths=(30, 60), window_left=80),
                   I.context(lens=(128,), widths=(64,), window_left=64)], [
            I.context(lens=(300, 90), widths=(300, 90), window_left=20), I.context(lens=(200,), widths=(60,), window_left=40),
            I.context(lens=(300, 90), widths=(100, 90), window_left=31, sinks=s4)]
    if number == 514:
        return C, [lse_of(I.context(), False), lse_slice(I.context(), 4, 9)[0], lse_of(I.context(heads=1, kv=1), True, 1)], [
            lse_of(I.context(), True), lse_of(I.context(lens=(90, 10), widths=(5, 10), sinks=s4), True)]
    if number == 515:
        return C, [forked((90, 80), (10, 20), (0, 4)), forked((90, 80, 99), (10, 20, 5), (0, 3, 3)), forked((90, 80, 99), (10, 20, 5), (0, 2, 4)),
                   forked((90, 80, 99), (10, 20, 5), (0, 4, 0))], [
            forked((90, 80, 99), (10, 20, 5), (0, 4, 2)), forked((90, 80, 99, 70), (10, 20, 5, 1), (0, 3, 5, 1))]
    if number == 516:
        return C, [I.context() | dict(bmm2_scale=1.0078125), I.context() | dict(bmm2_scale=T([1.0117])), I.context(dtype=f16) | dict(bmm2_scale=1.0117)], [
            biased(I.context(lens=(90, 200), widths=(40, 70)) | dict(bmm2_scale=1.0117)), I.context(lens=(90, 200), widths=(40, 200)) | dict(bmm2_scale=1.0117),
            I.context(lens=(300, 200), widths=(100, 200)) | dict(bmm2_scale=0.1255)]
    if number == 517:
        lse = lambda a, *shape: a | dict(lse=torch.full(shape, 7.0), return_lse=True)  # noqa: E731
        return M, [I.mla(return_lse=True, return_lse_base="basee"), lse(I.mla(return_lse_base="base2"), 3, 16), lse(I.mla(q_len=2), 3, 2, 16)], [
            lse(I.mla(return_lse_base="basee"), 3, 16), lse(I.mla(q_len=2, return_lse_base="basee"), 3, 2, 16),
            lse(I.mla(widths=(3, 1, 5), return_lse_base="basee"), 9, 16)]
    if number == 518:
        return M, [roomy(I.mla(), 3), roomy(I.mla(q_len=4, lens=(90,)), 2), I.mla(q_len=4)], [
            roomy(I.mla(q_len=3), 1), roomy(I.mla(q_len=2, return_lse=True), 4), roomy(I.mla(q_len=2, lens=(40, 80)), 6)]
    if number == 519:
        s = I.sinks(g(), 128) + 2
        return M, [I.mla(heads=64, sinks=s[:64]), I.mla(heads=128), I.mla(heads=128, sinks=torch.full((128,), 3.0))], [
            I.mla(heads=128, sinks=s), I.mla(heads=80, q_len=2, sinks=s[:80], return_lse=True), I.mla(heads=128, widths=(2, 1, 3), sinks=[s])]
    if number == 520:
        rows = lambda widths: rewrite("cum_seq_lens_q", I.cum(widths))  # noqa: E731
        return M, [replay(I.mla(widths=(3, 1, 5)), rows((5, 1, 3))), I.mla(widths=(3, 1, 5), max_q_len=None),
                   replay(I.mla(widths=(3, 1, 5)) | dict(max_q_len=None), rewrite("seq_lens", (60, 4, 110)))], [
            replay(I.mla(widths=(3, 1, 5)) | dict(max_q_len=None), rows((5, 1, 3))),
            replay(I.mla(widths=(1, 4), lens=(40, 90)) | dict(max_q_len=None), rows((3, 2)))]
    if number == 521:
        return M, [I.mla(lens=(260, 256), q_len=4), I.mla(lens=(300, 3), q_len=6), I.mla(lens=(257, 513)), I.mla(lens=(255, 200), q_len=5)], [
            I.mla(lens=(258, 90), q_len=6), I.mla(lens=(513, 514), q_len=5, return_lse=True), I.mla(lens=(258, 769), widths=(1, 8))]
    if number == 522:
        return R, [tail_tokens(I.ragged(), 9, 3.0), tail_tokens(I.ragged(widths=(20, 64)), 9, math.nan), I.ragged(widths=(100, 7), pad_rows=4)], [
            tail_tokens(I.ragged(), 9, math.nan), tail_tokens(I.ragged(widths=(7, 9), lens=(50, 30), causal=False), 20, math.inf),
            tail_tokens(I.ragged(widths=(70,)), 2, math.nan)]
    if number == 523:
        return R, [I.ragged(window_left=7), I.ragged(widths=(4, 9), lens=(50, 30)), I.ragged(widths=(30, 9), window_left=12, attention_sinks=s4)], [
            I.ragged(widths=(4, 9), lens=(50, 30), window_left=7), I.ragged(widths=(30, 60), lens=(90, 60), window_left=20, attention_sinks=s4)]
    if number == 524:
        return R, [wide_value(I.ragged(), 0, 16), I.ragged(), wide_value(I.ragged(causal=False), 0, 48)], [
            wide_value(I.ragged(), 1), wide_value(I.ragged(widths=(4, 9), lens=(50, 30)), 4, 16)]
    if number == 525:
        return R, [mirrors(I.ragged(), torch.int32), mirrors(I.ragged(widths=(40,)), torch.int64), mirrors(I.ragged(widths=(4, 0), lens=(9, 30)), torch.int32)], [
            mirrors(I.ragged(), torch.int64), mirrors(I.ragged(widths=(4, 9), lens=(50, 30), causal=False), torch.int64)]
    if number == 526:
        return "lists", [window_lists((10, 3, 8), window=8, sink=2), window_lists((20, 40), window=8, sink=4), window_lists((9, 12), window=8)], [
            window_lists((9, 20), window=8, sink=4), window_lists((11, 40, 3), topk=2, window=8, sink=4),
            window_lists((20, 70), page_size=16, entry=16, window=16, sink=8)]
    if number == 527:
        return "lists", [window_lists((17, 34), topk=2, page_size=16, entry=16), window_lists((15, 30), page_size=16), window_lists((13, 29), page_size=16, entry=16)], [
            window_lists((15, 34), page_size=16, entry=16), window_lists((15, 30), topk=2, page_size=16, entry=16),
            window_lists((15, 34), page_size=4, entry=4, num_steps=5, virtual=True)]
    if number == 528:
        return "mha", [build(pool_of(), F.TARGET_VERIFY, (8, 27), rows=4, seq_lens_cpu=True), build(pool_of(), F.TARGET_VERIFY, (8, 31), rows=4),
                       build(pool_of(), F.TARGET_VERIFY, (15, 40), rows=4, seq_lens_cpu=True), build(pool_of(), F.DECODE, (8, 32), seq_lens_cpu=True),
                       build(pool_of(), F.EXTEND, (30, 20), rows=[10, 20], seq_lens_cpu=True)], [
            build(pool_of(), F.TARGET_VERIFY, (8, 31), rows=4, seq_lens_cpu=True), build(pool_of(swa=False), F.DECODE, (8, 32), step=0, seq_lens_cpu=True),
            build(pool_of(), F.DECODE, (8, 46), step=3, seq_lens_cpu=True)]
    if number == 529:
        mk = lambda: pool_of(32, swa=False)  # noqa: E731
        return "mla", [ragged_verify_of((30, 50), [4, 4]), ragged_verify_of((35, 50), [1, 4]), build(mk(), F.DRAFT_EXTEND, (30, 40), rows=[1, 2]),
                       build(mk(), F.TARGET_VERIFY, (30, 63), rows=4)], [
            ragged_verify_of((30, 50), [1, 4]), build(mk(), F.DRAFT_EXTEND, (32, 63), rows=[1, 4]), ragged_verify_of((20, 30, 63), [5, 2, 1])]
    if number == 530:
        return "mha", [chunks_twice((40, 20, 40), (8, 5, 8), "aba"), chunks_twice((40, 33), (8, 5), "aa"), chunks_twice((40, 20, 90), (8, 5, 9), "abc")], [
            chunks_twice((40, 20, 30), (8, 5, 8), "aba"), chunks_twice((90, 17), (9, 3), "aa", swa=False)]
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
    for number in [int(a) for a in sys.argv[1:]] or range(501, 531):
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
