"""TRL's trainers on the tiny model, and the gradient of our own trainer on what they trained on."""

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tests.support.train_sequences import PROVENANCE
from tests.support.training_cases import flat, policy_logp
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from trustbatch.integrations.trl import P3OTrainer
from trustbatch.models.policy import Policy
from trustbatch.objectives import Objective
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.config import TrainingConfig
from trustbatch.training.observation import Observation, TokenObserver
from trustbatch.training.trainer import Trainer
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParams,
    TrainSequence,
)

PROMPTS = ["1+1=", "12+34=", "7=", "98-9="]


def distinct(completions: list[str], **_: Any) -> list[float]:
    """Reward completions with many different characters: the rewards of a group differ."""
    return [float(len(set(text))) for text in completions]


def make_config(folder: Path, **settings: Any) -> GRPOConfig:
    """16 completions per optimizer step, two steps; gradients are not clipped."""
    return GRPOConfig(
        output_dir=str(folder),
        **{
            "use_cpu": True,
            "bf16": False,
            "per_device_train_batch_size": 16,
            "num_generations": 4,
            "max_completion_length": 7,
            "max_steps": 2,
            "max_grad_norm": 0.0,
            "learning_rate": 5e-3,
            "logging_steps": 1,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
        }
        | settings,
    )


def make_trainer(
    model: Path, folder: Path, *, kind: type = P3OTrainer, settings: Any = None, **arguments: Any
) -> Any:
    """A trainer of TRL on the model of a folder."""
    return kind(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=distinct,
        args=make_config(folder, **(settings or {})),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 8}),
        processing_class=AutoTokenizer.from_pretrained(model),
        **arguments,
    )


class Sampler:
    """A rollout function of TRL: another policy samples, warmer, and records its log-probs."""

    def __init__(self, model: Path, *, with_replies: bool = False) -> None:
        self._policy = Policy.load(str(model), device="cpu", precision="float32")
        self._engine = NativeEngine(self._policy, seed=1)
        self._with_replies = with_replies

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Complete each prompt once; equal prompts are samples of one group."""
        sampling = SamplingParams(
            max_tokens=7, stop_token_ids=self._policy.stop_token_ids, temperature=1.4
        )
        tokens = {text: tuple(self._policy.tokenizer.encode(text)) for text in prompts}
        requests = [
            GenerationRequest(
                prompt_id=f"{text} {trainer.state.global_step}",
                token_ids=tokens[text],
                num_samples=number,
                sampling=sampling,
            )
            for text, number in Counter(prompts).items()
        ]
        made: dict[str, list[Completion]] = {}
        for completion in self._engine.generate(requests):
            made.setdefault(completion.prompt_id.split()[0], []).append(completion)
        chosen = [made[text].pop() for text in prompts]
        output = {
            "prompt_ids": [list(tokens[text]) for text in prompts],
            "completion_ids": [each.token_ids.tolist() for each in chosen],
            "logprobs": [each.behavior_logp.tolist() for each in chosen],
        }
        if self._with_replies:  # every third token is an environment's
            output["env_mask"] = [
                [int(n % 3 != 1) for n in range(len(c))] for c in output["completion_ids"]
            ]
        return output


@dataclass
class Step:
    """An optimizer step as it was taken: weights before it, its micro-batches, its gradient."""

    weights: dict[str, Tensor]
    inputs: list[dict[str, Any]]
    gradient: Tensor
    learning_rate: float


@dataclass
class Steps(TrainerCallback):
    """Notes each optimizer step of a trainer."""

    trainer: Any
    taken: list[Step] = field(default_factory=list)

    def on_pre_optimizer_step(self, *_: Any, **options: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(options["model"])
        gradients = {name: each.grad for name, each in model.named_parameters()}
        self.taken.append(
            Step(
                weights={name: each.clone() for name, each in model.state_dict().items()},
                inputs=list(vars(self.trainer).get("_step_inputs", [])),
                gradient=flat({n: g.clone() for n, g in gradients.items() if g is not None}),
                learning_rate=options["optimizer"].param_groups[0]["lr"],
            )
        )


def train(trainer: Any) -> list[Step]:
    """Train, and return the steps."""
    steps = Steps(trainer)
    trainer.add_callback(steps)
    trainer.train()
    return steps.taken


def sequences_of(
    inputs: list[dict[str, Any]], policy: Policy, *, temperature: float
) -> list[TrainSequence]:
    """What TRL trained on in our own words; without old log-probs the policy's own are taken."""
    sequences: list[TrainSequence] = []
    for batch in inputs:
        behavior = batch.get("sampling_per_token_logps", batch.get("old_per_token_logps"))
        for row in range(len(batch["advantages"])):
            kept = batch["completion_mask"][row].bool()
            if not kept.any():
                continue
            sequence = TrainSequence(
                prompt_token_ids=tuple(
                    batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()
                ),
                completion=Completion(
                    prompt_id="p",
                    sample=len(sequences),
                    token_ids=batch["completion_ids"][row][kept],
                    behavior_logp=torch.zeros(int(kept.sum())),
                    top_token_ids=None,
                    behavior_top_logp=None,
                    finish_reason=FinishReason.STOP,
                    provenance=PROVENANCE,
                    text="",
                    sampled=batch["tool_mask"][row][kept].bool() if "tool_mask" in batch else None,
                ),
                advantage=batch["advantages"][row].item(),
            )
            if behavior is None:
                logp = policy_logp(policy, [sequence], temperature=temperature)
            else:
                logp = behavior[row][kept]
            completion = replace(sequence.completion, behavior_logp=logp)
            sequences.append(replace(sequence, completion=completion))
    return sequences


def own_gradient(
    step: Step,
    objective: Objective,
    model: Path,
    *,
    temperature: float = 1.0,
    sequences: list[TrainSequence] | None = None,
) -> Tensor:
    """The gradient of our own trainer in one micro-batch, from the same weights and tokens."""
    policy = Policy.load(str(model), device="cpu", precision="float32")
    policy.model.load_state_dict(step.weights)
    reference = None
    if objective.reference_kl_coef:
        reference = Policy.load(str(model), device="cpu", precision="float32").freeze()
    trainer = Trainer(
        policy,
        objective,
        TrainingConfig(steps=1, micro_batch_tokens=10_000),
        policy_temperature=temperature,
        seed=0,
        reference=reference,
    )
    sequences = sequences or sequences_of(step.inputs, policy, temperature=temperature)
    observer = TokenObserver(
        Observation(), objective, sequences, policy="p", version=None, temperature=temperature
    )
    trainer.first_gradient(sequences, num_steps=1, observer=observer)
    gradients = {name: each.grad for name, each in policy.model.named_parameters()}
    return flat({name: each for name, each in gradients.items() if each is not None})


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the second."""
    return float((one - other).norm() / other.norm())
