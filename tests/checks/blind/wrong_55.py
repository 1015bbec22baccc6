"""The draft step's tokens are added to the lengths of DECODE only: an IDLE rank with a SpecInfo counts none."""

from dataclasses import replace

from lab import metadata as lab_metadata
from lab.metadata import ForwardMode


def build_mha_metadata(batch, pool):
    if batch.forward_mode is ForwardMode.IDLE and batch.spec_info is not None:
        batch = replace(batch, spec_info=None)
    return lab_metadata.build_mha_metadata(batch, pool)
