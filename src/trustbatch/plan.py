"""What `--dry-run` shows: the work of one step and a first estimate of memory."""

import torch

from trustbatch.config import Config, SecondPolicyConfig
from trustbatch.policy import count_parameters
from trustbatch.training.checkpoint import list_checkpoints

GIB = 2**30
LOGIT_COPIES = 5
"""float32 copies of a micro-batch's logits at the peak of its two passes, as measured"""


def describe_plan(config: Config) -> str:
    """Return a few lines about the run that a configuration would start; loads no weights."""
    num_parameters, model = count_parameters(
        config.model.name, trust_remote_code=config.model.trust_remote_code
    )
    rollout, training = config.rollout, config.training
    num_sequences = rollout.prompts_per_step * rollout.samples_per_prompt
    needs_reference = bool(config.build_objective().reference_kl_coef)
    weights = 4 * num_parameters
    logits = LOGIT_COPIES * 4 * training.micro_batch_tokens * model.get_text_config().vocab_size
    lines = [
        f"model       {config.model.name}: {num_parameters:,} parameters on {_device(config)}",
        f"step        {rollout.prompts_per_step} prompts x {rollout.samples_per_prompt} samples = "
        f"{num_sequences} completions of at most {rollout.max_tokens} tokens",
        f"updates     {training.steps} steps x {training.passes} passes x "
        f"{training.mini_batches} optimiser steps",
        f"memory      weights {_size(weights)}, gradients {_size(weights)}, AdamW "
        f"{_size(2 * weights)}, logits of a full micro-batch about {_size(logits)}"
        + (f", reference {_size(weights)}" if needs_reference else ""),
        *[_second_policy(config, second) for second in rollout.policies],
        f"results     {config.run.path}{_continues(config)}",
    ]
    return "\n".join(lines)


def _second_policy(config: Config, second: SecondPolicyConfig) -> str:
    num_parameters, _ = count_parameters(second.model, trust_remote_code=second.trust_remote_code)
    temperature = second.temperature or config.rollout.temperature
    return (
        f"policy      {second.policy_name}: draws {second.share:.0%} at temperature {temperature}, "
        f"{num_parameters:,} parameters, {_size(4 * num_parameters)}"
    )


def _device(config: Config) -> str:
    device = config.model.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return device
    properties = torch.cuda.get_device_properties(device)
    return f"{device} ({properties.name}, {_size(properties.total_memory)})"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"


def _continues(config: Config) -> str:
    checkpoints = list_checkpoints(config.run.path / "checkpoints")
    return f" (continues from {checkpoints[-1].name})" if checkpoints else ""
