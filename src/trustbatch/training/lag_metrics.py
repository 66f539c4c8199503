"""Metrics that a step has for each lag among its completions: their names end in the lag."""

from collections.abc import Mapping

COMPLETIONS_BY_LAG = "rollout/completions/lag_"
ONE_MINUS_ESS_BY_LAG = "one_minus_ess/lag_"


def values_by_lag(metrics: Mapping[str, float], prefix: str) -> dict[int, float]:
    """Return the value of each lag, the smallest lag first."""
    found = {
        int(name.removeprefix(prefix)): value
        for name, value in metrics.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    return dict(sorted(found.items()))
