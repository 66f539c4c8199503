"""The canary for engines that take over a version while the trainer is already at a later one.

When it publishes a version, the trainer notes its log-probs of every token that may follow a few
fixed contexts. An engine that has loaded the version, whenever that is, samples one token after
each of them: the log-prob that it had must be the one that was noted. Where the run records an
anchor, so must the anchor's log-prob of a token sampled in the run's own way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trustbatch.batching.micro_batches import micro_batches
from trustbatch.models.policy import Policy
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.training.canary import anchored_requests, judge
from trustbatch.training.logprobs import response_logits
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Provenance,
    SamplingParams,
    TrainSequence,
)

NUM_SAMPLES = 4
"""tokens sampled after each context"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReference:
    """What the trainer's policy says of the contexts at one version."""

    version: int
    precision: str
    requests: list[GenerationRequest]
    anchored: list[GenerationRequest]
    """after the same contexts; none where no anchor is recorded"""
    logp: Tensor
    """[contexts, V] float32 in host memory"""

    def check(self, engine: RolloutEngine) -> dict[str, float]:
        """Return how far an engine of this version is off; raises CanaryError if it is too far."""
        completions = engine.generate([*self.requests, *self.anchored])
        num_plain = len(self.requests) * NUM_SAMPLES
        metrics = self._judge(self.requests, completions[:num_plain])
        if self.anchored:
            metrics |= self._judge(self.anchored, completions[num_plain:])
        return metrics

    def _judge(
        self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
    ) -> dict[str, float]:
        """Compare with what was noted, at the anchor's temperature where there is one."""
        temperature = requests[0].sampling.anchor_temperature or 1.0
        sampled = torch.tensor([int(c.token_ids[0]) for c in completions])
        contexts = torch.arange(len(requests)).repeat_interleave(NUM_SAMPLES)
        logp = (self.logp / temperature).log_softmax(-1)[contexts, sampled]
        # an engine that records no anchor has, to training, sampled from it
        recorded = [
            c.behavior_logp if c.anchor_logp is None else c.anchor_logp for c in completions
        ]
        engine_logp = torch.stack([each[0] for each in recorded]).cpu()
        return judge(
            (logp - engine_logp) * min(temperature, 1.0),
            completions[0].provenance,
            precision=self.precision,
            version=self.version,
            of_anchor=requests is self.anchored,
        )


class CanaryNotes:
    """Notes references of a policy, always after the same contexts."""

    def __init__(
        self,
        policy: Policy,
        prompts: Sequence[Prompt],
        *,
        logprob_mode: str,
        anchored: SamplingParams | None = None,
    ) -> None:
        """`anchored` is how the run samples, where it records an anchor."""
        self.policy = policy
        sampling = SamplingParams(
            max_tokens=1, stop_token_ids=policy.stop_token_ids, logprob_mode=logprob_mode
        )
        self.requests = [
            GenerationRequest(
                prompt_id=f"canary-{number}",
                token_ids=context,
                num_samples=NUM_SAMPLES,
                sampling=sampling,
            )
            for number, context in enumerate(_contexts(policy, prompts))
        ]
        self.anchored = anchored_requests(self.requests, anchored)

    def note(self, version: int) -> CanaryReference:
        """Return what the policy says at present; collective."""
        policy = self.policy
        sequences = [
            _ending_anyhow(request, policy, number) for number, request in enumerate(self.requests)
        ]
        (batch,) = micro_batches(
            sequences,
            max_tokens=len(sequences) * max(sequence.num_tokens for sequence in sequences),
            pad_token_id=policy.pad_token_id,
            packs=policy.packs,
            may_share_prompts=False,
        )
        with torch.no_grad():
            logits = policy.root(response_logits, policy, batch.to(policy.device))
        logp = torch.empty(logits.shape)
        logp[batch.advantage.long()] = logits.float().log_softmax(-1).cpu()
        return CanaryReference(
            version=version,
            precision=policy.precision,
            requests=self.requests,
            anchored=self.anchored,
            logp=logp,
        )


def _contexts(policy: Policy, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    """Return prompts, their first halves, and prompts with half of another after them.

    Where a chat template ends, almost any version is sure of the next token; elsewhere not.
    """
    encoded = [policy.encode(prompt) for prompt in prompts]
    found: list[tuple[int, ...]] = []
    for tokens, other in zip(encoded, [*encoded[1:], encoded[0]], strict=True):
        half = tokens[: max(len(tokens) // 2, 1)]
        found += [tokens, half, tokens + other[: max(len(other) // 2, 1)]]
    return [context[: policy.context_length - 1] for context in found]


def _ending_anyhow(request: GenerationRequest, policy: Policy, number: int) -> TrainSequence:
    """Return the context with some token behind it, whose logits are those of any other.

    A batch has an order of its own: the number travels in the place of the advantage.
    """
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
        advantage=float(number),
    )
