"""`trustbatch.doctor`: from a configuration to a diagnosis that a notebook can show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from trustbatch.build.data import checked_task
from trustbatch.build.engines import build_engine, load_second_policies
from trustbatch.build.policies import load_policy
from trustbatch.build.session import configured_task
from trustbatch.config import Config, as_config
from trustbatch.doctor.examine import DEFAULT_TOKENS, examine
from trustbatch.doctor.verdict import Measurements, Verdict, judge, show, to_record
from trustbatch.utils.rendering import as_html
from trustbatch.utils.terminal import LiveLine


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Whether engine and trainer agree, and what was measured."""

    examination: Measurements
    verdict: Verdict

    @property
    def is_on_policy(self) -> bool:
        """Whether engine and trainer differ by rounding alone."""
        return self.verdict.is_on_policy

    def to_record(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return to_record(self.examination, self.verdict)

    def show(self, console: Console) -> None:
        """Print the measurements, a row per check, and the verdict in words."""
        show(console, self.examination, self.verdict)

    def __repr__(self) -> str:
        return "\n".join(self.verdict.sentences)

    def _repr_html_(self) -> str:
        return as_html(self.show)


def diagnose(
    config: str | Path | Mapping[str, Any] | Config,
    *,
    tokens: int = DEFAULT_TOKENS,
    say: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Measure whether the stack of a configuration is on-policy; nothing is trained or written.

    `config` is a TOML file, its tables, or a `Config`; `tokens` are sampled and recomputed.
    """
    config = as_config(config)
    line = LiveLine()
    say = say or line.show
    task = configured_task(config)
    say(f"loading {config.model.name}")
    policy = load_policy(config)
    task = checked_task(
        config,
        task,
        [],
        count_tokens=policy.count_tokens,
        context_length=policy.context_length,
        say=say,
    )
    load_second_policies(config, policy)  # refuses what a run would refuse
    engine = build_engine(config, policy)
    try:
        examination = examine(config, policy, engine, task, num_tokens=tokens, say=say)
    finally:
        engine.close()
    line.show("examined", last=True)
    return Diagnosis(examination, judge(examination, config))
