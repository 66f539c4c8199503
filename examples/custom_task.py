"""Your own task and reward in one file: the answer must be the prompt's digits in reverse.

    python examples/custom_task.py MODEL

MODEL is a local folder or a hub name; `runs/quickstart/tiny-model-0` is there after
`make quickstart`.
"""

import random
import sys

import trustbatch
from trustbatch.types import Prompt


class Reverse:
    """Anything with a name, a stream of prompts and a grader is a task."""

    name = "reverse"
    grades_in_process = True  # quick and safe; without this it would run in processes with limits

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt; a pure function, so that a run can be resumed."""
        digits = str(random.Random(index).randint(10, 99))
        return Prompt(id=str(index), text=f"{digits}=", answer=digits[::-1])

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return the share of digits that are right."""
        pairs = zip(prompt.answer, completion, strict=False)
        return sum(wanted == given for wanted, given in pairs) / len(prompt.answer)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/custom_task.py MODEL")
    trustbatch.train(
        model=sys.argv[1],
        task=Reverse(),
        objective="p3o",
        rollout={"max_tokens": 4},
        training={"steps": 30, "learning_rate": 1e-3},
        run={"name": "reverse"},
    )
