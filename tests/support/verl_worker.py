"""Takes optimizer steps with verl's own worker on the CPU; see tests/integrations/test_verl.py.

torchrun --standalone --nproc-per-node 2 -m tests.support.verl_worker MODEL BATCH CASES OUTPUT

BATCH is a safetensors file with padded tensors and CASES a JSON list of `Case`s. OUTPUT gets the
gradient of each case, and in its header the metrics, or the sentence by which it was refused.
"""

import json
import sys
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from hydra import compose, initialize_config_module
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding

from trustbatch.errors import ConfigError

FLOAT32 = "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One optimizer step."""

    loss_mode: str
    size: int = 1
    """sequences of a micro-batch"""
    without: str | None = None
    """a field that the batch lacks"""
    bypass: bool = False
    """whether the old log-probs are the rollout's, as in verl's bypass mode"""
    weighted: bool = False
    """whether verl gives weights of its own correction"""

    @property
    def name(self) -> str:
        return ":".join(str(value) for value in vars(self).values())


@cache
def composed(*overrides: str) -> Any:
    """verl's own configuration of a run with these settings."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def settings(model: str, loss_mode: str) -> tuple[str, ...]:
    actor = "actor_rollout_ref.actor"
    return (
        f"{actor}.policy_loss.loss_mode={loss_mode}",
        f"{actor}.strategy=fsdp2",
        f"+{actor}.fsdp_config.mixed_precision={FLOAT32}",
        f"{actor}.fsdp_config.use_torch_compile=false",
        f"{actor}.ppo_micro_batch_size_per_gpu=1",
        f"{actor}.optim.lr=0",  # so that all cases start from the same weights
        f"{actor}.optim.total_training_steps=100",
        f"{actor}.optim.clip_grad=1e9",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=false",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.name=vllm",
    )


def actor_config(*overrides: str) -> Any:
    """What verl's worker makes of the configuration of its actor."""
    return omega_conf_to_dataclass(composed(*overrides).actor_rollout_ref.actor)


def own_part(batch: dict[str, Tensor], case: Case) -> TensorDict:
    """This rank's sequences in the form in which verl's trainer sends them."""
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    part = {name: value.chunk(num_ranks)[rank].clone() for name, value in batch.items()}
    if case.bypass:
        part["old_log_probs"] = part["rollout_log_probs"].clone()
    if case.weighted:
        part["rollout_is_weights"] = torch.ones_like(part["advantages"])
    if case.without:
        del part[case.without]
    data = left_right_2_no_padding(TensorDict(part, batch_size=len(part["input_ids"])))
    num_sequences = len(batch["input_ids"])
    tu.assign_non_tensor(
        data,
        calculate_entropy=False,
        distillation_use_topk=False,
        global_batch_size=num_sequences,
        mini_batch_size=num_sequences,
        micro_batch_size_per_gpu=case.size,
        epochs=1,
        seed=0,
        dataloader_kwargs={"shuffle": False},
        temperature=1.0,
        compute_loss=True,
    )
    return data


def watch_gradient(engine: Any) -> list[Tensor]:
    """Return a list to which each optimizer step adds the flat gradient that it takes."""
    seen: list[Tensor] = []
    take_step = engine.optimizer_step

    def optimizer_step() -> float:
        gradients = [each.grad for each in engine.module.parameters()]
        whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        seen.append(torch.cat([each.flatten() for each in whole]))
        return take_step()

    engine.optimizer_step = optimizer_step
    return seen


def main(model: str, batch_file: str, cases: str, output: str) -> None:
    """Take one step for each case; rank 0 writes."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    batch = load_file(batch_file)
    steps = [Case(**case) for case in json.loads(cases)]
    config = composed(*settings(model, steps[0].loss_mode))
    worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
    worker.init_model()
    seen = watch_gradient(worker.actor.engine)
    gradients: dict[str, Tensor] = {}
    reports: dict[str, dict[str, float] | str] = {}
    for case in steps:
        actor = actor_config(*settings(model, case.loss_mode))
        worker.set_loss_fn(partial(ppo_loss, config=actor))
        try:
            reported = tu.get(worker.update_actor(own_part(batch, case)), "metrics")
        except ConfigError as error:
            reports[case.name] = str(error)
            continue
        gradients[case.name] = seen[-1]
        reports[case.name] = {
            name: float(value[0]) for name, value in reported.items() if "trustbatch" in name
        }
    if torch.distributed.get_rank() == 0:
        save_file(gradients, output, metadata={"reports": json.dumps(reports)})
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
