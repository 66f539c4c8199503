"""The functions of docs/integrations/others.md: parts of a step add up to the step."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trustbatch.integrations.step_totals import as_objective, padded_tokens

PAGE = Path(__file__).parents[2] / "docs" / "integrations" / "others.md"
LENGTHS = torch.tensor([5, 2, 4, 1])
ROWS = (slice(0, 1), slice(1, 4))  # two micro-batches
EXACT_EVERYWHERE = ("grpo", "cispo", "dppo")
WIDE_GSPO = {"name": "gspo", "clip_low": 1.0, "clip_high": 5.0}


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the page's blocks define, as a reader would type them in one session."""
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(code, PAGE, "exec"), names)
    return names


@pytest.fixture
def step() -> dict[str, Tensor]:
    """Four padded sequences [4, 5]; the policy's log-probs carry the gradient."""
    torch.manual_seed(0)
    mask = torch.arange(5) < LENGTHS[:, None]
    logp = torch.randn(4, 5) * 0.4 - 2.0
    return {
        "logp": logp.requires_grad_(),
        "behavior_logp": torch.randn(4, 5) * 0.4 - 2.0,
        "advantage": torch.randn(4, 1).expand(4, 5).clone(),
        "mask": mask,
    }


def gradient_of(loss: Tensor, step: dict[str, Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, step["logp"])
    return gradient


def expected_gradient(objective: Any, step: dict[str, Tensor]) -> Tensor:
    """That of the undivided step."""
    made = as_objective(objective)
    tokens = padded_tokens(**step)
    return gradient_of(made(tokens, made.totals(tokens)).loss, step)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert float(expected.norm()) > 0.05
    assert float((found - expected).norm() / expected.norm()) < 1e-5


def unpadded(values: Tensor, rows: slice = slice(None)) -> list[Tensor]:
    pairs = zip(values[rows], LENGTHS[rows].tolist(), strict=True)
    return [row[:length] for row, length in pairs]


@pytest.mark.parametrize("objective", ["p3o", "m2po", "grpo"])
def test_slime(objective: str, page: dict[str, Any], step: dict[str, Tensor]) -> None:
    def data(rows: slice = slice(None)) -> dict[str, list[Tensor]]:
        return {
            "rollout_log_probs": unpadded(step["behavior_logp"], rows),
            "advantages": unpadded(step["advantage"], rows),
            "loss_masks": unpadded(step["mask"].int(), rows),
            "log_probs": unpadded(step["logp"].detach(), rows),
        }

    args = SimpleNamespace(global_batch_size=len(LENGTHS))
    loss = page["SlimeLoss"](objective)
    loss.postprocess(args, 0, data())
    shares = [loss.share(args, data(rows), unpadded(step["logp"], rows)) for rows in ROWS]
    found = gradient_of(sum(shares) / args.global_batch_size, step)
    assert_close(found, expected_gradient(objective, step))


@pytest.mark.parametrize("objective", ["p3o", "m2po", "grpo"])
def test_nemo_rl(objective: str, page: dict[str, Any], step: dict[str, Tensor]) -> None:
    def shifted(values: Tensor) -> Tensor:  # a first column, for which there is no prediction
        return torch.cat([torch.full((len(values), 1), 7.0), values.detach().float()], dim=1)

    def data(rows: slice = slice(None)) -> dict[str, Tensor]:
        whole = {
            "generation_logprobs": shifted(step["behavior_logp"]),
            "prev_logprobs": shifted(step["logp"]),
            "advantages": shifted(step["advantage"]),
            "token_mask": shifted(step["mask"]),
            "sample_mask": torch.ones(len(LENGTHS)),
        }
        return {name: value[rows] for name, value in whole.items()}

    loss = page["NemoLoss"](objective)
    loss.measure(data())
    shares = [loss(step["logp"][rows], data(rows), None, None)[0] for rows in ROWS]
    assert_close(gradient_of(sum(shares), step), expected_gradient(objective, step))


@pytest.mark.parametrize("objective", [*EXACT_EVERYWHERE, WIDE_GSPO])
def test_openrlhf(objective: Any, page: dict[str, Any], step: dict[str, Tensor]) -> None:
    shares = [
        page["openrlhf_loss"](
            step["logp"][rows],
            None,
            step["advantage"][rows],
            action_mask=step["mask"][rows],
            rollout_log_probs=step["behavior_logp"][rows],
            dp_size=2,
            batch_num_tokens=int(LENGTHS.sum()),
            global_batch_size=len(LENGTHS),
            objective=objective,
        )
        for rows in ROWS
    ]
    # one micro-batch on each of two ranks, whose gradients are averaged
    assert_close(gradient_of(sum(shares) / 2, step), expected_gradient(objective, step))


@pytest.mark.parametrize("objective", EXACT_EVERYWHERE)
def test_skyrl(objective: str, page: dict[str, Any], step: dict[str, Tensor]) -> None:
    shares = [
        page["skyrl_loss"](
            step["logp"][rows],
            None,
            step["advantage"][rows] / int(LENGTHS.sum()),
            None,
            loss_mask=step["mask"][rows],
            rollout_logprobs=step["behavior_logp"][rows],
            objective=objective,
        )[0]
        for rows in ROWS
    ]
    assert_close(gradient_of(sum(shares), step), expected_gradient(objective, step))


@pytest.mark.parametrize("objective", EXACT_EVERYWHERE)
def test_prime_rl(objective: str, page: dict[str, Any], step: dict[str, Tensor]) -> None:
    shares = [
        page["prime_loss"](
            SimpleNamespace(
                trainer_logprobs=step["logp"][row],
                inference_logprobs=step["behavior_logp"][row],
                advantages=step["advantage"][row],
                loss_mask=step["mask"][row],
            ),
            objective,
        )
        for row in range(len(LENGTHS))
    ]
    found = gradient_of(sum(shares) / int(LENGTHS.sum()), step)
    assert_close(found, expected_gradient(objective, step))


def test_the_default_losses_of_micro_batches_are_p3o_with_the_ess_of_the_micro_batch(
    page: dict[str, Any], step: dict[str, Tensor]
) -> None:
    """On the whole step at once, that ESS is the step's."""
    found = page["openrlhf_loss"](
        step["logp"],
        None,
        step["advantage"],
        action_mask=step["mask"],
        rollout_log_probs=step["behavior_logp"],
        batch_num_tokens=int(LENGTHS.sum()),
        global_batch_size=len(LENGTHS),
    )
    assert_close(gradient_of(found, step), expected_gradient("p3o", step))
    found, _ = page["skyrl_loss"](
        step["logp"],
        None,
        step["advantage"] / int(LENGTHS.sum()),
        None,
        loss_mask=step["mask"],
        rollout_logprobs=step["behavior_logp"],
    )
    without_kl = {"name": "p3o", "kl": "none"}
    assert_close(gradient_of(found, step), expected_gradient(without_kl, step))
