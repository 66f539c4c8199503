"""Student's t distribution with whole degrees of freedom, exactly and without scipy."""

import math


def t_probability(t: float, degrees: int) -> float:
    """Return the chance that |T| is at least |t|.

    A finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).
    """
    if math.isinf(t):
        return 0.0
    angle = math.atan(abs(t) / math.sqrt(degrees))
    square = math.cos(angle) ** 2
    is_odd = degrees % 2
    term = math.cos(angle) if is_odd else 1.0
    total = 0.0
    for k in range(is_odd, degrees - 1, 2):
        total += term
        term *= square * (k + 1) / (k + 2)
    inside = math.sin(angle) * total
    if is_odd:
        inside = (angle + inside) * 2 / math.pi
    return min(max(1.0 - inside, 0.0), 1.0)


def t_quantile(level: float, degrees: int) -> float:
    """Return the t that |T| stays below with this chance."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) > 1.0 - level:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, degrees) > 1.0 - level:
            low = middle
        else:
            high = middle
    return (low + high) / 2
