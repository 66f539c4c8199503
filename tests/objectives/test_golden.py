"""The value of every objective: by hand on a few tokens, and against the oracle on many."""

from dataclasses import replace
from math import exp, log, nan

import numpy as np
import oracle
import pytest
import torch
from objective_cases import EXTRAS, Options, every_objective, rounded_to_float32, run, to_batch
from oracle import Tokens

from trustbatch.objectives import build_objective


def tokens_with_ratios(
    ratios: list[float], advantages: list[float], sequence: list[int] | None = None, **more: object
) -> Tokens:
    """Tokens of behavior probability 1/4 and the given ratios, so that logp = log(ratio / 4)."""
    r = np.array(ratios)
    return Tokens(
        logp=np.log(r / 4),
        behavior_logp=np.full(len(r), log(0.25)),
        advantage=np.array(advantages, dtype=np.float64),
        sequence=np.array(sequence or range(len(r)), dtype=np.int64),
        **more,
    )


def loss_of(name: str, tokens: Tokens, **options: float | str) -> float:
    return run(name, tokens, **options)[1].loss.item()


def test_reinforce_by_hand() -> None:
    # -(1/2) (2 log(1/4) - 1 log(1/2)) = -(1/2) (-4 log 2 + log 2) = 1.5 log 2
    tokens = tokens_with_ratios([1.0, 2.0], [2.0, -1.0])
    assert loss_of("reinforce", tokens) == pytest.approx(1.5 * log(2), abs=1e-12)


def test_grpo_by_hand_on_all_four_sides_of_the_clip() -> None:
    # r = 1.5, A = +1: min(1.5, 1.2)   =  1.2   clipped above
    # r = 1.5, A = -1: min(-1.5, -1.2) = -1.5   not clipped: the loss must grow
    # r = 0.5, A = +1: min(0.5, 0.8)   =  0.5   not clipped
    # r = 0.5, A = -1: min(-0.5, -0.8) = -0.8   clipped below
    # -(1.2 - 1.5 + 0.5 - 0.8) / 4 = 0.15
    tokens = tokens_with_ratios([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    assert loss_of("grpo", tokens) == pytest.approx(0.15, abs=1e-12)


def test_dapo_by_hand_has_more_room_above_than_below() -> None:
    # as above with 1.28 in place of 1.2: -(1.28 - 1.5 + 0.5 - 0.8) / 4 = 0.13
    tokens = tokens_with_ratios([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    assert loss_of("dapo", tokens) == pytest.approx(0.13, abs=1e-12)


def test_grpo_keeps_its_two_bounds_apart() -> None:
    # low 0.1: 1 - 0.1 = 0.9 for the last token; high 0.4: 1.4 for the first
    # -(1.4 - 1.5 + 0.5 - 0.9) / 4 = 0.125
    tokens = tokens_with_ratios([1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0])
    loss = loss_of("grpo", tokens, clip_low=0.1, clip_high=0.4)
    assert loss == pytest.approx(0.125, abs=1e-12)


def test_gspo_by_hand_averages_over_sequences_not_tokens() -> None:
    # sequence 0 has ratios 4, 1, 1/2: s = (4 * 1 * 1/2)^(1/3) = 2^(1/3) = 1.26, A = +1, clipped to
    # 1.0004. Sequence 1 has the single ratio 1/4: s = 1/4, A = +2, not clipped: 0.5.
    # -(1.0004 + 0.5) / 2 = -0.7502
    tokens = tokens_with_ratios([4.0, 1.0, 0.5, 0.25], [1.0, 1.0, 1.0, 2.0], [7, 7, 7, 3])
    assert loss_of("gspo", tokens) == pytest.approx(-0.7502, abs=1e-12)


def test_cispo_by_hand() -> None:
    # weights min(2, 1.28) = 1.28 and min(1/2, 1.28) = 1/2
    # -(1.28 * 1 * log(2/4) + 0.5 * (-2) * log(1/8)) / 2 = (1.28 log 2 - 3 log 2) / 2 = -0.86 log 2
    tokens = tokens_with_ratios([2.0, 0.5], [1.0, -2.0])
    assert loss_of("cispo", tokens) == pytest.approx(-0.86 * log(2), abs=1e-12)


def test_decoupled_by_hand() -> None:
    # behavior 1/4 everywhere. Token 0: proximal 1/2, policy 1/2: weight 2, q 1, A 1: 2 * 1 = 2.
    # Token 1: proximal 1/8, policy 1/4: weight 1/2, q 2, A 1: 1/2 * min(2, 1.2) = 0.6.
    # Token 2: proximal 1/4 e^3, weight min(e^3, 5) = 5, q = 1/2, A -1: 5 * min(-1/2, -0.8) = -4.
    # -(2 + 0.6 - 4) / 3 = 1.4 / 3
    tokens = tokens_with_ratios(
        [2.0, 1.0, 0.5 * exp(3)],
        [1.0, 1.0, -1.0],
        proximal_logp=np.array([log(1 / 2), log(1 / 8), log(1 / 4) + 3]),
    )
    assert loss_of("decoupled", tokens) == pytest.approx(1.4 / 3, abs=1e-12)


@pytest.mark.parametrize(
    ("correction", "cap", "expected"),
    [
        # u = 2, 1.6 | 2.5 at the tokens, A = 1, 1 | -2, and q = 1
        ("token_truncate", 1.8, 0.2 / 3),  # 1.8 + 1.6 - 2 * 1.8 = -0.2
        ("token_mask", 1.8, -1.6 / 3),  # 0 + 1.6 - 0
        # u = 3.2, 3.2 | 2.5 of the sequences
        ("sequence_truncate", 3.0, -1 / 3),  # 3 + 3 - 2 * 2.5 = 1
        ("sequence_mask", 3.0, 5 / 3),  # 0 + 0 - 2 * 2.5
        ("sequence_mask", 3.3, -1.4 / 3),  # 3.2 + 3.2 - 5: what is kept keeps its ratio
    ],
)
def test_grpo_is_by_hand(correction: str, cap: float, expected: float) -> None:
    tokens = tokens_with_ratios([2.0, 1.6, 2.5], [1.0, 1.0, -2.0], [7, 7, 3])
    tokens = replace(tokens, proximal_logp=tokens.logp)
    loss = loss_of("grpo_is", tokens, correction=correction, correction_cap=cap)
    assert loss == pytest.approx(expected, abs=1e-12)


def test_grpo_is_by_hand_clips_to_the_proximal_policy() -> None:
    # behavior 1/4, proximal 1/2, policy 1: u = 2 and q = 2, A = 1: 2 * min(2, 1.2)
    tokens = tokens_with_ratios([4.0], [1.0], proximal_logp=np.log([1 / 2]))
    assert loss_of("grpo_is", tokens) == pytest.approx(-2.4, abs=1e-12)


def moved_by_different_amounts() -> Tokens:
    # p_b = 1/4; p = 3/8, 1/2, 1/8, 1/20, and 1/2 against the advantage
    return tokens_with_ratios([1.5, 2.0, 0.5, 0.2, 2.0], [1.0, 1.0, -1.0, -1.0, -1.0])


def test_dppo_by_hand_drops_what_has_moved_more_than_the_threshold() -> None:
    # |p - p_b| = 1/8, 1/4, 1/8, 1/5: the second and the fourth go, and the last pulls back
    expected = -(1.5 * log(3 / 8) - 0.5 * log(1 / 8) - 2 * log(1 / 2)) / 5
    assert loss_of("dppo", moved_by_different_amounts()) == pytest.approx(expected, abs=1e-12)
    # a cap of 1.2 on the weights 1.5 and 2
    expected = -(1.2 * log(3 / 8) - 0.5 * log(1 / 8) - 1.2 * log(1 / 2)) / 5
    loss = loss_of("dppo", moved_by_different_amounts(), weight_cap=1.2)
    assert loss == pytest.approx(expected, abs=1e-12)


def test_dppo_by_hand_with_the_binary_kl() -> None:
    # KL(p_b || p) = 1/4 log(1/4 / p) + 3/4 log(3/4 / (1 - p)): 0.035, 0.131, 0.058, 0.225
    expected = -(1.5 * log(3 / 8) - 2 * log(1 / 2)) / 5
    loss = loss_of("dppo", moved_by_different_amounts(), divergence="kl", threshold=0.05)
    assert loss == pytest.approx(expected, abs=1e-12)
    expected = -(1.5 * log(3 / 8) - 0.5 * log(1 / 8) - 2 * log(1 / 2)) / 5
    loss = loss_of("dppo", moved_by_different_amounts(), divergence="kl", threshold=0.06)
    assert loss == pytest.approx(expected, abs=1e-12)


def test_m2po_by_hand_drops_the_furthest_until_the_rest_is_near() -> None:
    # log r = 0.1, 0.2, 0.3 with A = 1 may be dropped; -0.5 with A = 1 may not.
    # Their squares 0.01, 0.04, 0.09 have the mean 0.047; without the last 0.025 <= 0.04
    ratios = [exp(0.1), exp(0.2), exp(0.3), exp(-0.5)]
    tokens = tokens_with_ratios(ratios, [1.0] * 4)
    expected = -(exp(0.1) + exp(0.2) + exp(-0.5)) / 4
    assert loss_of("m2po", tokens) == pytest.approx(expected, abs=1e-12)
    assert loss_of("m2po", tokens, threshold=0.05) == pytest.approx(-sum(ratios) / 4, abs=1e-12)
    # nothing that may be dropped is near enough: all of it goes
    loss = loss_of("m2po", tokens, threshold=0.005)
    assert loss == pytest.approx(-exp(-0.5) / 4, abs=1e-12)
    # A = -1 turns it around: only the last may be dropped, and 0.25 > 0.04
    tokens = tokens_with_ratios(ratios, [-1.0] * 4)
    assert loss_of("m2po", tokens) == pytest.approx(sum(ratios[:3]) / 4, abs=1e-12)


def test_m2po_drops_all_of_equal_distance_whatever_their_order() -> None:
    # squares 0.01, 0.09, 0.09: their mean is 0.063, and 0.05 without one of the larger: which?
    tokens = tokens_with_ratios([exp(0.3), exp(0.1), exp(0.3)], [1.0] * 3)
    assert loss_of("m2po", tokens, threshold=0.06) == pytest.approx(-exp(0.1) / 3, abs=1e-12)


def test_vespo_by_hand() -> None:
    # A sequence of ratios 2 and 1/4: w = 1/2, A = 1: (1/2)^2 e^(3/2). Another of the one ratio 3/2,
    # A = -2: (3/2)^3 e^(-1)
    tokens = tokens_with_ratios([2.0, 0.25, 1.5], [1.0, 1.0, -2.0], [5, 5, 2])
    first, second = 0.25 * exp(1.5), 3.375 * exp(-1)
    expected = -(first * (log(1 / 2) + log(1 / 16)) - 2 * second * log(3 / 8)) / 3
    assert loss_of("vespo", tokens) == pytest.approx(expected, abs=1e-12)


def test_vcpo_by_hand() -> None:
    # w = 2 * 5 = 10 and 1/2: weights 8 and 1/2, A = 1 and -2
    tokens = tokens_with_ratios([2.0, 5.0, 0.5], [1.0, 1.0, -2.0], [5, 5, 2])
    expected = -(8 * (log(1 / 2) + log(5 / 4)) + 0.5 * -2 * log(1 / 8)) / 3
    assert loss_of("vcpo", tokens) == pytest.approx(expected, abs=1e-12)
    # e = 10.5^2 / (2 (100 + 1/4)) = 110.25 / 200.5
    objective = build_objective("vcpo")
    factor = objective.learning_rate_factor(objective.totals(to_batch(tokens)))
    assert factor == pytest.approx((110.25 / 200.5) ** 0.5, rel=1e-12)
    # the same over a base of 0.6, and over one that is below e
    for base, expected in ((0.6, (110.25 / 200.5 / 0.6) ** 0.5), (0.5, 1.0)):
        objective = build_objective("vcpo", base_ess=base)
        factor = objective.learning_rate_factor(objective.totals(to_batch(tokens)))
        assert factor == pytest.approx(expected, rel=1e-12)


def test_p3o_by_hand_with_each_kl_from_samples() -> None:
    # r = 3, 1: e = (3 + 1)^2 / (2 (9 + 1)) = 16/20 = 0.8; weights min(3, 0.8) and min(1, 0.8).
    # Policy term: -(0.8 * 1 * log(3/4) + 0.8 * (-1) * log(1/4)) / 2 = -0.4 log 3
    # importance: 3 log 3 - 3 + 1 and 0: (1 - 0.8) (3 log 3 - 2) / 2 = 0.3 log 3 - 0.2
    # k3: log 3 + 1/3 - 1 and 0: 0.1 (log 3 - 2/3)
    tokens = tokens_with_ratios([3.0, 1.0], [1.0, -1.0])
    importance = -0.4 * log(3) + 0.3 * log(3) - 0.2
    assert loss_of("p3o", tokens) == pytest.approx(importance, abs=1e-12)
    assert loss_of("p3o", tokens, kl="importance") == pytest.approx(importance, abs=1e-12)
    k3 = -0.4 * log(3) + 0.1 * (log(3) - 2 / 3)
    assert loss_of("p3o", tokens, kl="k3") == pytest.approx(k3, abs=1e-12)
    assert loss_of("p3o", tokens, kl="none") == pytest.approx(-0.4 * log(3), abs=1e-12)


def test_p3o_by_hand_keeps_a_ratio_below_the_cap() -> None:
    # r = 1/4, 1, 1, 1: sum 13/4, squares 49/16, e = (169/16) / (4 * 49/16) = 169/196 = 0.862.
    # weights 1/4 and three times 169/196; A = 1, 0, 0, 1; logp = log(1/16) and log(1/4)
    # KL: (1/4) log(1/4) - 1/4 + 1 = 3/4 - (log 4)/4, and 0
    e = 169 / 196
    policy = (0.25 * log(16) + e * log(4)) / 4
    penalty = (1 - e) * (0.75 - log(4) / 4) / 4
    tokens = tokens_with_ratios([0.25, 1.0, 1.0, 1.0], [1.0, 0.0, 0.0, 1.0])
    assert loss_of("p3o", tokens) == pytest.approx(policy + penalty, abs=1e-12)


def test_p3o_by_hand_with_a_bucket_for_the_rest() -> None:
    # e = 0.8 as before; K = 1. Policy's top token 3/4 against 1/4, the bucket 1/4 against 3/4:
    # KL = 3/4 log 3 + 1/4 log(1/3) = (log 3) / 2. Second token: the same distribution, KL = 0.
    # -0.4 log 3 + 0.2 * (log 3) / 2 / 2 = -0.35 log 3
    tokens = tokens_with_ratios(
        [3.0, 1.0],
        [1.0, -1.0],
        top_logp=np.log([[0.75], [0.25]]),
        behavior_top_logp=np.log([[0.25], [0.25]]),
    )
    assert loss_of("p3o", tokens, kl="top_k") == pytest.approx(-0.35 * log(3), abs=1e-12)


def two_anchor_example() -> Tokens:
    # behavior 1/4, 1/4; policy 3/4, 1/4; proximal 1/4, 1/8:
    # r_b = 3, 1: e_b = 16/20 = 0.8. r_prox = 3, 2: e_prox = 25 / (2 * 13) = 25/26.
    # Distrust 1/5 and 1/26: the mixture takes (1/5) / (1/5 + 1/26) = 26/31 of pi_b.
    # mix: 1/4, and (26/31) (1/4) + (5/31) (1/8) = 57/248
    return tokens_with_ratios(
        [3.0, 1.0],
        [1.0, -1.0],
        proximal_logp=np.log([1 / 4, 1 / 8]),
        top_logp=np.log([[0.75], [0.25]]),
        behavior_top_logp=np.log([[0.25], [0.25]]),
        proximal_top_logp=np.log([[0.25], [0.125]]),
    )


def test_two_anchor_by_hand() -> None:
    # e = min(0.8, 25/26) = 0.8, so the policy term is P3O's: -0.4 log 3.
    # importance, token 0: x = log 3: 3 (log 3 - 1) + 1. Token 1: x = log(62/57), r = 1:
    # (x - 1) + mix / pi_b = log(62/57) - 1 + 57/62. Times 0.2 / 2.
    tokens = two_anchor_example()
    importance = 3 * (log(3) - 1) + 1 + log(62 / 57) - 1 + 57 / 62
    expected = -0.4 * log(3) + 0.1 * importance
    assert loss_of("two_anchor", tokens, kl="importance") == pytest.approx(expected, abs=1e-12)
    # k3: log 3 + 1/3 - 1 and log(62/57) + 57/62 - 1
    k3 = log(3) + 1 / 3 - 1 + log(62 / 57) + 57 / 62 - 1
    expected = -0.4 * log(3) + 0.1 * k3
    assert loss_of("two_anchor", tokens, kl="k3") == pytest.approx(expected, abs=1e-12)
    # top_k: (log 3)/2 as for P3O; then 1/4 log(62/57) + 3/4 log(3/4 / (191/248))
    top_k = log(3) / 2 + 0.25 * log(62 / 57) + 0.75 * log(186 / 191)
    expected = -0.4 * log(3) + 0.1 * top_k
    assert loss_of("two_anchor", tokens, kl="top_k") == pytest.approx(expected, abs=1e-12)
    assert loss_of("two_anchor", tokens) == pytest.approx(expected, abs=1e-12)  # they are given


def test_two_anchor_by_hand_caps_with_the_smaller_trust() -> None:
    # The anchors of the example exchanged: policy 3/4, 1/4; behavior 1/4, 1/8; proximal 1/4, 1/4.
    # e_b = 25/26, e_prox = 0.8 = e; r_b = 3, 2 are both capped at 0.8.
    # The mixture is the same as above; anchor / pi_b is 1 and 57/31.
    given = two_anchor_example()
    tokens = Tokens(
        logp=given.logp,
        behavior_logp=given.proximal_logp,
        proximal_logp=given.behavior_logp,
        advantage=given.advantage,
        sequence=given.sequence,
    )
    kl = 3 * (log(3) - 1) + 1 + 2 * (log(62 / 57) - 1) + 57 / 31
    assert loss_of("two_anchor", tokens) == pytest.approx(-0.4 * log(3) + 0.1 * kl, abs=1e-12)


def test_entropy_and_reference_terms_by_hand() -> None:
    # r = 1: REINFORCE's part is -(1/2) (log(1/4) - log(1/4)) = 0.
    # entropy: -0.1 (0.5 + 1.5) / 2 = -0.1
    # reference 1/8 and 1/4: x = log 2 and 0: k3 = log 2 + 1/2 - 1; times 0.4 / 2
    tokens = tokens_with_ratios(
        [1.0, 1.0],
        [1.0, -1.0],
        entropy=np.array([0.5, 1.5]),
        reference_logp=np.log([1 / 8, 1 / 4]),
    )
    loss = loss_of("reinforce", tokens, entropy_coef=0.1, reference_kl_coef=0.4)
    assert loss == pytest.approx(-0.1 + 0.2 * (log(2) - 0.5), abs=1e-12)


def test_gspo_divides_entropy_and_reference_terms_by_tokens() -> None:
    # Three tokens in two sequences, A = 0: only the extra terms are left, over N = 3 and not S = 2:
    # -0.1 (1 + 2 + 3) / 3 = -0.2, and 0.6 (log 2 - 1/2) / 3
    tokens = tokens_with_ratios(
        [1.0, 1.0, 1.0],
        [0.0, 0.0, 0.0],
        [0, 0, 1],
        entropy=np.array([1.0, 2.0, 3.0]),
        reference_logp=np.log([1 / 8, 1 / 4, 1 / 4]),
    )
    loss = loss_of("gspo", tokens, entropy_coef=0.1, reference_kl_coef=0.6)
    assert loss == pytest.approx(-0.2 + 0.2 * (log(2) - 0.5), abs=1e-12)


@every_objective
@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["alone", "with-entropy-and-reference"])
@pytest.mark.parametrize("spread", [0.05, 0.5, 2.0])
def test_loss_equals_the_oracle_in_float64(
    name: str, options: Options, extras: Options, spread: float
) -> None:
    for seed in range(4):
        tokens = oracle.random_tokens(seed, [5, 1, 3, 8], spread=spread)
        expected = oracle.evaluate(name, tokens, **options, **extras).loss
        actual = loss_of(name, tokens, **options, **extras)
        assert actual == pytest.approx(expected, rel=1e-10, abs=1e-11)


@every_objective
def test_loss_equals_the_oracle_in_float32(name: str, options: Options) -> None:
    for seed in range(4):
        tokens = rounded_to_float32(oracle.random_tokens(seed, [5, 1, 3, 8], spread=0.7))
        expected = oracle.evaluate(name, tokens, **options, **EXTRAS).loss
        batch, output = run(name, tokens, torch.float32, **options, **EXTRAS)
        assert output.loss.dtype == batch.logp.dtype == torch.float32
        assert output.loss.item() == pytest.approx(expected, rel=1e-5, abs=2e-6)


def test_the_oracles_terms_are_large_enough_to_be_compared() -> None:
    """A comparison within 1e-10 proves nothing where a term vanishes: no KL here does."""
    tokens = oracle.random_tokens(0, [5, 1, 3, 8], spread=0.5)
    losses = [
        oracle.evaluate(name, tokens, kl=kl).loss
        for name in ("p3o", "two_anchor")
        for kl in ("importance", "k3", "top_k")
    ]
    assert np.min(np.diff(np.sort(losses))) > 1e-5


def test_a_near_on_policy_float32_step_keeps_a_small_distrust() -> None:
    # l = +-1e-3: e = cosh(l)^2 / cosh(2 l) = 1 / (1 + tanh(l)^2), so 1 - e = 1e-6: no more than 17
    # of float32's steps near 1 (6e-8). Rounding e before the subtraction would be 3% wrong.
    # A = 0 leaves (1 - e) KL, and KL = (log 3) / 2 (3/4 against 1/4, and the rest).
    b = np.full(2, -1.0)
    tokens = rounded_to_float32(
        Tokens(
            logp=b + np.array([1e-3, -1e-3]),
            behavior_logp=b,
            advantage=np.zeros(2),
            sequence=np.arange(2),
            top_logp=np.log([[0.75], [0.75]]),
            behavior_top_logp=np.log([[0.25], [0.25]]),
        )
    )
    kl_weight = 1 - oracle.normalized_ess(tokens.logp - tokens.behavior_logp)
    assert kl_weight == pytest.approx(1e-6, rel=1e-3)
    loss = run("p3o", tokens, torch.float32, kl="top_k")[1].loss.item()
    assert loss == pytest.approx(kl_weight * log(3) / 2, rel=1e-5)


def test_totals_count_tokens_and_sequences() -> None:
    batch = to_batch(oracle.random_tokens(0, [5, 1, 3]))
    totals = build_objective("gspo").totals(batch)
    assert (float(totals.num_tokens), float(totals.num_sequences)) == (9.0, 3.0)
    assert not totals.num_tokens.requires_grad


@pytest.mark.parametrize("measurable", [[True] * 6, [True, False, True, False, False, True], []])
def test_counts_are_of_measurable_tokens_and_their_sequences(measurable: list[bool]) -> None:
    """Sequences in any order, with any ids; of one all tokens may be missing."""
    ids = [-7, 3, -7, 3, 3, 50][: len(measurable)]
    batch = to_batch(oracle.random_tokens(0, [len(measurable)] if measurable else []))
    behavior_logp = batch.behavior_logp.where(torch.tensor(measurable, dtype=torch.bool), nan)
    batch = replace(
        batch, sequence=torch.tensor(ids, dtype=torch.int64), behavior_logp=behavior_logp
    )
    left = [number for number, counts in zip(ids, measurable, strict=True) if counts]
    objective = build_objective("grpo")
    for totals in (objective.counts(batch), objective.totals(batch)):
        assert (float(totals.num_tokens), float(totals.num_sequences)) == (len(left), len({*left}))
    assert torch.equal(objective.measurable(batch), torch.tensor(measurable, dtype=torch.bool))


def test_measurable_is_what_the_resolved_objective_needs() -> None:
    batch = to_batch(oracle.random_tokens(0, [4], top=3))
    assert batch.behavior_top_logp is not None
    batch.behavior_top_logp[1, 2] = nan
    objective = build_objective("p3o", kl="auto")
    assert objective.measurable(batch).tolist() == [True, False, True, True]
    assert float(objective.counts(batch).num_tokens) == 3
    assert objective(batch, objective.totals(batch)).num_tokens == 3
