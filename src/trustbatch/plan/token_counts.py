"""Tokens"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoTokenizer

from trustbatch.config import Config
from trustbatch.models.gguf import find_gguf
from trustbatch.models.policy import encode_prompt
from trustbatch.rollout.native.batch import STEPS_ON_GPU
from trustbatch.tasks import Task
from trustbatch.types import Prompt

ASSUMED_TOKENS = 256
NUM_LOOKED_AT = 64


@dataclass(frozen=True)
class PromptLength:
    """Tokens of the longest of the first prompts."""

    num_tokens: int
    is_assumed: bool


def longest_prompt(config: Config, task: Task | None) -> PromptLength:
    """Tokenize the first prompts of a task, where the tokenizer can be loaded by itself."""
    encode = None if task is None else prompt_encoder(config)
    if task is None or encode is None:
        return PromptLength(ASSUMED_TOKENS, is_assumed=True)
    num_prompts = min(config.rollout.prompts_per_step, NUM_LOOKED_AT)
    lengths = [len(encode(task.prompt(i))) for i in range(num_prompts)]
    if max(lengths) == 0:  # transformers makes an empty tokenizer where there are no files of one
        return PromptLength(ASSUMED_TOKENS, is_assumed=True)
    return PromptLength(max(lengths), is_assumed=False)


def prompt_encoder(config: Config) -> Callable[[Prompt], tuple[int, ...]] | None:
    """Return how the model's tokenizer encodes a prompt; None where it can't be loaded alone."""
    if find_gguf(config.model.name) is not None:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.name, trust_remote_code=config.model.trust_remote_code
        )
    except (OSError, ValueError):
        return None
    return lambda prompt: encode_prompt(tokenizer, prompt)


PAGE = 64
"""tokens in a page of the cache on a GPU"""
GROWTH = 1.5
"""factor by which its pool grows, where more is not needed at once"""


def cached_tokens(
    *, num_prompts: int, rows_per_prompt: int, prompt_tokens: int, max_tokens: int, paged: bool
) -> int:
    """Return the tokens that the cache has room for when all rows have all their tokens.

    A prompt's full pages are shared by its rows. The pool is grown as the engine grows it: from
    what prompts need, by the steps between two looks of the host.
    """
    num_rows = num_prompts * rows_per_prompt
    if not paged:
        return num_prompts * prompt_tokens + num_rows * max_tokens
    pool = 1 + num_prompts * _pages(prompt_tokens) + num_rows  # one page is scratch
    shared = prompt_tokens // PAGE
    for sampled in range(1, max_tokens, STEPS_ON_GPU):
        last = min(sampled + STEPS_ON_GPU, max_tokens)
        needed = 1 + num_prompts * shared + num_rows * (_pages(prompt_tokens + last) - shared)
        if needed > pool:
            pool = max(needed, int(pool * GROWTH))
    return pool * PAGE


def _pages(num_tokens: int) -> int:
    return math.ceil(num_tokens / PAGE)
