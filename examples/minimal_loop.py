"""The whole algorithm in one file: read it to understand it, or copy it to start your own.

    python examples/minimal_loop.py

The functions below are the stages of a training step, in the order of the data:

    prompts -> completions with log-probs -> rewards -> advantages
            -> TokenBatch -> loss with ESS -> update -> publish

Only pure parts of the package are used: types, task, advantages, batching, objective, tiny model.
Generation and the forward pass are written out in plain PyTorch; the framework has faster ones
(`rollout/native`, `rollout/vllm`, `training/logprobs.py`) with the same meaning.
"""

import argparse
import copy
import math
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import logging as transformers_logging

from trustbatch.advantages import group_standardized
from trustbatch.batching.sequences import to_sequences
from trustbatch.models.tiny import warm_start
from trustbatch.objectives import Objective, TokenBatch, build_objective
from trustbatch.objectives.metrics import average_over_steps
from trustbatch.tasks.arithmetic import Arithmetic
from trustbatch.types import (
    Completion,
    FinishReason,
    Grade,
    Prompt,
    Provenance,
    RolloutGroup,
    TrainSequence,
)

PROMPTS_PER_STEP = 32
SAMPLES_PER_PROMPT = 8
MAX_TOKENS = 4  # three digits and the end of the text
SAMPLING_TEMPERATURE = 1.2  # the policy is trained at 1.0, so the data are off-policy on purpose
STEPS_PER_PUBLISH = 2  # every second batch is sampled from a version that is one step old
LEARNING_RATE = 5e-4
IGNORED = -100


# ------------------------------------------------------------------------ 1. prompts -> completions


@torch.no_grad()
def generate(
    sampler: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    version: int,
    generator: torch.Generator,
) -> list[RolloutGroup]:
    """Sample a group of completions per prompt, and record the log-prob of every token.

    `behavior_logp` is that of the distribution which the token was really sampled from, after the
    temperature: the policy ratio is measured against it. `anchor_logp` is the model's own, before
    the temperature: the KL pulls to it. A pull to the tempered distribution would flatten the
    policy a little with every batch, until it collapses.
    """
    prompt_ids = [tuple(tokenizer.encode(prompt.text)) for prompt in prompts]
    assert len({len(ids) for ids in prompt_ids}) == 1, "this file pads no prompts"
    tokens = torch.tensor(prompt_ids).repeat_interleave(SAMPLES_PER_PROMPT, dim=0)  # [B, prompt]
    logps: list[Tensor] = []  # of the sampler, and of the model
    for _ in range(MAX_TOKENS):  # no cache of keys and values: the texts are ten tokens long
        logits = sampler(input_ids=tokens).logits[:, -1]  # [B, V]
        distribution = (logits / SAMPLING_TEMPERATURE).log_softmax(dim=-1)
        token = torch.multinomial(distribution.exp(), 1, generator=generator)  # [B, 1]
        both = torch.stack([distribution, logits.log_softmax(dim=-1)], dim=1)  # [B, 2, V]
        logps.append(both.gather(2, token[:, None].expand(-1, 2, -1)))
        tokens = torch.cat([tokens, token], dim=1)
    responses = tokens[:, len(prompt_ids[0]) :]  # [B, MAX_TOKENS]
    provenance = Provenance(
        policy="tiny",
        version=version,
        engine="minimal",
        precision="float32",
        temperature=SAMPLING_TEMPERATURE,
        top_p=1.0,
        top_k=0,
        logprob_mode="processed",
    )
    completions = [
        to_completion(
            tokenizer, prompts[row // SAMPLES_PER_PROMPT], row, response, logp, provenance
        )
        for row, (response, logp) in enumerate(zip(responses, torch.cat(logps, dim=2), strict=True))
    ]
    return [
        RolloutGroup(
            prompt=prompt,
            prompt_token_ids=ids,
            completions=tuple(completions[n * SAMPLES_PER_PROMPT : (n + 1) * SAMPLES_PER_PROMPT]),
        )
        for n, (prompt, ids) in enumerate(zip(prompts, prompt_ids, strict=True))
    ]


def to_completion(
    tokenizer: Tokenizer, prompt: Prompt, row: int, response: Tensor, logp: Tensor, who: Provenance
) -> Completion:
    """Cut a sampled row after its first stop token, which stays a part of the completion."""
    ids = response.tolist()
    has_stopped = tokenizer.eos_token_id in ids
    length = ids.index(tokenizer.eos_token_id) + 1 if has_stopped else len(ids)
    return Completion(
        prompt_id=prompt.id,
        sample=row % SAMPLES_PER_PROMPT,
        token_ids=response[:length],
        behavior_logp=logp[0, :length],
        anchor_logp=logp[1, :length],
        top_token_ids=None,
        behavior_top_logp=None,
        finish_reason=FinishReason.STOP if has_stopped else FinishReason.LENGTH,
        provenance=who,
        text=str(tokenizer.decode(response[:length], skip_special_tokens=True)),
    )


# ---------------------------------------------------------------- 2. completions -> rewards, graded


def grade(task: Arithmetic, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
    """Give every completion a grade; the framework does so in processes that can be killed."""
    return [
        replace(
            group,
            grades=tuple(
                Grade(reward=task.grade(group.prompt, completion.text))
                for completion in group.completions
            ),
        )
        for group in groups
    ]


# ------------------------------------------------ 3. sequences -> TokenBatch, the objective's input


def policy_logp(policy: PreTrainedModel, sequences: Sequence[TrainSequence]) -> Tensor:
    """Return the policy's log-probs [T] of all response tokens, with gradient."""
    longest = max(sequence.num_tokens for sequence in sequences)
    inputs = torch.zeros(len(sequences), longest, dtype=torch.long)
    targets = torch.full((len(sequences), longest), IGNORED)
    for row, sequence in enumerate(sequences):
        num_prompt = len(sequence.prompt_token_ids)
        inputs[row, :num_prompt] = torch.tensor(sequence.prompt_token_ids)
        inputs[row, num_prompt : sequence.num_tokens] = sequence.completion.token_ids
        targets[row, num_prompt : sequence.num_tokens] = sequence.completion.token_ids
    # logits predict the next token; padding comes after the text, where attention does not look
    logits = policy(input_ids=inputs).logits[:, :-1]
    targets = targets[:, 1:]
    is_response = targets != IGNORED
    return logits[is_response].log_softmax(dim=-1).gather(1, targets[is_response][:, None])[:, 0]


def to_token_batch(policy: PreTrainedModel, sequences: Sequence[TrainSequence]) -> TokenBatch:
    """Pack the response tokens of all sequences; prompts and padding are no part of it."""
    lengths = torch.tensor([len(sequence.completion.token_ids) for sequence in sequences])
    advantages = torch.tensor([sequence.advantage for sequence in sequences])
    return TokenBatch(
        logp=policy_logp(policy, sequences),  # [T] carries the gradient
        behavior_logp=torch.cat([s.completion.behavior_logp for s in sequences]),
        anchor_logp=torch.cat([s.completion.anchor_logp for s in sequences]),
        advantage=advantages.repeat_interleave(lengths),  # every token has its sequence's
        sequence=torch.arange(len(sequences)).repeat_interleave(lengths),
    )


# ------------------------------------------------------------------ 4. TokenBatch -> loss -> update


def update(
    policy: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    objective: Objective,
    sequences: Sequence[TrainSequence],
) -> dict[str, float]:
    """Take one optimizer step on the whole batch and return the objective's metrics.

    A batch too large for one forward pass is split into micro-batches, whose totals are added
    before the first backward pass: the effective sample size (ESS) is that of the whole step.
    """
    batch = to_token_batch(policy, sequences)
    totals = objective.totals(batch)  # number of tokens, sum of ratios, sum of squared ratios
    output = objective(batch, totals)
    optimizer.zero_grad()
    output.loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm=1.0)
    if math.isfinite(norm):  # a gradient that is not finite never reaches the optimizer
        optimizer.step()
    return average_over_steps([output.metrics])


# -------------------------------------------------------------------------------------- 5. the loop


def train(folder: Path, *, num_steps: int, seed: int = 0) -> list[dict[str, float]]:
    """Train the model in `folder` on two-digit sums; returns the metrics of each step."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    policy = AutoModelForCausalLM.from_pretrained(folder)  # is trained
    sampler = copy.deepcopy(policy)  # generates; publishing gives it the policy's weights
    task = Arithmetic(seed=seed, level=2)
    objective = build_objective("p3o", kl="importance")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    version, history = 0, []
    for step in range(num_steps):
        first = step * PROMPTS_PER_STEP
        prompts = [task.prompt(first + n) for n in range(PROMPTS_PER_STEP)]
        groups = grade(task, generate(sampler, tokenizer, prompts, version, generator))
        rewards = torch.tensor([[g.reward for g in group.grades] for group in groups])  # [P, S]
        advantages = group_standardized(rewards)  # [P, S]: better or worse than the group's mean
        sequences = to_sequences(groups, advantages)
        metrics = update(policy, optimizer, objective, sequences)
        metrics |= {"reward/mean": float(rewards.mean()), "rollout/version": float(version)}
        if (step + 1) % STEPS_PER_PUBLISH == 0:  # publish
            sampler.load_state_dict(policy.state_dict())
            version = step + 1
        history.append(metrics)
        print(
            f"step {step + 1:3d}  reward {metrics['reward/mean']:.3f}  ess {metrics['ess']:.3f}  "
            f"largest ratio {metrics['ratio/max']:.2f}  loss {metrics['policy/loss']:+.4f}"
        )
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a tiny model with P3O, in one file.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        print("Making a base model of 0.3M parameters that half knows how to add ...")
        base = warm_start(
            Path(scratch) / "base", seed=arguments.seed, clean_steps=190, noisy_steps=30
        )
        train(base, num_steps=arguments.steps, seed=arguments.seed)
