"""Training from Python."""

import dataclasses
import io
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustbatch.build.session import build_session, build_source, configured_task
from trustbatch.config import Config, parse_config
from trustbatch.config.cautions import cautions
from trustbatch.loops.recorder import Recorder
from trustbatch.loops.session import Session
from trustbatch.loops.train import train as train_loop
from trustbatch.observe.progress import Progress
from trustbatch.observe.run_folder import read_metrics
from trustbatch.plan.shortage import memory_advice
from trustbatch.tasks import FilteredTask, Task, check_task
from trustbatch.utils.distributed import joined_ranks, this_rank
from trustbatch.utils.terminal import LiveLine


@dataclass(frozen=True)
class RunResult:
    """What a run left behind."""

    folder: Path
    """the run folder"""
    checkpoint: Path
    """the trained model, a Hugging Face folder"""
    metrics: list[dict[str, Any]]
    """one dictionary a step, and one of step 0 where the policy was evaluated before the first"""


def train(
    *,
    model: str | Path | Mapping[str, Any],
    task: str | Mapping[str, Any] | Task,
    objective: str | Mapping[str, Any] | None = None,
    **tables: Any,
) -> RunResult:
    """Train a model and return what came out.

    Args:
        model: local folder, GGUF file, "smollm2" or hub name, or a table such as
            {"name": ..., "device": "cpu"}.
        task: a name, a table such as {"name": "file", "path": "train.jsonl"}, or your own object
            with `name`, `prompt` and `grade`, and `reply` where it is an environment.
        objective: a name, or a table such as {"name": "grpo", "clip_high": 0.28}; default: "p3o",
            or "pact" where rollouts are truncated.
        **tables: any other key of the configuration, such as seed=1 or rollout={"max_tokens": 64}.

    Example:
        trustbatch.train(model="Qwen/Qwen3-0.6B", task={"name": "file", "path": "gsm8k.jsonl"})
    """
    own_task = None
    if isinstance(task, str | Mapping):
        task_table = _named(task)
    else:
        check_task(task)
        own_task, task_table = task, _describe(task)
    tree = {
        "model": _named(str(model) if isinstance(model, Path) else model),
        "task": task_table,
        **tables,
    }
    if objective is not None:
        tree["objective"] = _named(objective)
    return train_config(parse_config(tree), own_task)


def train_config(
    config: Config,
    task: Task | None = None,
    *,
    is_asked_to_stop: Callable[[], bool] | None = None,
) -> RunResult:
    """Run, or continue, the training that a configuration describes.

    Under torchrun every process calls this, and they train together. `is_asked_to_stop` is called
    after each step, or once a second where trainers are other processes: when it says so, the run
    ends after the step in progress with a checkpoint, and another call goes on from it. Under
    torchrun rank 0 decides.
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
    if is_asked_to_stop is not None:
        session.is_asked_to_stop = is_asked_to_stop
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
    try:
        with session.run.status:
            source = build_source(session)
            try:
                train_loop(session, source, Recorder(session, source, progress))
            finally:
                source.close()
            if session.state.step < config.training.steps:
                session.run.status.close("stopped")
    finally:
        session.close()
    return RunResult(
        folder=session.run.path,
        checkpoint=session.run.checkpoints / f"step-{session.state.step}",
        metrics=read_metrics(session.run.path),
    )


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


def _named(value: str | Mapping[str, Any]) -> dict[str, Any]:
    return {"name": value} if isinstance(value, str) else dict(value)


def _describe(task: Task) -> dict[str, Any]:
    """Record of a task given as an object: the path of its class, and its plain fields."""
    described: dict[str, Any] = {}
    if dataclasses.is_dataclass(task):
        for field in dataclasses.fields(task):
            value = getattr(task, field.name)
            if _is_plain(value) or (isinstance(value, list | tuple) and all(map(_is_plain, value))):
                described[field.name] = value
    kind = type(task)
    return described | {"name": f"{kind.__module__}:{kind.__qualname__}"}


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool)
