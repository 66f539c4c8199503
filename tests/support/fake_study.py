"""Studies as a runner leaves them, without the training: real run folders with made-up metrics.

python tests/support/fake_study.py FOLDER    # realistic ones, to look at their pages
"""

import json
import math
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trustbatch.config import parse_config
from trustbatch.evaluation.results import EvaluationResults, ProblemOutcome
from trustbatch.observe.run_folder import RunFolder
from trustbatch.studies.folder import StudyFolder
from trustbatch.studies.study import Arm, Study

BASE: dict[str, Any] = {"model": {"name": "tiny"}, "task": {"name": "arithmetic"}}
COMMAND = "trustbatch study clip --scale cpu"


def make_study(*arms: Arm, seeds: Sequence[int] = (0,), **more: Any) -> Study:
    about = {"name": "clip", "scale": "cpu", "title": "Clip range", "question": "Which is better?"}
    return Study(**{**about, "base": BASE, "arms": arms, "seeds": tuple(seeds), **more})


def write_study(folder: Path, study: Study) -> Path:
    about = {"command": COMMAND, "environment": {"commit": "abc"}, "held_out": None}
    folder.mkdir(parents=True, exist_ok=True)
    StudyFolder(folder).write(study, about=about, state="finished")
    return folder


def write_run(
    folder: Path,
    arm: Arm,
    seed: int,
    rewards: Sequence[float],
    *,
    steps: int | None = None,
    metrics: Mapping[str, Sequence[float]] | None = None,
    held_out: tuple[float, float, float] | None = None,
    failure: str = "",
    samples: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write one run; `metrics` are further ones, as long as the rewards."""
    name = f"{arm.name}--seed-{seed}"
    tree: dict[str, Any] = {key: dict(table) for key, table in BASE.items()}
    for key, value in arm.changes.items():
        table, _, option = key.partition(".")
        tree.setdefault(table, {})[option] = value
    tree |= {"seed": seed, "run": {"name": name, "folder": str(folder / "runs")}}
    tree["training"] = {"steps": len(rewards) if steps is None else steps}
    config = parse_config(tree)
    run = RunFolder(config.run, config.to_toml())
    run.start(0)
    for place, reward in enumerate(rewards):
        others = {key: values[place] for key, values in (metrics or {}).items()}
        run.write_metrics(place + 1, {"reward/mean": reward, **others})
    run.close()
    if samples:
        lines = "".join(json.dumps(sample) + "\n" for sample in samples)
        (run.path / "rollouts" / "step-000001.jsonl").write_text(lines, encoding="utf-8")
    if held_out:
        mean, low, high = held_out
        record = {"mean_reward": mean, "low": low, "high": high, "num_prompts": 256}
        (run.path / "evaluation.json").write_text(json.dumps(record), encoding="utf-8")
    if failure:
        record = {"error": failure, "traceback": f"Traceback (most recent call last):\n{failure}"}
        (run.path / "failure.json").write_text(json.dumps(record), encoding="utf-8")
    return run.path


def write_evaluation(
    folder: Path, arm: Arm, seed: int, correct: Mapping[str, Sequence[int]], samples: int = 8
) -> None:
    """Write an evaluation from the number of right samples of each problem of each task."""
    results = EvaluationResults(
        model=arm.label,
        settings={
            "samples": samples,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 4096,
            "tasks": {task: {"problems": len(counts)} for task, counts in correct.items()},
        },
        outcomes={
            task: [
                ProblemOutcome(
                    id=f"{task}-{place}",
                    samples=samples,
                    graded=samples,
                    correct=count,
                    truncated=0,
                    mean_reward=count / samples,
                    mean_tokens=900.0,
                )
                for place, count in enumerate(counts)
            ]
            for task, counts in correct.items()
        },
        environment={"commit": "abc", "cpu_cores": 2},
    )
    path = folder / "evaluations" / f"{arm.name}--seed-{seed}"
    path.mkdir(parents=True)
    (path / "results.json").write_text(json.dumps(results.to_dict()), encoding="utf-8")


def method(name: str, label: str, /, *, family: str = "", **changes: Any) -> Arm:
    options = {f"objective.{key}": value for key, value in changes.items()}
    return Arm(name=name, label=label, family=family, changes=options)


def crossed(regimes: Mapping[str, str], methods: Sequence[Arm]) -> list[Arm]:
    return [
        Arm(
            name=f"{regime}-{each.name}",
            label=f"{each.label}, {label}",
            regime=regime,
            family=each.family,
            changes={"rollout.temperature": 1.2, **each.changes},
        )
        for regime, label in regimes.items()
        for each in methods
    ]


P3O = method("p3o", "P3O", name="p3o")
GRPO = [
    method(f"grpo-{c}", f"GRPO, clip {c}", family="grpo", name="grpo", clip_low=c, clip_high=c)
    for c in (0.2, 0.4, 0.6)
]
DAPO, GSPO = method("dapo", "DAPO", name="dapo"), method("gspo", "GSPO", name="gspo")
OTHERS = [
    method("two-anchor", "Two-anchor", name="two_anchor"),
    method("grpo", "GRPO", name="grpo"),
    DAPO,
    GSPO,
    method("cispo", "CISPO", name="cispo"),
    method("decoupled", "Decoupled", name="decoupled"),
]
PAPER_COLUMNS = {"p3o": "p3o", "grpo_mean": "grpo:mean", "grpo_std": "grpo:std"}
SAMPLE = {
    "step": 60,
    "prompt_id": "arithmetic-7",
    "prompt": "12 + 30 =",
    "completion": " 42",
    "answer": "42",
    "reward": 1.0,
    "advantage": 0.4,
    "finish_reason": "stop",
    "tokens": 3,
    "policy": "policy",
    "version": 59,
    "engine": "native",
}


def learning_curve(
    rng: random.Random, top: float, *, steps: int = 60, falls_at: int | None = None
) -> list[float]:
    rewards = []
    for step in range(steps):
        level = 0.15 + (top - 0.15) * (1 - math.exp(-step / 14))
        if falls_at is not None and step > falls_at:
            level *= math.exp(-(step - falls_at) / 4)
        rewards.append(min(max(level + rng.gauss(0, 0.03), 0.0), 1.0))
    return rewards


def trained(
    folder: Path, arm: Arm, seed: int, top: float, distrust: float, *, falls_at: int | None = None
) -> None:
    """Write a run that learns, and perhaps falls."""
    rng = random.Random(f"{arm.name} {seed}")
    luck = random.Random(seed).gauss(0, 0.03) + rng.gauss(0, 0.015)
    rewards = learning_curve(rng, top + luck, falls_at=falls_at)
    ess = [distrust * (0.2 + step / 60) * math.exp(rng.gauss(0, 0.3)) for step in range(60)]
    metrics = {"one_minus_ess": [min(value, 1.0) for value in ess]}
    if "p3o" in arm.name or "anchor" in arm.name:
        metrics["weight/cap"] = [1 - value for value in metrics["one_minus_ess"]]
    end = rewards[-1]
    write_run(
        folder,
        arm,
        seed,
        rewards,
        metrics=metrics,
        held_out=(end, end - 0.05, end + 0.05),
        samples=[SAMPLE, SAMPLE],
    )


def clip_study(folder: Path, seeds: Sequence[int] = range(5)) -> Path:
    arms = [P3O, *GRPO, DAPO, GSPO]
    study = make_study(
        *arms,
        seeds=seeds,
        question="Does P3O, which has no clip range, reach what GRPO reaches over three of them?",
        paper_columns=PAPER_COLUMNS,
    )
    write_study(folder, study)
    tops = (0.8, 0.7, 0.78, 0.74, 0.77, 0.72)
    for arm, top in zip(arms, tops, strict=True):
        for seed in study.seeds:
            if arm is GRPO[2] and seed == 1:
                error = "The gradient of step 24 is not finite: lower training.learning_rate."
                short = learning_curve(random.Random(1), top)[:23]
                write_run(folder, arm, seed, short, steps=60, failure=error)
            elif arm is GSPO and seed == 4:
                write_run(folder, arm, seed, learning_curve(random.Random(2), top)[:37], steps=60)
            elif arm is not DAPO or seed != 4:
                falls = 35 if arm is GRPO[2] and seed == 3 else None
                trained(folder, arm, seed, top, 0.02 + 0.05 * arms.index(arm), falls_at=falls)
    return folder


def stress_study(folder: Path, seeds: Sequence[int] = range(3)) -> Path:
    regimes = {
        "fresh": "on-policy rollouts",
        "lag2": "lag 2",
        "lag8": "lag 8",
        "lag32": "lag 32",
        "t0.6": "T = 0.6",
        "t1.2": "T = 1.2",
        "fp8": "FP8 rollouts",
        "mixed25": "25% of rollouts from another model",
    }
    methods = [P3O, *OTHERS]
    study = make_study(
        *crossed(regimes, methods),
        seeds=seeds,
        name="stress",
        title="Stress",
        question="Which objectives hold in every off-policy regime with one configuration?",
    )
    write_study(folder, study)
    for place, arm in enumerate(study.arms):
        regime, kind = divmod(place, len(methods))
        for seed in study.seeds:
            top = 0.8 - 0.02 * regime - (0.03 * kind if regime > 1 else 0)
            falls = 30 if regime == 3 and kind in (2, 4) else None
            trained(folder, arm, seed, top, 10.0 ** (regime / 2 - 4), falls_at=falls)
    return folder


def benchmark_study(folder: Path, seeds: Sequence[int] = (0,)) -> Path:
    arms = [Arm(name="base", label="Base model", changes={}), P3O, *GRPO]
    columns = {"baseline_4k": "base", "grpo_mean": "grpo:mean", "p3o": "p3o"}
    study = make_study(*arms, seeds=seeds, name="benchmarks", paper_columns=columns)
    write_study(folder, study)
    for arm, skill in zip(arms, (0.1, 0.35, 0.2, 0.3, 0.25), strict=True):
        for seed in study.seeds:
            hardness = random.Random(0)
            rng = random.Random(f"{arm.name} {seed}")
            correct = {
                task: [
                    sum(rng.random() < skill * 2 * hard for _ in range(8))
                    for hard in (hardness.random() for _ in range(30))
                ]
                for task in ("aime24", "aime25", "amc")
            }
            write_evaluation(folder, arm, seed, correct)
    return folder


if __name__ == "__main__":
    from trustbatch.studies.page import write_csv, write_study_page

    for make in (clip_study, stress_study, benchmark_study):
        made = make(Path(sys.argv[1]) / make.__name__)
        write_csv(made)
        write_study_page(made)
