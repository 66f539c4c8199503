"""Mixtures: several tasks in one run, each with its share of the prompts."""

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from fractions import Fraction
from typing import Any, Self

from trustbatch.tasks.answering import answers, grade_of, reply_of
from trustbatch.tasks.base import FilteredTask, LearningTask, Task
from trustbatch.types import Prompt, RolloutGroup, Turn

LONGEST_PATTERN = 100_000
"""prompts until the order of the parts repeats"""


@dataclass(frozen=True)
class Part:
    """One task of a mixture."""

    label: str
    task: Task
    share: Fraction


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Tasks that take turns, so evenly that no part is ever a whole prompt away from its share."""

    parts: Sequence[Mapping[str, Any]]
    seed: int = 0
    name: str = "mixture"
    tasks: dict[str, Part] = field(init=False, repr=False, compare=False)
    """by label"""
    pattern: list[tuple[str, int]] = field(init=False, repr=False, compare=False)
    """the part whose turn it is, and how many turns it has had in the pattern before"""

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
        """Return the index-th prompt, which is the next one of the part whose turn it is."""
        repeats, position = divmod(index, len(self.pattern))
        label, turns = self.pattern[position]
        part = self.tasks[label]
        turns += repeats * int(part.share * len(self.pattern))
        prompt = part.task.prompt(turns)
        # two parts may have the same ids
        return replace(prompt, id=f"{label}:{prompt.id}", task=label)

    def grade(self, prompt: Prompt, completion: str) -> float:
        """Ask the part that the prompt is from."""
        return self.tasks[prompt.task].task.grade(self._original(prompt), completion)

    @property
    def answers(self) -> bool:
        """Whether a part is an environment."""
        return any(answers(part.task) for part in self.tasks.values())

    def reply(self, prompt: Prompt, turns: Sequence[Turn]) -> str | None:
        """Ask the part that the prompt is from; one that is no environment is over at once."""
        task = self.tasks[prompt.task].task
        return reply_of(task, self._original(prompt), turns)

    def grade_turns(self, prompt: Prompt, turns: Sequence[Turn]) -> float:
        """Ask the part that the prompt is from."""
        return grade_of(self.tasks[prompt.task].task, self._original(prompt), turns)

    def statements(self) -> Collection[str]:
        """Return the problems of all parts that have an end."""
        return [text for task in self._filtered().values() for text in task.statements()]

    def without(self, statements: Collection[str], where: str) -> Self:
        """Return the mixture without problems that are also `where`."""
        return self._changed(lambda task: task.without(statements, where))

    def fitted(self, num_tokens: Callable[[Prompt], int], say: Callable[[str], None]) -> Self:
        """Return the mixture without prompts that have more tokens than their part allows."""
        return self._changed(lambda task: task.fitted(num_tokens, say))

    def describe(self) -> str:
        """Say in one line what each part has, and its share."""
        filtered = self._filtered()
        texts = []
        for label, part in self.tasks.items():
            what = filtered[label].describe() if label in filtered else part.task.name
            if what.partition(":")[0] != label:
                what = f"{label} = {what}"
            texts.append(f"{float(part.share):.1%} {what}")
        return " | ".join(texts)

    def observe(self, groups: Sequence[RolloutGroup]) -> None:
        """Tell each part that learns about its own groups."""
        for label, task in self._learning().items():
            own = [group for group in groups if group.prompt.task == label]
            task.observe([replace(g, prompt=self._original(g.prompt)) for g in own])

    def state(self) -> dict[str, Any]:
        """Return what the parts have learnt, by label."""
        return {label: task.state() for label, task in self._learning().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        for label, task in self._learning().items():
            task.load_state(state[label])

    def _original(self, prompt: Prompt) -> Prompt:
        """Return a prompt as its part made it."""
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
    """Return whose turn it is, until the order repeats; shares add up to 1.

    Tijdeman's rule for the chairman assignment problem: among the parts that are behind, the one
    whose turn must come first. After any number of turns a part has had its share of them within
    1 - 1 / (2 k - 2), where k is the number of parts.
    """
    if len(shares) == 1:
        return [0]
    length = math.lcm(*(share.denominator for share in shares))
    if length > LONGEST_PATTERN:
        raise ValueError(
            f"The weights of task.parts make a pattern of {length:,} prompts: give weights with "
            "fewer digits."
        )
    # in whole numbers: times `length`, and times 2 k - 2
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
    from trustbatch.tasks import build_task

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
            raise ValueError(f"task.parts has two called {label!r}: give each a label of its own.")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
            raise ValueError(f"task.parts.{number}.weight = {weight!r} must be above 0.")
        # as decimals, so that 0.1 is a tenth
        weights.append(Fraction(Decimal(str(weight))))
        built[label] = build_task(name, seed=seed, **options)
    total = sum(weights)
    return {
        label: Part(label, task, weight / total)
        for (label, task), weight in zip(built.items(), weights, strict=True)
    }
