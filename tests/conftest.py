"""Shared fixtures: a real, untrained tiny model in an ordinary Hugging Face folder."""

from pathlib import Path

import pytest
import torch
from transformers.utils import logging as transformers_logging

from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_model, build_tokenizer

transformers_logging.disable_progress_bar()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3 model with random weights and the arithmetic tokenizer."""
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
def policy(tiny_folder: Path) -> Policy:
    """The tiny model on the CPU, fresh for each test."""
    return Policy.load(str(tiny_folder), device="cpu", precision="float32")
