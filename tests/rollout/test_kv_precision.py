"""FP8 keys and values in the native engine, against the model's own forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.rollout.test_native_engine import make_requests, recomputed
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trustbatch.models.policy import Policy
from trustbatch.rollout.native.engine import NativeEngine


@contextmanager
def keys_and_values_in_e4m3(policy: Policy) -> Iterator[None]:
    """Round what the model's own attention gets, after its rotary embedding."""
    name = policy.model.config._attn_implementation
    attention = ALL_ATTENTION_FUNCTIONS[name]

    def rounded(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any):
        parts = []
        for part in (key, value):
            scale = (part.abs().amax(-1, keepdim=True) / 448.0).clamp_min(1e-30)
            parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
        return attention(module, query, *parts, *rest, **options)

    ALL_ATTENTION_FUNCTIONS[name] = rounded
    yield
    del ALL_ATTENTION_FUNCTIONS[name]


@pytest.mark.parametrize("max_sequences", [64, 3])
def test_fp8_keys_and_values_record_the_rounded_distribution(
    policy: Policy, max_sequences: int
) -> None:
    """A token's log-prob is the same whether its context was prefilled or sampled."""
    requests = make_requests(policy, num_samples=4, temperature=1.2)
    engine = NativeEngine(policy, seed=0, kv_precision="fp8", max_sequences=max_sequences)
    largest = 0.0
    for number, completion in enumerate(engine.generate(requests)):
        taken = completion.token_ids[:, None]
        exact = recomputed(policy, requests[number // 4], completion).gather(-1, taken)
        with keys_and_values_in_e4m3(policy):
            rounded = recomputed(policy, requests[number // 4], completion).gather(-1, taken)
        # two orders of summation can fall on two sides of a rounding: a few tokens differ more
        torch.testing.assert_close(completion.behavior_logp, rounded.squeeze(-1), rtol=0, atol=0.02)
        largest = max(largest, float((completion.behavior_logp - exact.squeeze(-1)).abs().max()))
        provenance = completion.provenance
        assert (provenance.precision, provenance.kv_precision) == ("float32", "fp8")
    assert largest > 0.02
