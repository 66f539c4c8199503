"""The environment's tokens are context: no loss, total, metric or gradient hears of them."""

import copy
import dataclasses
import math
from pathlib import Path

import pytest
import torch
from tests.support.episode_cases import episodes
from tests.support.training_cases import flat, make_trainer, watch_gradients

from trustbatch.batching import sequences as sequences_module
from trustbatch.batching.sequences import to_sequences
from trustbatch.models.policy import Policy
from trustbatch.objectives import OBJECTIVES, TokenBatch, build_objective
from trustbatch.types import TrainSequence

VARIANTS: list[dict[str, object]] = [
    *({"name": name} for name in OBJECTIVES),
    {"name": "p3o", "kl": "top_k", "entropy_coef": 0.1},
    {"name": "two_anchor", "kl": "top_k"},
]


@pytest.fixture(scope="module")
def sequences(tiny_folder: Path) -> list[TrainSequence]:
    """Episodes of one to six turns, three of each prompt, at a temperature that makes ratios."""
    policy = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    advantages = torch.tensor([math.sin(number) for number in range(9)]).view(3, 3)
    groups = episodes(policy, temperature=1.3, indices=range(3), num_samples=3)
    sequences = to_sequences(groups, advantages)
    num_turns = [len(sequence.completion.turns) for sequence in sequences]
    assert min(num_turns) <= 1
    assert max(num_turns) >= 5
    return sequences


def gradient_of(
    policy: Policy, sequences: list[TrainSequence], objective: dict[str, object], **settings: object
) -> tuple[torch.Tensor, dict[str, float]]:
    """What one optimizer step sees, and its metrics."""
    trainer = make_trainer(
        copy.deepcopy(policy), objective=objective, gradient_clip=1e9, **settings
    )
    found = watch_gradients(trainer)
    metrics = trainer.train(sequences)
    return flat(found), metrics


def reference(
    policy: Policy, sequences: list[TrainSequence], objective_options: dict[str, object]
) -> tuple[torch.Tensor, float]:
    """The same by hand: a forward pass a sequence, and the sampled positions picked one by one."""
    model = copy.deepcopy(policy).model
    objective = build_objective(**objective_options)  # type: ignore[arg-type]
    rows: dict[str, list[torch.Tensor]] = {name: [] for name in TokenBatch.__dataclass_fields__}
    for number, sequence in enumerate(sequences):
        completion, prompt = sequence.completion, list(sequence.prompt_token_ids)
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        logits = model(input_ids=ids).logits[0].log_softmax(-1)
        for place, token in enumerate(completion.token_ids.tolist()):
            if completion.sampled is not None and not completion.sampled[place]:
                continue
            logp = logits[len(prompt) + place - 1]
            assert completion.top_token_ids is not None
            assert completion.behavior_top_logp is not None
            rows["logp"].append(logp[token])
            rows["behavior_logp"].append(completion.behavior_logp[place])
            rows["advantage"].append(torch.tensor(sequence.advantage, dtype=torch.float32))
            rows["sequence"].append(torch.tensor(number))
            rows["entropy"].append(-(logp.exp() * logp).sum())
            rows["proximal_logp"].append(logp[token].detach())
            if objective.needs_top_logp:
                top = completion.top_token_ids[place]
                rows["top_logp"].append(logp[top])
                rows["proximal_top_logp"].append(logp[top].detach())
                rows["behavior_top_logp"].append(completion.behavior_top_logp[place])
    tokens = TokenBatch(**{name: torch.stack(values) for name, values in rows.items() if values})
    output = objective(tokens, objective.totals(tokens))
    output.loss.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    return gradient, float(output.loss.detach())


@pytest.mark.parametrize("objective", VARIANTS, ids=lambda o: "-".join(map(str, o.values())))
def test_losses_and_gradients_are_those_of_the_sampled_tokens(
    policy: Policy,
    sequences: list[TrainSequence],
    objective: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By hand, whole, in small parts, with shared prompts, and in padded rows."""
    policy.model.double()
    expected, loss = reference(policy, sequences, objective)
    num_sampled = sum(sequence.completion.num_sampled for sequence in sequences)
    assert num_sampled < sum(len(sequence.completion.token_ids) for sequence in sequences)
    monkeypatch.setattr(sequences_module, "MAX_REMAINING_FRACTION", 10.0)
    unpacked = copy.deepcopy(policy)
    unpacked.packs = False
    for each, settings in (
        (policy, {"share_prompts": False}),
        (policy, {"micro_batch_tokens": 40}),
        (policy, {"micro_batch_tokens": 1, "share_prompts": False}),
        (policy, {}),
        (unpacked, {"micro_batch_tokens": 100}),
    ):
        gradient, metrics = gradient_of(each, sequences, objective, **settings)
        torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=2e-8)
        assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-6, abs=1e-9)
        assert metrics["tokens/count"] == num_sampled


@pytest.mark.parametrize("objective", VARIANTS[-2:], ids=lambda o: str(o["name"]))
def test_what_is_recorded_of_the_environment_is_never_read(
    policy: Policy, sequences: list[TrainSequence], objective: dict[str, object]
) -> None:
    def spoilt(sequence: TrainSequence) -> TrainSequence:
        completion = sequence.completion
        if completion.sampled is None:
            return sequence
        assert completion.top_token_ids is not None
        assert completion.behavior_top_logp is not None
        environment = ~completion.sampled
        changed = dataclasses.replace(
            completion,
            behavior_logp=completion.behavior_logp.masked_fill(environment, torch.nan),
            top_token_ids=completion.top_token_ids.masked_fill(environment[:, None], 10**9),
            behavior_top_logp=completion.behavior_top_logp.masked_fill(
                environment[:, None], torch.inf
            ),
        )
        return dataclasses.replace(sequence, completion=changed)

    before, metrics = gradient_of(policy, sequences, objective)
    after, others = gradient_of(policy, [spoilt(each) for each in sequences], objective)
    assert torch.equal(before, after)
    assert metrics == others
    assert metrics["tokens/nonfinite"] == 0


def test_marks_that_say_nothing_change_nothing(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    """All sampled by the policy, said or not said: the same bits."""

    def marked(sequence: TrainSequence, sampled: torch.Tensor | None) -> TrainSequence:
        return dataclasses.replace(
            sequence, completion=dataclasses.replace(sequence.completion, sampled=sampled)
        )

    plain = [marked(each, None) for each in sequences]
    full = [
        marked(each, torch.ones(len(each.completion.token_ids), dtype=torch.bool))
        for each in sequences
    ]
    one, metrics = gradient_of(policy, plain, {"name": "p3o", "kl": "top_k"})
    other, others = gradient_of(policy, full, {"name": "p3o", "kl": "top_k"})
    assert torch.equal(one, other)
    assert metrics == others


def test_a_conversation_that_ends_with_the_environment_is_context_to_its_end(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    """No collector makes one, but a record may hold it."""
    longest = max(sequences, key=lambda sequence: len(sequence.completion.turns))
    assert longest.completion.sampled is not None
    last_reply = int((~longest.completion.sampled).nonzero()[-1]) + 1
    cut = {
        name: getattr(longest.completion, name)[:last_reply]
        for name in (
            "token_ids",
            "behavior_logp",
            "top_token_ids",
            "behavior_top_logp",
            "sampled",
        )
    }
    ended = dataclasses.replace(longest, completion=dataclasses.replace(longest.completion, **cut))
    num_before = int((longest.completion.sampled[:last_reply]).nonzero()[-1]) + 1
    shorter = {name: value[:num_before] for name, value in cut.items()}
    stopped = dataclasses.replace(
        longest, completion=dataclasses.replace(longest.completion, **shorter)
    )
    gradients = [gradient_of(policy, [each], {"name": "gspo"})[0] for each in (ended, stopped)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)
