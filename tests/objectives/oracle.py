"""An independent float64 calculation of every objective: the loss, its gradient, and the trust e.

NumPy only, and nothing of the package under test. The gradients are closed forms, worked out by
hand from the definitions, because a stop-gradient makes the gradient of the loss something else
than the slope of its value: differences cannot check it.

Notation: l = logp - behavior_logp, r = exp(l), A = advantage, N tokens, S sequences. A token whose
l is not finite takes part in nothing.
"""

from dataclasses import dataclass, field, fields, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

LOG_RATIO_LIMIT = 60.0
K3_LIMIT = 10.0

DEFAULTS: dict[str, dict[str, float | str]] = {
    "reinforce": {},
    "grpo": {"clip_low": 0.2, "clip_high": 0.2},
    "dapo": {"clip_low": 0.2, "clip_high": 0.28},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_high": 0.28},
    "decoupled": {"clip_low": 0.2, "clip_high": 0.2, "weight_cap": 5.0},
    "grpo_is": {
        "clip_low": 0.2,
        "clip_high": 0.2,
        "correction": "sequence_mask",
        "correction_cap": 3.0,
    },
    "dppo": {"divergence": "tv", "threshold": 0.15, "weight_cap": 20.0},
    "m2po": {"threshold": 0.04},
    "vespo": {
        "k_positive": 2.0,
        "lambda_positive": 3.0,
        "k_negative": 3.0,
        "lambda_negative": 2.0,
    },
    "vcpo": {"weight_cap": 8.0, "base_ess": 1.0},
    "p3o": {},
    "two_anchor": {},
    "pact": {},
}


@dataclass(frozen=True)
class Tokens:
    """The response tokens of one step: arrays of length T, and [T, K] for the top tokens."""

    logp: Array
    behavior_logp: Array
    advantage: Array
    sequence: NDArray[np.int64]
    proximal_logp: Array | None = None
    reference_logp: Array | None = None
    entropy: Array | None = None
    top_logp: Array | None = None
    behavior_top_logp: Array | None = None
    proximal_top_logp: Array | None = None
    anchor_logp: Array | None = None
    anchor_top_logp: Array | None = None
    source: NDArray[np.int64] | None = None

    def take(self, index: NDArray[np.int64]) -> "Tokens":
        """The tokens at `index`, in that order."""
        chosen = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: v[index] for k, v in chosen.items() if v is not None})


@dataclass(frozen=True)
class Result:
    """A loss and what the optimizer would see of it."""

    loss: float
    d_logp: Array
    d_entropy: Array
    d_top_logp: Array | None
    ess: dict[str, float] = field(default_factory=dict)


def ratio(log_ratio: Array) -> Array:
    return np.exp(np.clip(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def normalized_ess(log_ratio: Array) -> float:
    """(sum r)^2 / (N sum r^2); 1/N where the limit on l hides the ratios.

    A ratio above the limit, or all of them below it, would read as ratios that agree: trust that
    nobody has measured. There is none then, and 1/N is the least there can be.
    """
    r = ratio(log_ratio)
    if np.any(log_ratio > LOG_RATIO_LIMIT) or np.all(log_ratio < -LOG_RATIO_LIMIT):
        return 1 / len(r)
    return float(r.sum() ** 2 / (len(r) * (r**2).sum()))


def k3(x: Array) -> Array:
    """x + exp(-x) - 1, and beyond |x| = 10 its tangent there."""
    edge = np.clip(x, -K3_LIMIT, K3_LIMIT)
    return edge + np.exp(-edge) - 1 + (1 - np.exp(-edge)) * (x - edge)


def k3_slope(x: Array) -> Array:
    return 1 - np.exp(-np.clip(x, -K3_LIMIT, K3_LIMIT))


def clipped_surrogate(r: Array, advantage: Array, low: float, high: float) -> tuple[Array, Array]:
    """-min(r A, clip(r) A), and its slope in log r.

    The clip binds only where it makes the gain smaller: r > 1 + high with A > 0, or r < 1 - low
    with A < 0. There the slope is zero; elsewhere d(-r A)/d(log r) = -r A.
    """
    value = -np.minimum(r * advantage, np.clip(r, 1 - low, 1 + high) * advantage)
    bound = ((advantage > 0) & (r > 1 + high)) | ((advantage < 0) & (r < 1 - low))
    return value, np.where(bound, 0.0, -r * advantage)


def product_of_sequence(t: Tokens, log_ratio: Array) -> Array:
    """At each token the product of its sequence's ratios."""
    return np.array([ratio(log_ratio[t.sequence == one].sum()) for one in t.sequence])


def binary_kl(p_b: Array, p: Array) -> Array:
    """KL between "this token or another" under pi_b and under pi."""
    return p_b * np.log(p_b / p) + (1 - p_b) * np.log((1 - p_b) / (1 - p))


def m2po_mask(log_ratio: Array, advantage: Array, threshold: float) -> Array:
    """The paper's Algorithm 1, one token at a time: 0 for what is dropped, 1 for the rest."""
    mask = np.ones(len(log_ratio))
    left = [i for i in range(len(log_ratio)) if log_ratio[i] * advantage[i] > 0]
    while left and np.mean(log_ratio[left] ** 2) > threshold:
        furthest = max(left, key=lambda i: abs(log_ratio[i]))
        mask[furthest] = 0
        left.remove(furthest)
    return mask


def log_mixture(weight_b: float, log_b: Array, weight_prox: float, log_prox: Array) -> Array:
    """log((w_b pi_b + w_prox pi_prox) / (w_b + w_prox))."""
    with np.errstate(divide="ignore"):
        parts = np.logaddexp(np.log(weight_b) + log_b, np.log(weight_prox) + log_prox)
    return parts - np.log(weight_b + weight_prox)


def importance_kl(logp: Array, log_anchor: Array, log_b: Array) -> tuple[Array, Array]:
    """r (x - 1) + anchor / pi_b with x = logp - log anchor. Slope: r (x - 1) + r = r x."""
    x = logp - log_anchor
    r = ratio(logp - log_b)
    return r * (x - 1) + ratio(log_anchor - log_b), r * x


def top_k_kl(top: Array, anchor_top: Array) -> tuple[Array, Array]:
    """sum_k p_k log(p_k / a_k) + p_rest log(p_rest / a_rest), and its slope in log p_k.

    With p_rest = 1 - sum_k p_k, d p_rest / d log p_k = -p_k, so the slope is
    p_k (log(p_k / a_k) + 1) - p_k (log(p_rest / a_rest) + 1) = p_k (x_k - x_rest).
    Where p_rest = 0 the bucket adds nothing and has no slope (0 log 0 = 0).
    """
    p = np.exp(top)
    x = top - anchor_top
    p_rest = 1 - p.sum(axis=1)
    a_rest = 1 - np.exp(anchor_top).sum(axis=1)
    has_rest = p_rest > 1e-9
    safe_p, safe_a = np.where(has_rest, p_rest, 1.0), np.where(has_rest, a_rest, 1.0)
    x_rest = np.log(safe_p / safe_a)
    value = (p * x).sum(axis=1) + np.where(has_rest, p_rest * x_rest, 0.0)
    slope = p * np.where(has_rest[:, None], x - x_rest[:, None], x + 1)
    return value, slope


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def random_tokens(
    seed: int,
    lengths: list[int],
    *,
    spread: float = 0.4,
    proximal_spread: float = 0.2,
    vocabulary: int = 7,
    top: int = 3,
) -> Tokens:
    """Tokens sampled by a behavior policy, with every optional field, all from true distributions.

    `spread` is how far the policy's logits are from the behavior policy's, which was sampled from
    at temperature 1.3: the anchor is what it was before.
    """
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    base = rng.normal(size=(count, vocabulary))
    behavior, anchor = log_softmax(base), log_softmax(1.3 * base)
    policy = log_softmax(base + spread * rng.normal(size=base.shape))
    proximal = log_softmax(policy + proximal_spread * rng.normal(size=base.shape))
    reference = log_softmax(base + 0.5 * rng.normal(size=base.shape))
    rows = np.arange(count)
    sampled = np.array([rng.choice(vocabulary, p=np.exp(b)) for b in behavior], dtype=np.int64)
    likely = np.argsort(-behavior, axis=1)[:, :top]
    ids = rng.permutation(10 * len(lengths))[: len(lengths)]  # ids need not be 0, 1, 2, ...
    return Tokens(
        logp=policy[rows, sampled],
        behavior_logp=behavior[rows, sampled],
        advantage=np.repeat(rng.normal(size=len(lengths)), lengths),
        sequence=np.repeat(ids, lengths).astype(np.int64),
        proximal_logp=proximal[rows, sampled],
        reference_logp=reference[rows, sampled],
        entropy=-(np.exp(policy) * policy).sum(axis=1),
        top_logp=np.take_along_axis(policy, likely, axis=1),
        behavior_top_logp=np.take_along_axis(behavior, likely, axis=1),
        proximal_top_logp=np.take_along_axis(proximal, likely, axis=1),
        anchor_logp=anchor[rows, sampled],
        anchor_top_logp=np.take_along_axis(anchor, likely, axis=1),
        source=rng.integers(3, 5, size=count),  # two sources, whose numbers need not begin at 0
    )


def finite(tokens: Tokens) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):
        return np.flatnonzero(np.isfinite(tokens.logp - tokens.behavior_logp))


def evaluate(
    name: str,
    tokens: Tokens,
    *,
    kl: str = "importance",
    anchor: str | None = None,
    entropy_coef: float = 0.0,
    reference_kl_coef: float = 0.0,
    num_tokens: int | None = None,
    num_sequences: int | None = None,
    **options: float | str,
) -> Result:
    """The objective over `tokens`; N and S are theirs unless given (as for a micro-batch)."""
    valid = finite(tokens)
    kept = tokens.take(valid)
    if anchor == "sampler" or tokens.anchor_logp is None:
        kept = replace(kept, anchor_logp=kept.behavior_logp, anchor_top_logp=kept.behavior_top_logp)
    n = len(valid) if num_tokens is None else num_tokens
    s = len(np.unique(kept.sequence)) if num_sequences is None else num_sequences
    d_logp = np.zeros_like(tokens.logp)
    d_entropy = np.zeros_like(tokens.logp)
    d_top = None if tokens.top_logp is None else np.zeros_like(tokens.top_logp)
    if len(valid) == 0:
        return Result(0.0, d_logp, d_entropy, d_top)

    options = {**DEFAULTS[name], **options}
    if name == "pact":
        options["anchor"] = anchor or "both"
    if name in RIVALS:
        value, slope = RIVALS[name](kept, **options)
        loss, slope, slope_top, ess = value.sum() / n, slope / n, None, {}
    elif name == "gspo":
        value, slope = gspo(kept, **options)
        loss, slope, slope_top, ess = value / s, slope / s, None, {}
    else:
        value, slope, slope_top, ess = token_terms(name, kept, kl, options)
        loss, slope = value.sum() / n, slope / n
        slope_top = None if slope_top is None else slope_top / n

    if entropy_coef:
        loss -= entropy_coef * kept.entropy.sum() / n
        d_entropy[valid] = -entropy_coef / n
    if reference_kl_coef:
        x = kept.logp - kept.reference_logp
        loss += reference_kl_coef * k3(x).sum() / n
        slope = slope + reference_kl_coef * k3_slope(x) / n
    d_logp[valid] = slope
    if slope_top is not None:
        d_top[valid] = slope_top
    return Result(float(loss), d_logp, d_entropy, d_top, ess)


def token_terms(
    name: str, t: Tokens, kl: str, options: dict[str, float]
) -> tuple[Array, Array, Array | None, dict[str, float]]:
    """Each token's loss before the division by N, its slopes in logp and top_logp, and the ESS."""
    log_ratio = t.logp - t.behavior_logp
    r = ratio(log_ratio)
    a = t.advantage
    if name == "reinforce":
        return -a * t.logp, -a, None, {}
    if name in ("grpo", "dapo"):
        return *clipped_surrogate(r, a, options["clip_low"], options["clip_high"]), None, {}
    if name == "cispo":
        weight = np.minimum(r, 1 + options["clip_high"])  # a constant: the slope of logp is 1
        return -weight * a * t.logp, -weight * a, None, {}
    if name == "decoupled":
        weight = np.clip(ratio(t.proximal_logp - t.behavior_logp), 0, options["weight_cap"])
        q = ratio(t.logp - t.proximal_logp)
        value, slope = clipped_surrogate(q, a, options["clip_low"], options["clip_high"])
        return weight * value, weight * slope, None, {}

    if name == "pact":
        return pact(t, kl, **options)
    e_b = normalized_ess(log_ratio)
    if name == "p3o":
        e, w_b, w_prox = e_b, 1.0, 0.0
        ess = {"ess": e_b}
    else:
        e_prox = normalized_ess(t.logp - t.proximal_logp)
        e, w_b, w_prox = min(e_b, e_prox), 1 - e_b, 1 - e_prox
        ess = {"ess": e, "behavior": e_b, "proximal": e_prox}
    weight = np.minimum(r, e)
    value, slope = -weight * a * t.logp, -weight * a
    if kl == "none":
        return value, slope, None, ess
    if w_b + w_prox <= 0:
        return value, slope, None if kl != "top_k" else np.zeros_like(t.top_logp), ess
    if kl == "top_k":
        anchor_top = t.anchor_top_logp
        if w_prox > 0:
            anchor_top = log_mixture(w_b, t.anchor_top_logp, w_prox, t.proximal_top_logp)
        penalty, slope_top = top_k_kl(t.top_logp, anchor_top)
        return value + (1 - e) * penalty, slope, (1 - e) * slope_top, ess
    log_anchor = t.anchor_logp
    if w_prox > 0:
        log_anchor = log_mixture(w_b, t.anchor_logp, w_prox, t.proximal_logp)
    if kl == "k3":
        x = t.logp - log_anchor
        penalty, pull = k3(x), k3_slope(x)
    else:
        penalty, pull = importance_kl(t.logp, log_anchor, t.behavior_logp)
    return value + (1 - e) * penalty, slope + (1 - e) * pull, None, ess


def pact(
    t: Tokens, kl: str, anchor: str, pull: str | float = "standard_error"
) -> tuple[Array, Array, Array | None, dict[str, float]]:
    """-min(r, e) A logp + c KL(pi || prox) + (1 - e) KL(pi || model), e of the token's source."""
    near, near_top = t.proximal_logp, t.proximal_top_logp
    if anchor == "model":
        near, near_top = t.anchor_logp, t.anchor_top_logp
    r, a = ratio(t.logp - t.behavior_logp), ratio(near - t.behavior_logp)
    e = np.zeros_like(r)
    for source in np.unique(t.source):
        e[t.source == source] = normalized_ess((t.logp - t.behavior_logp)[t.source == source])
    sequences = [t.sequence == one for one in np.unique(t.sequence)]
    rms = np.sqrt(np.mean([t.advantage[inside][0] ** 2 for inside in sequences]))
    drift = r.sum() ** 2 / (a.sum() * (r**2 / a).sum())
    support = min(1.0, r.sum() / a.sum())
    left = len(sequences) * (drift * support) ** (len(r) / len(sequences))
    measured = {"standard_error": rms / np.sqrt(max(1.0, left)), "deviation": rms}
    c = measured[pull] if isinstance(pull, str) else pull
    weight = np.minimum(r, e)
    value, slope = -weight * t.advantage * t.logp, -weight * t.advantage
    ess = {"pull": c, "sequences": left}
    pulls = [(c * np.ones_like(r), near, near_top)]
    if anchor == "both":
        pulls.append((1 - e, t.anchor_logp, t.anchor_top_logp))
    slope_top = None if kl != "top_k" else np.zeros_like(t.top_logp)
    for strength, log_anchor, anchor_top in pulls:
        if kl == "top_k":
            penalty, force_top = top_k_kl(t.top_logp, anchor_top)
            force, slope_top = 0.0, slope_top + strength[:, None] * force_top
        elif kl == "k3":
            penalty, force = k3(t.logp - log_anchor), k3_slope(t.logp - log_anchor)
        else:
            penalty, force = importance_kl(t.logp, log_anchor, t.behavior_logp)
        value, slope = value + strength * penalty, slope + strength * force
    return value, slope, slope_top, ess


def gspo(t: Tokens, clip_low: float, clip_high: float) -> tuple[float, Array]:
    """sum over sequences of -min(s A, clip(s) A), s = exp(mean l), and its slope in each logp.

    d(mean l)/d(logp_t) = 1/length, so each token has its sequence's slope in log s over the length.
    """
    total, slope = 0.0, np.zeros_like(t.logp)
    for one in np.unique(t.sequence):
        inside = t.sequence == one
        log_s = np.array([np.mean((t.logp - t.behavior_logp)[inside])])
        advantage = np.array([t.advantage[inside][0]])
        value, in_log_s = clipped_surrogate(ratio(log_s), advantage, clip_low, clip_high)
        total += float(value[0])
        slope[inside] = in_log_s[0] / inside.sum()
    return total, slope


def grpo_is(
    t: Tokens, clip_low: float, clip_high: float, correction: str, correction_cap: float
) -> tuple[Array, Array]:
    """GRPO's surrogate to the proximal policy, times min(u, cap), or u where it is at most cap."""
    level, rule = correction.split("_")
    log_u = t.proximal_logp - t.behavior_logp
    u = ratio(log_u) if level == "token" else product_of_sequence(t, log_u)
    if rule == "truncate":
        weight = np.minimum(u, correction_cap)
    else:
        weight = np.where(u <= correction_cap, u, 0.0)
    q = ratio(t.logp - t.proximal_logp)
    value, slope = clipped_surrogate(q, t.advantage, clip_low, clip_high)
    return weight * value, weight * slope


def dppo(t: Tokens, divergence: str, threshold: float, weight_cap: float) -> tuple[Array, Array]:
    """A capped score function, 0 where p has moved too far in the direction of the update."""
    p, p_b, a = np.exp(t.logp), np.exp(t.behavior_logp), t.advantage
    distance = abs(p - p_b) if divergence == "tv" else binary_kl(p_b, p)
    outward = ((a > 0) & (p > p_b)) | ((a < 0) & (p < p_b))
    weight = np.minimum(p / p_b, weight_cap) * ~(outward & (distance > threshold))
    return -weight * a * t.logp, -weight * a


def m2po(t: Tokens, threshold: float) -> tuple[Array, Array]:
    """-M r A; the slope in logp is the same, as dr/dlogp = r."""
    log_ratio = t.logp - t.behavior_logp
    value = -m2po_mask(log_ratio, t.advantage, threshold) * ratio(log_ratio) * t.advantage
    return value, value


def vespo(
    t: Tokens,
    k_positive: float,
    lambda_positive: float,
    k_negative: float,
    lambda_negative: float,
) -> tuple[Array, Array]:
    """A score function with weight w^k exp(lambda (1 - w)), a constant."""
    w = product_of_sequence(t, t.logp - t.behavior_logp)
    positive = w**k_positive * np.exp(lambda_positive * (1 - w))
    negative = w**k_negative * np.exp(lambda_negative * (1 - w))
    weight = np.where(t.advantage >= 0, positive, negative)
    return -weight * t.advantage * t.logp, -weight * t.advantage


def vcpo(t: Tokens, weight_cap: float, base_ess: float) -> tuple[Array, Array]:
    """A score function with the sequence's ratio, capped; base_ess is the learning rate's."""
    weight = np.minimum(product_of_sequence(t, t.logp - t.behavior_logp), weight_cap)
    return -weight * t.advantage * t.logp, -weight * t.advantage


def learning_rate_factor(t: Tokens, base_ess: float) -> float:
    """VCPO's: the square root of the sequences' normalized effective sample size over base_ess."""
    log_ratio = t.logp - t.behavior_logp
    sums = np.array([log_ratio[t.sequence == one].sum() for one in np.unique(t.sequence)])
    return float(np.sqrt(min(1.0, normalized_ess(sums) / base_ess)))


RIVALS = {"grpo_is": grpo_is, "dppo": dppo, "m2po": m2po, "vespo": vespo, "vcpo": vcpo}
