"""In-flight updates: a completion may span versions, and each of its tokens knows its own."""

import json
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.processes import kill_meanwhile
from tests.support.rollout_files import read_rollouts, rollout_file
from tests.support.training_cases import make_trainer, policy_logp
from torch import Tensor

import trustbatch
from trustbatch.checkpoints.load import restore
from trustbatch.checkpoints.loop_state import Cursor, LoopState
from trustbatch.checkpoints.save import Checkpointer
from trustbatch.cluster.ray_runtime import joined_ray
from trustbatch.config import parse_config
from trustbatch.errors import CanaryError, ConfigError, EngineError
from trustbatch.loops.producer import refuse_too_old
from trustbatch.models.policy import Policy
from trustbatch.observe.completion_log import readable_record
from trustbatch.observe.rollout_metrics import rollout_metrics
from trustbatch.rollout.episodes import EncodedReply, Episode
from trustbatch.rollout.native import engine as native_engine
from trustbatch.rollout.native.cache import CacheFullError
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.rollout.sampling import sample_key, sampling_logprobs, uniforms
from trustbatch.training.canary import CanaryRecorder
from trustbatch.training.lag_metrics import (
    COMPLETIONS_BY_LAG,
    ONE_MINUS_ESS_BY_LAG,
    values_by_lag,
)
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Grade,
    Prompt,
    RolloutBatch,
    RolloutGroup,
    SamplingParams,
    TrainSequence,
)

PROMPTS = ("12+34=", "9=", "55+44=", "1+1=")
NUM_SAMPLES = 3


class Offered:
    """Offers versions to an engine, each once it has asked so many times."""

    def __init__(self, engine: NativeEngine, plan: dict[int, int]) -> None:
        self.engine = engine
        self.plan = plan
        self.num_asked = 0
        self.weights = {
            version: {name: value * stretch(version) for name, value in _weights(engine).items()}
            for version in (0, *plan.values())
        }

    def has_newer(self, version: int) -> bool:
        self.num_asked += 1
        return self._newest() > version

    def apply(self) -> None:
        self.load(self._newest())

    def load(self, version: int) -> None:
        self.engine.load_weights(self.weights[version].items(), version)

    def _newest(self) -> int:
        return max((new for at, new in self.plan.items() if self.num_asked >= at), default=0)


def stretch(version: int) -> float:
    return 1.0 + 0.05 * version


def _weights(engine: NativeEngine) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in engine.policy.named_weights()}


def make_requests(policy: Policy, **options: Any) -> list[GenerationRequest]:
    settings = {"max_tokens": 24, "stop_token_ids": policy.stop_token_ids, **options}
    return [
        GenerationRequest(
            prompt_id=prompt,
            token_ids=tuple(policy.tokenizer.encode(prompt)),
            num_samples=NUM_SAMPLES,
            sampling=SamplingParams(**settings),
        )
        for prompt in PROMPTS
    ]


@torch.no_grad()
def recomputed(
    offered: Offered, request: GenerationRequest, completion: Completion, version: int
) -> Tensor:
    """Log-probs [n, V] that a version gives to all that could be sampled, from a plain pass."""
    offered.load(version)
    ids = torch.tensor([[*request.token_ids, *completion.token_ids.tolist()]])
    logits = offered.engine.policy.model(input_ids=ids).logits[0, len(request.token_ids) - 1 : -1]
    return sampling_logprobs(logits, request.sampling)


def assert_each_token_is_its_versions(
    offered: Offered, requests: list[GenerationRequest], completions: list[Completion]
) -> None:
    """Log-probs, and the random numbers that chose the tokens, are those of the token's version."""
    for number, completion in enumerate(completions):
        request = requests[number // NUM_SAMPLES]
        versions = completion.version_of_token
        assert len(versions) == len(completion.token_ids)
        assert completion.provenance.version == versions[0]
        assert (versions.diff() >= 0).all()
        assert (completion.versions is None) == (versions.unique().numel() == 1)
        for version in completion.all_versions:
            own = versions == version
            logp = recomputed(offered, request, completion, version)[own]
            token_ids = completion.token_ids[own][:, None]
            expected = logp.gather(-1, token_ids).squeeze(-1)
            actual = completion.behavior_logp[own]
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
            top = completion.behavior_top_logp
            assert top is not None
            expected_top = logp.sort(-1, descending=True).values[:, : top.shape[1]]
            torch.testing.assert_close(top[own], expected_top, rtol=0, atol=1e-5)
            key = sample_key(0, version, request.prompt_id, completion.sample)
            places = own.nonzero().squeeze(-1)
            chosen_by = uniforms(torch.full_like(places, key), places)
            below = logp.double().exp().cumsum(-1).gather(-1, token_ids).squeeze(-1)
            assert (chosen_by <= below + 1e-5).all()
            assert (chosen_by >= below - expected.double().exp() - 1e-5).all()


@pytest.mark.parametrize("decoder", ["llama", "portable"])
def test_every_token_is_sampled_by_its_own_version_after_the_whole_prefix(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    if decoder == "portable":
        monkeypatch.setattr(native_engine, "read_architecture", lambda _: None)
    engine = NativeEngine(policy, seed=0, max_sequences=7)
    # the second half waits until the first, sampled in another way, has ended
    requests = make_requests(policy, top_logprobs=3)[:2]
    requests += make_requests(policy, top_logprobs=3, temperature=0.8, stop_token_ids=())[2:]
    offered = Offered(engine, {4: 1, 7: 3, 30: 4})
    engine.newer_weights = offered
    completions = engine.generate(requests)
    engine.newer_weights = None
    assert_each_token_is_its_versions(offered, requests, completions)
    assert {tuple(c.all_versions) for c in completions} >= {(0, 1, 3), (3, 4)}


@pytest.mark.parametrize("how", ["float32", "fp8", "portable"])
def test_a_version_goes_on_as_if_it_were_asked_to_continue(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Nothing of the old version is left: no keys and values, no rounded image of its weights."""
    if how == "portable":
        monkeypatch.setattr(native_engine, "read_architecture", lambda _: None)
    precision = how if how != "portable" else "auto"
    sampling = SamplingParams(
        max_tokens=12, stop_token_ids=(), temperature=0.0, logprob_mode="raw"
    )  # greedy: without random numbers, so that both sample the same
    (request,) = [
        replace(each, sampling=sampling, num_samples=1) for each in make_requests(policy)[:1]
    ]
    engine = NativeEngine(policy, seed=0, precision=precision)
    engine.newer_weights = Offered(engine, {5: 7})
    (completion,) = engine.generate([request])
    assert completion.versions is not None
    num_old = completion.versions.tolist().count(0)
    assert 0 < num_old < 12
    fresh = NativeEngine(policy, seed=0, version=7, precision=precision)
    old = tuple(completion.token_ids[:num_old].tolist())
    (rest,) = fresh.generate(
        [
            replace(
                request,
                token_ids=request.token_ids + old,
                sampling=replace(sampling, max_tokens=12 - num_old),
            )
        ]
    )
    assert torch.equal(completion.token_ids[num_old:], rest.token_ids)
    assert torch.equal(completion.behavior_logp[num_old:], rest.behavior_logp)


def test_without_an_offer_nothing_changes(policy: Policy) -> None:
    requests = make_requests(policy, top_logprobs=3)
    expected = NativeEngine(policy, seed=0, max_sequences=7).generate(requests)
    engine = NativeEngine(policy, seed=0, max_sequences=7)
    engine.newer_weights = Offered(engine, {})
    actual = engine.generate(requests)
    assert engine.newer_weights.num_asked > 20
    for mine, other in zip(actual, expected, strict=True):
        assert mine.versions is None
        for name in ("token_ids", "behavior_logp", "top_token_ids", "behavior_top_logp"):
            assert torch.equal(getattr(mine, name), getattr(other, name))


def test_rows_sent_back_for_memory_keep_what_older_versions_sampled(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = NativeEngine(policy, seed=0)
    requests = make_requests(policy, top_logprobs=2, stop_token_ids=())
    reserve = engine._batch.decoder.reserve
    offered = Offered(engine, {4: 1, 12: 2})

    def sometimes_full(num_steps: int, most_steps: int) -> None:
        if offered.num_asked in (2, 6, 7, 14):
            raise CacheFullError
        reserve(num_steps, most_steps)

    monkeypatch.setattr(engine._batch.decoder, "reserve", sometimes_full)
    engine.newer_weights = offered
    completions = engine.generate(requests)
    engine.newer_weights = None
    assert_each_token_is_its_versions(offered, requests, completions)
    assert {len(c.token_ids) for c in completions} == {24}
    assert (0, 1, 2) in {tuple(c.all_versions) for c in completions}


@pytest.fixture
def spanning(policy: Policy) -> tuple[list[RolloutGroup], Offered]:
    """Graded groups of which many completions are by versions 0, 1 and 3."""
    engine = NativeEngine(policy, seed=0)
    offered = Offered(engine, {3: 1, 6: 3})
    engine.newer_weights = offered
    requests = make_requests(policy)
    completions = engine.generate(requests)
    engine.newer_weights = None
    groups = [
        RolloutGroup(
            prompt=Prompt(id=request.prompt_id, text=request.prompt_id, answer=""),
            prompt_token_ids=request.token_ids,
            completions=tuple(completions[number * NUM_SAMPLES : (number + 1) * NUM_SAMPLES]),
            grades=(Grade(reward=0.0),) * NUM_SAMPLES,
        )
        for number, request in enumerate(requests)
    ]
    return groups, offered


def test_versions_survive_a_checkpoint(
    policy: Policy, spanning: tuple[list[RolloutGroup], Offered], tmp_path: Path
) -> None:
    groups, _ = spanning
    trainer = make_trainer(policy)
    checkpointer = Checkpointer(tmp_path, trainer, keep=1)
    pending, spare = groups[:2], groups[2:]
    batch = RolloutBatch(groups=pending)
    checkpointer.save(LoopState(step=3, cursor=Cursor(spare=tuple(spare)), pending=deque([batch])))
    checkpointer.finish()
    state = restore(tmp_path / "step-3", trainer)
    restored_groups = [*state.pending[0].groups, *state.cursor.spare]
    restored = [c for group in restored_groups for c in group.completions]
    saved = [c for group in groups for c in group.completions]
    assert sum(c.versions is not None for c in saved) > 3
    for mine, other in zip(restored, saved, strict=True):
        assert mine.provenance == other.provenance
        assert torch.equal(mine.behavior_logp, other.behavior_logp)
        if other.versions is None:
            assert mine.versions is None
        else:
            assert mine.versions is not None
            assert mine.versions.dtype == torch.int32
            assert torch.equal(mine.versions, other.versions)


def test_versions_are_written_down(spanning: tuple[list[RolloutGroup], Offered]) -> None:
    group = spanning[0][0]
    for sample, completion in enumerate(group.completions):
        record = json.loads(json.dumps(readable_record(group, sample, step=1, advantage=0.0)))
        versions = completion.version_of_token.tolist()
        assert record["version"] == versions[0]
        counts = {str(version): versions.count(version) for version in versions}
        assert record.get("tokens_by_version", counts) == counts
        assert ("tokens_by_version" in record) == (len(counts) > 1)
    assert any(c.versions is not None for c in group.completions)


def test_lags_are_those_of_tokens(
    policy: Policy, spanning: tuple[list[RolloutGroup], Offered]
) -> None:
    groups, offered = spanning
    completions = [c for group in groups for c in group.completions]
    metrics = rollout_metrics(groups, policy=policy.name, version=3)
    lags = [3 - c.version_of_token.double() for c in completions]
    assert metrics["rollout/lag_max"] == 3.0
    assert metrics["rollout/lag_mean"] == pytest.approx(sum(float(x.mean()) for x in lags) / 12)
    first = [int(x[0]) for x in lags]
    assert values_by_lag(metrics, COMPLETIONS_BY_LAG) == {3: first.count(3)} == {3: 12}
    num_spanning = sum(c.versions is not None for c in completions)
    assert metrics["rollout/spanning_fraction"] == num_spanning / 12

    sequences = [
        TrainSequence(prompt_token_ids=group.prompt_token_ids, completion=c, advantage=float(n))
        for group in groups
        for n, c in enumerate(group.completions)
    ]
    offered.load(3)
    ratio = policy_logp(policy, sequences).double() - torch.cat(
        [c.behavior_logp for c in completions]
    )
    found = values_by_lag(make_trainer(policy).train(sequences, version=3), ONE_MINUS_ESS_BY_LAG)
    of_lag = {lag: ratio[torch.cat(lags) == lag].exp() for lag in (0, 2, 3)}
    assert found == pytest.approx(
        {lag: float(1 - r.sum() ** 2 / (len(r) * r.square().sum())) for lag, r in of_lag.items()},
        rel=1e-3,
        abs=1e-9,
    )
    assert found[0] < 1e-9 < 1e-4 < found[2]


@pytest.mark.parametrize(
    ("step", "max_lag", "guilty"), [(3, 3, None), (3, 2, 0), (2, 3, 3)], ids=["fit", "old", "new"]
)
def test_a_token_beyond_the_bound_is_refused(
    policy: Policy,
    spanning: tuple[list[RolloutGroup], Offered],
    step: int,
    max_lag: int,
    guilty: int | None,
) -> None:
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}}
    config = parse_config({**tree, "cluster": {"max_lag": max_lag, "in_flight": True}})
    session: Any = SimpleNamespace(config=config, state=SimpleNamespace(step=step), policy=policy)
    groups = [
        replace(group, completions=tuple(c for c in group.completions if c.versions is not None))
        for group in spanning[0]
    ]
    if guilty is None:
        refuse_too_old(session, groups)
        return
    with pytest.raises(EngineError, match=f"answered by version {guilty}, .*max_lag = {max_lag}"):
        refuse_too_old(session, groups)


def test_an_episode_keeps_the_versions_of_its_turns(
    spanning: tuple[list[RolloutGroup], Offered],
) -> None:
    group = spanning[0][0]
    second = next(c for c in group.completions if c.versions is not None)
    assert second.versions is not None
    first = replace(
        second, versions=None, provenance=replace(second.provenance, version=0), text="first"
    )
    reply = EncodedReply("reply", torch.tensor([5, 6]))

    def whole(*parts: Completion | EncodedReply) -> Completion:
        episode = Episode(group.prompt, group.prompt_token_ids, list(parts))
        episode.finish_reason = FinishReason.STOP
        return episode.completion()

    both = whole(first, reply, second)
    assert both.versions is not None
    assert both.provenance.version == 0
    expected = [0] * len(first.token_ids) + second.versions.tolist()
    assert both.version_of_token.tolist() == expected
    assert both.all_versions == second.all_versions
    later = replace(first, provenance=replace(first.provenance, version=2))
    assert whole(first, reply, later).all_versions == [0, 2]
    assert whole(first, reply, later).provenance.version == 0
    assert whole(later, reply, later).versions is None
    assert whole(later, reply, later).all_versions == [2]


@pytest.mark.parametrize(
    ("cluster", "rollout", "sentence"),
    [
        ({"max_lag": 0}, {}, "max_lag = 0 publishes no version .*max_lag to 1 or more"),
        ({"max_lag": 1, "reuse": 2}, {}, "set cluster.max_lag to 2 or more"),
        ({"max_lag": 1}, {"dynamic_sampling": True}, "set cluster.max_lag to 2 or more"),
        ({}, {"engine": "vllm"}, 'in_flight is not available with rollout.engine = "vllm"'),
    ],
)
def test_what_in_flight_is_of_no_use_for_is_refused(
    cluster: dict[str, Any], rollout: dict[str, Any], sentence: str
) -> None:
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "rollout": rollout}
    with pytest.raises(ConfigError, match=sentence):
        parse_config({**tree, "cluster": {**cluster, "in_flight": True}})


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    """One Ray for both tests; it must be there before it is imported."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    largest = {"engines": 2, "reward_workers": 0}
    tree = {"model": {"name": "any"}, "task": {"name": "arithmetic"}, "cluster": largest}
    with joined_ray(parse_config(tree)):
        yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_version_that_fails_its_canary_in_flight_samples_nothing(
    tiny_folder: Path, tmp_path: Path, policy: Policy, own_ray: None
) -> None:
    from trustbatch.build.engines import open_actor_engines
    from trustbatch.cluster.engine_actor import EngineActor, PublishedVersion
    from trustbatch.weight_sync.publications import DiskPublisher

    class OfferedMeanwhile(EngineActor):
        """Hears of a version when the engine has asked for the fifth time."""

        num_asked = 0
        coming: PublishedVersion

        def has_newer(self, version: int) -> bool:
            self.num_asked += 1
            if self.num_asked == 5:
                self.announce(self.coming)
            return super().has_newer(version)

    config = parse_config(
        {
            "model": {"name": str(tiny_folder), "device": "cpu"},
            "task": {"name": "arithmetic"},
            "cluster": {"in_flight": True},
        }
    )
    prompts = [Prompt(id=text, text=text, answer="") for text in PROMPTS]
    recorder = CanaryRecorder(policy, prompts, logprob_mode="processed")
    publisher = DiskPublisher(tmp_path)

    def publish(version: int) -> PublishedVersion:
        weights = publisher.publish(policy.named_weights(), version)
        return PublishedVersion(version, weights, recorder.record(version))

    first = publish(0)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    right = publish(1)
    false = replace(right, weights=first.weights)
    requests = make_requests(policy)
    for second in (right, false):
        actor = OfferedMeanwhile(config, open_actor_engines, torch.get_num_threads())
        actor.coming = second
        if second is false:
            for _ in range(2):  # nor is it sampled from when it is asked for once more
                with pytest.raises(CanaryError, match=r"version 1\) does not sample from"):
                    actor.generate_in_flight(first, requests)
            continue
        sampled = actor.generate_in_flight(first, requests)
        assert {tuple(c.all_versions) for c in sampled.completions} >= {(0, 1)}
        assert sampled.version == 1
        assert 0 < sampled.canary["canary/max_abs_logratio"] < 1e-4
        # an exact version is sampled from to the end, and is checked as well
        exact = actor.generate(first, requests)
        assert {tuple(c.all_versions) for c in exact.completions} == {(0,)}
        assert exact.canary


@pytest.mark.long
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_a_run_spans_versions_within_the_bound_and_resumes(
    tiny_folder: Path, tmp_path: Path, own_ray: None
) -> None:
    steps, per_step, max_lag = 6, 4, 2
    settings: dict[str, Any] = {
        "model": tiny_folder,
        "task": {"name": "arithmetic", "level": 1},
        "rollout": {
            "prompts_per_step": per_step,
            "samples_per_prompt": 8,
            "max_tokens": 100,
            "prompts_per_call": 2,
        },
        # entropy moves the policy in every step, whatever the rewards are
        "objective": {"name": "p3o", "entropy_coef": 0.1},
        "training": {"steps": steps, "learning_rate": 3e-3, "warmup_fraction": 0.0},
        "run": {
            "name": "run",
            "folder": str(tmp_path),
            "checkpoint_every": 2,
            "keep_checkpoints": 3,
            "rollouts_every": 1,
            "rollouts_logged": 1000,
        },
        "cluster": {"engines": 2, "reward_workers": 0, "max_lag": max_lag, "in_flight": True},
    }
    killer = kill_meanwhile(tmp_path / "run", [(2, "EngineActor", 1)])
    result = trustbatch.train(**settings)
    killer.join()
    assert result.metrics[-1]["cluster/engine_restarts"] == 1
    assert_whole(result, steps=steps, per_step=per_step, max_lag=max_lag)

    # as if it had been stopped after step 4
    shutil.rmtree(result.folder / "checkpoints" / "step-6")
    again = trustbatch.train(**settings)
    assert_whole(again, steps=steps, per_step=per_step, max_lag=max_lag)
    assert again.metrics[:4] == result.metrics[:4]


def records(result: trustbatch.RunResult, step: int) -> list[dict[str, Any]]:
    return read_rollouts(rollout_file(result.folder, step))


def assert_whole(result: trustbatch.RunResult, *, steps: int, per_step: int, max_lag: int) -> None:
    """Every prompt once, no token out of bounds, and completions that span versions."""
    assert [line["step"] for line in result.metrics] == list(range(1, steps + 1))
    prompts: list[str] = []
    num_spanning = 0
    for step in range(1, steps + 1):
        of_step = records(result, step)
        prompts += dict.fromkeys(record["prompt_id"] for record in of_step)
        for record in of_step:
            by_version = record.get("tokens_by_version", {record["version"]: record["tokens"]})
            assert sum(by_version.values()) == record["tokens"]
            assert min(map(int, by_version)) == record["version"]
            assert all(0 <= step - 1 - int(version) <= max_lag for version in by_version)
            num_spanning += len(by_version) > 1
    assert len(prompts) == len(set(prompts)) == steps * per_step
    assert num_spanning > 0
    assert any("rollout/spanning_fraction" in line for line in result.metrics)
    by_lag = [values_by_lag(line, ONE_MINUS_ESS_BY_LAG) for line in result.metrics]
    fresh = [value for each in by_lag for lag, value in each.items() if lag == 0]
    old = [value for each in by_lag for lag, value in each.items() if lag > 0]
    # beside old ones in the same completions, fresh tokens have the trainer's own log-probs
    assert max(fresh) < 1e-7 < 1e-5 < max(old)
