from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from trustbatch.policy import Policy
from trustbatch.rollout.native_engine import NativeEngine
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.types import Completion, FinishReason, GenerationRequest, SamplingParams

PROMPTS = ("12+34=", "9=", "55+44=", "1+1=", "90-12=")


def make_requests(
    policy: Policy, prompts: Sequence[str] = PROMPTS, *, num_samples: int = 3, **options: object
) -> list[GenerationRequest]:
    settings = {"max_tokens": 12, "stop_token_ids": policy.stop_token_ids, **options}
    sampling = SamplingParams(**settings)  # type: ignore[arg-type]
    return [
        GenerationRequest(
            prompt_id=prompt,
            token_ids=tuple(policy.tokenizer.encode(prompt)),
            num_samples=num_samples,
            sampling=sampling,
        )
        for prompt in prompts
    ]


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


@torch.no_grad()
def recomputed(policy: Policy, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Log-probs [n, V] of the sampling distribution, from one plain forward pass."""
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
    logits = policy.model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]
    return sampling_logprobs(logits, request.sampling)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.2},
        {"top_k": 3},
        {"top_p": 0.7},
        {"temperature": 1.2, "top_k": 6, "top_p": 0.8},
    ],
)
def test_behaviour_logp_is_that_of_the_distribution_drawn_from(
    policy: Policy, options: dict[str, float]
) -> None:
    requests = make_requests(policy, num_samples=4, top_logprobs=5, **options)
    completions = NativeEngine(policy, seed=0).generate(requests)
    for number, completion in enumerate(completions):
        expected = recomputed(policy, requests[number // 4], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.behaviour_logp, taken, rtol=0, atol=1e-5)
        assert completion.top_token_ids is not None
        assert completion.behaviour_top_logp is not None
        top = expected.gather(-1, completion.top_token_ids)
        torch.testing.assert_close(completion.behaviour_top_logp, top, rtol=0, atol=1e-5)


def test_a_sample_does_not_depend_on_its_company(policy: Policy) -> None:
    requests = make_requests(policy, num_samples=4)
    together = NativeEngine(policy, seed=0).generate(requests)
    alone = [c for r in requests for c in NativeEngine(policy, seed=0).generate([r])]
    in_small_batches = NativeEngine(policy, seed=0, max_sequences=3).generate(requests)
    backwards = NativeEngine(policy, seed=0).generate(requests[::-1])
    backwards = [c for n in range(len(requests)) for c in backwards[4 * n : 4 * n + 4]]
    assert tokens(together) == tokens(alone) == tokens(in_small_batches)
    by_name = {(c.prompt_id, c.sample): c.token_ids.tolist() for c in backwards}
    assert tokens(together) == [by_name[c.prompt_id, c.sample] for c in together]


def test_samples_depend_on_seed_version_and_sample_index(policy: Policy) -> None:
    requests = make_requests(policy, num_samples=8)
    first = tokens(NativeEngine(policy, seed=0).generate(requests))
    assert first == tokens(NativeEngine(policy, seed=0).generate(requests))
    assert first != tokens(NativeEngine(policy, seed=1).generate(requests))
    assert first != tokens(NativeEngine(policy, seed=0, version=1).generate(requests))
    assert len({tuple(sample) for sample in first[:8]}) > 1


def test_completions_end_at_a_stop_token_or_at_the_limit(policy: Policy) -> None:
    requests = make_requests(policy, num_samples=30, max_tokens=7)
    completions = NativeEngine(policy, seed=0).generate(requests)
    (stop,) = policy.stop_token_ids
    reasons = set()
    for completion in completions:
        ids = completion.token_ids.tolist()
        reasons.add(completion.finish_reason)
        assert stop not in ids[:-1]
        assert (ids[-1] == stop) == (completion.finish_reason is FinishReason.STOP)
        if completion.finish_reason is FinishReason.LENGTH:
            assert len(ids) == 7
        assert "</s>" not in completion.text
        assert len(completion.behaviour_logp) == len(ids)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_provenance_says_who_drew_the_tokens(policy: Policy) -> None:
    engine = NativeEngine(policy, seed=0, version=4)
    (completion, *_) = engine.generate(
        make_requests(policy, temperature=0.5, top_p=0.9, top_k=4, logprob_mode="raw")
    )
    provenance = completion.provenance
    assert (provenance.policy, provenance.version) == (policy.name, 4)
    assert (provenance.engine, provenance.precision) == ("native", "float32")
    assert (provenance.temperature, provenance.top_p, provenance.top_k) == (0.5, 0.9, 4)
    assert provenance.logprob_mode == "raw"


def test_requests_with_different_sampling_can_be_mixed(policy: Policy) -> None:
    hot, cold = (make_requests(policy, temperature=t, max_tokens=5) for t in (1.5, 0.2))
    mixed = [r for pair in zip(hot, cold, strict=True) for r in pair]
    engine = NativeEngine(policy, seed=0)
    result = engine.generate(mixed)
    expected = {
        (t, c.prompt_id, c.sample): c.token_ids.tolist()
        for t, requests in ((1.5, hot), (0.2, cold))
        for c in engine.generate(requests)
    }
    seen = {(c.provenance.temperature, c.prompt_id, c.sample): c.token_ids.tolist() for c in result}
    assert seen == expected
    assert [c.prompt_id for c in result] == [r.prompt_id for r in mixed for _ in range(3)]


def test_engine_follows_the_trainers_own_parameters(policy: Policy) -> None:
    engine = NativeEngine(policy, seed=0)
    requests = make_requests(policy, num_samples=6)
    before = tokens(engine.generate(requests))
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    engine.load_weights(policy.named_weights(), version=0)
    assert tokens(engine.generate(requests)) != before


def test_engine_copies_the_weights_of_another_policy(policy: Policy, tiny_folder: Path) -> None:
    other = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.1)
    engine = NativeEngine(policy, seed=0)
    engine.load_weights(other.named_weights(), version=7)
    assert engine.version == 7
    requests = make_requests(policy, num_samples=6)
    expected = NativeEngine(other, seed=0, version=7).generate(requests)
    assert tokens(engine.generate(requests)) == tokens(expected)
    for mine, theirs in zip(policy.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.data_ptr() != theirs.data_ptr()


def test_generation_leaves_no_gradient(policy: Policy) -> None:
    (completion, *_) = NativeEngine(policy, seed=0).generate(make_requests(policy))
    assert not completion.behaviour_logp.requires_grad
    assert all(parameter.grad is None for parameter in policy.model.parameters())
