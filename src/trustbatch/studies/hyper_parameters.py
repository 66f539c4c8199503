"""How many numbers of its own an objective wants to be told."""

from dataclasses import fields

from trustbatch.objectives import OBJECTIVES, Objective


def hyper_parameters(objective: str) -> list[str] | None:
    """Return the names of its numeric options, or nothing where there is no such objective.

    Options that all objectives have (entropy and reference KL, off unless asked for) don't count,
    nor do choices between estimators.
    """
    if objective not in OBJECTIVES:
        return None
    shared = {field.name for field in fields(Objective)}
    return [
        field.name
        for field in fields(OBJECTIVES[objective])
        if field.name not in shared and isinstance(field.default, int | float)
    ]
