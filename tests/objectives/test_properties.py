"""What holds whatever the numbers are: invariance, special cases, and what the KLs estimate."""

import math
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from objective_cases import (
    EXTRAS,
    Options,
    evaluate_in_parts,
    every_objective,
    finished,
    gradient,
    run,
    to_batch,
)
from oracle import Array, Tokens

from trustbatch.objectives import OBJECTIVES, TokenBatch, Totals, build_objective
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.objectives.reinforce import Reinforce

SEEDS = st.integers(0, 2**32 - 1)
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=6)
SPREADS = st.sampled_from([0.0, 0.1, 0.6, 3.0])
few_examples = settings(max_examples=25, deadline=None, derandomize=True)


def cut_between_sequences(lengths: list[int], owner: list[int]) -> list[np.ndarray]:
    """Token indices of each part; `owner` says in which part a sequence goes."""
    starts = np.concatenate([[0], np.cumsum(lengths)])
    inside = [np.arange(a, b) for a, b in pairwise(starts)]
    return [
        np.concatenate([rows for rows, part in zip(inside, owner, strict=True) if part == p])
        for p in sorted(set(owner))
    ]


def assert_same_metrics(actual: dict[str, float], expected: dict[str, float]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name


@every_objective
@few_examples
@given(seed=SEEDS, lengths=LENGTHS, spread=SPREADS, data=st.data())
def test_any_division_into_micro_batches_gives_the_same_step(
    name: str, options: Options, seed: int, lengths: list[int], spread: float, data: st.DataObject
) -> None:
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    tokens = oracle.random_tokens(seed, lengths, spread=spread)
    whole, metrics = evaluate_in_parts(name, [tokens], **options, **EXTRAS)
    parts = cut_between_sequences(lengths, owner)
    divided, divided_metrics = evaluate_in_parts(
        name, [tokens.take(part) for part in parts], **options, **EXTRAS
    )
    order = np.concatenate(parts)
    assert divided.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12)
    assert_allclose(divided.d_logp, whole.d_logp[order], rtol=1e-10, atol=1e-13)
    assert_allclose(divided.d_entropy, whole.d_entropy[order], rtol=1e-10, atol=1e-13)
    assert_allclose(divided.d_top_logp, whole.d_top_logp[order], rtol=1e-10, atol=1e-13)
    assert_same_metrics(divided_metrics, metrics)


@every_objective
@few_examples
@given(seed=SEEDS, lengths=LENGTHS, spread=SPREADS, shuffle_seed=SEEDS)
def test_token_order_and_sequence_names_do_not_matter(
    name: str, options: Options, seed: int, lengths: list[int], spread: float, shuffle_seed: int
) -> None:
    tokens = oracle.random_tokens(seed, lengths, spread=spread)
    order = np.random.default_rng(shuffle_seed).permutation(sum(lengths))
    shuffled = tokens.take(order)
    shuffled = replace(shuffled, sequence=1000 - 3 * shuffled.sequence)
    whole, metrics = evaluate_in_parts(name, [tokens], **options, **EXTRAS)
    moved, moved_metrics = evaluate_in_parts(name, [shuffled], **options, **EXTRAS)
    assert moved.loss == pytest.approx(whole.loss, rel=1e-10, abs=1e-12)
    assert_allclose(moved.d_logp, whole.d_logp[order], rtol=1e-10, atol=1e-13)
    assert_allclose(moved.d_top_logp, whole.d_top_logp[order], rtol=1e-10, atol=1e-13)
    assert_same_metrics(moved_metrics, metrics)


@every_objective
def test_unmeasurable_tokens_and_an_empty_part_change_nothing_for_the_others(
    name: str, options: Options
) -> None:
    tokens = oracle.random_tokens(11, [4, 3, 5])
    whole, _ = evaluate_in_parts(name, [tokens], **options, **EXTRAS)
    broken = oracle.random_tokens(12, [2])
    broken = replace(broken, logp=np.full(2, np.nan), sequence=np.array([900, 901]))
    empty = tokens.take(np.arange(0))
    divided, metrics = evaluate_in_parts(name, [broken, tokens, empty], **options, **EXTRAS)
    assert divided.loss == pytest.approx(whole.loss, rel=1e-12)
    assert_allclose(divided.d_logp, [0, 0, *whole.d_logp], rtol=1e-12)
    assert metrics["tokens/nonfinite"] == 2
    assert metrics["tokens/count"] == 12


@every_objective
def test_totals_add_in_any_order(name: str, options: Options) -> None:
    parts = [to_batch(oracle.random_tokens(seed, [3, 2])) for seed in range(3)]
    objective = build_objective(name, **options)
    totals = [objective.totals(part) for part in parts]
    batch = parts[0]
    losses = [
        objective(batch, step).loss.item()
        for step in (reduce(add, totals), sum(totals), sum(reversed(totals)))
    ]
    assert_allclose(losses, losses[0], rtol=1e-12)
    with pytest.raises(TypeError):
        1 + totals[0]


def test_totals_of_different_objectives_do_not_add() -> None:
    batch = to_batch(oracle.random_tokens(0, [3]))
    with pytest.raises(AssertionError, match="different objectives"):
        build_objective("p3o").totals(batch) + build_objective("grpo").totals(batch)
    with pytest.raises(AssertionError, match="different objectives"):
        build_objective("m2po").totals(batch) + build_objective("grpo").totals(batch)


def test_sums_of_an_objective_add_and_move_with_its_totals() -> None:
    class Summed(Reinforce):
        def sums(self, tokens: TokenBatch) -> dict[str, torch.Tensor]:
            return {"advantage": tokens.advantage.double().sum()}

    parts = [oracle.random_tokens(seed, [3, 2]) for seed in range(2)]
    totals = [Summed().totals(to_batch(part)) for part in parts]
    expected = sum(part.advantage.sum() for part in parts)
    added = (totals[0] + totals[1]).to(torch.device("cpu"))
    assert added.sums["advantage"].item() == pytest.approx(expected, rel=1e-12)
    with pytest.raises(AssertionError, match="different objectives"):
        totals[0] + Reinforce().totals(to_batch(parts[1]))


@every_objective
def test_moved_totals_are_the_same(name: str, options: Options) -> None:
    objective = build_objective(name, **options)
    batch = to_batch(oracle.random_tokens(0, [3, 2]))
    totals = objective.totals(batch)
    moved = objective(batch, totals.to(torch.device("cpu"))).loss
    assert torch.equal(moved, objective(batch, totals).loss)


@pytest.mark.parametrize("kl", ["importance", "k3", "top_k"])
@pytest.mark.parametrize("name", ["p3o", "two_anchor"])
def test_micro_batch_scope_measures_trust_in_each_part_and_divides_by_the_step(
    name: str, kl: str
) -> None:
    """Each part's e comes from its own tokens; N is the step's, from the totals passed in."""
    lengths = [4, 3, 5, 2]
    tokens = oracle.random_tokens(21, lengths, spread=0.8)
    parts = [tokens.take(part) for part in cut_between_sequences(lengths, [0, 1, 1, 0])]
    actual, _ = evaluate_in_parts(name, parts, kl=kl, ess_scope="micro_batch", **EXTRAS)
    each = [oracle.evaluate(name, p, kl=kl, num_tokens=14, **EXTRAS) for p in parts]
    assert actual.loss == pytest.approx(sum(one.loss for one in each), rel=1e-10)
    assert_allclose(actual.d_logp, np.concatenate([one.d_logp for one in each]), rtol=1e-9)
    assert_allclose(actual.d_top_logp, np.concatenate([one.d_top_logp for one in each]), rtol=1e-9)
    step, _ = evaluate_in_parts(name, parts, kl=kl, **EXTRAS)
    assert abs(step.loss - actual.loss) > 1e-5  # so that the two scopes differ here


def test_micro_batch_scope_with_a_part_s_own_totals_is_algorithm_2() -> None:
    """< >_M in the paper's Algorithm 2 is the mean over the micro-batch."""
    part = oracle.random_tokens(22, [4, 3], spread=0.8)
    objective = build_objective("p3o", ess_scope="micro_batch", kl="k3")
    batch = to_batch(part)
    loss = objective(batch, objective.totals(batch)).loss.item()
    assert loss == pytest.approx(oracle.evaluate("p3o", part, kl="k3").loss, rel=1e-10)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name != "gspo"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_on_policy_every_token_objective_has_reinforce_s_gradient(
    name: str, dtype: torch.dtype
) -> None:
    tokens = oracle.random_tokens(31, [4, 1, 6], spread=0.0, proximal_spread=0.0)
    tokens = replace(tokens, behavior_logp=tokens.logp, proximal_logp=tokens.logp)
    expected, _ = run("reinforce", tokens, dtype)
    batch, output = run(name, tokens, dtype)
    assert_allclose(gradient(batch.logp), gradient(expected.logp), rtol=1e-6, atol=1e-9)
    assert_allclose(gradient(batch.logp), -tokens.advantage / 11, rtol=1e-6, atol=1e-9)
    assert finished(output)["ess"] == 1.0
    assert finished(output)["one_minus_ess"] == 0.0


def test_on_policy_gspo_has_reinforce_s_gradient_of_sequence_means() -> None:
    # d/dlogp of -(1/S) sum A mean(logp) = -A / (S length)
    lengths = [4, 1, 6]
    tokens = oracle.random_tokens(32, lengths)
    batch, _ = run("gspo", replace(tokens, behavior_logp=tokens.logp))
    expected = -tokens.advantage / (3 * np.repeat(lengths, lengths))
    assert_allclose(gradient(batch.logp), expected, rtol=1e-12)


@pytest.mark.parametrize("kl", ["importance", "k3", "top_k"])
def test_on_policy_p3o_has_no_kl_term(kl: str) -> None:
    tokens = oracle.random_tokens(33, [4, 2])
    tokens = replace(tokens, behavior_logp=tokens.logp)
    batch, output = run("p3o", tokens, kl=kl)
    reinforce = oracle.evaluate("reinforce", tokens)
    assert output.loss.item() == pytest.approx(reinforce.loss, rel=1e-12)
    assert not gradient(batch.top_logp).any()


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_dapo_with_equal_bounds_is_grpo(spread: float) -> None:
    tokens = oracle.random_tokens(34, [4, 6], spread=spread)
    dapo_batch, dapo = run("dapo", tokens, clip_low=0.2, clip_high=0.2)
    grpo_batch, grpo = run("grpo", tokens)
    assert torch.equal(dapo.loss, grpo.loss)
    assert_allclose(gradient(dapo_batch.logp), gradient(grpo_batch.logp), rtol=0)


@pytest.mark.parametrize("weight_cap", [0.9, 5.0])
def test_token_truncation_of_grpo_is_is_decoupled(weight_cap: float) -> None:
    tokens = oracle.random_tokens(39, [4, 6], spread=0.7)
    changes = {"correction": "token_truncate", "correction_cap": weight_cap}
    corrected_batch, corrected = run("grpo_is", tokens, **changes)
    decoupled_batch, decoupled = run("decoupled", tokens, weight_cap=weight_cap)
    assert torch.equal(corrected.loss, decoupled.loss)
    assert_allclose(gradient(corrected_batch.logp), gradient(decoupled_batch.logp), rtol=0)


@few_examples
@given(seed=SEEDS, lengths=LENGTHS, spread=SPREADS, threshold=st.sampled_from([0.0, 0.04, 0.5]))
def test_what_m2po_keeps_is_near_and_what_it_drops_had_to_go(
    seed: int, lengths: list[int], spread: float, threshold: float
) -> None:
    tokens = oracle.random_tokens(seed, lengths, spread=spread)
    batch, _ = run("m2po", tokens, threshold=threshold)
    log_ratio = tokens.logp - tokens.behavior_logp
    may_go = log_ratio * tokens.advantage > 0
    kept = gradient(batch.logp) != 0
    assert kept[~may_go].all()
    squares = log_ratio**2
    here, gone = squares[may_go & kept], squares[may_go & ~kept]
    if len(here):
        assert here.mean() <= threshold + 1e-15
    if len(gone):
        assert gone.min() >= here.max(initial=0.0)
        assert np.append(here, gone.min()).mean() > threshold


@few_examples
@given(seed=SEEDS, lengths=LENGTHS, spread=SPREADS, data=st.data())
def test_the_learning_rate_factor_is_that_of_the_undivided_step(
    seed: int, lengths: list[int], spread: float, data: st.DataObject
) -> None:
    owner = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    tokens = oracle.random_tokens(seed, lengths, spread=spread)
    parts = cut_between_sequences(lengths, owner)
    objective = build_objective("vcpo", base_ess=0.9)
    totals = reduce(add, [objective.totals(to_batch(tokens.take(part))) for part in parts])
    factor = objective.learning_rate_factor(totals)
    assert factor == pytest.approx(oracle.learning_rate_factor(tokens, 0.9), rel=1e-10)


def test_only_vcpo_changes_the_learning_rate() -> None:
    batch = to_batch(oracle.random_tokens(40, [4, 6], spread=0.7))
    factors = {}
    for name in OBJECTIVES:
        objective = build_objective(name)
        factors[name] = objective.learning_rate_factor(objective.totals(batch))
    assert 0 < factors.pop("vcpo") < 1
    assert set(factors.values()) == {1.0}


@pytest.mark.parametrize("kl", ["importance", "k3", "top_k"])
@pytest.mark.parametrize("proximal", ["logp", "behavior_logp"])
def test_two_anchor_with_an_uninformative_proximal_is_p3o(kl: str, proximal: str) -> None:
    """Proximal == policy: e_prox = 1, its weight is 0. Proximal == behavior: the mixture is pi_b
    and e_b = e_prox. Either way P3O is left."""
    tokens = oracle.random_tokens(35, [4, 6], spread=0.7)
    top = {"logp": tokens.top_logp, "behavior_logp": tokens.behavior_top_logp}[proximal]
    tokens = replace(tokens, proximal_logp=getattr(tokens, proximal), proximal_top_logp=top)
    two_batch, two = run("two_anchor", tokens, kl=kl, anchor="sampler")
    one_batch, one = run("p3o", tokens, kl=kl, anchor="sampler")
    assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-10)
    assert_allclose(gradient(two_batch.logp), gradient(one_batch.logp), rtol=1e-9, atol=1e-13)
    top_gradients = gradient(two_batch.top_logp), gradient(one_batch.top_logp)
    assert_allclose(*top_gradients, rtol=1e-9, atol=1e-13)


def test_two_anchor_on_policy_to_behavior_pulls_toward_the_proximal_only() -> None:
    # r = 1: e_b = 1, weight 0. e = e_prox caps every token; mix = pi_prox.
    # gradient: (-e A + (1 - e) x) / N with x = logp - proximal
    tokens = oracle.random_tokens(36, [4, 6], proximal_spread=1.0)
    tokens = replace(tokens, behavior_logp=tokens.logp)
    batch, _ = run("two_anchor", tokens, kl="importance")
    x = tokens.logp - tokens.proximal_logp
    e = oracle.normalized_ess(x)
    assert e < 0.95
    assert_allclose(gradient(batch.logp), (-e * tokens.advantage + (1 - e) * x) / 10, rtol=1e-9)


def test_cispo_with_a_cap_at_the_measured_trust_has_p3o_s_policy_term() -> None:
    # 1 + clip_high can't be below 1, so compare where every ratio is below both caps
    tokens = oracle.random_tokens(37, [5, 5])
    tokens = replace(tokens, logp=tokens.behavior_logp - 1.0 - 1e-3 * np.arange(10))
    p3o_batch, _ = run("p3o", tokens, kl="top_k")
    cispo_batch, _ = run("cispo", tokens)
    assert_allclose(gradient(p3o_batch.logp), gradient(cispo_batch.logp), rtol=1e-12)


@few_examples
@given(
    log_ratios=st.lists(st.floats(-59, 59), min_size=1, max_size=30),
)
def test_trust_lies_between_one_over_n_and_one(log_ratios: list[float]) -> None:
    l = np.array(log_ratios)  # noqa: E741
    b = np.full(len(l), -60.0)
    tokens = Tokens(b + l, b, np.ones(len(l)), np.arange(len(l)))
    _, output = run("p3o", tokens, kl="k3")
    e = finished(output)["ess"]
    assert 1 / len(l) <= e <= 1
    assert e == pytest.approx(oracle.normalized_ess(l), rel=1e-10)
    assert finished(output)["weight/cap"] == pytest.approx(e, rel=1e-12)


@few_examples
@given(seed=SEEDS, shift=st.floats(-20, 20))
def test_trust_ignores_a_common_factor_of_the_ratios(seed: int, shift: float) -> None:
    log_ratio = np.random.default_rng(seed).normal(size=9)
    assert oracle.normalized_ess(log_ratio + shift) == pytest.approx(
        oracle.normalized_ess(log_ratio), rel=1e-9
    )
    b = np.full(9, -3.0)
    tokens = Tokens(b + log_ratio + shift, b, np.ones(9), np.arange(9))
    _, output = run("p3o", tokens, kl="k3")
    assert finished(output)["ess"] == pytest.approx(oracle.normalized_ess(log_ratio), rel=1e-9)


def test_every_token_keeps_a_gradient_in_p3o_where_grpo_silences_some() -> None:
    tokens = oracle.random_tokens(38, [8, 8], spread=2.0)
    p3o_batch, _ = run("p3o", tokens, kl="top_k")
    grpo_batch, _ = run("grpo", tokens)
    assert np.count_nonzero(gradient(p3o_batch.logp)) == 16
    assert np.count_nonzero(gradient(grpo_batch.logp)) < 16


def whole_vocabulary_step(
    logits: torch.Tensor, counts: list[int], proximal: Array
) -> tuple[TokenBatch, Array]:
    """A step in which each token of a small vocabulary occurs exactly as often as pi_b expects.

    So the mean over the step's tokens is the expectation under pi_b = counts / sum(counts).
    """
    behavior = np.array(counts) / sum(counts)
    sampled = torch.tensor(np.repeat(np.arange(len(counts)), counts))
    policy = logits.log_softmax(-1)
    rows = torch.ones(len(sampled), 1, dtype=torch.float64)
    batch = TokenBatch(
        logp=policy[sampled],
        behavior_logp=torch.tensor(np.log(behavior))[sampled],
        advantage=torch.zeros(len(sampled), dtype=torch.float64),
        sequence=torch.arange(len(sampled)),
        proximal_logp=torch.tensor(np.log(proximal))[sampled],
        top_logp=rows * policy,
        behavior_top_logp=rows * torch.tensor(np.log(behavior)),
        proximal_top_logp=rows * torch.tensor(np.log(proximal)),
    )
    return batch, behavior


def exact_kl(logits: Array, anchor: Array) -> tuple[float, Array]:
    """KL(softmax(logits) || anchor) and its gradient: dKL/dlogit_v = p_v (x_v - KL)."""
    logp = oracle.log_softmax(logits)
    x = logp - np.log(anchor)
    value = float((np.exp(logp) * x).sum())
    return value, np.exp(logp) * (x - value)


@pytest.mark.parametrize("name", ["p3o", "two_anchor"])
@pytest.mark.parametrize("kl", ["importance", "top_k"])
def test_expected_kl_term_is_the_exact_kl_in_value_and_gradient(name: str, kl: str) -> None:
    """Enumerated over the vocabulary: `importance` is unbiased under pi_b, `top_k` with K the whole
    vocabulary is exact at every token. A = 0, so the loss is (1 - e) KL and nothing else."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    proximal = np.array([0.4, 0.3, 0.2, 0.1])
    batch, behavior = whole_vocabulary_step(logits, [4, 3, 2, 1], proximal[::-1].copy())
    proximal = proximal[::-1]
    objective = build_objective(name, kl=kl)
    loss = objective(batch, objective.totals(batch)).loss
    loss.backward()

    policy = np.exp(oracle.log_softmax(logits.detach().numpy()))
    # E_b[r] = 1, so e_b = 1 / E_b[r^2]
    e = e_b = 1 / float((policy**2 / behavior).sum())
    anchor = behavior
    if name == "two_anchor":
        r = policy / proximal
        e_prox = float((behavior * r).sum() ** 2 / (behavior * r**2).sum())
        e = min(e_b, e_prox)
        anchor = ((1 - e_b) * behavior + (1 - e_prox) * proximal) / (2 - e_b - e_prox)
    value, slope = exact_kl(logits.detach().numpy(), anchor)
    assert 1 - e > 0.1
    assert loss.item() == pytest.approx((1 - e) * value, rel=1e-9)
    assert_allclose(logits.grad.numpy(), (1 - e) * slope, rtol=1e-9, atol=1e-12)


def test_expected_k3_is_the_reverse_kl_under_the_behavior_policy() -> None:
    """E_b[x + 1/r - 1] = -KL(pi_b || pi) + sum pi_b^2 / pi - 1: not KL(pi || pi_b). So `k3` is kept
    for reproduction only, and the test above can tell a biased estimate from an unbiased one."""
    logits = torch.tensor([0.3, -1.2, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    batch, behavior = whole_vocabulary_step(logits, [4, 3, 2, 1], np.full(4, 0.25))
    objective = build_objective("p3o", kl="k3")
    loss = objective(batch, objective.totals(batch)).loss.item()
    policy = np.exp(oracle.log_softmax(logits.detach().numpy()))
    e = 1 / float((policy**2 / behavior).sum())
    expected = float((behavior * (np.log(policy / behavior) + behavior / policy - 1)).sum())
    assert loss == pytest.approx((1 - e) * expected, rel=1e-9)
    assert abs(expected - exact_kl(logits.detach().numpy(), behavior)[0]) > 0.05


def test_top_k_in_float32_with_the_whole_vocabulary_is_exact() -> None:
    # 1 - sum of probabilities is rounding noise of either sign here: the bucket must not add to KL
    rng = np.random.default_rng(0)
    behavior = oracle.log_softmax(rng.normal(size=(6, 50)))
    policy = oracle.log_softmax(behavior + 0.3 * rng.normal(size=(6, 50)))
    tokens = Tokens(
        logp=policy[:, 0],
        behavior_logp=behavior[:, 0],
        advantage=np.zeros(6),
        sequence=np.arange(6),
        top_logp=policy,
        behavior_top_logp=behavior,
    )
    e = oracle.normalized_ess(tokens.logp - tokens.behavior_logp)
    exact = float((np.exp(policy) * (policy - behavior)).sum(axis=1).mean())
    loss = run("p3o", tokens, torch.float32, kl="top_k")[1].loss.item()
    assert loss == pytest.approx((1 - e) * exact, rel=1e-4)


def test_a_coarser_top_k_never_exceeds_the_exact_kl() -> None:
    # joining tokens into one bucket loses information: KL can only fall (log-sum inequality)
    rng = np.random.default_rng(1)
    behavior = oracle.log_softmax(rng.normal(size=(5, 8)))
    policy = oracle.log_softmax(behavior + rng.normal(size=(5, 8)))
    losses = []
    for k in range(1, 9):
        tokens = Tokens(
            logp=policy[:, 0],
            behavior_logp=behavior[:, 0],
            advantage=np.zeros(5),
            sequence=np.arange(5),
            top_logp=policy[:, :k],
            behavior_top_logp=behavior[:, :k],
        )
        losses.append(run("p3o", tokens, kl="top_k")[1].loss.item())
    assert all(a <= b + 1e-12 for a, b in pairwise(losses))
    assert losses[0] < losses[-1]


def test_selected_tokens_keep_the_gradient_of_the_policy_only() -> None:
    batch = to_batch(oracle.random_tokens(41, [3, 2]))
    assert len(batch) == 5
    some = batch.select(torch.tensor([3, 0]))
    assert torch.equal(some.behavior_logp, batch.behavior_logp[[3, 0]])
    assert torch.equal(some.top_logp, batch.top_logp[[3, 0]])
    assert some.logp.requires_grad
    # a behavior policy that was passed with its graph is data all the same
    tied = TokenBatch(
        logp=batch.logp,
        behavior_logp=batch.logp * 1.0,
        advantage=batch.advantage,
        sequence=batch.sequence,
    )
    losses = []
    for name in ("grpo", "reinforce"):
        objective = build_objective(name)
        loss = objective(tied, objective.totals(tied)).loss
        losses.append(torch.autograd.grad(loss, batch.logp, retain_graph=True)[0])
    torch.testing.assert_close(losses[0], losses[1])


@every_objective
def test_who_clips_the_behavior_ratio_says_so(name: str, options: Options) -> None:
    """Tokens in sequences of their own, at r = exp(-1) and exp(1), each with both advantages."""
    tokens = oracle.random_tokens(0, [1, 1, 1, 1])
    behavior = tokens.logp - np.array([-1.0, -1.0, 1.0, 1.0])
    advantage = np.array([-1.0, 1.0, 1.0, -1.0])
    tokens = replace(tokens, behavior_logp=behavior, advantage=advantage, proximal_logp=tokens.logp)
    batch, _ = run(name, tokens, **options)
    # where the ratio already is beyond what the advantage asks for, and where it is not
    beyond, short = gradient(batch.logp)[::2], gradient(batch.logp)[1::2]
    clips = bool((beyond == 0).any() and (short != 0).all())
    assert clips == (build_objective(name).clips_behavior_ratio is not None)


def test_totals_are_as_far_apart_as_their_effective_sample_sizes() -> None:
    # r = 1, 1: 1; r = 1, 3: (1 + 3)^2 / (2 (1 + 9)) = 0.8
    same, other = (
        Totals(torch.tensor(2.0), torch.tensor(1.0), {"behavior": RatioMoments.of(logs)})
        for logs in (torch.zeros(2), torch.tensor([0.0, math.log(3.0)]))
    )
    assert build_objective("p3o").totals_distance(same, other) == pytest.approx(0.2)
    plain = build_objective("grpo")
    assert not plain.estimates_totals
    with pytest.raises(NotImplementedError):
        plain.totals_distance(same, other)
