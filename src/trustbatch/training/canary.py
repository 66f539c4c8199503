"""The canary: after a weight update, does the engine still sample from the trainer's policy?

The engine samples a few tokens after fixed prompts, and its log-probs are compared with those of
the trainer's own forward pass. Where the run records an anchor, the engine also samples with the
run's own settings, and the anchor's log-probs are compared. Random numbers depend on the prompt id,
and the canary has ids of its own, so it does not change the completions of the run.

`Canary` compares while the engine waits: it recomputes short completions. `CanaryRecorder` serves
engines that load a version when the trainer may already be at a later one: the trainer records its
log-probs of all tokens that may follow each context, and an engine is checked against this
`CanaryReference` whenever it has loaded the version.

Both also compare how engine and trainer have changed since an earlier check (`arrival`): an update
that never arrived is noticed long before rounding stops explaining the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import MicroBatch, micro_batches
from trustbatch.errors import CanaryError
from trustbatch.models.policy import Policy
from trustbatch.rollout.collect import encode_checked
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.training.arrival import ArrivalWatch, ContextSample, weight_rows
from trustbatch.training.logprobs import response_logits, token_logprobs
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Provenance,
    SamplingParams,
    TrainSequence,
)

NUM_PROMPTS = 4
NUM_SAMPLES = 2
"""completions per prompt, for `Canary`"""
MAX_TOKENS = 8
"""tokens per completion, for `Canary`"""
TOKENS_PER_CONTEXT = 8
"""tokens sampled after each context: enough for some to be sampled again at the next check"""


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of log-probs that rounding alone may cause."""

    mean: float
    largest: float


# Worst of 60 canaries on three small models: float32 1e-6 on average and 6e-6 at most, bfloat16
# 0.034 and 0.71, fp8 0.28 and 1.6; a model of another seed has 0.3 to 2.9 on average.
# The bounds leave room for other kernels and for rare tokens: a healthy run must never be stopped.
# An update that an engine fails to load may be far smaller: `arrival` finds it.
TOLERANCES = {
    "float32": Tolerance(mean=1e-3, largest=1e-2),
    "bfloat16": Tolerance(mean=0.15, largest=3.0),
    "fp8": Tolerance(mean=0.8, largest=8.0),
}
WIDEST = TOLERANCES["fp8"]


class Canary:
    """Compares engine and trainer on the same few prompts after every n-th weight update."""

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
        """Check every `every` updates (0: never); `anchored` is for runs that record an anchor."""
        self.engine = engine
        self.policy = policy
        self.every = every
        sampling = SamplingParams(
            max_tokens=min(max_tokens, MAX_TOKENS),
            stop_token_ids=policy.stop_token_ids,
            logprob_mode=logprob_mode,  # at T = 1 without truncation, both modes are the same
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
        self.anchored = _anchored_requests(self.requests, anchored)
        # no longer than the requests above, which fit into any engine that can serve the run
        longest = max(len(request.token_ids) for request in self.requests) + sampling.max_tokens
        self.contexts = CanaryRecorder(
            policy, prompts, logprob_mode=logprob_mode, max_length=longest
        )
        self.watch = ArrivalWatch()

    def at_start(self, version: int) -> None:
        """Check before the first rollout, unless the canary is switched off."""
        if self.every:
            self.check(version)

    def after_update(self, version: int) -> dict[str, float]:
        """Check every `every` updates; returns the metrics, or none without a check."""
        return self.check(version) if self.every and version % self.every == 0 else {}

    def check(self, version: int) -> dict[str, float]:
        """Return the differences of log-probs; raises CanaryError beyond the tolerance."""
        completions = self.engine.generate(
            [*self.requests, *self.anchored, *self.contexts.requests]
        )
        num_plain = len(self.requests) * NUM_SAMPLES
        num_judged = num_plain + len(self.anchored) * NUM_SAMPLES
        parts = [(self.requests, completions[:num_plain])]
        if self.anchored:
            parts.append((self.anchored, completions[num_plain:num_judged]))
        metrics: dict[str, float] = {}
        for requests, answers in parts:
            metrics |= _judge(
                self._difference(requests, answers),
                answers[0].provenance,
                precision=self.policy.precision,
                version=version,
                of_anchor=requests is self.anchored,
            )
        sampled = self.contexts.record(version).sample(completions[num_judged:])
        self.watch.check(sampled, completions[0].provenance)
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
        temperature = requests[0].sampling.anchor_temperature or 1.0
        differences = []
        for batch in _batches(self.policy, sequences):
            with torch.no_grad():
                logp = token_logprobs(self.policy, batch, temperature=temperature).logp
            # training takes the sampling distribution as the anchor where none is recorded
            recorded = batch.behavior_logp if batch.anchor_logp is None else batch.anchor_logp
            differences.append(logp - recorded)
        # a temperature below 1 magnifies rounding
        return torch.cat(differences) * min(temperature, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReference:
    """The trainer's log-probs after the canary's contexts, at one version."""

    version: int
    precision: str
    requests: list[GenerationRequest]
    anchored: list[GenerationRequest]
    """for the same contexts; empty where no anchor is recorded"""
    logp: Tensor
    """[contexts, V] float32 in host memory"""
    weights: list[Tensor]
    """some rows of the trainer's weights"""

    def check(self, engine: RolloutEngine, watch: ArrivalWatch | None = None) -> dict[str, float]:
        """Compare with an engine at this version; returns the metrics, raises CanaryError.

        `watch` remembers earlier checks of the same engine.
        """
        completions = engine.generate([*self.requests, *self.anchored])
        num_plain = len(self.requests) * TOKENS_PER_CONTEXT
        metrics = self._compare(self.requests, completions[:num_plain])
        if self.anchored:
            metrics |= self._compare(self.anchored, completions[num_plain:])
        if watch is not None:
            watch.check(self.sample(completions[:num_plain]), completions[0].provenance)
        return metrics

    def sample(self, completions: Sequence[Completion]) -> ContextSample:
        """Return what an engine sampled for `requests`, beside the trainer's log-probs."""
        contexts = [n for n in range(len(self.requests)) for _ in range(TOKENS_PER_CONTEXT)]
        logp: dict[tuple[int, int], tuple[float, float]] = {}
        for context, completion in zip(contexts, completions, strict=True):
            token = int(completion.token_ids[0])
            own = float(self.logp[context, token])
            logp[context, token] = own, float(completion.behavior_logp[0])
        return ContextSample(self.version, logp, self.weights)

    def _compare(
        self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
    ) -> dict[str, float]:
        """Compare with the recorded log-probs, at the anchor's temperature where there is one."""
        temperature = requests[0].sampling.anchor_temperature or 1.0
        tokens = torch.tensor([int(c.token_ids[0]) for c in completions])
        contexts = torch.arange(len(requests)).repeat_interleave(TOKENS_PER_CONTEXT)
        logp = (self.logp / temperature).log_softmax(-1)[contexts, tokens]
        # training takes the sampling distribution as the anchor where none is recorded
        recorded = [
            c.behavior_logp if c.anchor_logp is None else c.anchor_logp for c in completions
        ]
        engine_logp = torch.stack([each[0] for each in recorded]).cpu()
        return _judge(
            (logp - engine_logp) * min(temperature, 1.0),
            completions[0].provenance,
            precision=self.precision,
            version=self.version,
            of_anchor=requests is self.anchored,
        )


class CanaryRecorder:
    """Records references of a policy, always for the same contexts."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        *,
        logprob_mode: str,
        anchored: SamplingParams | None = None,
        max_length: int | None = None,
    ) -> None:
        """`anchored` is the run's sampling if it records an anchor.

        `max_length` bounds a context with the token that follows it; default: the model's context.
        """
        self.policy = policy
        sampling = SamplingParams(
            max_tokens=1, stop_token_ids=policy.stop_token_ids, logprob_mode=logprob_mode
        )
        self.requests = [
            GenerationRequest(
                prompt_id=f"canary-context-{number}",
                token_ids=context,
                num_samples=TOKENS_PER_CONTEXT,
                sampling=sampling,
            )
            for number, context in enumerate(
                _contexts(policy, prompts, max_length or policy.context_length)
            )
        ]
        self.anchored = _anchored_requests(self.requests, anchored)

    def record(self, version: int) -> CanaryReference:
        """Return the reference of the current policy; collective."""
        policy = self.policy
        rows, order = [], []
        for batch in _batches(policy, [_one_token(request, policy) for request in self.requests]):
            with torch.no_grad():
                logits = policy.root(response_logits, policy, batch)
            rows.append(logits.float().log_softmax(-1).cpu())
            order.append(batch.order.cpu())
        logp = torch.cat(rows)[torch.cat(order).argsort()]
        return CanaryReference(
            version=version,
            precision=policy.precision,
            requests=self.requests,
            anchored=self.anchored,
            logp=logp,
            weights=weight_rows(policy),
        )


def _anchored_requests(
    plain: Sequence[GenerationRequest], anchored: SamplingParams | None
) -> list[GenerationRequest]:
    """Return requests for the same contexts with the run's own sampling; none without an anchor."""
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


def _batches(policy: Policy, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
    """Return all sequences on the policy's device: one batch, or several where rows are padded."""
    batches = micro_batches(
        sequences,
        max_tokens=len(sequences) * max(sequence.num_tokens for sequence in sequences),
        pad_token_id=policy.pad_token_id,
        packs=policy.packs,
    )
    return [batch.to(policy.device) for batch in batches]


def _contexts(policy: Policy, prompts: Sequence[Prompt], max_length: int) -> list[tuple[int, ...]]:
    """Return prompts, their first halves, and prompts followed by half of another prompt.

    After a chat template, almost any version is certain of the next token; elsewhere it is not.
    """
    encoded = [policy.encode(prompt) for prompt in prompts]
    found: list[tuple[int, ...]] = []
    for tokens, other in zip(encoded, [*encoded[1:], encoded[0]], strict=True):
        half = tokens[: max(len(tokens) // 2, 1)]
        found += [tokens, half, tokens + other[: max(len(other) // 2, 1)]]
    return [context[: max_length - 1] for context in found]


def _one_token(request: GenerationRequest, policy: Policy) -> TrainSequence:
    """Return the context followed by an arbitrary token; the logits do not depend on it."""
    token = torch.tensor([policy.stop_token_ids[0]])
    return TrainSequence(
        prompt_token_ids=request.token_ids,
        completion=Completion(
            prompt_id=request.prompt_id,
            sample=0,
            token_ids=token,
            behavior_logp=torch.zeros(1),
            top_token_ids=None,
            behavior_top_logp=None,
            finish_reason=FinishReason.LENGTH,
            provenance=Provenance(
                policy=policy.name,
                version=0,
                engine="none",
                precision=policy.precision,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                logprob_mode="processed",
            ),
            text="",
        ),
        advantage=0.0,
    )


def _judge(
    difference: Tensor,
    sampled_by: Provenance,
    *,
    precision: str,
    version: int,
    of_anchor: bool = False,
) -> dict[str, float]:
    """Return metrics of the differences [T], trainer minus engine, of the log-probs of T tokens.

    Raises CanaryError where they exceed what rounding explains. `precision` and `version` are the
    trainer's; `of_anchor` says that the log-probs are those of the anchor.
    """
    difference = difference.abs()
    mean, largest = float(difference.mean()), float(difference.max())
    kv_precision = sampled_by.kv_precision
    of_cache = [] if kv_precision == "auto" else [kv_precision]
    tolerance = _tolerance(sampled_by.precision, *of_cache, precision)
    within = mean <= tolerance.mean and largest <= tolerance.largest  # False for NaN
    if sampled_by.version != version or not within:
        problem = "has another anchor than" if of_anchor else "does not sample from"
        raise CanaryError(
            f"The engine ({sampled_by.engine}, {sampled_by.precision}, version "
            f"{sampled_by.version}) {problem} the trainer's "
            f"policy ({precision}, version {version}): their log-probs of the same "
            f"{len(difference)} tokens differ by {mean:.2g} on average and {largest:.2g} at most, "
            f"where rounding explains {tolerance.mean:g} and {tolerance.largest:g}; `trustbatch "
            "doctor` with the same configuration searches for the cause."
        )
    prefix = "canary/anchor_" if of_anchor else "canary/"
    return {f"{prefix}mean_abs_logratio": mean, f"{prefix}max_abs_logratio": largest}


def _tolerance(*precisions: str) -> Tolerance:
    """Return the tolerance of the coarsest precision; an unknown one gets the widest."""
    found = [TOLERANCES.get(precision, WIDEST) for precision in precisions]
    return max(found, key=lambda tolerance: tolerance.mean)
