"""Arguments of the TRT-LLM MLA kernel in a decode pass, as SGLang's TRTLLMMLABackend keeps them."""

from dataclasses import dataclass

from torch import Tensor

MLA_PAGE_SIZES = (32, 64)  # what SGLang's server lets this backend have (0.5.23)
# Tokens that a row of the block table is rounded up to: the flashmla index kernel writes 4,096 tokens' pages at a time
# (SGLang 0.5.11 to 0.5.23). FlashInfer 0.7.2 itself asks for multiples of 128.
BLOCK_TABLE_TOKENS = 4096
DEAD_PAGE = -1  # what an eager pass fills the block table with before the live pages are written


@dataclass(frozen=True, eq=False)
class TRTLLMMLADecodeMetadata:
    """What the MLA backend keeps of a decode pass.

    Attributes:
        block_kv_indices: ``[batch_size, width]`` int32 with packed rows (``block_tables``), -1 behind the live pages of an
            eager pass.
        seq_lens_k: ``[batch_size]`` int32, keys of each request (``seq_lens``).
        max_seq_len_k: most keys of one request that the kernel is told of, a host bound: the context's length, since no
            host length is read.
        max_seq_len_q: query rows of each request.
    """

    block_kv_indices: Tensor
    seq_lens_k: Tensor
    max_seq_len_k: int
    max_seq_len_q: int = 1


def mla_block_table_width(max_len: int, page_size: int) -> int:
    """Columns of the block table for requests of at most ``max_len`` tokens: whole blocks of 4,096 tokens.

    Raises:
        ValueError: a page size that the backend does not have.
    """
    check_mla_page_size(page_size)
    return -(-max_len // BLOCK_TABLE_TOKENS) * (BLOCK_TABLE_TOKENS // page_size)


def check_mla_page_size(page_size: int) -> None:
    """Raise ValueError for a page size that the MLA backend does not have."""
    if page_size not in MLA_PAGE_SIZES:
        raise ValueError(f"page_size={page_size}: the TRT-LLM MLA backend has pages of {MLA_PAGE_SIZES} tokens")
