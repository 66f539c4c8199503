"""Mixtures: several tasks in one run, each with its share of the prompts."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Self

from trustbatch.tasks.base import (
    FilteredTask,
    LearningTask,
    ReadsDataSets,
    ReadsFiles,
    Task,
    grade_completion,
    is_environment,
    reply_to,
)
from trustbatch.tasks.rows import PromptChecks, RowOrigin, RowTask
from trustbatch.types import Prompt, RolloutGroup, Turn

MAX_PATTERN_LENGTH = 100_000
"""prompts before the order of the parts repeats"""


@dataclass(frozen=True)
class Part:
    """One task of a mixture."""

    label: str
    task: Task
    share: Fraction


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Interleaves tasks so evenly that no part is ever a whole prompt away from its share."""

    parts: Sequence[Mapping[str, Any]]
    seed: int = 0
    name: str = "mixture"
    tasks: dict[str, Part] = field(init=False, repr=False, compare=False)
    """by label"""
    pattern: list[tuple[str, int]] = field(init=False, repr=False, compare=False)
    """per position: the label of the part, and its number of earlier positions in the pattern"""

    def __post_init__(self) -> None:
        tasks = _build_parts(self.parts, seed=self.seed)
        order = even_order([part.share for part in tasks.values()])
        labels = list(tasks)
        turns = dict.fromkeys(labels, 0)
        pattern = []
        for number in order:
            pattern.append((labels[number], turns[labels[number]]))
            turns[labels[number]] += 1
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "pattern", pattern)

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt: the next one of the part at this position of the pattern."""
        repeats, position = divmod(index, len(self.pattern))
        label, turns = self.pattern[position]
        part = self.tasks[label]
        turns += repeats * int(part.share * len(self.pattern))
        prompt = part.task.prompt(turns)
        # the label keeps ids of different parts distinct
        return replace(prompt, id=f"{label}:{prompt.id}", task=label)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return the grade of the part that the prompt is from."""
        return self.tasks[prompt.task].task.grade(self._original(prompt), completion)

    @property
    def is_environment(self) -> bool:
        """Whether a part is an environment."""
        return any(is_environment(part.task) for part in self.tasks.values())

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Return the reply of the part that the prompt is from; None if it never replies."""
        task = self.tasks[prompt.task].task
        return reply_to(task, self._original(prompt), turns)

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Return the grade of the part that the prompt is from."""
        task = self.tasks[prompt.task].task
        return grade_completion(task, self._original(prompt), turns[-1].text, turns)

    def statements(self) -> Collection[str]:
        """Return the problems of all finite parts."""
        return [text for task in self._filtered().values() for text in task.statements()]

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the mixture without these problems."""
        return self._changed(lambda task: task.without(statements, where))

    def fitted(self, checks: PromptChecks) -> Self:
        """Return the mixture without prompts that their part does not allow."""
        return self._changed(lambda task: task.fitted(checks))

    @property
    def files(self) -> Mapping[str, str]:
        """The files that the parts have read."""
        tasks = [part.task for part in self.tasks.values()]
        return {
            name: path
            for task in tasks
            if isinstance(task, ReadsFiles)
            for name, path in task.files.items()
        }

    @property
    def digests(self) -> Mapping[str, str]:
        """The fingerprints of data sets that the parts have read."""
        tasks = [part.task for part in self.tasks.values()]
        return {
            name: digest
            for task in tasks
            if isinstance(task, ReadsDataSets)
            for name, digest in task.digests.items()
        }

    @property
    def seats(self) -> Sequence[Prompt]:
        """The problems of all parts that have an end."""
        tasks = [part.task for part in self.tasks.values()]
        return [seat for task in tasks if isinstance(task, RowTask) for seat in task.seats]

    def row_of(self, prompt: Prompt) -> RowOrigin | None:
        """Return where a prompt comes from, if its part knows."""
        if prompt.task not in self.tasks:
            return None
        task, number = self.tasks[prompt.task].task, list(self.tasks).index(prompt.task)
        row = task.row_of(self._original(prompt)) if isinstance(task, RowTask) else None
        return row and replace(row, key=f"task.parts.{number}.leave_out")

    def describe(self) -> str:
        """Return one line with each part's share and problems."""
        filtered = self._filtered()
        texts = []
        for label, part in self.tasks.items():
            what = filtered[label].describe() if label in filtered else part.task.name
            if what.partition(":")[0] != label:
                what = f"{label} = {what}"
            texts.append(f"{float(part.share):.1%} {what}")
        return " | ".join(texts)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Pass each learning part its own groups."""
        for label, task in self._learning().items():
            own = [group for group in groups if group.prompt.task == label]
            task.observe([replace(g, prompt=self._original(g.prompt)) for g in own])

    def state(self) -> dict[str, Any]:
        """Return the states of the learning parts, by label."""
        return {label: task.state() for label, task in self._learning().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for label, task in self._learning().items():
            task.load_state(state[label])

    def _original(self, prompt: Prompt) -> Prompt:
        """Return a prompt as its part created it."""
        part = self.tasks[prompt.task].task
        return replace(prompt, id=prompt.id.removeprefix(f"{prompt.task}:"), task=part.name)

    def _filtered(self) -> dict[str, FilteredTask]:
        tasks = {label: part.task for label, part in self.tasks.items()}
        return {label: each for label, each in tasks.items() if isinstance(each, FilteredTask)}

    def _learning(self) -> dict[str, LearningTask]:
        tasks = {label: part.task for label, part in self.tasks.items()}
        return {label: each for label, each in tasks.items() if isinstance(each, LearningTask)}

    def _changed(self, change: Callable[[FilteredTask], Any]) -> Self:
        tasks = dict(self.tasks)
        for label, task in self._filtered().items():
            tasks[label] = replace(tasks[label], task=change(task))
        changed = copy.copy(self)
        object.__setattr__(changed, "tasks", tasks)
        return changed


def even_order(shares: Sequence[Fraction]) -> list[int]:
    """Return the part at each position until the order repeats; shares add up to 1.

    Tijdeman's rule for the chairman assignment problem: among the parts that are behind their
    share, choose the one with the earliest deadline. At any position, the count of each part
    differs from its share by at most 1 - 1 / (2 k - 2), where k is the number of parts.
    """
    if len(shares) == 1:
        return [0]
    length = math.lcm(*(share.denominator for share in shares))
    if length > MAX_PATTERN_LENGTH:
        raise ValueError(
            f"The weights of task.parts make a pattern of {length:,} prompts: give weights with "
            "fewer digits."
        )
    # in integers: scaled by `length` and by 2 k - 2
    scale = 2 * len(shares) - 2
    weights = [int(share * length) for share in shares]
    turns = [0] * len(shares)
    order = []
    for number in range(1, length + 1):
        behind = [scale * (w * number - t * length) for w, t in zip(weights, turns, strict=True)]
        chosen = min(
            (i for i in range(len(shares)) if behind[i] >= length),
            key=lambda i: Fraction(scale * length - length - behind[i], weights[i]),
        )
        turns[chosen] += 1
        order.append(chosen)
    return order


def _build_parts(parts: Sequence[Mapping[str, Any]], *, seed: int) -> dict[str, Part]:
    from trustbatch.tasks import build_task  # which imports this module

    if not isinstance(parts, Sequence) or not parts:
        raise ValueError("The task mixture needs [[task.parts]], each with a name and a weight.")
    weights, built = [], {}
    for number, options in enumerate(parts):
        if not isinstance(options, Mapping):
            raise ValueError(f"task.parts.{number} = {options!r} must be a table with a name.")
        options = dict(options)
        name, weight = options.pop("name", None), options.pop("weight", 1)
        if not isinstance(name, str) or name == "mixture":
            raise ValueError(f"task.parts.{number}.name must be the name of a task.")
        label = options.pop("label", name)
        if label in built:
            raise ValueError(f"task.parts has two parts named {label!r}: give each its own label.")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"task.parts.{number}.weight = {weight!r} must be above 0.")
        # through decimals, so that 0.1 is exactly a tenth
        weights.append(Fraction(Decimal(str(weight))))
        built[label] = build_task(name, seed=seed, **options)
    total = sum(weights)
    return {
        label: Part(label, task, weight / total)
        for (label, task), weight in zip(built.items(), weights, strict=True)
    }
