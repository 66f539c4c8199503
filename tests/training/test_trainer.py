"""The update does not depend on how it is divided, and never goes where it should not."""

import copy
import dataclasses
import functools
import itertools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.training_cases import flat, watch_gradients

from trustbatch.batching import micro_batches as micro_batches_module
from trustbatch.batching import sequences as sequences_module
from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.errors import DivergedError
from trustbatch.inspection.token_summary import TokenCollector
from trustbatch.models.policy import Policy
from trustbatch.objectives import OBJECTIVES, Totals, build_objective
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.objectives.p3o import P3O
from trustbatch.objectives.token_batch import TokenBatch
from trustbatch.objectives.two_anchor import TwoAnchor
from trustbatch.rollout.native.engine import NativeEngine
from trustbatch.training import trainer as trainer_module
from trustbatch.training.activation_budget import ActivationBudget
from trustbatch.training.config import TrainingConfig
from trustbatch.training.logprobs import TokenLogprobs
from trustbatch.training.optimizer import learning_rate_factor
from trustbatch.training.trainer import MAX_CONSECUTIVE_SKIPS, Trainer
from trustbatch.types import GenerationRequest, SamplingParams, TrainSequence
from trustbatch.utils.lazy import LazySequence


@pytest.fixture
def sequences(policy: Policy) -> list[TrainSequence]:
    """Completions of unequal length at temperature 1.3, so that no ratio is 1."""
    sampling = SamplingParams(
        max_tokens=9, stop_token_ids=policy.stop_token_ids, temperature=1.3, top_logprobs=6
    )
    prompts = ["1+1=", "12+34=", "7="]
    requests = [
        GenerationRequest(
            prompt_id=text,
            token_ids=tuple(policy.tokenizer.encode(text)),
            num_samples=5,
            sampling=sampling,
        )
        for text in prompts
    ]
    completions = NativeEngine(policy, seed=0).generate(requests)
    return [
        TrainSequence(
            prompt_token_ids=requests[number // 5].token_ids,
            completion=completion,
            advantage=math.sin(number),
        )
        for number, completion in enumerate(completions)
    ]


def make_trainer(
    policy: Policy, objective: str, options: dict[str, object] | None = None, **settings: object
) -> Trainer:
    options = options or {}
    config = TrainingConfig.model_validate(
        {"steps": 10, "learning_rate": 1e-2, "warmup_fraction": 0.0} | settings
    )
    reference = copy.deepcopy(policy).freeze() if options.get("reference_kl_coef") else None
    if reference is not None:
        with torch.no_grad():
            for parameter in reference.model.parameters():
                parameter.mul_(1.05)
    return Trainer(
        policy,
        build_objective(objective, **options),  # type: ignore[arg-type]
        config,
        policy_temperature=1.0,
        seed=0,
        reference=reference,
    )


def parameters(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in OBJECTIVES),
    ("p3o", {"kl": "top_k"}),
    ("p3o", {"kl": "k3"}),
    ("two_anchor", {"kl": "top_k"}),
    ("p3o", {"entropy_coef": 0.1, "reference_kl_coef": 0.1}),
    ("gspo", {"entropy_coef": 0.1, "reference_kl_coef": 0.1}),
]


@pytest.mark.parametrize(("objective", "options"), VARIANTS)
def test_micro_batches_do_not_change_the_update(
    policy: Policy, sequences: list[TrainSequence], objective: str, options: dict[str, object]
) -> None:
    # AdamW divides by the gradient's own size: in float32 it would blow rounding up to full steps
    policy.model.double()
    results = []
    for micro_batch_tokens in (10**6, 40, 1):
        copied = copy.deepcopy(policy)
        trainer = make_trainer(
            copied,
            objective,
            options,
            micro_batch_tokens=micro_batch_tokens,
            share_prompts=False,  # tested below, to a tolerance that the layout allows
            passes=2,
            mini_batches=2,
        )
        metrics = trainer.train(sequences)
        results.append((parameters(copied), metrics))
    (whole, whole_metrics), *others = results
    assert not torch.equal(whole, parameters(policy))
    for divided, metrics in others:
        torch.testing.assert_close(divided, whole, rtol=0, atol=1e-8)
        assert metrics.keys() == whole_metrics.keys()
        for name, value in metrics.items():
            assert value == pytest.approx(whole_metrics[name], rel=1e-8, abs=1e-10), name


@pytest.fixture
def always_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prompts even where that saves nothing."""
    monkeypatch.setattr(sequences_module, "MAX_REMAINING_FRACTION", 10.0)


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize(("objective", "options"), VARIANTS)
def test_shared_prompts_do_not_change_the_update(
    policy: Policy, sequences: list[TrainSequence], objective: str, options: dict[str, object]
) -> None:
    """Prompts of 2, 4 and 6 tokens before responses of 1 to 9."""
    policy.model.double()
    results = []
    for share_prompts, micro_batch_tokens in ((False, 10**6), (True, 10**6), (True, 40)):
        copied = copy.deepcopy(policy)
        trainer = make_trainer(
            copied,
            objective,
            options,
            share_prompts=share_prompts,
            micro_batch_tokens=micro_batch_tokens,
            gradient_clip=1e9,
        )
        gradients = watch_gradients(trainer)
        metrics = trainer.train(sequences)
        results.append((flat(gradients), metrics))
    (plain, expected), *others = results
    for shared, metrics in others:
        # the model's norms round to float32 on the way, so agreement ends at that precision
        assert float((shared - plain).norm() / plain.norm()) < 1e-5
        for name, value in metrics.items():
            assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("objective", ["p3o", "gspo", "reinforce"])
def test_padded_rows_give_the_same_update(
    policy: Policy, sequences: list[TrainSequence], objective: str
) -> None:
    policy.model.double()
    results = []
    for packs in (True, False):
        copied = copy.deepcopy(policy)
        assert copied.packs
        copied.packs = packs
        trainer = make_trainer(copied, objective, micro_batch_tokens=40)
        gradients = watch_gradients(trainer)
        metrics = trainer.train(sequences)
        results.append((flat(gradients), metrics))
    (packed, expected), (padded, metrics) = results
    assert float((padded - packed).norm() / packed.norm()) < 1e-5
    for name, value in metrics.items():
        assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


@pytest.mark.usefixtures("always_share")
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("num_ranks", [2, 4, 40])
def test_ranks_sum_to_the_undivided_gradient(
    policy: Policy, sequences: list[TrainSequence], objective: str, num_ranks: int
) -> None:
    """More ranks than sequences too; empty micro-batches add nothing, not even to the totals."""
    policy.model.double()
    trainer = make_trainer(policy, objective)
    found = []
    for ranks in (1, num_ranks):
        batches = [
            batch
            for rank in range(ranks)
            for batch in micro_batches(
                sequences,
                max_tokens=60,
                pad_token_id=0,
                packs=True,
                may_share_prompts=True,
                rank=rank,
                num_ranks=ranks,
            )
        ]
        policy.model.zero_grad()
        observer = trainer._observer(sequences, None, None)
        (prepared,) = trainer._prepared(
            [LazySequence([functools.partial(lambda batch: batch, each) for each in batches])],
            observer,
            steps_in_pass=1,
        )
        totals = trainer._totals(prepared, {}, from_policy=True)
        trainer._accumulate(prepared, observer, {}, totals)
        grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
        found.append(torch.cat(grads))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-6


def test_ess_per_micro_batch_does_depend_on_the_division(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    caps = []
    for micro_batch_tokens in (10**6, 40):
        trainer = make_trainer(
            copy.deepcopy(policy),
            "p3o",
            {"ess_scope": "micro_batch"},
            micro_batch_tokens=micro_batch_tokens,
        )
        caps.append(trainer.train(sequences)["weight/cap"])
    assert abs(caps[0] - caps[1]) > 1e-4


@pytest.mark.parametrize(
    ("objective", "options", "micro_batch_tokens", "expected"),
    [
        ("p3o", {}, 10**6, 1),  # one micro-batch supplies its own totals
        ("p3o", {}, 40, 2),  # pre-pass and training pass, which are one for the first
        ("p3o", {"ess_scope": "micro_batch"}, 40, 1),
        ("grpo", {}, 40, 1),  # totals follow from the data
        ("gspo", {}, 40, 1),
        ("two_anchor", {}, 40, 2),  # a pass of one step: the snapshot is the policy itself
        ("p3o", {"reference_kl_coef": 0.1}, 40, 3),
    ],
)
def test_no_forward_pass_is_spent_where_it_is_not_needed(
    policy: Policy,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    options: dict[str, object],
    micro_batch_tokens: int,
    expected: int,
) -> None:
    seen: list[int] = []
    original = trainer_module.token_logprobs

    def counting(policy: Policy, batch: MicroBatch, **options: Any) -> TokenLogprobs:
        seen.append(id(batch.target))
        return original(policy, batch, **options)

    monkeypatch.setattr(trainer_module, "token_logprobs", counting)
    trainer = make_trainer(policy, objective, options, micro_batch_tokens=micro_batch_tokens)
    trainer.train(sequences)
    num_batches = len(set(seen))
    num_served_twice = 1 if expected > 1 and num_batches > 1 else 0
    assert len(seen) == expected * num_batches - num_served_twice


@pytest.mark.parametrize(
    ("answers", "is_estimated", "num_twice"),
    [
        ([True, True], True, "none"),  # the first micro-batch stands for all of them
        ([False], False, "all but one"),  # its halves differ: a pre-pass, and it is held
        ([True, False], False, "all"),  # it turns out too far off: all are computed again
    ],
)
def test_totals_are_estimated_where_that_is_near_enough(
    policy: Policy,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    answers: list[bool],
    is_estimated: bool,
    num_twice: str,
) -> None:
    policy.precision = "bfloat16"
    calls = []
    original = trainer_module.token_logprobs
    monkeypatch.setattr(
        trainer_module, "token_logprobs", lambda *a, **k: calls.append(1) or original(*a, **k)
    )
    results = []
    for estimates in (False, True):
        trainer = make_trainer(
            copy.deepcopy(policy), "p3o", micro_batch_tokens=60, gradient_clip=1e9
        )
        monkeypatch.setattr(type(trainer.objective), "estimates_totals", estimates)
        left = [*answers]
        monkeypatch.setattr(trainer, "_are_near", lambda *_, left=left: left.pop(0))
        gradients = watch_gradients(trainer)
        calls.clear()
        metrics = trainer.train(sequences)
        results.append((flat(gradients), metrics, len(calls)))
    (exact, exact_metrics, num_exact), (found, metrics, num_found) = results
    num_batches = (num_exact + 1) // 2  # the first is held
    assert num_batches > 2
    again = {"none": 0, "all but one": num_batches - 1, "all": num_batches}[num_twice]
    assert num_found == num_batches + again
    assert metrics["one_minus_ess"] == exact_metrics["one_minus_ess"] > 1e-3
    assert (metrics["weight/cap"] != exact_metrics["weight/cap"]) == is_estimated
    assert torch.equal(found, exact) == (not is_estimated)


def test_after_a_wrong_estimate_the_batch_has_exact_totals(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong one costs a whole step; the next batch of rollouts may be estimated again."""
    policy.precision = "bfloat16"
    trainer = make_trainer(policy, "p3o", micro_batch_tokens=20, mini_batches=2)
    answers: list[bool] = []
    monkeypatch.setattr(trainer, "_are_near", lambda *_: answers.pop(0))
    asked: list[bool] = []
    original = trainer._estimated_totals

    def watched(*arguments: Any) -> Totals | None:
        found = original(*arguments)
        asked.append(found is not None)
        return found

    monkeypatch.setattr(trainer, "_estimated_totals", watched)
    for _ in range(2):
        answers += [True, False]  # the halves agree, and the first micro-batch is far off
        asked.clear()
        trainer.train(sequences)
        assert asked == [True, False]
        assert not answers
    answers += [True, True]
    trainer.first_gradient(sequences, num_steps=2, observer=TokenCollector())
    assert asked[-1]


@pytest.mark.parametrize("objective", ["p3o", "grpo"])
def test_micro_batches_are_laid_out_while_the_first_one_is_computed(
    policy: Policy,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
) -> None:
    events: list[str] = []
    build, evaluate = micro_batches_module._build, trainer_module.token_logprobs
    monkeypatch.setattr(
        micro_batches_module, "_build", lambda *a, **k: events.append("layout") or build(*a, **k)
    )
    monkeypatch.setattr(
        trainer_module, "token_logprobs", lambda *a, **k: events.append("pass") or evaluate(*a, **k)
    )
    policy.precision = "bfloat16"
    trainer = make_trainer(policy, objective, micro_batch_tokens=40)
    # whether an estimate is near waits for the GPU
    monkeypatch.setattr(trainer, "_are_near", lambda *_: events.append("wait") or True)
    trainer.train(sequences)
    num_batches = events.count("layout")
    assert num_batches > 2
    assert events[:2] == ["layout", "pass"]
    assert events[2 : 1 + num_batches] == ["layout"] * (num_batches - 1)


@pytest.mark.parametrize(
    ("objective", "options"),
    [("p3o", {}), ("pact", {}), ("grpo", {"reference_kl_coef": 0.1})],
)
def test_the_first_gradient_computes_no_other_step(
    policy: Policy,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    options: dict[str, object],
) -> None:
    seen: dict[str, int] = {}
    original = trainer_module.token_logprobs

    def watched(policy: Policy, batch: MicroBatch, **options: Any) -> TokenLogprobs:
        seen.update({str(each.key): each.num_sampled for each in batch.completions})
        return original(policy, batch, **options)

    monkeypatch.setattr(trainer_module, "token_logprobs", watched)
    trainer = make_trainer(policy, objective, options, micro_batch_tokens=40)
    trainer.first_gradient(sequences, num_steps=3, observer=TokenCollector())
    assert len(seen) == math.ceil(len(sequences) / 3)


def test_a_subclass_with_totals_of_its_own_is_not_estimated() -> None:
    class Other(P3O):
        def moments(self, tokens: TokenBatch) -> dict[str, RatioMoments]:
            return super().moments(tokens)

    class Same(P3O):
        pass

    assert [kind().estimates_totals for kind in (P3O, Same, Other, TwoAnchor)] == [
        True,
        True,
        False,
        False,
    ]


def test_offloaded_activations_are_held_for_one_pass_alone() -> None:
    policy = SimpleNamespace(device=torch.device("cuda"))
    assert not ActivationBudget(policy, offloads=True).has_room()  # type: ignore[arg-type]


def test_an_estimate_is_near_by_the_precision_of_products(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(policy, "p3o")
    one, other = torch.tensor([0.0, 0.2]), torch.tensor([0.0, 0.21])
    # r = 1 and e^0.2 = 1.2214: e = 2.2214^2 / (2 x 2.4918) = 0.99016; e^0.21: 0.98917
    totals = [
        Totals(torch.tensor(2.0), torch.tensor(1.0), {"behavior": RatioMoments.of(ratio)})
        for ratio in (one, other)
    ]
    assert trainer.objective.totals_distance(*totals) == pytest.approx(0.00099, abs=1e-5)
    policy.precision = "bfloat16"
    assert not trainer._are_near(*totals)  # 2^-7 / 64 = 0.00012
    assert trainer._are_near(totals[0], totals[0])


def test_proximal_policy_is_the_one_at_the_start_of_the_pass(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step of a pass the policy has moved, and the snapshot has not."""
    distances: list[float] = []
    objective_type = OBJECTIVES["decoupled"]
    original = objective_type.__call__

    def watching(self: object, batch: object, totals: object, **options: object) -> object:
        assert batch.proximal_logp is not None  # type: ignore[attr-defined]
        gap = (batch.logp - batch.proximal_logp).abs().max()  # type: ignore[attr-defined]
        distances.append(float(gap.detach()))
        return original(self, batch, totals, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(objective_type, "__call__", watching)
    make_trainer(policy, "decoupled", passes=2, mini_batches=2).train(sequences)
    first, second, third, fourth = distances
    assert first == pytest.approx(0.0, abs=1e-5)
    assert third == pytest.approx(0.0, abs=1e-5)
    assert min(second, fourth) > 1e-3


@pytest.mark.parametrize("objective", ["p3o", "grpo", "gspo"])
def test_nan_behavior_logp_is_dropped_and_counted(
    policy: Policy, sequences: list[TrainSequence], objective: str
) -> None:
    sequences[3].completion.behavior_logp[0] = math.nan
    sequences[8].completion.behavior_logp[1] = -math.inf
    metrics = make_trainer(policy, objective, micro_batch_tokens=40).train(sequences)
    assert metrics["tokens/nonfinite"] == 2
    assert metrics["steps/skipped"] == 0
    assert math.isfinite(metrics["policy/loss"])
    assert torch.isfinite(parameters(policy)).all()


@pytest.mark.parametrize("objective", ["p3o", "grpo", "pact"])
def test_to_expect_that_all_tokens_are_measurable_changes_nothing(
    policy: Policy, sequences: list[TrainSequence], objective: str
) -> None:
    found = []
    for expects in (True, False):
        trainer = make_trainer(copy.deepcopy(policy), objective, micro_batch_tokens=40)
        trainer._expects_measurable = expects
        gradients = watch_gradients(trainer)
        metrics = trainer.train(sequences)
        assert trainer._expects_measurable
        found.append((flat(gradients), metrics))
    (one, metrics), (other, other_metrics) = found
    assert torch.equal(one, other)
    assert metrics == other_metrics


@pytest.mark.parametrize("objective", ["p3o", "grpo"])
def test_a_step_is_computed_again_where_not_all_tokens_are_measurable(
    policy: Policy,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
) -> None:
    """The next step expects it, and the one after that nothing unusual."""
    calls: list[bool] = []
    original = OBJECTIVES[objective].__call__

    def watching(*arguments: Any, all_measurable: bool = False) -> object:
        calls.append(all_measurable)
        return original(*arguments, all_measurable=all_measurable)

    monkeypatch.setattr(OBJECTIVES[objective], "__call__", watching)
    broken = copy.deepcopy(sequences)
    broken[3].completion.behavior_logp[0] = math.nan
    exact = make_trainer(copy.deepcopy(policy), objective, micro_batch_tokens=40)
    exact._expects_measurable = False
    expected = exact.train(broken)
    num_batches = len(calls)
    calls.clear()
    trainer = make_trainer(policy, objective, micro_batch_tokens=40)
    assert trainer.train(broken) == expected
    assert calls == [True] * num_batches + [False] * num_batches
    for batch, expects in ((broken, False), (sequences, False), (sequences, True)):
        calls.clear()
        trainer.train(batch)
        assert set(calls) == {expects}
        assert len(calls) <= num_batches


def test_totals_that_counted_unmeasurable_tokens_are_not_used(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy.precision = "bfloat16"
    sequences[3].completion.behavior_logp[0] = math.nan
    results = []
    for expects in (True, False):
        trainer = make_trainer(copy.deepcopy(policy), "p3o", micro_batch_tokens=60)
        monkeypatch.setattr(trainer, "_are_near", lambda *_: True)
        trainer._expects_measurable = expects
        results.append(trainer.train(sequences))
    assert results[0] == results[1]
    assert results[0]["tokens/nonfinite"] == 1


def test_a_nan_among_the_top_tokens_leaves_the_totals_too(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    longest = max(sequences, key=lambda sequence: sequence.num_tokens)
    top = longest.completion.behavior_top_logp
    assert top is not None
    top[0, 2] = math.nan
    top[1, 5] = -math.inf  # outside the support: no fault
    results = []
    for micro_batch_tokens in (10**6, 40):
        trainer = make_trainer(
            copy.deepcopy(policy), "p3o", {"kl": "top_k"}, micro_batch_tokens=micro_batch_tokens
        )
        results.append(trainer.train(sequences))
    whole, divided = results
    assert whole["tokens/nonfinite"] == divided["tokens/nonfinite"] == 1
    assert divided["policy/loss"] == pytest.approx(whole["policy/loss"], rel=1e-4)
    assert divided["gradient/norm"] == pytest.approx(whole["gradient/norm"], rel=1e-4)


def test_a_token_that_the_policy_excludes_leaves_the_totals(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logit of -inf is no fault of the data: only the forward pass shows it."""
    original = trainer_module.token_logprobs

    def excluding(*args: object, **kwargs: object) -> TokenLogprobs:
        found = original(*args, **kwargs)  # type: ignore[arg-type]
        excluded = args[1].target == 6  # type: ignore[attr-defined]
        assert excluded.any() or len(excluded) < 20
        return dataclasses.replace(found, logp=found.logp.masked_fill(excluded, -math.inf))

    monkeypatch.setattr(trainer_module, "token_logprobs", excluding)
    results = []
    for micro_batch_tokens in (10**6, 40):
        trainer = make_trainer(copy.deepcopy(policy), "grpo", micro_batch_tokens=micro_batch_tokens)
        results.append(trainer.train(sequences))
    whole, divided = results
    assert whole["tokens/nonfinite"] == divided["tokens/nonfinite"] > 0
    assert divided["policy/loss"] == pytest.approx(whole["policy/loss"], rel=1e-4)
    assert divided["gradient/norm"] == pytest.approx(whole["gradient/norm"], rel=1e-4)


@pytest.mark.parametrize("objective", list(OBJECTIVES))
def test_a_step_without_measurable_tokens_is_skipped(
    policy: Policy, sequences: list[TrainSequence], objective: str
) -> None:
    for sequence in sequences:
        sequence.completion.behavior_logp.fill_(math.nan)
    before = parameters(policy)
    metrics = make_trainer(policy, objective).train(sequences)
    assert metrics["steps/skipped"] == 1
    assert metrics["tokens/count"] == 0
    assert torch.equal(before, parameters(policy))


def test_a_batch_of_nothing_is_skipped_and_counted(policy: Policy) -> None:
    before = parameters(policy)
    trainer = make_trainer(policy, "p3o")
    assert trainer.train([]) == {"steps/skipped": 1.0}
    assert trainer.num_optimizer_steps == 1
    assert torch.equal(before, parameters(policy))


def test_the_optimizer_never_steps_on_a_nonfinite_gradient(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(policy, "reinforce")
    broken = [
        TrainSequence(
            prompt_token_ids=s.prompt_token_ids, completion=s.completion, advantage=math.inf
        )
        for s in sequences
    ]
    before = parameters(policy)
    for _ in range(MAX_CONSECUTIVE_SKIPS - 1):
        assert trainer.train(broken)["steps/skipped"] == 1
    assert torch.equal(before, parameters(policy))
    with pytest.raises(DivergedError, match="learning_rate"):
        trainer.train(broken)


def test_a_usable_step_forgives_skipped_ones(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(policy, "reinforce", learning_rate=1e-6)
    trainer.num_consecutive_skips = MAX_CONSECUTIVE_SKIPS - 1
    trainer.train(sequences)
    assert trainer.num_consecutive_skips == 0


def test_gradient_is_clipped_to_the_configured_norm(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(policy, "reinforce", gradient_clip=1e-3)
    gradients = watch_gradients(trainer)
    metrics = trainer.train(sequences)
    assert metrics["gradient/norm"] > 1e-3  # reported before clipping
    assert float(flat(gradients).norm()) == pytest.approx(1e-3, rel=1e-3)


def test_policy_temperature_rescales_the_policy(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    """The rollouts were sampled at 1.3: a policy at 1.3 is on-policy, one at 1.0 is not."""
    distrust = {}
    for temperature in (1.0, 1.3):
        trainer = make_trainer(copy.deepcopy(policy), "p3o")
        trainer.policy_temperature = temperature
        distrust[temperature] = trainer.train(sequences)["one_minus_ess"]
    assert distrust[1.3] < 1e-8
    assert distrust[1.0] > 1e-3


def test_reference_model_is_frozen_and_pulls(
    policy: Policy, sequences: list[TrainSequence]
) -> None:
    trainer = make_trainer(policy, "reinforce", {"reference_kl_coef": 0.5})
    assert trainer.reference is not None
    before = parameters(trainer.reference)
    metrics = trainer.train(sequences)
    assert metrics["kl/reference"] > 0
    assert torch.equal(before, parameters(trainer.reference))
    assert not any(p.requires_grad for p in trainer.reference.model.parameters())


def test_an_objective_can_take_a_smaller_step(
    policy: Policy, sequences: list[TrainSequence], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW moves, and decays, by its learning rate times something that does not depend on it."""
    policy.model.double()
    before = parameters(policy)
    moved = {}
    for name in ("as it is", "a quarter"):
        copied = copy.deepcopy(policy)
        trainer = make_trainer(copied, "vcpo", micro_batch_tokens=40, learning_rate=1e-3)
        if name == "a quarter":
            monkeypatch.setattr(OBJECTIVES["vcpo"], "learning_rate_factor", lambda *_: 0.25)
        metrics = trainer.train(sequences)
        moved[name] = parameters(copied) - before
        factor = metrics["learning_rate/factor"] if name == "as it is" else 0.25
        assert 0.25 <= factor < 1
        assert metrics["learning_rate"] == pytest.approx(1e-3 * factor, rel=1e-12)
        moved[name] /= factor
    torch.testing.assert_close(moved["as it is"], moved["a quarter"], rtol=1e-6, atol=1e-14)


def test_learning_rate_warms_up_and_decays() -> None:
    factors = [
        learning_rate_factor(step, 100, warmup_fraction=0.1, schedule="cosine")
        for step in range(100)
    ]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    # half way through the decay: cos(pi / 2) = 0
    assert factors[55] == pytest.approx(0.5)
    assert 0 < factors[99] < 0.001
    assert all(later <= earlier for earlier, later in itertools.pairwise(factors[10:]))
    constant = learning_rate_factor(99, 100, warmup_fraction=0.1, schedule="constant")
    assert constant == 1.0


@pytest.mark.gpu
@pytest.mark.usefixtures("always_share")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_training_step_on_a_gpu(tiny_folder: Path) -> None:
    norms = []
    for share_prompts in (True, False):
        policy = Policy.load(str(tiny_folder), device="cuda")
        sampling = SamplingParams(
            max_tokens=9, stop_token_ids=policy.stop_token_ids, top_logprobs=6
        )
        requests = [
            GenerationRequest(
                prompt_id=text,
                token_ids=tuple(policy.tokenizer.encode(text)),
                num_samples=8,
                sampling=sampling,
            )
            for text in ("12+34=", "7=")
        ]
        completions = NativeEngine(policy, seed=0).generate(requests)
        sequences = [
            TrainSequence(
                prompt_token_ids=requests[number // 8].token_ids,
                completion=completion,
                advantage=math.sin(number),
            )
            for number, completion in enumerate(completions)
        ]
        trainer = make_trainer(policy, "p3o", {"kl": "top_k"}, share_prompts=share_prompts)
        metrics = trainer.train(sequences)
        assert policy.precision == "bfloat16"
        assert metrics["one_minus_ess"] < 1e-3
        assert metrics["steps/skipped"] == 0
        norms.append(metrics["gradient/norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)
