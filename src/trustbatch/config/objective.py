"""[objective] and [advantage]: the choices whose math knows nothing of configurations."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.advantages import ADVANTAGES
from trustbatch.objectives import OBJECTIVES, Objective
from trustbatch.utils.imports import check_object_path, load_object
from trustbatch.utils.options import check_options, find_entry
from trustbatch.utils.tables import Choice, called

DEFAULT_OBJECTIVE = "p3o"
TRUNCATED_DEFAULT = "pact"
"""where rollout.top_p or top_k cuts the tail: P3O's ESS can't see mass that leaves the support, and
of the objectives tried on a real model only PACT kept what it knew (docs/results.md)"""


class ObjectiveConfig(Choice):
    """[objective]: by name or by the path of a class; its options are the fields of the class."""

    kind: ClassVar[str] = "objective"

    name: str = DEFAULT_OBJECTIVE

    def check(self) -> None:
        """Build it: the class checks the values of its options."""
        self.build()

    def build(self) -> Objective:
        """Build the objective."""
        make = objective_class(self.name)
        check_options(make, self.options, what=f"objective {self.name}", table="objective")
        return called(make, "objective", self.options)

    def resolved(self, *, has_top_logp: bool) -> "ObjectiveConfig":
        """Replace what the objective leaves to the data: whether top log-probs are recorded."""
        before = self.build()
        after = before.resolved(has_top_logp=has_top_logp)
        names = [field.name for field in fields(after)]
        changed = {n: getattr(after, n) for n in names if getattr(after, n) != getattr(before, n)}
        return self.model_copy(update={"options": self.options | changed})


def objective_class(name: str) -> type[Objective]:
    """Return the class of an objective by name, or a user's own as in my_objective.py:Mine."""
    if ":" not in name:
        also = ", or name a class as in my_objective.py:Mine"
        return find_entry(OBJECTIVES, name, kind="objective", also=also)
    check_object_path(name)
    try:
        found = load_object(name)
    except ImportError as error:
        raise ValueError(f"objective.name = {error}") from error
    if not (isinstance(found, type) and issubclass(found, Objective)):
        raise ValueError(
            f"objective.name = {name!r} is no objective: name a subclass of "
            "trustbatch.objectives.Objective."
        )
    return found


class AdvantageConfig(Choice):
    """[advantage]: from rewards to credit; its options are the arguments of the function."""

    kind: ClassVar[str] = "advantage"

    name: str = "group_standardized"

    def check(self) -> None:
        """Call it once: the function checks the values of its options."""
        function = find_entry(ADVANTAGES, self.name, kind=self.kind)
        what = f"advantage {self.name}"
        check_options(function, self.options, what=what, table="advantage", hidden=("rewards",))
        called(partial(function, torch.zeros(1, 2)), "advantage", self.options)

    def build(self) -> Callable[[Tensor], Tensor]:
        """Return the function with its options: rewards [groups, samples] to advantages."""
        return partial(ADVANTAGES[self.name], **self.options)
