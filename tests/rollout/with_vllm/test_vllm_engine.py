"""The vLLM engine against real vLLM (its CPU build, in float32) and a real tiny model.

vLLM takes long to start, so one engine in this process and one server serve most tests.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare
from tests.support.episode_cases import episodes
from tests.support.training_cases import policy_logp
from tests.support.vllm_cases import (
    LONG_PROMPT,
    SMALL,
    ask,
    gives_up_at_the_deadline_and_goes_on,
    largest_difference,
    load,
    logits_of,
    perturb,
    tokens,
)

from trustbatch.batching.sequences import to_sequences
from trustbatch.errors import EngineError
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.rollout.vllm.config import VllmConfig
from trustbatch.rollout.vllm.engine import VllmEngine
from trustbatch.types import FinishReason

pytestmark = [
    pytest.mark.usefixtures("logs_of_failures_go_here"),
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make test-vllm"),
]

SETTINGS = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.2},
    {"top_k": 5},
    {"top_p": 0.7},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def engine(long_folder: Path) -> Iterator[VllmEngine]:
    """vLLM in this process, at version 3."""
    config = VllmConfig(mode="in_process", **SMALL)
    engine = VllmEngine(
        load(long_folder), config, seed=7, version=3, max_sequences=256, top_logprobs=16
    )
    yield engine
    engine.close()


def test_episodes_are_sampled_turn_by_turn(engine: VllmEngine) -> None:
    """Each turn follows the whole conversation, and has random numbers of its own."""
    policy = engine.policy
    groups = episodes(policy, engine=engine, temperature=1.0)
    again = episodes(policy, engine=engine, temperature=1.0, indices=[1])
    assert [c.turns for c in again[0].completions] == [c.turns for c in groups[1].completions]
    sequences = to_sequences(groups, torch.zeros(6, 4))
    assert max(len(sequence.completion.turns) for sequence in sequences) > 4
    recorded = torch.cat([s.completion.of_policy(s.completion.behavior_logp) for s in sequences])
    torch.testing.assert_close(policy_logp(policy, sequences), recorded, rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", SETTINGS)
def test_behavior_logp_is_that_of_the_distribution_sampled_from(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    for prompt in ("12+34=", "9=", LONG_PROMPT):
        request = ask(engine.policy, prompt, **options)
        completions = engine.generate([request])
        assert largest_difference(engine.policy, request, completions) < 1e-3


@pytest.mark.parametrize("options", SETTINGS)
def test_tokens_come_as_often_as_their_probability_says(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    """Pairs of first and second token, so that the second sample is seen to be independent."""
    policy, num_samples = engine.policy, 4000
    request = ask(policy, "55+44=", num_samples, max_tokens=2, stop_token_ids=(), **options)
    pairs = [tuple(c.token_ids.tolist()) for c in engine.generate([request])]
    vocabulary = range(policy.model.config.vocab_size)
    prompt = list(request.token_ids)
    with torch.no_grad():
        first_logits = policy.model(input_ids=torch.tensor([prompt])).logits[:, -1]
        rows = torch.tensor([[*prompt, token] for token in vocabulary])
        second_logits = policy.model(input_ids=rows).logits[:, -1]
    first = sampling_logprobs(first_logits, request.sampling)[0].double().exp()
    joint = first[:, None] * sampling_logprobs(second_logits, request.sampling).double().exp()
    joint = joint / joint.sum()
    counts = torch.zeros_like(joint)
    for one, two in pairs:
        counts[one, two] += 1
    assert counts[joint == 0].sum() == 0
    expected = joint * num_samples
    common = expected >= 5
    observed = [*counts[common].tolist(), float(counts[~common].sum())]
    wanted = [*expected[common].tolist(), float(expected[~common].sum())]
    if wanted[-1] < 1:
        observed, wanted = observed[:-1], wanted[:-1]
        wanted = [w * sum(observed) / sum(wanted) for w in wanted]
    assert chisquare(observed, wanted).pvalue > 1e-4


@pytest.mark.parametrize("options", [{}, {"temperature": 1.2, "top_p": 0.6}, {"top_k": 3}])
def test_top_logprobs_are_the_most_likely_tokens(
    engine: VllmEngine, options: dict[str, float]
) -> None:
    for num_top in (4, 16, 40):  # the vocabulary has 16 tokens
        request = ask(engine.policy, "12+34=", top_logprobs=num_top, **options)
        for completion in engine.generate([request]):
            shape = (len(completion.token_ids), min(num_top, 16))
            assert completion.top_token_ids is not None
            assert completion.behavior_top_logp is not None
            assert completion.top_token_ids.shape == completion.behavior_top_logp.shape == shape
            logits = logits_of(engine.policy, request, completion)
            expected = sampling_logprobs(logits, request.sampling)
            top = expected.topk(shape[1], dim=-1).values
            torch.testing.assert_close(completion.behavior_top_logp, top, atol=1e-3, rtol=0)
            recorded = expected.gather(-1, completion.top_token_ids)
            torch.testing.assert_close(recorded, top, atol=1e-3, rtol=0)


def test_samples_depend_on_seed_version_prompt_and_sample_alone(engine: VllmEngine) -> None:
    alone = engine.generate([ask(engine.policy, "9=")])
    among = engine.generate([ask(engine.policy, p, 6) for p in ("1+1=", "9=", "90-12=")])
    assert tokens(among[6:10]) == tokens(alone)
    assert len({tuple(t) for t in tokens(among)}) > 6, "samples differ from each other"


def test_more_prompts_than_fit_into_one_step_keep_their_seeds(engine: VllmEngine) -> None:
    """Together 14,000 tokens; vLLM computes at most 4,096 at a time."""
    prompts = [f"{number}+" + LONG_PROMPT[: 260 + number] for number in range(10, 60)]
    together = engine.generate([ask(engine.policy, prompt, 1) for prompt in prompts])
    for number in (0, 25, 49):
        alone = engine.generate([ask(engine.policy, prompts[number], 1)])
        assert tokens(alone) == tokens([together[number]])


def test_a_completion_ends_with_its_stop_token_or_at_max_tokens(engine: VllmEngine) -> None:
    stop = engine.policy.stop_token_ids
    completions = engine.generate([ask(engine.policy, "12+34=", 64)])
    assert {c.finish_reason for c in completions} == {FinishReason.STOP, FinishReason.LENGTH}
    for completion in completions:
        has_stopped = completion.token_ids[-1] in torch.tensor(stop)
        assert has_stopped == (completion.finish_reason == FinishReason.STOP)
        assert len(completion.behavior_logp) == len(completion.token_ids) <= 12
        assert completion.text == engine.policy.decode([completion.token_ids])[0]
    endless = engine.generate([ask(engine.policy, "1+1=", max_tokens=300, stop_token_ids=())])
    assert [len(c.token_ids) for c in endless] == [300] * 4
    assert {c.finish_reason for c in endless} == {FinishReason.LENGTH}


def test_greedy_samples_the_most_likely_token_with_probability_1(engine: VllmEngine) -> None:
    request = ask(engine.policy, "12+34=", 1, temperature=0.0, top_logprobs=3)
    (completion,) = engine.generate([request])
    best = logits_of(engine.policy, request, completion).argmax(-1)
    assert torch.equal(completion.token_ids, best)
    assert completion.behavior_top_logp is not None
    assert torch.equal(completion.behavior_logp, torch.zeros(len(best)))
    assert completion.behavior_top_logp[0].tolist() == [0.0, -torch.inf, -torch.inf]


def test_requests_that_do_not_fit_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="context of 512"):
        engine.generate([ask(engine.policy, LONG_PROMPT, max_tokens=213)])
    with pytest.raises(EngineError, match="logprob_mode"):
        engine.generate([ask(engine.policy, "1+1=", logprob_mode="raw")])


def test_an_update_moves_the_version_and_drops_old_keys_and_values(engine: VllmEngine) -> None:
    request = ask(engine.policy, LONG_PROMPT)
    before = engine.generate([request])
    assert {c.provenance.version for c in before} == {engine.version} == {3}
    assert {(c.provenance.engine, c.provenance.precision) for c in before} == {("vllm", "float32")}
    perturb(engine.policy, 1)
    assert largest_difference(engine.policy, request, engine.generate([request])) > 0.1
    engine.load_weights(engine.policy.named_weights(), 4)
    after = engine.generate([request])
    assert {c.provenance.version for c in after} == {engine.version} == {4}
    assert largest_difference(engine.policy, request, after) < 1e-3


def test_an_engine_asleep_refuses_to_generate(engine: VllmEngine) -> None:
    engine.sleep()
    assert engine.generate([ask(engine.policy, "1+1=")]), "nothing sleeps unless configured"
    engine.config = engine.config.model_copy(update={"sleep": True})
    engine.sleep()
    with pytest.raises(EngineError, match="wake"):
        engine.generate([ask(engine.policy, "1+1=")])
    engine.wake()
    request = ask(engine.policy, LONG_PROMPT)
    assert largest_difference(engine.policy, request, engine.generate([request])) < 1e-3


def test_this_process_gives_up_at_the_deadline_and_goes_on(engine: VllmEngine) -> None:
    gives_up_at_the_deadline_and_goes_on(engine)
