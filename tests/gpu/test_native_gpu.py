"""The native engine with its kernels, pages and graphs, on a real GPU."""

from pathlib import Path

import pytest
import torch
from scipy import stats

from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.sampling import sampling_logprobs
from trustbatch.types import Completion, GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

PROMPTS = ("12+34=", "9=", "55+44=", "1+1=", "90-12=")


@pytest.fixture(params=["float32", "bfloat16"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path) -> Policy:
    """The tiny model on the GPU."""
    return Policy.load(str(tiny_folder), device="cuda", precision=request.param)


def ask(policy: Policy, *, num_samples: int = 4, **options: object) -> list[GenerationRequest]:
    settings = {"max_tokens": 40, "stop_token_ids": policy.stop_token_ids, **options}
    sampling = SamplingParams(**settings)  # type: ignore[arg-type]
    return [
        GenerationRequest(
            prompt_id=prompt,
            token_ids=tuple(policy.tokenizer.encode(prompt)),
            num_samples=num_samples,
            sampling=sampling,
        )
        for prompt in PROMPTS
    ]


@torch.no_grad()
def recomputed(policy: Policy, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]], device="cuda")
    logits = policy.logits(ids, num_last=len(completion.token_ids) + 1)[0, :-1]
    return sampling_logprobs(logits, request.sampling).cpu()


@pytest.mark.parametrize(
    "options", [{"temperature": 0.6}, {}, {"temperature": 1.2}, {"top_k": 3}, {"top_p": 0.7}]
)
def test_recorded_log_probs(policy: Policy, options: dict[str, float]) -> None:
    requests = ask(policy, top_logprobs=5, **options)
    differences = []
    for number, completion in enumerate(NativeEngine(policy, seed=0).generate(requests)):
        expected = recomputed(policy, requests[number // 4], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        differences.append((completion.behavior_logp - taken).abs())
        assert completion.top_token_ids is not None
        assert completion.top_token_ids.shape[-1] == 5
    mean = float(torch.cat(differences).nan_to_num(posinf=0.0).mean())
    assert mean < (1e-4 if policy.precision == "float32" else 0.03)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.6}, {"temperature": 1.2}, {"top_k": 3}, {"top_p": 0.7}]
)
def test_recorded_anchor(policy: Policy, options: dict[str, float]) -> None:
    """The model's own distribution beside the one sampled from, in eager and in recorded steps."""
    requests = ask(policy, top_logprobs=5, anchor_temperature=1.0, **options)
    plain = ask(policy)
    without = NativeEngine(policy, seed=0).generate(ask(policy, top_logprobs=5, **options))
    differences = []
    for number, completion in enumerate(NativeEngine(policy, seed=0).generate(requests)):
        assert completion.anchor_logp is not None
        assert completion.anchor_top_logp is not None
        assert torch.equal(completion.token_ids, without[number].token_ids)
        assert torch.equal(completion.behavior_logp, without[number].behavior_logp)
        expected = recomputed(policy, plain[number // 4], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        differences.append((completion.anchor_logp - taken).abs())
        top = expected.gather(-1, completion.top_token_ids)
        differences.append((completion.anchor_top_logp - top).abs().flatten())
    assert float(torch.cat(differences).mean()) < (1e-4 if policy.precision == "float32" else 0.03)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.6}, {}, {"temperature": 1.2}, {"top_k": 3}, {"top_p": 0.7}]
)
def test_frequencies_of_eager_and_of_recorded_steps(
    policy: Policy, options: dict[str, float]
) -> None:
    """The first token is sampled after the prompt, the second in a recorded graph."""
    (request, *_) = ask(policy, num_samples=8192, max_tokens=2, stop_token_ids=(), **options)
    sampled = NativeEngine(policy, seed=0).generate([request])
    tokens = torch.stack([completion.token_ids for completion in sampled])
    favorite = int(tokens[:, 0].mode().values)
    example = next(c for c in sampled if int(c.token_ids[0]) == favorite)
    first, second = recomputed(policy, request, example).double().exp()
    for observed, probability in (
        (tokens[:, 0], first),
        (tokens[tokens[:, 0] == favorite, 1], second),
    ):
        counts = torch.bincount(observed, minlength=len(probability)).double()
        expected = probability / probability.sum() * len(observed)
        common = expected >= 5
        assert counts[probability == 0].sum() == 0
        if common.sum() > 1:
            rest = torch.stack([counts[~common].sum(), expected[~common].sum()])
            observed_counts = torch.cat([counts[common], rest[:1]])
            expected_counts = torch.cat([expected[common], rest[1:]])
            kept = expected_counts > 1
            scale = observed_counts[kept].sum() / expected_counts[kept].sum()
            test = stats.chisquare(observed_counts[kept], expected_counts[kept] * scale)
            assert test.pvalue > 1e-4


def test_few_seats_give_the_same_samples_in_float32(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cuda", precision="float32")
    requests = ask(policy, num_samples=8)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0, max_sequences=9)
    for _ in range(2):
        actual = engine.generate(requests)
        same = [
            torch.equal(a.token_ids, b.token_ids) for a, b in zip(actual, expected, strict=True)
        ]
        assert sum(same) >= 0.95 * len(same)  # another batch size may round another way
        engine.sleep()


def test_fp8_is_near_and_not_the_same(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")
    requests = ask(policy)
    differences = []
    for number, completion in enumerate(
        NativeEngine(policy, seed=0, precision="fp8").generate(requests)
    ):
        expected = recomputed(policy, requests[number // 4], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        differences.append((completion.behavior_logp - taken).abs())
    assert 1e-3 < float(torch.cat(differences).mean()) < 0.3


def test_fp8_keys_and_values_are_near_and_not_the_same(policy: Policy) -> None:
    requests = ask(policy, num_samples=8)
    differences = []
    for number, completion in enumerate(
        NativeEngine(policy, seed=0, kv_precision="fp8").generate(requests)
    ):
        expected = recomputed(policy, requests[number // 8], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        differences.append((completion.behavior_logp - taken).abs())
    assert 1e-3 < float(torch.cat(differences).mean()) < 0.3


def test_sleep_gives_the_memory_back(tiny_folder: Path) -> None:
    policy = Policy.load(str(tiny_folder), device="cuda", precision="bfloat16")
    engine = NativeEngine(policy, seed=0)
    engine.generate(ask(policy))  # from here on cuBLAS has its workspaces, which it keeps
    engine.sleep()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    engine.generate(ask(policy, num_samples=100, stop_token_ids=()))
    awake = torch.cuda.memory_allocated()
    engine.sleep()
    assert torch.cuda.memory_allocated() - before < 0.1 * (awake - before)
