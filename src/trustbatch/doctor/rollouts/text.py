"""Do ids and text belong together? Text that is encoded again need not give the sampled ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from trustbatch.doctor.rollouts.recorded import RecordedRollout
from trustbatch.errors import ConfigError, first_line

MAX_NAMED = 5
"""lines that a sentence names"""


@dataclass(frozen=True)
class Lines:
    """The lines of completions with something in common, by number."""

    numbers: list[int] = field(default_factory=list)
    example: str = ""
    """what the first one has"""

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        shown = sorted(set(self.numbers))
        more = ", ..." if len(shown) > MAX_NAMED else ""
        return f"line{'s' if len(shown) > 1 else ''} {', '.join(map(str, shown[:MAX_NAMED]))}{more}"

    def add(self, line: int, example: str = "") -> "Lines":
        """Return the lines with one more."""
        return Lines([*self.numbers, line], self.example or example)


@dataclass(frozen=True)
class TextResult:
    """How ids and texts agree, over the examined completions."""

    num_texts: int
    """completions with a text and recorded ids"""
    num_prompts: int
    """completions with a prompt or messages and recorded prompt ids"""
    other_text: Lines
    """ids that decode to another text"""
    other_encoding: Lines
    """texts that encode to other ids, though the ids decode to the text"""
    always_canonical: bool
    """whether all ids are the ones that their text encodes to"""
    other_prompt: Lines
    """prompts that encode to other ids"""


def examine_texts(
    tokenizer: PreTrainedTokenizerBase, rollouts: Sequence[RecordedRollout]
) -> TextResult:
    """Decode the ids and encode the texts of completions, where a file has both."""
    with_text = [each for each in rollouts if each.text is not None and each.token_ids is not None]
    with_prompt = [
        each
        for each in rollouts
        if each.prompt_token_ids is not None and (each.prompt or each.messages)
    ]
    other_text, other_encoding, other_prompt = Lines(), Lines(), Lines()
    for rollout in with_text:
        assert rollout.text is not None
        assert rollout.token_ids is not None
        if not _is_text_of(tokenizer, rollout.token_ids, rollout.text):
            decoded = _decode(tokenizer, rollout.token_ids)
            other_text = other_text.add(rollout.line, _difference(decoded, rollout.text))
        elif not _encodes_to(tokenizer, rollout.text, rollout.token_ids):
            other_encoding = other_encoding.add(rollout.line)
    for rollout in with_prompt:
        assert rollout.prompt_token_ids is not None
        expected = prompt_ids(tokenizer, rollout)
        if expected != rollout.prompt_token_ids:
            example = _prompt_difference(tokenizer, expected, rollout.prompt_token_ids)
            other_prompt = other_prompt.add(rollout.line, example)
    return TextResult(
        num_texts=len(with_text),
        num_prompts=len(with_prompt),
        other_text=other_text,
        other_encoding=other_encoding,
        always_canonical=bool(with_text) and not other_text and not other_encoding,
        other_prompt=other_prompt,
    )


def prompt_ids(tokenizer: PreTrainedTokenizerBase, rollout: RecordedRollout) -> tuple[int, ...]:
    """Return the ids that this tokenizer gives to the prompt of a completion."""
    if rollout.messages is None:
        assert rollout.prompt is not None
        # a prompt that begins with a special token has been through a chat template
        is_rendered = any(rollout.prompt.startswith(each) for each in tokenizer.all_special_tokens)
        return tuple(tokenizer.encode(rollout.prompt, add_special_tokens=not is_rendered))
    try:
        rendered = tokenizer.apply_chat_template(
            [dict(message) for message in rollout.messages],
            add_generation_prompt=True,
            tokenize=False,
        )
    except Exception as error:  # a template may raise anything
        raise ConfigError(
            f"Line {rollout.line} of the rollouts has messages that fail in the model's chat "
            f"template ({first_line(error)}): record prompt_token_ids."
        ) from error
    return tuple(tokenizer.encode(str(rendered), add_special_tokens=False))


def _decode(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], *, special: bool = False
) -> str:
    return str(tokenizer.decode(list(token_ids), skip_special_tokens=not special))


def _is_text_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], text: str) -> bool:
    """Whether ids decode to a text, which may lack special tokens or end before a stop string."""
    plain = _decode(tokenizer, token_ids)
    whole = _decode(tokenizer, token_ids, special=True)
    # an engine holds back the bytes of an unfinished character
    wanted = text.strip().rstrip("\N{REPLACEMENT CHARACTER}")
    return plain.strip().startswith(wanted) or whole.strip().startswith(wanted)


def _encodes_to(tokenizer: PreTrainedTokenizerBase, text: str, token_ids: Sequence[int]) -> bool:
    """Whether a text encodes to the ids, up to the special tokens at their end."""
    special = set(tokenizer.all_special_ids)
    own = list(token_ids)
    while own and own[-1] in special:
        own.pop()
    encoded = tokenizer.encode(text, add_special_tokens=False)
    while encoded and encoded[-1] in special:
        encoded.pop()
    return encoded == own


def _difference(decoded: str, text: str) -> str:
    """Return the place where two texts part, for a sentence."""
    start = next(
        (n for n, (a, b) in enumerate(zip(decoded, text, strict=False)) if a != b),
        min(len(decoded), len(text)),
    )
    place = slice(max(start - 8, 0), start + 16)
    return f"the ids say {decoded[place]!r}, the text {text[place]!r}"


def _prompt_difference(
    tokenizer: PreTrainedTokenizerBase, expected: Sequence[int], recorded: Sequence[int]
) -> str:
    """Return how two encodings of a prompt differ, for a sentence."""
    bos = tokenizer.bos_token_id
    expected, recorded = list(expected), list(recorded)
    if bos is not None and recorded[:2] == [bos, bos] and expected[:2] != [bos, bos]:
        return "it begins with two beginning-of-sequence tokens"
    if recorded == expected[: len(recorded)]:
        rest = _decode(tokenizer, expected[len(recorded) :], special=True)
        return f"its end is missing ({rest!r}, as without add_generation_prompt)"
    start = next(
        (n for n, (a, b) in enumerate(zip(expected, recorded, strict=False)) if a != b),
        min(len(expected), len(recorded)),
    )
    shown = [
        _decode(tokenizer, ids[start : start + 8], special=True) for ids in (recorded, expected)
    ]
    return f"from token {start} on it says {shown[0]!r} where this tokenizer says {shown[1]!r}"
