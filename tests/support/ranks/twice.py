"""Two runs in one process, with a grader that gives every rank another answer."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import trustbatch
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.types import Prompt


@dataclass(frozen=True)
class ByRank:
    """Rewards a completion with the number of the process that asks."""

    name: str = "by_rank"
    grades_in_process: bool = True

    def prompt(self, index: int) -> Prompt:
        """Return a sum."""
        return Prompt(id=str(index), text="1+1=", answer="2")

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return this rank."""
        sys.stderr.write("asked\n")
        return float(os.environ["RANK"])


def main(folder: Path) -> None:
    """Train twice."""
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed=0).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    for name in ("first", "second"):
        result = trustbatch.train(
            model={"name": str(folder / "model"), "device": "cpu"},
            task=ByRank(),
            rollout={"prompts_per_step": 1, "samples_per_prompt": 4, "max_tokens": 3},
            training={"steps": 1},
            run={"name": name, "folder": str(folder / f"runs-{name}")},
        )
        assert [line["reward/mean"] for line in result.metrics] == [0.0]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
