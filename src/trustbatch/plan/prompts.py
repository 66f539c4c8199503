"""How long prompts are, as far as can be told without loading the model."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import AutoTokenizer

from trustbatch.config import Config
from trustbatch.models.gguf import find_gguf
from trustbatch.models.tokenization import encode_prompt
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
