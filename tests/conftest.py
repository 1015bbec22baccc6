"""What every test needs before anything is imported, and the options of the benchmarks."""

import os

import pytest
import torch

# Triton decides when it is imported; without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lab-trace",
        default="traces/mooncake_conversation.jsonl",
        help="a Mooncake trace (JSONL) to draw batches from; benchmarks that need it skip where it is missing",
    )
