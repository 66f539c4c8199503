"""P3OTrainer in TRL: its gradients are those of our own trainer, on the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support import trl_cases
from tests.support.trl_cases import Sampler, difference, make_trainer, own_gradient, train

from trustbatch.integrations.step_totals import as_objective

ROUNDING = 2e-5
"""of float32, relative to the norm of a gradient"""


def accumulated(number: int, **settings: Any) -> dict[str, Any]:
    """16 completions per optimizer step in so many micro-batches."""
    return {
        "gradient_accumulation_steps": number,
        "per_device_train_batch_size": 16 // number,
        **settings,
    }


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("objective", ["p3o", "m2po", "gspo"])
def test_gradients_are_ours_for_any_accumulation(
    objective: str, number: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """The second step of a generation is off-policy: 1-ESS is then far from 0."""
    trainer = make_trainer(
        tiny_folder,
        tmp_path,
        objective=objective,
        settings=accumulated(number, steps_per_generation=2 * number),
    )
    steps = train(trainer)
    assert len(steps) == 2
    for step in steps:
        assert len(step.inputs) == number
        expected = own_gradient(step, as_objective(objective), tiny_folder)
        assert difference(step.gradient, expected) < ROUNDING
    assert trainer.state.log_history[1]["one_minus_ess"] > 0.01
