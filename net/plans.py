"""What the judge judges for each part."""

from dataclasses import dataclass

LISTS = "generate_draft_decode_kv_indices"
WINDOW = "tests/checks/someone_elses_window.py"


@dataclass(frozen=True)
class Plan:
    """A run of the judge: checks and functions to judge, all if empty."""

    implementation: str
    only: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    recorded: str = ""  # the implementation's name when its state was recorded, where it has another one since

    @property
    def name(self) -> str:
        return " ".join((self.recorded or self.implementation, *self.only, *self.functions))


def right(name: str, *only: str) -> Plan:
    return Plan(f"corpus.right:{name}", only, recorded=f"tests/checks/right_kernels.py:{name}")


# Wrong kernels, by the checks that find most of them: a whole run of each would take an hour.
WRONG = (
    Plan(WINDOW, ("K1", "K2", "K4", "K11")),
    Plan("net.wrong:branch_pages_rounded_down", ("L1", "K18")),
    Plan("net.wrong:table_pages_consecutive", ("K16", "K18")),
    Plan("net.wrong:mla_draft_uncounted", ("K17", "K18")),
    Plan("net.wrong:new_tokens_uncausal", ("K9", "M3")),
    Plan("net.wrong:page_offset_absolute", ("K1", "K10")),
    Plan("net.wrong:out_ignored", ("K5",)),
    Plan("net.wrong:mla_max_length_for_one_request", ("K6", "K7", "K13")),
    Plan("corpus:blind3", ("K1", "K13"), recorded="corpus/blind/decode_1.py:Blind3"),
    Plan("corpus:blind25", ("K2", "K11"), recorded="corpus/blind/context_1.py:Blind25"),
    Plan("corpus:blind33", ("K2", "K11"), recorded="corpus/blind/mla_1.py:Blind33"),
)
# Right kernels take every check among them: each kernel those of one line.
KERNELS = {
    ("K1", "K2", "M1"): ("from_torch", "two_passes", "weights_rounded"),
    ("K3", "K4", "K9", "M3"): ("reversed_tiles", "probabilities_rounded", "scales_first"),
    ("K7", "K8", "K11", "K13", "M2"): ("split_and_merged", "base_2", "dequantised_first"),
    ("K5", "K10", "K14"): ("splits_rounded", "tiles_of_64"),
}
PLANS = {
    "references": (Plan("lab.references"),),
    "right": tuple(right(name, *only) for only, names in KERNELS.items() for name in names),
    "wrong": WRONG,
    "quick": (
        Plan(
            "lab.references",
            ("K1", "K4", "K5", "K8", "K9", "K10", "K11", "K13", "K14", "L1", "M1", "M2", "M3", "S1", "S2"),
        ),
        Plan("lab.references", ("K18",), (LISTS,)),
        right("two_passes", "K2", "M3"),
        right("split_and_merged", "K7"),
        Plan(WINDOW, ("K1", "K10")),
        Plan("net.wrong:mla_draft_uncounted", ("K17", "K18")),
        Plan("net.wrong:new_tokens_uncausal", ("K9", "M3")),
    ),
}
