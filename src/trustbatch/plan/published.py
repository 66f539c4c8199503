"""Versions of the weights that wait on the first trainer's GPU until engines have taken them."""

from trustbatch.config import Config

FLOAT32, ROUNDED = 4, 2
LARGEST_SHARE = 0.2
"""of that GPU's memory which they may take, unless direct transfer was asked for by its name"""


def published_bytes(config: Config, num_parameters: int) -> float:
    """Return what they take where weights travel directly between GPUs."""
    assert config.cluster is not None
    precision = config.rollout.precision
    if precision == "auto":
        precision = config.model.precision
    # vLLM rounds all of them; the native engine has float32, and rounds what some products use
    is_rounded = config.rollout.engine == "vllm" and precision != "float32"
    # those that may be asked for, and one that is about to go
    num_versions = config.cluster.max_lag + 2
    return num_versions * (ROUNDED if is_rounded else FLOAT32) * num_parameters


def may_wait_on_gpu(config: Config, num_bytes: float, *, gpu_memory: float) -> bool:
    """Whether the configuration wants them there."""
    assert config.cluster is not None
    if config.cluster.weight_transfer == "auto":
        return num_bytes <= LARGEST_SHARE * gpu_memory
    return config.cluster.weight_transfer == "process_group"
