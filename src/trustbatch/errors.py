"""Errors a user can act on: each message is one sentence that says what to change."""


class TrustbatchError(Exception):
    """Root of every error that the command line prints without a traceback."""


class ConfigError(TrustbatchError, ValueError):
    """The configuration, or something it names, cannot be used as it is."""


class RewardError(TrustbatchError):
    """A grader failed or returned something that is not a finite number."""


class CheckpointError(TrustbatchError):
    """A checkpoint is missing, damaged or belongs to another run."""


class DivergedError(TrustbatchError):
    """Training produced non-finite gradients and was stopped before it could do harm."""
