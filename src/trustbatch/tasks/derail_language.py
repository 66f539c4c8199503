"""The language: a few thousand words by Zipf's law, set sentences, and a table to recite.

A prompt is three digits, "3 7 1 =". A right completion is three sentences, each of which opens
with its ordinal and ends in a digit, then "answer": the i-th digit is the image of the prompt's
i-th under a table that has to be known by heart. Most words belong to no sentence: they are the
tail that a flatter distribution drifts into.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product

PAD, EOS, EQUALS, ANSWER = "<pad>", "</s>", "=", "answer"
ORDINALS = ("first", "second", "third")
DIGITS = tuple("0123456789")
NUM_TOKENS = 2048
NUM_SENTENCES = 8
NUM_RAMBLES = 6
NUM_COMMON = 400
"""words that sentences are made of"""
SKILLS = (0.95, 0.75, 0.5, 0.3)
NUM_HELD_OUT = 200
"""of the thousand prompts"""


@dataclass(frozen=True, kw_only=True)
class Language:
    """What is said, what is right, and how well the author of the corpus knows it."""

    words: tuple[str, ...]
    """the most frequent first"""
    sentences: tuple[tuple[str, ...], ...]
    """without the ordinal before and the digit behind; the most frequent first"""
    rambles: tuple[tuple[str, ...], ...]
    """sentences that lead nowhere"""
    images: tuple[tuple[int, ...], ...]
    """[step][digit]: the right digit"""
    habits: tuple[tuple[int, ...], ...]
    """[step][digit]: what the author tends to write otherwise"""
    skills: tuple[tuple[float, ...], ...]
    """[step][digit]: how often the author is right"""
    prompts: tuple[tuple[int, ...], ...]
    """all of them, shuffled; the last `NUM_HELD_OUT` are for evaluation"""

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens; a token's place is its id."""
        return (PAD, EOS, EQUALS, ANSWER, *ORDINALS, *DIGITS, *self.words)

    def right_digits(self, prompt: Sequence[int]) -> tuple[str, ...]:
        """Return the digits that a right completion writes."""
        return tuple(DIGITS[row[digit]] for row, digit in zip(self.images, prompt, strict=True))


@cache
def the_language() -> Language:
    """Return it: there is one, whatever the seeds of models and runs are."""
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
    """Return cumulative weights of ranks 1 to `count`, as `random.choices` takes them."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))
