"""Trains a tiny model with every objective and writes what came out; run by torchrun, or alone.

    torchrun --standalone --nproc-per-node 2 -m tests.support.ranks.train_worker MODEL OUTPUT

Parameters are float64, so that the order of sums does not matter to the digits compared.
"""

import copy
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from trustbatch.models.policy import Policy
from trustbatch.objectives import OBJECTIVES, build_objective
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training.config import TrainingConfig
from trustbatch.training.observation import Observation
from trustbatch.training.sharding import shard
from trustbatch.training.trainer import Trainer
from trustbatch.types import Completion, GenerationRequest, SamplingParams, TrainSequence
from trustbatch.utils.distributed import joined_ranks, num_ranks, this_rank

VARIANTS: dict[str, dict[str, object]] = {name: {} for name in OBJECTIVES} | {
    "p3o top_k": {"kl": "top_k"},
    "grpo reference": {"reference_kl_coef": 0.1, "entropy_coef": 0.01},
}
SETTINGS = [
    {"micro_batch_tokens": 10_000},
    {"micro_batch_tokens": 25, "mini_batches": 2, "passes": 2},
]


def main(model: str, output: str) -> None:
    """Train all variants; rank 0 writes metrics and parameters."""
    torch.set_num_threads(1)
    with joined_ranks("cpu"):
        initial = Policy.load(model, device="cpu", precision="float32")
        batches = make_batches(initial)
        initial.model.double()
        metrics: dict[str, list[dict[str, float]]] = {}
        tokens: dict[str, torch.Tensor] = {}
        parameters: dict[str, torch.Tensor] = {}
        for name, options in VARIANTS.items():
            for number, settings in enumerate(SETTINGS):
                key = f"{name} {number}"
                policy = copy.deepcopy(initial)
                trainer = make_trainer(policy, name.split()[0], options, settings)
                metrics[key] = []
                for batch in batches:
                    wanted = observation_of(batch)
                    metrics[key].append(trainer.train(batch, version=2, observation=wanted))
                    tokens |= {
                        f"{key} {len(metrics[key])} {completion} {column}": values
                        for completion, columns in wanted.tokens.items()
                        for column, values in columns.items()
                    }
                parameters[key] = torch.cat(
                    [weight.flatten() for _, weight in policy.named_weights()]
                )
        if this_rank() == 0:
            Path(f"{output}.json").write_text(json.dumps(metrics), encoding="utf-8")
            save_file(parameters, f"{output}.safetensors")
            save_file(tokens, f"{output}-tokens.safetensors")


def make_trainer(
    policy: Policy, name: str, options: dict[str, object], settings: dict[str, object]
) -> Trainer:
    """Divide policy and reference over the ranks, if there are several."""
    reference = copy.deepcopy(policy).freeze() if options.get("reference_kl_coef") else None
    if reference is not None:
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(1.05)
    if num_ranks() > 1:
        for each in (policy, reference):
            if each is not None:
                shard(each, device=torch.device("cpu"))
    config = TrainingConfig.model_validate(
        {"steps": 10, "learning_rate": 1e-3, "warmup_fraction": 0.0} | settings
    )
    objective = build_objective(name, **options)  # type: ignore[arg-type]
    return Trainer(policy, objective, config, policy_temperature=1.0, seed=0, reference=reference)


def observation_of(batch: list[TrainSequence]) -> Observation:
    """Want the ledger, and the tokens of every other completion."""
    recorded = frozenset(sequence.completion.key for sequence in batch[::2])
    return Observation(ledger=True, recorded=recorded)


def make_batches(policy: Policy) -> list[list[TrainSequence]]:
    """Return uneven batches: many sequences, one alone (some ranks have none), and a few.

    In the last one a token can't be measured, which the rank without it must hear of.
    """
    sampling = SamplingParams(
        max_tokens=9, stop_token_ids=policy.stop_token_ids, temperature=1.3, top_logprobs=6
    )
    requests = [
        GenerationRequest(
            prompt_id=text,
            token_ids=tuple(policy.tokenizer.encode(text)),
            num_samples=5,
            sampling=sampling,
        )
        for text in ("1+1=", "12+34=", "7=")
    ]
    completions = NativeEngine(policy, seed=0).generate(requests)
    sequences = [
        TrainSequence(
            prompt_token_ids=requests[number // 5].token_ids,
            completion=sampled_at(completion, version=number % 3),
            advantage=math.sin(number),
        )
        for number, completion in enumerate(completions)
    ]
    return [sequences, sequences[3:4], sequences[4:9], [*sequences[4:8], broken(sequences[8])]]


def broken(sequence: TrainSequence) -> TrainSequence:
    """Return a sequence whose first token has no log-prob."""
    logp = sequence.completion.behavior_logp.clone()
    logp[0] = math.nan
    return replace(sequence, completion=replace(sequence.completion, behavior_logp=logp))


def sampled_at(completion: Completion, *, version: int) -> Completion:
    """Say of a completion that another version sampled it."""
    return replace(completion, provenance=replace(completion.provenance, version=version))


if __name__ == "__main__":
    main(*sys.argv[1:])
