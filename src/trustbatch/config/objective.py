"""[objective] and [advantage]: the choices whose math knows nothing of configurations."""

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from trustbatch.advantages import ADVANTAGES
from trustbatch.objectives import OBJECTIVES, Objective
from trustbatch.utils.options import check_options, find_entry
from trustbatch.utils.tables import Choice, called


class ObjectiveConfig(Choice):
    """[objective]: an objective by name; its options are the fields of its class."""

    kind: ClassVar[str] = "objective"

    name: str = "p3o"

    def check(self) -> None:
        """Build it: the class checks the values of its options."""
        self.build()

    def build(self) -> Objective:
        """Build the objective."""
        make = find_entry(OBJECTIVES, self.name, kind=self.kind)
        check_options(make, self.options, what=f"objective {self.name}", table="objective")
        return called(make, "objective", self.options)

    def resolved(self, *, has_top_logp: bool) -> "ObjectiveConfig":
        """Replace what the objective leaves to the data: whether top log-probs are recorded."""
        before = self.build()
        after = before.resolved(has_top_logp=has_top_logp)
        names = [field.name for field in fields(after)]
        changed = {n: getattr(after, n) for n in names if getattr(after, n) != getattr(before, n)}
        return self.model_copy(update={"options": self.options | changed})


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
