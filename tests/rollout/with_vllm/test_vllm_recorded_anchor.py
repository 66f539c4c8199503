"""The anchor's log-probs from real vLLM (its CPU build, in float32), beside those sampled from."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.support.episode_cases import episodes
from tests.support.vllm_cases import (
    LONG_PROMPT,
    SMALL,
    ask,
    largest_difference,
    load,
    logits_of,
    tokens,
)

from trustbatch.api import train_config
from trustbatch.batching.sequences import to_sequences
from trustbatch.config import parse_config
from trustbatch.errors import EngineError
from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.types import Completion, GenerationRequest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]

SETTINGS = [
    {"temperature": 1.2},
    {"temperature": 0.6},
    {"top_p": 0.9},
    {"top_k": 5},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def engine(long_folder: Path) -> Iterator[VllmEngine]:
    """vLLM in this process, which records the model at T = 1 too."""
    config = VllmConfig(mode="in_process", **SMALL)
    engine = VllmEngine(
        load(long_folder), config, seed=7, version=3, top_logprobs=16, anchor_temperature=1.0
    )
    yield engine
    engine.close()


def anchored(
    policy: Policy, prompt: str, *, temperature_of_anchor: float = 1.0, **options: float
) -> GenerationRequest:
    request = ask(policy, prompt, **options)
    sampling = replace(request.sampling, anchor_temperature=temperature_of_anchor)
    return replace(request, sampling=sampling)


def is_the_model(
    policy: Policy, request: GenerationRequest, completion: Completion, temperature: float = 1.0
) -> None:
    """Both log-probs of the anchor are a recomputation's, and its tokens the most likely ones."""
    logp = torch.log_softmax(logits_of(policy, request, completion) / temperature, -1)
    sampled = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
    torch.testing.assert_close(completion.anchor_logp, sampled, atol=1e-4, rtol=0)
    if request.sampling.top_logprobs == 0:
        assert completion.anchor_top_logp is None
        return
    ids = completion.top_token_ids
    assert ids is not None
    torch.testing.assert_close(completion.anchor_top_logp, logp.gather(-1, ids), atol=1e-4, rtol=0)
    best = logp.topk(ids.shape[1], dim=-1).values
    torch.testing.assert_close(completion.anchor_top_logp, best, atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", SETTINGS)
def test_the_anchor_is_the_model_whatever_is_sampled_from(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    policy = engine.policy
    native = NativeEngine(policy, seed=0)
    for prompt in ("12+34=", LONG_PROMPT):
        request = anchored(policy, prompt, top_logprobs=8, **options)
        completions = engine.generate([request])
        assert largest_difference(policy, request, completions) < 1e-4
        for completion in completions:
            is_the_model(policy, request, completion)
            assert completion.behavior_top_logp is not None
            kept = torch.isfinite(completion.behavior_top_logp).sum(-1)
            assert bool((kept >= 1).all())
            if "top_k" in options:
                assert int(kept.max()) <= options["top_k"]
        # the first token has the same context in both engines
        ours, theirs = completions[0], native.generate([request])[0]
        assert ours.top_token_ids is not None
        assert theirs.top_token_ids is not None
        assert ours.top_token_ids[0].tolist() == theirs.top_token_ids[0].tolist()
        for name in ("behavior_top_logp", "anchor_top_logp"):
            torch.testing.assert_close(
                getattr(ours, name)[0], getattr(theirs, name)[0], atol=1e-4, rtol=0
            )


def test_requests_of_all_kinds_share_a_batch(engine: VllmEngine) -> None:
    policy = engine.policy
    requests = [
        anchored(policy, "12+34=", temperature=1.2),
        anchored(policy, "9=", temperature=0.6, top_logprobs=40),  # the vocabulary has 16 tokens
        ask(policy, "1+1=", temperature=0.0, top_logprobs=4),
        ask(policy, "7+8=", temperature=1.2, top_k=5),
        anchored(policy, "55+4=", top_logprobs=4),
        anchored(policy, LONG_PROMPT, top_p=0.7, top_logprobs=3),
    ]
    completions = engine.generate(requests)
    for number, request in enumerate(requests):
        for completion in completions[4 * number : 4 * number + 4]:
            assert largest_difference(policy, request, [completion]) < 1e-4
            if request.sampling.records_anchor:
                is_the_model(policy, request, completion)
            else:
                assert completion.anchor_logp is None
                assert completion.anchor_top_logp is None
    greedy = completions[8].behavior_top_logp
    assert greedy is not None
    assert greedy[0].tolist() == [0.0, *[-torch.inf] * 3]


def test_recording_the_anchor_changes_nothing_else(engine: VllmEngine, long_folder: Path) -> None:
    plain = VllmEngine(load(long_folder), VllmConfig(**SMALL), seed=7, version=3, top_logprobs=16)
    try:
        for options in SETTINGS:
            request = ask(plain.policy, "12+34=", top_logprobs=4, **options)
            wanted = plain.generate([request])
            found = engine.generate([anchored(plain.policy, "12+34=", top_logprobs=4, **options)])
            assert tokens(found) == tokens(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert other.anchor_logp is None
                for name in ("behavior_logp", "behavior_top_logp"):
                    torch.testing.assert_close(getattr(one, name), getattr(other, name))
        with pytest.raises(EngineError, match="anchor_temperature = 1"):
            plain.generate([anchored(plain.policy, "12+34=", temperature=1.2)])
    finally:
        plain.close()


def test_every_turn_of_an_episode_has_its_anchor(engine: VllmEngine) -> None:
    policy = engine.policy
    groups = episodes(policy, engine=engine, temperature=1.2, anchor_temperature=1.0)
    for sequence in to_sequences(groups, torch.zeros(6, 4)):
        completion = sequence.completion
        ids = torch.tensor([[*sequence.prompt_token_ids, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids).logits[0, len(sequence.prompt_token_ids) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, completion.token_ids[:, None]).squeeze(-1)
        assert completion.anchor_logp is not None
        torch.testing.assert_close(
            completion.of_policy(completion.anchor_logp),
            completion.of_policy(logp),
            atol=1e-4,
            rtol=0,
        )


def test_a_server_with_raw_log_probs_has_the_anchor_at_another_temperature(
    long_folder: Path,
) -> None:
    engine = VllmEngine(
        load(long_folder),
        VllmConfig(**SMALL),
        seed=7,
        logprob_mode="raw",
        top_logprobs=4,
        anchor_temperature=1.2,
    )
    try:
        policy = engine.policy
        request = anchored(
            policy,
            "12+34=",
            temperature_of_anchor=1.2,
            temperature=0.6,
            top_logprobs=4,
            logprob_mode="raw",
        )
        for completion in engine.generate([request]):
            is_the_model(policy, request, completion, temperature=1.2)
            raw = torch.log_softmax(logits_of(policy, request, completion), -1)
            sampled = raw.gather(-1, completion.token_ids[:, None]).squeeze(-1)
            torch.testing.assert_close(completion.behavior_logp, sampled, atol=1e-4, rtol=0)
    finally:
        engine.close()


def test_a_vllm_that_samples_in_another_way_is_refused(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.worker import gpu_model_runner

    class Other(gpu_model_runner.Sampler):
        pass

    monkeypatch.setattr(gpu_model_runner, "Sampler", Other)
    config = VllmConfig(mode="in_process", **SMALL)
    with pytest.raises(EngineError, match=r'objective\.anchor = "sampler" \("proximal" with pact'):
        VllmEngine(load(long_folder), config, seed=0, anchor_temperature=1.0)


def test_p3o_trains_at_another_temperature_on_what_vllm_samples(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Each step starts at the model that sampled its tokens, so that the KL to it is 0 there."""
    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic", "level": 1},
            "objective": {"name": "p3o"},
            "rollout": {
                "engine": "vllm",
                "vllm": SMALL,
                "prompts_per_step": 8,
                "samples_per_prompt": 8,
                "max_tokens": 6,
                "temperature": 1.2,
            },
            "training": {"steps": 3, "learning_rate": 1e-2, "schedule": "constant"},
            "run": {"name": "vllm", "folder": str(tmp_path)},
        }
    )
    result = train_config(config)
    assert [step["step"] for step in result.metrics] == [1, 2, 3]
    for step in result.metrics:
        assert step["kl/penalty"] < 1e-6
        assert 1e-3 < step["one_minus_ess"] < 0.5, "the ratio is to what was sampled from"
