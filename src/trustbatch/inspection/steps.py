"""Which steps of a run can be inspected: from weights, or from the tokens that were logged."""

from dataclasses import dataclass
from pathlib import Path

from trustbatch.checkpoints.load import CONFIG_FILE, list_checkpoints, step_of
from trustbatch.config import Config, load_config
from trustbatch.errors import ConfigError

ROLLOUTS = ("step-*.jsonl.gz", "step-*.jsonl")


@dataclass(frozen=True)
class RunSteps:
    """The steps of a run folder, and where each can be taken from."""

    folder: Path
    config: Config
    checkpoints: dict[int, Path | None]
    """by step, the checkpoint before it; None is the model as it was before the first step"""
    rollouts: dict[int, Path]
    """by step, the file of its logged completions"""

    @property
    def newest(self) -> int:
        """The step after the newest checkpoint."""
        return max(self.checkpoints)

    def describe(self) -> str:
        """Say which steps there are."""
        words = f"{_listed(self.checkpoints)} can be computed again from weights"
        logged = sorted(self.rollouts.keys() - self.checkpoints.keys())
        return f"{words}, and completions of {_listed(logged)} were logged" if logged else words


def find_steps(folder: Path) -> RunSteps:
    """Read a run folder; refuses one without a run."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    configs = [folder / "config.toml", *(each / CONFIG_FILE for each in checkpoints[::-1])]
    config = next((file for file in configs if file.is_file()), None)
    if config is None:
        raise ConfigError(
            f"There is no run in {str(folder)!r}: give a run folder, such as runs/NAME."
        )
    rollouts: dict[int, Path] = {}
    for pattern in ROLLOUTS:
        for file in sorted((folder / "rollouts").glob(pattern)):
            number = file.name.partition(".")[0].removeprefix("step-")
            if number.isdecimal():
                rollouts.setdefault(int(number), file)
    loaded = load_config(config)
    return RunSteps(
        folder=folder,
        config=loaded,
        checkpoints={
            1: None,
            **{step_of(each) + 1: each for each in checkpoints if _has_next(loaded, step_of(each))},
        },
        rollouts=rollouts,
    )


def _has_next(config: Config, step: int) -> bool:
    """Whether there is a batch after a step.

    After the last step there is one that the run would take next. With a lag there is not: older
    versions would have sampled it, and they are gone.
    """
    is_lagged = config.rollout.lag > 0 or config.cluster is not None
    return step < config.training.steps or not is_lagged


def _listed(steps: "dict[int, Path | None] | list[int]") -> str:
    names = [str(step) for step in sorted(steps)]
    shown = names if len(names) <= 12 else [*names[:6], "...", *names[-6:]]
    return f"step{'s' if len(names) > 1 else ''} {', '.join(shown)}"
