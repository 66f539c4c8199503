"""Memory that decoding needs beside weights and cache: for prompts, and for logits of all rows."""

from typing import Any

import torch

from trustbatch.rollout.native.architecture import Architecture
from trustbatch.utils.cuda_memory import free_memory

PREFILL_TOKENS = 16384
"""prompt tokens in one forward pass, including padding"""
MIN_PREFILL_TOKENS = 2048
PREFILL_SHARE = 1 / 8
"""of the free memory that a forward pass over prompts may take"""
FLOAT32, ROUNDED = 4, 2
MARGIN = 2**28
"""bytes that CUDA graphs keep, and that the allocator can't use"""
LOGIT_COPIES = 4
"""in float32, while tokens are sampled from them"""


def bytes_per_prompt_token(config: Any) -> int:
    """Return what a pass over prompts needs for each token, by the model's Hugging Face config."""
    # the residual stream twice, its norm, what is added to it; gate and up, and their product
    in_stream = (2 * FLOAT32 + 2 * ROUNDED) * config.hidden_size
    return in_stream + 3 * ROUNDED * config.intermediate_size


class Workspace:
    """What the cache must leave free, so that prompts and steps have room."""

    def __init__(self, architecture: Architecture, device: torch.device) -> None:
        config = architecture.model.config
        self.device = device
        self.per_token = bytes_per_prompt_token(config)
        self.per_row = LOGIT_COPIES * FLOAT32 * config.vocab_size
        self.prefill_tokens = PREFILL_TOKENS

    def fit(self) -> None:
        """Choose how many prompt tokens may be computed at a time, by the free memory."""
        if self.device.type == "cuda":
            room = int(PREFILL_SHARE * free_memory(self.device) / self.per_token)
            self.prefill_tokens = min(max(room, MIN_PREFILL_TOKENS), PREFILL_TOKENS)

    def num_bytes(self, num_rows: int) -> float:
        """Return the bytes that a pass over prompts and a step of that many rows need."""
        return self.prefill_tokens * self.per_token + num_rows * self.per_row + MARGIN

    def room_for_cache(self, num_rows: int) -> float:
        """Return the bytes by which the cache may grow."""
        if self.device.type != "cuda":
            return float("inf")
        return free_memory(self.device) - self.num_bytes(num_rows)
