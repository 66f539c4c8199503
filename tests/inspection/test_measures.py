"""What an inspection measures: shares of tokens, kept coordinates, cosines with error bars."""

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from trustbatch.config.objective import ObjectiveConfig
from trustbatch.errors import ConfigError
from trustbatch.inspection.candidates import UNCLIPPED, Unclipped, choose_candidates
from trustbatch.inspection.gradients import (
    Coordinates,
    FreshGradient,
    Gradient,
    cosine,
    drifts,
    mean_of,
)
from trustbatch.inspection.logged import read_logged
from trustbatch.inspection.token_summary import (
    RIGHT_HIGH,
    RIGHT_LOW,
    WRONG_HIGH,
    WRONG_LOW,
    TokenTable,
    bin_shares,
    summarize,
    token_table,
    weights_of,
)
from trustbatch.models.policy import Policy
from trustbatch.objectives import TokenBatch, build_objective

# one token in each quadrant beyond GRPO's clip of 0.2, one inside it, and one without an advantage
RATIO = [1.5, 0.5, 0.5, 1.5, 1.1, 1.5]
ADVANTAGE = [1.0, -1.0, 1.0, -1.0, 1.0, 0.0]


def batch() -> TokenBatch:
    behavior = torch.full((6,), -2.0)
    logp = behavior + torch.tensor(RATIO).log()
    return TokenBatch(
        logp=logp,
        behavior_logp=behavior,
        advantage=torch.tensor(ADVANTAGE),
        sequence=torch.tensor([0, 1, 0, 1, 0, 2]),
        proximal_logp=logp.clone(),
    )


def table() -> TokenTable:
    tokens = batch()
    return token_table([tokens], sequence=tokens.sequence, token_ids=torch.arange(6))


def weights(name: str, **options: float | str) -> torch.Tensor:
    objective = build_objective(name, **options)
    return weights_of(objective, [batch()], objective.totals(batch()))


def test_a_clip_silences_what_is_right_and_likely_and_what_is_wrong_and_unlikely() -> None:
    found = summarize(table(), weights("grpo"))
    assert found.silenced == pytest.approx(2 / 5)
    assert found.silenced_in == {
        RIGHT_HIGH: pytest.approx(1 / 5),
        WRONG_LOW: pytest.approx(1 / 5),
        RIGHT_LOW: 0.0,
        WRONG_HIGH: 0.0,
    }
    assert (found.capped, found.raised) == (0.0, 0.0)


def test_a_cap_lowers_large_ratios_and_silences_none() -> None:
    # CISPO caps at 1.28: two of the five tokens with an advantage are above
    found = summarize(table(), weights("cispo"))
    assert (found.silenced, found.raised) == (0.0, 0.0)
    assert found.capped == pytest.approx(2 / 5)


def test_a_weight_that_ignores_the_ratio_is_capped_above_1_and_raised_below_it() -> None:
    found = summarize(table(), weights("reinforce"))
    assert (found.capped, found.raised) == (pytest.approx(3 / 5), pytest.approx(2 / 5))


def test_without_a_clip_every_token_has_its_ratio() -> None:
    objective = Unclipped()
    weight = weights_of(objective, [batch()], objective.totals(batch()))
    assert weight[:5].tolist() == pytest.approx(RATIO[:5], rel=1e-5)
    found = summarize(table(), weight)
    assert (found.silenced, found.capped, found.raised) == (0.0, 0.0, 0.0)


def test_mean_weights_are_by_bin_of_the_ratio_and_sign_of_the_advantage() -> None:
    found = summarize(table(), weights("grpo"))
    # bins: below 0.5 (its edge included), 0.8, 0.95, 1.05, 1.25, 2, and above
    right, wrong = found.mean_weight["A>0"], found.mean_weight["A<0"]
    assert right[0] == pytest.approx(0.5, rel=1e-5)
    assert right[4:6] == [pytest.approx(1.1, rel=1e-5), 0.0]
    assert wrong[0] == 0.0
    assert wrong[5] == pytest.approx(1.5, rel=1e-5)
    assert all(math.isnan(each) for each in (*right[1:4], right[6], *wrong[1:5], wrong[6]))
    assert bin_shares(table())[4:] == [pytest.approx(1 / 5), pytest.approx(2 / 5), 0.0]


def test_positions_count_within_each_completion() -> None:
    assert table().position.tolist() == [0, 0, 1, 1, 2, 0]


def of(*values: float) -> Gradient:
    found = torch.tensor(values, dtype=torch.float32)
    return Gradient(found, float(found.norm()))


def test_cosines_of_gradients() -> None:
    assert cosine(of(1, 2, 3), of(1, 2, 3)) == pytest.approx(1.0, abs=1e-12)
    assert cosine(of(1, 0), of(-2, 0)) == pytest.approx(-1.0)
    assert cosine(of(1, 0), of(0, 5)) == 0.0
    assert math.isnan(cosine(of(0, 0), of(1, 0)))


def test_the_fresh_gradient_is_freed_of_its_noise() -> None:
    # four parts of (3, 0, ...) with noise of length 2 in a direction of their own:
    # products of different parts are 9, so the norm is 3 and not that of the mean, sqrt(9 + 4 / 4)
    parts = [of(3.0, *(2.0 * (i == j) for j in range(4))) for i in range(4)]
    fresh = FreshGradient(parts)
    norm = fresh.norm()
    assert norm is not None
    assert (norm.value, norm.standard_error) == pytest.approx((3.0, 0.0), abs=1e-6)
    update = of(4.0, 0.0, 0.0, 0.0, 3.0)
    # (3 * 4 + 2 * 3 / 4) / (5 * 3); leaving out the last part: 12 / 15, another one: 14 / 15
    found = fresh.cosine_with(update)
    assert found is not None
    assert found.value == pytest.approx(13.5 / 15)
    left_out = [14 / 15] * 3 + [12 / 15]
    mean = sum(left_out) / 4
    error = math.sqrt(3 / 4 * sum((each - mean) ** 2 for each in left_out))
    assert found.standard_error == pytest.approx(error)


def test_noise_alone_has_no_direction() -> None:
    fresh = FreshGradient([of(1, 0, 0), of(0, 1, 0), of(-1, 0, 0), of(0, -1, 0)])
    assert fresh.norm() is None
    assert fresh.cosine_with(of(1, 1, 1)) is None


def test_the_drift_is_along_the_negative_gradient() -> None:
    # the entropy grows with the first coordinate, so a loss that falls with it raises the entropy
    minus_entropy = [of(-2.0, 0.0), of(-4.0, 0.0)]
    found = mean_of(drifts(of(-3.0, 4.0), minus_entropy))
    # 2 * 3 / 5 and 4 * 3 / 5
    assert (found.value, found.standard_error) == pytest.approx((1.8, 0.6))


def test_a_subset_of_coordinates_estimates_products_and_keeps_norms(policy: Policy) -> None:
    every, some = Coordinates(policy), Coordinates(policy, most=20_000)
    assert every.num_kept == every.num_all == some.num_all
    assert 20_000 <= some.num_kept < 20_100
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(2):
        for _, parameter in policy.trained_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.grad = 1.0 + 0.1 * noise
        found.append((every.read(), some.read()))
    (first, few_first), (second, few_second) = found
    assert len(few_first.values) == some.num_kept
    assert few_first.norm == first.norm == pytest.approx(float(first.values.norm()), rel=1e-4)
    exact = float(first.values.double() @ second.values.double())
    assert float(few_first.values @ few_second.values) == pytest.approx(exact, rel=0.01)


def test_a_parameter_without_a_gradient_counts_as_0(policy: Policy) -> None:
    parameters = [parameter for _, parameter in policy.trained_parameters()]
    parameters[0].grad = torch.ones_like(parameters[0])
    found = Coordinates(policy).read()
    assert found.norm == pytest.approx(math.sqrt(parameters[0].numel()))
    assert float(found.values.sum()) == parameters[0].numel()


def labels(own: dict[str, Any], *words: str, has_top: bool = False) -> list[str]:
    table = ObjectiveConfig.model_validate(own)
    return [each.label for each in choose_candidates(table, words, has_top_logp=has_top)]


def test_every_objective_is_there_once_and_the_own_is_first() -> None:
    found = labels({"name": "p3o", "kl": "top_k"}, "all", has_top=True)
    assert found[0] == "p3o"
    assert len(found) == len(set(found)) == 15
    assert found[-1] == UNCLIPPED
    assert labels({"name": "grpo"}, "grpo", "grpo clip_high=0.4") == [
        "grpo",
        "grpo clip_high=0.4",
        UNCLIPPED,
    ]
    assert labels({"name": "grpo", "clip_low": 0.1}, "grpo")[:2] == ["grpo clip_low=0.1", "grpo"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("gropo", "There is no objective 'gropo' .did you mean 'grpo'"),
        ("grpo clip=1", "no option 'clip'"),
        ("grpo clip_low=2", "clip_low must be a number from 0 to 1"),
        ("nowhere.py:Mine", "names the file nowhere.py, which does not exist"),
        ("json:loads", "is no objective"),
        ("json:nothing", "json has no nothing"),
        ("p3o kl=top_k", "leave it out, or set kl=importance"),
    ],
)
def test_an_objective_that_can_not_be_used_is_one_sentence(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        labels({"name": "grpo"}, word)
    assert "\n" not in str(error.value)


def record(**changes: Any) -> dict[str, Any]:
    return {
        "advantage": 1.0,
        "policy": "p",
        "version": 3,
        "token": ["a", "b", "c"],
        "token_id": [5, 6, 7],
        "behavior_logp": [-1.0, None, -2.0],
        "policy_logp": [-1.5, None, -2.0],
        **changes,
    }


def write(file: Path, *records: dict[str, Any]) -> Path:
    file.write_bytes(gzip.compress("".join(json.dumps(each) + "\n" for each in records).encode()))
    return file


def test_logged_tokens_are_those_of_the_policy(tmp_path: Path) -> None:
    other = record(advantage=-1.0, token_version=[2, 2, 3])
    file = write(tmp_path / "step-000001.jsonl.gz", record(), {"advantage": 1.0}, other)
    found = read_logged(file)
    assert found is not None
    assert found.num_completions == 2
    assert found.texts == ["a", "c"] * 2
    assert found.table.ratio.tolist() == pytest.approx([math.exp(-0.5), 1.0] * 2)
    assert found.batch.advantage.tolist() == [1.0, 1.0, -1.0, -1.0]
    assert found.batch.sequence.tolist() == [0, 0, 1, 1]
    assert found.batch.source is not None
    assert found.batch.source.tolist() == [1, 1, 0, 1]
    assert found.batch.anchor_logp is None


def test_a_log_without_tokens_has_nothing_to_weigh(tmp_path: Path) -> None:
    lines = {"advantage": 1.0}, record(advantage=None)
    assert read_logged(write(tmp_path / "step-000001.jsonl.gz", *lines)) is None


@pytest.mark.parametrize("damage", ["half", "keys"])
def test_a_damaged_log_is_one_sentence(tmp_path: Path, damage: str) -> None:
    wrong = record()
    del wrong["token"]
    file = write(tmp_path / "step-000001.jsonl.gz", wrong)
    if damage == "half":
        file.write_bytes(file.read_bytes()[:-12])
    with pytest.raises(ConfigError, match="choose another step with --step"):
        read_logged(file)
