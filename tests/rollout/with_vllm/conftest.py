"""Fixtures of the tests with real vLLM."""

import os
import tempfile
from pathlib import Path

import pytest
import torch

from trustbatch.models.tiny import build_model, build_tokenizer

# vLLM imports Ray, which must know before that a later test's cluster is of this machine alone
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"


@pytest.fixture(scope="session")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with room for prompts of several cache blocks."""
    folder = tmp_path_factory.mktemp("models") / "long"
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = 512
    model = build_model(tokenizer, seed=0)
    model.config.max_position_embeddings = 512
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def logs_of_failures_go_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
