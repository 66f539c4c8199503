"""Which model a word on the command line means, and what distinguishes its weights."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from trustbatch.checkpoints.load import newest_checkpoint
from trustbatch.errors import ConfigError
from trustbatch.evaluation.suite import EvaluatedTask
from trustbatch.models.policy import Policy

_ELEMENTS_LOOKED_AT = 256


def locate_model(name: str) -> str:
    """Return the newest checkpoint of a run folder; any other name as it is."""
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
    """Return a name of each model that can be a folder's, and that no other of them has."""
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
    if len(parts) > 1 and parts[-1].startswith("step-"):  # a checkpoint says little without its run
        num_parts += 1
    return "-".join(parts[-num_parts:]).removesuffix(".gguf") or "model"


def weights_digest(policy: Policy) -> str:
    """Return a short name of a model's weights, from a few elements of each of its tensors."""
    found = hashlib.blake2b(digest_size=8)
    for name, tensor in policy.named_weights():
        flat = tensor.flatten()
        stride = max(len(flat) // _ELEMENTS_LOOKED_AT, 1)
        found.update(name.encode() + flat[::stride].float().cpu().numpy().tobytes())
    return found.hexdigest()


def room_for_answers(policy: Policy, suite: Sequence[EvaluatedTask]) -> tuple[int, int]:
    """Return how many tokens the context leaves after the longest prompt, and that prompt's."""
    longest = max(len(policy.encode(problem)) for task in suite for problem in task.problems)
    room = policy.context_length - longest
    if room < 1:
        raise ConfigError(
            f"The longest prompt has {longest:,} tokens, and the context of {policy.name} has "
            f"{policy.context_length:,}: leave it out with --limit, or choose another model."
        )
    return room, longest
