"""What the entropy of a policy is wanted for."""

from enum import Enum


class EntropyUse(Enum):
    """Not at all, as a number, or as a term of the loss."""

    NONE = 0
    REPORTED = 1
    LEARNED = 2
