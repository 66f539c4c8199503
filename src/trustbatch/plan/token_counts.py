"""Numbers of tokens: of the longest prompt, and in the native engine's KV cache."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from trustbatch.config import Config
from trustbatch.models.gguf import find_gguf, read_gguf_tokenizer
from trustbatch.models.loading import context_length_of, is_offline
from trustbatch.models.tokenization import count_prompt_tokens
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
    tokenizer = None if task is None else prompt_tokenizer(config)
    if task is None or tokenizer is None:
        return PromptLength(ASSUMED_PROMPT_TOKENS, is_assumed=True)
    num_prompts = min(config.rollout.prompts_per_step, MAX_PROMPTS)
    counts = tokenizer.count_tokens([task.prompt(i) for i in range(num_prompts)])
    longest = max((count for count in counts if isinstance(count, int)), default=0)
    if longest == 0:
        return PromptLength(ASSUMED_PROMPT_TOKENS, is_assumed=True)
    return PromptLength(longest, is_assumed=False)


@dataclass(frozen=True)
class PromptTokenizer:
    """The tokenizer of a model whose weights are not loaded."""

    tokenizer: PreTrainedTokenizerBase
    context_length: int

    def count_tokens(self, prompts: Sequence[Prompt]) -> list[int | str]:
        """Return the number of tokens of each prompt, or why it can't be tokenized."""
        return count_prompt_tokens(self.tokenizer, prompts)


def prompt_tokenizer(config: Config) -> PromptTokenizer | None:
    """Return the tokenizer of the model; None if there is none without the hub."""
    return _load_tokenizer(config.model.name, config.model.trust_remote_code)


@lru_cache(maxsize=1)
def _load_tokenizer(name: str, trust_remote_code: bool) -> PromptTokenizer | None:
    file = find_gguf(name)
    if file is not None:
        tokenizer, model_config = read_gguf_tokenizer(file)
        return PromptTokenizer(tokenizer, context_length_of(model_config))
    options: dict[str, Any] = {
        "trust_remote_code": trust_remote_code,
        "local_files_only": is_offline(name),
    }
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **options)
        length = context_length_of(AutoConfig.from_pretrained(name, **options))
    except (OSError, ValueError):
        return None
    # transformers returns an empty tokenizer if there are no files
    return PromptTokenizer(tokenizer, length) if len(tokenizer) else None


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
