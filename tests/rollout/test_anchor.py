"""The anchor: the model that sampled a token, before temperature and truncation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_native_engine import make_requests, recomputed
from tests.support.episode_cases import episodes
from tests.support.own_task import Indifferent

import trustbatch
from trustbatch.models.policy import Policy
from trustbatch.rollout.mixture import MixedEngine, SecondPolicy
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.native.portable_decoder import PortableDecoder
from trustbatch.rollout.records import group_from_record, group_to_record
from trustbatch.types import Completion, SamplingParams

DIFFERENT = [
    {"temperature": 1.2},
    {"temperature": 0.6},
    {"top_p": 0.7},
    {"top_k": 3},
    {"temperature": 1.2, "top_k": 6, "top_p": 0.8},
]
every_sampling = pytest.mark.parametrize("options", DIFFERENT, ids=str)


def check(policy: Policy, requests: list[Any], completions: list[Completion], atol: float) -> None:
    """Compare both recorded distributions with plain forward passes of the policy."""
    for number, completion in enumerate(completions):
        request = requests[number // requests[0].num_samples]
        plain = SamplingParams(
            max_tokens=1, stop_token_ids=(), temperature=request.sampling.anchor_temperature
        )
        sampler = recomputed(policy, request, completion)
        anchor = recomputed(policy, replace(request, sampling=plain), completion)
        for logp, top_logp, expected in (
            (completion.behavior_logp, completion.behavior_top_logp, sampler),
            (completion.anchor_logp, completion.anchor_top_logp, anchor),
        ):
            assert logp is not None
            assert top_logp is not None
            taken = expected.gather(-1, completion.token_ids[:, None]).squeeze(-1)
            top = expected.gather(-1, completion.top_token_ids)
            torch.testing.assert_close(logp, taken, rtol=0, atol=atol)
            torch.testing.assert_close(top_logp, top, rtol=0, atol=atol)
        likely = anchor.topk(5, dim=-1).values
        torch.testing.assert_close(completion.anchor_top_logp, likely, rtol=0, atol=atol)


@every_sampling
@pytest.mark.parametrize("anchor_temperature", [1.0, 0.8])
@pytest.mark.parametrize("portable", [False, True], ids=["fast", "portable"])
def test_the_native_engine_records_sampler_and_anchor(
    policy: Policy,
    options: dict[str, Any],
    anchor_temperature: float,
    portable: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if portable:
        monkeypatch.setattr("trustbatch.rollout.native.engine.read_architecture", lambda _: None)
    settings = {"num_samples": 4, "top_logprobs": 5, **options}
    requests = make_requests(policy, anchor_temperature=anchor_temperature, **settings)
    # few seats: rows enter while others run
    engine = NativeEngine(policy, seed=0, max_sequences=6)
    assert isinstance(engine._batch.decoder, PortableDecoder) == portable
    completions = engine.generate(requests)
    check(policy, requests, completions, atol=1e-5)
    alone = NativeEngine(policy, seed=0).generate(make_requests(policy, **settings))
    for one, other in zip(
        completions, alone, strict=True
    ):  # and samples what it would sample anyway
        assert torch.equal(one.token_ids, other.token_ids)
        assert other.anchor_logp is None
        assert other.anchor_top_logp is None


def test_fp8_rollouts_are_anchored_to_the_rounded_model(policy: Policy) -> None:
    options = {"num_samples": 4, "top_logprobs": 5, "max_tokens": 1}
    warm = make_requests(policy, temperature=1.2, anchor_temperature=1.0, **options)
    sampled = NativeEngine(policy, seed=0, precision="fp8").generate(warm)
    rounded = NativeEngine(policy, seed=0, precision="fp8").generate(
        make_requests(policy, **options)
    )
    exact = NativeEngine(policy, seed=0).generate(make_requests(policy, **options))
    for completion, same, other in zip(sampled, rounded, exact, strict=True):
        assert torch.equal(completion.anchor_top_logp, same.behavior_top_logp)
        assert not torch.equal(completion.anchor_top_logp, other.behavior_top_logp)


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_nothing_more_is_recorded_where_both_are_the_same(policy: Policy, mode: str) -> None:
    requests = make_requests(policy, top_logprobs=5, anchor_temperature=1.0, logprob_mode=mode)
    for completion in NativeEngine(policy, seed=0).generate(requests):
        assert completion.anchor_logp is None
        assert completion.anchor_top_logp is None


def test_raw_records_need_an_anchor_only_at_another_policy_temperature() -> None:
    raw = SamplingParams(
        max_tokens=1, stop_token_ids=(), temperature=0.6, top_p=0.9, logprob_mode="raw"
    )
    assert not raw.records_anchor
    assert not replace(raw, anchor_temperature=1.0).records_anchor
    assert replace(raw, anchor_temperature=0.6).records_anchor


def test_a_second_policy_is_its_own_anchor(policy: Policy, tiny_folder: Path) -> None:
    other = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.1)
    second = SecondPolicy(
        name="other",
        engine=NativeEngine(other, seed=1),
        share=0.5,
        context_length=other.context_length,
        temperature=0.7,
    )
    requests = make_requests(policy, num_samples=4, top_logprobs=5, anchor_temperature=1.0)
    completions = MixedEngine(NativeEngine(policy, seed=0), [second]).generate(requests)
    own = [each for each in completions if each.sample < 2]
    foreign = [each for each in completions if each.sample >= 2]
    assert all(each.anchor_logp is None for each in own)  # sampled at temperature 1
    asked = [replace(r, num_samples=2, sampling=second.sampling(r.sampling)) for r in requests]
    check(other, asked, foreign, atol=1e-5)


def test_an_episode_keeps_the_anchor_of_every_turn_through_a_record(policy: Policy) -> None:
    with_anchor = episodes(policy, top_logprobs=3, anchor_temperature=1.0)
    tempered = episodes(policy, top_logprobs=3)
    assert any(len(c.turns) > 1 for group in with_anchor for c in group.completions)
    for group, other in zip(with_anchor, tempered, strict=True):
        restored = group_from_record(group_to_record(group))
        for completion, back, plain in zip(
            group.completions, restored.completions, other.completions, strict=True
        ):
            assert torch.equal(completion.token_ids, plain.token_ids)
            assert completion.anchor_logp is not None
            assert completion.anchor_top_logp is not None
            assert len(completion.anchor_logp) == len(completion.token_ids)
            assert completion.anchor_top_logp.shape == (len(completion.token_ids), 3)
            own = completion.of_policy(completion.anchor_logp)
            assert not torch.equal(own, completion.of_policy(completion.behavior_logp))
            assert torch.equal(completion.anchor_logp, back.anchor_logp)
            assert torch.equal(completion.anchor_top_logp, back.anchor_top_logp)


def entropy_drift(
    folder: Path, tmp_path: Path, rollout: dict[str, Any], objective: dict[str, str] | None = None
) -> float:
    """Return how far 20 steps of training on nothing but the policy's samples move its entropy."""
    tables = {} if objective is None else {"objective": objective}
    result = trustbatch.train(
        model={"name": str(folder), "device": "cpu"},
        task=Indifferent(),
        rollout={"prompts_per_step": 8, "samples_per_prompt": 4, "max_tokens": 12, **rollout},
        training={"steps": 20, "mini_batches": 4, "learning_rate": 1e-4},
        run={"folder": str(tmp_path), "name": "run", "checkpoint_every": 20},
        **tables,
    )
    curve = [row["entropy"] for row in result.metrics]
    # of several steps: it differs from prompt to prompt
    return abs(sum(curve[-4:]) - sum(curve[:4])) / 4


every_mismatch = pytest.mark.parametrize(
    "rollout", [{"temperature": 1.2}, {"temperature": 0.6}, {"top_p": 0.9}], ids=str
)


@every_mismatch
def test_sampling_alone_moves_nothing(
    tiny_folder: Path, tmp_path: Path, rollout: dict[str, Any]
) -> None:
    assert entropy_drift(tiny_folder, tmp_path, rollout) < 0.1


@every_mismatch
def test_sampling_alone_moves_a_policy_that_is_pulled_to_the_sampler(
    tiny_folder: Path, tmp_path: Path, rollout: dict[str, Any]
) -> None:
    objective = {"name": "p3o", "anchor": "sampler"}
    assert entropy_drift(tiny_folder, tmp_path, rollout, objective) > 0.25
