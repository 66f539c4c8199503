"""Replies as tokens: what a chat template writes between two turns of the policy.

The policy's tokens stay as they were sampled, including its stop token; they are never tokenized
again. Only the environment's part is rendered.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trustbatch.errors import ConfigError, first_line
from trustbatch.models.policy import Policy
from trustbatch.models.tokenization import encode_text
from trustbatch.tasks.base import Reply
from trustbatch.types import Prompt

_POLICY, _REPLY = "POLICY-TURN", "ENVIRONMENT-TURN-{}-"


@dataclass(frozen=True)
class ReplyEncoder:
    """Tokenizes replies whose messages have certain roles.

    Example: with the tokens of ChatML, the reply "higher" becomes those of
    "\\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n".
    """

    tokenizer: PreTrainedTokenizerBase
    between: tuple[str, ...]
    """what is written before, between and after the messages"""

    @classmethod
    def of(
        cls, policy: Policy, chat: Mapping[str, Any], roles: Sequence[str] = ("user",)
    ) -> "ReplyEncoder":
        """Render a conversation to find what the template writes; a base model has no template.

        `chat` holds the prompt's arguments of the template, such as enable_thinking or tools.
        """
        tokenizer = policy.tokenizer
        if not tokenizer.chat_template:
            return cls(tokenizer, ("",) * (len(roles) + 1))
        places = [_REPLY.format(number) for number in range(len(roles))]
        messages = [
            {"role": "user", "content": "."},
            {"role": "assistant", "content": _POLICY},
            *({"role": r, "content": place} for r, place in zip(roles, places, strict=True)),
        ]
        advice = "set rollout.max_turns = 1, or use another template"
        try:
            text = str(
                tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, tokenize=False, **chat
                )
            )
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"The chat template of {policy.name} refuses a reply with messages of "
                f"{_named(roles)} ({first_line(error)}): {advice}."
            ) from error
        _, policy_spoke, rest = text.partition(_POLICY)
        between: list[str] = []
        for place in places:
            before, replied, rest = rest.partition(place)
            between.append(before)
            if not policy_spoke or not replied:
                raise ConfigError(
                    f"The chat template of {policy.name} does not contain the text of earlier "
                    f"turns, with replies of {_named(roles)}: {advice}."
                )
        first, *others = between
        return cls(tokenizer, (_after_stop(first, policy), *others, rest))

    def encode(self, contents: Sequence[str], *, prompt_id: str) -> tuple[int, ...]:
        """Return the tokens between the policy's stop token and its next turn."""
        pairs = zip(self.between, (*contents, ""), strict=True)
        text = "".join(f"{before}{content}" for before, content in pairs)
        return encode_text(self.tokenizer, text, prompt_id=prompt_id, add_special_tokens=False)


class ReplyEncoders:
    """One encoder per set of the prompts' chat template arguments, and of the messages' roles."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[tuple[str, tuple[str, ...]], ReplyEncoder] = {}

    def encode(self, reply: Reply, prompt: Prompt) -> Tensor:
        """Return the tokens [n] of a reply."""
        roles, contents = zip(*roles_and_contents(reply), strict=True)
        key = repr(sorted(prompt.chat.items())), roles
        if key not in self._known:
            self._known[key] = ReplyEncoder.of(self._policy, prompt.chat, roles)
        token_ids = self._known[key].encode(contents, prompt_id=prompt.id)
        return torch.tensor(token_ids, dtype=torch.int64)


def roles_and_contents(reply: Reply) -> list[tuple[str, str]]:
    """Return the role and the text of each message; plain text is the user's."""
    if isinstance(reply, str):
        return [("user", reply)]
    return [(message["role"], message["content"]) for message in reply]


def text_of(reply: Reply) -> str:
    """Return a reply's text, its messages one below the other."""
    return "\n".join(content for _, content in roles_and_contents(reply))


def _named(roles: Sequence[str]) -> str:
    return " and ".join(f"the role {role!r}" for role in dict.fromkeys(roles))


def _after_stop(text: str, policy: Policy) -> str:
    """Remove the end of the policy's turn, since it has sampled a stop token itself."""
    stops = policy.tokenizer.convert_ids_to_tokens(list(policy.stop_token_ids))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[min(ends, default=0) :]
