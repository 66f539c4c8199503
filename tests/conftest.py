"""Shared fixtures: a real, untrained tiny model in an ordinary Hugging Face folder."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.reliability import Record

if TYPE_CHECKING:  # imported where it is used: the process that only gives out tests starts at once
    from trustbatch.models.policy import Policy


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests first, so that none of them is left for one process alone."""
    num_slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -num_slow[item.path])


@pytest.fixture(scope="session", autouse=True)
def no_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model with random weights and the arithmetic tokenizer."""
    import torch

    from trustbatch.models.tiny import build_model, build_tokenizer

    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)  # sharper than at initialization: ratios then differ from 1
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def policy(tiny_folder: Path) -> "Policy":
    """The tiny model on the CPU, fresh for each test."""
    from trustbatch.models.policy import Policy

    return Policy.load(str(tiny_folder), device="cpu", precision="float32")


@pytest.fixture
def reliability() -> Record:
    """Counts for docs/reliability.md."""
    return Record()
