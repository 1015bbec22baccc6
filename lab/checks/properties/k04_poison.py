"""Find a result that depends on memory that must not affect it: page tails, unread pages, unused page table columns.

Other tests set this memory to zero or to random values, so that a weight of zero hides a read. Here page tails, unread pages,
pages before a sliding window and entries that no row selects hold zeros, then the largest finite values, then NaN. Unused
columns of the page table name foreign pages, page -1 and pages far outside the pool. No bit of the result may change.
"""

from dataclasses import replace

from lab.checks.case_run import CaseRun, Result
from lab.checks.properties.check import Check, itself
from lab.workloads.attention_case import Dead, TableTail
from lab.workloads.inputs.contents import fill, fill_dead


def _judge(run: CaseRun) -> None:
    _, truth, expected = run.base_call("over zeros", dead=Dead.ZERO)
    for dead in (Dead.HUGE, Dead.NAN):
        what = f"dead cells of {dead.name}"
        result = run.vary(what, run.build(dead=dead), truth)
        if result is not None:
            run.expect_equal_bits(f"{what} instead of zeros", result, expected)
            for tail in (TableTail.NEGATIVE, TableTail.FAR):
                also = f"{what} and a page table whose tail is {tail.name}"
                run.vary(also, run.build(dead=dead, table_tail=tail), result)
        if run.case.top_k:
            _unselected(run, dead, expected)
        if run.case.window_left >= 0:
            _before_windows(run, dead, expected)
    if run.wrongs and not run.case.rank:  # for the diagnosis
        pages = (-(-kv_len // run.case.page_size) for kv_len in run.case.kv_lens)
        full = replace(run.case, kv_lens=tuple(run.case.page_size * each for each in pages))
        inputs = run.build(full, dead=Dead.NAN)
        run.vary("dead cells of NAN, but no page tails", inputs, inputs.truth())


def _unselected(run: CaseRun, dead: Dead, expected: Result) -> None:
    inputs = run.build(dead=dead)
    places, entries = inputs.places(), inputs.k_pages.flatten(0, 1)
    selected = places[places >= 0].long()
    kept = entries[selected]
    fill_dead(inputs.k_pages[run.case.storage.first_page :], dead)
    entries[selected] = kept
    run.vary(f"entries of {dead.name} that no row selects", inputs, expected)


def _before_windows(run: CaseRun, dead: Dead, expected: Result) -> None:
    case = run.case
    inputs = run.build(dead=dead)
    # An engine frees the pages before all windows: the table then names an unused page.
    tables = zip(inputs.block_tables.tolist(), case.kv_lens, strict=True)
    live = {page for table, kv_len in tables for page in table[: -(-kv_len // case.page_size)]}
    spare = next(page for page in range(case.storage.first_page, len(inputs.k_pages)) if page not in live)
    for request, (kv_len, q_len) in enumerate(zip(case.kv_lens, case.q_lens, strict=True)):
        first_seen = max(0, kv_len - q_len - case.window_left)
        page, before = divmod(first_seen, case.page_size)
        inputs.block_tables[request, :page] = spare
        for pool in (inputs.k_pages, inputs.v_pages, *(inputs.scale_factors or ())):
            by_token = pool if case.storage.kv_layout == "NHD" else pool.transpose(1, 2)
            fill(by_token[int(inputs.block_tables[request, page]), :before])
    what = f"pages of {dead.name} before the window"
    run.vary(what, inputs, expected)


CHECK = Check("K4", __doc__, lambda scope: scope.balanced(6, 32, seed=6), _judge, drawn=itself)
