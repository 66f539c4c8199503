import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from trustbatch.errors import ConfigError, EngineError
from trustbatch.models.policy import Policy
from trustbatch.rollout.native import batch as batch_module
from trustbatch.rollout.native.cache import CacheFullError
from trustbatch.rollout.native.decoder import LlamaDecoder
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.native.linear import round_rows
from trustbatch.rollout.native.portable_decoder import PortableDecoder
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
def test_behavior_logp_is_that_of_the_distribution_sampled_from(
    policy: Policy, options: dict[str, float]
) -> None:
    requests = make_requests(policy, num_samples=4, top_logprobs=5, **options)
    completions = NativeEngine(policy, seed=0).generate(requests)
    for number, completion in enumerate(completions):
        expected = recomputed(policy, requests[number // 4], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.behavior_logp, taken, rtol=0, atol=1e-5)
        assert completion.top_token_ids is not None
        assert completion.behavior_top_logp is not None
        top = expected.gather(-1, completion.top_token_ids)
        torch.testing.assert_close(completion.behavior_top_logp, top, rtol=0, atol=1e-5)


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
        assert len(completion.behavior_logp) == len(ids)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_provenance_says_who_sampled_the_tokens(policy: Policy) -> None:
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


def test_a_completion_takes_its_own_tokens_to_another_process(policy: Policy) -> None:
    """Tensors that are views are pickled with all that they are views of."""
    few, many = (
        NativeEngine(policy, seed=0).generate(make_requests(policy, PROMPTS[:n], top_logprobs=8))
        for n in (1, 5)
    )
    assert tokens(many)[0] == tokens(few)[0]
    assert len(pickle.dumps(many[0])) == len(pickle.dumps(few[0]))


def test_generation_leaves_no_gradient(policy: Policy) -> None:
    (completion, *_) = NativeEngine(policy, seed=0).generate(make_requests(policy))
    assert not completion.behavior_logp.requires_grad
    assert all(parameter.grad is None for parameter in policy.model.parameters())


@contextmanager
def rounded_to_e4m3(policy: Policy) -> Iterator[None]:
    """Round weights and inputs of every linear layer but the head, within the model's own code."""
    head = policy.model.get_output_embeddings()
    layers = [m for m in policy.model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    before = [layer.weight.detach().clone() for layer in layers]
    hooks = [
        layer.register_forward_pre_hook(lambda _, inputs: (round_rows(inputs[0]),))
        for layer in layers
    ]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(round_rows(layer.weight.bfloat16().float()))
    yield
    with torch.no_grad():
        for layer, weight in zip(layers, before, strict=True):
            layer.weight.copy_(weight)
    for hook in hooks:
        hook.remove()


def test_fp8_rollouts_record_the_rounded_distribution(policy: Policy) -> None:
    requests = make_requests(policy, num_samples=4, temperature=1.2)
    completions = NativeEngine(policy, seed=0, precision="fp8").generate(requests)
    largest = 0.0
    for number, completion in enumerate(completions):
        taken = completion.token_ids[:, None]
        exact = recomputed(policy, requests[number // 4], completion).gather(-1, taken)
        with rounded_to_e4m3(policy):
            rounded = recomputed(policy, requests[number // 4], completion).gather(-1, taken)
        # two orders of summation can fall on two sides of a rounding: a few tokens differ more
        torch.testing.assert_close(completion.behavior_logp, rounded.squeeze(-1), rtol=0, atol=0.02)
        largest = max(largest, float((completion.behavior_logp - exact.squeeze(-1)).abs().max()))
        assert completion.provenance.precision == "fp8"
    assert largest > 0.02


def test_bfloat16_rollouts_of_a_float32_policy(policy: Policy) -> None:
    requests = make_requests(policy, num_samples=4)
    completions = NativeEngine(policy, seed=0, precision="bfloat16").generate(requests)
    differences = []
    for number, completion in enumerate(completions):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logp = recomputed(policy, requests[number // 4], completion)
        taken = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        differences.append((completion.behavior_logp - taken).abs())
    assert 0 < float(torch.cat(differences).max()) < 0.1


MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama-scaled": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


def family_policy(policy: Policy, name: str) -> Policy:
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(0)
    model = model_class(
        config_class(
            vocab_size=len(policy.tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            eos_token_id=policy.stop_token_ids[0],
            **options,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return Policy(model, policy.tokenizer, name=name, precision="float32")


@pytest.mark.parametrize("name", MODELS)
def test_the_family_is_decoded_as_its_own_forward_pass_says(policy: Policy, name: str) -> None:
    other = family_policy(policy, name)
    engine = NativeEngine(other, seed=0)
    assert isinstance(engine._batch.decoder, LlamaDecoder)
    requests = make_requests(other, num_samples=3, max_tokens=40, stop_token_ids=())
    for number, completion in enumerate(engine.generate(requests)):
        expected = recomputed(other, requests[number // 3], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.behavior_logp, taken, rtol=0, atol=1e-5)


def changed_qwen2(policy: Policy, **change: object) -> Policy:
    """A small Qwen2 that differs from the family in something."""
    config = Qwen2Config(
        vocab_size=len(policy.tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=policy.stop_token_ids[0],
        **change,
    )
    return Policy(Qwen2ForCausalLM(config), policy.tokenizer, name="other", precision="float32")


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    ],
)
def test_what_the_fast_decoder_does_not_know_it_leaves_to_the_model(
    policy: Policy, change: dict[str, object]
) -> None:
    other = changed_qwen2(policy, **change)
    engine = NativeEngine(other, seed=0)
    assert isinstance(engine._batch.decoder, PortableDecoder)
    with pytest.raises(ConfigError, match=r"rollout\.precision"):
        NativeEngine(other, seed=0, precision="fp8")
    with pytest.raises(ConfigError, match=r"rollout\.kv_precision"):
        NativeEngine(other, seed=0, kv_precision="fp8")


def test_rows_enter_as_others_leave(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few seats the batch stays full, and every sample is what it is alone."""
    requests = make_requests(policy, num_samples=3, max_tokens=30)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0, max_sequences=6)
    sizes = []
    advance = engine._batch.advance
    monkeypatch.setattr(
        engine._batch,
        "advance",
        lambda *arguments, **options: (
            sizes.append(len(engine._batch.rows)) or advance(*arguments, **options)
        ),
    )
    actual = engine.generate(requests)
    assert tokens(actual) == tokens(expected)
    assert max(sizes) <= 6
    one_group_at_a_time = sum(
        max(len(c.token_ids) for c in expected[3 * n : 3 * n + 3]) for n in range(len(requests))
    )
    assert len(sizes) < one_group_at_a_time


def test_a_full_cache_sends_rows_back_and_they_sample_the_same(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(policy, num_samples=4, max_tokens=20)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0)
    reserve = engine._batch.decoder.reserve
    calls = []

    def sometimes_full(num_steps: int, most_steps: int) -> None:
        calls.append(num_steps)
        if len(calls) in (3, 4, 9):
            raise CacheFullError
        reserve(num_steps, most_steps)

    monkeypatch.setattr(engine._batch.decoder, "reserve", sometimes_full)
    actual = engine.generate(requests)
    assert tokens(actual) == tokens(expected)
    monkeypatch.setattr(
        engine._batch.decoder, "reserve", lambda *_: (_ for _ in ()).throw(CacheFullError)
    )
    with pytest.raises(EngineError, match=r"rollout\.max_tokens"):
        engine.generate(requests)
    monkeypatch.undo()
    assert tokens(engine.generate(requests)) == tokens(expected)


def test_prompts_without_room_are_computed_in_smaller_groups(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(policy, num_samples=4, max_tokens=20)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0, max_sequences=12)
    decoder = engine._batch.decoder
    assert isinstance(decoder, LlamaDecoder)
    layers = decoder._layers
    sizes = []

    def short_of_memory(token_ids: torch.Tensor, attend: Any) -> Any:
        sizes.append(len(token_ids))
        if len(sizes) in (1, 2, 9):
            raise torch.OutOfMemoryError
        return layers(token_ids, attend)

    monkeypatch.setattr(decoder, "_layers", short_of_memory)
    monkeypatch.setattr(engine._batch, "num_steps", 1)
    assert tokens(engine.generate(requests)) == tokens(expected)
    # three prompts of 6, 2 and 6 tokens with all their samples, the first, and that with half
    assert sizes[:3] == [14, 6, 6]


def test_rows_that_had_to_leave_are_not_sampled_again(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is sampled once: a row that comes back continues from what it has."""
    requests = make_requests(policy, num_samples=4, max_tokens=20, stop_token_ids=())
    engine = NativeEngine(policy, seed=0)
    decoder = engine._batch.decoder
    reserve, prefill = decoder.reserve, decoder.prefill
    calls, lengths = [], []

    def sometimes_full(num_steps: int, most_steps: int) -> None:
        calls.append(len(engine._batch.rows))
        if len(calls) in (3, 4, 9, 25):
            raise CacheFullError
        reserve(num_steps, most_steps)

    def note(prompts: Sequence[Sequence[int]], copies: list[int]) -> torch.Tensor:
        lengths.extend(len(prompt) for prompt in prompts)
        return prefill(prompts, copies)

    monkeypatch.setattr(decoder, "reserve", sometimes_full)
    monkeypatch.setattr(decoder, "prefill", note)
    completions = engine.generate(requests)
    assert [len(c.token_ids) for c in completions] == [20] * len(completions)
    num_prefills = len(lengths)
    num_steps = sum(n for i, n in enumerate(calls, start=1) if i not in (3, 4, 9, 25))
    # a prompt's first token is of all its 4 samples; every other prefill gives one more token
    num_returns = num_prefills - len(requests)
    assert num_returns > 5
    assert num_steps + num_returns + 4 * len(requests) == 20 * len(completions)
    assert max(lengths) > 10


def test_requests_beyond_the_context_are_refused(policy: Policy) -> None:
    requests = make_requests(policy, max_tokens=policy.context_length)
    with pytest.raises(ConfigError, match="lower max_tokens"):
        NativeEngine(policy, seed=0).generate(requests)


def test_weights_are_read_anew_for_each_generation(policy: Policy) -> None:
    """The trainer changes parameters in place; nothing old may be left in the engine."""
    engine = NativeEngine(policy, seed=0)
    requests = make_requests(policy)
    engine.generate(requests)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    for number, completion in enumerate(engine.generate(requests)):
        expected = recomputed(policy, requests[number // 3], completion)
        taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.behavior_logp, taken, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options", [{"temperature": 0.6}, {}, {"temperature": 1.2}, {"top_k": 3}, {"top_p": 0.7}]
)
def test_frequencies_of_pairs_follow_their_probabilities(
    policy: Policy, options: dict[str, float]
) -> None:
    """The engine as a whole: what it samples after a prompt, and after its own first token."""
    count = 4000
    (request, *_) = make_requests(
        policy, num_samples=count, max_tokens=2, stop_token_ids=(), **options
    )
    sampled = torch.stack([c.token_ids for c in NativeEngine(policy, seed=0).generate([request])])
    num_tokens = len(policy.tokenizer)
    ids = torch.tensor([[*request.token_ids, token] for token in range(num_tokens)])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[:, -2:]
    first = sampling_logprobs(logits[:1, 0], request.sampling)[0].double().exp()
    second = sampling_logprobs(logits[:, 1], request.sampling).double().exp()
    expected = (first[:, None] * second).flatten() * count
    observed = torch.bincount(sampled[:, 0] * num_tokens + sampled[:, 1], minlength=len(expected))
    assert observed[expected == 0].sum() == 0
    common = expected >= 5
    rare = torch.tensor([float(expected[~common].sum())])
    expected_counts = torch.cat([expected[common], rare])
    observed_counts = torch.cat([observed[common], observed[~common].sum()[None]])
    kept = expected_counts > 0.5
    scale = observed_counts[kept].sum() / expected_counts[kept].sum()
    test = stats.chisquare(observed_counts[kept].numpy(), (expected_counts[kept] * scale).numpy())
    assert test.pvalue > 1e-4


def test_nothing_is_read_that_nothing_wrote(policy: Policy) -> None:
    """Torch fills new memory with NaN; rows of unequal age must not see it."""
    requests = make_requests(policy, num_samples=3, max_tokens=30)
    expected = NativeEngine(policy, seed=0).generate(requests)
    torch.use_deterministic_algorithms(True)
    try:
        actual = NativeEngine(policy, seed=0, max_sequences=6).generate(requests)
    finally:
        torch.use_deterministic_algorithms(False)
    assert tokens(actual) == tokens(expected)


def test_a_model_with_its_own_forward_pass_takes_prompts_in_several_passes(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = changed_qwen2(policy, hidden_act="gelu")
    requests = make_requests(other)
    expected = NativeEngine(other, seed=0).generate(requests)
    monkeypatch.setattr(PortableDecoder, "prefill_tokens", 8)
    assert tokens(NativeEngine(other, seed=0).generate(requests)) == tokens(expected)


@pytest.mark.parametrize("num_seats", [1, 3, 7])
def test_groups_enter_in_parts_where_memory_is_short(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, num_seats: int
) -> None:
    requests = make_requests(policy, num_samples=5, max_tokens=9)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0)
    prefill = engine._batch.decoder.prefill

    def short_of_memory(prompts: Sequence[Sequence[int]], copies: list[int]) -> torch.Tensor:
        if len(engine._batch.rows) + sum(copies) > num_seats:
            raise CacheFullError
        return prefill(prompts, copies)

    monkeypatch.setattr(engine._batch.decoder, "prefill", short_of_memory)
    assert tokens(engine.generate(requests)) == tokens(expected)


def test_one_token_is_enough(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the token after the prompt is the last, no step is made: none has room reserved."""
    engine = NativeEngine(policy, seed=0)
    monkeypatch.setattr(engine._batch, "advance", None)
    sampled = engine.generate(make_requests(policy, max_tokens=1))
    assert {len(completion.token_ids) for completion in sampled} == {1}


def test_a_context_gets_the_memory_of_pages_that_no_row_holds(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = make_requests(policy, num_samples=2, max_tokens=9)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0)
    prefill, clear = engine._batch.decoder.prefill, engine._batch.decoder.clear
    cleared: list[int] = []

    def full_of_free_pages(prompts: Sequence[Sequence[int]], copies: list[int]) -> torch.Tensor:
        if not cleared:
            raise CacheFullError
        return prefill(prompts, copies)

    def note() -> None:
        cleared.append(1)
        clear()

    monkeypatch.setattr(engine._batch.decoder, "prefill", full_of_free_pages)
    monkeypatch.setattr(engine._batch.decoder, "clear", note)
    assert tokens(engine.generate(requests)) == tokens(expected)


def test_rows_stay_where_they_are_if_a_graph_finds_no_memory(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph here takes its step each time it is replayed; its capture takes one too."""
    requests = make_requests(policy, num_samples=4, max_tokens=12)
    expected = NativeEngine(policy, seed=0).generate(requests)
    engine = NativeEngine(policy, seed=0)
    batch = engine._batch
    none = batch_module._no_tokens(batch.device)
    batch.buffer = batch_module._TokenBuffer(none, 2, batch.max_rows)
    captures: list[int] = []

    @contextmanager
    def capture(graph: object, pool: object) -> Iterator[None]:
        captures.append(1)
        if len(captures) == 2:
            raise torch.OutOfMemoryError
        yield

    stream = SimpleNamespace(wait_stream=lambda other: None)
    replay = SimpleNamespace(
        replay=lambda: batch._step(len(batch.rows), requests[0].sampling), pool=lambda: None
    )
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: replay)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(batch_module, "padded_rows", lambda num_rows: num_rows)
    monkeypatch.setattr(batch, "_warm_up_stream", stream, raising=False)
    monkeypatch.setattr(batch.decoder, "uses_cuda_graphs", True)
    assert tokens(engine.generate(requests)) == tokens(expected)
    assert len(captures) > 2
