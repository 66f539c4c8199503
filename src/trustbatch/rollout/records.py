"""Rollouts as JSON records from which they can be restored, for checkpoints."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trustbatch.types import (
    Completion,
    FinishReason,
    Grade,
    GradeStatus,
    Prompt,
    Provenance,
    Role,
    RolloutGroup,
    Turn,
)

NESTED = ("provenance", "turns", "failure")
"""fields of a completion that are objects"""


def group_to_record(group: RolloutGroup) -> dict[str, Any]:
    """Return JSON values from which the group can be restored bit for bit.

    A float32 written as a decimal double and read back is the same float32.
    """
    return {
        "prompt": asdict(group.prompt),
        "prompt_token_ids": list(group.prompt_token_ids),
        "completions": [_completion_to_record(completion) for completion in group.completions],
        "grades": [asdict(grade) for grade in group.grades],
    }


def group_from_record(record: dict[str, Any]) -> RolloutGroup:
    """Restore what `group_to_record` wrote."""
    prompt = record["prompt"]
    return RolloutGroup(
        prompt=Prompt(**{**prompt, "history": tuple(prompt.get("history", ()))}),
        prompt_token_ids=tuple(record["prompt_token_ids"]),
        completions=tuple(_completion_from_record(item) for item in record["completions"]),
        grades=tuple(_grade_from_record(grade) for grade in record["grades"]),
    )


def _grade_from_record(record: dict[str, Any]) -> Grade:
    return Grade(**{**record, "status": GradeStatus(record["status"])})


def _completion_to_record(completion: Completion) -> dict[str, Any]:
    record = {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name in Completion.__slots__
        if name not in NESTED and (value := getattr(completion, name)) is not None
    }
    record |= {
        "provenance": asdict(completion.provenance),
        "turns": [turn.to_record() for turn in completion.turns],
    }
    failure = completion.failure
    return record if failure is None else record | {"failure": asdict(failure)}


def _completion_from_record(record: dict[str, Any]) -> Completion:
    top_ids, top_logp = record.get("top_token_ids"), record.get("behavior_top_logp")
    anchor_logp, anchor_top = record.get("anchor_logp"), record.get("anchor_top_logp")
    sampled, versions = record.get("sampled"), record.get("versions")
    version_logp, failure = record.get("version_logp"), record.get("failure")
    return Completion(
        prompt_id=record["prompt_id"],
        sample=record["sample"],
        token_ids=torch.tensor(record["token_ids"], dtype=torch.int64),
        behavior_logp=torch.tensor(record["behavior_logp"], dtype=torch.float32),
        top_token_ids=None if top_ids is None else torch.tensor(top_ids, dtype=torch.int64),
        behavior_top_logp=None if top_logp is None else torch.tensor(top_logp),
        anchor_logp=None if anchor_logp is None else torch.tensor(anchor_logp),
        anchor_top_logp=None if anchor_top is None else torch.tensor(anchor_top),
        finish_reason=FinishReason(record["finish_reason"]),
        provenance=Provenance(**record["provenance"]),
        text=record["text"],
        sampled=None if sampled is None else torch.tensor(sampled, dtype=torch.bool),
        turns=tuple(
            Turn(**{**turn, "role": Role(turn["role"])}) for turn in record.get("turns", ())
        ),
        versions=None if versions is None else torch.tensor(versions, dtype=torch.int32),
        version_logp=None if version_logp is None else torch.tensor(version_logp),
        failure=None if failure is None else _grade_from_record(failure),
    )
