"""Broken, extreme and missing input: what is dropped, what stays finite, what is refused."""

from dataclasses import replace
from math import exp, inf, log, nan

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from objective_cases import EXTRAS, Options, every_objective, finished, gradient, run, to_batch
from oracle import Tokens

from trustbatch.config.objective import ObjectiveConfig
from trustbatch.objectives import OBJECTIVES, TokenBatch, build_objective

FLOAT32_LOWEST = float(np.finfo(np.float32).min)
POISONS = {
    "behavior-minus-inf": ("behavior_logp", -inf),
    "behavior-plus-inf": ("behavior_logp", inf),
    "behavior-nan": ("behavior_logp", nan),
    "policy-nan": ("logp", nan),
    "policy-minus-inf": ("logp", -inf),
    "policy-plus-inf": ("logp", inf),
}
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["f64", "f32"])
kls = pytest.mark.parametrize("kl", ["importance", "k3", "top_k"])


def poison(tokens: Tokens, field: str, value: float, rows: list[int]) -> Tokens:
    array = getattr(tokens, field).copy()
    array[rows] = value
    return replace(tokens, **{field: array})


def assert_finite(batch: TokenBatch, loss: torch.Tensor) -> None:
    assert torch.isfinite(loss)
    for leaf in (batch.logp, batch.top_logp, batch.entropy):
        assert np.isfinite(gradient(leaf)).all()


def tokens_with_log_ratios(log_ratios: list[float], advantages: list[float]) -> Tokens:
    """Every field, with the given l; the [T, K] fields are ordinary."""
    count = len(log_ratios)
    tokens = oracle.random_tokens(3, [1] * count)
    return replace(
        tokens,
        logp=np.array(log_ratios) - 1.0,
        behavior_logp=np.full(count, -1.0),
        proximal_logp=np.full(count, -1.0),
        anchor_logp=np.full(count, -1.0),
        advantage=np.array(advantages, dtype=np.float64),
    )


@every_objective
@pytest.mark.parametrize("kind", POISONS)
def test_an_unmeasurable_token_is_dropped_and_counted(
    name: str, options: Options, kind: str
) -> None:
    rows = [0, 4, 5]  # the second sequence consists of row 4 and 5 only: S must fall too
    tokens = poison(oracle.random_tokens(1, [4, 2, 5], spread=0.6), *POISONS[kind], rows)
    expected = oracle.evaluate(name, tokens, **options, **EXTRAS)
    batch, output = run(name, tokens, **options, **EXTRAS)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-10)
    assert_finite(batch, output.loss)
    assert_allclose(gradient(batch.logp), expected.d_logp, rtol=1e-9, atol=1e-13)
    assert not gradient(batch.logp)[rows].any()
    assert not gradient(batch.top_logp)[rows].any()
    assert not gradient(batch.entropy)[rows].any()
    metrics = finished(output)
    assert metrics["tokens/nonfinite"] == 3
    assert metrics["tokens/count"] == 8
    assert all(np.isfinite(value) for value in metrics.values())


@every_objective
def test_what_else_an_unmeasurable_token_carries_does_not_leak(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(1, [4, 2, 5], spread=0.6)
    clean = poison(tokens, "logp", nan, [2])
    dirty = clean
    for field in ("advantage", "entropy", "reference_logp", "proximal_logp", "top_logp"):
        dirty = poison(dirty, field, nan, [2])
    _, expected = run(name, clean, **options, **EXTRAS)
    batch, output = run(name, dirty, **options, **EXTRAS)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-12)
    assert_finite(batch, output.loss)


@every_objective
@pytest.mark.parametrize("value", [nan, -inf])
def test_a_broken_proximal_matters_only_to_those_who_use_it(
    name: str, options: Options, value: float
) -> None:
    tokens = oracle.random_tokens(1, [4, 2, 5], spread=0.6)
    broken = poison(tokens, "proximal_logp", value, [2])
    batch, output = run(name, broken, **options)
    assert_finite(batch, output.loss)
    if name in ("decoupled", "grpo_is", "two_anchor", "pact"):
        without = tokens.take(np.delete(np.arange(11), 2))
        assert output.loss.item() == pytest.approx(
            oracle.evaluate(name, without, **options).loss, rel=1e-10
        )
        assert finished(output)["tokens/nonfinite"] == 1
    else:
        assert output.loss.item() == pytest.approx(
            oracle.evaluate(name, tokens, **options).loss, rel=1e-10
        )


@every_objective
@pytest.mark.parametrize("count", [0, 3], ids=["no-token", "no-measurable-token"])
def test_nothing_to_learn_from_is_a_zero_loss_with_a_zero_gradient(
    name: str, options: Options, count: int
) -> None:
    tokens = oracle.random_tokens(1, [3]).take(np.arange(count))
    tokens = replace(tokens, logp=np.full(count, nan))
    batch, output = run(name, tokens, **options, **EXTRAS)  # backward must work too
    assert output.loss.item() == 0.0
    assert batch.logp.grad is not None
    assert not gradient(batch.logp).any()
    assert_finite(batch, output.loss)
    metrics = finished(output)
    assert metrics["tokens/count"] == 0
    assert metrics["tokens/nonfinite"] == count
    assert metrics["ess"] == 0.0  # no token, no trust


@every_objective
def test_a_single_token(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(8, [1], spread=0.6)
    expected = oracle.evaluate(name, tokens, **options, **EXTRAS)
    batch, output = run(name, tokens, **options, **EXTRAS)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-10)
    assert_allclose(gradient(batch.logp), expected.d_logp, rtol=1e-9, atol=1e-13)
    assert finished(output)["ess"] == 1.0  # (r)^2 / (1 r^2): one ratio agrees with itself


@every_objective
def test_sequences_of_one_token(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(9, [1] * 6, spread=0.6)
    expected = oracle.evaluate(name, tokens, **options, **EXTRAS)
    batch, output = run(name, tokens, **options, **EXTRAS)
    assert output.loss.item() == pytest.approx(expected.loss, rel=1e-10)
    assert_allclose(gradient(batch.logp), expected.d_logp, rtol=1e-9, atol=1e-13)


@every_objective
def test_zero_advantages_leave_only_the_kl(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(10, [4, 3], spread=0.6)
    tokens = replace(tokens, advantage=np.zeros(7))
    batch, output = run(name, tokens, **options)
    is_pulled = name in ("p3o", "two_anchor", "pact")
    # PACT's own strength is 0 then, and only P3O's pull is left of it
    is_pulled &= (name, options.get("anchor")) != ("pact", "model")
    if is_pulled and options.get("kl") != "none":
        # k3 is at least 0 at each token, and so is a KL over buckets; `importance` is at least 0
        # where the anchor is pi_b: r l - r + 1 has its minimum 0 at l = 0
        is_importance = options.get("kl", "importance") == "importance"
        assert output.loss.item() > 0 or (name != "p3o" and is_importance)
        assert gradient(batch.logp).any() or gradient(batch.top_logp).any()
    else:
        assert output.loss.item() == 0.0
        assert not gradient(batch.logp).any()


@every_objective
@dtypes
@pytest.mark.parametrize(
    "log_ratios",
    [
        [500.0] * 6,
        [-500.0] * 6,
        [500.0, 0.0, 0.1, -0.1, 0.0, 0.2],
        [-500.0, 0.0, 0.1, -0.1, 0.0, 0.2],
        [500.0, -500.0, 500.0, -500.0, 500.0, -500.0],
    ],
    ids=["all-above", "all-below", "one-above", "one-below", "both"],
)
def test_extreme_log_ratios_stay_finite(
    name: str, options: Options, dtype: torch.dtype, log_ratios: list[float]
) -> None:
    for sign in (1.0, -1.0):
        tokens = tokens_with_log_ratios(log_ratios, [sign, -sign, sign, -sign, sign, -sign])
        batch, output = run(name, tokens, dtype, **options, **EXTRAS)
        assert_finite(batch, output.loss)
        metrics = finished(output)
        assert all(np.isfinite(value) for value in metrics.values())
        assert 1 / 6 <= metrics["ess"] <= 1


@pytest.mark.parametrize("name", ["p3o", "two_anchor"])
@pytest.mark.parametrize(
    "log_ratios",
    [[500.0] * 6, [-500.0] * 6, [500.0, 0, 0, 0, 0, 0], [500.0, 500.0, 0, 0, 0, 0]],
    ids=["all-above", "all-below", "one-above", "two-above"],
)
@dtypes
def test_trust_that_cannot_be_measured_is_one_over_n(
    name: str, log_ratios: list[float], dtype: torch.dtype
) -> None:
    """Bounded ratios agree with each other; read as they stand they would give e = 1."""
    tokens = tokens_with_log_ratios(log_ratios, [1.0] * 6)
    # top_k puts nothing of the penalty in logp: its gradient there is -min(r, e) A / N alone
    batch, output = run(name, tokens, dtype, kl="top_k")
    assert finished(output)["ess"] == pytest.approx(1 / 6, rel=1e-6)
    assert finished(output)["weight/cap"] == pytest.approx(1 / 6, rel=1e-6)
    weight = np.minimum(np.exp(np.clip(log_ratios, -60, 60)), 1 / 6)
    assert_allclose(gradient(batch.logp), -weight / 6, rtol=1e-5)


def test_one_suppressed_token_leaves_the_trust_that_the_others_earn() -> None:
    # r = 0, 1, 1, 1: e = 9 / (4 * 3) = 3/4
    tokens = tokens_with_log_ratios([-500.0, 0.0, 0.0, 0.0], [1.0] * 4)
    _, output = run("p3o", tokens)
    assert finished(output)["ess"] == pytest.approx(0.75, rel=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1000, 1000), min_size=1, max_size=20))
def test_trust_is_never_outside_its_range_nor_the_loss_infinite(log_ratios: list[float]) -> None:
    count = len(log_ratios)
    tokens = tokens_with_log_ratios(log_ratios, [(-1.0) ** i for i in range(count)])
    for kl in ("importance", "k3", "top_k"):
        batch, output = run("two_anchor", tokens, torch.float32, kl=kl)
        assert_finite(batch, output.loss)
        assert 1 / count - 1e-12 <= finished(output)["ess"] <= 1


@pytest.mark.parametrize("edge", [60.0, -60.0])
def test_the_bound_on_the_ratio_itself_is_measured(edge: float) -> None:
    # all ratios at the bound, none beyond it: they do agree
    _, output = run("p3o", tokens_with_log_ratios([edge] * 3, [1.0] * 3))
    assert finished(output)["ess"] == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("kl", ["importance", "k3"])
@dtypes
def test_the_penalty_pulls_a_runaway_policy_back(kl: str, dtype: torch.dtype) -> None:
    # A = 0: the gradient on logp is the penalty's alone, and must have the sign of l.
    # importance: (1 - e) r x / N with r = exp(+-60): 60 to 500 times exp(60) above (x itself may
    # be bounded), and tiny below, but never exactly 0. k3: its slopes at |x| = 10, 1 - exp(-+10).
    tokens = tokens_with_log_ratios([500.0, -500.0, 0.0, 0.0], [0.0] * 4)
    batch, _ = run("p3o", tokens, dtype, kl=kl)
    above, below = gradient(batch.logp)[:2]
    factor = (1 - 1 / 4) / 4
    assert above > 0 > below
    if kl == "k3":
        assert above == pytest.approx(factor * (1 - exp(-10)), rel=1e-5)
        assert below == pytest.approx(factor * (1 - exp(10)), rel=1e-5)
    else:
        assert 59 <= above / (factor * exp(60)) <= 501
        assert 59 <= -below / (factor * exp(-60)) <= 501


def test_the_importance_penalty_is_exact_up_to_the_bound() -> None:
    # l = 50: r x = 50 exp(50), and the value r (x - 1) + 1 = 49 exp(50) + 1
    tokens = tokens_with_log_ratios([50.0, 0.0], [0.0] * 2)
    batch, output = run("p3o", tokens, kl="importance")
    assert gradient(batch.logp)[0] == pytest.approx(0.25 * 50 * exp(50), rel=1e-9)
    assert output.loss.item() == pytest.approx(0.25 * 49 * exp(50), rel=1e-9)


def test_the_reference_penalty_pulls_back_at_any_distance() -> None:
    tokens = tokens_with_log_ratios([0.0, 0.0], [0.0, 0.0])
    tokens = replace(tokens, reference_logp=np.array([-501.0, 499.0]))
    batch, output = run("grpo", tokens, torch.float32, reference_kl_coef=1.0)
    assert_allclose(gradient(batch.logp), [(1 - exp(-10)) / 2, (1 - exp(10)) / 2], rtol=1e-5)
    assert_finite(batch, output.loss)


@pytest.mark.parametrize("distance", [1e4, 1e9, 1e12, 1e30, -FLOAT32_LOWEST])
@dtypes
def test_a_finite_but_absurd_log_ratio_is_bounded_too(distance: float, dtype: torch.dtype) -> None:
    """Engines fill masked log-probs with -1e9, -1e30 or the lowest float: l is finite, so the token
    stays, and its ratio is exp(+-60) as for any other l beyond the bound."""
    # l = +distance, a token that the behavior policy could not have sampled
    unsampled = Tokens(
        logp=np.array([-1.0, -1.0]),
        behavior_logp=np.array([-distance, -1.0]),
        advantage=np.ones(2),
        sequence=np.arange(2),
    )
    batch, output = run("cispo", unsampled, dtype)
    assert_allclose(gradient(batch.logp), [-1.28 / 2, -1 / 2], rtol=1e-6)
    assert finished(output)["ratio/max"] == pytest.approx(exp(60), rel=1e-3)
    batch, output = run("p3o", unsampled, dtype)  # pulled back by (1 - e) r x / N, e = 1/2
    assert_finite(batch, output.loss)
    assert gradient(batch.logp)[0] >= 0.25 * 59 * exp(60)
    # l = -distance, a token that the policy has given up: r = exp(-60), nothing to learn from it
    given_up = replace(
        unsampled,
        logp=unsampled.behavior_logp,
        behavior_logp=unsampled.logp,
        advantage=-np.ones(2),
    )
    for name in ("grpo", "cispo", "p3o"):
        batch, output = run(name, given_up, dtype)
        assert_finite(batch, output.loss)
        assert abs(gradient(batch.logp)[0]) < 1e-20


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@dtypes
def test_dppo_measures_certain_and_impossible_tokens(divergence: str, dtype: torch.dtype) -> None:
    # p_b = 1 and p = 1/2; p_b = 1/2 and p = 1; both certain. Nothing is infinite, and the first
    # two have moved too far where the advantage says to move on.
    logp, behavior = np.array([log(0.5), 0.0, 0.0]), np.array([0.0, log(0.5), 0.0])
    tokens = Tokens(logp, behavior, np.array([-1.0, 1.0, 1.0]), np.arange(3))
    batch, output = run("dppo", tokens, dtype, divergence=divergence)
    assert_finite(batch, output.loss)
    assert_allclose(gradient(batch.logp), [0, 0, -1 / 3], rtol=1e-6)
    # and back again it may go: -w A / N with w = 1/2, 2 and 1
    batch, _ = run("dppo", replace(tokens, advantage=-tokens.advantage), dtype)
    assert_allclose(gradient(batch.logp), [-1 / 6, 2 / 3, 1 / 3], rtol=1e-6)


@dtypes
def test_a_sequence_far_from_the_data_has_no_weight_in_vespo(dtype: torch.dtype) -> None:
    for log_ratio in (500.0, 5.0, -50.0, -500.0):
        tokens = tokens_with_log_ratios([log_ratio, 0.0], [1.0, -1.0])
        batch, _ = run("vespo", tokens, dtype)
        assert abs(gradient(batch.logp)[0]) < 1e-30
        assert gradient(batch.logp)[1] == pytest.approx(0.5, rel=1e-6)


def test_vcpo_does_not_step_on_sequences_that_cannot_be_measured() -> None:
    # equal ratios beyond the bound would read as e = 1; 1/S is the least, and 0 for no sequence
    objective = build_objective("vcpo")
    tokens = tokens_with_log_ratios([500.0] * 4, [1.0] * 4)
    assert objective.learning_rate_factor(objective.totals(to_batch(tokens))) == 0.5
    nothing = tokens.take(np.arange(0))
    assert objective.learning_rate_factor(objective.totals(to_batch(nothing))) == 0.0


def test_a_truncated_support_stays_finite_and_is_left_by_the_policy() -> None:
    """top-p leaves pi_b = 0 on some of the K tokens; the policy must be pushed off them."""
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(-1)
    batch = TokenBatch(
        logp=policy[:2],
        behavior_logp=torch.log(torch.tensor([0.9, 0.1], dtype=torch.float64)),
        advantage=torch.zeros(2, dtype=torch.float64),
        sequence=torch.arange(2),
        top_logp=policy.expand(2, 3),
        behavior_top_logp=torch.tensor([[log(0.9), log(0.1), -inf]] * 2, dtype=torch.float64),
    )
    objective = build_objective("p3o", kl="top_k")
    loss = objective(batch, objective.totals(batch)).loss
    loss.backward()
    assert torch.isfinite(loss)
    assert loss > 0
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[2] > 0  # descent lowers the unsupported token ...
    assert logits.grad[0] < 0  # ... and raises what the behavior policy prefers


@pytest.mark.parametrize("name", ["p3o", "two_anchor"])
@dtypes
def test_truncated_and_full_supports_mix_in_one_batch(name: str, dtype: torch.dtype) -> None:
    tokens = oracle.random_tokens(5, [3, 3], spread=0.5)
    truncated = tokens.behavior_top_logp.copy()
    truncated[0, 2], truncated[1, 1:] = -inf, -inf
    truncated[1, 0] = 0.0  # top-p kept one token: all the mass is there
    tokens = replace(tokens, behavior_top_logp=truncated)
    batch, output = run(name, tokens, dtype, kl="top_k")
    assert_finite(batch, output.loss)
    assert all(np.isfinite(value) for value in finished(output).values())


def test_an_impossible_token_of_the_policy_adds_nothing_to_the_kl() -> None:
    # 0 log 0 = 0: policy (1/2, 1/2, 0) against (1/4, 1/4, 1/2): KL = log 2; r = 2, 1: e = 9/10
    tokens = Tokens(
        logp=np.log([0.5, 0.5]),
        behavior_logp=np.log([0.25, 0.5]),
        advantage=np.zeros(2),
        sequence=np.arange(2),
        top_logp=np.array([[log(0.5), log(0.5), -inf]] * 2),
        behavior_top_logp=np.log([[0.25, 0.25, 0.5]] * 2),
    )
    batch, output = run("p3o", tokens, kl="top_k")
    assert output.loss.item() == pytest.approx(0.1 * log(2), rel=1e-4)
    assert_finite(batch, output.loss)


@pytest.mark.parametrize("anchor_covers_all", [True, False])
def test_a_rest_bucket_of_mass_zero(anchor_covers_all: bool) -> None:
    # K covers all of one distribution: the bucket's mass there is 0 and its log must not appear
    half, less = np.log([[0.5, 0.5]]), np.log([[0.5, 0.4]])
    tokens = Tokens(
        logp=np.log([0.5, 0.2]),
        behavior_logp=np.log([0.25, 0.5]),
        advantage=np.zeros(2),
        sequence=np.arange(2),
        top_logp=np.repeat(less if anchor_covers_all else half, 2, axis=0),
        behavior_top_logp=np.repeat(half if anchor_covers_all else less, 2, axis=0),
    )
    batch, output = run("p3o", tokens, kl="top_k")
    assert_finite(batch, output.loss)
    assert output.loss.item() > 0
    if not anchor_covers_all:  # 1/2 log(0.5 / 0.4), the empty bucket adds nothing
        e = oracle.normalized_ess(tokens.logp - tokens.behavior_logp)
        assert output.loss.item() == pytest.approx((1 - e) * 0.5 * log(1.25), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("p30", "p3o"), ("grp", "grpo"), ("twoanchor", "two_anchor"), ("reenforce", "reinforce")],
)
def test_an_unknown_objective_proposes_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean '{near}'"):
        ObjectiveConfig(name=wrong)


def test_an_unknown_objective_far_from_all_lists_them() -> None:
    with pytest.raises(ValueError, match=r"reinforce.*grpo.*two_anchor") as caught:
        ObjectiveConfig(name="zzzzzz")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("p3o", "clip_low"),
        ("p3o", "clip_high"),
        ("two_anchor", "weight_cap"),
        ("reinforce", "kl"),
        ("grpo", "kl"),
        ("cispo", "clip_low"),
        ("gspo", "ess_scope"),
        ("grpo", "needs_proximal"),
    ],
)
def test_an_option_of_another_objective_is_refused(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has no option '{option}'.*entropy_coef"):
        ObjectiveConfig.model_validate({"name": name, option: 0.1})


def test_a_misspelt_option_proposes_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'clip_high'"):
        ObjectiveConfig.model_validate({"name": "grpo", "clip_hihg": 0.3})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("grpo", "clip_low", -0.1),
        ("grpo", "clip_low", 1.5),
        ("grpo", "clip_high", -0.1),
        ("grpo", "clip_high", inf),
        ("dapo", "clip_low", nan),
        ("dapo", "clip_high", -1.0),
        ("gspo", "clip_low", -1e-4),
        ("gspo", "clip_low", 2.0),
        ("gspo", "clip_high", nan),
        ("gspo", "clip_high", -1e-4),
        ("cispo", "clip_high", True),
        ("cispo", "clip_high", -0.5),
        ("decoupled", "weight_cap", -5.0),
        ("decoupled", "clip_low", -0.2),
        ("decoupled", "clip_high", "0.2"),
        ("decoupled", "weight_cap", None),
        ("grpo_is", "clip_low", 1.1),
        ("grpo_is", "clip_high", nan),
        ("grpo_is", "correction", "truncate"),
        ("grpo_is", "correction_cap", -1.0),
        ("dppo", "divergence", "k3"),
        ("dppo", "threshold", -0.1),
        ("dppo", "weight_cap", inf),
        ("m2po", "threshold", -0.04),
        ("vespo", "k_positive", -1.0),
        ("vespo", "lambda_positive", nan),
        ("vespo", "k_negative", "3"),
        ("vespo", "lambda_negative", -2.0),
        ("vcpo", "weight_cap", -8.0),
        ("vcpo", "base_ess", 0.0),
        ("vcpo", "base_ess", 1.1),
        ("p3o", "kl", "exact"),
        ("p3o", "kl", True),
        ("p3o", "ess_scope", "batch"),
        ("two_anchor", "kl", "k1"),
        ("two_anchor", "ess_scope", "rank"),
        *((name, "entropy_coef", nan) for name in OBJECTIVES),
        *((name, "reference_kl_coef", -inf) for name in OBJECTIVES),
        ("p3o", "entropy_coef", False),
        ("p3o", "reference_kl_coef", -0.1),
    ],
)
def test_a_bad_value_is_refused_by_name(name: str, option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"^{option} must be .*, not ") as caught:
        build_objective(name, **{option: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("decoupled", {}, "proximal_logp"),
        ("grpo_is", {}, "proximal_logp"),
        ("two_anchor", {}, "proximal_logp"),
        ("p3o", {"kl": "top_k"}, "top_logp"),
        ("p3o", {"kl": "top_k"}, "anchor_top_logp"),
        ("p3o", {"kl": "top_k", "anchor": "sampler"}, "behavior_top_logp"),
        ("two_anchor", {"kl": "top_k"}, "top_logp"),
        ("two_anchor", {"kl": "top_k"}, "anchor_top_logp"),
        ("two_anchor", {"kl": "top_k", "anchor": "sampler"}, "behavior_top_logp"),
        ("two_anchor", {"kl": "top_k"}, "proximal_top_logp"),
        ("pact", {}, "proximal_logp"),
        ("pact", {"kl": "top_k"}, "top_logp"),
        ("pact", {"kl": "top_k"}, "proximal_top_logp"),
        ("pact", {"kl": "top_k"}, "anchor_top_logp"),
        *((name, {"entropy_coef": 0.1}, "entropy") for name in OBJECTIVES),
        *((name, {"reference_kl_coef": 0.1}, "reference_logp") for name in OBJECTIVES),
    ],
)
def test_a_missing_field_is_named_with_what_needs_it(
    name: str, options: Options, missing: str
) -> None:
    tokens = replace(oracle.random_tokens(0, [3, 2]), **{missing: None})
    with pytest.raises(ValueError, match=rf"needs TokenBatch\.{missing}\b"):
        run(name, tokens, **options)


def test_optional_fields_may_be_absent_where_nobody_needs_them() -> None:
    full = oracle.random_tokens(0, [3, 2])
    bare = Tokens(full.logp, full.behavior_logp, full.advantage, full.sequence)
    names = ("reinforce", "grpo", "dapo", "gspo", "cispo", "dppo", "m2po", "vespo", "vcpo", "p3o")
    for name in names:
        loss = run(name, bare)[1].loss.item()
        assert loss == pytest.approx(oracle.evaluate(name, bare).loss, rel=1e-10)


def fields_of_three_tokens() -> dict[str, torch.Tensor]:
    return {
        "logp": torch.zeros(3),
        "behavior_logp": torch.zeros(3),
        "advantage": torch.zeros(3),
        "sequence": torch.arange(3),
    }


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logp", torch.zeros(3, 1)),
        ("logp", torch.zeros(())),
        ("behavior_logp", torch.zeros(2)),
        ("advantage", torch.zeros(3, 1)),
        ("sequence", torch.arange(4)),
        ("proximal_logp", torch.zeros(4)),
        ("reference_logp", torch.zeros(1)),
        ("entropy", torch.zeros(())),
        ("top_logp", torch.zeros(3)),
        ("top_logp", torch.zeros(2, 5)),
        ("behavior_top_logp", torch.zeros(3, 5, 1)),
        ("proximal_top_logp", torch.zeros(5, 3)),
    ],
)
def test_a_wrong_shape_is_refused_by_name(field: str, value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"TokenBatch\.{field} must have shape \[") as caught:
        TokenBatch(**{**fields_of_three_tokens(), field: value})
    assert str(list(value.shape)) in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logp", torch.zeros(3, dtype=torch.int64)),
        ("behavior_logp", torch.zeros(3, dtype=torch.int32)),
        ("advantage", torch.tensor([True, False, True])),
        ("sequence", torch.zeros(3)),
        ("sequence", torch.tensor([True, False, True])),
        ("proximal_logp", torch.zeros(3, dtype=torch.int64)),
        ("entropy", torch.zeros(3, dtype=torch.complex64)),
        ("top_logp", torch.zeros(3, 2, dtype=torch.int64)),
    ],
)
def test_a_wrong_dtype_is_refused_by_name(field: str, value: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=rf"TokenBatch\.{field} must hold .*, not torch\."):
        TokenBatch(**{**fields_of_three_tokens(), field: value})


def test_top_fields_of_different_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="agree in K"):
        TokenBatch(
            **fields_of_three_tokens(),
            top_logp=torch.zeros(3, 4),
            behavior_top_logp=torch.zeros(3, 5),
        )
