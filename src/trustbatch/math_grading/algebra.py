r"""Comparing with a reference that only computer algebra can parse: sums, limits, integrals.

math-verify is called only if the reference needs it, and with its own time limits. A completion
that exhausts it is wrong; a reference that does is an error, since every completion would be.
"""

import importlib.util
import logging
import re
import threading
import time
from functools import lru_cache
from typing import Any

from trustbatch.errors import RewardError
from trustbatch.math_grading.formula import Node
from trustbatch.math_grading.values import is_computable

SECONDS = 2
"""for one parse or comparison; the time limit of a grading process is longer"""
MAX_LENGTH = 500
_COMMANDS = re.compile(r"\\(?:sum|prod|int|lim|max|min|gcd|lcm|det|bmod)(?![a-zA-Z])")
_HUGE = re.compile(
    r"\d{5}|!|\^\s*\{[^{}]*(?:\d{4}|[\^{*(\\])|\^\s*\{[^{}]{13}|\^\s*(?:\d{4}|\()|\\binom"
)
"""may be a number that is too large to compute; a signal does not interrupt its computation"""


@lru_cache(maxsize=1)
def has_math_verify() -> bool:
    """Whether math-verify is installed."""
    return importlib.util.find_spec("math_verify") is not None


def equal_by_algebra(given: str, tree: Node | None, wanted: str) -> bool:
    """Compare an answer, and its tree if it is a plain formula, with such a reference.

    math-verify ignores case and primes, so both texts must have the same variables.
    """
    if not _COMMANDS.search(wanted):
        return False
    if not has_math_verify():
        raise RewardError(
            f"Comparing {given[:80]!r} with {wanted[:80]!r} needs math-verify: "
            "pip install 'trustbatch[math]'."
        )
    if _variables(given) != _variables(wanted):
        return False
    if not is_computable(tree) if tree else len(given) > MAX_LENGTH or _HUGE.search(given):
        return False
    reference = _parsed_reference(wanted)
    if not reference:
        return False
    try:
        parsed = _parse(given)
        if not parsed:
            return False
        start = time.monotonic()
        is_equal = _verify(reference, parsed)
    except (MemoryError, RecursionError):
        return False
    if time.monotonic() - start >= SECONDS:
        _refuse_exhausting(wanted)
    return is_equal


@lru_cache(maxsize=1024)
def _parsed_reference(wanted: str) -> list[Any]:
    start = time.monotonic()
    parsed = _parse(wanted)
    if not parsed and time.monotonic() - start >= SECONDS:
        raise _exhausting(wanted)
    return parsed


@lru_cache(maxsize=1024)
def _refuse_exhausting(wanted: str) -> None:
    """Raise an error if comparing even a small number with the reference takes too long."""
    start = time.monotonic()
    _verify(_parsed_reference(wanted), _parse("7"))
    if time.monotonic() - start >= SECONDS:
        raise _exhausting(wanted)


def _exhausting(wanted: str) -> RewardError:
    return RewardError(
        f"math-verify can't compute the reference {wanted[:80]!r} in {SECONDS} seconds: "
        "replace it by its value, or remove the row."
    )


def _parse(text: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    as_is = NormalizationConfig(basic_latex=False, boxed="none")
    config = [LatexExtractionConfig(normalization_config=as_is)]
    return parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=_seconds())


def _verify(reference: list[Any], parsed: list[Any]) -> bool:
    from math_verify import verify

    return verify(reference[0], parsed[0], timeout_seconds=_seconds())


def _seconds() -> int:
    """Return math-verify's limit; its signals exist in the main thread only."""
    return SECONDS if threading.current_thread() is threading.main_thread() else 0


def _variables(text: str) -> set[str]:
    """Return the letters and primes outside commands, except bound variables of sums."""
    bound = set(re.findall(r"\\(?:sum|prod|lim)_\{?([A-Za-z])|d([A-Za-z])\b", text))
    letters = set(re.findall(r"[A-Za-z']", re.sub(r"\\[a-zA-Z]+", "", text)))
    return letters - {name for pair in bound for name in pair} - {"d"}
