"""The weight of each token, against the closed form of each objective."""

import math

import pytest
import torch

from trustbatch.objectives import TokenBatch, build_objective
from trustbatch.objectives.token_weights import token_pushes, token_weights

LOG_RATIO = torch.tensor([0.0, 0.5, -0.5, 0.5, -0.5, 0.1])
ADVANTAGE = torch.tensor([1.0, 1.0, 1.0, -2.0, -2.0, 0.0])


def batch() -> TokenBatch:
    behavior = torch.full((6,), -2.0)
    logp = behavior + LOG_RATIO
    return TokenBatch(
        logp=logp,
        behavior_logp=behavior,
        advantage=ADVANTAGE,
        sequence=torch.tensor([0, 0, 1, 1, 2, 2]),
        proximal_logp=logp.clone(),
    )


def weights(name: str, tokens: TokenBatch, **options: float | str) -> list[float]:
    objective = build_objective(name, **options)
    return token_weights(objective, tokens, objective.totals(tokens)).tolist()


def test_reinforce_weights_every_token_alike():
    assert weights("reinforce", batch())[:5] == pytest.approx([1.0] * 5)


def test_p3o_caps_the_ratio_by_the_ess_and_its_kl_is_no_part_of_the_weight():
    ratios = [math.exp(each) for each in LOG_RATIO.tolist()]
    ess = sum(ratios) ** 2 / (6 * sum(ratio**2 for ratio in ratios))
    expected = [min(ratio, ess) for ratio in ratios[:5]]
    assert weights("p3o", batch())[:5] == pytest.approx(expected, rel=1e-5)
    without_kl = weights("p3o", batch(), kl="none")[:5]
    assert without_kl == pytest.approx(expected, rel=1e-5)


def test_grpo_silences_what_its_clip_excludes():
    up, down = math.exp(0.5), math.exp(-0.5)
    # right and above the clip, wrong and below it: no gradient
    expected = [1.0, 0.0, down, up, 0.0]
    assert weights("grpo", batch())[:5] == pytest.approx(expected, rel=1e-5)


def test_gspo_divides_by_the_sequence():
    # sequence 1 has the mean log-ratio 0 of its two tokens, and the mean advantage -0.5
    objective = build_objective("gspo")
    tokens = batch()
    pushes = token_pushes(objective, tokens, objective.totals(tokens))
    assert pushes[2:4].tolist() == pytest.approx([-0.5 * 6 / (3 * 2)] * 2, rel=1e-5)


def test_without_an_advantage_or_a_measurable_log_prob_there_is_no_weight():
    tokens = batch()
    tokens.behavior_logp[1] = -math.inf
    found = weights("reinforce", tokens)
    assert math.isnan(found[5])
    assert math.isnan(found[1])
    assert found[0] == pytest.approx(1.0)


def test_the_batch_keeps_its_graph():
    tokens = batch()
    logp = tokens.logp.clone().requires_grad_()
    tokens = TokenBatch(
        logp=logp,
        behavior_logp=tokens.behavior_logp,
        advantage=tokens.advantage,
        sequence=tokens.sequence,
    )
    objective = build_objective("grpo")
    totals = objective.totals(tokens)
    with torch.no_grad():
        token_weights(objective, tokens, totals)
    objective(tokens, totals).loss.backward()
    assert logp.grad is not None
