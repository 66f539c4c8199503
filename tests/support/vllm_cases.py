"""What the tests of vLLM share: requests, recomputed log-probs, and an impatient engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from trustbatch.errors import EngineError
from trustbatch.models.policy import Policy
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.types import Completion, GenerationRequest, SamplingParams

SMALL = {"kv_cache_gib": 0.25, "enforce_eager": True}
LONG_PROMPT = "12+34=" * 50
"""more than two blocks of vLLM's cache on a CPU, which have 128 tokens"""


def load(folder: Path) -> Policy:
    return Policy.load(str(folder), device="cpu", precision="float32")


def ask(policy: Policy, prompt: str, num_samples: int = 4, **options: Any) -> GenerationRequest:
    settings = {"max_tokens": 12, "stop_token_ids": policy.stop_token_ids, **options}
    return GenerationRequest(
        prompt_id=prompt,
        token_ids=tuple(policy.tokenizer.encode(prompt)),
        num_samples=num_samples,
        sampling=SamplingParams(**settings),
    )


@torch.no_grad()
def logits_of(policy: Policy, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Logits [n, V] of each token of a completion, by transformers in float32."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
    return policy.model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]


def largest_difference(
    policy: Policy, request: GenerationRequest, completions: list[Completion]
) -> float:
    """Between recorded log-probs and a recomputation of the distribution sampled from."""
    worst = 0.0
    for completion in completions:
        logp = sampling_logprobs(logits_of(policy, request, completion), request.sampling)
        sampled = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        worst = max(worst, float((sampled - completion.behavior_logp).abs().max()))
    return worst


def perturb(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def gives_up_at_the_deadline_and_goes_on(engine: VllmEngine) -> None:
    config, mode = engine.config, engine.logprob_mode
    engine.config = config.model_copy(update={"generate_seconds": 0.2})
    endless = ask(engine.policy, "1+1=", 64, max_tokens=500, stop_token_ids=(), logprob_mode=mode)
    with pytest.raises(EngineError, match=r"rollout\.vllm\.generate_seconds"):
        engine.generate([endless])
    engine.config = config
    assert len(engine.generate([ask(engine.policy, "1+1=", logprob_mode=mode)])) == 4
