"""The decoder of any other model: its own forward pass."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from trustbatch.models.tokenization import pad_left, positions_of
from trustbatch.rollout.native.workspace import PREFILL_TOKENS


class PortableDecoder:
    """Rows share one padded cache, so new prompts wait until all rows are finished."""

    joins_running = False
    uses_cuda_graphs = False
    address = (0, 0)
    prefill_tokens = PREFILL_TOKENS
    shares_pages = False

    def __init__(
        self,
        model: Any,
        *,
        pad_token_id: int,
        context_length: int,
        autocast: AbstractContextManager[Any],
    ) -> None:
        self.model = model
        self.pad_token_id = pad_token_id
        self.autocast = autocast
        self.device = next(model.parameters()).device
        self.last_position = context_length - 1
        self.clear()

    def refresh(self) -> None:
        """Do nothing: the model reads its own parameters."""

    def clear(self) -> None:
        """Drop the cache and free its memory."""
        self.cache = DynamicCache(config=self.model.config)
        self.mask = torch.empty(0, 0, dtype=torch.long)
        self.has_padding = False

    @torch.no_grad()
    def prefill(self, prompts: Sequence[Sequence[int]], copies: list[int]) -> Tensor:
        """Add copies[p] rows that continue prompt p; return the logits [P, V] after each prompt."""
        self.clear()
        ids, mask = (part.to(self.device) for part in pad_left(prompts, self.pad_token_id))
        self.mask, self.has_padding = mask, not bool(mask.all())
        logits = self._forward(ids, positions_of(mask))
        self.keep([prompt for prompt, count in enumerate(copies) for _ in range(count)])
        return logits

    def reserve(self, num_steps: int, most_steps: int) -> None:
        """Do nothing: the cache grows by itself."""

    @torch.no_grad()
    def step(self, token_ids: Tensor, position: Tensor) -> Tensor:
        """Feed one token per row, at its position; return the next logits [n, V]."""
        if self.has_padding:
            self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=-1)
        # finished rows run on beside unfinished ones: their further tokens are discarded
        return self._forward(token_ids[:, None], position[:, None].clamp(max=self.last_position))

    def advance(self, num_steps: int) -> None:
        """Do nothing: the cache counts by itself."""

    def keep(self, index: list[int]) -> None:
        """Keep these rows, in this order."""
        rows = torch.tensor(index, dtype=torch.long, device=self.device)
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def _forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        with self.autocast:
            output = self.model(
                input_ids=input_ids,
                # without padding the plain causal mask suffices, and is much cheaper
                attention_mask=self.mask if self.has_padding else None,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]
