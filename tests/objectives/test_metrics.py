"""Metrics: which names an objective reports, what they say, and how each kind is reduced."""

from dataclasses import replace
from math import exp, isfinite, log

import numpy as np
import oracle
import pytest
import torch
from objective_cases import EXTRAS, Options, every_objective, finished, run
from oracle import Tokens

from trustbatch.objectives import OBJECTIVES, build_objective
from trustbatch.objectives.estimators import RatioMoments
from trustbatch.objectives.metrics import (
    Count,
    EffectiveSampleSize,
    LogRatioPart,
    Max,
    Mean,
    OneMinusEss,
    RatioQuantiles,
    Share,
    average_over_steps,
    merge_metrics,
)

COMMON = {
    "policy/loss",
    "ess",
    "one_minus_ess",
    "ratio/mean",
    "ratio/max",
    "ratio/p01",
    "ratio/p10",
    "ratio/p50",
    "ratio/p90",
    "ratio/p99",
    "kl/behavior",
    "tokens/count",
    "tokens/nonfinite",
    "entropy",
}
OWN = {
    "reinforce": set(),
    "grpo": {"ratio/clipped_fraction"},
    "dapo": {"ratio/clipped_fraction"},
    "gspo": {"ratio/clipped_fraction"},
    "cispo": {"ratio/capped_fraction", "weight/cap"},
    "decoupled": {"ratio/clipped_fraction", "ratio/capped_fraction", "weight/cap"},
    "grpo_is": {"ratio/clipped_fraction", "ratio/capped_fraction", "weight/cap"},
    "dppo": {"ratio/masked_fraction", "ratio/capped_fraction", "weight/cap"},
    "m2po": {"ratio/masked_fraction"},
    "vespo": {"weight/mean"},
    "vcpo": {"ratio/capped_fraction", "weight/cap", "ess/sequence", "learning_rate/factor"},
    "p3o": {"kl/penalty", "ratio/capped_fraction", "weight/cap"},
    "pact": {
        "kl/penalty",
        "ratio/capped_fraction",
        "weight/cap",
        "pull/strength",
        "pull/sequences",
        "pull/ess",
        "pull/support",
    },
    "two_anchor": {
        "kl/penalty",
        "ratio/capped_fraction",
        "weight/cap",
        "anchor/behavior_share",
        "anchor/ess_behavior",
        "anchor/ess_proximal",
    },
}


def ratios_one_half_one_and_a_half() -> Tokens:
    r = np.array([0.5, 0.5, 1.5, 1.5])
    return Tokens(
        logp=np.log(r / 4),
        behavior_logp=np.log([0.25] * 4),
        advantage=np.array([1.0, -1.0, 1.0, -1.0]),
        sequence=np.arange(4),
        proximal_logp=np.log([0.25] * 4),
    )


@every_objective
def test_names_are_complete_and_values_are_finite_floats(name: str, options: Options) -> None:
    _, output = run(name, oracle.random_tokens(0, [4, 3]), torch.float32, **options)
    values = finished(output)
    assert values.keys() == COMMON | OWN[name]
    for key, value in values.items():
        assert type(value) is float, key
        assert isfinite(value), key
    _, output = run(name, oracle.random_tokens(0, [4, 3]), **options, **EXTRAS)
    assert finished(output).keys() == COMMON | OWN[name] | {"kl/reference"}


@every_objective
def test_metrics_hold_no_graph(name: str, options: Options) -> None:
    """A metric that carried gradient would keep every micro-batch's activations alive."""
    _, output = run(name, oracle.random_tokens(0, [4, 3]), **options, **EXTRAS)
    for key, metric in output.metrics.items():
        tensors = []
        for value in vars(metric).values():
            if isinstance(value, RatioMoments):
                tensors += vars(value).values()
            else:
                tensors += value if isinstance(value, tuple) else [value]
        assert tensors
        assert not any(tensor.requires_grad for tensor in tensors), key


@every_objective
def test_common_values_by_their_definition(name: str, options: Options) -> None:
    tokens = oracle.random_tokens(2, [6, 5], spread=0.8)
    _, output = run(name, tokens, **options, **EXTRAS)
    values = finished(output)
    log_ratio = tokens.logp - tokens.behavior_logp
    r = np.exp(log_ratio)
    e = oracle.normalized_ess(log_ratio)
    expected = {
        "policy/loss": output.loss.item(),
        "ess": e,
        "one_minus_ess": 1 - e,
        "ratio/mean": r.mean(),
        "ratio/max": r.max(),
        "ratio/p50": np.median(r),  # of eleven values: the sixth
        "kl/behavior": np.mean(r * log_ratio - r + 1),
        "kl/reference": np.mean(oracle.k3(tokens.logp - tokens.reference_logp)),
        "entropy": tokens.entropy.mean(),
        "tokens/count": 11,
        "tokens/nonfinite": 0,
    }
    for key, value in expected.items():
        assert values[key] == pytest.approx(value, rel=1e-9), key


def test_clipped_fraction_counts_tokens_without_gradient() -> None:
    # r = 1/2 with A = -1 and r = 3/2 with A = +1 are silenced; the other two are not
    _, output = run("grpo", ratios_one_half_one_and_a_half())
    assert finished(output)["ratio/clipped_fraction"] == 0.5
    _, output = run("grpo", ratios_one_half_one_and_a_half(), clip_high=0.6)
    assert finished(output)["ratio/clipped_fraction"] == 0.25
    _, output = run("decoupled", ratios_one_half_one_and_a_half())
    assert finished(output)["ratio/clipped_fraction"] == 0.5


def test_gspo_s_clipped_fraction_is_of_sequences() -> None:
    # sequence 0: s = sqrt(1/2 * 1/2), A = -1: silenced. Sequence 1, of one token: s = 3/2, A = -1.
    tokens = replace(
        ratios_one_half_one_and_a_half().take(np.array([0, 1, 3])),
        sequence=np.array([0, 0, 1]),
        advantage=np.array([-1.0, -1.0, -1.0]),
    )
    _, output = run("gspo", tokens)
    assert finished(output)["ratio/clipped_fraction"] == 0.5


def test_capped_fraction_and_cap() -> None:
    tokens = ratios_one_half_one_and_a_half()
    # e = 16 / (4 * (1/4 + 1/4 + 9/4 + 9/4)) = 16 / 20 = 0.8: the two ratios 3/2 are capped
    values = finished(run("p3o", tokens)[1])
    assert values["weight/cap"] == pytest.approx(0.8, rel=1e-12)
    assert values["ratio/capped_fraction"] == 0.5
    values = finished(run("cispo", tokens, clip_high=1.0)[1])
    assert (values["weight/cap"], values["ratio/capped_fraction"]) == (2.0, 0.0)
    # proximal / behavior = 1 everywhere
    values = finished(run("decoupled", tokens, weight_cap=0.9)[1])
    assert values["weight/cap"] == pytest.approx(0.9)
    assert values["ratio/capped_fraction"] == 1.0
    assert finished(run("decoupled", tokens)[1])["ratio/capped_fraction"] == 0.0


def test_capped_fraction_of_an_importance_weight_is_of_tokens() -> None:
    # proximal / behavior = 1/2, 1/2 | 3/2, 3/2 at the tokens, 1/4 | 9/4 in the sequences
    tokens = ratios_one_half_one_and_a_half()
    tokens = replace(tokens, proximal_logp=tokens.logp, sequence=np.array([0, 0, 1, 1]))
    for level, cap, share in (("token", 1.4, 0.5), ("sequence", 2.0, 0.5), ("sequence", 2.5, 0.0)):
        for rule in ("truncate", "mask"):
            changes = {"correction": f"{level}_{rule}", "correction_cap": cap}
            values = finished(run("grpo_is", tokens, **changes)[1])
            assert values["ratio/capped_fraction"] == share
            assert values["weight/cap"] == pytest.approx(cap)


def test_masked_fraction_counts_dropped_tokens() -> None:
    # p - p_b = -1/8, -1/8, 1/8, 1/8 with A = 1, -1, 1, -1: the second and third move outward
    tokens = ratios_one_half_one_and_a_half()
    assert finished(run("dppo", tokens)[1])["ratio/masked_fraction"] == 0.0
    values = finished(run("dppo", tokens, threshold=0.1, weight_cap=1.2)[1])
    assert values["ratio/masked_fraction"] == 0.5
    assert values["ratio/capped_fraction"] == 0.5
    assert values["weight/cap"] == pytest.approx(1.2)
    # (log r)^2 of these two is 0.48 and 0.16, with the mean 0.32
    for threshold, share in ((0.33, 0.0), (0.3, 0.25), (0.1, 0.5)):
        values = finished(run("m2po", tokens, threshold=threshold)[1])
        assert values["ratio/masked_fraction"] == share


def test_metrics_of_sequence_weights() -> None:
    tokens = oracle.random_tokens(4, [6, 5, 2], spread=0.3)
    log_ratio = tokens.logp - tokens.behavior_logp
    w = oracle.product_of_sequence(tokens, log_ratio)
    values = finished(run("vcpo", tokens, weight_cap=float(np.median(w)), base_ess=0.9)[1])
    of_sequences = np.unique(w)
    e = of_sequences.sum() ** 2 / (3 * (of_sequences**2).sum())
    assert values["ess/sequence"] == pytest.approx(e, rel=1e-10)
    assert values["learning_rate/factor"] == pytest.approx(
        oracle.learning_rate_factor(tokens, 0.9), rel=1e-10
    )
    assert values["ratio/capped_fraction"] == pytest.approx(np.mean(w > np.median(w)))
    loss = oracle.evaluate("vespo", tokens)
    weight = -loss.d_logp * 13 / tokens.advantage
    assert finished(run("vespo", tokens)[1])["weight/mean"] == pytest.approx(weight.mean())


def test_penalty_is_the_kl_before_its_weight() -> None:
    # mean of r l - r + 1 over r = 1/2, 3/2
    values = finished(run("p3o", ratios_one_half_one_and_a_half())[1])
    expected = (0.5 * log(0.5) + 0.5 + 1.5 * log(1.5) - 0.5) / 2
    assert values["kl/penalty"] == pytest.approx(expected, rel=1e-12)


def test_anchor_metrics_of_two_anchor() -> None:
    tokens = oracle.random_tokens(3, [6, 5], spread=0.8)
    ess = oracle.evaluate("two_anchor", tokens).ess
    values = finished(run("two_anchor", tokens)[1])
    share = (1 - ess["behavior"]) / (2 - ess["behavior"] - ess["proximal"])
    assert values["anchor/ess_behavior"] == pytest.approx(ess["behavior"], rel=1e-10)
    assert values["anchor/ess_proximal"] == pytest.approx(ess["proximal"], rel=1e-10)
    assert values["anchor/behavior_share"] == pytest.approx(share, rel=1e-10)
    assert values["weight/cap"] == pytest.approx(min(ess["behavior"], ess["proximal"]), rel=1e-10)


def test_mean_pools_samples_and_averages_steps() -> None:
    few, many = Mean.of(torch.tensor([1.0])), Mean.of(torch.tensor([4.0, 5.0, 6.0]))
    # pooled: 16 / 4 = 4, not the mean of means (1 + 5) / 2 = 3
    assert few.merge(many).values("x") == {"x": 4.0}
    # over steps each step counts alike
    assert average_over_steps([{"x": few}, {"x": many}]) == {"x": 3.0}


def test_mean_of_nothing_is_left_out_and_does_not_spoil_a_pool() -> None:
    nothing = Mean.of(torch.tensor([]))
    assert nothing.values("x") == {}
    two = Mean.of(torch.tensor([2.0]))
    assert average_over_steps([{"x": nothing}, {"x": two}]) == {"x": 2.0}
    assert nothing.merge(Mean.of(torch.tensor([2.0]))).values("x") == {"x": 2.0}


def test_mean_sums_in_float64() -> None:
    # 2^24 + 1 is no float32: a float32 sum would stay at 2^24
    mean = Mean.of(torch.tensor([2.0**24, 1.0, 1.0]))
    assert float(mean.total) == 2.0**24 + 2


def test_share_adds_within_a_step_and_averages_over_steps() -> None:
    a, b = Share(torch.tensor(0.25)), Share(torch.tensor(0.5))
    assert a.merge(b).values("loss") == {"loss": 0.75}
    assert average_over_steps([{"loss": a}, {"loss": b}]) == {"loss": 0.375}


def test_count_adds_within_and_over_steps() -> None:
    a, b = Count(torch.tensor(2.0)), Count(torch.tensor(3.0))
    assert a.merge(b).values("n") == {"n": 5.0}
    assert average_over_steps([{"n": a}, {"n": b}]) == {"n": 5.0}


def test_ess_pools_ratios_within_a_step_and_averages_over_steps() -> None:
    # ratios 1, 1 and 3, 3: each part alone has e = 1; together 64 / (4 * 20) = 0.8
    ones = EffectiveSampleSize(RatioMoments.of(torch.zeros(2)))
    threes = EffectiveSampleSize(RatioMoments.of(torch.full((2,), log(3), dtype=torch.float64)))
    pooled = ones.merge(threes)
    assert pooled.values("ess")["ess"] == pytest.approx(0.8, rel=1e-12)
    assert pooled.values("ess")["one_minus_ess"] == pytest.approx(0.2, rel=1e-12)
    over = average_over_steps([{"ess": pooled}, {"ess": ones}])
    assert over == pytest.approx({"ess": 0.9, "one_minus_ess": 0.1}, rel=1e-12)


def test_one_minus_ess_pools_like_ess_and_is_left_out_without_a_token() -> None:
    ones = OneMinusEss(RatioMoments.of(torch.zeros(2)))
    threes = OneMinusEss(RatioMoments.of(torch.full((2,), log(3), dtype=torch.float64)))
    none = OneMinusEss(RatioMoments.of(torch.zeros(0)))
    assert ones.merge(threes).values("lag_3") == pytest.approx({"lag_3": 0.2}, rel=1e-12)
    assert ones.merge(none).values("lag_3") == {"lag_3": 0.0}
    assert none.values("lag_3") == {}


@pytest.mark.parametrize("hidden", [500.0, -500.0])
def test_ess_remembers_across_parts_that_a_ratio_was_beyond_measure(hidden: float) -> None:
    part = EffectiveSampleSize(RatioMoments.of(torch.full((2,), hidden)))
    assert part.merge(part).values("ess")["ess"] == 0.25
    ordinary = EffectiveSampleSize(RatioMoments.of(torch.zeros(2)))
    # beyond measure above: 1/4. Suppressed, beside two that agree: 4 / (4 * 2) = 1/2
    expected = 0.25 if hidden > 0 else 0.5
    for pooled in (part.merge(ordinary), ordinary.merge(part)):
        assert pooled.values("ess")["ess"] == pytest.approx(expected, rel=1e-12)
    # several ratios beyond the bound look alike, in whichever part they are
    several = ordinary.merge(part).merge(part).values("ess")["ess"]
    # 1/6, or two of six that agree: 4 / (6 * 2)
    assert several == pytest.approx(1 / 6 if hidden > 0 else 1 / 3, rel=1e-12)


def test_ratio_quantiles_are_of_the_pooled_ratios() -> None:
    # ratios 0, 1, ..., 100 hundredths (shifted by one to have a log): the quantile q is 1 + q
    ratios = 1 + torch.arange(101, dtype=torch.float64) / 100
    shuffled = ratios[torch.randperm(101, generator=torch.Generator().manual_seed(0))].log()
    pooled = RatioQuantiles((shuffled[:30],)).merge(RatioQuantiles((shuffled[30:],)))
    assert pooled.values("ratio") == pytest.approx(
        {
            "ratio/mean": 1.5,
            "ratio/p01": 1.01,
            "ratio/p10": 1.10,
            "ratio/p50": 1.50,
            "ratio/p90": 1.90,
            "ratio/p99": 1.99,
        },
        rel=1e-12,
    )
    assert RatioQuantiles((torch.zeros(0),)).values("ratio") == {}
    assert RatioQuantiles((torch.zeros(1),)).values("ratio")["ratio/p99"] == 1.0


def test_max_is_taken_over_parts_and_over_steps() -> None:
    first = Max((torch.tensor([1.0, 3.0]),)).merge(Max((torch.tensor([]),)))
    second = Max((torch.tensor([2.0]),))
    assert first.values("x") == {"x": 3.0}
    assert Max((torch.tensor([]),)).values("x") == {}
    assert average_over_steps([{"x": first}, {"x": second}]) == {"x": 3.0}


def test_extreme_ratios_are_reported_at_the_bound() -> None:
    tokens = replace(ratios_one_half_one_and_a_half(), logp=np.array([499.0, -1.0, -1.0, -1.0]))
    values = finished(run("grpo", tokens, torch.float32)[1])
    assert values["ratio/max"] == pytest.approx(exp(60), rel=1e-5)


def test_merge_keeps_what_only_some_parts_report() -> None:
    merged = merge_metrics([{"a": Count(torch.tensor(1.0))}, {"b": Count(torch.tensor(2.0))}, {}])
    assert average_over_steps([merged]) == {"a": 1.0, "b": 2.0}
    assert merge_metrics([]) == {}
    assert average_over_steps([]) == {}


def test_a_step_that_lacks_a_metric_is_left_out_of_its_average() -> None:
    steps = [{"a": Share(torch.tensor(1.0))}, {}, {"a": Share(torch.tensor(2.0))}]
    assert average_over_steps(steps) == {"a": 1.5}


def test_what_an_objective_asks_of_the_trainer() -> None:
    """Whether a pre-pass for the totals, a proximal snapshot or the top K are needed."""
    asks = {name: build_objective(name) for name in OBJECTIVES}
    need_policy = {n for n, o in asks.items() if o.totals_need_policy}
    assert need_policy == {"m2po", "vcpo", "p3o", "two_anchor", "pact"}
    need_proximal = {n for n, o in asks.items() if o.needs_proximal}
    assert need_proximal == {"decoupled", "grpo_is", "two_anchor", "pact"}
    clipped = {n: o.clips_behavior_ratio for n, o in asks.items() if o.clips_behavior_ratio}
    masked = {"dppo": "probability", "m2po": "mask"}
    assert clipped == {"grpo": "token", "dapo": "token", "gspo": "sequence", **masked}
    assert not any(o.needs_top_logp for o in asks.values())
    assert build_objective("p3o", kl="top_k").needs_top_logp
    assert not build_objective("p3o", ess_scope="micro_batch").totals_need_policy


def test_a_part_of_a_log_ratio() -> None:
    part, rest = torch.tensor([0.1, -0.3, 0.2]), torch.tensor([0.0, 0.2, 0.1])
    log_ratio = part + rest
    halves = [LogRatioPart.of(part[:1], log_ratio[:1]), LogRatioPart.of(part[1:], log_ratio[1:])]
    found = halves[0].merge(halves[1]).values("x")
    ratios = part.double().exp()
    assert found["x/ratio_mean"] == pytest.approx(float(ratios.mean()))
    ess = float(ratios.sum() ** 2 / (3 * ratios.square().sum()))
    assert found["x/one_minus_ess"] == pytest.approx(1.0 - ess)
    covariance = float(((part - part.mean()) * (log_ratio - log_ratio.mean())).mean())
    assert found["x/share"] == pytest.approx(
        covariance / float(log_ratio.var(correction=0)), rel=1e-5
    )
    empty = torch.zeros(0)
    assert LogRatioPart.of(empty, empty).values("x") == {}
    assert "x/share" not in LogRatioPart.of(part[:1], log_ratio[:1]).values("x")
