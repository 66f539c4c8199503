"""Training, evaluation, reports and inspection from Python."""

import contextlib
import io
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trustbatch.build.arguments import read_arguments
from trustbatch.build.engines import build_engine
from trustbatch.build.policies import load_model
from trustbatch.build.run_names import named_config
from trustbatch.build.session import build_session, build_source, configured_task
from trustbatch.config import Config
from trustbatch.config.cautions import cautions
from trustbatch.config.resume import check_resumable
from trustbatch.errors import ConfigError
from trustbatch.evaluation.comparison import Comparison, compare
from trustbatch.evaluation.report import comparison_table, results_table
from trustbatch.evaluation.results import TaskScores
from trustbatch.evaluation.run import EvaluatedModel, ModelEvaluator
from trustbatch.evaluation.run_tasks import tasks_of_runs
from trustbatch.evaluation.settings import DEFAULT, Evaluation, SamplingSettings
from trustbatch.evaluation.suite import TaskChoice, load_suite
from trustbatch.inspection.examine import Request, inspect_run
from trustbatch.inspection.result import Inspection
from trustbatch.loops.recorder import Recorder
from trustbatch.loops.session import Session
from trustbatch.loops.train import train as train_loop
from trustbatch.observe.progress import Progress
from trustbatch.observe.report import default_output, write_report
from trustbatch.observe.run_folder import RunFolder, read_metrics
from trustbatch.plan.shortage import memory_advice
from trustbatch.rollout.registry import DEFAULT_ENGINE
from trustbatch.tasks import FilteredTask, Task
from trustbatch.tasks.config import SuiteTaskConfig
from trustbatch.utils.distributed import joined_ranks, this_rank
from trustbatch.utils.terminal import LiveLine


@dataclass(frozen=True, repr=False)
class RunResult:
    """What a run left behind."""

    folder: Path
    """the run folder"""
    checkpoint: Path
    """the trained model, a Hugging Face folder; with run.keep_checkpoints = 0 it is not there"""
    metrics: list[dict[str, Any]]
    """one dictionary a step, and one of step 0 where the policy was evaluated before the first"""

    @property
    def steps(self) -> int:
        """Number of steps that were trained."""
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def reward(self) -> float:
        """Mean reward of the last step; NaN if there is none."""
        rewards = [line["reward/mean"] for line in self.metrics if "reward/mean" in line]
        return rewards[-1] if rewards else math.nan

    def __repr__(self) -> str:
        return f"RunResult({str(self.folder)!r}, {self.steps} steps, reward {self.reward:.3f})"


def train(
    *,
    model: Any,
    task: str | Mapping[str, Any] | Task | None = None,
    data: Any = None,
    reward: Any = None,
    objective: Any = None,
    tokenizer: Any = None,
    **tables: Any,
) -> RunResult:
    """Train a model and return what came out; docs/python-api.md shows all of it.

    Args:
        model: local folder, GGUF file, "smollm2" or hub name, a table such as
            {"name": ..., "device": "cpu"}, or a model of transformers with its `tokenizer`.
        task: a name, a table such as {"name": "file", "path": "train.jsonl"}, or your own object
            with `name`, `prompt` and `grade`, and `reply` where it is an environment.
        data: rows with "problem" and "answer": a list of dictionaries, a `datasets.Dataset`, or
            what `task.path` takes. The task is then "file" by default.
        reward: a function such as f(completion, answer) -> float, the name of a term such as
            "math", a list of both, or a table; default: the task's own grader.
        objective: a name, a table such as {"name": "grpo", "clip_high": 0.28}, or a subclass of
            `trustbatch.objectives.Objective` or an instance of one; default: "p3o", or "pact" where
            rollouts are truncated.
        tokenizer: of a model that is an object.
        **tables: any other key of the configuration, such as seed=1 or rollout={"max_tokens": 64}.

    Without run={"name": ...}, the same arguments continue the run that they have begun, and others
    get a name of their own, such as p3o-arithmetic-2.

    Example:
        trustbatch.train(model="Qwen/Qwen3-0.6B", data=[{"problem": "2+3=", "answer": "5"}])
    """
    arguments = read_arguments(
        model=model,
        tokenizer=tokenizer,
        task=task,
        data=data,
        reward=reward,
        objective=objective,
        tables=tables,
    )
    config = named_config(arguments)
    check_resumable(config, RunFolder(config.run, config.to_toml()))
    arguments.save(config)
    return train_config(config, arguments.task)


def train_config(
    config: Config,
    task: Task | None = None,
    *,
    is_asked_to_stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Run, or continue, the training that a configuration describes.

    Under torchrun every process calls this, and they train together. `is_asked_to_stop` is called
    after each step, or once a second where trainers are other processes: when it says so, the run
    ends after the step in progress, with a checkpoint if it keeps any, from which another call goes
    on. Under torchrun rank 0 decides.
    """
    if config.cluster is not None:
        from trustbatch.cluster.driver import train_on_cluster

        return train_on_cluster(config, task, _train, is_asked_to_stop)
    with joined_ranks(config.model.device):
        return _train(config, task, is_asked_to_stop)


def _train(
    config: Config, task: Task | None, is_asked_to_stop: Callable[[], bool] | None = None
) -> RunResult:
    """Build the parts of a run, train, and end them."""
    if task is None:
        task = configured_task(config)
    with memory_advice(config, task, "load"):
        session = build_session(config, task)
    with contextlib.closing(session):
        if is_asked_to_stop is not None:
            session.is_asked_to_stop = is_asked_to_stop
        train_session(session)
    return RunResult(
        folder=session.run.path,
        checkpoint=session.run.checkpoints / f"step-{session.state.step}",
        metrics=read_metrics(session.run.path),
    )


def train_session(session: Session) -> None:
    """Train to the end, or until the session is asked to stop; the caller closes it."""
    config = session.config
    # rank 0 prints for all ranks
    stream = sys.stderr if this_rank() == 0 else io.StringIO()
    _announce(session, LiveLine(stream))
    progress = Progress(
        config.run.name,
        config.training.steps,
        done=session.state.step,
        first=next(iter(read_metrics(session.run.path)), None),
        stream=stream,
    )
    with session.run.status:
        source = build_source(session)
        try:
            train_loop(session, source, Recorder(session, source, progress))
        finally:
            source.close()
        if session.state.step < config.training.steps:
            session.run.status.close("stopped")


def _announce(session: Session, line: LiveLine) -> None:
    """Say what a user should know before the first step."""
    config, step = session.config, session.state.step
    sentences = []
    if isinstance(session.task, FilteredTask):
        sentences.append(session.task.describe())
    if step >= config.training.steps:
        sentences.append(f"{config.run.name} is already finished; nothing to train.")
    elif step:
        sentences.append(f"{config.run.name} continues after step {step}.")
    if config.training.compile:
        sentences.append("The first step compiles the layers, which can take a minute.")
    for sentence in sentences:
        line.show(sentence, last=True)
    for caution in cautions(config):
        line.warn(caution)


Run = str | Path | RunResult


@dataclass(frozen=True)
class Report:
    """The page about some runs."""

    path: Path

    def _repr_html_(self) -> str:
        return f'<a href="{quote(self.path.as_posix())}">{escape(str(self.path))}</a>'


def report(*runs: Run, output: str | Path | None = None) -> Report:
    """Write one self-contained HTML page about runs; default: into the folder of the run."""
    if not runs:
        raise ConfigError("There is no run to report on: name one or several.")
    folders = [Path(_folder(run)) for run in runs]
    return Report(write_report(folders, Path(output) if output else default_output(folders)))


def inspect(
    run: Run,
    *,
    step: int | None = None,
    objectives: str | Sequence[str] = "all",
    fresh_samples: int | None = None,
    first_mini_batch: bool = False,
) -> Inspection:
    """Take the batch of a step through objectives; the run folder is only read.

    `objectives` are names, "grpo clip_high=0.4", my_file.py:Mine, or "all". The default step is the
    one after the newest checkpoint.
    """
    line = LiveLine()
    request = Request(
        folder=Path(_folder(run)),
        step=step,
        objectives=(objectives,) if isinstance(objectives, str) else tuple(objectives),
        fresh_samples=fresh_samples,
        first_mini_batch=first_mini_batch,
    )
    found = inspect_run(request, say=line.show)
    line.show("inspected", last=True)
    return found


@dataclass(frozen=True, repr=False)
class Evaluated:
    """The results of one or several models on the same tasks."""

    models: list[EvaluatedModel]
    comparisons: list[Comparison]
    """of each later model with the first"""

    @property
    def scores(self) -> dict[str, list[TaskScores]]:
        """Scores of each task, and last their average if there are several, by model."""
        return {each.results.model: each.results.scores for each in self.models}

    def __repr__(self) -> str:
        tables = [results_table(each.results) for each in self.models]
        return "\n".join([*tables, *map(comparison_table, self.comparisons)]).strip()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def evaluate(
    *models: Run,
    tasks: str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]] | None = None,
    samples: int | None = None,
    temperature: float = DEFAULT.temperature,
    top_p: float = DEFAULT.top_p,
    max_tokens: int | None = None,
    limit: int | None = None,
    seed: int = 0,
    data: str | None = None,
    output: str | Path = "evals",
    engine: str = DEFAULT_ENGINE,
    **tables: Any,
) -> Evaluated:
    """Evaluate models on the same tasks: pass@k with intervals, and who is better.

    Models are runs, checkpoints, folders, .gguf files, "smollm2" or hub names. The default tasks
    are those of the first run's [evaluation], or else its own task. `data` is a folder with a file
    of each named task; `tables` are keys of [model], [rollout] and [reward].
    """
    if not models:
        raise ConfigError("There is no model to evaluate: name one or several.")
    folders = list(map(_folder, models))
    if tasks is None:
        found = tasks_of_runs(folders, own_task=False)
        suite = load_suite(
            found.choices,
            data=data or found.data,
            limit=limit or found.limit,
            num_endless=found.prompts,
        )
        tables["rollout"] = {"max_turns": found.max_turns, **tables.get("rollout", {})}
    else:
        found, suite = None, load_suite(_choices(tasks), data=data, limit=limit)
    default_samples = DEFAULT.samples if temperature > 0 else 1
    evaluation = Evaluation(
        suite=suite,
        sampling=SamplingSettings(
            samples=samples or default_samples,
            temperature=temperature,
            top_p=top_p,
            max_tokens=max_tokens or (found.max_tokens if found else DEFAULT.max_tokens),
            seed=seed,
        ),
        is_capped=max_tokens is None,
        engine=engine,
        tables=tables,
        output=Path(output),
    )
    evaluator = ModelEvaluator(load_model=load_model, open_engine=build_engine)
    first, *others = evaluator.evaluate_models(folders, evaluation)
    comparisons = [compare(first.results, other.results) for other in others]
    return Evaluated([first, *others], comparisons)


def _folder(run: Run) -> str:
    return str(run.folder if isinstance(run, RunResult) else run)


def _choices(tasks: Any) -> list[TaskChoice]:
    listed = [tasks] if isinstance(tasks, str | Mapping) else list(tasks)
    tables = [SuiteTaskConfig.model_validate(task) for task in listed]
    return [TaskChoice(table.name, table.options) for table in tables]
