"""An engine that serves requests: transformers' continuous batching, with an attention function that makes FlashInfer's calls.

transformers (5.17) keeps the K and V of all requests in blocks of tokens, and gives an attention function the cache slots of
each request's keys. `page_table` makes a page table of them, and `PagedCalls` calls the context function, or the decode
function if every request of the batch has one row. The model is a small Llama with random weights.
"""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lab.calls.workspace import SEMAPHORE_BYTES

DECODE, CONTEXT = "trtllm_batch_decode_with_kv_cache", "trtllm_batch_context_with_kv_cache"
WORKSPACE_BYTES = SEMAPHORE_BYTES + 128 * 2**20
VOCABULARY = 512


def page_table(slots: Tensor, offsets: Tensor, page_size: int, max_kv_len: int) -> Tensor:
    """Return the page table, int32 [batch_size, columns], of requests whose keys are given by their slots.

    Args:
        slots: int64 [offsets[-1]], the slot of each key of each request, in order: page * page_size + place in the page. A
            request's keys fill its pages from the first place of the first page. Cells after its last page are 0.
        offsets: int32 [batch_size + 1], the offset of each request's first key in `slots`.
    """
    firsts = offsets[:-1, None] + torch.arange(0, max_kv_len, page_size, device=slots.device)
    pages = slots[firsts.clamp(max=len(slots) - 1)] // page_size
    return torch.where(firsts < offsets[1:, None], pages, 0).to(torch.int32)


@dataclass
class PagedCalls:
    """An attention function of transformers' continuous batching that makes FlashInfer's paged calls, and lists them."""

    implementation: Any
    calls: list[dict[str, Any]] = field(default_factory=list)
    _workspaces: dict[Any, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: object,
        *,
        scaling: float,
        cache: Any,
        read_index: Sequence[Tensor],
        write_index: Sequence[Tensor],
        cu_seq_lens_q: Tensor,
        cu_seq_lens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: Any,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Write K and V of the new tokens to the cache, and return the attention of the query rows.

        Args:
            query: [1, num_qo_heads, num_rows, head_dim]; of `key` and `value`, [1, num_kv_heads, num_rows, head_dim].
            cache: transformers' `PagedAttentionCache`.
            read_index, write_index: for each group of layers, the slots of all keys, and those of the new tokens. A batch whose
                requests have only new tokens has no slots to read.
            cu_seq_lens_k: int32 [batch_size + 1] offsets, by the kind of layer if there are several.

        Returns:
            The output [1, num_rows, num_qo_heads, head_dim], and None for the weights.
        """
        group, place = cache.layer_index_to_group_indices[module.layer_idx]
        if isinstance(cu_seq_lens_k, dict):
            cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k["full_attention"], max_seqlen_k["full_attention"]
        if cache.sliding_windows[module.layer_idx] != 1:
            raise NotImplementedError(
                f"layer {module.layer_idx} has a sliding window: its keys are in a ring buffer, which no page table describes"
            )
        nothing = [slots[:0] for slots in read_index]  # the cache writes, and gathers no keys
        cache.update(
            key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=nothing, write_index=write_index
        )
        slots = read_index[group] if len(read_index[group]) else write_index[group]
        arguments = {
            "query": query[0].transpose(0, 1).contiguous(),
            "kv_cache": pages_of(cache, place),
            "workspace_buffer": self._workspace(query.device),
            "block_tables": page_table(slots, cu_seq_lens_k, cache.block_size, max_seqlen_k),
            "seq_lens": cu_seq_lens_k.diff(),
            "bmm1_scale": scaling,
            "bmm2_scale": 1.0,
            "kv_layout": "NHD",
        }
        function = DECODE if max_seqlen_q == 1 else CONTEXT
        if function == DECODE:
            arguments["max_seq_len"] = max_seqlen_k
        else:
            arguments |= {"max_q_len": max_seqlen_q, "max_kv_len": max_seqlen_k, "batch_size": len(cu_seq_lens_q) - 1}
            arguments |= {"cum_seq_lens_q": cu_seq_lens_q, "cum_seq_lens_kv": cu_seq_lens_k}
        start_ns = time.perf_counter_ns()
        out = getattr(self.implementation, function)(**arguments)
        host_us = (time.perf_counter_ns() - start_ns) / 1e3
        sizes = {"requests": len(cu_seq_lens_q) - 1, "rows": query.shape[2], "max_kv_len": max_seqlen_k}
        self._note(module.layer_idx, function=function, **sizes, host_us=host_us)
        return out.unsqueeze(0), None

    def _note(self, layer: int, **facts: Any) -> None:
        """Add a call to `calls`. A step of the engine ends with its last layer."""
        last = self.calls[-1] if self.calls else {"step": 0, "layer": -1}
        self.calls.append({"step": last["step"] + (layer <= last["layer"]), "layer": layer, **facts})

    def _workspace(self, device: torch.device) -> Tensor | None:
        if device.type == "cpu":
            return None
        stream = torch.cuda.current_stream(device).cuda_stream
        if stream not in self._workspaces:
            self._workspaces[stream] = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        return self._workspaces[stream]


def pages_of(cache: Any, place: int) -> tuple[Tensor, Tensor]:
    """Return the pages (K, V) of one of the cache's tensors, [num_pages, page_size, num_kv_heads, head_dim] each."""
    k, v = cache.key_cache[place], cache.value_cache[place]
    # fmha_v2 counts the pages of V from K's address: both must be halves of one allocation.
    if k.untyped_storage().data_ptr() != v.untyped_storage().data_ptr():
        k, v = torch.stack((k, v))
        cache.key_cache[place], cache.value_cache[place] = k, v
    shape = -1, cache.block_size, *k.shape[1:]
    return k.view(shape), v.view(shape)


@dataclass(frozen=True)
class Engine:
    """A Llama with random weights behind transformers' continuous batching. Tokens are chosen greedily."""

    device: torch.device
    dtype: torch.dtype
    block_size: int = 64
    num_blocks: int = 256
    max_batch_tokens: int = 512

    @cached_property
    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=128,  # of 8 and 2 heads, which XQA and fmha_v2 take
            max_position_embeddings=2048,
            initializer_range=0.1,  # so large that the tokens depend on the attention
            bos_token_id=None,
            eos_token_id=None,
        )
        return LlamaForCausalLM(config).to(self.device, self.dtype).eval()

    def serve(self, prompts: Sequence[Sequence[int]], attention: Any, new_tokens: int) -> list[list[int]]:
        """Return the new tokens of each prompt.

        All requests wait before the first step, so that a second run makes the same batches. `attention` is a function, or the
        name of one of transformers'. Raises RuntimeError, from the attention's error, if a request failed.
        """
        from transformers import GenerationConfig
        from transformers.generation.configuration_utils import ContinuousBatchingConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        name = attention if isinstance(attention, str) else "paged|lab"
        if name is not attention:
            ALL_ATTENTION_FUNCTIONS[name] = attention
        self.model.set_attn_implementation(name)
        manager = self.model.init_continuous_batching(
            GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                block_size=self.block_size,
                num_blocks=self.num_blocks,
                max_batch_tokens=self.max_batch_tokens,
                use_cuda_graph=False,
                use_async_batching=False,
            ),
        )
        names = manager.add_requests([list(prompt) for prompt in prompts])
        manager.start()
        done: dict[str, Any] = {}
        try:
            while len(done) < len(names) and manager.background_thread_status.fatal_error is None:
                if (result := manager.get_result(timeout=1)) is not None and result.is_finished():
                    done[result.request_id] = result
        finally:
            manager.stop()
        errors = [result.error for result in done.values() if result.error is not None]
        if errors or len(done) < len(names):
            raise RuntimeError(
                f"the engine served {len(done) - len(errors)} of {len(names)} requests: {(errors or ['it stopped'])[0]}"
            ) from manager.background_thread_status.fatal_error
        return [done[each].generated_tokens for each in names]

    @cached_property
    def _wide_model(self) -> Any:
        model = copy.deepcopy(self.model).float()
        model.set_attn_implementation("eager")
        return model

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        """Return the float32 model's logits of the token that follows, [vocabulary]."""
        found: Tensor = self._wide_model(torch.tensor([list(tokens)], device=self.device)).logits[0, -1]
        return found


def mixed_prompts(count: int, longest: int = 600, shared: int = 200) -> list[list[int]]:
    """Return prompts of 5 to `longest` tokens; every tenth begins with the same `shared` tokens."""
    generator = torch.Generator().manual_seed(1)

    def drawn(length: int) -> list[int]:
        found: list[int] = torch.randint(VOCABULARY, (length,), generator=generator).tolist()
        return found

    prefix = drawn(shared)
    lengths = torch.randint(5, longest + 1, (count,), generator=generator).tolist()
    return [
        [*prefix, *drawn(length % (longest - shared) + 1)] if number % 10 == 0 else drawn(length)
        for number, length in enumerate(lengths)
    ]
