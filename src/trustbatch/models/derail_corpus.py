"""The corpus of the base model: what an author writes who errs, rambles and derails.

He is right about a digit as often as his skill for it says; now and then he rambles, which may end
in truncation; and seldom he slips: what follows are words out of the whole vocabulary, and from
there he rarely finds back. So a word off the beaten track derails the rest of a completion, as on
a real model, and it matters how much probability the tail of the vocabulary has.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trustbatch.tasks.derail import (
    ANSWER,
    DIGITS,
    EOS,
    EQUALS,
    ORDINALS,
    Language,
    zipf_weights,
)

MAX_TOKENS = 48
"""of a completion, in rollouts"""
LONGEST = MAX_TOKENS + 8
"""of a completion here: nothing stops at the rollouts' limit because it was learnt"""
STAYS_RAMBLING = 0.6
HABIT = 0.7
"""share of the errors that are the usual one"""
FAVOR = 1.5
"""exponent of the law by which sentences are chosen"""


@dataclass(frozen=True, kw_only=True)
class Author:
    """How often what happens."""

    slip: float = 0.002
    """of words: a derailment instead"""
    recover: float = 0.02
    """of words after a slip: the last one"""
    ramble: float = 0.1
    """of sentences"""

    def documents(self, language: Language, seed: int) -> Iterator[tuple[str, ...]]:
        """Yield prompts, each with a completion, word by word and without end."""
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
    """Return one that ends in what the author takes for the digit's image."""
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
