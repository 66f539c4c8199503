"""The environment's words as tokens that follow the policy's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from trustbatch.errors import ConfigError
from trustbatch.models.policy import Policy
from trustbatch.models.tokenization import encode_text

_POLICY, _REPLY = "POLICY-SPEAKS-HERE", "REPLY-STANDS-HERE"


@dataclass(frozen=True)
class ReplyEncoder:
    """Tokenizes replies, with what a chat template writes between two turns of the policy.

    The policy's own tokens stay as they were sampled, its stop token included; nothing that was
    sampled is ever tokenized again. Example: with the tokens of ChatML, the reply "higher" becomes
    those of "\\n<|im_start|>user\\nhigher<|im_end|>\\n<|im_start|>assistant\\n".
    """

    tokenizer: PreTrainedTokenizerBase
    before: str
    after: str

    @classmethod
    def of(cls, policy: Policy, chat: Mapping[str, Any]) -> "ReplyEncoder":
        """Find out what a template writes by rendering a conversation; a base model has none.

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
                f"The chat template of {policy.name} does not show what was said in earlier turns: "
                "set rollout.max_turns = 1, or use another template."
            )
        return cls(tokenizer, _after_stop(before, policy), after)

    def encode(self, reply: str, *, prompt_id: str) -> tuple[int, ...]:
        """Return the tokens between the policy's stop token and its next turn."""
        text = f"{self.before}{reply}{self.after}"
        return encode_text(self.tokenizer, text, prompt_id=prompt_id, add_special_tokens=False)


def _after_stop(text: str, policy: Policy) -> str:
    """Leave out the end of the policy's turn: it has sampled a stop token itself."""
    stops = policy.tokenizer.convert_ids_to_tokens(list(policy.stop_token_ids))
    ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
    return text[min(ends, default=0) :]
