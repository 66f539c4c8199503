"""Episodes: the environment and the policy take turns, until one of them ends.

All episodes sample their next turn in one call of the engine. A turn's random numbers depend on
prompt, sample and turn, so an episode does not depend on which others are still running.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trustbatch.errors import ConfigError, ReplyError
from trustbatch.models.policy import Policy
from trustbatch.models.tokenization import encode_text
from trustbatch.rollout.engine import RolloutEngine
from trustbatch.tasks.base import Environment
from trustbatch.tasks.rows import or_leave_out
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

_POLICY, _REPLY = "POLICY-TURN", "ENVIRONMENT-TURN"


def play(
    engine: RolloutEngine,
    policy: Policy,
    environment: Environment,
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
    encoders = _Encoders(policy)
    running = [episode for of_group in episodes for episode in of_group]
    for turn in range(1, max_turns + 1):
        # on every rank: a reply is a pure function of the conversation
        replies = [_reply_to(episode, environment) for episode in running]
        for episode, text in zip(running, replies, strict=True):
            if text is None:
                episode.finish_reason = episode.last_turn.finish_reason
            elif turn == max_turns:
                episode.finish_reason = FinishReason.TURNS
            else:
                reply = _encoded(text, episode.prompt, encoders, environment)
                episode.add_reply(reply, max_tokens=sampling.max_tokens)
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
class ReplyEncoder:
    """Tokenizes replies, with what a chat template writes between two turns of the policy.

    The policy's tokens stay as they were sampled, including its stop token; they are never
    tokenized again. Example: with the tokens of ChatML, the reply "higher" becomes
    those of "\\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n".
    """

    tokenizer: PreTrainedTokenizerBase
    before: str
    after: str

    @classmethod
    def of(cls, policy: Policy, chat: Mapping[str, Any]) -> "ReplyEncoder":
        """Render a conversation to find what the template writes; a base model has no template.

        `chat` holds the prompt's arguments of the template, such as enable_thinking.
        """
        tokenizer = policy.tokenizer
        if not tokenizer.chat_template:
            return cls(tokenizer, "", "")
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _POLICY},
            {"role": "user", "content": _REPLY},
        ]
        text = str(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **chat
            )
        )
        _, policy_spoke, rest = text.partition(_POLICY)
        before, replied, after = rest.partition(_REPLY)
        if not policy_spoke or not replied:
            raise ConfigError(
                f"The chat template of {policy.name} does not contain the text of earlier turns: "
                "set rollout.max_turns = 1, or use another template."
            )
        return cls(tokenizer, _after_stop(before, policy), after)

    def encode(self, reply: str, *, prompt_id: str) -> tuple[int, ...]:
        """Return the tokens between the policy's stop token and its next turn."""
        text = f"{self.before}{reply}{self.after}"
        return encode_text(self.tokenizer, text, prompt_id=prompt_id, add_special_tokens=False)


def _after_stop(text: str, policy: Policy) -> str:
    """Remove the end of the policy's turn, since it has sampled a stop token itself."""
    stops = policy.tokenizer.convert_ids_to_tokens(list(policy.stop_token_ids))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[min(ends, default=0) :]


@dataclass(frozen=True)
class Reply:
    """A turn of the environment."""

    text: str
    token_ids: Tensor
    """[n] int64"""


class _Encoders:
    """One encoder per set of the prompts' chat template arguments."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[str, ReplyEncoder] = {}

    def encode(self, reply: str, prompt: Prompt) -> Tensor:
        """Return the tokens [n] of a reply."""
        key = repr(sorted(prompt.chat.items()))
        if key not in self._known:
            self._known[key] = ReplyEncoder.of(self._policy, prompt.chat)
        token_ids = self._known[key].encode(reply, prompt_id=prompt.id)
        return torch.tensor(token_ids, dtype=torch.int64)


def _encoded(text: str, prompt: Prompt, encoders: _Encoders, environment: Environment) -> Reply:
    try:
        return Reply(text, encoders.encode(text, prompt))
    except ConfigError as error:
        raise ReplyError(
            f"The environment {environment.name} replied {text[:80]!a} on prompt {prompt.id!r}, "
            "which the model's tokenizer can't encode: make it reply in characters that have "
            f"tokens{or_leave_out(environment, prompt)}."
        ) from error


@dataclass
class Episode:
    """A conversation that is being sampled."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    parts: list[Completion | Reply]
    """a turn of the policy, a reply, a turn, and so on"""
    finish_reason: FinishReason | None = None
    """None while it is running"""

    @property
    def last_turn(self) -> Completion:
        """The policy's last turn, if there is no reply to it yet."""
        last = self.parts[-1]
        assert isinstance(last, Completion)
        return last

    @property
    def turns(self) -> tuple[Turn, ...]:
        """All turns so far."""
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

    def add_reply(self, reply: Reply, *, max_tokens: int) -> None:
        """Add a reply, or end the episode if it leaves no tokens for the policy."""
        if len(self.token_ids) + len(reply.token_ids) < max_tokens:
            self.parts.append(reply)
        else:
            self.finish_reason = FinishReason.LENGTH

    def next_request(self, sampling: SamplingParams, turn: int) -> GenerationRequest:
        """Return the request for the same policy's next turn, with the remaining tokens."""
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


def _reply_to(episode: Episode, environment: Environment) -> str | None:
    """Return the environment's reply to the policy's last turn; None ends the episode."""
    if episode.last_turn.finish_reason is FinishReason.LENGTH:
        return None
    prompt = episode.prompt
    try:
        reply = environment.reply(prompt, episode.turns)
    except Exception as error:  # a user's code may raise anything; the cause stays attached
        raise ReplyError(
            f"The environment {environment.name} failed to reply on prompt {prompt.id!r} with "
            f"{type(error).__name__}: {error}; fix it{or_leave_out(environment, prompt)}, and the "
            "same command continues the run."
        ) from error
    if reply is not None and not isinstance(reply, str):
        raise ReplyError(
            f"The environment {environment.name} replied {reply!r} on prompt {prompt.id!r}: make "
            f"`reply` return text, or None to end the episode{or_leave_out(environment, prompt)}."
        )
    return reply
