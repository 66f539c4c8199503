"""Episodes: the environment and the policy take turns, until one of them ends.

All episodes sample their next turn in one call of the engine. A turn's random numbers depend on
prompt, sample and turn, so an episode does not depend on which others are still running.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from trustbatch.errors import ReplyError, TokenizerError
from trustbatch.models.policy import Policy
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.rollout.reply_tokens import ReplyEncoders, text_of
from trustbatch.tasks.base import EpisodeKey, Reply, Spoken, Step, Task, is_reply, is_stateful
from trustbatch.tasks.rows import or_leave_out
from trustbatch.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Grade,
    Prompt,
    Role,
    RolloutGroup,
    SamplingParams,
    Turn,
)
from trustbatch.utils.distributed import on_rank_zero, this_rank


def play(
    engine: RolloutEngine,
    policy: Policy,
    environment: Task,
    groups: Sequence[RolloutGroup],
    *,
    sampling: SamplingParams,
    max_turns: int,
) -> list[RolloutGroup]:
    """Continue groups of first turns, with replies of the environment, until every episode ends.

    `sampling.max_tokens` limits a whole episode, including the environment's tokens.
    """
    episodes = [
        [Episode(group.prompt, group.prompt_token_ids, [first]) for first in group.completions]
        for group in groups
    ]
    encoders = ReplyEncoders(policy)
    waiting = deque(episode for of_group in episodes for episode in of_group)
    limit = environment.max_sessions if is_stateful(environment) else len(waiting)
    running: list[Episode] = []
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                running.append(waiting.popleft())
            for episode, step in zip(running, _steps(running, environment), strict=True):
                _take(episode, step, encoders, environment, sampling, max_turns)
            _end_sessions(environment, [each for each in running if not each.is_running])
            running = [episode for episode in running if episode.is_running]
            requests = [episode.next_request(sampling) for episode in running]
            completions = engine.generate(requests) if requests else []
            for episode, completion in zip(running, completions, strict=True):
                episode.parts.append(completion)
    finally:
        _end_sessions(environment, running)
    return [
        replace(group, completions=tuple(episode.completion() for episode in of_group))
        for group, of_group in zip(groups, episodes, strict=True)
    ]


def _take(
    episode: "Episode",
    step: Step,
    encoders: ReplyEncoders,
    environment: Task,
    sampling: SamplingParams,
    max_turns: int,
) -> None:
    """Add what the environment made of the policy's last turn, or end the episode."""
    episode.rewards.append(step.reward)
    episode.failure = step.failure
    if step.reply is None:
        ended = FinishReason.TURNS if step.truncated else episode.last_turn.finish_reason
        episode.finish_reason = ended
    elif episode.num_turns == max_turns:
        episode.finish_reason = FinishReason.TURNS
    else:
        reply = _encoded(step.reply, episode.prompt, encoders, environment)
        episode.add_reply(reply, max_tokens=sampling.max_tokens)


@dataclass(frozen=True)
class EncodedReply:
    """A turn of the environment."""

    text: str
    token_ids: Tensor
    """[n] int64"""


def _encoded(
    reply: Reply, prompt: Prompt, encoders: ReplyEncoders, environment: Task
) -> EncodedReply:
    try:
        return EncodedReply(text_of(reply), encoders.encode(reply, prompt))
    except TokenizerError as error:
        raise ReplyError(
            f"The environment {environment.name} replied {text_of(reply)[:80]!a} on prompt "
            f"{prompt.id!r}, which the model's tokenizer can't encode: make it reply in characters "
            f"that have tokens{or_leave_out(environment, prompt)}."
        ) from error


@dataclass
class Episode:
    """A conversation that is being sampled."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    parts: list[Completion | EncodedReply]
    """a turn of the policy, a reply, a turn, and so on"""
    rewards: list[float | None] = field(default_factory=list)
    """of the policy's turns, where the environment gives them"""
    failure: Grade | None = None
    finish_reason: FinishReason | None = None
    """None while it is running"""

    @property
    def is_running(self) -> bool:
        """Whether the policy has another turn."""
        return self.finish_reason is None

    @property
    def key(self) -> EpisodeKey:
        """The id of the prompt, and the number of the sample."""
        first = self.parts[0]
        assert isinstance(first, Completion)
        return first.key

    @property
    def num_turns(self) -> int:
        """The policy's turns so far."""
        return sum(isinstance(part, Completion) for part in self.parts)

    @property
    def last_turn(self) -> Completion:
        """The policy's last turn, if there is no reply to it yet."""
        last = self.parts[-1]
        assert isinstance(last, Completion)
        return last

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far."""
        rewards = iter(self.rewards)
        return tuple(
            Turn(role=Role.POLICY, text=part.text, reward=next(rewards, None))
            if isinstance(part, Completion)
            else Turn(role=Role.ENVIRONMENT, text=part.text)
            for part in self.parts
        )

    @property
    def token_ids(self) -> Tensor:
        """All tokens after the prompt."""
        return torch.cat([part.token_ids for part in self.parts])

    def add_reply(self, reply: EncodedReply, *, max_tokens: int) -> None:
        """Add a reply, or end the episode if it leaves no tokens for the policy."""
        if len(self.token_ids) + len(reply.token_ids) < max_tokens:
            self.parts.append(reply)
        else:
            self.finish_reason = FinishReason.LENGTH

    def next_request(self, sampling: SamplingParams) -> GenerationRequest:
        """Return the request for the same policy's next turn, with the remaining tokens."""
        first, token_ids = self.parts[0], self.token_ids.tolist()
        assert isinstance(first, Completion)
        return GenerationRequest(
            prompt_id=first.prompt_id,
            token_ids=(*self.prompt_token_ids, *token_ids),
            num_samples=1,
            first_sample=first.sample,
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(token_ids)),
            turn=self.num_turns,
            policy=first.provenance.policy,
        )

    def completion(self) -> Completion:
        """Return the whole episode as one completion."""
        assert self.finish_reason is not None
        first = self.parts[0]
        assert isinstance(first, Completion)
        is_sampled = [
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
            sampled=torch.cat(is_sampled) if len(is_sampled) > 1 else None,
            turns=self.turns,
            failure=self.failure,
        )

    def _versions(self) -> Tensor | None:
        """Return the version of each token, if not all turns have the same one."""
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
        """Concatenate a recorded tensor of all turns, with zeros (not used) for replies."""
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


def _steps(episodes: Sequence[Episode], environment: Task) -> list[Step]:
    """Return what the environment makes of the last turns; a turn that was cut ends its episode."""
    spoken = {
        number: Spoken(key=episode.key, prompt=episode.prompt, turns=episode.turns)
        for number, episode in enumerate(episodes)
        if episode.last_turn.finish_reason is not FinishReason.LENGTH
    }
    if is_stateful(environment):
        found = on_rank_zero(lambda: environment.step_sessions(list(spoken.values())))
    else:  # on every rank: a reply is a pure function of the conversation
        found = [_reply_to(each, environment) for each in spoken.values()]
    steps = dict(zip(spoken, found, strict=True))
    return [steps.get(number, Step()) for number in range(len(episodes))]


def _end_sessions(environment: Task, episodes: Sequence[Episode]) -> None:
    # not collective: after an error, other ranks may be elsewhere
    if is_stateful(environment) and episodes and this_rank() == 0:
        environment.end_sessions([episode.key for episode in episodes])


def _reply_to(spoken: Spoken, environment: Any) -> Step:
    """Return the environment's reply to the policy's last turn; None ends the episode."""
    prompt = spoken.prompt
    try:
        reply = environment.reply(prompt, spoken.turns)
    except Exception as error:  # a user's code may raise anything; the cause stays attached
        raise ReplyError(
            f"The environment {environment.name} failed to reply on prompt {prompt.id!r} with "
            f"{type(error).__name__}: {error}; fix it{or_leave_out(environment, prompt)}, and the "
            "same command continues the run."
        ) from error
    if reply is not None and not is_reply(reply):
        raise ReplyError(
            f"The environment {environment.name} replied {reply!r} on prompt {prompt.id!r}: make "
            "`reply` return text, chat messages, or None to end the episode"
            f"{or_leave_out(environment, prompt)}."
        )
    return Step(reply=reply)
