"""What the numbers of an inspection say, in sentences."""

from trustbatch.inspection.candidates import UNCLIPPED
from trustbatch.inspection.gradients import Estimate
from trustbatch.inspection.result import Inspection, ObjectiveRow
from trustbatch.inspection.token_summary import RIGHT_HIGH, WRONG_LOW

NOTABLE = 0.01
"""share of tokens from which silence is worth a sentence"""
MOST = 0.8
ON_POLICY = 1e-6
"""1-ESS below which all ratios are 1 but for rounding"""
CLEAR = 2.0
"""standard errors"""


def findings_of(inspection: Inspection) -> list[str]:
    """Return the sentences, the most general one first."""
    if inspection.num_with_advantage == 0:
        return ["All groups have equal rewards, so no token has an advantage to weigh."]
    if inspection.one_minus_ess < ON_POLICY:
        return [
            "Every ratio is 1: the batch is on-policy, and objectives differ only by how they "
            "average over tokens and sequences. They part once the policy has moved away from it."
        ]
    return [*_clip_and_temperature(inspection), *_extremes(inspection)]


def _clip_and_temperature(inspection: Inspection) -> list[str]:
    """Say what a clip does to tokens of another temperature: it takes sides with the entropy."""
    hot = inspection.rollout_temperature > inspection.policy_temperature
    if inspection.rollout_temperature == inspection.policy_temperature:
        return []
    # most of what it silences: others silence whole sequences, or every large ratio
    rows = [
        row for row in inspection.rows if _clipped(row) >= max(NOTABLE, MOST * row.tokens.silenced)
    ]
    if not rows:
        return []
    row = next((row for row in rows if row.is_own), rows[0])
    low, high = ("tail", "head") if hot else ("head", "tail")
    wrong, right = row.tokens.silenced_in[WRONG_LOW], row.tokens.silenced_in[RIGHT_HIGH]
    silenced = [
        f"as {what}, {share:.1%}"
        for share, what in (
            (wrong, f"wrong and in the {low} (A < 0, r < 1)"),
            (right, f"right and in the {high} (A > 0, r > 1)"),
        )
        if share >= NOTABLE / 10
    ]
    sentence = (
        f"{row.label} silences {wrong + right:.1%} of the tokens: {' and '.join(silenced)}. "
        f"Sampled at T = {inspection.rollout_temperature:g}, a token with a ratio below 1 is in "
        f"the {low} of the policy. What is left pushes the {high} down and the {low} up, which "
        f"{'raises' if hot else 'lowers'} entropy"
    )
    others = [each.label for each in rows if each is not row and each.label != UNCLIPPED]
    also = f" Likewise {', '.join(others)}." if others else ""
    return [f"{sentence}{_measured(inspection, row, hot)}.{also}"]


def _clipped(row: ObjectiveRow) -> float:
    return row.tokens.silenced_in[WRONG_LOW] + row.tokens.silenced_in[RIGHT_HIGH]


def _measured(inspection: Inspection, row: ObjectiveRow, hot: bool) -> str:
    """Return whether the measured drift agrees, to end the sentence with."""
    unclipped = next(each for each in inspection.rows if each.label == UNCLIPPED)
    if row.gradient is None or unclipped.gradient is None:
        return ""
    own, plain = row.gradient.entropy_drift, unclipped.gradient.entropy_drift
    beyond = row.gradient.drift_beyond_unclipped
    if own is None or plain is None or beyond is None:
        return ""
    numbers = f"{_signed(own)} a unit step, and {_signed(plain)} unclipped"
    agrees = (beyond.value if hot else -beyond.value) > CLEAR * beyond.standard_error
    return f": {numbers}" if agrees else f"; on this batch that does not show ({numbers})"


def _signed(estimate: Estimate) -> str:
    return f"{estimate.value:+.3f} ± {estimate.standard_error:.3f}"


def _extremes(inspection: Inspection) -> list[str]:
    """Say whose update points farthest away from fresh rollouts, where that is clear."""
    found = [
        (row.gradient.fresh_cosine, row.label)
        for row in inspection.rows
        if row.gradient is not None and row.gradient.fresh_cosine is not None
    ]
    if len(found) < 2:
        return []
    (worst, worst_label) = min(found, key=lambda each: each[0].value)
    (best, best_label) = max(found, key=lambda each: each[0].value)
    error = (worst.standard_error**2 + best.standard_error**2) ** 0.5
    if best.value - worst.value < CLEAR * error:
        return []
    return [
        f"Nearest to the gradient on fresh rollouts is {best_label} (cosine {best.value:.2f} ± "
        f"{best.standard_error:.2f}), farthest from it {worst_label} ({worst.value:.2f} ± "
        f"{worst.standard_error:.2f})."
    ]
