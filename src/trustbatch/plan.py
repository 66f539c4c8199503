"""What `--dry-run` shows: the work of one step and a first estimate of memory."""

from trustbatch.config import Config
from trustbatch.policy import count_parameters
from trustbatch.training.checkpoint import list_checkpoints

GIB = 2**30


def describe_plan(config: Config) -> str:
    """Return a few lines about the run that a configuration would start; loads no weights."""
    num_parameters, model = count_parameters(
        config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    rollout, training = config.rollout, config.training
    num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    needs_reference = bool(config.build_objective().reference_kl_coef)
    weights = 4 * num_parameters
    logits = 4 * training.micro_batch_tokens * model.vocab_size
    lines = [
        f"model       {config.model.name}: {num_parameters:,} parameters",
        f"step        {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
        f"{num_sequences} completions of at most {rollout.max_tokens} tokens",
        f"updates     {training.steps} steps x {training.passes} passes x "
        f"{training.mini_batches} optimiser steps",
        f"memory      weights {_gib(weights)}, gradients {_gib(weights)}, AdamW "
        f"{_gib(2 * weights)}, logits of a micro-batch at most {_gib(logits)}"
        + (f", reference {_gib(weights)}" if needs_reference else ""),
        f"results     {config.run.path}{_continues(config)}",
    ]
    return "\n".join(lines)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _continues(config: Config) -> str:
    checkpoints = list_checkpoints(config.run.path / "checkpoints")
    return f" (continues from {checkpoints[-1].name})" if checkpoints else ""
