"""Calculator: the policy may evaluate expressions with a tool before it answers."""

import ast
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trustbatch.types import Prompt, Turn

INSTRUCTION = (
    "What is {problem}? To use a calculator, end your turn with an expression such as "
    "{opening}12*34{closing}, and I answer with its value. Then answer with the number alone."
)
MAX_CHARACTERS = 64
"""in an expression: without powers, such a short one can't have a huge value"""
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True, kw_only=True)
class Calculator:
    """Products of two numbers with `digits` digits each; 1 for exactly the right number."""

    seed: int = 0
    digits: int = 3
    opening: str = "<calc>"
    closing: str = "</calc>"
    refusal: str = "error"
    """the reply to an invalid expression"""
    instruction: str = INSTRUCTION
    name: str = "calculator"

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 15:
            raise ValueError("task.digits must be from 1 to 15.")
        if not self.closing:
            raise ValueError("task.closing must not be empty: it ends a call of the calculator.")

    def prompt(self, index: int) -> Prompt:
        """Return the index-th product of this seed."""
        rng = random.Random(f"{self.seed}:{self.digits}:{index}")
        low, high = 10 ** (self.digits - 1), 10**self.digits - 1
        first, second = rng.randint(low, high), rng.randint(low, high)
        text = self.instruction.format(
            problem=f"{first}*{second}", opening=self.opening, closing=self.closing
        )
        return Prompt(
            id=f"{self.name}-{self.digits}:{self.seed}:{index}",
            text=text,
            answer=str(first * second),
        )

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the value of the expression at the end of the turn; without one, end."""
        text = turns[-1].text.strip()
        if not text.endswith(self.closing):
            return None
        call = text.removesuffix(self.closing)
        value = calculate(call.rpartition(self.opening)[-1] if self.opening else call)
        return self.refusal if value is None else str(value)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """1 if the last turn is exactly the number, ignoring surrounding white space."""
        return float(completion.strip() == prompt.answer)


def calculate(expression: str) -> int | None:
    """Return the value of whole numbers with + - * // and brackets; None for anything else."""
    if len(expression) > MAX_CHARACTERS or not re.fullmatch(r"[0-9+*/() -]+", expression):
        return None
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ArithmeticError):
        return None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ArithmeticError("unsupported expression")
