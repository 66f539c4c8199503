"""From recorded completions to tokens that can be examined, and what had to be put right."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.doctor.distributions import SamplingDistribution
from trustbatch.doctor.examined_tokens import UNKNOWN, ExaminedTokens
from trustbatch.doctor.recompute import Layout, recompute
from trustbatch.doctor.rollouts.fields import fault
from trustbatch.doctor.rollouts.recorded import RecordedRollout
from trustbatch.doctor.rollouts.text import Lines, prompt_ids
from trustbatch.doctor.rollouts.token_strings import TokenStrings
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.types import Completion, FinishReason, Provenance, TrainSequence

MAX_COMPLETION_TOKENS = 2048
"""tokens of a completion that are examined: logits of more would not fit into memory"""
LEAST_LOGPROB = -9000.0
"""vLLM writes -9999 for minus infinity"""
LARGEST_LOGPROB = 1e-3
"""0, up to rounding"""
CLEARLY_BETTER = 3.0
"""how many times smaller a residual is where another reading of the file is the right one"""
OUTLIER = 10.0
"""a damaged completion differs by this times as much as the median one"""
MIN_COMPLETIONS = 4
"""without as many, there is no telling a damaged completion from a usual one"""


@dataclass(frozen=True)
class Preparation:
    """What was found while completions were made ready."""

    ids_from_strings: int
    """completions whose ids were recovered from the strings of their tokens"""
    prompts_from_text: int
    """completions whose prompt ids were made by this tokenizer"""
    unrecovered: Lines
    """completions left out: no certain id for one of their tokens"""
    other_length: Lines
    """completions left out: not as many log-probs as tokens"""
    too_long: Lines
    """completions left out: the prompt alone fills the model's context"""
    not_finite: Lines
    """completions with a log-prob that is missing, NaN or infinite"""
    positive: Lines
    """completions with a log-prob above 0"""


@dataclass(frozen=True)
class Prepared:
    """Tokens ready for the trainer's forward pass."""

    tokens: ExaminedTokens
    lines: list[int]
    """of the sequences"""
    found: Preparation


def prepare(
    policy: Policy, rollouts: Sequence[RecordedRollout], settings: SamplingDistribution
) -> Prepared:
    """Turn recorded completions into sequences; names what can't be used."""
    found = {
        name: Lines()
        for name in ("unrecovered", "other_length", "too_long", "not_finite", "positive")
    }
    sequences: list[TrainSequence] = []
    lines: list[int] = []
    strings: TokenStrings | None = None
    from_strings = from_text = 0
    for rollout in rollouts:
        if rollout.token_ids is None:
            strings = strings or TokenStrings(policy.tokenizer)
            assert rollout.token_strings is not None
            recovered = strings.ids(rollout.token_strings, rollout.text)
            if isinstance(recovered, str):
                found["unrecovered"] = found["unrecovered"].add(rollout.line, recovered)
                continue
            rollout = replace(rollout, token_ids=recovered)
            from_strings += 1
        if rollout.prompt_token_ids is None:
            rollout = replace(rollout, prompt_token_ids=prompt_ids(policy.tokenizer, rollout))
            from_text += 1
        assert rollout.token_ids is not None
        assert rollout.prompt_token_ids is not None
        _refuse_other_vocabulary(policy, rollout)
        num_ids, num_logprobs = len(rollout.token_ids), len(rollout.logprobs)
        if abs(num_ids - num_logprobs) > 1:
            example = f"{num_ids} token ids and {num_logprobs} log-probs"
            found["other_length"] = found["other_length"].add(rollout.line, example)
            continue
        room = policy.context_length - len(rollout.prompt_token_ids)
        if room < 1 or not rollout.prompt_token_ids:
            found["too_long"] = found["too_long"].add(rollout.line)
            continue
        sequence = _sequence(rollout, settings, min(room, MAX_COMPLETION_TOKENS))
        values = _of_policy(rollout)
        if not all(math.isfinite(each) and each > LEAST_LOGPROB for each in values):
            found["not_finite"] = found["not_finite"].add(rollout.line)
        if any(each > LARGEST_LOGPROB for each in values):
            found["positive"] = found["positive"].add(rollout.line)
        sequences.append(sequence)
        lines.append(rollout.line)
    if not sequences:
        raise _nothing_left(found)
    return Prepared(
        tokens=_tokens(sequences),
        lines=lines,
        found=Preparation(ids_from_strings=from_strings, prompts_from_text=from_text, **found),
    )


def _of_policy(rollout: RecordedRollout) -> list[float]:
    """Return the log-probs of the tokens that the policy sampled."""
    if rollout.sampled is None:
        return list(rollout.logprobs)
    return [each for each, own in zip(rollout.logprobs, rollout.sampled, strict=True) if own]


def _nothing_left(found: dict[str, Lines]) -> ConfigError:
    reasons = {
        "other_length": "log-probs do not belong to the token ids ({}): record the ids that the "
        "engine sampled, and do not encode the text again",
        "unrecovered": "tokens have no certain ids ({}): record token_ids (vLLM: return_token_ids "
        "= true)",
        "too_long": "prompts are empty or fill the model's context{}: choose the model that "
        "sampled them",
    }
    name = max(reasons, key=lambda each: len(found[each]))
    example = found[name].example
    return ConfigError(
        f"No completion can be examined, as their {reasons[name].format(example)} ({found[name]})."
    )


def _refuse_other_vocabulary(policy: Policy, rollout: RecordedRollout) -> None:
    size = int(policy.model.get_input_embeddings().weight.shape[0])
    largest = max((*(rollout.token_ids or ()), *(rollout.prompt_token_ids or ())), default=0)
    if largest >= size:
        raise fault(
            rollout.line,
            f"has token id {largest}, and {policy.name} knows {size} ids: give the model that "
            "sampled the rollouts, with its own tokenizer",
        )


def _sequence(
    rollout: RecordedRollout, settings: SamplingDistribution, max_tokens: int
) -> TrainSequence:
    ids = torch.tensor((rollout.token_ids or ())[:max_tokens])
    logprobs = [
        each if LEAST_LOGPROB < each <= LARGEST_LOGPROB else math.nan for each in rollout.logprobs
    ]
    logprobs = [*logprobs, math.nan][: len(ids)]
    sampled = None if rollout.sampled is None else torch.tensor(rollout.sampled[: len(ids)])
    completion = Completion(
        prompt_id=f"line-{rollout.line}",
        sample=0,
        token_ids=ids,
        behavior_logp=torch.tensor(logprobs, dtype=torch.float32),
        top_token_ids=None,
        behavior_top_logp=None,
        finish_reason=FinishReason.LENGTH,
        provenance=Provenance(
            policy=rollout.model or UNKNOWN,
            version=0,
            engine="recorded",
            precision=rollout.precision or UNKNOWN,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            logprob_mode="processed",
        ),
        text=rollout.text or "",
        sampled=sampled,
    )
    return TrainSequence(
        prompt_token_ids=rollout.prompt_token_ids or (), completion=completion, advantage=0.0
    )


def _tokens(sequences: list[TrainSequence]) -> ExaminedTokens:
    recorded = [
        each.completion.of_policy(each.completion.behavior_logp).double() for each in sequences
    ]
    return ExaminedTokens(sequences, torch.cat(recorded), sequences[0].completion.provenance)


def of_sequences(tokens: ExaminedTokens, values: Tensor) -> list[Tensor]:
    """Divide values of all tokens [T] into those of each sequence."""
    return list(values.split([each.completion.num_sampled for each in tokens.sequences]))


def choose(tokens: ExaminedTokens, keep: Sequence[int]) -> ExaminedTokens:
    """Return the tokens of some sequences."""
    return _tokens([tokens.sequences[number] for number in keep])


def change_context(
    tokens: ExaminedTokens, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> ExaminedTokens:
    """Return the same completions after changed prompts."""
    return _tokens(
        [replace(each, prompt_token_ids=change(each.prompt_token_ids)) for each in tokens.sequences]
    )


def shift(tokens: ExaminedTokens, places: int) -> ExaminedTokens:
    """Return the tokens with their log-probs moved: that of token t becomes that of t + places."""
    moved: list[TrainSequence] = []
    for sequence in tokens.sequences:
        logp = sequence.completion.behavior_logp.roll(places)
        edge = slice(0, places) if places > 0 else slice(places, None)
        logp[edge] = math.nan
        moved.append(replace(sequence, completion=replace(sequence.completion, behavior_logp=logp)))
    return _tokens(moved)


def find_shift(
    policy: Policy,
    tokens: ExaminedTokens,
    distributions: Sequence[SamplingDistribution],
    layout: Layout,
) -> int:
    """Return the places by which log-probs must be moved to fit their tokens best; usually 0."""
    logp = recompute(policy, tokens, distributions, layout)

    def residual(places: int) -> float:
        moved = shift(tokens, places) if places else tokens
        return min(clipped_residual(moved.recorded - found.logp) for found in logp.values())

    as_recorded = residual(0)
    best = min((-1, 1), key=residual)
    return best if residual(best) < as_recorded / CLEARLY_BETTER else 0


def clipped_residual(difference: Tensor) -> float:
    """Return mean |l|; a token that a distribution excludes counts as 10."""
    known = difference[~difference.isnan()].abs().clamp(max=10.0)
    return float(known.mean()) if len(known) else 10.0


def damaged_sequences(tokens: ExaminedTokens, error: Tensor, noise: float) -> list[int]:
    """Return the sequences whose log-probs fit much worse than those of the others.

    Other weights change every completion; a completion with other ids, or with tokens missing,
    differs alone. `noise` is mean |l| that rounding may cause; none is damaged where the rest
    differs by more.
    """
    each = torch.tensor([clipped_residual(part) for part in of_sequences(tokens, error)])
    if len(each) < MIN_COMPLETIONS:
        return []
    bound = max(OUTLIER * float(each.median()), noise)
    damaged = (each > bound).nonzero().flatten().tolist()
    if not damaged or float(each[each <= bound].mean()) > noise:
        return []
    return damaged
