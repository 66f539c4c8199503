"""The results of a study so far, read from its folder: every arm with every seed.

The numbers of a run are means over a window of steps, a tenth of those planned and at least five:

- final reward: the mean over the last window, once the run has all of its steps.
- best reward: the highest mean over any window, once the run has all of its steps.
- collapse step: the end of the first window from which on, to the end of the run, the mean is below
  half of the best. None if the last window is not below it, or if the best was below 0.05.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trustbatch.errors import ConfigError
from trustbatch.evaluation.results import RESULTS_FILE, EvaluationResults, TaskScores, read_results
from trustbatch.observe.report_data import Run, number, read_run
from trustbatch.studies.folder import (
    EVALUATION_FILE,
    EVALUATIONS,
    FAILURE_FILE,
    RUNS,
    STUDY_FILE,
    StudyFolder,
    arm_of,
    run_name,
)
from trustbatch.studies.records import Key, RunRecord, key_of, read_records
from trustbatch.studies.study import Arm

REWARD = "reward/mean"
ONE_MINUS_ESS = "one_minus_ess"
CAP = "weight/cap"
ENTROPY = "entropy"
SHORTEST_WINDOW = 5
SMALLEST_BEST = 0.05
"""a run with a lower best reward does not count as collapsed"""
_COMMA = ", "


class RunState(StrEnum):
    """The progress of a run."""

    FINISHED = "finished"
    UNFINISHED = "unfinished"
    FAILED = "failed"
    MISSING = "missing"


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The mean reward on held-out prompts at temperature 1."""

    mean: float
    low: float
    high: float
    """ends of the 95% interval over prompts"""
    num_prompts: int


@dataclass(frozen=True, kw_only=True)
class StudyRun:
    """One arm with one seed."""

    arm: Arm
    seed: int
    state: RunState
    run: Run | None = None
    """None if it has no metrics yet"""
    error: str = ""
    traceback: str = ""
    held_out: HeldOut | None = None
    evaluation: EvaluationResults | None = None
    problems: tuple[str, ...] = ()
    """files that could not be read"""

    @property
    def folder(self) -> str:
        """Its path within the study's folder."""
        parent = EVALUATIONS if self.run is None and self.evaluation else RUNS
        return f"{parent}/{run_name(self.arm.name, self.seed)}"

    @property
    def steps_done(self) -> int:
        """Number of steps taken."""
        return self.run.steps_done if self.run else 0

    @property
    def steps_planned(self) -> int | None:
        """Number of configured steps, if known."""
        return self.run.steps_planned if self.run else None

    @property
    def environment(self) -> Mapping[str, Any]:
        """Versions, commit and hardware, as recorded."""
        if self.run:
            return self.run.environment
        return self.evaluation.environment if self.evaluation else {}

    @property
    def diverged(self) -> bool:
        """Whether its record says that it could not be trained to its end."""
        return self.state is RunState.FINISHED and bool(self.error)

    @property
    def has_all_steps(self) -> bool:
        """Whether all configured steps are done."""
        return self.steps_planned is not None and self.steps_done >= self.steps_planned

    @property
    def window(self) -> int:
        """Number of steps in a window."""
        return max(SHORTEST_WINDOW, (self.steps_planned or self.steps_done) // 10)

    def series(self, key: str) -> tuple[list[float], list[float]]:
        """Return the steps and finite values of a metric."""
        steps, values = self.run.series(key) if self.run else ([], [])
        kept = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
        return [step for step, _ in kept], [value for _, value in kept]

    def windows(self, key: str) -> tuple[list[float], list[float]]:
        """Return the means of a metric over all windows, each with the window's last step."""
        steps, values = self.series(key)
        size = min(self.window, len(values))
        ends = range(size, len(values) + 1) if size else range(0)
        return [steps[end - 1] for end in ends], [fmean(values[end - size : end]) for end in ends]

    @cached_property
    def final_reward(self) -> float | None:
        """The mean reward over the last window."""
        means = self.windows(REWARD)[1]
        return means[-1] if means and self.has_all_steps else None

    @cached_property
    def best_reward(self) -> float | None:
        """The highest mean reward over any window."""
        return max(self.windows(REWARD)[1], default=None) if self.has_all_steps else None

    @cached_property
    def collapse_step(self) -> int | None:
        """The step from which on the reward stays below half of its best."""
        steps, means = self.windows(REWARD)
        if not means or (best := max(means)) < SMALLEST_BEST or means[-1] >= best / 2:
            return None
        last_good = max(place for place, mean in enumerate(means) if mean >= best / 2)
        return int(steps[last_good + 1])

    @cached_property
    def peak_distrust(self) -> float | None:
        """The highest mean of 1-ESS over any window."""
        return max(self.windows(ONE_MINUS_ESS)[1], default=None)

    @cached_property
    def final_distrust(self) -> float | None:
        """The mean of 1-ESS over the last window."""
        means = self.windows(ONE_MINUS_ESS)[1]
        return means[-1] if means else None

    @property
    def held_out_mean(self) -> float | None:
        """The mean reward on held-out prompts."""
        return self.held_out.mean if self.held_out else None

    @cached_property
    def scores(self) -> list[TaskScores]:
        """Scores on each benchmark, and last their average if there are several."""
        return self.evaluation.scores if self.evaluation else []

    def benchmark_mean(self, place: int) -> float | None:
        """Return the mean pass@k over benchmarks: `place` 0 is the smallest k, -1 the largest."""
        curve = self.scores[-1].pass_at_k if self.scores else ()
        return curve[place].value if curve else None


@dataclass(frozen=True)
class Measure:
    """A number in which runs are compared."""

    name: str
    of: Callable[[StudyRun], float | None]


FINAL_REWARD = Measure("final reward", lambda run: run.final_reward)
BEST_REWARD = Measure("best reward", lambda run: run.best_reward)
HELD_OUT = Measure("held-out reward", lambda run: run.held_out_mean)
BENCHMARKS = Measure("pass@1", lambda run: run.benchmark_mean(0))
BENCHMARKS_AT_MOST = Measure("pass@k with all samples", lambda run: run.benchmark_mean(-1))
PEAK_DISTRUST = Measure("highest 1-ESS", lambda run: run.peak_distrust)
FINAL_DISTRUST = Measure("final 1-ESS", lambda run: run.final_distrust)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A mean and its sample standard deviation, which a single value does not have."""

    mean: float
    deviation: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """Return mean and deviation; None without values."""
        if not values:
            return None
        deviation = stdev(values) if len(values) > 1 else None
        return cls(mean=fmean(values), deviation=deviation, count=len(values))


@dataclass(frozen=True, kw_only=True)
class ArmResult:
    """One arm with all of its seeds."""

    arm: Arm
    label: str
    """the arm's label without its regime"""
    regime: str
    regime_label: str
    runs: tuple[StudyRun, ...]

    @property
    def plain_name(self) -> str:
        """The arm's name without its regime."""
        return self.arm.plain_name

    def by_seed(self, measure: Measure) -> dict[int, float]:
        """Return the measure by seed."""
        found = {run.seed: measure.of(run) for run in self.runs}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, measure: Measure) -> Spread | None:
        """Return mean and deviation over seeds; None without any."""
        return Spread.of(list(self.by_seed(measure).values()))

    def in_state(self, state: RunState) -> list[StudyRun]:
        """Return the runs in a state."""
        return [run for run in self.runs if run.state is state]

    @property
    def collapsed(self) -> list[StudyRun]:
        """The runs whose reward collapsed."""
        return [run for run in self.runs if run.collapse_step is not None]


@dataclass(frozen=True, kw_only=True)
class StudyResults:
    """The results of all arms so far."""

    folder: Path
    name: str
    scale: str
    title: str
    question: str
    seeds: tuple[int, ...]
    subject: str
    paper_columns: Mapping[str, str]
    base: Mapping[str, Any]
    command: str
    arms: tuple[ArmResult, ...]

    @property
    def regimes(self) -> dict[str, str]:
        """Labels of the regimes by name, in the order of the study."""
        named = {result.regime: result.regime_label for result in self.arms if result.regime}
        return named or {"": ""}

    @property
    def runs(self) -> list[StudyRun]:
        """Every arm with every seed."""
        return [run for result in self.arms for run in result.runs]

    def in_regime(self, regime: str) -> list[ArmResult]:
        """Return the arms that are compared with each other.

        An arm without a regime, such as the base model, belongs to every regime.
        """
        label = self.regimes[regime]
        return [
            replace(result, regime=regime, regime_label=label)
            for result in self.arms
            if result.regime in (regime, "")
        ]

    def subject_in(self, regime: str) -> ArmResult | None:
        """Return the arm that the verdict of a regime is about; None if the regime lacks it."""
        arms = self.in_regime(regime)
        return next((each for each in arms if each.plain_name == self.subject), None)

    @cached_property
    def measure(self) -> Measure:
        """The measure in which arms are compared: benchmarks, else held-out, else final reward."""
        if any(run.evaluation for run in self.runs):
            return BENCHMARKS
        return HELD_OUT if any(run.held_out for run in self.runs) else FINAL_REWARD


def regime_labels(arms: Sequence[Arm]) -> dict[str, str]:
    """Return a label for each regime: the common end of its arms' labels, or else its name.

    For example, "P3O, T = 0.6" and "GRPO, clip 0.4, T = 0.6" both end with "T = 0.6".
    """
    labels: dict[str, list[str]] = {}
    for arm in arms:
        labels.setdefault(arm.regime, []).append(arm.label)
    return {
        regime: (_shared_end(found) or regime) if regime else "" for regime, found in labels.items()
    }


def _shared_end(labels: Sequence[str]) -> str:
    shared: list[str] = []
    for parts in zip(*(reversed(label.split(_COMMA)) for label in labels), strict=False):
        if len(set(parts)) > 1:
            break
        shared.insert(0, parts[0])
    return _COMMA.join(shared) if len(labels) > 1 else ""


def reward_bounds(runs: Iterable[StudyRun]) -> tuple[float, float]:
    """Return what a mean reward can't leave: 0 and 1 where all rewards lie between them.

    An interval made of deviations reaches beyond; what it says there can't happen.
    """
    rewards = [
        reward
        for run in runs
        for reward in (*run.series(REWARD)[1], *([run.held_out.mean] if run.held_out else []))
    ]
    is_bounded = all(0.0 <= reward <= 1.0 for reward in rewards)
    return (0.0, 1.0) if is_bounded else (-math.inf, math.inf)


def read_study(folder: Path) -> StudyResults:
    """Read a study's folder; runs may be missing or unfinished."""
    tree = StudyFolder(folder).read()
    if tree is None:
        raise ConfigError(f"{folder} has no {STUDY_FILE}: name the folder of a study.")
    try:
        arms = [arm_of(each) for each in tree["arms"]]
        seeds = tuple(int(seed) for seed in tree["seeds"])
        is_evaluated = tree.get("held_out") is not None
        records = _records_of(tree)
        labels = regime_labels(arms)
        return StudyResults(
            folder=folder,
            name=tree["name"],
            scale=tree["scale"],
            title=tree["title"],
            question=tree["question"],
            seeds=seeds,
            subject=tree["subject"],
            paper_columns=tree["paper_columns"],
            base=tree["base"],
            command=tree["command"],
            arms=tuple(
                ArmResult(
                    arm=arm,
                    label=arm.label.removesuffix(f"{_COMMA}{labels[arm.regime]}"),
                    regime=arm.regime,
                    regime_label=labels[arm.regime],
                    runs=tuple(
                        _of_record(arm, s, records[key_of(arm, s)])
                        if key_of(arm, s) in records
                        else _read_study_run(folder, arm, s, is_evaluated)
                        for s in seeds
                    ),
                )
                for arm in arms
            ),
        )
    except ConfigError:  # of the records
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder / STUDY_FILE} can't be read ({error!r}): start the study again to rewrite it."
        ) from error


def _records_of(tree: Mapping[str, Any]) -> dict[Key, RunRecord]:
    if not tree.get("records"):
        return {}
    file = Path(tree["records"])
    if not file.is_file():
        raise ConfigError(f"{file}, where the study keeps its runs, does not exist: restore it.")
    return read_records(file)


def _of_record(arm: Arm, seed: int, record: RunRecord) -> StudyRun:
    """Return a run of which there is a record; one that diverged has a held-out reward of 0."""
    found = record.held_out
    low, high = found.interval
    return StudyRun(
        arm=arm,
        seed=seed,
        state=RunState.FINISHED,
        run=record.run(run_name(arm.name, seed)),
        error=record.error,
        held_out=HeldOut(
            mean=found.mean_reward,
            low=low,
            high=high,
            num_prompts=found.num_prompts,
        ),
    )


def _read_study_run(study: Path, arm: Arm, seed: int, is_evaluated: bool) -> StudyRun:
    name = run_name(arm.name, seed)
    folder, evaluated = study / RUNS / name, study / EVALUATIONS / name
    problems: list[str] = []
    run = read_run(folder, name) if (folder / "metrics.jsonl").is_file() else None
    evaluation = _read_evaluation(evaluated, problems)
    failure = _read_json(folder / FAILURE_FILE, problems) or _read_json(
        evaluated / FAILURE_FILE, problems
    )
    held_out = _read_held_out(folder / EVALUATION_FILE, problems)
    is_trained = run is not None and run.steps_done >= (run.steps_planned or math.inf)
    if failure is not None:
        state = RunState.FAILED
    elif evaluation or (is_trained and (held_out or not is_evaluated)):
        state = RunState.FINISHED
    else:
        has_begun = folder.is_dir() or evaluated.is_dir()
        state = RunState.UNFINISHED if has_begun else RunState.MISSING
    return StudyRun(
        arm=arm,
        seed=seed,
        state=state,
        run=run,
        error=str((failure or {}).get("error", "")),
        traceback=str((failure or {}).get("traceback", "")),
        held_out=held_out,
        evaluation=evaluation,
        problems=tuple(problems),
    )


def _read_evaluation(folder: Path, problems: list[str]) -> EvaluationResults | None:
    if not (folder / RESULTS_FILE).is_file():
        return None
    try:
        return read_results(folder)
    except ConfigError as error:
        problems.append(str(error))
        return None


def _read_held_out(file: Path, problems: list[str]) -> HeldOut | None:
    tree = _read_json(file, problems)
    if tree is None:
        return None
    mean = number(tree.get("mean_reward"))
    if not math.isfinite(mean):
        problems.append(f"{file.name} has no mean_reward")
        return None
    return HeldOut(
        mean=mean,
        low=number(tree.get("low")),
        high=number(tree.get("high")),
        num_prompts=int(tree.get("num_prompts", 0)),
    )


def _read_json(file: Path, problems: list[str]) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        tree = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        problems.append(f"unreadable {file.name}")
        return {}
    return tree
