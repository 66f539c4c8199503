"""AdamW's moments: those that torch would create, but before the first step."""

from pathlib import Path

import pytest
import torch
from tests.support import checkpoint_ranks as ranks

from trustbatch.training.optimizer import build_optimizer, create_moments


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_moments_are_those_of_the_first_step(
    num_ranks: int, tiny_folder: Path, tmp_path: Path
) -> None:
    """Of whole and of sharded parameters."""
    ranks.in_ranks(num_ranks, tmp_path, ranks.compare_moments, tiny_folder)


@pytest.mark.parametrize("offload", [False, True])
def test_no_moment_of_an_offloaded_optimizer_is_on_the_device(offload: bool) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = build_optimizer(
        "adamw", [parameter], betas=(0.9, 0.95), weight_decay=0.01, offload=offload
    )
    assert not optimizer.state
    create_moments(optimizer)
    assert (parameter in optimizer.state) == (not offload)
