"""Tools: functions that the policy may call, in the form that Hermes and Qwen models write.

A call is `<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>` in the policy's
turn. The result goes back as a message of the role "tool". A call that can't be read, or whose
function fails, is answered with what is wrong, so that the policy can try again.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from trustbatch.errors import did_you_mean, first_line

OPENING, CLOSING = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPENING}(.*?)({CLOSING}|\Z)", re.DOTALL)
MAX_CALLS = 16
"""that are answered in a turn"""
JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
EXAMPLE = '{"name": ..., "arguments": {...}}'

Tool = Callable[..., Any]
Message = dict[str, str]


class BadCall(ValueError):
    """A call that can't be done; the message is for the policy."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the policy wrote it; `error` says why it can't be read."""

    name: str = ""
    arguments: Mapping[str, Any] | None = None
    error: str = ""


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the schemas of functions for a prompt: `Prompt(chat={"tools": tool_schemas(...)})`.

    The description is the first line of the docstring. Arguments are text, numbers or booleans.
    """
    return [{"type": "function", "function": _schema(tool)} for tool in tools]


def parse_tool_calls(text: str) -> list[ToolCall]:
    """Return all calls of a turn, in order, also those that can't be read."""
    return [_parse(body, closing) for body, closing in CALL.findall(text)]


def answer_tool_calls(text: str, tools: Sequence[Tool]) -> list[Message] | None:
    """Return a message with the result of each call in a turn; None if there is no call.

    An environment's `reply` can return it as it is: None ends the episode.
    """
    calls = parse_tool_calls(text)
    if not calls:
        return None
    known = {tool.__name__: tool for tool in tools}
    return [{"role": "tool", "content": _answer(call, known)} for call in calls[:MAX_CALLS]]


def _answer(call: ToolCall, known: Mapping[str, Tool]) -> str:
    try:
        tool, arguments = _requested(call, known)
    except BadCall as error:
        return f"Error: {first_line(error)}"
    try:
        return str(tool(**arguments))
    except Exception as error:  # a tool may raise anything, and the policy hears of it
        return f"Error: {first_line(error)}"


def _requested(call: ToolCall, known: Mapping[str, Tool]) -> tuple[Tool, dict[str, Any]]:
    """Return the tool and the arguments of a call, or raise BadCall for what is wrong with it."""
    if call.error:
        raise BadCall(call.error)
    if call.name not in known:
        hint = did_you_mean(call.name, known)
        raise BadCall(f"there is no tool {call.name!r}{hint}; there is {', '.join(known)}")
    tool, arguments = known[call.name], dict(call.arguments or {})
    _check_arguments(tool, arguments)
    return tool, arguments


def _parse(body: str, closing: str) -> ToolCall:
    if not closing:
        return ToolCall(error=f"the call does not end with {CLOSING}")
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return ToolCall(error=f"the call is not JSON ({first_line(error)}): write {EXAMPLE}")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return ToolCall(error=f"the call has no name: write {EXAMPLE}")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return ToolCall(error=f"the arguments are not a JSON object: write {EXAMPLE}")
    return ToolCall(call["name"], arguments)


def _check_arguments(tool: Tool, arguments: Mapping[str, Any]) -> None:
    parameters = _schema(tool)["parameters"]
    for name in parameters["required"]:
        if name not in arguments:
            raise BadCall(f"{tool.__name__} needs the argument {name!r}")
    for name, value in arguments.items():
        if name not in parameters["properties"]:
            raise BadCall(f"{tool.__name__} has no argument {name!r}")
        wanted = parameters["properties"][name]["type"]
        if not _fits(value, wanted):
            raise BadCall(f"the argument {name!r} of {tool.__name__} must be of type {wanted}")


def _fits(value: Any, wanted: str) -> bool:
    if isinstance(value, bool):
        return wanted == "boolean"
    if wanted == "number":
        return isinstance(value, int | float)
    return any(isinstance(value, kind) for kind, name in JSON_TYPES.items() if name == wanted)


def _schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a function, in the form of transformers' chat templates."""
    hints = get_type_hints(tool)
    parameters = inspect.signature(tool).parameters
    for name in parameters:
        if hints.get(name) not in JSON_TYPES:
            raise TypeError(
                f"the tool {tool.__name__} has the argument {name!r} without a type that JSON "
                "has: annotate it with str, int, float or bool"
            )
    return {
        "name": tool.__name__,
        "description": (inspect.getdoc(tool) or tool.__name__).splitlines()[0],
        "parameters": {
            "type": "object",
            "properties": {name: {"type": JSON_TYPES[hints[name]]} for name in parameters},
            "required": [name for name, each in parameters.items() if each.default is each.empty],
        },
    }
