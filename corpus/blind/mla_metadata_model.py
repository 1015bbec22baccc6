"""What wrong builders of MLA metadata share."""

from lab.metadata import DraftAttention


class OneBuilder:
    """Builds the metadata of the decode kernel by the class' `build_mla_metadata`."""

    @classmethod
    def build_mla_decode_metadata(cls, batch, pool, attention=DraftAttention.MLA):
        return cls.build_mla_metadata(batch, pool, attention=attention)
