"""Sequences to train on, made by hand."""

import torch

from trustbatch.types import Completion, FinishReason, Provenance, TrainSequence

PROVENANCE = Provenance(
    policy="p",
    version=0,
    engine="native",
    precision="float32",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    logprob_mode="processed",
)


def make_completion(token_ids: list[int], *, sample: int = 0, top: int = 0) -> Completion:
    tokens = torch.tensor(token_ids)
    return Completion(
        prompt_id="p",
        sample=sample,
        token_ids=tokens,
        behavior_logp=-tokens.float() / 10,
        top_token_ids=tokens[:, None] + torch.arange(top) if top else None,
        behavior_top_logp=-tokens[:, None].float() - torch.arange(top) if top else None,
        finish_reason=FinishReason.STOP,
        provenance=PROVENANCE,
        text="",
    )


def make_sequence(prompt: list[int], response: list[int], advantage: float) -> TrainSequence:
    return TrainSequence(
        prompt_token_ids=tuple(prompt),
        completion=make_completion(response, top=2),
        advantage=advantage,
    )
