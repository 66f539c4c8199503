r"""Problems from a JSONL or Parquet file with `problem` and `answer` fields.

A row such as {"id": "aime24-1", "problem": "Find ...", "answer": "204"} becomes a prompt through
`template`; the answer is looked for in the last \boxed{...} of the completion, else in its last
number, else in the whole of it.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from trustbatch.tasks.problems import ProblemTask
from trustbatch.types import Prompt

NUMBER = re.compile(r"(?:(?<!\d)-)?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
LONGEST_NUMBER = 1000
"""longer answers are compared as text: Python refuses to parse very long numbers"""


@dataclass(frozen=True, kw_only=True)
class FileTask(ProblemTask):
    """Rows of any file, as they are."""

    usual_template: ClassVar[str] = "plain"
    drops_duplicates: ClassVar[bool] = False

    name: str = "file"

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the final answer equals the row's, as a number or as text; otherwise 0."""
        return float(_normal_form(final_answer(completion)) == _normal_form(prompt.answer))


def final_answer(completion: str) -> str:
    r"""Return the content of the last \boxed{...}, else the last number, else the whole text."""
    start = completion.rfind("\\boxed{")
    if start >= 0:
        depth, begin = 1, start + len("\\boxed{")
        for end in range(begin, len(completion)):
            depth += {"{": 1, "}": -1}.get(completion[end], 0)
            if depth == 0:
                return completion[begin:end]
    numbers = NUMBER.findall(completion)
    return numbers[-1] if numbers else completion


def _normal_form(answer: str) -> Fraction | str:
    text = answer.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"\\[dt]?frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", text)
    number = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text)  # thousands: 1,234 but not (3,5)
    is_number = re.fullmatch(r"-?(?:\d+(?:\.\d+)?|\.\d+)(?:/0*[1-9]\d*)?", number)
    if is_number and len(number) <= LONGEST_NUMBER:
        numerator, _, denominator = number.partition("/")
        return Fraction(numerator) / Fraction(denominator or 1)
    return text.replace(" ", "")
