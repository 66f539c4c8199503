"""Errors that a user can fix: each message is one sentence that says what to change."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known word, to append to an unknown one; may be empty."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type, to be quoted in a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


class TrustbatchError(Exception):
    """Base class of errors that the command line prints without a traceback."""


class ConfigError(TrustbatchError, ValueError):
    """The configuration, or something that it refers to, cannot be used."""


class TokenizerError(ConfigError):
    """A text has characters for which the model has no token."""


class RewardError(TrustbatchError):
    """A grader failed or returned something that is not a finite number."""


class ReplyError(TrustbatchError):
    """An environment failed to reply, or replied with something that is not text."""


class CheckpointError(TrustbatchError):
    """A checkpoint is missing, damaged or belongs to another run."""


class EngineError(TrustbatchError):
    """A rollout engine died, timed out, or can't process a request."""


class DeadEngineError(EngineError):
    """The process of an engine died, or was killed since it hung."""


class HubError(TrustbatchError):
    """A model hub can't be reached, or refuses an upload."""


class OutOfMemoryError(TrustbatchError):
    """The device or the machine ran out of memory."""


class DivergedError(TrustbatchError):
    """Training was stopped since it produced non-finite gradients."""


class CanaryError(TrustbatchError):
    """After a weight update, the engine does not sample from the trainer's policy."""
