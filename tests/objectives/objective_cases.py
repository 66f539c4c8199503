"""The objectives under test, and the way from the oracle's arrays to the package and back."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from oracle import Array, Result, Tokens
from torch import Tensor

from trustbatch.objectives import ObjectiveOutput, TokenBatch, Totals, build_objective
from trustbatch.objectives.metrics import average_over_steps, merge_metrics

Options = dict[str, float | str]

CASES: list[tuple[str, Options]] = [
    ("reinforce", {}),
    ("grpo", {}),
    ("grpo", {"clip_low": 0.05, "clip_high": 0.5}),
    ("dapo", {}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.1, "clip_high": 0.02}),
    ("cispo", {}),
    ("decoupled", {}),
    ("decoupled", {"clip_low": 0.02, "clip_high": 0.3, "weight_cap": 1.1}),
    ("grpo_is", {}),
    ("grpo_is", {"correction": "token_truncate", "correction_cap": 1.1}),
    ("grpo_is", {"correction": "token_mask", "correction_cap": 1.1, "clip_low": 0.02}),
    ("grpo_is", {"correction": "sequence_truncate", "correction_cap": 1.2, "clip_high": 0.3}),
    ("grpo_is", {"correction": "sequence_mask", "correction_cap": 1.2}),
    ("dppo", {}),
    ("dppo", {"threshold": 0.02, "weight_cap": 1.1}),
    ("dppo", {"divergence": "kl", "threshold": 0.005}),
    ("m2po", {}),
    ("m2po", {"threshold": 0.3}),
    ("vespo", {}),
    ("vespo", {"k_positive": 0.3, "lambda_positive": 0.7, "k_negative": 1.1}),
    ("vcpo", {}),
    ("vcpo", {"weight_cap": 1.1, "base_ess": 0.8}),
    ("p3o", {"kl": "importance"}),
    ("p3o", {"kl": "k3"}),
    ("p3o", {"kl": "top_k"}),
    ("p3o", {"kl": "none"}),
    ("p3o", {"anchor": "sampler", "kl": "importance"}),
    ("p3o", {"anchor": "sampler", "kl": "top_k"}),
    ("two_anchor", {"kl": "importance"}),
    ("two_anchor", {"kl": "k3"}),
    ("two_anchor", {"kl": "top_k"}),
    ("two_anchor", {"anchor": "sampler", "kl": "top_k"}),
    ("pact", {"kl": "importance"}),
    ("pact", {"kl": "k3"}),
    ("pact", {"kl": "top_k"}),
    ("pact", {"anchor": "proximal", "kl": "top_k", "pull": 0.3}),
    ("pact", {"anchor": "model", "kl": "top_k"}),
    ("pact", {"kl": "importance", "pull": "deviation"}),
]
EXTRAS: Options = {"entropy_coef": 0.03, "reference_kl_coef": 0.2}

every_objective = pytest.mark.parametrize(
    ("name", "options"),
    [pytest.param(n, o, id="-".join([n, *(f"{k}={v}" for k, v in o.items())])) for n, o in CASES],
)


def to_batch(tokens: Tokens, dtype: torch.dtype = torch.float64) -> TokenBatch:
    """The same tokens as tensors; logp, top_logp and entropy are leaves that collect gradient."""
    tensors = {}
    for f in fields(tokens):
        value = getattr(tokens, f.name)
        if value is None:
            continue
        if f.name in ("sequence", "source"):
            tensors[f.name] = torch.tensor(value)
        else:
            learned = f.name in ("logp", "top_logp", "entropy")
            tensors[f.name] = torch.tensor(value, dtype=dtype, requires_grad=learned)
    return TokenBatch(**tensors)


def rounded_to_float32(tokens: Tokens) -> Tokens:
    """What the oracle must be given to be comparable with a float32 calculation."""
    arrays = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    return replace(
        tokens,
        **{
            k: v.astype(np.float32).astype(np.float64)
            for k, v in arrays.items()
            if v is not None and k not in ("sequence", "source")
        },
    )


def evaluate_in_parts(
    name: str, parts: list[Tokens], dtype: torch.dtype = torch.float64, **options: float | str
) -> tuple[Result, dict[str, float]]:
    """Summed loss, concatenated gradients and reduced metrics of a step in several parts."""
    objective = build_objective(name, **options)
    batches = [to_batch(part, dtype) for part in parts]
    totals = sum(objective.totals(batch) for batch in batches)
    assert isinstance(totals, Totals)
    outputs = [objective(batch, totals) for batch in batches]
    for output in outputs:
        output.loss.backward()
    result = Result(
        loss=sum(output.loss.item() for output in outputs),
        d_logp=np.concatenate([gradient(batch.logp) for batch in batches]),
        d_entropy=np.concatenate([gradient(batch.entropy) for batch in batches]),
        d_top_logp=np.concatenate([gradient(batch.top_logp) for batch in batches]),
    )
    return result, average_over_steps([merge_metrics(output.metrics for output in outputs)])


def run(
    name: str, tokens: Tokens, dtype: torch.dtype = torch.float64, **options: float | str
) -> tuple[TokenBatch, ObjectiveOutput]:
    """One undivided step, with the gradients left in the batch's leaves."""
    objective = build_objective(name, **options)
    batch = to_batch(tokens, dtype)
    output = objective(batch, objective.totals(batch))
    output.loss.backward()
    return batch, output


def gradient(leaf: Tensor | None) -> Array:
    """A leaf's gradient; zeros where the loss does not depend on it."""
    if leaf is None:
        return np.zeros(0)
    if leaf.grad is None:
        return np.zeros(leaf.shape)
    return leaf.grad.double().numpy()


def finished(output: ObjectiveOutput) -> dict[str, float]:
    """The metrics of one step as numbers."""
    return average_over_steps([output.metrics])
