"""Types of command-line arguments: each parses a text, or says what it must be."""

import argparse


def at_least_one(text: str) -> int:
    """Parse a positive whole number."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def port(text: str) -> int:
    """Parse a port; 0 stands for any that is free."""
    number = int(text) if text.isdecimal() else -1
    if not 0 <= number <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port from 0 to 65535, not {text!r}")
    return number


def not_negative(text: str) -> float:
    """Parse a number from 0 to 100."""
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from error
    if not 0.0 <= number <= 100.0:
        raise argparse.ArgumentTypeError("must be from 0 to 100")
    return number


def probability(text: str) -> float:
    """Parse a number above 0 and at most 1."""
    number = not_negative(text)
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return number


def names(text: str) -> list[str]:
    """Parse names with commas between them."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"must be names with commas between them, not {text!r}")
    return names


def gib(text: str) -> float:
    """Parse an amount of memory in GiB."""
    try:
        number = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a number of GiB, not {text!r}") from error
    if not 1.0 <= number <= 10_000.0:
        raise argparse.ArgumentTypeError("must be from 1 to 10000 GiB")
    return number
