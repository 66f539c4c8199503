"""One completion as another engine recorded it, whatever the format of its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class RecordedSettings:
    """The sampling settings that a file or the command line states; None: not stated."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0: no limit"""

    @property
    def stated(self) -> bool:
        """Whether any setting is stated."""
        return any(getattr(self, each.name) is not None for each in fields(self))

    def or_else(self, other: "RecordedSettings") -> "RecordedSettings":
        """Return these settings, completed by others where they are not stated."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        return RecordedSettings(
            **{name: getattr(other, name) if own[name] is None else own[name] for name in own}
        )


@dataclass(frozen=True, kw_only=True)
class RecordedRollout:
    """A completion of n tokens."""

    line: int
    """of the file, from 1"""
    token_ids: tuple[int, ...] | None
    """None: only the strings of its tokens are known"""
    token_strings: tuple[bytes, ...] | None = None
    logprobs: tuple[float, ...]
    """[n]; NaN where there is none"""
    sampled: tuple[bool, ...] | None = None
    """[n], False for tokens that an environment wrote; None: all are the policy's"""
    prompt_token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    """as the engine got it: after the chat template"""
    messages: Sequence[Mapping[str, Any]] | None = None
    """of a chat, before the template"""
    text: str | None = None
    settings: RecordedSettings = field(default_factory=RecordedSettings)
    model: str | None = None
    version: str | None = None
    precision: str | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens n by what names them: ids, else strings."""
        named = self.token_ids if self.token_ids is not None else self.token_strings
        return len(named or ())
