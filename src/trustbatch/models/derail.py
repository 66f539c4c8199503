"""The base model of the derail language: a tiny Qwen3, pre-trained on a synthetic corpus.

The corpus is what a fallible author writes. He is right about a digit as often as his skill for it
says; now and then he rambles, which may end in truncation; and rarely he slips: random words of the
whole vocabulary follow, and he seldom recovers. So one unlikely word derails the rest of a
completion, as on a real model, and the probability in the tail of the vocabulary matters.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from trustbatch.models.tiny import (
    CONTEXT_LENGTH,
    Reporter,
    build_model,
    refuse_existing,
    save_model,
)
from trustbatch.tasks.derail import (
    ANSWER,
    DIGITS,
    EOS,
    EQUALS,
    ORDINALS,
    PAD,
    Language,
    derail_language,
    zipf_weights,
)

WIDTH = 96
PROMPT_LENGTH = len(ORDINALS) + 1
STEPS = 1000
BATCH_SIZE = 64
LEARNING_RATE = 4e-3

MAX_TOKENS = 48
"""of a completion in rollouts"""
LONGEST = MAX_TOKENS + 8
"""of a completion in the corpus, so that the model does not learn the limit of rollouts"""
STAYS_RAMBLING = 0.6
HABIT = 0.7
"""fraction of the errors that are the habitual one"""
FAVOR = 1.5
"""exponent of the Zipf distribution from which sentences are chosen"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: each word is a token, and an unknown word raises an error."""
    vocabulary = {token: index for index, token in enumerate(derail_language().vocabulary)}
    words = Tokenizer(models.WordLevel(vocabulary))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def warm_start(
    folder: Path,
    *,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
    steps: int = STEPS,
) -> Path:
    """Pre-train a model on the corpus of a seed, write it to ``folder``, and return the folder.

    The result depends on ``seed`` alone (on one machine with one number of threads). ``progress``
    gets a short line about once per second; an error that it raises stops the training. ``folder``
    must not exist, and appears only once it is complete.
    """
    refuse_existing(folder)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed, width=WIDTH)
    _fit(model, _batches(tokenizer, seed), steps, Reporter(progress, steps))
    save_model(model, tokenizer, folder)
    return folder


def _batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Tensor]:
    """Yield documents as rows of token ids, padded on the right."""
    ids = tokenizer.get_vocab()
    documents = Author().documents(derail_language(), seed)
    while True:
        rows = [torch.tensor([ids[word] for word in d]) for d in islice(documents, BATCH_SIZE)]
        yield pad_sequence(rows, batch_first=True, padding_value=ids[PAD])


def _fit(model: Qwen3ForCausalLM, batches: Iterator[Tensor], steps: int, report: Reporter) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.15
    )
    pad_id = model.config.pad_token_id
    model.train()
    for batch in islice(batches, steps):
        # random digits of a prompt can't be learned; padding would take half of the time
        targets = batch[:, PROMPT_LENGTH:]
        is_word = targets != pad_id
        states = model.model(input_ids=batch[:, :-1], use_cache=False).last_hidden_state
        logits = model.lm_head(states[:, PROMPT_LENGTH - 1 :][is_word])
        loss = cross_entropy(logits, targets[is_word])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        report.step("pre-training", loss.detach())
    model.eval()


@dataclass(frozen=True, kw_only=True)
class Author:
    """The author of the corpus, by the probabilities of what he does."""

    slip: float = 0.002
    """probability per word of a derailment"""
    recover: float = 0.02
    """probability per word after a slip that it is the last one"""
    ramble: float = 0.1
    """probability per sentence of rambling"""

    def documents(self, language: Language, seed: int) -> Iterator[tuple[str, ...]]:
        """Yield endless documents: a prompt and its completion, as words."""
        rng = random.Random(f"corpus:{seed}")
        tail = zipf_weights(len(language.words))
        while True:
            prompt = [rng.randrange(10) for _ in ORDINALS]
            completion = self._completion(language, prompt, rng, tail)
            yield (*(DIGITS[digit] for digit in prompt), EQUALS, *completion)

    def _completion(
        self, language: Language, prompt: Sequence[int], rng: random.Random, tail: list[float]
    ) -> list[str]:
        words: list[str] = []
        planned: list[str] = []
        step, is_rambling = 0, False
        while len(words) < LONGEST:
            if not planned:
                is_rambling = rng.random() < (STAYS_RAMBLING if is_rambling else self.ramble)
                if is_rambling:
                    planned = list(rng.choice(language.rambles))
                elif step == len(ORDINALS):
                    planned = [ANSWER, EOS]
                else:
                    planned = _sentence(language, step, prompt[step], rng)
            if rng.random() < self.slip:
                planned = []
                while len(words) < LONGEST and rng.random() >= self.recover:
                    words += rng.choices(language.words, cum_weights=tail)
                continue
            words.append(planned.pop(0))
            step += words[-1] in DIGITS
            if words[-1] == EOS:
                break
        return words


def _sentence(language: Language, step: int, digit: int, rng: random.Random) -> list[str]:
    """Return a sentence that ends in what the author believes is the digit's image."""
    (said,) = rng.choices(
        language.sentences, cum_weights=zipf_weights(len(language.sentences), FAVOR)
    )
    if rng.random() < language.skills[step][digit]:
        image = language.images[step][digit]
    elif rng.random() < HABIT:
        image = language.habits[step][digit]
    else:
        image = rng.randrange(10)
    return [ORDINALS[step], *said, DIGITS[image]]
