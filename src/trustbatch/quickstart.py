"""The quickstart: a tiny model, P3O beside GRPO with three clip ranges, two kinds of rollouts."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trustbatch.api import train
from trustbatch.evaluation import EvaluationResult, evaluate
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import warm_start
from trustbatch.observe.page_parts import table, text
from trustbatch.observe.report import write_report
from trustbatch.tasks import build_task
from trustbatch.utils.terminal import LiveLine

MAX_TOKENS = 6
EVALUATION_SEED = 1_000_003
"""prompts of the evaluation come from another seed than those of any run"""

OBJECTIVES: dict[str, dict[str, Any]] = {
    "p3o": {"name": "p3o"},
    "grpo-0.2": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.2},
    "grpo-0.4": {"name": "grpo", "clip_low": 0.4, "clip_high": 0.4},
    "grpo-0.6": {"name": "grpo", "clip_low": 0.6, "clip_high": 0.6},
}
ROLLOUTS: dict[str, dict[str, Any]] = {
    "on-policy": {},
    "mismatched": {"temperature": 1.2, "lag": 4},
}
HEADINGS = ("rollouts", "objective", "accuracy at T=1", "training reward", "seconds")
NUM_WORDS = 2
"""columns of the table that are words; the others are numbers"""
EXPLANATION = (
    "on-policy: fresh rollouts and one update for each, so every ratio is 1 and all objectives "
    "take the same step.\nmismatched: rollouts sampled at T = 1.2 by a policy 4 versions old. "
    "One seed each; +- is the standard error over prompts."
)


@dataclass(frozen=True)
class QuickstartRow:
    """One run of the comparison."""

    run: str
    rollouts: str
    objective: str
    first_reward: float
    last_reward: float
    """training reward, mean of the last five steps"""
    final: EvaluationResult
    """at temperature 1, whatever the rollouts' temperature was"""
    seconds: float

    @property
    def cells(self) -> tuple[str, ...]:
        """A row of the table, under its headings."""
        return (
            self.rollouts,
            self.objective,
            f"{self.final.mean_reward:.3f} +- {self.final.standard_error:.3f}",
            f"{self.first_reward:.3f} -> {self.last_reward:.3f}",
            f"{self.seconds:.0f}",
        )


@dataclass(frozen=True)
class QuickstartResult:
    """The starting point, every run, and the report."""

    start: EvaluationResult
    rows: list[QuickstartRow]
    steps: int
    report: Path

    @property
    def title(self) -> str:
        """The title of the table."""
        return f"Reward after {self.steps} steps from {self.start.mean_reward:.3f}"


def quickstart(
    folder: Path, *, steps: int = 60, seed: int = 0, say: Callable[[str], None]
) -> QuickstartResult:
    """Make the tiny model, train it in eight ways, compare, and write the report."""
    model = quickstart_model(folder, seed=seed, say=say)
    start = _evaluate(model)
    say(f"The model answers {start.mean_reward:.0%} of samples correctly. Training it 8 ways.")
    rows = []
    for rollouts, rollout_options in ROLLOUTS.items():
        for objective, objective_options in OBJECTIVES.items():
            name = f"{rollouts}-{objective}-seed{seed}"
            begin = time.monotonic()
            result = train(
                model=model,
                task={"name": "arithmetic", "level": 2},
                objective=objective_options,
                seed=seed,
                rollout={"max_tokens": MAX_TOKENS, **rollout_options},
                training={"steps": steps, "learning_rate": 3e-4},
                run={"name": name, "folder": str(folder), "checkpoint_every": steps},
            )
            rewards = [line["reward/mean"] for line in result.metrics]
            rows.append(
                QuickstartRow(
                    run=name,
                    rollouts=rollouts,
                    objective=objective,
                    first_reward=rewards[0],
                    last_reward=sum(rewards[-5:]) / len(rewards[-5:]),
                    final=_evaluate(result.checkpoint),
                    seconds=time.monotonic() - begin,
                )
            )
    outcome = QuickstartResult(start=start, rows=rows, steps=steps, report=folder / "report.html")
    write_report([folder / row.run for row in rows], outcome.report, _results_section(outcome))
    (folder / "results.json").write_text(json.dumps(asdict(outcome), default=str, indent=2) + "\n")
    return outcome


def quickstart_model(folder: Path, *, seed: int = 0, say: Callable[[str], None]) -> Path:
    """Return the folder of the tiny model; makes it where there is none."""
    model = folder / f"tiny-model-{seed}"
    if not model.is_dir():
        say("Warm start: teaching a 0.3M-parameter model two-digit sums, then mostly wrong ones.")
        line = LiveLine()
        warm_start(model, seed=seed, progress=line.show)
        line.show(f"The model is in {model}.", last=True)
    return model


def _results_section(result: QuickstartResult) -> str:
    """Return the table that the terminal shows, which the page opens with."""
    rows = [row.cells for row in result.rows]
    lines = "<br>".join(map(text, EXPLANATION.split("\n")))
    return (
        f'<section id="results"><h2>{text(result.title)}</h2>'
        f'{table(HEADINGS, rows, num_words=NUM_WORDS)}<p class="hint">{lines}</p></section>'
    )


def _evaluate(model: Path) -> EvaluationResult:
    task = build_task("arithmetic", seed=EVALUATION_SEED, level=2)
    return evaluate(
        Policy.load(str(model)), task, num_prompts=512, num_samples=4, max_tokens=MAX_TOKENS
    )
