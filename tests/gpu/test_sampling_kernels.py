"""The kernel that samples against plain torch; TRITON_INTERPRET=1 runs it without a GPU."""

import os

import pytest
import torch

from trustbatch.errors import DivergedError
from trustbatch.rollout.sampling import (
    GOLDEN,
    MIX_1,
    MIX_2,
    MOST_IN_KERNEL,
    SampledTokens,
    refuse_divergence,
    sample_in_torch,
    sample_key,
    sample_tokens,
    uniforms,
)
from trustbatch.rollout.token_blocks import BLOCK
from trustbatch.types import SamplingParams

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")

if not INTERPRETED and not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)
pytest.importorskip("triton")

from trustbatch.rollout.native.sampling_kernels import sample_rows  # noqa: E402

pytestmark = pytest.mark.gpu
on_a_gpu = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

QWEN = 151_936
OPTIONS = [
    {"temperature": 1.0, "top_logprobs": 16},
    {"temperature": 0.6, "top_logprobs": 16, "anchor_temperature": 1.0},
    {"temperature": 1.2, "top_logprobs": 5, "logprob_mode": "raw"},
    {"temperature": 0.6, "logprob_mode": "raw", "anchor_temperature": 1.2, "top_logprobs": 1},
    {"temperature": 1.2, "anchor_temperature": 1.0},
    {"temperature": 1.0, "logprob_mode": "raw"},
]


def params(**options: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, stop_token_ids=(0,), **options)  # type: ignore[arg-type]


def some_keys(count: int) -> torch.Tensor:
    return torch.tensor([sample_key(0, 0, "prompt", number) for number in range(count)]).to(DEVICE)


def some_logits(num_rows: int, num_tokens: int) -> torch.Tensor:
    """Multiples of 1/8, so that many are equal; peaked rows; excluded tokens and blocks."""
    torch.manual_seed(num_tokens)
    logits = (torch.randn(num_rows, num_tokens) * 32).round() / 8
    logits[1::4, num_tokens // 2] = 30.0
    logits[2::4, 5 : num_tokens - 3] = -torch.inf
    logits[3::4, ::3] = -torch.inf
    return logits.to(DEVICE)


def keys_of(numbers: list[float], position: int) -> torch.Tensor:
    """Keys whose random number at a position is the given one: SplitMix64 backwards."""
    mask = 2**64 - 1
    keys = []
    for number in numbers:
        z = int(number * 2**52) << 12
        for bits, factor in ((31, MIX_2), (27, MIX_1), (30, None)):
            z ^= (z >> bits) ^ (z >> 2 * bits)
            if factor is not None:
                z = z * pow(factor, -1, 2**64) & mask
        z = (z - (position + 1) * GOLDEN) & mask
        keys.append(z - 2**64 if z >= 2**63 else z)
    return torch.tensor(keys, device=DEVICE)


def check(
    found: SampledTokens,
    logits: torch.Tensor,
    keys: torch.Tensor,
    position: int | torch.Tensor,
    options: SamplingParams,
) -> None:
    """Tokens and log-probs are those of plain torch, and of the distribution in float64."""
    expected = sample_in_torch(logits, keys, position, options)
    assert found.tensors().keys() == expected.tensors().keys()
    for name, part in expected.tensors().items():
        assert getattr(found, name).dtype == part.dtype
    tokens = found.token_ids[:, None]
    assert int((found.token_ids != expected.token_ids).sum()) <= len(logits) / 100
    # where sums are rounded differently, the number is at the edge of the token that was taken
    cumulative = (logits.double() / options.temperature).softmax(-1).cumsum(-1)
    uniform = uniforms(keys, position)[:, None]
    before = cumulative.gather(-1, (tokens - 1).clamp_min(0)).masked_fill(tokens == 0, 0.0)
    assert bool((before <= uniform + 1e-6).all())
    assert bool((cumulative.gather(-1, tokens) >= uniform - 1e-6).all())
    recorded = 1.0 if options.logprob_mode == "raw" else options.temperature
    logp = (logits.double() / recorded).log_softmax(-1)
    close(found.logp, logp.gather(-1, tokens).squeeze(-1))
    assert bool(found.logp.isfinite().all())
    top = None
    if options.top_logprobs:
        order = logits.float().sort(dim=-1, descending=True, stable=True).indices
        top = order[:, : options.top_logprobs]
        assert found.top_token_ids is not None
        assert found.top_logp is not None
        assert torch.equal(found.top_token_ids, top)
        close(found.top_logp, logp.gather(-1, top))
    if options.records_anchor:
        assert options.anchor_temperature is not None
        anchor = (logits.double() / options.anchor_temperature).log_softmax(-1)
        assert found.anchor_logp is not None
        close(found.anchor_logp, anchor.gather(-1, tokens).squeeze(-1))
        if top is not None:
            assert found.anchor_top_logp is not None
            close(found.anchor_top_logp, anchor.gather(-1, top))


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("num_tokens", [128, 130, 1000, QWEN])
def test_rows_are_sampled_as_in_torch(num_tokens: int, options: dict[str, object]) -> None:
    num_rows = (4 if num_tokens == QWEN else 8) if INTERPRETED else 200
    logits, keys = some_logits(num_rows, num_tokens), some_keys(num_rows)
    position = torch.arange(num_rows, device=DEVICE) * 100
    found = sample_rows(logits, keys, position, params(**options))
    check(found, logits, keys, position, params(**options))


def test_as_many_most_likely_tokens_as_the_kernel_sorts_and_a_position_for_all() -> None:
    logits, keys = some_logits(4, 700) / 8, some_keys(8)[::2]
    options = params(top_logprobs=MOST_IN_KERNEL)
    check(sample_rows(logits, keys, 7, options), logits, keys, 7, options)


def test_a_vocabulary_smaller_than_the_most_likely_tokens_asked_for() -> None:
    logits, keys = some_logits(4, 11), some_keys(4)
    options = params(top_logprobs=MOST_IN_KERNEL)
    check(sample_rows(logits, keys, 0, options), logits, keys, 0, options)


@on_a_gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_logits_in_bfloat16(options: dict[str, object]) -> None:
    logits, keys = some_logits(64, QWEN).bfloat16(), some_keys(64)
    check(sample_rows(logits, keys, 3, params(**options)), logits, keys, 3, params(**options))


def test_edges_belong_to_the_token_that_begins_there() -> None:
    """256 equal tokens in two of four blocks, at numbers that float64 has exactly."""
    logits = torch.full((1, 512), -torch.inf, device=DEVICE)
    logits[:, 64:192] = logits[:, 320:448] = 1.5
    tokens = [0, 1, 63, 64, 65, 127, 128, 129, 200, 255]
    numbers = [token / 256 for token in tokens] + [(token + 1) / 256 - 2**-52 for token in tokens]
    keys = keys_of(numbers, position=9)
    assert uniforms(keys, 9).tolist() == numbers
    found = sample_rows(logits.expand(len(keys), 512), keys, 9, params())
    places = [64 + token if token < 128 else 192 + token for token in tokens]
    assert found.token_ids.tolist() == places * 2


def test_tokens_without_probability_are_never_sampled() -> None:
    logits = torch.full((4, 300), -torch.inf, device=DEVICE)
    logits[:, 140:250] = 0.0
    logits[2:, 140] = 90.0  # the sums of all others are below its rounding
    keys = keys_of([0.0, 1 - 2**-52] * 2, position=0)
    found = sample_rows(logits, keys, 0, params())
    assert found.token_ids.tolist() == [140, 249, 140, 140]


def test_rounding_leads_to_no_token_that_is_next_to_impossible() -> None:
    torch.manual_seed(0)
    logits = torch.randn(8, 128, device=DEVICE)
    logits[:, -1] = -60
    found = sample_rows(logits, keys_of([1 - 2**-52] * 8, position=0), 0, params())
    assert int(found.token_ids.max()) < 127


def test_blocks_whose_largest_logits_are_both_zeros_are_equal() -> None:
    logits = torch.full((1, 3 * BLOCK), -5.0, device=DEVICE)
    logits[0, 7], logits[0, BLOCK + 2], logits[0, 2 * BLOCK] = -0.0, 0.0, 0.0
    found = sample_rows(logits, some_keys(1), 0, params(top_logprobs=2))
    assert found.top_token_ids is not None
    assert found.top_token_ids.tolist() == [[7, BLOCK + 2]]


@pytest.mark.parametrize("num_tokens", [20, 300])
@pytest.mark.parametrize("top_logprobs", [1, 4])
def test_logits_that_are_not_finite_reach_the_host(num_tokens: int, top_logprobs: int) -> None:
    logits, keys = some_logits(6, num_tokens).nan_to_num(neginf=-3.0), some_keys(6)
    options = params(temperature=0.7, top_logprobs=top_logprobs, anchor_temperature=1.0)
    healthy = sample_rows(logits, keys, 0, options)
    refuse_divergence(healthy.logp)
    logits[1, 4] = torch.nan
    logits[2] = -torch.inf
    logits[3, -1] = torch.inf
    logits[4, num_tokens // BLOCK * BLOCK :] = torch.nan
    logits[5] = -torch.nan
    found = sample_rows(logits, keys, 0, options)
    for name, part in found.tensors().items():
        assert torch.equal(part[0], getattr(healthy, name)[0])
        if "ids" in name:
            assert 0 <= int(part.min()) <= int(part.max()) < num_tokens
    assert found.logp[1:].isnan().all()
    with pytest.raises(DivergedError, match=r"training\.learning_rate"):
        refuse_divergence(found.logp)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, keys = some_logits(7, 1000), some_keys(7)
    options = params(temperature=0.8, top_logprobs=16, anchor_temperature=1.0)
    found = sample_rows(logits, keys, 5, options)
    for rows in (slice(0, 1), slice(4, 7)):
        alone = sample_rows(logits[rows], keys[rows], 5, options)
        for name, part in alone.tensors().items():
            assert torch.equal(part, getattr(found, name)[rows]), name


@on_a_gpu
def test_sampling_in_a_cuda_graph() -> None:
    logits, keys = some_logits(40, QWEN), some_keys(40)
    position = torch.zeros(40, dtype=torch.long, device=DEVICE)
    options = params(temperature=0.6, top_logprobs=16, anchor_temperature=1.0)
    sample_tokens(logits, keys, position, options)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = sample_tokens(logits, keys, position, options)
    for step in range(3):
        logits.copy_(logits.flip(0))
        position.fill_(step)
        graph.replay()
        check(recorded, logits, keys, position, options)


@on_a_gpu
@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.7}, {"top_logprobs": 40}], ids=str
)
def test_other_parameters_stay_in_torch(options: dict[str, object]) -> None:
    logits, keys = some_logits(10, 1000), some_keys(10)
    found = sample_tokens(logits, keys, 0, params(**options))
    for name, part in sample_in_torch(logits, keys, 0, params(**options)).tensors().items():
        assert torch.equal(getattr(found, name), part)
