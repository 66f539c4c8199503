"""Names of the metrics that a step has once per lag; without torch, for `trustbatch status`."""

from collections.abc import Mapping

COMPLETIONS_BY_LAG = "rollout/completions/lag_"
ONE_MINUS_ESS_BY_LAG = "one_minus_ess/lag_"
RATIO_MEAN_BY_LAG = "ratio/mean/lag_"
"""prefixes: the name of a metric ends in the lag"""


def values_by_lag(metrics: Mapping[str, float], prefix: str) -> dict[int, float]:
    """Return the value for each lag of the metric with this prefix, the smallest lag first."""
    found = {
        int(name.removeprefix(prefix)): value
        for name, value in metrics.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdecimal()
    }
    return dict(sorted(found.items()))
