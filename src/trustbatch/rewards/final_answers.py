r"""Finding the final answer in a completion.

The rules, in this order:

1. Where the text has `</think>`, only what follows the last one counts; with `<think>` alone the
   thinking never ended and there is no answer.
2. The content of the last \boxed{...} is the answer, also where an earlier box says something
   else; if the last box is never closed there is no answer, as its end is not known.
3. Without a box: the last number where the reference is a number, else the last formula between
   dollars (or \( \), \[ \]), else the whole text. With `require_boxed` there is no answer.
"""

import re

NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_FORMULAS = re.compile(r"\$\$(.+?)\$\$|\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_TAIL = 4000
"""characters of a text without a box in which a formula is looked for"""


def final_answer(
    completion: str, *, require_boxed: bool = False, is_number: bool = False
) -> str | None:
    """Return the final answer by the rules above, or None where there is none.

    `is_number` says that the reference is one.
    """
    _, ended, after = completion.rpartition("</think>")
    text = after if ended else completion
    if not ended and "<think>" in completion:
        return None
    boxed = last_box(text)
    if boxed is not None:
        start, end = boxed
        return None if end is None else text[start:end]
    if require_boxed:
        return None
    if is_number:
        last = last_number(text)
        if last is not None:
            return last
    formulas = _FORMULAS.findall(text[-_TAIL:])
    return next(filter(None, formulas[-1])) if formulas else text


def last_number(text: str) -> str | None:
    """Return the last number of a text, with a fraction's denominator."""
    last = None
    for match in NUMBER.finditer(text):
        last = match
    return None if last is None else last.group()


def last_box(text: str) -> tuple[int, int | None] | None:
    """Return where the content of the last box starts and ends; the end is None if it has none."""
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
