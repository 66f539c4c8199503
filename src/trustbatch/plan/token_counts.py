"""Numbers of tokens: of the longest prompt, and in the native engine's KV cache."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoTokenizer

from trustbatch.config import Config
from trustbatch.models.gguf import find_gguf
from trustbatch.models.loading import is_offline
from trustbatch.models.tokenization import encode_prompt
from trustbatch.rollout.native.batch import STEPS_ON_GPU
from trustbatch.rollout.native.cache import GROWTH, PAGE
from trustbatch.tasks import Task
from trustbatch.types import Prompt

ASSUMED_PROMPT_TOKENS = 256
MAX_PROMPTS = 64


@dataclass(frozen=True)
class PromptLength:
    """Number of tokens of the longest of the first prompts."""

    num_tokens: int
    is_assumed: bool


def longest_prompt(config: Config, task: Task | None) -> PromptLength:
    """Tokenize the first prompts of a task, if the tokenizer can be loaded without the model."""
    encode = None if task is None else prompt_encoder(config)
    if task is None or encode is None:
        return PromptLength(ASSUMED_PROMPT_TOKENS, is_assumed=True)
    num_prompts = min(config.rollout.prompts_per_step, MAX_PROMPTS)
    lengths = [len(encode(task.prompt(i))) for i in range(num_prompts)]
    if max(lengths) == 0:  # transformers returns an empty tokenizer if there are no files
        return PromptLength(ASSUMED_PROMPT_TOKENS, is_assumed=True)
    return PromptLength(max(lengths), is_assumed=False)


def prompt_encoder(config: Config) -> Callable[[Prompt], tuple[int, ...]] | None:
    """Return a function that encodes prompts; None if the tokenizer can't be loaded alone."""
    if find_gguf(config.model.name) is not None:
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.name,
            trust_remote_code=config.model.trust_remote_code,
            local_files_only=is_offline(config.model.name),
        )
    except (OSError, ValueError):
        return None
    return lambda prompt: encode_prompt(tokenizer, prompt)


def cached_tokens(
    *, num_prompts: int, rows_per_prompt: int, prompt_tokens: int, max_tokens: int, paged: bool
) -> int:
    """Return the capacity of the cache in tokens once all rows have `max_tokens` tokens.

    A prompt's full pages are shared by its rows. The page pool grows as in the engine: from what
    the prompts need, every `STEPS_ON_GPU` decoding steps.
    """
    num_rows = num_prompts * rows_per_prompt
    if not paged:
        return num_prompts * prompt_tokens + num_rows * max_tokens
    pool = 1 + num_prompts * _pages(prompt_tokens) + num_rows  # one scratch page
    shared = prompt_tokens // PAGE
    for generated in range(1, max_tokens, STEPS_ON_GPU):
        last = min(generated + STEPS_ON_GPU, max_tokens)
        needed = 1 + num_prompts * shared + num_rows * (_pages(prompt_tokens + last) - shared)
        if needed > pool:
            pool = max(needed, int(pool * GROWTH))
    return pool * PAGE


def _pages(num_tokens: int) -> int:
    return math.ceil(num_tokens / PAGE)
