"""Which keys a draft step's length counts, by the backend that the draft model runs on."""

from enum import Enum


class DraftAttention(Enum):
    """Whose metadata a step has, and which keys its length counts."""

    MHA = "mha"  # seq_lens + step + 1: the drafted tokens and the step's own
    MLA = "mla"  # seq_lens, the same in every step: SGLang 0.5.11 to 0.5.23 add no offset
    MLA_WITH_OFFSET = "mla with offset"  # seq_lens + step + 1, as MHA and FlashInfer's MLA backend count

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @property
    def is_mla(self) -> bool:
        return self is not DraftAttention.MHA

    def seq_len_offset(self, step: int) -> int:
        return 0 if self is DraftAttention.MLA else step + 1
