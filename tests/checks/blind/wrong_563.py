"""Wrong: of separate tables, that of V is packed into a table of its own once per buffer, and not again when the buffer is rewritten."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from base import *  # noqa: E402,F403
import math  # noqa: E402


class Wrong(Kernel):
    def __init__(self):
        self.tables = Memory()

    def start(self, run):
        super().start(run)
        if not run.call.uses_shared_paged_kv_idx:
            run.v_table = self.tables.of(run.call.block_tables, run.v_table.clone)


trtllm_batch_decode_with_kv_cache = decode_of(Wrong())
