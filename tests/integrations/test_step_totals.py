"""From padded tensors to objectives: the shared part of all integrations."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from trustbatch.errors import ConfigError
from trustbatch.integrations.step_totals import as_objective, padded_tokens, step_totals
from trustbatch.objectives import GRPO, P3O, build_objective

MASK = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 0, 1]])


def padded(fill: float = 7.0) -> dict[str, Tensor]:
    """Three sequences of 2, 0 and 2 tokens; what the mask leaves out is `fill`."""
    logp = torch.tensor([[-1.0, -2.0, fill], [fill, fill, fill], [-3.0, fill, -4.0]])
    behavior = torch.tensor([[-1.5, -2.0, fill], [fill, fill, fill], [-2.5, fill, -4.5]])
    return {"logp": logp, "behavior_logp": behavior, "mask": MASK}


def test_tokens_are_those_of_the_mask_in_the_order_of_rows() -> None:
    entropy = torch.arange(9.0).view(3, 3)
    tokens = padded_tokens(
        **padded(), advantage=torch.tensor([0.5, 9.0, -1.0]), entropy=entropy, reference_logp=None
    )
    assert tokens.logp.tolist() == [-1.0, -2.0, -3.0, -4.0]
    assert tokens.behavior_logp.tolist() == [-1.5, -2.0, -2.5, -4.5]
    assert tokens.advantage.tolist() == [0.5, 0.5, -1.0, -1.0]
    assert tokens.sequence.tolist() == [0, 0, 2, 2]
    assert tokens.entropy is not None
    assert tokens.entropy.tolist() == [0.0, 1.0, 6.0, 8.0]
    assert tokens.reference_logp is None


def test_a_token_may_have_an_advantage_of_its_own() -> None:
    tokens = padded_tokens(**padded(), advantage=torch.arange(9.0).view(3, 3))
    assert tokens.advantage.tolist() == [0.0, 1.0, 6.0, 8.0]


@pytest.mark.parametrize("fill", [float("nan"), float("-inf")])
def test_padding_reaches_neither_loss_nor_gradient(fill: float) -> None:
    results = []
    for value in (7.0, fill):
        tensors = padded(value)
        logp = tensors.pop("logp").requires_grad_()
        tokens = padded_tokens(logp=logp, **tensors, advantage=torch.tensor([0.5, 9.0, -1.0]))
        objective = P3O()
        loss = objective(tokens, step_totals(objective, [tokens])).loss
        loss.backward()
        results.append((loss.item(), logp.grad))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_the_totals_are_of_the_whole_step() -> None:
    """r = e^0.5, 1, e^-0.5, e^0.5: the ESS of four tokens, from two micro-batches."""
    advantage = torch.tensor([0.5, 9.0, -1.0])
    tensors = padded()
    rows = [
        padded_tokens(**{key: value[part] for key, value in tensors.items()}, advantage=each)
        for part, each in ((slice(0, 2), advantage[:2]), (slice(2, 3), advantage[2:]))
    ]
    totals = step_totals(P3O(), rows)
    assert totals.num_tokens == 4
    assert totals.num_sequences == 2
    ratios = torch.tensor([0.5, 0.0, -0.5, 0.5], dtype=torch.float64).exp()
    moments = totals.moments["behavior"]
    assert moments.ratio_sum == pytest.approx(ratios.sum().item())
    assert totals.moments["behavior"].ratio_square_sum == pytest.approx(
        ratios.square().sum().item()
    )


def test_a_step_without_a_micro_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        step_totals(P3O(), [])


def test_an_objective_is_named_in_three_ways() -> None:
    assert as_objective("p3o") == build_objective("p3o")
    assert as_objective({"name": "grpo", "clip_high": 0.28}) == GRPO(clip_high=0.28)
    own = P3O(kl="k3")
    assert as_objective(own) is own


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("p30", "did you mean 'p3o'"),
        ({"clip_high": 0.28}, "needs its name"),
        ({"name": "grpo", "clip_hihg": 0.28}, "did you mean 'clip_high'"),
        ({"name": "grpo", "clip_high": "x"}, "must be a number"),
        ({"name": "grpo", "clip_high": -1.0}, "must be a number"),
    ],
)
def test_a_choice_that_is_none_is_refused(choice: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        as_objective(choice)  # type: ignore[arg-type]


def test_it_needs_torch_alone() -> None:
    code = """
import sys
for name in ("transformers", "pydantic", "trl", "rich", "tomli_w", "tensorboard"):
    sys.modules[name] = None  # an import of it fails
import trustbatch.integrations.step_totals
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
