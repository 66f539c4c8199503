"""When two problems count as the same one."""

import re
import unicodedata

WORD = re.compile(r"\d+|[^\W\d_]+")
LAYOUT = re.compile(
    r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|quad|qquad"
    r"|text|textbf|textit|mathrm|mathbf|operatorname|mbox|begin|end)(?![a-z])"
)
"""commands of LaTeX that change how a formula looks, not what it says"""
FRACTION = re.compile(r"\\[dtc]frac(?![a-z])")


def words_of(text: str) -> str:
    r"""Return the words and numbers of a text in lower case: spaces and signs don't matter.

    Numbers stay apart from each other: [14, 11, 22] is not [14, 11, 2, 2]. Letters and digits are
    apart too, and layout is left out: "2 x^{3}" is "2x^3", and "\left\{" is "\{".
    """
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = LAYOUT.sub(" ", FRACTION.sub(r"\\frac", plain))
    return " ".join(WORD.findall(plain))
