"""Models to evaluate: finding, naming and loading them, and identifying their weights."""

import gc
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from trustbatch.checkpoints.load import newest_checkpoint
from trustbatch.config import Config
from trustbatch.errors import ConfigError
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.models.config import ModelConfig
from trustbatch.models.policy import Policy

LoadModel = Callable[[Config], Policy]
_ELEMENTS_PER_TENSOR = 256
"""elements of each tensor that `weights_digest` looks at"""


class ModelCache:
    """Loads models; keeps only the last one in memory."""

    def __init__(self, load_model: LoadModel) -> None:
        self._load_model = load_model
        self._loaded: tuple[ModelConfig, Policy] | None = None

    def load(self, config: Config) -> Policy:
        """Return the frozen model of a configuration."""
        if self._loaded is None or self._loaded[0] != config.model:
            self._loaded = None
            gc.collect()  # free the memory before the next model is loaded
            self._loaded = config.model, self._load_model(config).freeze()
        return self._loaded[1]


def locate_model(name: str) -> str:
    """Return the newest checkpoint of a run folder; any other name unchanged."""
    folder = Path(name)
    checkpoints = folder / "checkpoints"
    is_run = checkpoints.is_dir() or (folder / "config.toml").is_file()
    if not is_run:
        return name
    checkpoint = newest_checkpoint(checkpoints) if checkpoints.is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"The run {name} has no checkpoint yet: wait for the first one.")
    return str(checkpoint)


def short_names(models: Sequence[str]) -> list[str]:
    """Return a unique short name for each model, which can be used in the name of a folder."""
    names = [_short(model, num_parts=1) for model in models]
    num_parts = 1
    while len(set(names)) < len(names):
        if len(set(models)) < len(models):
            raise ConfigError("One model was named twice: name each once.")
        num_parts += 1
        names = [_short(model, num_parts) for model in models]
    return names


def _short(model: str, num_parts: int) -> str:
    parts = [part for part in Path(model).parts if part not in ("/", "..", "checkpoints")]
    if len(parts) > 1 and parts[-1].startswith("step-"):  # a checkpoint needs the name of its run
        num_parts += 1
    return "-".join(parts[-num_parts:]).removesuffix(".gguf") or "model"


def weights_digest(policy: Policy) -> str:
    """Return a hash of a model's weights, from a few elements of each tensor."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in policy.named_weights():
        flat = tensor.flatten()
        stride = max(len(flat) // _ELEMENTS_PER_TENSOR, 1)
        found.update(name.encode() + flat[::stride].float().cpu().numpy().tobytes())
    return found.hexdigest()


def completion_space(policy: Policy, suite: Sequence[EvaluatedTask]) -> tuple[int, int]:
    """Return the number of tokens in the context after the longest prompt, and in that prompt."""
    longest = max(len(policy.encode(problem)) for task in suite for problem in task.problems)
    space = policy.context_length - longest
    if space < 1:
        raise ConfigError(
            f"The longest prompt has {longest:,} tokens, and the context of {policy.name} has "
            f"{policy.context_length:,}: leave it out with --limit, or choose another model."
        )
    return space, longest
