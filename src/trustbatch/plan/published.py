"""Versions of the weights that wait on the first trainer's GPU until engines have taken them."""

from trustbatch.config import Config
from trustbatch.models.policy import default_precision
from trustbatch.rollout.registry import engine_info

FLOAT32 = 4


def published_bytes(config: Config, num_parameters: int) -> float:
    """Return what they take where weights travel directly between GPUs."""
    assert config.cluster is not None
    precision = config.rollout.precision
    if precision == "auto":
        precision = config.model.precision
    if precision == "auto":
        precision = default_precision("cuda")
    rounded = engine_info(config.rollout.engine).weight_dtype(precision)
    # those that may be asked for, and one that is about to go
    num_versions = config.cluster.max_lag + 2
    return num_versions * (FLOAT32 if rounded is None else rounded.itemsize) * num_parameters
