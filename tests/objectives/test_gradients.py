"""The gradient of every objective: closed forms, and differences where nothing is detached."""

from dataclasses import replace
from math import log

import numpy as np
import oracle
import pytest
import torch
from numpy.testing import assert_allclose
from objective_cases import (
    EXTRAS,
    Options,
    every_objective,
    finished,
    gradient,
    rounded_to_float32,
    run,
    to_batch,
)
from oracle import Array, Tokens
from torch import Tensor

from trustbatch.objectives import build_objective

SMOOTH = [
    ("reinforce", {}),
    ("grpo", {"clip_low": 0.1, "clip_high": 0.3}),
    ("gspo", {"clip_low": 0.03, "clip_high": 0.05}),
]
SMOOTH_BUT_FOR_THE_MASK = [
    ("decoupled", {}),
    *(
        ("grpo_is", {"correction": f"{level}_{rule}", "correction_cap": 1.1})
        for level in ("token", "sequence")
        for rule in ("truncate", "mask")
    ),
    ("m2po", {}),
]


@every_objective
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["alone", "with-entropy-and-reference"])
@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
def test_gradient_equals_its_closed_form(
    name: str, options: Options, extras: Options, spread: float
) -> None:
    for seed in range(4):
        tokens = oracle.random_tokens(seed, [5, 1, 3, 8], spread=spread)
        expected = oracle.evaluate(name, tokens, **options, **extras)
        batch, _ = run(name, tokens, **options, **extras)
        assert_allclose(gradient(batch.logp), expected.d_logp, rtol=1e-9, atol=1e-12)
        assert_allclose(gradient(batch.entropy), expected.d_entropy, rtol=1e-9, atol=1e-15)
        assert_allclose(gradient(batch.top_logp), expected.d_top_logp, rtol=1e-9, atol=1e-12)


@every_objective
def test_float32_gradient_equals_its_closed_form(name: str, options: Options) -> None:
    tokens = rounded_to_float32(oracle.random_tokens(1, [5, 1, 3, 8], spread=0.7))
    expected = oracle.evaluate(name, tokens, **options, **EXTRAS)
    batch, _ = run(name, tokens, torch.float32, **options, **EXTRAS)
    assert_allclose(gradient(batch.logp), expected.d_logp, rtol=1e-4, atol=1e-6)
    assert_allclose(gradient(batch.top_logp), expected.d_top_logp, rtol=1e-4, atol=1e-6)


def test_p3o_gradient_by_hand() -> None:
    # Behavior 1/4; r = 3, 1; e = 0.8; A = 1, -1; N = 2.
    # Token 0: -(0.8 * 1)/2 + 0.2 * (3 log 3)/2 = -0.4 + 0.3 log 3
    # Token 1: +(0.8 * 1)/2 + 0.2 * (1 log 1)/2 = 0.4
    tokens = Tokens(
        logp=np.log([3 / 4, 1 / 4]),
        behavior_logp=np.log([1 / 4, 1 / 4]),
        advantage=np.array([1.0, -1.0]),
        sequence=np.array([0, 1]),
    )
    batch, _ = run("p3o", tokens)
    assert_allclose(gradient(batch.logp), [-0.4 + 0.3 * log(3), 0.4], rtol=1e-12)
    # k3: 0.2 (1 - 1/3)/2 in place of the penalty's pull
    batch, _ = run("p3o", tokens, kl="k3")
    assert_allclose(gradient(batch.logp), [-0.4 + 0.2 / 3, 0.4], rtol=1e-12)


def test_p3o_pulls_to_the_model_and_not_to_the_sampler() -> None:
    # The tokens above, sampled by 1/4; the model itself had 3/4 and 1/8: r, e and the caps stay.
    # importance: r x with x = log(pi / model). Token 0: x = 0, no pull at all.
    # Token 1: pi = 1/4, model = 1/8, x = log 2: 0.4 + 0.2 * log(2) / 2
    tokens = Tokens(
        logp=np.log([3 / 4, 1 / 4]),
        behavior_logp=np.log([1 / 4, 1 / 4]),
        advantage=np.array([1.0, -1.0]),
        sequence=np.array([0, 1]),
        anchor_logp=np.log([3 / 4, 1 / 8]),
    )
    batch, output = run("p3o", tokens)
    assert_allclose(gradient(batch.logp), [-0.4, 0.4 + 0.1 * log(2)], rtol=1e-12)
    assert_allclose(finished(output)["weight/cap"], 0.8, rtol=1e-12)
    batch, _ = run("p3o", tokens, anchor="sampler")
    assert_allclose(gradient(batch.logp), [-0.4 + 0.3 * log(3), 0.4], rtol=1e-12)


def test_grpo_gradient_by_hand_is_silent_only_where_the_clip_binds() -> None:
    # -r A / 4 where not clipped, 0 where clipped (see the golden value of the same four tokens)
    tokens = Tokens(
        logp=np.log([1.5 / 4, 1.5 / 4, 0.5 / 4, 0.5 / 4]),
        behavior_logp=np.log([1 / 4] * 4),
        advantage=np.array([1.0, -1.0, 1.0, -1.0]),
        sequence=np.arange(4),
    )
    batch, _ = run("grpo", tokens)
    assert_allclose(gradient(batch.logp), [0.0, 0.375, -0.125, 0.0], rtol=1e-12)


def test_decoupled_gradient_by_hand() -> None:
    # weight 2 (proximal 1/2 over behavior 1/4), q = 1, A = 3, N = 1: -2 * 1 * 3 = -6
    tokens = Tokens(
        logp=np.log([1 / 2]),
        behavior_logp=np.log([1 / 4]),
        advantage=np.array([3.0]),
        sequence=np.array([0]),
        proximal_logp=np.log([1 / 2]),
    )
    batch, _ = run("decoupled", tokens)
    assert_allclose(gradient(batch.logp), [-6.0], rtol=1e-12)


def test_the_weights_of_the_rivals_are_constants() -> None:
    """One token, A = 3: the gradient is -3 times the weight, whatever the weight's own slope is."""
    tokens = Tokens(
        logp=np.log([1 / 2]),
        behavior_logp=np.log([2 / 5]),
        advantage=np.array([3.0]),
        sequence=np.array([0]),
    )
    w = 1.25
    for name, weight in {"dppo": w, "vcpo": w, "vespo": w**2 * np.exp(3 * (1 - w))}.items():
        batch, _ = run(name, tokens)
        assert_allclose(gradient(batch.logp), [-3 * weight], rtol=1e-12)


@pytest.mark.parametrize(("name", "options"), SMOOTH)
def test_gradcheck_where_nothing_is_detached(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(3, [4, 2, 5], spread=0.5)
    objective = build_objective(name, **options, **EXTRAS)
    batch = to_batch(tokens)

    def loss(logp: Tensor, entropy: Tensor) -> Tensor:
        moved = replace(batch, logp=logp, entropy=entropy)
        return objective(moved, objective.totals(moved)).loss

    assert torch.autograd.gradcheck(loss, (batch.logp, batch.entropy), eps=1e-6, atol=1e-7)


def central_differences(name: str, tokens: Tokens, options: Options, step: float = 1e-6) -> Array:
    """The slope of the oracle's value in each logp."""
    slopes = np.zeros(len(tokens.logp))
    for i in range(len(slopes)):
        nudge = step * np.eye(len(slopes))[i]
        above = oracle.evaluate(name, replace(tokens, logp=tokens.logp + nudge), **options)
        below = oracle.evaluate(name, replace(tokens, logp=tokens.logp - nudge), **options)
        slopes[i] = (above.loss - below.loss) / (2 * step)
    return slopes


@pytest.mark.parametrize(("name", "options"), [*SMOOTH, *SMOOTH_BUT_FOR_THE_MASK])
def test_gradient_equals_differences_of_the_oracle(name: str, options: Options) -> None:
    """The oracle's own closed forms are checked here too: both must equal the differences."""
    tokens = oracle.random_tokens(4, [4, 2, 5], spread=0.5)
    slopes = central_differences(name, tokens, options)
    batch, _ = run(name, tokens, **options)
    assert_allclose(gradient(batch.logp), slopes, atol=1e-8)
    assert_allclose(oracle.evaluate(name, tokens, **options).d_logp, slopes, atol=1e-8)


@pytest.mark.parametrize("kl", ["importance", "k3", "top_k"])
@pytest.mark.parametrize("name", ["p3o", "two_anchor"])
def test_only_the_weights_are_detached_in_p3o(name: str, kl: str) -> None:
    """With e, the weights and the anchor frozen, P3O's gradient is the slope of what is left."""
    tokens = oracle.random_tokens(5, [4, 2, 5], spread=0.6)
    frozen = oracle.evaluate(name, tokens, kl=kl)
    e = frozen.ess["ess"]
    weight = np.minimum(np.exp(tokens.logp - tokens.behavior_logp), e)
    anchor, anchor_top = tokens.anchor_logp, tokens.anchor_top_logp
    if name == "two_anchor":
        w_b, w_prox = 1 - frozen.ess["behavior"], 1 - frozen.ess["proximal"]
        anchor = oracle.log_mixture(w_b, anchor, w_prox, tokens.proximal_logp)
        anchor_top = oracle.log_mixture(w_b, anchor_top, w_prox, tokens.proximal_top_logp)

    def value(logp: Array, top_logp: Array) -> float:
        if kl == "top_k":
            penalty, _ = oracle.top_k_kl(top_logp, anchor_top)
        elif kl == "k3":
            penalty = oracle.k3(logp - anchor)
        else:
            penalty, _ = oracle.importance_kl(logp, anchor, tokens.behavior_logp)
        return float(np.mean(-weight * tokens.advantage * logp + (1 - e) * penalty))

    step = 1e-6
    batch, _ = run(name, tokens, kl=kl)
    for i in range(len(tokens.logp)):
        nudge = step * np.eye(len(tokens.logp))[i]
        above, below = (value(tokens.logp + s * nudge, tokens.top_logp) for s in (1, -1))
        assert gradient(batch.logp)[i] == pytest.approx((above - below) / (2 * step), abs=1e-8)
        nudge = np.zeros_like(tokens.top_logp)
        nudge[i, 1] = step
        above, below = (value(tokens.logp, tokens.top_logp + s * nudge) for s in (1, -1))
        top_gradient = gradient(batch.top_logp)[i, 1]
        assert top_gradient == pytest.approx((above - below) / (2 * step), abs=1e-8)


def test_no_gradient_reaches_the_anchors() -> None:
    """A proximal snapshot computed with gradient switched on is still a constant."""
    tokens = oracle.random_tokens(6, [4, 2, 5], spread=0.6)
    for name in ("decoupled", "grpo_is", "two_anchor", "pact"):
        for kl in ("importance", "k3", "top_k") if name in ("two_anchor", "pact") else (None,):
            batch = to_batch(tokens)
            batch.proximal_logp.requires_grad_()
            batch.proximal_top_logp.requires_grad_()
            objective = build_objective(name, **({"kl": kl} if kl else {}))
            objective(batch, objective.totals(batch)).loss.backward()
            assert not gradient(batch.proximal_logp).any()
            assert not gradient(batch.proximal_top_logp).any()


def test_k3_is_continuous_with_continuous_slope_at_its_edges() -> None:
    # Through REINFORCE with A = 0 and one token, reference_kl_coef = 1: loss = k3(logp - reference)
    def k3_and_slope(x: float) -> tuple[float, float]:
        tokens = Tokens(
            logp=np.array([-1.0]),
            behavior_logp=np.array([-1.0]),
            advantage=np.zeros(1),
            sequence=np.array([0]),
            reference_logp=np.array([-1.0 - x]),
        )
        batch, output = run("reinforce", tokens, reference_kl_coef=1.0)
        return output.loss.item(), float(gradient(batch.logp)[0])

    for edge in (-10.0, 10.0):
        inside, outside = k3_and_slope(edge * (1 - 1e-9)), k3_and_slope(edge * (1 + 1e-9))
        at_edge = (edge + np.exp(-edge) - 1, 1 - np.exp(-edge))
        assert inside == pytest.approx(at_edge, rel=1e-6)
        assert outside == pytest.approx(at_edge, rel=1e-6)
        # beyond the edge it is the tangent: five further along, five slopes higher
        value, slope = k3_and_slope(edge + np.sign(edge) * 5)
        assert slope == pytest.approx(at_edge[1], rel=1e-9)
        assert value == pytest.approx(at_edge[0] + 5 * abs(at_edge[1]), rel=1e-9)
    assert k3_and_slope(0.0) == (0.0, 0.0)
    for x in (-500.0, -10.0, -0.1, 0.1, 10.0, 500.0):
        value, slope = k3_and_slope(x)
        assert value > 0
        assert slope * x > 0
