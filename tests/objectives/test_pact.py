"""What PACT measures: by hand, and what must and must not move it."""

from dataclasses import replace
from math import log, sqrt

import numpy as np
import oracle
import pytest
from numpy.testing import assert_allclose
from objective_cases import evaluate_in_parts, finished, gradient, run
from oracle import Tokens


def by_hand() -> Tokens:
    """Two sequences of two tokens, sampled with 1/4 each: r = 2, 1 and 1, 1; prox has 1/4 each."""
    return Tokens(
        logp=np.log([2 / 4, 1 / 4, 1 / 4, 1 / 4]),
        behavior_logp=np.log([1 / 4] * 4),
        proximal_logp=np.log([1 / 4] * 4),
        advantage=np.array([1.0, 1.0, -2.0, -2.0]),
        sequence=np.array([0, 0, 1, 1]),
        source=np.array([0, 0, 1, 1]),
    )


def test_loss_and_gradient_by_hand() -> None:
    # Source 0: e = 3^2 / (2 * 5) = 0.9; source 1: e = 1. rms(A) = sqrt((1 + 4) / 2).
    # e_prox = 5^2 / (4 * 7) = 25/28, no mass has left: n_eff = 2 (25/28)^2 = 1.594.
    tokens = by_hand()
    pull = sqrt(5 / 2) / sqrt(2 * (25 / 28) ** 2)
    batch, output = run("pact", tokens)
    values = finished(output)
    assert values["pull/strength"] == pytest.approx(pull, rel=1e-12)
    assert values["pull/sequences"] == pytest.approx(2 * (25 / 28) ** 2, rel=1e-12)
    assert values["pull/ess"] == pytest.approx(25 / 28, rel=1e-12)
    assert values["pull/support"] == 1.0
    # capped scores -0.9, -0.9, 2, 2; both KLs pull at the first token only, by r log r: to the
    # proximal policy with c, to the model, which is the sampler here, with 1 - 0.9
    expected = [-0.9 + (pull + 0.1) * 2 * log(2), -0.9, 2.0, 2.0]
    assert_allclose(gradient(batch.logp), np.array(expected) / 4, rtol=1e-12)
    kl = 2 * (log(2) - 1) + 1
    score = -0.9 * (log(1 / 2) + log(1 / 4)) + 4 * log(1 / 4)
    assert output.loss.item() == pytest.approx((score + (pull + 0.1) * kl) / 4, rel=1e-12)
    batch, _ = run("pact", tokens, anchor="proximal")
    expected = [-0.9 + pull * 2 * log(2), -0.9, 2.0, 2.0]
    assert_allclose(gradient(batch.logp), np.array(expected) / 4, rtol=1e-12)
    for option, strength in (("deviation", sqrt(5 / 2)), (0.3, 0.3)):
        values = finished(run("pact", tokens, pull=option)[1])
        assert values["pull/strength"] == pytest.approx(strength, rel=1e-12)


def test_the_pull_is_never_stronger_than_the_advantage() -> None:
    tokens = replace(by_hand(), logp=np.log([0.9, 0.01, 0.9, 0.01]))
    values = finished(run("pact", tokens)[1])
    assert values["pull/sequences"] < 1
    assert values["pull/strength"] == pytest.approx(sqrt(5 / 2), rel=1e-12)


def test_mass_that_leaves_the_support_is_seen_where_the_effective_sample_size_is_blind() -> None:
    # every ratio falls alike, as where top-p never samples what gains
    tokens = by_hand()
    tokens = replace(tokens, logp=tokens.behavior_logp + log(0.8))
    values = finished(run("pact", tokens)[1])
    assert values["ess"] == pytest.approx(1.0, rel=1e-12)
    assert values["pull/ess"] == pytest.approx(1.0, rel=1e-12)
    assert values["pull/support"] == pytest.approx(0.8, rel=1e-12)
    assert values["pull/sequences"] == pytest.approx(2 * 0.8**2, rel=1e-12)


def test_temperature_alone_is_no_drift() -> None:
    tokens = oracle.random_tokens(3, [6, 4, 5], spread=0.0)
    tokens = replace(tokens, logp=tokens.anchor_logp, proximal_logp=tokens.anchor_logp)
    values = finished(run("pact", tokens)[1])
    assert values["one_minus_ess"] > 0.01  # the sampler is another distribution
    assert values["pull/ess"] == pytest.approx(1.0, rel=1e-12)
    assert values["pull/support"] == 1.0
    assert values["pull/sequences"] == pytest.approx(3.0, rel=1e-12)


def test_tokens_that_nobody_doubts_do_not_dilute_the_drift() -> None:
    """Doubling the tokens by such as have ratio 1 leaves a sequence's drift what it was."""
    tokens = oracle.random_tokens(4, [200] * 8, spread=0.05, proximal_spread=0.05)
    tokens = replace(tokens, behavior_logp=tokens.proximal_logp)  # fresh, at temperature 1
    certain = replace(tokens, logp=tokens.proximal_logp)
    both = [np.concatenate([getattr(t, f) for t in (tokens, certain)]) for f in FIELDS]
    twice = Tokens(**dict(zip(FIELDS, both, strict=True)))
    once = finished(run("pact", tokens)[1])
    diluted = finished(run("pact", twice)[1])
    assert once["pull/sequences"] < 0.8 * 8  # there is a drift to be seen
    assert diluted["one_minus_ess"] == pytest.approx(once["one_minus_ess"] / 2, rel=0.05)
    assert diluted["pull/strength"] == pytest.approx(once["pull/strength"], rel=0.05)


FIELDS = ("logp", "behavior_logp", "advantage", "sequence", "proximal_logp", "source")


def test_a_stale_source_does_not_tax_a_fresh_one() -> None:
    tokens = oracle.random_tokens(5, [6, 6], spread=1.0)
    is_fresh = np.repeat([True, False], 6)
    tokens = replace(
        tokens,
        behavior_logp=np.where(is_fresh, tokens.logp, tokens.behavior_logp),
        proximal_logp=tokens.logp,
        source=np.where(is_fresh, 0, 1),
    )
    tokens = replace(tokens, anchor_logp=tokens.behavior_logp)
    batch, output = run("pact", tokens)
    fresh = gradient(batch.logp)[:6]
    assert_allclose(fresh, -tokens.advantage[:6] / 12, rtol=1e-12)  # REINFORCE's
    one_batch, _ = run("pact", replace(tokens, source=np.zeros(12, dtype=np.int64)))
    assert (np.abs(gradient(one_batch.logp)[:6]) < np.abs(fresh)).all()  # capped by both
    assert finished(output)["weight/cap"] < 1


def test_parts_of_a_step_need_not_have_the_same_sources() -> None:
    tokens = oracle.random_tokens(6, [5, 4, 3], spread=0.6)
    source = np.repeat([0, 2, 2], [5, 4, 3])
    tokens = replace(tokens, source=source)
    expected = oracle.evaluate("pact", tokens, kl="top_k")
    parts = [tokens.take(np.flatnonzero(source == each)) for each in (0, 2)]
    result, metrics = evaluate_in_parts("pact", parts, kl="top_k")
    assert result.loss == pytest.approx(expected.loss, rel=1e-10)
    assert_allclose(result.d_logp, expected.d_logp, rtol=1e-9)
    assert_allclose(result.d_top_logp, expected.d_top_logp, rtol=1e-9, atol=1e-12)
    assert metrics["pull/strength"] == pytest.approx(expected.ess["pull"], rel=1e-10)
    assert metrics["pull/sequences"] == pytest.approx(expected.ess["sequences"], rel=1e-10)


def test_without_sources_all_tokens_are_of_one() -> None:
    tokens = oracle.random_tokens(7, [5, 4], spread=0.6)
    none = run("pact", replace(tokens, source=None))[1].loss.item()
    one = run("pact", replace(tokens, source=np.zeros(9, dtype=np.int64)))[1].loss.item()
    assert none == one
