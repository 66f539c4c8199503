"""The canary: after a weight update, does the engine still sample from the trainer's policy?

The engine samples a few short completions of fixed prompts at temperature 1; the trainer recomputes
their log-probs with its own forward pass. Where the run records an anchor beside what it samples
from, the engine samples as many again in the run's own way, and their anchor is recomputed. Random
numbers depend on the prompt's id, and the canary's ids are its own, so the samples of the run stay
what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.errors import CanaryError
from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import encode_checked
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.training.logprobs import token_logprobs
from trustbatch.types import (
    Completion,
    GenerationRequest,
    Prompt,
    Provenance,
    SamplingParams,
    TrainSequence,
)

NUM_PROMPTS = 4
NUM_SAMPLES = 2
MAX_TOKENS = 8


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of log-probs that rounding alone may cause."""

    mean: float
    largest: float


# Worst of 60 canaries on three small models: float32 1e-6 on average and 6e-6 at most, bfloat16
# 0.034 and 0.71, fp8 0.28 and 1.6; a model of another seed has 0.3 to 2.9 on average.
# The bounds leave room for other kernels and for rare tokens: a healthy run must never be stopped.
# An update too small to be seen in a precision does less harm than the precision itself, and what
# an engine fails to take over adds up until it is seen.
TOLERANCES = {
    "float32": Tolerance(mean=1e-3, largest=1e-2),
    "bfloat16": Tolerance(mean=0.15, largest=3.0),
    "fp8": Tolerance(mean=0.8, largest=8.0),
}
WIDEST = TOLERANCES["fp8"]


class Canary:
    """Compares engine and trainer on the same few prompts again and again."""

    def __init__(
        self,
        engine: RolloutEngine,
        policy: Policy,
        prompts: Sequence[Prompt],
        *,
        max_tokens: int = MAX_TOKENS,
        logprob_mode: str = "processed",
        anchored: SamplingParams | None = None,
        every: int = 1,
    ) -> None:
        """`anchored` is how the run samples, where it records an anchor."""
        self.engine = engine
        self.policy = policy
        self.every = every
        sampling = SamplingParams(
            max_tokens=min(max_tokens, MAX_TOKENS),
            stop_token_ids=policy.stop_token_ids,
            logprob_mode=logprob_mode,  # at T = 1 without a cut both record the same
        )
        self.requests = [
            GenerationRequest(
                prompt_id=f"canary-{number}",
                token_ids=encode_checked(policy, prompt, sampling.max_tokens),
                num_samples=NUM_SAMPLES,
                sampling=sampling,
            )
            for number, prompt in enumerate(prompts)
        ]
        self.anchored = anchored_requests(self.requests, anchored)

    def at_start(self, version: int) -> None:
        """Check before anything is sampled, unless the canary is switched off."""
        if self.every:
            self.check(version)

    def after_update(self, version: int) -> dict[str, float]:
        """Check every so many updates; returns the metrics, or none where it is not yet time."""
        return self.check(version) if self.every and version % self.every == 0 else {}

    def check(self, version: int) -> dict[str, float]:
        """Return how far engine and trainer are apart; stop the run where it is too far."""
        completions = self.engine.generate([*self.requests, *self.anchored])
        num_plain = len(self.requests) * NUM_SAMPLES
        parts = [(self.requests, completions[:num_plain])]
        if self.anchored:
            parts.append((self.anchored, completions[num_plain:]))
        metrics: dict[str, float] = {}
        for requests, sampled in parts:
            metrics |= judge(
                self._difference(requests, sampled),
                sampled[0].provenance,
                precision=self.policy.precision,
                version=version,
                of_anchor=requests is self.anchored,
            )
        return metrics

    def _difference(
        self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
    ) -> Tensor:
        """Return trainer minus engine for every token, [T], of the anchor where there is one."""
        sequences = [
            TrainSequence(
                prompt_token_ids=requests[number // NUM_SAMPLES].token_ids,
                completion=completion,
                advantage=0.0,
            )
            for number, completion in enumerate(completions)
        ]
        (batch,) = micro_batches(
            sequences,
            # one forward pass, as wide as its rows: there are few of them
            max_tokens=len(sequences) * max(sequence.num_tokens for sequence in sequences),
            pad_token_id=self.policy.pad_token_id,
            packs=self.policy.packs,
        )
        batch = batch.to(self.policy.device)
        temperature = requests[0].sampling.anchor_temperature or 1.0
        with torch.no_grad():
            logp = token_logprobs(self.policy, batch, temperature=temperature).logp
        # an engine that records no anchor has, to training, sampled from it
        recorded = batch.behavior_logp if batch.anchor_logp is None else batch.anchor_logp
        return (logp - recorded) * min(temperature, 1.0)  # which magnifies rounding


def anchored_requests(
    plain: Sequence[GenerationRequest], anchored: SamplingParams | None
) -> list[GenerationRequest]:
    """Return requests after the same contexts for what is recorded beside the run's own samples."""
    if anchored is None:
        return []
    return [
        replace(
            request,
            prompt_id=f"{request.prompt_id}-anchor",
            sampling=replace(anchored, max_tokens=request.sampling.max_tokens, top_logprobs=0),
        )
        for request in plain
    ]


def judge(
    difference: Tensor,
    sampled_by: Provenance,
    *,
    precision: str,
    version: int,
    of_anchor: bool = False,
) -> dict[str, float]:
    """Return how far engine and trainer are apart, from trainer minus engine for every token [T].

    Where that is more than rounding explains, the run is stopped. `precision` and `version` are the
    trainer's; `of_anchor` says that the log-probs are those of the anchor.
    """
    difference = difference.abs()
    mean, largest = float(difference.mean()), float(difference.max())
    tolerance = _tolerance(sampled_by.precision, precision)
    within = mean <= tolerance.mean and largest <= tolerance.largest  # False for NaN
    if sampled_by.version != version or not within:
        raise CanaryError(
            f"The engine ({sampled_by.engine}, {sampled_by.precision}, version {sampled_by.version}) "
            f"{'has another anchor than' if of_anchor else 'does not sample from'} the trainer's "
            f"policy ({precision}, version {version}): their log-probs of the same "
            f"{len(difference)} tokens differ by {mean:.2g} on average and {largest:.2g} at most, "
            f"where rounding explains {tolerance.mean:g} and {tolerance.largest:g}; `trustbatch "
            "doctor` with the same configuration looks for the cause."
        )
    prefix = "canary/anchor_" if of_anchor else "canary/"
    return {f"{prefix}mean_abs_logratio": mean, f"{prefix}max_abs_logratio": largest}


def _tolerance(*precisions: str) -> Tolerance:
    """Return the tolerance of the coarsest precision involved; one that is unknown gets most."""
    found = [TOLERANCES.get(precision, WIDEST) for precision in precisions]
    return max(found, key=lambda tolerance: tolerance.mean)
