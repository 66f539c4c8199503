"""Tools: schemas, calls and their answers."""

import pytest

from trustbatch.tasks.tools import ToolCall, answer_tool_calls, parse_tool_calls, tool_schemas


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    The rest is for programmers.
    """
    return a + b


def divide(a: float, by: float) -> float:
    """Divide."""
    return a / by


def shout(text: str, loud: bool = True) -> str:
    return text.upper() if loud else text


TOOLS = [add, divide, shout]


def call(body: str) -> str:
    return f"I ask.<tool_call>{body}</tool_call>"


def answer(body: str) -> str:
    (message,) = answer_tool_calls(call(body), TOOLS) or []
    assert message["role"] == "tool"
    return message["content"]


def test_schemas_have_the_form_that_chat_templates_expect() -> None:
    schema, *_ = tool_schemas(TOOLS)
    assert schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }


def test_an_argument_without_a_type_is_refused() -> None:
    def guess(what):
        return what

    with pytest.raises(TypeError, match="annotate it with str, int, float or bool"):
        tool_schemas([guess])


def test_calls_are_read_in_their_order() -> None:
    text = call('{"name": "add", "arguments": {"a": 1}}') + call('\n{"name": "shout"}\n') + "Done."
    assert parse_tool_calls(text) == [ToolCall("add", {"a": 1}), ToolCall("shout", {})]
    assert parse_tool_calls("no call") == []


def test_the_answers_are_tool_messages() -> None:
    text = "".join(call(f'{{"name": "add", "arguments": {{"a": {a}}}}}') for a in (1, 5))
    assert answer_tool_calls(text, TOOLS) == [
        {"role": "tool", "content": "2"},
        {"role": "tool", "content": "6"},
    ]
    assert answer_tool_calls("The answer is 2.", TOOLS) is None


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("add(1, 2)", "Error: the call is not JSON"),
        ('{"name": "add", "arguments": {"a": 1}', "Error: the call is not JSON"),
        ("[" * 100_000, "Error: the call is not JSON"),
        ('["add"]', "Error: the call has no name"),
        ('{"name": 3}', "Error: the call has no name"),
        ('{"name": "add", "arguments": [1]}', "Error: the arguments are not a JSON object"),
        ('{"name": "ad"}', "Error: there is no tool 'ad' (did you mean 'add'?); there is add"),
        ('{"name": "add", "arguments": {}}', "Error: add needs the argument 'a'"),
        ('{"name": "add", "arguments": {"a": 1, "c": 2}}', "Error: add has no argument 'c'"),
        ('{"name": "add", "arguments": {"a": "1"}}', "Error: the argument 'a' of add must be of"),
        ('{"name": "add", "arguments": {"a": true}}', "Error: the argument 'a' of add must be of"),
        ('{"name": "divide", "arguments": {"a": 1, "by": 0}}', "Error: division by zero"),
    ],
)
def test_a_bad_call_is_answered_with_what_is_wrong(body: str, sentence: str) -> None:
    assert answer(body).startswith(sentence)


def test_a_call_that_does_not_end_is_answered() -> None:
    (message,) = answer_tool_calls('<tool_call>{"name": "add"', TOOLS) or []
    assert message["content"] == "Error: the call does not end with </tool_call>"


def test_types_of_arguments() -> None:
    assert answer('{"name": "divide", "arguments": {"a": 3, "by": 2.0}}') == "1.5"
    assert answer('{"name": "shout", "arguments": {"text": "a", "loud": false}}') == "a"
