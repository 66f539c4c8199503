"""Compiled layers on a GPU: numbers near the eager ones, and no compilation after the first batch.

python -m pytest tests/gpu/test_compile.py
"""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from trustbatch.models.packing.layout import PackedLayout, Segment
from trustbatch.models.policy import Policy
from trustbatch.models.tiny import build_model, build_tokenizer
from trustbatch.training.layers import compile_layers, recompute_layers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def evaluate(policy: Policy, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the gradient of a weight, after a pass without gradient."""
    layout: PackedLayout = PackedLayout.of([Segment(length) for length in lengths]).to(
        policy.device
    )
    at = torch.arange(sum(lengths), device=policy.device)
    ids = 2 + at % 10
    with torch.no_grad():
        policy.hidden_states(ids, layout, at)
    policy.model.zero_grad()
    hidden = policy.hidden_states(ids, layout, at).float()
    (hidden * (1 + at[:, None].sin())).mean().backward()
    return hidden.detach(), policy.model.model.layers[0].mlp.up_proj.weight.grad.clone()


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_compiled_layers_compute_the_same_and_are_compiled_once(is_recomputed: bool) -> None:
    torch._dynamo.reset()
    counters.clear()
    tokenizer = build_tokenizer()
    model = build_model(tokenizer, seed=0).cuda()
    policy = Policy(model, tokenizer, name="tiny", precision="bfloat16")
    compiled = copy.deepcopy(policy)
    compile_layers(compiled.model)
    if is_recomputed:
        recompute_layers(compiled.model)
    num_graphs = []
    for lengths in ([5, 9, 17], [30, 2], [64], [7, 7, 7, 7, 7], [1, 250], [2100], [2500, 2100]):
        hidden, gradient = evaluate(policy, lengths)
        found_hidden, found_gradient = evaluate(compiled, lengths)
        # bfloat16 has 8 bits: both are as far from the exact numbers
        assert float((found_hidden - hidden).norm() / hidden.norm()) < 0.02
        assert float((found_gradient - gradient).norm() / gradient.norm()) < 0.05
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[0] <= 3  # one with gradient, one without
    assert num_graphs[-1] == num_graphs[1], num_graphs
