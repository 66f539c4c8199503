"""The math of the policy update: pure functions of packed response tokens.

    objective = build_objective("p3o")
    totals = objective.totals(batch)       # add them over all micro-batches and ranks of a step
    output = objective(batch, totals)      # output.loss, output.metrics

To add an objective, write one file with a subclass of `Objective` and name it in `OBJECTIVES`.
"""

from trustbatch.objectives.base import Objective, ObjectiveOutput, Totals
from trustbatch.objectives.cispo import CISPO
from trustbatch.objectives.dapo import DAPO
from trustbatch.objectives.decoupled import Decoupled
from trustbatch.objectives.dppo import DPPO
from trustbatch.objectives.grpo import GRPO
from trustbatch.objectives.grpo_is import GRPOIS
from trustbatch.objectives.gspo import GSPO
from trustbatch.objectives.m2po import M2PO
from trustbatch.objectives.p3o import P3O
from trustbatch.objectives.pact import PACT
from trustbatch.objectives.reinforce import Reinforce
from trustbatch.objectives.token_batch import TokenBatch
from trustbatch.objectives.two_anchor import TwoAnchor
from trustbatch.objectives.vcpo import VCPO
from trustbatch.objectives.vespo import VESPO

OBJECTIVES: dict[str, type[Objective]] = {
    "reinforce": Reinforce,
    "grpo": GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "decoupled": Decoupled,
    "grpo_is": GRPOIS,
    "dppo": DPPO,
    "m2po": M2PO,
    "vespo": VESPO,
    "vcpo": VCPO,
    "p3o": P3O,
    "two_anchor": TwoAnchor,
    "pact": PACT,
}


def build_objective(name: str, **options: float | str) -> Objective:
    """Build an objective by name; options are the fields of its class."""
    return OBJECTIVES[name](**options)  # type: ignore[arg-type]  # __post_init__ checks each value


__all__ = [
    "OBJECTIVES",
    "Objective",
    "ObjectiveOutput",
    "TokenBatch",
    "Totals",
    "build_objective",
]
