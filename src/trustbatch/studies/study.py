"""The nouns of a study: arms that differ in what is compared, and in nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, e.g. Arm(name="grpo-0.2", label="GRPO, clip 0.2", ...)."""

    name: str
    """names the run folders: letters, digits, dots and dashes"""
    label: str
    """what a person reads in legends and tables"""
    changes: Mapping[str, Any]
    """what it changes in the configuration of the study, by dotted key"""
    regime: str = ""
    """how its rollouts are off-policy; arms are compared within one regime"""
    family: str = ""
    """arms that make one curve, with their mean and deviation, such as GRPO over clip ranges"""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is asked at one scale, and the arms that answer it."""

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
