"""What must not change while the house is rebuilt: verdicts, PTX and tables, recorded at 67f195b and compared.

    python -m net compare --part quick           # two to three minutes on two cores; run it before a change of the judge lands
    python -m net compare --part references      # also: right, wrong, ptx, tables
    python -m net compare --part wrong --only new_tokens_uncausal
    python -m net record --part quick            # anew, into net/recorded; only at the commit above

A verdict is a line of the report: check, function, case, outcome, number of results, worst ratio, first sentence. A case is
found by its text. Cases whose text is on one side only are compared in the order of their outcomes and ratios: a renamed case
is listed, and is no fault while its verdict is there. A changed sentence is listed, and is no fault. Drawn cases are left out.
Exit status: 1 if anything else changed. This folder goes when the rebuilding ends.
"""
