"""Derail: a synthetic language and a task in it, in which one wrong token ruins the completion.

The language has a few thousand words with Zipf frequencies, fixed sentences, and a table to
memorize. A prompt is three digits, "3 7 1 =". A correct completion is three sentences, each of
which starts with its ordinal and ends with a digit, then "answer": the i-th digit is the image of
the prompt's i-th digit in the table. Most words occur in no sentence: they are the tail that a
flatter distribution drifts into. `trustbatch.models.derail_base` trains models of the language.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from typing import ClassVar

from trustbatch.types import Prompt

SPLITS = ("train", "test")
PAD, EOS, EQUALS, ANSWER = "<pad>", "</s>", "=", "answer"
ORDINALS = ("first", "second", "third")
DIGITS = tuple("0123456789")
NUM_TOKENS = 2048
NUM_SENTENCES = 8
NUM_RAMBLES = 6
NUM_COMMON = 400
"""words that occur in sentences"""
SKILLS = (0.95, 0.75, 0.5, 0.3)
NUM_HELD_OUT = 200
"""prompts of the test split, out of 1,000"""


@dataclass(frozen=True, kw_only=True)
class Derail:
    """Prompts such as "3 7 1 =", whose digits have to be mapped by the memorized table."""

    seed: int = 0
    split: str = "train"
    """"test" has 200 prompts, in the same order for all seeds, which "train" does not contain"""
    name: str = "derail"
    grades_in_process: ClassVar[bool] = True
    """comparing a few words is cheap"""

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ValueError(f"task.split must be one of {', '.join(SPLITS)}.")

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt: random in the training split, in order in the test split."""
        language = derail_language()
        if self.split == "test":
            prompts = language.prompts[-NUM_HELD_OUT:]
            digits = prompts[index % NUM_HELD_OUT]
        else:
            rng = random.Random(f"{self.seed}:{index}")
            digits = rng.choice(language.prompts[:-NUM_HELD_OUT])
        return Prompt(
            id=f"derail-{self.split}:{self.seed}:{index}",
            text=" ".join([*(DIGITS[digit] for digit in digits), EQUALS]),
            answer=" ".join(language.right_digits(digits)),
        )

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 for exactly the right digits in order and "answer" as the last word; otherwise 0."""
        words = completion.split()
        written = [word for word in words if word in DIGITS]
        return float(written == prompt.answer.split() and words[-1] == ANSWER)


@dataclass(frozen=True, kw_only=True)
class Language:
    """Vocabulary, sentences, the table, and the error rates of the corpus."""

    words: tuple[str, ...]
    """most frequent first"""
    sentences: tuple[tuple[str, ...], ...]
    """without the leading ordinal and the trailing digit; most frequent first"""
    rambles: tuple[tuple[str, ...], ...]
    """off-topic sentences"""
    images: tuple[tuple[int, ...], ...]
    """[step][digit]: the right digit"""
    habits: tuple[tuple[int, ...], ...]
    """[step][digit]: the usual wrong digit in the corpus"""
    skills: tuple[tuple[float, ...], ...]
    """[step][digit]: how often the corpus has the right digit"""
    prompts: tuple[tuple[int, ...], ...]
    """all prompts, shuffled; the last `NUM_HELD_OUT` are the test split"""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens in the order of their ids."""
        return (PAD, EOS, EQUALS, ANSWER, *ORDINALS, *DIGITS, *self.words)

    def right_digits(self, prompt: Sequence[int]) -> tuple[str, ...]:
        """Return the digits of a correct completion."""
        return tuple(DIGITS[row[digit]] for row, digit in zip(self.images, prompt, strict=True))


@cache
def derail_language() -> Language:
    """Return the language, which is the same for all seeds of models and runs."""
    rng = random.Random("derail")
    syllables = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]
    two_syllables = [a + b for a, b in product(syllables, repeat=2)]
    num_words = NUM_TOKENS - len((PAD, EOS, EQUALS, ANSWER, *ORDINALS, *DIGITS))
    words = tuple(rng.sample(two_syllables, num_words))
    common = zipf_weights(NUM_COMMON)

    def sentence() -> tuple[str, ...]:
        return tuple(rng.choices(words[:NUM_COMMON], cum_weights=common, k=rng.randint(4, 8)))

    def table() -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.randrange(10) for _ in DIGITS) for _ in ORDINALS)

    prompts = list(product(range(10), repeat=len(ORDINALS)))
    rng.shuffle(prompts)
    return Language(
        words=words,
        sentences=tuple(sentence() for _ in range(NUM_SENTENCES)),
        rambles=tuple(sentence() for _ in range(NUM_RAMBLES)),
        images=table(),
        habits=table(),
        skills=tuple(tuple(rng.choice(SKILLS) for _ in DIGITS) for _ in ORDINALS),
        prompts=tuple(prompts),
    )


def zipf_weights(count: int, exponent: float = 1.0) -> list[float]:
    """Return cumulative weights of ranks 1 to `count`, for `random.choices`."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))
