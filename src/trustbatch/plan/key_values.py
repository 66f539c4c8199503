"""How large the native engine's cache of keys and values becomes."""

import math

from trustbatch.rollout.native.batch import STEPS_ON_GPU

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
