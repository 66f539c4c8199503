"""What a configuration is cautioned against, and that it is so."""

from typing import Any

import pytest
import torch

from trustbatch.config import parse_config
from trustbatch.config.cautions import cautions
from trustbatch.objectives import TokenBatch, build_objective


def of(*, name: str = "grpo", policy: Any = 1.0, **rollout: Any) -> str:
    tree = {
        "model": {"name": "some-model"},
        "task": {"name": "arithmetic"},
        "objective": {"name": name},
        "training": {"policy_temperature": policy},
        "rollout": rollout,
    }
    return " ".join(cautions(parse_config(tree)))


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_a_clip_is_named_where_temperatures_differ(name: str) -> None:
    assert of(name=name) == of(name=name, temperature=0.6, policy="rollout") == ""
    hot, cold = of(name=name, temperature=1.2), of(name=name, temperature=0.6)
    assert f"= 1.2 and a policy temperature of 1 move the ratio r that {name} clips" in hot
    assert "wrong and unlikely" in hot
    assert "right and likely" in hot
    assert "entropy rises" in hot
    assert "wrong and likely" in cold
    assert "right and unlikely" in cold
    assert "entropy falls" in cold
    # the policy's temperature is what counts, not 1
    assert "entropy falls" in of(name=name, policy=1.2)


def test_a_mask_by_the_ratio_is_named_and_a_bound_on_probabilities_is_not() -> None:
    masked = of(name="m2po", temperature=1.2)
    assert "wrong and unlikely (A < 0, r < 1)" in masked
    assert "clip_low" not in masked
    assert of(name="dppo", temperature=1.2) == ""


def test_a_clip_of_sequences_has_words_of_its_own() -> None:
    assert of(name="gspo") == of(name="gspo", temperature=0.6, policy="rollout") == ""
    for temperature in (0.6, 1.2):
        told = of(name="gspo", temperature=temperature)
        assert "most of what is wrong (A < 0, r < 1 - clip_low) is silenced" in told
        assert "entropy" not in told
    raw = of(name="gspo", temperature=1.2, policy="rollout", logprob_mode="raw")
    assert "most of what is wrong, or most of what is right, is silenced" in raw


@pytest.mark.parametrize("name", ["reinforce", "cispo", "decoupled", "p3o", "two_anchor"])
def test_what_does_not_clip_that_ratio_is_not_named(name: str) -> None:
    assert of(name=name, temperature=1.2) == ""


def test_the_ratio_is_to_what_was_recorded() -> None:
    # raw log-probs are those at T = 1: no ratio moves, which the doctor has words for
    assert of(temperature=1.2, logprob_mode="raw") == ""
    raw = of(temperature=1.2, policy="rollout", logprob_mode="raw")
    assert "entropy falls" in raw
    assert 'set rollout.logprob_mode to "processed", and' in raw


@pytest.mark.parametrize(("temperature", "rises"), [(1.2, True), (0.8, False)])
def test_a_clip_moves_the_entropy_of_rewards_that_say_nothing(
    temperature: float, rises: bool
) -> None:
    """Each token is as often right as wrong, so without a clip no gradient is left on average."""
    logits = torch.linspace(3.0, -3.0, 16, dtype=torch.float64)
    sampled_from = (logits / temperature).softmax(0)

    def entropy_slope(name: str, **options: float) -> float:
        leaf = logits.clone().requires_grad_()
        logp = leaf.log_softmax(0)
        objective = build_objective(name, **options)
        loss = torch.zeros((), dtype=torch.float64)
        for advantage in (1.0, -1.0):
            for token in range(len(logits)):  # one at a time: each weighs as often as it is sampled
                batch = TokenBatch(
                    logp=logp[token : token + 1],
                    behavior_logp=sampled_from.log()[token : token + 1],
                    advantage=torch.tensor([advantage], dtype=torch.float64),
                    sequence=torch.tensor([0]),
                )
                output = objective(batch, objective.totals(batch))
                loss = loss + sampled_from[token] * output.loss
        (gradient,) = torch.autograd.grad(loss, leaf)
        (slope,) = torch.autograd.grad(-(leaf.log_softmax(0) * leaf.softmax(0)).sum(), leaf)
        return float(-(gradient * slope).sum())  # of a small step against the gradient

    clipped = entropy_slope("grpo", clip_low=0.1, clip_high=0.1)
    assert clipped > 1e-3 if rises else clipped < -1e-3
    assert entropy_slope("cispo") == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("temperature", [1.2, 0.8])
def test_a_clip_of_sequences_silences_the_wrong_ones(temperature: float) -> None:
    """Sampled at random, 64 sequences of 400 tokens, right and wrong by lot."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.linspace(3.0, -3.0, 16, dtype=torch.float64)
    sampled_from = (logits / temperature).softmax(0)
    tokens = sampled_from.multinomial(64 * 400, replacement=True, generator=generator)
    logp = logits.log_softmax(0)[tokens].requires_grad_()
    wrong = (torch.arange(64) % 2 == 0).repeat_interleave(400)
    batch = TokenBatch(
        logp=logp,
        behavior_logp=sampled_from.log()[tokens],
        advantage=torch.where(wrong, -1.0, 1.0).double(),
        sequence=torch.arange(64).repeat_interleave(400),
    )
    objective = build_objective("gspo")
    objective(batch, objective.totals(batch)).loss.backward()
    assert logp.grad is not None
    silenced = (logp.grad == 0).double()
    assert silenced[wrong].mean() > 0.9
    assert silenced[~wrong].mean() < 0.1


@pytest.mark.parametrize("name", ["p3o", "grpo", "decoupled"])
def test_a_tail_that_is_never_sampled_is_named_where_nothing_pulls_it_back(name: str) -> None:
    assert of(name=name) == ""
    told = of(name=name, top_p=0.9)
    assert "rollout.top_p = 0.9 never samples the tail" in told
    assert 'objective.name = "pact"' in told
    assert "rollout.top_p = 0.9 and rollout.top_k = 40 never" in of(name=name, top_p=0.9, top_k=40)
    assert of(name="pact", top_p=0.9, top_k=40) == ""
