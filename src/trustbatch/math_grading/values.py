"""Deciding whether two formulas are equal: exactly if they are rational, else to 100 digits.

Formulas with variables are compared at several points, some of them negative: formulas that agree
only for positive numbers are not equal. Cost is bounded: a number of more than `MAX_BITS` bits
raises TooLarge before it is computed.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import reduce
from typing import Any

from trustbatch.math_grading.formula import Node

MAX_BITS = 100_000
MAX_FACTORIAL = 5_000
NUM_POINTS = 5
DIGITS, MORE_DIGITS = 60, 120


class TooLarge(ValueError):
    """The value is too large to compute, or undefined."""


class NotRational(ValueError):
    """The value is not a rational number."""


def equal(a: Node, b: Node) -> bool:
    """Whether two formulas have the same value wherever both are defined."""
    names = sorted(a.symbols() | b.symbols())
    if not names:
        return _equal_at({}, a, b) is True
    decided = 0
    for number in range(NUM_POINTS):
        verdict = _equal_at(_point(names, number), a, b)
        if verdict is False:
            return False
        decided += verdict is True
    return decided >= NUM_POINTS - 1


def proportional(a: Node, b: Node) -> bool:
    """Whether one formula is a nonzero constant times the other."""
    names = sorted(a.symbols() | b.symbols())
    if not names or a.symbols() != b.symbols():
        return False
    ratio: Fraction | None = None
    for number in range(NUM_POINTS):
        try:
            point = _point(names, number)
            above, below = exact(a, point), exact(b, point)
        except (TooLarge, NotRational):
            return False
        if not above or not below or ratio not in (None, above / below):
            return False
        ratio = above / below
    return True


def is_computable(node: Node) -> bool:
    """Whether a formula has a value that is not too large to compute, at some point."""
    try:
        numeric(node, _point(sorted(node.symbols()), 0), DIGITS)
    except (TooLarge, ZeroDivisionError, ValueError, OverflowError):
        return False
    return True


def close(a: Node, b: Node, *, decimals: int | None, tolerance: float) -> bool:
    """Whether two numbers are equal after rounding, or within `tolerance` of the second."""
    if a.symbols() or b.symbols():
        return False
    try:
        first, second = _decimal(a), _decimal(b)
    except (TooLarge, ZeroDivisionError, ValueError):
        return False
    difference = abs(first - second)
    if decimals is not None and difference <= Fraction(1, 2 * 10**decimals):
        return True
    return difference <= Fraction(tolerance) * abs(second)


def _decimal(node: Node) -> Fraction:
    try:
        return exact(node, {})
    except NotRational:
        value = numeric(node, {}, DIGITS)
        if value.imag != 0:
            raise TooLarge("a complex number has no decimals") from None
        mantissa, exponent = value.real.man_exp
        return Fraction(mantissa) * Fraction(2) ** exponent


def _point(names: list[str], number: int) -> dict[str, Fraction]:
    """Return rational values of the variables; the last points include negative ones."""
    rng = random.Random(f"{number}:{names}")
    point = {
        name: Fraction(rng.randrange(101, 2000, 2), rng.choice((211, 223, 227))) for name in names
    }
    if number >= 2:
        negative = [name for name in names if rng.random() < 0.5] or names
        point |= {name: -point[name] for name in negative}
    return point


def _equal_at(point: Mapping[str, Fraction], a: Node, b: Node) -> bool | None:
    """Whether two formulas are equal at a point; None if a value is undefined."""
    try:
        return exact(a, point) == exact(b, point)
    except NotRational:
        pass
    except (TooLarge, ZeroDivisionError):
        return None
    try:
        first, second = numeric(a, point, DIGITS), numeric(b, point, DIGITS)
        difference = abs(first - second)
        scale = max(abs(first), abs(second))
        if difference > scale * 10.0 ** (10 - DIGITS) and difference > 10.0 ** (20 - DIGITS):
            return False
        # the difference is either a rounding error, which shrinks with more digits, or real
        first, second = numeric(a, point, MORE_DIGITS), numeric(b, point, MORE_DIGITS)
        precise = abs(first - second)
        return bool(precise <= scale * 10.0 ** (20 - MORE_DIGITS)) or bool(
            precise <= difference * 10.0 ** (20 - DIGITS)
        )
    except (TooLarge, ZeroDivisionError, ValueError, OverflowError):
        return None


def exact(node: Node, point: Mapping[str, Fraction]) -> Fraction:
    """Return the value of a formula of + - * / and whole powers; NotRational for others."""
    match node.kind:
        case "number":
            return _bounded(node.value)
        case "symbol":
            return point[node.name]
        case "value":
            return _bounded(_unknown(exact(node.parts[0], point), point[f"{node.name}()"]))
        case "negate":
            return -exact(node.parts[0], point)
        case "absolute":
            return abs(exact(node.parts[0], point))
        case "floor":
            return _floor(exact(node.parts[0], point), math.floor, node)
        case "ceiling":
            return -_floor(-exact(node.parts[0], point), math.floor, node)
        case "factorial":
            return Fraction(math.factorial(_small_whole(exact(node.parts[0], point))))
        case "reciprocal":
            return 1 / _not_zero(exact(node.parts[0], point))
        case "of several":
            return _bounded(_SEVERAL[node.name]([exact(part, point) for part in node.parts]))
        case "add" | "multiply" | "power" | "binomial":
            values = [exact(part, point) for part in node.parts]
            return reduce(lambda a, b: _bounded(_EXACT[node.kind](a, b)), values)
        case _:
            raise NotRational(node.kind)


def _floor(x: Any, floor: Callable[[Any], Any], node: Node) -> Any:
    """Return the floor of a number; of a formula with variables, x minus a function of period 1.

    No points could tell all floors apart, for example those of n/3 and (n + 0.001)/3. What holds
    for every function of period 1 holds for the floor, too.
    """
    whole = floor(x)
    if not node.symbols():
        return whole * Fraction(1) if isinstance(x, Fraction) else whole
    part = x - whole
    return x - (part * part * 5 + part * 3 + 1) / (part * 2 + 7)


def _unknown(x: Any, seed: Any) -> Any:
    """Return the value of an unknown function: one that satisfies no simple equation."""
    above = ((seed * x + seed + 3) * x + 7 / seed) * x + 11 * seed
    return above / (x * x + seed * seed + 5)


def _bounded(value: Fraction) -> Fraction:
    if value.numerator.bit_length() + value.denominator.bit_length() > MAX_BITS:
        raise TooLarge("too many digits")
    return value


def _small_whole(value: Fraction) -> int:
    if value.denominator != 1 or value < 0:
        raise NotRational("factorial")
    if value > MAX_FACTORIAL:
        raise TooLarge("factorial")
    return int(value)


def _not_zero(value: Fraction) -> Fraction:
    if value == 0:
        raise TooLarge("division by zero")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise NotRational("power")
    if base == 0 and exponent <= 0:
        raise TooLarge("zero to such a power")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(base) != 1 and abs(exponent) * bits > MAX_BITS:
        raise TooLarge("power")
    if abs(base) == 1:
        return base if exponent % 2 else abs(base)
    return base ** int(exponent)


def _binomial(n: Fraction, k: Fraction) -> Fraction:
    return Fraction(math.comb(_small_whole(n), _small_whole(k)))


_EXACT: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "power": _power,
    "binomial": _binomial,
}


def _whole(values: Sequence[Fraction]) -> list[int]:
    if any(value.denominator != 1 for value in values):
        raise TooLarge("a divisor of fractions")
    return [int(value) for value in values]


_SEVERAL: dict[str, Callable[[Sequence[Fraction]], Fraction]] = {
    "gcd": lambda values: Fraction(math.gcd(*_whole(values))),
    "lcm": lambda values: Fraction(math.lcm(*_whole(values))),
    "max": max,
    "min": min,
}


def numeric(node: Node, point: Mapping[str, Fraction], digits: int) -> Any:
    """Return the value of a formula as a complex number with `digits` digits."""
    import mpmath  # a dependency of torch through sympy; slow to import

    with mpmath.workdps(digits):
        return mpmath.mpc(_Numeric(mpmath, point).value(node))


class _Numeric:
    """Evaluates a tree with mpmath, in bounded time and memory."""

    def __init__(self, mp: Any, point: Mapping[str, Fraction]) -> None:
        self.mp = mp
        self.point = point
        # the base of a bare log is ambiguous (e or 10), so it must equal neither
        self.unnamed_base = mp.mpf("3.31417")

    def value(self, node: Node) -> Any:
        mp = self.mp
        match node.kind:
            case "number":
                return mp.mpf(node.value.numerator) / node.value.denominator
            case "symbol":
                value = self.point[node.name]
                return mp.mpf(value.numerator) / value.denominator
            case "constant":
                return {"pi": mp.pi, "e": mp.e, "i": mp.j}[node.name] * 1
        parts = [self.value(part) for part in node.parts]
        if any(abs(part) > mp.mpf(2) ** MAX_BITS for part in parts):
            raise TooLarge(node.kind)
        return self.apply(node, parts)

    def apply(self, node: Node, parts: list[Any]) -> Any:
        mp = self.mp
        match node.kind:
            case "negate":
                return -parts[0]
            case "value":
                seed = self.point[f"{node.name}()"]
                return _unknown(parts[0], mp.mpf(seed.numerator) / seed.denominator)
            case "absolute":
                return abs(parts[0])
            case "degrees":
                return parts[0] * mp.pi / 180
            case "floor":
                return _floor(self.real(parts[0]), mp.floor, node)
            case "ceiling":
                return -_floor(-self.real(parts[0]), mp.floor, node)
            case "add":
                return mp.fsum(parts)
            case "multiply":
                return mp.fprod(parts)
            case "reciprocal":
                return 1 / parts[0]
            case "power":
                return self.power(parts[0], parts[1])
            case "root":
                return self.root(parts[1], parts[0])
            case "factorial":
                return mp.factorial(self.moderate(parts[0]))
            case "binomial":
                return mp.binomial(self.moderate(parts[0]), self.moderate(parts[1]))
            case "call":
                return self.call(node.name, parts)
            case "of several" if node.name in ("max", "min"):
                return _SEVERAL[node.name]([self.real(part) for part in parts])
        raise TooLarge(node.kind)

    def power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            if not self.mp.re(exponent) > 0:
                raise TooLarge("zero to such a power")
            return base
        if abs(exponent) * (abs(self.mp.log(abs(base))) + 4) > MAX_BITS:
            raise TooLarge("power")
        return self.mp.power(base, exponent)

    def root(self, inner: Any, degree: Any) -> Any:
        if degree == 0:
            raise TooLarge("root")
        odd = self.mp.im(degree) == 0 and self.mp.re(degree) % 2 == 1
        if odd and self.mp.im(inner) == 0 and self.mp.re(inner) < 0:
            return -self.power(-inner, 1 / degree)
        return self.power(inner, 1 / degree)

    def call(self, name: str, parts: list[Any]) -> Any:
        mp, argument = self.mp, parts[0]
        if name in ("ln", "log", "lg"):
            if argument == 0:
                raise TooLarge("logarithm of zero")
            if name == "ln":
                return mp.log(argument)
            base = mp.mpf(10) if name == "lg" else parts[1] if len(parts) > 1 else self.unnamed_base
            return mp.log(argument) / mp.log(base)
        argument = self.moderate(argument)
        names = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}
        return getattr(mp, names.get(name, name))(argument)

    def real(self, value: Any) -> Any:
        if self.mp.im(value) != 0:
            raise TooLarge("a complex number has no floor")
        return self.mp.re(value)

    def moderate(self, value: Any) -> Any:
        if abs(value) > MAX_FACTORIAL:
            raise TooLarge("argument")
        return value
