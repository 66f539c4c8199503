"""The configuration that the arms of a study share, at one size."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from trustbatch.utils.tables import set_key

LagKey = Literal["rollout.lag", "cluster.max_lag"]


@dataclass(frozen=True, kw_only=True)
class HeldOutTask:
    """Problems that a trained policy is asked, at temperature 1, with as many tokens as rollouts.

    Of another split than the runs', or of another seed where a task has no end.
    """

    task: Mapping[str, Any]
    """name, seed and options of the task"""
    num_prompts: int
    num_samples: int


@dataclass(frozen=True, kw_only=True)
class Suite:
    """The benchmarks that trained policies are compared on."""

    tasks: Sequence[Mapping[str, Any]]
    """name and options of each; a label where the name would not tell them apart"""
    num_endless: int = 256
    """problems of a task without an end"""
    samples: int = 16
    temperature: float = 1.0
    top_p: float = 0.95
    max_tokens: int
    """more where a study's rollouts have more"""
    engine: str = "native"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One size at which every study can be run."""

    name: str
    base: Mapping[str, Any]
    """tables of the configuration, as in TOML"""
    families: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """what some kinds of runs change in the base, by dotted key; the paper's tables do"""
    seeds: tuple[int, ...]
    other_model: str
    """samples a share of the rollouts where they are mixed"""
    lag_key: LagKey = "rollout.lag"
    held_out: HeldOutTask | None = None
    """nothing is evaluated after training where there is none"""
    suite: Suite
    threads: int | None = None
    """of each process that trains; what is there unless told"""
    least_seconds: float = 0.0
    """time left below which no run is started"""
    end_seconds: float = 0.0
    """kept for the end: a run that is asked to stop takes its step and writes its checkpoint, and
    the page is written"""
    gpu_memory_gib: float | None = None
    """of the GPUs that a plan counts on; this machine's unless told"""

    def base_of(self, family: str) -> dict[str, Any]:
        """Return the configuration of a kind of runs."""
        tree = copy.deepcopy(dict(self.base))
        for key, value in self.families.get(family, {}).items():
            set_key(tree, key, value)
        return tree
