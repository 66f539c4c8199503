"""Conversations: rows whose problem is a list of messages with roles, as chat models read them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trustbatch.tasks.rows import BadRow
from trustbatch.types import Message

ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Conversation:
    """A conversation up to the message that the policy answers to."""

    text: str
    """the user's last message"""
    history: tuple[Message, ...] = ()
    """the messages before it, without the system message"""
    system: str = ""
    reply: str | None = None
    """what an assistant has answered to it, if the row has that"""

    @property
    def statement(self) -> str:
        """All that was said, by which equal rows are found."""
        return "\n".join([*(message["content"] for message in self.history), self.text])


def read_conversation(messages: Sequence[Any], column: str) -> Conversation:
    """Return what a list of messages holds; raises BadRow."""
    read = [_message(number, message, column) for number, message in enumerate(messages, start=1)]
    system = read.pop(0)["content"] if read and read[0]["role"] == "system" else ""
    for message in read:
        if message["role"] == "system":
            raise BadRow(f"has a system message in {column!r} that is not the first")
    reply = read.pop()["content"] if read and read[-1]["role"] == "assistant" else None
    if not read or read[-1]["role"] != "user":
        raise BadRow(
            f"has no message of the user in {column!r} to answer to",
            fix="end it with one, or with one and its answer",
        )
    return Conversation(read[-1]["content"], tuple(read[:-1]), system, reply)


def _message(number: int, message: Any, column: str) -> Message:
    where = f"message {number} of {column!r}"
    if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
        raise BadRow(f"has {where} without a role and content", fix="give both")
    role, content = message["role"], message["content"]
    if role not in ROLES:
        raise BadRow(f"has {where} with the role {role!r}", fix=f"use {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    if not isinstance(content, str):
        raise BadRow(f"has {where} whose content is no text", fix="give text")
    return {"role": role, "content": content}


def _text_part(part: Any, where: str) -> str:
    """Return a part of a message in OpenAI's form, which may also have images."""
    if not isinstance(part, Mapping) or part.get("type") != "text" or "text" not in part:
        raise BadRow(f"has {where} with a part that is no text", fix="give text alone")
    return str(part["text"])
