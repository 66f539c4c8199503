"""Trains a tiny model with adapters, recomputed and compiled layers, 8-bit moments; see test_ranks.

torchrun --standalone --nproc-per-node 2 -m tests.support.ranks.layers_worker MODEL OUTPUT
"""

import copy
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from tests.support.ranks.train_worker import make_batches

from trustbatch.models.config import LoraConfig
from trustbatch.models.policy import Policy
from trustbatch.objectives import build_objective
from trustbatch.training.config import TrainingConfig
from trustbatch.training.layers import compile_layers
from trustbatch.training.sharding import shard
from trustbatch.training.trainer import Trainer
from trustbatch.types import TrainSequence
from trustbatch.utils.distributed import joined_ranks, num_ranks, this_rank

VARIANTS: dict[str, dict[str, object]] = {
    "recomputed": {"gradient_checkpointing": True},
    "compiled": {"gradient_checkpointing": True, "compile": True},
}
if find_spec("peft"):
    VARIANTS |= {"lora": {}, "lora recomputed": {"gradient_checkpointing": True}}
if find_spec("torchao"):
    VARIANTS |= {"8-bit": {"optimizer": "adamw_8bit"}}


def main(model: str, output: str, names: tuple[str, ...] = tuple(VARIANTS)) -> None:
    """Train some variants; rank 0 writes metrics and weights."""
    torch.set_num_threads(1)
    with joined_ranks("cpu"):
        initial = Policy.load(model, device="cpu", precision="float32")
        batches = make_batches(initial)
        metrics: dict[str, list[dict[str, float]]] = {}
        weights: dict[str, torch.Tensor] = {}
        for name in names:
            settings = VARIANTS[name]
            policy = copy.deepcopy(initial)
            # torchao compiles its step, which would take longer than all the rest
            stance = "force_eager" if name == "8-bit" else "default"
            with torch.compiler.set_stance(stance):
                metrics[name] = train(policy, name, dict(settings), batches)
            weights[name] = torch.cat([weight.flatten() for _, weight in policy.named_weights()])
        if this_rank() == 0:
            Path(f"{output}.json").write_text(json.dumps(metrics), encoding="utf-8")
            save_file(weights, f"{output}.safetensors")


def train(
    policy: Policy, name: str, settings: dict[str, object], batches: list[list[TrainSequence]]
) -> list[dict[str, float]]:
    """Divide the policy over the ranks, if there are several, and train it."""
    objective: dict[str, object] = {"name": "grpo"}
    reference = None
    if name.startswith("lora"):
        policy.add_adapters(LoraConfig(rank=4), seed=0)
        objective["reference_kl_coef"] = 0.1
        reference = policy.without_adapters()
    if "optimizer" not in settings:  # 8-bit moments are for float32 parameters
        policy.model.double()  # the order of sums does not matter to the digits compared
    if num_ranks() > 1:
        shard(policy, device=torch.device("cpu"))
    if settings.pop("compile", False):
        compile_layers(policy.model, backend="aot_eager")
    config = TrainingConfig.model_validate(
        {"steps": 10, "learning_rate": 1e-3, "warmup_fraction": 0.0, "micro_batch_tokens": 25}
        | settings
    )
    trainer = Trainer(
        policy,
        build_objective(**objective),  # type: ignore[arg-type]
        config,
        policy_temperature=1.0,
        seed=0,
        reference=reference,
    )
    return [trainer.train(batch) for batch in batches]


if __name__ == "__main__":
    main(*sys.argv[1:])
