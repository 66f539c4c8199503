"""Errors a user can act on: each message is one sentence that says what to change."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a hint with the nearest known word, to be put behind a wrong one; often empty."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type, to be quoted in a sentence."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__).rstrip(".")


class TrustbatchError(Exception):
    """Root of every error that the command line prints without a traceback."""


class ConfigError(TrustbatchError, ValueError):
    """The configuration, or something it names, cannot be used as it is."""


class RewardError(TrustbatchError):
    """A grader failed or returned something that is not a finite number."""


class ReplyError(TrustbatchError):
    """An environment failed to answer, or answered with something that is not text."""


class CheckpointError(TrustbatchError):
    """A checkpoint is missing, damaged or belongs to another run."""


class EngineError(TrustbatchError):
    """A rollout engine died, did not answer in time, or can't take what it was given."""


class DeadEngineError(EngineError):
    """The process that an engine has beside this one is gone, or was ended since it hung."""


class OutOfMemoryError(TrustbatchError):
    """The device, or the machine, had less memory than the run needed."""


class DivergedError(TrustbatchError):
    """Training produced non-finite gradients and was stopped before it could do harm."""


class CanaryError(TrustbatchError):
    """After a weight update the engine samples from something else than the trainer's policy."""
