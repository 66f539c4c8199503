r"""Finding the final answer in a completion.

The rules, in this order:

1. If the text contains `</think>`, only the text after the last one counts. If it contains only
   `<think>`, or the prompt has already opened it, thinking never ended and there is no answer.
2. The content of the last \boxed{...} is the answer, whatever earlier boxes contain. If the last
   box is never closed, or stands right after "not" or a sign that says so, there is no answer.
3. Without a box, and unless `require_boxed`: the last formula between dollars (or \( \), \[ \]), or
   the last number after it if the reference is a number; but neither if its surroundings make it
   part of something larger, such as 3 1/2, 10^{-3} or 7 or 8. Otherwise all that follows the
   last "The answer is" if it is one line, else the whole text.
"""

import re

from trustbatch.math_grading.normalize import with_ascii_signs

_NUMBER = re.compile(r"(?:(?<![\w)\]}-])-)?\d+(?:,\d+)*(?:\.\d+|\.(?=/\d))?(?:/\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NEGATED = re.compile(
    r"(?:(?:\bnot|n't|\bcannot|\bnever)(?:\s+(?:be|equal|equal to))?"
    r"|≠|!=|/=|<>|\\(?:ne|neq|neg|lnot)|\\not\s*(?:=|\\[a-z]+)?|\\n[a-z]*(?:eq|sim|cong))$",
    re.IGNORECASE,
)
_SPACERS = (
    " ", "\n", "\t", "\r", "$", "*", ":", "{", "}", "~", r"\,", r"\;", r"\:", r"\!", r"\(", r"\[",
    r"\quad", r"\qquad", r"\displaystyle", r"\left", r"\boxed", r"\fbox", r"\text",
)  # fmt: skip
"""what may stand between a sign and the box that it belongs to"""
_PHRASE = re.compile(
    r"(?:^|[\n.!?:])[ \t]*(?:(?:so|thus|hence|therefore),?[ \t]+)?"
    r"(?:the[ \t]+)?(?:final[ \t]+)?answer(?:[ \t]+is\b|(?=[ \t]*:)):?",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?<!\\)\$\$(.+?)\$\$|(?<!\\)\$([^$]+)(?<!\\)\$(?!\d)|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL
)
_TAIL = 4000
"""characters at the end of a text without a box that are searched for an answer"""
_BESIDE = 40
"""characters on each side of a number that are checked for making it part of something larger"""
_PART_BEFORE = re.compile(
    r"[\w^{}\\/.([]$|\d\*\*$|\d:$"
    r"|(?:[-+/|~≈<>^_\\{}]|(?<!\*)\*|[!<>]=|\d[ \t]+:|\d[ \t]*[,;]|[\d$][ \t])[ \t]*$"
    r"|\\[a-zA-Z]+[ \t]*$"
    r"|(?:\b(?:or|and|not|nor|than|minus|plus|times|over|between|from|to|by|negative|except|mod|"
    r"base|sqrt|log|ln|sin|cos|tan|(?:root|power|factorial) of)|n't)[ \t]+$",
    re.IGNORECASE,
)
_PART_AFTER = re.compile(
    r"[ \t]*(?:\^(?!\{?\\circ)|[_{}/+\-!|<>=%&]|\*(?!\*)|\\(?![)\]]))|[(\[]|[.,:]\d"
    r"|(?!(?:mm|cm|km|kg|mg|ml|ft|yd|mi|mph|lbs?)\b)\w"
    r"|[ \t]*[,;:][ \t]*(?:\d|(?:or|and)\b)"
    r"|[ \t]+(?:(?![aI]\b)[a-z]\b|\d|\(?mod\b"
    r"|(?:or|and|nor|plus|minus|times|over|to|percent|squared|cubed|factorial|hundreds?|thousands?|"
    r"[a-z]*illions?|lakh|crore|dozens?|googols?|myriads?|pi|sqrt|divided|multiplied|halves|thirds|"
    r"quarters|\w+(?<!mon)(?<!leng)(?<!wid)(?<!dep)ths)\b)",
    re.IGNORECASE,
)


def final_answer(
    completion: str,
    *,
    require_boxed: bool = False,
    is_number: bool = False,
    thinking: bool = False,
) -> str | None:
    """Return the final answer by the rules above, or None if there is none.

    `is_number`: the reference is a number. `thinking`: the prompt has opened <think>.
    """
    text = after_thinking(completion, thinking=thinking)
    if text is None:
        return None
    boxed = last_box(text)
    if boxed is not None:
        start, end = boxed
        return None if end is None or _is_negated(text, start) else text[start:end]
    if require_boxed:
        return None
    # the tail may start within a number: the backslash keeps that number from standing alone
    tail = text if len(text) <= _TAIL else "\\" + text[-_TAIL:]
    return _unboxed(with_ascii_signs(tail), is_number=is_number) or _after_phrase(text)


def _is_negated(text: str, position: int) -> bool:
    """Whether a sign such as not or \\neq stands before a position, apart from spaces."""
    while spacer := next((each for each in _SPACERS if text.endswith(each, 0, position)), None):
        position -= len(spacer)
    return _NEGATED.search(text[max(position - _BESIDE, 0) : position]) is not None


def after_thinking(completion: str, *, thinking: bool = False) -> str | None:
    """Return the text after </think>, or None if thinking never ended."""
    _, ended, after = completion.rpartition("</think>")
    if ended:
        return after
    return None if thinking or "<think>" in completion else completion


def _after_phrase(text: str) -> str:
    """Return all that follows the last "The answer is" if it is one line, otherwise the text."""
    tail = text if len(text) <= _TAIL else "\\" + text[-_TAIL:]
    last = None
    for match in _PHRASE.finditer(tail):
        last = match
    after = "" if last is None else tail[last.end() :].strip()
    return after if after and "\n" not in after else text


def _unboxed(text: str, *, is_number: bool) -> str | None:
    """Return the last formula or number that stands alone, or None if the last one does not."""
    last, content = None, ""
    for match in _FORMULA.finditer(text):
        inner = next(filter(None, match.groups()))
        if not is_number or re.search(r"\d", inner):
            last, content = match, inner
    if is_number:
        for match in _NUMBER.finditer(text, last.end() if last else 0):
            last, content = match, match.group()
    if last is None or not _stands_alone(text, *last.span()):
        return None
    return content


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Whether text[start:end] is not part of a larger expression."""
    if text[start - 1 : start] + text[end : end + 1] in ("()", "[]"):
        start, end = start - 1, end + 1
    before, after = text[max(start - _BESIDE, 0) : start], text[end : end + _BESIDE]
    return not _PART_BEFORE.search(before) and not _PART_AFTER.match(after)


def last_box(text: str) -> tuple[int, int | None] | None:
    """Return start and end of the content of the last box; the end is None if it is not closed."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is a character of the answer
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return start, position
        position += 1
    return start, None
