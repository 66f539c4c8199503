"""LoRA with vLLM: adapters alone or merged weights, in processes of vLLM's own."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.support.training_cases import policy_logp
from tests.support.vllm_cases import LONG_PROMPT, SMALL, ask, load

from trustbatch.api import train_config
from trustbatch.config import parse_config
from trustbatch.models.config import LoraConfig
from trustbatch.rollout.vllm.client import VllmClient
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.types import TrainSequence

pytestmark = [
    pytest.mark.usefixtures("logs_of_failures_go_here"),
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]


def test_adapters_alone_are_loaded_beside_frozen_weights(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update moves no weight, and drops the keys and values of the one before."""
    pytest.importorskip("peft")
    policy = load(long_folder)
    policy.add_adapters(LoraConfig(rank=12), seed=0)
    assert policy.adapters is not None
    policy.adapters.published_alone = True
    engine = VllmEngine(policy, VllmConfig(adapters="alone", **SMALL), seed=7, version=2)
    try:
        monkeypatch.setattr(VllmClient, "update", None)  # from here on no weight is sent
        request = ask(policy, LONG_PROMPT)
        sampled = []
        for version in (2, 3, 4):
            completions = engine.generate([request])
            assert {each.provenance.version for each in completions} == {version}
            sequences = [
                TrainSequence(prompt_token_ids=request.token_ids, completion=each, advantage=1.0)
                for each in completions
            ]
            recorded = torch.cat([each.behavior_logp for each in completions])
            torch.testing.assert_close(recorded, policy_logp(policy, sequences), atol=1e-5, rtol=0)
            sampled.append(torch.cat([each.behavior_logp for each in completions]))
            generator = torch.Generator().manual_seed(version)
            with torch.no_grad():
                for _, parameter in policy.trained_parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
            engine.load_weights(policy.named_weights(), version + 1)
        assert sampled[0][0] != sampled[1][0] != sampled[2][0]
    finally:
        engine.close()


@pytest.mark.parametrize("adapters", ["merged", "alone"])
def test_a_run_with_adapters_trains_on_what_vllm_samples(
    tiny_folder: Path, tmp_path: Path, adapters: str
) -> None:
    pytest.importorskip("peft")
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu", "lora": {"rank": 4}},
            "task": {"name": "arithmetic", "level": 1},
            "rollout": {
                "engine": "vllm",
                "vllm": {**SMALL, "adapters": adapters},
                "prompts_per_step": 8,
                "samples_per_prompt": 4,
                "max_tokens": 6,
            },
            "objective": {"name": "grpo", "entropy_coef": 0.1},
            "training": {"steps": 3, "learning_rate": 1e-2, "schedule": "constant"},
            "run": {"name": "vllm", "folder": str(tmp_path)},
        }
    )
    result = train_config(config)
    assert all(line["one_minus_ess"] < 1e-6 for line in result.metrics)
