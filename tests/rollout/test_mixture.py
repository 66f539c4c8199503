"""Second policies: their samples, sampling distributions, and metrics of a run."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.rollout_files import read_rollouts, rollout_file, rollout_text
from transformers import PreTrainedTokenizerFast

import trustbatch
from trustbatch.build.session import build_session
from trustbatch.cli import main
from trustbatch.config import parse_config
from trustbatch.errors import ConfigError
from trustbatch.loops.session import Session
from trustbatch.models.policy import Policy, same_tokenizer
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.observe.report import write_report
from trustbatch.rollout.mixture import MixedEngine, SecondPolicy, division
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.sampling import policy_seed, sampling_logprobs
from trustbatch.types import Completion, GenerationRequest, SamplingParams

PROMPTS = ("12+34=", "9=", "55+44=")


def save_model(folder: Path, *, tokenizer: PreTrainedTokenizerFast, rows: int = 0) -> Path:
    """Write a random model, with `rows` embeddings where that is not the vocabulary's size."""
    model = build_model(tokenizer, seed=1)
    if rows:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another random model with the same tokenizer."""
    return save_model(tmp_path_factory.mktemp("models") / "other", tokenizer=build_tokenizer())


@pytest.fixture
def other(other_folder: Path) -> Policy:
    return Policy.load(str(other_folder), device="cpu", precision="float32")


def make_requests(policy: Policy, *, num_samples: int = 5, **options: Any) -> list[Any]:
    sampling = SamplingParams(
        max_tokens=8, stop_token_ids=policy.stop_token_ids, top_logprobs=4, **options
    )
    return [
        GenerationRequest(
            prompt_id=prompt,
            token_ids=tuple(policy.tokenizer.encode(prompt)),
            num_samples=num_samples,
            sampling=sampling,
            group=group,
        )
        for group, prompt in enumerate(PROMPTS)
    ]


def second_policy(other: Policy, name: str = "other", **options: Any) -> SecondPolicy:
    other.name = name
    engine = NativeEngine(other, seed=policy_seed(0, name))
    settings: dict[str, Any] = {"share": 0.5, "context_length": other.context_length, **options}
    return SecondPolicy(name=name, engine=engine, **settings)


def by_sample(completions: Sequence[Completion], policy: str) -> dict[tuple[str, int], list[int]]:
    return {
        (c.prompt_id, c.sample): c.token_ids.tolist()
        for c in completions
        if c.provenance.policy == policy
    }


@pytest.mark.parametrize(
    ("shares", "num_samples"),
    [((0.3,), 8), ((0.5,), 8), ((0.5,), 5), ((0.25, 0.1, 0.01), 8), ((0.6, 0.3, 0.1), 7)],
)
def test_shares_are_exact_in_the_long_run(shares: tuple[float, ...], num_samples: int) -> None:
    expected = torch.tensor([1 - sum(shares), *shares], dtype=torch.float64) * num_samples
    groups = [division(shares, num_samples, group=group) for group in range(4000)]
    counts = torch.tensor(groups, dtype=torch.float64)
    assert (counts.sum(dim=1) == num_samples).all()
    # every group has the exact share, rounded down or up
    assert ((counts - expected).abs() < 1).all()
    # and no stretch of groups is more than a few samples off
    number = torch.arange(1, 4001, dtype=torch.float64)[:, None]
    assert ((counts.cumsum(0) - number * expected).abs() <= 5).all()


def test_half_of_an_even_group_and_the_whole_of_it_have_no_remainder() -> None:
    assert {division((0.5,), 8, group=group) for group in range(64)} == {(4, 4)}
    assert {division((1.0,), 3, group=group) for group in range(64)} == {(0, 3)}
    # binary fractions would leave the trained policy a sample now and then
    assert {division((0.6, 0.3, 0.1), 10, group=group) for group in range(64)} == {(0, 6, 3, 1)}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"temperature": 1.4, "top_k": 6, "top_p": 0.8}],
)
def test_behavior_logp_is_the_second_models_own(
    policy: Policy, other: Policy, options: dict[str, Any]
) -> None:
    requests = make_requests(policy, num_samples=6, temperature=1.2)
    completions = MixedEngine(
        NativeEngine(policy, seed=0), [second_policy(other, **options)]
    ).generate(requests)
    own = dataclasses.replace(requests[0].sampling, **options)
    models = {policy.name: (policy, requests[0].sampling), "other": (other, own)}
    seen = set()
    for number, completion in enumerate(completions):
        prompt = requests[number // 6].token_ids
        name = completion.provenance.policy
        model, sampling = models[name]
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = model.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        logp = sampling_logprobs(logits, sampling)
        sampled = logp.gather(-1, completion.token_ids[:, None]).squeeze(-1)
        torch.testing.assert_close(completion.behavior_logp, sampled, rtol=0, atol=1e-5)
        assert completion.top_token_ids is not None
        top = logp.gather(-1, completion.top_token_ids)
        torch.testing.assert_close(completion.behavior_top_logp, top, rtol=0, atol=1e-5)
        provenance = completion.provenance
        assert (provenance.temperature, provenance.top_p, provenance.top_k) == (
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        seen.add(name)
    assert seen == set(models)


def test_samples_come_back_in_order_with_their_indices(policy: Policy, other: Policy) -> None:
    engine = MixedEngine(NativeEngine(policy, seed=0, version=3), [second_policy(other, share=0.3)])
    completions = engine.generate(make_requests(policy, num_samples=5))
    assert [c.prompt_id for c in completions] == [p for p in PROMPTS for _ in range(5)]
    assert [c.sample for c in completions] == [0, 1, 2, 3, 4] * 3
    names = [c.provenance.policy for c in completions]
    assert [names[5 * g : 5 * g + 5].count("other") for g in range(3)] == [
        division((0.3,), 5, group=group)[1] for group in range(3)
    ]
    assert names[0] == policy.name  # the trained policy samples first
    assert {(c.provenance.policy, c.provenance.version) for c in completions} == {
        (policy.name, 3),
        ("other", 0),
    }


def test_a_second_policy_changes_no_other_policys_samples(policy: Policy, other: Policy) -> None:
    requests = make_requests(policy, num_samples=6)
    trained = NativeEngine(policy, seed=0)
    alone = by_sample(trained.generate(requests), policy.name)
    mixed = MixedEngine(trained, [second_policy(other)]).generate(requests)
    kept = by_sample(mixed, policy.name)
    assert len(kept) == 9
    assert all(alone[key] == tokens for key, tokens in kept.items())
    # the second policy's own samples are those it would sample alone
    second = second_policy(other)
    by_itself = by_sample(second.engine.generate(requests), "other")
    sampled = by_sample(mixed, "other")
    assert len(sampled) == 9
    assert all(by_itself[key] == tokens for key, tokens in sampled.items())


def test_policies_do_not_share_random_numbers(policy: Policy, tiny_folder: Path) -> None:
    """The trained model again, as a second policy: samples of equal index differ all the same."""
    twin = Policy.load(str(tiny_folder), device="cpu", precision="float32")
    requests = make_requests(policy, num_samples=6)
    first = by_sample(NativeEngine(policy, seed=0).generate(requests), policy.name)
    sampled = [
        by_sample(second_policy(twin, name).engine.generate(requests), name)
        for name in ("one", "two")
    ]
    assert first != sampled[0]
    assert first != sampled[1]
    assert sampled[0] != sampled[1]
    assert policy_seed(0, "one") != policy_seed(1, "one")


def test_new_weights_reach_the_trained_policy_only(policy: Policy, other: Policy) -> None:
    engine = MixedEngine(NativeEngine(policy, seed=0), [second_policy(other)])
    before = {name: weight.clone() for name, weight in other.named_weights()}
    doubled = [(name, 2 * weight) for name, weight in policy.named_weights()]
    engine.load_weights(doubled, version=9)
    assert engine.version == 9
    assert all(torch.equal(weight, dict(doubled)[n]) for n, weight in policy.named_weights())
    assert all(torch.equal(weight, before[name]) for name, weight in other.named_weights())


def test_a_prompt_too_long_for_a_second_policy_is_named(policy: Policy, other: Policy) -> None:
    engine = MixedEngine(NativeEngine(policy, seed=0), [second_policy(other, context_length=12)])
    with pytest.raises(ConfigError, match=r"'12\+34=' has 6 tokens.* 12 of the second policy"):
        engine.generate(make_requests(policy))


def test_another_vocabulary_is_refused(policy: Policy, tmp_path: Path) -> None:
    more = build_tokenizer()
    more.add_special_tokens({"additional_special_tokens": ["<think>"]})
    longer = Policy.load(str(save_model(tmp_path / "more", tokenizer=more)))
    with pytest.raises(ConfigError) as caught:
        same_tokenizer(longer, policy, top_logprobs=4)
    assert "'<think>' is id 16 there and absent here, the first of 1 that differ" in str(
        caught.value
    )
    folder = save_model(tmp_path / "swapped", tokenizer=build_tokenizer())
    file = folder / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    file.write_text(json.dumps(text))
    with pytest.raises(ConfigError, match=r"'7' is id 10 there and id 9 here, the first of 2"):
        same_tokenizer(Policy.load(str(folder)), policy, top_logprobs=4)


def test_ids_that_the_trained_model_lacks_are_never_sampled(policy: Policy, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "padded", tokenizer=build_tokenizer(), rows=40)
    padded = Policy.load(str(folder), device="cpu", precision="float32")
    plain = NativeEngine(padded, seed=1).generate(make_requests(policy, num_samples=20))
    assert max(int(c.token_ids.max()) for c in plain) >= 16, "the test needs ids that are sampled"
    same_tokenizer(padded, policy, top_logprobs=4)
    requests = make_requests(policy, num_samples=20)
    for number, completion in enumerate(NativeEngine(padded, seed=1).generate(requests)):
        prompt = requests[number // 20].token_ids
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        assert int(ids.max()) < 16
        with torch.no_grad():
            logits = padded.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        assert logits.shape[-1] == 16
        logp = torch.log_softmax(logits, dim=-1).gather(-1, completion.token_ids[:, None])
        torch.testing.assert_close(completion.behavior_logp, logp[:, 0], rtol=0, atol=1e-5)


def test_a_model_smaller_than_its_tokenizer_is_refused(policy: Policy, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "cut", tokenizer=build_tokenizer(), rows=12)
    with pytest.raises(ConfigError, match="embeddings for 12 ids, but its tokenizer has 16"):
        same_tokenizer(Policy.load(str(folder)), policy, top_logprobs=4)


def test_top_logprobs_that_a_second_policy_lacks_are_refused(policy: Policy, other: Policy) -> None:
    policy.model.resize_token_embeddings(32)
    with pytest.raises(ConfigError, match=r"top_logprobs = 20 is more than the 16 ids"):
        same_tokenizer(other, policy, top_logprobs=20)
    same_tokenizer(other, policy, top_logprobs=16)


def tables(
    tiny_folder: Path, folder: Path, policies: list[dict[str, Any]], **changes: Any
) -> dict[str, Any]:
    tree: dict[str, Any] = {
        "model": {"name": str(tiny_folder), "device": "cpu"},
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_tokens": 5,
            "lag": 1,
            "policies": policies,
        },
        "training": {"steps": 6, "learning_rate": 1e-3, "mini_batches": 2},
        "run": {"name": "run", "folder": str(folder), "checkpoint_every": 2},
    }
    for key, value in changes.items():
        tree[key] = {**tree[key], **value}
    return tree


def train(*args: Any, **changes: Any) -> trustbatch.RunResult:
    return trustbatch.train(**tables(*args, **changes))


def mean(result: trustbatch.RunResult, key: str) -> float:
    values = [line[key] for line in result.metrics]
    return sum(values) / len(values)


def test_a_run_with_half_from_another_model(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    half = [{"model": str(other_folder), "share": 0.5, "name": "other", "temperature": 0.9}]
    fresh = {"rollout": {"lag": 0}, "training": {"mini_batches": 1}}
    alone = train(tiny_folder, tmp_path / "alone", [], **fresh)
    mixed = train(tiny_folder, tmp_path / "mixed", half, **fresh)
    assert mean(alone, "one_minus_ess") < 1e-9
    assert mean(mixed, "one_minus_ess") > 0.1
    trained, second = f"policy/{tiny_folder}", "policy/other"
    assert mean(mixed, f"{trained}/one_minus_ess") < 1e-9
    assert mean(mixed, f"{second}/one_minus_ess") > 0.1
    assert mean(mixed, f"{trained}/ratio_mean") == pytest.approx(1.0, abs=1e-5)
    for line in mixed.metrics:
        assert line[f"{trained}/share"] == line[f"{second}/share"] == 0.5
        both = [line[f"{name}/reward"] for name in (trained, second)]
        assert line["reward/mean"] == pytest.approx(sum(both) / 2)
        tokens = [line[f"{name}/tokens"] for name in (trained, second)]
        assert line["tokens/count"] == sum(tokens)
        # a frozen policy does not fall behind
        assert line["rollout/lag_max"] == 0
    assert not any(key.startswith(f"policy/{tiny_folder}") for key in alone.metrics[0])
    rows = read_rollouts(rollout_file(mixed.folder, 6))
    assert [(row["sample"], row["policy"]) for row in rows[:4]] == [
        (0, str(tiny_folder)),
        (1, str(tiny_folder)),
        (2, "other"),
        (3, "other"),
    ]
    assert {row["version"] for row in rows if row["policy"] == "other"} == {0}
    assert {row["version"] for row in rows if row["policy"] != "other"} == {5}
    assert {row["temperature"] for row in rows if row["policy"] == "other"} == {0.9}
    page = write_report([mixed.folder, alone.folder], tmp_path / "report.html").read_text()
    for name in ("other", tiny_folder):
        assert f'<tr><th scope="row">{name}</th><td class="number">0.5</td>' in page
    assert "Policies <small>" not in write_report([alone.folder], tmp_path / "one.html").read_text()


def test_whose_turn_it_is_goes_on_from_step_to_step(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    """Half a sample a step: every other step has one, where each step alone would round alike."""
    quarter = [{"model": str(other_folder), "share": 0.25, "name": "other"}]
    few = {"prompts_per_step": 1, "samples_per_prompt": 2}
    run = {"rollouts_every": 1}
    result = train(tiny_folder, tmp_path, quarter, rollout=few, run=run)
    files = sorted((result.folder / "rollouts").iterdir())
    sampled = [rollout_text(file).count('"policy": "other"') for file in files]
    assert sampled == [1, 0, 1, 0, 1, 0]


def test_a_run_can_be_sampled_by_another_model_alone(
    tiny_folder: Path, other_folder: Path, tmp_path: Path
) -> None:
    result = train(tiny_folder, tmp_path, [{"model": str(other_folder), "share": 1.0}])
    assert len(result.metrics) == 6
    assert "rollout/lag_mean" not in result.metrics[-1]


def test_a_mixed_run_resumes_exactly(tiny_folder: Path, other_folder: Path, tmp_path: Path) -> None:
    policies = [{"model": str(other_folder), "share": 0.3, "name": "other"}]
    whole = train(tiny_folder, tmp_path / "whole", policies)
    first = train(tiny_folder, tmp_path / "cut", policies)
    # back to step 4: its checkpoint holds a pending batch that both policies sampled
    checkpoint = first.folder / "checkpoints" / "step-6"
    checkpoint.rename(checkpoint.with_name(".writing-step-6"))
    config = parse_config(tables(tiny_folder, tmp_path / "cut", policies))
    session: Session = build_session(config)
    session.run.close()
    (pending,) = session.state.pending
    sampled_by = {c.provenance.policy for group in pending.groups for c in group.completions}
    assert sampled_by == {"other", str(tiny_folder)}
    again = train(tiny_folder, tmp_path / "cut", policies)
    for one, two in zip(whole.metrics, again.metrics, strict=True):
        assert {k: v for k, v in one.items() if not k.startswith("time/")} == {
            k: v for k, v in two.items() if not k.startswith("time/")
        }
    texts = [rollout_text(rollout_file(each.folder, 6)) for each in (whole, again)]
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"rollout.policies.0.share was 0.3, now 0.4"):
        train(tiny_folder, tmp_path / "cut", [{**policies[0], "share": 0.4}])


def test_a_session_gives_every_policy_its_own_random_numbers(
    tiny_folder: Path, tmp_path: Path
) -> None:
    twin = [{"model": str(tiny_folder), "share": 0.5, "name": "twin"}]
    session = build_session(parse_config(tables(tiny_folder, tmp_path, twin)))
    session.run.close()
    engine = session.engine
    assert isinstance(engine, MixedEngine)
    requests = make_requests(session.policy, num_samples=6)
    sampled = [c.token_ids.tolist() for c in engine.trained.generate(requests)]
    assert sampled != [c.token_ids.tolist() for c in engine.others[0].engine.generate(requests)]


def test_a_run_with_another_vocabulary_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    more = build_tokenizer()
    more.add_tokens(["x"])
    folder = save_model(tmp_path / "more", tokenizer=more)
    with pytest.raises(ConfigError, match=r"'other' has another vocabulary .*'x' is id 16 there"):
        train(tiny_folder, tmp_path, [{"model": str(folder), "share": 0.5, "name": "other"}])


def test_a_second_policy_that_is_not_there_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    missing = [{"model": str(tmp_path / "nowhere"), "share": 0.5, "name": "other"}]
    with pytest.raises(ConfigError, match=r"The second policy 'other' can't be loaded: .*nowhere"):
        train(tiny_folder, tmp_path, missing)


def test_the_plan_lists_second_policies(
    tiny_folder: Path, other_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    policies = [{"model": str(other_folder), "share": 0.25, "name": "other", "temperature": 0.6}]
    file.write_text(parse_config(tables(tiny_folder, tmp_path, policies)).to_toml())
    assert main(["train", str(file), "--dry-run", "--rollout.policies.0.share=0.3"]) == 0
    printed = capsys.readouterr().out
    assert "share = 0.3" in printed
    assert (
        "policy      other: 30% of samples at temperature 0.6, 330,496 parameters, 1.3 MiB"
        in printed
    )
