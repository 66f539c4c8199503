"""Episodes: the environment answers, the policy goes on, until one of them has done.

All episodes take their next turn in one call of the engine. A turn's random numbers depend on
prompt, sample and turn, so an episode does not depend on which others are still running.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trustbatch.errors import ReplyError
from trustbatch.models.policy import Policy
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.replies import ReplyEncoder
from trustbatch.tasks.base import Environment
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    Role,
    RolloutGroup,
    SamplingParams,
    Turn,
)


def play(
    engine: RolloutEngine,
    policy: Policy,
    environment: Environment,
    groups: Sequence[RolloutGroup],
    *,
    sampling: SamplingParams,
    max_turns: int,
) -> list[RolloutGroup]:
    """Let the environment answer groups of first turns, and every episode go on to its end.

    `sampling.max_tokens` bounds a whole episode, the environment's tokens included.
    """
    episodes = [
        [Episode(group.prompt, group.prompt_token_ids, [first]) for first in group.completions]
        for group in groups
    ]
    encoders = _Encoders(policy)
    running = [episode for of_group in episodes for episode in of_group]
    for turn in range(1, max_turns + 1):
        # every rank asks for itself: a reply is a pure function of the conversation
        answers = [_ask(environment, episode) for episode in running]
        for episode, answer in zip(running, answers, strict=True):
            if answer is None:
                episode.finish_reason = episode.last_turn.finish_reason
            elif turn == max_turns:
                episode.finish_reason = FinishReason.TURNS
            else:
                reply = Reply(answer, encoders.encode(answer, episode.prompt))
                episode.answer(reply, max_tokens=sampling.max_tokens)
        running = [episode for episode in running if episode.finish_reason is None]
        if not running:
            break
        requests = [episode.next_request(sampling, turn) for episode in running]
        for episode, completion in zip(running, engine.generate(requests), strict=True):
            episode.parts.append(completion)
    return [
        replace(group, completions=tuple(episode.completion() for episode in of_group))
        for group, of_group in zip(groups, episodes, strict=True)
    ]


@dataclass(frozen=True)
class Reply:
    """What the environment said."""

    text: str
    token_ids: Tensor
    """[n] int64"""


class _Encoders:
    """One encoder for each way in which prompts use the chat template."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[str, ReplyEncoder] = {}

    def encode(self, answer: str, prompt: Prompt) -> Tensor:
        """Return the tokens [n] of a reply."""
        key = repr(sorted(prompt.chat.items()))
        if key not in self._known:
            self._known[key] = ReplyEncoder.of(self._policy, prompt.chat)
        token_ids = self._known[key].encode(answer, prompt_id=prompt.id)
        return torch.tensor(token_ids, dtype=torch.int64)


@dataclass
class Episode:
    """A conversation that goes on."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    parts: list[Completion | Reply]
    """a turn of the policy, a reply, a turn, and so on"""
    finish_reason: FinishReason | None = None
    """None while it goes on"""

    @property
    def last_turn(self) -> Completion:
        """What the policy said last, where that was not answered yet."""
        last = self.parts[-1]
        assert isinstance(last, Completion)
        return last

    @property
    def turns(self) -> tuple[Turn, ...]:
        """What was said so far."""
        return tuple(
            Turn(
                role=Role.POLICY if isinstance(part, Completion) else Role.ENVIRONMENT,
                text=part.text,
            )
            for part in self.parts
        )

    @property
    def token_ids(self) -> Tensor:
        """All tokens after the prompt."""
        return torch.cat([part.token_ids for part in self.parts])

    def answer(self, reply: Reply, *, max_tokens: int) -> None:
        """Add a reply, or end where it leaves the policy no room to go on."""
        if len(self.token_ids) + len(reply.token_ids) < max_tokens:
            self.parts.append(reply)
        else:
            self.finish_reason = FinishReason.LENGTH

    def next_request(self, sampling: SamplingParams, turn: int) -> GenerationRequest:
        """Ask the policy that spoke so far to go on, within what is left of the tokens."""
        first, token_ids = self.parts[0], self.token_ids.tolist()
        assert isinstance(first, Completion)
        return GenerationRequest(
            prompt_id=first.prompt_id,
            token_ids=(*self.prompt_token_ids, *token_ids),
            num_samples=1,
            first_sample=first.sample,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(token_ids)),
            turn=turn,
            policy=first.provenance.policy,
        )

    def completion(self) -> Completion:
        """Return the whole episode as one completion."""
        assert self.finish_reason is not None
        first = self.parts[0]
        assert isinstance(first, Completion)
        sampled = [
            torch.full((len(part.token_ids),), isinstance(part, Completion)) for part in self.parts
        ]
        return replace(
            self.last_turn,
            token_ids=self.token_ids,
            behavior_logp=self._recorded("behavior_logp"),
            top_token_ids=self._recorded("top_token_ids"),
            behavior_top_logp=self._recorded("behavior_top_logp"),
            anchor_logp=self._recorded("anchor_logp"),
            anchor_top_logp=self._recorded("anchor_top_logp"),
            finish_reason=self.finish_reason,
            provenance=first.provenance,
            versions=self._versions(),
            sampled=torch.cat(sampled) if len(sampled) > 1 else None,
            turns=self.turns,
        )

    def _versions(self) -> Tensor | None:
        """Return who sampled each token, where that was not the same version in all turns."""
        turns = [part for part in self.parts if isinstance(part, Completion)]
        if len({version for turn in turns for version in turn.all_versions}) == 1:
            return None
        parts = [
            part.version_of_token.int()
            if isinstance(part, Completion)
            else torch.zeros(len(part.token_ids), dtype=torch.int32)
            for part in self.parts
        ]
        return torch.cat(parts)

    def _recorded(self, name: str) -> Tensor | None:
        """Lay what was recorded of sampled tokens end to end; zeros, which nobody reads, between."""
        like = getattr(self.last_turn, name)
        if like is None:
            return None
        recorded = [
            getattr(part, name)
            if isinstance(part, Completion)
            else like.new_zeros(len(part.token_ids), *like.shape[1:])
            for part in self.parts
        ]
        return torch.cat(recorded)


def _ask(environment: Environment, episode: Episode) -> str | None:
    """Return the environment's answer to the policy's last turn; None ends the episode."""
    if episode.last_turn.finish_reason is FinishReason.LENGTH:
        return None
    prompt_id = episode.prompt.id
    try:
        reply = environment.reply(episode.prompt, episode.turns)
    except Exception as error:  # a user's code may raise anything; the cause stays attached
        raise ReplyError(
            f"The environment {environment.name} failed to answer on prompt {prompt_id!r} with "
            f"{type(error).__name__}: {error}; fix it, and the same command continues the run."
        ) from error
    if reply is not None and not isinstance(reply, str):
        raise ReplyError(
            f"The environment {environment.name} answered {reply!r} on prompt {prompt_id!r}: make "
            "`reply` return text, or None where the episode is over."
        )
    return reply
