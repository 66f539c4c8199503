import math

import numpy as np
import pytest
import torch
from scipy import stats

from trustbatch.errors import DivergedError
from trustbatch.rollout.sampling import (
    refuse_divergence,
    sample_key,
    sample_tokens,
    sampling_logprobs,
    uniforms,
)
from trustbatch.rollout.token_blocks import VocabularyBlocks
from trustbatch.types import SamplingParams


def params(**options: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, stop_token_ids=(0,), **options)  # type: ignore[arg-type]


def keys(count: int, *, seed: int = 0) -> torch.Tensor:
    return torch.tensor([sample_key(seed, 0, "prompt", sample) for sample in range(count)])


def splitmix64(state: int, position: int) -> float:
    """SplitMix64 in plain Python integers, as Steele, Lea and Flood give it."""
    mask = 2**64 - 1
    z = (state + (position + 1) * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    z ^= z >> 31
    return (z >> 12) / 2**52


def test_uniforms_equal_a_plain_integer_calculation() -> None:
    some_keys = keys(50)
    for position in (0, 1, 2, 1000, 10**6):
        expected = [splitmix64(key % 2**64, position) for key in some_keys.tolist()]
        assert uniforms(some_keys, position).tolist() == expected


def test_uniforms_are_uniform_and_uncorrelated() -> None:
    some_keys = keys(400)
    table = torch.stack([uniforms(some_keys, position) for position in range(50)])
    assert float(table.min()) >= 0
    assert float(table.max()) < 1
    assert stats.kstest(table.flatten().numpy(), "uniform").pvalue > 1e-3
    neighbors = np.corrcoef(table[:-1].flatten().numpy(), table[1:].flatten().numpy())[0, 1]
    assert abs(neighbors) < 4 / math.sqrt(table.numel())


def test_keys_depend_on_everything_that_names_a_sample() -> None:
    base = sample_key(0, 0, "p", 0)
    others = {
        sample_key(1, 0, "p", 0),
        sample_key(0, 1, "p", 0),
        sample_key(0, 0, "q", 0),
        sample_key(0, 0, "p", 1),
        sample_key(0, 1, "p|0", 0),
        sample_key(0, 0, "0|p", 1),
        sample_key(0, 0, "p", 0, turn=1),
        sample_key(0, 0, "p", 0, turn=2),
        sample_key(0, 0, "p", 1, turn=1),
    }
    assert len(others | {base}) == 10
    assert sample_key(0, 0, "p", 0, turn=0) == base


def reference_distribution(
    logits: np.ndarray, *, temperature: float, top_k: int, top_p: float
) -> np.ndarray:
    """Temperature, then top-k, then top-p, one row at a time, in float64."""
    result = np.zeros_like(logits)
    for row, values in enumerate(logits / temperature):
        p = np.exp(values - values.max())
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        if top_k:
            p[order[top_k:]] = 0
            p /= p.sum()
        mass = 0.0
        for token in order:
            if mass >= top_p:
                p[token] = 0
            mass += p[token]
        result[row] = p / p.sum()
    return result


CASES = [
    (0.6, 0, 1.0),
    (1.0, 0, 1.0),
    (1.2, 0, 1.0),
    (1.0, 3, 1.0),
    (1.0, 0, 0.8),
    (0.7, 5, 0.9),
    (1.0, 1, 1.0),
    (1.0, 0, 1e-6),
]


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_distribution_equals_the_reference(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(1)
    logits = torch.randn(20, 11) * 3
    options = params(temperature=temperature, top_k=top_k, top_p=top_p)
    expected = reference_distribution(
        logits.double().numpy(), temperature=temperature, top_k=top_k, top_p=top_p
    )
    np.testing.assert_allclose(sampling_logprobs(logits, options).exp(), expected, atol=1e-6)


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), CASES)
def test_frequencies_follow_the_recorded_probabilities(
    temperature: float, top_k: int, top_p: float
) -> None:
    torch.manual_seed(2)
    count = 20_000
    logits = (torch.randn(1, 9) * 1.5).expand(count, 9)
    options = params(temperature=temperature, top_k=top_k, top_p=top_p)
    sampled = sample_tokens(logits, keys(count), 3, options)
    probability = sampling_logprobs(logits[:1], options)[0].double().exp()
    observed = torch.bincount(sampled.token_ids, minlength=9)
    possible = probability > 0
    assert observed[~possible].sum() == 0
    torch.testing.assert_close(sampled.logp.exp().double(), probability[sampled.token_ids])
    if possible.sum() > 1:
        expected = (probability[possible] / probability.sum() * count).numpy()
        assert stats.chisquare(observed[possible].numpy(), expected).pvalue > 1e-3


def test_zero_temperature_takes_the_best_token_with_certainty() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [5.0, -1.0, 4.9]])
    sampled = sample_tokens(logits, keys(2), 0, params(temperature=0.0))
    assert sampled.token_ids.tolist() == [1, 0]
    assert sampled.logp.tolist() == [0.0, 0.0]


def test_raw_mode_records_the_untempered_distribution_but_samples_from_the_other() -> None:
    torch.manual_seed(0)
    logits = torch.randn(500, 7) * 2
    processed = sample_tokens(logits, keys(500), 0, params(temperature=0.5, top_k=3))
    raw = sample_tokens(
        logits,
        keys(500),
        0,
        params(temperature=0.5, top_k=3, logprob_mode="raw", top_logprobs=7),
    )
    assert torch.equal(processed.token_ids, raw.token_ids)
    expected = logits.log_softmax(-1).gather(-1, raw.token_ids[:, None]).squeeze(-1)
    torch.testing.assert_close(raw.logp, expected)
    assert raw.top_logp is not None
    torch.testing.assert_close(raw.top_logp.exp().sum(-1), torch.ones(500))


def test_top_logprobs_are_the_most_likely_tokens_of_the_distribution_sampled_from() -> None:
    torch.manual_seed(0)
    logits = torch.randn(10, 7)
    options = params(temperature=0.7, top_logprobs=3)
    sampled = sample_tokens(logits, keys(10), 0, options)
    everything = sampling_logprobs(logits, options)
    assert sampled.top_logp is not None
    assert sampled.top_token_ids is not None
    torch.testing.assert_close(sampled.top_logp, everything.gather(-1, sampled.top_token_ids))
    torch.testing.assert_close(sampled.top_logp, everything.sort(-1, descending=True).values[:, :3])
    many = sample_tokens(logits, keys(10), 0, params(top_logprobs=100))
    assert many.top_logp is not None
    assert many.top_logp.shape == (10, 7)


@pytest.mark.parametrize("num_tokens", [5, 128, 129, 300, 1024])
def test_blocks_of_the_vocabulary_invert_the_whole_cumulative_distribution(num_tokens: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(400, num_tokens) * 4
    logits[::3, : num_tokens // 2] = -torch.inf
    uniform = torch.rand(400, dtype=torch.float64)
    uniform[:40] = 0.0
    uniform[40:80] = 1 - 2.0**-52
    found = VocabularyBlocks(logits, 0.7).invert(uniform)
    cumulative = (logits.double() / 0.7).softmax(-1).cumsum(-1)
    before = cumulative.gather(-1, (found - 1).clamp_min(0)[:, None]).squeeze(-1)
    after = cumulative.gather(-1, found[:, None]).squeeze(-1)
    assert bool((logits.gather(-1, found[:, None]) > -torch.inf).all())
    assert bool(((found == 0) | (before <= uniform + 1e-6)).all())
    assert bool((after >= uniform - 1e-6).all())


@pytest.mark.parametrize("num_tokens", [20, 129, 1000])
def test_blocks_of_the_vocabulary_find_the_most_likely_tokens(num_tokens: int) -> None:
    torch.manual_seed(4)
    logits = torch.randn(50, num_tokens)
    logits[::2, 3:] = -torch.inf  # fewer possible tokens than asked for
    token_ids, logp = VocabularyBlocks(logits, 1.3).top(16)
    expected = (logits / 1.3).log_softmax(-1)
    torch.testing.assert_close(logp, expected.topk(16).values)
    torch.testing.assert_close(logp, expected.gather(-1, token_ids))
    assert all(len(set(row)) == 16 and max(row) < num_tokens for row in token_ids.tolist())


def test_logits_that_are_not_finite_are_refused_where_they_are_read() -> None:
    logits = torch.tensor([[0.0, torch.nan, 1.0], [0.0, 1.0, 2.0]])
    sampled = sample_tokens(logits, keys(2), 0, params(top_logprobs=2))
    assert 0 <= int(sampled.token_ids.min()) <= int(sampled.token_ids.max()) < 3
    refuse_divergence(sampled.logp[1:])
    with pytest.raises(DivergedError, match=r"training\.learning_rate"):
        refuse_divergence(sampled.logp)
