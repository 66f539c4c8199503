"""The terms of a study: its arms, and the scale at which they are run."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trustbatch.rollout.registry import DEFAULT_ENGINE

LagKey = Literal["rollout.lag", "cluster.max_lag"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, e.g. Arm(name="grpo-0.2", label="GRPO, clip 0.2", ...)."""

    name: str
    """names the run folders: letters, digits, dots and dashes"""
    label: str
    """shown in legends and tables"""
    changes: Mapping[str, Any]
    """changes to the study's configuration, by dotted key"""
    regime: str = ""
    """how its rollouts are off-policy; arms are compared within one regime"""
    family: str = ""
    """arms that form one curve with mean and deviation, such as GRPO over clip ranges"""

    @property
    def plain_name(self) -> str:
        """The name without the regime, which may be a prefix or a suffix."""
        if not self.regime:
            return self.name
        for mark in ("--", "-", "."):
            short = self.name.removesuffix(f"{mark}{self.regime}")
            short = short.removeprefix(f"{self.regime}{mark}")
            if short != self.name:
                return short
        return self.name


@dataclass(frozen=True, kw_only=True)
class Study:
    """A question at one scale, and the arms that answer it."""

    name: str
    scale: str
    title: str
    question: str
    """in one sentence"""
    base: Mapping[str, Any]
    """the configuration that all arms share"""
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...]
    subject: str = "p3o"
    """the arm, by name without its regime, that the verdict is about"""
    paper_columns: Mapping[str, str] = field(default_factory=dict)
    """columns of the paper's plot data, each the name of an arm or of a family and a statistic,
    such as {"p3o": "p3o", "grpo_mean": "grpo:mean", "grpo_std": "grpo:std"}"""


@dataclass(frozen=True, kw_only=True)
class HeldOutTask:
    """Problems for trained policies, at temperature 1 and with the rollouts' token limit.

    They come from another split than the runs', or from another seed if the task is endless.
    """

    task: Mapping[str, Any]
    """name, seed and options of the task"""
    num_prompts: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The benchmarks on which trained policies are compared."""

    tasks: Sequence[Mapping[str, Any]]
    """name and options of each, and a label if names are not unique"""
    num_endless: int = 256
    """number of problems from an endless task"""
    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int
    """a study with longer rollouts uses their limit instead"""
    engine: str = DEFAULT_ENGINE


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One size at which every study can be run."""

    name: str
    base: Mapping[str, Any]
    """tables of the configuration, as in TOML"""
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """changes to the base for some studies, by study and dotted key, as in the paper's tables"""
    seeds: tuple[int, ...]
    other_model: str
    """generates a share of the rollouts in studies of mixed policies"""
    lag_key: LagKey = "rollout.lag"
    held_out: HeldOutTask | None = None
    """default: no evaluation after training"""
    suite: Suite
    threads: int | None = None
    """per training process; default: PyTorch's choice"""
    least_seconds: float = 0.0
    """no run is started with less time left"""
    end_seconds: float = 0.0
    """reserved for the end: stopped runs finish their step and write a checkpoint, and the page is
    written"""
    gpu_memory_gib: float | None = None
    """memory per GPU that a plan assumes; default: that of this machine's GPUs"""

    def base_of(self, family: str) -> dict[str, Any]:
        """Return the configuration of a family of runs."""
        tree = copy.deepcopy(dict(self.base))
        for key, value in self.families.get(family, {}).items():
            set_key(tree, key, value)
        return tree


def set_key(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set one dotted key, e.g. "rollout.temperature"."""
    *tables, last = key.split(".")
    node = tree
    for table in tables:
        node = node.setdefault(table, {})
    node[last] = copy.deepcopy(value)
