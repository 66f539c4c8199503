"""Mixtures: several tasks in one run, each with its share of the prompts."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Self

from trustbatch.tasks.base import (
    EpisodeKey,
    FilteredTask,
    LearningTask,
    ReadsDataSets,
    ReadsFiles,
    Reply,
    Spoken,
    Step,
    Task,
    close_task,
    grade_completion,
    is_environment,
    is_stateful,
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
    rotation: "Rotation" = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        tasks = _build_parts(self.parts, seed=self.seed)
        rotation = Rotation({label: part.share for label, part in tasks.items()})
        object.__setattr__(self, "tasks", tasks)
        object.__setattr__(self, "rotation", rotation)

    def prompt(self, index: int) -> Prompt:
        """Return the index-th prompt: the next one of the part at this position of the pattern."""
        label, number = self.rotation.at(index)
        prompt = self.tasks[label].task.prompt(number)
        # the label keeps ids of different parts distinct
        return replace(prompt, id=f"{label}:{prompt.id}", task=label)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Return the grade of the part that the prompt is from."""
        return self.tasks[prompt.task].task.grade(self._original(prompt), completion)

    @property
    def is_environment(self) -> bool:
        """Whether a part is an environment."""
        return any(is_environment(part.task) for part in self.tasks.values())

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> Reply | None:
        """Return the reply of the part that the prompt is from; None if it never replies."""
        task = self.tasks[prompt.task].task
        return reply_to(task, self._original(prompt), turns)

    @property
    def is_stateful(self) -> bool:
        """Whether a part has live sessions."""
        return any(is_stateful(part.task) for part in self.tasks.values())

    @property
    def max_sessions(self) -> int:
        """The smallest limit of a part, so that none is exceeded."""
        parts = [part.task for part in self.tasks.values()]
        return min(task.max_sessions for task in parts if is_stateful(task))

    def step_sessions(self, episodes: Sequence[Spoken]) -> list[Step]:
        """Pass the last turns to the sessions of their parts; parts without sessions reply."""
        steps: dict[EpisodeKey, Step] = {}
        for label, part in self.tasks.items():
            own = [each for each in episodes if each.prompt.task == label]
            if own and is_stateful(part.task):
                found = part.task.step_sessions(
                    [replace(each, prompt=self._original(each.prompt)) for each in own]
                )
            else:
                found = [Step(reply=self.reply(each.prompt, each.turns)) for each in own]
            steps |= {each.key: step for each, step in zip(own, found, strict=True)}
        return [steps[each.key] for each in episodes]

    def end_sessions(self, keys: Collection[EpisodeKey]) -> None:
        """End the sessions of all parts; each knows its own."""
        for part in self.tasks.values():
            if is_stateful(part.task):
                part.task.end_sessions(keys)

    def close(self) -> None:
        """End the processes of all parts."""
        for part in self.tasks.values():
            close_task(part.task)

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


class Rotation:
    """The order in which parts take turns: a pattern that repeats."""

    def __init__(self, shares: Mapping[str, Fraction]) -> None:
        labels = list(shares)
        self._turns = dict.fromkeys(labels, 0)
        """of each part in a pattern"""
        self._pattern: list[tuple[str, int]] = []
        """per position: the part, and its number of earlier positions in the pattern"""
        for number in even_order(list(shares.values())):
            label = labels[number]
            self._pattern.append((label, self._turns[label]))
            self._turns[label] += 1

    def at(self, index: int) -> tuple[str, int]:
        """Return the part whose turn it is, and how many it had before."""
        repeats, position = divmod(index, len(self._pattern))
        label, turns = self._pattern[position]
        return label, turns + repeats * self._turns[label]


def shares_of(weights: Mapping[str, float], *, where: str) -> dict[str, Fraction]:
    """Return the shares of weights, exactly: through decimals, so that 0.1 is a tenth."""
    for label, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 < weight < math.inf:
            raise ValueError(f"{where}.{label}.weight = {weight!r} must be above 0.")
    exact = {label: Fraction(Decimal(str(weight))) for label, weight in weights.items()}
    return {label: weight / sum(exact.values()) for label, weight in exact.items()}


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
    weights: dict[str, Any] = {}
    built: dict[str, Task] = {}
    shares: dict[str, Fraction] = {}
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
        weights[str(number)] = weight
        shares = shares_of(weights, where="task.parts")
        built[label] = build_task(name, seed=seed, **options)
    return {
        label: Part(label, task, share)
        for (label, task), share in zip(built.items(), shares.values(), strict=True)
    }
