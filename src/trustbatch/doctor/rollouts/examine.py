"""The examination of recorded rollouts: with which weights, precision and settings were they made?

Each explanation is tried in the order of how little it assumes: the file as it is, log-probs that
are off by one, damaged completions, other sampling settings, another context, another head. What
none of them explains is a matter of the weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.doctor.arithmetic import (
    NOISE_FACTOR,
    PLAIN,
    ArithmeticResult,
    compare_arithmetic,
)
from trustbatch.doctor.distributions import Mismatch, SamplingDistribution
from trustbatch.doctor.examine import Measurements
from trustbatch.doctor.examined_tokens import ExaminedTokens
from trustbatch.doctor.recompute import Layout, other_values, recompute
from trustbatch.doctor.rollouts.alignment import (
    CLEARLY_BETTER,
    Preparation,
    change_context,
    choose,
    clipped_residual,
    damaged_sequences,
    find_shift,
    prepare,
    shift,
)
from trustbatch.doctor.rollouts.read_file import RolloutFile
from trustbatch.doctor.rollouts.recorded import RecordedSettings
from trustbatch.doctor.rollouts.text import Lines, TextResult, examine_texts
from trustbatch.doctor.sampling import best_fit, examine_sampling
from trustbatch.doctor.search import search
from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.training.update_share import UpdateShare

LAYOUT = Layout(max_tokens=2048, share_prompts=False)


@dataclass(frozen=True)
class CandidateResult:
    """How well another model explains the recorded log-probs."""

    share: UpdateShare
    """of the difference between the two models that the log-probs show: 0 for the given one"""
    mean_abs: float
    """mean |l| against this model"""


@dataclass(frozen=True)
class RolloutsExamination(Measurements):
    """All measurements of a file."""

    file_format: str
    num_completions: int
    """in the file"""
    settings: RecordedSettings
    num_other_settings: int
    preparation: Preparation
    texts: TextResult
    shifted: int
    """places by which the log-probs had to be moved to fit their tokens"""
    damaged: Lines
    """completions that differ far more than the others"""
    reading: str | None
    """another reading of the file that explains the log-probs: of its context, or the head"""
    candidates: Mapping[str, CandidateResult]
    versions: list[str]
    """recorded versions or models of the examined completions"""


def examine_rollouts(
    policy: Policy,
    file: RolloutFile,
    *,
    policy_temperature: float | None = None,
    candidates: Sequence[str] = (),
    load: Callable[[str], Policy],
    say: Callable[[str], None],
) -> RolloutsExamination:
    """Examine the completions of a file against a policy, and against other models."""
    configured = _distribution(file.settings)
    say(f"preparing {len(file.kept)} of {file.num_completions} completions")
    prepared = prepare(policy, file.kept, configured)
    texts = examine_texts(policy.tokenizer, file.kept)
    search_for = _Search(policy, configured, say)
    tokens = prepared.tokens
    places = find_shift(policy, tokens, search_for.expected, LAYOUT)
    tokens = shift(tokens, places) if places else tokens
    explained = search_for.explanation(tokens)
    sampling = examine_sampling(
        policy,
        explained.tokens,
        LAYOUT,
        configured=configured,
        trained=SamplingDistribution(policy_temperature or configured.temperature),
        recorded_by_config=configured,
        engine_precision=explained.arithmetic.explained_by,
        weights_agree=explained.weights_agree,
        may_be_recorded=(explained.recorded,),
        say=say,
    )
    damaged = Lines()
    for number in explained.damaged:
        damaged = damaged.add(prepared.lines[number])
    return RolloutsExamination(
        policy=policy.name,
        trainer_precision=policy.precision,
        policy_temperature=policy_temperature or configured.temperature,
        logprob_mode="processed",
        engine=tokens.provenance,
        num_sequences=len(explained.tokens.sequences),
        num_tokens=explained.tokens.num_tokens,
        arithmetic=explained.arithmetic,
        sampling=sampling,
        file_format=file.format,
        num_completions=file.num_completions,
        settings=file.settings,
        num_other_settings=file.num_other_settings,
        preparation=prepared.found,
        texts=texts,
        shifted=places,
        damaged=damaged,
        reading=explained.reading,
        candidates=_compare(policy, explained, candidates, load, say),
        versions=sorted({each.version or each.model or "" for each in file.kept} - {""}),
    )


def _distribution(settings: RecordedSettings) -> SamplingDistribution:
    temperature = 1.0 if settings.temperature is None else settings.temperature
    if temperature <= 0.0:
        raise ConfigError(
            "The rollouts were sampled at temperature 0, where the most likely token is certain "
            "and there is no distribution to compare: record some at a temperature above 0."
        )
    top_p = 1.0 if settings.top_p is None else settings.top_p
    return SamplingDistribution(temperature, settings.top_k or 0, top_p)


@dataclass(frozen=True)
class _Explanation:
    """The reading of a file that explains its log-probs best."""

    tokens: ExaminedTokens
    recorded: SamplingDistribution
    """the distribution whose log-probs were recorded"""
    arithmetic: ArithmeticResult
    damaged: list[int]
    reading: str | None = None

    @property
    def weights_agree(self) -> bool:
        """Whether tokens can be tested against the policy's distributions."""
        return self.arithmetic.is_explained and self.reading != "tied_head"


class _Search:
    """Tries readings of a file until one explains its log-probs."""

    def __init__(
        self, policy: Policy, configured: SamplingDistribution, say: Callable[[str], None]
    ) -> None:
        self.policy = policy
        self.configured = configured
        self.expected = list(dict.fromkeys((configured, PLAIN, configured.untruncated)))
        self.say = say

    def explanation(self, tokens: ExaminedTokens) -> _Explanation:
        """Return the first reading that explains the tokens, else the file as it is."""
        found = self._as_expected(tokens)
        error = tokens.recorded - self._logp(tokens, found.recorded)
        noise = NOISE_FACTOR * max(
            found.arithmetic.uncertainty,
            *(effect.mean_abs for effect in found.arithmetic.effects.values()),
        )
        damaged = damaged_sequences(tokens, error, noise)
        if damaged:
            kept = [n for n in range(len(tokens.sequences)) if n not in set(damaged)]
            rest = self._as_expected(choose(tokens, kept))
            found = _Explanation(rest.tokens, rest.recorded, rest.arithmetic, damaged)
        for attempt in (self._other_settings, self._other_context, self._tied_head):
            if found.arithmetic.is_explained:
                break
            found = attempt(found) or found
        return found

    def _as_expected(self, tokens: ExaminedTokens) -> _Explanation:
        statistics = recompute(self.policy, tokens, self.expected, LAYOUT)
        residuals = {
            each: clipped_residual(tokens.recorded - found.logp)
            for each, found in statistics.items()
        }
        best = best_fit(residuals, self.configured)
        return _Explanation(tokens, best, self._arithmetic(tokens, best), [])

    def _other_settings(self, found: _Explanation) -> _Explanation | None:
        self.say("trying sampling settings")
        best = search(self.policy, found.tokens, found.recorded, LAYOUT).recorded
        if best == found.recorded:
            return None
        arithmetic = self._arithmetic(found.tokens, best)
        if not arithmetic.is_explained:
            return None
        return _Explanation(found.tokens, best, arithmetic, found.damaged)

    def _other_context(self, found: _Explanation) -> _Explanation | None:
        self.say("trying other contexts")
        bos = self.policy.tokenizer.bos_token_id
        prompts = [each.prompt_token_ids for each in found.tokens.sequences]
        readings: dict[str, Callable[[tuple[int, ...]], tuple[int, ...]]] = {}
        if isinstance(bos, int) and all(each[0] != bos for each in prompts):
            readings["bos_missing"] = lambda prompt: (bos, *prompt)
        if isinstance(bos, int) and all(len(each) > 1 and each[0] == bos for each in prompts):
            readings["bos_extra"] = lambda prompt: prompt[1:]
        for name, change in readings.items():
            changed = change_context(found.tokens, change)
            if self._fits_better(found, changed):
                arithmetic = self._arithmetic(changed, found.recorded)
                return _Explanation(changed, found.recorded, arithmetic, found.damaged, name)
        return None

    def _tied_head(self, found: _Explanation) -> _Explanation | None:
        """Try the input embeddings in the place of a head that is not tied to them."""
        with tied_head(self.policy) as is_other:
            if not is_other or not self._fits_better(found, found.tokens):
                return None
        return _Explanation(
            found.tokens, found.recorded, found.arithmetic, found.damaged, "tied_head"
        )

    def _fits_better(self, found: _Explanation, changed: ExaminedTokens) -> bool:
        residual = clipped_residual(changed.recorded - self._logp(changed, found.recorded))
        return residual < found.arithmetic.mismatch.mean_abs / CLEARLY_BETTER

    def _arithmetic(self, tokens: ExaminedTokens, at: SamplingDistribution) -> ArithmeticResult:
        return compare_arithmetic(self.policy, tokens, LAYOUT, at=at, say=self.say)

    def _logp(self, tokens: ExaminedTokens, at: SamplingDistribution) -> Tensor:
        return recompute(self.policy, tokens, [at], LAYOUT)[at].logp


@contextmanager
def tied_head(policy: Policy) -> Iterator[bool]:
    """Let the input embeddings be the output head for a while; False where they are already."""
    head = policy.model.get_output_embeddings().weight
    embeddings = policy.model.get_input_embeddings().weight
    if head.data_ptr() == embeddings.data_ptr() or head.shape != embeddings.shape:
        yield False
        return
    with other_values(iter([head]), lambda _: embeddings.data):
        yield True


def _compare(
    policy: Policy,
    explained: _Explanation,
    candidates: Sequence[str],
    load: Callable[[str], Policy],
    say: Callable[[str], None],
) -> dict[str, CandidateResult]:
    """Measure whether one of some other models made the log-probs."""
    if not candidates:
        return {}
    tokens, at = explained.tokens, explained.recorded
    own = recompute(policy, tokens, [at], LAYOUT)[at].logp
    cluster = torch.cat(list(_numbers(tokens)))
    results: dict[str, CandidateResult] = {}
    for name in candidates:
        say(f"comparing with {name}")
        other = load(name)
        if other.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise ConfigError(
                f"--candidates {name} has another vocabulary than {policy.name}: give checkpoints "
                "of the same model."
            )
        logp = recompute(other, tokens, [at], LAYOUT)[at].logp
        del other
        results[name] = CandidateResult(
            UpdateShare.of(tokens.recorded - own, logp - own, cluster),
            Mismatch.of(tokens.recorded - logp).mean_abs,
        )
    return results


def _numbers(tokens: ExaminedTokens) -> Iterator[Tensor]:
    for number, sequence in enumerate(tokens.sequences):
        yield torch.full((sequence.completion.num_sampled,), number)
